//! Collects what criterion measured into one JSON file, for comparing runs.
//!
//! Usage: `bench-summary CRITERION_DIR OUTPUT`. Each entry: the benchmark's name, the median and
//! its 95 % confidence interval, in nanoseconds per iteration.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use serde_json::{Value, json};

fn main() -> ExitCode {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [criterion, output] = &arguments[..] else {
        eprintln!("usage: bench-summary CRITERION_DIR OUTPUT");
        return ExitCode::from(2);
    };
    match summarise(criterion, output) {
        Ok(0) => {
            eprintln!("bench-summary: no measurement in {}", criterion.display());
            ExitCode::FAILURE
        }
        Ok(count) => {
            println!("{count} benchmarks: {}", output.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bench-summary: {error}");
            ExitCode::FAILURE
        }
    }
}

fn summarise(criterion: &Path, output: &Path) -> io::Result<usize> {
    let mut results = Vec::new();
    collect(criterion, &mut results)?;
    results.sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
    let count = results.len();
    fs::write(
        output,
        serde_json::to_vec_pretty(&json!({ "benchmarks": results }))?,
    )?;
    Ok(count)
}

/// Finds `new/estimates.json` with the `benchmark.json` that names it.
fn collect(directory: &Path, results: &mut Vec<Value>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if !path.is_dir() {
            continue;
        }
        let (estimates, benchmark) = (path.join("estimates.json"), path.join("benchmark.json"));
        if path.ends_with("new") && estimates.exists() && benchmark.exists() {
            let estimates: Value = serde_json::from_slice(&fs::read(estimates)?)?;
            let benchmark: Value = serde_json::from_slice(&fs::read(benchmark)?)?;
            let median = &estimates["median"];
            results.push(json!({
                "name": benchmark["full_id"],
                "median_ns": median["point_estimate"],
                "low_ns": median["confidence_interval"]["lower_bound"],
                "high_ns": median["confidence_interval"]["upper_bound"],
            }));
        } else {
            collect(&path, results)?;
        }
    }
    Ok(())
}
