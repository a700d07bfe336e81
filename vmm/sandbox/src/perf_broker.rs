//! Broker process that opens perf events for one VM.
//!
//! | file | contents |
//! |---|---|
//! | `server` | the broker process, which validates requests and opens events |
//! | `attr` | allow-list of events |
//! | `protocol`, `datagram` | messages between VM and broker |
//!
//! With `CAP_PERFMON`, `perf_event_open(2)` can observe every process of the host, and a seccomp
//! filter cannot check the attributes of the event, which are passed by pointer. No thread of a VM
//! may therefore call it. Instead, the VM sends the attributes, the thread ID and the group leader
//! to the broker. The broker opens only events of permitted types on threads of that VM, and passes
//! the descriptor back. For all other operations, the VM uses the descriptor without the broker.
//! Open events are unaffected when the broker exits.

mod attr;
mod datagram;
mod protocol;
mod server;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::service::ServiceProcess;
use crate::start::SandboxError;
use crate::workers::{HelperProcessStartError, ProcessConfinement};
use crate::{SandboxedThreadKind, filter, lists};
use protocol::{MAX_REQUEST_BYTES, PerfRequest, REPLY_BYTES};
use server::BrokerClient;

/// Process name of the broker, as displayed by `ps`.
const NAME: &std::ffi::CStr = c"perf-broker";
/// Timeout for an answer from the broker. Opening an event takes a few microseconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Error returned when the broker did not open an event.
#[derive(Debug, thiserror::Error)]
pub enum PerfBrokerError {
    /// The broker or the kernel denied the request.
    #[error("the event is refused")]
    Refused(#[source] io::Error),
    /// The broker has exited or timed out, and no further events can be opened.
    #[error("the process that opens perf events has exited")]
    Gone(#[source] io::Error),
}

/// A connection to the perf event broker. The broker exits with the VM's process, or when this
/// value is dropped.
#[derive(Debug)]
pub struct PerfBroker {
    /// Connection to the broker, `None` after the broker has exited.
    connection: Mutex<Option<OwnedFd>>,
    signal: libc::c_int,
}

impl PerfBroker {
    /// Forks the broker from the calling process, which must be single-threaded. `signal` is the
    /// only signal that events opened by the broker can send. The broker calls `give_up` to drop
    /// all of its privileges except the right to open events.
    ///
    /// # Errors
    /// Returns a [`HelperProcessStartError`] if the process cannot be started or its filter cannot
    /// be created.
    pub fn start(
        confinement: ProcessConfinement,
        signal: libc::c_int,
        give_up: fn() -> bool,
    ) -> Result<Self, HelperProcessStartError> {
        let (ours, its) =
            datagram::pair(PATIENCE).map_err(|e| HelperProcessStartError::Os("socketpair", e))?;
        let pid = std::process::id();
        let client = BrokerClient {
            pid: pid.cast_signed(),
            signal,
        };
        let list = lists::of_perf_broker(pid, signal.unsigned_abs());
        let filters = confinement
            .otherwise()
            .map(|otherwise| filter::compile(&list, otherwise))
            .transpose()
            .map_err(|e| SandboxError::Compile(SandboxedThreadKind::Starter, e))?;
        let service = ServiceProcess {
            name: NAME,
            filters: filters.as_slice(),
            landlock: confinement.landlock,
            signals: true,
            give_up,
        };
        service
            .start(
                its,
                || (),
                |socket, ()| {
                    server::serve(&socket, client);
                    Ok(())
                },
            )
            .map_err(|e| HelperProcessStartError::Os("fork", e))?;
        Ok(Self {
            connection: Mutex::new(Some(ours)),
            signal,
        })
    }

    /// Returns the only signal that events of this broker can send.
    #[must_use]
    pub fn signal(&self) -> libc::c_int {
        self.signal
    }

    /// Opens an event on thread `tid` of this process, in the group of `leader` if given. When the
    /// event overflows, the kernel sends the broker's signal to thread `receiver`.
    ///
    /// # Errors
    /// Returns [`PerfBrokerError::Refused`] with `EPERM` if the event is not permitted, `ESRCH` if
    /// this process has no such thread, or the error of `perf_event_open(2)` or `fcntl(2)`. Returns
    /// [`PerfBrokerError::Gone`] if the broker has exited.
    pub fn open(
        &self,
        attr: &[u8],
        tid: i32,
        leader: Option<BorrowedFd<'_>>,
        receiver: Option<i32>,
    ) -> Result<OwnedFd, PerfBrokerError> {
        let request = PerfRequest::Open {
            tid,
            receiver: receiver.unwrap_or(0),
            attr,
        };
        let event = self.request(request, leader)?;
        // The kernel discards a passed descriptor if this process has reached its descriptor limit.
        event.ok_or_else(|| PerfBrokerError::Refused(io::Error::from_raw_os_error(libc::EMFILE)))
    }

    /// Makes overflows of `event` send the broker's signal to thread `receiver` of this process.
    ///
    /// # Errors
    /// Returns the same errors as [`PerfBroker::open`].
    pub fn set_signal(&self, event: BorrowedFd<'_>, receiver: i32) -> Result<(), PerfBrokerError> {
        self.request(PerfRequest::Signal { receiver }, Some(event))
            .map(drop)
    }

    fn request(
        &self,
        request: PerfRequest<'_>,
        passed: Option<BorrowedFd<'_>>,
    ) -> Result<Option<OwnedFd>, PerfBrokerError> {
        let mut buffer = [0; MAX_REQUEST_BYTES];
        let length = request
            .encode(&mut buffer)
            .ok_or_else(|| PerfBrokerError::Refused(io::Error::from_raw_os_error(libc::E2BIG)))?;
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = connection
            .as_ref()
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
            .and_then(|socket| {
                let socket = socket.as_fd();
                datagram::send(socket, &buffer[..length], passed)?;
                let mut reply = [0; REPLY_BYTES];
                match datagram::receive(socket, &mut reply)? {
                    (REPLY_BYTES, event) => Ok((i32::from_ne_bytes(reply), event)),
                    _ => Err(io::ErrorKind::UnexpectedEof.into()),
                }
            });
        match answer {
            Ok((0, event)) => Ok(event),
            Ok((errno, _)) => Err(PerfBrokerError::Refused(io::Error::from_raw_os_error(errno))),
            Err(e) => {
                // Close the connection, because a late answer would be mistaken for the answer to
                // another request.
                *connection = None;
                Err(PerfBrokerError::Gone(e))
            }
        }
    }
}
