//! Collects the results of criterion in one JSON file, so that two runs can be compared.
//!
//! Usage: `bench-summary CRITERION_DIR OUTPUT`. Each entry has the benchmark's name, the median and
//! its 95 % confidence interval, in nanoseconds per iteration. Times cannot be compared across
//! machines, but ratios can, so ratios in `*-ratios.json` files are included. If a benchmark group
//! contains both entries whose name begins with `perf-core` and entries of other implementations,
//! the output also contains, for each `perf-core` entry, the time of the fastest other entry
//! divided by the time of the `perf-core` entry. Ratios are also printed.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{fs, io};

use serde_json::{Map, Value, json};

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
    let mut ratios = peers(&results);
    for entry in fs::read_dir(criterion)? {
        let path = entry?.path();
        let name = path.file_stem().map(|n| n.to_string_lossy().into_owned());
        if let Some(name) = name.filter(|n| n.ends_with("-ratios")) {
            ratios.insert(name, serde_json::from_slice(&fs::read(&path)?)?);
        }
    }
    for (name, ratio) in &ratios {
        println!("{name}: {ratio:#}");
    }
    fs::write(
        output,
        serde_json::to_vec_pretty(&json!({ "benchmarks": results, "ratios": ratios }))?,
    )?;
    Ok(count)
}

/// Compares each `perf-core` entry with the other entries of its benchmark group. Returns the time
/// of the fastest other entry divided by the time of the `perf-core` entry.
fn peers(results: &[Value]) -> Map<String, Value> {
    let mut ratios = Map::new();
    let named = |entry: &Value| {
        let (group, name) = entry["name"].as_str()?.rsplit_once('/')?;
        Some((group.to_owned(), name.to_owned(), entry["median_ns"].as_f64()?))
    };
    let entries: Vec<_> = results.iter().filter_map(named).collect();
    for (group, name, ours) in entries
        .iter()
        .filter(|(_, name, _)| name.starts_with("perf-core"))
    {
        let others = entries
            .iter()
            .filter(|(g, name, _)| g == group && !name.starts_with("perf-core"));
        if let Some((_, peer, theirs)) = others.min_by(|a, b| a.2.total_cmp(&b.2)) {
            let ratio = (theirs / ours * 100.0).round() / 100.0;
            ratios.insert(
                format!("{group}: best peer over {name}"),
                json!({ "peer": peer, "ratio": ratio }),
            );
        }
    }
    ratios
}

/// Reads the benchmark results below `directory` and appends them to `results`. A result consists
/// of `new/estimates.json` and the `benchmark.json` next to it, which contains the name.
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
