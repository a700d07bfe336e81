//! Tests of invalid arguments and their error messages.

use perf_core::mux::MuxPolicy;

use super::*;

fn run(args: &[&str]) -> Result<RunArgs, CliEarlyExit> {
    let all = ["perfvisor", "run"].iter().chain(args);
    match parse(all)?.command {
        CliCommand::Run(run) => Ok(*run),
        other => unreachable!("run was asked for, not {other:?}"),
    }
}

fn error(args: &[&str]) -> String {
    match run(args) {
        Err(CliEarlyExit::Error(line)) => {
            assert!(!line.contains('\n'), "{line:?} is more than one line");
            line
        }
        other => panic!("{args:?} gave {other:?}"),
    }
}

#[test]
fn defaults_run_the_built_in_guest() {
    let args = run(&[]).unwrap();
    assert_eq!((args.cpus.max(), args.memory, args.kernel), (1, 512 << 20, None));
    assert_eq!(
        (args.pmu, args.backing, args.rdpmc),
        (PmuModelName::Auto, CounterBackingPolicy::Auto, RdpmcMode::Auto)
    );
}

/// The fast parser of `run` gives the same result as the complete parser.
#[test]
fn fast_run_parser_matches_complete_parser() {
    let words = |line: &str| -> Vec<OsString> { line.split(' ').map(Into::into).collect() };
    for line in [
        "perfvisor run",
        "perfvisor -vv run --memory 64M --cmdline quiet -v",
        "perfvisor --verbose run --cpus 2 --disk path=a,ro --pmu intel-v4",
    ] {
        let short = parse_run(&words(line)).unwrap_or_else(|| panic!("{line}: not understood"));
        let long = parse_any(words(line)).unwrap();
        assert_eq!(format!("{short:?}"), format!("{long:?}"), "{line}");
    }
    for line in [
        "perfvisor ps",
        "perfvisor run --help",
        "perfvisor run --memory 1",
        "perfvisor run --config a.toml",
        "perfvisor run --config=a.toml",
        "perfvisor run --dump-config",
        "perfvisor run --no-such-option",
        "perfvisor -x run",
    ] {
        assert!(parse_run(&words(line)).is_none(), "{line}");
    }
}

#[test]
fn valid_values_are_parsed() {
    let args = run(&[
        "--kernel",
        "k",
        "--initrd",
        "i",
        "--cmdline",
        "-a b=c",
        "--cpus",
        "64",
        "--memory",
        "16M",
        "--pmu",
        "intel-v4",
        "--pmu-counters",
        "8+4",
        "--pmu-width",
        "40",
        "--pmi-limit",
        "0",
        "--pmi-share",
        "25%",
        "--backing",
        "clock",
        "--rdpmc",
        "off",
        "--hide-uncounted",
        "off",
        "--share",
        "strict",
        "--mux",
        "adaptive",
    ])
    .unwrap();
    assert_eq!(args.cmdline.as_deref(), Some("-a b=c"));
    let adaptive = MuxPolicyChoice::Fixed(MuxPolicy::Adaptive);
    assert_eq!((args.share, args.mux), (SharePolicy::Strict, adaptive));
    assert_eq!(run(&[]).unwrap().mux, MuxPolicyChoice::Auto);
    let rotate = run(&["--mux", "rotate"]).unwrap().mux;
    assert_eq!(rotate, MuxPolicyChoice::Fixed(MuxPolicy::Rotate));
    assert_eq!(
        (args.hide_uncounted, run(&[]).unwrap().hide_uncounted),
        (false, true)
    );
    assert_eq!((args.cpus.present(), args.memory), (64, 16 << 20));
    let cpus = run(&["--cpus", "2,max=8"]).unwrap().cpus;
    assert_eq!((cpus.present(), cpus.max()), (2, 8));
    assert_eq!(args.pmu, PmuModelName::Generation(vpmu::PmuGeneration::Intel(4)));
    assert_eq!(
        args.pmu_counters,
        Some(RequestedCounters {
            general: 8,
            fixed: Some(4)
        })
    );
    assert_eq!(
        run(&["--pmu-counters", "6"]).unwrap().pmu_counters.unwrap().fixed,
        None
    );
    assert_eq!(run(&["--memory", "3g"]).unwrap().memory, 3 << 30);
    let cli = parse(["perfvisor", "check", "--json", "-vv"]).unwrap();
    assert_eq!(cli.global.verbose, 2);
}

#[test]
fn invalid_values_are_reported_with_valid_ones_in_one_line() {
    for (args, value, allowed) in [
        (&["--cpus", "0"][..], "'0'", "between 1 and 64"),
        (&["--cpus", "65"], "'65'", "between 1 and 64"),
        (&["--cpus", "-1"], "'-1'", "between 1 and 64"),
        (&["--memory", "-1"], "'-1'", "512M"),
        (&["--cpus", "two"], "'two'", "between 1 and 64"),
        (&["--gdb", "tcp::1234"], "'tcp::1234'", "not over TCP"),
        (
            &["--gdb", "127.0.0.1:1234,wait"],
            "'127.0.0.1:1234,wait'",
            "not over TCP",
        ),
        (&["--gdb", "/tmp/gdb,now"], "'/tmp/gdb,now'", "PATH,wait"),
        (&["--cpus", "4,max=2"], "'4,max=2'", "max=2"),
        (&["--cpus", "4,most=8"], "'4,most=8'", "N,max=M"),
        (&["--memory", "15M"], "'15M'", "16M"),
        (&["--memory", "1X"], "'1X'", "512M"),
        (&["--memory", "99999999999999T"], "99999999999999T", "64 bits"),
        (&["--memory", "16777217"], "16777217", "4096"),
        (&["--hugepages", "1G"], "'1G'", "transparent"),
        (&["--pmu", "vax"], "'vax'", "amd-v2"),
        (&["--pmu", "intel-v6"], "'intel-v6'", "intel-v5"),
        (&["--pmu-counters", "4+"], "'4+'", "4+3"),
        (&["--pmu-counters", "x"], "'x'", "4+3"),
        (&["--pmu-width", "31"], "'31'", "between 32 and 48"),
        (&["--backing", "x"], "'x'", "hardware"),
        (&["--rdpmc", "x"], "'x'", "hwbp"),
        (&["--hide-uncounted", "x"], "'x'", "on or off"),
        (&["--on-reset", "x"], "'x'", "restart"),
        (&["--pin", "0"], "'0'", "0=2,1=3"),
        (&["--stop-timeout", "-1"], "'-1'", "86400"),
        (&["--stop-timeout", "x"], "'x'", "86400"),
        (&["--share", "x"], "'x'", "strict"),
        (&["--profile", "x"], "'x'", "own or tenant"),
        (&["--observers", "x,mode=rw"], "'x,mode=rw'", "octal"),
        (&["--observers", ""], "''", "path"),
        (&["--mux", "x"], "'x'", "adaptive"),
        (&["--pmi-limit", "x"], "'x'", "PMIs"),
        (&["--pmi-share", "0%"], "'0%'", "between 1% and 100%, or off"),
        (&["--pmi-share", "x"], "'x'", "between 1% and 100%, or off"),
        (&["--halt-poll-ns", "on"], "'on'", "auto, host, or nanoseconds"),
        (
            &["--halt-poll-ns", "1000001"],
            "'1000001'",
            "between 0 and 1000000",
        ),
        (&["--mux-turn", "0.1"], "'0.1'", "between 0.2 and 100"),
        (&["--mux-turn", "nan"], "'nan'", "between 0.2 and 100"),
        (&["--sample-limit", "0"], "'0'", "between 1 and 1000000"),
        (
            &["--sample-limit", "2000000"],
            "'2000000'",
            "between 1 and 1000000",
        ),
        (&["--ring-memory", "4K"], "'4K'", "between 64K and 64G"),
        (&["--ring-memory", "1T"], "'1T'", "between 64K and 64G"),
        (&["--reserve-counters", "-1"], "'-1'", "whole number"),
        (&["--reserve-counters", "x"], "'x'", "whole number"),
        (&["--cpu-signature", "skylake"], "'skylake'", "6/94/3"),
        (&["--cpu-signature", "6/94/16"], "'6/94/16'", "between 0 and 15"),
        (&["--frobnicate"], "--frobnicate", "--help"),
        (&["--memroy", "1G"], "'--memroy'", "did you mean '--memory'?"),
        (&["--initrd", "x"], "--kernel", ""),
        (&["stray"], "stray", ""),
    ] {
        let line = error(args);
        assert!(line.contains(value) && line.contains(allowed), "{args:?}: {line}");
    }
}

#[test]
fn missing_and_unknown_commands_print_one_line() {
    for args in [&["perfvisor"][..], &["perfvisor", "fly"]] {
        match parse(args) {
            Err(CliEarlyExit::Error(line)) => assert!(line.contains("run, check, validate, ps"), "{line}"),
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(
        parse(["perfvisor", "run", "--help"]),
        Err(CliEarlyExit::Text(_))
    ));
}

/// The error message for an unknown option suggests no option if none is similar.
#[test]
fn dissimilar_option_is_not_suggested() {
    let Err(CliEarlyExit::Error(line)) = parse(["perfvisor", "run", "--api-sock", "/tmp/x"]) else {
        panic!("--api-sock is unknown");
    };
    assert!(
        line.contains("'--api-sock'") && !line.contains("did you mean"),
        "{line}"
    );
}

/// `help COMMAND` prints the same text as `COMMAND --help`, and reports unknown commands.
#[test]
fn help_command_prints_help() {
    let text = |args: &[&str]| match parse(["perfvisor"].iter().chain(args)) {
        Err(CliEarlyExit::Text(text)) => text,
        other => panic!("{args:?}: {other:?}"),
    };
    assert_eq!(text(&["help"]), text(&["--help"]));
    assert_eq!(text(&["help", "record"]), text(&["record", "--help"]));
    let Err(CliEarlyExit::Error(line)) = parse(["perfvisor", "help", "recrod"]) else {
        panic!("recrod");
    };
    assert!(line.contains("did you mean 'record'?"), "{line}");
}

/// The help of a command ends with examples.
#[test]
fn help_shows_examples() {
    for (command, examples) in crate::commands::generate::EXAMPLES {
        let words = command.split(' ').chain(["--help"]);
        let Err(CliEarlyExit::Text(help)) = parse(words) else {
            panic!("{command}: no help");
        };
        assert!(help.contains(examples[0]) || help.contains("Example: "), "{help}");
    }
}

/// The help shows defaults that are defined outside the command line module.
#[test]
fn help_shows_defaults() {
    let Err(CliEarlyExit::Text(help)) = parse(["perfvisor", "run", "--help"]) else {
        panic!("no help");
    };
    // Ignore line breaks.
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let defaults = perf_core::PerfCoreConfig::default();
    for default in [
        format!("0 for no limit [default: {}]", vpmu::DEFAULT_PMI_LIMIT),
        format!(
            "[default for Linux: {}]",
            crate::run::machine::DEFAULT_LINUX_CMDLINE
        ),
        format!(
            "1 to {} [default: {}]",
            crate::values::MAX_SAMPLE_RATE_HZ,
            defaults.sample_rate_hz
        ),
        format!(
            "[default: {}K per host CPU, plus {}M]",
            defaults.mlock_kb,
            defaults.memlock_kb >> 10
        ),
    ] {
        assert!(help.contains(&default), "{default} is not in {help}");
    }
}

#[test]
fn argument_errors_name_the_command() {
    let line = |args: &[&str]| match parse(["perfvisor"].iter().chain(args)) {
        Err(CliEarlyExit::Error(line)) => line,
        other => panic!("{args:?} gave {other:?}"),
    };
    for (args, parts) in [
        (&["ctl"][..], ["pause, resume", "`perfvisor ctl --help`"]),
        (
            &["ctl", "vm"],
            [
                "pause, resume, powerdown, stop, status, limits, vcpus, balloon, snapshot, migrate, share, filter",
                "`perfvisor ctl --help`",
            ],
        ),
        (&["ctl", "vm", "fly"], ["'fly'", "`perfvisor ctl --help`"]),
        (
            &["ctl", "vm", "staus"],
            [
                "did you mean 'status'?",
                "known are pause, resume, powerdown, stop, status, limits, vcpus, balloon, snapshot, migrate, share or filter",
            ],
        ),
        (&["recrod"], ["did you mean 'record'?", "known are run, check"]),
        (&["rec"], ["did you mean 'record'?", "known are run, check"]),
        (&["run", "-smp", "2"], ["unknown argument '-smp'", "run --help"]),
        (&["report", "perf.data"], ["'perf.data'", "named by -i FILE"]),
        (
            &["record", "demo", "sleep", "10"],
            ["'sleep'", "-d SECONDS says how long"],
        ),
        (&["fly", "run"], ["'fly'", "known are run, check"]),
        (&["run", "vmlinux"], ["'vmlinux'", "--kernel FILE"]),
        (&["ps", "--vmlinux"], ["'--vmlinux'", "see `perfvisor ps --help`"]),
        (
            &["ctl", "status", "one"],
            ["comes first", "perfvisor ctl one status"],
        ),
        (&["ctl", "pause"], ["name is missing", "perfvisor ctl NAME pause"]),
        (
            &["-v", "ctl", "vcpus", "one", "3"],
            ["comes first", "perfvisor ctl one vcpus 3"],
        ),
        (
            &["ctl", "stop", "staus"],
            ["comes first", "perfvisor ctl staus stop"],
        ),
        (
            &["ctl", "one", "vcpus", "-1"],
            ["'-1'", "a whole number between 1 and 64"],
        ),
        (
            &["record", "-F", "-1"],
            ["'-1'", "a whole number between 1 and 2^32 - 1"],
        ),
        (
            &["top", "-F", "0"],
            ["'0'", "a whole number between 1 and 2^32 - 1"],
        ),
        (
            &["record", "-c", "0"],
            ["'0'", "a whole number between 1 and 2^62 - 1"],
        ),
        (
            &["record", "-F", "x"],
            ["'x'", "must be a whole number between 1 and 2^32 - 1"],
        ),
        (&["record", "-d", "-1"], ["'-1'", "above 0"]),
        (
            &["run", "--frobnicate"],
            ["'--frobnicate'", "`perfvisor run --help`"],
        ),
        (
            &["record", "--call-graph", "lbr"],
            ["'lbr'", "must be fp, dwarf, dwarf,SIZE or none"],
        ),
        (
            &["record", "--call-graph", "dwarf,70000"],
            ["'dwarf,70000'", "between 8 and 32768"],
        ),
        (
            &["stat", "--call-graph", "dwarf"],
            ["'--call-graph'", "`perfvisor stat --help`"],
        ),
        (
            &["top", "--call-graph", "dwarf"],
            ["'--call-graph'", "`perfvisor top --help`"],
        ),
        (
            &["stat", "--guest-view", "-e", "cycles"],
            ["--guest-view", "--event"],
        ),
        (
            &["stat", "--guest-view", "-e", "cycles", "-r", "2"],
            ["--event", "--repeat"],
        ),
        (&["stat", "-x", ""], ["--field-separator", "empty"]),
        (
            &["report", "--percent-limit", "nan"],
            ["'nan'", "between 0 and 100"],
        ),
        (&["flamegraph", "--folded", "-o", "x"], ["--folded", "--output"]),
    ] {
        let line = line(args);
        assert!(parts.iter().all(|part| line.contains(part)), "{args:?}: {line}");
        assert!(!line.contains('\n'), "{line:?}");
    }
}

/// Each visible command has a manual page that describes all of its options.
#[test]
fn every_command_has_a_manual_page() {
    let directory = tempfile::tempdir().unwrap();
    clap_mangen::generate_to(command(), directory.path()).unwrap();
    let page = |name: &str| std::fs::read_to_string(directory.path().join(format!("{name}.1"))).unwrap();
    for command in command().get_subcommands().filter(|c| !c.is_hide_set()) {
        let text = page(&format!("perfvisor-{}", command.get_name()));
        assert!(text.contains(".SH OPTIONS"), "{}: {text}", command.get_name());
    }
    assert!(page("perfvisor-record").contains("buildid"));
    assert!(page("perfvisor-ctl-vcpus").contains("vCPUs"));
}

#[test]
fn completions_cover_commands_and_options() {
    use clap_complete::Shell;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let text = crate::commands::generate::completions(shell, command());
        for word in ["flamegraph", "guestmount", "hugepages"] {
            assert!(text.contains(word), "{shell}: no {word}");
        }
    }
}
