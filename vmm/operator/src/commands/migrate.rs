//! Moves a VM to another process on this host (`perfvisor ctl NAME migrate unix:PATH`) or to
//! another host ([`stream`]).

mod stream;

use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use control_api::client::Client;
use control_api::migration::{self, MigrationAddress, MigrationResult};
use control_api::peer;
use perf_core::error_line;
use stream::{DowntimeLimit, MigrationSendFailure, SendVmError};

use super::{one_line, ps};

/// Timeout for the destination process to accept the connection.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout for the reply of each VM that is queried in the search for a VM that has moved.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);

/// Error returned when a VM cannot be moved.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    #[error(
        "unix:{}: no process waits for a VM; start one with `perfvisor run --incoming unix:{}`",
        .0.display(), .0.display()
    )]
    NobodyWaits(PathBuf),
    #[error("unix:{}", path.display())]
    Socket {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("fd:{number}: it must be an inherited descriptor of a connected stream socket")]
    Inherited {
        number: i32,
        #[source]
        source: io::Error,
    },
    #[error(
        "--downtime and --force: a VM that moves within this host is paused while memory is copied; add --stream, or omit them"
    )]
    NoStream,
    #[error("{name} has not moved and goes on: {why}")]
    Failed { name: String, why: String },
    #[error(
        "{name} may run at its destination, and is paused here: {why}; if it does not run there, `perfvisor \
        ctl {name} resume` continues it, otherwise `perfvisor ctl {name} stop` ends it"
    )]
    Undecided { name: String, why: String },
    #[error(
        "the process that received {0} has ended without an answer; `perfvisor ps` shows where the VM runs"
    )]
    NoAnswer(String),
}

/// Finds the process to which a VM has moved, and connects to it. `left` is the connection to the
/// source process. Returns `None` if no such process is found.
///
/// Only VMs of this user and of the user of the source process are queried, because another user's
/// VM could claim to be the VM that has moved.
pub(super) fn find_moved(left: &Client) -> Option<Client> {
    let users = [Some(peer::own_uid()), left.peer_uid().ok()];
    let left = left.info();
    let is_moved = |client: &Client| {
        let from = client.info().moved_from.as_ref();
        from.is_some_and(|from| from.pid == left.pid && from.name == left.name)
    };
    let connect = |vm: ps::VmSocket| Client::connect_at(&vm.path, vm.owner, SEARCH_TIMEOUT).ok();
    let found = ps::everywhere_quietly().into_iter();
    let own = found.filter(|vm| users.contains(&vm.owner));
    own.filter_map(connect).find(is_moved)
}

/// Default limit on the time for which a VM may be paused.
const DEFAULT_DOWNTIME: Duration = Duration::from_millis(300);

/// Options of a migration.
#[derive(Clone, Copy, Debug)]
pub(super) struct MigrateOptions {
    pub(super) stream: bool,
    pub(super) downtime: Option<Duration>,
    pub(super) force: bool,
}

/// Moves the VM of `client` to the process at `address`. Returns a success message.
///
/// # Errors
/// Returns a [`MigrateError`]. After [`MigrateError::NoAnswer`] and [`MigrateError::Undecided`], it
/// is unknown which process runs the VM. After any other error, the VM continues in the source
/// process.
pub(super) fn migrate(
    client: Client,
    address: &MigrationAddress,
    options: MigrateOptions,
) -> Result<String, MigrateError> {
    let path = match address {
        MigrationAddress::Unix(path) => path,
        MigrationAddress::Fd(number) => {
            let socket = peer::inherited_stream(*number).map_err(|source| MigrateError::Inherited {
                number: *number,
                source,
            })?;
            return send(client, &socket, options);
        }
    };
    if !options.stream && (options.force || options.downtime.is_some()) {
        return Err(MigrateError::NoStream);
    }
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            MigrateError::NobodyWaits(path.to_owned())
        }
        _ => MigrateError::Socket {
            path: path.to_owned(),
            source,
        },
    };
    let receiver = peer::connect_within(path, ACCEPT_TIMEOUT).map_err(failed)?;
    if options.stream {
        return send(client, &receiver, options);
    }
    hand_over(client, &receiver).map_err(failed)?
}

/// Moves the VM of `client` to the process at the other end of `receiver`, by passing the
/// connection of `client` to that process.
fn hand_over(client: Client, receiver: &UnixStream) -> io::Result<Result<String, MigrateError>> {
    let name = client.info().name.clone();
    let result = migration::offer(receiver, client.into_stream())?;
    Ok(match result {
        None => Err(MigrateError::NoAnswer(name)),
        // Another process wrote `why`, so control characters are removed.
        Some(MigrationResult::Failed(why)) => Err(MigrateError::Failed {
            name,
            why: one_line(&why),
        }),
        Some(MigrationResult::Moved(moved)) => Ok(format!(
            "{name}: runs as {} in process {}; it was paused for {:.1} ms\n",
            one_line(&moved.name),
            moved.pid,
            Duration::from_nanos(moved.downtime_ns).as_secs_f64() * 1e3
        )),
    })
}

/// Sends the VM of `client` as a byte stream to the process at the other end of `socket`.
fn send(mut client: Client, socket: &UnixStream, options: MigrateOptions) -> Result<String, MigrateError> {
    let name = client.info().name.clone();
    let limit = DowntimeLimit {
        downtime: options.downtime.unwrap_or(DEFAULT_DOWNTIME),
        force: options.force,
    };
    let sent = stream::send_vm(&mut client, socket, limit).map_err(|failure| {
        // Another host may have written the message, so control characters are removed.
        let line = |error: &SendVmError| one_line(&error_line(error));
        let name = name.clone();
        match &failure {
            MigrationSendFailure::Stays(error) => MigrateError::Failed {
                name,
                why: line(error),
            },
            MigrationSendFailure::Undecided(error) => MigrateError::Undecided {
                name,
                why: line(error),
            },
        }
    })?;
    if let Some(error) = &sent.left_over {
        log::warn!(
            "{name} is paused here and has not ended: {}; end it with `perfvisor ctl {name} stop`",
            error_line(error)
        );
    }
    Ok(format!(
        "{name}: runs as {} in process {} of its host; it was paused for {:.1} ms; {} KiB of memory sent in {} rounds and {:.2} s\n",
        one_line(&sent.arrival.name),
        sent.arrival.pid,
        sent.downtime.as_secs_f64() * 1e3,
        sent.bytes >> 10,
        sent.rounds,
        sent.duration.as_secs_f64()
    ))
}
