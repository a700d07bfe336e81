//! Handles each request of the control protocol.

use std::io;
use std::sync::Arc;

use perf_core::{SessionRole, SharePolicy, UnknownSharePolicy, error_line};
use serde::Serialize;
use serde_json::Value;
use virtio_devices::balloon::control::{BalloonControl, BalloonRequestError};
use vpmu::EventFilter;

use super::{Connection, ControlServer, ControlSocketAccess, FdSource, RequestOutcome};
use crate::control::balloon;
use crate::control::exits::{ExitCountSnapshot, ExitWatch};
use crate::control::limits;
use crate::control::metadata;
use crate::control::rings::RingLayout;
use crate::control::session::{ControlClientEvents, VmEventTargets, fail, role};
use crate::pmu::{KernelSearchProgress, VmPmu};
use crate::vcpu::control::{VmRunState, VmStopReason};
use crate::vcpu::registry::VcpuRegistryError;
use control_api::peer;
use control_api::protocol::{
    Call, GuestCode, KernelInfo, KernelState, KernelSymbolsReply, MAX_CODE, PROTOCOL, RequestError,
    RequestErrorKind, SnapshotId, VcpuExits,
};

/// Handlers of requests that concern only the connection itself, such as its events.
impl Connection {
    fn set_enabled(&mut self, on: bool) -> Result<RequestOutcome, RequestError> {
        if let Some(events) = &mut self.events {
            events.set_enabled(on);
        }
        value(Value::Null)
    }

    fn close(&mut self) -> Result<RequestOutcome, RequestError> {
        self.events = None;
        value(Value::Null)
    }

    fn joined(&mut self) -> Result<RequestOutcome, RequestError> {
        let joined = self.events.as_mut().map(ControlClientEvents::joined);
        value(joined.unwrap_or_default())
    }

    fn read(&self) -> Result<RequestOutcome, RequestError> {
        let read = self.events.as_ref().map(ControlClientEvents::read);
        value(read.unwrap_or_default())
    }

    fn ring_losses(&self) -> Result<RequestOutcome, RequestError> {
        let losses = self.events.as_ref().map(ControlClientEvents::losses);
        value(losses.unwrap_or_default())
    }

    fn ring(&mut self, vcpu: u32, pages: u32, overwrite: bool) -> Result<RequestOutcome, RequestError> {
        let Some(events) = &mut self.events else {
            return fail(RequestErrorKind::Invalid, "no event is open");
        };
        let (info, ring) = events.ring(vcpu, RingLayout { pages, overwrite })?;
        Ok(RequestOutcome::WithFd(to_value(info)?, FdSource::Ring(ring)))
    }

    fn host_ring(&mut self, handle: u32) -> Result<RequestOutcome, RequestError> {
        let (info, fd) = self.opened()?.share_host_ring(handle)?;
        Ok(RequestOutcome::WithFd(to_value(info)?, FdSource::Event(fd)))
    }

    fn thread_switches(&mut self, vcpu: u32) -> Result<RequestOutcome, RequestError> {
        let fd = self.opened()?.share_thread_switches(vcpu)?;
        Ok(RequestOutcome::WithFd(Value::Null, FdSource::Event(fd)))
    }
}

/// Returns where a request opens its events: for the whole VM, on every vCPU, or on the vCPUs in
/// `vcpus`.
fn event_targets(
    whole: bool,
    vcpus: Option<&[u32]>,
    sampling: bool,
) -> Result<VmEventTargets<'_>, RequestError> {
    match (whole, vcpus) {
        (true, None) if !sampling => Ok(VmEventTargets::WholeVm),
        (true, _) => fail(
            RequestErrorKind::Invalid,
            "an event for the whole VM goes with neither vCPUs nor sampling",
        ),
        (false, Some(these)) => Ok(VmEventTargets::Listed(these)),
        (false, None) => Ok(VmEventTargets::EveryVcpu),
    }
}

impl ControlServer {
    /// Handles a request of the client of `connection`.
    #[expect(clippy::too_many_lines, reason = "one line per request")]
    pub(super) fn answer(
        &mut self,
        connection: &mut Connection,
        call: Call,
    ) -> Result<RequestOutcome, RequestError> {
        let vm = &self.vm;
        if connection.access == ControlSocketAccess::Observers {
            may_observe(&call)?;
        }
        match call {
            Call::Hello { protocol } => self.hello(connection, protocol),
            Call::Status => value(vm.info(connection.role())),
            Call::Pause => self.pause(connection),
            Call::Resume => self.resume(connection),
            Call::Stop => self.stop(connection),
            Call::Powerdown => self.powerdown(connection),
            Call::Vcpus { count } => self.vcpus(connection, count),
            Call::VcpuPlug => value(vm.vcpu_plug()),
            Call::VcpusWithdraw => self.withdraw_eject_requests(),
            Call::Balloon { size_mib } => self.change_balloon(|balloon| balloon.set_size_mib(size_mib)),
            Call::BalloonStatistics { interval_s } => {
                self.change_balloon(|balloon| balloon.set_statistics_interval(interval_s))
            }
            Call::Share { policy } => self.share(&policy),
            Call::Filter { toml } => self.filter(&toml),
            Call::MmdsPut { data } => value(metadata::put(&vm.metadata, data)?),
            Call::MmdsPatch { data } => value(metadata::patch(&vm.metadata, data)?),
            Call::MmdsGet => value(metadata::service(&vm.metadata)?.get()),
            Call::RateLimiters => value(limits::describe(&vm.limiters)),
            Call::RateLimit { name, bandwidth, ops } => {
                value(limits::change(&vm.limiters, &name, bandwidth, ops)?)
            }
            Call::Open {
                events,
                vcpus,
                whole,
                sampling,
            } => {
                let event_targets = event_targets(whole, vcpus.as_deref(), sampling.is_some())?;
                let session = self.session(connection);
                value(session.open(&events, event_targets, sampling)?)
            }
            Call::Enable | Call::Disable => connection.set_enabled(call == Call::Enable),
            Call::Joined => connection.joined(),
            Call::Read => connection.read(),
            Call::Close => connection.close(),
            Call::Ring {
                vcpu,
                pages,
                overwrite,
            } => connection.ring(vcpu, pages, overwrite),
            Call::HostRing { handle } => connection.host_ring(handle),
            Call::ThreadSwitches { vcpu } => connection.thread_switches(vcpu),
            Call::Chains { handle, every } => value(connection.opened()?.sample_in_vmm(handle, every)?),
            Call::RingLosses => connection.ring_losses(),
            Call::Counts => value(vm.vcpu_counts()),
            Call::Kernel => self.kernel(),
            Call::Symbols => self.symbols(),
            Call::ProcessCode { pid } => value(self.processes.code(vm.pmu.probe(), pid)?),
            Call::ProcessMemory { pid, address, bytes } => self.process_memory(pid, address, bytes),
            Call::GuestView => self.request_guest_view(),
            Call::GuestViewResult { generation } => value(vm.views(generation)),
            Call::Snapshot => self.snapshot(connection),
            Call::SnapshotMemory { offset } => connection.snapshot_memory(offset),
            Call::SnapshotState => connection.snapshot_state(),
            Call::SnapshotShareDisks => connection.share_disks(),
            Call::SnapshotEnd { stop } => self.end_snapshot(connection, stop),
            Call::MigrationStart => self.migration_start(connection),
            Call::MigrationMemory { offset } => connection.migration_memory(offset),
            Call::MigrationCommit => connection.commit_migration(),
            Call::Exits => value(self.exits(connection)),
            Call::Code { cr3, address, length } => self.code(cr3, address, length),
        }
    }

    fn hello(&self, connection: &mut Connection, protocol: u32) -> Result<RequestOutcome, RequestError> {
        if protocol != PROTOCOL {
            return fail(
                RequestErrorKind::Protocol,
                format!(
                    "the client speaks version {protocol} of the protocol, this VM version {PROTOCOL}; use the same Perfvisor"
                ),
            );
        }
        connection.greeted = true;
        value(self.vm.info(connection.role()))
    }

    fn pause(&self, connection: &Connection) -> Result<RequestOutcome, RequestError> {
        self.check_not_being_saved(connection)?;
        self.set_paused(connection, true)
    }

    fn resume(&mut self, connection: &Connection) -> Result<RequestOutcome, RequestError> {
        self.check_not_being_saved(connection)?;
        self.decide()?;
        self.set_paused(connection, false)
    }

    /// Returns an error while another client takes a snapshot of the VM.
    fn check_not_being_saved(&self, connection: &Connection) -> Result<(), RequestError> {
        if self.is_being_saved(connection) {
            return fail(
                RequestErrorKind::Invalid,
                "a snapshot of the VM is being taken; try again after its end",
            );
        }
        Ok(())
    }

    fn set_paused(&self, connection: &Connection, paused: bool) -> Result<RequestOutcome, RequestError> {
        if !self.vm.control.set_paused(paused) {
            return fail(RequestErrorKind::Invalid, "the VM has ended");
        }
        self.vm.registry.kicker().kick();
        value(self.vm.info(connection.role()))
    }

    fn stop(&self, connection: &Connection) -> Result<RequestOutcome, RequestError> {
        let vm = &self.vm;
        vm.control.stop(VmStopReason::Operator);
        vm.registry.kicker().kick();
        value(vm.info(connection.role()))
    }

    fn withdraw_eject_requests(&self) -> Result<RequestOutcome, RequestError> {
        self.vm.registry.withdraw_eject_requests();
        value(self.vm.vcpu_plug())
    }

    fn change_balloon(
        &self,
        change: impl FnOnce(&BalloonControl) -> Result<(), BalloonRequestError>,
    ) -> Result<RequestOutcome, RequestError> {
        value(balloon::change(self.vm.balloon.as_ref(), change)?)
    }

    fn share(&self, policy: &str) -> Result<RequestOutcome, RequestError> {
        self.vm.pmu.core().set_share(share_policy(policy)?);
        value(Value::Null)
    }

    fn request_guest_view(&self) -> Result<RequestOutcome, RequestError> {
        self.guest_pmu()?;
        value(SnapshotId {
            generation: self.vm.request_views(),
        })
    }

    fn process_memory(&mut self, pid: u32, address: u64, bytes: u32) -> Result<RequestOutcome, RequestError> {
        let probe = self.vm.pmu.probe();
        let (info, memory) = self.processes.memory(probe, pid, address, bytes)?;
        let file = peer::sealed_text("process", &memory).map_err(|e| RequestError {
            kind: RequestErrorKind::Internal,
            message: format!("a process's memory: {e}"),
        })?;
        Ok(RequestOutcome::WithFd(to_value(info)?, FdSource::File(file)))
    }

    fn powerdown(&self, connection: &Connection) -> Result<RequestOutcome, RequestError> {
        let vm = &self.vm;
        if vm.control.state() != VmRunState::Running {
            return fail(
                RequestErrorKind::Invalid,
                "only a running VM hears its power button",
            );
        }
        if !vm.bus.press_power_button() {
            return fail(
                RequestErrorKind::Invalid,
                "the guest does not listen to the power button (Linux does with its module `button`); ctl stop ends the VM without it",
            );
        }
        value(vm.info(connection.role()))
    }

    fn vcpus(&mut self, connection: &mut Connection, count: u32) -> Result<RequestOutcome, RequestError> {
        let added = self
            .vm
            .registry
            .begin(count)
            .or_else(|e| fail(kind_of(&e), error_line(&e)))?;
        // Open the events of all connections on the new vCPUs before these run.
        for vcpu in added.vcpus().numbers() {
            let others = self.connections.values_mut().filter_map(|c| c.events.as_mut());
            for events in others.chain(connection.events.as_mut()) {
                events.open_on_new_vcpu(vcpu.into());
            }
        }
        self.vm.registry.show(added);
        value(self.vm.vcpu_plug())
    }

    /// Returns the exits of all vCPUs since this client's first request for exits.
    fn exits(&mut self, connection: &mut Connection) -> Vec<VcpuExits> {
        let slots = self.vm.registry.slots();
        let taken = ExitCountSnapshot::out_of(slots);
        for others in self.connections.values_mut().filter_map(|c| c.exits.as_mut()) {
            others.record_longest(&taken);
        }
        let watch = connection
            .exits
            .get_or_insert_with(|| ExitWatch::begin(slots, &taken));
        watch.exits_since_start(&taken)
    }

    fn code(&self, cr3: u64, address: u64, length: u32) -> Result<RequestOutcome, RequestError> {
        if !(1..=MAX_CODE).contains(&length) {
            return fail(
                RequestErrorKind::Invalid,
                format!("length must be 1 to {MAX_CODE} bytes"),
            );
        }
        let code = self.vm.pmu.probe().code(cr3, address, length);
        if code.is_empty() {
            let why = format!("the guest has no memory at {address:#x} in the address space of CR3 {cr3:#x}");
            return fail(RequestErrorKind::Invalid, why);
        }
        value(GuestCode::new(address, &code))
    }

    fn filter(&self, toml: &str) -> Result<RequestOutcome, RequestError> {
        let pmu = self.guest_pmu()?;
        let filter =
            EventFilter::from_toml(toml).or_else(|e| fail(RequestErrorKind::Invalid, error_line(&e)))?;
        let filter = pmu.within_limits(filter);
        pmu.set_kvm_filter(&filter)
            .or_else(|e| fail(RequestErrorKind::Invalid, error_line(&e)))?;
        let filter = Arc::new(filter);
        pmu.set_filter(filter.clone());
        for slot in self.vm.registry.present_slots() {
            slot.request_queue().post_filter(filter.clone());
        }
        self.vm.deliver();
        value(Value::Null)
    }

    /// Returns the event session of the connection, which is created at the first call.
    fn session<'a>(&self, connection: &'a mut Connection) -> &'a mut ControlClientEvents {
        let (vm, uid) = (&self.vm, connection.uid);
        let (uid, role) = match connection.access {
            ControlSocketAccess::Operators => (uid, role(uid)),
            // Observers open events with the identity and role of the VM's user.
            ControlSocketAccess::Observers => (peer::own_uid(), SessionRole::Operator),
        };
        let new = || ControlClientEvents::new(vm.pmu.clone(), uid, role, vm.registry.clone());
        connection.events.get_or_insert_with(new)
    }

    /// Returns what is known about the guest's kernel. Starts a search for the kernel if none has
    /// run yet, or if the last one failed and may be repeated.
    fn kernel(&self) -> Result<RequestOutcome, RequestError> {
        let vm = &self.vm;
        let probe = vm.pmu.probe();
        if !vm.flat
            && let Some(first) = vm.registry.present_slots().next()
            && probe.begin_search()
        {
            first.request_queue().request_kernel_search();
            vm.deliver();
        }
        value(kernel_info(probe.search_progress()))
    }

    /// Returns the PMU of the VM, or an error if the guest has no PMU.
    fn guest_pmu(&self) -> Result<&VmPmu, RequestError> {
        if self.vm.pmu.is_for_guest() {
            return Ok(&self.vm.pmu);
        }
        fail(
            RequestErrorKind::Unsupported,
            "this VM's guest has no PMU; run it without --pmu off (stat, record and top count it from the host all the same)",
        )
    }

    fn symbols(&mut self) -> Result<RequestOutcome, RequestError> {
        let kernel = self.vm.pmu.probe().kernel();
        let running = kernel.as_ref().filter(|kernel| kernel.symbol_count > 0);
        let loaded = self.vm.symbols.load_full();
        let internal = |e: io::Error| RequestError {
            kind: RequestErrorKind::Internal,
            message: format!("symbols: {e}"),
        };
        let kept = self
            .symbols
            .take()
            .filter(|(of_running, of, ..)| *of_running == running.is_some() && Arc::ptr_eq(of, &loaded));
        let (of_running, _, info, text) = match kept {
            Some(kept) => kept,
            None => {
                let (text, source) = match running {
                    Some(kernel) => (kernel.symbols.unpack(), "guest memory".to_owned()),
                    None => (self.vm.symbol_text(), self.vm.guest.clone()),
                };
                let info = KernelSymbolsReply {
                    bytes: text.len() as u64,
                    flat: self.vm.flat,
                    source,
                    build_id: kernel
                        .as_ref()
                        .and_then(|kernel| kernel.build_id)
                        .map(|id| id.to_string()),
                    release: kernel.as_ref().and_then(|kernel| kernel.release.clone()),
                };
                let file = peer::sealed_text("symbols", &text).map_err(internal)?;
                (running.is_some(), loaded.clone(), info, file)
            }
        };
        let file = peer::reopen_read_only(&text).map_err(internal)?;
        let value = to_value(&info)?;
        self.symbols = Some((of_running, loaded, info, text));
        Ok(RequestOutcome::WithFd(value, FdSource::File(file)))
    }
}

/// Converts the progress of the search for the guest's kernel for a client.
fn kernel_info(progress: KernelSearchProgress) -> KernelInfo {
    let (state, detail) = match progress {
        KernelSearchProgress::NotStarted => (KernelState::Unknown, String::new()),
        KernelSearchProgress::Running => (KernelState::Looking, String::new()),
        KernelSearchProgress::Found(what) => (KernelState::Found, what),
        KernelSearchProgress::NotFound(why) => (KernelState::NotFound, why),
    };
    KernelInfo { state, detail }
}

/// Returns an error if observers may not make this request. Observers may count events and read
/// statistics, but may neither change the VM nor see guest memory, for example in samples.
fn may_observe(call: &Call) -> Result<(), RequestError> {
    let why = match call {
        Call::Hello { .. }
        | Call::Status
        | Call::VcpuPlug
        | Call::Joined
        | Call::Open { sampling: None, .. }
        | Call::Enable
        | Call::Disable
        | Call::Read
        | Call::Close
        | Call::Exits
        | Call::Counts
        | Call::RateLimiters
        | Call::GuestView
        | Call::GuestViewResult { .. } => return Ok(()),
        Call::Open { .. }
        | Call::Ring { .. }
        | Call::HostRing { .. }
        | Call::ThreadSwitches { .. }
        | Call::Chains { .. }
        | Call::RingLosses
        | Call::Kernel
        | Call::Symbols
        | Call::Code { .. }
        | Call::Snapshot
        | Call::SnapshotMemory { .. }
        | Call::SnapshotState
        | Call::SnapshotShareDisks
        | Call::SnapshotEnd { .. }
        | Call::MigrationStart
        | Call::MigrationMemory { .. }
        | Call::MigrationCommit
        | Call::ProcessCode { .. }
        | Call::ProcessMemory { .. } => {
            "samples, symbols and snapshots show the guest's memory: an observer counts (perfvisor stat)"
        }
        Call::MmdsGet => "an observer does not read the metadata of the guest: use the VM's control socket",
        Call::Pause
        | Call::Resume
        | Call::Stop
        | Call::Powerdown
        | Call::Vcpus { .. }
        | Call::VcpusWithdraw
        | Call::Balloon { .. }
        | Call::BalloonStatistics { .. }
        | Call::Share { .. }
        | Call::RateLimit { .. }
        | Call::MmdsPut { .. }
        | Call::MmdsPatch { .. }
        | Call::Filter { .. } => "an observer changes nothing of a VM: use its control socket",
    };
    fail(RequestErrorKind::Denied, why)
}

/// Returns the failure kind with which a change of the number of vCPUs that failed with `error` is
/// reported.
fn kind_of(error: &VcpuRegistryError) -> RequestErrorKind {
    match error {
        VcpuRegistryError::Fixed(_) => RequestErrorKind::Unsupported,
        VcpuRegistryError::OutOfRange { .. }
        | VcpuRegistryError::NotRunning(_)
        | VcpuRegistryError::Leaving(_) => RequestErrorKind::Invalid,
        VcpuRegistryError::Start(..) => RequestErrorKind::Limit,
        VcpuRegistryError::State(..) | VcpuRegistryError::Make(..) | VcpuRegistryError::Slow(_) => {
            RequestErrorKind::Internal
        }
    }
}

pub(super) fn to_value(of: impl Serialize) -> Result<Value, RequestError> {
    serde_json::to_value(of).or_else(|e| fail(RequestErrorKind::Internal, error_line(&e)))
}

pub(super) fn value(of: impl Serialize) -> Result<RequestOutcome, RequestError> {
    to_value(of).map(RequestOutcome::Value)
}

fn share_policy(name: &str) -> Result<SharePolicy, RequestError> {
    name.parse()
        .or_else(|why: UnknownSharePolicy| fail(RequestErrorKind::Invalid, format!("share: {why}")))
}
