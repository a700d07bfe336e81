//! Reference PMU written directly from the manuals, register by register and count by count. The
//! reference is slow and shares no code with the crate. Addresses are literal numbers, counts are
//! added one at a time, and effects are immediate.

use vpmu::filter::{EventFilterAction, EventFilterSpec};

/// Vendor and generation of the reference PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceKind {
    IntelOff,
    AmdOff,
    Intel(u32),
    K7,
    Core,
    V2,
}

/// Returns the event select in the event selector value `selector`: twelve bits on AMD, eight bits
/// on Intel.
pub fn select_of(amd: bool, selector: u64) -> u64 {
    let low = selector & 0xFF;
    if amd {
        low | (selector >> 32 & 0xF) << 8
    } else {
        low
    }
}

/// Predicate that returns whether no backing (source of counts) can count for a counter. The first
/// parameter is `true` for AMD. The second is the selector value of a general-purpose counter, or
/// `None` for a fixed counter, whose number is the third parameter.
pub type UncountablePredicate = fn(bool, Option<u64>, u32) -> bool;

/// Event select that no backing (source of counts) can count in these tests.
pub const UNCOUNTABLE_SELECT: u64 = 0x55;

#[derive(Clone, Debug)]
pub struct ReferencePmu {
    pub kind: ReferenceKind,
    pub gp: u32,
    pub fixed: u32,
    pub width: u32,
    evtsel: Vec<u64>,
    pmc: Vec<u64>,
    fixed_ctr: Vec<u64>,
    fixed_ctrl: u64,
    global_ctrl: u64,
    global_status: u64,
    debugctl: u64,
    /// Value of EFER.SVME.
    pub svme: bool,
    pub pmi_due: bool,
    /// Mask of counters that requested the due PMI and whose overflows the guest has not yet
    /// served.
    pmi_for: u64,
    /// `true` if the VMM has tried to deliver the due PMI and failed.
    pmi_waits: bool,
    filter: Option<EventFilterSpec>,
    uncountable: UncountablePredicate,
}

impl ReferencePmu {
    pub fn new(
        kind: ReferenceKind,
        gp: u32,
        fixed: u32,
        width: u32,
        uncountable: UncountablePredicate,
    ) -> Self {
        let mut new = Self {
            kind,
            gp,
            fixed,
            width,
            evtsel: vec![],
            pmc: vec![],
            fixed_ctr: vec![],
            fixed_ctrl: 0,
            global_ctrl: 0,
            global_status: 0,
            debugctl: 0,
            svme: false,
            pmi_due: false,
            pmi_for: 0,
            pmi_waits: false,
            filter: None,
            uncountable,
        };
        new.reset();
        new
    }

    pub fn reset(&mut self) {
        self.evtsel = vec![0; self.gp as usize];
        self.pmc = vec![0; self.gp as usize];
        self.fixed_ctr = vec![0; self.fixed as usize];
        self.fixed_ctrl = 0;
        self.global_ctrl = (0..self.gp).map(|n| 1 << n).sum();
        self.global_status = 0;
        self.debugctl = 0;
        self.svme = false;
        self.pmi_delivered();
    }

    /// Records that the VMM has delivered the due PMI.
    pub fn pmi_delivered(&mut self) {
        self.pmi_due = false;
        self.pmi_for = 0;
        self.pmi_waits = false;
    }

    /// Records that the VMM cannot deliver the due PMI at present.
    pub fn pmi_waits(&mut self) {
        if self.pmi_due {
            self.pmi_waits = true;
            self.served(0);
        }
    }

    /// Marks the overflows of the counters in the mask `counters` as served by the guest.
    fn served(&mut self, counters: u64) {
        self.pmi_for &= !counters;
        if self.pmi_waits && self.pmi_for == 0 {
            self.pmi_delivered();
        }
    }

    pub fn set_filter(&mut self, filter: Option<EventFilterSpec>) {
        self.filter = filter;
    }

    pub fn freezes(&self) -> bool {
        self.debugctl & (1 << 12) != 0
    }

    fn version(&self) -> u32 {
        if let ReferenceKind::Intel(version) = self.kind {
            version
        } else {
            0
        }
    }

    pub fn is_amd(&self) -> bool {
        matches!(
            self.kind,
            ReferenceKind::AmdOff | ReferenceKind::K7 | ReferenceKind::Core | ReferenceKind::V2
        )
    }

    fn highest(&self) -> u64 {
        2u64.pow(self.width) - 1
    }

    /// Returns the mask of all counters in the global registers.
    fn all(&self) -> u64 {
        let general: u64 = (0..self.gp).map(|n| 1u64 << n).sum();
        let fixed: u64 = (0..self.fixed).map(|n| 1u64 << (32 + n)).sum();
        general + fixed
    }

    /// Executes RDMSR. Returns `None` if the instruction raises #GP.
    pub fn rdmsr(&self, msr: u32) -> Option<u64> {
        if self.is_amd() {
            self.rdmsr_amd(msr)
        } else {
            self.rdmsr_intel(msr)
        }
    }

    /// Executes WRMSR. Returns `None` if the instruction raises #GP.
    pub fn wrmsr(&mut self, msr: u32, value: u64) -> Option<()> {
        if self.is_amd() {
            self.wrmsr_amd(msr, value)
        } else {
            self.wrmsr_intel(msr, value)
        }
    }

    fn rdmsr_intel(&self, msr: u32) -> Option<u64> {
        let v = self.version();
        match msr {
            0xC1 | 0xC2 if v == 0 => Some(0),
            0xC1..=0xC8 => self.pmc.get((msr - 0xC1) as usize).copied(),
            0x4C1..=0x4C8 if v >= 2 => self.pmc.get((msr - 0x4C1) as usize).copied(),
            0x186..=0x18D => self.evtsel.get((msr - 0x186) as usize).copied(),
            0x309..=0x30C => self.fixed_ctr.get((msr - 0x309) as usize).copied(),
            0x1D9 if v >= 2 => Some(self.debugctl),
            0x345 if v >= 2 => Some(0x2000),
            0x38D if v >= 2 => Some(self.fixed_ctrl),
            0x38E if v >= 2 => Some(self.global_status),
            0x38F if v >= 2 => Some(self.global_ctrl),
            0x390 if v >= 2 => Some(0),
            0x391 if v >= 4 => Some(0),
            0x392 if v >= 4 => {
                let mut inuse = 0;
                for n in 0..self.gp {
                    if self.evtsel[n as usize] % 256 != 0 {
                        inuse |= 1 << n;
                    }
                    if self.evtsel[n as usize] & 0x10_0000 != 0 {
                        inuse |= 1 << 63;
                    }
                }
                for n in 0..self.fixed {
                    let field = self.fixed_ctrl >> (4 * n) & 0xF;
                    if field & 3 != 0 {
                        inuse |= 1 << (32 + n);
                    }
                    if field & 8 != 0 {
                        inuse |= 1 << 63;
                    }
                }
                Some(inuse)
            }
            _ => None,
        }
    }

    fn wrmsr_intel(&mut self, msr: u32, value: u64) -> Option<()> {
        let v = self.version();
        self.rdmsr_intel(msr)?; // WRMSR faults at each address at which RDMSR faults
        let all = self.all();
        let highest = self.highest();
        let no_bit_outside = |allowed: u64| {
            if value | allowed == allowed {
                Some(())
            } else {
                None
            }
        };
        match msr {
            0xC1 | 0xC2 if v == 0 => {}
            0xC1..=0xC8 => {
                let mut extended = value & 0xFFFF_FFFF;
                if extended >= 0x8000_0000 {
                    extended |= 0xFFFF_FFFF_0000_0000;
                }
                self.pmc[(msr - 0xC1) as usize] = extended & highest;
                if v == 1 {
                    self.served(1 << (msr - 0xC1));
                }
            }
            0x4C1..=0x4C8 => {
                no_bit_outside(highest)?;
                self.pmc[(msr - 0x4C1) as usize] = value;
            }
            0x186..=0x18D => {
                // SDM vol. 3, figure of version 3's IA32_PERFEVTSELx: AnyThread (21), which CPUID
                // reports as deprecated, and all bits above the counter mask are reserved.
                let fields = [0..=7u32, 8..=15, 16..=20, 22..=23, 24..=31];
                no_bit_outside(fields.into_iter().flatten().map(|bit| 1u64 << bit).sum())?;
                self.evtsel[(msr - 0x186) as usize] = value;
            }
            0x309..=0x30C => {
                no_bit_outside(highest)?;
                self.fixed_ctr[(msr - 0x309) as usize] = value;
            }
            0x1D9 => {
                // Only FREEZE_PERFMON_ON_PMI belongs to the PMU, so all other bits fault.
                no_bit_outside(1 << 12)?;
                self.debugctl = value;
            }
            0x38D => {
                no_bit_outside((0..self.fixed).map(|n| 0xB << (4 * n)).sum())?;
                self.fixed_ctrl = value;
            }
            0x38F => {
                no_bit_outside(all)?;
                self.global_ctrl = value;
            }
            0x390 => {
                // The bits that SDM vol. 4, 390H lists, one by one.
                let clear_ovf_buf = 1u64 << 62;
                let clear_cond_chgd = 1u64 << 63;
                let clear_ovf_uncore = if v > 2 { 1u64 << 61 } else { 0 };
                let clear_lbr_frz_ctr_frz_asci = if v > 3 { 0b111u64 << 58 } else { 0 };
                no_bit_outside(
                    all + clear_ovf_buf + clear_cond_chgd + clear_ovf_uncore + clear_lbr_frz_ctr_frz_asci,
                )?;
                self.global_status &= !value;
                self.served(value & all);
            }
            0x391 => {
                // SDM vol. 4, 391H: 58 LBR_Frz, 59 CTR_Frz, 60 ASCI, 61 uncore, 62 OvfBuf; 63 is
                // reserved.
                no_bit_outside(all + [58u32, 59, 60, 61, 62].map(|bit| 1u64 << bit).iter().sum::<u64>())?;
                self.global_status |= value;
            }
            _ => return None, // read-only
        }
        Some(())
    }

    /// Returns the number of the AMD counter to which the register `msr` belongs, and `true` if the
    /// register is the counter's event selector.
    fn amd_register(&self, msr: u32) -> Option<(usize, bool)> {
        let (n, selector) = match msr {
            0xC001_0000..=0xC001_0003 => (msr - 0xC001_0000, true),
            0xC001_0004..=0xC001_0007 => (msr - 0xC001_0004, false),
            0xC001_0200..=0xC001_021D if matches!(self.kind, ReferenceKind::Core | ReferenceKind::V2) => {
                ((msr - 0xC001_0200) / 2, msr % 2 == 0)
            }
            _ => return None,
        };
        if n < self.gp {
            Some((n as usize, selector))
        } else {
            None
        }
    }

    fn rdmsr_amd(&self, msr: u32) -> Option<u64> {
        match (self.kind, msr) {
            (ReferenceKind::AmdOff, 0xC001_0000..=0xC001_0007) => Some(0),
            (ReferenceKind::V2, 0xC000_0300) => Some(self.global_status),
            (ReferenceKind::V2, 0xC000_0301) => Some(self.global_ctrl),
            (ReferenceKind::V2, 0xC000_0302 | 0xC000_0303) => Some(0),
            _ => match self.amd_register(msr)? {
                (n, true) => Some(self.evtsel[n]),
                (n, false) => Some(self.pmc[n]),
            },
        }
    }

    fn wrmsr_amd(&mut self, msr: u32, value: u64) -> Option<()> {
        match (self.kind, msr) {
            (ReferenceKind::AmdOff, 0xC001_0000..=0xC001_0007) => {}
            (ReferenceKind::V2, 0xC000_0300) => {}
            (ReferenceKind::V2, 0xC000_0301) => self.global_ctrl = value & self.all(),
            (ReferenceKind::V2, 0xC000_0302) => {
                self.global_status &= !value;
                self.served(value);
            }
            (ReferenceKind::V2, 0xC000_0303) => self.global_status |= value & self.all(),
            _ => match self.amd_register(msr)? {
                (n, true) => self.evtsel[n] = value & !0xFFFF_FCF0_0028_0000,
                (n, false) => {
                    self.pmc[n] = value & self.highest();
                    if self.kind != ReferenceKind::V2 {
                        self.served(1 << n);
                    }
                }
            },
        }
        Some(())
    }

    /// Executes RDPMC. Returns `None` if the instruction raises #GP.
    pub fn rdpmc(&self, ecx: u32, cpl: u8, pce: bool) -> Option<u64> {
        if cpl != 0 && !pce {
            return None;
        }
        if ecx < 0x4000_0000 || self.is_amd() {
            return self.pmc.get(ecx as usize).copied();
        }
        if ecx < 0x8000_0000 {
            return self.fixed_ctr.get((ecx - 0x4000_0000) as usize).copied();
        }
        None
    }

    fn filter_allows_general(&self, selector: u64) -> bool {
        let Some(filter) = &self.filter else { return true };
        let select = select_of(self.is_amd(), selector);
        let umask = selector >> 8 & 0xFF;
        let mut included = false;
        let mut excluded = false;
        for entry in &filter.events {
            let mask = entry.umask_mask.unwrap_or(0);
            let matches = entry.umask_match.unwrap_or(0);
            if entry.select == select && umask & mask == matches {
                if entry.exclude {
                    excluded = true;
                } else {
                    included = true;
                }
            }
        }
        let listed = included && !excluded;
        match filter.action {
            EventFilterAction::Allow => listed,
            EventFilterAction::Deny => !listed,
        }
    }

    fn filter_allows_fixed(&self, n: u32) -> bool {
        let Some(filter) = &self.filter else { return true };
        let listed = filter.fixed_counters & (1 << n) != 0;
        match filter.action {
            EventFilterAction::Allow => listed,
            EventFilterAction::Deny => !listed,
        }
    }

    fn general_counts(&self, n: u32) -> bool {
        let selector = self.evtsel[n as usize];
        let enabled = selector & 1 << 22 != 0;
        let at_some_level = selector & 3 << 16 != 0;
        // In the reference model, the guest executes no nested guest.
        let outside_nested_guests = match (selector >> 40 & 1, selector >> 41 & 1) {
            _ if !self.is_amd() => true,
            (0, 0) | (1, 1) => true,
            (0, 1) => self.svme,
            _ => false,
        };
        let globally = match self.kind {
            ReferenceKind::Intel(1) | ReferenceKind::K7 | ReferenceKind::Core => true,
            _ => self.global_ctrl & 1 << n != 0,
        };
        enabled
            && at_some_level
            && globally
            && outside_nested_guests
            && !self.frozen()
            && !(self.uncountable)(self.is_amd(), Some(selector), 0)
            && self.filter_allows_general(selector)
    }

    fn fixed_counts(&self, n: u32) -> bool {
        self.fixed_ctrl >> (4 * n) & 3 != 0
            && self.global_ctrl & 1 << (32 + n) != 0
            && !self.frozen()
            && !(self.uncountable)(self.is_amd(), None, n)
            && self.filter_allows_fixed(n)
    }

    fn frozen(&self) -> bool {
        self.version() >= 4 && self.global_status & 1 << 59 != 0
    }

    /// Adds one count to each enabled counter.
    pub fn tick(&mut self) {
        let general: Vec<bool> = (0..self.gp).map(|n| self.general_counts(n)).collect();
        let fixed: Vec<bool> = (0..self.fixed).map(|n| self.fixed_counts(n)).collect();
        let mut interrupt = 0;
        for n in 0..self.gp as usize {
            if general[n] {
                if self.pmc[n] == self.highest() {
                    self.pmc[n] = 0;
                    self.global_status |= 1 << n;
                    if self.evtsel[n] & 1 << 20 != 0 {
                        interrupt |= 1 << n;
                    }
                } else {
                    self.pmc[n] += 1;
                }
            }
        }
        for n in 0..self.fixed as usize {
            if fixed[n] {
                if self.fixed_ctr[n] == self.highest() {
                    self.fixed_ctr[n] = 0;
                    self.global_status |= 1 << (32 + n);
                    if self.fixed_ctrl >> (4 * n) & 8 != 0 {
                        interrupt |= 1 << (32 + n);
                    }
                } else {
                    self.fixed_ctr[n] += 1;
                }
            }
        }
        self.request_pmi(interrupt);
    }

    /// Records that the counters in the mask `counters` have overflowed and request a PMI.
    fn request_pmi(&mut self, counters: u64) {
        if counters == 0 {
            return;
        }
        self.pmi_due = true;
        self.pmi_for |= counters;
        if self.freezes() {
            if self.version() >= 4 {
                self.global_status |= 1 << 59;
            } else {
                self.global_ctrl = 0;
            }
        }
    }

    /// Counts one instruction that the hypervisor completed, at CPL 0 if `kernel` is `true`. Event
    /// 0xC0 with unit mask 0 and fixed counter 0 count instructions.
    pub fn retire(&mut self, kernel: bool) {
        let mut interrupt = 0u64;
        for n in 0..self.gp {
            let selector = self.evtsel[n as usize];
            let instructions = select_of(self.is_amd(), selector) == 0xC0 && selector >> 8 & 0xFF == 0;
            let plain = selector & 1 << 18 == 0 && selector & 1 << 23 == 0 && selector >> 24 & 0xFF == 0;
            let level = if kernel { 1 << 17 } else { 1 << 16 };
            if self.general_counts(n) && instructions && plain && selector & level != 0 {
                self.pmc[n as usize] += 1;
                if self.pmc[n as usize] > self.highest() {
                    self.pmc[n as usize] = 0;
                    self.global_status |= 1 << n;
                    interrupt |= u64::from(selector & 1 << 20 != 0) << n;
                }
            }
        }
        let level = if kernel { 1 } else { 2 };
        if self.fixed > 0 && self.fixed_counts(0) && self.fixed_ctrl & level != 0 {
            self.fixed_ctr[0] += 1;
            if self.fixed_ctr[0] > self.highest() {
                self.fixed_ctr[0] = 0;
                self.global_status |= 1 << 32;
                interrupt |= u64::from(self.fixed_ctrl & 8 != 0) << 32;
            }
        }
        self.request_pmi(interrupt);
    }

    /// Returns CPUID.0AH as (EAX, EBX, ECX, EDX), with all events available.
    pub fn cpuid_a(&self) -> [u32; 4] {
        let v = self.version();
        if v == 0 {
            return [0; 4];
        }
        let events = if self.fixed >= 4 { 8 } else { 7 };
        let eax = v + self.gp * 0x100 + self.width * 0x1_0000 + events * 0x100_0000;
        let edx = if v > 1 {
            self.fixed + self.width * 32 + 0x8000
        } else {
            0
        };
        let ecx = if v >= 5 { 2u32.pow(self.fixed) - 1 } else { 0 };
        [eax, 0, ecx, edx]
    }
}
