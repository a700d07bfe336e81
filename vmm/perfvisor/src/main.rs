//! The `perfvisor` program: the command line and its commands.
//!
//! | module | story |
//! |---|---|
//! | `cli` | what can be asked for, checked before anything is started |
//! | `run` | `perfvisor run`: puts a machine, a console and the servers together, and waits for the end |
//! | `devices` | the virtio devices that the arguments ask for |
//! | `check` | `perfvisor check`: what this host can do |
//! | `commands` | the operator's commands: they speak to running VMs, or show what was recorded |
//! | `signals` | the signals that end a command or a VM |
//! | `values` | the values of options, and what is said of wrong ones |
//! | `exit` | exit statuses |
//!
//! Start with `main` below. Everything that is worth using from another program is in the crates under this
//! one: `vmm` (the machine), `control-api`, `guest-profile`, `kernel-images`, `validate`. Nothing depends on
//! this one.

// They panic when the reader has gone away; `commands::print` and `say` do not.
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod check;
mod cli;
mod commands;
mod devices;
mod exit;
mod run;
mod signals;
mod values;

use std::error::Error;
use std::process::ExitCode;

use cli::{CliExit, Command};
use commands::{ctl, files, ps, record, stat, top, validate};
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
    init_log(cli.verbose);
    match obey(cli.command, start) {
        Ok(status) => ExitCode::from(status.code()),
        Err(error) => bad_input(&error_line(error.as_ref())),
    }
}

/// Does what was asked for. Each command has an error type of its own; here they end.
fn obey(command: Command, start: run::StartTime) -> Result<ExitStatus, Box<dyn Error>> {
    Ok(match command {
        Command::Run(args) => run::run(&args, start)?,
        Command::Check(args) => check::check(&args)?,
        Command::Validate(args) => validate::validate(&args)?,
        Command::Ps(args) => ps::ps(&args)?,
        Command::Ctl(args) => ctl::ctl(&args)?,
        Command::Stat(args) => stat::stat(&args)?,
        Command::Record(args) => record::record(&args)?,
        Command::Top(args) => top::top(&args)?,
        Command::Report(args) => files::report(&args)?,
        Command::Script(args) => files::script(&args)?,
        Command::Flamegraph(args) => files::flamegraph(&args)?,
        Command::Pprof(args) => files::pprof(&args)?,
    })
}

fn bad_input(line: &str) -> ExitCode {
    commands::say(&format!("perfvisor: {}\n", commands::one_line(line)));
    ExitCode::from(ExitStatus::BadInput.code())
}

/// Messages go to standard error; `-v` shows more, and `RUST_LOG` has the last word.
fn init_log(verbose: u8) {
    let level = match verbose {
        0 => log::LevelFilter::Warn,
        1 => log::LevelFilter::Info,
        2 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    };
    env_logger::Builder::new()
        .filter_level(level)
        .parse_default_env()
        .format(|out, record| {
            use std::io::Write;
            // A raw terminal needs the carriage return.
            write!(
                out,
                "perfvisor: {}: {}\r\n",
                record.level().as_str().to_lowercase(),
                record.args()
            )
        })
        .init();
}
