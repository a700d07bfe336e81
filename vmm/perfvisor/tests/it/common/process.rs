//! Processes of the host.

use std::fs;
use std::os::unix::fs::MetadataExt;

use test_support::skip::skipped;

/// Returns `true` if the test runs as root. Otherwise skips it.
pub fn is_root() -> bool {
    let own = fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0);
    if !own {
        skipped("only root has a jail without a user namespace", false);
    }
    own
}

/// Returns the child processes of `parent`, with their names.
pub fn children(parent: u32) -> Vec<(u32, String)> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let child = |number: u32| {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
        (rest.split(' ').nth(1)?.parse() == Ok(parent)).then(|| (number, name.to_owned()))
    };
    numbers.filter_map(child).collect()
}
