//! A vCPU before its thread runs it ([`Vcpu`]) and on its thread (`Running`).
//!
//! The methods of `Running` are in the sibling modules: the run loop in `mod.rs`, exits in
//! `exit.rs`, RDPMC in `rdpmc_exit.rs`, debugger support in `debugged.rs`.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender};

use kvm_bindings::kvm_debug_exit_arch;
use vm_memory::GuestMemoryMmap;

use super::burst::Bursts;
use super::control::{VmRunControl, VmStopReason};
use super::debugctl::DebugControl;
use super::exit_times::ExitClock;
use super::factory::StepperConfig;
use super::failure::{VcpuFailure, VcpuStartError};
use super::kick;
use super::kvm_vcpu::{KvmVcpu, KvmVcpuParts};
use super::pmi::{Lvtpc, LvtpcBackoff};
use super::rdpmc::{LastRdpmc, PendingNmi, RdpmcEmulator};
use super::registers::RegisterCache;
use super::saved::SavePhase;
use super::slot::VcpuSlot;
use super::step::Stepper;
use super::step::debug::GuestDebug;
use crate::devices::DeviceBus;
use crate::kvm::kickable_vcpu::KickableVcpu;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::kvm::vm_fd::VmFd;
use crate::pmu::VcpuPmu;

/// Result of one iteration of the run loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LoopAction {
    /// Start the next iteration of the run loop.
    Repeat,
    /// End the vCPU thread, because the VM has stopped or the vCPU is removed.
    Leave,
    /// The guest resets the machine. Wait for the reset, and construct the vCPU anew.
    Reset,
    /// Stop the VM, or restart it after a reset.
    Stop(VmStopReason),
}

/// Rule for counting the instruction that caused the last exit. The instruction completes at the
/// next entry, but the processor does not retire it in guest mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ExitCompletion {
    #[default]
    None,
    AtCpl0,
    AtAnyCpl,
}

/// Action of the run loop after an exit.
pub(super) enum ExitAction {
    /// Enter the guest again.
    Continue,
    /// Handle a byte written to the RDPMC trap port.
    TrapPort(u8),
    /// Handle a breakpoint or single step.
    Debug(kvm_debug_exit_arch),
    /// Handle a write to IA32_DEBUGCTL. The bits of the PMU are already applied.
    DebugControl(u64),
    /// Handle an instruction that KVM's emulator does not support.
    EmulationFailed,
    /// Stop the VM, or restart it after a reset.
    Stop(VmStopReason),
    /// Stop the VM because of a fatal error of the vCPU.
    Fail(VcpuFailure),
}

/// Channel on which a starting vCPU reports that it is attached to the perf core, or that this has
/// failed.
#[derive(Debug)]
pub enum VcpuStartReporter {
    /// The vCPU starts together with the VM, which ends if the vCPU fails. Nothing is sent; the
    /// sender is dropped when the vCPU is attached.
    WithVm(Sender<Infallible>),
    /// The vCPU is added to a running VM, which continues if the vCPU fails.
    Later {
        /// Sender of the success or the error.
        attached: SyncSender<Result<(), VcpuStartError>>,
        /// Channel that keeps the vCPU outside the guest until clients have opened their events on
        /// it. Nothing is received; the vCPU runs when the sender is dropped.
        released: Receiver<Infallible>,
    },
}

impl VcpuStartReporter {
    /// Reports that the vCPU is attached to the perf core, and waits until it may run.
    pub(super) fn done(self, vcpu: u8) {
        let Self::Later { attached, released } = self else {
            return;
        };
        if attached.send(Ok(())).is_err() {
            // The receiver has timed out, and the vCPU was already asked to stop.
            log::debug!("vcpu{vcpu}: it began too late");
        }
        let _ = released.recv();
    }
}

/// A configured vCPU that has not run yet.
pub struct Vcpu {
    pub(super) fd: VcpuFd,
    /// Properties of the KVM vCPU other than its file descriptor. When the thread ends, the slot
    /// receives them together with the file descriptor.
    pub(super) parts: KvmVcpuParts,
    pub(super) vm: Arc<VmFd>,
    pub(super) bus: Arc<DeviceBus>,
    pub(super) pmu: Option<VcpuPmu>,
    pub(super) lvtpc: Lvtpc,
    pub(super) slot: Arc<VcpuSlot>,
    pub(super) control: Arc<VmRunControl>,
    pub(super) debug: GuestDebug,
    pub(super) debug_control: Option<DebugControl>,
    pub(super) rdpmc: Option<RdpmcEmulator>,
    pub(super) stepper: Option<Stepper>,
    pub(super) bursts: Bursts,
    pub(super) on_first_entry: Option<Box<dyn FnOnce() + Send>>,
    /// Host CPU to which the thread is pinned.
    pub(super) pin: Option<usize>,
    pub(super) last_read: LastRdpmc,
    pub(super) sent_nmi: PendingNmi,
    /// `true` if the vCPU was restored from a snapshot and has not run since.
    pub(super) is_restored: bool,
}

impl Vcpu {
    /// Creates a vCPU that is ready to enter the guest. If `pmu` is `None`, no events are counted
    /// on the vCPU.
    pub fn new(
        kvm: KvmVcpu,
        lvtpc: Lvtpc,
        vm: Arc<VmFd>,
        bus: Arc<DeviceBus>,
        pmu: Option<VcpuPmu>,
        slot: Arc<VcpuSlot>,
        control: Arc<VmRunControl>,
    ) -> Self {
        let (fd, kept) = kvm.into_parts();
        Self {
            fd,
            parts: kept,
            vm,
            bus,
            pmu,
            lvtpc,
            slot,
            control,
            debug: GuestDebug::default(),
            debug_control: None,
            rdpmc: None,
            stepper: None,
            bursts: Bursts::default(),
            on_first_entry: None,
            pin: None,
            last_read: LastRdpmc::default(),
            sent_nmi: PendingNmi::default(),
            is_restored: false,
        }
    }

    /// Pins the vCPU thread to a host CPU.
    pub fn pin_to_host_cpu(&mut self, cpu: Option<usize>) {
        self.pin = cpu;
    }

    /// Sets a function that the vCPU calls directly before it first enters the guest.
    pub fn on_first_entry(&mut self, f: Box<dyn FnOnce() + Send>) {
        self.on_first_entry = Some(f);
    }

    /// Enables single-stepping for the exact backing.
    pub fn set_stepper(&mut self, stepper: Stepper) {
        self.stepper = Some(stepper);
    }

    /// Enables bursts of single-stepping, which collect branch stacks and branch records.
    pub fn set_bursts(&mut self, config: StepperConfig, memory: GuestMemoryMmap) {
        self.bursts = Bursts::new(config, memory);
    }

    /// Enables handling of a trapped IA32_DEBUGCTL.
    pub fn set_debug_control(&mut self, debug_control: DebugControl) {
        self.debug_control = Some(debug_control);
    }

    /// Sets the linear addresses of the RDPMC instructions that are emulated with hardware
    /// breakpoints.
    pub fn set_rdpmc_breakpoints(&mut self, addresses: &[u64]) {
        self.debug.set_sites(addresses);
    }

    /// Enables RDPMC emulation.
    pub fn set_rdpmc_emulator(&mut self, rdpmc: RdpmcEmulator) {
        self.rdpmc = Some(rdpmc);
    }

    pub(super) fn into_kvm(self) -> KvmVcpu {
        KvmVcpu::from_parts(self.fd, self.parts)
    }
}

/// A vCPU on the thread that runs it, with the state of its run loop.
pub(super) struct Running {
    pub(super) id: u8,
    pub(super) fd: KickableVcpu,
    pub(super) parts: KvmVcpuParts,
    pub(super) vm: Arc<VmFd>,
    pub(super) bus: Arc<DeviceBus>,
    pub(super) pmu: Option<VcpuPmu>,
    pub(super) lvtpc: Lvtpc,
    /// Schedule of checks whether the guest has unmasked LVTPC, while a PMI waits for it.
    pub(super) recheck: LvtpcBackoff,
    /// `true` if a PMI was due at the last entry but was not delivered.
    pub(super) pmi_waits: bool,
    /// Slot of the vCPU, with its requests and statistics.
    pub(super) slot: Arc<VcpuSlot>,
    pub(super) control: Arc<VmRunControl>,
    pub(super) debug: GuestDebug,
    /// IA32_DEBUGCTL without the bits of the PMU; `None` if the register is not trapped.
    pub(super) debug_control: Option<DebugControl>,
    /// RDPMC emulation; `None` if RDPMC is not emulated.
    pub(super) rdpmc: Option<RdpmcEmulator>,
    /// Stepper that single-steps the vCPU for the exact backing or for a burst; `None` if the vCPU
    /// is not stepped.
    pub(super) stepper: Option<Stepper>,
    /// State of the single-stepping bursts that collect branch stacks and branch records.
    pub(super) bursts: Bursts,
    pub(super) last_read: LastRdpmc,
    pub(super) sent_nmi: PendingNmi,
    pub(super) registers: RegisterCache,
    /// Rule for counting the instruction that caused the last exit.
    pub(super) completed: ExitCompletion,
    /// Progress of saving this vCPU to a snapshot.
    pub(super) save_phase: SavePhase,
    /// `true` if the vCPU was restored from a snapshot and has not run since.
    pub(super) is_restored: bool,
    /// `true` if KVM has not completed the last exit yet.
    pub(super) exit_is_open: bool,
    /// Version of the debugger's hardware breakpoints that `debug` has.
    pub(super) debugger_version: u64,
    pub(super) overflow_signals: kick::OverflowSignalDelivery,
    /// Timer for the exit in progress, if exits are watched.
    pub(super) exit_clock: ExitClock,
    /// Function to call directly before the first KVM_RUN.
    pub(super) on_first_entry: Option<Box<dyn FnOnce() + Send>>,
}

impl Running {
    /// Takes over `vcpu` on the current thread, which will run it.
    pub(super) fn new(vcpu: Vcpu) -> Self {
        let mut fd = KickableVcpu::new(vcpu.fd);
        // The stepper reads and writes registers between two entries. Synchronized registers would
        // override its changes.
        let syncs = vcpu.pmu.is_some() && vcpu.stepper.is_none() && vcpu.vm.syncs_registers();
        let exit_clock = ExitClock::new(vcpu.slot.exits().clone());
        Self {
            id: vcpu.slot.id(),
            registers: RegisterCache::new(&mut fd, syncs),
            fd,
            parts: vcpu.parts,
            vm: vcpu.vm,
            bus: vcpu.bus,
            pmu: vcpu.pmu,
            lvtpc: vcpu.lvtpc,
            recheck: LvtpcBackoff::default(),
            pmi_waits: false,
            slot: vcpu.slot,
            control: vcpu.control,
            debug: vcpu.debug,
            debug_control: vcpu.debug_control,
            rdpmc: vcpu.rdpmc,
            stepper: vcpu.stepper,
            bursts: vcpu.bursts,
            last_read: vcpu.last_read,
            sent_nmi: vcpu.sent_nmi,
            save_phase: SavePhase::None,
            is_restored: vcpu.is_restored,
            completed: ExitCompletion::None,
            exit_is_open: false,
            debugger_version: 0,
            overflow_signals: kick::OverflowSignalDelivery::default(),
            exit_clock,
            on_first_entry: vcpu.on_first_entry,
        }
    }

    pub(super) fn into_kvm(self) -> KvmVcpu {
        KvmVcpu::from_parts(self.fd.disarm(), self.parts)
    }
}
