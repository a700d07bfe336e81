//! Snapshots for the API: the process that writes snapshot files, and the device configuration in
//! the state files.
//!
//! The API process cannot open files once its VM is running. Before that, it therefore starts
//! another process, which copies memory and state of the VM through the control socket. Requests
//! and replies are lines of JSON on the standard input and output of that process.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use control_api::client::{Client, REPLY_TIMEOUT};
use firecracker_api::types::VmConfig;
use operator::commands::snapshot::{self as writer, SnapshotCommandError};
use operator::snapshot_files::read_state;
use perf_core::error_line;
use sandbox::privileges;
use serde::{Deserialize, Serialize};
use snapshot::format::{VERSION, optional_field, with_optional_field};
use snapshot::state::SavedDevice;
use snapshot::{SnapshotFormatError, decode};

/// Name of the optional field of a state file that describes the devices of the VM, in the format
/// of the body of `GET /vm/config`.
const CONFIG_FIELD: &str = "_vm_config";
/// Maximum size of a request or a reply, in bytes.
const MAX_LINE: u64 = 1 << 20;

/// A request to save the VM in two files, sent to the process that writes snapshots.
#[derive(Debug, Serialize, Deserialize)]
struct SaveRequest {
    state: PathBuf,
    memory: PathBuf,
    config: VmConfig,
}

/// Error returned when the state file of a snapshot is rejected.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotStateFileError {
    /// The state file cannot be read.
    #[error("it cannot be read")]
    Read(#[source] io::Error),
    /// The file is not a valid state file.
    #[error(transparent)]
    Format(#[from] SnapshotFormatError),
    /// The device configuration in the state file is invalid.
    #[error("its field {CONFIG_FIELD} is invalid")]
    Config(#[source] serde_json::Error),
}

/// The process that writes snapshots of a VM. The process exits when this value is dropped.
pub struct SnapshotWriter {
    requests: ChildStdin,
    replies: BufReader<ChildStdout>,
}

impl SnapshotWriter {
    /// Starts the process that writes snapshots. The kernel terminates it when the calling process
    /// exits.
    pub fn start(program: &Path, socket: &Path) -> io::Result<Self> {
        let mut child = Command::new(program)
            .arg0("perfvisor")
            .args(["--parent", &std::process::id().to_string(), "save-snapshots"])
            .arg(socket)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let requests = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let replies = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Self {
            requests,
            replies: BufReader::new(replies),
        })
    }

    /// Saves the VM to the files `state` and `memory`.
    pub fn save(&mut self, state: &str, memory: &str, config: &VmConfig) -> Result<(), String> {
        let request = SaveRequest {
            state: state.into(),
            memory: memory.into(),
            config: config.clone(),
        };
        let error: Option<String> = write_line(&mut self.requests, &request)
            .and_then(|()| read_line(&mut self.replies))
            .and_then(|reply| reply.ok_or(io::ErrorKind::UnexpectedEof.into()))
            .map_err(|e| format!("the process that writes snapshots: {}", error_line(&e)))?;
        error.map_or(Ok(()), Err)
    }
}

fn write_line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

/// Reads one line and parses it as JSON. Returns `None` at end of file.
fn read_line<T: serde::de::DeserializeOwned>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    from.take(MAX_LINE).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

/// `perfvisor save-snapshots`: writes snapshots until the parent process exits.
///
/// # Errors
/// Returns an error if a request is invalid or a reply cannot be sent.
pub fn save_snapshots(socket: &Path) -> io::Result<()> {
    // Guest memory passes through this process and must not be written to a core dump.
    privileges::forbid_core_dumps();
    let mut requests = io::stdin().lock();
    while let Some(request) = read_line::<SaveRequest>(&mut requests)? {
        let error = save(socket, &request).err().map(|e| error_line(&e));
        write_line(&mut io::stdout(), &error)?;
    }
    Ok(())
}

fn save(socket: &Path, request: &SaveRequest) -> Result<(), SnapshotCommandError> {
    let mut client = Client::connect_at(socket, None, REPLY_TIMEOUT)?;
    let config = serde_json::to_value(&request.config).map_err(SnapshotFormatError::Body)?;
    writer::save(&mut client, &request.state, &request.memory, |state| {
        with_optional_field(&state, CONFIG_FIELD, config)
    })
}

/// Returns the device configuration in the state file at `path`, with the MAC addresses that the
/// guest's network devices had when the state was saved.
pub fn read_config(path: &Path) -> Result<VmConfig, SnapshotStateFileError> {
    let bytes = read_state(path).map_err(SnapshotStateFileError::Read)?;
    let machine = decode(&bytes)?;
    let config = optional_field(&bytes, CONFIG_FIELD)?;
    // A state file written by `perfvisor ctl` contains no device configuration.
    let config = config.map(serde_json::from_value).transpose();
    let mut config: VmConfig = config
        .map_err(SnapshotStateFileError::Config)?
        .unwrap_or_default();
    for (n, interface) in config.network_interfaces.iter_mut().enumerate() {
        let name = format!("net{n}");
        let device = machine.devices.iter().find(|device| device.name == name);
        interface.guest_mac = device.and_then(mac).or(interface.guest_mac.take());
    }
    Ok(config)
}

/// Returns the MAC address of a network device, read from the first six bytes of its configuration
/// space.
fn mac(device: &SavedDevice) -> Option<String> {
    let address = device.config.0.get(..6)?;
    let bytes: Vec<String> = address.iter().map(|byte| format!("{byte:02x}")).collect();
    Some(bytes.join(":"))
}

/// Returns the format version written by this program, in Firecracker's notation.
pub fn format_version() -> String {
    format!("v{VERSION}.0.0")
}

/// Returns the format version of the state file at `path`.
pub fn describe(path: &Path) -> Result<String, SnapshotStateFileError> {
    match decode(&read_state(path).map_err(SnapshotStateFileError::Read)?) {
        Err(SnapshotFormatError::Version(version)) => Ok(format!("v{version}.0.0")),
        decoded => decoded.map(|_| format_version()).map_err(Into::into),
    }
}
