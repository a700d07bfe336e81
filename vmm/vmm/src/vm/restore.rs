//! Restores a VM from a snapshot or from another process. First checks that this machine matches
//! the saved one. Writes the saved state before any thread of the VM runs.

use std::fs::File;
use std::sync::Arc;

use guest_patching::finder::KernelTextRange;
use guest_patching::sites;
use kernel_images::packed::CompressedKernelSymbols;
use kvm_bindings::CpuId;
use snapshot::diff::{self, SnapshotBaseChain, SnapshotDiffError};
use snapshot::memory::{self, MemoryFileError};
use snapshot::state::{
    SavedEventFilter, SavedGuestKernel, SavedMachine, SavedMachineProperties, SavedVcpu, SavedVcpuPmu,
};
use vpmu::cpuid::LEAF_ARCH_PERFMON;
use vpmu::events::DecodedCounterEvent;
use vpmu::filter::{EventFilterAction, EventFilterEntrySpec, EventFilterFileError, EventFilterSpec};
use vpmu::{ArchEventSet, CounterBacking, CounterBackingChange, CpuidRegs, EventFilter, VpmuStateError};

use super::config::VmConfig;
use super::error::VmError;
use super::hardware::VmHardware;
use crate::boot::{BootProcessorState, KernelFormat, LoadedGuest};
use crate::devices::cpu_plug::VcpuSet;
use crate::devices::saved::RestoreBoardError;
use crate::kvm::call::KvmIoctlError;
use crate::kvm::chips::IrqchipState;
use crate::kvm::cpuid;
use crate::kvm::saved_vcpu::{RestoreVcpuError, VcpuStateLayout};
use crate::memory::GuestRam;
use crate::vcpu::factory::VcpuFactory;
use crate::vcpu::kvm_vcpu::KvmVcpu;
use crate::vcpu::saved::cpuid_leaves;

/// MSR with the address of the steal time record (Linux, `Documentation/virt/kvm/x86/msr.rst`). KVM
/// changes the version of the record at each entry. A single-stepped guest would read the record
/// again and again, waiting for a stable version.
const MSR_KVM_STEAL_TIME: u32 = 0x4b56_4d03;
/// Maximum difference between the TSC frequencies of two hosts, in parts per million. The measured
/// frequency of one host may differ this much between two boots.
const MAX_TSC_DIFFERENCE_PPM: u64 = 250;

/// Source of the guest memory of a restored machine.
#[derive(Debug)]
pub enum RestoredMemory {
    /// The memory file of a snapshot, which is mapped and never written. Several VMs may be
    /// restored from one snapshot, so each receives a generation ID of its own.
    Snapshot(File),
    /// The memory files of a diff and of the snapshots on which the diff is based, which are mapped
    /// and never written.
    Diff {
        /// Snapshot on which the diff is based, and the snapshots on which that snapshot is based.
        base: Box<SnapshotBaseChain>,
        /// Memory file of the diff, which contains only the ranges that have changed.
        changes: File,
    },
    /// The memory of a VM that has moved to this process. The VM runs in no other process.
    Moved(GuestRam),
}

/// A saved machine that is to be restored, from a snapshot or from another process.
#[derive(Debug)]
pub struct RestoredMachine {
    /// Saved state of the machine, without memory.
    pub state: Box<SavedMachine>,
    /// Source of the guest memory.
    pub memory: RestoredMemory,
    /// `true` to restore the VM even if an enabled guest counter will no longer count.
    pub accepts_losses: bool,
}

/// Reason why a VM cannot be restored from a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The memory file does not match the saved state.
    #[error("the memory file of the snapshot cannot be used")]
    Memory(#[from] MemoryFileError),
    /// The ranges of a diff are invalid.
    #[error(transparent)]
    Diff(#[from] SnapshotDiffError),
    /// The saved state is invalid.
    #[error("the snapshot has {0} that no VM can have")]
    Impossible(&'static str),
    /// The event filter is invalid.
    #[error("the event filter of the snapshot cannot be used")]
    Filter(#[from] EventFilterFileError),
    /// A property of this machine, such as the number of vCPUs, differs from that of the saved
    /// machine.
    #[error("the snapshot has {what} {saved}, this machine {here}")]
    Shape {
        /// Name of the property that differs.
        what: &'static str,
        /// Value of the property in the saved machine.
        saved: String,
        /// Value of the property in this machine.
        here: String,
    },
    /// The CPUID tables of a vCPU differ.
    #[error(
        "CPUID leaf {leaf:#x} of vCPU {vcpu} is not the one of the snapshot: the host's processor, KVM or microcode differs"
    )]
    Cpuid {
        /// Number of the vCPU with the difference.
        vcpu: u8,
        /// Number of the CPUID leaf with the difference.
        leaf: u32,
    },
    /// A vCPU cannot be restored.
    #[error(transparent)]
    Vcpu(#[from] RestoreVcpuError),
    /// An enabled counter of the guest would no longer count, because the backing cannot count its
    /// event.
    #[error(
        "the guest counts {0}, which this backing does not count; use another --backing, or accept it with --restore-loses"
    )]
    Loses(DecodedCounterEvent),
    /// The virtual PMU of a vCPU cannot be restored.
    #[error("the virtual PMU of vCPU {0} cannot be restored")]
    Pmu(u8, #[source] VpmuStateError),
    /// Single-stepping has left trap flags in guest memory, which cannot be removed on this host.
    #[error(
        "a recording of branches has left trap flags in the memory of the snapshot, and this host's KVM cannot \
         single-step guests to remove them"
    )]
    TrapFlags,
    /// The devices cannot be restored.
    #[error(transparent)]
    Board(#[from] RestoreBoardError),
    /// KVM rejected a part of the state.
    #[error(transparent)]
    Kvm(#[from] KvmIoctlError),
}

impl RestoredMachine {
    /// Returns `true` if the VM has moved to this process, so no other VM has the same memory.
    /// Returns `false` if it is restored from a snapshot.
    pub(super) fn is_moved(&self) -> bool {
        matches!(self.memory, RestoredMemory::Moved(_))
    }

    /// Returns `true` if the CPUID table of the saved machine enumerates KVM's steal time record.
    pub(super) fn shows_steal_time(&self) -> bool {
        let first = self.state.vcpus.first();
        first.is_some_and(|vcpu| cpuid::shows_stolen_time(&vcpu.cpuid))
    }

    /// Returns guest RAM with the saved contents for a machine with the configuration `config`, and
    /// the kernel in this RAM.
    pub(super) fn load(&self, config: &VmConfig) -> Result<(GuestRam, LoadedGuest), VmError> {
        let saved = &self.state.memory;
        if saved.bytes != config.memory_bytes {
            return Err(RestoreError::Impossible("two sizes of memory").into());
        }
        let map = |file: &File| -> Result<GuestRam, VmError> {
            let mut ram = GuestRam::with_backing(config.memory_bytes, config.memory_kind)?;
            ram.map_snapshot(file)?;
            Ok(ram)
        };
        let ram = match (&self.memory, &saved.base) {
            (RestoredMemory::Moved(ram), None) if ram.size_bytes() == saved.bytes => ram.clone(),
            (RestoredMemory::Snapshot(file), None) => {
                memory::check_size(file, saved).map_err(RestoreError::from)?;
                map(file)?
            }
            (RestoredMemory::Diff { base, changes }, Some(diff)) => {
                memory::check_size(changes, saved).map_err(RestoreError::from)?;
                diff::check_runs(diff, saved.bytes).map_err(RestoreError::from)?;
                if base.memory_bytes() != saved.bytes {
                    return Err(RestoreError::Impossible("two sizes of memory").into());
                }
                let mut ram = map(base.full_memory())?;
                ram.map_changes(base.layers().chain([(changes, &*diff.runs)]))?;
                ram
            }
            (RestoredMemory::Moved(_), None) => {
                return Err(RestoreError::Impossible("two sizes of memory").into());
            }
            _ => return Err(RestoreError::Impossible("a base").into()),
        };
        let loaded = loaded_guest(&self.state.kernel, !self.state.devices.is_empty())?;
        Ok((ram, loaded))
    }

    /// Returns the present vCPUs, and the saved PMU state of each.
    pub(super) fn into_vcpus(self) -> (VcpuSet, Vec<(u8, SavedVcpuPmu)>) {
        let state = *self.state;
        let vcpus: Vec<_> = state.vcpus.into_iter().map(|vcpu| (vcpu.id, vcpu.pmu)).collect();
        let present = vcpus.iter().map(|(id, _)| VcpuSet::of(*id));
        (present.fold(VcpuSet::default(), VcpuSet::with), vcpus)
    }
}

/// Returns the architectural events that the CPUID table of a saved machine reports to the guest as
/// available, or `None` if the table has no such report. The backing of this machine may differ.
#[must_use]
pub fn announced_events(saved: &SavedMachine) -> Option<ArchEventSet> {
    let leaves = &saved.vcpus.first()?.cpuid;
    let &[.., eax, ebx, ecx, edx] = leaves.iter().find(|leaf| leaf[0] == LEAF_ARCH_PERFMON)?;
    (eax != 0).then(|| ArchEventSet::of_leaf_a(CpuidRegs { eax, ebx, ecx, edx }))
}

/// Parts of the new machine to which the saved state is written.
pub(super) struct NewMachine<'a> {
    pub(super) hardware: &'a VmHardware,
    pub(super) layout: &'a VcpuStateLayout,
    pub(super) vcpus: &'a [KvmVcpu],
    pub(super) shape: &'a SavedMachineProperties,
    pub(super) factory: &'a VcpuFactory,
    /// `true` if the exact backing single-steps the vCPUs.
    pub(super) is_stepped: bool,
}

impl NewMachine<'_> {
    /// Writes the saved state to the machine. No thread of the VM runs yet, so the machine can be
    /// discarded after an error.
    pub(super) fn restore(&self, machine: &RestoredMachine) -> Result<(), RestoreError> {
        let saved = &*machine.state;
        self.check_shape(&saved.shape)?;
        let ids: Vec<u8> = saved.vcpus.iter().map(|vcpu| vcpu.id).collect();
        let fixed = self.shape.vcpus_at_start == self.shape.max_vcpus;
        // A machine always has vCPU 0, because it cannot be removed.
        if ids.first() != Some(&0)
            || !ids.is_sorted_by(|a, b| a < b)
            || fixed && ids.len() != usize::from(self.shape.max_vcpus)
        {
            return Err(RestoreError::Impossible("numbers of vCPUs"));
        }
        for vcpu in &saved.vcpus {
            let here = self.vcpus.get(usize::from(vcpu.id));
            let here = here.ok_or(RestoreError::Impossible("numbers of vCPUs"))?;
            self.restore_vcpu(vcpu, here, machine.accepts_losses)?;
        }
        let chips = IrqchipState::from_saved(&saved.vm);
        chips
            .ok_or(RestoreError::Impossible("interrupt controllers"))?
            .restore(&self.hardware.fd)?;
        self.hardware.fd.set_clock_ns(saved.vm.clock_ns)?;
        self.hardware.bus.restore(&saved.board, &saved.devices)?;
        if !machine.is_moved() {
            self.hardware.bus.generation().announce();
        }
        for vcpu in &saved.vcpus {
            match self.vcpus[usize::from(vcpu.id)].fd().kvmclock_ctrl() {
                // EINVAL means that the guest does not use the clock of this vCPU.
                Err(e) if e.errno() != libc::EINVAL => return Err(e.into()),
                _ => {}
            }
        }
        let rdpmc = self.factory.rdpmc.as_ref();
        if let Some(running) = rdpmc.and_then(|rdpmc| rdpmc.running.as_ref()) {
            running.restore(&saved.kernel);
        }
        Ok(())
    }

    fn restore_vcpu(
        &self,
        saved: &SavedVcpu,
        here: &KvmVcpu,
        accepts_losses: bool,
    ) -> Result<(), RestoreError> {
        let id = saved.id;
        check_cpuid(here.cpuid(), saved)?;
        if saved.pmu.stray_trap_flags && self.factory.bursts.is_none() {
            return Err(RestoreError::TrapFlags);
        }
        // Check the saved registers now. The thread of the vCPU restores them, but an error there
        // would be too late.
        let mut pmu = self.hardware.pmu.vcpu(id, here.tsc_khz());
        pmu.restore(&saved.pmu.registers.0)
            .map_err(|e| RestoreError::Pmu(id, e))?;
        report_changes(id, &pmu.backing_changes(), accepts_losses)?;
        if !self.is_stepped {
            return Ok(self.layout.restore(saved, here.fd())?);
        }
        let mut saved = saved.clone();
        let steal_time = saved.msrs.iter_mut().find(|(msr, _)| *msr == MSR_KVM_STEAL_TIME);
        if let Some((_, record)) = steal_time {
            *record = 0;
        }
        Ok(self.layout.restore(&saved, here.fd())?)
    }

    fn check_shape(&self, saved: &SavedMachineProperties) -> Result<(), RestoreError> {
        let here = self.shape;
        let same_tsc = is_same_tsc(saved.tsc_khz, here.tsc_khz);
        let compared = [
            (
                "a PMU",
                saved.pmu == here.pmu,
                saved.pmu.clone(),
                here.pmu.clone(),
            ),
            (
                "a TSC frequency in kHz of",
                same_tsc,
                saved.tsc_khz.to_string(),
                here.tsc_khz.to_string(),
            ),
            (
                "a maximum number of vCPUs of",
                (saved.vcpus_at_start, saved.max_vcpus) == (here.vcpus_at_start, here.max_vcpus),
                saved.max_vcpus.to_string(),
                here.max_vcpus.to_string(),
            ),
            (
                "a debug-exit port:",
                saved.debug_exit == here.debug_exit,
                saved.debug_exit.to_string(),
                here.debug_exit.to_string(),
            ),
            (
                "RDPMC at the #GP handler:",
                saved.gp_gate == here.gp_gate,
                saved.gp_gate.to_string(),
                here.gp_gate.to_string(),
            ),
        ];
        match compared.into_iter().find(|(_, same, ..)| !same) {
            None => Ok(()),
            Some((what, _, saved, here)) => Err(RestoreError::Shape {
                what,
                // The string comes from the snapshot and becomes part of a one-line message.
                saved: saved.chars().filter(|c| !c.is_control()).take(80).collect(),
                here,
            }),
        }
    }
}

/// Checks that the CPUID table of a vCPU equals the saved one.
pub(super) fn check_cpuid(here: &CpuId, saved: &SavedVcpu) -> Result<(), RestoreError> {
    let leaves = cpuid_leaves(here);
    if let Some((leaf, _)) = leaves.iter().zip(&saved.cpuid).find(|(a, b)| a != b) {
        return Err(RestoreError::Cpuid {
            vcpu: saved.id,
            leaf: leaf[0],
        });
    }
    if leaves.len() != saved.cpuid.len() {
        return Err(RestoreError::Impossible("another number of CPUID leaves"));
    }
    Ok(())
}

/// Returns whether the difference between two TSC frequencies is at most
/// [`MAX_TSC_DIFFERENCE_PPM`].
pub(super) fn is_same_tsc(a_khz: u32, b_khz: u32) -> bool {
    let difference = u64::from(a_khz.abs_diff(b_khz)) * 1_000_000;
    difference <= u64::from(a_khz.min(b_khz)) * MAX_TSC_DIFFERENCE_PPM
}

/// Logs the enabled counters of vCPU `id` whose backing (source of the counts) has changed.
///
/// # Errors
/// Returns [`RestoreError::Loses`] if a counter no longer counts, unless `accepts_losses` is set.
fn report_changes(
    id: u8,
    changes: &[CounterBackingChange],
    accepts_losses: bool,
) -> Result<(), RestoreError> {
    for change in changes {
        let CounterBackingChange {
            counter,
            event,
            before,
            after,
        } = change;
        match after {
            CounterBacking::None if !accepts_losses => return Err(RestoreError::Loses(*event)),
            CounterBacking::None => log::warn!("vcpu{id}: {counter} ({event}) is not counted anymore"),
            after => {
                log::warn!("vcpu{id}: {counter} ({event}) was counted by {before}, and is now by {after}")
            }
        }
    }
    Ok(())
}

/// Returns the kernel in restored memory. The symbols of the kernel are not known.
fn loaded_guest(saved: &SavedGuestKernel, pci: bool) -> Result<LoadedGuest, RestoreError> {
    let kind = match saved.format.as_str() {
        "linux" => KernelFormat::Vmlinux,
        "multiboot" => KernelFormat::Multiboot,
        "pvh" => KernelFormat::Pvh,
        _ => return Err(RestoreError::Impossible("a kernel format")),
    };
    let text = saved.text.iter().map(|text| KernelTextRange {
        virt: text.virt,
        phys: text.phys,
        len_bytes: text.bytes,
    });
    Ok(LoadedGuest {
        kind,
        entry: BootProcessorState::Protected32 {
            eip: 0,
            eax: 0,
            ebx: 0,
        },
        kernel: saved.range[0]..saved.range[1],
        initrd: None,
        pci,
        text: text.collect(),
        symbols: Arc::new(CompressedKernelSymbols::default()),
        rdpmc_sites: sites::from_saved(&saved.rdpmc_sites)
            .ok_or(RestoreError::Impossible("RDPMC instructions"))?,
        event_tables: Vec::new(),
        topdown: Vec::new(),
        user_rdpmc: None,
    })
}

/// Returns the name of a kernel format in a snapshot.
pub(super) fn format_name(kind: &KernelFormat) -> &'static str {
    match kind {
        KernelFormat::Vmlinux | KernelFormat::BzImage { .. } => "linux",
        KernelFormat::Multiboot => "multiboot",
        KernelFormat::Pvh => "pvh",
    }
}

/// Returns the event filter that a snapshot contains.
///
/// # Errors
/// Returns [`RestoreError::Filter`] if it is invalid.
pub fn event_filter(saved: &SavedEventFilter) -> Result<EventFilter, RestoreError> {
    let events = saved
        .events
        .iter()
        .map(|&(select, mask, matches, exclude)| EventFilterEntrySpec {
            select: select.into(),
            umask: None,
            umask_mask: Some(mask.into()),
            umask_match: Some(matches.into()),
            exclude,
        });
    Ok(EventFilter::new(&EventFilterSpec {
        action: if saved.allows {
            EventFilterAction::Allow
        } else {
            EventFilterAction::Deny
        },
        fixed_counters: saved.fixed_counters.into(),
        events: events.collect(),
    })?)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::fs::FileExt as _;
    use std::time::Duration;

    use perf_core::pmu::host::HostPerfCapabilities;
    use virtio_devices::balloon::BalloonDevice;
    use virtio_devices::balloon::release::RamOrigin;
    use virtio_devices::device::VirtioDevice;
    use vm_memory::{Bytes as _, GuestAddress};

    use super::{RestoredMachine, RestoredMemory};
    use crate::boot::layout;
    use crate::kvm::{call, host};
    use crate::testing;
    use crate::vm::{BackgroundKvmSetup, RunningVm, Vm, VmBuildInputs};

    /// Guest code `hlt; jmp` to the start.
    const HALT: [u8; 3] = [0xF4, 0xEB, 0xFD];

    /// Takes a snapshot of a VM with two vCPUs and restores it. Returns the names of the KVM calls
    /// of the restore that follow the last KVM_SET_CPUID2, or `None` without KVM.
    fn calls_of_restore() -> Option<Vec<&'static str>> {
        let source = testing::vm(&HALT, |_| ())?;
        let saved = testing::snapshot_of(&source);
        drop(source);
        let kvm = host::open().unwrap();
        let parts = VmBuildInputs {
            begun: BackgroundKvmSetup::now(),
            kvm: &kvm,
            config: &testing::config(&HALT),
            devices: Vec::new(),
            probe: &HostPerfCapabilities::run(),
            console: Box::new(io::sink()),
        };
        call::log::start();
        Vm::restore(parts, saved).unwrap();
        let mut calls = call::log::finish();
        let cpuid = calls.iter().rposition(|call| *call == "KVM_SET_CPUID2");
        Some(calls.split_off(cpuid.unwrap()))
    }

    /// Restores a VM whose guest executes `code`.
    fn restored(code: &[u8], saved: RestoredMachine) -> RunningVm {
        restored_with(code, Vec::new(), saved)
    }

    /// Restores a VM with the devices `devices`, whose guest executes `code`.
    fn restored_with(code: &[u8], devices: Vec<Box<dyn VirtioDevice>>, saved: RestoredMachine) -> RunningVm {
        let kvm = host::open().unwrap();
        let parts = VmBuildInputs {
            begun: BackgroundKvmSetup::now(),
            kvm: &kvm,
            config: &testing::config(code),
            devices,
            probe: &HostPerfCapabilities::run(),
            console: Box::new(io::sink()),
        };
        Vm::restore(parts, saved).and_then(Vm::start).unwrap()
    }

    /// Guest code that increments [`COUNTER`] forever.
    const COUNT: [u8; 8] = [0xFF, 0x05, 0x00, 0x00, 0x88, 0x00, 0xEB, 0xF8];
    const COUNTER: GuestAddress = GuestAddress(0x88_0000);
    /// Guest-physical address of the first page that the guest gives to the balloon.
    const INFLATED: u64 = 0x80_0000;
    /// Number of pages that the guest gives to the balloon.
    const PAGES: u32 = 64;

    /// Driver of the balloon's inflate queue.
    struct BalloonDriver<'a> {
        vm: &'a RunningVm,
        bar: u64,
        sent: u16,
    }

    impl BalloonDriver<'_> {
        /// Gives `pages` pages from `first` on to the balloon, and waits until the device has taken
        /// them.
        fn inflate(&mut self, first: GuestAddress, pages: u32) {
            const PFNS: GuestAddress = GuestAddress(0x30_0000);
            let memory = self.vm.ram().memory();
            let start = u32::try_from(first.0 >> 12).unwrap();
            let pfns = (start..start + pages).flat_map(u32::to_le_bytes);
            memory.write_slice(&pfns.collect::<Vec<u8>>(), PFNS).unwrap();
            let [table, avail, used] = testing::queue_addresses(0).map(GuestAddress);
            memory.write_obj([PFNS.0, u64::from(pages) * 4], table).unwrap();
            self.sent += 1;
            memory.write_obj(self.sent, GuestAddress(avail.0 + 2)).unwrap();
            let pci = self.vm.bus().pci().unwrap();
            assert!(pci.write_memory(self.bar + 0x3000, &[0, 0]));
            let done = || memory.read_obj::<u16>(GuestAddress(used.0 + 2)).unwrap() == self.sent;
            assert!((0..5000).any(|_| {
                std::thread::sleep(Duration::from_millis(1));
                done()
            }));
        }

        fn byte(&self, address: u64) -> u8 {
            self.vm.ram().memory().read_obj(GuestAddress(address)).unwrap()
        }

        /// Gives the page with the guest's counter to the balloon. The guest then continues with a
        /// new page.
        fn release_used_page(&mut self) {
            const HIGH: u32 = 1 << 31;
            let memory = self.vm.ram().memory();
            let count = || memory.read_obj::<u32>(COUNTER).unwrap();
            // Write again if the guest has overwritten the value with its own.
            while count() < HIGH {
                memory.write_obj(HIGH, COUNTER).unwrap();
            }
            // Without the pause, the guest could read the value before the release and write its
            // successor after it.
            let control = self.vm.control();
            control.set_paused(true);
            self.vm.registry().kicker().kick();
            while control.parked() < self.vm.registry().present_slots().count() {
                std::thread::sleep(Duration::from_millis(1));
            }
            self.inflate(COUNTER, 1);
            let first = count();
            control.set_paused(false);
            self.vm.registry().kicker().kick();
            assert!(first < HIGH, "{first:#x}");
            assert!((0..5000).any(|_| {
                std::thread::sleep(Duration::from_millis(1));
                count() > first
            }));
        }
    }

    /// A snapshot contains zeros for the pages that the guest has given to the balloon. In the
    /// restored VM, a page that is given to the balloon is not read from the memory file again. The
    /// target and the actual size of the balloon equal those of the source.
    #[test]
    fn balloon_continues_in_restored_vm() {
        let balloon = |origin| BalloonDevice::new("size=4".parse().unwrap(), 32 << 20, origin).unwrap();
        let device = balloon(RamOrigin::Empty);
        let control = device.control().clone();
        let Some(source) = testing::vm_with_devices(&COUNT, vec![Box::new(device)], |_| ()) else {
            return;
        };
        let filled = vec![7; 2 * PAGES as usize * 4096];
        source
            .ram()
            .memory()
            .write_slice(&filled, GuestAddress(INFLATED))
            .unwrap();
        let bar = testing::start_device(source.bus(), 0x61, 2);
        let mut driver = BalloonDriver {
            vm: &source,
            bar,
            sent: 0,
        };
        driver.inflate(GuestAddress(INFLATED), PAGES);
        driver.release_used_page();
        let next = INFLATED + u64::from(PAGES) * 4096;
        assert_eq!([INFLATED, next - 1, next].map(|at| driver.byte(at)), [0, 0, 7]);
        assert_eq!(control.state().released_bytes, u64::from(PAGES + 1) * 4096);
        // Report the actual size of the balloon, as the driver does.
        assert!(
            source
                .bus()
                .pci()
                .unwrap()
                .write_memory(bar + 0x2004, &PAGES.to_le_bytes())
        );
        control.set_size_mib(5).unwrap();
        let (saved, sent) = (testing::snapshot_of(&source), driver.sent);
        let in_file = |memory: &RestoredMemory, at: u64| {
            let file = testing::memory_file(memory);
            let mut byte = [1];
            file.read_exact_at(&mut byte, at).unwrap();
            byte[0]
        };
        assert_eq!(
            [INFLATED, next - 1, next].map(|at| in_file(&saved.memory, at)),
            [0, 0, 7]
        );
        assert_eq!(control.state().actual_pages, PAGES, "the source goes on");

        let device = balloon(RamOrigin::Snapshot);
        let control = device.control().clone();
        let file = RestoredMemory::Snapshot(testing::memory_file(&saved.memory).try_clone().unwrap());
        let target = restored_with(&COUNT, vec![Box::new(device)], saved);
        let state = control.state();
        assert_eq!((state.target_pages, state.actual_pages), (5 * 256, PAGES));
        let mut driver = BalloonDriver {
            vm: &target,
            bar,
            sent,
        };
        assert_eq!([INFLATED, next].map(|at| driver.byte(at)), [0, 7]);
        driver.inflate(GuestAddress(next), PAGES);
        let last = next + u64::from(PAGES) * 4096 - 1;
        assert_eq!([next, last].map(|at| driver.byte(at)), [0, 0]);
        driver.release_used_page();
        assert_eq!(in_file(&file, next), 7, "the file is unchanged");
        let again = testing::snapshot_of(&target);
        assert_eq!([next, last].map(|at| in_file(&again.memory, at)), [0, 0]);
    }

    fn generation_of(vm: &RunningVm) -> [u8; 16] {
        let address = GuestAddress(layout::GENERATION_ID);
        vm.ram().memory().read_obj(address).unwrap()
    }

    /// Each restored VM has a generation ID of its own. Its guest receives the interrupt of the
    /// event device, here vector 0x61 from I/O APIC input 10.
    #[test]
    fn clones_differ() {
        const VECTOR: usize = 0x61;
        let code = [
            0xC7, 0x05, 0xF0, 0x00, 0xE0, 0xFE, 0xFF, 0x01, 0x00, 0x00, // mov [0xfee000f0], 0x1ff
            0xC7, 0x05, 0x00, 0x00, 0xC0, 0xFE, 0x24, 0x00, 0x00, 0x00, // mov [0xfec00000], 0x24
            0xC7, 0x05, 0x10, 0x00, 0xC0, 0xFE, 0x61, 0x00, 0x00, 0x00, // mov [0xfec00010], 0x61
            0xE6, 0x80, // out 0x80, al
            0xF4, 0xEB, 0xFD, // hlt; jmp -1
        ];
        let is_requested = |vm: &RunningVm| {
            let saved = testing::snapshot_of(vm).state;
            let requests = 0x200 + VECTOR / 32 * 16 + VECTOR % 32 / 8;
            saved.vcpus[0].lapic.0[requests] >> (VECTOR % 8) & 1 != 0
        };
        let Some(source) = testing::vm(&code, |_| ()) else {
            return;
        };
        while source.registry().slots()[0].stats().io_out.get() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!is_requested(&source));
        let saved = testing::snapshot_of(&source);
        let again = RestoredMachine {
            state: saved.state.clone(),
            memory: RestoredMemory::Snapshot(testing::memory_file(&saved.memory).try_clone().unwrap()),
            accepts_losses: false,
        };
        let clones = [restored(&code, saved), restored(&code, again)];
        let ids = [&source, &clones[0], &clones[1]].map(generation_of);
        assert!(ids[0] != ids[1] && ids[0] != ids[2] && ids[1] != ids[2]);
        assert!(ids.iter().all(|id| *id != [0; 16]));
        for clone in &clones {
            // KVM injects the interrupt from a work queue.
            assert!((0..1000).any(|_| is_requested(clone)));
        }
    }

    /// Returns the indices of the first and the last call named `name`.
    fn positions(calls: &[&str], name: &str) -> (usize, usize) {
        let first = calls.iter().position(|call| *call == name);
        let last = calls.iter().rposition(|call| *call == name);
        first.zip(last).unwrap_or_else(|| panic!("no {name}: {calls:?}"))
    }

    #[test]
    fn lapic_comes_after_sregs_and_cpuid() {
        const ORDER: [&str; 6] = [
            "KVM_SET_SREGS",
            "KVM_SET_REGS",
            "KVM_SET_LAPIC",
            "KVM_SET_MSRS",
            "KVM_SET_MP_STATE",
            "KVM_SET_VCPU_EVENTS",
        ];
        let Some(calls) = calls_of_restore() else { return };
        let first = positions(&calls, "KVM_SET_SREGS").0;
        let mut made: Vec<&str> = calls[first..].to_vec();
        made.retain(|call| ORDER.contains(call));
        made.dedup();
        assert_eq!(made, [ORDER, ORDER].concat());
    }

    #[test]
    fn ioapic_follows_lapics() {
        let Some(calls) = calls_of_restore() else { return };
        let lapics = positions(&calls, "KVM_SET_LAPIC").1;
        assert!(positions(&calls, "KVM_SET_IRQCHIP").0 > lapics, "{calls:?}");
    }

    #[test]
    fn kvmclock_is_set_once_and_guests_are_told() {
        let Some(calls) = calls_of_restore() else { return };
        let (first, last) = positions(&calls, "KVM_SET_CLOCK");
        assert_eq!(first, last);
        let told = calls
            .iter()
            .skip(last)
            .filter(|call| **call == "KVM_KVMCLOCK_CTRL");
        assert_eq!(told.count(), 2, "{calls:?}");
    }
}
