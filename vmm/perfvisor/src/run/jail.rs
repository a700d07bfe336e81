//! `--jail`: joins a control group, changes the user, and enters new namespaces, starting with the
//! PID namespace.

use std::path::Path;
use std::time::{Duration, Instant};

use perf_core::pmu::host::counting_is_denied;
use rustix::process::{Resource, Rlimit, setrlimit};
use sandbox::privileges;
use sandbox::{Jail, JailContents, JailError, PidNamespaceSupervisor};
use vmm::console::ConsoleTarget;
use vmm::vm::VmConfig;

use super::RunError;
use super::files::{self, PROC};
use crate::background::{self, ServiceNotifier};
use crate::cli::RunArgs;
use crate::inherited::InheritedDescriptors;

/// Time limit for the exit of the threads that probed the host.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Joins the control group of the jail, if any. Called with the rights of the user who starts the
/// VM, and before any large allocation, so that all memory is charged to the group.
///
/// # Errors
/// Returns [`RunError::Cgroup`] if the group cannot be joined.
pub(super) fn join_cgroup(args: &RunArgs) -> Result<(), RunError> {
    let group = args.jail.as_ref().and_then(|jail| jail.cgroup.as_ref());
    group
        .map_or(Ok(()), |dir| sandbox::join_cgroup(dir))
        .map_err(RunError::Cgroup)
}

/// Changes to the user of the jail, if any. No other thread may exist.
///
/// # Errors
/// Returns [`RunError::Jail`] if the user cannot be changed.
pub(super) fn become_user(args: &RunArgs) -> Result<(), RunError> {
    let jail = args.jail.as_ref();
    let Some(uid) = jail.and_then(|jail| jail.uid) else {
        return Ok(());
    };
    let gid = jail.and_then(|jail| jail.gid);
    sandbox::become_user(uid, gid.unwrap_or(uid)).map_err(RunError::Jail)
}

/// Continues in the first process of a new PID namespace if `args` requests a jail and the kernel
/// permits the namespace. The calling process becomes the supervisor of the VM and does not return.
/// Returns the connection to the service manager. No other thread may exist.
///
/// # Errors
/// Returns [`RunError::PidNamespace`] if the namespace cannot be created.
pub(super) fn enter_pid_namespace(args: &RunArgs) -> Result<ServiceNotifier, RunError> {
    let manager = ServiceNotifier::connect();
    if args.jail.is_none() {
        return Ok(manager);
    }
    let supervisor = PidNamespaceSupervisor {
        confinement: super::confinement(args),
        give_up: privileges::drop_all_privileges,
        terminal: [Some(&args.console), args.virtio_console.as_ref()].contains(&Some(&ConsoleTarget::Tty)),
        kept: manager.socket(),
        // Ignore the error, because the supervisor cannot log it.
        report: &|report| drop(manager.pass(report)),
    };
    match supervisor.start().map_err(RunError::PidNamespace)? {
        Some(link) => Ok(ServiceNotifier::Supervisor(link)),
        None => {
            log::info!(
                "the jail has no PID namespace, which takes root's rights (CAP_SYS_ADMIN) or a user namespace"
            );
            Ok(manager)
        }
    }
}

/// Moves the process into new namespaces if it is to be jailed. No other thread may exist.
///
/// # Errors
/// Returns [`RunError::Jail`] if a namespace cannot be created, or [`RunError::JailDoesNotCount`]
/// if guest counters would not count in the jail.
pub(super) fn separate(args: &RunArgs, config: &VmConfig) -> Result<Option<Jail>, RunError> {
    if args.jail.is_none() {
        return Ok(None);
    }
    let counted = !counting_is_denied();
    let jail = separate_when_single_threaded().map_err(RunError::Jail)?;
    if counted && !config.pmu.model.is_off() && counting_is_denied() {
        return Err(RunError::JailDoesNotCount);
    }
    if jail.has_user_namespace() {
        log::info!("the jail has a user namespace: only this user can connect to the VM, not even root");
    }
    Ok(Some(jail))
}

/// Enters the namespaces once the threads that probed the host have exited. The kernel refuses to
/// create a user namespace (EINVAL) while exiting threads still belong to the process.
fn separate_when_single_threaded() -> Result<Jail, JailError> {
    let until = Instant::now() + THREAD_EXIT_TIMEOUT;
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

/// Raises the descriptor limit to the hard limit, or sets the limit of the jail. Returns the limit,
/// or `None` if unlimited.
///
/// # Errors
/// Returns [`RunError::Limit`] if the kernel rejects the limit.
pub(super) fn limit_descriptors(args: &RunArgs) -> Result<Option<u64>, RunError> {
    let Some(limit) = args.jail.as_ref().and_then(|jail| jail.descriptors) else {
        return Ok(privileges::raise_descriptor_limit());
    };
    set_limit(Resource::Nofile, "no-file=", limit)?;
    Ok(Some(limit))
}

/// Sets the file size limit of the jail, if any. The guest's memory, which may be a file, has
/// already been allocated.
///
/// # Errors
/// Returns [`RunError::Limit`] if the kernel rejects the limit.
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

/// Restricts a jailed process to the files that a VM with `args` needs, and closes the inherited
/// descriptors.
///
/// # Errors
/// Returns [`RunError::Jail`] if the jail cannot be completed.
pub(super) fn close(
    jail: Option<Jail>,
    args: &RunArgs,
    inherited: InheritedDescriptors,
) -> Result<(), RunError> {
    let Some(jail) = jail else { return Ok(()) };
    let allowed_files = files::allowed_files(args);
    let mut inside = JailContents {
        read: allowed_files.read,
        change: allowed_files.remove,
    };
    inside.read.retain(|path| path != Path::new(PROC));
    inherited.close();
    jail.close(&inside).map_err(RunError::Jail)
}
