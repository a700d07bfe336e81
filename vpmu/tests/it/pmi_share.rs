//! Tests of the limit on the share of PMI handlers. A nanosecond of the guest's clock is a tick of
//! the simulated events.

use proptest::prelude::*;
use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

const INTERRUPTING: u64 = 0x53_003C;
const WIDTH: u64 = 1 << 48;

/// Registers that the guest's driver uses.
#[derive(Clone, Copy)]
struct Registers {
    selector: u32,
    counter: u32,
    /// Addresses of the global control register, of the global status register, and of the register
    /// that clears the global status. `None` if the model has no global registers.
    global: Option<[u32; 3]>,
}

const AMD: Registers = Registers {
    selector: PERF_CTL0,
    counter: PERF_CTR0,
    global: None,
};
const MODELS: [(&str, Registers); 3] = [
    (
        "intel",
        Registers {
            selector: IA32_PERFEVTSEL0,
            counter: IA32_A_PMC0,
            global: Some([
                IA32_PERF_GLOBAL_CTRL,
                IA32_PERF_GLOBAL_STATUS,
                IA32_PERF_GLOBAL_STATUS_RESET,
            ]),
        },
    ),
    ("amd", AMD),
    (
        "amd-v2",
        Registers {
            global: Some([
                PERF_CNTR_GLOBAL_CTL,
                PERF_CNTR_GLOBAL_STATUS,
                PERF_CNTR_GLOBAL_STATUS_CLR,
            ]),
            ..AMD
        },
    ),
];

/// Returns a PMI share of one half.
fn half() -> PmiShare {
    PmiShare::from_percent(50).expect("a valid share")
}

/// Guest that samples the cycles of its program with a PMI handler of fixed duration.
struct SampledGuest {
    guest: Guest,
    registers: Registers,
    /// Period that the next PMI handler programs, and period that is currently programmed.
    period: u64,
    programmed: u64,
    handler_ns: u64,
    /// Time that the guest has spent in PMI handlers, and time outside them, in nanoseconds.
    inside: u64,
    outside: u64,
    /// Sum of the counts that the PMI handlers have read.
    counted: u64,
    handlers: u64,
}

impl SampledGuest {
    fn new((model, registers): (&str, Registers), share: PmiShare, period: u64, handler_ns: u64) -> Self {
        let mut guest = Guest::of(model, None);
        guest.vpmu.set_pmi_share(share);
        guest.vpmu.set_pmi_limit(u32::MAX);
        guest.write(registers.selector, INTERRUPTING);
        guest.write(registers.counter, WIDTH - period);
        Self {
            guest,
            registers,
            period,
            programmed: period,
            handler_ns,
            inside: 0,
            outside: 0,
            counted: 0,
            handlers: 0,
        }
    }

    fn now_ns(&mut self) -> u64 {
        self.guest.events.now_ns()
    }

    fn readiness(&mut self) -> PmiReadiness {
        let now_ns = self.now_ns();
        self.guest.vpmu.pmi_ready(now_ns)
    }

    /// Returns whether a PMI may be delivered now. `executes` is `true` while the guest still
    /// executes the PMI handler, and `false` after the handler has returned.
    fn readiness_if(&mut self, executes: bool) -> PmiReadiness {
        let now_ns = self.now_ns();
        if self.guest.vpmu.needs_handler_state(&mut self.guest.events) {
            self.guest.vpmu.observe_handler(executes, now_ns);
        }
        self.readiness()
    }

    /// Runs the guest's program until the next PMI is delivered, and then the PMI handler.
    fn sample(&mut self) {
        let mut ran = 0;
        loop {
            let ticks = match self.readiness() {
                PmiReadiness::Now => break,
                PmiReadiness::NotBefore { time_ns } => time_ns - self.now_ns(),
                PmiReadiness::No => self.programmed - ran,
            };
            assert!(ticks > 0, "the overflow was lost");
            ran += self.guest.events.run(ticks);
            self.guest.notice();
        }
        self.outside += ran;
        let now_ns = self.now_ns();
        self.guest.vpmu.pmi_delivered(now_ns);
        self.handle();
    }

    /// Executes the PMI handler of Linux's driver. On models without a global control register, the
    /// counters keep counting in the handler.
    fn handle(&mut self) {
        let counter = self.registers.counter;
        self.handlers += 1;
        self.inside += self.handler_ns;
        let Some([control, status, clear]) = self.registers.global else {
            self.guest.run(self.handler_ns);
            self.counted += self.programmed + self.guest.read(counter);
            self.program();
            return;
        };
        self.guest.write(control, 0);
        self.guest.run(self.handler_ns / 2);
        assert_eq!(self.guest.read(status), 1);
        self.guest.write(clear, 1);
        self.counted += self.programmed + self.guest.read(counter);
        self.program();
        self.guest.run(self.handler_ns - self.handler_ns / 2);
        self.guest.write(control, 1);
    }

    fn program(&mut self) {
        self.programmed = self.period;
        self.guest.write(self.registers.counter, WIDTH - self.period);
    }

    /// Checks that the sum of the counts that the handlers have read is the count of the whole run.
    fn check_counts(&self) {
        let ran = match self.registers.global {
            None => self.inside + self.outside,
            Some(_) => self.outside,
        };
        assert_eq!(self.counted, ran);
    }
}

fn percent(n: u8) -> PmiShare {
    PmiShare::from_percent(n).unwrap()
}

#[test]
fn handlers_shorter_than_the_gap_are_never_held_back() {
    for model in MODELS {
        let mut sampled = SampledGuest::new(model, half(), 5_000, 1_000);
        for _ in 0..200 {
            sampled.sample();
        }
        let counts = sampled.guest.vpmu.pmi_counts();
        assert_eq!((counts.delivered, counts.held), (200, 0), "{}", model.0);
        sampled.check_counts();
    }
}

/// If a PMI handler takes longer than the sampling period, handlers take half of the time (the
/// configured share), and no count is lost. In a PMI storm, the period is 1.
#[test]
fn handlers_longer_than_the_period_take_the_share() {
    for model in MODELS {
        for period in [1, 100, 900] {
            let mut sampled = SampledGuest::new(model, half(), period, 1_000);
            for _ in 0..200 {
                sampled.sample();
            }
            let counts = sampled.guest.vpmu.pmi_counts();
            assert!(counts.held >= 199, "{}: {counts:?}", model.0);
            assert!(counts.held_ns >= counts.held * 100, "{}: {counts:?}", model.0);
            assert!(sampled.outside >= sampled.inside - 1_000, "{}", model.0);
            sampled.check_counts();
        }
    }
}

#[test]
fn unlimited_share_holds_nothing_back() {
    for model in MODELS {
        for share in ["off", "100%"] {
            let mut sampled = SampledGuest::new(model, share.parse().unwrap(), 10, 1_000);
            for _ in 0..200 {
                sampled.sample();
            }
            assert_eq!(sampled.guest.vpmu.pmi_counts().held, 0, "{}", model.0);
            assert!(sampled.outside <= 2_000, "{}", model.0);
        }
    }
}

/// PMI handlers stay within their share of the time when Linux starts an event with a sampling
/// frequency. Linux starts the event with a period of 1 and then adapts the period to the interval
/// between two samples.
#[test]
fn frequency_control_transient_is_bounded() {
    for model in MODELS {
        let mut sampled = SampledGuest::new(model, half(), 1, 50_000);
        let mut last_ns = 0;
        for _ in 0..100 {
            sampled.sample();
            let now_ns = sampled.now_ns();
            let counted = sampled.period.max(1);
            // Period for 1,000 samples per second at the rate since the last sample.
            sampled.period = (counted * 1_000_000 / (now_ns - last_ns)).max(1);
            last_ns = now_ns;
        }
        assert!(sampled.outside >= sampled.inside - 50_000, "{}", model.0);
    }
}

/// An overflow whose PMI is delayed is visible in the status register, and overflows of other
/// counters share this PMI.
#[test]
fn held_overflows_are_visible_and_share_one_pmi() {
    let mut sampled = SampledGuest::new(MODELS[0], half(), 10, 1_000);
    sampled.guest.write(IA32_PERFEVTSEL0 + 1, INTERRUPTING);
    sampled.guest.write(IA32_A_PMC0 + 1, WIDTH - 300);
    sampled.guest.write(IA32_PERF_GLOBAL_CTRL, 3);
    sampled.sample();
    sampled.guest.write(IA32_PERF_GLOBAL_CTRL, 3);
    let ended_ns = sampled.now_ns();
    sampled.guest.run(10);
    let PmiReadiness::NotBefore { time_ns } = sampled.readiness() else {
        panic!("not held back");
    };
    assert_eq!(time_ns, ended_ns + 1_000);
    assert_eq!(sampled.guest.read(IA32_PERF_GLOBAL_STATUS), 1);
    sampled.guest.run(300);
    assert_eq!(sampled.guest.read(IA32_PERF_GLOBAL_STATUS), 3);
    sampled.guest.run(1_000 - 310);
    assert_eq!(sampled.readiness(), PmiReadiness::Now);
    let now_ns = sampled.now_ns();
    sampled.guest.vpmu.pmi_delivered(now_ns);
    assert_eq!(sampled.readiness(), PmiReadiness::No);
    let counts = sampled.guest.vpmu.pmi_counts();
    assert_eq!((counts.delivered, counts.held, counts.held_ns), (2, 1, 990));
}

/// A PMI delayed by the share limit is delivered on AMD models as soon as the guest stops the
/// counter outside the handler, because Linux's driver waits for it.
#[test]
fn held_pmi_is_delivered_when_an_amd_counter_is_stopped() {
    for (model, registers) in &MODELS[1..] {
        let stops = registers.global.map(|[control, ..]| control);
        for register in stops.into_iter().chain([registers.selector]) {
            let mut sampled = SampledGuest::new((model, *registers), half(), 10, 1_000);
            sampled.sample();
            sampled.guest.run(10);
            let held = matches!(sampled.readiness(), PmiReadiness::NotBefore { .. });
            assert!(held, "{model}");
            sampled.guest.write(register, 0);
            assert_eq!(sampled.readiness(), PmiReadiness::Now, "{model}: {register:#x}");
            let now_ns = sampled.now_ns();
            sampled.guest.vpmu.pmi_delivered(now_ns);
            let counts = sampled.guest.vpmu.pmi_counts();
            assert_eq!((counts.delivered, counts.held), (2, 1), "{model}");
        }
    }
}

/// A PMI delayed by the share limit is withdrawn on Intel models if the guest stops the counter
/// outside the handler, and stays delayed if the guest only stops all counters globally. Linux does
/// both at its tick, and gives the counter a new period.
#[test]
fn held_pmi_is_withdrawn_when_an_intel_counter_is_stopped() {
    let (model, registers) = MODELS[0];
    let mut sampled = SampledGuest::new((model, registers), half(), 10, 1_000);
    sampled.sample();
    sampled.guest.run(10);
    let held = sampled.readiness();
    assert!(matches!(held, PmiReadiness::NotBefore { .. }));
    sampled.guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    assert_eq!(sampled.readiness(), held);
    sampled.guest.write(registers.selector, 0);
    assert_eq!(sampled.readiness(), PmiReadiness::No);
    // The count includes the overflow.
    assert_eq!(sampled.guest.read(registers.counter), 0);
    sampled.period = 1_000;
    sampled.program();
    sampled.guest.write(registers.selector, INTERRUPTING);
    sampled.guest.write(IA32_PERF_GLOBAL_CTRL, 1);
    assert_eq!(sampled.readiness(), PmiReadiness::No);
    let counts = sampled.guest.vpmu.pmi_counts();
    assert_eq!((counts.delivered, counts.held, counts.withdrawn), (1, 1, 1));
    // The next overflow occurs after the required time outside handlers.
    sampled.guest.run(1_000);
    assert_eq!(sampled.readiness(), PmiReadiness::Now);
}

/// A PMI delayed by the share limit stays delayed while another counter that requested it counts.
#[test]
fn held_pmi_outlives_the_stop_of_one_of_its_counters() {
    let (model, registers) = MODELS[0];
    let mut sampled = SampledGuest::new((model, registers), half(), 10, 1_000);
    sampled.guest.write(IA32_PERFEVTSEL0 + 1, INTERRUPTING);
    sampled.guest.write(IA32_A_PMC0 + 1, WIDTH - 20);
    sampled.guest.write(IA32_PERF_GLOBAL_CTRL, 3);
    sampled.sample();
    sampled.guest.write(IA32_PERF_GLOBAL_CTRL, 3);
    sampled.guest.run(20);
    let held = sampled.readiness();
    assert!(matches!(held, PmiReadiness::NotBefore { .. }));
    sampled.guest.write(registers.selector, 0);
    assert_eq!(sampled.readiness(), held);
    sampled.guest.write(IA32_PERFEVTSEL0 + 1, 0);
    assert_eq!(sampled.readiness(), PmiReadiness::No);
}

/// A PMI delayed by the share limit stays delayed if the PMI handler itself stops the counters,
/// because the handler then checks all counters for overflows.
#[test]
fn stop_in_handler_releases_no_held_pmi() {
    let (model, registers) = MODELS[2];
    let mut sampled = SampledGuest::new((model, registers), half(), 10, 1_000);
    sampled.guest.run(10);
    assert_eq!(sampled.readiness(), PmiReadiness::Now);
    sampled.guest.vpmu.pmi_delivered(10);
    sampled.guest.write(registers.counter, WIDTH - 5);
    sampled.guest.run(5);
    sampled.guest.write(PERF_CNTR_GLOBAL_CTL, 0);
    let held = PmiReadiness::NotBefore { time_ns: 20 };
    assert_eq!(sampled.readiness_if(true), held);
}

/// If a counter overflows while the PMI handler of another counter is running, its PMI is delayed
/// until that handler has returned and the required time outside handlers has passed. Only the
/// local APIC shows the return of the handler.
#[test]
fn overflow_in_handler_waits_for_its_return() {
    let mut sampled = SampledGuest::new(MODELS[1], half(), 100, 0);
    sampled.guest.write(PERF_CTL0 + 2, INTERRUPTING);
    sampled.guest.write(PERF_CTR0 + 2, WIDTH - 150);
    sampled.sample();
    let began_ns = 100;
    assert_eq!(sampled.now_ns(), began_ns);
    // The handler has re-armed the first counter and still runs.
    sampled.guest.run(50);
    // According to the registers alone, the handler has no duration.
    assert_eq!(sampled.readiness(), PmiReadiness::Now);
    let mut unserved = SampledGuest::new(MODELS[1], half(), 100, 0);
    unserved.guest.write(PERF_CTL0 + 2, INTERRUPTING);
    unserved.guest.write(PERF_CTR0 + 2, WIDTH - 150);
    unserved.guest.run(100);
    assert_eq!(unserved.readiness(), PmiReadiness::Now);
    unserved.guest.vpmu.pmi_delivered(began_ns);
    unserved.guest.run(50);
    let held = PmiReadiness::NotBefore { time_ns: 200 };
    assert_eq!(unserved.readiness_if(true), held);
    unserved.guest.run(20);
    let held = PmiReadiness::NotBefore { time_ns: 240 };
    assert_eq!(unserved.readiness_if(true), held);
    unserved.guest.run(30);
    let held = PmiReadiness::NotBefore { time_ns: 240 };
    assert_eq!(unserved.readiness_if(false), held);
    unserved.guest.run(40);
    assert_eq!(unserved.readiness_if(false), PmiReadiness::Now);
}

/// The duration of a PMI handler that stops its counter is measured until it restarts the counter.
/// Drivers without global control may stop counters in this way.
#[test]
fn handler_that_stops_its_counter_is_measured_to_its_end() {
    let mut sampled = SampledGuest::new(MODELS[1], half(), 100, 0);
    sampled.guest.run(100);
    assert_eq!(sampled.readiness(), PmiReadiness::Now);
    sampled.guest.vpmu.pmi_delivered(100);
    sampled.guest.run(30);
    sampled.guest.write(PERF_CTL0, 0);
    sampled.guest.write(PERF_CTR0, WIDTH - 10);
    sampled.guest.run(500);
    sampled.guest.write(PERF_CTL0, INTERRUPTING);
    sampled.guest.run(10);
    let held = PmiReadiness::NotBefore { time_ns: 630 + 530 };
    assert_eq!(sampled.readiness_if(false), held);
}

/// The remaining delay of a PMI is the same after a restore on a host with a different clock.
#[test]
fn restored_pmi_stays_held_back() {
    for model in MODELS {
        let mut sampled = SampledGuest::new(model, half(), 10, 1_000);
        sampled.sample();
        sampled.guest.run(10);
        assert!(matches!(sampled.readiness(), PmiReadiness::NotBefore { .. }));
        let saved = sampled.guest.vpmu.save(&mut sampled.guest.events);
        let mut there = SampledGuest::new(model, half(), 10, 1_000);
        there.guest.run(77);
        there.guest.vpmu.restore(&saved, &mut there.guest.events).unwrap();
        there.guest.vpmu.reconcile(&mut there.guest.events);
        assert_eq!(
            there.guest.vpmu.save(&mut there.guest.events),
            saved,
            "{}",
            model.0
        );
        let time_ns = there.now_ns() + 990;
        assert_eq!(there.readiness(), PmiReadiness::NotBefore { time_ns });
        there.guest.vpmu.set_pmi_share(PmiShare::UNLIMITED);
        assert_eq!(there.readiness(), PmiReadiness::Now);
    }
}

proptest! {
    /// For any sequence of handlers, PMI handlers take at most their share of the time, and each
    /// count is read exactly once.
    #[test]
    fn share_holds_for_any_handlers(
        model in 0usize..3,
        share in 1u8..=99,
        rounds in proptest::collection::vec((1u64..2_000, 2u64..1_000), 1..40),
    ) {
        let mut sampled = SampledGuest::new(MODELS[model], percent(share), 10, 10);
        for (period, handler_ns) in rounds {
            (sampled.period, sampled.handler_ns) = (period, handler_ns);
            sampled.sample();
            let p = u64::from(share);
            let last = handler_ns * (100 - p);
            prop_assert!(sampled.inside * (100 - p) <= (sampled.outside + sampled.handlers) * p + last);
        }
        sampled.check_counts();
    }
}
