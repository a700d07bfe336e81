//! Integration tests of the format of saved machines.

mod diff;
mod format;
mod memory;
mod stream;
