//! Opens the host's perf events for a VM.
//!
//! The threads of a VM have no capability for counting and may not call `perf_event_open(2)`. A
//! separate process, the broker, opens perf events for them ([`sandbox::PerfBroker`]).
//!
//! The exception is a user who may count without a capability (`kernel.perf_event_paranoid` 1 or
//! less). A VM is not dumpable, so the kernel does not let another process of this user open events
//! on it. Each thread of the VM then opens the events on itself, also those that other threads
//! request (`remote_open.rs`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use perf_core::error_line;
use perf_core::pmu::host::{
    EventOpenRequest, HostEventOpener, HostEventTarget, OverflowSignal, SyscallOpener, counting_is_denied_to,
    set_event_opener,
};
use sandbox::{
    HelperProcessStartError, PerfBroker, PerfBrokerError, PerfEventAccess, ProcessConfinement, privileges,
};

use super::remote_open::{RemoteOpen, current_tid};

/// Opens host perf events for a VM, through the broker process or on the threads of the VM.
#[derive(Debug)]
pub struct VmEventOpener {
    broker: PerfBroker,
    counting: PerfEventAccess,
    /// Signal that makes a thread handle the request of another thread to open an event.
    kick_signal: i32,
    /// `true` if it was logged that the broker has exited.
    end_logged: AtomicBool,
}

impl VmEventOpener {
    /// Starts the broker process. Host events send `overflow_signal` to the vCPU thread. The
    /// handler of `kick_signal` must call `remote_open::open_in_handler`. The calling thread must
    /// be the only thread of the process.
    ///
    /// # Errors
    /// Returns a [`HelperProcessStartError`] if the broker cannot be started.
    pub fn start(
        confinement: ProcessConfinement,
        overflow_signal: i32,
        kick_signal: i32,
    ) -> Result<Self, HelperProcessStartError> {
        let give_up = privileges::drop_privileges_except_perfmon;
        let mut opener = Self {
            broker: PerfBroker::start(confinement, overflow_signal, give_up)?,
            counting: PerfEventAccess::Broker,
            kick_signal,
            end_logged: AtomicBool::new(false),
        };
        // The broker keeps this capability, and the kernel then opens events on every process
        // (Linux 5.10, which also introduced KVM's MSR filter). Asking the kernel takes 10 to 15 ms
        // on a host without perf events, because opening the first event waits for an RCU grace
        // period.
        if privileges::has_perfmon_capability() {
            return Ok(opener);
        }
        // Asks the kernel whether the broker can open events on this process once it is not
        // dumpable.
        let broker_is_denied = privileges::while_not_dumpable(|| counting_is_denied_to(&opener));
        let needs_capability =
            || privileges::is_denied_without_capabilities(|| counting_is_denied_to(&SyscallOpener));
        if broker_is_denied && !needs_capability() {
            opener.counting = PerfEventAccess::OwnThread;
        }
        Ok(opener)
    }

    /// Returns how the VM opens its perf events: through the broker, or on its own threads.
    #[must_use]
    pub fn counting(&self) -> PerfEventAccess {
        self.counting
    }

    /// Makes this process open all its perf events with `self`.
    pub fn install(self) {
        set_event_opener(self);
    }

    /// Returns the ID of the thread that receives `overflow`. Returns `EPERM` for a signal other
    /// than the overflow signal of vCPUs.
    fn receiver(&self, overflow: OverflowSignal) -> io::Result<i32> {
        if overflow.signal == self.broker.signal() {
            Ok(overflow.tid)
        } else {
            Err(io::Error::from_raw_os_error(libc::EPERM))
        }
    }

    /// Converts an error of the broker to that of perf_event_open(2), or to `BrokenPipe` if the
    /// broker has exited, which is logged once.
    fn refused(&self, error: PerfBrokerError) -> io::Error {
        match error {
            PerfBrokerError::Refused(source) => source,
            PerfBrokerError::Gone(source) => {
                if !self.end_logged.swap(true, Ordering::Relaxed) {
                    log::error!(
                        "the process that opens perf events (perf-broker) has exited: {}; open \
                        events continue, but no others can be opened until the VM is restarted",
                        error_line(&source)
                    );
                }
                io::Error::new(
                    io::ErrorKind::BrokenPipe,
                    "the process that opens perf events has ended; start the VM again",
                )
            }
        }
    }

    fn open_in_own_process(&self, request: &EventOpenRequest<'_>, tid: i32) -> io::Result<OwnedFd> {
        let own = EventOpenRequest {
            counted: HostEventTarget::Thread(0),
            overflow: None,
            ..*request
        };
        let event = if tid == current_tid() {
            SyscallOpener.open(&own)?
        } else {
            RemoteOpen::run(&own, tid, self.kick_signal)?
        };
        if let Some(overflow) = request.overflow {
            self.set_overflow_signal(event.as_fd(), overflow)?;
        }
        Ok(event)
    }
}

impl HostEventOpener for VmEventOpener {
    fn open(&self, request: &EventOpenRequest<'_>) -> io::Result<OwnedFd> {
        let tid = match request.counted {
            HostEventTarget::Thread(0) => current_tid(),
            HostEventTarget::Thread(tid) => tid,
            // A VM never counts a host CPU as a whole.
            HostEventTarget::Cpu(_) => return Err(io::Error::from_raw_os_error(libc::EPERM)),
        };
        if self.counting == PerfEventAccess::OwnThread {
            return self.open_in_own_process(request, tid);
        }
        let receiver = request
            .overflow
            .map(|overflow| self.receiver(overflow))
            .transpose()?;
        self.broker
            .open(request.attr, tid, request.leader, receiver)
            .map_err(|e| self.refused(e))
    }

    fn set_overflow_signal(&self, event: BorrowedFd<'_>, overflow: OverflowSignal) -> io::Result<()> {
        let receiver = self.receiver(overflow)?;
        self.broker
            .set_signal(event, receiver)
            .map_err(|e| self.refused(e))
    }
}
