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
    meaning: Meaning,
}

/// Treatment of an unimplemented perf option.
#[derive(Clone, Copy)]
enum Meaning {
    /// Accepted without effect because it matches the default behaviour.
    Always,
    /// Rejected with this alternative.
    Otherwise(&'static str),
}

use Meaning::{Always, Otherwise};

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
const LIVE: &[&str] = &["record", "stat", "top"];

const NO_PROCESS: Meaning = Otherwise(
    "the VM is named, and all that runs in it is seen: perfvisor ps lists the names; report --sort pid,sym and top's view of processes show the guest's processes apart",
);
const NO_USER: Meaning = Otherwise("a guest's users are not known; name the VM (perfvisor ps lists them)");
const NO_CHAINS: Meaning = Otherwise(
    "this table is without call chains; perfvisor flamegraph and pprof show them, and plain perf report reads the same file",
);
const NO_FILTER: Meaning = Otherwise(
    "nothing is filtered here; --sort puts that column first for grep, and plain perf reads the same file",
);

/// Unimplemented options of perf.
const OPTIONS: &[PerfOption] = &[
    // All vCPUs are counted and sampled unless --vcpu selects some.
    option!(LIVE, Some('a'), "all-cpus", Always),
    option!(LIVE, Some('p'), "pid", NO_PROCESS),
    option!(LIVE, Some('t'), "tid", NO_PROCESS),
    option!(&["record", "top"], Some('u'), "uid", NO_USER),
    option!(LIVE, Some('G'), "cgroup", NO_PROCESS),
    // The default of --call-graph is frame pointers.
    option!(&["record"], Some('g'), "", Always),
    option!(&["record"], Some('T'), "timestamp", Always),
    option!(&["record"], Some('P'), "period", Always),
    option!(&["record"], None, "sample-cpu", Always),
    option!(&["record"], Some('R'), "raw-samples", Always),
    option!(
        &["record"],
        Some('i'),
        "no-inherit",
        Otherwise(
            "all tasks of the guest are sampled; a file to read is for report and script (-i FILE), one to write is -o FILE",
        ),
    ),
    option!(
        &["stat", "top"],
        Some('i'),
        "no-inherit",
        Otherwise("the vCPUs are looked at, with all tasks of the guest; nothing is inherited"),
    ),
    option!(
        &["record"],
        Some('n'),
        "no-samples",
        Otherwise("it is there to take samples; perfvisor stat counts"),
    ),
    option!(
        &["record"],
        Some('I'),
        "intr-regs",
        Otherwise("registers are not kept in the file; --call-graph dwarf uses them for the chains"),
    ),
    option!(
        &["stat"],
        Some('n'),
        "null",
        Otherwise("-e names what is counted; time(1) times a program"),
    ),
    option!(&["stat"], Some('c'), "scale", Always),
    option!(
        &["record"],
        Some('b'),
        "branch-any",
        Otherwise("there are no branch stacks of a guest; --call-graph fp or dwarf has call chains"),
    ),
    option!(
        &["record"],
        Some('j'),
        "branch-filter",
        Otherwise("there are no branch stacks of a guest; --call-graph fp or dwarf has call chains"),
    ),
    option!(
        &["record"],
        Some('k'),
        "clockid",
        Otherwise("times are always those of CLOCK_MONOTONIC, and the file says what time of day that is"),
    ),
    option!(
        &["record"],
        Some('s'),
        "stat",
        Otherwise("samples have their task; perfvisor stat counts beside a recording"),
    ),
    option!(
        &["record"],
        None,
        "max-size",
        Otherwise("-d SECONDS ends a recording; it ends by itself, whole, when the disk is full"),
    ),
    option!(
        &["record"],
        None,
        "switch-output",
        Otherwise("-d SECONDS ends a recording, and the next one keeps its file as FILE.old"),
    ),
    option!(
        &["stat"],
        Some('o'),
        "output",
        Otherwise("counts are on standard output: perfvisor stat ... > FILE"),
    ),
    option!(&["stat"], Some('B'), "big-num", Always),
    option!(
        &["stat"],
        None,
        "no-scale",
        Otherwise("each count is printed with the share of time for which it was on"),
    ),
    option!(
        &["stat"],
        None,
        "timeout",
        Otherwise("-d SECONDS says how long to count"),
    ),
    option!(
        &["stat"],
        Some('D'),
        "delay",
        Otherwise("it counts at once; -I MS prints intervals, of which the first may be left out"),
    ),
    option!(
        &["stat"],
        Some('M'),
        "metrics",
        Otherwise(
            "what can be derived from the counts is printed beside them; --metric-only prints nothing else",
        ),
    ),
    option!(
        &["stat"],
        None,
        "per-thread",
        Otherwise("-A has a line for each vCPU"),
    ),
    option!(
        &["stat"],
        None,
        "per-core",
        Otherwise("-A has a line for each vCPU"),
    ),
    option!(
        &["stat"],
        None,
        "per-socket",
        Otherwise("-A has a line for each vCPU"),
    ),
    option!(
        &["top"],
        Some('c'),
        "count",
        Otherwise("top samples so many times a second (-F HZ); perfvisor record takes -c N"),
    ),
    option!(
        &["top"],
        Some('g'),
        "",
        Otherwise("top shows functions without call chains; perfvisor record and flamegraph show them"),
    ),
    option!(
        &["top"],
        None,
        "stdio",
        Otherwise("--once prints one screen as text; so it is too when the output is no terminal"),
    ),
    option!(
        &["top"],
        Some('s'),
        "sort",
        Otherwise("the keys s, S and r sort on the screen; perfvisor report takes --sort"),
    ),
    option!(&["top"], Some('n'), "show-nr-samples", Always),
    option!(&["report", "annotate"], None, "stdio", Always),
    option!(&["report"], None, "no-children", Always),
    option!(&["report", "annotate"], Some('n'), "show-nr-samples", Always),
    option!(
        &["report"],
        None,
        "children",
        Otherwise("the shares are each function's own; perfvisor flamegraph shows those with callees"),
    ),
    option!(&["report"], Some('g'), "call-graph", NO_CHAINS),
    option!(&["report"], Some('G'), "inverted", NO_CHAINS),
    option!(
        &["report"],
        None,
        "tui",
        Otherwise("reports are text; perfvisor top is a screen"),
    ),
    option!(&["report", "script"], Some('c'), "comms", NO_FILTER),
    option!(&["report", "annotate"], Some('d'), "dsos", NO_FILTER),
    option!(&["report", "script"], Some('S'), "symbols", NO_FILTER),
    option!(&["report", "script", "annotate"], Some('C'), "cpu", NO_FILTER),
    option!(
        &["report", "annotate"],
        Some('k'),
        "",
        Otherwise("the kernel's file is --vmlinux FILE, a list of its symbols --kallsyms FILE"),
    ),
    option!(
        &["report", "script"],
        Some('F'),
        "fields",
        Otherwise(
            "report has the columns of --sort comm,pid,vcpu,dso,sym; script prints all it knows of each sample",
        ),
    ),
    option!(
        &["report", "script", "annotate", "diff"],
        Some('f'),
        "force",
        Otherwise("whose the file is does not matter; leave it out"),
    ),
    option!(
        &["script"],
        Some('s'),
        "script",
        Otherwise("plain perf script -s runs scripts on the same file"),
    ),
    option!(
        &["report", "script"],
        Some('D'),
        "dump-raw-trace",
        Otherwise("perfvisor script prints each sample; plain perf report -D prints the file's records"),
    ),
    option!(
        &["report", "script"],
        None,
        "header",
        Otherwise("plain perf report --header-only prints the file's header"),
    ),
    option!(
        &["annotate"],
        Some('M'),
        "disassembler-style",
        Otherwise("instructions are in AT&T's syntax"),
    ),
    option!(
        &["annotate"],
        Some('l'),
        "print-line",
        Otherwise("it shows instructions, not lines of source"),
    ),
    option!(
        &["diff"],
        Some('c'),
        "compute",
        Otherwise("it shows the difference of the shares"),
    ),
    option!(
        &["diff"],
        Some('o'),
        "order",
        Otherwise("the largest change comes first"),
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
pub(super) fn taken(command: Command) -> Command {
    command.mut_subcommands(|of| {
        let options = OPTIONS
            .iter()
            .filter(|option| matches!(option.meaning, Always) && option.commands.contains(&of.get_name()));
        let args: Vec<Arg> = options.map(PerfOption::arg).collect();
        of.args(args)
    })
}

/// Returns the error message for the argument `typed` of the command `path` (`perfvisor stat`);
/// `None` if perf has no such option.
pub(super) fn said_of(path: &str, typed: &str) -> Option<String> {
    let command = path.split(' ').nth(1)?;
    let is_option = typed.starts_with('-');
    if !is_option && LIVE.contains(&command) {
        return Some(format!(
            "'{typed}' is one word too many: after the VM's name there are only options, and no command is started; -d SECONDS says how long"
        ));
    }
    let option = OPTIONS
        .iter()
        .find(|option| option.commands.contains(&command) && option.is(typed))?;
    match option.meaning {
        Always => None,
        Otherwise(instead) => Some(format!("'{typed}' is perf's: {instead}; see `{path} --help`")),
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
    fn what_is_so_anyway_is_taken_and_of_the_rest_one_line_says_what_to_type() {
        for option in OPTIONS {
            for command in option.commands {
                for typed in spellings(option) {
                    let parsed = parse(["perfvisor", command, &typed]);
                    match (option.meaning, parsed) {
                        (Always, Ok(_)) => {}
                        // The command also lacks its required recordings.
                        (Otherwise(instead), Err(CliExit::Error(line))) => {
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
    fn the_page_has_a_row_of_each() {
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
