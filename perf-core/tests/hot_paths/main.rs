//! Tests of the cost of the hot paths: allocations, system calls and instructions.
//!
//! The tests are a separate program, because it uses the counting allocator of `allocation_counter`
//! and counts system calls and instructions in forked child processes. Each fork makes all pages
//! copy-on-write, and the resulting page faults would disturb tests that count page faults.

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
mod scale;
#[cfg(feature = "sim")]
mod ticks;

/// Makes the traced child exit with an error, which the parent detects, if `holds` is `false`.
#[cfg(feature = "host")]
#[expect(unsafe_code, reason = "a call of the system")]
fn must(holds: bool) {
    if !holds {
        // SAFETY: `_exit` ends the process immediately.
        unsafe { libc::_exit(1) };
    }
}

/// Returns the number of memory allocations that `work` makes.
fn allocations(work: impl FnOnce()) -> u64 {
    allocation_counter::measure(work).count_total
}

#[test]
fn allocations_are_counted() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1);
}

/// Returns the system calls that `work` makes in a traced child. The test fails if the child exits
/// in [`must`].
#[cfg(feature = "host")]
fn calls<T>(setup: impl FnOnce() -> T, work: impl FnOnce(&mut T)) -> Vec<u64> {
    test_support::steps::system_calls(setup, work).expect("processes may be traced, and `must` holds")
}
