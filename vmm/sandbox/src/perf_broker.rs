//! The broker of perf events: a process that holds the right to open them, for one VM.
//!
//! | file | story |
//! |---|---|
//! | `server` | the process: it checks each request and opens the event |
//! | `attr` | which events a VM may have |
//! | `protocol`, `datagram` | the messages between both |
//!
//! `perf_event_open(2)` with `CAP_PERFMON` reaches every process of the host: its attributes are behind a
//! pointer, where no seccomp filter sees them. So no thread of a VM may call it. The VM sends the attributes,
//! the thread and the group's leader to this process, which opens the event only if it is of a kind that a VM
//! needs and counts a thread of that VM, and passes the descriptor back. Everything else is done by the
//! descriptor, without the broker. A broker that ends leaves these as they are.

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
use crate::workers::{Confinement, WorkersError};
use crate::{ThreadKind, filter, lists};
use protocol::{MAX_REQUEST_BYTES, REPLY_BYTES, Request};
use server::Client;

/// The name that `ps` shows.
const NAME: &std::ffi::CStr = c"perf-broker";
/// The longest time that the broker may take to answer. An open takes some microseconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why the broker opened no event.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The broker or the kernel refuses the request.
    #[error("the event is refused")]
    Refused(#[source] io::Error),
    /// The broker has ended or does not answer, and opens no event any more.
    #[error("the process that opens perf events has ended")]
    Gone(#[source] io::Error),
}

/// The connection to a broker. The broker ends with the VM's process, or when this is dropped.
#[derive(Debug)]
pub struct PerfBroker {
    /// `None`: the broker has ended.
    connection: Mutex<Option<OwnedFd>>,
    signal: libc::c_int,
}

impl PerfBroker {
    /// Starts the broker of the calling process, which must have one thread. `signal` is the only signal that
    /// its events can send. `give_up` drops all rights of the broker but the right to open events.
    ///
    /// # Errors
    /// [`WorkersError`].
    pub fn start(
        confinement: Confinement,
        signal: libc::c_int,
        give_up: fn() -> bool,
    ) -> Result<Self, WorkersError> {
        let (ours, its) = datagram::pair(PATIENCE).map_err(|e| WorkersError::Os("socketpair", e))?;
        let pid = std::process::id();
        let client = Client {
            pid: pid.cast_signed(),
            signal,
        };
        let list = lists::of_perf_broker(pid, signal.unsigned_abs());
        let filters = confinement
            .otherwise()
            .map(|otherwise| filter::compile(&list, otherwise))
            .transpose()
            .map_err(|e| SandboxError::Compile(ThreadKind::Starter, e))?;
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
            .map_err(|e| WorkersError::Os("fork", e))?;
        Ok(Self {
            connection: Mutex::new(Some(ours)),
            signal,
        })
    }

    /// The only signal that events of this broker can send.
    #[must_use]
    pub fn signal(&self) -> libc::c_int {
        self.signal
    }

    /// Opens an event on thread `tid` of this process, in `leader`'s group if there is one. Its overflows
    /// send the broker's signal to thread `receiver`.
    ///
    /// # Errors
    /// [`BrokerError`]. `EPERM`: no VM may have such an event; `ESRCH`: this process has no such thread;
    /// otherwise the error of `perf_event_open(2)` or `fcntl(2)`.
    pub fn open(
        &self,
        attr: &[u8],
        tid: i32,
        leader: Option<BorrowedFd<'_>>,
        receiver: Option<i32>,
    ) -> Result<OwnedFd, BrokerError> {
        let request = Request::Open {
            tid,
            receiver: receiver.unwrap_or(0),
            attr,
        };
        let event = self.ask(request, leader)?;
        // The kernel drops a passed descriptor if this process has no room for one more.
        event.ok_or_else(|| BrokerError::Refused(io::Error::from_raw_os_error(libc::EMFILE)))
    }

    /// Makes each overflow of `event` send the broker's signal to thread `receiver` of this process.
    ///
    /// # Errors
    /// As [`PerfBroker::open`].
    pub fn set_signal(&self, event: BorrowedFd<'_>, receiver: i32) -> Result<(), BrokerError> {
        self.ask(Request::Signal { receiver }, Some(event)).map(drop)
    }

    fn ask(
        &self,
        request: Request<'_>,
        passed: Option<BorrowedFd<'_>>,
    ) -> Result<Option<OwnedFd>, BrokerError> {
        let mut buffer = [0; MAX_REQUEST_BYTES];
        let length = request
            .encode(&mut buffer)
            .ok_or_else(|| BrokerError::Refused(io::Error::from_raw_os_error(libc::E2BIG)))?;
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
            Ok((errno, _)) => Err(BrokerError::Refused(io::Error::from_raw_os_error(errno))),
            Err(e) => {
                // A later answer would be taken for that of another request.
                *connection = None;
                Err(BrokerError::Gone(e))
            }
        }
    }
}
