//! The events that one model of processor has by name, such as `l1d.replacement`, from the tables in perf.
//!
//! | module | story |
//! |---|---|
//! | `cpu` | a processor, as perf's tables name it |
//! | `parse` | what `perf list` prints, old and new |
//! | `perf` | asks the perf that is installed, within bounds |
//!
//! perf has the tables of all processors compiled in and shows those of the host's PMU. It looks for the PMU
//! below a directory that `SYSFS_PATH` can name, so it shows them where there is none, too.

pub mod cpu;
mod parse;
mod perf;

use control_api::events::list::{self, ListError};
use control_api::nearest::did_you_mean;

use cpu::CpuName;
pub use parse::{Select, VendorEvent};
pub use perf::{PerfError, events_of};

/// Why a list of events cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NamedError {
    /// It does not parse, whatever the vendor's events are.
    #[error(transparent)]
    List(#[from] ListError),
    /// It may be one of the vendor's, and perf does not tell.
    #[error("unknown event '{event}'; the vendor's events by name are not known here")]
    Unasked {
        /// The event.
        event: String,
        /// Why perf does not tell.
        #[source]
        source: PerfError,
    },
    /// The vendor has none of that name either.
    #[error("unknown event '{event}'{meant}; perfvisor list vendor shows those of {cpu}")]
    Unknown {
        /// The event.
        event: String,
        /// Which may be meant.
        meant: String,
        /// The processor whose events were looked through.
        cpu: CpuName,
    },
    /// The vendor has it, and a selector alone does not make it.
    #[error(
        "event '{event}' needs '{term}' beside its selector, and only event, umask, edge, inv and cmask can be counted by name"
    )]
    NeedsMore {
        /// The event.
        event: String,
        /// What else it needs.
        term: String,
    },
}

/// The list of events with a selector in place of each of the vendor's names, for the processor of this host.
/// perf is asked only when there is a name that is nobody else's.
///
/// # Errors
/// [`NamedError`]. What is returned parses.
pub fn by_selector(events: &str) -> Result<String, NamedError> {
    with_tables(events, || {
        let cpu = CpuName::host();
        events_of(&cpu).map(|events| (events, cpu))
    })
}

fn with_tables(
    events: &str,
    tables: impl FnOnce() -> Result<(Vec<VendorEvent>, CpuName), PerfError>,
) -> Result<String, NamedError> {
    let error = match list::parse(events) {
        Ok(_) => return Ok(events.to_owned()),
        Err(error @ ListError::Unknown(_)) => error,
        Err(error) => return Err(error.into()),
    };
    let Some(first) = names(events).find(|(_, name)| is_foreign(name)) else {
        return Err(error.into());
    };
    let (known, cpu) = tables().map_err(|source| NamedError::Unasked {
        event: first.1.to_owned(),
        source,
    })?;
    let (mut out, mut from) = (String::new(), 0);
    for (at, name) in names(events).filter(|(_, name)| is_foreign(name)) {
        let Some(event) = known.iter().find(|event| event.name.eq_ignore_ascii_case(name)) else {
            return Err(NamedError::Unknown {
                event: name.to_owned(),
                meant: did_you_mean(name, known.iter().map(|event| event.name.as_str())),
                cpu,
            });
        };
        let select = event.select.as_ref().map_err(|term| NamedError::NeedsMore {
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

/// The names of a list's events, each with the place where it begins, without modifiers. Events in perf's
/// form with slashes have none.
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

/// Whether a name looks like one of a vendor's and is no other event's. Other names that are not known are
/// slips, and what is said of them does not depend on perf.
fn is_foreign(name: &str) -> bool {
    looks_like_a_vendors(name) && list::parse(name).is_err()
}

/// Whether it has what nearly all names in vendors' tables have and ours do not.
fn looks_like_a_vendors(name: &str) -> bool {
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

    /// The selector, the name with its modifiers and the modifiers are what the parser of lists makes of it.
    #[test]
    fn a_vendors_name_becomes_its_selector_and_keeps_its_name() {
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
    fn perf_is_asked_only_for_names_that_may_be_a_vendors() {
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
    fn what_cannot_be_counted_by_name_is_said() {
        let error = |events| error_line(&with_tables(events, tables).unwrap_err());
        assert!(error("l1d.replacment").contains("did you mean 'l1d.replacement'"));
        assert!(error("bananas.ripe").contains("'bananas.ripe'; perfvisor list vendor"));
        let response = error("offcore_response.demand_code_rd.any_response");
        assert!(response.contains("needs 'offcore_rsp'"), "{response}");
        assert!(error("l1d_pend_miss.pending_cycles_any").contains("needs 'any'"));
        let none = || Err(PerfError::NotInstalled);
        let asked = with_tables("l1d.replacement", none).unwrap_err();
        assert!(error_line(&asked).contains("linux-perf"), "{asked}");
        // A modifier that is none is refused as with any event.
        assert!(error("l1d.replacement:x").contains("modifier"));
    }
}
