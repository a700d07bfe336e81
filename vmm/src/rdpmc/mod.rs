//! RDPMC in guest kernels: finding it and making it trap.
//!
//! KVM has no exit for RDPMC: with KVM's own PMU off the guest gets #GP. So each RDPMC (0F 33) of the
//! guest kernel is replaced, before the guest starts, by `out imm8, al` (E6 nn), two bytes as well, on
//! a port reserved for it. The exit handler reads ECX and writes EDX:EAX as RDPMC would. Prefixes stay where
//! they are: they mean nothing to either instruction. A port write counts as RDPMC at such a place only
//! ([`sites`]); elsewhere it goes to the bus.
//!
//! The byte pair 0F 33 also occurs inside other instructions (37 times in the text of a Debian cloud
//! kernel, once as an instruction). Replacing one of those corrupts the kernel, so the finder in
//! [`kernel_images::rdpmc`] accepts a pair only when decoding proves it an instruction.
//!
//! A kernel that the guest starts itself (kexec, kdump) is searched in its memory
//! ([`crate::kernels::running`]).

pub mod hwbp;
pub mod sites;

use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

use crate::memory::GuestRam;
use kernel_images::rdpmc::{PatchedSite, RDPMC, TRAP};

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

/// Why an RDPMC was not replaced.
#[derive(Debug, thiserror::Error)]
pub enum PatchError {
    /// There is no memory.
    #[error("cannot write the RDPMC trap into guest memory at {address:#x}")]
    Memory {
        /// Guest-physical address.
        address: u64,
        /// What the memory said.
        source: GuestMemoryError,
    },
    /// Two segments may name the same memory.
    #[error("guest memory at {address:#x} holds {found:02x?} instead of the RDPMC that is in the file there")]
    Other {
        /// Guest-physical address.
        address: u64,
        /// What is there.
        found: [u8; 2],
    },
}

/// Replaces the instruction at `site` in guest memory.
///
/// # Errors
/// [`PatchError`], when the memory is none or holds something else.
pub fn patch(ram: &GuestRam, site: &PatchedSite) -> Result<(), PatchError> {
    let at = GuestAddress(site.opcode());
    let address = site.opcode();
    let failed = |source| PatchError::Memory { address, source };
    let mut found = [0u8; 2];
    ram.memory().read_slice(&mut found, at).map_err(failed)?;
    if found != RDPMC {
        return Err(PatchError::Other { address, found });
    }
    ram.memory().write_slice(&TRAP, at).map_err(failed)
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
