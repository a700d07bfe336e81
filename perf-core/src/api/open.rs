//! Opening of events: validation of the request, driver selection and insertion into a context.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::api::handle::{EventHandle, HandleInner};
use crate::api::session::Session;
use crate::attr::{Attr, ReadFormat, SampleType};
use crate::context::ContextCell;
use crate::model::event::{Event, EventShared, Source};
use crate::model::state::Owner;
use crate::pmu::VcpuId;
use crate::service::config::{SessionRole, User};
use crate::service::core::{CoreInner, PerfCore};
use crate::service::error::PerfEventOpenError;
use crate::service::open_events::{EventLinks, EventRef};
use crate::service::placement::Placement;

/// The vCPU, thread, CPU or VM that an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventOpenTarget {
    /// One vCPU, or one host thread or host CPU that was added with [`PerfCore::add_thread`] or
    /// [`PerfCore::add_cpu`] and is identified by its context number.
    Vcpu(VcpuId),
    /// The whole VM. If the driver counts per vCPU, a child event is created on each existing vCPU
    /// and, with [`Attr::inherit`], on each vCPU that is added later.
    Vm,
}

/// Flags of [`PerfCore::open`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// Makes the event not join the group of the `group` argument of [`PerfCore::open`]. The
    /// argument then only selects the ring for [`OpenFlags::output`].
    pub no_group: bool,
    /// Number by which the VMM identifies the event in overflow reports
    /// ([`crate::OverflowReport::cookie`]), or `None` for no reports.
    pub cookie: Option<u64>,
    /// Redirects the records of the event to the ring of the `group` argument of
    /// [`PerfCore::open`], as [`EventHandle::set_output`] does.
    pub output: bool,
}

impl OpenFlags {
    /// Value of the flag `PERF_FLAG_FD_NO_GROUP` of `perf_event_open(2)`.
    const NO_GROUP: u64 = 1;
    /// Value of the flag `PERF_FLAG_FD_OUTPUT` of `perf_event_open(2)`.
    const OUTPUT: u64 = 1 << 1;

    /// Creates flags for an event that reports its overflows under `cookie`.
    #[must_use]
    pub fn with_cookie(cookie: u64) -> Self {
        Self {
            cookie: Some(cookie),
            ..Self::default()
        }
    }

    /// Converts the `flags` argument of `perf_event_open(2)`.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventOpenError::Combination`] if a flag is unknown.
    pub fn from_bits(bits: u64) -> Result<Self, PerfEventOpenError> {
        if bits & !(Self::NO_GROUP | Self::OUTPUT) != 0 {
            return Err(PerfEventOpenError::Combination(
                "unknown open flags; NO_GROUP (1) and OUTPUT (2) are known",
            ));
        }
        let has = |flag| bits & flag != 0;
        Ok(Self {
            no_group: has(Self::NO_GROUP),
            output: has(Self::OUTPUT),
            cookie: None,
        })
    }
}

impl PerfCore {
    /// Opens an event for `session`.
    ///
    /// If `group` is given, the event joins the group of that event, which must be a group leader
    /// in the same context. The event starts counting immediately unless [`Attr::disabled`] is set.
    /// An event that cannot be scheduled yet is not an error (see [`crate::EventState`]).
    ///
    /// # Errors
    ///
    /// Returns a [`PerfEventOpenError`], which maps to the errno of `perf_event_open(2)`. A failed
    /// call has no effect.
    pub fn open(
        &self,
        session: &Session,
        attr: Attr,
        target: EventOpenTarget,
        group: Option<&EventHandle>,
        flags: OpenFlags,
    ) -> Result<EventHandle, PerfEventOpenError> {
        let core = &self.inner;
        let admin = session.inner.user.is_admin();
        core.limits.check_attr(&attr, admin)?;
        core.check_combinations(&attr)?;
        if target == EventOpenTarget::Vm {
            core.limits.check_vm(admin)?;
        }
        if !admin && session.inner.user.uid != core.config.owner_uid {
            return Err(PerfEventOpenError::NotOwner);
        }
        // No vCPU may be added or removed until the event is linked.
        let mut topology = core.topology();
        let cell = match target {
            EventOpenTarget::Vm => Arc::clone(&core.vm),
            EventOpenTarget::Vcpu(vcpu) => {
                let vcpus = core.vcpus.load();
                let found = vcpus
                    .iter()
                    .find(|v| v.id() == vcpu)
                    .ok_or(PerfEventOpenError::NoSuchVcpu(vcpu))?;
                found.cell.load_full()
            }
        };
        if cell.cpu().is_some() && core.limits.check_vm(admin).is_err() {
            return Err(PerfEventOpenError::CpuDenied);
        }
        let leader = group.filter(|_| !flags.no_group).map(|h| &h.inner.event);
        if let Some(leader) = leader {
            check_leader(leader, &cell, &attr)?;
        }
        core.limits.check_raw(&attr, admin)?;
        let owner = match (session.inner.user.role, target) {
            (SessionRole::Guest, _) => Owner::Guest,
            (_, EventOpenTarget::Vm) => Owner::OperatorVm,
            (_, EventOpenTarget::Vcpu(_)) => Owner::OperatorVcpu,
        };
        let place = core.place_event(&attr, cell, owner, leader)?;
        let output = if flags.output {
            let target = group.ok_or(PerfEventOpenError::Group("no handle to redirect the output to"))?;
            target
                .inner
                .event
                .can_be_output()
                .map_err(PerfEventOpenError::Output)?;
            Some(&target.inner.event)
        } else {
            None
        };
        let handle = core.install(session.inner.user, attr, place, leader, output, flags)?;
        if handle.inner.event.shared.is_family {
            topology.generation += 1;
        }
        drop(topology);
        let mut owned = session.inner.owned.lock();
        // Removes closed events only when the length is a power of two, so that opening an event
        // takes amortized constant time.
        if owned.len().is_power_of_two() {
            owned.retain(|h| h.strong_count() > 0);
        }
        owned.push(Arc::downgrade(&handle.inner));
        Ok(handle)
    }
}

impl CoreInner {
    fn check_combinations(&self, attr: &Attr) -> Result<(), PerfEventOpenError> {
        self.limits.check_rate(attr)?;
        if !attr.freq && attr.sample_period >> 63 != 0 {
            return Err(PerfEventOpenError::Combination(
                "a sample period must be below 2^63",
            ));
        }
        let group_samples = attr.sample_type.contains(SampleType::READ);
        if attr.inherit && group_samples && attr.read_format.contains(ReadFormat::GROUP) {
            return Err(PerfEventOpenError::Combination(
                "samples of an inherited event cannot hold group readings",
            ));
        }
        Ok(())
    }

    fn install(
        self: &Arc<Self>,
        user: User,
        attr: Attr,
        place: Placement,
        leader: Option<&EventRef>,
        output: Option<&EventRef>,
        flags: OpenFlags,
    ) -> Result<EventHandle, PerfEventOpenError> {
        let Placement {
            cell,
            source,
            hardware,
            owner,
        } = place;
        let is_family = matches!(source, Source::Family);
        let enabled = !attr.disabled;
        if is_family {
            self.check_hot_add(&attr, leader)?;
        } else {
            self.check_slots(&cell, hardware, leader.map(|l| l.key))?;
        }
        let shared = Arc::new(EventShared::new(attr, owner, flags.cookie, is_family));
        let links = Arc::new(EventLinks::new(is_family));
        // Registers the event before it joins its group, because group members are looked up by ID.
        self.opened.add(shared.id, &links);
        let now_ns = cell.now_ns();
        let ring = output.and_then(EventRef::own_output);
        let key = {
            let mut context = cell.lock();
            let reserved = self.limits.reserved_slots.load(Ordering::Relaxed);
            let place = hardware.map(|h| (context.pool(h.driver, h.counters, reserved), h.suitable_counters));
            let mut event = Event::new(Arc::clone(&shared), None, place, source, enabled);
            // Sets the output before the event is added to the context, because the first record
            // may be written immediately.
            event.output = ring;
            context.clone_of = None;
            let key = context.add(event, leader.map(|l| l.key), now_ns);
            cell.publish_raised(&context);
            key
        };
        let event = EventRef {
            cell,
            key,
            shared,
            links,
        };
        if let Some(target) = output {
            event.record_redirect(target);
        }
        let handle = EventHandle {
            inner: Arc::new(HandleInner::new(Arc::clone(self), user, event)),
        };
        if is_family && let Err(error) = self.fan_out(&handle.inner.event, leader) {
            handle.inner.undo_open();
            return Err(error);
        }
        Ok(handle)
    }

    /// Creates the children of a new VM-wide event on the existing vCPUs.
    fn fan_out(&self, event: &EventRef, leader: Option<&EventRef>) -> Result<(), PerfEventOpenError> {
        for vcpu in self.vcpus.load().iter() {
            let cell = vcpu.cell.load_full();
            if !cell.is_vcpu() {
                continue;
            }
            let leader_key = match leader {
                None => None,
                Some(leader) => match leader.child_in(&cell) {
                    Some(key) => Some(key),
                    // Skips a vCPU on which the leader has no child. Such a vCPU was added after a
                    // leader without `inherit` was opened.
                    None => continue,
                },
            };
            self.check_child(&event.shared.attr, &cell, leader_key)?;
            self.inherit(event.key, &event.shared, &event.links, &cell, leader_key)?;
        }
        Ok(())
    }
}

fn check_leader(leader: &EventRef, cell: &Arc<ContextCell>, attr: &Attr) -> Result<(), PerfEventOpenError> {
    if !Arc::ptr_eq(&leader.cell, cell) {
        return Err(PerfEventOpenError::Group("it is in another context"));
    }
    let mut context = leader.cell.lock();
    if context.get(leader.key, &leader.shared).is_none() {
        return Err(PerfEventOpenError::Group("its leader is closed"));
    }
    if !context.is_leader(leader.key) {
        return Err(PerfEventOpenError::Group("the handle is not a leader"));
    }
    if attr.pinned || attr.exclusive {
        return Err(PerfEventOpenError::Group(
            "only leaders may be pinned or exclusive",
        ));
    }
    Ok(())
}
