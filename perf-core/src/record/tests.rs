use super::*;
use crate::attr::REGS_USER_LEN;
use proptest::prelude::*;

const ALL_TIMES: ReadFormat = ReadFormat::TOTAL_TIME_ENABLED.union(ReadFormat::TOTAL_TIME_RUNNING);

/// Maps 15 bits to sample types: the eleven lowest types, IDENTIFIER, user registers, user stack and
/// branch stack.
fn sample_type(bits: u64) -> SampleType {
    let bits = bits & 0x7ff | (bits >> 11 & 1) << 16 | bits & 0x3000 | (bits >> 14 & 1) << 11;
    SampleType::from_bits(bits).expect("all of these are defined")
}

const REGISTERS: [u64; REGS_USER_LEN] = {
    let mut registers = [0; REGS_USER_LEN];
    let mut n = 0;
    while n < REGS_USER_LEN {
        registers[n] = 0x5000 + n as u64;
        n += 1;
    }
    registers
};

fn encoded(record: &impl EncodeRecord, format: RecordFormat) -> Vec<u8> {
    let mut bytes = Vec::new();
    record.encode(format, &mut bytes);
    bytes
}

fn sample<'a>(entries: &'a [ReadEntry], ips: &'a [u64], raw: &'a [u8]) -> Sample<'a> {
    Sample {
        misc: RecordMisc(CpuMode::GuestUser as u16 | RecordMisc::EXACT_IP.0),
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
            entries: ReadEntries::List(entries),
        },
        callchain: WordList::List(ips),
        raw,
        branches: WordList::List(&[1, 2, 3, 4, 5, 6 << 20]),
        user: UserRegsAndStack {
            abi: 2,
            registers: WordList::List(&REGISTERS),
            stack: b"the stack's top.",
        },
    }
}

/// Returns `full` restricted to the fields of `format`.
fn projected<'a>(
    full: &Sample<'a>,
    format: RecordFormat,
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
    if has(SampleType::ID) || has(SampleType::IDENTIFIER) {
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
        left.read.entries = ReadEntries::List(entries);
    }
    if has(SampleType::CALLCHAIN) {
        left.callchain = full.callchain;
    }
    if has(SampleType::RAW) {
        left.raw = padded_raw;
    }
    if has(SampleType::BRANCH_STACK) {
        left.branches = full.branches;
    }
    if has(SampleType::REGS_USER) {
        (left.user.abi, left.user.registers) = (full.user.abi, full.user.registers);
    }
    if has(SampleType::STACK_USER) {
        left.user.stack = full.user.stack;
    }
    left
}

/// Checks size, header and round trip of one sample in one format.
fn check(entries: &[ReadEntry], ips: &[u64], raw: &[u8], format: RecordFormat) {
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
    if !format.read_format.contains(ReadFormat::ID) {
        seen.iter_mut().for_each(|entry| entry.id = 0);
    }
    if !format.read_format.contains(ReadFormat::LOST) {
        seen.iter_mut().for_each(|entry| entry.lost = 0);
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
        ReadEntry {
            value: 100,
            id: 1,
            lost: 11,
        },
        ReadEntry {
            value: 200,
            id: 2,
            lost: 12,
        },
        ReadEntry {
            value: 300,
            id: 3,
            lost: 13,
        },
    ];
    for sample_type in (0..1 << 12).map(sample_type) {
        for read_format in (0..1 << 5).map(|bits| ReadFormat::from_bits(bits).expect("5 bits are defined")) {
            check(
                &entries,
                &[0xa, 0xb],
                b"raw",
                RecordFormat {
                    sample_type,
                    read_format,
                    ..RecordFormat::default()
                },
            );
        }
    }
}

proptest! {
    #[test]
    fn p33_samples_round_trip(
        mask in 0u64..1 << 15,
        read in 0u64..1 << 5,
        values in prop::collection::vec(any::<(u64, u64, u64)>(), 0..9),
        ips in prop::collection::vec(any::<u64>(), 0..40),
        raw in prop::collection::vec(any::<u8>(), 0..40),
    ) {
        let entries: Vec<_> = values.into_iter().map(|(value, id, lost)| ReadEntry { value, id, lost }).collect();
        let format = RecordFormat {
            sample_type: sample_type(mask),
            read_format: ReadFormat::from_bits_truncate(read),
            ..RecordFormat::default()
        };
        check(&entries, &ips, &raw, format);
    }

    #[test]
    fn arbitrary_bytes_never_panic(
        ty in 0u32..12,
        body in prop::collection::vec(any::<u8>(), 0..300),
        mask in 0u64..1 << 15,
        read in 0u64..1 << 5,
        lie in prop::option::of(any::<u16>()),
        sample_id_all: bool,
    ) {
        let format = RecordFormat {
            sample_type: sample_type(mask),
            read_format: ReadFormat::from_bits_truncate(read),
            sample_id_all,
        };
        let mut bytes = Vec::new();
        put_header(&mut bytes, RecordType(ty), RecordMisc(3), lie.map_or(HEADER_SIZE + body.len(), usize::from));
        bytes.extend_from_slice(&body);
        match Record::decode_bytes(&bytes, format) {
            // Decoded fields lie within the input and can be iterated.
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
        mask in 0u64..1 << 12, sample_id_all: bool,
    ) {
        let format = RecordFormat { sample_type: sample_type(mask), sample_id_all, ..RecordFormat::default() };
        let sample_id = told(format);
        let trailer = encoded_id(format).len();
        let comm = CommRecord { pid, tid, name: &name, sample_id: ID };
        let bytes = encoded(&comm, format);
        prop_assert_eq!(bytes.len(), comm.size(format));
        prop_assert_eq!(bytes.len() % 8, 0);
        prop_assert_eq!(bytes[bytes.len() - trailer - 1], 0, "the name is terminated");
        prop_assert_eq!(&bytes[bytes.len() - trailer..], encoded_id(format));
        let cut = CommRecord { name: &name[..name.len().min(15)], sample_id, ..comm };
        prop_assert_eq!(Record::decode_bytes(&bytes, format), Ok(Record::Comm(cut)));

        let name = MappingName::Path(&name);
        let mmap = MmapRecord { misc: CpuMode::GuestKernel.into(), pid, tid, start, len, pgoff, name, sample_id: ID };
        let bytes = encoded(&mmap, format);
        prop_assert_eq!(bytes.len(), mmap.size(format));
        prop_assert_eq!(bytes.len() % 8, 0);
        prop_assert_eq!(bytes[bytes.len() - trailer - 1], 0, "the path is terminated");
        prop_assert_eq!(&bytes[bytes.len() - trailer..], encoded_id(format));
        prop_assert_eq!(Record::decode_bytes(&bytes, format), Ok(Record::Mmap(MmapRecord { sample_id, ..mmap })));
    }
}

const ID: SampleId = SampleId {
    pid: 21,
    tid: 22,
    time_ns: 23,
    id: 24,
    stream_id: 25,
    cpu: 26,
};

/// Returns the trailer of [`ID`], word by word as in perf_event_open(2).
fn encoded_id(format: RecordFormat) -> Vec<u8> {
    let words = [
        (SampleType::TID, 21 | 22 << 32),
        (SampleType::TIME, 23),
        (SampleType::ID, 24),
        (SampleType::STREAM_ID, 25),
        (SampleType::CPU, 26),
        (SampleType::IDENTIFIER, 24u64),
    ];
    let there = words
        .iter()
        .filter(|(field, _)| format.sample_id_all && format.sample_type.contains(*field));
    there.flat_map(|(_, word)| word.to_ne_bytes()).collect()
}

/// Returns [`ID`] restricted to the fields of `format`.
fn told(format: RecordFormat) -> SampleId {
    let has = |fields| format.sample_id_all && format.sample_type.intersects(fields);
    let or_0 = |fields, value| if has(fields) { value } else { 0 };
    SampleId {
        pid: or_0(SampleType::TID, 21) as u32,
        tid: or_0(SampleType::TID, 22) as u32,
        time_ns: or_0(SampleType::TIME, 23),
        id: or_0(SampleType::ID | SampleType::IDENTIFIER, 24),
        stream_id: or_0(SampleType::STREAM_ID, 25),
        cpu: or_0(SampleType::CPU, 26) as u32,
    }
}

#[test]
fn sample_fields_are_in_abi_order() {
    let format = RecordFormat {
        sample_type: SampleType::all(),
        read_format: ReadFormat::ID | ReadFormat::LOST,
        // Samples have no trailer.
        sample_id_all: true,
    };
    let entries = [ReadEntry {
        value: 100,
        id: 101,
        lost: 102,
    }];
    let bytes = encoded(&sample(&entries, &[0xa, 0xb], b"raw!"), format);
    let words: Vec<u64> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|&word| u64::from_ne_bytes(word))
        .collect();
    let header = 9 | (5 | 1 << 14) << 32 | (bytes.len() as u64) << 48;
    let raw = 4 | u64::from(u32::from_ne_bytes(*b"raw!")) << 32;
    let word = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes);
    assert_eq!(
        words,
        [
            header,
            9,
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
            102,
            2,
            0xa,
            0xb,
            raw,
            2,
            1,
            2,
            3,
            4,
            5,
            6 << 20,
            2,
        ]
        .into_iter()
        .chain(REGISTERS)
        .chain([16, word(b"the stac"), word(b"k's top."), 16])
        .collect::<Vec<_>>(),
        "identifier, ip, pid and tid, time, addr, id, stream id, cpu, period, read, call chain, raw, branch \
         stack, user's registers, user's stack"
    );
}

/// A sample without a user context has no registers and an empty stack.
#[test]
fn sample_without_user_context_takes_sixteen_bytes() {
    let format = RecordFormat {
        sample_type: SampleType::REGS_USER | SampleType::STACK_USER,
        ..RecordFormat::default()
    };
    let bytes = encoded(&Sample::default(), format);
    assert_eq!(bytes.len(), 8 + 16);
    let Ok(Record::Sample(sample)) = Record::decode_bytes(&bytes, format) else {
        panic!("it does not decode");
    };
    assert_eq!(sample.user, UserRegsAndStack::default());
    // The stack claims to be longer than its record.
    let mut long = encoded(
        &Sample {
            user: UserRegsAndStack {
                stack: &[7; 32],
                ..UserRegsAndStack::default()
            },
            ..Sample::default()
        },
        format,
    );
    long[16..24].copy_from_slice(&u64::MAX.to_ne_bytes());
    assert!(matches!(
        Record::decode_bytes(&long, format),
        Err(DecodeError::Short { .. })
    ));
}

#[test]
fn absent_call_chain_and_raw_data_take_eight_bytes_each() {
    let format = |sample_type| RecordFormat {
        sample_type,
        read_format: ReadFormat::empty(),
        ..RecordFormat::default()
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
fn group_values_start_with_member_count_and_leader_times() {
    let format = ALL_TIMES | ReadFormat::GROUP | ReadFormat::ID | ReadFormat::LOST;
    let entry = |value, id, lost| ReadEntry { value, id, lost };
    let entries = [entry(1, 2, 5), entry(3, 4, 6)];
    let values = ReadValues {
        time_enabled_ns: 10,
        time_running_ns: 9,
        entries: ReadEntries::List(&entries),
    };
    let mut bytes = Vec::new();
    values.encode(format, &mut bytes);
    let words: Vec<u64> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|&word| u64::from_ne_bytes(word))
        .collect();
    assert_eq!(words, [2, 10, 9, 1, 2, 5, 3, 4, 6]);
    assert_eq!(values.size(format), bytes.len());
}

#[test]
fn member_count_beyond_record_is_rejected() {
    let format = RecordFormat {
        sample_type: SampleType::READ,
        read_format: ReadFormat::GROUP | ReadFormat::ID,
        ..RecordFormat::default()
    };
    for members in [2, u64::MAX, u64::MAX / 16 + 1, 1 << 60] {
        let mut bytes = Vec::new();
        put_header(&mut bytes, RecordType::SAMPLE, RecordMisc::default(), 32);
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
fn sample_longer_than_its_format_is_refused() {
    let format = RecordFormat {
        sample_type: SampleType::IP,
        read_format: ReadFormat::empty(),
        ..RecordFormat::default()
    };
    let longer = RecordFormat {
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
fn side_band_records_have_abi_sizes_and_round_trip() {
    for bits in 0..1 << 13 {
        let format = RecordFormat {
            sample_type: sample_type(bits & 0xfff),
            read_format: ALL_TIMES | ReadFormat::ID | ReadFormat::LOST,
            sample_id_all: bits >> 12 == 1,
        };
        let trailer = encoded_id(format);
        let sample_id = told(format);
        // The body without the trailer.
        let check = |bytes: &[u8], size: usize, len: usize| {
            assert_eq!(
                (bytes.len(), size),
                (8 + len + trailer.len(), bytes.len()),
                "{format:?}"
            );
            assert_eq!(usize::from(u16::from_ne_bytes([bytes[6], bytes[7]])), bytes.len());
            assert_eq!(bytes[8 + len..], trailer, "{format:?}");
        };

        let lost = |sample_id| LostRecord {
            id: 1,
            lost: 2,
            sample_id,
        };
        let bytes = encoded(&lost(ID), format);
        check(&bytes, lost(ID).size(format), 16);
        assert_eq!(
            Record::decode_bytes(&bytes, format),
            Ok(Record::Lost(lost(sample_id)))
        );

        for fork in [true, false] {
            let task = |sample_id| TaskRecord {
                fork,
                pid: 1,
                ppid: 2,
                tid: 3,
                ptid: 4,
                time_ns: 5,
                sample_id,
            };
            let bytes = encoded(&task(ID), format);
            check(&bytes, task(ID).size(format), 24);
            let again = if fork {
                Record::Fork(task(sample_id))
            } else {
                Record::Exit(task(sample_id))
            };
            assert_eq!(Record::decode_bytes(&bytes, format), Ok(again));
            let words: Vec<u32> = bytes[8..24]
                .as_chunks()
                .0
                .iter()
                .map(|&w| u32::from_ne_bytes(w))
                .collect();
            assert_eq!(words, [1, 2, 3, 4], "pid, ppid, tid, ptid");
        }

        for throttled in [true, false] {
            let record = |sample_id| ThrottleRecord {
                throttled,
                time_ns: 1,
                id: 2,
                stream_id: 3,
                sample_id,
            };
            let bytes = encoded(&record(ID), format);
            check(&bytes, record(ID).size(format), 24);
            let record = record(sample_id);
            let again = if throttled {
                Record::Throttle(record)
            } else {
                Record::Unthrottle(record)
            };
            assert_eq!(Record::decode_bytes(&bytes, format), Ok(again));
        }

        for out in [true, false] {
            let switch = |sample_id| SwitchRecord { out, sample_id };
            let bytes = encoded(&switch(ID), format);
            check(&bytes, switch(ID).size(format), 0);
            assert_eq!(
                Record::decode_bytes(&bytes, format),
                Ok(Record::Switch(switch(sample_id)))
            );
        }

        let entries = ReadEntries::One(ReadEntry {
            value: 3,
            id: 6,
            lost: 7,
        });
        let values = ReadValues {
            time_enabled_ns: 4,
            time_running_ns: 5,
            entries,
        };
        let read = |sample_id| ReadRecord {
            pid: 1,
            tid: 2,
            values,
            sample_id,
        };
        let bytes = encoded(&read(ID), format);
        check(&bytes, read(ID).size(format), 8 + 40);
        assert_eq!(
            Record::decode_bytes(&bytes, format),
            Ok(Record::Read(read(sample_id)))
        );
    }
}

#[test]
fn record_too_short_for_its_trailer_is_refused() {
    let format = RecordFormat {
        sample_type: SampleType::all(),
        sample_id_all: true,
        ..RecordFormat::default()
    };
    // LOST with a trailer has 8 + 16 + 48 bytes.
    for (body, field) in [(0, "trailer"), (40, "trailer"), (48, "id"), (56, "count")] {
        let mut bytes = Vec::new();
        put_header(&mut bytes, RecordType::LOST, RecordMisc::default(), 8 + body);
        bytes.resize(8 + body, 0);
        let short = Err(DecodeError::Short { field });
        assert_eq!(Record::decode_bytes(&bytes, format), short, "{body} bytes");
    }
    // Records of unsupported types are passed through unchanged, with or without a trailer.
    let mut bytes = Vec::new();
    put_header(&mut bytes, RecordType(10), RecordMisc::default(), 8);
    assert!(matches!(
        Record::decode_bytes(&bytes, format),
        Ok(Record::Other(_))
    ));
}

#[test]
fn names_of_mappings_fall_back() {
    let long = vec![b'x'; 4096];
    assert_eq!(MappingName::Path(&long).bytes(), b"//toolong");
    assert_eq!(MappingName::Path(&long[..4095]).bytes().len(), 4095);
    assert_eq!(MappingName::Path(b"cut\0here").bytes(), b"cut");
    for name in [
        MappingName::Anonymous,
        MappingName::TooLong,
        MappingName::NoMemory,
        MappingName::Vdso,
    ] {
        assert_eq!(MappingName::from(name.bytes()), name);
    }
}

#[test]
fn long_comm_name_is_truncated_and_terminated() {
    let comm = CommRecord {
        pid: 0,
        tid: 0,
        name: b"0123456789abcdefXYZ",
        sample_id: SampleId::default(),
    };
    let bytes = encoded(&comm, RecordFormat::default());
    assert_eq!(&bytes[16..], b"0123456789abcde\0");
}

#[test]
fn guest_cpu_modes_are_distinguished() {
    for (bits, mode) in [
        (1, CpuMode::Kernel),
        (2, CpuMode::User),
        (3, CpuMode::Hypervisor),
        (4, CpuMode::GuestKernel),
        (5, CpuMode::GuestUser),
        (7, CpuMode::Unknown),
    ] {
        assert_eq!(RecordMisc(bits | RecordMisc::EXACT_IP.0).cpu_mode(), mode);
    }
}
