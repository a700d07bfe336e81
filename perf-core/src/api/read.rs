//! Reading of counts, equivalent to `read(2)` on a kernel event.

use std::sync::atomic::Ordering::Relaxed;

use smallvec::SmallVec;

use crate::api::handle::EventHandle;
use crate::attr::ReadFormat;
use crate::estimate::{Estimate, linear};
use crate::model::output::write_page;
use crate::model::slices::EstimateSum;
use crate::model::state::EventState;
use crate::model::totals::Totals;
use crate::pmu::VcpuId;
use crate::record::{ReadFormatEntries, ReadFormatEntry, ReadFormatValues, read_size_of};
use crate::service::error::PerfEventControlError;
use crate::service::open_events::EventRef;
use crate::time::EventTimeTotals;

/// The count of an event, together with its time enabled and time running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// Count of the event, summed over all children.
    pub value: u64,
    /// Time enabled: the time for which the event was enabled while its context was scheduled in,
    /// in nanoseconds, summed over all children.
    pub time_enabled_ns: u64,
    /// Time running: the time for which the event was counting, in nanoseconds, summed over all
    /// children.
    pub time_running_ns: u64,
    /// ID of the event that was read.
    pub id: u64,
}

impl Reading {
    /// Returns the count scaled to the whole time enabled (count × time enabled / time running), or
    /// `None` if the event never ran. Without running time the count is unknown, not zero.
    #[must_use]
    pub fn estimate(&self) -> Option<u64> {
        linear(self.value, self.time_enabled_ns, self.time_running_ns)
    }

    /// Returns the time enabled and the time running of the event.
    #[must_use]
    pub fn times(&self) -> EventTimeTotals {
        EventTimeTotals {
            enabled_ns: self.time_enabled_ns,
            running_ns: self.time_running_ns,
        }
    }

    fn new(totals: Totals, id: u64) -> Self {
        Self {
            value: totals.count,
            time_enabled_ns: totals.times.enabled_ns,
            time_running_ns: totals.times.running_ns,
            id,
        }
    }
}

/// The contribution of one vCPU to a VM-wide event, including the counts of children that have
/// exited on this vCPU.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VcpuReading {
    /// ID of the vCPU, which may have been removed.
    pub vcpu: VcpuId,
    /// Count and times of the event on this vCPU.
    pub reading: Reading,
    /// Estimate of the full count on this vCPU, or `None` if the event was not counted on the vCPU.
    pub estimate: Option<Estimate>,
}

/// The count of an event with its estimate and, for a VM-wide event, the contributions of the
/// vCPUs. All values stem from one reading of each vCPU, so the contributions add up to the total.
#[derive(Clone, Debug, PartialEq)]
pub struct DetailedReading {
    /// Count and times of the event.
    pub reading: Reading,
    /// Estimate of the count over the whole time enabled, with a standard error. Interpolated from
    /// the time slices in which the event ran, and summed over the vCPUs of a VM-wide event. `None`
    /// if the event was not counted, or if a VM-wide event was enabled but not counted on some
    /// vCPU.
    pub estimate: Option<Estimate>,
    /// Contribution of each vCPU to a VM-wide event, in order of vCPU number, including removed
    /// vCPUs. Empty for all other events.
    pub vcpus: Vec<VcpuReading>,
}

/// The readings of all members of a group, leader first. Stored inline for up to eight members.
pub type GroupReading = SmallVec<[Reading; 8]>;

impl EventRef {
    /// Returns the sum of the totals of the event itself, of its exited children and of its live
    /// children.
    fn totals(&self) -> Option<Totals> {
        let family = self.family();
        let output;
        let mut totals = {
            let now_ns = self.cell.now_ns();
            let mut context = self.cell.lock();
            let event = context.get(self.key, &self.shared)?;
            output = event.output.clone().filter(|o| o.owner == self.shared.id);
            context.totals(self.key, now_ns)
        };
        if let Some(family) = family {
            totals.add(family.totals(&self.shared.folded));
        }
        if let Some(output) = output {
            write_page(&output, totals);
        }
        Some(totals)
    }
}

impl EventHandle {
    /// Reads the event. On the vCPU's own thread, this takes one context lock and one driver read.
    /// For a family (a VM-wide event with children), all vCPUs are read. An event in the error
    /// state returns its last value. Use [`EventHandle::state`] or [`EventHandle::read_bytes`] to
    /// detect this state.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn read(&self) -> Result<Reading, PerfEventControlError> {
        let totals = self.inner.event.totals().ok_or(PerfEventControlError::Closed)?;
        Ok(Reading::new(totals, self.id()))
    }

    /// Reads the event, its estimate, and the contributions of the vCPUs. Reads each vCPU once,
    /// under its own lock, so the contributions of running vCPUs are not simultaneous.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn read_in_detail(&self) -> Result<DetailedReading, PerfEventControlError> {
        let event = &self.inner.event;
        let family = event.family();
        let (mut totals, mut estimate) = {
            let now_ns = event.cell.now_ns();
            let mut context = event.cell.lock();
            context
                .get(event.key, &event.shared)
                .ok_or(PerfEventControlError::Closed)?;
            context.totals_and_estimate(event.key, now_ns)
        };
        let children = family
            .map(|family| family.read(&event.shared.folded))
            .unwrap_or_default();
        totals.add(children.totals);
        estimate.add(children.estimate);
        let part = |(vcpu, totals, estimate): (VcpuId, Totals, EstimateSum)| VcpuReading {
            vcpu,
            reading: Reading::new(totals, self.id()),
            estimate: estimate.get(),
        };
        Ok(DetailedReading {
            reading: Reading::new(totals, self.id()),
            estimate: estimate.get(),
            vcpus: children.by_vcpu.into_iter().map(part).collect(),
        })
    }

    /// Returns [`DetailedReading::estimate`].
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn estimate(&self) -> Result<Option<Estimate>, PerfEventControlError> {
        Ok(self.read_in_detail()?.estimate)
    }

    /// Returns [`DetailedReading::vcpus`].
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn read_by_vcpu(&self) -> Result<Vec<VcpuReading>, PerfEventControlError> {
        Ok(self.read_in_detail()?.vcpus)
    }

    /// Returns `true` if the event, or its child on some vCPU, is in the error state and has
    /// stopped counting there.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        let event = &self.inner.event;
        let family = event.family();
        let own = event
            .cell
            .lock()
            .get(event.key, &event.shared)
            .is_some_and(|e| e.state == EventState::Error);
        let mut children = family.iter().flat_map(|f| f.live());
        own || children.any(|child| child.cell.lock().events[child.key].state == EventState::Error)
    }

    /// Reads only the count of an event, without its times. Cheaper than [`EventHandle::read`],
    /// because the clock is not read. A family (a VM-wide event with children) is read entirely.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    #[inline]
    pub fn count(&self) -> Result<u64, PerfEventControlError> {
        if self.is_family() {
            return self.read().map(|r| r.value);
        }
        let event = &self.inner.event;
        let mut context = event.cell.lock();
        let live = context
            .get(event.key, &event.shared)
            .ok_or(PerfEventControlError::Closed)?;
        let count = live.count();
        if live.is_lost() {
            context.handle_lost_slot(event.key, event.cell.now_ns());
        }
        Ok(count)
    }

    /// Returns the age of the last value of a package count (a driver's single count for the whole
    /// VM), in nanoseconds. Returns `None` for all other events, whose values are always current.
    /// See [`crate::PmuEvent::count_age_ns`].
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn count_age_ns(&self) -> Result<Option<u64>, PerfEventControlError> {
        let event = &self.inner.event;
        let mut context = event.cell.lock();
        Ok(context
            .get(event.key, &event.shared)
            .ok_or(PerfEventControlError::Closed)?
            .count_age_ns())
    }

    /// Reads all members of the event's group, leader first. The call may be made on the handle of
    /// any member. Members of a group without children are read at the same instant.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn read_group(&self) -> Result<GroupReading, PerfEventControlError> {
        Ok(self
            .read_members()?
            .into_iter()
            .map(|(reading, _)| reading)
            .collect())
    }

    /// Reads each member of the event's group, together with the member's number of lost records.
    fn read_members(&self) -> Result<SmallVec<[(Reading, u64); 8]>, PerfEventControlError> {
        let event = &self.inner.event;
        if !self.is_family() {
            let now_ns = event.cell.now_ns();
            let mut context = event.cell.lock();
            let group = context
                .get(event.key, &event.shared)
                .ok_or(PerfEventControlError::Closed)?
                .group;
            let mut out = SmallVec::new();
            for i in 0..context.groups[group].members.len() {
                let key = context.groups[group].members[i];
                let totals = context.totals(key, now_ns);
                let shared = &context.events[key].shared;
                out.push((Reading::new(totals, shared.id), shared.lost.load(Relaxed)));
            }
            return Ok(out);
        }
        let members = event
            .group(&self.inner.core.opened)
            .ok_or(PerfEventControlError::Closed)?;
        Ok(members
            .iter()
            .filter_map(|m| {
                Some((
                    Reading::new(m.totals()?, m.shared.id),
                    m.shared.lost.load(Relaxed),
                ))
            })
            .collect())
    }

    /// Returns the size of the result of [`EventHandle::read_bytes`], in bytes: 8 for each time in
    /// the read format, 8 for the number of members of a group reading, and for each member 8 for
    /// each of its value, ID and lost count, if the read format contains them.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Closed`] if the event is closed.
    pub fn read_size(&self) -> Result<usize, PerfEventControlError> {
        let format = self.attr().read_format;
        let members = if format.contains(ReadFormat::GROUP) {
            let event = &self.inner.event;
            let mut context = event.cell.lock();
            let group = context
                .get(event.key, &event.shared)
                .ok_or(PerfEventControlError::Closed)?
                .group;
            context.groups[group].members.len()
        } else {
            1
        };
        Ok(read_size_of(format, members))
    }

    /// Reads the event as `read(2)` does: native-endian 64-bit words in the event's read format.
    /// Returns 0 bytes for an event in the error state. Never returns a partial reading.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::NoSpace`] if `buf` is shorter than
    /// [`EventHandle::read_size`], and [`PerfEventControlError::Closed`] if the event is closed. A
    /// failed call has no effect.
    pub fn read_bytes(&self, buf: &mut [u8]) -> Result<usize, PerfEventControlError> {
        let event = &self.inner.event;
        let state = event
            .cell
            .lock()
            .get(event.key, &event.shared)
            .ok_or(PerfEventControlError::Closed)?
            .state;
        if state == EventState::Error {
            return Ok(0);
        }
        let needed = self.read_size()?;
        if buf.len() < needed {
            return Err(PerfEventControlError::NoSpace {
                needed,
                available: buf.len(),
            });
        }
        let format = self.attr().read_format;
        let readings = if format.contains(ReadFormat::GROUP) {
            self.read_members()?
        } else {
            SmallVec::from_elem((self.read()?, self.lost_records()), 1)
        };
        // The group may have grown since the size was computed.
        let needed = read_size_of(format, readings.len());
        if buf.len() < needed {
            return Err(PerfEventControlError::NoSpace {
                needed,
                available: buf.len(),
            });
        }
        let (leader, _) = readings.first().ok_or(PerfEventControlError::Closed)?;
        let entries: SmallVec<[ReadFormatEntry; 8]> = readings
            .iter()
            .map(|(reading, lost)| ReadFormatEntry {
                value: reading.value,
                id: reading.id,
                lost: *lost,
            })
            .collect();
        let values = ReadFormatValues {
            time_enabled_ns: leader.time_enabled_ns,
            time_running_ns: leader.time_running_ns,
            entries: ReadFormatEntries::List(&entries),
        };
        values.encode(format, &mut &mut buf[..needed]);
        Ok(needed)
    }
}
