//! Tests of the periods of samples. Each period is the number of counts since the previous sample,
//! so the periods add up to the count, whatever happens between samples.

use perf_core::ring::{Ring, RingReader};
use perf_core::*;
use proptest::prelude::*;

use crate::common::test_core::*;

fn sampling(period: u64) -> Attr {
    sim(period).with_sample_type(SampleType::CPU | SampleType::PERIOD)
}

fn by_frequency(hz: u64) -> Attr {
    sampling(hz).with_freq()
}

fn raised(period: u64) -> Attr {
    let (ty, config) = (EventType::VMM, SoftwareEventId::Exits as u64);
    Attr {
        ty,
        config,
        ..sampling(period)
    }
}

fn run(m: &TestCore, v: &VcpuEventContext, n: u64) {
    m.run(v.id().0, n);
    serve(v);
}

/// Returns the vCPU and the period of each unread sample in a ring.
fn samples(ring: &Ring) -> Vec<(u32, u64)> {
    map_samples(ring, &sampling(1), |s| (s.cpu, s.period))
}

fn periods(ring: &Ring) -> Vec<u64> {
    samples(ring).into_iter().map(|(_, period)| period).collect()
}

#[test]
fn vcpu_added_later_samples_at_the_frequency_and_the_period_of_its_family() {
    let m = TestCore::with(4, |c| c.tick_hz = 1000);
    let e = m.open_vm(by_frequency(1000).with_inherit());
    let ring = e.map(256, true).unwrap();
    let v0 = m.vcpu(0);
    e.set_period(10_000).unwrap();
    // At one count per nanosecond, the ideal period of this frequency is 100,000 counts.
    let second = |v: &VcpuEventContext| {
        for step in 0..100_000u64 {
            run(&m, v, 10_000);
            if step % 100 == 99 {
                m.core.tick();
            }
        }
        samples(&ring)
    };
    second(&v0);
    let v1 = m.vcpu(1);
    run(&m, &v1, 50_000);
    assert_eq!(samples(&ring), [], "it begins with the period the other found");
    let n = second(&v1).len();
    assert!((9_000..=11_000).contains(&n), "{n} samples in a second");
}

#[test]
fn by_frequency_each_sample_has_the_period_of_its_own_interval() {
    let m = TestCore::with(4, |c| c.tick_hz = 1000);
    let v = m.vcpu(0);
    let e = m.open_vcpu(by_frequency(10_000), None);
    let ring = e.map(64, true).unwrap();
    let (mut at, mut seen) = (0, 0);
    for step in 1..=100_000u64 {
        run(&m, &v, 2000);
        for period in periods(&ring) {
            at += period;
            // Overflows are handled every 2000 counts, so the last sample ends less than 2000
            // counts ago.
            let now = 2000 * step;
            assert!(
                now - at < 2000,
                "a sample of {period} ends at {at}, served at {now}"
            );
            seen += 1;
        }
        if step % 500 == 0 {
            m.core.tick();
        }
        if step == 50_000 {
            e.set_period(20_000).unwrap();
        }
    }
    assert!(seen > 1000, "{seen} samples");
}

#[test]
fn bursts_samples_are_written_together_in_their_places_before_a_throttle_and_an_end() {
    // The limit is 400 overflows per second at 10 ticks per second, which allows 40 per tick. The
    // next overflow throttles the event.
    let m = TestCore::with(1, |c| (c.sample_rate_hz, c.tick_hz) = (400, 10));
    let v = m.vcpu(0);
    let e = m.open_vcpu(raised(10), None);
    let ring = e.map(8, true).unwrap();
    raise(&v, 7);
    // Causes 40 overflows, more than are written in one batch. The first sample includes the 7
    // exits above.
    raise(&v, 10 * 39 + 5);
    assert_eq!(samples(&ring), [(0, 10); 40]);
    raise(&v, 60);
    let mut reader = RingReader::map(ring.memfd()).unwrap();
    let mut types = Vec::new();
    while let Some(raw) = reader.next_record().unwrap() {
        types.push(raw.ty());
    }
    drop(reader);
    // Types of the records: a sample (9), a THROTTLE record (5), and the sample that exceeded the
    // limit (9).
    assert_eq!(types, [9, 5, 9]);
    m.core.tick();
    e.disable(EventOrGroup::Event).unwrap();
    samples(&ring);
    e.refresh(20).unwrap();
    ring.take_poll();
    raise(&v, 1000);
    // All 20 samples are written before the event reaches its limit and is disabled.
    assert_eq!(samples(&ring).len(), 20);
    assert!(ring.take_poll().hang_up);
    assert_eq!(e.state(), EventState::Off);
    assert_eq!(v.stats().samples, 40 + 2 + 20);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Work(u64),
    Serve,
    Period(u64),
    OutAndIn,
    OffAndOn,
    Tick,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (1u64..300).prop_map(Step::Work),
        4 => Just(Step::Serve),
        2 => (10u64..200).prop_map(Step::Period),
        1 => Just(Step::OutAndIn),
        1 => Just(Step::OffAndOn),
        1 => Just(Step::Tick),
    ]
}

proptest! {
    /// For any sequence of operations on an event, the periods of its samples add up to its count.
    /// This holds with a period or a frequency, for driver events and raised events, throttled or
    /// not.
    #[test]
    fn periods_of_samples_add_up_to_the_count(
        period in 10u64..200,
        freq: bool,
        software: bool,
        sample_rate in prop_oneof![Just(100u64), Just(100_000)],
        steps in prop::collection::vec(step(), 1..80),
    ) {
                let m = TestCore::with(1, |c| (c.sample_rate_hz, c.tick_hz) = (sample_rate, 10));
        let v = m.vcpu(0);
        let attr = Attr {
            freq,
            ..if software { raised(period.min(sample_rate)) } else { sampling(period.min(sample_rate)) }
        };
        let e = m.open_vcpu(attr, None);
        let ring = e.map(64, true).unwrap();
        let mut stood_for = 0;
                let serve = || drop(serve(&v));
        let work = |n| if software { m.clock.advance(n); raise(&v, n) } else { m.run(0, n) };
        for s in steps {
            match s {
                Step::Work(n) => work(n),
                Step::Serve => serve(),
                Step::Period(p) => e.set_period(p.min(sample_rate)).unwrap(),
                Step::OutAndIn => { v.sched_out(); v.sched_in(); }
                Step::OffAndOn => { e.disable(EventOrGroup::Event).unwrap(); e.enable(EventOrGroup::Event).unwrap(); }
                Step::Tick => m.core.tick(),
            }
            stood_for += periods(&ring).iter().sum::<u64>();
            prop_assert!(stood_for <= e.read().unwrap().value);
        }
        // Handles pending overflows and ends throttling. Counts slowly for a while, so that a
        // frequency-based event adopts a short period.
        serve();
        for _ in 0..if freq { 400 } else { 0 } {
            m.clock.advance(1_000_000_000);
            work(1);
            serve();
            m.core.tick();
        }
        m.core.tick();
        if !freq {
            e.set_period(14).unwrap();
        }
        stood_for += periods(&ring).iter().sum::<u64>();
        // The next sample covers all counts up to its overflow.
        let mut last = Vec::new();
        for _ in 0..8 * 14 {
            if last.is_empty() {
                work(1);
                serve();
                last = periods(&ring);
            }
        }
        prop_assert!(!last.is_empty());
        prop_assert_eq!(stood_for + last.iter().sum::<u64>(), e.read().unwrap().value);
    }
}
