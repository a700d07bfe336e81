//! PID namespace of a VM, and the supervisor process outside it.
//!
//! [`PidNamespaceSupervisor::start`] forks. The child continues as PID 1 of a new PID namespace and
//! runs the VM. Neither the child nor any process that it starts can see or signal a process
//! outside the namespace. The parent becomes the supervisor. To the process that started the VM,
//! the supervisor is the VM's process. It forwards stop signals to the VM, handles the VM's
//! reports, and exits with the VM's status. If either of the two processes exits, the other one
//! exits too. The VM has its own process group, because a process can signal all members of its
//! group, even outside its namespace (`kill(2)` with 0). If the VM reads the terminal, the
//! supervisor makes the VM's process group the foreground group of the terminal.
//!
//! A user without the right to create a PID namespace first gets a user namespace, in which the PID
//! namespace can be created ([`crate::separate`]).
//!
//! Process IDs inside the namespace are meaningless to operators. [`host_pid`] and [`host_tid`]
//! return the IDs that are valid outside.
#![expect(unsafe_code, reason = "fork(2), signals and what a process does after a fork")]

use std::cell::Cell;
use std::convert::Infallible;
use std::ffi::CStr;
use std::fs;
use std::io::{self, Read, Write};
use std::mem::{MaybeUninit, size_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::sync::OnceLock;

use rustix::io::{Errno, read, write};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use seccompiler::{BpfProgram, apply_filter};

use crate::namespaces::{UserNamespaceError, own_users, unshare};
use crate::service::{EXIT_UNCONFINED, exit_process, keep_only_descriptors, trim_heap};
use crate::start::SandboxError;
use crate::{ProcessConfinement, SandboxedThreadKind, files, filter, lists};

/// Process name of the supervisor, as displayed by `ps`.
const NAME: &CStr = c"vm-supervisor";
/// Signals that the supervisor forwards to the VM.
const FORWARDED: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
/// Other signals that the supervisor handles: the exit of a child, and the signals with which a
/// shell stops and continues a job.
const HANDLED: [libc::c_int; 3] = [libc::SIGCHLD, libc::SIGTSTP, libc::SIGCONT];
/// Signals that the supervisor ignores. They have no effect on a running VM, but their default
/// action would terminate or stop the supervisor.
const IGNORED: [libc::c_int; 4] = [libc::SIGUSR1, libc::SIGUSR2, libc::SIGIO, libc::SIGTTOU];
/// `SI_QUEUE` of `sigaction(2)`, which indicates that the signal was sent with
/// `rt_sigqueueinfo(2)`.
const SI_QUEUE: libc::c_int = -1;
/// Message with which the VM reports to the supervisor that it will exit when the supervisor exits.
const BOUND: u8 = b'B';

/// Error returned when a VM cannot run in a PID namespace.
#[derive(Debug, thiserror::Error)]
pub enum PidNamespaceError {
    /// The kernel does not permit a PID namespace for this process.
    #[error("the kernel gives the jail no PID namespace (CONFIG_PID_NS, user.max_pid_namespaces)")]
    Namespace(#[source] io::Error),
    /// A system call failed.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
    /// The seccomp filter of the supervisor could not be created.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The user namespace could not be set up.
    #[error(transparent)]
    UserNamespace(#[from] UserNamespaceError),
    /// The supervisor could not drop its privileges.
    #[error("the supervisor outside the jail cannot be confined")]
    Unconfined,
}

/// IDs of a process outside its PID namespace.
#[derive(Debug)]
struct HostIds {
    vm: u32,
    supervisor: u32,
    /// `true` if a user namespace was created with the PID namespace.
    of_a_user: bool,
}

/// IDs of this process outside its PID namespace. Unset if the process is not in such a namespace.
static HOST_IDS: OnceLock<HostIds> = OnceLock::new();

/// Returns whether a user namespace was created together with the PID namespace of this process.
pub(crate) fn has_user_namespace() -> bool {
    HOST_IDS.get().is_some_and(|ids| ids.of_a_user)
}

/// Returns the ID of this process outside its PID namespace.
#[must_use]
pub fn host_pid() -> u32 {
    HOST_IDS.get().map_or_else(std::process::id, |ids| ids.vm)
}

/// Returns the ID of the process that was started as this VM: the supervisor's ID if there is a
/// supervisor, and otherwise the ID of this process.
#[must_use]
pub fn starter_pid() -> u32 {
    HOST_IDS.get().map_or_else(std::process::id, |ids| ids.supervisor)
}

/// Returns the ID of the calling thread outside the PID namespace, or 0 if it is unknown. The first
/// call in a thread reads a file, so it must be made before the thread is confined.
#[must_use]
pub fn host_tid() -> u32 {
    thread_local!(static OWN: Cell<u32> = const { Cell::new(0) });
    OWN.with(|own| {
        if own.get() == 0 {
            own.set(find_host_tid().unwrap_or(0));
        }
        own.get()
    })
}

fn find_host_tid() -> Option<u32> {
    if HOST_IDS.get().is_none() {
        // SAFETY: gettid takes no arguments and cannot fail.
        return u32::try_from(unsafe { libc::gettid() }).ok();
    }
    // This /proc was mounted outside the namespace and shows the IDs that are valid there.
    let stat = fs::read_to_string("/proc/thread-self/stat").ok()?;
    stat.split(' ').next()?.parse().ok()
}

/// Returns whether a received signal was forwarded by the supervisor.
#[must_use]
pub fn is_forwarded(info: &libc::siginfo_t) -> bool {
    info.si_code == SI_QUEUE
}

/// The connection of a VM to its supervisor.
#[derive(Debug)]
pub struct SupervisorLink(UnixStream);

impl SupervisorLink {
    /// Sends a report to the supervisor, which passes it to [`PidNamespaceSupervisor::report`].
    ///
    /// # Errors
    /// Returns an error if `write(2)` fails.
    pub fn report(&self, report: u8) -> io::Result<()> {
        (&self.0).write_all(&[report])
    }
}

/// Configuration of the supervisor.
pub struct PidNamespaceSupervisor<'a> {
    /// Restrictions of the supervisor.
    pub confinement: ProcessConfinement,
    /// Function that drops all privileges of the supervisor. Returns whether it succeeded.
    pub give_up: fn() -> bool,
    /// `true` if the VM reads the terminal on standard input.
    pub terminal: bool,
    /// Descriptor that the supervisor keeps open for `report`.
    pub kept: Option<BorrowedFd<'a>>,
    /// Handler that the supervisor calls for a report from the VM. The handler may only write to
    /// the descriptor `kept`.
    pub report: &'a dyn Fn(u8),
}

impl PidNamespaceSupervisor<'_> {
    /// Creates a PID namespace and returns in its first process, in which the stop signals are
    /// still blocked. The calling process becomes the supervisor and does not return. It must be
    /// single-threaded and already have the VM's user.
    ///
    /// Without `CAP_SYS_ADMIN`, both processes move to a user namespace that maps only this user.
    /// The only capability that they keep in it is `CAP_SYS_ADMIN`, with which the VM can create
    /// the other namespaces of its jail. Returns `None` in the calling process, without a new
    /// process, in two cases: if this user may not create a user namespace, or if the process has
    /// `CAP_PERFMON`, which has no effect on perf events inside a user namespace.
    ///
    /// # Errors
    /// Returns [`PidNamespaceError::Namespace`] if the kernel has no PID namespace for this
    /// process, and [`PidNamespaceError::UserNamespace`] or [`PidNamespaceError::Os`] if a system
    /// call fails. In the new process, returns [`PidNamespaceError::Sandbox`] or
    /// [`PidNamespaceError::Unconfined`] if the supervisor is not confined.
    pub fn start(self) -> Result<Option<SupervisorLink>, PidNamespaceError> {
        let os = |what| move |e| PidNamespaceError::Os(what, e);
        let Some(of_a_user) = enter_namespaces()? else {
            return Ok(None);
        };
        let (ours, its) = UnixStream::pair().map_err(os("socketpair"))?;
        // Block the signals before the fork, so that no signal is lost. PID 1 of a namespace would
        // discard a signal that is neither blocked nor handled.
        change_mask(libc::SIG_BLOCK, &[&FORWARDED[..], &HANDLED].concat()).map_err(os("sigprocmask"))?;
        let supervisor = std::process::id();
        // SAFETY: no other thread exists, as the documentation requires, so all memory of the child
        // is consistent and no lock is held by another thread.
        match unsafe { libc::fork() } {
            -1 => Err(os("fork")(io::Error::last_os_error())),
            0 => {
                drop(its);
                bind_to_supervisor(ours, supervisor, of_a_user).map(Some)
            }
            vm => {
                drop(ours);
                let ended = panic::catch_unwind(AssertUnwindSafe(|| self.run(vm, its)));
                drop(ended);
                // The VM exits when this process exits.
                exit_process(EXIT_UNCONFINED)
            }
        }
    }

    /// Supervises process `vm` until it exits.
    fn run(&self, vm: libc::pid_t, mut link: UnixStream) -> io::Result<Infallible> {
        let signals = signal_descriptor()?;
        let terminal = self.terminal.then(Terminal::of_job).flatten();
        // The read fails if the VM has already exited, which the loop below handles.
        let _ = link.read_exact(&mut [0]);
        link.set_nonblocking(true)?;
        let hand_over = || terminal.iter().for_each(|terminal| terminal.hand_over(vm));
        hand_over();
        let kept = [
            Some(link.as_raw_fd()),
            Some(signals.as_raw_fd()),
            terminal.as_ref().map(|terminal| terminal.fd.as_raw_fd()),
            self.kept.map(|fd| fd.as_raw_fd()),
        ];
        // On failure, the VM reports the error and exits.
        let confined = self.confine(vm, kept.into_iter().flatten().collect()).is_ok();
        let told = if confined { vm } else { 0 };
        let _ = write(&link, &told.to_ne_bytes());
        let mut hears = true;
        loop {
            wait_readable(&signals, hears.then_some(&link))?;
            // Handle reports first, because the VM sends them before it exits.
            hears = hears && self.pass_reports(&link);
            while let Some(signal) = next_signal(&signals) {
                match signal {
                    libc::SIGCHLD => {
                        if let Some(status) = reap(vm) {
                            self.pass_reports(&link);
                            terminal.iter().for_each(|terminal| terminal.take_back(vm));
                            end_like(status);
                        }
                    }
                    libc::SIGTSTP => stop_with(vm),
                    libc::SIGCONT => {
                        hand_over();
                        send(vm, libc::SIGCONT);
                    }
                    other => forward(vm, other),
                }
            }
        }
    }

    fn confine(&self, vm: libc::pid_t, mut kept: Vec<RawFd>) -> io::Result<()> {
        let filter = self.filter(vm).map_err(io::Error::other)?;
        // SAFETY: the call takes a string that outlives it.
        unsafe { libc::prctl(libc::PR_SET_NAME, NAME.as_ptr()) };
        keep_only_descriptors(&mut kept)?;
        for signal in IGNORED {
            // SAFETY: ignoring a signal runs no code of this process.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
        trim_heap();
        if !(self.give_up)() {
            return Err(io::Error::other("rights that stay"));
        }
        if self.confinement.landlock {
            files::deny_all(true).map_err(io::Error::other)?;
        }
        filter.map_or(Ok(()), |filter| apply_filter(&filter).map_err(io::Error::other))
    }

    fn filter(&self, vm: libc::pid_t) -> Result<Option<BpfProgram>, SandboxError> {
        let list = lists::of_supervisor(vm.unsigned_abs(), std::process::id());
        self.confinement
            .otherwise()
            .map(|otherwise| filter::compile(&list, otherwise))
            .transpose()
            .map_err(|e| SandboxError::Compile(SandboxedThreadKind::Starter, e))
    }

    /// Handles the reports from the VM that have arrived. Returns whether further reports can
    /// follow.
    fn pass_reports(&self, link: &UnixStream) -> bool {
        let mut reports = [0; 16];
        loop {
            match read(link, &mut reports) {
                Ok(0) => return false,
                Ok(count) => reports
                    .iter()
                    .take(count)
                    .for_each(|report| (self.report)(*report)),
                Err(e) => return matches!(e, Errno::AGAIN | Errno::INTR),
            }
        }
    }
}

/// Makes the next child process PID 1 of a new PID namespace. Returns whether this process now has
/// its own user namespace, or `None` if it may have neither a PID namespace nor a user namespace.
fn enter_namespaces() -> Result<Option<bool>, PidNamespaceError> {
    match unshare(libc::CLONE_NEWPID) {
        Ok(()) => return Ok(Some(false)),
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => {}
        Err(e) => return Err(PidNamespaceError::Namespace(e)),
    }
    let keep = |set: CapabilitySet| {
        let sets = CapabilitySets {
            effective: set,
            permitted: set,
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, sets).map_err(|e| PidNamespaceError::Os("capset", e.into()))
    };
    let has = capabilities(None).map_err(|e| PidNamespaceError::Os("capget", e.into()))?;
    if has.permitted.contains(CapabilitySet::PERFMON) {
        return Ok(None);
    }
    match own_users(libc::CLONE_NEWPID) {
        Ok(()) => keep(CapabilitySet::SYS_ADMIN).map(|()| Some(true)),
        Err(UserNamespaceError::Denied(_)) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Makes this process exit when its supervisor exits, and waits until the supervisor is confined.
fn bind_to_supervisor(
    mut link: UnixStream,
    supervisor: u32,
    of_a_user: bool,
) -> Result<SupervisorLink, PidNamespaceError> {
    // SAFETY: the calls pass only integers. The kernel sends the signal to process 1 of a namespace
    // too, because the supervisor is outside. A later change of the user would cancel it.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::setpgid(0, 0);
    }
    let _ = change_mask(libc::SIG_UNBLOCK, &[libc::SIGTSTP, libc::SIGCONT]);
    let mut vm = [0; 4];
    // If the supervisor exited before the call above, the VM receives no answer.
    if link
        .write_all(&[BOUND])
        .and_then(|()| link.read_exact(&mut vm))
        .is_err()
    {
        exit_process(EXIT_UNCONFINED);
    }
    let vm = u32::from_ne_bytes(vm);
    if vm == 0 {
        return Err(PidNamespaceError::Unconfined);
    }
    let _ = HOST_IDS.set(HostIds {
        vm,
        supervisor,
        of_a_user,
    });
    Ok(SupervisorLink(link))
}

/// Returns the signal set that contains `signals`.
fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initializes the set, and sigaddset changes the initialized set.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        set.assume_init()
    }
}

/// Blocks or unblocks `signals` in the calling thread.
fn change_mask(how: libc::c_int, signals: &[libc::c_int]) -> io::Result<()> {
    // SAFETY: the set is live, and the old mask may be null.
    match unsafe { libc::pthread_sigmask(how, &signal_set(signals), ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Opens a descriptor that receives the blocked signals.
fn signal_descriptor() -> io::Result<OwnedFd> {
    let set = signal_set(&[&FORWARDED[..], &HANDLED].concat());
    // SAFETY: the set is live.
    let fd = unsafe { libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the descriptor is open and not owned elsewhere.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the next pending signal.
fn next_signal(signals: &OwnedFd) -> Option<libc::c_int> {
    // SAFETY: a zeroed signalfd_siginfo is valid.
    let mut info: libc::signalfd_siginfo = unsafe { zeroed() };
    let size = size_of::<libc::signalfd_siginfo>();
    // SAFETY: the buffer is live and has `size` bytes, any of which are valid.
    let count = unsafe { libc::read(signals.as_raw_fd(), (&raw mut info).cast(), size) };
    (usize::try_from(count) == Ok(size)).then_some(info.ssi_signo.cast_signed())
}

/// Waits until a signal or a report from the VM arrives.
fn wait_readable(signals: &OwnedFd, link: Option<&UnixStream>) -> io::Result<()> {
    // poll(2) ignores a negative descriptor.
    let mut fds = [signals.as_raw_fd(), link.map_or(-1, AsRawFd::as_raw_fd)].map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: the array is live and has two elements.
    if unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) } < 0 {
        let e = io::Error::last_os_error();
        return if e.kind() == io::ErrorKind::Interrupted {
            Ok(())
        } else {
            Err(e)
        };
    }
    Ok(())
}

/// Reaps all children that have exited. Returns the status of process `vm` if it is among them.
fn reap(vm: libc::pid_t) -> Option<libc::c_int> {
    loop {
        let mut status = 0;
        // SAFETY: `status` is valid for writes during the call.
        match unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) } {
            ended if ended == vm => return Some(status),
            // No exited child is left, or `waitpid` failed.
            ended if ended <= 0 => return None,
            _ => {}
        }
    }
}

/// Sends a signal to the VM with a code that [`is_forwarded`] recognizes.
fn forward(vm: libc::pid_t, signal: libc::c_int) {
    // SAFETY: a zeroed siginfo_t is valid.
    let mut info: libc::siginfo_t = unsafe { zeroed() };
    info.si_signo = signal;
    info.si_code = SI_QUEUE;
    // SAFETY: the VM is a child that has not been reaped, so its ID is valid, and `info` is live.
    unsafe { libc::syscall(libc::SYS_rt_sigqueueinfo, vm, signal, &raw const info) };
}

fn send(pid: libc::pid_t, signal: libc::c_int) {
    // SAFETY: the call passes only integers. The process is this one, or a child that has not been
    // reaped, so its ID is valid.
    unsafe { libc::kill(pid, signal) };
}

/// Stops the VM and this process until SIGCONT arrives, as the default action of SIGTSTP would do.
fn stop_with(vm: libc::pid_t) {
    send(vm, libc::SIGSTOP);
    send(own_pid(), libc::SIGTSTP);
    // The process stops here, unless its process group is orphaned.
    let _ = change_mask(libc::SIG_UNBLOCK, &[libc::SIGTSTP]);
    let _ = change_mask(libc::SIG_BLOCK, &[libc::SIGTSTP]);
    send(vm, libc::SIGCONT);
}

/// Terminal of the shell job to which this process belongs.
struct Terminal {
    fd: OwnedFd,
    /// Process group of the shell job.
    job: libc::pid_t,
}

impl Terminal {
    /// Returns the terminal at standard input, or `None` if it does not control this process.
    fn of_job() -> Option<Self> {
        let fd = io::stdin().as_fd().try_clone_to_owned().ok()?;
        // SAFETY: the calls pass a descriptor or no arguments.
        let (job, controls) = unsafe { (libc::getpgrp(), libc::tcgetpgrp(fd.as_raw_fd()) > 0) };
        controls.then_some(Self { fd, job })
    }

    /// Makes the VM's process group the foreground group of the terminal, if the shell job is in
    /// the foreground.
    fn hand_over(&self, vm: libc::pid_t) {
        self.change(self.job, vm);
    }

    /// Makes the shell job the foreground group of the terminal again, if the VM's process group is
    /// in the foreground.
    fn take_back(&self, vm: libc::pid_t) {
        self.change(vm, self.job);
    }

    fn change(&self, from: libc::pid_t, to: libc::pid_t) {
        let fd = self.fd.as_raw_fd();
        // SAFETY: the calls pass only a descriptor and an integer. SIGTTOU, which the second call
        // may cause, is ignored.
        unsafe {
            if libc::tcgetpgrp(fd) == from {
                libc::tcsetpgrp(fd, to);
            }
        }
    }
}

/// Terminates this process in the same way as the process with this `wait(2)` status.
fn end_like(status: libc::c_int) -> ! {
    if !libc::WIFSIGNALED(status) {
        exit_process(libc::WEXITSTATUS(status));
    }
    let signal = libc::WTERMSIG(status);
    // SAFETY: the call passes only integers, and the default action runs no code of this process.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    send(own_pid(), signal);
    let _ = change_mask(libc::SIG_UNBLOCK, &[signal]);
    exit_process(128 + signal)
}

fn own_pid() -> libc::pid_t {
    std::process::id().cast_signed()
}
