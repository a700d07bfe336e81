//! Fuzzes the frames that a hostile guest's agent sends to `perfvisor cp`: tree entries and file
//! contents. No file may be created outside the target directory.
//!
//! Input: frames as received from the connection.
#![no_main]

use std::fs;

use guest_agent::receive::{FileTreeCopyProgress, FileTreeReceiver};
use guest_agent::wire::{MAX_PAYLOAD, read_frame};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let outside = std::env::temp_dir().join(format!("perfvisor-fuzz-copies-{}", std::process::id()));
    let named = outside.join("named");
    fs::create_dir_all(&named).expect("a directory in the temporary directory");
    fs::write(outside.join("mine"), b"as it was").expect("a file there");
    let mut receiver = FileTreeReceiver::new(&named, Some("copy")).expect("a directory");
    let mut coming = data;
    while let Ok(Some(frame)) = read_frame(&mut coming) {
        assert!(frame.payload.len() <= MAX_PAYLOAD);
        let _ = (frame.number(), frame.text());
        match receiver.take(&frame) {
            Ok(FileTreeCopyProgress::More | FileTreeCopyProgress::Skipped(_)) => {}
            Ok(FileTreeCopyProgress::Done) | Err(_) => break,
        }
    }
    drop(receiver);
    assert_eq!(fs::read(outside.join("mine")).expect("it is there"), b"as it was");
    assert_eq!(fs::read_dir(&outside).expect("it is there").count(), 2);
    for made in fs::read_dir(&named).expect("it is there") {
        assert_eq!(made.expect("an entry").file_name(), "copy");
    }
    fs::remove_dir_all(&outside).expect("all of it is ours");
});
