//! Reports benchmark results and their target values. They are printed at the end of a benchmark
//! and written to `target/criterion/NAME-ratios.json`, next to criterion's results.

use std::fs;

/// Target value of a benchmark result.
#[derive(Clone, Copy)]
pub enum BenchmarkTarget {
    AtLeast(f64),
    AtMost(f64),
    /// The result must be greater than this value.
    Above(f64),
    /// No target. The result is for information only.
    None,
}

/// A benchmark result with its target. `value` is `None` if the benchmark did not run.
pub struct BenchmarkFigure {
    pub name: &'static str,
    pub value: Option<f64>,
    pub unit: &'static str,
    pub target: BenchmarkTarget,
}

impl BenchmarkFigure {
    pub fn new(name: &'static str, value: Option<f64>, unit: &'static str, target: BenchmarkTarget) -> Self {
        Self {
            name,
            value,
            unit,
            target,
        }
    }

    fn judge(&self) -> (String, Option<bool>) {
        let met = |ok: fn(&f64, &f64) -> bool, limit| self.value.map(|v| ok(&v, &limit));
        match self.target {
            BenchmarkTarget::AtLeast(limit) => (format!("at least {limit}"), met(f64::ge, limit)),
            BenchmarkTarget::AtMost(limit) => (format!("at most {limit}"), met(f64::le, limit)),
            BenchmarkTarget::Above(limit) => (format!("above {limit}"), met(f64::gt, limit)),
            BenchmarkTarget::None => ("none".into(), None),
        }
    }
}

/// Returns whether cargo only tests or lists the benchmarks. Measured times are then meaningless.
pub fn is_dry_run() -> bool {
    std::env::args().any(|a| a == "--test" || a == "--list")
}

/// Returns the median of the values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints the benchmark results. Unless `partial` is `true`, also writes the results and the
/// entries of `more` to `NAME-ratios.json`.
pub fn report(
    name: &str,
    figures: &[BenchmarkFigure],
    partial: bool,
    mut more: serde_json::Map<String, serde_json::Value>,
) {
    if std::env::args().any(|a| a == "--list") {
        return;
    }
    println!("\n{name}: figures and their targets");
    let mut all = Vec::new();
    for figure in figures {
        let (target, met) = figure.judge();
        let value = figure
            .value
            .map_or("not measured".into(), |v| format!("{v:.3} {}", figure.unit));
        let said = match met {
            _ if is_dry_run() => "",
            Some(true) => ": met",
            Some(false) => ": MISSED",
            None => "",
        };
        println!("  {}: {value} (target: {target}){said}", figure.name);
        all.push(serde_json::json!({
            "figure": figure.name, "value": figure.value, "unit": figure.unit, "target": target, "met": met,
        }));
    }
    more.insert("figures".into(), all.into());
    if is_dry_run() {
        println!("  (tried once: the values say nothing, and are not kept)");
        return;
    }
    if partial {
        println!("  (not all were measured: the file of the last full run is kept)");
        return;
    }
    // The executable is in target/release/deps.
    let Ok(exe) = std::env::current_exe() else { return };
    if let Some(target) = exe.ancestors().nth(3) {
        let dir = target.join("criterion");
        let path = dir.join(format!("{name}-ratios.json"));
        let text = format!("{:#}\n", serde_json::Value::Object(more));
        if let Err(e) = fs::create_dir_all(&dir).and_then(|()| fs::write(&path, text)) {
            eprintln!("{}: {e}", path.display());
        }
    }
}
