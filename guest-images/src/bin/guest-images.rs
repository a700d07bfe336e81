//! Builds the Linux guest and the lab host. See `docs/guide/guest-images.md`.

use std::path::PathBuf;
use std::process::ExitCode;

use guest_images::linux::{KernelChoice, ensure};
use guest_images::progress::ProgressLog;

const USAGE: &str = "\
usage: guest-images [--target-dir DIR] [--refresh] [KERNEL...]

Builds the Linux guest and the lab host into DIR/guest (default: target/guest).
KERNEL is cloud (default), generic, newest, or a Debian kernel package.
--refresh asks the Debian archive for newer packages; otherwise a complete build is kept.";

fn main() -> ExitCode {
    let mut target_dir = PathBuf::from("target");
    let mut refresh = false;
    let mut choices = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--refresh" => refresh = true,
            "--target-dir" => match arguments.next() {
                Some(directory) => target_dir = directory.into(),
                None => return usage_error("--target-dir needs a directory"),
            },
            "-h" | "--help" => {
                println!("{USAGE}");
                return ExitCode::SUCCESS;
            }
            option if option.starts_with('-') => {
                return usage_error(&format!("unknown option {option}"));
            }
            kernel => choices.push(KernelChoice::parse(kernel)),
        }
    }
    if choices.is_empty() {
        choices.push(KernelChoice::default());
    }
    for choice in &choices {
        let progress = ProgressLog::new("guest");
        match ensure(&target_dir, choice, refresh, &progress) {
            Ok(images) => report(&images),
            Err(error) => {
                eprintln!("guest-images: {}", chain(&error));
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

fn report(images: &guest_images::linux::GuestImages) {
    println!("{}:", images.directory.display());
    for path in [
        &images.vmlinux,
        &images.bz_image,
        &images.initrd,
        &images.lab_initrd,
    ] {
        let bytes = std::fs::metadata(path).map_or(0, |m| m.len());
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        println!("  {name:<12} {:6.1} MB", bytes as f64 / 1e6);
    }
    println!("  packages.txt (versions of the packages used)");
}

/// Formats an error and its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

fn usage_error(message: &str) -> ExitCode {
    eprintln!("guest-images: {message}\n{USAGE}");
    ExitCode::from(2)
}
