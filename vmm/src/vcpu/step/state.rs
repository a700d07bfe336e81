//! A vCPU's registers and memory as the step meter sees them.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vpmu::exact::{CodeSize, CpuState, GuestMemory};

use guest_profile::paging::AddressSpace;
use guest_profile::{Budget, GuestPhys, GuestRegs};

/// Reads of guest memory for one look at a vCPU: a search through all 256 gates and their first instructions,
/// each with a walk of five levels, fits.
const READS: u32 = 8192;
const PAGE: u64 = 4096;
const CR0_PE: u64 = 1;
const CR0_PG: u64 = 1 << 31;
const EFER_LMA: u64 = 1 << 10;

/// Registers of a vCPU between two entries.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// General registers.
    pub regs: kvm_regs,
    /// Segments and control registers.
    pub sregs: kvm_sregs,
}

impl State {
    /// Reads them from KVM.
    ///
    /// # Errors
    /// KVM's.
    pub fn read(fd: &VcpuFd) -> Result<Self, kvm_ioctls::Error> {
        Ok(Self {
            regs: fd.get_regs()?,
            sregs: fd.get_sregs()?,
        })
    }

    /// SS.DPL, which is the CPL in every mode (SDM vol. 3 §5.5).
    pub fn cpl(&self) -> u8 {
        self.sregs.ss.dpl & 3
    }

    /// 64-bit code runs.
    pub fn is_64bit(&self) -> bool {
        self.sregs.efer & EFER_LMA != 0 && self.sregs.cs.l != 0
    }

    /// What the meter wants to know.
    pub fn cpu(&self) -> CpuState {
        let (regs, sregs) = (&self.regs, &self.sregs);
        let long = self.is_64bit();
        // In 64-bit code these bases are taken as 0 whatever the descriptor said.
        let flat = |segment: &kvm_segment| if long { 0 } else { segment.base };
        CpuState {
            rip: regs.rip,
            rflags: regs.rflags,
            cpl: self.cpl(),
            size: match (long, sregs.cs.db) {
                (true, _) => CodeSize::Bits64,
                (false, 0) => CodeSize::Bits16,
                (false, _) => CodeSize::Bits32,
            },
            gpr: [
                regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
                regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
            ],
            segment_bases: [
                flat(&sregs.es),
                flat(&sregs.cs),
                flat(&sregs.ss),
                flat(&sregs.ds),
                sregs.fs.base,
                sregs.gs.base,
            ],
        }
    }
}

/// Guest memory through the page tables of one [`State`]. To be made anew for each look: the translations it
/// remembers do not outlive it.
pub struct Linear<'m> {
    memory: &'m GuestMemoryMmap,
    state: State,
    /// `None`: paging is off, or of a kind that is not walked.
    space: Option<AddressSpace<'m, GuestMemoryMmap>>,
    budget: Budget,
}

impl<'m> Linear<'m> {
    /// Memory as the code at `state` sees it.
    pub fn new(memory: &'m GuestMemoryMmap, state: &State) -> Self {
        let mut regs = GuestRegs::default();
        crate::kvm::registers::set_system(&mut regs, &state.sregs);
        Self {
            memory,
            state: *state,
            space: AddressSpace::of(memory, &regs).ok(),
            budget: Budget::new(READS, None),
        }
    }

    /// Guest-physical address of a linear one; `None` for a hole.
    pub fn physical(&mut self, linear: u64) -> Option<u64> {
        match &mut self.space {
            Some(space) => space.physical(linear, &mut self.budget).ok(),
            None if self.state.sregs.cr0 & CR0_PG == 0 => Some(linear & 0xffff_ffff),
            None => None,
        }
    }

    /// Clears bits of one byte; for what the guest must not see of our trap flag. False if there is no such
    /// memory.
    pub fn clear_bits(&mut self, linear: u64, bits: u8) -> bool {
        let Some(gpa) = self.physical(linear).map(GuestAddress) else {
            return false;
        };
        let Ok(byte) = self.memory.read_obj::<u8>(gpa) else {
            return false;
        };
        byte & bits == 0 || self.memory.write_obj(byte & !bits, gpa).is_ok()
    }

    fn read_piece(&mut self, linear: u64, piece: &mut [u8]) -> bool {
        match &mut self.space {
            Some(space) => space.read(linear, piece, &mut self.budget).is_ok(),
            None if self.state.sregs.cr0 & CR0_PG == 0 => {
                GuestPhys::read(self.memory, linear & 0xffff_ffff, piece)
            }
            None => false,
        }
    }

    /// Eight bytes at a linear address.
    pub fn quad(&mut self, linear: u64) -> Option<u64> {
        self.bytes::<8>(linear).map(u64::from_le_bytes)
    }

    fn bytes<const N: usize>(&mut self, linear: u64) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        (GuestMemory::read(self, linear, &mut bytes) == N).then_some(bytes)
    }
}

impl GuestMemory for Linear<'_> {
    #[expect(clippy::cast_possible_truncation, reason = "at most a page")]
    fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize {
        let in_page = (PAGE - linear % PAGE) as usize;
        let (first, second) = buffer.split_at_mut(in_page.min(buffer.len()));
        if !self.read_piece(linear, first) {
            return 0;
        }
        let read = first.len();
        let next = linear.wrapping_add(read as u64);
        if second.is_empty() || !self.read_piece(next, second) {
            return read;
        }
        read + second.len()
    }

    #[expect(clippy::cast_possible_truncation, reason = "the halves of a gate")]
    fn gate(&mut self, vector: u8) -> Option<u64> {
        let idt = self.state.sregs.idt;
        let long = self.state.sregs.efer & EFER_LMA != 0;
        let protected = self.state.sregs.cr0 & CR0_PE != 0;
        let size = match (long, protected) {
            (true, _) => 16,
            (false, true) => 8,
            (false, false) => 4,
        };
        let offset = size * u64::from(vector);
        if offset + size - 1 > u64::from(idt.limit) {
            return None;
        }
        let at = idt.base.wrapping_add(offset);
        let (low, high) = if long {
            let gate = u128::from_le_bytes(self.bytes(at)?);
            (gate as u64, (gate >> 64) as u64)
        } else {
            (self.quad(at)?, 0)
        };
        if !protected {
            return Some(low & 0xffff).filter(|&target| target != 0);
        }
        // Interrupt- and trap-gate descriptors (SDM vol. 3 figures 6-2 and 6-8): P is bit 47.
        if low >> 47 & 1 == 0 {
            return None;
        }
        let target = low & 0xffff | low >> 32 & 0xffff_0000;
        if !long {
            return Some(target);
        }
        Some(target | high << 32)
    }
}

/// Memory that cannot be read: for a stretch in which nothing is known to have been executed.
pub struct Nothing;

impl GuestMemory for Nothing {
    fn read(&mut self, _: u64, _: &mut [u8]) -> usize {
        0
    }

    fn gate(&mut self, _: u8) -> Option<u64> {
        None
    }
}
