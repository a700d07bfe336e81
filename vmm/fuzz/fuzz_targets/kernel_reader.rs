//! Fuzzes the messages that a compromised kernel reader sends to the VM. The kernel reader is the
//! unprivileged process that searches guest memory for the kernel. Its messages are requests for
//! memory ranges, symbols, unwind tables, and a summary.
//!
//! Input: one byte. If this byte is odd, the rest is the raw message stream. Otherwise, the rest is
//! a sequence of messages, each with one byte (type), two bytes (length), and the payload.
#![no_main]

use std::io::{self, Read, Write};
use std::time::{Duration, Instant};

use guest_profile::GuestRegs;
use guest_profile::locate::KernelAnchorRegisters;
use guest_profile::search::search_kernel;
use libfuzzer_sys::fuzz_target;

/// Types of the messages in the input, including an invalid one.
const LETTERS: &[u8] = b"RSOEFX?";
/// Size of the guest memory that the reader may request, in bytes.
const MEMORY: usize = 64 << 10;

struct Reader<'a> {
    says: &'a [u8],
    heard: usize,
}

impl Read for Reader<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.says.read(to)
    }
}

impl Write for Reader<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.heard += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn framed(mut pieces: &[u8]) -> Vec<u8> {
    let mut says = Vec::new();
    while let Some(([letter, a, b], rest)) = pieces.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes([*a, *b])).min(rest.len());
        says.push(LETTERS[usize::from(*letter) % LETTERS.len()]);
        says.extend((length as u32).to_le_bytes());
        says.extend(&rest[..length]);
        pieces = &rest[length..];
    }
    says
}

fuzz_target!(|data: &[u8]| {
    let Some((how, data)) = data.split_first() else {
        return;
    };
    let says = if how & 1 != 0 { data.to_vec() } else { framed(data) };
    let mut reader = Reader { says: &says, heard: 0 };
    let memory = vec![0x5A; MEMORY];
    let until = Instant::now() + Duration::from_secs(60);
    let regs = GuestRegs::default();
    match search_kernel(&mut reader, memory.as_slice(), &regs, &KernelAnchorRegisters::default(), until) {
        Ok(kernel) => {
            let text = kernel.symbols.unpack();
            assert!(text.len() <= says.len());
            let _ = kernel.unwind();
            assert!(!kernel.describe().contains('\n'));
        }
        Err(e) => assert!(!e.to_string().contains('\n'), "{e}"),
    }
    // The reader receives at most one range of guest memory for each request of 17 bytes, and a
    // short initial request.
    assert!(reader.heard <= (says.len() / 17 + 1) * (MEMORY + 5) + 4096);
});
