//! What a debugger and the threads of the vCPUs share: who may run, where to stop, and the registers of those
//! that are stopped.
//!
//! While a debugger stops the machine, its run state is `Held` (see `control.rs`). Each
//! vCPU waits outside the guest, as in a pause of the operator's, and shows its registers when it is asked
//! ([`Debugger::collect`]). What the debugger changes of them goes into the guest when the vCPU goes on. Only
//! the vCPU's own thread calls KVM for it.
//!
//! A vCPU that comes to a breakpoint or has done its step stops all others by `Debugger::stopped`. The
//! first counts: another one that stops at the same time executes its instruction again when it goes on, and
//! stops again if its breakpoint is still there.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kvm_bindings::{kvm_debug_exit_arch, kvm_fpu, kvm_regs, kvm_sregs};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::kicker::Kicker;
use crate::kvm::stepping::BREAKPOINTS;

/// Vector of INT3 (SDM vol. 3 §6.15).
const BREAKPOINT: u32 = 3;
/// DR6.BS: a single step (SDM vol. 3 §19.2.3).
const DR6_STEP: u64 = 1 << 14;
/// Between two looks whether a vCPU that has not answered is still there.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A vCPU's registers, as far as a debugger knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Registers {
    /// General registers.
    pub general: kvm_regs,
    /// Segments and control registers.
    pub system: kvm_sregs,
    /// x87 and SSE.
    pub fpu: kvm_fpu,
}

/// What a vCPU does when the debugger lets the machine go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Go {
    /// It runs.
    Run = 0,
    /// It executes one instruction and stops.
    Step = 1,
    /// It stays where it is.
    Stay = 2,
}

/// What a hardware breakpoint waits for (SDM vol. 3 §19.2.4: R/W of DR7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// An instruction is executed.
    Execute = 0,
    /// Data is written.
    Write = 1,
    /// Data is read or written.
    Any = 3,
}

/// A hardware breakpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// Linear address, a multiple of the length.
    pub address: u64,
    /// Bytes: 1, 2, 4 or 8.
    pub length: u8,
    /// What for.
    pub access: Access,
}

/// An INT3 in the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planted {
    /// Linear address, in the address space it was planted through.
    pub address: u64,
    /// Where that is in guest-physical memory.
    pub physical: u64,
    /// What was there.
    pub replaced: u8,
}

/// Why a vCPU has stopped all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// An INT3 of the debugger's.
    Planted,
    /// A hardware breakpoint.
    Point(Point),
    /// It has done its step.
    Step,
}

/// A stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stop {
    /// Whose.
    pub vcpu: u8,
    /// Why.
    pub why: Why,
}

/// The machine cannot be stopped for a debugger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HoldError {
    /// The VM has ended.
    #[error("the VM has ended")]
    Ended,
    /// A vCPU's thread does not answer.
    #[error("vCPU {0} does not stop")]
    Slow(u8),
}

/// The run state of a machine, as a debugger changes it.
pub trait RunSwitch {
    /// Stops the machine for a debugger, or lets it go on.
    fn set_held(&self, held: bool);

    /// Makes the vCPUs that wait look at what is asked of them.
    fn wake_parked(&self);

    /// Whether the VM has ended.
    fn has_ended(&self) -> bool;
}

/// One vCPU.
#[derive(Debug)]
struct Cell {
    /// A [`Go`].
    go: AtomicU8,
    /// Its registers are wanted.
    asked: AtomicBool,
    view: Mutex<View>,
}

/// What passes between a debugger and a vCPU that is held.
#[derive(Debug, Default)]
struct View {
    /// What the vCPU showed, as the debugger has changed it.
    shown: Option<Registers>,
    /// The debugger has changed it.
    changed: Option<Changed>,
    /// What is to go into the guest, by the vCPU's thread.
    changes: Option<(Registers, Changed)>,
}

/// How much a debugger has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Changed {
    /// General registers.
    General,
    /// Those of x87 and SSE too. Else they are not written: not each KVM tells what it would take back.
    Fpu,
}

/// A debugger's place in a machine.
#[derive(Debug)]
pub struct Debugger {
    cells: Vec<Cell>,
    /// KVM holds interrupts back during a step.
    blocks_interrupts: bool,
    attached: AtomicBool,
    /// Grows with each change of `points` and of `attached`.
    version: AtomicU64,
    points: Mutex<Vec<Point>>,
    planted: Mutex<Vec<Planted>>,
    stop: Mutex<Option<Stop>>,
    /// Readable: a vCPU has stopped all.
    event: EventFd,
    showing: Mutex<()>,
    shown: Condvar,
    kicker: OnceLock<Kicker>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Debugger {
    /// For a machine of at most `vcpus`. `blocks_interrupts`: its KVM has `KVM_GUESTDBG_BLOCKIRQ`.
    ///
    /// # Errors
    /// That of eventfd(2).
    pub fn new(vcpus: u8, blocks_interrupts: bool) -> std::io::Result<Self> {
        let cell = |_| Cell {
            go: AtomicU8::new(Go::Run as u8),
            asked: AtomicBool::new(false),
            view: Mutex::default(),
        };
        Ok(Self {
            cells: (0..vcpus).map(cell).collect(),
            blocks_interrupts,
            attached: AtomicBool::new(false),
            version: AtomicU64::new(0),
            points: Mutex::default(),
            planted: Mutex::default(),
            stop: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            showing: Mutex::default(),
            shown: Condvar::new(),
            kicker: OnceLock::new(),
        })
    }

    /// Whom to kick. The first call counts.
    pub fn kicks(&self, kicker: Kicker) {
        let _ = self.kicker.set(kicker);
    }

    fn kick(&self) {
        if let Some(kicker) = self.kicker.get() {
            kicker.kick();
        }
    }

    fn cell(&self, vcpu: u8) -> Option<&Cell> {
        self.cells.get(usize::from(vcpu))
    }

    // ------------------------------------------------------------ the debugger's side

    /// A debugger is there, or is not any more.
    pub fn attach(&self, attached: bool) {
        self.attached.store(attached, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// Readable when a vCPU has stopped all; then [`Debugger::take_stop`] says which.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// The stop that was told of.
    pub fn take_stop(&self) -> Option<Stop> {
        let _ = self.event.read();
        lock(&self.stop).take()
    }

    /// Stops all vCPUs.
    pub fn hold(&self, switch: &dyn RunSwitch) {
        for cell in &self.cells {
            cell.go.store(Go::Stay as u8, Ordering::SeqCst);
        }
        switch.set_held(true);
        self.kick();
    }

    /// Lets them go on, each as `go` says.
    pub fn release(&self, switch: &dyn RunSwitch, go: impl Fn(u8) -> Go) {
        lock(&self.stop).take();
        let _ = self.event.read();
        let mut any_stays = false;
        for (vcpu, cell) in (0..).zip(&self.cells) {
            let go = go(vcpu);
            any_stays |= go == Go::Stay;
            if go != Go::Stay {
                let mut view = lock(&cell.view);
                let (shown, changed) = (view.shown.take(), view.changed.take());
                view.changes = shown.zip(changed).or(view.changes.take());
            }
            cell.go.store(go as u8, Ordering::SeqCst);
        }
        switch.set_held(any_stays);
        switch.wake_parked();
    }

    /// Waits until the vCPUs that `present` names, which are held, show their registers.
    ///
    /// # Errors
    /// [`HoldError`].
    pub fn collect(
        &self,
        switch: &dyn RunSwitch,
        present: impl Fn() -> Vec<u8>,
        patience: Duration,
    ) -> Result<(), HoldError> {
        let end = std::time::Instant::now() + patience;
        for cell in &self.cells {
            // One that has shown them has not run since.
            let hides = lock(&cell.view).shown.is_none();
            cell.asked.store(hides, Ordering::SeqCst);
        }
        switch.wake_parked();
        self.kick();
        let mut showing = lock(&self.showing);
        loop {
            let hides = |vcpu: &u8| {
                self.cell(*vcpu)
                    .is_some_and(|cell| lock(&cell.view).shown.is_none())
            };
            let Some(missing) = present().into_iter().find(hides) else {
                return Ok(());
            };
            if switch.has_ended() {
                return Err(HoldError::Ended);
            }
            if std::time::Instant::now() >= end {
                return Err(HoldError::Slow(missing));
            }
            showing = self
                .shown
                .wait_timeout(showing, LOOK_AGAIN)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// What a vCPU showed; `None` for one that is not held.
    pub fn registers(&self, vcpu: u8) -> Option<Registers> {
        lock(&self.cell(vcpu)?.view).shown
    }

    /// Changes them. Whether the vCPU is held.
    pub fn set_registers(&self, vcpu: u8, registers: &Registers) -> bool {
        let Some(cell) = self.cell(vcpu) else { return false };
        let mut view = lock(&cell.view);
        let Some(shown) = view.shown.replace(*registers) else {
            view.shown = None;
            return false;
        };
        if shown.fpu != registers.fpu || view.changed == Some(Changed::Fpu) {
            view.changed = Some(Changed::Fpu);
        } else {
            view.changed = Some(Changed::General);
        }
        true
    }

    /// Adds a hardware breakpoint; `false` if `most` are set.
    pub fn add_point(&self, point: Point, most: usize) -> bool {
        let mut points = lock(&self.points);
        if points.len() >= most.min(BREAKPOINTS) {
            return false;
        }
        points.push(point);
        self.version.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// Removes it; `false` if it is not set.
    pub fn remove_point(&self, point: Point) -> bool {
        let mut points = lock(&self.points);
        let Some(at) = points.iter().position(|other| *other == point) else {
            return false;
        };
        points.remove(at);
        self.version.fetch_add(1, Ordering::SeqCst);
        true
    }

    /// No hardware breakpoint is set any more.
    pub fn clear_points(&self) {
        lock(&self.points).clear();
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The INT3s in the guest's memory, to be added to and taken from.
    pub fn planted(&self) -> MutexGuard<'_, Vec<Planted>> {
        lock(&self.planted)
    }

    // ------------------------------------------------------------ the vCPUs' side

    /// Whether a debugger is there; one relaxed load.
    #[inline]
    pub fn is_attached(&self) -> bool {
        self.attached.load(Ordering::Relaxed)
    }

    /// What the vCPU is to do.
    pub(super) fn go(&self, vcpu: u8) -> Go {
        match self.cell(vcpu).map(|cell| cell.go.load(Ordering::SeqCst)) {
            Some(1) => Go::Step,
            Some(2) => Go::Stay,
            _ => Go::Run,
        }
    }

    /// Whether its registers are wanted.
    pub(super) fn is_asked(&self, vcpu: u8) -> bool {
        self.cell(vcpu)
            .is_some_and(|cell| cell.asked.load(Ordering::SeqCst))
    }

    /// Shows them, with those of [`Debugger::take_changes`] in them.
    pub(super) fn show(&self, vcpu: u8, registers: Registers) {
        let Some(cell) = self.cell(vcpu) else { return };
        cell.asked.store(false, Ordering::SeqCst);
        lock(&cell.view).shown = Some(registers);
        drop(lock(&self.showing));
        self.shown.notify_all();
    }

    /// What the debugger has changed of a vCPU's registers, before it goes on.
    pub(super) fn take_changes(&self, vcpu: u8) -> Option<(Registers, Changed)> {
        lock(&self.cell(vcpu)?.view).changes.take()
    }

    /// The hardware breakpoints and their version, if that is not `known`.
    pub(super) fn news(&self, known: u64) -> Option<(u64, Vec<Point>)> {
        let version = self.version.load(Ordering::SeqCst);
        (version != known).then(|| (version, lock(&self.points).clone()))
    }

    /// Whether KVM holds interrupts back during a step.
    pub(super) fn blocks_interrupts(&self) -> bool {
        self.blocks_interrupts
    }

    /// Whether an INT3 of the debugger's is at a linear address.
    pub(super) fn is_planted(&self, address: u64) -> bool {
        lock(&self.planted)
            .iter()
            .any(|planted| planted.address == address)
    }

    /// Whether a debug exit is the debugger's: else it is the guest's own. The hardware breakpoints are in
    /// the registers from DR`first` on.
    pub(super) fn why(&self, vcpu: u8, first: usize, stop: &kvm_debug_exit_arch) -> Option<Why> {
        if stop.exception == BREAKPOINT {
            return self.is_planted(stop.pc).then_some(Why::Planted);
        }
        let hit = |n: usize| stop.dr6 & 1 << n != 0;
        let points = lock(&self.points);
        let numbered = (first..BREAKPOINTS).zip(points.iter());
        if let Some((_, point)) = numbered.into_iter().find(|(n, _)| hit(*n)) {
            return Some(Why::Point(*point));
        }
        (stop.dr6 & DR6_STEP != 0 && self.go(vcpu) == Go::Step).then_some(Why::Step)
    }

    /// A vCPU stops all.
    pub(super) fn stopped(&self, switch: &dyn RunSwitch, stop: Stop) {
        lock(&self.stop).get_or_insert(stop);
        self.hold(switch);
        let _ = self.event.write(1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::control::{OnReset, RunControl, RunState};
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn machine() -> RunControl {
        let debugger = Debugger::new(2, false).unwrap();
        RunControl::new(OnReset::Exit)
            .unwrap()
            .with_debugger(Some(debugger))
    }

    fn at(rip: u64) -> Registers {
        let mut registers = Registers::default();
        registers.general.rip = rip;
        registers
    }

    /// What a debugger changes of a vCPU that stays is not lost when the others have run, and goes into the
    /// guest once.
    #[test]
    fn changes_wait_until_their_vcpu_goes_on() {
        let control = machine();
        let debugger = control.debugger().unwrap();
        debugger.hold(&control);
        assert_eq!(
            debugger.collect(&control, || vec![0, 1], NOW),
            Err(HoldError::Slow(0)),
            "nobody has answered"
        );
        debugger.show(0, at(1));
        debugger.show(1, at(2));
        debugger.collect(&control, || vec![0, 1], NOW).unwrap();
        assert!(debugger.set_registers(1, &at(3)));
        debugger.release(&control, |vcpu| if vcpu == 0 { Go::Step } else { Go::Stay });
        assert_eq!((control.state(), debugger.go(0)), (RunState::Held, Go::Step));
        assert_eq!((debugger.take_changes(0), debugger.take_changes(1)), (None, None));
        assert!(!debugger.set_registers(0, &at(9)), "it runs");
        debugger.hold(&control);
        assert_eq!(
            debugger.collect(&control, || vec![0, 1], NOW),
            Err(HoldError::Slow(0))
        );
        assert!(!debugger.is_asked(1), "it has not run since");
        assert_eq!(debugger.registers(1), Some(at(3)));
        debugger.release(&control, |_| Go::Run);
        assert_eq!(control.state(), RunState::Running);
        assert_eq!(debugger.take_changes(1), Some((at(3), Changed::General)));
        assert_eq!(debugger.take_changes(1), None);
    }

    /// Exits that are the guest's own stay the guest's.
    #[test]
    fn only_the_debuggers_own_stops_are_its() {
        let control = machine();
        let debugger = control.debugger().unwrap();
        let stop = |exception, pc, dr6| kvm_debug_exit_arch {
            exception,
            pc,
            dr6,
            ..Default::default()
        };
        let point = Point {
            address: 0x10,
            length: 1,
            access: Access::Execute,
        };
        assert!(debugger.add_point(point, 1) && !debugger.add_point(point, 1));
        debugger.planted().push(Planted {
            address: 0x20,
            physical: 0x20,
            replaced: 0x90,
        });
        assert_eq!(debugger.why(0, 0, &stop(3, 0x20, 0)), Some(Why::Planted));
        assert_eq!(debugger.why(0, 0, &stop(3, 0x21, 0)), None);
        // Behind two breakpoints that are not its.
        assert_eq!(
            debugger.why(0, 2, &stop(1, 0x10, 1 << 2)),
            Some(Why::Point(point))
        );
        assert_eq!(debugger.why(0, 2, &stop(1, 0x10, 1 << 0)), None);
        assert_eq!(
            debugger.why(0, 0, &stop(1, 0x30, DR6_STEP)),
            None,
            "nobody asked for it"
        );
        debugger.hold(&control);
        debugger.release(&control, |_| Go::Step);
        assert_eq!(debugger.why(0, 0, &stop(1, 0x30, DR6_STEP)), Some(Why::Step));
        // The first stop counts.
        debugger.stopped(
            &control,
            Stop {
                vcpu: 1,
                why: Why::Step,
            },
        );
        debugger.stopped(
            &control,
            Stop {
                vcpu: 0,
                why: Why::Planted,
            },
        );
        assert_eq!(
            debugger.take_stop(),
            Some(Stop {
                vcpu: 1,
                why: Why::Step
            })
        );
        assert_eq!(debugger.take_stop(), None);
    }
}
