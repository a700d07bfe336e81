//! Results of device accesses for the machine.

/// Effect of a device write on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BusOutcome {
    /// The guest continues.
    Continue,
    /// The guest requested a reset.
    Reset,
    /// The guest powered off.
    PowerOff,
    /// The guest ended the VM through the debug-exit port, with the exit status of the process.
    Exit(u8),
}
