//! Reduction of the memory footprint of a VM's process and of the exporter.
#![expect(unsafe_code, reason = "sets malloc's parameters, unmaps pages of the program")]

/// Minimum size of an allocation that glibc maps separately and unmaps when it is freed, in bytes.
#[cfg(target_env = "gnu")]
const OWN_MAPPING_BYTES: libc::c_int = 128 << 10;
/// Maximum number of heap arenas. By default, glibc creates arenas per thread, and each retains
/// freed memory.
#[cfg(target_env = "gnu")]
const MAX_ARENAS: libc::c_int = 2;

/// Configures glibc to return freed memory to the host.
///
/// By default, glibc raises its mmap threshold when the first large buffer is freed, and retains
/// such buffers in the heap for the lifetime of the process. The startup of a VM (kernel, initrd,
/// symbols) and each scrape of the exporter (text of several megabytes) allocate and free such
/// buffers.
pub fn configure_malloc() {
    // SAFETY: mallopt takes two integers, and no other thread exists yet.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING_BYTES);
        libc::mallopt(libc::M_ARENA_MAX, MAX_ARENAS);
    }
}

/// Drops the program's code and constants from the resident set, because most pages were needed
/// only for startup. Pages used later are faulted in from the page cache.
pub(super) fn drop_startup_pages() {
    let (start, bytes) = text();
    // SAFETY: the range is a private file mapping of the program that is never written, so a
    // dropped page has the same contents when it is faulted in again. A failure has no effect.
    unsafe { libc::madvise(start.cast_mut().cast(), bytes, libc::MADV_DONTNEED) };
}

/// Returns the start and the length of the program's image up to the end of its code.
fn text() -> (*const u8, usize) {
    unsafe extern "C" {
        // Symbols defined by the linker. The range between them is read-only.
        static __executable_start: u8;
        static etext: u8;
    }
    let (start, end) = (&raw const __executable_start, &raw const etext);
    (start, end.addr().saturating_sub(start.addr()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::alone::runs_alone;

    /// Returns the resident size of the program's code, in KiB.
    fn resident_kib() -> usize {
        let (start, bytes) = text();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut counts, mut resident) = (false, 0);
        for line in smaps.lines() {
            let first = line.split_whitespace().next().unwrap_or_default();
            if let Some((from, to)) = first.split_once('-') {
                let [from, to] = [from, to].map(|at| usize::from_str_radix(at, 16).unwrap());
                counts = from >= start.addr() && to <= (start.addr() + bytes).next_multiple_of(4096);
            } else if first == "Rss:" && counts {
                resident += line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap();
            }
        }
        resident
    }

    /// After all resident pages of the program are dropped, only the pages in use become resident
    /// again. Runs in a separate process, because other tests use pages at the same time.
    #[expect(clippy::print_stderr, reason = "a test that could not run says so")]
    #[test]
    fn startup_pages_are_dropped() {
        if !runs_alone("run::footprint::tests::startup_pages_are_dropped") {
            return;
        }
        let (start, bytes) = text();
        // SAFETY: the range belongs to the program and is only read.
        let read = unsafe { libc::madvise(start.cast_mut().cast(), bytes, libc::MADV_POPULATE_READ) };
        if read != 0 {
            // MADV_POPULATE_READ requires Linux 5.14.
            eprintln!("SKIP: {}", std::io::Error::last_os_error());
            return;
        }
        let before = resident_kib();
        assert!(before >= bytes / 1024 - 4, "{before} KiB of {bytes} bytes");
        drop_startup_pages();
        let after = resident_kib();
        assert!(after < before / 2, "{after} KiB of {before} KiB");
    }
}
