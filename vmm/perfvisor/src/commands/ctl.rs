//! `perfvisor ctl`: what an operator can do to a running VM.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};

use super::{DONE, print};
use crate::exit::ExitStatus;
use control_api::client::{Client, ClientError};
use control_api::protocol::{Call, VmInfo, VmState};
use control_api::request;
use perf_core::SharePolicy;

/// How long vCPUs may take to leave the guest, and a VM to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(10);
/// Largest filter file, so that it fits a request.
const MAX_FILTER: u64 = 32 << 10;

/// `perfvisor ctl`.
#[derive(Clone, Debug, Args)]
#[command(arg_required_else_help = false)]
pub struct CtlArgs {
    /// The VM, as perfvisor ps shows it.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// What can be done to a VM.
#[derive(Clone, Debug, Subcommand)]
pub enum Action {
    /// Take all vCPUs out of the guest.
    Pause,
    /// Let them go on.
    Resume,
    /// End the VM.
    Stop,
    /// Who gets the host's counters when they run out.
    Share {
        /// guest-first, operator-first or strict.
        policy: String,
    },
    /// Which events the guest may count from now on.
    Filter {
        /// File as for --pmu-filter.
        file: PathBuf,
    },
}

/// Does it.
///
/// # Errors
/// One line for the user.
pub fn ctl(args: &CtlArgs) -> Result<ExitStatus, String> {
    // Bad input is found before the VM is spoken to.
    let (call, done) = match &args.action {
        Action::Pause => (Call::Pause, "paused"),
        Action::Resume => (Call::Resume, "running"),
        Action::Stop => (Call::Stop, "stopped"),
        Action::Share { policy } => {
            policy
                .parse::<SharePolicy>()
                .map_err(|why| format!("invalid value '{policy}' for share: {why}"))?;
            let policy = policy.clone();
            (Call::Share { policy }, "sharing policy changed")
        }
        Action::Filter { file } => {
            let toml = filter_text(file)?;
            (Call::Filter { toml }, "event filter changed")
        }
    };
    let mut client = Client::connect(Some(&args.name)).map_err(|e| e.to_string())?;
    match args.action {
        Action::Pause => pause(&mut client)?,
        Action::Stop => stop(&mut client)?,
        Action::Resume | Action::Share { .. } | Action::Filter { .. } => {
            client.call(call).map_err(|e| e.to_string())?;
        }
    }
    print(&format!("{}: {done}\n", args.name))?;
    Ok(DONE)
}

fn filter_text(file: &Path) -> Result<String, String> {
    let name = file.display();
    let mut text = String::new();
    // Read once, and within bounds: it may be a pipe, or have no end.
    File::open(file)
        .and_then(|file| file.take(MAX_FILTER + 1).read_to_string(&mut text))
        .map_err(|e| format!("{name}: {e}"))?;
    if text.len() as u64 > MAX_FILTER {
        return Err(format!(
            "{name}: a filter for a running VM has at most {MAX_FILTER} bytes"
        ));
    }
    vpmu::EventFilter::from_toml(&text).map_err(|e| e.to_string())?;
    Ok(text)
}

/// Pauses, and waits until no vCPU is in the guest.
fn pause(client: &mut Client) -> Result<(), String> {
    let until = Instant::now() + PATIENCE;
    let mut info: VmInfo = client.call(request::Pause).map_err(|e| e.to_string())?;
    while info.parked < info.vcpus {
        if info.state != VmState::Paused {
            return Err(format!(
                "the VM is {} again: somebody else controls it too",
                info.state
            ));
        }
        if Instant::now() > until {
            return Err(format!(
                "only {} of {} vCPUs have left the guest; the VM is pausing",
                info.parked, info.vcpus
            ));
        }
        std::thread::sleep(LOOK);
        info = client.call(request::Status).map_err(|e| e.to_string())?;
    }
    Ok(())
}

/// Stops, and waits until the VM's process has let go of the socket.
fn stop(client: &mut Client) -> Result<(), String> {
    let until = Instant::now() + PATIENCE;
    let mut result: Result<VmInfo, ClientError> = client.call(request::Stop);
    loop {
        match result {
            Err(e) if e.is_gone() => return Ok(()),
            Err(e) => return Err(e.to_string()),
            Ok(_) if Instant::now() > until => return Err("the VM has not ended yet".into()),
            Ok(_) => {}
        }
        std::thread::sleep(LOOK);
        result = client.call(request::Status);
    }
}
