//! `perfvisor exporter`: serves metrics and profiles of all VMs on this host over HTTP, for
//! Prometheus, Pyroscope, Parca and similar systems.
//!
//! | module | contents |
//! |---|---|
//! | `listen` | listening sockets and connections |
//! | `access` | access control |
//! | `http` | request heads and replies |
//! | `server` | connection limits and request handlers |
//! | `vms` | VM discovery and concurrent queries of the VMs |
//! | `back_off` | back-off for VMs that fail to answer |
//! | `profile` | profiles, each produced by a separate process |
//! | `snapshot` | names and values of the metrics of one scrape |
//! | `directory` | temporary directories of profiles |
//!
//! One process serves the whole host. The exporter uses the VMs' control sockets like any operator,
//! and holds no capability.

mod access;
mod back_off;
mod directory;
mod http;
mod listen;
mod profile;
mod server;
mod snapshot;
mod vms;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use perf_core::error_line;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sandbox::privileges;

use crate::exit::ExitStatus;
use crate::signals::StopSignals;
use crate::vendor::{self, EventNameError};
use access::{AccessRules, ExporterAccessRuleError};
use listen::{ExporterListener, ListenAddress};
use server::Exporter;
use vms::ExporterVmRegistry;

/// Default of `--events`. None of these events occupies a counter of the host PMU.
const DEFAULT_EVENTS: &str =
    "task-clock,context-switches,cpu-migrations,page-faults,kvm:exits,kvm:halt_exits,kvm:irq_injections";
/// Interval at which signals are polled.
const SIGNAL_POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum duration of a connection after the exporter begins to exit.
const END_TIME: Duration = Duration::from_secs(2);

/// `perfvisor exporter`.
#[derive(Clone, Debug, Args)]
pub struct ExporterArgs {
    /// Listen at this address, which is an IP address with a port (0 for any free port), or
    /// unix:PATH, to which the user and the group may connect. At a loopback address, only this
    /// user, root and --allow-user are served. At any other address, every client is served unless
    /// --token-file is given.
    #[arg(long, value_name = "ADDR:PORT|unix:PATH", default_value = "127.0.0.1:9465")]
    pub listen: ListenAddress,
    /// Serve only VMs with an observer socket in this directory (perfvisor run --observers
    /// DIR/NAME.look), of any user. These VMs have metrics but no profiles.
    #[arg(long, value_name = "DIR")]
    pub vms: Option<PathBuf>,
    /// Serve only VMs of these users, each a name or a numeric user ID [default: VMs of all users]
    #[arg(long, value_name = "USER", value_delimiter = ',')]
    pub vm_owner: Vec<String>,
    /// Serve clients of these users at a loopback address, each a name or a numeric user ID, for
    /// example prometheus. The exporter's own user and root are always served.
    #[arg(long, value_name = "USER", value_delimiter = ',')]
    pub allow_user: Vec<String>,
    /// Accept these names in the Host field of requests over TCP, for example a DNS name. IP
    /// addresses, localhost and the host's own name are always accepted.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub allow_host: Vec<String>,
    /// Serve every client that sends the token in this file (Authorization: Bearer TOKEN).
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Count these events, in perf's syntax, for the metrics of each VM.
    #[arg(long, value_name = "LIST", default_value = DEFAULT_EVENTS)]
    pub events: String,
}

/// Errors of the exporter.
#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    #[error("--events")]
    Events(#[from] EventNameError),
    #[error(transparent)]
    AccessRules(#[from] ExporterAccessRuleError),
    #[error("--listen {address}: cannot listen{}", remedy(.source))]
    Listen {
        address: ListenAddress,
        #[source]
        source: io::Error,
    },
    #[error("--vms {}: cannot read the directory; make it readable for the exporter's user", dir.display())]
    NoDirectory {
        dir: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("signal handling")]
    Signals(#[source] io::Error),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; choose another, or end what listens there",
        io::ErrorKind::AddrNotAvailable => "; choose an address of this host",
        io::ErrorKind::PermissionDenied => "; choose a place that this user may use, a port above 1023 say",
        _ => "",
    }
}

/// Checks that the directory `dir` is readable. Logs a warning if its permissions allow users to
/// interfere with each other's sockets.
fn look_into(dir: &Path) -> Result<(), ExporterError> {
    let meta = std::fs::read_dir(dir).and_then(|_| std::fs::metadata(dir));
    let meta = meta.map_err(|source| ExporterError::NoDirectory {
        dir: dir.to_owned(),
        source,
    })?;
    let mode = meta.permissions().mode();
    if mode & 0o022 != 0 && mode & 0o1000 == 0 {
        log::warn!(
            "--vms {}: users with write permission can remove sockets of others; prevent this with \
            chmod +t",
            dir.display()
        );
    }
    Ok(())
}

/// Runs the exporter until a stop signal arrives.
///
/// # Errors
/// Returns [`ExporterError`] if the arguments are invalid or the exporter cannot listen.
pub fn exporter(args: &ExporterArgs) -> Result<ExitStatus, ExporterError> {
    let events = vendor::resolve_vendor_events(&args.events)?;
    if let Some(dir) = &args.vms {
        look_into(dir)?;
    }
    let owners = args.vm_owner.iter().map(|user| access::uid_of(user));
    let owners = owners.collect::<Result<Vec<u32>, _>>()?;
    let access = AccessRules::new(&args.allow_user, &args.allow_host, args.token_file.as_deref())?;
    let signals = StopSignals::block().map_err(ExporterError::Signals)?;
    let refused = |source| ExporterError::Listen {
        address: args.listen.clone(),
        source,
    };
    let listener = ExporterListener::bind(&args.listen).map_err(refused)?;
    let address = listener.address().map_err(refused)?;
    // The exporter needs no capability, and its threads and child processes inherit the current
    // set.
    privileges::drop_thread_capabilities();
    // Profiles contain data from guest memory.
    privileges::forbid_core_dumps();
    directory::remove_left_behind(&std::env::temp_dir());
    if let ListenAddress::Tcp(at) = &address
        && !at.ip().is_loopback()
        && args.token_file.is_none()
    {
        log::warn!(
            "--listen {at}: every client that can connect may read all metrics and take profiles; \
            use --token-file, a firewall or a proxy"
        );
    }
    log::info!("serving at {address}");
    let vms = ExporterVmRegistry::new(events, args.vms.clone(), owners);
    let exporter = Arc::new(Exporter::new(vms, access, address.to_string()));
    while signals.take().is_none() {
        let wait = Timespec {
            tv_sec: 0,
            tv_nsec: SIGNAL_POLL_INTERVAL.subsec_nanos().into(),
        };
        let mut polled = [PollFd::new(&listener, PollFlags::IN)];
        match poll(&mut polled, Some(&wait)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(e) => return Err(refused(e.into())),
        }
        match listener.accept() {
            Ok(stream) => exporter.admit(stream),
            Err(e)
                if matches!(
                    e.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                ) => {}
            Err(e) => {
                // The most likely cause is that no descriptor is free.
                log::warn!("accept: {}; new connections are delayed", error_line(&e));
                std::thread::sleep(SIGNAL_POLL_INTERVAL);
            }
        }
    }
    exporter.stop();
    let until = Instant::now() + END_TIME;
    while exporter.connections() > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(ExitStatus::PoweredOff)
}
