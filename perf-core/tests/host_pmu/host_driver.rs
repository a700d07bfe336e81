//! Tests of the `host` driver with perf events of this machine's kernel: software events, and
//! hardware events if there is a PMU.
#![expect(unsafe_code, reason = "calls of the system")]

use std::sync::{Arc, mpsc};
use std::thread;

use perf_core::pmu::host::{HostPerfCapabilities, HostPmu, MIN_CLOCK_PERIOD_NS, ignore_sigio};
use perf_core::pmu::{PmuCounterCapacity, PmuError, PmuEventTarget};
use perf_core::record::DecodedRecord;
use perf_core::ring::{Ring, RingReader};
use perf_core::*;

use crate::common::memory::fault;
use crate::common::test_core::for_each_record;
use crate::common::thread::{burn, catch_signals, signals_of_this_thread, this_tid};

const TASK_CLOCK: u64 = 1;
const PAGE_FAULTS: u64 = 2;
const CONTEXT_SWITCHES: u64 = 3;

fn here() -> PmuEventTarget {
    PmuEventTarget::Vcpu {
        vcpu: VcpuId(0),
        tid: this_tid(),
    }
}

fn software(config: u64) -> Attr {
    Attr {
        exclude_host: true,
        ..Attr::counting(EventType::SOFTWARE, config)
    }
}

fn hardware(config: u64) -> Attr {
    Attr {
        ty: EventType::HARDWARE,
        ..software(config)
    }
}

/// A core whose only vCPU is this thread, with one sampling event.
struct SampledThread {
    _core: PerfCore,
    _session: Session,
    vcpu: Arc<VcpuEventContext>,
    event: EventHandle,
    ring: Arc<Ring>,
}

impl SampledThread {
    /// Starts sampling this thread with an event with attributes `attr`. Samples contain their
    /// periods.
    fn new(attr: Attr) -> Self {
        let core = PerfCore::new(PerfCoreConfig::default());
        core.register(Arc::new(HostPmu::software(Some(catch_signals()))));
        let vcpu = core.add_vcpu(VcpuId(0), this_tid()).unwrap();
        vcpu.sched_in();
        let session = core.session(0, SessionRole::Admin);
        let (attr, target) = (
            attr.with_sample_type(SampleType::PERIOD),
            EventOpenTarget::Vcpu(VcpuId(0)),
        );
        let event = core
            .open(&session, attr, target, None, OpenFlags::default())
            .unwrap();
        Self {
            ring: event.map(16, true).unwrap(),
            _core: core,
            _session: session,
            vcpu,
            event,
        }
    }

    fn serve(&self) {
        self.vcpu.service_overflows(&mut UnavailableRegs, &mut |_| {});
    }

    /// Stops sampling. Returns the periods of the samples, and the count of the event.
    fn finish(&self) -> (Vec<u64>, u64) {
        self.vcpu.sched_out();
        self.serve();
        let mut periods = Vec::new();
        for_each_record(
            &mut RingReader::map(self.ring.memfd()).unwrap(),
            self.event.attr(),
            |record| {
                let DecodedRecord::Sample(sample) = record else {
                    panic!("only samples are expected")
                };
                periods.push(sample.period);
            },
        );
        (periods, self.event.read().unwrap().value)
    }
}

#[test]
fn page_faults_count_while_started_only() {
    let pmu = HostPmu::software(None);
    let mut ev = pmu.open(&software(PAGE_FAULTS), here()).unwrap();
    fault(50);
    assert_eq!(ev.read(), 0);
    ev.start(None).unwrap();
    fault(100);
    ev.stop();
    let counted = ev.read();
    // 100 faults, and a few of the test itself.
    assert!((100..150).contains(&counted), "{counted} faults");
    fault(50);
    assert_eq!(ev.read(), counted);
    ev.start(None).unwrap();
    fault(100);
    assert!(ev.read() >= counted + 100);
}

/// `arm(n)` arms an event to overflow after n further counts from now, even if the event is running
/// and already armed.
#[test]
fn new_period_takes_effect_immediately() {
    let signal = catch_signals();
    let pmu = HostPmu::software(Some(signal));
    let mut ev = pmu.open(&software(PAGE_FAULTS), here()).unwrap();
    ev.start(Some(1_000_000)).unwrap();
    let before = signals_of_this_thread();
    fault(100);
    assert_eq!(signals_of_this_thread(), before);
    assert_eq!(ev.take_overflows(), 0);

    ev.arm(40).unwrap();
    let armed_at = ev.read();
    fault(100);
    assert!(signals_of_this_thread() > before, "no overflow signal");
    assert!(ev.read() >= armed_at + 40);
    assert_eq!(ev.take_overflows(), 1);
    assert_eq!(ev.take_overflows(), 0);

    // The last `take_overflows` call parked the event, because it was not re-armed. No further
    // signal is sent.
    let before = signals_of_this_thread();
    fault(200);
    assert_eq!(signals_of_this_thread(), before);

    // An event that is re-armed with a longer period does not overflow at the end of the shorter
    // one.
    ev.arm(20).unwrap();
    ev.arm(10_000).unwrap();
    fault(100);
    assert_eq!(signals_of_this_thread(), before);
    assert_eq!(ev.take_overflows(), 0);
}

/// The periods of samples of real page faults add up to the count, except for the unfinished last
/// period. The test changes the period during faults, while the event is off, and while its vCPU is
/// scheduled out.
#[test]
fn periods_of_real_samples_add_up_to_the_count() {
    let thread = SampledThread::new(Attr {
        sample_period: 50,
        ..software(PAGE_FAULTS)
    });
    let (event, vcpu) = (&thread.event, &thread.vcpu);
    let work = |faults: usize| {
        for _ in 0..faults / 20 {
            fault(20);
            thread.serve();
        }
    };
    work(120);
    event.set_period(1000).unwrap();
    work(500);
    event.set_period(7).unwrap();
    work(100);
    event.disable(EventOrGroup::Event).unwrap();
    event.set_period(90).unwrap();
    work(100);
    event.enable(EventOrGroup::Event).unwrap();
    work(200);
    vcpu.sched_out();
    event.set_period(3).unwrap();
    vcpu.sched_in();
    work(60);
    let (periods, counted) = thread.finish();
    let (stood_for, samples) = (periods.iter().sum::<u64>(), periods.len());
    assert!(counted >= 980, "{counted} page faults");
    assert!(samples > 10, "{samples} samples");
    assert!(
        stood_for <= counted && counted - stood_for < 3,
        "{stood_for} of {counted} in {samples} samples"
    );
}

/// An overflow is signaled to the thread on which the event counts, not to the thread that opened
/// and armed the event.
#[test]
fn signal_goes_to_the_target_thread_only() {
    let signal = catch_signals();
    let (send, receive) = mpsc::channel();
    let (go, wait) = mpsc::channel();
    let vcpu = thread::spawn(move || {
        send.send(this_tid()).unwrap();
        wait.recv().unwrap();
        // A slow machine may deliver the signal late, so this loop waits for up to a minute of CPU
        // time.
        for _ in 0..12_000 {
            burn(5_000_000);
            if signals_of_this_thread() > 0 {
                break;
            }
        }
        signals_of_this_thread()
    });
    let tid = receive.recv().unwrap();
    let pmu = HostPmu::software(Some(signal));
    let mut ev = pmu
        .open(
            &software(TASK_CLOCK),
            PmuEventTarget::Vcpu { vcpu: VcpuId(0), tid },
        )
        .unwrap();
    ev.start(Some(500_000)).unwrap();
    go.send(()).unwrap();
    let theirs = vcpu.join().unwrap();
    assert!(theirs > 0, "no signal on the target thread");
    assert_eq!(signals_of_this_thread(), 0, "a signal on the wrong thread");
    assert_eq!(ev.take_overflows(), 1);
}

/// The overflow signal interrupts a blocking system call of the thread with EINTR, as it interrupts
/// `KVM_RUN`.
#[test]
fn signal_interrupts_a_blocking_call() {
    let signal = catch_signals();
    let pmu = HostPmu::software(Some(signal));
    let mut ev = pmu.open(&software(CONTEXT_SWITCHES), here()).unwrap();
    let mut pipe = [0; 2];
    // SAFETY: `pipe` has room for two file descriptors.
    assert_eq!(unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // The thread blocks in read(2), because nothing is written to the pipe. The resulting context
    // switch is the overflow.
    ev.start(Some(1)).unwrap();
    let mut byte = 0u8;
    // SAFETY: a one-byte buffer for one byte.
    let n = unsafe { libc::read(pipe[0], (&raw mut byte).cast(), 1) };
    let error = std::io::Error::last_os_error();
    assert_eq!((n, error.raw_os_error()), (-1, Some(libc::EINTR)));
    assert!(ev.take_overflows() == 1);
    // SAFETY: both file descriptors are open and owned here.
    unsafe {
        libc::close(pipe[0]);
        libc::close(pipe[1]);
    }
}

#[test]
fn host_driver_rejects_unsupported_events() {
    let pmu = HostPmu::software(None);
    let user_only = Attr {
        exclude_kernel: true,
        ..software(PAGE_FAULTS)
    };
    let refusal = |attr: &Attr, target| pmu.open(attr, target).err();
    let of_vm = refusal(&software(PAGE_FAULTS), PmuEventTarget::Vm);
    assert!(matches!(of_vm, Some(PmuError::Unsupported(_))));
    assert!(matches!(
        refusal(&user_only, here()),
        Some(PmuError::Unsupported(_))
    ));
    assert!(matches!(
        refusal(&hardware(0), here()),
        Some(PmuError::NoSuchEvent)
    ));
    let unknown = refusal(&software(9_999), here());
    assert!(matches!(
        unknown,
        Some(PmuError::NoSuchEvent | PmuError::Unsupported(_))
    ));
    let mut ev = pmu.open(&software(PAGE_FAULTS), here()).unwrap();
    assert!(matches!(ev.start(Some(5)), Err(PmuError::Unsupported(_))));
}

/// The last count of a software event stays readable after its thread has ended.
#[test]
fn count_outlives_its_thread() {
    let (send, receive) = mpsc::channel();
    let (go, wait) = mpsc::channel::<()>();
    let vcpu = thread::spawn(move || {
        send.send(this_tid()).unwrap();
        wait.recv().unwrap();
        fault(30);
    });
    let tid = receive.recv().unwrap();
    let target = PmuEventTarget::Vcpu { vcpu: VcpuId(0), tid };
    let pmu = HostPmu::software(None);
    let mut ev = pmu.open(&software(PAGE_FAULTS), target).unwrap();
    ev.start(None).unwrap();
    go.send(()).unwrap();
    vcpu.join().unwrap();
    let last = ev.read();
    assert!(last >= 30);
    ev.stop();
    assert_eq!(ev.read(), last);
    // No event can be opened on a thread that has ended.
    assert!(pmu.open(&software(PAGE_FAULTS), target).is_err());
}

/// All slots that the probe reports can be active simultaneously, with an event on each
/// general-purpose counter and the event of each free fixed-function counter. On a host without a
/// PMU, opening fails because the event does not exist.
#[test]
fn hardware_events_fit_the_slots_that_were_probed() {
    let probe = HostPerfCapabilities::run();
    let pmu = HostPmu::hardware(None, &probe);
    assert_eq!(
        pmu.capacity(),
        PmuCounterCapacity::Counters(probe.counters.mask())
    );
    if !probe.hardware_pmu {
        assert_eq!(probe.slots(), 0);
        assert!(probe.no_slots_because.is_some());
        assert!(pmu.open(&hardware(4), here()).is_err());
        return;
    }
    // Prefers branches, which no fixed-function counter holds. A virtual PMU may count cycles only.
    let branches = [4, 2, 1, 0]
        .map(hardware)
        .into_iter()
        .find(|attr| pmu.open(attr, here()).is_ok())
        .unwrap();
    let fixed = probe.counters.fixed.iter().filter(|f| f.free);
    let fixed = fixed.map(|f| hardware(f.config));
    let mut events: Vec<_> = std::iter::repeat_n(branches, probe.counters.general)
        .chain(fixed)
        .map(|attr| pmu.open(&attr, here()).unwrap())
        .collect();
    assert_eq!(events.len(), probe.slots());
    for ev in &mut events {
        ev.start(None).unwrap();
    }
}

/// `ignore_sigio` replaces the default disposition of SIGIO, which terminates the process, and
/// keeps any other disposition.
#[test]
fn sigio_does_not_kill() {
    ignore_sigio().unwrap();
    ignore_sigio().unwrap();
    // SAFETY: raises an ignored signal.
    assert_eq!(unsafe { libc::raise(libc::SIGIO) }, 0);
}

/// The requested period of a clock event may be shorter than one interrupt takes on the host. The
/// thread must still make progress, so all its clock events together overflow at most once per
/// [`MIN_CLOCK_PERIOD_NS`]. The test watches the thread from another CPU and closes the events if
/// the thread makes no progress.
#[test]
fn clock_with_a_short_period_leaves_its_thread_time() {
    let signal = catch_signals();
    for clocks in [1, 4] {
        let (send, receive) = mpsc::channel();
        let (go, wait) = mpsc::channel();
        let thread = thread::spawn(move || {
            send.send(u64::try_from(this_tid()).unwrap()).unwrap();
            wait.recv().unwrap();
            burn(20_000_000);
            send.send(signals_of_this_thread()).unwrap();
        });
        let tid = i32::try_from(receive.recv().unwrap()).unwrap();
        let pmu = HostPmu::software(Some(signal));
        let target = PmuEventTarget::Vcpu { vcpu: VcpuId(0), tid };
        let mut events: Vec<_> = (0..clocks)
            .map(|clock| pmu.open(&software(clock % 2), target).unwrap())
            .collect();
        for event in &mut events {
            event.start(Some(1)).unwrap();
        }
        // Re-arms the events, because those that were armed first did not share the minimum period
        // yet.
        for event in &mut events {
            event.arm(1).unwrap();
        }
        go.send(()).unwrap();
        let signals = receive.recv_timeout(std::time::Duration::from_secs(300));
        for event in &mut events {
            event.stop();
        }
        let signals = signals.expect("the thread gets on");
        thread.join().unwrap();
        let counted = events.iter_mut().map(|event| event.read()).max().unwrap();
        // Allows for the difference between the kernel's clocks: it counts a clock event with one
        // and times its overflows with another.
        let most = (counted + counted / 4) / MIN_CLOCK_PERIOD_NS + clocks;
        assert!(
            signals > 0 && signals <= most,
            "{signals} signals, {most} at most"
        );
    }
}

/// Returns the periods of the samples that an event with `attr` takes while this thread uses 5 ms
/// of CPU time. Checks that the periods add up to the count, except for the last, unfinished period
/// of `period_ns`.
fn clock_samples(attr: Attr, period_ns: u64) -> Vec<u64> {
    let thread = SampledThread::new(attr);
    while thread.event.read().unwrap().value < 5_000_000 {
        burn(20_000);
        thread.serve();
    }
    let (periods, counted) = thread.finish();
    let stood_for: u64 = periods.iter().sum();
    assert!(
        stood_for <= counted && counted - stood_for < period_ns,
        "{stood_for} of {counted}"
    );
    assert!(
        periods.iter().all(|period| period % period_ns == 0),
        "{periods:?}"
    );
    periods
}

/// If the kernel uses a longer period than requested, each sample contains the actual number of
/// counts as its period.
#[test]
fn short_clock_samples_account_for_all_counts() {
    let attr = Attr {
        sample_period: 1000,
        ..software(TASK_CLOCK)
    };
    // The number of samples depends on the host's interrupt latency and may be 1.
    assert!(!clock_samples(attr, 1000).is_empty());
}

/// A clock event with a frequency has a fixed period from the first sample on.
#[test]
fn clocks_frequency_is_its_period() {
    let attr = Attr {
        sample_period: 1000,
        ..software(TASK_CLOCK)
    };
    clock_samples(attr.with_freq(), 1_000_000);
}
