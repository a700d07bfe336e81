//! Where our own structures lie in guest-physical memory.
//!
//! Everything is below 1 MiB, where no segment of a Linux kernel may be loaded, so a kernel file cannot
//! overwrite what we hand it. A multiboot kernel may lie between [`LOW_KERNEL_START`] and the extended BIOS
//! data area; what it is handed then lies beside it.

/// Global descriptor table given to the boot processor.
pub const GDT: u64 = 0x500;
/// Interrupt descriptor table base of the boot processor (limit 0 until the guest loads its own).
pub const IDT: u64 = 0x560;
/// Lowest address of a multiboot kernel: the page below has our descriptor table.
pub const LOW_KERNEL_START: u64 = 0x1000;
/// Multiboot information structure, where no kernel lies there.
pub const MULTIBOOT_INFO: u64 = 0x6000;
/// Linux boot_params ("zero page").
pub const ZERO_PAGE: u64 = 0x7000;
/// A PVH kernel's start_info, with the memory map and the list of modules; it gets no boot_params.
pub const PVH_START_INFO: u64 = ZERO_PAGE;
/// First-level page table of 64-bit entry.
pub const PML4: u64 = 0x9000;
/// Second level.
pub const PDPT: u64 = 0xA000;
/// Third level: four pages, 2 MiB pages, identity-maps the first 4 GiB.
pub const PAGE_DIRECTORIES: u64 = 0xB000;
/// Stack top for 64-bit entry (grows down; nothing else lies in the page below).
pub const BOOT_STACK: u64 = 0x8FF0;
/// Command line, NUL-terminated; a multiboot kernel's where no kernel lies there.
pub const CMDLINE: u64 = 0x2_0000;
/// Longest command line we ever store, without its NUL.
pub const CMDLINE_MAX_BYTES: usize = 0xFFFF;
/// ACPI root pointer, at the start of the area every kernel searches.
pub const RSDP: u64 = 0xE_0000;
/// The other ACPI tables follow it.
pub const ACPI_TABLES: u64 = 0xE_0040;
/// End of the ACPI area.
pub const ACPI_END: u64 = 0xF_0000;
/// MP floating pointer and configuration table, in the BIOS area the MP specification names.
pub const MP_TABLE: u64 = 0xF_0000;
/// End of the MP table's area.
pub const MP_END: u64 = 0x10_0000;

/// Memory that PCI functions may decode: between the end of RAM below 4 GiB
/// ([`crate::memory::MMIO_HOLE_START`]) and the interrupt controllers.
pub const PCI_WINDOW: std::ops::Range<u32> = 0xE000_0000..0xF000_0000;
/// Local APIC.
pub const LOCAL_APIC: u32 = 0xFEE0_0000;
/// I/O APIC.
pub const IO_APIC: u32 = 0xFEC0_0000;
/// Three pages KVM needs for VMX task state (KVM_SET_TSS_ADDR); below 4 GiB and never RAM here.
pub const KVM_TSS: u64 = 0xFFFB_D000;
/// One page KVM needs for the identity map (KVM_SET_IDENTITY_MAP_ADDR).
pub const KVM_IDENTITY_MAP: u64 = 0xFFFB_C000;

const _: () = assert!(crate::memory::MMIO_HOLE_START <= PCI_WINDOW.start as u64 && PCI_WINDOW.end <= IO_APIC);

pub use crate::numbers::MAX_CPUS;
