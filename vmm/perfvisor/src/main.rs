//! The `perfvisor` program: the command line and its commands.
//!
//! | module | story |
//! |---|---|
//! | `cli` | what can be asked for, checked before anything is started |
//! | `run` | `perfvisor run`: puts a machine, a console and the servers together, and waits for the end |
//! | `jail` | whom a VM becomes by `--jail` |
//! | `devices` | the virtio devices that the arguments ask for |
//! | `check` | `perfvisor check`: what this host can do |
//! | `commands` | the operator's commands: they speak to running VMs, or show what was recorded |
//! | `exporter` | `perfvisor exporter`: all VMs of the host over HTTP |
//! | `config` | the options of `run` as a TOML file |
//! | `background` | a VM without a terminal: daemon, service |
//! | `stopping` | the signals that end a VM, and its power button |
//! | `signals` | the signals that end a command or a VM |
//! | `vendor` | the events that a processor's vendor has by name, from perf's tables |
//! | `values` | the values of options, and what is said of wrong ones |
//! | `input` | files that a user names, which may be anything |
//! | `exit` | exit statuses |
//!
//! Start with `main` below. Everything that is worth using from another program is in the crates under this
//! one: `vmm` (the machine), `control-api`, `guest-profile`, `kernel-images`, `validate`. Nothing depends on
//! this one.

#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// They panic when the reader has gone away; `commands::print` and `say` do not.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod background;
mod check;
mod cli;
mod commands;
mod config;
mod devices;
mod exit;
mod exporter;
mod input;
mod jail;
mod run;
mod signals;
mod stopping;
mod values;
mod vendor;

use std::error::Error;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use sandbox::paths;
use virtio_devices::share::keeper;

use cli::{CliExit, Command};
use commands::{
    annotate, cp, ctl, diff, exec, exits, files, generate, list, ps, record, stat, top, validate,
};
use env_logger::Target;
use exit::ExitStatus;
use perf_core::error_line;
use perfvisor_vmm::privileges;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

fn main() -> ExitCode {
    let start = run::StartTime::now();
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(CliExit::Text(text)) => {
            return match commands::print(&text) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => bad_input(&error_line(&error)),
            };
        }
        Err(CliExit::Error(line)) => return bad_input(&line),
    };
    let (log_file, own_guest) = match &cli.command {
        Command::Run(args) => (args.log_file.as_deref(), args.kernel.is_none()),
        _ => (None, false),
    };
    let log_file = match init_log(cli.global.verbose, log_file, own_guest) {
        Ok(log_file) => log_file,
        Err(error) => return bad_input(&error_line(&error)),
    };
    if let Some(parent) = cli.global.parent
        && !ends_with(parent)
    {
        return ExitCode::from(ExitStatus::Internal.code());
    }
    let logs_to_file = log_file.is_some();
    match obey(cli.command, start, log_file.as_ref()) {
        Ok(status) => ExitCode::from(status.code()),
        Err(error) => {
            let line = error_line(error.as_ref());
            if logs_to_file {
                log::error!("{line}");
            }
            bad_input(&line)
        }
    }
}

/// The file for messages cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("--log-file {}", .0.display())]
struct LogFileError(PathBuf, #[source] io::Error);

/// Does what was asked for. Each command has an error type of its own; here they end.
fn obey(
    command: Command,
    start: run::StartTime,
    log_file: Option<&File>,
) -> Result<ExitStatus, Box<dyn Error>> {
    Ok(match command {
        Command::Run(args) => run::run(&args, start, log_file)?,
        Command::Check(args) => check::check(&args)?,
        Command::Validate(args) => validate::validate(&args)?,
        Command::Ps(args) => ps::ps(&args)?,
        Command::List(args) => list::list(&args)?,
        Command::Ctl(args) => ctl::ctl(&args)?,
        Command::Exec(args) => exec::exec(&args)?,
        Command::Cp(args) => cp::cp(&args)?,
        Command::Stat(args) => stat::stat(&args)?,
        Command::Exits(args) => exits::exits(&args)?,
        Command::Record(args) => record::record(&args)?,
        Command::Top(args) => top::top(&args)?,
        Command::Exporter(args) => exporter::exporter(&args)?,
        Command::Report(args) => files::report(&args)?,
        Command::Diff(args) => diff::diff(&args)?,
        Command::Annotate(args) => annotate::annotate(&args)?,
        Command::Script(args) => files::script(&args)?,
        Command::Flamegraph(args) => files::flamegraph(&args)?,
        Command::Pprof(args) => files::pprof(&args)?,
        Command::Generate(args) => generate::generate(&args, cli::command())?,
        Command::KeepShare(args) => {
            // virtiofsd maps the guest's memory, and a guest may be able to crash it.
            privileges::forbid_core_dumps();
            keeper::keep(&args.command)?;
            ExitStatus::PoweredOff
        }
    })
}

/// Has the kernel kill this process when the thread that started it ends. Returns whether `parent` is there.
fn ends_with(parent: u32) -> bool {
    let set = set_parent_process_death_signal(Some(Signal::KILL));
    // The process may have ended before.
    let current = getppid().and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok());
    set.is_ok() && current == Some(parent)
}

fn bad_input(line: &str) -> ExitCode {
    commands::say(&format!("perfvisor: {}\n", commands::one_line(line)));
    ExitCode::from(ExitStatus::BadInput.code())
}

/// Messages go to standard error or to `file`; `-v` shows more, and `RUST_LOG` has the last word.
/// `own_guest`: a guest of ours runs. Returns that file.
fn init_log(verbose: u8, file: Option<&Path>, own_guest: bool) -> Result<Option<File>, LogFileError> {
    let level = match verbose {
        0 => log::LevelFilter::Warn,
        1 => log::LevelFilter::Info,
        2 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    let mut builder = env_logger::Builder::new();
    // A raw terminal needs the carriage return; files and pipes do not want it.
    let mut end = if io::stderr().is_terminal() { "\r\n" } else { "\n" };
    let mut kept = None;
    if let Some(path) = file {
        let failed = |e: io::Error| {
            // open(2) of a pipe without a reader, if it does not wait.
            let nobody = e.raw_os_error() == Some(libc::ENXIO);
            let e = if nobody {
                io::Error::other("nobody reads there")
            } else {
                e
            };
            LogFileError(path.into(), e)
        };
        // Not blocking: a pipe that nobody reads is refused here rather than waited for.
        let file = paths::append(path, 0o666).map_err(failed)?;
        kept = Some(file.try_clone().map_err(failed)?);
        builder.target(Target::Pipe(Box::new(file)));
        end = "\n";
    }
    builder
        .filter_level(level)
        // It logs what a guest does to its queues, without a limit. Our devices log the same within one.
        .filter_module(
            "virtio_queue",
            if verbose < 2 { log::LevelFilter::Off } else { level },
        )
        // It tells of each packet that it does not know.
        .filter_module("gdbstub", level.min(log::LevelFilter::Warn))
        // Its own table says which events are not supported here.
        .filter_module(
            "vpmu::vpmu",
            if own_guest && verbose == 0 {
                log::LevelFilter::Error
            } else {
                level
            },
        )
        .parse_default_env()
        .format(move |out, record| {
            use std::io::Write;
            write!(
                out,
                "perfvisor: {}: {}{end}",
                record.level().as_str().to_lowercase(),
                record.args()
            )
        })
        .init();
    Ok(kept)
}
