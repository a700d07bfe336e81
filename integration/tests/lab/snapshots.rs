//! Tests snapshots of a Linux guest. After the restore, `perf stat` and `perf record`, which were
//! running in the guest, continue with the same rates. The guest's clock does not advance between
//! save and restore, and its kernel reports no problem.

use std::time::Duration;

use integration::guest::{GuestRun, LinuxGuest};
use integration::parse::tsc_hz;
use integration::process::{HostCommand, ProcessOutput};
use integration::test_host::TestHost;

use crate::common::{LIMIT, perfvisor, run};

/// Time between save and restore. The guest's clock must exclude it; otherwise, the cycle rate of
/// an interval of `perf stat` would be below [`MIN_RATE`].
const DOWNTIME: Duration = Duration::from_secs(60);
/// Minimum ratio of the cycle rate in an interval of `perf stat` to the median rate of all
/// intervals.
const MIN_RATE: f64 = 0.3;
/// Maximum downtime of a migration by stream (`--downtime`), in milliseconds. The downtime is the
/// duration of the last round, which is long on an emulated host.
const STREAM_DOWNTIME_MS: &str = "60000";
/// Minimum number of `perf stat` intervals before the guest is saved or moved, and after it
/// continues.
const MIN_INTERVALS: usize = 2;

/// Guest script that samples itself and uses the disk, from before the first interval until after
/// the last one.
const SCRIPT: &str = r#"
drivers
section dmesg sh -c "dmesg | grep -i tsc"
perf record -q -F 99 -a -B -N -e cycles -o /tmp/data sleep 1000 &
recorder=$!
until [ -s /tmp/data ]; do sleep 0.1; done
head -c 65536 /dev/urandom >/tmp/block
(while [ ! -e /tmp/end ]; do
    dd if=/tmp/block of=/dev/vda bs=64k oflag=direct conv=notrunc status=none
    dd if=/dev/vda bs=64k count=1 iflag=direct status=none | cmp - /tmp/block || echo damaged >>/tmp/blocks
    echo same >>/tmp/blocks
    sleep 1
done) &
user=$!
sleep 1
echo before-the-cut >/dev/kmsg
perf stat -I 1000 -x, -o /tmp/stat -a -e cpu-clock,cycles,ref-cycles \
    sh -c 'spin 15; grep -c cpu-clock /tmp/stat >/tmp/at-cut; cat /proc/uptime >>/tmp/at-cut; echo marker-cut; spin 30'
kill -TERM $recorder
touch /tmp/end
wait $user
wait
section intervals cat /tmp/stat
section at-cut cat /tmp/at-cut
section blocks sort -u /tmp/blocks
section samples sh -c "perf script -i /tmp/data -F time,period | awk '{ n[int(\$1)]++; p[int(\$1)] += \$2 } END { for (s in n) print s, n[s], p[s] }' | sort -n"
section interrupts grep -E 'NMI|PMI|LOC' /proc/interrupts
section messages sh -c "dmesg | sed '1,/before-the-cut/d'"
"#;

/// Phrases of Linux messages about lost time, unexpected interrupts and nonexistent MSRs. The
/// message about an NMI handler that took too long is accepted, because emulation is slow.
const COMPLAINTS: [&str; 8] = [
    "unknown reason",
    "dazed",
    "lockup",
    "stall",
    "unchecked msr",
    "clocksource",
    "unstable",
    "irq loop",
];

/// Guest script that writes disk blocks and reads each of them back without the page cache. Some
/// disk requests are queued when the guest is saved.
const DISK_SCRIPT: &str = r#"
drivers
one() {
    head -c 1048576 /dev/urandom >/tmp/block
    md5sum </tmp/block >>/tmp/written
    dd if=/tmp/block of=/dev/vda bs=64k seek=$((16 * $1)) oflag=direct conv=notrunc status=none
    dd if=/dev/vda bs=64k skip=$((16 * $1)) count=16 iflag=direct status=none | md5sum >>/tmp/read
}
n=0
while [ $n -lt 24 ]; do
    one $n || break
    n=$((n + 1))
    echo block $n
    [ $n = 8 ] && echo marker-cut
done
section same cmp /tmp/written /tmp/read
n=0
while [ $n -lt 24 ]; do
    dd if=/dev/vda bs=64k skip=$((16 * n)) count=16 iflag=direct status=none | md5sum
    n=$((n + 1))
done >/tmp/again
section whole cmp /tmp/written /tmp/again
section count sh -c "wc -l </tmp/again"
section random sh -c "head -c 4096 /dev/hwrng | wc -c"
"#;

/// An interval in the output of `perf stat -I`.
#[derive(Debug)]
struct Interval {
    /// End of the interval, in seconds from the start of `perf stat`.
    end: f64,
    /// Value of `cpu-clock`, in milliseconds.
    cpu_clock: f64,
    cycles: f64,
    ref_cycles: f64,
}

impl Interval {
    fn cycles_per_second(&self) -> f64 {
        self.cycles / (self.cpu_clock / 1e3)
    }
}

/// Parses the intervals that `perf stat -I -x,` printed completely.
fn intervals(text: &str) -> Vec<Interval> {
    let value = |line: &str, event: &str| {
        let mut fields = line.trim().split(',');
        let end = fields.next()?.trim().parse::<f64>().ok()?;
        let value = fields.next()?.parse::<f64>().ok()?;
        let name = fields.nth(1)?;
        (name == event).then_some((end, value))
    };
    let clocks = text.lines().filter_map(|line| value(line, "cpu-clock"));
    let cycles = text.lines().filter_map(|line| value(line, "cycles"));
    let ref_cycles = text.lines().filter_map(|line| value(line, "ref-cycles"));
    clocks
        .zip(cycles.zip(ref_cycles))
        .map(|((end, cpu_clock), ((_, cycles), (_, ref_cycles)))| Interval {
            end,
            cpu_clock,
            cycles,
            ref_cycles,
        })
        .collect()
}

fn joined(before: ProcessOutput, after: ProcessOutput) -> ProcessOutput {
    ProcessOutput {
        stdout: [before.stdout, after.stdout].concat(),
        stderr: [before.stderr, after.stderr].concat(),
        ended: after.ended,
        elapsed: before.elapsed + after.elapsed,
    }
}

/// Starts the guest, saves and stops it, and restores it after [`DOWNTIME`]. If `twice` is `true`,
/// the guest is also saved once before, without being stopped.
fn cut_in_two(place: &TestHost, guest: &LinuxGuest, options: &[&str], twice: bool) -> GuestRun {
    let running = place.start(&guest.command(place).unwrap()).unwrap();
    assert!(
        running.wait_for("marker-cut", LIMIT),
        "{}",
        running.stdout_so_far()
    );
    let dir = place.scratch("snapshot");
    let ours = perfvisor(place);
    if twice {
        ours(&["ctl", "saved", "snapshot", &dir]);
        let (state, _) = ours(&["ctl", "saved", "status"]);
        assert!(state.starts_with("saved: running"), "{state}");
        run(place, &HostCommand::shell(format!("rm -r '{dir}'")));
    }
    let (said, _) = ours(&["ctl", "saved", "snapshot", &dir, "--stop"]);
    assert!(said.starts_with("saved: snapshot in "), "{said}");
    let before = running.wait(LIMIT).unwrap();
    assert!(before.success(), "{:?}: {}", before.ended, before.stderr_text());
    let (sizes, _) = run(place, &HostCommand::shell(format!("du -ak {dir}; ls -l {dir}")));
    eprintln!("{said}{sizes}");
    std::thread::sleep(DOWNTIME);
    let restore = ["run", "--name", "saved", "--restore", &dir, "--restore-verify"];
    let restore = restore.iter().chain(options).copied();
    let restore = HostCommand::new(place.perfvisor().unwrap()).args(restore);
    let restored = place.start(&restore).unwrap();
    let after = restored
        .wait_or_diagnose(LIMIT, || place.diagnose_hang())
        .unwrap();
    let run_of_guest = guest.finish(&joined(before, after));
    run_of_guest.unwrap_or_else(|error| panic!("{error}"))
}

/// Starts the guest and migrates it to another VM process on the same host. `migrate` contains
/// additional options of `ctl migrate`.
fn run_and_migrate(place: &TestHost, guest: &LinuxGuest, options: &[&str], migrate: &[&str]) -> GuestRun {
    let source = place.start(&guest.command(place).unwrap()).unwrap();
    let has_marker = source.wait_for("marker-cut", LIMIT);
    assert!(has_marker, "{}", source.stdout_so_far());
    let address = format!("unix:{}", place.scratch("incoming"));
    let receive = ["run", "--name", "moved", "--incoming", &address];
    let receive = receive.iter().chain(options).copied();
    let receiver = HostCommand::new(place.perfvisor().unwrap()).args(receive);
    let receiver = place.start(&receiver).unwrap();
    let socket = address.trim_start_matches("unix:");
    let waits = format!("until [ -S '{socket}' ]; do sleep 0.1; done");
    run(place, &HostCommand::shell(waits));
    let migrate = [&["ctl", "saved", "migrate", &address], migrate].concat();
    let (said, _) = perfvisor(place)(&migrate);
    assert!(said.starts_with("saved: runs as moved in process "), "{said}");
    eprint!("{said}");
    let before = source.wait(LIMIT).unwrap();
    assert!(before.success(), "{:?}: {}", before.ended, before.stderr_text());
    let after = receiver.wait_or_diagnose(LIMIT, || place.diagnose_hang());
    let run_of_guest = guest.finish(&joined(before, after.unwrap()));
    run_of_guest.unwrap_or_else(|error| panic!("{error}"))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns the number of complete `perf stat` intervals and the guest's uptime in seconds, shortly
/// before the guest was saved or moved.
fn at_cut(run: &GuestRun) -> (usize, f64) {
    let mut words = run.section("at-cut").split_whitespace();
    let number = words.next().and_then(|word| word.parse().ok());
    let uptime = words.next().and_then(|word| word.parse().ok());
    number.zip(uptime).unwrap_or_else(|| panic!("{run}"))
}

/// Checks that counts and the guest's clock do not jump while the guest is saved and restored, or
/// moved.
fn counts_continue(run: &GuestRun) {
    let at_cut = at_cut(run).0;
    let all = intervals(run.section("intervals"));
    let hz = tsc_hz(run.section("dmesg")).unwrap_or_else(|| panic!("no TSC frequency in dmesg\n{run}"));
    for interval in &all {
        let share = interval.cycles_per_second() / hz;
        eprintln!(
            "{:8.3} s: {:7.1} ms, cycles / (time x TSC) = {share:.3}",
            interval.end, interval.cpu_clock
        );
        // A count that exceeds the elapsed time, or is near zero, was corrupted by the cut.
        assert!(share > 0.05 && share < 1.1, "{interval:?}\n{run}");
    }
    assert!(
        at_cut >= MIN_INTERVALS && all.len() >= at_cut + MIN_INTERVALS,
        "{at_cut} of {}\n{run}",
        all.len()
    );
    let usual = median(all.iter().map(Interval::cycles_per_second));
    for pair in all.windows(2) {
        let is_later = pair[1].end > pair[0].end;
        let rate = pair[1].cycles_per_second() / usual;
        assert!(is_later && rate > MIN_RATE, "{rate:.3}: {pair:?}\n{run}");
    }
    let (before, after) = all.split_at(at_cut);
    let rate = |part: &[Interval]| median(part.iter().map(Interval::cycles_per_second));
    let ratio = rate(after) / rate(before);
    eprintln!("cycles per second after the restore / before: {ratio:.3}");
    assert!((0.6..1.6).contains(&ratio), "{ratio:.3}\n{run}");
    // The clock backing derives both counts from the guest's time. `perf stat` reads them one after
    // the other.
    for part in [before, after] {
        let cycles: f64 = part.iter().map(|interval| interval.cycles).sum();
        let ref_cycles: f64 = part.iter().map(|interval| interval.ref_cycles).sum();
        eprintln!("ref-cycles / cycles: {:.3}", ref_cycles / cycles);
        assert!((0.95..1.05).contains(&(ref_cycles / cycles)), "{part:?}\n{run}");
    }
}

/// Checks that the periods of the samples add up to the counted cycles, separately before and after
/// the guest was saved or moved. Periods vary, because Linux lowers the sampling rate while its
/// handler is slow.
fn sampling_continues(run: &GuestRun) {
    let numbers = |line: &str| {
        let words = line.split_whitespace();
        words.map(|word| word.parse().ok()).collect::<Option<Vec<f64>>>()
    };
    let lines = run.section("samples").lines().filter_map(numbers);
    let seconds: Vec<Vec<f64>> = lines.filter(|numbers| numbers.len() == 3).collect();
    eprintln!("second, samples, sum of periods: {seconds:?}");
    let (intervals_at_cut, uptime) = at_cut(run);
    let all = intervals(run.section("intervals"));
    let (before, after) = all.split_at(intervals_at_cut);
    for (part, is_after) in [(before, false), (after, true)] {
        let sampled = seconds.iter().filter(|second| (second[0] >= uptime) == is_after);
        let sampled: f64 = sampled.map(|second| second[2]).sum();
        let counted: f64 = part.iter().map(|interval| interval.cycles).sum();
        eprintln!("sum of periods / cycles: {:.3}", sampled / counted);
        // perf record runs longer than perf stat, and the interval that contains the cut is
        // assigned to the part after the cut.
        let ratio = sampled / counted;
        assert!((0.6..2.0).contains(&ratio), "{ratio:.3}\n{run}");
    }
}

/// `perf stat` and `perf record` in the guest continue after a restore. The median cycle rate after
/// the restore is 0.6 to 1.6 times the rate before, and Linux reports no problem.
#[test]
fn perf_in_linux_continues_after_restore() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let disk = empty_disk(&place, "snapshot-perf-disk", "1M");
    let guest = perf_guest("snapshot", &disk);
    perf_continues(&cut_in_two(&place, &guest, &["--disk", &disk], false));
}

/// `perf stat` and `perf record` in the guest continue after a migration to another process, which
/// takes over the disk.
#[test]
fn perf_in_linux_continues_in_another_process() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let disk = empty_disk(&place, "migration-disk", "1M");
    let guest = perf_guest("migration", &disk);
    perf_continues(&run_and_migrate(&place, &guest, &["--disk", &disk], &[]));
}

/// `perf stat` and `perf record` in the guest continue after a migration by stream, which sends the
/// memory as bytes while the guest writes to it. If the lab's kernel cannot detect written pages,
/// each round sends all memory.
#[test]
fn perf_in_linux_continues_after_a_stream() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let disk = empty_disk(&place, "stream-disk", "1M");
    let guest = perf_guest("stream", &disk);
    let stream = ["--stream", "--downtime", STREAM_DOWNTIME_MS];
    perf_continues(&run_and_migrate(&place, &guest, &["--disk", &disk], &stream));
}

/// Returns a guest that runs [`SCRIPT`].
fn perf_guest(name: &str, disk: &str) -> LinuxGuest {
    LinuxGuest::new(name, "intel")
        .memory_mib(256)
        .script(SCRIPT)
        .limit(LIMIT)
        .args(["--name", "saved", "--stats", "--disk", disk])
}

/// Checks the results of [`SCRIPT`] in a guest that was saved and restored, or moved.
fn perf_continues(run: &GuestRun) {
    eprintln!("console: {}", run.log().display());
    run.expect_success();
    counts_continue(run);
    sampling_continues(run);
    assert_eq!(run.section("blocks").trim(), "same", "{run}");
    let messages = run.section("messages").to_lowercase();
    for complaint in COMPLAINTS {
        assert!(!messages.contains(complaint), "{complaint}\n{run}");
    }
}

/// Creates a sparse disk image of zeros on the test host and returns its path.
fn empty_disk(place: &TestHost, name: &str, size: &str) -> String {
    let disk = place.scratch(name);
    run(place, &HostCommand::shell(format!("truncate -s {size} '{disk}'")));
    disk
}

/// Each disk request that is queued when the guest is saved is executed exactly once after the
/// restore, and its interrupt is not lost.
#[test]
fn disk_of_linux_continues_after_restore() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let disk = empty_disk(&place, "snapshot-disk", "24M");
    let guest = LinuxGuest::new("snapshot-disk", "intel")
        .memory_mib(256)
        .cpus(2)
        .script(DISK_SCRIPT)
        .limit(LIMIT)
        .args(["--name", "saved", "--disk", &disk]);
    let run = cut_in_two(&place, &guest, &["--disk", &disk], true);
    eprintln!("console: {}", run.log().display());
    run.expect_success();
    run.section("same");
    run.section("whole");
    assert_eq!(run.section("count").trim(), "24", "{run}");
    assert_eq!(run.section("random").trim(), "4096", "{run}");
}

#[test]
fn intervals_are_parsed() {
    let text = "\
        1.000112233,1000.11,msec,cpu-clock,1000110000,100.00,1.000,CPUs utilized\n\
        1.000112233,2500000000,,cycles,1000110000,100.00,2.5,GHz\n\
        1.000112233,2400000000,,ref-cycles,1000110000,100.00,2.4,G/sec\n\
        2.0001,999,msec,cpu-cl";
    let all = intervals(text);
    assert_eq!(all.len(), 1);
    assert!((all[0].cycles_per_second() / 2.5e9 - 1.0).abs() < 0.01);
}
