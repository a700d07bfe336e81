//! The descriptor of a VM: making it and its vCPUs, its interrupts, and what KVM is to do otherwise than by
//! itself.

use std::os::fd::{AsRawFd, RawFd};

use kvm_bindings::{KVM_CAP_HALT_POLL, KVM_PIT_SPEAKER_DUMMY, kvm_enable_cap, kvm_msi, kvm_pit_config};
use kvm_ioctls::{Cap, Kvm};
use vmm_sys_util::eventfd::EventFd;

use super::call::CallError;
use super::vcpu_fd::VcpuFd;

/// A VM of KVM.
#[derive(Debug)]
pub struct VmFd(kvm_ioctls::VmFd);

impl VmFd {
    /// A VM without devices, memory and vCPUs.
    ///
    /// # Errors
    /// [`CallError`] of KVM_CREATE_VM.
    pub fn new(kvm: &Kvm) -> Result<Self, CallError> {
        kvm.create_vm().map(Self).map_err(CallError::of("KVM_CREATE_VM"))
    }

    /// Gives it KVM's interrupt controllers and timer, which need two places in guest-physical memory that
    /// the guest has nothing else at (KVM API 4.41 and 4.42). To be called before it has vCPUs.
    ///
    /// # Errors
    /// [`CallError`].
    #[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
    pub fn add_chips(&self, identity_map: u64, tss: u64) -> Result<(), CallError> {
        self.0
            .set_identity_map_address(identity_map)
            .map_err(CallError::of("KVM_SET_IDENTITY_MAP_ADDR"))?;
        self.0
            .set_tss_address(tss as usize)
            .map_err(CallError::of("KVM_SET_TSS_ADDR"))?;
        self.add_irqchip()?;
        let config = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        self.0
            .create_pit2(config)
            .map_err(CallError::of("KVM_CREATE_PIT2"))
    }

    /// Gives it KVM's interrupt controllers alone.
    ///
    /// # Errors
    /// [`CallError`] of KVM_CREATE_IRQCHIP.
    pub fn add_irqchip(&self) -> Result<(), CallError> {
        self.0
            .create_irq_chip()
            .map_err(CallError::of("KVM_CREATE_IRQCHIP"))
    }

    /// Its vCPU `id`.
    ///
    /// # Errors
    /// [`CallError`] of KVM_CREATE_VCPU.
    pub fn create_vcpu(&self, id: u8) -> Result<VcpuFd, CallError> {
        self.0
            .create_vcpu(id.into())
            .map(VcpuFd::of)
            .map_err(CallError::of("KVM_CREATE_VCPU"))
    }

    /// Makes a halted vCPU sleep after `most_ns` of polling for a wake-up at most, in nanoseconds; at once if
    /// that is 0. Unless it is told, KVM polls as long as its module's `halt_poll_ns` says. That is on the
    /// vCPU thread's CPU time.
    ///
    /// # Errors
    /// [`CallError`] of KVM_ENABLE_CAP, where KVM does not offer it.
    pub fn limit_halt_polling(&self, most_ns: u32) -> Result<(), CallError> {
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_HALT_POLL,
            ..Default::default()
        };
        cap.args[0] = most_ns.into();
        self.0
            .enable_cap(&cap)
            .map_err(CallError::of("KVM_ENABLE_CAP(KVM_CAP_HALT_POLL)"))
    }

    /// Whether KVM emulates the local APIC's TSC deadline.
    pub fn has_tsc_deadline(&self) -> bool {
        self.0.check_extension(Cap::TscDeadlineTimer)
    }

    /// Whether registers can come with exits and go with entries, by the `kvm_run` page.
    pub fn syncs_registers(&self) -> bool {
        self.0.check_extension(Cap::SyncRegs)
    }

    /// Raises input `line` of the interrupt controllers whenever `trigger` is written.
    ///
    /// # Errors
    /// [`CallError`] of KVM_IRQFD.
    pub fn connect_line(&self, trigger: &EventFd, line: u32) -> Result<(), CallError> {
        self.0
            .register_irqfd(trigger, line)
            .map_err(CallError::of("KVM_IRQFD"))
    }

    /// Sets the level of input `line` of the interrupt controllers.
    ///
    /// # Errors
    /// [`CallError`] of KVM_IRQ_LINE.
    pub fn set_line(&self, line: u32, level: bool) -> Result<(), CallError> {
        self.0
            .set_irq_line(line, level)
            .map_err(CallError::of("KVM_IRQ_LINE"))
    }

    /// Sends a message-signalled interrupt. False: no local APIC takes it, because it has no such id or is
    /// switched off.
    ///
    /// # Errors
    /// [`CallError`] of KVM_SIGNAL_MSI.
    pub fn signal_msi(&self, msi: kvm_msi) -> Result<bool, CallError> {
        match self.0.signal_msi(msi) {
            // How many took it.
            Ok(takers) => Ok(takers > 0),
            // KVM's -1: no local APIC has this id, where KVM looked for it in all of them.
            Err(e) if e.errno() == libc::EPERM => Ok(false),
            Err(e) => Err(CallError::of("KVM_SIGNAL_MSI")(e)),
        }
    }

    /// For calls of this room alone.
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
