//! Context markers of `perf` call chains that are not specific to guests. The markers for guest
//! frames are in [`crate::unwind`].

/// Marker before kernel frames, `PERF_CONTEXT_KERNEL`.
pub const CONTEXT_KERNEL: u64 = (-128i64).cast_unsigned();
/// Marker before user frames, `PERF_CONTEXT_USER`.
pub const CONTEXT_USER: u64 = (-512i64).cast_unsigned();
