//! Tests of the stream that moves a VM to another host.

use std::io::Cursor;

use proptest::prelude::*;
use snapshot::format::MAX_STATE_BYTES;
use snapshot::stream::{
    MAX_PAGES_BYTES, MigrationDestination, MigrationHello, MigrationMessageReader, MigrationStreamError,
    MigrationStreamMessage, PREAMBLE, read_preamble, send,
};

const MEMORY: u64 = 16 << 20;

fn reader(bytes: &[u8]) -> MigrationMessageReader<Cursor<&[u8]>> {
    let mut reader = MigrationMessageReader::new(Cursor::new(bytes));
    reader.set_memory_bytes(MEMORY);
    reader
}

fn sent(message: &MigrationStreamMessage<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    send(&mut bytes, message).unwrap();
    bytes
}

/// Returns a frame with a valid checksum.
fn frame(kind: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap();
    let mut bytes = [kind.to_le_bytes(), length.to_le_bytes()].concat();
    let crc = crc32fast::hash(&[&bytes, payload].concat());
    bytes.extend(crc.to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn hello() -> MigrationStreamMessage<'static> {
    MigrationStreamMessage::Hello(MigrationHello {
        name: "web".to_owned(),
        pid: 7,
        boot_id: "a".to_owned(),
        memory_bytes: MEMORY,
    })
}

#[test]
fn messages_survive_the_stream() {
    let page = [7; 4096];
    let messages = [
        hello(),
        MigrationStreamMessage::Machine(b"machine"),
        MigrationStreamMessage::Pages {
            offset: MEMORY - 4096,
            data: &page,
        },
        MigrationStreamMessage::Zeros {
            offset: 4096,
            bytes: 8192,
        },
        MigrationStreamMessage::RoundEnd,
        MigrationStreamMessage::State(b"state"),
        MigrationStreamMessage::Run { paused: true },
        MigrationStreamMessage::Run { paused: false },
        MigrationStreamMessage::Accepted,
        MigrationStreamMessage::Received,
        MigrationStreamMessage::Ready,
        MigrationStreamMessage::Running(MigrationDestination {
            name: "b".to_owned(),
            pid: 9,
        }),
        MigrationStreamMessage::Failed("no".to_owned()),
    ];
    let bytes: Vec<u8> = messages.iter().flat_map(sent).collect();
    let mut reader = reader(&bytes);
    for message in &messages {
        assert_eq!(&reader.receive().unwrap(), message);
    }
    assert!(matches!(reader.receive(), Err(MigrationStreamError::Closed)));
}

/// A hostile source can neither write outside guest memory nor make the receiver allocate more than
/// the size of a state file.
#[test]
fn impossible_frames_are_rejected() {
    let range = |offset: u64, bytes: usize| {
        let payload = [&offset.to_le_bytes()[..], &vec![1; bytes]].concat();
        matches!(
            reader(&frame(3, &payload)).receive(),
            Err(MigrationStreamError::Range { .. })
        )
    };
    assert!(!range(0, 4096));
    for (offset, bytes) in [
        (1, 4096),
        (0, 4095),
        (MEMORY, 4096),
        (MEMORY - 4096, 8192),
        (!4095, 4096),
    ] {
        assert!(range(offset, bytes), "{offset:#x} {bytes}");
    }
    let zeros = |offset: u64, bytes: u64| {
        let payload = [offset.to_le_bytes(), bytes.to_le_bytes()].concat();
        reader(&frame(4, &payload)).receive().is_ok()
    };
    assert!(zeros(0, MAX_PAGES_BYTES));
    for (offset, bytes) in [
        (0, 0),
        (0, MAX_PAGES_BYTES + 4096),
        (MEMORY, 4096),
        (4096, u64::MAX),
    ] {
        assert!(!zeros(offset, bytes), "{offset:#x} {bytes:#x}");
    }
    let too_long = [
        (1, 4097),
        (2, MAX_STATE_BYTES + 1),
        (3, (2 << 20) + 9),
        (3, 8),
        (4, 17),
        (5, 1),
        (7, 0),
        (20, 4097),
    ];
    for (kind, length) in too_long {
        // The payload is missing, so the length must be checked before the payload is read.
        let mut header = frame(kind, &[]);
        header[4..8].copy_from_slice(&u32::try_from(length).unwrap().to_le_bytes());
        let refused = reader(&header).receive().map(|_| ()).unwrap_err();
        assert!(
            matches!(refused, MigrationStreamError::Length { .. }),
            "{kind} {length} {refused}"
        );
    }
    assert!(matches!(
        reader(&frame(8, &[])).receive(),
        Err(MigrationStreamError::Kind(8))
    ));
    assert!(matches!(
        reader(&frame(1, b"{}")).receive(),
        Err(MigrationStreamError::Text(_))
    ));
    // Memory must be rejected before its size is known.
    let pages = sent(&MigrationStreamMessage::Zeros {
        offset: 0,
        bytes: 4096,
    });
    assert!(MigrationMessageReader::new(&pages[..]).receive().is_err());
    assert!(
        send(
            &mut Vec::new(),
            &MigrationStreamMessage::State(&vec![0; MAX_STATE_BYTES + 1])
        )
        .is_err()
    );
}

#[test]
fn long_reasons_are_cut() {
    let why = "ä".repeat(4096);
    let bytes = sent(&MigrationStreamMessage::Failed(why.clone()));
    let MigrationStreamMessage::Failed(received) = reader(&bytes).receive().unwrap() else {
        panic!("another message");
    };
    assert!(why.starts_with(&received) && received.len() == 4096);
}

#[test]
fn preamble_names_the_version() {
    read_preamble(&mut &PREAMBLE[..], 0).unwrap();
    read_preamble(&mut &PREAMBLE[1..], 1).unwrap();
    let other = read_preamble(&mut &b"PVMG\x02\0\0\0"[..], 0);
    assert!(matches!(other, Err(MigrationStreamError::Version(2))));
    let other = read_preamble(&mut &b"QEVM\0\0\0\x03"[..], 0);
    assert!(matches!(other, Err(MigrationStreamError::Preamble)));
    let short = read_preamble(&mut &b"PVM"[..], 0);
    assert!(matches!(short, Err(MigrationStreamError::Closed)));
}

proptest! {
    /// A frame with one flipped bit is never accepted as the same or another message.
    #[test]
    fn damage_is_detected(at in 0usize..4116 * 8) {
        let page = [7; 4096];
        let mut bytes = sent(&MigrationStreamMessage::Pages { offset: 8192, data: &page });
        prop_assert_eq!(bytes.len() * 8, 4116 * 8);
        bytes[at / 8] ^= 1 << (at % 8);
        prop_assert!(reader(&bytes).receive().is_err());
    }

    /// A truncated stream yields the messages before the cut, and then an error.
    #[test]
    fn cut_is_detected(keep in 0usize..5000) {
        let page = [7; 4096];
        let first = sent(&hello());
        let mut bytes = first.clone();
        bytes.extend(sent(&MigrationStreamMessage::Pages { offset: 8192, data: &page }));
        let keep = keep.min(bytes.len());
        let mut reader = reader(&bytes[..keep]);
        prop_assert_eq!(reader.receive().is_ok(), keep >= first.len());
        if keep >= first.len() {
            prop_assert_eq!(reader.receive().is_ok(), keep == bytes.len());
        }
    }

    /// The reader does not panic on arbitrary frames, and accepts only ranges within guest memory.
    #[test]
    fn arbitrary_frames_do_not_panic(kind in 0u32..24, payload in prop::collection::vec(any::<u8>(), 0..9000)) {
        match reader(&frame(kind, &payload)).receive() {
            Ok(MigrationStreamMessage::Pages { offset, data }) => prop_assert!(offset + data.len() as u64 <= MEMORY),
            Ok(MigrationStreamMessage::Zeros { offset, bytes }) => prop_assert!(offset + bytes <= MEMORY),
            _ => {}
        }
    }
}
