//! Tests of races with other threads while an event is opened or a vCPU is removed. No record of an
//! event is missing, and no record follows the EXIT record of a vCPU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use perf_core::record::DecodedRecord;
use perf_core::ring::RingReader;
use perf_core::time::Clock;
use perf_core::*;

use crate::common::test_core::*;

fn raised() -> Attr {
    Attr::sampling(EventType::VMM, SoftwareEventId::Exits as u64, 1)
        .with_sample_type(SampleType::TID | SampleType::ID)
}

/// An event that is opened with another event's ring as output uses that ring from its first count
/// on.
#[test]
fn event_opened_with_the_output_flag_has_a_sample_for_each_count() {
    let m = TestCore::with(1, |c| c.sample_rate_hz = 1 << 40);
    let v = m.vcpu(0);
    let attr = raised();
    let target = m.open_vcpu(hw(), None);
    let ring = target.map(256, true).unwrap();
    let mut reader = RingReader::map(ring.memfd()).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                raise(&v, 1);
            }
        });
        // Repeats until 300 events were opened while the other thread raised the event.
        let mut met = 0;
        while met < 300 {
            let e = m.open_redirected(attr.clone(), &target).unwrap();
            e.disable(EventOrGroup::Event).unwrap();
            let count = e.read().unwrap().value;
            let (mut samples, mut lost) = (0, 0);
            for_each_record(&mut reader, &attr, |record| match record {
                DecodedRecord::Sample(s) if s.id == e.id() => samples += 1,
                DecodedRecord::Lost(l) => lost += l.lost,
                _ => {}
            });
            if lost > 0 || count > 1000 {
                // Skips this event, because the ring may have been full while this thread was
                // descheduled.
                continue;
            }
            if samples != count {
                stop.store(true, Ordering::Relaxed);
            }
            assert_eq!(samples, count, "after {met} that were right");
            met += u32::from(count > 0);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

type Hook = Box<dyn FnOnce() + Send>;

/// A clock that calls a function (a hook) when it is read the next time.
#[derive(Default)]
struct HookedClock(Mutex<Option<Hook>>);

impl Clock for HookedClock {
    fn now_ns(&self) -> u64 {
        let hook = self.0.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        1
    }
}

/// If a vCPU is removed while an event is raised on it, the EXIT record is the last record of that
/// vCPU in a VM-wide ring.
#[test]
fn no_sample_of_a_vcpu_follows_its_exit() {
    let clock = Arc::new(HookedClock::default());
    let m = Arc::new(TestCore::with(1, |c| c.clock = clock.clone()));
    let v = m.vcpu(0);
    let attr = Attr {
        task: true,
        ..raised()
    };
    let e = m.open_vm(attr.clone());
    let ring = e.map(8, true).unwrap();
    raise(&v, 1);
    // Removes the vCPU at a clock read that follows the check for the vCPU and precedes the
    // acquisition of the VM context lock.
    let other = Arc::clone(&m);
    *clock.0.lock().unwrap() = Some(Box::new(move || other.core.remove_vcpu(VcpuId(0)).unwrap()));
    raise(&v, 1);
    assert!(clock.0.lock().unwrap().is_none(), "the vCPU went meanwhile");
    let mut kinds = Vec::new();
    let mut reader = RingReader::map(ring.memfd()).unwrap();
    for_each_record(&mut reader, &attr, |record| {
        kinds.push(match record {
            DecodedRecord::Sample(_) => "sample",
            DecodedRecord::Exit(_) => "exit",
            _ => "other",
        });
    });
    let samples = kinds.iter().filter(|kind| **kind == "sample").count();
    assert_eq!(samples, 1, "{kinds:?}");
    assert_eq!(kinds.last(), Some(&"exit"), "{kinds:?}");
}
