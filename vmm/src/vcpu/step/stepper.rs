//! What the stepper of a vCPU knows: what is stepped, the step under way, what was counted.

use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::Vendor;
use vpmu::exact::{Ahead, CpuState, GuestMemory, StepMeter};

use super::debug::{GuestDebug, Want};
use super::decoded::{Runs, UnderWay};
use super::state::{Linear, State, SyncedState};
use crate::kvm::call::CallError;
use crate::kvm::stepping::Stepping;
use crate::kvm::vcpu_fd::VcpuFd;

pub(super) const RFLAGS_IF: u64 = 1 << 9;
pub(super) const RFLAGS_TF: u64 = 1 << 8;
pub(super) const RFLAGS_RF: u64 = 1 << 16;
pub(super) const NMI: u8 = 2;

/// A KVM call failed, which no guest can cause.
#[derive(Debug, thiserror::Error)]
#[error("stepping failed")]
pub struct StepError(#[from] CallError);

/// What was counted, and what could not be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Steps that ended.
    pub steps: u64,
    /// Steps after which the meter could not tell what had happened, and walks given up.
    pub lost: u64,
    /// Stretches of user code that ran without being stepped although a counter counts it.
    pub unstepped: u64,
    /// Straight runs that were entered at once.
    pub runs: u64,
    /// Instructions that retired in them.
    pub in_runs: u64,
}

/// Why user code goes on only after its kernel has run, when the instruction is decoded (again).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterKernel {
    /// A SYSCALL was executed here; its result is in RAX when it returns.
    Called,
    /// The code could not be read: the instruction faults, and is executed when its page is there.
    Faults,
}

/// A step under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Present {
    /// Where it began.
    pub(super) before: CpuState,
    /// The kind of its instruction.
    pub(super) ahead: Ahead,
    /// The guest's kernel runs before its instruction does.
    pub(super) after_kernel: Option<AfterKernel>,
}

/// What is stepped, as of the last entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Nothing: no counter asks for it.
    Rest,
    /// CPL 0, which KVM emulates. User code cannot be stepped there.
    Emulated(UserCode),
    /// Every instruction.
    All {
        /// The vCPU may wait in a HLT.
        may_wait: bool,
    },
    /// CPL 1 to 3, which alone are counted; the guest's kernel runs freely.
    UserOnly(Way),
}

/// User code that cannot be stepped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UserCode {
    /// None runs.
    Away,
    /// The IRET is being stepped that leads there.
    Entered {
        /// Where to.
        at: u64,
    },
    /// It runs, or ran until now.
    Runs,
}

/// From the guest's kernel back to user code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The trap flag waits in the flags that the kernel saved.
    Saved,
    /// There are no such flags: the kernel is stepped up to its return. So many steps were taken.
    Walked(u32),
}

/// How an entry is made to stop at the handler of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GateStops {
    /// By code in the handler's place: the VM has no other vCPU, and guest memory may be changed for the
    /// length of one entry.
    Code,
    /// By hardware breakpoints, as many as are free.
    Breakpoints,
    /// It does not stop.
    Nowhere,
}

/// Breakpoints on gates, for one entry.
#[derive(Debug)]
pub(super) struct Gates {
    /// Handler and vector of each.
    pub(super) watched: Vec<(u64, u8)>,
    /// Code that was replaced by an exit.
    pub(super) planted: Vec<(GuestAddress, [u8; 2])>,
}

impl Default for Gates {
    fn default() -> Self {
        Self {
            watched: Vec::with_capacity(256),
            planted: Vec::with_capacity(256),
        }
    }
}

impl Gates {
    /// The vector whose handler begins at `rip`, if that is watched.
    pub(super) fn vector_at(&self, rip: u64) -> Option<u8> {
        let gate = self.watched.iter().find(|&&(at, _)| at == rip);
        gate.map(|&(_, vector)| vector)
    }
}

/// Steps one vCPU.
#[derive(Debug)]
pub struct Stepper {
    pub(super) meter: StepMeter,
    pub(super) memory: GuestMemoryMmap,
    /// KVM emulates CPL 0: its steps need no trap flag.
    pub(super) emulated: bool,
    pub(super) gate_stops: GateStops,
    /// Straight runs are entered at once where they can be.
    pub(super) has_runs: bool,
    pub(super) mode: Mode,
    pub(super) present: Option<Present>,
    /// The run under way; there is no present step then.
    pub(super) under_way: Option<UnderWay>,
    pub(super) runs: Runs,
    /// The registers that come with an exit.
    pub(super) synced: SyncedState,
    /// The registers as the last stop found them, until something may have changed them.
    pub(super) fresh: Option<State>,
    /// The number of steps before which the local APIC's timer is held back.
    pub(super) timer_waits: u64,
    /// Saved flags with our trap flag may be left in the guest.
    pub(super) strays: bool,
    pub(super) gates: Gates,
    pub(super) tally: Tally,
}

impl Stepper {
    /// For a vCPU of a model of `vendor`. `alone`: the VM has no other vCPU.
    pub fn new(vendor: Vendor, memory: GuestMemoryMmap, host: Stepping, alone: bool) -> Self {
        Self {
            meter: StepMeter::new(vendor),
            memory,
            emulated: !host.user,
            gate_stops: if alone {
                GateStops::Code
            } else if host.breakpoints {
                GateStops::Breakpoints
            } else {
                GateStops::Nowhere
            },
            has_runs: !host.user && host.breakpoints && host.blocks_interrupts,
            mode: Mode::Rest,
            present: None,
            under_way: None,
            runs: Runs::default(),
            synced: SyncedState::default(),
            fresh: None,
            timer_waits: 0,
            strays: false,
            gates: Gates::default(),
            tally: Tally::default(),
        }
    }

    /// Steps each instruction, also where straight runs could be entered at once.
    #[must_use]
    pub fn without_runs(mut self) -> Self {
        self.has_runs = false;
        self
    }

    /// KVM copies registers at exits (`KVM_CAP_SYNC_REGS`), so that no call has to ask for them.
    #[must_use]
    pub fn with_synced_registers(mut self) -> Self {
        self.synced = SyncedState::new();
        self
    }

    /// What was counted so far.
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// The guest wrote a PMU register, so counting may begin at this point of its kernel.
    pub fn registers_changed(&mut self) {
        // In another mode it does when the mode changes.
        if let Mode::UserOnly(way) = &mut self.mode {
            *way = Way::Walked(0);
        }
    }

    /// User code alone is counted and the guest is in its kernel.
    pub(super) fn is_away(&self, state: &State) -> bool {
        matches!(self.mode, Mode::UserOnly(_)) && state.cpl() == 0 && self.began_in_user()
    }

    /// The present step, if there is one, began at CPL 1 to 3.
    pub(super) fn began_in_user(&self) -> bool {
        self.present.is_some_and(|step| step.before.cpl != 0)
    }

    /// The kind of the present step's instruction.
    pub(super) fn ahead(&self) -> Option<Ahead> {
        self.present.map(|step| step.ahead)
    }

    pub(super) fn read(&self, fd: &VcpuFd) -> Result<State, StepError> {
        Ok(State::read(fd)?)
    }

    pub(super) fn begin(&mut self, state: &State) -> Ahead {
        let cpu = state.cpu();
        let ahead = self.meter.begin(&cpu, &mut Linear::new(&self.memory, state));
        self.present = Some(Present {
            before: cpu,
            ahead,
            after_kernel: None,
        });
        ahead
    }

    /// The first bytes of the next instruction, if that many can be read.
    pub(super) fn code(&self, state: &State) -> Option<[u8; 3]> {
        let cpu = state.cpu();
        let mut code = [0; 3];
        let at = cpu.rip.wrapping_add(cpu.segment_bases[1]);
        let read = Linear::new(&self.memory, state).read(at, &mut code);
        (read == code.len()).then_some(code)
    }

    pub(super) fn drop_step(&mut self) {
        self.meter.abandon();
        self.present = None;
        self.under_way = None;
    }
}

pub(super) fn apply(fd: &VcpuFd, debug: &mut GuestDebug, want: Want) -> Result<(), StepError> {
    Ok(debug.apply(fd, want)?)
}
