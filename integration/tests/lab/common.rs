//! A Linux guest under load, and commands that look at it from outside.

use integration::guest::LinuxGuest;
use integration::limit::Limit;
use integration::place::Place;
use integration::process::{Command, Process};

/// How long anything may take.
pub const LIMIT: Limit = Limit::GENEROUS;

/// What a command that must succeed prints, on both streams.
#[track_caller]
pub fn run(place: &Place, command: &Command) -> (String, String) {
    let output = place.run(command, LIMIT).unwrap();
    assert!(output.success(), "{}: {}", command.line(), output.stderr_text());
    (output.stdout_text(), output.stderr_text())
}

/// Starts `guest` and waits until its script says `load-has-begun`. It ends with what this returns.
pub fn loaded(place: &Place, guest: &LinuxGuest) -> Process {
    let running = place.start(&guest.command(place).unwrap()).unwrap();
    let begun = running.wait_for("load-has-begun", LIMIT);
    assert!(begun, "{}", running.stdout_so_far());
    running
}

/// What `perfvisor` prints there with the arguments that it is given, on both streams.
pub fn perfvisor(place: &Place) -> impl Fn(&[&str]) -> (String, String) {
    let program = place.perfvisor().unwrap();
    move |args| run(place, &Command::new(program.clone()).args(args.iter().copied()))
}
