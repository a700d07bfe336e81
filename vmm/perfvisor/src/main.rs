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
//! | `values` | the values of options, and what is said of wrong ones |
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
mod jail;
mod run;
mod signals;
mod stopping;
mod values;

use std::error::Error;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use virtio_devices::share::keeper;

use cli::{CliExit, Command};
use commands::{
    annotate, cp, ctl, diff, exec, exits, files, generate, list, ps, record, stat, top, validate,
};
use env_logger::Target;
use exit::ExitStatus;
use perf_core::error_line;

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
    let log_file = match &cli.command {
        Command::Run(args) => args.log_file.as_deref(),
        _ => None,
    };
    let log_file = match init_log(cli.verbose, log_file) {
        Ok(log_file) => log_file,
        Err(error) => return bad_input(&error_line(&error)),
    };
    let logs_to_file = log_file.is_some();
    match obey(cli.command, start, log_file) {
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
    log_file: Option<RawFd>,
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
            keeper::keep(&args.command)?;
            ExitStatus::PoweredOff
        }
    })
}

fn bad_input(line: &str) -> ExitCode {
    commands::say(&format!("perfvisor: {}\n", commands::one_line(line)));
    ExitCode::from(ExitStatus::BadInput.code())
}

/// Messages go to standard error or to `file`; `-v` shows more, and `RUST_LOG` has the last word.
/// Returns a descriptor of that file, which stays open.
fn init_log(verbose: u8, file: Option<&Path>) -> Result<Option<RawFd>, LogFileError> {
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
        let opened = File::options().append(true).create(true).open(path);
        let file = opened.map_err(|e| LogFileError(path.into(), e))?;
        kept = Some(file.as_raw_fd());
        builder.target(Target::Pipe(Box::new(file)));
        end = "\n";
    }
    builder
        .filter_level(level)
        // It tells of each packet that it does not know.
        .filter_module("gdbstub", level.min(log::LevelFilter::Warn))
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
    // The logger is never dropped, and the file with it.
    Ok(kept)
}
