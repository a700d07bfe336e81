//! Profiling a Linux guest from outside: kernel found in its memory, tasks named, chains through kernel and program, names
//! of its functions; and perf itself reading what was recorded.

use std::collections::BTreeMap;
use std::time::Duration;

use integration::artefacts;
use integration::guest::LinuxGuest;
use integration::lab::LabOptions;
use integration::parse::parse_stat_csv;
use integration::place::Place;
use integration::process::Command;
use linux_perf_data::{PerfFileReader, PerfFileRecord};

const LIMIT: Duration = Duration::from_secs(120);

/// Three functions at 60, 30 and 10 % of a program's time, and system calls.
const SCRIPT: &str = r#"
section load sh -c "echo load-has-begun; while true; do three 2; syscalls 200000; done"
"#;

/// A place with perf in it.
fn place() -> Place {
    Place::choose(&LabOptions {
        perf: true,
        ..LabOptions::default()
    })
    .unwrap()
}

/// What a command that must succeed prints, on both streams.
fn run(place: &Place, command: &Command) -> (String, String) {
    let output = place.run(command, LIMIT).unwrap();
    assert!(output.success(), "{}: {}", command.line(), output.stderr_text());
    (output.stdout_text(), output.stderr_text())
}

/// Shares in percent of a report's last column, which ends in the symbol.
fn shares(report: &str) -> BTreeMap<String, f64> {
    let mut shares = BTreeMap::new();
    for line in report.lines() {
        let Some((percent, rest)) = line.trim().split_once("% ") else {
            continue;
        };
        if let (Ok(percent), Some(symbol)) = (percent.parse::<f64>(), rest.split_whitespace().last()) {
            *shares.entry(symbol.to_owned()).or_default() += percent;
        }
    }
    shares
}

/// 60, 30 and 10 %, each give or take three points.
fn are_sixty_thirty_ten(shares: &BTreeMap<String, f64>, what: &str) {
    let three = ["heavy", "middle", "light"].map(|name| shares.get(name).copied().unwrap_or(0.0));
    let sum: f64 = three.iter().sum();
    eprintln!("{what}: {three:.2?} of {sum:.1} %");
    for (share, expected) in three.iter().zip([60.0, 30.0, 10.0]) {
        assert!(
            (100.0 * share / sum - expected).abs() <= 3.0,
            "{what}: {shares:?}"
        );
    }
}

#[test]
fn the_host_sees_kernel_and_program_of_a_linux_guest() {
    let place = place();
    let guest = LinuxGuest::new("profiled", "intel-v2")
        .script(SCRIPT)
        .args(["--name", "profiled"]);
    let running = place.start(&guest.command(&place).unwrap()).unwrap();
    assert!(
        running.wait_for("load-has-begun", LIMIT),
        "{}",
        running.stdout_so_far()
    );
    // The host's copy of the guest's files: its programs are one.
    let root = place.scratch("guest-root");
    run(&place, &Command::shell(format!("mkdir -p {root}/bin")));
    let pvload = std::fs::read(&artefacts::images().unwrap().pvload).unwrap();
    place.put(&format!("{root}/bin/pvload"), 0o755, &pvload).unwrap();

    let perfvisor = place.perfvisor().unwrap();
    let ours = |args: &[&str]| {
        run(
            &place,
            &Command::new(perfvisor.clone()).args(args.iter().copied()),
        )
    };
    let (data, kallsyms) = (place.scratch("profiled.data"), place.scratch("kallsyms"));
    let (_, said) = ours(&[
        "-v",
        "record",
        "profiled",
        "-F",
        "1000",
        "-d",
        "10",
        "--guestmount",
        &root,
        "--save-kallsyms",
        &kallsyms,
        "-o",
        &data,
    ]);
    eprintln!("{said}");
    assert!(said.contains("stacks by ORC, tasks named"), "{said}");
    ours(&["ctl", "profiled", "stop"]);
    drop(running);

    // Names were kept in the file: nothing but it is needed.
    let (report, _) = ours(&["report", "-i", &data, "--sort", "comm,dso,sym"]);
    eprintln!("{}", report.lines().take(30).collect::<Vec<_>>().join("\n"));
    let of_three: String = report
        .lines()
        .filter(|line| line.contains(" three "))
        .map(|line| format!("{line}\n"))
        .collect();
    are_sixty_thirty_ten(&shares(&of_three), "perfvisor report");
    assert!(
        report.contains("/bin/pvload") && report.contains("syscalls"),
        "{report}"
    );
    let (known, unknown): (Vec<&str>, Vec<&str>) = report
        .lines()
        .filter(|line| line.contains(" [g] "))
        .partition(|line| !line.contains("[g] 0x"));
    let sum = |lines: &[&str]| shares(&lines.join("\n")).values().sum::<f64>();
    assert!(
        sum(&known) > 5.0 && sum(&unknown) < 0.01 * sum(&known),
        "{report}"
    );

    // Chains: from the program's start to each function, and through system calls into the kernel.
    let (folded, _) = ours(&["flamegraph", "-i", &data, "--folded"]);
    let weight = |keep: &dyn Fn(&str) -> bool| -> u64 {
        let lines = folded.lines().filter_map(|line| line.rsplit_once(' '));
        lines
            .filter(|(stack, _)| keep(stack))
            .filter_map(|(_, n)| n.parse::<u64>().ok())
            .sum()
    };
    for function in ["heavy", "middle", "light"] {
        let all = weight(&|stack| stack.starts_with("three;") && stack.ends_with(function));
        let through_main = weight(&|stack| {
            stack.starts_with("three;") && stack.contains(";main;") && stack.ends_with(function)
        });
        assert!(
            through_main * 100 >= all * 95,
            "{function}: {through_main} of {all}\n{folded}"
        );
    }
    let kernel = weight(&|stack| stack.starts_with("syscalls;") && stack.contains(";do_syscall_64_[k];"));
    let from_main = weight(&|stack| {
        stack.starts_with("syscalls;") && stack.contains(";main;") && stack.contains(";do_syscall_64_[k];")
    });
    assert!(
        kernel > 0 && from_main * 10 >= kernel * 9,
        "{from_main} of {kernel}\n{folded}"
    );

    perf_reads_it(&place, &data, &kallsyms, &root);
    let svg = place.scratch("profiled.svg");
    ours(&[
        "flamegraph",
        "-i",
        &data,
        "-o",
        &svg,
        "--title",
        "A Linux guest, seen from its host",
    ]);
    keep(&place, &svg, "profiled.svg");
    keep(&place, &data, "profiled.data");
}

/// Keeps a file for people to look at.
fn keep(place: &Place, from: &str, name: &str) {
    let path = artefacts::log_dir().unwrap().join(name);
    std::fs::write(&path, place.get(from).unwrap()).unwrap();
    eprintln!("kept: {}", path.display());
}

/// Debian's perf and linux-perf-data read the recording and agree with it.
fn perf_reads_it(place: &Place, data: &str, kallsyms: &str, root: &str) {
    let bytes = place.get(data).unwrap();
    let PerfFileReader {
        mut perf_file,
        mut record_iter,
    } = PerfFileReader::parse_file(std::io::Cursor::new(&bytes)).unwrap();
    let (mut samples, mut chains) = (0, 0);
    while let Some(record) = record_iter.next_record(&mut perf_file).unwrap() {
        let PerfFileRecord::EventRecord { record, .. } = record else {
            continue;
        };
        use linux_perf_data::linux_perf_event_reader::EventRecord;
        if let EventRecord::Sample(sample) = record.parse().unwrap() {
            samples += 1;
            chains += u32::from(sample.callchain.is_some_and(|chain| chain.len() > 3));
        }
    }
    eprintln!("linux-perf-data: {samples} samples, {chains} with chains");
    assert!(samples > 1000 && chains > 100);

    // The lab has it outside of its path.
    let shell = |line: String| Command::shell(format!("PATH=$PATH:/usr/bin; {line}"));
    let there = shell("command -v perf".to_owned());
    if !place.run(&there, LIMIT).unwrap().success() {
        eprintln!("skipped: no perf at this place");
        return;
    }
    let symbols = format!("--guestkallsyms={kallsyms}");
    let script = format!("perf script -i {data} {symbols} -F comm,ip,sym 2>/dev/null");
    let (text, _) = run(place, &shell(format!("{script} | head -n 4000")));
    assert!(
        text.contains("three") && text.contains("syscalls"),
        "{text:.2000}"
    );
    assert!(text.contains("do_syscall_64"), "{text:.2000}");
    let count = format!("perf script -i {data} {symbols} -F comm 2>/dev/null | wc -l");
    let (count, _) = run(place, &shell(count));
    assert_eq!(
        count.trim().parse::<i32>().ok(),
        Some(samples),
        "samples that perf script shows"
    );
    let report = format!(
        "perf kvm --host --guest --guestkallsyms={kallsyms} --guestmount={root} -i {data} report --stdio -g none --sort comm,sym 2>/dev/null"
    );
    let (text, _) = run(place, &shell(report));
    eprintln!("{}", text.lines().take(30).collect::<Vec<_>>().join("\n"));
    assert!(text.contains("[g]") && text.contains("three"), "{text}");
}

/// What the guest counts with the host looking and without.
const COUNTED: &str = r#"
echo alone-begins
section alone perf stat -x, -e instructions:u,branches:u busybox true
echo together-begins; sleep 1
section together perf stat -x, -e instructions:u,branches:u busybox true
echo both-done
sleep 1000
"#;

/// The guest counts with its perf while the host records the same vCPU: its counts are off by no more than 1 %.
#[test]
fn what_the_guest_counts_is_not_disturbed_by_a_recording() {
    let place = place();
    let guest = LinuxGuest::new("counted", "amd")
        .script(COUNTED)
        .cmdline("nowatchdog norandmaps")
        .limit(LIMIT)
        .args(["--name", "counted", "--backing", "exact"]);
    let running = place.start(&guest.command(&place).unwrap()).unwrap();
    let wait = |text: &str| {
        assert!(
            running.wait_for(text, LIMIT),
            "{text}: {}",
            running.stdout_so_far()
        );
    };
    wait("together-begins");
    let perfvisor = place.perfvisor().unwrap();
    let data = place.scratch("counted.data");
    let mut record = Command::new(perfvisor.clone());
    record = record.args(["record", "counted", "-F", "500", "-d", "45", "-o", &data]);
    let (_, said) = run(&place, &record);
    wait("both-done");
    run(
        &place,
        &Command::new(perfvisor.clone()).args(["ctl", "counted", "stop"]),
    );
    let run_of_guest = guest.finish(&running.wait(LIMIT).unwrap()).unwrap();
    eprintln!("{said}\n{run_of_guest}");

    for event in ["instructions:u", "branches:u"] {
        let value = |section: &str| {
            parse_stat_csv(run_of_guest.section(section))
                .value(event)
                .unwrap_or_else(|e| panic!("{e}\n{run_of_guest}"))
        };
        let (alone, together) = (value("alone"), value("together"));
        eprintln!("{event}: {alone} alone, {together} while the host records");
        assert!(
            (together / alone - 1.0).abs() <= 0.01,
            "{event}: {alone} and {together}"
        );
    }
}
