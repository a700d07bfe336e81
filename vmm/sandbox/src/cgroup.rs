//! Adds the process to an existing control group, whose resource limits then apply
//! (`Documentation/admin-guide/cgroup-v2.rst`).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::fstatfs;

/// File of a control group. A process joins the group when its ID is written to this file.
const PROCESSES: &str = "cgroup.procs";
/// File system type of cgroup v2 as returned by statfs(2) (`CGROUP2_SUPER_MAGIC`).
const V2: u64 = 0x6367_7270;
const V1: u64 = 0x27_e0eb;

/// Error returned when a control group cannot be created or joined.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The control group does not exist or cannot be opened.
    #[error(
        "{}: not a cgroup v2 directory to which this user may add processes; create it first \
        (mkdir in /sys/fs/cgroup, or a systemd unit with Delegate=yes)",
        .0.display()
    )]
    None(PathBuf, #[source] io::Error),
    /// The directory is a control group of version 1.
    #[error("{}: unsupported cgroup version 1; use cgroup v2", .0.display())]
    Version1(PathBuf),
    /// The directory is not a control group.
    #[error("{}: not a control group; use a cgroup v2 directory, for example /sys/fs/cgroup/vms/web", .0.display())]
    NoGroup(PathBuf),
    /// The control group cannot be created or configured.
    #[error("{}: cannot create or configure the control group", .0.display())]
    Configure(PathBuf, #[source] io::Error),
    /// The kernel did not admit the process to the control group.
    #[error("{}: cannot join the control group{hint}", path.display())]
    Refused {
        /// Path of the control group.
        path: PathBuf,
        /// Suggested fix, preceded by a colon, or an empty string.
        hint: &'static str,
        /// Error returned by the kernel.
        #[source]
        source: io::Error,
    },
}

/// Creates the control group `path`, relative to the cgroup file system at `mount`, and writes
/// `settings`, which are file names and their values. In the parent groups, enables the controllers
/// that these settings need.
///
/// # Errors
/// Returns [`CgroupError::Configure`] if the kernel rejects a group, a controller or a value.
pub fn create_cgroup(
    mount: &Path,
    path: &Path,
    settings: &[(String, String)],
) -> Result<PathBuf, CgroupError> {
    let mut group = mount.to_owned();
    for component in path.components() {
        for (file, _) in settings {
            // Each file name begins with the name of its controller, except for the files
            // `cgroup.*`, which every group has.
            let controller = file.split('.').next().unwrap_or_default();
            if controller != "cgroup" {
                let file = group.join("cgroup.subtree_control");
                let enabled = fs::write(&file, format!("+{controller}"));
                enabled.map_err(|e| CgroupError::Configure(file, e))?;
            }
        }
        group.push(component);
        match fs::create_dir(&group) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(CgroupError::Configure(group, e));
            }
            _ => {}
        }
    }
    for (file, value) in settings {
        let file = group.join(file);
        fs::write(&file, value).map_err(|e| CgroupError::Configure(file, e))?;
    }
    Ok(group)
}

/// Moves the process with all its threads into the control group at `dir`. Memory allocated later,
/// and processes started later, are accounted to this group.
///
/// # Errors
/// Returns a [`CgroupError`] on failure, in which case the process remains in its control group.
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
    // The kernel takes 0 as the ID of the writing process.
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
