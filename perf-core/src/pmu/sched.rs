//! The `sched` driver: the time for which a vCPU's thread was runnable but waited for a host CPU.
//!
//! The host scheduler accounts for this time for each thread in `schedstat`, in nanoseconds (Linux,
//! Documentation/scheduler/sched-stats.rst: time on a CPU, time waiting on a run queue, time
//! slices). The only event has `config` 0. It has no guest privilege level and never overflows. The
//! kernel adds each wait when the wait ends, so the current wait of a thread is not included.
//!
//! A vCPU's thread opens its own `schedstat` at start ([`RunQueueWaitTime::of_this_thread`]) and
//! other threads share that file, because threads of a running VM may not open files.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::attr::{Attr, EventType};
#[cfg(feature = "host")]
use crate::pmu::host::fd::current_tid as own_tid;
use crate::pmu::spans::Spans;
use crate::pmu::{Pmu, PmuCounterCapacity, PmuError, PmuEvent, PmuEventTarget};

/// Value of `config` for the time that the thread waits for a host CPU, in nanoseconds.
pub const WAIT_NS: u64 = 0;

/// `schedstat` files that threads have opened for themselves, by thread ID. The entry of a thread
/// is removed when the thread ends.
static OPENED: Mutex<BTreeMap<i32, OpenResult>> = Mutex::new(BTreeMap::new());

thread_local!(static OWN: OnceCell<ThreadFile> = const { OnceCell::new() });

/// An open `schedstat` file, or the error number with which the open failed.
type OpenResult = Result<Arc<File>, i32>;

/// The thread-local owner of an entry in [`OPENED`], which removes the entry when the thread ends.
struct ThreadFile {
    tid: i32,
    opened: OpenResult,
}

impl Drop for ThreadFile {
    fn drop(&mut self) {
        open_results().remove(&self.tid);
    }
}

fn open_results() -> MutexGuard<'static, BTreeMap<i32, OpenResult>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the calling thread's ID from the link `/proc/thread-self`, or 0 if `/proc` is not
/// mounted. Only used in builds without the host driver.
#[cfg(not(feature = "host"))]
fn own_tid() -> i32 {
    let link = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    let tid = link.file_name().and_then(|name| name.to_str()?.parse().ok());
    tid.unwrap_or(0)
}

/// Opens the `schedstat` file at `path`.
fn open(path: &str) -> OpenResult {
    let opened = File::open(path).map(Arc::new);
    opened.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO))
}

/// A reader of the time for which one thread of this process waits for a host CPU.
#[derive(Debug)]
pub struct RunQueueWaitTime {
    file: Arc<File>,
}

impl RunQueueWaitTime {
    /// Creates a reader for thread `tid`. Uses the file that the thread has opened with
    /// [`RunQueueWaitTime::of_this_thread`], if there is one.
    ///
    /// # Errors
    /// Returns the error of opening `schedstat`, which is `ENOENT` if the host does not account for
    /// waiting time.
    pub fn of_thread(tid: i32) -> io::Result<Self> {
        let opened = open_results().get(&tid).cloned();
        Self::on(opened.unwrap_or_else(|| open(&format!("/proc/self/task/{tid}/schedstat"))))
    }

    fn on(opened: OpenResult) -> io::Result<Self> {
        let file = opened.map_err(io::Error::from_raw_os_error)?;
        Ok(Self { file })
    }

    /// Creates a reader for the calling thread. Opens the thread's `schedstat` file, unless the
    /// thread has already opened it.
    ///
    /// # Errors
    /// Returns the same errors as [`RunQueueWaitTime::of_thread`].
    pub fn of_this_thread() -> io::Result<Self> {
        OWN.with(|own| {
            let own = own.get_or_init(|| {
                let tid = own_tid();
                // Fallback for a jail whose /proc lacks the thread-self link.
                let opened = open("/proc/thread-self/schedstat")
                    .or_else(|_| open(&format!("/proc/self/task/{tid}/schedstat")));
                open_results().insert(tid, opened.clone());
                ThreadFile { tid, opened }
            });
            Self::on(own.opened.clone())
        })
    }

    /// Returns the time for which the thread has waited for a CPU since it started, in nanoseconds,
    /// or `None` if the thread has ended. Takes one `pread(2)`.
    #[must_use]
    pub fn read_ns(&self) -> Option<u64> {
        let mut text = [0u8; 80];
        let len = self.file.read_at(&mut text, 0).ok()?;
        parse(text.get(..len)?)
    }
}

fn parse(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The `sched` driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct RunQueueWaitPmu;

impl Pmu for RunQueueWaitPmu {
    fn name(&self) -> &'static str {
        "sched"
    }

    fn supports_type(&self, ty: EventType) -> bool {
        ty == EventType::SCHED
    }

    fn capacity(&self) -> PmuCounterCapacity {
        PmuCounterCapacity::Unlimited
    }

    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        if attr.config != WAIT_NS {
            return Err(PmuError::NoSuchEvent);
        }
        if attr.exclude_user || attr.exclude_kernel {
            return Err(PmuError::Unsupported("waiting for a CPU has no privilege level"));
        }
        if attr.sample_period != 0 {
            return Err(NO_OVERFLOW);
        }
        let PmuEventTarget::Vcpu { tid, .. } = target else {
            return Err(PmuError::Unsupported("a wait is that of one vCPU"));
        };
        let time = RunQueueWaitTime::of_thread(tid).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => PmuError::NoSuchEvent,
            _ => PmuError::Os {
                what: "opening the thread's schedstat",
                source,
            },
        })?;
        Ok(Box::new(WaitEvent {
            time,
            spans: Spans::default(),
        }))
    }
}

const NO_OVERFLOW: PmuError = PmuError::Unsupported("waiting times do not overflow");

/// An event that counts the waiting time of a thread while the event is started.
#[derive(Debug)]
struct WaitEvent {
    time: RunQueueWaitTime,
    spans: Spans,
}

impl PmuEvent for WaitEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        if overflow_in.is_some() {
            return Err(NO_OVERFLOW);
        }
        self.spans.begin(|| {
            self.time.read_ns().ok_or_else(|| PmuError::Os {
                what: "reading the thread's schedstat",
                source: io::Error::from_raw_os_error(libc::ESRCH),
            })
        })
    }

    fn stop(&mut self) {
        self.spans.end(|| self.time.read_ns());
    }

    fn read(&mut self) -> u64 {
        // Reading the file of an ended thread fails, so the count then stays the same.
        self.spans.count(|| self.time.read_ns())
    }

    fn arm(&mut self, _overflow_in: u64) -> Result<(), PmuError> {
        Err(NO_OVERFLOW)
    }

    fn take_overflows(&mut self) -> u32 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmu::VcpuId;

    fn this_thread() -> PmuEventTarget {
        PmuEventTarget::Vcpu {
            vcpu: VcpuId(0),
            tid: own_tid(),
        }
    }

    #[test]
    fn schedstat_second_field_is_wait_time() {
        assert_eq!(parse(b"123 456 7\n"), Some(456));
        for bad in [&b""[..], b"1", b"1 x 2", b"1 -2 3", b"\xff \xff"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }

    /// An event counts the waiting time of its own thread only, and only while the event is active.
    #[test]
    fn waits_count_while_the_event_is_on() {
        let mut event = RunQueueWaitPmu
            .open(&Attr::counting(EventType::SCHED, WAIT_NS), this_thread())
            .unwrap();
        let own = RunQueueWaitTime::of_this_thread().unwrap();
        assert_eq!(event.read(), 0);
        let before = own.read_ns().unwrap();
        event.start(None).unwrap();
        // Yielding the CPU makes the thread wait for it, if only briefly.
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        let first = event.read();
        event.stop();
        let after = own.read_ns().unwrap();
        assert!(first <= after - before, "{first} of {}", after - before);
        let stopped = event.read();
        assert!(stopped >= first);
        std::thread::yield_now();
        assert_eq!(event.read(), stopped);
    }

    /// Threads of a running VM cannot open files, so an event on a thread shares the file that this
    /// thread opened. The file is closed when the thread ends.
    #[test]
    fn thread_shares_its_schedstat_file_until_exit() {
        let (tid, kept) = std::thread::spawn(|| {
            let own = RunQueueWaitTime::of_this_thread().unwrap();
            let again = RunQueueWaitTime::of_this_thread().unwrap();
            let tid = own_tid();
            let others = std::thread::spawn(move || RunQueueWaitTime::of_thread(tid).unwrap());
            let others = others.join().unwrap();
            assert!(Arc::ptr_eq(&own.file, &again.file) && Arc::ptr_eq(&own.file, &others.file));
            (tid, Arc::downgrade(&own.file))
        })
        .join()
        .unwrap();
        assert!(kept.upgrade().is_none());
        let gone = RunQueueWaitTime::of_thread(tid).err().unwrap();
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn unsupported_attributes_are_rejected() {
        let attr = Attr::counting(EventType::SCHED, WAIT_NS);
        let refused = |attr: Attr, target| RunQueueWaitPmu.open(&attr, target).err().unwrap();
        assert!(matches!(
            refused(
                Attr {
                    config: 1,
                    ..attr.clone()
                },
                this_thread()
            ),
            PmuError::NoSuchEvent
        ));
        for attr in [
            Attr {
                exclude_user: true,
                ..attr.clone()
            },
            Attr {
                exclude_kernel: true,
                ..attr.clone()
            },
            Attr {
                sample_period: 5,
                ..attr.clone()
            },
        ] {
            assert!(matches!(refused(attr, this_thread()), PmuError::Unsupported(_)));
        }
        assert!(matches!(
            refused(attr.clone(), PmuEventTarget::Vm),
            PmuError::Unsupported(_)
        ));
        let nobody = PmuEventTarget::Vcpu {
            vcpu: VcpuId(0),
            tid: i32::MAX,
        };
        assert!(matches!(refused(attr, nobody), PmuError::NoSuchEvent));
    }
}
