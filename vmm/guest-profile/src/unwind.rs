//! Unwinds the call chain of a sample: kernel frames, then user frames, innermost first.
//!
//! Accuracy of the methods:
//! - **Kernel by ORC** is exact for all addresses that the tables cover (vmlinux, but not modules
//!   and JIT code). For other addresses, the frame pointer is tried once, as the kernel does, and
//!   the chain is marked as guessed.
//! - **Kernel by frame pointers** is used for kernels built with frame pointers.
//! - **User by frame pointers** is correct for code built with frame pointers. In the first
//!   instructions of a function and at its `ret`, the frame pointer is that of the caller; the walk
//!   recognizes this by the interrupted instruction, which is exact. Two more cases are only
//!   probable, and the chain is then marked as guessed. First, system-call stubs of C libraries
//!   have no frame. The walk uses the return address at `rsp` if a call instruction precedes that
//!   address. Second, leaf functions have no frame even if compiled with frame pointers. The walk
//!   uses the return address at `rsp` if the call before it targets an address just below the
//!   interrupted one, and the code at that target does not begin with `push rbp`.
//! - **From kernel to user**, the walk takes the user registers from the `pt_regs` (registers saved
//!   on kernel entry) that kernel unwinding reaches. If kernel unwinding reaches none, the walk
//!   uses the `pt_regs` at the top of the kernel stack after a plausibility check, and marks the
//!   chain as guessed. In the entry code, where no `pt_regs` is complete, it uses the registers
//!   saved by SYSCALL and the entry code (see `entry`).
//!
//! A walk is bounded by the output slice, by [`UnwindLimits`], and by the rule that stack addresses
//! must ascend.

pub mod context;
mod entry;
mod parts;
mod user;

use std::time::Duration;

use super::paging::AddressSpace;
use super::{GuestMemoryReadBudget, GuestPhys, GuestRegs};
use kernel_images::orc::{OrcEntry, OrcFrameKind, OrcRegister, OrcTable};
use parts::{ChainBuffer, OtherRegs, USER32_CS, UserRegs, end_of, plausible_user};
pub use parts::{KernelUnwinder, UnwindStop};

/// `PERF_CONTEXT_GUEST_KERNEL`, which marks the following frames as guest kernel frames.
pub const CONTEXT_GUEST_KERNEL: u64 = (-2176i64).cast_unsigned();
/// `PERF_CONTEXT_GUEST_USER`, which marks the following frames as guest user frames.
pub const CONTEXT_GUEST_USER: u64 = (-2560i64).cast_unsigned();

/// Offsets in `struct pt_regs` of x86-64, in bytes.
mod pt_regs {
    pub const R13: u64 = 16;
    pub const BP: u64 = 32;
    pub const R10: u64 = 56;
    pub const DX: u64 = 96;
    pub const DI: u64 = 112;
    pub const IP: u64 = 128;
    pub const SIZE: u64 = 168;
}

/// Size of a kernel stack, in bytes. Kernel stacks are 16 KiB and aligned to their size.
const THREAD_SIZE: u64 = 16 << 10;
/// Maximum number of stacks that one kernel call chain may cross (NMI, #DB, #MC, #DF, #VC, IRQ,
/// soft IRQ, entry, task).
const MAX_STACK_SWITCHES: u32 = 9;

/// Limits of unwinding the call chain of one sample.
#[derive(Debug, Clone, Copy)]
pub struct UnwindLimits {
    /// Maximum number of kernel and user frames, excluding context markers.
    pub max_frames: usize,
    /// Maximum number of guest memory reads for unwinding the chain.
    pub max_reads: u32,
    /// Maximum time for unwinding the chain; `None` for no time limit.
    pub max_time: Option<Duration>,
}

impl Default for UnwindLimits {
    /// Returns limits with the maximum depth of perf (127 frames). The read limit is four times the
    /// number of reads that a chain of this depth needs.
    fn default() -> Self {
        Self {
            max_frames: 127,
            max_reads: 2048,
            max_time: Some(Duration::from_micros(500)),
        }
    }
}

/// Reasons why unwinding of the kernel part and of the user part of a call chain ended, as stored
/// in a sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct UnwindStopReasons {
    /// Reason why unwinding of the kernel part ended; `None` if there is no kernel part.
    pub kernel: Option<UnwindStop>,
    /// Reason why unwinding of the user part ended; `None` if there is no user part.
    pub user: Option<UnwindStop>,
    /// `true` if the unwinder has guessed at least one frame of the chain.
    pub guessed: bool,
}

impl UnwindStopReasons {
    /// Encodes the reasons and the guess flag in two bytes, for the raw data of a sample.
    pub fn to_bytes(self) -> [u8; 2] {
        [
            UnwindStop::code(self.kernel) | UnwindStop::code(self.user) << 4,
            u8::from(self.guessed),
        ]
    }

    /// Decodes two bytes from the raw data of a sample. Accepts any bytes.
    pub fn from_bytes([ends, guessed]: [u8; 2]) -> Self {
        Self {
            kernel: UnwindStop::from_code(ends & 15),
            user: UnwindStop::from_code(ends >> 4),
            guessed: guessed & 1 != 0,
        }
    }

    /// Returns the name of the limit that truncated the chain, or `None` if the chain is complete
    /// or ended for another reason.
    pub fn truncation_reason(self) -> Option<&'static str> {
        let bound = |end: Option<UnwindStop>| end.and_then(UnwindStop::limit_name);
        bound(self.user).or(bound(self.kernel))
    }
}

/// Result of [`walk`], which writes the addresses of the chain to the output slice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CallChain {
    /// Number of entries of the output slice that are filled, including context markers.
    pub len: usize,
    /// Number of kernel frames in the chain.
    pub kernel_frames: usize,
    /// Number of user frames in the chain.
    pub user_frames: usize,
    /// Reason why unwinding of the kernel part ended; `None` for a user sample.
    pub kernel_end: Option<UnwindStop>,
    /// Reason why unwinding of the user part ended; `None` if there is no user part.
    pub user_end: Option<UnwindStop>,
    /// `true` if the unwinder has guessed at least one frame of the chain.
    pub guessed: bool,
    /// Number of guest memory reads for the chain.
    pub reads: u32,
    /// User registers with which unwinding of the user part starts: those at the sample, or those
    /// at the entry into the kernel. `None` if unknown.
    user: Option<UserRegs>,
}

impl CallChain {
    /// Returns the reasons why unwinding of the kernel part and of the user part ended.
    pub fn stop_reasons(&self) -> UnwindStopReasons {
        UnwindStopReasons {
            kernel: self.kernel_end,
            user: self.user_end,
            guessed: self.guessed,
        }
    }
}

/// Unwinds the kernel and user stacks of a stopped vCPU into `out`.
///
/// The chain starts with the interrupted address. If `kernel` is `None`, the kernel part of a
/// sample consists only of this address, and the user part is still unwound if the user registers
/// are found. Does not allocate.
pub fn walk<M: GuestPhys + ?Sized>(
    mem: &M,
    regs: &GuestRegs,
    kernel: Option<KernelUnwinder<'_>>,
    limits: &UnwindLimits,
    out: &mut [u64],
) -> CallChain {
    let mut budget = GuestMemoryReadBudget::new(limits.max_reads, limits.max_time);
    let mut out = ChainBuffer {
        slots: out,
        len: 0,
        frames_left: limits.max_frames,
    };
    let mut chain = CallChain::default();
    let in_user = (regs.cpl == 3).then_some(UserRegs {
        ip: regs.rip,
        sp: regs.rsp,
        bp: regs.rbp,
        wide: regs.code64,
        exact_ip: true,
        others: OtherRegs::InVcpu,
    });
    if in_user.is_none() && (!out.marker(CONTEXT_GUEST_KERNEL) || out.frame(regs.rip).is_err()) {
        chain.kernel_end = Some(UnwindStop::Full);
        chain.len = out.len;
        return chain;
    }
    let Ok(mut space) = AddressSpace::of(mem, regs) else {
        without_tables(in_user, &mut chain, &mut out);
        return chain;
    };
    let user = in_user.or_else(|| walk_kernel(&mut space, regs, kernel, &mut budget, &mut chain, &mut out));
    chain.user = user;
    if let Some(u) = user
        && out.marker(CONTEXT_GUEST_USER)
    {
        let before = out.len;
        let end = user::walk_user(&mut space, u, &mut budget, &mut out, &mut chain.guessed);
        chain.user_frames = out.len - before;
        chain.user_end = Some(end);
    }
    chain.len = out.len;
    chain.reads = budget.reads_used();
    chain
}

/// Builds the call chain of a sample from its interrupted address only, because the vCPU's page
/// tables cannot be used.
fn without_tables(user: Option<UserRegs>, chain: &mut CallChain, out: &mut ChainBuffer<'_>) {
    match user {
        None => {
            chain.kernel_frames = 1;
            chain.kernel_end = Some(UnwindStop::Unsupported);
        }
        Some(user) => {
            if out.marker(CONTEXT_GUEST_USER) && out.frame(user.ip).is_ok() {
                chain.user_frames = 1;
                chain.user_end = Some(UnwindStop::Unsupported);
            }
        }
    }
    chain.len = out.len;
}

/// Appends the kernel frames to the chain, except the innermost one, which is already in `out`.
/// Returns the user registers if the kernel was entered from user mode.
fn walk_kernel<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    regs: &GuestRegs,
    kernel: Option<KernelUnwinder<'_>>,
    budget: &mut GuestMemoryReadBudget,
    chain: &mut CallChain,
    out: &mut ChainBuffer<'_>,
) -> Option<UserRegs> {
    if kernel.is_some_and(|k| entry::without_regs(&k, regs))
        && let Some(user) = entry::user_regs(space, regs, budget)
    {
        chain.kernel_end = Some(UnwindStop::Complete);
        chain.kernel_frames = 1;
        chain.guessed = user.guessed;
        return Some(user.regs);
    }
    let mut walk = KernelWalk {
        space,
        budget,
        out,
        state: WalkState::from_regs(regs),
        guessed: false,
        user: None,
    };
    let end = match kernel {
        None => UnwindStop::NoTable,
        Some(KernelUnwinder {
            orc: Some(orc),
            slide,
            ..
        }) => walk.by_orc(orc, slide),
        Some(KernelUnwinder { orc: None, .. }) => walk.by_frame_pointers(),
    };
    if walk.user.is_none() && walk.out.frames_left > 0 {
        walk.user_from_stack_top(end, kernel.is_some_and(|k| k.orc.is_none()));
    }
    let (found, guessed) = (walk.user, walk.guessed);
    chain.kernel_end = Some(end);
    chain.kernel_frames = out.len - 1;
    chain.guessed = guessed;
    found
}

#[derive(Clone, Copy)]
struct WalkState {
    ip: u64,
    sp: u64,
    bp: u64,
    /// Values of registers to which some ORC entries refer. Known only at the first frame and at a
    /// frame whose registers come from a `pt_regs`.
    dx: Option<u64>,
    di: Option<u64>,
    r10: Option<u64>,
    r13: Option<u64>,
    /// `true` if `ip` is the address of the interrupted instruction, `false` if it is a return
    /// address.
    exact_ip: bool,
}

impl WalkState {
    /// Creates a state with these registers. All other registers are unknown.
    fn at(ip: u64, sp: u64, bp: u64, exact_ip: bool) -> Self {
        Self {
            ip,
            sp,
            bp,
            dx: None,
            di: None,
            r10: None,
            r13: None,
            exact_ip,
        }
    }

    fn from_regs(r: &GuestRegs) -> Self {
        Self {
            dx: Some(r.rdx),
            di: Some(r.rdi),
            r10: Some(r.r10),
            r13: Some(r.r13),
            ..Self::at(r.rip, r.rsp, r.rbp, true)
        }
    }
}

struct KernelWalk<'w, 'm, 'o, M: GuestPhys + ?Sized> {
    space: &'w mut AddressSpace<'m, M>,
    budget: &'w mut GuestMemoryReadBudget,
    out: &'w mut ChainBuffer<'o>,
    state: WalkState,
    guessed: bool,
    user: Option<UserRegs>,
}

/// Result of unwinding one frame of the kernel stack: how the walk continues.
enum WalkStep {
    Frame,
    Boundary,
}

impl<M: GuestPhys + ?Sized> KernelWalk<'_, '_, '_, M> {
    fn word(&mut self, gva: u64) -> Result<u64, UnwindStop> {
        if !self.space.is_kernel_half(gva) {
            return Err(UnwindStop::BadFrame);
        }
        self.space.read_u64(gva, self.budget).map_err(end_of)
    }

    fn by_orc(&mut self, orc: &OrcTable, slide: u64) -> UnwindStop {
        let mut switches = 0;
        loop {
            let before = self.state.sp;
            // A return address may belong to the next function, because the call may be the last
            // instruction of its function. The walk therefore looks up the preceding byte.
            let probe = self.state.ip.wrapping_sub(u64::from(!self.state.exact_ip));
            let step = match orc.find(probe.wrapping_sub(slide)) {
                Some(OrcEntry {
                    kind: OrcFrameKind::End,
                    ..
                }) => return UnwindStop::Complete,
                Some(entry) if entry.kind != OrcFrameKind::Undefined => self.orc_step(&entry),
                _ => self.guess_by_frame_pointer(),
            };
            match step {
                Err(end) => return end,
                Ok(WalkStep::Boundary) => return UnwindStop::Complete,
                Ok(WalkStep::Frame) => {}
            }
            if let Err(end) = self.take_frame(before, &mut switches) {
                return end;
            }
        }
    }

    /// Appends the current frame to the chain. Fails if the frame is on the same stack as the
    /// previous one but not above the stack pointer `before` of the previous frame.
    #[inline]
    fn take_frame(&mut self, before: u64, switches: &mut u32) -> Result<(), UnwindStop> {
        let WalkState { sp, ip, .. } = self.state;
        if sp <= before {
            *switches += 1;
            let same_stack = before & !(THREAD_SIZE - 1) == sp & !(THREAD_SIZE - 1);
            if same_stack || *switches > MAX_STACK_SWITCHES {
                return Err(UnwindStop::BadFrame);
            }
        }
        if !self.space.is_kernel_half(ip) {
            return Err(UnwindStop::BadFrame);
        }
        self.out.frame(ip)
    }

    fn orc_step(&mut self, e: &OrcEntry) -> Result<WalkStep, UnwindStop> {
        let s = self.state;
        let base = match e.sp_reg {
            OrcRegister::Sp | OrcRegister::SpIndirect => Some(s.sp),
            OrcRegister::Bp | OrcRegister::BpIndirect => Some(s.bp),
            OrcRegister::R10 => s.r10,
            OrcRegister::R13 => s.r13,
            OrcRegister::Di => s.di,
            OrcRegister::Dx => s.dx,
            OrcRegister::Undefined | OrcRegister::PrevSp => None,
        }
        .ok_or(UnwindStop::NoTable)?;
        let offset = i64::from(e.sp_offset);
        let sp = match e.sp_reg {
            OrcRegister::SpIndirect => self.word(base)?.wrapping_add_signed(offset),
            OrcRegister::BpIndirect => self.word(base.wrapping_add_signed(offset))?,
            _ => base.wrapping_add_signed(offset),
        };
        let mut next = WalkState::at(s.ip, s.sp, s.bp, s.exact_ip);
        match e.kind {
            OrcFrameKind::Call => {
                next.ip = self.word(sp.wrapping_sub(8))?;
                next.sp = sp;
                next.exact_ip = false;
            }
            OrcFrameKind::Regs => return self.take_regs(sp, None),
            OrcFrameKind::RegsPartial => return self.take_regs(sp.wrapping_sub(pt_regs::IP), Some(s.bp)),
            OrcFrameKind::End | OrcFrameKind::Undefined => return Err(UnwindStop::NoTable),
        }
        match e.bp_reg {
            OrcRegister::Undefined => {}
            OrcRegister::PrevSp => next.bp = self.word(sp.wrapping_add_signed(i64::from(e.bp_offset)))?,
            OrcRegister::Bp => next.bp = self.word(s.bp.wrapping_add_signed(i64::from(e.bp_offset)))?,
            _ => return Err(UnwindStop::NoTable),
        }
        self.state = next;
        Ok(WalkStep::Frame)
    }

    /// Continues from the registers saved in the `pt_regs` at `at`. If `bp` is given, it is the
    /// frame pointer, and only the last five words of the `pt_regs` are valid. Returns
    /// [`WalkStep::Boundary`] if the registers are those of user mode.
    fn take_regs(&mut self, at: u64, bp: Option<u64>) -> Result<WalkStep, UnwindStop> {
        let hardware = at.wrapping_add(pt_regs::IP);
        let ip = self.word(hardware)?;
        let cs = self.word(hardware.wrapping_add(8))?;
        let sp = self.word(hardware.wrapping_add(24))?;
        let partial = bp.is_some();
        let bp = match bp {
            Some(bp) => bp,
            None => self.word(at.wrapping_add(pt_regs::BP))?,
        };
        if cs & 3 == 3 {
            // Whether `ip` is exact depends on the kind of kernel entry, which determines whether
            // orig_ax (the word below ip) contains a system-call number, an error code or a
            // negative value. Only the first user frame depends on this, and is derived from the
            // code instead.
            self.user = Some(UserRegs {
                ip,
                sp,
                bp,
                wide: cs & 0xFFFF != USER32_CS,
                exact_ip: false,
                // During kernel entry and exit, it is unknown which registers still have the user's
                // values.
                others: if partial {
                    OtherRegs::Lost
                } else {
                    OtherRegs::At(at)
                },
            });
            return Ok(WalkStep::Boundary);
        }
        let mut next = WalkState::at(ip, sp, bp, true);
        if !partial {
            next.dx = Some(self.word(at.wrapping_add(pt_regs::DX))?);
            next.di = Some(self.word(at.wrapping_add(pt_regs::DI))?);
            next.r10 = Some(self.word(at.wrapping_add(pt_regs::R10))?);
            next.r13 = Some(self.word(at.wrapping_add(pt_regs::R13))?);
        }
        self.state = next;
        Ok(WalkStep::Frame)
    }

    /// Guesses the caller of an address for which there is no table entry (in a module or in
    /// generated code). The frame pointer must point into the current stack, and the frame to which
    /// it points must contain a kernel address.
    fn guess_by_frame_pointer(&mut self) -> Result<WalkStep, UnwindStop> {
        let WalkState { sp, bp, .. } = self.state;
        if bp < sp || bp - sp > THREAD_SIZE || bp % 8 != 0 {
            return Err(UnwindStop::NoTable);
        }
        self.guessed = true;
        self.frame_pointer_step()
    }

    fn frame_pointer_step(&mut self) -> Result<WalkStep, UnwindStop> {
        let bp = self.state.bp;
        let ip = self.word(bp.wrapping_add(8))?;
        let next = self.word(bp)?;
        if !self.space.is_kernel_half(ip) {
            return Err(UnwindStop::NoTable);
        }
        self.state = WalkState::at(ip, bp.wrapping_add(16), next, false);
        Ok(WalkStep::Frame)
    }

    /// Unwinds the stack of a kernel built with frame pointers. On exception entry, such a kernel
    /// sets rbp to the address of the `pt_regs` with bit 0 set. On system-call entry, it sets rbp
    /// to 0.
    fn by_frame_pointers(&mut self) -> UnwindStop {
        let mut switches = 0;
        loop {
            let WalkState { bp, sp: before, .. } = self.state;
            if bp == 0 {
                return UnwindStop::Complete;
            }
            let step = if bp & 1 == 1 {
                self.take_regs(bp & !1, None)
            } else {
                self.frame_pointer_step()
            };
            match step {
                Err(UnwindStop::NoTable) => return UnwindStop::BadFrame,
                Err(end) => return end,
                Ok(WalkStep::Boundary) => return UnwindStop::Complete,
                Ok(WalkStep::Frame) => {}
            }
            if let Err(end) = self.take_frame(before, &mut switches) {
                return end;
            }
        }
    }

    /// Takes the user registers from the `pt_regs` at the top of the task's kernel stack, after the
    /// kernel walk ended with `end` and has not found them. Does nothing if a limit ended the walk,
    /// or after a complete walk with ORC tables, which would have found the user registers.
    fn user_from_stack_top(&mut self, end: UnwindStop, frame_pointers: bool) {
        if matches!(end, UnwindStop::Spent | UnwindStop::Full)
            || (end == UnwindStop::Complete && !frame_pointers)
        {
            return;
        }
        let top = (self.state.sp & !(THREAD_SIZE - 1)).wrapping_add(THREAD_SIZE);
        let at = top.wrapping_sub(pt_regs::SIZE);
        let word = |walk: &mut Self, offset| walk.word(at.wrapping_add(offset)).ok();
        let Some([bp, ip, cs, flags, sp, ss]) = (|| {
            Some([
                word(self, pt_regs::BP)?,
                word(self, pt_regs::IP)?,
                word(self, pt_regs::IP + 8)?,
                word(self, pt_regs::IP + 16)?,
                word(self, pt_regs::IP + 24)?,
                word(self, pt_regs::IP + 32)?,
            ])
        })() else {
            return;
        };
        if let Some(user) = plausible_user(self.space, [ip, cs, flags, sp, ss], bp, OtherRegs::At(at)) {
            self.guessed |= end != UnwindStop::Complete;
            self.user = Some(user);
        }
    }
}

#[cfg(test)]
mod tests;
