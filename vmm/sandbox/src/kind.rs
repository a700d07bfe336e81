//! The kinds of threads that a VM's process has.

use std::fmt;

/// What a thread is there for, and so what it may ask of the host's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThreadKind {
    /// The main loop and the servers of operators' connections.
    Main,
    /// Runs a vCPU.
    Vcpu,
    /// Serves a device's queues: disks, network, entropy.
    Device,
    /// Serves a device that connects to Unix sockets: shared directories, vsock.
    Socket,
    /// Reads the guest's kernel out of its memory for profiles.
    Profiler,
    /// Speaks to gdb.
    Debugger,
    /// Writes the guest's output.
    Console,
    /// Waits for the signals that end the VM.
    Signals,
    /// Starts the threads of the other kinds.
    Starter,
}

/// The opener of a VM's perf events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Counting {
    /// The broker, which has the capability that it takes. No thread of the VM's may.
    #[default]
    Broker,
    /// Each thread on itself, where the user may do so without a capability: the kernel lets no other process
    /// of the user open events on a process that is not dumpable.
    OwnThread,
}

impl ThreadKind {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::Main,
        Self::Vcpu,
        Self::Device,
        Self::Socket,
        Self::Profiler,
        Self::Debugger,
        Self::Console,
        Self::Signals,
        Self::Starter,
    ];

    /// As messages have it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Vcpu => "vcpu",
            Self::Device => "device",
            Self::Socket => "socket",
            Self::Profiler => "profiler",
            Self::Debugger => "debugger",
            Self::Console => "console",
            Self::Signals => "signals",
            Self::Starter => "starter",
        }
    }
}

impl fmt::Display for ThreadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
