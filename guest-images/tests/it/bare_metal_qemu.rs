//! Boots the bare-metal guests in QEMU without KVM. Unlike Perfvisor, QEMU uses the multiboot
//! address fields instead of the ELF headers, and has no PMU. If QEMU is not installed, the tests
//! are skipped, or fail if `CI` is set.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use guest_images::bare_metal::{GUESTS, write_all};
use test_support::skip;

/// Time limit of a guest's run in QEMU. Only a hang reaches the limit, because a run takes about a
/// second.
const LIMIT: Duration = Duration::from_secs(600);

/// Result of running a guest in QEMU: the guest's output and the exit status of QEMU. The status is
/// `Some(0)` after a power-off and `Some((N << 1) | 1)` after a debug exit.
struct QemuRun {
    output: String,
    status: Option<i32>,
}

fn run(name: &str, cmdline: &str, cpus: u32) -> Option<QemuRun> {
    // Tests run in parallel within one process, and several test processes may run at the same
    // time.
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let number = RUNS.fetch_add(1, Ordering::Relaxed);
    let own = format!("bare-metal-{}-{number}", std::process::id());
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(own);
    write_all(&dir).unwrap();
    let spawned = Command::new("qemu-system-x86_64")
        .args([
            "-accel", "tcg", "-cpu", "max", "-display", "none", "-nic", "none", "-serial", "stdio",
        ])
        .args([
            "-device",
            "isa-debug-exit,iobase=0xf4,iosize=4",
            "-no-reboot",
            "-smp",
            &cpus.to_string(),
        ])
        .arg("-kernel")
        .arg(dir.join(format!("{name}.elf")))
        .args(["-append", cmdline])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let Ok(mut qemu) = spawned else {
        skip::skipped("qemu-system-x86_64 cannot be run; make setup installs it", true);
        std::fs::remove_dir_all(&dir).unwrap();
        return None;
    };
    let status = wait(&mut qemu);
    let mut output = String::new();
    qemu.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    std::fs::remove_dir_all(&dir).unwrap();
    Some(QemuRun { output, status })
}

fn wait(qemu: &mut Child) -> Option<i32> {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(status) = qemu.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > end {
            qemu.kill().unwrap();
            qemu.wait().unwrap();
            panic!("the guest did not end within {} s", LIMIT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn builtin_guest_reports_missing_pmu_and_powers_off() {
    let Some(run) = run("selftest", "lines", 2) else {
        return;
    };
    assert!(run.output.contains("This machine has no PMU"), "{}", run.output);
    assert!(run.output.contains("2 CPUs"), "{}", run.output);
    assert!(run.output.contains("result selftest pmu=none"), "{}", run.output);
    assert_eq!(run.status, Some(0), "{}", run.output);
}

#[test]
fn spin_runs_on_every_cpu_at_cpl3_and_ends() {
    let Some(run) = run("selftest", "quiet spin=1", 2) else {
        return;
    };
    assert!(
        run.output.contains("result spin cpus=2 seconds=1"),
        "{}",
        run.output
    );
    assert_eq!(run.status, Some(0), "{}", run.output);
}

/// The guest `selftest` rejects invalid values of `spin=`. An invalid duration, such as 0, must not
/// make it run forever.
#[test]
fn spin_with_zero_duration_is_rejected() {
    for time in ["abc", "", "0", "10s", "99999999999999999999"] {
        let Some(run) = run("selftest", &format!("quiet spin={time}"), 1) else {
            return;
        };
        assert!(
            run.output.contains("spin= takes a number of seconds"),
            "{}",
            run.output
        );
        assert_eq!(run.status, Some(3), "{}", run.output);
    }
}

/// The test kernel `vpmu` reports failures under QEMU, which implements AMD's core counter
/// registers without reporting them in CPUID. The test shows that the kernel's checks can fail and
/// that a failed check affects the exit status.
#[test]
fn vpmu_test_kernel_fails_under_qemu() {
    let Some(run) = run("vpmu", "", 1) else { return };
    let plan = run
        .output
        .lines()
        .find_map(|l| l.trim().strip_prefix("1.."))
        .expect("a TAP plan");
    let results = run
        .output
        .lines()
        .filter(|l| l.starts_with("ok ") || l.starts_with("not ok "))
        .count();
    assert_eq!(plan.parse(), Ok(results), "{}", run.output);
    assert!(
        run.output.lines().any(|l| l.starts_with("not ok ")),
        "{}",
        run.output
    );
    assert_eq!(run.status, Some(3), "{}", run.output);
}

#[test]
fn exact_test_kernel_skips_without_pmu() {
    let Some(run) = run("exact", "", 1) else { return };
    assert!(run.output.contains("1..0 # SKIP"), "{}", run.output);
    assert_eq!(run.status, Some(0), "{}", run.output);
}

#[test]
fn validate_guest_reports_missing_pmu_and_powers_off() {
    let Some(run) = run("validate", "", 2) else { return };
    assert!(run.output.contains(r#""at":"hello""#), "{}", run.output);
    assert!(run.output.contains(r#""pmu":"none""#), "{}", run.output);
    assert_eq!(run.status, Some(0), "{}", run.output);
}

#[test]
fn rdpmc_test_kernel_has_no_tests_without_pmu() {
    let Some(run) = run("rdpmc", "", 1) else { return };
    assert!(run.output.contains("1..0"), "{}", run.output);
    assert_eq!(run.status, Some(0), "{}", run.output);
}

#[test]
fn every_guest_has_a_qemu_test() {
    let names: Vec<_> = GUESTS.iter().map(|guest| guest.name).collect();
    assert_eq!(names, ["selftest", "vpmu", "exact", "rdpmc", "validate"]);
}
