//! Tests of the `host` driver and of the core with hardware events of the running kernel. Without a
//! PMU, the tests print a message and pass. They also run inside a Linux guest whose PMU Perfvisor
//! provides.
//!
//! With `PERFVISOR_EXPECT_PMU=1`, the tests fail without a PMU. They count only cycles, because
//! every PMU supports cycles, including one that is backed by a clock. The bounds also hold on busy
//! machines.
#![expect(unsafe_code, reason = "calls of the system")]

use std::fs;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use perf_core::attr::{Attr, EventType};
use perf_core::pmu::host::{HostPerfCapabilities, HostPmu};
use perf_core::pmu::{Pmu, PmuError, PmuEvent, PmuEventTarget};
use perf_core::time::Clock;
use perf_core::*;

use crate::common::thread::{burn, catch_signals, signals_of_this_thread, this_tid, thread_cpu_ns};
use test_support::skip;

const CYCLES: u64 = 0;
const MS: u64 = 1_000_000;
/// Timeout of the tests, in nanoseconds of CPU time. Sufficient for slow machines.
const PATIENCE_NS: u64 = 120_000 * MS;

/// Returns the probed host PMU. Prints a message and returns `None` if there is no hardware PMU.
fn pmu() -> Option<&'static HostPerfCapabilities> {
    static PROBE: OnceLock<HostPerfCapabilities> = OnceLock::new();
    let probe = PROBE.get_or_init(|| {
        log::set_logger(&StderrLogger).unwrap();
        log::set_max_level(log::LevelFilter::Debug);
        let probe = HostPerfCapabilities::run();
        eprintln!("{probe:?}");
        probe
    });
    if probe.slots() == 0 {
        let why = probe.no_slots_because.as_deref().unwrap_or_default();
        assert!(
            std::env::var_os("PERFVISOR_EXPECT_PMU").is_none(),
            "a PMU was expected: {why}"
        );
        skip::skipped(why, false);
        return None;
    }
    Some(probe)
}

fn cycles() -> Attr {
    Attr::counting(EventType::HARDWARE, CYCLES)
}

fn here() -> PmuEventTarget {
    PmuEventTarget::Vcpu {
        vcpu: VcpuId(0),
        tid: this_tid(),
    }
}

/// A core whose only vCPU is this thread, with the hardware driver.
struct ThreadCore {
    core: PerfCore,
    session: Session,
    vcpu: Arc<VcpuEventContext>,
    signal: i32,
}

/// The CPU time of a thread, readable from any thread. The kernel's time enabled and time running
/// of an event advance with this time only.
struct CpuTime(libc::clockid_t);

impl CpuTime {
    fn of_this_thread() -> Self {
        let mut id = 0;
        // SAFETY: the calling thread exists, and `id` is writable.
        let rc = unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut id) };
        assert_eq!(rc, 0);
        Self(id)
    }
}

impl Clock for CpuTime {
    fn now_ns(&self) -> u64 {
        let mut ts = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the timespec is writable.
        assert_eq!(unsafe { libc::clock_gettime(self.0, &mut ts) }, 0);
        ts.tv_sec as u64 * 1_000_000_000 + ts.tv_nsec as u64
    }
}

/// A logger that prints the messages of the driver and the core.
struct StderrLogger;

impl log::Log for StderrLogger {
    fn enabled(&self, metadata: &log::Metadata) -> bool {
        metadata.level() <= log::Level::Debug
    }

    fn log(&self, record: &log::Record) {
        eprintln!("{}: {}", record.level(), record.args());
    }

    fn flush(&self) {}
}

impl ThreadCore {
    fn new(probe: &HostPerfCapabilities) -> Self {
        let clock = Arc::new(CpuTime::of_this_thread());
        let config = PerfCoreConfig {
            clock,
            ..PerfCoreConfig::default()
        };
        Self::with(probe, config)
    }

    fn with(probe: &HostPerfCapabilities, config: PerfCoreConfig) -> Self {
        let signal = catch_signals();
        let core = PerfCore::new(config);
        core.register(Arc::new(HostPmu::hardware(Some(signal), probe)));
        let vcpu = core.add_vcpu(VcpuId(0), this_tid()).unwrap();
        vcpu.sched_in();
        let session = core.session(0, SessionRole::Admin);
        Self {
            core,
            session,
            vcpu,
            signal,
        }
    }

    fn try_open(
        &self,
        attr: Attr,
        group: Option<&EventHandle>,
        cookie: Option<u64>,
    ) -> Result<EventHandle, PerfEventOpenError> {
        let flags = OpenFlags {
            cookie,
            ..OpenFlags::default()
        };
        let target = EventOpenTarget::Vcpu(VcpuId(0));
        self.core.open(&self.session, attr, target, group, flags)
    }

    fn open(&self, attr: Attr) -> EventHandle {
        self.try_open(attr, None, None).unwrap()
    }

    /// Uses `ns` nanoseconds of CPU time, and services overflows after each signal and once at the
    /// end. Adds the number of overflows of each event to the entry of its cookie.
    fn serve(&self, ns: u64, passed: &mut [u64; 4]) {
        let mut serve = || {
            self.vcpu.service_overflows(&mut UnavailableRegs, &mut |o| {
                passed[o.cookie as usize] += u64::from(o.times);
            });
        };
        let mut seen = signals_of_this_thread();
        let end = thread_cpu_ns() + ns;
        while thread_cpu_ns() < end {
            for _ in 0..1000 {
                std::hint::spin_loop();
            }
            let now = signals_of_this_thread();
            if now != std::mem::replace(&mut seen, now) {
                serve();
            }
        }
        serve();
    }

    /// Uses CPU time and services overflows until `event` has the given number of counts.
    fn serve_counts(&self, event: &EventHandle, counts: u64, passed: &mut [u64; 4]) {
        self.serve_while(passed, |_| event.read().unwrap().value < counts);
    }

    fn serve_while(&self, passed: &mut [u64; 4], waits: impl Fn(&[u64; 4]) -> bool) {
        let end = thread_cpu_ns() + PATIENCE_NS;
        while waits(passed) && thread_cpu_ns() < end {
            self.serve(20 * MS, passed);
        }
    }

    /// Uses CPU time and services overflows until at least `due - 1` overflows are reported.
    /// Signals may be late on a busy machine.
    fn serve_reports(&self, cookie: usize, due: u64, passed: &mut [u64; 4]) {
        self.serve_while(passed, |passed| passed[cookie] + 1 < due);
    }
}

/// Returns the number of cycles per nanosecond of this thread's CPU time, measured with one event.
fn rate(probe: &HostPerfCapabilities) -> f64 {
    let mut ev = HostPmu::hardware(None, probe).open(&cycles(), here()).unwrap();
    let from = thread_cpu_ns();
    ev.start(None).unwrap();
    burn(50 * MS);
    ev.stop();
    ev.read() as f64 / (thread_cpu_ns() - from) as f64
}

/// Returns the file descriptors of all perf events of this process that can be read with times.
fn kernel_events() -> Vec<RawFd> {
    fs::read_dir("/proc/self/fd")
        .unwrap()
        .flatten()
        .filter(|entry| {
            fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:[perf_event]")
        })
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// Returns the count, time enabled and time running of a kernel event, or `None` in the error
/// state.
fn kernel_times(fd: RawFd) -> Option<[u64; 3]> {
    let mut words = [0u64; 3];
    // SAFETY: a writable buffer of 24 bytes.
    let n = unsafe { libc::read(fd, words.as_mut_ptr().cast(), 24) };
    match n {
        24 => Some(words),
        0 => None,
        _ => panic!("reading a perf event: {}", std::io::Error::last_os_error()),
    }
}

/// Two events on two counters count the same cycles. Both events count only while they are started,
/// and neither count decreases.
#[test]
fn hardware_events_count_while_started_only() {
    let Some(probe) = pmu() else { return };
    let driver = HostPmu::hardware(None, probe);
    let mut pair = [0, 1].map(|_| driver.open(&cycles(), here()).unwrap());
    burn(5 * MS);
    assert_eq!(pair[0].read(), 0, "counted before it was started");
    for ev in &mut pair {
        ev.start(None).unwrap();
    }
    let mut last = 0;
    let end = thread_cpu_ns() + 100 * MS;
    while thread_cpu_ns() < end {
        let now = pair[0].read();
        assert!(now >= last, "{now} after {last}");
        last = now;
    }
    for ev in &mut pair {
        ev.stop();
    }
    let [a, b] = [pair[0].read(), pair[1].read()];
    burn(20 * MS);
    assert_eq!([pair[0].read(), pair[1].read()], [a, b], "counted while stopped");
    let ratio = a as f64 / b as f64;
    eprintln!("{a} and {b} cycles in 100 ms");
    // Tolerance for the system call between the starts and between the stops of the two events.
    assert!((0.8..1.25).contains(&ratio), "{a} and {b}");
    // A CPU frequency between 10 MHz and 10 GHz.
    assert!((MS..1000 * MS).contains(&a), "{a} cycles in 100 ms");
}

/// Returns the number of cycle events that can be active simultaneously, on general-purpose
/// counters and on a fixed-function counter.
fn slots(probe: &HostPerfCapabilities) -> usize {
    probe.counters.max_simultaneous(&cycles())
}

/// All probed slots can be active simultaneously. One more event is rejected, stays stopped, and
/// starts once a slot is free.
#[test]
fn event_beyond_slots_is_refused_until_one_is_free() {
    let Some(probe) = pmu() else { return };
    let driver = HostPmu::hardware(None, probe);
    let mut events: Vec<Box<dyn PmuEvent>> = Vec::new();
    while events.len() < 64 {
        let mut ev = driver.open(&cycles(), here()).unwrap();
        match ev.start(None) {
            Ok(()) => events.push(ev),
            Err(PmuError::Busy) => {
                // The probe excludes the watchdog's counter even if the watchdog does not run on
                // this CPU. One more event then starts.
                let spare = usize::from(probe.nmi_watchdog);
                let promised = slots(probe);
                assert!(
                    (promised..=promised + spare).contains(&events.len()),
                    "{} of {promised}",
                    events.len()
                );
                burn(5 * MS);
                assert_eq!(ev.read(), 0);
                events[0].stop();
                ev.start(None).unwrap();
                burn(5 * MS);
                assert!(ev.read() > 0);
                return;
            }
            Err(other) => panic!("{other}"),
        }
    }
    panic!("64 events are on at once");
}

/// Events of fixed-function counters take no general-purpose counters. Each of these events is
/// active even if all general-purpose counters are in use, for any order of starts.
#[test]
fn fixed_function_events_leave_general_counters_free() {
    let Some(probe) = pmu() else { return };
    let t = ThreadCore::new(probe);
    let pinned = |ty, config| Attr::counting(ty, config).with_pinned();
    let fixed = probe.counters.fixed.iter().filter(|f| f.free);
    let mut held: Vec<EventHandle> = fixed
        .map(|f| t.open(pinned(EventType::HARDWARE, f.config)))
        .collect();
    // Event select C4H (branches), which no fixed-function counter holds. The event occupies a
    // counter even if it counts nothing.
    let general = || t.open(pinned(EventType::RAW, 0xC4));
    held.extend((0..probe.counters.general).map(|_| general()));
    assert_eq!(held.len(), probe.slots());
    let late = general();
    assert_eq!(late.state(), EventState::Error, "the general ones are full");
    burn(20 * MS);
    for event in &held {
        let reading = event.read().unwrap();
        assert_eq!(event.state(), EventState::Active);
        assert_eq!(reading.time_running_ns, reading.time_enabled_ns);
    }
}

#[test]
fn oversized_group_is_rejected_and_fitting_groups_count_together() {
    let Some(probe) = pmu() else { return };
    let t = ThreadCore::new(probe);
    let leader = t.open(cycles().with_disabled());
    let mut members = Vec::new();
    for _ in 1..slots(probe) {
        members.push(t.try_open(cycles(), Some(&leader), None).unwrap());
    }
    let refused = t.try_open(cycles(), Some(&leader), None).unwrap_err();
    assert!(
        matches!(refused, PerfEventOpenError::GroupTooLarge { needed, slots: there } if needed == there + 1 && there == slots(probe)),
        "{refused}"
    );
    assert_eq!(refused.errno(), libc::EINVAL);
    leader.enable(EventOrGroup::Event).unwrap();
    burn(200 * MS);
    leader.disable(EventOrGroup::Event).unwrap();
    let readings = leader.read_group().unwrap();
    assert_eq!(readings.len(), slots(probe));
    for reading in &readings {
        assert_eq!(reading.time_running_ns, reading.time_enabled_ns);
        // Tolerance for the time between the starts of the events.
        let ratio = reading.value as f64 / readings[0].value as f64;
        assert!((0.75..1.33).contains(&ratio), "{readings:?}");
    }
}

#[test]
fn pinned_event_without_a_slot_is_in_error_until_it_is_enabled_again() {
    let Some(probe) = pmu() else { return };
    let t = ThreadCore::new(probe);
    let pinned = || cycles().with_pinned();
    let mut held: Vec<_> = (0..slots(probe)).map(|_| t.open(pinned())).collect();
    assert!(held.iter().all(|e| e.state() == EventState::Active));
    let late = t.open(pinned());
    assert_eq!(late.state(), EventState::Error);
    burn(5 * MS);
    let mut bytes = [0; 64];
    // An event in the error state reads as end of file.
    assert_eq!(late.read_bytes(&mut bytes).unwrap(), 0);
    held.pop();
    assert_eq!(late.state(), EventState::Error, "it does not come back by itself");
    late.enable(EventOrGroup::Event).unwrap();
    assert_eq!(late.state(), EventState::Active);
    burn(5 * MS);
    assert!(late.read().unwrap().value > 0);
}

#[test]
fn exclusive_group_has_the_pmu_alone_and_shares_its_time() {
    let Some(probe) = pmu() else { return };
    let t = ThreadCore::new(probe);
    let alone = t.open(cycles().with_exclusive());
    let other = t.open(cycles());
    for _ in 0..200 {
        burn(MS);
        t.core.rotate();
        assert!(
            !(alone.state() == EventState::Active && other.state() == EventState::Active),
            "both are on"
        );
    }
    for event in [&alone, &other] {
        let reading = event.read().unwrap();
        assert!(
            reading.value > 0 && reading.time_running_ns < reading.time_enabled_ns,
            "{reading:?}"
        );
    }
}

/// Changes of the period and overflows do not change the rate at which a count advances. A
/// malfunctioning counter would make the count jump by half of the counter's range or by the whole
/// range.
#[test]
fn count_never_jumps_when_its_period_changes() {
    const JUMP: u64 = 1 << 46;
    let Some(probe) = pmu() else { return };
    let signal = catch_signals();
    let mut ev = HostPmu::hardware(Some(signal), probe)
        .open(&cycles(), here())
        .unwrap();
    let periods = [
        20_000_000,
        5_000_000,
        1 << 50,
        3_000_000,
        1 << 47,
        (1 << 47) - 1,
        8_000_000,
        4_000_000,
    ];
    ev.start(None).unwrap();
    let mut last = ev.read();
    for n in 0..400 {
        let period = periods[n % periods.len()];
        ev.arm(period).unwrap();
        // Reads many times, so that some reads coincide with an overflow.
        for _ in 0..8 * (n % 7) {
            let now = ev.read();
            assert!(now >= last, "{now} after {last}");
            let signals = signals_of_this_thread();
            assert!(
                now - last < JUMP,
                "from {last} to {now}, round {n}, period {period}, {signals} signals"
            );
            last = now;
        }
        if n % 3 == 0 {
            // The first call reports the overflow, if any, and the second call then parks the
            // event.
            ev.take_overflows();
            ev.take_overflows();
        }
        if n % 11 == 0 {
            ev.stop();
            ev.start((n % 2 == 0).then_some(period)).unwrap();
        }
    }
}

/// Checks the number `passed` of reported overflows of an event with period `period`: up to one
/// less than expected at count `counted`, and up to one more than expected at the later count
/// `later`.
fn agree(passed: u64, counted: u64, later: u64, period: u64) {
    let expected = counted / period..=later / period;
    eprintln!("period {period}: {passed} reported, count / period = {expected:?}");
    assert!(*expected.start() >= 5, "only {counted} counts of {period}");
    assert!(
        passed + 1 >= *expected.start() && passed <= expected.end() + 1,
        "{passed}, {expected:?}"
    );
}

/// A signal to this thread reports each overflow. If the period changes while the event runs,
/// overflows follow the new period.
#[test]
fn overflows_follow_the_period_also_after_it_changed() {
    let Some(probe) = pmu() else { return };
    let period = (rate(probe) * 60.0 * MS as f64) as u64;
    let t = ThreadCore::new(probe);
    let attr = Attr::sampling(EventType::HARDWARE, CYCLES, period);
    let event = t.try_open(attr, None, Some(1)).unwrap();
    let before = signals_of_this_thread();
    let mut slow = [0; 4];
    t.serve_counts(&event, 11 * period, &mut slow);
    let counted = event.read().unwrap().value;
    t.serve_reports(1, counted / period, &mut slow);
    agree(slow[1], counted, event.read().unwrap().value, period);
    let signals = signals_of_this_thread() - before;
    assert!(
        signals > 0,
        "signal {} never came for {slow:?} overflows",
        t.signal
    );

    event.set_period(period / 3).unwrap();
    // Skips the rest of the old period and its overflow.
    t.serve(70 * MS, &mut [0; 4]);
    let from = event.read().unwrap().value;
    let mut fast = [0; 4];
    t.serve_counts(&event, from + 11 * period, &mut fast);
    let counted = event.read().unwrap().value;
    t.serve_reports(1, (counted - from) / (period / 3), &mut fast);
    // Overflows that were due before `from` may be reported after it, so the upper limit is
    // increased.
    let later = event.read().unwrap().value;
    agree(fast[1], counted - from, later - from + 2 * period, period / 3);

    // Arms the event explicitly: first for a later overflow than its period, then for an earlier
    // one.
    event.arm(u64::from(u32::MAX) << 10).unwrap();
    // Skips overflows that occurred earlier.
    t.serve(20 * MS, &mut [0; 4]);
    let mut armed = [0; 4];
    t.serve(70 * MS, &mut armed);
    assert_eq!(armed, [0; 4], "armed for later, it came at once");
    event.arm(1000).unwrap();
    t.serve_reports(1, 2, &mut armed);
    assert!(armed[1] > 0, "armed for now, it did not come");
}

/// Each of two sampling events receives only its own overflows, and a counting event receives none.
#[test]
fn each_event_gets_its_own_overflows() {
    let Some(probe) = pmu() else { return };
    if slots(probe) < 3 {
        skip::skipped(&format!("{} slots", slots(probe)), false);
        return;
    }
    let period = (rate(probe) * 60.0 * MS as f64) as u64;
    let t = ThreadCore::new(probe);
    let sampling = |period, cookie| {
        let attr = Attr::sampling(EventType::HARDWARE, CYCLES, period).with_pinned();
        t.try_open(attr, None, Some(cookie)).unwrap()
    };
    let _counting = t.open(cycles());
    let slow = sampling(period, 1);
    let fast = sampling(period / 3, 2);
    let mut passed = [0; 4];
    t.serve_counts(&slow, 11 * period, &mut passed);
    let counted = [&slow, &fast].map(|event| event.read().unwrap().value);
    t.serve_reports(1, counted[0] / period, &mut passed);
    t.serve_reports(2, counted[1] / (period / 3), &mut passed);
    let later = [&slow, &fast].map(|event| event.read().unwrap().value);
    agree(passed[1], counted[0], later[0], period);
    agree(passed[2], counted[1], later[1], period / 3);
}

/// The driver reads counters in user space only if this yields correct values. If the kernel does
/// not offer user-space reads, or if RDPMC faults or reads a different value, the driver uses
/// read(2). `PERFVISOR_EXPECT_USER_READ` is `yes` or `no` if the result is known.
#[test]
fn user_space_reads_are_used_only_if_correct() {
    let Some(probe) = pmu() else { return };
    let driver = HostPmu::hardware(None, probe);
    let mut ev = driver.open(&cycles(), here()).unwrap();
    ev.start(None).unwrap();
    let mut last = ev.read();
    for _ in 0..1000 {
        let now = ev.read();
        assert!(now >= last);
        last = now;
    }
    assert!(last > 0);
    if !probe.user_read {
        assert_eq!(ev.user_index(), 0, "an index offered that cannot be read");
    }
    if let Ok(expected) = std::env::var("PERFVISOR_EXPECT_USER_READ") {
        assert_eq!(probe.user_read, expected == "yes", "RDPMC at CPL 3");
    }
}

/// With more events than counters, the core multiplexes the slots, and the time running of its
/// events is less than their time enabled. The kernel never takes a counter away from a started
/// event, so the kernel's enabled and running times of each event are equal.
#[test]
fn core_multiplexes_and_kernel_does_not() {
    let Some(probe) = pmu() else { return };
    if slots(probe) < 2 {
        skip::skipped(&format!("{} slots", slots(probe)), false);
        return;
    }
    let before = kernel_events();
    let t = ThreadCore::new(probe);
    let reference = t.open(cycles().with_pinned());
    let shared: Vec<_> = (0..2 * slots(probe) + 1).map(|_| t.open(cycles())).collect();
    let opened = || -> Vec<_> {
        let all = kernel_events().into_iter();
        all.filter(|fd| !before.contains(fd)).collect()
    };
    // Ignores events in the error state, which are checked below.
    let has_counted = |fd| kernel_times(fd).is_none_or(|[count, _, running]| count > 0 && running > 0);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(4));
                t.core.rotate();
            }
        });
        // Waits until every event has counted, which takes several intervals and may take long on a
        // slow machine.
        let end = thread_cpu_ns() + PATIENCE_NS;
        while !opened().iter().all(|&fd| has_counted(fd)) && thread_cpu_ns() < end {
            burn(20 * MS);
        }
        burn(1000 * MS);
        stop.store(true, Ordering::Relaxed);
    });
    let opened = opened();
    // Each event of the core has one kernel event.
    assert_eq!(opened.len(), shared.len() + 1);
    for &fd in &opened {
        let [count, enabled, running] = kernel_times(fd).expect("a kernel event in the error state");
        assert_eq!(
            enabled, running,
            "the kernel multiplexed an event ({count} counts)"
        );
        assert!(count > 0 && running > 0);
    }
    let all = reference.read().unwrap();
    assert_eq!(all.time_enabled_ns, all.time_running_ns, "pinned");
    let mut sum = 0.0;
    for event in &shared {
        let reading = event.read().unwrap();
        assert!(reading.time_running_ns < reading.time_enabled_ns, "{reading:?}");
        let ratio = reading.estimate().unwrap() as f64 / all.value as f64;
        eprintln!(
            "on for {:.0} % of the time, estimate {ratio:.3} of the true count",
            100.0 * reading.time_running_ns as f64 / reading.time_enabled_ns as f64
        );
        sum += ratio;
    }
    // Checks only the mean, because slice lengths vary widely on a busy machine.
    let mean = sum / shared.len() as f64;
    assert!((0.4..2.5).contains(&mean), "{mean}");
    assert_eq!(t.vcpu.errors(), 0, "an event lost its slot");
}

/// Takes all counters of this thread's CPU with pinned CPU-wide events, which the kernel schedules
/// before thread events. Pins the thread to that CPU.
fn take_all_counters() -> Vec<OwnedFd> {
    // SAFETY: sched_getcpu takes no arguments; the set is a plain bit mask that lives until the
    // call returns.
    let cpu = unsafe {
        let cpu = libc::sched_getcpu();
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(usize::try_from(cpu).unwrap(), &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&set), &set), 0);
        cpu
    };
    let mut held = Vec::new();
    for _ in 0..64 {
        // A `perf_event_attr` of version 0 (64 bytes): type hardware, its size, config cycles, and
        // the flag `pinned`.
        let mut attr = [0u64; 8];
        attr[0] = 64 << 32;
        attr[5] = 1 << 2;
        // SAFETY: the attribute is 64 bytes, as its size says.
        let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, attr.as_ptr(), -1, cpu, -1, 0) };
        let fd = RawFd::try_from(fd).unwrap();
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: the file descriptor was just opened and has no other owner.
        held.push(unsafe { OwnedFd::from_raw_fd(fd) });
        let mut count = 0u64;
        // SAFETY: a writable buffer of eight bytes.
        if unsafe { libc::read(fd, (&raw mut count).cast(), 8) } == 0 {
            // This event received no counter, so all counters are taken.
            return held;
        }
    }
    panic!("64 events are on at once");
}

/// The kernel takes the counter of a running event away without a notification. A check detects the
/// loss and its time, no counts are lost, and the event continues when the counters are free again.
#[test]
fn counters_taken_by_kernel_are_detected_and_recovered() {
    use EventState::{Active, Error, Inactive};
    let Some(probe) = pmu() else { return };
    // The core uses the clock with which the driver times lost counters, because a thread's CPU
    // time excludes interrupts.
    let t = ThreadCore::with(probe, PerfCoreConfig::default());
    let pinned = t.open(cycles().with_pinned());
    let flexible = t.open(cycles());
    burn(20 * MS);
    let before_ns = t.vcpu.time_ns();
    t.vcpu.check_lost_counters();
    let states = || (pinned.state(), flexible.state());
    assert_eq!((t.vcpu.errors(), states()), (0, (Active, Active)));
    burn(30 * MS);
    let counted = pinned.count().unwrap();
    let hogs = take_all_counters();
    let taken_ns = t.vcpu.time_ns();
    burn(1200 * MS);
    t.vcpu.check_lost_counters();
    assert_eq!((t.vcpu.errors(), states()), (1, (Error, Inactive)));
    let failure = pinned.failure().unwrap();
    assert_eq!(failure.cause, PinnedEventFailureCause::Taken);
    let now_ns = t.vcpu.time_ns();
    let uncounted_ns = now_ns - failure.since_ns;
    // The competing event took the counter after `before_ns`, when the event was last known to
    // count, and before `taken_ns`.
    let (least_ns, most_ns) = (now_ns - taken_ns, now_ns - before_ns);
    eprintln!("uncounted for {uncounted_ns} ns, truly for {least_ns} to {most_ns} ns");
    assert!(uncounted_ns >= least_ns - least_ns / 20 && uncounted_ns <= most_ns + most_ns / 20);
    let stands = pinned.count().unwrap();
    assert!(stands >= counted, "{stands} after {counted}");
    burn(10 * MS);
    assert_eq!(pinned.count().unwrap(), stands);
    pinned.enable(EventOrGroup::Event).unwrap();
    let cause = pinned.failure().unwrap().cause;
    assert_eq!((pinned.state(), cause), (Error, PinnedEventFailureCause::Busy));
    drop(hogs);
    pinned.enable(EventOrGroup::Event).unwrap();
    t.core.tick();
    assert_eq!(states(), (Active, Active));
    burn(20 * MS);
    assert!(pinned.count().unwrap() > stands);
    let reading = flexible.read().unwrap();
    assert!(
        reading.time_running_ns + 90 * MS < reading.time_enabled_ns,
        "{reading:?}"
    );
}
