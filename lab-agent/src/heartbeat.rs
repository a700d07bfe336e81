//! Sends periodic interrupts to each processor of the lab.
//!
//! QEMU occasionally loses an interrupt: VMRUN sets a bit of the processor's pending interrupts
//! without the lock under which QEMU's timers set their bits (`cpu->interrupt_request` in
//! `helper_vmrun`, seen in 7.2). A processor whose timer interrupt is lost waits, together with the
//! guest on it, until it receives another interrupt. Without this module, that may never happen.
//!
//! The first processor never runs a guest, so it loses no interrupts. A thread on it periodically
//! wakes a thread on each other processor. To do so, the kernel sends an interrupt to that
//! processor.

use std::io;
use std::mem;
use std::thread::{self, Thread};
use std::time::Duration;

/// Interval between two interrupts of a processor.
const PERIOD: Duration = Duration::from_millis(50);

/// Sends periodic interrupts to the lab's processors until the process is killed.
///
/// # Errors
/// Returns an error if a thread cannot be started or bound to its processor.
pub fn beat() -> io::Result<()> {
    let processors = thread::available_parallelism()?.get();
    let mut woken: Vec<Thread> = Vec::new();
    for processor in 1..processors {
        let (ready, result) = std::sync::mpsc::channel();
        let handle = thread::Builder::new().stack_size(64 << 10).spawn(move || {
            let bound = bind(processor).and_then(|()| before_others());
            let failed = bound.is_err();
            if ready.send(bound).is_err() || failed {
                return;
            }
            loop {
                thread::park();
            }
        })?;
        woken.push(handle.thread().clone());
        result.recv().map_err(io::Error::other)??;
    }
    bind(0)?;
    loop {
        thread::sleep(PERIOD);
        for thread in &woken {
            thread.unpark();
        }
    }
}

/// Binds the calling thread to a processor.
#[expect(unsafe_code, reason = "calls of the system")]
fn bind(processor: usize) -> io::Result<()> {
    // SAFETY: a cpu_set_t is an array of integers, for which all zeroes are valid; CPU_SET checks
    // its bounds; the call reads only the given number of bytes.
    let result = unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        libc::sched_setaffinity(0, mem::size_of_val(&set), &set)
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Gives the calling thread real-time priority, so the kernel runs it as soon as it is woken. A
/// thread with normal priority may have to wait for the next timer tick, which may be the lost
/// interrupt.
#[expect(unsafe_code, reason = "calls of the system")]
fn before_others() -> io::Result<()> {
    // SAFETY: a sched_param is integers, for which zero is valid; the call reads it.
    let result = unsafe {
        let mut parameter: libc::sched_param = mem::zeroed();
        parameter.sched_priority = 1;
        libc::sched_setscheduler(0, libc::SCHED_FIFO, &parameter)
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
