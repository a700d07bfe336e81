//! Locations of replaced RDPMC instructions. A port write is treated as RDPMC only at such a site.
//!
//! The RIP at a port-write exit is at the instruction, or after it if KVM has already emulated the
//! instruction. A site in a Linux kernel is identified by its linear address, because programs
//! cannot use that half of the address space. Any other site is identified by its physical address.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kernel_images::rdpmc::PatchedSite;

/// Maximum number of sites. A kernel has one to four, and sites of previous kernels are retained
/// when the guest starts another kernel.
const MOST_SITES: usize = 4096;
const UPPER_HALF: u64 = 1 << 63;

/// A replaced RDPMC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Site {
    virt: u64,
    phys: u64,
    length: u8,
    lead: u8,
    beside_out: bool,
}

/// Replaced RDPMC to which a port write belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Address of the instruction, derived from the RIP of the exit.
    pub start: u64,
    /// Length of the instruction, in bytes.
    pub length: u8,
    /// The port write may come from an adjacent OUT of the guest itself.
    pub ambiguous: bool,
}

impl Hit {
    /// Returns the address of the next instruction.
    pub fn behind(self) -> u64 {
        self.start.wrapping_add(self.length.into())
    }
}

/// Replaced RDPMC instructions of a VM.
#[derive(Debug, Default)]
pub struct Sites {
    version: AtomicU32,
    list: Mutex<Arc<[Site]>>,
}

impl Sites {
    /// Creates the list with the sites of the loaded kernel.
    pub fn new(sites: &[PatchedSite]) -> Arc<Self> {
        let all = Self::default();
        all.add(sites);
        Arc::new(all)
    }

    /// Adds the sites of another kernel.
    pub fn add(&self, sites: &[PatchedSite]) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = sites
            .iter()
            .map(|site| Site {
                virt: site.virt,
                phys: site.phys,
                length: site.length,
                lead: site.lead,
                beside_out: site.beside_out,
            })
            .collect();
        let new = all.len();
        all.extend_from_slice(&list);
        let mut n = 0;
        all.retain(|site| {
            n += 1;
            n <= new
                || !sites
                    .iter()
                    .any(|other| (other.virt, other.phys) == (site.virt, site.phys))
        });
        all.truncate(MOST_SITES);
        *list = all.into();
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// Per-vCPU copy of [`Sites`], read without a lock.
#[derive(Debug)]
pub struct SitesOfVcpu {
    shared: Arc<Sites>,
    version: u32,
    list: Arc<[Site]>,
}

impl SitesOfVcpu {
    /// Creates a copy that follows changes of `shared`.
    pub fn new(shared: Arc<Sites>) -> Self {
        Self {
            shared,
            // No list has version 0: the first version is 1.
            version: 0,
            list: Arc::default(),
        }
    }

    fn list(&mut self) -> &[Site] {
        let version = self.shared.version.load(Ordering::Acquire);
        if version != self.version {
            self.version = version;
            self.list = self
                .shared
                .list
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
        }
        &self.list
    }

    /// Returns `true` if there are no replaced instructions.
    pub fn is_empty(&mut self) -> bool {
        self.list().is_empty()
    }

    /// Returns the site in a Linux kernel to which a port write with the vCPU at `rip` belongs,
    /// identified by its linear address.
    pub fn in_kernel_half(&mut self, rip: u64) -> Option<Hit> {
        if rip & UPPER_HALF == 0 {
            return None;
        }
        self.list()
            .iter()
            .find_map(|site| site.hit(rip, rip.wrapping_sub(site.virt)))
    }

    /// Returns the site to which a port write at `rip` belongs, at any linear address. `long`
    /// selects 64-bit code. `physical` translates an offset before RIP to a guest-physical address.
    pub fn in_memory(
        &mut self,
        rip: u64,
        long: bool,
        mut physical: impl FnMut(u64) -> Option<u64>,
    ) -> Option<Hit> {
        let here = physical(0)?;
        self.list().iter().find_map(|site| {
            let (phys, length) = site.place(long);
            let past = if here == phys {
                0
            } else if physical(length.into()) == Some(phys) {
                length.into()
            } else {
                return None;
            };
            Some(Hit {
                start: rip.wrapping_sub(past),
                length,
                ambiguous: site.beside_out,
            })
        })
    }

    /// Returns the length of the site at a physical address.
    pub fn length_at(&mut self, gpa: u64) -> Option<u8> {
        // #GP is intercepted only in 64-bit kernels and their programs.
        self.list().iter().find_map(|site| {
            let (phys, length) = site.place(true);
            (phys == gpa).then_some(length)
        })
    }
}

impl Site {
    /// Returns the physical address and length of the instruction.
    fn place(&self, long: bool) -> (u64, u8) {
        if long {
            (self.phys - u64::from(self.lead), self.length + self.lead)
        } else {
            (self.phys, self.length)
        }
    }

    /// Returns the site if the vCPU is at its beginning or end; `past` is the offset from the
    /// beginning.
    fn hit(&self, rip: u64, past: u64) -> Option<Hit> {
        let length = u64::from(self.length);
        (past == 0 || past == length).then(|| Hit {
            start: rip.wrapping_sub(past),
            length: self.length,
            ambiguous: self.beside_out,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(virt: u64, phys: u64, length: u8) -> PatchedSite {
        PatchedSite {
            virt,
            phys,
            length,
            lead: 0,
            beside_out: false,
            symbol: None,
        }
    }

    const VIRT: u64 = 0xffff_ffff_8100_0100;

    /// Only the address of the site or of the next instruction matches.
    #[test]
    fn only_the_place_itself_counts() {
        let mut sites = SitesOfVcpu::new(Sites::new(&[site(VIRT, 0x100_0100, 3)]));
        for past in 0..8u64 {
            let hit = sites.in_kernel_half(VIRT + past);
            assert_eq!(hit.is_some(), past == 0 || past == 3, "{past}");
            assert!(hit.is_none_or(|hit| hit.start == VIRT && hit.behind() == VIRT + 3));
        }
        assert_eq!(sites.in_kernel_half(VIRT - 1), None);
        let mut none = SitesOfVcpu::new(Sites::new(&[]));
        assert_eq!(none.in_kernel_half(VIRT), None);
        assert_eq!(none.in_memory(VIRT, true, Some), None);
    }

    /// In the lower half, a site is identified by its physical memory.
    #[test]
    fn the_lower_half_is_known_by_its_memory() {
        let mut sites = SitesOfVcpu::new(Sites::new(&[site(0x40_0100, 0x40_0100, 2)]));
        assert_eq!(sites.in_kernel_half(0x40_0100), None);
        // The same memory mapped at another address.
        let rip = 0x7f00_0000_0100u64;
        let mapped = |back: u64| Some(0x40_0100 - back);
        assert_eq!(sites.in_memory(rip, true, mapped).map(|hit| hit.start), Some(rip));
        let behind = |back: u64| Some(0x40_0102 - back);
        assert_eq!(
            sites.in_memory(rip, true, behind).map(|hit| hit.start),
            Some(rip - 2)
        );
        // Other memory at the same linear address.
        assert_eq!(sites.in_memory(0x40_0100, true, |_| Some(0x80_0100)), None);
        assert_eq!(sites.in_memory(0x40_0100, true, |_| None), None);
    }

    /// INC and DEC of 32-bit code are prefixes in 64-bit code, so the mode determines the beginning
    /// of the instruction.
    #[test]
    fn prefixes_of_one_mode_only_are_either() {
        let mut rex = site(0x40_0101, 0x40_0101, 2);
        rex.lead = 1;
        let mut sites = SitesOfVcpu::new(Sites::new(&[rex]));
        let mut hit = |rip: u64, long| {
            let found = sites.in_memory(rip, long, |back| Some(rip - back));
            found.map(|hit| (hit.start, hit.length))
        };
        for (rip, long, expected) in [
            (0x40_0100, true, Some((0x40_0100, 3))),
            (0x40_0103, true, Some((0x40_0100, 3))),
            (0x40_0101, true, None),
            (0x40_0100, false, None),
            (0x40_0101, false, Some((0x40_0101, 2))),
            (0x40_0103, false, Some((0x40_0101, 2))),
        ] {
            assert_eq!(hit(rip, long), expected, "{rip:#x} {long}");
        }
        assert_eq!(sites.length_at(0x40_0100), Some(3));
        assert_eq!(sites.length_at(0x40_0101), None);
    }

    /// The sites of a later kernel are visible to all vCPUs at once, and the list is bounded.
    #[test]
    fn later_kernels_are_added() {
        let shared = Sites::new(&[site(VIRT, 0x100_0100, 2)]);
        let mut sites = SitesOfVcpu::new(shared.clone());
        assert!(sites.in_kernel_half(VIRT).is_some());
        assert_eq!(sites.in_kernel_half(VIRT + 0x1000), None);
        for _ in 0..2 {
            shared.add(&[site(VIRT + 0x1000, 0x200_0100, 2)]);
        }
        assert!(sites.in_kernel_half(VIRT).is_some() && sites.in_kernel_half(VIRT + 0x1000).is_some());
        assert_eq!(sites.list().len(), 2);
        for n in 0..100u64 {
            let many: Vec<_> = (0..100)
                .map(|i| site(VIRT + 16 * (100 * n + i), 16 * i, 2))
                .collect();
            shared.add(&many);
        }
        assert_eq!(sites.list().len(), MOST_SITES);
        assert!(sites.in_kernel_half(VIRT + 16 * 9999).is_some());
    }
}
