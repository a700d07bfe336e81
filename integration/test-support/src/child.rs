//! Runs a test that is marked as ignored in a child process of this test program.

use std::ffi::OsStr;
use std::process::Command;

/// Returns a command that runs the ignored test `as_a_child` of `module` in a new process of this
/// test program. `module` is the caller's `module_path!()`. The command sets the environment
/// variable `variable` to `value`.
///
/// # Panics
/// Panics if `module` is the root of the program.
pub fn child_command(module: &str, variable: &str, value: impl AsRef<OsStr>) -> Command {
    // Remove the program name from the module path, because test names do not contain it.
    let (_, module) = module.split_once("::").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", &format!("{module}::as_a_child")])
        .args(["--ignored", "--nocapture", "--test-threads", "1"])
        .env(variable, value);
    command
}
