//! Tests that writing and reading a ring do not allocate memory.

use std::sync::Arc;

use perf_core::attr::{ReadFormat, SampleType, WakeupCondition};
use perf_core::record::{
    CommRecord, EncodeRecord, LostRecord, MmapRecord, ReadFormatEntries, ReadFormatEntry, ReadFormatValues,
    RecordFormat, RecordMisc,
};
use perf_core::record::{DecodedRecord, Sample, SampleId, SampleWords};
use perf_core::ring::{ControlPageCounter, Ring, RingFullPolicy, RingReader};

use crate::allocations;

#[test]
fn no_allocation_on_write_loss_wakeup_and_read() {
    for mode in [RingFullPolicy::Writable, RingFullPolicy::Overwrite] {
        let ring = Arc::new(Ring::new(4, mode).expect("a ring"));
        ring.set_wakeup(WakeupCondition::Events(2));
        let mut own = RingReader::of(Arc::clone(&ring));
        let entry = |value, id| ReadFormatEntry { value, id, lost: 0 };
        let entries = [entry(1, 2), entry(3, 4)];
        let format = RecordFormat {
            sample_type: SampleType::all(),
            read_format: ReadFormat::all(),
            sample_id_all: true,
        };
        let sample = Sample {
            read: ReadFormatValues {
                time_enabled_ns: 5,
                time_running_ns: 4,
                entries: ReadFormatEntries::List(&entries),
            },
            callchain: SampleWords::List(&[1, 2, 3]),
            raw: b"payload",
            ..Sample::default()
        };
        let (mut written, mut refused, mut read, mut sum) = (0, 0, 0, 0u64);
        let count = allocations(|| {
            for round in 0..200 {
                for _ in 0..3 {
                    match sample.write(format, &ring) {
                        Ok(()) => written += 1,
                        Err(_) => refused += 1,
                    }
                }
                let _ = CommRecord {
                    pid: 1,
                    tid: 2,
                    name: b"vcpu0",
                    sample_id: SampleId::default(),
                }
                .write(format, &ring);
                let lost = |lost| LostRecord {
                    id: 1,
                    lost,
                    sample_id: SampleId::default(),
                };
                let _ = lost(2).write(format, &ring);
                let several = (0..3).map(lost);
                let _ = LostRecord::write_all(several, format, &ring);
                let map = MmapRecord {
                    misc: RecordMisc(4),
                    len: 1,
                    name: b"//anon",
                    ..MmapRecord::default()
                };
                let _ = map.write(format, &ring);
                ring.control()
                    .update(ControlPageCounter {
                        offset: round,
                        ..ControlPageCounter::default()
                    })
                    .expect("the only updater");
                let _ = ring.take_poll();
                // Does not read in about half of the rounds, because a full ring must not cause
                // allocations either.
                if round % 100 > 50 {
                    continue;
                }
                loop {
                    match own.next_record() {
                        Ok(Some(raw)) => {
                            if let Ok(DecodedRecord::Sample(sample)) = DecodedRecord::decode(raw, format) {
                                sum += sample.callchain.iter().sum::<u64>();
                                sum += sample.read.entries.iter().map(|entry| entry.value).sum::<u64>();
                                read += 1;
                            }
                        }
                        Ok(None) => break,
                        Err(error) => assert_eq!(mode, RingFullPolicy::Overwrite, "{error}"),
                    }
                }
            }
        });
        assert_eq!(count, 0, "{mode:?}");
        assert!(read > 0 && sum == read * 10 && written > 0);
        // Checks that the writable ring was full for some of the time.
        assert_eq!(refused > 0, mode == RingFullPolicy::Writable);
    }
}
