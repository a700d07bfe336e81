//! Threads that serve the queues of virtio devices.

use std::any::Any;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::thread::JoinHandle;

use diagnostics::{error_line, guest_log};
use event_manager::{EventManager, EventOps, Events, MutEventSubscriber, SubscriberOps};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use sandbox::SandboxedThreadKind;
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::device::{ActivateError, DeviceFailureCallback};

/// A thread that serves a device's queues until the worker is stopped or dropped.
#[derive(Debug)]
pub struct DeviceWorker {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

/// Stack size of a worker thread, in bytes. Handlers need a few pages. The default of 2 MiB could
/// use a whole huge page per thread, on hosts with transparent huge pages.
const STACK_BYTES: usize = 256 << 10;

/// Host CPUs that worker threads may use. Worker threads do not inherit the affinity of their
/// creator, a vCPU thread that may be pinned to one CPU.
static CPUS: OnceLock<CpuSet> = OnceLock::new();

/// Stores the CPU affinity of the calling thread for all worker threads. Only the first call has an
/// effect.
pub fn record_worker_cpus() {
    if let Ok(cpus) = sched_getaffinity(Pid::from_raw(0)) {
        CPUS.get_or_init(|| cpus);
    }
}

struct StopEvent {
    fd: EventFd,
    came: bool,
}

impl MutEventSubscriber for StopEvent {
    fn process(&mut self, _: Events, _: &mut EventOps) {
        self.came = true;
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&self.fd, EventSet::IN)) {
            guest_log!(
                Error,
                "cannot stop the thread of a device: {}",
                error_line(&error)
            );
            self.came = true;
        }
    }
}

/// An event handler of the worker thread: for the stop event, or for the events of the device.
enum WorkerSubscriber<H> {
    StopEvent(StopEvent),
    Device(H),
}

impl<H: MutEventSubscriber> MutEventSubscriber for WorkerSubscriber<H> {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match self {
            WorkerSubscriber::StopEvent(stop) => stop.process(events, ops),
            WorkerSubscriber::Device(device) => device.process(events, ops),
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        match self {
            WorkerSubscriber::StopEvent(stop) => stop.init(ops),
            WorkerSubscriber::Device(device) => device.init(ops),
        }
    }
}

impl DeviceWorker {
    /// Starts a worker thread that runs an event loop for `handler`.
    ///
    /// `name` has at most 15 bytes. The handler's `init` registers its descriptors, and its
    /// `process` is called for each descriptor that is ready. If the thread ends before it is
    /// stopped, the worker logs one line and triggers `fatal_error_callback`.
    ///
    /// # Errors
    /// Returns [`ActivateError::Host`] if the host has run out of file descriptors or threads.
    pub fn spawn(
        kind: SandboxedThreadKind,
        name: &str,
        handler: impl MutEventSubscriber + Send + 'static,
        fatal_error_callback: DeviceFailureCallback,
    ) -> Result<Self, ActivateError> {
        let host = |source| ActivateError::Host {
            what: "starting a thread",
            source,
        };
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(host)?;
        let fd = stop.try_clone().map_err(host)?;
        let device = name.to_owned();
        let builder = std::thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK_BYTES);
        let thread = sandbox::spawn_prepared(kind, builder, reset_affinity, move || {
            // A panic here is a bug in the device.
            let why = match catch_unwind(AssertUnwindSafe(|| serve(fd, handler))) {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error_line(&error),
                Err(panic) => format!("it panicked: {}", panic_message(&*panic)),
            };
            log::error!("the thread of {device} exited, which terminates the VM: {why}");
            fatal_error_callback.take();
        })
        .map_err(host)?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Stops the worker thread and waits until it has ended. A request in progress is completed
    /// first.
    pub fn stop(&mut self) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        // The write fails only if the counter is full, in which case a stop is already pending.
        let _ = self.stop.write(1);
        if thread.join().is_err() {
            log::error!("the thread of a device panicked");
        }
    }
}

impl Drop for DeviceWorker {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Makes the event loop of the device `name` monitor `fds` for input.
pub(crate) fn watch_readable(ops: &mut EventOps, name: &str, fds: impl IntoIterator<Item = RawFd>) {
    for fd in fds {
        if let Err(error) = ops.add(Events::new_raw(fd, EventSet::IN)) {
            guest_log!(
                Error,
                "{name} cannot receive notifications: {}",
                error_line(&error)
            );
        }
    }
}

/// Sets the CPU affinity of the calling thread to [`CPUS`].
fn reset_affinity() {
    if let Some(cpus) = CPUS.get()
        && let Err(error) = sched_setaffinity(Pid::from_raw(0), cpus)
    {
        guest_log!(
            Warn,
            "the thread of a device remains pinned to the CPU of a vCPU: {}",
            error_line(&error)
        );
    }
}

/// Formats the payload of a panic as one line.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    let said = panic.downcast_ref::<&str>().copied();
    let said = said.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    said.unwrap_or("nothing").replace('\n', " ")
}

fn serve<H: MutEventSubscriber>(fd: EventFd, handler: H) -> Result<(), event_manager::Error> {
    let mut manager: EventManager<WorkerSubscriber<H>> = EventManager::new()?;
    let stop = manager.add_subscriber(WorkerSubscriber::StopEvent(StopEvent { fd, came: false }));
    manager.add_subscriber(WorkerSubscriber::Device(handler));
    loop {
        manager.run()?;
        if let WorkerSubscriber::StopEvent(StopEvent { came: true, .. }) = manager.subscriber_mut(stop)? {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// A worker started by a pinned thread may use all CPUs of the process.
    #[test]
    fn worker_uses_cpus_of_process() {
        struct Looks(std::sync::mpsc::Sender<CpuSet>);
        impl MutEventSubscriber for Looks {
            fn process(&mut self, _: Events, _: &mut EventOps) {}
            fn init(&mut self, _: &mut EventOps) {
                self.0.send(sched_getaffinity(Pid::from_raw(0)).unwrap()).unwrap();
            }
        }
        let all = sched_getaffinity(Pid::from_raw(0)).unwrap();
        record_worker_cpus();
        let first = (0..CpuSet::count())
            .find(|cpu| all.is_set(*cpu).unwrap())
            .unwrap();
        let seen = std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set(first).unwrap();
            sched_setaffinity(Pid::from_raw(0), &one).unwrap();
            let (sender, receiver) = std::sync::mpsc::channel();
            let _worker = DeviceWorker::spawn(
                SandboxedThreadKind::Device,
                "looks",
                Looks(sender),
                DeviceFailureCallback::default(),
            )
            .unwrap();
            receiver.recv().unwrap()
        });
        assert_eq!(seen.join().unwrap(), all);
    }

    struct Counts {
        kick: Arc<EventFd>,
        done: EventFd,
        kicks: Arc<AtomicU64>,
    }

    impl MutEventSubscriber for Counts {
        fn process(&mut self, _: Events, _: &mut EventOps) {
            self.kicks.fetch_add(self.kick.read().unwrap(), Ordering::Relaxed);
            self.done.write(1).unwrap();
        }

        fn init(&mut self, ops: &mut EventOps) {
            ops.add(Events::new(&*self.kick, EventSet::IN)).unwrap();
        }
    }

    #[test]
    fn worker_handles_kicks_until_stopped() {
        let kick = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let done = EventFd::new(0).unwrap();
        let kicks = Arc::new(AtomicU64::new(0));
        let mut worker = DeviceWorker::spawn(
            SandboxedThreadKind::Device,
            "counts",
            Counts {
                kick: kick.clone(),
                done: done.try_clone().unwrap(),
                kicks: kicks.clone(),
            },
            DeviceFailureCallback::default(),
        )
        .unwrap();
        kick.write(3).unwrap();
        done.read().unwrap();
        assert_eq!(kicks.load(Ordering::Relaxed), 3);
        worker.stop();
        kick.write(1).unwrap();
        worker.stop();
        assert_eq!((kicks.load(Ordering::Relaxed), kick.read().unwrap()), (3, 1));
    }

    /// A panic of the worker terminates the machine, because the guest would otherwise wait forever
    /// for a device without a thread.
    #[test]
    fn worker_panic_terminates_machine() {
        struct Panics(Arc<EventFd>);
        impl MutEventSubscriber for Panics {
            fn process(&mut self, _: Events, _: &mut EventOps) {
                panic!("as a test\nwants it");
            }
            fn init(&mut self, ops: &mut EventOps) {
                ops.add(Events::new(&*self.0, EventSet::IN)).unwrap();
            }
        }
        let kick = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        for panics in [false, true] {
            let (sender, receiver) = std::sync::mpsc::channel();
            let end = move || sender.send(()).unwrap();
            let fatal_error_callback = DeviceFailureCallback::new(Arc::new(end));
            let mut worker = DeviceWorker::spawn(
                SandboxedThreadKind::Device,
                "panics",
                Panics(kick.clone()),
                fatal_error_callback,
            )
            .unwrap();
            if panics {
                kick.write(1).unwrap();
                receiver.recv().unwrap();
            }
            worker.stop();
            assert!(receiver.try_recv().is_err(), "once, or never");
        }
        let said = catch_unwind(|| panic!("as a test\nwants {}", "it")).unwrap_err();
        assert_eq!(panic_message(&*said), "as a test wants it");
    }
}
