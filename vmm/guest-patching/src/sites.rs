//! Locations of RDPMC instructions that a trap has replaced (sites). A port write is treated as
//! RDPMC only at such a location.
//!
//! At the exit of a port write, RIP is at the instruction, or after it if KVM has already emulated
//! the instruction. A site in a Linux kernel is identified by its linear address, because programs
//! cannot use the upper half of the address space. Any other site is identified by its physical
//! address.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use snapshot::state::SavedRdpmcSite;

use crate::finder::{MAX_INSTRUCTION_BYTES, RDPMC, RdpmcSite};

/// Maximum number of sites. A kernel has one to four, and sites of previous kernels are retained
/// when the guest starts another kernel.
const MAX_SITES: usize = 4096;
const UPPER_HALF: u64 = 1 << 63;

/// An RDPMC instruction that a trap has replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReplacedRdpmc {
    virt: u64,
    phys: u64,
    length: u8,
    lead: u8,
    next_to_port_write: bool,
}

/// The replaced RDPMC instruction whose trap caused a port write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TriggeredRdpmcSite {
    /// Address of the first byte of the instruction, derived from the RIP at the exit.
    pub start: u64,
    /// Length of the RDPMC instruction, in bytes.
    pub length: u8,
    /// `true` if an adjacent OUT instruction of the guest itself may have caused the port write
    /// instead.
    pub ambiguous: bool,
}

impl TriggeredRdpmcSite {
    /// Returns the address of the instruction after the RDPMC.
    pub fn next_rip(self) -> u64 {
        self.start.wrapping_add(self.length.into())
    }
}

/// All RDPMC instructions of a VM that traps have replaced, shared by its vCPUs.
#[derive(Debug, Default)]
pub struct RdpmcSites {
    version: AtomicU32,
    list: Mutex<Arc<[ReplacedRdpmc]>>,
}

impl RdpmcSites {
    /// Creates the list of a VM from the replaced RDPMC instructions of its loaded kernel.
    pub fn new(sites: &[RdpmcSite]) -> Arc<Self> {
        let all = Self::default();
        all.add(sites);
        Arc::new(all)
    }

    /// Adds the replaced RDPMC instructions of a kernel that the guest has started.
    pub fn add(&self, sites: &[RdpmcSite]) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = sites
            .iter()
            .map(|site| ReplacedRdpmc {
                virt: site.virt,
                phys: site.phys,
                length: site.length,
                lead: site.prefix_len,
                next_to_port_write: site.next_to_port_write,
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
        all.truncate(MAX_SITES);
        *list = all.into();
        self.version.fetch_add(1, Ordering::Release);
    }
}

impl RdpmcSites {
    /// Returns the replaced RDPMC instructions for a snapshot.
    pub fn save(&self) -> Vec<SavedRdpmcSite> {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let sites = list.iter().map(|site| SavedRdpmcSite {
            virt: site.virt,
            phys: site.phys,
            length: site.length,
            lead: site.lead,
            next_to_port_write: site.next_to_port_write,
        });
        sites.collect()
    }
}

/// Converts the sites of a snapshot to [`RdpmcSite`] values without symbols. Returns `None` for
/// more sites than a VM can have, or for an instruction of an impossible length.
pub fn from_saved(saved: &[SavedRdpmcSite]) -> Option<Vec<RdpmcSite>> {
    let possible = saved.len() <= MAX_SITES
        && saved.iter().all(|site| {
            let (length, lead) = (usize::from(site.length), usize::from(site.lead));
            length >= RDPMC.len()
                && length + lead <= MAX_INSTRUCTION_BYTES
                && site.phys.checked_sub(lead as u64).is_some()
                && site.phys.checked_add(length as u64).is_some()
        });
    possible.then(|| {
        let sites = saved.iter().map(|site| RdpmcSite {
            virt: site.virt,
            phys: site.phys,
            length: site.length,
            prefix_len: site.lead,
            next_to_port_write: site.next_to_port_write,
            symbol: None,
        });
        sites.collect()
    })
}

/// Per-vCPU copy of [`RdpmcSites`], which a vCPU reads without a lock unless the list has changed.
#[derive(Debug)]
pub struct VcpuRdpmcSites {
    shared: Arc<RdpmcSites>,
    version: u32,
    list: Arc<[ReplacedRdpmc]>,
}

impl VcpuRdpmcSites {
    /// Creates a vCPU's copy of `shared`. Each access updates the copy first if `shared` has
    /// changed.
    pub fn new(shared: Arc<RdpmcSites>) -> Self {
        Self {
            shared,
            // Differs from every list's version, because the first version is 1.
            version: 0,
            list: Arc::default(),
        }
    }

    fn list(&mut self) -> &[ReplacedRdpmc] {
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

    /// Returns `true` if no RDPMC instruction of the VM is replaced.
    pub fn is_empty(&mut self) -> bool {
        self.list().is_empty()
    }

    /// Returns the replaced RDPMC in a Linux kernel whose trap caused a port write, given the
    /// vCPU's `rip` at the exit. The instruction is identified by its linear address.
    pub fn in_kernel_half(&mut self, rip: u64) -> Option<TriggeredRdpmcSite> {
        if rip & UPPER_HALF == 0 {
            return None;
        }
        self.list()
            .iter()
            .find_map(|site| site.hit(rip, rip.wrapping_sub(site.virt)))
    }

    /// Returns the replaced RDPMC whose trap caused a port write, given the vCPU's `rip` at the
    /// exit. The instruction is identified by its physical address and may be at any linear
    /// address.
    ///
    /// `long` is `true` if the vCPU is executing 64-bit code. `physical` returns the guest-physical
    /// address of the byte at a given distance before RIP.
    pub fn in_memory(
        &mut self,
        rip: u64,
        long: bool,
        mut physical: impl FnMut(u64) -> Option<u64>,
    ) -> Option<TriggeredRdpmcSite> {
        let here = physical(0)?;
        self.list().iter().find_map(|site| {
            let (phys, length) = site.address_and_length(long);
            let past = if here == phys {
                0
            } else if physical(length.into()) == Some(phys) {
                length.into()
            } else {
                return None;
            };
            Some(TriggeredRdpmcSite {
                start: rip.wrapping_sub(past),
                length,
                ambiguous: site.next_to_port_write,
            })
        })
    }

    /// Returns the length of the replaced RDPMC at a guest-physical address, or `None` if there is
    /// none.
    pub fn length_at(&mut self, gpa: u64) -> Option<u8> {
        // The 64-bit length applies, because #GP is intercepted only in 64-bit kernels and their
        // programs.
        self.list().iter().find_map(|site| {
            let (phys, length) = site.address_and_length(true);
            (phys == gpa).then_some(length)
        })
    }
}

impl ReplacedRdpmc {
    /// Returns the guest-physical address and the length of the instruction. In 64-bit code
    /// (`long`), the instruction includes prefixes that are separate instructions in 32-bit code.
    fn address_and_length(&self, long: bool) -> (u64, u8) {
        if long {
            (self.phys - u64::from(self.lead), self.length + self.lead)
        } else {
            (self.phys, self.length)
        }
    }

    /// Returns this site as the cause of a port write if `rip` is at the start or the end of the
    /// instruction. `past` is the distance of `rip` from the start, in bytes.
    fn hit(&self, rip: u64, past: u64) -> Option<TriggeredRdpmcSite> {
        let length = u64::from(self.length);
        (past == 0 || past == length).then(|| TriggeredRdpmcSite {
            start: rip.wrapping_sub(past),
            length: self.length,
            ambiguous: self.next_to_port_write,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(virt: u64, phys: u64, length: u8) -> RdpmcSite {
        RdpmcSite {
            virt,
            phys,
            length,
            prefix_len: 0,
            next_to_port_write: false,
            symbol: None,
        }
    }

    const VIRT: u64 = 0xffff_ffff_8100_0100;

    /// A port write is attributed to a replaced RDPMC only if RIP is at the RDPMC or at the next
    /// instruction.
    #[test]
    fn site_matches_only_its_own_address() {
        let mut sites = VcpuRdpmcSites::new(RdpmcSites::new(&[site(VIRT, 0x100_0100, 3)]));
        for past in 0..8u64 {
            let hit = sites.in_kernel_half(VIRT + past);
            assert_eq!(hit.is_some(), past == 0 || past == 3, "{past}");
            assert!(hit.is_none_or(|hit| hit.start == VIRT && hit.next_rip() == VIRT + 3));
        }
        assert_eq!(sites.in_kernel_half(VIRT - 1), None);
        let mut none = VcpuRdpmcSites::new(RdpmcSites::new(&[]));
        assert_eq!(none.in_kernel_half(VIRT), None);
        assert_eq!(none.in_memory(VIRT, true, Some), None);
    }

    /// A replaced RDPMC in the lower half of the address space is identified by its physical
    /// address.
    #[test]
    fn lower_half_site_is_matched_by_physical_address() {
        let mut sites = VcpuRdpmcSites::new(RdpmcSites::new(&[site(0x40_0100, 0x40_0100, 2)]));
        assert_eq!(sites.in_kernel_half(0x40_0100), None);
        // The same memory is mapped at another linear address.
        let rip = 0x7f00_0000_0100u64;
        let mapped = |back: u64| Some(0x40_0100 - back);
        assert_eq!(sites.in_memory(rip, true, mapped).map(|hit| hit.start), Some(rip));
        let behind = |back: u64| Some(0x40_0102 - back);
        assert_eq!(
            sites.in_memory(rip, true, behind).map(|hit| hit.start),
            Some(rip - 2)
        );
        // Another page is mapped at the same linear address.
        assert_eq!(sites.in_memory(0x40_0100, true, |_| Some(0x80_0100)), None);
        assert_eq!(sites.in_memory(0x40_0100, true, |_| None), None);
    }

    /// The bytes of INC and DEC in 32-bit code are prefixes in 64-bit code. The start address and
    /// the length of a replaced RDPMC therefore depend on the mode of the vCPU.
    #[test]
    fn rex_prefix_belongs_to_site_in_64bit_mode() {
        let mut rex = site(0x40_0101, 0x40_0101, 2);
        rex.prefix_len = 1;
        let mut sites = VcpuRdpmcSites::new(RdpmcSites::new(&[rex]));
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

    #[test]
    fn site_with_rex_prefix_survives_snapshot() {
        let mut rex = site(0x40_0101, 0x40_0101, 2);
        rex.prefix_len = 1;
        let saved = RdpmcSites::new(std::slice::from_ref(&rex)).save();
        assert_eq!(from_saved(&saved), Some(vec![rex]));
        let impossible = |change: fn(&mut SavedRdpmcSite)| {
            let mut saved = saved.clone();
            change(&mut saved[0]);
            from_saved(&saved)
        };
        assert_eq!(impossible(|site| site.length = 1), None);
        assert_eq!(impossible(|site| site.lead = 14), None);
        assert_eq!(impossible(|site| site.phys = 0), None);
        assert_eq!(impossible(|site| site.phys = u64::MAX), None);
    }

    /// RDPMC instructions replaced in a later kernel are immediately visible to all vCPUs. The
    /// number of replaced instructions is bounded.
    #[test]
    fn sites_of_later_kernel_are_visible_and_bounded() {
        let shared = RdpmcSites::new(&[site(VIRT, 0x100_0100, 2)]);
        let mut sites = VcpuRdpmcSites::new(shared.clone());
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
        assert_eq!(sites.list().len(), MAX_SITES);
        assert!(sites.in_kernel_half(VIRT + 16 * 9999).is_some());
    }
}
