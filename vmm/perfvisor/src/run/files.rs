//! Landlock rules: the host files that a running VM may open or remove.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use perf_core::error_line;
use rustix::process::getuid;
use sandbox::{AccessibleFiles, FileAccessError, SocketBroker};
use vmm::console::ConsoleTarget;
use vmm::vcpu::control::ResetPolicy;

use super::RunError;
use crate::cli::RunArgs;
use crate::devices;

/// Host files that any VM may read. /proc provides client states, vCPU run times and the process's
/// own memory files. The C library reads the list of CPUs. These files contain no secrets.
const HOST_FILES: [&str; 2] = [PROC, "/sys/devices/system/cpu"];
/// Mount point of procfs. A jail has its own instance.
pub(super) const PROC: &str = "/proc";

/// Denies file access to all threads started from now on, except to the files that [`restrict`]
/// allows later. Has no effect if the kernel does not support landlock.
///
/// # Errors
/// Returns [`FileAccessError`] if the kernel supports landlock but rejects the rules.
pub(super) fn begin(args: &RunArgs) -> Result<(), FileAccessError> {
    if !args.landlock {
        return Ok(());
    }
    if sandbox::has_landlock() {
        return sandbox::begin_files();
    }
    log::warn!(
        "landlock is unsupported by this kernel (Linux 5.13, CONFIG_SECURITY_LANDLOCK, and \
        landlock in lsm=), so a compromised VMM can open every file of its user; --landlock off \
        suppresses this warning"
    );
    Ok(())
}

/// Restricts this thread, and the threads that it starts, to the files that a running VM with
/// `args` needs.
///
/// # Errors
/// Returns [`FileAccessError`] if the kernel rejects the rules.
pub(super) fn restrict(args: &RunArgs) -> Result<(), FileAccessError> {
    sandbox::only_files(&allowed_files(args))
}

/// Returns the files that a running VM with `args` needs.
pub(super) fn allowed_files(args: &RunArgs) -> AccessibleFiles {
    let mut read: Vec<PathBuf> = HOST_FILES.iter().map(PathBuf::from).collect();
    if args.on_reset == ResetPolicy::Restart {
        // A restart opens the kernel and the initrd again. Allow their parent directories, because
        // the files may be replaced before the restart.
        let again = [&args.kernel, &args.initrd].into_iter().flatten();
        read.extend(again.flat_map(|path| parent_directories(path)));
    }
    read.sort();
    read.dedup();
    AccessibleFiles {
        read,
        // The socket broker removes the sockets.
        remove: Vec::new(),
    }
}

/// Registers the sockets of VM `name`, including `control`, with the socket broker, which removes
/// them when the VM exits. The broker then accepts no further sockets. All sockets must be
/// listening.
///
/// # Errors
/// Returns [`RunError::Seal`] if the broker cannot be confined.
pub(super) fn register_sockets_for_removal(
    args: &RunArgs,
    name: &str,
    control: &[PathBuf],
    broker: &Arc<SocketBroker>,
) -> Result<(), RunError> {
    let chosen = sockets(args).map(Path::to_owned);
    let mut all: Vec<PathBuf> = chosen.chain(devices::own_sockets(args, name)).collect();
    all.extend_from_slice(control);
    all.sort();
    all.dedup();
    for path in &all {
        let Err(e) = broker.remove_at_end(path) else {
            continue;
        };
        let why = match e.kind() {
            io::ErrorKind::PermissionDenied => format!(
                "its user ({}) may not write to the directory; choose a directory of that user",
                getuid().as_raw()
            ),
            _ => error_line(&e),
        };
        log::warn!(
            "the socket {} will not be removed when the VM exits: {why}",
            path.display()
        );
    }
    broker.seal().map_err(RunError::Seal)
}

/// Returns the user-chosen paths of sockets that are removed when the VM with `args` exits.
pub(super) fn sockets(args: &RunArgs) -> impl Iterator<Item = &Path> {
    let consoles = [Some(&args.console), args.virtio_console.as_ref()];
    let consoles = consoles.into_iter().flatten().filter_map(|target| match target {
        ConsoleTarget::Socket(path) => Some(path.as_path()),
        _ => None,
    });
    let others = [
        args.gdb.as_ref().map(|gdb| gdb.socket.as_path()),
        args.observers.as_ref().map(|at| at.path.as_path()),
        args.vsock.as_ref().and_then(|vsock| vsock.socket.as_deref()),
    ];
    others.into_iter().flatten().chain(consoles)
}

/// Returns the parent directories of `path`, before and after the resolution of symbolic links. For
/// a file in the root directory, returns the file itself.
pub(super) fn parent_directories(path: &Path) -> Vec<PathBuf> {
    let whole = fs::canonicalize(path).ok();
    let both = [Some(path), whole.as_deref()].into_iter().flatten();
    both.map(|path| match path.parent() {
        Some(here) if here.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) if parent != Path::new("/") => parent.to_owned(),
        _ => path.to_owned(),
    })
    .collect()
}
