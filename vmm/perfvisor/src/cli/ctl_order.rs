//! Error message for a `ctl` command with the action before the name of the VM.

use std::ffi::OsString;

use operator::commands::one_line;

/// Returns the error message for a command such as `ctl status one`, with the action before the
/// VM's name, or `None` for any other error.
pub(super) fn explain(command: &clap::Command, args: &[OsString]) -> Option<String> {
    let ctl = command.find_subcommand("ctl")?;
    let is_action = |word: &str| ctl.find_subcommand(word).is_some();
    let words = args.iter().skip(1).filter_map(|arg| arg.to_str());
    let mut words = words.filter(|word| !word.starts_with('-'));
    let action = words
        .next()
        .filter(|first| *first == "ctl")
        .and_then(|_| words.next())?;
    if !is_action(action) {
        return None;
    }
    match words.next() {
        None => Some(format!(
            "the VM's name is missing, which comes first: perfvisor ctl NAME {action}; perfvisor ps lists the names"
        )),
        // In `ctl pause stop`, the VM may be named `pause`, so the order of the words may be
        // correct.
        Some(name) if is_action(name) => None,
        Some(name) => {
            let rest: String = words.map(|word| format!(" {word}")).collect();
            Some(one_line(&format!(
                "the VM's name comes first: perfvisor ctl {name} {action}{rest}"
            )))
        }
    }
}
