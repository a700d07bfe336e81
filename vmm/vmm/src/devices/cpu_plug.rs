//! CPU hot-plug registers, accessed by the methods of the ACPI processor devices
//! (`boot/processors.rs`).
//!
//! | port | width | read | write |
//! |---|---|---|---|
//! | +0 | 8 | the selected processor | selects a processor |
//! | +1 | 8 | bit 0: present; 1: inserted; 2: ejection requested | 1: acknowledges bit 1; 2: acknowledges bit 2; 3: ejects the processor |
//! | +4 | 32 | 0 | the event that _OST reports on |
//! | +8 | 32 | 0 | the status that _OST reports; completes the report |
//!
//! The guest is untrusted, so its state in the device is limited to a few bitmaps. If the guest
//! selects a number without a processor, the status register reads as absent and ignores writes. A
//! request to eject processor 0 or an absent processor is counted and otherwise ignored. The guest
//! may eject a processor without being asked, but cannot insert it again.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use snapshot::state::SavedCpuPlug;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Bit 0 of the status register: the processor is present.
const PRESENT: u8 = 1 << 0;
/// Bit 1 of the status and control register: the processor was inserted. Writing a one acknowledges
/// it.
const COME: u8 = 1 << 1;
/// Bit 2 of the status and control register: ejection is requested. Writing a one acknowledges it.
const ASKED_FOR: u8 = 1 << 2;
/// Bit 3 of the control register: ejects the processor.
const EJECT: u8 = 1 << 3;

/// Event that _OST reports on: device check (ACPI 6.5, table 6.73).
const DEVICE_CHECK: u32 = 1;
/// Event that _OST reports on: ejection request by the VMM.
const EJECT_REQUEST: u32 = 3;
/// Event that _OST reports on: ejection initiated by the guest.
const OWN_EJECTION: u32 = 0x103;
/// Status that _OST reports: success (tables 6.74 and 6.75).
const SUCCESS: u32 = 0;
/// Status that _OST reports: ejection in progress.
const EJECTION_GOES_ON: u32 = 0x84;

/// Offset of the register that selects a processor.
const SELECTOR: u16 = 0;
/// Offset of the status and control register.
const STATE: u16 = 1;
/// Offset of the register for the event that _OST reports on.
const EVENT: u16 = 4;
/// Offset of the register for the status that _OST reports.
const STATUS: u16 = 8;

/// A set of vCPU numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VcpuSet(u64);

impl VcpuSet {
    /// Returns the set of the vCPUs with numbers below `end`. A set contains at most 64 vCPUs.
    pub fn first(end: u8) -> Self {
        Self(1u64.checked_shl(end.into()).map_or(u64::MAX, |bit| bit - 1))
    }

    /// Returns the set that contains only `vcpu`, or the empty set if the number is above the
    /// maximum.
    pub fn of(vcpu: u8) -> Self {
        Self(1u64.checked_shl(vcpu.into()).unwrap_or(0))
    }

    /// Returns the set of the vCPUs whose bits are set in `bits`.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// Returns the set as a bitmap; bit n is vCPU n.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Returns whether the set contains `vcpu`.
    pub fn contains(self, vcpu: u8) -> bool {
        self.0 & Self::of(vcpu).0 != 0
    }

    /// Returns whether the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the number of vCPUs in the set.
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns the union with `other`.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the vCPUs of this set that are not in `other`.
    #[must_use]
    pub fn difference(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the intersection with `other`.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns the vCPU numbers in ascending order.
    pub fn numbers(self) -> impl DoubleEndedIterator<Item = u8> {
        (0..64).filter(move |vcpu| self.contains(*vcpu))
    }
}

/// State of CPU hot-plug, as the guest sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuPlugState {
    /// Processors that are present for the guest.
    pub present: VcpuSet,
    /// Processors that were inserted and not acknowledged by the guest yet.
    pub unnoticed: VcpuSet,
    /// Processors whose ejection was requested and is still pending.
    pub ejecting: VcpuSet,
    /// Processors whose insertion or ejection the guest has refused since the last request:
    /// processor number, and status that _OST reported.
    pub rejected: Vec<(u8, u32)>,
    /// Number of processors that the guest has ejected without a request.
    pub unrequested_ejections: u64,
    /// Number of attempts by the guest to eject processor 0 or an absent processor.
    pub ignored_ejections: u64,
}

#[derive(Debug, Default)]
struct Registers {
    /// Processors that the machine may have at most.
    all: VcpuSet,
    shown: VcpuSet,
    /// Processors whose "inserted" bit is set in the status register.
    come: VcpuSet,
    /// Processors whose "ejection requested" bit is set in the status register.
    called: VcpuSet,
    /// Processors whose ejection was requested and which the guest has neither ejected nor refused
    /// to eject.
    asked_for: VcpuSet,
    /// Processors that the guest has ejected and that [`CpuHotplugDevice::take_ejected`] has not
    /// returned yet.
    ejected: VcpuSet,
    selector: u8,
    event: [u8; 4],
    status: [u8; 4],
    refused: Vec<(u8, u32)>,
    unrequested_ejections: u64,
    ignored_ejections: u64,
}

/// CPU hot-plug device, shared by the vCPU threads and the main loop. The lock is held only for the
/// duration of one access.
#[derive(Debug)]
pub struct CpuHotplugDevice {
    registers: Mutex<Registers>,
    interrupt: EventFd,
    ejected: EventFd,
}

impl CpuHotplugDevice {
    /// Creates the device for up to `max` processors. The first `shown` processors are present.
    ///
    /// # Errors
    /// Returns an error if `eventfd(2)` fails.
    pub fn new(shown: u8, max: u8) -> io::Result<Self> {
        Ok(Self {
            registers: Mutex::new(Registers {
                all: VcpuSet::first(max),
                shown: VcpuSet::first(shown),
                ..Registers::default()
            }),
            interrupt: EventFd::new(EFD_NONBLOCK)?,
            ejected: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Resets the device to its initial state, in which the first `shown` processors are present.
    pub fn reset(&self, shown: u8) {
        let mut registers = self.lock();
        *registers = Registers {
            all: registers.all,
            shown: VcpuSet::first(shown),
            ..Registers::default()
        };
    }

    /// Returns the registers for a snapshot. Returns `None` while an ejected processor has not been
    /// fetched with [`CpuHotplugDevice::take_ejected`].
    pub fn save(&self) -> Option<SavedCpuPlug> {
        let registers = self.lock();
        registers.ejected.is_empty().then(|| SavedCpuPlug {
            shown: registers.shown.bits(),
            inserted: registers.come.bits(),
            called: registers.called.bits(),
            asked_for: registers.asked_for.bits(),
            selector: registers.selector,
            event: registers.event,
            status: registers.status,
        })
    }

    /// Restores the registers from a snapshot. Ignores processors that do not exist in this
    /// machine.
    pub fn restore(&self, saved: &SavedCpuPlug) {
        let mut registers = self.lock();
        let existing = |bits: u64| VcpuSet::from_bits(bits).intersection(registers.all);
        let shown = existing(saved.shown).with(VcpuSet::of(0));
        let restored = Registers {
            all: registers.all,
            shown,
            come: existing(saved.inserted).intersection(shown),
            called: existing(saved.called).intersection(shown),
            asked_for: existing(saved.asked_for).intersection(shown),
            selector: saved.selector,
            event: saved.event,
            status: saved.status,
            ..Registers::default()
        };
        *registers = restored;
    }

    /// Returns the eventfd to register with KVM as an irqfd for [`super::ports::CPU_PLUG_IRQ`].
    pub fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    /// Returns the eventfd that is readable when the guest has ejected a processor. See
    /// [`CpuHotplugDevice::take_ejected`].
    pub fn ejected(&self) -> &EventFd {
        &self.ejected
    }

    /// Inserts the processors `vcpus` and notifies the guest of them. Ignores those that are
    /// already present.
    pub fn show(&self, vcpus: VcpuSet) {
        let mut registers = self.lock();
        let vcpus = vcpus.intersection(registers.all).difference(registers.shown);
        registers.shown = registers.shown.with(vcpus);
        registers.come = registers.come.with(vcpus);
        registers.called = registers.called.difference(vcpus);
        registers.asked_for = registers.asked_for.difference(vcpus);
        registers.refused.retain(|(vcpu, _)| !vcpus.contains(*vcpu));
        drop(registers);
        self.call();
    }

    /// Requests that the guest eject exactly the processors `vcpus`; earlier requests for other
    /// processors are withdrawn. Ignores processor 0.
    pub fn request_ejection(&self, vcpus: VcpuSet) {
        let mut registers = self.lock();
        let vcpus = vcpus.intersection(registers.shown).difference(VcpuSet::of(0));
        registers.called = vcpus;
        registers.asked_for = vcpus;
        registers.refused.retain(|(vcpu, _)| !vcpus.contains(*vcpu));
        drop(registers);
        if !vcpus.is_empty() {
            self.call();
        }
    }

    /// Raises the interrupt again if the guest has not acknowledged all changes. The interrupt is
    /// edge-triggered, so it is lost if the guest's driver is not loaded yet.
    pub fn repeat_interrupt(&self) {
        let registers = self.lock();
        let pending = !registers.come.with(registers.called).is_empty();
        drop(registers);
        if pending {
            self.call();
        }
    }

    /// Returns the processors ejected since the last call.
    pub fn take_ejected(&self) -> VcpuSet {
        // The read fails if another caller has already cleared the eventfd.
        let _ = self.ejected.read();
        std::mem::take(&mut self.lock().ejected)
    }

    /// Returns the state of CPU hot-plug from the guest's point of view.
    pub fn state(&self) -> CpuPlugState {
        let registers = self.lock();
        CpuPlugState {
            present: registers.shown,
            unnoticed: registers.come,
            ejecting: registers.asked_for,
            rejected: registers.refused.clone(),
            unrequested_ejections: registers.unrequested_ejections,
            ignored_ejections: registers.ignored_ejections,
        }
    }

    /// Reads the byte at `offset` from the device's first I/O port.
    pub fn read_byte(&self, offset: u16) -> u8 {
        let registers = self.lock();
        match offset {
            SELECTOR => registers.selector,
            STATE => registers.state(),
            _ => 0,
        }
    }

    /// Writes the byte at `offset` from the device's first I/O port.
    pub fn write_byte(&self, offset: u16, value: u8) {
        let mut registers = self.lock();
        match offset {
            SELECTOR => registers.selector = value,
            STATE if registers.control(value) => {
                drop(registers);
                if let Err(e) = self.ejected.write(1) {
                    log::error!("cannot announce an ejected vCPU: {e}");
                }
            }
            EVENT..STATUS => registers.event[usize::from(offset - EVENT)] = value,
            STATUS..super::ports::CPU_PLUG_LEN => {
                let at = usize::from(offset - STATUS);
                registers.status[at] = value;
                if at == 3 {
                    registers.report();
                }
            }
            _ => {}
        }
    }

    fn call(&self) {
        if let Err(e) = self.interrupt.write(1) {
            log::error!("cannot raise the CPU hot-plug interrupt: {e}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Registers> {
        self.registers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Registers {
    /// Returns the set that contains the selected processor. Empty if the guest has selected a
    /// number without a processor.
    fn selected(&self) -> VcpuSet {
        VcpuSet::of(self.selector).intersection(self.all)
    }

    fn state(&self) -> u8 {
        let one = self.selected();
        let bit = |set: VcpuSet, bit: u8| if one.intersection(set).is_empty() { 0 } else { bit };
        bit(self.shown, PRESENT) | bit(self.come, COME) | bit(self.called, ASKED_FOR)
    }

    /// Writes `value` to the control register of the selected processor. Returns `true` if the
    /// write ejects the processor.
    fn control(&mut self, value: u8) -> bool {
        let one = self.selected();
        if value & COME != 0 {
            self.come = self.come.difference(one);
        }
        if value & ASKED_FOR != 0 {
            self.called = self.called.difference(one);
        }
        if value & EJECT == 0 {
            return false;
        }
        if one.intersection(self.shown).is_empty() || one == VcpuSet::of(0) {
            self.ignored_ejections = self.ignored_ejections.saturating_add(1);
            return false;
        }
        if one.intersection(self.asked_for).is_empty() {
            self.unrequested_ejections = self.unrequested_ejections.saturating_add(1);
        }
        self.shown = self.shown.difference(one);
        self.come = self.come.difference(one);
        self.called = self.called.difference(one);
        self.asked_for = self.asked_for.difference(one);
        self.ejected = self.ejected.with(one);
        true
    }

    /// Processes the event and status that the guest's _OST method has written. A refused ejection
    /// ends the request for it.
    fn report(&mut self) {
        let (vcpu, one) = (self.selector, self.selected());
        let status = u32::from_le_bytes(self.status);
        if status == SUCCESS || one.intersection(self.shown).is_empty() {
            return;
        }
        match u32::from_le_bytes(self.event) {
            DEVICE_CHECK => {}
            EJECT_REQUEST | OWN_EJECTION
                if status != EJECTION_GOES_ON && !one.intersection(self.asked_for).is_empty() =>
            {
                self.asked_for = self.asked_for.difference(one);
                self.called = self.called.difference(one);
            }
            _ => return,
        }
        // One entry per processor bounds the list to 64.
        self.refused.retain(|(refused, _)| *refused != vcpu);
        self.refused.push((vcpu, status));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn report(plug: &CpuHotplugDevice, vcpu: u8, event: u32, status: u32) {
        plug.write_byte(SELECTOR, vcpu);
        for (at, byte) in event
            .to_le_bytes()
            .iter()
            .chain(&status.to_le_bytes())
            .enumerate()
        {
            plug.write_byte(EVENT + at as u16, *byte);
        }
    }

    fn state_of(plug: &CpuHotplugDevice, vcpu: u8) -> u8 {
        plug.write_byte(SELECTOR, vcpu);
        plug.read_byte(STATE)
    }

    fn set(vcpus: &[u8]) -> VcpuSet {
        vcpus
            .iter()
            .fold(VcpuSet::default(), |set, v| set.with(VcpuSet::of(*v)))
    }

    #[test]
    fn cpu_plug_handles_insert_and_eject() {
        let plug = CpuHotplugDevice::new(1, 3).unwrap();
        assert_eq!(
            [0, 1, 2, 3, 255].map(|v| state_of(&plug, v)),
            [PRESENT, 0, 0, 0, 0]
        );
        plug.show(set(&[2]));
        assert_eq!(plug.interrupt().read().unwrap(), 1);
        assert_eq!(state_of(&plug, 2), PRESENT | COME);
        assert_eq!(plug.state().unnoticed, set(&[2]));
        plug.repeat_interrupt();
        assert_eq!(plug.interrupt().read().unwrap(), 1);
        plug.write_byte(STATE, COME);
        assert_eq!((state_of(&plug, 2), plug.state().unnoticed), (PRESENT, set(&[])));
        plug.repeat_interrupt();
        assert!(plug.interrupt().read().is_err(), "there is nothing to look at");

        plug.request_ejection(set(&[2]));
        assert_eq!(plug.interrupt().read().unwrap(), 1);
        assert_eq!(state_of(&plug, 2), PRESENT | ASKED_FOR);
        plug.write_byte(STATE, ASKED_FOR);
        assert_eq!((state_of(&plug, 2), plug.state().ejecting), (PRESENT, set(&[2])));
        report(&plug, 2, EJECT_REQUEST, EJECTION_GOES_ON);
        assert_eq!(plug.state().ejecting, set(&[2]));
        plug.write_byte(STATE, EJECT);
        assert_eq!(state_of(&plug, 2), 0);
        assert_eq!(plug.ejected().read().unwrap(), 1);
        assert_eq!(plug.take_ejected(), set(&[2]));
        assert_eq!(plug.take_ejected(), set(&[]));
        assert_eq!(
            (plug.state().unrequested_ejections, plug.state().ignored_ejections),
            (0, 0)
        );
    }

    /// If the guest refuses an ejection, the request ends. The status of the refusal is reported
    /// until the next request.
    #[test]
    fn cpu_plug_reports_refusal_by_guest() {
        let plug = CpuHotplugDevice::new(3, 4).unwrap();
        plug.request_ejection(set(&[1, 2]));
        report(&plug, 2, EJECT_REQUEST, 0x82);
        let state = plug.state();
        assert_eq!((state.ejecting, state.rejected), (set(&[1]), vec![(2, 0x82)]));
        assert_eq!(state_of(&plug, 2), PRESENT);
        // A rejection without a request has no effect.
        report(&plug, 0, EJECT_REQUEST, 0x82);
        report(&plug, 63, DEVICE_CHECK, 1);
        assert_eq!(plug.state().rejected.len(), 1);
        plug.request_ejection(set(&[2]));
        let state = plug.state();
        assert_eq!((state.ejecting, state.rejected), (set(&[2]), vec![]));
        plug.show(set(&[3]));
        report(&plug, 3, DEVICE_CHECK, 1);
        assert_eq!(plug.state().rejected, vec![(3, 1)]);
    }

    /// An ejection request that was withdrawn is no longer visible to the guest. The guest may
    /// still eject the processor.
    #[test]
    fn cpu_plug_withdraws_ejection_request() {
        let plug = CpuHotplugDevice::new(2, 3).unwrap();
        plug.request_ejection(set(&[0, 1, 2]));
        assert_eq!(plug.state().ejecting, set(&[1]), "processor 0 stays, 2 is absent");
        plug.request_ejection(set(&[]));
        assert_eq!((state_of(&plug, 1), plug.state().ejecting), (PRESENT, set(&[])));
        plug.write_byte(STATE, EJECT);
        assert_eq!(plug.take_ejected(), set(&[1]));
        assert_eq!(plug.state().unrequested_ejections, 1);
    }

    proptest! {
        /// Processor 0 stays present and absent processors stay absent, regardless of the guest's
        /// writes. Each other processor is ejected at most once.
        #[test]
        fn guest_ejects_only_present_processors(
            writes in proptest::collection::vec((0u16..20, any::<u8>()), 0..300)
        ) {
            let plug = CpuHotplugDevice::new(3, 5).unwrap();
            for (offset, value) in writes {
                plug.write_byte(offset, value);
                plug.read_byte(offset);
            }
            let state = plug.state();
            let ejected = plug.take_ejected();
            prop_assert!(state.present.contains(0) && state.present.difference(VcpuSet::first(3)).is_empty());
            prop_assert_eq!(state.present.with(ejected), VcpuSet::first(3));
            prop_assert!(state.present.intersection(ejected).is_empty());
            prop_assert!(state.rejected.len() <= 5);
            prop_assert_eq!(u64::from(ejected.len()), state.unrequested_ejections);
        }
    }
}
