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
usage: lab [--no-perf] [--cpus N] [--memory MIB] [--kernel cloud|generic|newest|debian13-cloud|debian13-backports|PACKAGE] [--file PLACE=FILE]... [--disk FILE]... [COMMAND [ARGUMENT...]]
       lab --build-only

Boots the lab host: QEMU with Debian's kernel and a real KVM, on any machine.
Without COMMAND: a shell in it (leave with \"exit\", or Ctrl-A x).
With COMMAND: runs it there and ends with its exit status (124 after 10 minutes).
--build-only builds what the lab needs and boots nothing.";

fn main() -> ExitCode {
    let mut options = LabOptions {
        perf: true,
        ..LabOptions::default()
    };
    let mut arguments = std::env::args().skip(1).peekable();
    while let Some(option) = arguments.next_if(|argument| argument.starts_with('-')) {
        let number = match option.as_str() {
            "--no-perf" => {
                options.perf = false;
                continue;
            }
            "--build-only" => {
                return match build() {
                    Ok(qemu) => {
                        tell_of(qemu);
                        ExitCode::SUCCESS
                    }
                    Err(error) => failure(&describe(&error)),
                };
            }
            "--file" => {
                let Some((place, file)) = arguments
                    .next()
                    .and_then(|a| a.split_once('=').map(|(p, f)| (p.to_owned(), PathBuf::from(f))))
                else {
                    return usage_error("--file: PATH-IN-THE-LAB=FILE");
                };
                if !file.is_file() {
                    return usage_error(&format!("--file: {} is not a file", file.display()));
                }
                let others = options.files.iter().map(|(other, _)| other.as_str());
                if let Some(why) = refused_place(&place, others) {
                    return usage_error(&format!("--file: {why}"));
                }
                options.files.push((place, file));
                continue;
            }
            "--disk" => {
                let Some(disk) = arguments.next().map(PathBuf::from).filter(|disk| disk.is_file()) else {
                    return usage_error(
                        "--disk: a raw image, which is /dev/vda in the lab, the next /dev/vdb",
                    );
                };
                options.disks.push(disk);
                continue;
            }
            "--kernel" => {
                let Some(kernel) = arguments.next() else {
                    return usage_error("--kernel: cloud, generic, newest or a package");
                };
                options.kernel = KernelChoice::parse(&kernel);
                continue;
            }
            "-h" | "--help" => {
                println!("{USAGE}");
                return ExitCode::SUCCESS;
            }
            "--cpus" | "--memory" => arguments.next().and_then(|text| text.parse().ok()),
            other => return usage_error(&format!("unknown option {other}")),
        };
        match (option.as_str(), number) {
            ("--cpus", Some(cpus @ 1..=16)) => options.cpus = cpus,
            ("--memory", Some(mib @ 512..=65536)) => options.memory_mib = mib,
            ("--cpus", _) => return usage_error("--cpus: 1 to 16"),
            _ => return usage_error("--memory: 512 to 65536 MiB"),
        }
    }
    let argv: Vec<String> = arguments.collect();
    if argv.is_empty() {
        return match interactive(&options) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failure(&describe(&error)),
        };
    }
    let lab = match Lab::boot(&options) {
        Ok(lab) => lab,
        Err(error) => return failure(&describe(&error)),
    };
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
        process.wait(Duration::from_secs(600))
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

fn usage_error(message: &str) -> ExitCode {
    eprintln!("lab: {message}\n{USAGE}");
    ExitCode::from(2)
}
