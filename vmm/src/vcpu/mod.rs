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

pub mod control;
pub mod debugctl;
mod first_state;
pub mod gate;
pub mod kick;
pub mod mailbox;
pub mod maker;
pub mod pmi;
mod rdpmc;
pub mod roster;
pub mod stats;
pub mod step;

use std::io;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_debug_exit_arch;
use kvm_ioctls::{Cap, SyncReg, VcpuExit, VcpuFd, VmFd};
use vmm_sys_util::signal::Killable;
use vpmu::registers::IA32_DEBUGCTL;
use vpmu::{ParavirtualEvent, PmiReady};

use crate::devices::{Bus, BusOutcome};
use crate::pmu::{PmuSetupError, Synced, VcpuPmu};
use control::{RunControl, RunState, StopReason};
use control_api::protocol::VcpuView;
use debugctl::DebugControl;
pub use first_state::{FirstState, StateError};
use kernel_images::rdpmc::TRAP_PORT;
use maker::KvmVcpu;
use perf_core::error_line;
use pmi::{Delivery, Lvtpc, Recheck};
pub use rdpmc::Rdpmc;
use rdpmc::Read;
use roster::Seat;
use step::debug::GuestDebug;
use step::{Prepared, StepError, Stepper};

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

/// Why a vCPU cannot enter its guest: a call failed, which no guest can cause.
#[derive(Debug, thiserror::Error)]
enum EntryError {
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
}

/// CR0.PE: protected mode, off after a reset (SDM vol. 3 §2.5).
const CR0_PE: u64 = 1 << 0;

/// Which registers came with the last exit and have not been changed since.
#[derive(Clone, Copy, Debug, Default)]
struct Fresh {
    general: bool,
    system: bool,
}

/// Whether the instruction that left the guest completes with the next entry, without having retired in guest
/// mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Completed {
    #[default]
    None,
    AtCpl0,
    AtAnyCpl,
}

/// What the loop does after an exit.
enum Next {
    /// Enter the guest again.
    Continue,
    /// The guest wrote this to the port that stands for RDPMC.
    TrapPort(u8),
    /// The guest stopped at a breakpoint or behind a single step.
    Debug(kvm_debug_exit_arch),
    /// End the VM.
    Stop(StopReason),
}

/// A vCPU and all it needs to run.
pub struct Vcpu {
    id: u8,
    fd: VcpuFd,
    /// What else there is of KVM's vCPU, to be parked with it.
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
    /// The RDPMC that the guest executed last, as long as nothing is known of what it executed since.
    just_read: Option<Read>,
    /// How many PMIs in a row had an RDPMC done again.
    reads_again: u32,
    /// An NMI was sent for a PMI, and the guest may not have taken it yet.
    nmi_sent: bool,
    /// Registers come and go with KVM_RUN.
    syncs_registers: bool,
    /// Segment and control registers come, too: the last sample needed them, and nothing but samples left
    /// the guest since.
    syncs_system: bool,
    /// What came with the last exit is still the vCPU's state.
    synced: Fresh,
    /// The last exit was for a signal's sake only.
    left_by_signal: bool,
    /// What the last exit's instruction is to the guest's counters.
    completed: Completed,
    overflow_signals: kick::OverflowSignals,
    /// Called once, right before the first KVM_RUN.
    on_first_entry: Option<Box<dyn FnOnce() + Send>>,
}

impl Vcpu {
    /// A vCPU that is configured and ready to enter the guest. `pmu` is `None` when the guest has no PMU.
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
            id: seat.id(),
            fd,
            kept,
            vm,
            bus,
            pmu,
            lvtpc,
            recheck: Recheck::default(),
            pmi_waits: false,
            seat,
            control,
            debug: GuestDebug::default(),
            debug_control: None,
            rdpmc: None,
            stepper: None,
            just_read: None,
            reads_again: 0,
            nmi_sent: false,
            syncs_registers: false,
            syncs_system: false,
            synced: Fresh::default(),
            left_by_signal: false,
            completed: Completed::None,
            overflow_signals: kick::OverflowSignals::default(),
            on_first_entry: None,
        }
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

    /// Starts the thread of this vCPU, named `vcpuN`. When it ends it parks KVM's vCPU in its seat. `began`
    /// is told whether the vCPU has entered the perf core; without it the VM cannot do without this vCPU,
    /// and ends if it has not.
    ///
    /// # Errors
    /// [`VcpuError::Spawn`]; KVM's vCPU is parked.
    pub fn spawn(self, began: Option<SyncSender<Result<(), BeginError>>>) -> Result<VcpuThread, VcpuError> {
        let (id, seat) = (self.id, self.seat.clone());
        // If there is no thread it is to be had back.
        let here = Arc::new(Mutex::new(Some(self)));
        let there = here.clone();
        let spawned = std::thread::Builder::new()
            .name(format!("vcpu{id}"))
            .spawn(move || {
                let Some(mut vcpu) = take(&there) else { return };
                let (control, seat) = (vcpu.control.clone(), vcpu.seat.clone());
                // A panic here would be a bug of ours; it must end the VM and not leave the others running
                // headless.
                let run = std::panic::AssertUnwindSafe(|| vcpu.run(began.as_ref()));
                let Ok(ran) = std::panic::catch_unwind(run) else {
                    control.stop(StopReason::Failed);
                    return;
                };
                seat.park(vcpu.into_kvm());
                match (ran, began) {
                    (Ok(()), _) => {}
                    // Its seat is free when this is heard.
                    (Err(why), Some(began)) => drop(began.send(Err(why))),
                    (Err(why), None) => {
                        log::error!("vcpu{id}: {}", error_line(&why));
                        control.stop(StopReason::Failed);
                    }
                }
            });
        match spawned {
            Ok(handle) => Ok(VcpuThread { id, handle }),
            Err(e) => {
                if let Some(vcpu) = take(&here) {
                    seat.park(vcpu.into_kvm());
                }
                Err(VcpuError::Spawn(id, e))
            }
        }
    }

    fn into_kvm(self) -> KvmVcpu {
        KvmVcpu::from_parts(self.fd, self.kept)
    }

    /// Enters the perf core on this thread.
    fn begin(&mut self) -> Result<kick::KickTimer, BeginError> {
        let timer = kick::KickTimer::for_current_thread().map_err(BeginError::Timer)?;
        if let Some(pmu) = &mut self.pmu {
            pmu.attach_to_current_thread()?;
        }
        Ok(timer)
    }

    /// The loop, until the VM ends or the vCPU is to leave. An error says why it could not begin.
    fn run(&mut self, began: Option<&SyncSender<Result<(), BeginError>>>) -> Result<(), BeginError> {
        let armed = kick::Armed::new(&mut self.fd);
        let timer = self.begin()?;
        if let Some(began) = began
            && began.send(Ok(())).is_err()
        {
            // Nobody waits for it any more; its seat says that it is to leave.
            log::debug!("vcpu{}: it began too late", self.id);
        }
        self.seat.stats().go_on();
        // What another thread of this vCPU asked KVM for.
        self.fd.clear_sync_valid_reg(SyncReg::SystemRegister);
        // The stepper reads and writes registers between two entries; both ways at once would undo each
        // other.
        self.syncs_registers =
            self.pmu.is_some() && self.stepper.is_none() && self.vm.check_extension(Cap::SyncRegs);
        if self.syncs_registers {
            self.fd.set_sync_valid_reg(SyncReg::Register);
        }
        if let Some(f) = self.on_first_entry.take() {
            f();
        }
        loop {
            armed.clear();
            if self.seat.mailbox().has_mail() {
                self.read_mail();
            }
            if self.seat.is_to_leave() {
                break;
            }
            match self.control.state() {
                RunState::Running => {}
                RunState::Paused => {
                    if let Some(pmu) = &mut self.pmu {
                        pmu.pause();
                    }
                    let seat = &self.seat;
                    self.control
                        .wait_until_not_paused(|| seat.mailbox().has_mail() || seat.is_to_leave());
                    if let Some(pmu) = &mut self.pmu {
                        pmu.resume();
                    }
                    continue;
                }
                RunState::Stopped => break,
            }
            match self.before_entry(&timer) {
                Ok(true) => {}
                Ok(false) => continue,
                Err(e) => {
                    log::error!("vcpu{}: {}", self.id, error_line(&e));
                    self.control.stop(StopReason::Failed);
                    break;
                }
            }
            let next = match self.enter(&armed) {
                Next::TrapPort(byte) => self.trap_port_exit(byte),
                Next::Debug(stop) => self.debug_exit(&stop),
                next => Ok(next),
            };
            match next {
                Ok(Next::Stop(reason)) => {
                    self.control.stop(reason);
                    break;
                }
                Ok(_) => {}
                Err(e) => {
                    log::error!("vcpu{}: {}", self.id, error_line(&e));
                    self.control.stop(StopReason::Failed);
                    break;
                }
            }
        }
        if self.seat.is_to_leave() {
            self.settle(&armed);
        }
        if let Some(pmu) = &mut self.pmu {
            pmu.detach();
        }
        Ok(())
    }

    /// Leaves nothing of this thread in KVM's vCPU: an access to a port whose outcome the guest has not seen
    /// yet, and which signals it lets through.
    fn settle(&mut self, armed: &kick::Armed) {
        armed.request_exit();
        match self.fd.run() {
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

    /// Steps 2 to 4 of the loop. False: begin again instead of entering the guest.
    fn before_entry(&mut self, timer: &kick::KickTimer) -> Result<bool, EntryError> {
        let Some(pmu) = &mut self.pmu else { return Ok(true) };
        if let Some(stepper) = &mut self.stepper
            && let Some(step) = stepper.settle(&self.fd)?
        {
            pmu.feed_step(&step);
        }
        self.serve_pmu(timer)?;
        self.look_at_kernel().map_err(EntryError::Gate)?;
        self.prepare_entry()
    }

    /// Arms the debug state so that the next entry stops where it must.
    fn prepare_entry(&mut self) -> Result<bool, EntryError> {
        let (Some(pmu), Some(stepper)) = (&mut self.pmu, &mut self.stepper) else {
            // Breakpoints for RDPMC, if any; told to KVM once.
            self.debug
                .apply(&self.fd, step::debug::Want::default())
                .map_err(EntryError::Debug)?;
            return Ok(true);
        };
        let prepared = stepper.prepare(&mut self.fd, &mut self.debug, pmu.stepped_levels())?;
        let tally = stepper.tally();
        self.seat.stats().steps.set(tally.steps);
        self.seat.stats().steps_lost.set(tally.lost);
        self.seat.stats().unstepped.set(tally.unstepped);
        match prepared {
            Prepared::Enter => Ok(true),
            Prepared::Executed(step) => {
                pmu.feed_step(&step);
                Ok(false)
            }
        }
    }

    /// Handles a write to the trap port: the stepper's breakpoint, a replaced RDPMC, or the guest's own
    /// write.
    fn trap_port_exit(&mut self, byte: u8) -> Result<Next, EntryError> {
        if let (Some(stepper), Some(pmu)) = (&mut self.stepper, &mut self.pmu)
            && let Some(step) = stepper.trapped(&mut self.fd)?
        {
            pmu.feed_step(&step);
            return Ok(Next::Continue);
        }
        self.trap_port(byte).map_err(EntryError::Read)
    }

    /// A stop at a breakpoint or behind a step.
    fn debug_exit(&mut self, stop: &kvm_debug_exit_arch) -> Result<Next, EntryError> {
        if stop.exception != 3 && stop.dr6 & 0xf != 0 && self.debug.is_site(stop.pc) {
            return self.rdpmc_at_breakpoint().map_err(EntryError::Debug);
        }
        if let (Some(stepper), Some(pmu)) = (&mut self.stepper, &mut self.pmu)
            && let Some(step) = stepper.stopped(&self.fd, stop)?
        {
            pmu.feed_step(&step);
            return Ok(Next::Continue);
        }
        // The guest's own: INT3, or its own trap flag or breakpoint.
        step::debug::give_back(&self.fd, stop).map_err(EntryError::Debug)?;
        Ok(Next::Continue)
    }

    /// Overflows, what the guest wrote into its registers, and a PMI that is due.
    fn serve_pmu(&mut self, timer: &kick::KickTimer) -> Result<(), EntryError> {
        let Some(pmu) = &mut self.pmu else { return Ok(()) };
        let signalled = kick::take_overflow();
        self.overflow_signals.before_entry(&self.fd, signalled);
        self.seat.stats().overflow_signals.add(signalled.into());
        // Other exits are not to pay for what samples need.
        let mut wants_system = self.syncs_system && self.left_by_signal;
        if pmu.take_fed_overflow() || signalled {
            let mut synced = Synced::default();
            if self.synced.general {
                synced.set_general(&self.fd.sync_regs_mut().regs);
            }
            if self.synced.system {
                synced.set_system(&self.fd.sync_regs_mut().sregs);
            }
            let done = pmu.service_overflows(&self.fd, synced);
            self.seat.stats().overflows.add(u64::from(done.overflows));
            // A timer that rings early needs nothing, and the sample comes with the next signal.
            wants_system |= done.used_system;
        }
        if wants_system != self.syncs_system && self.syncs_registers {
            self.syncs_system = wants_system;
            if wants_system {
                self.fd.set_sync_valid_reg(SyncReg::SystemRegister);
            } else {
                self.fd.clear_sync_valid_reg(SyncReg::SystemRegister);
            }
        }
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
    fn serve_pmi(&mut self, timer: &kick::KickTimer) -> Result<(), EntryError> {
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
                if let Some(wait) = self.recheck.waits(Instant::now()) {
                    timer.kick_in(wait);
                }
            } else {
                self.seat.stats().pmi_withdrawn.set(pmu.pmi_counts().withdrawn);
                self.recheck.over();
            }
            return Ok(());
        };
        self.pmi_waits = false;
        self.recheck.over();
        if let Some(wait) = self.interrupt_before_read().map_err(EntryError::Read)? {
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

    /// Steps 5 and 6: KVM_RUN and its exit.
    fn enter(&mut self, armed: &kick::Armed) -> Next {
        if let Some(pmu) = &self.pmu {
            pmu.guest_enter();
        }
        let exit = self.fd.run();
        if let Some(pmu) = &self.pmu {
            pmu.guest_exit();
        }
        if let Some(stepper) = &mut self.stepper {
            stepper.after_run();
        }
        self.synced = Fresh {
            general: self.syncs_registers,
            system: self.syncs_system,
        };
        self.left_by_signal =
            matches!(&exit, Ok(VcpuExit::Intr)) || matches!(&exit, Err(e) if e.errno() == libc::EINTR);
        self.overflow_signals.after_exit(self.left_by_signal);
        if !self.left_by_signal {
            self.just_read = None;
        }
        let stats = self.seat.stats();
        stats.exits.inc();
        match exit {
            Ok(VcpuExit::X86Rdmsr(msr)) => {
                stats.rdmsr.inc();
                let others = match &self.debug_control {
                    Some(control) if msr.index == IA32_DEBUGCTL => control.read(),
                    _ => 0,
                };
                match self.pmu.as_mut().and_then(|pmu| pmu.read_msr(msr.index)) {
                    Some(value) => {
                        self.completed = Completed::AtCpl0;
                        *msr.data = value | others;
                    }
                    None => {
                        stats.gp_injected.inc();
                        *msr.error = 1;
                    }
                }
                Next::Continue
            }
            Ok(VcpuExit::X86Wrmsr(msr)) => {
                stats.wrmsr.inc();
                if let Some(stepper) = &mut self.stepper {
                    stepper.registers_changed();
                }
                if let Some(rdpmc) = &mut self.rdpmc {
                    rdpmc.wrote();
                }
                let (index, value) = (msr.index, msr.data);
                let (pmu_part, control) = match &mut self.debug_control {
                    Some(control) if index == IA32_DEBUGCTL => (control.pmu_part(value), Some(control)),
                    _ => (Some(value), None),
                };
                let pmu = self.pmu.as_mut();
                if !pmu
                    .zip(pmu_part)
                    .is_some_and(|(pmu, part)| pmu.write_msr(index, part))
                {
                    stats.gp_injected.inc();
                    *msr.error = 1;
                } else if let Some(control) = control
                    && let Err(e) = control.write(&self.fd, value)
                {
                    return self.fail(&format!("KVM_SET_MSRS(IA32_DEBUGCTL): {e}"));
                } else {
                    self.completed = Completed::AtCpl0;
                }
                Next::Continue
            }
            Ok(VcpuExit::IoOut(TRAP_PORT, &[byte])) if self.pmu.is_some() => Next::TrapPort(byte),
            Ok(VcpuExit::IoOut(port, data)) => {
                stats.io_out.inc();
                self.completed = Completed::AtAnyCpl;
                count(&mut self.pmu, ParavirtualEvent::IoExits);
                after_io(self.bus.io_out_string(port, armed.io_width(), data))
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                stats.io_in.inc();
                self.completed = Completed::AtAnyCpl;
                count(&mut self.pmu, ParavirtualEvent::IoExits);
                self.bus.io_in_string(port, armed.io_width(), data);
                Next::Continue
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                stats.mmio.inc();
                self.completed = Completed::AtAnyCpl;
                count(&mut self.pmu, ParavirtualEvent::MmioExits);
                self.bus.mmio_read(address, data);
                Next::Continue
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                stats.mmio.inc();
                self.completed = Completed::AtAnyCpl;
                count(&mut self.pmu, ParavirtualEvent::MmioExits);
                self.bus.mmio_write(address, data);
                Next::Continue
            }
            Ok(VcpuExit::Debug(stop)) => {
                stats.debug.inc();
                Next::Debug(stop)
            }
            Ok(VcpuExit::Intr) => Next::Continue,
            Ok(VcpuExit::Hlt) => {
                stats.hlt.inc();
                Next::Continue
            }
            Ok(VcpuExit::Shutdown) => {
                self.report_triple_fault();
                Next::Stop(StopReason::TripleFault)
            }
            Ok(VcpuExit::SystemEvent(kind, _)) => Next::Stop(system_event(kind)),
            Ok(exit) => {
                let what = format!("{exit:?}");
                self.fail(&what)
            }
            Err(e) if e.errno() == libc::EINTR => {
                if !kick::overflow_waits() {
                    stats.interrupted.inc();
                }
                Next::Continue
            }
            Err(e) if e.errno() == libc::EAGAIN => Next::Continue,
            Err(e) => {
                let what = format!("KVM_RUN: {e}");
                self.fail(&what)
            }
        }
    }

    /// Says that the guest shut this vCPU down, and where it was, as far as KVM still knows.
    fn report_triple_fault(&self) {
        let place = match (self.fd.get_regs(), self.fd.get_sregs()) {
            // With AMD-V the state is lost with the shutdown, and KVM resets the vCPU.
            (Ok(regs), Ok(sregs)) if sregs.cr0 & CR0_PE != 0 => format!(
                " at rip {:#x}, rsp {:#x}, cr2 {:#x}, cr3 {:#x}",
                regs.rip, regs.rsp, sregs.cr2, sregs.cr3
            ),
            _ => String::new(),
        };
        log::error!("vcpu{}: the guest shut it down by a triple fault{place}", self.id);
    }

    /// Reports an exit the VMM cannot handle, with what is needed to understand it.
    fn fail(&self, what: &str) -> Next {
        log::error!("vcpu{}: cannot go on: {what}", self.id);
        if let Ok(regs) = self.fd.get_regs() {
            log::error!(
                "vcpu{}: rip {:#x} rsp {:#x} rflags {:#x} rax {:#x} rcx {:#x}",
                self.id,
                regs.rip,
                regs.rsp,
                regs.rflags,
                regs.rax,
                regs.rcx
            );
        }
        Next::Stop(StopReason::Failed)
    }
}

/// The vCPU that waits for a thread to run it.
fn take(from: &Mutex<Option<Vcpu>>) -> Option<Vcpu> {
    from.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Counts an exit for the guest's paravirtual events.
fn count(pmu: &mut Option<VcpuPmu>, event: ParavirtualEvent) {
    if let Some(pmu) = pmu {
        pmu.count_event(event);
    }
}

fn after_io(outcome: BusOutcome) -> Next {
    match outcome {
        BusOutcome::Continue => Next::Continue,
        BusOutcome::Reset => Next::Stop(StopReason::Reset),
        BusOutcome::PowerOff => Next::Stop(StopReason::PowerOff),
        BusOutcome::Exit(status) => Next::Stop(StopReason::DebugExit(status)),
    }
}

fn system_event(kind: u32) -> StopReason {
    match kind {
        kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN => StopReason::PowerOff,
        kvm_bindings::KVM_SYSTEM_EVENT_RESET => StopReason::Reset,
        _ => StopReason::Failed,
    }
}

/// The running vCPU threads of a VM, to be kicked from anywhere.
#[derive(Clone, Debug, Default)]
pub struct Kicker(Arc<Mutex<Vec<VcpuThread>>>);

impl Kicker {
    /// Adds a thread, instead of one of the same vCPU that has ended.
    pub fn add(&self, thread: VcpuThread) {
        let mut threads = self.threads();
        threads.retain(|other| other.id != thread.id);
        threads.push(thread);
    }

    /// Makes every vCPU leave KVM_RUN and look at what is asked of it.
    pub fn kick(&self) {
        self.threads().iter().for_each(VcpuThread::kick);
    }

    /// Waits for the end of all threads, which have been told to end.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *self.threads());
        threads.into_iter().for_each(VcpuThread::join);
    }

    /// Whether all threads were joined.
    pub fn is_empty(&self) -> bool {
        self.threads().is_empty()
    }

    fn threads(&self) -> std::sync::MutexGuard<'_, Vec<VcpuThread>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running vCPU thread.
#[derive(Debug)]
pub struct VcpuThread {
    id: u8,
    handle: JoinHandle<()>,
}

impl VcpuThread {
    /// Makes the vCPU leave KVM_RUN and look at its run state.
    pub fn kick(&self) {
        if !self.handle.is_finished()
            && let Err(e) = self.handle.kill(kick::kick_signal())
        {
            log::debug!("vcpu{}: kick: {e}", self.id);
        }
    }

    /// Waits for the end of the thread, kicking it until it has gone.
    pub fn join(self) {
        while !self.handle.is_finished() {
            self.kick();
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.handle.join().is_err() {
            log::error!("vcpu{}: its thread panicked", self.id);
        }
    }
}
