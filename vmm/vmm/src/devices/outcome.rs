//! Effect of a guest's device write on the machine.

/// Effect of a guest's device write on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceWriteOutcome {
    /// The guest continues to run.
    Continue,
    /// The guest has requested a reset of the machine.
    Reset,
    /// The guest has switched the machine off.
    PowerOff,
    /// The guest has ended the VM through the debug-exit port. The value is the exit status of the
    /// process.
    Exit(u8),
}
