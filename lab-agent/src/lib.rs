//! The lab host's agent, and the code that it shares with the test programs that use the agent.
//!
//! The lab host is a QEMU with a KVM that can run Linux guests. Its init starts the program
//! `lab-agent`, which runs commands and transfers files over a virtio serial port. The crate has
//! few dependencies because it is compiled a second time as a static program for the lab.

pub mod cpu_time;
pub mod heartbeat;
pub mod ordered;
pub mod terminal;
pub mod wire;
