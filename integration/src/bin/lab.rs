//! The lab host for people: a shell in it, or one command.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use guest_images::linux::KernelChoice;
use guest_images::qemu::Qemu;
use integration::artefacts::{self, ArtefactError, describe};
use integration::lab::{Lab, LabOptions, interactive, refused_place};
use integration::process::Command;

const USAGE: &str = "\
usage: lab [--no-perf] [--cpus N] [--memory MIB] [--minutes N] [--kernel cloud|generic|newest|debian13-cloud|debian13-backports|PACKAGE] [--file PLACE=FILE]... [--disk FILE]... [COMMAND [ARGUMENT...]]
       lab --build-only

Boots the lab host: QEMU with Debian's kernel and a real KVM, on any machine.
Without COMMAND: a shell in it (leave with \"exit\", or Ctrl-A x).
With COMMAND: runs it there and ends with its exit status (124 after 10 minutes, or --minutes).
--build-only builds what the lab needs and boots nothing.";

/// What is asked for.
enum Asked {
    Help,
    BuildOnly,
    /// A shell, or a command with its arguments.
    Lab(Box<LabOptions>, Vec<String>, Duration),
}

/// How long a command may take in the lab unless more is asked for.
const USUAL: Duration = Duration::from_secs(600);

/// Words that ask for nothing that there is.
#[derive(Debug, thiserror::Error)]
enum UsageError {
    #[error("unknown option {0}")]
    Unknown(String),
    #[error("--file: PATH-IN-THE-LAB=FILE")]
    File,
    #[error("--file: {} is not a file", .0.display())]
    NoFile(PathBuf),
    #[error("--file: {0}")]
    Place(String),
    #[error("--disk: a raw image, which is /dev/vda in the lab, the next /dev/vdb")]
    Disk,
    #[error("--kernel: cloud, generic, newest or a package")]
    Kernel,
    #[error("--cpus: 1 to 16")]
    Cpus,
    #[error("--memory: 512 to 65536 MiB")]
    Memory,
    #[error("--minutes: 1 to 1440")]
    Minutes,
}

fn parse(arguments: impl Iterator<Item = String>) -> Result<Asked, UsageError> {
    let mut options = LabOptions {
        perf: true,
        ..LabOptions::default()
    };
    let mut longest = USUAL;
    let mut arguments = arguments.peekable();
    while let Some(option) = arguments.next_if(|argument| argument.starts_with('-')) {
        let mut value = || arguments.next();
        match option.as_str() {
            "--no-perf" => options.perf = false,
            "--build-only" => return Ok(Asked::BuildOnly),
            "-h" | "--help" => return Ok(Asked::Help),
            "--file" => add_file(&mut options, value().as_deref())?,
            "--disk" => {
                let disk = value().map(PathBuf::from).filter(|disk| disk.is_file());
                options.disks.push(disk.ok_or(UsageError::Disk)?);
            }
            "--kernel" => options.kernel = KernelChoice::parse(&value().ok_or(UsageError::Kernel)?),
            "--cpus" => match value().and_then(|text| text.parse().ok()) {
                Some(cpus @ 1..=16) => options.cpus = cpus,
                _ => return Err(UsageError::Cpus),
            },
            "--memory" => match value().and_then(|text| text.parse().ok()) {
                Some(mib @ 512..=65536) => options.memory_mib = mib,
                _ => return Err(UsageError::Memory),
            },
            "--minutes" => match value().and_then(|text| text.parse().ok()) {
                Some(minutes @ 1..=1440) => longest = Duration::from_secs(60 * minutes),
                _ => return Err(UsageError::Minutes),
            },
            _ => return Err(UsageError::Unknown(option)),
        }
    }
    Ok(Asked::Lab(Box::new(options), arguments.collect(), longest))
}

/// `--file PLACE=FILE`.
fn add_file(options: &mut LabOptions, value: Option<&str>) -> Result<(), UsageError> {
    let (place, file) = value
        .and_then(|value| value.split_once('='))
        .ok_or(UsageError::File)?;
    let file = PathBuf::from(file);
    if !file.is_file() {
        return Err(UsageError::NoFile(file));
    }
    let others = options.files.iter().map(|(other, _)| other.as_str());
    if let Some(why) = refused_place(place, others) {
        return Err(UsageError::Place(why.to_string()));
    }
    options.files.push((place.to_owned(), file));
    Ok(())
}

fn main() -> ExitCode {
    match parse(std::env::args().skip(1)) {
        Ok(Asked::Help) => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        Ok(Asked::BuildOnly) => match build() {
            Ok(qemu) => {
                tell_of(qemu);
                ExitCode::SUCCESS
            }
            Err(error) => failure(&describe(&error)),
        },
        Ok(Asked::Lab(options, argv, _)) if argv.is_empty() => match interactive(&options) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failure(&describe(&error)),
        },
        Ok(Asked::Lab(options, argv, longest)) => match Lab::boot(&options) {
            Ok(lab) => command(&lab, argv, longest),
            Err(error) => failure(&describe(&error)),
        },
        Err(error) => {
            eprintln!("lab: {error}\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

/// Runs one command in the lab, for `longest` at most, and ends as it does.
fn command(lab: &Lab, argv: Vec<String>, longest: Duration) -> ExitCode {
    eprintln!(
        "lab: Linux {} up after {:.1} s",
        lab.kernel_release(),
        lab.boot_time().as_secs_f64()
    );
    let command = Command {
        argv,
        env: Vec::new(),
    };
    let result = lab.start(&command).and_then(|mut process| {
        // Nothing is piped into the lab here; a program that reads must see the end of input.
        process.close_stdin()?;
        process.wait(longest)
    });
    match result {
        Ok(output) => {
            print!("{}", String::from_utf8_lossy(&output.stdout));
            eprint!("{}", String::from_utf8_lossy(&output.stderr));
            let code = output
                .code()
                .and_then(|code| u8::try_from(code).ok())
                .unwrap_or(1);
            ExitCode::from(code)
        }
        Err(error) => {
            eprintln!("lab: {}", describe(&error));
            ExitCode::from(124)
        }
    }
}

/// Builds all that a lab needs. The last part of the programs' build keeps one processor busy: the images are
/// made beside it.
fn build() -> Result<&'static Qemu, ArtefactError> {
    std::thread::scope(|scope| {
        let images = scope.spawn(|| artefacts::images().and_then(|_| artefacts::bare_metal_dir()));
        let binaries = artefacts::binaries();
        images
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        binaries?;
        artefacts::qemu()
    })
}

/// Which QEMU it is, and what to expect of it.
fn tell_of(qemu: &Qemu) {
    eprint!("lab: QEMU {}", qemu.version());
    if qemu.keeps_stale_code() {
        eprint!(
            ", which knows no plugins: the lab may hang once in many runs; 8.1 and newer do not (docs/guide/lab.md)"
        );
    }
    eprintln!();
}

fn failure(message: &str) -> ExitCode {
    eprintln!("lab: {message}");
    ExitCode::FAILURE
}
