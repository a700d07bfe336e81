//! Reports each file mapping of a guest program once, with the first samples that need it.
//!
//! A user address in a sample can only be resolved with the file mapping that contains it. Looking
//! up a mapping walks data structures of the guest kernel, which is too expensive for every sample,
//! so each vCPU remembers the mappings that it has reported recently. Mappings are reported again
//! after a while, because programs remap addresses, records may be lost, and a recording may start
//! at any time.
//!
//! After the mappings, the build IDs of their files follow in entries of length 0. Readers that do
//! not support build IDs stop at the first such entry.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::task::{ProcessMapping, TaskReader};
use crate::{GuestMemoryReadBudget, GuestPhys};
use kernel_images::build_id::{self, BuildId};

/// Maximum number of recently reported mappings that are remembered per vCPU.
const REMEMBERED: usize = 64;
/// Time after which a mapping that has been reported is reported again.
const MEMORY: Duration = Duration::from_secs(2);
/// Maximum number of mappings reported with one sample.
const PER_SAMPLE: usize = 4;
/// Maximum length of a reported path, in bytes. Longer paths lose their beginning.
pub const MAX_PATH: usize = 240;
/// Maximum number of guest memory reads for the mappings of one sample.
const READS: u32 = 1500;
/// Maximum time for reading the mappings of one sample from guest memory.
const TIME: Duration = Duration::from_micros(500);

/// Header of a reported mapping. The path follows, padded to a multiple of 8 bytes. The protocol
/// defines the layout (docs/reference/control.md).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MappingHeader {
    start: U64,
    len: U64,
    file_offset: U64,
    path_len: U16,
    zero: [u8; 6],
}

/// Size of a [`MappingHeader`], in bytes.
const HEAD: usize = size_of::<MappingHeader>();
const _: () = assert!(HEAD == 32);
/// Maximum size of the mappings of one sample, in bytes.
pub const MAX_BYTES: usize = PER_SAMPLE * (2 * HEAD + MAX_PATH + build_id::MAX_BYTES.next_multiple_of(8));

/// Number of times that a client has started to listen for samples. When the number changes, all
/// mappings are reported again, because the new client does not know them.
#[derive(Debug, Default)]
pub struct MappingGeneration(AtomicU64);

impl MappingGeneration {
    /// Registers a new client that listens for samples.
    pub fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn generation(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A mapping reported with a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledProcessMapping<'a> {
    /// Start address of the mapping.
    pub start: u64,
    /// Length of the mapping, in bytes.
    pub len: u64,
    /// Offset of `start` in the file, in bytes.
    pub file_offset: u64,
    /// Path of the file as claimed by the guest, with only printable characters.
    pub path: &'a str,
}

/// Identifier of an address space: the process ID, and the address of the process's memory
/// descriptor (`mm_struct`). A process gets a new descriptor on exec, and another process may reuse
/// the old one.
pub type AddressSpaceId = (u32, u64);

#[derive(Clone, Copy, Debug)]
struct ReportedRange {
    address_space: AddressSpaceId,
    start: u64,
    end: u64,
    at: Instant,
}

/// Reports mappings for one vCPU, and remembers those that it has reported recently.
#[derive(Debug, Default)]
pub struct SampleMappingReporter {
    reported: Vec<ReportedRange>,
    next: usize,
    generation: u64,
}

impl SampleMappingReporter {
    /// Creates a reporter that has reported no mappings, and allocates all memory that it will
    /// need.
    pub fn new() -> Self {
        Self {
            reported: Vec::with_capacity(REMEMBERED),
            next: 0,
            generation: 0,
        }
    }

    /// Writes the mappings of process `whose` that contain `addresses` to `out`. Skips mappings
    /// that this vCPU has reported recently. Returns the number of bytes written. Does not
    /// allocate.
    pub fn report<M: GuestPhys + ?Sized>(
        &mut self,
        reader: &mut TaskReader<'_, '_, M>,
        whose: AddressSpaceId,
        addresses: &[u64],
        listeners: &MappingGeneration,
        out: &mut [u8],
    ) -> usize {
        let generation = listeners.generation();
        if self.generation != generation {
            self.generation = generation;
            self.reported.clear();
        }
        let now = Instant::now();
        let mut budget = GuestMemoryReadBudget::new(READS, Some(TIME));
        let (mut at, mut count) = (0, 0);
        let mut ids = [None; PER_SAMPLE];
        for &address in addresses {
            if count == PER_SAMPLE || self.was_reported(whose, address, now) {
                continue;
            }
            let Some(mapping) = reader.mapping(whose.1, address, &mut budget) else {
                if budget.is_spent() {
                    break;
                }
                // No mapping was found. The page is remembered like a reported mapping, to avoid a
                // lookup for every sample.
                let page = address & !0xfff;
                self.remember(whose, page, page.saturating_add(0x1000), now);
                continue;
            };
            let mut path = [0; MAX_PATH];
            let Some(path) = name_of(reader, whose.1, &mapping, &mut path, &mut budget) else {
                break;
            };
            self.remember(whose, mapping.start, mapping.end, now);
            at += put(&mut out[at..], &mapping, path.as_bytes());
            if mapping.file != 0 {
                let id = reader.build_id(whose.1, &mapping, &mut budget);
                ids[count] = id.map(|id| (mapping.start, id));
            }
            count += 1;
        }
        for (start, id) in ids.into_iter().flatten() {
            let of_mapping = ProcessMapping {
                start,
                end: start,
                file_offset: 0,
                executable: false,
                file: 0,
            };
            at += put(&mut out[at..], &of_mapping, id.as_bytes());
        }
        at
    }

    fn was_reported(&self, whose: AddressSpaceId, address: u64, now: Instant) -> bool {
        self.reported.iter().any(|t| {
            t.address_space == whose
                && (t.start..t.end).contains(&address)
                && now.duration_since(t.at) < MEMORY
        })
    }

    fn remember(&mut self, whose: AddressSpaceId, start: u64, end: u64, at: Instant) {
        let told = ReportedRange {
            address_space: whose,
            start,
            end,
            at,
        };
        if let Some(old) = self
            .reported
            .iter_mut()
            .find(|t| t.address_space == whose && t.start == start)
        {
            *old = told;
        } else if self.reported.len() < REMEMBERED {
            self.reported.push(told);
        } else {
            self.reported[self.next] = told;
            self.next = (self.next + 1) % REMEMBERED;
        }
    }
}

/// Name that perf uses for the mapping of the vDSO, and name for anonymous memory.
const VDSO: &str = "[vdso]";
const ANONYMOUS: &str = "//anon";

/// Returns the name of a mapping of the process with the memory descriptor at `mm`: the path of the
/// mapped file, or perf's name for memory without a file. Returns `None` if the budget is
/// exhausted.
///
/// A path is written to `buf` and has at most [`MAX_PATH`] bytes.
pub fn name_of<'b, M: GuestPhys + ?Sized>(
    reader: &mut TaskReader<'_, '_, M>,
    mm: u64,
    mapping: &ProcessMapping,
    buf: &'b mut [u8],
    budget: &mut GuestMemoryReadBudget,
) -> Option<&'b str> {
    match mapping.file {
        0 if reader.vdso(mm, budget) == Some(mapping.start) => Some(VDSO),
        0 => Some(ANONYMOUS),
        file => match reader.file_path(file, buf, budget) {
            Some(path) => Some(path),
            None if budget.is_spent() => None,
            None => Some(ANONYMOUS),
        },
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a path is cut to MAX_PATH")]
fn put(out: &mut [u8], mapping: &ProcessMapping, path: &[u8]) -> usize {
    let len = HEAD + path.len().next_multiple_of(8);
    let Some(out) = out.get_mut(..len) else { return 0 };
    out.fill(0);
    let head = MappingHeader {
        start: mapping.start.into(),
        len: (mapping.end - mapping.start).into(),
        file_offset: mapping.file_offset.into(),
        path_len: (path.len() as u16).into(),
        zero: [0; 6],
    };
    out[..HEAD].copy_from_slice(head.as_bytes());
    out[HEAD..HEAD + path.len()].copy_from_slice(path);
    len
}

/// Iterates over the entries written by [`SampleMappingReporter::report`]: each header with its
/// path or build ID.
fn entries(mut bytes: &[u8]) -> impl Iterator<Item = (MappingHeader, &[u8])> {
    std::iter::from_fn(move || {
        let (head, rest) = MappingHeader::ref_from_prefix(bytes).ok()?;
        let len = usize::from(head.path_len.get());
        let entry = rest.get(..len).filter(|entry| !entry.is_empty())?;
        bytes = rest.get(len.next_multiple_of(8)..).unwrap_or(&[]);
        Some((*head, entry))
    })
}

/// Parses the mappings written by [`SampleMappingReporter::report`]. Stops at the first malformed
/// entry.
pub fn read(bytes: &[u8]) -> impl Iterator<Item = SampledProcessMapping<'_>> {
    entries(bytes).map_while(|(head, path)| {
        let len = head.len.get();
        let path = std::str::from_utf8(path).ok().filter(|_| len > 0)?;
        let (start, file_offset) = (head.start.get(), head.file_offset.get());
        Some(SampledProcessMapping {
            start,
            len,
            file_offset,
            path,
        })
    })
}

/// Returns the build ID of the file whose mapping starts at `start`, if `bytes` contain it. `bytes`
/// were written by [`SampleMappingReporter::report`].
pub fn build_id(bytes: &[u8], start: u64) -> Option<BuildId> {
    entries(bytes)
        .skip_while(|(head, _)| head.len.get() > 0)
        .find(|(head, _)| head.start.get() == start)
        .and_then(|(_, id)| BuildId::new(id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reported_mappings_round_trip() {
        let mapping = |start| ProcessMapping {
            start,
            end: start + 0x5000,
            file_offset: 0x2000,
            executable: true,
            file: 1,
        };
        let mut out = [0; MAX_BYTES];
        let first = put(&mut out, &mapping(0x40_0000), b"/bin/three");
        let second = put(&mut out[first..], &mapping(0x7f00_0000_0000), &[b'x'; MAX_PATH]);
        let id: Vec<u8> = (200..220).collect();
        let of_first = ProcessMapping {
            end: 0x40_0000,
            ..mapping(0x40_0000)
        };
        let third = put(&mut out[first + second..], &of_first, &id);
        let out = &out[..first + second + third];
        let told: Vec<_> = read(out).collect();
        assert_eq!(told.len(), 2);
        assert_eq!(
            told[0],
            SampledProcessMapping {
                start: 0x40_0000,
                len: 0x5000,
                file_offset: 0x2000,
                path: "/bin/three"
            }
        );
        assert_eq!(told[1].path.len(), MAX_PATH);
        assert_eq!(build_id(out, 0x40_0000), BuildId::new(&id));
        assert_eq!(build_id(out, 0x7f00_0000_0000), None);
        // A mapping that does not fit into the buffer is omitted completely.
        assert_eq!(put(&mut [0; 40], &mapping(0), b"/a/long/path"), 0);
    }

    #[test]
    fn mapping_is_reported_again_after_timeout() {
        let mut once = SampleMappingReporter::new();
        let now = Instant::now();
        once.remember((7, 1), 0x1000, 0x2000, now);
        assert!(once.was_reported((7, 1), 0x1fff, now));
        assert!(!once.was_reported((7, 1), 0x2000, now) && !once.was_reported((7, 2), 0x1fff, now));
        // Another process with the same memory descriptor has not reported the mapping.
        assert!(!once.was_reported((8, 1), 0x1fff, now));
        assert!(!once.was_reported((7, 1), 0x1fff, now + MEMORY));
        for i in 0..200 {
            once.remember((7, i), 0x1000, 0x2000, now);
        }
        assert!(once.reported.len() == REMEMBERED && once.was_reported((7, 199), 0x1000, now));
    }

    proptest! {
        #[test]
        fn random_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            for mapping in read(&bytes).take(100) {
                prop_assert!(mapping.len > 0);
                let _ = build_id(&bytes, mapping.start);
            }
        }
    }
}
