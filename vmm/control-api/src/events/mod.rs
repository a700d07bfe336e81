//! Events as operators write and read them: perf's event lists, and perf stat's number formats.

pub mod format;
pub mod list;
