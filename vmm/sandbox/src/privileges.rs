//! Drops the privileges of the process before its guest runs. The process keeps its open
//! descriptors and no capability. Only the perf event broker keeps `CAP_PERFMON`.
//!
//! Capabilities belong to a thread (capabilities(7)). The main thread drops its capabilities before
//! it starts the threads of vCPUs, devices and servers, which inherit the reduced set. Threads that
//! already exist call [`drop_thread_capabilities`] themselves.

use std::fs;
use std::io;

use diagnostics::error_line;
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, dumpable_behavior, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

/// File with the number of the kernel's last capability (capabilities(7), since Linux 3.2).
const LAST_CAPABILITY: &str = "/proc/sys/kernel/cap_last_cap";
/// Last capability to assume if [`LAST_CAPABILITY`] does not exist: that of Linux 5.9.
const USUAL_LAST_CAPABILITY: u32 = CapabilitySet::CHECKPOINT_RESTORE.bits().trailing_zeros();

/// Link that identifies the user namespace of this process (namespaces(7)).
const USER_NAMESPACE: &str = "/proc/self/ns/user";
/// Target of [`USER_NAMESPACE`] in the initial namespace (Linux, `PROC_USER_INIT_INO`).
const INITIAL_USER_NAMESPACE: &str = "user:[4026531837]";

/// Error returned when privileges cannot be dropped.
#[derive(Debug, thiserror::Error)]
#[error("{0} failed")]
pub struct PrivilegeError(&'static str, #[source] io::Error);

/// Drops all capabilities of this thread and of the threads that it starts later. Executed programs
/// cannot gain privileges (`no_new_privs`). Other processes of the user can neither read the memory
/// of this process, which includes the guest's memory, nor attach a debugger (`PR_SET_DUMPABLE`).
/// If ring memory was exempt from `RLIMIT_MEMLOCK` because of `CAP_IPC_LOCK`, the limit is raised
/// so that ring memory can still be locked.
///
/// # Errors
/// Returns a [`PrivilegeError`] if a system call fails.
pub fn drop_privileges() -> Result<(), PrivilegeError> {
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
        // The limit need not bound locked memory: executed programs account for their own, and
        // perf-core bounds the memory of operators' rings.
        setrlimit(Resource::Memlock, all).map_err(failed("setrlimit(RLIMIT_MEMLOCK)"))?;
    }
    set_no_new_privs(true).map_err(failed("prctl(PR_SET_NO_NEW_PRIVS)"))?;
    keep(CapabilitySet::empty()).map_err(failed("capset"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(failed("prctl(PR_SET_DUMPABLE)"))
}

/// Disables core dumps of this process and its child processes.
///
/// The limit is set to one byte. A core file requires at least one page, so none is written. A
/// limit of 0 would not suffice, because the kernel would still start a program given by a piped
/// `core_pattern` (Linux, `fs/coredump.c`). The limit persists across `execve(2)`. A failure is
/// logged.
pub fn forbid_core_dumps() {
    // Keep a hard limit of 0, because raising it would require a capability.
    let bytes = getrlimit(Resource::Core).maximum.map_or(1, |most| most.min(1));
    let limit = Rlimit {
        current: Some(bytes),
        maximum: Some(bytes),
    };
    let limited = setrlimit(Resource::Core, limit);
    if let Err(e) = limited.and_then(|()| set_dumpable_behavior(DumpableBehavior::NotDumpable)) {
        log::warn!("cannot disable core dumps: {}", error_line(&io::Error::from(e)));
    }
}

/// Drops all capabilities of this thread. A failure is logged as a warning.
pub fn drop_thread_capabilities() {
    if let Err(e) = keep(CapabilitySet::empty()) {
        log::warn!(
            "cannot drop the capabilities of a thread: {}",
            error_line(&io::Error::from(e))
        );
    }
}

/// Drops all privileges of this process, including the right to open perf events. The process must
/// be single-threaded. Returns whether this succeeded.
pub fn drop_all_privileges() -> bool {
    drop_privileges_except(CapabilitySet::empty())
}

/// Drops all privileges of this process except `CAP_PERFMON`, so that it can still open perf
/// events. See [`drop_all_privileges`].
pub fn drop_privileges_except_perfmon() -> bool {
    drop_privileges_except(CapabilitySet::PERFMON)
}

fn drop_privileges_except(kept: CapabilitySet) -> bool {
    set_no_new_privs(true).is_ok()
        && keep(kept).is_ok()
        && set_dumpable_behavior(DumpableBehavior::NotDumpable).is_ok()
}

/// Returns whether this thread has `CAP_PERFMON` in the initial user namespace. For perf events,
/// the kernel ignores the capability in other namespaces (user_namespaces(7)).
#[must_use]
pub fn has_perfmon_capability() -> bool {
    let has = capabilities(None).is_ok_and(|has| has.effective.contains(CapabilitySet::PERFMON));
    has && fs::read_link(USER_NAMESPACE).is_ok_and(|link| link.as_os_str() == INITIAL_USER_NAMESPACE)
}

/// Runs `run` in a new thread that has no capability except `CAP_PERFMON`, and runs `meanwhile` in
/// the current thread. The new thread has the same privileges as the process that opens events for
/// a running VM. If the thread cannot drop its capabilities, runs both functions in the current
/// thread.
pub fn with_perfmon_capability<T: Send, U>(
    run: impl Fn() -> T + Sync,
    meanwhile: impl FnOnce() -> U,
) -> (T, U) {
    let (limited, result) = std::thread::scope(|scope| {
        let thread = scope.spawn(|| keep(CapabilitySet::PERFMON).is_ok().then(&run));
        let result = meanwhile();
        (thread.join().ok().flatten(), result)
    });
    (limited.unwrap_or_else(run), result)
}

/// Runs `run` while this process, which must be single-threaded, is not dumpable. Other processes
/// of its user then cannot access it. A VM's process is in the same state while its guest is
/// running.
pub fn while_not_dumpable<T>(run: impl FnOnce() -> T) -> T {
    let before = dumpable_behavior();
    let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let result = run();
    if let (Ok(before @ DumpableBehavior::Dumpable), Ok(())) = (before, hidden) {
        let _ = set_dumpable_behavior(before);
    }
    result
}

/// Calls `is_denied` in a new thread without capabilities and returns its result. Returns `true` if
/// the thread panics.
pub fn is_denied_without_capabilities(is_denied: impl FnOnce() -> bool + Send) -> bool {
    std::thread::scope(|scope| {
        let tried = scope.spawn(|| keep(CapabilitySet::empty()).is_ok() && is_denied());
        tried.join().unwrap_or(true)
    })
}

/// Drops all capabilities of this thread except those in `set`. Does not add capabilities. Threads
/// that this thread starts later have the same capabilities.
fn keep(set: CapabilitySet) -> rustix::io::Result<()> {
    let has = capabilities(None)?;
    if has.effective.contains(CapabilitySet::SETPCAP) {
        for capability in 0..=last_capability() {
            remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << capability))?;
        }
    }
    // Ignore the error of Linux before 4.3, which has no ambient capabilities.
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

/// Raises the descriptor limit of this process to its hard limit and returns it. Returns `None` if
/// there is no limit.
pub fn raise_descriptor_limit() -> Option<u64> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        // Linux rejects a limit above fs.nr_open even for privileged processes.
        Err(_) => limit.current,
    }
}

#[cfg(test)]
mod tests {
    use rustix::thread::no_new_privs;

    use super::*;

    /// Runs `run` in a separate thread, so that the test's other threads keep their capabilities.
    fn in_a_thread<T: Send>(run: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| scope.spawn(run).join().unwrap())
    }

    #[test]
    fn thread_keeps_only_permitted_capabilities() {
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

    /// Environment variable of a child process that drops privileges irrevocably.
    const GIVES_UP: &str = "PERFVISOR_TEST_GIVES_UP";

    #[test]
    fn unprivileged_process_is_not_dumpable() {
        if std::env::var_os(GIVES_UP).is_some() {
            drop_privileges().unwrap();
            assert_eq!(dumpable_behavior().unwrap(), DumpableBehavior::NotDumpable);
            assert!(no_new_privs().unwrap());
            assert_eq!(capabilities(None).unwrap().permitted, CapabilitySet::empty());
            return drop_privileges().unwrap();
        }
        let name = "privileges::tests::unprivileged_process_is_not_dumpable";
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
    fn dropped_privileges_cannot_be_regained() {
        in_a_thread(|| {
            let all = capabilities(None).unwrap();
            drop_thread_capabilities();
            assert_eq!(capabilities(None).unwrap().permitted, CapabilitySet::empty());
            if !all.permitted.is_empty() {
                set_capabilities(None, all).unwrap_err();
            }
        });
    }

    #[test]
    fn thread_without_perfmon_capability_has_to_ask() {
        assert!(in_a_thread(|| {
            drop_thread_capabilities();
            !has_perfmon_capability()
        }));
    }

    #[test]
    fn probing_keeps_thread_capabilities() {
        let before = capabilities(None).unwrap();
        assert!(is_denied_without_capabilities(|| true));
        with_perfmon_capability(|| (), || ());
        assert_eq!(capabilities(None).unwrap(), before);
    }

    #[test]
    fn descriptor_limit_is_raised_to_hard_limit() {
        let raised = raise_descriptor_limit();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, raised);
        assert_eq!(raise_descriptor_limit(), raised, "once is enough");
    }
}
