//! Cost of the hot paths: allocations, system calls and instructions.
//!
//! This is a separate program because it uses the counting allocator of `allocation_counter`, and
//! because system calls and instructions are counted in forked copies of the process. Each fork
//! makes all pages copy-on-write, and the resulting page faults would disturb tests that count page
//! faults.

#[allow(dead_code, reason = "each program uses its part")]
#[path = "../it/common/mod.rs"]
mod common;

#[cfg(feature = "clock")]
mod clock_syscalls;
#[cfg(feature = "host")]
mod host_groups;
#[cfg(feature = "host")]
mod host_syscalls;
mod mux_allocation;
mod ring_allocation;
#[cfg(feature = "sim")]
mod ticks;

/// Exits the traced child with an error, which the parent notices, unless `holds`.
#[cfg(feature = "host")]
#[expect(unsafe_code, reason = "a call of the system")]
fn must(holds: bool) {
    if !holds {
        // SAFETY: `_exit` ends the process immediately.
        unsafe { libc::_exit(1) };
    }
}
