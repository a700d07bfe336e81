//! Access to KVM: host probes, guest CPUID, the MSR filter, and ioctls that kvm-ioctls does not
//! wrap.

mod bytes;
pub mod call;
pub mod chips;
pub mod cpuid;
pub mod event_filter;
pub mod execution;
pub mod host;
pub mod initial_state;
pub mod kickable_vcpu;
pub mod memslot;
pub mod misc_enable;
pub mod msr_filter;
pub mod pci_backend;
pub mod registers;
pub mod rotation_cost;
pub mod saved_vcpu;
pub mod signal_mask;
pub mod signature;
pub mod stats_fd;
pub mod stepping;
pub(crate) mod tiny;
pub mod vcpu_fd;
pub mod vm_fd;
pub mod vpmu_probe;
