//! What the process holds of its host's memory: what only the start needed is given back.
#![expect(unsafe_code, reason = "sets malloc's parameters, unmaps pages of the program")]

/// Buffers of this size and more are mappings of their own, which are gone when they are freed.
#[cfg(target_env = "gnu")]
const OWN_MAPPING_BYTES: libc::c_int = 128 << 10;
/// The most heaps. glibc has one for each thread, and each keeps what its thread has freed.
#[cfg(target_env = "gnu")]
const MOST_HEAPS: libc::c_int = 2;

/// Makes freed memory the host's again. While a VM is made, a kernel, an initrd and symbols are read and
/// freed; glibc takes the first large buffer that is freed for a sign that more will come, and keeps such
/// buffers in its heap from then on, for as long as the VM runs.
pub(super) fn give_back_what_is_freed() {
    // SAFETY: mallopt takes two integers, and no other thread exists yet.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING_BYTES);
        libc::mallopt(libc::M_ARENA_MAX, MOST_HEAPS);
    }
}

/// Takes the program's code and constants out of this process's memory: most of what is there by now was for
/// the start, of which nothing comes again. What is used from here on comes back out of the page cache, and
/// the host may drop the rest.
pub(super) fn let_go_of_the_start() {
    let (start, bytes) = text();
    // SAFETY: the range is that of the program's file, mapped privately and never written, so each page that
    // is dropped reads as it was when it is touched next. A failure changes nothing.
    unsafe { libc::madvise(start.cast_mut().cast(), bytes, libc::MADV_DONTNEED) };
}

/// Where what is loaded of the program begins, and how long it is up to the end of its code.
fn text() -> (*const u8, usize) {
    unsafe extern "C" {
        // By the linker: all of it is read-only.
        static __executable_start: u8;
        static etext: u8;
    }
    let (start, end) = (&raw const __executable_start, &raw const etext);
    (start, end.addr().saturating_sub(start.addr()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What of the program's code is in memory for this process, KiB, as the kernel tells.
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

    /// All of it is there, and then what is used from there on; and the program still runs.
    #[expect(clippy::print_stderr, reason = "a test that could not run says so")]
    #[test]
    fn what_the_start_needed_of_the_program_is_let_go() {
        let (start, bytes) = text();
        // SAFETY: the range is the program's, and is read.
        let read = unsafe { libc::madvise(start.cast_mut().cast(), bytes, libc::MADV_POPULATE_READ) };
        if read != 0 {
            // Linux before 5.14.
            eprintln!("SKIP: {}", std::io::Error::last_os_error());
            return;
        }
        let before = resident_kib();
        assert!(before >= bytes / 1024 - 4, "{before} KiB of {bytes} bytes");
        let_go_of_the_start();
        let after = resident_kib();
        assert!(after < before / 2, "{after} KiB of {before} KiB");
    }
}
