//! Starts slow KVM operations in the background, before the machine is built.
//!
//! KVM waits for RCU grace periods when it creates the interrupt controllers and the timer of a VM,
//! and for the VM of the probe. Most of the time goes into these waits. Threads perform the
//! operations while the main thread loads and checks the guest.

use std::io;
use std::thread::{Builder, JoinHandle};

use super::error::VmError;
use crate::boot::layout;
use crate::kvm::call::KvmIoctlError;
use crate::kvm::execution;
use crate::kvm::host::{self, Kvm, KvmHostError};
use crate::kvm::vm_fd::VmFd;

/// Stack size of a background thread in bytes.
const STACK: usize = 256 << 10;

/// A VM that is being created and a probe of KVM that is being made, each by a background thread.
/// Dropping this value waits for the threads.
#[derive(Debug)]
pub struct BackgroundKvmSetup {
    vm: Option<JoinHandle<Result<VmFd, MakeError>>>,
    probe: Option<JoinHandle<()>>,
}

/// Error when creating the VM in the background.
#[derive(Debug, thiserror::Error)]
enum MakeError {
    #[error(transparent)]
    Host(#[from] KvmHostError),
    #[error(transparent)]
    Call(#[from] KvmIoctlError),
}

impl From<MakeError> for VmError {
    fn from(e: MakeError) -> Self {
        match e {
            MakeError::Host(e) => e.into(),
            MakeError::Call(e) => e.into(),
        }
    }
}

impl BackgroundKvmSetup {
    /// Starts the background threads, which inherit the signal mask of the caller.
    #[must_use]
    pub fn now() -> Self {
        // A missing thread is not an error. The operation is then performed where its result is
        // needed.
        Self {
            vm: begin("maker", || make(&host::open()?)).ok(),
            probe: begin("probe", || {
                // An error is ignored, because the probe is repeated where its result is needed,
                // and reports the error there.
                let _ = host::open().and_then(|kvm| execution::probe(&kvm));
            })
            .ok(),
        }
    }

    /// Creates a setup without background threads. Each operation is performed when its result is
    /// needed.
    pub(super) fn none() -> Self {
        Self {
            vm: None,
            probe: None,
        }
    }

    /// Returns the VM, with interrupt controllers and timer, but without memory and vCPUs. Waits
    /// for the background thread, or creates the VM if there is none.
    pub(super) fn take_vm(&mut self, kvm: &Kvm) -> Result<VmFd, VmError> {
        let made = self.vm.take().and_then(|thread| thread.join().ok());
        Ok(made.unwrap_or_else(|| make(kvm))?)
    }
}

impl Drop for BackgroundKvmSetup {
    fn drop(&mut self) {
        if let Some(vm) = self.vm.take() {
            let _ = vm.join();
        }
        if let Some(probe) = self.probe.take() {
            let _ = probe.join();
        }
    }
}

fn make(kvm: &Kvm) -> Result<VmFd, MakeError> {
    let vm = VmFd::new(kvm)?;
    vm.add_chips(layout::KVM_IDENTITY_MAP, layout::KVM_TSS)?;
    Ok(vm)
}

fn begin<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.to_owned()).stack_size(STACK).spawn(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A caller that needs the result of a probe in progress waits for it. The VM is returned once,
    /// with interrupt controllers.
    #[test]
    fn concurrent_probe_shares_result() {
        let Ok(kvm) = host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let mut begun = BackgroundKvmSetup::now();
        let vm = begun.take_vm(&kvm).unwrap();
        vm.create_vcpu(0).unwrap();
        let again = vm.add_irqchip().unwrap_err();
        assert_eq!(again.to_string(), "KVM_CREATE_IRQCHIP failed", "it has them");
        let meanwhile = execution::probe(&kvm).unwrap().interprets_kernels;
        drop(begun);
        assert_eq!(meanwhile, execution::probe(&kvm).unwrap().interprets_kernels);
    }
}
