//! Limits the number of labs that run concurrently in this process, and assigns labs to tests.
//!
//! A [`Pool`] admits requests for a test host, up to limits for the number of labs and for their
//! memory. A [`PoolGrant`] is an admitted request. The request counts against the limits until its
//! grant is dropped. A shared lab can then remain in the pool for the next request with the same
//! lab options.
//!
//! [`PoolState::next`] determines the order of admission: first the requests whose lab is already
//! booted, then requests that require switching off another lab, and finally exclusive requests. A
//! run therefore switches between these phases only once. A request that has been overtaken
//! [`MAX_PASSED`] times is next, regardless of its type.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

/// Environment variable with the maximum number of labs that run concurrently.
const LIMIT_VARIABLE: &str = "PERFVISOR_LABS";
/// Default maximum number of labs that run concurrently. A lab keeps about one processor busy.
const DEFAULT_LIMIT: usize = 2;
/// Memory that QEMU uses in addition to the lab's memory, mostly for translated code, in MiB.
const OVERHEAD_MIB: u64 = 1024;
/// Memory that labs must leave free for the rest of the machine, in MiB.
const RESERVE_MIB: u64 = 1024;
/// Maximum number of times that a waiting request for a test host may be overtaken.
const MAX_PASSED: u32 = 64;

/// Names of the test modules with the longest run times, in descending order. The pool admits their
/// requests first.
const LONGEST_FIRST: [&str; 8] = [
    "nested", "exact", "kexec", "devices", "lab", "kernels", "models", "hotplug",
];

/// Whether a test shares its test host's machine with other tests, or runs alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TestHostLeaseMode {
    /// The test runs concurrently with other tests, up to the pool's limits.
    Shared,
    /// The test runs alone, for time measurements.
    Exclusive,
}

/// Requirements on the lab of a request for a test host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LabNeed {
    /// Key of the lab. Labs with equal keys are interchangeable. `None` for a lab that is not
    /// returned to the pool.
    pub(crate) key: Option<String>,
    /// Memory of the required lab, in MiB.
    pub(crate) memory_mib: u64,
}

/// Error returned when the pool rejects a request.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TestHostPoolError {
    /// The calling thread already holds a grant. A second grant per thread could cause a deadlock.
    #[error("this thread already holds a lease; drop it before requesting another one")]
    AlreadyHeld,
    /// The value of the environment variable `PERFVISOR_LABS` is invalid.
    #[error("{LIMIT_VARIABLE}={0}: must be a number from 1")]
    Limit(String),
}

/// A request for a test host that waits for admission.
#[derive(Debug)]
struct PoolRequest {
    ticket: u64,
    thread: ThreadId,
    access: TestHostLeaseMode,
    lab: Option<LabNeed>,
    /// Index of the test's module in [`LONGEST_FIRST`].
    rank: usize,
    /// Number of times that other requests have overtaken this one.
    passed: u32,
}

/// A request for a test host that has been admitted.
#[derive(Debug)]
struct RunningRequest {
    ticket: u64,
    thread: ThreadId,
    access: TestHostLeaseMode,
    lab_mib: Option<u64>,
}

/// A booted lab that is not in use.
#[derive(Debug)]
struct IdleLab<L> {
    key: String,
    memory_mib: u64,
    lab: L,
}

/// State of the pool: its limits, all requests, and the idle labs.
#[derive(Debug)]
struct PoolState<L> {
    limit: usize,
    /// Memory that all labs together may use, in MiB.
    memory_mib: u64,
    tickets: u64,
    waiting: Vec<PoolRequest>,
    running: Vec<RunningRequest>,
    /// Labs that no test uses, least recently used first.
    idle: Vec<IdleLab<L>>,
}

impl<L> PoolState<L> {
    /// Returns the waiting request to admit next, or `None` if no request can be admitted now.
    fn next(&self) -> Option<&PoolRequest> {
        if self
            .running
            .iter()
            .any(|running| running.access == TestHostLeaseMode::Exclusive)
        {
            return None;
        }
        let overdue = self.waiting.iter().filter(|request| request.passed >= MAX_PASSED);
        if let Some(request) = overdue.min_by_key(|request| request.ticket) {
            return self.fits(request).then_some(request);
        }
        let is_shared = |request: &&PoolRequest| request.access == TestHostLeaseMode::Shared;
        let any_shared = self.waiting.iter().any(|request| is_shared(&request));
        self.waiting
            .iter()
            .filter(|request| !any_shared || is_shared(request))
            .filter(|request| self.fits(request))
            .min_by_key(|request| (self.evictions(request) > 0, request.rank, request.ticket))
    }

    /// Returns whether a request can be admitted in addition to the running requests.
    fn fits(&self, request: &PoolRequest) -> bool {
        if self.running.is_empty() {
            return true;
        }
        let used: u64 = self.running.iter().filter_map(|running| running.lab_mib).sum();
        let has_memory = cost_mib(request.lab.as_ref()).is_none_or(|need| used + need <= self.memory_mib);
        request.access == TestHostLeaseMode::Shared && self.running.len() < self.limit && has_memory
    }

    /// Returns the number of idle labs that must be switched off before a request can be admitted.
    fn evictions(&self, request: &PoolRequest) -> usize {
        let Some(need) = cost_mib(request.lab.as_ref()) else {
            return 0;
        };
        if self.warm(request).is_some() {
            return 0;
        }
        let labs: Vec<u64> = self
            .running
            .iter()
            .filter_map(|running| running.lab_mib)
            .collect();
        let idle: Vec<u64> = self
            .idle
            .iter()
            .map(|idle| idle.memory_mib + OVERHEAD_MIB)
            .collect();
        let fits = |evicted: &usize| {
            let kept = &idle[*evicted..];
            labs.len() + kept.len() < self.limit
                && labs.iter().chain(kept).sum::<u64>() + need <= self.memory_mib
        };
        (0..idle.len()).find(fits).unwrap_or(idle.len())
    }

    /// Returns the index of an idle lab that a request can use, if there is one.
    fn warm(&self, request: &PoolRequest) -> Option<usize> {
        let key = request.lab.as_ref()?.key.as_ref()?;
        self.idle.iter().position(|idle| idle.key == *key)
    }

    /// Admits the request `ticket`. Returns an idle lab for the request, if there is one, and the
    /// idle labs that must be switched off first.
    fn admit(&mut self, ticket: u64) -> (Option<L>, Vec<L>) {
        let Some(at) = self.waiting.iter().position(|request| request.ticket == ticket) else {
            return (None, Vec::new());
        };
        let request = self.waiting.remove(at);
        for earlier in self.waiting.iter_mut().filter(|other| other.ticket < ticket) {
            earlier.passed += 1;
        }
        let warm = self.warm(&request);
        let evictions = self.evictions(&request);
        let warm = warm.map(|at| self.idle.remove(at).lab);
        let evicted = self.idle.drain(..evictions).map(|idle| idle.lab).collect();
        self.running.push(RunningRequest {
            ticket,
            thread: request.thread,
            access: request.access,
            lab_mib: cost_mib(request.lab.as_ref()),
        });
        (warm, evicted)
    }
}

/// Returns the memory that a lab and its QEMU use, in MiB.
fn cost_mib(lab: Option<&LabNeed>) -> Option<u64> {
    lab.map(|lab| lab.memory_mib + OVERHEAD_MIB)
}

/// A pool of labs of type `L`.
pub(crate) struct Pool<L> {
    state: Mutex<PoolState<L>>,
    changed: Condvar,
}

impl<L> Pool<L> {
    /// Creates a pool whose limits depend on this machine's memory and the environment variable
    /// `PERFVISOR_LABS`.
    pub(crate) fn of_this_machine() -> Result<Self, TestHostPoolError> {
        let limit = match std::env::var(LIMIT_VARIABLE) {
            Ok(text) if !text.is_empty() => match text.parse() {
                Ok(limit) if limit > 0 => limit,
                _ => return Err(TestHostPoolError::Limit(text)),
            },
            _ => DEFAULT_LIMIT,
        };
        let available = available_mib().unwrap_or(u64::MAX);
        Ok(Self::new(limit, available.saturating_sub(RESERVE_MIB)))
    }

    fn new(limit: usize, memory_mib: u64) -> Self {
        Self {
            state: Mutex::new(PoolState {
                limit,
                memory_mib,
                tickets: 0,
                waiting: Vec::new(),
                running: Vec::new(),
                idle: Vec::new(),
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, PoolState<L>> {
        // Each update is complete before any code that can panic, so a poisoned state is
        // consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the pool admits a request. A request that needs no lab (`None`) also counts as
    /// one lab.
    ///
    /// # Errors
    /// Returns [`TestHostPoolError::AlreadyHeld`] if the calling thread holds a grant.
    pub(crate) fn acquire(
        self: &Arc<Self>,
        access: TestHostLeaseMode,
        lab: Option<LabNeed>,
    ) -> Result<(PoolGrant<L>, Option<L>), TestHostPoolError> {
        let thread = thread::current();
        let mut state = self.lock();
        if state.running.iter().any(|running| running.thread == thread.id()) {
            return Err(TestHostPoolError::AlreadyHeld);
        }
        state.tickets += 1;
        let ticket = state.tickets;
        state.waiting.push(PoolRequest {
            ticket,
            thread: thread.id(),
            access,
            lab,
            rank: rank(thread.name().unwrap_or_default()),
            passed: 0,
        });
        while state.next().is_none_or(|request| request.ticket != ticket) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let (warm, evicted) = state.admit(ticket);
        drop(state);
        // Wake the other waiting requests, because the pool may have capacity for one of them.
        self.changed.notify_all();
        drop(evicted);
        let pool = Arc::clone(self);
        Ok((PoolGrant { pool, ticket }, warm))
    }

    fn release(&self, ticket: u64, idle: Option<IdleLab<L>>) {
        let mut state = self.lock();
        state.running.retain(|running| running.ticket != ticket);
        state.idle.extend(idle);
        drop(state);
        self.changed.notify_all();
    }
}

/// An admitted request for a test host. The request counts against the pool's limits until the
/// grant is dropped.
pub(crate) struct PoolGrant<L> {
    pool: Arc<Pool<L>>,
    ticket: u64,
}

impl<L> PoolGrant<L> {
    /// Ends the grant and returns its lab to the pool, for the next request with the same key.
    pub(crate) fn return_lab(self, key: String, memory_mib: u64, lab: L) {
        let idle = IdleLab { key, memory_mib, lab };
        self.pool.release(self.ticket, Some(idle));
    }
}

impl<L> Drop for PoolGrant<L> {
    fn drop(&mut self) {
        self.pool.release(self.ticket, None);
    }
}

/// Returns the index in [`LONGEST_FIRST`] of the module to which `test` belongs, or the length of
/// the list if the module is not listed.
fn rank(test: &str) -> usize {
    let module = test.split("::").next().unwrap_or_default();
    let known = LONGEST_FIRST.iter().position(|name| *name == module);
    known.unwrap_or(LONGEST_FIRST.len())
}

/// Returns the memory available without swapping, in MiB.
fn available_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? >> 10)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;

    const MIB: u64 = 3072;

    fn need(key: &str) -> Option<LabNeed> {
        Some(LabNeed {
            key: (!key.is_empty()).then(|| key.to_owned()),
            memory_mib: MIB,
        })
    }

    /// Returns the state of a pool with capacity for two labs.
    fn state() -> PoolState<u32> {
        PoolState {
            limit: 2,
            memory_mib: 2 * (MIB + OVERHEAD_MIB),
            tickets: 0,
            waiting: Vec::new(),
            running: Vec::new(),
            idle: Vec::new(),
        }
    }

    fn ask(state: &mut PoolState<u32>, test: &str, access: TestHostLeaseMode, lab: Option<LabNeed>) -> u64 {
        state.tickets += 1;
        state.waiting.push(PoolRequest {
            ticket: state.tickets,
            thread: thread::current().id(),
            access,
            lab,
            rank: rank(test),
            passed: 0,
        });
        state.tickets
    }

    fn next(state: &PoolState<u32>) -> Option<u64> {
        state.next().map(|request| request.ticket)
    }

    fn end(state: &mut PoolState<u32>, ticket: u64, idle: Option<(&str, u32)>) {
        state.running.retain(|running| running.ticket != ticket);
        state.idle.extend(idle.map(|(key, lab)| IdleLab {
            key: key.to_owned(),
            memory_mib: MIB,
            lab,
        }));
    }

    #[test]
    fn pool_admits_shared_requests_longest_first() {
        let mut state = state();
        let quick = ask(&mut state, "vsock::x", TestHostLeaseMode::Shared, need("a"));
        let long = ask(&mut state, "nested::x", TestHostLeaseMode::Shared, need("a"));
        let last = ask(&mut state, "share::x", TestHostLeaseMode::Shared, need("a"));
        assert_eq!(next(&state), Some(long));
        state.admit(long);
        assert_eq!(next(&state), Some(quick));
        state.admit(quick);
        assert_eq!(next(&state), None);
        end(&mut state, long, Some(("a", 7)));
        assert_eq!(next(&state), Some(last));
        assert_eq!(state.admit(last), (Some(7), vec![]));
    }

    #[test]
    fn pool_runs_exclusive_requests_last_and_alone() {
        let mut state = state();
        let alone = ask(&mut state, "a::x", TestHostLeaseMode::Exclusive, None);
        let shared = ask(&mut state, "b::x", TestHostLeaseMode::Shared, need("a"));
        assert_eq!(next(&state), Some(shared));
        state.admit(shared);
        assert_eq!(next(&state), None);
        end(&mut state, shared, None);
        assert_eq!(next(&state), Some(alone));
        state.admit(alone);
        ask(&mut state, "c::x", TestHostLeaseMode::Shared, None);
        assert_eq!(next(&state), None);
    }

    #[test]
    fn pool_admits_overtaken_request_next() {
        let mut state = state();
        let alone = ask(&mut state, "a::x", TestHostLeaseMode::Exclusive, None);
        for _ in 0..MAX_PASSED {
            let shared = ask(&mut state, "b::x", TestHostLeaseMode::Shared, None);
            assert_eq!(next(&state), Some(shared));
            state.admit(shared);
            end(&mut state, shared, None);
        }
        ask(&mut state, "b::x", TestHostLeaseMode::Shared, None);
        assert_eq!(next(&state), Some(alone));
    }

    #[test]
    fn pool_evicts_labs_only_at_limit() {
        let mut state = state();
        let first = ask(&mut state, "a::x", TestHostLeaseMode::Shared, need("a"));
        state.admit(first);
        end(&mut state, first, Some(("a", 1)));
        // One more request fits.
        let second = ask(&mut state, "b::x", TestHostLeaseMode::Shared, need(""));
        assert_eq!(state.admit(second), (None, vec![]));
        let third = ask(&mut state, "c::x", TestHostLeaseMode::Shared, need("c"));
        let fourth = ask(&mut state, "d::x", TestHostLeaseMode::Shared, need("a"));
        assert_eq!(next(&state), Some(fourth), "its lab is booted");
        assert_eq!(state.admit(fourth), (Some(1), vec![]));
        end(&mut state, fourth, Some(("a", 1)));
        assert_eq!(state.admit(third), (None, vec![1]));
    }

    #[test]
    fn pool_memory_limit_allows_at_least_one_lab() {
        let mut state = state();
        state.memory_mib = 100;
        let first = ask(&mut state, "a::x", TestHostLeaseMode::Shared, need("a"));
        assert_eq!(next(&state), Some(first));
        state.admit(first);
        ask(&mut state, "b::x", TestHostLeaseMode::Shared, need("a"));
        assert_eq!(next(&state), None);
        // A request for this machine takes no lab memory.
        let here = ask(&mut state, "c::x", TestHostLeaseMode::Shared, None);
        assert_eq!(next(&state), Some(here));
    }

    /// The pool admits every request of many threads, even if some threads panic, and runs
    /// exclusive requests alone.
    #[test]
    fn pool_admits_requests_of_many_threads() {
        let pool = Arc::new(Pool::<u32>::new(2, u64::MAX));
        let running = Arc::new(AtomicUsize::new(0));
        let threads = (0..24).map(|n| {
            let (pool, running) = (Arc::clone(&pool), Arc::clone(&running));
            thread::spawn(move || {
                let (access, most) = match n % 3 {
                    0 => (TestHostLeaseMode::Exclusive, 1),
                    _ => (TestHostLeaseMode::Shared, 2),
                };
                let lab = need(["a", "b", ""][n % 5 % 3]);
                let (grant, warm) = pool.acquire(access, lab.clone()).unwrap();
                assert!(running.fetch_add(1, Ordering::SeqCst) < most);
                thread::sleep(Duration::from_millis(2));
                running.fetch_sub(1, Ordering::SeqCst);
                assert_ne!(n % 4, 3, "planned");
                if let Some(key) = lab.and_then(|lab| lab.key) {
                    grant.return_lab(key, MIB, warm.unwrap_or(0));
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        let failed = threads
            .into_iter()
            .filter_map(|thread| thread.join().err())
            .count();
        assert_eq!(failed, 6);
        let state = pool.lock();
        assert!(state.running.is_empty() && state.waiting.is_empty() && state.idle.len() <= 2);
    }

    #[test]
    fn pool_rejects_second_grant_of_thread() {
        let pool = Arc::new(Pool::<u32>::new(2, u64::MAX));
        let first = pool.acquire(TestHostLeaseMode::Shared, None).unwrap();
        assert!(matches!(
            pool.acquire(TestHostLeaseMode::Shared, None),
            Err(TestHostPoolError::AlreadyHeld)
        ));
        drop(first);
        assert!(pool.acquire(TestHostLeaseMode::Exclusive, None).is_ok());
    }
}
