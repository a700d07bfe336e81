//! Interface between the vendor-independent PMU and the vendor-specific definitions.
//!
//! [`crate::Vpmu`] addresses registers by their role ([`PmuRegister`]) and stores their values
//! ([`PmuRegisters`]). A [`VendorOps`] maps MSR addresses to roles, validates writes, and
//! determines when a counter counts.

use perf_core::branch::BranchEntry;

use crate::PrivilegeLevels;
use crate::branches::{BranchControls, BranchRecord, BranchRegister};
use crate::events::{CounterEventRequest, EventSelect, EventSelection, UnitMask, decode};
use crate::freeze::DEBUGCTL_FREEZE_ON_PMI;
use crate::index::{CounterIndex, MAX_GENERAL, MsrAddress, RdpmcIndex};
use crate::model::PmuModel;
use crate::model_name::Vendor;

/// Vendor-independent role of a PMU register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmuRegister {
    /// Event selector of this general-purpose counter.
    Selector(CounterIndex),
    /// Value of a counter, general-purpose or fixed.
    Counter(CounterIndex),
    /// Value of this counter at its full-width write address (Intel).
    FullWidthCounter(CounterIndex),
    /// Register that controls all fixed counters (Intel).
    FixedControl,
    /// Global status register, with the overflow bits of all counters.
    GlobalStatus,
    /// Global control register, with the enable bits of all counters.
    GlobalControl,
    /// Register that clears bits of the global status.
    GlobalStatusReset,
    /// Register that sets bits of the global status.
    GlobalStatusSet,
    /// Register with the in-use bits of all counters (Intel).
    GlobalInUse,
    /// IA32_PERF_CAPABILITIES (Intel).
    Capabilities,
    /// Debug control register, of which only the freeze-on-PMI bits belong to the PMU.
    DebugControl,
    /// Register that reads as 0 and ignores writes.
    Absent,
}

/// Values of the PMU registers other than the counters. Unlike counters, these registers change
/// only by register writes, overflows and freezes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmuRegisters {
    /// Values of the event selectors of the general-purpose counters.
    pub selectors: [u64; MAX_GENERAL],
    /// Value of IA32_FIXED_CTR_CTRL (Intel).
    pub fixed_control: u64,
    /// Value of the global control register. Enables all counters on models without this register.
    pub global_control: u64,
    /// Value of the global status register. Also maintained on models without this register.
    pub global_status: u64,
    /// Value of IA32_DEBUGCTL (DebugCtl on AMD), of which only the PMU's bits are stored.
    pub debug_control: u64,
    /// Values of the registers that control the branch records.
    pub branches: BranchControls,
    /// EFER.SVME of the vCPU, as of the last [`crate::Vpmu::set_svme`]. Affects the host-only and
    /// guest-only bits of AMD selectors.
    pub svme: bool,
}

impl PmuRegisters {
    /// Returns whether a PMI freezes the counters.
    pub(crate) fn freezes_counters(&self) -> bool {
        self.debug_control & DEBUGCTL_FREEZE_ON_PMI != 0
    }
}

/// Effect of a write to a PMU register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterWriteEffect {
    /// The write stores this value in the register. A write to the set or reset register sets or
    /// clears the bits of this value in the global status instead.
    Store(u64),
    /// The write has no effect.
    Dropped,
    /// The write raises a general-protection fault.
    Fault,
}

/// Vendor-specific definition of a PMU. Implementations are stateless.
pub trait VendorOps: Sync + std::fmt::Debug {
    /// Returns the register at the MSR address `msr`, or `None` if an access faults.
    fn register(&self, model: &PmuModel, msr: MsrAddress) -> Option<PmuRegister>;

    /// Returns the counter that an RDPMC operand selects, or `None` if the instruction faults.
    fn rdpmc(&self, model: &PmuModel, index: RdpmcIndex) -> Option<CounterIndex>;

    /// Returns the effect of writing `value` to `register`.
    fn write(&self, model: &PmuModel, register: PmuRegister, value: u64) -> RegisterWriteEffect;

    /// Returns the values of the PMU registers after a reset of the machine.
    fn at_reset(&self, model: &PmuModel) -> PmuRegisters;

    /// Returns whether the counter's own control register enables it, regardless of the global
    /// control.
    fn is_selected(&self, registers: &PmuRegisters, counter: CounterIndex) -> bool;

    /// Returns whether an overflow of the counter requests an interrupt.
    fn interrupts(&self, registers: &PmuRegisters, counter: CounterIndex) -> bool;

    /// Returns the mask of the counters that the global control enables and no freeze stops.
    fn globally_enabled(&self, registers: &PmuRegisters) -> u64;

    /// Returns the event request that the control bits of `counter` encode, or `None` if they
    /// select no privilege level.
    fn request(&self, registers: &PmuRegisters, counter: CounterIndex) -> Option<CounterEventRequest>;

    /// Returns whether EFER.SVME affects what a selector with the value `selector` counts.
    fn depends_on_svme(&self, selector: u64) -> bool;

    /// Freezes the counters if freeze-on-PMI is enabled in the registers. Returns whether this
    /// stopped any counter.
    fn freeze(&self, model: &PmuModel, registers: &mut PmuRegisters) -> bool;

    /// Returns the value of IA32_PERF_GLOBAL_INUSE.
    fn in_use(&self, model: &PmuModel, registers: &PmuRegisters) -> u64;

    /// Returns the MSRs that make up the saved state of the model: control and status registers,
    /// selectors, then counters. Empty if the PMU is off.
    fn state_msrs(&self, model: &PmuModel) -> Vec<MsrAddress>;

    /// Returns all addresses at which a processor of this vendor may have a PMU register, sorted,
    /// including unimplemented ones.
    fn addresses(&self) -> &'static [std::ops::RangeInclusive<u32>];

    /// Returns whether the model has a global status register that guests can read.
    fn has_status(&self, model: &PmuModel) -> bool;

    /// Returns whether the local APIC masks its LVT performance entry when it delivers a PMI.
    fn delivery_masks_lvtpc(&self) -> bool;

    /// Returns whether Linux's driver waits for the PMI of an overflow after it has stopped the
    /// counter.
    fn driver_awaits_pmi(&self) -> bool;

    /// Returns the value of IA32_PERF_CAPABILITIES.
    fn capabilities(&self, model: &PmuModel) -> u64;

    /// Returns the branch record register or control register at an MSR address, or `None` if an
    /// access to the address faults.
    fn branch_register(&self, model: &PmuModel, msr: MsrAddress) -> Option<BranchRegister>;

    /// Returns the effect of writing `value` to a branch record register or control register.
    fn write_branch_register(&self, register: BranchRegister, value: u64) -> RegisterWriteEffect;

    /// Returns whether the branch records are enabled and not frozen.
    fn records_branches(&self, registers: &PmuRegisters) -> bool;

    /// Returns the privilege levels whose branches are recorded.
    fn branch_levels(&self, registers: &PmuRegisters) -> PrivilegeLevels;

    /// Returns whether the guest's branch filter selects the branch. A branch between two privilege
    /// levels is selected only if both levels are selected.
    fn selects_branch(&self, registers: &PmuRegisters, branch: &BranchEntry) -> bool;

    /// Returns the register values of the record for `branch`.
    fn branch_record(&self, branch: &BranchEntry) -> BranchRecord;

    /// Freezes the branch records at a PMI if the registers enable freeze-on-PMI for branch
    /// records.
    fn freeze_branches(&self, model: &PmuModel, registers: &mut PmuRegisters);
}

/// Returns whether `levels` contain the privilege levels of both the source and the target of a
/// branch.
pub(crate) fn contain_branch(levels: PrivilegeLevels, branch: &BranchEntry) -> bool {
    let contains = |user| if user { levels.user } else { levels.kernel };
    contains(branch.from_user) && contains(branch.to_user)
}

/// Returns the MSR addresses of the model's event selectors for general-purpose counters, followed
/// by the addresses of these counters. `pair` returns the selector address and the counter address
/// of one counter.
pub(crate) fn general_msrs(model: &PmuModel, pair: impl Fn(u32) -> [u32; 2]) -> Vec<u32> {
    let pairs: Vec<_> = (0..model.general()).map(pair).collect();
    let selectors = pairs.iter().map(|pair| pair[0]);
    selectors.chain(pairs.iter().map(|pair| pair[1])).collect()
}

/// Returns the event request for a selector value, from the fields that both vendors share.
#[expect(clippy::cast_possible_truncation, reason = "the fields are that wide")]
pub(crate) fn general_request(vendor: Vendor, select: EventSelect, value: u64) -> CounterEventRequest {
    let umask = UnitMask((value >> selector::UMASK_SHIFT) as u8);
    CounterEventRequest {
        vendor,
        selection: EventSelection::General(select, umask),
        event: decode(vendor, select, umask),
        user: value & selector::USR != 0,
        kernel: value & selector::OS != 0,
        edge: value & selector::EDGE != 0,
        invert: value & selector::INV != 0,
        cmask: (value >> selector::CMASK_SHIFT) as u8,
        in_transaction: false,
        checkpointed: false,
    }
}

/// Event selector fields with the same layout on both vendors. Intel SDM vol. 3, figure "Layout of
/// IA32_PERFEVTSELx MSRs"; AMD APM vol. 2 §13.2.1, figure "Performance Event-Select Register".
pub(crate) mod selector {
    /// Bits 7:0, the low bits of the event select.
    pub const SELECT: u64 = 0xFF;
    /// Lowest bit of the unit mask, bits 15:8.
    pub const UMASK_SHIFT: u32 = 8;
    /// USR bit: count at CPL 1 to 3.
    pub const USR: u64 = 1 << 16;
    /// OS bit: count at CPL 0.
    pub const OS: u64 = 1 << 17;
    /// Edge detect bit.
    pub const EDGE: u64 = 1 << 18;
    /// INT bit: interrupt on overflow.
    pub const INT: u64 = 1 << 20;
    /// EN bit: the counter is enabled.
    pub const EN: u64 = 1 << 22;
    /// INV bit: invert the comparison with the counter mask.
    pub const INV: u64 = 1 << 23;
    /// Lowest bit of the counter mask, bits 31:24.
    pub const CMASK_SHIFT: u32 = 24;
}
