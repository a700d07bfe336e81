//! AMD PMU: the four K7 counters, the six counters of the core extension, and performance
//! monitoring version 2.
//!
//! References: AMD64 APM vol. 2 §13.2 "Performance Monitoring Counters", vol. 3 (CPUID, RDPMC), and
//! the PPR of the family for the global registers. Writes to reserved bits of these registers are
//! ignored and never fault.

use perf_core::branch::{BranchEntry, BranchKind};

use crate::PrivilegeLevels;
use crate::branches::{BranchControls, BranchRecord, BranchRegister};
use crate::events::{CounterEventRequest, EventSelect};
use crate::freeze::{DEBUGCTL_FREEZE_BRANCHES_ON_PMI, STATUS_CTR_FRZ, STATUS_LBR_FRZ};
use crate::index::{CounterIndex, MAX_GENERAL, MsrAddress, RdpmcIndex};
use crate::model::PmuModel;
use crate::model_name::{PmuGeneration, Vendor};
use crate::vendor::{
    PmuRegister, PmuRegisters, RegisterWriteEffect, VendorOps, contain_branch, general_msrs, general_request,
    selector,
};

/// First event selector of the K7, PerfEvtSeln (0xC0010000..=0xC0010003). Present on every model.
pub const PERF_LEGACY_CTL0: u32 = 0xC001_0000;
/// First counter of the K7, PerfCtrn (0xC0010004..=0xC0010007). Present on every model.
pub const PERF_LEGACY_CTR0: u32 = 0xC001_0004;
/// PERF_CTLn (0xC0010200 + 2n). Requires CPUID.80000001H:ECX.PERFCTR_CORE. The first four alias the
/// K7 registers.
pub const PERF_CTL0: u32 = 0xC001_0200;
/// PERF_CTRn (0xC0010201 + 2n). Requires CPUID.80000001H:ECX.PERFCTR_CORE. The first four alias the
/// K7 registers.
pub const PERF_CTR0: u32 = 0xC001_0201;
/// PerfCntrGlobalStatus (0xC0000300). Requires CPUID.80000022H:EAX\[0\]. Writes are ignored.
pub const PERF_CNTR_GLOBAL_STATUS: u32 = 0xC000_0300;
/// PerfCntrGlobalCtl (0xC0000301). Requires CPUID.80000022H:EAX\[0\].
pub const PERF_CNTR_GLOBAL_CTL: u32 = 0xC000_0301;
/// PerfCntrGlobalStatusClr (0xC0000302). Requires CPUID.80000022H:EAX\[0\]. Reads as 0.
pub const PERF_CNTR_GLOBAL_STATUS_CLR: u32 = 0xC000_0302;
/// PerfCntrGlobalStatusSet (0xC0000303). Requires CPUID.80000022H:EAX\[0\]. Reads as 0.
pub const PERF_CNTR_GLOBAL_STATUS_SET: u32 = 0xC000_0303;

/// LBR_SELECT (0xC000010E). Requires CPUID.80000022H:EAX\[1\], as do all registers of branch
/// records.
pub const LBR_SELECT: u32 = 0xC000_010E;
/// DBG_EXTN_CFG (0xC000010F). Enables the branch records.
pub const DBG_EXTN_CFG: u32 = 0xC000_010F;
/// LBR_FROM (0xC0010300 + 2n) and LBR_TO (0xC0010300 + 2n + 1) of branch record n.
pub const LBR_FROM0: u32 = 0xC001_0300;
/// Address of LBR_TO of record 15, the highest address of a branch record register.
const LBR_TO15: u32 = 0xC001_031F;
/// IA32_DEBUGCTL, which AMD names DebugCtl.
const DEBUG_CTL: u32 = 0x1D9;

/// Number of branch records of an AMD model, as reported in CPUID.80000022H:EBX\[9:4\].
pub(crate) const LBR_RECORDS: u32 = 16;
/// DBG_EXTN_CFG.LBRV2EN: branch records are enabled.
const LBR_ENABLE: u64 = 1 << 6;
/// LBR_SELECT bits that suppress branches: at CPL 0, and at CPL 1 to 3.
const SUPPRESS_KERNEL: u64 = 1 << 0;
const SUPPRESS_USER: u64 = 1 << 1;
/// Writable bits of LBR_SELECT.
const LBR_SELECT_MASK: u64 = 0x1FF;
/// LBR_FROM bit 63: the branch was mispredicted.
const MISPREDICTED: u64 = 1 << 63;
/// LBR_TO bit 63: the record is valid.
const VALID: u64 = 1 << 63;
/// LBR_TO bit 62: the record is from speculative execution.
const SPECULATIVE: u64 = 1 << 62;
/// LBR_TO bit 61, which is reserved.
const TO_RESERVED: u64 = 1 << 61;

/// Number of counters that have K7 registers.
const LEGACY_COUNTERS: u32 = 4;

/// Event selector bits that ignore writes: 63:42, 39:36, 21 and 19.
const SELECTOR_RESERVED: u64 = 0xFFFF_FCF0_0028_0000;
/// Event selector bit 40: count in nested guests only.
const GUEST_ONLY: u64 = 1 << 40;
/// Event selector bit 41: count outside nested guests only.
const HOST_ONLY: u64 = 1 << 41;

/// All addresses at which an AMD processor may have a PMU register, including unimplemented ones.
const ADDRESSES: &[std::ops::RangeInclusive<u32>] = &[
    // Lightweight profiling: LWP_CFG, LWP_CBADDR.
    0xC000_0105..=0xC000_0106,
    LBR_SELECT..=DBG_EXTN_CFG,
    PERF_CNTR_GLOBAL_STATUS..=PERF_CNTR_GLOBAL_STATUS_SET,
    PERF_LEGACY_CTL0..=0xC001_0007,
    // PERF_CTL and PERF_CTR 0 to 14.
    PERF_CTL0..=0xC001_021D,
    // Last-level-cache counters, northbridge (data fabric) counters.
    0xC001_0230..=0xC001_025F,
    // Performance timestamp.
    0xC001_0280..=0xC001_0280,
    LBR_FROM0..=LBR_TO15,
    // Memory controller counters.
    0xC001_0800..=0xC001_08FF,
    // Instruction-based sampling.
    0xC001_1030..=0xC001_103D,
];

/// Returns the branch record register or control register at `address`.
#[expect(clippy::cast_possible_truncation, reason = "below LBR_RECORDS")]
fn branch_register(address: u32) -> Option<BranchRegister> {
    match address {
        LBR_SELECT => Some(BranchRegister::Filter),
        DBG_EXTN_CFG => Some(BranchRegister::Control),
        LBR_FROM0..=LBR_TO15 => {
            let offset = address - LBR_FROM0;
            let n = (offset / 2) as u8;
            Some(if offset.is_multiple_of(2) {
                BranchRegister::From(n)
            } else {
                BranchRegister::To(n)
            })
        }
        _ => None,
    }
}

/// Returns the LBR_SELECT bit that suppresses branches of type `kind`.
fn suppressing_bit(kind: BranchKind) -> u32 {
    match kind {
        BranchKind::Conditional => 2,
        BranchKind::Call => 3,
        BranchKind::IndirectCall => 4,
        BranchKind::Return => 5,
        BranchKind::Indirect => 6,
        BranchKind::Unconditional => 7,
        BranchKind::Unknown
        | BranchKind::SystemCall
        | BranchKind::SystemReturn
        | BranchKind::InterruptReturn
        | BranchKind::Interrupt => 8,
    }
}

/// Returns the freeze bits that software can set and clear in the global status, in addition to the
/// counters' overflow bits.
fn freeze_status(model: &PmuModel) -> u64 {
    if model.has_branch_records() {
        STATUS_LBR_FRZ | STATUS_CTR_FRZ
    } else {
        0
    }
}

/// AMD implementation of [`VendorOps`].
#[derive(Debug)]
pub(crate) struct Amd;

impl VendorOps for Amd {
    fn register(&self, model: &PmuModel, msr: MsrAddress) -> Option<PmuRegister> {
        let generation = model.generation();
        let general = |n, role: fn(CounterIndex) -> PmuRegister| match CounterIndex::general(n) {
            Some(c) if model.has_counter(c) => Some(role(c)),
            _ => None,
        };
        match msr.0 {
            // On a model without a PMU, the K7 registers still exist. They read as 0 and ignore
            // writes.
            PERF_LEGACY_CTL0..=0xC001_0007 if model.is_off() => Some(PmuRegister::Absent),
            PERF_LEGACY_CTL0..=0xC001_0003 => general(msr.0 - PERF_LEGACY_CTL0, PmuRegister::Selector),
            PERF_LEGACY_CTR0..=0xC001_0007 => general(msr.0 - PERF_LEGACY_CTR0, PmuRegister::Counter),
            PERF_CTL0..=0xC001_021D
                if matches!(generation, PmuGeneration::AmdCore | PmuGeneration::AmdV2) =>
            {
                let offset = msr.0 - PERF_CTL0;
                general(
                    offset / 2,
                    if offset.is_multiple_of(2) {
                        PmuRegister::Selector
                    } else {
                        PmuRegister::Counter
                    },
                )
            }
            PERF_CNTR_GLOBAL_STATUS..=PERF_CNTR_GLOBAL_STATUS_SET if generation == PmuGeneration::AmdV2 => {
                Some(match msr.0 {
                    PERF_CNTR_GLOBAL_STATUS => PmuRegister::GlobalStatus,
                    PERF_CNTR_GLOBAL_CTL => PmuRegister::GlobalControl,
                    PERF_CNTR_GLOBAL_STATUS_CLR => PmuRegister::GlobalStatusReset,
                    _ => PmuRegister::GlobalStatusSet,
                })
            }
            DEBUG_CTL if model.has_branch_records() => Some(PmuRegister::DebugControl),
            _ => None,
        }
    }

    /// Decodes the operand of RDPMC: ECX is the counter number (APM vol. 3, RDPMC). On the K7, only
    /// numbers below 4 are valid.
    fn rdpmc(&self, model: &PmuModel, index: RdpmcIndex) -> Option<CounterIndex> {
        if model.generation() == PmuGeneration::AmdK7 && index.0 >= LEGACY_COUNTERS {
            return None;
        }
        CounterIndex::general(index.0).filter(|&c| model.has_counter(c))
    }

    fn write(&self, model: &PmuModel, register: PmuRegister, value: u64) -> RegisterWriteEffect {
        match register {
            PmuRegister::Selector(_) => RegisterWriteEffect::Store(value & !SELECTOR_RESERVED),
            PmuRegister::Counter(_) => RegisterWriteEffect::Store(model.width().truncate(value)),
            PmuRegister::GlobalControl => RegisterWriteEffect::Store(value & model.counters_mask()),
            PmuRegister::GlobalStatusReset | PmuRegister::GlobalStatusSet => {
                RegisterWriteEffect::Store(value & (model.counters_mask() | freeze_status(model)))
            }
            PmuRegister::DebugControl => RegisterWriteEffect::Store(value & model.debug_control_bits()),
            // The global status register ignores writes. The other PMU registers do not exist on
            // AMD models.
            _ => RegisterWriteEffect::Dropped,
        }
    }

    /// Returns the register values at reset: zero, except for the global control register, which
    /// enables every counter. Software that programs only the event selectors therefore still
    /// counts.
    fn at_reset(&self, model: &PmuModel) -> PmuRegisters {
        PmuRegisters {
            selectors: [0; MAX_GENERAL],
            fixed_control: 0,
            global_control: model.counters_mask(),
            global_status: 0,
            debug_control: 0,
            branches: BranchControls {
                depth: if model.has_branch_records() {
                    u64::from(LBR_RECORDS)
                } else {
                    0
                },
                ..BranchControls::default()
            },
            svme: false,
        }
    }

    fn is_selected(&self, registers: &PmuRegisters, counter: CounterIndex) -> bool {
        counter.fixed_number().is_none() && registers.selectors[counter.slot()] & selector::EN != 0
    }

    fn interrupts(&self, registers: &PmuRegisters, counter: CounterIndex) -> bool {
        counter.fixed_number().is_none() && registers.selectors[counter.slot()] & selector::INT != 0
    }

    /// Returns the counters that are globally enabled. None is enabled while bit 59 of the global
    /// status is set, which can happen only on models with [`PmuModel::has_branch_records`].
    fn globally_enabled(&self, registers: &PmuRegisters) -> u64 {
        if registers.global_status & STATUS_CTR_FRZ != 0 {
            0
        } else {
            registers.global_control
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "twelve bits are left by the masks"
    )]
    fn request(&self, registers: &PmuRegisters, counter: CounterIndex) -> Option<CounterEventRequest> {
        if counter.fixed_number().is_some() {
            return None;
        }
        let value = registers.selectors[counter.slot()];
        // APM vol. 2 §13.2.1, HG_ONLY. A counter with exactly one of the bits needs EFER.SVME to
        // count at all (Linux, `amd_pmu_disable_virt`). Entries of a nested guest do not exit to
        // the VMM, so a guest-only counter does not count, and a host-only counter includes nested
        // guests.
        if self.depends_on_svme(value) && (value & GUEST_ONLY != 0 || !registers.svme) {
            return None;
        }
        // Bits 35:32 extend the event select to twelve bits.
        let select = EventSelect((value & selector::SELECT | value >> 24 & 0xF00) as u16);
        let request = general_request(Vendor::Amd, select, value);
        (request.user || request.kernel).then_some(request)
    }

    /// Returns whether the event selector `selector` has exactly one of its host-only and
    /// guest-only bits set. If both are set, counting is not restricted.
    fn depends_on_svme(&self, selector: u64) -> bool {
        !matches!(selector & (GUEST_ONLY | HOST_ONLY), 0 | 0x300_0000_0000)
    }

    /// Freezes the counters on a PMI if the guest has requested this. Models without branch records
    /// do not report this feature in CPUID.80000022H:EAX\[2\].
    fn freeze(&self, _: &PmuModel, registers: &mut PmuRegisters) -> bool {
        let freezes = registers.freezes_counters();
        if freezes {
            registers.global_status |= STATUS_CTR_FRZ;
        }
        freezes
    }

    fn in_use(&self, _: &PmuModel, _: &PmuRegisters) -> u64 {
        0
    }

    fn state_msrs(&self, model: &PmuModel) -> Vec<MsrAddress> {
        let global: &[u32] = match model.generation() {
            PmuGeneration::AmdV2 => &[PERF_CNTR_GLOBAL_CTL, PERF_CNTR_GLOBAL_STATUS],
            _ => &[],
        };
        let general = match model.generation() {
            PmuGeneration::AmdCore | PmuGeneration::AmdV2 => {
                general_msrs(model, |n| [PERF_CTL0 + 2 * n, PERF_CTR0 + 2 * n])
            }
            _ => general_msrs(model, |n| [PERF_LEGACY_CTL0 + n, PERF_LEGACY_CTR0 + n]),
        };
        global.iter().copied().chain(general).map(MsrAddress).collect()
    }

    fn addresses(&self) -> &'static [std::ops::RangeInclusive<u32>] {
        ADDRESSES
    }

    fn has_status(&self, model: &PmuModel) -> bool {
        model.generation() == PmuGeneration::AmdV2
    }

    /// Returns `false`, because the delivery of a PMI does not mask its local vector table entry on
    /// AMD processors (APM vol. 2 §16.4).
    fn delivery_masks_lvtpc(&self) -> bool {
        false
    }

    /// Returns `true`. After it has stopped its counters, Linux reads each counter that has
    /// overflowed up to 50 times, until the PMI handler has set a new period
    /// (`amd_pmu_wait_on_overflow`).
    fn driver_awaits_pmi(&self) -> bool {
        true
    }

    fn capabilities(&self, _: &PmuModel) -> u64 {
        0
    }

    fn branch_register(&self, model: &PmuModel, msr: MsrAddress) -> Option<BranchRegister> {
        branch_register(msr.0).filter(|_| model.has_branch_records())
    }

    fn write_branch_register(&self, register: BranchRegister, value: u64) -> RegisterWriteEffect {
        match register {
            BranchRegister::Control => RegisterWriteEffect::Store(value & LBR_ENABLE),
            BranchRegister::Filter => RegisterWriteEffect::Store(value & LBR_SELECT_MASK),
            BranchRegister::From(_) => RegisterWriteEffect::Store(value),
            BranchRegister::To(_) => RegisterWriteEffect::Store(value & !TO_RESERVED),
            // AMD models do not have these registers.
            BranchRegister::Depth | BranchRegister::Top | BranchRegister::Info(_) => {
                RegisterWriteEffect::Dropped
            }
        }
    }

    fn records_branches(&self, registers: &PmuRegisters) -> bool {
        registers.branches.control & LBR_ENABLE != 0 && registers.global_status & STATUS_LBR_FRZ == 0
    }

    fn branch_levels(&self, registers: &PmuRegisters) -> PrivilegeLevels {
        PrivilegeLevels {
            user: registers.branches.filter & SUPPRESS_USER == 0,
            kernel: registers.branches.filter & SUPPRESS_KERNEL == 0,
        }
    }

    fn selects_branch(&self, registers: &PmuRegisters, branch: &BranchEntry) -> bool {
        registers.branches.filter >> suppressing_bit(branch.kind) & 1 == 0
            && contain_branch(self.branch_levels(registers), branch)
    }

    /// Returns the register values of the record for `branch`. Predictions are unknown. A branch
    /// that the VMM recorded by single-stepping is valid and not speculative.
    fn branch_record(&self, branch: &BranchEntry) -> BranchRecord {
        BranchRecord {
            from: branch.from & !MISPREDICTED,
            to: branch.to & !(SPECULATIVE | TO_RESERVED) | VALID,
            info: 0,
        }
    }

    fn freeze_branches(&self, _: &PmuModel, registers: &mut PmuRegisters) {
        if registers.debug_control & DEBUGCTL_FREEZE_BRANCHES_ON_PMI != 0 {
            registers.global_status |= STATUS_LBR_FRZ;
        }
    }
}
