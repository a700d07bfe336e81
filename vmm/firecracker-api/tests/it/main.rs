//! Integration tests of the API, in one binary with a module per subject.

mod openapi;
mod server;
