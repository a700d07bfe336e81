//! Determines how much memory the host can provide: RAM and swap, available memory, and the limits
//! of the process's control groups (cgroup v2: Documentation/admin-guide/cgroup-v2.rst; v1:
//! cgroup-v1/memory.rst).

use std::fs;
use std::path::{Path, PathBuf};

/// Lowest value of a cgroup v1 limit that means "unlimited". The kernel reports almost 2^63 bytes
/// (`PAGE_COUNTER_MAX` pages).
const NO_LIMIT: u64 = 1 << 62;
/// Maximum number of levels of a control group's path that are examined.
const MAX_CGROUP_DEPTH: usize = 64;

/// A limit on memory, with its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostMemoryLimit {
    /// Maximum amount of memory in bytes.
    pub bytes: u64,
    /// Directory of the control group, or `None` for a limit of the host.
    pub group: Option<PathBuf>,
}

impl std::fmt::Display for HostMemoryLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = self.bytes >> 20;
        match &self.group {
            Some(group) => write!(f, "{mib} MiB, the limit of the control group {}", group.display()),
            None => write!(f, "{mib} MiB of this host's memory"),
        }
    }
}

/// Limits on the memory of a process, and the memory that is still available.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMemoryLimits {
    /// Lowest limit on memory and swap that a control group of the process imposes.
    pub limit: Option<HostMemoryLimit>,
    /// Smallest amount of memory that is still available, on the host or in a control group of the
    /// process.
    pub available: Option<HostMemoryLimit>,
}

/// Returns the current memory limits of this process, and the memory that is still available.
pub fn limits() -> HostMemoryLimits {
    let proc = |name: &str| {
        let bytes = fs::read(Path::new("/proc").join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    };
    limits_of(&proc("self/mountinfo"), &proc("self/cgroup"), &proc("meminfo"))
}

/// Returns the limits that follow from the contents of `/proc/self/mountinfo`, `/proc/self/cgroup`
/// and `/proc/meminfo`.
fn limits_of(mountinfo: &str, groups: &str, meminfo: &str) -> HostMemoryLimits {
    let mut limits = HostMemoryLimits::default();
    if let Some(bytes) = meminfo_bytes(meminfo, "MemAvailable:") {
        limits.available = Some(HostMemoryLimit { bytes, group: None });
    }
    for line in groups.lines() {
        // ID:CONTROLLERS:PATH, with no controllers for v2.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let version = if controllers.is_empty() {
            CgroupVersion::V2
        } else if controllers.split(',').any(|name| name == "memory") {
            CgroupVersion::V1
        } else {
            continue;
        };
        let Some(CgroupMount { root, point }) = mount_of(mountinfo, version, Path::new(path)) else {
            continue;
        };
        let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
        let own = point.join(below);
        // In a container the path may be relative to the host's hierarchy.
        let own = if own.is_dir() { own } else { point.clone() };
        for group in own
            .ancestors()
            .take(MAX_CGROUP_DEPTH)
            .take_while(|group| group.starts_with(&point))
        {
            limits.take_in(group, version.names());
        }
    }
    limits
}

/// Version of a control group hierarchy with a memory controller. A host may have both versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CgroupVersion {
    V1,
    V2,
}

impl CgroupVersion {
    fn names(self) -> &'static CgroupFileNames {
        match self {
            Self::V1 => &V1,
            Self::V2 => &V2,
        }
    }

    /// Returns whether a mount with this type and these options is a control group hierarchy of
    /// this version; for v1, with the memory controller.
    fn is(self, filesystem: &str, options: &str) -> bool {
        match self {
            Self::V1 => filesystem == "cgroup" && options.split(',').any(|option| option == "memory"),
            Self::V2 => filesystem == "cgroup2",
        }
    }
}

/// A mount of a control group hierarchy.
#[derive(Debug, PartialEq, Eq)]
struct CgroupMount {
    /// Path, in the hierarchy, of the control group that the mount shows as its root.
    root: PathBuf,
    /// Path of the mount point.
    point: PathBuf,
}

/// Returns a mount of the hierarchy `version`, preferably one that contains `group`. Otherwise any
/// mount is returned, because a container's group may have a different name on the host.
fn mount_of(mountinfo: &str, version: CgroupVersion, group: &Path) -> Option<CgroupMount> {
    // ID PARENT DEVICE ROOT POINT OPTIONS ... - FILESYSTEM SOURCE OPTIONS (proc_pid_mountinfo(5))
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut filesystem = filesystem.split(' ');
        let (kind, options) = (filesystem.next()?, filesystem.nth(1)?);
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (unescaped(fields.next()?), unescaped(fields.next()?));
        version.is(kind, options).then_some(CgroupMount { root, point })
    });
    let mut other = None;
    for mount in mounts {
        if group.starts_with(&mount.root) {
            return Some(mount);
        }
        other.get_or_insert(mount);
    }
    other
}

/// Decodes a path in mountinfo, where spaces, tabs, newlines and backslashes are octal escapes.
fn unescaped(text: &str) -> PathBuf {
    let mut path = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once('\\') {
        path.push_str(before);
        let digits = behind
            .get(..3)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        rest = match digits.filter(u8::is_ascii) {
            Some(byte) => {
                path.push(byte.into());
                &behind[3..]
            }
            None => {
                path.push('\\');
                behind
            }
        };
    }
    path.push_str(rest);
    path.into()
}

/// Names of the files that contain the limits and the usage of a control group.
struct CgroupFileNames {
    limit: &'static str,
    swap: &'static str,
    used: &'static str,
    inactive: &'static str,
}

const V2: CgroupFileNames = CgroupFileNames {
    limit: "memory.max",
    swap: "memory.swap.max",
    used: "memory.current",
    inactive: "inactive_file ",
};
const V1: CgroupFileNames = CgroupFileNames {
    limit: "memory.limit_in_bytes",
    // The v1 limit covers memory and swap together. The file may be missing.
    swap: "",
    used: "memory.usage_in_bytes",
    inactive: "total_inactive_file ",
};

impl HostMemoryLimits {
    fn take_in(&mut self, group: &Path, names: &CgroupFileNames) {
        let Some(limit) = number(&group.join(names.limit)).filter(|&bytes| bytes < NO_LIMIT) else {
            return;
        };
        let of_group = |bytes| HostMemoryLimit {
            bytes,
            group: Some(group.to_owned()),
        };
        // A value that is not a number means no limit, or no swap.
        let swap = match names.swap {
            "" => None,
            name => number(&group.join(name)),
        };
        if let Some(swap) = swap {
            least(&mut self.limit, of_group(limit.saturating_add(swap)));
        }
        let used = number(&group.join(names.used)).unwrap_or(0);
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let inactive = stat
            .lines()
            .find_map(|line| line.strip_prefix(names.inactive)?.trim().parse().ok())
            .unwrap_or(0);
        // Inactive page cache counts as available, because the kernel reclaims it before an
        // allocation fails.
        let used = used.saturating_sub(inactive);
        least(&mut self.available, of_group(limit.saturating_sub(used)));
    }
}

fn least(of: &mut Option<HostMemoryLimit>, other: HostMemoryLimit) {
    if of.as_ref().is_none_or(|limit| other.bytes < limit.bytes) {
        *of = Some(other);
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns a value of `/proc/meminfo`, converted from KiB to bytes.
fn meminfo_bytes(meminfo: &str, key: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:  24105000 kB\nMemAvailable:   1048576 kB\n";

    fn group(at: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(at).unwrap();
        for (name, text) in files {
            fs::write(at.join(name), text).unwrap();
        }
    }

    /// Returns the text of mountinfo for cgroup mounts, each with its version, root group and mount
    /// point.
    fn mounts(all: &[(CgroupVersion, &str, &Path)]) -> String {
        let mut text = "22 1 0:21 / /proc rw,nosuid shared:12 - proc proc rw\n".to_owned();
        for (version, root, point) in all {
            let point = point.display().to_string();
            let point = point.replace('\\', "\\134").replace(' ', "\\040");
            text += &match version {
                CgroupVersion::V2 => {
                    format!("35 24 0:30 {root} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n")
                }
                CgroupVersion::V1 => {
                    format!("36 24 0:31 {root} {point} rw,nosuid - cgroup cgroup rw,memory\n")
                }
            };
        }
        text
    }

    fn v2(at: &Path) -> String {
        mounts(&[(CgroupVersion::V2, "/", at)])
    }

    #[test]
    fn host_memory_limits_without_cgroups() {
        let dir = tempfile::tempdir().unwrap();
        let limits = limits_of(&v2(dir.path()), "0::/\n", MEMINFO);
        assert_eq!(limits.limit, None);
        assert_eq!(
            limits.available,
            Some(HostMemoryLimit {
                bytes: 1 << 30,
                group: None
            })
        );
        assert_eq!(limits_of("", "0::/\n", MEMINFO), limits, "no control groups");
        assert_eq!(
            limits_of("1 2 - cgroup2\n - \n\\\\9 - cgroup", "nonsense\n0::", ""),
            HostMemoryLimits::default()
        );
    }

    /// The lowest limit of a control group and its ancestors applies. Page cache counts as
    /// available memory.
    #[test]
    fn lowest_cgroup_limit_applies() {
        let dir = tempfile::tempdir().unwrap();
        let above = dir.path().join("vms");
        group(
            &above,
            &[
                ("memory.max", "536870912\n"),
                ("memory.swap.max", "0\n"),
                ("memory.current", "400000000\n"),
                ("memory.stat", "anon 1\ninactive_file 100000000\n"),
            ],
        );
        group(
            &above.join("one"),
            &[("memory.max", "max\n"), ("memory.current", "1\n")],
        );
        let limits = limits_of(&v2(dir.path()), "0::/vms/one\n", MEMINFO);
        let of = |bytes| {
            Some(HostMemoryLimit {
                bytes,
                group: Some(above.clone()),
            })
        };
        assert_eq!((limits.limit, limits.available), (of(512 << 20), of(236_870_912)));
    }

    #[test]
    fn cgroup_v1_and_container_limits_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let memory = dir.path().join("memory");
        group(
            &memory,
            &[
                ("memory.limit_in_bytes", "104857600\n"),
                ("memory.usage_in_bytes", "4857600\n"),
            ],
        );
        group(
            &memory.join("none"),
            &[("memory.limit_in_bytes", "9223372036854771712\n")],
        );
        for groups in ["5:cpu:/\n4:memory:/docker/abc\n", "4:memory,hugetlb:/none\n"] {
            let limits = limits_of(&mounts(&[(CgroupVersion::V1, "/", &memory)]), groups, MEMINFO);
            assert_eq!(limits.available.unwrap().bytes, 100_000_000, "{groups}");
        }
    }

    /// The limit comes from the control group hierarchy that has the memory controller, here v1 and
    /// not v2.
    #[test]
    fn cgroup_hierarchy_with_memory_controller_is_selected() {
        let dir = tempfile::tempdir().unwrap();
        let (unified, memory) = (dir.path().join("unified"), dir.path().join("a b\\c"));
        group(&unified.join("vms"), &[("cgroup.procs", "")]);
        group(
            &memory.join("vms"),
            &[
                ("memory.limit_in_bytes", "104857600\n"),
                ("memory.usage_in_bytes", "4857600\n"),
            ],
        );
        let both = mounts(&[
            (CgroupVersion::V2, "/", &unified),
            (CgroupVersion::V1, "/", &memory),
        ]);
        let limits = limits_of(&both, "4:memory:/vms\n1:name=systemd:/vms\n0::/vms\n", MEMINFO);
        let left = limits.available.unwrap();
        assert_eq!((left.bytes, left.group), (100_000_000, Some(memory.join("vms"))));
    }

    /// If several mounts show different parts of a hierarchy, the mount that contains the process's
    /// group is used.
    #[test]
    fn cgroup_mount_showing_group_is_selected() {
        let dir = tempfile::tempdir().unwrap();
        let (others, ours) = (dir.path().join("others"), dir.path().join("ours"));
        group(&others, &[("memory.max", "1000\n")]);
        group(
            &ours.join("one"),
            &[("memory.max", "104857600\n"), ("memory.current", "0\n")],
        );
        let both = mounts(&[
            (CgroupVersion::V2, "/else", &others),
            (CgroupVersion::V2, "/vms", &ours),
        ]);
        let left = limits_of(&both, "0::/vms/one\n", MEMINFO).available.unwrap();
        assert_eq!((left.bytes, left.group), (100 << 20, Some(ours.join("one"))));
        // A process in a control group namespace sees its own group as the root.
        let named = mounts(&[(CgroupVersion::V2, "/vms", &ours.join("one"))]);
        let left = limits_of(&named, "0::/\n", MEMINFO).available.unwrap();
        assert_eq!(left.bytes, 100 << 20);
    }
}
