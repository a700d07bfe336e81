//! Detection of hosts with several types of cores, each with its own PMU.

use std::fs;
use std::path::Path;

/// Names of the PMUs of hybrid x86 processors in Linux, one per core type.
const KINDS: [&str; 3] = ["cpu_core", "cpu_atom", "cpu_lowpower"];

/// Returns the reason why the hardware PMUs under `devices` are not used and what the user can do,
/// in one line. Returns `None` if one PMU covers all cores.
///
/// A perf event counts on one type of core only. A vCPU's thread migrates between core types, and
/// its counts would silently miss the time on the other types. Therefore hardware events are not
/// used on such hosts.
pub(super) fn refusal(devices: &Path) -> Option<String> {
    // The kernel lists the online CPUs of each core type.
    let kinds: Vec<String> = KINDS
        .into_iter()
        .filter(|kind| devices.join(kind).is_dir())
        .filter_map(|kind| match fs::read_to_string(devices.join(kind).join("cpus")) {
            Ok(list) if list.trim().is_empty() => None,
            Ok(list) => Some(format!("{kind}: {}", list.trim())),
            Err(_) => Some(kind.to_owned()),
        })
        .collect();
    if kinds.len() < 2 {
        return None;
    }
    Some(format!(
        "this host has several kinds of cores ({}), and a hardware event counts on one kind only; use --backing clock or \
         exact, or take the cores of the other kind offline",
        kinds.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(name: &str, pmus: &[(&str, &str)]) -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("perfvisor-hybrid-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        for (pmu, cpus) in pmus {
            fs::create_dir_all(dir.join(pmu)).unwrap();
            fs::write(dir.join(pmu).join("cpus"), cpus).unwrap();
        }
        dir
    }

    #[test]
    fn hybrid_host_is_rejected_with_cores_and_remedy() {
        let dir = devices(
            "two",
            &[("cpu_core", "0-7\n"), ("cpu_atom", "8-15\n"), ("software", "")],
        );
        let line = refusal(&dir).unwrap();
        fs::remove_dir_all(&dir).unwrap();
        assert!(line.contains("cpu_core: 0-7, cpu_atom: 8-15"), "{line}");
        assert!(line.contains("--backing clock") && !line.contains('\n'), "{line}");
    }

    #[test]
    fn uniform_cores_are_accepted() {
        let dir = devices("one", &[("cpu", ""), ("software", ""), ("cpu_core", "0-7\n")]);
        let line = refusal(&dir);
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(line, None);
        assert_eq!(refusal(Path::new("/nonexistent")), None);
        let dir = devices("offline", &[("cpu_core", "0-7\n"), ("cpu_atom", "\n")]);
        let line = refusal(&dir);
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(line, None, "the other kind is offline");
    }
}
