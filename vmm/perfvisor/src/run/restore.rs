//! Opens the snapshot of `run --restore`.

use std::io;
use std::path::{Path, PathBuf};

use operator::snapshot_files::{self, OpenBaseError, open_memory, read_state};
use snapshot::diff::{self, BaseSnapshotError, SnapshotBaseChain, SnapshotDiffError};
use snapshot::memory::{self, MemoryFileError};
use snapshot::state::{SavedMachine, SavedMemoryFile};
use snapshot::{MEMORY_FILE, STATE_FILE, SnapshotFormatError};
use virtio_devices::net::config::MacAddress;
use vmm::vm::restore::{RestoredMachine, RestoredMemory};

use crate::cli::RunArgs;
use crate::cli::restore::MachineOptionsError;
use crate::devices::mac;

/// Name of the entropy device in a snapshot.
const ENTROPY_DEVICE: &str = "rng0";
/// Virtio device ID of network devices.
const VIRTIO_NET: u32 = 1;

/// Error returned when a snapshot cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum RestoreFileError {
    #[error("--restore: {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("--restore: {}", path.display())]
    State {
        path: PathBuf,
        #[source]
        source: SnapshotFormatError,
    },
    #[error("--restore: {}", path.display())]
    Memory {
        path: PathBuf,
        #[source]
        source: MemoryFileError,
    },
    #[error("--restore-base")]
    Base(#[from] OpenBaseError),
    #[error("--restore-base")]
    DamagedBase(#[from] BaseSnapshotError),
    #[error("--restore {}", path.display())]
    Diff {
        path: PathBuf,
        #[source]
        source: SnapshotDiffError,
    },
    #[error("--restore: the snapshot is a diff; give the directory of its base with --restore-base")]
    NoBase,
    #[error("--restore-base {}: the snapshot is not a diff; omit the option", .0.display())]
    NotADiff(PathBuf),
    #[error("--restore {}", path.display())]
    Options {
        path: PathBuf,
        #[source]
        source: MachineOptionsError,
    },
}

/// Opens the snapshot specified by `args`, and returns it with the arguments of its machine.
/// Returns `None` without `--restore`.
///
/// # Errors
/// Returns [`RestoreFileError`] if a file cannot be read, is truncated or damaged, has another
/// format version, or contains invalid options.
pub(super) fn open(args: &RunArgs) -> Result<Option<(RunArgs, RestoredMachine)>, RestoreFileError> {
    let Some(dir) = &args.restore else {
        return Ok(None);
    };
    let (path, memory_path) = match &args.restore_memory {
        Some(memory) => (dir.clone(), memory.clone()),
        None => (dir.join(STATE_FILE), dir.join(MEMORY_FILE)),
    };
    let state = read_state(&path).map_err(|source| RestoreFileError::Open {
        path: path.clone(),
        source,
    })?;
    let state = snapshot::decode(&state).map_err(|source| RestoreFileError::State { path, source })?;
    let path = memory_path;
    let file = open_memory(&path).map_err(|source| RestoreFileError::Open {
        path: path.clone(),
        source,
    })?;
    let base = open_base(args, dir, &state.memory)?;
    let checked = match (&state.memory.base, &base) {
        (Some(diff), Some(base)) if args.restore_verify => memory::check_size(&file, &state.memory)
            .and_then(|()| base.verify_diff(&file, diff, &state.memory)),
        (None, _) if args.restore_verify => memory::verify(&file, &state.memory),
        _ => memory::check_size(&file, &state.memory),
    };
    checked.map_err(|source| RestoreFileError::Memory { path, source })?;
    let restored = machine_args(args, &state).map_err(|source| RestoreFileError::Options {
        path: dir.clone(),
        source,
    })?;
    log::info!("restoring a snapshot by Perfvisor {:?}", state.saved_by);
    let machine = RestoredMachine {
        state: Box::new(state),
        memory: match base {
            None => RestoredMemory::Snapshot(file),
            Some(base) => RestoredMemory::Diff {
                base: Box::new(base),
                changes: file,
            },
        },
        accepts_losses: args.restore_loses,
    };
    Ok(Some((restored, machine)))
}

/// Returns `args` with the options of the saved machine.
///
/// # Errors
/// Returns the errors of [`RunArgs::with_machine_options`].
pub(super) fn machine_args(args: &RunArgs, state: &SavedMachine) -> Result<RunArgs, MachineOptionsError> {
    let mut restored = args.with_machine_options(&state.options)?;
    // Drop `--rng` if the snapshot has no entropy device, as with a built-in guest.
    restored.rng &= state.devices.iter().any(|device| device.name == ENTROPY_DEVICE);
    Ok(restored)
}

/// Returns the MAC address of each saved network device.
pub(super) fn saved_addresses(state: &SavedMachine) -> impl Iterator<Item = MacAddress> {
    let devices = state.devices.iter().filter(|device| device.id == VIRTIO_NET);
    // The configuration of a network device begins with its MAC address.
    devices.filter_map(|device| device.config.0.first_chunk().copied().map(MacAddress::from))
}

/// Assigns the MAC addresses of VM `vm` to the network devices of a clone. For a VM that is not a
/// clone, keeps the addresses of the snapshot, which must then match the command line.
pub(super) fn with_own_addresses(mut saved: RestoredMachine, args: &RunArgs, vm: &str) -> RestoredMachine {
    if args.clone {
        let devices = saved.state.devices.iter_mut();
        let devices = devices.filter(|device| device.id == VIRTIO_NET);
        for (device, config) in devices.zip(&args.net) {
            // The configuration of a network device begins with its MAC address.
            if let Some(address) = device.config.0.first_chunk_mut() {
                *address = mac(config, vm).bytes();
            }
        }
    }
    saved
}

/// Opens the snapshots given by `--restore-base`, on which the diff snapshot in `dir` is based.
/// Returns `None` for a full snapshot.
fn open_base(
    args: &RunArgs,
    dir: &Path,
    memory: &SavedMemoryFile,
) -> Result<Option<SnapshotBaseChain>, RestoreFileError> {
    let bases = &args.restore_base;
    let diff = match (&memory.base, bases.first()) {
        (None, None) => return Ok(None),
        (None, Some(base)) => return Err(RestoreFileError::NotADiff(base.clone())),
        (Some(_), None) => return Err(RestoreFileError::NoBase),
        (Some(diff), Some(_)) => diff,
    };
    let failed = |source| RestoreFileError::Diff {
        path: dir.to_owned(),
        source,
    };
    diff::check_runs(diff, memory.bytes).map_err(failed)?;
    let chain = snapshot_files::open(dir, diff.state_crc, bases)?;
    if chain.memory_bytes() != memory.bytes {
        return Err(failed(SnapshotDiffError::OtherMachine));
    }
    if args.restore_verify {
        chain.verify()?;
    }
    Ok(Some(chain))
}

#[cfg(test)]
mod tests {
    use snapshot::state::SavedDevice;

    use super::*;
    use crate::cli::{self, CliCommand};

    /// Restores a saved disk and two saved network devices as VM `vm` with `options`, and returns
    /// the configurations of these devices.
    fn configs(options: &str, vm: &str) -> Vec<Vec<u8>> {
        let words = ["perfvisor", "run", "--restore", "d", "--net", "tap=a"];
        let words = words.into_iter().chain(options.split_whitespace());
        let Ok(CliCommand::Run(args)) = cli::parse(words).map(|cli| cli.command) else {
            panic!("no arguments of run");
        };
        let mut machine = RestoredMachine {
            state: Box::default(),
            memory: RestoredMemory::Snapshot(tempfile::tempfile().unwrap()),
            accepts_losses: false,
        };
        machine.state.devices = [2, 1, 1]
            .map(|id| SavedDevice {
                id,
                config: vec![7; 8].into(),
                ..SavedDevice::default()
            })
            .into();
        let machine = with_own_addresses(machine, &args, vm);
        let devices = machine.state.devices.into_iter();
        devices.map(|device| device.config.0).collect()
    }

    #[test]
    fn network_devices_of_clones_have_their_own_addresses() {
        let same = vec![7; 8];
        assert_eq!(configs("", "x"), [same.clone(), same.clone(), same.clone()]);
        let given = "--clone --net tap=b,mac=02:00:00:00:00:0a";
        let (x, y) = (configs(given, "x"), configs(given, "y"));
        assert_eq!((&x[0], &y[0]), (&same, &same), "the disk");
        assert!(x[1] != y[1] && x[1] != same && y[1] != same);
        assert_eq!(x[1][6..], [7, 7], "the MTU");
        assert_eq!(x[2], [2, 0, 0, 0, 0, 10, 7, 7]);
        assert_eq!(y[2], x[2]);
    }
}
