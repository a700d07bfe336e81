//! Reads the memory of a VM that moves to another host, while its guest runs.
//!
//! The client drives an [`OutgoingMigration`] with requests, as it drives a
//! [`VmSnapshot`](super::save::VmSnapshot):
//!
//! 1. [`OutgoingMigration::begin`] starts tracking memory. [`OutgoingMigration::machine`] describes
//!    the VM for the checks of the destination.
//! 2. [`OutgoingMigration::read_memory`], repeated from offset 0 to the end, performs one round. A
//!    round returns the pages that were written since the preceding round. The first round returns
//!    all pages.
//! 3. When the client has paused the VM with a snapshot, one more round completes the memory.
//!
//! Dropping the migration ends the tracking. The guest continues to run as before.

use std::collections::BTreeMap;
use std::sync::Arc;

use snapshot::encode;
use snapshot::memory::CHUNK_BYTES;
use snapshot::state::{SavedDevice, SavedGuestKernel, SavedMachine, SavedMemoryFile, SavedVcpu};
use vm_memory::Bytes as _;

use super::save::{SnapshotError, VmSnapshotInputs, saved_filter};
use crate::memory::dirty::{DirtyPages, PAGE_BYTES};

/// Size in bytes of the contents at which a [`DirtyMemoryChunk`] is complete. Exceeded by at most
/// the contents of one chunk of RAM.
const PIECE_BYTES: u64 = 2 << 20;
/// Number of ranges at which a [`DirtyMemoryChunk`] is complete. Exceeded by at most the ranges of
/// one chunk of RAM.
const MAX_RANGES: usize = 1024;
/// Maximum number of chunks that one [`OutgoingMigration::read_memory`] examines. Each call delays
/// the main loop.
const MAX_CHUNKS: u32 = 256;
/// Number of read bytes after which one [`OutgoingMigration::read_memory`] ends. Each call delays
/// the main loop.
const MAX_READ_BYTES: u64 = 16 << 20;
/// A page of zeros, with which pages are compared.
static ZERO_PAGE: [u8; 4096] = [0; 4096];

/// Memory that was written, as returned by one call of [`OutgoingMigration::read_memory`].
#[derive(Debug, Default)]
pub struct DirtyMemoryChunk {
    /// Ranges of RAM whose contents are in `data`: offset in RAM and length, in bytes.
    pub pages: Vec<(u64, u64)>,
    /// Ranges of RAM that consist of zeros now and may have had other contents before: offset in
    /// RAM and length, in bytes.
    pub zeros: Vec<(u64, u64)>,
    /// Contents of the ranges in `pages`.
    pub data: Vec<u8>,
    /// Offset in RAM at which the next piece begins; the size of RAM at the end of the round.
    pub next: u64,
}

/// Tracking of written memory, for a VM that is about to move.
#[derive(Debug)]
pub struct OutgoingMigration {
    source: Arc<VmSnapshotInputs>,
    options: BTreeMap<String, String>,
    dirty: DirtyPages,
    /// Offset in RAM at which the next piece of the current round begins.
    next: u64,
    /// `true` if the VM was already paused when the current round began.
    is_last_round: bool,
}

impl OutgoingMigration {
    /// Starts tracking the memory of the VM. `options` contains the command-line options that
    /// determine the machine.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Unsupported`] with all parts of the VM that cannot move.
    pub fn begin(
        source: &Arc<VmSnapshotInputs>,
        options: BTreeMap<String, String>,
    ) -> Result<Self, SnapshotError> {
        source.check_supported()?;
        let dirty = DirtyPages::observe(&source.hardware.ram, source.protector.as_ref());
        if dirty.reads_all() {
            log::warn!(
                "this host's kernel cannot tell which memory the guest writes (Linux 6.7 can); all of it is read in each round"
            );
        }
        Ok(Self {
            source: source.clone(),
            options,
            dirty,
            next: 0,
            is_last_round: false,
        })
    }

    /// Returns a state file that describes the machine, without the state of its parts.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Format`] if it is too large.
    pub fn machine(&self) -> Result<Vec<u8>, SnapshotError> {
        let source = &self.source;
        let cpuid = source.cpuid.iter();
        let devices = source
            .hardware
            .bus
            .pci()
            .map(|pci| pci.save())
            .unwrap_or_default();
        Ok(encode(&SavedMachine {
            saved_by: env!("CARGO_PKG_VERSION").to_owned(),
            options: self.options.clone(),
            shape: source.shape.clone(),
            filter: saved_filter(&source.hardware.pmu.filter()),
            kernel: SavedGuestKernel {
                format: source.kernel.0.to_owned(),
                ..SavedGuestKernel::default()
            },
            vcpus: cpuid
                .map(|(id, cpuid)| SavedVcpu {
                    id: *id,
                    cpuid: cpuid.clone(),
                    ..SavedVcpu::default()
                })
                .collect(),
            devices: devices
                .into_iter()
                .map(|device| SavedDevice {
                    id: device.id,
                    name: device.name,
                    config: device.config,
                    ..SavedDevice::default()
                })
                .collect(),
            memory: SavedMemoryFile {
                bytes: source.hardware.ram.size_bytes(),
                crcs: Vec::new(),
                base: None,
            },
            ..SavedMachine::default()
        })?)
    }

    /// Returns the size of guest memory in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.source.hardware.ram.size_bytes()
    }

    /// Returns the next piece of a round, which begins at `offset`. `is_paused` states whether the
    /// VM is paused and the states of its vCPUs and devices have been saved. Pages that were zero
    /// and were written with zeros may be omitted.
    ///
    /// # Errors
    /// Returns [`SnapshotError::Order`] unless `offset` is 0 or the end of the preceding piece, and
    /// [`SnapshotError::Memory`] if memory cannot be read.
    pub fn read_memory(&mut self, offset: u64, is_paused: bool) -> Result<DirtyMemoryChunk, SnapshotError> {
        let bytes = self.memory_bytes();
        if offset >= bytes || offset != 0 && offset != self.next {
            return Err(SnapshotError::Order);
        }
        if offset == 0 {
            self.is_last_round = is_paused;
        }
        let mut piece = DirtyMemoryChunk::default();
        let (mut at, mut read) = (offset, 0);
        for _ in 0..MAX_CHUNKS {
            if at >= bytes || piece.is_full() || read >= MAX_READ_BYTES {
                break;
            }
            read += self.read_chunk(at, &mut piece)?;
            at = bytes.min(at + CHUNK_BYTES);
        }
        self.next = at;
        piece.next = at;
        Ok(piece)
    }

    /// Adds the dirty pages of the chunk at `offset` to `piece`. Returns the number of bytes that
    /// were read.
    fn read_chunk(&mut self, offset: u64, piece: &mut DirtyMemoryChunk) -> Result<u64, SnapshotError> {
        let dirty = self.dirty.take(offset)?;
        let ram = &self.source.hardware.ram;
        let mut read = if self.dirty.reads_all() { CHUNK_BYTES } else { 0 };
        for range in dirty.ranges {
            let start = piece.data.len();
            let bytes = range.end - range.start;
            let size = usize::try_from(bytes).unwrap_or(usize::MAX);
            piece.data.resize(start.saturating_add(size), 0);
            let address = ram.address_of(range.start);
            ram.memory().read_slice(&mut piece.data[start..], address)?;
            piece.keep_pages(start, range.start, !dirty.is_first);
            read += bytes;
        }
        Ok(read)
    }

    /// Returns whether a whole round was read after the VM was paused.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.is_last_round && self.next == self.memory_bytes()
    }
}

impl DirtyMemoryChunk {
    fn is_full(&self) -> bool {
        self.data.len() as u64 >= PIECE_BYTES || self.pages.len() + self.zeros.len() >= MAX_RANGES
    }

    /// Removes the pages that consist of zeros from `data`, starting at index `start`. Records the
    /// offsets in RAM of the remaining pages in `pages` and, if `needs_zeros` is set, those of the
    /// removed pages in `zeros`. The page at index `start` is at `offset` in RAM.
    fn keep_pages(&mut self, start: usize, offset: u64, needs_zeros: bool) {
        let mut kept = start;
        let mut at = start;
        while at < self.data.len() {
            let end = at + ZERO_PAGE.len();
            let page = offset + (at - start) as u64;
            if self.data[at..end] != ZERO_PAGE {
                self.data.copy_within(at..end, kept);
                kept += ZERO_PAGE.len();
                extend(&mut self.pages, page);
            } else if needs_zeros {
                extend(&mut self.zeros, page);
            }
            at = end;
        }
        self.data.truncate(kept);
    }
}

/// Adds the page at `offset` to `ranges`. Extends the last range if the page follows it and the
/// range is smaller than a chunk; otherwise adds a range.
fn extend(ranges: &mut Vec<(u64, u64)>, offset: u64) {
    match ranges.last_mut() {
        Some((start, bytes)) if *start + *bytes == offset && *bytes < CHUNK_BYTES => *bytes += PAGE_BYTES,
        _ => ranges.push((offset, PAGE_BYTES)),
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;
    use crate::memory::GuestRam;
    use crate::testing;
    use crate::vm::RunningVm;
    use crate::vm::save::VmSnapshot;

    /// Guest code that increments the 32-bit numbers at 0x880000 and 0xa80000 forever.
    const COUNT: [u8; 14] = [
        0xFF, 0x05, 0x00, 0x00, 0x88, 0x00, 0xFF, 0x05, 0x00, 0x00, 0xA8, 0x00, 0xEB, 0xF2,
    ];

    /// Reads all pieces of a round and copies their contents to `copy`. Returns the number of bytes
    /// in the pieces.
    fn copy_round(migration: &mut OutgoingMigration, copy: &GuestRam, is_paused: bool) -> u64 {
        let (mut offset, mut sent) = (0, 0);
        while offset < migration.memory_bytes() {
            let piece = migration.read_memory(offset, is_paused).unwrap();
            let mut data = &piece.data[..];
            for (start, bytes) in piece.pages {
                let (page, rest) = data.split_at(usize::try_from(bytes).unwrap());
                copy.memory().write_slice(page, GuestAddress(start)).unwrap();
                (data, sent) = (rest, sent + bytes);
            }
            for (start, bytes) in piece.zeros {
                let zeros = vec![0; usize::try_from(bytes).unwrap()];
                copy.memory().write_slice(&zeros, GuestAddress(start)).unwrap();
            }
            assert!(data.is_empty() && piece.next > offset);
            offset = piece.next;
        }
        sent
    }

    fn contents(ram: &GuestRam) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(ram.size_bytes()).unwrap()];
        ram.memory().read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }

    fn paused(vm: &RunningVm) -> VmSnapshot {
        let mut snapshot = VmSnapshot::begin(vm.snapshots(), BTreeMap::new()).unwrap();
        while !snapshot.advance().unwrap() {
            std::thread::sleep(std::time::Duration::from_micros(50));
        }
        snapshot
    }

    /// After the last round, the copied memory equals that of the paused VM, even if the guest has
    /// written between the rounds.
    #[test]
    fn rounds_add_up_to_the_memory_of_the_paused_vm() {
        let Some(vm) = testing::vm(&COUNT, |_| ()) else {
            return;
        };
        let memory = vm.ram().memory();
        memory.write_slice(&[5; 8192], GuestAddress(0x50_0000)).unwrap();
        let mut migration = OutgoingMigration::begin(vm.snapshots(), BTreeMap::new()).unwrap();
        let copy = GuestRam::new(migration.memory_bytes()).unwrap();
        let all = copy_round(&mut migration, &copy, false);
        let counts = || [0x88_0000, 0xA8_0000].map(|at| memory.read_obj::<u32>(GuestAddress(at)).unwrap());
        for round in 0..5 {
            let before = counts();
            let is_written = || counts().iter().zip(&before).all(|(now, before)| now != before);
            assert!((0..5000).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(1));
                is_written()
            }));
            if round == 1 {
                // Replace the contents of a page by zeros.
                memory.write_slice(&[0; 4096], GuestAddress(0x50_0000)).unwrap();
            }
            let sent = copy_round(&mut migration, &copy, false);
            assert!(sent >= 8192 && sent < all, "{sent} {all}");
        }
        assert!(!migration.is_complete());
        let snapshot = paused(&vm);
        assert!(snapshot.state_without_memory(&migration).is_err());
        copy_round(&mut migration, &copy, true);
        assert!(migration.is_complete());
        assert!(contents(&copy) == contents(vm.ram()));
        snapshot::decode(&snapshot.state_without_memory(&migration).unwrap()).unwrap();
        assert_eq!(copy_round(&mut migration, &copy, true), 0, "nobody writes");
        drop((snapshot, migration));
        let before = counts();
        assert!((0..5000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            counts() != before
        }));
    }

    /// The number of bytes that a piece reads is limited, even if all of them are zeros, which are
    /// not sent.
    #[test]
    fn piece_of_zeros_reads_a_limited_number_of_bytes() {
        let Some(vm) = testing::halted_vm() else { return };
        let bytes = vm.ram().size_bytes();
        let zeros = vec![0; usize::try_from(bytes - (4 << 20)).unwrap()];
        vm.ram()
            .memory()
            .write_slice(&zeros, GuestAddress(4 << 20))
            .unwrap();
        let mut migration = OutgoingMigration::begin(vm.snapshots(), BTreeMap::new()).unwrap();
        let mut offset = 0;
        while offset < bytes {
            let next = migration.read_memory(offset, false).unwrap().next;
            assert!(
                next - offset <= MAX_READ_BYTES + CHUNK_BYTES,
                "{offset:#x} {next:#x}"
            );
            offset = next;
        }
    }

    #[test]
    fn pieces_are_read_in_order() {
        let Some(vm) = testing::halted_vm() else { return };
        let mut migration = OutgoingMigration::begin(vm.snapshots(), BTreeMap::new()).unwrap();
        assert!(migration.read_memory(4096, false).is_err());
        let next = migration.read_memory(0, false).unwrap().next;
        assert!(migration.read_memory(next + CHUNK_BYTES, false).is_err());
        assert!(migration.read_memory(migration.memory_bytes(), false).is_err());
        let machine = snapshot::decode(&migration.machine().unwrap()).unwrap();
        assert_eq!(machine.vcpus.len(), 2);
        assert!(!machine.vcpus[0].cpuid.is_empty());
    }
}
