//! Saves a running VM to a snapshot.
//!
//! The client drives a [`VmSnapshot`] with requests, so the main loop never waits for a vCPU. The
//! VM itself writes no files. It sends memory and state to the client, which writes the files.
//!
//! 1. [`VmSnapshot::begin`] pauses the VM and asks the vCPUs to complete their last exits.
//! 2. [`VmSnapshot::advance`] is called repeatedly. When all vCPUs have completed their last exits,
//!    it stops the devices and requests the states of the vCPUs. When all states have arrived, it
//!    reads the chips and the devices.
//! 3. [`VmSnapshot::read_memory`], called repeatedly, returns the memory in order.
//! 4. [`VmSnapshot::state`] returns the state file, with the checksums of the memory.
//!
//! Dropping the snapshot resumes the devices and the vCPUs, so the VM continues to run if a client
//! is killed.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use snapshot::memory::{CHUNK_BYTES, checksum};
use snapshot::state::{
    SavedEventFilter, SavedGuestKernel, SavedMachine, SavedMachineProperties, SavedMemoryFile,
};
use snapshot::{SnapshotFormatError, encode};
use vm_memory::{Bytes as _, GuestMemoryError};
use vpmu::EventFilter;
use vpmu::filter::EventFilterAction;

use super::hardware::VmHardware;
use super::migrate::OutgoingMigration;
use crate::kvm::call::KvmIoctlError;
use crate::kvm::chips::IrqchipState;
use crate::kvm::saved_vcpu::VcpuStateLayout;
use crate::memory::dirty::WriteProtector;
use crate::memory::touched::TouchedPages;
use crate::vcpu::control::VmRunState;
use crate::vcpu::registry::VcpuRegistry;
use crate::vcpu::saved::SaveVcpuError;

/// Maximum number of bytes of memory that one [`VmSnapshot::read_memory`] examines. Each call
/// delays the main loop.
const MAX_SCANNED_BYTES: u64 = 16 << 20;
/// Number of bytes of untouched memory that can be examined in the time that one byte of other
/// memory takes.
const UNTOUCHED_FACTOR: u64 = 16;
/// A page of zeros, which the memory file does not contain.
static ZERO_PAGE: [u8; 4096] = [0; 4096];

/// Reason why a snapshot cannot be taken or continued.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// Parts of the VM that a snapshot cannot include.
    #[error("a snapshot cannot include {0}; start the VM without")]
    Unsupported(String),
    /// The VM is in a temporary state in which no snapshot can be taken, for example during a
    /// reset.
    #[error("no snapshot can be taken while {0}; try again")]
    Busy(&'static str),
    /// The VM has ended, or its guest has reset it.
    #[error("the VM has ended or was reset during the snapshot")]
    Ended,
    /// A step of the snapshot was requested before the preceding one was complete.
    #[error("the snapshot is not ready for this step")]
    Order,
    /// A vCPU cannot be saved.
    #[error(transparent)]
    Vcpu(#[from] SaveVcpuError),
    /// KVM cannot read a part of the state.
    #[error(transparent)]
    Kvm(#[from] KvmIoctlError),
    /// Guest memory cannot be read for the snapshot.
    #[error("guest memory cannot be read")]
    Memory(#[from] GuestMemoryError),
    /// The trap in the guest's #GP handler, with which RDPMC is emulated, cannot be removed.
    #[error("a snapshot cannot include the trap in the guest's handler of #GP, which the guest has changed")]
    Trap,
    /// The locks of disk images cannot be changed.
    #[error("the locks of the disk images cannot be changed")]
    Devices(#[source] io::Error),
    /// The VM has moved and cannot be taken back, because another process uses one of its disk
    /// images.
    #[error("the image of {0} is used by another process, where the VM may run; end it here with `ctl stop`")]
    InUse(String),
    /// The state cannot be encoded.
    #[error(transparent)]
    Format(#[from] SnapshotFormatError),
}

/// Parts of a VM that a snapshot needs.
pub struct VmSnapshotInputs {
    pub(super) hardware: VmHardware,
    pub(super) layout: Arc<VcpuStateLayout>,
    pub(super) registry: Arc<VcpuRegistry>,
    pub(super) shape: SavedMachineProperties,
    /// Name of the loaded kernel's format, and guest-physical range of the kernel.
    pub(super) kernel: (&'static str, Range<u64>),
    /// Options of the VM with which no snapshot can be taken.
    pub(super) unsupported: Vec<&'static str>,
    /// Number of each possible vCPU, and its CPUID leaves in the form that a snapshot contains.
    pub(super) cpuid: Vec<(u8, Vec<[u32; 7]>)>,
    /// Kernel interfaces that track written memory; `None` if the host's kernel lacks them.
    pub(super) protector: Option<Arc<WriteProtector>>,
}

impl std::fmt::Debug for VmSnapshotInputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmSnapshotInputs").finish_non_exhaustive()
    }
}

/// Progress of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The vCPUs are completing their last exits.
    Settling,
    /// The devices are stopped, and the vCPUs are storing their states.
    Saving,
    /// The states of vCPUs and devices are known. The client can read memory.
    Ready,
}

/// A range of guest memory for the memory file.
#[derive(Debug)]
pub struct GuestMemoryChunk {
    /// Offset of the range in RAM, in bytes.
    pub offset: u64,
    /// Contents of the range. Empty if the range consists of zeros.
    pub data: Vec<u8>,
    /// Offset in RAM at which the next piece begins; the size of RAM after the last piece.
    pub next: u64,
}

/// A snapshot that is being taken. The VM stays paused until this value is dropped.
#[derive(Debug)]
pub struct VmSnapshot {
    source: Arc<VmSnapshotInputs>,
    was_paused: bool,
    /// `true` if the destination process may also open the host resources of the devices.
    shares_devices: bool,
    /// `true` if the VM may run in another process. The VM then stays paused in this process when
    /// the snapshot is dropped.
    is_committed: bool,
    phase: Phase,
    machine: Box<SavedMachine>,
    touched: TouchedPages,
    /// Offset in RAM at which the next piece of memory begins.
    next: u64,
    /// Checksum of a chunk of zeros; `None` before it is first needed.
    zeros_crc: Option<u32>,
}

impl VmSnapshot {
    /// Pauses the VM for a snapshot. `options` contains the command-line options that determine the
    /// machine.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Unsupported`] with all parts that a snapshot cannot include, and
    /// [`SnapshotError::Busy`] if the VM is resetting, stopped by a debugger, or removing a vCPU,
    /// and [`SnapshotError::Ended`] if it has ended.
    pub fn begin(
        source: &Arc<VmSnapshotInputs>,
        options: BTreeMap<String, String>,
    ) -> Result<Self, SnapshotError> {
        source.check_supported()?;
        if source
            .registry
            .present_slots()
            .any(|slot| slot.is_stop_requested())
        {
            return Err(SnapshotError::Busy("a vCPU is being removed"));
        }
        match source.hardware.control.state() {
            VmRunState::Running | VmRunState::Paused => {}
            VmRunState::Held => return Err(SnapshotError::Busy("a debugger stops the VM")),
            VmRunState::Resetting => return Err(SnapshotError::Busy("the guest resets the machine")),
            VmRunState::Stopped => return Err(SnapshotError::Ended),
        }
        let was_paused = source.hardware.control.is_pause_requested();
        if !source.hardware.control.set_paused(true) {
            return Err(SnapshotError::Ended);
        }
        for slot in source.registry.present_slots() {
            slot.request_queue().request_settling();
        }
        source.deliver();
        let machine = SavedMachine {
            saved_by: env!("CARGO_PKG_VERSION").to_owned(),
            options,
            shape: source.shape.clone(),
            filter: saved_filter(&source.hardware.pmu.filter()),
            memory: SavedMemoryFile {
                bytes: source.hardware.ram.size_bytes(),
                crcs: Vec::new(),
                base: None,
            },
            ..SavedMachine::default()
        };
        Ok(Self {
            source: source.clone(),
            was_paused,
            shares_devices: false,
            is_committed: false,
            phase: Phase::Settling,
            machine: Box::new(machine),
            touched: TouchedPages::of(&source.hardware.ram),
            next: 0,
            zeros_crc: None,
        })
    }

    /// Performs the steps of the snapshot that are possible now. Returns `true` when the states of
    /// vCPUs and devices are known.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Ended`] if the VM is no longer paused, [`SnapshotError::Trap`] if
    /// code of the VMM remains in guest memory, and an error if the state cannot be read.
    pub fn advance(&mut self) -> Result<bool, SnapshotError> {
        let source = self.source.clone();
        if source.hardware.control.state() != VmRunState::Paused {
            return Err(SnapshotError::Ended);
        }
        let mut slots = source.registry.present_slots();
        match self.phase {
            Phase::Settling => {
                let settled = slots.all(|slot| slot.request_queue().is_settled());
                if settled && source.hardware.control.parked() >= source.registry.present_slots().count() {
                    source.quiesce()?;
                    for slot in source.registry.present_slots() {
                        slot.request_queue().request_save(source.layout.clone());
                    }
                    source.deliver();
                    self.phase = Phase::Saving;
                }
            }
            Phase::Saving => {
                if slots.all(|slot| slot.request_queue().has_saved()) {
                    self.collect()?;
                    self.phase = Phase::Ready;
                }
            }
            Phase::Ready => {}
        }
        Ok(self.phase == Phase::Ready)
    }

    /// Collects the states of all parts of the VM except memory.
    fn collect(&mut self) -> Result<(), SnapshotError> {
        let source = &self.source;
        for slot in source.registry.present_slots() {
            let saved = slot.request_queue().take_saved().ok_or(SnapshotError::Order)?;
            self.machine.vcpus.push(saved?);
        }
        self.machine.vm = IrqchipState::of(&source.hardware.fd)?.to_saved(source.hardware.fd.clock_ns()?);
        let board = source.hardware.bus.save();
        self.machine.board = board.ok_or(SnapshotError::Busy("a vCPU is being removed"))?;
        if let Some(pci) = source.hardware.bus.pci() {
            self.machine.devices = pci.save();
        }
        self.machine.kernel = source.saved_kernel();
        Ok(())
    }

    /// Returns the size of guest memory in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.machine.memory.bytes
    }

    /// Returns the piece of guest memory that begins at `offset`. Consecutive chunks of zeros form
    /// one piece.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Order`] unless `offset` is the end of the previous piece, and
    /// [`SnapshotError::Memory`] if memory cannot be read.
    pub fn read_memory(&mut self, offset: u64) -> Result<GuestMemoryChunk, SnapshotError> {
        let bytes = self.machine.memory.bytes;
        if self.phase != Phase::Ready || offset != self.next || offset >= bytes {
            return Err(SnapshotError::Order);
        }
        let mut data = Vec::new();
        let (mut at, mut scanned) = (offset, 0);
        while at < bytes && scanned < MAX_SCANNED_BYTES {
            let count = CHUNK_BYTES.min(bytes - at);
            let ram = &self.source.hardware.ram;
            if self.touched.is_untouched(ram, at, count) {
                scanned += count / UNTOUCHED_FACTOR;
            } else {
                scanned += count;
                data.resize(usize::try_from(count).unwrap_or(usize::MAX), 0);
                ram.memory().read_slice(&mut data, ram.address_of(at))?;
                let mut pages = data.chunks(ZERO_PAGE.len());
                if pages.any(|page| *page != ZERO_PAGE[..page.len()]) {
                    if at > offset {
                        // End the piece of zeros before this chunk, which the next request returns.
                        break;
                    }
                    self.machine.memory.crcs.push(checksum(&data));
                    let next = at + count;
                    self.next = next;
                    return Ok(GuestMemoryChunk { offset, data, next });
                }
            }
            let crc = self.crc_of_zeros(count);
            self.machine.memory.crcs.push(crc);
            at += count;
        }
        self.next = at;
        Ok(GuestMemoryChunk {
            offset,
            data: Vec::new(),
            next: at,
        })
    }

    /// Returns the checksum of `count` bytes that are zero.
    fn crc_of_zeros(&mut self, count: u64) -> u32 {
        let crc = || checksum(&vec![0; usize::try_from(count).unwrap_or(usize::MAX)]);
        if count == CHUNK_BYTES {
            *self.zeros_crc.get_or_insert_with(crc)
        } else {
            crc()
        }
    }

    /// Allows the destination process to open the host resources of the devices, such as disk
    /// images. The resources stay locked against all other processes.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Order`] unless the states of vCPUs and devices are known, and
    /// [`SnapshotError::Devices`] if the locks cannot be changed.
    pub fn share_devices(&mut self) -> Result<(), SnapshotError> {
        if self.phase != Phase::Ready {
            return Err(SnapshotError::Order);
        }
        self.shares_devices = true;
        let pci = self.source.hardware.bus.pci();
        pci.map_or(Ok(()), |pci| pci.share().map_err(SnapshotError::Devices))
    }

    /// Releases the host resources of the devices, such as disk images, because the VM is about to
    /// run in another process. The VM stays paused until [`VmSnapshot::take_back`], even if the
    /// release fails.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Order`] unless the states of vCPUs and devices are known, and
    /// [`SnapshotError::Devices`] if the locks cannot be changed.
    pub fn commit(&mut self) -> Result<(), SnapshotError> {
        if !self.is_ready() {
            return Err(SnapshotError::Order);
        }
        self.is_committed = true;
        self.shares_devices = true;
        let pci = self.source.hardware.bus.pci();
        pci.map_or(Ok(()), |pci| pci.release().map_err(SnapshotError::Devices))
    }

    /// Returns whether [`VmSnapshot::commit`] was called, so the VM may run in another process.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        self.is_committed
    }

    /// Claims the host resources of the devices again after [`VmSnapshot::commit`], because the VM
    /// does not run in another process.
    ///
    /// # Errors
    /// Returns [`SnapshotError::InUse`] if another process uses a disk image, and
    /// [`SnapshotError::Devices`] if the locks cannot be changed.
    pub fn take_back(&mut self) -> Result<(), SnapshotError> {
        if self.is_committed {
            let claimed = self
                .source
                .hardware
                .bus
                .pci()
                .map_or(Ok(Vec::new()), |pci| pci.claim());
            let used = claimed.map_err(SnapshotError::Devices)?;
            if !used.is_empty() {
                // The locks of the other images must be available to the process that runs the VM.
                self.release_devices();
                return Err(SnapshotError::InUse(used.join(", ")));
            }
            self.is_committed = false;
        }
        Ok(())
    }

    /// Releases the host resources of the devices for the destination process, because the VM has
    /// ended in this process.
    pub fn release_devices(&self) {
        let released = self.source.hardware.bus.pci().map_or(Ok(()), |pci| pci.release());
        if let Err(error) = released {
            // A failure is only logged, because the locks are released when this process exits,
            // which is soon.
            log::warn!("a disk image stays locked until this process ends: {error}");
        }
    }

    /// Returns the state file, which completes the snapshot.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Order`] before all memory has been read, and
    /// [`SnapshotError::Format`] if the state is too large.
    pub fn state(&self) -> Result<Vec<u8>, SnapshotError> {
        if self.phase != Phase::Ready || self.next != self.machine.memory.bytes {
            return Err(SnapshotError::Order);
        }
        Ok(encode(&self.machine)?)
    }

    /// Returns the state file of a VM that moves. `migration` has read the memory of the VM.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Order`] before all memory has been read since the pause, and
    /// [`SnapshotError::Format`] if the state is too large.
    pub fn state_without_memory(&self, migration: &OutgoingMigration) -> Result<Vec<u8>, SnapshotError> {
        if !self.is_ready() || !migration.is_complete() {
            return Err(SnapshotError::Order);
        }
        Ok(encode(&self.machine)?)
    }

    /// Returns whether the states of all parts of the VM except memory are known.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }
}

impl Drop for VmSnapshot {
    fn drop(&mut self) {
        let source = &self.source;
        if source.hardware.control.state() == VmRunState::Stopped || self.is_committed {
            return;
        }
        if let Some(pci) = source.hardware.bus.pci() {
            if self.shares_devices {
                report_claims(pci.claim());
            }
            pci.resume();
        }
        if !self.was_paused {
            source.hardware.control.set_paused(false);
        }
        source.deliver();
    }
}

impl VmSnapshotInputs {
    /// Checks that the VM has only parts that a snapshot can include.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Unsupported`] with the parts that it cannot include.
    pub(super) fn check_supported(&self) -> Result<(), SnapshotError> {
        let mut unsupported = self.unsupported.clone();
        if let Some(pci) = self.hardware.bus.pci() {
            unsupported.extend(pci.unsupported_in_snapshot());
        }
        if unsupported.is_empty() {
            return Ok(());
        }
        Err(SnapshotError::Unsupported(unsupported.join(", ")))
    }

    /// Kicks the vCPUs out of KVM_RUN, so that they process their pending requests.
    fn deliver(&self) {
        self.hardware.control.wake_parked();
        self.registry.kicker().kick();
    }

    /// Stops the devices, and removes the VMM's code from guest memory.
    fn quiesce(&self) -> Result<(), SnapshotError> {
        if let Some(pci) = self.hardware.bus.pci() {
            pci.quiesce();
        }
        let factory = self.registry.factory();
        let trap = factory.rdpmc.as_ref().and_then(|rdpmc| rdpmc.gate.as_ref());
        match trap.and_then(|(trap, _)| trap.as_ref()) {
            Some(trap) if !trap.remove_for_snapshot(self.hardware.ram.memory()) => Err(SnapshotError::Trap),
            _ => Ok(()),
        }
    }

    /// Returns what a snapshot contains about the guest's kernel.
    fn saved_kernel(&self) -> SavedGuestKernel {
        let (format, range) = &self.kernel;
        let mut kernel = SavedGuestKernel {
            format: (*format).to_owned(),
            range: [range.start, range.end],
            ..SavedGuestKernel::default()
        };
        if let Some(rdpmc) = &self.registry.factory().rdpmc {
            kernel.rdpmc_sites = rdpmc.sites.save();
            if let Some(running) = &rdpmc.running {
                running.save(&mut kernel);
            }
        }
        kernel
    }
}

/// Logs the host resources of devices that another process also uses.
pub(super) fn report_claims(claimed: io::Result<Vec<String>>) {
    match claimed {
        Ok(used) if used.is_empty() => {}
        Ok(used) => log::warn!(
            "{}: another process reads the image, which is locked against writers only",
            used.join(", ")
        ),
        Err(error) => log::warn!("a disk image is locked against writers only: {error}"),
    }
}

pub(super) fn saved_filter(filter: &EventFilter) -> SavedEventFilter {
    let entries = filter.entries().iter();
    SavedEventFilter {
        allows: filter.action() == EventFilterAction::Allow,
        fixed_counters: filter.fixed_counters(),
        events: entries
            .map(|entry| (entry.select, entry.mask, entry.matches, entry.exclude))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use virtio_devices::device::{ActivateError, DeviceActivation, DeviceInterrupt, VirtioDevice};

    use super::*;
    use crate::memory::MMIO_HOLE_START;
    use crate::testing;

    /// No chunk contains memory on both sides of the hole below 4 GiB, because such a chunk would
    /// be read from the addresses of the interrupt controllers.
    #[test]
    fn chunks_do_not_cross_the_hole_below_4_gib() {
        assert!(MMIO_HOLE_START.is_multiple_of(CHUNK_BYTES));
    }

    /// A device that completes a request while it is being stopped.
    #[derive(Default)]
    struct CompletingDevice(DeviceInterrupt);

    impl VirtioDevice for CompletingDevice {
        fn id(&self) -> u32 {
            4
        }

        fn name(&self) -> &'static str {
            "test0"
        }

        fn features(&self) -> u64 {
            0
        }

        fn queue_max_sizes(&self) -> &[u16] {
            &[16]
        }

        fn read_config(&self, _: u64, data: &mut [u8]) {
            data.fill(0);
        }

        fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError> {
            let queue = activation.queues.into_iter().flatten().next();
            self.0 = queue.map(|queue| queue.interrupt).unwrap_or_default();
            Ok(())
        }

        fn reset(&mut self) {
            self.0.raise();
        }

        fn unsupported_in_snapshot(&self) -> Option<&'static str> {
            None
        }
    }

    /// An interrupt that a device raises while it is being stopped is in the saved state of the
    /// local APIC. The vCPU of this test has interrupts disabled.
    #[test]
    fn interrupts_of_devices_are_saved() {
        const VECTOR: u8 = 0x61;
        let code = [
            0xC7, 0x05, 0xF0, 0x00, 0xE0, 0xFE, 0xFF, 0x01, 0x00, 0x00, // mov [0xfee000f0], 0x1ff
            0xE6, 0x80, // out 0x80, al
            0xF4, 0xEB, 0xFD, // hlt; jmp -1
        ];
        let device: Box<dyn VirtioDevice> = Box::<CompletingDevice>::default();
        let Some(vm) = testing::vm_with_devices(&code, vec![device], |_| ()) else {
            return;
        };
        // The guest has enabled its local APIC before it writes the port.
        while vm.registry().slots()[0].stats().io_out.get() == 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        testing::start_device(vm.bus(), VECTOR, 1);
        let saved = testing::snapshot_of(&vm).state;
        let lapic = &saved.vcpus[0].lapic.0;
        let is_requested = |vector: u8| {
            let at = 0x200 + usize::from(vector / 32) * 16 + usize::from(vector % 32 / 8);
            lapic[at] >> (vector % 8) & 1 != 0
        };
        assert!(is_requested(VECTOR));
        assert!(!is_requested(VECTOR + 1));
        assert!(saved.devices[0].active);
    }
}
