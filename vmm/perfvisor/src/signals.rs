//! SIGTERM, SIGINT and SIGHUP as a descriptor, so that they end the VM in order and not the process in the
//! middle; SIGWINCH and SIGCHLD as others.
//!
//! A thread waits for them, and not a signalfd: the kernel wakes whoever waits for a signalfd at every signal
//! of the process, in its set or not, and the vCPUs are kicked by signals a thousand times a second.
#![expect(unsafe_code, reason = "blocks signals and waits for them by system calls")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;

use perfvisor_vmm::privileges;
use sandbox::ThreadKind;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// The signals that ask the VM to end.
const STOP_SIGNALS: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// One of them came and was taken by the thread that waits for them.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// Whether one of the stop signals came since they were blocked: for what waits where no [`StopSignals`] is
/// at hand. Where they are not blocked, they end the process.
pub fn asked_to_end() -> bool {
    if TAKEN.load(Ordering::SeqCst) {
        return true;
    }
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigpending initialises the set it is given, or fails; sigismember gets an initialised one.
    unsafe {
        libc::sigpending(set.as_mut_ptr()) == 0
            && STOP_SIGNALS
                .iter()
                .any(|signal| libc::sigismember(set.as_ptr(), *signal) == 1)
    }
}

/// The blocked stop signals. The descriptor is readable when one came.
#[derive(Debug)]
pub struct StopSignals {
    came: EventFd,
    last: Arc<AtomicI32>,
    resized: EventFd,
    child_ended: EventFd,
    /// The first one that comes stays for all who look.
    stays: bool,
}

/// Signals that are blocked in the calling thread and in those that it starts. Who takes them is to be said
/// by [`BlockedSignals::wait`]: until then they stay pending.
pub struct BlockedSignals(libc::sigset_t);

impl BlockedSignals {
    /// Blocks the signals that a VM's process handles: those that end it, SIGWINCH
    /// ([`StopSignals::resized`]) and SIGCHLD ([`StopSignals::child_ended`]).
    ///
    /// # Errors
    /// The system call's error.
    pub fn of_vm() -> io::Result<Self> {
        let [a, b, c] = STOP_SIGNALS;
        Self::all(&[a, b, c, libc::SIGWINCH, libc::SIGCHLD])
    }

    fn all(signals: &[libc::c_int]) -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set it is given; the later calls get that initialised set.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in signals {
                libc::sigaddset(set.as_mut_ptr(), *signal);
            }
            let error = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            Ok(Self(set.assume_init()))
        }
    }

    /// Has a thread wait for them as long as the process lives.
    ///
    /// # Errors
    /// The system call's error.
    pub fn wait(self) -> io::Result<StopSignals> {
        let set = self.0;
        let came = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let resized = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let child_ended = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let tell_child = child_ended.try_clone()?;
        let last = Arc::new(AtomicI32::new(0));
        let (tell, store, tell_size) = (came.try_clone()?, last.clone(), resized.try_clone()?);
        thread::Builder::new().name("signals".into()).spawn(move || {
            privileges::drop_thread_capabilities();
            sandbox::enter(ThreadKind::Signals);
            let mut signal = 0;
            // SAFETY: both point to valid values of this thread for the length of the call.
            while unsafe { libc::sigwait(&set, &mut signal) } == 0 {
                // A counter that is full says what these writes would.
                let tell_other = match signal {
                    libc::SIGWINCH => Some(&tell_size),
                    libc::SIGCHLD => Some(&tell_child),
                    _ => None,
                };
                if let Some(tell_other) = tell_other {
                    let _ = tell_other.write(1);
                    continue;
                }
                store.store(signal, Ordering::SeqCst);
                TAKEN.store(true, Ordering::SeqCst);
                let _ = tell.write(1);
            }
        })?;
        Ok(StopSignals {
            came,
            last,
            resized,
            child_ended,
            stays: false,
        })
    }
}

impl StopSignals {
    /// Blocks the stop signals in the calling thread, and in every thread it starts later, and has a thread
    /// wait for them as long as the process lives.
    ///
    /// # Errors
    /// The system call's error.
    pub fn block() -> io::Result<Self> {
        BlockedSignals::all(&STOP_SIGNALS)?.wait()
    }

    /// A descriptor that is readable when the terminal's window has got another size.
    ///
    /// # Errors
    /// The host has no descriptor left.
    pub fn resized(&self) -> io::Result<EventFd> {
        self.resized.try_clone()
    }

    /// Returns a descriptor that is readable when a child process has ended or stopped, if SIGCHLD is
    /// blocked ([`BlockedSignals::of_vm`]).
    ///
    /// # Errors
    /// The host has no descriptor left.
    pub fn child_ended(&self) -> io::Result<EventFd> {
        self.child_ended.try_clone()
    }

    /// For several threads that all end at the first signal.
    #[must_use]
    pub fn for_all(self) -> Self {
        Self { stays: true, ..self }
    }

    /// The number of the last signal that came, if one did since the last call.
    pub fn take(&self) -> Option<i32> {
        if self.stays {
            return Some(self.last.load(Ordering::SeqCst)).filter(|signal| *signal != 0);
        }
        self.came.read().ok()?;
        Some(self.last.load(Ordering::SeqCst))
    }
}

impl AsRawFd for StopSignals {
    fn as_raw_fd(&self) -> RawFd {
        self.came.as_raw_fd()
    }
}
