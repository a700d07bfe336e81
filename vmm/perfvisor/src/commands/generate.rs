//! `perfvisor generate`: manual pages and shell completions from the command line definition.

use std::io;
use std::path::{Path, PathBuf};

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueHint};
use clap_complete::Shell;
use clap_mangen::Man;

use super::vm_completions::with_vm_names;
use operator::commands::{DONE, OperatorCommandError, print};
use operator::exit::ExitStatus;

/// `perfvisor generate`.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct GenerateArgs {
    /// Write the manual pages of all commands to this directory.
    #[arg(long, value_name = "DIR")]
    pub man: Option<PathBuf>,
    /// Print the completions for this shell, for example bash, zsh or fish.
    #[arg(long, value_name = "SHELL")]
    pub completions: Option<Shell>,
}

/// Writes the manual pages or the shell completions of `command`.
///
/// # Errors
/// Returns [`OperatorCommandError`] if a file cannot be written.
pub fn generate(args: &GenerateArgs, command: clap::Command) -> Result<ExitStatus, OperatorCommandError> {
    if let Some(directory) = &args.man {
        let mut command = command.disable_help_subcommand(true);
        command.build();
        std::fs::create_dir_all(directory)
            .and_then(|()| write_manual(&command, directory))
            .map_err(OperatorCommandError::file(directory))?;
    } else if let Some(shell) = args.completions {
        print(&completions(shell, command))?;
    }
    Ok(DONE)
}

/// Examples for the manual pages and `--help`, by command.
pub(crate) const EXAMPLES: &[(&str, &[&str])] = &[
    (
        "perfvisor run",
        &[
            "perfvisor run",
            "perfvisor run --kernel vmlinux --initrd initrd --cpus 2 --memory 1G --name web",
            "perfvisor run --kernel vmlinux --pmu amd-v2 --backing exact",
        ],
    ),
    ("perfvisor check", &["perfvisor check --json"]),
    ("perfvisor validate", &["perfvisor validate --backing all"]),
    ("perfvisor ps", &["perfvisor ps --all"]),
    (
        "perfvisor firecracker",
        &["perfvisor firecracker --api-sock /run/web.socket --id web"],
    ),
    ("perfvisor list", &["perfvisor list --vm web"]),
    (
        "perfvisor ctl",
        &["perfvisor ctl web pause", "perfvisor ctl web status --json"],
    ),
    ("perfvisor exec", &["perfvisor exec web perf stat -a sleep 1"]),
    ("perfvisor cp", &["perfvisor cp web:/var/log/dmesg ."]),
    (
        "perfvisor stat",
        &["perfvisor stat web -e cycles,instructions -d 10"],
    ),
    ("perfvisor exits", &["perfvisor exits web -d 6"]),
    (
        "perfvisor record",
        &["perfvisor record web -F 999 -d 10 -o perf.data"],
    ),
    ("perfvisor top", &["perfvisor top web"]),
    (
        "perfvisor report",
        &[
            "perfvisor report -i perf.data",
            "perfvisor report --comms nginx -g caller,2",
        ],
    ),
    (
        "perfvisor script",
        &[
            "perfvisor script -i perf.data",
            "perfvisor script --json -F comm,time,sym",
        ],
    ),
    (
        "perfvisor flamegraph",
        &["perfvisor flamegraph -i perf.data -o web.svg"],
    ),
    ("perfvisor pprof", &["perfvisor pprof -i perf.data -o web.pb.gz"]),
    (
        "perfvisor convert",
        &[
            "perfvisor convert --to speedscope",
            "perfvisor convert --to firefox -i perf.data",
        ],
    ),
];

/// Paths and descriptions for the FILES section of the manual pages.
const FILES: &[(&str, &str)] = &[
    (
        "$XDG_RUNTIME_DIR/perfvisor/NAME.sock",
        "control socket of the VM NAME; without XDG_RUNTIME_DIR see perfvisor ps --all",
    ),
    (
        "/dev/kvm",
        "the host's KVM, which the user of perfvisor run must be able to open",
    ),
];

/// Writes the manual pages of `command` and its subcommands.
fn write_manual(command: &clap::Command, directory: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|s| !s.is_hide_set()) {
        write_manual(subcommand, directory)?;
    }
    let man = Man::new(command.clone());
    std::fs::write(directory.join(man.get_filename()), manual_page(&man, command)?)
}

fn manual_page(man: &Man, command: &clap::Command) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    // Replace the generated synopsis, which lists options without their values.
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    page.extend_from_slice(format!(".SH SYNOPSIS\n.nf\n{}\n.fi\n", roff_text(usage)).as_bytes());
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(notes) = command.get_after_long_help().or(command.get_after_help()) {
        page.extend_from_slice(
            format!(".SH NOTES\n.nf\n{}\n.fi\n", roff_text(&notes.to_string())).as_bytes(),
        );
    }
    let name = command.get_bin_name().unwrap_or_else(|| command.get_name());
    page.extend_from_slice(last_sections(name).as_bytes());
    Ok(page)
}

/// Returns the sections EXAMPLES, FILES and SEE ALSO of the manual page for command `name`.
fn last_sections(name: &str) -> String {
    let mut text = String::new();
    if let Some((_, examples)) = EXAMPLES.iter().find(|(command, _)| *command == name) {
        text += ".SH EXAMPLES\n";
        for example in *examples {
            text += &format!(".PP\n.nf\n{}\n.fi\n", roff_text(example));
        }
    }
    text += ".SH FILES\n";
    for (path, use_of_it) in FILES {
        text += &format!(".TP\n\\fI{}\\fR\n{}\n", roff_text(path), roff_text(use_of_it));
    }
    let others = [
        "perfvisor",
        "perfvisor-run",
        "perfvisor-ps",
        "perfvisor-stat",
        "perfvisor-record",
    ];
    let others = others.iter().filter(|other| **other != name.replace(' ', "-"));
    let others: Vec<_> = others
        .map(|other| format!("\\fB{}\\fR(1)", roff_text(other)))
        .collect();
    text + &format!(".SH \"SEE ALSO\"\n{}, \\fBperf\\fR(1)\n", others.join(", "))
}

/// Escapes text for roff.
fn roff_text(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    let lines = escaped.lines().map(|line| match line.starts_with(['.', '\'']) {
        true => format!("\\&{line}"),
        false => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Values that completions offer for options whose values perfvisor parses itself.
const OPTION_VALUES: &[(&str, &[&str])] = &[
    (
        "pmu",
        &["auto", "off", "host", "intel", "amd", "amd-k7", "amd-v2"],
    ),
    ("backing", &["auto", "hardware", "clock", "exact", "kvm", "none"]),
    ("rdpmc", &["auto", "trap", "off", "hwbp"]),
    ("share", &["guest-first", "operator-first", "strict"]),
    ("policy", &["guest-first", "operator-first", "strict"]),
    ("mux", &["auto", "adaptive", "rotate"]),
    ("profile", &["own", "tenant"]),
    ("on_reset", &["exit", "restart"]),
    ("hugepages", &["off", "transparent", "2M"]),
    ("boot_protocol", &["auto", "pvh"]),
    // The first value is the default. Users type lists of keys themselves.
    ("sort", &["comm,dso,sym", "comm", "pid", "vcpu", "dso", "sym"]),
];

/// Sets the values that a shell offers for `arg`: the known values if there are any, file names for
/// a path, and nothing otherwise. Shells would otherwise offer file names for VM names and numbers.
fn with_completion_hint(arg: clap::Arg) -> clap::Arg {
    let id = arg.get_id().as_str();
    let known = OPTION_VALUES.iter().find(|(name, _)| *name == id);
    let value_name = arg
        .get_value_names()
        .and_then(|names| names.first())
        .map(ToString::to_string);
    match (known, value_name.as_deref()) {
        _ if !arg.get_action().takes_values() => arg,
        (Some((_, values)), _) => arg.value_parser(PossibleValuesParser::new(*values)),
        (None, Some("ON|OFF")) => arg.value_parser(PossibleValuesParser::new(["on", "off"])),
        (None, Some(name)) if !is_path(name) => arg.value_hint(ValueHint::Other),
        _ => arg,
    }
}

/// Returns whether `value_name`, the placeholder of an option's value in the help, denotes a path.
fn is_path(value_name: &str) -> bool {
    [
        "FILE", "PATH", "DIR", "SOCKET", "COMMAND", "WHERE", "SOURCE", "TARGET",
    ]
    .iter()
    .any(|word| value_name.contains(word))
}

fn with_completion_hints(command: clap::Command) -> clap::Command {
    command
        .mut_args(with_completion_hint)
        .mut_subcommands(with_completion_hints)
}

/// Returns the completion script for `shell`.
pub fn completions(shell: Shell, command: clap::Command) -> String {
    let mut command = with_completion_hints(command);
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "perfvisor", &mut text);
    with_vm_names(shell, &String::from_utf8_lossy(&text), &command)
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::*;
    use crate::cli::Cli;

    /// Every example in the manual pages is a valid command line, and the pages have all sections.
    #[test]
    fn manual_pages_have_valid_examples_and_related_pages() {
        for example in EXAMPLES.iter().flat_map(|(_, examples)| *examples) {
            let parsed = Cli::try_parse_from(example.split(' '));
            assert!(parsed.is_ok(), "{example}: {:?}", parsed.err());
        }
        let directory = tempfile::tempdir().unwrap();
        let mut command = Cli::command().disable_help_subcommand(true);
        command.build();
        write_manual(&command, directory.path()).unwrap();
        let page = std::fs::read_to_string(directory.path().join("perfvisor-run.1")).unwrap();
        for section in [
            ".SH EXAMPLES",
            ".SH FILES",
            ".SH \"SEE ALSO\"",
            ".SH NOTES",
            ".SH ISOLATION",
        ] {
            assert!(page.contains(section), "{section}");
        }
        assert!(
            page.contains(".SH SYNOPSIS\n.nf\nperfvisor run [OPTIONS]\n"),
            "{page}"
        );
        assert!(
            !page.contains(".SH EXTRA") && page.contains("perfvisor run \\-\\-kernel vmlinux"),
            "{page}"
        );
    }

    #[test]
    fn completions_offer_values_and_no_files_for_names() {
        let bash = completions(Shell::Bash, Cli::command());
        for values in [
            "auto off host intel amd amd-k7 amd-v2",
            "auto hardware clock exact kvm none",
            "guest-first operator-first strict",
            "comm,dso,sym comm pid vcpu dso sym",
        ] {
            assert!(bash.contains(values), "{values}");
        }
        let fish = completions(Shell::Fish, Cli::command());
        assert!(fish.contains("hardware\\t"), "{fish}");
    }
}
