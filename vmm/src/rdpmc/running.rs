//! Kernels that a guest starts itself, by kexec or kdump: their RDPMC is replaced where they lie in memory.
//!
//! LSTAR points into the kernel that runs. If it points to other memory than at the last look, another kernel runs. Its symbols and
//! unwind tables are in its memory, so what is known of a kernel that is loaded from a file is known of it, too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::sites::Sites;
use guest_profile::locate::{self, LocateError};
use guest_profile::paging::AddressSpace;
use guest_profile::{Budget, GuestRegs};
use kernel_images::rdpmc::{CodeBits, PatchedSite, RDPMC, TRAP, Text, TextRange, find};
use kernel_images::symbols::KernelSymbols;
use kernel_images::{kallsyms, orc};

/// Time between two searches: each copies the kernel, and a guest has a new one when it has booted.
const SEARCH_AGAIN: Duration = Duration::from_secs(1);
/// Lines about searches in the life of a VM.
const MOST_LINES: u32 = 64;
/// Byte pairs 0F 33 in a kernel's text of which each is looked at. Debian's kernels have some dozens; more are there to keep us busy.
const MOST_PAIRS: usize = 1024;
/// Reads of guest memory to find the physical address of one place.
const TRANSLATE_READS: u32 = 16;
/// Linux is in the top 2 GiB of the address space.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;

/// What replaces RDPMC in the kernels of a VM.
#[derive(Debug)]
pub struct RunningKernels {
    memory: GuestMemoryMmap,
    sites: Arc<Sites>,
    /// The text of the kernel that was loaded.
    loaded: Vec<TextRange>,
    /// RDPMC that is not replaced faults, and is served then.
    served_anyway: bool,
    /// LSTAR and its physical address at the last search; 0: the loaded kernel.
    lstar: AtomicU64,
    lstar_gpa: AtomicU64,
    search: Mutex<Search>,
}

#[derive(Debug, Default)]
struct Search {
    last: Option<Instant>,
    said: u32,
}

/// Why a kernel was not searched.
#[derive(Debug, thiserror::Error)]
enum SearchError {
    #[error(transparent)]
    Locate(#[from] LocateError),
    #[error("its symbols do not say where its text is")]
    NoText,
    #[error("its text has more than {MOST_PAIRS} byte pairs that could be one")]
    Pairs,
}

/// A part of a kernel's memory and what is known of it.
struct Kernel {
    start: u64,
    bytes: Vec<u8>,
    symbols: KernelSymbols,
}

impl Kernel {
    /// What lies between two symbols.
    fn span(&self, from: &str, to: &str) -> Option<(u64, &[u8])> {
        let from = self.symbols.by_name(from)?.address;
        let to = self.symbols.by_name(to)?.address;
        let offset = |at: u64| usize::try_from(at.checked_sub(self.start)?).ok();
        Some((from, self.bytes.get(offset(from)?..offset(to)?)?))
    }

    /// Its code.
    fn text(&self) -> Vec<Text<'_>> {
        [("_stext", "_etext"), ("_sinittext", "_einittext")]
            .iter()
            .filter_map(|(from, to)| self.span(from, to))
            // Where a byte is in physical memory is asked of the page tables.
            .map(|(virt, bytes)| Text {
                virt,
                phys: virt,
                bytes,
            })
            .collect()
    }

    /// Boundaries of instructions, from its unwind table.
    fn boundaries(&self) -> Vec<u64> {
        self.span("__start_orc_unwind_ip", "__stop_orc_unwind_ip")
            .map(|(at, ips)| orc::addresses(at, ips))
            .unwrap_or_default()
    }
}

impl RunningKernels {
    /// Of a VM whose first kernel's text is `loaded` and whose sites are `sites`.
    pub fn new(
        memory: GuestMemoryMmap,
        sites: Arc<Sites>,
        loaded: Vec<TextRange>,
        served_anyway: bool,
    ) -> Self {
        Self {
            memory,
            sites,
            loaded,
            served_anyway,
            lstar: AtomicU64::new(0),
            lstar_gpa: AtomicU64::new(0),
            search: Mutex::default(),
        }
    }

    /// Looks at the kernel that a vCPU runs, whose system calls go to `lstar`, and replaces RDPMC in it if it is another one. Whether
    /// it is.
    pub fn look(&self, regs: &GuestRegs, lstar: u64) -> bool {
        if lstar < KERNEL_MAP {
            return false;
        }
        let Some(gpa) = self.physical(regs, lstar) else {
            return false;
        };
        if self.is_known(lstar, gpa) {
            return false;
        }
        // A vCPU does not wait for the search of another.
        let Ok(mut search) = self.search.try_lock() else {
            return false;
        };
        if self.is_known(lstar, gpa) || search.last.is_some_and(|last| last.elapsed() < SEARCH_AGAIN) {
            return false;
        }
        let began = Instant::now();
        let found = self.patch(regs, lstar);
        search.last = Some(Instant::now());
        self.lstar_gpa.store(gpa, Ordering::Relaxed);
        self.lstar.store(lstar, Ordering::Release);
        if search.said < MOST_LINES {
            search.said += 1;
            self.say(&found, began.elapsed());
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

    fn say(&self, found: &Result<Vec<PatchedSite>, SearchError>, took: Duration) {
        let otherwise = if self.served_anyway {
            "it is served at its handler of #GP"
        } else {
            "its counters read what nobody counted: boot it with --kernel instead"
        };
        match found {
            Ok(sites) if !sites.is_empty() => {
                for site in sites {
                    log::info!(
                        "the guest has started another kernel: RDPMC at {:#x} ({}) replaced, after {:.0?}",
                        site.virt,
                        site.place(),
                        took
                    );
                }
            }
            Ok(_) => log::warn!("the guest has started another kernel; no RDPMC is found in it: {otherwise}"),
            Err(e) => {
                log::warn!(
                    "the guest has started another kernel; RDPMC is not looked for in it ({e}): {otherwise}"
                );
            }
        }
    }

    fn physical(&self, regs: &GuestRegs, linear: u64) -> Option<u64> {
        let mut budget = Budget::new(TRANSLATE_READS, None);
        AddressSpace::of(&self.memory, regs)
            .ok()?
            .physical(linear, &mut budget)
            .ok()
    }

    /// Finds RDPMC in the kernel around `lstar` and replaces it.
    fn patch(&self, regs: &GuestRegs, lstar: u64) -> Result<Vec<PatchedSite>, SearchError> {
        let (start, bytes) = locate::memory_around(&self.memory, regs, lstar)?;
        let symbols = kallsyms::find(&bytes).map_err(LocateError::from)?;
        let kernel = Kernel {
            start,
            bytes,
            symbols,
        };
        let text = kernel.text();
        if text.is_empty() {
            return Err(SearchError::NoText);
        }
        let pairs = text
            .iter()
            .flat_map(|part| memchr::memmem::find_iter(part.bytes, &RDPMC));
        if pairs.take(MOST_PAIRS + 1).count() > MOST_PAIRS {
            return Err(SearchError::Pairs);
        }
        let mut sites = find(&text, &kernel.symbols, &kernel.boundaries(), CodeBits::Only64);
        for site in &mut sites {
            match self.physical(regs, site.virt) {
                Some(gpa) => site.phys = gpa,
                None => site.length = 0,
            }
        }
        sites.retain(|site| site.length != 0);
        // Known before they can be executed.
        self.sites.add(&sites);
        sites.retain(|site| self.replace(regs, site));
        Ok(sites)
    }

    /// Replaces one. Its two bytes may be in two pages.
    fn replace(&self, regs: &GuestRegs, site: &PatchedSite) -> bool {
        let last = site.virt + u64::from(site.length) - 1;
        let [Some(first), Some(second)] =
            [last - 1, last].map(|at| self.physical(regs, at).map(GuestAddress))
        else {
            return false;
        };
        let memory = &self.memory;
        let there = [first, second].map(|at| memory.read_obj::<u8>(at).ok());
        // If another vCPU is just there, it sees the old pair, a write to port 33H, or the new pair.
        there == RDPMC.map(Some)
            && memory.write_obj(TRAP[0], first).is_ok()
            && memory.write_obj(TRAP[1], second).is_ok()
    }
}
