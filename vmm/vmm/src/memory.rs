//! Guest memory: one or two mappings, and the memory map for the guest.
//!
//! RAM starts at guest-physical 0. RAM beyond [`MMIO_HOLE_START`] continues at 4 GiB, so the
//! addresses of the local APIC, the I/O APIC and firmware remain free.
#![expect(unsafe_code, reason = "sysinfo(2)")]

pub mod available;
pub mod backing;
pub mod dirty;
pub mod touched;

use std::fs::File;
use std::io::{self, Seek as _};
use std::sync::Arc;

use thiserror::Error;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryMmap};

use available::HostMemoryLimit;
use backing::MemoryBackingError;
pub use backing::{HugePages, MemoryBackingConfig};

use crate::kvm::memslot::{MemorySlotError, MemorySlots};
use crate::kvm::vm_fd::VmFd;

/// Minimum size of guest RAM in bytes.
pub const MIN_RAM_BYTES: u64 = 16 << 20;
/// Start of the hole in RAM below 4 GiB, at 3.25 GiB. No address between here and 4 GiB is RAM.
pub const MMIO_HOLE_START: u64 = 0xD000_0000;
/// End address of the hole in RAM below 4 GiB, exclusive.
pub const MMIO_HOLE_END: u64 = 1 << 32;
/// Start of the extended BIOS data area, which ends the guest's conventional memory.
pub const EBDA_START: u64 = 0x9_FC00;
/// Start of extended memory, at 1 MiB. No address from [`EBDA_START`] to here is usable RAM.
pub const HIGH_RAM_START: u64 = 0x10_0000;
/// Granularity of guest memory sizes, in bytes.
pub const RAM_GRANULE_BYTES: u64 = 4096;

/// Error when allocating guest memory. A message is one line that names the problem, the limit and
/// the remedy.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The size is less than [`MIN_RAM_BYTES`].
    #[error("guest memory of {size_bytes} bytes must be at least 16 MiB; use --memory 16M or more")]
    TooSmall {
        /// Requested size in bytes.
        size_bytes: u64,
    },
    /// The size is not a multiple of the page size.
    #[error("guest memory of {size_bytes} bytes is not a multiple of 4096 bytes; round it up")]
    NotAligned {
        /// Requested size in bytes.
        size_bytes: u64,
    },
    /// The size exceeds the host's RAM and swap.
    #[error(
        "guest memory of {} MiB is more than this host has ({} MiB of RAM and swap); use a smaller --memory",
        size_bytes >> 20,
        host_bytes >> 20
    )]
    MoreThanHost {
        /// Requested size in bytes.
        size_bytes: u64,
        /// RAM and swap of the host in bytes.
        host_bytes: u64,
    },
    /// The highest guest address exceeds the processor's physical address width.
    #[error(
        "guest memory of {} MiB needs {bits_needed} physical address bits but this processor has {bits}; use a smaller --memory",
        size_bytes >> 20
    )]
    BeyondAddressBits {
        /// Requested size in bytes.
        size_bytes: u64,
        /// Number of address bits that this size of guest memory needs.
        bits_needed: u32,
        /// Number of physical address bits of the host's processor.
        bits: u32,
    },
    /// The host rejected the mapping of guest memory.
    #[error("cannot map {} MiB of guest memory; free memory on the host or use a smaller --memory", size_bytes >> 20)]
    Map {
        /// Requested size in bytes.
        size_bytes: u64,
        /// Reason why the host rejected the mapping.
        #[source]
        source: MemoryBackingError,
    },
    /// The host cannot provide the requested huge pages.
    #[error(transparent)]
    HugePages(MemoryBackingError),
    /// The size exceeds the limit of a control group.
    #[error(
        "guest memory of {} MiB exceeds the limit of this process ({limit}); use a smaller \
        --memory, or raise the limit",
        size_bytes >> 20
    )]
    MoreThanGroup {
        /// Requested size in bytes.
        size_bytes: u64,
        /// The limit of the control group, swap included.
        limit: HostMemoryLimit,
    },
    /// Preallocation was requested, and the size of guest memory exceeds the available memory.
    #[error(
        "--prealloc: guest memory of {} MiB exceeds the available memory ({limit}); free memory, \
        use a smaller --memory, or omit --prealloc",
        size_bytes >> 20
    )]
    MoreThanAvailable {
        /// Size of the guest memory to be preallocated, in bytes.
        size_bytes: u64,
        /// Available memory of the host or of a control group.
        limit: HostMemoryLimit,
    },
    /// The memory of a restored VM cannot be cleared.
    #[error("the memory of a VM that was restored from a snapshot cannot be cleared")]
    Restored,
    /// KVM rejected a memory slot.
    #[error(transparent)]
    Register(#[from] MemorySlotError),
}

/// Type of a range of guest-physical addresses, as in e820.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum MemoryRangeType {
    /// Usable RAM.
    Ram = 1,
    /// Reserved; the guest does not allocate it.
    Reserved = 2,
}

/// An entry of the guest's memory map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryMapEntry {
    /// First guest-physical address of the range.
    pub start: u64,
    /// Length of the range in bytes.
    pub len_bytes: u64,
    /// Type of the memory in the range.
    pub kind: MemoryRangeType,
}

/// Guest RAM: one or two mappings in the address space of the VMM.
#[derive(Clone, Debug)]
pub struct GuestRam {
    mem: GuestMemoryMmap,
    size_bytes: u64,
    kind: MemoryBackingConfig,
    /// `true` if the RAM is a private mapping of the memory file of a snapshot.
    restored: bool,
}

impl GuestRam {
    /// Maps `size_bytes` of RAM. Pages are allocated when the guest touches them.
    ///
    /// # Errors
    /// Returns a [`MemoryError`] if the size is invalid, exceeds a limit, or the host rejects the
    /// mapping.
    pub fn new(size_bytes: u64) -> Result<Self, MemoryError> {
        Self::with_backing(size_bytes, MemoryBackingConfig::default())
    }

    /// Maps `size_bytes` of RAM. `kind` selects the type of host memory. If preallocation is
    /// selected, the caller must call [`Self::fill`].
    ///
    /// # Errors
    /// Returns a [`MemoryError`] if the size is invalid, exceeds a limit, or the host rejects the
    /// mapping.
    #[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
    pub fn with_backing(size_bytes: u64, kind: MemoryBackingConfig) -> Result<Self, MemoryError> {
        if size_bytes < MIN_RAM_BYTES {
            return Err(MemoryError::TooSmall { size_bytes });
        }
        if !size_bytes.is_multiple_of(RAM_GRANULE_BYTES) {
            return Err(MemoryError::NotAligned { size_bytes });
        }
        let host_bytes = host_memory_bytes();
        if size_bytes > host_bytes {
            return Err(MemoryError::MoreThanHost {
                size_bytes,
                host_bytes,
            });
        }
        check_available(size_bytes, kind, available::limits())?;
        let bits = physical_address_bits();
        let end = ram_end(size_bytes);
        let bits_needed = 64 - (end - 1).leading_zeros();
        if bits_needed > bits {
            return Err(MemoryError::BeyondAddressBits {
                size_bytes,
                bits_needed,
                bits,
            });
        }
        let low = size_bytes.min(MMIO_HOLE_START);
        let mut ranges = vec![(GuestAddress(0), low as usize)];
        if size_bytes > low {
            ranges.push((GuestAddress(MMIO_HOLE_END), (size_bytes - low) as usize));
        }
        let mem = backing::map(&ranges, kind).map_err(|source| match source {
            MemoryBackingError::NoTransparent(_)
            | MemoryBackingError::NotWhole(_)
            | MemoryBackingError::TooFew { .. } => MemoryError::HugePages(source),
            source => MemoryError::Map { size_bytes, source },
        })?;
        Ok(GuestRam {
            mem,
            size_bytes,
            kind,
            restored: false,
        })
    }

    /// Replaces all RAM by a private mapping of the memory file of a snapshot, which must have the
    /// same size. A page is read from the file when it is first accessed. The file is never
    /// written.
    ///
    /// # Errors
    /// Returns [`MemoryError::Map`] if the host rejects the mapping.
    pub fn map_snapshot(&mut self, file: &File) -> Result<(), MemoryError> {
        let size_bytes = self.size_bytes;
        backing::map_file(&self.mem, file).map_err(|source| MemoryError::Map { size_bytes, source })?;
        self.restored = true;
        Ok(())
    }

    /// Maps the changed ranges of one or more diffs over the RAM of their base, which
    /// [`Self::map_snapshot`] must have mapped. `layers` contains, from the lowest to the highest
    /// diff, its memory file and its ranges: offset and length in bytes. A range has the same
    /// offset in RAM and in the file.
    ///
    /// # Errors
    /// Returns [`MemoryError::Map`] if the host rejects a mapping or the file cannot be read.
    pub fn map_changes<'a>(
        &mut self,
        layers: impl Iterator<Item = (&'a File, &'a [(u64, u64)])>,
    ) -> Result<(), MemoryError> {
        let size_bytes = self.size_bytes;
        backing::map_layers(&self.mem, layers).map_err(|source| MemoryError::Map { size_bytes, source })
    }

    /// Preallocates all pages, if preallocation was selected when the memory was created.
    ///
    /// # Errors
    /// Returns [`MemoryError::Map`] if the host has too little memory.
    pub fn fill(&self) -> Result<(), MemoryError> {
        backing::populate(&self.mem, self.kind).map_err(|source| MemoryError::Map {
            size_bytes: self.size_bytes,
            source,
        })
    }

    /// Zeroes all RAM, as after power-on. No other thread may access the RAM during the call.
    ///
    /// # Errors
    /// Returns [`MemoryError::Map`] if a system call fails, and [`MemoryError::Restored`] for
    /// memory of a snapshot, whose contents would reappear.
    pub fn clear(&self) -> Result<(), MemoryError> {
        if self.restored {
            return Err(MemoryError::Restored);
        }
        backing::clear(&self.mem, self.kind).map_err(|source| MemoryError::Map {
            size_bytes: self.size_bytes,
            source,
        })
    }

    /// Returns the mappings of RAM, which are accessed by guest-physical address.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.mem
    }

    /// Returns the size of the RAM in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns the guest-physical end address of the RAM below the MMIO hole, exclusive.
    pub fn low_end(&self) -> u64 {
        self.size_bytes.min(MMIO_HOLE_START)
    }

    /// Returns the guest-physical address of the byte at `offset` in RAM. Offsets in RAM do not
    /// count the hole below 4 GiB.
    pub fn address_of(&self, offset: u64) -> GuestAddress {
        let low_end = self.low_end();
        GuestAddress(if offset < low_end {
            offset
        } else {
            MMIO_HOLE_END + (offset - low_end)
        })
    }

    /// Reads the first `bytes` bytes of `file` into RAM at `offset`. The range must be contiguous
    /// in guest-physical memory, so it must not cross the hole below 4 GiB.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is too short, or if the range is not RAM.
    pub fn read_from(&self, offset: u64, mut file: &File, bytes: u64) -> io::Result<()> {
        file.rewind()?;
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        let address = self.address_of(offset);
        let read = self.mem.read_exact_volatile_from(address, &mut file, bytes);
        read.map_err(io::Error::other)
    }

    /// Writes `data` to RAM at `offset`. The range must be contiguous in guest-physical memory, so
    /// it must not cross the hole below 4 GiB.
    ///
    /// # Errors
    /// Returns an error if the range is not RAM.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let written = self.mem.write_slice(data, self.address_of(offset));
        written.map_err(io::Error::other)
    }

    /// Returns the size of the RAM above 4 GiB in bytes.
    pub fn high_bytes(&self) -> u64 {
        self.size_bytes - self.low_end()
    }

    /// Returns whether the `len_bytes` bytes at `start` are RAM and belong to one mapping.
    pub fn contains(&self, start: u64, len_bytes: u64) -> bool {
        let Some(end) = start.checked_add(len_bytes) else {
            return false;
        };
        end <= self.low_end()
            || (start >= MMIO_HOLE_END && end <= MMIO_HOLE_END + self.high_bytes() && self.high_bytes() > 0)
    }

    /// Returns the memory map that PC firmware would report: conventional memory, the reserved area
    /// below 1 MiB with the VMM's tables, extended memory, and memory above 4 GiB.
    pub fn map(&self) -> Vec<MemoryMapEntry> {
        let mut map = vec![
            MemoryMapEntry {
                start: 0,
                len_bytes: EBDA_START,
                kind: MemoryRangeType::Ram,
            },
            MemoryMapEntry {
                start: EBDA_START,
                len_bytes: HIGH_RAM_START - EBDA_START,
                kind: MemoryRangeType::Reserved,
            },
            MemoryMapEntry {
                start: HIGH_RAM_START,
                len_bytes: self.low_end() - HIGH_RAM_START,
                kind: MemoryRangeType::Ram,
            },
        ];
        if self.high_bytes() > 0 {
            map.push(MemoryMapEntry {
                start: MMIO_HOLE_END,
                len_bytes: self.high_bytes(),
                kind: MemoryRangeType::Ram,
            });
        }
        map
    }

    /// Registers every mapping with a VM as a memory slot. The slots are removed when the returned
    /// value is dropped.
    ///
    /// # Errors
    /// Returns [`MemoryError::Register`] if KVM rejects a slot.
    pub fn register(&self, vm: &Arc<VmFd>) -> Result<MemorySlots, MemoryError> {
        Ok(MemorySlots::new(vm.clone(), self.mem.clone())?)
    }
}

/// Returns the guest-physical end address of RAM of `size_bytes`, exclusive.
fn ram_end(size_bytes: u64) -> u64 {
    if size_bytes <= MMIO_HOLE_START {
        size_bytes
    } else {
        MMIO_HOLE_END.saturating_add(size_bytes - MMIO_HOLE_START)
    }
}

/// Rejects a guest memory size that exceeds a hard limit of the host. With preallocation, also
/// rejects a size that exceeds the available memory. Without it, only a message is logged, because
/// the guest may not use all of its memory.
fn check_available(
    size_bytes: u64,
    kind: MemoryBackingConfig,
    limits: available::HostMemoryLimits,
) -> Result<(), MemoryError> {
    if kind.huge_pages == HugePages::Reserved {
        // These limits do not apply to reserved huge pages.
        return Ok(());
    }
    if let Some(limit) = limits.limit.filter(|limit| size_bytes > limit.bytes) {
        return Err(MemoryError::MoreThanGroup { size_bytes, limit });
    }
    match limits.available.filter(|limit| size_bytes > limit.bytes) {
        Some(limit) if kind.prealloc => Err(MemoryError::MoreThanAvailable { size_bytes, limit }),
        Some(limit) => {
            log::warn!(
                "guest memory of {} MiB exceeds the available memory ({limit}); if the guest uses \
                all of it, the kernel may kill this VM",
                size_bytes >> 20
            );
            Ok(())
        }
        None => Ok(()),
    }
}

/// Returns the RAM and swap of this host in bytes (sysinfo(2)).
fn host_memory_bytes() -> u64 {
    // SAFETY: sysinfo is a plain C struct for which all zeroes is a valid value.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is a valid, writable struct sysinfo for the duration of the call.
    if unsafe { libc::sysinfo(&mut info) } != 0 {
        return u64::MAX;
    }
    let unit = u64::from(info.mem_unit.max(1));
    (info.totalram as u64)
        .saturating_add(info.totalswap as u64)
        .saturating_mul(unit)
}

/// Returns the physical address width of this host's processor in bits (CPUID
/// 8000_0008H:`EAX[7:0]`; 36 if not reported).
fn physical_address_bits() -> u32 {
    use std::arch::x86_64::__cpuid;
    if __cpuid(0x8000_0000).eax < 0x8000_0008 {
        return 36;
    }
    __cpuid(0x8000_0008).eax & 0xff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_size_out_of_range_is_rejected() {
        assert!(matches!(
            GuestRam::new(MIN_RAM_BYTES - 4096),
            Err(MemoryError::TooSmall { .. })
        ));
        assert!(matches!(
            GuestRam::new(MIN_RAM_BYTES + 1),
            Err(MemoryError::NotAligned { .. })
        ));
        let err = GuestRam::new(1 << 56).unwrap_err();
        assert!(err.to_string().contains("more than this host has"), "{err}");
    }

    /// Missing huge pages are reported first, because the advice about the memory size does not
    /// help if huge pages are not reserved.
    #[test]
    fn missing_huge_pages_are_reported_first() {
        let kind = MemoryBackingConfig {
            huge_pages: HugePages::Reserved,
            ..MemoryBackingConfig::default()
        };
        let odd = GuestRam::with_backing(MIN_RAM_BYTES + RAM_GRANULE_BYTES, kind).map(|_| ());
        let said = odd.unwrap_err().to_string();
        assert!(said.starts_with("--hugepages 2M: "), "{said}");
    }

    #[test]
    fn memory_above_hard_limit_is_rejected() {
        let limit = |mib: u64| {
            Some(HostMemoryLimit {
                bytes: mib << 20,
                group: Some("/sys/fs/cgroup/vms".into()),
            })
        };
        let now = MemoryBackingConfig {
            prealloc: true,
            ..MemoryBackingConfig::default()
        };
        let check = |mib: u64, kind, most, left| {
            check_available(
                mib << 20,
                kind,
                available::HostMemoryLimits {
                    limit: most,
                    available: left,
                },
            )
            .map_err(|e| e.to_string())
        };
        let line = check(512, MemoryBackingConfig::default(), limit(256), limit(100)).unwrap_err();
        assert!(
            line.contains("256 MiB, the limit of the control group /sys/fs/cgroup/vms"),
            "{line}"
        );
        assert_eq!(
            check(512, MemoryBackingConfig::default(), None, limit(100)),
            Ok(())
        );
        let line = check(512, now, None, limit(100)).unwrap_err();
        assert!(line.contains("--prealloc") && line.contains("100 MiB"), "{line}");
        assert_eq!(check(100, now, limit(100), limit(100)), Ok(()));
    }

    #[test]
    fn small_guest_has_one_mapping() {
        let ram = GuestRam::new(MIN_RAM_BYTES).unwrap();
        assert_eq!(ram.low_end(), MIN_RAM_BYTES);
        assert_eq!(ram.high_bytes(), 0);
        let map = ram.map();
        assert_eq!(map.len(), 3);
        assert_eq!(map[2].start + map[2].len_bytes, MIN_RAM_BYTES);
        assert!(ram.contains(0, MIN_RAM_BYTES));
        assert!(!ram.contains(1, MIN_RAM_BYTES));
        assert!(!ram.contains(u64::MAX, 2));
        assert!(!ram.contains(MMIO_HOLE_END, 0x1000));
    }

    #[test]
    fn guest_above_the_hole_continues_at_four_gib() {
        // `ram_end` only computes the layout, so it can be tested for sizes that the host cannot
        // provide.
        assert_eq!(ram_end(MMIO_HOLE_START), MMIO_HOLE_START);
        assert_eq!(ram_end(MMIO_HOLE_START + 4096), MMIO_HOLE_END + 4096);
        let Ok(ram) = GuestRam::new(5 << 30) else {
            eprintln!("SKIP: this host has less than 5 GiB");
            return;
        };
        let map = ram.map();
        assert_eq!(map.len(), 4);
        assert_eq!(map[3].start, MMIO_HOLE_END);
        let ram_bytes: u64 = map.iter().map(|e| e.len_bytes).sum();
        assert_eq!(ram_bytes, 5 << 30);
        assert!(!ram.contains(MMIO_HOLE_START - 1, 2));
        assert!(ram.contains(MMIO_HOLE_END, ram.high_bytes()));
    }

    proptest::proptest! {
        /// For every size, the memory map contains each byte of RAM exactly once and in order, and
        /// only one reserved area. [`GuestRam::contains`] returns `true` for exactly the ranges
        /// that vm-memory can access in one piece.
        #[test]
        fn memory_map_matches_mappings(
            pages in (MIN_RAM_BYTES / 4096)..(MIN_RAM_BYTES / 4096 + 1000),
            accesses in proptest::collection::vec(
                (proptest::prelude::any::<bool>(), 0u64..1 << 13, 0u64..1 << 13), 1..40,
            ),
        ) {
            use vm_memory::GuestMemoryBackend;
            let size = pages * 4096;
            let ram = GuestRam::new(size).unwrap();
            let map = ram.map();
            let ends = map.iter().map(|entry| entry.start + entry.len_bytes);
            let starts = map.iter().skip(1).map(|entry| entry.start);
            assert!(ends.zip(starts).all(|(end, start)| end == start), "{map:?}");
            let of_ram = map.iter().filter(|entry| entry.kind == MemoryRangeType::Ram);
            let bytes: u64 = of_ram.map(|entry| entry.len_bytes).sum();
            assert_eq!(bytes, size - (HIGH_RAM_START - EBDA_START));
            for (near_end, at, len) in accesses {
                let start = if near_end { size - 4096 + at } else { at };
                let len = len + 1;
                let there = ram.memory().check_range(GuestAddress(start), len as usize);
                assert_eq!(ram.contains(start, len), there, "{start:#x}, {len:#x} bytes of {size:#x}");
            }
            assert!(!ram.contains(size, 1) && ram.contains(size - 1, 1));
            assert!(!ram.contains(size - 1, u64::MAX), "it does not wrap");
        }
    }

    /// Cleared memory reads as zero everywhere, and existing mappings of it remain valid.
    #[test]
    fn clear_zeroes_all_memory_and_keeps_mapping() {
        use vm_memory::{Bytes, GuestMemoryBackend};
        for shared in [false, true] {
            let kind = MemoryBackingConfig {
                shared,
                ..MemoryBackingConfig::default()
            };
            let ram = GuestRam::with_backing(MIN_RAM_BYTES, kind).unwrap();
            let host = ram.memory().get_host_address(GuestAddress(0)).unwrap();
            let places = [0, 4096, MIN_RAM_BYTES / 2, MIN_RAM_BYTES - 8];
            for at in places {
                ram.memory().write_obj(u64::MAX, GuestAddress(at)).unwrap();
            }
            ram.clear().unwrap();
            for at in places {
                assert_eq!(
                    ram.memory().read_obj::<u64>(GuestAddress(at)).unwrap(),
                    0,
                    "{at:#x}"
                );
            }
            assert_eq!(ram.memory().get_host_address(GuestAddress(0)).unwrap(), host);
            ram.memory().write_obj(7u64, GuestAddress(4096)).unwrap();
            assert_eq!(ram.memory().read_obj::<u64>(GuestAddress(4096)).unwrap(), 7);
        }
    }

    /// Each error is one line with the size, the limit and the remedy.
    #[test]
    fn memory_errors_name_size_limit_and_remedy() {
        for (size, said) in [
            (MIN_RAM_BYTES - 4096, ["16773120 bytes", "16 MiB", "--memory 16M"]),
            (MIN_RAM_BYTES + 512, ["16777728 bytes", "4096", "round it up"]),
            (!4095, ["17592186044415 MiB", "RAM and swap", "smaller --memory"]),
        ] {
            let line = GuestRam::new(size).unwrap_err().to_string();
            assert!(said.iter().all(|part| line.contains(part)), "{line}");
            assert!(!line.contains('\n'), "{line}");
        }
        let beyond = MemoryError::BeyondAddressBits {
            size_bytes: 1 << 40,
            bits_needed: 41,
            bits: 40,
        };
        let line = beyond.to_string();
        assert!(
            line.contains("41 physical address bits") && line.contains("has 40"),
            "{line}"
        );
    }
}
