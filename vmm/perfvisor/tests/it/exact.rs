//! The exact backing on this host's KVM: the bare-metal guest with hand-counted code, and
//! repeatable runs.

use std::path::PathBuf;
use std::process::{Command, Output};

use crate::common::test_lock;
use crate::common::vm::{PROGRAM, assert_contains};
use test_support::{kernels, skip};
use vmm::kvm::execution;
use vmm::kvm::stepping::Stepping;

/// Returns the single-stepping capabilities of the host; `None` if KVM is unavailable.
fn host() -> Option<Stepping> {
    let Ok(kvm) = vmm::kvm::host::open() else {
        skip::skipped("no usable /dev/kvm here", false);
        return None;
    };
    let host = execution::probe(&kvm).unwrap().stepping;
    if !host.kernel {
        skip::skipped("this KVM does not step", false);
        return None;
    }
    Some(host)
}

fn guest(name: &str, image: &[u8]) -> PathBuf {
    let path = std::env::temp_dir().join(format!("perfvisor-{}-{name}", std::process::id()));
    std::fs::write(&path, image).unwrap();
    path
}

fn perfvisor(arguments: &[&str]) -> Output {
    output_of(command(arguments))
}

fn output_of(mut command: Command) -> Output {
    let _lock = test_lock::shared();
    command.output().unwrap()
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["300", PROGRAM, "run"]).args(arguments);
    command
}

/// Returns a row of the table of `--stats`, or 0 for an omitted row.
fn figure(stats: &str, row: &str) -> u64 {
    let line = stats.lines().find_map(|line| line.strip_prefix(row));
    line.map_or(0, |rest| rest.trim().parse().unwrap())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Hand-counted blocks are counted exactly on models of both vendors, without a lost step.
#[test]
fn hand_counted_code_is_counted_exactly() {
    let Some(host) = host() else { return };
    let kernel = guest("exact.elf", guest_images::bare_metal::EXACT_TESTS);
    let words = if host.user { "" } else { "no-user" };
    for model in ["intel", "amd"] {
        let run = perfvisor(&[
            "--kernel",
            kernel.to_str().unwrap(),
            "--pmu",
            model,
            "--backing",
            "exact",
            "--stats",
            "--cmdline",
            words,
        ]);
        let (out, err) = (text(&run.stdout), text(&run.stderr));
        assert!(run.status.success(), "{model}: {out}{err}");
        let passed = out.lines().filter(|line| line.starts_with("ok ")).count();
        assert!(passed >= 20 && !out.contains("not ok"), "{model}: {out}");
        assert!(!err.contains("lost track"), "{model}: {err}");
        assert!(err.contains("single steps"), "{model}: {err}");
    }
    std::fs::remove_file(kernel).unwrap();
}

/// On hosts with working hardware breakpoints, straight runs give the same counts as single steps:
/// the same blocks pass and the same instructions retire, with fewer stops.
#[test]
fn straight_runs_match_single_steps() {
    let Some(host) = host() else { return };
    let kernel = guest("runs.elf", guest_images::bare_metal::EXACT_TESTS);
    let words = if host.user { "" } else { "no-user" };
    for model in ["intel-v1", "intel", "amd", "amd-v2"] {
        let [with, without] = [true, false].map(|runs| {
            let mut command = command(&["--kernel", kernel.to_str().unwrap(), "--pmu", model]);
            command.args(["--backing", "exact", "--stats", "--cmdline", words]);
            if !runs {
                command.env("PERFVISOR_EXACT_WITHOUT_RUNS", "1");
            }
            let run = output_of(command);
            let (out, err) = (text(&run.stdout), text(&run.stderr));
            assert!(
                run.status.success() && !out.contains("not ok"),
                "{model}: {out}{err}"
            );
            assert!(!err.contains("lost track"), "{model}: {err}");
            let [steps, runs, in_runs] = ["single steps", "straight runs", "instructions in straight runs"]
                .map(|row| figure(&err, row));
            eprintln!("{model}: {steps} steps, {runs} runs of {in_runs} instructions");
            (out, steps, runs, in_runs)
        });
        assert_eq!(with.0, without.0, "{model}");
        assert_eq!((without.2, without.3), (0, 0), "{model}");
        assert_eq!(with.1 + with.3, without.1, "{model}: the same instructions");
        let has_runs = host.breakpoints && host.blocks_interrupts && !host.user;
        assert_eq!(with.2 > 0, has_runs, "{model}");
        // Many blocks consist of branches only, or have two instructions between branches.
        assert!(!has_runs || 2 * (with.1 + with.2) < without.1, "{model}");
    }
    std::fs::remove_file(kernel).unwrap();
}

/// The same blocks pass with the same number of steps in every run. Varying counts would be
/// estimates.
#[test]
fn exact_counts_are_repeatable() {
    let Some(host) = host() else { return };
    let kernel = guest("again.elf", guest_images::bare_metal::EXACT_TESTS);
    let words = if host.user { "" } else { "no-user" };
    let counts = || {
        let run = perfvisor(&[
            "--kernel",
            kernel.to_str().unwrap(),
            "--pmu",
            "intel",
            "--backing",
            "exact",
            "--stats",
            "--cmdline",
            words,
        ]);
        let steps = text(&run.stderr)
            .lines()
            .find_map(|line| line.strip_prefix("single steps ").map(|n| n.trim().to_owned()));
        (text(&run.stdout), steps.expect("steps are in the statistics"))
    };
    let first = counts();
    for _ in 0..3 {
        assert_eq!(counts(), first);
    }
    std::fs::remove_file(kernel).unwrap();
}

/// On hosts that cannot single-step CPL 3, a line at the start says so instead of a count of zero.
#[test]
fn host_without_user_stepping_is_reported() {
    let Some(host) = host() else { return };
    let run = perfvisor(&["--pmu", "intel", "--backing", "exact", "--cmdline", "lines quiet"]);
    assert_eq!(
        text(&run.stderr).contains("user-mode instructions are not counted"),
        !host.user,
        "{}",
        text(&run.stderr)
    );
    let out = text(&run.stdout);
    assert_eq!(run.status.code(), Some(0), "{out}");
    assert_contains(&out, "instructions.cpl0");
    assert!(!out.contains("verdict=failed"), "{out}");
    let user = out
        .lines()
        .find(|line| line.contains("instructions.cpl3"))
        .unwrap();
    assert_eq!(user.ends_with("unsupported"), !host.user, "{out}");
    let check = Command::new(PROGRAM).arg("check").output().unwrap();
    let line = text(&check.stdout)
        .lines()
        .find(|line| line.contains("--backing exact"))
        .unwrap()
        .to_owned();
    assert_eq!(line.contains("CPL 3 is not counted"), !host.user, "{line}");
}

/// Hardware has four breakpoints: five RDPMC instructions are refused in one line with a remedy.
#[test]
fn five_rdpmc_sites_exceed_breakpoints() {
    let Some(host) = host() else { return };
    let kernel = guest("vpmu.elf", guest_images::bare_metal::VPMU_TESTS);
    let run = perfvisor(&[
        "--kernel",
        kernel.to_str().unwrap(),
        "--pmu",
        "intel",
        "--rdpmc",
        "hwbp",
    ]);
    let err = text(&run.stderr);
    assert_eq!(run.status.code(), Some(2), "{err}");
    let wanted = if host.breakpoints {
        "at most 4, the number of breakpoints"
    } else {
        "do not trigger"
    };
    assert!(err.contains(wanted) && err.contains("--rdpmc trap"), "{err}");
    std::fs::remove_file(kernel).unwrap();
}

/// Returns a guest that sets counter 0 to 42 and its event select to `selector`, reads the counter
/// by RDPMC, and writes the value to the debug-exit port.
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

/// RDPMC by hardware breakpoint returns the same value as by trap, also in single-stepped code,
/// where the instruction is counted like any other.
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
            let kernel = guest(
                &format!("rdpmc-{rdpmc}-{backing}-{expected}"),
                &rdpmc_guest(selector),
            );
            let path = kernel.to_str().unwrap();
            let run = perfvisor(&[
                "--kernel",
                path,
                "--pmu",
                "intel-v1",
                "--backing",
                backing,
                "--rdpmc",
                rdpmc,
                "--memory",
                "32M",
            ]);
            let status = run.status.code();
            assert_eq!(
                status,
                Some(expected << 1 | 1),
                "{rdpmc} {backing}: {}",
                text(&run.stderr)
            );
            std::fs::remove_file(kernel).unwrap();
        }
    }
}
