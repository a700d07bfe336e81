//! Integration tests of virtio devices: one program, with a module for each subject.

#[path = "../../../sandbox/tests/it/common/child.rs"]
mod child;
mod jailed_share;
