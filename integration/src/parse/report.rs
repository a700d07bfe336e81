//! Parses the output of `perf report --stdio` without call chains (`-g none`).

/// A line in the table of a `perf report`.
#[derive(Debug, Clone, PartialEq)]
pub struct PerfReportLine {
    /// Share of the line in the sampled periods, in percent.
    pub percent: f64,
    /// Name of the sampled task.
    pub command: String,
    /// Sampled program or library; `[kernel.kallsyms]` for the kernel.
    pub object: String,
    /// `true` for a kernel sample (`[k]`), `false` for a user sample (`[.]`).
    pub kernel: bool,
    /// Function name, or an address without a symbol.
    pub symbol: String,
}

/// A parsed `perf report`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PerfReport {
    /// Number of samples, according to the report's header.
    pub samples: f64,
    /// Approximate event count, according to the header ("Event count (approx.)").
    pub event_count: f64,
    /// Number of samples lost by the kernel, according to the report's header.
    pub lost: u64,
    /// Lines of the report's table, in printed order.
    pub lines: Vec<PerfReportLine>,
}

impl PerfReport {
    /// Returns the share of the function `symbol`, in percent, or 0 if the report does not list it.
    pub fn percent(&self, symbol: &str) -> f64 {
        self.lines
            .iter()
            .filter(|line| line.symbol == symbol)
            .map(|line| line.percent)
            .sum()
    }

    /// Returns whether at least one sample is resolved to a function, in the kernel if `kernel` is
    /// `true` and otherwise in user space.
    pub fn has_symbols(&self, kernel: bool) -> bool {
        self.lines
            .iter()
            .any(|line| line.kernel == kernel && !line.symbol.starts_with("0x"))
    }
}

/// Parses the output of `perf report`. Removes color codes and skips lines outside tables.
pub fn parse_report(text: &str) -> PerfReport {
    let mut report = PerfReport::default();
    for line in text.lines() {
        let line = strip_colours(line);
        if let Some(header) = line.trim_start().strip_prefix('#') {
            parse_header(header.trim(), &mut report);
        } else if let Some(row) = parse_row(&line) {
            report.lines.push(row);
        }
    }
    report
}

fn parse_header(header: &str, report: &mut PerfReport) {
    if let Some(rest) = header.strip_prefix("Samples:") {
        // The line is "# Samples: 501  of event 'cpu-clock'", or "2K of event" for large numbers.
        report.samples += rest.split_whitespace().next().map_or(0.0, scaled);
    } else if let Some(rest) = header.strip_prefix("Event count (approx.):") {
        report.event_count += rest.trim().parse().unwrap_or(0.0);
    } else if let Some(rest) = header.strip_prefix("Total Lost Samples:") {
        report.lost += rest.trim().parse().unwrap_or(0);
    }
}

/// Parses a number with an optional suffix, such as "501", "2K" or "1M".
fn scaled(text: &str) -> f64 {
    let (digits, factor) = match text.as_bytes().last() {
        Some(b'K') => (&text[..text.len() - 1], 1e3),
        Some(b'M') => (&text[..text.len() - 1], 1e6),
        _ => (text, 1.0),
    };
    digits.parse::<f64>().unwrap_or(0.0) * factor
}

fn parse_row(line: &str) -> Option<PerfReportLine> {
    let mut words = line.split_whitespace();
    let percent = words.next()?.strip_suffix('%')?.parse().ok()?;
    let words: Vec<&str> = words.collect();
    let level = words
        .iter()
        .position(|word| matches!(*word, "[k]" | "[.]" | "[H]" | "[g]" | "[u]" | "[h]"))?;
    // Task names may contain spaces, but object names do not.
    let (command, object) = words[..level].split_at(level.checked_sub(1)?);
    Some(PerfReportLine {
        percent,
        command: command.join(" "),
        object: object.first()?.to_string(),
        kernel: words[level] == "[k]",
        symbol: words.get(level + 1..)?.join(" "),
    })
}

fn strip_colours(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        if c != '\x1b' {
            out.push(c);
            continue;
        }
        // Skip "ESC [", the parameters, and the final letter.
        for c in chars.by_ref() {
            if c.is_ascii_alphabetic() {
                break;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perf_report_is_parsed() {
        let report = parse_report(
            "# Total Lost Samples: 2\n#\n# Samples: 501  of event 'cpu-clock'\n\
             # Event count (approx.): 1002000000\n#\n# Overhead  Command\n\
             \x1b[31m  58.68%\x1b[m  three    pvload             [.] heavy\n\
             \x20    0.20%  my task  [kernel.kallsyms]  [k] finish_task_switch.isra.0\n\
             \x20    0.10%  three    [unknown]          [k] 0xffffffff81000000\n\n",
        );
        assert_eq!((report.samples, report.lost), (501.0, 2));
        assert_eq!(report.event_count, 1_002_000_000.0);
        assert_eq!(report.percent("heavy"), 58.68);
        assert_eq!(report.lines[1].command, "my task");
        assert!(report.lines[1].kernel && !report.lines[0].kernel);
        assert!(report.has_symbols(true) && report.has_symbols(false));
    }

    #[test]
    fn perf_report_addresses_are_not_symbols() {
        let report = parse_report("  9.00%  a  [unknown]  [k] 0xffffffff81000000\n");
        assert!(!report.has_symbols(true));
    }

    #[test]
    fn large_numbers_of_samples_are_abbreviated_by_perf() {
        assert_eq!(parse_report("# Samples: 2K of event 'cycles'\n").samples, 2000.0);
    }
}
