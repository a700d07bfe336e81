//! Tests that registers are read and stacks are unwound without holding a lock of the core, and
//! only once for events that overflow at the same time.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use perf_core::ring::Ring;
use perf_core::*;

use crate::common::test_core::*;

/// Returns sample types that include the fields read from registers, and the period field.
fn regs_sample_type() -> SampleType {
    SampleType::IP | SampleType::ADDR | SampleType::CALLCHAIN | SampleType::RAW | SampleType::PERIOD
}

fn sampling(ty: EventType, config: u64, period: u64) -> Attr {
    Attr::sampling(ty, config, period).with_sample_type(regs_sample_type())
}

/// Simulated vCPU registers that are slow to read. `during` is called while they are read. Counts
/// the reads.
struct SlowRegs<'a> {
    during: &'a mut dyn FnMut(),
    looks: [u32; 4],
}

impl<'a> SlowRegs<'a> {
    fn new(during: &'a mut dyn FnMut()) -> Self {
        let looks = [0; 4];
        Self { during, looks }
    }

    fn look(&mut self, at: usize) {
        self.looks[at] += 1;
        (self.during)();
    }
}

impl SampleRegs for SlowRegs<'_> {
    fn mode(&mut self) -> CpuMode {
        self.look(0);
        CpuMode::GuestUser
    }
    fn ip(&mut self) -> u64 {
        self.look(1);
        0x1234
    }
    fn addr(&mut self) -> u64 {
        self.look(2);
        0x5678
    }
    fn callchain(&mut self, out: &mut [u64]) -> usize {
        self.look(3);
        out[..3].copy_from_slice(&[1, 2, 3]);
        3
    }
    fn raw(&mut self) -> &[u8] {
        (self.during)();
        b"raw!"
    }
}

/// Fields of one sample: instruction pointer, address, call chain, raw data and period.
type SampleFields = (u64, u64, Vec<u64>, Vec<u8>, u64);

fn samples(ring: &Arc<Ring>) -> Vec<SampleFields> {
    let attr = sampling(EventType::SIM, 1, 1);
    map_samples(ring, &attr, |s| {
        let callchain = s.callchain.iter().collect();
        (s.ip, s.addr, callchain, s.raw.to_vec(), s.period)
    })
}

fn sample(period: u64) -> SampleFields {
    (0x1234, 0x5678, vec![1, 2, 3], b"raw!".to_vec(), period)
}

/// While registers are read and the stack is unwound, another thread can read and enable the event
/// and perform a tick without waiting.
#[test]
fn context_lock_is_free_during_stack_unwinding() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let driven = m.open_vcpu(sampling(EventType::SIM, 1, 10), None);
    let raised = m.open_vcpu(sampling(EventType::VMM, SoftwareEventId::Exits as u64, 5), None);
    let vm_wide = m.open_vm(sampling(EventType::VMM, SoftwareEventId::Halts as u64, 5));
    let rings = [&driven, &raised, &vm_wide].map(|e| e.map(4, true).unwrap());
    let (ask, asked) = mpsc::channel::<()>();
    let (answer, answered) = mpsc::channel();
    let (mut looks, mut free) = (0, 0);
    thread::scope(|scope| {
        let (core, events) = (&m.core, [&driven, &raised, &vm_wide]);
        scope.spawn(move || {
            while asked.recv().is_ok() {
                for event in events {
                    event.read().unwrap();
                    event.enable(EventOrGroup::Event).unwrap();
                }
                core.tick();
                answer.send(()).unwrap();
            }
        });
        let mut during = || {
            looks += 1;
            ask.send(()).unwrap();
            // Times out if the other thread has to wait for a lock.
            free += u32::from(answered.recv_timeout(Duration::from_secs(300)).is_ok());
            assert_eq!(looks, free, "a lock is held while registers are read");
        };
        m.run(0, 10);
        let served = v.service_overflows(&mut SlowRegs::new(&mut during), &mut |_| {});
        assert_eq!(served, 1);
        for id in [SoftwareEventId::Exits, SoftwareEventId::Halts] {
            v.software_event(id, 5, Some(&mut SlowRegs::new(&mut during)), &mut |_| {});
        }
        drop(ask);
    });
    assert!(looks >= 15, "{looks} looks: five for each of three moments");
    assert_eq!(samples(&rings[0]), [sample(10)]);
    for ring in &rings[1..] {
        assert_eq!(samples(ring), [sample(5)]);
    }
}

/// If several events overflow at the same moment, each event has a sample, but the stack is unwound
/// only once. Registers are not read unless a sample requests them.
#[test]
fn registers_are_read_once_per_moment_and_on_request_only() {
    let m = TestCore::new(8);
    let v = m.vcpu(0);
    // Opens more events than one pass of the overflow service handles.
    let events: Vec<_> = (0..20)
        .map(|_| m.open_vcpu(sampling(SOFT, 1, 10), None))
        .collect();
    let rings: Vec<_> = events.iter().map(|e| e.map(1, true).unwrap()).collect();
    m.run(0, 30);
    let mut nothing = || {};
    let mut regs = SlowRegs::new(&mut nothing);
    assert_eq!(v.service_overflows(&mut regs, &mut |_| {}), 20);
    assert_eq!(regs.looks, [1, 1, 1, 1]);
    for ring in &rings {
        assert_eq!(samples(ring), [sample(30)]);
    }
    drop(events);
    let _counter = m.open_reporting(&m.guest, sim(10).with_pinned(), 1);
    m.run(0, 10);
    let mut regs = SlowRegs::new(&mut nothing);
    let mut seen = 0;
    assert_eq!(v.service_overflows(&mut regs, &mut |o| seen += o.times), 1);
    // The overflow of a guest's counter is reported without reading registers.
    assert_eq!((seen, regs.looks), (1, [0; 4]));
}

/// Changes to an event that are made while registers are read for its sample take effect: a closed
/// event has no sample, a disabled event has a sample of the counts before it was disabled, and no
/// sample follows EXIT.
#[test]
fn event_changes_during_register_reads_take_effect() {
    for what in ["close", "disable", "remove"] {
        let m = TestCore::new(4);
        let v = m.vcpu(0);
        let event = m.open_vcpu(sampling(EventType::SIM, 1, 10), None);
        let ring = event.map(4, true).unwrap();
        m.run(0, 10);
        let mut during = || match what {
            "close" => event.close(),
            "disable" => event.disable(EventOrGroup::Event).unwrap(),
            _ => drop(m.core.remove_vcpu(VcpuId(0))),
        };
        let served = v.service_overflows(&mut SlowRegs::new(&mut during), &mut |_| {});
        let expected = if what == "disable" {
            vec![sample(10)]
        } else {
            Vec::new()
        };
        assert_eq!(samples(&ring), expected, "{what}");
        assert_eq!(served, u32::from(what == "disable"), "{what}");
        // The key of a closed event may refer to another event. No overflow is reported for that
        // event.
        let next = m.core.add_vcpu(VcpuId(9), 1).unwrap();
        assert_eq!(next.service_overflows(&mut UnavailableRegs, &mut |_| {}), 0);
    }
}
