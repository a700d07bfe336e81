//! Tests a VM under prolonged load: two disks (raw and qcow2) that are written and verified, four
//! vCPUs, perf in the guest, and recordings on the host, all concurrently. No operation may fail,
//! and the VMM's resource use must not grow.
//!
//! Run with `make soak SECONDS=1800`.

use std::time::Instant;

use integration::debian::{DebianTestHost, says};
use integration::footprint::{VmmFootprint, footprint, tracked};
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::process::HostCommand;
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits {
    overall: std::time::Duration::from_secs(4 * 3600),
    ..ProcessTimeLimits::GENEROUS
};
const GUEST_MIB: u64 = 1024;
/// Number of initial rounds in which the VMM's memory may grow, because the first load of each type
/// allocates buffers and tables.
const WARM_UP_ROUNDS: usize = 3;
/// Maximum growth of the VMM's memory after the warm-up, in KiB. The allocator grows in a few steps
/// of hundreds of KiB; a leak of 1 KiB per request would amount to hundreds of MiB.
const GROWTH_KIB: u64 = 1024;

/// Guest script that generates load for a given number of seconds.
const LOAD: &str = r#"
recordings() {
	n=0
	until [ -e /tmp/end ]; do
		perf record -q -a -F 99 -o /root/perf.data sleep 5 || { echo guest-perf-failed; return; }
		n=$((n + 1))
	done
	echo "guest-recordings $n"
}
recordings &
fio --output-format=terse --terse-version=3 --direct=1 --ioengine=libaio --iodepth=4 --time_based --runtime=$1 \
	--rw=randwrite --verify=crc32c --verify_backlog=256 --verify_fatal=1 \
	--name=small --filename=/dev/vdb --bs=4k --name=large --filename=/dev/vdc --bs=64k
status=$?
touch /tmp/end
wait
dmesg | grep -iE 'i/o error|hung|lockup|stall|oops|warning: cpu' && status=99
echo "fio-status $status"
exit $status
"#;

/// Writes an empty qcow2 image of 96 MiB to `path` on the test host.
fn put_qcow2(place: &TestHost, path: &str) {
    let image = tempfile::NamedTempFile::new().unwrap();
    let made = std::process::Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(image.path())
        .arg("96M")
        .status()
        .expect("qemu-img, of Debian's package qemu-utils");
    assert!(made.success());
    let bytes = std::fs::read(image.path()).unwrap();
    place.put(path, 0o644, &bytes).unwrap();
}

#[test]
#[ignore = "half an hour: make soak"]
fn vm_under_load_neither_fails_nor_grows() {
    let seconds: u64 = std::env::var("PERFVISOR_SOAK_SECONDS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(1800);
    let options = LabOptions {
        memory_mib: 4096,
        ..LabOptions::default()
    };
    let debian = DebianTestHost::new(1, options).unwrap_or_else(|error| panic!("{error}"));
    let place = &debian.place;
    let perfvisor = place.perfvisor().unwrap();
    let run = |command: &HostCommand| {
        let output = place
            .run(command, LIMIT)
            .unwrap_or_else(|error| panic!("{error}"));
        assert!(
            output.success(),
            "{}: {:?}: {}{}",
            command.line(),
            output.ended,
            output.stdout_text(),
            output.stderr_text()
        );
        output.stdout_text()
    };
    let ours = |words: &[&str]| HostCommand::new(&perfvisor).args(words.iter().copied());
    let [raw, qcow2] = ["soak-1.img", "soak-2.qcow2"].map(|name| place.scratch(name));
    run(&HostCommand::shell(format!("truncate -s 96M '{raw}'")));
    put_qcow2(place, &qcow2);
    let disks = [raw, format!("{qcow2},format=qcow2")];
    let command = debian
        .command("soak", 0)
        .unwrap()
        .args(["--cpus", "4", "--memory", &format!("{GUEST_MIB}M"), "--vsock"])
        .args(["--disk", &disks[0], "--disk", &disks[1]]);
    let vm = place.start(&tracked(place, &command)).unwrap();
    says(&vm, "login:", LIMIT).unwrap_or_else(|why| panic!("{why}"));
    run(&ours(&[
        "exec",
        "--wait",
        "120",
        "soak",
        "--",
        "systemctl",
        "is-system-running",
        "--wait",
    ]));
    let script = place.scratch("soak.sh");
    place.put(&script, 0o644, LOAD.as_bytes()).unwrap();
    run(&ours(&["cp", &script, "soak:/root/soak.sh"]));

    let began = Instant::now();
    let load = place
        .start(&ours(&[
            "exec",
            "soak",
            "--",
            "sh",
            "/root/soak.sh",
            &seconds.to_string(),
        ]))
        .unwrap();
    let data = place.scratch("soak.data");
    let mut seen: Vec<VmmFootprint> = Vec::new();
    while !load.stdout_so_far().contains("fio-status") {
        run(&ours(&[
            "record", "soak", "-q", "-F", "99", "-d", "10", "-o", &data,
        ]));
        seen.push(footprint(place, GUEST_MIB).unwrap_or_else(|error| panic!("{error}")));
        run(&HostCommand::shell(format!(
            "[ -s '{data}' ] && rm -f '{data}' '{data}.old'"
        )));
    }
    let end = load.wait(LIMIT).unwrap();
    let said = end.stdout_text();
    eprintln!(
        "soak: {seconds} s of load, {:.0?} in all, {} recordings by the host\n{said}\nheld: first {:?}, last {:?}, most {:?} KiB",
        began.elapsed(),
        seen.len(),
        seen.first(),
        seen.last(),
        seen.iter().map(|held| held.rss_kib).max()
    );
    assert!(end.success(), "{:?}: {said}{}", end.ended, end.stderr_text());
    assert!(
        said.contains("guest-recordings ") && !said.contains("failed"),
        "{said}"
    );
    let warm = seen.get(WARM_UP_ROUNDS..).unwrap_or_default();
    assert!(warm.len() >= 6, "too short to see growth: {seen:?}");
    let third = warm.len() / 3;
    let (early, late) = (&warm[..third], &warm[warm.len() - third..]);
    // The descriptors of guest counters and clients are opened and closed all the time, but a leak
    // raises the minimum.
    let least = |of: &[VmmFootprint], what: fn(&VmmFootprint) -> u64| of.iter().map(what).min().unwrap_or(0);
    for what in [
        |held: &VmmFootprint| held.descriptors,
        |held: &VmmFootprint| held.threads,
    ] {
        assert!(least(late, what) <= least(early, what), "{seen:?}");
    }
    let grown = least(late, |held| held.rss_kib).saturating_sub(least(early, |held| held.rss_kib));
    eprintln!("grown by {grown} KiB from the first third to the last");
    assert!(grown <= GROWTH_KIB, "{seen:?}");

    run(&ours(&["ctl", "soak", "powerdown"]));
    let end = vm.wait(LIMIT).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(end.code(), Some(0), "{}", end.stderr_text());
    assert!(!end.stderr_text().contains("I/O errors"), "{}", end.stderr_text());
}
