//! Copies the user registers and the top of the user stack of a sample, so that another process can
//! unwind the user part of the call chain later.

use super::CallChain;
use super::parts::OtherRegs;
use crate::paging::AddressSpace;
use crate::{GuestMemoryReadBudget, GuestPhys, GuestRegs};

/// Number of user registers in a sample. Their order is that of `enum perf_event_x86_regs`,
/// restricted to the mask that `perf record --call-graph dwarf` requests: ax, bx, cx, dx, si, di,
/// bp, sp, ip, flags, cs, ss, r8 to r15.
pub const REGISTERS: usize = 20;
/// Maximum number of guest memory reads to find the user registers and copy the stack of one
/// sample.
const READS: u32 = 64;
/// Word indices in `struct pt_regs` of the registers ax, bx, cx, dx, si, di, and word indices of r8
/// to r15.
const PT_REGS_LOW: [usize; 6] = [10, 5, 11, 12, 13, 14];
const PT_REGS_HIGH: [usize; 8] = [9, 8, 7, 6, 3, 2, 1, 0];
const PT_REGS_WORDS: usize = 15;
/// Segment selectors that Linux uses for 64-bit user code, 32-bit user code and user data.
const USER64_CS: u64 = 0x33;
const USER32_CS: u64 = 0x23;
const USER_DS: u64 = 0x2b;
const BP: usize = 6;
const SP: usize = 7;
const IP: usize = 8;
const FLAGS: usize = 9;
const R8: usize = 12;

/// User registers of a sample, for the sample field `PERF_SAMPLE_REGS_USER`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampledUserRegs {
    /// Registers in the order described at [`REGISTERS`]; 0 for unknown registers.
    pub registers: [u64; REGISTERS],
    /// `true` if the sampled user code is 64-bit code.
    pub wide: bool,
}

impl SampledUserRegs {
    /// Returns the user registers with which the user part of `chain` starts. `regs` are the vCPU
    /// registers from which `chain` was unwound. Returns `None` if `chain` has no user part.
    pub fn of<M: GuestPhys + ?Sized>(mem: &M, regs: &GuestRegs, chain: &CallChain) -> Option<Self> {
        let user = chain.user?;
        let mut registers = [0; REGISTERS];
        match user.others {
            OtherRegs::InVcpu => {
                let low = [regs.rax, regs.rbx, regs.rcx, regs.rdx, regs.rsi, regs.rdi];
                let high = [
                    regs.r8, regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
                ];
                registers[..BP].copy_from_slice(&low);
                registers[R8..].copy_from_slice(&high);
            }
            OtherRegs::At(at) => {
                let mut space = AddressSpace::of(mem, regs).ok()?;
                let mut bytes = [0; 8 * PT_REGS_WORDS];
                let readable = space.is_kernel_half(at);
                if readable
                    && space
                        .read(at, &mut bytes, &mut GuestMemoryReadBudget::new(READS, None))
                        .is_ok()
                {
                    let (words, _) = bytes.as_chunks::<8>();
                    let word = |n: usize| words.get(n).map_or(0, |word| u64::from_le_bytes(*word));
                    for (to, from) in PT_REGS_LOW.into_iter().enumerate() {
                        registers[to] = word(from);
                    }
                    for (to, from) in PT_REGS_HIGH.into_iter().enumerate() {
                        registers[R8 + to] = word(from);
                    }
                }
            }
            OtherRegs::Lost => {}
        }
        (registers[BP], registers[SP], registers[IP]) = (user.bp, user.sp, user.ip);
        registers[FLAGS] = if regs.cpl == 3 { regs.rflags } else { 0 };
        registers[FLAGS + 1] = if user.wide { USER64_CS } else { USER32_CS };
        registers[FLAGS + 2] = USER_DS;
        let wide = user.wide;
        Some(Self { registers, wide })
    }

    /// Copies the user stack into `out`, from the stack pointer up to the end of `out` or of the
    /// mapped memory. Returns the number of bytes copied, which is a multiple of the word size.
    pub fn stack<M: GuestPhys + ?Sized>(&self, mem: &M, regs: &GuestRegs, out: &mut [u8]) -> usize {
        const PAGE: u64 = 4096;
        let Ok(mut space) = AddressSpace::of(mem, regs) else {
            return 0;
        };
        let mut budget = GuestMemoryReadBudget::new(READS, None);
        let sp = self.registers[SP];
        let mut done = 0;
        while done < out.len() {
            let Some(at) = sp.checked_add(done as u64).filter(|at| space.is_user_half(*at)) else {
                break;
            };
            let left = out.len() - done;
            let len = usize::try_from(PAGE - at % PAGE).map_or(left, |page| page.min(left));
            if space.read(at, &mut out[done..done + len], &mut budget).is_err() {
                break;
            }
            done += len;
        }
        done / 8 * 8
    }
}
