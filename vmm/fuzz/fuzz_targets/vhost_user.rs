//! Fuzzes the handshake with a hostile vhost-user backend of a shared directory. The backend must
//! either be rejected or offer all required features.
//!
//! Input: all bytes that the backend sends.
#![no_main]

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use libfuzzer_sys::fuzz_target;
use virtio_devices::share::backend::negotiate;

/// Virtio features that the backend must offer: VERSION_1, EVENT_IDX and INDIRECT_DESC.
const NEEDED: u64 = 1 << 32 | 1 << 29 | 1 << 28;
/// Maximum input length. It exceeds the length of the two responses that the handshake expects, and
/// fits into a socket buffer.
const MOST_BYTES: usize = 4096;

fuzz_target!(|data: &[u8]| {
    let (ours, mut theirs) = UnixStream::pair().expect("a pair");
    theirs.write_all(&data[..data.len().min(MOST_BYTES)]).expect("it fits");
    // Shut down the writing side, so that the handshake does not wait for answers that the input
    // lacks.
    theirs.shutdown(Shutdown::Write).expect("it is connected");
    if let Ok(features) = negotiate(ours) {
        assert_eq!(features & NEEDED, NEEDED);
    }
});
