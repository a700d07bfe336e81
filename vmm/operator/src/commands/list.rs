//! `perfvisor list`: lists the events accepted by `stat`, `record` and `top`, like `perf list`.
//! Vendor events are taken from the installed `perf`.

use std::error::Error;
use std::fmt::Write as _;

use clap::Args;

use super::countable::CountableEvents;
use super::{DONE, OperatorCommandError, connect, print};
use crate::exit::ExitStatus;
use crate::vendor::cpu::CpuName;
use crate::vendor::{self, EventSelector, PerfError, VendorEvent, VendorEventTable};
use control_api::events::names;
use control_api::nearest::did_you_mean;
use control_api::protocol::OpenedEvent;
use control_api::request;
use perf_core::error_line;

/// `perfvisor list`.
#[derive(Clone, Debug, Args)]
pub struct ListArgs {
    /// Show only these types of events (hw, cache, sw, pv, kvm, vendor, raw), or events whose names
    /// contain this text or match it as a pattern with * and ?, for example 'l1d*miss'.
    #[arg(value_name = "WHAT")]
    pub what: Vec<String>,
    /// Show vendor events of this processor, in perf's notation, for example GenuineIntel-6-8E-9 or
    /// AuthenticAMD-25-1-0 [default: this host's]
    #[arg(long, value_name = "VENDOR-FAMILY-MODEL-STEPPING")]
    pub cpuid: Option<CpuName>,
    /// Show only vendor events that can be counted on this VM. Each event is tested.
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
}

/// Word that selects vendor events in `perfvisor list`, which are listed with code and description.
const VENDOR: &str = "vendor";
/// Line printed before the vendor events if this host cannot count them.
const NOT_COUNTED: &str = "  (this host has no PMU that counts the following)\n";
/// Maximum length of the description of a vendor event, in characters.
const MAX_DESCRIPTION_CHARS: usize = 100;
/// Number of events that are opened on a VM at a time.
const OPEN_BATCH: usize = 32;

/// Event types of `perfvisor list`: the word that selects the type, and the text printed after the
/// name of each event of the type.
const KINDS: [(&str, &str); 7] = [
    ("hw", "Hardware event"),
    ("cache", "Hardware cache event"),
    ("sw", "Software event of the vCPU's thread"),
    ("pv", "Paravirtual event: what the hypervisor did"),
    ("kvm", "KVM statistic"),
    (VENDOR, ""),
    ("raw", "Raw event"),
];

/// Errors of `perfvisor list`.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    #[error(transparent)]
    Command(#[from] OperatorCommandError),
    #[error("no event matches '{0}'{1}; perfvisor list shows all events")]
    Nothing(String, String),
    #[error("no event matches '{0}', and the vendor's events are unavailable")]
    VendorUnknown(String, #[source] PerfError),
    #[error("the names of the vendor's events are unavailable")]
    NoVendor(#[source] PerfError),
    #[error("VM {vm} cannot count any of these {tried} events: {why}")]
    NoneCounted { vm: String, tried: usize, why: String },
}

/// Prints the events that `args` selects. `statistics` returns the names of the host's KVM
/// statistics.
///
/// # Errors
/// Returns [`ListError`] if no event matches or the vendor events are unavailable.
pub fn list<E: Error>(
    args: &ListArgs,
    statistics: impl Fn() -> Result<Vec<String>, E>,
) -> Result<ExitStatus, ListError> {
    let (mut kinds, words): (Vec<&str>, Vec<&str>) = args
        .what
        .iter()
        .map(String::as_str)
        .partition(|word| KINDS.iter().any(|(kind, _)| kind == word));
    // `--cpuid` and `--vm` apply to vendor events, so they imply `vendor`.
    if (args.cpuid.is_some() || args.vm.is_some()) && !kinds.contains(&VENDOR) {
        kinds.push(VENDOR);
    }
    let shows = |kind: &str| kinds.is_empty() || kinds.contains(&kind);
    let wanted = |event: &str| words.is_empty() || words.iter().any(|word| matches(word, event));
    let (mut out, mut names, mut unknown) = (String::new(), Vec::new(), None);
    let mut vendor_note = None;
    let countable = CountableEvents::of_host();
    for (kind, what) in KINDS.into_iter().filter(|(kind, _)| shows(kind)) {
        let events = match kind {
            "kvm" => kvm_statistics(&statistics),
            VENDOR => match vendor::events_of(&args.cpuid.clone().unwrap_or_else(CpuName::host)) {
                Ok(VendorEventTable { events, note }) => {
                    vendor_note = note;
                    names.extend(events.iter().map(|event| event.name.clone()));
                    let events: Vec<_> = events.into_iter().filter(|event| wanted(&event.name)).collect();
                    let of_host = args.vm.is_none() && args.cpuid.is_none();
                    if of_host && !countable.has_pmu() && !events.is_empty() {
                        out += NOT_COUNTED;
                    }
                    out += &format_vendor_events(events, args.vm.as_deref())?;
                    continue;
                }
                Err(error) if kinds.contains(&VENDOR) => return Err(ListError::NoVendor(error)),
                Err(error) => {
                    unknown = Some(error);
                    continue;
                }
            },
            kind => events_of_kind(kind),
        };
        names.extend(events.iter().cloned());
        let events: Vec<&String> = events.iter().filter(|event| wanted(event)).collect();
        out += &format_events(&events, what, &countable);
    }
    if out.is_empty()
        && let [word, ..] = words[..]
    {
        let meant = suggest_event(word, &names);
        let words = words.join("' or '");
        return Err(match unknown {
            Some(error) if meant.is_empty() => ListError::VendorUnknown(words, error),
            _ => ListError::Nothing(words, meant),
        });
    }
    if let Some(note) = vendor_note {
        log::warn!("{note}");
    }
    if let Some(error) = unknown.filter(|_| words.is_empty()) {
        log::warn!("the vendor's events are unavailable: {}", error_line(&error));
    }
    print(&out).map_err(OperatorCommandError::from)?;
    Ok(DONE)
}

/// Returns the names of the host's KVM statistics. Logs a warning if there are none.
fn kvm_statistics<E: Error>(statistics: impl Fn() -> Result<Vec<String>, E>) -> Vec<String> {
    statistics().unwrap_or_else(|e| {
        log::warn!("KVM statistics are unavailable: {}", error_line(&e));
        Vec::new()
    })
}

/// Formats events of one kind, which `what` describes, as lines of text.
fn format_events(events: &[&String], what: &str, countable: &CountableEvents) -> String {
    let mut out = String::new();
    for event in events {
        let mark = countable.mark(event);
        let _ = writeln!(out, "  {event:<48} [{what}]{mark}");
    }
    if !events.is_empty() {
        out.push('\n');
    }
    out
}

/// Returns a hint with the event or kind of events whose name is similar to `word`, or an empty
/// text. `names` are the names of events, each with its aliases.
fn suggest_event(word: &str, names: &[String]) -> String {
    let known = names.iter().flat_map(|name| name.split(" OR "));
    did_you_mean(word, known.chain(KINDS.iter().map(|(kind, _)| *kind)))
}

/// Returns whether an event name, or one of its aliases, contains `word` or matches it as a pattern
/// with `*` and `?`. Ignores case, as perf does.
fn matches(word: &str, names: &str) -> bool {
    let (word, names) = (word.to_lowercase(), names.to_lowercase());
    if word.contains(['*', '?']) {
        names
            .split(" or ")
            .any(|name| glob(word.as_bytes(), name.as_bytes()))
    } else {
        names.contains(&word)
    }
}

/// Returns whether `name` matches a glob pattern with `*` and `?`. Examines each byte of `name` at
/// most once per `*`.
fn glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // Position after the last star, and position in the name from which to retry.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                p += 1;
                star = Some((p, n));
            }
            Some(c) if *c == b'?' || *c == name[n] => (p, n) = (p + 1, n + 1),
            _ => {
                let Some((behind, from)) = star else {
                    return false;
                };
                (p, n) = (behind, from + 1);
                star = Some((behind, from + 1));
            }
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

/// Formats the vendor events with name, code and description. Omits events that the event-select
/// register cannot express, and prints their number. With `vm`, lists only events that this VM can
/// count.
fn format_vendor_events(events: Vec<VendorEvent>, vm: Option<&str>) -> Result<String, ListError> {
    let mut plain = Vec::new();
    let mut others = Vec::new();
    for event in events {
        match event.select {
            Ok(select) => plain.push((event.name, select, event.description)),
            Err(term) => others.push((event.name, term)),
        }
    }
    if let Some(vm) = vm {
        plain = counted(plain, vm)?;
    }
    let mut out = String::new();
    for (name, select, description) in &plain {
        let _ = writeln!(
            out,
            "  {name:<48} {:<12} {}",
            select.raw(),
            truncate_description(description)
        );
    }
    if let Some((name, term)) = others.first() {
        let _ = writeln!(
            out,
            "  ({} more need a register beside the selector and cannot be counted by name: {name} needs {term})",
            others.len()
        );
    }
    if !out.is_empty() {
        out.push('\n');
    }
    Ok(out)
}

/// Returns the events that the VM can open. Closing the connection closes the events.
fn counted(
    events: Vec<(String, EventSelector, String)>,
    vm: &str,
) -> Result<Vec<(String, EventSelector, String)>, ListError> {
    let (mut can, mut why) = (Vec::new(), None);
    let tried = events.len();
    let mut events = events.into_iter().peekable();
    while events.peek().is_some() {
        let some: Vec<_> = events.by_ref().take(OPEN_BATCH).collect();
        let list: Vec<String> = some
            .iter()
            .map(|(name, select, _)| format!("cpu/{},name={name}/", select.terms()))
            .collect();
        let mut client = connect(Some(vm), None).map_err(OperatorCommandError::from)?;
        let opened: Vec<OpenedEvent> = client
            .call(request::Open {
                events: list.join(","),
                vcpus: None,
                whole: true,
                sampling: None,
            })
            .map_err(OperatorCommandError::from)?;
        for (event, opened) in some.into_iter().zip(opened) {
            match opened.unsupported {
                None => can.push(event),
                Some(reason) => why = why.or(Some(reason)),
            }
        }
    }
    match why {
        Some(why) if can.is_empty() => Err(ListError::NoneCounted {
            vm: vm.to_owned(),
            tried,
            why,
        }),
        _ => Ok(can),
    }
}

/// Truncates a description to one line.
fn truncate_description(text: &str) -> String {
    if text.chars().count() <= MAX_DESCRIPTION_CHARS {
        return text.to_owned();
    }
    let begin: String = text.chars().take(MAX_DESCRIPTION_CHARS).collect();
    let whole = begin.rfind(' ').unwrap_or(begin.len());
    format!("{} …", &begin[..whole])
}

/// Returns the events of one type, each with its aliases.
fn events_of_kind(kind: &str) -> Vec<String> {
    match kind {
        "hw" => join_aliases(names::HARDWARE.map(|(name, event)| (name, event as u64))),
        "cache" => names::caches(),
        "sw" => join_aliases(names::SOFTWARE.map(|(name, event)| (name, event as u64))),
        "pv" => names::PARAVIRTUAL.map(|name| format!("pv/{name}/")).to_vec(),
        "raw" => ["rNNN", "cpu/event=N,umask=N/"].map(str::to_owned).to_vec(),
        _ => Vec::new(),
    }
}

/// Joins aliases of the same event into one line, as `perf list` does.
fn join_aliases<const N: usize>(names: [(&str, u64); N]) -> Vec<String> {
    let mut lines: Vec<(u64, String)> = Vec::new();
    for (name, event) in names {
        match lines.iter_mut().find(|(known, _)| *known == event) {
            Some((_, line)) => *line += &format!(" OR {name}"),
            None => lines.push((event, name.to_owned())),
        }
    }
    lines.into_iter().map(|(_, line)| line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_api::events::list::parse;

    /// Every listed name is accepted as an event, and each event has one line.
    #[test]
    fn listed_names_are_valid_events() {
        let mut lines = 0;
        for kind in ["hw", "cache", "sw", "pv"] {
            for line in events_of_kind(kind) {
                for name in line.split(" OR ") {
                    assert!(parse(name).is_ok(), "{name}");
                }
                lines += 1;
            }
        }
        assert!(lines > 60, "{lines}");
        assert_eq!(events_of_kind("hw")[0], "cycles OR cpu-cycles");
    }

    #[test]
    fn glob_matches_stars_and_question_marks() {
        for (word, name, is) in [
            ("l1d", "l1d.replacement", true),
            ("L1D", "l1d.replacement", true),
            ("l1d*", "l1d.replacement", true),
            ("*ment", "l1d.replacement", true),
            ("l?d.*place*", "l1d.replacement", true),
            ("l1d*x", "l1d.replacement", false),
            ("1d*", "l1d.replacement", false),
            ("l1d.replacement?", "l1d.replacement", false),
            ("cpu-*", "cycles OR cpu-cycles", true),
            ("*", "é", true),
            ("", "x", true),
        ] {
            assert_eq!(matches(word, name), is, "{word} {name}");
        }
        // The matching time is bounded by the product of the lengths.
        assert!(!glob("*a".repeat(2000).as_bytes(), "b".repeat(2000).as_bytes()));
    }

    #[test]
    fn description_is_truncated_to_one_line() {
        assert_eq!(truncate_description("L1D line"), "L1D line");
        let long = truncate_description(&"word ".repeat(50));
        assert!(
            long.ends_with("word …") && long.chars().count() <= MAX_DESCRIPTION_CHARS + 2,
            "{long}"
        );
        assert!(truncate_description(&"é".repeat(200)).chars().count() <= MAX_DESCRIPTION_CHARS + 2);
    }
}
