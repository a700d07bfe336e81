//! For tests only: programs that are started while other threads of this process lock files.
//!
//! A new process has a copy of every descriptor of its parent, and with them the locks, until it is the
//! program. A test that closes an image and opens it again would find it locked by the program that another
//! test starts at that moment. So whoever starts a program and whoever locks a file hold one lock while they
//! do.

use std::{
    io,
    process::{Child, Command, Output, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Held while a program is started, and while a file is locked.
pub(crate) fn hold() -> MutexGuard<'static, ()> {
    static STARTING: Mutex<()> = Mutex::new(());
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a program. When this returns, it has no descriptors of this process.
pub(crate) fn start(command: &mut Command) -> io::Result<Child> {
    let _starting = hold();
    command.spawn()
}

/// What a program said, and its status.
pub(crate) fn output(command: &mut Command) -> io::Result<Output> {
    start(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?.wait_with_output()
}
