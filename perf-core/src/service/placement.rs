//! Selection of the context and driver of new events, and checks that enough slots exist.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::attr::{Attr, EventType};
use crate::context::ContextCell;
use crate::model::event::Source;
use crate::model::keys::EventKey;
use crate::model::software::SoftwareEventId;
use crate::model::state::Owner;
use crate::pmu::{PmuError, PmuEventTarget, VcpuId};
use crate::schedule::SharePolicy;
use crate::schedule::counter_assignments::{CounterAssignments, CounterConflict};
use crate::service::core::{CoreInner, HardwareNeeds};
use crate::service::error::PerfEventOpenError;
use crate::service::open_events::EventRef;

/// The context, the source of the counts and the owner of a new event.
pub(crate) struct Placement {
    pub cell: Arc<ContextCell>,
    pub source: Source,
    /// Counters that the new event needs, or `None` if it needs no slot.
    pub hardware: Option<HardwareNeeds>,
    pub owner: Owner,
}

impl CoreInner {
    /// Determines the context, the source of the counts and the owner of a new event. A VM-wide
    /// event becomes a family (a parent with one child per vCPU) if its driver counts per vCPU. If
    /// the driver counts for the whole package, the event remains a single event regardless of
    /// `inherit`, because its count would otherwise be multiplied.
    pub fn place_event(
        &self,
        attr: &Attr,
        cell: Arc<ContextCell>,
        owner: Owner,
        leader: Option<&EventRef>,
    ) -> Result<Placement, PerfEventOpenError> {
        let leads_family = leader.map(|l| l.shared.is_family);
        let without_slot = |cell, source| Placement {
            cell,
            source,
            hardware: None,
            owner,
        };
        if cell.vcpu().is_some() {
            let (source, hardware) = self.source(attr, &cell, leader.map(|l| l.key))?;
            return Ok(Placement {
                cell,
                source,
                hardware,
                owner,
            });
        }
        if attr.ty == EventType::VMM {
            if SoftwareEventId::from_config(attr.config).is_none() {
                return Err(PerfEventOpenError::NoSuchSoftwareEvent(attr.config));
            }
            let fans_out = leads_family.unwrap_or(attr.inherit);
            let source = if fans_out {
                Source::Family
            } else {
                Source::Raised(0)
            };
            return Ok(without_slot(cell, source));
        }
        let (at, pmu, capacity) = self
            .driver(attr.ty)
            .ok_or(PerfEventOpenError::NoDriver(attr.ty))?;
        let whole = match pmu.open(attr, PmuEventTarget::Vm) {
            Ok(mut event) => {
                let package = event.count().is_some();
                (package || !leads_family.unwrap_or(attr.inherit)).then_some(event)
            }
            Err(error @ (PmuError::NoSuchEvent | PmuError::Unsupported(_))) => {
                // A driver that cannot count a VM may count its vCPUs. The error is final if the
                // leader is not a family, or if there is no vCPU yet and later vCPUs would not
                // inherit the event. For a sibling, the leader's `inherit` flag applies.
                let none = !self.vcpus.load().iter().any(|v| v.cell.load().is_vcpu());
                let inherits = leader.map_or(attr.inherit, |l| l.shared.attr.inherit);
                if leads_family == Some(false) || (none && !inherits) {
                    return Err(error.into());
                }
                None
            }
            Err(error) => return Err(error.into()),
        };
        match whole {
            Some(_) if leads_family == Some(true) => Err(PerfEventOpenError::Group(
                "a package count cannot join a group that fans out over vCPUs",
            )),
            Some(event) => Ok(Placement {
                cell,
                source: Source::Driver(event),
                hardware: HardwareNeeds::of(at, &*pmu, capacity, attr),
                owner,
            }),
            None => Ok(without_slot(cell, Source::Family)),
        }
    }

    /// Performs [`CoreInner::check_slots`] for a child that an event with attributes `attr` will
    /// have.
    pub fn check_child(
        &self,
        attr: &Attr,
        cell: &ContextCell,
        leader: Option<EventKey>,
    ) -> Result<(), PerfEventOpenError> {
        let hardware = self
            .driver(attr.ty)
            .and_then(|(at, pmu, capacity)| HardwareNeeds::of(at, &*pmu, capacity, attr));
        self.check_slots(cell, hardware, leader)
    }

    /// Checks that a VM-wide event and its group would fit on a vCPU that is added later and has
    /// only inherited events. Without this check, a hot-add could fail because of events that were
    /// opened while there was no vCPU.
    pub fn check_hot_add(&self, attr: &Attr, leader: Option<&EventRef>) -> Result<(), PerfEventOpenError> {
        let leads = leader.map_or(attr.inherit, |l| l.shared.attr.inherit);
        let Some((at, pmu, capacity)) = self.driver(attr.ty).filter(|_| leads) else {
            return Ok(());
        };
        let Some(hardware) = HardwareNeeds::of(at, &*pmu, capacity, attr) else {
            return Ok(());
        };
        // Counter assignments of VM-wide events of this driver: those of the event's group, and
        // those of all groups that a new vCPU inherits.
        let (mut group, mut all) = (
            CounterAssignments::new(hardware.counters),
            CounterAssignments::new(hardware.counters),
        );
        let vm = self.vm.lock();
        for (_, members) in vm.groups.iter() {
            let first = &vm.events[members.leader()].shared;
            let own = leader.is_some_and(|l| Arc::ptr_eq(&l.shared, first));
            if !first.is_family || !(own || first.attr.inherit) {
                continue;
            }
            for member in members.members.iter().map(|m| &vm.events[*m].shared.attr) {
                let other = self
                    .driver(member.ty)
                    .and_then(|(at, pmu, capacity)| HardwareNeeds::of(at, &*pmu, capacity, member));
                match other {
                    Some(other) if other.driver == at => {
                        if own {
                            let _ = group.take_one(other.suitable_counters);
                        }
                        let _ = all.take_one(other.suitable_counters);
                    }
                    Some(_) if own => {
                        return Err(PerfEventOpenError::Group(
                            "its hardware events belong to another driver",
                        ));
                    }
                    _ => {}
                }
            }
        }
        drop(vm);
        group.take_one(hardware.suitable_counters).map_err(too_large)?;
        if self.is_strict() {
            all.take_one(hardware.suitable_counters).map_err(|crowd| {
                PerfEventOpenError::OvercommittedVm {
                    slots: crowd.counters,
                }
            })?;
        }
        Ok(())
    }

    /// Returns `true` if the core rejects an event that cannot be active at the same time as all
    /// other events.
    fn is_strict(&self) -> bool {
        self.limits.share() == SharePolicy::Strict || !self.limits.overcommit.load(Ordering::Relaxed)
    }

    /// Checks that the slots suffice for one more hardware event. The event must always fit
    /// together with the other members of its group, and also together with all other events if
    /// slots may not be shared.
    pub fn check_slots(
        &self,
        cell: &ContextCell,
        hardware: Option<HardwareNeeds>,
        leader: Option<EventKey>,
    ) -> Result<(), PerfEventOpenError> {
        let Some(hardware) = hardware else {
            return Ok(());
        };
        let mut context = cell.lock();
        let reserved = self.limits.reserved_slots.load(Ordering::Relaxed);
        let pool = context.pool(hardware.driver, hardware.counters, reserved);
        let mut group = CounterAssignments::new(hardware.counters);
        if let Some(leader) = leader {
            let members = &context.groups[context.events[leader].group];
            match members.pool {
                Some(other) if other != pool => {
                    return Err(PerfEventOpenError::Group(
                        "its hardware events belong to another driver",
                    ));
                }
                _ => {}
            }
            for event in members.members.iter().map(|m| &context.events[*m]) {
                if event.pool.is_some() {
                    // Cannot fail, because these events were checked when they were opened.
                    let _ = group.take_one(event.suitable_counters);
                }
            }
        }
        group.take_one(hardware.suitable_counters).map_err(too_large)?;
        if self.is_strict() {
            let mut all = CounterAssignments::new(hardware.counters);
            for (_, event) in context.events.iter().filter(|(_, e)| e.pool == Some(pool)) {
                let _ = all.take_one(event.suitable_counters);
            }
            let vcpu = cell.vcpu().map_or(VcpuId(0), |(vcpu, _)| vcpu);
            all.take_one(hardware.suitable_counters)
                .map_err(|crowd| PerfEventOpenError::Overcommitted {
                    vcpu,
                    slots: crowd.counters,
                })?;
        }
        Ok(())
    }
}

fn too_large(crowd: CounterConflict) -> PerfEventOpenError {
    PerfEventOpenError::GroupTooLarge {
        needed: crowd.events,
        slots: crowd.counters,
    }
}
