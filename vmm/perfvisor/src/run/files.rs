//! Which files of the host a running VM opens and removes; landlock keeps it from all others.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use perf_core::error_line;
use perfvisor_vmm::console::ConsoleTarget;
use perfvisor_vmm::privileges;
use perfvisor_vmm::vcpu::control::ResetPolicy;
use rustix::fs::{Access, access};
use rustix::process::getuid;
use sandbox::paths::Directory;
use sandbox::{AccessibleFiles, FileAccessError, SocketBroker};

use super::RunError;
use crate::cli::RunArgs;
use crate::devices;

/// What is read of the host while a VM runs, and is nobody's secret: the clients' states, run times of
/// vCPUs, memory files of the process itself; and which CPUs there are, which the C library looks for.
const OF_THE_HOST: [&str; 2] = [PROC, "/sys/devices/system/cpu"];
/// Where processes are shown. In a jail it is this one's own part.
pub(super) const PROC: &str = "/proc";

/// Shuts off what [`restrict`] does not name from threads that start from now on, if the kernel can do that.
///
/// # Errors
/// The kernel can, and does not.
pub(super) fn begin(args: &RunArgs) -> Result<(), FileAccessError> {
    if !args.landlock {
        return Ok(());
    }
    if sandbox::has_landlock() {
        return sandbox::begin_files();
    }
    log::warn!(
        "this kernel has no landlock (Linux 5.13, CONFIG_SECURITY_LANDLOCK, and landlock among lsm=), so a VMM \
         that a guest breaks into can open what its user can; --landlock off says nothing of it"
    );
    Ok(())
}

/// Leaves this thread, and those that it starts, the files that a VM of `args` needs while it runs.
///
/// # Errors
/// The kernel refuses.
pub(super) fn restrict(args: &RunArgs) -> Result<(), FileAccessError> {
    sandbox::only_files(&needed(args))
}

/// What a VM of `args` reads while it runs.
pub(super) fn needed(args: &RunArgs) -> AccessibleFiles {
    let mut read: Vec<PathBuf> = OF_THE_HOST.iter().map(PathBuf::from).collect();
    if args.on_reset == ResetPolicy::Restart {
        // Somebody may put new files in the places of these, so it is the places that count.
        let again = [&args.kernel, &args.initrd].into_iter().flatten();
        read.extend(again.flat_map(|path| places(path)));
    }
    read.sort();
    read.dedup();
    AccessibleFiles {
        read,
        // The socket broker removes the sockets.
        remove: Vec::new(),
    }
}

/// Has the socket broker remove the sockets of VM `name` at its end, `control` among them, and ends the
/// naming of sockets. All of them listen by now.
///
/// # Errors
/// [`RunError::Seal`].
pub(super) fn give_sockets_to_broker(
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
                "the socket {path_shown} stays behind when the VM ends: its user ({}) may remove nothing in that \
                 directory; choose one of that user's",
                getuid().as_raw()
            );
        } else if let Err(e) = broker.remove_at_end(path) {
            let why = error_line(&e);
            log::warn!("the socket {path_shown} stays behind when the VM ends: {why}");
        }
    }
    broker.seal().map_err(RunError::Seal)
}

/// Whether each of these sockets can be removed without capabilities, as the socket broker has none. A thread
/// that ends with it gives up its own and looks.
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

/// The sockets that a VM of `args` has at paths of the user's choice, which go with it.
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

/// The directories that `path` is in: as it is written, and where symbolic links lead. The root is none: for
/// a file there it is the file itself.
pub(super) fn places(path: &Path) -> Vec<PathBuf> {
    let whole = fs::canonicalize(path).ok();
    let both = [Some(path), whole.as_deref()].into_iter().flatten();
    both.map(|path| match path.parent() {
        Some(here) if here.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) if parent != Path::new("/") => parent.to_owned(),
        _ => path.to_owned(),
    })
    .collect()
}
