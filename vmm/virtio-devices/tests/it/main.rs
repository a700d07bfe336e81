//! Integration tests of virtio devices: one program, with a module for each subject.

mod jailed_share;
mod snapshots;
