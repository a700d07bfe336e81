//! Tests that `perf`, linux-perf-data and our own reader can read the written files.

use std::io::Cursor;
use std::process::Command;

use guest_profile::export::build_id_dir::BuildIdDir;
use guest_profile::export::perfdata::PerfDataWriter;
use guest_profile::export::report::{self, ProfileReportOptions, SortKey};
use guest_profile::export::symbolize::Symbolizer;
use guest_profile::export::{
    ClockCorrelation, EventSamplingRate, FileMapping, KernelTextMap, Profile, ProfileMetadata,
    ProfilePerspective, ProfileSample, ProfileSymbol, SampledBranch, SampledEventInfo, TaskName, perfdata,
    reader, script,
};
use guest_profile::unwind::{CONTEXT_GUEST_KERNEL, CONTEXT_GUEST_USER, UnwindStop, UnwindStopReasons};
use kernel_images::build_id::BuildId;
use kernel_images::symbols::KernelSymbols;
use linux_perf_data::linux_perf_event_reader::{CpuMode, EventRecord};
use linux_perf_data::{DsoKey, PerfFileReader, PerfFileRecord, UserRecordType};
use perf_core::branch::{BranchEntry, BranchFilter, BranchKind};
use perf_core::pmu::host::{ThreadSwitch, ThreadSwitchKind};
use test_support::skip;

const KALLSYMS: &str = "\
ffffffff95000000 T _stext
ffffffff95000000 T _text
ffffffff95100000 T vfs_read
ffffffff95100200 T ksys_read
ffffffff95200000 T do_syscall_64
ffffffff95300000 T entry_SYSCALL_64_after_hwframe
ffffffff96000000 T _etext
ffffffff97000000 B _end
";

const KERNEL: u64 = 0xffff_ffff_9500_0000;
const PROGRAM: u64 = 0x55ed_7673_6000;

/// Returns a profile on two vCPUs with 60 samples in the function `hot`, 30 in the function `warm`
/// and 10 in the kernel.
fn profile() -> Profile {
    let mut p = Profile::new(
        ProfileMetadata {
            thread_switches: false,
            hostname: "guest".into(),
            os_release: "6.1.0-test".into(),
            vcpus: 2,
            command: vec!["perfvisor".into(), "record".into()],
            form: ProfilePerspective::InGuest,
            // The sample clock started 10 s before 14 November 2023, 14:15.
            clock: Some(ClockCorrelation {
                wall_ns: 1_699_971_300_000_000_000,
                clock_ns: 10_000_000_000,
            }),
        },
        vec![SampledEventInfo {
            name: "cycles".into(),
            type_: 0,
            config: 0,
            rate: EventSamplingRate::Period(1000),
            branch_filter: 0,
            has_chains: true,
            id: 7,
        }],
    );
    p.kernel = Some(KernelTextMap {
        start: KERNEL,
        len: 0x100_0000,
        reference_symbol: "_stext".into(),
        reference_address: KERNEL,
        build_id: BuildId::new(&[0xcd; 16]),
    });
    p.tasks = vec![TaskName {
        time_ns: 5,
        pid: 42,
        tid: 43,
        comm: "three".into(),
    }];
    p.mappings = vec![FileMapping {
        time_ns: 5,
        pid: 42,
        start: PROGRAM,
        len: 0x1000,
        file_offset: 0x1000,
        path: "/usr/bin/three".into(),
        build_id: BuildId::new(&[0xab; 20]),
    }];
    p.symbols = [(0x100, "hot"), (0x200, "warm"), (0x300, "main")]
        .map(|(offset, name)| ProfileSymbol {
            start: PROGRAM + offset,
            end: PROGRAM + offset + 0x100,
            name: name.into(),
            pid: Some(42),
        })
        .into();
    for i in 0..100u64 {
        let user = if i < 60 { PROGRAM + 0x110 } else { PROGRAM + 0x210 };
        let user_chain = [CONTEXT_GUEST_USER, user, PROGRAM + 0x310];
        let kernel_chain = [
            CONTEXT_GUEST_KERNEL,
            KERNEL + 0x10_0010,
            KERNEL + 0x10_0210,
            KERNEL + 0x20_0010,
            KERNEL + 0x30_0010,
            CONTEXT_GUEST_USER,
            PROGRAM + 0x320,
        ];
        let kernel = i >= 90;
        p.push(&ProfileSample {
            time_ns: 1_000_000 * i + 10,
            vcpu: (i % 2) as u32,
            pid: 42,
            tid: 43,
            cpl: if kernel { 0 } else { 3 },
            ip: if kernel { KERNEL + 0x10_0010 } else { user },
            cr3: 0x2a5_8000,
            period: 1000,
            event_id: 7,
            branches: &[],
            ends: UnwindStopReasons {
                kernel: kernel.then_some(UnwindStop::Complete),
                user: Some(if i == 3 {
                    UnwindStop::Spent
                } else {
                    UnwindStop::Complete
                }),
                guessed: i % 2 == 1,
            },
            chain: if kernel { &kernel_chain } else { &user_chain },
        });
    }
    p
}

/// Returns the profile of [`profile`] as recorded by `perf kvm` on the host, without build IDs.
fn as_host() -> Profile {
    let mut p = profile();
    p.meta.form = ProfilePerspective::AsHost;
    p.kernel.as_mut().unwrap().build_id = None;
    p.mappings[0].build_id = None;
    p
}

fn bytes(p: &Profile) -> Vec<u8> {
    perfdata::write(Cursor::new(Vec::new()), p).unwrap().into_inner()
}

/// Runs `perf` with the arguments `args` on a file with the profile `p`. Returns the output of
/// `perf`, or `None` if `perf` is not installed.
fn perf(p: &Profile, args: &str) -> Option<String> {
    perf_on(p, &bytes(p), args)
}

/// Runs `perf` like [`perf`], but on a file with the contents `data`, which is a recording of `p`.
/// A kallsyms file is in the same directory, and the build-ID directory contains the kernel's
/// symbols.
fn perf_on(p: &Profile, data: &[u8], args: &str) -> Option<String> {
    if Command::new("perf").arg("--version").output().is_err() {
        // Skipping is no failure in CI, because `make setup` does not install perf.
        skip::skipped("perf is not installed", false);
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("perf.data"), data).unwrap();
    std::fs::write(dir.path().join("kallsyms"), KALLSYMS).unwrap();
    if let Some(id) = p.kernel.as_ref().and_then(|kernel| kernel.build_id) {
        let directory = BuildIdDir::new(dir.path().join(".debug"));
        // Adds the symbols of another boot. perf computes the offset between the two boots from the
        // reference symbol.
        let elsewhere = KALLSYMS.replace("ffffffff9", "ffffffff8");
        directory
            .add_kallsyms(id, |out| out.write_all(elsewhere.as_bytes()))
            .unwrap();
    }
    let out = Command::new("perf")
        .args(args.split(' '))
        .current_dir(dir.path())
        .env("PERF_PAGER", "cat")
        .env("HOME", dir.path())
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "perf {args}: {errors}\n{text}");
    eprintln!("perf {args}: {errors}\n{text}");
    Some(text)
}

#[test]
fn perf_data_round_trips() {
    for p in [profile(), as_host()] {
        assert_eq!(reader::read(&bytes(&p)).unwrap(), p);
    }
}

/// Control characters in the names that a `perf.data` file contains are removed before display,
/// because the file is untrusted.
#[test]
fn perf_data_names_lose_control_characters() {
    let mut p = profile();
    p.events[0].name = "cyc\x1b[31mles".into();
    p.tasks[0].comm = "a\x07b".into();
    p.mappings[0].path = "/bin/\u{9b}2J".into();
    p.symbols[0].name = "h\x1b]0;x\x07ot".into();
    let read = reader::read(&bytes(&p)).unwrap();
    let mut symbols = Symbolizer::new(&read, None, None);
    let options = ProfileReportOptions {
        sort: vec![SortKey::Comm, SortKey::Object, SortKey::Symbol],
        ..ProfileReportOptions::default()
    };
    let mut text = report::render(&read, &mut symbols, &options).into_bytes();
    script::write(&read, &mut symbols, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("cyc?[31mles") && text.contains("a?b"), "{text}");
    assert!(
        !text.chars().any(|c| c.is_control() && !"\n\t".contains(c)),
        "{text:?}"
    );
}

#[test]
fn linux_perf_data_reads_all_records() {
    let bytes = bytes(&profile());
    let PerfFileReader {
        mut perf_file,
        mut record_iter,
    } = PerfFileReader::parse_file(Cursor::new(&bytes)).unwrap();
    assert_eq!(perf_file.hostname().unwrap(), Some("guest"));
    assert_eq!(perf_file.arch().unwrap(), Some("x86_64"));
    assert_eq!(perf_file.event_attributes()[0].name(), Some("cycles"));
    let (mut samples, mut others) = (0, 0);
    while let Some(record) = record_iter.next_record(&mut perf_file).unwrap() {
        let record = match record {
            PerfFileRecord::EventRecord { record, .. } => record,
            // The event name and the kernel's build ID are also stored in records, so that they are
            // available if the file ends before its feature sections.
            PerfFileRecord::UserRecord(record) => {
                assert!(
                    [
                        UserRecordType::PERF_EVENT_UPDATE,
                        UserRecordType::PERF_HEADER_BUILD_ID
                    ]
                    .contains(&record.record_type)
                );
                continue;
            }
        };
        match record.parse().unwrap() {
            linux_perf_data::linux_perf_event_reader::EventRecord::Sample(s) => {
                assert_eq!((s.pid, s.tid, s.period), (Some(42), Some(43), Some(1000)));
                let kernel = s.ip.unwrap() >= KERNEL;
                let mode = if kernel { CpuMode::Kernel } else { CpuMode::User };
                assert_eq!(s.cpu_mode, mode);
                samples += 1;
            }
            _ => others += 1,
        }
    }
    // The other four records describe the kernel, a thread, its name and a mapping.
    assert_eq!((samples, others), (100, 4));
    let ids = perf_file.build_ids().unwrap();
    assert_eq!(ids[&DsoKey::Kernel].build_id, [0xcd; 16]);
    let program = DsoKey::detect(b"/usr/bin/three", CpuMode::User).unwrap();
    assert_eq!(ids[&program].build_id, [0xab; 20]);
    assert_eq!(perf_file.clock_data().unwrap().unwrap().clockid, 1);
}

/// A build ID that exceeds the maximum length, for which the parser would panic, is skipped.
#[test]
fn invalid_build_id_length_is_skipped() {
    let mut bytes = bytes(&profile());
    let id = [vec![20, 0, 0, 0], vec![0xab; 20]].concat();
    let at = bytes.windows(24).position(|w| w == id).unwrap();
    bytes[at] = 21;
    let read = reader::read(&bytes).unwrap();
    assert!(read.mappings.is_empty() && read.len() == 100);
}

/// `perf report` without options shows kernel functions, tasks and callers of a guest's recording.
#[test]
fn plain_perf_report_names_kernel_functions_tasks_and_callers() {
    let args = "report -i perf.data --stdio --no-children -G";
    let Some(text) = perf(&profile(), args) else {
        return;
    };
    let line = text.lines().find(|l| l.contains("vfs_read")).unwrap();
    assert!(
        line.contains("10.00%") && line.contains("three") && line.contains("[k] vfs_read"),
        "{line}"
    );
    // The program's file is not available, so its addresses are shown with its name.
    assert!(text.contains("60.00%") && text.contains("[.] 0x"), "{text}");
    for caller in ["ksys_read", "do_syscall_64", "entry_SYSCALL_64_after_hwframe"] {
        assert!(text.contains(caller), "{caller}\n{text}");
    }
}

/// perf does not use files of the host to resolve addresses of guest programs, because a host file
/// with the same path may be from another build.
#[test]
fn host_program_does_not_symbolize_guest() {
    let mut p = profile();
    let exe = std::env::current_exe().unwrap();
    p.mappings[0].path = exe.to_str().unwrap().to_owned();
    p.mappings[0].file_offset = 0;
    let args = "report -i perf.data --stdio --no-children -g none";
    let Some(text) = perf(&p, args) else { return };
    assert!(text.contains("60.00%") && text.contains("[.] 0x"), "{text}");
}

/// `perf script` shows the wall-clock times of samples, computed from the reference time in the
/// file.
#[test]
fn perf_script_shows_wall_clock_time() {
    let args = "script -i perf.data -F tod,comm --ns";
    let Some(text) = perf(&profile(), args) else {
        return;
    };
    assert!(text.contains("2023-11-14 14:14:50.000000010"), "{text:.300}");
    let args = "report -i perf.data --header-only";
    let text = perf(&profile(), args).unwrap();
    assert!(
        text.contains("reference time") && text.contains("CLOCK_MONOTONIC")
            || text.contains("clockid: monotonic"),
        "{text}"
    );
}

/// `perf script --show-switch-events` shows the context switches of vCPU threads between samples.
#[test]
fn perf_script_shows_when_the_host_preempts_a_vcpu() {
    let mut p = profile();
    p.meta.thread_switches = true;
    let mut file = PerfDataWriter::new(Cursor::new(Vec::new()), p.meta.clone(), p.events.clone()).unwrap();
    p.samples().for_each(|sample| file.sample(&sample).unwrap());
    let switches = [
        (30_500_000, ThreadSwitchKind::Preempted),
        (31_500_000, ThreadSwitchKind::In),
        (90_500_000, ThreadSwitchKind::Blocked),
    ];
    for (time_ns, kind) in switches {
        file.thread_switch(1, ThreadSwitch { time_ns, kind }).unwrap();
    }
    let data = file.finish(&[]).unwrap().into_inner();
    let args = "script -i perf.data --show-switch-events -F comm,cpu,time --ns";
    let Some(text) = perf_on(&p, &data, args) else {
        return;
    };
    let found: Vec<&str> = text
        .lines()
        .filter_map(|line| {
            ["0.031000010", "SWITCH OUT preempt", "SWITCH IN", "SWITCH OUT"]
                .into_iter()
                .find(|what| line.contains(what))
        })
        .collect();
    let order = ["SWITCH OUT preempt", "0.031000010", "SWITCH IN", "SWITCH OUT"];
    assert_eq!(found, order, "{text}");
    assert!(text.contains("[001]     0.030500000"), "{text}");
}

#[test]
fn perf_kvm_report_names_guest_kernel_functions_and_tasks() {
    let args = "kvm --guest --guestkallsyms=kallsyms -i perf.data report --stdio --no-children";
    let Some(text) = perf(&as_host(), args) else {
        return;
    };
    let line = text.lines().find(|l| l.contains("vfs_read")).unwrap();
    assert!(line.contains("10.00%") && line.contains("three"), "{line}");
    assert!(text.contains("three") && text.contains("60.00%"), "{text}");
}

#[test]
fn perf_script_shows_the_samples_with_their_chains() {
    for (p, args) in [
        (profile(), "script -i perf.data"),
        (as_host(), "script -i perf.data --guestkallsyms=kallsyms"),
    ] {
        let Some(text) = perf(&p, args) else { return };
        assert_eq!(text.matches("cycles:").count(), 100, "{text}");
        for name in [
            "vfs_read",
            "ksys_read",
            "do_syscall_64",
            "entry_SYSCALL_64_after_hwframe",
            "/usr/bin/three",
        ] {
            assert!(text.contains(name), "{name}\n{text}");
        }
        assert!(text.contains("[001]") && text.contains("three"));
    }
}

#[test]
fn our_report_has_the_shares_and_sorts_as_asked() {
    let p = reader::read(&bytes(&profile())).unwrap();
    let kernel = KernelSymbols::parse_text(KALLSYMS.as_bytes()).unwrap();
    let mut symbols = Symbolizer::new(&p, Some(kernel), None);
    let options = ProfileReportOptions {
        sort: vec![SortKey::Symbol],
        ..Default::default()
    };
    let table = &report::tables(&p, &mut symbols, &options)[0];
    let rows: Vec<_> = table
        .rows
        .iter()
        .map(|r| (r.keys[0].as_str(), r.percent, r.samples))
        .collect();
    assert_eq!(
        rows,
        [
            ("[u] hot", 60.0, 60),
            ("[u] warm", 30.0, 30),
            ("[g] vfs_read", 10.0, 10)
        ]
    );
    let by = |sort| {
        let options = ProfileReportOptions {
            sort: vec![sort],
            ..Default::default()
        };
        let p = reader::read(&bytes(&profile())).unwrap();
        report::render(&p, &mut Symbolizer::new(&p, None, None), &options)
    };
    assert!(
        by(SortKey::Vcpu).contains("    50.00%            50  000\n"),
        "{}",
        by(SortKey::Vcpu)
    );
    assert!(by(SortKey::Comm).contains("   100.00%           100  three\n"));
    assert!(by(SortKey::Object).contains("    90.00%            90  /usr/bin/three\n"));
}

#[test]
fn our_script_is_in_order_and_names_every_frame() {
    let p = profile();
    let kernel = KernelSymbols::parse_text(KALLSYMS.as_bytes()).unwrap();
    let mut out = Vec::new();
    script::write(&p, &mut Symbolizer::new(&p, Some(kernel), None), &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert!(
        text.starts_with("           three 42/43 [000]     0.000000:       1000 cycles: \n"),
        "{text}"
    );
    assert!(text.contains("ffffffff95200010 do_syscall_64+0x10 ([guest.kernel])\n"));
    assert!(text.contains("main+0x10 (/usr/bin/three)\n"));
    assert!(!text.contains("[unknown]"));
}

/// If an event has branch stacks, the branch stacks of its samples are the same after writing and
/// reading the file.
#[test]
fn branch_stacks_round_trip() {
    let mut profile = profile();
    let filter = BranchFilter::ANY | BranchFilter::KERNEL | BranchFilter::TYPE_SAVE;
    profile.events[0].branch_filter = filter.bits();
    let call = BranchEntry {
        from: KERNEL + 0x10,
        to: KERNEL + 0x100,
        kind: BranchKind::Call,
        ..BranchEntry::default()
    };
    let [from, to, flags] = call.words(filter);
    let branches = [SampledBranch { from, to, flags }, SampledBranch::default()];
    let mut written = profile.clone();
    written.push(&ProfileSample {
        branches: &branches,
        ..profile.samples().next().unwrap()
    });
    let file = bytes(&written);
    let read = reader::read(&file).unwrap();
    assert_eq!(read.events[0].branch_filter, filter.bits());
    let last = read.samples().max_by_key(|s| s.branches.len()).unwrap();
    assert_eq!(last.branches, branches);
    assert_eq!(last.branches[0].kind(), Some("CALL"));
    assert!(read.samples().next().unwrap().branches.is_empty());
    // If the number of branches exceeds the record, only this sample is rejected.
    let mut damaged = file.clone();
    let at = damaged
        .windows(8)
        .position(|word| word == from.to_le_bytes())
        .unwrap();
    damaged[at - 8..at].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(reader::read(&damaged).unwrap().len(), read.len() - 1);
}

/// A file for an event without call chains has no call-chain field. perf prints the instruction
/// pointer of a sample and its branches on one line, as perf2bolt expects, only in this case.
#[test]
fn event_without_chains_has_no_chain_field() {
    let mut profile = profile();
    profile.events[0].branch_filter = (BranchFilter::ANY | BranchFilter::USER).bits();
    profile.events[0].has_chains = false;
    let file = bytes(&profile);
    let read = reader::read(&file).unwrap();
    assert!(!read.events[0].has_chains);
    assert_eq!(read.len(), profile.len());
    for (read, written) in read.samples().zip(profile.samples()) {
        assert_eq!(
            (read.ip, read.pid, read.cr3),
            (written.ip, written.pid, written.cr3)
        );
        assert!(read.chain.len() <= 2, "{:x?}", read.chain);
    }
    let PerfFileReader {
        mut perf_file,
        mut record_iter,
    } = PerfFileReader::parse_file(Cursor::new(&file)).unwrap();
    let mut samples = 0;
    while let Some(record) = record_iter.next_record(&mut perf_file).unwrap() {
        if let PerfFileRecord::EventRecord { record, .. } = record
            && let EventRecord::Sample(sample) = record.parse().unwrap()
        {
            assert!(sample.callchain.is_none());
            samples += 1;
        }
    }
    assert_eq!(samples, profile.len());
}

/// A sample without call chain has a chain of its own address in the file, because `perf script`
/// prints no address for an empty chain.
#[test]
fn sample_without_chain_has_its_address_in_the_file() {
    let profile = profile();
    let mut light = profile.samples().next().unwrap();
    let ip = light.ip;
    light.chain = &[];
    light.ends = UnwindStopReasons::default();
    let mut only_light = Profile::new(profile.meta.clone(), profile.events.clone());
    only_light.push(&light);
    let file = bytes(&only_light);
    assert!(
        reader::read(&file)
            .unwrap()
            .samples()
            .next()
            .unwrap()
            .chain
            .is_empty()
    );
    let PerfFileReader {
        mut perf_file,
        mut record_iter,
    } = PerfFileReader::parse_file(Cursor::new(&file)).unwrap();
    let mut chains = Vec::new();
    while let Some(record) = record_iter.next_record(&mut perf_file).unwrap() {
        if let PerfFileRecord::EventRecord { record, .. } = record
            && let EventRecord::Sample(sample) = record.parse().unwrap()
        {
            let chain = sample.callchain.unwrap();
            chains.push((chain.len(), chain.get(1)));
        }
    }
    assert_eq!(chains, [(2, Some(ip))]);
}
