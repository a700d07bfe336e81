//! Where a vCPU was when something happened.

use crate::attr::SampleType;
use crate::record::CpuMode;

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
}

/// What [`Regs`] can read for a sample; all of them also tell the mode.
pub(crate) const FROM_REGS: SampleType = SampleType::IP
    .union(SampleType::ADDR)
    .union(SampleType::CALLCHAIN)
    .union(SampleType::RAW);

/// What samples of one moment want of its registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wants {
    /// There is a sample at all.
    pub sample: bool,
    pub fields: SampleType,
}

impl Wants {
    pub fn add(&mut self, sample_type: SampleType) {
        self.sample = true;
        self.fields |= sample_type & FROM_REGS;
    }

    pub fn join(&mut self, other: Self) {
        self.sample |= other.sample;
        self.fields |= other.fields;
    }

    pub fn covers(self, other: Self) -> bool {
        self.sample >= other.sample && self.fields.contains(other.fields)
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
        Seen {
            wants,
            mode,
            ip: ip.unwrap_or_default(),
            addr: addr.unwrap_or_default(),
            callchain,
            raw: if field(SampleType::RAW) { regs.raw() } else { &[] },
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
        }
    }
}
