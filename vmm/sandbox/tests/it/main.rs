//! Integration tests of the sandbox, in one program with a module for each subject.
//!
//! Landlock rules and namespaces are applied to a thread of the test. Seccomp filters and workers
//! require a separate process, so their tests run this test program again as a child process
//! ([`test_support::child`]).

mod common;
mod files;
mod jail;
mod paths;
mod perf_broker;
mod pid_namespace;
mod socket_broker;
mod threads;
mod workers;
