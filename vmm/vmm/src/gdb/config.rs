//! Parses the argument of `--gdb`: the socket and whether to wait for a debugger.

use std::path::PathBuf;
use std::str::FromStr;

use crate::console::target::MAX_SOCKET_PATH;

/// Socket on which the gdb server listens, and whether the VM waits for a debugger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GdbConfig {
    /// Path of the Unix socket on which the gdb server listens.
    pub socket: PathBuf,
    /// `true` if the VM does not run before the first debugger connects.
    pub wait: bool,
}

/// Error when parsing the argument of `--gdb`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GdbConfigError {
    /// The path of the socket is empty.
    #[error("must be the path of a Unix socket, or PATH,wait")]
    Shape,
    /// The text after the comma is not an option.
    #[error("only wait may follow the path: PATH,wait")]
    Word,
    /// The path is too long for a Unix socket.
    #[error("the path of a Unix socket must be at most {MAX_SOCKET_PATH} bytes")]
    Long,
}

impl FromStr for GdbConfig {
    type Err = GdbConfigError;

    fn from_str(text: &str) -> Result<Self, GdbConfigError> {
        let (path, word) = match text.split_once(',') {
            Some((path, word)) => (path, Some(word)),
            None => (text, None),
        };
        let wait = match word {
            None => false,
            Some("wait") => true,
            Some(_) => return Err(GdbConfigError::Word),
        };
        match path.len() {
            0 => Err(GdbConfigError::Shape),
            1..=MAX_SOCKET_PATH => Ok(Self {
                socket: path.into(),
                wait,
            }),
            _ => Err(GdbConfigError::Long),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gdb_config_accepts_path_and_wait() {
        let parse = |text: &str| text.parse::<GdbConfig>();
        assert!(!parse("/run/g").unwrap().wait);
        assert!(parse("g,wait").is_ok_and(|config| config.wait && config.socket.as_os_str() == "g"));
        for (text, error) in [
            ("", GdbConfigError::Shape),
            (",wait", GdbConfigError::Shape),
            ("g,", GdbConfigError::Word),
            ("g,wait,wait", GdbConfigError::Word),
            ("g,stop", GdbConfigError::Word),
        ] {
            assert_eq!(parse(text), Err(error), "{text}");
        }
        assert_eq!(parse(&"g".repeat(MAX_SOCKET_PATH + 1)), Err(GdbConfigError::Long));
    }
}
