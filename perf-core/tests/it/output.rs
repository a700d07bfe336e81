//! Tests of rings that are attached to events: samples, side-band records, redirection,
//! notification and memory limits.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use perf_core::record::DecodedRecord;
use perf_core::ring::{ControlPageCounter, Ring, RingFullPolicy, RingReader};
use perf_core::*;
use proptest::prelude::*;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::common::test_core::*;

struct Regs;

impl SampleRegs for Regs {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestUser
    }
    fn ip(&mut self) -> u64 {
        0xabc
    }
    fn callchain(&mut self, out: &mut [u64]) -> usize {
        out[..2].copy_from_slice(&[1, 2]);
        2
    }
    fn addr(&mut self) -> u64 {
        0xadd
    }
    fn raw(&mut self) -> &[u8] {
        b"raw!"
    }
}

/// Returns the unread records of `ring` as text.
fn records(ring: &Ring, attr: &Attr) -> Vec<String> {
    let mut out = Vec::new();
    for_each_record(&mut RingReader::map(ring.memfd()).unwrap(), attr, |record| {
        out.push(match record {DecodedRecord::Sample(s) => format!(
                "sample {:?} ip={:x} pid={} tid={} t={} addr={:x} cpu={} period={} chain={:?} raw={:?} read={:?}",
                s.misc.cpu_mode(),
                s.ip,
                s.pid,
                s.tid,
                s.time_ns,
                s.addr,
                s.cpu,
                s.period,
                s.callchain.iter().collect::<Vec<_>>(),
                s.raw,
                s.read.entries.iter().map(|e| e.value).collect::<Vec<_>>()
            ),
            DecodedRecord::Throttle(t) | DecodedRecord::Unthrottle(t) => format!("throttled={}", t.throttled),
            DecodedRecord::Fork(t) => format!("fork {}", t.tid),
            DecodedRecord::Exit(t) => format!("exit {}", t.tid),
            DecodedRecord::Comm(c) => format!("comm {} {}", c.tid, String::from_utf8_lossy(c.name)),
            DecodedRecord::Mmap(m) => format!("mmap {:x}+{:x}", m.start, m.len),
            DecodedRecord::Read(r) => format!(
                "read {} {:?}",
                r.tid,
                r.values.entries.iter().map(|e| e.value).collect::<Vec<_>>()
            ),
            DecodedRecord::Lost(l) => format!("lost {}", l.lost),
                        other => format!("{other:?}"),
        });
    });
    out
}

/// Returns the record type, the first word, of each text in `records`.
fn kinds(records: &[String]) -> Vec<&str> {
    records.iter().map(|r| r.split(' ').next().unwrap()).collect()
}

fn sampling(period: u64) -> Attr {
    sim(period).with_sample_type(SampleType::IP | SampleType::TID)
}

fn overflow(m: &TestCore, v: &VcpuEventContext, n: u64) {
    m.run(v.id().0, n);
    v.service_overflows(&mut Regs, &mut |_| {});
}

#[test]
fn sample_contains_the_requested_fields() {
    let m = TestCore::with(4, |c| c.pid = 77);
    let v = m.core.add_vcpu_recorded_as(VcpuId(3), 1003, 4003).unwrap();
    v.sched_in();
    let attr = sim(10)
        .with_sample_type(SampleType::all())
        .with_read_format(ReadFormat::GROUP | ReadFormat::ID);
    let e = m.open(attr.clone(), EventOpenTarget::Vcpu(VcpuId(3)), None);
    let _sibling = m.open(
        Attr { config: 2, ..hw() },
        EventOpenTarget::Vcpu(VcpuId(3)),
        Some(&e),
    );
    let ring = e.map(8, true).unwrap();
    overflow(&m, &v, 10);
    assert_eq!(
        records(&ring, &attr),
        [
            "sample GuestUser ip=abc pid=77 tid=4003 t=10 addr=add cpu=3 period=10 chain=[1, 2] raw=[114, 97, 119, 33] read=[10, 20]"
        ]
    );
    overflow(&m, &v, 30);
    // The three overflows are noticed together and have one sample, whose period covers all of
    // them.
    assert!(records(&ring, &attr).last().unwrap().contains("period=30"));
}

#[test]
fn children_write_to_their_parents_ring() {
    let m = TestCore::new(4);
    let v0 = m.vcpu(0);
    let attr = sampling(5)
        .with_inherit()
        .with_sample_type(SampleType::TID | SampleType::ID | SampleType::STREAM_ID);
    let e = m.open_vm(attr.clone());
    let ring = e.map(4, true).unwrap();
    let v1 = m.vcpu(1);
    overflow(&m, &v0, 5);
    overflow(&m, &v1, 5);
    let samples = map_samples(&ring, &attr, |s| (s.id, s.tid, s.stream_id));
    assert!(samples.iter().all(|(id, ..)| *id == e.id()));
    let (tids, mut own_ids): (Vec<_>, Vec<_>) = samples.iter().map(|s| (s.1, s.2)).unzip();
    assert_eq!(tids, [1000, 1001]);
    own_ids.extend([0, e.id()]);
    own_ids.sort_unstable();
    own_ids.dedup();
    assert_eq!(own_ids.len(), 4, "each child has an id of its own");
}

#[test]
fn p39_exit_comes_after_the_last_sample_and_reads_follow_it() {
    let m = TestCore::new(4);
    let attr = Attr {
        inherit: true,
        inherit_stat: true,
        task: true,
        comm: true,
        mmap: true,
        ..sampling(5)
    };
    let e = m.open_vm(attr.clone());
    let ring = e.map(8, true).unwrap();
    let v = m.vcpu(0);
    m.core.mmap_record(&GuestMmapEvent {
        start: 0x1000,
        len: 0x2000,
        pgoff: 0,
        name: b"/boot/vmlinux",
        kernel: true,
    });
    assert!(m.core.name_vcpu(VcpuId(0), "a name that is longer than fifteen"));
    overflow(&m, &v, 5);
    m.run(0, 2);
    m.core.remove_vcpu(VcpuId(0)).unwrap();
    v.service_overflows(&mut Regs, &mut |_| {});
    let seen = records(&ring, &attr);
    let expected = ["fork", "comm", "mmap", "comm", "sample", "exit", "read"];
    assert_eq!(kinds(&seen), expected, "{seen:?}");
    assert_eq!(seen[3], "comm 1000 a name that is ");
    assert_eq!(seen[6], "read 1000 [7]");
    e.disable(EventOrGroup::Event).unwrap();
    m.vcpu(1);
    assert_eq!(records(&ring, &attr).len(), 0, "a disabled event gets none");
}

/// An overflow that was not serviced before its vCPU was removed has no sample. A LOST record
/// before the EXIT record reports it, and the event keeps its counts.
#[test]
fn p39_an_overflow_not_served_when_a_vcpu_is_removed_is_lost() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let attr = Attr {
        task: true,
        ..sampling(5)
    };
    let event = m.open_vcpu(attr.clone(), None);
    let ring = event.map(4, true).unwrap();
    overflow(&m, &v, 5);
    m.run(0, 5);
    m.core.remove_vcpu(VcpuId(0)).unwrap();
    let served = v.service_overflows(&mut Regs, &mut |_| {});
    let seen = records(&ring, &attr);
    assert_eq!((served, kinds(&seen)), (0, vec!["sample", "lost", "exit"]));
    assert_eq!(event.read().unwrap().value, 10);
}

#[test]
fn p36_redirections_form_no_chains_and_can_be_undone() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let target = m.open_vcpu(sampling(1000), None);
    let source = m.open_vcpu(sampling(5), None);
    let third = m.open_vcpu(sampling(1000), None);
    let errno = |from: &EventHandle, to| from.set_output(Some(to)).unwrap_err().errno();
    assert_eq!(errno(&source, &source), libc::EINVAL, "not itself");
    source.set_output(Some(&target)).unwrap();
    assert_eq!(errno(&third, &source), libc::EINVAL, "the target is redirected");
    assert_eq!(errno(&target, &third), libc::EINVAL, "others write to it");
    let refused = source.map(1, true).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL, "redirected events have no ring");
    // An event may be the target of a redirection before its ring exists.
    let ring = target.map(1, true).unwrap();
    overflow(&m, &v, 5);
    assert_eq!(records(&ring, &sampling(5)).len(), 1);
    source.set_output(None).unwrap();
    overflow(&m, &v, 5);
    assert_eq!(records(&ring, &sampling(5)).len(), 0);
    assert_eq!(errno(&target, &third), libc::EINVAL, "it has a ring of its own");
    third.close();
    assert_eq!(errno(&source, &third), libc::EBADF);
    // Redirects the new event with the output flag. The ring is kept after its owner is closed,
    // because another event still writes to it.
    let late = m.open_redirected(sampling(5), &target).unwrap();
    drop(target);
    overflow(&m, &v, 5);
    assert_eq!(records(&ring, &sampling(5)).len(), 1);
    drop((late, ring));
    assert_eq!(m.core.ring_pages(0), 0);
}

/// An event that writes to the ring of another event continues to do so after the other event is
/// closed. The first event stays redirected: it cannot map its own ring, and no third event can be
/// redirected to it.
#[test]
fn p36_event_keeps_writing_to_ring_of_closed_event() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let target = m.open_vcpu(sampling(1000), None);
    let ring = target.map(1, true).unwrap();
    let source = m.open_vcpu(sampling(5), None);
    source.set_output(Some(&target)).unwrap();
    let third = m.open_vcpu(sampling(5), None);
    target.close();
    assert!(!target.unmap(), "closing has done that");
    // A redirected event cannot be a target.
    assert_eq!(third.set_output(Some(&source)).unwrap_err().errno(), libc::EINVAL);
    assert!(m.open_redirected(sampling(5), &source).is_err());
    assert_eq!(source.map(1, true).unwrap_err().errno(), libc::EINVAL);
    overflow(&m, &v, 5);
    assert_eq!(records(&ring, &sampling(5)).len(), 1);
    assert!(!source.poll().contains(PollState::HUP));
    // The ring is released when the last event is no longer redirected to it, although the closed
    // event still has a handle.
    drop(ring);
    assert_eq!(m.core.ring_pages(0), 2);
    source.set_output(None).unwrap();
    assert_eq!(m.core.ring_pages(0), 0);
    third.set_output(Some(&source)).unwrap();
    let ring = source.map(1, true).unwrap();
    source.close();
    overflow(&m, &v, 5);
    assert_eq!(records(&ring, &sampling(5)).len(), 1);
    drop(ring);
    third.close();
    assert_eq!(m.core.ring_pages(0), 0);
}

#[test]
fn p35_ring_memory_is_charged_and_refunded_exactly() {
    let m = TestCore::with(4, |c| {
        c.mlock_kb = 16;
        c.host_cpus = 2;
        c.memlock_kb = 4;
        c.owner_uid = 7;
    });
    let _v = m.vcpu(0);
    let user = m.core.session(7, SessionRole::Operator);
    let [a, b] = [(); 2].map(|()| m.try_open(&user, hw(), V0, None).unwrap());
    // The limit is 9 pages, including control pages: 4 pages for each of two CPUs, and one more.
    a.map(4, true).unwrap();
    assert_eq!(m.core.ring_pages(7), 5);
    a.map(4, true).unwrap();
    assert_eq!(m.core.ring_pages(7), 5, "mapped again is the same memory");
    let again = a.map(4, false).unwrap();
    assert_eq!(
        again.mode(),
        RingFullPolicy::Writable,
        "the first mapping decides"
    );
    assert!(a.unmap());
    for (event, pages, errno) in [
        (&a, 2, libc::EINVAL),
        (&b, 4, libc::EPERM),
        (&b, 3, libc::EINVAL),
        (&b, usize::MAX, libc::EPERM),
    ] {
        assert_eq!(event.map(pages, true).unwrap_err().errno(), errno, "{pages}");
    }
    assert_eq!(m.core.ring_pages(7), 5, "failed mappings leave nothing behind");
    b.map(2, true).unwrap();
    assert_eq!(m.core.ring_pages(7), 8);
    assert!(a.unmap() && a.unmap());
    assert!(!a.unmap());
    assert_eq!(m.core.ring_pages(7), 8, "somebody has it still");
    drop(again);
    assert_eq!(m.core.ring_pages(7), 3);
    drop(b);
    assert_eq!(m.core.ring_pages(7), 0);
    drop(a);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Behavior P35: the charged memory equals the mapped memory after any sequence of operations,
    /// including failed ones, and is zero at the end.
    #[test]
    fn p35_charged_memory_equals_mapped_memory(ops in prop::collection::vec((0usize..3, 0u8..4, 0usize..6), 1..60)) {
        let m = TestCore::with(1, |c| { c.mlock_kb = 32; c.host_cpus = 1; c.memlock_kb = 0; });
        let _v = m.vcpu(0);
        let user = m.core.session(0, SessionRole::Operator);
        let open = || m.try_open(&user, soft(), V0, None).unwrap();
        let mut events: Vec<_> = (0..3).map(|_| open()).collect();
        // Number of ring pages and number of mappings of each event.
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
}

/// With a limit of 8 pages, a second ring of 5 pages is rejected while the first ring is in use by
/// this process, by a client's copy of its file descriptor, or by a mapping that outlives that file
/// descriptor.
#[test]
fn ring_memory_is_charged_until_last_user_releases_it() {
    let m = TestCore::with(4, |c| {
        c.mlock_kb = 32;
        c.host_cpus = 1;
        c.memlock_kb = 0;
        c.owner_uid = 7;
    });
    let _v = m.vcpu(0);
    let user = m.core.session(7, SessionRole::Operator);
    let open = || m.try_open(&user, hw(), V0, None).unwrap();
    for writable in [true, false] {
        let refused = |why: &str| {
            assert_eq!(open().map(4, writable).unwrap_err().errno(), libc::EPERM, "{why}");
            assert_eq!(m.core.ring_pages(7), 5, "{why}");
        };
        let event = open();
        let ring = event.map(4, writable).unwrap();
        let client = ring.memfd().try_clone_to_owned().unwrap();
        assert!(event.unmap());
        drop(event);
        refused("this process has the ring");
        drop(ring);
        refused("a client has the descriptor");
        let reader = RingReader::map(client.as_fd()).unwrap();
        drop(client);
        refused("a client has it mapped");
        drop(reader);
        assert_eq!(m.core.ring_pages(7), 0);
        // A new request detects that the last client has released its memory, even if nothing else
        // checked this before.
        let second = open().map(4, writable).unwrap();
        let client = second.memfd().try_clone_to_owned().unwrap();
        drop(second);
        refused("the second one's client");
        drop(client);
        drop(open().map(4, writable).unwrap());
        assert_eq!(m.core.ring_pages(7), 0);
    }
}

#[test]
fn ring_of_the_control_page_alone_shows_count_and_times() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let e = m.open_vcpu(hw(), None);
    let ring = e.map(0, true).unwrap();
    m.run(0, 42);
    v.sched_out();
    let counter = || RingReader::map(ring.memfd()).unwrap().counter().unwrap();
    let expected = ControlPageCounter {
        index: 0,
        offset: 42,
        time_enabled_ns: 42,
        time_running_ns: 42,
    };
    assert_eq!(counter(), expected);
    e.reset(EventOrGroup::Event).unwrap();
    assert_eq!(counter().offset, 0);
}

/// Returns the attributes of a sampling event that wakes its reader at every `n`th sample.
fn waking_after(n: u32) -> Attr {
    Attr {
        wakeup: attr::WakeupCondition::Events(n),
        ..sampling(5)
    }
}

#[test]
fn poll_reports_hup_without_ring_and_in_with_samples() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let e = m.open_vcpu(waking_after(2), None);
    assert_eq!(e.poll(), PollState::HUP);
    let _ring = e.map(1, true).unwrap();
    overflow(&m, &v, 5);
    assert_eq!(e.poll(), PollState::empty(), "two samples wake");
    overflow(&m, &v, 5);
    assert_eq!(e.poll(), PollState::IN);
    assert_eq!(e.poll(), PollState::empty(), "taken once");
}

/// Returns `true` if the file descriptor is readable.
fn is_readable(fd: &OwnedFd) -> bool {
    let epoll = Epoll::new().unwrap();
    let event = EpollEvent::new(EventSet::IN, 0);
    epoll.ctl(ControlOperation::Add, fd.as_raw_fd(), event).unwrap();
    epoll.wait(0, &mut [EpollEvent::default()]).unwrap() > 0
}

/// The file descriptor for polling is a copy of the ring's, or of the event's if the event has no
/// ring. The copy stays valid after the event and the ring are closed.
#[test]
fn poll_descriptor_belongs_to_caller() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let e = m.open_vcpu(waking_after(1), None);
    let own = e.poll_fd().unwrap();
    assert!(!is_readable(&own));
    overflow(&m, &v, 5);
    assert!(is_readable(&own));
    assert_eq!(e.poll(), PollState::IN | PollState::HUP);
    assert!(!is_readable(&own), "taken once");
    let ring = e.map(1, true).unwrap();
    let of_ring = e.poll_fd().unwrap();
    overflow(&m, &v, 5);
    assert!(is_readable(&of_ring) && !is_readable(&own));
    drop((e, ring));
    // Opens more files, to check that they do not affect the caller's copies of the file
    // descriptors.
    let _others = [(); 8].map(|()| m.open_vcpu(sampling(5), None).map(1, true).unwrap());
    assert!(is_readable(&of_ring) && !is_readable(&own));
}

/// An event that has reached its overflow limit writes no more records, so its own ring reports a
/// hang-up. If its output is redirected to the ring of another event, that ring reports no hang-up,
/// because the other event may write more records.
#[test]
fn event_at_limit_hangs_up_only_its_own_ring() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let limited = sampling(5).with_disabled();
    let target = m.open_vcpu(sampling(1000), None);
    let shared = target.map(1, true).unwrap();
    let source = m.open_vcpu(limited.clone(), None);
    source.set_output(Some(&target)).unwrap();
    source.refresh(1).unwrap();
    overflow(&m, &v, 5);
    let state = shared.take_poll();
    assert!(state.readable && !state.hang_up);

    let alone = m.open_vcpu(limited, None);
    let ring = alone.map(1, true).unwrap();
    alone.refresh(1).unwrap();
    overflow(&m, &v, 5);
    assert!(ring.take_poll().hang_up);
}

/// While its ring is paused, an event continues to count, the content of the ring does not change,
/// and new records are reported as lost.
#[test]
fn paused_ring_reports_lost_records() {
    for writable in [true, false] {
        let m = TestCore::new(4);
        let v = m.vcpu(0);
        let event = m.open_vcpu(sim(10).with_sample_type(SampleType::PERIOD), None);
        assert_eq!(event.pause_output(true).unwrap_err().errno(), libc::EINVAL);
        let ring = event.map(1, writable).unwrap();
        overflow(&m, &v, 10);
        let before = ring.published();
        event.pause_output(true).unwrap();
        (0..3).for_each(|_| overflow(&m, &v, 10));
        assert_eq!((ring.published(), ring.pending_lost()), (before, 3));
        assert_eq!((v.stats().samples, v.stats().lost_samples), (1, 3));
        assert_eq!(event.read().unwrap().value, 40);
        event.pause_output(false).unwrap();
        overflow(&m, &v, 10);
        assert_eq!(ring.pending_lost(), 0, "the LOST record is written");
        // A LOST record has 24 bytes and a sample 16 bytes.
        assert_eq!(ring.published() - before, 40);
    }
}

/// If the VMM supplies only the mandatory registers, all other register fields of samples are
/// empty.
#[test]
fn unknown_registers_yield_empty_fields() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let attr = sim(10).with_sample_type(SampleType::ADDR | SampleType::CALLCHAIN | SampleType::RAW);
    let event = m.open_vcpu(attr.clone(), None);
    let ring = event.map(1, true).unwrap();
    m.run(0, 10);
    serve(&v);
    let samples = map_samples(&ring, &attr, |s| (s.addr, s.callchain.len(), s.raw.to_vec()));
    // Raw data of zero length has four bytes of padding.
    assert_eq!(samples, [(0, 0, vec![0; 4])]);
}

/// An event in a random sequence of operations, with the state that the test expects.
struct TracedEvent {
    event: EventHandle,
    redirect: Option<usize>,
    /// Index of the event's own ring in the list of rings, and number of its mappings. Kept after
    /// the event is closed.
    ring: Option<(usize, u32)>,
    closed: bool,
    /// Number of the event's samples that have not been read. After all rings have been read, the
    /// number of lost samples.
    missing: u64,
}

/// For random sequences of opening, redirecting, mapping and closing events, each overflow yields a
/// sample in the right ring, or is reported as lost in that ring and by its event. An event without
/// a ring reports no losses.
#[test]
fn p36_every_lost_record_is_reported_under_redirection() {
    let sampling = sim(5)
        .with_sample_type(SampleType::IP | SampleType::STREAM_ID | SampleType::CALLCHAIN | SampleType::RAW);
    let (mut lost_at_all, mut to_closed) = (0, 0);
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let m = TestCore::with(64, |c| c.sample_rate_hz = u64::from(u32::MAX));
        let v = m.vcpu(0);
        let mut events: Vec<TracedEvent> = Vec::new();
        // All rings, each with its reader and the number of outstanding records: written but
        // unread, or lost but unreported.
        let mut rings: Vec<(std::sync::Arc<Ring>, RingReader, u64)> = Vec::new();
        let written_to = |events: &[TracedEvent], at: usize| {
            let event: &TracedEvent = &events[at];
            let owner = event.redirect.map_or(event, |to| &events[to]);
            owner.ring.map(|(ring, _)| ring)
        };
        for _ in 0..120 {
            let some = |random: &mut fastrand::Rng| random.usize(0..events.len().max(1));
            let (a, b) = (some(&mut random), some(&mut random));
            match random.u32(0..12) {
                0..=1 => {
                    let flags = OpenFlags {
                        output: !events.is_empty() && random.bool(),
                        no_group: true,
                        ..OpenFlags::default()
                    };
                    let to = flags.output.then_some(b);
                    let place = V0;
                    let other = to.map(|to| &events[to].event);
                    let opened = m.core.open(&m.admin, sampling.clone(), place, other, flags);
                    let may = to.is_none_or(|to| !events[to].closed && events[to].redirect.is_none());
                    assert_eq!(opened.is_ok(), may);
                    events.extend(opened.ok().map(|event| TracedEvent {
                        event,
                        redirect: to,
                        ring: None,
                        closed: false,
                        missing: 0,
                    }));
                }
                _ if events.is_empty() => {}
                2 => {
                    let to = random.bool().then_some(b);
                    let set = events[a].event.set_output(to.map(|to| &events[to].event));
                    let others = events.iter().any(|e| !e.closed && e.redirect == Some(a));
                    let may = to.is_none_or(|to| {
                        to != a
                            && !events[to].closed
                            && events[to].redirect.is_none()
                            && !others
                            && events[a].ring.is_none()
                    });
                    assert_eq!(set.is_ok(), may && !events[a].closed, "{seed}: {set:?}");
                    if set.is_ok() {
                        events[a].redirect = to;
                    }
                }
                3..=4 => {
                    let mapped = events[a].event.map(1, true);
                    assert_eq!(mapped.is_ok(), !events[a].closed && events[a].redirect.is_none());
                    if let Ok(ring) = mapped {
                        let (at, mappings) = events[a].ring.unwrap_or((rings.len(), 0));
                        if at == rings.len() {
                            let reader = RingReader::map(ring.memfd()).unwrap();
                            rings.push((ring, reader, 0));
                        }
                        events[a].ring = Some((at, mappings + 1));
                    }
                }
                5 => {
                    let undone = events[a].event.unmap();
                    assert_eq!(undone, !events[a].closed && events[a].ring.is_some());
                    if undone {
                        let left = events[a].ring.map(|(ring, n)| (ring, n - 1));
                        events[a].ring = left.filter(|(_, n)| *n > 0);
                    }
                }
                6 => {
                    events[a].event.close();
                    events[a].closed = true;
                }
                7 => {
                    for (ring, reader, owed) in &mut rings {
                        for_each_record(reader, &sampling, |record| match record {
                            DecodedRecord::Sample(sample) => {
                                let from = events.iter_mut().find(|e| e.event.id() == sample.stream_id);
                                from.expect("an event of ours").missing -= 1;
                                *owed -= 1;
                            }
                            DecodedRecord::Lost(lost) => {
                                lost_at_all += lost.lost;
                                *owed -= lost.lost;
                            }
                            other => panic!("{other:?}"),
                        });
                        assert_eq!(*owed, ring.pending_lost(), "{seed}");
                    }
                    for event in &events {
                        assert_eq!(event.missing, event.event.lost_records(), "{seed}");
                    }
                }
                _ => {
                    for _ in 0..random.u32(1..30) {
                        overflow(&m, &v, 5);
                        for at in (0..events.len()).filter(|at| !events[*at].closed) {
                            if let Some(ring) = written_to(&events, at) {
                                rings[ring].2 += 1;
                                to_closed +=
                                    u64::from(events[at].redirect.is_some_and(|to| events[to].closed));
                            }
                        }
                        for at in 0..events.len() {
                            let writes = !events[at].closed && written_to(&events, at).is_some();
                            events[at].missing += u64::from(writes);
                        }
                    }
                }
            }
        }
    }
    assert!(lost_at_all > 0 && to_closed > 0, "neither may go untested");
}
