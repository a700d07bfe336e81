//! Integration tests of the API: one binary with a module per subject.

mod openapi;
mod server;
