//! `perfvisor exporter`: what all VMs of this host count, and profiles of them, over HTTP: for Prometheus,
//! and for Pyroscope, Parca and the like.
//!
//! | module | story |
//! |---|---|
//! | `listen` | where it listens, and its connections |
//! | `access` | who may read from it |
//! | `http` | a request's head, and replies |
//! | `server` | the connections' bounds, and what is answered |
//! | `vms` | the VMs there are; each is asked by a thread of its own |
//! | `standing` | which VMs are asked, and which are waited for |
//! | `profile` | profiles, each made by a process of its own |
//! | `snapshot` | values and names of the metrics of one scrape |
//! | `directory` | where the files of a profile are while it is made |
//!
//! It is one process for a host. It speaks the control sockets of the VMs as any operator does, and has no
//! capability.

mod access;
mod directory;
mod http;
mod listen;
mod profile;
mod server;
mod snapshot;
mod standing;
mod vms;

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use perf_core::error_line;
use perfvisor_vmm::privileges;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::exit::ExitStatus;
use crate::signals::StopSignals;
use crate::vendor::{self, NamedError};
use access::{Access, AccessError};
use listen::{Address, Listener};
use server::Exporter;
use vms::Vms;

/// Default of `--events`. None of them takes a counter of the host PMU.
const DEFAULT_EVENTS: &str =
    "task-clock,context-switches,cpu-migrations,page-faults,kvm:exits,kvm:halt_exits,kvm:irq_injections";
/// Between two looks for signals.
const LOOK: Duration = Duration::from_millis(200);
/// How long a connection may go on when the exporter ends.
const END_TIME: Duration = Duration::from_secs(2);

/// `perfvisor exporter`.
#[derive(Clone, Debug, Args)]
pub struct ExporterArgs {
    /// Where to listen: an IP address with a port (0: the host chooses one), or unix:PATH, which the user and
    /// the group may connect to. At a loopback address only this user, root and --allow-user are served; at
    /// another address whoever can connect, unless --token-file is given.
    #[arg(long, value_name = "ADDR:PORT|unix:PATH", default_value = "127.0.0.1:9465")]
    pub listen: Address,
    /// Only the VMs that have a socket for observers in this directory (perfvisor run --observers
    /// DIR/NAME.look), whoever's they are: they are counted, and have no profiles.
    #[arg(long, value_name = "DIR")]
    pub vms: Option<PathBuf>,
    /// Serve only VMs of these users, each a name or a numeric user ID. Default: VMs of all users.
    #[arg(long, value_name = "USER", value_delimiter = ',')]
    pub vm_owner: Vec<String>,
    /// Serve clients of these users at a loopback address, each a name or a numeric user ID, for example
    /// prometheus. The exporter's own user and root are always served.
    #[arg(long, value_name = "USER", value_delimiter = ',')]
    pub allow_user: Vec<String>,
    /// Accept these names in the Host field of requests over TCP, for example a name in the DNS. IP
    /// addresses, localhost and the host's own name are always accepted.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub allow_host: Vec<String>,
    /// Serve whoever sends the token in this file (Authorization: Bearer TOKEN).
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// Events that are counted for the metrics of each VM, in perf's syntax.
    #[arg(long, value_name = "LIST", default_value = DEFAULT_EVENTS)]
    pub events: String,
}

/// Why nothing is served.
#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    /// The list of events is invalid.
    #[error("--events")]
    Events(#[from] NamedError),
    /// The access rules cannot be resolved.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// It cannot listen there.
    #[error("--listen {address}: nothing can be served there{}", remedy(.source))]
    Listen {
        /// Where.
        address: Address,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There are no sockets to be found.
    #[error("--vms {}: it cannot be read; make a directory that the exporter's user may read", dir.display())]
    NoDirectory {
        /// The directory.
        dir: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Signals cannot be waited for.
    #[error("the signals that end it")]
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

/// That there may be sockets in `dir`. Says what their users can do to each other there.
fn look_into(dir: &Path) -> Result<(), ExporterError> {
    let meta = std::fs::read_dir(dir).and_then(|_| std::fs::metadata(dir));
    let meta = meta.map_err(|source| ExporterError::NoDirectory {
        dir: dir.to_owned(),
        source,
    })?;
    let mode = meta.permissions().mode();
    if mode & 0o022 != 0 && mode & 0o1000 == 0 {
        log::warn!(
            "--vms {}: whoever may write there can remove others' sockets; chmod +t keeps them from it",
            dir.display()
        );
    }
    Ok(())
}

/// Serves until a signal ends it.
///
/// # Errors
/// [`ExporterError`].
pub fn exporter(args: &ExporterArgs) -> Result<ExitStatus, ExporterError> {
    let events = vendor::by_selector(&args.events)?;
    if let Some(dir) = &args.vms {
        look_into(dir)?;
    }
    let owners = args.vm_owner.iter().map(|user| access::uid_of(user));
    let owners = owners.collect::<Result<Vec<u32>, _>>()?;
    let access = Access::new(&args.allow_user, &args.allow_host, args.token_file.as_deref())?;
    let signals = StopSignals::block().map_err(ExporterError::Signals)?;
    let refused = |source| ExporterError::Listen {
        address: args.listen.clone(),
        source,
    };
    let listener = Listener::bind(&args.listen).map_err(refused)?;
    let address = listener.address().map_err(refused)?;
    // It needs none, and its threads and processes get what it has now.
    privileges::drop_thread_capabilities();
    // Profiles are made of what the guests have in their memory.
    privileges::forbid_core_dumps();
    directory::remove_left_behind(&std::env::temp_dir());
    if let Address::Tcp(at) = &address
        && !at.ip().is_loopback()
        && args.token_file.is_none()
    {
        log::warn!(
            "--listen {at}: whoever reaches it reads all metrics and has profiles made; use --token-file, or keep \
             others out by a firewall or a proxy"
        );
    }
    log::info!("serving at {address}");
    let vms = Vms::new(events, args.vms.clone(), owners);
    let exporter = Arc::new(Exporter::new(vms, access, address.to_string()));
    while signals.take().is_none() {
        let wait = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK.subsec_nanos().into(),
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
                // Most likely no descriptors are left.
                log::warn!("accept: {}; no new connections for a moment", error_line(&e));
                std::thread::sleep(LOOK);
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
