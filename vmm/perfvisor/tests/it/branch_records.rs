//! Branch records of the guest (`--lbr`) with the bare-metal guest.

use guest_images::bare_metal::VPMU_TESTS;
use tempfile::NamedTempFile;

use crate::common::stepping::{Run, check_line, command, host_for_branches as host, kernel_file};
use crate::common::vm::assert_contains;

/// Runs the tests of the bare-metal guest whose descriptions start with `only`.
fn run(kernel: &NamedTempFile, model: &str, only: &str, options: &str) -> Run {
    let line = format!("--pmu {model} --stats {options}");
    let words = format!("only={only}");
    crate::common::stepping::run(&mut command(&line, Some((kernel.path(), &words))))
}

/// After a PMI, the guest finds the branches of the interrupted code in its branch records, on the
/// PMU models of both vendors.
#[test]
fn pmis_find_branches_of_the_guest() {
    if host().is_none() {
        return;
    }
    let kernel = kernel_file(VPMU_TESTS);
    for model in ["intel-v2", "intel-v3", "intel-v4", "intel-v5", "amd-v2"] {
        let run = run(&kernel, model, "branch-records:", "--lbr on");
        let (out, log) = (&run.out, &run.err);
        assert_eq!(run.status, Some(0), "{model}:\n{out}\n{log}");
        assert!(
            !out.contains("# SKIP there are no branch records"),
            "{model}:\n{out}"
        );
        let (pmis, steps) = (
            run.figure("PMIs with branch records"),
            run.figure("steps for branch records"),
        );
        assert!(
            pmis >= 5 && steps >= pmis,
            "{model}: {pmis} PMIs, {steps} steps\n{log}"
        );
    }
}

/// A guest without branch records sees none and is not single-stepped.
#[test]
fn guest_without_branch_records_is_not_stepped() {
    if host().is_none() {
        return;
    }
    let kernel = kernel_file(VPMU_TESTS);
    for (model, options) in [("intel", "--lbr off"), ("amd", "")] {
        for only in [
            "branch-records:-C",
            "pmi:-LVTPC-in-NMI",
            "registers:-model-specific",
        ] {
            let run = run(&kernel, model, only, options);
            let (out, log) = (&run.out, &run.err);
            assert_eq!(run.status, Some(0), "{model}:\n{out}\n{log}");
            assert_contains(out, "ok 1");
            assert_eq!(run.figure("single steps"), 0, "{model}:\n{log}");
        }
    }
}

#[test]
fn branch_records_are_refused_where_they_cannot_work() {
    if host().is_none() {
        return;
    }
    let kernel = kernel_file(VPMU_TESTS);
    for (model, options, reason) in [
        ("amd", "--lbr on", "amd has no branch records"),
        ("intel-v1", "--lbr on", "intel-v1 has no branch records"),
        ("intel", "--lbr on --rdpmc hwbp", "unsupported with --rdpmc hwbp"),
        ("off", "--lbr on", "--lbr with --pmu off"),
    ] {
        let run = run(&kernel, model, "branch-records:", options);
        let log = &run.err;
        assert_eq!(run.status, Some(2), "{model}: {log}");
        assert!(log.contains(reason) && log.lines().count() == 1, "{model}: {log}");
    }
}

/// If user code cannot be single-stepped, branch records are off by default, `--lbr on` logs a
/// warning, and `perfvisor check` reports the default.
#[test]
fn default_follows_the_host() {
    let Some(host) = host() else { return };
    let kernel = kernel_file(VPMU_TESTS);
    let default = run(&kernel, "intel", "branch-records:", "").out;
    assert_eq!(
        default.contains("there are no branch records"),
        !host.user,
        "{default}"
    );
    let requested = run(&kernel, "intel", "branch-records:-C", "--lbr on").err;
    assert_eq!(
        requested.contains("cannot single-step CPL 3"),
        !host.user,
        "{requested}"
    );
    let line = check_line("--lbr");
    assert_eq!(line.contains("on by default"), host.user, "{line}");
}
