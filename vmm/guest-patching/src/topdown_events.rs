//! Hides the events of the top-down method that a Linux kernel lists for Intel processors before
//! Ice Lake (`topdown-slots-issued` and others).
//!
//! The kernel selects these lists by processor family and model, and no CPUID bit or register
//! removes them. Each list is an array of pointers to sysfs attributes that ends with a null
//! pointer (`hsw_events_attrs` and others in Linux, arch/x86/events/intel/core.c). Writing a null
//! pointer to the first element makes the list empty, like that of a processor without such events.
//!
//! The lists are found by the names of their attributes, because the kernel's symbols need not
//! include its data. A list is accepted only if all attributes from the first one with a top-down
//! name to the end have top-down names.

use memchr::memmem;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use kernel_images::elf::LoadSegment;

/// Prefix of the names of most top-down events.
const PREFIX: &[u8] = b"topdown-";
/// Name of the top-down event `slots`, which lacks [`PREFIX`].
const SLOTS: &[u8] = b"slots";
/// Maximum length of an attribute's name, in bytes.
const MAX_NAME_BYTES: usize = 64;
/// Maximum number of top-down names that are searched for. The same limit applies to attributes and
/// to list elements. Linux 6.1 has 16, 39 and 46, respectively.
const MAX_FOUND: usize = 1024;
/// Size of a pointer, in bytes.
const POINTER_BYTES: u64 = 8;

/// A list of top-down events in the data of a kernel image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopdownList {
    /// Guest-physical address of the first element of the list.
    phys: u64,
    /// Contents of the first element in the kernel file: a pointer to an attribute.
    first: u64,
}

/// Finds the lists of top-down events in the segments of a kernel that is loaded at its link-time
/// address.
pub fn find(segments: &[LoadSegment<'_>]) -> Vec<TopdownList> {
    let image = Image(segments);
    let mut names: Vec<u64> = segments
        .iter()
        .flat_map(|segment| {
            memmem::find_iter(segment.data, PREFIX).map(|at| segment.virt.wrapping_add(at as u64))
        })
        .take(MAX_FOUND)
        .collect();
    names.sort_unstable();
    // An attribute begins with the pointer to its name.
    let attributes = image.pointers_to(&names);
    let elements = image.pointers_to(&attributes);
    let mut lists: Vec<TopdownList> = elements.iter().filter_map(|&at| image.list(at)).collect();
    lists.sort_unstable_by_key(|list| list.phys);
    lists.dedup();
    lists
}

/// Empties lists of top-down events in guest memory. Returns the number of lists emptied. A list
/// whose first element in guest memory differs from the kernel file is left unchanged.
pub fn hide(memory: &GuestMemoryMmap, lists: &[TopdownList]) -> usize {
    let is_hidden = |list: &&TopdownList| {
        let at = GuestAddress(list.phys);
        memory.read_obj(at).ok() == Some(list.first) && memory.write_obj(0u64, at).is_ok()
    };
    lists.iter().filter(is_hidden).count()
}

/// Segments of a kernel file, which are accessed by link-time address.
struct Image<'a>(&'a [LoadSegment<'a>]);

impl<'a> Image<'a> {
    /// Returns the segment that contains the link-time address `virt`, and the segment's contents
    /// from this address on.
    fn at(&self, virt: u64) -> Option<(&'a LoadSegment<'a>, &'a [u8])> {
        self.0.iter().find_map(|segment| {
            let offset = usize::try_from(virt.checked_sub(segment.virt)?).ok()?;
            Some((
                segment,
                segment.data.get(offset..).filter(|rest| !rest.is_empty())?,
            ))
        })
    }

    fn pointer(&self, virt: u64) -> Option<u64> {
        let (_, rest) = self.at(virt)?;
        Some(u64::from_le_bytes(*rest.first_chunk()?))
    }

    /// Returns the sorted addresses in the data segments at which there are pointers to `targets`.
    /// `targets` must be sorted.
    fn pointers_to(&self, targets: &[u64]) -> Vec<u64> {
        let (Some(&first), Some(&last)) = (targets.first(), targets.last()) else {
            return Vec::new();
        };
        let data = self.0.iter().filter(|segment| !segment.executable);
        let mut found: Vec<u64> = data
            .filter(|segment| segment.virt.is_multiple_of(POINTER_BYTES))
            .flat_map(|segment| {
                let words = segment.data.as_chunks::<8>().0.iter().enumerate();
                words.filter_map(move |(n, word)| {
                    let value = u64::from_le_bytes(*word);
                    let points = (first..=last).contains(&value) && targets.binary_search(&value).is_ok();
                    points.then(|| segment.virt.wrapping_add(POINTER_BYTES * n as u64))
                })
            })
            .take(MAX_FOUND)
            .collect();
        found.sort_unstable();
        found
    }

    /// Returns whether `element` points to the attribute of a top-down event.
    fn is_topdown(&self, element: u64) -> bool {
        let Some((_, name)) = self.pointer(element).and_then(|name| self.at(name)) else {
            return false;
        };
        let name = &name[..name.len().min(MAX_NAME_BYTES)];
        let end = memchr::memchr(0, name);
        end.is_some_and(|end| name[..end] == *SLOTS || name.starts_with(PREFIX))
    }

    /// Returns the list that contains the element at `at`. The list starts after the nearest
    /// preceding element that is not a top-down event. Returns `None` if a later element of the
    /// list is not a top-down event.
    fn list(&self, mut at: u64) -> Option<TopdownList> {
        let mut elements = 0;
        // Moves `at` down to the first element of the list.
        while let Some(before) = at.checked_sub(POINTER_BYTES)
            && elements < MAX_FOUND
            && self
                .pointer(before)
                .is_some_and(|element| self.is_topdown(element))
        {
            at = before;
            elements += 1;
        }
        let mut end = at;
        loop {
            match self.pointer(end)? {
                0 => break,
                element if self.is_topdown(element) && elements < MAX_FOUND => {
                    end = end.checked_add(POINTER_BYTES)?;
                    elements += 1;
                }
                _ => return None,
            }
        }
        let (segment, rest) = self.at(at)?;
        let offset = (segment.data.len() - rest.len()) as u64;
        Some(TopdownList {
            phys: segment.phys.wrapping_add(offset),
            first: self.pointer(at)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: u64 = 0xFFFF_FFFF_8100_0000;
    const DATA: u64 = 0xFFFF_FFFF_8280_0000;
    const DATA_GPA: u64 = 0x20_0000;

    /// Names of attributes, which the test image contains 32 bytes apart in a segment with code.
    const NAMES: [&str; 5] = [
        "mem-loads",
        "topdown-slots-issued",
        "topdown-slots-retired",
        "slots",
        "topdown-total-slots",
    ];

    fn names() -> Vec<u8> {
        let padded = NAMES.iter().map(|name| {
            let mut bytes = name.as_bytes().to_vec();
            bytes.resize(32, 0);
            bytes
        });
        padded.flatten().collect()
    }

    /// Returns the address of the sysfs attribute for the event `NAMES[n]`.
    fn attribute(n: u64) -> u64 {
        DATA + 16 * n
    }

    /// Returns a data segment that contains one attribute per name, followed by `lists`, which are
    /// given as indices of names.
    fn data(lists: &[&[u64]]) -> Vec<u8> {
        let attributes = (0..NAMES.len() as u64).flat_map(|n| [TEXT + 32 * n, 0o444]);
        let elements = lists
            .iter()
            .flat_map(|list| list.iter().map(|n| attribute(*n)).chain([0]));
        attributes.chain(elements).flat_map(u64::to_le_bytes).collect()
    }

    fn segments<'a>(names: &'a [u8], data: &'a [u8]) -> [LoadSegment<'a>; 2] {
        let segment = |index, virt, phys, data: &'a [u8]| LoadSegment {
            index,
            virt,
            phys,
            mem_bytes: data.len() as u64,
            data,
            executable: index == 0,
        };
        [
            segment(0, TEXT, 0x10_0000, names),
            segment(1, DATA, DATA_GPA, data),
        ]
    }

    /// The first element of each list of top-down events becomes null. A list that ends with
    /// another event is left unchanged, and so is a list that differs in memory.
    #[test]
    fn hide_empties_lists_of_topdown_events() {
        let names = names();
        let data = data(&[&[1, 2, 4], &[0], &[3, 1], &[0, 1], &[1, 0], &[2]]);
        let lists = find(&segments(&names, &data));
        let offsets: Vec<u64> = lists.iter().map(|list| (list.phys - DATA_GPA) / 8).collect();
        let first = 2 * NAMES.len() as u64;
        // In the list that begins with another event, the top-down event after it is hidden,
        // because the finder cannot tell where a list begins.
        assert_eq!(offsets, [first, first + 6, first + 10, first + 15]);
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 32 << 20)]).unwrap();
        let memory = &memory;
        memory.write_slice(&data, GuestAddress(DATA_GPA)).unwrap();
        let changed = GuestAddress(DATA_GPA + 8 * (first + 15));
        memory.write_obj(7u64, changed).unwrap();
        assert_eq!(hide(memory, &lists), 3);
        for (word, hidden) in [
            (first, true),
            (first + 1, false),
            (first + 6, true),
            (first + 7, false),
        ] {
            let at = GuestAddress(DATA_GPA + 8 * word);
            assert_eq!(memory.read_obj::<u64>(at).unwrap() == 0, hidden, "{word}");
        }
        assert_eq!(memory.read_obj::<u64>(changed).unwrap(), 7);
        assert_eq!(hide(memory, &lists), 0, "they are empty");
    }

    #[test]
    fn damaged_image_has_no_lists() {
        let names = names();
        let whole = data(&[&[1, 2, 4]]);
        // The list has no end, or pointers refer to addresses outside the image.
        assert_eq!(find(&segments(&names, &whole[..whole.len() - 8])), []);
        assert_eq!(find(&segments(&names[..40], &whole)), []);
        assert_eq!(find(&segments(&[], &whole)), []);
        assert_eq!(find(&[]), []);
    }
}
