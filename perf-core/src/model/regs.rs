//! Where a vCPU was when something happened.

use crate::attr::{Attr, STACK_USER_MAX, SampleType};
use crate::record::{CpuMode, UserPart};

/// Most entries of a call chain, as the kernel's default.
pub const CALLCHAIN_MAX: usize = 127;

/// Where the vCPU was when an event overflowed. Asked only for what a sample needs, and while no lock of the
/// core is held: reading registers and walking a stack may take long.
pub trait SampleRegs {
    /// The mode.
    fn mode(&mut self) -> CpuMode;
    /// The instruction pointer.
    fn ip(&mut self) -> u64;
    /// The call chain, innermost first, with the context markers of the kernel's ABI; fills `out` from its
    /// start and returns how many entries there are.
    fn callchain(&mut self, _out: &mut [u64]) -> usize {
        0
    }
    /// The address the event is about.
    fn addr(&mut self) -> u64 {
        0
    }
    /// Raw data for `RAW` samples (Perfvisor: CR3 and what else the VMM wants to tell). Asked for last, and
    /// where many events overflow at once more than once.
    fn raw(&mut self) -> &[u8] {
        &[]
    }
    /// As [`raw`](Self::raw), together with what `REGS_USER` and `STACK_USER` samples want: the registers of
    /// the program, and at most `stack_bytes` of its stack.
    fn raw_and_user(&mut self, _stack_bytes: u32) -> (&[u8], UserPart<'_>) {
        (self.raw(), UserPart::default())
    }
}

/// What [`Regs`] can read for a sample; all of them also tell the mode.
pub(crate) const FROM_REGS: SampleType = SampleType::IP
    .union(SampleType::ADDR)
    .union(SampleType::CALLCHAIN)
    .union(SampleType::RAW)
    .union(USER);

/// Of the program.
const USER: SampleType = SampleType::REGS_USER.union(SampleType::STACK_USER);

/// What samples of one moment want of its registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wants {
    /// There is a sample at all.
    pub sample: bool,
    pub fields: SampleType,
    /// Bytes of the program's stack.
    pub stack_bytes: u32,
}

impl Wants {
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

/// What was read of a moment's registers so far. Nothing is read twice but the raw data.
#[derive(Debug, Default)]
pub(crate) struct Known {
    mode: Option<CpuMode>,
    ip: Option<u64>,
    addr: Option<u64>,
    chain: Option<([u64; CALLCHAIN_MAX], usize)>,
}

impl Known {
    pub fn mode(&mut self, regs: &mut dyn SampleRegs) -> CpuMode {
        *self.mode.get_or_insert_with(|| regs.mode())
    }

    /// Reads what `wants` names and is not known yet.
    pub fn read<'a>(&'a mut self, regs: &'a mut dyn SampleRegs, wants: Wants) -> Seen<'a> {
        if !wants.sample {
            return Seen::default();
        }
        let mode = self.mode(regs);
        let field = |field| wants.fields.contains(field);
        let ip = field(SampleType::IP).then(|| *self.ip.get_or_insert_with(|| regs.ip()));
        let addr = field(SampleType::ADDR).then(|| *self.addr.get_or_insert_with(|| regs.addr()));
        let callchain = if field(SampleType::CALLCHAIN) {
            // In place: a chain is a kilobyte.
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
            (regs.raw(), UserPart::default())
        } else {
            (&[][..], UserPart::default())
        };
        Seen {
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

/// A moment's registers, as far as they were wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen<'a> {
    /// What was read.
    pub wants: Wants,
    pub mode: CpuMode,
    pub ip: u64,
    pub addr: u64,
    pub callchain: &'a [u64],
    pub raw: &'a [u8],
    pub user: UserPart<'a>,
}

impl<'a> Seen<'a> {
    /// The program's part for one event, which may want less of the stack than another.
    pub fn user_for(&self, attr: &Attr) -> UserPart<'a> {
        let most = attr.sample_stack_user as usize / 8 * 8;
        UserPart {
            stack: &self.user.stack[..self.user.stack.len().min(most)],
            ..self.user
        }
    }
}

impl Default for Seen<'_> {
    fn default() -> Self {
        Self {
            wants: Wants::default(),
            mode: CpuMode::Unknown,
            ip: 0,
            addr: 0,
            callchain: &[],
            raw: &[],
            user: UserPart::default(),
        }
    }
}
