use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::registers::{IA32_PERF_GLOBAL_CTRL, IA32_PERFEVTSEL0, IA32_PMC0};
use vpmu::{CounterBackingPolicy, PmuModel};

use super::*;

/// Returns the event select value with which a counter counts `event`: event select 0xFF with
/// ENABLE, OS and USR.
fn selector(event: ParavirtualEvent) -> u64 {
    const SELECT: u64 = 0xff | 1 << 16 | 1 << 17 | 1 << 22;
    SELECT | u64::from(event.umask().0) << 8
}

/// Returns the PMU of a vCPU on this thread, which can count only events that the VMM adds.
fn pmu() -> VcpuPmu {
    pmu_with(CounterBackingPolicy::Auto)
}

fn pmu_with(policy: CounterBackingPolicy) -> VcpuPmu {
    let name = "intel-v2".parse().unwrap();
    let config = PmuConfig::new(
        PmuModel::resolve(name, None, None, &mut cpuid::read_host).unwrap(),
        policy,
    );
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
    let vm = VmPmu::new(
        config,
        &HostPerfCapabilities::run(),
        None,
        false,
        GuestSamplingContext::new(memory, None),
    );
    let mut pmu = Arc::new(vm).vcpu(0, 1_000_000);
    pmu.attach_to_current_thread().unwrap();
    pmu
}

fn write(pmu: &mut VcpuPmu, msr: u32, value: u64) {
    assert_eq!(pmu.write_msr(msr, value), MsrWriteOutcome::Done);
}

/// Reads counter 0 with RDPMC at CPL 0.
fn read(pmu: &mut VcpuPmu) -> Option<u64> {
    match pmu.rdpmc_at(0, 0, true) {
        MsrReadOutcome::Value(value) => Some(value),
        MsrReadOutcome::InjectGp => None,
    }
}

/// Programs counter 0 to count `event`, and reconciles the events as before an entry.
fn program(pmu: &mut VcpuPmu, event: ParavirtualEvent) {
    write(pmu, IA32_PERFEVTSEL0, selector(event));
    write(pmu, IA32_PERF_GLOBAL_CTRL, 1);
    pmu.reconcile();
}

#[test]
fn pmu_register_accesses_count_as_msr_exits() {
    let mut pmu = pmu();
    program(&mut pmu, ParavirtualEvent::MsrExits);
    assert_eq!(read(&mut pmu), Some(0));
    for _ in 0..5 {
        write(&mut pmu, IA32_PERF_GLOBAL_CTRL, 1);
        pmu.reconcile();
    }
    assert_eq!(read(&mut pmu), Some(5));
    // The RDMSR exit itself is counted, even if the RDMSR faults.
    assert_eq!(pmu.read_msr(IA32_PMC0), MsrReadOutcome::Value(6));
    assert_eq!(
        pmu.write_msr(IA32_PERF_GLOBAL_CTRL, 1 << 63),
        MsrWriteOutcome::InjectGp
    );
    assert_eq!(read(&mut pmu), Some(7));
    pmu.detach();
}

/// The counter of uncounted time advances while a counter is enabled whose event the host cannot
/// count. The counted time lies between the time from the first to the second of the guest's
/// register accesses and the time that includes these accesses. The counter stops while the other
/// counter is disabled.
#[test]
fn guest_reads_uncounted_time() {
    let mut pmu = pmu();
    let raw = 0xd1 | 1 << 8 | 1 << 16 | 1 << 17 | 1 << 22;
    program(&mut pmu, ParavirtualEvent::UncountedNs);
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(read(&mut pmu), Some(0), "its own counter is counted");
    let outer = Instant::now();
    write(&mut pmu, IA32_PERFEVTSEL0 + 1, raw);
    write(&mut pmu, IA32_PERF_GLOBAL_CTRL, 3);
    pmu.reconcile();
    let inner = Instant::now();
    std::thread::sleep(Duration::from_millis(20));
    let inner_ns = inner.elapsed().as_nanos() as u64;
    let lasted = read(&mut pmu).unwrap();
    let outer_ns = outer.elapsed().as_nanos() as u64;
    assert!(
        (inner_ns..=outer_ns).contains(&lasted),
        "{inner_ns} <= {lasted} <= {outer_ns}"
    );
    write(&mut pmu, IA32_PERF_GLOBAL_CTRL, 1);
    pmu.reconcile();
    let stopped = read(&mut pmu).unwrap();
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(read(&mut pmu), Some(stopped));
    assert_eq!(pmu.uncounted().map(|(_, times)| times), Some(1));
    assert_eq!(pmu.retry_in(), None, "there is nobody to try again");
    let views = pmu.vpmu.counters_view(&mut pmu.attached.as_mut().unwrap().events);
    assert!(views[0].counting && views[0].uncounted_ns == 0);
    assert!(!views[1].counting && views[1].uncounted_ns >= inner_ns);
    pmu.detach();
}

/// If the outcome of a single step is unknown, the duration of the step is uncounted time, so that
/// the guest can detect the gap in its counts. Other steps, and steps that no counter needs, are
/// not uncounted time.
#[test]
fn lost_step_is_uncounted_time() {
    const INSTRUCTIONS: u64 = 0xc0 | 1 << 16 | 1 << 17 | 1 << 22;
    let mut pmu = pmu_with(CounterBackingPolicy::Exact);
    program(&mut pmu, ParavirtualEvent::UncountedNs);
    pmu.step_began = Some(Instant::now());
    pmu.feed_step(&SingleStepOutcome {
        lost: true,
        ..SingleStepOutcome::default()
    });
    assert_eq!(read(&mut pmu), Some(0), "a step for a branch stack has no gap");
    write(&mut pmu, IA32_PERFEVTSEL0 + 1, INSTRUCTIONS);
    write(&mut pmu, IA32_PERF_GLOBAL_CTRL, 3);
    pmu.reconcile();
    pmu.step_began = Some(Instant::now());
    std::thread::sleep(Duration::from_millis(2));
    pmu.feed_step(&SingleStepOutcome::default());
    assert_eq!(read(&mut pmu), Some(0), "an explained step has no gap");
    pmu.step_began = Some(Instant::now());
    std::thread::sleep(Duration::from_millis(2));
    pmu.feed_step(&SingleStepOutcome {
        lost: true,
        ..SingleStepOutcome::default()
    });
    let lost = read(&mut pmu).unwrap();
    assert!(lost >= 2_000_000, "{lost}");
    assert_eq!(pmu.step_began, None);
    pmu.detach();
}

/// An overflow that no signal has announced and that a read of the counter reveals is counted, too.
#[test]
fn overflow_found_by_read_is_counted() {
    let mut pmu = pmu();
    program(&mut pmu, ParavirtualEvent::MsrExits);
    write(&mut pmu, IA32_PMC0, u64::from(u32::MAX));
    pmu.reconcile();
    assert_eq!(pmu.overflow_count(), 0);
    // The read is an exit, which the counter counts.
    assert_eq!(pmu.read_msr(IA32_PMC0), MsrReadOutcome::Value(0));
    assert_eq!(pmu.overflow_count(), 1);
    pmu.detach();
}

/// A counter of stolen time advances while the thread waits for a busy CPU. It stops when the guest
/// selects another event for the counter.
#[test]
fn stolen_time_is_counted_after_wrmsr() {
    let mut pmu = pmu();
    assert!(pmu.attached.as_mut().unwrap().steal.advance().is_none());
    program(&mut pmu, ParavirtualEvent::StealNs);
    assert!(pmu.attached.as_mut().unwrap().steal.advance().is_some());
    program(&mut pmu, ParavirtualEvent::MsrExits);
    assert!(pmu.attached.as_mut().unwrap().steal.advance().is_none());
    pmu.detach();
}
