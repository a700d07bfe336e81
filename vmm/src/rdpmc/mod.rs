//! RDPMC in guest kernels: finding it and making it trap.
//!
//! KVM has no exit for RDPMC: with KVM's own PMU off the guest gets #GP. So each RDPMC (0F 33) of the
//! guest kernel is replaced, before the guest starts, by `out imm8, al` (E6 nn), two bytes as well, on
//! a port reserved for it. The exit handler reads ECX and writes EDX:EAX as RDPMC would. Prefixes stay where they are: they mean nothing
//! to either instruction. A port write counts as RDPMC at such a place only ([`sites`]); elsewhere it goes to the bus.
//!
//! The byte pair 0F 33 also occurs inside other instructions (37 times in the text of a Debian cloud
//! kernel, once as an instruction). Replacing one of those corrupts the kernel, so the finder in
//! [`find`] accepts a pair only when decoding proves it an instruction.
//!
//! A kernel that the guest starts itself (kexec, kdump) is searched in its memory ([`running`]).

mod finder;
pub mod hwbp;
pub mod running;
pub mod sites;

use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

pub use finder::{Names, find, is_out};

use crate::boot::BootError;
use crate::memory::GuestRam;

/// The port a replaced RDPMC writes to. No PC device lives there.
pub const TRAP_PORT: u16 = 0xE1;
/// `rdpmc`.
pub const RDPMC: [u8; 2] = [0x0F, 0x33];
/// `out TRAP_PORT, al`.
pub const TRAP: [u8; 2] = [0xE6, TRAP_PORT as u8];

/// How RDPMC reaches us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdpmcMode {
    /// As [`RdpmcMode::Trap`] for Linux; nothing is changed in another guest but the RDPMC found in its file.
    Auto,
    /// Replaced by an exit where it is found, and served at the guest's handler of #GP elsewhere.
    Trap,
    /// Not at all: the guest gets KVM's answer.
    Off,
    /// By hardware breakpoints, at most four sites.
    Hwbp,
}

/// No such way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be auto, trap, off or hwbp")]
pub struct UnknownRdpmcMode;

impl std::str::FromStr for RdpmcMode {
    type Err = UnknownRdpmcMode;

    fn from_str(name: &str) -> Result<Self, UnknownRdpmcMode> {
        match name {
            "auto" => Ok(Self::Auto),
            "trap" => Ok(Self::Trap),
            "off" => Ok(Self::Off),
            "hwbp" => Ok(Self::Hwbp),
            _ => Err(UnknownRdpmcMode),
        }
    }
}

/// Longest instruction (SDM vol. 2 §2.3.11).
pub const LONGEST: usize = 15;

/// Executable bytes to search.
#[derive(Clone, Copy, Debug)]
pub struct Text<'a> {
    /// Link-time address of the first byte.
    pub virt: u64,
    /// Guest-physical address of the first byte.
    pub phys: u64,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// The processor mode the text is decoded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeBits {
    /// 64-bit code only: a Linux kernel.
    Only64,
    /// 32- or 64-bit code: a multiboot image starts in one and may switch to the other.
    Either,
}

impl CodeBits {
    fn modes(self) -> &'static [u32] {
        match self {
            CodeBits::Only64 => &[64],
            CodeBits::Either => &[64, 32],
        }
    }
}

/// One RDPMC instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatchedSite {
    /// Link-time address of its first byte, which may be a prefix.
    pub virt: u64,
    /// Guest-physical address of the same.
    pub phys: u64,
    /// Its length in bytes: two and its prefixes.
    pub length: u8,
    /// Bytes before it that are prefixes in 64-bit code and instructions in 32-bit code.
    pub lead: u8,
    /// A port write of the guest's own is right before or behind it, as far as bytes tell.
    pub beside_out: bool,
    /// Symbol it lies in and the offset into it.
    pub symbol: Option<(String, u64)>,
}

impl PatchedSite {
    /// Guest-physical address of the two bytes that are replaced, its last.
    fn opcode(&self) -> u64 {
        self.phys + u64::from(self.length) - RDPMC.len() as u64
    }

    /// `symbol+offset`, or the address where no symbol is known.
    pub fn place(&self) -> String {
        match &self.symbol {
            Some((name, offset)) => format!("{name}+{offset:#x}"),
            None => format!("{:#x}", self.virt),
        }
    }
}

/// Replaces the instruction at `site` in guest memory.
pub fn patch(ram: &GuestRam, site: &PatchedSite) -> Result<(), BootError> {
    let at = GuestAddress(site.opcode());
    let failed = |reason: String| BootError::GuestMemory {
        what: "the RDPMC trap",
        address: site.opcode(),
        reason,
    };
    let mut there = [0u8; 2];
    ram.memory()
        .read_slice(&mut there, at)
        .map_err(|e| failed(e.to_string()))?;
    // Two segments may name the same memory; what was found in the file must be what was loaded.
    if there != RDPMC {
        return Err(failed(format!(
            "memory holds {there:02x?} instead of the instruction found in the file"
        )));
    }
    ram.memory()
        .write_slice(&TRAP, at)
        .map_err(|e| failed(e.to_string()))
}

/// Has KVM complete a port write that is being handled, and go no further: it steps over the OUT when it is entered again, unless the vCPU
/// has gone elsewhere. The request to leave stays with the next entry until it is cleared.
///
/// # Errors
/// KVM's, which no guest can cause.
pub fn complete_port_write(fd: &mut VcpuFd) -> Result<(), kvm_ioctls::Error> {
    fd.set_kvm_immediate_exit(1);
    match fd.run() {
        Err(e) if e.errno() == libc::EINTR => {}
        Err(e) => return Err(e),
        Ok(exit) => log::debug!("unexpected exit while completing a port write: {exit:?}"),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_real_rdpmc_is_overwritten() {
        let ram = GuestRam::new(16 << 20).unwrap();
        let site = PatchedSite {
            virt: 0xFFFF_FFFF_8100_0000,
            phys: 0x0F_FFFF,
            length: 3,
            lead: 0,
            beside_out: false,
            symbol: None,
        };
        assert!(patch(&ram, &site).is_err());
        ram.memory().write_slice(&RDPMC, GuestAddress(0x10_0000)).unwrap();
        patch(&ram, &site).unwrap();
        let bytes: [u8; 2] = ram.memory().read_obj(GuestAddress(0x10_0000)).unwrap();
        assert_eq!(bytes, TRAP);
    }
}
