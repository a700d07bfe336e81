//! Event lists in perf's syntax, event names, and perf stat's number formats.

pub mod format;
pub mod list;
pub mod names;
