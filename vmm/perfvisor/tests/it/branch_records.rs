//! Branch records of the guest (`--lbr`) with the bare-metal guest.

use std::path::PathBuf;
use std::process::{Command, Output};

use test_support::skip;
use vmm::kvm::execution;
use vmm::kvm::stepping::Stepping;

use crate::common::test_lock;
use crate::common::vm::PROGRAM;

/// Returns the stepping features of the host; `None` if kernel code cannot be stepped.
fn host() -> Option<Stepping> {
    let Ok(kvm) = vmm::kvm::host::open() else {
        skip::skipped("no usable /dev/kvm here", false);
        return None;
    };
    let host = execution::probe(&kvm).unwrap().stepping;
    if !host.kernel || host.user && !host.blocks_interrupts {
        skip::skipped("this KVM does not step", false);
        return None;
    }
    Some(host)
}

/// Kernel file of the test guest, removed on drop.
struct Kernel(PathBuf);

impl Kernel {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("perfvisor-lbr-{}-{name}", std::process::id()));
        std::fs::write(&path, guest_images::bare_metal::VPMU_TESTS).unwrap();
        Self(path)
    }

    /// Runs the tests of the guest whose description starts with `only`.
    fn run(&self, model: &str, only: &str, options: &[&str]) -> Output {
        let _lock = test_lock::shared();
        Command::new("timeout")
            .args(["120", PROGRAM, "run", "--pmu", model, "--stats"])
            .args(["--cmdline", &format!("only={only}"), "--kernel"])
            .arg(&self.0)
            .args(options)
            .output()
            .unwrap()
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns a row of the table of `--stats`, or 0 for an omitted row.
fn figure(stats: &str, row: &str) -> u64 {
    let line = stats.lines().find_map(|line| line.strip_prefix(row));
    line.map_or(0, |rest| rest.trim().parse().unwrap())
}

/// PMIs find the branches of the interrupted code, with the vendor's registers and freezing.
#[test]
fn pmis_find_branches_of_the_guest() {
    if host().is_none() {
        return;
    }
    let kernel = Kernel::new("records");
    for model in ["intel-v2", "intel-v3", "intel-v4", "intel-v5", "amd-v2"] {
        let run = kernel.run(model, "branch-records:", &["--lbr", "on"]);
        let (out, log) = (text(&run.stdout), text(&run.stderr));
        assert!(run.status.success(), "{model}:\n{out}\n{log}");
        assert!(
            !out.contains("# SKIP there are no branch records"),
            "{model}:\n{out}"
        );
        let (pmis, steps) = (
            figure(&log, "PMIs with branch records"),
            figure(&log, "steps for branch records"),
        );
        assert!(
            pmis >= 5 && steps >= pmis,
            "{model}: {pmis} PMIs, {steps} steps\n{log}"
        );
    }
}

/// Without branch records the guest sees none, and no step is taken.
#[test]
fn guest_without_branch_records_is_not_stepped() {
    if host().is_none() {
        return;
    }
    let kernel = Kernel::new("off");
    for (model, options) in [("intel", &["--lbr", "off"][..]), ("amd", &[])] {
        for only in [
            "branch-records:-C",
            "pmi:-LVTPC-in-NMI",
            "registers:-model-specific",
        ] {
            let run = kernel.run(model, only, options);
            let (out, log) = (text(&run.stdout), text(&run.stderr));
            assert!(
                run.status.success() && out.contains("ok 1"),
                "{model}:\n{out}\n{log}"
            );
            assert_eq!(figure(&log, "single steps"), 0, "{model}:\n{log}");
        }
    }
}

#[test]
fn branch_records_are_refused_where_they_cannot_work() {
    if host().is_none() {
        return;
    }
    let kernel = Kernel::new("refused");
    for (model, options, reason) in [
        ("amd", &["--lbr", "on"][..], "amd has no branch records"),
        ("intel-v1", &["--lbr", "on"], "intel-v1 has no branch records"),
        (
            "intel",
            &["--lbr", "on", "--rdpmc", "hwbp"],
            "unsupported with --rdpmc hwbp",
        ),
        ("off", &["--lbr", "on"], "--lbr with --pmu off"),
    ] {
        let run = kernel.run(model, "branch-records:", options);
        let log = text(&run.stderr);
        assert_eq!(run.status.code(), Some(2), "{model}: {log}");
        assert!(log.contains(reason) && log.lines().count() == 1, "{model}: {log}");
    }
}

/// Where user code cannot be stepped, branch records are off unless requested, and a line says so.
#[test]
fn default_follows_the_host() {
    let Some(host) = host() else { return };
    let kernel = Kernel::new("default");
    let default = text(&kernel.run("intel", "branch-records:", &[]).stdout);
    assert_eq!(
        default.contains("there are no branch records"),
        !host.user,
        "{default}"
    );
    let requested = text(&kernel.run("intel", "branch-records:-C", &["--lbr", "on"]).stderr);
    assert_eq!(
        requested.contains("cannot single-step CPL 3"),
        !host.user,
        "{requested}"
    );
    let check = Command::new(PROGRAM).arg("check").output().unwrap();
    let check = text(&check.stdout);
    let line = check.lines().find(|line| line.contains("--lbr")).unwrap();
    assert_eq!(line.contains("on by default"), host.user, "{line}");
}
