//! The machine under an unmodified Debian kernel: it boots again in the same VM when it reboots, with a
//! PMU that counts and all its vCPUs, while an operator counts on; and its power button is a key that it
//! sees.

use integration::guest::LinuxGuest;
use integration::limit::Limit;
use integration::parse::parse_stat_csv;
use integration::place::Place;
use integration::process::{Command, Process};

const LIMIT: Limit = Limit::GENEROUS;
/// A guest that says nothing for so long does not get on; only a failure waits for it.
const SILENCE: std::time::Duration = std::time::Duration::from_secs(120);

/// Each boot is told over the console what it is to do, as nothing is left of the one before.
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

/// Waits until the guest has said `marker` so many times.
#[track_caller]
fn says(guest: &Process, marker: &str, times: usize) {
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
fn linux_reboots_in_place_and_hears_its_power_button() {
    let place = Place::shared().unwrap_or_else(|error| panic!("{error}"));
    let guest = LinuxGuest::new("machine", "intel-v2")
        .cpus(2)
        .script(SCRIPT)
        .limit(LIMIT)
        .args(["--name", "machine", "--on-reset", "restart"]);
    let mut running = place.start(&guest.command(&place).unwrap()).unwrap();
    let perfvisor = place.perfvisor().unwrap();
    let ours = |args: &[&str]| Command::new(perfvisor.clone()).args(args.iter().copied());
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
    // An input event: the time, EV_KEY, KEY_POWER, pressed (linux/input-event-codes.h).
    let words = section("key");
    let words: Vec<&str> = words.split_whitespace().collect();
    assert_eq!(words[8..], ["1", "116", "1", "0"], "{words:?}");
    let interrupts = section("interrupts");
    eprintln!("boots: {boots:?}\nhost: {}\n{interrupts}", counted.stdout_text());
}

/// What a kernel notes of who loaded it, and that it has what it was handed: all memory, both vCPUs, the
/// initrd that runs this, a PMU that counts.
const HANDED: &str = r#"
section loader cat /proc/sys/kernel/bootloader_type
section cpus cat /sys/devices/system/cpu/online
section memory grep MemTotal /proc/meminfo
section stat perf stat -x, -e cycles spin 0.2
"#;

/// The same kernel by both of its entries: they differ in who Linux thinks has loaded it, and in nothing
/// else.
#[test]
fn linux_boots_by_its_pvh_entry_too() {
    let place = Place::shared().unwrap_or_else(|error| panic!("{error}"));
    // arch/x86/platform/pvh/enlighten.c: loader 0xb, version 0. Documentation/arch/x86/boot.rst: 0xff is
    // none.
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
