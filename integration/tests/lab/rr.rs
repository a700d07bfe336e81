//! Tests that rr records and replays programs in a Linux guest whose conditional branches are
//! counted by single-stepping. Replay works even on a host without a PMU.
//!
//! During a replay, rr compares its counts with the recording at each event, so a replay fails if a
//! single branch is counted differently.

use std::fs;

use guest_images::qemu::QemuCpuRequirement;
use integration::artefacts;
use integration::guest::GuestRun;
use integration::lab::LabOptions;
use integration::test_host::TestHost;

use crate::exact::stepped;

/// Guest script that records and replays a static program, a program with threads, and a
/// dynamically linked Debian program, and then steps a replay backwards in gdb. The section
/// `uptime` contains the guest's uptime after each step.
const SCRIPT: &str = r#"
export _RR_TRACE_DIR=/tmp/rr LANG=C.UTF-8
sysctl -w kernel.yama.ptrace_scope=0 >/dev/null
# gdb connects to rr over the loopback interface.
ip link set lo up
failed=
timed() {
	section "$@" || failed="$failed $1"
	read -r _up _ </proc/uptime
	echo "$1 $_up" >>/tmp/uptime
}
in_gdb() {
	rr replay /tmp/rr/known-0 -- -batch -ex 'break *_start+27' -ex 'continue' -ex 'print $rip' -ex 'delete' \
		-ex 'stepi 21' -ex 'print $rip' -ex 'reverse-stepi 21' -ex 'print $rip' -ex 'continue' \
		-ex 'break *_start+27' -ex 'reverse-continue' -ex 'print $rip' -ex 'print $rdi' </dev/null
}
timed known rr record -n known 20
timed known-replay rr replay -a
timed gdb in_gdb
timed threads rr record -n threads 2 100x
timed threads-replay rr replay -a
timed xz sh -c 'rr record -n /usr/bin/xz --version >/tmp/recorded'
timed xz-replay sh -c 'rr replay -a >/tmp/replayed'
timed xz-equal cmp /tmp/recorded /tmp/replayed
section version cat /tmp/replayed
section uptime cat /tmp/uptime
section failed echo "$failed"
[ -z "$failed" ]
"#;

fn run_rr(name: &str, pmu: &str, arguments: &[&str]) -> GuestRun {
    let options = LabOptions {
        qemu_needs: QemuCpuRequirement::Xsave,
        memory_mib: 4096,
        ..LabOptions::default()
    };
    let place = TestHost::choose(&options).unwrap_or_else(|error| panic!("{}", artefacts::describe(&error)));
    let archive = artefacts::rr_archive().unwrap_or_else(|error| panic!("{error}"));
    let archive = fs::read(&archive).unwrap_or_else(|error| panic!("{}: {error}", archive.display()));
    stepped(name, pmu)
        .memory_mib(1024)
        .unpacked_over(archive)
        .args(arguments.iter().copied())
        .script(SCRIPT)
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Checks the exit status of every step of [`SCRIPT`]. Also checks that reverse execution in gdb
/// returned to its starting position, and from the end of the program to the last iteration of the
/// loop.
fn check(run: &GuestRun) {
    eprintln!("uptime after each step:\n{}{run}", run.section("uptime"));
    assert_eq!(run.section("failed").trim(), "", "{run}");
    run.expect_success();
    let printed: Vec<&str> = run
        .section("gdb")
        .lines()
        .filter_map(|line| line.strip_prefix('$')?.split_once(" = "))
        .map(|(_, value)| value)
        .collect();
    let [start, later, again, last, left] = printed[..] else {
        panic!("gdb printed {printed:?}:\n{run}");
    };
    assert_eq!(start, again, "21 instructions forwards and backwards");
    assert_ne!(start, later, "a loop of two instructions");
    // The loop counts down to 0.
    assert!(start == last && left == "1", "{printed:?}");
    assert!(run.section("version").contains("liblzma"), "{run}");
}

#[test]
#[ignore = "minutes of single steps: make rr"]
fn rr_replays_in_amd_guest() {
    check(&run_rr("rr-amd", "amd", &[]));
}

/// rr replays in a guest with a PMU model before Ice Lake, on which conditional branches are event
/// 0xC4 with umask 0x01. rr selects the event by the CPU signature.
#[test]
#[ignore = "minutes of single steps: make rr"]
fn rr_replays_in_skylake_guest() {
    check(&run_rr("rr-skylake", "intel", &["--cpu-signature", "6/85/4"]));
}

/// rr replays in a guest with a PMU model since Ice Lake, on which conditional branches are event
/// 0xC4 with umask 0x11.
#[test]
#[ignore = "minutes of single steps: make rr"]
fn rr_replays_in_ice_lake_guest() {
    check(&run_rr("rr-ice-lake", "intel", &["--cpu-signature", "6/106/6"]));
}
