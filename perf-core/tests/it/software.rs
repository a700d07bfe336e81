//! Events that the VMM raises.

use perf_core::*;

use crate::common::test_core::*;

fn exits() -> Attr {
    Attr::counting(EventType::VMM, SoftwareEventId::Exits as u64)
}

fn raise(v: &VcpuContext, n: u64) {
    v.software_event(SoftwareEventId::Exits, n, Some(&mut UnavailableRegs), &mut |_| {});
}

#[test]
fn only_matching_events_count() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let all = m.open_vcpu(exits(), None);
    let user = m.open_vcpu(
        Attr {
            exclude_kernel: true,
            ..exits()
        },
        None,
    );
    let kernel = m.open_vcpu(
        Attr {
            exclude_user: true,
            ..exits()
        },
        None,
    );
    let off = m.open_vcpu(
        Attr {
            disabled: true,
            ..exits()
        },
        None,
    );
    let halts = m.open_vcpu(
        Attr::counting(EventType::VMM, SoftwareEventId::Halts as u64),
        None,
    );
    raise(&v, 3); // the registers say CPL0
    v.software_event(SoftwareEventId::Exits, 2, None, &mut |_| {});
    let counts = [&all, &user, &kernel, &off, &halts].map(|e| e.read().unwrap().value);
    assert_eq!(counts, [5, 2, 5, 0, 0]);
}

/// An event raised while its thread handles an earlier one is dropped and reported as such. Without
/// a counting event there is nothing to drop.
#[test]
fn event_without_counter_is_not_dropped() {
    struct NestedRaise(std::sync::Arc<VcpuContext>, Vec<bool>);
    impl SampleRegs for NestedRaise {
        fn mode(&mut self) -> CpuMode {
            let raised =
                self.0
                    .software_event_at(RaiseLevel::Thread, SoftwareEventId::Halts, 1, None, &mut |_| {});
            self.1.push(raised);
            CpuMode::GuestKernel
        }
        fn ip(&mut self) -> u64 {
            0
        }
    }
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let _exits = m.open_vcpu(exits(), None);
    let nested = |v| {
        let mut regs = NestedRaise(std::sync::Arc::clone(v), Vec::new());
        v.software_event(SoftwareEventId::Exits, 1, Some(&mut regs), &mut |_| {});
        regs.1
    };
    assert_eq!(nested(&v), [true]);
    let halts = m.open_vcpu(
        Attr::counting(EventType::VMM, SoftwareEventId::Halts as u64),
        None,
    );
    assert_eq!(nested(&v), [false]);
    assert_eq!(halts.read().unwrap().value, 0);
}

#[test]
fn vm_context_counts_before_vcpu_context() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let open = |target, cookie| {
        let attr = Attr {
            sample_period: 1,
            ..exits()
        };
        let flags = OpenFlags {
            cookie: Some(cookie),
            ..OpenFlags::default()
        };
        m.core.open(&m.admin, attr, target, None, flags).unwrap()
    };
    let _vcpu = open(OpenTarget::Vcpu(VcpuId(0)), 2);
    let _vm = open(OpenTarget::Vm, 1);
    let mut seen = Vec::new();
    v.software_event(SoftwareEventId::Exits, 1, Some(&mut UnavailableRegs), &mut |o| {
        seen.push(o.cookie)
    });
    assert_eq!(seen, [1, 2]);
}

#[test]
fn unknown_event_is_refused() {
    let m = TestCore::new(1);
    let _v = m.vcpu(0);
    for target in [OpenTarget::Vm, OpenTarget::Vcpu(VcpuId(0))] {
        let attr = Attr::counting(EventType::VMM, SoftwareEventId::ALL.len() as u64);
        let error = m
            .core
            .open(&m.admin, attr, target, None, OpenFlags::default())
            .unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
    }
    for (i, id) in SoftwareEventId::ALL.iter().enumerate() {
        assert_eq!(
            (*id as usize, SoftwareEventId::from_config(i as u64)),
            (i, Some(*id))
        );
    }
}

/// Registers whose evaluation raises an event at `level`.
struct NestedRaise<'a> {
    v: &'a VcpuContext,
    level: RaiseLevel,
    delivered: Option<bool>,
}

impl SampleRegs for NestedRaise<'_> {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestKernel
    }
    fn ip(&mut self) -> u64 {
        let v = self.v;
        self.delivered = Some(v.software_event_at(self.level, SoftwareEventId::Halts, 1, None, &mut |_| {}));
        0
    }
}

/// An event raised inside its own level is dropped, an event of another level is not, and all levels
/// are free afterwards.
#[test]
fn p24_an_event_inside_its_own_level_is_dropped_and_others_nest() {
    use RaiseLevel::{Deferred, Nmi, Signal, Thread};
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let sampled = Attr {
        sample_period: 1,
        sample_type: SampleType::IP,
        ..exits()
    };
    let sampled = m.open_vcpu(sampled, None);
    let _ring = sampled.map(1, true).unwrap();
    let halts = m.open_vcpu(
        Attr::counting(EventType::VMM, SoftwareEventId::Halts as u64),
        None,
    );
    let mut count = 0;
    for outer in [Thread, Deferred, Signal, Nmi] {
        for level in [Thread, Deferred, Signal, Nmi] {
            let mut regs = NestedRaise {
                v: &v,
                level,
                delivered: None,
            };
            assert!(v.software_event_at(outer, SoftwareEventId::Exits, 1, Some(&mut regs), &mut |_| {}));
            assert_eq!(regs.delivered, Some(level != outer), "{level:?} in {outer:?}");
            count += u64::from(level != outer);
            assert_eq!(halts.read().unwrap().value, count);
        }
    }
}

#[test]
fn sink_may_raise_events_itself() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let flags = OpenFlags {
        cookie: Some(5),
        ..OpenFlags::default()
    };
    let counter = Attr {
        pinned: true,
        sample_period: 2,
        ..exits()
    };
    let _c = m
        .core
        .open(&m.guest, counter, OpenTarget::Vcpu(VcpuId(0)), None, flags)
        .unwrap();
    let pmis = m.open_vcpu(Attr::counting(EventType::VMM, SoftwareEventId::Pmis as u64), None);
    let mut seen = Vec::new();
    v.software_event(SoftwareEventId::Exits, 5, None, &mut |o| {
        v.software_event(SoftwareEventId::Pmis, 1, None, &mut |_| {});
        seen.push(o);
    });
    assert_eq!(seen, [OverflowReport { cookie: 5, times: 2 }]);
    assert_eq!(pmis.read().unwrap().value, 1);
}

/// A tick adjusts 64 of the events with frequencies, and the next tick the following ones, so none
/// of many events keeps its initial period.
#[test]
fn many_frequencies_are_adjusted() {
    const EVENTS: u64 = 100;
    let m = TestCore::with(1, |c| c.tick_hz = 1000);
    let v = m.vcpu(0);
    let attr = Attr {
        freq: true,
        ..Attr::sampling(EventType::VMM, SoftwareEventId::Exits as u64, 1000)
    };
    let open = |cookie| {
        let flags = OpenFlags {
            cookie: Some(cookie),
            ..OpenFlags::default()
        };
        let target = OpenTarget::Vcpu(VcpuId(0));
        m.core.open(&m.admin, attr.clone(), target, None, flags).unwrap()
    };
    let _events: Vec<_> = (0..EVENTS).map(open).collect();
    let mut overflows = vec![0u32; EVENTS as usize];
    let mut run = |ms: u32, counts: u64| {
        overflows.fill(0);
        for _ in 0..ms {
            m.clock.advance(1_000_000);
            v.software_event(
                SoftwareEventId::Exits,
                counts,
                Some(&mut UnavailableRegs),
                &mut |o: OverflowReport| {
                    overflows[o.cookie as usize] += o.times;
                },
            );
            m.core.tick();
        }
        overflows.clone()
    };
    run(1000, 100_000);
    let busy = run(1000, 100_000);
    assert!(
        busy.iter().all(|n| (500..=2000).contains(n)),
        "a thousand in a second: {busy:?}"
    );
    // Periods of a hundred thousand counts, and ten counts per tick from now on.
    let calm = run(1000, 10);
    assert!(calm.iter().all(|n| *n > 0), "some wait for ever: {calm:?}");
}
