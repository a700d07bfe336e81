//! Confinement of the process that serves Firecracker's API (the front end).
//!
//! The front end configures and starts a VM, which is a separate process. Once the VM is running,
//! the front end requires only its open sockets. The front end has no landlock rules, because their
//! restriction of signals would prevent the kernel from terminating the VM together with the front
//! end (`PR_SET_PDEATHSIG`).

use seccompiler::{SeccompAction, apply_filter_all_threads};

use crate::{filter, lists, privileges};

/// Error returned when the front end cannot be confined.
#[derive(Debug, thiserror::Error)]
pub enum ApiProcessConfinementError {
    /// The seccomp filter could not be compiled.
    #[error("the filter of the API process")]
    Compile(#[source] seccompiler::BackendError),
    /// The kernel rejected the seccomp filter.
    #[error("the kernel does not take the filter of the API process")]
    Apply(#[source] seccompiler::Error),
}

/// Drops the capabilities of the calling thread and applies the filter to all threads of the
/// process. Afterwards, the process cannot open files, start processes or make connections. A
/// violation terminates the process, and the VM with it.
///
/// # Errors
/// Returns an [`ApiProcessConfinementError`] on failure, in which case the process must exit.
pub fn confine_front_end() -> Result<(), ApiProcessConfinementError> {
    privileges::drop_thread_capabilities();
    let list = lists::of_front_end(std::process::id());
    let refuse = filter::refuse(&lists::refused_to_workers()).map_err(ApiProcessConfinementError::Compile)?;
    let allow =
        filter::compile(&list, SeccompAction::KillProcess).map_err(ApiProcessConfinementError::Compile)?;
    for program in [refuse, allow] {
        apply_filter_all_threads(&program).map_err(ApiProcessConfinementError::Apply)?;
    }
    Ok(())
}
