//! Intel PMU: architectural performance monitoring, versions 1 to 5.
//!
//! References: Intel SDM vol. 3B, chapter "Performance Monitoring", section "Architectural
//! Performance Monitoring" (one subsection per version), and vol. 4 for the addresses.

use perf_core::branch::{BranchEntry, BranchKind};

use crate::PrivilegeLevels;
use crate::branches::{BranchControls, BranchRecord, BranchRegister, MAX_BRANCH_RECORDS};
use crate::events::{CounterEventRequest, EventSelect, EventSelection, decode_fixed};
use crate::freeze::{DEBUGCTL_FREEZE_BRANCHES_ON_PMI, STATUS_CTR_FRZ, STATUS_LBR_FRZ};
use crate::index::{CounterIndex, MAX_GENERAL, MsrAddress, RdpmcIndex, counters_in};
use crate::model::PmuModel;
use crate::model_name::Vendor;
use crate::vendor::{
    PmuRegister, PmuRegisters, RegisterWriteEffect, VendorOps, contain_branch, general_msrs, general_request,
    selector,
};

/// IA32_PMCn (0xC1..=0xC8). Requires CPUID.0AH:EAX\[15:8\] > n. A write stores bits 31:0,
/// sign-extended.
pub const IA32_PMC0: u32 = 0xC1;
/// IA32_PERFEVTSELn (0x186..=0x18D). Requires CPUID.0AH:EAX\[15:8\] > n.
pub const IA32_PERFEVTSEL0: u32 = 0x186;
/// IA32_DEBUGCTL (0x1D9). Bit 12 (freeze counters on PMI) requires CPUID.0AH:EAX\[7:0\] > 1.
pub const IA32_DEBUGCTL: u32 = 0x1D9;
/// IA32_FIXED_CTRn (0x309..=0x30C). Requires CPUID.0AH:EDX\[4:0\] > n or, from version 5,
/// CPUID.0AH:ECX\[n\].
pub const IA32_FIXED_CTR0: u32 = 0x309;
/// IA32_PERF_CAPABILITIES (0x345). Requires CPUID.01H:ECX.PDCM. Read-only.
pub const IA32_PERF_CAPABILITIES: u32 = 0x345;
/// IA32_FIXED_CTR_CTRL (0x38D). Requires CPUID.0AH:EAX\[7:0\] > 1.
pub const IA32_FIXED_CTR_CTRL: u32 = 0x38D;
/// IA32_PERF_GLOBAL_STATUS (0x38E). Requires CPUID.0AH:EAX\[7:0\] > 1. Read-only.
pub const IA32_PERF_GLOBAL_STATUS: u32 = 0x38E;
/// IA32_PERF_GLOBAL_CTRL (0x38F). Requires CPUID.0AH:EAX\[7:0\] > 1.
pub const IA32_PERF_GLOBAL_CTRL: u32 = 0x38F;
/// IA32_PERF_GLOBAL_OVF_CTRL (0x390), named IA32_PERF_GLOBAL_STATUS_RESET from version 4. Requires
/// CPUID.0AH:EAX\[7:0\] > 1.
pub const IA32_PERF_GLOBAL_STATUS_RESET: u32 = 0x390;
/// IA32_PERF_GLOBAL_STATUS_SET (0x391). Requires CPUID.0AH:EAX\[7:0\] > 3.
pub const IA32_PERF_GLOBAL_STATUS_SET: u32 = 0x391;
/// IA32_PERF_GLOBAL_INUSE (0x392). Requires CPUID.0AH:EAX\[7:0\] > 3. Read-only.
pub const IA32_PERF_GLOBAL_INUSE: u32 = 0x392;
/// IA32_A_PMCn (0x4C1..=0x4C8). Requires IA32_PERF_CAPABILITIES\[13\] and CPUID.0AH:EAX\[15:8\] >
/// n.
pub const IA32_A_PMC0: u32 = 0x4C1;

/// MSR_LASTBRANCH_TOS (0x1C9) of processors with model-specific LBRs. All models with branch
/// records have this register, because Linux does not use branch records on a processor with
/// model-specific LBRs unless the register is writable.
pub const MSR_LASTBRANCH_TOS: u32 = 0x1C9;
/// IA32_LBR_n_INFO (0x1200..=0x121F). All registers of record n require CPUID.(07H,0):EDX\[19\] and
/// IA32_LBR_DEPTH > n.
pub const IA32_LBR_INFO0: u32 = 0x1200;
/// IA32_LBR_CTL (0x14CE). Requires CPUID.(07H,0):EDX\[19\].
pub const IA32_LBR_CTL: u32 = 0x14CE;
/// IA32_LBR_DEPTH (0x14CF). Requires CPUID.(07H,0):EDX\[19\]. A write clears the records.
pub const IA32_LBR_DEPTH: u32 = 0x14CF;
/// IA32_LBR_n_FROM_IP (0x1500..=0x151F): source address of branch record n.
pub const IA32_LBR_FROM_IP0: u32 = 0x1500;
/// IA32_LBR_n_TO_IP (0x1600..=0x161F): target address of branch record n.
pub const IA32_LBR_TO_IP0: u32 = 0x1600;

/// Numbers of branch records that IA32_LBR_DEPTH accepts, as reported in CPUID.1CH:EAX\[7:0\].
const LBR_DEPTHS: [u64; 3] = [8, 16, 32];
/// IA32_LBR_CTL.LBREn: branch records are enabled.
const LBR_ENABLE: u64 = 1 << 0;
/// IA32_LBR_CTL bits that enable recording of branches: OS at CPL 0, and USR at CPL 1 to 3.
const LBR_OS: u64 = 1 << 1;
const LBR_USR: u64 = 1 << 2;
/// IA32_LBR_CTL bits that do not fault when set: LBREn, OS, USR and the branch filter bits.
/// Call-stack mode (bit 3) faults, because CPUID.1CH:EBX\[2\] does not announce it.
const LBR_WRITABLE: u64 = LBR_ENABLE | LBR_OS | LBR_USR | 0x7F << 16;
/// Lowest bit of the branch type in IA32_LBR_n_INFO (BR_TYPE).
const LBR_INFO_TYPE_SHIFT: u32 = 56;
/// Bits of IA32_LBR_n_INFO that a write does not store.
const LBR_INFO_UNDEFINED: u64 = 0x00FF_FFFF_FFFF_0000;
/// Writable bits of MSR_LASTBRANCH_TOS, which can hold the index of any record.
const LASTBRANCH_TOS: u64 = 0x1F;

/// IA32_PERF_CAPABILITIES.FW_WRITE: the full-width registers from 0x4C1 exist. The PEBS format is 0
/// because PEBS is not implemented.
const CAPABILITIES_FW_WRITE: u64 = 1 << 13;
/// IA32_PERF_CAPABILITIES.LBR_FMT for architectural LBRs. The field is 0 without branch records.
const CAPABILITIES_ARCH_LBR: u64 = 0x3F;

/// IA32_PERFEVTSELn bits that fault when set: 63:32 and AnyThread (21), which CPUID.0AH:EDX\[15\]
/// declares deprecated. Pin control (19) is writable and has no effect, as on processors without
/// the pins.
const SELECTOR_RESERVED: u64 = 0xFFFF_FFFF_0000_0000 | 1 << 21;
/// IA32_PERFEVTSELn.IN_TX: count in transactions only. Requires CPUID.(07H,0):EBX.RTM or HLE. See
/// SDM vol. 3, "Intel TSX and Performance Monitoring".
const SELECTOR_IN_TX: u64 = 1 << 32;
/// IA32_PERFEVTSEL2.IN_TXCP: exclude counts of aborted transactions. Requires the same CPUID bits
/// as IN_TX and exists in this selector only.
const SELECTOR_IN_TXCP: u64 = 1 << 33;
/// Number of the only general-purpose counter whose selector has IN_TXCP.
const IN_TXCP_COUNTER: u32 = 2;

/// Width of each fixed counter's field in IA32_FIXED_CTR_CTRL, in bits.
const FIXED_FIELD_BITS: u32 = 4;
/// Bit in a counter's field of IA32_FIXED_CTR_CTRL: count at CPL 0.
const FIXED_OS: u64 = 0b0001;
/// Bit in a counter's field of IA32_FIXED_CTR_CTRL: count at CPL 1 to 3.
const FIXED_USR: u64 = 0b0010;
/// Bit in a counter's field of IA32_FIXED_CTR_CTRL: interrupt on overflow.
const FIXED_PMI: u64 = 0b1000;
/// Writable bits in a counter's field of IA32_FIXED_CTR_CTRL. Bit 2 (AnyThread) is deprecated.
const FIXED_WRITABLE: u64 = FIXED_OS | FIXED_USR | FIXED_PMI;

/// IA32_PERF_GLOBAL_STATUS.ASCI (version 4): counts may include enclave execution. In this vPMU,
/// only software can set this bit.
const STATUS_ASCI: u64 = 1 << 60;
/// IA32_PERF_GLOBAL_STATUS.Ovf_Uncore (version 3): an uncore counter overflowed. In this vPMU, only
/// software can set this bit (version 4).
const STATUS_OVF_UNCORE: u64 = 1 << 61;
/// IA32_PERF_GLOBAL_STATUS.OvfBuf: the debug store buffer overflowed. In this vPMU, only software
/// can set this bit (version 4).
const STATUS_OVF_BUF: u64 = 1 << 62;
/// IA32_PERF_GLOBAL_STATUS.CondChgd. Never set, not even by software.
const STATUS_COND_CHGD: u64 = 1 << 63;

/// IA32_PERF_GLOBAL_INUSE.PMI: at least one counter has its interrupt enabled.
const INUSE_PMI: u64 = 1 << 63;

/// ECX bit of RDPMC that selects the fixed counters.
const RDPMC_FIXED: u32 = 1 << 30;

/// All addresses at which an Intel processor may have a PMU register, including unimplemented ones.
///
/// The VMM must trap all of them because KVM returns 0 for some of them when its own PMU is off.
/// IA32_DEBUGCTL is not in the list; see [`PmuModel::trapped_msrs`].
const ADDRESSES: &[std::ops::RangeInclusive<u32>] = &[
    // MSR_LASTBRANCH_n_FROM_IP and _TO_IP of Core 2 and Atom processors.
    0x40..=0x47,
    0x60..=0x67,
    IA32_PMC0..=0xC8,
    IA32_PERFEVTSEL0..=0x18D,
    // MSR_OFFCORE_RSP_0 and _1.
    0x1A6..=0x1A7,
    // MSR_LBR_SELECT, MSR_LASTBRANCH_TOS.
    0x1C8..=0x1C9,
    // IA32_FIXED_CTR0 to 15.
    IA32_FIXED_CTR0..=0x318,
    // MSR_PERF_METRICS.
    0x329..=0x329,
    IA32_PERF_CAPABILITIES..=IA32_PERF_CAPABILITIES,
    IA32_FIXED_CTR_CTRL..=IA32_PERF_GLOBAL_INUSE,
    // IA32_PEBS_ENABLE, MSR_PEBS_DATA_CFG.
    0x3F1..=0x3F2,
    // MSR_PEBS_LD_LAT_THRESHOLD, MSR_PEBS_FRONTEND.
    0x3F6..=0x3F7,
    IA32_A_PMC0..=0x4C8,
    // IA32_DS_AREA.
    0x600..=0x600,
    // MSR_LASTBRANCH_n_FROM_IP, _TO_IP and MSR_LBR_INFO_n.
    0x680..=0x69F,
    0x6C0..=0x6DF,
    0xDC0..=0xDDF,
    // Architectural LBRs: IA32_LBR_n_INFO, IA32_LBR_CTL and _DEPTH, IA32_LBR_n_FROM_IP and _TO_IP.
    0x1200..=0x121F,
    0x14CE..=0x14CF,
    0x1500..=0x151F,
    0x1600..=0x161F,
    // Version 6: IA32_PMC_GPn and IA32_PMC_FXn with four registers each, up to the maximum address.
    0x1900..=0x19FF,
];

/// Intel implementation of [`VendorOps`].
#[derive(Debug)]
pub(crate) struct Intel;

/// Returns the general-purpose counter to which the register at `address` belongs. Returns `None`
/// if the model does not have this counter. `base` is the address of the same register of counter
/// 0.
fn in_bank(model: &PmuModel, address: u32, base: u32) -> Option<CounterIndex> {
    CounterIndex::general(address.checked_sub(base)?).filter(|&c| model.has_counter(c))
}

/// Returns the four bits of IA32_FIXED_CTR_CTRL that control fixed counter `n`.
fn fixed_field(registers: &PmuRegisters, n: u32) -> u64 {
    registers.fixed_control >> (n * FIXED_FIELD_BITS) & 0xF
}

/// Returns the writable bits of IA32_FIXED_CTR_CTRL on this model.
fn fixed_control_mask(model: &PmuModel) -> u64 {
    (0..u8::BITS)
        .filter(|n| model.fixed_bitmap() >> n & 1 != 0)
        .fold(0, |mask, n| mask | FIXED_WRITABLE << (n * FIXED_FIELD_BITS))
}

/// Returns those bits of the global status that IA32_PERF_GLOBAL_STATUS_RESET can clear, in
/// addition to the counters' overflow bits (SDM vol. 4, 390H). Trace_ToPA_PMI (55) is not included,
/// because no model has processor trace.
fn clearable_status(version: u8) -> u64 {
    let mut bits = STATUS_OVF_BUF | STATUS_COND_CHGD;
    if version >= 3 {
        bits |= STATUS_OVF_UNCORE;
    }
    if version >= 4 {
        bits |= STATUS_LBR_FRZ | STATUS_CTR_FRZ | STATUS_ASCI;
    }
    bits
}

/// Returns those bits of the global status that IA32_PERF_GLOBAL_STATUS_SET can set, in addition to
/// the counters' overflow bits (SDM vol. 4, 391H).
fn settable_status(version: u8) -> u64 {
    if version >= 4 {
        STATUS_LBR_FRZ | STATUS_CTR_FRZ | STATUS_ASCI | STATUS_OVF_UNCORE | STATUS_OVF_BUF
    } else {
        0
    }
}

/// Returns the writable bits of the event selector of `counter`.
fn selector_mask(model: &PmuModel, counter: CounterIndex) -> u64 {
    let transactions = match (model.has_transactions(), counter.bit()) {
        (false, _) => 0,
        (true, IN_TXCP_COUNTER) => SELECTOR_IN_TX | SELECTOR_IN_TXCP,
        (true, _) => SELECTOR_IN_TX,
    };
    !SELECTOR_RESERVED | transactions
}

/// Returns the effect of writing `value` to a register: the value is stored if all its set bits are
/// in `allowed`, otherwise the write faults.
fn checked(value: u64, allowed: u64) -> RegisterWriteEffect {
    if value & !allowed == 0 {
        RegisterWriteEffect::Store(value)
    } else {
        RegisterWriteEffect::Fault
    }
}

/// Returns the branch record register or control register at `address`.
#[expect(clippy::cast_possible_truncation, reason = "below MAX_BRANCH_RECORDS")]
fn branch_register(address: u32) -> Option<BranchRegister> {
    let record = |base: u32| {
        let n = address.checked_sub(base)?;
        (n < MAX_BRANCH_RECORDS as u32).then_some(n as u8)
    };
    match address {
        MSR_LASTBRANCH_TOS => Some(BranchRegister::Top),
        IA32_LBR_CTL => Some(BranchRegister::Control),
        IA32_LBR_DEPTH => Some(BranchRegister::Depth),
        _ => record(IA32_LBR_FROM_IP0)
            .map(BranchRegister::From)
            .or_else(|| record(IA32_LBR_TO_IP0).map(BranchRegister::To))
            .or_else(|| record(IA32_LBR_INFO0).map(BranchRegister::Info)),
    }
}

/// Returns the effect of a write to a branch record register or control register. Recorded
/// addresses must be canonical for 57-bit linear addresses.
fn write_branch_register(register: BranchRegister, value: u64) -> RegisterWriteEffect {
    match register {
        BranchRegister::Control => checked(value, LBR_WRITABLE),
        BranchRegister::Depth if LBR_DEPTHS.contains(&value) => RegisterWriteEffect::Store(value),
        BranchRegister::Top => checked(value, LASTBRANCH_TOS),
        BranchRegister::Info(_) => RegisterWriteEffect::Store(value & !LBR_INFO_UNDEFINED),
        BranchRegister::From(_) | BranchRegister::To(_) if matches!(value.cast_signed() >> 56, 0 | -1) => {
            RegisterWriteEffect::Store(value)
        }
        _ => RegisterWriteEffect::Fault,
    }
}

/// Returns the IA32_LBR_CTL bit that selects branches of type `kind`, and their BR_TYPE (SDM vol.
/// 4, 14CEH and 1200H).
fn branch_kind(kind: BranchKind) -> (u32, u64) {
    match kind {
        BranchKind::Conditional => (16, 0),
        BranchKind::Unconditional => (17, 2),
        BranchKind::Indirect => (18, 1),
        BranchKind::Call => (19, 4),
        BranchKind::IndirectCall => (20, 3),
        BranchKind::Return => (21, 5),
        BranchKind::Unknown
        | BranchKind::SystemCall
        | BranchKind::SystemReturn
        | BranchKind::InterruptReturn
        | BranchKind::Interrupt => (22, 8),
    }
}

impl VendorOps for Intel {
    fn register(&self, model: &PmuModel, msr: MsrAddress) -> Option<PmuRegister> {
        let version = model.intel_version();
        let from = |needed: u8, register| (version >= needed).then_some(register);
        match msr.0 {
            // The two P6 counters read as 0 even without a PMU.
            0xC1 | 0xC2 if model.is_off() => Some(PmuRegister::Absent),
            IA32_PMC0..=0xC8 => in_bank(model, msr.0, IA32_PMC0).map(PmuRegister::Counter),
            IA32_PERFEVTSEL0..=0x18D => in_bank(model, msr.0, IA32_PERFEVTSEL0).map(PmuRegister::Selector),
            IA32_A_PMC0..=0x4C8 if version >= 2 => {
                in_bank(model, msr.0, IA32_A_PMC0).map(PmuRegister::FullWidthCounter)
            }
            IA32_FIXED_CTR0..=0x30C => CounterIndex::fixed(msr.0 - IA32_FIXED_CTR0)
                .filter(|&c| model.has_counter(c))
                .map(PmuRegister::Counter),
            IA32_DEBUGCTL => from(2, PmuRegister::DebugControl),
            IA32_PERF_CAPABILITIES => from(2, PmuRegister::Capabilities),
            IA32_FIXED_CTR_CTRL => from(2, PmuRegister::FixedControl),
            IA32_PERF_GLOBAL_STATUS => from(2, PmuRegister::GlobalStatus),
            IA32_PERF_GLOBAL_CTRL => from(2, PmuRegister::GlobalControl),
            IA32_PERF_GLOBAL_STATUS_RESET => from(2, PmuRegister::GlobalStatusReset),
            IA32_PERF_GLOBAL_STATUS_SET => from(4, PmuRegister::GlobalStatusSet),
            IA32_PERF_GLOBAL_INUSE => from(4, PmuRegister::GlobalInUse),
            _ => None,
        }
    }

    /// Decodes the operand of RDPMC (SDM vol. 2, RDPMC). ECX\[29:0\] is the counter number,
    /// ECX\[30\] the type, and ECX\[31\] the fast mode, which no processor with architectural
    /// performance monitoring supports.
    fn rdpmc(&self, model: &PmuModel, index: RdpmcIndex) -> Option<CounterIndex> {
        let counter = if index.0 & RDPMC_FIXED != 0 {
            CounterIndex::fixed(index.0 & !RDPMC_FIXED)
        } else {
            CounterIndex::general(index.0)
        };
        counter.filter(|&c| model.has_counter(c))
    }

    fn write(&self, model: &PmuModel, register: PmuRegister, value: u64) -> RegisterWriteEffect {
        let width = model.width();
        let counters = model.counters_mask();
        match register {
            PmuRegister::Selector(c) => checked(value, selector_mask(model, c)),
            PmuRegister::Counter(c) if c.fixed_number().is_none() => {
                RegisterWriteEffect::Store(width.sign_extend_32(value))
            }
            PmuRegister::Counter(_) | PmuRegister::FullWidthCounter(_) => checked(value, width.mask()),
            PmuRegister::FixedControl => checked(value, fixed_control_mask(model)),
            PmuRegister::GlobalControl => checked(value, counters),
            PmuRegister::GlobalStatusReset => {
                checked(value, counters | clearable_status(model.intel_version()))
            }
            // Guests of versions below 4 cannot write this register. For them, this arm only
            // validates the status bits of a saved state.
            PmuRegister::GlobalStatusSet => checked(value, counters | settable_status(model.intel_version())),
            PmuRegister::DebugControl => checked(value, model.debug_control_bits()),
            PmuRegister::Absent => RegisterWriteEffect::Dropped,
            PmuRegister::GlobalStatus | PmuRegister::GlobalInUse | PmuRegister::Capabilities => {
                RegisterWriteEffect::Fault
            }
        }
    }

    /// Returns the register values at reset: zero, except for IA32_PERF_GLOBAL_CTRL, which enables
    /// every general-purpose counter (SDM vol. 3, table "IA-32 and Intel 64 Processor States
    /// Following Power-up, Reset, or INIT").
    fn at_reset(&self, model: &PmuModel) -> PmuRegisters {
        let global_control = if model.intel_version() >= 2 {
            (1 << model.general()) - 1
        } else {
            model.counters_mask()
        };
        PmuRegisters {
            selectors: [0; MAX_GENERAL],
            fixed_control: 0,
            global_control,
            global_status: 0,
            debug_control: 0,
            branches: BranchControls {
                depth: if model.has_branch_records() {
                    MAX_BRANCH_RECORDS as u64
                } else {
                    0
                },
                ..BranchControls::default()
            },
            svme: false,
        }
    }

    fn is_selected(&self, registers: &PmuRegisters, counter: CounterIndex) -> bool {
        match counter.fixed_number() {
            Some(n) => fixed_field(registers, n) & (FIXED_OS | FIXED_USR) != 0,
            None => registers.selectors[counter.slot()] & selector::EN != 0,
        }
    }

    fn interrupts(&self, registers: &PmuRegisters, counter: CounterIndex) -> bool {
        match counter.fixed_number() {
            Some(n) => fixed_field(registers, n) & FIXED_PMI != 0,
            None => registers.selectors[counter.slot()] & selector::INT != 0,
        }
    }

    fn globally_enabled(&self, registers: &PmuRegisters) -> u64 {
        // CTR_FRZ can only be set from version 4 on (SDM vol. 3, "Streamlined
        // Freeze_PerfMon_On_PMI").
        if registers.global_status & STATUS_CTR_FRZ != 0 {
            0
        } else {
            registers.global_control
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "a fixed counter's number is below MAX_FIXED"
    )]
    fn request(&self, registers: &PmuRegisters, counter: CounterIndex) -> Option<CounterEventRequest> {
        let request = match counter.fixed_number() {
            Some(n) => {
                let field = fixed_field(registers, n);
                CounterEventRequest {
                    vendor: Vendor::Intel,
                    selection: EventSelection::Fixed(n as u8),
                    event: decode_fixed(n),
                    user: field & FIXED_USR != 0,
                    kernel: field & FIXED_OS != 0,
                    edge: false,
                    invert: false,
                    cmask: 0,
                    in_transaction: false,
                    checkpointed: false,
                }
            }
            None => {
                let value = registers.selectors[counter.slot()];
                CounterEventRequest {
                    in_transaction: value & SELECTOR_IN_TX != 0,
                    checkpointed: value & SELECTOR_IN_TXCP != 0,
                    ..general_request(
                        Vendor::Intel,
                        EventSelect((value & selector::SELECT) as u16),
                        value,
                    )
                }
            }
        };
        (request.user || request.kernel).then_some(request)
    }

    /// Freezes the counters on a PMI (SDM vol. 3, "Freeze_PerfMon_On_PMI"). Versions 2 and 3 clear
    /// IA32_PERF_GLOBAL_CTRL. From version 4 the PMI sets CTR_FRZ and leaves the control register
    /// unchanged.
    fn freeze(&self, model: &PmuModel, registers: &mut PmuRegisters) -> bool {
        if !registers.freezes_counters() {
            return false;
        }
        if model.intel_version() >= 4 {
            registers.global_status |= STATUS_CTR_FRZ;
        } else {
            registers.global_control = 0;
        }
        true
    }

    fn depends_on_svme(&self, _: u64) -> bool {
        false
    }

    /// Returns IA32_PERF_GLOBAL_INUSE (SDM vol. 3, "IA32_PERF_GLOBAL_INUSE MSR"). A general-purpose
    /// counter is in use when its event select is not 0, a fixed counter when its enable field is
    /// not 0, and the PMI when any control enables an interrupt.
    fn in_use(&self, model: &PmuModel, registers: &PmuRegisters) -> u64 {
        counters_in(model.counters_mask()).fold(0, |bits, counter| {
            let programmed = match counter.fixed_number() {
                Some(_) => self.is_selected(registers, counter),
                None => registers.selectors[counter.slot()] & selector::SELECT != 0,
            };
            let pmi = if self.interrupts(registers, counter) {
                INUSE_PMI
            } else {
                0
            };
            bits | pmi | if programmed { counter.mask() } else { 0 }
        })
    }

    fn state_msrs(&self, model: &PmuModel) -> Vec<MsrAddress> {
        let mut addresses = Vec::new();
        if model.intel_version() >= 2 {
            addresses.extend([
                IA32_FIXED_CTR_CTRL,
                IA32_PERF_GLOBAL_CTRL,
                IA32_PERF_GLOBAL_STATUS,
            ]);
            let fixed = counters_in(model.counters_mask()).filter_map(CounterIndex::fixed_number);
            addresses.extend(fixed.map(|n| IA32_FIXED_CTR0 + n));
        }
        addresses.extend(general_msrs(model, |n| [IA32_PERFEVTSEL0 + n, IA32_PMC0 + n]));
        addresses.into_iter().map(MsrAddress).collect()
    }

    fn addresses(&self) -> &'static [std::ops::RangeInclusive<u32>] {
        ADDRESSES
    }

    fn has_status(&self, model: &PmuModel) -> bool {
        model.intel_version() >= 2
    }

    /// Returns `true`, because the delivery of a PMI masks the performance counter entry of the
    /// local vector table (SDM vol. 3, "Local Vector Table").
    fn delivery_masks_lvtpc(&self) -> bool {
        true
    }

    /// Returns `false`. Linux's Intel driver does not wait for the PMI of a stopped counter.
    fn driver_awaits_pmi(&self) -> bool {
        false
    }

    fn capabilities(&self, model: &PmuModel) -> u64 {
        if model.has_branch_records() {
            CAPABILITIES_FW_WRITE | CAPABILITIES_ARCH_LBR
        } else {
            CAPABILITIES_FW_WRITE
        }
    }

    fn branch_register(&self, model: &PmuModel, msr: MsrAddress) -> Option<BranchRegister> {
        branch_register(msr.0).filter(|_| model.has_branch_records())
    }

    fn write_branch_register(&self, register: BranchRegister, value: u64) -> RegisterWriteEffect {
        write_branch_register(register, value)
    }

    fn records_branches(&self, registers: &PmuRegisters) -> bool {
        registers.branches.control & LBR_ENABLE != 0 && registers.global_status & STATUS_LBR_FRZ == 0
    }

    fn branch_levels(&self, registers: &PmuRegisters) -> PrivilegeLevels {
        PrivilegeLevels {
            user: registers.branches.control & LBR_USR != 0,
            kernel: registers.branches.control & LBR_OS != 0,
        }
    }

    fn selects_branch(&self, registers: &PmuRegisters, branch: &BranchEntry) -> bool {
        let (bit, _) = branch_kind(branch.kind);
        registers.branches.control >> bit & 1 != 0 && contain_branch(self.branch_levels(registers), branch)
    }

    /// Returns the register values of the record for `branch`. Predictions, cycles and transactions
    /// are 0, because CPUID.1CH:ECX does not report them as supported.
    fn branch_record(&self, branch: &BranchEntry) -> BranchRecord {
        let (_, kind) = branch_kind(branch.kind);
        BranchRecord {
            from: branch.from,
            to: branch.to,
            info: kind << LBR_INFO_TYPE_SHIFT,
        }
    }

    /// Freezes the branch records on a PMI (SDM vol. 3, "Freeze_LBRs_On_PMI"). Before version 4,
    /// the PMI clears the enable bit. From version 4, the PMI sets LBR_FRZ.
    fn freeze_branches(&self, model: &PmuModel, registers: &mut PmuRegisters) {
        if registers.debug_control & DEBUGCTL_FREEZE_BRANCHES_ON_PMI == 0 {
            return;
        }
        if model.intel_version() >= 4 {
            registers.global_status |= STATUS_LBR_FRZ;
        } else {
            registers.branches.control &= !LBR_ENABLE;
        }
    }
}
