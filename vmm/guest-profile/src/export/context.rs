//! Markers in call chains that say whose the frames behind them are, as perf has them for its own machine.
//! Those of guests are in [`crate::unwind`].

/// `PERF_CONTEXT_KERNEL`.
pub const CONTEXT_KERNEL: u64 = (-128i64).cast_unsigned();
/// `PERF_CONTEXT_USER`.
pub const CONTEXT_USER: u64 = (-512i64).cast_unsigned();
