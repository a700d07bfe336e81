//! `perfvisor ctl`: controls a running VM.

use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};

use super::limits::limits_text;
use super::migrate::{self, MigrateError, MigrateOptions};
use super::ps::vcpu_count_text;
use super::snapshot::{self, SnapshotCommandError};
use super::{CommandOutputError, DONE, OperatorCommandError, connect, print};
use crate::exit::ExitStatus;
use crate::input;
use crate::values::{integer_in_range, parse_downtime, parse_seconds};
use control_api::balloon::BalloonInfo;
use control_api::client::{Client, ClientError};
use control_api::migration::MigrationAddress;
use control_api::protocol::{Call, VcpuPlugStatus, VmInfo, VmSettings, VmState};
use control_api::request;
use diagnostics::vcpu_names;
use perf_core::{SharePolicy, UnknownSharePolicy};
use virtio_devices::balloon::config::parse_size_mib;
use vpmu::filter::EventFilterFileError;

/// Timeout for vCPUs to stop running the guest and for a VM to terminate.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the state of the VM is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Maximum size of a filter file, in bytes, chosen to fit into a request.
const MAX_FILTER: u64 = 32 << 10;

/// `perfvisor ctl`.
#[derive(Clone, Debug, Args)]
#[command(arg_required_else_help = false)]
pub struct CtlArgs {
    /// Name of the VM, as shown by perfvisor ps.
    #[arg(
        value_name = "NAME",
        required_unless_present = "socket",
        conflicts_with = "socket"
    )]
    pub name: Option<String>,
    /// Use the VM's control socket at this path instead of a name.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Action to perform.
    #[command(subcommand)]
    pub action: CtlAction,
}

/// An action on a VM.
#[derive(Clone, Debug, Subcommand)]
pub enum CtlAction {
    /// Pause all vCPUs.
    Pause,
    /// Resume all vCPUs.
    Resume,
    /// Press the power button, so that the guest powers off.
    Powerdown,
    /// Terminate the VM immediately, without notice to the guest.
    Stop,
    /// Show the state, the number of vCPUs, the PMU with its backing and filter, and the memory.
    Status {
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Show the rate limits of the devices, and how often each limit has paused its device.
    Limits {
        /// Print a JSON array.
        #[arg(long)]
        json: bool,
    },
    /// Change the number of vCPUs to N. Requires a VM started with --cpus N,max=M.
    Vcpus {
        /// Number of vCPUs, 1 to M.
        #[arg(value_name = "N", allow_negative_numbers = true, value_parser = integer_in_range(1..=64u32))]
        count: u32,
        /// Set the time to wait for the guest, in seconds.
        #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
        wait: Duration,
    },
    /// Show the balloon or change its size. Requires a VM started with --balloon.
    Balloon {
        /// Size of the balloon in MiB, or a number with M, G or T. The guest returns as much memory
        /// to the host as it can.
        #[arg(value_name = "SIZE", allow_negative_numbers = true, value_parser = parse_size_mib)]
        size_mib: Option<u32>,
        /// Print one JSON object.
        #[arg(long)]
        json: bool,
    },
    /// Save the VM to a new directory, from which `perfvisor run --restore DIR` continues it. The
    /// VM is paused while it is saved and then resumes.
    Snapshot {
        /// Directory of the snapshot, which must not exist.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
        /// Write only the memory that differs from this snapshot of the same VM, which
        /// `perfvisor run --restore DIR --restore-base BASE` also needs. If BASE is a diff itself,
        /// repeat the option for each snapshot that it is based on, up to 16 diffs.
        #[arg(long, value_name = "BASE")]
        diff: Vec<PathBuf>,
        /// Terminate the VM when the snapshot is on disk.
        #[arg(long)]
        stop: bool,
    },
    /// Move the VM to another process, which `perfvisor run --incoming ADDRESS` has started on this
    /// host or, with --stream, on any host. If that fails, the VM continues here.
    Migrate {
        /// Address of the waiting process: unix:PATH, or fd:N for an inherited, connected socket
        /// (implies --stream).
        #[arg(value_name = "ADDRESS")]
        address: MigrationAddress,
        /// Send the VM as bytes, to another host whose socket is forwarded (ssh -L). Memory is sent
        /// while the guest runs. Memory that the guest writes meanwhile is sent again, in up to 30
        /// rounds.
        #[arg(long)]
        stream: bool,
        /// With --stream, pause the VM when a round takes at most this time, in milliseconds
        /// [default: 300]
        #[arg(long, value_name = "MS", value_parser = parse_downtime)]
        downtime: Option<Duration>,
        /// With --stream, pause the VM after 30 rounds even if the last one took longer.
        #[arg(long)]
        force: bool,
    },
    /// Select whether the guest or the operator gets the host's counters if there are too few.
    Share {
        /// Policy: guest-first, operator-first or strict.
        policy: String,
    },
    /// Set the events that the guest may count from now on.
    Filter {
        /// File in the format of --pmu-filter.
        file: PathBuf,
    },
}

/// Errors of `perfvisor ctl`.
#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    #[error(transparent)]
    Command(#[from] OperatorCommandError),
    #[error("invalid value '{value}' for share")]
    Share {
        value: String,
        #[source]
        source: UnknownSharePolicy,
    },
    #[error("{}: must be at most {MAX_FILTER} bytes for a running VM", .0.display())]
    FilterTooLarge(PathBuf),
    #[error("{}", path.display())]
    Filter {
        path: PathBuf,
        #[source]
        source: EventFilterFileError,
    },
    #[error("the VM is {0} again: another client controls it too")]
    NotPaused(VmState),
    #[error("only {parked} of {vcpus} vCPUs have paused so far")]
    Pausing { parked: u32, vcpus: u32 },
    #[error("the guest refused to eject vCPU {vcpu} ({why})", why = ost_status(*.status))]
    Kept { vcpu: u32, status: u32 },
    #[error(
        "the guest did not eject {vcpus} within {} s; the VM has {present} vCPUs; check that the \
        guest's kernel supports ACPI CPU hot-plug",
        wait.as_secs_f64()
    )]
    NoAnswer {
        vcpus: String,
        wait: Duration,
        present: usize,
    },
    #[error("{0} is still being removed")]
    Leaving(String),
    #[error("the VM has no balloon; start it with --balloon")]
    NoBalloon,
    #[error("the VM has not exited yet")]
    NotEnded,
    #[error(transparent)]
    Snapshot(#[from] SnapshotCommandError),
    #[error(transparent)]
    Migrate(#[from] MigrateError),
}

impl From<ClientError> for CtlError {
    fn from(error: ClientError) -> Self {
        Self::Command(error.into())
    }
}

impl From<CommandOutputError> for CtlError {
    fn from(error: CommandOutputError) -> Self {
        Self::Command(error.into())
    }
}

/// Performs the action of `perfvisor ctl` on the VM.
///
/// # Errors
/// Returns [`CtlError`] if the VM cannot perform the action.
pub fn ctl(args: &CtlArgs) -> Result<ExitStatus, CtlError> {
    // Detect invalid arguments before contacting the VM.
    let (call, done) = match &args.action {
        CtlAction::Pause => (Call::Pause, "paused"),
        CtlAction::Resume => (Call::Resume, "running"),
        CtlAction::Stop => (Call::Stop, "stopped"),
        CtlAction::Powerdown => (Call::Powerdown, "power button pressed"),
        CtlAction::Status { .. } => (Call::Status, ""),
        CtlAction::Limits { .. } => (Call::RateLimiters, ""),
        CtlAction::Vcpus { count, .. } => (Call::Vcpus { count: *count }, ""),
        CtlAction::Balloon { .. } => (Call::Status, ""),
        CtlAction::Snapshot { .. } | CtlAction::Migrate { .. } => (Call::Snapshot, ""),
        CtlAction::Share { policy } => share_call(policy)?,
        CtlAction::Filter { file } => {
            let toml = filter_text(file)?;
            (Call::Filter { toml }, "event filter changed")
        }
    };
    let mut client = connect(args.name.as_deref(), args.socket.as_deref())?;
    match &args.action {
        CtlAction::Pause => pause(&mut client)?,
        CtlAction::Stop => stop(&mut client)?,
        CtlAction::Status { json } => return show_status(&mut client, *json),
        CtlAction::Limits { json } => return show_limits(&mut client, *json),
        CtlAction::Vcpus { count, wait } => {
            vcpus(&mut client, *count, *wait)?;
            return print_status(&client.call(request::Status)?);
        }
        CtlAction::Balloon { size_mib, json } => {
            balloon(&mut client, *size_mib, *json)?;
            return Ok(DONE);
        }
        CtlAction::Snapshot { dir, diff, stop } => {
            return take_snapshot(&mut client, dir, diff, *stop);
        }
        CtlAction::Migrate {
            address,
            stream,
            downtime,
            force,
        } => {
            let options = MigrateOptions {
                stream: *stream,
                downtime: *downtime,
                force: *force,
            };
            print(&migrate::migrate(client, address, options)?)?;
            return Ok(DONE);
        }
        CtlAction::Resume | CtlAction::Powerdown | CtlAction::Share { .. } | CtlAction::Filter { .. } => {
            client.call(call)?;
        }
    }
    print(&format!("{}: {done}\n", client.info().name))?;
    Ok(DONE)
}

/// Prints the state and the settings of the VM.
fn show_status(client: &mut Client, json: bool) -> Result<ExitStatus, CtlError> {
    let info: VmInfo = client.call(request::Status)?;
    if json {
        return print_json(&info);
    }
    print_status(&info)?;
    print(&settings_text(&info))?;
    Ok(DONE)
}

/// Prints the rate limits of the VM's devices.
fn show_limits(client: &mut Client, json: bool) -> Result<ExitStatus, CtlError> {
    let limiters = client.call(request::RateLimiters)?;
    if json {
        return print_json(&limiters);
    }
    print(&limits_text(&limiters))?;
    Ok(DONE)
}

/// Saves the VM to the directory `dir`. If `stop` is set, terminates the VM.
fn take_snapshot(
    client: &mut Client,
    dir: &Path,
    diff: &[PathBuf],
    stop: bool,
) -> Result<ExitStatus, CtlError> {
    let saved = snapshot::take(client, dir, diff, stop)?;
    if stop {
        wait_for_end(client)?;
    }
    print(&format!(
        "{}: snapshot in {}, {saved}\n",
        client.info().name,
        dir.display(),
    ))?;
    Ok(DONE)
}

/// Returns the request that sets a sharing policy, and the message to print on success.
fn share_call(policy: &str) -> Result<(Call, &'static str), CtlError> {
    let policy = policy.to_owned();
    let done = match policy.parse() {
        Ok(SharePolicy::GuestFirst) => "sharing policy is guest-first now",
        Ok(SharePolicy::OperatorFirst) => "sharing policy is operator-first now",
        Ok(SharePolicy::Strict) => "sharing policy is strict now",
        Err(source) => {
            return Err(CtlError::Share {
                value: policy,
                source,
            });
        }
    };
    Ok((Call::Share { policy }, done))
}

fn print_json(value: &impl serde::Serialize) -> Result<ExitStatus, CtlError> {
    let text = serde_json::to_string(value).map_err(CommandOutputError::from)?;
    print(&(text + "\n"))?;
    Ok(DONE)
}

fn filter_text(path: &Path) -> Result<String, CtlError> {
    let mut text = String::new();
    // Read the file once and with a limit, because it may be a pipe or endless.
    input::open(path)
        .and_then(|file| file.take(MAX_FILTER + 1).read_to_string(&mut text))
        .map_err(OperatorCommandError::file(path))?;
    if text.len() as u64 > MAX_FILTER {
        return Err(CtlError::FilterTooLarge(path.to_owned()));
    }
    vpmu::EventFilter::from_toml(&text).map_err(|source| CtlError::Filter {
        path: path.to_owned(),
        source,
    })?;
    Ok(text)
}

/// Pauses the VM and waits until no vCPU runs the guest.
fn pause(client: &mut Client) -> Result<(), CtlError> {
    let until = Instant::now() + TIMEOUT;
    let mut info: VmInfo = client.call(request::Pause)?;
    while info.parked < info.vcpus {
        if info.state != VmState::Paused {
            return Err(CtlError::NotPaused(info.state));
        }
        if Instant::now() > until {
            return Err(CtlError::Pausing {
                parked: info.parked,
                vcpus: info.vcpus,
            });
        }
        std::thread::sleep(POLL_INTERVAL);
        info = client.call(request::Status)?;
    }
    Ok(())
}

fn print_status(info: &VmInfo) -> Result<ExitStatus, CtlError> {
    let plural = if info.vcpus.max(info.max_vcpus) == 1 {
        ""
    } else {
        "s"
    };
    print(&format!(
        "{}: {}, {} vCPU{plural}\n",
        info.name,
        info.state,
        vcpu_count_text(info)
    ))?;
    if !matches!(info.console.as_str(), "" | "tty" | "none") {
        print(&format!("ttyS0 at {}\n", info.console))?;
    }
    if !info.virtio_console.is_empty() {
        print(&format!("hvc0 at {}\n", info.virtio_console))?;
    }
    Ok(DONE)
}

/// Formats the VM's PMU and settings as lines of `ctl status`.
fn settings_text(info: &VmInfo) -> String {
    let mut text = format!("PMU {}", info.pmu);
    if let Some(settings) = &info.settings {
        let VmSettings {
            backing,
            share,
            filter,
            memory_bytes,
            balloon,
        } = settings;
        let _ = write!(
            text,
            ", backing {backing}, sharing {share}\nfilter {filter}\nmemory {} MiB",
            memory_bytes >> 20
        );
        if let Some(balloon) = balloon {
            let _ = write!(text, "\n{}", balloon_text(balloon));
        }
    }
    text + "\n"
}

/// Formats the state of the balloon as one line of text.
fn balloon_text(balloon: &BalloonInfo) -> String {
    let mut text = format!(
        "balloon {} MiB, target {} MiB, {} MiB released so far",
        balloon.actual_bytes >> 20,
        balloon.target_bytes >> 20,
        balloon.released_bytes >> 20
    );
    let statistics = balloon.statistics.unwrap_or_default();
    if let (Some(available), Some(total)) = (statistics.available_memory, statistics.total_memory) {
        let _ = write!(
            text,
            "; the guest reports {} of {} MiB available",
            available >> 20,
            total >> 20
        );
    }
    text
}

/// Changes the size of the balloon if `size_mib` is given, and prints the state of the balloon.
fn balloon(client: &mut Client, size_mib: Option<u32>, json: bool) -> Result<(), CtlError> {
    let balloon: BalloonInfo = match size_mib {
        Some(size_mib) => client.call(request::Balloon { size_mib })?,
        None => {
            let info: VmInfo = client.call(request::Status)?;
            let balloon = info.settings.and_then(|settings| settings.balloon);
            balloon.ok_or(CtlError::NoBalloon)?
        }
    };
    if json {
        let text = serde_json::to_string(&balloon).map_err(CommandOutputError::from)?;
        print(&(text + "\n"))?;
    } else {
        print(&format!("{}: {}\n", client.info().name, balloon_text(&balloon)))?;
    }
    Ok(())
}

/// Adds or removes vCPUs and waits for the guest's response.
fn vcpus(client: &mut Client, count: u32, wait: Duration) -> Result<(), CtlError> {
    let start = Instant::now();
    let before: VcpuPlugStatus = client.call(request::VcpuPlug)?;
    let mut plug: VcpuPlugStatus = client.call(request::Vcpus { count })?;
    // The status also contains refusals of earlier requests, so select those of the vCPUs of this
    // request.
    let ours = plug.asked_for.clone();
    let came: Vec<u32> = plug
        .present
        .iter()
        .copied()
        .filter(|v| !before.present.contains(v))
        .collect();
    loop {
        let refused = plug.refused.iter().find(|refusal| ours.contains(&refusal.vcpu));
        if let Some(refusal) = refused {
            let _: VcpuPlugStatus = client.call(request::VcpusWithdraw)?;
            return Err(CtlError::Kept {
                vcpu: refusal.vcpu,
                status: refusal.status,
            });
        }
        let waits = !plug.asked_for.is_empty() || !plug.leaving.is_empty();
        let unnoticed: Vec<u32> = came
            .iter()
            .copied()
            .filter(|v| plug.unnoticed.contains(v))
            .collect();
        if !waits && unnoticed.is_empty() {
            log::info!(
                "the guest answered after {:.1} ms",
                start.elapsed().as_secs_f64() * 1e3
            );
            return Ok(());
        }
        if start.elapsed() > wait {
            if !plug.asked_for.is_empty() {
                let plug: VcpuPlugStatus = client.call(request::VcpusWithdraw)?;
                let stay: Vec<u32> = ours
                    .iter()
                    .copied()
                    .filter(|v| plug.present.contains(v))
                    .collect();
                return Err(CtlError::NoAnswer {
                    vcpus: vcpu_names(&stay),
                    wait,
                    present: plug.present.len(),
                });
            }
            if !plug.leaving.is_empty() {
                return Err(CtlError::Leaving(vcpu_names(&plug.leaving)));
            }
            log::warn!(
                "the guest did not acknowledge {} within {} s; check that its kernel supports ACPI \
                CPU hot-plug",
                vcpu_names(&unnoticed),
                wait.as_secs_f64()
            );
            return Ok(());
        }
        std::thread::sleep(POLL_INTERVAL);
        plug = client.call(request::VcpuPlug)?;
    }
}

/// Returns the meaning of an _OST status (ACPI 6.5, table 6.75).
fn ost_status(status: u32) -> String {
    let words = match status {
        0x01 => "a failure that it does not name",
        0x02 => "it does not know the request",
        0x80 => "it does not take requests for this vCPU",
        0x81 => "the vCPU is in use by an application",
        0x82 => "the vCPU is busy",
        0x83 => "something depends on the vCPU",
        _ => return format!("status {status:#x}"),
    };
    format!("status {status:#x}: {words}")
}

/// Stops the VM and waits until its process has closed the socket.
fn stop(client: &mut Client) -> Result<(), CtlError> {
    match client.call(request::Stop) {
        Err(e) if e.is_gone() => Ok(()),
        Err(e) => Err(e.into()),
        Ok(_) => wait_for_end(client),
    }
}

/// Waits until the process of a stopped VM has closed the socket.
fn wait_for_end(client: &mut Client) -> Result<(), CtlError> {
    let until = Instant::now() + TIMEOUT;
    let mut result: Result<VmInfo, ClientError> = client.call(request::Status);
    loop {
        match result {
            Err(e) if e.is_gone() => return Ok(()),
            Err(e) => return Err(e.into()),
            Ok(_) if Instant::now() > until => return Err(CtlError::NotEnded),
            Ok(_) => {}
        }
        std::thread::sleep(POLL_INTERVAL);
        result = client.call(request::Status);
    }
}
