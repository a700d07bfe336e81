//! `--jail`: when the process becomes another user, leaves the host's network, and loses sight of its files.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use perf_core::pmu::host::counting_is_denied;
use perfvisor_vmm::vm::VmConfig;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use sandbox::{Inside, Jail, JailError};

use super::RunError;
use super::files::{self, PROC};
use crate::cli::RunArgs;

/// Where a service manager is told that the VM runs: a path, or a name of the network's (`@...`), which a
/// jail does not reach.
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// How long threads may take to end.
const LAST_MOMENTS: Duration = Duration::from_secs(5);

/// Becomes the user that the jail is to have, if it names one. No thread may exist yet.
///
/// # Errors
/// [`RunError::Jail`].
pub(super) fn become_user(args: &RunArgs) -> Result<(), RunError> {
    let Some(uid) = args.jail.and_then(|jail| jail.uid) else {
        return Ok(());
    };
    let gid = args.jail.and_then(|jail| jail.gid);
    sandbox::become_user(uid, gid.unwrap_or(uid)).map_err(RunError::Jail)
}

/// Gives the process namespaces of its own, if it is to be jailed. No thread may exist yet.
///
/// # Errors
/// [`RunError::Jail`]; [`RunError::JailDoesNotCount`] if its guest's counters count nothing then.
pub(super) fn separate(args: &RunArgs, config: &VmConfig) -> Result<Option<Jail>, RunError> {
    if args.jail.is_none() {
        return Ok(None);
    }
    let counted = !counting_is_denied();
    let jail = separate_alone().map_err(RunError::Jail)?;
    if counted && !config.pmu.model.is_off() && counting_is_denied() {
        return Err(RunError::JailDoesNotCount);
    }
    if jail.has_user_namespace() {
        log::info!("the jail has a user namespace: no operator but this user reaches the VM, root neither");
    }
    Ok(Some(jail))
}

/// What the host can do was found out by threads that have ended. For the kernel they are part of the process
/// for some moments more, in which it gives it no user namespace (EINVAL).
fn separate_alone() -> Result<Jail, JailError> {
    let until = Instant::now() + LAST_MOMENTS;
    loop {
        match sandbox::separate() {
            Err(JailError::NoUserNamespace(e))
                if e.raw_os_error() == Some(libc::EINVAL) && Instant::now() < until =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            separated => return separated,
        }
    }
}

/// Leaves the process the files that a VM of `args` needs, if it is jailed.
///
/// # Errors
/// [`RunError::Jail`].
pub(super) fn close(jail: Option<Jail>, args: &RunArgs) -> Result<(), RunError> {
    let Some(jail) = jail else { return Ok(()) };
    let needed = files::needed(args);
    let notify = std::env::var_os(NOTIFY_SOCKET).map(PathBuf::from);
    let mut inside = Inside {
        read: needed.read,
        change: needed.remove,
    };
    inside.read.retain(|path| path != Path::new(PROC));
    inside.change.extend(notify.filter(|path| path.is_absolute()));
    let of_a_user = jail.has_user_namespace();
    jail.close(&inside).map_err(RunError::Jail)?;
    if of_a_user {
        // They look like the host's to who asks for them, and are not.
        let none = CapabilitySet::empty();
        let none = CapabilitySets {
            effective: none,
            permitted: none,
            inheritable: none,
        };
        set_capabilities(None, none).map_err(|e| RunError::Start("capset failed", e.into()))?;
    }
    Ok(())
}
