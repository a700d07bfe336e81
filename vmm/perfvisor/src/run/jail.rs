//! `--jail`: when the process joins a control group, becomes another user, leaves the host's network, and
//! loses sight of its files.

use std::path::Path;
use std::time::{Duration, Instant};

use perf_core::pmu::host::counting_is_denied;
use perfvisor_vmm::privileges;
use perfvisor_vmm::vm::VmConfig;
use rustix::process::{Resource, Rlimit, setrlimit};
use sandbox::{Jail, JailContents, JailError};

use super::RunError;
use super::files::{self, PROC};
use super::inherited::Inherited;
use crate::background;
use crate::cli::RunArgs;

/// How long threads may take to end.
const LAST_MOMENTS: Duration = Duration::from_secs(5);

/// Joins the control group that the jail names, if it names one: before anything is allocated, so that all is
/// accounted there, and with the rights of who starts the VM.
///
/// # Errors
/// [`RunError::Cgroup`].
pub(super) fn join_cgroup(args: &RunArgs) -> Result<(), RunError> {
    let group = args.jail.as_ref().and_then(|jail| jail.cgroup.as_ref());
    group
        .map_or(Ok(()), |dir| sandbox::join_cgroup(dir))
        .map_err(RunError::Cgroup)
}

/// Becomes the user that the jail is to have, if it names one. No thread may exist yet.
///
/// # Errors
/// [`RunError::Jail`].
pub(super) fn become_user(args: &RunArgs) -> Result<(), RunError> {
    let jail = args.jail.as_ref();
    let Some(uid) = jail.and_then(|jail| jail.uid) else {
        return Ok(());
    };
    let gid = jail.and_then(|jail| jail.gid);
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

/// Lets the process have as many descriptors as its user may give it, or as the jail names. Returns the
/// limit; `None`: there is none.
///
/// # Errors
/// [`RunError::Limit`].
pub(super) fn limit_descriptors(args: &RunArgs) -> Result<Option<u64>, RunError> {
    let Some(limit) = args.jail.as_ref().and_then(|jail| jail.descriptors) else {
        return Ok(privileges::raise_descriptor_limit());
    };
    set_limit(Resource::Nofile, "no-file=", limit)?;
    Ok(Some(limit))
}

/// Limits the size of files that the VM writes, if the jail names a limit. The guest's memory may be a file
/// and is there by now.
///
/// # Errors
/// [`RunError::Limit`].
pub(super) fn limit_file_size(args: &RunArgs) -> Result<(), RunError> {
    let Some(limit) = args.jail.as_ref().and_then(|jail| jail.file_size) else {
        return Ok(());
    };
    background::survive_file_size_limit();
    set_limit(Resource::Fsize, "fsize=", limit)
}

fn set_limit(resource: Resource, word: &'static str, limit: u64) -> Result<(), RunError> {
    let both = Rlimit {
        current: Some(limit),
        maximum: Some(limit),
    };
    setrlimit(resource, both).map_err(|e| RunError::Limit(word, e.into()))
}

/// Leaves the process the files that a VM of `args` needs, and none of the descriptors that it inherited, if
/// it is jailed.
///
/// # Errors
/// [`RunError::Jail`].
pub(super) fn close(jail: Option<Jail>, args: &RunArgs, inherited: Inherited) -> Result<(), RunError> {
    let Some(jail) = jail else { return Ok(()) };
    let needed = files::needed(args);
    let mut inside = JailContents {
        read: needed.read,
        change: needed.remove,
    };
    inside.read.retain(|path| path != Path::new(PROC));
    inherited.close();
    jail.close(&inside).map_err(RunError::Jail)
}
