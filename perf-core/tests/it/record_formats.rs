//! Tests of the formats of records and readings with an external reader, `linux-perf-data`. It
//! finds the event, vCPU and time of each record in a ring that events of several formats share.

use std::io::Cursor;
use std::sync::Arc;

use linux_perf_data::linux_perf_event_reader::RecordType;
use linux_perf_data::{PerfFileReader, PerfFileRecord};
use perf_core::attr::ATTR_SIZE_VER8;
use perf_core::record::DecodedRecord;
use perf_core::ring::RingReader;
use perf_core::*;

use crate::common::test_core::*;

/// Returns a perf.data file that contains the given events, their IDs, and the bytes of the records
/// in the ring.
fn perf_file(events: &[(&Attr, u64)], records: &[u8]) -> Vec<u8> {
    const HEADER: u64 = 104;
    let attr_size = u64::from(ATTR_SIZE_VER8);
    // Each attribute is followed by the position and the size of its list of IDs.
    let ids_at = HEADER + (attr_size + 16) * events.len() as u64;
    let records_at = ids_at + 8 * events.len() as u64;
    let mut file = b"PERFILE2".to_vec();
    let section = |at: u64, size: u64| [at, size];
    let words = [
        &[HEADER, attr_size][..],
        &section(HEADER, ids_at - HEADER), // attributes
        &section(records_at, records.len() as u64),
        &section(HEADER, ids_at - HEADER), // attributes with their ids
        &[0; 4],
    ]
    .concat();
    file.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
    for (i, (attr, _)) in events.iter().enumerate() {
        file.extend(attr.to_bytes());
        file.extend(
            section(ids_at + 8 * i as u64, 8)
                .iter()
                .flat_map(|w| w.to_ne_bytes()),
        );
    }
    file.extend(events.iter().flat_map(|(_, id)| id.to_ne_bytes()));
    file.extend(records);
    file
}

fn overflow(m: &TestCore, v: &VcpuEventContext, n: u64) {
    m.run(v.id().0, n);
    serve(v);
}

#[test]
fn reader_of_perf_files_finds_event_vcpu_and_time_of_every_record() {
    let m = TestCore::with(4, |c| {
        (c.sample_rate_hz, c.tick_hz, c.pid) = (20, 10, 77);
    });
    let v0 = m.vcpu(0);
    let a = Attr {
        inherit: true,
        inherit_stat: true,
        task: true,
        comm: true,
        mmap: true,
        sample_id_all: true,
        sample_type: SampleType::IP
            | SampleType::TID
            | SampleType::TIME
            | SampleType::CPU
            | SampleType::IDENTIFIER,
        read_format: ReadFormat::ID | ReadFormat::LOST,
        ..sim(5)
    };
    // A different format from that of `a`. Only IDENTIFIER is at the same position in both.
    let b = Attr {
        sample_id_all: true,
        sample_type: SampleType::all() - SampleType::READ,
        ..Attr::sampling(EventType::SIM, 2, 2000)
    };
    let event_a = m.open_vm(a.clone());
    let ring = event_a.map(1, true).unwrap();
    let event_b = m.open_vcpu(b.clone(), None);
    event_b.set_output(Some(&event_a)).unwrap();

    let v1 = m.vcpu(1);
    m.core.mmap_record(&GuestMmapEvent {
        start: 0x1000,
        len: 0x2000,
        pgoff: 0,
        name: b"/boot/vmlinux",
        kernel: true,
    });
    for _ in 0..3 {
        overflow(&m, &v1, 5);
    }
    m.core.tick();
    event_a.disable(EventOrGroup::Event).unwrap();
    overflow(&m, &v0, 1000);
    event_b.pause_output(true).unwrap();
    overflow(&m, &v0, 1000);
    event_b.pause_output(false).unwrap();
    overflow(&m, &v0, 1000);
    event_a.enable(EventOrGroup::Event).unwrap();
    m.clock.advance(1);
    m.core.remove_vcpu(VcpuId(1)).unwrap();

    let mut reader = RingReader::of(Arc::clone(&ring));
    let mut records = Vec::new();
    while let Some(record) = reader.next_record().unwrap() {
        records.extend_from_slice(record.bytes());
    }
    let file = perf_file(&[(&a, event_a.id()), (&b, event_b.id())], &records);
    let PerfFileReader {
        mut perf_file,
        mut record_iter,
    } = PerfFileReader::parse_file(Cursor::new(&file)).unwrap();
    let mut seen = Vec::new();
    while let Some(record) = record_iter.next_record(&mut perf_file).unwrap() {
        let PerfFileRecord::EventRecord { attr_index, record } = record else {
            panic!("not of ours");
        };
        let said = record.common_data().unwrap();
        assert_eq!(said.pid, Some(77), "{record:?}");
        assert_eq!(said.id, Some([&event_a, &event_b][attr_index].id()));
        let (tid, cpu) = (said.tid.unwrap(), said.cpu.unwrap());
        seen.push((record.record_type, attr_index, tid, cpu, said.timestamp.unwrap()));
    }
    // Two interrupts per tick are allowed, and the next one throttles. MMAP records belong to no
    // vCPU.
    let (r0, r1) = ((1000, 0), (1001, 1));
    let row = |ty, event, (tid, cpu), time| (ty, event, tid, cpu, time);
    assert_eq!(
        seen,
        [
            row(RecordType::FORK, 0, r1, 0),
            row(RecordType::COMM, 0, r1, 0),
            row(RecordType::MMAP, 0, (77, u32::MAX), 0),
            row(RecordType::SAMPLE, 0, r1, 5),
            row(RecordType::SAMPLE, 0, r1, 10),
            row(RecordType::THROTTLE, 0, r1, 15),
            row(RecordType::SAMPLE, 0, r1, 15),
            row(RecordType::UNTHROTTLE, 0, r1, 15),
            row(RecordType::SAMPLE, 1, r0, 1015),
            row(RecordType::LOST, 1, r0, 3015),
            row(RecordType::THROTTLE, 1, r0, 3015),
            row(RecordType::SAMPLE, 1, r0, 3015),
            row(RecordType::EXIT, 0, r1, 3016),
            row(RecordType::READ, 0, r1, 3016),
        ]
    );
}

/// Reads `event` and returns the words of the reading.
fn words(event: &EventHandle) -> Vec<u64> {
    let mut bytes = vec![0; event.read_size().unwrap()];
    assert_eq!(event.read_bytes(&mut bytes).unwrap(), bytes.len());
    let (words, _) = bytes.as_chunks();
    words.iter().map(|&w| u64::from_ne_bytes(w)).collect()
}

/// Each event of a group has its own lost count, in readings and in samples, even if the events
/// share a ring.
#[test]
fn lost_count_is_reported_per_event() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let attr = |period| {
        sim(period)
            .with_sample_type(SampleType::READ)
            .with_read_format(ReadFormat::GROUP | ReadFormat::LOST)
    };
    let leader = m.open_vcpu(attr(10), None);
    let sibling = m.open_vcpu(
        attr(20)
            .with_read_format(ReadFormat::ID | ReadFormat::LOST)
            .with_sample_type(SampleType::IP),
        Some(&leader),
    );
    assert_eq!(words(&leader), [2, 0, 0, 0, 0], "no ring: nothing can be lost");
    let ring = leader.map(1, true).unwrap();
    sibling.set_output(Some(&leader)).unwrap();
    let mut reader = RingReader::of(ring.clone());
    // The events write 48 bytes for 10 counts and 64 bytes for 20 counts, which overfills the page.
    for _ in 0..100 {
        overflow(&m, &v, 10);
    }
    let (a, b) = (leader.lost_records(), sibling.lost_records());
    assert!(a > 0 && b > 0 && a + b == ring.pending_lost(), "{a} and {b}");
    assert_eq!(words(&leader), [2, 1000, a, 1000, b]);
    assert_eq!(words(&sibling), [1000, sibling.id(), b]);
    while reader.next_record().unwrap().is_some() {}
    for event in [&leader, &sibling] {
        event.reset(EventOrGroup::Event).unwrap();
    }
    overflow(&m, &v, 10);
    let (mut lost, mut members) = (0, Vec::new());
    for_each_record(&mut reader, leader.attr(), |record| match record {
        DecodedRecord::Lost(record) if members.is_empty() => lost += record.lost,
        DecodedRecord::Sample(sample) => {
            members.extend(sample.read.entries.iter().map(|e| (e.value, e.lost)));
        }
        other => panic!("{other:?}"),
    });
    assert_eq!(lost, a + b);
    assert_eq!(members, [(10, a), (10, b)], "a reset is one of the count");
}

#[test]
fn family_lost_count_includes_children() {
    let m = TestCore::new(4);
    let (v0, v1) = (m.vcpu(0), m.vcpu(1));
    let attr = sim(10)
        .with_inherit()
        .with_sample_type(SampleType::IP)
        .with_read_format(ReadFormat::LOST);
    let event = m.open_vm(attr);
    event.map(1, true).unwrap();
    event.pause_output(true).unwrap();
    overflow(&m, &v0, 10);
    for _ in 0..2 {
        overflow(&m, &v1, 10);
    }
    assert_eq!(words(&event), [30, 3]);
    m.core.remove_vcpu(VcpuId(1)).unwrap();
    assert_eq!(words(&event), [30, 3], "also of those that have gone");
}

/// An empty ring has space for the largest LOST record followed by the largest record.
#[test]
fn largest_record_fits_after_lost_record_with_trailer() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    /// Simulated vCPU registers whose raw data has a given length.
    struct Raw(Vec<u8>);
    impl SampleRegs for Raw {
        fn mode(&mut self) -> CpuMode {
            CpuMode::GuestUser
        }
        fn ip(&mut self) -> u64 {
            0
        }
        fn raw(&mut self) -> &[u8] {
            &self.0
        }
    }
    let attr = Attr {
        sample_type: SampleType::all() - SampleType::READ - SampleType::CALLCHAIN,
        sample_id_all: true,
        ..sim(10)
    };
    let event = m.open_vcpu(attr, None);
    let ring = event.map(1, true).unwrap();
    let mut reader = RingReader::of(Arc::clone(&ring));
    // `fixed`: header, nine fields, the length of the raw data, and the empty branch stack,
    // registers and user stack. `lost`: header and two fields of a LOST record, and six trailer
    // words.
    let (fixed, lost) = (8 + 9 * 8 + 4 + 8 + 16, 24 + 48);
    let largest = 4096 - 8 - lost - fixed;
    let mut sample = |len: usize| {
        m.run(0, 10);
        v.service_overflows(&mut Raw(vec![0; len]), &mut |_| {});
        let mut sizes = Vec::new();
        while let Some(record) = reader.next_record().unwrap() {
            sizes.push(record.bytes().len());
        }
        sizes
    };
    assert_eq!(sample(largest), [largest + fixed]);
    assert_eq!(sample(largest + 8), [0; 0], "it could never fit behind a loss");
    event.pause_output(true).unwrap();
    assert_eq!(sample(8), [0; 0]);
    event.pause_output(false).unwrap();
    assert_eq!(sample(largest), [lost, largest + fixed]);
    assert_eq!(event.lost_records(), 1, "what could never be written is no loss");
}
