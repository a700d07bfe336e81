//! Groups of the host's kernel: members are on and off together, by one system call on their leader.
//!
//! A member is enabled in the kernel all the time and counts while its leader is on, so a group goes on and
//! off at one moment and for one interrupt of the vCPU, whatever its size. What its members counted is read
//! in one go too, through the first that was opened for that: the kernel answers a reading of any member with
//! all of them.
//!
//! A member that the kernel refuses in the group, because it is of another PMU, or too many for the counters
//! there are, is opened alone and goes on and off by itself.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use perf_event_open_sys::bindings::{
    PERF_FORMAT_GROUP, PERF_FORMAT_ID, PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING,
};
use smallvec::SmallVec;

use super::fd::{PerfFd, Timed};
use super::opener::Counted;

/// The read format of a member through which the group is read.
pub(super) const READ_GROUP: u64 =
    (PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING | PERF_FORMAT_GROUP | PERF_FORMAT_ID)
        as u64;

/// Members of a kernel group but for its leader. More go on by themselves; no PMU has so many counters.
pub(super) const MOST: usize = 15;

/// A group of the kernel, known to all its members. All calls come under the lock of the events' context.
#[derive(Debug)]
pub(super) struct KernelGroup {
    /// The thread its events count.
    pub(super) counted: Counted,
    /// The leader is pinned to a counter, and with it all others.
    pub(super) pinned: bool,
    leader: Arc<PerfFd>,
    leader_id: u64,
    /// The leader is on.
    on: AtomicBool,
    /// What the leader counted, if it was read with the others since it went off.
    count: Reading,
    members: Mutex<SmallVec<[Arc<Member>; 4]>>,
}

/// A member that is not the leader.
#[derive(Debug)]
pub(super) struct Member {
    fd: Arc<PerfFd>,
    id: u64,
    /// The group may be read through it.
    reads: bool,
    /// It needs no counter.
    software: bool,
    /// It is to count while the leader is on.
    wanted: AtomicBool,
    /// The kernel has it enabled.
    enabled: AtomicBool,
    count: Reading,
}

/// A count that holds while the group is off.
#[derive(Debug, Default)]
struct Reading {
    count: AtomicU64,
    known: AtomicBool,
}

impl Reading {
    fn set(&self, count: u64) {
        self.count.store(count, Ordering::Relaxed);
        self.known.store(true, Ordering::Relaxed);
    }

    fn get(&self) -> Option<u64> {
        self.known
            .load(Ordering::Relaxed)
            .then(|| self.count.load(Ordering::Relaxed))
    }
}

impl KernelGroup {
    /// The group of `leader`, without members as yet. One system call.
    pub(super) fn new(leader: Arc<PerfFd>, counted: Counted, pinned: bool, on: bool) -> io::Result<Self> {
        Ok(Self {
            counted,
            pinned,
            leader_id: leader.id()?,
            leader,
            on: AtomicBool::new(on),
            count: Reading::default(),
            members: Mutex::default(),
        })
    }

    pub(super) fn leader(&self) -> &PerfFd {
        &self.leader
    }

    fn members(&self) -> std::sync::MutexGuard<'_, SmallVec<[Arc<Member>; 4]>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_full(&self) -> bool {
        self.members().len() >= MOST
    }

    /// Nobody is there through whom it can be read in one go.
    pub(super) fn wants_reader(&self) -> bool {
        !self.members().iter().any(|m| m.reads)
    }

    /// Takes in `fd`, which was opened disabled in this group. `reads`: with [`READ_GROUP`].
    pub(super) fn join(&self, fd: Arc<PerfFd>, reads: bool, software: bool) -> io::Result<Arc<Member>> {
        let member = Arc::new(Member {
            id: fd.id()?,
            fd,
            reads,
            software,
            wanted: AtomicBool::new(false),
            enabled: AtomicBool::new(false),
            count: Reading::default(),
        });
        self.members().push(Arc::clone(&member));
        Ok(member)
    }

    /// Forgets a member whose descriptor is about to be closed.
    pub(super) fn part(&self, member: &Arc<Member>) {
        self.members().retain(|m| !Arc::ptr_eq(m, member));
    }

    /// The leader goes on, and with it all members that are wanted.
    pub(super) fn start(&self) -> io::Result<()> {
        for member in self.members().iter() {
            member.count.known.store(false, Ordering::Relaxed);
            if !member.wanted.load(Ordering::Relaxed) {
                member.disable()?;
            }
        }
        self.count.known.store(false, Ordering::Relaxed);
        self.leader.enable()?;
        self.on.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The leader goes off, and with it all others.
    pub(super) fn stop(&self) -> io::Result<()> {
        self.on.store(false, Ordering::Relaxed);
        self.leader.disable()
    }

    /// `member` goes on with the leader, or at once if that is on.
    pub(super) fn start_member(&self, member: &Member) -> io::Result<()> {
        member.count.known.store(false, Ordering::Relaxed);
        if !member.enabled.load(Ordering::Relaxed) {
            self.enable(member)?;
            member.enabled.store(true, Ordering::Relaxed);
        }
        member.wanted.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Enables `member`. The kernel puts a software event on at once only if its leader is of the same kind:
    /// a clock, or none. Beside any other that is on it would count nothing until the thread is next
    /// scheduled, and its times would not tell. So the leader goes off and on around it.
    pub(super) fn enable(&self, member: &Member) -> io::Result<()> {
        let around = self.on.load(Ordering::Relaxed) && member.software;
        if around {
            self.leader.disable()?;
        }
        let enabled = member.fd.enable();
        if around {
            self.leader.enable()?;
        }
        enabled
    }

    /// `member` goes off; if the leader did before, that is all it takes.
    pub(super) fn stop_member(&self, member: &Member) -> io::Result<()> {
        member.wanted.store(false, Ordering::Relaxed);
        if self.on.load(Ordering::Relaxed) {
            member.disable()?;
        }
        Ok(())
    }

    /// What the leader has counted, of a group that is off: one system call for it and all members.
    pub(super) fn read_leader(&self) -> Option<u64> {
        self.read_all();
        self.count.get()
    }

    /// What `member` has counted, of a group that is off.
    pub(super) fn read_member(&self, member: &Member) -> Option<u64> {
        if member.count.get().is_none() {
            self.read_all();
        }
        member.count.get()
    }

    fn read_all(&self) {
        if self.on.load(Ordering::Relaxed) {
            return;
        }
        let members = self.members();
        let Some(reader) = members.iter().find(|m| m.reads) else {
            return;
        };
        let read = reader.each(|id, count| {
            if id == self.leader_id {
                self.count.set(count);
            } else if let Some(member) = members.iter().find(|m| m.id == id) {
                member.count.set(count);
            }
        });
        if let Err(e) = read {
            // Whoever asks reads its own descriptor.
            log::debug!("reading a group of host events failed: {}", crate::error_line(&e));
        }
    }
}

impl Member {
    /// As [`PerfFd::read_timed`] of its descriptor, whatever that answers.
    pub(super) fn read_timed(&self) -> io::Result<Option<Timed>> {
        if !self.reads {
            return self.fd.read_timed();
        }
        let mut own = None;
        let times = self.each(|id, count| {
            if id == self.id {
                own = Some(count);
            }
        })?;
        Ok(own.zip(times).map(|(count, (enabled_ns, running_ns))| Timed {
            count,
            enabled_ns,
            running_ns,
        }))
    }

    /// Overflows put one count into the ring, its own.
    pub(super) fn samples_itself(&self) -> bool {
        !self.reads
    }

    /// Reads the group: the ids and counts of all, and the times, unless it is in the error state.
    fn each(&self, mut each: impl FnMut(u64, u64)) -> io::Result<Option<(u64, u64)>> {
        // How many there are, two times, and a count and an id for each.
        let mut words = [0u64; 3 + 2 * (MOST + 1)];
        let read = self.fd.read_words(&mut words)?;
        let Some(([_, enabled_ns, running_ns], pairs)) = words[..read].split_first_chunk() else {
            return Ok(None);
        };
        for pair in pairs.chunks_exact(2) {
            each(pair[1], pair[0]);
        }
        Ok(Some((*enabled_ns, *running_ns)))
    }

    fn disable(&self) -> io::Result<()> {
        if self.enabled.load(Ordering::Relaxed) {
            self.fd.disable()?;
            self.enabled.store(false, Ordering::Relaxed);
        }
        Ok(())
    }
}
