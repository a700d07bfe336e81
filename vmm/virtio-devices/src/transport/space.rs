//! Configuration space of a PCI function with a type 0 header (PCI 3.0, 6.1).

/// Size of a PCI configuration space, in bytes.
pub(super) const SPACE_BYTES: usize = 256;

// Offsets of the registers in the configuration space header, in bytes.
pub(super) const VENDOR_ID: usize = 0x00;
pub(super) const DEVICE_ID: usize = 0x02;
pub(super) const COMMAND: usize = 0x04;
pub(super) const STATUS: usize = 0x06;
pub(super) const REVISION: usize = 0x08;
pub(super) const CLASS: usize = 0x09;
pub(super) const BAR0: usize = 0x10;
pub(super) const SUBSYSTEM_VENDOR_ID: usize = 0x2C;
pub(super) const SUBSYSTEM_ID: usize = 0x2E;
pub(super) const CAPABILITIES: usize = 0x34;
/// Length of the configuration space header, in bytes.
pub(super) const HEADER_END: usize = 0x40;

/// Memory space enable bit of the command register.
pub(super) const COMMAND_MEMORY: u16 = 1 << 1;
/// Bus master enable bit of the command register. MSI-X messages require it.
pub(super) const COMMAND_MASTER: u16 = 1 << 2;
/// INTx disable bit of the command register. Drivers set it even though the function has no INTx.
pub(super) const COMMAND_NO_INTX: u16 = 1 << 10;
/// Capabilities list bit of the status register.
pub(super) const STATUS_CAPABILITIES: u16 = 1 << 4;

/// Values of the identification registers of a PCI function.
#[derive(Clone, Copy, Debug)]
pub(super) struct PciIdentity {
    pub vendor: u16,
    pub device: u16,
    pub revision: u8,
    /// Class code: base class, sub-class and programming interface.
    pub class: [u8; 3],
}

/// Contents of a PCI configuration space, and which of its bits the guest can write.
#[derive(Clone, Debug)]
pub(super) struct PciConfigSpace {
    bytes: [u8; SPACE_BYTES],
    writable: [u8; SPACE_BYTES],
    next_capability: usize,
}

impl PciConfigSpace {
    pub(super) fn new(who: PciIdentity) -> Self {
        let mut space = Self {
            bytes: [0; SPACE_BYTES],
            writable: [0; SPACE_BYTES],
            next_capability: HEADER_END,
        };
        let [base, sub, interface] = who.class;
        space.set(VENDOR_ID, &who.vendor.to_le_bytes());
        space.set(DEVICE_ID, &who.device.to_le_bytes());
        space.set(REVISION, &[who.revision]);
        space.set(CLASS, &[interface, sub, base]);
        space
    }

    /// Sets the register at offset `at` to `value`. Panics if `value` extends beyond the space.
    pub(super) fn set(&mut self, at: usize, value: &[u8]) {
        self.bytes[at..at + value.len()].copy_from_slice(value);
    }

    /// Makes the bits that are set in `mask` guest-writable, in the register at offset `at`.
    pub(super) fn set_writable(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }

    /// Adds a capability whose ID and next pointer are followed by `body`. Returns its offset.
    pub(super) fn add_capability(&mut self, id: u8, body: &[u8]) -> usize {
        let at = self.next_capability;
        self.set(at, &[id, self.bytes[CAPABILITIES]]);
        self.set(at + 2, body);
        // Capabilities are prepended to the list.
        self.bytes[CAPABILITIES] = u8::try_from(at).unwrap_or(0);
        let status = self.u16(STATUS) | STATUS_CAPABILITIES;
        self.set(STATUS, &status.to_le_bytes());
        self.next_capability = (at + 2 + body.len()).next_multiple_of(4);
        at
    }

    pub(super) fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    pub(super) fn u32(&self, at: usize) -> u32 {
        u32::from(self.u16(at)) | u32::from(self.u16(at + 2)) << 16
    }

    /// Handles a guest read of any length at any offset of the configuration space. Bytes beyond
    /// its end read as 0.
    pub(super) fn read(&self, at: usize, data: &mut [u8]) {
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = self.bytes.get(at + i).copied().unwrap_or(0);
        }
    }

    /// Handles a guest write of any length at any offset of the configuration space.
    pub(super) fn write(&mut self, at: usize, data: &[u8]) {
        for (i, &new) in data.iter().enumerate() {
            if let (Some(byte), Some(mask)) = (self.bytes.get_mut(at + i), self.writable.get(at + i)) {
                *byte = (*byte & !mask) | (new & mask);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> PciConfigSpace {
        let mut space = PciConfigSpace::new(PciIdentity {
            vendor: 0x1AF4,
            device: 0x1044,
            revision: 1,
            class: [0xFF, 0x01, 0x02],
        });
        space.set_writable(BAR0, &0xFFFF_8000u32.to_le_bytes());
        space
    }

    #[test]
    fn only_writable_header_bits_change() {
        let mut s = space();
        assert_eq!((s.u32(VENDOR_ID), s.u32(REVISION)), (0x1044_1AF4, 0xFF01_0201));
        s.write(0, &[0xFF; SPACE_BYTES]);
        assert_eq!((s.u32(VENDOR_ID), s.u32(BAR0)), (0x1044_1AF4, 0xFFFF_8000));
        // A one-byte write leaves the other bytes of the register unchanged.
        s.write(BAR0 + 3, &[0xE0]);
        assert_eq!(s.u32(BAR0), 0xE0FF_8000);
    }

    #[test]
    fn accesses_across_the_end_are_safe() {
        let mut s = space();
        for at in [252, 255, 256, usize::MAX - 8] {
            let mut data = [0xAA; 8];
            s.write(at, &data);
            s.read(at, &mut data);
            assert_eq!(data, [0; 8], "{at}");
        }
    }

    #[test]
    fn capabilities_form_a_list() {
        let mut s = space();
        assert_eq!((s.u16(STATUS), s.u16(CAPABILITIES)), (0, 0));
        let first = s.add_capability(0x11, &[0; 10]);
        let second = s.add_capability(0x09, &[1, 2, 3]);
        assert_eq!((first, second), (0x40, 0x4C));
        assert_eq!(s.u16(STATUS), STATUS_CAPABILITIES);
        let mut at = usize::from(s.u16(CAPABILITIES));
        let mut ids = Vec::new();
        while at != 0 {
            let [id, next] = s.u16(at).to_le_bytes();
            ids.push(id);
            at = next.into();
        }
        assert_eq!(ids, [0x09, 0x11]);
    }
}
