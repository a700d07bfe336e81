//! Tests with the unmodified kernel of a distribution. The kernel loads, its symbols are found
//! although it is stripped, and exactly the real RDPMC instructions among the byte pairs 0F 33 are
//! replaced.
//!
//! The kernel is taken from `PERFVISOR_TEST_KERNEL`, from the output of `make guest` in `target/`,
//! or from /boot, in this order. Without a kernel the tests are skipped.

use std::path::{Path, PathBuf};

use guest_patching::{finder, topdown_events};
use kernel_images::elf::CodeBytes;
use kernel_images::symbols::KernelSymbols;
use test_support::skip;
use vm_memory::{Bytes, GuestAddress};
use vmm::boot::{self, BootProtocol, GuestLoadParams, KernelFormat, KernelSource, LoadedGuest};
use vmm::memory::GuestRam;

fn kernel() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("PERFVISOR_TEST_KERNEL") {
        return Some(path.into());
    }
    fn vmlinuz_below(dir: &Path, depth: usize) -> Option<PathBuf> {
        let mut entries: Vec<PathBuf> = std::fs::read_dir(dir)
            .ok()?
            .filter_map(|e| Some(e.ok()?.path()))
            .collect();
        entries.sort();
        entries.into_iter().find_map(|path| {
            let name = path.file_name()?.to_string_lossy().into_owned();
            if path.is_dir() {
                return (depth > 0).then(|| vmlinuz_below(&path, depth - 1)).flatten();
            }
            (name.starts_with("vmlinuz-") || name == "bzImage").then_some(path)
        })
    }
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target");
    let found = ["guest", "guest-images", "images"]
        .iter()
        .find_map(|d| vmlinuz_below(&target.join(d), 5))
        .or_else(|| vmlinuz_below(Path::new("/boot"), 0));
    if found.is_none() {
        skip::skipped("no distribution kernel here; `make guest` fetches one", true);
    }
    found
}

fn load(path: &Path, patch_rdpmc: bool) -> (GuestRam, LoadedGuest) {
    let ram = GuestRam::new(256 << 20).unwrap();
    let kernel = KernelSource::File(path.into());
    let request = GuestLoadParams {
        kernel: &kernel,
        protocol: BootProtocol::Auto,
        initrd: None,
        cmdline: "console=ttyS0",
        cpus: "2".parse().unwrap(),
        pci: false,
        patch_rdpmc,
    };
    let loaded = boot::load(&ram, &request).unwrap();
    (ram, loaded)
}

#[test]
fn only_real_rdpmc_instructions_are_replaced() {
    let Some(path) = kernel() else { return };
    let (plain_ram, plain) = load(&path, false);
    let (ram, loaded) = load(&path, true);
    assert!(
        matches!(loaded.kind, KernelFormat::BzImage { .. }),
        "{:?}",
        loaded.kind
    );
    assert!(!loaded.rdpmc_sites.is_empty());
    assert_eq!(plain.rdpmc_sites, loaded.rdpmc_sites);
    let mut pairs = 0;
    let mut changed = Vec::new();
    for text in &loaded.text {
        let len = text.len_bytes as usize;
        let (mut before, mut after) = (vec![0u8; len], vec![0u8; len]);
        plain_ram
            .memory()
            .read_slice(&mut before, GuestAddress(text.phys))
            .unwrap();
        ram.memory()
            .read_slice(&mut after, GuestAddress(text.phys))
            .unwrap();
        pairs += before.windows(2).filter(|w| *w == finder::RDPMC).count();
        for (i, (a, b)) in before.chunks(4096).zip(after.chunks(4096)).enumerate() {
            if a != b {
                let page = text.virt + 4096 * i as u64;
                changed.extend((0..a.len()).filter(|j| a[*j] != b[*j]).map(|j| page + j as u64));
            }
        }
    }
    // Each replacement changes one byte, because the trap differs from RDPMC only in its first
    // byte.
    let mut expected: Vec<u64> = loaded.rdpmc_sites.iter().map(|site| site.virt).collect();
    changed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(changed, expected, "only the sites may change");
    eprintln!("{}: {pairs} byte pairs, sites:", path.display());
    for site in &loaded.rdpmc_sites {
        eprintln!("  {:#x} {}", site.virt, site.location());
    }
    // Distribution kernels with PARAVIRT_XXL have one RDPMC; other kernels have it inlined.
    assert!(pairs > loaded.rdpmc_sites.len());
    assert!(loaded.rdpmc_sites.len() <= 8);
}

/// The code that reads a distribution kernel finds several lists of top-down events, which can be
/// emptied, and the constant that permits RDPMC in user mode.
#[test]
fn topdown_events_and_rdpmc_permission_are_found() {
    let Some(path) = kernel() else { return };
    let (ram, loaded) = load(&path, false);
    assert!(loaded.topdown.len() >= 4, "{:x?}", loaded.topdown);
    let hidden = topdown_events::hide(ram.memory(), &loaded.topdown);
    assert_eq!(hidden, loaded.topdown.len());
    assert_eq!(
        topdown_events::hide(ram.memory(), &loaded.topdown),
        0,
        "they are empty"
    );
    let permission = GuestAddress(loaded.user_rdpmc.unwrap());
    assert_eq!(ram.memory().read_obj::<u32>(permission).unwrap(), 1);
}

#[test]
fn symbols_of_stripped_kernel_are_found() {
    let Some(path) = kernel() else { return };
    let (_, loaded) = load(&path, false);
    let symbols = loaded.symbols.unpack();
    assert_eq!(symbols.len(), loaded.symbols.len());
    assert!(loaded.symbols.len() > 10_000, "{} symbols", loaded.symbols.len());
    let text = symbols
        .by_name("_text")
        .or_else(|| symbols.by_name("_stext"))
        .unwrap()
        .address;
    assert!(loaded.phys_of(text).is_some());
    for name in ["start_kernel", "do_syscall_64", "native_read_pmc"] {
        let address = symbols
            .by_name(name)
            .map(|s| s.address)
            .unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!(symbols.resolve(address + 1).map(|(_, offset)| offset), Some(1));
        assert!(
            loaded.phys_of(address).is_some(),
            "{name} at {address:#x} is not in the text"
        );
    }
    // The location found by decoding matches the name from kallsyms.
    assert!(
        loaded
            .rdpmc_sites
            .iter()
            .any(|s| s.location().starts_with("native_read_pmc+"))
    );
}

#[test]
fn unwind_tables_symbols_and_plain_decoding_agree() {
    let Some(path) = kernel() else { return };
    let (ram, loaded) = load(&path, false);
    let text: Vec<Vec<u8>> = loaded
        .text
        .iter()
        .map(|t| {
            let mut bytes = vec![0; t.len_bytes as usize];
            ram.memory().read_slice(&mut bytes, GuestAddress(t.phys)).unwrap();
            bytes
        })
        .collect();
    let text: Vec<CodeBytes<'_>> = loaded
        .text
        .iter()
        .zip(&text)
        .map(|(t, bytes)| CodeBytes {
            virt: t.virt,
            phys: t.phys,
            bytes,
        })
        .collect();
    let places = |symbols: &KernelSymbols| -> Vec<u64> {
        finder::find(&text, symbols, &[], finder::InstructionBitness::Only64)
            .iter()
            .map(|s| s.virt)
            .collect()
    };
    let expected: Vec<u64> = loaded.rdpmc_sites.iter().map(|s| s.virt).collect();
    assert_eq!(places(&loaded.symbols.unpack()), expected, "by symbols alone");
    assert_eq!(places(&KernelSymbols::default()), expected, "by decoding alone");
}
