//! Converts registers between the formats of KVM and gdb.

use gdbstub_arch::x86::reg::{X86_64CoreRegs, X86SegmentRegs, X87FpuInternalRegs};

use crate::vcpu::debugger::VcpuRegisters;

/// x87 tag of an empty register (SDM vol. 1 §8.1.7). gdb derives the other tags from the register
/// values.
const EMPTY: u32 = 3;
/// RFLAGS bit 1, which is always set.
const RFLAGS_ONE: u64 = 1 << 1;

/// Converts the registers of a vCPU for gdb.
#[expect(
    clippy::cast_possible_truncation,
    reason = "gdb has 32 bits for what x87 keeps of addresses, and for RFLAGS"
)]
pub fn to_gdb(registers: &VcpuRegisters) -> X86_64CoreRegs {
    let VcpuRegisters { general, system, fpu } = registers;
    let tag = (0..8).fold(0, |tag, n| {
        let empty = fpu.ftwx & 1 << n == 0;
        tag | if empty { EMPTY << (2 * n) } else { 0 }
    });
    X86_64CoreRegs {
        regs: [
            general.rax,
            general.rbx,
            general.rcx,
            general.rdx,
            general.rsi,
            general.rdi,
            general.rbp,
            general.rsp,
            general.r8,
            general.r9,
            general.r10,
            general.r11,
            general.r12,
            general.r13,
            general.r14,
            general.r15,
        ],
        eflags: general.rflags as u32,
        rip: general.rip,
        segments: X86SegmentRegs {
            cs: system.cs.selector.into(),
            ss: system.ss.selector.into(),
            ds: system.ds.selector.into(),
            es: system.es.selector.into(),
            fs: system.fs.selector.into(),
            gs: system.gs.selector.into(),
        },
        st: std::array::from_fn(|n| std::array::from_fn(|byte| fpu.fpr[n][byte])),
        fpu: X87FpuInternalRegs {
            fctrl: fpu.fcw.into(),
            fstat: fpu.fsw.into(),
            ftag: tag,
            fiseg: (fpu.last_ip >> 32) as u32 & 0xffff,
            fioff: fpu.last_ip as u32,
            foseg: (fpu.last_dp >> 32) as u32 & 0xffff,
            fooff: fpu.last_dp as u32,
            fop: fpu.last_opcode.into(),
        },
        xmm: std::array::from_fn(|n| u128::from_le_bytes(fpu.xmm[n])),
        mxcsr: fpu.mxcsr,
    }
}

/// Copies the registers that gdb has set to those of a vCPU. Returns `false`, without an effect, if
/// gdb has changed a segment selector: a selector alone does not determine the segment's base and
/// limit.
#[expect(clippy::cast_possible_truncation, reason = "fields of 16 bits")]
pub fn from_gdb(gdb: &X86_64CoreRegs, registers: &mut VcpuRegisters) -> bool {
    if gdb.segments != to_gdb(registers).segments {
        return false;
    }
    let VcpuRegisters { general, fpu, .. } = registers;
    [
        general.rax,
        general.rbx,
        general.rcx,
        general.rdx,
        general.rsi,
        general.rdi,
        general.rbp,
        general.rsp,
        general.r8,
        general.r9,
        general.r10,
        general.r11,
        general.r12,
        general.r13,
        general.r14,
        general.r15,
    ] = gdb.regs;
    general.rip = gdb.rip;
    general.rflags = general.rflags & !0xffff_ffff | u64::from(gdb.eflags) | RFLAGS_ONE;
    for (slot, value) in fpu.fpr.iter_mut().zip(&gdb.st) {
        slot[..10].copy_from_slice(value);
    }
    fpu.fcw = gdb.fpu.fctrl as u16;
    fpu.fsw = gdb.fpu.fstat as u16;
    fpu.ftwx = (0..8).fold(0, |tag, n| {
        let full = gdb.fpu.ftag >> (2 * n) & 3 != EMPTY;
        tag | u8::from(full) << n
    });
    fpu.last_opcode = gdb.fpu.fop as u16;
    fpu.last_ip = joined(fpu.last_ip, gdb.fpu.fiseg, gdb.fpu.fioff);
    fpu.last_dp = joined(fpu.last_dp, gdb.fpu.foseg, gdb.fpu.fooff);
    for (slot, value) in fpu.xmm.iter_mut().zip(&gdb.xmm) {
        *slot = value.to_le_bytes();
    }
    fpu.mxcsr = gdb.mxcsr;
    true
}

/// Returns the x87 pointer `old` with bits 47:0 replaced by `segment` and `offset`, which gdb has
/// set.
fn joined(old: u64, segment: u32, offset: u32) -> u64 {
    old & !0xffff_ffff_ffff | u64::from(segment & 0xffff) << 32 | u64::from(offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> VcpuRegisters {
        let mut registers = VcpuRegisters::default();
        registers.general.rax = 1;
        registers.general.r15 = 15;
        registers.general.rip = 0xffff_8000_0000_1234;
        registers.general.rflags = 0x246;
        registers.system.cs.selector = 0x10;
        registers.fpu.fpr[3] = std::array::from_fn(|n| n as u8);
        registers.fpu.fpr[3][10..].fill(0);
        registers.fpu.ftwx = 0b0000_1000;
        registers.fpu.fcw = 0x37f;
        registers.fpu.last_ip = 0xffff_8000_0000_0042;
        registers.fpu.xmm[15] = [0xa5; 16];
        registers.fpu.mxcsr = 0x1f80;
        registers
    }

    #[test]
    fn unchanged_gdb_registers_round_trip() {
        let before = some();
        let mut after = before;
        assert!(from_gdb(&to_gdb(&before), &mut after));
        assert_eq!(after, before);
        assert_eq!(to_gdb(&before).fpu.ftag, 0xffff & !(3 << 6));
    }

    #[test]
    fn changed_gdb_registers_apply_except_segments() {
        let mut registers = some();
        let mut gdb = to_gdb(&registers);
        gdb.regs[1] = 7;
        gdb.eflags = 0;
        gdb.xmm[0] = 9;
        assert!(from_gdb(&gdb, &mut registers));
        assert_eq!((registers.general.rbx, registers.general.rflags), (7, 2));
        assert_eq!(registers.fpu.xmm[0][0], 9);
        gdb.segments.cs = 0x33;
        gdb.rip = 0;
        let before = registers;
        assert!(!from_gdb(&gdb, &mut registers));
        assert_eq!(registers, before);
    }
}
