//! Tests of events that count a host CPU.

use std::sync::Arc;
use std::time::{Duration, Instant};

use perf_core::pmu::host::HostPmu;
use perf_core::pmu::sim::SimPmu;
use perf_core::record::{DecodedRecord, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::*;

use test_support::skip;

/// `PERF_COUNT_SW_CPU_CLOCK`: the clock of a CPU or thread, in nanoseconds.
const CPU_CLOCK: u64 = 0;

fn core() -> PerfCore {
    let signal = Some(libc::SIGURG);
    let core = PerfCore::builder().driver(Arc::new(HostPmu::software(signal)));
    core.driver(Arc::new(SimPmu::with_slots(4))).build().unwrap()
}

/// Opens `attr` on `cpu`, unless this user lacks the permission.
fn open(core: &PerfCore, session: &Session, attr: Attr, cpu: &VcpuEventContext) -> Option<EventHandle> {
    match core.open(
        session,
        attr,
        EventOpenTarget::Vcpu(cpu.id()),
        None,
        OpenFlags::default(),
    ) {
        Ok(event) => Some(event),
        Err(error) if [libc::EACCES, libc::EPERM].contains(&error.errno()) => {
            assert!(error.to_string().contains("CAP_PERFMON"), "{error}");
            skip::skipped("this user may not count whole CPUs", false);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A clock event of a CPU advances with wall-clock time regardless of the load, and its samples
/// contain the CPU number.
#[test]
fn cpus_clock_is_counted_and_sampled() {
    let core = core();
    let cpu = core.add_cpu(0).unwrap();
    let session = core.session(0, SessionRole::Admin);
    let sample_type = SampleType::TID | SampleType::CPU | SampleType::PERIOD;
    let attr = Attr::sampling(EventType::SOFTWARE, CPU_CLOCK, 1_000_000).with_sample_type(sample_type);
    let before = Instant::now();
    let Some(clock) = open(&core, &session, attr, &cpu) else {
        return;
    };
    let mut ring = RingReader::of(clock.map(4, true).unwrap());
    let counts = Instant::now();
    while counts.elapsed() < Duration::from_millis(20) {
        std::thread::sleep(Duration::from_millis(1));
        cpu.service_overflows(&mut UnavailableRegs, &mut |_| {});
    }
    let least_ns = counts.elapsed().as_nanos() as u64;
    let reading = clock.read().unwrap();
    let most_ns = before.elapsed().as_nanos() as u64;
    // Tolerance of 2 % for different rates of the two clocks.
    let slack_ns = most_ns / 50;
    assert!(reading.value + slack_ns >= least_ns, "{reading:?}, {least_ns} ns");
    assert!(reading.value <= most_ns + slack_ns, "{reading:?}, {most_ns} ns");
    assert_eq!(reading.time_enabled_ns, reading.time_running_ns);
    let format = RecordFormat::of_samples(sample_type);
    let (mut samples, mut stand_for_ns) = (0, 0);
    while let Some(raw) = ring.next_record().unwrap() {
        if let DecodedRecord::Sample(sample) = DecodedRecord::decode(raw, format).unwrap() {
            assert_eq!((sample.pid, sample.tid, sample.cpu), (u32::MAX, u32::MAX, 0));
            samples += 1;
            stand_for_ns += sample.period;
        }
    }
    assert!(samples > 0);
    assert!(stand_for_ns <= clock.read().unwrap().value);
}

/// VM-wide events do not count in the context of a host CPU, and adding or removing such a context
/// writes no records.
#[test]
fn vm_wide_events_do_not_count_on_a_cpu() {
    let core = core();
    let session = core.session(0, SessionRole::Admin);
    let attr = Attr::counting(EventType::SIM, 1).with_inherit();
    core.add_vcpu(VcpuId(0), 1).unwrap();
    core.add_cpu(1).unwrap();
    let open = |attr| core.open(&session, attr, EventOpenTarget::Vm, None, OpenFlags::default());
    let first = open(attr).unwrap();
    assert_eq!(first.children(), 1, "the vCPU's");
    core.add_cpu(2).unwrap();
    assert_eq!(first.children(), 1);
    core.add_vcpu(VcpuId(1), 1).unwrap();
    assert_eq!(first.children(), 2);
    let cpu = VcpuId(PerfCore::FIRST_CPU.0 + 2);
    core.remove_vcpu(cpu).unwrap();
    assert!(core.vcpu(cpu).is_none());
}

#[test]
fn missing_permission_and_nonexistent_cpu_are_rejected() {
    let core = core();
    let [operator, admin] = [SessionRole::Operator, SessionRole::Admin].map(|role| core.session(0, role));
    let cpu = core.add_cpu(0).unwrap();
    assert!(matches!(core.add_cpu(0), Err(PerfEventOpenError::VcpuExists(_))));
    assert!(matches!(
        core.add_cpu(u32::MAX >> 2),
        Err(PerfEventOpenError::NoSuchCpu(_))
    ));
    assert!(matches!(
        core.add_cpu(u32::MAX),
        Err(PerfEventOpenError::NoSuchCpu(_))
    ));
    let attr = || Attr {
        exclude_kernel: false,
        ..Attr::counting(EventType::SOFTWARE, CPU_CLOCK)
    };
    let open = |session, cpu: &VcpuEventContext, attr| {
        core.open(
            session,
            attr,
            EventOpenTarget::Vcpu(cpu.id()),
            None,
            OpenFlags::default(),
        )
    };
    let error = open(&operator, &cpu, attr()).unwrap_err();
    assert!(matches!(error, PerfEventOpenError::CpuDenied), "{error}");
    assert_eq!(error.errno(), libc::EACCES);
    // A driver that counts vCPUs rejects a host CPU as a target.
    let error = open(&admin, &cpu, Attr::counting(EventType::SIM, 1)).unwrap_err();
    assert_eq!(error.errno(), libc::EINVAL);
    let none = core.add_cpu(1_000_000).unwrap();
    let error = open(&admin, &none, attr()).unwrap_err();
    let refused = [libc::EACCES, libc::EPERM].contains(&error.errno());
    assert!(refused || error.to_string().contains("does not have"), "{error}");
}
