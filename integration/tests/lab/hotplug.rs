//! Tests vCPU hot-plug under an unmodified Debian kernel: the guest accepts and ejects vCPUs, its
//! perf counts and samples on them, and the host's counts and recordings are complete.
//!
//! One guest with 1 of 3 vCPUs runs two rounds: plug to 3 vCPUs, run perf in the guest, unplug to 1
//! vCPU. Meanwhile, the host counts the whole VM and each vCPU, and records, from before the first
//! plug until after the last unplug.

use std::collections::BTreeMap;

use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::ProcessTimeLimits;
use integration::parse::parse_stat_csv;
use integration::process::{HostCommand, HostProcess, ProcessOutput};
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// Number of rounds in which vCPUs are plugged and unplugged.
const ROUNDS: u32 = 2;

/// Sampling period of the host and the guest, in cycles. The guest records several hundred samples
/// per measurement.
const PERIOD: u64 = 20_000_000;

/// Maximum difference between the cycles of the whole VM and the sum over its vCPUs, in cycles.
/// Each event is rounded once per lifetime of a vCPU.
const ROUNDED: f64 = 8.0;

/// Guest script that measures on the plugged vCPUs. Linux leaves a new CPU offline, so the function
/// `onliner` brings it online. The host plugs in the vCPUs after it has started to count and
/// record.
const SCRIPT: &str = r#"
onliner() {
    while true; do
        for f in /sys/devices/system/cpu/cpu[1-9]*/online; do
            [ -e $f ] && read s <$f && [ "$s" = 0 ] && echo 1 >$f
        done 2>/dev/null
        sleep 0.1
    done
}
has() {
    until read o </sys/devices/system/cpu/online && [ "$o" = "$1" ]; do sleep 0.1; done
}
onliner &
section possible cat /sys/devices/system/cpu/possible
echo marker-ready
for r in 1 2; do
    has 0-2
    section stat-$r perf stat -a -A -x, -e cpu-clock,cycles \
        perf record -q -a -B -N -c 20000000 -e cycles -o /tmp/r$r threads 3 1500000000x
    section samples-$r taskset 1 sh -c "perf script -i /tmp/r$r -F cpu | sort | uniq -c"
    echo marker-measured-$r
    has 0
    section alone-$r perf stat -a -A -x, -e cpu-clock,cycles spin 0.5
    echo marker-alone-$r
done
has 0-1
section end cat /sys/devices/system/cpu/online
section dmesg sh -c "dmesg | grep -i -E 'cpu|eject|acpi' | tail -n 60"
"#;

/// Runs a command that must succeed and returns its standard output and standard error.
#[track_caller]
fn run(place: &TestHost, command: &HostCommand) -> (String, String) {
    let output = place.run(command, LIMIT).unwrap();
    said(&output)
}

#[track_caller]
fn said(output: &ProcessOutput) -> (String, String) {
    assert!(output.success(), "{:?}: {}", output.ended, output.stderr_text());
    (output.stdout_text(), output.stderr_text())
}

/// Waits until the guest has printed `marker`.
#[track_caller]
fn reaches(guest: HostProcess, marker: &str) -> HostProcess {
    if guest.wait_for(marker, LIMIT) {
        return guest;
    }
    match guest.wait(LIMIT) {
        Ok(output) => panic!(
            "no {marker}: {:?}\n{}\n{}",
            output.ended,
            output.stdout_text(),
            output.stderr_text()
        ),
        Err(error) => panic!("no {marker}: {error}"),
    }
}

/// Parses the output of `perfvisor stat -j` into counts by event and vCPU.
fn counts(lines: &str) -> BTreeMap<(String, Option<u64>), f64> {
    let count = |line: &str| {
        let object: serde_json::Value = serde_json::from_str(line).unwrap();
        let text = object["counter-value"].as_str().unwrap();
        let value = text.parse::<f64>().unwrap_or_else(|_| panic!("{line}"));
        let share = object["pcnt-running"].as_f64();
        assert_eq!(share, Some(100.0), "it counted all the time: {line}");
        (
            (
                object["event"].as_str().unwrap().to_owned(),
                object["vcpu"].as_u64(),
            ),
            value,
        )
    };
    lines.lines().map(count).collect()
}

/// Parses the first line of each sample printed by `perfvisor script`. Returns the number of
/// samples and the sum of their periods, by vCPU.
fn samples(script: &str) -> BTreeMap<u64, (u64, u64)> {
    let mut by_vcpu: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for line in script.lines() {
        let mut words = line.split_whitespace();
        let Some(vcpu) = words
            .by_ref()
            .find_map(|w| w.strip_prefix('[')?.strip_suffix(']')?.parse().ok())
        else {
            continue;
        };
        let period = words.nth(1).and_then(|word| word.parse::<u64>().ok());
        let entry = by_vcpu.entry(vcpu).or_default();
        entry.0 += 1;
        entry.1 += period.unwrap_or_else(|| panic!("no period: {line}"));
    }
    by_vcpu
}

#[test]
fn linux_plugs_and_ejects_vcpus() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let guest = LinuxGuest::new("hotplug", "intel-v2")
        .max_cpus(3)
        .script(SCRIPT)
        .limit(LIMIT)
        .args(["--name", "hotplug", "--stats"]);
    let running = place.start(&guest.command(&place).unwrap()).unwrap();
    let mut running = reaches(running, "marker-ready");
    let perfvisor = place.perfvisor().unwrap();
    let ours = |args: &[&str]| HostCommand::new(perfvisor.clone()).args(args.iter().copied());
    let data = place.scratch("hotplug.data");
    let period = PERIOD.to_string();
    // Start counting while no vCPU is running, so that all events cover the same time.
    let pause = || run(&place, &ours(&["ctl", "hotplug", "pause"]));
    pause();
    let begin = |args: &[&str]| {
        let process = place.start(&ours(args)).unwrap();
        assert!(
            process.wait_for_message("has started", LIMIT),
            "{args:?} did not begin"
        );
        process
    };
    let events = "cycles,kvm:exits,task-clock";
    let whole = begin(&["-v", "stat", "hotplug", "-j", "-e", events]);
    let each = begin(&["-v", "stat", "hotplug", "-A", "-j", "-e", events]);
    let recording = begin(&[
        "-v",
        "record",
        "hotplug",
        "-c",
        &period,
        "--chain-every",
        "1",
        "-o",
        &data,
    ]);
    run(&place, &ours(&["ctl", "hotplug", "resume"]));

    for round in 1..=ROUNDS {
        let (state, stderr) = change_vcpus(&place, &ours(&["-v", "ctl", "hotplug", "vcpus", "3"]));
        assert_eq!(state, "hotplug: running, 3 vCPUs\n", "{stderr}");
        eprintln!("round {round}: 1 to 3 vCPUs: {}", answered(&stderr));
        running = reaches(running, &format!("marker-measured-{round}"));
        let (state, stderr) = change_vcpus(&place, &ours(&["-v", "ctl", "hotplug", "vcpus", "1"]));
        assert_eq!(state, "hotplug: running, 1 of 3 vCPUs\n", "{stderr}");
        eprintln!("round {round}: 3 to 1 vCPUs: {}", answered(&stderr));
        running = reaches(running, &format!("marker-alone-{round}"));
    }
    pause();
    let mut out = Vec::new();
    for mut process in [whole, each, recording] {
        process.signal(libc::SIGINT);
        out.push(said(&process.wait(LIMIT).unwrap()));
    }
    run(&place, &ours(&["ctl", "hotplug", "resume"]));
    // The guest ends with two of its three vCPUs.
    change_vcpus(&place, &ours(&["ctl", "hotplug", "vcpus", "2"]));
    let output = running.wait(LIMIT).unwrap();
    let run_of_guest = guest.finish(&output).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(output.code(), Some(0), "{run_of_guest}");
    eprintln!("console: {}", run_of_guest.log().display());
    assert_eq!(run_of_guest.section("possible").trim(), "0-2", "{run_of_guest}");
    assert_eq!(run_of_guest.section("end").trim(), "0-1", "{run_of_guest}");

    the_host_counts_the_whole(&out[0].0, &out[1].0);
    let (script, _) = run(&place, &ours(&["script", "-i", &data]));
    the_recording_is_whole(&out[1].0, &script);
    the_guest_counts_on_its_new_vcpus(&run_of_guest, &out[1].0);
}

/// Maximum number of attempts to change the number of vCPUs. On a busy machine, the guest may not
/// answer before `ctl` times out.
const CHANGES: u32 = 30;

/// Repeats a `ctl vcpus` command until the guest acknowledges the change. Returns the standard
/// output and standard error of the last command.
#[track_caller]
fn change_vcpus(place: &TestHost, command: &HostCommand) -> (String, String) {
    for _ in 1..CHANGES {
        let output = place.run(command, LIMIT).unwrap();
        if output.success() {
            return said(&output);
        }
        let stderr = output.stderr_text();
        assert!(stderr.contains(" within 10 s; "), "{stderr}");
        eprintln!("{stderr}");
    }
    run(place, command)
}

/// Returns the line with the response time of the guest from the messages of `perfvisor -v ctl`.
fn answered(stderr: &str) -> &str {
    let line = stderr.lines().find(|line| line.contains("answered after"));
    line.unwrap_or_else(|| panic!("{stderr}"))
}

/// Checks that the counts of the whole VM equal the sums over all vCPUs, including unplugged ones.
/// VM exits must be equal. Cycles may differ by rounding, and CPU time by 0.1 %, because each event
/// reads it separately.
fn the_host_counts_the_whole(whole: &str, each: &str) {
    let (whole, each) = (counts(whole), counts(each));
    for event in ["cycles", "kvm:exits", "task-clock"] {
        let parts: Vec<f64> = (0..3).map(|vcpu| each[&(event.to_owned(), Some(vcpu))]).collect();
        let sum: f64 = parts.iter().sum();
        let all = whole[&(event.to_owned(), None)];
        eprintln!("host: {event}: {parts:?}, together {sum}, the whole VM {all}");
        assert!(parts.iter().all(|part| *part > 0.0), "{event}: {parts:?}");
        match event {
            "kvm:exits" => assert_eq!(all, sum),
            // The events of a hot-plugged vCPU are opened before the vCPU first runs.
            "cycles" => assert!((all - sum).abs() <= ROUNDED, "{event}: {all} and {sum}"),
            // Each event reads the thread's CPU time separately.
            _ => assert!((all / sum - 1.0).abs() < 0.001, "{event}: {all} and {sum}"),
        }
    }
}

/// Checks that the periods of each vCPU's samples add up to the vCPU's count. The count may exceed
/// the sum by one unfinished period for vCPU 0, and by one per unplug for other vCPUs. An elapsed
/// period is sampled even if its timer is late.
fn the_recording_is_whole(each: &str, script: &str) {
    let (each, samples) = (counts(each), samples(script));
    for (vcpu, lives) in [(0, 1), (1, ROUNDS), (2, ROUNDS)] {
        let (n, periods) = samples.get(&vcpu).copied().unwrap_or_default();
        let counted = each[&("cycles".to_owned(), Some(vcpu))];
        let left = counted - periods as f64;
        let of_a_period = left / PERIOD as f64;
        eprintln!(
            "host: vCPU {vcpu}: {n} samples for {periods} of {counted} cycles, {of_a_period:.3} periods less"
        );
        assert!(
            n > 100 && (-0.01..1.01 * f64::from(lives)).contains(&of_a_period),
            "vCPU {vcpu}: {n} samples for {periods} of {counted}"
        );
    }
}

/// Checks that the counts of the guest's perf on CPUs 1 and 2 do not exceed the host's counts of
/// these vCPUs. The host's counts also include work outside the guest's measurements.
fn the_guest_counts_on_its_new_vcpus(run: &GuestRun, each: &str) {
    let host = counts(each);
    for vcpu in 1..3u32 {
        let mut sum = 0.0;
        for round in 1..=ROUNDS {
            let stat = parse_stat_csv(run.section(&format!("stat-{round}")));
            let counted = stat
                .value_on("cycles", vcpu)
                .unwrap_or_else(|e| panic!("round {round}: {e}\n{run}"));
            let of_vcpu = format!("[{vcpu:03}]");
            let lines = run.section(&format!("samples-{round}"));
            let samples = lines
                .lines()
                .find_map(|line| line.trim().strip_suffix(&of_vcpu)?.trim().parse::<f64>().ok());
            let samples = samples.unwrap_or_else(|| panic!("no samples on CPU {vcpu} in {lines:?}\n{run}"));
            let sampled = samples * PERIOD as f64;
            let ratio = sampled / counted;
            eprintln!(
                "guest: CPU {vcpu}, round {round}: {counted} cycles counted, {samples} samples for {ratio:.3} of them"
            );
            // The count and the samples cover the same time, but the start and the end of perf
            // record itself are counted and not sampled.
            assert!(
                (0.3..1.02).contains(&ratio),
                "CPU {vcpu}: {sampled} of {counted}\n{run}"
            );
            sum += counted;
        }
        let share = sum / host[&("cycles".to_owned(), Some(vcpu.into()))];
        eprintln!("guest: CPU {vcpu}: {share:.3} of what the host counted");
        // The vCPU also performs unmeasured work: plug and unplug, perf's start, and its output.
        assert!((0.2..1.02).contains(&share), "CPU {vcpu}: {share}\n{run}");
    }
}
