//! Tests of `--backing exact`, which single-steps the guest to count its events, with hand-counted
//! code of the bare-metal guest and with repeated runs.

use crate::common::stepping::{check_line, command, host, kernel_file, run};
use crate::common::vm::assert_contains;
use guest_images::bare_metal::{EXACT_TESTS, VPMU_TESTS};
use test_support::kernels;

/// Blocks of code with events counted by hand are counted exactly on PMU models of both vendors,
/// without a lost step.
#[test]
fn hand_counted_code_is_counted_exactly() {
    let Some(host) = host() else { return };
    let kernel = kernel_file(EXACT_TESTS);
    let words = if host.user { "" } else { "no-user" };
    for model in ["intel", "amd"] {
        let line = format!("--pmu {model} --backing exact --stats");
        let run = run(&mut command(&line, Some((kernel.path(), words))));
        let (out, err) = (&run.out, &run.err);
        assert_eq!(run.status, Some(0), "{model}: {out}{err}");
        let passed = out.lines().filter(|line| line.starts_with("ok ")).count();
        assert!(passed >= 20 && !out.contains("not ok"), "{model}: {out}");
        assert!(!err.contains("lost track"), "{model}: {err}");
        assert_contains(err, "single steps");
    }
}

/// On hosts with working hardware breakpoints, `--backing exact` can run several instructions up to
/// a breakpoint (a straight run) instead of single-stepping each. Straight runs give the same
/// counts as single steps with fewer stops. The same blocks pass, and the same instructions retire.
#[test]
fn straight_runs_match_single_steps() {
    let Some(host) = host() else { return };
    let kernel = kernel_file(EXACT_TESTS);
    let words = if host.user { "" } else { "no-user" };
    for model in ["intel-v1", "intel", "amd", "amd-v2"] {
        let [with, without] = [true, false].map(|runs| {
            let line = format!("--pmu {model} --backing exact --stats");
            let mut command = command(&line, Some((kernel.path(), words)));
            if !runs {
                command.env("PERFVISOR_EXACT_WITHOUT_RUNS", "1");
            }
            let run = run(&mut command);
            let (out, err) = (&run.out, &run.err);
            assert!(
                run.status == Some(0) && !out.contains("not ok"),
                "{model}: {out}{err}"
            );
            assert!(!err.contains("lost track"), "{model}: {err}");
            let [steps, runs, in_runs] =
                ["single steps", "straight runs", "instructions in straight runs"].map(|row| run.figure(row));
            eprintln!("{model}: {steps} steps, {runs} runs of {in_runs} instructions");
            (run.out, steps, runs, in_runs)
        });
        assert_eq!(with.0, without.0, "{model}");
        assert_eq!((without.2, without.3), (0, 0), "{model}");
        assert_eq!(with.1 + with.3, without.1, "{model}: the same instructions");
        let has_runs = host.breakpoints && host.blocks_interrupts && !host.user;
        assert_eq!(with.2 > 0, has_runs, "{model}");
        // Straight runs need fewer than half of the stops, although many blocks consist only of
        // branches or have only two instructions between branches.
        assert!(!has_runs || 2 * (with.1 + with.2) < without.1, "{model}");
    }
}

/// Each run of the guest's tests has the same results and the same number of single steps.
#[test]
fn exact_counts_are_repeatable() {
    let Some(host) = host() else { return };
    let kernel = kernel_file(EXACT_TESTS);
    let words = if host.user { "" } else { "no-user" };
    let line = "--pmu intel --backing exact --stats";
    let counts = || {
        let run = run(&mut command(line, Some((kernel.path(), words))));
        assert_contains(&run.err, "single steps ");
        (run.figure("single steps "), run.out)
    };
    let first = counts();
    for _ in 0..3 {
        assert_eq!(counts(), first);
    }
}

/// If the host cannot single-step CPL 3, a message at startup says so, because the counts of user
/// code would be 0.
#[test]
fn host_without_user_stepping_is_reported() {
    let Some(host) = host() else { return };
    let mut quiet = command("--pmu intel --backing exact", None);
    let run = run(quiet.args(["--cmdline", "lines quiet"]));
    let (out, err) = (&run.out, &run.err);
    let is_reported = err.contains("user-mode instructions are not counted");
    assert_eq!(is_reported, !host.user, "{err}");
    assert_eq!(run.status, Some(0), "{out}");
    assert_contains(out, "instructions.cpl0");
    assert!(!out.contains("verdict=failed"), "{out}");
    let user = out.lines().find(|line| line.contains("instructions.cpl3"));
    assert_eq!(user.unwrap().ends_with("unsupported"), !host.user, "{out}");
    let line = check_line("--backing exact");
    assert_eq!(line.contains("CPL 3 is not counted"), !host.user, "{line}");
}

/// x86 has four hardware breakpoints, so a guest with five RDPMC instructions is rejected with a
/// one-line error that suggests a remedy.
#[test]
fn five_rdpmc_sites_exceed_breakpoints() {
    let Some(host) = host() else { return };
    let kernel = kernel_file(VPMU_TESTS);
    let mut command = command("--pmu intel --rdpmc hwbp --kernel", None);
    let run = run(command.arg(kernel.path()));
    let err = &run.err;
    assert_eq!(run.status, Some(2), "{err}");
    let wanted = if host.breakpoints {
        "at most 4, the number of breakpoints"
    } else {
        "do not trigger"
    };
    assert_contains(err, wanted);
    assert_contains(err, "--rdpmc trap");
}

/// Returns a guest that sets counter 0 to 42 and its event select to `selector`, reads the counter
/// with RDPMC, and writes the value to the debug-exit port.
fn rdpmc_guest(selector: u32) -> Vec<u8> {
    let start = [
        &[0xB9, 0xC1, 0, 0, 0][..], // mov ecx, IA32_PMC0
        &[0xB8, 42, 0, 0, 0],       // mov eax, 42
        &[0x31, 0xD2, 0x0F, 0x30],  // xor edx, edx; wrmsr
        &[0xB9, 0x86, 0x01, 0, 0],  // mov ecx, IA32_PERFEVTSEL0
        &[0xB8][..],                // mov eax, selector
    ]
    .concat();
    let end = [
        0x0F, 0x30, // wrmsr: the first that counts
        0x31, 0xC9, // xor ecx, ecx: the second
        0x0F, 0x33, // rdpmc
        0xE6, 0xF4, // out 0xf4, al
        0xF4, 0xEB, 0xFD, // hlt; jmp back
    ];
    let mut bytes = [&start[..], &selector.to_le_bytes(), &end].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(kernels::multiboot_header(3, None));
    let segment = kernels::ElfSegment {
        phys: 0x10_0000,
        bytes: &bytes,
        mem_bytes: 0x2000,
    };
    kernels::elf32(kernels::EM_386, 0x10_0000, &[segment])
}

/// An RDPMC that a hardware breakpoint intercepts returns the same value as an RDPMC that traps.
/// The values are also equal in single-stepped code, which counts the RDPMC like any other
/// instruction.
#[test]
fn rdpmc_by_breakpoint_matches_trap() {
    let Some(host) = host() else { return };
    let (off, instructions_at_cpl0) = (0, 0x42_00C0);
    for (rdpmc, wanted) in [("trap", true), ("hwbp", host.breakpoints)] {
        if !wanted {
            continue;
        }
        for (backing, selector, expected) in [
            ("none", off, 42),
            ("exact", off, 42),
            ("exact", instructions_at_cpl0, 44),
        ] {
            let kernel = kernel_file(&rdpmc_guest(selector));
            let line = format!("--pmu intel-v1 --backing {backing} --rdpmc {rdpmc} --memory 32M --kernel");
            let run = run(command(&line, None).arg(kernel.path()));
            assert_eq!(run.status, Some(expected << 1 | 1), "{line}: {}", run.err);
        }
    }
}
