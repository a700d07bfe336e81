//! Integration tests of the control protocol and its client: one program, with a module for each subject.

mod hostile_vm;
mod protocol_1;
mod schema;
