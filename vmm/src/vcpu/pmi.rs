//! Delivering a PMI through the local APIC's LVTPC entry.
//!
//! The local APIC is KVM's, so its LVTPC register (Intel SDM vol. 3 §11.5.1, offset 340H, x2APIC MSR 834H)
//! has to be read when a PMI is due. In x2APIC mode it is read and written as an MSR, one register at a time.
//!
//! In xAPIC mode only the whole register page can be had. KVM_SET_LAPIC copies all of it over KVM's own, the
//! requested interrupts (IRR) with it and those posted to a running processor, and starts the APIC's timer
//! anew: an interrupt that another vCPU, a device or a timer of the kernel sends between the reading and the
//! writing is lost, and nothing tells that one was. A guest that loses an interrupt between processors hangs.
//! So there the mask bit that Intel's delivery sets is not written, and a guest that reads LVTPC does not see
//! it. What the bit is for is done without it: see `Handled`.

use std::time::{Duration, Instant};

use kvm_bindings::{Msrs, kvm_lapic_state, kvm_msi, kvm_msr_entry};

use crate::kvm::armed::ArmedVcpu;
use crate::kvm::call::CallError;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::kvm::vm_fd::VmFd;

/// IA32_X2APIC_LVT_PMI, present in x2APIC mode (SDM vol. 3 table 11-6).
const X2APIC_LVT_PMI: u32 = 0x834;
/// IA32_APIC_BASE (SDM vol. 4); bit 10 EXTD: x2APIC mode.
const APIC_BASE_EXTD: u64 = 1 << 10;
/// IA32_APIC_BASE bit 11 EN: the local APIC is not globally disabled.
const APIC_BASE_EN: u64 = 1 << 11;
/// Offset of the local APIC's id in the xAPIC register page; the guest may write it. The id is in bits 31:24.
const XAPIC_ID: usize = 0x20;
/// Offset of the first in-service register in the xAPIC register page: 32 vectors each, 16 bytes apart.
const XAPIC_ISR: usize = 0x100;
/// Offset of the first interrupt request register.
const XAPIC_IRR: usize = 0x200;
/// An xAPIC destination that means every local APIC.
const XAPIC_EVERYONE: u8 = 0xff;
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
    /// LVTPC asks for a delivery mode that performance interrupts cannot have here (SMI, INIT, ExtINT), an
    /// illegal vector, or the local APIC cannot be told from others: as on hardware with nothing behind it,
    /// the interrupt is gone.
    Dropped,
}

/// Why LVTPC could not be read or the PMI not be sent: a KVM call failed, which no guest can cause.
#[derive(Debug, thiserror::Error)]
#[error("delivering a PMI failed")]
pub struct PmiError(#[from] CallError);

/// A PMI that Intel's LVTPC, in xAPIC mode, has delivered and the guest still handles.
///
/// Were the mask bit written, no second PMI would come until the guest takes it away, and one would be
/// withdrawn if the guest serves what asks for it before that. Linux takes it away at the end of its handler
/// (from Haswell on), or at its beginning; an NMI that comes behind that is held by the processor until the
/// handler's IRET. In both cases the next PMI does not begin before the first's handler has ended, which KVM
/// does tell: so until then LVTPC is taken for masked. What differs: a handler that leaves LVTPC masked for
/// good still gets the next PMI, and one that unmasks it early and serves a second overflow afterwards is
/// spared the NMI for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handled {
    /// As an NMI.
    Nmi,
    /// As this vector.
    Vector(u8),
}

/// Whether an NMI waits or is being handled.
fn nmi_is_handled(vcpu: &VcpuFd) -> Result<bool, PmiError> {
    let events = vcpu.get_vcpu_events()?;
    Ok(events.nmi.pending | events.nmi.injected | events.nmi.masked != 0)
}

/// Whether this vector waits or is being handled.
fn vector_is_handled(vector: u8, page: &kvm_lapic_state) -> bool {
    let at = usize::from(vector / 32) * 16;
    let both = register(page, XAPIC_IRR + at) | register(page, XAPIC_ISR + at);
    both >> (vector % 32) & 1 != 0
}

/// LVTPC as it was read, not masked.
#[derive(Clone, Copy, Debug)]
pub struct Open {
    lvtpc: u32,
    x2apic: bool,
    apic_id: u8,
}

/// The local APIC's LVTPC entry of one vCPU. Owns the one-entry MSR list KVM is asked with, so that a PMI
/// allocates nothing.
#[derive(Debug)]
pub struct Lvtpc {
    /// The number of the vCPU, which is its x2APIC id.
    vcpu_id: u8,
    /// The vendor's processor sets the mask bit when it delivers: Intel's does (SDM vol. 3 §11.5.1, Local
    /// Vector Table), AMD's does not.
    mask_on_delivery: bool,
    /// Only in xAPIC mode, and only where a delivery masks.
    handled: Option<Handled>,
    msr: Msrs,
}

impl Lvtpc {
    /// The entry of this vCPU.
    ///
    /// # Errors
    /// [`PmiError`] when no memory is left.
    pub fn new(vcpu_id: u8, mask_on_delivery: bool) -> Result<Self, PmiError> {
        let entry = kvm_msr_entry {
            index: X2APIC_LVT_PMI,
            ..Default::default()
        };
        let msr = Msrs::from_entries(&[entry])
            .map_err(|_| CallError::with_errno("making an MSR list", libc::ENOMEM))?;
        Ok(Self {
            vcpu_id,
            mask_on_delivery,
            handled: None,
            msr,
        })
    }

    /// Looks whether a PMI can pass now; `None`: LVTPC is masked, or the local APIC is globally disabled.
    /// Must run on the vCPU's own thread, after a KVM_RUN.
    ///
    /// # Errors
    /// [`PmiError`].
    pub fn look(&mut self, vcpu: &mut ArmedVcpu) -> Result<Option<Open>, PmiError> {
        let apic_base = vcpu.apic_base();
        if apic_base & APIC_BASE_EN == 0 {
            // SDM vol. 3 §11.4.3: the processor then has no local APIC, and so no LVTPC.
            return Ok(None);
        }
        let open = if apic_base & APIC_BASE_EXTD != 0 {
            self.handled = None;
            Open {
                lvtpc: self.read_x2apic(vcpu)?,
                x2apic: true,
                apic_id: self.vcpu_id,
            }
        } else {
            // A PMI that waits is looked at with every entry: one call of KVM until the handler has ended.
            if self.handled == Some(Handled::Nmi) && nmi_is_handled(vcpu)? {
                return Ok(None);
            }
            let page = vcpu.get_lapic()?;
            if let Some(Handled::Vector(vector)) = self.handled
                && vector_is_handled(vector, &page)
            {
                return Ok(None);
            }
            self.handled = None;
            Open {
                lvtpc: register(&page, XAPIC_LVTPC),
                x2apic: false,
                apic_id: (register(&page, XAPIC_ID) >> 24) as u8,
            }
        };
        Ok((open.lvtpc & LVT_MASKED == 0).then_some(open))
    }

    /// Delivers one PMI as LVTPC says. The guest must not have run since `open` was read.
    ///
    /// # Errors
    /// [`PmiError`].
    pub fn deliver(&mut self, open: Open, vm: &VmFd, vcpu: &VcpuFd) -> Result<Delivery, PmiError> {
        let [vector, ..] = open.lvtpc.to_le_bytes();
        let delivery = match open.lvtpc >> 8 & 7 {
            0b100 => {
                vcpu.nmi()?;
                self.handled = Some(Handled::Nmi);
                Delivery::Nmi
            }
            // Vectors below 16 are illegal (SDM vol. 3 §11.5.2).
            0b000 if vector >= 16 && (open.x2apic || open.apic_id != XAPIC_EVERYONE) => {
                self.handled = Some(Handled::Vector(vector));
                send(vm, open.apic_id, vector)?
            }
            _ => Delivery::Dropped,
        };
        if !self.mask_on_delivery || open.x2apic {
            self.handled = None;
        }
        if self.mask_on_delivery && open.x2apic {
            self.write_x2apic(vcpu, open.lvtpc | LVT_MASKED)?;
        }
        Ok(delivery)
    }

    #[expect(clippy::cast_possible_truncation, reason = "LVT entries have 32 bits")]
    fn read_x2apic(&mut self, vcpu: &VcpuFd) -> Result<u32, PmiError> {
        match (vcpu.get_msrs(&mut self.msr)?, self.msr.as_slice().first()) {
            (1, Some(entry)) => Ok(entry.data as u32),
            _ => Err(CallError::with_errno("KVM_GET_MSRS(0x834)", libc::EINVAL).into()),
        }
    }

    fn write_x2apic(&mut self, vcpu: &VcpuFd, value: u32) -> Result<(), PmiError> {
        if let Some(entry) = self.msr.as_mut_slice().first_mut() {
            entry.data = u64::from(value);
        }
        match vcpu.set_msrs(&self.msr)? {
            1 => Ok(()),
            _ => Err(CallError::with_errno("KVM_SET_MSRS(0x834)", libc::EINVAL).into()),
        }
    }
}

/// Sends a fixed interrupt to the local APIC with this physical id. KVM has no call for an interrupt that
/// only the vCPU's own local APIC sees; should the guest have given two of them the same id, both get it.
fn send(vm: &VmFd, apic_id: u8, vector: u8) -> Result<Delivery, PmiError> {
    let msi = kvm_msi {
        address_lo: MSI_ADDRESS | u32::from(apic_id) << 12,
        data: u32::from(vector),
        ..Default::default()
    };
    Ok(if vm.signal_msi(msi)? {
        Delivery::Fixed
    } else {
        Delivery::Dropped
    })
}

/// The register at this offset of an xAPIC page.
fn register(page: &kvm_lapic_state, offset: usize) -> u32 {
    let mut bytes = [0u8; 4];
    for (byte, reg) in bytes.iter_mut().zip(&page.regs[offset..offset + 4]) {
        *byte = reg.cast_unsigned();
    }
    u32::from_le_bytes(bytes)
}

/// When a PMI that waits behind a mask is looked at again if the guest does not leave by itself: a guest
/// unmasks LVTPC without telling us. Soon at first, as the end of a handler is near, and ever more seldom, as
/// a mask that has stayed for long will stay for longer.
#[derive(Debug, Default)]
pub struct Recheck {
    /// When to look again, and how long after the look before.
    set: Option<(Instant, Duration)>,
}

impl Recheck {
    /// After the first entry with a PMI that waits.
    const SOONEST: Duration = Duration::from_millis(1);
    /// At most so long between two looks.
    const LATEST: Duration = Duration::from_millis(64);

    /// The PMI waits at an entry. Returns when to look again. It is asked for at every entry, also while the
    /// timer runs: whose it is has others too, and may just have rung for one of them.
    pub fn waits(&mut self, now: Instant) -> Duration {
        let interval = match self.set {
            Some((until, _)) if now < until => return until - now,
            Some((_, interval)) => (interval * 2).min(Self::LATEST),
            None => Self::SOONEST,
        };
        self.set = Some((now + interval, interval));
        interval
    }

    /// Nothing waits, or the timer was set to something else.
    pub fn over(&mut self) {
        self.set = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that masks LVTPC for good does not pay for it with an exit a millisecond.
    #[test]
    fn a_mask_that_stays_is_looked_at_ever_more_seldom() {
        let mut recheck = Recheck::default();
        let start = Instant::now();
        let (mut rings, mut now) = (0, start);
        while now < start + Duration::from_secs(10) {
            now += recheck.waits(now);
            rings += 1;
        }
        assert!((150..=175).contains(&rings), "{rings} in 10 s");
        recheck.over();
        assert_eq!(recheck.waits(start), Recheck::SOONEST);
        assert_eq!(recheck.waits(start + Recheck::SOONEST), 2 * Recheck::SOONEST);
    }

    /// Whatever else makes the vCPU leave, also the same timer for somebody else: the look that is due is
    /// asked for each time, and does not move.
    #[test]
    fn an_exit_before_the_look_asks_for_it_again() {
        let mut recheck = Recheck::default();
        let start = Instant::now();
        let us = Duration::from_micros;
        assert_eq!(recheck.waits(start), us(1000));
        assert_eq!(recheck.waits(start + us(400)), us(600));
        assert_eq!(recheck.waits(start + us(999)), us(1));
        // Between the time and the timer's ring, which comes a little later.
        assert_eq!(recheck.waits(start + us(1001)), us(2000));
        assert_eq!(recheck.waits(start + us(1050)), us(1951));
    }

    /// A vector's bit is found in the register that holds it.
    #[test]
    fn an_interrupt_is_handled_while_it_is_requested_or_in_service() {
        let kvm = crate::kvm::host::open().unwrap();
        let vm = VmFd::new(&kvm).unwrap();
        vm.add_irqchip().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut page = kvm_lapic_state::default();
        assert!(!vector_is_handled(0x45, &page));
        for first in [XAPIC_ISR, XAPIC_IRR] {
            page.regs[first + 2 * 16] = 1 << 5;
            assert!(vector_is_handled(0x45, &page));
            page.regs[first + 2 * 16] = 1 << 4;
            assert!(!vector_is_handled(0x45, &page));
        }
        // Nothing was ever sent.
        assert!(!nmi_is_handled(&vcpu).unwrap());
        vcpu.nmi().unwrap();
        assert!(nmi_is_handled(&vcpu).unwrap());
    }

    /// While an NMI is handled, the registers of the local APIC are not asked for besides: this vCPU has
    /// none, so that asking fails.
    #[test]
    fn a_pmi_behind_an_nmi_takes_one_call_an_entry() {
        let kvm = crate::kvm::host::open().unwrap();
        let vm = VmFd::new(&kvm).unwrap();
        let mut vcpu = ArmedVcpu::new(vm.create_vcpu(0).unwrap());
        vcpu.set_apic_base(u64::from(MSI_ADDRESS) | APIC_BASE_EN);
        let mut lvtpc = Lvtpc::new(0, true).unwrap();
        lvtpc.handled = Some(Handled::Nmi);
        vcpu.nmi().unwrap();
        assert!(lvtpc.look(&mut vcpu).unwrap().is_none());
        lvtpc.handled = None;
        assert!(lvtpc.look(&mut vcpu).is_err(), "otherwise they are");
    }
}
