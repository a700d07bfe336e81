//! What the host asks for.

use serde::{Deserialize, Serialize};

/// The version of everything in this crate that goes over the connection.
pub const VERSION: u32 = 1;

/// The first frame of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`] of the host. The agent refuses others, and says its own.
    pub version: u32,
    /// What is to be done.
    pub job: Job,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Job {
    /// Run a command.
    Exec(Exec),
    /// Take a tree that the host sends.
    Put {
        /// Where it goes: into this directory if it is one, else it gets this name.
        path: String,
        /// Its name in a directory.
        name: String,
    },
    /// Send a tree.
    Get {
        /// Where it is.
        path: String,
    },
}

/// A command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables besides the agent's own.
    pub env: Vec<(String, String)>,
    /// Its directory; without it the agent's.
    pub cwd: Option<String>,
    /// A terminal instead of three streams.
    pub terminal: Option<Terminal>,
}

/// A terminal's size, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// Lines.
    pub rows: u16,
    /// Characters in one.
    pub columns: u16,
}

impl Terminal {
    /// As in a frame.
    pub fn to_bytes(self) -> [u8; 4] {
        let ([a, b], [c, d]) = (self.rows.to_le_bytes(), self.columns.to_le_bytes());
        [a, b, c, d]
    }

    /// From a frame.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, d] = bytes.try_into().ok()?;
        Some(Self {
            rows: u16::from_le_bytes([a, b]),
            columns: u16::from_le_bytes([c, d]),
        })
    }
}

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exit {
    /// With this status.
    Status(u8),
    /// By this signal.
    Signal(u8),
}

impl Exit {
    /// As a shell says it: the status, or 128 and the signal.
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
        let exec = Exec {
            argv: vec!["sh".into(), "-c".into(), "echo \u{fc}".into()],
            env: vec![("K".into(), "V".into())],
            cwd: None,
            terminal: Some(Terminal {
                rows: 24,
                columns: 80,
            }),
        };
        for job in [
            Job::Exec(exec),
            Job::Put {
                path: "/a".into(),
                name: "b".into(),
            },
            Job::Get { path: "/c".into() },
        ] {
            let request = Request {
                version: VERSION,
                job,
            };
            let text = serde_json::to_vec(&request).unwrap();
            assert_eq!(serde_json::from_slice::<Request>(&text).unwrap(), request);
        }
        let size = Terminal {
            rows: 300,
            columns: 7,
        };
        assert_eq!(Terminal::from_bytes(&size.to_bytes()), Some(size));
        assert_eq!(Terminal::from_bytes(&[1, 2, 3]), None);
        assert_eq!((Exit::Status(3).code(), Exit::Signal(9).code()), (3, 137));
    }
}
