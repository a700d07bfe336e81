//! A vCPU with all that belongs to it: before its thread runs it ([`Vcpu`]), and on that thread
//! (`Running`). What it does there is in the modules beside: the loop in `mod.rs`, exits in `exit.rs`,
//! RDPMC in `rdpmc_exit.rs`, a debugger's part in `debugged.rs`.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Sender, SyncSender};

use kvm_bindings::kvm_debug_exit_arch;

use super::control::{RunControl, StopReason};
use super::debugctl::DebugControl;
use super::exit_times::ExitClock;
use super::failure::{BeginError, VcpuFailure};
use super::kick;
use super::kvm_vcpu::{Kept, KvmVcpu};
use super::pmi::{Lvtpc, Recheck};
use super::rdpmc::{LastRead, Rdpmc, SentNmi};
use super::registers::RegisterCache;
use super::seat::Seat;
use super::step::Stepper;
use super::step::debug::GuestDebug;
use crate::devices::Bus;
use crate::kvm::armed::ArmedVcpu;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::kvm::vm_fd::VmFd;
use crate::pmu::VcpuPmu;

/// What a turn of the loop comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// There is another one.
    Again,
    /// The thread ends: the VM has ended, or the vCPU leaves it.
    Leave,
    /// The guest has reset the machine.
    Reset,
    /// The VM ends, or starts again where a reset makes it.
    Stop(StopReason),
}

/// Whether the instruction that left the guest completes with the next entry, without having retired in guest
/// mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Completed {
    #[default]
    None,
    AtCpl0,
    AtAnyCpl,
}

/// What the loop does after an exit.
pub(super) enum Next {
    /// Enter the guest again.
    Continue,
    /// The guest wrote this to the port that stands for RDPMC.
    TrapPort(u8),
    /// The guest stopped at a breakpoint or behind a single step.
    Debug(kvm_debug_exit_arch),
    /// The guest wrote this to IA32_DEBUGCTL, and the PMU took its part.
    DebugControl(u64),
    /// KVM's emulator lacks an instruction.
    EmulationFailed,
    /// End the VM.
    Stop(StopReason),
    /// End the VM: the vCPU cannot go on.
    Fail(VcpuFailure),
}

/// Who is told that a vCPU has begun: that it is in the perf core, or why it is not.
#[derive(Debug)]
pub enum Begins {
    /// The VM does not begin without it, and ends if it cannot begin. Who waits hears of it when the sender
    /// goes, which never sends.
    WithVm(Sender<Infallible>),
    /// It joins a VM that runs, which goes on without it.
    Later(SyncSender<Result<(), BeginError>>),
}

impl Begins {
    /// It has begun.
    pub(super) fn done(self, vcpu: u8) {
        if let Self::Later(began) = self
            && began.send(Ok(())).is_err()
        {
            // Nobody waits for it any more; its seat says that it is to leave.
            log::debug!("vcpu{vcpu}: it began too late");
        }
    }
}

/// A vCPU that is configured and has yet to run.
pub struct Vcpu {
    pub(super) fd: VcpuFd,
    /// What else there is of KVM's vCPU, to be parked with it.
    pub(super) kept: Kept,
    pub(super) vm: Arc<VmFd>,
    pub(super) bus: Arc<Bus>,
    pub(super) pmu: Option<VcpuPmu>,
    pub(super) lvtpc: Lvtpc,
    pub(super) seat: Arc<Seat>,
    pub(super) control: Arc<RunControl>,
    pub(super) debug: GuestDebug,
    pub(super) debug_control: Option<DebugControl>,
    pub(super) rdpmc: Option<Rdpmc>,
    pub(super) stepper: Option<Stepper>,
    pub(super) on_first_entry: Option<Box<dyn FnOnce() + Send>>,
    /// The CPU of the host to stay on.
    pub(super) pin: Option<usize>,
}

impl Vcpu {
    /// Ready to enter the guest. Without `pmu` nothing counts it.
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

    pub(super) fn into_kvm(self) -> KvmVcpu {
        KvmVcpu::from_parts(self.fd, self.kept)
    }
}

/// A vCPU on the thread that runs it.
pub(super) struct Running {
    pub(super) id: u8,
    pub(super) fd: ArmedVcpu,
    pub(super) kept: Kept,
    pub(super) vm: Arc<VmFd>,
    pub(super) bus: Arc<Bus>,
    pub(super) pmu: Option<VcpuPmu>,
    pub(super) lvtpc: Lvtpc,
    /// When to look at LVTPC again while a PMI waits behind its mask.
    pub(super) recheck: Recheck,
    /// A PMI waited at the last entry, behind a mask or for the rate limit.
    pub(super) pmi_waits: bool,
    /// Where requests to this thread come from, and where what it counts goes.
    pub(super) seat: Arc<Seat>,
    pub(super) control: Arc<RunControl>,
    pub(super) debug: GuestDebug,
    /// The rest of IA32_DEBUGCTL, where it is trapped.
    pub(super) debug_control: Option<DebugControl>,
    /// `None`: nothing stands for RDPMC.
    pub(super) rdpmc: Option<Rdpmc>,
    /// With the exact backing.
    pub(super) stepper: Option<Stepper>,
    pub(super) last_read: LastRead,
    pub(super) sent_nmi: SentNmi,
    pub(super) registers: RegisterCache,
    /// What the last exit's instruction is to the guest's counters.
    pub(super) completed: Completed,
    /// KVM has yet to complete the last exit.
    pub(super) exit_is_open: bool,
    /// Which of a debugger's breakpoints `debug` has.
    pub(super) debugger_version: u64,
    pub(super) overflow_signals: kick::OverflowSignals,
    /// How long exits take, while somebody watches.
    pub(super) exit_clock: ExitClock,
    /// Called once, right before the first KVM_RUN.
    pub(super) on_first_entry: Option<Box<dyn FnOnce() + Send>>,
}

impl Running {
    /// On the current thread.
    pub(super) fn new(vcpu: Vcpu) -> Self {
        let mut fd = ArmedVcpu::new(vcpu.fd);
        // The stepper reads and writes registers between two entries; both ways at once would undo each
        // other.
        let syncs = vcpu.pmu.is_some() && vcpu.stepper.is_none() && vcpu.vm.syncs_registers();
        let exit_clock = ExitClock::new(vcpu.seat.exits().clone());
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
            sent_nmi: SentNmi::default(),
            completed: Completed::None,
            exit_is_open: false,
            debugger_version: 0,
            overflow_signals: kick::OverflowSignals::default(),
            exit_clock,
            on_first_entry: vcpu.on_first_entry,
        }
    }

    pub(super) fn into_kvm(self) -> KvmVcpu {
        KvmVcpu::from_parts(self.fd.disarm(), self.kept)
    }
}
