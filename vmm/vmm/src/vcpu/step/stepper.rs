//! State of single-stepping on a vCPU: the mode, the current step, and statistics.

use perf_core::branch::BranchEntry;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::exact::{InstructionClass, SingleStepMeter, SteppedCpuState, SteppedGuestMemory};
use vpmu::{PrivilegeLevels, Vendor};

use super::debug::{EntryDebugState, GuestDebug};
use super::decoded::{CurrentStraightRun, RunCache};
use super::state::{SyncedRegisters, VcpuState};
use crate::kvm::call::KvmIoctlError;
use crate::kvm::stepping::SteppingSupport;
use crate::kvm::vcpu_fd::VcpuFd;
use guest_patching::linear_memory::LinearMemory;

pub(super) const RFLAGS_IF: u64 = 1 << 9;
pub(super) const RFLAGS_TF: u64 = 1 << 8;
pub(super) const RFLAGS_RF: u64 = 1 << 16;
pub(super) const NMI: u8 = 2;

/// Error of a KVM call during single-stepping. A guest cannot cause this error.
#[derive(Debug, thiserror::Error)]
#[error("failed to single-step")]
pub struct SingleStepError(#[from] KvmIoctlError);

/// Statistics of single-stepping on one vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepStats {
    /// Number of completed single steps.
    pub steps: u64,
    /// Number of steps with an unknown outcome, plus number of abandoned searches for the return to
    /// user code.
    pub lost: u64,
    /// Number of times that user code ran without being stepped although a counter counts it.
    pub unstepped: u64,
    /// Number of straight-line runs.
    pub runs: u64,
    /// Number of instructions that were retired in straight-line runs.
    pub instructions_in_runs: u64,
}

/// Reason why an instruction of user code is decoded again after the guest's kernel has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RedecodeReason {
    /// The SYSCALL before the instruction was emulated. The result of the system call is in RAX on
    /// return.
    Called,
    /// The instruction could not be read, because its page is not mapped. The instruction faults,
    /// the kernel maps the page, and the instruction is executed.
    Faults,
}

/// The single step in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct CurrentStep {
    /// Registers at the beginning of the step.
    pub(super) initial_state: SteppedCpuState,
    /// Class of the instruction that is being stepped.
    pub(super) class: InstructionClass,
    /// Reason why the guest's kernel runs before the instruction is executed; `None` if it does not
    /// run.
    pub(super) after_kernel: Option<RedecodeReason>,
}

/// Method by which the stepper steps the vCPU, as of the last entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SteppingMode {
    /// The vCPU is not stepped.
    Rest,
    /// KVM emulates CPL 0 and stops after each instruction there. User code cannot be stepped; the
    /// value tells whether it runs.
    Emulated(UserCodeState),
    /// Every instruction is stepped with the trap flag.
    All {
        /// `true` if the last instruction may have halted the vCPU.
        may_wait: bool,
    },
    /// Only instructions at CPL 1 to 3 are counted. The guest's kernel runs freely, except with
    /// [`UserResumeMethod::Walked`].
    UserOnly(UserResumeMethod),
}

/// Execution state of user code that cannot be stepped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UserCodeState {
    /// User code is not running.
    Away,
    /// The IRET that leads to user code is being stepped.
    Entered {
        /// Target address of the IRET.
        at: u64,
    },
    /// User code is running or has just run.
    Runs,
}

/// Method by which stepping resumes when the guest's kernel returns to user code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UserResumeMethod {
    /// The kernel has saved flags with the trap flag and restores them on return.
    Saved,
    /// The flags that the kernel has saved do not contain the trap flag, so the kernel itself is
    /// stepped until it returns. The value is the number of steps so far.
    Walked(u32),
}

/// Method by which the stepper stops the vCPU at the handler of an interrupt or exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GateStopMethod {
    /// Trap code, which replaces the first instruction of the handler for one entry. Possible only
    /// if the VM has a single vCPU, because guest memory is changed.
    Code,
    /// Free breakpoint registers.
    Breakpoints,
    /// None: handlers do not stop the vCPU.
    Nowhere,
}

/// Handlers of interrupts and exceptions at which the vCPU stops during one entry.
#[derive(Debug)]
pub(super) struct WatchedGates {
    /// Address of each handler and its vector.
    pub(super) watched: Vec<(u64, u8)>,
    /// Guest-physical address of each trap that is in guest memory, and the code that it has
    /// replaced.
    pub(super) planted: Vec<(GuestAddress, [u8; 2])>,
}

impl Default for WatchedGates {
    fn default() -> Self {
        Self {
            watched: Vec::with_capacity(256),
            planted: Vec::with_capacity(256),
        }
    }
}

impl WatchedGates {
    /// Returns the vector of the watched handler that begins at `rip`.
    pub(super) fn vector_at(&self, rip: u64) -> Option<u8> {
        let gate = self.watched.iter().find(|&&(at, _)| at == rip);
        gate.map(|&(_, vector)| vector)
    }
}

/// Single-steps one vCPU and counts its instructions for the exact backing, or records its branches
/// during a burst.
#[derive(Debug)]
pub struct Stepper {
    pub(super) meter: SingleStepMeter,
    pub(super) memory: GuestMemoryMmap,
    /// `true` if KVM emulates CPL 0, where steps then need no trap flag.
    pub(super) emulated: bool,
    pub(super) gate_stops: GateStopMethod,
    /// `true` if straight-line runs are enabled.
    pub(super) has_runs: bool,
    pub(super) mode: SteppingMode,
    pub(super) present: Option<CurrentStep>,
    /// Straight-line run in progress, if any. There is no single step in `present` during a run.
    pub(super) current_run: Option<CurrentStraightRun>,
    pub(super) runs: RunCache,
    /// Registers that KVM copies at exits during stepping.
    pub(super) synced: SyncedRegisters,
    /// Registers of the vCPU at the last stop, if they are still valid.
    pub(super) cached_state: Option<VcpuState>,
    /// Registers of the vCPU at the last stop, if it stopped after an instruction of user code.
    pub(super) stopped_in_user: Option<VcpuState>,
    /// Number of steps at which the local APIC timer may interrupt the guest again.
    pub(super) timer_waits: u64,
    /// `true` if maskable interrupts are held back until the end of the burst.
    pub(super) holds_interrupts: bool,
    /// `true` if the last instruction was HLT.
    pub(super) halted: bool,
    /// `true` if flags that the guest has saved in memory may contain the stepper's trap flag.
    pub(super) strays: bool,
    pub(super) gates: WatchedGates,
    pub(super) tally: StepStats,
}

impl Stepper {
    /// Creates a stepper for a vCPU of `vendor`. `alone` states whether the vCPU is the only one of
    /// the VM.
    pub fn new(vendor: Vendor, memory: GuestMemoryMmap, host: SteppingSupport, alone: bool) -> Self {
        Self {
            meter: SingleStepMeter::new(vendor),
            memory,
            emulated: !host.user,
            gate_stops: if alone {
                GateStopMethod::Code
            } else if host.breakpoints {
                GateStopMethod::Breakpoints
            } else {
                GateStopMethod::Nowhere
            },
            has_runs: !host.user && host.breakpoints && host.blocks_interrupts,
            mode: SteppingMode::Rest,
            present: None,
            current_run: None,
            runs: RunCache::default(),
            synced: SyncedRegisters::default(),
            cached_state: None,
            stopped_in_user: None,
            timer_waits: 0,
            holds_interrupts: false,
            halted: false,
            strays: false,
            gates: WatchedGates::default(),
            tally: StepStats::default(),
        }
    }

    /// Disables straight-line runs, so that every instruction is stepped.
    #[must_use]
    pub fn without_runs(mut self) -> Self {
        self.has_runs = false;
        self
    }

    /// Uses the registers that KVM copies at exits (`KVM_CAP_SYNC_REGS`), which saves KVM calls.
    #[must_use]
    pub fn with_synced_registers(mut self) -> Self {
        self.synced = SyncedRegisters::new();
        self
    }

    /// Creates the stepper in the state in which guest memory may contain the trap flag of an
    /// earlier stepper.
    #[must_use]
    pub fn with_strays(mut self) -> Self {
        self.strays = true;
        self
    }

    /// Returns the statistics of this stepper.
    pub fn tally(&self) -> StepStats {
        self.tally
    }

    /// Returns the number of single steps and straight-line runs so far.
    pub fn position(&self) -> u64 {
        self.tally.steps + self.tally.runs
    }

    /// Starts or stops recording the taken branches. Also ends [`Stepper::hold_interrupts`].
    pub fn set_branch_recording(&mut self, on: bool) {
        self.meter.set_branch_recording(on);
        self.holds_interrupts = false;
        self.halted = false;
    }

    /// Holds back maskable interrupts until [`Stepper::set_branch_recording`] is called. Has no
    /// effect if KVM emulates CPL 0.
    pub fn hold_interrupts(&mut self, hold: bool) {
        self.holds_interrupts = hold;
    }

    /// Returns `true` if the vCPU is at a privilege level outside `levels`, if its next instruction
    /// is a system call that leads there, or if it has halted.
    ///
    /// # Errors
    /// Returns [`SingleStepError`] if a KVM call fails.
    pub fn leaves_levels(&self, fd: &VcpuFd, levels: PrivilegeLevels) -> Result<bool, SingleStepError> {
        if self.halted {
            return Ok(true);
        }
        let state = match self.cached_state {
            Some(state) => state,
            None => self.read(fd)?,
        };
        Ok(if state.cpl() == 0 {
            !levels.kernel
        } else {
            let calls = || self.code(&state).is_some_and(|code| is_system_call(&code));
            !levels.user || !levels.kernel && calls()
        })
    }

    /// Removes and returns the recorded branches, oldest first.
    pub fn take_branches(&mut self) -> impl Iterator<Item = BranchEntry> + '_ {
        self.meter.take_branches()
    }

    /// Returns `true` if flags that the guest has saved in memory may contain the stepper's trap
    /// flag.
    pub fn has_stray_flags(&self) -> bool {
        self.strays
    }

    /// Returns the address and the privilege level of the string instruction with a repeat prefix
    /// that is unfinished at `cpu`, if any, for a snapshot.
    pub fn unfinished_repeat(&self, cpu: &SteppedCpuState) -> Option<(u64, u8)> {
        self.meter.unfinished_at(cpu)
    }

    /// Sets the unfinished string instruction with a repeat prefix, from a snapshot.
    pub fn restore_unfinished_repeat(&mut self, unfinished: Option<(u64, u8)>) {
        self.meter.restore_unfinished(unfinished);
    }

    /// Handles a write of the guest's kernel to a PMU register, which may enable a counter for user
    /// code. The flags that the kernel has saved before the write lack the trap flag.
    pub fn registers_changed(&mut self) {
        // In the other modes, starting to count changes the mode, which has the same effect.
        if let SteppingMode::UserOnly(way) = &mut self.mode {
            *way = UserResumeMethod::Walked(0);
        }
    }

    /// Returns the registers of the vCPU at the last stop, if it stopped after an instruction of
    /// user code.
    pub fn stopped_in_user(&self) -> Option<&VcpuState> {
        self.stopped_in_user.as_ref()
    }

    /// Returns `true` if only user code is counted and the vCPU has entered the guest's kernel
    /// since the step began.
    pub(super) fn is_in_kernel_uncounted(&self, state: &VcpuState) -> bool {
        matches!(self.mode, SteppingMode::UserOnly(_)) && state.cpl() == 0 && self.began_in_user()
    }

    /// Returns `true` if the step in progress began at CPL 1 to 3.
    pub(super) fn began_in_user(&self) -> bool {
        self.present.is_some_and(|step| step.initial_state.cpl != 0)
    }

    /// Returns the class of the instruction in progress.
    pub(super) fn current_class(&self) -> Option<InstructionClass> {
        self.present.map(|step| step.class)
    }

    pub(super) fn read(&self, fd: &VcpuFd) -> Result<VcpuState, SingleStepError> {
        Ok(VcpuState::read(fd)?)
    }

    pub(super) fn begin(&mut self, state: &VcpuState) -> InstructionClass {
        self.halted = false;
        let cpu = state.cpu();
        let ahead = self
            .meter
            .begin(&cpu, &mut LinearMemory::new(&self.memory, state));
        self.present = Some(CurrentStep {
            initial_state: cpu,
            class: ahead,
            after_kernel: None,
        });
        ahead
    }

    /// Returns the first three bytes of the next instruction. Returns `None` if the guest's memory
    /// there cannot be read.
    pub(super) fn code(&self, state: &VcpuState) -> Option<[u8; 3]> {
        let cpu = state.cpu();
        let mut code = [0; 3];
        let at = cpu.rip.wrapping_add(cpu.segment_bases[1]);
        let read = LinearMemory::new(&self.memory, state).read(at, &mut code);
        (read == code.len()).then_some(code)
    }

    pub(super) fn drop_step(&mut self) {
        self.meter.abandon();
        self.present = None;
        self.current_run = None;
    }
}

/// Returns `true` if the instruction is SYSCALL, SYSENTER, INT n or INT3.
fn is_system_call(code: &[u8; 3]) -> bool {
    matches!(code, [0x0F, 0x05 | 0x34, _] | [0xCC | 0xCD, _, _])
}

pub(super) fn apply(
    fd: &VcpuFd,
    debug: &mut GuestDebug,
    want: EntryDebugState,
) -> Result<(), SingleStepError> {
    Ok(debug.apply(fd, want)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_calls_are_recognized() {
        for code in [[0x0F, 0x05, 0], [0x0F, 0x34, 0], [0xCD, 0x80, 0], [0xCC, 0, 0]] {
            assert!(is_system_call(&code), "{code:x?}");
        }
        for code in [[0x0F, 0x1F, 0], [0x90, 0x0F, 0x05], [0xE8, 0, 0]] {
            assert!(!is_system_call(&code), "{code:x?}");
        }
    }
}
