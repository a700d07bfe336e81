//! One-line description of KVM_EXIT_INTERNAL_ERROR: the suberror and the affected instruction.

use std::fmt;

use iced_x86::{Decoder, DecoderOptions, Formatter, GasFormatter};
use kvm_bindings::{
    KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_SIMUL_EX,
    KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON,
};

use crate::kvm::call::KvmIoctlError;
use crate::kvm::kickable_vcpu::{InternalErrorExit, KickableVcpu};

/// Linear address of the first instruction after INIT or reset (SDM vol. 3 §9.1.4).
const RESET_VECTOR: u64 = 0xffff_fff0;
/// CR0.PE: protected mode (SDM vol. 3 §2.5).
const CR0_PE: u64 = 1 << 0;

/// An internal error of KVM, and the state of the vCPU when it occurred.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InternalError {
    exit: InternalErrorExit,
    rip: u64,
    /// Size of the addresses in the code segment: 16, 32 or 64 bits.
    bits: u32,
    cpl: u8,
    /// Linear address of the instruction: RIP plus the base of CS.
    linear: u64,
    real_mode: bool,
}

impl InternalError {
    /// Collects the details of the last exit of `vcpu`, which must be KVM_EXIT_INTERNAL_ERROR.
    ///
    /// # Errors
    /// Returns an error if a KVM call that reads registers fails.
    pub(super) fn of(vcpu: &mut KickableVcpu) -> Result<Self, KvmIoctlError> {
        let sregs = vcpu.get_sregs()?;
        let bits = match (sregs.cs.l, sregs.cs.db) {
            (0, 0) => 16,
            (0, _) => 32,
            _ => 64,
        };
        let rip = vcpu.get_regs()?.rip;
        Ok(Self {
            rip,
            linear: sregs.cs.base.wrapping_add(rip),
            real_mode: sregs.cr0 & CR0_PE == 0,
            bits,
            cpl: sregs.ss.dpl,
            exit: vcpu.internal_exit(),
        })
    }

    /// Returns `true` if the vCPU is at the reset vector. An INIT from the guest leads there (SDM
    /// vol. 3 §9.1.4), but the VM has no firmware at this address.
    pub(super) fn is_at_reset_vector(&self) -> bool {
        self.real_mode && self.linear == RESET_VECTOR
    }

    fn name(&self) -> &'static str {
        match self.exit.suberror {
            KVM_INTERNAL_ERROR_EMULATION => "it cannot emulate an instruction",
            KVM_INTERNAL_ERROR_SIMUL_EX => "exceptions at the same time",
            KVM_INTERNAL_ERROR_DELIVERY_EV => "an exit while an event was delivered",
            KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => "an exit of the processor that it does not know",
            _ => "unknown",
        }
    }
}

impl fmt::Display for InternalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suberror = self.exit.suberror;
        write!(f, "KVM gave up with internal error {suberror} ({})", self.name())?;
        write!(f, " at {:#x}, CPL {}", self.rip, self.cpl)?;
        let bytes = self.exit.bytes();
        let mut decoder = Decoder::with_ip(self.bits, bytes, self.rip, DecoderOptions::NONE);
        let instruction = decoder.decode();
        if bytes.is_empty() {
            return write!(f, ", and does not say at which instruction");
        }
        let length = if instruction.is_invalid() {
            bytes.len()
        } else {
            let mut text = String::new();
            GasFormatter::new().format(&instruction, &mut text);
            write!(f, ": {text}")?;
            instruction.len().min(bytes.len())
        };
        write!(f, " (bytes")?;
        for byte in &bytes[..length] {
            write!(f, " {byte:02x}")?;
        }
        write!(f, ")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(suberror: u32, bytes: &[u8]) -> InternalError {
        InternalError {
            exit: InternalErrorExit::new(suberror, bytes),
            rip: 0x10_0000,
            bits: 64,
            cpl: 0,
            linear: 0x10_0000,
            real_mode: false,
        }
    }

    #[test]
    fn internal_error_names_only_the_instruction() {
        let said = error(1, &[0x48, 0x0f, 0xc7, 0x08, 0xeb, 0xfe]).to_string();
        assert_eq!(
            said,
            "KVM gave up with internal error 1 (it cannot emulate an instruction) at 0x100000, CPL 0: \
             cmpxchg16b (%rax) (bytes 48 0f c7 08)"
        );
    }

    #[test]
    fn reset_vector_requires_real_mode() {
        let at = |linear, real_mode| InternalError {
            linear,
            real_mode,
            ..error(1, &[])
        };
        assert!(at(RESET_VECTOR, true).is_at_reset_vector());
        assert!(!at(RESET_VECTOR, false).is_at_reset_vector());
        assert!(!at(0xfff0, true).is_at_reset_vector());
    }

    #[test]
    fn internal_error_without_instruction_is_described() {
        let said = error(4, &[]).to_string();
        assert!(said.contains("error 4 (an exit of the processor") && said.ends_with("at which instruction"));
        let said = error(99, &[0x06, 0x06]).to_string();
        assert!(
            said.contains("error 99 (unknown)") && said.ends_with("(bytes 06 06)"),
            "{said}"
        );
    }
}
