//! Exit statuses of the commands.

/// The exit status of a command.
///
/// Exit statuses of the guest, which it writes to the debug-exit port, are odd. Exit statuses of
/// Perfvisor are even.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// The guest powered off, or the operator terminated the VM with Ctrl-A x.
    PoweredOff,
    /// The guest wrote a value to the debug-exit port. The exit status is `(value << 1) | 1`.
    Guest(u8),
    /// The command in the guest exited with this status (`perfvisor exec`).
    Command(u8),
    /// `perfvisor validate` found a deviation, `record` lost samples, or `cp` skipped a file.
    CheckFailed,
    /// An option is invalid, a file is unusable, or the host is unsuitable.
    BadInput,
    /// The guest requested a reset.
    Reset,
    /// A vCPU was shut down, for example by a triple fault.
    TripleFault,
    /// An internal error of Perfvisor or KVM occurred.
    Internal,
    /// Perfvisor received SIGTERM or SIGINT.
    Terminated,
}

impl ExitStatus {
    /// Returns the numeric exit status.
    pub fn code(self) -> u8 {
        match self {
            ExitStatus::PoweredOff => 0,
            ExitStatus::Guest(status) | ExitStatus::Command(status) => status,
            ExitStatus::CheckFailed => 1,
            ExitStatus::BadInput => 2,
            ExitStatus::Reset => 4,
            ExitStatus::TripleFault => 6,
            ExitStatus::Internal => 8,
            ExitStatus::Terminated => 10,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_exit_statuses_differ_from_guest_statuses() {
        for status in [
            ExitStatus::PoweredOff,
            ExitStatus::BadInput,
            ExitStatus::Reset,
            ExitStatus::TripleFault,
            ExitStatus::Internal,
            ExitStatus::Terminated,
        ] {
            assert_eq!(status.code() % 2, 0);
        }
        assert_eq!(ExitStatus::Guest(33).code(), 33);
    }
}
