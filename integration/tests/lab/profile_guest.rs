//! Tests profiling of a Linux guest from the host: finding the guest's kernel in memory, task
//! names, call chains through kernel and program, and symbolization. Other tools must be able to
//! read the recordings.

use std::collections::BTreeMap;

use integration::artefacts;
use integration::guest::LinuxGuest;
use integration::lab::LabOptions;
use integration::lease::{TestHostLease, TestHostLeaseMode};
use integration::measure::skipped;
use integration::parse::parse_stat_csv;
use integration::process::{HostCommand, HostProcess};
use integration::test_host::TestHost;
use linux_perf_data::{PerfFileReader, PerfFileRecord};

use crate::common::{LIMIT, loaded, perfvisor, run};

/// Address at which the exporter listens.
const METRICS: &str = "127.0.0.1:19464";

/// Guest script that runs a program whose three functions take 60, 30 and 10 % of its time, and a
/// program that makes system calls.
const SCRIPT: &str = r#"
section load sh -c "echo load-has-begun; while true; do three 2; syscalls 600000; done"
"#;

/// Leases a test host with perf for exclusive use, because the tests measure overhead and shares of
/// time.
fn place() -> TestHostLease {
    let options = LabOptions {
        perf: true,
        ..LabOptions::default()
    };
    TestHost::lease(&options, TestHostLeaseMode::Exclusive).unwrap_or_else(|error| panic!("{error}"))
}

/// Parses a report into the share of each symbol, in percent. The symbol is the last column.
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

/// Checks that three functions have shares of 60, 30 and 10 %. The tolerance is three percentage
/// points, or four standard deviations if a slow machine takes few samples.
fn are_sixty_thirty_ten(report: &str, what: &str) {
    let shares = shares(report);
    let three = ["heavy", "middle", "light"].map(|name| shares.get(name).copied().unwrap_or(0.0));
    let sum: f64 = three.iter().sum();
    // The number of samples is in the column after the share.
    let samples = report
        .lines()
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<f64>().ok());
    let samples: f64 = samples.sum();
    eprintln!("{what}: {three:.2?} of {sum:.1} %, {samples} samples");
    assert!(samples >= 100.0, "{what}: {report}");
    for (share, expected) in three.iter().zip([60.0, 30.0, 10.0]) {
        let chance = 4.0 * f64::sqrt(expected * (100.0 - expected) / samples);
        assert!(
            (100.0 * share / sum - expected).abs() <= f64::max(3.0, chance),
            "{what}: {shares:?}"
        );
    }
}

#[test]
fn host_profile_shows_guest_kernel_and_program() {
    let place = place();
    let guest = LinuxGuest::new("profiled", "intel-v2")
        .script(SCRIPT)
        .args(["--name", "profiled"]);
    let running = loaded(&place, &guest);
    let exporter = HostCommand::new(place.perfvisor().unwrap()).args(["-v", "exporter", "--listen", METRICS]);
    let exporter = place.start(&exporter).unwrap();
    assert!(exporter.wait_for_message("serving at", LIMIT));
    // The exporter opens its events when it is first scraped.
    scrape(&place);
    // Copy of the guest's files on the host, which contains the guest's program.
    let root = place.scratch("guest-root");
    run(&place, &HostCommand::shell(format!("mkdir -p {root}/bin")));
    let pvload = std::fs::read(&artefacts::images().unwrap().pvload).unwrap();
    place.put(&format!("{root}/bin/pvload"), 0o755, &pvload).unwrap();

    let ours = perfvisor(&place);
    let (data, kallsyms) = (place.scratch("profiled.data"), place.scratch("kallsyms"));
    let (as_host, for_perf) = (place.scratch("as-host.data"), place.scratch("buildids"));
    let (_, said) = ours(&[
        "-v",
        "record",
        "profiled",
        "-F",
        "1000",
        // This ratio of full samples would be the default if a full sample did not stop the vCPU
        // for so long in the lab.
        "--chain-every",
        "20",
        // The duration is long enough that every function with fifty samples has at least one call
        // chain.
        "-d",
        "20",
        "--guestmount",
        &root,
        "--save-kallsyms",
        &kallsyms,
        "--buildid-dir",
        &for_perf,
        "-o",
        &data,
    ]);
    ours(&[
        "record",
        "profiled",
        "--as-host",
        "-F",
        "200",
        "--chain-every",
        "4",
        "-d",
        "5",
        "-q",
        "-o",
        &as_host,
    ]);
    eprintln!("{said}");
    assert!(said.contains("stacks by ORC, tasks named"), "{said}");
    metrics_are_sensible(&place);
    ours(&["ctl", "profiled", "stop"]);
    drop((running, exporter));

    // The recording contains the symbols, so no other file is needed.
    let (report, _) = ours(&["report", "-i", &data, "--sort", "comm,dso,sym"]);
    eprintln!("{}", report.lines().take(30).collect::<Vec<_>>().join("\n"));
    let of_three: String = report
        .lines()
        .filter(|line| line.contains(" three "))
        .map(|line| format!("{line}\n"))
        .collect();
    are_sixty_thirty_ten(&of_three, "perfvisor report");
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

    // Call chains lead from the program's start to each function, and through system calls into the
    // kernel.
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
    let (mut own, mut from_main) = (0, 0);
    for (stack, weight) in folded.lines().filter_map(|line| line.rsplit_once(' ')) {
        if is_own_system_call(stack) {
            let weight: u64 = weight.parse().unwrap();
            own += weight;
            if stack.contains(";main;") {
                from_main += weight;
            } else {
                eprintln!("without main: {stack} {weight}");
            }
        }
    }
    eprintln!("{from_main} of {own} events in system calls lead back to main");
    assert!(
        own > 0 && from_main * 100 >= own * 95,
        "{from_main} of {own}\n{folded}"
    );
    assert!(folded.contains(";run;syscall;entry_SYSCALL_64_[k] "), "{folded}");

    if perf_reads_it(&place, &data, &for_perf) {
        perf_kvm_reads_it(&place, &as_host, &kallsyms, &root);
    }
    tools_here_read_it(&place.get(&data).unwrap(), &pvload);
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

/// Returns whether a folded stack belongs to a system call that the test program makes through
/// libc's `syscall`.
///
/// The stack contains `syscall`, or no function of the program if the sample is at kernel entry or
/// exit. Other system calls (exec, exit, printf's write) come from libc, which has no frame
/// pointers, so their stacks may not lead to main.
fn is_own_system_call(stack: &str) -> bool {
    let Some(frames) = stack.strip_prefix("syscalls;") else {
        return false;
    };
    let mut program = frames
        .split(';')
        .filter(|frame| !frame.ends_with("_[k]"))
        .peekable();
    let no_program = program.peek().is_none();
    program.any(|frame| frame == "syscall")
        || no_program
            && frames.split(';').any(|frame| {
                [
                    "do_syscall_64",
                    "getppid",
                    "task_pid_nr_ns",
                    "entry_SYS",
                    "sysret",
                    "exit_to_user_mode",
                ]
                .iter()
                .any(|part| frame.contains(part))
            })
}

/// Returns the metrics of the profiled guest, fetched from the exporter.
fn scrape(place: &TestHost) -> String {
    let url = format!("http://{METRICS}/metrics?vm=profiled");
    let fetch = format!("wget -q -O - '{url}' || curl -sf '{url}'");
    run(place, &HostCommand::shell(fetch)).0
}

/// Checks the exporter's metrics of a VM that has been recorded.
fn metrics_are_sensible(place: &TestHost) {
    let text = scrape(place);
    assert!(text.ends_with("# EOF\n"), "{text}");
    // Returns the sum over the series of a family that have `label`.
    let sum = |family: &str, label: &str| -> f64 {
        let series: Vec<f64> = text
            .lines()
            .filter(|line| line.split('{').next() == Some(family) && line.contains(label))
            .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
            .collect();
        assert!(!series.is_empty(), "no {family} with {label}: {text}");
        series.iter().sum()
    };
    let uptime_s = sum("perfvisor_vm_uptime_seconds", "");
    let busy_s = sum("perfvisor_event_time_seconds_total", "task-clock");
    assert!(busy_s > 5.0 && busy_s <= uptime_s, "{busy_s} of {uptime_s} s");
    let exits = sum("perfvisor_vcpu_exits_total", "");
    let by_kind = sum("perfvisor_vcpu_exits_by_kind_total", "");
    // A signal may coincide with another exit, and the two values are not read atomically.
    assert!(
        exits > 1000.0 && by_kind >= 0.99 * exits && by_kind < 2.0 * exits,
        "{by_kind} of {exits}"
    );
    // The exporter only counts since its first scrape.
    let counted = sum("perfvisor_event_count_total", "kvm:exits");
    assert!(counted > 1000.0, "{counted} of {exits}");
    let ratio = sum("perfvisor_event_running_ratio", "task-clock");
    assert!((0.99..=1.0).contains(&ratio), "{ratio}");
    // About 50 full samples per second are taken for 25 s. The host kernel takes the light samples.
    // If the host kernel does not support guest samples, all samples are full: 20 s at 1000 Hz and
    // 5 s at 200 Hz.
    let samples = sum("perfvisor_vcpu_samples_total", "");
    assert!((100.0..25_000.0).contains(&samples), "{samples}");
    for nothing in [
        "perfvisor_vcpu_lost_samples_total",
        "perfvisor_vcpu_sampling_throttles_total",
        "perfvisor_vcpu_pmis_throttled_total",
    ] {
        assert_eq!(sum(nothing, ""), 0.0, "{nothing}");
    }
    // The kernel's watchdog may also cause PMIs. Every requested PMI is delivered.
    let asked = sum("perfvisor_guest_counter_pmi_requests_total", "");
    assert!(
        sum("perfvisor_vcpu_pmis_total", "") <= asked + 1.0,
        "{asked} requested"
    );
}

/// Copies a file from the test host to the log directory on this machine, for manual inspection.
fn keep(place: &TestHost, from: &str, name: &str) {
    let path = artefacts::log_dir().unwrap().join(name);
    std::fs::write(&path, place.get(from).unwrap()).unwrap();
    eprintln!("kept: {}", path.display());
}

/// Returns a shell command that also searches `/usr/bin` for programs.
fn shell(line: String) -> HostCommand {
    HostCommand::shell(format!("PATH=$PATH:/usr/bin; {line}"))
}

/// Checks that Debian's perf without guest options and the crate linux-perf-data read the recording
/// correctly. Returns `false` if perf is not installed.
fn perf_reads_it(place: &TestHost, data: &str, for_perf: &str) -> bool {
    let bytes = place.get(data).unwrap();
    let PerfFileReader {
        mut perf_file,
        mut record_iter,
    } = PerfFileReader::parse_file(std::io::Cursor::new(&bytes)).unwrap();
    let (mut samples, mut chains) = (0u32, 0);
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

    let there = shell("command -v perf".to_owned());
    if !place.run(&there, LIMIT).unwrap().success() {
        skipped("no perf at this place", matches!(place, TestHost::Lab(_)));
        return false;
    }
    let perf = format!("perf --buildid-dir {for_perf}");
    let (text, _) = run(
        place,
        &shell(format!(
            "{perf} script -i {data} -F comm,ip,sym 2>/dev/null | sort | uniq -c"
        )),
    );
    let lines_with = |text_part: &str| -> u32 {
        text.lines()
            .filter(|line| line.contains(text_part))
            .filter_map(|line| line.split_whitespace().next()?.parse::<u32>().ok())
            .sum()
    };
    // Samples without call chains show their address, too.
    let heavy = lines_with(" heavy");
    assert!(
        heavy > samples / 4,
        "{heavy} of {samples} samples in heavy: {text:.2000}"
    );
    for part in ["three", "syscalls", "do_syscall_64"] {
        assert!(lines_with(part) > 0, "no {part}: {text:.2000}");
    }
    let count = format!("{perf} script -i {data} -F comm 2>/dev/null | wc -l");
    let (count, _) = run(place, &shell(count));
    assert_eq!(
        count.trim().parse::<u32>().ok(),
        Some(samples),
        "samples that perf script shows"
    );
    let report = format!("{perf} report -i {data} --stdio --no-children -G --sort comm,sym 2>/dev/null");
    let (text, _) = run(place, &shell(report));
    eprintln!("{}", text.lines().take(60).collect::<Vec<_>>().join("\n"));
    for part in ["three", "[k] do_syscall_64", "entry_SYSCALL_64"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    true
}

/// Checks that the tools installed on this machine read the recording together with the guest's
/// program: `perf annotate`, which needs objdump, and samply.
fn tools_here_read_it(data: &[u8], program: &[u8]) {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    std::fs::create_dir_all(path("root/bin")).unwrap();
    std::fs::write(path("root/bin/pvload"), program).unwrap();
    std::fs::write(path("guest.data"), data).unwrap();
    // Returns the output of a tool, or `None` if it is not installed.
    let said_by = |program: &str, args: &[&str]| {
        let mut command = std::process::Command::new(program);
        command
            .args(args)
            .current_dir(&directory)
            .env("HOME", directory.path());
        let output = command.stdin(std::process::Stdio::null()).output().ok()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{program} {args:?}: {said}");
        Some(String::from_utf8_lossy(&output.stdout).into_owned() + &said)
    };

    if said_by("objdump", &["--version"]).is_none() || said_by("perf", &["--version"]).is_none() {
        skipped("no perf or no objdump (binutils) for perf annotate", false);
    } else {
        let (root, file) = (path("root"), path("guest.data"));
        let annotate = [
            "annotate", "--stdio", "-i", &file, "--symfs", &root, "-s", "heavy",
        ];
        let text = said_by("perf", &annotate).unwrap();
        eprintln!("{}", text.lines().take(40).collect::<Vec<_>>().join("\n"));
        assert!(
            text.contains("<heavy>") && text.contains("Disassembly of section .text"),
            "{text}"
        );
        let shares = text
            .lines()
            .filter_map(|line| line.split_once(" :")?.0.trim().parse::<f64>().ok());
        let sum: f64 = shares.sum();
        assert!(
            (95.0..105.0).contains(&sum),
            "{sum} % of heavy's samples are at its instructions: {text}"
        );
    }
    samply_reads_it(&path, &said_by);
}

/// Checks that samply imports the guest's tasks as threads with stacks, finds the guest's program
/// by its build ID, and resolves its symbols.
fn samply_reads_it(path: &dyn Fn(&str) -> String, said_by: &dyn Fn(&str, &[&str]) -> Option<String>) {
    let (file, profile) = (path("guest.data"), path("profile.json"));
    let import = ["import", &file, "--save-only", "-o", &profile];
    if said_by("samply", &import).is_none() {
        return skipped("no samply (cargo install samply)", false);
    }
    let text = std::fs::read(&profile).unwrap();
    let profile: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let list = |of: &serde_json::Value| of.as_array().cloned().unwrap_or_default();
    let libs = list(&profile["libs"]);
    let program = libs.iter().find(|lib| lib["name"] == "pvload").unwrap();
    assert!(program["breakpadId"].as_str().unwrap().len() > 32, "{program}");
    for task in ["three", "syscalls"] {
        let threads = list(&profile["threads"]);
        let of_task = |thread: &&serde_json::Value| thread["name"] == task;
        let samples: u64 = threads
            .iter()
            .filter(of_task)
            .map(|thread| thread["samples"]["length"].as_u64().unwrap())
            .sum();
        // A stack consists of a frame and the stack of its caller.
        let deepest = |thread: &serde_json::Value| {
            let mut depths: Vec<usize> = Vec::new();
            for caller in list(&thread["stackTable"]["prefix"]) {
                let caller = caller.as_u64().and_then(|caller| usize::try_from(caller).ok());
                depths.push(1 + caller.map_or(0, |caller| depths[caller]));
            }
            depths.into_iter().max().unwrap_or(0)
        };
        let deepest = threads.iter().filter(of_task).map(deepest).max().unwrap();
        eprintln!("samply: {samples} samples of {task}, stacks of up to {deepest} frames");
        assert!(
            samples > 100 && deepest > 3,
            "{task}: {samples} samples, {deepest} frames"
        );
    }
}

/// Checks that Debian's `perf kvm` reads the recording as that of a guest.
fn perf_kvm_reads_it(place: &TestHost, data: &str, kallsyms: &str, root: &str) {
    let symbols = format!("--guestkallsyms={kallsyms}");
    let vmlinux = vmlinux_with_symbols(place, kallsyms);
    for symbols in [symbols, format!("--guestvmlinux={vmlinux}")] {
        let report = format!(
            "perf kvm --host --guest {symbols} --guestmount={root} -i {data} report --stdio -g none --sort comm,sym 2>/dev/null"
        );
        let (text, _) = run(place, &shell(report));
        eprintln!("{}", text.lines().take(30).collect::<Vec<_>>().join("\n"));
        assert!(text.contains("three"), "{symbols}: {text}");
        assert!(text.contains("[g] do_syscall_64"), "{symbols}: {text}");
    }
}

/// Writes an ELF file that contains only the symbols of `kallsyms`. It replaces the guest's kernel,
/// which has no symbol table.
fn vmlinux_with_symbols(place: &TestHost, kallsyms: &str) -> String {
    const TEXT: u64 = 0xffff_ffff_8100_0000;
    let names = String::from_utf8(place.get(kallsyms).unwrap()).unwrap();
    let end = names
        .lines()
        .find_map(|line| line.strip_suffix(" T _etext"))
        .unwrap();
    let text_len = u64::from_str_radix(end, 16).unwrap() - TEXT;
    let mut seen = std::collections::BTreeSet::new();
    let mut symbols = String::new();
    for line in names.lines() {
        let mut words = line.split(' ');
        let (Some(address), Some("t" | "T"), Some(name)) = (words.next(), words.next(), words.next()) else {
            continue;
        };
        let offset = u64::from_str_radix(address, 16).unwrap().wrapping_sub(TEXT);
        if offset < text_len && seen.insert(name) {
            symbols += &format!("--add-symbol {name}=.text:{offset:#x},function,global\n");
        }
    }
    assert!(seen.len() > 10_000, "{} symbols", seen.len());
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("symbols"), symbols).unwrap();
    let objcopy = |args: &[&str]| {
        let out = std::process::Command::new("objcopy").args(args).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    };
    let vmlinux = artefacts::images().unwrap().vmlinux.to_str().unwrap().to_owned();
    let (with, small) = (path("with"), path("small"));
    objcopy(&["-j", ".text", &format!("@{}", path("symbols")), &vmlinux, &with]);
    objcopy(&["--only-keep-debug", &with, &small]);
    let there = place.scratch("vmlinux-symbols");
    place.put(&there, 0o644, &std::fs::read(small).unwrap()).unwrap();
    there
}

/// Guest script that counts and records a program twice: first alone, and then while the host
/// observes the same vCPU.
const COUNTED: &str = r#"
recorded() {
	perf record -q -e instructions:u -c 500 -o /tmp/perf.data busybox true
	perf script -i /tmp/perf.data -F period,ip
}
section alone perf stat -x, -e instructions:u,branches:u busybox true
section recorded-alone recorded
echo together-begins; read go </dev/console
section together perf stat -x, -e instructions:u,branches:u busybox true
section recorded-together recorded
kernel_log
echo both-done
sleep 1000
"#;

/// Returns the number of samples in the output of `perf script` and the sum of their periods. Each
/// line contains the period and the address of a sample.
fn samples_and_sum(section: &str) -> (usize, u64) {
    let periods = section
        .lines()
        .filter_map(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    periods.fold((0, 0), |(n, sum), period| (n + 1, sum + period))
}

/// The guest and the host can count and record the same vCPU at the same time. Counts differ by at
/// most 1 %, the guest receives its samples, and the periods of the host's samples add up to the
/// host's count.
#[test]
fn guest_and_host_profile_same_vcpu() {
    let place = place();
    let guest = LinuxGuest::new("counted", "amd")
        .script(COUNTED)
        // On a slow machine, single-stepping runs so long without a context switch that RCU would
        // report a stall.
        .cmdline("nowatchdog norandmaps rcupdate.rcu_cpu_stall_suppress=1")
        .limit(LIMIT)
        .args(["--name", "counted", "--backing", "exact"]);
    let mut running = place.start(&guest.command(&place).unwrap()).unwrap();
    let reaches = |running: &HostProcess, text: &str| {
        assert!(
            running.wait_for(text, LIMIT),
            "{text}: {}",
            running.stdout_so_far()
        );
    };
    reaches(&running, "together-begins");
    let perfvisor = place.perfvisor().unwrap();
    let data = place.scratch("counted.data");
    // Both commands start and stop while the guest waits, and therefore measure the same work. The
    // first interval indicates that counting has started, and an acknowledgment that recording has
    // started.
    let stop = place.scratch("counted.stop");
    let looking = place
        .start(&HostCommand::shell(format!(
            "rm -f '{stop}'.*; mkfifo '{stop}'.ctl '{stop}'.ack
             '{perfvisor}' stat counted -x, -e cycles -I 500 >'{stop}'.counts & stat=$!
             until [ -s '{stop}'.counts ]; do sleep 0.2; done
             '{perfvisor}' record counted -F 500 -o '{data}' -D -1 --control 'fifo:{stop}.ctl,{stop}.ack' & record=$!
             echo enable >'{stop}'.ctl; head -n 1 '{stop}'.ack; echo looking-begun
             until [ -e '{stop}' ]; do sleep 0.2; done
             rm '{stop}'; kill -TERM $record; wait $record; kill -TERM $stat; wait $stat
             cat '{stop}'.counts"
        )))
        .unwrap();
    reaches(&looking, "looking-begun");
    running.write(b"\n").unwrap();
    reaches(&running, "both-done");
    place.put(&stop, 0o644, b"").unwrap();
    let looked = looking.wait(LIMIT).unwrap();
    let (said, counted) = (looked.stderr_text(), looked.stdout_text());
    // Each line is an interval: seconds, count, unit, event, and so on.
    let cycles: f64 = counted
        .lines()
        .filter(|line| line.contains(",cycles"))
        .map(|line| line.split(',').nth(1).unwrap().parse::<f64>().unwrap())
        .sum();
    run(
        &place,
        &HostCommand::new(perfvisor.clone()).args(["ctl", "counted", "stop"]),
    );
    let run_of_guest = guest.finish(&running.wait(LIMIT).unwrap()).unwrap();
    eprintln!("{said}\n{counted}\n{run_of_guest}");

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
    let recorded = |section| {
        let lines = run_of_guest.section(section);
        (lines, samples_and_sum(lines))
    };
    let (alone, (samples, sum)) = recorded("recorded-alone");
    let (together, (samples_together, sum_together)) = recorded("recorded-together");
    eprintln!(
        "the guest's perf record: {samples} samples of {sum} instructions alone, {samples_together} of {sum_together} while the host records, {}",
        if alone == together {
            "the same"
        } else {
            "at other addresses"
        }
    );
    assert!(samples >= 20 && sum == 500 * samples as u64, "{alone}");
    assert!(
        samples_together.abs_diff(samples) * 100 <= samples && sum_together.abs_diff(sum) * 100 <= sum,
        "{alone}\n{together}"
    );
    let (text, _) = run(&place, &HostCommand::new(perfvisor).args(["report", "-i", &data]));
    let sampled: f64 = text
        .lines()
        .find_map(|line| line.split_once("Event count (approx.): ")?.1.trim().parse().ok())
        .unwrap();
    eprintln!("host: {cycles} cycles counted, {sampled} sampled");
    assert!(
        (sampled / cycles - 1.0).abs() <= 0.01,
        "{sampled} sampled, {cycles} counted"
    );
}
