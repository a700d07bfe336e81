//! Sandbox of a VM process: seccomp(2) filters for each thread, restriction of file access with
//! landlock(7), and a jail for the whole process with namespaces(7).
//!
//! | module | contents |
//! |---|---|
//! | `kind` | thread kinds |
//! | `lists` | system call allow-lists of each thread kind |
//! | `rules`, `filter` | conditions on arguments, and compilation of lists to seccomp programs |
//! | `table` | the lists as data, for documentation and tests |
//! | `files` | restriction of file access |
//! | `privileges` | capabilities, core dumps and limits of the process |
//! | `paths` | files and sockets at paths that another user can influence |
//! | `socket_broker` | a process that connects to and removes Unix sockets for the VM |
//! | `cgroup` | joining a control group |
//! | `chroot_jail` | a process in a directory with its own devices, laid out as by Firecracker's jailer |
//! | `jail` | a process without network, whose file system contains only the given paths |
//! | `namespaces` | creation of namespaces |
//! | `pid_namespace` | a process that cannot see other processes, and its supervisor outside |
//! | `start` | application of filters, and the starter thread |
//! | `service` | service processes that exit with the VM |
//! | `perf_broker` | the process that opens perf events |
//! | `front_end` | the process that serves Firecracker's API |
//! | `workers` | more restricted processes for guest-controlled data |
//! | `fault` | fault injection for tests |
//! | `crash` | handling of fault signals |
//! | `violation` | handling of seccomp violations |
//!
//! A thread inherits the filters of its creator and can only add further ones. The starter thread
//! therefore creates all other threads of a running VM, and its allow-list is the union of theirs.
//! Start with [`begin`].

mod cgroup;
pub mod chroot_jail;
mod crash;
mod fault;
mod files;
mod filter;
mod front_end;
mod jail;
mod kind;
mod lists;
mod namespaces;
pub mod paths;
mod perf_broker;
mod pid_namespace;
pub mod privileges;
mod rules;
mod service;
mod socket_broker;
mod start;
mod table;
mod violation;
mod workers;

pub use cgroup::{CgroupError, create_cgroup, join_cgroup};
pub use crash::watch_faults;
pub use fault::{fault_point, worker_fault};
pub use files::{AccessibleFiles, FileAccessError, begin_files, has_landlock, only_files};
pub use front_end::{ApiProcessConfinementError, confine_front_end};
pub use jail::{Jail, JailContents, JailError, become_user, separate};
pub use kind::{PerfEventAccess, SandboxedThreadKind};
pub use perf_broker::{PerfBroker, PerfBrokerError};
pub use pid_namespace::{
    PidNamespaceError, PidNamespaceSupervisor, SupervisorLink, host_pid, host_tid, is_forwarded, starter_pid,
};
pub use socket_broker::{SocketBroker, SocketDestination};
pub use start::{SandboxError, SeccompMode, begin, confine, enter, spawn, spawn_prepared};
pub use table::{SystemCallOutcome, markdown as filter_table, outcome};
pub use violation::{SeccompTerminationActions, end_now, kind};
pub use workers::{
    HelperProcessStartError, ProcessConfinement, WorkerExit, WorkerKeeper, WorkerLimits, WorkerProcess,
    WorkerStartError,
};
