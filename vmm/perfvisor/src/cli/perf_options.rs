//! Options of perf that Perfvisor does not implement, and their error messages.
//!
//! Implemented perf options are fields of a command's arguments, with perf's names. Of the
//! remaining options, those that match the default behaviour are accepted; each of the others is
//! rejected with a one-line alternative. `docs/reference/perf-options.md` lists all of them.

use clap::{Arg, ArgAction, Command};

/// An option of perf.
struct PerfOption {
    /// Argument identifier for clap.
    id: &'static str,
    /// Commands that have the option in perf.
    commands: &'static [&'static str],
    short: Option<char>,
    /// Long name; empty if the option has none.
    long: &'static str,
    /// How Perfvisor treats the option.
    meaning: PerfOptionHandling,
}

/// Treatment of an unimplemented perf option.
#[derive(Clone, Copy)]
enum PerfOptionHandling {
    /// Accepted without effect because it matches the default behaviour.
    Accepted,
    /// Rejected with this alternative.
    Rejected(&'static str),
}

use PerfOptionHandling::{Accepted, Rejected};

macro_rules! option {
    ($commands:expr, $short:expr, $long:literal, $meaning:expr $(,)?) => {
        PerfOption {
            id: concat!("perf-", $long),
            commands: $commands,
            short: $short,
            long: $long,
            meaning: $meaning,
        }
    };
}

/// Commands that observe a running VM.
const LIVE_COMMANDS: &[&str] = &["record", "stat", "top"];

const NO_PROCESS: PerfOptionHandling = Rejected(
    "the VM is named, and all that runs in it is seen: perfvisor ps lists the names; report --sort pid,sym and top's view of processes show the guest's processes apart",
);
const NO_USER: PerfOptionHandling =
    Rejected("a guest's users are not known; name the VM (perfvisor ps lists them)");
const NO_CHAINS: PerfOptionHandling = Rejected(
    "this table is without call chains; perfvisor flamegraph and pprof show them, and plain perf report reads the same file",
);
const NO_FILTER: PerfOptionHandling = Rejected(
    "nothing is filtered here; --sort puts that column first for grep, and plain perf reads the same file",
);

/// Unimplemented options of perf.
const OPTIONS: &[PerfOption] = &[
    // All vCPUs are counted and sampled unless --vcpu selects some.
    option!(LIVE_COMMANDS, Some('a'), "all-cpus", Accepted),
    option!(LIVE_COMMANDS, Some('p'), "pid", NO_PROCESS),
    option!(LIVE_COMMANDS, Some('t'), "tid", NO_PROCESS),
    option!(&["record", "top"], Some('u'), "uid", NO_USER),
    option!(LIVE_COMMANDS, Some('G'), "cgroup", NO_PROCESS),
    // The default of --call-graph is frame pointers.
    option!(&["record"], Some('g'), "", Accepted),
    option!(&["record"], Some('T'), "timestamp", Accepted),
    option!(&["record"], Some('P'), "period", Accepted),
    option!(&["record"], None, "sample-cpu", Accepted),
    option!(&["record"], Some('R'), "raw-samples", Accepted),
    option!(
        &["record"],
        Some('i'),
        "no-inherit",
        Rejected(
            "all tasks of the guest are sampled; a file to read is for report and script (-i FILE), one to write is -o FILE",
        ),
    ),
    option!(
        &["stat", "top"],
        Some('i'),
        "no-inherit",
        Rejected("the vCPUs are looked at, with all tasks of the guest; nothing is inherited"),
    ),
    option!(
        &["record"],
        Some('n'),
        "no-samples",
        Rejected("it is there to take samples; perfvisor stat counts"),
    ),
    option!(
        &["record"],
        Some('I'),
        "intr-regs",
        Rejected("registers are not kept in the file; --call-graph dwarf uses them for the chains"),
    ),
    option!(
        &["stat"],
        Some('n'),
        "null",
        Rejected("-e names what is counted; time(1) times a program"),
    ),
    option!(&["stat"], Some('c'), "scale", Accepted),
    option!(
        &["record"],
        Some('b'),
        "branch-any",
        Rejected("there are no branch stacks of a guest; --call-graph fp or dwarf has call chains"),
    ),
    option!(
        &["record"],
        Some('j'),
        "branch-filter",
        Rejected("there are no branch stacks of a guest; --call-graph fp or dwarf has call chains"),
    ),
    option!(
        &["record"],
        Some('k'),
        "clockid",
        Rejected("times are always those of CLOCK_MONOTONIC, and the file says what time of day that is"),
    ),
    option!(
        &["record"],
        Some('s'),
        "stat",
        Rejected("samples have their task; perfvisor stat counts beside a recording"),
    ),
    option!(
        &["record"],
        None,
        "switch-output",
        Rejected("-d SECONDS ends a recording, and the next one keeps its file as FILE.old"),
    ),
    option!(
        &["stat"],
        Some('o'),
        "output",
        Rejected("counts are on standard output: perfvisor stat ... > FILE"),
    ),
    option!(&["stat"], Some('B'), "big-num", Accepted),
    option!(
        &["stat"],
        None,
        "no-scale",
        Rejected("each count is printed with the share of time for which it was on"),
    ),
    option!(
        &["stat"],
        None,
        "timeout",
        Rejected("-d SECONDS says how long to count"),
    ),
    option!(
        &["stat"],
        Some('D'),
        "delay",
        Rejected("it counts at once; -I MS prints intervals, of which the first may be left out"),
    ),
    option!(
        &["stat"],
        Some('M'),
        "metrics",
        Rejected(
            "what can be derived from the counts is printed beside them; --metric-only prints nothing else",
        ),
    ),
    option!(
        &["stat"],
        None,
        "per-thread",
        Rejected("-A has a line for each vCPU"),
    ),
    option!(
        &["stat"],
        None,
        "per-core",
        Rejected("-A has a line for each vCPU"),
    ),
    option!(
        &["stat"],
        None,
        "per-socket",
        Rejected("-A has a line for each vCPU"),
    ),
    option!(
        &["top"],
        Some('c'),
        "count",
        Rejected("top samples so many times a second (-F HZ); perfvisor record takes -c N"),
    ),
    option!(
        &["top"],
        Some('g'),
        "",
        Rejected("top shows functions without call chains; perfvisor record and flamegraph show them"),
    ),
    option!(
        &["top"],
        None,
        "stdio",
        Rejected("--once prints one screen as text; so it is too when the output is no terminal"),
    ),
    option!(
        &["top"],
        Some('s'),
        "sort",
        Rejected("the keys s, S and r sort on the screen; perfvisor report takes --sort"),
    ),
    option!(&["top"], Some('n'), "show-nr-samples", Accepted),
    option!(&["report", "annotate"], None, "stdio", Accepted),
    option!(&["report"], None, "no-children", Accepted),
    option!(&["report", "annotate"], Some('n'), "show-nr-samples", Accepted),
    option!(
        &["report"],
        None,
        "children",
        Rejected("the shares are each function's own; perfvisor flamegraph shows those with callees"),
    ),
    option!(&["report"], Some('g'), "call-graph", NO_CHAINS),
    option!(&["report"], Some('G'), "inverted", NO_CHAINS),
    option!(
        &["report"],
        None,
        "tui",
        Rejected("reports are text; perfvisor top is a screen"),
    ),
    option!(&["report", "script"], Some('c'), "comms", NO_FILTER),
    option!(&["report", "annotate"], Some('d'), "dsos", NO_FILTER),
    option!(&["report", "script"], Some('S'), "symbols", NO_FILTER),
    option!(&["report", "script", "annotate"], Some('C'), "cpu", NO_FILTER),
    option!(
        &["report", "annotate"],
        Some('k'),
        "",
        Rejected("the kernel's file is --vmlinux FILE, a list of its symbols --kallsyms FILE"),
    ),
    option!(
        &["report", "script"],
        Some('F'),
        "fields",
        Rejected(
            "report has the columns of --sort comm,pid,vcpu,dso,sym; script prints all it knows of each sample",
        ),
    ),
    option!(
        &["report", "script", "annotate", "diff"],
        Some('f'),
        "force",
        Rejected("whose the file is does not matter; leave it out"),
    ),
    option!(
        &["script"],
        Some('s'),
        "script",
        Rejected("plain perf script -s runs scripts on the same file"),
    ),
    option!(
        &["report", "script"],
        Some('D'),
        "dump-raw-trace",
        Rejected("perfvisor script prints each sample; plain perf report -D prints the file's records"),
    ),
    option!(
        &["report", "script"],
        None,
        "header",
        Rejected("plain perf report --header-only prints the file's header"),
    ),
    option!(
        &["annotate"],
        Some('M'),
        "disassembler-style",
        Rejected("instructions are in AT&T's syntax"),
    ),
    option!(
        &["annotate"],
        Some('l'),
        "print-line",
        Rejected("it shows instructions, not lines of source"),
    ),
    option!(
        &["diff"],
        Some('c'),
        "compute",
        Rejected("it shows the difference of the shares"),
    ),
    option!(
        &["diff"],
        Some('o'),
        "order",
        Rejected("the largest change comes first"),
    ),
];

impl PerfOption {
    /// Returns whether `typed` is this option, for example `-a` or `--all-cpus`.
    fn is(&self, typed: &str) -> bool {
        let typed = typed.split('=').next().unwrap_or_default();
        match typed.strip_prefix("--") {
            Some(long) => !self.long.is_empty() && long == self.long,
            None => {
                self.short.is_some()
                    && typed.strip_prefix('-').and_then(|rest| rest.chars().next()) == self.short
            }
        }
    }

    /// Returns a clap argument without effect.
    fn arg(&self) -> Arg {
        let arg = Arg::new(self.id).action(ArgAction::SetTrue).hide(true);
        let arg = self.short.into_iter().fold(arg, Arg::short);
        match self.long {
            "" => arg,
            long => arg.long(long),
        }
    }
}

/// Adds the accepted options to the commands.
pub(super) fn add_accepted_options(command: Command) -> Command {
    command.mut_subcommands(|of| {
        let options = OPTIONS
            .iter()
            .filter(|option| matches!(option.meaning, Accepted) && option.commands.contains(&of.get_name()));
        let args: Vec<Arg> = options.map(PerfOption::arg).collect();
        of.args(args)
    })
}

/// Returns the error message for the argument `typed` of the command `path` (`perfvisor stat`);
/// `None` if perf has no such option.
pub(super) fn rejection_message(path: &str, typed: &str) -> Option<String> {
    let command = path.split(' ').nth(1)?;
    let is_option = typed.starts_with('-');
    if !is_option && LIVE_COMMANDS.contains(&command) {
        return Some(format!(
            "'{typed}' is one word too many: after the VM's name there are only options, and no command is started; -d SECONDS says how long"
        ));
    }
    let option = OPTIONS
        .iter()
        .find(|option| option.commands.contains(&command) && option.is(typed))?;
    match option.meaning {
        Accepted => None,
        Rejected(instead) => Some(format!("'{typed}' is perf's: {instead}; see `{path} --help`")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CliExit, parse};
    use super::*;

    /// Reference page of the perf options.
    const PAGE: &str = include_str!("../../../../docs/reference/perf-options.md");

    /// Returns the spellings of the option on a command line.
    fn spellings(option: &PerfOption) -> Vec<String> {
        let short = option.short.map(|short| format!("-{short}"));
        let long = Some(format!("--{}", option.long)).filter(|_| !option.long.is_empty());
        short.into_iter().chain(long).collect()
    }

    #[test]
    fn unimplemented_perf_options_are_accepted_or_name_an_alternative() {
        for option in OPTIONS {
            for command in option.commands {
                for typed in spellings(option) {
                    let parsed = parse(["perfvisor", command, &typed]);
                    match (option.meaning, parsed) {
                        (Accepted, Ok(_)) => {}
                        // The command also lacks its required recordings.
                        (Rejected(instead), Err(CliExit::Error(line))) => {
                            assert!(
                                line.contains(&format!("'{typed}'"))
                                    && line.contains(instead)
                                    && !line.contains('\n'),
                                "{command} {typed}: {line}"
                            );
                        }
                        (_, other) => panic!("{command} {typed}: {other:?}"),
                    }
                }
            }
        }
    }

    /// The message for an option does not depend on its value.
    #[test]
    fn options_with_values_are_recognised() {
        for (args, part) in [
            (&["stat", "-p", "1234"][..], "perfvisor ps"),
            (&["record", "-p1234"], "perfvisor ps"),
            (&["record", "--pid=1234"], "perfvisor ps"),
            (&["stat", "demo", "-o", "counts"], "> FILE"),
            (&["record", "demo", "sleep", "10"], "-d SECONDS"),
            (&["stat", "-a", "sleep", "10"], "-d SECONDS"),
            (&["stat", "-a", "--", "sleep", "10"], "-d SECONDS"),
        ] {
            match parse(["perfvisor"].iter().chain(args)) {
                Err(CliExit::Error(line)) => assert!(line.contains(part), "{args:?}: {line}"),
                other => panic!("{args:?}: {other:?}"),
            }
        }
    }

    /// The reference page has a row with the commands of each option.
    #[test]
    fn reference_page_lists_every_perf_option() {
        for option in OPTIONS {
            for command in option.commands {
                let heading = format!("\n## `perfvisor {command}`\n");
                let section = PAGE.split_once(&heading).map(|(_, rest)| rest);
                let section = section.unwrap_or_else(|| panic!("no section of {command}"));
                let section = section.split("\n## ").next().unwrap();
                for typed in spellings(option) {
                    assert!(section.contains(&format!("`{typed}`")), "{command}: no {typed}");
                }
            }
        }
    }
}
