//! Fresh memory in which each page causes one page fault when touched.
#![expect(unsafe_code, reason = "memory mappings")]

const PAGE: usize = 4096;

/// A mapping of small pages that have not been touched. Unmapped on drop.
pub struct FreshPages {
    start: *mut u8,
    pages: usize,
    touched: usize,
}

impl FreshPages {
    pub fn new(pages: usize) -> Self {
        // SAFETY: a fresh private mapping; the advice covers exactly this mapping.
        let start = unsafe {
            let (prot, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            let at = libc::mmap(std::ptr::null_mut(), pages * PAGE, prot, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            libc::madvise(at, pages * PAGE, libc::MADV_NOHUGEPAGE);
            at.cast()
        };
        Self {
            start,
            pages,
            touched: 0,
        }
    }

    /// Touches `n` fresh pages, which takes `n` page faults and no system call.
    pub fn fault(&mut self, n: usize) {
        for _ in 0..n {
            assert!(self.touched < self.pages, "no page is left");
            // SAFETY: the page lies within the mapping, as checked above.
            unsafe { self.start.add(self.touched * PAGE).write_volatile(1) };
            self.touched += 1;
        }
    }
}

impl Drop for FreshPages {
    fn drop(&mut self) {
        // SAFETY: the mapping was created with this length and is not used any more.
        unsafe { libc::munmap(self.start.cast(), self.pages * PAGE) };
    }
}

/// Maps fresh memory and takes `n` page faults.
pub fn fault(n: usize) {
    FreshPages::new(n).fault(n);
}
