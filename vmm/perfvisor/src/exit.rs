//! How a command ends: its exit status.

/// How `perfvisor run` ended, as its exit status. The guest's own statuses, written to the
/// debug-exit port, are odd; all of ours are even.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitStatus {
    /// The guest powered off, or the operator ended it with Ctrl-A x.
    PoweredOff,
    /// The guest wrote to the debug-exit port: (value << 1) | 1.
    Guest(u8),
    /// What a command in the guest ended with (`perfvisor exec`).
    Command(u8),
    /// `perfvisor validate` found something wrong, `record` could not write all samples, or `cp` left
    /// something out.
    CheckFailed,
    /// Bad input: an option, a file, the host.
    BadInput,
    /// The guest asked for a reset.
    Reset,
    /// A triple fault or another shutdown of a vCPU.
    TripleFault,
    /// Perfvisor or KVM failed.
    Internal,
    /// Ended by SIGTERM or SIGINT.
    Terminated,
}

impl ExitStatus {
    /// The number.
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
    fn our_exit_statuses_cannot_be_taken_for_the_guest_s() {
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
