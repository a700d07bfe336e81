//! A control group that somebody has made and given limits: the process joins it
//! (`Documentation/admin-guide/cgroup-v2.rst`).

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::fstatfs;

/// The file of a group that processes are put in by.
const PROCESSES: &str = "cgroup.procs";
/// What the file systems are (statfs(2)): `CGROUP2_SUPER_MAGIC`, `CGROUP_SUPER_MAGIC`.
const V2: u64 = 0x6367_7270;
const V1: u64 = 0x27_e0eb;

/// Why a control group is not joined.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// Nothing is there, or it cannot be opened.
    #[error(
        "{}: no control group of cgroup v2 that this user may put processes into; make it first (mkdir in \
         /sys/fs/cgroup, or a unit of systemd with Delegate=yes)",
        .0.display()
    )]
    None(PathBuf, #[source] io::Error),
    /// A group of version 1.
    #[error("{}: a control group of version 1; name one of cgroup v2", .0.display())]
    Version1(PathBuf),
    /// Some other directory.
    #[error("{}: no control group; name a directory of cgroup v2, as /sys/fs/cgroup/vms/web", .0.display())]
    NoGroup(PathBuf),
    /// The kernel does not let the process in.
    #[error("{}: the kernel does not let this process in{hint}", path.display())]
    Refused {
        /// The group.
        path: PathBuf,
        /// What may help, behind a colon; or nothing.
        hint: &'static str,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// Puts the process, with all threads that it has, into the control group whose directory is `dir`. What it
/// allocates and whom it starts from now on is accounted there.
///
/// # Errors
/// [`CgroupError`]; the process stays where it was.
pub fn join_cgroup(dir: &Path) -> Result<(), CgroupError> {
    let none = |e: io::Error| CgroupError::None(dir.to_owned(), e);
    let mut processes = File::options()
        .write(true)
        .open(dir.join(PROCESSES))
        .map_err(none)?;
    let system = fstatfs(&processes).map_err(|e| none(e.into()))?;
    match u64::try_from(system.f_type).unwrap_or_default() {
        V2 => {}
        V1 => return Err(CgroupError::Version1(dir.to_owned())),
        _ => return Err(CgroupError::NoGroup(dir.to_owned())),
    }
    // 0 is who writes.
    processes.write_all(b"0").map_err(|source| CgroupError::Refused {
        path: dir.to_owned(),
        hint: match source.raw_os_error() {
            Some(libc::EBUSY) => {
                " (it shares controllers among groups below it, cgroup.subtree_control: name one of those)"
            }
            Some(libc::EACCES | libc::EPERM) => {
                " (cgroup.procs of the group above both must be this user's to write: start the VM there, or as root)"
            }
            Some(libc::EOPNOTSUPP) => " (cgroup.type there must be 'domain')",
            _ => "",
        },
        source,
    })
}
