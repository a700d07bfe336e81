//! Optimizes two programs with branch stacks recorded in a Linux guest, and evaluates the profiles.
//!
//! `perf2bolt`, `llvm-bolt` and the AutoFDO tools must read the recording, and its edge weights
//! must match those measured by BOLT's own instrumentation. The programs are Debian's bzip2 and
//! Lua, built from their source packages. A test that needs a missing tool is skipped.

mod tools;

use std::path::Path;

use integration::artefacts;
use integration::guest::{GuestRun, LinuxGuest};
use integration::lab::LabOptions;
use integration::lease::TestHostLeaseMode;
use integration::measure::{measured, skipped};
use integration::test_host::TestHost;

use crate::common::{LIMIT, loaded, perfvisor};
use tools::{BoltProfile, PerfToBolt, Program, Toolbox};

/// Name of the guest of this test.
const NAME: &str = "bolt";

/// Size of bzip2's input, which is the beginning of Lua's sources, in bytes.
const INPUT_BYTES: usize = 200_000;

/// Guest script that first records Lua with the guest's perf, and then runs each program on its own
/// vCPU while the host records.
const SCRIPT: &str = r#"
section lua perf record -q -j any,u -e cycles:u -c 20000000 -o /tmp/lua.data -- /opt/lua /opt/work.lua 250
send /tmp/lua.data
echo load-has-begun
while true; do taskset 1 /opt/lua /opt/work.lua 1000000; done &
files=/opt/input
for n in 1 2 3 4 5 6 7; do files="$files $files"; done
while true; do taskset 2 /opt/bzip2 -9kc $files >/dev/null; done
"#;

/// Returns the duration of the recording in seconds, from the environment variable
/// `PERFVISOR_BOLT_SECONDS` if it is set.
fn seconds() -> u64 {
    let value = std::env::var("PERFVISOR_BOLT_SECONDS").ok();
    value.and_then(|value| value.parse().ok()).unwrap_or(300)
}

/// Runs the programs in a guest. Saves the host's recording as `host.data` and the guest's own
/// recording of Lua as `guest.data` in `directory`.
fn record(directory: &Path, programs: &[Program]) -> GuestRun {
    let place = TestHost::lease(&LabOptions::default(), TestHostLeaseMode::Exclusive)
        .unwrap_or_else(|error| panic!("{error}"));
    let mut guest = LinuxGuest::new(NAME, "intel")
        .script(SCRIPT)
        .cpus(2)
        .cmdline("nowatchdog")
        // A step takes up to a millisecond in the lab, and deferred PMIs arrive while the guest
        // executes kernel code.
        .args(["--name", NAME, "--lbr", "on", "--pmi-share", "off"]);
    let files = programs.iter().map(|program| program.path.clone());
    for path in files.chain(["work.lua", "input"].map(|name| directory.join(name))) {
        let name = path.file_name().unwrap().to_str().unwrap();
        guest = guest.file(&format!("opt/{name}"), 0o755, std::fs::read(&path).unwrap());
    }
    let running = loaded(&place, &guest);
    let ours = perfvisor(&place);
    let (data, duration) = (place.scratch("host.data"), seconds().to_string());
    let (_, said) = ours(&[
        "-v",
        "record",
        NAME,
        "-j",
        "any,u",
        "-e",
        "cycles:u",
        "--branch-overhead",
        "90%",
        "-d",
        &duration,
        "-o",
        &data,
    ]);
    eprintln!("{said}");
    std::fs::write(directory.join("host.data"), place.get(&data).unwrap()).unwrap();
    ours(&["ctl", NAME, "stop"]);
    let output = running.wait(LIMIT).unwrap();
    let run = guest.finish(&output).unwrap_or_else(|error| panic!("{error}"));
    let recorded = run.console.files.get("lua.data");
    let recorded = recorded.unwrap_or_else(|| panic!("no recording of the guest's perf\n{run}"));
    std::fs::write(directory.join("guest.data"), recorded).unwrap();
    run
}

/// Checks that perf reads the recording. perf must print every branch stack together with its
/// sample's instruction pointer, and must resolve and annotate the program's functions.
fn perf_reads_it(tools: &Toolbox, directory: &Path) {
    let perf = |args: &[&str]| tools.run(directory, "perf", args).0;
    let script = perf(&["script", "-i", "host.data", "-F", "ip,brstack"]);
    let stacks = script.lines().filter(|line| line.matches("/-/-").count() > 1);
    let (stacks, lines) = (stacks.count(), script.lines().count());
    assert!(stacks > 50 && stacks * 10 > lines * 9, "{stacks} of {lines}");
    let symfs = directory.join("root");
    let symfs = symfs.to_str().unwrap();
    let report = ["report", "-b", "-i", "host.data", "--symfs", symfs, "--stdio"];
    let sort = ["--sort", "symbol_from,symbol_to"];
    let report = perf(&[&report[..], &sort].concat());
    assert!(
        report.contains("luaV_execute") && report.contains("BZ2_blockSort"),
        "{report:.3000}"
    );
    let annotate = ["annotate", "--stdio", "-i", "host.data", "--symfs", symfs];
    let text = perf(&[&annotate[..], &["-s", "luaV_execute"]].concat());
    assert!(text.contains("Disassembly of section .text"), "{text:.1000}");
}

/// Compares a program's profile from the recording with its profile from BOLT's instrumentation.
/// Then optimizes the program with each profile, and compares the results with each other and with
/// the original program.
fn check_program(tools: &Toolbox, directory: &Path, program: &Program) -> BoltProfile {
    let converted = tools.perf_to_bolt(directory, "host.data", program);
    let PerfToBolt {
        samples,
        branches,
        mismatching,
    } = converted.summary;
    let instrumented = tools.instrument(directory, program);
    let overlap = converted.profile.overlap(&instrumented);
    let of_targets = converted.profile.target_overlap(&instrumented);
    let ours = tools.optimize(directory, program, "ours", &converted.profile);
    let theirs = tools.optimize(directory, program, "instrumented", &instrumented);
    eprintln!(
        "{}: {samples} stacks, {branches} branches, {mismatching} % of the traces mismatch, overlap of edge weights \
         with instrumentation {:.2} %, of each branch's targets {:.2} %; dyno-stats, from branch stacks and from instrumentation:",
        program.name,
        100.0 * overlap,
        100.0 * of_targets
    );
    for (name, ratio) in &ours.ratios {
        eprintln!(
            "  {name}: {ratio:.3} {:.3} of the original's",
            theirs.ratios[name]
        );
    }
    assert!(mismatching <= 1.0, "{mismatching} %");
    assert!(overlap >= tools::MIN_OVERLAP, "{}: {overlap:.3}", program.name);
    assert!(
        of_targets >= tools::MIN_TARGET_OVERLAP,
        "{}: {of_targets:.3}",
        program.name
    );
    for name in tools::JUDGED_DYNO_STATS {
        let (ratio, other) = (ours.ratios[name], theirs.ratios[name]);
        let difference = (ratio / other - 1.0).abs();
        assert!(
            difference <= tools::MAX_DYNO_DIFFERENCE,
            "{name}: {ratio:.3} and {other:.3}"
        );
    }
    is_fast(tools, directory, program, &ours.path, 1.0);
    converted.profile
}

/// Checks that the run time of an optimized program is at most `max_ratio` times that of the
/// original program.
fn is_fast(tools: &Toolbox, directory: &Path, program: &Program, optimized: &Path, max_ratio: f64) {
    let name = optimized.file_name().unwrap().display();
    measured(&format!("{name} from branch stacks"), |_| {
        let ratio = tools.time_ratio(directory, program, optimized);
        vec![("of the original's time", ratio, 0.0..=max_ratio)]
    });
}

#[test]
fn bolt_optimizes_programs_from_branch_stacks() {
    let tools = match Toolbox::find() {
        Ok(tools) => tools,
        Err(missing) => return skipped(&missing, false),
    };
    let directory = artefacts::log_dir().unwrap().join("bolt");
    std::fs::create_dir_all(directory.join("root/opt")).unwrap();
    let programs = match tools.programs(&directory) {
        Ok(programs) => programs,
        Err(why) => return skipped(&why, false),
    };
    let input = tools.input(&directory, INPUT_BYTES);
    std::fs::write(directory.join("input"), input).unwrap();
    std::fs::write(directory.join("work.lua"), include_str!("bolt/work.lua")).unwrap();
    for program in &programs {
        let copy = directory.join("root/opt").join(program.name);
        std::fs::copy(&program.path, copy).unwrap();
    }
    record(&directory, &programs);
    perf_reads_it(&tools, &directory);
    for program in &programs {
        let host = check_program(&tools, &directory, program);
        if program.name == "lua" {
            let guest = tools.perf_to_bolt(&directory, "guest.data", program);
            let overlap = host.overlap(&guest.profile);
            eprintln!(
                "lua: {:?}, overlap of guest and host {:.2} %",
                guest.summary,
                100.0 * overlap
            );
            assert!(guest.summary.mismatching <= 1.0);
            assert!(overlap >= tools::MIN_GUEST_OVERLAP, "{overlap:.3}");
        }
        match tools.autofdo(&directory, program) {
            Ok(optimized) => is_fast(&tools, &directory, program, &optimized, tools::MAX_AUTOFDO_RATIO),
            Err(why) => skipped(&why, false),
        }
    }
}
