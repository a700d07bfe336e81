//! A jail in a separate directory, with the same layout that Firecracker's jailer creates for the
//! program that it starts.
//!
//! [`enter`] makes a directory the root of the process and creates the devices that a VM requires.
//! `/proc` and `/sys` are also mounted, because the VM reads from them which events the host can
//! count. The process must be single-threaded and have root's capabilities.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, chown};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change, unmount,
};
use rustix::process::{pivot_root, setsid};
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, configure_capability_in_ambient_set,
    move_into_link_name_space, set_capabilities,
};

use crate::jail::become_user;
use crate::namespaces::unshare;

/// Character devices that the jail contains, each with its path, major number and minor number.
const DEVICES: [(&str, u32, u32); 4] = [
    ("dev/kvm", 10, 232),
    ("dev/net/tun", 10, 200),
    ("dev/null", 1, 3),
    ("dev/urandom", 1, 9),
];
/// Directories that the user of the jailed process owns.
const DIRECTORIES: [&str; 2] = ["dev/net", "run"];
/// File systems to mount, each with its type, mount point and options.
const FILE_SYSTEMS: [(&str, &str, &str); 2] = [("proc", "proc", "hidepid=2"), ("sysfs", "sys", "")];

/// Error returned when a jail cannot be entered. Contains the failed operation and the object of
/// the operation, such as a file.
#[derive(Debug, thiserror::Error)]
#[error("cannot {operation} {}", path.display())]
pub struct ChrootJailError {
    operation: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

fn failed<E: Into<io::Error>>(
    operation: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(E) -> ChrootJailError {
    let path = path.into();
    move |source| ChrootJailError {
        operation,
        path,
        source: source.into(),
    }
}

/// Moves the process into the network namespace of the file `namespace`.
///
/// # Errors
/// Returns a [`ChrootJailError`] if the kernel denies the operation.
pub fn join_network(namespace: &File, path: &Path) -> Result<(), ChrootJailError> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(failed("join the network namespace", path))
}

/// Makes `root` the root directory in a new mount namespace. User `uid` and group `gid` become the
/// owners of the root directory and its devices.
///
/// # Errors
/// Returns a [`ChrootJailError`] on failure, in which case the process must exit.
pub fn enter(root: &Path, uid: u32, gid: u32) -> Result<(), ChrootJailError> {
    unshare(libc::CLONE_NEWNS).map_err(failed("create a mount namespace for", root))?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).map_err(failed("make private the mounts of", "/"))?;
    mount_bind_recursive(root, root).map_err(failed("mount", root))?;
    std::env::set_current_dir(root).map_err(failed("enter", root))?;
    // The old root is mounted on top of the new one (pivot_root(2)), so it needs no directory of
    // its own.
    pivot_root(".", ".").map_err(failed("change the root directory to", root))?;
    unmount(".", UnmountFlags::DETACH).map_err(failed("unmount the old root below", root))?;
    std::env::set_current_dir("/").map_err(failed("enter", "/"))?;
    let owned = |path: &str| chown(path, Some(uid), Some(gid)).map_err(failed("change the owner of", path));
    for directory in DIRECTORIES {
        create_directory(directory)?;
        owned(directory)?;
    }
    for (device, major, minor) in DEVICES {
        create_device(device, makedev(major, minor))?;
        owned(device)?;
    }
    for (kind, target, options) in FILE_SYSTEMS {
        create_directory(target)?;
        let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        let options = std::ffi::CString::new(options).unwrap_or_default();
        // Ignore an error: a container may hide parts of these file systems, and the VM can run
        // without them.
        if let Err(e) = mount(kind, target, kind, flags, options.as_c_str()) {
            log::warn!("/{target} is not available in the jail, and the VM counts less: {e}");
        }
    }
    owned("/")
}

/// Creates a directory and its parents. Existing directories are kept.
fn create_directory(path: &str) -> Result<(), ChrootJailError> {
    let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
    made.map_err(failed("create", path))
}

/// Creates a character device. An existing device with the same number is kept.
fn create_device(path: &str, number: u64) -> Result<(), ChrootJailError> {
    let mode = Mode::RUSR | Mode::WUSR;
    match mknodat(CWD, path, FileType::CharacterDevice, mode, number) {
        Err(rustix::io::Errno::EXIST) => {}
        made => return made.map_err(failed("create the device", path)),
    }
    let same = fs::symlink_metadata(path)
        .is_ok_and(|found| found.file_type().is_char_device() && found.rdev() == number);
    same.then_some(())
        .ok_or(io::ErrorKind::AlreadyExists)
        .map_err(failed("create the device", path))
}

/// Detaches the process from its session and terminal, and replaces the standard streams with
/// `null`.
///
/// # Errors
/// Returns a [`ChrootJailError`] if the process leads a process group.
pub fn detach(null: &File) -> Result<(), ChrootJailError> {
    setsid().map_err(failed("create a session for", "--daemonize"))?;
    dup2_stdin(null)
        .and_then(|()| dup2_stdout(null))
        .and_then(|()| dup2_stderr(null))
        .map_err(failed("replace the standard streams with", "/dev/null"))
}

/// Creates a PID namespace. The next child process becomes PID 1 in it.
///
/// # Errors
/// Returns a [`ChrootJailError`] if the kernel denies the operation.
pub fn separate_process_ids() -> Result<(), ChrootJailError> {
    unshare(libc::CLONE_NEWPID).map_err(failed("create a PID namespace for", "--new-pid-ns"))
}

/// Changes the user, and drops all capabilities except `CAP_PERFMON`. The program that is executed
/// next needs this capability to count events on a host where ordinary users may not count events,
/// and drops it after use.
///
/// # Errors
/// Returns a [`ChrootJailError`] on failure, in which case the process must exit.
pub fn drop_rights(uid: u32, gid: u32) -> Result<(), ChrootJailError> {
    let failed = |e: io::Error| failed("become the user of", "--uid")(e);
    become_user(uid, gid).map_err(|e| failed(io::Error::other(e)))?;
    let has = rustix::thread::capabilities(None).map_err(|e| failed(e.into()))?;
    let kept = has.permitted & CapabilitySet::PERFMON;
    let kept = CapabilitySets {
        effective: kept,
        permitted: kept,
        inheritable: kept,
    };
    set_capabilities(None, kept).map_err(|e| failed(e.into()))?;
    if kept.permitted.is_empty() {
        return Ok(());
    }
    configure_capability_in_ambient_set(CapabilitySet::PERFMON, true).map_err(|e| failed(e.into()))
}
