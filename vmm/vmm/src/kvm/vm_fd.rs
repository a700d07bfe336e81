//! The file descriptor of a VM. Creates the VM and its vCPUs, and sets interrupts and VM
//! capabilities.

use std::os::fd::{AsRawFd, RawFd};

use kvm_bindings::{
    KVM_CAP_HALT_POLL, KVM_PIT_SPEAKER_DUMMY, kvm_clock_data, kvm_enable_cap, kvm_msi, kvm_pit_config,
    kvm_xsave,
};
use kvm_ioctls::{Cap, Kvm};
use vmm_sys_util::eventfd::EventFd;

use super::call::KvmIoctlError;
use super::vcpu_fd::VcpuFd;

/// File descriptor of a VM in KVM.
#[derive(Debug)]
pub struct VmFd(kvm_ioctls::VmFd);

impl VmFd {
    /// Creates a VM that has no devices, no memory and no vCPUs.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_CREATE_VM fails.
    pub fn new(kvm: &Kvm) -> Result<Self, KvmIoctlError> {
        kvm.create_vm()
            .map(Self)
            .map_err(KvmIoctlError::of("KVM_CREATE_VM"))
    }

    /// Creates the interrupt controllers and the timer in KVM. `identity_map` and `tss` are the
    /// addresses of guest-physical ranges that KVM needs and the guest does not use (KVM API 4.41
    /// and 4.42). Must be called before vCPUs are created.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if a KVM call fails.
    #[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
    pub fn add_chips(&self, identity_map: u64, tss: u64) -> Result<(), KvmIoctlError> {
        self.0
            .set_identity_map_address(identity_map)
            .map_err(KvmIoctlError::of("KVM_SET_IDENTITY_MAP_ADDR"))?;
        self.0
            .set_tss_address(tss as usize)
            .map_err(KvmIoctlError::of("KVM_SET_TSS_ADDR"))?;
        self.add_irqchip()?;
        let config = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        self.0
            .create_pit2(config)
            .map_err(KvmIoctlError::of("KVM_CREATE_PIT2"))
    }

    /// Creates the interrupt controllers in KVM, without the timer.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_CREATE_IRQCHIP fails.
    pub fn add_irqchip(&self) -> Result<(), KvmIoctlError> {
        self.0
            .create_irq_chip()
            .map_err(KvmIoctlError::of("KVM_CREATE_IRQCHIP"))
    }

    /// Creates the vCPU with number `id` in KVM.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_CREATE_VCPU fails.
    pub fn create_vcpu(&self, id: u8) -> Result<VcpuFd, KvmIoctlError> {
        self.0
            .create_vcpu(id.into())
            .map(VcpuFd::of)
            .map_err(KvmIoctlError::of("KVM_CREATE_VCPU"))
    }

    /// Limits the time that a halted vCPU polls for a wake-up, in nanoseconds; 0 disables polling.
    /// The default is the KVM module parameter `halt_poll_ns`. Polling uses CPU time of the vCPU
    /// thread.
    ///
    /// # Errors
    /// Returns the [`KvmIoctlError`] of KVM_ENABLE_CAP if KVM does not support the limit.
    pub fn limit_halt_polling(&self, most_ns: u32) -> Result<(), KvmIoctlError> {
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_HALT_POLL,
            ..Default::default()
        };
        cap.args[0] = most_ns.into();
        self.0
            .enable_cap(&cap)
            .map_err(KvmIoctlError::of("KVM_ENABLE_CAP(KVM_CAP_HALT_POLL)"))
    }

    /// Returns whether KVM emulates the TSC-deadline mode of the local APIC timer.
    pub fn has_tsc_deadline(&self) -> bool {
        self.0.check_extension(Cap::TscDeadlineTimer)
    }

    /// Returns whether KVM can pass registers through the `kvm_run` page (`KVM_CAP_SYNC_REGS`).
    pub fn syncs_registers(&self) -> bool {
        self.0.check_extension(Cap::SyncRegs)
    }

    /// Returns the size of a vCPU's extended state in bytes, or 0 if KVM cannot save it.
    pub(super) fn xsave_bytes(&self) -> usize {
        // Since Linux 5.17, the value of the capability is the size. Before, the capability is
        // absent.
        match usize::try_from(self.0.check_extension_int(Cap::Xsave2)) {
            Ok(bytes) if bytes > 0 => bytes,
            _ if self.0.check_extension(Cap::Xsave) => size_of::<kvm_xsave>(),
            _ => 0,
        }
    }

    /// Returns the current value of kvmclock in nanoseconds.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_GET_CLOCK fails.
    pub fn clock_ns(&self) -> Result<u64, KvmIoctlError> {
        let clock = self.0.get_clock().map_err(KvmIoctlError::of("KVM_GET_CLOCK"))?;
        Ok(clock.clock)
    }

    /// Sets kvmclock to `ns` nanoseconds. The clock advances from this value.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_SET_CLOCK fails.
    pub fn set_clock_ns(&self, ns: u64) -> Result<(), KvmIoctlError> {
        let clock = kvm_clock_data {
            clock: ns,
            ..Default::default()
        };
        self.0
            .set_clock(&clock)
            .map_err(KvmIoctlError::of("KVM_SET_CLOCK"))
    }

    /// Registers the eventfd `trigger` as input `line` of the interrupt controllers. Each write to
    /// the eventfd raises the interrupt.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_IRQFD fails.
    pub fn connect_line(&self, trigger: &EventFd, line: u32) -> Result<(), KvmIoctlError> {
        self.0
            .register_irqfd(trigger, line)
            .map_err(KvmIoctlError::of("KVM_IRQFD"))
    }

    /// Sets the level of input `line` of the interrupt controllers.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_IRQ_LINE fails.
    pub fn set_line(&self, line: u32, level: bool) -> Result<(), KvmIoctlError> {
        self.0
            .set_irq_line(line, level)
            .map_err(KvmIoctlError::of("KVM_IRQ_LINE"))
    }

    /// Sends a message-signalled interrupt. Returns `false` if no local APIC accepts the interrupt,
    /// because its destination does not exist or is disabled.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_SIGNAL_MSI fails.
    pub fn signal_msi(&self, msi: kvm_msi) -> Result<bool, KvmIoctlError> {
        match self.0.signal_msi(msi) {
            // The return value is the number of local APICs that accepted the message.
            Ok(takers) => Ok(takers > 0),
            // KVM returns -1 (EPERM) if a search of all local APICs finds none with the destination
            // ID.
            Err(e) if e.errno() == libc::EPERM => Ok(false),
            Err(e) => Err(KvmIoctlError::of("KVM_SIGNAL_MSI")(e)),
        }
    }

    /// Returns the kvm-ioctls descriptor, for the ioctls of other files of this module.
    #[inline]
    pub(super) fn raw(&self) -> &kvm_ioctls::VmFd {
        &self.0
    }
}

impl AsRawFd for VmFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
