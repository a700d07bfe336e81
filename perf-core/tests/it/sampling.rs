//! Tests of overflows, periods, limits and throttling.

use perf_core::*;

use crate::common::test_core::*;

fn counter(m: &TestCore, period: u64, cookie: u64) -> EventHandle {
    m.open_reporting(&m.guest, sim(period).with_pinned(), cookie)
}

/// Opens an event of an operator on vCPU 0 that is sampled `hz` times per second.
fn open_with_frequency(m: &TestCore, hz: u64) -> EventHandle {
    m.open_reporting(&m.admin, sim(hz).with_freq(), 1)
}

/// Services the overflows of vCPU `v` and returns the number of overflows.
fn overflows(v: &VcpuEventContext) -> u32 {
    serve(v).iter().map(|o| o.times).sum()
}

/// Runs the vCPU for one second in steps of `step_ns` nanoseconds, with one count per nanosecond.
/// Returns the number of overflows. Overflows are serviced after each step, and a tick follows
/// after every `steps_per_tick` steps.
fn overflows_per_second(m: &TestCore, v: &VcpuEventContext, step_ns: u64, steps_per_tick: u64) -> u32 {
    let mut times = 0;
    for step in 1..=1_000_000_000 / step_ns {
        m.run(0, step_ns);
        times += overflows(v);
        if step % steps_per_tick == 0 {
            m.core.tick();
        }
    }
    times
}

#[test]
fn armed_counter_overflows_at_armed_count_then_at_period() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let c = counter(&m, 1 << 20, 7);
    c.arm(100).unwrap();
    m.run(0, 99);
    assert_eq!(serve(&v), []);
    m.run(0, 1);
    assert_eq!(serve(&v), [OverflowReport { cookie: 7, times: 1 }]);
    assert_eq!(serve(&v), [], "served once");
    m.run(0, (1 << 20) - 1);
    assert_eq!(serve(&v), []);
    m.run(0, 1);
    assert_eq!(serve(&v), [OverflowReport { cookie: 7, times: 1 }]);
}

#[test]
fn rearming_running_event_takes_effect_immediately() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let c = counter(&m, 1 << 40, 1);
    c.arm(10).unwrap();
    m.run(0, 10); // passed, not served yet
    c.arm(5).unwrap();
    m.run(0, 4);
    // The overflow that occurred before the event was re-armed is still reported.
    assert_eq!(serve(&v), [OverflowReport { cookie: 1, times: 1 }]);
    m.run(0, 1);
    assert_eq!(serve(&v), [OverflowReport { cookie: 1, times: 1 }]);
}

/// A leader that reaches its overflow limit stops its whole group while other members have pending
/// overflows. These overflows are serviced without another signal.
#[test]
fn group_stopped_during_handling_has_no_pending_overflow() {
    let m = TestCore::new(8);
    let v = m.vcpu(0);
    let open = |cookie, leader: Option<&EventHandle>| {
        let flags = OpenFlags::with_cookie(cookie);
        m.core.open(&m.admin, sim(10), V0, leader, flags).unwrap()
    };
    for position in 0..4 {
        let before: Vec<_> = (0..position).map(|n| open(n, None)).collect();
        let leader = open(10, None);
        let members = [11, 12].map(|n| open(n, Some(&leader)));
        let after: Vec<_> = (position..3).map(|n| open(n, None)).collect();
        leader.refresh(1).unwrap();
        m.run(0, 10);
        let mut cookies: Vec<_> = serve(&v).iter().map(|o| o.cookie).collect();
        cookies.sort_unstable();
        let mut all: Vec<_> = (0..position.max(3)).chain([10, 11, 12]).collect();
        all.sort_unstable();
        assert_eq!(cookies, all, "{position} before the group");
        assert_eq!(leader.state(), EventState::Off);
        assert_eq!(serve(&v), []);
        drop((before, members, after));
    }
}

#[test]
fn more_events_than_a_batch_are_all_served() {
    let m = TestCore::new(40);
    let v = m.vcpu(0);
    let _all: Vec<_> = (0..40).map(|i| counter(&m, 10, i)).collect();
    m.run(0, 10);
    let mut cookies: Vec<_> = serve(&v).iter().map(|o| o.cookie).collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..40).collect::<Vec<_>>());
}

#[test]
fn p27_refresh_gives_that_many_overflows_then_off_and_hup() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let attr = sim(10).with_disabled();
    let e = m.open_vcpu(attr.clone(), None);
    e.refresh(3).unwrap();
    for i in 0..3 {
        assert_eq!(e.state(), EventState::Active, "{i}");
        m.run(0, 10);
        serve(&v);
    }
    assert_eq!(e.state(), EventState::Off);
    assert!(e.poll().contains(PollState::HUP));
    e.refresh(0).unwrap();
    m.run(0, 1000);
    serve(&v);
    assert_eq!(e.state(), EventState::Active, "0 is no limit");
    let inherited = m.open_vm(attr.with_inherit());
    assert_eq!(inherited.refresh(1).unwrap_err().errno(), libc::EINVAL);
}

/// Overflows that occurred before an event was scheduled out and in again, but were serviced only
/// afterwards, count towards the event's overflow limit. No overflows beyond the limit are
/// reported.
#[test]
fn p27_a_limit_is_exact_when_the_event_went_off_and_on_meanwhile() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let c = counter(&m, 10, 7);
    c.refresh(2).unwrap();
    m.run(0, 20);
    v.sched_out();
    v.sched_in();
    m.run(0, 30);
    let mut seen = Vec::new();
    let served = v.service_overflows(&mut UnavailableRegs, &mut |o| seen.push(o));
    assert_eq!(served, 1, "one event had overflowed");
    assert_eq!(seen, [OverflowReport { cookie: 7, times: 2 }]);
    assert_eq!(c.state(), EventState::Off);
    assert_eq!(serve(&v), []);
}

#[test]
fn frequency_converges_to_period() {
    let m = TestCore::with(4, |c| c.tick_hz = 1000);
    let v = m.vcpu(0);
    let _e = open_with_frequency(&m, 10_000);
    // At one count per nanosecond, the ideal period of this frequency is 100,000 counts.
    let second = || overflows_per_second(&m, &v, 10_000, 100);
    second();
    let n = second();
    assert!(
        (9_000..=11_000).contains(&n),
        "{n} overflows in the second second"
    );
}

#[test]
fn periods_are_checked() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let invalid = |result: Result<_, PerfEventControlError>| result.unwrap_err().errno() == libc::EINVAL;
    let e = m.open_vcpu(hw(), None);
    assert!(invalid(e.set_period(5)), "a counting event has none");
    assert!(invalid(e.arm(0).map(drop)));
    let e = m.open_vcpu(sim(100).with_freq(), None);
    assert!(invalid(e.set_period(100_001)) && invalid(e.set_period(0)));
    e.set_period(100_000).unwrap();
}

#[test]
fn p38_no_overflow_reported_without_active_event() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let served = || v.service_overflows(&mut UnavailableRegs, &mut |_| {});
    assert_eq!(served(), 0);
    let c = counter(&m, 10, 1);
    m.run(0, 10);
    assert_eq!(served(), 1);
    assert_eq!(served(), 0, "a second signal for the same overflow is not ours");
    c.disable(EventOrGroup::Event).unwrap();
    m.run(0, 100);
    assert_eq!(v.stats().active, 0);
    assert_eq!(
        v.service_overflows(&mut UnavailableRegs, &mut |_| panic!("claimed")),
        0
    );
}

/// At a frequency below the tick rate, the period converges, because it is adjusted only after
/// several ticks. If each tick adjusted it, each tick without an overflow would shorten it.
#[test]
fn frequency_below_tick_rate_converges_to_period() {
    let m = TestCore::with(4, |c| c.tick_hz = 100);
    let v = m.vcpu(0);
    let _e = open_with_frequency(&m, 10);
    let second = || overflows_per_second(&m, &v, 100_000, 100);
    for _ in 0..20 {
        second();
    }
    for _ in 0..5 {
        let n = second();
        assert!((8..=12).contains(&n), "{n} overflows in a second");
    }
}

/// Opens an event with sampling frequency `hz`, runs `steps` steps of 0.4 ms (a tenth of a tick),
/// and returns the numbers of the steps in which the event overflowed. `work` performs the work of
/// one step.
fn overflow_steps(m: &TestCore, hz: u64, steps: u64, work: impl Fn(u64)) -> Vec<u64> {
    let v = m.vcpu(0);
    let e = m.open_vcpu(sim(hz).with_freq(), None);
    let mut served = Vec::new();
    for step in 1..=steps {
        work(step);
        serve(&v);
        if e.poll().contains(PollState::IN) {
            served.push(step);
        }
        if step % 10 == 0 {
            m.core.tick();
        }
    }
    served
}

/// The period of an event with a billion counts per second starts at 1. In the first second, the
/// period must not become so long that the event no longer overflows.
#[test]
fn low_frequency_never_falls_silent() {
    const SECOND: u64 = 2500;
    for hz in [1, 5, 10, 49, 99] {
        let m = TestCore::with(4, |c| c.tick_hz = 250);
        let served = overflow_steps(&m, hz, 30 * SECOND, |_| m.run(0, 400_000));
        let ends = [0].into_iter().chain(served.iter().copied()).chain([30 * SECOND]);
        let ends: Vec<u64> = ends.collect();
        let silence = ends.windows(2).map(|w| w[1] - w[0]).max().unwrap();
        assert!(
            silence <= 3 * SECOND / (2 * hz) + 25,
            "{hz} Hz: silent for {silence} steps of 0.4 ms"
        );
        let late = served.iter().filter(|step| **step > 20 * SECOND).count() as u64;
        assert!(
            late.abs_diff(10 * hz) <= 2 + hz,
            "{hz} Hz: {late} overflows in the last 10 s"
        );
    }
}

/// A burst of counts, for example of page faults, must not be mistaken for the mean rate.
#[test]
fn low_frequency_survives_bursts() {
    const SECOND: u64 = 2500;
    let m = TestCore::with(4, |c| c.tick_hz = 250);
    // Ten bursts per second, each with 100 events within five steps.
    let served = overflow_steps(&m, 10, 20 * SECOND, |step| {
        m.clock.advance(400_000);
        if step % 250 < 5 {
            m.hw.work(0, 20);
        }
    });
    for second in 0..20 {
        let n = served.iter().filter(|step| **step / SECOND == second).count();
        assert!((4..=40).contains(&n), "{n} overflows in second {second}");
    }
}

/// If a guest becomes a thousand times slower, the current period of an event would last for
/// minutes. The core therefore shortens the period before it has elapsed.
#[test]
fn excessive_period_is_shortened_early() {
    let m = TestCore::with(4, |c| c.tick_hz = 1000);
    let v = m.vcpu(0);
    let e = m.open_vcpu(sim(1000).with_freq().with_sample_type(SampleType::PERIOD), None);
    let _ring = e.map(64, false).unwrap();
    let run = |ns: u64, counts: u64| {
        m.clock.advance(ns);
        m.hw.work(0, counts);
        serve(&v);
    };
    for step in 1..=200_000u64 {
        run(10_000, 10_000);
        if step % 100 == 0 {
            m.core.tick();
        }
    }
    let before = v.stats().samples;
    // The period is a million counts by now. From here on the event counts only a thousand per
    // tick.
    let mut ticks = 0;
    while v.stats().samples == before {
        run(1_000_000, 1000);
        m.core.tick();
        ticks += 1;
        assert!(ticks < 100, "no sample in {ticks} ticks");
    }
}

/// If overflows are serviced only once per requested sampling interval, the period grows until each
/// service finds about one overflow.
#[test]
fn frequency_converges_with_late_overflow_notification() {
    let m = TestCore::with(4, |c| c.tick_hz = 250);
    let v = m.vcpu(0);
    let _e = open_with_frequency(&m, 10_000);
    let second = || overflows_per_second(&m, &v, 100_000, 40);
    second();
    let n = second();
    assert!((8_000..=12_000).contains(&n), "{n} overflows in a second");
}

/// If the VMM performs no ticks, an event with rare overflows is not throttled, because interrupts
/// of earlier tick intervals are not counted indefinitely.
#[test]
fn p26_rare_overflows_are_not_throttled_where_no_ticks_come() {
    let m = TestCore::with(4, |c| (c.sample_rate_hz, c.tick_hz) = (100, 10));
    let v = m.vcpu(0);
    let e = m.open_vcpu(sim(1_000_000_000), None);
    e.map(1, true).unwrap();
    for _ in 0..100 {
        m.run(0, 1_000_000_000);
        serve(&v);
    }
    assert_eq!((v.stats().samples, v.stats().throttles), (100, 0));
}

/// Only a tick ends the throttling of an event. An event with a fixed period, which may be
/// throttled, therefore needs ticks, and every tick once it is throttled. A guest's counter needs
/// none.
#[test]
fn p26_a_fixed_period_needs_ticks_and_a_guests_counter_does_not() {
    let m = TestCore::with(4, |c| (c.sample_rate_hz, c.tick_hz) = (2500, 250));
    let v = m.vcpu(0);
    let guests = counter(&m, 1 << 20, 1);
    guests.arm(100).unwrap();
    assert!(!m.core.needs_tick());
    let operators = m.open_vcpu(sim(5), None);
    operators.map(1, true).unwrap();
    assert_eq!(
        (m.core.needs_tick(), m.core.tick_need()),
        (true, PendingTickWork::Watch)
    );
    for _ in 0..30 {
        m.run(0, 5);
        serve(&v);
    }
    assert_eq!(
        (v.stats().throttles, m.core.tick_need()),
        (1, PendingTickWork::Work)
    );
    m.core.tick();
    assert_eq!(m.core.tick_need(), PendingTickWork::Watch);
    operators.disable(EventOrGroup::Event).unwrap();
    assert!(!m.core.needs_tick());
    let _follows = m.open_vcpu(sim(100).with_freq(), None);
    assert_eq!(m.core.tick_need(), PendingTickWork::Work);
}

/// If a tick replaces a period that is excessively long, overflows that are already pending are not
/// lost.
#[test]
fn tick_keeps_pending_overflow() {
    let m = TestCore::with(4, |c| c.tick_hz = 1000);
    let v = m.vcpu(0);
    let _e = open_with_frequency(&m, 1000);
    m.run(0, 1000);
    m.core.tick();
    assert_eq!(overflows(&v), 1000);
}

/// Simulated vCPU registers that raise a software event at level `Thread` when they are read.
struct RaisingRegs<'a>(&'a VcpuEventContext, Option<bool>);

impl SampleRegs for RaisingRegs<'_> {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestKernel
    }
    fn ip(&mut self) -> u64 {
        let raised = self.0.software_event_at(
            RecursionContext::Thread,
            SoftwareEventId::Halts,
            1,
            None,
            &mut |_| {},
        );
        self.1 = Some(raised);
        0
    }
}

/// Overflows are serviced at level `Thread`. Events that are raised at this level while registers
/// are read are dropped, without waiting for a lock.
#[test]
fn p24_event_raised_by_register_read_during_handling_does_not_deadlock() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let e = m.open_vcpu(sim(10).with_sample_type(SampleType::IP), None);
    let _ring = e.map(1, true).unwrap();
    let halts = m.open_vcpu(vmm(SoftwareEventId::Halts), None);
    m.run(0, 10);
    let mut regs = RaisingRegs(&v, None);
    assert_eq!(v.service_overflows(&mut regs, &mut |_| {}), 1);
    assert_eq!(regs.1, Some(false), "dropped, and it says so");
    assert_eq!(halts.read().unwrap().value, 0);
    v.software_event(SoftwareEventId::Halts, 1, None, &mut |_| {});
    assert_eq!(halts.read().unwrap().value, 1, "the level is free again");
}

#[test]
fn vm_wide_event_without_ring_notifies_opener() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let e = m.open_vm(sim(10).with_inherit());
    assert!(!e.poll().contains(PollState::IN));
    m.run(0, 10);
    serve(&v);
    assert!(e.poll().contains(PollState::IN));
    assert!(!e.poll().contains(PollState::IN), "taken once");
}

/// An overflow adjusts the period if the previous overflow was less than a tick ago. Otherwise the
/// next tick adjusts the period.
#[test]
fn overflows_within_a_tick_adjust_frequency_period() {
    // A tick is 10 ms.
    let m = TestCore::with(4, |c| c.tick_hz = 100);
    let v = m.vcpu(0);
    let _event = m.open_reporting(&m.guest, sim(1000).with_freq(), 1);
    // Advances the clock by `after_ns`, counts until the next overflow, and returns the number of
    // counts.
    let next = |after_ns: u64| {
        m.clock.advance(after_ns);
        (1..)
            .find(|_| {
                m.run(0, 1);
                !serve(&v).is_empty()
            })
            .unwrap()
    };
    // A period that is computed at an overflow takes effect after the next overflow. At a million
    // overflows per second, 1000 times the target, the period moves an eighth of the way from 1 to
    // 1000, to 126. At 111 per second, it moves an eighth of the way from 126 to 13, to 113.
    // Intervals of three ticks do not change it.
    let seen = [999, 30_000_000, 9_000_000, 30_000_000, 0].map(next);
    assert_eq!(seen, [1, 1, 126, 126, 113]);
}

/// After a ring in overwrite mode has wrapped, its newest samples can be read in order, up to the
/// last one.
#[test]
fn newest_samples_of_overwrite_ring_can_be_read() {
    let m = TestCore::with(4, |c| c.sample_rate_hz = 1_000_000);
    let v = m.vcpu(0);
    let e = m.open_vcpu(sim(10).with_sample_type(SampleType::TIME), None);
    let ring = e.map(1, false).unwrap();
    for _ in 0..1000 {
        m.run(0, 10);
        serve(&v);
    }
    e.pause_output(true).unwrap();
    let times = map_samples(&ring, e.attr(), |sample| sample.time_ns);
    let newest: Vec<u64> = (0..1000).map(|n| 10 * n + 10).collect();
    assert!(newest.ends_with(&times), "{times:?}");
    // Each record has 16 bytes. At least three quarters of the ring minus a sixteenth are readable.
    assert!(times.len() >= (4096 * 11 / 16 - 16) / 16, "{times:?}");
}
