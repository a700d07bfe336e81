//! Registers of a vCPU at the time of an event.

use crate::attr::{Attr, STACK_USER_MAX, SampleType};
use crate::record::{CpuMode, UserRegsAndStack};

/// Maximum number of entries of a call chain, equal to the kernel's default.
pub const CALLCHAIN_MAX: usize = 127;

/// Access to the vCPU registers at the time of an overflow. The core requests only what a sample
/// needs, and holds no lock during the calls, because reading registers and unwinding a stack may
/// take long.
pub trait SampleRegs {
    /// Returns the CPU mode.
    fn mode(&mut self) -> CpuMode;
    /// Returns the instruction pointer.
    fn ip(&mut self) -> u64;
    /// Writes the call chain to the start of `out`, innermost frame first and with the context
    /// markers of the kernel ABI. Returns the number of entries.
    fn callchain(&mut self, _out: &mut [u64]) -> usize {
        0
    }
    /// Returns the data address associated with the event.
    fn addr(&mut self) -> u64 {
        0
    }
    /// Returns the raw data of `RAW` samples (in Perfvisor, CR3 and other VMM data). Called last,
    /// and possibly more than once if many events overflow simultaneously.
    fn raw(&mut self) -> &[u8] {
        &[]
    }
    /// Returns the data of [`raw`](Self::raw), together with the data of `REGS_USER` and
    /// `STACK_USER` samples: the user registers and at most `stack_bytes` bytes of the user stack.
    fn raw_and_user(&mut self, _stack_bytes: u32) -> (&[u8], UserRegsAndStack<'_>) {
        (self.raw(), UserRegsAndStack::default())
    }
}

/// Sample fields that [`SampleRegs`] supplies. All of them also require the CPU mode.
pub(crate) const FROM_REGS: SampleType = SampleType::IP
    .union(SampleType::ADDR)
    .union(SampleType::CALLCHAIN)
    .union(SampleType::RAW)
    .union(USER);

/// Sample fields with user-space data.
const USER: SampleType = SampleType::REGS_USER.union(SampleType::STACK_USER);

/// Register data that the samples of one overflow need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RegsRequest {
    /// `true` if any sample is taken.
    pub sample: bool,
    pub fields: SampleType,
    /// Number of user stack bytes.
    pub stack_bytes: u32,
}

impl RegsRequest {
    pub fn add(&mut self, attr: &Attr) {
        self.sample = true;
        self.fields |= attr.sample_type & FROM_REGS;
        if attr.sample_type.contains(SampleType::STACK_USER) {
            self.stack_bytes = self.stack_bytes.max(attr.sample_stack_user.min(STACK_USER_MAX));
        }
    }

    pub fn join(&mut self, other: Self) {
        self.sample |= other.sample;
        self.fields |= other.fields;
        self.stack_bytes = self.stack_bytes.max(other.stack_bytes);
    }

    pub fn covers(self, other: Self) -> bool {
        self.sample >= other.sample
            && self.fields.contains(other.fields)
            && self.stack_bytes >= other.stack_bytes
    }
}

/// Register data read so far for one overflow. Nothing is read twice except raw data.
#[derive(Debug, Default)]
pub(crate) struct RegsCache {
    mode: Option<CpuMode>,
    ip: Option<u64>,
    addr: Option<u64>,
    chain: Option<([u64; CALLCHAIN_MAX], usize)>,
}

impl RegsCache {
    pub fn mode(&mut self, regs: &mut dyn SampleRegs) -> CpuMode {
        *self.mode.get_or_insert_with(|| regs.mode())
    }

    /// Reads the data in `wants` that is not yet known.
    pub fn read<'a>(&'a mut self, regs: &'a mut dyn SampleRegs, wants: RegsRequest) -> SampledRegs<'a> {
        if !wants.sample {
            return SampledRegs::default();
        }
        let mode = self.mode(regs);
        let field = |field| wants.fields.contains(field);
        let ip = field(SampleType::IP).then(|| *self.ip.get_or_insert_with(|| regs.ip()));
        let addr = field(SampleType::ADDR).then(|| *self.addr.get_or_insert_with(|| regs.addr()));
        let callchain = if field(SampleType::CALLCHAIN) {
            // Filled in place, because a call chain has a size of one kilobyte.
            let unread = self.chain.is_none();
            let (chain, len) = self.chain.get_or_insert(([0; CALLCHAIN_MAX], 0));
            if unread {
                *len = regs.callchain(chain).min(CALLCHAIN_MAX);
            }
            &chain[..*len]
        } else {
            &[]
        };
        let (raw, user) = if wants.fields.intersects(USER) {
            regs.raw_and_user(wants.stack_bytes)
        } else if field(SampleType::RAW) {
            (regs.raw(), UserRegsAndStack::default())
        } else {
            (&[][..], UserRegsAndStack::default())
        };
        SampledRegs {
            wants,
            mode,
            ip: ip.unwrap_or_default(),
            addr: addr.unwrap_or_default(),
            callchain,
            raw,
            user,
        }
    }
}

/// Register data that was read for one overflow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampledRegs<'a> {
    /// Data that was requested.
    pub wants: RegsRequest,
    pub mode: CpuMode,
    pub ip: u64,
    pub addr: u64,
    pub callchain: &'a [u64],
    pub raw: &'a [u8],
    pub user: UserRegsAndStack<'a>,
}

impl<'a> SampledRegs<'a> {
    /// Returns the user-space data for one event, which may need less of the stack than another
    /// event.
    pub fn user_for(&self, attr: &Attr) -> UserRegsAndStack<'a> {
        let most = attr.sample_stack_user as usize / 8 * 8;
        UserRegsAndStack {
            stack: &self.user.stack[..self.user.stack.len().min(most)],
            ..self.user
        }
    }
}

impl Default for SampledRegs<'_> {
    fn default() -> Self {
        Self {
            wants: RegsRequest::default(),
            mode: CpuMode::Unknown,
            ip: 0,
            addr: 0,
            callchain: &[],
            raw: &[],
            user: UserRegsAndStack::default(),
        }
    }
}
