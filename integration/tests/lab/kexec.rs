//! Tests kexec and kdump in a guest. The VMM provides no special support for them. perf in the new
//! kernel must count and sample as before.

use guest_images::kexec;
use integration::artefacts;
use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::ProcessTimeLimits;
use integration::parse::{complaints, judge_detail};
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// Numbers of the kernels, each of which is started by its predecessor.
const STAGES: [u32; 5] = [1, 2, 3, 4, 5];

/// Guest script of each of the five kernels, which reads the kernel's number from the command line
/// and then starts the next kernel.
///
/// The second kernel is loaded at a different address than the first, the third at the same address
/// as the second, and the fourth at a given address. The fourth kernel loads the fifth one as a
/// crash kernel (kdump) and panics; the fifth has one CPU and runs in reserved memory. Each new
/// initrd is packed from the files of the running kernel, including this script.
const SCRIPT: &str = r#"
stage() {
	for word in $(cat /proc/cmdline); do
		case $word in stage=*) echo "${word#stage=}"; return ;; esac
	done
	echo 1
}
stage=$(stage)
base='console=ttyS0 tsc=reliable no_timer_check quiet'
counts() {
	section "entry$stage" grep -w native_read_pmc /proc/kallsyms
	section "stat$stage" perf stat -x , -e cycles:u,cycles -- spin 300000000x
	section "record$stage" sh -c 'perf record -q -c 2000000 -e cycles:u -o /tmp/perf.data -- spin 300000000x &&
		perf report -i /tmp/perf.data --stdio -q --sort symbol 2>/dev/null | head -n 3 && perf script -i /tmp/perf.data | wc -l'
	section "detail$stage" perf stat -x, -d sleep 1
	section "dmesg$stage" dmesg
}
initrd() {
	cp /tmp/script /script
	(cd / && { echo dev; find bin dev/console init lib lib64 usr scripts root etc script second kexec 2>/dev/null; } | cpio -o -H newc 2>/dev/null) >/tmp/initrd
}
next() {
	initrd
	/kexec /second /tmp/initrd "$base stage=$1 $2"
}
last() {
	initrd
	/kexec -p /second /tmp/initrd "$base stage=5 nr_cpus=1" && cat /sys/kernel/kexec_crash_loaded
}
counts
[ "$stage" = 5 ] && section vmcore sh -c 'head -c 4 /proc/vmcore | tail -c 3; echo; grep -o "elfcorehdr=[^ ]*" /proc/cmdline'
case $stage in
1) section kexec1 next 2 nokaslr ;;
2) section kexec2 next 3 nokaslr ;;
3) section kexec3 next 4 crashkernel=400M ;;
4)
	section crash-loaded last
	/kexec -c
	;;
esac
"#;

#[track_caller]
fn counted(run: &GuestRun, stage: u32, event: &str) -> u64 {
    let text = run.section(&format!("stat{stage}"));
    let line = text
        .lines()
        .find(|line| line.split(',').nth(2) == Some(event))
        .unwrap_or_else(|| panic!("no {event} in {text:?}\n{run}"));
    line.split(',')
        .next()
        .and_then(|count| count.parse().ok())
        .unwrap_or_else(|| panic!("{event} is not counted: {line:?}\n{run}"))
}

fn symbol_address(run: &GuestRun, stage: u32) -> String {
    let text = run.section(&format!("entry{stage}"));
    text.split_whitespace().next().unwrap_or_default().to_owned()
}

/// perf counts and samples in a kernel started by kexec at the same address, at a different
/// address, and after a panic.
#[test]
fn kexec_kernels_count_and_sample() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let read = |path: &std::path::Path| {
        std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let images = artefacts::images().unwrap_or_else(|error| panic!("{error}"));
    let program = kexec::program(&artefacts::target_dir()).unwrap_or_else(|error| panic!("{error}"));
    let run = LinuxGuest::new("kexec", "amd")
        .cpus(2)
        .memory_mib(1200)
        .file("second", 0o644, read(&images.bz_image))
        .file("kexec", 0o755, read(&program))
        .script(SCRIPT)
        .args(["--stats", "-v"])
        .limit(LIMIT)
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"));
    let user = STAGES.map(|stage| counted(&run, stage, "cycles:u"));
    let all = STAGES.map(|stage| counted(&run, stage, "cycles"));
    let samples = STAGES.map(|stage| {
        let text = run.section(&format!("record{stage}"));
        assert!(text.contains("busy_loop"), "stage {stage}: {text}\n{run}");
        text.split_whitespace()
            .last()
            .and_then(|count| count.parse::<u64>().ok())
            .unwrap_or_else(|| panic!("stage {stage}: no samples in {text:?}\n{run}"))
    });
    eprintln!(
        "{}: native_read_pmc at {:?}; cycles:u {user:?}, cycles {all:?}, samples {samples:?}",
        place.describe(),
        STAGES.map(|stage| symbol_address(&run, stage)),
    );
    for stage in 0..STAGES.len() {
        // 300,000,000 iterations of two instructions take at least half as many cycles. A count
        // with a lost or duplicated period, or one that is off by 2^48, is far outside this range.
        assert!(
            user[stage] > 150_000_000 && user[stage] < 100 * user[0],
            "{user:?}\n{run}"
        );
        assert!(
            all[stage] > 150_000_000 && all[stage] < 100 * all[0],
            "{all:?}\n{run}"
        );
        assert!(samples[stage] >= 5, "{samples:?}\n{run}");
        let dmesg = run.section(&format!("dmesg{}", stage + 1));
        let found = complaints(dmesg);
        assert!(found.is_empty(), "stage {}: {found:?}\n{run}", stage + 1);
        let detail = run.section(&format!("detail{}", stage + 1));
        judge_detail(detail, &["cycles"]).unwrap_or_else(|why| panic!("stage {}: {why}\n{run}", stage + 1));
    }
    assert_eq!(symbol_address(&run, 1), symbol_address(&run, 2), "nokaslr\n{run}");
    assert_eq!(symbol_address(&run, 2), symbol_address(&run, 3), "nokaslr\n{run}");
    // The kernel may report on the previous line that the machine is slow.
    assert_eq!(
        run.section("crash-loaded").trim().lines().last(),
        Some("1"),
        "{run}"
    );
    // Only a kernel that runs after a panic can access the previous kernel's memory. (The panic
    // message itself may be lost, because another CPU owns the console while the new kernel
    // starts.)
    let vmcore = run.section("vmcore");
    assert!(
        vmcore.starts_with("ELF") && vmcore.contains("elfcorehdr="),
        "{vmcore}\n{run}"
    );
    let found = run
        .vmm_log
        .matches("the guest has started another kernel: RDPMC at");
    assert_eq!(found.count(), STAGES.len() - 1, "{run}");
}
