//! The gdbstub architecture: x86-64 with SSE.

use gdbstub::arch::{Arch, Registers};
use gdbstub_arch::x86::X86_64_SSE;
use gdbstub_arch::x86::reg::X86_64CoreRegs;

/// Architecture of the guest for gdbstub: [`X86_64_SSE`], with one difference. A packet that
/// contains too few registers is rejected, but does not end the session.
pub enum GdbX86 {}

impl Arch for GdbX86 {
    type Usize = <X86_64_SSE as Arch>::Usize;
    type Registers = PacketRegisters;
    type RegId = <X86_64_SSE as Arch>::RegId;
    type BreakpointKind = <X86_64_SSE as Arch>::BreakpointKind;

    fn target_description_xml() -> Option<&'static str> {
        X86_64_SSE::target_description_xml()
    }
}

/// Registers decoded from a packet of the debugger.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PacketRegisters {
    /// The register values, if the packet contains all of them.
    pub all: X86_64CoreRegs,
    /// `true` if the packet was too short, so `all` is invalid.
    pub cut_short: bool,
}

impl Registers for PacketRegisters {
    type ProgramCounter = u64;

    fn pc(&self) -> u64 {
        self.all.pc()
    }

    fn gdb_serialize(&self, write_byte: impl FnMut(Option<u8>)) {
        self.all.gdb_serialize(write_byte);
    }

    fn gdb_deserialize(&mut self, bytes: &[u8]) -> Result<(), ()> {
        // Returning an error here would end the session, so the error is recorded.
        self.cut_short = self.all.gdb_deserialize(bytes).is_err();
        Ok(())
    }
}
