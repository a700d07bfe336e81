//! Helpers that the examples share: the calling thread as a vCPU, workloads, and a PMU with few
//! counters.
#![allow(dead_code, unsafe_code, reason = "each program uses its part")]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use perf_core::attr::{Attr, EventType};
use perf_core::pmu::host::HostPmu;
use perf_core::pmu::{Pmu, PmuCounterCapacity, PmuError, PmuEvent, PmuEventTarget};
use perf_core::time::Clock;
use perf_core::{CpuMode, SampleRegs};

/// `PERF_COUNT_SW_TASK_CLOCK`: CPU time of this thread, in nanoseconds.
pub const TASK_CLOCK: u64 = 1;
/// `PERF_COUNT_SW_PAGE_FAULTS`: number of page faults.
pub const PAGE_FAULTS: u64 = 2;
/// `PERF_COUNT_SW_CONTEXT_SWITCHES`: number of context switches.
pub const CONTEXT_SWITCHES: u64 = 3;

/// Returns the attributes of a counting event for software event `config` of the host kernel.
pub fn software(config: u64) -> Attr {
    Attr::counting(EventType::SOFTWARE, config)
}

/// Returns the ID of this thread.
pub fn tid() -> i32 {
    let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    link.file_name()
        .and_then(|name| name.to_str()?.parse().ok())
        .unwrap_or(0)
}

/// Registers that always report user mode. A VMM would read the vCPU's registers from KVM.
pub struct UserModeRegs;

impl SampleRegs for UserModeRegs {
    fn mode(&mut self) -> CpuMode {
        CpuMode::User
    }
    fn ip(&mut self) -> u64 {
        UserModeRegs::ip as *const () as u64
    }
}

/// The CPU time of the calling thread. The calling thread is the only vCPU, so this clock is
/// unaffected by other load on the machine.
#[derive(Debug)]
pub struct ThreadTimeClock;

impl Clock for ThreadTimeClock {
    fn now_ns(&self) -> u64 {
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the pointer is valid for the duration of the call.
        let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
        assert_eq!(result, 0, "every thread has a clock");
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_signal(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Installs a handler that counts overflow signals, and returns the signal number.
pub fn count_signals() -> i32 {
    let handler = on_signal as extern "C" fn(libc::c_int);
    // SAFETY: the handler only accesses an atomic.
    unsafe { libc::signal(libc::SIGUSR2, handler as usize) };
    libc::SIGUSR2
}

/// Returns the number of overflow signals received so far.
pub fn signals() -> u64 {
    SIGNALS.load(Ordering::Relaxed)
}

/// Touches `pages` pages of new memory, which causes as many page faults unless the kernel uses
/// huge pages.
pub fn touch(pages: usize) {
    let len = pages * 4096;
    // SAFETY: a fresh private mapping that is unmapped below, when nothing points to it any more.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        assert_ne!(at, libc::MAP_FAILED, "out of memory");
        for page in (0..len).step_by(4096) {
            at.cast::<u8>().add(page).write_volatile(1);
        }
        libc::munmap(at, len);
    }
}

/// Performs computations until the thread has used `time` more CPU time.
pub fn spin(time: Duration) {
    let end = ThreadTimeClock.now_ns() + time.as_nanos() as u64;
    while ThreadTimeClock.now_ns() < end {
        black_box((0..1000u64).sum::<u64>());
    }
}

/// A driver that limits the number of the host's software events that can be active, so that events
/// are multiplexed on any machine.
#[derive(Debug)]
pub struct LimitedPmu {
    pub host: HostPmu,
    pub slots: usize,
}

impl Pmu for LimitedPmu {
    fn name(&self) -> &'static str {
        "few"
    }
    fn supports_type(&self, ty: EventType) -> bool {
        self.host.supports_type(ty)
    }
    fn capacity(&self) -> PmuCounterCapacity {
        PmuCounterCapacity::counters(self.slots)
    }
    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        self.host.open(attr, target)
    }
}
