//! Results with targets, printed at the end of a benchmark and written with criterion's results as
//! `target/criterion/NAME-ratios.json`.

use std::fs;

/// The target of a figure.
#[derive(Clone, Copy)]
pub enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// Greater than the value.
    Above(f64),
    /// No target; for information only.
    None,
}

/// A benchmark result; `None` if it was not measured, for example when only some benchmarks run.
pub struct Figure {
    pub name: &'static str,
    pub value: Option<f64>,
    pub unit: &'static str,
    pub target: Target,
}

impl Figure {
    pub fn new(name: &'static str, value: Option<f64>, unit: &'static str, target: Target) -> Self {
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
            Target::AtLeast(limit) => (format!("at least {limit}"), met(f64::ge, limit)),
            Target::AtMost(limit) => (format!("at most {limit}"), met(f64::le, limit)),
            Target::Above(limit) => (format!("above {limit}"), met(f64::gt, limit)),
            Target::None => ("none".into(), None),
        }
    }
}

/// Returns `true` if benchmarks are only tested or listed, so that measurements are meaningless.
pub fn only_tried() -> bool {
    std::env::args().any(|a| a == "--test" || a == "--list")
}

/// Returns the median.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints the figures. Unless the run was partial, also writes them to `NAME-ratios.json`, together
/// with the entries of `more`.
pub fn report(
    name: &str,
    figures: &[Figure],
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
            _ if only_tried() => "",
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
    if only_tried() {
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
