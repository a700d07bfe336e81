//! Integration tests of the format of saved machines.

mod format;
mod memory;
