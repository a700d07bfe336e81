//! Process jail with separate namespaces, without network and with a file system that contains only
//! the given paths.
//!
//! A process that may create namespaces (`CAP_SYS_ADMIN`) keeps its user. Other processes get a
//! user namespace (user_namespaces(7)) that maps only their own user, and in which capabilities
//! have no effect on the host. A PID namespace, and the user namespace that may be required to
//! create it, are created earlier by [`crate::PidNamespaceSupervisor`]. With or without a PID
//! namespace, `/proc` shows no other process.
//!
//! Call [`become_user`] at process start, [`separate`] after all host resources are open and before
//! any thread is started, and [`Jail::close`] before the guest runs.
#![expect(
    unsafe_code,
    reason = "unshare(2), open_tree(2), move_mount(2), mount_setattr(2), pivot_root(2), setresuid(2)"
)]

use std::ffi::{CStr, CString};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, chroot, symlink};
use std::path::{Path, PathBuf};
use std::ptr;

use crate::namespaces::{UserNamespaceError, own_users, unshare};
use crate::pid_namespace::has_user_namespace;
use rustix::process::{parent_process_death_signal, set_parent_process_death_signal};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_keep_capabilities};

/// Mount point at which the new root is assembled. This directory exists on every host that
/// supports jails.
const BUILT_AT: &str = "/proc";
/// Mount options of the new root file system, which contains only mount points.
const ROOT_OPTIONS: &CStr = c"mode=0755,size=1m";
/// Link in the host's `/proc` to the directory of the calling process.
const PROC_SELF: &str = "/proc/self";
/// Link in the host's `/proc` to the directory of the calling thread.
const PROC_THREAD_SELF: &str = "/proc/thread-self";
/// `AT_RECURSIVE`: the call applies to a mount and to all mounts below it.
const RECURSIVE: libc::c_int = 0x8000;

/// Error returned when a jail cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// The process lacks the capabilities to change its user.
    #[error("uid= and gid= require CAP_SETUID and CAP_SETGID; start the VM as root, or omit them")]
    NoOtherUser(#[source] io::Error),
    /// The kernel or its administrator does not permit a user namespace for this user.
    #[error(
        "this host denies user namespaces (user.max_user_namespaces, \
        kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns); start the \
        VM as root with uid=N"
    )]
    NoUserNamespace(#[source] io::Error),
    /// The root directory is not a mount point of this mount namespace.
    #[error(
        "the root directory is not a mount point, as inside chroot; omit --jail, or make it one \
        before chroot (mount --rbind DIR DIR)"
    )]
    Chroot,
    /// The kernel lacks `mount_setattr(2)`.
    #[error("this kernel cannot restrict mounts (mount_setattr, Linux 5.12); omit --jail")]
    OldKernel,
    /// An operation failed.
    #[error("{what} {}", .path.display())]
    Step {
        /// Description of the operation.
        what: &'static str,
        /// Path to which the failed operation was applied.
        path: PathBuf,
        /// Error returned by the kernel.
        #[source]
        source: io::Error,
    },
}

impl From<UserNamespaceError> for JailError {
    fn from(e: UserNamespaceError) -> Self {
        match e {
            UserNamespaceError::Denied(source) => Self::NoUserNamespace(source),
            UserNamespaceError::Map(path, source) => {
                step("cannot say who is in the user namespace:", path)(source)
            }
        }
    }
}

fn step(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> JailError {
    let path = path.into();
    move |source| JailError::Step { what, path, source }
}

/// Contents of a jail, in addition to `/proc/self` and `/proc/thread-self`. Paths that do not exist
/// are ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JailContents {
    /// Paths of files and directory trees that can be read. Sockets in these trees can be connected
    /// to.
    pub read: Vec<PathBuf>,
    /// Directory trees in which files can also be removed.
    pub change: Vec<PathBuf>,
}

/// Changes the user and group of the process and drops its supplementary groups. The capabilities
/// are kept so that the VM can open host resources, and must be dropped later.
///
/// # Errors
/// Returns [`JailError::NoOtherUser`] on failure, in which case the group may have changed.
pub fn become_user(uid: u32, gid: u32) -> Result<(), JailError> {
    let refused = JailError::NoOtherUser;
    set_keep_capabilities(true).map_err(|e| refused(e.into()))?;
    // Save the parent-death signal, because the kernel clears it when the user changes.
    let death_signal = parent_process_death_signal().map_err(|e| refused(e.into()))?;
    // SAFETY: none of the calls reads through a pointer, because the list of groups is empty.
    let done = unsafe {
        libc::setgroups(0, ptr::null()) == 0
            && libc::setresgid(gid, gid, gid) == 0
            && libc::setresuid(uid, uid, uid) == 0
    };
    if !done {
        return Err(refused(io::Error::last_os_error()));
    }
    set_parent_process_death_signal(death_signal).map_err(|e| refused(e.into()))?;
    // Make the retained capabilities effective again.
    let has = capabilities(None).map_err(|e| refused(e.into()))?;
    let all = CapabilitySets {
        effective: has.permitted,
        ..has
    };
    set_capabilities(None, all).map_err(|e| refused(e.into()))
}

/// A process with its own namespaces that still has access to the host's files.
#[derive(Debug)]
#[must_use]
pub struct Jail {
    /// `true` if the jail includes a user namespace (see [`Jail::has_user_namespace`]).
    of_a_user: bool,
}

/// Moves the process into new mount, network, IPC and UTS namespaces. The process first moves into
/// a new user namespace if it lacks the privileges to create these namespaces, unless
/// [`crate::PidNamespaceSupervisor`] has already created a user namespace for it. Open sockets and
/// devices are unaffected. The process must be single-threaded.
///
/// # Errors
/// Returns a [`JailError`] on failure, in which case some of the namespaces may have been created.
pub fn separate() -> Result<Jail, JailError> {
    let wanted = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    let of_a_user = match unshare(wanted) {
        Ok(()) => has_user_namespace(),
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            own_users(wanted)?;
            true
        }
        Err(e) => return Err(step("no namespaces of its own for", "this process")(e)),
    };
    // Later mounts must not propagate to the host. SAFETY: the path is a NUL-terminated string, and
    // the other pointers may be null for a change of propagation.
    let private = unsafe {
        libc::mount(
            ptr::null(),
            c"/".as_ptr(),
            ptr::null(),
            libc::MS_REC | libc::MS_PRIVATE,
            ptr::null(),
        )
    };
    checked(private.into()).map_err(|e| match e.raw_os_error() {
        Some(libc::EINVAL) => JailError::Chroot,
        _ => step("cannot keep mounts to itself at", "/")(e),
    })?;
    Ok(Jail { of_a_user })
}

impl Jail {
    /// Returns whether the process is in a user namespace of its own. If so, the kernel permits it
    /// only the perf events that a user without capabilities may open.
    #[must_use]
    pub fn has_user_namespace(&self) -> bool {
        self.of_a_user
    }

    /// Replaces the root directory of the process with one that contains only `inside` and a part
    /// of `/proc`: the directory of this process, and the links `self` and `thread-self` with the
    /// IDs that are valid outside a PID namespace. Files keep their paths. The new root has no
    /// executable files, device files or effective set-user-ID bits, and no path leads back to the
    /// host's files. If the process has its own user namespace, this thread also drops all its
    /// capabilities, because they apply only to that namespace but look like capabilities on the
    /// host.
    ///
    /// # Errors
    /// Returns a [`JailError`] on failure, in which case the root directory is either the host's or
    /// incomplete.
    pub fn close(self, inside: &JailContents) -> Result<(), JailError> {
        let here = std::env::current_dir().unwrap_or_else(|_| "/".into());
        // The host's /proc shows the process ID that is valid outside a PID namespace.
        let pid = fs::read_link(PROC_SELF).map_err(step("cannot read", PROC_SELF))?;
        let own = Path::new("/proc").join(&pid);
        let changed = |path: &PathBuf| (path.clone(), false);
        let read = |path: &PathBuf| (path.clone(), true);
        let mut wanted: Vec<(PathBuf, bool)> = [(own, true)].to_vec();
        wanted.extend(inside.read.iter().map(read));
        wanted.extend(inside.change.iter().map(changed));
        // Parent directories must be mounted before their descendants.
        for (path, _) in &mut wanted {
            *path = here.join(&path);
        }
        wanted.sort();
        wanted.dedup_by(|second, first| second.0 == first.0);
        let mut trees = Vec::new();
        for (path, reads) in wanted {
            match DetachedMount::of(&path, 0) {
                Ok(tree) => {
                    tree.restrict(&path, reads)?;
                    trees.push((path, tree));
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(step("cannot take into the jail", path)(e)),
            }
        }
        trees.push((PROC_THREAD_SELF.into(), DetachedMount::of_own_thread_link()?));
        new_root()?;
        for (path, tree) in trees {
            tree.attach(&path)?;
        }
        let _ = make_directory(&path_in_new_root(&here));
        let link = path_in_new_root(Path::new(PROC_SELF));
        symlink(&pid, &link).map_err(step("cannot make", link))?;
        enter_new_root()?;
        // If the working directory is not in the jail, use the jail's root directory instead.
        std::env::set_current_dir(&here)
            .or_else(|_| std::env::set_current_dir("/"))
            .map_err(step("no directory to be in:", "/"))?;
        set_attributes(libc::AT_FDCWD, c"/", libc::MOUNT_ATTR_RDONLY)
            .map_err(step("cannot make read-only", "/"))?;
        if self.of_a_user {
            let none = CapabilitySet::empty();
            let none = CapabilitySets {
                effective: none,
                permitted: none,
                inheritable: none,
            };
            set_capabilities(None, none)
                .map_err(|e| step("cannot give up its capabilities in", "/")(e.into()))?;
        }
        Ok(())
    }
}

/// A detached mount of a file or directory tree of the host.
struct DetachedMount(File);

impl DetachedMount {
    /// Creates a copy of the mounts at `path` with additional flags of `open_tree(2)`.
    fn of(path: &Path, flags: libc::c_int) -> io::Result<Self> {
        let text = c_string(path)?;
        let flags = flags.unsigned_abs() | RECURSIVE.unsigned_abs();
        let flags = flags | libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
        // SAFETY: the path is a NUL-terminated string that outlives the call.
        let fd = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, text.as_ptr(), flags) };
        checked(fd)?;
        let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
        // SAFETY: the call succeeded, so the descriptor is open and not owned elsewhere.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Creates a mount that contains only the link [`PROC_THREAD_SELF`] of the host's `/proc`. Only
    /// this link contains the IDs that the thread has outside a PID namespace.
    fn of_own_thread_link() -> Result<Self, JailError> {
        let path = Path::new(PROC_THREAD_SELF);
        let link = Self::of(path, libc::AT_SYMLINK_NOFOLLOW);
        let link = link.map_err(step("cannot take into the jail", path))?;
        link.restrict(path, true)?;
        Ok(link)
    }

    fn restrict(&self, path: &Path, reads: bool) -> Result<(), JailError> {
        let none = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
        let read_only = if reads { libc::MOUNT_ATTR_RDONLY } else { 0 };
        set_attributes(self.0.as_raw_fd(), c"", none | read_only).map_err(|e| match e.raw_os_error() {
            Some(libc::ENOSYS) => JailError::OldKernel,
            _ => step("cannot restrict", path)(e),
        })
    }

    /// Attaches the mount in the new root, at the path that it had on the host.
    fn attach(&self, path: &Path) -> Result<(), JailError> {
        let place = path_in_new_root(path);
        let is_dir = self.0.metadata().is_ok_and(|meta| meta.is_dir());
        if is_dir {
            make_directory(&place).map_err(step("cannot make", &place))?;
        } else if let Some(parent) = place.parent() {
            make_directory(parent).map_err(step("cannot make", parent))?;
            File::options()
                .write(true)
                .create(true)
                .truncate(false)
                .open(&place)
                .map_err(step("cannot make", &place))?;
        }
        let text = c_string(&place).map_err(step("no path:", &place))?;
        // MOVE_MOUNT_F_EMPTY_PATH: the mount is given by its descriptor.
        let flags = 4;
        // SAFETY: both paths are NUL-terminated strings that outlive the call.
        let moved = unsafe {
            libc::syscall(
                libc::SYS_move_mount,
                self.0.as_raw_fd(),
                c"".as_ptr(),
                libc::AT_FDCWD,
                text.as_ptr(),
                flags,
            )
        };
        checked(moved).map_err(step("cannot take into the jail", path))
    }
}

/// Mounts an empty file system for the new root.
fn new_root() -> Result<(), JailError> {
    let at = c_string(Path::new(BUILT_AT)).map_err(step("no path:", BUILT_AT))?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: all pointers are to NUL-terminated strings that outlive the call.
    let mounted = unsafe {
        libc::mount(
            c"jail".as_ptr(),
            at.as_ptr(),
            c"tmpfs".as_ptr(),
            flags,
            ROOT_OPTIONS.as_ptr().cast(),
        )
    };
    checked(mounted.into()).map_err(step("cannot mount a tmpfs at", BUILT_AT))
}

/// Makes the mount at [`BUILT_AT`] the root of the process and detaches the old root, by calling
/// pivot_root(2) with "." for both paths. If the old root is an initramfs, it cannot be detached.
/// In this case, the new root is mounted over it as in switch_root(8), after which no path leads to
/// the old root.
fn enter_new_root() -> Result<(), JailError> {
    let failed = |what| step(what, BUILT_AT);
    std::env::set_current_dir(BUILT_AT).map_err(failed("cannot enter"))?;
    // SAFETY: both paths are NUL-terminated strings.
    let pivoted = checked(unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) });
    match pivoted {
        Ok(()) => {
            // SAFETY: the path is a NUL-terminated string.
            let left = unsafe { libc::umount2(c".".as_ptr(), libc::MNT_DETACH) };
            checked(left.into()).map_err(step("cannot let go of", "the host's root"))
        }
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            // SAFETY: the paths are NUL-terminated strings, and the other pointers may be null for
            // a move.
            let moved = unsafe {
                libc::mount(
                    c".".as_ptr(),
                    c"/".as_ptr(),
                    ptr::null(),
                    libc::MS_MOVE,
                    ptr::null(),
                )
            };
            checked(moved.into()).map_err(failed("cannot mount over the host's root what is at"))?;
            chroot(".").map_err(failed("cannot make the root what was at"))
        }
        Err(e) => Err(failed("pivot_root failed:")(e)),
    }
}

/// Adds attributes to a mount. If the mount is given by a descriptor, also adds the attributes to
/// all mounts below it.
fn set_attributes(fd: RawFd, path: &CStr, attributes: u64) -> io::Result<()> {
    let of_descriptor = libc::AT_EMPTY_PATH | RECURSIVE;
    let flags = if path.is_empty() { of_descriptor } else { 0 };
    let attr = libc::mount_attr {
        attr_set: attributes,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the path is a NUL-terminated string, and the structure has the length that is passed.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd,
            path.as_ptr(),
            flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    checked(set)
}

/// Returns the path at which `path` is found while the new root is assembled at `BUILT_AT`.
fn path_in_new_root(path: &Path) -> PathBuf {
    let below = path.strip_prefix("/").unwrap_or(path);
    Path::new(BUILT_AT).join(below)
}

fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(path)
}

fn c_string(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

fn checked(result: libc::c_long) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
