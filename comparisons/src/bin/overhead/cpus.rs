//! CPU affinity and priority. The vCPU runs alone on a CPU, with precedence over other programs.

use std::process::{Command, Stdio};

use crate::guest::MeasuredGuest;

/// Raises the scheduling priority of this process and its children.
pub(crate) fn raise_priority() {
    let mut renice = Command::new("renice");
    renice.args(["-n", "-15", "-p", &std::process::id().to_string()]);
    let _ = renice.stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// Parses a CPU list in the format of the kernel, such as `0-2,5`.
fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

/// Returns the CPUs on which this process may run. In the lab this excludes the first CPU
/// (docs/guide/lab.md).
fn allowed_cpus() -> Option<Vec<u32>> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    cpu_list(list)
}

/// Pins the vCPU to the first allowed CPU, and all other threads to the other allowed CPUs. Does
/// nothing if only one CPU is allowed.
pub(crate) fn pin(guest: &MeasuredGuest) {
    let (tid, own) = (guest.tid.to_string(), std::process::id().to_string());
    let cpus = allowed_cpus().unwrap_or_default();
    let [first, others @ ..] = &cpus[..] else { return };
    if others.is_empty() {
        return;
    }
    let set = |list: &str, args: &[&str]| {
        let mut taskset = Command::new("taskset");
        let (all, pid) = args.split_at(args.len() - 1);
        taskset
            .args(all)
            .args(["-c", "-p", list])
            .args(pid)
            .stdout(Stdio::null());
        taskset.status().is_ok_and(|s| s.success())
    };
    let others: Vec<String> = others.iter().map(u32::to_string).collect();
    let (others, vm) = (others.join(","), guest.child.0.id().to_string());
    if !(set(&others, &["-a", &vm]) && set(&first.to_string(), &[&tid]) && set(&others, &[&own])) {
        eprintln!("overhead: the vCPU could not be kept on a CPU of its own");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_cpus_is_read_as_the_kernel_prints_it() {
        assert_eq!(cpu_list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(cpu_list("\t1-2"), Some(vec![1, 2]));
        assert_eq!(cpu_list("3"), Some(vec![3]));
        for bad in ["", "a", "1-", "1,,2"] {
            assert_eq!(cpu_list(bad), None, "{bad}");
        }
    }
}
