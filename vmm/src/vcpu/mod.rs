//! One vCPU: the thread that runs it and the loop around KVM_RUN.
//!
//! The order inside the loop is what makes counts right:
//!
//! 1. clear `immediate_exit`, then look at what signals announced (see [`kick`]);
//! 2. account overflows, which may make a PMI due;
//! 3. reconcile: one pass that turns what the guest wrote into its PMU registers into perf-core calls;
//! 4. deliver a due PMI through LVTPC, and prepare a single step if a counter counts by steps;
//! 5. open the guest's clock, KVM_RUN, close it;
//! 6. handle the exit.

pub mod affinity;
pub mod control;
pub mod debugctl;
mod debugged;
pub mod debugger;
mod exit;
mod first_state;
pub mod gate;
pub mod kick;
pub mod mailbox;
pub mod maker;
mod meeting;
pub mod pmi;
mod rdpmc;
mod registers;
pub mod roster;
pub mod stats;
pub mod step;
mod thread;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use kvm_ioctls::{Cap, VcpuFd, VmFd};
use vpmu::PmiReady;

use crate::boot::BootError;
use crate::devices::Bus;
use crate::kvm::armed::ArmedVcpu;
use crate::pmu::{PmuSetupError, VcpuPmu};
use control::{RunControl, RunState, StopReason};
use control_api::protocol::VcpuView;
use debugctl::DebugControl;
use exit::Completed;
pub use first_state::{FirstState, StateError};
use maker::{KvmVcpu, VcpuMaker};
use meeting::Waited;
use pmi::{Delivery, Lvtpc, Recheck};
use rdpmc::LastRead;
pub use rdpmc::Rdpmc;
use registers::RegisterCache;
use roster::Seat;
use step::debug::GuestDebug;
use step::{Prepared, StepError, Stepper};
pub use thread::{Kicker, VcpuThread};

/// Why a vCPU thread could not be started.
#[derive(Debug, thiserror::Error)]
pub enum VcpuError {
    /// The thread was not made.
    #[error("cannot start the thread of vCPU {0}")]
    Spawn(u8, #[source] io::Error),
    /// The LVTPC access could not be prepared.
    #[error(transparent)]
    Pmi(#[from] pmi::PmiError),
    /// Something else could not be had.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
}

/// Why a vCPU's thread cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum BeginError {
    /// It did not enter the perf core.
    #[error(transparent)]
    Pmu(#[from] PmuSetupError),
    /// Nothing would wake it.
    #[error("timer_create failed")]
    Timer(#[source] io::Error),
}

/// Why a vCPU does not start again.
#[derive(Debug, thiserror::Error)]
enum RestartError {
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Boot(#[from] BootError),
    #[error(transparent)]
    Make(#[from] VcpuError),
}

/// Why a vCPU cannot go on.
#[derive(Debug, thiserror::Error)]
enum VcpuFailure {
    #[error(transparent)]
    Pmi(#[from] pmi::PmiError),
    #[error(transparent)]
    Step(#[from] StepError),
    #[error("serving a breakpoint failed")]
    Debug(#[source] kvm_ioctls::Error),
    #[error("serving RDPMC failed")]
    Read(#[source] kvm_ioctls::Error),
    #[error("looking which kernel the guest runs failed")]
    Gate(#[source] kvm_ioctls::Error),
    #[error("KVM_SET_MSRS(IA32_DEBUGCTL) failed")]
    DebugControl(#[source] kvm_ioctls::Error),
    #[error("KVM_RUN failed")]
    Run(#[source] kvm_ioctls::Error),
    #[error("nothing serves the exit {0}")]
    Unserved(String),
}

/// What comes before the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// It is entered.
    Enter,
    /// The loop begins again: an instruction was executed here.
    Again,
}

/// What a turn of the loop comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// There is another one.
    Again,
    /// The thread ends: the VM has ended, or the vCPU leaves it.
    Leave,
    /// The guest has reset the machine.
    Reset,
    /// The VM ends, or starts again where a reset makes it.
    Stop(StopReason),
}

/// A vCPU that is configured and has yet to run.
pub struct Vcpu {
    fd: VcpuFd,
    /// What else there is of KVM's vCPU, to be parked with it.
    kept: maker::Kept,
    vm: Arc<VmFd>,
    bus: Arc<Bus>,
    pmu: Option<VcpuPmu>,
    lvtpc: Lvtpc,
    seat: Arc<Seat>,
    control: Arc<RunControl>,
    debug: GuestDebug,
    debug_control: Option<DebugControl>,
    rdpmc: Option<Rdpmc>,
    stepper: Option<Stepper>,
    on_first_entry: Option<Box<dyn FnOnce() + Send>>,
    /// The CPU of the host to stay on.
    pin: Option<usize>,
}

impl Vcpu {
    /// Ready to enter the guest. `pmu` is `None` when the guest has no PMU.
    pub fn new(
        kvm: KvmVcpu,
        lvtpc: Lvtpc,
        vm: Arc<VmFd>,
        bus: Arc<Bus>,
        pmu: Option<VcpuPmu>,
        seat: Arc<Seat>,
        control: Arc<RunControl>,
    ) -> Self {
        let (fd, kept) = kvm.into_parts();
        Self {
            fd,
            kept,
            vm,
            bus,
            pmu,
            lvtpc,
            seat,
            control,
            debug: GuestDebug::default(),
            debug_control: None,
            rdpmc: None,
            stepper: None,
            on_first_entry: None,
            pin: None,
        }
    }

    /// Stays on that CPU of the host.
    pub fn stay_on(&mut self, cpu: Option<usize>) {
        self.pin = cpu;
    }

    /// Calls `f` right before the first entry into the guest.
    pub fn on_first_entry(&mut self, f: Box<dyn FnOnce() + Send>) {
        self.on_first_entry = Some(f);
    }

    /// Counts by single steps where counters ask for it.
    pub fn step_with(&mut self, stepper: Stepper) {
        self.stepper = Some(stepper);
    }

    /// Gives KVM what is not the PMU's of a trapped IA32_DEBUGCTL.
    pub fn keep_debug_control(&mut self, debug_control: DebugControl) {
        self.debug_control = Some(debug_control);
    }

    /// Serves RDPMC at these linear addresses by hardware breakpoints.
    pub fn stop_at_rdpmc(&mut self, addresses: &[u64]) {
        self.debug.set_sites(addresses);
    }

    /// How RDPMC is served.
    pub fn serve_rdpmc(&mut self, rdpmc: Rdpmc) {
        self.rdpmc = Some(rdpmc);
    }

    fn into_kvm(self) -> KvmVcpu {
        KvmVcpu::from_parts(self.fd, self.kept)
    }
}

/// A vCPU on the thread that runs it.
struct Running {
    id: u8,
    fd: ArmedVcpu,
    kept: maker::Kept,
    vm: Arc<VmFd>,
    bus: Arc<Bus>,
    pmu: Option<VcpuPmu>,
    lvtpc: Lvtpc,
    /// When to look at LVTPC again while a PMI waits behind its mask.
    recheck: Recheck,
    /// A PMI waited at the last entry, behind a mask or for the rate limit.
    pmi_waits: bool,
    /// Where requests to this thread come from, and where what it counts goes.
    seat: Arc<Seat>,
    control: Arc<RunControl>,
    debug: GuestDebug,
    /// The rest of IA32_DEBUGCTL, where it is trapped.
    debug_control: Option<DebugControl>,
    /// `None`: nothing stands for RDPMC.
    rdpmc: Option<Rdpmc>,
    /// With the exact backing.
    stepper: Option<Stepper>,
    last_read: LastRead,
    /// An NMI was sent for a PMI, and the guest may not have taken it yet.
    nmi_sent: bool,
    /// How many NMIs in a row had an RDPMC executed again.
    nmis_in_a_row: u32,
    registers: RegisterCache,
    /// What the last exit's instruction is to the guest's counters.
    completed: Completed,
    /// KVM has yet to complete the last exit.
    exit_is_open: bool,
    /// Which of a debugger's breakpoints `debug` has.
    debugger_version: u64,
    overflow_signals: kick::OverflowSignals,
    /// Called once, right before the first KVM_RUN.
    on_first_entry: Option<Box<dyn FnOnce() + Send>>,
}

impl Running {
    /// On the current thread.
    fn new(vcpu: Vcpu) -> Self {
        let mut fd = ArmedVcpu::new(vcpu.fd);
        // The stepper reads and writes registers between two entries; both ways at once would undo each
        // other.
        let syncs = vcpu.pmu.is_some() && vcpu.stepper.is_none() && vcpu.vm.check_extension(Cap::SyncRegs);
        Self {
            id: vcpu.seat.id(),
            registers: RegisterCache::new(&mut fd, syncs),
            fd,
            kept: vcpu.kept,
            vm: vcpu.vm,
            bus: vcpu.bus,
            pmu: vcpu.pmu,
            lvtpc: vcpu.lvtpc,
            recheck: Recheck::default(),
            pmi_waits: false,
            seat: vcpu.seat,
            control: vcpu.control,
            debug: vcpu.debug,
            debug_control: vcpu.debug_control,
            rdpmc: vcpu.rdpmc,
            stepper: vcpu.stepper,
            last_read: LastRead::default(),
            nmi_sent: false,
            nmis_in_a_row: 0,
            completed: Completed::None,
            exit_is_open: false,
            debugger_version: 0,
            overflow_signals: kick::OverflowSignals::default(),
            on_first_entry: vcpu.on_first_entry,
        }
    }

    fn into_kvm(self) -> KvmVcpu {
        KvmVcpu::from_parts(self.fd.disarm(), self.kept)
    }

    /// Enters the perf core on this thread.
    fn begin(&mut self) -> Result<kick::KickTimer, BeginError> {
        let timer = kick::KickTimer::for_current_thread().map_err(BeginError::Timer)?;
        if let Some(pmu) = &mut self.pmu
            && !pmu.is_attached()
        {
            pmu.attach_to_current_thread()?;
        }
        Ok(timer)
    }

    /// The loop, until the VM ends, the vCPU is to leave, or the machine is reset: then with what it is
    /// to be made anew. An error says why it could not begin.
    fn run(
        &mut self,
        began: Option<&SyncSender<Result<(), BeginError>>>,
    ) -> Result<Option<Arc<VcpuMaker>>, BeginError> {
        let timer = self.begin()?;
        if let Some(began) = began
            && began.send(Ok(())).is_err()
        {
            // Nobody waits for it any more; its seat says that it is to leave.
            log::debug!("vcpu{}: it began too late", self.id);
        }
        self.seat.stats().go_on();
        loop {
            match self.turn(&timer) {
                Ok(Turn::Again) => {}
                Ok(Turn::Leave) => break,
                Ok(Turn::Reset) => {
                    if let Some(maker) = self.wait_for_restart() {
                        return Ok(Some(maker));
                    }
                }
                Ok(Turn::Stop(reason)) => self.control.guest_ends(reason),
                Err(failure) => {
                    self.report(&failure);
                    self.control.stop(StopReason::Failed);
                    break;
                }
            }
        }
        if self.seat.is_to_leave() {
            self.settle();
        }
        if let Some(pmu) = &mut self.pmu {
            pmu.detach();
        }
        Ok(None)
    }

    /// After a reset: out of the guest, with its counters closed, until the machine is made anew. `None`:
    /// that does not happen, and the loop says why.
    fn wait_for_restart(&mut self) -> Option<Arc<VcpuMaker>> {
        self.settle();
        if let Some(pmu) = &mut self.pmu {
            pmu.reset();
            pmu.pause();
        }
        loop {
            let seat = &self.seat;
            let mail = || seat.mailbox().has_mail() || seat.is_to_leave();
            match self.control.wait_for_restart(self.id, mail) {
                Waited::Restart(maker) => return Some(maker),
                Waited::Mail if self.seat.is_to_leave() => {
                    self.control.leaves_meeting(self.id);
                    break;
                }
                Waited::Mail => self.read_mail(),
                Waited::Over => break,
            }
        }
        if let Some(pmu) = &mut self.pmu {
            pmu.resume();
        }
        None
    }

    /// The same vCPU as it was made, on this thread and in the perf core as before. It waits for the others.
    fn made_anew(mut self, maker: &VcpuMaker) -> Result<Self, RestartError> {
        let (pmu, seat, control) = (self.pmu.take(), self.seat.clone(), self.control.clone());
        let kvm = self.into_kvm();
        maker.restore(&kvm)?;
        let vcpu = maker.make_with(kvm, &seat, pmu).map_err(|(_, e)| e)?;
        let mut fresh = Running::new(vcpu);
        control.is_restored(fresh.id);
        if let Some(pmu) = &mut fresh.pmu {
            pmu.resume();
        }
        Ok(fresh)
    }

    /// One turn of the loop.
    fn turn(&mut self, timer: &kick::KickTimer) -> Result<Turn, VcpuFailure> {
        self.fd.clear_exit_request();
        if self.seat.mailbox().has_mail() {
            self.read_mail();
        }
        if self.seat.is_to_leave() {
            return Ok(Turn::Leave);
        }
        match self.control.state() {
            RunState::Running => {}
            RunState::Held if self.is_let_go() => {}
            RunState::Paused | RunState::Held => {
                if self.is_asked_for_registers() && self.has_open_exit() {
                    return self.complete_open_exit();
                }
                self.pause()?;
                return Ok(Turn::Again);
            }
            RunState::Stopped => return Ok(Turn::Leave),
            RunState::Resetting => return Ok(Turn::Reset),
        }
        if self.before_entry(timer)? == Entry::Again {
            return Ok(Turn::Again);
        }
        if let Some(f) = self.on_first_entry.take() {
            f();
        }
        let next = self.enter();
        self.serve(next)
    }

    /// Waits for the end of a pause, or until a debugger lets this vCPU go on, and answers mail meanwhile.
    /// The vCPU's events stay off, and its time stands still.
    fn pause(&mut self) -> Result<(), VcpuFailure> {
        if let Some(pmu) = &mut self.pmu {
            pmu.pause();
        }
        let waited = self.wait_in_pause();
        self.tell_of_pause();
        if let Some(pmu) = &mut self.pmu {
            pmu.resume();
        }
        waited
    }

    fn wait_in_pause(&mut self) -> Result<(), VcpuFailure> {
        loop {
            match self.control.state() {
                _ if self.seat.is_to_leave() => return Ok(()),
                RunState::Held if self.is_let_go() => break,
                RunState::Paused | RunState::Held => {}
                RunState::Running | RunState::Stopped | RunState::Resetting => break,
            }
            if self.is_asked_for_registers() {
                if self.has_open_exit() {
                    return Ok(());
                }
                self.show_registers()?;
            }
            let (seat, control) = (&self.seat, &self.control);
            control.wait_until_not_paused(|| {
                seat.mailbox().has_mail()
                    || seat.is_to_leave()
                    || self.is_asked_for_registers()
                    || control.state() == RunState::Held && self.is_let_go()
            });
            if self.seat.mailbox().has_mail() {
                self.read_mail();
            }
        }
        self.take_registers_from_debugger()
    }

    /// Tells a guest with a paravirtual clock that it was paused, so that its watchdogs do not take the
    /// time for a lockup.
    fn tell_of_pause(&self) {
        match self.fd.kvmclock_ctrl() {
            // EINVAL: this vCPU's clock is not in use.
            Ok(()) => {}
            Err(e) if e.errno() == libc::EINVAL => {}
            Err(e) => log::debug!("vcpu{}: KVM_KVMCLOCK_CTRL: {e}", self.id),
        }
    }

    /// Leaves nothing of this thread in KVM's vCPU: an access to a port whose outcome the guest has not seen
    /// yet, and which signals it lets through.
    fn settle(&mut self) {
        self.fd.request_exit();
        match self.fd.run().why {
            Err(e) if e.errno() == libc::EINTR => {}
            Ok(exit) => log::debug!("vcpu{}: it leaves with {exit:?}", self.id),
            Err(e) => log::debug!("vcpu{}: it leaves with KVM_RUN: {e}", self.id),
        }
        self.overflow_signals.handle_again(&self.fd);
    }

    /// Does what an operator asked of this thread.
    fn read_mail(&mut self) {
        let mail = self.seat.mailbox().take();
        let Some(pmu) = &mut self.pmu else { return };
        if let Some(filter) = mail.filter {
            pmu.set_filter(filter);
        }
        if mail.find_kernel {
            pmu.find_kernel(&self.fd);
        }
        if let Some(generation) = mail.view {
            let (uncounted_ns, places_lost) = pmu.uncounted().unzip();
            let stats = self.seat.stats();
            let view = VcpuView {
                vcpu: self.id.into(),
                uncounted_ns,
                places_lost,
                pmis: (!pmu.is_kvms()).then(|| stats.pmi_nmi.get() + stats.pmi_fixed.get()),
                counters: pmu.view(&self.fd),
            };
            self.seat.mailbox().answer(generation, view);
        }
    }

    /// Steps 2 to 4 of the loop.
    fn before_entry(&mut self, timer: &kick::KickTimer) -> Result<Entry, VcpuFailure> {
        let Some(pmu) = &mut self.pmu else {
            return self.prepare_entry();
        };
        if let Some(stepper) = &mut self.stepper
            && let Some(step) = stepper.settle(&self.fd)?
        {
            pmu.feed_step(&step);
        }
        self.serve_pmu(timer)?;
        self.look_at_kernel().map_err(VcpuFailure::Gate)?;
        self.prepare_entry()
    }

    /// Arms the debug state so that the next entry stops where it must.
    fn prepare_entry(&mut self) -> Result<Entry, VcpuFailure> {
        let (Some(pmu), Some(stepper)) = (&mut self.pmu, &mut self.stepper) else {
            // Breakpoints for RDPMC and a debugger's, if any; told to KVM once.
            let want = self.wanted_by_debugger();
            self.debug.apply(&self.fd, want).map_err(VcpuFailure::Debug)?;
            return Ok(Entry::Enter);
        };
        let prepared = stepper.prepare(&self.fd, &mut self.debug, pmu.stepped_levels())?;
        let tally = stepper.tally();
        self.seat.stats().steps.set(tally.steps);
        self.seat.stats().steps_lost.set(tally.lost);
        self.seat.stats().unstepped.set(tally.unstepped);
        match prepared {
            Prepared::Enter => Ok(Entry::Enter),
            Prepared::Executed(step) => {
                pmu.feed_step(&step);
                Ok(Entry::Again)
            }
        }
    }

    /// Overflows, what the guest wrote into its registers, and a PMI that is due.
    fn serve_pmu(&mut self, timer: &kick::KickTimer) -> Result<(), VcpuFailure> {
        let Some(pmu) = &mut self.pmu else { return Ok(()) };
        let signalled = kick::take_overflow();
        self.overflow_signals.before_entry(&self.fd, signalled);
        self.seat.stats().overflow_signals.add(signalled.into());
        let mut wants_system = self.registers.keeps_system();
        if pmu.take_fed_overflow() || signalled {
            let synced = self.registers.synced(&mut self.fd);
            let done = pmu.service_overflows(&self.fd, synced);
            self.seat.stats().overflows.add(u64::from(done.overflows));
            // A timer that rings early needs nothing, and the sample comes with the next signal.
            wants_system |= done.used_system;
        }
        self.registers.want_system(&mut self.fd, wants_system);
        pmu.reconcile();
        match std::mem::take(&mut self.completed) {
            Completed::None => {}
            Completed::AtCpl0 => pmu.retired_outside(|| 0),
            Completed::AtAnyCpl => {
                let fd = &self.fd;
                pmu.retired_outside(|| fd.get_sregs().map_or(0, |sregs| sregs.ss.dpl));
            }
        }
        if let Some(wait) = pmu.retry_in() {
            timer.kick_in(wait);
        }
        if !pmu.pmi_pending() {
            if std::mem::take(&mut self.pmi_waits) {
                self.seat.stats().pmi_withdrawn.set(pmu.pmi_counts().withdrawn);
                self.recheck.over();
            }
            return Ok(());
        }
        self.serve_pmi(timer)
    }

    /// A PMI that is due.
    fn serve_pmi(&mut self, timer: &kick::KickTimer) -> Result<(), VcpuFailure> {
        let Some(pmu) = &mut self.pmu else { return Ok(()) };
        match pmu.pmi_ready() {
            PmiReady::No => {
                self.seat.stats().pmi_withdrawn.set(pmu.pmi_counts().withdrawn);
                self.pmi_waits = false;
                return Ok(());
            }
            PmiReady::Now => {}
            PmiReady::NotBefore { time_ns } => {
                self.seat.stats().pmi_throttled.set(pmu.pmi_counts().throttled);
                self.pmi_waits = true;
                self.recheck.over();
                timer.kick_in(Duration::from_nanos(pmu.nanoseconds_until(time_ns)));
                return Ok(());
            }
        }
        let Some(open) = self.lvtpc.look(&mut self.fd)? else {
            // The guest unmasks LVTPC without telling us; look again at every exit, and now and then without
            // one.
            self.pmi_waits = pmu.pmi_must_wait();
            if self.pmi_waits {
                self.seat.stats().pmi_masked_waits.inc();
                timer.kick_in(self.recheck.waits(Instant::now()));
            } else {
                self.seat.stats().pmi_withdrawn.set(pmu.pmi_counts().withdrawn);
                self.recheck.over();
            }
            return Ok(());
        };
        self.pmi_waits = false;
        self.recheck.over();
        if let Some(wait) = self.interrupt_before_read().map_err(VcpuFailure::Read)? {
            timer.kick_in(wait);
            return Ok(());
        }
        match self.lvtpc.deliver(open, &self.vm, &self.fd)? {
            Delivery::Nmi => {
                self.nmi_sent = true;
                self.seat.stats().pmi_nmi.inc();
            }
            Delivery::Fixed => self.seat.stats().pmi_fixed.inc(),
            Delivery::Dropped => self.seat.stats().pmi_dropped.inc(),
        }
        if let Some(pmu) = &mut self.pmu {
            pmu.pmi_delivered();
        }
        Ok(())
    }
}
