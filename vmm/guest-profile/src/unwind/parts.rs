//! What the walks of a chain share: where they write, how they end, the registers they go on with.

use crate::GuestPhys;
use crate::paging::{AddressSpace, Hole};
use kernel_images::image::KernelImage;
use kernel_images::orc::OrcTable;

pub(super) const USER64_CS: u64 = 0x33;
pub(super) const USER32_CS: u64 = 0x23;
pub(super) const USER_DS: u64 = 0x2b;
pub(super) const RFLAGS_IF: u64 = 1 << 9;

/// The kernel a vCPU runs, as far as unwinding needs it.
#[derive(Debug, Clone, Copy)]
pub struct KernelUnwind<'k> {
    /// Unwind tables, in link-time addresses. `None`: the kernel has frame pointers.
    pub orc: Option<&'k OrcTable>,
    /// Running address less link-time address.
    pub slide: u64,
    /// First address of the entry code and the one behind it, link-time addresses; equal when not known.
    pub entry_text: (u64, u64),
}

impl<'k> KernelUnwind<'k> {
    /// For an image running `slide` above its link address.
    pub fn new(image: &'k KernelImage, slide: u64) -> Self {
        Self {
            orc: image.orc(),
            slide,
            entry_text: (image.entry_text().start, image.entry_text().end),
        }
    }
}

/// Why a part of a chain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The outermost frame was reached.
    Complete,
    /// The slice or the depth limit is used up.
    Full,
    /// Reads or time are used up.
    Spent,
    /// A stack address is not mapped (swapped out, or a wrong frame pointer).
    Unmapped,
    /// The unwind tables say nothing about an address and its frame pointer leads nowhere.
    NoTable,
    /// A frame does not lie above the one before, or its return address is not an address of code.
    BadFrame,
    /// The vCPU's paging mode is not walked.
    Unsupported,
}

impl End {
    pub(super) const ALL: [Self; 7] = [
        Self::Complete,
        Self::Full,
        Self::Spent,
        Self::Unmapped,
        Self::NoTable,
        Self::BadFrame,
        Self::Unsupported,
    ];

    /// Its number in a sample, from 1.
    #[expect(clippy::cast_possible_truncation, reason = "an index into a list of a few")]
    pub(super) fn code(end: Option<Self>) -> u8 {
        end.and_then(|end| Self::ALL.iter().position(|&e| e == end))
            .map_or(0, |at| at as u8 + 1)
    }

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }

    /// This bound of the walk ended it, not the stack.
    pub(super) fn bound(self) -> Option<&'static str> {
        match self {
            Self::Full => Some("depth"),
            Self::Spent => Some("time or reads"),
            _ => None,
        }
    }
}

/// User registers to go on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UserRegs {
    pub(super) ip: u64,
    pub(super) sp: u64,
    pub(super) bp: u64,
    pub(super) wide: bool,
    /// The registers are those of an interrupted instruction, not of a system call.
    pub(super) exact_ip: bool,
    pub(super) others: Others,
}

/// Where the user's other registers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Others {
    /// The vCPU still has, or already has, those that functions keep for their callers.
    InVcpu,
    /// In the `pt_regs` at this address.
    At(u64),
    /// Not known.
    Lost,
}

/// The addresses of a chain, as far as there is room.
pub(super) struct Out<'o> {
    pub(super) slots: &'o mut [u64],
    pub(super) len: usize,
    pub(super) frames_left: usize,
}

impl Out<'_> {
    pub(super) fn marker(&mut self, marker: u64) -> bool {
        // A marker without a frame after it would be noise.
        if self.len + 2 > self.slots.len() || self.frames_left == 0 {
            return false;
        }
        self.slots[self.len] = marker;
        self.len += 1;
        true
    }

    pub(super) fn frame(&mut self, ip: u64) -> Result<(), End> {
        if self.frames_left == 0 || self.len == self.slots.len() {
            return Err(End::Full);
        }
        self.slots[self.len] = ip;
        self.len += 1;
        self.frames_left -= 1;
        Ok(())
    }
}

pub(super) fn end_of(hole: Hole) -> End {
    match hole {
        Hole::Spent => End::Spent,
        _ => End::Unmapped,
    }
}

/// User registers from the five words that an interrupt or exception pushes, if they can be such.
pub(super) fn plausible_user<M: GuestPhys + ?Sized>(
    space: &AddressSpace<'_, M>,
    [ip, cs, flags, sp, ss]: [u64; 5],
    bp: u64,
    others: Others,
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
