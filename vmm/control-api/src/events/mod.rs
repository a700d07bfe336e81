//! Events as operators write and read them: perf's event lists, their names, and perf stat's number formats.

pub mod format;
pub mod list;
pub mod names;
