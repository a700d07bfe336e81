//! Runs guests that the host single-steps, and queries the host's single-stepping features.

use std::io::Write;
use std::path::Path;
use std::process::Command;

use tempfile::NamedTempFile;
use test_support::skip;
use vmm::kvm::execution;
use vmm::kvm::stepping::SteppingSupport;

use super::test_lock;
use super::vm::PROGRAM;

/// Returns the single-stepping features of the host; `None` if kernel code cannot be stepped.
pub(crate) fn host() -> Option<SteppingSupport> {
    host_that(|host| host.kernel)
}

/// Returns the single-stepping features of the host; `None` if it cannot step to branches.
pub(crate) fn host_for_branches() -> Option<SteppingSupport> {
    host_that(|host| host.kernel && (!host.user || host.blocks_interrupts))
}

fn host_that(is_able: fn(&SteppingSupport) -> bool) -> Option<SteppingSupport> {
    let Ok(kvm) = vmm::kvm::host::open() else {
        skip::skipped("no usable /dev/kvm here", false);
        return None;
    };
    let host = execution::probe(&kvm).unwrap().stepping;
    if !is_able(&host) {
        skip::skipped("this KVM does not step", false);
        return None;
    }
    Some(host)
}

/// Writes the kernel `image` to a temporary file.
pub(crate) fn kernel_file(image: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(image).unwrap();
    file
}

/// Exit status and output of a run of `perfvisor`.
pub(crate) struct Run {
    pub(crate) status: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Run {
    /// Returns the number in row `row` of the table that `--stats` prints, or 0 if the row is
    /// omitted.
    pub(crate) fn figure(&self, row: &str) -> u64 {
        let line = self.err.lines().find_map(|line| line.strip_prefix(row));
        line.map_or(0, |rest| rest.trim().parse().unwrap())
    }
}

/// Returns the command `perfvisor run` with the options in `line` and, if given, a kernel with its
/// command line.
pub(crate) fn command(line: &str, kernel: Option<(&Path, &str)>) -> Command {
    let mut command = Command::new("timeout");
    command
        .args(["300", PROGRAM, "run"])
        .args(line.split_whitespace());
    if let Some((kernel, words)) = kernel {
        command.arg("--kernel").arg(kernel).args(["--cmdline", words]);
    }
    command
}

pub(crate) fn run(command: &mut Command) -> Run {
    let _lock = test_lock::shared();
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    Run {
        status: output.status.code(),
        out: text(&output.stdout),
        err: text(&output.stderr),
    }
}

/// Returns the line of `perfvisor check` that contains `words`.
pub(crate) fn check_line(words: &str) -> String {
    let check = run(Command::new(PROGRAM).arg("check"));
    check
        .out
        .lines()
        .find(|line| line.contains(words))
        .unwrap()
        .to_owned()
}
