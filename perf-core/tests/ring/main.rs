//! Tests of the ring that need a separate process: `ring_signals` installs process-wide handlers
//! for SIGUSR1 and SIGUSR2, and `ring_process` forks, starts this program again, and passes the
//! ring on fixed file descriptors.

#[allow(dead_code, reason = "each program uses its part")]
#[path = "../it/common/mod.rs"]
mod common;

mod ring_process;
mod ring_signals;
