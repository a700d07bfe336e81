//! Tests disks of a Debian guest: flushed data survives killing the VM, read-only disks remain
//! unchanged, and lack of space on the host causes an I/O error in the guest.

use std::path::Path;

use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::ProcessTimeLimits;
use integration::measure::skipped;
use integration::process::{HostCommand, ProcessOutput};
use integration::test_host::TestHost;
use tempfile::TempDir;

const SIGKILL: i32 = 9;
const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// Guest script that creates a file system on the first disk, writes to both disks, flushes them,
/// and waits until the VM is killed.
const WRITER: &str = r#"
load ext4
drivers
mkfs.ext4 -q /dev/vda
mkdir -p /mnt
mount -t ext4 /dev/vda /mnt
seq 1 300000 >/mnt/numbers
md5sum </mnt/numbers
sync
seq 1 100000 | dd of=/dev/vdb bs=64k conv=fsync 2>/dev/null
[ -e /dev/vdc ] && seq 1 100000 | dd of=/dev/vdc bs=64k seek=3 conv=fsync 2>/dev/null
echo "@@ready"
seq 1 100000 >/mnt/never-flushed
[ -e /dev/vdc ] && seq 1 10000 | dd of=/dev/vdc bs=64k seek=60 2>/dev/null
sleep 10000
"#;

/// Guest script that checks a read-only disk, and the data that the killed VM has left on its
/// disks.
const READER: &str = r#"
load ext4
drivers
section replay e2fsck -p /dev/vda
section check e2fsck -fn /dev/vda
mkdir -p /mnt
mount -t ext4 /dev/vda /mnt
section numbers md5sum /mnt/numbers
section expected sh -c 'seq 1 300000 | md5sum'
section second sh -c 'seq 1 100000 >/tmp/second; head -c $(stat -c %s /tmp/second) /dev/vdb | cmp - /tmp/second'
section facts sh -c 'cd /sys/block; for f in vdb/ro vdb/size vdb/serial vda/ro vda/serial; do cat $f; echo; done'
section refused sh -c 'echo x | dd of=/dev/vdb conv=fsync'
umount /mnt
if [ -e /dev/vdc ]; then
	section third sh -c 'dd if=/dev/vdc bs=64k skip=3 count=9 2>/dev/null | head -c $(stat -c %s /tmp/second) | cmp - /tmp/second'
	section blocks cat /sys/block/vdc/queue/logical_block_size
	section base sh -c 'head -c 9 /dev/vdc'
	section trim blkdiscard -o 196608 -l 2097152 /dev/vdc
	section trimmed sh -c 'head -c 2293760 /dev/vdc | tail -c 2097152 | tr -d "\0" | wc -c'
fi
section discard blkdiscard /dev/vda
section zeros sh -c 'head -c 1048576 /dev/vda | tr -d "\0" | wc -c'
section interrupts grep virtio /proc/interrupts
"#;

/// Guest script that writes to a disk until the host's file system is full.
const FILLER: &str = r#"
drivers
section fill dd if=/dev/urandom of=/dev/vda bs=1M count=24 conv=fsync
section lives sh -c 'head -c 512 /dev/vda | wc -c'
"#;

/// Guest script that reads 8 MiB from each of two disks and prints the elapsed seconds.
const READER_OF_TWO: &str = r#"
drivers
seconds() {
    from=$(cut -d' ' -f1 /proc/uptime)
    dd if=$1 of=/dev/null bs=256k count=32 iflag=direct 2>/dev/null || echo failed
    to=$(cut -d' ' -f1 /proc/uptime)
    echo $from $to
}
section limited seconds /dev/vda
section unlimited seconds /dev/vdb
section messages sh -c "dmesg | grep -ci 'i/o error'"
"#;

fn guest(name: &str, pmu: &str, script: &str, disks: &[String]) -> LinuxGuest {
    let arguments = disks.iter().flat_map(|disk| ["--disk".to_owned(), disk.clone()]);
    LinuxGuest::new(name, pmu)
        .script(script)
        .args(arguments)
        .limit(LIMIT)
}

fn shell(place: &TestHost, line: &str) -> ProcessOutput {
    let output = place.run(&HostCommand::shell(line), LIMIT).unwrap();
    assert!(output.success(), "{line}: {}", output.stderr_text());
    output
}

fn section<'r>(run: &'r GuestRun, name: &str) -> &'r str {
    let section = run.console.sections.get(name);
    let section = section.unwrap_or_else(|| panic!("no section {name}\n{run}"));
    section.text.trim()
}

fn status(run: &GuestRun, name: &str) -> Option<i32> {
    run.console.sections.get(name).and_then(|section| section.status)
}

/// Data that a guest has flushed is on the disk after the VM has been killed. The test runs guests
/// with different virtual PMUs one after the other, which must not affect the disks.
#[test]
fn flushed_data_survives_killed_vm() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let [first, second] = ["first.img", "second.img"].map(|name| place.scratch(name));
    shell(
        &place,
        &format!("truncate -s 64M '{first}'; truncate -s 8M '{second}'"),
    );

    let third = qcow2_disk(&place);
    let mut disks = vec![first.clone(), second.clone()];
    disks.extend(third.as_ref().map(|(disk, ..)| disk.clone()));
    let writer = guest("disks-writer", "intel", WRITER, &disks);
    let mut process = place.start(&writer.command(&place).unwrap()).unwrap();
    assert!(
        process.wait_for("@@ready", LIMIT),
        "the guest did not come to its end:\n{}",
        process.stdout_so_far()
    );
    let written = process.stdout_so_far();

    // Start a second VM that uses the same disk.
    let other = guest("disks-other", "off", "true", &[format!("{first},ro")]);
    let output = place.run(&other.command(&place).unwrap(), LIMIT).unwrap();
    let said = output.stderr_text();
    assert_eq!(
        (output.code(), said.trim().lines().count()),
        (Some(2), 1),
        "{said}"
    );
    assert!(
        said.contains(": in use by process") && said.contains("perfvisor"),
        "{said}"
    );

    process.signal(SIGKILL);
    let _ = process.wait(LIMIT).unwrap();

    let mut disks = vec![first, format!("{second},ro,serial=data-1")];
    disks.extend(third.as_ref().map(|(disk, ..)| disk.clone()));
    let run = guest("disks-reader", "amd", READER, &disks).run(&place).unwrap();
    // Status 1 means that the journal was replayed.
    assert!(matches!(status(&run, "replay"), Some(0 | 1)), "{run}");
    assert_eq!(status(&run, "check"), Some(0), "{run}");
    let sum = section(&run, "expected").split(' ').next().unwrap();
    assert!(section(&run, "numbers").starts_with(sum), "{run}");
    assert!(written.contains(sum), "{written}");
    assert_eq!(status(&run, "second"), Some(0), "{run}");
    let facts: Vec<&str> = section(&run, "facts").split_whitespace().collect();
    assert_eq!(facts, ["1", "16384", "data-1", "0", "disk0"], "{run}");
    assert_ne!(status(&run, "refused"), Some(0), "{run}");
    assert_eq!(status(&run, "discard"), Some(0), "{run}");
    assert_eq!(section(&run, "zeros"), "0", "{run}");
    assert_eq!(run.status, Some(0), "{run}");
    assert!(!run.vmm_log.contains("I/O errors"), "{run}");
    if let Some((_, image, dir)) = third {
        assert_eq!(status(&run, "third"), Some(0), "{run}");
        assert_eq!(section(&run, "base"), "perfvisor", "{run}");
        assert_eq!(section(&run, "blocks"), "4096", "{run}");
        assert_eq!(
            (status(&run, "trim"), section(&run, "trimmed")),
            (Some(0), "0"),
            "{run}"
        );
        whole(&place, &image, dir.path());
    }
}

/// Creates a disk of 8 MiB as a qcow2 image with a raw backing file. Returns the value of `--disk`,
/// the path of the image, and the directory of the backing file, or `None` if qemu-img is not
/// installed.
fn qcow2_disk(place: &TestHost) -> Option<(String, String, TempDir)> {
    let dir = tempfile::tempdir().unwrap();
    let base = [b"perfvisor".as_slice(), &[0; 503]].concat();
    std::fs::write(dir.path().join("base"), base).unwrap();
    let made = std::process::Command::new("qemu-img")
        .args([
            "create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "top", "8M",
        ])
        .current_dir(dir.path())
        .output();
    let Ok(made) = made else {
        skipped(
            "no qemu-img (Debian's package qemu-utils) to make a qcow2 image",
            true,
        );
        return None;
    };
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let [top, base] = ["top", "base"].map(|name| {
        let path = place.scratch(name);
        place
            .put(&path, 0o644, &std::fs::read(dir.path().join(name)).unwrap())
            .unwrap();
        path
    });
    Some((
        format!("{top},format=qcow2,backing={base},block-size=4096"),
        top,
        dir,
    ))
}

/// Checks the integrity of the qcow2 image at `path` with qemu-img. Leaked clusters are accepted,
/// because the VM was killed.
fn whole(place: &TestHost, path: &str, dir: &Path) {
    std::fs::write(dir.join("top"), place.get(path).unwrap()).unwrap();
    let check = std::process::Command::new("qemu-img")
        .args(["check", "-f", "qcow2", "top"])
        .current_dir(dir)
        .output()
        .unwrap();
    let said = [check.stdout, check.stderr].concat();
    assert!(
        matches!(check.status.code(), Some(0 | 3)),
        "{}",
        String::from_utf8_lossy(&said)
    );
}

/// Reading 8 MiB from a disk with a limit of 2 MiB per second takes about three seconds. The first
/// 2 MiB are a burst without delay. The guest's driver reports no error.
#[test]
fn rate_limit_delays_the_requests_of_linux() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let [limited, unlimited] = ["limited", "unlimited"].map(|name| place.scratch(name));
    shell(&place, &format!("truncate -s 16M '{limited}' '{unlimited}'"));
    let disks = [format!("{limited},bandwidth=2M/1000"), unlimited];
    let run = guest("disks-limited", "off", READER_OF_TWO, &disks).run(&place);
    let run = run.unwrap();
    let seconds = |name: &str| {
        let times = section(&run, name)
            .split_whitespace()
            .map(|time| time.parse().ok());
        match times.collect::<Option<Vec<f64>>>().as_deref() {
            Some([from, to]) => to - from,
            _ => panic!("{run}"),
        }
    };
    let (limited, unlimited) = (seconds("limited"), seconds("unlimited"));
    eprintln!("8 MiB: {limited:.2} s with 2 MiB a second, {unlimited:.2} s without a limit");
    // The last request of 256 KiB may complete before all of its tokens are available.
    assert!(
        limited > (8.0 - 2.0 - 0.25) / 2.0 - 0.05 && limited > unlimited,
        "{limited} {unlimited}"
    );
    assert_eq!(section(&run, "messages"), "0", "{run}");
}

#[test]
fn full_host_disk_causes_guest_io_error() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let small = place.scratch("small");
    let mounted = place
        .run(
            &HostCommand::shell(format!(
                "mkdir -p '{small}' && mount -t tmpfs -o size=8M tmpfs '{small}'"
            )),
            LIMIT,
        )
        .unwrap();
    if !mounted.success() {
        skipped("mounting a tmpfs needs root", false);
        return;
    }
    let disk = format!("{small}/disk.img");
    shell(&place, &format!("truncate -s 32M '{disk}'"));
    let run = guest("disks-full", "off", FILLER, &[disk]).run(&place);
    shell(&place, &format!("umount -l '{small}'"));
    let run = run.unwrap();
    assert_ne!(status(&run, "fill"), Some(0), "{run}");
    assert_eq!(section(&run, "lives"), "512", "{run}");
    assert_eq!(run.status, Some(0), "{run}");
    let lines = run
        .vmm_log
        .lines()
        .filter(|line| line.contains("disk0: the guest gets I/O errors"));
    assert_eq!(lines.count(), 1, "{run}");
    assert!(run.vmm_log.contains("No space left on device"), "{run}");
}
