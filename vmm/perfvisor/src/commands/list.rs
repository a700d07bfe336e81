//! `perfvisor list`: the events that `stat`, `record` and `top` take, as `perf list` shows those of a host.

use std::fmt::Write as _;

use clap::Args;

use super::{CommandError, DONE, print};
use crate::exit::ExitStatus;
use control_api::events::names;
use control_api::nearest::did_you_mean;
use perf_core::error_line;
use perf_core::pmu::kvm::{StatsError, StatsFile};
use perfvisor_vmm::kvm::host::{self, HostError};
use perfvisor_vmm::kvm::stats_fd;

/// `perfvisor list`.
#[derive(Clone, Debug, Args)]
pub struct ListArgs {
    /// Only these kinds of events (hw, cache, sw, pv, kvm, raw), or those with this text in their names.
    #[arg(value_name = "WHAT")]
    pub what: Vec<String>,
}

/// The kinds, by the words that ask for them, and what stands behind their names.
const KINDS: [(&str, &str); 6] = [
    ("hw", "Hardware event"),
    ("cache", "Hardware cache event"),
    ("sw", "Software event of the vCPU's thread"),
    ("pv", "Paravirtual event: what the hypervisor did"),
    ("kvm", "KVM statistic"),
    ("raw", "Raw event"),
];

/// KVM's statistics cannot be told.
#[derive(Debug, thiserror::Error)]
enum StatisticsError {
    /// No KVM.
    #[error(transparent)]
    Host(#[from] HostError),
    /// It has none, or makes no VM to ask.
    #[error("KVM has no binary statistics (Linux 5.14)")]
    Kvm(#[from] std::io::Error),
    /// Those that it has are not understood.
    #[error(transparent)]
    Table(#[from] StatsError),
}

/// Why events are not listed.
#[derive(Debug, thiserror::Error)]
pub enum ListError {
    /// As with any command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// There are none.
    #[error("no event has '{0}' in its name{1}; perfvisor list shows all")]
    Nothing(String, String),
}

/// Lists them.
///
/// # Errors
/// [`ListError`].
pub fn list(args: &ListArgs) -> Result<ExitStatus, ListError> {
    let (kinds, words): (Vec<&str>, Vec<&str>) = args
        .what
        .iter()
        .map(String::as_str)
        .partition(|word| KINDS.iter().any(|(kind, _)| kind == word));
    let shows = |kind: &str| kinds.is_empty() || kinds.contains(&kind);
    let (mut out, mut names) = (String::new(), Vec::new());
    for (kind, what) in KINDS.into_iter().filter(|(kind, _)| shows(kind)) {
        let events = match kind {
            "kvm" => statistics().unwrap_or_else(|e| {
                log::warn!("no KVM statistics: {}", error_line(&e));
                Vec::new()
            }),
            kind => of_kind(kind),
        };
        let wanted = |event: &&String| words.is_empty() || words.iter().any(|word| event.contains(word));
        names.extend(events.iter().cloned());
        let events: Vec<&String> = events.iter().filter(wanted).collect();
        for event in &events {
            let _ = writeln!(out, "  {event:<48} [{what}]");
        }
        if !events.is_empty() {
            out.push('\n');
        }
    }
    if out.is_empty()
        && let [word, ..] = words[..]
    {
        let known = names.iter().flat_map(|name| name.split(" OR "));
        let meant = did_you_mean(word, known.chain(KINDS.iter().map(|(kind, _)| *kind)));
        return Err(ListError::Nothing(words.join("' or '"), meant));
    }
    print(&out).map_err(CommandError::from)?;
    Ok(DONE)
}

/// The events of one kind, each with the other names that it has.
fn of_kind(kind: &str) -> Vec<String> {
    match kind {
        "hw" => named_once(names::HARDWARE.map(|(name, event)| (name, event as u64))),
        "cache" => names::caches(),
        "sw" => named_once(names::SOFTWARE.map(|(name, event)| (name, event as u64))),
        "pv" => names::PARAVIRTUAL.map(|name| format!("pv/{name}/")).to_vec(),
        "raw" => ["rNNN", "cpu/event=N,umask=N/"].map(str::to_owned).to_vec(),
        _ => Vec::new(),
    }
}

/// Names of the same event in one line, as `perf list` has them.
fn named_once<const N: usize>(names: [(&str, u64); N]) -> Vec<String> {
    let mut lines: Vec<(u64, String)> = Vec::new();
    for (name, event) in names {
        match lines.iter_mut().find(|(known, _)| *known == event) {
            Some((_, line)) => *line += &format!(" OR {name}"),
            None => lines.push((event, name.to_owned())),
        }
    }
    lines.into_iter().map(|(_, line)| line).collect()
}

/// This host's KVM statistics that are events: those of a vCPU, then those of a VM.
fn statistics() -> Result<Vec<String>, StatisticsError> {
    let kvm = host::open()?;
    let names = |fd, prefix: &str| -> Result<Vec<String>, StatsError> {
        let stats = StatsFile::new(fd)?;
        let countable = stats.descriptors().iter().filter(|stat| stat.countable());
        Ok(countable.map(|stat| format!("{prefix}{}", stat.name)).collect())
    };
    let (of_vm, of_vcpu) = stats_fd::of_probe(&kvm, |vm, vcpu| (names(vm, "kvm:vm:"), names(vcpu, "kvm:")))?;
    Ok([of_vcpu?, of_vm?].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_api::events::list::parse;

    /// What is listed can be asked for; the names of one event are in one line.
    #[test]
    fn every_line_is_an_event() {
        let mut lines = 0;
        for kind in ["hw", "cache", "sw", "pv"] {
            for line in of_kind(kind) {
                for name in line.split(" OR ") {
                    assert!(parse(name).is_ok(), "{name}");
                }
                lines += 1;
            }
        }
        assert!(lines > 60, "{lines}");
        assert_eq!(of_kind("hw")[0], "cycles OR cpu-cycles");
    }

    #[test]
    #[expect(clippy::print_stderr, reason = "a test that could not run says so")]
    fn kvm_tells_its_statistics_where_there_is_one() {
        if host::open().is_err() {
            return eprintln!("SKIPPED: no KVM here");
        }
        let all = statistics().unwrap();
        assert!(all.iter().any(|name| name == "kvm:exits"), "{all:?}");
        for name in &all {
            assert!(parse(name).is_ok(), "{name}");
        }
    }
}
