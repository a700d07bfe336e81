//! Thread kinds of a VM process.

use std::fmt;

/// Purpose of a thread, which determines its permitted system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SandboxedThreadKind {
    /// Thread of the main loop, and threads that serve connections of operators.
    Main,
    /// vCPU thread.
    Vcpu,
    /// Thread for a device's queues: disks, network, entropy.
    Device,
    /// Thread for a device that connects to Unix sockets: shared directories, vsock.
    Socket,
    /// Thread for the balloon, which returns guest memory to the host.
    Balloon,
    /// Thread of the profiler, which obtains symbols from the kernel memory of the guest.
    Profiler,
    /// Thread of the gdb server.
    Debugger,
    /// Thread that writes the guest's console output.
    Console,
    /// Thread that handles the signals that terminate the VM.
    Signals,
    /// Thread that creates the threads of other kinds.
    Starter,
}

/// The process or thread that opens a VM's perf events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PerfEventAccess {
    /// A separate process, the broker, which has the required capability. Threads of the VM cannot
    /// open events.
    #[default]
    Broker,
    /// Each thread opens events on itself, for which the VM's user needs no capability. A separate
    /// process of the same user could not open them, because the VM's process is not dumpable.
    OwnThread,
}

impl SandboxedThreadKind {
    /// All thread kinds.
    pub const ALL: [Self; 10] = [
        Self::Main,
        Self::Vcpu,
        Self::Device,
        Self::Socket,
        Self::Balloon,
        Self::Profiler,
        Self::Debugger,
        Self::Console,
        Self::Signals,
        Self::Starter,
    ];

    /// Returns the name of this thread kind for messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Vcpu => "vcpu",
            Self::Device => "device",
            Self::Socket => "socket",
            Self::Balloon => "balloon",
            Self::Profiler => "profiler",
            Self::Debugger => "debugger",
            Self::Console => "console",
            Self::Signals => "signals",
            Self::Starter => "starter",
        }
    }
}

impl fmt::Display for SandboxedThreadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
