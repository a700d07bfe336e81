//! rr records and replays programs in a Linux guest whose conditional branches are counted by single
//! steps, on a host without a PMU.

use std::fs;

use guest_images::qemu::QemuNeeds;
use integration::artefacts;
use integration::guest::{GuestRun, LinuxGuest};
use integration::lab::LabOptions;
use integration::limit::Limit;
use integration::test_host::TestHost;

use crate::exact::stepped;

/// Prints the duration of each step, for the figures in the guide.
const SCRIPT: &str = r#"
export _RR_TRACE_DIR=/tmp/rr HOME=/root
sysctl -w kernel.perf_event_paranoid=-1 kernel.yama.ptrace_scope=0 >/dev/null 2>&1
timed() {
	read -r _start _ </proc/uptime
	section "$@"
	read -r _end _ </proc/uptime
	echo "@@ $1 from $_start to $_end"
}
timed known-record rr record -n known 200
timed known-replay rr replay -a
"#;

fn guest(pmu: &str, arguments: &[&str]) -> GuestRun {
    let options = LabOptions {
        qemu_needs: QemuNeeds::Xsave,
        memory_mib: 4096,
        ..LabOptions::default()
    };
    let place = TestHost::choose(&options).unwrap_or_else(|error| panic!("{}", artefacts::describe(&error)));
    let archive = artefacts::rr_archive().unwrap_or_else(|error| panic!("{error}"));
    let archive = fs::read(archive).unwrap();
    let script = std::env::var("RR_SCRIPT").map_or_else(|_| SCRIPT.to_owned(), |f| fs::read_to_string(f).unwrap());
    stepped(&format!("rr-{pmu}"), pmu)
        .memory_mib(1024)
        .unpacked_over(archive)
        .args(arguments.iter().copied())
        .script(script)
        .limit(Limit::GENEROUS)
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn rr_replays_recorded_programs_on_amd() {
    let run = guest("amd", &[]);
    println!("{run}");
}

#[test]
fn rr_replays_recorded_programs_on_intel() {
    let run = guest("intel", &[]);
    println!("{run}");
}
