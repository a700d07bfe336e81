//! How much memory the host can give: its RAM and swap, what of it is free, and what the control group of
//! this process may have (cgroup v2: Documentation/admin-guide/cgroup-v2.rst; v1: cgroup-v1/memory.rst).

use std::fs;
use std::path::{Path, PathBuf};

/// A v1 limit at or above this is none (`PAGE_COUNTER_MAX` pages, less a page or more).
const NO_LIMIT: u64 = 1 << 62;
/// Levels of control groups that are looked at.
const MOST_LEVELS: usize = 64;

/// A limit and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// The directory of the control group; `None`: the host.
    pub group: Option<PathBuf>,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = self.bytes >> 20;
        match &self.group {
            Some(group) => write!(f, "{mib} MiB, the limit of the control group {}", group.display()),
            None => write!(f, "{mib} MiB of this host's memory"),
        }
    }
}

/// What a process and the groups above it may have, and what of that is left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The least that any group may have, swap included.
    pub most: Option<Limit>,
    /// The least that is left, of the host or of any group.
    pub left: Option<Limit>,
}

/// What this process can have now.
pub fn limits() -> Limits {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    limits_of(Path::new("/sys/fs/cgroup"), &groups, &meminfo)
}

/// From the mount of the control groups and what `/proc` says.
fn limits_of(mount: &Path, groups: &str, meminfo: &str) -> Limits {
    let mut limits = Limits::default();
    if let Some(bytes) = meminfo_bytes(meminfo, "MemAvailable:") {
        limits.left = Some(Limit { bytes, group: None });
    }
    for line in groups.lines() {
        // ID:CONTROLLERS:PATH, with no controllers for v2.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (mount, names) = if controllers.is_empty() {
            (mount.to_owned(), &V2)
        } else if controllers.split(',').any(|name| name == "memory") {
            (mount.join("memory"), &V1)
        } else {
            continue;
        };
        let own = mount.join(path.trim_start_matches('/'));
        // In a container the path may be one of outside.
        let own = if own.is_dir() { own } else { mount.clone() };
        for group in own
            .ancestors()
            .take(MOST_LEVELS)
            .take_while(|group| group.starts_with(&mount))
        {
            limits.take_in(group, names);
        }
    }
    limits
}

/// The names of a group's files.
struct Names {
    limit: &'static str,
    swap: &'static str,
    used: &'static str,
    inactive: &'static str,
}

const V2: Names = Names {
    limit: "memory.max",
    swap: "memory.swap.max",
    used: "memory.current",
    inactive: "inactive_file ",
};
const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    // Of v1 it limits memory and swap together, and may not be there.
    swap: "",
    used: "memory.usage_in_bytes",
    inactive: "total_inactive_file ",
};

impl Limits {
    fn take_in(&mut self, group: &Path, names: &Names) {
        let Some(limit) = number(&group.join(names.limit)).filter(|&bytes| bytes < NO_LIMIT) else {
            return;
        };
        let of_group = |bytes| Limit {
            bytes,
            group: Some(group.to_owned()),
        };
        // No number there is no limit, or no swap.
        let swap = match names.swap {
            "" => None,
            name => number(&group.join(name)),
        };
        if let Some(swap) = swap {
            least(&mut self.most, of_group(limit.saturating_add(swap)));
        }
        let used = number(&group.join(names.used)).unwrap_or(0);
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        let inactive = stat
            .lines()
            .find_map(|line| line.strip_prefix(names.inactive)?.trim().parse().ok())
            .unwrap_or(0);
        // Page cache is given back before anything is refused.
        let used = used.saturating_sub(inactive);
        least(&mut self.left, of_group(limit.saturating_sub(used)));
    }
}

fn least(of: &mut Option<Limit>, other: Limit) {
    if of.as_ref().is_none_or(|limit| other.bytes < limit.bytes) {
        *of = Some(other);
    }
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// A line of `/proc/meminfo`, which is in KiB.
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

    #[test]
    fn without_groups_the_host_is_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let limits = limits_of(dir.path(), "0::/\n", MEMINFO);
        assert_eq!(limits.most, None);
        assert_eq!(
            limits.left,
            Some(Limit {
                bytes: 1 << 30,
                group: None
            })
        );
        assert_eq!(limits_of(dir.path(), "nonsense", ""), Limits::default());
    }

    /// A group above has the lower limit, and what it holds as page cache can be had.
    #[test]
    fn the_tightest_group_of_all_levels_counts() {
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
        let limits = limits_of(dir.path(), "0::/vms/one\n", MEMINFO);
        let of = |bytes| {
            Some(Limit {
                bytes,
                group: Some(above.clone()),
            })
        };
        assert_eq!((limits.most, limits.left), (of(512 << 20), of(236_870_912)));
    }

    #[test]
    fn groups_of_the_first_version_and_of_containers_are_found() {
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
            let limits = limits_of(dir.path(), groups, MEMINFO);
            assert_eq!(limits.left.unwrap().bytes, 100_000_000, "{groups}");
        }
    }
}
