//! Measures the host resources that a VMM uses in addition to guest memory.

use crate::limit::ProcessTimeLimits;
use crate::process::HostCommand;
use crate::test_host::{TestHost, TestHostError};

/// File to which [`tracked`] saves the process ID of the VMM.
const PID_FILE: &str = "vmm.pid";

/// Host resources that a VMM process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmmFootprint {
    /// Resident memory of the VMM, excluding guest memory and including shared pages, in KiB.
    pub rss_kib: u64,
    /// Anonymous resident memory of the VMM, excluding guest memory, in KiB.
    pub anonymous_kib: u64,
    /// Number of open file descriptors of the VMM.
    pub descriptors: u64,
    /// Number of threads of the VMM.
    pub threads: u64,
}

/// Wraps `command` so that the process ID of its VMM is saved for [`footprint`]. Only one VMM at a
/// time can be tracked on a test host.
pub fn tracked(place: &TestHost, command: &HostCommand) -> HostCommand {
    let keep = format!("echo $$ >'{}'; exec \"$@\"", place.scratch(PID_FILE));
    HostCommand::new("sh")
        .args(["-c", &keep, "sh"])
        .args(command.argv.iter().cloned())
}

/// Measures the VMM started by [`tracked`]. Memory mappings of at least 90 % of `guest_mib` MiB
/// count as guest memory and are excluded.
///
/// # Errors
/// Returns an error if no tracked VMM is running.
pub fn footprint(place: &TestHost, guest_mib: u64) -> Result<VmmFootprint, TestHostError> {
    let pid = place.scratch(PID_FILE);
    let big = guest_mib * 1024 * 9 / 10;
    let look = format!(
        "cd /proc/$(cat '{pid}') && awk '/^Size:/ {{ big = $2 >= {big} }} /^Rss:/ && !big {{ sum += $2 }} \
         /^Anonymous:/ && !big {{ own += $2 }} END {{ print sum, own }}' smaps && ls fd | wc -l && ls task | wc -l"
    );
    let output = place.run(&HostCommand::shell(look), ProcessTimeLimits::GENEROUS)?;
    let text = output.stdout_text();
    let mut numbers = text.split_whitespace().map(str::parse);
    let mut next = || numbers.next().and_then(Result::ok);
    match (next(), next(), next(), next()) {
        (Some(rss_kib), Some(anonymous_kib), Some(descriptors), Some(threads)) => Ok(VmmFootprint {
            rss_kib,
            anonymous_kib,
            descriptors,
            threads,
        }),
        _ => Err(TestHostError::Guest(format!(
            "no VMM to look at: {text}{}",
            output.stderr_text()
        ))),
    }
}
