//! `--all`: runs a command concurrently for each reachable VM of this host.

use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::ps::{self, VmSocket};
use super::{DONE, OperatorCommandError};
use crate::exit::ExitStatus;
use control_api::client::{Client, ClientError, REPLY_TIMEOUT};
use perf_core::error_line;

/// Calls `each` for every VM, on one thread per VM. A failure for one VM is reported and does not
/// affect the other VMs, but makes the command fail.
///
/// # Errors
/// Returns an error if there is no VM.
pub(super) fn for_each_vm<E: Error + From<ClientError>>(
    each: impl Fn(&VmSocket, Client) -> Result<ExitStatus, E> + Sync,
) -> Result<ExitStatus, OperatorCommandError> {
    let found = ps::all_users();
    if found.is_empty() {
        return Err(ClientError::Which(Vec::new()).into());
    }
    let failed = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for vm in &found {
            let one = || {
                let client = Client::connect_at(&vm.path, vm.owner, REPLY_TIMEOUT).map_err(E::from);
                match client.and_then(|client| each(vm, client)) {
                    Ok(DONE) => {}
                    Ok(_) => _ = failed.fetch_add(1, Ordering::Relaxed),
                    Err(e) => {
                        failed.fetch_add(1, Ordering::Relaxed);
                        log::warn!("{}: {}", vm.label(), error_line(&e));
                    }
                }
            };
            scope.spawn(one);
        }
    });
    match failed.into_inner() {
        0 => Ok(DONE),
        _ => Ok(ExitStatus::CheckFailed),
    }
}
