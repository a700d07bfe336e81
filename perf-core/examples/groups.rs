//! Demonstrates groups and rings: a group is read in the format of `read(2)`, two events share an
//! output, a ring is paused while it is read, records are lost during the pause, and a poll reports
//! a hang-up.
//!
//! `cargo run -p perf-core --example groups`

mod shared;

use std::sync::Arc;

use perf_core::attr::WakeupCondition;
use perf_core::pmu::host::HostPmu;
use perf_core::record::{DecodedRecord, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::*;
use shared::*;

/// Runs the example.
///
/// # Errors
/// Returns the error of any event, ring or setting.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Overflows are polled below, so the overflow signal may be one that is ignored by default.
    let core = PerfCore::builder()
        .driver(Arc::new(HostPmu::software(Some(libc::SIGURG))))
        .build()?;
    let thread = core.add_thread(0)?;
    thread.sched_in();
    let session = core.session(0, SessionRole::Admin);
    let open = |attr, group: Option<&EventHandle>, flags| {
        core.open(&session, attr, EventOpenTarget::Vcpu(thread.id()), group, flags)
    };

    // All members are read at the same time, each with its ID and lost count.
    let leader = Attr {
        read_format: ReadFormat::GROUP
            | ReadFormat::ID
            | ReadFormat::LOST
            | ReadFormat::TOTAL_TIME_ENABLED
            | ReadFormat::TOTAL_TIME_RUNNING,
        ..software(TASK_CLOCK)
    };
    let clock = open(leader, None, OpenFlags::default())?;
    let faults = open(software(PAGE_FAULTS), Some(&clock), OpenFlags::default())?;
    touch(100);
    // The handle of any member disables the whole group.
    faults.disable(EventOrGroup::Group)?;
    let group = clock.read_group()?;
    println!("{} ns with {} page faults", group[0].value, group[1].value);
    assert!(group[1].value >= 100);
    let mut bytes = [0; 256];
    let n = clock.read_bytes(&mut bytes)?;
    let words: Vec<u64> = bytes[..n]
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes")))
        .collect();
    println!("as read(2) says it: {words:?}");
    // A group read returns the number of members, the time enabled, the time running, and the
    // count, ID and lost count of each member.
    let expected = [group[0], group[1]].map(|r| [r.value, r.id, 0]).concat();
    assert_eq!((words[0], &words[3..]), (2, &expected[..]));
    clock.reset(EventOrGroup::Group)?;
    let nothing = clock.read_group()?.iter().all(|reading| reading.value == 0);
    assert!(nothing, "and nothing counts now");
    drop((clock, faults));

    // Every 10th and every 25th fault is recorded in the same ring, which overwrites old records.
    let attr = |period| Attr {
        sample_type: SampleType::IDENTIFIER | SampleType::PERIOD,
        wakeup: WakeupCondition::Events(1),
        ..Attr::sampling(EventType::SOFTWARE, PAGE_FAULTS, period)
    };
    let tenth = open(attr(10), None, OpenFlags::default())?;
    let ring = tenth.map(1, false)?;
    let to_tenth = OpenFlags {
        no_group: true,
        output: true,
        ..OpenFlags::default()
    };
    let twenty_fifth = open(attr(25), Some(&tenth), to_tenth)?;
    let serve = || thread.service_overflows(&mut UserModeRegs, &mut |_| {});
    let work = |faults| {
        for _ in 0..faults / 5 {
            touch(5);
            serve();
        }
    };
    work(100);
    assert!(tenth.poll().contains(PollState::IN), "there is something to read");
    // A paused ring is not overwritten while it is read.
    tenth.pause_output(true)?;
    work(50);
    tenth.pause_output(false)?;
    println!(
        "lost while the ring was paused: {} and {}",
        tenth.lost_records(),
        twenty_fifth.lost_records()
    );
    assert!(tenth.lost_records() >= 4 && twenty_fifth.lost_records() >= 1);

    // The event disables itself after two more overflows.
    tenth.refresh(2)?;
    work(100);
    assert_eq!(tenth.state(), EventState::Off);
    assert!(tenth.poll().contains(PollState::HUP), "its limit is reached");
    let mut reader = RingReader::of(ring);
    let format = RecordFormat::from(tenth.attr());
    let (mut of_tenth, mut of_other, mut lost) = (0, 0, 0);
    while let Some(raw) = reader.next_record()? {
        match DecodedRecord::decode(raw, format)? {
            DecodedRecord::Sample(sample) if sample.id == tenth.id() => of_tenth += 1,
            DecodedRecord::Sample(_) => of_other += 1,
            DecodedRecord::Lost(record) => lost += record.lost,
            _ => {}
        }
    }
    println!("in the ring: {of_tenth} and {of_other} samples, and that {lost} were lost");
    assert_eq!(lost, tenth.lost_records() + twenty_fifth.lost_records());
    Ok(())
}
