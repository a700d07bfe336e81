//! Tests virtio devices with an unmodified Debian kernel. The tests include in-place reboots,
//! single-stepping, and breakpoints on RDPMC.

use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::ProcessTimeLimits;
use integration::measure::skipped;
use integration::parse::parse_stat_csv;
use integration::process::HostCommand;
use integration::test_host::{TestHost, TestHostError};

use crate::shared_guests::{self, GuestPart};

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// Guest script that increments the boot number on the disk, uses all devices, and then prints
/// `marker-up`.
const REBOOTS: &str = r#"
drivers
boot=$(head -c 1 /dev/vda)
case $boot in [0-2]) ;; *) boot=0 ;; esac
for n in 0 1; do
	ip link set eth$n up && ip addr add 10.98.$n.2/24 dev eth$n
	until [ "$(cat /sys/class/net/eth$n/carrier)" = 1 ]; do sleep 0.1; done
	section ping-$boot-$n ping -c 2 10.98.$n.1
done
section entropy-$boot sh -c "head -c 64 /dev/hwrng | wc -c"
dd if=/dev/urandom of=/tmp/new bs=64k count=64 2>/dev/null
dd if=/tmp/new of=/dev/vdb bs=64k conv=fsync 2>/dev/null
echo 3 >/proc/sys/vm/drop_caches
section disk-$boot sh -c "head -c 4194304 /dev/vdb | cmp - /tmp/new"
section stat-$boot perf stat -x, -e cycles spin 0.2
echo marker-up-$boot
read word </dev/ttyS0
echo $((boot + 1)) | dd of=/dev/vda conv=fsync 2>/dev/null
[ $boot = 2 ] || { reboot -f; sleep 60; }
section end cat /sys/class/net/eth0/address
"#;

#[track_caller]
fn shell(place: &TestHost, line: &str) -> String {
    let output = place.run(&HostCommand::shell(line), LIMIT).unwrap();
    assert!(output.success(), "{line}: {}", output.stderr_text());
    output.stdout_text()
}

/// Two disks, two network devices and an entropy device keep working over three boots of one VM.
/// Data remains on the disk, and Perfvisor has no more open descriptors and threads than after the
/// first boot.
#[test]
fn disks_and_networks_survive_reboots() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    if matches!(*place, TestHost::Direct(_)) {
        println!("SKIP: the test makes tap devices, which it does in the lab only");
        return;
    }
    for n in [0, 1] {
        shell(
            &place,
            &format!(
                "tunctl -t pvtap{n} >/dev/null && ip link set pvtap{n} up && ip addr add 10.98.{n}.1/24 dev pvtap{n}"
            ),
        );
    }
    let disks = ["boots.img", "data.img"].map(|name| place.scratch(name));
    for disk in &disks {
        shell(&place, &format!("truncate -s 8M '{disk}'"));
    }
    let guest = LinuxGuest::new("devices-reboot", "amd")
        .cpus(2)
        .script(REBOOTS)
        .limit(LIMIT)
        .args(["--name", "reboots", "--on-reset", "restart"])
        .args(["--disk", &disks[0], "--disk", &disks[1]])
        .args(["--net", "tap=pvtap0,vhost=off", "--net", "tap=pvtap1"]);
    let mut running = place.start(&guest.command(&place).unwrap()).unwrap();
    let held = || {
        let pid = "pid=$(pidof perfvisor | cut -d' ' -f1)";
        let count = |what: &str| shell(&place, &format!("{pid}; ls /proc/$pid/{what} | wc -l"));
        (count("fd"), count("task"))
    };
    let mut first = None;
    for boot in 0..3 {
        assert!(
            running.wait_for(&format!("marker-up-{boot}"), LIMIT),
            "boot {boot}: {}",
            running.stdout_so_far()
        );
        let now = held();
        eprintln!("boot {boot}: descriptors and threads {now:?}");
        assert_eq!(first.get_or_insert_with(|| now.clone()), &now, "boot {boot}");
        running.write(b"on\n").unwrap();
    }
    let run = guest.finish(&running.wait(guest.limits()).unwrap()).unwrap();
    for boot in 0..3 {
        for n in [0, 1] {
            let ping = run.section(&format!("ping-{boot}-{n}"));
            assert!(ping.contains("2 packets received"), "{ping}");
        }
        assert_eq!(run.section(&format!("entropy-{boot}")).trim(), "64");
        run.section(&format!("disk-{boot}"));
        let stat = parse_stat_csv(run.section(&format!("stat-{boot}")));
        assert!(stat.value("cycles").is_ok_and(|cycles| cycles > 0.0), "{run}");
    }
    assert_eq!(shell(&place, &format!("head -c 1 '{}'", disks[0])), "3");
    run.expect_success();
}

/// Guest script in which perf counts a program that reads the disk without the page cache.
const COUNTED: &str = r#"
drivers
seq 1 200000 | head -c 1048576 >/tmp/data
dd if=/tmp/data of=/dev/vda bs=64k conv=fsync 2>/dev/null
for n in 0 1 2; do
	section stat-$n perf stat -x, -e EVENT dd if=/dev/vda of=/tmp/again iflag=direct bs=4k count=8 status=none
	section read-$n sh -c "head -c 32768 /tmp/data | cmp - /tmp/again"
done
section disk sh -c "head -c 1048576 /dev/vda | cmp - /tmp/data"
"#;

/// Creates the disk image that [`COUNTED`] reads, and returns its path.
fn make_counted_disk(place: &TestHost) -> Result<String, TestHostError> {
    let disk = place.scratch("counted.img");
    let made = place.run(&HostCommand::shell(format!("truncate -s 4M '{disk}'")), LIMIT)?;
    assert!(made.success(), "{}", made.stderr_text());
    Ok(disk)
}

/// Returns the counts of `event` in all repetitions of [`COUNTED`].
fn counts_with_a_disk(run: &GuestRun, event: &str) -> Vec<f64> {
    run.section("disk");
    run.expect_success();
    let counts = (0..3).map(|n| {
        run.section(&format!("read-{n}"));
        let stat = parse_stat_csv(run.section(&format!("stat-{n}")));
        stat.value(event).unwrap_or_else(|error| panic!("{error}\n{run}"))
    });
    let counts: Vec<f64> = counts.collect();
    eprintln!("{event} of three reads: {counts:?}; {:.1?}", run.elapsed);
    counts
}

/// The disk test that runs in `shared_guests::STEPPED`, a single-stepped guest that several test
/// modules share.
pub const STEPPED: GuestPart = GuestPart {
    tests: &["devices::stepped_guest_with_disk_counts_exactly"],
    prepare: || {},
    add: |place, guest| {
        let disk = make_counted_disk(place)?;
        Ok((
            guest.args(["--disk", &disk]),
            COUNTED.replace("EVENT", "branches:u"),
        ))
    },
};

/// Counts in a single-stepped guest remain exact while disk interrupts occur.
#[test]
fn stepped_guest_with_disk_counts_exactly() {
    let counts = counts_with_a_disk(shared_guests::STEPPED.run(), "branches:u");
    assert!(counts[0] > 1000.0, "{counts:?}");
    assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
}

/// The guest uses its disk while hardware breakpoints intercept RDPMC, if the host supports them.
#[test]
fn guest_with_rdpmc_breakpoints_uses_disk() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let fire = place
        .check("/stepping/breakpoints")
        .unwrap_or_else(|error| panic!("{error}"));
    if !fire {
        skipped("hardware breakpoints do not fire in guests of this KVM", false);
        return;
    }
    let disk = make_counted_disk(&place).unwrap();
    let run = LinuxGuest::new("devices-hwbp", "amd")
        .cmdline("nowatchdog norandmaps")
        .script(COUNTED.replace("EVENT", "cycles"))
        .limit(LIMIT)
        .args(["--rdpmc", "hwbp", "--disk", &disk])
        .run(&place)
        .unwrap_or_else(|error| panic!("{error}"));
    let counts = counts_with_a_disk(&run, "cycles");
    assert!(counts.iter().all(|counted| *counted > 1e6), "{counts:?}");
}

/// Guest script that writes more data to the virtio console than all buffers of the guest and the
/// host can hold.
const CONSOLE: &str = r#"
drivers
until [ -c /dev/hvc0 ]; do sleep 0.1; done
exec 3<>/dev/hvc0
stty raw -echo <&3
echo marker-console
read word <&3
section word echo "got $word"
echo "hello from hvc0" >&3
read word </dev/ttyS0
seq 1 20000 >&3
section unread echo "the guest runs on"
echo "the last line" >&3
read word </dev/ttyS0
"#;

/// A virtio console on a pseudo-terminal carries lines in both directions. If nobody reads the
/// pseudo-terminal, the guest is not blocked, and the most recent output is kept for the next
/// reader.
#[test]
fn virtio_console_does_not_block_without_reader() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let guest = LinuxGuest::new("devices-console", "off")
        .script(CONSOLE)
        .limit(LIMIT)
        .args(["--name", "hvc", "--virtio-console", "pty"]);
    let mut running = place.start(&guest.command(&place).unwrap()).unwrap();
    assert!(
        running.wait_for("marker-console", LIMIT),
        "{}",
        running.stdout_so_far()
    );
    let perfvisor = place.perfvisor().unwrap();
    let status = shell(&place, &format!("'{perfvisor}' ctl hvc status"));
    let terminal = status
        .lines()
        .find_map(|line| line.strip_prefix("hvc0 at pty="))
        .unwrap_or_else(|| panic!("{status}"));
    let said = shell(&place, &format!("echo typed >{terminal}; head -n 1 <{terminal}"));
    assert_eq!(said.trim_end(), "hello from hvc0");
    running.write(b"on\n").unwrap();
    assert!(
        running.wait_for("the guest runs on", LIMIT),
        "{}",
        running.stdout_so_far()
    );
    let rest = "while read -r line; do echo \"$line\"; case $line in 'the last line'*) break ;; esac; done";
    let said = shell(&place, &format!("{rest} <{terminal}")).replace('\r', "");
    running.write(b"on\n").unwrap();
    let run = guest.finish(&running.wait(guest.limits()).unwrap()).unwrap();
    run.expect_success();
    assert_eq!(run.section("word").trim(), "got typed");
    // The guest writes 108,908 bytes. The VMM buffers 64 KiB, and the pseudo-terminal a small
    // amount.
    assert!((1000..100_000).contains(&said.len()), "{} bytes", said.len());
    assert!(said.contains("\n20000\nthe last line"), "{said}");
}

/// Size of the balloon, in MiB. The guest writes and removes a file of the same size before.
const BALLOON_MIB: u64 = 96;

/// Guest script that writes and removes a large file. The guest then has free pages to which the
/// host has allocated memory.
const BALLOON: &str = r#"
drivers
dd if=/dev/zero of=/tmp/fill bs=1M count=128 2>/dev/null
rm /tmp/fill
echo marker-filled
read word </dev/ttyS0
section inflated grep MemTotal /proc/meminfo
echo marker-inflated
read word </dev/ttyS0
section deflated grep MemTotal /proc/meminfo
section kernel sh -c "dmesg | grep -iE 'oom|out of memory'; true"
"#;

/// Waits until the balloon of VM `name` has `mib` MiB, and returns the balloon's state.
fn balloon_of(place: &TestHost, name: &str, mib: u64) -> serde_json::Value {
    let perfvisor = place.perfvisor().unwrap();
    let mut balloon = serde_json::Value::Null;
    for _ in 0..240 {
        let text = shell(place, &format!("'{perfvisor}' ctl {name} balloon --json"));
        balloon = serde_json::from_str(&text).unwrap();
        if balloon["actual_bytes"] == mib << 20 {
            return balloon;
        }
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
    panic!("the balloon has not reached {mib} MiB: {balloon}");
}

/// Inflating the balloon by N MiB reduces the VM's resident memory on the host by N MiB. The guest
/// reports statistics, and can use the memory again after deflation.
#[test]
fn balloon_gives_memory_of_linux_back() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let guest = LinuxGuest::new("devices-balloon", "off")
        .memory_mib(256)
        .script(BALLOON)
        .limit(LIMIT)
        .args(["--name", "ballooned", "--balloon", "stats=1"]);
    let mut running = place.start(&guest.command(&place).unwrap()).unwrap();
    assert!(
        running.wait_for("marker-filled", LIMIT),
        "{}",
        running.stdout_so_far()
    );
    let perfvisor = place.perfvisor().unwrap();
    let resident_kib = || {
        // The VM's brokers have the same name, and use far less memory.
        let status = "for pid in $(pidof perfvisor); do grep RssAnon /proc/$pid/status; done | sort -n -k 2 | tail -n 1";
        let words = shell(&place, status);
        let kib = words
            .split_whitespace()
            .nth(1)
            .and_then(|kib| kib.parse::<u64>().ok());
        kib.unwrap_or_else(|| panic!("{words}"))
    };
    let before = resident_kib();
    shell(
        &place,
        &format!("'{perfvisor}' ctl ballooned balloon {BALLOON_MIB}"),
    );
    let balloon = balloon_of(&place, "ballooned", BALLOON_MIB);
    let after = resident_kib();
    eprintln!("resident: {before} KiB, with the balloon {after} KiB; {balloon}");
    assert!(
        before.saturating_sub(after) >= (BALLOON_MIB << 10) / 2,
        "{before} {after}"
    );
    assert!(
        balloon["released_bytes"].as_u64() >= Some(BALLOON_MIB << 20),
        "{balloon}"
    );
    assert!(
        balloon["statistics"]["total_memory"].as_u64() > Some(0),
        "{balloon}"
    );
    running.write(b"on\n").unwrap();
    assert!(
        running.wait_for("marker-inflated", LIMIT),
        "{}",
        running.stdout_so_far()
    );
    shell(&place, &format!("'{perfvisor}' ctl ballooned balloon 0"));
    balloon_of(&place, "ballooned", 0);
    running.write(b"on\n").unwrap();
    let run = guest.finish(&running.wait(guest.limits()).unwrap()).unwrap();
    run.expect_success();
    // Linux excludes pages in the balloon from its total memory.
    assert_ne!(run.section("inflated"), run.section("deflated"));
    assert_eq!(run.section("kernel").trim(), "");
}
