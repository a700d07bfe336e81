//! The line between what both vendors share and what each defines.
//!
//! [`crate::Vpmu`] knows registers by their role ([`Register`]) and holds their values ([`Registers`]). A
//! [`VendorOps`] says at which address a role is, which bits of a write are taken, and when a counter counts.

use crate::events::{EventRequest, EventSelect, Selection, UnitMask, decode};
use crate::index::{CounterIndex, MAX_GENERAL, MsrAddress, RdpmcIndex};
use crate::model::Model;
use crate::names::Vendor;

/// What a PMU register is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// Event selector of a general-purpose counter.
    Selector(CounterIndex),
    /// A counter.
    Counter(CounterIndex),
    /// The same counter at the address that takes full-width writes (Intel).
    FullWidthCounter(CounterIndex),
    /// Control of all fixed counters (Intel).
    FixedControl,
    /// Which counters overflowed.
    GlobalStatus,
    /// Which counters may count.
    GlobalControl,
    /// Clears bits of the global status.
    GlobalStatusReset,
    /// Sets bits of the global status.
    GlobalStatusSet,
    /// Which counters are programmed (Intel).
    GlobalInUse,
    /// What the PMU can do (Intel).
    Capabilities,
    /// Debug control, of which freeze-on-PMI is ours.
    DebugControl,
    /// Decodes, reads 0, drops writes.
    Absent,
}

/// Values of the registers that are not counters. Nothing here depends on time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Event selectors of the general-purpose counters.
    pub selectors: [u64; MAX_GENERAL],
    /// Intel's IA32_FIXED_CTR_CTRL.
    pub fixed_control: u64,
    /// Global control; all ones where the model has no such register.
    pub global_control: u64,
    /// Global status; collected also where the model has no such register.
    pub global_status: u64,
    /// Debug control.
    pub debug_control: u64,
}

/// What happens to a value written to a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// This value is stored (or, for the registers that set and clear, applied).
    Store(u64),
    /// Nothing happens.
    Dropped,
    /// General protection fault.
    Fault,
}

/// How a vendor's manual defines its PMU. Implementations hold no state.
pub trait VendorOps: Sync + std::fmt::Debug {
    /// The register at an address, `None` where an access faults.
    fn register(&self, model: &Model, msr: MsrAddress) -> Option<Register>;

    /// The counter an RDPMC operand names, `None` where it faults.
    fn rdpmc(&self, model: &Model, index: RdpmcIndex) -> Option<CounterIndex>;

    /// What a write of `value` does.
    fn write(&self, model: &Model, register: Register, value: u64) -> Written;

    /// Values at reset.
    fn at_reset(&self, model: &Model) -> Registers;

    /// Whether the counter's own control lets it count now. The global control is not looked at.
    fn is_selected(&self, registers: &Registers, counter: CounterIndex) -> bool;

    /// Whether an overflow of the counter asks for an interrupt.
    fn interrupts(&self, registers: &Registers, counter: CounterIndex) -> bool;

    /// Which counters the global registers let count, as a mask of counters.
    fn globally_enabled(&self, registers: &Registers) -> u64;

    /// What the counter's control asks to be counted; `None` when it can count nothing, at no privilege
    /// level.
    fn request(&self, registers: &Registers, counter: CounterIndex) -> Option<EventRequest>;

    /// Changes the registers as a request for a PMI does. Returns whether counters were stopped by it.
    fn freeze(&self, model: &Model, registers: &mut Registers) -> bool;

    /// Value of the register that tells which counters are programmed.
    fn in_use(&self, model: &Model, registers: &Registers) -> u64;

    /// The registers that together are the state of such a PMU: controls and status, selectors, then
    /// counters. None with the PMU off.
    fn state_msrs(&self, model: &Model) -> Vec<MsrAddress>;

    /// Every address at which a processor of the vendor may have a PMU register, sorted, whether ours exist
    /// or not.
    fn addresses(&self) -> &'static [std::ops::RangeInclusive<u32>];

    /// Whether guests see which counters overflowed in a status register.
    fn has_status(&self, model: &Model) -> bool;

    /// Whether the local APIC masks its LVT entry when it delivers a PMI.
    fn delivery_masks_lvtpc(&self) -> bool;

    /// Value of the register that tells what the PMU can do.
    fn capabilities(&self) -> u64;
}

/// The addresses of the selectors of a model's general-purpose counters, then those of the counters; `pair`
/// has both for one counter.
pub(crate) fn general_msrs(model: &Model, pair: impl Fn(u32) -> [u32; 2]) -> Vec<u32> {
    let pairs: Vec<_> = (0..model.general()).map(pair).collect();
    let selectors = pairs.iter().map(|pair| pair[0]);
    selectors.chain(pairs.iter().map(|pair| pair[1])).collect()
}

/// A request from the selector fields the vendors share.
#[expect(clippy::cast_possible_truncation, reason = "the fields are that wide")]
pub(crate) fn general_request(vendor: Vendor, select: EventSelect, value: u64) -> EventRequest {
    let umask = UnitMask((value >> selector::UMASK_SHIFT) as u8);
    EventRequest {
        vendor,
        selection: Selection::General(select, umask),
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

/// Fields of an event selector that both vendors have at the same place. Intel SDM vol. 3, figure "Layout of
/// IA32_PERFEVTSELx MSRs"; AMD APM vol. 2 §13.2.1, figure "Performance Event-Select Register".
pub(crate) mod selector {
    /// Event select, bits 7:0.
    pub const SELECT: u64 = 0xFF;
    /// Unit mask, bits 15:8.
    pub const UMASK_SHIFT: u32 = 8;
    /// Count at CPL 1 to 3.
    pub const USR: u64 = 1 << 16;
    /// Count at CPL 0.
    pub const OS: u64 = 1 << 17;
    /// Count rising edges.
    pub const EDGE: u64 = 1 << 18;
    /// Interrupt on overflow.
    pub const INT: u64 = 1 << 20;
    /// Enable.
    pub const EN: u64 = 1 << 22;
    /// Invert the comparison with the counter mask.
    pub const INV: u64 = 1 << 23;
    /// Counter mask, bits 31:24.
    pub const CMASK_SHIFT: u32 = 24;
}
