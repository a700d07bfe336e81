use super::*;
use proptest::prelude::*;

const ALL_TIMES: ReadFormat = ReadFormat::TOTAL_TIME_ENABLED.union(ReadFormat::TOTAL_TIME_RUNNING);

fn encoded(record: &impl Encode, format: Format) -> Vec<u8> {
    let mut bytes = Vec::new();
    record.encode(format, &mut bytes);
    bytes
}

fn sample<'a>(entries: &'a [ReadEntry], ips: &'a [u64], raw: &'a [u8]) -> Sample<'a> {
    Sample {
        misc: Misc(CpuMode::GuestUser as u16 | Misc::EXACT_IP.0),
        ip: 0x1111_2222_3333_4444,
        pid: 5,
        tid: 6,
        time_ns: 7,
        addr: 8,
        id: 9,
        stream_id: 10,
        cpu: 11,
        period: 12,
        read: ReadValues {
            time_enabled_ns: 13,
            time_running_ns: 14,
            entries: Entries::List(entries),
        },
        callchain: Words::List(ips),
        raw,
    }
}

/// What is left of `full` in `format`.
fn projected<'a>(
    full: &Sample<'a>,
    format: Format,
    padded_raw: &'a [u8],
    entries: &'a [ReadEntry],
) -> Sample<'a> {
    let mut left = Sample {
        misc: full.misc,
        ..Sample::default()
    };
    let has = |bit| format.sample_type.contains(bit);
    if has(SampleType::IP) {
        left.ip = full.ip;
    }
    if has(SampleType::TID) {
        (left.pid, left.tid) = (full.pid, full.tid);
    }
    if has(SampleType::TIME) {
        left.time_ns = full.time_ns;
    }
    if has(SampleType::ADDR) {
        left.addr = full.addr;
    }
    if has(SampleType::ID) {
        left.id = full.id;
    }
    if has(SampleType::STREAM_ID) {
        left.stream_id = full.stream_id;
    }
    if has(SampleType::CPU) {
        left.cpu = full.cpu;
    }
    if has(SampleType::PERIOD) {
        left.period = full.period;
    }
    if has(SampleType::READ) {
        if format.read_format.contains(ReadFormat::TOTAL_TIME_ENABLED) {
            left.read.time_enabled_ns = full.read.time_enabled_ns;
        }
        if format.read_format.contains(ReadFormat::TOTAL_TIME_RUNNING) {
            left.read.time_running_ns = full.read.time_running_ns;
        }
        left.read.entries = Entries::List(entries);
    }
    if has(SampleType::CALLCHAIN) {
        left.callchain = full.callchain;
    }
    if has(SampleType::RAW) {
        left.raw = padded_raw;
    }
    left
}

/// Checks size, header and round trip of one sample in one format.
fn check(entries: &[ReadEntry], ips: &[u64], raw: &[u8], format: Format) {
    let full = sample(entries, ips, raw);
    let bytes = encoded(&full, format);
    assert_eq!(bytes.len(), full.size(format), "{format:?}");
    assert_eq!(bytes.len() % 8, 0, "{format:?}");
    assert_eq!(
        usize::from(u16::from_ne_bytes([bytes[6], bytes[7]])),
        bytes.len(),
        "{format:?}"
    );

    let mut padded = raw.to_vec();
    padded.resize((4 + raw.len()).next_multiple_of(8) - 4, 0);
    let with_id = format.read_format.contains(ReadFormat::ID);
    let members = if format.read_format.contains(ReadFormat::GROUP) {
        entries.len()
    } else {
        1
    };
    let mut seen: Vec<ReadEntry> = entries
        .iter()
        .copied()
        .chain([ReadEntry::default()])
        .take(members)
        .collect();
    if !with_id {
        seen.iter_mut().for_each(|entry| entry.id = 0);
    }
    let Ok(Record::Sample(decoded)) = Record::decode_bytes(&bytes, format) else {
        panic!(
            "{format:?} does not decode: {:?}",
            Record::decode_bytes(&bytes, format)
        );
    };
    assert_eq!(decoded, projected(&full, format, &padded, &seen), "{format:?}");
}

#[test]
fn p32_p33_every_sample_type_in_every_read_format_has_its_size_and_round_trips() {
    let entries = [
        ReadEntry { value: 100, id: 1 },
        ReadEntry { value: 200, id: 2 },
        ReadEntry { value: 300, id: 3 },
    ];
    for mask in 0..1 << 11 {
        let sample_type = SampleType::from_bits(mask).expect("11 bits are defined");
        for read_format in (0..1 << 4).map(|bits| ReadFormat::from_bits(bits).expect("4 bits are defined")) {
            check(
                &entries,
                &[0xa, 0xb],
                b"raw",
                Format {
                    sample_type,
                    read_format,
                },
            );
        }
    }
}

proptest! {
    #[test]
    fn p33_samples_round_trip(
        mask in 0u64..1 << 11,
        read in 0u64..1 << 4,
        values in prop::collection::vec(any::<(u64, u64)>(), 0..9),
        ips in prop::collection::vec(any::<u64>(), 0..40),
        raw in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let entries: Vec<_> = values.into_iter().map(|(value, id)| ReadEntry { value, id }).collect();
        let format = Format {
            sample_type: SampleType::from_bits_truncate(mask),
            read_format: ReadFormat::from_bits_truncate(read),
        };
        check(&entries, &ips, &raw, format);
    }

    #[test]
    fn arbitrary_bytes_never_panic(
        ty in 0u32..12,
        body in prop::collection::vec(any::<u8>(), 0..300),
        mask in 0u64..1 << 11,
        read in 0u64..1 << 4,
        lie in prop::option::of(any::<u16>()),
    ) {
        let format = Format {
            sample_type: SampleType::from_bits_truncate(mask),
            read_format: ReadFormat::from_bits_truncate(read),
        };
        let mut bytes = Vec::new();
        put_header(&mut bytes, RecordType(ty), Misc(3), lie.map_or(HEADER_SIZE + body.len(), usize::from));
        bytes.extend_from_slice(&body);
        match Record::decode_bytes(&bytes, format) {
            // Whatever was accepted lies inside the bytes it was made of, and can be walked.
            Ok(Record::Sample(sample)) => {
                prop_assert!(sample.callchain.iter().count() * 8 <= body.len());
                prop_assert!(sample.read.entries.iter().count() * 8 <= body.len().max(8));
            }
            Ok(_) => {}
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn side_band_records_round_trip(
        pid: u32, tid: u32, start: u64, len: u64, pgoff: u64,
        name in prop::collection::vec(1u8.., 0..40),
    ) {
        let none = Format::default();
        let comm = Comm { pid, tid, name: &name };
        let bytes = encoded(&comm, none);
        prop_assert_eq!(bytes.len(), comm.size(none));
        prop_assert_eq!(bytes.len() % 8, 0);
        prop_assert_eq!(bytes.last(), Some(&0), "the name is terminated");
        let cut = Comm { name: &name[..name.len().min(15)], ..comm };
        prop_assert_eq!(Record::decode_bytes(&bytes, none), Ok(Record::Comm(cut)));

        let mmap = Mmap { misc: CpuMode::GuestKernel.into(), pid, tid, start, len, pgoff, name: MapName::Path(&name) };
        let bytes = encoded(&mmap, none);
        prop_assert_eq!(bytes.len(), mmap.size(none));
        prop_assert_eq!(bytes.len() % 8, 0);
        prop_assert_eq!(bytes.last(), Some(&0), "the path is terminated");
        prop_assert_eq!(Record::decode_bytes(&bytes, none), Ok(Record::Mmap(mmap)));
    }
}

#[test]
fn sample_fields_come_in_the_order_of_the_abi() {
    let format = Format {
        sample_type: SampleType::all(),
        read_format: ReadFormat::ID,
    };
    let entries = [ReadEntry { value: 100, id: 101 }];
    let bytes = encoded(&sample(&entries, &[0xa, 0xb], b"raw!"), format);
    let words: Vec<u64> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|&word| u64::from_ne_bytes(word))
        .collect();
    let header = 9 | (5 | 1 << 14) << 32 | (bytes.len() as u64) << 48;
    let raw = 4 | u64::from(u32::from_ne_bytes(*b"raw!")) << 32;
    assert_eq!(
        words,
        [
            header,
            0x1111_2222_3333_4444,
            5 | 6 << 32,
            7,
            8,
            9,
            10,
            11,
            12,
            100,
            101,
            2,
            0xa,
            0xb,
            raw
        ],
        "ip, pid and tid, time, addr, id, stream id, cpu, period, read, call chain, raw"
    );
}

#[test]
fn absent_call_chain_and_raw_data_take_eight_bytes_each() {
    let format = |sample_type| Format {
        sample_type,
        read_format: ReadFormat::empty(),
    };
    let empty = Sample::default();
    assert_eq!(
        encoded(&empty, format(SampleType::CALLCHAIN))[8..],
        0u64.to_ne_bytes()
    );
    assert_eq!(
        encoded(&empty, format(SampleType::RAW))[8..],
        [4, 0, 0, 0, 0, 0, 0, 0]
    );
}

#[test]
fn group_values_lead_with_the_number_of_members_and_the_leaders_times() {
    let format = ALL_TIMES | ReadFormat::GROUP | ReadFormat::ID;
    let entries = [ReadEntry { value: 1, id: 2 }, ReadEntry { value: 3, id: 4 }];
    let values = ReadValues {
        time_enabled_ns: 10,
        time_running_ns: 9,
        entries: Entries::List(&entries),
    };
    let mut bytes = Vec::new();
    values.encode(format, &mut bytes);
    let words: Vec<u64> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|&word| u64::from_ne_bytes(word))
        .collect();
    assert_eq!(words, [2, 10, 9, 1, 2, 3, 4]);
    assert_eq!(values.size(format), bytes.len());
}

#[test]
fn a_claimed_number_of_members_beyond_the_record_is_refused() {
    let format = Format {
        sample_type: SampleType::READ,
        read_format: ReadFormat::GROUP | ReadFormat::ID,
    };
    for members in [2, u64::MAX, u64::MAX / 16 + 1, 1 << 60] {
        let mut bytes = Vec::new();
        put_header(&mut bytes, RecordType::SAMPLE, Misc::default(), 32);
        for word in [members, 1, 2] {
            put_u64(&mut bytes, word);
        }
        assert_eq!(
            Record::decode_bytes(&bytes, format),
            Err(DecodeError::Short {
                field: "group members"
            }),
            "{members} members"
        );
    }
}

#[test]
fn a_sample_longer_than_its_format_is_refused() {
    let format = Format {
        sample_type: SampleType::IP,
        read_format: ReadFormat::empty(),
    };
    let longer = Format {
        sample_type: SampleType::IP | SampleType::TIME,
        ..format
    };
    let bytes = encoded(&Sample::default(), longer);
    assert_eq!(
        Record::decode_bytes(&bytes, format),
        Err(DecodeError::Trailing { bytes: 8 })
    );
}

#[test]
fn lost_task_throttle_and_read_records_are_as_long_as_the_abi_says_and_round_trip() {
    let none = Format::default();
    let lost = Lost { id: 1, lost: 2 };
    assert_eq!(encoded(&lost, none).len(), 24);
    assert_eq!(
        Record::decode_bytes(&encoded(&lost, none), none),
        Ok(Record::Lost(lost))
    );

    let fork = Task {
        fork: true,
        pid: 1,
        ppid: 2,
        tid: 3,
        ptid: 4,
        time_ns: 5,
    };
    assert_eq!(encoded(&fork, none).len(), 32);
    assert_eq!(
        Record::decode_bytes(&encoded(&fork, none), none),
        Ok(Record::Fork(fork))
    );
    let exit = Task { fork: false, ..fork };
    assert_eq!(
        Record::decode_bytes(&encoded(&exit, none), none),
        Ok(Record::Exit(exit))
    );
    let words: Vec<u32> = encoded(&exit, none)[8..24]
        .as_chunks()
        .0
        .iter()
        .map(|&w| u32::from_ne_bytes(w))
        .collect();
    assert_eq!(words, [1, 2, 3, 4], "pid, ppid, tid, ptid");

    let throttle = Throttle {
        throttled: true,
        time_ns: 1,
        id: 2,
        stream_id: 3,
    };
    assert_eq!(encoded(&throttle, none).len(), 32);
    assert_eq!(
        Record::decode_bytes(&encoded(&throttle, none), none),
        Ok(Record::Throttle(throttle))
    );
    let unthrottle = Throttle {
        throttled: false,
        ..throttle
    };
    assert_eq!(
        Record::decode_bytes(&encoded(&unthrottle, none), none),
        Ok(Record::Unthrottle(unthrottle))
    );

    let format = Format {
        read_format: ALL_TIMES | ReadFormat::ID,
        ..none
    };
    let entries = Entries::One(ReadEntry { value: 3, id: 6 });
    let read = Read {
        pid: 1,
        tid: 2,
        values: ReadValues {
            time_enabled_ns: 4,
            time_running_ns: 5,
            entries,
        },
    };
    let bytes = encoded(&read, format);
    assert_eq!(bytes.len(), 8 + 8 + 32);
    assert_eq!(Record::decode_bytes(&bytes, format), Ok(Record::Read(read)));
}

#[test]
fn names_of_mappings_fall_back() {
    let long = vec![b'x'; 4096];
    assert_eq!(MapName::Path(&long).bytes(), b"//toolong");
    assert_eq!(MapName::Path(&long[..4095]).bytes().len(), 4095);
    assert_eq!(MapName::Path(b"cut\0here").bytes(), b"cut");
    for name in [
        MapName::Anonymous,
        MapName::TooLong,
        MapName::NoMemory,
        MapName::Vdso,
    ] {
        assert_eq!(MapName::from(name.bytes()), name);
    }
}

#[test]
fn a_name_of_sixteen_bytes_or_more_is_still_terminated() {
    let comm = Comm {
        pid: 0,
        tid: 0,
        name: b"0123456789abcdefXYZ",
    };
    let bytes = encoded(&comm, Format::default());
    assert_eq!(&bytes[16..], b"0123456789abcde\0");
}

#[test]
fn guest_modes_are_told_apart() {
    for (bits, mode) in [
        (1, CpuMode::Kernel),
        (2, CpuMode::User),
        (3, CpuMode::Hypervisor),
        (4, CpuMode::GuestKernel),
        (5, CpuMode::GuestUser),
        (7, CpuMode::Unknown),
    ] {
        assert_eq!(Misc(bits | Misc::EXACT_IP.0).cpu_mode(), mode);
    }
}
