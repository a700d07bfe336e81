//! The user part of a chain: frame pointers, and what is done where they are late.

use super::parts::{End, Out, UserRegs, end_of};
use crate::paging::AddressSpace;
use crate::{Budget, GuestPhys};

/// Frames from `user` on, outwards.
pub(super) fn walk_user<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    user: UserRegs,
    budget: &mut Budget,
    out: &mut Out<'_>,
    guessed: &mut bool,
) -> End {
    if let Err(end) = out.frame(user.ip) {
        return end;
    }
    let width = if user.wide { 8 } else { 4 };
    let read = |space: &mut AddressSpace<'_, M>, at: u64, budget: &mut Budget| {
        if !space.is_user_half(at) {
            return Err(End::BadFrame);
        }
        if user.wide {
            space.read_u64(at, budget)
        } else {
            space.read_u32(at, budget).map(u64::from)
        }
        .map_err(end_of)
    };
    let (mut bp, mut floor) = (user.bp, user.sp);
    if user.wide {
        match mend_first_frame(space, &user, budget) {
            Mend::None => {}
            Mend::ReturnAt(at, why) => {
                let sure = why == Why::Instruction;
                if let Ok(ip) = read(space, at, budget)
                    && ip != 0
                    && space.is_user_half(ip)
                    && match why {
                        Why::Instruction => true,
                        Why::SystemCall => follows_call(space, ip, budget),
                        Why::Leaf => called_leaf(space, ip, user.ip, budget),
                    }
                {
                    // The caller is in the frame chain already if this function did set up a frame.
                    let known = !sure && read(space, bp.wrapping_add(8), budget) == Ok(ip);
                    if !known {
                        *guessed |= !sure;
                        if let Err(end) = out.frame(ip) {
                            return end;
                        }
                    }
                }
            }
            Mend::FrameAt(at) => bp = at,
        }
    }
    loop {
        // 0 ends a chain by the ABI; C libraries' start code leaves other small values, as the program found
        // them.
        if bp < 4096 {
            return End::Complete;
        }
        // Strictly upwards: what points down or at itself is no frame, and could go round for ever.
        if bp < floor {
            return End::BadFrame;
        }
        let frame = if user.wide && space.is_user_half(bp.wrapping_add(8)) {
            space.read_pair(bp, budget).map_err(end_of)
        } else {
            let ip = read(space, bp.wrapping_add(width), budget);
            ip.and_then(|ip| Ok((read(space, bp, budget)?, ip)))
        };
        let (next, ip) = match frame {
            Ok(frame) => frame,
            Err(end) => return end,
        };
        if ip == 0 {
            return End::Complete;
        }
        if !space.is_user_half(ip) {
            return End::BadFrame;
        }
        if let Err(end) = out.frame(ip) {
            return end;
        }
        // `is_user_half` bounds bp far below the top, so this does not wrap.
        floor = bp + width;
        bp = next;
    }
}

enum Mend {
    None,
    /// The return address is at this stack address, if what `Why` asks for is so.
    ReturnAt(u64, Why),
    /// The frame, not yet in rbp, is at this stack address.
    FrameAt(u64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Why {
    /// The interrupted instruction shows it.
    Instruction,
    /// A system call's stub: to be confirmed by any call before the return address.
    SystemCall,
    /// Perhaps a leaf: to be confirmed by a call to this very function.
    Leaf,
}

/// Looks at the code around the first user address for the cases where rbp is not this function's frame.
fn mend_first_frame<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    user: &UserRegs,
    budget: &mut Budget,
) -> Mend {
    if !space.is_user_half(user.ip) {
        return Mend::None;
    }
    if !user.exact_ip {
        // A system call returns to the instruction after `syscall`.
        let at = user.ip.wrapping_sub(2);
        if space.is_user_half(at) && space.read_few(at, budget) == Ok([0x0F, 0x05]) {
            return Mend::ReturnAt(user.sp, Why::SystemCall);
        }
    }
    // The end of a page may cut this short, which only forgoes the mending.
    let Ok(code) = space.read_few(user.ip, budget) else {
        return Mend::None;
    };
    match code {
        // endbr64 (then push rbp, as a rule), push rbp, ret: the return address is on top.
        [0xF3, 0x0F, 0x1E, 0xFA, 0x55] | [0x55, ..] | [0xC3, ..] => Mend::ReturnAt(user.sp, Why::Instruction),
        // mov rbp, rsp, in both encodings: the frame has been pushed but rbp is still the caller's.
        [0x48, 0x89, 0xE5, ..] | [0x48, 0x8B, 0xEC, ..] => Mend::FrameAt(user.sp),
        _ => Mend::ReturnAt(user.sp, Why::Leaf),
    }
}

/// Furthest from its start that an address is believed to be in a leaf function.
const LEAF_REACH: u64 = 16 << 10;

/// Whether the instruction before return address `ret` calls a function that begins shortly before `ip` and
/// does not begin by pushing rbp.
fn called_leaf<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    ret: u64,
    ip: u64,
    budget: &mut Budget,
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

/// Whether the bytes before `ip` end in a call instruction.
fn follows_call<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    ip: u64,
    budget: &mut Budget,
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
