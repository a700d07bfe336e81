//! `perfvisor jailer`: a replacement for Firecracker's jailer. Builds a directory with the program
//! and the devices that a VM needs, makes it the root directory, and starts the program there as
//! another user.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use clap::Args;
use firecracker_api::API_VERSION;
use operator::commands::print;
use operator::exit::ExitStatus;
use operator::values::integer_in_range;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::time::{ClockId, Timespec, clock_gettime};
use sandbox::chroot_jail::{self, ChrootJailError};
use sandbox::{CgroupError, create_cgroup, join_cgroup};

use crate::firecracker::parse_id;
use crate::inherited::InheritedDescriptors;

/// Word that the name of the program must contain, as in Firecracker.
const EXEC_NAME: &str = "firecracker";
/// Maximum number of descriptors without `--resource-limit no-file`.
const DEFAULT_DESCRIPTORS: u64 = 2048;
/// Directory of the control sockets in the jail, for `XDG_RUNTIME_DIR`.
const RUNTIME_DIR: &str = "/run";

/// Options of `perfvisor jailer`, with the names of Firecracker's.
#[derive(Clone, Debug, Args)]
#[command(disable_version_flag = true)]
pub struct JailerArgs {
    /// Set the name of the VM and its directory.
    #[arg(long, value_name = "ID", value_parser = parse_id, required_unless_present = "version")]
    pub id: Option<String>,
    /// Start this program, a copy of perfvisor or a link to it. Its name must contain
    /// "firecracker".
    #[arg(long, value_name = "FILE", required_unless_present = "version")]
    pub exec_file: Option<PathBuf>,
    /// Start the program as the user with this ID.
    #[arg(long, value_name = "N", required_unless_present = "version")]
    pub uid: Option<u32>,
    /// Start the program with this group ID.
    #[arg(long, value_name = "N", required_unless_present = "version")]
    pub gid: Option<u32>,
    /// Create the root directory DIR/NAME/ID/root, where NAME is the name of the program.
    #[arg(long, value_name = "DIR", default_value = "/srv/jailer")]
    pub chroot_base_dir: PathBuf,
    /// Join the network namespace of this file, for example /var/run/netns/web.
    #[arg(long, value_name = "FILE")]
    pub netns: Option<PathBuf>,
    /// Detach from the terminal by creating a session and using /dev/null for the standard streams.
    #[arg(long)]
    pub daemonize: bool,
    /// Start the program in a PID namespace. Its process ID is written to NAME.pid in the root
    /// directory.
    #[arg(long)]
    pub new_pid_ns: bool,
    /// Set a value of the control group, for example cpu.max=50000. Requires --cgroup-version 2.
    #[arg(long, value_name = "FILE=VALUE", value_parser = parse_setting)]
    pub cgroup: Vec<(String, String)>,
    /// Select the version of control groups; version 1 is unsupported.
    #[arg(long, value_name = "1|2", default_value_t = 1, value_parser = integer_in_range(1..=2_u8))]
    pub cgroup_version: u8,
    /// Create the control group ID in this control group [default: the name of the program]
    #[arg(long, value_name = "PATH", value_parser = parse_group)]
    pub parent_cgroup: Option<PathBuf>,
    /// Limit the size of written files (fsize=BYTES) or the number of descriptors (no-file=N).
    #[arg(long, value_name = "RESOURCE=VALUE", value_parser = parse_limit)]
    pub resource_limit: Vec<(RlimitResource, u64)>,
    /// Print the version of the jailer.
    #[arg(long)]
    pub version: bool,
    /// Arguments of the program.
    #[arg(last = true)]
    pub arguments: Vec<std::ffi::OsString>,
}

/// A resource that can be limited with `--resource-limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RlimitResource {
    /// Size of written files, in bytes.
    FileSize,
    /// Number of open descriptors.
    Descriptors,
}

/// Error returned when `perfvisor jailer` fails. Each message is one line.
#[derive(Debug, thiserror::Error)]
pub enum JailerError {
    /// Version 1 of control groups, which is not supported with `--cgroup`.
    #[error("--cgroup-version 1: unsupported with --cgroup; use 2")]
    CgroupVersion,
    /// The name of the program does not contain `firecracker`.
    #[error("--exec-file {}: the name must contain '{EXEC_NAME}'", .0.display())]
    ExecName(PathBuf),
    /// A file or directory cannot be used.
    #[error("{option} {}", path.display())]
    File {
        /// Option that specifies the file or directory.
        option: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// Error returned by the operating system.
        #[source]
        source: io::Error,
    },
    /// No cgroup file system is mounted.
    #[error("--cgroup: no cgroup v2 file system is mounted")]
    NoCgroups,
    /// The control group cannot be used.
    #[error("--cgroup")]
    Cgroup(#[from] CgroupError),
    /// The kernel rejects a resource limit.
    #[error("--resource-limit")]
    Limit(#[source] io::Error),
    /// The jail cannot be built.
    #[error(transparent)]
    Jail(#[from] ChrootJailError),
    /// The jailed program does not start.
    #[error("{0} does not start")]
    Start(String, #[source] io::Error),
    /// The version cannot be printed.
    #[error("standard output")]
    Print(#[source] operator::commands::CommandOutputError),
}

fn file_error(option: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JailerError {
    let path = path.to_owned();
    move |source| JailerError::File { option, path, source }
}

/// Parses FILE=VALUE. FILE is a file of a control group, without a directory.
fn parse_setting(text: &str) -> Result<(String, String), String> {
    let setting = text.split_once('=').filter(|(file, value)| {
        file.contains('.') && !file.starts_with('.') && !file.contains('/') && !value.is_empty()
    });
    let (file, value) = setting.ok_or("must be FILE=VALUE, for example cpu.max=50000")?;
    Ok((file.to_owned(), value.to_owned()))
}

/// Parses the path of a control group, which must be relative and must not contain `..`.
fn parse_group(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    let is_below = path.components().all(|part| matches!(part, Component::Normal(_)));
    (is_below && !text.is_empty())
        .then_some(path)
        .ok_or_else(|| "must be a relative path without '..'".to_owned())
}

fn parse_limit(text: &str) -> Result<(RlimitResource, u64), String> {
    let wrong = || "must be fsize=BYTES or no-file=N".to_owned();
    let (name, value) = text.split_once('=').ok_or_else(wrong)?;
    let resource = match name {
        "fsize" => RlimitResource::FileSize,
        "no-file" => RlimitResource::Descriptors,
        _ => return Err(wrong()),
    };
    Ok((resource, value.parse().map_err(|_| wrong())?))
}

/// Builds the jail and executes the jailed program in this process. With `--new-pid-ns`, the
/// program runs as a child process, and this function returns.
///
/// # Errors
/// Returns [`JailerError`] if an option is unsupported or the jail cannot be built.
pub fn jailer(args: &JailerArgs) -> Result<ExitStatus, JailerError> {
    let (Some(id), Some(exec_file), Some(uid), Some(gid)) = (&args.id, &args.exec_file, args.uid, args.gid)
    else {
        print(&format!("Jailer v{API_VERSION}\n")).map_err(JailerError::Print)?;
        return Ok(ExitStatus::PoweredOff);
    };
    if args.cgroup_version == 1 && !args.cgroup.is_empty() {
        return Err(JailerError::CgroupVersion);
    }
    let started = micros(clock_gettime(ClockId::Monotonic));
    // Mark the inherited descriptors as close-on-exec, so that exec(2) closes them.
    let _ = InheritedDescriptors::mark();
    let name = exec_name(exec_file)?;
    let network = args.netns.as_ref().map(|path| {
        let file = File::open(path).map_err(file_error("--netns", path));
        file.map(|file| (file, path))
    });
    let network = network.transpose()?;
    let null = OpenOptions::new().read(true).write(true).open("/dev/null");
    let null = null.map_err(file_error("--daemonize", Path::new("/dev/null")))?;
    let root = create_root(&args.chroot_base_dir.join(&name).join(id), exec_file, &name)?;
    set_limits(&args.resource_limit)?;
    join_group(args, &name, id)?;
    if let Some((namespace, path)) = network {
        chroot_jail::join_network(&namespace, path)?;
    }
    chroot_jail::enter(&root, uid, gid)?;
    let pid_file = args.new_pid_ns.then(|| create_pid_file(&name)).transpose()?;
    if args.daemonize {
        chroot_jail::detach(&null)?;
    }
    if args.new_pid_ns {
        chroot_jail::separate_process_ids()?;
    }
    chroot_jail::drop_rights(uid, gid)?;
    let cpu = micros(clock_gettime(ClockId::ProcessCPUTime));
    let mut program = Command::new(format!("/{name}"));
    program
        .arg(format!("--id={id}"))
        .args([
            format!("--start-time-us={started}"),
            "--start-time-cpu-us=0".to_owned(),
            format!("--parent-cpu-time-us={cpu}"),
        ])
        .args(&args.arguments)
        .env_clear()
        .env("XDG_RUNTIME_DIR", RUNTIME_DIR);
    let Some(mut pid_file) = pid_file else {
        return Err(JailerError::Start(name, program.exec()));
    };
    let child = program.spawn().map_err(|e| JailerError::Start(name, e))?;
    write!(pid_file, "{}", child.id()).map_err(file_error("--new-pid-ns", &root))?;
    Ok(ExitStatus::PoweredOff)
}

fn micros(time: Timespec) -> u64 {
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0) / 1000
}

/// Returns the file name of the program to jail, which must contain [`EXEC_NAME`].
fn exec_name(exec_file: &Path) -> Result<String, JailerError> {
    let name = exec_file.file_name().and_then(|name| name.to_str());
    let name = name.filter(|name| name.contains(EXEC_NAME));
    let name = name.ok_or_else(|| JailerError::ExecName(exec_file.to_owned()))?;
    Ok(name.to_owned())
}

/// Creates the root directory in `dir` with a copy of the program, and returns its absolute path.
fn create_root(dir: &Path, exec_file: &Path, name: &str) -> Result<PathBuf, JailerError> {
    let root = dir.join("root");
    let failed = || file_error("--chroot-base-dir", &root);
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(&root)
        .map_err(failed())?;
    let root = fs::canonicalize(&root).map_err(failed())?;
    let mut source = File::open(exec_file).map_err(file_error("--exec-file", exec_file))?;
    let copy = root.join(name);
    // The user of an earlier VM with the same ID may have replaced the copy with a link.
    match fs::remove_file(&copy) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed()(e)),
        _ => {}
    }
    let mut options = OpenOptions::new();
    let target = options.write(true).create_new(true).mode(0o755).open(&copy);
    let mut target = target.map_err(failed())?;
    io::copy(&mut source, &mut target).map_err(failed())?;
    // Make the mode independent of the umask.
    target
        .set_permissions(fs::Permissions::from_mode(0o755))
        .map_err(failed())?;
    Ok(root)
}

fn set_limits(limits: &[(RlimitResource, u64)]) -> Result<(), JailerError> {
    let default = (RlimitResource::Descriptors, DEFAULT_DESCRIPTORS);
    for (resource, limit) in [default].iter().chain(limits) {
        let resource = match resource {
            RlimitResource::FileSize => Resource::Fsize,
            RlimitResource::Descriptors => Resource::Nofile,
        };
        let limit = Rlimit {
            current: Some(*limit),
            maximum: Some(*limit),
        };
        setrlimit(resource, limit).map_err(|e| JailerError::Limit(e.into()))?;
    }
    Ok(())
}

/// Creates and joins the control group of the VM. Without settings, joins the existing group of
/// `--parent-cgroup`, as Firecracker's jailer does.
fn join_group(args: &JailerArgs, name: &str, id: &str) -> Result<(), JailerError> {
    let is_unnamed = args.parent_cgroup.is_none() || args.cgroup_version == 1;
    if args.cgroup.is_empty() && is_unnamed {
        return Ok(());
    }
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let mount = cgroup_mount(&mounts).ok_or(JailerError::NoCgroups)?;
    let parent = args.parent_cgroup.as_deref().unwrap_or(Path::new(name));
    let group = if args.cgroup.is_empty() {
        mount.join(parent)
    } else {
        create_cgroup(mount, &parent.join(id), &args.cgroup)?
    };
    Ok(join_cgroup(&group)?)
}

/// Returns the mount point of the cgroup v2 file system, given the contents of `/proc/mounts`.
fn cgroup_mount(mounts: &str) -> Option<&Path> {
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ');
        let (target, kind) = (words.nth(1)?, words.next()?);
        (kind == "cgroup2").then_some(Path::new(target))
    })
}

/// Creates the file for the process ID of the jailed program. The file belongs to root.
fn create_pid_file(name: &str) -> Result<File, JailerError> {
    let path = PathBuf::from(format!("/{name}.pid"));
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(file_error("--new-pid-ns", &path)(e)),
        _ => {}
    }
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(&path);
    file.map_err(file_error("--new-pid-ns", &path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_leave_their_directory_are_refused() {
        assert!(parse_setting("cpu.max=50000 100000").is_ok());
        for text in ["cpu.max", "cpu.max=", "../cpu.max=1", "a/b.c=1", ".=1", "cpu=1"] {
            assert!(parse_setting(text).is_err(), "{text}");
        }
        assert!(parse_group("vms/web").is_ok());
        for text in ["", "/vms", "../vms", "vms/../.."] {
            assert!(parse_group(text).is_err(), "{text}");
        }
        assert_eq!(parse_limit("fsize=1"), Ok((RlimitResource::FileSize, 1)));
        for text in ["fsize", "core=1", "no-file=x"] {
            assert!(parse_limit(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cgroup_file_system_is_found() {
        let mounts = "proc /proc proc rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n";
        assert_eq!(cgroup_mount(mounts), Some(Path::new("/sys/fs/cgroup")));
        assert_eq!(cgroup_mount("cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n"), None);
    }
}
