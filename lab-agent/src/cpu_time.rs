//! CPU time of process groups, from `/proc`.

use std::fs;
use std::time::Duration;

/// Interval at which the CPU time of a running process group is read.
pub const WATCH_PERIOD: Duration = Duration::from_secs(5);

/// Returns the CPU time of a process group in clock ticks: the time used by its processes and by
/// their exited children. The value may decrease when a process exits.
pub fn cpu_ticks_of_group(group: i32) -> u64 {
    let Ok(processes) = fs::read_dir("/proc") else {
        return 0;
    };
    processes
        .flatten()
        .filter(|entry| {
            entry
                .file_name()
                .to_str()
                .is_some_and(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
        })
        .filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok())
        .filter_map(|stat| ticks(&stat, group))
        .sum()
}

/// Parses a line of `/proc/PID/stat` and returns the CPU time of the process in clock ticks.
/// Returns `None` if the process does not belong to `group`.
fn ticks(stat: &str, group: i32) -> Option<u64> {
    // The name, in parentheses, may contain any characters. It is followed by state, parent, group,
    // and other fields. User and system time are fields 14 and 15 of proc(5); those of exited
    // children are fields 16 and 17.
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(2);
    if fields.next()?.parse() != Ok(group) {
        return None;
    }
    let times: Option<Vec<u64>> = fields.skip(8).take(4).map(|field| field.parse().ok()).collect();
    times.map(|times| times.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_parsed_for_any_process_name() {
        let stat = "12 (a) b (c) S 1 7 7 0 -1 4194304 90 91 92 93 100 20 3 4 20 0 1 0 55 0 0";
        assert_eq!(ticks(stat, 7), Some(127));
        assert_eq!(ticks(stat, 8), None);
        assert_eq!(ticks("", 7), None);
    }
}
