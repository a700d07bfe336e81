//! Output of `perfvisor exits` as tables and JSON.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::sums::{ExitTotal, ExitTotals, TimedExits};
use control_api::events::format::thousands;

/// Name of the KVM statistic that counts every exit. The other statistics count subsets of these
/// exits.
const ALL_EXITS: &str = "exits";

/// Formats the exits as text tables. `when` describes the period that the tables cover, and
/// `length` is the duration of this period.
pub(super) fn text(exits: &ExitTotals, when: &str, length: Duration) -> String {
    let mut out = format!("\n {when}\n\n");
    timed_table(&mut out, "exits to Perfvisor", &exits.ours, length);
    if !exits.traced.is_empty() {
        out.push('\n');
        timed_table(&mut out, "KVM's exits", &exits.traced, length);
    }
    let kvms: Vec<_> = exits.kvms.iter().filter(|(_, count)| **count > 0).collect();
    if kvms.is_empty() {
        return out;
    }
    let _ = writeln!(
        out,
        "\n{}{:<28} {:>14} {:>8}",
        per_vcpu(kvms.first().map(|(key, _)| key.0)),
        " KVM's statistics",
        "count",
        "of exits"
    );
    for ((vcpu, name), count) in kvms {
        let all = exits.kvms.get(&(*vcpu, ALL_EXITS.to_owned())).copied();
        // Only statistics whose names end in `_exits` are exit reasons with a share of all exits.
        let of_exits = match all {
            Some(all) if name.ends_with("_exits") => share(*count, all),
            _ => String::new(),
        };
        let line = format!(
            "{} {name:<27} {:>14} {of_exits:>8}",
            vcpu_label(*vcpu),
            thousands(*count)
        );
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

fn vcpu_label(vcpu: Option<u32>) -> String {
    vcpu.map_or_else(String::new, |vcpu| format!("VCPU{vcpu:<6} "))
}

fn per_vcpu(keys: Option<Option<u32>>) -> &'static str {
    if keys.flatten().is_some() {
        "VCPU       "
    } else {
        ""
    }
}

/// Appends a table of timed exits, with a row for their total, to `out`.
fn timed_table(out: &mut String, title: &str, exits: &TimedExits, length: Duration) {
    let rows = sorted(exits);
    let (count, time_ns) = rows.iter().fold((0, 0), |(count, time), (_, _, of)| {
        (count + of.count, time + of.time_ns)
    });
    let _ = writeln!(
        out,
        "{} {title:<27} {:>14} {:>8} {:>14} {:>8} {:>12} {:>12}",
        per_vcpu(exits.keys().next().map(|key| key.0)),
        "count",
        "share",
        "time (ms)",
        "share",
        "mean (us)",
        "max (us)"
    );
    for (vcpu, reason, of) in &rows {
        let _ = writeln!(
            out,
            "{} {:<27} {:>14} {:>8} {:>14.3} {:>8} {:>12} {:>12}",
            vcpu_label(*vcpu),
            describe_reason(reason),
            thousands(of.count),
            share(of.count, count),
            ms(of.time_ns),
            share(of.time_ns, time_ns),
            timed(of, of.time_ns.checked_div(of.timed)),
            timed(of, Some(of.max_ns)),
        );
    }
    let seconds = length.as_secs_f64();
    let rate = if seconds > 0.0 {
        count as f64 / seconds
    } else {
        0.0
    };
    let _ = writeln!(
        out,
        " all: {} exits, {rate:.0} a second, {:.3} ms",
        thousands(count),
        ms(time_ns)
    );
}

/// Returns the exits sorted by vCPU and then by descending time, as perf does.
fn sorted(exits: &TimedExits) -> Vec<(Option<u32>, &str, &ExitTotal)> {
    let mut list: Vec<_> = exits
        .iter()
        .map(|((vcpu, reason), of)| (*vcpu, reason.as_str(), of))
        .collect();
    list.sort_by_key(|(vcpu, _, of)| (*vcpu, std::cmp::Reverse((of.time_ns, of.count))));
    list
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

fn share(part: u64, of: u64) -> String {
    match of {
        0 => "-".to_owned(),
        of => format!("{:.2}%", 100.0 * part as f64 / of as f64),
    }
}

/// Formats a duration of the exits `of`, in microseconds. The text is `-` if `ns` is `None` or no
/// exit was timed.
fn timed(of: &ExitTotal, ns: Option<u64>) -> String {
    match ns {
        Some(ns) if of.timed > 0 => format!("{:.2}", ns as f64 / 1e3),
        _ => "-".to_owned(),
    }
}

/// Returns the description of an exit reason, or its name if this version does not know the reason.
fn describe_reason(reason: &str) -> &str {
    match reason {
        "rdmsr" => "PMU register read (RDMSR)",
        "wrmsr" => "PMU register write (WRMSR)",
        "rdpmc" => "counter read (RDPMC)",
        "port_read" => "port read",
        "port_write" => "port write",
        "mmio_read" => "MMIO read",
        "mmio_write" => "MMIO write",
        "debug" => "breakpoint, single step",
        "overflow" => "counter overflow",
        "kick" => "kick, other signal",
        "emulation" => "instruction not emulated",
        other => other,
    }
}

/// Formats the exits as JSON, with one object per line.
pub(super) fn json(exits: &ExitTotals, total: bool, at: Duration, length: Duration) -> String {
    let kvms = exits.kvms.iter().map(|((vcpu, name), count)| {
        let mut object = Map::new();
        object.insert("statistic".into(), json!(name));
        object.insert("count".into(), json!(count));
        of_vcpu(*vcpu, object)
    });
    let object = json!({
        "total": total,
        "at_s": at.as_secs_f64(),
        "length_s": length.as_secs_f64(),
        "exits": timed_json(&exits.ours),
        "kvm": kvms.collect::<Vec<_>>(),
        "kvm_exits": timed_json(&exits.traced),
    });
    format!("{object}\n")
}

fn of_vcpu(vcpu: Option<u32>, mut object: Map<String, Value>) -> Value {
    if let Some(vcpu) = vcpu {
        object.insert("vcpu".into(), json!(vcpu));
    }
    Value::Object(object)
}

fn timed_json(exits: &TimedExits) -> Vec<Value> {
    let of = |(vcpu, reason, of): (Option<u32>, &str, &ExitTotal)| {
        let mut object = Map::new();
        object.insert("reason".into(), json!(reason));
        object.insert("count".into(), json!(of.count));
        object.insert("timed".into(), json!(of.timed));
        object.insert("time_ns".into(), json!(of.time_ns));
        object.insert("max_ns".into(), json!(of.max_ns));
        of_vcpu(vcpu, object)
    };
    sorted(exits).into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::super::sums::tests::{from_user_exits, seen};
    use super::*;

    /// Rows of the table are sorted by time, and the mean time covers the timed exits only.
    #[test]
    fn table_shows_shares_means_and_maxima() {
        let mut exits = ExitTotals::default();
        let seen = vec![
            seen(0, "port_write", 300, 300_000, 5_000),
            seen(1, "wrmsr", 100, 900_000, 20_000),
        ];
        exits.update_from(from_user_exits(seen), &mut Default::default());
        let text = text(&exits.summed(), "all of 2.000 s", Duration::from_secs(2));
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let find = |word: &str| lines.iter().position(|line| line.contains(&word)).unwrap();
        let (wrmsr, port) = (find("(WRMSR)"), find("port"));
        assert!(wrmsr < port, "{text}");
        assert_eq!(
            lines[wrmsr][4..],
            ["100", "25.00%", "0.900", "75.00%", "9.00", "20.00"]
        );
        assert_eq!(
            lines[port][2..],
            ["300", "75.00%", "0.300", "25.00%", "1.00", "5.00"]
        );
        assert!(text.contains("400 exits, 200 a second, 1.200 ms"), "{text}");
        assert!(!text.contains("KVM"), "{text}");
    }

    /// Untimed exits have no mean duration, rather than a misleading mean of zero.
    #[test]
    fn untimed_exits_have_no_mean() {
        let mut vcpu = seen(0, "kick", 1, 0, 0);
        vcpu.exits[0].timed = 0;
        let mut exits = ExitTotals::default();
        exits.update_from(from_user_exits(vec![vcpu]), &mut Default::default());
        let text = text(&exits, "x", Duration::from_secs(1));
        let line = text.lines().find(|line| line.contains("kick")).unwrap();
        assert!(line.starts_with("VCPU0") && line.ends_with('-'), "{line}");
        assert_eq!(exits.untimed(), 1);
    }
}
