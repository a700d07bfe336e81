//! The `perfvisor` program: the command line and its commands.
//!
//! | module | contents |
//! |---|---|
//! | `cli` | command line parsing and validation |
//! | `run` | `perfvisor run`: creates the machine, consoles and servers, and runs the VM to its end |
//! | `jail` | the options of `--jail` |
//! | `devices` | virtio devices from the arguments |
//! | `check` | `perfvisor check`: capabilities of this host |
//! | `commands` | `perfvisor validate` and `generate` |
//! | `firecracker` | `perfvisor firecracker`: Firecracker's API and command line |
//! | `jailer` | `perfvisor jailer`: Firecracker's jailer |
//! | `config` | the options of `run` as a TOML file |
//! | `background` | VMs without a terminal: daemon, service |
//! | `stop_handler` | stop signals of a VM, and the power button |
//! | `values` | value parsers of options, and their error messages |
//!
//! Start reading at `main`. The reusable parts are in the crates below: `vmm` (the machine),
//! `operator` (the commands for running VMs and for recordings), `control-api`, `guest-profile`,
//! `kernel-images` and `validate`. No crate depends on this one.

#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// Use `operator::commands::print` and `say` instead of the standard macros, which panic if the
// reader has closed the pipe.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod background;
mod check;
mod cli;
mod commands;
mod config;
mod devices;
mod firecracker;
mod inherited;
mod jail;
mod jailer;
mod run;
mod stop_handler;
mod values;

use std::error::Error;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use sandbox::{paths, privileges};
use virtio_devices::share::keeper;

use cli::{CliCommand, CliEarlyExit};
use commands::{generate, statistics, validate};
use env_logger::Target;
use operator::commands::{
    annotate, convert, cp, ctl, diff, exec, exits, files, list, one_line, print, print_stderr, ps, record,
    report, stat, top,
};
use operator::exit::ExitStatus;
use operator::exporter;
use perf_core::error_line;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};

fn main() -> ExitCode {
    let start = run::StartTime::now();
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(CliEarlyExit::Text(text)) => {
            return match print(&text) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => bad_input(&error_line(&error)),
            };
        }
        Err(CliEarlyExit::Error(line)) => return bad_input(&line),
    };
    let (log_file, own_guest) = match &cli.command {
        CliCommand::Run(args) => (args.log_file.as_deref(), args.kernel.is_none()),
        _ => (None, false),
    };
    let log_file = match &cli.command {
        CliCommand::Firecracker(_) => {
            firecracker::init_log();
            None
        }
        _ => match init_log(cli.global.verbose, log_file, own_guest) {
            Ok(log_file) => log_file,
            Err(error) => return bad_input(&error_line(&error)),
        },
    };
    if let Some(parent) = cli.global.parent
        && !die_with_parent(parent)
    {
        return ExitCode::from(ExitStatus::Internal.code());
    }
    let logs_to_file = log_file.is_some();
    match run_command(cli.command, start, log_file.as_ref()) {
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

/// Error returned when the file given by `--log-file` cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("--log-file {}", .0.display())]
struct LogFileError(PathBuf, #[source] io::Error);

/// Executes the command of `cli`, and converts the errors of all commands to one type.
fn run_command(
    command: CliCommand,
    start: run::StartTime,
    log_file: Option<&File>,
) -> Result<ExitStatus, Box<dyn Error>> {
    Ok(match command {
        CliCommand::Run(args) => run::run(&args, start, log_file)?,
        CliCommand::Firecracker(args) => firecracker::firecracker(&args, check_arguments)?,
        CliCommand::Jailer(args) => jailer::jailer(&args)?,
        CliCommand::Check(args) => check::check(&args)?,
        CliCommand::Validate(args) => validate::validate(&args)?,
        CliCommand::Ps(args) => ps::ps(&args)?,
        CliCommand::List(args) => list::list(&args, statistics::names)?,
        CliCommand::Ctl(args) => ctl::ctl(&args)?,
        CliCommand::Exec(args) => exec::exec(&args)?,
        CliCommand::Cp(args) => cp::cp(&args)?,
        CliCommand::Stat(args) => stat::stat(&args)?,
        CliCommand::Exits(args) => exits::exits(&args)?,
        CliCommand::Record(args) => record::record(&args)?,
        CliCommand::Top(args) => top::top(&args)?,
        CliCommand::Exporter(args) => {
            run::configure_malloc();
            exporter::exporter(&args)?
        }
        CliCommand::Report(args) => report::report(&args)?,
        CliCommand::Diff(args) => diff::diff(&args)?,
        CliCommand::Annotate(args) => annotate::annotate(&args)?,
        CliCommand::Script(args) => report::script(&args)?,
        CliCommand::Flamegraph(args) => files::flamegraph(&args)?,
        CliCommand::Pprof(args) => files::pprof(&args)?,
        CliCommand::Convert(args) => convert::convert(&args)?,
        CliCommand::Generate(args) => generate::generate(&args, cli::command())?,
        CliCommand::KeepShare(args) => {
            // A core dump would contain guest memory, which virtiofsd maps, and the guest may be
            // able to crash virtiofsd.
            privileges::forbid_core_dumps();
            keeper::run_keeper(&args.command)?;
            ExitStatus::PoweredOff
        }
        CliCommand::SaveSnapshots(args) => {
            firecracker::save_snapshots(&args.socket)?;
            ExitStatus::PoweredOff
        }
    })
}

/// Checks a command line. Returns the error message if it is invalid.
fn check_arguments(args: Vec<std::ffi::OsString>) -> Result<(), String> {
    match cli::parse(args) {
        Ok(_) => Ok(()),
        Err(CliEarlyExit::Error(line) | CliEarlyExit::Text(line)) => Err(line),
    }
}

/// Makes the kernel kill this process when the thread that started it exits. Returns whether
/// `parent` still exists.
fn die_with_parent(parent: u32) -> bool {
    let set = set_parent_process_death_signal(Some(Signal::KILL));
    // Check the parent after prctl(2), because it may have exited before.
    let current = getppid().and_then(|pid| u32::try_from(pid.as_raw_nonzero().get()).ok());
    set.is_ok() && current == Some(parent)
}

fn bad_input(line: &str) -> ExitCode {
    print_stderr(&format!("perfvisor: error: {}\n", one_line(line)));
    ExitCode::from(ExitStatus::BadInput.code())
}

/// Initializes logging to standard error or to `file`, and returns that file.
///
/// `-v` raises the level, and `RUST_LOG` overrides it. `own_guest` is `true` for a built-in guest.
fn init_log(verbose: u8, file: Option<&Path>, own_guest: bool) -> Result<Option<File>, LogFileError> {
    let level = match verbose {
        0 => log::LevelFilter::Warn,
        1 => log::LevelFilter::Info,
        2 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    let mut builder = env_logger::Builder::new();
    // A terminal in raw mode needs a carriage return; files and pipes do not.
    let mut end = if io::stderr().is_terminal() { "\r\n" } else { "\n" };
    let mut kept = None;
    if let Some(path) = file {
        let failed = |e: io::Error| {
            // A nonblocking open(2) of a pipe without a reader fails with ENXIO.
            let nobody = e.raw_os_error() == Some(libc::ENXIO);
            let e = if nobody {
                io::Error::other("nobody reads there")
            } else {
                e
            };
            LogFileError(path.into(), e)
        };
        // The nonblocking open rejects a pipe without a reader instead of waiting for one.
        let file = paths::append(path, 0o666).map_err(failed)?;
        kept = Some(file.try_clone().map_err(failed)?);
        builder.target(Target::Pipe(Box::new(file)));
        end = "\n";
    }
    builder
        .filter_level(level)
        // virtio-queue logs guest-triggered queue errors without a rate limit. Perfvisor's devices
        // log the same errors with a rate limit.
        .filter_module(
            "virtio_queue",
            if verbose < 2 { log::LevelFilter::Off } else { level },
        )
        // gdbstub logs each unknown packet of the debugger at level info.
        .filter_module("gdbstub", level.min(log::LevelFilter::Warn))
        // A separate table lists the unsupported events of a built-in guest, so omit the warnings
        // about them.
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
