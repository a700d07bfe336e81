//! The operator's commands: those that speak to running VMs, and those that show what was recorded.

mod all;
pub mod annotate;
pub mod cp;
pub mod ctl;
pub mod diff;
pub mod exec;
pub mod exits;
pub mod files;
pub mod generate;
mod guest;
pub mod list;
mod output;
pub mod ps;
pub mod record;
pub mod stat;
pub mod top;
pub mod validate;

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError, REPLY_TIMEOUT};
use control_api::protocol::Opened;
use perf_core::ring::ReadError;

use crate::signals::StopSignals;
use crate::vendor::NamedError;
pub(crate) use output::{DONE, create_private, is_unread, written};
pub use output::{OutputError, one_line, print, say};

/// Why an operator's command did not do what it was asked, whichever command it is.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The VM refused, or could not be spoken to.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// No list of events.
    #[error(transparent)]
    Events(#[from] NamedError),
    /// No symbols from the files that were named.
    #[error(transparent)]
    Symbols(#[from] files::SymbolsError),
    /// What was printed is not complete.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// Signals cannot be waited for.
    #[error("the signals that end it")]
    Signals(#[source] io::Error),
    /// A file that was named.
    #[error("{}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: io::Error,
    },
    /// A file of ours cannot be made.
    #[error("{} cannot be written; name another with -o", path.display())]
    Create {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An event has no samples here.
    #[error("'{event}' cannot be sampled here: {why}")]
    NotSampled {
        /// The event.
        event: String,
        /// Why, in the VM's words.
        why: String,
    },
    /// Samples cannot be read.
    #[error("the ring of vCPU {vcpu}")]
    Ring {
        /// Whose.
        vcpu: u32,
        /// Why.
        #[source]
        source: ReadError,
    },
    /// Ctrl-C while the guest's kernel was looked for.
    #[error("interrupted before the first sample")]
    Interrupted,
    /// A fault of Perfvisor's own, in a thread of the command.
    #[error("perfvisor panicked {0}; please report this")]
    Panicked(String),
}

impl CommandError {
    /// For `map_err`: making the file at `path`.
    fn create(path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Create {
            path: path.to_owned(),
            source,
        }
    }

    /// For `map_err`: the file at `path`.
    fn file(path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File {
            path: path.to_owned(),
            source,
        }
    }
}

/// Connects to the VM whose control socket was named, else to that of this name, else to the only one.
fn connect(name: Option<&str>, socket: Option<&Path>) -> Result<Client, ClientError> {
    match socket {
        Some(path) => Client::connect_at(path, None, REPLY_TIMEOUT),
        None => Client::connect(name),
    }
}

/// That all events of a list have samples here.
fn all_sampled(opened: &[Opened]) -> Result<(), CommandError> {
    match opened.iter().find_map(|o| Some((o, o.unsupported.as_ref()?))) {
        None => Ok(()),
        Some((event, why)) => Err(CommandError::NotSampled {
            event: event.name.clone(),
            why: why.clone(),
        }),
    }
}

/// How long a command sleeps before it looks for Ctrl-C again.
const NAP: Duration = Duration::from_millis(20);

/// Why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    /// The time is over.
    Time,
    /// Ctrl-C or another signal to end.
    Signal,
}

/// Waits until `until`, or until a signal asks to end.
pub(crate) fn wait_until(until: Instant, signals: &StopSignals) -> Woken {
    loop {
        if signals.take().is_some() {
            return Woken::Signal;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Woken::Time;
        }
        std::thread::sleep(left.min(NAP));
    }
}
