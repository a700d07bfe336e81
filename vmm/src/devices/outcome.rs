//! What devices tell the machine.

/// What a write to a device means for the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusOutcome {
    /// Go on.
    Continue,
    /// The guest asked for a reset.
    Reset,
    /// The guest powered off.
    PowerOff,
    /// The guest ended the VM through the debug-exit port; the exit status of the process.
    Exit(u8),
}
