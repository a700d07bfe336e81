//! Stream of guest and host operations, decoded from bytes and applied to a [`Vpmu`] and to the
//! [`ReferencePmu`].
//!
//! Every byte string is a valid stream, so fuzzers, proptest and random generators can all provide
//! input.

use std::sync::Arc;

use vpmu::filter::{EventFilterAction, EventFilterEntrySpec, EventFilterSpec};
use vpmu::sim::SimCounterEvents;
use vpmu::*;

use super::reference::{ReferenceKind, ReferencePmu, UNCOUNTABLE_SELECT, select_of};

/// Reader of numbers from a byte string. Returns zeros after the end.
pub struct ByteSource<'a> {
    rest: &'a [u8],
}

impl<'a> ByteSource<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.rest.split_first() else {
            return 0;
        };
        self.rest = rest;
        first
    }

    fn below(&mut self, limit: u32) -> u32 {
        u32::from(self.byte()) % limit
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn flag(&mut self) -> bool {
        self.byte() & 1 != 0
    }
}

/// PMU and reference model, which must always agree.
pub struct CheckedPmu<H> {
    vpmu: Vpmu,
    events: H,
    reference: ReferencePmu,
    filter: Arc<EventFilter>,
    /// `true` while the host delays overflow notifications, so that the PMU may lag behind the
    /// reference.
    late: bool,
    now_ns: u64,
    addresses: Vec<u32>,
    /// Number of operations applied so far.
    pub operations: u64,
}

/// Counter events that a test can advance.
pub trait TestEvents {
    /// Implementation of [`CounterEvents`] that the PMU uses.
    type Events: CounterEvents;

    /// Creates counter events for a guest PMU of `vendor`.
    fn new(vendor: Vendor) -> Self;

    /// Returns the counter events, to be passed to the PMU.
    fn events(&mut self) -> &mut Self::Events;

    /// Returns whether no backing (source of counts) can count for the general-purpose counter with
    /// the selector value `selector`, or for the fixed counter `fixed` if `selector` is `None`.
    fn uncountable(amd: bool, selector: Option<u64>, fixed: u32) -> bool;

    /// Runs the guest for up to `ticks` ticks, but only until an armed overflow occurs. Returns the
    /// number of ticks run.
    fn run(&mut self, ticks: u64) -> u64;

    /// Returns the counters whose armed overflow has occurred since the last call.
    fn take_notified(&mut self) -> Vec<CounterIndex>;
}

impl TestEvents for SimCounterEvents {
    type Events = Self;

    fn events(&mut self) -> &mut Self {
        self
    }

    fn new(_: Vendor) -> Self {
        let mut events = SimCounterEvents::default();
        events.backing_of = |request| match request.selection {
            EventSelection::General(select, _) if u64::from(select.0) == UNCOUNTABLE_SELECT => {
                CounterBacking::None
            }
            _ => CounterBacking::Hardware,
        };
        events
    }

    fn uncountable(amd: bool, selector: Option<u64>, _: u32) -> bool {
        selector.is_some_and(|selector| select_of(amd, selector) == UNCOUNTABLE_SELECT)
    }

    fn run(&mut self, ticks: u64) -> u64 {
        SimCounterEvents::run(self, ticks)
    }

    fn take_notified(&mut self) -> Vec<CounterIndex> {
        SimCounterEvents::take_notified(self).collect()
    }
}

impl<H: TestEvents> CheckedPmu<H> {
    /// Creates a PMU and its reference. The first bytes select the model.
    pub fn new(bytes: &mut ByteSource<'_>) -> Self {
        let kind = match bytes.below(16) {
            0 => ReferenceKind::IntelOff,
            1 => ReferenceKind::AmdOff,
            n @ 2..=11 => ReferenceKind::Intel(n / 2),
            12 => ReferenceKind::K7,
            13 => ReferenceKind::Core,
            _ => ReferenceKind::V2,
        };
        let (gp, fixed) = match kind {
            ReferenceKind::IntelOff | ReferenceKind::AmdOff => (0, 0),
            ReferenceKind::Intel(1) => (2 + bytes.below(7), 0),
            ReferenceKind::Intel(_) => (2 + bytes.below(7), bytes.below(5)),
            ReferenceKind::K7 => (4, 0),
            ReferenceKind::Core => (6, 0),
            ReferenceKind::V2 => (4 + bytes.below(12), 0),
        };
        let width = if matches!(kind, ReferenceKind::Intel(_)) && bytes.flag() {
            32 + bytes.below(17)
        } else {
            48
        };
        let generation = match kind {
            ReferenceKind::IntelOff => PmuGeneration::Off(Vendor::Intel),
            ReferenceKind::AmdOff => PmuGeneration::Off(Vendor::Amd),
            ReferenceKind::Intel(version) => PmuGeneration::Intel(version as u8),
            ReferenceKind::K7 => PmuGeneration::AmdK7,
            ReferenceKind::Core => PmuGeneration::AmdCore,
            ReferenceKind::V2 => PmuGeneration::AmdV2,
        };
        let numbers = RequestedCounters {
            general: gp,
            fixed: Some(fixed),
        };
        let model = PmuModel::new(generation, Some(numbers), Some(width)).expect("a model within its limits");
        let mut addresses: Vec<u32> = model.trapped_msrs().into_iter().flatten().collect();
        // Adds the existing registers a second time, so that most accesses are to existing
        // registers.
        let reference = ReferencePmu::new(kind, gp, fixed, width, H::uncountable);
        let existing: Vec<u32> = addresses
            .iter()
            .copied()
            .filter(|&msr| reference.rdmsr(msr).is_some())
            .collect();
        for _ in 0..1 + addresses.len() / existing.len().max(1) {
            addresses.extend(&existing);
        }
        Self {
            vpmu: Vpmu::new(model),
            events: H::new(model.vendor()),
            reference,
            filter: Arc::new(EventFilter::allow_all()),
            late: false,
            now_ns: 0,
            addresses,
            operations: 0,
        }
    }

    fn address(&self, bytes: &mut ByteSource<'_>) -> u32 {
        let n = bytes.below(256) << 8 | bytes.below(256);
        if n == 0xFFFF {
            bytes.u64() as u32
        } else {
            self.addresses[n as usize % self.addresses.len()]
        }
    }

    /// Returns a value to be written to register `msr`. Prefers values that a driver would write,
    /// so that counters run, overflow and freeze.
    fn value(&self, msr: u32, bytes: &mut ByteSource<'_>) -> u64 {
        let highest = (1u64 << self.reference.width) - 1;
        let all = ((1 << self.reference.gp) - 1) | (((1u64 << self.reference.fixed) - 1) << 32);
        let is_amd_selector = matches!(msr, 0xC001_0000..=0xC001_0003)
            || (matches!(msr, 0xC001_0200..=0xC001_021D) && msr.is_multiple_of(2));
        if bytes.below(4) != 0 {
            match msr {
                0x186..=0x18D => return self.selector(bytes),
                _ if is_amd_selector => return self.selector(bytes),
                0xC1..=0xC8
                | 0x309..=0x30C
                | 0x4C1..=0x4C8
                | 0xC001_0000..=0xC001_0007
                | 0xC001_0200..=0xC001_021D => {
                    return highest - u64::from(bytes.byte() % 64);
                }
                0x1D9 => return u64::from(bytes.byte() & 1) << 12,
                0x38D => return bytes.u64() & ((1 << (4 * self.reference.fixed)) - 1) & 0xBBBB,
                0x38F | 0xC000_0301 => return all & !(bytes.u64() & bytes.u64()),
                0x390 | 0xC000_0302 => return all | u64::from(bytes.byte() & 3) << 62,
                0x391 | 0xC000_0303 => return bytes.u64() & all,
                _ => {}
            }
        }
        match bytes.below(12) {
            0 => 0,
            1 => u64::from(bytes.byte()),
            // Value close to an overflow, for a full-width or a sign-extended write.
            2 | 3 => highest - u64::from(bytes.byte() % 64),
            4 => u64::MAX - u64::from(bytes.byte() % 64),
            // Enabled selector with random privilege levels, interrupt bit and event.
            5..=7 => self.selector(bytes),
            // Value for the fixed counter control or for the global control.
            8 => bytes.u64() & 0xBBBB,
            9 => bytes.u64() & all,
            10 => 1u64 << bytes.below(64) | 1 << bytes.below(64),
            _ => bytes.u64(),
        }
    }

    /// Returns an enabled selector with random privilege levels, interrupt bit and event.
    fn selector(&self, bytes: &mut ByteSource<'_>) -> u64 {
        let select = [0x3C, 0xC0, 0x76, 0xFF, UNCOUNTABLE_SELECT, 1, 2, 3][bytes.below(8) as usize];
        let value =
            select | (u64::from(bytes.byte() & 3) << 8) | (u64::from(bytes.byte() & 0x13) << 16) | (1 << 22);
        if self.reference.is_amd() && bytes.below(4) == 0 {
            value | u64::from(bytes.byte() & 3) << 40
        } else {
            value
        }
    }

    /// Delivers the overflow notifications that were delayed.
    fn deliver(&mut self) {
        for counter in self.events.take_notified() {
            self.vpmu.overflowed(counter, self.events.events());
        }
        self.vpmu.reconcile(self.events.events());
        self.late = false;
    }

    fn run(&mut self, ticks: u64, late: bool) {
        for _ in 0..ticks {
            self.reference.tick();
        }
        self.vpmu.reconcile(self.events.events());
        if late {
            let mut left = ticks;
            while left > 0 {
                left -= self.events.run(left);
            }
            self.late = true;
            return;
        }
        let mut left = ticks;
        while left > 0 {
            left -= self.events.run(left);
            self.deliver();
        }
        self.deliver();
    }

    fn filter(&self, bytes: &mut ByteSource<'_>) -> Option<EventFilterSpec> {
        if bytes.below(4) == 0 {
            return None;
        }
        let events = (0..bytes.below(6))
            .map(|_| {
                let mask = u64::from(bytes.byte() & 7);
                EventFilterEntrySpec {
                    select: [0x3C, 0xC0, 0x76, 0xFF][bytes.below(4) as usize],
                    umask: None,
                    umask_mask: Some(mask),
                    umask_match: Some(u64::from(bytes.byte()) & mask),
                    exclude: bytes.below(3) == 0,
                }
            })
            .collect();
        Some(EventFilterSpec {
            action: if bytes.flag() {
                EventFilterAction::Allow
            } else {
                EventFilterAction::Deny
            },
            fixed_counters: u64::from(bytes.byte() & 0xF),
            events,
        })
    }

    /// Decodes one operation and applies it to the PMU and the reference.
    ///
    /// # Panics
    /// Panics if the PMU and the reference disagree.
    pub fn step(&mut self, bytes: &mut ByteSource<'_>) {
        self.operations += 1;
        match bytes.below(34) {
            0..=9 => {
                let msr = self.address(bytes);
                let value = self.value(msr, bytes);
                let expected = match self.reference.wrmsr(msr, value) {
                    Some(()) => MsrWriteOutcome::Done,
                    None => MsrWriteOutcome::InjectGp,
                };
                let got = self.vpmu.write_msr(MsrAddress(msr), value, self.events.events());
                assert_eq!(
                    got, expected,
                    "WRMSR {msr:#x} = {value:#x} of {:?}",
                    self.reference
                );
                if self.vpmu.needs_svme() {
                    self.vpmu.set_svme(self.reference.svme);
                }
                if bytes.flag() {
                    self.vpmu.reconcile(self.events.events());
                }
            }
            10..=16 => {
                let msr = self.address(bytes);
                self.compare(msr);
            }
            17..=19 => {
                let ecx = match bytes.below(4) {
                    0 => bytes.u64() as u32,
                    1 => 1 << 30 | bytes.below(6),
                    _ => bytes.below(18),
                };
                let cpl = bytes.byte() & 3;
                let pce = bytes.flag();
                let expected = match self.reference.rdpmc(ecx, cpl, pce) {
                    Some(value) => MsrReadOutcome::Value(value),
                    None => MsrReadOutcome::InjectGp,
                };
                let got = self
                    .vpmu
                    .rdpmc(RdpmcIndex(ecx), Cpl(cpl), pce, self.events.events());
                assert_eq!(got, expected, "RDPMC {ecx:#x} of {:?}", self.reference);
            }
            20..=25 => {
                let ticks = u64::from(bytes.byte() % 48);
                // The effect of a freeze depends on when an overflow is detected, so with
                // freeze-on-PMI the notification must not be delayed.
                let late = bytes.flag() && !self.reference.freezes();
                if !late {
                    self.deliver();
                }
                self.run(ticks, late);
            }
            26 => self.deliver(),
            27 => {
                // An overflow notification for a counter that has not overflowed must have no
                // effect.
                let counter = CounterIndex::from_slot(bytes.below(MAX_COUNTERS as u32) as usize);
                self.vpmu
                    .overflowed(counter.expect("a slot"), self.events.events());
                self.vpmu.reconcile(self.events.events());
            }
            28 => {
                self.deliver();
                assert_eq!(
                    self.vpmu.pmi_pending(),
                    self.reference.pmi_due,
                    "{:?}",
                    self.reference
                );
                self.now_ns += u64::from(bytes.byte()) << 16;
                let masked = bytes.flag();
                match self.vpmu.pmi_ready(self.now_ns) {
                    PmiReadiness::Now if masked => {
                        self.vpmu.defer_pmi();
                        self.reference.pmi_waits();
                    }
                    PmiReadiness::Now => {
                        self.vpmu.pmi_delivered(self.now_ns);
                        self.reference.pmi_delivered();
                    }
                    // The PMI has been withdrawn or must be delayed.
                    PmiReadiness::No | PmiReadiness::NotBefore { .. } => self.reference.pmi_waits(),
                }
                assert_eq!(
                    self.vpmu.pmi_pending(),
                    self.reference.pmi_due,
                    "{:?}",
                    self.reference
                );
            }
            29 => {
                let spec = self.filter(bytes);
                self.filter = Arc::new(match &spec {
                    Some(spec) => EventFilter::new(spec).expect("entries within their limits"),
                    None => EventFilter::allow_all(),
                });
                // The VMM replaces the filter between two runs of the guest.
                self.deliver();
                self.vpmu.set_filter(self.filter.clone());
                self.reference.set_filter(spec);
                self.vpmu.reconcile(self.events.events());
            }
            30 => {
                // The VM migrates: another process restores the PMU and uses new events.
                let saved = self.vpmu.save(self.events.events());
                let mut there = Vpmu::new(*self.vpmu.model());
                there.set_filter(self.filter.clone());
                let mut events = H::new(self.vpmu.model().vendor());
                there
                    .restore(&saved, events.events())
                    .expect("what was saved can be restored");
                assert_eq!(there.save(events.events()), saved, "restored bit for bit");
                if there.needs_svme() {
                    there.set_svme(self.reference.svme);
                }
                self.vpmu = there;
                self.events = events;
                self.late = false;
            }
            32 => {
                // The hypervisor completes an instruction that exited. The VMM has already
                // reconciled the registers.
                let cpl = if bytes.flag() { Cpl(0) } else { Cpl(3) };
                self.deliver();
                for _ in 0..bytes.below(8) {
                    self.vpmu.reconcile(self.events.events());
                    self.vpmu.count_emulated_instruction(cpl, self.events.events());
                    self.vpmu.reconcile(self.events.events());
                    self.reference.retire(cpl == Cpl(0));
                }
            }
            33 => {
                // The guest changes EFER.SVME and writes all selectors again.
                self.deliver();
                self.reference.svme = bytes.flag();
                self.vpmu.set_svme(self.reference.svme);
                self.vpmu.reconcile(self.events.events());
            }
            _ => match bytes.below(9) {
                8 => {
                    // The vCPU moves to another thread with its own events.
                    self.vpmu.detach(self.events.events());
                    self.events = H::new(self.vpmu.model().vendor());
                    self.late = false;
                }
                0 => {
                    self.vpmu.reset(self.events.events());
                    self.events.take_notified();
                    self.reference.reset();
                    self.late = false;
                }
                1..=3 => self.compare_cpuid(),
                _ => self.compare_all(),
            },
        }
    }

    /// Checks that RDMSR of `msr` returns the same result from the PMU and from the reference.
    fn compare(&mut self, msr: u32) {
        let expected = match self.reference.rdmsr(msr) {
            Some(value) => MsrReadOutcome::Value(value),
            None => MsrReadOutcome::InjectGp,
        };
        let got = self.vpmu.read_msr(MsrAddress(msr), self.events.events());
        assert_eq!(got, expected, "RDMSR {msr:#x} of {:?}", self.reference);
    }

    fn compare_cpuid(&mut self) {
        let mut regs = CpuidRegs::default();
        let all = ArchEvent::ALL.into_iter().collect();
        self.vpmu.model().adjust_cpuid(0xA, 0, &mut regs, all);
        assert_eq!([regs.eax, regs.ebx, regs.ecx, regs.edx], self.reference.cpuid_a());
    }

    /// Checks that all registers and the due PMI are the same in the PMU and in the reference.
    pub fn compare_all(&mut self) {
        self.deliver();
        let addresses: Vec<u32> = self.vpmu.model().trapped_msrs().into_iter().flatten().collect();
        for msr in addresses {
            self.compare(msr);
        }
        assert_eq!(
            self.vpmu.pmi_pending(),
            self.reference.pmi_due,
            "{:?}",
            self.reference
        );
    }
}

/// Applies all operations of a byte string with events of type `H`. Returns the number of
/// operations.
pub fn run<H: TestEvents>(bytes: &[u8]) -> u64 {
    let mut bytes = ByteSource::new(bytes);
    let mut pair = CheckedPmu::<H>::new(&mut bytes);
    while !bytes.is_empty() {
        pair.step(&mut bytes);
    }
    pair.compare_all();
    pair.operations
}
