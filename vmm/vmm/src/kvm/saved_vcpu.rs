//! Saves the state that KVM has for a vCPU to a snapshot, and restores it.
//!
//! The order of the calls matters:
//!
//! - The multiprocessing state is read first and the events last, because reading the
//!   multiprocessing state may accept a pending INIT or SIPI.
//! - The special registers are written before the local APIC, because the APIC base selects the
//!   mode that determines its register layout, and before the general registers.
//! - The general registers are written before the events, because KVM_SET_REGS discards a pending
//!   exception.
//! - The time stamp counter is the first MSR and the TSC deadline the last one. KVM drops a
//!   deadline that is written before CPUID and LVTT announce the mode.

use kvm_bindings::kvm_msr_entry;
use kvm_ioctls::{Cap, Kvm};
use snapshot::Base64Bytes;
use snapshot::state::SavedVcpu;

use super::bytes::{from_bytes, to_bytes};
use super::call::KvmIoctlError;
use super::initial_state::{HYPER_V, MAX_MSRS_PER_CALL, msrs_of, read_entries};
use super::vcpu_fd::VcpuFd;
use super::vm_fd::VmFd;

/// MSR number of IA32_TIME_STAMP_COUNTER.
const TSC: u32 = 0x10;
/// MSR number of IA32_TSC_DEADLINE.
const TSC_DEADLINE: u32 = 0x6e0;
/// MSR number of IA32_APIC_BASE, which is saved with the special registers.
const APIC_BASE: u32 = 0x1b;
/// Legacy numbers of kvmclock's MSRs. A legacy MSR and the current one share a single value in KVM,
/// so only the current one is saved.
const OLD_KVMCLOCK: [u32; 2] = [0x11, 0x12];

/// List of the parts of a vCPU's state that this host's KVM can save.
#[derive(Clone, Debug)]
pub struct VcpuStateLayout {
    /// MSRs of KVM_GET_MSR_INDEX_LIST that are saved.
    msrs: Vec<u32>,
    /// Size of the extended state (XSAVE) in bytes; 0 if KVM cannot save it.
    xsave_bytes: usize,
    has_xcrs: bool,
}

/// Error when restoring the state of a vCPU in KVM.
#[derive(Debug, thiserror::Error)]
pub enum RestoreVcpuError {
    /// A saved structure has a different size than this host's KVM uses.
    #[error("{0} of vCPU {1} has a size that this host's KVM does not use")]
    Size(&'static str, u8),
    /// KVM rejected a saved structure.
    #[error("vCPU {0} cannot be restored")]
    Kvm(u8, #[source] KvmIoctlError),
    /// KVM on this host does not list a saved MSR.
    #[error("vCPU {vcpu} has MSR {index:#x}, which this host's KVM does not save or restore")]
    UnknownMsr {
        /// Number of the vCPU with the MSR.
        vcpu: u8,
        /// Number of the MSR.
        index: u32,
    },
    /// KVM rejected the saved value of an MSR.
    #[error("this host's KVM refuses value {value:#x} of MSR {index:#x} of vCPU {vcpu}")]
    Msr {
        /// Number of the vCPU with the MSR.
        vcpu: u8,
        /// Number of the MSR.
        index: u32,
        /// Saved value of the MSR.
        value: u64,
    },
    /// The time stamp counter of the restored vCPU would be lower than in the snapshot.
    #[error(
        "the time stamp counter of vCPU {vcpu} would run backwards from {saved} to {here}: this host's KVM does not set it, and \
         the host has been restarted since the snapshot"
    )]
    TscBackwards {
        /// Number of the vCPU.
        vcpu: u8,
        /// Saved value of the time stamp counter.
        saved: u64,
        /// Value of the time stamp counter on this host.
        here: u64,
    },
}

impl VcpuStateLayout {
    /// Reads from KVM which parts of a vCPU's state can be saved.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_GET_MSR_INDEX_LIST fails.
    pub fn of(kvm: &Kvm, vm: &VmFd) -> Result<Self, KvmIoctlError> {
        let list = kvm
            .get_msr_index_list()
            .map_err(KvmIoctlError::of("KVM_GET_MSR_INDEX_LIST"))?;
        let is_saved =
            |index: &u32| *index != APIC_BASE && !OLD_KVMCLOCK.contains(index) && !HYPER_V.contains(index);
        let mut msrs: Vec<u32> = list.as_slice().iter().copied().filter(is_saved).collect();
        msrs.sort_by_key(|index| write_order(*index));
        Ok(Self {
            msrs,
            xsave_bytes: vm.xsave_bytes(),
            has_xcrs: kvm.check_extension(Cap::Xcrs),
        })
    }

    /// Reads the state of `vcpu` from KVM. No other thread may run the vCPU, and KVM must have
    /// completed the last exit.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM cannot read a part of the state.
    pub fn save(&self, id: u8, vcpu: &VcpuFd) -> Result<SavedVcpu, KvmIoctlError> {
        let mp_state = to_bytes(&vcpu.get_mp_state()?);
        let regs = to_bytes(&vcpu.get_regs()?);
        let sregs = to_bytes(&vcpu.get_sregs()?);
        let (mut xsave, mut fpu) = (Base64Bytes::default(), Base64Bytes::default());
        if self.xsave_bytes > 0 {
            xsave = vcpu.get_xsave(self.xsave_bytes)?;
        } else {
            fpu = to_bytes(&vcpu.get_fpu()?);
        }
        let xcrs = if self.has_xcrs {
            to_bytes(&vcpu.get_xcrs()?)
        } else {
            Base64Bytes::default()
        };
        Ok(SavedVcpu {
            id,
            mp_state,
            regs,
            sregs,
            xsave,
            fpu,
            xcrs,
            debug_regs: to_bytes(&vcpu.get_debug_regs()?),
            lapic: to_bytes(&vcpu.get_lapic()?),
            msrs: read_entries(vcpu, self.msrs.iter().copied())?
                .iter()
                .map(|msr| (msr.index, msr.data))
                .collect(),
            events: to_bytes(&vcpu.get_vcpu_events()?),
            ..SavedVcpu::default()
        })
    }

    /// Restores a vCPU that is configured and has not run. The CPUID table of the vCPU must equal
    /// the saved one.
    ///
    /// # Errors
    /// Returns a [`RestoreVcpuError`] if the state cannot be restored. In this case, the vCPU must
    /// not be run.
    pub fn restore(&self, saved: &SavedVcpu, vcpu: &VcpuFd) -> Result<(), RestoreVcpuError> {
        let id = saved.id;
        let size = |what| move || RestoreVcpuError::Size(what, id);
        let kvm = |error| RestoreVcpuError::Kvm(id, error);
        vcpu.set_sregs(&from_bytes(&saved.sregs).ok_or_else(size("kvm_sregs"))?)
            .map_err(kvm)?;
        vcpu.set_regs(&from_bytes(&saved.regs).ok_or_else(size("kvm_regs"))?)
            .map_err(kvm)?;
        if self.xsave_bytes > 0 {
            let set = vcpu.set_xsave(&saved.xsave, self.xsave_bytes);
            set.ok_or_else(size("kvm_xsave"))?.map_err(kvm)?;
        } else {
            vcpu.set_fpu(&from_bytes(&saved.fpu).ok_or_else(size("kvm_fpu"))?)
                .map_err(kvm)?;
        }
        if self.has_xcrs {
            vcpu.set_xcrs(&from_bytes(&saved.xcrs).ok_or_else(size("kvm_xcrs"))?)
                .map_err(kvm)?;
        }
        vcpu.set_debug_regs(&from_bytes(&saved.debug_regs).ok_or_else(size("kvm_debugregs"))?)
            .map_err(kvm)?;
        vcpu.set_lapic(&from_bytes(&saved.lapic).ok_or_else(size("kvm_lapic_state"))?)
            .map_err(kvm)?;
        self.restore_msrs(saved, vcpu)?;
        vcpu.set_mp_state(from_bytes(&saved.mp_state).ok_or_else(size("kvm_mp_state"))?)
            .map_err(kvm)?;
        vcpu.set_vcpu_events(&from_bytes(&saved.events).ok_or_else(size("kvm_vcpu_events"))?)
            .map_err(kvm)
    }

    /// Writes the saved MSRs whose values differ from those of the new vCPU, and checks the time
    /// stamp counter.
    fn restore_msrs(&self, saved: &SavedVcpu, vcpu: &VcpuFd) -> Result<(), RestoreVcpuError> {
        let id = saved.id;
        let kvm = |error| RestoreVcpuError::Kvm(id, error);
        let mut msrs = saved.msrs.clone();
        msrs.sort_by_key(|(index, _)| write_order(*index));
        if let Some(&(index, _)) = msrs.iter().find(|(index, _)| !self.msrs.contains(index)) {
            return Err(RestoreVcpuError::UnknownMsr { vcpu: id, index });
        }
        let now = read_entries(vcpu, msrs.iter().map(|(index, _)| *index)).map_err(kvm)?;
        let value_of = |wanted: u32| now.iter().find(|msr| msr.index == wanted).map(|msr| msr.data);
        let changed: Vec<kvm_msr_entry> = msrs
            .iter()
            .filter(|(index, data)| *index == TSC || value_of(*index) != Some(*data))
            .map(|&(index, data)| kvm_msr_entry {
                index,
                data,
                ..Default::default()
            })
            .collect();
        for part in changed.chunks(MAX_MSRS_PER_CALL) {
            let done = vcpu.set_msrs(&msrs_of(part).map_err(kvm)?).map_err(kvm)?;
            if let Some(refused) = part.get(done) {
                return Err(RestoreVcpuError::Msr {
                    vcpu: id,
                    index: refused.index,
                    value: refused.data,
                });
            }
        }
        // Some KVMs accept a write of the time stamp counter and ignore it, so check the counter.
        let tsc = |list: &[(u32, u64)]| {
            list.iter()
                .find(|(index, _)| *index == TSC)
                .map(|(_, data)| *data)
        };
        let here = read_entries(vcpu, std::iter::once(TSC)).map_err(kvm)?;
        if let (Some(saved), [here]) = (tsc(&msrs), here.as_slice())
            && here.data < saved
        {
            return Err(RestoreVcpuError::TscBackwards {
                vcpu: id,
                saved,
                here: here.data,
            });
        }
        Ok(())
    }
}

/// Returns the rank of the MSR `index` when MSRs are written: lower ranks first.
fn write_order(index: u32) -> u8 {
    match index {
        TSC => 0,
        TSC_DEADLINE => 2,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::{kvm_mp_state, kvm_regs, kvm_vcpu_events};

    use super::*;
    use crate::kvm::call;

    /// Vector of the local APIC's timer in tests.
    const TIMER_VECTOR: u8 = 0x41;

    fn vcpu() -> Option<(Kvm, VmFd, VcpuFd)> {
        let Ok(kvm) = Kvm::new() else {
            eprintln!("SKIP: no /dev/kvm here");
            return None;
        };
        let vm = VmFd::new(&kvm).unwrap();
        vm.add_irqchip().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        Some((kvm, vm, vcpu))
    }

    /// Changes some registers of a new vCPU, and returns its saved state.
    fn changed(layout: &VcpuStateLayout, vcpu: &VcpuFd) -> SavedVcpu {
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.r9) = (0x1234, 0x5678);
        vcpu.set_regs(&regs).unwrap();
        let mut debug = vcpu.get_debug_regs().unwrap();
        debug.db[0] = 0x1000;
        vcpu.set_debug_regs(&debug).unwrap();
        // SYSENTER_EIP, STAR and the kvmclock page of this vCPU.
        for (index, data) in [(0x176, 0x1111), (0xc000_0081, 0x2222), (0x4b56_4d01, 0x3001)] {
            let entry = kvm_msr_entry {
                index,
                data,
                ..Default::default()
            };
            vcpu.set_msrs(&msrs_of(&[entry]).unwrap()).unwrap();
        }
        vcpu.nmi().unwrap();
        layout.save(0, vcpu).unwrap()
    }

    /// Returns `saved` without the MSRs whose values advance with time.
    fn without_time(saved: &SavedVcpu) -> SavedVcpu {
        let mut saved = saved.clone();
        saved.msrs.retain(|(index, _)| *index != TSC);
        saved
    }

    #[test]
    fn restored_vcpu_has_saved_state() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        let saved = changed(&layout, &first);
        let (_, _vm, second) = vcpu().unwrap();
        layout.restore(&saved, &second).unwrap();
        let again = layout.save(0, &second).unwrap();
        assert_eq!(without_time(&again), without_time(&saved));
        let regs: kvm_regs = from_bytes(&again.regs).unwrap();
        assert_eq!((regs.rip, regs.r9), (0x1234, 0x5678));
    }

    /// A pending exception survives a restore. KVM_SET_REGS, which discards a pending exception, is
    /// called before KVM_SET_VCPU_EVENTS.
    #[test]
    fn set_regs_comes_before_set_events() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        let mut events = first.get_vcpu_events().unwrap();
        (events.exception.injected, events.exception.nr) = (1, 6);
        first.set_vcpu_events(&events).unwrap();
        let saved = layout.save(0, &first).unwrap();
        let (_, _vm, second) = vcpu().unwrap();
        layout.restore(&saved, &second).unwrap();
        let again: kvm_vcpu_events = from_bytes(&layout.save(0, &second).unwrap().events).unwrap();
        assert_eq!((again.exception.injected, again.exception.nr), (1, 6));
    }

    /// Only MSRs whose values differ from those of a new vCPU are written. If KVM rejects a value,
    /// the error names the MSR.
    #[test]
    fn msr_count_short_is_an_error_that_names_the_msr() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        let mut saved = layout.save(0, &first).unwrap();
        // IA32_LSTAR with a non-canonical address.
        let lstar = saved.msrs.iter_mut().find(|(index, _)| *index == 0xc000_0082);
        lstar.unwrap().1 = 1 << 62;
        let line = layout.restore(&saved, &first).unwrap_err().to_string();
        assert_eq!(
            line,
            "this host's KVM refuses value 0x4000000000000000 of MSR 0xc0000082 of vCPU 0"
        );
        saved.msrs.push((0xc1, 0));
        saved.msrs.push((0x1234_5678, 0));
        let line = layout.restore(&saved, &first).unwrap_err().to_string();
        assert!(line.contains("which this host's KVM does not"), "{line}");
    }

    #[test]
    fn structures_of_other_sizes_are_refused_by_name() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        let saved = layout.save(0, &first).unwrap();
        type Part = fn(&mut SavedVcpu) -> &mut Base64Bytes;
        let parts: [(&str, Part); 6] = [
            ("kvm_regs", |saved| &mut saved.regs),
            ("kvm_sregs", |saved| &mut saved.sregs),
            ("kvm_debugregs", |saved| &mut saved.debug_regs),
            ("kvm_lapic_state", |saved| &mut saved.lapic),
            ("kvm_mp_state", |saved| &mut saved.mp_state),
            ("kvm_vcpu_events", |saved| &mut saved.events),
        ];
        for (name, part) in parts {
            let mut short = saved.clone();
            part(&mut short).0.pop();
            let line = layout.restore(&short, &first).unwrap_err().to_string();
            assert!(line.starts_with(name), "{name}: {line}");
        }
    }

    /// A restore fails if the time stamp counter cannot be set. Some versions of KVM ignore the
    /// write and let the counter run on.
    #[test]
    fn a_tsc_that_cannot_be_set_is_detected() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        let mut saved = layout.save(0, &first).unwrap();
        let tsc = saved.msrs.iter_mut().find(|(index, _)| *index == TSC).unwrap();
        tsc.1 += 1 << 60;
        let later = tsc.1;
        match layout.restore(&saved, &first) {
            Ok(()) => {
                let now = read_entries(&first, std::iter::once(TSC)).unwrap();
                assert!(now[0].data >= later);
            }
            Err(e) => assert!(matches!(e, RestoreVcpuError::TscBackwards { .. }), "{e}"),
        }
    }

    /// A vCPU that waits for INIT is still waiting after a restore.
    #[test]
    fn mp_state_survives() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        for mp_state in [0, 1] {
            first.set_mp_state(kvm_mp_state { mp_state }).unwrap();
            let saved = layout.save(0, &first).unwrap();
            let (_, _vm, second) = vcpu().unwrap();
            layout.restore(&saved, &second).unwrap();
            assert_eq!(second.get_mp_state().unwrap().mp_state, mp_state);
        }
    }

    /// The multiprocessing state is read first and the events last, because reading the
    /// multiprocessing state may accept an INIT or SIPI, which changes other state.
    #[test]
    fn mp_state_is_read_first_and_events_last() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        call::log::start();
        layout.save(0, &first).unwrap();
        let calls = call::log::finish();
        assert_eq!(calls.first(), Some(&"KVM_GET_MP_STATE"));
        assert_eq!(calls.last(), Some(&"KVM_GET_VCPU_EVENTS"));
    }

    /// The flags of a pending NMI and of a SIPI vector are saved as KVM reports them, because KVM
    /// ignores an NMI or a vector without its flag.
    #[test]
    fn a_sipi_vector_needs_its_flag() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        first.nmi().unwrap();
        let reported = first.get_vcpu_events().unwrap();
        let saved = layout.save(0, &first).unwrap();
        let (_, _vm, second) = vcpu().unwrap();
        layout.restore(&saved, &second).unwrap();
        let again: kvm_vcpu_events = from_bytes(&saved.events).unwrap();
        assert_eq!(
            (again.flags, again.sipi_vector),
            (reported.flags, reported.sipi_vector)
        );
        let restored = second.get_vcpu_events().unwrap();
        assert_eq!(restored.nmi, reported.nmi);
        assert!(restored.nmi.pending + restored.nmi.injected > 0);
    }

    /// Gives the vCPU a CPUID table that enumerates the TSC-deadline mode.
    fn announce_deadlines(kvm: &Kvm, vcpu: &VcpuFd) {
        let mut cpuid = kvm
            .get_supported_cpuid(kvm_bindings::KVM_MAX_CPUID_ENTRIES)
            .unwrap();
        for leaf in cpuid.as_mut_slice().iter_mut().filter(|leaf| leaf.function == 1) {
            leaf.ecx |= 1 << 24;
        }
        vcpu.set_cpuid2(&cpuid).unwrap();
    }

    /// Enables the local APIC with its timer in TSC-deadline mode.
    fn select_deadlines(vcpu: &VcpuFd) {
        let mut lapic = vcpu.get_lapic().unwrap();
        let mut set = |at: usize, value: u32| {
            let bytes = value.to_le_bytes().map(|byte| byte as std::ffi::c_char);
            lapic.regs[at..at + 4].copy_from_slice(&bytes);
        };
        set(0xf0, 0x1ff);
        set(0x320, 0x4_0000 | u32::from(TIMER_VECTOR));
        vcpu.set_lapic(&lapic).unwrap();
    }

    fn deadline(vcpu: &VcpuFd) -> u64 {
        let read = read_entries(vcpu, std::iter::once(TSC_DEADLINE)).unwrap();
        read.first().map_or(0, |msr| msr.data)
    }

    fn set_deadline(vcpu: &VcpuFd, data: u64) {
        let entry = kvm_msr_entry {
            index: TSC_DEADLINE,
            data,
            ..Default::default()
        };
        assert_eq!(vcpu.set_msrs(&msrs_of(&[entry]).unwrap()).unwrap(), 1);
    }

    /// Returns whether KVM supports the TSC-deadline mode. If not, prints that the test is skipped.
    fn has_deadlines(vm: &VmFd) -> bool {
        if !vm.has_tsc_deadline() {
            eprintln!("SKIP: this KVM has no TSC-deadline mode");
        }
        vm.has_tsc_deadline()
    }

    #[test]
    fn a_deadline_written_before_cpuid_and_lvtt_is_accepted_and_lost() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        if !has_deadlines(&vm) {
            return;
        }
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        let tsc = read_entries(&first, std::iter::once(TSC)).unwrap()[0].data;
        let later = tsc + (1 << 40);
        set_deadline(&first, later);
        assert_eq!(deadline(&first), 0, "lost");
        announce_deadlines(&kvm, &first);
        select_deadlines(&first);
        set_deadline(&first, later);
        assert_eq!(deadline(&first), later);
        let saved = layout.save(0, &first).unwrap();
        let (_, _vm, second) = vcpu().unwrap();
        announce_deadlines(&kvm, &second);
        layout.restore(&saved, &second).unwrap();
        assert_eq!(deadline(&second), later);
    }

    /// If the timer fires while no thread runs the vCPU, the interrupt is not lost. In the saved
    /// state, either the timer is still armed, so that it fires after the restore, or the local
    /// APIC has a request for its interrupt.
    #[test]
    fn a_timer_that_fired_while_paused_still_rings() {
        let Some((kvm, vm, first)) = vcpu() else { return };
        if !has_deadlines(&vm) {
            return;
        }
        let layout = VcpuStateLayout::of(&kvm, &vm).unwrap();
        announce_deadlines(&kvm, &first);
        select_deadlines(&first);
        let tsc = read_entries(&first, std::iter::once(TSC)).unwrap()[0].data;
        // Set a deadline that expires within a millisecond on any host.
        set_deadline(&first, tsc + 500_000);
        std::thread::sleep(std::time::Duration::from_millis(50));
        let saved = layout.save(0, &first).unwrap();
        let (_, _vm, second) = vcpu().unwrap();
        announce_deadlines(&kvm, &second);
        layout.restore(&saved, &second).unwrap();
        let lapic = second.get_lapic().unwrap();
        let at = 0x200 + usize::from(TIMER_VECTOR / 32) * 16 + usize::from(TIMER_VECTOR % 32 / 8);
        let is_requested = lapic.regs[at] as u8 >> (TIMER_VECTOR % 8) & 1 != 0;
        assert!(deadline(&second) != 0 || is_requested);
    }

    #[test]
    fn deadline_follows_tsc_and_all_others() {
        let mut order = [TSC_DEADLINE, 0x176, TSC, 0xc000_0081];
        order.sort_by_key(|index| write_order(*index));
        assert_eq!(order, [TSC, 0x176, 0xc000_0081, TSC_DEADLINE]);
    }
}
