//! Runs a shell or a single command in the lab host.

mod args;
mod session;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use args::LabArgs;
use clap::Parser;
use guest_images::qemu::Qemu;
use integration::artefacts::{self, BuildArtefactError, describe};
use integration::lab::{Lab, LabOptions};

fn main() -> ExitCode {
    let request = LabArgs::parse();
    if request.build_only {
        return match build() {
            Ok(qemu) => {
                report(qemu);
                ExitCode::SUCCESS
            }
            Err(error) => failure(&describe(&error)),
        };
    }
    match request.options() {
        Ok(options) => run(&request, options),
        Err(error) => {
            eprintln!("lab: error: {error}");
            ExitCode::from(2)
        }
    }
}

/// Boots the lab and runs the requested command.
fn run(request: &LabArgs, mut options: LabOptions) -> ExitCode {
    // Build before signals are handled, so that Ctrl-C ends the build as usual.
    let built = build().and_then(|_| artefacts::images_of(&options.kernel));
    if let Err(error) = built {
        return failure(&describe(&error));
    }
    let cancelled = Arc::new(AtomicBool::new(false));
    let signals = match session::LabSignals::handle(Arc::clone(&cancelled)) {
        Ok(signals) => signals,
        Err(error) => return failure(&format!("cannot handle signals: {error}")),
    };
    options.cancelled = cancelled;
    eprintln!("lab: booting");
    match Lab::boot(&options) {
        Ok(lab) => {
            eprintln!(
                "lab: Linux {} up after {:.1} s",
                lab.kernel_release(),
                lab.boot_time().as_secs_f64()
            );
            session::run(lab, request, signals)
        }
        Err(error) => match signals.received() {
            Some(signal) => session::signal_status(signal),
            None => failure(&describe(&error)),
        },
    }
}

/// Builds everything that a lab needs. The images are built in parallel with the programs, because
/// the last part of the program build uses only one processor.
fn build() -> Result<&'static Qemu, BuildArtefactError> {
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

/// Prints the version of the lab's QEMU and the known limits of this version.
fn report(qemu: &Qemu) {
    eprint!("lab: QEMU {}", qemu.version());
    if qemu.keeps_stale_code() {
        eprint!(
            ", which knows no plugins: the lab may hang once in many runs; 8.1 and newer do not (docs/guide/lab.md)"
        );
    }
    eprintln!();
}

fn failure(message: &str) -> ExitCode {
    eprintln!("lab: error: {message}");
    ExitCode::FAILURE
}
