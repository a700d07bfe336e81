//! Tests branch records in a Linux guest: perf in the guest records stacks of consecutive branches
//! of a program, and the branch frequencies equal those that the host records for the same program.

use std::collections::BTreeMap;

use integration::guest::{GuestRun, LinuxGuest};
use integration::lab::LabOptions;
use integration::lease::TestHostLeaseMode;
use integration::test_host::TestHost;

use crate::common::{LIMIT, loaded, perfvisor};

/// Guest script that records the program with three branch filters, and then runs the program while
/// the host records.
const SCRIPT: &str = r#"
section dmesg dmesg
section user perf record -q -j any,u -e cycles:u -c 50000000 -o /tmp/u -- branches 20
section all perf record -q -b -e cycles -c 50000000 -o /tmp/a -- branches 4
section calls perf record -q -j any_call,u -e cycles:u -c 50000000 -o /tmp/c -- branches 4
section stacks perf script -i /tmp/u -F brstack
section all-stacks perf script -i /tmp/a -F brstack
section call-stacks perf script -i /tmp/c -F brstack
section report sh -c "perf report -b -i /tmp/u --stdio --stdio-color never --sort symbol_from,symbol_to 2>/dev/null"
section load sh -c "echo load-has-begun; while true; do branches 5; done"
"#;

/// A branch: source address and target address.
type Edge = (u64, u64);

/// Share of each branch in all branches of a set of stacks, from 0 to 1.
type Shares = BTreeMap<Edge, f64>;

/// Parses the output of `perf script -F brstack`, which contains one stack per line with the newest
/// branch first. Returns the stacks that are not empty, with the oldest branch first.
fn stacks(section: &str) -> Vec<Vec<Edge>> {
    let address = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let edge = |word: &str| {
        let mut parts = word.split('/');
        Some((address(parts.next()?)?, address(parts.next()?)?))
    };
    let stack = |line: &str| line.split_whitespace().rev().filter_map(edge).collect();
    let stacks = section.lines().map(stack);
    stacks.filter(|stack: &Vec<Edge>| !stack.is_empty()).collect()
}

/// Returns the share of each branch in the stacks. Panics if a branch is outside the program's
/// text.
fn shares(stacks: &[Vec<Edge>]) -> Shares {
    let total = stacks.iter().map(Vec::len).sum::<usize>() as f64;
    let mut shares = Shares::new();
    for edge in stacks.iter().flatten() {
        *shares.entry(*edge).or_default() += 1.0 / total;
    }
    shares
}

/// Returns the distance between two distributions of branches, which is half the sum of the
/// absolute differences of the shares. The distance is 0 for equal shares, and 1 if no branch is
/// common.
fn distance(a: &Shares, b: &Shares) -> f64 {
    let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(key)));
    let share = |of: &Shares, key| of.get(key).copied().unwrap_or_default();
    keys.map(|key| (share(a, key) - share(b, key)).abs()).sum::<f64>() / 2.0
}

/// Checks that the branches of each stack are consecutive: each branch source must follow the
/// target of the previous branch within 128 instructions of up to 15 bytes. Branches that are not
/// taken may be in between.
#[track_caller]
fn are_consecutive(stacks: &[Vec<Edge>]) {
    const MAX_STRAIGHT_BYTES: u64 = 128 * 15;
    for pair in stacks.iter().flat_map(|stack| stack.windows(2)) {
        let straight = pair[1].0.wrapping_sub(pair[0].1);
        assert!(
            straight <= MAX_STRAIGHT_BYTES,
            "{:x?} after {:x?}",
            pair[1],
            pair[0]
        );
    }
}

/// Checks that the program's call through a function pointer has four targets, each with
/// probability 1/4. The call is identified as the most frequent branch source with several targets.
/// Returns in the C library can have more targets, but are rare.
#[track_caller]
fn indirect_calls_have_four_targets(stacks: &[Vec<Edge>]) {
    let mut targets = BTreeMap::<u64, BTreeMap<u64, f64>>::new();
    for (from, to) in stacks.iter().flatten() {
        *targets.entry(*from).or_default().entry(*to).or_default() += 1.0;
    }
    let frequency = |targets: &BTreeMap<u64, f64>| targets.values().sum::<f64>();
    let several = targets.iter().filter(|(_, targets)| targets.len() > 1);
    let (from, targets) = several
        .max_by(|a, b| frequency(a.1).total_cmp(&frequency(b.1)))
        .unwrap();
    let total = frequency(targets);
    let sigma = (total * 0.25 * 0.75).sqrt();
    eprintln!(
        "  call at {from:#x}: {targets:x?} of {total}, expected {:.0} +- {sigma:.0}",
        total / 4.0
    );
    assert_eq!(targets.len(), 4, "{from:#x}: {targets:x?}");
    for count in targets.values() {
        assert!(
            (count - total / 4.0).abs() <= 4.0 * sigma,
            "{from:#x}: {targets:x?}"
        );
    }
}

/// Returns the number in row `row` of the table that `--stats` prints, or 0 if the row is missing.
fn figure(run: &GuestRun, row: &str) -> u64 {
    let line = run.vmm_log.lines().find_map(|line| line.strip_prefix(row));
    line.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0)
}

/// A branch record test of one PMU model, with the properties expected of the model.
struct BranchRecordTest {
    pmu: &'static str,
    /// Text that the kernel's message about its PMU driver must contain.
    driver: &'static str,
    depth: usize,
}

impl BranchRecordTest {
    fn run(&self) {
        let name = format!("records-{}", self.pmu);
        let place = TestHost::lease(&LabOptions::default(), TestHostLeaseMode::Exclusive)
            .unwrap_or_else(|error| panic!("{error}"));
        // The program's addresses are the same in all runs.
        let guest = LinuxGuest::new(&name, self.pmu)
            .script(SCRIPT)
            .cmdline("norandmaps nowatchdog")
            // A step takes a millisecond in the lab, and deferred PMIs arrive while the guest
            // executes kernel code.
            .args(["--name", &name, "--lbr", "on", "--pmi-share", "off", "--stats"]);
        let running = loaded(&place, &guest);
        let host = self.host_stacks(&place, &name);
        perfvisor(&place)(&["ctl", &name, "stop"]);
        let output = running.wait(LIMIT).unwrap();
        let run = guest.finish(&output).unwrap_or_else(|error| panic!("{error}"));
        assert!(run.section("dmesg").contains(self.driver), "{run}");
        self.check(&run, &host);
    }

    /// Records the program from the host and returns the recorded branch stacks.
    fn host_stacks(&self, place: &TestHost, name: &str) -> Vec<Vec<Edge>> {
        let ours = perfvisor(place);
        let data = place.scratch("host.data");
        let depth = self.depth.to_string();
        ours(&[
            "record",
            name,
            "-j",
            "any,u",
            "-e",
            "cycles:u",
            "-F",
            "50",
            "--branch-depth",
            &depth,
            "--branch-overhead",
            "80%",
            "--call-graph",
            "none",
            "-d",
            "20",
            "-q",
            "-o",
            &data,
        ]);
        let (text, _) = ours(&["script", "-i", &data, "-F", "brstack"]);
        stacks(&text)
    }

    fn check(&self, run: &GuestRun, host: &[Vec<Edge>]) {
        let user = stacks(run.section("stacks"));
        let all = stacks(run.section("all-stacks"));
        let calls = stacks(run.section("call-stacks"));
        let (pmis, steps) = (
            figure(run, "PMIs with branch records"),
            figure(run, "steps for branch records"),
        );
        let full = user.iter().filter(|stack| stack.len() == self.depth).count();
        let length =
            |stacks: &[Vec<Edge>]| stacks.iter().map(Vec::len).sum::<usize>() as f64 / stacks.len() as f64;
        let samples = run.section("stacks").lines().count();
        let distance = distance(&shares(&user), &shares(host));
        eprintln!(
            "{}: {samples} samples of user code, {} with a stack of {:.1} branches, {full} full; {} stacks of all \
            levels; {} of calls; {} of the host of {:.1} branches; distance of shares {distance:.3}; {pmis} PMIs, \
            {:.1} steps each, {:.2} ms each",
            self.pmu,
            user.len(),
            length(&user),
            all.len(),
            calls.len(),
            host.len(),
            length(host),
            steps as f64 / pmis as f64,
            figure(run, "their time in ns") as f64 / 1e6 / pmis as f64,
        );
        // On a busy machine, single steps in the lab are so slow that the time limit truncates
        // stacks.
        let long = user.iter().filter(|stack| stack.len() >= 4).count();
        assert!(long >= 40 && long * 2 > samples, "{long} of {samples}\n{run}");
        assert!(user.iter().all(|stack| stack.len() <= self.depth));
        are_consecutive(&user);
        are_consecutive(host);
        indirect_calls_have_four_targets(&user);
        indirect_calls_have_four_targets(host);
        assert!(distance < 0.2, "{:x?}\n{:x?}", shares(&user), shares(host));
        assert!(
            all.iter().flatten().any(|edge| edge.0 < 1 << 47),
            "user branches\n{run}"
        );
        assert!(!calls.is_empty(), "{run}");
        let report = run.section("report");
        for symbol in ["branch_round", "target_a", "target_d"] {
            assert!(report.contains(symbol), "no {symbol} in\n{report}");
        }
        eprintln!(
            "{}",
            report
                .lines()
                .filter(|line| line.contains('%'))
                .take(8)
                .collect::<Vec<_>>()
                .join("\n")
        );
    }
}

#[test]
fn perf_in_intel_guest_records_branch_stacks() {
    let test = BranchRecordTest {
        pmu: "intel",
        driver: "Architectural LBR, generic architected perfmon, 32-deep LBR",
        depth: 32,
    };
    test.run();
}

#[test]
fn perf_in_amd_guest_records_branch_stacks() {
    let test = BranchRecordTest {
        pmu: "amd-v2",
        driver: "16-deep LBR, core perfctr, AMD PMU driver",
        depth: 16,
    };
    test.run();
}
