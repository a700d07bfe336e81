//! What a VMM holds of its host beside the guest's memory.

use crate::limit::Limit;
use crate::place::{Place, PlaceError};
use crate::process::Command;

/// Where a VMM that was started by [`tracked`] is found.
const PID_FILE: &str = "vmm.pid";

/// What a process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Resident memory but for the guest's, in KiB: what other processes share is in it.
    pub rss_kib: u64,
    /// What of it is no page of a file, and so nobody else's.
    pub anonymous_kib: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Threads.
    pub threads: u64,
}

/// `command`, so that [`footprint`] finds the process. There is one at a time.
pub fn tracked(place: &Place, command: &Command) -> Command {
    let keep = format!("echo $$ >'{}'; exec \"$@\"", place.scratch(PID_FILE));
    Command::new("sh")
        .args(["-c", &keep, "sh"])
        .args(command.argv.iter().cloned())
}

/// What the tracked VMM holds. Its guest has `guest_mib` MiB; the mapping of about that size is left out.
///
/// # Errors
/// There is none.
pub fn footprint(place: &Place, guest_mib: u64) -> Result<Footprint, PlaceError> {
    let pid = place.scratch(PID_FILE);
    let big = guest_mib * 1024 * 9 / 10;
    let look = format!(
        "cd /proc/$(cat '{pid}') && awk '/^Size:/ {{ big = $2 >= {big} }} /^Rss:/ && !big {{ sum += $2 }} \
         /^Anonymous:/ && !big {{ own += $2 }} END {{ print sum, own }}' smaps && ls fd | wc -l && ls task | wc -l"
    );
    let output = place.run(&Command::shell(look), Limit::GENEROUS)?;
    let text = output.stdout_text();
    let mut numbers = text.split_whitespace().map(str::parse);
    let mut next = || numbers.next().and_then(Result::ok);
    match (next(), next(), next(), next()) {
        (Some(rss_kib), Some(anonymous_kib), Some(descriptors), Some(threads)) => Ok(Footprint {
            rss_kib,
            anonymous_kib,
            descriptors,
            threads,
        }),
        _ => Err(PlaceError::Guest(format!(
            "no VMM to look at: {text}{}",
            output.stderr_text()
        ))),
    }
}
