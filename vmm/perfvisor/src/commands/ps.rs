//! `perfvisor ps`: the running VMs.

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;

use super::{CommandError, DONE, OutputError, print};
use crate::exit::ExitStatus;
use control_api::client::{Client, ClientError};
use control_api::place;
use control_api::protocol::VmInfo;
use perf_core::error_line;

/// How long a VM may take to say what it is: a list of VMs is wanted at once.
const PATIENCE: Duration = Duration::from_secs(1);

/// `perfvisor ps`.
#[derive(Clone, Debug, Args)]
pub struct PsArgs {
    /// Print one JSON object for each VM.
    #[arg(long)]
    pub json: bool,
}

/// Lists the VMs of this user. Sockets of VMs that were killed are removed.
///
/// # Errors
/// [`CommandError`].
pub fn ps(args: &PsArgs) -> Result<ExitStatus, CommandError> {
    let dir = place::directory();
    let names = place::names(&dir).map_err(ClientError::from)?;
    // Those that do not respond are waited for together.
    let seen: Vec<_> = std::thread::scope(|scope| {
        let (dir, ask) = (&dir, |dir, name: &str| {
            Client::connect_within(dir, Some(name), PATIENCE).map(|client| client.info().clone())
        });
        let asked: Vec<_> = names
            .iter()
            .map(|name| (name, scope.spawn(move || ask(dir, name))))
            .collect();
        asked
            .into_iter()
            .filter_map(|(name, vm)| Some((name.clone(), vm.join().ok()?)))
            .collect()
    });
    let mut vms = Vec::new();
    for (name, vm) in seen {
        match vm {
            Ok(vm) => vms.push(Seen::Vm(Box::new(vm))),
            Err(e) if e.is_silence() => {
                log::warn!("{name}: {}", error_line(&e));
                vms.push(Seen::Silent(name));
            }
            // It ended meanwhile, or another version of Perfvisor runs it.
            Err(e) => log::warn!("{name}: {}", error_line(&e)),
        }
    }
    if args.json {
        let mut out = String::new();
        for vm in &vms {
            let line = match vm {
                Seen::Vm(vm) => serde_json::to_string(vm),
                Seen::Silent(name) => serde_json::to_string(&Silent {
                    name,
                    state: "not_responding",
                }),
            };
            let line = line.map_err(OutputError::from)?;
            let _ = writeln!(out, "{line}");
        }
        print(&out)?;
    } else {
        print(&table(&vms))?;
    }
    Ok(DONE)
}

/// A VM in the list.
enum Seen {
    /// What it says of itself.
    Vm(Box<VmInfo>),
    /// It is there, and says nothing: its name.
    Silent(String),
}

/// What is printed as JSON of a VM that says nothing.
#[derive(serde::Serialize)]
struct Silent<'a> {
    name: &'a str,
    state: &'static str,
}

fn table(vms: &[Seen]) -> String {
    let mut rows = vec![
        [
            "NAME", "PID", "VCPUS", "THREADS", "STATE", "UPTIME", "PMU", "CONSOLE", "GUEST",
        ]
        .map(str::to_owned),
    ];
    let unknown = || "-".to_owned();
    rows.extend(vms.iter().map(|vm| match vm {
        Seen::Vm(vm) => [
            vm.name.clone(),
            vm.pid.to_string(),
            of_most(vm),
            threads(vm),
            vm.state.to_string(),
            uptime(vm.uptime_ms / 1000),
            vm.pmu.clone(),
            consoles(vm),
            vm.guest.clone(),
        ],
        Seen::Silent(name) => [
            name.clone(),
            unknown(),
            unknown(),
            unknown(),
            "not responding".to_owned(),
            unknown(),
            unknown(),
            unknown(),
            unknown(),
        ],
    }));
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..9).map(width).collect();
    let mut out = String::new();
    for row in &rows {
        let mut line = String::new();
        for (text, width) in row.iter().zip(&widths) {
            let _ = write!(line, "{text:<width$}  ");
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

/// Where the consoles are.
fn consoles(vm: &VmInfo) -> String {
    match vm.virtio_console.as_str() {
        "" => vm.console.clone(),
        virtio => format!("{},hvc0:{virtio}", vm.console),
    }
}

/// The threads of the vCPUs, in the order of these: each number, or the first and the last of those in a row.
fn threads(vm: &VmInfo) -> String {
    let runs = vm.threads.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    let text = |run: &[u32]| match run {
        [first, _, .., last] => format!("{first}-{last}"),
        [first, last] => format!("{first},{last}"),
        [one] => one.to_string(),
        [] => String::new(),
    };
    runs.map(text).collect::<Vec<_>>().join(",")
}

/// How many vCPUs there are, of how many if there can be more.
pub(super) fn of_most(vm: &VmInfo) -> String {
    match vm.max_vcpus {
        max if max > vm.vcpus => format!("{} of {max}", vm.vcpus),
        _ => vm.vcpus.to_string(),
    }
}

fn uptime(seconds: u64) -> String {
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}
