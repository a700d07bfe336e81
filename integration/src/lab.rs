//! The lab host, which is a Linux system with a working KVM, emulated by QEMU without hardware
//! virtualization. See `docs/guide/lab.md`.

mod error;
mod initrd;
mod link;
mod logs;
mod options;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guest_images::linux::GuestImages;
use guest_images::progress::ProgressLog;
use guest_images::qemu::Qemu;
use tempfile::TempDir;

use crate::artefacts::{self, LabBinaries};
use crate::monitor::Monitor;
use crate::process::{
    HostCommand, HostProcess, OutputSink, ProcessControl, ProcessProgress, ProcessRunError,
};
use lab_agent::wire::{
    Frame, FrameKind, MAX_PAYLOAD_BYTES, NewFile, ProcessStartRequest, StdioMode, TerminalSize, read_frame,
};

pub use error::LabError;
use error::SETPRIV;
pub use initrd::invalid_path_reason;
use initrd::write_initrd;
use link::{AgentLink, TransferBuffer};
use logs::{LabLogs, QemuExit};
pub use options::LabOptions;

/// Maximum time from the start of QEMU to the handshake of the lab's agent. Measured times are
/// about 4 s on an idle machine, and 45 s with nine times as many busy threads as processors.
const BOOT_LIMIT: Duration = Duration::from_secs(900);

/// A running lab host. The lab is switched off when the value is dropped and when this process
/// exits.
pub struct Lab {
    link: Arc<AgentLink>,
    log: PathBuf,
    kernel_release: String,
    boot_time: Duration,
    ending: Arc<QemuExit>,
    /// Connection to QEMU's monitor for diagnosing a hang, or `None` if the connection could not be
    /// established.
    monitor: Option<Mutex<Monitor>>,
}

/// Adds the ports of the lab to QEMU's command line: the serial console, which is written to `log`,
/// and the sockets of the agent and of QEMU's monitor.
fn connect_ports(command: &mut Command, log: &Path, agent: &Path, monitor: &Path) {
    command
        .args(["-display", "none"])
        .arg("-serial")
        .arg(format!("file:{}", log.display()))
        .arg("-chardev")
        .arg(format!("socket,id=agent,path={}", agent.display()))
        .arg("-chardev")
        .arg(format!(
            "socket,id=monitor,server=on,wait=off,path={}",
            monitor.display()
        ))
        .args(["-mon", "chardev=monitor,mode=control"])
        .args(["-device", "virtio-serial-pci"])
        .args(["-device", "virtserialport,chardev=agent,name=perfvisor.agent"]);
}

impl Lab {
    /// Boots a lab with Perfvisor and the Linux guest and waits for its agent. Retries once if a
    /// known emulator bug terminated the lab (`is_emulator_bug`).
    ///
    /// # Errors
    /// Returns an error if QEMU is missing, a file for the lab cannot be built, or the lab does not
    /// boot in time.
    pub fn boot(options: &LabOptions) -> Result<Self, LabError> {
        match Self::boot_once(options) {
            Err(LabError::Boot { log, .. }) if is_emulator_bug(&log) => {
                eprintln!(
                    "lab: the emulator executed a breakpoint that was gone, and the lab's kernel ended; booting it again"
                );
                Self::boot_once(options)
            }
            other => other,
        }
    }

    fn boot_once(options: &LabOptions) -> Result<Self, LabError> {
        let host = artefacts::images_of(&options.kernel)?;
        let binaries = artefacts::binaries()?;
        let started = Instant::now();
        let (scratch, initrd) = make_initrd(&host, binaries, options)?;
        let socket = scratch.path().join("agent");
        let listener = UnixListener::bind(&socket).map_err(|source| LabError::File {
            path: socket.clone(),
            source,
        })?;
        let monitor = scratch.path().join("monitor");
        let log = artefacts::log_dir()?.join(log_name());
        let _ = fs::remove_file(&log);

        let ending = Arc::new(QemuExit::default());
        let qemu = artefacts::qemu_with(options.qemu_needs)?;
        let mut command = command_line(qemu, &host, &initrd, options);
        connect_ports(&mut command, &log, &socket, &monitor);
        let qemu_log = log.with_extension("qemu");
        let qemu_output = File::create(&qemu_log).map_err(|source| LabError::File {
            path: qemu_log.clone(),
            source,
        })?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(qemu_output)
            // Ctrl-C must reach only this process, which shuts the lab down in order.
            .process_group(0);
        let (up, is_up) = channel();
        start_qemu(command, &ending, &options.cancelled, is_up).map_err(LabError::Start)?;
        let logs = LabLogs {
            ending: Arc::clone(&ending),
            console: log.clone(),
            qemu_log,
        };
        let boot_error = |reason: String| {
            logs.ending.abandoned.store(true, Ordering::Relaxed);
            LabError::Boot {
                reason,
                log: log.clone(),
                tail: logs.tail(),
            }
        };
        let _ticker = ProgressLog::new("lab").tick("the lab host boots …");
        let deadline = started + BOOT_LIMIT;
        let stream = accept(&listener, deadline, &ending).map_err(|error| boot_error(error.to_string()))?;
        let hello = greeting(&stream, deadline).map_err(|error| boot_error(error.to_string()))?;

        // Tell the thread that watches QEMU that the boot has finished.
        drop(up);
        let reader = stream
            .try_clone()
            .map_err(|error| boot_error(error.to_string()))?;
        let link = Arc::new(AgentLink::new(stream));
        let receiver = Arc::clone(&link);
        thread::spawn(move || receiver.receive(reader, &logs));
        Ok(Self {
            link,
            log,
            kernel_release: hello,
            boot_time: started.elapsed(),
            ending,
            monitor: Monitor::connect(&monitor).ok().map(Mutex::new),
        })
    }

    /// Returns whether QEMU has exited or the connection to the lab's agent is closed.
    pub fn is_gone(&self) -> bool {
        self.ending.has_come() || self.link.is_gone()
    }

    /// Runs `true` in the lab and returns whether it succeeds within `limit`.
    pub fn answers(&self, limit: Duration) -> bool {
        self.start(&HostCommand::new("true"))
            .and_then(|process| process.wait(limit))
            .is_ok_and(|output| output.success())
    }

    /// Samples the instruction pointers of QEMU's processors `snapshots` times at intervals of
    /// `between`, even if the lab is unresponsive.
    ///
    /// # Errors
    /// Returns an error if QEMU's monitor does not answer.
    pub fn instruction_pointers(
        &self,
        snapshots: u32,
        between: Duration,
    ) -> io::Result<BTreeMap<String, Vec<String>>> {
        let monitor = self.monitor.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        monitor
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .instruction_pointers(snapshots, between)
    }

    /// Kills the lab without an orderly shutdown.
    pub fn abandon(&self) {
        self.ending.abandoned.store(true, Ordering::Relaxed);
        self.ending.wait(Duration::from_secs(10));
    }

    /// Returns the path of the file with the lab's console output.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns the kernel release of the lab, as printed by `uname -r`.
    pub fn kernel_release(&self) -> &str {
        &self.kernel_release
    }

    /// Returns the time that booting the lab took, from the start of the preparations to the
    /// agent's handshake.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// Starts a process in the lab.
    ///
    /// # Errors
    /// Returns an error if the lab has ended. A missing program is reported by
    /// [`HostProcess::wait`].
    pub fn start(&self, command: &HostCommand) -> Result<HostProcess, ProcessRunError> {
        let (process, _) = self.start_with(command, StdioMode::Pipes, ProcessProgress::default())?;
        Ok(process)
    }

    /// Starts a process in the lab and passes its output to `sink` as it arrives. Also returns a
    /// handle for use from other threads.
    ///
    /// # Errors
    /// Returns an error if the lab has ended, as [`Lab::start`] does.
    pub fn stream(
        &self,
        command: &HostCommand,
        streams: StdioMode,
        sink: OutputSink,
    ) -> Result<(HostProcess, LabProcess), ProcessRunError> {
        self.start_with(command, streams, ProcessProgress::with_sink(sink))
    }

    fn start_with(
        &self,
        command: &HostCommand,
        streams: StdioMode,
        progress: ProcessProgress,
    ) -> Result<(HostProcess, LabProcess), ProcessRunError> {
        let id = self.link.new_id();
        let progress = Arc::new(progress);
        let gone = |message: String| ProcessRunError::LabGone {
            command: command.line(),
            message,
        };
        self.link
            .report_to(id, &progress)
            .map_err(|refusal| gone(refusal.0))?;
        let start = ProcessStartRequest {
            argv: command.argv.clone(),
            env: command.env.clone(),
            streams,
        };
        let payload = serde_json::to_vec(&start).map_err(|error| gone(error.to_string()))?;
        self.link
            .send(FrameKind::Start, id, &payload)
            .map_err(|error| gone(error.to_string()))?;
        let remote = LabProcess {
            link: Arc::clone(&self.link),
            id,
        };
        let process = HostProcess::new(command, progress, Box::new(remote.clone()));
        Ok((process, remote))
    }

    /// Writes a file to the lab.
    ///
    /// # Errors
    /// Returns an error if the lab rejects the file or has ended.
    pub fn put(&self, path: &str, mode: u32, data: &[u8]) -> Result<(), LabError> {
        let id = self.link.start_transfer(TransferBuffer::Memory(Vec::new()));
        let send = || -> io::Result<()> {
            let new = NewFile {
                path: path.to_owned(),
                mode,
            };
            self.link
                .send(FrameKind::Create, id, &serde_json::to_vec(&new)?)?;
            for piece in data.chunks(MAX_PAYLOAD_BYTES) {
                self.link.send(FrameKind::Data, id, piece)?;
            }
            self.link.send(FrameKind::Done, id, &[])
        };
        send().map_err(|error| LabError::Transfer {
            path: path.to_owned(),
            message: error.to_string(),
        })?;
        self.link.finish_transfer(id, path).map(drop)
    }

    /// Returns the contents of a file in the lab.
    ///
    /// # Errors
    /// Returns an error if the file does not exist or the lab has ended.
    pub fn get(&self, path: &str) -> Result<Vec<u8>, LabError> {
        match self.fetch(path, TransferBuffer::Memory(Vec::new()))? {
            TransferBuffer::Memory(data) => Ok(data),
            TransferBuffer::File { .. } => unreachable!("the buffer was in memory"),
        }
    }

    /// Copies a file of at most `limit` bytes from the lab to `file`.
    ///
    /// # Errors
    /// Returns [`LabError::Transfer`] if the source does not exist, is not a regular file or
    /// exceeds the limit, if `file` cannot be written, or if the lab has ended.
    pub fn get_into(&self, path: &str, file: File, limit: u64) -> Result<(), LabError> {
        let left = limit;
        self.fetch(path, TransferBuffer::File { file, left, limit })
            .map(drop)
    }

    fn fetch(&self, path: &str, buffer: TransferBuffer) -> Result<TransferBuffer, LabError> {
        let id = self.link.start_transfer(buffer);
        self.link
            .send(FrameKind::Fetch, id, path.as_bytes())
            .map_err(|error| LabError::Transfer {
                path: path.to_owned(),
                message: error.to_string(),
            })?;
        self.link.finish_transfer(id, path)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // The agent sees end of file and exits, and init powers the machine off.
        self.link.hang_up();
        self.ending.wait(Duration::from_secs(10));
    }
}

/// A handle to a process in the lab. It can be cloned and used by any thread.
#[derive(Clone)]
pub struct LabProcess {
    link: Arc<AgentLink>,
    id: u32,
}

impl LabProcess {
    /// Writes to the standard input or the terminal of the process. An empty slice signals end of
    /// file.
    ///
    /// # Errors
    /// Returns an error if the lab has ended.
    pub fn write(&self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return self.link.send(FrameKind::Stdin, self.id, &[]);
        }
        for piece in bytes.chunks(MAX_PAYLOAD_BYTES) {
            self.link.send(FrameKind::Stdin, self.id, piece)?;
        }
        Ok(())
    }

    /// Sends a signal to the process group of the process, best effort.
    pub fn signal(&self, number: i32) {
        // The processes terminate with the lab, so the error can be ignored.
        let _ = self.link.send(FrameKind::Signal, self.id, &number.to_le_bytes());
    }

    /// Sets the window size of the process's terminal, best effort.
    pub fn resize(&self, size: TerminalSize) {
        if let Ok(payload) = serde_json::to_vec(&size) {
            let _ = self.link.send(FrameKind::Resize, self.id, &payload);
        }
    }
}

impl ProcessControl for LabProcess {
    fn stdin(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write(bytes)
    }

    fn signal(&mut self, number: i32) {
        LabProcess::signal(self, number);
    }
}

/// Starts QEMU in a new thread, which reports the exit of QEMU to `ending`. While the lab boots
/// (until the sender of `is_up` is dropped), the thread kills QEMU if `cancelled` is set.
///
/// The thread lives as long as QEMU, because the parent-death signal kills QEMU when the thread
/// that started it exits.
fn start_qemu(
    mut command: std::process::Command,
    ending: &Arc<QemuExit>,
    cancelled: &Arc<AtomicBool>,
    is_up: Receiver<()>,
) -> io::Result<()> {
    let (ending, cancelled) = (Arc::clone(ending), Arc::clone(cancelled));
    let (spawned, spawn_result) = channel();
    thread::spawn(move || {
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                let _ = spawned.send(Err(error));
                return;
            }
        };
        let _ = spawned.send(Ok(()));
        let how = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status.to_string(),
                Ok(None) => {}
                Err(error) => break error.to_string(),
            }
            let is_booting = is_up.try_recv() == Err(TryRecvError::Empty);
            let is_cancelled = is_booting && cancelled.load(Ordering::Relaxed);
            if is_cancelled || ending.abandoned.load(Ordering::Relaxed) {
                let _ = child.kill();
            }
            thread::sleep(Duration::from_millis(50));
        };
        ending.report(how);
    });
    spawn_result
        .recv()
        .unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// Returns a file name for the console log of the next lab of this process.
fn log_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let program = std::env::current_exe().ok();
    let name = program
        .as_deref()
        .and_then(Path::file_stem)
        .and_then(|name| name.to_str())
        .unwrap_or("lab")
        // Cargo appends a hash to the name of a test binary.
        .split('-')
        .next()
        .unwrap_or("lab")
        .to_owned();
    match COUNT.fetch_add(1, Ordering::Relaxed) {
        0 => format!("lab-{name}.log"),
        n => format!("lab-{name}-{n}.log"),
    }
}

/// Returns QEMU's command line without the console options.
fn command_line(
    qemu: &Qemu,
    host: &GuestImages,
    initrd: &Path,
    options: &LabOptions,
) -> std::process::Command {
    let mut command = std::process::Command::new(SETPRIV);
    command
        .args(["--pdeathsig", "KILL"])
        .arg(qemu.program())
        .args(qemu.arguments())
        .args(["-nodefaults", "-no-user-config", "-no-reboot"])
        .args(["-accel", "tcg,thread=multi", "-cpu", &qemu.processor()])
        // The lab's init keeps all processes off the first processor. The init script explains the
        // reason.
        .args(["-smp", &(options.cpus + 1).to_string()])
        .args(["-m", &format!("{}M", options.memory_mib)])
        .arg("-kernel")
        .arg(&host.bz_image)
        .arg("-initrd")
        .arg(initrd)
        .arg("-append")
        .arg("console=ttyS0 quiet tsc=reliable no_timer_check nokaslr mitigations=off panic=-1");
    for (n, disk) in options.disks.iter().enumerate() {
        // A comma in an option value must be doubled.
        let file = disk.display().to_string().replace(',', ",,");
        command
            .arg("-drive")
            .arg(format!("file={file},format=raw,if=none,id=disk{n},snapshot=on"))
            .args(["-device", &format!("virtio-blk-pci,drive=disk{n}")]);
    }
    command
}

/// Returns whether the console in `log` and QEMU's log beside it show that a known QEMU bug
/// terminated the lab.
///
/// Due to the bug, QEMU executes a cached translation of a breakpoint that the kernel has already
/// removed. The plugin discards such translations, but not the one that is being executed.
fn is_emulator_bug(log: &Path) -> bool {
    let has = |file: &Path, what: &str| {
        fs::read(file).is_ok_and(|text| String::from_utf8_lossy(&text).contains(what))
    };
    has(log, "Oops: int3") && has(&log.with_extension("qemu"), "executes a breakpoint that is gone")
}

/// Reason why the agent of a booting lab sent no handshake.
#[derive(Debug, thiserror::Error)]
enum HandshakeFailure {
    #[error(transparent)]
    Os(#[from] io::Error),
    #[error("QEMU exited immediately ({0})")]
    Ended(String),
    #[error("QEMU did not connect")]
    NotConnected,
    #[error("the lab host exited before its agent connected")]
    HungUp,
    #[error("unexpected first frame {0:?}")]
    Other(FrameKind),
    #[error("no handshake from the agent: {0}")]
    NoGreeting(#[source] io::Error),
}

/// Waits until QEMU connects to the socket of the agent's serial port.
fn accept(
    listener: &UnixListener,
    deadline: Instant,
    ending: &QemuExit,
) -> Result<UnixStream, HandshakeFailure> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
        if let Some(how) = ending.wait(Duration::ZERO) {
            return Err(HandshakeFailure::Ended(how));
        }
        if Instant::now() >= deadline {
            return Err(HandshakeFailure::NotConnected);
        }
        ending.wait(Duration::from_millis(20));
    }
}

/// Waits for the agent's first frame, the handshake, and returns its text.
fn greeting(stream: &UnixStream, deadline: Instant) -> Result<String, HandshakeFailure> {
    let left = deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1));
    stream.set_read_timeout(Some(left))?;
    let mut input = stream.take(1 << 20);
    let hello = match read_frame(&mut input) {
        Ok(Some(Frame {
            kind: FrameKind::Hello,
            payload,
            ..
        })) => String::from_utf8_lossy(&payload).into_owned(),
        Ok(Some(frame)) => return Err(HandshakeFailure::Other(frame.kind)),
        Ok(None) => return Err(HandshakeFailure::HungUp),
        Err(error) => return Err(HandshakeFailure::NoGreeting(error)),
    };
    stream.set_read_timeout(None)?;
    Ok(hello)
}

/// Writes the lab's initrd to a temporary directory. The directory is removed when the returned
/// [`TempDir`] is dropped.
fn make_initrd(
    host: &GuestImages,
    binaries: &LabBinaries,
    options: &LabOptions,
) -> Result<(TempDir, PathBuf), LabError> {
    let error = |path: &Path| {
        let path = path.to_owned();
        |source| LabError::File { path, source }
    };
    let scratch = tempfile::tempdir().map_err(error(&std::env::temp_dir()))?;
    let initrd = scratch.path().join("initrd");
    write_initrd(&initrd, host, artefacts::images()?, binaries, options).map_err(error(&initrd))?;
    Ok((scratch, initrd))
}
