//! What takes KVM long at the start of a machine, begun before the machine is made.
//!
//! Most of it is KVM's waiting until no processor looks at what was: for the interrupt controllers and the
//! timer of a VM, and for the VM of the probe. So threads wait, while the rest is read, loaded and checked.

use std::io;
use std::thread::{Builder, JoinHandle};

use super::error::VmError;
use crate::boot::layout;
use crate::kvm::call::CallError;
use crate::kvm::host::{self, HostError, Kvm};
use crate::kvm::vm_fd::VmFd;

/// The stack of such a thread.
const STACK: usize = 256 << 10;

/// A VM of KVM in the making, and the probe of KVM. Its threads have ended when this is gone.
#[derive(Debug)]
pub struct Begun {
    vm: Option<JoinHandle<Result<VmFd, MakeError>>>,
    probe: Option<JoinHandle<()>>,
}

/// There is no VM.
#[derive(Debug, thiserror::Error)]
enum MakeError {
    #[error(transparent)]
    Host(#[from] HostError),
    #[error(transparent)]
    Call(#[from] CallError),
}

impl From<MakeError> for VmError {
    fn from(e: MakeError) -> Self {
        match e {
            MakeError::Host(e) => e.into(),
            MakeError::Call(e) => e.into(),
        }
    }
}

impl Begun {
    /// Begins. The threads have the calling one's signal mask.
    #[must_use]
    pub fn now() -> Self {
        // A thread that is missing is no failure: who needs what it was to do does it.
        Self {
            vm: begin("maker", || make(&host::open()?)).ok(),
            probe: begin("probe", || {
                // What fails here fails again, and is told, where the answer is needed.
                let _ = host::open().and_then(|kvm| host::interprets_kernels(&kvm));
            })
            .ok(),
        }
    }

    /// The VM, with its interrupt controllers and its timer, and without memory and vCPUs.
    pub(super) fn take_vm(&mut self, kvm: &Kvm) -> Result<VmFd, VmError> {
        let made = self.vm.take().and_then(|thread| thread.join().ok());
        Ok(made.unwrap_or_else(|| make(kvm))?)
    }
}

impl Drop for Begun {
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

    /// A machine is made while KVM is probed, and asks for the answer in the middle of that. The VM comes
    /// once, with its chips.
    #[test]
    fn who_asks_while_it_is_probed_gets_the_answer() {
        let Ok(kvm) = host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let mut begun = Begun::now();
        let vm = begun.take_vm(&kvm).unwrap();
        vm.create_vcpu(0).unwrap();
        let again = vm.add_irqchip().unwrap_err();
        assert_eq!(again.to_string(), "KVM_CREATE_IRQCHIP failed", "it has them");
        let meanwhile = host::interprets_kernels(&kvm).unwrap();
        drop(begun);
        assert_eq!(meanwhile, host::interprets_kernels(&kvm).unwrap());
    }
}
