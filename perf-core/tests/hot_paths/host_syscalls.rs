//! Tests of the number of system calls on the hot paths of the `host` driver, counted with ptrace.
//! Servicing an overflow takes no system call, or one if the period changes. A read takes one
//! system call if counters cannot be read from user space.
#![expect(unsafe_code, reason = "calls of the system")]

use std::sync::Arc;

use perf_core::pmu::host::HostPmu;
use perf_core::*;

use crate::common::memory::FreshPages;
use crate::common::thread::{burn, catch_signals, signals_of_this_thread, this_tid};
use crate::{calls, must};

const TASK_CLOCK: u64 = 1;
const PAGE_FAULTS: u64 = 2;

/// The calling thread as a vCPU with one guest event, and untouched memory whose first access
/// causes page faults.
struct HostFixture {
    _core: PerfCore,
    _session: Session,
    vcpu: Arc<VcpuEventContext>,
    event: EventHandle,
    fresh: FreshPages,
}

impl HostFixture {
    fn new(config: u64, period: u64) -> Self {
        let core = PerfCore::new(PerfCoreConfig::default());
        core.register(Arc::new(HostPmu::software(Some(catch_signals()))));
        let vcpu = core.add_vcpu(VcpuId(0), this_tid()).unwrap();
        let session = core.session(0, SessionRole::Guest);
        let attr = Attr {
            exclude_host: true,
            ..Attr::sampling(EventType::SOFTWARE, config, period)
        };
        let flags = OpenFlags::with_cookie(1);
        let event = core
            .open(&session, attr, EventOpenTarget::Vcpu(VcpuId(0)), None, flags)
            .unwrap();
        vcpu.sched_in();
        let mut scene = Self {
            _core: core,
            _session: session,
            vcpu,
            event,
            fresh: FreshPages::new(10_000),
        };
        // Causes the first overflow, so that all one-time work is done.
        match config {
            PAGE_FAULTS => scene.fault(2 * period as usize),
            _ => burn(2 * period),
        }
        assert!(scene.serve() > 0);
        scene
    }

    /// Takes `n` page faults on this thread, without a system call.
    fn fault(&mut self, n: usize) {
        self.fresh.fault(n);
    }

    fn serve(&self) -> u32 {
        let mut times = 0;
        self.vcpu
            .service_overflows(&mut UnavailableRegs, &mut |o| times += o.times);
        times
    }
}

#[test]
fn calls_are_counted() {
    let calls = calls(
        || (),
        |_| {
            // SAFETY: getppid takes no arguments.
            unsafe { libc::getppid() };
        },
    );
    assert_eq!(calls, [libc::SYS_getppid as u64]);
}

#[test]
fn overflow_with_the_same_period_makes_no_system_call() {
    let calls = calls(
        || HostFixture::new(PAGE_FAULTS, 100),
        |scene| {
            for _ in 0..20 {
                let before = signals_of_this_thread();
                scene.fault(100);
                must(signals_of_this_thread() > before);
                must(scene.serve() == 1);
            }
        },
    );
    assert!(calls.is_empty(), "{calls:?}");
}

/// A check for overflows makes no system call, even if no overflow occurred because the vCPU was
/// kicked for another reason.
#[test]
fn overflow_check_makes_no_system_call() {
    let calls = calls(
        || HostFixture::new(PAGE_FAULTS, 100),
        |scene| must(scene.serve() == 0),
    );
    assert!(calls.is_empty(), "{calls:?}");
}

/// A guest's PMI handler rewrites the counter, which changes the distance to the next overflow.
/// This takes one system call to read the count and one to set the period.
#[test]
fn rearmed_clock_reads_once_and_sets_period_once() {
    let calls = calls(
        || HostFixture::new(TASK_CLOCK, 1_000_000),
        |scene| must(scene.event.arm(3_000_000).is_ok()),
    );
    assert_eq!(calls, [libc::SYS_read as u64, libc::SYS_ioctl as u64]);
}

#[test]
fn read_makes_one_system_call() {
    let calls = calls(
        || HostFixture::new(PAGE_FAULTS, 100),
        |scene| must(scene.event.read().is_ok_and(|r| r.value > 0)),
    );
    assert_eq!(calls, [libc::SYS_read as u64]);
}
