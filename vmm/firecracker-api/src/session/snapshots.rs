//! API calls that save and restore a VM.

use super::{ApiSession, VmBackend};
use crate::fault::ApiFault;
use crate::http::Response;
use crate::types::{
    HugePages, InstanceState, MemoryBackendType, SnapshotCreateParams, SnapshotLoadParams, SnapshotType,
};

impl<B: VmBackend> ApiSession<B> {
    /// Saves a paused VM, which remains paused.
    pub(super) fn create_snapshot(&mut self, params: &SnapshotCreateParams) -> Result<Response, ApiFault> {
        self.require_start("snapshot/create")?;
        if self.state != InstanceState::Paused {
            return Err(ApiFault::bad(
                "snapshot/create: the VM must be paused; PATCH /vm pauses it",
            ));
        }
        if params.snapshot_type == SnapshotType::Diff {
            return Err(ApiFault::unsupported("snapshot_type", "must be Full"));
        }
        check_paths(&params.snapshot_path, "mem_file_path", &params.mem_file_path)?;
        self.backend
            .save(
                &params.snapshot_path,
                &params.mem_file_path,
                &self.resources.to_saved_config(),
            )
            .map_err(|e| ApiFault::bad(format!("snapshot/create: {e}")))?;
        Ok(Response::no_content())
    }

    /// Restores a VM from a snapshot. The VM remains paused unless the client requests that it be
    /// resumed.
    pub(super) fn load_snapshot(&mut self, params: &SnapshotLoadParams) -> Result<Response, ApiFault> {
        self.require_configuration("snapshot/load")?;
        let memory = memory_path(params)?;
        let path = &params.snapshot_path;
        let saved = self.backend.read_snapshot(path);
        let saved = saved.map_err(|e| ApiFault::bad(format!("snapshot_path: {path}: {e}")))?;
        let restored = self.resources.restored(saved, params)?;
        let mut options = self.with_mmds(&restored, restored.restore_options());
        options.push(format!("--restore={path}"));
        options.push(format!("--restore-memory={memory}"));
        if !params.resume_vm {
            options.push("--restore-paused".into());
        }
        self.backend.check_options(&options).map_err(ApiFault::bad)?;
        let metadata = self.metadata_at_start(&restored);
        self.backend
            .start(&options, metadata.as_ref())
            .map_err(|e| ApiFault::bad(format!("snapshot/load: {e}")))?;
        self.resources = restored;
        self.state = if params.resume_vm {
            InstanceState::Running
        } else {
            InstanceState::Paused
        };
        Ok(Response::no_content())
    }
}

/// Checks the parameters of a snapshot to load, and returns the path of its memory file.
fn memory_path(params: &SnapshotLoadParams) -> Result<&str, ApiFault> {
    let tracking = "snapshots are always full";
    let unsupported = [
        ("track_dirty_pages", params.track_dirty_pages, tracking),
        ("enable_diff_snapshots", params.enable_diff_snapshots, tracking),
        (
            "clock_realtime",
            params.clock_realtime,
            "the guest's clock continues from the snapshot",
        ),
        (
            "huge_pages",
            params.huge_pages != HugePages::None,
            "guest memory is mapped from the memory file",
        ),
    ];
    if let Some((field, _, reason)) = unsupported.into_iter().find(|(_, given, _)| *given) {
        return Err(ApiFault::unsupported(field, reason));
    }
    let (field, path) = match (&params.mem_backend, &params.mem_file_path) {
        (Some(backend), None) if backend.backend_type == MemoryBackendType::Uffd => {
            return Err(ApiFault::unsupported("backend_type", "must be File"));
        }
        (Some(backend), None) => ("backend_path", &backend.backend_path),
        (None, Some(path)) => ("mem_file_path", path),
        _ => {
            return Err(ApiFault::bad(
                "mem_backend: either mem_backend or mem_file_path must be given",
            ));
        }
    };
    check_paths(&params.snapshot_path, field, path)?;
    Ok(path)
}

/// Rejects a snapshot whose state and memory paths are empty, equal, or unusable as program
/// arguments.
fn check_paths(state: &str, field: &str, memory: &str) -> Result<(), ApiFault> {
    for (field, path) in [("snapshot_path", state), (field, memory)] {
        if path.is_empty() || path.contains('\0') {
            return Err(ApiFault::bad(format!("{field}: must be the path of a file")));
        }
    }
    if state == memory {
        return Err(ApiFault::bad(format!("{field}: must differ from snapshot_path")));
    }
    Ok(())
}
