//! Types of the saved state. Each type rejects unknown fields.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Base64Bytes;

/// State of a virtual machine, as stored in a state file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedMachine {
    /// Version of Perfvisor that saved the machine, for messages.
    pub saved_by: String,
    /// Options of `perfvisor run` that determine the machine: the value of each option by its name
    /// without dashes. No option is a path.
    pub options: BTreeMap<String, String>,
    /// Properties of the machine other than its devices.
    pub shape: SavedMachineProperties,
    /// Filter of the events that the guest may count.
    pub filter: SavedEventFilter,
    /// State that the VMM keeps about the guest's kernel.
    pub kernel: SavedGuestKernel,
    /// Interrupt controllers, timer and clock of KVM.
    pub vm: SavedKvmDevices,
    /// State of each present vCPU, in ascending order of their numbers.
    pub vcpus: Vec<SavedVcpu>,
    /// Emulated devices other than virtio devices.
    pub board: SavedLegacyDevices,
    /// Virtio devices in the order of their PCI device numbers.
    pub devices: Vec<SavedDevice>,
    /// Size and checksums of the memory file.
    pub memory: SavedMemoryFile,
}

/// Properties of a machine that must be identical when it is restored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedMachineProperties {
    /// Number of vCPUs at the start of the VM.
    pub vcpus_at_start: u8,
    /// Maximum number of vCPUs.
    pub max_vcpus: u8,
    /// PMU model with its counters and their width.
    pub pmu: String,
    /// TSC frequency of the guest in kHz.
    pub tsc_khz: u32,
    /// `true` if the guest can terminate the VM through the debug-exit port.
    pub debug_exit: bool,
    /// `true` if RDPMC in user mode and in modules is emulated at the guest's #GP handler.
    pub gp_gate: bool,
}

/// Filter of the events that the guest may count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedEventFilter {
    /// `true` if only the listed events are allowed, `false` if only the listed events are denied.
    pub allows: bool,
    /// Bitmap of the fixed counters that the filter lists.
    pub fixed_counters: u8,
    /// Events that the filter lists: event select, mask for the event's unit mask, expected value
    /// of the masked bits, and whether the entry excludes events that other entries list.
    pub events: Vec<(u16, u8, u8, bool)>,
}

/// State that the VMM keeps about the guest's kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedGuestKernel {
    /// Format of the image that was loaded: `linux`, `multiboot` or `pvh`.
    pub format: String,
    /// Guest-physical range of the kernel's segments: start and end.
    pub range: [u64; 2],
    /// Ranges of executable text in the loaded image.
    pub text: Vec<SavedText>,
    /// RDPMC instructions that were replaced by a trap in guest memory.
    pub rdpmc_sites: Vec<SavedRdpmcSite>,
    /// Kernel that the guest itself has started; `None` if the loaded kernel is running.
    pub restarted: Option<SavedRunningKernel>,
    /// Guest-physical address of a replaced RDPMC instruction that identifies the running kernel; 0
    /// if unknown.
    pub witness: u64,
}

/// A kernel that the guest itself has started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedRunningKernel {
    /// Value of IA32_LSTAR, the linear address of the SYSCALL entry point.
    pub lstar: u64,
    /// Guest-physical address of the SYSCALL entry point.
    pub lstar_gpa: u64,
}

/// A range of executable text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedText {
    /// Link-time virtual address of the first byte.
    pub virt: u64,
    /// Guest-physical address of the first byte.
    pub phys: u64,
    /// Length of the range in bytes.
    pub bytes: u64,
}

/// A replaced RDPMC instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedRdpmcSite {
    /// Linear address of the first byte of the instruction.
    pub virt: u64,
    /// Guest-physical address of the first byte of the instruction.
    pub phys: u64,
    /// Length of the instruction in bytes.
    pub length: u8,
    /// Number of bytes directly before `phys` that are prefixes of the instruction in 64-bit code
    /// but separate instructions in 32-bit code.
    pub lead: u8,
    /// `true` if a port write of the guest's own code, which causes the same exit as the replaced
    /// RDPMC, may be directly before or after this instruction.
    pub next_to_port_write: bool,
}

/// Interrupt controllers, timer and clock of KVM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedKvmDevices {
    /// States of the master PIC, the slave PIC and the I/O APIC (`struct kvm_irqchip`).
    pub irqchips: Vec<Base64Bytes>,
    /// State of the programmable interval timer (`struct kvm_pit_state2`).
    pub pit: Base64Bytes,
    /// Value of kvmclock in nanoseconds.
    pub clock_ns: u64,
}

/// A saved vCPU. Registers are stored as the bytes of KVM's structures.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedVcpu {
    /// Number of the vCPU.
    pub id: u8,
    /// CPUID leaves: function, index, flags, EAX, EBX, ECX, EDX.
    pub cpuid: Vec<[u32; 7]>,
    /// Run state of the vCPU (`struct kvm_mp_state`).
    pub mp_state: Base64Bytes,
    /// General-purpose registers (`struct kvm_regs`).
    pub regs: Base64Bytes,
    /// Segment, control and descriptor-table registers (`struct kvm_sregs`).
    pub sregs: Base64Bytes,
    /// XSAVE area (`struct kvm_xsave`) with the size that the host's KVM reports; empty if the host
    /// has no XSAVE.
    pub xsave: Base64Bytes,
    /// x87 and SSE state (`struct kvm_fpu`); empty if `xsave` is present.
    pub fpu: Base64Bytes,
    /// Extended control registers (`struct kvm_xcrs`); empty if the host has none.
    pub xcrs: Base64Bytes,
    /// Debug registers (`struct kvm_debugregs`).
    pub debug_regs: Base64Bytes,
    /// Registers of the local APIC (`struct kvm_lapic_state`).
    pub lapic: Base64Bytes,
    /// Pending exceptions, interrupts and NMIs (`struct kvm_vcpu_events`).
    pub events: Base64Bytes,
    /// MSRs from KVM's list of MSRs (KVM_GET_MSR_INDEX_LIST): index and value.
    pub msrs: Vec<(u32, u64)>,
    /// State of the virtual PMU, and other VMM state of the vCPU.
    pub pmu: SavedVcpuPmu,
}

/// The virtual PMU of a vCPU, and the state of PMI delivery.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedVcpuPmu {
    /// State of the register file in the format of the crate `vpmu`; empty without a PMU.
    pub registers: Base64Bytes,
    /// Bits of IA32_DEBUGCTL that KVM stores.
    pub debug_control: u64,
    /// PMI that the guest is still handling: `none`, `nmi`, or a vector number.
    pub handled_pmi: SavedInServicePmi,
    /// Most recent emulated RDPMC, if the guest has not executed an instruction after it.
    pub last_rdpmc: Option<SavedRdpmc>,
    /// `true` if an NMI was sent for a PMI since the last emulated RDPMC.
    pub nmi_sent: bool,
    /// Number of consecutive PMIs, sent as NMIs, for which the guest was made to execute an RDPMC
    /// again.
    pub nmi_repetitions: u32,
    /// `true` if RFLAGS values in guest memory may contain the trap flag that the single-stepper
    /// set.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stray_trap_flags: bool,
    /// Address and privilege level of a string instruction with a repeat prefix. Single-stepping
    /// the guest (`--backing exact`) has seen some iterations of the instruction but not its
    /// completion.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfinished_repeat: Option<(u64, u8)>,
}

/// PMI that a guest is handling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SavedInServicePmi {
    /// The guest is not handling a PMI.
    #[default]
    None,
    /// The PMI was delivered as an NMI.
    Nmi,
    /// The PMI was delivered with this interrupt vector.
    Vector(u8),
}

/// An emulated RDPMC after which the guest has not executed an instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedRdpmc {
    /// Address of the RDPMC instruction.
    pub at: u64,
    /// Address of the instruction after the RDPMC.
    pub behind: u64,
    /// Number of consecutive times that the guest was made to execute this RDPMC again, because a
    /// PMI was delivered before it.
    pub repetitions: u32,
}

/// State of the emulated devices other than virtio devices.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedLegacyDevices {
    /// State of the serial port.
    pub serial: SavedSerial,
    /// Value of the CMOS index register.
    pub cmos_index: u8,
    /// Contents of the CMOS memory.
    pub cmos: Base64Bytes,
    /// Configuration byte of the keyboard controller.
    pub i8042_config: u8,
    /// Keyboard controller command that expects a data byte.
    pub i8042_pending: Option<u8>,
    /// Byte in the output buffer of the keyboard controller.
    pub i8042_output: Option<u8>,
    /// Key of the selected fw_cfg item.
    pub fw_cfg_key: u16,
    /// Position in the selected fw_cfg item.
    pub fw_cfg_offset: u64,
    /// ACPI PM1 status, enable and control registers.
    pub acpi_pm: [u16; 3],
    /// CPU hot-plug registers; `None` if the number of vCPUs is fixed.
    pub cpu_plug: Option<SavedCpuPlug>,
    /// Value of the reset control register.
    pub reset_control: u8,
    /// Value of system control port A.
    pub control_a: u8,
    /// Number of reads of system control port B.
    pub control_b_reads: u8,
    /// Value of the address register of the PCI bus.
    pub pci_address: u32,
}

/// A 16550 serial port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedSerial {
    /// Divisor latch (low byte, high byte), IER, IIR, LCR, LSR, MCR, MSR and scratch register.
    pub registers: [u8; 9],
    /// Bytes in the receive buffer of the serial port.
    pub input: Base64Bytes,
}

/// CPU hot-plug registers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedCpuPlug {
    /// Bitmap of the present processors.
    pub shown: u64,
    /// Bitmap of the processors whose inserted bit is set.
    pub inserted: u64,
    /// Bitmap of the processors whose ejection-requested bit is set.
    pub called: u64,
    /// Bitmap of the processors whose ejection was requested and not yet answered by the guest.
    pub asked_for: u64,
    /// Number of the selected processor.
    pub selector: u8,
    /// Event code that the guest has written for its next _OST report.
    pub event: [u8; 4],
    /// Status code of the guest's most recent _OST report.
    pub status: [u8; 4],
}

/// A virtio device with its PCI function. Its queues resume at the positions stored in guest
/// memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedDevice {
    /// Virtio device ID.
    pub id: u32,
    /// Name of the device, such as `disk0`.
    pub name: String,
    /// Feature bits that the device offers.
    pub offered: u64,
    /// Contents of the virtio device configuration.
    pub config: Base64Bytes,
    /// State of the device that its registers do not contain.
    #[serde(default, skip_serializing_if = "Base64Bytes::is_empty")]
    pub state: Base64Bytes,
    /// Contents of the PCI configuration space.
    pub config_space: Base64Bytes,
    /// Feature bits that the driver accepted.
    pub accepted: u64,
    /// Values of the virtio registers that select the visible part of the device features and of
    /// the driver features.
    pub feature_selects: [u32; 2],
    /// MSI-X vector for configuration changes.
    pub config_vector: u16,
    /// Value of the device status register, including DEVICE_NEEDS_RESET.
    pub status: u8,
    /// Value of the configuration generation register.
    pub generation: u8,
    /// Index of the selected queue.
    pub queue_select: u16,
    /// Registers of each virtqueue.
    pub queues: Vec<SavedQueue>,
    /// `true` if the device is active, because its driver has set DRIVER_OK.
    pub active: bool,
    /// Value of the MSI-X message control register.
    pub msix_control: u16,
    /// Contents of the MSI-X table.
    pub msix_table: Base64Bytes,
    /// Bitmap of the pending MSI-X interrupts that are masked.
    pub msix_pending: Base64Bytes,
}

/// Registers of a virtqueue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedQueue {
    /// Size of the queue in entries.
    pub size: u16,
    /// MSI-X vector of the queue.
    pub vector: u16,
    /// `true` if the driver has enabled the queue.
    pub enabled: bool,
    /// Guest-physical address of the descriptor table.
    pub descriptors: u64,
    /// Guest-physical address of the available ring.
    pub avail: u64,
    /// Guest-physical address of the used ring.
    pub used: u64,
}

/// Size and checksums of the memory file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedMemoryFile {
    /// Size of guest RAM, and of the file, in bytes.
    pub bytes: u64,
    /// CRC-32 of each chunk of [`crate::memory::CHUNK_BYTES`]; the last one may be shorter.
    pub crcs: Vec<u32>,
    /// Base of a diff; `None` if the memory file contains all memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<SavedDiffBase>,
}

/// Base of a diff, and the ranges of memory that the diff itself contains.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedDiffBase {
    /// CRC-32 at the end of the base's state file.
    pub state_crc: u32,
    /// Ranges in ascending order: offset and length in bytes.
    pub runs: Vec<(u64, u64)>,
}
