//! Namespaces of its own for a process: no network, and a file system that has nothing but what was named.
//!
//! Who may make namespaces (`CAP_SYS_ADMIN`) keeps its user. Others get a user namespace
//! (user_namespaces(7)), in which they are themselves and nobody else; the host's kernel takes none of their
//! capabilities there for one of the host. There is no pid namespace: operators name vCPUs' threads by their
//! ids, and `/proc` shows nobody else all the same.
//!
//! [`become_user`], when the process begins; [`separate`], when everything of the host is open and no thread
//! has been started; [`Jail::close`], before the guest runs.
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

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_keep_capabilities};

/// Where the new root is put together: a directory that every host has which can have a jail.
const BUILT_AT: &str = "/proc";
/// What the new root's own directories may take: names only.
const ROOT_OPTIONS: &CStr = c"mode=0755,size=1m";
/// A mount and all below it.
const RECURSIVE: libc::c_int = 0x8000;

/// Why there is no jail.
#[derive(Debug, thiserror::Error)]
pub enum JailError {
    /// Another user takes capabilities.
    #[error(
        "uid= and gid= take the right to become another user (CAP_SETUID, CAP_SETGID): start the VM as root, or \
         leave them out"
    )]
    NoOtherUser(#[source] io::Error),
    /// The kernel or its administrator lets this user have none.
    #[error(
        "this host lets its user have no user namespace (user.max_user_namespaces, kernel.unprivileged_userns_clone, \
         kernel.apparmor_restrict_unprivileged_userns): start the VM as root, with uid= for the user that it is to \
         be"
    )]
    NoUserNamespace(#[source] io::Error),
    /// The root directory is in somebody else's mount.
    #[error(
        "the root directory is no mount, as inside chroot: leave --jail out, or make it one before chroot (mount \
         --rbind DIR DIR)"
    )]
    Chroot,
    /// `mount_setattr(2)` is missing.
    #[error("this kernel cannot restrict mounts (mount_setattr, Linux 5.12): leave --jail out")]
    OldKernel,
    /// A step failed.
    #[error("{what} {}", .path.display())]
    Step {
        /// What was done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
}

fn step(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> JailError {
    let path = path.into();
    move |source| JailError::Step { what, path, source }
}

/// What there is in a jail, besides `/proc/self`. What does not exist is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inside {
    /// Files, and directories with all that is below them, which can be read; sockets there can be reached.
    pub read: Vec<PathBuf>,
    /// Those in which files can be removed besides.
    pub change: Vec<PathBuf>,
}

/// Becomes the user and the group, without other groups. The capabilities stay, until they are given up: what
/// the VM needs of the host is opened with them.
///
/// # Errors
/// [`JailError::NoOtherUser`]; the process may have changed its group.
pub fn become_user(uid: u32, gid: u32) -> Result<(), JailError> {
    let refused = JailError::NoOtherUser;
    set_keep_capabilities(true).map_err(|e| refused(e.into()))?;
    // SAFETY: none of the calls takes a pointer that is read; an empty list of groups has none.
    let done = unsafe {
        libc::setgroups(0, ptr::null()) == 0
            && libc::setresgid(gid, gid, gid) == 0
            && libc::setresuid(uid, uid, uid) == 0
    };
    if !done {
        return Err(refused(io::Error::last_os_error()));
    }
    // What is kept is not in effect.
    let has = capabilities(None).map_err(|e| refused(e.into()))?;
    let all = CapabilitySets {
        effective: has.permitted,
        ..has
    };
    set_capabilities(None, all).map_err(|e| refused(e.into()))
}

/// A process with namespaces of its own, which still sees the host's files.
#[derive(Debug)]
#[must_use]
pub struct Jail {
    /// As in [`Jail::has_user_namespace`].
    of_a_user: bool,
}

/// Gives the process namespaces of its own: of mounts, network, System V's IPC and names; of users, if it may
/// not have those without. Sockets and devices that are open stay what they are. The process may have no
/// other thread yet.
///
/// # Errors
/// [`JailError`]; the process may have some of the namespaces.
pub fn separate() -> Result<Jail, JailError> {
    let wanted = libc::CLONE_NEWNS | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    let of_a_user = match unshare(wanted) {
        Ok(()) => false,
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {
            own_users(wanted)?;
            true
        }
        Err(e) => return Err(step("no namespaces of its own for", "this process")(e)),
    };
    // What is mounted from now on is not seen on the host.
    // SAFETY: the path is a string that ends with 0; the other pointers may be null for a change of this
    // kind.
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

fn unshare(what: libc::c_int) -> io::Result<()> {
    // SAFETY: the call takes a number.
    checked(unsafe { libc::unshare(what) }.into())
}

/// A user namespace with the process's own user and group, as they are outside.
fn own_users(wanted: libc::c_int) -> Result<(), JailError> {
    // SAFETY: these take nothing and do not fail.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    unshare(wanted | libc::CLONE_NEWUSER).map_err(JailError::NoUserNamespace)?;
    // A program that has capabilities by its file does not own its files in /proc until it says so.
    // SAFETY: the call takes numbers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
    let write = |path: &str, text: String| {
        fs::write(path, text).map_err(step("cannot say who is in the user namespace:", path))
    };
    write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    write("/proc/self/setgroups", "deny".into())?;
    write("/proc/self/gid_map", format!("{gid} {gid} 1"))
}

impl Jail {
    /// Whether it took a user namespace: the kernel lets the process count only what it lets a user without
    /// capabilities count.
    #[must_use]
    pub fn has_user_namespace(&self) -> bool {
        self.of_a_user
    }

    /// From now on the process has a root directory that holds `inside` and its own `/proc/self`. Everything
    /// is there by the path that it had; nothing is executable, no device or set-user-ID bit counts, and
    /// there is no way back to the host's files. In a user namespace of its own this thread has no
    /// capabilities any more: they look like the host's to who asks for them, and are not.
    ///
    /// # Errors
    /// [`JailError`]; the process has the host's root still, or neither.
    pub fn close(self, inside: &Inside) -> Result<(), JailError> {
        let here = std::env::current_dir().unwrap_or_else(|_| "/".into());
        let pid = std::process::id();
        let own = PathBuf::from(format!("/proc/{pid}"));
        let changed = |path: &PathBuf| (path.clone(), false);
        let read = |path: &PathBuf| (path.clone(), true);
        let mut wanted: Vec<(PathBuf, bool)> = [(own, true)].to_vec();
        wanted.extend(inside.read.iter().map(read));
        wanted.extend(inside.change.iter().map(changed));
        // What is above others is mounted before them.
        for (path, _) in &mut wanted {
            *path = here.join(&path);
        }
        wanted.sort();
        wanted.dedup_by(|second, first| second.0 == first.0);
        let mut trees = Vec::new();
        for (path, reads) in wanted {
            match Tree::of(&path) {
                Ok(tree) => {
                    tree.restrict(&path, reads)?;
                    trees.push((path, tree));
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(step("cannot take into the jail", path)(e)),
            }
        }
        new_root()?;
        for (path, tree) in trees {
            tree.put(&path)?;
        }
        let _ = make_directory(&inside_new(&here));
        let link = inside_new(Path::new("/proc/self"));
        symlink(pid.to_string(), &link).map_err(step("cannot make", link))?;
        enter_new_root()?;
        // A directory that is not in the jail is empty there.
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

/// A part of the host's file system that is on its way.
struct Tree(File);

impl Tree {
    fn of(path: &Path) -> io::Result<Self> {
        let text = c_string(path)?;
        let flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | RECURSIVE.unsigned_abs();
        // SAFETY: the path is a string that ends with 0 and lives for the call.
        let fd = unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, text.as_ptr(), flags) };
        checked(fd)?;
        let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
        // SAFETY: the call succeeded, so this is a descriptor that nobody else owns.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    fn restrict(&self, path: &Path, reads: bool) -> Result<(), JailError> {
        let none = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
        let read_only = if reads { libc::MOUNT_ATTR_RDONLY } else { 0 };
        set_attributes(self.0.as_raw_fd(), c"", none | read_only).map_err(|e| match e.raw_os_error() {
            Some(libc::ENOSYS) => JailError::OldKernel,
            _ => step("cannot restrict", path)(e),
        })
    }

    /// Mounts it at the path that it had, in the new root.
    fn put(&self, path: &Path) -> Result<(), JailError> {
        let place = inside_new(path);
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
        // MOVE_MOUNT_F_EMPTY_PATH.
        let flags = 4;
        // SAFETY: both paths are strings that end with 0 and live for the call.
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

/// Mounts an empty directory that becomes the root.
fn new_root() -> Result<(), JailError> {
    let at = c_string(Path::new(BUILT_AT)).map_err(step("no path:", BUILT_AT))?;
    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
    // SAFETY: all pointers are to strings that end with 0 and live for the call.
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

/// Makes what is at [`BUILT_AT`] the root of the process, and lets go of the old one: pivot_root(2), "." on
/// ".". That of an initramfs cannot be let go of. Over it the new one is mounted, as switch_root(8) does:
/// each way to what is below leads to what is above.
fn enter_new_root() -> Result<(), JailError> {
    let failed = |what| step(what, BUILT_AT);
    std::env::set_current_dir(BUILT_AT).map_err(failed("cannot enter"))?;
    // SAFETY: both paths are strings that end with 0.
    let pivoted = checked(unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) });
    match pivoted {
        Ok(()) => {
            // SAFETY: the path is a string that ends with 0.
            let left = unsafe { libc::umount2(c".".as_ptr(), libc::MNT_DETACH) };
            checked(left.into()).map_err(step("cannot let go of", "the host's root"))
        }
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            // SAFETY: the paths are strings that end with 0; the other pointers may be null for a move.
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

/// Adds attributes to a mount: to all below it, if it is a descriptor's.
fn set_attributes(fd: RawFd, path: &CStr, attributes: u64) -> io::Result<()> {
    let of_descriptor = libc::AT_EMPTY_PATH | RECURSIVE;
    let flags = if path.is_empty() { of_descriptor } else { 0 };
    let attr = libc::mount_attr {
        attr_set: attributes,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: the path is a string that ends with 0, and the structure is as long as is said.
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

/// Where `path` is while the new root is put together.
fn inside_new(path: &Path) -> PathBuf {
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
