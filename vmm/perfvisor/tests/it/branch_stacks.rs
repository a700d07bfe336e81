//! `perfvisor record -b` and `-j` with a guest that takes branches with known probabilities.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use test_support::skip;

use crate::common::stepping::host_for_branches as host;
use crate::common::vm::{PROGRAM, VmProcess, run_and_read_stderr, stdout_of};

/// Source and target of a branch.
type Edge = (u64, u64);

/// VM with a guest that takes branches with known probabilities.
struct BranchingVm {
    process: VmProcess,
    /// Addresses of the branch instructions, by name.
    at: HashMap<String, u64>,
    targets: Vec<u64>,
}

impl BranchingVm {
    fn start(args: &[&str]) -> Option<Self> {
        let args = [&["--cmdline", "branches"], args].concat();
        let mut process = VmProcess::spawn(Command::new(PROGRAM), "test", &args, Stdio::null())?;
        let lines = BufReader::new(process.child.stdout.take().unwrap()).lines();
        let line = lines
            .map_while(Result::ok)
            .find(|line| line.starts_with("branches "));
        let line = line.unwrap_or_else(|| panic!("{:?}", process.log_lines()));
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let mut at = HashMap::new();
        let mut targets = Vec::new();
        for (name, value) in line.split_whitespace().filter_map(|word| word.split_once('=')) {
            if name == "targets" {
                targets.extend(value.split(',').map(number));
            } else {
                at.insert(name.to_owned(), number(value));
            }
        }
        Some(Self { process, at, targets })
    }

    fn file(&self) -> String {
        let file = self.process.runtime.path().join("perf.data");
        file.to_str().unwrap().to_owned()
    }

    /// Records branch stacks with the given options of `record`, and returns the output of the
    /// command.
    fn record(&self, options: &[&str]) -> String {
        let file = self.file();
        let args = [&["record", "test", "-o", &file, "--call-graph", "none"], options].concat();
        let mut command = self.process.command(&args);
        let (status, text) = run_and_read_stderr(command.env("RUST_LOG", "info"));
        assert_eq!(status, Some(0), "{text}");
        text
    }

    /// Returns the stacks of the recording, with the oldest branch first.
    fn stacks(&self) -> Vec<Vec<Edge>> {
        let args = ["script", "-i", &self.file(), "--json", "-F", "brstack"];
        let text = stdout_of(&mut self.process.command(&args));
        let address = |value: &serde_json::Value| {
            let text = value.as_str().unwrap();
            u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap()
        };
        let stack = |line: &str| {
            let sample: serde_json::Value = serde_json::from_str(line).unwrap();
            let branches = sample["brstack"].as_array().cloned().unwrap_or_default();
            let edge = |branch: &serde_json::Value| (address(&branch["from"]), address(&branch["to"]));
            branches.iter().rev().map(edge).collect()
        };
        text.lines().map(stack).collect()
    }

    /// Returns the number of edges that follow an edge selected by `after` in a stack, and how many
    /// of them match `outcome`.
    fn decisions(
        &self,
        stacks: &[Vec<Edge>],
        after: impl Fn(Edge) -> bool,
        outcome: impl Fn(Edge) -> bool,
    ) -> (f64, f64) {
        let pairs = stacks.iter().flat_map(|stack| stack.windows(2));
        let next: Vec<Edge> = pairs.filter(|pair| after(pair[0])).map(|pair| pair[1]).collect();
        let hits = next.iter().filter(|&&edge| outcome(edge)).count();
        (next.len() as f64, hits as f64)
    }
}

/// Asserts that `hits` of `n` decisions are within [`SIGMAS`] of the probability `p`.
#[track_caller]
fn assert_probability(name: &str, (n, hits): (f64, f64), p: f64) {
    let sigma = (n * p * (1.0 - p)).sqrt();
    eprintln!(
        "{name}: {hits} of {n}, expected {:.1}, {:+.2} sigma",
        n * p,
        (hits - n * p) / sigma
    );
    assert!(n > 100.0, "{name}: only {n} decisions");
    assert!(
        (hits - n * p).abs() <= SIGMAS * sigma,
        "{name}: {hits} of {n}, not {p}"
    );
}

/// Tolerance of a measured frequency, in standard deviations. At 3, one of the eight frequencies
/// would fail by chance in one of forty runs. The recording of 9 s makes 4.5 as strict as 3 is for
/// a recording of 4 s.
const SIGMAS: f64 = 4.5;

const KERNEL: [&str; 4] = ["-j", "any,k,save_type", "-F", "500"];

/// In recorded branch stacks, every branch edge has the expected frequency, for conditional
/// branches, a rare path, recursion and indirect calls. No branch is missing between two branches
/// of a stack.
#[test]
fn edge_frequencies_match_branch_probabilities() {
    if host().is_none() {
        return;
    }
    let Some(vm) = BranchingVm::start(&[]) else { return };
    let options = [&KERNEL[..], &["--branch-overhead", "60%", "-d", "9"]].concat();
    let text = vm.record(&options);
    assert!(text.contains("branch stacks: "), "{text}");
    let stacks = vm.stacks();
    let full = stacks.iter().filter(|stack| stack.len() == 32).count();
    assert!(
        full > 20 && full * 2 > stacks.len(),
        "{full} of {}: {text}",
        stacks.len()
    );
    let at = |name: &str| vm.at[name];
    let [round, quarter, rare, enter, leaf, again, indirect] =
        ["round", "quarter", "rare", "enter", "leaf", "again", "indirect"].map(at);
    let from = |address: u64| move |edge: Edge| edge.0 == address;
    let check = |name: &str, seen, p| assert_probability(name, seen, p);
    check("quarter", vm.decisions(&stacks, from(round), from(quarter)), 0.25);
    check(
        "rare after quarter",
        vm.decisions(&stacks, from(quarter), from(rare)),
        1.0 / 256.0,
    );
    let entered = |edge: Edge| edge.0 == enter || edge.0 == again;
    check("recursion", vm.decisions(&stacks, entered, from(again)), 0.5);
    check("leaf", vm.decisions(&stacks, entered, from(leaf)), 0.5);
    let calls = stacks.iter().flatten().filter(|edge| edge.0 == indirect).count() as f64;
    for (n, &target) in vm.targets.iter().enumerate() {
        let to = stacks
            .iter()
            .flatten()
            .filter(|edge| **edge == (indirect, target))
            .count();
        check(&format!("target {n}"), (calls, to as f64), 0.25);
    }
    // Check that no branch is missing: each branch starts in the straight-line code after the
    // previous target.
    for pair in stacks.iter().flat_map(|stack| stack.windows(2)) {
        let straight = pair[1].0.wrapping_sub(pair[0].1);
        assert!(straight < 64, "{:x?} after {:x?}", pair[1], pair[0]);
    }
}

/// A filter selects branches by type, and the depth limits the stack.
#[test]
fn filter_and_depth_select_branches() {
    if host().is_none() {
        return;
    }
    let Some(vm) = BranchingVm::start(&[]) else { return };
    let options = "-j ind_call,k --branch-depth 4 -d 2 --branch-overhead 50%";
    vm.record(&options.split(' ').collect::<Vec<_>>());
    let stacks = vm.stacks();
    assert!(stacks.iter().any(|stack| stack.len() == 4), "{stacks:x?}");
    assert!(stacks.iter().all(|stack| stack.len() <= 4));
    let indirect = vm.at["indirect"];
    assert!(
        stacks.iter().flatten().all(|edge| edge.0 == indirect),
        "{stacks:x?}"
    );
}

/// The guest runs at full speed between branch stacks, and the stacks stay within the overhead
/// limit.
#[test]
fn overhead_limit_bounds_branch_stacks() {
    if host().is_none() {
        return;
    }
    let Some(vm) = BranchingVm::start(&[]) else { return };
    let options = [&KERNEL[..], &["--branch-overhead", "2%", "-d", "3"]].concat();
    let text = vm.record(&options);
    let share = text
        .split_once(" truncated, ")
        .and_then(|(_, rest)| rest.split_once(" %"))
        .map(|(share, _)| share.parse::<f64>().unwrap());
    // The last burst may exceed the limit of a short recording.
    assert!(share.is_some_and(|share| share <= 3.0), "{text}");
}

/// Unsupported options, and options that this host does not support, are rejected with an error
/// that names them.
#[test]
fn unsupported_branch_stacks_are_refused() {
    let Some(host) = host() else { return };
    let Some(vm) = BranchingVm::start(&[]) else { return };
    let refused = |options: &[&str], words: &[&str]| {
        let args = [&["record", "test", "-d", "1", "-o", "/dev/null"], options].concat();
        let (status, text) = run_and_read_stderr(&mut vm.process.command(&args));
        assert_eq!(status, Some(2), "{text}");
        for word in words {
            assert!(text.contains(word), "no {word:?} in {text}");
        }
    };
    refused(&["-j", "any,in_tx"], &["'in_tx' is unsupported"]);
    refused(&["-b", "--branch-depth", "65"], &["--branch-depth"]);
    refused(&["-b", "--branch-overhead", "0"], &["--branch-overhead"]);
    if !host.user {
        refused(&["-b"], &["does not single-step user code", "-j any,k"]);
    }
}

/// Debian's perf reads the branch stacks.
#[test]
fn perf_reads_branch_stacks() {
    if host().is_none() {
        return;
    }
    let Ok(version) = Command::new("perf").arg("--version").output() else {
        skip::skipped("perf is not installed", false);
        return;
    };
    if !version.status.success() {
        skip::skipped("perf does not run here", false);
        return;
    }
    let Some(vm) = BranchingVm::start(&[]) else { return };
    let options = [&KERNEL[..], &["--branch-overhead", "50%", "-d", "2"]].concat();
    vm.record(&options);
    let perf = |args: &[&str]| {
        let mut command = Command::new("perf");
        command
            .args(args)
            .args(["-i", &vm.file()])
            .current_dir(Path::new("/"));
        stdout_of(&mut command)
    };
    let ours: usize = vm.stacks().iter().map(Vec::len).sum();
    let text = perf(&["script", "-F", "ip,brstack"]);
    let theirs = text
        .split_whitespace()
        .filter(|word| word.contains("/-/-/-/"))
        .count();
    assert_eq!(theirs, ours, "{text}");
    let report = perf(&["report", "-b", "--stdio", "--sort", "symbol_from,symbol_to"]);
    let rows = report.lines().filter(|line| line.contains('%')).count();
    assert!(rows >= 5, "{report}");
}
