//! A directory of the host in the guest (virtio-fs, virtio 1.2, 5.11), served by virtiofsd over vhost-user.
//!
//! | module | story |
//! |---|---|
//! | [`config`] | what the user asks for: `DIR,ro,tag=NAME` |
//! | [`backend`] | virtiofsd, and the connection to it |
//! | [`keeper`] | the process that starts virtiofsd, and again when it has died |
//! | `session` | the queues handed over, and again when the back end has died |
//!
//! The back end maps guest memory, so that must be in a memfd. It takes the guest's requests from the queues
//! itself; nothing of ours is on their way.

pub mod backend;
pub mod config;
pub mod keeper;
mod session;

use std::path::Path;
use std::sync::Arc;

use sandbox::{SocketBroker, ThreadKind};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;

use crate::device::{ActivateError, Activation, VirtioDevice, read_config_bytes};
use crate::worker::Worker;
use backend::{Backend, BackendError, Connection, QUEUES};
use config::{MAX_TAG_BYTES, Source};
use session::Session;

/// Their entries: requests of up to 1,020 pages.
const QUEUE_SIZES: [u16; QUEUES] = [1024; QUEUES];

/// A shared directory.
pub struct Share {
    name: String,
    tag: String,
    backend: Backend,
    /// The first connection, until the driver is ready.
    first: Option<Connection>,
    worker: Option<Worker>,
}

impl Share {
    /// A device `name` that the guest mounts by `tag`, at most [`MAX_TAG_BYTES`]. A virtiofsd of its own
    /// listens at `socket`, in a directory of this user only; `keeper` keeps that running.
    ///
    /// # Errors
    /// The back end cannot be had.
    pub fn new(
        name: String,
        tag: String,
        source: &Source,
        socket: &Path,
        keeper: &keeper::Program,
    ) -> Result<Self, BackendError> {
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

    /// The same device, which reaches the next back end by `broker` when one has ended.
    ///
    /// # Errors
    /// [`BackendError::Host`] if the broker does not take the path.
    pub fn with_broker(mut self, broker: &Arc<SocketBroker>) -> Result<Self, BackendError> {
        self.backend.connect_by(broker)?;
        Ok(self)
    }
}

impl VirtioDevice for Share {
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

    /// `struct virtio_fs_config`: tag, num_request_queues.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; MAX_TAG_BYTES + 4];
        let tag = self.tag.as_bytes();
        let length = tag.len().min(MAX_TAG_BYTES);
        config[..length].copy_from_slice(&tag[..length]);
        config[MAX_TAG_BYTES] = 1;
        read_config_bytes(&config, offset, data);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let host = |what| move |source| ActivateError::Host { what, source };
        let last_resort = activation.last_resort.clone();
        let session = Session::new(
            self.name.clone(),
            self.backend.clone(),
            self.first.take(),
            activation,
        )
        .map_err(host("what a shared directory's thread needs"))?;
        let worker = Worker::spawn(ThreadKind::Socket, &self.name, session, last_resort);
        self.worker = Some(worker.map_err(host("the thread of a shared directory"))?);
        Ok(())
    }

    /// The back end ends with its connection; the next driver gets a new one.
    fn reset(&mut self) {
        self.worker = None;
    }
}
