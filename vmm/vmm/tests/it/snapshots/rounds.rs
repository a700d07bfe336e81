//! Tests of moving a VM whose memory is copied in rounds while the guest runs.

use vmm::memory::GuestRam;
use vmm::vm::migrate::OutgoingMigration;

use super::*;

/// Number of times that the test moves the VM.
const MOVES: usize = 8;

/// Copies the memory that the guest has written since the preceding round into `ram`.
fn copy_round(migration: &mut OutgoingMigration, ram: &GuestRam, is_paused: bool) {
    let mut offset = 0;
    while offset < migration.memory_bytes() {
        let piece = migration.read_memory(offset, is_paused).unwrap();
        let mut data = &piece.data[..];
        for (start, bytes) in piece.pages {
            let (pages, rest) = data.split_at(usize::try_from(bytes).unwrap());
            ram.write_at(start, pages).unwrap();
            data = rest;
        }
        for (start, bytes) in piece.zeros {
            ram.write_at(start, &vec![0; usize::try_from(bytes).unwrap()])
                .unwrap();
        }
        offset = piece.next;
    }
}

/// Moves the VM when the guest has written `length` bytes. Returns the machine with the number of
/// bytes written by the time of the move, or `None` if the guest has ended before.
fn migrate_in_rounds(source: &TestVm, length: usize) -> Option<(RestoredMachine, usize)> {
    let mut migration = OutgoingMigration::begin(source.vm.snapshots(), Default::default()).unwrap();
    let ram = GuestRam::new(migration.memory_bytes()).unwrap();
    while source.output.len() < length && source.vm.control().reason().is_none() {
        copy_round(&mut migration, &ram, false);
    }
    let mut snapshot = match VmSnapshot::begin(source.vm.snapshots(), Default::default()) {
        Ok(snapshot) => snapshot,
        Err(SnapshotError::Ended) => return None,
        Err(e) => panic!("{}", error_line(&e)),
    };
    loop {
        match snapshot.advance() {
            Ok(true) => break,
            Ok(false) => std::thread::sleep(Duration::from_micros(50)),
            Err(SnapshotError::Ended) => return None,
            Err(e) => panic!("{}", error_line(&e)),
        }
    }
    copy_round(&mut migration, &ram, true);
    let state = snapshot.state_without_memory(&migration).unwrap();
    snapshot.commit().unwrap();
    let machine = RestoredMachine {
        state: Box::new(snapshot::decode(&state).unwrap()),
        memory: RestoredMemory::Moved(ram),
        accepts_losses: false,
    };
    let cut = source.output.len();
    drop((snapshot, migration));
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(source.output.len(), cut, "a VM that has moved does not go on");
    Some((machine, cut))
}

/// A move in rounds neither loses nor repeats an instruction, a count or a PMI.
#[test]
fn output_and_counts_are_equal_after_a_move_in_rounds() {
    let config = config(GUEST);
    let Some(vm) = TestVm::start(&config, None) else {
        return;
    };
    let expected = vm.finish();
    let mut moves = 0;
    for part in 0.. {
        let length = expected.len() * (part % MOVES) / MOVES;
        let source = TestVm::start(&config, None).unwrap();
        let Some((machine, cut)) = migrate_in_rounds(&source, length) else {
            continue;
        };
        drop(source);
        let rest = TestVm::start(&config, Some(machine)).unwrap().finish();
        let joined = [&expected[..cut], &rest].concat();
        assert!(joined == expected, "moved at {cut}");
        moves += 1;
        if moves == MOVES {
            break;
        }
    }
}
