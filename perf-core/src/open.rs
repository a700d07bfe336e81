//! Opening an event: what is checked, in which order, and where the event ends up.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::attr::{Attr, AttrError, EventType, ReadFormat, SampleType};
use crate::context::ContextCell;
use crate::control::ControlError;
use crate::core::{Core, CoreInner, Hardware};
use crate::event::{Event, EventShared, Owner, Source};
use crate::handle::{EventRef, Handle, HandleInner};
use crate::limits::{Role, Session, SessionInner};
use crate::pmu::{PmuError, Target, VcpuId};
use crate::schedule::{Crowd, Seats, SharePolicy};
use crate::software::SoftwareId;

/// Whose counts to collect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenTarget {
    /// One vCPU.
    Vcpu(VcpuId),
    /// The VM as a whole. Where the driver counts per vCPU the event fans out over the vCPUs there are, and
    /// with [`Attr::inherit`] over those added later.
    Vm,
}

/// Further ways to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenFlags {
    /// Do not join the group of the given handle (use it for output only).
    pub no_group: bool,
    /// Report overflows to the VMM under this number ([`crate::Overflowed::cookie`]).
    pub cookie: Option<u64>,
    /// Write records to the ring of the given handle, as [`Handle::set_output`] does.
    pub output: bool,
}

impl OpenFlags {
    /// `PERF_FLAG_FD_NO_GROUP`.
    const NO_GROUP: u64 = 1;
    /// `PERF_FLAG_FD_OUTPUT`.
    const OUTPUT: u64 = 1 << 1;

    /// The flags of `perf_event_open(2)`, for requests that come as numbers.
    ///
    /// # Errors
    /// [`OpenError::Combination`] for flags that are not known here.
    pub fn from_bits(bits: u64) -> Result<Self, OpenError> {
        if bits & !(Self::NO_GROUP | Self::OUTPUT) != 0 {
            return Err(OpenError::Combination(
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

/// Why an event was not opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The attributes are malformed.
    #[error(transparent)]
    Attr(#[from] AttrError),
    /// Counting the host's kernel needs the admin role at this paranoid level.
    #[error(
        "counting the host kernel is denied at this paranoid level; exclude the host or the kernel, or use the admin role"
    )]
    HostKernelDenied,
    /// VM-wide events need the admin role at this paranoid level.
    #[error("VM-wide events are denied at this paranoid level; open one vCPU, or use the admin role")]
    VmWideDenied,
    /// Raw samples need the admin role at this paranoid level.
    #[error("raw samples are denied at this paranoid level; drop RAW, or use the admin role")]
    RawDenied,
    /// The VM belongs to someone else.
    #[error("the VM belongs to another user; use the admin role")]
    NotOwner,
    /// The sampling frequency is above the limit.
    #[error("sampling frequency {asked} Hz is above the limit of {limit} Hz")]
    FrequencyTooHigh {
        /// Asked for, in Hz.
        asked: u64,
        /// The limit, in Hz.
        limit: u64,
    },
    /// Attributes that do not go together.
    #[error("{0}")]
    Combination(&'static str),
    /// No such vCPU, or it is being removed.
    #[error("no vCPU {}", .0.0)]
    NoSuchVcpu(VcpuId),
    /// The vCPU is there already.
    #[error("vCPU {} exists already", .0.0)]
    VcpuExists(VcpuId),
    /// The group handle cannot be joined.
    #[error("cannot join the group: {0}")]
    Group(&'static str),
    /// The group needs more slots than there are for its events.
    #[error("{needed} events of the group need a slot of a kind of which the PMU has {slots}")]
    GroupTooLarge {
        /// Events that can share these slots only.
        needed: usize,
        /// Slots there are for them.
        slots: usize,
    },
    /// Sharing is off and the slots are taken.
    #[error(
        "all {slots} slots of vCPU {} that could hold it are taken and sharing is off; close an event or allow sharing",
        .vcpu.0
    )]
    Overcommitted {
        /// Where.
        vcpu: VcpuId,
        /// Slots there are for such an event.
        slots: usize,
    },
    /// Sharing is off and VM-wide events would take more slots than a vCPU has.
    #[error(
        "VM-wide events have taken all {slots} slots of each vCPU that could hold it and sharing is off; close one or allow sharing"
    )]
    OvercommittedVm {
        /// Slots there are for such an event.
        slots: usize,
    },
    /// The VMM raises no such event.
    #[error("the VMM raises no event {0}")]
    NoSuchSoftwareEvent(u64),
    /// Records cannot be redirected to the given handle.
    #[error("cannot redirect the output")]
    Output(#[source] ControlError),
    /// No driver serves the type.
    #[error("no driver serves event type {:#x}", .0.0)]
    NoDriver(EventType),
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] PmuError),
}

impl OpenError {
    /// The error number `perf_event_open(2)` gives in this case.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Attr(error) => error.errno(),
            Self::HostKernelDenied | Self::VmWideDenied | Self::NotOwner => libc::EACCES,
            Self::RawDenied => libc::EPERM,
            Self::FrequencyTooHigh { .. }
            | Self::Combination(_)
            | Self::Group(_)
            | Self::GroupTooLarge { .. }
            | Self::NoSuchSoftwareEvent(_)
            | Self::NoDriver(_) => libc::EINVAL,
            Self::Output(error) => error.errno(),
            Self::NoSuchVcpu(_) => libc::ESRCH,
            Self::VcpuExists(_) => libc::EEXIST,
            Self::Overcommitted { .. } | Self::OvercommittedVm { .. } => libc::EBUSY,
            Self::Driver(error) => pmu_errno(error),
        }
    }
}

/// The error number of a driver's refusal.
pub(crate) fn pmu_errno(error: &PmuError) -> i32 {
    match error {
        PmuError::NoSuchEvent => libc::ENOENT,
        PmuError::Unsupported(_) => libc::EINVAL,
        PmuError::Busy => libc::EAGAIN,
        PmuError::Mediated(source) | PmuError::Os { source, .. } => {
            source.raw_os_error().unwrap_or(libc::EIO)
        }
    }
}

/// Where a new event goes.
struct Place {
    cell: Arc<ContextCell>,
    source: Source,
    /// What it needs of a hardware driver.
    hardware: Option<Hardware>,
    owner: Owner,
}

impl Core {
    /// Opens an event for `session`.
    ///
    /// With `group` it joins the group of that handle, which must be a leader in the same context. The event
    /// counts from now on, unless [`Attr::disabled`]; that it cannot be put on now is no error (see
    /// [`crate::State`]).
    ///
    /// # Errors
    /// [`OpenError`], each variant with the error number of `perf_event_open(2)`. Nothing is left behind.
    pub fn open(
        &self,
        session: &Session,
        attr: Attr,
        target: OpenTarget,
        group: Option<&Handle>,
        flags: OpenFlags,
    ) -> Result<Handle, OpenError> {
        let core = &self.inner;
        let admin = session.inner.is_admin();
        core.limits.check_attr(&attr, admin)?;
        core.check_combinations(&attr)?;
        if target == OpenTarget::Vm {
            core.limits.check_vm(admin)?;
        }
        if !admin && session.inner.uid != core.config.owner_uid {
            return Err(OpenError::NotOwner);
        }
        // From here until the event is linked no vCPU comes or goes.
        let mut topology = core.topology();
        let cell = match target {
            OpenTarget::Vm => Arc::clone(&core.vm),
            OpenTarget::Vcpu(vcpu) => {
                let vcpus = core.vcpus.load();
                let found = vcpus
                    .iter()
                    .find(|v| v.id() == vcpu)
                    .ok_or(OpenError::NoSuchVcpu(vcpu))?;
                found.cell.load_full()
            }
        };
        let leader = group.filter(|_| !flags.no_group).map(|h| &h.inner.event);
        if let Some(leader) = leader {
            check_leader(leader, &cell, &attr)?;
        }
        core.limits.check_raw(&attr, admin)?;
        let owner = match (session.inner.role, target) {
            (Role::Guest, _) => Owner::Guest,
            (_, OpenTarget::Vm) => Owner::OperatorVm,
            (_, OpenTarget::Vcpu(_)) => Owner::OperatorVcpu,
        };
        let place = core.place(&attr, cell, owner, leader)?;
        let output = if flags.output {
            let target = group.ok_or(OpenError::Group("no handle to redirect the output to"))?;
            target.inner.event.can_be_output().map_err(OpenError::Output)?;
            Some(&target.inner.event)
        } else {
            None
        };
        let handle = core.install(&session.inner, attr, place, leader, output, flags)?;
        if handle.inner.event.shared.family.is_some() {
            topology.generation += 1;
        }
        drop(topology);
        let mut owned = session.inner.owned.lock();
        // Now and then, so that opening many costs no more for each.
        if owned.len().is_power_of_two() {
            owned.retain(|h| h.strong_count() > 0);
        }
        owned.push(Arc::downgrade(&handle.inner));
        Ok(handle)
    }
}

impl CoreInner {
    fn check_combinations(&self, attr: &Attr) -> Result<(), OpenError> {
        self.limits.check_rate(attr)?;
        if !attr.freq && attr.sample_period >> 63 != 0 {
            return Err(OpenError::Combination("a sample period must be below 2^63"));
        }
        let group_samples = attr.sample_type.contains(SampleType::READ);
        if attr.inherit && group_samples && attr.read_format.contains(ReadFormat::GROUP) {
            return Err(OpenError::Combination(
                "samples of an inherited event cannot hold group readings",
            ));
        }
        Ok(())
    }

    /// Finds the source of the counts. A VM-wide event whose driver counts per vCPU becomes a family; one
    /// whose driver counts for the package is one event whatever `inherit` says, or its count would be
    /// multiplied.
    fn place(
        &self,
        attr: &Attr,
        cell: Arc<ContextCell>,
        owner: Owner,
        leader: Option<&EventRef>,
    ) -> Result<Place, OpenError> {
        let leads_family = leader.map(|l| l.shared.family.is_some());
        let family = |cell| Place {
            cell,
            source: Source::Family,
            hardware: None,
            owner,
        };
        if cell.vcpu().is_some() {
            let (source, hardware) = self.source(attr, &cell, leader.map(|l| l.key))?;
            return Ok(Place {
                cell,
                source,
                hardware,
                owner,
            });
        }
        if attr.ty == EventType::VMM {
            if SoftwareId::from_config(attr.config).is_none() {
                return Err(OpenError::NoSuchSoftwareEvent(attr.config));
            }
            let fan_out = leads_family.unwrap_or(attr.inherit);
            return Ok(if fan_out {
                family(cell)
            } else {
                Place {
                    cell,
                    source: Source::Raised(0),
                    hardware: None,
                    owner,
                }
            });
        }
        let (at, pmu, capacity) = self.driver(attr.ty).ok_or(OpenError::NoDriver(attr.ty))?;
        let whole = match pmu.open(attr, Target::Vm) {
            Ok(mut event) => {
                let package = event.count().is_some();
                (package || !leads_family.unwrap_or(attr.inherit)).then_some(event)
            }
            Err(error @ (PmuError::NoSuchEvent | PmuError::Unsupported(_))) => {
                // With no vCPU to try it on, a driver that cannot count VMs is taken at its word. A member
                // goes where its leader goes, so the leader's mark says whether there are
                // vCPUs to come.
                let none = self.vcpus.load().is_empty();
                let inherits = leader.map_or(attr.inherit, |l| l.shared.attr.inherit);
                if leads_family == Some(false) || (none && !inherits) {
                    return Err(error.into());
                }
                None
            }
            Err(error) => return Err(error.into()),
        };
        match whole {
            Some(_) if leads_family == Some(true) => Err(OpenError::Group(
                "a package count cannot join a group that fans out over vCPUs",
            )),
            Some(event) => Ok(Place {
                cell,
                source: Source::Driver(event),
                hardware: Hardware::of(at, &*pmu, capacity, attr),
                owner,
            }),
            None => Ok(family(cell)),
        }
    }

    fn install(
        self: &Arc<Self>,
        session: &Arc<SessionInner>,
        attr: Attr,
        place: Place,
        leader: Option<&EventRef>,
        output: Option<&EventRef>,
        flags: OpenFlags,
    ) -> Result<Handle, OpenError> {
        let Place {
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
        let now_ns = cell.now_ns();
        let ring = output.and_then(EventRef::own_output);
        let key = {
            let mut context = cell.lock();
            let reserved = self.limits.reserved_slots.load(Ordering::Relaxed);
            let place = hardware.map(|h| (context.pool(h.driver, h.counters, reserved), h.fits));
            let mut event = Event::new(Arc::clone(&shared), None, place, source, enabled);
            // Before it is there: its first record may come at once.
            event.output = ring;
            context.clone_of = None;
            let key = context.add(event, leader.map(|l| l.key), now_ns);
            cell.publish_raised(&context);
            key
        };
        let event = EventRef { cell, key, shared };
        if let Some(target) = output {
            event.begin_redirected(target);
        }
        let handle = Handle {
            inner: Arc::new(HandleInner::new(Arc::clone(self), Arc::clone(session), event)),
        };
        if is_family && let Err(error) = self.fan_out(&handle.inner.event, leader) {
            handle.inner.undo_open();
            return Err(error);
        }
        Ok(handle)
    }

    /// Makes the children of a new VM-wide event in the vCPUs there are.
    fn fan_out(&self, event: &EventRef, leader: Option<&EventRef>) -> Result<(), OpenError> {
        for vcpu in self.vcpus.load().iter() {
            let cell = vcpu.cell.load_full();
            let leader_key = match leader {
                None => None,
                Some(leader) => match leader.child_in(&cell) {
                    Some(key) => Some(key),
                    // The leader covers only vCPUs that were there when it was opened.
                    None => continue,
                },
            };
            self.check_child(&event.shared.attr, &cell, leader_key)?;
            self.inherit(event.key, &event.shared, &cell, leader_key)?;
        }
        Ok(())
    }

    /// [`CoreInner::check_slots`] for a child of an event with `attr`.
    pub fn check_child(
        &self,
        attr: &Attr,
        cell: &ContextCell,
        leader: Option<usize>,
    ) -> Result<(), OpenError> {
        let hardware = self
            .driver(attr.ty)
            .and_then(|(at, pmu, capacity)| Hardware::of(at, &*pmu, capacity, attr));
        self.check_slots(cell, hardware, leader)
    }

    /// Whether a VM-wide event could be on, with its group, on a vCPU that is added later: one on which
    /// nothing is open but what it inherits. Without this a vCPU would be refused for events that were
    /// let in while there was none.
    fn check_hot_add(&self, attr: &Attr, leader: Option<&EventRef>) -> Result<(), OpenError> {
        let leads = leader.map_or(attr.inherit, |l| l.shared.attr.inherit);
        let Some((at, pmu, capacity)) = self.driver(attr.ty).filter(|_| leads) else {
            return Ok(());
        };
        let Some(hardware) = Hardware::of(at, &*pmu, capacity, attr) else {
            return Ok(());
        };
        // Those of others of this driver, in the event's group and in all.
        let (mut group, mut all) = (Seats::new(hardware.counters), Seats::new(hardware.counters));
        let vm = self.vm.lock();
        for (_, members) in &vm.groups {
            let first = &vm.events[members.leader()].shared;
            let own = leader.is_some_and(|l| Arc::ptr_eq(&l.shared, first));
            if first.family.is_none() || !(own || first.attr.inherit) {
                continue;
            }
            for member in members.members.iter().map(|m| &vm.events[*m].shared.attr) {
                let other = self
                    .driver(member.ty)
                    .and_then(|(at, pmu, capacity)| Hardware::of(at, &*pmu, capacity, member));
                match other {
                    Some(other) if other.driver == at => {
                        if own {
                            let _ = group.take_one(other.fits);
                        }
                        let _ = all.take_one(other.fits);
                    }
                    Some(_) if own => {
                        return Err(OpenError::Group("its hardware events belong to another driver"));
                    }
                    _ => {}
                }
            }
        }
        drop(vm);
        group.take_one(hardware.fits).map_err(too_large)?;
        if self.is_strict() {
            all.take_one(hardware.fits)
                .map_err(|crowd| OpenError::OvercommittedVm {
                    slots: crowd.counters,
                })?;
        }
        Ok(())
    }

    /// Whether events that could not all be on together are refused.
    fn is_strict(&self) -> bool {
        self.limits.share() == SharePolicy::Strict || !self.limits.overcommit.load(Ordering::Relaxed)
    }

    /// Whether one more hardware event has a place: in its group ever, and under strict sharing with all
    /// others.
    fn check_slots(
        &self,
        cell: &ContextCell,
        hardware: Option<Hardware>,
        leader: Option<usize>,
    ) -> Result<(), OpenError> {
        let Some(hardware) = hardware else {
            return Ok(());
        };
        let mut context = cell.lock();
        let reserved = self.limits.reserved_slots.load(Ordering::Relaxed);
        let pool = context.pool(hardware.driver, hardware.counters, reserved);
        let mut group = Seats::new(hardware.counters);
        if let Some(leader) = leader {
            let members = &context.groups[context.events[leader].group];
            match members.pool {
                Some(other) if other != pool => {
                    return Err(OpenError::Group("its hardware events belong to another driver"));
                }
                _ => {}
            }
            for event in members.members.iter().map(|m| &context.events[*m]) {
                if event.pool.is_some() {
                    // They were checked when they were opened.
                    let _ = group.take_one(event.fits);
                }
            }
        }
        group.take_one(hardware.fits).map_err(too_large)?;
        if self.is_strict() {
            let mut all = Seats::new(hardware.counters);
            for (_, event) in context.events.iter().filter(|(_, e)| e.pool == Some(pool)) {
                let _ = all.take_one(event.fits);
            }
            let vcpu = cell.vcpu().map_or(VcpuId(0), |(vcpu, _)| vcpu);
            all.take_one(hardware.fits)
                .map_err(|crowd| OpenError::Overcommitted {
                    vcpu,
                    slots: crowd.counters,
                })?;
        }
        Ok(())
    }
}

fn too_large(crowd: Crowd) -> OpenError {
    OpenError::GroupTooLarge {
        needed: crowd.events,
        slots: crowd.counters,
    }
}

fn check_leader(leader: &EventRef, cell: &Arc<ContextCell>, attr: &Attr) -> Result<(), OpenError> {
    if !Arc::ptr_eq(&leader.cell, cell) {
        return Err(OpenError::Group("it is in another context"));
    }
    let mut context = leader.cell.lock();
    if context.get(leader.key, &leader.shared).is_none() {
        return Err(OpenError::Group("its leader is closed"));
    }
    if !context.is_leader(leader.key) {
        return Err(OpenError::Group("the handle is not a leader"));
    }
    if attr.pinned || attr.exclusive {
        return Err(OpenError::Group("only leaders may be pinned or exclusive"));
    }
    Ok(())
}
