//! The host kernel's accounting data for vCPU threads, which is independent of Perfvisor.

use std::fs;
use std::ops::Sub;

/// Accounting data of a thread since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadAccounting {
    /// CPU time, in ns (`schedstat`).
    pub cpu_ns: u64,
    /// Time waiting for a CPU while runnable, in ns (`schedstat`).
    pub wait_ns: u64,
    /// Number of minor and major page faults (`stat`).
    pub page_faults: u64,
    /// Number of voluntary and involuntary context switches (`status`).
    pub context_switches: u64,
    /// Number of CPU migrations (`sched`), or `None` if the kernel does not report it.
    pub migrations: Option<u64>,
}

impl Sub for ThreadAccounting {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            wait_ns: self.wait_ns.saturating_sub(before.wait_ns),
            page_faults: self.page_faults.saturating_sub(before.page_faults),
            context_switches: self.context_switches.saturating_sub(before.context_switches),
            migrations: self
                .migrations
                .zip(before.migrations)
                .map(|(now, then)| now.saturating_sub(then)),
        }
    }
}

impl ThreadAccounting {
    /// Reads the accounting data of thread `tid` of process `pid`. Returns `None` if the thread has
    /// exited or the kernel has no `schedstat`.
    pub fn read(pid: u32, tid: u32) -> Option<Self> {
        let file = |name: &str| fs::read_to_string(format!("/proc/{pid}/task/{tid}/{name}"));
        let schedstat = file("schedstat").ok()?;
        let mut numbers = schedstat.split_ascii_whitespace().map_while(|n| n.parse().ok());
        Some(Self {
            cpu_ns: numbers.next()?,
            wait_ns: numbers.next()?,
            page_faults: page_faults(&file("stat").ok()?)?,
            context_switches: sum_of(&file("status").ok()?, "ctxt_switches:"),
            migrations: file("sched").ok().as_deref().and_then(migrations),
        })
    }
}

/// Returns the sum of fields 10 and 12 of `stat`. The fields are located after the name in
/// parentheses, which may contain any characters.
fn page_faults(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let field = |n: usize| fields.get(n - 3)?.parse::<u64>().ok();
    Some(field(10)? + field(12)?)
}

fn sum_of(status: &str, ending: &str) -> u64 {
    status
        .lines()
        .filter_map(|line| line.split_once(char::is_whitespace))
        .filter(|(name, _)| name.ends_with(ending))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .sum()
}

fn migrations(sched: &str) -> Option<u64> {
    let line = sched.lines().find(|line| line.starts_with("se.nr_migrations"))?;
    line.rsplit_once(':')?.1.trim().parse().ok()
}

/// Returns the vCPU threads of process `pid`, in vCPU order.
pub fn vcpu_threads(pid: u32) -> Vec<u32> {
    let mut threads: Vec<(u32, u32)> = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let tid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let name = fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).ok()?;
            Some((name.trim().strip_prefix("vcpu")?.parse().ok()?, tid))
        })
        .collect();
    threads.sort_unstable();
    threads.into_iter().map(|(_, tid)| tid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_found_behind_any_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 116 0 3 0 1 2 0 0 20 0 1 0 5 1 1";
        assert_eq!(page_faults(stat), Some(119));
        assert_eq!(page_faults("7 (x) S 1"), None);
    }

    #[test]
    fn switches_of_both_kinds_are_added() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\n";
        assert_eq!(sum_of(status, "ctxt_switches:"), 695);
        assert_eq!(migrations("se.nr_migrations       :      3\n"), Some(3));
    }

    #[test]
    fn this_thread_has_facts_and_its_time_grows() {
        let pid = std::process::id();
        let before = ThreadAccounting::read(pid, pid).unwrap();
        assert!(before.page_faults > 0);
        assert!(vcpu_threads(pid).is_empty());
    }
}
