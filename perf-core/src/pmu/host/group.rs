//! Native groups of the host kernel, whose members are scheduled together by one system call on
//! their leader.
//!
//! A member stays enabled in the kernel and counts while its leader is enabled. All members of a
//! group therefore start and stop simultaneously, with a single interruption of the vCPU,
//! regardless of the group's size. The counts of all members are also read in one system call,
//! because the kernel returns all counts in response to a read of any member. The read uses the
//! first member that was opened with the read format `READ_GROUP`.
//!
//! A member that the kernel rejects in the group, because it belongs to another PMU or exceeds the
//! available counters, is opened alone and is started and stopped separately.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use perf_event_open_sys::bindings::{
    PERF_FORMAT_GROUP, PERF_FORMAT_ID, PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING,
};
use smallvec::SmallVec;

use super::fd::{PerfFd, TimedCount};
use super::opener::HostEventTarget;

/// Read format with which a read of one member returns the counts of the whole group.
pub(super) const READ_GROUP: u64 =
    (PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING | PERF_FORMAT_GROUP | PERF_FORMAT_ID)
        as u64;

/// Maximum number of members besides the leader. Further events are opened alone. No PMU has more
/// counters.
pub(super) const MAX_MEMBERS: usize = 15;

/// A kernel group, shared by all its members. All calls are made under the lock of the events'
/// context.
#[derive(Debug)]
pub(super) struct KernelGroup {
    /// Thread or CPU on which the events of the group count.
    pub(super) counted: HostEventTarget,
    /// Set if the leader is pinned. The whole group is then pinned.
    pub(super) pinned: bool,
    leader: Arc<PerfFd>,
    leader_id: u64,
    /// Set while the leader is enabled in the kernel.
    on: AtomicBool,
    /// Count of the leader, valid if the group was read after the leader was last disabled.
    count: CachedCount,
    members: Mutex<SmallVec<[Arc<GroupMember>; 4]>>,
}

/// A member of a kernel group, other than the group's leader.
#[derive(Debug)]
pub(super) struct GroupMember {
    fd: Arc<PerfFd>,
    id: u64,
    /// Set if this member has the read format [`READ_GROUP`].
    reads: bool,
    /// Set for a software event, which needs no counter.
    software: bool,
    /// Set if the member must count whenever the leader is enabled.
    wanted: AtomicBool,
    /// Set if the member is enabled in the kernel.
    enabled: AtomicBool,
    count: CachedCount,
}

/// A count of a group member at the last read of the group, valid while the group stays disabled.
#[derive(Debug, Default)]
struct CachedCount {
    count: AtomicU64,
    known: AtomicBool,
}

impl CachedCount {
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
    /// Creates the group of `leader`, without other members. Takes one system call.
    pub(super) fn new(
        leader: Arc<PerfFd>,
        counted: HostEventTarget,
        pinned: bool,
        on: bool,
    ) -> io::Result<Self> {
        Ok(Self {
            counted,
            pinned,
            leader_id: leader.id()?,
            leader,
            on: AtomicBool::new(on),
            count: CachedCount::default(),
            members: Mutex::default(),
        })
    }

    pub(super) fn leader(&self) -> &PerfFd {
        &self.leader
    }

    fn members(&self) -> std::sync::MutexGuard<'_, SmallVec<[Arc<GroupMember>; 4]>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_full(&self) -> bool {
        self.members().len() >= MAX_MEMBERS
    }

    /// Returns `true` if the group has no member with [`READ_GROUP`] and so cannot be read yet.
    pub(super) fn needs_reader(&self) -> bool {
        !self.members().iter().any(|m| m.reads)
    }

    /// Adds an event to the group. `fd` was opened in this group, in the disabled state. `reads` is
    /// set if it was opened with [`READ_GROUP`], and `software` if it is a software event.
    pub(super) fn join(&self, fd: Arc<PerfFd>, reads: bool, software: bool) -> io::Result<Arc<GroupMember>> {
        let member = Arc::new(GroupMember {
            id: fd.id()?,
            fd,
            reads,
            software,
            wanted: AtomicBool::new(false),
            enabled: AtomicBool::new(false),
            count: CachedCount::default(),
        });
        self.members().push(Arc::clone(&member));
        Ok(member)
    }

    /// Removes a member whose file descriptor is about to be closed.
    pub(super) fn remove(&self, member: &Arc<GroupMember>) {
        self.members().retain(|m| !Arc::ptr_eq(m, member));
    }

    /// Enables the leader, and thereby all members that were started.
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

    /// Disables the leader, and thereby all members.
    pub(super) fn stop(&self) -> io::Result<()> {
        self.on.store(false, Ordering::Relaxed);
        self.leader.disable()
    }

    /// Starts `member`, which counts as soon as the leader is enabled.
    pub(super) fn start_member(&self, member: &GroupMember) -> io::Result<()> {
        member.count.known.store(false, Ordering::Relaxed);
        if !member.enabled.load(Ordering::Relaxed) {
            self.enable(member)?;
            member.enabled.store(true, Ordering::Relaxed);
        }
        member.wanted.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Enables `member` in the kernel.
    ///
    /// The kernel starts a software event immediately only if its leader is of the same type (a
    /// clock, or not a clock). With any other running leader, the event would count nothing until
    /// the thread is next scheduled, and its times would not show this. Therefore the leader is
    /// disabled and enabled again around this call.
    pub(super) fn enable(&self, member: &GroupMember) -> io::Result<()> {
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

    /// Stops `member`. Takes no system call if the leader is already disabled.
    pub(super) fn stop_member(&self, member: &GroupMember) -> io::Result<()> {
        member.wanted.store(false, Ordering::Relaxed);
        if self.on.load(Ordering::Relaxed) {
            member.disable()?;
        }
        Ok(())
    }

    /// Returns the leader's count while the group is disabled. Takes one system call, which reads
    /// the counts of all members.
    pub(super) fn read_leader(&self) -> Option<u64> {
        self.read_all();
        self.count.get()
    }

    /// Returns the count of `member`, or `None` if the group is enabled or cannot be read.
    pub(super) fn read_member(&self, member: &GroupMember) -> Option<u64> {
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
            // The counts remain unknown, so callers read their own file descriptors.
            log::debug!("reading a group of host events failed: {}", crate::error_line(&e));
        }
    }
}

impl GroupMember {
    /// Reads the member's file descriptor with [`PerfFd::read_timed`].
    pub(super) fn read_timed(&self) -> io::Result<Option<TimedCount>> {
        if !self.reads {
            return self.fd.read_timed();
        }
        let mut own = None;
        let times = self.each(|id, count| {
            if id == self.id {
                own = Some(count);
            }
        })?;
        Ok(own
            .zip(times)
            .map(|(count, (enabled_ns, running_ns))| TimedCount {
                count,
                enabled_ns,
                running_ns,
            }))
    }

    /// Returns `true` if each sample of this member contains the count of this member only, rather
    /// than the counts of the whole group.
    pub(super) fn has_single_count_samples(&self) -> bool {
        !self.reads
    }

    /// Reads the whole group through this member. Passes the kernel's ID and the count of each
    /// member to `each`, and returns the group's time enabled and time running, or `None` if the
    /// group is in the error state.
    fn each(&self, mut each: impl FnMut(u64, u64)) -> io::Result<Option<(u64, u64)>> {
        // Number of members, two times, and a count and an ID for each member.
        let mut words = [0u64; 3 + 2 * (MAX_MEMBERS + 1)];
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
