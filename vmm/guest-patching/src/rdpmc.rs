//! Replacement of RDPMC instructions in guest kernels with traps.
//!
//! KVM has no exit for RDPMC. If KVM's vPMU is disabled, RDPMC raises #GP in the guest. Before the
//! guest starts, each RDPMC (0F 33) of its kernel is therefore replaced by `out 0x33, al` (E6 33),
//! which writes to a port without a device. The exit handler reads ECX and writes EDX:EAX as RDPMC
//! would. Prefixes of the RDPMC remain, because they change neither RDPMC nor the port write. A
//! port write is treated as RDPMC only at the address of a replaced RDPMC ([`crate::sites`]). Any
//! other write goes to the device at the port.
//!
//! The byte pair 0F 33 also occurs inside other instructions. The text of a Debian cloud kernel
//! contains it 37 times, but only once as an instruction. Replacing such a pair would corrupt the
//! kernel, so the finder in [`crate::finder`] accepts a pair only if decoding proves that it is an
//! instruction.
//!
//! A kernel that the guest starts itself (kexec, kdump) is searched in guest memory
//! ([`crate::running`]).

use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::finder::{RDPMC, RdpmcSite, TRAP};

/// Method of emulating RDPMC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RdpmcMode {
    /// Same as [`RdpmcMode::Trap`] for Linux. In other guests, only RDPMC found in the kernel file
    /// is replaced.
    Auto,
    /// Replace RDPMC with a trap in the guest's kernels, and emulate any other RDPMC at the guest's
    /// #GP handler.
    Trap,
    /// Do not emulate RDPMC. The instruction behaves as KVM implements it.
    Off,
    /// Use hardware breakpoints, for at most four RDPMC instructions.
    Hwbp,
}

/// Error returned when an [`RdpmcMode`] cannot be parsed.
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

/// Error returned when an RDPMC cannot be replaced by a trap.
#[derive(Debug, thiserror::Error)]
pub enum RdpmcPatchError {
    /// The address is outside guest memory.
    #[error("cannot write the RDPMC trap into guest memory at {address:#x}")]
    Memory {
        /// Guest-physical address that is outside guest memory.
        address: u64,
        /// Error of the memory access.
        source: GuestMemoryError,
    },
    /// Memory does not contain the expected RDPMC, for example because two segments overlap.
    #[error("guest memory at {address:#x} contains {found:02x?} instead of the RDPMC from the kernel file")]
    Other {
        /// Guest-physical address at which an RDPMC was expected.
        address: u64,
        /// Bytes found at the address.
        found: [u8; 2],
    },
}

/// Replaces the RDPMC at `site` in guest memory.
///
/// # Errors
/// Returns [`RdpmcPatchError::Memory`] if the memory is not accessible, and
/// [`RdpmcPatchError::Other`] if it does not contain RDPMC.
pub fn patch(memory: &GuestMemoryMmap, site: &RdpmcSite) -> Result<(), RdpmcPatchError> {
    let at = GuestAddress(site.opcode());
    let address = site.opcode();
    let failed = |source| RdpmcPatchError::Memory { address, source };
    let mut found = [0u8; 2];
    memory.read_slice(&mut found, at).map_err(failed)?;
    if found != RDPMC {
        return Err(RdpmcPatchError::Other { address, found });
    }
    memory.write_slice(&TRAP, at).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patch_rejects_other_instruction() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 16 << 20)]).unwrap();
        let site = RdpmcSite {
            virt: 0xFFFF_FFFF_8100_0000,
            phys: 0x0F_FFFF,
            length: 3,
            prefix_len: 0,
            next_to_port_write: false,
            symbol: None,
        };
        assert!(patch(&memory, &site).is_err());
        memory.write_slice(&RDPMC, GuestAddress(0x10_0000)).unwrap();
        patch(&memory, &site).unwrap();
        let bytes: [u8; 2] = memory.read_obj(GuestAddress(0x10_0000)).unwrap();
        assert_eq!(bytes, TRAP);
    }
}
