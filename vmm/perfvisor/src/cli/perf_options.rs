//! Options of perf that are none of ours: what a user of perf types first, and what to say of it.
//!
//! Perf's options that have a value or do something are fields of a command's arguments, under perf's names.
//! Here are the others. Some ask for what is so anyway, and are taken; for each of the others one line says
//! what to type instead. `docs/reference/perf-options.md` has all of them.

use clap::{Arg, ArgAction, Command};

/// An option of perf.
struct PerfOption {
    /// What it is called where arguments of ours have names.
    id: &'static str,
    /// The commands that it is of.
    commands: &'static [&'static str],
    /// Its letter.
    short: Option<char>,
    /// Its name, if it has one.
    long: &'static str,
    /// What it asks for.
    meaning: Meaning,
}

/// What an option of perf asks for.
#[derive(Clone, Copy)]
enum Meaning {
    /// What is so anyway.
    Always,
    /// Something that is had in another way, or not at all.
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

/// Those that look at a running VM.
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

/// What perf has and we do not.
const OPTIONS: &[PerfOption] = &[
    // All vCPUs are counted and sampled unless --vcpu says which.
    option!(LIVE, Some('a'), "all-cpus", Always),
    option!(LIVE, Some('p'), "pid", NO_PROCESS),
    option!(LIVE, Some('t'), "tid", NO_PROCESS),
    option!(&["record", "top"], Some('u'), "uid", NO_USER),
    option!(LIVE, Some('G'), "cgroup", NO_PROCESS),
    // Chains by frame pointers, which --call-graph says otherwise.
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
    /// Whether somebody typed this one: `-a`, `--all-cpus`.
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

    /// As an option that changes nothing.
    fn arg(&self) -> Arg {
        let arg = Arg::new(self.id).action(ArgAction::SetTrue).hide(true);
        let arg = self.short.into_iter().fold(arg, Arg::short);
        match self.long {
            "" => arg,
            long => arg.long(long),
        }
    }
}

/// The commands, which take what perf asks for and is so anyway.
pub(super) fn taken(command: Command) -> Command {
    command.mut_subcommands(|of| {
        let options = OPTIONS
            .iter()
            .filter(|option| matches!(option.meaning, Always) && option.commands.contains(&of.get_name()));
        let args: Vec<Arg> = options.map(PerfOption::arg).collect();
        of.args(args)
    })
}

/// What to say of an argument that `path` (`perfvisor stat`) does not take. `None`: it is none of perf's.
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

    /// The page that tells users of perf.
    const PAGE: &str = include_str!("../../../../docs/reference/perf-options.md");

    /// As somebody types it.
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
                        // It wants the recordings.
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

    /// A value does not change what is said.
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

    /// Each has a row in the page, with the command it is of.
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
