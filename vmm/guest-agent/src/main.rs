//! Guest agent, which runs commands and copies files over vsock at the request of the host.
//!
//! | module | contents |
//! |---|---|
//! | `main` | accepts and limits connections, and dispatches requests |
//! | `command` | execution of one command |
//! | `ends` | shutdown of a connection |
//! | `signals` | reset of inherited signal dispositions |
//!
//! Only connections from the host (CID 2) are accepted, not those from programs in this guest or
//! from other guests.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]

mod command;
mod ends;
mod signals;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ends::{HOST_TIMEOUT, close, line, refuse};
use guest_agent::PORT;
use guest_agent::receive::{FileTreeCopyProgress, FileTreeReceiver};
use guest_agent::request::{AgentOperation, AgentRequest, VERSION};
use guest_agent::send::{FileTreeSendError, send_tree};
use guest_agent::wire::{FrameKind, read_frame, write_frame};
use vsock::{VMADDR_CID_ANY, VMADDR_CID_HOST, VsockListener};

/// Maximum number of simultaneous connections to the agent.
const MAX_CONNECTIONS: usize = 64;

fn main() -> ExitCode {
    if let Some(argument) = std::env::args().nth(1) {
        eprintln!(
            "perfvisor-agent: unknown argument '{argument}'; it takes none, and serves the host at vsock port {PORT}"
        );
        return ExitCode::from(2);
    }
    signals::reset_ignored();
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!(
                "perfvisor-agent: vsock port {PORT}: {error} (does this machine have a vsock device and its driver?)"
            );
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    let listener = VsockListener::bind_with_cid_port(VMADDR_CID_ANY, PORT)?;
    let busy = Arc::new(AtomicUsize::new(0));
    loop {
        let (stream, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(error) => {
                eprintln!("perfvisor-agent: {error}");
                std::thread::sleep(Duration::from_secs(1));
                continue;
            }
        };
        if peer.cid() != VMADDR_CID_HOST {
            continue;
        }
        // `UnixStream` provides the required operations for any stream socket.
        let Ok(stream) = stream.as_fd().try_clone_to_owned().map(UnixStream::from) else {
            continue;
        };
        if busy.fetch_add(1, Ordering::AcqRel) >= MAX_CONNECTIONS {
            busy.fetch_sub(1, Ordering::AcqRel);
            refuse(
                &stream,
                &format!("{MAX_CONNECTIONS} commands and copies run already"),
            );
            continue;
        }
        let place = ConnectionSlot(busy.clone());
        let spawned = std::thread::Builder::new().name("host".into()).spawn(move || {
            let _place = place;
            if let Err(error) = handle_connection(stream) {
                eprintln!("perfvisor-agent: {error}");
            }
        });
        if let Err(error) = spawned {
            eprintln!("perfvisor-agent: {error}");
        }
    }
}

/// A slot for one of at most [`MAX_CONNECTIONS`] simultaneous connections. The slot is released on
/// drop, even if the thread of the connection panics.
struct ConnectionSlot(Arc<AtomicUsize>);

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Serves one connection from the host.
fn handle_connection(stream: UnixStream) -> io::Result<()> {
    stream.set_read_timeout(Some(HOST_TIMEOUT))?;
    let frame = match read_frame(&mut &stream) {
        Ok(Some(frame)) if frame.kind == FrameKind::Request => frame,
        _ => return Ok(()),
    };
    // Other protocol versions may have unknown fields, so parse only the version.
    #[derive(serde::Deserialize)]
    struct Version {
        version: u32,
    }
    match serde_json::from_slice(&frame.payload) {
        Ok(Version { version: VERSION }) => {}
        Ok(Version { version }) => {
            let why = format!(
                "the agent speaks version {VERSION} and this perfvisor {version}; install the agent of the same build"
            );
            refuse(&stream, &why);
            return Ok(());
        }
        Err(_) => return Ok(()),
    }
    let Ok(request) = serde_json::from_slice::<AgentRequest>(&frame.payload) else {
        refuse(&stream, "the agent does not understand the request");
        return Ok(());
    };
    stream.set_read_timeout(None)?;
    match request.job {
        AgentOperation::Exec(exec) => command::run(&exec, stream),
        AgentOperation::Put { path, name } => {
            put(&stream, Path::new(&path), &name);
            close(&stream);
            Ok(())
        }
        AgentOperation::Get { path } => {
            get(&stream, Path::new(&path));
            close(&stream);
            Ok(())
        }
    }
}

/// Receives a file tree from the host.
fn put(stream: &UnixStream, path: &Path, name: &str) {
    let mut ours = stream;
    let mut receiver = match FileTreeReceiver::new(path, Some(name)) {
        Ok(receiver) => receiver,
        Err(error) => return refuse(stream, &line(&error)),
    };
    if write_frame(&mut ours, FrameKind::Accepted, &[]).is_err() {
        return;
    }
    loop {
        let Ok(Some(frame)) = read_frame(&mut ours) else {
            return;
        };
        match receiver.take(&frame) {
            Ok(FileTreeCopyProgress::More | FileTreeCopyProgress::Skipped(_)) => {}
            Ok(FileTreeCopyProgress::Done) => {
                let _ = write_frame(&mut ours, FrameKind::Done, &[]);
                return;
            }
            Err(error) => return refuse(stream, &line(&error)),
        }
    }
}

/// Sends a file tree to the host.
fn get(stream: &UnixStream, path: &Path) {
    let mut ours = stream;
    let mut accepted = false;
    let sent = send_tree(path, &mut |kind, payload| {
        if !std::mem::replace(&mut accepted, true) {
            write_frame(&mut ours, FrameKind::Accepted, &[])?;
        }
        write_frame(&mut ours, kind, payload)
    });
    match sent {
        Ok(()) | Err(FileTreeSendError::Connection(_)) => {}
        Err(error) => refuse(stream, &line(&error)),
    }
}
