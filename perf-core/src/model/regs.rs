//! Registers of a vCPU at the time of an event.

use crate::attr::{Attr, STACK_USER_MAX, SampleType};
use crate::branch::{BranchEntry, BranchStackConfig};
use crate::record::{CpuMode, UserRegsAndStack};

/// Maximum number of entries of a call chain, equal to the kernel's default.
pub const CALLCHAIN_MAX: usize = 127;

/// Access to the vCPU registers at the time of an overflow. The core requests only the data that a
/// sample needs, and holds no lock during the calls, because reading registers and unwinding a
/// stack may take a long time.
pub trait SampleRegs {
    /// Returns the CPU mode of the vCPU.
    fn mode(&mut self) -> CpuMode;
    /// Returns the instruction pointer of the vCPU.
    fn ip(&mut self) -> u64;
    /// Writes the call chain to the start of `out`, innermost frame first and with the context
    /// markers of the kernel ABI. Returns the number of entries.
    fn callchain(&mut self, _out: &mut [u64]) -> usize {
        0
    }
    /// Returns the data address of the event that overflowed.
    fn addr(&mut self) -> u64 {
        0
    }
    /// Appends the branches of `BRANCH_STACK` samples to `out`, newest first. Returns `false` if
    /// the branches are not known yet. The sample then waits until overflows are serviced again.
    fn branches(&mut self, _request: BranchStackConfig, _out: &mut Vec<BranchEntry>) -> bool {
        true
    }
    /// Returns the raw data for `RAW` samples (in Perfvisor, CR3 and other VMM data). The core
    /// calls this method last, and possibly more than once if many events overflow at the same
    /// time.
    fn raw(&mut self) -> &[u8] {
        &[]
    }
    /// Returns the data of [`raw`](Self::raw), together with the data of `REGS_USER` and
    /// `STACK_USER` samples: the user registers and at most `stack_bytes` bytes of the user stack.
    fn raw_and_user(&mut self, _stack_bytes: u32) -> (&[u8], UserRegsAndStack<'_>) {
        (self.raw(), UserRegsAndStack::default())
    }
}

/// Registers of a VMM that takes no samples. Samples then have an unknown instruction pointer in
/// the guest's kernel.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnavailableRegs;

impl SampleRegs for UnavailableRegs {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestKernel
    }
    fn ip(&mut self) -> u64 {
        0
    }
}

/// Sample fields whose data [`SampleRegs`] supplies. A sample with one of them also needs the CPU
/// mode.
pub(crate) const FROM_REGS: SampleType = SampleType::IP
    .union(SampleType::ADDR)
    .union(SampleType::CALLCHAIN)
    .union(SampleType::RAW)
    .union(SampleType::BRANCH_STACK)
    .union(USER);

/// Sample fields that contain the user-space registers or stack.
const USER: SampleType = SampleType::REGS_USER.union(SampleType::STACK_USER);

/// The register data that must be read to write the samples of one overflow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RegsRequest {
    /// `true` if the overflow causes at least one sample.
    pub sample: bool,
    pub fields: SampleType,
    /// Maximum number of user stack bytes that a sample contains.
    pub stack_bytes: u32,
    /// Parameters of the branch stack, or `None` if no sample contains one.
    pub branches: Option<BranchStackConfig>,
    /// `true` if at least one sample must not wait until the branches are known.
    pub without_branches: bool,
}

impl RegsRequest {
    pub fn add(&mut self, attr: &Attr) {
        self.sample = true;
        self.fields |= attr.sample_type & FROM_REGS;
        if attr.sample_type.contains(SampleType::STACK_USER) {
            self.stack_bytes = self.stack_bytes.max(attr.sample_stack_user.min(STACK_USER_MAX));
        }
        if attr.sample_type.contains(SampleType::BRANCH_STACK) {
            self.join_branches(attr.branches);
        } else {
            self.without_branches = true;
        }
    }

    pub fn join(&mut self, other: Self) {
        self.sample |= other.sample;
        self.fields |= other.fields;
        self.stack_bytes = self.stack_bytes.max(other.stack_bytes);
        self.without_branches |= other.without_branches;
        if let Some(branches) = other.branches {
            self.join_branches(branches);
        }
    }

    fn join_branches(&mut self, other: BranchStackConfig) {
        self.branches = Some(self.branches.map_or(other, |branches| branches.join(other)));
    }

    pub fn covers(self, other: Self) -> bool {
        self.sample >= other.sample
            && self.without_branches >= other.without_branches
            && self.fields.contains(other.fields)
            && self.stack_bytes >= other.stack_bytes
            && other
                .branches
                .is_none_or(|other| self.branches.is_some_and(|branches| branches.covers(other)))
    }
}

/// Register data of a sample, cached so that each part is read from the vCPU only once per
/// overflow. Raw data, user registers and user stack are not cached.
#[derive(Debug, Default)]
pub(crate) struct RegsCache {
    mode: Option<CpuMode>,
    ip: Option<u64>,
    addr: Option<u64>,
    chain: Option<([u64; CALLCHAIN_MAX], usize)>,
    /// Parameters and result of the last [`SampleRegs::branches`] call.
    branches: Option<(BranchStackConfig, bool)>,
    branch_entries: Vec<BranchEntry>,
}

impl RegsCache {
    pub fn mode(&mut self, regs: &mut dyn SampleRegs) -> CpuMode {
        *self.mode.get_or_insert_with(|| regs.mode())
    }

    /// Reads the data that `wants` requests and that has not been read yet.
    pub fn read<'a>(&'a mut self, regs: &'a mut dyn SampleRegs, wants: RegsRequest) -> SampledRegs<'a> {
        if !wants.sample {
            return SampledRegs::default();
        }
        if let Some(request) = wants.branches
            && self.branches.is_none_or(|(known, _)| !known.covers(request))
        {
            self.branch_entries.clear();
            let complete = regs.branches(request, &mut self.branch_entries);
            self.branches = Some((request, complete));
        }
        let complete = self.branches.is_some_and(|(_, complete)| complete);
        if wants.branches.is_some() && !complete && !wants.without_branches {
            // The samples are postponed until the branches are known, so no other data is read now.
            return SampledRegs {
                request: wants,
                ..SampledRegs::default()
            };
        }
        let mode = self.mode(regs);
        let field = |field| wants.fields.contains(field);
        let ip = field(SampleType::IP).then(|| *self.ip.get_or_insert_with(|| regs.ip()));
        let addr = field(SampleType::ADDR).then(|| *self.addr.get_or_insert_with(|| regs.addr()));
        let callchain = if field(SampleType::CALLCHAIN) {
            // Filled in place instead of copied, because a call chain takes about one kilobyte.
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
            request: wants,
            mode,
            ip: ip.unwrap_or_default(),
            addr: addr.unwrap_or_default(),
            callchain,
            branches: complete.then_some(&self.branch_entries[..]),
            raw,
            user,
        }
    }
}

/// The register data that was read for the samples of one overflow.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SampledRegs<'a> {
    /// The request for which the data was read.
    pub request: RegsRequest,
    pub mode: CpuMode,
    pub ip: u64,
    pub addr: u64,
    pub callchain: &'a [u64],
    /// Branch stack, or `None` if it was not requested or is not known yet.
    pub branches: Option<&'a [BranchEntry]>,
    pub raw: &'a [u8],
    pub user: UserRegsAndStack<'a>,
}

impl<'a> SampledRegs<'a> {
    /// Writes the branch stack of a sample of one event to `words`, which must be empty.
    pub fn branches_for(&self, attr: &Attr, words: &mut Vec<u64>) {
        let BranchStackConfig { filter, depth, .. } = attr.branches;
        let branches = self.branches.unwrap_or_default().iter();
        let selected = branches.filter(|branch| filter.contains_branch(branch));
        words.extend(
            selected
                .take(depth.into())
                .flat_map(|branch| branch.words(filter)),
        );
    }

    /// Returns the user registers and stack of a sample of one event, with at most the number of
    /// stack bytes that `attr` requests.
    pub fn user_for(&self, attr: &Attr) -> UserRegsAndStack<'a> {
        let most = attr.sample_stack_user as usize / 8 * 8;
        UserRegsAndStack {
            stack: &self.user.stack[..self.user.stack.len().min(most)],
            ..self.user
        }
    }
}
