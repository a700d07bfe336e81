//! Which vCPUs a VM has: the one place that knows. It starts those that are added and takes in those that
//! leave.
//!
//! Each number that a vCPU can have is a *seat*. A seat is taken by a vCPU whose thread runs; else KVM's vCPU
//! is parked in it, because KVM cannot delete one. A vCPU that comes gets everything of ours anew: its
//! thread, its PMU with reset values, what serves its RDPMC. KVM's is put into the state in which it was made
//! (see `kvm::first_state`). Counters of its loop and its mailbox stay with the seat.
//!
//! A vCPU comes in two steps: first it is started and enters the perf core, waiting for the guest's INIT and
//! SIPI; only then is it shown to the guest. So who counts is there before its first instruction, and a start
//! that fails leaves nothing behind. It leaves when the guest has ejected it: its thread ends, which folds
//! its counts, and parks what is KVM's.

use std::fmt::Write as _;
use std::sync::mpsc::{RecvTimeoutError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use perf_core::guest_log;

use super::control::{RunControl, RunState};
use super::failure::{BeginError, VcpuError};
use super::kicker::Kicker;
use super::kvm_vcpu::KvmVcpu;
use super::maker::VcpuMaker;
use super::running::{Begins, Vcpu};
use super::seat::Seat;
use crate::devices::cpu_plug::{CpuPlug, PlugState, VcpuSet};
use crate::kvm::call::CallError;

/// How long a vCPU's thread may take to open its events.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// Between two interrupts for the same change.
const REMINDER: Duration = Duration::from_secs(1);

/// Why the number of vCPUs stays as it is.
#[derive(Debug, thiserror::Error)]
pub enum RosterError {
    /// No room was left for more at the start.
    #[error("the number of this VM's vCPUs is fixed at {0}; start it with --cpus N,max=M to add some later")]
    Fixed(u8),
    /// A number that no VM like this can have.
    #[error("{asked} vCPUs are out of range: this VM may have 1 to {max}")]
    OutOfRange {
        /// What was asked.
        asked: u32,
        /// What it may have.
        max: u8,
    },
    /// The guest cannot answer.
    #[error("the VM is {0}; only a running guest takes vCPUs in and gives them up")]
    NotRunning(&'static str),
    /// One that was ejected still runs its last exit.
    #[error("vCPU {0} has not left yet; try again")]
    Leaving(u8),
    /// KVM's vCPU cannot be put into its first state.
    #[error("vCPU {0} cannot be added")]
    State(u8, #[source] CallError),
    /// It cannot be made.
    #[error("vCPU {0} cannot be added")]
    Make(u8, #[source] VcpuError),
    /// It could not enter the perf core, for instance because an event of all vCPUs finds no counter there.
    #[error("vCPU {0} cannot be added")]
    Start(u8, #[source] BeginError),
    /// Its thread does not answer.
    #[error("vCPU {0} cannot be added: its thread has not begun after {n} s", n = START_PATIENCE.as_secs())]
    Slow(u8),
}

/// The vCPUs of a VM.
#[derive(Debug)]
pub struct Roster {
    seats: Vec<Arc<Seat>>,
    /// What vCPUs are made from, which a reset exchanges.
    makers: Arc<ArcSwap<VcpuMaker>>,
    kicker: Kicker,
    control: Arc<RunControl>,
    /// vCPUs that came back with a reset, which nobody has taken note of.
    came_back: Mutex<VcpuSet>,
    /// `None`: nobody comes or goes.
    plug: Option<Arc<CpuPlug>>,
    reminded: Mutex<Option<Instant>>,
}

impl Roster {
    /// Seats for `vcpus`, KVM's vCPUs in the order of their numbers. Nobody has taken one.
    pub fn new(
        vcpus: Vec<KvmVcpu>,
        maker: VcpuMaker,
        control: Arc<RunControl>,
        plug: Option<Arc<CpuPlug>>,
    ) -> Self {
        let seat = |vcpu: KvmVcpu| Arc::new(Seat::new(vcpu));
        Self {
            seats: vcpus.into_iter().map(seat).collect(),
            makers: Arc::new(ArcSwap::from_pointee(maker)),
            came_back: Mutex::default(),
            kicker: Kicker::default(),
            control,
            plug,
            reminded: Mutex::default(),
        }
    }

    /// A seat for each number that a vCPU can have.
    pub fn seats(&self) -> &[Arc<Seat>] {
        &self.seats
    }

    /// Most vCPUs there can be.
    pub fn max(&self) -> u8 {
        u8::try_from(self.seats.len()).unwrap_or(u8::MAX)
    }

    /// The vCPUs there are.
    pub fn present(&self) -> VcpuSet {
        let taken = self.taken().map(|seat| VcpuSet::of(seat.id()));
        taken.fold(VcpuSet::default(), VcpuSet::with)
    }

    /// The seats of the vCPUs there are.
    pub fn taken(&self) -> impl Iterator<Item = &Arc<Seat>> {
        self.seats.iter().filter(|seat| seat.is_taken())
    }

    /// Makes every vCPU look at what is asked of it.
    pub fn kicker(&self) -> &Kicker {
        &self.kicker
    }

    /// The registers of vCPUs that come and go.
    pub fn plug(&self) -> Option<&Arc<CpuPlug>> {
        self.plug.as_ref()
    }

    /// What the guest says of its vCPUs; `None` where nobody comes or goes. A guest that has not looked at a
    /// change for a while is interrupted again.
    pub fn plug_state(&self) -> Option<PlugState> {
        let plug = self.plug.as_ref()?;
        let mut reminded = self.reminded.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if reminded.is_none_or(|last| now.duration_since(last) >= REMINDER) {
            *reminded = Some(now);
            plug.remind();
        }
        Some(plug.state())
    }

    /// Starts the threads of the first `vcpus`, and waits until they are in the perf core: who is served from
    /// now on can count all of them. `first_entry` is called right before the first guest instruction.
    ///
    /// # Errors
    /// [`RosterError`]; the threads that were started run on.
    pub fn start(&self, vcpus: u8, first_entry: Option<Box<dyn FnOnce() + Send>>) -> Result<(), RosterError> {
        let mut first_entry = first_entry;
        let (begins, all_began) = channel();
        for seat in self.seats.iter().take(vcpus.into()) {
            let mut vcpu = self.make(seat)?;
            if let Some(f) = first_entry.take() {
                vcpu.on_first_entry(f);
            }
            seat.take();
            let thread = vcpu
                .spawn(self.makers.clone(), Begins::WithVm(begins.clone()))
                .map_err(|e| RosterError::Make(seat.id(), e))?;
            self.kicker.add(thread);
        }
        drop(begins);
        // One that cannot begin has ended the VM, and its sender is gone too.
        if let Err(RecvTimeoutError::Timeout) = all_began.recv_timeout(START_PATIENCE) {
            log::warn!("not all vCPUs have begun after {} s", START_PATIENCE.as_secs());
        }
        Ok(())
    }

    /// Begins to make it `count` vCPUs. If there are fewer, those that are missing are started and returned,
    /// for [`Roster::show`]; the guest has not been told of them. If there are more, the guest is asked
    /// for those with the highest numbers. What it was asked for before and has not given is not asked
    /// for any more.
    ///
    /// # Errors
    /// [`RosterError`]; there are as many vCPUs as before.
    pub fn begin(&self, count: u32) -> Result<VcpuSet, RosterError> {
        let max = self.max();
        let Some(plug) = &self.plug else {
            return Err(RosterError::Fixed(max));
        };
        let wanted = match u8::try_from(count) {
            Ok(n) if (1..=max).contains(&n) => n,
            _ => return Err(RosterError::OutOfRange { asked: count, max }),
        };
        match self.control.state() {
            RunState::Running => {}
            RunState::Paused => return Err(RosterError::NotRunning("paused")),
            RunState::Held => return Err(RosterError::NotRunning("stopped by a debugger")),
            RunState::Stopped => return Err(RosterError::NotRunning("ending")),
            RunState::Resetting => return Err(RosterError::NotRunning("starting again")),
        }
        let leaving = set(self
            .taken()
            .filter(|seat| seat.is_to_leave())
            .map(|seat| seat.id()));
        let present = self.present().without(leaving);
        let missing = usize::from(wanted).saturating_sub(present.len() as usize);
        let spare = (present.len() as usize).saturating_sub(wanted.into());
        if missing > 0
            && let Some(vcpu) = leaving.numbers().next()
        {
            return Err(RosterError::Leaving(vcpu));
        }
        plug.ask_for(set(present.numbers().rev().take(spare)));
        self.remembers_to_remind();
        let coming = VcpuSet::below(max).without(present).numbers().take(missing);
        let mut started = VcpuSet::default();
        for vcpu in coming {
            if let Err(e) = self.start_one(vcpu) {
                self.dismiss(started);
                return Err(e);
            }
            started = started.with(VcpuSet::of(vcpu));
        }
        Ok(started)
    }

    /// Tells the guest that `vcpus` have come.
    pub fn show(&self, vcpus: VcpuSet) {
        if let Some(plug) = &self.plug
            && !vcpus.is_empty()
        {
            plug.show(vcpus);
            self.remembers_to_remind();
        }
    }

    /// The guest is not asked for vCPUs any more that it has not given up.
    pub fn withdraw(&self) {
        if let Some(plug) = &self.plug {
            plug.ask_for(VcpuSet::default());
        }
    }

    /// Ends the vCPUs that the guest ejected.
    pub fn let_go(&self) {
        let Some(plug) = &self.plug else { return };
        let ejected = plug.take_ejected();
        if ejected.is_empty() {
            return;
        }
        guest_log!(Info, "the guest has ejected {}", named(ejected));
        self.dismiss(ejected);
    }

    /// A step of a reset, each time one of the vCPUs has come as far as the others wait for: the vCPUs
    /// start again if all of them are out of the guest. Those beyond the first `vcpus` leave, and those
    /// that are missing come. `machine` makes the rest of the machine anew.
    ///
    /// # Errors
    /// That of `machine`, or [`RosterError`].
    pub fn restart<E: From<RosterError>>(
        &self,
        vcpus: u8,
        machine: impl FnOnce() -> Result<VcpuMaker, E>,
    ) -> Result<(), E> {
        if self.control.state() != RunState::Resetting || self.control.is_restoring() {
            return Ok(());
        }
        let arrived = self.control.arrived();
        let staying = self.present();
        // One that the guest has ejected may still be in it: its thread ends first, which is told.
        let leaving = self.taken().any(|seat| seat.is_to_leave());
        if leaving || !staying.without(arrived).is_empty() {
            self.kicker.kick();
            return Ok(());
        }
        let all = VcpuSet::below(vcpus);
        self.dismiss(staying.without(all));
        let missing = all.without(staying);
        for vcpu in missing.numbers() {
            self.start_one(vcpu)?;
        }
        let mut came_back = self.came_back.lock().unwrap_or_else(PoisonError::into_inner);
        *came_back = came_back.with(missing);
        drop(came_back);
        self.makers.store(Arc::new(machine()?));
        self.control.go_on(all);
        Ok(())
    }

    /// The vCPUs that came back with a reset since the last call.
    pub fn take_came_back(&self) -> VcpuSet {
        std::mem::take(&mut *self.came_back.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn remembers_to_remind(&self) {
        *self.reminded.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Asks the threads of `vcpus` to end.
    fn dismiss(&self, vcpus: VcpuSet) {
        for seat in self.seats.iter().filter(|seat| vcpus.has(seat.id())) {
            seat.dismiss();
        }
        self.control.wake_parked();
        self.kicker.kick();
    }

    /// A vCPU from what is parked in its seat.
    fn make(&self, seat: &Arc<Seat>) -> Result<Vcpu, RosterError> {
        let Some(parked) = seat.unpark() else {
            return Err(RosterError::Leaving(seat.id()));
        };
        self.makers.load().make(parked, seat).map_err(|(parked, e)| {
            seat.park_again(parked);
            RosterError::Make(seat.id(), e)
        })
    }

    /// Starts a vCPU and waits until it is in the perf core.
    fn start_one(&self, vcpu: u8) -> Result<(), RosterError> {
        let seat = &self.seats[usize::from(vcpu)];
        seat.restore_parked().map_err(|e| RosterError::State(vcpu, e))?;
        let made = self.make(seat)?;
        let (began, begins) = sync_channel(1);
        // Taken before it runs: its thread frees the seat.
        seat.take();
        match made.spawn(self.makers.clone(), Begins::Later(began)) {
            Ok(thread) => self.kicker.add(thread),
            Err(e) => return Err(RosterError::Make(vcpu, e)),
        }
        match begins.recv_timeout(START_PATIENCE) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(why)) => Err(RosterError::Start(vcpu, why)),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                self.dismiss(VcpuSet::of(vcpu));
                Err(RosterError::Slow(vcpu))
            }
        }
    }
}

fn set(vcpus: impl Iterator<Item = u8>) -> VcpuSet {
    vcpus.map(VcpuSet::of).fold(VcpuSet::default(), VcpuSet::with)
}

/// Numbers as people write them: vCPU 1; vCPUs 1 to 3; vCPUs 0, 2.
pub fn named(vcpus: VcpuSet) -> String {
    let numbers: Vec<u8> = vcpus.numbers().collect();
    match numbers.as_slice() {
        [] => "no vCPU".into(),
        [one] => format!("vCPU {one}"),
        [first, .., last] if usize::from(last - first) + 1 == numbers.len() && numbers.len() > 2 => {
            format!("vCPUs {first} to {last}")
        }
        [first, rest @ ..] => {
            let mut text = format!("vCPUs {first}");
            for vcpu in rest {
                // Writing to a string does not fail.
                let _ = write!(text, ", {vcpu}");
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpus_are_named_as_people_do() {
        let named = |vcpus: &[u8]| super::named(set(vcpus.iter().copied()));
        assert_eq!(named(&[]), "no vCPU");
        assert_eq!(named(&[63]), "vCPU 63");
        assert_eq!(named(&[1, 2]), "vCPUs 1, 2");
        assert_eq!(named(&[1, 2, 3]), "vCPUs 1 to 3");
        assert_eq!(named(&[0, 2, 3]), "vCPUs 0, 2, 3");
    }
}
