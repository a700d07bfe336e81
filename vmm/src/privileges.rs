//! What the process keeps of its rights for as long as its guest runs: the descriptors that it holds, and no
//! capability. The broker ([`crate::pmu::event_opener`]) keeps `CAP_PERFMON`, and nobody keeps more.
//!
//! Capabilities belong to threads (capabilities(7)). The main thread gives its own up before it starts the
//! vCPUs, the devices' threads and the servers, which inherit what is left. The few threads that exist before
//! call [`keep_no_capability`] themselves.

use std::fs;
use std::io;

use perf_core::error_line;
use perf_core::pmu::host::{DirectOpener, counting_is_denied_to};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, dumpable_behavior, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// The last capability that the kernel knows (capabilities(7), since Linux 3.2).
const LAST_CAPABILITY: &str = "/proc/sys/kernel/cap_last_cap";
/// What is assumed of a kernel that does not tell: Linux 5.9's.
const USUAL_LAST_CAPABILITY: u32 = CapabilitySet::CHECKPOINT_RESTORE.bits().trailing_zeros();

/// Rights could not be given up.
#[derive(Debug, thiserror::Error)]
#[error("{0} failed")]
pub struct PrivilegeError(&'static str, #[source] io::Error);

/// Gives up all capabilities of this thread, and of those it starts from now on. No program it
/// executes gets more (`no_new_privs`), and no other process of the user may read its memory, which
/// the guest's is part of, or attach a debugger (`PR_SET_DUMPABLE`). Memory for rings is no longer
/// bounded by `RLIMIT_MEMLOCK` if it was not, that is for `CAP_IPC_LOCK`.
///
/// # Errors
/// [`PrivilegeError`].
pub fn give_up() -> Result<(), PrivilegeError> {
    let failed = |what| move |e: rustix::io::Errno| PrivilegeError(what, e.into());
    let has = capabilities(None).map_err(failed("capget"))?;
    if has
        .effective
        .contains(CapabilitySet::IPC_LOCK | CapabilitySet::SYS_RESOURCE)
    {
        let all = Rlimit {
            current: None,
            maximum: None,
        };
        // What other programs lock is theirs; the perf core bounds what operators' rings take.
        setrlimit(Resource::Memlock, all).map_err(failed("setrlimit(RLIMIT_MEMLOCK)"))?;
    }
    set_no_new_privs(true).map_err(failed("prctl(PR_SET_NO_NEW_PRIVS)"))?;
    keep(CapabilitySet::empty()).map_err(failed("capset"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("prctl(PR_SET_DUMPABLE)"))
}

/// Lets neither this process nor those that it starts leave a core dump.
///
/// The limit is one byte: a file needs at least a page, and for one byte the kernel does not run the program
/// of a piped `core_pattern` either, which it does for a limit of 0 (Linux, `fs/coredump.c`). The limit stays
/// across `execve(2)`. A failure is logged.
pub fn forbid_core_dumps() {
    // A hard limit of 0 can only be raised with a capability.
    let bytes = getrlimit(Resource::Core).maximum.map_or(1, |most| most.min(1));
    let limit = Rlimit {
        current: Some(bytes),
        maximum: Some(bytes),
    };
    let limited = setrlimit(Resource::Core, limit);
    if let Err(e) = limited.and_then(|()| set_dumpable_behavior(DumpableBehavior::NotDumpable)) {
        log::warn!(
            "a crash may leave a core dump: {}",
            error_line(&io::Error::from(e))
        );
    }
}

/// Gives up all capabilities of this thread. If that fails, a warning says so.
pub fn keep_no_capability() {
    if let Err(e) = keep(CapabilitySet::empty()) {
        log::warn!(
            "a thread keeps its capabilities: {}",
            error_line(&io::Error::from(e))
        );
    }
}

/// Gives up all rights of this process, which has one thread and is none that counts. Whether that is done.
pub fn give_up_all() -> bool {
    give_up_all_but(CapabilitySet::empty())
}

/// As [`give_up_all`], for a process that opens perf events: it keeps `CAP_PERFMON` if it has that.
pub fn give_up_all_but_counting() -> bool {
    give_up_all_but(CapabilitySet::PERFMON)
}

fn give_up_all_but(kept: CapabilitySet) -> bool {
    set_no_new_privs(true).is_ok()
        && keep(kept).is_ok()
        && set_dumpable_behavior(DumpableBehavior::NotDumpable).is_ok()
}

/// Runs `run` in a thread that has the capability to count and no other, as whoever opens events
/// for a running VM. If that thread cannot be had, in this one.
pub fn with_right_to_count<T: Send>(run: impl Fn() -> T + Sync) -> T {
    let limited = std::thread::scope(|scope| {
        let thread = scope.spawn(|| keep(CapabilitySet::PERFMON).is_ok().then(&run));
        thread.join().ok().flatten()
    });
    limited.unwrap_or_else(run)
}

/// Runs `run` while this process, which has one thread, is as little dumpable as it is when its
/// guest runs: for other processes of its user it is out of reach.
pub fn while_not_dumpable<T>(run: impl FnOnce() -> T) -> T {
    let before = dumpable_behavior();
    let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let result = run();
    if let (Ok(before @ DumpableBehavior::Dumpable), Ok(())) = (before, hidden) {
        let _ = set_dumpable_behavior(before);
    }
    result
}

/// Whether a thread of this process that has no capability may not count itself.
pub fn counting_takes_a_capability() -> bool {
    std::thread::scope(|scope| {
        let tried =
            scope.spawn(|| keep(CapabilitySet::empty()).is_ok() && counting_is_denied_to(&DirectOpener));
        tried.join().unwrap_or(true)
    })
}

/// Keeps what this thread has of `set`, for itself and the threads it starts.
fn keep(set: CapabilitySet) -> rustix::io::Result<()> {
    let has = capabilities(None)?;
    if has.effective.contains(CapabilitySet::SETPCAP) {
        for capability in 0..=last_capability() {
            remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << capability))?;
        }
    }
    // Linux before 4.3 has none.
    let _ = clear_ambient_capability_set();
    set_capabilities(
        None,
        CapabilitySets {
            effective: has.effective & set,
            permitted: has.permitted & set,
            inheritable: CapabilitySet::empty(),
        },
    )
}

fn last_capability() -> u32 {
    let told = fs::read_to_string(LAST_CAPABILITY)
        .ok()
        .and_then(|text| text.trim().parse().ok());
    told.filter(|last| *last < u64::BITS)
        .unwrap_or(USUAL_LAST_CAPABILITY)
}

/// Lets this process have as many descriptors as its user may give it, and says how many that is. `None`:
/// as many as it likes.
pub fn raise_descriptor_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        // Linux refuses a limit above fs.nr_open even to those who have it.
        Err(_) => limit.current,
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::no_new_privs;

    use super::*;

    /// Of a thread of its own: the test's other threads keep theirs.
    fn in_a_thread<T: Send>(run: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(run).join().unwrap())
    }

    #[test]
    fn a_thread_keeps_what_it_has_of_what_it_may_and_no_more() {
        let before = capabilities(None).unwrap();
        let (kept, child) = in_a_thread(|| {
            keep(CapabilitySet::PERFMON).unwrap();
            let child = in_a_thread(|| capabilities(None).unwrap());
            (capabilities(None).unwrap(), child)
        });
        assert_eq!(kept.effective, before.effective & CapabilitySet::PERFMON);
        assert_eq!(kept.permitted, before.permitted & CapabilitySet::PERFMON);
        assert_eq!(kept.inheritable, CapabilitySet::empty());
        assert_eq!(child, kept, "threads inherit it");
        assert_eq!(capabilities(None).unwrap(), before, "this one has its own");
    }

    /// Set for a process that gives up what cannot be had back.
    const GIVES_UP: &str = "PERFVISOR_TEST_GIVES_UP";

    #[test]
    fn a_process_that_gave_up_its_rights_is_not_dumpable_and_gets_no_new_ones() {
        if std::env::var_os(GIVES_UP).is_some() {
            give_up().unwrap();
            assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
            assert!(no_new_privs().unwrap());
            assert_eq!(capabilities(None).unwrap().permitted, CapabilitySet::empty());
            return give_up().unwrap();
        }
        let name =
            "privileges::tests::a_process_that_gave_up_its_rights_is_not_dumpable_and_gets_no_new_ones";
        let own = std::env::current_exe().unwrap();
        let child = std::process::Command::new(own)
            .args(["--exact", name])
            .env(GIVES_UP, "")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn nothing_that_was_given_up_comes_back() {
        in_a_thread(|| {
            let all = capabilities(None).unwrap();
            keep_no_capability();
            assert_eq!(capabilities(None).unwrap().permitted, CapabilitySet::empty());
            if !all.permitted.is_empty() {
                set_capabilities(None, all).unwrap_err();
            }
        });
    }

    #[test]
    fn what_is_tried_leaves_this_thread_its_rights() {
        let before = capabilities(None).unwrap();
        counting_takes_a_capability();
        with_right_to_count(|| ());
        assert_eq!(capabilities(None).unwrap(), before);
    }

    #[test]
    fn the_limit_of_descriptors_is_what_the_user_may_have() {
        let raised = raise_descriptor_limit();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, raised);
        assert_eq!(raise_descriptor_limit(), raised, "once is enough");
    }
}
