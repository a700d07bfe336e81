//! Parses the argument of `--console`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Maximum length of a Unix socket path in bytes (unix(7): `sun_path` has 108 with its NUL).
pub const MAX_SOCKET_PATH: usize = 107;

/// Target of a console's output and source of its input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ConsoleTarget {
    /// Standard output and standard input. Ctrl-A x in the input ends the VM.
    #[default]
    Tty,
    /// A file to which output is appended, without input.
    File(PathBuf),
    /// A Unix socket that serves one client at a time.
    Socket(PathBuf),
    /// A newly allocated pseudo-terminal.
    Pty,
    /// No console. Output is dropped, and there is no input.
    None,
}

/// Error when parsing a console target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConsoleTargetError {
    /// The argument has none of the accepted forms.
    #[error("must be tty, file=PATH, socket=PATH, pty or none")]
    Shape,
    /// The path of the file or the socket is empty.
    #[error("the path is missing after {0}=")]
    NoPath(&'static str),
    /// The path is too long for a Unix socket.
    #[error("the path of a Unix socket must be at most {MAX_SOCKET_PATH} bytes")]
    SocketPath,
}

impl FromStr for ConsoleTarget {
    type Err = ConsoleTargetError;

    fn from_str(text: &str) -> Result<Self, ConsoleTargetError> {
        match text.split_once('=') {
            None => match text {
                "tty" => Ok(Self::Tty),
                "pty" => Ok(Self::Pty),
                "none" => Ok(Self::None),
                "file" => Err(ConsoleTargetError::NoPath("file")),
                "socket" => Err(ConsoleTargetError::NoPath("socket")),
                _ => Err(ConsoleTargetError::Shape),
            },
            Some(("file", "")) => Err(ConsoleTargetError::NoPath("file")),
            Some(("socket", "")) => Err(ConsoleTargetError::NoPath("socket")),
            Some(("file", path)) => Ok(Self::File(path.into())),
            Some(("socket", path)) if path.len() <= MAX_SOCKET_PATH => Ok(Self::Socket(path.into())),
            Some(("socket", _)) => Err(ConsoleTargetError::SocketPath),
            Some(_) => Err(ConsoleTargetError::Shape),
        }
    }
}

impl fmt::Display for ConsoleTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tty => f.write_str("tty"),
            Self::File(path) => write!(f, "file={}", path.display()),
            Self::Socket(path) => write!(f, "socket={}", path.display()),
            Self::Pty => f.write_str("pty"),
            Self::None => f.write_str("none"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn console_target_round_trips() {
        for text in ["tty", "pty", "none", "file=/var/log/a=b", "socket=s"] {
            assert_eq!(text.parse::<ConsoleTarget>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn console_target_rejects_other_forms() {
        for text in ["", "TTY", "stdio", "tty=1", "pipe=x", "=x"] {
            assert_eq!(
                text.parse::<ConsoleTarget>(),
                Err(ConsoleTargetError::Shape),
                "{text}"
            );
        }
        for (text, word) in [("file", "file"), ("file=", "file"), ("socket=", "socket")] {
            assert_eq!(
                text.parse::<ConsoleTarget>(),
                Err(ConsoleTargetError::NoPath(word))
            );
        }
        let long = format!("socket={}", "x".repeat(MAX_SOCKET_PATH + 1));
        assert_eq!(long.parse::<ConsoleTarget>(), Err(ConsoleTargetError::SocketPath));
        assert!(long[..long.len() - 1].parse::<ConsoleTarget>().is_ok());
    }
}
