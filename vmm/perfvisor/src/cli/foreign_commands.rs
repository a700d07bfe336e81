//! Suggestions for commands and options of other programs (QEMU, virsh, docker).

/// Unknown options of `run` as clap reports them, and the corresponding Perfvisor options. clap
/// reads a word after a single dash as a sequence of short options, so `-kernel` is identified by
/// its first letter.
const RUN_OPTIONS: [(&str, &str); 17] = [
    ("--append", "--cmdline"),
    ("-a", "--cmdline"),
    ("--drive", "--disk"),
    ("--hda", "--disk"),
    ("--image", "--disk"),
    ("--serial", "--console"),
    ("--smp", "--cpus"),
    ("-c", "--cpus"),
    ("--ram", "--memory"),
    ("-m", "--memory"),
    ("--netdev", "--net"),
    ("--nic", "--net"),
    ("--tap", "--net"),
    ("-k", "--kernel"),
    ("-i", "--initrd"),
    ("-n", "--name"),
    ("-d", "--daemonize"),
];

/// Commands of other programs and their Perfvisor equivalents.
const COMMANDS: [(&str, &str); 10] = [
    ("start", "perfvisor run"),
    ("create", "perfvisor run"),
    ("ls", "perfvisor ps"),
    ("kill", "perfvisor ctl NAME stop"),
    ("shutdown", "perfvisor ctl NAME powerdown"),
    ("reboot", "perfvisor exec NAME -- reboot"),
    ("console", "perfvisor run --console"),
    ("attach", "perfvisor run --console"),
    ("logs", "perfvisor run --log-file"),
    ("version", "perfvisor --version"),
];

/// Returns the option of `run` that corresponds to `typed`.
pub(super) fn run_option_for(typed: &str) -> Option<&'static str> {
    RUN_OPTIONS
        .iter()
        .find(|(theirs, _)| *theirs == typed)
        .map(|(_, ours)| *ours)
}

/// Returns the equivalent of the command `typed`. `actions` are the actions of `ctl`.
pub(super) fn command<'a>(typed: &str, mut actions: impl Iterator<Item = &'a str>) -> Option<String> {
    if let Some(action) = actions.find(|action| *action == typed) {
        return Some(format!("perfvisor ctl NAME {action}"));
    }
    COMMANDS
        .iter()
        .find(|(theirs, _)| *theirs == typed)
        .map(|(_, ours)| (*ours).to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::{CliExit, command as program, parse};
    use super::*;

    fn said(args: &[&str]) -> String {
        match parse(["perfvisor"].iter().chain(args)) {
            Err(CliExit::Error(line)) => line,
            other => panic!("{args:?} gave {other:?}"),
        }
    }

    /// The tables contain no existing Perfvisor option and suggest only existing ones.
    #[test]
    fn suggested_commands_exist() {
        let program = program();
        let run = program.find_subcommand("run").unwrap();
        let has = |name: &str| {
            run.get_arguments().any(|option| {
                option.get_long().is_some_and(|long| name == format!("--{long}"))
                    || option
                        .get_short()
                        .is_some_and(|short| name == format!("-{short}"))
            })
        };
        for (theirs, ours) in RUN_OPTIONS {
            assert!(!has(theirs) && has(ours), "{theirs} {ours}");
            let line = said(&["run", theirs, "x"]);
            assert!(line.contains(&format!("did you mean '{ours}'?")), "{line}");
        }
        for (theirs, ours) in COMMANDS {
            let word = ours.split(' ').nth(1).unwrap();
            assert!(program.find_subcommand(theirs).is_none(), "{theirs}");
            assert!(
                word.starts_with('-') || program.find_subcommand(word).is_some(),
                "{ours}"
            );
            let line = said(&[theirs]);
            assert!(line.contains(&format!("did you mean '{ours}'?")), "{line}");
        }
    }

    #[test]
    fn ctl_actions_are_suggested_without_ctl() {
        for action in ["stop", "pause", "status", "vcpus"] {
            let line = said(&[action, "web"]);
            assert!(
                line.contains(&format!("did you mean 'perfvisor ctl NAME {action}'?")),
                "{line}"
            );
        }
        assert!(said(&["run", "-kernel", "x"]).contains("did you mean '--kernel'?"));
    }
}
