//! Errors of API calls.

use crate::types::FaultBody;

/// An API call that failed, with the status and the message of its response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiFault {
    /// Status code.
    pub status: u16,
    /// Field or object and the reason, in one line.
    pub message: String,
}

impl ApiFault {
    /// Returns a fault with status 400.
    pub fn bad(message: impl Into<String>) -> Self {
        Self {
            status: 400,
            message: message.into(),
        }
    }

    /// Returns the fault for a field or object that Perfvisor does not support.
    pub fn unsupported(object: &str, reason: &str) -> Self {
        Self::bad(format!("{object}: unsupported: {reason}"))
    }

    /// Returns the body of the response.
    pub fn body(&self) -> FaultBody {
        FaultBody {
            fault_message: self.message.clone(),
        }
    }
}
