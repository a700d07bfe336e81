//! The call chain of one sample: kernel frames, then user frames, innermost first.
//!
//! What is exact and what is not:
//! - **Kernel by ORC** is exact wherever the tables cover the address (all of vmlinux; not modules, JIT code).
//!   Where they do not, a frame pointer is tried once, as the kernel does, and the chain is marked as guessed.
//! - **Kernel by frame pointers**, for kernels built with them.
//! - **User by frame pointers** is right for code that keeps them. Where the frame pointer is known to be late
//!   it is mended: in the first instructions of a function and at its `ret`, by looking at the instruction
//!   interrupted (this is certain). Two more cases are likely and marked as guessed: system-call stubs of C
//!   libraries, which keep no frame, by the return address at `rsp` when a call instruction precedes it; and
//!   leaf functions (compilers keep no frame in them even when told to keep frame pointers), when the call that
//!   precedes the return address at `rsp` goes to just below the interrupted address and its target does not
//!   begin with `push rbp`.
//! - **From kernel to user**: by the `pt_regs` the unwinding arrives at; if it did not arrive, by the one at the
//!   top of the kernel stack, after checking that it looks like one (then also marked as guessed).
//!
//! A walk is bounded by the slice given, by [`Limits`], and by its own rule that a stack goes one way.

use std::time::Duration;

use super::image::KernelImage;
use super::orc::{Kind, OrcEntry, OrcTable, Reg};
use super::paging::{AddressSpace, Hole};
use super::{Budget, GuestPhys, GuestRegs};

/// `PERF_CONTEXT_GUEST_KERNEL`: the frames after it are the guest kernel's.
pub const CONTEXT_GUEST_KERNEL: u64 = (-2176i64) as u64;
/// `PERF_CONTEXT_GUEST_USER`: the frames after it are guest user space's.
pub const CONTEXT_GUEST_USER: u64 = (-2560i64) as u64;

/// `struct pt_regs` of x86-64: offsets in bytes.
mod pt_regs {
    pub const R13: u64 = 16;
    pub const BP: u64 = 32;
    pub const R10: u64 = 56;
    pub const DX: u64 = 96;
    pub const DI: u64 = 112;
    pub const IP: u64 = 128;
    pub const SIZE: u64 = 168;
}

/// Kernel stacks are 16 KiB and aligned to their size.
const THREAD_SIZE: u64 = 16 << 10;
/// Stacks a kernel chain may pass through: NMI, #DB, #MC, #DF, #VC, IRQ, soft IRQ, entry, task.
const MAX_STACK_SWITCHES: u32 = 9;
const USER64_CS: u64 = 0x33;
const USER32_CS: u64 = 0x23;
const USER_DS: u64 = 0x2b;
const RFLAGS_IF: u64 = 1 << 9;

/// What one chain may cost.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Frames of kernel and user together (markers not counted).
    pub max_frames: usize,
    /// Reads of guest memory.
    pub max_reads: u32,
    /// Time. `None` leaves it to `max_reads`.
    pub max_time: Option<Duration>,
}

impl Default for Limits {
    /// perf's default depth, and four times the reads that such a chain takes.
    fn default() -> Self {
        Self {
            max_frames: 127,
            max_reads: 2048,
            max_time: Some(Duration::from_micros(500)),
        }
    }
}

/// The kernel a vCPU runs, as far as unwinding needs it.
#[derive(Debug, Clone, Copy)]
pub struct KernelUnwind<'k> {
    /// Unwind tables, in link-time addresses. `None`: the kernel has frame pointers.
    pub orc: Option<&'k OrcTable>,
    /// What running addresses have over link-time ones.
    pub slide: u64,
}

impl<'k> KernelUnwind<'k> {
    /// For an image running `slide` above its link address.
    pub fn new(image: &'k KernelImage, slide: u64) -> Self {
        Self {
            orc: image.orc(),
            slide,
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
    /// A frame does not lie above the one before, or its return address is none.
    BadFrame,
    /// The vCPU's paging mode is not walked.
    Unsupported,
}

/// What a walk found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    /// Entries of the slice that are filled, markers included.
    pub len: usize,
    /// Kernel frames among them.
    pub kernel_frames: usize,
    /// User frames among them.
    pub user_frames: usize,
    /// How the kernel part ended; `None` when the sample is a user one.
    pub kernel_end: Option<End>,
    /// How the user part ended; `None` when there is none.
    pub user_end: Option<End>,
    /// A step was taken that is likely and not certain.
    pub guessed: bool,
    /// Reads of guest memory made.
    pub reads: u32,
}

/// User registers to go on with.
#[derive(Debug, Clone, Copy)]
struct UserRegs {
    ip: u64,
    sp: u64,
    bp: u64,
    wide: bool,
    /// The registers are those of an interrupted instruction, not of a system call.
    exact_ip: bool,
}

struct Out<'o> {
    slots: &'o mut [u64],
    len: usize,
    frames_left: usize,
}

impl Out<'_> {
    fn marker(&mut self, marker: u64) -> bool {
        // A marker without a frame after it would be noise.
        if self.len + 2 > self.slots.len() || self.frames_left == 0 {
            return false;
        }
        self.slots[self.len] = marker;
        self.len += 1;
        true
    }

    fn frame(&mut self, ip: u64) -> Result<(), End> {
        if self.frames_left == 0 || self.len == self.slots.len() {
            return Err(End::Full);
        }
        self.slots[self.len] = ip;
        self.len += 1;
        self.frames_left -= 1;
        Ok(())
    }
}

fn end_of(hole: Hole) -> End {
    match hole {
        Hole::Spent => End::Spent,
        _ => End::Unmapped,
    }
}

/// Walks the stacks of a stopped vCPU into `out`.
///
/// The chain starts with the interrupted address itself. Without `kernel` (none known) a kernel sample has that
/// one frame, and the user part is still looked for. Allocates nothing.
pub fn walk<M: GuestPhys + ?Sized>(
    mem: &M,
    regs: &GuestRegs,
    kernel: Option<KernelUnwind<'_>>,
    limits: &Limits,
    out: &mut [u64],
) -> Chain {
    let mut budget = Budget::new(limits.max_reads, limits.max_time);
    let mut out = Out {
        slots: out,
        len: 0,
        frames_left: limits.max_frames,
    };
    let mut chain = Chain {
        len: 0,
        kernel_frames: 0,
        user_frames: 0,
        kernel_end: None,
        user_end: None,
        guessed: false,
        reads: 0,
    };
    let space = AddressSpace::of(mem, regs);
    let user = if regs.cpl == 3 {
        Some(UserRegs {
            ip: regs.rip,
            sp: regs.rsp,
            bp: regs.rbp,
            wide: regs.code64,
            exact_ip: true,
        })
    } else {
        if !out.marker(CONTEXT_GUEST_KERNEL) || out.frame(regs.rip).is_err() {
            chain.kernel_end = Some(End::Full);
            chain.len = out.len;
            return chain;
        }
        match &space {
            Err(_) => {
                chain.kernel_end = Some(End::Unsupported);
                None
            }
            Ok(_) => None,
        }
    };
    let Ok(mut space) = space else {
        // No tables to walk: the interrupted address is all there is.
        if let Some(u) = user
            && out.marker(CONTEXT_GUEST_USER)
            && out.frame(u.ip).is_ok()
        {
            chain.user_frames = 1;
            chain.user_end = Some(End::Unsupported);
        }
        chain.kernel_frames = usize::from(regs.cpl != 3);
        chain.len = out.len;
        return chain;
    };
    let user = user.or_else(|| {
        let mut walk = KernelWalk {
            space: &mut space,
            budget: &mut budget,
            out: &mut out,
            state: State::from_regs(regs),
            guessed: false,
            user: None,
        };
        let end = match kernel {
            None => End::NoTable,
            Some(KernelUnwind {
                orc: Some(orc),
                slide,
            }) => walk.by_orc(orc, slide),
            Some(KernelUnwind { orc: None, .. }) => walk.by_frame_pointers(),
        };
        if walk.user.is_none() && walk.out.frames_left > 0 {
            walk.user_from_stack_top(end, kernel.is_some_and(|k| k.orc.is_none()));
        }
        let (found, guessed) = (walk.user, walk.guessed);
        chain.kernel_end = Some(end);
        chain.kernel_frames = out.len - 1;
        chain.guessed = guessed;
        found
    });
    if let Some(u) = user
        && out.marker(CONTEXT_GUEST_USER)
    {
        let before = out.len;
        let end = walk_user(&mut space, u, &mut budget, &mut out, &mut chain.guessed);
        chain.user_frames = out.len - before;
        chain.user_end = Some(end);
    }
    chain.len = out.len;
    chain.reads = budget.reads_used();
    chain
}

#[derive(Clone, Copy)]
struct State {
    ip: u64,
    sp: u64,
    bp: u64,
    /// Registers other than these are known at the first frame and just above a `pt_regs`.
    dx: Option<u64>,
    di: Option<u64>,
    r10: Option<u64>,
    r13: Option<u64>,
    /// The address is that of an interrupted instruction, not of one after a call.
    exact_ip: bool,
}

impl State {
    fn from_regs(r: &GuestRegs) -> Self {
        Self {
            ip: r.rip,
            sp: r.rsp,
            bp: r.rbp,
            dx: Some(r.rdx),
            di: Some(r.rdi),
            r10: Some(r.r10),
            r13: Some(r.r13),
            exact_ip: true,
        }
    }
}

struct KernelWalk<'w, 'm, 'o, M: GuestPhys + ?Sized> {
    space: &'w mut AddressSpace<'m, M>,
    budget: &'w mut Budget,
    out: &'w mut Out<'o>,
    state: State,
    guessed: bool,
    user: Option<UserRegs>,
}

/// What one step of the kernel part came to.
enum Step {
    Frame,
    Boundary,
}

impl<M: GuestPhys + ?Sized> KernelWalk<'_, '_, '_, M> {
    fn word(&mut self, gva: u64) -> Result<u64, End> {
        if !self.space.is_kernel_half(gva) {
            return Err(End::BadFrame);
        }
        self.space.read_u64(gva, self.budget).map_err(end_of)
    }

    fn by_orc(&mut self, orc: &OrcTable, slide: u64) -> End {
        let mut switches = 0;
        loop {
            let before = self.state.sp;
            // A return address may belong to the next function when the call was the last instruction.
            let probe = self.state.ip.wrapping_sub(u64::from(!self.state.exact_ip));
            let step = match orc.find(probe.wrapping_sub(slide)) {
                Some(OrcEntry { kind: Kind::End, .. }) => return End::Complete,
                Some(entry) if entry.kind != Kind::Undefined => self.orc_step(&entry),
                _ => self.guess_by_frame_pointer(),
            };
            match step {
                Err(end) => return end,
                Ok(Step::Boundary) => return End::Complete,
                Ok(Step::Frame) => {}
            }
            let same_stack = before & !(THREAD_SIZE - 1) == self.state.sp & !(THREAD_SIZE - 1);
            if self.state.sp <= before {
                switches += 1;
                if same_stack || switches > MAX_STACK_SWITCHES {
                    return End::BadFrame;
                }
            }
            if !self.space.is_kernel_half(self.state.ip) {
                return End::BadFrame;
            }
            if let Err(end) = self.out.frame(self.state.ip) {
                return end;
            }
        }
    }

    fn orc_step(&mut self, e: &OrcEntry) -> Result<Step, End> {
        let s = self.state;
        let base = match e.sp_reg {
            Reg::Sp | Reg::SpIndirect => Some(s.sp),
            Reg::Bp | Reg::BpIndirect => Some(s.bp),
            Reg::R10 => s.r10,
            Reg::R13 => s.r13,
            Reg::Di => s.di,
            Reg::Dx => s.dx,
            Reg::Undefined | Reg::PrevSp => None,
        }
        .ok_or(End::NoTable)?;
        let offset = i64::from(e.sp_offset);
        let sp = match e.sp_reg {
            Reg::SpIndirect => self.word(base)?.wrapping_add_signed(offset),
            Reg::BpIndirect => self.word(base.wrapping_add_signed(offset))?,
            _ => base.wrapping_add_signed(offset),
        };
        let mut next = State {
            dx: None,
            di: None,
            r10: None,
            r13: None,
            ..s
        };
        match e.kind {
            Kind::Call => {
                next.ip = self.word(sp.wrapping_sub(8))?;
                next.sp = sp;
                next.exact_ip = false;
            }
            Kind::Regs => {
                if self.take_regs(sp, None)? {
                    return Ok(Step::Boundary);
                }
                return Ok(Step::Frame);
            }
            Kind::RegsPartial => {
                let at = sp.wrapping_sub(pt_regs::IP);
                if self.take_regs(at, Some(s.bp))? {
                    return Ok(Step::Boundary);
                }
                return Ok(Step::Frame);
            }
            Kind::End | Kind::Undefined => return Err(End::NoTable),
        }
        match e.bp_reg {
            Reg::Undefined => {}
            Reg::PrevSp => next.bp = self.word(sp.wrapping_add_signed(i64::from(e.bp_offset)))?,
            Reg::Bp => next.bp = self.word(s.bp.wrapping_add_signed(i64::from(e.bp_offset)))?,
            _ => return Err(End::NoTable),
        }
        self.state = next;
        Ok(Step::Frame)
    }

    /// Goes on from a `pt_regs` at `at`; with `bp` given only its last five words are there. True when those
    /// registers are user space's.
    fn take_regs(&mut self, at: u64, bp: Option<u64>) -> Result<bool, End> {
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
            // orig_ax, just below ip, is a system call's number or, for interrupts, negative or an error code;
            // which it was matters only to how the first user frame is mended, and that looks at the code.
            self.user = Some(UserRegs {
                ip,
                sp,
                bp,
                wide: cs & 0xFFFF != USER32_CS,
                exact_ip: false,
            });
            return Ok(true);
        }
        let mut next = State {
            ip,
            sp,
            bp,
            dx: None,
            di: None,
            r10: None,
            r13: None,
            exact_ip: true,
        };
        if !partial {
            next.dx = Some(self.word(at.wrapping_add(pt_regs::DX))?);
            next.di = Some(self.word(at.wrapping_add(pt_regs::DI))?);
            next.r10 = Some(self.word(at.wrapping_add(pt_regs::R10))?);
            next.r13 = Some(self.word(at.wrapping_add(pt_regs::R13))?);
        }
        self.state = next;
        Ok(false)
    }

    /// An address without a table entry: a module's, or generated code. Its caller is taken from the frame
    /// pointer if that points into this stack and at a kernel address.
    fn guess_by_frame_pointer(&mut self) -> Result<Step, End> {
        let State { sp, bp, .. } = self.state;
        if bp < sp || bp - sp > THREAD_SIZE || bp % 8 != 0 {
            return Err(End::NoTable);
        }
        self.guessed = true;
        self.frame_pointer_step()
    }

    fn frame_pointer_step(&mut self) -> Result<Step, End> {
        let bp = self.state.bp;
        let ip = self.word(bp.wrapping_add(8))?;
        let next = self.word(bp)?;
        if !self.space.is_kernel_half(ip) {
            return Err(End::NoTable);
        }
        self.state = State {
            ip,
            sp: bp.wrapping_add(16),
            bp: next,
            dx: None,
            di: None,
            r10: None,
            r13: None,
            exact_ip: false,
        };
        Ok(Step::Frame)
    }

    /// For kernels built with frame pointers. At entries from an exception the kernel leaves the address of the
    /// `pt_regs` in rbp with bit 0 set; a system call leaves 0.
    fn by_frame_pointers(&mut self) -> End {
        let mut switches = 0;
        loop {
            let State { bp, sp: before, .. } = self.state;
            if bp == 0 {
                return End::Complete;
            }
            let step = if bp & 1 == 1 {
                self.take_regs(bp & !1, None)
                    .map(|user| if user { Step::Boundary } else { Step::Frame })
            } else {
                self.frame_pointer_step()
            };
            match step {
                Err(End::NoTable) => return End::BadFrame,
                Err(end) => return end,
                Ok(Step::Boundary) => return End::Complete,
                Ok(Step::Frame) => {}
            }
            if self.state.sp <= before {
                switches += 1;
                let same_stack = before & !(THREAD_SIZE - 1) == self.state.sp & !(THREAD_SIZE - 1);
                if same_stack || switches > MAX_STACK_SWITCHES {
                    return End::BadFrame;
                }
            }
            if !self.space.is_kernel_half(self.state.ip) {
                return End::BadFrame;
            }
            if let Err(end) = self.out.frame(self.state.ip) {
                return end;
            }
        }
    }

    /// The user registers a task's kernel stack has at its top, for chains that did not reach them. After a
    /// complete chain by tables there is nothing to look for: it ended where no user registers are.
    fn user_from_stack_top(&mut self, end: End, frame_pointers: bool) {
        if matches!(end, End::Spent | End::Full) || (end == End::Complete && !frame_pointers) {
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
        let plausible = (cs == USER64_CS || cs == USER32_CS)
            && ss == USER_DS
            && flags & RFLAGS_IF != 0
            && self.space.is_user_half(ip)
            && self.space.is_user_half(sp);
        if plausible {
            self.guessed |= end != End::Complete;
            self.user = Some(UserRegs {
                ip,
                sp,
                bp,
                wide: cs == USER64_CS,
                exact_ip: false,
            });
        }
    }
}

fn walk_user<M: GuestPhys + ?Sized>(
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
        // 0 ends a chain by the ABI; C libraries' start code leaves other small values, as the program found them.
        if bp < 4096 {
            return End::Complete;
        }
        // Strictly upwards: what points down or at itself is no frame, and could go round for ever.
        if bp < floor {
            return End::BadFrame;
        }
        let ip = match read(space, bp.wrapping_add(width), budget) {
            Ok(ip) => ip,
            Err(end) => return end,
        };
        let next = match read(space, bp, budget) {
            Ok(next) => next,
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
    let mut code = [0; 5];
    if !user.exact_ip {
        // A system call returns to the instruction after `syscall`.
        let mut before = [0; 2];
        let at = user.ip.wrapping_sub(2);
        if space.is_user_half(at) && space.read(at, &mut before, budget).is_ok() && before == [0x0F, 0x05] {
            return Mend::ReturnAt(user.sp, Why::SystemCall);
        }
    }
    // The end of a page may cut this short, which only forgoes the mending.
    if space.read(user.ip, &mut code, budget).is_err() {
        return Mend::None;
    }
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
    let mut call = [0; 5];
    if space.read(at, &mut call, budget).is_err() || call[0] != 0xE8 {
        return false;
    }
    let relative = i32::from_le_bytes([call[1], call[2], call[3], call[4]]);
    let target = ret.wrapping_add_signed(i64::from(relative));
    let mut start = [0; 5];
    ip.checked_sub(target).is_some_and(|off| off < LEAF_REACH)
        && space.is_user_half(target)
        && space.read(target, &mut start, budget).is_ok()
        && start[0] != 0x55
        && start != [0xF3, 0x0F, 0x1E, 0xFA, 0x55]
}

/// Whether the bytes before `ip` end in a call instruction.
fn follows_call<M: GuestPhys + ?Sized>(
    space: &mut AddressSpace<'_, M>,
    ip: u64,
    budget: &mut Budget,
) -> bool {
    let Some(at) = ip.checked_sub(7) else { return false };
    let mut c = [0; 7];
    if space.read(at, &mut c, budget).is_err() {
        return false;
    }
    let modrm_call = |m: u8| (m >> 3) & 7 == 2;
    c[2] == 0xE8
        || (c[5] == 0xFF && modrm_call(c[6]) && c[6] >> 6 == 3)
        || (c[4] == 0xFF && modrm_call(c[5]) && c[5] >> 6 == 1)
        || (c[1] == 0xFF && modrm_call(c[2]) && (c[2] >> 6 == 2 || c[2] == 0x15))
        || (c[5] == 0xFF && modrm_call(c[6]) && c[6] >> 6 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::orc::tests::sections;
    use crate::profile::testing::TestGuest;
    use proptest::prelude::*;

    const TEXT: u64 = 0xffff_ffff_8100_0000;
    const KSTACK: u64 = 0xffff_c900_0001_0000; // 16 KiB, aligned to its size
    const USTACK: u64 = 0x7fff_ffff_0000;
    const UTEXT: u64 = 0x40_0000;
    const ORC_AT: u64 = 0xffff_ffff_8200_0000;

    /// Kernel stack at gpa 0x4000..0x8000, user stack at 0x8000..0xa000, user text at 0xa000.
    fn guest() -> TestGuest {
        let mut g = TestGuest::new(0x4_0000, false);
        for page in 0..4 {
            g.map(KSTACK + page * 4096, 0x4000 + page * 4096, 1);
        }
        for page in 0..2 {
            g.map(USTACK + page * 4096, 0x8000 + page * 4096, 1);
        }
        g.map(UTEXT, 0xa000, 1);
        g
    }

    fn regs(g: &TestGuest, cpl: u8, rip: u64, rsp: u64, rbp: u64) -> GuestRegs {
        GuestRegs {
            rip,
            rsp,
            rbp,
            cr0: 1 << 31,
            cr3: g.root,
            cr4: 1 << 5,
            efer: 1 << 10,
            cpl,
            code64: true,
            ..Default::default()
        }
    }

    fn kput(g: &mut TestGuest, gva: u64, v: u64) {
        g.put(gva - KSTACK + 0x4000, v);
    }

    fn uput(g: &mut TestGuest, gva: u64, v: u64) {
        g.put(gva - USTACK + 0x8000, v);
    }

    /// Two user frames above a leaf with rbp at `USTACK + 0x100`.
    fn user_frames(g: &mut TestGuest) {
        uput(g, USTACK + 0x100, USTACK + 0x200);
        uput(g, USTACK + 0x108, UTEXT + 0x111);
        uput(g, USTACK + 0x200, 0);
        uput(g, USTACK + 0x208, UTEXT + 0x222);
        for b in &mut g.ram[0xa000..0xb000] {
            *b = 0x90;
        }
    }

    fn run(
        g: &TestGuest,
        regs: &GuestRegs,
        kernel: Option<KernelUnwind<'_>>,
        slots: usize,
    ) -> (Chain, Vec<u64>) {
        let mut out = vec![0xAA; slots];
        let chain = walk(
            &g.ram[..],
            regs,
            kernel,
            &Limits {
                max_time: None,
                ..Limits::default()
            },
            &mut out,
        );
        out.truncate(chain.len);
        (chain, out)
    }

    fn orc() -> OrcTable {
        // f: sub 0x10 (cfa rsp+0x18); g: push rbp (cfa rsp+0x10, bp at cfa-0x10); entry: pt_regs; irq: pt_regs.
        let (i, e) = sections(
            ORC_AT,
            &[
                (TEXT, 0x18, 0, 5),
                (TEXT + 0x100, 0x10, -0x10, 0x15),
                (TEXT + 0x200, 0, 0, 5 | 0x100),
                (TEXT + 0x300, 0, 0, 0x400), // end
                (TEXT + 0x400, 0, 0, 0),     // undefined
            ],
        );
        OrcTable::parse(&i, ORC_AT, &e).unwrap()
    }

    fn put_pt_regs(g: &mut TestGuest, at: u64, ip: u64, cs: u64, sp: u64, bp: u64) {
        kput(g, at + pt_regs::BP, bp);
        for (i, v) in [ip, cs, 0x202, sp, if cs & 3 == 3 { USER_DS } else { 0x18 }]
            .into_iter()
            .enumerate()
        {
            kput(g, at + pt_regs::IP + 8 * i as u64, v);
        }
    }

    #[test]
    fn a_user_sample_follows_frame_pointers() {
        let mut g = guest();
        user_frames(&mut g);
        let r = regs(&g, 3, UTEXT + 0x50, USTACK + 0x80, USTACK + 0x100);
        let (chain, out) = run(&g, &r, None, 16);
        assert_eq!(
            out,
            [CONTEXT_GUEST_USER, UTEXT + 0x50, UTEXT + 0x111, UTEXT + 0x222]
        );
        assert_eq!((chain.user_end, chain.kernel_end), (Some(End::Complete), None));
    }

    #[test]
    fn the_caller_is_not_lost_in_a_prologue_or_at_ret() {
        for (code, pushed) in [
            (&[0x55][..], false),
            (&[0xC3][..], false),
            (&[0x48, 0x89, 0xE5][..], true),
        ] {
            let mut g = guest();
            user_frames(&mut g);
            g.ram[0xa050..0xa050 + code.len()].copy_from_slice(code);
            let sp = USTACK + 0x80;
            if pushed {
                uput(&mut g, sp, USTACK + 0x100);
                uput(&mut g, sp + 8, UTEXT + 0x77);
            } else {
                uput(&mut g, sp, UTEXT + 0x77);
            }
            let (chain, out) = run(&g, &regs(&g, 3, UTEXT + 0x50, sp, USTACK + 0x100), None, 16);
            assert_eq!(
                out[1..],
                [UTEXT + 0x50, UTEXT + 0x77, UTEXT + 0x111, UTEXT + 0x222]
            );
            assert!(!chain.guessed);
        }
    }

    #[test]
    fn a_frameless_leaf_has_its_caller_only_if_that_calls_it() {
        for (target, found) in [(UTEXT + 0x40, true), (UTEXT + 0x60, false)] {
            let mut g = guest();
            user_frames(&mut g);
            let ret = UTEXT + 0x77;
            g.ram[0xa072] = 0xE8;
            g.ram[0xa073..0xa077].copy_from_slice(&((target.wrapping_sub(ret)) as i32).to_le_bytes());
            uput(&mut g, USTACK + 0x80, ret);
            let (chain, out) = run(
                &g,
                &regs(&g, 3, UTEXT + 0x50, USTACK + 0x80, USTACK + 0x100),
                None,
                16,
            );
            assert_eq!(out.contains(&ret), found);
            assert_eq!(chain.guessed, found);
        }
    }

    #[test]
    fn a_kernel_sample_crosses_to_user_space_by_its_tables_and_slide() {
        let slide = 0x1400_0000;
        let mut g = guest();
        user_frames(&mut g);
        let table = orc();
        let sp = KSTACK + 0x3000;
        kput(&mut g, sp + 0x10, TEXT + slide + 0x110); // f's return address, into g
        kput(&mut g, sp + 0x18, 0xdead); // g's saved rbp
        kput(&mut g, sp + 0x20, TEXT + slide + 0x201); // g's return address, into the entry
        put_pt_regs(
            &mut g,
            sp + 0x28,
            UTEXT + 0x50,
            USER64_CS,
            USTACK + 0x80,
            USTACK + 0x100,
        );
        let r = regs(&g, 0, TEXT + slide + 0x20, sp, 0);
        let (chain, out) = run(
            &g,
            &r,
            Some(KernelUnwind {
                orc: Some(&table),
                slide,
            }),
            16,
        );
        let k = TEXT + slide;
        assert_eq!(
            out,
            [
                CONTEXT_GUEST_KERNEL,
                k + 0x20,
                k + 0x110,
                k + 0x201,
                CONTEXT_GUEST_USER,
                UTEXT + 0x50,
                UTEXT + 0x111,
                UTEXT + 0x222
            ]
        );
        assert_eq!(chain.kernel_end, Some(End::Complete));
        assert!(!chain.guessed);
    }

    #[test]
    fn an_interrupted_kernel_function_is_walked_through_its_registers() {
        let mut g = guest();
        let table = orc();
        let sp = KSTACK + 0x2000;
        put_pt_regs(&mut g, sp, TEXT + 0x30, 0x10, KSTACK + 0x3000, 0);
        kput(&mut g, KSTACK + 0x3010, TEXT + 0x301);
        let r = regs(&g, 0, TEXT + 0x210, sp, 0);
        let (chain, out) = run(
            &g,
            &r,
            Some(KernelUnwind {
                orc: Some(&table),
                slide: 0,
            }),
            16,
        );
        assert_eq!(
            out,
            [CONTEXT_GUEST_KERNEL, TEXT + 0x210, TEXT + 0x30, TEXT + 0x301]
        );
        assert_eq!((chain.kernel_end, chain.user_end), (Some(End::Complete), None));
    }

    #[test]
    fn where_tables_say_nothing_the_stack_top_still_gives_the_user_part() {
        let mut g = guest();
        user_frames(&mut g);
        let table = orc();
        let top = KSTACK + THREAD_SIZE - pt_regs::SIZE;
        put_pt_regs(
            &mut g,
            top,
            UTEXT + 0x50,
            USER64_CS,
            USTACK + 0x80,
            USTACK + 0x100,
        );
        let r = regs(&g, 0, TEXT + 0x410, KSTACK + 0x3000, 0);
        let (chain, out) = run(
            &g,
            &r,
            Some(KernelUnwind {
                orc: Some(&table),
                slide: 0,
            }),
            16,
        );
        assert_eq!(chain.kernel_end, Some(End::NoTable));
        assert_eq!(out[2..4], [CONTEXT_GUEST_USER, UTEXT + 0x50]);
        assert!(chain.guessed);
        // What is no user selector is no pt_regs.
        put_pt_regs(&mut g, top, UTEXT + 0x50, 0x10, USTACK + 0x80, USTACK + 0x100);
        assert_eq!(
            run(
                &g,
                &r,
                Some(KernelUnwind {
                    orc: Some(&table),
                    slide: 0
                }),
                16
            )
            .0
            .user_frames,
            0
        );
    }

    #[test]
    fn kernels_with_frame_pointers_are_walked_by_them() {
        let mut g = guest();
        user_frames(&mut g);
        let sp = KSTACK + 0x2000;
        kput(&mut g, sp + 0x20, (sp + 0x100) | 1); // an encoded pt_regs
        kput(&mut g, sp + 0x28, TEXT + 0x51);
        put_pt_regs(
            &mut g,
            sp + 0x100,
            UTEXT + 0x50,
            USER64_CS,
            USTACK + 0x80,
            USTACK + 0x100,
        );
        let r = regs(&g, 0, TEXT + 0x20, sp, sp + 0x20);
        let (chain, out) = run(&g, &r, Some(KernelUnwind { orc: None, slide: 0 }), 16);
        assert_eq!(
            out[..5],
            [
                CONTEXT_GUEST_KERNEL,
                TEXT + 0x20,
                TEXT + 0x51,
                CONTEXT_GUEST_USER,
                UTEXT + 0x50
            ]
        );
        assert_eq!(chain.kernel_end, Some(End::Complete));
    }

    #[test]
    fn frames_that_go_round_or_down_end_the_walk() {
        let mut g = guest();
        uput(&mut g, USTACK + 0x100, USTACK + 0x100);
        uput(&mut g, USTACK + 0x108, UTEXT + 1);
        let (chain, _) = run(&g, &regs(&g, 3, UTEXT, USTACK, USTACK + 0x100), None, 64);
        assert_eq!((chain.user_end, chain.user_frames), (Some(End::BadFrame), 2));
        // A kernel frame that restores a lower stack pointer within one stack.
        let table = orc();
        let sp = KSTACK + 0x2000;
        put_pt_regs(&mut g, sp, TEXT + 0x210, 0x10, sp, 0);
        let r = regs(&g, 0, TEXT + 0x210, sp, 0);
        let (chain, _) = run(
            &g,
            &r,
            Some(KernelUnwind {
                orc: Some(&table),
                slide: 0,
            }),
            64,
        );
        assert_eq!((chain.kernel_end, chain.kernel_frames), (Some(End::BadFrame), 1));
    }

    #[test]
    fn a_short_slice_is_filled_and_no_more() {
        let mut g = guest();
        user_frames(&mut g);
        let r = regs(&g, 3, UTEXT + 0x50, USTACK + 0x80, USTACK + 0x100);
        for slots in 0..5 {
            let (chain, out) = run(&g, &r, None, slots);
            assert!(out.len() <= slots);
            assert_ne!(
                out.last(),
                Some(&CONTEXT_GUEST_USER),
                "a marker with nothing after it"
            );
            assert_eq!(chain.user_end == Some(End::Complete), slots >= 4);
        }
    }

    #[test]
    fn without_paging_the_interrupted_address_is_the_chain() {
        let g = guest();
        let mut r = regs(&g, 0, 0x7c00, 0, 0);
        r.cr0 = 0;
        let (chain, out) = run(&g, &r, None, 16);
        assert_eq!(out, [CONTEXT_GUEST_KERNEL, 0x7c00]);
        assert_eq!(chain.kernel_end, Some(End::Unsupported));
    }

    #[test]
    fn programs_of_32_bits_have_frames_of_4_byte_words() {
        let mut g = guest();
        g.map(0x1000, 0x8000, 1);
        let put = |g: &mut TestGuest, at: u64, v: u32| {
            g.ram[at as usize + 0x7000..][..4].copy_from_slice(&v.to_le_bytes());
        };
        put(&mut g, 0x1100, 0x1200);
        put(&mut g, 0x1104, 0x40_0111);
        put(&mut g, 0x1200, 0);
        put(&mut g, 0x1204, 0x40_0222);
        let mut r = regs(&g, 3, UTEXT + 0x50, 0x1080, 0x1100);
        r.code64 = false;
        let (_, out) = run(&g, &r, None, 16);
        assert_eq!(out[1..], [UTEXT + 0x50, UTEXT + 0x111, UTEXT + 0x222]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn hostile_stacks_and_registers_neither_panic_nor_exceed_the_bounds(
            stack in proptest::collection::vec(any::<u64>(), 3072),
            pointers in proptest::collection::vec((0usize..3072, 0u64..0x6000), 0..200),
            rip: u64, rsp_off in 0u64..0x4000, rbp_off in 0u64..0x4000, wild: bool,
            cpl in 0u8..4, use_orc: bool, slots in 0usize..140, slide: u32, reads in 0u32..3000,
        ) {
            let mut g = guest();
            for (i, &word) in stack.iter().enumerate() {
                g.put(0x4000 + 8 * i as u64, word);
            }
            // Make many words point into the stacks and the text, or the walk ends at once.
            for &(slot, to) in &pointers {
                let v = match to % 3 { 0 => KSTACK + to, 1 => USTACK + to % 0x2000, _ => TEXT + to % 0x500 };
                g.put(0x4000 + 8 * slot as u64, v);
            }
            let stack = if cpl == 3 { USTACK } else { KSTACK };
            let ip = if wild { rip } else { TEXT + rip % 0x500 };
            let r = regs(&g, cpl, ip, stack + rsp_off, stack + rbp_off);
            let table = orc();
            let kernel = KernelUnwind { orc: use_orc.then_some(&table), slide: if wild { u64::from(slide) } else { 0 } };
            let mut out = vec![0; slots];
            let limits = Limits { max_frames: 100, max_reads: reads, max_time: None };
            let chain = walk(&g.ram[..], &r, Some(kernel), &limits, &mut out);
            prop_assert!(chain.len <= slots);
            prop_assert!(chain.kernel_frames + chain.user_frames <= 100);
            prop_assert!(chain.reads <= reads);
        }
    }
}
