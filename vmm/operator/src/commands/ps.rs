//! `perfvisor ps`: lists the running VMs.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::{CommandOutputError, DONE, OperatorCommandError, one_line, print};
use crate::exit::ExitStatus;
use control_api::client::{Client, ClientError};
use control_api::peer;
use control_api::protocol::VmInfo;
use control_api::socket_dir::{self, ControlSocketError, SocketDir, SocketDirs};
use perf_core::error_line;

/// Timeout for a VM to describe itself.
const TIMEOUT: Duration = Duration::from_secs(1);

/// `perfvisor ps`.
#[derive(Clone, Debug, Args)]
pub struct PsArgs {
    /// Print one JSON object per VM.
    #[arg(long)]
    pub json: bool,
    /// Print only the names, for scripts, without connecting to the VMs.
    #[arg(long, conflicts_with = "json")]
    pub names: bool,
    /// List the VMs of all users, with user and socket.
    #[arg(short, long)]
    pub all: bool,
}

/// Lists the VMs in this user's default directory, or all VMs. Removes stale sockets of this user.
///
/// # Errors
/// Returns [`OperatorCommandError`] if the directory cannot be read.
pub fn ps(args: &PsArgs) -> Result<ExitStatus, OperatorCommandError> {
    let sockets = if args.all {
        all_users()
    } else {
        in_default_directory()?
    };
    if args.names {
        let lines = sockets.iter().map(|vm| format!("{}\n", one_line(&vm.label())));
        print(&lines.collect::<String>())?;
        return Ok(DONE);
    }
    // VMs are queried concurrently, so that several unresponsive VMs cost only one timeout.
    let seen: Vec<_> = std::thread::scope(|scope| {
        let ask = |vm: &VmSocket| {
            Client::connect_at(&vm.path, vm.owner, TIMEOUT).map(|client| client.info().clone())
        };
        let asked: Vec<_> = sockets
            .into_iter()
            .map(|vm| (vm.clone(), scope.spawn(move || ask(&vm))))
            .collect();
        asked
            .into_iter()
            .filter_map(|(vm, info)| Some((vm, info.join().ok()?)))
            .collect()
    });
    let mut vms = Vec::new();
    for (found, info) in seen {
        match info {
            Ok(info) => vms.push((found, Some(info))),
            Err(e) => {
                log::warn!("{}: {}", found.name, error_line(&e));
                // Do not list VMs that have terminated in the meantime or that run another version
                // of Perfvisor.
                if e.is_silence() {
                    vms.push((found, None));
                }
            }
        }
    }
    if args.json {
        let mut out = String::new();
        for (found, info) in &vms {
            let state = info.is_none().then_some("not_responding");
            let line = serde_json::to_string(&VmJson {
                name: info.is_none().then_some(&found.name),
                state,
                vm: info.as_ref(),
                user: found.owner.filter(|_| args.all),
                socket: args.all.then_some(&found.path),
            });
            let _ = writeln!(out, "{}", line.map_err(CommandOutputError::from)?);
        }
        print(&out)?;
    } else {
        print(&table(&vms, args.all))?;
    }
    Ok(DONE)
}

/// A control socket that was found in a socket directory.
#[derive(Clone)]
pub(crate) struct VmSocket {
    /// Name of the VM.
    pub(crate) name: String,
    /// Path of the socket.
    pub(crate) path: PathBuf,
    /// User ID of the owner of the socket directory; `None` if this user specified the directory.
    pub(crate) owner: Option<u32>,
}

impl VmSocket {
    /// Returns the VM's name, followed by `@` and the user if the owner is another user.
    pub(crate) fn label(&self) -> String {
        match self.owner {
            Some(owner) if owner != peer::own_uid() => format!("{}@{owner}", self.name),
            _ => self.name.clone(),
        }
    }
}

/// Returns the sockets in this user's default directory in sorted order.
pub(crate) fn in_default_directory() -> Result<Vec<VmSocket>, ClientError> {
    let dir = socket_dir::directory();
    let found = socket_dir::names(&dir)?.into_iter().map(|name| VmSocket {
        path: socket_dir::socket_path(&dir, &name),
        name,
        owner: None,
    });
    Ok(found.collect())
}

/// Returns the sockets of all users. Logs warnings about directories that are unreadable or
/// ignored.
pub(crate) fn all_users() -> Vec<VmSocket> {
    let places = SocketDirs::all_users();
    let list = |dirs: &[PathBuf]| {
        let dirs: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        one_line(&dirs.join(", "))
    };
    if !places.closed.is_empty() {
        log::warn!(
            "{}: permission denied; use the directory's user or root",
            list(&places.closed)
        );
    }
    if !places.squatted.is_empty() {
        log::warn!(
            "skipped, because the owner does not match the name or other users may write there: {}",
            list(&places.squatted)
        );
    }
    found_in(places.directories, |e| log::warn!("{}", error_line(&e)))
}

/// Returns the sockets of all users without printing messages, for repeated calls.
pub(crate) fn everywhere_quietly() -> Vec<VmSocket> {
    found_in(SocketDirs::all_users().directories, |e| {
        log::debug!("{}", error_line(&e))
    })
}

fn found_in(places: Vec<SocketDir>, failed: impl Fn(ControlSocketError)) -> Vec<VmSocket> {
    let mut found = Vec::new();
    for place in places {
        match place.sockets() {
            Ok(sockets) => found.extend(sockets.into_iter().map(|(name, path)| VmSocket {
                name,
                path,
                owner: Some(place.owner),
            })),
            Err(e) => failed(e),
        }
    }
    found
}

/// JSON output of `perfvisor ps` for one VM: its description, or the information that it does not
/// respond.
#[derive(serde::Serialize)]
struct VmJson<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    #[serde(flatten)]
    vm: Option<&'a VmInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    socket: Option<&'a PathBuf>,
}

/// Formats the table of VMs. `all` adds columns for the user and the socket.
fn table(vms: &[(VmSocket, Option<VmInfo>)], all: bool) -> String {
    let mut rows = vec![
        [
            "NAME", "PID", "VCPUS", "THREADS", "STATE", "UPTIME", "PMU", "CONSOLE", "GUEST",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    rows.extend(vms.iter().map(|(found, info)| {
        let told = match info {
            Some(vm) => vec![
                vm.name.clone(),
                vm.pid.to_string(),
                vcpu_count_text(vm),
                threads(vm),
                vm.state.to_string(),
                uptime(vm.uptime_ms / 1000),
                vm.pmu.clone(),
                consoles(vm),
                vm.guest.clone(),
            ],
            None => {
                let mut row = vec!["-".to_owned(); 9];
                row[0].clone_from(&found.name);
                row[4] = "not responding".to_owned();
                row
            }
        };
        // Remove control characters, because another user's VM may send any text.
        told.iter().map(|text| one_line(text)).collect()
    }));
    if all {
        rows[0].extend(["USER", "SOCKET"].map(str::to_owned));
        for (row, (found, _)) in rows.iter_mut().skip(1).zip(vms) {
            let user = found
                .owner
                .map_or_else(|| "-".to_owned(), |user| user.to_string());
            row.extend([user, one_line(&found.path.display().to_string())]);
        }
    }
    let columns = rows[0].len();
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
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

/// Returns the locations of the serial console and, if there is one, of the virtio console.
fn consoles(vm: &VmInfo) -> String {
    match vm.virtio_console.as_str() {
        "" => vm.console.clone(),
        virtio => format!("{},hvc0:{virtio}", vm.console),
    }
}

/// Returns the thread IDs of the vCPUs in vCPU order, with consecutive numbers as a range.
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

/// Returns the number of vCPUs, and the maximum if vCPUs can be hot-plugged.
pub(super) fn vcpu_count_text(vm: &VmInfo) -> String {
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
