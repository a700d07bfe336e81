//! Tracepoints of the host's kernel on one thread, with what each says.
//!
//! The kernel writes a record into the event's ring each time the thread passes the tracepoint.
//! [`crate::ring::RingReader::map_perf`] maps that ring.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use perf_event_open_sys::bindings as b;

use super::fd::{PerfFd, new_attr};

/// A tracepoint on one thread. Each `PERF_RECORD_SAMPLE` has the time (`CLOCK_MONOTONIC`, ns; 8 bytes), the
/// length of what follows (4 bytes), and the tracepoint's fields, as the `format` file of the tracepoint
/// describes them. The first of these, `common_type` (2 bytes), is the tracepoint's number.
#[derive(Debug)]
pub struct Tracepoint {
    fd: PerfFd,
}

impl Tracepoint {
    /// Tracepoint `id` (the `id` file of the tracepoint in tracefs) on thread `tid`. Stopped.
    ///
    /// # Errors
    /// That of `perf_event_open(2)`: `EACCES` or `EPERM` where the caller may not trace the kernel
    /// (`perf_event_paranoid` above -1 without `CAP_PERFMON`), `ESRCH` where there is no such thread.
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

    /// Has the records of this one written to the ring of `other`, a tracepoint on the same thread, whose
    /// ring is mapped. So they are in the order in which they came.
    ///
    /// # Errors
    /// The error of `ioctl(2)`.
    pub fn write_to(&self, other: &Self) -> io::Result<()> {
        self.fd.write_to(&other.fd)
    }

    /// Starts it.
    ///
    /// # Errors
    /// The error of `ioctl(2)`.
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

    /// A thread that asks for its parent's id is seen to ask and to get its answer, in that order, in one
    /// ring.
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
