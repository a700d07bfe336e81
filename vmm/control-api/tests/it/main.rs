//! Integration tests of the control protocol and its client, one module per subject.

mod hostile_vm;
mod protocol_1;
mod schema;
