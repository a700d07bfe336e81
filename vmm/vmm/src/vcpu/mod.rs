//! vCPU threads and the run loop around KVM_RUN.
//!
//! The order of the steps in the loop makes the counts correct:
//!
//! 1. Clear `immediate_exit`, then check the conditions that signals announced (see [`kick`]).
//! 2. Account for overflows, which may make a PMI due.
//! 3. Reconcile: turn the guest's PMU register writes into perf-core calls.
//! 4. Deliver a due PMI through LVTPC, and prepare a single step if a counter needs one.
//! 5. Start the guest clock, call KVM_RUN, stop the guest clock.
//! 6. Handle the exit.

pub mod affinity;
mod burst;
pub mod control;
pub mod debugctl;
mod debugged;
pub mod debugger;
mod exit;
pub mod exit_times;
pub mod factory;
pub mod failure;
pub mod internal_error;
pub mod kick;
pub mod kicker;
pub mod kvm_vcpu;
pub mod pmi;
mod rdpmc;
mod rdpmc_exit;
mod registers;
pub mod registry;
pub mod request_queue;
mod reset_barrier;
pub mod running;
pub(crate) mod saved;
pub mod slot;
pub mod stats;
pub mod step;
mod thread;

use std::time::{Duration, Instant};

use vpmu::PmiReadiness;

use crate::pmu::guest_view::VcpuPmuStatus;
use control::{VmRunState, VmStopReason};
use factory::VcpuFactory;
use failure::{RestartError, VcpuFailure, VcpuStartError};
use pmi::PmiDelivery;
use reset_barrier::ResetWait;
use running::{LoopAction, Running, VcpuStartReporter};
use saved::SavePhase;
use step::VcpuStepAction;

/// EFER.SVME: the guest has enabled AMD-V.
const EFER_SVME: u64 = 1 << 12;

/// Reason why the run loop has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoopExit {
    /// The vCPU thread must end.
    ThreadEnd,
    /// The machine was reset, so the vCPU must be rebuilt.
    MachineReset,
}

/// Action of the run loop before an entry into the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryAction {
    /// Enter the guest with KVM_RUN.
    Enter,
    /// Start the next iteration of the run loop, because an instruction was emulated.
    Repeat,
}

impl Running {
    /// Attaches the vCPU to the perf core on the current thread, and creates the thread's kick
    /// timer.
    fn begin(&mut self) -> Result<kick::KickTimer, VcpuStartError> {
        let timer = kick::KickTimer::for_current_thread().map_err(VcpuStartError::Timer)?;
        if let Some(pmu) = &mut self.pmu
            && !pmu.is_attached()
        {
            pmu.attach_to_current_thread()?;
        }
        Ok(timer)
    }

    /// Runs the vCPU until the VM ends, the vCPU is removed, or the machine is reset. Reports
    /// through `begins` when the vCPU is initialized. Returns an error if initialization fails.
    fn run(&mut self, begins: &mut Option<VcpuStartReporter>) -> Result<LoopExit, VcpuStartError> {
        let timer = self.begin()?;
        if let Some(begins) = begins.take() {
            begins.done(self.id);
        }
        self.slot.stats().rebase();
        if std::mem::take(&mut self.is_restored) {
            self.read_run_page();
        }
        loop {
            match self.turn(&timer) {
                Ok(LoopAction::Repeat) => {}
                Ok(LoopAction::Leave) => break,
                Ok(LoopAction::Reset) => {
                    if self.wait_for_restart() {
                        return Ok(LoopExit::MachineReset);
                    }
                }
                Ok(LoopAction::Stop(reason)) => self.control.handle_guest_stop(reason),
                Err(failure) => {
                    self.report(&failure);
                    self.control.stop(VmStopReason::Failed);
                    break;
                }
            }
        }
        if self.slot.is_stop_requested() {
            self.settle();
        }
        self.stop_counting();
        if let Some(pmu) = &mut self.pmu {
            pmu.detach();
        }
        Ok(LoopExit::ThreadEnd)
    }

    /// Schedules out the events of the vCPU and handles all overflows up to this point, including
    /// those whose signals have not arrived.
    ///
    /// On a busy host, a timer may be late. The timers stop with the events, and the guest may be
    /// entered much later or never again. Without this call, a recording would lack the last
    /// periods and the guest would not receive its PMI.
    fn stop_counting(&mut self) {
        self.end_burst();
        let Some(pmu) = &mut self.pmu else { return };
        pmu.pause();
        kick::take_overflow();
        pmu.take_count_overflow();
        let synced = self.registers.synced(&mut self.fd);
        pmu.service_overflows(&self.fd, synced);
        self.slot.stats().overflows.set(pmu.overflow_count());
    }

    /// Closes the guest's counters and waits outside the guest until the machine is reset. Returns
    /// `false` if the reset was cancelled.
    fn wait_for_restart(&mut self) -> bool {
        self.settle();
        if let Some(pmu) = &mut self.pmu {
            pmu.reset();
        }
        self.stop_counting();
        loop {
            let slot = &self.slot;
            let mail = || slot.request_queue().has_requests() || slot.is_stop_requested();
            match self.control.wait_for_restart(self.id, mail) {
                ResetWait::Restart => return true,
                ResetWait::RequestPending if self.slot.is_stop_requested() => {
                    self.control.leave_reset_barrier(self.id);
                    break;
                }
                ResetWait::RequestPending => self.handle_requests(),
                ResetWait::Over => break,
            }
        }
        if let Some(pmu) = &mut self.pmu {
            pmu.resume();
        }
        false
    }

    /// Constructs the vCPU anew in its initial state. The vCPU keeps its thread and stays attached
    /// to the perf core. Then waits until all other vCPUs are constructed, too.
    fn rebuild(mut self, factory: &VcpuFactory) -> Result<Self, RestartError> {
        let (pmu, slot, control) = (self.pmu.take(), self.slot.clone(), self.control.clone());
        let kvm = self.into_kvm();
        factory.restore(&kvm)?;
        let vcpu = factory.make_with(kvm, &slot, pmu).map_err(|(_, e)| e)?;
        let mut fresh = Running::new(vcpu);
        control.mark_restored_and_wait(fresh.id);
        if let Some(pmu) = &mut fresh.pmu {
            pmu.resume();
        }
        Ok(fresh)
    }

    /// Executes one iteration of the run loop.
    fn turn(&mut self, timer: &kick::KickTimer) -> Result<LoopAction, VcpuFailure> {
        self.fd.clear_exit_request();
        if self.slot.request_queue().has_requests() {
            self.handle_requests();
        }
        if self.slot.is_stop_requested() {
            return Ok(LoopAction::Leave);
        }
        match self.control.state() {
            VmRunState::Running => {}
            VmRunState::Held if self.may_run() => {}
            VmRunState::Paused | VmRunState::Held => {
                if self.are_registers_requested() && self.has_open_exit() {
                    return self.complete_open_exit();
                }
                if self.save_phase == SavePhase::Settling {
                    if self.has_open_exit() {
                        return self.complete_exit_for_snapshot();
                    }
                    self.finish_settling()?;
                }
                self.pause()?;
                return Ok(LoopAction::Repeat);
            }
            VmRunState::Stopped => return Ok(LoopAction::Leave),
            VmRunState::Resetting => return Ok(LoopAction::Reset),
        }
        if self.before_entry(timer)? == EntryAction::Repeat {
            return Ok(LoopAction::Repeat);
        }
        if let Some(f) = self.on_first_entry.take() {
            f();
        }
        let next = self.enter();
        self.serve(next)
    }

    /// Blocks the vCPU thread until the pause ends or the debugger resumes this vCPU. Handles
    /// requests meanwhile. The vCPU's events are scheduled out, so their time does not advance.
    fn pause(&mut self) -> Result<(), VcpuFailure> {
        self.stop_counting();
        self.exit_clock.discard_exit();
        let waited = self.wait_in_pause();
        self.notify_guest_of_pause();
        if let Some(pmu) = &mut self.pmu {
            pmu.resume();
        }
        waited
    }

    fn wait_in_pause(&mut self) -> Result<(), VcpuFailure> {
        loop {
            match self.control.state() {
                _ if self.slot.is_stop_requested() => return Ok(()),
                VmRunState::Held if self.may_run() => break,
                VmRunState::Paused | VmRunState::Held => {}
                VmRunState::Running | VmRunState::Stopped | VmRunState::Resetting => break,
            }
            if self.save_phase == SavePhase::Settling {
                return Ok(());
            }
            if self.are_registers_requested() {
                if self.has_open_exit() {
                    return Ok(());
                }
                self.publish_registers()?;
            }
            let (slot, control) = (&self.slot, &self.control);
            control.wait_until_not_paused(|| {
                slot.request_queue().has_requests()
                    || slot.is_stop_requested()
                    || self.are_registers_requested()
                    || control.state() == VmRunState::Held && self.may_run()
            });
            if self.slot.request_queue().has_requests() {
                self.handle_requests();
            }
        }
        self.apply_debugger_registers()
    }

    /// Tells a guest with a paravirtual clock that it was paused, so that its watchdogs do not
    /// report a lockup.
    fn notify_guest_of_pause(&self) {
        match self.fd.kvmclock_ctrl() {
            // EINVAL means that the guest does not use the clock of this vCPU.
            Ok(()) => {}
            Err(e) if e.errno() == libc::EINVAL => {}
            Err(e) => log::debug!("vcpu{}: KVM_KVMCLOCK_CTRL: {e}", self.id),
        }
    }

    /// Prepares the KVM vCPU for use by another thread: makes KVM complete a port access, and
    /// returns overflow signals to handled mode.
    fn settle(&mut self) {
        self.fd.request_exit();
        match self.fd.run().exit {
            Err(e) if e.errno() == libc::EINTR => {}
            Ok(exit) => log::debug!("vcpu{}: it leaves with {exit:?}", self.id),
            Err(e) => log::debug!("vcpu{}: it leaves with KVM_RUN: {e}", self.id),
        }
        self.overflow_signals.restore_handled_mode(&self.fd);
    }

    /// Handles the pending requests to this vCPU thread.
    fn handle_requests(&mut self) {
        let mail = self.slot.request_queue().take();
        if mail.settle {
            self.save_phase = SavePhase::Settling;
        }
        if let Some(layout) = mail.save {
            self.answer_save(&layout);
        }
        let Some(pmu) = &mut self.pmu else { return };
        if let Some(filter) = mail.filter {
            pmu.set_filter(filter);
        }
        if mail.find_kernel {
            pmu.find_kernel(&self.fd);
        }
        if let Some(generation) = mail.view {
            let (uncounted_ns, places_lost) = pmu.uncounted().unzip();
            let stats = self.slot.stats();
            let view = VcpuPmuStatus {
                vcpu: self.id.into(),
                uncounted_ns,
                places_lost,
                pmis: pmu
                    .has_pmis()
                    .then(|| stats.pmi_nmi.get() + stats.pmi_fixed.get()),
                counters: pmu.view(&self.fd),
                counted_by_kvm: pmu.uses_kvm_vpmu(),
            };
            self.slot.request_queue().answer(generation, view);
        }
    }

    /// Prepares an entry into the guest (steps 2 to 4 of the run loop): accounts for overflows,
    /// applies the guest's writes to PMU registers, delivers a due PMI, and prepares a single step.
    fn before_entry(&mut self, timer: &kick::KickTimer) -> Result<EntryAction, VcpuFailure> {
        if self.pmu.is_none() {
            return self.prepare_entry();
        }
        self.settle_step()?;
        self.collect_branches()?;
        self.serve_pmu(timer)?;
        self.begin_burst_if_due(timer);
        self.check_guest_kernel().map_err(VcpuFailure::Gate)?;
        self.prepare_entry()
    }

    /// Programs the debug registers for the next entry.
    fn prepare_entry(&mut self) -> Result<EntryAction, VcpuFailure> {
        let (Some(pmu), Some(stepper)) = (&mut self.pmu, &mut self.stepper) else {
            // Set the breakpoints of RDPMC emulation and of a debugger. KVM is called only if they
            // changed.
            let want = self.debugger_request();
            self.debug.apply(&self.fd, want).map_err(VcpuFailure::Debug)?;
            return Ok(EntryAction::Enter);
        };
        let levels = pmu.stepped_levels();
        let prepared = stepper.prepare(&mut self.fd, &mut self.debug, levels, &|| pmu.room_at_cpl0())?;
        let tally = stepper.tally();
        self.slot.stats().steps.set(tally.steps);
        self.slot.stats().runs.set(tally.runs);
        self.slot
            .stats()
            .instructions_in_runs
            .set(tally.instructions_in_runs);
        self.slot.stats().steps_lost.set(tally.lost);
        self.slot.stats().unstepped.set(tally.unstepped);
        if self.retire_burst_stepper() {
            // The next iteration finds no stepper and sets the breakpoints of RDPMC and of a
            // debugger.
            return Ok(EntryAction::Repeat);
        }
        let Some(pmu) = &mut self.pmu else {
            return Ok(EntryAction::Enter);
        };
        match prepared {
            VcpuStepAction::Enter => Ok(EntryAction::Enter),
            VcpuStepAction::Executed(step) => {
                pmu.feed_step(&step);
                Ok(EntryAction::Repeat)
            }
        }
    }

    /// Handles overflows, writes of the guest to PMU registers, and a due PMI.
    fn serve_pmu(&mut self, timer: &kick::KickTimer) -> Result<(), VcpuFailure> {
        let Some(pmu) = &mut self.pmu else { return Ok(()) };
        let signalled = kick::take_overflow();
        self.overflow_signals.before_entry(&self.fd, signalled);
        self.slot.stats().overflow_signals.add(signalled.into());
        let mut wants_system = self.registers.needs_system_sync();
        let signalled = self.bursts.defer_signal(signalled);
        if pmu.take_count_overflow() || signalled {
            let synced = self.registers.synced(&mut self.fd);
            // If a timer signal arrives early, no sample is due yet. The sample is taken at the
            // next signal.
            wants_system |= pmu.service_overflows(&self.fd, synced);
            self.slot.stats().overflows.set(pmu.overflow_count());
        }
        self.registers.set_system_sync(&mut self.fd, wants_system);
        if pmu.registers().needs_svme() {
            let svme = self.fd.get_sregs().is_ok_and(|sregs| sregs.efer & EFER_SVME != 0);
            pmu.registers().set_svme(svme);
        }
        pmu.reconcile();
        self.count_completed_instruction();
        let Some(pmu) = &mut self.pmu else { return Ok(()) };
        if let Some(wait) = pmu.retry_in() {
            timer.kick_in(wait);
        }
        if pmu.needs_handler_state() {
            pmu.observe_handler(self.lvtpc.is_in_service(&self.fd)?);
        }
        if !pmu.pmi_pending() {
            if std::mem::take(&mut self.pmi_waits) {
                self.slot.stats().pmi_withdrawn.set(pmu.pmi_counts().withdrawn);
                self.recheck.reset();
            }
            return Ok(());
        }
        self.serve_pmi(timer)
    }

    /// Delivers a due PMI, unless it must wait.
    fn serve_pmi(&mut self, timer: &kick::KickTimer) -> Result<(), VcpuFailure> {
        if self.bursts.has_active() && self.wait_for_branch_records(timer)? {
            self.pmi_waits = true;
            return Ok(());
        }
        let Some(pmu) = &mut self.pmu else { return Ok(()) };
        // A counter read may have found an overflow whose signal has not arrived yet.
        self.slot.stats().overflows.set(pmu.overflow_count());
        match pmu.pmi_ready() {
            PmiReadiness::No => {
                self.slot.stats().pmi_withdrawn.set(pmu.pmi_counts().withdrawn);
                self.pmi_waits = false;
                return Ok(());
            }
            PmiReadiness::Now => {}
            PmiReadiness::NotBefore { time_ns } => {
                let counts = pmu.pmi_counts();
                self.slot.stats().pmi_throttled.set(counts.throttled);
                self.slot.stats().pmi_held.set(counts.held);
                self.pmi_waits = true;
                self.recheck.reset();
                timer.kick_in(Duration::from_nanos(pmu.nanoseconds_until(time_ns)));
                return Ok(());
            }
        }
        let Some(open) = self.lvtpc.check(&mut self.fd)? else {
            // Unmasking LVTPC causes no exit, so LVTPC is rechecked at every exit and periodically
            // by a timer.
            self.pmi_waits = pmu.defer_pmi();
            if self.pmi_waits {
                self.slot.stats().pmi_masked_waits.inc();
                timer.kick_in(self.recheck.waits(Instant::now()));
            } else {
                self.slot.stats().pmi_withdrawn.set(pmu.pmi_counts().withdrawn);
                self.recheck.reset();
            }
            return Ok(());
        };
        self.pmi_waits = self.wait_for_branch_records(timer)?;
        self.recheck.reset();
        if self.pmi_waits {
            return Ok(());
        }
        if let Some(wait) = self.interrupt_before_read().map_err(VcpuFailure::Read)? {
            timer.kick_in(wait);
            return Ok(());
        }
        match self.lvtpc.deliver(open, &self.vm, &self.fd)? {
            PmiDelivery::Nmi => {
                let reads = self.sent_nmi.now();
                self.registers.set_nmi_sync(&mut self.fd, reads);
                self.slot.stats().pmi_nmi.inc();
            }
            PmiDelivery::Fixed => self.slot.stats().pmi_fixed.inc(),
            PmiDelivery::Dropped => self.slot.stats().pmi_dropped.inc(),
        }
        if let Some(pmu) = &mut self.pmu {
            pmu.pmi_delivered();
            self.slot.stats().pmi_held_ns.set(pmu.pmi_counts().held_ns);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use perf_core::pmu::VcpuId;
    use perf_core::pmu::sim::SimPmu;
    use perf_core::record::{DecodedRecord, RecordFormat};
    use perf_core::ring::RingReader;
    use perf_core::{
        Attr, EventHandle, EventOpenTarget, EventType, OpenFlags, SampleType, Session, SessionRole,
    };

    use crate::testing;
    use crate::vm::RunningVm;

    /// A VM whose vCPU 0 is sampled by simulated events that never send a signal, as if their
    /// timers were late.
    struct SampledVm {
        vm: RunningVm,
        pmu: Arc<SimPmu>,
        event: EventHandle,
        reader: RingReader,
        _session: Session,
    }

    const PERIOD: u64 = 100;

    fn sampling() -> Attr {
        Attr {
            sample_type: SampleType::PERIOD,
            ..Attr::sampling(EventType::SIM, 1, PERIOD)
        }
    }

    impl SampledVm {
        /// Starts the VM and samples vCPU 0. Returns `None` without KVM.
        fn start() -> Option<Self> {
            let vm = testing::halted_vm()?;
            // The call returns only after the vCPUs have attached to the perf core.
            let _ = testing::control_target(&vm);
            let core = vm.pmu().core();
            let pmu = Arc::new(SimPmu::with_slots(1));
            core.register(pmu.clone());
            let session = core.session(0, SessionRole::Admin);
            let target = EventOpenTarget::Vcpu(VcpuId(0));
            let event = core
                .open(&session, sampling(), target, None, OpenFlags::default())
                .unwrap();
            let reader = RingReader::of(event.map(1, true).unwrap());
            Some(Self {
                vm,
                pmu,
                event,
                reader,
                _session: session,
            })
        }

        /// Pauses the VM, and waits until its vCPU threads are blocked.
        fn pause(&self) {
            let control = self.vm.control();
            assert!(control.set_paused(true));
            self.vm.kicker().kick();
            while control.parked() < 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }

        /// Returns the periods of the samples taken since the last call. Panics if records were
        /// lost.
        fn periods(&mut self) -> Vec<u64> {
            let mut periods = Vec::new();
            while let Some(raw) = self.reader.next_record().unwrap() {
                match DecodedRecord::decode(raw, RecordFormat::from(&sampling())).unwrap() {
                    DecodedRecord::Sample(sample) => periods.push(sample.period),
                    other => panic!("{other:?}"),
                }
            }
            periods
        }
    }

    /// The samples of a VM are complete when it is paused, even if signals for elapsed periods have
    /// not arrived.
    #[test]
    fn periods_before_a_pause_are_sampled_at_the_pause() {
        let Some(mut sampled) = SampledVm::start() else {
            return;
        };
        sampled.pmu.advance(VcpuId(0), |_| 3 * PERIOD + 50);
        sampled.pause();
        assert_eq!(sampled.periods(), [3 * PERIOD]);
        assert_eq!(sampled.event.count().unwrap(), 3 * PERIOD + 50);
        // The remainder of a period continues after the pause.
        assert!(sampled.vm.control().set_paused(false));
        while sampled.vm.control().parked() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        while sampled.pmu.active_events(VcpuId(0)) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        sampled.pmu.advance(VcpuId(0), |_| 50);
        sampled.pause();
        assert_eq!(sampled.periods(), [PERIOD]);
    }

    /// The samples of a VM are complete when it has ended.
    #[test]
    fn periods_before_the_end_are_sampled_at_the_end() {
        let Some(mut sampled) = SampledVm::start() else {
            return;
        };
        sampled.pmu.advance(VcpuId(0), |_| 3 * PERIOD + 50);
        sampled.vm.stop_and_join();
        assert_eq!(sampled.periods(), [3 * PERIOD]);
        assert_eq!(sampled.event.lost_records(), 0);
    }
}
