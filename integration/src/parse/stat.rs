//! Parses the output of `perf stat`, as a table or as CSV (`-x,`).

/// The count of one event in the output of `perf stat`.
#[derive(Debug, Clone, PartialEq)]
pub struct PerfStatCount {
    /// Event name as printed by perf, such as `cycles` or `cycles:u`.
    pub event: String,
    /// Number of the CPU, or `None` unless `perf stat -A` printed one.
    pub cpu: Option<u32>,
    /// Count of the event. `None` for `<not supported>` and `<not counted>`.
    pub value: Option<f64>,
    /// Unit of the value, such as `msec`. Empty for counts.
    pub unit: String,
    /// Time running of the event, in nanoseconds. `None` if parsed from a table.
    pub running_ns: Option<u64>,
}

/// Parsed output of `perf stat`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PerfStat {
    /// Counts in the order in which perf printed them.
    pub counts: Vec<PerfStatCount>,
}

/// Reason why a count is missing from the output of `perf stat`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PerfStatError {
    /// The output of `perf stat` does not list the event.
    #[error("perf stat printed no line for {0}")]
    NoSuchEvent(String),
    /// The output of `perf stat` lists the event without a number.
    #[error("perf stat did not count {0}")]
    NotCounted(String),
}

impl PerfStat {
    /// Returns the count of an event, summed over all CPUs.
    ///
    /// # Errors
    /// Returns [`PerfStatError::NoSuchEvent`] or [`PerfStatError::NotCounted`].
    pub fn value(&self, event: &str) -> Result<f64, PerfStatError> {
        let mut sum = None;
        for count in self.counts.iter().filter(|count| count.event == event) {
            let value = count
                .value
                .ok_or_else(|| PerfStatError::NotCounted(event.to_owned()))?;
            sum = Some(sum.unwrap_or(0.0) + value);
        }
        sum.ok_or_else(|| PerfStatError::NoSuchEvent(event.to_owned()))
    }

    /// Returns the count of an event on one CPU, from output with `-A`.
    ///
    /// # Errors
    /// Returns the same errors as [`PerfStat::value`].
    pub fn value_on(&self, event: &str, cpu: u32) -> Result<f64, PerfStatError> {
        let count = self
            .counts
            .iter()
            .find(|count| count.event == event && count.cpu == Some(cpu))
            .ok_or_else(|| PerfStatError::NoSuchEvent(format!("{event} on CPU {cpu}")))?;
        count
            .value
            .ok_or_else(|| PerfStatError::NotCounted(event.to_owned()))
    }
}

/// Parses the table that `perf stat` prints. Skips other lines, such as the output of the measured
/// program.
pub fn parse_stat(text: &str) -> PerfStat {
    let mut stat = PerfStat::default();
    let mut in_table = false;
    for line in text.lines() {
        if line.contains("Performance counter stats for") {
            in_table = true;
            continue;
        }
        if !in_table {
            continue;
        }
        stat.counts.extend(parse_table_line(line));
    }
    stat
}

fn parse_table_line(line: &str) -> Option<PerfStatCount> {
    // Derived metrics follow the '#'.
    let counts = line.split('#').next()?;
    let mut words: Vec<&str> = counts.split_whitespace().collect();
    if words.last().is_some_and(|word| word.ends_with("%)")) {
        words.pop();
    }
    let mut words = words.into_iter().peekable();
    let cpu = words
        .peek()
        .and_then(|word| word.strip_prefix("CPU"))
        .and_then(|number| number.parse().ok());
    if cpu.is_some() {
        words.next();
    }
    let first = words.next()?;
    if first.starts_with("<not") {
        // "<not supported>" and "<not counted>" are two words each.
        words.next()?;
        let event = words.next()?.to_owned();
        return Some(PerfStatCount {
            event,
            cpu,
            value: None,
            unit: String::new(),
            running_ns: None,
        });
    }
    let value = first.replace(',', "").parse::<f64>().ok()?;
    let rest: Vec<&str> = words.collect();
    let (unit, event) = match rest[..] {
        [event] => ("", event),
        [unit, event, ..] => (unit, event),
        [] => return None,
    };
    // "0.50 seconds user" and "1.002 +- 0.001 seconds time elapsed" are not events.
    if unit == "seconds" || unit == "+-" {
        return None;
    }
    Some(PerfStatCount {
        event: event.to_owned(),
        cpu,
        value: Some(value),
        unit: unit.to_owned(),
        running_ns: None,
    })
}

/// Parses the output of `perf stat -x,`: value, unit, event, time running in ns, time running in
/// percent, metrics. With `-A`, the CPU is the first field. Skips lines of other programs.
pub fn parse_stat_csv(text: &str) -> PerfStat {
    PerfStat {
        counts: text.lines().filter_map(parse_csv_line).collect(),
    }
}

fn parse_csv_line(line: &str) -> Option<PerfStatCount> {
    let mut fields: Vec<&str> = line.trim().split(',').collect();
    let cpu = fields
        .first()?
        .strip_prefix("CPU")
        .and_then(|number| number.parse().ok());
    if cpu.is_some() {
        fields.remove(0);
    }
    let [value, unit, event, running_ns, _percent, ..] = fields[..] else {
        return None;
    };
    let value = match value {
        "<not supported>" | "<not counted>" => None,
        number => Some(number.parse().ok()?),
    };
    Some(PerfStatCount {
        event: event.to_owned(),
        cpu,
        value,
        unit: unit.to_owned(),
        running_ns: Some(running_ns.parse().ok()?),
    })
}

/// Reason why the output of `perf stat -d` is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StatDetailError {
    /// A hardware event has a count of 0 or is `<not counted>`, or a required event is
    /// `<not supported>`.
    #[error("not counted: {0}")]
    Uncounted(String),
    /// The output does not list a required event.
    #[error("perf stat -d does not show {0}")]
    Missing(String),
    /// The output lists too few hardware events. `perf stat -d` lists more on a processor of any
    /// vendor.
    #[error("perf stat -d shows only {0} hardware events")]
    Few(usize),
}

/// Checks the output of `perf stat -x, -d` in a guest. Each hardware event must have a nonzero
/// count or be `<not supported>`, and each event in `counted` must have a nonzero count. Returns
/// the number of hardware events.
///
/// # Errors
/// Returns a [`StatDetailError`] for the first invalid line or a missing event.
pub fn judge_detail(text: &str, counted: &[&str]) -> Result<usize, StatDetailError> {
    /// Software events, which are always counted.
    const SOFTWARE: [&str; 4] = ["task-clock", "context-switches", "cpu-migrations", "page-faults"];
    /// Minimum number of hardware events that `perf stat -d` lists on a processor of any vendor.
    const LEAST: usize = 8;
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.split(',');
        let (Some(value), Some(event)) = (fields.next(), fields.nth(1)) else {
            continue;
        };
        if event.is_empty() || SOFTWARE.iter().any(|software| event.contains(software)) {
            continue;
        }
        // Strip the modifier.
        let name = event.split(':').next().unwrap_or(event);
        let right = match value.parse::<u64>() {
            Ok(count) => count > 0,
            Err(_) => value == "<not supported>" && !counted.contains(&name),
        };
        if !right {
            return Err(StatDetailError::Uncounted(line.to_owned()));
        }
        found.push(name);
    }
    if let Some(missing) = counted.iter().find(|event| !found.contains(event)) {
        return Err(StatDetailError::Missing((*missing).to_owned()));
    }
    if found.len() < LEAST {
        return Err(StatDetailError::Few(found.len()));
    }
    Ok(found.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of `perf stat -e task-clock,cycles,... spin 2` with Debian's perf 6.1.
    const TABLE: &str = "\
spin: iterations=234000000 seconds=0.500651 cpu_seconds=0.498840

 Performance counter stats for 'spin 0.5':

            516.01 msec task-clock                       #    0.983 CPUs utilized          
     1,499,012,345      cycles:u                         #    2.905 GHz                      (66.70%)
   <not supported>      ref-cycles                                                  
                28      page-faults                      #   54.263 /sec                   

       0.525044095 seconds time elapsed

       0.504804000 seconds user
       0.019566000 seconds sys
";

    #[test]
    fn perf_stat_table_is_parsed() {
        let stat = parse_stat(TABLE);
        assert_eq!(stat.value("task-clock"), Ok(516.01));
        assert_eq!(stat.counts[0].unit, "msec");
        assert_eq!(stat.value("cycles:u"), Ok(1_499_012_345.0));
        assert_eq!(
            stat.value("ref-cycles"),
            Err(PerfStatError::NotCounted("ref-cycles".into()))
        );
        assert_eq!(
            stat.value("branches"),
            Err(PerfStatError::NoSuchEvent("branches".into()))
        );
        assert_eq!(stat.counts.len(), 4);
    }

    #[test]
    fn perf_stat_per_cpu_counts_are_summed_or_selected() {
        let stat = parse_stat(
            " Performance counter stats for 'system wide':\n\n\
             CPU0           1,000      cycles                        \n\
             CPU1           3,000      cycles                        \n\n\
                1.002 +- 0.001 seconds time elapsed  ( +-  0.10% )\n",
        );
        assert_eq!(stat.value("cycles"), Ok(4000.0));
        assert_eq!(stat.value_on("cycles", 1), Ok(3000.0));
        assert!(stat.value_on("cycles", 2).is_err());
    }

    #[test]
    fn perf_stat_csv_skips_other_output() {
        let stat = parse_stat_csv(
            "spin: iterations=99, seconds=1\n\
             204.45,msec,task-clock,204452730,100.00,0.977,CPUs utilized\n\
             29,,page-faults,204452730,100.00,141.842,/sec\n\
             <not supported>,,ref-cycles,0,100.00,,\n\
             CPU1,77,,cycles,10,50.00,,\n",
        );
        assert_eq!(stat.counts.len(), 4);
        assert_eq!(stat.value("page-faults"), Ok(29.0));
        assert!(stat.value("ref-cycles").is_err());
        assert_eq!(stat.value_on("cycles", 1), Ok(77.0));
    }

    #[test]
    fn detail_check_rejects_zero_counts() {
        let names = [
            "cycles",
            "instructions",
            "branches",
            "branch-misses",
            "a",
            "b",
            "c",
            "d",
        ];
        let shown = |special: &str, value: &str| {
            let line = |name: &&str| match *name == special {
                true => format!("{value},,{name},1,100.00,,\n"),
                false => format!("77,,{name},1,100.00,0.1,GHz\n"),
            };
            "0,,context-switches,1,100.00,,\n".to_owned() + &names.iter().map(line).collect::<String>()
        };
        assert_eq!(judge_detail(&shown("-", ""), &["cycles"]), Ok(8));
        assert_eq!(
            judge_detail(&shown("branches", "<not supported>"), &["cycles"]),
            Ok(8)
        );
        for (special, value) in [
            ("branches", "0"),
            ("a", "<not counted>"),
            ("cycles", "<not supported>"),
        ] {
            assert!(
                judge_detail(&shown(special, value), &["cycles"]).is_err(),
                "{special} {value}"
            );
        }
        assert!(judge_detail(&shown("-", ""), &["stores"]).is_err());
        assert!(judge_detail("77,,cycles,1,100.00,,\n", &["cycles"]).is_err());
    }
}
