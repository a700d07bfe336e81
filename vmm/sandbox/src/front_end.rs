//! Confinement of the process that serves Firecracker's API.
//!
//! The process configures and starts a VM, which is a process of its own. Once the VM runs, the
//! front end needs its open sockets only. It has no landlock rules: their scope would keep the
//! kernel from ending the VM with it (`PR_SET_PDEATHSIG`).

use seccompiler::{SeccompAction, apply_filter_all_threads};

use crate::{filter, lists, privileges};

/// The reason why the front end could not be confined.
#[derive(Debug, thiserror::Error)]
pub enum FrontEndError {
    /// The filter could not be compiled.
    #[error("the filter of the API process")]
    Compile(#[source] seccompiler::BackendError),
    /// The kernel rejected the filter.
    #[error("the kernel does not take the filter of the API process")]
    Apply(#[source] seccompiler::Error),
}

/// Drops the capabilities of the calling thread and applies the filter to all threads of the
/// process: no file can be opened, no process started and no connection made. A violation ends the
/// process, and with it the VM.
///
/// # Errors
/// Returns a [`FrontEndError`], in which case the process must end.
pub fn confine_front_end() -> Result<(), FrontEndError> {
    privileges::drop_thread_capabilities();
    let list = lists::of_front_end(std::process::id());
    let refuse = filter::refuse(&lists::refused_to_workers()).map_err(FrontEndError::Compile)?;
    let allow = filter::compile(&list, SeccompAction::KillProcess).map_err(FrontEndError::Compile)?;
    for program in [refuse, allow] {
        apply_filter_all_threads(&program).map_err(FrontEndError::Apply)?;
    }
    Ok(())
}
