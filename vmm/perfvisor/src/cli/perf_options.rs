//! Options of perf that are accepted without effect, because they match the default behaviour.
//!
//! Implemented perf options are fields of a command's arguments, with perf's names. All other
//! options of perf are unknown arguments; `docs/reference/perf-options.md` lists alternatives.

use clap::{Arg, ArgAction, Command};

/// An accepted option: identifier of the clap argument, commands, short option and long option.
type AcceptedOption = (
    &'static str,
    &'static [&'static str],
    Option<char>,
    Option<&'static str>,
);

const OPTIONS: &[AcceptedOption] = &[
    // All vCPUs are counted and sampled unless --vcpu selects some of them.
    (
        "perf-all-cpus",
        &["record", "stat", "top"],
        Some('a'),
        Some("all-cpus"),
    ),
    ("perf-timestamp", &["record"], Some('T'), Some("timestamp")),
    ("perf-period", &["record"], Some('P'), Some("period")),
    ("perf-sample-cpu", &["record"], None, Some("sample-cpu")),
    ("perf-raw-samples", &["record"], Some('R'), Some("raw-samples")),
    ("perf-scale", &["stat"], Some('c'), Some("scale")),
    ("perf-big-num", &["stat"], Some('B'), Some("big-num")),
    (
        "perf-n",
        &["report", "annotate", "top"],
        Some('n'),
        Some("show-nr-samples"),
    ),
    ("perf-stdio", &["report", "annotate"], None, Some("stdio")),
    ("perf-no-children", &["report"], None, Some("no-children")),
];

fn arg(&(id, _, short, long): &AcceptedOption) -> Arg {
    let arg = Arg::new(id).action(ArgAction::SetTrue).hide(true);
    let arg = short.into_iter().fold(arg, Arg::short);
    long.into_iter().fold(arg, |arg, long| arg.long(long))
}

/// Adds the accepted perf options to the subcommands of `command`.
pub(super) fn add_accepted_options(command: Command) -> Command {
    command.mut_subcommands(|of| {
        let options = OPTIONS
            .iter()
            .filter(|(_, commands, ..)| commands.contains(&of.get_name()));
        let args: Vec<Arg> = options.map(arg).collect();
        of.args(args)
    })
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    #[test]
    fn perf_options_that_match_the_default_are_accepted() {
        for (_, commands, short, long) in OPTIONS {
            let short = short.map(|short| format!("-{short}"));
            for typed in short.into_iter().chain(long.map(|long| format!("--{long}"))) {
                for command in *commands {
                    let parsed = parse(["perfvisor", command, &typed]);
                    assert!(parsed.is_ok(), "{command} {typed}: {parsed:?}");
                }
            }
        }
    }
}
