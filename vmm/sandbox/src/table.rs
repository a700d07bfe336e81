//! System call filters of each thread kind as data, for the documentation and for tests that
//! compare this data with the filters of a running VM.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use syscalls::Sysno;

use crate::kind::{PerfEventAccess, SandboxedThreadKind};
use crate::lists;
use crate::rules::{AllowedSyscall, ArgumentCheck};

/// Result of a thread's system call, as decided by its filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SystemCallOutcome {
    /// The kernel executes the call.
    Allowed,
    /// The call fails with `EPERM`.
    Refused,
    /// The call fails with `ENOSYS`.
    Missing,
    /// The VM terminates.
    Ends,
}

/// Returns the result of system call `call` by a thread of `kind` in process `pid`.
#[must_use]
pub fn outcome(
    kind: SandboxedThreadKind,
    counting: PerfEventAccess,
    pid: u32,
    call: i64,
    arguments: [u64; 6],
) -> SystemCallOutcome {
    let on = |list: &[AllowedSyscall]| list.iter().any(|allowed| allowed.takes(call, arguments));
    if on(&lists::denied_calls(kind)) {
        SystemCallOutcome::Refused
    } else if call == i64::from(Sysno::clone3.id()) {
        SystemCallOutcome::Missing
    } else if on(&lists::of(kind, pid, counting)) {
        SystemCallOutcome::Allowed
    } else {
        SystemCallOutcome::Ends
    }
}

impl AllowedSyscall {
    fn takes(&self, call: i64, arguments: [u64; 6]) -> bool {
        let holds = |checks: &Vec<ArgumentCheck>| checks.iter().all(|check| check.holds(arguments));
        i64::from(self.call.id()) == call && (self.when.is_empty() || self.when.iter().any(holds))
    }
}

impl ArgumentCheck {
    fn holds(self, arguments: [u64; 6]) -> bool {
        let low = |at: u8| {
            arguments
                .get(usize::from(at))
                .map_or(0, |word| word & 0xffff_ffff)
        };
        match self {
            Self::Is(at, value) => low(at) == u64::from(value),
            Self::Not(at, value) => low(at) != u64::from(value),
            Self::Without(at, bits) => low(at) & bits == 0,
            Self::Bits(at, mask, bits) => low(at) & mask == bits,
        }
    }

    /// Returns the condition as text for the documentation, in which arguments are counted from 1.
    fn words(self) -> String {
        let number = |value: u64| match value {
            OWN => "own process".to_owned(),
            0..10 => value.to_string(),
            0xffff_ffff => "-1".to_owned(),
            _ => format!("{value:#x}"),
        };
        match self {
            Self::Is(at, value) => format!("{} = {}", at + 1, number(value.into())),
            Self::Not(at, value) => format!("{} ≠ {}", at + 1, number(value.into())),
            Self::Without(at, bits) => format!("{} has none of {}", at + 1, number(bits & 0xffff_ffff)),
            Self::Bits(at, mask, bits) => format!("{} & {} = {}", at + 1, number(mask), number(bits)),
        }
    }
}

/// Placeholder for the VM's process ID.
const OWN: u64 = 0x7fff_fffe;

/// Outcome of a call in each thread kind, in the order of [`SandboxedThreadKind::ALL`]. All calls
/// in a group have the same conditions on their arguments.
type CallOutcomes = [Option<SystemCallOutcome>; SandboxedThreadKind::ALL.len()];

/// Formats the filters of all thread kinds as a Markdown table. A call that the table does not
/// contain terminates the VM.
#[must_use]
pub fn markdown(counting: PerfEventAccess) -> String {
    let mut text = String::from("| system calls | arguments | threads |\n|---|---|---|\n");
    // Join rows that differ only in the conditions on their arguments, because these are
    // alternatives.
    let mut rows: BTreeMap<(Vec<String>, CallOutcomes), Vec<String>> = BTreeMap::new();
    for ((arguments, outcomes), calls) in grouped(counting) {
        rows.entry((calls, outcomes)).or_default().push(arguments);
    }
    for ((calls, outcomes), arguments) in rows {
        let (calls, arguments) = (calls.join(", "), arguments.join("; "));
        let _ = writeln!(text, "| {calls} | {arguments} | {} |", threads(&outcomes));
    }
    text
}

/// Lists the thread kinds that may make a call, and the thread kinds in which it fails with an
/// error.
fn threads(outcomes: &CallOutcomes) -> String {
    let labels = [
        (SystemCallOutcome::Allowed, ""),
        (SystemCallOutcome::Refused, "`EPERM`: "),
        (SystemCallOutcome::Missing, "`ENOSYS`: "),
    ];
    let lists = labels.into_iter().filter_map(|(outcome, label)| {
        let (with, without): (Vec<_>, Vec<_>) = SandboxedThreadKind::ALL
            .into_iter()
            .zip(outcomes)
            .partition(|(_, other)| **other == Some(outcome));
        let names = |kinds: &[(SandboxedThreadKind, _)]| {
            let names: Vec<&str> = kinds.iter().map(|(kind, _)| kind.name()).collect();
            names.join(", ")
        };
        match (with.len(), without.len()) {
            (0, _) => None,
            (_, 0) => Some(format!("{label}all")),
            (_, 1..=4) => Some(format!("{label}all but {}", names(&without))),
            _ => Some(format!("{label}{}", names(&with))),
        }
    });
    lists.collect::<Vec<_>>().join("; ")
}

/// Groups the calls that have the same arguments and outcomes. Requests of `ioctl(2)` with the same
/// type form one group.
fn grouped(counting: PerfEventAccess) -> BTreeMap<(String, CallOutcomes), Vec<String>> {
    let mut requests: BTreeMap<(u64, CallOutcomes), Vec<u64>> = BTreeMap::new();
    let mut rows: BTreeMap<(String, CallOutcomes), Vec<String>> = BTreeMap::new();
    for ((call, form), answers) in answers(counting) {
        match form {
            ArgumentForm::Request { kind, number } => {
                requests.entry((kind, answers)).or_default().push(number)
            }
            ArgumentForm::Words(words) => rows
                .entry((words, answers))
                .or_default()
                .push(format!("`{call}`")),
        }
    }
    for ((kind, answers), numbers) in requests {
        let numbers: Vec<String> = numbers.iter().map(|number| format!("{number:#04x}")).collect();
        let words = format!("requests of type {kind:#04x}: {}", numbers.join(", "));
        rows.entry((words, answers))
            .or_default()
            .push("`ioctl`".to_owned());
    }
    rows
}

/// Conditions that a rule imposes on the arguments of a call, by which the table groups its rules.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ArgumentForm {
    /// An `ioctl(2)` request, by type and number.
    Request { kind: u64, number: u64 },
    /// Other conditions on the arguments, as text.
    Words(String),
}

impl ArgumentForm {
    fn of(call: Sysno, checks: &[ArgumentCheck]) -> Self {
        match (call, checks) {
            (Sysno::ioctl, [ArgumentCheck::Bits(1, 0xffff, bits)]) => Self::Request {
                kind: bits >> 8,
                number: bits & 0xff,
            },
            _ => Self::Words(
                checks
                    .iter()
                    .map(|check| check.words())
                    .collect::<Vec<_>>()
                    .join(", "),
            ),
        }
    }
}

fn answers(counting: PerfEventAccess) -> BTreeMap<(String, ArgumentForm), CallOutcomes> {
    let mut answers: BTreeMap<(String, ArgumentForm), CallOutcomes> = BTreeMap::new();
    let own = u32::try_from(OWN).unwrap_or(0);
    for (at, kind) in SandboxedThreadKind::ALL.into_iter().enumerate() {
        let allowed = lists::of(kind, own, counting);
        // A call that is permitted with any arguments needs only one row.
        let any: Vec<Sysno> = allowed
            .iter()
            .filter(|a| a.when.is_empty())
            .map(|a| a.call)
            .collect();
        let lists = [
            (allowed, SystemCallOutcome::Allowed),
            (lists::denied_calls(kind), SystemCallOutcome::Refused),
        ];
        for (list, outcome) in lists {
            for AllowedSyscall { call, when } in list {
                let outcome = match call {
                    Sysno::clone3 if outcome == SystemCallOutcome::Allowed => SystemCallOutcome::Missing,
                    _ => outcome,
                };
                let forms = match when.as_slice() {
                    [] => vec![ArgumentForm::Words(String::new())],
                    _ if any.contains(&call) && outcome == SystemCallOutcome::Allowed => Vec::new(),
                    when => when.iter().map(|checks| ArgumentForm::of(call, checks)).collect(),
                };
                for form in forms {
                    let row = answers.entry((call.name().to_owned(), form)).or_default();
                    row[at] = row[at].max(Some(outcome));
                }
            }
        }
    }
    answers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_lists_each_call_with_outcomes() {
        let text = markdown(PerfEventAccess::Broker);
        let row = |call: &str| {
            let mut rows = text.lines().filter(|line| line.contains(call));
            rows.next().unwrap_or_default().to_owned()
        };
        assert!(
            row("`epoll_ctl`").ends_with("| all but profiler, console, signals |"),
            "{text}"
        );
        assert!(row("`sched_setaffinity`").ends_with("| starter |"), "{text}");
        assert!(
            row("`clone3`").ends_with("| `EPERM`: all but starter; `ENOSYS`: starter |"),
            "{text}"
        );
        assert!(
            !text.contains("`perf_event_open`") && !text.contains("`execve`"),
            "{text}"
        );
        assert!(row("`tgkill`").contains("1 = own process"), "{text}");
        assert!(row("requests of type 0xae: 0x80").contains("`ioctl`"), "{text}");
        assert!(markdown(PerfEventAccess::OwnThread).contains("`perf_event_open`"));
    }

    #[test]
    fn outcomes_match_filters() {
        let of = |kind, call: Sysno, arguments| {
            outcome(kind, PerfEventAccess::Broker, 7, i64::from(call.id()), arguments)
        };
        let vcpu = SandboxedThreadKind::Vcpu;
        assert_eq!(of(vcpu, Sysno::read, [0; 6]), SystemCallOutcome::Allowed);
        assert_eq!(of(vcpu, Sysno::execve, [0; 6]), SystemCallOutcome::Ends);
        assert_eq!(of(vcpu, Sysno::clone3, [0; 6]), SystemCallOutcome::Refused);
        assert_eq!(
            of(SandboxedThreadKind::Starter, Sysno::clone3, [0; 6]),
            SystemCallOutcome::Missing
        );
        assert_eq!(
            of(vcpu, Sysno::perf_event_open, [0, 0, u64::MAX, u64::MAX, 8, 0]),
            SystemCallOutcome::Ends
        );
        assert_eq!(
            of(vcpu, Sysno::tgkill, [7, 7, 0, 0, 0, 0]),
            SystemCallOutcome::Allowed
        );
        assert_eq!(
            of(vcpu, Sysno::tgkill, [8, 8, 0, 0, 0, 0]),
            SystemCallOutcome::Ends
        );
    }
}
