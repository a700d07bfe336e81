//! Patching of kernels that a guest starts itself by kexec or kdump. In guest memory, RDPMC is
//! replaced, and uncountable events are removed from the kernel's tables.
//!
//! The LSTAR register contains the address of the running kernel's SYSCALL entry point. Another
//! kernel is running if this address refers to different physical memory than at the last check, or
//! if a location where RDPMC was replaced has changed, because a new kernel may start at the same
//! address. A running kernel contains its symbols and unwind tables, so the same information is
//! available as for a kernel that is loaded from a file.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use perf_core::{error_line, guest_log};
use snapshot::state::{SavedGuestKernel, SavedRunningKernel, SavedText};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory};

use crate::event_tables::HiddenKernelEvents;
use crate::finder::{InstructionBitness, KernelTextRange, RDPMC, RdpmcSite, TRAP, find};
use crate::sites::RdpmcSites;
use crate::uncounted::{self, UncountableEventSet};
use guest_profile::locate::{self, KernelLocateError};
use guest_profile::paging::AddressSpace;
use guest_profile::{GuestMemoryReadBudget, GuestRegs};
use kernel_images::elf::CodeBytes;
use kernel_images::symbols::KernelSymbols;
use kernel_images::{kallsyms, orc};

/// Minimum interval between two searches for RDPMC, because each search copies the kernel.
const MIN_SEARCH_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of log lines about searches per VM.
const MAX_LOG_LINES: u32 = 64;
/// Maximum number of byte pairs 0F 33 in a kernel's text that are examined. Debian's kernels have a
/// few dozen; a malicious guest might supply many more.
const MAX_PAIRS: usize = 1024;
/// Maximum number of searches of guest memory for a new kernel at the address of the previous
/// kernel. The first search may occur before the kernel is completely loaded.
const MAX_TRIES: u32 = 8;
/// Linux function whose RDPMC shows whether a patched kernel is still running. The function's code
/// does not change while the kernel runs.
const READ_PMC: &str = "native_read_pmc";
/// Maximum number of guest memory reads for translating one address.
const TRANSLATE_READS: u32 = 16;
const PAGE_BYTES: u64 = 4096;
/// Size of the aligned words that the processor writes atomically, in bytes.
const WORD_BYTES: u64 = 8;
/// Lowest linear address of the Linux kernel image, which is in the top 2 GiB of the address space.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;

/// Detects kernels that the guest itself starts, and patches them in memory.
#[derive(Debug)]
pub struct RunningKernelPatcher {
    memory: GuestMemoryMmap,
    sites: Arc<RdpmcSites>,
    /// Text ranges of the kernel that the VMM loaded.
    loaded: Vec<KernelTextRange>,
    /// `true` if an unpatched RDPMC raises #GP and is emulated at the #GP handler.
    emulated_anyway: bool,
    uncounted: Arc<UncountableEventSet>,
    /// Linear address in LSTAR at the last search, or 0 while the guest runs the kernel that the
    /// VMM loaded. `lstar_gpa` is the guest-physical address of this address.
    lstar: AtomicU64,
    lstar_gpa: AtomicU64,
    /// Guest-physical address of one replaced RDPMC of the running kernel; 0 if unknown. Another
    /// kernel is running if the trap is no longer there.
    replaced: AtomicU64,
    search: Mutex<SearchProgress>,
}

#[derive(Debug, Default)]
struct SearchProgress {
    last: Option<Instant>,
    log_lines: u32,
    /// Number of unsuccessful searches of guest memory for a new kernel at the address of the
    /// previous kernel.
    tries: u32,
}

/// Reason why a kernel was not searched for RDPMC.
#[derive(Debug, thiserror::Error)]
enum PatchSearchError {
    #[error(transparent)]
    Locate(#[from] KernelLocateError),
    #[error("no symbols mark the kernel's text")]
    NoText,
    #[error("the kernel's text has more than {MAX_PAIRS} candidate byte pairs")]
    Pairs,
}

/// Result of patching a kernel: hidden table events and replaced RDPMC instructions.
struct KernelChanges {
    hidden: Vec<HiddenKernelEvents>,
    rdpmc: Result<Vec<RdpmcSite>, PatchSearchError>,
}

/// Copy of the memory of a running kernel, with its symbols.
struct KernelCopy {
    start: u64,
    bytes: Vec<u8>,
    symbols: KernelSymbols,
}

impl KernelCopy {
    /// Returns the address and the contents of the memory between the symbols `from` and `to`.
    fn span(&self, from: &str, to: &str) -> Option<(u64, &[u8])> {
        let from = self.symbols.by_name(from)?.address;
        let to = self.symbols.by_name(to)?.address;
        let offset = |at: u64| usize::try_from(at.checked_sub(self.start)?).ok();
        Some((from, self.bytes.get(offset(from)?..offset(to)?)?))
    }

    /// Returns the code of the kernel, with linear addresses in place of the physical ones.
    fn text(&self) -> Vec<CodeBytes<'_>> {
        [("_stext", "_etext"), ("_sinittext", "_einittext")]
            .iter()
            .filter_map(|(from, to)| self.span(from, to))
            // Physical addresses are translated later with the page tables.
            .map(|(virt, bytes)| CodeBytes {
                virt,
                phys: virt,
                bytes,
            })
            .collect()
    }

    /// Returns the instruction boundaries from the kernel's ORC unwind table.
    fn boundaries(&self) -> Vec<u64> {
        self.span("__start_orc_unwind_ip", "__stop_orc_unwind_ip")
            .map(|(at, ips)| orc::addresses(at, ips))
            .unwrap_or_default()
    }
}

impl RunningKernelPatcher {
    /// Creates the patcher of a VM. `loaded` is the text of its first kernel, in which the RDPMC
    /// instructions `patched` are already replaced. `sites` are all replaced RDPMC instructions of
    /// the VM.
    pub fn new(
        memory: GuestMemoryMmap,
        sites: Arc<RdpmcSites>,
        loaded: Vec<KernelTextRange>,
        patched: &[RdpmcSite],
        emulated_anyway: bool,
        uncounted: Arc<UncountableEventSet>,
    ) -> Self {
        Self {
            memory,
            sites,
            loaded,
            emulated_anyway,
            uncounted,
            lstar: AtomicU64::new(0),
            lstar_gpa: AtomicU64::new(0),
            replaced: AtomicU64::new(witness_address(patched).unwrap_or(0)),
            search: Mutex::default(),
        }
    }

    /// Saves the text of the loaded kernel, the location of a kernel that the guest has started
    /// itself, and the guest-physical address of a replaced RDPMC of the running kernel.
    pub fn save(&self, saved: &mut SavedGuestKernel) {
        let text = self.loaded.iter().map(|text| SavedText {
            virt: text.virt,
            phys: text.phys,
            bytes: text.len_bytes,
        });
        saved.text = text.collect();
        let lstar = self.lstar.load(Ordering::Acquire);
        saved.restarted = (lstar != 0).then(|| SavedRunningKernel {
            lstar,
            lstar_gpa: self.lstar_gpa.load(Ordering::Relaxed),
        });
        saved.witness = self.replaced.load(Ordering::Relaxed);
    }

    /// Restores the state saved by [`Self::save`]. The text of the loaded kernel must be the same
    /// as in the snapshot.
    pub fn restore(&self, saved: &SavedGuestKernel) {
        let SavedRunningKernel { lstar, lstar_gpa } = saved.restarted.unwrap_or_default();
        self.lstar_gpa.store(lstar_gpa, Ordering::Relaxed);
        self.lstar.store(lstar, Ordering::Release);
        self.replaced.store(saved.witness, Ordering::Relaxed);
    }

    /// Checks which kernel a vCPU is running, given its SYSCALL entry point `lstar`, and patches
    /// the kernel if it is a new one. Returns `true` if the kernel is new.
    pub fn patch_if_new(&self, regs: &GuestRegs, lstar: u64) -> bool {
        if lstar < KERNEL_MAP {
            return false;
        }
        let Some(gpa) = self.physical(regs, lstar) else {
            return false;
        };
        if self.is_known(lstar, gpa) && self.is_unchanged() {
            return false;
        }
        // If another vCPU is searching, this vCPU does not wait.
        let Ok(mut search) = self.search.try_lock() else {
            return false;
        };
        let same_place = self.is_known(lstar, gpa);
        if same_place && self.is_unchanged()
            || search
                .last
                .is_some_and(|last| last.elapsed() < MIN_SEARCH_INTERVAL)
        {
            return false;
        }
        let began = Instant::now();
        let KernelChanges { hidden, rdpmc: found } = self.patch_kernel(regs, lstar);
        search.last = Some(Instant::now());
        let sites = found.as_deref().unwrap_or_default();
        if same_place && sites.is_empty() && search.tries < MAX_TRIES {
            search.tries += 1;
            return true;
        }
        search.tries = 0;
        self.replaced
            .store(witness_address(sites).unwrap_or(0), Ordering::Relaxed);
        self.lstar_gpa.store(gpa, Ordering::Relaxed);
        self.lstar.store(lstar, Ordering::Release);
        if search.log_lines < MAX_LOG_LINES {
            search.log_lines += 1;
            self.log_search(&found, began.elapsed());
            uncounted::log_hidden(&hidden);
        }
        true
    }

    fn is_known(&self, lstar: u64, gpa: u64) -> bool {
        match self.lstar.load(Ordering::Acquire) {
            0 => self.loaded.iter().any(|text| {
                lstar.wrapping_sub(text.virt) < text.len_bytes && lstar - text.virt + text.phys == gpa
            }),
            known => known == lstar && self.lstar_gpa.load(Ordering::Relaxed) == gpa,
        }
    }

    /// Returns `true` if the trap is still in place at the known address of a replaced RDPMC.
    fn is_unchanged(&self) -> bool {
        match self.replaced.load(Ordering::Relaxed) {
            0 => true,
            gpa => self.memory.read_obj::<[u8; 2]>(GuestAddress(gpa)).ok() == Some(TRAP),
        }
    }

    fn log_search(&self, found: &Result<Vec<RdpmcSite>, PatchSearchError>, took: Duration) {
        let otherwise = if self.emulated_anyway {
            "it is served at its handler of #GP"
        } else {
            "its counters read what nobody counted: boot it with --kernel instead"
        };
        match found {
            Ok(sites) if !sites.is_empty() => {
                for site in sites {
                    guest_log!(
                        Info,
                        "the guest has started another kernel: RDPMC at {:#x} ({}) replaced, after {:.0?}",
                        site.virt,
                        site.location(),
                        took
                    );
                }
            }
            Ok(_) => {
                guest_log!(
                    Warn,
                    "the guest has started another kernel, in which no RDPMC was found: {otherwise}"
                );
            }
            Err(e) => {
                guest_log!(
                    Warn,
                    "the guest has started another kernel, which cannot be searched for RDPMC \
                    ({}): {otherwise}",
                    error_line(&e)
                );
            }
        }
    }

    fn physical(&self, regs: &GuestRegs, linear: u64) -> Option<u64> {
        let mut budget = GuestMemoryReadBudget::new(TRANSLATE_READS, None);
        AddressSpace::of(&self.memory, regs)
            .ok()?
            .physical(linear, &mut budget)
            .ok()
    }

    /// Patches the kernel whose SYSCALL entry point is `lstar`.
    fn patch_kernel(&self, regs: &GuestRegs, lstar: u64) -> KernelChanges {
        match locate::memory_around(&self.memory, regs, lstar) {
            Ok((start, bytes)) => KernelChanges {
                // The event tables come first, because their search needs no symbols.
                hidden: self
                    .uncounted
                    .hide_running(&self.memory, start, &bytes, |linear| self.physical(regs, linear)),
                rdpmc: self.patch(regs, start, bytes),
            },
            Err(e) => KernelChanges {
                hidden: Vec::new(),
                rdpmc: Err(e.into()),
            },
        }
    }

    /// Replaces RDPMC in a kernel whose memory contains `bytes` from the address `start` on.
    fn patch(
        &self,
        regs: &GuestRegs,
        start: u64,
        bytes: Vec<u8>,
    ) -> Result<Vec<RdpmcSite>, PatchSearchError> {
        let symbols = kallsyms::find(&bytes).map_err(KernelLocateError::from)?;
        let kernel = KernelCopy {
            start,
            bytes,
            symbols,
        };
        let text = kernel.text();
        if text.is_empty() {
            return Err(PatchSearchError::NoText);
        }
        let pairs = text
            .iter()
            .flat_map(|part| memchr::memmem::find_iter(part.bytes, &RDPMC));
        if pairs.take(MAX_PAIRS + 1).count() > MAX_PAIRS {
            return Err(PatchSearchError::Pairs);
        }
        let mut sites = find(
            &text,
            &kernel.symbols,
            &kernel.boundaries(),
            InstructionBitness::Only64,
        );
        for site in &mut sites {
            match self.physical(regs, site.virt) {
                Some(gpa) => site.phys = gpa,
                None => site.length = 0,
            }
        }
        sites.retain(|site| site.length != 0);
        // Registers the sites before the patch, because a vCPU may execute a trap immediately.
        self.sites.add(&sites);
        sites.retain(|site| self.replace(regs, site));
        Ok(sites)
    }

    /// Replaces one RDPMC, which another vCPU may execute concurrently. The two bytes of the
    /// instruction may be in different pages.
    fn replace(&self, regs: &GuestRegs, site: &RdpmcSite) -> bool {
        let last = site.virt + u64::from(site.length) - 1;
        let [Some(first), Some(second)] =
            [last - 1, last].map(|at| self.physical(regs, at).map(GuestAddress))
        else {
            return false;
        };
        let memory = &self.memory;
        // The guest may change its code concurrently. If both bytes are in one word, they are
        // compared and written atomically.
        if second == first.unchecked_add(1) && first.0 % WORD_BYTES != WORD_BYTES - 1 {
            return replace_at_once(memory, first).is_some();
        }
        // RDPMC and the trap have the same second byte, so writing the first byte replaces the
        // instruction.
        memory.read_obj::<u8>(second).ok() == Some(RDPMC[1])
            && memory.get_slice(first, 1).is_ok_and(|slice| {
                slice.get_atomic_ref::<AtomicU8>(0).is_ok_and(|byte| {
                    byte.compare_exchange(RDPMC[0], TRAP[0], Ordering::SeqCst, Ordering::SeqCst)
                        .is_ok()
                })
            })
    }
}

/// Atomically replaces the two bytes of an RDPMC at `at`, which must be in one word of
/// [`WORD_BYTES`]. Returns `None` if memory contains other bytes.
fn replace_at_once(memory: &GuestMemoryMmap, at: GuestAddress) -> Option<()> {
    let slice = memory
        .get_slice(GuestAddress(at.0 - at.0 % WORD_BYTES), size_of::<u64>())
        .ok()?;
    let offset = usize::try_from(at.0 % WORD_BYTES).ok()?;
    let word = slice.get_atomic_ref::<AtomicU64>(0).ok()?;
    // The guest may change adjacent bytes concurrently, because its kernel also patches code.
    let replaced = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| {
        let mut bytes = old.to_le_bytes();
        let pair = bytes.get_mut(offset..offset + 2)?;
        if pair != RDPMC {
            return None;
        }
        pair.copy_from_slice(&TRAP);
        Some(u64::from_le_bytes(bytes))
    });
    replaced.ok().map(|_| ())
}

/// Returns the guest-physical address of an RDPMC among `sites` whose trap shows whether their
/// kernel is still running, or `None` if none is suitable.
fn witness_address(sites: &[RdpmcSite]) -> Option<u64> {
    let site = sites
        .iter()
        .find(|site| site.symbol.as_ref().is_some_and(|(name, _)| name == READ_PMC))?;
    // Excludes an instruction that crosses a page boundary, because its pages may not be contiguous
    // in physical memory.
    Some(site.opcode()).filter(|gpa| gpa % PAGE_BYTES != PAGE_BYTES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event_tables::KernelTableEvent;
    use crate::sites::VcpuRdpmcSites;
    use crate::uncounted::KernelEventSupport;
    use test_support::kernels::kallsyms;
    use vpmu::Vendor;

    const START: u64 = 0xffff_ffff_8100_0000;
    /// Address of a function that reads a counter: `xor ecx, ecx; rdpmc; ret`.
    const READS: u64 = START + 0x40;
    const CODE: [u8; 5] = [0x31, 0xc9, 0x0f, 0x33, 0xc3];
    /// Address of a function with the two bytes of RDPMC in a constant: `mov eax, 330FH; ret`.
    const LOOKS_ALIKE: u64 = START + 0x80;
    const OTHER_CODE: [u8; 6] = [0xb8, 0x0f, 0x33, 0, 0, 0xc3];
    const LSTAR: u64 = START + 0xc0;
    const TEXT_END: u64 = START + 0x4000;
    /// Guest-physical addresses of the two kernels, one of which is mapped at [`START`].
    const FIRST: u64 = 2 << 20;
    const SECOND: u64 = 4 << 20;

    /// Returns the memory of a test kernel: its text, followed by its symbols.
    fn kernel(text: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut bytes = vec![0x90; (TEXT_END - START) as usize];
        let mut put = |at: u64, code: &[u8]| {
            let at = (at - START) as usize;
            bytes[at..at + code.len()].copy_from_slice(code);
        };
        put(READS, &CODE);
        put(LOOKS_ALIKE, &OTHER_CODE);
        put(LSTAR, &[0xc3]);
        text(&mut bytes);
        let fill: Vec<String> = (0..300).map(|n| format!("function_{n}")).collect();
        let mut symbols = vec![
            (START, "_stext"),
            (READS, "native_read_pmc"),
            (LOOKS_ALIKE, "looks_alike"),
            (LSTAR, "entry_SYSCALL_64"),
        ];
        symbols.extend(
            (0u64..)
                .map(|n| START + 0x1000 + 16 * n)
                .zip(fill.iter().map(String::as_str)),
        );
        symbols.push((TEXT_END, "_etext"));
        bytes.extend(kallsyms(&symbols));
        bytes
    }

    /// A host on which only cycles can be counted.
    #[derive(Debug)]
    struct OnlyCycles;

    impl KernelEventSupport for OnlyCycles {
        fn can_count(&self, event: KernelTableEvent, _: u64) -> bool {
            event == KernelTableEvent::Hardware(0)
        }

        fn can_count_topdown(&self) -> bool {
            false
        }

        fn missing_events(&self) -> Vec<&'static str> {
            Vec::new()
        }
    }

    fn only_cycles() -> Arc<UncountableEventSet> {
        Arc::new(UncountableEventSet::new(Vendor::Amd, Box::new(OnlyCycles), true))
    }

    struct Guest {
        memory: GuestMemoryMmap,
        sites: Arc<RdpmcSites>,
        running: RunningKernelPatcher,
        regs: GuestRegs,
    }

    impl Guest {
        /// Creates a guest that runs the loaded kernel at [`FIRST`].
        fn new() -> Self {
            let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap();
            let sites = RdpmcSites::new(&[]);
            let loaded = vec![KernelTextRange {
                virt: START,
                phys: FIRST,
                len_bytes: TEXT_END - START,
            }];
            let regs = GuestRegs {
                cr0: 1 << 31 | 1,
                cr3: 0x1000,
                cr4: 1 << 5,
                efer: 1 << 10 | 1 << 8,
                code64: true,
                ..GuestRegs::default()
            };
            let guest = Self {
                running: RunningKernelPatcher::new(
                    memory.clone(),
                    sites.clone(),
                    loaded,
                    &[],
                    false,
                    only_cycles(),
                ),
                memory,
                sites,
                regs,
            };
            for (table, slot, next) in [(0x1000, 511, 0x2003u64), (0x2000, 510, 0x3003)] {
                guest
                    .memory
                    .write_obj(next, GuestAddress(table + 8 * slot))
                    .unwrap();
            }
            guest.runs(FIRST);
            guest
        }

        /// Maps [`START`] to the kernel at `phys`, as if the guest ran it.
        fn runs(&self, phys: u64) {
            let entry = GuestAddress(0x3000 + 8 * (START >> 21 & 0x1ff));
            self.memory.write_obj(phys | 0x83, entry).unwrap();
        }

        fn load(&self, phys: u64, kernel: &[u8]) {
            self.memory.write_slice(kernel, GuestAddress(phys)).unwrap();
        }

        fn look(&self) -> bool {
            self.running.patch_if_new(&self.regs, LSTAR)
        }

        /// Moves the last search into the past, as if the minimum interval had passed.
        fn later(&self) {
            self.running.search.lock().unwrap().last = None;
        }

        /// Returns the first five bytes of the counter-reading function in the kernel at `phys`.
        fn code(&self, phys: u64) -> [u8; 5] {
            self.memory.read_obj(GuestAddress(phys + READS - START)).unwrap()
        }

        fn knows(&self) -> bool {
            let mut sites = VcpuRdpmcSites::new(self.sites.clone());
            sites.in_kernel_half(READS + 2).is_some()
        }
    }

    const REPLACED: [u8; 5] = [0x31, 0xc9, TRAP[0], TRAP[1], 0xc3];

    /// In a kernel that the guest starts later, RDPMC is replaced, but not the same bytes inside
    /// another instruction. The loaded kernel is not modified.
    #[test]
    fn started_kernel_has_rdpmc_replaced() {
        let guest = Guest::new();
        for phys in [FIRST, SECOND] {
            guest.load(phys, &kernel(|_| {}));
        }
        assert!(!guest.look(), "the loaded one");
        assert_eq!((guest.code(FIRST), guest.knows()), (CODE, false));
        guest.runs(SECOND);
        assert!(guest.look());
        assert_eq!(
            (guest.code(SECOND), guest.code(FIRST)),
            (REPLACED, CODE),
            "in the kernel that runs, and not in the one that does not"
        );
        let alike = GuestAddress(SECOND + LOOKS_ALIKE - START);
        assert_eq!(guest.memory.read_obj::<[u8; 6]>(alike).unwrap(), OTHER_CODE);
        assert!(guest.knows());
        assert!(!guest.look(), "it is known now");
    }

    /// Uncountable events are removed from the tables of a kernel that the guest starts, even if
    /// the kernel cannot be searched for RDPMC.
    #[test]
    fn started_kernel_loses_uncountable_events() {
        const TABLE: u64 = 0x3000;
        const EVENTS: [u64; 10] = [0x76, 0xC0, 0xFF60, 0x964, 0xC2, 0xC3, 0, 0x287, 0x187, 0];
        const LEFT: [u64; 10] = [0x76, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let with_table = |text: &mut [u8]| {
            let words = EVENTS.into_iter().flat_map(u64::to_le_bytes);
            text[TABLE as usize..]
                .iter_mut()
                .zip(words)
                .for_each(|(to, from)| *to = from);
        };
        let guest = Guest::new();
        let there = |phys: u64| {
            guest
                .memory
                .read_obj::<[u64; 10]>(GuestAddress(phys + TABLE))
                .unwrap()
        };
        guest.load(FIRST, &kernel(with_table));
        guest.load(SECOND, &kernel(with_table));
        assert!(!guest.look(), "the loaded one");
        guest.runs(SECOND);
        assert!(guest.look());
        assert_eq!((there(FIRST), there(SECOND)), (EVENTS, LEFT));
        assert_eq!(guest.code(SECOND), REPLACED);

        let mut nameless = kernel(with_table);
        nameless.truncate((TEXT_END - START) as usize);
        guest.load(FIRST, &vec![0; 1 << 20]);
        guest.load(FIRST, &nameless);
        guest.runs(FIRST);
        guest.later();
        assert!(guest.look());
        assert_eq!((there(FIRST), guest.code(FIRST)), (LEFT, CODE));
    }

    /// The two bytes of RDPMC are replaced in one atomic write, even if the other bytes of the word
    /// change at the same time.
    #[test]
    fn replace_changes_only_two_bytes_of_word() {
        let guest = Guest::new();
        for offset in 0..WORD_BYTES - 1 {
            let at = GuestAddress(0x5000 + offset);
            let around: [u8; 8] = std::array::from_fn(|n| n as u8);
            guest.memory.write_obj(around, GuestAddress(0x5000)).unwrap();
            assert_eq!(replace_at_once(&guest.memory, at), None, "no RDPMC is there");
            guest.memory.write_obj(RDPMC, at).unwrap();
            assert_eq!(replace_at_once(&guest.memory, at), Some(()));
            let mut expected = around;
            expected[offset as usize..offset as usize + 2].copy_from_slice(&TRAP);
            assert_eq!(
                guest.memory.read_obj::<[u8; 8]>(GuestAddress(0x5000)).unwrap(),
                expected
            );
        }
        assert_eq!(
            replace_at_once(&guest.memory, GuestAddress(1 << 40)),
            None,
            "no memory is there"
        );
    }

    /// RDPMC at any alignment is replaced by writing only its first byte. The second byte, which
    /// may be in another word or page, is the same in RDPMC and in the trap.
    #[test]
    fn rdpmc_is_replaced_by_one_byte_at_any_alignment() {
        let guest = Guest::new();
        let replace = |virt: u64| {
            let site = RdpmcSite {
                virt,
                phys: 0,
                length: 2,
                prefix_len: 0,
                next_to_port_write: false,
                symbol: None,
            };
            guest.running.replace(&guest.regs, &site)
        };
        for offset in (0x100..0x110).chain(0xff0..0x1000) {
            let around = GuestAddress(FIRST + offset - 1);
            guest.memory.write_slice(&[0xAA; 4], around).unwrap();
            assert!(!replace(START + offset), "no RDPMC is there");
            guest
                .memory
                .write_obj(RDPMC, GuestAddress(FIRST + offset))
                .unwrap();
            assert!(replace(START + offset));
            assert_eq!(
                guest.memory.read_obj::<[u8; 4]>(around).unwrap(),
                [0xAA, TRAP[0], RDPMC[1], 0xAA],
                "{offset:#x}"
            );
        }
        // The second byte is in a page that is not mapped.
        let end = START + (2 << 20) - 1;
        guest
            .memory
            .write_obj(RDPMC[0], GuestAddress(FIRST + (2 << 20) - 1))
            .unwrap();
        assert!(!replace(end));
    }

    /// A new kernel at the address of the previous one has its RDPMC replaced once it is complete.
    #[test]
    fn kernel_at_previous_address_has_rdpmc_replaced() {
        let guest = Guest::new();
        guest.load(SECOND, &kernel(|_| {}));
        guest.runs(SECOND);
        assert!(guest.look());
        for _ in 0..2 {
            guest.later();
            assert!(!guest.look(), "it is the same");
            // While the new kernel is being copied, LSTAR still belongs to the old kernel. The
            // first searches then find an incomplete copy.
            guest.load(SECOND, &vec![0; 1 << 20]);
            assert!(guest.look());
            guest.load(SECOND, &kernel(|_| {}));
            assert!(!guest.look(), "too soon");
            assert_eq!(guest.code(SECOND), CODE);
            guest.later();
            assert!(guest.look());
            assert_eq!(guest.code(SECOND), REPLACED);
        }
    }

    /// A new kernel at the address of the loaded kernel is detected. If no valid kernel appears in
    /// memory, the number of searches is bounded.
    #[test]
    fn kernel_at_loaded_address_is_detected() {
        let mut guest = Guest::new();
        let read = RdpmcSite {
            virt: READS + 2,
            phys: FIRST + READS + 2 - START,
            length: 2,
            prefix_len: 0,
            next_to_port_write: false,
            symbol: Some((READ_PMC.to_owned(), 2)),
        };
        let loaded = guest.running.loaded.clone();
        guest.running = RunningKernelPatcher::new(
            guest.memory.clone(),
            guest.sites.clone(),
            loaded,
            &[read],
            false,
            only_cycles(),
        );
        guest.load(FIRST, &kernel(|_| {}));
        let opcode = GuestAddress(FIRST + READS + 2 - START);
        guest.memory.write_obj(TRAP, opcode).unwrap();
        assert!(!guest.look(), "the loaded one");
        guest.load(FIRST, &kernel(|_| {}));
        assert!(guest.look());
        assert_eq!(guest.code(FIRST), REPLACED);

        guest.load(FIRST, &vec![0; 1 << 20]);
        let searches = (0..100)
            .filter(|_| {
                guest.later();
                guest.look()
            })
            .count();
        assert_eq!(searches, MAX_TRIES as usize + 1);
    }

    /// At most one kernel is searched per second. A kernel that is not searched immediately,
    /// because the guest has just switched kernels, is searched later.
    #[test]
    fn kernel_searches_are_rate_limited() {
        let guest = Guest::new();
        for phys in [FIRST, SECOND] {
            guest.load(phys, &kernel(|_| {}));
        }
        guest.runs(SECOND);
        assert!(guest.look());
        guest.runs(FIRST);
        assert!(!guest.look());
        assert_eq!(guest.code(FIRST), CODE);
        guest.later();
        assert!(guest.look());
        assert_eq!(guest.code(FIRST), REPLACED);
    }

    /// A kernel without symbols, or with too many byte pairs 0F 33 in its text, is left unchanged
    /// and is not searched repeatedly.
    #[test]
    fn unsearchable_kernel_is_not_modified() {
        let guest = Guest::new();
        let full = kernel(|text| {
            for pair in text[0x2000..].chunks_exact_mut(2).take(MAX_PAIRS) {
                pair.copy_from_slice(&RDPMC);
            }
        });
        let mut nameless = kernel(|_| {});
        nameless.truncate((TEXT_END - START) as usize);
        for bytes in [full, nameless] {
            guest.runs(FIRST);
            guest.later();
            guest.look();
            guest.load(SECOND, &vec![0; 1 << 20]);
            guest.load(SECOND, &bytes);
            guest.runs(SECOND);
            guest.later();
            assert!(guest.look());
            let mut there = vec![0; bytes.len()];
            guest.memory.read_slice(&mut there, GuestAddress(SECOND)).unwrap();
            assert!(there == bytes && !guest.knows());
            guest.later();
            assert!(!guest.look(), "it is known that it cannot be searched");
        }
        // Addresses below the kernel image's range, and unmapped addresses.
        assert!(!guest.running.patch_if_new(&guest.regs, 0x40_0000));
        assert!(!guest.running.patch_if_new(&guest.regs, START + (4 << 20)));
    }
}
