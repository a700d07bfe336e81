//! Model-specific event names such as `l1d.replacement`, from the tables compiled into perf.
//!
//! | module | contents |
//! |---|---|
//! | `cpu` | processor names as in perf's tables |
//! | `parse` | parsers of the output of `perf list`, text and JSON |
//! | `perf` | runs the installed perf with limits on time and output |
//!
//! perf contains the tables of all processors, but lists only the events of the PMUs that it finds
//! in sysfs. The environment variable `SYSFS_PATH` directs perf to a directory with a fake PMU,
//! which makes the tables available on hosts without a PMU.

pub mod cpu;
mod parse;
mod perf;

use control_api::events::list::{self, EventListError};
use control_api::nearest::did_you_mean;

use cpu::CpuName;
pub use parse::{EventSelector, VendorEvent};
pub use perf::{PerfError, VendorEventTable, events_of};

/// Error returned when vendor event names cannot be resolved.
#[derive(Debug, thiserror::Error)]
pub enum EventNameError {
    #[error(transparent)]
    List(#[from] EventListError),
    #[error("unknown event '{event}'; the names of the vendor's events are unavailable")]
    Unasked {
        event: String,
        #[source]
        source: PerfError,
    },
    #[error("unknown event '{event}'{meant}; perfvisor list vendor shows the events of {cpu}")]
    Unknown {
        event: String,
        meant: String,
        cpu: CpuName,
    },
    #[error(
        "event '{event}' requires the unsupported term '{term}'; supported are event, umask, edge, \
        inv and cmask"
    )]
    NeedsMore { event: String, term: String },
}

/// Replaces each vendor event name in a list with its selector on this host's processor.
///
/// perf runs only if the list contains an unknown name. The returned list is always syntactically
/// valid.
///
/// # Errors
/// Returns [`EventNameError`] if the list is invalid, a name is unknown, or perf fails.
pub fn resolve_vendor_events(events: &str) -> Result<String, EventNameError> {
    with_tables(events, || {
        let cpu = CpuName::host();
        let VendorEventTable { events, note } = events_of(&cpu)?;
        if let Some(note) = note {
            log::warn!("{note}");
        }
        Ok((events, cpu))
    })
}

fn with_tables(
    events: &str,
    tables: impl FnOnce() -> Result<(Vec<VendorEvent>, CpuName), PerfError>,
) -> Result<String, EventNameError> {
    let error = match list::parse(events) {
        Ok(_) => return Ok(events.to_owned()),
        Err(error @ EventListError::Unknown(_)) => error,
        Err(error) => return Err(error.into()),
    };
    let Some(first) = names(events).find(|(_, name)| may_be_vendor_event(name)) else {
        return Err(error.into());
    };
    let (known, cpu) = tables().map_err(|source| EventNameError::Unasked {
        event: first.1.to_owned(),
        source,
    })?;
    let (mut out, mut from) = (String::new(), 0);
    for (at, name) in names(events).filter(|(_, name)| may_be_vendor_event(name)) {
        let Some(event) = known.iter().find(|event| event.name.eq_ignore_ascii_case(name)) else {
            return Err(EventNameError::Unknown {
                event: name.to_owned(),
                meant: did_you_mean(name, known.iter().map(|event| event.name.as_str())),
                cpu,
            });
        };
        let select = event.select.as_ref().map_err(|term| EventNameError::NeedsMore {
            event: event.name.clone(),
            term: term.clone(),
        })?;
        let end = at + name.len();
        let rest = &events[end..];
        let letters = rest.strip_prefix(':').map_or("", |rest| {
            &rest[..rest
                .find(|c: char| !c.is_ascii_alphabetic())
                .unwrap_or(rest.len())]
        });
        let whole = end + if letters.is_empty() { 0 } else { letters.len() + 1 };
        out += &events[from..at];
        out += &format!("cpu/{},name={}/{letters}", select.terms(), &events[at..whole]);
        from = whole;
    }
    out += &events[from..];
    list::parse(&out)?;
    Ok(out)
}

/// Returns the event names in the list `events` without their modifiers, each with its byte offset
/// in the list. Events in perf's slash syntax have no name.
fn names(events: &str) -> impl Iterator<Item = (usize, &str)> {
    let (mut slashed, mut from, mut found) = (false, 0, Vec::new());
    for (at, c) in events.char_indices().chain([(events.len(), ',')]) {
        match c {
            '/' => slashed = !slashed,
            ',' | '{' | '}' if !slashed => {
                found.push((from, &events[from..at]));
                from = at + 1;
            }
            _ => {}
        }
    }
    found.into_iter().filter_map(|(from, item)| {
        let begin = from + (item.len() - item.trim_start().len());
        let name = item.trim();
        let name = name.split(':').next().unwrap_or(name);
        (!name.contains('/') && !name.is_empty()).then_some((begin, name))
    })
}

/// Returns whether a name resembles a vendor event and is not the name of a built-in event. Any
/// other unknown name is a typing error, which is reported without running perf.
fn may_be_vendor_event(name: &str) -> bool {
    resembles_vendor_event(name) && list::parse(name).is_err()
}

/// Returns whether the name has the form of a vendor event name: only letters, digits, `.`, `_` and
/// `-`, with at least one `.` or `_`.
fn resembles_vendor_event(name: &str) -> bool {
    name.contains(['.', '_'])
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_core::error_line;

    fn cpu() -> CpuName {
        "GenuineIntel-6-8E-9".parse().unwrap()
    }

    fn tables() -> Result<(Vec<VendorEvent>, CpuName), PerfError> {
        let text = include_str!("vendor/perf-6.1-intel.txt");
        Ok((parse::from_text(text), cpu()))
    }

    /// A vendor event is replaced by its selector. The modifiers are kept, and the name becomes a
    /// term. The parser of event lists accepts the result.
    #[test]
    fn vendor_event_resolves_to_selector_and_keeps_name() {
        let out = with_tables("cycles,{L1D.REPLACEMENT:uk, task-clock}:D,cpu/event=1/", tables).unwrap();
        assert_eq!(
            out,
            "cycles,{cpu/event=0x51,umask=0x1,name=L1D.REPLACEMENT:uk/uk, task-clock}:D,cpu/event=1/"
        );
        let groups = list::parse(&out).unwrap();
        let event = &groups[1].events[0];
        assert_eq!(event.name, "L1D.REPLACEMENT:uk");
        assert!(event.modifiers.user && event.modifiers.kernel && event.modifiers.pinned);
    }

    #[test]
    fn perf_runs_only_for_possible_vendor_events() {
        let never = || -> Result<_, PerfError> { panic!("perf was asked") };
        assert_eq!(with_tables("cycles:u", never).unwrap(), "cycles:u");
        for (events, words) in [
            ("cylces", "did you mean 'cycles'"),
            ("", "is empty"),
            ("cycles:x", "modifier"),
        ] {
            let error = with_tables(events, never).unwrap_err();
            assert!(error_line(&error).contains(words), "{error}");
        }
    }

    #[test]
    fn unsupported_vendor_event_is_reported() {
        let error = |events| error_line(&with_tables(events, tables).unwrap_err());
        assert!(error("l1d.replacment").contains("did you mean 'l1d.replacement'"));
        assert!(error("bananas.ripe").contains("'bananas.ripe'; perfvisor list vendor"));
        let response = error("offcore_response.demand_code_rd.any_response");
        assert!(response.contains("unsupported term 'offcore_rsp'"), "{response}");
        assert!(error("l1d_pend_miss.pending_cycles_any").contains("unsupported term 'any'"));
        let none = || Err(PerfError::NotInstalled);
        let asked = with_tables("l1d.replacement", none).unwrap_err();
        assert!(error_line(&asked).contains("linux-perf"), "{asked}");
        // An invalid modifier is rejected as for any other event.
        assert!(error("l1d.replacement:x").contains("modifier"));
    }
}
