//! Tests of groups of the `host` driver, for which the driver uses groups of the kernel. Starting
//! or stopping a group takes one system call, counted with ptrace. The counts are correct for any
//! sequence of operations on the members.

use std::sync::Arc;

use perf_core::pmu::host::HostPmu;
use perf_core::record::{DecodedRecord, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::*;

use crate::common::memory::FreshPages;
use crate::common::thread::{catch_signals, this_tid};
use crate::{calls, must};

const PAGE_FAULTS: u64 = 2;
/// Value of `config` for minor page faults, which read nothing from disk. All page faults in these
/// tests are minor.
const MINOR_FAULTS: u64 = 5;
const PAGES: usize = 20_000;

/// The calling thread as a vCPU with a group of events that count its page faults, and untouched
/// memory whose first access causes page faults.
struct GroupFixture {
    core: PerfCore,
    session: Session,
    vcpu: Arc<VcpuEventContext>,
    group: Vec<EventHandle>,
    fresh: FreshPages,
}

impl GroupFixture {
    fn new(events: usize) -> Self {
        let mut scene = Self::empty(None);
        for _ in 0..events {
            scene.join();
        }
        scene.vcpu.sched_in();
        scene
    }

    /// Creates a scheduled-out vCPU without events. `signal` is the overflow signal.
    fn empty(signal: Option<i32>) -> Self {
        let core = PerfCore::new(PerfCoreConfig::default());
        core.register(Arc::new(HostPmu::software(signal)));
        let vcpu = core.add_vcpu(VcpuId(0), this_tid()).unwrap();
        let session = core.session(0, SessionRole::Admin);
        Self {
            core,
            session,
            vcpu,
            group: Vec::new(),
            fresh: FreshPages::new(PAGES),
        }
    }

    /// Adds one event to the group. The first event becomes the leader.
    fn join(&mut self) {
        self.join_as(Attr::counting(EventType::SOFTWARE, PAGE_FAULTS));
    }

    fn join_as(&mut self, attr: Attr) {
        let target = EventOpenTarget::Vcpu(VcpuId(0));
        let (leader, flags) = (self.group.first(), OpenFlags::default());
        let opened = self.core.open(&self.session, attr, target, leader, flags);
        self.group.push(opened.unwrap());
    }

    /// Takes `n` page faults on this thread, without a system call.
    fn fault(&mut self, n: usize) {
        self.fresh.fault(n);
    }

    /// Returns `true` if each event counts 100 page faults that this thread takes.
    fn all_count(&mut self) -> bool {
        self.growth(100).iter().all(|g| *g >= 100)
    }

    fn set_enabled(&self, event: usize, on: bool) {
        let event = &self.group[event];
        let done = if on {
            event.enable(EventOrGroup::Event)
        } else {
            event.disable(EventOrGroup::Event)
        };
        done.unwrap();
    }

    fn counts(&self) -> Vec<u64> {
        self.group.iter().map(|e| e.read().unwrap().value).collect()
    }

    /// Takes `n` page faults and returns the increase of each event's count, which may include
    /// other page faults.
    fn growth(&mut self, n: usize) -> Vec<u64> {
        let before = self.counts();
        self.fault(n);
        let after = self.counts();
        after.iter().zip(before).map(|(a, b)| a - b).collect()
    }
}

/// When a group stops at the end of a multiplexing interval and starts again later, this takes
/// three system calls: one disables a member and thereby the whole group, one reads all counts, and
/// one enables the group.
#[test]
fn turn_takes_one_disable_one_read_and_one_enable() {
    for members in [2, 4, 12] {
        let calls = calls(
            || GroupFixture::new(members),
            |scene| {
                must(scene.group[0].disable(EventOrGroup::Event).is_ok());
                for event in &scene.group {
                    must(event.read().is_ok());
                }
                must(scene.group[0].enable(EventOrGroup::Event).is_ok());
            },
        );
        assert_eq!(
            calls,
            [libc::SYS_ioctl, libc::SYS_read, libc::SYS_ioctl].map(|call| call as u64),
            "{members} members"
        );
    }
}

/// Scheduling the vCPU out and in takes one system call each, regardless of the number of events.
#[test]
fn vcpu_sched_out_and_in_take_one_call_each() {
    let calls = calls(
        || GroupFixture::new(6),
        |scene| {
            scene.vcpu.sched_out();
            scene.vcpu.sched_in();
        },
    );
    assert_eq!(calls, [libc::SYS_ioctl as u64, libc::SYS_ioctl as u64]);
}

/// All members of a group have equal counts after the group was disabled and enabled repeatedly.
#[test]
fn group_members_have_equal_counts() {
    let mut scene = GroupFixture::new(5);
    scene.fault(100);
    for _ in 0..10 {
        scene.set_enabled(0, false);
        scene.fault(50);
        scene.set_enabled(0, true);
        scene.fault(20);
    }
    scene.set_enabled(0, false);
    let counts = scene.counts();
    assert!(
        counts[0] >= 300 && counts.iter().all(|c| *c == counts[0]),
        "{counts:?}"
    );
}

/// All members count for the same time, for any sequence of scheduling the group in and out and for
/// any types of members.
#[test]
fn members_do_not_drift_apart_over_random_turns() {
    let mut rng = fastrand::Rng::with_seed(11);
    let mut scene = GroupFixture::empty(None);
    for config in [PAGE_FAULTS, MINOR_FAULTS, PAGE_FAULTS, MINOR_FAULTS, MINOR_FAULTS] {
        scene.join_as(Attr::counting(EventType::SOFTWARE, config));
    }
    let (mut inside, mut on, mut counted) = (false, true, 0);
    for _ in 0..400 {
        match rng.u8(..4) {
            0 => {
                if inside {
                    scene.vcpu.sched_out();
                } else {
                    scene.vcpu.sched_in();
                }
                inside = !inside;
            }
            1 => {
                on = !on;
                scene.set_enabled(0, on);
            }
            2 => {
                scene.group[rng.usize(..5)].read().unwrap();
            }
            _ => {
                let faults = rng.usize(..40);
                scene.fault(faults);
                counted += if inside && on { faults as u64 } else { 0 };
            }
        }
    }
    scene.vcpu.sched_out();
    let counts = scene.counts();
    assert!(counted > 300, "{counted} faults");
    assert!(counts.iter().all(|c| *c == counts[0]), "{counts:?}");
    assert!(
        (counted..counted + 500).contains(&counts[0]),
        "{counts:?} of {counted}"
    );
}

/// A member that joins a running group counts immediately, regardless of the leader's type, and
/// also after a change of its period. Without special handling, the kernel starts a page fault
/// counter in a group with a clock as leader only when the thread is next scheduled.
#[test]
fn member_joining_running_group_counts_immediately() {
    const TASK_CLOCK: u64 = 1;
    for (round, config) in [TASK_CLOCK, PAGE_FAULTS].iter().cycle().take(20).enumerate() {
        let mut scene = GroupFixture::empty(Some(catch_signals()));
        scene.vcpu.sched_in();
        scene.join_as(Attr::counting(EventType::SOFTWARE, *config));
        scene.join();
        scene.join_as(Attr::sampling(EventType::SOFTWARE, PAGE_FAULTS, 1_000));
        let growth = scene.growth(50);
        assert!(
            growth[1] >= 50 && growth[2] >= 50,
            "round {round}, leader {config}: {growth:?}"
        );
        scene.group[2].set_period(2_000).unwrap();
        let growth = scene.growth(50);
        assert!(
            growth[1] >= 50 && growth[2] >= 50,
            "round {round}, leader {config}, after a change: {growth:?}"
        );
        scene.set_enabled(1, false);
        scene.set_enabled(1, true);
        assert!(
            scene.growth(50)[1] >= 50,
            "round {round}, leader {config}: on again"
        );
    }
}

/// A sampling member belongs to the kernel group. Its count equals those of all other members, and
/// the periods of its samples add up to this count, even if the group or the vCPU is scheduled out
/// and in. The same holds for a sampling leader.
#[test]
fn sampling_member_samples_and_counts_with_its_group() {
    for place in 0..3 {
        let mut scene = GroupFixture::empty(Some(catch_signals()));
        let sampling =
            Attr::sampling(EventType::SOFTWARE, PAGE_FAULTS, 7).with_sample_type(SampleType::PERIOD);
        for n in 0..3 {
            if n == place {
                scene.join_as(sampling.clone());
            } else {
                scene.join();
            }
        }
        let ring = scene.group[place].map(64, true).unwrap();
        scene.vcpu.sched_in();
        let serve = |scene: &GroupFixture| scene.vcpu.service_overflows(&mut UnavailableRegs, &mut |_| {});
        let rounds = |scene: &mut GroupFixture| {
            for round in 0..12 {
                for _ in 0..5 {
                    scene.fault(10);
                    serve(scene);
                }
                match round % 3 {
                    0 => {
                        scene.set_enabled(0, false);
                        scene.fault(30);
                        scene.set_enabled(0, true);
                    }
                    1 => {
                        scene.vcpu.sched_out();
                        scene.fault(30);
                        scene.vcpu.sched_in();
                    }
                    _ => {}
                }
            }
        };
        // A warm-up round touches all memory that the measurement uses.
        rounds(&mut scene);
        scene.vcpu.sched_out();
        let before = scene.counts();
        scene.vcpu.sched_in();
        rounds(&mut scene);
        scene.vcpu.sched_out();
        serve(&scene);
        let counts = scene.counts();
        let growth: Vec<_> = counts.iter().zip(&before).map(|(a, b)| a - b).collect();
        assert!(
            growth[0] >= 600 && growth.iter().all(|g| *g == growth[0]),
            "the event at {place} samples: {growth:?}"
        );

        let (mut reader, mut samples, mut stood_for) = (RingReader::of(ring), 0, 0);
        while let Some(raw) = reader.next_record().unwrap() {
            let DecodedRecord::Sample(sample) =
                DecodedRecord::decode(raw, RecordFormat::from(&sampling)).unwrap()
            else {
                panic!("only samples are expected");
            };
            samples += 1;
            stood_for += sample.period;
        }
        // Ten faults cause one or two overflows. Two overflows are noticed together as one sample.
        assert!(samples >= 100, "{samples} samples");
        let counted = counts[place];
        assert!(
            stood_for <= counted && counted - stood_for < 7,
            "{stood_for} of {counted} in {samples} samples"
        );
    }
}

#[test]
fn member_that_is_off_stays_off_while_the_others_take_turns() {
    let mut scene = GroupFixture::new(4);
    scene.set_enabled(2, false);
    let growth = scene.growth(100);
    assert!(
        growth[2] == 0 && growth[3] >= 100 && growth[0] >= 100,
        "{growth:?}"
    );
    scene.set_enabled(0, false);
    assert_eq!(scene.growth(100), [0; 4]);
    scene.set_enabled(0, true);
    let growth = scene.growth(100);
    assert!(growth[2] == 0 && growth[3] >= 100, "{growth:?}");
    // Re-enables the stopped member while its group is disabled.
    scene.set_enabled(0, false);
    scene.set_enabled(2, true);
    assert_eq!(scene.growth(100), [0; 4]);
    scene.set_enabled(0, true);
    assert!(scene.all_count());
}

/// After the leader is closed, the remaining siblings count separately and keep their counts.
#[test]
fn siblings_outlive_their_leader() {
    for running in [true, false] {
        let mut scene = GroupFixture::new(4);
        scene.fault(100);
        if !running {
            scene.vcpu.sched_out();
        }
        let before = scene.counts();
        drop(scene.group.remove(0));
        if !running {
            scene.fault(1_000);
            scene.vcpu.sched_in();
        }
        let after = scene.counts();
        assert!(
            after
                .iter()
                .zip(&before[1..])
                .all(|(a, b)| (*b..b + 500).contains(a)),
            "{before:?} {after:?}"
        );
        assert!(scene.growth(100).iter().all(|g| (100..500).contains(g)));
        // The former siblings count independently of the event that is disabled here.
        scene.set_enabled(0, false);
        let growth = scene.growth(100);
        assert!(
            growth[0] == 0 && growth[1] >= 100 && growth[2] >= 100,
            "{growth:?}"
        );
    }
}

/// A group remains readable after its siblings are closed, including the member through which the
/// group is read.
#[test]
fn group_outlives_its_siblings() {
    let mut scene = GroupFixture::new(4);
    while scene.group.len() > 1 {
        drop(scene.group.remove(1));
        assert!(scene.all_count());
        scene.set_enabled(0, false);
        assert!(scene.growth(100).iter().all(|g| *g == 0));
        scene.set_enabled(0, true);
    }
    scene.join();
    assert!(scene.all_count());
}

/// Events that exceed the size limit of a kernel group are opened alone, but remain members of the
/// core's group.
#[test]
fn members_beyond_kernel_group_limit_are_opened_alone() {
    let mut scene = GroupFixture::new(24);
    assert!(scene.all_count());
    scene.set_enabled(0, false);
    assert!(scene.growth(100).iter().all(|g| *g == 0));
    scene.set_enabled(0, true);
    assert!(scene.all_count());
}
