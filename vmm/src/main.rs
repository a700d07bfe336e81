//! The `perfvisor` command.
fn main() {}
