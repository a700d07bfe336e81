//! A safe handle to a host perf event that [`super::opener`] opened.
//!
//! The drivers decide which events to count, for which target and when.
#![expect(unsafe_code, reason = "system calls, and memory shared with the kernel")]

use std::cell::Cell;
use std::io;
use std::mem::size_of;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use perf_event_open_sys as sys;
use sys::bindings::{perf_event_attr, perf_event_header, perf_event_mmap_page};

use super::fault;
use super::opener::{self, EventOpenRequest, HostEventTarget, OverflowSignal};

/// Maximum number of attempts to open an event if signals interrupt the call. The open fails if a
/// signal interrupts the last attempt.
const MAX_OPEN_ATTEMPTS: u32 = 64;
/// Sampling period that never elapses in practice (36 years in nanoseconds). An event with this
/// period is *parked*: it stays open in the kernel at no cost until an ioctl sets a real period.
pub(crate) const PARKED_PERIOD: u64 = 1 << 60;

/// Read format that [`PerfFd::read_timed`] requires: time enabled and time running.
pub(crate) const READ_TIMES: u64 =
    (sys::bindings::PERF_FORMAT_TOTAL_TIME_ENABLED | sys::bindings::PERF_FORMAT_TOTAL_TIME_RUNNING) as u64;

/// A count of a host event, with the kernel's time enabled and time running of that event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimedCount {
    pub(crate) count: u64,
    /// Time for which the event was enabled while its thread ran, in nanoseconds (time enabled).
    pub(crate) enabled_ns: u64,
    /// Time for which the event held a counter, in nanoseconds (time running).
    pub(crate) running_ns: u64,
}

/// Returns the calling thread's ID, which is cached for each thread.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the kernel gives an id of 32 bits"
)]
pub(crate) fn current_tid() -> i32 {
    thread_local!(static TID: Cell<i32> = const { Cell::new(0) });
    TID.with(|cached| {
        if cached.get() == 0 {
            // SAFETY: gettid has no arguments and cannot fail.
            cached.set(unsafe { libc::syscall(libc::SYS_gettid) } as i32);
        }
        cached.get()
    })
}

/// Returns the current `CLOCK_MONOTONIC` time in nanoseconds, the time base of
/// [`super::GuestSample`].
#[must_use]
pub fn monotonic_ns() -> u64 {
    let mut ts = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `ts` is a writable timespec; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut ts) };
    ts.tv_sec.cast_unsigned() * 1_000_000_000 + ts.tv_nsec.cast_unsigned()
}

/// Returns a `perf_event_attr` whose fields are zero, except for its size.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the structure has some hundred bytes"
)]
pub(crate) fn new_attr(type_: u32, config: u64) -> perf_event_attr {
    perf_event_attr {
        size: size_of::<perf_event_attr>() as u32,
        type_,
        config,
        ..perf_event_attr::default()
    }
}

/// Returns the bytes of a `perf_event_attr`.
pub(super) fn bytes_of(attr: &perf_event_attr) -> &[u8] {
    // SAFETY: the structure belongs to the kernel ABI and consists of integers without padding, and
    // `attr` is live and initialized for the lifetime of the slice.
    unsafe { std::slice::from_raw_parts((&raw const *attr).cast(), size_of::<perf_event_attr>()) }
}

/// The file descriptor of an open host perf event.
#[derive(Debug)]
pub(crate) struct PerfFd {
    fd: OwnedFd,
}

/// Returns the number of CPUs that the host is configured for, online or not.
pub(crate) fn cpus() -> i32 {
    // SAFETY: sysconf takes a number by value.
    let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
    i32::try_from(cpus).unwrap_or(i32::MAX)
}

impl From<OwnedFd> for PerfFd {
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl AsFd for PerfFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl PerfFd {
    /// Opens an event with attributes `attr` for thread `tid` (0 is the calling thread), on any
    /// CPU.
    pub(crate) fn open(attr: &mut perf_event_attr, tid: i32) -> io::Result<Self> {
        Self::open_in_group(attr, HostEventTarget::Thread(tid), None, None)
    }

    /// Opens an event as [`PerfFd::open`] does, as a member of the group of `leader` and with an
    /// overflow signal.
    pub(crate) fn open_in_group(
        attr: &mut perf_event_attr,
        counted: HostEventTarget,
        leader: Option<&PerfFd>,
        overflow: Option<OverflowSignal>,
    ) -> io::Result<Self> {
        let request = EventOpenRequest {
            attr: bytes_of(attr),
            counted,
            leader: leader.map(|leader| leader.fd.as_fd()),
            overflow,
        };
        let mut opened = Self::open_once(&request);
        // The open fails if a signal, such as a vCPU kick, arrives while the kernel waits for a
        // lock. The signal is handled before the open is retried.
        for _ in 1..MAX_OPEN_ATTEMPTS {
            match &opened {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => opened = Self::open_once(&request),
                _ => break,
            }
        }
        opened
    }

    fn open_once(request: &EventOpenRequest<'_>) -> io::Result<Self> {
        if let Some(error) = fault::injected_open_error() {
            return Err(io::Error::from_raw_os_error(error));
        }
        let fd = opener::current().open(request)?;
        Ok(Self { fd })
    }

    /// Makes every overflow of the event send `signal` to thread `tid`.
    ///
    /// The kernel sends `SIGIO` instead if the queue of real-time signals is full; see
    /// [`super::ignore_sigio`].
    pub(crate) fn signal_thread(&self, tid: i32, signal: i32) -> io::Result<()> {
        opener::current().set_overflow_signal(self.fd.as_fd(), OverflowSignal { tid, signal })
    }

    /// Enables the event.
    pub(crate) fn enable(&self) -> io::Result<()> {
        // SAFETY: ENABLE takes a flag word by value.
        check(unsafe { sys::ioctls::ENABLE(self.fd.as_raw_fd(), 0) }).map(drop)
    }

    /// Disables the event. The count does not change.
    pub(crate) fn disable(&self) -> io::Result<()> {
        // SAFETY: DISABLE takes a flag word by value.
        check(unsafe { sys::ioctls::DISABLE(self.fd.as_raw_fd(), 0) }).map(drop)
    }

    /// Enables or disables the event, as `on` requests.
    pub(super) fn set_enabled(&self, on: bool) -> io::Result<()> {
        if on { self.enable() } else { self.disable() }
    }

    /// Redirects this event's records to the mapped ring of `other`.
    pub(crate) fn write_to(&self, other: &Self) -> io::Result<()> {
        // SAFETY: SET_OUTPUT takes a descriptor by value; `other` is open for the time of the call.
        let rc = unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                sys::bindings::SET_OUTPUT.into(),
                other.fd.as_raw_fd(),
            )
        };
        check(rc).map(drop)
    }

    /// Sets the period of a sampling event (1 to 2^63 - 1). The new period starts now, even if the
    /// event is running.
    pub(crate) fn set_period(&self, period: u64) -> io::Result<()> {
        // The generated wrapper takes the value, but the kernel copies it from an address.
        // SAFETY: `period` lives until the call returns, and the kernel reads eight bytes from it.
        let rc = unsafe {
            libc::ioctl(
                self.fd.as_raw_fd(),
                sys::bindings::PERIOD.into(),
                &raw const period,
            )
        };
        check(rc).map(drop)
    }

    /// Reads the count of the event. Returns `None` if the event is in the error state (a pinned
    /// event that lost its counter reads as end of file).
    pub(crate) fn read_count(&self) -> io::Result<Option<u64>> {
        let mut value = 0u64;
        // SAFETY: the buffer is eight writable bytes and the event was opened without a read
        // format, so the kernel writes one u64 or nothing.
        let n = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut value).cast(), 8) };
        match n {
            8 => Ok(Some(value)),
            n if n < 0 => Err(io::Error::last_os_error()),
            _ => Ok(None),
        }
    }

    /// Reads the count and the kernel's times of an event opened with [`READ_TIMES`]. Returns
    /// `None` if the event is in the error state, as [`PerfFd::read_count`] does.
    pub(crate) fn read_timed(&self) -> io::Result<Option<TimedCount>> {
        let mut words = [0u64; 3];
        let len = size_of_val(&words);
        // SAFETY: the buffer is `len` writable bytes, and the kernel writes at most that many.
        let n = unsafe { libc::read(self.fd.as_raw_fd(), words.as_mut_ptr().cast(), len) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        let [count, enabled_ns, running_ns] = words;
        Ok((n.cast_unsigned() == len).then_some(TimedCount {
            count,
            enabled_ns,
            running_ns,
        }))
    }

    /// Returns the kernel's ID of the event.
    pub(crate) fn id(&self) -> io::Result<u64> {
        let mut id = 0u64;
        // SAFETY: the ioctl writes eight bytes to `id`, which lives until the call returns.
        check(unsafe { sys::ioctls::ID(self.fd.as_raw_fd(), &mut id) })?;
        Ok(id)
    }

    /// Reads the event into `words`, in the event's read format. Returns the number of words that
    /// were read.
    pub(crate) fn read_words(&self, words: &mut [u64]) -> io::Result<usize> {
        let len = size_of_val(words);
        // SAFETY: the buffer is `len` writable bytes, and the kernel writes at most that many.
        let n = unsafe { libc::read(self.fd.as_raw_fd(), words.as_mut_ptr().cast(), len) };
        if n < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(n.cast_unsigned() / 8)
    }

    /// Maps the control page of the event, with a ring of `2^log2_pages` data pages unless it is
    /// `None`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the size of a page is a small positive number"
    )]
    pub(crate) fn map(&self, log2_pages: Option<u32>) -> io::Result<PerfMap> {
        // SAFETY: sysconf has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let data_len = log2_pages.map_or(0, |n| page << n);
        let len =
            NonZeroUsize::new(page + data_len).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: a fresh shared mapping at an address of the kernel's choosing aliases nothing.
        let addr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len.get(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                self.fd.as_raw_fd(),
                0,
            )
        };
        if addr == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(addr.cast::<u8>()).ok_or_else(|| io::Error::other("mapped at zero"))?;
        let map = PerfMap {
            base,
            len: len.get(),
            data_offset: page,
            data_len,
        };
        map.populate_page(page);
        Ok(map)
    }
}

/// A guard that blocks all signals of this thread until dropped.
struct SignalBlockGuard(libc::sigset_t);

impl SignalBlockGuard {
    fn begin() -> Self {
        // SAFETY: both sets are live values, and zeroed sets are valid; the calls do not fail with
        // these arguments.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            Self(before)
        }
    }
}

impl Drop for SignalBlockGuard {
    fn drop(&mut self) {
        // SAFETY: the set is the thread's previous signal mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(rc)
    }
}

/// The mapped control page of a host perf event, with its ring if one was requested.
#[derive(Debug)]
pub(crate) struct PerfMap {
    base: NonNull<u8>,
    len: usize,
    data_offset: usize,
    data_len: usize,
}

// SAFETY: the mapping belongs to the process rather than to a thread, and all access goes through
// atomics or `&mut self`.
unsafe impl Send for PerfMap {}

impl Drop for PerfMap {
    fn drop(&mut self) {
        // SAFETY: `base` is the result of mmap and `len` its length, and no reference outlives
        // `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Maximum number of payload words of a record that [`PerfMap::drain_words`] passes on. Further
/// words are discarded.
const MAX_PAYLOAD_WORDS: usize = 4;

/// The type and `misc` fields of the header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RecordHead {
    pub(crate) type_: u32,
    pub(crate) misc: u16,
}

impl PerfMap {
    fn page(&self) -> *mut perf_event_mmap_page {
        self.base.as_ptr().cast()
    }

    fn field_u32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: callers pass the offset of an aligned u32 field of the control page, which is
        // mapped while `self` lives; the kernel writes it with single stores.
        unsafe { &*self.base.as_ptr().add(offset).cast::<AtomicU32>() }
    }

    fn field_u64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as for `field_u32`, with an aligned u64 field.
        unsafe { &*self.base.as_ptr().add(offset).cast::<AtomicU64>() }
    }

    /// Returns `true` if the host allows this thread to read the counter with `rdpmc`.
    pub(crate) fn user_read_offered(&self) -> bool {
        // SAFETY: the control page is mapped and readable; the capability word is written once, at
        // mmap.
        unsafe { (*self.page()).__bindgen_anon_1.__bindgen_anon_1.cap_user_rdpmc() == 1 }
    }

    /// Returns the index for `rdpmc` plus one if the event is active on a counter of the current
    /// CPU, otherwise 0.
    pub(crate) fn index(&self) -> u32 {
        self.field_u32(std::mem::offset_of!(perf_event_mmap_page, index))
            .load(Ordering::Relaxed)
    }

    /// Reads the count of the event with `rdpmc`, without a system call.
    ///
    /// Returns `None` if the event holds no counter, the host does not offer user-space reads, or
    /// the page kept changing. The caller then reads the file descriptor instead. Call this method
    /// only on the event's own thread.
    pub(crate) fn user_read(&self) -> Option<u64> {
        /// Maximum number of attempts, after which a system call is cheaper.
        const TRIES: usize = 16;
        if !self.user_read_offered() {
            return None;
        }
        let lock = self.field_u32(std::mem::offset_of!(perf_event_mmap_page, lock));
        for _ in 0..TRIES {
            let seq = lock.load(Ordering::Acquire);
            if seq & 1 == 1 {
                continue;
            }
            let index = self.index();
            let offset = self
                .field_u64(std::mem::offset_of!(perf_event_mmap_page, offset))
                .load(Ordering::Relaxed);
            // SAFETY: `pmc_width` is an aligned u16 field of the mapped control page.
            let width = unsafe {
                (*self
                    .base
                    .as_ptr()
                    .add(std::mem::offset_of!(perf_event_mmap_page, pmc_width))
                    .cast::<AtomicU16>())
                .load(Ordering::Relaxed)
            };
            if index == 0 {
                return None;
            }
            // SAFETY: the page offers user-space reads and names this counter; if the event moves
            // meanwhile, the sequence check below discards the value.
            let raw = unsafe { rdpmc(index - 1) };
            // Pairs with the kernel's barrier between its page writes and its second increment of
            // `lock`.
            fence(Ordering::Acquire);
            if lock.load(Ordering::Relaxed) == seq {
                let shift = 64 - u32::from(width.clamp(1, 64));
                let delta = (raw << shift).cast_signed() >> shift;
                return Some(offset.wrapping_add(delta.cast_unsigned()));
            }
        }
        None
    }

    /// Makes the kernel allocate the pages of this mapping now, with all signals blocked.
    ///
    /// If the thread has an event that sends a signal at each page fault, which a guest can
    /// request, the kernel delivers that signal before it maps the page. The access would then
    /// fault and send a signal again, indefinitely.
    fn populate_page(&self, page: usize) {
        let _held = SignalBlockGuard::begin();
        let tail = self.field_u64(std::mem::offset_of!(perf_event_mmap_page, data_tail));
        tail.store(tail.load(Ordering::Relaxed), Ordering::Relaxed);
        for at in (self.data_offset..self.len).step_by(page.max(1)) {
            // SAFETY: `at` is within the mapping, whose bytes may be read while the kernel writes
            // to them.
            unsafe { self.base.as_ptr().add(at).read_volatile() };
        }
    }

    /// Returns the event's time enabled when the kernel last scheduled the event in or out, in
    /// nanoseconds.
    pub(crate) fn enabled_ns(&self) -> u64 {
        self.field_u64(std::mem::offset_of!(perf_event_mmap_page, time_enabled))
            .load(Ordering::Relaxed)
    }

    /// Returns the count and times of the event when the kernel last scheduled it out, or `None` if
    /// the event holds a counter or the control page kept changing.
    pub(crate) fn last_sched_out(&self) -> Option<TimedCount> {
        const TRIES: usize = 16;
        let lock = self.field_u32(std::mem::offset_of!(perf_event_mmap_page, lock));
        for _ in 0..TRIES {
            let seq = lock.load(Ordering::Acquire);
            if seq & 1 == 1 {
                continue;
            }
            let word = |offset| self.field_u64(offset).load(Ordering::Relaxed);
            let left = TimedCount {
                count: word(std::mem::offset_of!(perf_event_mmap_page, offset)),
                enabled_ns: word(std::mem::offset_of!(perf_event_mmap_page, time_enabled)),
                running_ns: word(std::mem::offset_of!(perf_event_mmap_page, time_running)),
            };
            let index = self.index();
            // As in `user_read`.
            fence(Ordering::Acquire);
            if lock.load(Ordering::Relaxed) == seq {
                return (index == 0).then_some(left);
            }
        }
        None
    }

    /// Returns `true` if the mapping has data pages.
    pub(crate) fn has_ring(&self) -> bool {
        self.data_len > 0
    }

    /// Passes every unread record of the ring to `each`, and releases the space of the records.
    /// Reads at most as many bytes as the ring can hold.
    pub(crate) fn drain(&mut self, mut each: impl FnMut(RecordHead)) {
        self.drain_words(|head, _| each(head));
    }

    /// Drains the ring as [`PerfMap::drain`] does, and also passes the first [`MAX_PAYLOAD_WORDS`]
    /// words of each record's payload to `each`.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset is taken modulo the size of the ring"
    )]
    pub(crate) fn drain_words(&mut self, mut each: impl FnMut(RecordHead, &[u64])) {
        if self.data_len == 0 {
            return;
        }
        let head_field = self.field_u64(std::mem::offset_of!(perf_event_mmap_page, data_head));
        let tail_field = self.field_u64(std::mem::offset_of!(perf_event_mmap_page, data_tail));
        // Pairs with the kernel's write barrier before it publishes data_head.
        let head = head_field.load(Ordering::Acquire);
        let mut tail = tail_field.load(Ordering::Relaxed);
        let header = size_of::<perf_event_header>() as u64;
        while head.wrapping_sub(tail) >= header && head.wrapping_sub(tail) <= self.data_len as u64 {
            let at = (tail as usize) & (self.data_len - 1);
            // Records are multiples of 8 bytes, so an 8-byte header never wraps.
            // SAFETY: `at` is within the data area and 8-byte aligned (record sizes are checked
            // below), and the kernel does not write between tail and head.
            let h = unsafe {
                self.base
                    .as_ptr()
                    .add(self.data_offset + at)
                    .cast::<perf_event_header>()
                    .read()
            };
            let size = u64::from(h.size);
            if size < header || size % 8 != 0 {
                break;
            }
            let mut words = [0u64; MAX_PAYLOAD_WORDS];
            let count = MAX_PAYLOAD_WORDS.min(((size - header) / 8) as usize);
            for (i, word) in words[..count].iter_mut().enumerate() {
                let at = (at + 8 + 8 * i) & (self.data_len - 1);
                // SAFETY: as above. Aligned words do not wrap, and words past `head` are merely
                // stale.
                *word = unsafe { self.base.as_ptr().add(self.data_offset + at).cast::<u64>().read() };
            }
            let head_of = RecordHead {
                type_: h.type_,
                misc: h.misc,
            };
            each(head_of, &words[..count]);
            tail = tail.wrapping_add(size);
        }
        // Unparsable data is skipped, so a damaged ring cannot block its reader. Pairs with the
        // kernel's read of data_tail before it reuses the space.
        tail_field.store(head, Ordering::Release);
    }
}

/// Reads performance counter `index`.
///
/// # Safety
/// The host must currently allow user-space `rdpmc` of that counter, otherwise the instruction
/// faults.
#[cfg(target_arch = "x86_64")]
unsafe fn rdpmc(index: u32) -> u64 {
    let (lo, hi): (u32, u32);
    // SAFETY: the caller guarantees that the counter is readable, and the instruction accesses no
    // memory.
    unsafe {
        std::arch::asm!("rdpmc", in("ecx") index, out("eax") lo, out("edx") hi, options(nomem, nostack));
    }
    u64::from(hi) << 32 | u64::from(lo)
}

#[cfg(test)]
mod tests {
    use super::*;

    extern "C" fn nothing(_: libc::c_int) {}

    /// A thread that receives a signal at each page fault can still read the rings of its events.
    #[test]
    fn ring_drains_while_page_faults_send_signals() {
        let signal = libc::SIGRTMIN() + 9;
        // SAFETY: the handler does nothing.
        unsafe { libc::signal(signal, nothing as extern "C" fn(libc::c_int) as usize) };
        let open = |period: u64| {
            let faults = u64::from(sys::bindings::PERF_COUNT_SW_PAGE_FAULTS);
            let mut attr = new_attr(sys::bindings::PERF_TYPE_SOFTWARE, faults);
            attr.__bindgen_anon_1.sample_period = period;
            attr.set_disabled(1);
            PerfFd::open(&mut attr, 0)
        };
        let Ok(each) = open(1) else {
            return eprintln!("SKIP: this host does not let this user count");
        };
        each.signal_thread(current_tid(), signal).unwrap();
        each.enable().unwrap();
        let other = open(PARKED_PERIOD).unwrap();
        let mut ring = other.map(Some(3)).unwrap();
        ring.drain(|_| {});
        each.disable().unwrap();
    }
}
