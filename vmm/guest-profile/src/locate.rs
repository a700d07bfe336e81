//! Locates the kernel that runs in a guest. If the user has given an image of the kernel, only the
//! slide is determined; otherwise, the complete image is read from guest memory.
//!
//! Two registers point into a running 64-bit Linux kernel: IA32_LSTAR (MSR 0xC0000082), which holds
//! the system-call entry point, and the IDT base, where the first gate points to the divide-error
//! handler. The slide is the difference between such an address and the address of the
//! corresponding symbol in the image. It is verified by comparing the kernel's version string in
//! guest memory with that of the image.

use super::paging::{AddressSpace, TranslationFault, UnsupportedPaging};
use super::{GuestMemoryReadBudget, GuestPhys, GuestRegs};
use kernel_images::image::KernelImage;
use kernel_images::kallsyms::KallsymsError;
use serde::{Deserialize, Serialize};

/// Values of two vCPU registers that hold addresses in the kernel; 0 for an unknown register.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct KernelAnchorRegisters {
    /// Value of IA32_LSTAR (MSR 0xC0000082): the address of the system-call entry point.
    pub lstar: u64,
    /// Linear address of the interrupt descriptor table.
    pub idt_base: u64,
}

/// Location at which a guest's kernel runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelLocation {
    /// Offset of the running kernel: run-time address of a symbol minus its address in the image,
    /// wrapping.
    pub slide: u64,
    /// `true` if the version string in guest memory matches that of the image. `false` if the image
    /// lacks the version string or its symbol, or if the string in guest memory cannot be read, in
    /// which case only a register determines the slide.
    pub verified: bool,
}

/// Error returned when the running kernel cannot be located.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KernelLocateError {
    /// The paging mode of the vCPU is unsupported.
    #[error("cannot read the guest's page tables")]
    Mode(#[from] UnsupportedPaging),
    /// No register contains a kernel address, because the guest has not started a kernel yet.
    #[error("the guest's kernel has not started yet, or is not 64-bit Linux")]
    NoAnchor,
    /// The image has no symbols, without which the slide cannot be determined.
    #[error("the kernel image has no symbols with which to find its load address")]
    NoSymbols,
    /// The guest runs another kernel than the image, according to the registers or to the version
    /// string in guest memory.
    #[error("the guest runs a different kernel than the given image")]
    OtherKernel,
    /// The kernel's symbol table was not found in guest memory.
    #[error("no kernel symbols in guest memory")]
    Kallsyms(#[from] KallsymsError),
}

/// Start of the top 2 GiB of the address space, into which kernels are loaded. KASLR moves a kernel
/// by a multiple of 2 MiB within 1 GiB.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
const SLIDE_ALIGN: u64 = 2 << 20;
const MAX_SLIDE: u64 = 1 << 30;
/// Maximum number of guest memory reads to locate a kernel. The limit may be high, because a kernel
/// is located only once and not for each sample.
const PLACE_READS: u32 = 4096;
/// Maximum number of bytes of a kernel that are read from guest memory.
const MAX_KERNEL: u64 = 128 << 20;
/// Minimum length in bytes of an unmapped range that is regarded as the end of the kernel. Shorter
/// holes remain where the kernel has freed its init sections.
const MAX_GAP: u64 = 32 << 20;

fn plausible(slide: u64) -> bool {
    slide.is_multiple_of(SLIDE_ALIGN) && slide < MAX_SLIDE
}

/// Determines the location of the running kernel, whose image is `image`.
pub fn place<M: GuestPhys + ?Sized>(
    mem: &M,
    regs: &GuestRegs,
    image: &KernelImage,
    anchors: &KernelAnchorRegisters,
) -> Result<KernelLocation, KernelLocateError> {
    let mut space = AddressSpace::of(mem, regs)?;
    let mut budget = GuestMemoryReadBudget::new(PLACE_READS, None);
    let symbols = image.symbols().ok_or(KernelLocateError::NoSymbols)?;
    let divide_error = idt_gate(&mut space, anchors.idt_base, &mut budget).unwrap_or(0);
    let known = [
        (anchors.lstar, &["entry_SYSCALL_64"][..]),
        (divide_error, &["asm_exc_divide_error", "divide_error"][..]),
    ];
    let mut slides = known.into_iter().flat_map(|(running, names)| {
        names.iter().filter_map(move |name| {
            let linked = symbols.by_name(name)?.address;
            (running >= KERNEL_MAP).then(|| running.wrapping_sub(linked))
        })
    });
    let slide =
        slides
            .find(|&s| plausible(s))
            .ok_or(if anchors.lstar < KERNEL_MAP && divide_error < KERNEL_MAP {
                KernelLocateError::NoAnchor
            } else {
                KernelLocateError::OtherKernel
            })?;
    let (Some(banner), Some(at)) = (image.banner(), symbols.by_name("linux_banner")) else {
        return Ok(KernelLocation {
            slide,
            verified: false,
        });
    };
    let mut found = vec![0; banner.len()];
    let at = at.address.wrapping_add(slide);
    let mut read = space.read(at, &mut found, &mut budget);
    if read.is_err() {
        // At CPL 3 with page-table isolation, the kernel is mapped only in the kernel's page
        // tables.
        read = space.kernel_sibling().read(at, &mut found, &mut budget);
    }
    match read {
        Ok(()) if found == banner.as_bytes() => Ok(KernelLocation {
            slide,
            verified: true,
        }),
        Ok(()) => Err(KernelLocateError::OtherKernel),
        Err(_) => Ok(KernelLocation {
            slide,
            verified: false,
        }),
    }
}

/// Returns the address of the divide-error handler, to which gate 0 of the IDT points (Intel SDM
/// vol. 3, "64-Bit Mode IDT").
fn idt_gate<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    idt_base: u64,
    budget: &mut GuestMemoryReadBudget,
) -> Option<u64> {
    let mut gate = [0; 16];
    space.read(idt_base, &mut gate, budget).ok()?;
    let half = |at: usize| u64::from(u16::from_le_bytes([gate[at], gate[at + 1]]));
    let high = u64::from(u32::from_le_bytes([gate[8], gate[9], gate[10], gate[11]]));
    (gate[5] & 0x80 != 0).then_some(high << 32 | half(6) << 16 | half(0))
}

/// Reads a running Linux kernel from guest memory without an image. The symbols, unwind tables and
/// type information have run-time addresses, so the slide is 0. The function copies tens of MiB, so
/// it should be called once per guest.
pub fn read_kernel<M: GuestPhys + ?Sized>(
    mem: &M,
    regs: &GuestRegs,
    anchors: &KernelAnchorRegisters,
) -> Result<KernelImage, KernelLocateError> {
    let first = AddressSpace::of(mem, regs)?;
    let mut result = Err(KernelLocateError::NoAnchor);
    for mut space in [first.kernel_sibling(), first] {
        let mut budget = GuestMemoryReadBudget::new(u32::MAX, None);
        let gate = idt_gate(&mut space, anchors.idt_base, &mut budget).unwrap_or(0);
        for anchor in [anchors.lstar, gate] {
            if anchor < KERNEL_MAP {
                continue;
            }
            let (start, bytes) = mapped_around(&mut space, anchor);
            match KernelImage::from_memory(start, &bytes) {
                Ok(image) => return Ok(image),
                Err(e) => result = Err(e.into()),
            }
        }
    }
    result
}

/// Copies the mapped kernel memory around the address `anchor`, which takes a long time. Returns
/// the start address and the bytes. Unmapped holes read as zeros.
///
/// # Errors
/// Returns [`KernelLocateError::Mode`] if the paging mode of the vCPU is unsupported.
pub fn memory_around<M: GuestPhys + ?Sized>(
    mem: &M,
    regs: &GuestRegs,
    anchor: u64,
) -> Result<(u64, Vec<u8>), KernelLocateError> {
    let mut space = AddressSpace::of(mem, regs)?;
    Ok(mapped_around(&mut space, anchor))
}

/// Copies the mapped kernel memory around the address `anchor`, up to the last mapped page. Returns
/// the start address and the bytes. Holes shorter than [`MAX_GAP`] bytes read as zeros.
fn mapped_around<M: GuestPhys + ?Sized>(space: &mut AddressSpace<'_, M>, anchor: u64) -> (u64, Vec<u8>) {
    const CHUNK: u64 = 4096;
    let mut budget = GuestMemoryReadBudget::new(u32::MAX, None);
    let mut start = anchor & !(SLIDE_ALIGN - 1);
    while start > KERNEL_MAP
        && anchor - start < MAX_KERNEL
        && space.translate(start - SLIDE_ALIGN, &mut budget).is_ok()
    {
        start -= SLIDE_ALIGN;
    }
    let mut bytes: Vec<u8> = Vec::new();
    let (mut at, mut gap) = (start, 0);
    while at - start < MAX_KERNEL && gap < MAX_GAP {
        let (size, gpa) = match space.translate(at, &mut budget) {
            Ok(t) => (
                t.page_size.min(SLIDE_ALIGN) - at % t.page_size.min(SLIDE_ALIGN),
                Some(t.gpa),
            ),
            // A missing page table leaves the whole range that it would map unmapped.
            Err(TranslationFault::NotPresent(level)) => {
                let covers = 1u64 << (12 + 9 * u32::from(level - 1));
                (covers - at % covers, None)
            }
            Err(_) => (CHUNK, None),
        };
        let size = size.min(MAX_KERNEL);
        let end = bytes.len();
        let read = gpa.is_some_and(|gpa| {
            // Fills the hole before this page with zeros only now. A hole without a page after it
            // is the end of the kernel.
            let from = (at - start).min(MAX_KERNEL) as usize;
            bytes.resize(from + size as usize, 0);
            space.phys().read(gpa, &mut bytes[from..])
        });
        if read {
            gap = 0;
        } else {
            bytes.truncate(end);
            gap += size;
        }
        match at.checked_add(size) {
            Some(next) => at = next,
            None => break,
        }
    }
    (start, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestGuest;

    /// Holes inside a kernel read as zeros, and the copy ends with the last mapped page.
    #[test]
    fn kernel_memory_has_holes_and_ends_at_last_page() {
        let mut guest = TestGuest::new(64 << 12, false);
        let start = 0xffff_ffff_8100_0000;
        for (page, gpa) in [(0, 0x1000), (3, 0x2000)] {
            guest.map(start + (page << 12), gpa, 1);
        }
        for gpa in (0x1000..0x3000).step_by(8) {
            guest.put(gpa, gpa);
        }
        // An address beyond RAM is unreadable, which also counts as a hole.
        guest.map(start + (5 << 12), 1 << 30, 1);
        let regs = GuestRegs {
            cr0: 1 << 31 | 1,
            cr3: guest.root,
            cr4: 1 << 5,
            efer: 1 << 10 | 1 << 8,
            ..GuestRegs::default()
        };
        let (from, bytes) = memory_around(guest.ram.as_slice(), &regs, start + 0x40).unwrap();
        assert_eq!((from, bytes.len()), (start, 4 << 12));
        assert_eq!(bytes[..0x1000], guest.ram[0x1000..0x2000]);
        assert!(bytes[0x1000..0x3000].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[0x3000..], guest.ram[0x2000..0x3000]);
        assert!(bytes.capacity() < 1 << 20, "{}", bytes.capacity());
    }
}
