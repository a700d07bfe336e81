//! Input of the functions that walk guest memory: guest memory, the registers of one vCPU, and a
//! budget that limits a walk.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vm_memory::{
    Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress, VolatileMemory, VolatileSlice,
};

/// Read access to guest-physical memory. Implementations that are used to take samples must not
/// allocate memory or access devices.
pub trait GuestPhys {
    /// Handle of a page of guest memory.
    type Page<'a>: MappedGuestPage
    where
        Self: 'a;

    /// Returns the 4-KiB page that contains `gpa`, or its part up to the end of RAM. Returns `None`
    /// if `gpa` is outside RAM.
    fn page(&self, gpa: u64) -> Option<Self::Page<'_>>;

    /// Fills `buf` from the guest-physical address `gpa`. Returns `false` if any byte is outside
    /// RAM, in which case the contents of `buf` are unspecified.
    fn read(&self, gpa: u64, buf: &mut [u8]) -> bool {
        let mut at = gpa;
        let mut rest = buf;
        while !rest.is_empty() {
            let offset = offset_in_page(at);
            let (now, later) = rest.split_at_mut((PAGE_SIZE - offset).min(rest.len()));
            if !self.page(at).is_some_and(|page| page.read(offset, now)) {
                return false;
            }
            match at.checked_add(now.len() as u64) {
                Some(next) => at = next,
                None => return later.is_empty(),
            }
            rest = later;
        }
        true
    }

    /// Reads the 8 bytes at `gpa`, which must be a multiple of 8, in little-endian order.
    #[inline]
    fn read_u64(&self, gpa: u64) -> Option<u64> {
        self.page(gpa)?.read_u64(offset_in_page(gpa))
    }
}

/// A page of guest memory that can be read repeatedly without another lookup.
pub trait MappedGuestPage {
    /// Fills `buf` from offset `offset` in the page. Returns `false` if the range exceeds the page
    /// or RAM, in which case the contents of `buf` are unspecified.
    fn read(&self, offset: usize, buf: &mut [u8]) -> bool;

    /// Reads the 8 bytes at `offset` in little-endian order.
    #[inline]
    fn read_u64(&self, offset: usize) -> Option<u64> {
        let mut raw = [0; 8];
        self.read(offset, &mut raw).then(|| u64::from_le_bytes(raw))
    }
}

const PAGE_SIZE: usize = 4096;

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "below the page's size")]
fn offset_in_page(address: u64) -> usize {
    (address % PAGE_SIZE as u64) as usize
}

impl<T: GuestPhys + ?Sized> GuestPhys for &T {
    type Page<'a>
        = T::Page<'a>
    where
        Self: 'a;

    #[inline]
    fn page(&self, gpa: u64) -> Option<Self::Page<'_>> {
        (**self).page(gpa)
    }
}

impl GuestPhys for GuestMemoryMmap {
    type Page<'a> = VolatileSlice<'a>;

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
    fn page(&self, gpa: u64) -> Option<Self::Page<'_>> {
        let start = GuestAddress(gpa - offset_in_page(gpa) as u64);
        let region = self.find_region(start)?;
        let at = start.unchecked_offset_from(region.start_addr());
        let len = (region.len() - at).min(PAGE_SIZE as u64);
        region.get_slice(MemoryRegionAddress(at), len as usize).ok()
    }
}

impl MappedGuestPage for VolatileSlice<'_> {
    #[inline]
    fn read(&self, offset: usize, buf: &mut [u8]) -> bool {
        self.read_slice(buf, offset).is_ok()
    }

    #[inline]
    fn read_u64(&self, offset: usize) -> Option<u64> {
        let word = self.get_ref::<u64>(offset).ok()?.load();
        Some(u64::from_le(word))
    }
}

/// Guest RAM that starts at guest-physical address 0. Used for tests and for memory files.
impl GuestPhys for [u8] {
    type Page<'a> = &'a [u8];

    fn page(&self, gpa: u64) -> Option<Self::Page<'_>> {
        let start = usize::try_from(gpa).ok()? / PAGE_SIZE * PAGE_SIZE;
        self.get(start..self.len().min(start.saturating_add(PAGE_SIZE)))
            .filter(|page| !page.is_empty())
    }
}

impl MappedGuestPage for &[u8] {
    fn read(&self, offset: usize, buf: &mut [u8]) -> bool {
        let bytes = self.get(offset..).and_then(|rest| rest.get(..buf.len()));
        if let Some(bytes) = bytes {
            buf.copy_from_slice(bytes);
        }
        bytes.is_some()
    }
}

/// vCPU registers that a sample requires. The guest controls all values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the architecture's names")]
pub struct GuestRegs {
    pub rip: u64,
    pub rsp: u64,
    pub rbp: u64,
    /// Value of RCX. SYSCALL saves the user's RIP in RCX and the user's RFLAGS in R11 (SDM vol. 2,
    /// SYSCALL).
    pub rcx: u64,
    /// Value of RDX. In code written in assembly, the kernel's unwind tables refer to RDX, RDI, R10
    /// and R13.
    pub rdx: u64,
    pub rdi: u64,
    pub r10: u64,
    pub r11: u64,
    pub r13: u64,
    /// Value of RAX. RAX and the following registers up to R15 are needed to unwind user programs
    /// by their unwind tables.
    pub rax: u64,
    pub rbx: u64,
    pub rsi: u64,
    pub r8: u64,
    pub r9: u64,
    pub r12: u64,
    pub r14: u64,
    pub r15: u64,
    pub rflags: u64,
    pub cr0: u64,
    pub cr3: u64,
    pub cr4: u64,
    pub efer: u64,
    /// Current privilege level of the vCPU, 0 to 3.
    pub cpl: u8,
    /// CS.L of the vCPU: `true` for a 64-bit code segment.
    pub code64: bool,
    /// Active GS base of the interrupted code.
    pub gs_base: u64,
    /// Inactive GS base (IA32_KERNEL_GS_BASE, MSR 0xC0000102), which SWAPGS activates; 0 if
    /// unknown.
    pub kernel_gs_base: u64,
    /// Base of the task state segment, which contains the stack pointers that the CPU and the
    /// kernel's entry code use.
    pub tss_base: u64,
    /// Linear address of the interrupt descriptor table.
    pub idt_base: u64,
}

impl GuestRegs {
    /// Returns the base of the kernel's per-CPU data: the GS base in the upper half of the address
    /// space. Returns `None` if neither GS base is in the upper half, because the kernel has not
    /// set it up yet, or because `kernel_gs_base` is unknown at CPL 3.
    ///
    /// The base of a vCPU does not change once its kernel is running, so callers may cache it.
    pub fn kernel_per_cpu_base(&self) -> Option<u64> {
        let upper = |v: u64| v >> 63 == 1;
        let (first, second) = if self.cpl == 3 {
            (self.kernel_gs_base, self.gs_base)
        } else {
            (self.gs_base, self.kernel_gs_base)
        };
        [first, second].into_iter().find(|&base| upper(base))
    }
}

/// Limits of a walk through guest memory: the number of memory reads, and optionally the time.
///
/// The budget checks the time after every few reads, and charges the time since its previous check,
/// but at most a quarter of the time limit. Walks with fewer reads, the common case, never read the
/// clock. The first check charges nothing. A thread that is preempted once is therefore not charged
/// for the whole interruption. A guest that makes reads slow (for example by pages that the host
/// must fault in) exhausts the budget after four slow intervals.
#[derive(Debug, Clone)]
pub struct GuestMemoryReadBudget {
    reads_left: u32,
    reads_used: u32,
    time: Option<TimeLeft>,
    expired: bool,
}

#[derive(Debug, Clone)]
struct TimeLeft {
    left: Duration,
    at_most: Duration,
    last_look: Option<Instant>,
}

impl TimeLeft {
    /// Charges the time since the previous clock read to the budget. Returns `false` if no time is
    /// left.
    fn charge_elapsed(&mut self, now: Instant) -> bool {
        if let Some(last) = self.last_look.replace(now) {
            let passed = now.saturating_duration_since(last).min(self.at_most);
            self.left = self.left.saturating_sub(passed);
        }
        !self.left.is_zero()
    }
}

impl GuestMemoryReadBudget {
    /// Number of memory reads between two clock reads.
    const CLOCK_EVERY: u32 = 16;

    /// Creates a budget of `reads` memory reads and, if `time` is given, of this time.
    pub fn new(reads: u32, time: Option<Duration>) -> Self {
        Self {
            reads_left: if time == Some(Duration::ZERO) { 0 } else { reads },
            reads_used: 0,
            time: time.map(|time| TimeLeft {
                left: time,
                at_most: time / 4,
                last_look: None,
            }),
            expired: false,
        }
    }

    /// Charges one memory read. Returns `false` if the budget is exhausted.
    #[inline]
    pub fn take(&mut self) -> bool {
        if self.reads_left == 0
            || self.reads_used % Self::CLOCK_EVERY == Self::CLOCK_EVERY - 1 && !self.look_at_clock()
        {
            self.reads_left = 0;
            self.expired = true;
            return false;
        }
        self.reads_left -= 1;
        self.reads_used += 1;
        true
    }

    #[cold]
    fn look_at_clock(&mut self) -> bool {
        self.time
            .as_mut()
            .is_none_or(|time| time.charge_elapsed(Instant::now()))
    }

    /// Returns the number of memory reads charged so far.
    pub fn reads_used(&self) -> u32 {
        self.reads_used
    }

    /// Returns whether the budget has denied a memory read.
    pub fn is_spent(&self) -> bool {
        self.expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads across pages and up to the end of RAM return the same data as vm-memory. The RAM
    /// consists of two regions, the second of which has one and a half pages.
    #[test]
    fn guest_memory_reads_cross_pages_and_stop_at_end_of_ram() {
        let memory =
            GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x2000), (GuestAddress(0x5000), 0x1800)])
                .unwrap();
        for (start, len) in [(0, 0x2000u64), (0x5000, 0x1800)] {
            let bytes: Vec<u8> = (0..len).map(|i| (start + i * 7 + i / 256) as u8).collect();
            memory.write_slice(&bytes, GuestAddress(start)).unwrap();
        }
        for gpa in [0, 1, 0xff9, 0xfff, 0x1000, 0x1ff8, 0x5000, 0x5fff, 0x67f8] {
            for len in [0, 1, 7, 8, 9, 0x1000, 0x1800, 0x2000] {
                let (mut ours, mut theirs) = (vec![0; len], vec![0; len]);
                let is_ram = memory.read_slice(&mut theirs, GuestAddress(gpa)).is_ok();
                assert_eq!(GuestPhys::read(&memory, gpa, &mut ours), is_ram, "{gpa:#x} {len}");
                assert!(!is_ram || ours == theirs, "{gpa:#x} {len}");
            }
        }
        for gpa in [0, 0x1ff8, 0x5008, 0x67f8] {
            let word = memory.read_obj::<u64>(GuestAddress(gpa)).unwrap();
            assert_eq!(GuestPhys::read_u64(&memory, gpa), Some(word), "{gpa:#x}");
        }
        for gpa in [0x2000, 0x4ff8, 0x6800, 1 << 63, u64::MAX - 7] {
            assert_eq!(GuestPhys::read_u64(&memory, gpa), None, "{gpa:#x}");
            assert!(!GuestPhys::read(&memory, gpa, &mut [0; 16]), "{gpa:#x}");
        }
    }

    /// A vCPU thread that is preempted once during a walk still obtains the call chain, but
    /// repeated slow reads exhaust the budget.
    #[test]
    fn single_preemption_does_not_exhaust_budget() {
        const TIME: Duration = Duration::from_micros(500);
        let start = Instant::now();
        let mut time = TimeLeft {
            left: TIME,
            at_most: TIME / 4,
            last_look: Some(start),
        };
        let mut now = start + Duration::from_millis(20);
        assert!(time.charge_elapsed(now));
        for _ in 0..20 {
            now += Duration::from_micros(10);
            assert!(time.charge_elapsed(now));
        }
        let slow = (0..10).take_while(|_| {
            now += Duration::from_millis(1);
            time.charge_elapsed(now)
        });
        assert_eq!(slow.count(), 1);
    }

    #[test]
    fn zero_time_budget_allows_no_read() {
        assert!(!GuestMemoryReadBudget::new(10, Some(Duration::ZERO)).take());
        assert!(GuestMemoryReadBudget::new(10, None).take());
    }
}
