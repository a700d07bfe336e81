//! Requests that take a snapshot or move the VM.

use control_api::migration::{MigrationPiece, MigrationStart};
use control_api::peer;
use control_api::protocol::{RequestError, RequestErrorKind};
use control_api::snapshot::{SnapshotPiece, SnapshotProgress, SnapshotState};
use perf_core::error_line;
use serde_json::Value;

use super::answer::{to_value, value};
use super::{Connection, ControlServer, FdSource, RequestOutcome};
use crate::control::session::fail;
use crate::vcpu::control::VmStopReason;
use crate::vm::migrate::OutgoingMigration;
use crate::vm::save::{SnapshotError, VmSnapshot};

impl ControlServer {
    /// Returns `true` if a client is taking a snapshot.
    pub(super) fn is_being_saved(&self, connection: &Connection) -> bool {
        let others = self.connections.values();
        others.chain([connection]).any(|c| c.snapshot.is_some())
    }

    /// Keeps the VM paused if `connection`, which has ended, was moving the VM and the VM may
    /// already run at the destination.
    pub(super) fn keep_undecided(&mut self, connection: &mut Connection) {
        if let Some(snapshot) = connection.snapshot.take_if(|snapshot| snapshot.is_committed()) {
            log::warn!(
                "the VM may run where it was to move; it stays paused here: if it does not run there, \
                `perfvisor ctl {name} resume` continues it, otherwise `perfvisor ctl {name} stop` ends it",
                name = self.vm.name
            );
            self.undecided = Some(snapshot);
        }
    }

    /// Takes the VM back from an undecided move, because the operator states that it does not run
    /// at the destination. Has no effect if no move is undecided.
    pub(super) fn decide(&mut self) -> Result<(), RequestError> {
        if let Some(snapshot) = &mut self.undecided {
            snapshot.take_back().or_else(refused)?;
            self.undecided = None;
        }
        Ok(())
    }

    /// Starts a snapshot for this client, or performs the next step of the snapshot in progress.
    pub(super) fn snapshot(&self, connection: &mut Connection) -> Result<RequestOutcome, RequestError> {
        let snapshot = match &mut connection.snapshot {
            Some(snapshot) => snapshot,
            None if self.undecided.is_some() => {
                return fail(
                    RequestErrorKind::Invalid,
                    "the VM may have moved; decide with `ctl resume` or `ctl stop`",
                );
            }
            None if self.connections.values().any(|c| c.snapshot.is_some()) => {
                return fail(
                    RequestErrorKind::Limit,
                    "another snapshot of the VM is being taken; try again after its end",
                );
            }
            None => {
                let begun = VmSnapshot::begin(&self.vm.snapshots, self.vm.options.clone());
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

    /// Ends this client's snapshot. If `stop` is set, stops the VM; otherwise resumes it.
    pub(super) fn end_snapshot(
        &self,
        connection: &mut Connection,
        stop: bool,
    ) -> Result<RequestOutcome, RequestError> {
        let Some(mut snapshot) = connection.snapshot.take() else {
            return refused(SnapshotError::Order);
        };
        connection.migration = None;
        if stop {
            self.vm.control.stop(VmStopReason::Operator);
            self.vm.registry.kicker().kick();
            snapshot.release_devices();
        } else if let Err(e) = snapshot.take_back() {
            connection.snapshot = Some(snapshot);
            return refused(e);
        }
        drop(snapshot);
        value(Value::Null)
    }

    /// Starts to move the VM: tracks which pages of guest memory are written.
    pub(super) fn migration_start(
        &self,
        connection: &mut Connection,
    ) -> Result<RequestOutcome, RequestError> {
        let others = self.connections.values();
        if others.chain([&*connection]).any(|c| c.migration.is_some()) {
            return fail(
                RequestErrorKind::Limit,
                "the VM is being moved already; try again after the end",
            );
        }
        let begun = OutgoingMigration::begin(&self.vm.snapshots, self.vm.options.clone());
        let migration = connection.migration.insert(begun.or_else(refused)?);
        let machine = migration.machine().or_else(refused)?;
        let info = MigrationStart {
            memory_bytes: migration.memory_bytes(),
            bytes: machine.len() as u64,
        };
        with_file(to_value(info)?, "machine", &machine)
    }
}

impl Connection {
    /// Returns the next piece of guest memory for a snapshot.
    pub(super) fn snapshot_memory(&mut self, offset: u64) -> Result<RequestOutcome, RequestError> {
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

    /// Returns the next piece of guest memory for a VM that is being moved. The guest may still
    /// run.
    pub(super) fn migration_memory(&mut self, offset: u64) -> Result<RequestOutcome, RequestError> {
        let is_paused = self.snapshot.as_ref().is_some_and(VmSnapshot::is_ready);
        let migration = self.migration.as_mut();
        let piece = migration.map_or(Err(SnapshotError::Order), |m| m.read_memory(offset, is_paused));
        let piece = piece.or_else(refused)?;
        let info = MigrationPiece {
            pages: piece.pages,
            zeros: piece.zeros,
            next: piece.next,
        };
        with_file(to_value(info)?, "memory", &piece.data)
    }

    /// Hands the VM over to the destination process. All memory must have been read. Afterwards the
    /// VM stays paused in this process.
    pub(super) fn commit_migration(&mut self) -> Result<RequestOutcome, RequestError> {
        let is_complete = self
            .migration
            .as_ref()
            .is_some_and(OutgoingMigration::is_complete);
        let snapshot = self.snapshot.as_mut().filter(|_| is_complete);
        let committed = snapshot.map_or(Err(SnapshotError::Order), VmSnapshot::commit);
        committed.or_else(refused)?;
        value(Value::Null)
    }

    /// Allows the destination process of a move to open the VM's disk images.
    pub(super) fn share_disks(&mut self) -> Result<RequestOutcome, RequestError> {
        let snapshot = self.snapshot.as_mut();
        let shared = snapshot.map_or(Err(SnapshotError::Order), VmSnapshot::share_devices);
        shared.or_else(refused)?;
        value(Value::Null)
    }

    /// Returns the state of the VM for a snapshot or a move.
    pub(super) fn snapshot_state(&self) -> Result<RequestOutcome, RequestError> {
        let state = match (&self.snapshot, &self.migration) {
            (Some(snapshot), Some(migration)) => snapshot.state_without_memory(migration),
            (Some(snapshot), None) => snapshot.state(),
            (None, _) => Err(SnapshotError::Order),
        };
        let state = state.or_else(refused)?;
        let info = SnapshotState {
            bytes: state.len() as u64,
        };
        with_file(to_value(info)?, "state", &state)
    }
}

fn with_file(reply: Value, name: &str, bytes: &[u8]) -> Result<RequestOutcome, RequestError> {
    let file = peer::sealed_text(name, bytes).map_err(|e| RequestError {
        kind: RequestErrorKind::Internal,
        message: format!("snapshot: {e}"),
    })?;
    Ok(RequestOutcome::WithFd(reply, FdSource::File(file)))
}

fn refused<T>(error: SnapshotError) -> Result<T, RequestError> {
    let kind = match &error {
        SnapshotError::Unsupported(_) | SnapshotError::Trap => RequestErrorKind::Unsupported,
        SnapshotError::Busy(_) | SnapshotError::Ended | SnapshotError::Order | SnapshotError::InUse(_) => {
            RequestErrorKind::Invalid
        }
        SnapshotError::Devices(_)
        | SnapshotError::Vcpu(_)
        | SnapshotError::Kvm(_)
        | SnapshotError::Memory(_)
        | SnapshotError::Format(_) => RequestErrorKind::Internal,
    };
    fail(kind, error_line(&error))
}
