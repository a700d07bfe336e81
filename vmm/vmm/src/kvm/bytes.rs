//! KVM's structures as bytes, for snapshots.
#![expect(unsafe_code, reason = "reads and writes KVM's structures as bytes")]

use std::mem::MaybeUninit;

use kvm_bindings::{
    Xsave, kvm_debugregs, kvm_fpu, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_pit_state2, kvm_regs,
    kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use snapshot::Base64Bytes;
use vmm_sys_util::fam::FamStruct as _;

use super::call::KvmIoctlError;
use super::vcpu_fd::VcpuFd;

/// A structure of KVM's ABI that a snapshot saves as bytes.
///
/// # Safety
/// The type consists of integers, and of arrays, structures and unions of integers, without
/// implicit padding, so every bit pattern is valid. Values are fully initialized: they come from
/// `Default`, which zeroes all bytes, or from [`from_bytes`], and KVM writes only initialized
/// bytes.
pub(super) unsafe trait KvmStruct: Copy {}

// SAFETY: see the definitions in include/uapi and arch/x86/include/uapi of Linux, which have
// explicit padding fields.
unsafe impl KvmStruct for kvm_regs {}
// SAFETY: as above.
unsafe impl KvmStruct for kvm_sregs {}
// SAFETY: as above.
unsafe impl KvmStruct for kvm_fpu {}
// SAFETY: as above.
unsafe impl KvmStruct for kvm_xcrs {}
// SAFETY: as above.
unsafe impl KvmStruct for kvm_debugregs {}
// SAFETY: as above.
unsafe impl KvmStruct for kvm_lapic_state {}
// SAFETY: as above.
unsafe impl KvmStruct for kvm_mp_state {}
// SAFETY: as above.
unsafe impl KvmStruct for kvm_vcpu_events {}
// SAFETY: as above. KVM copies the whole union.
unsafe impl KvmStruct for kvm_irqchip {}
// SAFETY: as above.
unsafe impl KvmStruct for kvm_pit_state2 {}

/// Returns the bytes of a KVM structure, for a snapshot.
pub(super) fn to_bytes<T: KvmStruct>(value: &T) -> Base64Bytes {
    // SAFETY: the pointer and the length describe `value`, whose bytes are initialized (KvmStruct).
    let bytes = unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) };
    Base64Bytes(bytes.to_vec())
}

/// Returns the KVM structure that consists of `bytes`. Returns `None` if `bytes` does not have the
/// size of the structure.
pub(super) fn from_bytes<T: KvmStruct>(bytes: &Base64Bytes) -> Option<T> {
    if bytes.0.len() != size_of::<T>() {
        return None;
    }
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the destination has as many bytes as the source. Every bit pattern is a valid `T`
    // (KvmStruct), so the value is initialized after the copy.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.0.as_ptr(), value.as_mut_ptr().cast::<u8>(), size_of::<T>());
        Some(value.assume_init())
    }
}

impl VcpuFd {
    /// Reads the extended state (XSAVE) of the vCPU. `size` is the size in bytes that KVM has
    /// reported.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM_GET_XSAVE or KVM_GET_XSAVE2 fails.
    pub(super) fn get_xsave(&self, size: usize) -> Result<Base64Bytes, KvmIoctlError> {
        const CALL: &str = "KVM_GET_XSAVE2";
        let mut xsave = empty_xsave(size).ok_or(KvmIoctlError::with_errno(CALL, libc::EINVAL))?;
        if size > size_of::<kvm_xsave>() {
            // SAFETY: the allocation has the size that KVM_CHECK_EXTENSION(KVM_CAP_XSAVE2) reported
            // for this VM.
            unsafe { self.raw().get_xsave2(&mut xsave) }.map_err(KvmIoctlError::of(CALL))?;
            return Ok(xsave_to_bytes(&xsave));
        }
        let fixed = self
            .raw()
            .get_xsave()
            .map_err(KvmIoctlError::of("KVM_GET_XSAVE"))?;
        Ok(Base64Bytes(
            fixed.region.iter().flat_map(|word| word.to_le_bytes()).collect(),
        ))
    }

    /// Writes the extended state (XSAVE) of the vCPU. Returns `None` if `bytes` does not have
    /// `size` bytes.
    pub(super) fn set_xsave(&self, bytes: &Base64Bytes, size: usize) -> Option<Result<(), KvmIoctlError>> {
        let xsave = xsave_from_bytes(bytes, size)?;
        // SAFETY: KVM reads `size` bytes, the size that it has reported for this VM, and the
        // allocation has as many.
        let set = unsafe { self.raw().set_xsave2(&xsave) };
        Some(set.map_err(KvmIoctlError::of("KVM_SET_XSAVE")))
    }
}

/// Returns the bytes of an extended state, including the part after the first 4 KiB.
pub(super) fn xsave_to_bytes(xsave: &Xsave) -> Base64Bytes {
    let fixed = xsave.as_fam_struct_ref().xsave.region;
    let words = fixed.iter().chain(xsave.as_slice());
    Base64Bytes(words.flat_map(|word| word.to_le_bytes()).collect())
}

/// Returns the extended state that consists of `bytes`. Returns `None` if the length of `bytes` is
/// not `size`.
pub(super) fn xsave_from_bytes(bytes: &Base64Bytes, size: usize) -> Option<Xsave> {
    if bytes.0.len() != size {
        return None;
    }
    let words = bytes.0.chunks_exact(4);
    let words: Vec<u32> = words
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect();
    let mut xsave = empty_xsave(size)?;
    let fixed = size_of::<kvm_xsave>() / 4;
    // SAFETY: the length of the array is not changed.
    let fields = unsafe { xsave.as_mut_fam_struct() };
    fields.xsave.region.copy_from_slice(&words[..fixed]);
    xsave.as_mut_slice().copy_from_slice(&words[fixed..]);
    Some(xsave)
}

/// Returns an extended state of `size` bytes, which KVM can fill. Returns `None` if the size is
/// impossible.
pub(super) fn empty_xsave(size: usize) -> Option<Xsave> {
    let extra = size.checked_sub(size_of::<kvm_xsave>())?;
    if extra % 4 != 0 || extra / 4 > kvm_bindings::kvm_xsave2::max_len() {
        return None;
    }
    Xsave::new(extra / 4).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structure_round_trips_through_bytes() {
        let regs = kvm_regs {
            rip: 0x1234,
            r15: u64::MAX,
            ..Default::default()
        };
        let bytes = to_bytes(&regs);
        assert_eq!(from_bytes::<kvm_regs>(&bytes), Some(regs));
        assert!(from_bytes::<kvm_sregs>(&bytes).is_none(), "of another size");
        assert!(from_bytes::<kvm_regs>(&Base64Bytes(bytes.0[1..].to_vec())).is_none());
    }

    /// An extended state of more than 4 KiB, the size of KVM_GET_XSAVE, is converted without loss.
    /// AVX-512 and AMX need more.
    #[test]
    fn wide_registers_survive() {
        for size in [4096, 11_008] {
            let bytes = Base64Bytes((0..size).map(|n| (n % 251) as u8).collect());
            let xsave = xsave_from_bytes(&bytes, size).unwrap();
            assert_eq!(xsave_to_bytes(&xsave), bytes);
            assert!(xsave_from_bytes(&bytes, size + 4).is_none());
        }
        assert!(empty_xsave(4095).is_none() && empty_xsave(4098).is_none());
    }
}
