//! Tests of software events that the VMM raises.

use perf_core::*;

use crate::common::test_core::*;

fn exits() -> Attr {
    vmm(SoftwareEventId::Exits)
}

/// Returns the attributes of an event that counts VM exits and overflows at every `period`th exit.
fn every(period: u64) -> Attr {
    Attr {
        sample_period: period,
        ..exits()
    }
}

/// Simulated vCPU registers that raise a `Halts` event at level `level` when they are read.
struct NestedRaise<'a> {
    v: &'a VcpuEventContext,
    level: RecursionContext,
    delivered: Option<bool>,
}

impl<'a> NestedRaise<'a> {
    fn new(v: &'a VcpuEventContext, level: RecursionContext) -> Self {
        let delivered = None;
        Self { v, level, delivered }
    }
}

impl SampleRegs for NestedRaise<'_> {
    fn mode(&mut self) -> CpuMode {
        let halt = SoftwareEventId::Halts;
        self.delivered = Some(self.v.software_event_at(self.level, halt, 1, None, &mut |_| {}));
        CpuMode::GuestKernel
    }
    fn ip(&mut self) -> u64 {
        0
    }
}

#[test]
fn only_matching_events_count() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let all = m.open_vcpu(exits(), None);
    let excluding = |exclude_user, exclude_kernel| Attr {
        exclude_user,
        exclude_kernel,
        ..exits()
    };
    let user = m.open_vcpu(excluding(false, true), None);
    let kernel = m.open_vcpu(excluding(true, false), None);
    let off = m.open_vcpu(exits().with_disabled(), None);
    let halts = m.open_vcpu(vmm(SoftwareEventId::Halts), None);
    raise(&v, 3); // the registers say CPL0
    v.software_event(SoftwareEventId::Exits, 2, None, &mut |_| {});
    let counts = [&all, &user, &kernel, &off, &halts].map(|e| e.read().unwrap().value);
    assert_eq!(counts, [5, 2, 5, 0, 0]);
}

/// An event that is raised while its thread handles another one is dropped, and the call returns
/// `false`. If no open event counts the raised event, the call returns `true`.
#[test]
fn event_without_counter_is_not_dropped() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let _exits = m.open_vcpu(exits(), None);
    let nested = || {
        let mut regs = NestedRaise::new(&v, RecursionContext::Thread);
        v.software_event(SoftwareEventId::Exits, 1, Some(&mut regs), &mut |_| {});
        regs.delivered
    };
    assert_eq!(nested(), Some(true));
    let halts = m.open_vcpu(vmm(SoftwareEventId::Halts), None);
    assert_eq!(nested(), Some(false));
    assert_eq!(halts.read().unwrap().value, 0);
}

/// An event with an overflow limit that counts raised events is disabled after exactly the
/// requested number of reports. This holds with and without registers, and for one burst or
/// several.
#[test]
fn refresh_limits_raised_event_with_cookie() {
    for (bursts, with_regs) in [(10, false), (10, true), (1, false), (1, true)] {
        let m = TestCore::new(1);
        let v = m.vcpu(0);
        let e = m.open_reporting(&m.admin, every(1).with_disabled(), 4);
        e.refresh(2).unwrap();
        let mut times = 0;
        for _ in 0..bursts {
            let mut regs = UnavailableRegs;
            let regs = with_regs.then_some(&mut regs as &mut dyn SampleRegs);
            v.software_event(SoftwareEventId::Exits, 10 / bursts, regs, &mut |o| {
                times += o.times
            });
        }
        assert_eq!((times, e.state()), (2, EventState::Off), "{bursts} bursts");
        assert!(e.poll().contains(PollState::HUP));
    }
}

/// The largest burst of raised events on a guest's counter is counted in full and overflows. This
/// takes no longer than a small burst, because a guest's counter has no samples.
#[test]
fn largest_burst_of_guest_counter_overflows_once() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let e = m.open_reporting(&m.guest, every(1000).with_pinned(), 4);
    let mut reports = 0;
    let mut count = |o: OverflowReport| reports += u32::from(o.times > 0);
    v.software_event(
        SoftwareEventId::Exits,
        u64::MAX,
        Some(&mut UnavailableRegs),
        &mut count,
    );
    assert!(reports > 0);
    assert_eq!(e.read().unwrap().value, u64::MAX);
}

/// After some events that count raised events are closed, in any order, the remaining ones continue
/// to count.
#[test]
fn closed_raised_events_leave_the_others_counting() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let mut events: Vec<_> = (0..20).map(|_| Some(m.open_vcpu(exits(), None))).collect();
    for (round, closed) in [7, 0, 19, 3, 18, 1].into_iter().enumerate() {
        events[closed] = None;
        raise(&v, 1);
        let counts = events.iter().flatten().map(|e| e.read().unwrap().value);
        assert_eq!(counts.collect::<Vec<_>>(), vec![round as u64 + 1; 19 - round]);
    }
}

#[test]
fn vm_context_counts_before_vcpu_context() {
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let open = |target, cookie| {
        let flags = OpenFlags::with_cookie(cookie);
        m.core.open(&m.admin, every(1), target, None, flags).unwrap()
    };
    let _vcpu = open(V0, 2);
    let _vm = open(EventOpenTarget::Vm, 1);
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
    for target in [EventOpenTarget::Vm, V0] {
        let attr = Attr::counting(EventType::VMM, SoftwareEventId::ALL.len() as u64);
        let error = m.try_open(&m.admin, attr, target, None).unwrap_err();
        assert_eq!(error.errno(), libc::EINVAL);
    }
    for (i, id) in SoftwareEventId::ALL.iter().copied().enumerate() {
        assert_eq!(id as usize, i);
        assert_eq!(SoftwareEventId::from_config(i as u64), Some(id));
    }
}

/// If the handling of a raised event raises another event, that event is dropped if it has the same
/// level and delivered if it has a different one. Afterwards events of all levels can be raised
/// again.
#[test]
fn p24_an_event_inside_its_own_level_is_dropped_and_others_nest() {
    use RecursionContext::{Deferred, Nmi, Signal, Thread};
    let m = TestCore::new(1);
    let v = m.vcpu(0);
    let sampled = m.open_vcpu(every(1).with_sample_type(SampleType::IP), None);
    let _ring = sampled.map(1, true).unwrap();
    let halts = m.open_vcpu(vmm(SoftwareEventId::Halts), None);
    let mut count = 0;
    for outer in [Thread, Deferred, Signal, Nmi] {
        for level in [Thread, Deferred, Signal, Nmi] {
            let mut regs = NestedRaise::new(&v, level);
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
    let _c = m.open_reporting(&m.guest, every(2).with_pinned(), 5);
    let pmis = m.open_vcpu(vmm(SoftwareEventId::Pmis), None);
    let mut seen = Vec::new();
    v.software_event(SoftwareEventId::Exits, 5, None, &mut |o| {
        v.software_event(SoftwareEventId::Pmis, 1, None, &mut |_| {});
        seen.push(o);
    });
    assert_eq!(seen, [OverflowReport { cookie: 5, times: 2 }]);
    assert_eq!(pmis.read().unwrap().value, 1);
}

/// A tick adjusts the periods of at most 64 frequency-based events, and the next tick continues
/// with the following events. All periods are adjusted eventually.
#[test]
fn many_frequencies_are_adjusted() {
    const EVENTS: u64 = 100;
    let m = TestCore::with(1, |c| c.tick_hz = 1000);
    let v = m.vcpu(0);
    let open = |cookie| m.open_reporting(&m.admin, every(1000).with_freq(), cookie);
    let _events: Vec<_> = (0..EVENTS).map(open).collect();
    let mut overflows = vec![0u32; EVENTS as usize];
    let mut run = |ms: u32, counts: u64| {
        overflows.fill(0);
        for _ in 0..ms {
            m.clock.advance(1_000_000);
            let mut add = |o: OverflowReport| overflows[o.cookie as usize] += o.times;
            v.software_event(
                SoftwareEventId::Exits,
                counts,
                Some(&mut UnavailableRegs),
                &mut add,
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
    // The periods are a hundred thousand counts by now. From here on each event counts only ten per
    // tick.
    let calm = run(1000, 10);
    assert!(calm.iter().all(|n| *n > 0), "some wait for ever: {calm:?}");
}
