//! Fuzzes the reader of the migration stream of a VM. The reader must not panic, its memory use
//! must be bounded, and the ranges that it accepts must be guest memory. An accepted message must
//! survive a round trip.
//!
//! Input: frames without checksums, which the target adds. Each frame has one byte for the type,
//! two bytes for the length, and the payload. An input that begins with `PVMG` is used unmodified
//! as the stream.
#![no_main]

use libfuzzer_sys::fuzz_target;
use snapshot::stream::{MigrationStreamMessage, MigrationMessageReader, read_preamble, send};

const MEMORY: u64 = 32 << 20;

fn framed(mut data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let [kind, low, high, rest @ ..] = data {
        let length = usize::from(u16::from_le_bytes([*low, *high])).min(rest.len());
        let (payload, next) = rest.split_at(length);
        let header = [u32::from(*kind).to_le_bytes(), (length as u32).to_le_bytes()].concat();
        let mut crc = crc32fast::Hasher::new();
        crc.update(&header);
        crc.update(payload);
        bytes.extend(header);
        bytes.extend(crc.finalize().to_le_bytes());
        bytes.extend(payload);
        data = next;
    }
    bytes
}

fuzz_target!(|data: &[u8]| {
    let mut raw = data;
    let bytes = if read_preamble(&mut raw, 0).is_ok() {
        raw.to_vec()
    } else {
        framed(data)
    };
    let mut reader = MigrationMessageReader::new(&bytes[..]);
    reader.set_memory_bytes(MEMORY);
    while let Ok(message) = reader.receive() {
        match &message {
            MigrationStreamMessage::Pages { offset, data } => assert!(offset + data.len() as u64 <= MEMORY),
            MigrationStreamMessage::Zeros { offset, bytes } => assert!(offset + bytes <= MEMORY),
            MigrationStreamMessage::Machine(state) | MigrationStreamMessage::State(state) => {
                let _ = snapshot::decode(state);
            }
            // Decoding replaces invalid UTF-8, which may make the text longer than a message
            // permits.
            MigrationStreamMessage::Failed(_) => continue,
            _ => {}
        }
        let mut again = Vec::new();
        send(&mut again, &message).expect("it fits");
        let mut reader = MigrationMessageReader::new(&again[..]);
        reader.set_memory_bytes(MEMORY);
        assert_eq!(reader.receive().expect("it is valid"), message);
    }
});
