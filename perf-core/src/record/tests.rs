use super::*;
use crate::attr::REGS_USER_LEN;
use proptest::prelude::*;

const ALL_TIMES: ReadFormat = ReadFormat::TOTAL_TIME_ENABLED.union(ReadFormat::TOTAL_TIME_RUNNING);

/// Converts 15 bits to a set of sample types: the eleven lowest types, IDENTIFIER, user registers,
/// user stack and branch stack.
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

fn decode(bytes: &[u8], format: RecordFormat) -> Result<DecodedRecord<'_>, DecodeError> {
    DecodedRecord::decode(RawRecord::new(bytes).expect("one record"), format)
}

/// Returns the 64-bit words in `bytes`.
fn words(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks();
    words.iter().map(|&word| u64::from_ne_bytes(word)).collect()
}

/// Creates an entry of read values with the given value, ID and lost count.
fn entry((value, id, lost): (u64, u64, u64)) -> ReadFormatEntry {
    ReadFormatEntry { value, id, lost }
}

fn encoded(record: &impl EncodeRecord, format: RecordFormat) -> Vec<u8> {
    let mut bytes = Vec::new();
    record.encode(format, &mut bytes);
    bytes
}

fn sample<'a>(entries: &'a [ReadFormatEntry], ips: &'a [u64], raw: &'a [u8]) -> Sample<'a> {
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
        read: ReadFormatValues {
            time_enabled_ns: 13,
            time_running_ns: 14,
            entries: ReadFormatEntries::List(entries),
        },
        callchain: SampleWords::List(ips),
        raw,
        branches: SampleWords::List(&[1, 2, 3, 4, 5, 6 << 20]),
        user: UserRegsAndStack {
            abi: 2,
            registers: SampleWords::List(&REGISTERS),
            stack: b"the stack's top.",
        },
    }
}

/// Returns the expected result of decoding `full`: fields that `format` lacks are empty.
fn projected<'a>(
    full: &Sample<'a>,
    format: RecordFormat,
    padded_raw: &'a [u8],
    entries: &'a [ReadFormatEntry],
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
        left.read.entries = ReadFormatEntries::List(entries);
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

fn size_in_header(bytes: &[u8]) -> usize {
    usize::from(u16::from_ne_bytes([bytes[6], bytes[7]]))
}

/// Checks the size and the header of an encoded sample in one format, and that decoding yields the
/// sample again.
fn check(entries: &[ReadFormatEntry], ips: &[u64], raw: &[u8], format: RecordFormat) {
    let full = sample(entries, ips, raw);
    let bytes = encoded(&full, format);
    assert_eq!(bytes.len(), full.size(format), "{format:?}");
    assert_eq!(bytes.len() % 8, 0, "{format:?}");
    assert_eq!(size_in_header(&bytes), bytes.len(), "{format:?}");

    let mut padded = raw.to_vec();
    padded.resize((4 + raw.len()).next_multiple_of(8) - 4, 0);
    let members = if format.read_format.contains(ReadFormat::GROUP) {
        entries.len()
    } else {
        1
    };
    let seen: Vec<ReadFormatEntry> = entries
        .iter()
        .chain([&ReadFormatEntry::default()])
        .take(members)
        .map(|entry| ReadFormatEntry {
            id: entry.id * u64::from(format.read_format.contains(ReadFormat::ID)),
            lost: entry.lost * u64::from(format.read_format.contains(ReadFormat::LOST)),
            ..*entry
        })
        .collect();
    let expected = DecodedRecord::Sample(projected(&full, format, &padded, &seen));
    assert_eq!(decode(&bytes, format), Ok(expected), "{format:?}");
}

#[test]
fn p32_p33_every_sample_type_in_every_read_format_has_its_size_and_round_trips() {
    let entries = [(100, 1, 11), (200, 2, 12), (300, 3, 13)].map(entry);
    for sample_type in (0..1 << 12).map(sample_type) {
        for bits in 0..1 << 5 {
            let read_format = ReadFormat::from_bits(bits).expect("5 bits are defined");
            let format = RecordFormat {
                read_format,
                ..RecordFormat::of_samples(sample_type)
            };
            check(&entries, &[0xa, 0xb], b"raw", format);
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
                let entries: Vec<_> = values.into_iter().map(entry).collect();
        let read_format = ReadFormat::from_bits_truncate(read);
        let format = RecordFormat { read_format, ..RecordFormat::of_samples(sample_type(mask)) };
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
        let raw = RawRecord::new(&bytes);
        prop_assert!(raw.is_some() || lie.is_some());
        match raw.map(|raw| DecodedRecord::decode(raw, format)) {
            // Decoded fields lie within the input and can be iterated.
            Some(Ok(DecodedRecord::Sample(sample))) => {
                prop_assert!(sample.callchain.iter().count() * 8 <= body.len());
                prop_assert!(sample.read.entries.iter().count() * 8 <= body.len().max(8));
            }
            Some(Err(error)) => prop_assert!(!error.to_string().is_empty()),
            _ => {}
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
        prop_assert_eq!(decode(&bytes, format), Ok(DecodedRecord::Comm(cut)));

        let mmap = MmapRecord { misc: CpuMode::GuestKernel.into(), pid, tid, start, len, pgoff, name: &name, sample_id: ID };
        let bytes = encoded(&mmap, format);
        prop_assert_eq!(bytes.len(), mmap.size(format));
        prop_assert_eq!(bytes.len() % 8, 0);
        prop_assert_eq!(bytes[bytes.len() - trailer - 1], 0, "the path is terminated");
        prop_assert_eq!(&bytes[bytes.len() - trailer..], encoded_id(format));
        prop_assert_eq!(decode(&bytes, format), Ok(DecodedRecord::Mmap(MmapRecord { sample_id, ..mmap })));
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

/// Returns the expected result of decoding the trailer [`ID`]: fields that `format` lacks are 0.
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
        // Has no effect on samples, which have no trailer.
        sample_id_all: true,
    };
    let entries = [entry((100, 101, 102))];
    let bytes = encoded(&sample(&entries, &[0xa, 0xb], b"raw!"), format);
    let header = 9 | (5 | 1 << 14) << 32 | (bytes.len() as u64) << 48;
    let raw = 4 | u64::from(u32::from_ne_bytes(*b"raw!")) << 32;
    let word = |bytes: &[u8; 8]| u64::from_ne_bytes(*bytes);
    // Fields with a fixed size: identifier, ip, pid and tid, time, addr, id, stream id, cpu,
    // period.
    let fixed = [header, 9, 0x1111_2222_3333_4444, 5 | 6 << 32, 7, 8, 9, 10, 11, 12];
    // Fields with a variable size: read values, call chain, raw data.
    let lists = [100, 101, 102, 2, 0xa, 0xb, raw];
    let branches = [2, 1, 2, 3, 4, 5, 6 << 20];
    let stack = [16, word(b"the stac"), word(b"k's top."), 16];
    let expected = [&fixed[..], &lists, &branches, &[2], &REGISTERS, &stack].concat();
    assert_eq!(words(&bytes), expected);
}

/// The fields of a sample without a user context take sixteen bytes: no registers and an empty
/// stack.
#[test]
fn sample_without_user_context_takes_sixteen_bytes() {
    let format = RecordFormat::of_samples(SampleType::REGS_USER | SampleType::STACK_USER);
    let bytes = encoded(&Sample::default(), format);
    assert_eq!(bytes.len(), 8 + 16);
    assert_eq!(
        decode(&bytes, format),
        Ok(DecodedRecord::Sample(Sample::default()))
    );
    // A stack whose stated size exceeds the record is rejected.
    let mut sample = Sample::default();
    sample.user.stack = &[7; 32];
    let mut long = encoded(&sample, format);
    long[16..24].copy_from_slice(&u64::MAX.to_ne_bytes());
    let decoded = decode(&long, format);
    assert!(matches!(decoded, Err(DecodeError::Short { .. })));
}

#[test]
fn absent_call_chain_and_raw_data_take_eight_bytes_each() {
    for (sample_type, word) in [(SampleType::CALLCHAIN, 0u64), (SampleType::RAW, 4)] {
        let bytes = encoded(&Sample::default(), RecordFormat::of_samples(sample_type));
        assert_eq!(bytes[8..], word.to_ne_bytes());
    }
}

#[test]
fn group_values_start_with_member_count_and_leader_times() {
    let format = ALL_TIMES | ReadFormat::GROUP | ReadFormat::ID | ReadFormat::LOST;
    let entries = [(1, 2, 5), (3, 4, 6)].map(entry);
    let values = ReadFormatValues {
        time_enabled_ns: 10,
        time_running_ns: 9,
        entries: ReadFormatEntries::List(&entries),
    };
    let mut bytes = Vec::new();
    values.encode(format, &mut bytes);
    assert_eq!(words(&bytes), [2, 10, 9, 1, 2, 5, 3, 4, 6]);
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
            decode(&bytes, format),
            Err(DecodeError::Short {
                field: "group members"
            }),
            "{members} members"
        );
    }
}

#[test]
fn sample_longer_than_its_format_is_refused() {
    let format = RecordFormat::of_samples(SampleType::IP);
    let longer = RecordFormat::of_samples(SampleType::IP | SampleType::TIME);
    let bytes = encoded(&Sample::default(), longer);
    assert_eq!(decode(&bytes, format), Err(DecodeError::Trailing { bytes: 8 }));
}

/// Checks that `record` has a body of `len` bytes and the trailer [`ID`], and decodes to
/// `expected`. Returns its bytes.
fn check_side_band<R: EncodeRecord>(
    format: RecordFormat,
    len: usize,
    record: R,
    expected: impl Fn(R) -> DecodedRecord<'static>,
) -> Vec<u8> {
    let (bytes, trailer) = (encoded(&record, format), encoded_id(format));
    let size = 8 + len + trailer.len();
    assert_eq!((bytes.len(), record.size(format)), (size, size), "{format:?}");
    assert_eq!(size_in_header(&bytes), size);
    assert_eq!(bytes[8 + len..], trailer, "{format:?}");
    assert_eq!(decode(&bytes, format), Ok(expected(record)));
    bytes
}

#[test]
fn side_band_records_have_abi_sizes_and_round_trip() {
    for bits in 0..1 << 13 {
        let format = RecordFormat {
            sample_type: sample_type(bits & 0xfff),
            read_format: ALL_TIMES | ReadFormat::ID | ReadFormat::LOST,
            sample_id_all: bits >> 12 == 1,
        };
        let sample_id = told(format);
        check_side_band(
            format,
            16,
            LostRecord {
                id: 1,
                lost: 2,
                sample_id: ID,
            },
            |r| DecodedRecord::Lost(LostRecord { sample_id, ..r }),
        );
        for on in [true, false] {
            let task = TaskRecord {
                fork: on,
                pid: 1,
                ppid: 2,
                tid: 3,
                ptid: 4,
                time_ns: 5,
                sample_id: ID,
            };
            let bytes = check_side_band(format, 24, task, |r| {
                let task = TaskRecord { sample_id, ..r };
                if on {
                    DecodedRecord::Fork(task)
                } else {
                    DecodedRecord::Exit(task)
                }
            });
            let [pids, tids] = [1 | 2 << 32, 3 | 4 << 32];
            assert_eq!(words(&bytes)[1..4], [pids, tids, 5], "pid, ppid, tid, ptid, time");

            let throttle = ThrottleRecord {
                throttled: on,
                time_ns: 1,
                id: 2,
                stream_id: 3,
                sample_id: ID,
            };
            check_side_band(format, 24, throttle, |r| {
                let record = ThrottleRecord { sample_id, ..r };
                if on {
                    DecodedRecord::Throttle(record)
                } else {
                    DecodedRecord::Unthrottle(record)
                }
            });
            check_side_band(
                format,
                0,
                SwitchRecord {
                    out: on,
                    sample_id: ID,
                },
                |r| DecodedRecord::Switch(SwitchRecord { sample_id, ..r }),
            );
        }
        let read = ReadRecord {
            pid: 1,
            tid: 2,
            values: ReadFormatValues {
                time_enabled_ns: 4,
                time_running_ns: 5,
                entries: ReadFormatEntries::One(entry((3, 6, 7))),
            },
            sample_id: ID,
        };
        check_side_band(format, 8 + 40, read, |r| {
            DecodedRecord::Read(ReadRecord { sample_id, ..r })
        });
    }
}

#[test]
fn record_too_short_for_its_trailer_is_refused() {
    let format = RecordFormat {
        sample_type: SampleType::all(),
        sample_id_all: true,
        ..RecordFormat::default()
    };
    // A complete LOST record has a header of 8 bytes, a body of 16 bytes, and a trailer of 48
    // bytes.
    for (body, field) in [(0, "trailer"), (40, "trailer"), (48, "id"), (56, "count")] {
        let mut bytes = Vec::new();
        put_header(&mut bytes, RecordType::LOST, RecordMisc::default(), 8 + body);
        bytes.resize(8 + body, 0);
        let short = Err(DecodeError::Short { field });
        assert_eq!(decode(&bytes, format), short, "{body} bytes");
    }
    // Records of unsupported types are passed through unchanged, with or without a trailer.
    let mut bytes = Vec::new();
    put_header(&mut bytes, RecordType(10), RecordMisc::default(), 8);
    assert!(matches!(decode(&bytes, format), Ok(DecodedRecord::Other(_))));
}

#[test]
fn names_of_mappings_fall_back() {
    let long = vec![b'x'; 4096];
    let fits = &long[..4095];
    for (name, written) in [
        (&long[..], &b"//toolong"[..]),
        (fits, fits),
        (b"cut\0here", b"cut"),
    ] {
        let mmap = MmapRecord {
            name,
            ..MmapRecord::default()
        };
        let bytes = encoded(&mmap, RecordFormat::default());
        let expected = MmapRecord {
            name: written,
            ..mmap
        };
        assert_eq!(
            decode(&bytes, RecordFormat::default()),
            Ok(DecodedRecord::Mmap(expected))
        );
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
