//! Integration tests of virtio devices, in one program with a module for each subject.

mod filtered_balloon;
mod jailed_share;
mod snapshots;
