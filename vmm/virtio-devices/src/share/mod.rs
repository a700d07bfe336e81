//! Host directory shared with the guest (virtio-fs, virtio 1.2, 5.11), served by virtiofsd over
//! vhost-user.
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | configuration: `DIR,ro,tag=NAME` |
//! | [`backend`] | virtiofsd and the connection to it |
//! | [`keeper`] | the supervisor process that starts and restarts virtiofsd |
//! | `session` | handover of the queues to each backend |
//!
//! The backend maps guest memory, which must therefore be in a memfd, and processes the queues
//! itself. The VMM does not handle requests.

pub mod backend;
pub mod config;
pub mod keeper;
mod session;

use std::path::Path;
use std::sync::Arc;

use sandbox::{SandboxedThreadKind, SocketBroker};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;

use crate::device::{ActivateError, DeviceActivation, VirtioDevice, read_config_bytes};
use crate::worker::DeviceWorker;
use backend::{Backend, BackendConnection, QUEUES, VhostUserBackendError};
use config::{MAX_TAG_BYTES, ShareBackendSource};
use session::BackendSession;

/// Maximum sizes of the queues, in entries. A request has up to 1,020 pages.
const QUEUE_SIZES: [u16; QUEUES] = [1024; QUEUES];

/// A virtio-fs device that shares a host directory.
pub struct FsDevice {
    name: String,
    tag: String,
    backend: Backend,
    /// Connection that was made before the driver activates the device, or `None` afterwards.
    first: Option<BackendConnection>,
    worker: Option<DeviceWorker>,
}

impl FsDevice {
    /// Creates a device with the name `name`. The guest mounts the shared directory by the tag
    /// `tag`, which has at most [`MAX_TAG_BYTES`] bytes.
    ///
    /// If `source` is a directory, starts a virtiofsd that listens at `socket`, under the
    /// supervision of the program `keeper`. `socket` must be in a directory that only this user can
    /// access.
    ///
    /// # Errors
    /// Returns a [`VhostUserBackendError`] if the backend cannot be started or connected to.
    pub fn new(
        name: String,
        tag: String,
        source: &ShareBackendSource,
        socket: &Path,
        keeper: &keeper::BackendKeeperCommand,
    ) -> Result<Self, VhostUserBackendError> {
        let backend = Backend::start(source, socket, keeper)?;
        let first = backend.first()?;
        Ok(Self {
            name,
            tag,
            backend,
            first: Some(first),
            worker: None,
        })
    }

    /// Makes the device use `broker` for later connections to the backend.
    ///
    /// # Errors
    /// Returns [`VhostUserBackendError::Host`] if the broker does not accept the path.
    pub fn with_broker(mut self, broker: &Arc<SocketBroker>) -> Result<Self, VhostUserBackendError> {
        self.backend.set_broker(broker)?;
        Ok(self)
    }
}

impl VirtioDevice for FsDevice {
    fn id(&self) -> u32 {
        VIRTIO_ID_FS
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    /// Reads from `struct virtio_fs_config`: tag and num_request_queues.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; MAX_TAG_BYTES + 4];
        let tag = self.tag.as_bytes();
        let length = tag.len().min(MAX_TAG_BYTES);
        config[..length].copy_from_slice(&tag[..length]);
        config[MAX_TAG_BYTES] = 1;
        read_config_bytes(&config, offset, data);
    }

    fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError> {
        let fatal_error_callback = activation.fatal_error_callback.clone();
        let session = BackendSession::new(
            self.name.clone(),
            self.backend.clone(),
            self.first.take(),
            activation,
        )
        .map_err(|source| ActivateError::Host {
            what: "what a shared directory's thread needs",
            source,
        })?;
        let worker = DeviceWorker::spawn(
            SandboxedThreadKind::Socket,
            &self.name,
            session,
            fatal_error_callback,
        )?;
        self.worker = Some(worker);
        Ok(())
    }

    fn unsupported_in_snapshot(&self) -> Option<&'static str> {
        Some("--share-dir (virtio-fs), whose files are open in another process")
    }

    /// Closes the connection to the backend, which then exits. The next activation opens a new
    /// connection.
    fn reset(&mut self) {
        self.worker = None;
    }
}
