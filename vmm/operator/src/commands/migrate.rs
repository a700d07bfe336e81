//! Moves a VM to another process of this host: `perfvisor ctl NAME migrate unix:PATH`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use control_api::client::Client;
use control_api::migration::{self, MigrationAddress, MigrationResult};
use control_api::peer;

use super::{one_line, ps};

/// Time limit for a waiting process to accept the connection.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for the answer of a VM that may be the one that has moved.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(2);

/// Error of moving a VM.
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
    #[error("{name} has not moved and goes on: {why}")]
    Failed { name: String, why: String },
    #[error(
        "the process that received {0} has ended without an answer; `perfvisor ps` shows where the VM runs"
    )]
    NoAnswer(String),
}

/// Returns a connection to the VM of `left` in the process to which it has moved, or `None` if there
/// is none. Only VMs of this user and of the user of the first process are asked: another user's
/// could claim to be this one.
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

/// Moves the VM of `client` to the process at `address`. Returns a message of success.
///
/// # Errors
/// Returns a [`MigrateError`]; the VM goes on, except after [`MigrateError::NoAnswer`], where that is
/// unknown.
pub(super) fn migrate(client: Client, address: &MigrationAddress) -> Result<String, MigrateError> {
    let path = address.path();
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
    let name = client.info().name.clone();
    let vm = client.into_stream();
    let result = migration::offer(&receiver, vm).map_err(failed)?;
    match result {
        None => Err(MigrateError::NoAnswer(name)),
        // The text comes from another process.
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
    }
}
