//! System call filters of each thread kind as data, for the documentation and for tests that
//! compare the filters of a running VM.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use syscalls::Sysno;

use crate::kind::{Counting, ThreadKind};
use crate::lists;
use crate::rules::{Allowed, Check};

/// Result of a thread's system call, as decided by its filters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The kernel executes the call.
    Allowed,
    /// The call fails with `EPERM`.
    Refused,
    /// The call fails with `ENOSYS`.
    Missing,
    /// The VM is terminated.
    Ends,
}

/// Returns the result of system call `call` by a thread of `kind` in process `pid`.
#[must_use]
pub fn outcome(kind: ThreadKind, counting: Counting, pid: u32, call: i64, arguments: [u64; 6]) -> Outcome {
    let on = |list: &[Allowed]| list.iter().any(|allowed| allowed.takes(call, arguments));
    if on(&lists::refused(kind)) {
        Outcome::Refused
    } else if call == i64::from(Sysno::clone3.id()) {
        Outcome::Missing
    } else if on(&lists::of(kind, pid, counting)) {
        Outcome::Allowed
    } else {
        Outcome::Ends
    }
}

impl Allowed {
    fn takes(&self, call: i64, arguments: [u64; 6]) -> bool {
        let holds = |checks: &Vec<Check>| checks.iter().all(|check| check.holds(arguments));
        i64::from(self.call.id()) == call && (self.when.is_empty() || self.when.iter().any(holds))
    }
}

impl Check {
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

    /// Returns the condition as text. Arguments are counted from 1.
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

/// Results of a call with one form of arguments, in the order of [`ThreadKind::ALL`].
type Answers = [Option<Outcome>; ThreadKind::ALL.len()];

/// Formats the filters of all kinds as a Markdown table. A call without an entry terminates the VM.
#[must_use]
pub fn markdown(counting: Counting) -> String {
    let mut text = String::from("| system calls | arguments |");
    for kind in ThreadKind::ALL {
        let _ = write!(text, " {kind} |");
    }
    text.push_str("\n|---|---|");
    text.push_str(&"---|".repeat(ThreadKind::ALL.len()));
    text.push('\n');
    for ((arguments, answers), calls) in grouped(counting) {
        let _ = write!(text, "| {} | {arguments} |", calls.join(", "));
        for answer in answers {
            text.push_str(match answer {
                Some(Outcome::Allowed) => " yes |",
                Some(Outcome::Refused) => " `EPERM` |",
                Some(Outcome::Missing) => " `ENOSYS` |",
                Some(Outcome::Ends) | None => " |",
            });
        }
        text.push('\n');
    }
    text
}

/// Groups calls with the same arguments and results, and ioctl requests of the same type.
fn grouped(counting: Counting) -> BTreeMap<(String, Answers), Vec<String>> {
    let mut requests: BTreeMap<(u64, Answers), Vec<u64>> = BTreeMap::new();
    let mut rows: BTreeMap<(String, Answers), Vec<String>> = BTreeMap::new();
    for ((call, form), answers) in answers(counting) {
        match form {
            Form::Request { kind, number } => requests.entry((kind, answers)).or_default().push(number),
            Form::Words(words) => rows
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

/// The form of the arguments in a rule.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Form {
    /// An `ioctl(2)` request, by type and number.
    Request { kind: u64, number: u64 },
    /// Other conditions, as text.
    Words(String),
}

impl Form {
    fn of(call: Sysno, checks: &[Check]) -> Self {
        match (call, checks) {
            (Sysno::ioctl, [Check::Bits(1, 0xffff, bits)]) => Self::Request {
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

fn answers(counting: Counting) -> BTreeMap<(String, Form), Answers> {
    let mut answers: BTreeMap<(String, Form), Answers> = BTreeMap::new();
    let own = u32::try_from(OWN).unwrap_or(0);
    for (at, kind) in ThreadKind::ALL.into_iter().enumerate() {
        let allowed = lists::of(kind, own, counting);
        // A call that is permitted with any arguments needs only one row.
        let any: Vec<Sysno> = allowed
            .iter()
            .filter(|a| a.when.is_empty())
            .map(|a| a.call)
            .collect();
        let lists = [
            (allowed, Outcome::Allowed),
            (lists::refused(kind), Outcome::Refused),
        ];
        for (list, outcome) in lists {
            for Allowed { call, when } in list {
                let outcome = match call {
                    Sysno::clone3 if outcome == Outcome::Allowed => Outcome::Missing,
                    _ => outcome,
                };
                let forms = match when.as_slice() {
                    [] => vec![Form::Words(String::new())],
                    _ if any.contains(&call) && outcome == Outcome::Allowed => Vec::new(),
                    when => when.iter().map(|checks| Form::of(call, checks)).collect(),
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
    fn the_table_names_each_call_with_its_answers() {
        let text = markdown(Counting::Broker);
        let row = |call: &str| {
            let mut rows = text.lines().filter(|line| line.contains(call));
            rows.next().unwrap_or_default().to_owned()
        };
        assert!(row("`epoll_ctl`").contains("| yes | yes |"), "{text}");
        assert!(
            !text.contains("`perf_event_open`") && !text.contains("`execve`"),
            "{text}"
        );
        assert!(row("`tgkill`").contains("1 = own process"), "{text}");
        assert!(row("requests of type 0xae: 0x80").contains("`ioctl`"), "{text}");
        assert!(markdown(Counting::OwnThread).contains("`perf_event_open`"));
    }

    #[test]
    fn outcomes_are_those_of_the_filters() {
        let of = |kind, call: Sysno, arguments| {
            outcome(kind, Counting::Broker, 7, i64::from(call.id()), arguments)
        };
        let vcpu = ThreadKind::Vcpu;
        assert_eq!(of(vcpu, Sysno::read, [0; 6]), Outcome::Allowed);
        assert_eq!(of(vcpu, Sysno::execve, [0; 6]), Outcome::Ends);
        assert_eq!(of(vcpu, Sysno::clone3, [0; 6]), Outcome::Refused);
        assert_eq!(of(ThreadKind::Starter, Sysno::clone3, [0; 6]), Outcome::Missing);
        assert_eq!(
            of(vcpu, Sysno::perf_event_open, [0, 0, u64::MAX, u64::MAX, 8, 0]),
            Outcome::Ends
        );
        assert_eq!(of(vcpu, Sysno::tgkill, [7, 7, 0, 0, 0, 0]), Outcome::Allowed);
        assert_eq!(of(vcpu, Sysno::tgkill, [8, 8, 0, 0, 0, 0]), Outcome::Ends);
    }
}
