//! Tests machine features with an unmodified Debian kernel.
//!
//! The guest reboots within the same VM process, with a working PMU and all vCPUs, while the host
//! counts. The power button appears in the guest as a key. A VM in a jail runs as another user, has
//! its disk and its vsock device, and can reboot.

use integration::artefacts;
use integration::guest::LinuxGuest;
use integration::limit::ProcessTimeLimits;
use integration::measure::skipped;
use integration::parse::parse_stat_csv;
use integration::process::{HostCommand, HostProcess};
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;
/// Time without output after which a guest is regarded as hung.
const SILENCE: std::time::Duration = std::time::Duration::from_secs(120);

/// Guest script that reads its commands from the console after each boot. Nothing else remains from
/// the previous boot.
const SCRIPT: &str = r#"
echo marker-asks-$(cat /proc/sys/kernel/random/boot_id)
read word </dev/ttyS0
section cpus-$word cat /sys/devices/system/cpu/online
section stat-$word perf stat -a -x, -e cycles spin 0.3
echo marker-$word-done
case $word in again*) reboot -f; sleep 60;; esac
insmod /lib/modules/evdev.ko
insmod /lib/modules/button.ko
section devices cat /proc/bus/input/devices
echo marker-listens
section key sh -c "head -c 24 /dev/input/event0 | od -A n -t u2"
section interrupts grep acpi /proc/interrupts
"#;

/// Waits until the guest has printed `marker` `times` times.
#[track_caller]
fn says(guest: &HostProcess, marker: &str, times: usize) {
    let nth = |n: usize| guest.stdout_so_far().match_indices(marker).nth(n - 1).is_some();
    assert!(
        guest.wait_for(marker, LIMIT),
        "no {marker}: {}",
        guest.stdout_so_far()
    );
    let mut heard = (0, std::time::Instant::now());
    while !nth(times) {
        let now = guest.stdout_so_far().len();
        if now != heard.0 {
            heard = (now, std::time::Instant::now());
        }
        assert!(
            heard.1.elapsed() < SILENCE,
            "no {times} of {marker}: {}",
            guest.stdout_so_far()
        );
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

#[test]
fn linux_reboots_in_place_and_receives_power_button() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let guest = LinuxGuest::new("machine", "intel-v2")
        .cpus(2)
        .script(SCRIPT)
        .limit(LIMIT)
        .args(["--name", "machine", "--on-reset", "restart"]);
    let mut running = place.start(&guest.command(&place).unwrap()).unwrap();
    let perfvisor = place.perfvisor().unwrap();
    let ours = |args: &[&str]| HostCommand::new(perfvisor.clone()).args(args.iter().copied());
    says(&running, "marker-asks-", 1);
    let mut stat = place
        .start(&ours(&["stat", "machine", "-j", "-e", "cycles"]))
        .unwrap();
    let refused = place.run(&ours(&["ctl", "machine", "powerdown"]), LIMIT).unwrap();
    assert_eq!(refused.code(), Some(2), "no driver listens yet");
    for (boot, word) in ["again1", "again2", "last"].into_iter().enumerate() {
        says(&running, "marker-asks-", boot + 1);
        running.write(format!("{word}\n").as_bytes()).unwrap();
        says(&running, &format!("marker-{word}-done"), 1);
    }
    stat.signal(libc::SIGINT);
    let counted = stat.wait(LIMIT).unwrap();
    assert!(counted.success(), "{}", counted.stderr_text());
    says(&running, "marker-listens", 1);
    let pressed = place.run(&ours(&["ctl", "machine", "powerdown"]), LIMIT).unwrap();
    assert!(pressed.success(), "{}", pressed.stderr_text());
    let output = running.wait(LIMIT).unwrap();
    let text = output.stdout_text();
    assert_eq!(output.code(), Some(0), "{text}\n{}", output.stderr_text());
    let section = |name: &str| -> String {
        let begin = format!("@@pv begin {name}");
        let end = format!("@@pv end {name}");
        let rest = text.split_once(&begin).map(|(_, rest)| rest);
        let part = rest.and_then(|rest| rest.split_once(&end)).map(|(part, _)| part);
        part.unwrap_or_else(|| panic!("no section {name} in {text}"))
            .to_owned()
    };
    for word in ["again1", "again2", "last"] {
        assert_eq!(section(&format!("cpus-{word}")).trim(), "0-1");
        let cycles = parse_stat_csv(&section(&format!("stat-{word}"))).value("cycles");
        assert!(cycles.is_ok_and(|cycles| cycles > 0.0), "{text}");
    }
    let boots: std::collections::BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.split_once("marker-asks-").map(|(_, id)| id.trim()))
        .collect();
    assert_eq!(boots.len(), 3, "{boots:?}");
    assert!(section("devices").contains("Power Button"), "{text}");
    // The input event consists of time, EV_KEY, KEY_POWER and pressed (linux/input-event-codes.h).
    let words = section("key");
    let words: Vec<&str> = words.split_whitespace().collect();
    assert_eq!(words[8..], ["1", "116", "1", "0"], "{words:?}");
    let interrupts = section("interrupts");
    eprintln!("boots: {boots:?}\nhost: {}\n{interrupts}", counted.stdout_text());
}

/// Guest script that prints the boot loader type and checks what the VMM has passed to the kernel:
/// all memory, both vCPUs, the initrd, and a working PMU.
const HANDED: &str = r#"
section loader cat /proc/sys/kernel/bootloader_type
section cpus cat /sys/devices/system/cpu/online
section memory grep MemTotal /proc/meminfo
section stat perf stat -x, -e cycles spin 0.2
"#;

/// Linux boots by its PVH entry point. The same kernel also boots by its 64-bit entry point, and
/// reports a different boot loader type.
#[test]
fn linux_boots_by_pvh_entry() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    // arch/x86/platform/pvh/enlighten.c: loader 0xb, version 0. Documentation/arch/x86/boot.rst:
    // 0xff means undefined.
    for (protocol, loader) in [("pvh", "176"), ("auto", "255")] {
        let run = LinuxGuest::new(format!("machine-{protocol}"), "amd")
            .cpus(2)
            .script(HANDED)
            .limit(LIMIT)
            .args(["--boot-protocol", protocol])
            .run(&place)
            .unwrap_or_else(|error| panic!("{error}"));
        run.expect_success();
        assert_eq!(run.section("loader").trim(), loader, "{run}");
        assert_eq!(run.section("cpus").trim(), "0-1");
        let memory: u64 = run
            .section("memory")
            .split_whitespace()
            .find_map(|word| word.parse().ok())
            .unwrap();
        assert!((400_000..=512 << 10).contains(&memory), "{memory} KiB");
        let cycles = parse_stat_csv(run.section("stat")).value("cycles");
        assert!(cycles.is_ok_and(|cycles| cycles > 0.0), "{run}");
    }
}

/// Guest script that counts its boots on the disk and waits for a vsock connection.
const COUNTS_BOOTS: &str = r#"
drivers
boots=$(head -c 1 /dev/vda | tr '\0' 0)
printf %s $((boots + 1)) | dd of=/dev/vda conv=notrunc,fsync 2>/dev/null
echo marker-boot-$boots-
until [ -e /tmp/end ]; do sleep 0.2; done
[ $boots -lt 2 ] && { reboot -f; sleep 60; }
section stat perf stat -a -x, -e cycles spin 0.2
"#;

/// User ID of the jailed VM's process.
const USER: u32 = 1500;

/// A jailed Linux guest can use its disk and its sockets, and can reboot. The jail contains only
/// the given files, the sockets, the disk and the counters. pivot_root is not possible in the lab,
/// because the lab's root file system is an initramfs.
#[test]
fn jailed_linux_has_disk_sockets_and_reboots() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let shell = |line: &str| place.run(&HostCommand::shell(line), LIMIT).unwrap();
    if shell("id -u").stdout_text().trim() != "0" {
        return skipped("only root has a VM that is another user", false);
    }
    let [dir, disk] = ["jail", "jail/disk"].map(|name| place.scratch(name));
    let made = shell(&format!(
        "rm -rf '{dir}' && mkdir -p '{dir}' && truncate -s 1M '{disk}'"
    ));
    assert!(made.success(), "{}", made.stderr_text());
    let group = "/sys/fs/cgroup/jail";
    let has_group = matches!(*place, TestHost::Lab(_));
    let jail = if has_group {
        let made = shell(&format!(
            "mount -t cgroup2 none /sys/fs/cgroup && echo +memory >/sys/fs/cgroup/cgroup.subtree_control && \
             mkdir {group} && echo 1G >{group}/memory.max"
        ));
        assert!(made.success(), "{}", made.stderr_text());
        format!("uid={USER},cgroup={group}")
    } else {
        format!("uid={USER}")
    };
    let agent = &artefacts::binaries().unwrap().guest_agent;
    let guest = LinuxGuest::new("jailed", "amd")
        .cpus(2)
        .file("bin/perfvisor-agent", 0o755, std::fs::read(agent).unwrap())
        .script(COUNTS_BOOTS)
        .args(["--name", "jailed", "--on-reset", "restart", "--vsock"])
        .args(["--disk", &disk, "--jail", &jail]);
    let own_place = |command: HostCommand| command.env("XDG_RUNTIME_DIR", dir.clone());
    let running = place.start(&own_place(guest.command(&place).unwrap())).unwrap();
    let perfvisor = place.perfvisor().unwrap();
    let ours = |args: &[&str]| {
        let command = HostCommand::new(perfvisor.clone()).args(args.iter().copied());
        place.run(&own_place(command), LIMIT).unwrap()
    };
    for boot in 0..3 {
        says(&running, &format!("marker-boot-{boot}-"), 1);
        let data = format!("{dir}/data");
        let recorded = ours(&["record", "jailed", "-F", "100", "-d", "0.5", "-q", "-o", &data]);
        assert!(recorded.success(), "{}", recorded.stderr_text());
        let ended = ours(&["exec", "--wait", "60", "jailed", "--", "touch", "/tmp/end"]);
        assert!(ended.success(), "{}", ended.stderr_text());
        if boot == 0 && has_group {
            // The list also contains KVM's own threads.
            let who = shell(&format!(
                "for pid in $(cat {group}/cgroup.procs); do grep -q perfvisor /proc/$pid/comm && \
                 grep Uid /proc/$pid/status && ls /proc/$pid/root; done"
            ));
            let user = format!("Uid:\t{USER}\t{USER}\t{USER}\t{USER}\n");
            let text = who.stdout_text();
            assert!(
                text.starts_with(&user) && !text.contains("guest/vmlinux"),
                "{text}"
            );
            assert!(
                !text.lines().any(|name| name == "bin" || name == "root"),
                "{text}"
            );
        }
    }
    let run = guest.finish(&running.wait(LIMIT).unwrap()).unwrap();
    run.expect_success();
    let cycles = parse_stat_csv(run.section("stat")).value("cycles");
    assert!(cycles.is_ok_and(|cycles| cycles > 0.0), "{run}");
    assert!(!run.vmm_log.contains("will not be removed"), "{run}");
    let left = shell(&format!("ls -A '{dir}/perfvisor'; rm -rf '{dir}'"));
    assert_eq!(left.stdout_text(), "", "{run}");
    if has_group {
        // Restore the lab for later tests. KVM's threads may leave the cgroup slightly later.
        let removed = shell(&format!(
            "for n in 1 2 3 4 5; do rmdir {group} && break; sleep 1; done && umount /sys/fs/cgroup"
        ));
        assert!(removed.success(), "{}", removed.stderr_text());
    }
}
