//! An interrupt for each of the lab's processors, again and again.
//!
//! QEMU loses an interrupt now and then: VMRUN sets a bit of the processor's pending interrupts without the
//! lock under which QEMU's timers set theirs (`cpu->interrupt_request` in `helper_vmrun`, seen in 7.2). If it
//! was the timer's, the processor waits for it for ever, and with it the guest, until any other interrupt
//! comes: then both are seen. So one comes.
//!
//! The first processor never runs a guest and loses none. A thread there wakes one on each of the others,
//! which the kernel announces by an interrupt.

use std::io;
use std::mem;
use std::thread::{self, Thread};
use std::time::Duration;

/// The longest that a processor stands still.
const PERIOD: Duration = Duration::from_millis(50);

/// Beats until the process is killed.
///
/// # Errors
/// When a thread cannot be started or bound to its processor.
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

/// Keeps the calling thread on a processor.
#[expect(unsafe_code, reason = "calls of the system")]
fn bind(processor: usize) -> io::Result<()> {
    // SAFETY: a cpu_set_t is an array of integers, for which all zeroes are valid; CPU_SET checks its bounds;
    // the call reads as many bytes as it is told and gets.
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

/// Lets the calling thread run as soon as it is woken: for others the kernel may wait until its next tick,
/// which may be what was lost.
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
