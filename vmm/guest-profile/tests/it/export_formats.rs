//! Tests of folded stacks, flame graphs and pprof, and of invalid input files.

use std::collections::BTreeMap;
use std::io::{Cursor, Read, Seek, Write};

use guest_profile::export::symbolize::{Symbolizer, complete_chains};
use guest_profile::export::{
    EventSamplingRate, FileMapping, NO_PID, Profile, ProfileMetadata, ProfileSample, ProfileSymbol,
    SampledEventInfo, TaskName, folded, perfdata, pprof, reader, script,
};
use guest_profile::unwind::{CONTEXT_GUEST_KERNEL, CONTEXT_GUEST_USER, UnwindStop, UnwindStopReasons};
use kernel_images::symbols::KernelSymbols;
use proptest::prelude::*;

const KERNEL: u64 = 0xffff_ffff_8100_0000;

pub(super) fn kernel() -> KernelSymbols {
    KernelSymbols::parse_text(
        b"ffffffff81000000 T entry\nffffffff81000100 T vfs_read\nffffffff81000200 T _etext\n",
    )
    .unwrap()
}

pub(super) fn profile() -> Profile {
    let event = SampledEventInfo {
        name: "cycles".into(),
        type_: 0,
        config: 0,
        rate: EventSamplingRate::FrequencyHz(1000),
        branch_filter: 0,
        has_chains: true,
        id: 3,
    };
    let mut p = Profile::new(
        ProfileMetadata {
            vcpus: 1,
            ..ProfileMetadata::default()
        },
        vec![event],
    );
    p.tasks = vec![TaskName {
        time_ns: 0,
        pid: 42,
        tid: 42,
        comm: "a;b".into(),
    }];
    p.mappings = vec![FileMapping {
        time_ns: 0,
        pid: 42,
        start: 0x40_0000,
        len: 0x1000,
        file_offset: 0,
        path: "/bin/three".into(),
        build_id: None,
    }];
    let symbol = |start, name: &str| ProfileSymbol {
        start,
        end: start + 0x100,
        name: name.into(),
        pid: Some(42),
    };
    p.symbols = vec![symbol(0x40_0100, "hot"), symbol(0x40_0200, "main")];
    let user: &[u64] = &[CONTEXT_GUEST_USER, 0x40_0110, 0x40_0210];
    let system: &[u64] = &[
        CONTEXT_GUEST_KERNEL,
        KERNEL + 0x110,
        KERNEL + 0x10,
        CONTEXT_GUEST_USER,
        0x40_0800,
        0x40_0210,
    ];
    for (time_ns, chain, pid, cpl, ip) in [
        (100, user, 42, 3, 0x40_0110),
        (200, user, 42, 3, 0x40_0110),
        (300, system, 42, 0, KERNEL + 0x110),
        (400, &[][..], NO_PID, 3, 0x1234),
    ] {
        p.push(&ProfileSample {
            time_ns,
            pid,
            tid: pid,
            cpl,
            ip,
            chain,
            ..sample()
        });
    }
    p
}

/// Returns a profile sample in the function `hot` without a call chain.
pub(super) fn sample() -> ProfileSample<'static> {
    ProfileSample {
        pid: 42,
        tid: 42,
        cpl: 3,
        ip: 0x40_0110,
        cr3: 0x5000,
        period: 10,
        event_id: 3,
        ..ProfileSample::default()
    }
}

fn stacks(p: &Profile) -> BTreeMap<String, u64> {
    folded::stacks(p, &mut Symbolizer::new(p, Some(kernel()), None), None)
}

#[test]
fn stacks_fold_by_task_with_the_outermost_first() {
    let p = profile();
    let stacks = stacks(&p);
    let want = [
        ("a:b;main;hot", 20),
        ("a:b;main;three;entry_[k];vfs_read_[k]", 10),
        ("cr3:5000;[guest user]", 10),
    ];
    assert_eq!(stacks, BTreeMap::from(want.map(|(s, n)| (s.to_owned(), n))));
    let mut text = Vec::new();
    folded::write(&stacks, &mut text).unwrap();
    assert!(String::from_utf8(text).unwrap().starts_with("a:b;main;hot 20\n"));
}

/// A truncated chain is copied to a sample without a call chain only if no other sample has a
/// complete chain.
#[test]
fn truncated_chains_are_not_reused() {
    let mut p = profile();
    let sample = |time_ns, ends, chain| ProfileSample {
        time_ns,
        ends,
        chain,
        ..sample()
    };
    let spent = UnwindStopReasons {
        user: Some(UnwindStop::Spent),
        ..UnwindStopReasons::default()
    };
    let cut = [CONTEXT_GUEST_USER, 0x40_0110, 0x40_0150];
    (0..6).for_each(|i| p.push(&sample(500 + i, spent, &cut)));
    (0..9).for_each(|i| p.push(&sample(600 + i, UnwindStopReasons::default(), &[])));
    let full = complete_chains(&p, &mut Symbolizer::new(&p, Some(kernel()), None));
    let added: Vec<_> = full.samples().filter(|s| s.time_ns >= 600).collect();
    assert_eq!(added.len(), 9);
    assert!(added.iter().all(|s| s.chain.len() == 3 && s.chain != cut));
    let mut only = Profile::new(p.meta.clone(), p.events.clone());
    only.push(&sample(1, spent, &cut));
    only.push(&sample(2, UnwindStopReasons::default(), &[]));
    let full = complete_chains(&only, &mut Symbolizer::new(&only, None, None));
    assert!(full.samples().all(|s| s.chain == cut));
    let mut text = Vec::new();
    script::write(&only, &mut Symbolizer::new(&only, None, None), &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert_eq!(
        text.matches("cycles: [cut short: time or reads]\n").count(),
        1,
        "{text}"
    );
}

/// Samples without a call chain take the chains of other samples in the same function in turn.
#[test]
fn samples_without_chain_reuse_chains_of_same_function() {
    let mut p = profile();
    let light = |time_ns, ip, cpl| ProfileSample {
        time_ns,
        cpl,
        ip,
        ..sample()
    };
    p.push(&light(500, 0x40_0120, 3));
    p.push(&light(600, KERNEL + 0x180, 0));
    // No other sample in this function has a chain.
    p.push(&light(700, 0x40_0250, 3));
    let mut symbols = Symbolizer::new(&p, Some(kernel()), None);
    let full = complete_chains(&p, &mut symbols);
    assert_eq!(full.len(), p.len());
    assert!(
        full.samples()
            .any(|s| s.chain == [CONTEXT_GUEST_USER, 0x40_0120, 0x40_0210])
    );
    let stacks = folded::stacks(&full, &mut symbols, None);
    let want = [
        ("a:b;main;hot", 30),
        ("a:b;main", 10),
        ("a:b;main;three;entry_[k];vfs_read_[k]", 20),
        ("cr3:5000;[guest user]", 10),
    ];
    assert_eq!(stacks, BTreeMap::from(want.map(|(s, n)| (s.to_owned(), n))));
}

#[test]
fn flame_graph_contains_all_functions() {
    let p = profile();
    let stacks = folded::stacks(&p, &mut Symbolizer::new(&p, Some(kernel()), None), Some(3));
    let mut svg = Vec::new();
    folded::flamegraph(&stacks, "guest", "cycles", 0.01, &mut svg).unwrap();
    let svg = String::from_utf8(svg).unwrap();
    for name in ["hot (20 cycles, 50.00%)", "vfs_read", "main (30 cycles, 75.00%)"] {
        assert!(svg.contains(name), "{name}");
    }
    assert!(folded::flamegraph(&BTreeMap::new(), "guest", "cycles", 0.01, Vec::new()).is_err());
}

/// A field of a protobuf message. The test's decoder is independent of the encoder under test.
enum Field<'b> {
    Number(u64),
    Bytes(&'b [u8]),
}

fn varint(b: &mut &[u8]) -> u64 {
    prost::encoding::decode_varint(b).unwrap()
}

fn fields(mut b: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut out = Vec::new();
    while !b.is_empty() {
        let key = varint(&mut b);
        out.push((
            key >> 3,
            match key & 7 {
                0 => Field::Number(varint(&mut b)),
                2 => {
                    let len = varint(&mut b) as usize;
                    let (bytes, rest) = b.split_at(len);
                    b = rest;
                    Field::Bytes(bytes)
                }
                wire => panic!("wire type {wire}"),
            },
        ));
    }
    out
}

fn number(message: &[u8], field: u64) -> u64 {
    let number = |(f, v)| match v {
        Field::Number(n) if f == field => Some(n),
        _ => None,
    };
    fields(message).into_iter().find_map(number).unwrap_or(0)
}

fn messages(message: &[u8], field: u64) -> Vec<&[u8]> {
    let message_of = |(f, v)| match v {
        Field::Bytes(b) if f == field => Some(b),
        _ => None,
    };
    fields(message).into_iter().filter_map(message_of).collect()
}

fn packed(mut b: &[u8]) -> Vec<u64> {
    let mut out = Vec::new();
    while !b.is_empty() {
        out.push(varint(&mut b));
    }
    out
}

/// Writes a profile as pprof and returns the decompressed bytes.
fn as_pprof(p: &Profile) -> Vec<u8> {
    let mut gz = Vec::new();
    pprof::write(
        p,
        &mut Symbolizer::new(p, Some(kernel()), None),
        &pprof::SampleLabel::ALL,
        &mut gz,
    )
    .unwrap();
    let mut raw = Vec::new();
    flate2::read::GzDecoder::new(&gz[..])
        .read_to_end(&mut raw)
        .unwrap();
    raw
}

/// The address of the first instruction of a function belongs to that function if the function was
/// interrupted there, even below kernel frames. If the same address is a return address, it belongs
/// to the preceding function, which ends with the call. In pprof, the two frames therefore have
/// different locations.
#[test]
fn interrupted_first_instruction_differs_from_return_address() {
    let mut p = profile();
    const FIRST_OF_MAIN: u64 = 0x40_0200;
    let interrupted = [
        CONTEXT_GUEST_KERNEL,
        KERNEL + 0x110,
        CONTEXT_GUEST_USER,
        FIRST_OF_MAIN,
    ];
    let called = [CONTEXT_GUEST_USER, 0x40_0210, FIRST_OF_MAIN];
    let alone = [CONTEXT_GUEST_USER, FIRST_OF_MAIN];
    for (time_ns, cpl, chain) in [
        (500, 3, &called[..]),
        (600, 0, &interrupted[..]),
        (700, 3, &alone[..]),
    ] {
        p.push(&ProfileSample {
            time_ns,
            cpl,
            ip: chain[1],
            period: 1000,
            chain,
            ..sample()
        });
    }
    let stacks = stacks(&p);
    for stack in ["a:b;hot;main", "a:b;main;vfs_read_[k]", "a:b;main"] {
        assert_eq!(stacks.get(stack), Some(&1000), "{stack}: {stacks:?}");
    }
    let raw = as_pprof(&p);
    let addresses: Vec<u64> = messages(&raw, 4).into_iter().map(|l| number(l, 3)).collect();
    let count = |address| addresses.iter().filter(|a| **a == address).count();
    assert_eq!(
        (count(FIRST_OF_MAIN), count(FIRST_OF_MAIN - 1)),
        (1, 1),
        "{addresses:x?}"
    );
}

#[test]
fn pprof_has_the_stacks_values_and_labels() {
    let p = profile();
    let raw = as_pprof(&p);
    let strings: Vec<String> = messages(&raw, 6)
        .into_iter()
        .map(|s| String::from_utf8(s.to_vec()).unwrap())
        .collect();
    assert_eq!(strings[0], "");
    let s = |i: u64| strings[i as usize].as_str();
    let types: Vec<_> = messages(&raw, 1)
        .into_iter()
        .map(|t| (s(number(t, 1)), s(number(t, 2))))
        .collect();
    assert_eq!(types, [("samples", "count"), ("cycles", "count")]);
    assert_eq!(number(&raw, 10), 300, "duration");
    let functions: BTreeMap<u64, &str> = messages(&raw, 5)
        .into_iter()
        .map(|f| (number(f, 1), s(number(f, 2))))
        .collect();
    let locations: BTreeMap<u64, String> = messages(&raw, 4)
        .into_iter()
        .map(|l| {
            let name = messages(l, 4)
                .first()
                .map(|line| functions[&number(line, 1)].to_owned());
            (
                number(l, 1),
                name.unwrap_or_else(|| format!("{:#x}", number(l, 3))),
            )
        })
        .collect();
    let mut stacks: Vec<(Vec<&str>, Vec<u64>)> = messages(&raw, 2)
        .into_iter()
        .map(|m| {
            let ids = packed(messages(m, 1)[0]);
            (
                ids.iter().map(|id| locations[id].as_str()).collect(),
                packed(messages(m, 2)[0]),
            )
        })
        .collect();
    stacks.sort();
    assert_eq!(
        stacks,
        [
            (vec!["0x1234"], vec![1, 10]),
            (vec!["hot", "main"], vec![2, 20]),
            (vec!["vfs_read", "entry", "0x400800", "main"], vec![1, 10]),
        ]
    );
    let labels: Vec<_> = messages(messages(&raw, 2)[0], 3)
        .into_iter()
        .map(|l| (s(number(l, 1)), s(number(l, 2)), number(l, 3)))
        .collect();
    assert_eq!(
        labels,
        [
            ("task", "a;b", 0),
            ("event", "cycles", 0),
            ("vcpu", "", 0),
            ("pid", "", 42)
        ]
    );
}

fn writer<W: Write + Seek>(p: &Profile, out: W) -> perfdata::PerfDataWriter<W> {
    perfdata::PerfDataWriter::new(out, p.meta.clone(), p.events.clone()).unwrap()
}

fn file() -> Vec<u8> {
    perfdata::write(Cursor::new(Vec::new()), &profile())
        .unwrap()
        .into_inner()
}

#[test]
fn empty_perf_data_is_accepted_and_damaged_one_rejected() {
    assert!(reader::read(b"").unwrap_err().is_empty());
    let whole = file();
    let data_end = {
        let word = |at: usize| u64::from_le_bytes(whole[at..at + 8].try_into().unwrap());
        (word(40) + word(48)) as usize
    };
    for len in 1..data_end {
        let e = reader::read(&whole[..len]).expect_err("a truncated file was taken for whole");
        assert!(!e.is_empty());
        assert!(!e.to_string().is_empty());
    }
    assert!(!reader::read(b"hello, this is no profile").unwrap_err().is_empty());
    assert!(!reader::read(&[0; 4096]).unwrap_err().is_empty());
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        reader::read_file(&dir.path().join("none")).unwrap_err(),
        reader::ProfileReadError::Io(_)
    ));
}

/// If the recorder is killed at any moment, the file is readable up to the last checkpoint and
/// contains the event names.
#[test]
fn killed_recording_is_readable_up_to_checkpoint() {
    let p = profile();
    let events = p.events.len();
    let mut out = Cursor::new(Vec::new());
    let mut w = writer(&p, &mut out);
    let samples: Vec<_> = p.samples().collect();
    let mut kept = 0;
    for (n, sample) in samples.iter().enumerate() {
        w.sample(sample).unwrap();
        if n % 2 == 0 {
            w.checkpoint().unwrap();
            kept = n + 1;
        }
    }
    assert!(kept >= 1 && w.samples() == samples.len() as u64);
    let half = samples.last().unwrap();
    w.sample(half).unwrap();
    // Only a part of the last record has been written to the disk.
    drop(w);
    let bytes = out.into_inner();
    let read = reader::read(&bytes[..bytes.len() - 5]).unwrap();
    assert_eq!((read.len(), read.events.len()), (kept, events));
    for (read, original) in read.samples().zip(&samples) {
        assert_eq!(
            (read.ip, read.period, read.chain),
            (original.ip, original.period, original.chain)
        );
    }
    for (read, original) in read.events.iter().zip(&p.events) {
        assert_eq!(read.name, original.name);
    }
}

#[test]
fn recording_killed_before_checkpoint_is_reported() {
    let p = profile();
    let mut out = Cursor::new(Vec::new());
    let mut w = writer(&p, &mut out);
    p.samples().for_each(|s| w.sample(&s).unwrap());
    drop(w);
    assert!(matches!(
        reader::read(out.get_ref()).unwrap_err(),
        reader::ProfileReadError::Unfinished
    ));
}

/// After a failed write, the truncated file contains all complete records, including those after
/// the last checkpoint.
#[test]
fn truncated_recording_is_readable() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("perf.data");
    let p = profile();
    let samples: Vec<_> = p.samples().collect();
    for (kept, lost) in [(0, 0), (3, 7), (3, 40), (3, 5_000)] {
        let file = std::fs::File::create_new(&path).unwrap();
        let unbuffered = std::io::BufWriter::with_capacity(0, file.try_clone().unwrap());
        let mut w = writer(&p, unbuffered);
        for _ in 0..kept {
            w.sample(&samples[0]).unwrap();
        }
        w.checkpoint().unwrap();
        for _ in 0..1000 {
            w.sample(&samples[0]).unwrap();
        }
        // The last bytes have not been written to the disk.
        file.set_len(file.metadata().unwrap().len() - lost).unwrap();
        let left = w.truncate_to_records().unwrap();
        assert!(
            (kept..=kept + 1000).contains(&left) && (left == kept + 1000) == (lost == 0),
            "{left}"
        );
        assert_eq!(reader::read_file(&path).unwrap().len() as u64, left);
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn hole_after_last_record_is_truncated() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("perf.data");
    let p = profile();
    let file = std::fs::File::create_new(&path).unwrap();
    let unbuffered = std::io::BufWriter::with_capacity(0, file.try_clone().unwrap());
    let mut w = writer(&p, unbuffered);
    for _ in 0..3 {
        w.sample(&p.samples().next().unwrap()).unwrap();
    }
    w.checkpoint().unwrap();
    let length = file.metadata().unwrap().len();
    file.set_len(length + 4096).unwrap();
    assert_eq!(w.truncate_to_records().unwrap(), 3);
    assert_eq!(file.metadata().unwrap().len(), length);
    assert_eq!(reader::read_file(&path).unwrap().len(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn damaged_profile_never_panics_its_reader(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
                                    cut in any::<prop::sample::Index>(), shorten: bool) {
        let mut f = file();
        for (at, v) in changes {
            let at = at.index(f.len());
            f[at] = v;
        }
        if shorten {
            let len = cut.index(f.len());
            f.truncate(len);
        }
        if let Ok(p) = reader::read(&f) {
            let mut symbols = Symbolizer::new(&p, None, None);
            let _ = folded::stacks(&p, &mut symbols, None);
            pprof::write(&p, &mut symbols, &pprof::SampleLabel::ALL, std::io::sink()).unwrap();
        }
    }
}
