//! Delivers PMIs through LVTPC, the performance monitoring entry of the local APIC's vector table.
//!
//! KVM emulates the local APIC, so the value of LVTPC must be read from KVM when a PMI is due
//! (Intel SDM vol. 3 §11.5.1, offset 340H, x2APIC MSR 834H). In x2APIC mode, LVTPC is an MSR that
//! can be read and written on its own.
//!
//! In xAPIC mode, KVM can read and write only the whole register page. KVM_SET_LAPIC overwrites all
//! registers, including the requested interrupts (IRR) and those posted to a running processor, and
//! restarts the APIC timer. An interrupt that arrives between the read and the write is lost
//! without any indication, and a guest that loses an inter-processor interrupt hangs. In xAPIC
//! mode, this module therefore never sets the mask bit that an Intel processor sets when it
//! delivers a PMI. A guest that reads LVTPC does not see the bit, but its effect is emulated; see
//! `PmiInService`.

use std::time::{Duration, Instant};

use kvm_bindings::{Msrs, kvm_lapic_state, kvm_msi, kvm_msr_entry};
use snapshot::state::SavedInServicePmi;

use crate::kvm::call::KvmIoctlError;
use crate::kvm::kickable_vcpu::KickableVcpu;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::kvm::vm_fd::VmFd;

/// MSR number of IA32_X2APIC_LVT_PMI, which exists in x2APIC mode (SDM vol. 3 table 11-6).
const X2APIC_LVT_PMI: u32 = 0x834;
/// IA32_APIC_BASE.EXTD (bit 10, SDM vol. 4): x2APIC mode.
const APIC_BASE_EXTD: u64 = 1 << 10;
/// IA32_APIC_BASE.EN (bit 11): the local APIC is enabled.
const APIC_BASE_EN: u64 = 1 << 11;
/// Offset of the local APIC ID in the xAPIC register page. The ID is in bits 31:24. The guest can
/// change it.
const XAPIC_ID: usize = 0x20;
/// Offset of the first in-service register (ISR) in the xAPIC register page. The ISR has a bit for
/// each vector, in registers of 32 bits that are 16 bytes apart.
const XAPIC_ISR: usize = 0x100;
/// Offset of the first interrupt request register (IRR) in the xAPIC register page. Same layout as
/// the ISR.
const XAPIC_IRR: usize = 0x200;
/// Destination ID with which an interrupt is sent to all local APICs in xAPIC mode.
const XAPIC_BROADCAST: u8 = 0xff;
/// Offset of LVTPC in the xAPIC register page.
const XAPIC_LVTPC: usize = 0x340;
/// Mask bit of an entry in the local vector table (LVT).
const LVT_MASKED: u32 = 1 << 16;
/// Base address of MSIs that are sent to a local APIC.
const MSI_ADDRESS: u32 = 0xfee0_0000;

/// Outcome of delivering a PMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmiDelivery {
    /// The PMI was queued as an NMI.
    Nmi,
    /// The PMI was sent to the local APIC as an interrupt with a fixed vector.
    Fixed,
    /// The PMI was discarded, as on a processor whose LVTPC is unusable: the delivery mode is
    /// unsupported (SMI, INIT or ExtINT) or the vector is illegal. A PMI is also discarded if the
    /// ID of the local APIC is ambiguous.
    Dropped,
}

/// Error of a KVM call that reads LVTPC or delivers a PMI. A guest cannot cause this error.
#[derive(Debug, thiserror::Error)]
#[error("failed to deliver a PMI")]
pub struct PmiError(#[from] KvmIoctlError);

/// A PMI that the guest may still be handling. Replaces the mask bit of LVTPC in xAPIC mode, where
/// the bit is not set.
///
/// An Intel processor sets the mask bit when it delivers a PMI. The bit blocks further PMIs until
/// the guest clears it, and a PMI is withdrawn if the guest clears the overflow status before that.
/// Linux clears the mask bit at the end of its handler (from Haswell on) or at the beginning; in
/// the latter case, the processor blocks the next NMI until the handler executes IRET. Either way,
/// the next PMI arrives after the handler has ended. KVM reports whether an NMI or interrupt is
/// still being handled, and LVTPC is treated as masked until then.
///
/// Two differences from a processor remain. A handler that leaves LVTPC masked still receives the
/// next PMI. A handler that unmasks LVTPC early and then handles a second overflow receives no NMI
/// for that overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PmiInService {
    /// The PMI was delivered as an NMI.
    Nmi,
    /// The PMI was delivered as an interrupt with this vector.
    Vector(u8),
}

/// Returns `true` if an NMI is pending or being handled.
fn nmi_is_handled(vcpu: &VcpuFd) -> Result<bool, PmiError> {
    let events = vcpu.get_vcpu_events()?;
    Ok(events.nmi.pending | events.nmi.injected | events.nmi.masked != 0)
}

/// Returns `true` if the interrupt `vector` is requested or in service in the local APIC.
fn vector_is_handled(vector: u8, page: &kvm_lapic_state) -> bool {
    let at = usize::from(vector / 32) * 16;
    let both = register(page, XAPIC_IRR + at) | register(page, XAPIC_ISR + at);
    both >> (vector % 32) & 1 != 0
}

/// LVTPC value that is not masked.
#[derive(Clone, Copy, Debug)]
pub struct UnmaskedLvtpc {
    lvtpc: u32,
    x2apic: bool,
    apic_id: u8,
}

/// LVTPC of one vCPU. Owns an MSR list with one entry, so delivering a PMI does not allocate
/// memory.
#[derive(Debug)]
pub struct Lvtpc {
    /// vCPU number, which is also the x2APIC ID.
    vcpu_id: u8,
    /// `true` if the guest's processor model sets the mask bit of LVTPC when it delivers a PMI:
    /// Intel (SDM vol. 3 §11.5.1, Local Vector Table), but not AMD.
    mask_on_delivery: bool,
    /// PMI that the guest is still handling. Used only in xAPIC mode, and only if
    /// `mask_on_delivery` is set.
    handled: Option<PmiInService>,
    /// PMI that was delivered last. Used in xAPIC and in x2APIC mode.
    delivered: Option<PmiInService>,
    msr: Msrs,
}

impl Lvtpc {
    /// Creates the LVTPC state of a vCPU to which no PMI was delivered yet.
    ///
    /// # Errors
    /// Returns [`PmiError`] if memory is exhausted.
    pub fn new(vcpu_id: u8, mask_on_delivery: bool) -> Result<Self, PmiError> {
        let entry = kvm_msr_entry {
            index: X2APIC_LVT_PMI,
            ..Default::default()
        };
        let msr = Msrs::from_entries(&[entry])
            .map_err(|_| KvmIoctlError::with_errno("making an MSR list", libc::ENOMEM))?;
        Ok(Self {
            vcpu_id,
            mask_on_delivery,
            handled: None,
            delivered: None,
            msr,
        })
    }

    /// Returns the PMI that the guest is still handling, if any, for a snapshot.
    pub(super) fn handled(&self) -> SavedInServicePmi {
        match self.handled {
            None => SavedInServicePmi::None,
            Some(PmiInService::Nmi) => SavedInServicePmi::Nmi,
            Some(PmiInService::Vector(vector)) => SavedInServicePmi::Vector(vector),
        }
    }

    /// Sets the PMI that the guest is still handling, from a snapshot.
    pub(super) fn restore_handled(&mut self, saved: SavedInServicePmi) {
        self.handled = match saved {
            SavedInServicePmi::None => None,
            SavedInServicePmi::Nmi => Some(PmiInService::Nmi),
            SavedInServicePmi::Vector(vector) => Some(PmiInService::Vector(vector)),
        };
    }

    /// Reads LVTPC. Returns `None` if no PMI can be delivered now: LVTPC is masked, the guest is
    /// still handling a PMI, or the local APIC is disabled. Must be called on the vCPU thread after
    /// a KVM_RUN.
    ///
    /// # Errors
    /// Returns [`PmiError`] if a KVM call fails.
    pub fn check(&mut self, vcpu: &mut KickableVcpu) -> Result<Option<UnmaskedLvtpc>, PmiError> {
        let apic_base = vcpu.apic_base();
        if apic_base & APIC_BASE_EN == 0 {
            // Without an enabled local APIC there is no LVTPC (SDM vol. 3 §11.4.3).
            return Ok(None);
        }
        let open = if apic_base & APIC_BASE_EXTD != 0 {
            self.handled = None;
            UnmaskedLvtpc {
                lvtpc: self.read_x2apic(vcpu)?,
                x2apic: true,
                apic_id: self.vcpu_id,
            }
        } else {
            // While a PMI waits, this check is made at every entry and costs one KVM call, until
            // the handler has ended.
            if self.handled == Some(PmiInService::Nmi) && nmi_is_handled(vcpu)? {
                return Ok(None);
            }
            let page = vcpu.get_lapic()?;
            if let Some(PmiInService::Vector(vector)) = self.handled
                && vector_is_handled(vector, &page)
            {
                return Ok(None);
            }
            self.handled = None;
            UnmaskedLvtpc {
                lvtpc: register(&page, XAPIC_LVTPC),
                x2apic: false,
                apic_id: (register(&page, XAPIC_ID) >> 24) as u8,
            }
        };
        Ok((open.lvtpc & LVT_MASKED == 0).then_some(open))
    }

    /// Returns whether the guest is still handling the last PMI. Makes one KVM call, so it should
    /// be called only while another PMI is due.
    ///
    /// # Errors
    /// Returns [`PmiError`] if the KVM call fails.
    pub fn is_in_service(&self, vcpu: &KickableVcpu) -> Result<bool, PmiError> {
        match self.delivered {
            None => Ok(false),
            Some(PmiInService::Nmi) => nmi_is_handled(vcpu),
            Some(PmiInService::Vector(vector)) => Ok(vector_is_handled(vector, &vcpu.get_lapic()?)),
        }
    }

    /// Delivers one PMI as `open`, the value of LVTPC, specifies. The guest must not have run since
    /// [`Lvtpc::check`] returned this value.
    ///
    /// # Errors
    /// Returns [`PmiError`] if a KVM call fails.
    pub fn deliver(
        &mut self,
        open: UnmaskedLvtpc,
        vm: &VmFd,
        vcpu: &VcpuFd,
    ) -> Result<PmiDelivery, PmiError> {
        self.handled = None;
        let [vector, ..] = open.lvtpc.to_le_bytes();
        let delivery = match open.lvtpc >> 8 & 7 {
            0b100 => {
                vcpu.nmi()?;
                self.handled = Some(PmiInService::Nmi);
                PmiDelivery::Nmi
            }
            // Vectors below 16 are illegal (SDM vol. 3 §11.5.2).
            0b000 if vector >= 16 && (open.x2apic || open.apic_id != XAPIC_BROADCAST) => {
                self.handled = Some(PmiInService::Vector(vector));
                send(vm, open.apic_id, vector)?
            }
            _ => PmiDelivery::Dropped,
        };
        self.delivered = self.handled;
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
            _ => Err(KvmIoctlError::with_errno("KVM_GET_MSRS(0x834)", libc::EINVAL).into()),
        }
    }

    fn write_x2apic(&mut self, vcpu: &VcpuFd, value: u32) -> Result<(), PmiError> {
        if let Some(entry) = self.msr.as_mut_slice().first_mut() {
            entry.data = u64::from(value);
        }
        match vcpu.set_msrs(&self.msr)? {
            1 => Ok(()),
            _ => Err(KvmIoctlError::with_errno("KVM_SET_MSRS(0x834)", libc::EINVAL).into()),
        }
    }
}

/// Sends a fixed interrupt to the local APIC whose physical ID is `apic_id`. KVM has no call that
/// addresses the local APIC of one vCPU. If the guest has given two local APICs the same ID, both
/// receive the interrupt.
fn send(vm: &VmFd, apic_id: u8, vector: u8) -> Result<PmiDelivery, PmiError> {
    let msi = kvm_msi {
        address_lo: MSI_ADDRESS | u32::from(apic_id) << 12,
        data: u32::from(vector),
        ..Default::default()
    };
    Ok(if vm.signal_msi(msi)? {
        PmiDelivery::Fixed
    } else {
        PmiDelivery::Dropped
    })
}

/// Returns the 32-bit register at `offset` in an xAPIC register page.
fn register(page: &kvm_lapic_state, offset: usize) -> u32 {
    let mut bytes = [0u8; 4];
    for (byte, reg) in bytes.iter_mut().zip(&page.regs[offset..offset + 4]) {
        *byte = reg.cast_unsigned();
    }
    u32::from_le_bytes(bytes)
}

/// Schedule of repeated checks whether the guest has unmasked LVTPC, which causes no exit. The
/// first checks follow each other quickly, because the handler of the last PMI may end soon. The
/// interval doubles while LVTPC stays masked.
#[derive(Debug, Default)]
pub struct LvtpcBackoff {
    /// Time of the next check, and the length of the current interval.
    set: Option<(Instant, Duration)>,
}

impl LvtpcBackoff {
    /// Length of the first interval, which begins at the first entry with a waiting PMI.
    const MIN_INTERVAL: Duration = Duration::from_millis(1);
    /// Maximum length of the interval between two checks.
    const MAX_INTERVAL: Duration = Duration::from_millis(64);

    /// Returns the delay until the next check. Must be called at every entry with a waiting PMI,
    /// because the kick timer is shared and may have fired for another reason.
    pub fn waits(&mut self, now: Instant) -> Duration {
        let interval = match self.set {
            Some((until, _)) if now < until => return until - now,
            Some((_, interval)) => (interval * 2).min(Self::MAX_INTERVAL),
            None => Self::MIN_INTERVAL,
        };
        self.set = Some((now + interval, interval));
        interval
    }

    /// Ends the schedule. Called when no PMI waits, or when a PMI waits for something other than
    /// LVTPC.
    pub fn reset(&mut self) {
        self.set = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that masks LVTPC permanently does not cause an exit every millisecond.
    #[test]
    fn masked_lvtpc_check_backs_off() {
        let mut recheck = LvtpcBackoff::default();
        let start = Instant::now();
        let (mut rings, mut now) = (0, start);
        while now < start + Duration::from_secs(10) {
            now += recheck.waits(now);
            rings += 1;
        }
        assert!((150..=175).contains(&rings), "{rings} in 10 s");
        recheck.reset();
        assert_eq!(recheck.waits(start), LvtpcBackoff::MIN_INTERVAL);
        assert_eq!(
            recheck.waits(start + LvtpcBackoff::MIN_INTERVAL),
            2 * LvtpcBackoff::MIN_INTERVAL
        );
    }

    /// Exits for other reasons do not postpone the next check of LVTPC.
    #[test]
    fn exit_does_not_postpone_lvtpc_check() {
        let mut recheck = LvtpcBackoff::default();
        let start = Instant::now();
        let us = Duration::from_micros;
        assert_eq!(recheck.waits(start), us(1000));
        assert_eq!(recheck.waits(start + us(400)), us(600));
        assert_eq!(recheck.waits(start + us(999)), us(1));
        // The timer fires slightly after the due time.
        assert_eq!(recheck.waits(start + us(1001)), us(2000));
        assert_eq!(recheck.waits(start + us(1050)), us(1951));
    }

    /// The bit of a vector is read from the IRR and ISR registers that contain it.
    #[test]
    fn vector_is_handled_while_in_irr_or_isr() {
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
        // No NMI has been sent yet.
        assert!(!nmi_is_handled(&vcpu).unwrap());
        vcpu.nmi().unwrap();
        assert!(nmi_is_handled(&vcpu).unwrap());
    }

    /// While the guest handles an NMI, the registers of the local APIC are not read. The vCPU of
    /// this test has no local APIC, so reading them would fail.
    #[test]
    fn pmi_after_nmi_takes_one_call_per_entry() {
        let kvm = crate::kvm::host::open().unwrap();
        let vm = VmFd::new(&kvm).unwrap();
        let mut vcpu = KickableVcpu::new(vm.create_vcpu(0).unwrap());
        vcpu.set_apic_base(u64::from(MSI_ADDRESS) | APIC_BASE_EN);
        let mut lvtpc = Lvtpc::new(0, true).unwrap();
        lvtpc.handled = Some(PmiInService::Nmi);
        vcpu.nmi().unwrap();
        assert!(lvtpc.check(&mut vcpu).unwrap().is_none());
        lvtpc.handled = None;
        assert!(lvtpc.check(&mut vcpu).is_err(), "otherwise they are");
    }
}
