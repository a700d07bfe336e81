//! Invariants for any history of control calls, mappings and redirections.

use perf_core::record::{Record, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::*;
use proptest::prelude::*;

use crate::common::test_core::*;

fn sampling(period: u64) -> Attr {
    Attr {
        sample_type: SampleType::IP,
        ..Attr::sampling(EventType::SIM, 1, period)
    }
}

fn cookie(n: u64) -> OpenFlags {
    OpenFlags {
        cookie: Some(n),
        ..OpenFlags::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// P26: the number of overflows per tick is at most the rate limit plus one, and THROTTLE and
    /// UNTHROTTLE records alternate.
    #[test]
    fn p26_overflows_per_tick_are_limited(rate in 10u64..400, period in 1u64..20, steps in prop::collection::vec((1u64..40, any::<bool>()), 1..120)) {
        let m = TestCore::with(1, |c| { c.sample_rate_hz = rate; c.tick_hz = 10; });
        let v = m.vcpu(0);
        let e = m.core.open(&m.admin, sampling(period), OpenTarget::Vcpu(VcpuId(0)), None, cookie(1)).unwrap();
        let ring = e.map(16, true).unwrap();
        let (mut in_tick, mut work) = (0, 0);
        for (n, tick) in steps {
            m.run(0, n);
            work += n;
            v.service_overflows(&mut UnavailableRegs, &mut |_| in_tick += 1);
            prop_assert!(in_tick <= rate / 10 + 1, "{in_tick}");
            if tick {
                m.core.tick();
                in_tick = 0;
            }
        }
        prop_assert_eq!(e.read().unwrap().value, work, "throttling costs samples, not counts");
        let mut reader = RingReader::map(ring.memfd()).unwrap();
        let mut throttled = false;
        while let Some(raw) = reader.next_record().unwrap() {
            let format = RecordFormat { sample_type: SampleType::IP, read_format: ReadFormat::empty(), ..RecordFormat::default() };
            match Record::decode(raw, format).unwrap() {
                Record::Throttle(_) => { prop_assert!(!throttled); throttled = true; }
                Record::Unthrottle(_) => { prop_assert!(throttled); throttled = false; }
                _ => {}
            }
        }
    }

    /// P27: the event overflows exactly as often as its limit allows, for any steps, and is then
    /// off with HUP.
    #[test]
    fn p27_event_limit_is_exact(allowed in prop::collection::vec(1u32..6, 1..4), period in 1u64..10) {
        let m = TestCore::new(1);
        let v = m.vcpu(0);
        let attr = Attr { disabled: true, ..sampling(period) };
        let e = m.core.open(&m.admin, attr, OpenTarget::Vcpu(VcpuId(0)), None, cookie(1)).unwrap();
        let total: u32 = allowed.iter().sum();
        for n in allowed {
            e.refresh(n).unwrap();
        }
        let mut seen = 0;
        for _ in 0..=total {
            m.run(0, period * 2);
            v.service_overflows(&mut UnavailableRegs, &mut |o| seen += o.times);
        }
        prop_assert_eq!(seen, total);
        prop_assert_eq!(e.state(), EventState::Off);
        prop_assert!(e.poll().contains(PollState::HUP));
    }

    /// P35: the charged memory equals the mapped memory after any sequence, including failures, and
    /// is zero at the end.
    #[test]
    fn p35_charged_memory_equals_mapped_memory(ops in prop::collection::vec((0usize..3, 0u8..4, 0usize..6), 1..60)) {
        let m = TestCore::with(1, |c| { c.mlock_kb = 32; c.host_cpus = 1; c.memlock_kb = 0; });
        let _v = m.vcpu(0);
        let user = m.core.session(0, Role::Operator);
        let open = || m.core.open(&user, soft(), OpenTarget::Vcpu(VcpuId(0)), None, OpenFlags::default()).unwrap();
        let mut events: Vec<_> = (0..3).map(|_| open()).collect();
        // Pages and number of mappings of each event.
        let mut mapped = [(0u64, 0u32); 3];
        for (i, op, pages) in ops {
            match op {
                0 | 1 => if events[i].map(pages, op == 0).is_ok() {
                    mapped[i] = (pages as u64 + 1, mapped[i].1 + 1);
                },
                2 => if events[i].unmap() {
                    mapped[i].1 -= 1;
                    if mapped[i].1 == 0 { mapped[i].0 = 0; }
                },
                _ => {
                    events[i] = open();
                    mapped[i] = (0, 0);
                }
            }
            prop_assert_eq!(m.core.ring_pages(0), mapped.iter().map(|(pages, _)| pages).sum::<u64>());
            prop_assert!(m.core.ring_pages(0) <= 8, "never above the limit");
        }
        drop(events);
        prop_assert_eq!(m.core.ring_pages(0), 0);
    }

    /// P36: redirections form no chains, no event with a ring of its own is redirected, and records
    /// are written to the ring that the model predicts.
    #[test]
    fn p36_redirections_form_no_chains(ops in prop::collection::vec((0u8..4, 0usize..4, 0usize..4), 1..40)) {
        let m = TestCore::new(8);
        let v = m.vcpu(0);
        let events: Vec<_> = (0..4).map(|_| m.open_vcpu(sampling(10), None)).collect();
        let mut target: [Option<usize>; 4] = [None; 4];
        let mut rings: [Option<std::sync::Arc<perf_core::ring::Ring>>; 4] = [const { None }; 4];
        for (op, i, j) in ops {
            match op {
                0 => {
                    let allowed = i != j && target[j].is_none() && rings[i].is_none() && !target.contains(&Some(i));
                    prop_assert_eq!(events[i].set_output(Some(&events[j])).is_ok(), allowed);
                    if allowed { target[i] = Some(j); }
                }
                1 => { events[i].set_output(None).unwrap(); target[i] = None; }
                2 => {
                    let ring = events[i].map(8, true);
                    prop_assert_eq!(ring.is_ok(), target[i].is_none());
                    if rings[i].is_none() { rings[i] = ring.ok(); } else { events[i].unmap(); }
                }
                _ => { prop_assert_eq!(events[i].unmap(), rings[i].take().is_some()); }
            }
            for i in 0..4 {
                if let Some(j) = target[i] {
                    prop_assert!(target[j].is_none() && rings[i].is_none());
                }
            }
            let mut before: Vec<_> = rings.iter().map(|r| r.as_ref().map(|r| r.published())).collect();
            m.run(0, 10);
            v.service_overflows(&mut UnavailableRegs, &mut |_| {});
            for i in 0..4 {
                if let Some(at) = &mut before[target[i].unwrap_or(i)] {
                    *at += 16;
                }
            }
            let after: Vec<_> = rings.iter().map(|r| r.as_ref().map(|r| r.published())).collect();
            prop_assert_eq!(after, before);
        }
    }

    /// P40: a package count always equals the driver's value.
    #[test]
    fn p40_package_count_equals_driver_count(ops in prop::collection::vec((0u8..6, 0u32..3, 0u64..1000), 1..40)) {
        let m = TestCore::new(2);
        let e = m.open(Attr { config: PACKAGE, inherit: true, ..hw() }, OpenTarget::Vm, None);
        let mut there = [false; 3];
        for (op, n, value) in ops {
            match op {
                0 if !there[n as usize] => { m.vcpu(n); there[n as usize] = true; }
                1 if there[n as usize] => { m.core.remove_vcpu(VcpuId(n)).unwrap(); there[n as usize] = false; }
                2 => e.reset(ControlScope::Event).unwrap(),
                3 => e.disable(ControlScope::Event).unwrap(),
                4 => e.enable(ControlScope::Event).unwrap(),
                _ => *m.hw.package.lock().unwrap() = value,
            }
            prop_assert_eq!(e.read().unwrap().value, *m.hw.package.lock().unwrap());
            prop_assert_eq!(e.children(), 0);
        }
    }

    /// P41: the handles of a removed vCPU keep their last values permanently.
    #[test]
    fn p41_handles_keep_their_last_value(n in 1usize..6, work in 1u64..100, ops in prop::collection::vec((0u8..4, any::<prop::sample::Index>()), 0..20)) {
        let m = TestCore::new(2);
        let v = m.vcpu(0);
        let events: Vec<_> = (0..n).map(|i| m.open_vcpu(if i % 2 == 0 { hw() } else { soft() }, None)).collect();
        m.run(0, work);
        m.core.tick();
        m.run(0, work);
        let count = |e: &Handle| e.read().unwrap().value;
        let last: Vec<_> = events.iter().map(count).collect();
        m.core.remove_vcpu(VcpuId(0)).unwrap();
        prop_assert_eq!(m.hw.on(0) + m.sw.on(0), 0, "everything is off");
        for (op, i) in ops {
            let e = i.get(&events);
            match op {
                0 => e.enable(ControlScope::Group).unwrap(),
                1 => e.disable(ControlScope::Event).unwrap(),
                2 => { v.sched_in(); v.tick(); }
                _ => { m.run(0, 10); v.service_overflows(&mut UnavailableRegs, &mut |_| {}); }
            }
            prop_assert_eq!(events.iter().map(count).collect::<Vec<_>>(), last.clone());
        }
        prop_assert_eq!(m.hw.on(0) + m.sw.on(0), 0);
    }
}
