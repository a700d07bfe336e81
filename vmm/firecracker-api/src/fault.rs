//! Error responses of the API.

use crate::types::FaultBody;

/// A failed API call: the status and the message of the error response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiFault {
    /// HTTP status code.
    pub status: u16,
    /// Error message of one line, which names the invalid field or object and the reason.
    pub message: String,
}

impl ApiFault {
    /// Returns the error for an invalid request, with status 400.
    pub fn bad(message: impl Into<String>) -> Self {
        Self {
            status: 400,
            message: message.into(),
        }
    }

    /// Returns the error for a field or object that Perfvisor does not support.
    pub fn unsupported(object: &str, reason: &str) -> Self {
        Self::bad(format!("{object}: unsupported: {reason}"))
    }

    /// Returns the body of the error response.
    pub fn body(&self) -> FaultBody {
        FaultBody {
            fault_message: self.message.clone(),
        }
    }
}
