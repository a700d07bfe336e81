//! Context switches of a vCPU's thread, recorded by the host kernel when the host preempts a vCPU
//! and when the vCPU waits.
//!
//! [`ThreadSwitches`] is opened in the VMM. Its file descriptor may be sent to another process,
//! which maps the ring with [`ThreadSwitchRing`].

use std::os::fd::{AsFd, BorrowedFd};

use perf_event_open_sys::bindings as b;

use super::HostPmu;
use super::fd::{PerfFd, new_attr};
use super::guest_ring::{HostRing, HostRingRecord};
use crate::pmu::PmuError;

/// A host perf event that records the context switches of a thread in its ring and counts nothing.
#[derive(Debug)]
pub struct ThreadSwitches {
    fd: PerfFd,
}

impl ThreadSwitches {
    /// Opens an enabled event for thread `tid`.
    ///
    /// # Errors
    /// Returns a [`PmuError`], for example with `EACCES` if `perf_event_paranoid` denies the event.
    pub fn open(tid: i32) -> Result<Self, PmuError> {
        let mut attr = new_attr(b::PERF_TYPE_SOFTWARE, u64::from(b::PERF_COUNT_SW_DUMMY));
        attr.sample_type = u64::from(b::PERF_SAMPLE_TIME);
        attr.set_sample_id_all(1);
        attr.set_context_switch(1);
        attr.set_exclude_kernel(1);
        attr.set_use_clockid(1);
        attr.clockid = libc::CLOCK_MONOTONIC;
        let fd = PerfFd::open(&mut attr, tid).map_err(|e| HostPmu::open_error(e, false))?;
        Ok(Self { fd })
    }
}

impl AsFd for ThreadSwitches {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Type of a context switch of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadSwitchKind {
    /// The thread starts to run again.
    In,
    /// The thread stops running because it waits, for example for an interrupt while the guest is
    /// halted.
    Blocked,
    /// The thread stops running because the host preempts it. The time until it runs again is
    /// stolen from the guest.
    Preempted,
}

/// A context switch of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadSwitch {
    /// Time of the context switch on `CLOCK_MONOTONIC`, in nanoseconds.
    pub time_ns: u64,
    /// Type of the context switch.
    pub kind: ThreadSwitchKind,
}

/// The mapped ring of a [`ThreadSwitches`] event.
pub type ThreadSwitchRing = HostRing<ThreadSwitch>;

impl HostRingRecord for ThreadSwitch {
    fn decode(ty: u32, misc: u32, words: &[u64]) -> Option<Self> {
        let (b::PERF_RECORD_SWITCH, &[time_ns, ..]) = (ty, words) else {
            return None;
        };
        let is = |bit: u32| misc & bit != 0;
        let kind = if !is(b::PERF_RECORD_MISC_SWITCH_OUT) {
            ThreadSwitchKind::In
        } else if is(b::PERF_RECORD_MISC_SWITCH_OUT_PREEMPT) {
            ThreadSwitchKind::Preempted
        } else {
            ThreadSwitchKind::Blocked
        };
        Some(Self { time_ns, kind })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::pmu::host::HostRingStats;
    use crate::pmu::host::fd::current_tid;

    /// Each sleep of a thread is recorded as a [`ThreadSwitchKind::Blocked`] switch, followed by a
    /// [`ThreadSwitchKind::In`] switch.
    #[test]
    fn sleeps_of_a_thread_are_switches_that_block() {
        const SLEEPS: usize = 5;
        let switches = match ThreadSwitches::open(current_tid()) {
            Ok(switches) => switches,
            Err(e) => return eprintln!("SKIP: no context switch records here: {e}"),
        };
        let fd = switches.as_fd().try_clone_to_owned().unwrap();
        let mut ring = ThreadSwitchRing::map(fd, 3).unwrap();
        for _ in 0..SLEEPS {
            thread::sleep(Duration::from_millis(1));
        }
        let mut seen = Vec::new();
        assert_eq!(ring.drain(|switch| seen.push(switch)), HostRingStats::default());
        let blocked = seen.iter().filter(|s| s.kind == ThreadSwitchKind::Blocked);
        assert!(blocked.count() >= SLEEPS, "{seen:?}");
        assert!(seen.is_sorted_by_key(|s| s.time_ns));
        for pair in seen.windows(2) {
            let out = pair.iter().filter(|s| s.kind != ThreadSwitchKind::In).count();
            assert_eq!(out, 1, "switches alternate: {pair:?}");
        }
    }
}
