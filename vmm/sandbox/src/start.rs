//! How threads take their filters, and who starts them.

use std::fmt;
use std::io;
use std::str::FromStr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};

use seccompiler::{BpfProgram, SeccompAction, apply_filter};

use crate::kind::{Counting, ThreadKind};
use crate::violation::{self, LastWill, Line};
use crate::{files, filter, lists};

/// The starter's stack: it has little to do.
const STARTER_STACK_BYTES: usize = 128 << 10;

/// What is done with a system call that is on no list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// It ends the VM.
    #[default]
    On,
    /// The kernel's log gets it (dmesg, audit: type 1326), and the thread goes on.
    Log,
    /// There are no filters.
    Off,
}

/// No such mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be one of on, log, off")]
pub struct ModeError;

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::On => "on",
            Self::Log => "log",
            Self::Off => "off",
        })
    }
}

impl FromStr for Mode {
    type Err = ModeError;

    fn from_str(word: &str) -> Result<Self, ModeError> {
        match word {
            "on" => Ok(Self::On),
            "log" => Ok(Self::Log),
            "off" => Ok(Self::Off),
            _ => Err(ModeError),
        }
    }
}

/// There is no sandbox.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The kernel was built without filters, or is older than they are.
    #[error(
        "this kernel has no seccomp filters (CONFIG_SECCOMP_FILTER, Linux 4.14); --seccomp off runs without"
    )]
    NoFilters,
    /// A list is none that a filter can be made of.
    #[error("the filter of {0} threads")]
    Compile(ThreadKind, #[source] seccompiler::BackendError),
    /// The kernel does not take a filter.
    #[error("the kernel does not take the filter of {0} threads")]
    Apply(ThreadKind, #[source] seccompiler::Error),
    /// No handler for the signal of filters.
    #[error("sigaction(SIGSYS) failed")]
    Signal(#[source] io::Error),
    /// The thread that starts the others is missing.
    #[error("no thread to start others")]
    Starter(#[source] io::Error),
}

type Start = Box<dyn FnOnce() + Send>;

/// A thread that somebody wants, and where its handle goes.
struct Wanted {
    builder: Builder,
    run: Start,
    reply: Sender<io::Result<JoinHandle<()>>>,
}

/// The filters of one kind of threads.
struct Programs {
    /// What of it is refused with an error; none where all passes.
    refuse: Option<BpfProgram>,
    /// What it may do, and what is refused.
    allow: BpfProgram,
}

struct Sandbox {
    /// In the order of [`ThreadKind::ALL`].
    programs: Vec<Programs>,
    without_clone3: BpfProgram,
    /// Once there is a starter.
    starter: OnceLock<Mutex<Sender<Wanted>>>,
}

/// Of this process; unset: there is none.
static SANDBOX: OnceLock<Sandbox> = OnceLock::new();

/// Makes the filters. From now on [`enter`] and [`confine`] apply them, and a thread that asks for
/// what it may not ends the process by `will`. `counting` says which threads open perf events. To
/// be called once, before there are threads.
///
/// # Errors
/// [`SandboxError`].
pub fn begin(mode: Mode, counting: Counting, will: LastWill) -> Result<(), SandboxError> {
    let otherwise = match mode {
        Mode::Off => return Ok(()),
        Mode::On => SeccompAction::Trap,
        Mode::Log => SeccompAction::Log,
    };
    if !violation::has_action(otherwise.clone().into()) {
        return Err(SandboxError::NoFilters);
    }
    violation::watch(will).map_err(SandboxError::Signal)?;
    let pid = std::process::id();
    let program = |kind| {
        let mut list = lists::of(kind, pid, counting);
        let refused = (mode == Mode::On).then(|| lists::refused(kind));
        // Of the answers of two filters the kernel takes the harder one.
        list.extend(refused.clone().unwrap_or_default());
        let allow = filter::compile(&list, otherwise.clone());
        let refuse = refused.map(|list| filter::refuse(&list)).transpose();
        refuse
            .and_then(|refuse| {
                Ok(Programs {
                    refuse,
                    allow: allow?,
                })
            })
            .map_err(|e| SandboxError::Compile(kind, e))
    };
    let programs = ThreadKind::ALL
        .into_iter()
        .map(program)
        .collect::<Result<_, _>>()?;
    let without_clone3 =
        filter::without_clone3().map_err(|e| SandboxError::Compile(ThreadKind::Starter, e))?;
    let _ = SANDBOX.set(Sandbox {
        programs,
        without_clone3,
        starter: OnceLock::new(),
    });
    Ok(())
}

impl Sandbox {
    fn apply(&self, kind: ThreadKind) -> Result<(), SandboxError> {
        violation::is_of(kind);
        let program = ThreadKind::ALL.into_iter().zip(&self.programs);
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

/// The calling thread may do from now on what threads of `kind` may, if the process has a sandbox. A thread
/// that cannot be confined ends the process: it is not to run with more rights than it was to have.
pub fn enter(kind: ThreadKind) {
    violation::is_of(kind);
    // Before the filter, which knows nothing of landlock.
    if let Err(e) = files::enter(kind) {
        not_confined(&e);
    }
    let Some(sandbox) = SANDBOX.get() else { return };
    if let Err(e) = sandbox.apply(kind) {
        not_confined(&e);
    }
}

/// Whether [`confine`] has put the filters of this process in force.
pub(crate) fn is_confined() -> bool {
    SANDBOX
        .get()
        .is_some_and(|sandbox| sandbox.starter.get().is_some())
}

fn not_confined(e: &dyn std::error::Error) {
    let mut line = Line::default();
    line.text("perfvisor: error: ");
    line.text(&format!(
        "{e}: {}",
        e.source().map_or_else(String::new, ToString::to_string)
    ));
    line.text("\n");
    violation::end(&line);
}

/// Confines the calling thread as the main one, and has a thread of its own start all others from now on.
/// Threads that are there keep what they have: they call [`enter`].
///
/// # Errors
/// [`SandboxError`]; the calling thread may be confined in part.
pub fn confine() -> Result<(), SandboxError> {
    let Some(sandbox) = SANDBOX.get() else {
        return Ok(());
    };
    apply_filter(&sandbox.without_clone3).map_err(|e| SandboxError::Apply(ThreadKind::Starter, e))?;
    sandbox.apply(ThreadKind::Starter)?;
    let (ask, asked) = channel::<Wanted>();
    Builder::new()
        .name("starter".into())
        .stack_size(STARTER_STACK_BYTES)
        .spawn(move || {
            violation::is_of(ThreadKind::Starter);
            for Wanted { builder, run, reply } in asked {
                // Who asked may be gone; the thread runs all the same.
                let _ = reply.send(builder.spawn(run));
            }
        })
        .map_err(SandboxError::Starter)?;
    let _ = sandbox.starter.set(Mutex::new(ask));
    sandbox.apply(ThreadKind::Main)
}

/// Starts a thread that does what threads of `kind` may.
///
/// # Errors
/// As [`Builder::spawn`].
pub fn spawn(
    kind: ThreadKind,
    builder: Builder,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    spawn_prepared(kind, builder, || (), run)
}

/// As [`spawn`], for a thread that first does what the threads of its kind may not do later: what `prepare`
/// does, and that may be what the threads of any kind may.
///
/// # Errors
/// As [`Builder::spawn`].
pub fn spawn_prepared(
    kind: ThreadKind,
    builder: Builder,
    prepare: impl FnOnce() + Send + 'static,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let run = move || {
        // The filter that it has so far is the starter's.
        violation::is_of(ThreadKind::Starter);
        prepare();
        enter(kind);
        run();
    };
    let Some(starter) = SANDBOX.get().and_then(|sandbox| sandbox.starter.get()) else {
        return builder.spawn(run);
    };
    let (reply, replied) = channel();
    let gone = || io::Error::other("the thread that starts others has ended");
    let wanted = Wanted {
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
