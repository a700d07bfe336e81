//! What each thread of a VM may ask of the host's kernel, by seccomp filters (seccomp(2)), and which files it
//! can open, by landlock(7); and a jail for the whole process, by namespaces(7).
//!
//! | module | story |
//! |---|---|
//! | `kind` | the kinds of threads |
//! | `lists` | which system calls each kind may make |
//! | `rules`, `filter` | conditions on arguments, and lists as programs for the kernel |
//! | `table` | the lists as data, for documentation and tests |
//! | `files` | which files can be opened |
//! | `paths` | files and sockets at paths that another user can influence |
//! | `socket_broker` | a process that connects to Unix sockets for the VM, and removes its own at its end |
//! | `cgroup` | a process joins a control group |
//! | `jail` | no network, and a file system with what was named only |
//! | `start` | how filters are taken, and who starts threads |
//! | `service` | processes that work for the VM and end with it |
//! | `perf_broker` | the process that opens perf events |
//! | `workers` | processes that may do even less, for work on bytes of a guest's making |
//! | `fault` | faults that tests ask for |
//! | `crash` | what a fault of a thread ends with |
//! | `violation` | what a thread that asks for more ends with |
//!
//! A thread inherits the filters of the one that starts it, and can only get more. So a thread of its own,
//! the starter, starts all others once the VM runs: it may do what any of them may. Start with [`begin`].

mod cgroup;
mod crash;
mod fault;
mod files;
mod filter;
mod jail;
mod kind;
mod lists;
pub mod paths;
mod perf_broker;
mod rules;
mod service;
mod socket_broker;
mod start;
mod table;
mod violation;
mod workers;

pub use cgroup::{CgroupError, join_cgroup};
pub use crash::watch_faults;
pub use fault::{fault_point, worker_fault};
pub use files::{Files, FilesError, begin_files, has_landlock, only_files};
pub use jail::{Inside, Jail, JailError, become_user, separate};
pub use kind::{Counting, ThreadKind};
pub use perf_broker::{BrokerError, PerfBroker};
pub use socket_broker::{Destination, SocketBroker};
pub use start::{Mode, SandboxError, begin, confine, enter, spawn, spawn_prepared};
pub use table::{Outcome, markdown as filter_table, outcome};
pub use violation::{LastWill, end_now, kind};
pub use workers::{BeginError, Confinement, Ended, Limits, Worker, Workers, WorkersError};
