//! Shared by the comparison programs: the lab as their place, QEMU's command line, spreads, and the
//! file of figures.

use std::process::ExitCode;

use integration::artefacts::{describe, target_dir};
use integration::lab::LabOptions;
use integration::process::Command;
use integration::qemu_comparison::QEMU;
use integration::test_host::TestHost;
use serde_json::Value;

/// Any error of a comparison.
pub type Failure = Box<dyn std::error::Error>;

/// Returns the exit code of a comparison, which fails if it returned an error or missed its goal.
pub fn exit_code(name: &str, result: Result<bool, Failure>) -> ExitCode {
    result.map_or_else(
        |error| {
            eprintln!("{name}: {}", describe(&*error));
            ExitCode::FAILURE
        },
        |met| ExitCode::from(u8::from(!met)),
    )
}

/// Boots the lab.
///
/// # Errors
/// Returns an error if the lab does not boot, or if tests run on this machine directly.
pub fn lab(options: &LabOptions) -> Result<TestHost, Failure> {
    let place = TestHost::choose(options)?;
    if matches!(place, TestHost::Direct(_)) {
        return Err("this comparison runs in the lab only; set PERFVISOR_PLACE=lab".into());
    }
    Ok(place)
}

/// Returns the lowest, median and highest value. Values that are not numbers are ignored.
pub fn spread(values: impl IntoIterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.into_iter().filter(|value| !value.is_nan()).collect();
    values.sort_by(f64::total_cmp);
    let at = |n: usize| values.get(n).copied().unwrap_or(f64::NAN);
    let last = values.len().saturating_sub(1);
    [at(0), (at(last / 2) + at(values.len() / 2)) / 2.0, at(last)]
}

/// Writes the figures to `bench/NAME.json` in the target directory.
///
/// # Errors
/// Returns an error if the file cannot be written.
pub fn write_figures(name: &str, figures: &Value) -> Result<(), Failure> {
    let path = target_dir().join(format!("bench/{name}.json"));
    std::fs::create_dir_all(path.parent().unwrap_or(&path))?;
    std::fs::write(&path, serde_json::to_string_pretty(figures)?)?;
    println!("figures: {}", path.display());
    Ok(())
}

/// Returns the command for a Linux guest under QEMU's `machine` without default devices.
pub fn qemu(machine: &str, memory_mib: u64, kernel: &str, initrd: &str, cmdline: &str) -> Command {
    Command::new(QEMU)
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
