//! Boot tests of loaded kernels on the KVM of this host.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use guest_patching::finder;
use test_support::kernels::{
    self, EM_386, EM_X86_64, ElfSegment, LINUX_CODE, MULTIBOOT_CODE, MULTIBOOT_RDPMC, PVH_CODE, PVH_ENTRY,
};
use test_support::skip;
use vmm::boot::{self, BootProtocol, GuestLoadParams, KernelSource, LoadedGuest, layout};
use vmm::devices::{DeviceBus, DeviceWriteOutcome, ports};
use vmm::kvm::kickable_vcpu::{KickableVcpu, VcpuExit};
use vmm::kvm::vm_fd::VmFd;
use vmm::kvm::{cpuid, host};
use vmm::memory::GuestRam;

#[derive(Clone, Default)]
struct CapturedConsole(Arc<Mutex<Vec<u8>>>);

impl Write for CapturedConsole {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Result of running a guest.
struct BootResult {
    loaded: LoadedGuest,
    outcome: DeviceWriteOutcome,
    console: String,
    /// Values of ECX at the exits of replaced RDPMC instructions.
    traps: Vec<u64>,
}

/// Value that the test returns for each RDPMC.
const COUNTER: u64 = 0x10;

fn run(kernel: PathBuf, initrd: Option<&Path>, cmdline: &str) -> Option<BootResult> {
    run_by(BootProtocol::Auto, kernel, initrd, cmdline)
}

fn run_by(
    protocol: BootProtocol,
    kernel: PathBuf,
    initrd: Option<&Path>,
    cmdline: &str,
) -> Option<BootResult> {
    let Ok(kvm) = host::open() else {
        skip::skipped("no usable /dev/kvm here", false);
        return None;
    };
    let ram = GuestRam::new(32 << 20).unwrap();
    let kernel = KernelSource::File(kernel);
    let request = GuestLoadParams {
        kernel: &kernel,
        protocol,
        initrd,
        cmdline,
        cpus: "1".parse().unwrap(),
        pci: false,
        patch_rdpmc: true,
    };
    let loaded = boot::load(&ram, &request).unwrap();
    let vm = Arc::new(VmFd::new(&kvm).unwrap());
    vm.add_chips(layout::KVM_IDENTITY_MAP, layout::KVM_TSS).unwrap();
    let _slots = ram.register(&vm).unwrap();
    let console = CapturedConsole::default();
    let bus = DeviceBus::new(Box::new(console.clone()), ram.size_bytes(), "1".parse().unwrap()).unwrap();
    vm.connect_line(bus.serial_irq(), ports::COM1_IRQ).unwrap();
    let mut vcpu = KickableVcpu::new(vm.create_vcpu(0).unwrap());
    vcpu.set_cpuid2(&cpuid::supported(&kvm).unwrap()).unwrap();
    boot::configure_local_apic(&vcpu).unwrap();
    loaded.configure_bsp(&vcpu).unwrap();
    let mut traps = Vec::new();
    // A few dozen exits are expected. The limit makes a faulty guest fail instead of hang.
    for _ in 0..10_000 {
        let outcome = match vcpu.run().exit.unwrap() {
            VcpuExit::IoOut(finder::TRAP_PORT, _) => {
                let mut regs = vcpu.get_regs().unwrap();
                traps.push(regs.rcx);
                regs.rax = COUNTER & 0xFFFF_FFFF;
                regs.rdx = COUNTER >> 32;
                vcpu.set_regs(&regs).unwrap();
                DeviceWriteOutcome::Continue
            }
            VcpuExit::IoOut(port, data) => bus.io_out(port, data),
            VcpuExit::IoIn(port, data) => {
                bus.io_in(port, data);
                DeviceWriteOutcome::Continue
            }
            VcpuExit::MmioRead(address, data) => {
                bus.mmio_read(address, data);
                DeviceWriteOutcome::Continue
            }
            VcpuExit::MmioWrite(address, data) => bus.mmio_write(address, data),
            other => panic!("unexpected exit {other:?}"),
        };
        if outcome != DeviceWriteOutcome::Continue {
            let console = String::from_utf8(console.0.lock().unwrap().clone()).unwrap();
            return Some(BootResult {
                loaded,
                outcome,
                console,
                traps,
            });
        }
    }
    panic!("the guest did not end");
}

#[test]
fn multiboot_elf32_gets_command_line_and_rdpmc_trap() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = MULTIBOOT_CODE.to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(kernels::multiboot_header(3, None));
    let segment = ElfSegment {
        phys: 0x10_0000,
        bytes: &bytes,
        mem_bytes: 0x2000,
    };
    let kernel = kernels::file(dir.path(), "k", &kernels::elf32(EM_386, 0x10_0000, &[segment]));
    let Some(run) = run(kernel, None, "hello multiboot") else {
        return;
    };
    assert_eq!(run.console, "k hello multiboot", "the program's name comes first");
    assert_eq!(run.traps, [7]);
    assert_eq!(run.outcome, DeviceWriteOutcome::Exit((COUNTER as u8) << 1 | 1));
    assert_eq!(run.loaded.rdpmc_sites.len(), 1);
    assert_eq!(run.loaded.rdpmc_sites[0].phys, 0x10_0000 + MULTIBOOT_RDPMC);
}

#[test]
fn flat_multiboot_image_uses_address_fields() {
    let dir = tempfile::tempdir().unwrap();
    let load = 0x20_0000;
    let mut bytes = vec![0u8; 32];
    let header = kernels::multiboot_header(0x1_0003, Some([load, load, 0, load + 0x8000, load + 32]));
    bytes[..32].copy_from_slice(&header);
    bytes.extend_from_slice(MULTIBOOT_CODE);
    let Some(run) = run(kernels::file(dir.path(), "k", &bytes), None, "flat") else {
        return;
    };
    assert_eq!(run.console, "k flat");
    assert_eq!(run.loaded.kernel, u64::from(load)..u64::from(load) + 0x8000);
}

/// A multiboot image below 1 MiB starts, although it occupies the conventional memory in which
/// other kernels receive their boot data.
#[test]
fn multiboot_image_below_1_mib_starts() {
    let dir = tempfile::tempdir().unwrap();
    let load = 0x1000u32;
    let mut bytes = vec![0u8; 32];
    let header = kernels::multiboot_header(0x1_0003, Some([load, load, 0, load + 0x3_0000, load + 32]));
    bytes[..32].copy_from_slice(&header);
    bytes.extend_from_slice(MULTIBOOT_CODE);
    let initrd = kernels::file(dir.path(), "initrd", &[0x21; 5000]);
    let Some(run) = run(kernels::file(dir.path(), "low", &bytes), Some(&initrd), "words") else {
        return;
    };
    assert_eq!(run.console, "low words");
    assert_eq!(run.loaded.kernel, 0x1000..0x3_1000);
    assert!(run.loaded.initrd.unwrap().start >= 0x10_0000);
    assert_eq!(run.traps, [7]);
}

#[test]
fn multiboot_elf64_starts_in_32_bit_mode() {
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = MULTIBOOT_CODE.to_vec();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(kernels::multiboot_header(0, None));
    let segment = ElfSegment {
        phys: 0x10_0000,
        bytes: &bytes,
        mem_bytes: bytes.len() as u64,
    };
    let kernel = kernels::file(dir.path(), "k", &kernels::elf64(EM_X86_64, 0x10_0000, &[segment]));
    let Some(run) = run(kernel, None, "elf64") else {
        return;
    };
    assert_eq!((run.console.as_str(), run.traps.len()), ("k elf64", 1));
}

#[test]
fn vmlinux_and_bzimage_use_linux_boot_protocol() {
    let dir = tempfile::tempdir().unwrap();
    let segment = ElfSegment {
        phys: 0x100_0000,
        bytes: LINUX_CODE,
        mem_bytes: 0x4000,
    };
    let elf = kernels::elf64(EM_X86_64, 0x100_0000, &[segment]);
    let initrd = kernels::file(dir.path(), "initrd", &[0x21; 5000]);
    for (name, image) in [("vmlinux", elf.clone()), ("bzImage", kernels::bzimage(&elf))] {
        let kernel = kernels::file(dir.path(), name, &image);
        let Some(run) = run(kernel, Some(&initrd), "console=ttyS0 quiet") else {
            return;
        };
        assert_eq!(run.console, "console=ttyS0 quiet", "{name}");
        assert_eq!(run.outcome, DeviceWriteOutcome::Exit(0x43), "{name}");
        let initrd = run.loaded.initrd.unwrap();
        assert_eq!(initrd.end - initrd.start, 5000);
        assert!(initrd.start >= run.loaded.kernel.end);
    }
}

/// 32-bit and 64-bit kernels other than Linux start at the PVH entry point. The test kernels report
/// a different exit status from their ELF entry point.
#[test]
fn other_kernel_starts_at_pvh_entry() {
    let dir = tempfile::tempdir().unwrap();
    let initrd = kernels::file(dir.path(), "initrd", &[0x21; 5000]);
    let segment = || ElfSegment {
        phys: 0x10_0000,
        bytes: PVH_CODE,
        mem_bytes: 0x4000,
    };
    let note = kernels::note(b"Xen\0", 18, &(0x10_0000 + PVH_ENTRY).to_le_bytes());
    let images = [
        kernels::with_notes(kernels::elf32(EM_386, 0x10_0000, &[segment()]), &note),
        kernels::with_notes(kernels::elf64(EM_X86_64, 0x10_0000, &[segment()]), &note),
    ];
    for image in images {
        let kernel = kernels::file(dir.path(), "k", &image);
        let Some(run) = run(kernel, Some(&initrd), "hello pvh") else {
            return;
        };
        assert_eq!(run.loaded.kind.to_string(), "PVH image");
        assert_eq!(run.console, "hello pvh");
        assert_eq!(
            run.outcome,
            DeviceWriteOutcome::Exit(0x43),
            "the first byte of the module"
        );
    }
}

/// A Linux kernel with both entry points uses the Linux boot protocol unless PVH is requested.
#[test]
fn linux_uses_pvh_entry_only_on_request() {
    let dir = tempfile::tempdir().unwrap();
    // The Linux entry point, followed by the PVH entry point.
    let mut code = LINUX_CODE.to_vec();
    code.resize(0x100, 0x90);
    code.extend_from_slice(PVH_CODE);
    let segment = ElfSegment {
        phys: 0x100_0000,
        bytes: &code,
        mem_bytes: 0x4000,
    };
    let mut notes = kernels::note(b"Linux\0", 0x100, b"salt");
    notes.extend(kernels::note(
        b"Xen\0",
        18,
        &(0x100_0100 + u64::from(PVH_ENTRY)).to_le_bytes(),
    ));
    let elf = kernels::with_notes(kernels::elf64(EM_X86_64, 0x100_0000, &[segment]), &notes);
    let initrd = kernels::file(dir.path(), "initrd", &[0x21; 5000]);
    for image in [elf.clone(), kernels::bzimage(&elf)] {
        let kernel = kernels::file(dir.path(), "k", &image);
        for protocol in [BootProtocol::Auto, BootProtocol::Pvh] {
            let Some(run) = run_by(protocol, kernel.clone(), Some(&initrd), "both") else {
                return;
            };
            assert!(run.loaded.kind.is_linux(), "{}", run.loaded.kind);
            let by_pvh = matches!(run.loaded.entry, boot::BootProcessorState::Protected32 { .. });
            assert_eq!(by_pvh, protocol == BootProtocol::Pvh);
            assert_eq!(
                (run.console.as_str(), run.outcome),
                ("both", DeviceWriteOutcome::Exit(0x43))
            );
        }
    }
}
