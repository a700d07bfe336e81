//! Application of seccomp filters, and the starter thread, which creates all other threads of a
//! confined process.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};

use seccompiler::{BpfProgram, SeccompAction, apply_filter};

use crate::kind::{PerfEventAccess, SandboxedThreadKind};
use crate::violation::{self, SeccompTerminationActions, SignalSafeLine};
use crate::{files, filter, lists};

/// Stack size of the starter thread, in bytes.
const STARTER_STACK_BYTES: usize = 128 << 10;

/// Seccomp mode: the action for a system call that is not on the thread's list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SeccompMode {
    /// Terminate the VM if a thread makes a call that is not on its list.
    #[default]
    On,
    /// Log the call in the kernel log (dmesg, audit type 1326) and execute it.
    Log,
    /// Install no seccomp filters.
    Off,
}

/// Error returned for an unknown seccomp mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be on, log or off")]
pub struct ParseSeccompModeError;

impl fmt::Display for SeccompMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::On => "on",
            Self::Log => "log",
            Self::Off => "off",
        })
    }
}

impl FromStr for SeccompMode {
    type Err = ParseSeccompModeError;

    fn from_str(word: &str) -> Result<Self, ParseSeccompModeError> {
        match word {
            "on" => Ok(Self::On),
            "log" => Ok(Self::Log),
            "off" => Ok(Self::Off),
            _ => Err(ParseSeccompModeError),
        }
    }
}

/// Error returned when the sandbox cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The kernel does not support seccomp filters.
    #[error(
        "this kernel does not support seccomp filters (CONFIG_SECCOMP_FILTER, Linux 4.14); use \
        --seccomp off"
    )]
    NoFilters,
    /// A system call list could not be compiled to a filter.
    #[error("the filter of {0} threads")]
    Compile(SandboxedThreadKind, #[source] seccompiler::BackendError),
    /// The kernel rejected a filter.
    #[error("the kernel rejected the filter of {0} threads")]
    Apply(SandboxedThreadKind, #[source] seccompiler::Error),
    /// The SIGSYS handler could not be installed.
    #[error("sigaction(SIGSYS) failed")]
    Signal(#[source] io::Error),
    /// The starter thread could not be created.
    #[error("cannot start the thread that starts others")]
    Starter(#[source] io::Error),
}

type Start = Box<dyn FnOnce() + Send>;

/// A request to start a thread, with the channel for its handle.
struct ThreadRequest {
    builder: Builder,
    run: Start,
    reply: Sender<io::Result<JoinHandle<()>>>,
}

/// Seccomp filters of one thread kind.
struct KindFilters {
    /// Filter that makes certain calls fail with an error; `None` in a mode in which all calls are
    /// executed.
    refuse: Option<BpfProgram>,
    /// Filter with the allow-list, which includes the calls that the filter `refuse` makes fail.
    allow: BpfProgram,
}

struct Sandbox {
    /// Seccomp filters in the order of [`SandboxedThreadKind::ALL`].
    programs: Vec<KindFilters>,
    without_clone3: BpfProgram,
    /// Channel to the starter thread, set once it exists.
    starter: OnceLock<Mutex<Sender<ThreadRequest>>>,
}

/// Sandbox of this process, which is unset if there are no filters.
static SANDBOX: OnceLock<Sandbox> = OnceLock::new();

/// Compiles the filters. [`enter`] and [`confine`] apply them later. A violation of a filter
/// terminates the process as specified by `will`. `counting` determines which threads may open perf
/// events. Call this once, before the first thread enters the sandbox.
///
/// # Errors
/// Returns a [`SandboxError`] if the kernel does not support filters, a list cannot be compiled, or
/// the signal handler cannot be installed.
pub fn begin(
    mode: SeccompMode,
    counting: PerfEventAccess,
    will: SeccompTerminationActions,
) -> Result<(), SandboxError> {
    let otherwise = match mode {
        SeccompMode::Off => return Ok(()),
        SeccompMode::On => SeccompAction::Trap,
        SeccompMode::Log => SeccompAction::Log,
    };
    if !violation::has_action(otherwise.clone().into()) {
        return Err(SandboxError::NoFilters);
    }
    violation::watch(will).map_err(SandboxError::Signal)?;
    let pid = std::process::id();
    let program = |kind| {
        let mut list = lists::of(kind, pid, counting);
        let refused = (mode == SeccompMode::On).then(|| lists::denied_calls(kind));
        // The allow-list must also contain the refused calls: if two filters match, the kernel
        // applies the more restrictive action.
        list.extend(refused.clone().unwrap_or_default());
        let allow = filter::compile(&list, otherwise.clone());
        let refuse = refused.map(|list| filter::refuse(&list)).transpose();
        refuse
            .and_then(|refuse| {
                Ok(KindFilters {
                    refuse,
                    allow: allow?,
                })
            })
            .map_err(|e| SandboxError::Compile(kind, e))
    };
    let programs = SandboxedThreadKind::ALL
        .into_iter()
        .map(program)
        .collect::<Result<_, _>>()?;
    let without_clone3 =
        filter::without_clone3().map_err(|e| SandboxError::Compile(SandboxedThreadKind::Starter, e))?;
    let _ = SANDBOX.set(Sandbox {
        programs,
        without_clone3,
        starter: OnceLock::new(),
    });
    Ok(())
}

impl Sandbox {
    fn apply(&self, kind: SandboxedThreadKind) -> Result<(), SandboxError> {
        violation::set_thread_kind(kind);
        let program = SandboxedThreadKind::ALL.into_iter().zip(&self.programs);
        program
            .filter(|(of, _)| *of == kind)
            .try_for_each(|(_, program)| {
                program
                    .refuse
                    .as_ref()
                    .map_or(Ok(()), |refuse| apply_filter(refuse))?;
                apply_filter(&program.allow)
            })
            .map_err(|e| SandboxError::Apply(kind, e))
    }
}

/// Applies the filter of `kind` to the calling thread, if the process has a sandbox. Terminates the
/// process if the thread cannot be confined, because the thread must not run with excess
/// privileges.
pub fn enter(kind: SandboxedThreadKind) {
    violation::set_thread_kind(kind);
    // Apply landlock rules first, because the filter does not allow the required calls.
    if let Err(e) = files::enter(kind) {
        not_confined(&e);
    }
    let Some(sandbox) = SANDBOX.get() else { return };
    if let Err(e) = sandbox.apply(kind) {
        not_confined(&e);
    }
}

/// Returns whether [`confine`] has applied the filters of this process.
pub(crate) fn is_confined() -> bool {
    SANDBOX
        .get()
        .is_some_and(|sandbox| sandbox.starter.get().is_some())
}

fn not_confined(e: &dyn std::error::Error) {
    let mut line = SignalSafeLine::default();
    line.text("perfvisor: error: ");
    line.text(&format!(
        "{e}: {}",
        e.source().map_or_else(String::new, ToString::to_string)
    ));
    line.text("\n");
    violation::end(&line);
}

/// Applies the main thread's filter to the calling thread and creates the starter thread, which
/// creates all later threads. Other existing threads are unaffected and must call [`enter`]
/// themselves.
///
/// # Errors
/// Returns a [`SandboxError`] on failure, in which case the calling thread may be partially
/// confined.
pub fn confine() -> Result<(), SandboxError> {
    let Some(sandbox) = SANDBOX.get() else {
        return Ok(());
    };
    apply_filter(&sandbox.without_clone3)
        .map_err(|e| SandboxError::Apply(SandboxedThreadKind::Starter, e))?;
    sandbox.apply(SandboxedThreadKind::Starter)?;
    let (ask, asked) = channel::<ThreadRequest>();
    Builder::new()
        .name("starter".into())
        .stack_size(STARTER_STACK_BYTES)
        .spawn(move || {
            violation::set_thread_kind(SandboxedThreadKind::Starter);
            for ThreadRequest { builder, run, reply } in asked {
                // The requester may have given up, but the thread runs anyway.
                let _ = reply.send(builder.spawn(run));
            }
        })
        .map_err(SandboxError::Starter)?;
    let _ = sandbox.starter.set(Mutex::new(ask));
    sandbox.apply(SandboxedThreadKind::Main)
}

/// Starts a thread with the filter of `kind`.
///
/// # Errors
/// Returns the same errors as [`Builder::spawn`].
pub fn spawn(
    kind: SandboxedThreadKind,
    builder: Builder,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    spawn_prepared(kind, builder, || (), run)
}

/// Starts a thread like [`spawn`]. The new thread calls `prepare` before the filter of `kind` is
/// applied, so `prepare` may make the calls of any thread kind.
///
/// # Errors
/// Returns the same errors as [`Builder::spawn`].
pub fn spawn_prepared(
    kind: SandboxedThreadKind,
    builder: Builder,
    prepare: impl FnOnce() + Send + 'static,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let run = move || {
        // The thread still has the filter inherited from the starter.
        violation::set_thread_kind(SandboxedThreadKind::Starter);
        prepare();
        enter(kind);
        run();
    };
    let Some(starter) = SANDBOX.get().and_then(|sandbox| sandbox.starter.get()) else {
        return builder.spawn(run);
    };
    let (reply, replied) = channel();
    let gone = || io::Error::other("the thread that starts others has ended");
    let wanted = ThreadRequest {
        builder,
        run: Box::new(run),
        reply,
    };
    let asked = starter
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .send(wanted);
    asked.map_err(|_| gone())?;
    replied.recv().map_err(|_| gone())?
}
