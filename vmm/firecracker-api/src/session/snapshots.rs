//! Saving and restoring a VM.

use super::{Session, VmBackend};
use crate::fault::Fault;
use crate::http::Response;
use crate::types::{
    HugePages, InstanceState, MemoryBackendType, SnapshotCreateParams, SnapshotLoadParams, SnapshotType,
};

impl<B: VmBackend> Session<B> {
    /// Saves a paused VM, which stays paused.
    pub(super) fn create_snapshot(&mut self, params: &SnapshotCreateParams) -> Result<Response, Fault> {
        self.require_start("snapshot/create")?;
        if self.state != InstanceState::Paused {
            return Err(Fault::bad(
                "snapshot/create: the VM must be paused; PATCH /vm pauses it",
            ));
        }
        if params.snapshot_type == SnapshotType::Diff {
            return Err(Fault::unsupported("snapshot_type", "must be Full"));
        }
        check_paths(&params.snapshot_path, "mem_file_path", &params.mem_file_path)?;
        self.backend
            .save(
                &params.snapshot_path,
                &params.mem_file_path,
                &self.resources.to_saved_config(),
            )
            .map_err(|e| Fault::bad(format!("snapshot/create: {e}")))?;
        Ok(Response::no_content())
    }

    /// Restores a VM, which is paused unless it is resumed at once.
    pub(super) fn load_snapshot(&mut self, params: &SnapshotLoadParams) -> Result<Response, Fault> {
        self.require_configuration("snapshot/load")?;
        let memory = memory_path(params)?;
        let path = &params.snapshot_path;
        let saved = self.backend.read_snapshot(path);
        let saved = saved.map_err(|e| Fault::bad(format!("snapshot_path: {path}: {e}")))?;
        let restored = self.resources.restored(saved, params)?;
        let mut options = self.with_mmds(&restored, restored.restore_options());
        options.push(format!("--restore={path}"));
        options.push(format!("--restore-memory={memory}"));
        if !params.resume_vm {
            options.push("--restore-paused".into());
        }
        self.backend.check_options(&options).map_err(Fault::bad)?;
        let metadata = self.metadata_at_start(&restored);
        self.backend
            .start(&options, metadata.as_ref())
            .map_err(|e| Fault::bad(format!("snapshot/load: {e}")))?;
        self.resources = restored;
        self.state = if params.resume_vm {
            InstanceState::Running
        } else {
            InstanceState::Paused
        };
        Ok(Response::no_content())
    }
}

/// Returns the path of the memory file, after a check of all fields.
fn memory_path(params: &SnapshotLoadParams) -> Result<&str, Fault> {
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
        return Err(Fault::unsupported(field, reason));
    }
    let (field, path) = match (&params.mem_backend, &params.mem_file_path) {
        (Some(backend), None) if backend.backend_type == MemoryBackendType::Uffd => {
            return Err(Fault::unsupported("backend_type", "must be File"));
        }
        (Some(backend), None) => ("backend_path", &backend.backend_path),
        (None, Some(path)) => ("mem_file_path", path),
        _ => {
            return Err(Fault::bad(
                "mem_backend: either mem_backend or mem_file_path must be given",
            ));
        }
    };
    check_paths(&params.snapshot_path, field, path)?;
    Ok(path)
}

/// Rejects empty and equal paths, and those that cannot be an argument of a program.
fn check_paths(state: &str, field: &str, memory: &str) -> Result<(), Fault> {
    for (field, path) in [("snapshot_path", state), (field, memory)] {
        if path.is_empty() || path.contains('\0') {
            return Err(Fault::bad(format!("{field}: must be the path of a file")));
        }
    }
    if state == memory {
        return Err(Fault::bad(format!("{field}: must differ from snapshot_path")));
    }
    Ok(())
}
