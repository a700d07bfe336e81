//! Guest-physical addresses of the structures that the VMM writes.
//!
//! All of them lie below 1 MiB, where a Linux kernel cannot load segments, so a kernel file cannot
//! overwrite them. A multiboot kernel may load between [`LOW_KERNEL_START`] and the extended BIOS
//! data area; its boot information then moves to free pages.

/// Global descriptor table of the boot processor.
pub const GDT: u64 = 0x500;
/// Initial base of the boot processor's interrupt descriptor table. The limit is 0 until the guest
/// loads its own table.
pub const IDT: u64 = 0x560;
/// Lowest address at which a multiboot kernel may be loaded. The page below contains the GDT.
pub const LOW_KERNEL_START: u64 = 0x1000;
/// Address of the multiboot information structure, unless the kernel occupies it.
pub const MULTIBOOT_INFO: u64 = 0x6000;
/// Linux's boot_params ("zero page"), with the memory map and the address of the initrd.
pub const ZERO_PAGE: u64 = 0x7000;
/// start_info of a PVH kernel, with the memory map and the module list. A PVH kernel has no
/// boot_params.
pub const PVH_START_INFO: u64 = ZERO_PAGE;
/// Top-level page table (PML4) for 64-bit entry.
pub const PML4: u64 = 0x9000;
/// Page directory pointer table (PDPT) for 64-bit entry.
pub const PDPT: u64 = 0xA000;
/// Four page directories, one page each, which identity-map the first 4 GiB with 2 MiB pages.
pub const PAGE_DIRECTORIES: u64 = 0xB000;
/// Initial stack pointer for 64-bit entry. The stack grows down into a page that is otherwise
/// unused.
pub const BOOT_STACK: u64 = 0x8FF0;
/// Address of the NUL-terminated command line. The command line of a multiboot kernel is placed
/// elsewhere if the kernel occupies this address.
pub const CMDLINE: u64 = 0x2_0000;
/// Maximum length in bytes of the command line at [`CMDLINE`], without its NUL.
pub const CMDLINE_MAX_BYTES: usize = 0xFFFF;
/// ACPI RSDP, at the start of the BIOS area that kernels search for it.
pub const RSDP: u64 = 0xE_0000;
/// First of the ACPI tables that follow the RSDP.
pub const ACPI_TABLES: u64 = 0xE_0040;
/// End address of the area of the ACPI tables, exclusive.
pub const ACPI_END: u64 = 0xE_F000;
/// Page that contains only the VM generation ID.
pub const GENERATION_ID: u64 = ACPI_END;
/// MP floating pointer and configuration table, in the BIOS area defined by the MP specification.
pub const MP_TABLE: u64 = 0xF_0000;
/// End address of the area of the MP table, exclusive.
pub const MP_END: u64 = 0x10_0000;

/// MMIO window of PCI functions, between the end of RAM below 4 GiB
/// ([`crate::memory::MMIO_HOLE_START`]) and the interrupt controllers.
pub const PCI_WINDOW: std::ops::Range<u32> = 0xE000_0000..0xF000_0000;
/// Base address of the local APIC.
pub const LOCAL_APIC: u32 = 0xFEE0_0000;
/// Base address of the I/O APIC.
pub const IO_APIC: u32 = 0xFEC0_0000;
/// Three pages that KVM needs for the VMX task state (KVM_SET_TSS_ADDR). Below 4 GiB and never RAM.
pub const KVM_TSS: u64 = 0xFFFB_D000;
/// Page that KVM needs for its identity map (KVM_SET_IDENTITY_MAP_ADDR).
pub const KVM_IDENTITY_MAP: u64 = 0xFFFB_C000;

const _: () = assert!(crate::memory::MMIO_HOLE_START <= PCI_WINDOW.start as u64 && PCI_WINDOW.end <= IO_APIC);

pub use crate::numbers::MAX_CPUS;
