//! Overflows, periods, limits and throttling.

use perf_core::*;
use proptest::prelude::*;

use crate::common::machine::*;

fn serve(v: &VcpuContext) -> Vec<OverflowReport> {
    let mut seen = Vec::new();
    v.service_overflows(&mut NoRegs, &mut |o| seen.push(o));
    seen
}

fn counter(m: &Machine, period: u64, cookie: u64) -> Handle {
    let attr = Attr {
        pinned: true,
        ..Attr::sampling(EventType::SIM, 1, period)
    };
    let flags = OpenFlags {
        cookie: Some(cookie),
        ..OpenFlags::default()
    };
    m.core
        .open(&m.guest, attr, OpenTarget::Vcpu(VcpuId(0)), None, flags)
        .unwrap()
}

#[test]
fn an_armed_counter_overflows_exactly_there_and_then_at_its_period() {
    let m = Machine::new(4);
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
fn arming_again_while_it_runs_takes_effect_at_once_and_loses_nothing() {
    let m = Machine::new(4);
    let v = m.vcpu(0);
    let c = counter(&m, 1 << 40, 1);
    c.arm(10).unwrap();
    m.run(0, 10); // passed, not served yet
    c.arm(5).unwrap();
    m.run(0, 4);
    assert_eq!(
        serve(&v),
        [OverflowReport { cookie: 1, times: 1 }],
        "the one before the write"
    );
    m.run(0, 1);
    assert_eq!(serve(&v), [OverflowReport { cookie: 1, times: 1 }]);
}

#[test]
fn an_overflow_survives_being_taken_off_before_it_is_served() {
    let m = Machine::new(4);
    let v = m.vcpu(0);
    let c = counter(&m, 100, 1);
    m.run(0, 250);
    v.sched_out();
    assert_eq!(serve(&v), [OverflowReport { cookie: 1, times: 2 }]);
    v.sched_in();
    m.run(0, 49);
    assert_eq!(serve(&v), [], "half a period was left");
    m.run(0, 1);
    assert_eq!(serve(&v), [OverflowReport { cookie: 1, times: 1 }]);
    assert_eq!(c.read().unwrap().value, 300);
}

/// The limit of a leader takes its whole group off while others wait to be served: none of them waits for the
/// next signal.
#[test]
fn a_group_that_goes_off_while_it_is_served_leaves_nothing_unserved() {
    let m = Machine::new(8);
    let v = m.vcpu(0);
    let open = |cookie, leader: Option<&Handle>| {
        let flags = OpenFlags {
            cookie: Some(cookie),
            ..OpenFlags::default()
        };
        let attr = Attr::sampling(EventType::SIM, 1, 10);
        m.core
            .open(&m.admin, attr, OpenTarget::Vcpu(VcpuId(0)), leader, flags)
            .unwrap()
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

/// Overflows that passed before an event went off count against its limit, and end it: those of its next time
/// on the PMU are beyond what was asked for.
#[test]
fn p27_a_limit_is_exact_when_the_event_went_off_and_on_meanwhile() {
    let m = Machine::new(1);
    let v = m.vcpu(0);
    let c = counter(&m, 10, 7);
    c.refresh(2).unwrap();
    m.run(0, 20);
    v.sched_out();
    v.sched_in();
    m.run(0, 30);
    let mut seen = Vec::new();
    assert_eq!(
        v.service_overflows(&mut NoRegs, &mut |o| seen.push(o)),
        1,
        "one event had overflowed"
    );
    assert_eq!(seen, [OverflowReport { cookie: 7, times: 2 }]);
    assert_eq!(c.state(), EventState::Off);
    assert_eq!(serve(&v), []);
}

#[test]
fn more_events_than_a_batch_are_all_served() {
    let m = Machine::new(40);
    let v = m.vcpu(0);
    let _all: Vec<_> = (0..40).map(|i| counter(&m, 10, i)).collect();
    m.run(0, 10);
    let mut cookies: Vec<_> = serve(&v).iter().map(|o| o.cookie).collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..40).collect::<Vec<_>>());
}

#[test]
fn p27_refresh_gives_that_many_overflows_then_off_and_hup() {
    let m = Machine::new(4);
    let v = m.vcpu(0);
    let attr = Attr {
        disabled: true,
        ..Attr::sampling(EventType::SIM, 1, 10)
    };
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
    let inherited = m.open(
        Attr {
            inherit: true,
            ..attr
        },
        OpenTarget::Vm,
        None,
    );
    assert_eq!(inherited.refresh(1).unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn p26_throttled_events_keep_counting_and_come_back_at_the_tick() {
    // 100 overflows a second, 10 ticks a second: 10 in a tick are fine, the eleventh throttles.
    let m = Machine::with(4, |c| {
        c.sample_rate_hz = 100;
        c.tick_hz = 10;
    });
    let v = m.vcpu(0);
    let attr = Attr::sampling(EventType::SIM, 1, 5);
    let flags = OpenFlags {
        cookie: Some(1),
        ..OpenFlags::default()
    };
    let e = m
        .core
        .open(&m.admin, attr, OpenTarget::Vcpu(VcpuId(0)), None, flags)
        .unwrap();
    let burst = || {
        (0..30)
            .map(|_| {
                m.run(0, 5);
                serve(&v).len()
            })
            .sum::<usize>()
    };
    assert_eq!(burst(), 11);
    assert!(m.core.needs_tick());
    assert_eq!(e.read().unwrap().value, 150, "a throttled event counts on");
    m.core.tick();
    assert_eq!(burst(), 11);
}

#[test]
fn the_guests_counters_are_never_throttled() {
    let m = Machine::with(4, |c| c.sample_rate_hz = 1);
    let v = m.vcpu(0);
    let _c = counter(&m, 1, 1);
    let n: u32 = (0..100)
        .map(|_| {
            m.run(0, 1);
            serve(&v).iter().map(|o| o.times).sum::<u32>()
        })
        .sum();
    assert_eq!(n, 100);
}

#[test]
fn a_frequency_finds_its_period() {
    let m = Machine::with(4, |c| c.tick_hz = 1000);
    let v = m.vcpu(0);
    let attr = Attr {
        freq: true,
        ..Attr::sampling(EventType::SIM, 1, 10_000)
    };
    let flags = OpenFlags {
        cookie: Some(1),
        ..OpenFlags::default()
    };
    let _e = m
        .core
        .open(&m.admin, attr, OpenTarget::Vcpu(VcpuId(0)), None, flags)
        .unwrap();
    // One count per nanosecond: the ideal period is 100,000.
    let mut last_second = 0u32;
    for step in 0..200_000u64 {
        m.run(0, 10_000);
        let n: u32 = serve(&v).iter().map(|o| o.times).sum();
        if step >= 100_000 {
            last_second += n;
        }
        if step % 100 == 99 {
            m.core.tick();
        }
    }
    assert!(
        (9_000..=11_000).contains(&last_second),
        "{last_second} overflows in the second second"
    );
}

#[test]
fn periods_are_checked() {
    let m = Machine::new(4);
    let _v = m.vcpu(0);
    let e = m.open_vcpu(hw(), None);
    assert_eq!(
        e.set_period(5).unwrap_err().errno(),
        libc::EINVAL,
        "a counting event has none"
    );
    assert_eq!(e.arm(0).unwrap_err().errno(), libc::EINVAL);
    let e = m.open_vcpu(
        Attr {
            freq: true,
            ..Attr::sampling(EventType::SIM, 1, 100)
        },
        None,
    );
    assert_eq!(e.set_period(100_001).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(e.set_period(0).unwrap_err().errno(), libc::EINVAL);
    e.set_period(100_000).unwrap();
}

proptest! {
    /// However work, arming, rotation and service fall together, each period gives one overflow.
    #[test]
    fn overflows_are_the_count_divided_by_the_period(period in 1u64..200, steps in prop::collection::vec((0u8..5, 1u64..300), 1..60)) {
        let m = Machine::new(1);
        let v = m.vcpu(0);
        let c = counter(&m, period, 0);
        let mut times = 0;
        for (what, n) in steps {
            match what {
                0 => times += serve(&v).iter().map(|o| u64::from(o.times)).sum::<u64>(),
                1 => { v.sched_out(); v.sched_in(); }
                2 => { c.disable(ControlScope::Event).unwrap(); c.enable(ControlScope::Event).unwrap(); }
                _ => m.run(0, n),
            }
        }
        times += serve(&v).iter().map(|o| u64::from(o.times)).sum::<u64>();
        prop_assert_eq!(times, c.read().unwrap().value / period);
    }
}

#[test]
fn p38_no_overflow_is_claimed_while_nothing_is_on() {
    let m = Machine::new(4);
    let v = m.vcpu(0);
    assert_eq!(v.service_overflows(&mut NoRegs, &mut |_| {}), 0);
    let c = counter(&m, 10, 1);
    m.run(0, 10);
    assert_eq!(v.service_overflows(&mut NoRegs, &mut |_| {}), 1);
    assert_eq!(
        v.service_overflows(&mut NoRegs, &mut |_| {}),
        0,
        "a second signal for the same overflow is not ours"
    );
    c.disable(ControlScope::Event).unwrap();
    m.run(0, 100);
    assert_eq!(v.stats().active, 0);
    assert_eq!(v.service_overflows(&mut NoRegs, &mut |_| panic!("claimed")), 0);
}

#[test]
fn the_last_sample_before_the_limit_is_written() {
    let m = Machine::new(4);
    let v = m.vcpu(0);
    let attr = Attr {
        disabled: true,
        sample_type: SampleType::IP,
        ..Attr::sampling(EventType::SIM, 1, 10)
    };
    let e = m.open_vcpu(attr, None);
    let ring = e.map(1, true).unwrap();
    e.refresh(2).unwrap();
    for _ in 0..5 {
        m.run(0, 10);
        serve(&v);
    }
    assert_eq!((e.state(), v.stats().samples), (EventState::Off, 2));
    assert_eq!(ring.published(), 2 * 16);
}

/// A frequency below the tick's: several ticks make one window, or each without an overflow would shorten the
/// period.
#[test]
fn a_frequency_below_the_tick_finds_its_period() {
    let m = Machine::with(4, |c| c.tick_hz = 100);
    let v = m.vcpu(0);
    let attr = Attr {
        freq: true,
        ..Attr::sampling(EventType::SIM, 1, 10)
    };
    let flags = OpenFlags {
        cookie: Some(1),
        ..OpenFlags::default()
    };
    let _e = m
        .core
        .open(&m.admin, attr, OpenTarget::Vcpu(VcpuId(0)), None, flags)
        .unwrap();
    // A second of 100,000 steps, one count per nanosecond: ten overflows are asked for.
    let second = || {
        let mut n = 0;
        for step in 1..=10_000u64 {
            m.run(0, 100_000);
            n += serve(&v).iter().map(|o| o.times).sum::<u32>();
            if step % 100 == 0 {
                m.core.tick();
            }
        }
        n
    };
    for _ in 0..20 {
        second();
    }
    for _ in 0..5 {
        let n = second();
        assert!((8..=12).contains(&n), "{n} overflows in a second");
    }
}

/// A guest that becomes a thousand times slower: the period it had would take minutes, so it is not waited
/// for.
#[test]
fn a_period_that_became_too_long_is_not_waited_for() {
    let m = Machine::with(4, |c| c.tick_hz = 1000);
    let v = m.vcpu(0);
    let attr = Attr {
        freq: true,
        sample_type: SampleType::PERIOD,
        ..Attr::sampling(EventType::SIM, 1, 1000)
    };
    let e = m.open_vcpu(attr, None);
    let _ring = e.map(64, false).unwrap();
    let run = |ns: u64, counts: u64| {
        m.clock.advance(ns);
        m.hw.work(0, counts);
        v.service_overflows(&mut NoRegs, &mut |_| {});
    };
    for step in 1..=200_000u64 {
        run(10_000, 10_000);
        if step % 100 == 0 {
            m.core.tick();
        }
    }
    let before = v.stats().samples;
    // A period of a million counts, and a thousand counts in a tick from now on.
    let mut ticks = 0;
    while v.stats().samples == before {
        run(1_000_000, 1000);
        m.core.tick();
        ticks += 1;
        assert!(ticks < 100, "no sample in {ticks} ticks");
    }
}

/// A host that takes as long to notice an overflow as the frequency asks for: the period grows until there is
/// one overflow each time, and does not stay so short that there are many.
#[test]
fn a_frequency_finds_its_period_also_where_overflows_are_noticed_late() {
    let m = Machine::with(4, |c| c.tick_hz = 250);
    let v = m.vcpu(0);
    let attr = Attr {
        freq: true,
        ..Attr::sampling(EventType::SIM, 1, 10_000)
    };
    let flags = OpenFlags {
        cookie: Some(1),
        ..OpenFlags::default()
    };
    let _e = m
        .core
        .open(&m.admin, attr, OpenTarget::Vcpu(VcpuId(0)), None, flags)
        .unwrap();
    let second = || {
        let mut times = 0;
        for step in 1..=10_000u64 {
            m.run(0, 100_000);
            times += serve(&v).iter().map(|o| o.times).sum::<u32>();
            if step % 40 == 0 {
                m.core.tick();
            }
        }
        times
    };
    second();
    let n = second();
    assert!((8_000..=12_000).contains(&n), "{n} overflows in a second");
}

/// A throttle limits samples per tick's time. Where the VMM rings no ticks, old interrupts must not count for
/// ever.
#[test]
fn p26_rare_overflows_are_not_throttled_where_no_ticks_come() {
    let m = Machine::with(4, |c| {
        c.sample_rate_hz = 100;
        c.tick_hz = 10;
    });
    let v = m.vcpu(0);
    let e = m.open_vcpu(Attr::sampling(EventType::SIM, 1, 1_000_000_000), None);
    e.map(1, true).unwrap();
    for _ in 0..100 {
        m.run(0, 1_000_000_000);
        serve(&v);
    }
    assert_eq!((v.stats().samples, v.stats().throttles), (100, 0));
}

/// Only a tick lifts a throttle, so whatever can be throttled needs ticks from its beginning, and every one
/// of them once it is throttled: a VMM that looks rarely otherwise would leave it throttled for as long.
#[test]
fn p26_a_fixed_period_needs_ticks_and_a_guests_counter_does_not() {
    let m = Machine::with(4, |c| {
        c.sample_rate_hz = 2500;
        c.tick_hz = 250;
    });
    let v = m.vcpu(0);
    let guests = counter(&m, 1 << 20, 1);
    guests.arm(100).unwrap();
    assert!(!m.core.needs_tick());
    let operators = m.open_vcpu(Attr::sampling(EventType::SIM, 1, 5), None);
    operators.map(1, true).unwrap();
    assert_eq!((m.core.needs_tick(), m.core.tick_need()), (true, TickWork::Watch));
    for _ in 0..30 {
        m.run(0, 5);
        serve(&v);
    }
    assert_eq!((v.stats().throttles, m.core.tick_need()), (1, TickWork::Work));
    m.core.tick();
    assert_eq!(m.core.tick_need(), TickWork::Watch);
    operators.disable(ControlScope::Event).unwrap();
    assert!(!m.core.needs_tick());
    let by_frequency = Attr {
        freq: true,
        ..Attr::sampling(EventType::SIM, 1, 100)
    };
    let _follows = m.open_vcpu(by_frequency, None);
    assert_eq!(m.core.tick_need(), TickWork::Work);
}

/// A tick that finds no overflow served begins a new period, so that one that became huge does not stall the
/// event. What has passed and waits to be served is not to be forgotten thereby.
#[test]
fn a_tick_keeps_an_overflow_that_passed_and_was_not_served() {
    let m = Machine::with(4, |c| c.tick_hz = 1000);
    let v = m.vcpu(0);
    let attr = Attr {
        freq: true,
        ..Attr::sampling(EventType::SIM, 1, 1000)
    };
    let flags = OpenFlags {
        cookie: Some(1),
        ..OpenFlags::default()
    };
    let _e = m
        .core
        .open(&m.admin, attr, OpenTarget::Vcpu(VcpuId(0)), None, flags)
        .unwrap();
    m.run(0, 1000);
    m.core.tick();
    let times: u32 = serve(&v).iter().map(|o| o.times).sum();
    assert_eq!(times, 1000);
}

/// Registers whose reading raises an event of the thread's own level.
struct Raising<'a>(&'a VcpuContext, Option<bool>);

impl SampleRegs for Raising<'_> {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestKernel
    }
    fn ip(&mut self) -> u64 {
        let raised =
            self.0
                .software_event_at(RaiseLevel::Thread, SoftwareEventId::Halts, 1, None, &mut |_| {});
        self.1 = Some(raised);
        0
    }
}

/// Serving overflows is work of the thread's level: what its registers raise is dropped as documented, and
/// does not wait for the lock that the service holds.
#[test]
fn p24_registers_that_raise_an_event_while_overflows_are_served_do_not_wait_for_their_own_lock() {
    let m = Machine::new(4);
    let v = m.vcpu(0);
    let attr = Attr {
        sample_type: SampleType::IP,
        ..Attr::sampling(EventType::SIM, 1, 10)
    };
    let e = m.open_vcpu(attr, None);
    let _ring = e.map(1, true).unwrap();
    let halts = m.open_vcpu(
        Attr::counting(EventType::VMM, SoftwareEventId::Halts as u64),
        None,
    );
    m.run(0, 10);
    let mut regs = Raising(&v, None);
    assert_eq!(v.service_overflows(&mut regs, &mut |_| {}), 1);
    assert_eq!(regs.1, Some(false), "dropped, and it says so");
    assert_eq!(halts.read().unwrap().value, 0);
    v.software_event(SoftwareEventId::Halts, 1, None, &mut |_| {});
    assert_eq!(halts.read().unwrap().value, 1, "the level is free again");
}

#[test]
fn a_vm_wide_event_without_a_ring_notifies_whoever_opened_it() {
    let m = Machine::new(4);
    let v = m.vcpu(0);
    let attr = Attr {
        inherit: true,
        ..Attr::sampling(EventType::SIM, 1, 10)
    };
    let e = m.open(attr, OpenTarget::Vm, None);
    assert!(!e.poll().contains(PollState::IN));
    m.run(0, 10);
    serve(&v);
    assert!(e.poll().contains(PollState::IN));
    assert!(!e.poll().contains(PollState::IN), "taken once");
}

/// An overflow that comes less than a tick after the one before it moves the period; after a longer time the
/// ticks do, which know how long it was.
#[test]
fn overflows_move_a_frequencys_period_if_they_come_within_a_tick() {
    // A tick is 10 ms.
    let m = Machine::with(4, |c| c.tick_hz = 100);
    let v = m.vcpu(0);
    let attr = Attr {
        freq: true,
        ..Attr::sampling(EventType::SIM, 1, 1000)
    };
    let flags = OpenFlags {
        cookie: Some(1),
        ..OpenFlags::default()
    };
    let target = OpenTarget::Vcpu(VcpuId(0));
    let _event = m.core.open(&m.guest, attr, target, None, flags).unwrap();
    // How many counts there are to the next overflow, which comes `after_ns`.
    let next = |after_ns: u64| {
        m.clock.advance(after_ns);
        (1..)
            .find(|_| {
                m.run(0, 1);
                !serve(&v).is_empty()
            })
            .unwrap()
    };
    // A period that an overflow has found is in force after the next one. A million a second instead of a
    // thousand: an eighth of the way from 1 to 1000. 111 a second: an eighth of the way from 126 to 13. What
    // comes after three ticks changes nothing.
    let seen = [999, 30_000_000, 9_000_000, 30_000_000, 0].map(next);
    assert_eq!(seen, [1, 1, 126, 126, 113]);
}
