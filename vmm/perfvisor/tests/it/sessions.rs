//! Sessions of the library `operator` with a running VM.

use std::io::Cursor;

use guest_profile::export::symbolize::{Symbolizer, complete_chains};
use guest_profile::export::{EventSamplingRate, folded, perfdata, pprof, reader};
use operator::session::{CountingSession, SamplingSession, connect_at};

use crate::common::operator::TestVm;
use crate::common::vm::eventually;

/// The counts of a counting session are in the order of the event list, and grow while the guest
/// runs.
#[test]
fn counting_session_reads_growing_counts() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let client = connect_at(&vm.sockets().join("test.sock")).unwrap();
    let mut session = CountingSession::start(client, "task-clock,kvm:exits").unwrap();
    let first = session.read().unwrap();
    let names: Vec<&str> = first.iter().map(|count| count.event.as_str()).collect();
    assert_eq!(names, ["task-clock", "kvm:exits"]);
    eventually("the count grows", || {
        session.read().unwrap()[0].value > first[0].value
    });
}

/// The profile of a session has symbolized call chains in every output format.
#[test]
fn sampling_session_profile_is_written_in_all_formats() {
    let Some(vm) = TestVm::spinning(2) else { return };
    let client = connect_at(&vm.sockets().join("test.sock")).unwrap();
    let mut session = SamplingSession::start(client, "cycles", EventSamplingRate::FrequencyHz(1000)).unwrap();
    eventually("two hundred samples", || {
        session.receive().unwrap();
        session.profile().len() >= 200
    });
    let profile = session.finish().unwrap();
    let mut symbols = Symbolizer::new(&profile, None, None);
    let stacks = folded::stacks(&complete_chains(&profile, &mut symbols), &mut symbols, None);
    assert!(
        stacks.keys().any(|stack| stack.contains("spin_chunk;spin_hot")),
        "{stacks:?}"
    );
    let mut packed = Vec::new();
    pprof::write(&profile, &mut symbols, &pprof::SampleLabel::ALL, &mut packed).unwrap();
    assert!(packed.starts_with(&[0x1f, 0x8b]));
    let file = perfdata::write(Cursor::new(Vec::new()), &profile).unwrap();
    let read = reader::read(&file.into_inner()).unwrap();
    assert_eq!(read.len(), profile.len());
    assert!(read.symbols.iter().any(|symbol| symbol.name == "spin_hot"));
}
