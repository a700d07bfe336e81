//! SAMPLE records: encoding and decoding.

use super::cursor::Cursor;
use super::id::SampleId;
use super::read::ReadFormatValues;
use super::{
    DecodeError, EncodeRecord, HEADER_SIZE, RecordFormat, RecordMisc, RecordSink, RecordType, put_header,
    put_u32s, put_u64,
};
use crate::attr::{REGS_USER_LEN, SampleType};

/// A list of 64-bit words in a sample, such as a call chain.
#[derive(Clone, Copy, Debug)]
pub enum SampleWords<'a> {
    /// Words to be encoded.
    List(&'a [u64]),
    /// Words as encoded in a record, 8 bytes each.
    Encoded(&'a [u8]),
}

impl Default for SampleWords<'_> {
    fn default() -> Self {
        Self::List(&[])
    }
}

impl<'a> SampleWords<'a> {
    /// Returns the number of words.
    pub fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Encoded(bytes) => bytes.len() / 8,
        }
    }

    /// Returns `true` if there are no words.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns an iterator over the words.
    pub fn iter(&self) -> impl Iterator<Item = u64> + 'a {
        let (list, bytes) = match *self {
            Self::List(list) => (list, [].as_slice()),
            Self::Encoded(bytes) => ([].as_slice(), bytes),
        };
        let (words, _) = bytes.as_chunks();
        list.iter()
            .copied()
            .chain(words.iter().map(|&word| u64::from_ne_bytes(word)))
    }
}

impl PartialEq for SampleWords<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

/// A SAMPLE record. A field that the event's sample type lacks is not encoded, and is 0 or empty
/// when decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample<'a> {
    /// CPU mode of the sample, and whether `ip` has no skid.
    pub misc: RecordMisc,
    /// Instruction pointer at the time of the sample.
    pub ip: u64,
    /// Process ID of the VM as the operator sees it.
    pub pid: u32,
    /// Thread ID of the vCPU.
    pub tid: u32,
    /// Time of the sample, in nanoseconds.
    pub time_ns: u64,
    /// Data address that the event supplies.
    pub addr: u64,
    /// ID of the opened event, which is encoded in the ID field and in the IDENTIFIER field.
    pub id: u64,
    /// ID of the event that took the sample. For an inherited event, this is the ID of the child,
    /// and `id` is the ID of its parent.
    pub stream_id: u64,
    /// Number of the vCPU.
    pub cpu: u32,
    /// Period of the sample: number of counts since the previous sample.
    pub period: u64,
    /// Counts of the event or its group at the time of the sample.
    pub read: ReadFormatValues<'a>,
    /// Call chain, innermost address first.
    pub callchain: SampleWords<'a>,
    /// Raw data of the sample. The encoder appends zeros until the data and its 4-byte size
    /// together are a multiple of 8 bytes.
    pub raw: &'a [u8],
    /// Branch stack, newest branch first, with three words per branch.
    pub branches: SampleWords<'a>,
    /// User-mode registers and user stack.
    pub user: UserRegsAndStack<'a>,
}

/// User-mode registers and the top of the user stack in a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UserRegsAndStack<'a> {
    /// Value of `PERF_SAMPLE_REGS_ABI_*`: 1 for 32-bit registers, 2 for 64-bit registers, or 0 if
    /// there are none because the vCPU has no user context.
    pub abi: u64,
    /// Registers of [`REGS_USER`](crate::attr::REGS_USER), in the order of that mask's bits.
    pub registers: SampleWords<'a>,
    /// Stack bytes, starting at the stack pointer. The encoder requires a multiple of 8 bytes.
    pub stack: &'a [u8],
}

/// Number of words of each branch in a branch stack.
const BRANCH_WORDS: usize = 3;

/// Sample types whose fields have a fixed size of 8 bytes.
const FIXED: SampleType = SampleType::IP
    .union(SampleType::TID)
    .union(SampleType::TIME)
    .union(SampleType::ADDR)
    .union(SampleType::ID)
    .union(SampleType::STREAM_ID)
    .union(SampleType::CPU)
    .union(SampleType::PERIOD)
    .union(SampleType::IDENTIFIER);

/// Returns the size of a RAW field with `len` bytes of data, in bytes.
fn raw_size(len: usize) -> usize {
    (4 + len).next_multiple_of(8)
}

/// Sample types whose fields [`UserRegsAndStack`] contains.
const USER: SampleType = SampleType::REGS_USER.union(SampleType::STACK_USER);
/// Sample types that few events request. Their fields are the last ones of a sample.
const RARE: SampleType = USER.union(SampleType::BRANCH_STACK);

// Not inlined into the code for all samples, because few samples have these fields.
impl UserRegsAndStack<'_> {
    #[inline(never)]
    fn size(&self, fields: SampleType) -> usize {
        let mut size = 0;
        if fields.contains(SampleType::REGS_USER) {
            size += 8 + 8 * self.registers.len();
        }
        if fields.contains(SampleType::STACK_USER) {
            size += stack_size(self.stack.len());
        }
        size
    }

    #[inline(never)]
    fn encode(&self, fields: SampleType, out: &mut impl RecordSink) {
        if fields.contains(SampleType::REGS_USER) {
            put_u64(out, self.abi);
            for register in self.registers.iter() {
                put_u64(out, register);
            }
        }
        if fields.contains(SampleType::STACK_USER) {
            let len = self.stack.len() / 8 * 8;
            put_u64(out, len as u64);
            if len > 0 {
                out.put(&self.stack[..len]);
                // The dynamic stack size follows the stack bytes. It equals the stack size, because
                // no padding is written.
                put_u64(out, len as u64);
            }
        }
    }
}

/// Returns the size of a STACK_USER field with `len` bytes of stack, in bytes.
fn stack_size(len: usize) -> usize {
    match len / 8 {
        0 => 8,
        words => 16 + 8 * words,
    }
}

impl Sample<'_> {
    /// Returns the size of the sample's fields in [`RARE`], in bytes.
    #[inline(never)]
    fn rare_size(&self, fields: SampleType) -> usize {
        let mut size = 0;
        if fields.contains(SampleType::BRANCH_STACK) {
            size += 8 + 8 * self.branches.len();
        }
        if fields.intersects(USER) {
            size += self.user.size(fields);
        }
        size
    }

    /// Encodes the sample's fields in [`RARE`], which are the last ones of the record.
    #[inline(never)]
    fn encode_rare(&self, fields: SampleType, out: &mut impl RecordSink) {
        if fields.contains(SampleType::BRANCH_STACK) {
            put_u64(out, (self.branches.len() / BRANCH_WORDS) as u64);
            for word in self.branches.iter() {
                put_u64(out, word);
            }
        }
        if fields.intersects(USER) {
            self.user.encode(fields, out);
        }
    }
}

impl EncodeRecord for Sample<'_> {
    const IS_SAMPLE: bool = true;

    #[inline]
    fn size(&self, format: RecordFormat) -> usize {
        let fields = format.sample_type;
        let mut size = HEADER_SIZE + 8 * (fields & FIXED).bits().count_ones() as usize;
        if fields.contains(SampleType::READ) {
            size += self.read.size(format.read_format);
        }
        if fields.contains(SampleType::CALLCHAIN) {
            size += 8 + 8 * self.callchain.len();
        }
        if fields.contains(SampleType::RAW) {
            size += raw_size(self.raw.len());
        }
        if fields.intersects(RARE) {
            size += self.rare_size(fields);
        }
        size
    }

    #[inline]
    fn encode(&self, format: RecordFormat, out: &mut impl RecordSink) {
        let fields = format.sample_type;
        put_header(out, RecordType::SAMPLE, self.misc, self.size(format));
        // The order of the fields in the ABI differs from the order of the sample type bits.
        if fields.contains(SampleType::IDENTIFIER) {
            put_u64(out, self.id);
        }
        if fields.contains(SampleType::IP) {
            put_u64(out, self.ip);
        }
        if fields.contains(SampleType::TID) {
            put_u32s(out, self.pid, self.tid);
        }
        if fields.contains(SampleType::TIME) {
            put_u64(out, self.time_ns);
        }
        if fields.contains(SampleType::ADDR) {
            put_u64(out, self.addr);
        }
        if fields.contains(SampleType::ID) {
            put_u64(out, self.id);
        }
        if fields.contains(SampleType::STREAM_ID) {
            put_u64(out, self.stream_id);
        }
        if fields.contains(SampleType::CPU) {
            put_u32s(out, self.cpu, 0);
        }
        if fields.contains(SampleType::PERIOD) {
            put_u64(out, self.period);
        }
        if fields.contains(SampleType::READ) {
            self.read.encode(format.read_format, out);
        }
        if fields.contains(SampleType::CALLCHAIN) {
            put_u64(out, self.callchain.len() as u64);
            for ip in self.callchain.iter() {
                put_u64(out, ip);
            }
        }
        if fields.contains(SampleType::RAW) {
            let size = raw_size(self.raw.len()) - 4;
            out.put(&u32::try_from(size).unwrap_or(u32::MAX).to_ne_bytes());
            out.put(self.raw);
            // At most 7 bytes, because the size is the next multiple of 8.
            out.put(&[0; 8][..size - self.raw.len()]);
        }
        if fields.intersects(RARE) {
            self.encode_rare(fields, out);
        }
    }

    #[inline]
    fn sample_id(&self) -> SampleId {
        SampleId {
            pid: self.pid,
            tid: self.tid,
            time_ns: self.time_ns,
            id: self.id,
            stream_id: self.stream_id,
            cpu: self.cpu,
        }
    }
}

impl<'a> Sample<'a> {
    #[inline]
    pub(super) fn decode(
        body: &mut Cursor<'a>,
        misc: RecordMisc,
        format: RecordFormat,
    ) -> Result<Self, DecodeError> {
        let fields = format.sample_type;
        let mut sample = Self {
            misc,
            ..Self::default()
        };
        if fields.contains(SampleType::IDENTIFIER) {
            sample.id = body.u64("identifier")?;
        }
        if fields.contains(SampleType::IP) {
            sample.ip = body.u64("ip")?;
        }
        if fields.contains(SampleType::TID) {
            sample.pid = body.u32("pid")?;
            sample.tid = body.u32("tid")?;
        }
        if fields.contains(SampleType::TIME) {
            sample.time_ns = body.u64("time")?;
        }
        if fields.contains(SampleType::ADDR) {
            sample.addr = body.u64("addr")?;
        }
        if fields.contains(SampleType::ID) {
            sample.id = body.u64("id")?;
        }
        if fields.contains(SampleType::STREAM_ID) {
            sample.stream_id = body.u64("stream id")?;
        }
        if fields.contains(SampleType::CPU) {
            sample.cpu = body.u32("cpu")?;
            body.u32("cpu")?;
        }
        if fields.contains(SampleType::PERIOD) {
            sample.period = body.u64("period")?;
        }
        if fields.contains(SampleType::READ) {
            sample.read = ReadFormatValues::decode(body, format.read_format)?;
        }
        if fields.contains(SampleType::CALLCHAIN) {
            let len = body.u64("call chain length")?;
            sample.callchain = SampleWords::Encoded(body.many(len, 8, "call chain")?);
        }
        if fields.contains(SampleType::RAW) {
            let len = body.u32("raw size")?;
            sample.raw = body.many(u64::from(len), 1, "raw data")?;
        }
        if fields.intersects(RARE) {
            sample.decode_rare(fields, body)?;
        }
        match body.rest().len() {
            0 => Ok(sample),
            bytes => Err(DecodeError::Trailing { bytes }),
        }
    }

    /// Decodes the fields that [`Sample::encode_rare`] encodes.
    fn decode_rare(&mut self, fields: SampleType, body: &mut Cursor<'a>) -> Result<(), DecodeError> {
        if fields.contains(SampleType::BRANCH_STACK) {
            let len = body.u64("branch stack length")?;
            let words = body.many(len, 8 * BRANCH_WORDS, "branch stack")?;
            self.branches = SampleWords::Encoded(words);
        }
        if fields.contains(SampleType::REGS_USER) {
            self.user.abi = body.u64("ABI of registers")?;
            let count = if self.user.abi == 0 {
                0
            } else {
                REGS_USER_LEN as u64
            };
            self.user.registers = SampleWords::Encoded(body.many(count, 8, "registers")?);
        }
        if fields.contains(SampleType::STACK_USER) {
            let len = body.u64("stack size")?;
            if len > 0 {
                let stack = body.many(len, 1, "stack")?;
                let dynamic = body.u64("size of the stack's part")?;
                let dynamic = usize::try_from(dynamic).unwrap_or(usize::MAX);
                self.user.stack = &stack[..dynamic.min(stack.len())];
            }
        }
        Ok(())
    }
}
