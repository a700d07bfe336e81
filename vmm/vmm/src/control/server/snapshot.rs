//! Requests that take a snapshot.

use control_api::peer;
use control_api::protocol::{Failure, FailureKind};
use control_api::snapshot::{SnapshotPiece, SnapshotProgress, SnapshotState};
use perf_core::error_line;
use serde_json::Value;

use super::answer::{to_value, value};
use super::{Connection, ControlServer, FdSource, RequestOutcome};
use crate::control::session::fail;
use crate::vcpu::control::StopReason;
use crate::vm::save::{Snapshot, SnapshotError};

impl ControlServer {
    /// Returns `true` if a client takes a snapshot.
    pub(super) fn is_being_saved(&self, connection: &Connection) -> bool {
        let others = self.connections.values();
        others.chain([connection]).any(|c| c.snapshot.is_some())
    }

    /// Begins or continues the snapshot of this client.
    pub(super) fn snapshot(&self, connection: &mut Connection) -> Result<RequestOutcome, Failure> {
        let snapshot = match &mut connection.snapshot {
            Some(snapshot) => snapshot,
            None if self.connections.values().any(|c| c.snapshot.is_some()) => {
                return fail(
                    FailureKind::Limit,
                    "another snapshot of the VM is being taken; try again after its end",
                );
            }
            None => {
                let begun = Snapshot::begin(&self.vm.snapshots, self.vm.options.clone());
                connection.snapshot.insert(begun.or_else(refused)?)
            }
        };
        let memory_bytes = snapshot.memory_bytes();
        match snapshot.advance() {
            Ok(ready) => value(SnapshotProgress { ready, memory_bytes }),
            Err(e) => {
                connection.snapshot = None;
                refused(e)
            }
        }
    }

    /// Ends the snapshot of this client. The VM goes on, or ends.
    pub(super) fn end_snapshot(
        &self,
        connection: &mut Connection,
        stop: bool,
    ) -> Result<RequestOutcome, Failure> {
        let Some(snapshot) = connection.snapshot.take() else {
            return refused(SnapshotError::Order);
        };
        if stop {
            self.vm.control.stop(StopReason::Operator);
            self.vm.registry.kicker().kick();
            snapshot.release_devices();
        }
        drop(snapshot);
        value(Value::Null)
    }
}

impl Connection {
    /// Returns the next piece of guest memory.
    pub(super) fn snapshot_memory(&mut self, offset: u64) -> Result<RequestOutcome, Failure> {
        let snapshot = self.snapshot.as_mut();
        let piece = snapshot.map_or(Err(SnapshotError::Order), |s| s.read_memory(offset));
        let piece = piece.or_else(refused)?;
        let info = SnapshotPiece {
            offset: piece.offset,
            bytes: piece.data.len() as u64,
            next: piece.next,
        };
        with_file(to_value(info)?, "memory", &piece.data)
    }

    /// Lets the process that continues the VM open its disks.
    pub(super) fn share_disks(&mut self) -> Result<RequestOutcome, Failure> {
        let snapshot = self.snapshot.as_mut();
        let shared = snapshot.map_or(Err(SnapshotError::Order), Snapshot::share_devices);
        shared.or_else(refused)?;
        value(Value::Null)
    }

    /// Returns the state of the VM.
    pub(super) fn snapshot_state(&self) -> Result<RequestOutcome, Failure> {
        let snapshot = self.snapshot.as_ref();
        let state = snapshot.map_or(Err(SnapshotError::Order), Snapshot::state);
        let state = state.or_else(refused)?;
        let info = SnapshotState {
            bytes: state.len() as u64,
        };
        with_file(to_value(info)?, "state", &state)
    }
}

fn with_file(reply: Value, name: &str, bytes: &[u8]) -> Result<RequestOutcome, Failure> {
    let file = peer::sealed_text(name, bytes).map_err(|e| Failure {
        kind: FailureKind::Internal,
        message: format!("snapshot: {e}"),
    })?;
    Ok(RequestOutcome::WithFd(reply, FdSource::File(file)))
}

fn refused<T>(error: SnapshotError) -> Result<T, Failure> {
    let kind = match &error {
        SnapshotError::Unsupported(_) | SnapshotError::Trap => FailureKind::Unsupported,
        SnapshotError::Busy(_) | SnapshotError::Ended | SnapshotError::Order => FailureKind::Invalid,
        SnapshotError::Devices(_)
        | SnapshotError::Vcpu(_)
        | SnapshotError::Kvm(_)
        | SnapshotError::Memory(_)
        | SnapshotError::Format(_) => FailureKind::Internal,
    };
    fail(kind, error_line(&error))
}
