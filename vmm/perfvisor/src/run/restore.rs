//! Opens the snapshot of `run --restore`.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use snapshot::memory::{self, MemoryFileError};
use snapshot::{FormatError, MEMORY_FILE, STATE_FILE};
use vmm::vm::restore::RestoredMachine;

use crate::cli::RunArgs;
use crate::cli::restore::MachineOptionsError;
use crate::state_file::read_state;

/// Name of the entropy device.
const ENTROPY_DEVICE: &str = "rng0";

/// Error of opening a snapshot.
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
        source: FormatError,
    },
    #[error("--restore: {}", path.display())]
    Memory {
        path: PathBuf,
        #[source]
        source: MemoryFileError,
    },
    #[error("--restore: {}: it is not a regular file", .0.display())]
    NotAFile(PathBuf),
    #[error("--restore {}", path.display())]
    Options {
        path: PathBuf,
        #[source]
        source: MachineOptionsError,
    },
}

/// Opens the snapshot that `args` name, and returns it with the arguments of its machine. Returns
/// `None` without `--restore`.
///
/// # Errors
/// Returns [`RestoreFileError`] if a file cannot be read, is truncated, damaged or of another version,
/// or has invalid options.
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
    let file = open_memory(&path)?;
    let checked = if args.restore_verify {
        memory::verify(&file, &state.memory)
    } else {
        memory::check_size(&file, &state.memory)
    };
    checked.map_err(|source| RestoreFileError::Memory { path, source })?;
    let mut restored =
        args.with_machine_options(&state.options)
            .map_err(|source| RestoreFileError::Options {
                path: dir.clone(),
                source,
            })?;
    // A built-in guest has no entropy device.
    restored.rng &= state.devices.iter().any(|device| device.name == ENTROPY_DEVICE);
    log::info!("restoring a snapshot by Perfvisor {:?}", state.saved_by);
    let machine = RestoredMachine {
        state: Box::new(state),
        memory: file,
    };
    Ok(Some((restored, machine)))
}

/// Opens a memory file, which must be a regular file because it is mapped.
fn open_memory(path: &Path) -> Result<File, RestoreFileError> {
    let failed = |source| RestoreFileError::Open {
        path: path.to_owned(),
        source,
    };
    // The check precedes the opening, which would wait for the writer of a pipe.
    if !path.metadata().map_err(failed)?.is_file() {
        return Err(RestoreFileError::NotAFile(path.to_owned()));
    }
    File::open(path).map_err(failed)
}
