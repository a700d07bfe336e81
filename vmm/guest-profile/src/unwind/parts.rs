//! Types that the kernel walk and the user walk share: the output buffer, the reasons why unwinding
//! ends, and the user registers.

use crate::GuestPhys;
use crate::paging::{AddressSpace, TranslationFault};
use kernel_images::image::KernelImage;
use kernel_images::orc::OrcTable;

pub(super) const USER64_CS: u64 = 0x33;
pub(super) const USER32_CS: u64 = 0x23;
pub(super) const USER_DS: u64 = 0x2b;
pub(super) const RFLAGS_IF: u64 = 1 << 9;

/// Data about a guest's kernel that is needed to unwind its stacks.
#[derive(Debug, Clone, Copy)]
pub struct KernelUnwinder<'k> {
    /// Unwind tables with link-time addresses; `None` for a kernel with frame pointers.
    pub orc: Option<&'k OrcTable>,
    /// Slide of the kernel: run-time address minus link-time address, wrapping.
    pub slide: u64,
    /// Link-time address range of the entry code (end exclusive); empty if unknown.
    pub entry_text: (u64, u64),
}

impl<'k> KernelUnwinder<'k> {
    /// Creates unwinding data from a kernel image. The kernel runs `slide` bytes above the image's
    /// link-time addresses.
    pub fn new(image: &'k KernelImage, slide: u64) -> Self {
        Self {
            orc: image.orc(),
            slide,
            entry_text: (image.entry_text().start, image.entry_text().end),
        }
    }
}

/// Reason why unwinding of the kernel part or the user part of a call chain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnwindStop {
    /// Unwinding reached the outermost frame.
    Complete,
    /// The output slice is full or the maximum depth is reached.
    Full,
    /// The limit on the number of memory reads, or the time limit, is exceeded.
    Spent,
    /// An address on the stack is not mapped. Its page is swapped out, or the frame pointer is
    /// wrong.
    Unmapped,
    /// No unwind table covers an address, and the frame pointer is invalid.
    NoTable,
    /// The stack pointer of a frame is not above that of the previous frame, or a return address is
    /// not a code address.
    BadFrame,
    /// The paging mode of the vCPU is unsupported.
    Unsupported,
}

impl UnwindStop {
    pub(super) const ALL: [Self; 7] = [
        Self::Complete,
        Self::Full,
        Self::Spent,
        Self::Unmapped,
        Self::NoTable,
        Self::BadFrame,
        Self::Unsupported,
    ];

    /// Returns the number by which a sample stores the reason `end`: 1 or higher, or 0 for `None`.
    #[expect(clippy::cast_possible_truncation, reason = "an index into a list of a few")]
    pub(super) fn code(end: Option<Self>) -> u8 {
        end.and_then(|end| Self::ALL.iter().position(|&e| e == end))
            .map_or(0, |at| at as u8 + 1)
    }

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }

    /// Returns the name of the limit that ended unwinding, or `None` if it ended for another
    /// reason.
    pub(super) fn limit_name(self) -> Option<&'static str> {
        match self {
            Self::Full => Some("depth"),
            Self::Spent => Some("time or reads"),
            _ => None,
        }
    }
}

/// User registers from which unwinding of the user part begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UserRegs {
    pub(super) ip: u64,
    pub(super) sp: u64,
    pub(super) bp: u64,
    pub(super) wide: bool,
    /// `true` if `ip` is known to be the address of the interrupted instruction, `false` if it may
    /// be the return address of a system call.
    pub(super) exact_ip: bool,
    pub(super) others: OtherRegs,
}

/// Location of the user registers that [`UserRegs`] does not contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OtherRegs {
    /// The user's callee-saved registers are in the vCPU, because the kernel has not changed them
    /// yet or has already restored them.
    InVcpu,
    /// The user's other registers are in the `pt_regs` at this address.
    At(u64),
    /// The user's other registers are unknown.
    Lost,
}

/// Output buffer for the addresses of a call chain, limited by the capacity of the slice.
pub(super) struct ChainBuffer<'o> {
    pub(super) slots: &'o mut [u64],
    pub(super) len: usize,
    pub(super) frames_left: usize,
}

impl ChainBuffer<'_> {
    pub(super) fn marker(&mut self, marker: u64) -> bool {
        // Omits a context marker if no frame fits after it.
        if self.len + 2 > self.slots.len() || self.frames_left == 0 {
            return false;
        }
        self.slots[self.len] = marker;
        self.len += 1;
        true
    }

    pub(super) fn frame(&mut self, ip: u64) -> Result<(), UnwindStop> {
        if self.frames_left == 0 || self.len == self.slots.len() {
            return Err(UnwindStop::Full);
        }
        self.slots[self.len] = ip;
        self.len += 1;
        self.frames_left -= 1;
        Ok(())
    }
}

pub(super) fn end_of(hole: TranslationFault) -> UnwindStop {
    match hole {
        TranslationFault::Spent => UnwindStop::Spent,
        _ => UnwindStop::Unmapped,
    }
}

/// Reads user registers from an interrupt frame, which consists of the five words that the CPU
/// pushes for an interrupt or exception. Returns `None` if they are implausible for user mode.
pub(super) fn plausible_user<M: GuestPhys + ?Sized>(
    space: &AddressSpace<'_, M>,
    [ip, cs, flags, sp, ss]: [u64; 5],
    bp: u64,
    others: OtherRegs,
) -> Option<UserRegs> {
    let plausible = (cs == USER64_CS || cs == USER32_CS)
        && ss == USER_DS
        && flags & RFLAGS_IF != 0
        && space.is_user_half(ip)
        && space.is_user_half(sp);
    plausible.then_some(UserRegs {
        ip,
        sp,
        bp,
        wide: cs == USER64_CS,
        exact_ip: false,
        others,
    })
}
