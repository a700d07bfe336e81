//! Reading counts: what `read(2)` on a kernel event gives.

use std::sync::atomic::Ordering::Relaxed;

use smallvec::SmallVec;

use crate::api::handle::Handle;
use crate::attr::ReadFormat;
use crate::estimate::{Estimate, linear};
use crate::model::output::write_page;
use crate::model::slices::EstimateSum;
use crate::model::state::State;
use crate::model::totals::Totals;
use crate::pmu::VcpuId;
use crate::record::{Entries, ReadEntry, ReadValues, read_size_of};
use crate::service::error::ControlError;
use crate::service::opened::EventRef;
use crate::time::Times;

/// One reading: the value with the times that belong to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reading {
    /// The count, over all children.
    pub value: u64,
    /// Nanoseconds the event was enabled while its contexts were in, summed over its children.
    pub time_enabled_ns: u64,
    /// Nanoseconds of that it was on the PMU.
    pub time_running_ns: u64,
    /// The event's id.
    pub id: u64,
}

impl Reading {
    /// What the event would have counted had it been on all the time it was enabled; `None` if it never was
    /// on: then it was not counted, and no number may be shown.
    #[must_use]
    pub fn estimate(&self) -> Option<u64> {
        linear(self.value, self.time_enabled_ns, self.time_running_ns)
    }

    /// The two times.
    #[must_use]
    pub fn times(&self) -> Times {
        Times {
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

/// What one vCPU contributes to a VM-wide event, with what its exited children counted there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VcpuReading {
    /// The vCPU. It may have gone.
    pub vcpu: VcpuId,
    /// Its part of the event's reading.
    pub reading: Reading,
    /// Its part of the event's estimate; `None` if it was not counted there.
    pub estimate: Option<Estimate>,
}

/// A reading of all members of a group, the leader first. Inline up to eight members.
pub type GroupReading = SmallVec<[Reading; 8]>;

impl EventRef {
    /// Own, exited and live children's totals.
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

impl Handle {
    /// Reads the event: on the vCPU's own thread its context's lock, one driver read and arithmetic. A family
    /// is read from all its vCPUs. An event in the error state reads its last value; [`Handle::state`] and
    /// [`Handle::read_bytes`] tell.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    pub fn read(&self) -> Result<Reading, ControlError> {
        let totals = self.inner.event.totals().ok_or(ControlError::Closed)?;
        Ok(Reading::new(totals, self.id()))
    }

    /// What the event would have counted had it been on whenever it was enabled, from the course of its rate
    /// over the slices it was on, with a standard error. For a family the sum over its vCPUs. `None` if it
    /// was not counted; for a family also if it was enabled on some vCPU and not counted there.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    pub fn estimate(&self) -> Result<Option<Estimate>, ControlError> {
        let event = &self.inner.event;
        let family = event.family();
        let mut sum = {
            let now_ns = event.cell.now_ns();
            let mut context = event.cell.lock();
            context
                .get(event.key, &event.shared)
                .ok_or(ControlError::Closed)?;
            context.estimate(event.key, now_ns)
        };
        if let Some(family) = family {
            sum.add(family.estimate());
        }
        Ok(sum.get())
    }

    /// What each vCPU contributes to an event that fans out over them, by number; those that have gone
    /// included. Empty for any other event. They add up to what [`Handle::read`] gives while nothing counts;
    /// each part is read under its own vCPU's lock, so while vCPUs run the parts are as far apart as these
    /// reads.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    pub fn read_by_vcpu(&self) -> Result<Vec<VcpuReading>, ControlError> {
        let event = &self.inner.event;
        let family = event.family();
        event
            .cell
            .lock()
            .get(event.key, &event.shared)
            .ok_or(ControlError::Closed)?;
        let part = |(vcpu, totals, estimate): (VcpuId, Totals, EstimateSum)| VcpuReading {
            vcpu,
            reading: Reading::new(totals, self.id()),
            estimate: estimate.get(),
        };
        let parts = family.map(|family| family.by_vcpu()).unwrap_or_default();
        Ok(parts.into_iter().map(part).collect())
    }

    /// Whether the event, or a child of it on some vCPU, is in the error state: its count stands still there.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        let event = &self.inner.event;
        let family = event.family();
        let own = event
            .cell
            .lock()
            .get(event.key, &event.shared)
            .is_some_and(|e| e.state == State::Error);
        let mut children = family.iter().flat_map(|f| f.live());
        own || children.any(|child| child.cell.lock().events[child.key].state == State::Error)
    }

    /// Only the count of an event on one context: as [`Handle::read`] without looking at the clock.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    #[inline]
    pub fn count(&self) -> Result<u64, ControlError> {
        if self.is_family() {
            return self.read().map(|r| r.value);
        }
        let event = &self.inner.event;
        let mut context = event.cell.lock();
        let live = context
            .get(event.key, &event.shared)
            .ok_or(ControlError::Closed)?;
        let count = live.count();
        if live.is_lost() {
            context.notice(event.key, event.cell.now_ns());
        }
        Ok(count)
    }

    /// How old, in nanoseconds, the value of a package count is (see [`crate::PmuEvent::count_age_ns`]);
    /// `None` for events that count themselves, whose readings are fresh.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    pub fn count_age_ns(&self) -> Result<Option<u64>, ControlError> {
        let event = &self.inner.event;
        let mut context = event.cell.lock();
        Ok(context
            .get(event.key, &event.shared)
            .ok_or(ControlError::Closed)?
            .count_age_ns())
    }

    /// Reads every member of the event's group, the leader first; any member's handle will do. Members of a
    /// group without children are read at one instant.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    pub fn read_group(&self) -> Result<GroupReading, ControlError> {
        Ok(self
            .read_members()?
            .into_iter()
            .map(|(reading, _)| reading)
            .collect())
    }

    /// The members of the event's group, each with how many of its records were lost.
    fn read_members(&self) -> Result<SmallVec<[(Reading, u64); 8]>, ControlError> {
        let event = &self.inner.event;
        if !self.is_family() {
            let now_ns = event.cell.now_ns();
            let mut context = event.cell.lock();
            let group = context
                .get(event.key, &event.shared)
                .ok_or(ControlError::Closed)?
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
        let members = event.group(&self.inner.core.opened).ok_or(ControlError::Closed)?;
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

    /// How many bytes [`Handle::read_bytes`] gives: 8 for each time, 8 for the number of members of a group,
    /// and for each member 8, and 8 more for its id and for what it lost, if asked for.
    ///
    /// # Errors
    /// [`ControlError::Closed`].
    pub fn read_size(&self) -> Result<usize, ControlError> {
        let format = self.attr().read_format;
        let members = if format.contains(ReadFormat::GROUP) {
            let event = &self.inner.event;
            let mut context = event.cell.lock();
            let group = context
                .get(event.key, &event.shared)
                .ok_or(ControlError::Closed)?
                .group;
            context.groups[group].members.len()
        } else {
            1
        };
        Ok(read_size_of(format, members))
    }

    /// Reads the event as `read(2)` does, in its read format: native-endian 64-bit words. 0 bytes for an
    /// event in the error state. Never gives part of a reading.
    ///
    /// # Errors
    /// [`ControlError::NoSpace`] if `buf` is shorter than [`Handle::read_size`], with nothing done;
    /// [`ControlError::Closed`].
    pub fn read_bytes(&self, buf: &mut [u8]) -> Result<usize, ControlError> {
        let event = &self.inner.event;
        let state = event
            .cell
            .lock()
            .get(event.key, &event.shared)
            .ok_or(ControlError::Closed)?
            .state;
        if state == State::Error {
            return Ok(0);
        }
        let needed = self.read_size()?;
        if buf.len() < needed {
            return Err(ControlError::NoSpace {
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
        // The group may have grown since.
        let needed = read_size_of(format, readings.len());
        if buf.len() < needed {
            return Err(ControlError::NoSpace {
                needed,
                available: buf.len(),
            });
        }
        let (leader, _) = readings.first().ok_or(ControlError::Closed)?;
        let entries: SmallVec<[ReadEntry; 8]> = readings
            .iter()
            .map(|(reading, lost)| ReadEntry {
                value: reading.value,
                id: reading.id,
                lost: *lost,
            })
            .collect();
        let values = ReadValues {
            time_enabled_ns: leader.time_enabled_ns,
            time_running_ns: leader.time_running_ns,
            entries: Entries::List(&entries),
        };
        values.encode(format, &mut &mut buf[..needed]);
        Ok(needed)
    }
}
