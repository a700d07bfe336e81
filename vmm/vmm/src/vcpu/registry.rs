//! Registry of the vCPUs of a VM: starts added vCPUs and parks removed ones.
//!
//! Each possible vCPU number has a *slot*. The slot of a present vCPU is taken, and a thread runs
//! the vCPU. The slot of an absent vCPU stores the parked KVM vCPU, because KVM cannot delete
//! vCPUs. When a vCPU is added, the KVM vCPU returns to its initial state (see
//! `kvm::initial_state`), and the VMM creates a thread, a PMU and RDPMC emulation for it. Run-loop
//! statistics and the request queue belong to the slot and are kept.
//!
//! A vCPU is added in two steps. First its thread is started and attached to the perf core, and
//! waits for INIT and SIPI. Then the vCPU is announced to the guest. Events are therefore counted
//! from its first instruction, and a failed start has no side effects. A vCPU is removed after the
//! guest has ejected it. Its thread adds the counts to the totals, parks the KVM vCPU and ends.

use std::convert::Infallible;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use diagnostics::vcpu_names;
use perf_core::guest_log;
use snapshot::state::SavedVcpuPmu;

use super::control::{VmRunControl, VmRunState};
use super::factory::VcpuFactory;
use super::failure::{VcpuError, VcpuStartError};
use super::kicker::Kicker;
use super::kvm_vcpu::KvmVcpu;
use super::running::{Vcpu, VcpuStartReporter};
use super::slot::VcpuSlot;
use crate::devices::cpu_plug::{CpuHotplugDevice, CpuPlugState, VcpuSet};
use crate::kvm::call::KvmIoctlError;

/// Maximum time that a starting vCPU thread may take to open its events.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Minimum interval between two notifications to the guest about the same change of the number of
/// vCPUs.
const REMINDER_INTERVAL: Duration = Duration::from_secs(1);

/// Error when changing the number of vCPUs.
#[derive(Debug, thiserror::Error)]
pub enum VcpuRegistryError {
    /// The VM was started without CPU hot-plug.
    #[error("the number of vCPUs is fixed at {0}; start the VM with --cpus N,max=M to add some later")]
    Fixed(u8),
    /// The number is outside the range of this VM.
    #[error("{asked} vCPUs: must be between 1 and {max} for this VM")]
    OutOfRange {
        /// Requested number of vCPUs.
        asked: u32,
        /// Maximum number of vCPUs.
        max: u8,
    },
    /// The guest is not running, so it cannot respond.
    #[error("the VM is {0}; vCPUs can only be added and removed while the guest runs")]
    NotRunning(&'static str),
    /// A vCPU that the guest has ejected is still being removed.
    #[error("vCPU {0} is still being removed; try again")]
    Leaving(u8),
    /// The initial state of the KVM vCPU cannot be restored.
    #[error("cannot add vCPU {0}")]
    State(u8, #[source] KvmIoctlError),
    /// Creating the runnable vCPU failed.
    #[error("cannot add vCPU {0}")]
    Make(u8, #[source] VcpuError),
    /// The vCPU cannot be attached to the perf core, for example because a VM-wide event finds no
    /// free counter on it.
    #[error("cannot add vCPU {0}")]
    Start(u8, #[source] VcpuStartError),
    /// The vCPU thread does not respond in time.
    #[error("cannot add vCPU {0}: its thread did not start within {n} s", n = START_TIMEOUT.as_secs())]
    Slow(u8),
}

/// Sender that, until it is dropped, keeps the thread of an added vCPU outside the guest.
type VcpuHold = Sender<Infallible>;

/// vCPUs that were added and attached to the perf core, but do not run yet. Dropping this value
/// lets them run. Events that are opened before the drop count everything that the vCPUs execute.
#[derive(Debug, Default)]
pub struct AddedVcpus {
    vcpus: VcpuSet,
    holds: Vec<VcpuHold>,
}

impl AddedVcpus {
    /// Returns the set of the added vCPUs.
    pub fn vcpus(&self) -> VcpuSet {
        self.vcpus
    }
}

/// Registry of the vCPUs of a VM.
#[derive(Debug)]
pub struct VcpuRegistry {
    slots: Vec<Arc<VcpuSlot>>,
    /// Factory that creates vCPUs. A reset of the machine replaces it.
    makers: Arc<ArcSwap<VcpuFactory>>,
    kicker: Kicker,
    control: Arc<VmRunControl>,
    /// vCPUs that a reset has added and that [`VcpuRegistry::take_restarted`] has not returned yet.
    restarted: Mutex<VcpuSet>,
    /// CPU hot-plug device; `None` if the number of vCPUs is fixed.
    plug: Option<Arc<CpuHotplugDevice>>,
    reminded: Mutex<Option<Instant>>,
}

impl VcpuRegistry {
    /// Creates the registry. Each of `vcpus`, which must be in the order of their numbers, is
    /// parked in a free slot.
    pub fn new(
        vcpus: Vec<KvmVcpu>,
        factory: VcpuFactory,
        control: Arc<VmRunControl>,
        plug: Option<Arc<CpuHotplugDevice>>,
    ) -> Self {
        let slot = |vcpu: KvmVcpu| Arc::new(VcpuSlot::new(vcpu));
        Self {
            slots: vcpus.into_iter().map(slot).collect(),
            makers: Arc::new(ArcSwap::from_pointee(factory)),
            restarted: Mutex::default(),
            kicker: Kicker::default(),
            control,
            plug,
            reminded: Mutex::default(),
        }
    }

    /// Returns the slots of all possible vCPUs.
    pub fn slots(&self) -> &[Arc<VcpuSlot>] {
        &self.slots
    }

    /// Returns the maximum number of vCPUs.
    pub fn max(&self) -> u8 {
        u8::try_from(self.slots.len()).unwrap_or(u8::MAX)
    }

    /// Returns the set of the present vCPUs.
    pub fn present(&self) -> VcpuSet {
        let taken = self.present_slots().map(|slot| VcpuSet::of(slot.id()));
        taken.fold(VcpuSet::default(), VcpuSet::with)
    }

    /// Returns the slots of the present vCPUs.
    pub fn present_slots(&self) -> impl Iterator<Item = &Arc<VcpuSlot>> {
        self.slots.iter().filter(|slot| slot.is_taken())
    }

    /// Returns the current factory that creates vCPUs.
    pub fn factory(&self) -> Arc<VcpuFactory> {
        self.makers.load_full()
    }

    /// Returns the handles with which vCPUs can be kicked.
    pub fn kicker(&self) -> &Kicker {
        &self.kicker
    }

    /// Returns the CPU hot-plug device, or `None` if the number of vCPUs is fixed.
    pub fn plug(&self) -> Option<&Arc<CpuHotplugDevice>> {
        self.plug.as_ref()
    }

    /// Returns the state of CPU hot-plug as the guest has reported it, or `None` if the number of
    /// vCPUs is fixed. If the guest has not reacted to a change for a while, notifies it again.
    pub fn plug_state(&self) -> Option<CpuPlugState> {
        let plug = self.plug.as_ref()?;
        let mut reminded = self.reminded.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if reminded.is_none_or(|last| now.duration_since(last) >= REMINDER_INTERVAL) {
            *reminded = Some(now);
            plug.repeat_interrupt();
        }
        Some(plug.state())
    }

    /// Starts the threads of the first `vcpus` vCPUs, and waits until they are attached to the perf
    /// core. Clients that connect later can therefore count all of them. `first_entry` is called
    /// directly before the first guest instruction.
    ///
    /// # Errors
    /// Returns [`VcpuRegistryError`] if a vCPU cannot be created. Threads that have been started
    /// continue to run.
    pub fn start(
        &self,
        vcpus: u8,
        first_entry: Option<Box<dyn FnOnce() + Send>>,
    ) -> Result<(), VcpuRegistryError> {
        self.start_set(VcpuSet::first(vcpus), Vec::new(), first_entry)
    }

    /// Starts the threads of `vcpus` like [`VcpuRegistry::start`]. A vCPU with an entry in `saved`
    /// starts in the saved state, and any other in its initial state.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`VcpuRegistry::start`], and
    /// [`VcpuRegistryError::Make`] with [`VcpuError::Saved`] if a saved state does not belong to
    /// this VM.
    pub fn start_set(
        &self,
        vcpus: VcpuSet,
        mut saved: Vec<(u8, SavedVcpuPmu)>,
        first_entry: Option<Box<dyn FnOnce() + Send>>,
    ) -> Result<(), VcpuRegistryError> {
        let mut first_entry = first_entry;
        let (begins, all_began) = channel();
        for slot in self.slots.iter().filter(|slot| vcpus.contains(slot.id())) {
            let mut vcpu = self.make(slot)?;
            if let Some(at) = saved.iter().position(|(id, _)| *id == slot.id()) {
                let (id, pmu) = saved.swap_remove(at);
                vcpu.restore(pmu)
                    .map_err(|e| VcpuRegistryError::Make(id, e.into()))?;
            }
            if let Some(f) = first_entry.take() {
                vcpu.on_first_entry(f);
            }
            slot.take();
            let thread = vcpu
                .spawn(self.makers.clone(), VcpuStartReporter::WithVm(begins.clone()))
                .map_err(|e| VcpuRegistryError::Make(slot.id(), e))?;
            self.kicker.add(thread);
        }
        drop(begins);
        // A vCPU that failed to start has stopped the VM and dropped its sender.
        if let Err(RecvTimeoutError::Timeout) = all_began.recv_timeout(START_TIMEOUT) {
            log::warn!("not all vCPUs started within {} s", START_TIMEOUT.as_secs());
        }
        Ok(())
    }

    /// Begins to change the number of vCPUs to `count`. If vCPUs are missing, creates and returns
    /// them; the caller must pass them to [`VcpuRegistry::show`]. If there are too many, asks the
    /// guest to eject those with the highest numbers. Withdraws earlier requests that the guest has
    /// not fulfilled.
    ///
    /// # Errors
    /// Returns a [`VcpuRegistryError`] if the change is impossible. In this case, the number of
    /// vCPUs is unchanged.
    pub fn begin(&self, count: u32) -> Result<AddedVcpus, VcpuRegistryError> {
        let max = self.max();
        let Some(plug) = &self.plug else {
            return Err(VcpuRegistryError::Fixed(max));
        };
        let wanted = match u8::try_from(count) {
            Ok(n) if (1..=max).contains(&n) => n,
            _ => return Err(VcpuRegistryError::OutOfRange { asked: count, max }),
        };
        match self.control.state() {
            VmRunState::Running => {}
            VmRunState::Paused => return Err(VcpuRegistryError::NotRunning("paused")),
            VmRunState::Held => return Err(VcpuRegistryError::NotRunning("stopped by a debugger")),
            VmRunState::Stopped => return Err(VcpuRegistryError::NotRunning("ending")),
            VmRunState::Resetting => return Err(VcpuRegistryError::NotRunning("starting again")),
        }
        let leaving = set(self
            .present_slots()
            .filter(|slot| slot.is_stop_requested())
            .map(|slot| slot.id()));
        let present = self.present().difference(leaving);
        let missing = usize::from(wanted).saturating_sub(present.len() as usize);
        let spare = (present.len() as usize).saturating_sub(wanted.into());
        if missing > 0
            && let Some(vcpu) = leaving.numbers().next()
        {
            return Err(VcpuRegistryError::Leaving(vcpu));
        }
        plug.request_ejection(set(present.numbers().rev().take(spare)));
        self.restart_reminder_timer();
        let coming = VcpuSet::first(max).difference(present).numbers().take(missing);
        let mut added = AddedVcpus::default();
        for vcpu in coming {
            match self.start_one(vcpu) {
                Ok(hold) => added.holds.push(hold),
                Err(e) => {
                    self.request_stop(added.vcpus);
                    return Err(e);
                }
            }
            added.vcpus = added.vcpus.with(VcpuSet::of(vcpu));
        }
        Ok(added)
    }

    /// Lets the added vCPUs run and announces them to the guest.
    pub fn show(&self, added: AddedVcpus) {
        let vcpus = added.vcpus;
        drop(added);
        if let Some(plug) = &self.plug
            && !vcpus.is_empty()
        {
            plug.show(vcpus);
            self.restart_reminder_timer();
        }
    }

    /// Withdraws the eject requests that the guest has not fulfilled.
    pub fn withdraw_eject_requests(&self) {
        if let Some(plug) = &self.plug {
            plug.request_ejection(VcpuSet::default());
        }
    }

    /// Stops the vCPUs that the guest has ejected.
    pub fn stop_ejected(&self) {
        let Some(plug) = &self.plug else { return };
        let ejected = plug.take_ejected();
        if ejected.is_empty() {
            return;
        }
        guest_log!(Info, "the guest has ejected {}", named(ejected));
        self.request_stop(ejected);
    }

    /// Performs the next step of a reset of the machine. Does nothing until all vCPUs are outside
    /// the guest. Then makes the first `vcpus` vCPUs the present ones, calls `machine` to reset the
    /// rest of the machine, and restarts the vCPUs.
    ///
    /// # Errors
    /// Returns an error if `machine` fails, and a [`VcpuRegistryError`] if a vCPU cannot be
    /// started.
    pub fn restart<E: From<VcpuRegistryError>>(
        &self,
        vcpus: u8,
        machine: impl FnOnce() -> Result<VcpuFactory, E>,
    ) -> Result<(), E> {
        if self.control.state() != VmRunState::Resetting || self.control.is_restoring() {
            return Ok(());
        }
        let arrived = self.control.arrived();
        let staying = self.present();
        // An ejected vCPU may still be in the guest. The exit of its thread triggers another call.
        let leaving = self.present_slots().any(|slot| slot.is_stop_requested());
        if leaving || !staying.difference(arrived).is_empty() {
            self.kicker.kick();
            return Ok(());
        }
        let all = VcpuSet::first(vcpus);
        self.request_stop(staying.difference(all));
        let missing = all.difference(staying);
        for vcpu in missing.numbers() {
            drop(self.start_one(vcpu)?);
        }
        let mut restarted = self.restarted.lock().unwrap_or_else(PoisonError::into_inner);
        *restarted = restarted.with(missing);
        drop(restarted);
        self.makers.store(Arc::new(machine()?));
        self.control.release_reset_barrier(all);
        Ok(())
    }

    /// Returns the vCPUs that resets have added since the last call.
    pub fn take_restarted(&self) -> VcpuSet {
        std::mem::take(&mut *self.restarted.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn restart_reminder_timer(&self) {
        *self.reminded.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Requests that the threads of `vcpus` stop.
    fn request_stop(&self, vcpus: VcpuSet) {
        for slot in self.slots.iter().filter(|slot| vcpus.contains(slot.id())) {
            slot.request_stop();
        }
        self.control.wake_parked();
        self.kicker.kick();
    }

    /// Creates a runnable vCPU from the KVM vCPU that is parked in `slot`.
    fn make(&self, slot: &Arc<VcpuSlot>) -> Result<Vcpu, VcpuRegistryError> {
        let Some(parked) = slot.unpark() else {
            return Err(VcpuRegistryError::Leaving(slot.id()));
        };
        self.makers.load().make(parked, slot).map_err(|(parked, e)| {
            slot.park_again(parked);
            VcpuRegistryError::Make(slot.id(), e)
        })
    }

    /// Starts the thread of a vCPU, and waits until it is attached to the perf core. The vCPU does
    /// not run before the returned [`VcpuHold`] is dropped.
    fn start_one(&self, vcpu: u8) -> Result<VcpuHold, VcpuRegistryError> {
        let slot = &self.slots[usize::from(vcpu)];
        slot.restore_parked()
            .map_err(|e| VcpuRegistryError::State(vcpu, e))?;
        let made = self.make(slot)?;
        let (attached, attaches) = sync_channel(1);
        let (hold, released) = channel();
        // The slot is taken before the thread runs, because the thread frees it.
        slot.take();
        match made.spawn(
            self.makers.clone(),
            VcpuStartReporter::Later { attached, released },
        ) {
            Ok(thread) => self.kicker.add(thread),
            Err(e) => return Err(VcpuRegistryError::Make(vcpu, e)),
        }
        match attaches.recv_timeout(START_TIMEOUT) {
            Ok(Ok(())) => Ok(hold),
            Ok(Err(why)) => Err(VcpuRegistryError::Start(vcpu, why)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                self.request_stop(VcpuSet::of(vcpu));
                Err(VcpuRegistryError::Slow(vcpu))
            }
        }
    }
}

fn set(vcpus: impl Iterator<Item = u8>) -> VcpuSet {
    vcpus.map(VcpuSet::of).fold(VcpuSet::default(), VcpuSet::with)
}

/// Formats the numbers of vCPUs, for example `vCPUs 1 to 3`.
pub fn named(vcpus: VcpuSet) -> String {
    let numbers: Vec<u32> = vcpus.numbers().map(u32::from).collect();
    vcpu_names(&numbers)
}
