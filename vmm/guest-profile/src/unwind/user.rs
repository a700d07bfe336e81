//! Unwinds the user part of a call chain with frame pointers. If rbp is not the frame pointer of
//! the innermost function, the first step is corrected.

use super::parts::{ChainBuffer, UnwindStop, UserRegs, end_of};
use crate::paging::AddressSpace;
use crate::{GuestMemoryReadBudget, GuestPhys};

/// Appends the user frames to the chain, innermost first. `user` are the registers of the innermost
/// frame. Sets `guessed` if a frame is guessed. Returns the reason why unwinding ended.
pub(super) fn walk_user<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    user: UserRegs,
    budget: &mut GuestMemoryReadBudget,
    out: &mut ChainBuffer<'_>,
    guessed: &mut bool,
) -> UnwindStop {
    if let Err(end) = out.frame(user.ip) {
        return end;
    }
    let width = if user.wide { 8 } else { 4 };
    let (mut bp, mut floor) = (user.bp, user.sp);
    if user.wide {
        match fix_first_frame(space, &user, budget) {
            FrameFix::None => {}
            FrameFix::ReturnAt(at, why) => {
                if let Some(ip) = confirmed_caller(space, &user, at, why, budget) {
                    // If the function has already set up its frame, the frame pointer leads to the
                    // same caller, which is not added twice.
                    let sure = why == Evidence::Instruction;
                    let known = !sure && read_word(space, true, bp.wrapping_add(8), budget) == Ok(ip);
                    if !known {
                        *guessed |= !sure;
                        if let Err(end) = out.frame(ip) {
                            return end;
                        }
                    }
                }
            }
            FrameFix::FrameAt(at) => bp = at,
        }
    }
    loop {
        // By the ABI, the outermost frame has rbp = 0. Some start-up code leaves other small
        // values.
        if bp < 4096 {
            return UnwindStop::Complete;
        }
        // The addresses of the frames must strictly ascend. Otherwise, a frame that points to
        // itself or downwards could cause an endless loop.
        if bp < floor {
            return UnwindStop::BadFrame;
        }
        let frame = if user.wide && space.is_user_half(bp.wrapping_add(8)) {
            space.read_pair(bp, budget).map_err(end_of)
        } else {
            let ip = read_word(space, user.wide, bp.wrapping_add(width), budget);
            ip.and_then(|ip| Ok((read_word(space, user.wide, bp, budget)?, ip)))
        };
        let (next, ip) = match frame {
            Ok(frame) => frame,
            Err(end) => return end,
        };
        if ip == 0 {
            return UnwindStop::Complete;
        }
        if !space.is_user_half(ip) {
            return UnwindStop::BadFrame;
        }
        if let Err(end) = out.frame(ip) {
            return end;
        }
        // `is_user_half` limits bp to values far below the top, so this addition does not wrap.
        floor = bp + width;
        bp = next;
    }
}

/// Reads a word of the user's stack, which has 8 bytes if `wide` is set and 4 otherwise.
fn read_word<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    wide: bool,
    at: u64,
    budget: &mut GuestMemoryReadBudget,
) -> Result<u64, UnwindStop> {
    if !space.is_user_half(at) {
        return Err(UnwindStop::BadFrame);
    }
    if wide {
        space.read_u64(at, budget)
    } else {
        space.read_u32(at, budget).map(u64::from)
    }
    .map_err(end_of)
}

/// Returns the return address at the stack address `at`, if the code before it confirms `why`.
fn confirmed_caller<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    user: &UserRegs,
    at: u64,
    why: Evidence,
    budget: &mut GuestMemoryReadBudget,
) -> Option<u64> {
    let ip = read_word(space, user.wide, at, budget).ok()?;
    if ip == 0 || !space.is_user_half(ip) {
        return None;
    }
    let is_confirmed = match why {
        Evidence::Instruction => true,
        Evidence::SystemCall => follows_call(space, ip, budget),
        Evidence::Leaf => called_leaf(space, ip, user.ip, budget),
    };
    is_confirmed.then_some(ip)
}

enum FrameFix {
    None,
    /// The current function has no frame. The return address is at this stack address, if the
    /// [`Evidence`] is confirmed.
    ReturnAt(u64, Evidence),
    /// The frame of the current function is at this stack address, but rbp does not contain the
    /// address yet.
    FrameAt(u64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Evidence {
    /// The interrupted instruction alone determines the location of the return address.
    Instruction,
    /// The code looks like a system-call stub. This guess is confirmed if a call instruction
    /// precedes the return address.
    SystemCall,
    /// The code may be a leaf function. This guess is confirmed if the call before the return
    /// address targets this function.
    Leaf,
}

/// Inspects the code around the first user address for cases in which rbp is not the frame pointer
/// of the current function.
fn fix_first_frame<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    user: &UserRegs,
    budget: &mut GuestMemoryReadBudget,
) -> FrameFix {
    if !space.is_user_half(user.ip) {
        return FrameFix::None;
    }
    if !user.exact_ip {
        // The address belongs to the instruction after `syscall`, if the user entered the kernel by
        // a system call.
        let at = user.ip.wrapping_sub(2);
        if space.is_user_half(at) && space.read_few(at, budget) == Ok([0x0F, 0x05]) {
            return FrameFix::ReturnAt(user.sp, Evidence::SystemCall);
        }
    }
    // The read fails if the code crosses into an unmapped page. The frame pointer is then used as
    // it is.
    let Ok(code) = space.read_few(user.ip, budget) else {
        return FrameFix::None;
    };
    match code {
        // endbr64 (usually followed by push rbp), push rbp, or ret. The return address is on top of
        // the stack.
        [0xF3, 0x0F, 0x1E, 0xFA, 0x55] | [0x55, ..] | [0xC3, ..] => {
            FrameFix::ReturnAt(user.sp, Evidence::Instruction)
        }
        // mov rbp, rsp, in both encodings. The frame has been pushed, but rbp still belongs to the
        // caller.
        [0x48, 0x89, 0xE5, ..] | [0x48, 0x8B, 0xEC, ..] => FrameFix::FrameAt(user.sp),
        _ => FrameFix::ReturnAt(user.sp, Evidence::Leaf),
    }
}

/// Maximum distance in bytes from the start of a leaf function to an interrupted address in it.
const LEAF_REACH: u64 = 16 << 10;

/// Returns whether the instruction before return address `ret` calls a function that starts shortly
/// before `ip` and does not begin with push rbp.
fn called_leaf<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    ret: u64,
    ip: u64,
    budget: &mut GuestMemoryReadBudget,
) -> bool {
    let Some(at) = ret.checked_sub(5) else {
        return false;
    };
    let Ok([0xE8, relative @ ..]) = space.read_few::<5>(at, budget) else {
        return false;
    };
    let relative = i32::from_le_bytes(relative);
    let target = ret.wrapping_add_signed(i64::from(relative));
    ip.checked_sub(target).is_some_and(|off| off < LEAF_REACH)
        && space.is_user_half(target)
        && space
            .read_few(target, budget)
            .is_ok_and(|start| start[0] != 0x55 && start != [0xF3, 0x0F, 0x1E, 0xFA, 0x55])
}

/// Returns whether the bytes before `ip` end with a call instruction.
fn follows_call<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    ip: u64,
    budget: &mut GuestMemoryReadBudget,
) -> bool {
    let Some(at) = ip.checked_sub(7) else { return false };
    let Ok(c) = space.read_few::<7>(at, budget) else {
        return false;
    };
    let modrm_call = |m: u8| (m >> 3) & 7 == 2;
    c[2] == 0xE8
        || (c[5] == 0xFF && modrm_call(c[6]) && c[6] >> 6 == 3)
        || (c[4] == 0xFF && modrm_call(c[5]) && c[5] >> 6 == 1)
        || (c[1] == 0xFF && modrm_call(c[2]) && (c[2] >> 6 == 2 || c[2] == 0x15))
        || (c[5] == 0xFF && modrm_call(c[6]) && c[6] >> 6 == 0)
}
