//! Writes `perf.data`, the file format of Linux's `perf`
//! (`tools/perf/Documentation/perf.data-file-format.txt`).
//!
//! A file consists of a header, event IDs, attributes, records and feature sections. They are
//! followed by data that `perf` ignores: a section with symbols ([`super::ProfileSymbol`], gzipped
//! JSON) and a footer with the offset of that section. Records describe the guest: pid and tid are
//! the guest's, and the CPU is the vCPU. The CPU mode in a record's header and the name of the
//! kernel depend on the [`ProfilePerspective`]:
//!
//! | form | CPU modes | kernel | readers |
//! |---|---|---|---|
//! | [`ProfilePerspective::InGuest`] | KERNEL, USER | `[kernel.kallsyms]` | any reader of `perf.data` |
//! | [`ProfilePerspective::AsHost`] | GUEST_KERNEL, GUEST_USER | `[guest.kernel.kallsyms]` | `perf kvm --host --guest … report`, `perf script` |
//!
//! A recording may end at any moment. The header is therefore written first, and
//! [`PerfDataWriter::checkpoint`] updates the length of the records in it. A truncated file is
//! readable up to the last checkpoint, but lacks the features. Event names are therefore also
//! stored in separate records.
//!
//! CR3, the privilege level and the reason why unwinding ended have no sample field. They are
//! stored in the raw data of a sample ([`PerfDataRawSample`]).

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;

use perf_core::pmu::host::{ThreadSwitch, ThreadSwitchKind};
use zerocopy::IntoBytes;

use super::context::{CONTEXT_KERNEL, CONTEXT_USER};
use super::{
    EventSamplingRate, FileMapping, KernelTextMap, NO_PID, Profile, ProfileMetadata, ProfilePerspective,
    ProfileSample, ProfileSymbol, SampledEventInfo, TaskName,
};
use crate::sample::PerfDataRawSample;
use crate::unwind::{CONTEXT_GUEST_KERNEL, CONTEXT_GUEST_USER};
use kernel_images::build_id::{self, BuildId};

const MAGIC: &[u8; 8] = b"PERFILE2";
const HEADER_SIZE: u64 = 104;
/// Size of an attribute (`PERF_ATTR_SIZE_VER7`), in bytes. In the attribute section, each attribute
/// is followed by the offset and the size of its event IDs.
const ATTR_SIZE: u32 = 128;
const ATTR_ENTRY_SIZE: u64 = ATTR_SIZE as u64 + 16;

/// Last 8 bytes of a file with saved symbols. The offset and the length of the symbol section (8
/// bytes each) precede the magic.
pub const FOOTER_MAGIC: &[u8; 8] = b"PVSYMS01";

mod sample_type {
    pub const IP: u64 = 1 << 0;
    pub const TID: u64 = 1 << 1;
    pub const TIME: u64 = 1 << 2;
    pub const CALLCHAIN: u64 = 1 << 5;
    pub const CPU: u64 = 1 << 7;
    pub const PERIOD: u64 = 1 << 8;
    pub const RAW: u64 = 1 << 10;
    pub const BRANCH_STACK: u64 = 1 << 11;
    pub const IDENTIFIER: u64 = 1 << 16;
    /// Sample fields (`PERF_SAMPLE_*`) that every sample contains.
    pub const COMMON: u64 = IP | TID | TIME | CPU | PERIOD | RAW | IDENTIFIER;
}

mod attr_flag {
    pub const MMAP: u64 = 1 << 8;
    pub const COMM: u64 = 1 << 9;
    pub const FREQ: u64 = 1 << 10;
    pub const TASK: u64 = 1 << 13;
    pub const SAMPLE_ID_ALL: u64 = 1 << 18;
    pub const EXCLUDE_HOST: u64 = 1 << 19;
    pub const MMAP2: u64 = 1 << 23;
    pub const USE_CLOCKID: u64 = 1 << 25;
    pub const CONTEXT_SWITCH: u64 = 1 << 26;
}

mod record {
    pub const MMAP: u32 = 1;
    pub const LOST: u32 = 2;
    pub const COMM: u32 = 3;
    pub const FORK: u32 = 7;
    pub const SAMPLE: u32 = 9;
    pub const MMAP2: u32 = 10;
    pub const SWITCH: u32 = 14;
    pub const BUILD_ID: u32 = 67;
    pub const EVENT_UPDATE: u32 = 78;
}

/// `PERF_EVENT_UPDATE__NAME`: the EVENT_UPDATE record contains the name of the event.
pub(super) const UPDATES_NAME: u64 = 2;

/// CPU modes in record headers (`PERF_RECORD_MISC_*`).
const MISC_KERNEL: u16 = 1;
const MISC_USER: u16 = 2;
const MISC_GUEST_KERNEL: u16 = 4;
const MISC_GUEST_USER: u16 = 5;
/// Flags of a SWITCH record: the thread was switched out, and the thread was preempted.
const MISC_SWITCH_OUT: u16 = 1 << 13;
const MISC_SWITCH_OUT_PREEMPT: u16 = 1 << 14;
/// Flag of an MMAP2 record that contains a build ID instead of device and inode.
pub(super) const MISC_MMAP_BUILD_ID: u16 = 1 << 14;
/// Flag of a build-ID record that also contains the length of the build ID.
const MISC_BUILD_ID_SIZE: u16 = 1 << 15;

impl ProfilePerspective {
    fn kernel_mode(self) -> u16 {
        match self {
            Self::InGuest => MISC_KERNEL,
            Self::AsHost => MISC_GUEST_KERNEL,
        }
    }

    fn user_mode(self) -> u16 {
        match self {
            Self::InGuest => MISC_USER,
            Self::AsHost => MISC_GUEST_USER,
        }
    }
}

/// Name that `perf` uses for a kernel with symbols in the format of /proc/kallsyms.
pub(super) const KERNEL_NAME: &str = "[kernel.kallsyms]";
/// Name that `perf` on a host uses for the kernel of a guest.
pub(super) const GUEST_KERNEL_NAME: &str = "[guest.kernel.kallsyms]";
/// Process ID that `perf` records for the kernel.
const KERNEL_PID: u32 = u32::MAX;
/// Clock ID of `CLOCK_MONOTONIC`, and offset of the clock ID in an attribute.
const MONOTONIC: u32 = 1;
const ATTR_CLOCKID: usize = 92;
/// Offset of `branch_sample_type` in a `perf_event_attr`, in bytes.
pub(super) const ATTR_BRANCH_FILTER: usize = 72;

mod feature {
    pub const BUILD_ID: u32 = 2;
    pub const HOSTNAME: u32 = 3;
    pub const OSRELEASE: u32 = 4;
    pub const VERSION: u32 = 5;
    pub const ARCH: u32 = 6;
    pub const NRCPUS: u32 = 7;
    pub const CMDLINE: u32 = 11;
    pub const EVENT_DESC: u32 = 12;
    pub const BRANCH_STACK: u32 = 15;
    pub const SAMPLE_TIME: u32 = 21;
    pub const CLOCKID: u32 = 23;
    pub const CLOCK_DATA: u32 = 29;
}

/// Maximum number of build IDs of programs in one file.
const MAX_IDS: usize = 1 << 14;
/// Maximum length of a string in the file, in bytes. Longer strings are truncated.
const MAX_STRING: usize = 4096;
/// Alignment of strings in feature sections, in bytes.
const NAME_ALIGN: usize = 64;

/// Writer of a `perf.data` file, record by record. If the file is truncated, the records before the
/// last [`PerfDataWriter::checkpoint`] are still readable.
pub struct PerfDataWriter<W: Write + Seek> {
    out: W,
    meta: ProfileMetadata,
    events: Vec<SampledEventInfo>,
    data_start: u64,
    data_len: u64,
    times: Option<(u64, u64)>,
    samples: u64,
    /// Number of record bytes and number of samples at the last checkpoint.
    kept: (u64, u64),
    /// Threads for which a fork record has been written to the file.
    threads: HashSet<u32>,
    kernel_id: Option<BuildId>,
    /// Build IDs of the guest's programs and libraries, by path.
    ids: BTreeMap<String, BuildId>,
    buf: Vec<u8>,
}

impl PerfDataWriter<BufWriter<File>> {
    /// Truncates the file to its last complete record after a failed write, for example on a full
    /// disk. Returns the number of samples in the file, which must also be open for reading.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, truncated or updated.
    pub fn truncate_to_records(self) -> io::Result<u64> {
        let events = self.events.len() as u64;
        let (bytes, mut samples) = self.kept;
        let mut end = self.data_start + bytes;
        // Discard the unwritten contents of the buffer.
        let (file, _) = self.out.into_parts();
        let length = file.metadata()?.len();
        while end + 8 <= length {
            let mut head = [0; 8];
            file.read_exact_at(&mut head, end)?;
            let size = u64::from(u16::from_le_bytes([head[6], head[7]]));
            // A hole in the file reads as zeros, which do not form a record either.
            if size < 8 || end + size > length {
                break;
            }
            samples += u64::from(head[..4] == record::SAMPLE.to_le_bytes());
            end += size;
        }
        file.set_len(end)?;
        let header = header(events, self.data_start, end - self.data_start, [0; 4]);
        file.write_all_at(&header, 0)?;
        Ok(samples)
    }
}

impl<W: Write + Seek> PerfDataWriter<W> {
    /// Starts a `perf.data` file at position 0 of `out`: writes its header, event IDs, attributes
    /// and event names.
    pub fn new(mut out: W, meta: ProfileMetadata, events: Vec<SampledEventInfo>) -> io::Result<Self> {
        let ids = 8 * events.len() as u64;
        let data_start = HEADER_SIZE + ids + ATTR_ENTRY_SIZE * events.len() as u64;
        let mut buf = header(events.len() as u64, data_start, 0, [0; 4]);
        for e in &events {
            buf.extend_from_slice(&e.id.to_le_bytes());
        }
        for (i, e) in events.iter().enumerate() {
            put_attr(&mut buf, e, &meta);
            buf.extend_from_slice(&(HEADER_SIZE + 8 * i as u64).to_le_bytes());
            buf.extend_from_slice(&8u64.to_le_bytes());
        }
        out.write_all(&buf)?;
        let names: Vec<(u64, String)> = events.iter().map(|e| (e.id, e.name.clone())).collect();
        let mut writer = Self {
            out,
            meta,
            events,
            data_start,
            data_len: 0,
            times: None,
            samples: 0,
            kept: (0, 0),
            threads: HashSet::new(),
            kernel_id: None,
            ids: BTreeMap::new(),
            buf,
        };
        for (id, name) in names {
            writer.record(record::EVENT_UPDATE, 0, |b| {
                put64(b, UPDATES_NAME);
                put64(b, id);
                put_padded(b, &name);
            })?;
        }
        Ok(writer)
    }

    /// Writes the current length of the records into the header, so that these records are readable
    /// even if nothing more is written to the file.
    ///
    /// # Errors
    /// Returns an error if the write fails, for example on a full disk. The file then remains
    /// readable up to the previous checkpoint.
    pub fn checkpoint(&mut self) -> io::Result<()> {
        if self.kept.0 == self.data_len {
            return Ok(());
        }
        self.out.flush()?;
        self.write_header(self.data_len, [0; 4])?;
        self.out.seek(SeekFrom::Start(self.data_start + self.data_len))?;
        self.kept = (self.data_len, self.samples);
        Ok(())
    }

    fn write_header(&mut self, data_len: u64, features: [u64; 4]) -> io::Result<()> {
        let header = header(self.events.len() as u64, self.data_start, data_len, features);
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&header)?;
        self.out.flush()
    }

    /// Writes the location of the guest kernel. Must be called before the first sample is written,
    /// because `perf` needs the location to resolve addresses.
    pub fn kernel(&mut self, k: &KernelTextMap) -> io::Result<()> {
        let form = self.meta.form;
        // perf identifies guests by pid, and `--guestkallsyms` applies to pid 0.
        let (name, pid) = match form {
            ProfilePerspective::InGuest => (KERNEL_NAME, KERNEL_PID),
            ProfilePerspective::AsHost => (GUEST_KERNEL_NAME, 0),
        };
        if form == ProfilePerspective::InGuest
            && let Some(id) = k.build_id
        {
            // Also write the build ID as a record now, because a truncated file has no features.
            // Without a build ID, perf resolves kernel addresses with the host's symbols.
            self.kernel_id = Some(id);
            let (misc, body) = build_id_record(MISC_KERNEL, KERNEL_NAME, id);
            self.record(record::BUILD_ID, misc, |b| b.extend_from_slice(&body))?;
        }
        let name = format!("{name}{}", k.reference_symbol);
        self.record(record::MMAP, form.kernel_mode(), |b| {
            put32(b, pid);
            put32(b, 0);
            put64(b, k.start);
            put64(b, k.len);
            put64(b, k.reference_address);
            put_padded(b, &name);
            put_sample_id(b, 0, 0, 0);
        })
    }

    /// Writes a record with the name of a guest task.
    pub fn task(&mut self, t: &TaskName) -> io::Result<()> {
        let comm: String = t.comm.chars().take(15).collect();
        let form = self.meta.form;
        // The fork record assigns a thread to its process.
        if form == ProfilePerspective::InGuest && t.tid != t.pid && self.threads.insert(t.tid) {
            self.record(record::FORK, 0, |b| {
                [t.pid, t.pid, t.tid, t.pid]
                    .into_iter()
                    .for_each(|id| put32(b, id));
                put64(b, t.time_ns);
                put_sample_id(b, t.pid, t.tid, t.time_ns);
            })?;
        }
        self.record(record::COMM, form.user_mode(), |b| {
            put32(b, t.pid);
            put32(b, t.tid);
            put_padded(b, &comm);
            put_sample_id(b, t.pid, t.tid, t.time_ns);
        })
    }

    /// Writes a record of a file mapping of a guest process.
    pub fn mapping(&mut self, m: &FileMapping) -> io::Result<()> {
        const PROT_READ_EXEC: u32 = 5;
        const MAP_PRIVATE: u32 = 2;
        let form = self.meta.form;
        let id = m.build_id.filter(|_| form == ProfilePerspective::InGuest);
        if let Some(id) = id {
            self.record_build_id(&m.path, id);
        }
        let misc = form.user_mode() | id.map_or(0, |_| MISC_MMAP_BUILD_ID);
        self.record(record::MMAP2, misc, |b| {
            put32(b, m.pid);
            put32(b, m.pid);
            put64(b, m.start);
            put64(b, m.len);
            put64(b, m.file_offset);
            match id {
                Some(id) => put_build_id(b, id),
                // Device, inode and generation are not read from the guest.
                None => (0..3).for_each(|_| put64(b, 0)),
            }
            put32(b, PROT_READ_EXEC);
            put32(b, MAP_PRIVATE);
            put_padded(b, &m.path);
            put_sample_id(b, m.pid, m.pid, m.time_ns);
        })
    }

    /// Adds the build ID of a file in the guest to the build-ID list at the end of the file.
    pub fn record_build_id(&mut self, path: &str, id: BuildId) {
        if !self.ids.contains_key(path) && self.ids.len() < MAX_IDS {
            self.ids.insert(path.to_owned(), id);
        }
    }

    /// Writes a sample. A sample without a call chain gets a chain of its own address if its event
    /// has chains, because `perf script` prints the chain instead of the address.
    #[expect(clippy::cast_possible_truncation, reason = "the size of a small struct")]
    pub fn sample(&mut self, s: &ProfileSample<'_>) -> io::Result<()> {
        let misc = if s.cpl == 3 {
            self.meta.form.user_mode()
        } else {
            self.meta.form.kernel_mode()
        };
        self.times = Some(match self.times {
            None => (s.time_ns, s.time_ns),
            Some((first, last)) => (first.min(s.time_ns), last.max(s.time_ns)),
        });
        self.samples += 1;
        let event = self.events.iter().find(|event| event.id == s.event_id);
        let has_chain = event.is_none_or(|event| event.has_chains);
        let has_branches = event.is_some_and(|event| event.branch_filter != 0);
        self.record(record::SAMPLE, misc, |b| {
            put64(b, s.event_id);
            put64(b, s.ip);
            put32(b, s.pid);
            put32(b, s.tid);
            put64(b, s.time_ns);
            put32(b, s.vcpu);
            put32(b, 0);
            put64(b, s.period);
            if has_chain {
                let only_address = [own_marker(s), s.ip];
                let chain = match s.chain {
                    [] => &only_address[..],
                    chain => &chain[..chain.len().min(MAX_CHAIN)],
                };
                put64(b, chain.len() as u64);
                for &frame in chain {
                    put64(b, marker_for_perf(frame));
                }
            }
            // Together with its length word, the raw data must be a multiple of 8 bytes.
            put32(b, size_of::<PerfDataRawSample>() as u32);
            b.extend_from_slice(PerfDataRawSample::new(s.cr3, s.cpl, s.ends).as_bytes());
            if has_branches {
                let branches = &s.branches[..s.branches.len().min(MAX_BRANCHES)];
                put64(b, branches.len() as u64);
                for branch in branches {
                    [branch.from, branch.to, branch.flags]
                        .into_iter()
                        .for_each(|word| put64(b, word));
                }
            }
        })
    }

    /// Writes a record that `count` samples of the event `event_id` were lost before `time_ns`.
    pub fn write_lost(&mut self, event_id: u64, count: u64, time_ns: u64) -> io::Result<()> {
        self.record(record::LOST, self.meta.form.kernel_mode(), |b| {
            put64(b, event_id);
            put64(b, count);
            put_sample_id(b, u32::MAX, u32::MAX, time_ns);
        })
    }

    /// Writes a record of a host context switch of the vCPU thread `vcpu`.
    pub fn thread_switch(&mut self, vcpu: u32, switch: ThreadSwitch) -> io::Result<()> {
        let misc = match switch.kind {
            ThreadSwitchKind::In => 0,
            ThreadSwitchKind::Blocked => MISC_SWITCH_OUT,
            ThreadSwitchKind::Preempted => MISC_SWITCH_OUT | MISC_SWITCH_OUT_PREEMPT,
        };
        self.record(record::SWITCH, misc, |b| {
            put32(b, NO_PID);
            put32(b, NO_PID);
            put64(b, switch.time_ns);
            put64(b, u64::from(vcpu));
            put64(b, 0);
        })
    }

    /// Returns the number of samples written so far.
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Returns the number of record bytes written so far.
    pub fn bytes(&self) -> u64 {
        self.data_len
    }

    fn record(&mut self, type_: u32, misc: u16, body: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        self.buf.clear();
        put32(&mut self.buf, type_);
        self.buf.extend_from_slice(&misc.to_le_bytes());
        self.buf.extend_from_slice(&[0; 2]);
        body(&mut self.buf);
        let size = u16::try_from(self.buf.len())
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "a record is larger than 64 KiB"))?;
        self.buf[6..8].copy_from_slice(&size.to_le_bytes());
        self.out.write_all(&self.buf)?;
        self.data_len += u64::from(size);
        Ok(())
    }

    /// Writes the features, the saved symbols and the final header. Returns the flushed writer.
    pub fn finish(mut self, symbols: &[ProfileSymbol]) -> io::Result<W> {
        let end = self.data_start + self.data_len;
        let features = self.features();
        let mut bits = [0u64; 4];
        let mut table = Vec::new();
        let mut at = end + 16 * features.len() as u64;
        for (bit, bytes) in &features {
            bits[(bit / 64) as usize] |= 1 << (bit % 64);
            put64(&mut table, at);
            put64(&mut table, bytes.len() as u64);
            at += bytes.len() as u64;
        }
        self.out.write_all(&table)?;
        for (_, bytes) in &features {
            self.out.write_all(bytes)?;
        }
        if !symbols.is_empty() {
            self.write_symbols(symbols, at)?;
        }
        self.out.flush()?;
        self.write_header(self.data_len, bits)?;
        Ok(self.out)
    }

    /// Returns the bit and the contents of each feature section, in the order of the bits.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "words of a command line and events are far fewer"
    )]
    fn features(&self) -> Vec<(u32, Vec<u8>)> {
        let mut features: Vec<(u32, Vec<u8>)> = vec![
            (feature::HOSTNAME, string(&self.meta.hostname)),
            (feature::OSRELEASE, string(&self.meta.os_release)),
            (
                feature::VERSION,
                string(concat!("perfvisor ", env!("CARGO_PKG_VERSION"))),
            ),
            (feature::ARCH, string("x86_64")),
            (
                feature::NRCPUS,
                [self.meta.vcpus.to_le_bytes(), self.meta.vcpus.to_le_bytes()].concat(),
            ),
        ];
        let mut command = (self.meta.command.len() as u32).to_le_bytes().to_vec();
        self.meta
            .command
            .iter()
            .for_each(|word| command.extend(string(word)));
        features.push((feature::CMDLINE, command));
        let mut events = Vec::new();
        put32(&mut events, self.events.len() as u32);
        put32(&mut events, ATTR_SIZE);
        for e in &self.events {
            put_attr(&mut events, e, &self.meta);
            put32(&mut events, 1);
            events.extend(string(&e.name));
            put64(&mut events, e.id);
        }
        features.push((feature::EVENT_DESC, events));
        if self.events.iter().any(|event| event.branch_filter != 0) {
            features.push((feature::BRANCH_STACK, Vec::new()));
        }
        if let Some((first, last)) = self.times {
            features.push((
                feature::SAMPLE_TIME,
                [first.to_le_bytes(), last.to_le_bytes()].concat(),
            ));
        }
        if let Some(clock) = self.meta.clock {
            // Clock resolution in nanoseconds.
            features.push((feature::CLOCKID, 1u64.to_le_bytes().to_vec()));
            const VERSION: u32 = 1;
            let mut data = Vec::new();
            put32(&mut data, VERSION);
            put32(&mut data, MONOTONIC);
            put64(&mut data, clock.wall_ns);
            put64(&mut data, clock.clock_ns);
            features.push((feature::CLOCK_DATA, data));
        }
        let ids = self.build_ids();
        if !ids.is_empty() {
            features.push((feature::BUILD_ID, ids));
        }
        // Feature sections are stored in the order of their bits.
        features.sort_by_key(|(bit, _)| *bit);
        features
    }

    /// Writes the compressed symbols, which begin at the file offset `at`, and the footer that
    /// locates them.
    fn write_symbols(&mut self, symbols: &[ProfileSymbol], at: u64) -> io::Result<()> {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
        serde_json::to_writer(&mut gzip, symbols)?;
        let packed = gzip.finish()?;
        self.out.write_all(&packed)?;
        let mut footer = Vec::new();
        put64(&mut footer, at);
        put64(&mut footer, packed.len() as u64);
        footer.extend_from_slice(FOOTER_MAGIC);
        self.out.write_all(&footer)
    }

    /// Returns the contents of the build-ID section: one record per known build ID.
    #[expect(clippy::cast_possible_truncation, reason = "a path is cut to MAX_STRING")]
    fn build_ids(&self) -> Vec<u8> {
        let kernel = self
            .kernel_id
            .map(|id| build_id_record(MISC_KERNEL, KERNEL_NAME, id));
        let programs = self
            .ids
            .iter()
            .map(|(path, id)| build_id_record(MISC_USER, path, *id));
        let mut section = Vec::new();
        for (misc, body) in kernel.into_iter().chain(programs) {
            put32(&mut section, record::BUILD_ID);
            section.extend_from_slice(&misc.to_le_bytes());
            section.extend_from_slice(&(8 + body.len() as u16).to_le_bytes());
            section.extend_from_slice(&body);
        }
        section
    }
}

/// Returns the `misc` header field and the body of a build-ID record for the file `name`. `mode` is
/// the CPU mode of the file's code.
fn build_id_record(mode: u16, name: &str, id: BuildId) -> (u16, Vec<u8>) {
    let mut body = KERNEL_PID.to_le_bytes().to_vec();
    body.extend_from_slice(id.as_bytes());
    body.resize(4 + build_id::MAX_BYTES, 0);
    put32(&mut body, id.length().into());
    put_padded(&mut body, name);
    (mode | MISC_BUILD_ID_SIZE, body)
}

/// Appends a build ID to an MMAP2 record, in place of the fields device, inode and generation.
fn put_build_id(b: &mut Vec<u8>, id: BuildId) {
    let bytes = id.as_bytes();
    put32(b, id.length().into());
    let end = b.len() + build_id::MAX_BYTES;
    b.extend_from_slice(bytes);
    b.resize(end, 0);
}

/// Builds the file header for `events` events and `data_len` bytes of records at offset
/// `data_start`.
fn header(events: u64, data_start: u64, data_len: u64, features: [u64; 4]) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    for v in [
        HEADER_SIZE,
        ATTR_ENTRY_SIZE,
        HEADER_SIZE + 8 * events,
        ATTR_ENTRY_SIZE * events,
        data_start,
        data_len,
        0,
        0,
    ] {
        put64(&mut header, v);
    }
    features.iter().for_each(|bits| put64(&mut header, *bits));
    header
}

/// Writes a complete profile as a `perf.data` file.
pub fn write<W: Write + Seek>(out: W, profile: &Profile) -> io::Result<W> {
    let mut w = PerfDataWriter::new(out, profile.meta.clone(), profile.events.clone())?;
    if let Some(k) = &profile.kernel {
        w.kernel(k)?;
    }
    profile.tasks.iter().try_for_each(|t| w.task(t))?;
    profile.mappings.iter().try_for_each(|m| w.mapping(m))?;
    profile.samples().try_for_each(|s| w.sample(&s))?;
    if profile.lost > 0 {
        let last = profile.samples().map(|s| s.time_ns).max().unwrap_or(0);
        w.write_lost(profile.events.first().map_or(0, |e| e.id), profile.lost, last)?;
    }
    w.finish(&profile.symbols)
}

/// Maximum number of entries of a call chain. A record has at most 64 KiB.
const MAX_CHAIN: usize = 4096;
/// Maximum number of branches in a branch stack.
const MAX_BRANCHES: usize = 1024;

/// Returns the context marker for the innermost frame of a sample.
pub(super) fn own_marker(sample: &ProfileSample<'_>) -> u64 {
    match sample.cpl {
        3 => CONTEXT_GUEST_USER,
        _ => CONTEXT_GUEST_KERNEL,
    }
}

/// Returns the entry `frame` of a call chain in the form that perf accepts: a context marker of
/// guest frames is replaced with the marker that is not specific to guests.
///
/// perf up to 6.x drops the whole chain at a guest marker. For the other markers, perf uses the
/// guest's maps if the CPU mode of the sample is a guest mode.
fn marker_for_perf(frame: u64) -> u64 {
    match frame {
        CONTEXT_GUEST_KERNEL => CONTEXT_KERNEL,
        CONTEXT_GUEST_USER => CONTEXT_USER,
        other => other,
    }
}

fn put_attr(b: &mut Vec<u8>, e: &SampledEventInfo, meta: &ProfileMetadata) {
    let start = b.len();
    let (rate, freq) = match e.rate {
        EventSamplingRate::Period(p) => (p, 0),
        EventSamplingRate::FrequencyHz(f) => (f, attr_flag::FREQ),
    };
    put32(b, e.type_);
    put32(b, ATTR_SIZE);
    put64(b, e.config);
    put64(b, rate);
    let branches = match e.branch_filter {
        0 => 0,
        _ => sample_type::BRANCH_STACK,
    };
    let chains = if e.has_chains { sample_type::CALLCHAIN } else { 0 };
    put64(b, sample_type::COMMON | chains | branches);
    put64(b, 0);
    let flags = attr_flag::MMAP
        | attr_flag::COMM
        | attr_flag::SAMPLE_ID_ALL
        | attr_flag::MMAP2
        | freq
        | match meta.form {
            ProfilePerspective::InGuest => attr_flag::TASK,
            ProfilePerspective::AsHost => attr_flag::EXCLUDE_HOST,
        }
        | meta.clock.map_or(0, |_| attr_flag::USE_CLOCKID)
        | if meta.thread_switches {
            attr_flag::CONTEXT_SWITCH
        } else {
            0
        };
    put64(b, flags);
    b.resize(start + ATTR_SIZE as usize, 0);
    let at = start + ATTR_BRANCH_FILTER;
    b[at..at + 8].copy_from_slice(&e.branch_filter.to_le_bytes());
    if meta.clock.is_some() {
        let at = start + ATTR_CLOCKID;
        b[at..at + 4].copy_from_slice(&MONOTONIC.to_le_bytes());
    }
}

/// Appends the fields with which every record other than a sample ends (attribute flag
/// `sample_id_all`). The fields match the sample type of this file.
fn put_sample_id(b: &mut Vec<u8>, pid: u32, tid: u32, time_ns: u64) {
    put32(b, pid);
    put32(b, tid);
    put64(b, time_ns);
    put64(b, 0);
    put64(b, 0);
}

fn put32(b: &mut Vec<u8>, v: u32) {
    b.extend_from_slice(&v.to_le_bytes());
}

fn put64(b: &mut Vec<u8>, v: u64) {
    b.extend_from_slice(&v.to_le_bytes());
}

fn cut(text: &str) -> &[u8] {
    let bytes = text.as_bytes();
    &bytes[..bytes.len().min(MAX_STRING)]
}

/// Appends a string to a record, NUL-terminated and padded to a multiple of 8 bytes.
fn put_padded(b: &mut Vec<u8>, text: &str) {
    b.extend_from_slice(cut(text));
    b.push(0);
    b.resize(b.len().next_multiple_of(8), 0);
}

/// Returns a string in the format of feature sections: its padded length and its padded bytes.
#[expect(clippy::cast_possible_truncation, reason = "cut to MAX_STRING")]
fn string(text: &str) -> Vec<u8> {
    let bytes = cut(text);
    let padded = (bytes.len() + 1).next_multiple_of(NAME_ALIGN);
    let mut out = (padded as u32).to_le_bytes().to_vec();
    out.extend_from_slice(bytes);
    out.resize(4 + padded, 0);
    out
}
