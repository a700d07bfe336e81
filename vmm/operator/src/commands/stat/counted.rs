//! Events of a measurement. The measurement continues if the VM moves to another process.

use std::time::Instant;

use control_api::client::{Client, ClientError};
use control_api::protocol::{EventReading, OpenedEvent, PluggedVcpuEvents};
use control_api::request;

use super::super::OperatorCommandError;
use super::super::migrate::find_moved;
use super::StatArgs;

/// The events of a measurement with their readings.
#[derive(Debug)]
pub(super) struct CountedEvents {
    /// Events opened in the VM's current process and in its former processes, each with a unique
    /// handle.
    opened: Vec<OpenedEvent>,
    /// Final readings in the processes in which the VM ran before it moved to the current one.
    left: Vec<EventReading>,
    /// `left`, followed by the last readings in the current process.
    readings: Vec<EventReading>,
    /// Number to add to an event handle of the current process to get the handle in `opened`.
    first_handle: u32,
    read_at: Instant,
}

impl CountedEvents {
    /// Opens the events of `args` without enabling them.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the VM refuses the request.
    pub(super) fn open(client: &mut Client, args: &StatArgs) -> Result<Self, ClientError> {
        Ok(Self {
            opened: open(client, args)?,
            left: Vec::new(),
            readings: Vec::new(),
            first_handle: 0,
            read_at: Instant::now(),
        })
    }

    /// Returns the opened events of the measurement.
    pub(super) fn opened(&self) -> &[OpenedEvent] {
        &self.opened
    }

    /// Returns the latest readings of the events.
    pub(super) fn readings(&self) -> &[EventReading] {
        &self.readings
    }

    /// Returns the events that the VM cannot count, each with the reason.
    pub(super) fn unsupported(&self) -> impl Iterator<Item = (String, String)> {
        let refused = |event: &OpenedEvent| Some((event.name.clone(), event.unsupported.clone()?));
        self.opened.iter().filter_map(refused)
    }

    /// Reads all events of the measurement.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the VM does not answer. The last readings are kept.
    pub(super) fn read(&mut self, client: &mut Client) -> Result<(), ClientError> {
        let mut now: Vec<EventReading> = client.call(request::Read)?;
        self.read_at = Instant::now();
        for reading in &mut now {
            reading.handle = reading.handle.saturating_add(self.first_handle);
        }
        self.readings.clone_from(&self.left);
        self.readings.append(&mut now);
        Ok(())
    }

    /// Adds the events of hot-plugged vCPUs. These events have been counting since the first
    /// instruction of the vCPU.
    ///
    /// # Errors
    /// Returns a [`ClientError`] if the VM refuses the request.
    pub(super) fn join(&mut self, client: &mut Client) -> Result<(), ClientError> {
        let joined: Vec<PluggedVcpuEvents> = match client.call(request::Joined) {
            Err(e) if e.is_gone() => return Ok(()),
            joined => joined?,
        };
        for of_vcpu in joined {
            match of_vcpu.refused {
                Some(why) => log::warn!("vCPU {} was added but is not counted: {why}", of_vcpu.vcpu),
                None => self.extend(of_vcpu.events),
            }
        }
        Ok(())
    }

    /// Continues the measurement in the destination process if the VM has moved. The counts in the
    /// destination process are added to those in the source process. Returns `false` if the VM has
    /// not moved.
    ///
    /// # Errors
    /// Returns an [`OperatorCommandError`] if the destination process refuses the events.
    pub(super) fn follow(
        &mut self,
        client: &mut Client,
        args: &StatArgs,
    ) -> Result<bool, OperatorCommandError> {
        let Some(moved) = find_moved(client) else {
            return Ok(false);
        };
        let left = std::mem::replace(client, moved);
        self.left.clone_from(&self.readings);
        let handles = self.opened.iter().filter_map(|event| event.handle);
        self.first_handle = handles.max().map_or(0, |handle| handle.saturating_add(1));
        let opened = open(client, args)?;
        self.extend(opened);
        let () = client.call(request::Enable)?;
        let to = client.info();
        log::warn!(
            "{} has moved to process {} as {}; its last {} ms there are not counted",
            left.info().name,
            to.pid,
            to.name,
            self.read_at.elapsed().as_millis()
        );
        Ok(true)
    }

    /// Adds events that were opened in the current process, and makes their handles unique.
    fn extend(&mut self, events: Vec<OpenedEvent>) {
        let first_handle = self.first_handle;
        self.opened.extend(events.into_iter().map(|mut event| {
            event.handle = event.handle.map(|handle| handle.saturating_add(first_handle));
            event
        }));
    }
}

fn open(client: &mut Client, args: &StatArgs) -> Result<Vec<OpenedEvent>, ClientError> {
    client.call(request::Open {
        events: args.events.clone(),
        vcpus: args.vcpu.as_ref().map(|list| list.0.clone()),
        // A VM-wide event also counts vCPUs that are hot-plugged later, from their first
        // instruction.
        whole: args.vcpu.is_none() && !args.per_vcpu,
        sampling: None,
    })
}
