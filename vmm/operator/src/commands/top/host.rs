//! The VMs that `perfvisor top` observes. Each VM has a thread, because an unresponsive VM must not
//! delay the others.

use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::args::TopArgs;
use super::collect::{CollectResult, Collector};
use super::rows::{ObservedVmState, TopVmData, TopVmEntry};
use crate::commands::ps::{self, VmSocket};
use crate::commands::select::name_or_pid;
use crate::commands::{OperatorCommandError, connect};
use control_api::client::{Client, ClientError, REPLY_TIMEOUT};
use perf_core::error_line;

/// Interval between searches for new VMs.
const DISCOVERY_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum number of observed VMs.
const MAX_VMS: usize = 512;

/// Message from the observer thread of a VM.
enum WatchEvent {
    Screen(Box<TopVmData>),
    Gone,
    Failed(OperatorCommandError),
}

/// A VM that an observer thread watches. The thread ends when `forget` is dropped.
struct WatchedVm {
    vm: TopVmEntry,
    forget: Sender<()>,
    /// Number of the VM's current observer thread. Messages with other numbers come from former
    /// threads and are ignored.
    number: u64,
    alive: bool,
}

/// All observed VMs.
pub(super) struct ObservedVms {
    args: TopArgs,
    watched: Vec<WatchedVm>,
    tell: Sender<(u64, WatchEvent)>,
    told: Receiver<(u64, WatchEvent)>,
    stop: Arc<AtomicBool>,
    next_number: u64,
    looked: Instant,
}

/// A change in the observed VMs that the caller must display.
#[derive(Debug)]
pub(super) enum DisplayUpdate {
    /// The displayed data has changed.
    Changed,
    /// The only VM has terminated.
    Ended,
}

impl ObservedVms {
    /// Starts observing the VM specified by the user, or all VMs.
    ///
    /// # Errors
    /// Returns an error if there is no VM.
    pub(super) fn begin(args: &TopArgs) -> Result<Self, OperatorCommandError> {
        let mut host = Self::of_nobody(args);
        if args.all {
            let found = ps::all_users();
            if found.is_empty() {
                return Err(ClientError::Which(Vec::new()).into());
            }
            for vm in found {
                host.watch_found(vm);
            }
        } else {
            let name = name_or_pid(args.name.as_deref(), args.pid);
            let client = connect(name.as_deref(), args.socket.as_deref())?;
            let label = client.info().name.clone();
            host.watch(label, move || Ok(client));
        }
        Ok(host)
    }

    fn of_nobody(args: &TopArgs) -> Self {
        let (tell, told) = channel();
        Self {
            args: args.clone(),
            watched: Vec::new(),
            tell,
            told,
            stop: Arc::default(),
            next_number: 0,
            looked: Instant::now(),
        }
    }

    fn watch_found(&mut self, vm: VmSocket) {
        let label = vm.label();
        if self.watched.len() >= MAX_VMS {
            return;
        }
        self.watch(label, move || {
            Client::connect_at(&vm.path, vm.owner, REPLY_TIMEOUT)
        });
    }

    fn watch(&mut self, label: String, come: impl FnOnce() -> Result<Client, ClientError> + Send + 'static) {
        let number = self.next_number;
        self.next_number += 1;
        let (forget, forgotten) = channel();
        let (args, stop, tell) = (self.args.clone(), self.stop.clone(), self.tell.clone());
        let work = move || {
            let looks = || {
                observe(come, &args, &stop, &forgotten, |seen| {
                    tell.send((number, WatchEvent::Screen(seen))).is_ok()
                })
            };
            // Ignore the error if the receiver has been dropped.
            let _ = tell.send((number, run_observer(looks)));
        };
        let (seen, alive) = match thread::Builder::new().name("vm".into()).spawn(work) {
            Ok(_) => (ObservedVmState::Waiting, true),
            Err(e) => (ObservedVmState::Failed(format!("no thread for it: {e}")), false),
        };
        let new = WatchedVm {
            vm: TopVmEntry { label, state: seen },
            forget,
            number,
            alive,
        };
        match self.watched.iter().position(|w| w.vm.label == new.vm.label) {
            Some(there) => self.watched[there] = new,
            None => self.watched.push(new),
        }
    }

    /// Returns the last observed states of the VMs.
    pub(super) fn vms(&self) -> Vec<TopVmEntry> {
        self.watched.iter().map(|w| w.vm.clone()).collect()
    }

    /// Returns whether every VM has reported its first state.
    pub(super) fn all_reported(&self) -> bool {
        !self
            .watched
            .iter()
            .any(|w| matches!(w.vm.state, ObservedVmState::Waiting))
    }

    /// Discards the samples of all VMs.
    pub(super) fn clear_samples(&self) {
        for watched in &self.watched {
            // Ignore the error if the thread has ended.
            let _ = watched.forget.send(());
        }
    }

    /// Waits up to `patience` for a message from an observer thread.
    ///
    /// # Errors
    /// Returns an error if the only VM cannot be observed.
    pub(super) fn news(&mut self, patience: Duration) -> Result<Option<DisplayUpdate>, OperatorCommandError> {
        let (number, came) = match self.told.recv_timeout(patience) {
            Ok(came) => came,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(None),
        };
        let only = !self.args.all;
        let Some(watched) = self.watched.iter_mut().find(|w| w.number == number) else {
            return Ok(None);
        };
        watched.vm.state = match came {
            WatchEvent::Screen(seen) => ObservedVmState::Shown(seen),
            WatchEvent::Gone if only => return Ok(Some(DisplayUpdate::Ended)),
            WatchEvent::Failed(e) if only => return Err(e),
            WatchEvent::Gone => {
                watched.alive = false;
                ObservedVmState::Ended
            }
            WatchEvent::Failed(e) => {
                watched.alive = false;
                ObservedVmState::Failed(error_line(&e))
            }
        };
        Ok(Some(DisplayUpdate::Changed))
    }

    /// Adds new VMs and removes VMs that have terminated.
    pub(super) fn refresh_vms(&mut self) -> bool {
        if !self.args.all || self.looked.elapsed() < DISCOVERY_INTERVAL {
            return false;
        }
        self.looked = Instant::now();
        let found = ps::everywhere_quietly();
        let before = self.watched.len();
        self.watched
            .retain(|w| w.alive || found.iter().any(|vm| vm.label() == w.vm.label));
        let mut changed = self.watched.len() != before;
        for vm in found {
            let there = self.watched.iter().any(|w| w.vm.label == vm.label() && w.alive);
            if !there {
                self.watch_found(vm);
                changed = true;
            }
        }
        changed
    }
}

impl Drop for ObservedVms {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

thread_local! {
    /// Panic message of the current observer thread.
    static PANICKED: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs `looks`, which observes a VM until the VM terminates. A panic in `looks` is reported as a
/// failure of this VM. Otherwise, the VM would show its last state forever, and the first screen
/// would wait for the VM.
fn run_observer(looks: impl FnOnce() -> Result<(), OperatorCommandError>) -> WatchEvent {
    PANICKED.set(Some(String::new()));
    match panic::catch_unwind(AssertUnwindSafe(looks)) {
        Ok(Ok(())) => WatchEvent::Gone,
        Ok(Err(e)) => WatchEvent::Failed(e),
        Err(_) => WatchEvent::Failed(OperatorCommandError::Panicked(
            PANICKED.take().unwrap_or_default(),
        )),
    }
}

/// Installs a panic hook that stores the panic messages of observer threads for display, without
/// touching the terminal. Must be called after [`ratatui`] has installed its panic hook, which
/// restores the terminal.
pub(super) fn install_observer_panic_hook() {
    let others = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let of_vm = PANICKED.with_borrow_mut(|panicked| match panicked {
            Some(said) => {
                let place = info.location().map(ToString::to_string).unwrap_or_default();
                *said = format!("at {place}: {}", info.payload_as_str().unwrap_or("nothing"));
                true
            }
            None => false,
        });
        if !of_vm {
            others(info);
        }
    }));
}

/// Observes a VM periodically until it terminates or the receiver of `tell` is dropped.
fn observe(
    come: impl FnOnce() -> Result<Client, ClientError>,
    args: &TopArgs,
    stop: &AtomicBool,
    forgotten: &Receiver<()>,
    tell: impl Fn(Box<TopVmData>) -> bool,
) -> Result<(), OperatorCommandError> {
    let mut collector = Collector::open(come()?, args, stop)?;
    let mut next = Instant::now() + args.delay;
    loop {
        match forgotten.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(()) => collector.reset(),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => match collector.take(Instant::now())? {
                // With `--all`, do not follow the VM, because its destination process is found as
                // another VM.
                CollectResult::Gone if args.all || !collector.follow(args, stop)? => return Ok(()),
                CollectResult::Gone => next = Instant::now() + args.delay,
                CollectResult::Screen(seen) => {
                    if !tell(seen) {
                        return Ok(());
                    }
                    next = Instant::now() + args.delay;
                }
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Top {
        #[command(flatten)]
        args: TopArgs,
    }

    /// A panic in the thread of a VM is displayed as its failure, and does not delay other VMs.
    #[test]
    fn observer_panic_is_shown_in_vm_row() {
        install_observer_panic_hook();
        let mut host = ObservedVms::of_nobody(&Top::parse_from(["top", "--all"]).args);
        host.watch("odd".into(), || panic!("a VM that nobody thought of"));
        // Time limit that only a failing test reaches.
        let news = host.news(Duration::from_secs(300));
        assert!(matches!(news, Ok(Some(DisplayUpdate::Changed))), "{news:?}");
        match &host.vms()[0].state {
            ObservedVmState::Failed(why) => assert!(why.contains("a VM that nobody thought of"), "{why}"),
            other => panic!("{other:?}"),
        }
        assert!(host.all_reported());
        assert!(!host.watched[0].alive);
    }
}
