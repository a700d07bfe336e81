//! A Linux guest under load, and commands that observe it from outside.

use integration::guest::LinuxGuest;
use integration::limit::ProcessTimeLimits;
use integration::process::{HostCommand, HostProcess};
use integration::test_host::TestHost;

/// Time limits of every operation in the tests that use this module.
pub const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// Runs a command that must succeed and returns its standard output and standard error.
#[track_caller]
pub fn run(place: &TestHost, command: &HostCommand) -> (String, String) {
    let output = place.run(command, LIMIT).unwrap();
    assert!(output.success(), "{}: {}", command.line(), output.stderr_text());
    (output.stdout_text(), output.stderr_text())
}

/// Starts `guest` and waits until its script prints `load-has-begun`. The guest is stopped when the
/// result is dropped.
pub fn loaded(place: &TestHost, guest: &LinuxGuest) -> HostProcess {
    let running = place.start(&guest.command(place).unwrap()).unwrap();
    let begun = running.wait_for("load-has-begun", LIMIT);
    assert!(begun, "{}", running.stdout_so_far());
    running
}

/// Returns a function that runs `perfvisor` with the given arguments on the test host, and returns
/// its standard output and standard error.
pub fn perfvisor(place: &TestHost) -> impl Fn(&[&str]) -> (String, String) {
    let program = place.perfvisor().unwrap();
    move |args| {
        run(
            place,
            &HostCommand::new(program.clone()).args(args.iter().copied()),
        )
    }
}
