//! What a hostile back end of vhost-user answers to the greeting of a shared directory: it is refused, or it
//! offers all that every driver may ask for.
//!
//! Input: what the back end says, to its end.
#![no_main]

use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use libfuzzer_sys::fuzz_target;
use virtio_devices::share::backend::greet;

/// VERSION_1, EVENT_IDX, INDIRECT_DESC.
const NEEDED: u64 = 1 << 32 | 1 << 29 | 1 << 28;
/// More than both answers; a socket takes as much without a reader.
const MOST_BYTES: usize = 4096;

fuzz_target!(|data: &[u8]| {
    let (ours, mut theirs) = UnixStream::pair().expect("a pair");
    theirs.write_all(&data[..data.len().min(MOST_BYTES)]).expect("it fits");
    // No answer is waited for that will not come.
    theirs.shutdown(Shutdown::Write).expect("it is connected");
    if let Ok(features) = greet(ours) {
        assert_eq!(features & NEEDED, NEEDED);
    }
});
