//! What tests of the program share.
#![allow(dead_code, missing_docs)]

pub mod vm;
