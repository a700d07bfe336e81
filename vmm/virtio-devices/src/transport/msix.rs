//! MSI-X table of a PCI function (PCI 3.0, 6.8.2).
//!
//! Each table entry has an eventfd that the device signals. While the entry is unmasked, the
//! eventfd is attached to KVM as an irqfd, and no VMM thread is involved in an interrupt. While the
//! entry is masked, the eventfd is not attached and holds the pending interrupt, and reads of the
//! Pending Bit Array query the eventfd.

use std::io;
use std::sync::Arc;

use snapshot::state::SavedDevice;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::machine::{MsiMessage, PciBackend};
use diagnostics::{error_line, guest_log};

/// Size of an MSI-X table entry (address, data, control), in bytes.
pub(super) const ENTRY_BYTES: usize = 16;
/// Mask bit in the vector control field of a table entry.
const ENTRY_MASKED: u32 = 1 << 0;
// Function mask bit and MSI-X enable bit of the message control register.
const CONTROL_MASKED: u16 = 1 << 14;
const CONTROL_ENABLE: u16 = 1 << 15;
/// Guest-writable bits of the message control register.
pub(super) const CONTROL_WRITABLE: u16 = CONTROL_MASKED | CONTROL_ENABLE;

struct MsixEntry {
    message: MsiMessage,
    control: u32,
    vector: Arc<EventFd>,
    /// Message to which the entry's eventfd is connected, or `None` if it is not connected.
    connected: Option<MsiMessage>,
}

impl MsixEntry {
    fn bytes(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[..8].copy_from_slice(&self.message.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.message.data.to_le_bytes());
        bytes[12..].copy_from_slice(&self.control.to_le_bytes());
        bytes
    }

    fn set_bytes(&mut self, bytes: &[u8; ENTRY_BYTES]) {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        self.message = MsiMessage {
            // The lowest two bits of the message address are always zero (6.8.2.7).
            address: u64::from(word(0) & !3) | u64::from(word(4)) << 32,
            data: word(8),
        };
        self.control = word(12) & ENTRY_MASKED;
    }
}

pub(super) struct MsixTable {
    machine: Arc<dyn PciBackend>,
    /// Bus-wide interrupt number of the first entry.
    first_line: u32,
    entries: Vec<MsixEntry>,
    control: u16,
    /// `true` after a failure to connect an entry has been logged.
    failure_logged: bool,
}

impl MsixTable {
    pub(super) fn new(machine: Arc<dyn PciBackend>, first_line: u32, entries: u16) -> io::Result<Self> {
        let entries = (0..entries).map(|_| {
            Ok(MsixEntry {
                message: MsiMessage::default(),
                control: ENTRY_MASKED,
                vector: Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?),
                connected: None,
            })
        });
        Ok(Self {
            machine,
            first_line,
            entries: entries.collect::<io::Result<_>>()?,
            control: 0,
            failure_logged: false,
        })
    }

    /// Returns the eventfd that raises interrupt `vector`, or `None` if the entry does not exist.
    pub(super) fn vector(&self, vector: u16) -> Option<Arc<EventFd>> {
        self.entries
            .get(usize::from(vector))
            .map(|entry| entry.vector.clone())
    }

    /// Returns the number of entries of the MSI-X table.
    pub(super) fn count(&self) -> usize {
        self.entries.len()
    }

    /// Handles a guest write to the message control register.
    pub(super) fn set_control(&mut self, control: u16) {
        let control = control & CONTROL_WRITABLE;
        if control != self.control {
            self.control = control;
            for entry in 0..self.entries.len() {
                self.update_route(entry);
            }
        }
    }

    /// Handles a guest read of the MSI-X table. Bytes beyond its end read as 0.
    pub(super) fn read_table(&self, at: usize, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let at = at + i;
            let entry = self.entries.get(at / ENTRY_BYTES);
            *byte = entry.map_or(0, |entry| entry.bytes()[at % ENTRY_BYTES]);
        }
    }

    /// Handles a guest write of any length at any offset of the MSI-X table.
    pub(super) fn write_table(&mut self, at: usize, data: &[u8]) {
        let mut rest = data;
        let mut at = at;
        while let Some(entry) = self.entries.get_mut(at / ENTRY_BYTES)
            && !rest.is_empty()
        {
            let inside = at % ENTRY_BYTES;
            let (now, later) = rest.split_at(rest.len().min(ENTRY_BYTES - inside));
            let mut bytes = entry.bytes();
            bytes[inside..inside + now.len()].copy_from_slice(now);
            entry.set_bytes(&bytes);
            self.update_route(at / ENTRY_BYTES);
            at += now.len();
            rest = later;
        }
    }

    /// Handles a guest read of the Pending Bit Array. The bit of an entry is set if it is masked
    /// and has a pending interrupt.
    pub(super) fn read_pending(&self, at: usize, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            let first = (at + i).saturating_mul(8);
            *byte = (0..8).fold(0, |bits, bit| {
                let pending = self
                    .entries
                    .get(first.saturating_add(bit))
                    .is_some_and(is_pending);
                bits | u8::from(pending) << bit
            });
        }
    }

    /// Writes the message control register, the table and the pending masked interrupts to `saved`,
    /// for a snapshot.
    pub(super) fn save(&self, saved: &mut SavedDevice) {
        saved.msix_control = self.control;
        saved.msix_table = self
            .entries
            .iter()
            .flat_map(MsixEntry::bytes)
            .collect::<Vec<u8>>()
            .into();
        let mut pending = vec![0; self.entries.len().div_ceil(8)];
        self.read_pending(0, &mut pending);
        saved.msix_pending = pending.into();
    }

    /// Restores a table from a snapshot and reconnects its entries. Returns `false` if the number
    /// of entries differs.
    pub(super) fn restore(&mut self, saved: &SavedDevice) -> bool {
        let pending = &saved.msix_pending.0;
        if saved.msix_table.0.len() != self.entries.len() * ENTRY_BYTES
            || pending.len() != self.entries.len().div_ceil(8)
        {
            return false;
        }
        self.write_table(0, &saved.msix_table.0);
        for (n, entry) in self.entries.iter().enumerate() {
            if pending[n / 8] >> (n % 8) & 1 != 0 {
                let _ = entry.vector.write(1);
            }
        }
        self.set_control(saved.msix_control);
        true
    }

    /// Restores the power-on state of the MSI-X table: no entry is connected, and no interrupt is
    /// pending.
    pub(super) fn reset(&mut self) {
        self.control = 0;
        for n in 0..self.entries.len() {
            self.entries[n].set_bytes(&[0; ENTRY_BYTES]);
            self.entries[n].control = ENTRY_MASKED;
            self.update_route(n);
            let _ = self.entries[n].vector.read();
        }
    }

    /// Connects entry `n` to its message or disconnects it, depending on the MSI-X enable bit and
    /// the mask bits of the function and the entry.
    fn update_route(&mut self, n: usize) {
        let Some((entry, line)) = self
            .entries
            .get_mut(n)
            .zip(u32::try_from(n).ok().map(|n| self.first_line + n))
        else {
            return;
        };
        let sends = self.control & CONTROL_WRITABLE == CONTROL_ENABLE && entry.control & ENTRY_MASKED == 0;
        let wanted = sends.then_some(entry.message);
        if wanted == entry.connected {
            return;
        }
        if entry.connected.take().is_some()
            && let Err(error) = self.machine.disconnect(line, &entry.vector)
        {
            guest_log!(Debug, "cannot connect interrupt {line}: {}", error_line(&error));
        }
        let Some(message) = wanted else {
            return;
        };
        // Deliver an interrupt that the device raised while the entry was disconnected. Drain the
        // eventfd first, because KVM may otherwise send the message twice.
        let pending = entry.vector.read().is_ok();
        match self.machine.connect(line, message, &entry.vector) {
            Ok(()) => {
                entry.connected = wanted;
                if pending {
                    let _ = entry.vector.write(1);
                }
            }
            Err(error) if !self.failure_logged => {
                self.failure_logged = true;
                log::error!("an interrupt cannot reach the guest: {}", error_line(&error));
            }
            Err(_) => {}
        }
    }
}

impl Drop for MsixTable {
    fn drop(&mut self) {
        self.reset();
    }
}

/// Returns whether `entry` is masked and has a pending interrupt. A connected entry is never
/// pending, because its eventfd is attached to KVM.
fn is_pending(entry: &MsixEntry) -> bool {
    // Write back the count that the read cleared. Concurrent signals of the device add to it.
    entry.connected.is_none()
        && entry
            .vector
            .read()
            .is_ok_and(|count| entry.vector.write(count).is_ok())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{BackendCall, MockPciBackend};
    use super::*;

    const ADDRESS: u64 = 0xFEE0_1000;

    fn table() -> (MsixTable, Arc<MockPciBackend>) {
        let machine = Arc::new(MockPciBackend::default());
        (MsixTable::new(machine.clone(), 10, 3).unwrap(), machine)
    }

    /// Programs a table entry like Linux: masks it, writes the message, and unmasks it.
    fn set(msix: &mut MsixTable, n: usize, data: u32) {
        msix.write_table(n * 16 + 12, &[1, 0, 0, 0]);
        msix.write_table(n * 16, &ADDRESS.to_le_bytes());
        msix.write_table(n * 16 + 8, &data.to_le_bytes());
        msix.write_table(n * 16 + 12, &[0, 0, 0, 0]);
    }

    fn message(data: u32) -> MsiMessage {
        MsiMessage {
            address: ADDRESS,
            data,
        }
    }

    #[test]
    fn msix_entry_is_connected_while_unmasked() {
        let (mut msix, machine) = table();
        set(&mut msix, 1, 0x41);
        assert_eq!(machine.take(), [], "messages are not on");
        msix.set_control(CONTROL_ENABLE | CONTROL_MASKED);
        assert_eq!(machine.take(), []);
        msix.set_control(CONTROL_ENABLE);
        assert_eq!(machine.take(), [BackendCall::Connect(11, message(0x41))]);
        msix.write_table(16 + 12, &[1]);
        assert_eq!(machine.take(), [BackendCall::Disconnect(11)]);
        set(&mut msix, 1, 0x42);
        assert_eq!(machine.take(), [BackendCall::Connect(11, message(0x42))]);
        // Change the message of an unmasked entry.
        msix.write_table(16 + 8, &[0x43]);
        assert_eq!(
            machine.take(),
            [
                BackendCall::Disconnect(11),
                BackendCall::Connect(11, message(0x43))
            ]
        );
        drop(msix);
        assert_eq!(machine.take(), [BackendCall::Disconnect(11)]);
    }

    #[test]
    fn masked_msix_entry_holds_pending_interrupt() {
        let (mut msix, machine) = table();
        msix.set_control(CONTROL_ENABLE);
        let vector = msix.vector(2).unwrap();
        vector.write(5).unwrap();
        let mut pending = [0; 8];
        for _ in 0..2 {
            msix.read_pending(0, &mut pending);
            assert_eq!(pending, [4, 0, 0, 0, 0, 0, 0, 0]);
        }
        set(&mut msix, 2, 7);
        assert_eq!(machine.take(), [BackendCall::Connect(12, message(7))]);
        assert_eq!(vector.read().unwrap(), 1, "sent once");
        msix.reset();
        vector.write(1).unwrap();
        msix.reset();
        msix.read_pending(0, &mut pending);
        assert_eq!(pending, [0; 8]);
    }

    #[test]
    fn failed_route_leaves_msix_entry_disconnected() {
        let (mut msix, machine) = table();
        machine.refuse(true);
        msix.set_control(CONTROL_ENABLE);
        set(&mut msix, 0, 1);
        machine.refuse(false);
        msix.write_table(12, &[0]);
        assert_eq!(machine.take(), [BackendCall::Connect(10, message(1))]);
    }

    #[test]
    fn any_access_is_safe() {
        let (mut msix, _machine) = table();
        msix.set_control(0xFFFF);
        for at in (0..64).chain([usize::MAX / 2, 4095]) {
            let mut data = [0xFF; 8];
            msix.write_table(at, &data);
            msix.read_table(at, &mut data);
            msix.read_pending(at, &mut data);
        }
        let mut first = [0; 16];
        msix.read_table(0, &mut first);
        assert_eq!(first[..4], [0xFC, 0xFF, 0xFF, 0xFF], "the lowest bits stay 0");
        assert_eq!(first[12..], [1, 0, 0, 0]);
    }
}
