//! `perfvisor firecracker`: Firecracker's command line and API for a VM of `perfvisor run`.
//!
//! A separate process serves the API. It starts `perfvisor run` as its child and controls the child
//! through the control socket. [`vm_process`] manages this child, [`snapshots`] another one that
//! writes snapshots, and [`log_output`] the destination of log messages.

mod log_output;
mod snapshots;
mod vm_process;

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use clap::Args;
use firecracker_api::API_VERSION;
use firecracker_api::fault::ApiFault;
use firecracker_api::http::DEFAULT_MAX_BODY;
use firecracker_api::routes::ApiCall;
use firecracker_api::server::ApiServer;
use firecracker_api::session::ApiSession;
use firecracker_api::types::{InstanceState, Logger, Metrics};
use mmds::config::MAX_SIZE_LIMIT;
use operator::commands::print;
use operator::exit::ExitStatus;
use operator::signals::StopSignals;
use sandbox::{ApiProcessConfinementError, paths};
use serde::de::DeserializeOwned;

use vm_process::{CheckCommandLine, VmProcess};

pub use log_output::init_log;
use snapshots::SnapshotStateFileError;
pub use snapshots::save_snapshots;

/// Identifier of a VM without `--id`, as in Firecracker.
const DEFAULT_ID: &str = "anonymous-instance";
/// Name of the option for the configuration file.
const CONFIG_FILE: &str = "--config-file";
/// Name of the option for the file with the initial data of the metadata service.
const METADATA: &str = "--metadata";
/// Maximum size of the configuration file and of the metadata file, in bytes.
const MAX_JSON_BYTES: u64 = 1 << 20;
/// Maximum value of `--http-api-max-payload-size`, in bytes.
const MAX_PAYLOAD_BYTES: usize = 1 << 24;

/// Options of `perfvisor firecracker`, with the names of Firecracker's.
#[derive(Clone, Debug, Args)]
#[command(disable_version_flag = true)]
pub struct FirecrackerArgs {
    /// Serve the API at this Unix socket.
    #[arg(long, value_name = "PATH", default_value = "/run/firecracker.socket")]
    pub api_sock: PathBuf,
    /// Set the name of the VM, as shown by `perfvisor ps`.
    #[arg(long, value_name = "ID", value_parser = parse_id)]
    pub id: Option<String>,
    /// Configure and start the VM from a JSON file.
    #[arg(long, value_name = "FILE")]
    pub config_file: Option<PathBuf>,
    /// Serve no API.
    #[arg(long, requires = "config_file")]
    pub no_api: bool,
    /// Append log messages to a file or named pipe.
    #[arg(long, value_name = "PATH")]
    pub log_path: Option<String>,
    /// Log messages from this level on: Error, Warning, Info, Debug, Trace or Off [default: Info]
    #[arg(long, value_name = "LEVEL")]
    pub level: Option<String>,
    /// Unsupported.
    #[arg(long, value_name = "MODULE", hide = true)]
    pub module: Option<String>,
    /// Show the level of messages. This option has no effect, because the level is always shown.
    #[arg(long)]
    pub show_level: bool,
    /// Unsupported.
    #[arg(long, hide = true)]
    pub show_log_origin: bool,
    /// Write metrics to a file or named pipe on FlushMetrics.
    #[arg(long, value_name = "PATH")]
    pub metrics_path: Option<String>,
    /// Log the time from this start of the process until the API is available, in microseconds
    /// (CLOCK_MONOTONIC).
    #[arg(long, value_name = "US")]
    pub start_time_us: Option<u64>,
    /// Also log this CPU time, in microseconds.
    #[arg(long, value_name = "US")]
    pub start_time_cpu_us: Option<u64>,
    /// Also log this CPU time of the parent, in microseconds.
    #[arg(long, value_name = "US")]
    pub parent_cpu_time_us: Option<u64>,
    /// Log a warning that the file has no effect. Perfvisor's own filters apply.
    #[arg(long, value_name = "FILE", conflicts_with = "no_seccomp")]
    pub seccomp_filter: Option<PathBuf>,
    /// Log a warning that the option has no effect. Perfvisor's filters stay active.
    #[arg(long)]
    pub no_seccomp: bool,
    /// Limit the body of a request to this size, in bytes.
    #[arg(long, value_name = "BYTES", default_value_t = DEFAULT_MAX_BODY, value_parser = parse_payload)]
    pub http_api_max_payload_size: usize,
    /// Attach devices to a PCI bus. This option has no effect, because devices are always attached
    /// to PCI.
    #[arg(long)]
    pub enable_pci: bool,
    /// Print the version of the API and of Perfvisor.
    #[arg(long)]
    pub version: bool,
    /// Unsupported.
    #[arg(long, hide = true)]
    pub boot_timer: bool,
    /// Print the version of the snapshot format.
    #[arg(long)]
    pub snapshot_version: bool,
    /// Print the format version of a snapshot's state file.
    #[arg(long, value_name = "FILE")]
    pub describe_snapshot: Option<PathBuf>,
    /// Set the document of the metadata service from a JSON file.
    #[arg(long, value_name = "FILE")]
    pub metadata: Option<PathBuf>,
    /// Limit the document of the metadata service to this size, in bytes [default: that of
    /// --http-api-max-payload-size, at most 61440]
    #[arg(long, value_name = "BYTES", value_parser = parse_metadata_limit)]
    pub mmds_size_limit: Option<usize>,
}

/// Error returned when `perfvisor firecracker` fails. Each message is one line.
#[derive(Debug, thiserror::Error)]
pub enum FirecrackerError {
    /// An option of Firecracker that Perfvisor does not support.
    #[error("{0}: unsupported: {1}")]
    Unsupported(&'static str, &'static str),
    /// An option or file is rejected, the VM does not start, or the requested text cannot be
    /// printed. Contains the error message.
    #[error("{0}")]
    Refused(String),
    /// A JSON file cannot be read.
    #[error("{0} {path}", path = .1.display())]
    ReadJson(&'static str, PathBuf, #[source] io::Error),
    /// A JSON file is too large.
    #[error("{0} {path}: more than {MAX_JSON_BYTES} bytes", path = .1.display())]
    JsonSize(&'static str, PathBuf),
    /// A file does not contain the expected JSON.
    #[error("{0} {path}", path = .1.display())]
    Json(&'static str, PathBuf, #[source] serde_json::Error),
    /// The state file of `--describe-snapshot` cannot be used.
    #[error("--describe-snapshot {}", .0.display())]
    DescribeSnapshot(PathBuf, #[source] SnapshotStateFileError),
    /// The socket of the API cannot be bound.
    #[error("--api-sock {}", .0.display())]
    Socket(PathBuf, #[source] io::Error),
    /// A system call failed.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
    /// The API process cannot be confined.
    #[error(transparent)]
    Confine(#[from] ApiProcessConfinementError),
}

fn os(call: &'static str) -> impl FnOnce(io::Error) -> FirecrackerError {
    move |source| FirecrackerError::Os(call, source)
}

fn refused(option: &str, fault: &ApiFault) -> FirecrackerError {
    FirecrackerError::Refused(format!("{option}: {}", fault.message))
}

/// Parses the identifier of a VM.
pub(crate) fn parse_id(text: &str) -> Result<String, String> {
    let is_valid =
        (1..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let id = text.to_owned();
    is_valid
        .then_some(id)
        .ok_or_else(|| "must have 1 to 64 letters, digits and dashes".into())
}

fn parse_payload(text: &str) -> Result<usize, String> {
    let bytes = text
        .parse()
        .ok()
        .filter(|bytes| (1..=MAX_PAYLOAD_BYTES).contains(bytes));
    bytes.ok_or_else(|| format!("must be between 1 and {MAX_PAYLOAD_BYTES}"))
}

fn parse_metadata_limit(text: &str) -> Result<usize, String> {
    let bytes = text
        .parse()
        .ok()
        .filter(|bytes| (1..=MAX_SIZE_LIMIT).contains(bytes));
    bytes.ok_or_else(|| format!("must be between 1 and {MAX_SIZE_LIMIT}"))
}

/// Serves the API until the VM terminates, or until a signal terminates the VM and this process.
///
/// # Errors
/// Returns [`FirecrackerError`] if an option is invalid or unsupported, or the VM of
/// `--config-file` does not start.
pub fn firecracker(args: &FirecrackerArgs, check: CheckCommandLine) -> Result<ExitStatus, FirecrackerError> {
    if let Some(text) = information(args)? {
        print(&text).map_err(|e| FirecrackerError::Refused(perf_core::error_line(&e)))?;
        return Ok(ExitStatus::PoweredOff);
    }
    check_unsupported(args)?;
    let signals = StopSignals::block().map_err(os("sigprocmask"))?;
    let mut session = session(args, check)?;
    if let Some(path) = &args.config_file {
        session
            .configure(read_json(CONFIG_FILE, path)?)
            .map_err(|fault| refused(CONFIG_FILE, &fault))?;
    }
    if let Some(path) = &args.metadata {
        let set = session.call(ApiCall::PutMmds(read_json(METADATA, path)?));
        set.map_err(|fault| refused(METADATA, &fault))?;
    }
    let listener = bind(args)?;
    let server = ApiServer::new(listener, args.http_api_max_payload_size).map_err(os("fcntl"))?;
    log_times(args);
    if args.config_file.is_some() {
        session.start().map_err(|fault| refused(CONFIG_FILE, &fault))?;
    }
    serve(server, session, &signals)
}

/// Returns the text to print for `--version`, `--snapshot-version` or `--describe-snapshot`, or
/// `None` without any of these options.
fn information(args: &FirecrackerArgs) -> Result<Option<String>, FirecrackerError> {
    if args.version {
        let own = env!("CARGO_PKG_VERSION");
        return Ok(Some(format!("Firecracker v{API_VERSION}\nPerfvisor v{own}\n")));
    }
    if args.snapshot_version {
        return Ok(Some(snapshots::format_version() + "\n"));
    }
    let Some(path) = &args.describe_snapshot else {
        return Ok(None);
    };
    let version = snapshots::describe(path);
    let version = version.map_err(|e| FirecrackerError::DescribeSnapshot(path.clone(), e))?;
    Ok(Some(version + "\n"))
}

/// Rejects options that Perfvisor does not support, and logs a warning for options without effect.
fn check_unsupported(args: &FirecrackerArgs) -> Result<(), FirecrackerError> {
    if args.boot_timer {
        let reason = "the VM has no boot timer device";
        return Err(FirecrackerError::Unsupported("--boot-timer", reason));
    }
    if args.no_seccomp || args.seccomp_filter.is_some() {
        log::warn!("--no-seccomp and --seccomp-filter have no effect: Perfvisor's filters apply");
    }
    Ok(())
}

/// Creates the API session for the VM, and applies the options for log messages and metrics.
fn session(
    args: &FirecrackerArgs,
    check: CheckCommandLine,
) -> Result<ApiSession<VmProcess>, FirecrackerError> {
    let backend = VmProcess::new(args.id.clone(), check);
    let id = args.id.clone().unwrap_or_else(|| DEFAULT_ID.into());
    let limit = args.mmds_size_limit;
    let limit = limit.unwrap_or(args.http_api_max_payload_size.min(MAX_SIZE_LIMIT));
    let session = ApiSession::new(backend, id, env!("CARGO_PKG_VERSION").into());
    let mut session = session.with_metadata_limit(limit);
    let logger = Logger {
        log_path: args.log_path.clone(),
        level: args.level.clone(),
        show_level: args.show_level.then_some(true),
        show_log_origin: args.show_log_origin.then_some(true),
        module: args.module.clone(),
    };
    if logger != Logger::default() {
        let set = session.call(ApiCall::PutLogger(logger));
        set.map_err(|fault| refused("logger options", &fault))?;
    }
    if let Some(path) = &args.metrics_path {
        let metrics_path = path.clone();
        let set = session.call(ApiCall::PutMetrics(Metrics { metrics_path }));
        set.map_err(|fault| refused("--metrics-path", &fault))?;
    }
    Ok(session)
}

/// Reads and parses the JSON file at `path`. Error messages name `option`.
fn read_json<T: DeserializeOwned>(option: &'static str, path: &Path) -> Result<T, FirecrackerError> {
    let failed = |e| FirecrackerError::ReadJson(option, path.into(), e);
    let mut bytes = Vec::new();
    let file = operator::input::open(path).map_err(failed)?;
    file.take(MAX_JSON_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_JSON_BYTES {
        return Err(FirecrackerError::JsonSize(option, path.into()));
    }
    serde_json::from_slice(&bytes).map_err(|e| FirecrackerError::Json(option, path.into(), e))
}

/// Binds the socket of the API. Replaces a socket without a listener.
fn bind(args: &FirecrackerArgs) -> Result<Option<UnixListener>, FirecrackerError> {
    let path = &args.api_sock;
    if args.no_api {
        return Ok(None);
    }
    let bound = paths::bind(path, None).map_err(|e| FirecrackerError::Socket(path.clone(), e))?;
    log::info!("API version {API_VERSION} at {}", path.display());
    Ok(Some(bound))
}

/// Logs the time since the start of the process, and the CPU time that this process and its parent
/// had used by then. The parent passes all three values as command-line options.
fn log_times(args: &FirecrackerArgs) {
    let Some(start) = args.start_time_us else { return };
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now =
        u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0) / 1000;
    log::info!(
        "API ready {} us after the start of the process (CPU time before: {} us own, {} us of the parent)",
        now.saturating_sub(start),
        args.start_time_cpu_us.unwrap_or(0),
        args.parent_cpu_time_us.unwrap_or(0)
    );
}

/// Answers API requests until the VM has terminated, or until a signal arrives before the VM has
/// started.
fn serve(
    mut server: ApiServer,
    mut session: ApiSession<VmProcess>,
    signals: &StopSignals,
) -> Result<ExitStatus, FirecrackerError> {
    let (mut is_confined, mut is_signalled) = (false, false);
    loop {
        if session.state() != InstanceState::NotStarted && !is_confined {
            sandbox::confine_front_end()?;
            is_confined = true;
        }
        let child = session.backend().take_descriptors();
        let mut others = vec![signals.as_fd()];
        others.extend(
            child
                .iter()
                .flat_map(|child| [child.process.as_fd(), child.messages.as_fd()]),
        );
        let ready = server
            .turn(&others, &mut |request| session.answer(request))
            .map_err(os("poll"))?;
        if let Some(child) = child {
            session.backend().put_descriptors(child);
        }
        if signals.take().is_some() {
            is_signalled = true;
            // If the VM does not answer, the kernel terminates it with this process.
            if !session.backend().stop() {
                return Ok(ExitStatus::Terminated);
            }
        }
        if ready.get(2) == Some(&true) {
            session.backend().relay_messages();
        }
        if ready.get(1) == Some(&true)
            && let Some(status) = session.backend().exit_status()
        {
            return Ok(if is_signalled {
                ExitStatus::Terminated
            } else {
                status
            });
        }
    }
}
