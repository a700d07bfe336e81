//! Code shared by the comparison programs: booting the lab on which they run, QEMU's command line,
//! statistics, and the file of results.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, ExitCode};
use std::time::Instant;

use integration::artefacts::{describe, target_dir};
use integration::debian::says;
use integration::footprint::tracked;
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::process::HostCommand;
use integration::qemu_comparison::QEMU;
use integration::test_host::TestHost;
use serde_json::Value;

/// Any error returned by a comparison.
pub type ComparisonError = Box<dyn std::error::Error>;

/// Returns the exit code of a comparison: 0 if its targets are met, 1 if a target is missed, 2
/// after an error.
pub fn exit_code(name: &str, result: Result<bool, ComparisonError>) -> ExitCode {
    result.map_or_else(
        |error| {
            eprintln!("{name}: {}", describe(&*error));
            ExitCode::from(2)
        },
        |met| ExitCode::from(u8::from(!met)),
    )
}

/// Returns a function that prefixes an error message with `what`.
pub fn context<E: std::fmt::Display>(what: impl std::fmt::Display) -> impl Fn(E) -> ComparisonError {
    move |error| format!("{what}: {error}").into()
}

/// A child process that is killed on drop.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures the variants `ways` alternately for `rounds` rounds.
///
/// `once` takes one measurement. Its arguments are the index of the round and the index of the
/// variant. Prints each result, and returns the results by variant.
///
/// # Errors
/// Returns the first error of `once`.
pub fn by_turns<'w, T: std::fmt::Debug>(
    rounds: u32,
    ways: &[&'w str],
    mut once: impl FnMut(usize, usize) -> Result<T, ComparisonError>,
) -> Result<BTreeMap<&'w str, Vec<T>>, ComparisonError> {
    let mut all: BTreeMap<&str, Vec<T>> = BTreeMap::new();
    for round in 0..rounds as usize {
        for (n, way) in ways.iter().enumerate() {
            let result = once(round, n)?;
            println!("{way}: {result:?}");
            all.entry(way).or_default().push(result);
        }
    }
    Ok(all)
}

/// Starts a VMM, waits until its console contains `words`, calls `then`, and kills the VMM. The
/// argument of `then` is the time from the start of the VMM to this output, in seconds.
///
/// # Errors
/// Returns the error of `then`, or an error if the VMM does not print the words.
pub fn run_until_output<T>(
    place: &TestHost,
    command: &HostCommand,
    words: &str,
    limit: ProcessTimeLimits,
    then: impl FnOnce(f64) -> Result<T, ComparisonError>,
) -> Result<T, ComparisonError> {
    let started = Instant::now();
    let mut vm = place.start(&tracked(place, command))?;
    says(&vm, words, limit)?;
    let result = then(started.elapsed().as_secs_f64())?;
    vm.signal(libc::SIGKILL);
    let _ = vm.wait(limit)?;
    Ok(result)
}

/// Boots the lab, the emulated host on which the comparison runs.
///
/// # Errors
/// Returns an error if the lab does not boot, or if the comparison would run on this machine
/// instead because of `PERFVISOR_PLACE` or a usable KVM.
pub fn lab(options: &LabOptions) -> Result<TestHost, ComparisonError> {
    let place = TestHost::choose(options)?;
    if matches!(place, TestHost::Direct(_)) {
        return Err("this comparison runs in the lab only; set PERFVISOR_PLACE=lab".into());
    }
    Ok(place)
}

/// Returns the minimum, median and maximum of `values`, ignoring NaN.
pub fn spread(values: impl IntoIterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
    values.sort_by(f64::total_cmp);
    let at = |n: usize| values.get(n).copied().unwrap_or(f64::NAN);
    let last = values.len().saturating_sub(1);
    [at(0), (at(last / 2) + at(values.len() / 2)) / 2.0, at(last)]
}

/// Returns the median of the values that are not NaN.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    spread(values)[1]
}

/// Formats a table cell as `MEDIAN (MINIMUM to MAXIMUM)`.
pub fn cell([least, median, most]: [f64; 3], digits: usize) -> String {
    format!("{median:.digits$} ({least:.digits$} to {most:.digits$})")
}

/// Writes the figures to `bench/NAME.json` in the target directory.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn write_figures(name: &str, figures: &Value) -> Result<(), ComparisonError> {
    let path = target_dir().join(format!("bench/{name}.json"));
    std::fs::create_dir_all(path.parent().unwrap_or(&path))?;
    write_json(&path, figures)?;
    println!("figures: {}", path.display());
    Ok(())
}

/// Writes the figures to a file as JSON.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn write_json(path: &Path, figures: &Value) -> Result<(), ComparisonError> {
    std::fs::write(path, format!("{figures:#}")).map_err(context(path.display()))
}

/// Returns the command for a Linux guest under QEMU's `machine` without default devices.
pub fn qemu(machine: &str, memory_mib: u64, kernel: &str, initrd: &str, cmdline: &str) -> HostCommand {
    HostCommand::new(QEMU)
        .args(["-accel", "kvm", "-M", machine, "-cpu", "host", "-nodefaults"])
        .args(["-no-user-config", "-display", "none", "-serial", "stdio"])
        .args(["-m", &format!("{memory_mib}M")])
        .args(["-kernel", kernel, "-initrd", initrd, "-append", cmdline])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_lowest_median_and_highest() {
        assert_eq!(spread([3.0, f64::NAN, 1.0, 2.0]), [1.0, 2.0, 3.0]);
        assert_eq!(spread([4.0, 1.0]), [1.0, 2.5, 4.0]);
        assert!(spread([]).iter().all(|value| value.is_nan()));
    }
}
