//! The operator's side of a control socket.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::place::{self, PlaceError};
use crate::protocol::{Failure, PROTOCOL, ReplyLine, RequestLine, SymbolsInfo, VmInfo};
use crate::request::{self, Request};

/// How long a VM may take to reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest reply taken.
const MAX_REPLY: usize = 16 << 20;
/// Most bytes of symbols taken.
const MAX_SYMBOLS: u64 = 512 << 20;

/// Why a VM did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Names no socket, or the directory cannot be read.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// No such VM.
    #[error("no VM named '{name}' is running{}", running(.others))]
    NoSuchVm {
        /// The name.
        name: String,
        /// Those there are.
        others: Vec<String>,
    },
    /// None is named, and there is none or more than one.
    #[error("{}", which(.0))]
    Which(Vec<String>),
    /// The VM refused.
    #[error(transparent)]
    Refused(#[from] Failure),
    /// The connection broke, or the VM took too long.
    #[error("the VM's control socket")]
    Io(#[from] io::Error),
    /// What came is no reply.
    #[error("the VM's reply is not understood ({0}); use the Perfvisor that runs it")]
    Reply(&'static str),
}

fn running(others: &[String]) -> String {
    match others {
        [] => "; no VM is".to_owned(),
        others => format!("; running are {}", others.join(", ")),
    }
}

fn which(names: &[String]) -> String {
    match names {
        [] => "no VM is running; start one with perfvisor run".to_owned(),
        names => format!("more than one VM is running, name one: {}", names.join(", ")),
    }
}

impl ClientError {
    /// Whether the VM has gone: it ended, or was killed.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Io(e) if matches!(e.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset))
    }
}

/// A connection to a VM.
#[derive(Debug)]
pub struct Client {
    line: Line,
    info: VmInfo,
}

/// The connection before and behind the greeting.
#[derive(Debug)]
struct Line {
    stream: UnixStream,
    next: u64,
    incoming: Vec<u8>,
    files: VecDeque<File>,
}

impl Client {
    /// Connects to the VM `name`, or to the only one there is.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn connect(name: Option<&str>) -> Result<Self, ClientError> {
        Self::connect_in(&place::directory(), name)
    }

    /// As [`Client::connect`], with the sockets in `dir`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn connect_in(dir: &Path, name: Option<&str>) -> Result<Self, ClientError> {
        let name = match name {
            Some(name) => {
                place::check_name(name)?;
                name.to_owned()
            }
            None => {
                let mut names = place::names(dir)?;
                match names.pop() {
                    Some(only) if names.is_empty() => only,
                    last => {
                        names.extend(last);
                        return Err(ClientError::Which(names));
                    }
                }
            }
        };
        let stream = match place::connect(dir, &name) {
            Ok(stream) => stream,
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                ) =>
            {
                let others = place::names(dir)?;
                return Err(ClientError::NoSuchVm { name, others });
            }
            Err(e) => return Err(e.into()),
        };
        Self::over(stream)
    }

    /// Greets the VM at the other end of `stream`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn over(stream: UnixStream) -> Result<Self, ClientError> {
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        let mut line = Line {
            stream,
            next: 1,
            incoming: Vec::new(),
            files: VecDeque::new(),
        };
        let info = line.ask(request::Hello { protocol: PROTOCOL })?;
        Ok(Self { line, info })
    }

    /// What the VM said of itself at first.
    pub fn info(&self) -> &VmInfo {
        &self.info
    }

    /// Asks for something.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call<R: Request>(&mut self, request: R) -> Result<R::Reply, ClientError> {
        self.line.ask(request)
    }

    /// As [`Client::call`], for what comes with a descriptor.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_with_file<R: Request>(&mut self, request: R) -> Result<(R::Reply, File), ClientError> {
        self.line.files.clear();
        let reply = self.line.ask(request)?;
        let file = self.line.files.pop_front();
        Ok((
            reply,
            file.ok_or(ClientError::Reply("no descriptor came with it"))?,
        ))
    }

    /// The guest kernel's symbols as text.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn symbols(&mut self) -> Result<(SymbolsInfo, Vec<u8>), ClientError> {
        let (info, mut file) = self.call_with_file(request::Symbols)?;
        file.seek(SeekFrom::Start(0))?;
        let mut text = Vec::new();
        file.take(MAX_SYMBOLS).read_to_end(&mut text)?;
        Ok((info, text))
    }
}

impl Line {
    fn ask<R: Request>(&mut self, request: R) -> Result<R::Reply, ClientError> {
        let id = self.next;
        self.next += 1;
        let call = request.into();
        let mut line =
            serde_json::to_vec(&RequestLine { id, call }).map_err(|_| ClientError::Reply("request"))?;
        line.push(b'\n');
        self.stream.write_all(&line)?;
        let reply: ReplyLine =
            serde_json::from_slice(&self.read()?).map_err(|_| ClientError::Reply("not JSON"))?;
        if let Some(failure) = reply.error {
            return Err(failure.into());
        }
        if reply.id != id {
            return Err(ClientError::Reply("out of order"));
        }
        serde_json::from_value(reply.ok.unwrap_or_default()).map_err(|_| ClientError::Reply("fields"))
    }

    fn read(&mut self) -> Result<Vec<u8>, ClientError> {
        let mut seen = 0;
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.incoming[seen..]) {
                let rest = self.incoming.split_off(seen + end + 1);
                return Ok(std::mem::replace(&mut self.incoming, rest));
            }
            seen = self.incoming.len();
            if seen > MAX_REPLY {
                return Err(ClientError::Reply("too long"));
            }
            let mut chunk = [0; 64 << 10];
            let (n, file) = self
                .stream
                .recv_with_fd(&mut chunk)
                .map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
            self.files.extend(file);
            if n == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the VM closed it").into());
            }
            self.incoming.extend_from_slice(&chunk[..n]);
        }
    }
}
