//! `perfvisor annotate` and `perfvisor diff` with recordings of a running VM.

use std::path::PathBuf;
use std::process::Output;

use crate::common::operator::TestVm;
use crate::common::vm::assert_contains;

/// Records a VM whose guest spins, and returns the path of the recording.
fn recorded(vm: &TestVm, name: &str) -> PathBuf {
    let file = vm.vm.runtime.path().join(name);
    let path = file.to_str().unwrap();
    vm.vm.observe_while_running(0.5, |seconds| {
        vm.run_for_stderr(&["record", "test", "-q", "-d", seconds, "-F", "500", "-o", path]);
    });
    file
}

#[track_caller]
fn refused(out: &Output, words: &[&str]) {
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "no {word:?} in {stderr}");
    }
}

/// The output of `annotate` states where the code was read: from the memory of the running VM or
/// from a file. A file of another build than the recorded one is rejected.
#[test]
fn function_is_annotated_from_guest_memory() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let file = recorded(&vm, "perf.data");
    let file = file.to_str().unwrap();
    let text = vm.run_for_stderr(&["annotate", "-i", file, "--vm", "test", "spin_hot"]);
    assert!(text.contains("# spin_hot of "), "{text}");
    assert_contains(&text, "# Code: memory of the running VM test, as it is now");
    let shares: Vec<f64> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_whitespace().next()?.strip_suffix('%')?.parse().ok())
        .collect();
    let sum: f64 = shares.iter().sum();
    assert!((99.0..101.0).contains(&sum), "{sum} in {text}");
    // The default is the function with the most samples.
    assert!(
        vm.run_for_stderr(&["annotate", "-i", file, "--vm", "test"])
            .contains("# spin_hot of ")
    );

    refused(
        &vm.run(&["annotate", "-i", file, "spin_hot"]),
        &["spin_hot", "--vm NAME"],
    );
    refused(
        &vm.run(&["annotate", "-i", file, "--vm", "test", "spin_hto"]),
        &["spin_hto", "did you mean 'spin_hot'?"],
    );
    refused(
        &vm.run(&["annotate", "-i", file, "--vm", "tset"]),
        &["--vm tset", "did you mean 'test'?"],
    );
    refused(
        &vm.run(&["annotate", "-i", file, "-e", "instructions", "--vm", "test"]),
        &["instructions", "cycles"],
    );
    let text = vm.vm.runtime.path().join("text");
    std::fs::write(&text, "no program").unwrap();
    let program = text.to_str().unwrap();
    refused(
        &vm.run(&["annotate", "-i", file, "--program", program]),
        &[program, "ELF"],
    );
}

/// `diff` shows no difference between a recording and itself, and the shares of each recording add
/// up to 100 %.
#[test]
fn recording_has_no_diff_to_itself() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let (old, new) = (recorded(&vm, "old.data"), recorded(&vm, "new.data"));
    let (old, new) = (old.to_str().unwrap(), new.to_str().unwrap());
    let same = vm.run_for_stderr(&["diff", old, old]);
    assert_contains(&same, "# Event 'cycles'");
    assert_contains(&same, "spin_hot");
    let changes = |text: &str| -> Vec<f64> {
        let rows = text
            .lines()
            .filter(|line| !line.starts_with('#') && !line.is_empty());
        let delta = |row: &str| {
            row.split_whitespace()
                .rfind(|word| word.ends_with('%'))?
                .trim_end_matches('%')
                .parse()
                .ok()
        };
        rows.map(|row| delta(row).unwrap_or_else(|| panic!("{row}")))
            .collect()
    };
    assert!(
        !changes(&same).is_empty() && changes(&same).iter().all(|delta| *delta == 0.0),
        "{same}"
    );
    // The guest's behaviour is constant, so the shares are almost equal.
    let two = vm.run_for_stderr(&["diff", old, new]);
    let sum: f64 = changes(&two).iter().sum();
    assert!(sum.abs() < 0.1, "shares add up to 100 % before and after: {two}");

    refused(&vm.run(&["diff", old, "/no/such/file"]), &["/no/such/file"]);
    // As in perf, the defaults are `perf.data.old` and `perf.data`. A single named file is compared
    // with `perf.data.old`.
    refused(&vm.run(&["diff", old]), &["perf.data.old"]);
    let in_directory = |args: &[&str]| {
        let out = vm
            .vm
            .operator(args)
            .current_dir(vm.vm.runtime.path())
            .output()
            .unwrap();
        assert!(
            out.status.success(),
            "{args:?}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        String::from_utf8(out.stdout).unwrap()
    };
    let runtime = vm.vm.runtime.path();
    std::fs::copy(old, runtime.join("perf.data.old")).unwrap();
    std::fs::copy(new, runtime.join("perf.data")).unwrap();
    assert_eq!(in_directory(&["diff"]), two);
    assert_eq!(in_directory(&["diff", old]), same);
}
