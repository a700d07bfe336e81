//! Landlock rules: the host files that a running VM may open or remove.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use perf_core::error_line;
use rustix::fs::{Access, access};
use rustix::process::getuid;
use sandbox::paths::Directory;
use sandbox::privileges;
use sandbox::{AccessibleFiles, FileAccessError, SocketBroker};
use vmm::console::ConsoleTarget;
use vmm::vcpu::control::ResetPolicy;

use super::RunError;
use crate::cli::RunArgs;
use crate::devices;

/// Host files that any VM may read, none of which is secret: /proc for client states, vCPU run
/// times and the process's own memory files, and the list of CPUs for the C library.
const HOST_FILES: [&str; 2] = [PROC, "/sys/devices/system/cpu"];
/// Mount point of procfs. A jail has its own instance.
pub(super) const PROC: &str = "/proc";

/// Denies files outside the set of [`restrict`] to threads that start from now on, if the kernel
/// supports landlock.
///
/// # Errors
/// Returns [`FileAccessError`] if the kernel supports landlock but refuses the rules.
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

/// Restricts this thread, and the threads that it starts, to the files that a running VM of `args`
/// needs.
///
/// # Errors
/// Returns [`FileAccessError`] if the kernel refuses the rules.
pub(super) fn restrict(args: &RunArgs) -> Result<(), FileAccessError> {
    sandbox::only_files(&allowed_files(args))
}

/// Returns the files that a running VM of `args` needs.
pub(super) fn allowed_files(args: &RunArgs) -> AccessibleFiles {
    let mut read: Vec<PathBuf> = HOST_FILES.iter().map(PathBuf::from).collect();
    if args.on_reset == ResetPolicy::Restart {
        // The rules are for the parent directories, because a file may be replaced before a
        // restart.
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

/// Instructs the socket broker to remove the sockets of VM `name`, including `control`, at the end,
/// and to accept no further names. All sockets listen at this point.
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
    for (path, removable) in all.iter().zip(can_be_removed(&all)) {
        let path_shown = path.display();
        if !removable {
            log::warn!(
                "the socket {path_shown} will not be removed when the VM exits, because its user \
                ({}) may not write to the directory; choose a directory of that user",
                getuid().as_raw()
            );
        } else if let Err(e) = broker.remove_at_end(path) {
            let why = error_line(&e);
            log::warn!("the socket {path_shown} will not be removed when the VM exits: {why}");
        }
    }
    broker.seal().map_err(RunError::Seal)
}

/// Returns whether each of these sockets can be removed without capabilities, as the socket broker
/// must. The check runs in a temporary thread that drops its capabilities.
fn can_be_removed(paths: &[PathBuf]) -> Vec<bool> {
    let directories: Vec<_> = paths.iter().map(|path| Directory::of(path)).collect();
    let look = |directory: &io::Result<(Directory, _)>| {
        let wanted = Access::WRITE_OK | Access::EXEC_OK;
        let directory = directory
            .as_ref()
            .map(|(directory, _)| directory.path(".".as_ref()));
        directory.is_ok_and(|path| access(&path, wanted).is_ok())
    };
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            privileges::drop_thread_capabilities();
            directories.iter().map(look).collect()
        });
        looks.join().unwrap_or_default()
    })
}

/// Returns the user-chosen paths of sockets that are removed when the VM of `args` ends.
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
