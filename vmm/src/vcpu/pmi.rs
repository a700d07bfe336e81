//! Delivering a PMI through the local APIC's LVTPC entry.
//!
//! The local APIC is KVM's, so its LVTPC register (Intel SDM vol. 3 §11.5.1, offset 340H, x2APIC MSR 834H) has to be
//! read when a PMI is due. In x2APIC mode it is read and written as an MSR, one register at a time. In xAPIC mode only
//! the whole register page can be had, and *writing* a page back would lose any interrupt that another vCPU or a
//! device raised in between; so there the mask bit that Intel's delivery sets is not shown to the guest.

use kvm_bindings::{Msrs, kvm_msi, kvm_msr_entry};
use kvm_ioctls::{VcpuFd, VmFd};

/// IA32_X2APIC_LVT_PMI, present in x2APIC mode (SDM vol. 3 table 11-6).
const X2APIC_LVT_PMI: u32 = 0x834;
/// IA32_APIC_BASE (SDM vol. 4); bit 10 EXTD: x2APIC mode.
const APIC_BASE_EXTD: u64 = 1 << 10;
/// Offset of LVTPC in the xAPIC register page.
const XAPIC_LVTPC: usize = 0x340;
/// LVT mask bit.
const LVT_MASKED: u32 = 1 << 16;
/// Value of IA32_APIC_BASE's address field after reset: where MSIs to local APICs go.
const MSI_ADDRESS: u32 = 0xfee0_0000;

/// What became of a PMI that was due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// An NMI was queued.
    Nmi,
    /// A fixed vector was sent.
    Fixed,
    /// LVTPC is masked: the PMI waits.
    Masked,
    /// LVTPC asks for a delivery mode that performance interrupts cannot have here (SMI, INIT, ExtINT) or an illegal
    /// vector: as on hardware with nothing behind it, the interrupt is gone.
    Dropped,
}

/// Why LVTPC could not be read or the PMI not be sent: a KVM call failed, which no guest can cause.
#[derive(Debug, thiserror::Error)]
#[error("delivering a PMI failed in {what}: {source}")]
pub struct PmiError {
    what: &'static str,
    source: kvm_ioctls::Error,
}

/// The local APIC's LVTPC entry of one vCPU. Owns the one-entry MSR list KVM is asked with, so that a PMI allocates
/// nothing.
#[derive(Debug)]
pub struct Lvtpc {
    apic_id: u8,
    /// The vendor's processor sets the mask bit when it delivers: Intel's does (SDM vol. 3 §11.5.1, Local Vector
    /// Table), AMD's does not.
    mask_on_delivery: bool,
    msr: Msrs,
}

impl Lvtpc {
    /// The entry of the vCPU with this APIC id.
    ///
    /// # Errors
    /// [`PmiError`] when no memory is left.
    pub fn new(apic_id: u8, mask_on_delivery: bool) -> Result<Self, PmiError> {
        let entry = kvm_msr_entry {
            index: X2APIC_LVT_PMI,
            ..Default::default()
        };
        let msr = Msrs::from_entries(&[entry]).map_err(|_| PmiError {
            what: "making an MSR list",
            source: kvm_ioctls::Error::new(libc::ENOMEM),
        })?;
        Ok(Self {
            apic_id,
            mask_on_delivery,
            msr,
        })
    }

    /// Delivers one PMI as LVTPC says. Must run on the vCPU's own thread, after a KVM_RUN.
    ///
    /// # Errors
    /// [`PmiError`].
    pub fn deliver(&mut self, vm: &VmFd, vcpu: &mut VcpuFd) -> Result<Delivery, PmiError> {
        let x2apic = vcpu.get_kvm_run().apic_base & APIC_BASE_EXTD != 0;
        let lvtpc = if x2apic {
            self.read_x2apic(vcpu)?
        } else {
            read_xapic(vcpu)?
        };
        if lvtpc & LVT_MASKED != 0 {
            return Ok(Delivery::Masked);
        }
        let delivery = match lvtpc >> 8 & 7 {
            0b100 => {
                vcpu.nmi().map_err(|source| PmiError {
                    what: "KVM_NMI",
                    source,
                })?;
                Delivery::Nmi
            }
            // Vectors below 16 are illegal (SDM vol. 3 §11.5.2).
            0b000 if lvtpc & 0xff >= 16 => {
                let msi = kvm_msi {
                    address_lo: MSI_ADDRESS | u32::from(self.apic_id) << 12,
                    data: lvtpc & 0xff,
                    ..Default::default()
                };
                vm.signal_msi(msi).map_err(|source| PmiError {
                    what: "KVM_SIGNAL_MSI",
                    source,
                })?;
                Delivery::Fixed
            }
            _ => Delivery::Dropped,
        };
        if self.mask_on_delivery && x2apic {
            self.write_x2apic(vcpu, lvtpc | LVT_MASKED)?;
        }
        Ok(delivery)
    }

    fn read_x2apic(&mut self, vcpu: &VcpuFd) -> Result<u32, PmiError> {
        let done = vcpu.get_msrs(&mut self.msr).map_err(|source| PmiError {
            what: "KVM_GET_MSRS(0x834)",
            source,
        })?;
        match (done, self.msr.as_slice().first()) {
            (1, Some(entry)) => Ok(entry.data as u32),
            _ => Err(PmiError {
                what: "KVM_GET_MSRS(0x834)",
                source: kvm_ioctls::Error::new(libc::EINVAL),
            }),
        }
    }

    fn write_x2apic(&mut self, vcpu: &VcpuFd, value: u32) -> Result<(), PmiError> {
        if let Some(entry) = self.msr.as_mut_slice().first_mut() {
            entry.data = u64::from(value);
        }
        match vcpu.set_msrs(&self.msr) {
            Ok(1) => Ok(()),
            Ok(_) => Err(PmiError {
                what: "KVM_SET_MSRS(0x834)",
                source: kvm_ioctls::Error::new(libc::EINVAL),
            }),
            Err(source) => Err(PmiError {
                what: "KVM_SET_MSRS(0x834)",
                source,
            }),
        }
    }
}

fn read_xapic(vcpu: &VcpuFd) -> Result<u32, PmiError> {
    let lapic = vcpu.get_lapic().map_err(|source| PmiError {
        what: "KVM_GET_LAPIC",
        source,
    })?;
    let mut bytes = [0u8; 4];
    for (byte, reg) in bytes.iter_mut().zip(&lapic.regs[XAPIC_LVTPC..XAPIC_LVTPC + 4]) {
        *byte = *reg as u8;
    }
    Ok(u32::from_le_bytes(bytes))
}
