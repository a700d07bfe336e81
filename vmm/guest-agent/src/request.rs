//! Requests that the host sends to the guest agent.

use serde::{Deserialize, Serialize};

/// Version of the wire format and the requests.
pub const VERSION: u32 = 1;

/// A request to the guest agent, which is the payload of the host's first frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentRequest {
    /// Protocol [`VERSION`] that the host uses. The agent rejects other versions and reports its
    /// own.
    pub version: u32,
    /// Operation that the agent must perform.
    pub job: AgentOperation,
}

/// An operation that the host requests from the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentOperation {
    /// Run a command in the guest.
    Exec(ExecRequest),
    /// Receive a file tree from the host.
    Put {
        /// Target path in the guest: the parent of the tree if this is an existing directory,
        /// otherwise the tree itself.
        path: String,
        /// File name of the tree if `path` is an existing directory.
        name: String,
    },
    /// Send a file tree to the host.
    Get {
        /// Path of the file tree in the guest.
        path: String,
    },
}

/// A request to run a command in the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecRequest {
    /// Program and its arguments.
    pub argv: Vec<String>,
    /// Environment variables of the command, in addition to those of the agent.
    pub env: Vec<(String, String)>,
    /// Working directory of the command, or `None` for the agent's `HOME` (`/` if unset).
    pub cwd: Option<String>,
    /// Size of the terminal on which the command runs, or `None` to run it with three pipes.
    pub terminal: Option<Terminal>,
}

/// Size of a terminal, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// Height of the terminal, as number of rows.
    pub rows: u16,
    /// Width of the terminal, as number of columns.
    pub columns: u16,
}

impl Terminal {
    /// Encodes the terminal size as a frame payload.
    pub fn to_bytes(self) -> [u8; 4] {
        let ([a, b], [c, d]) = (self.rows.to_le_bytes(), self.columns.to_le_bytes());
        [a, b, c, d]
    }

    /// Decodes the terminal size from a frame payload.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, d] = bytes.try_into().ok()?;
        Some(Self {
            rows: u16::from_le_bytes([a, b]),
            columns: u16::from_le_bytes([c, d]),
        })
    }
}

/// How a command that the agent ran ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CommandExit {
    /// The command exited with this exit status.
    Status(u8),
    /// The command was terminated by the signal with this number.
    Signal(u8),
}

impl CommandExit {
    /// Returns the exit status that a shell would report: the command's status, or 128 plus the
    /// signal number.
    pub fn code(self) -> u8 {
        match self {
            Self::Status(status) => status,
            Self::Signal(signal) => 128_u8.saturating_add(signal),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_written() {
        let exec = ExecRequest {
            argv: vec!["sh".into(), "-c".into(), "echo \u{fc}".into()],
            env: vec![("K".into(), "V".into())],
            cwd: None,
            terminal: Some(Terminal {
                rows: 24,
                columns: 80,
            }),
        };
        for job in [
            AgentOperation::Exec(exec),
            AgentOperation::Put {
                path: "/a".into(),
                name: "b".into(),
            },
            AgentOperation::Get { path: "/c".into() },
        ] {
            let request = AgentRequest {
                version: VERSION,
                job,
            };
            let text = serde_json::to_vec(&request).unwrap();
            assert_eq!(serde_json::from_slice::<AgentRequest>(&text).unwrap(), request);
        }
        let size = Terminal {
            rows: 300,
            columns: 7,
        };
        assert_eq!(Terminal::from_bytes(&size.to_bytes()), Some(size));
        assert_eq!(Terminal::from_bytes(&[1, 2, 3]), None);
        assert_eq!(
            (CommandExit::Status(3).code(), CommandExit::Signal(9).code()),
            (3, 137)
        );
    }
}
