//! The connection to the agent in the lab.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::error::LabError;
use super::logs::LabLogs;
use lab_agent::ordered::OutputStream;

use crate::process::ProcessProgress;
use lab_agent::wire::{Frame, FrameKind, ProcessExit, read_frame, write_frame};

/// Maximum duration of a file transfer to or from the lab.
const TRANSFER_LIMIT: Duration = Duration::from_secs(900);

/// The connection to the agent in the lab, and the requests that the agent has not answered yet.
pub(super) struct AgentLink {
    stream: Mutex<UnixStream>,
    next_id: AtomicU32,
    waiting: Mutex<PendingRequests>,
    answered: Condvar,
}

#[derive(Default)]
struct PendingRequests {
    processes: HashMap<u32, Arc<ProcessProgress>>,
    transfers: HashMap<u32, Transfer>,
    gone: Option<Refusal>,
}

/// A file transfer between this machine and the lab.
struct Transfer {
    data: TransferBuffer,
    result: Option<Result<(), Refusal>>,
}

impl Transfer {
    /// Appends a chunk of the received file. Does nothing after the transfer has failed.
    fn take(&mut self, piece: &[u8]) {
        if self.result.is_none()
            && let Err(refusal) = self.data.extend(piece)
        {
            self.result = Some(Err(refusal));
        }
    }
}

/// The destination of a file received from the lab.
pub(super) enum TransferBuffer {
    /// A buffer in memory, which has no size limit.
    Memory(Vec<u8>),
    /// A file of limited size.
    File {
        /// File to which the received contents are written, at the current position.
        file: File,
        /// Number of bytes that may still be written to the file.
        left: u64,
        /// Maximum size of the file, in bytes, for error messages.
        limit: u64,
    },
}

impl TransferBuffer {
    fn extend(&mut self, piece: &[u8]) -> Result<(), Refusal> {
        match self {
            Self::Memory(data) => data.extend_from_slice(piece),
            Self::File { file, left, limit } => {
                *left = left
                    .checked_sub(piece.len() as u64)
                    .ok_or_else(|| Refusal(format!("larger than {} MiB", *limit >> 20)))?;
                file.write_all(piece)
                    .map_err(|error| Refusal(error.to_string()))?;
            }
        }
        Ok(())
    }
}

/// Reason why a request to the agent failed: the agent rejected it, or the connection ended.
#[derive(Clone, Debug)]
pub(super) struct Refusal(pub(super) String);

impl AgentLink {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self {
            stream: Mutex::new(stream),
            next_id: AtomicU32::new(1),
            waiting: Mutex::default(),
            answered: Condvar::new(),
        }
    }

    /// Returns whether the agent has closed the connection.
    pub(super) fn is_gone(&self) -> bool {
        self.waiting().gone.is_some()
    }

    /// Registers `progress` as the receiver of the agent's frames about process `id`.
    ///
    /// # Errors
    /// Returns the reason if the connection has ended.
    pub(super) fn report_to(&self, id: u32, progress: &Arc<ProcessProgress>) -> Result<(), Refusal> {
        let mut waiting = self.waiting();
        if let Some(reason) = &waiting.gone {
            return Err(reason.clone());
        }
        waiting.processes.insert(id, Arc::clone(progress));
        Ok(())
    }

    pub(super) fn hang_up(&self) {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn waiting(&self) -> MutexGuard<'_, PendingRequests> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn send(&self, kind: FrameKind, id: u32, payload: &[u8]) -> io::Result<()> {
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        write_frame(&mut *stream, kind, id, payload)
    }

    pub(super) fn new_id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Reads frames from the agent and delivers them to the waiting requests, until the connection
    /// ends.
    pub(super) fn receive(&self, mut stream: UnixStream, logs: &LabLogs) {
        let reason = loop {
            match read_frame(&mut stream) {
                Ok(Some(frame)) => self.deliver(frame),
                Ok(None) => break "it hung up".to_owned(),
                Err(error) => break error.to_string(),
            }
        };
        let reason = logs.describe_end(&reason);
        let mut waiting = self.waiting();
        for (_, progress) in waiting.processes.drain() {
            progress.lab_gone(reason.clone());
        }
        for transfer in waiting.transfers.values_mut() {
            transfer.result.get_or_insert(Err(Refusal(reason.clone())));
        }
        waiting.gone = Some(Refusal(reason));
        self.answered.notify_all();
    }

    fn deliver(&self, frame: Frame) {
        let Frame { kind, id, payload } = frame;
        let mut waiting = self.waiting();
        match kind {
            FrameKind::Stdout | FrameKind::Stderr => {
                let stream = if kind == FrameKind::Stdout {
                    OutputStream::Stdout
                } else {
                    OutputStream::Stderr
                };
                let progress = waiting.processes.get(&id).cloned();
                // Release the lock, because the receiver of the output may be slow.
                drop(waiting);
                if let Some(progress) = progress {
                    progress.output(stream, &payload);
                }
            }
            FrameKind::Used => {
                if let (Some(progress), Ok(ticks)) = (waiting.processes.get(&id), payload.try_into()) {
                    progress.used(u64::from_le_bytes(ticks));
                }
            }
            FrameKind::Exit => {
                let ended = serde_json::from_slice(&payload).unwrap_or(ProcessExit {
                    code: None,
                    signal: None,
                });
                if let Some(progress) = waiting.processes.remove(&id) {
                    progress.exited(ended);
                }
            }
            FrameKind::Data => {
                if let Some(transfer) = waiting.transfers.get_mut(&id) {
                    transfer.take(&payload);
                    if transfer.result.is_some() {
                        self.answered.notify_all();
                    }
                }
            }
            FrameKind::Done => {
                if let Some(transfer) = waiting.transfers.get_mut(&id) {
                    transfer.result.get_or_insert(Ok(()));
                    self.answered.notify_all();
                }
            }
            FrameKind::Failed => {
                let message = String::from_utf8_lossy(&payload).into_owned();
                if let Some(progress) = waiting.processes.remove(&id) {
                    progress.not_started(message);
                } else if let Some(transfer) = waiting.transfers.get_mut(&id) {
                    transfer.result = Some(Err(Refusal(message)));
                    self.answered.notify_all();
                }
            }
            // These frames are for the agent only. An agent that sends them is broken, and waiting
            // requests time out.
            FrameKind::Hello
            | FrameKind::Start
            | FrameKind::Stdin
            | FrameKind::Signal
            | FrameKind::Create
            | FrameKind::Fetch
            | FrameKind::Resize => {}
        }
    }

    /// Registers a file transfer and returns its ID. Received contents are stored in `data`.
    pub(super) fn start_transfer(&self, data: TransferBuffer) -> u32 {
        let id = self.new_id();
        let mut waiting = self.waiting();
        let result = waiting.gone.clone().map(Err);
        waiting.transfers.insert(id, Transfer { data, result });
        id
    }

    /// Waits until transfer `id` is complete, and returns the buffer with the received contents.
    /// `path` is the file's path for error messages.
    pub(super) fn finish_transfer(&self, id: u32, path: &str) -> Result<TransferBuffer, LabError> {
        let (mut waiting, timeout) = self
            .answered
            .wait_timeout_while(self.waiting(), TRANSFER_LIMIT, |waiting| {
                waiting
                    .transfers
                    .get(&id)
                    .is_some_and(|transfer| transfer.result.is_none())
            })
            .unwrap_or_else(PoisonError::into_inner);
        let transfer = waiting.transfers.remove(&id);
        let error = |message: String| LabError::Transfer {
            path: path.to_owned(),
            message,
        };
        match transfer {
            Some(Transfer {
                data,
                result: Some(Ok(())),
            }) => Ok(data),
            Some(Transfer {
                result: Some(Err(Refusal(message))),
                ..
            }) => Err(error(message)),
            _ if timeout.timed_out() => Err(error(format!("not done after {TRANSFER_LIMIT:?}"))),
            _ => Err(error("no answer".to_owned())),
        }
    }
}
