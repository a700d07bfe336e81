//! Tracepoints of the host kernel on one thread.
//!
//! The kernel writes a record with the tracepoint's fields into the event's ring each time the
//! thread hits the tracepoint. [`crate::ring::RingReader::map_perf`] maps that ring.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use perf_event_open_sys::bindings as b;

use super::fd::{PerfFd, new_attr};

/// A tracepoint on one thread.
///
/// Each `PERF_RECORD_SAMPLE` contains the time (8 bytes, `CLOCK_MONOTONIC` in nanoseconds), the
/// length of the remaining data (4 bytes), and the tracepoint's fields as described by its `format`
/// file. The first field, `common_type` (2 bytes), is the tracepoint's ID.
#[derive(Debug)]
pub struct Tracepoint {
    fd: PerfFd,
}

impl Tracepoint {
    /// Opens a tracepoint on thread `tid` in the stopped state. `id` is the number in the
    /// tracepoint's `id` file in tracefs.
    ///
    /// # Errors
    /// Returns the error of `perf_event_open(2)`: `EACCES` or `EPERM` if the caller may not trace
    /// the kernel (`perf_event_paranoid` above -1 without `CAP_PERFMON`), and `ESRCH` if the thread
    /// does not exist.
    pub fn open(tid: i32, id: u64) -> io::Result<Self> {
        let mut attr = new_attr(b::PERF_TYPE_TRACEPOINT, id);
        attr.__bindgen_anon_1.sample_period = 1;
        attr.sample_type = u64::from(b::PERF_SAMPLE_TIME | b::PERF_SAMPLE_RAW);
        attr.set_disabled(1);
        attr.set_use_clockid(1);
        attr.clockid = libc::CLOCK_MONOTONIC;
        let fd = PerfFd::open(&mut attr, tid)?;
        Ok(Self { fd })
    }

    /// Redirects the records of this tracepoint to the mapped ring of `other`, a tracepoint on the
    /// same thread. The ring then contains the records of both tracepoints in chronological order.
    ///
    /// # Errors
    /// Returns the error of `ioctl(2)`.
    pub fn write_to(&self, other: &Self) -> io::Result<()> {
        self.fd.write_to(&other.fd)
    }

    /// Enables the tracepoint.
    ///
    /// # Errors
    /// Returns the error of `ioctl(2)`.
    pub fn enable(&self) -> io::Result<()> {
        self.fd.enable()
    }
}

impl AsFd for Tracepoint {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmu::host::fd::current_tid;
    use crate::ring::RingReader;

    /// If two tracepoints share a ring, the records of entering and leaving `getppid` appear in
    /// this order.
    #[test]
    fn two_tracepoints_write_to_one_ring_in_their_order() {
        let id = |name: &str| {
            let path = format!("/sys/kernel/tracing/events/raw_syscalls/{name}/id");
            let text = std::fs::read_to_string(path).ok()?;
            text.trim().parse().ok()
        };
        let (Some(enter), Some(exit)) = (id("sys_enter"), id("sys_exit")) else {
            return eprintln!("SKIP: no tracepoints here");
        };
        let open = |id| Tracepoint::open(current_tid(), id);
        let (first, second) = match (open(enter), open(exit)) {
            (Ok(first), Ok(second)) => (first, second),
            (Err(e), _) | (_, Err(e)) => return eprintln!("SKIP: this user may not trace: {e}"),
        };
        let mut ring = RingReader::map_perf(first.as_fd(), 8).unwrap();
        second.write_to(&first).unwrap();
        first.enable().unwrap();
        second.enable().unwrap();
        let _ = std::os::unix::process::parent_id();
        let (mut seen, mut before) = (Vec::new(), 0);
        while let Some(record) = ring.next_record().unwrap() {
            let body = record.body();
            let time = u64::from_le_bytes(*body.first_chunk().unwrap());
            assert!(time >= before);
            before = time;
            seen.push(u64::from(u16::from_le_bytes([body[12], body[13]])));
        }
        let asked = seen.windows(2).any(|pair| pair == [enter, exit]);
        assert!(asked, "{seen:?}, of {enter} and {exit}");
    }
}
