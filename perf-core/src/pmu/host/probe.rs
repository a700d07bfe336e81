//! Detection of the host's PMU and of its capabilities.
#![expect(unsafe_code, reason = "system calls, and memory shared with the kernel")]

use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;

use perf_event_open_sys::bindings as b;
use serde::{Deserialize, Serialize};

use super::counters::{HostCounters, ProbeEvent, ProbePmu};
use super::fd::{PerfFd, bytes_of, current_tid, new_attr};
use super::hybrid;
use super::opener::{EventOpenRequest, HostEventOpener, HostEventTarget};
use crate::pmu::MEDIATED_NEIGHBOUR;

/// Generic hardware events of `perf_event_open(2)`: perf's names and `config` values.
const GENERIC: [(&str, u32); 10] = [
    ("cycles", b::PERF_COUNT_HW_CPU_CYCLES),
    ("instructions", b::PERF_COUNT_HW_INSTRUCTIONS),
    ("cache-references", b::PERF_COUNT_HW_CACHE_REFERENCES),
    ("cache-misses", b::PERF_COUNT_HW_CACHE_MISSES),
    ("branches", b::PERF_COUNT_HW_BRANCH_INSTRUCTIONS),
    ("branch-misses", b::PERF_COUNT_HW_BRANCH_MISSES),
    ("bus-cycles", b::PERF_COUNT_HW_BUS_CYCLES),
    (
        "stalled-cycles-frontend",
        b::PERF_COUNT_HW_STALLED_CYCLES_FRONTEND,
    ),
    ("stalled-cycles-backend", b::PERF_COUNT_HW_STALLED_CYCLES_BACKEND),
    ("ref-cycles", b::PERF_COUNT_HW_REF_CPU_CYCLES),
];

/// Values of `config` of the generic events that advance whenever a thread runs.
const ALWAYS_COUNTED: [u32; 5] = [
    b::PERF_COUNT_HW_CPU_CYCLES,
    b::PERF_COUNT_HW_INSTRUCTIONS,
    b::PERF_COUNT_HW_BRANCH_INSTRUCTIONS,
    b::PERF_COUNT_HW_BUS_CYCLES,
    b::PERF_COUNT_HW_REF_CPU_CYCLES,
];

/// A generic hardware event, and whether it can count a guest on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenericEvent {
    /// Name that perf uses for the event.
    pub name: String,
    /// Value of `config` for the event.
    pub config: u64,
    /// `true` if the event can be opened for a guest and counts. Whether it counts is tested only
    /// for events that advance whenever code runs, because the virtual PMU of a host that is itself
    /// a guest may open an event without counting it.
    pub opens: bool,
}

/// Capabilities of the host's perf events, probed on the calling thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPerfCapabilities {
    /// `true` if the host has a hardware PMU whose events this process may count.
    pub hardware_pmu: bool,
    /// Counters that are available to one thread of the host.
    pub counters: HostCounters,
    /// Reason why there are no slots, in one line, or `None` if there are slots.
    pub no_slots_because: Option<String>,
    /// `true` if the host has several types of cores, each with its own PMU. None of these PMUs is
    /// used.
    pub hybrid: bool,
    /// Value of `/proc/sys/kernel/perf_event_paranoid`, or `None` if it cannot be read.
    pub paranoid: Option<i32>,
    /// `true` if `/proc/sys/kernel/nmi_watchdog` is enabled.
    pub nmi_watchdog: bool,
    /// `true` if the host currently rejects events that count a guest, because it reserves its PMU
    /// for guests with a mediated vPMU.
    pub mediated: bool,
    /// `true` if user space can read counters with `rdpmc`.
    pub user_read: bool,
    /// `true` if the host can open software clock events that overflow. The `clock` driver requires
    /// such events.
    pub software_clock: bool,
    /// Names of the PMUs that the kernel lists, such as `cpu` and `software`.
    pub pmus: Vec<String>,
    /// Generic hardware events, each with the result of opening it.
    pub generic: Vec<GenericEvent>,
}

impl HostPerfCapabilities {
    /// Probes this host. Opens temporary events on the calling thread, which takes a few
    /// milliseconds.
    #[must_use]
    pub fn run() -> Self {
        let hybrid = hybrid::refusal(Path::new(DEVICES));
        let nmi_watchdog = read_number::<i32>("/proc/sys/kernel/nmi_watchdog").unwrap_or(0) > 0;
        let mut probe = Self::of_events(&mut ThreadProbe, hybrid, nmi_watchdog);
        probe.user_read = probe.slots() > 0 && is_rdpmc_usable();
        probe
    }

    /// Probes hardware events through `host`, and all other properties on this host itself.
    fn of_events(host: &mut impl ProbeEvents, hybrid: Option<String>, nmi_watchdog: bool) -> Self {
        let opened: Vec<_> = GENERIC
            .iter()
            .map(|&(name, config)| (name, config, host.open_guest(config)))
            .collect();
        let mediated = opened.iter().any(|(_, _, r)| is_mediated(r))
            && GENERIC.iter().any(|&(_, c)| host.opens_on_host(c));
        let software_clock = opened.iter().any(|(_, _, r)| is_unknown(r)) || open_clock().is_ok();
        let first_error = opened
            .iter()
            .find_map(|(_, _, r)| r.as_ref().err().map(io::Error::to_string));
        let generic: Vec<_> = opened
            .into_iter()
            .map(|(name, config, r)| GenericEvent {
                name: name.to_owned(),
                config: u64::from(config),
                opens: r.is_ok() && (!ALWAYS_COUNTED.contains(&config) || host.counts(config)),
            })
            .collect();
        // No host counter can count a guest while a mediated guest runs, although host-only events
        // still open.
        let counters = match &hybrid {
            None if !mediated => HostCounters::find(host, nmi_watchdog),
            _ => HostCounters::default(),
        };
        let slots = counters.free();
        let no_slots_because = (slots == 0).then(|| {
            if let Some(line) = &hybrid {
                line.clone()
            } else if mediated {
                MEDIATED_NEIGHBOUR.to_owned()
            } else {
                match first_error {
                    Some(e) => format!("the host opens no hardware event: {e}"),
                    None => "every hardware counter is taken".to_owned(),
                }
            }
        });
        Self {
            hardware_pmu: hybrid.is_none() && !mediated && (slots > 0 || generic.iter().any(|g| g.opens)),
            counters,
            no_slots_because,
            hybrid: hybrid.is_some(),
            paranoid: read_number("/proc/sys/kernel/perf_event_paranoid"),
            nmi_watchdog,
            mediated,
            user_read: false,
            software_clock,
            pmus: list_pmus(),
            generic,
        }
    }

    /// Returns the number of free hardware counters, general-purpose and fixed-function.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.counters.free()
    }
}

/// Returns `true` if the host kernel supports the `PERF_TYPE_HW_CACHE` event `config` for counting
/// a guest. Opens a temporary event on the calling thread.
#[must_use]
pub fn cache_event_opens(config: u64) -> bool {
    let mut attr = new_attr(b::PERF_TYPE_HW_CACHE, config);
    attr.set_disabled(1);
    attr.set_exclude_host(1);
    PerfFd::open(&mut attr, 0).is_ok()
}

/// Returns `true` if the calling thread lacks the capability to count itself including the kernel
/// (`EACCES` or `EPERM`, perf_event_open(2)). Tests a software event, so no PMU is needed.
#[must_use]
pub fn counting_is_denied() -> bool {
    let mut attr = new_attr(b::PERF_TYPE_SOFTWARE, u64::from(b::PERF_COUNT_SW_DUMMY));
    attr.set_disabled(1);
    matches!(PerfFd::open(&mut attr, 0), Err(e) if e.kind() == io::ErrorKind::PermissionDenied)
}

/// Returns the result of [`counting_is_denied`] for events of the calling thread that `opener`
/// opens.
#[must_use]
pub fn counting_is_denied_to(opener: &dyn HostEventOpener) -> bool {
    let mut attr = new_attr(b::PERF_TYPE_SOFTWARE, u64::from(b::PERF_COUNT_SW_DUMMY));
    attr.set_disabled(1);
    let request = EventOpenRequest {
        attr: bytes_of(&attr),
        counted: HostEventTarget::Thread(current_tid()),
        leader: None,
        overflow: None,
    };
    matches!(opener.open(&request), Err(e) if e.kind() == io::ErrorKind::PermissionDenied)
}

/// Directory in which the kernel lists its PMUs (sysfs).
const DEVICES: &str = "/sys/bus/event_source/devices";

/// Makes the process ignore `SIGIO` unless it already has a disposition for this signal.
///
/// The kernel sends `SIGIO` instead of an overflow's real-time signal if the queue of real-time
/// signals is full. The default action of `SIGIO` terminates the process.
///
/// # Errors
/// Returns the error of `sigaction(2)`.
pub fn ignore_sigio() -> io::Result<()> {
    // SAFETY: a zeroed sigaction is valid: default disposition, empty mask.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: `now` is writable, and no new action is passed.
    if unsafe { libc::sigaction(libc::SIGIO, std::ptr::null(), &mut now) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if now.sa_sigaction != libc::SIG_DFL {
        return Ok(());
    }
    now.sa_sigaction = libc::SIG_IGN;
    // SAFETY: `now` is a valid action that installs no handler.
    if unsafe { libc::sigaction(libc::SIGIO, &now, std::ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

fn is_mediated(opened: &io::Result<()>) -> bool {
    matches!(opened, Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EBUSY)))
}

/// Returns `true` if an event could not be opened because the kernel has no PMU for it (`ENOENT`).
///
/// This error also proves that a software clock is permitted, because the kernel checks the
/// caller's privileges before it searches for the PMU, and the attributes of [`open_clock`] require
/// the same privileges. The clock is not opened, because the first event of an idle host waits for
/// an RCU grace period, 10 to 15 ms (Linux, `account_event`).
fn is_unknown(opened: &io::Result<()>) -> bool {
    matches!(opened, Err(e) if e.raw_os_error() == Some(libc::ENOENT))
}

/// Opens a generic event that counts this thread in host user mode. This requires no privilege.
fn open_host(config: u32) -> io::Result<PerfFd> {
    let mut attr = host_attr(config);
    PerfFd::open(&mut attr, 0)
}

/// Returns `true` if `config` advances while this thread runs. Kernel mode is counted too if this
/// is permitted, because a counter restricted to one privilege level may advance with a delay.
fn counts(config: u32) -> bool {
    let mut attr = host_attr(config);
    attr.set_exclude_kernel(0);
    let opened = PerfFd::open(&mut attr, 0).or_else(|_| open_host(config));
    let Ok(fd) = opened else { return false };
    for _ in 0..10_000 {
        std::hint::spin_loop();
    }
    matches!(fd.read_count(), Ok(Some(1..)))
}

fn host_attr(config: u32) -> b::perf_event_attr {
    let mut attr = new_attr(b::PERF_TYPE_HARDWARE, u64::from(config));
    on_host_user_mode(&mut attr);
    attr
}

fn on_host_user_mode(attr: &mut b::perf_event_attr) {
    attr.set_exclude_guest(1);
    attr.set_exclude_kernel(1);
    attr.set_exclude_hv(1);
}

fn open_clock() -> io::Result<PerfFd> {
    let mut attr = new_attr(b::PERF_TYPE_SOFTWARE, u64::from(b::PERF_COUNT_SW_TASK_CLOCK));
    attr.__bindgen_anon_1.sample_period = super::PARKED_PERIOD;
    attr.set_disabled(1);
    PerfFd::open(&mut attr, 0)
}

/// The host on which a probe opens hardware events, real or simulated.
trait ProbeEvents: ProbePmu {
    /// Checks that a generic event that counts the guests of this thread can be opened. Closes the
    /// event.
    fn open_guest(&mut self, config: u32) -> io::Result<()>;
    /// Returns `true` if the host can open a generic event that does not count guests.
    fn opens_on_host(&mut self, config: u32) -> bool;
    /// Returns `true` if a generic event on this thread advances.
    fn counts(&mut self, config: u32) -> bool;
}

/// The host of the calling thread. Events count host user mode, which requires no privilege.
struct ThreadProbe;

impl ProbeEvents for ThreadProbe {
    fn open_guest(&mut self, config: u32) -> io::Result<()> {
        let mut attr = new_attr(b::PERF_TYPE_HARDWARE, u64::from(config));
        attr.set_disabled(1);
        attr.set_exclude_host(1);
        PerfFd::open(&mut attr, 0).map(drop)
    }

    fn opens_on_host(&mut self, config: u32) -> bool {
        open_host(config).is_ok()
    }

    fn counts(&mut self, config: u32) -> bool {
        counts(config)
    }
}

impl ThreadProbe {
    fn attr(event: ProbeEvent) -> b::perf_event_attr {
        let mut attr = new_attr(event.ty.0, event.config);
        on_host_user_mode(&mut attr);
        attr
    }
}

impl ProbePmu for ThreadProbe {
    fn count_together(&mut self, events: &[ProbeEvent]) -> bool {
        let mut on = Vec::with_capacity(events.len());
        events.iter().all(|&event| {
            let mut attr = Self::attr(event);
            attr.set_pinned(1);
            match PerfFd::open(&mut attr, 0) {
                // An event in the error state reads as end of file.
                Ok(fd) if matches!(fd.read_count(), Ok(Some(_))) => {
                    on.push(fd);
                    true
                }
                _ => false,
            }
        })
    }

    fn fit_one_group(&mut self, events: &[ProbeEvent]) -> bool {
        let mut group: Vec<PerfFd> = Vec::with_capacity(events.len());
        events.iter().all(|&event| {
            let mut attr = Self::attr(event);
            attr.set_disabled(group.is_empty().into());
            match PerfFd::open_in_group(&mut attr, HostEventTarget::Thread(0), group.first(), None) {
                Ok(fd) => {
                    group.push(fd);
                    true
                }
                Err(_) => false,
            }
        })
    }
}

/// Returns `true` if user space can read a counter with `rdpmc` and the value is correct.
///
/// The control page alone does not prove this, because a kernel that is itself a guest may offer
/// `rdpmc` although the instruction faults or reads a wrong value. Therefore a child process, which
/// may crash, executes the instruction and compares the value with the kernel's counts before and
/// after.
fn is_rdpmc_usable() -> bool {
    /// Number of comparisons. A wrong value may match by chance once, but hardly this often.
    const TRIES: usize = 64;
    let mut attr = host_attr(b::PERF_COUNT_HW_CPU_CYCLES);
    attr.set_pinned(1);
    succeeds_in_child(|| {
        let Ok(fd) = PerfFd::open(&mut attr, 0) else {
            return false;
        };
        let Ok(map) = fd.map(None) else {
            return false;
        };
        let kernel = || fd.read_count().ok().flatten();
        let mut last = 0;
        (0..TRIES).all(|_| {
            let (Some(before), Some(here), Some(after)) = (kernel(), map.user_read(), kernel()) else {
                return false;
            };
            let right = before <= here && here <= after && last <= before;
            last = after;
            right
        }) && last > 0
    })
}

/// Calls `attempt` in a forked child process. Returns `true` if `attempt` returned `true` and the
/// child did not crash. `attempt` may only make system calls, because other threads' locks,
/// including the allocator's, may remain locked in the child.
fn succeeds_in_child(attempt: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only makes system calls (see above) and exits with `_exit`, so it runs no
    // destructors or exit handlers of this process.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: SIG_DFL installs no handler; a fault ends the child without running a handler of
        // the parent.
        unsafe {
            libc::signal(libc::SIGSEGV, libc::SIG_DFL);
            libc::signal(libc::SIGILL, libc::SIG_DFL);
        }
        let code = i32::from(!attempt());
        // SAFETY: `_exit` never returns and has no preconditions.
        unsafe { libc::_exit(code) };
    }
    if pid < 0 {
        return false;
    }
    let mut status = 0;
    loop {
        // SAFETY: `status` is writable and `pid` is our child.
        let rc = unsafe { libc::waitpid(pid, &mut status, 0) };
        if rc == pid {
            return libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return false;
        }
    }
}

fn read_number<T: FromStr>(path: &str) -> Option<T> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn list_pmus() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(DEVICES)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_is_consistent() {
        let probe = HostPerfCapabilities::run();
        assert_eq!(probe.slots() == 0, probe.no_slots_because.is_some());
        assert!(!probe.user_read || probe.slots() > 0);
        assert_eq!(probe.slots(), probe.counters.mask().len());
        assert!(probe.hardware_pmu || probe.generic.iter().all(|g| !g.opens));
    }

    /// A simulated host that rejects events that count guests with the given errno, as Linux 7.0
    /// does while a VM with a mediated vPMU is running. Host-only events can still be opened.
    struct MediatedHost(i32);

    impl ProbePmu for MediatedHost {
        fn count_together(&mut self, events: &[ProbeEvent]) -> bool {
            events.len() <= 4
        }

        fn fit_one_group(&mut self, events: &[ProbeEvent]) -> bool {
            events.len() <= 4
        }
    }

    impl ProbeEvents for MediatedHost {
        fn open_guest(&mut self, _: u32) -> io::Result<()> {
            Err(io::Error::from_raw_os_error(self.0))
        }

        fn opens_on_host(&mut self, _: u32) -> bool {
            true
        }

        fn counts(&mut self, _: u32) -> bool {
            true
        }
    }

    /// While a VM with a mediated vPMU is running, the probe reports that events cannot count a
    /// guest, so that automatic driver selection (`auto`) uses the clock.
    #[test]
    fn host_with_mediated_neighbour_has_no_pmu_for_guests() {
        let probe = HostPerfCapabilities::of_events(&mut MediatedHost(libc::EOPNOTSUPP), None, false);
        assert!(
            probe.mediated && !probe.hardware_pmu && probe.slots() == 0,
            "{probe:?}"
        );
        assert_eq!(probe.no_slots_because.as_deref(), Some(MEDIATED_NEIGHBOUR));
        assert!(probe.generic.iter().all(|generic| !generic.opens));
        let other = HostPerfCapabilities::of_events(&mut MediatedHost(libc::ENOENT), None, false);
        assert!(!other.mediated && other.slots() > 0, "{other:?}");
    }

    /// The probe derives from the results for hardware events whether a software clock can be
    /// opened. The result agrees with an actual attempt.
    #[test]
    fn software_clock_is_reported_if_it_opens() {
        assert_eq!(HostPerfCapabilities::run().software_clock, open_clock().is_ok());
    }

    #[test]
    fn probe_survives_a_round_trip_through_json() {
        let probe = HostPerfCapabilities::run();
        let text = serde_json::to_string(&probe).unwrap();
        assert_eq!(
            serde_json::from_str::<HostPerfCapabilities>(&text).unwrap(),
            probe
        );
    }

    #[test]
    fn faulting_child_does_not_affect_parent() {
        assert!(!succeeds_in_child(|| {
            // SAFETY: raising a signal accesses no memory; the default action ends only the child.
            unsafe { libc::raise(libc::SIGSEGV) };
            true
        }));
        assert!(succeeds_in_child(|| true));
        assert!(!succeeds_in_child(|| false));
    }
}
