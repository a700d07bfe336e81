//! How a VM opens perf events of the host.
//!
//! No thread of a VM has the capability that counting takes, nor may call `perf_event_open(2)`: the
//! broker, a process of its own, opens events for it ([`sandbox::PerfBroker`]). Where the user may
//! count without a capability (`kernel.perf_event_paranoid` 1 or less), the kernel lets no other
//! process of that user open events on a VM, which is not dumpable. There each thread opens its own
//! events, on itself only, and an event of another thread is opened by that thread
//! (`remote_open.rs`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use perf_core::error_line;
use perf_core::pmu::host::{
    Counted, DirectOpener, EventOpener, OpenRequest, OverflowSignal, counting_is_denied_to, set_event_opener,
};
use sandbox::{BrokerError, Confinement, Counting, PerfBroker, WorkersError};

use super::remote_open::{RemoteOpen, current_tid};
use crate::privileges;

/// The opener of a VM's perf events.
#[derive(Debug)]
pub struct VmEventOpener {
    broker: PerfBroker,
    counting: Counting,
    /// The signal that makes a thread look for a request of another one.
    kick_signal: i32,
    /// The end of the broker has been logged.
    end_logged: AtomicBool,
}

impl VmEventOpener {
    /// Starts the broker. Events send `overflow_signal`, and the handler of `kick_signal` calls
    /// `remote_open::open_in_handler`. No thread but the calling one may exist yet.
    ///
    /// # Errors
    /// [`WorkersError`].
    pub fn start(
        confinement: Confinement,
        overflow_signal: i32,
        kick_signal: i32,
    ) -> Result<Self, WorkersError> {
        let give_up = privileges::give_up_all_but_counting;
        let mut opener = Self {
            broker: PerfBroker::start(confinement, overflow_signal, give_up)?,
            counting: Counting::Broker,
            kick_signal,
            end_logged: AtomicBool::new(false),
        };
        // The kernel's own answer: whether the broker reaches this process as it will be.
        let broker_is_denied = privileges::while_not_dumpable(|| counting_is_denied_to(&opener));
        if broker_is_denied && !privileges::counting_takes_a_capability() {
            opener.counting = Counting::OwnThread;
        }
        Ok(opener)
    }

    /// Which threads of the VM open events.
    #[must_use]
    pub fn counting(&self) -> Counting {
        self.counting
    }

    /// Makes this process open all its perf events this way from now on.
    pub fn install(self) {
        set_event_opener(self);
    }

    /// The receiver of an overflow signal, which can only be the one of vCPUs.
    fn receiver(&self, overflow: OverflowSignal) -> io::Result<i32> {
        if overflow.signal == self.broker.signal() {
            Ok(overflow.tid)
        } else {
            Err(io::Error::from_raw_os_error(libc::EPERM))
        }
    }

    /// The error of a request, as its system call's would be. Logs the end of the broker once.
    fn refused(&self, error: BrokerError) -> io::Error {
        match error {
            BrokerError::Refused(source) => source,
            BrokerError::Gone(source) => {
                if !self.end_logged.swap(true, Ordering::Relaxed) {
                    log::error!(
                        "the process that opens perf events (perf-broker) has ended: {}: events that are open go \
                         on, and no other can be opened until the VM is started again",
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

    fn open_in_own_process(&self, request: &OpenRequest<'_>, tid: i32) -> io::Result<OwnedFd> {
        let own = OpenRequest {
            counted: Counted::Thread(0),
            overflow: None,
            ..*request
        };
        let event = if tid == current_tid() {
            DirectOpener.open(&own)?
        } else {
            RemoteOpen::run(&own, tid, self.kick_signal)?
        };
        if let Some(overflow) = request.overflow {
            self.set_overflow_signal(event.as_fd(), overflow)?;
        }
        Ok(event)
    }
}

impl EventOpener for VmEventOpener {
    fn open(&self, request: &OpenRequest<'_>) -> io::Result<OwnedFd> {
        let tid = match request.counted {
            Counted::Thread(0) => current_tid(),
            Counted::Thread(tid) => tid,
            // A VM counts no CPU of the host as a whole.
            Counted::Cpu(_) => return Err(io::Error::from_raw_os_error(libc::EPERM)),
        };
        if self.counting == Counting::OwnThread {
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
