//! Operator commands for running VMs and for recordings.
//!
//! Each command is a function that takes a type `…Args`, whose doc comments are the help texts. The
//! commands print and log for a person; a program uses [`crate::session`] instead.

mod all;
pub mod annotate;
pub mod convert;
mod countable;
pub mod cp;
pub mod ctl;
pub mod diff;
pub mod exec;
pub mod exits;
pub mod files;
mod guest;
mod limits;
pub mod list;
mod migrate;
mod output;
pub mod ps;
pub mod record;
pub mod report;
mod select;
pub mod snapshot;
pub mod stat;
pub mod top;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use control_api::client::{Client, ClientError, REPLY_TIMEOUT};

use crate::sampling::SessionError;
use crate::signals::StopSignals;
use crate::vendor::EventNameError;
pub use output::{CommandOutputError, DONE, one_line, print, print_stderr};
pub(crate) use output::{create_private, is_reader_closed, written};

/// Errors common to several operator commands.
#[derive(Debug, thiserror::Error)]
pub enum OperatorCommandError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Events(#[from] EventNameError),
    #[error(transparent)]
    Symbols(#[from] files::SymbolLoadError),
    #[error(transparent)]
    Output(#[from] CommandOutputError),
    #[error("signal handling")]
    Signals(#[source] io::Error),
    #[error("{}", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot write {}; choose another file with -o", path.display())]
    Create {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Sampling(#[from] SessionError),
    #[error("the context switches of vCPU {vcpu}")]
    SwitchRing {
        vcpu: u32,
        #[source]
        source: std::io::Error,
    },
    #[error("interrupted before the first sample")]
    Interrupted,
    #[error("--cgroup {0}: no such control group below /sys/fs/cgroup")]
    NoCgroup(String),
    #[error("--cgroup {0}: no VM that can be reached runs in this control group")]
    NoVmInCgroup(String),
    #[error("perfvisor panicked {0}; please report this")]
    Panicked(String),
}

impl OperatorCommandError {
    /// Returns a `map_err` function for creating the file at `path`.
    pub fn create(path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Create {
            path: path.to_owned(),
            source,
        }
    }

    /// Returns a `map_err` function for reading the file at `path`.
    pub fn file(path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File {
            path: path.to_owned(),
            source,
        }
    }
}

/// Connects to the VM whose control socket is `socket`. Without a socket, connects to the VM with
/// the given name or process ID (`pid:PID`) or, if there is no name either, to the only VM.
fn connect(name: Option<&str>, socket: Option<&Path>) -> Result<Client, ClientError> {
    match socket {
        Some(path) => Client::connect_at(path, None, REPLY_TIMEOUT),
        None => match name.and_then(select::pid_of_name) {
            Some(pid) => select::connect_by_pid(pid),
            None => Client::connect(name),
        },
    }
}

/// Interval of polls for events without a descriptor.
const NAP: Duration = Duration::from_millis(20);

/// Reason a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitResult {
    /// The deadline passed.
    Time,
    /// Ctrl-C or another stop signal arrived.
    Signal,
    /// The VM has closed the connection.
    HungUp,
}

/// Waits until the deadline or a stop signal.
pub(crate) fn wait_until(until: Instant, signals: &StopSignals) -> WaitResult {
    wait_with_vm(until, signals, None)
}

/// Waits until the deadline, a stop signal or, if `vm` is the connection to a VM, until the VM has
/// closed this connection.
pub(crate) fn wait_with_vm(until: Instant, signals: &StopSignals, vm: Option<&Client>) -> WaitResult {
    loop {
        if signals.take().is_some() {
            return WaitResult::Signal;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return WaitResult::Time;
        }
        let mut polled: Vec<PollFd<'_>> = vm
            .map(|vm| PollFd::new(vm, PollFlags::RDHUP))
            .into_iter()
            .collect();
        polled.push(PollFd::new(signals, PollFlags::IN));
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) if vm.is_some() && polled[0].revents().intersects(HUNG_UP) => return WaitResult::HungUp,
            Ok(_) | Err(Errno::INTR) => {}
            // No descriptors can be polled for lack of memory.
            Err(_) => std::thread::sleep(left.min(NAP)),
        }
    }
}

/// Poll results of a connection that the peer has closed.
const HUNG_UP: PollFlags = PollFlags::RDHUP.union(PollFlags::HUP);
