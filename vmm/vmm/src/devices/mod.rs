//! The devices of the machine and the bus that dispatches accesses to them.
//!
//! KVM emulates the interrupt controllers and the timer. All other devices use I/O ports, except
//! the virtio devices, which are functions of a PCI bus with MMIO regions. Accesses of any width to
//! any port or address are safe. Where no device exists, reads return all ones and writes are
//! ignored.

mod acpi_pm;
mod cmos;
pub mod cpu_plug;
mod fw_cfg;
pub mod generation;
mod i8042;
mod outcome;
pub mod ports;
pub mod saved;
mod serial;

use std::io::{self, Write};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_devices::transport::bus::PciBus;
use vmm_sys_util::eventfd::EventFd;

pub use serial::SerialPort;

use acpi_pm::AcpiPm;
pub use acpi_pm::SciLine;
use cmos::Cmos;
use cpu_plug::CpuHotplugDevice;
use fw_cfg::FwCfg;
use generation::GenerationId;
use i8042::I8042;
pub use outcome::DeviceWriteOutcome;

use crate::numbers::VcpuCountRange;

/// Bit of system control port A that resets the processor when a one is written.
const CONTROL_A_RESET: u8 = 1 << 0;
/// Bit of system control port A that enables address line A20. Reads as one.
const CONTROL_A_A20: u8 = 1 << 1;

/// The port and MMIO buses, shared by all vCPU threads. Each device has a separate lock, which is
/// held only for the duration of one access.
pub struct DeviceBus {
    ram_bytes: u64,
    cpus: VcpuCountRange,
    serial: Arc<SerialPort>,
    cmos: Mutex<Cmos>,
    i8042: Mutex<I8042>,
    fw_cfg: Mutex<FwCfg>,
    pm: Mutex<AcpiPm>,
    /// CPU hot-plug registers, if the machine has them.
    cpu_plug: Option<Arc<CpuHotplugDevice>>,
    generation: GenerationId,
    /// PCI bus, if the machine has one.
    pci: Option<PciBus>,
    /// `true` if the guest cannot end the VM through the debug-exit port.
    no_debug_exit: bool,
    /// Last value written to the reset control register.
    reset_control: AtomicU8,
    /// Last value written to system control port A.
    control_a: AtomicU8,
    /// Number of reads of system control port B. Each read toggles the port's refresh bit.
    control_b_reads: AtomicU8,
    /// Number of port and MMIO accesses that no device claims.
    unclaimed: AtomicU64,
}

/// Locks a device. Ignores poisoning, so the machine survives a thread that panicked with the lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DeviceBus {
    /// Creates the devices. The output of the serial port goes to `console`. The guest can read
    /// `ram_bytes` and `cpus` from CMOS and fw_cfg.
    pub fn new(console: Box<dyn Write + Send>, ram_bytes: u64, cpus: VcpuCountRange) -> io::Result<Self> {
        Ok(DeviceBus {
            ram_bytes,
            cpus,
            serial: Arc::new(SerialPort::new(console)?),
            cmos: Mutex::new(Cmos::new(ram_bytes, cpus.present())),
            i8042: Mutex::new(I8042::default()),
            fw_cfg: Mutex::new(FwCfg::new(ram_bytes, cpus)),
            pm: Mutex::new(AcpiPm::default()),
            cpu_plug: cpus
                .can_change()
                .then(|| CpuHotplugDevice::new(cpus.present(), cpus.max()).map(Arc::new))
                .transpose()?,
            generation: GenerationId::new()?,
            pci: None,
            no_debug_exit: false,
            reset_control: AtomicU8::new(0),
            control_a: AtomicU8::new(0),
            control_b_reads: AtomicU8::new(0),
            unclaimed: AtomicU64::new(0),
        })
    }

    /// Sets the callback for the level of the system control interrupt.
    pub fn connect_sci_to(&self, sci: SciLine) {
        lock(&self.pm).connect_sci(sci);
    }

    /// Presses the power button. Returns `false`, without an effect, if the guest has not enabled
    /// the power button event.
    pub fn press_power_button(&self) -> bool {
        lock(&self.pm).press_power_button()
    }

    /// Resets all devices to their initial state. No vCPU may run.
    pub fn reset(&self) {
        self.serial.reset();
        *lock(&self.cmos) = Cmos::new(self.ram_bytes, self.cpus.present());
        *lock(&self.i8042) = I8042::default();
        *lock(&self.fw_cfg) = FwCfg::new(self.ram_bytes, self.cpus);
        lock(&self.pm).reset();
        if let Some(plug) = &self.cpu_plug {
            plug.reset(self.cpus.present());
        }
        self.reset_control.store(0, Ordering::Relaxed);
        self.control_a.store(0, Ordering::Relaxed);
        self.control_b_reads.store(0, Ordering::Relaxed);
        if let Some(pci) = &self.pci {
            pci.reset();
        }
    }

    /// Removes the debug-exit device, with which the guest can end the VM.
    #[must_use]
    pub fn without_debug_exit(mut self) -> Self {
        self.no_debug_exit = true;
        self
    }

    /// Adds a PCI bus to the machine.
    #[must_use]
    pub fn with_pci(mut self, pci: PciBus) -> Self {
        self.pci = Some(pci);
        self
    }

    /// Returns the PCI bus, if the machine has one.
    pub fn pci(&self) -> Option<&PciBus> {
        self.pci.as_ref()
    }

    /// Returns the serial port, which accepts console input.
    pub fn serial(&self) -> &Arc<SerialPort> {
        &self.serial
    }

    /// Returns the eventfd to register with KVM as an irqfd for [`ports::COM1_IRQ`].
    pub fn serial_irq(&self) -> &EventFd {
        self.serial.irq()
    }

    /// Returns the CPU hot-plug device, or `None` if the machine has no CPU hot-plug.
    pub fn cpu_plug(&self) -> Option<&Arc<CpuHotplugDevice>> {
        self.cpu_plug.as_ref()
    }

    /// Returns the VM generation ID and its interrupt.
    pub fn generation(&self) -> &GenerationId {
        &self.generation
    }

    /// Returns the number of port and MMIO accesses that no device claims.
    pub fn unclaimed_accesses(&self) -> u64 {
        self.unclaimed.load(Ordering::Relaxed)
    }

    /// Handles one IN of `data.len()` bytes (1, 2 or 4) from `port`.
    #[expect(clippy::cast_possible_truncation, reason = "an access has at most 8 bytes")]
    pub fn io_in(&self, port: u16, data: &mut [u8]) {
        match port {
            ports::FW_CFG_SELECT | ports::FW_CFG_DATA => lock(&self.fw_cfg).read(port, data),
            ports::PCI_ADDRESS..=ports::PCI_DATA_END if port != ports::RESET_CONTROL => match &self.pci {
                Some(pci) => pci.read_port(port, data),
                None => data.fill(0xFF),
            },
            _ => {
                for (i, byte) in data.iter_mut().enumerate() {
                    *byte = self.in_byte(port.wrapping_add(i as u16));
                }
            }
        }
    }

    /// Handles one OUT of `data.len()` bytes (1, 2 or 4) to `port`.
    #[expect(clippy::cast_possible_truncation, reason = "an access has at most 8 bytes")]
    pub fn io_out(&self, port: u16, data: &[u8]) -> DeviceWriteOutcome {
        match port {
            p if ports::DEBUG_EXIT_PORTS.contains(&p) && !self.no_debug_exit => {
                let code = data.first().copied().unwrap_or(0);
                DeviceWriteOutcome::Exit((code << 1) | 1)
            }
            ports::FW_CFG_SELECT | ports::FW_CFG_DATA => {
                lock(&self.fw_cfg).write(port, data);
                DeviceWriteOutcome::Continue
            }
            ports::PM1A_CONTROL if data.len() >= 2 => {
                lock(&self.pm).write_control(u16::from_le_bytes([data[0], data[1]]))
            }
            // A wide write to the address register covers the reset control port but must not reset
            // the machine.
            ports::PCI_ADDRESS | ports::PCI_DATA..=ports::PCI_DATA_END => {
                if let Some(pci) = &self.pci {
                    pci.write_port(port, data);
                }
                DeviceWriteOutcome::Continue
            }
            _ => {
                for (i, byte) in data.iter().enumerate() {
                    let outcome = self.out_byte(port.wrapping_add(i as u16), *byte);
                    if outcome != DeviceWriteOutcome::Continue {
                        return outcome;
                    }
                }
                DeviceWriteOutcome::Continue
            }
        }
    }

    /// Handles a string IN (`rep ins`). `data` receives several accesses of `width` bytes each to
    /// one port.
    pub fn io_in_string(&self, port: u16, width: usize, data: &mut [u8]) {
        for access in data.chunks_mut(width.clamp(1, 4)) {
            self.io_in(port, access);
        }
    }

    /// Handles a string OUT (`rep outs`). Stops at the first access whose outcome is not
    /// [`DeviceWriteOutcome::Continue`].
    pub fn io_out_string(&self, port: u16, width: usize, data: &[u8]) -> DeviceWriteOutcome {
        for access in data.chunks(width.clamp(1, 4)) {
            let outcome = self.io_out(port, access);
            if outcome != DeviceWriteOutcome::Continue {
                return outcome;
            }
        }
        DeviceWriteOutcome::Continue
    }

    /// Handles an MMIO read. Fills `data` with ones if no PCI function claims the address.
    pub fn mmio_read(&self, address: u64, data: &mut [u8]) {
        if self
            .pci
            .as_ref()
            .is_some_and(|pci| pci.read_memory(address, data))
        {
            return;
        }
        self.unclaimed.fetch_add(1, Ordering::Relaxed);
        data.fill(0xFF);
    }

    /// Handles an MMIO write. Ignores the write if no PCI function claims the address.
    pub fn mmio_write(&self, address: u64, data: &[u8]) -> DeviceWriteOutcome {
        if !self
            .pci
            .as_ref()
            .is_some_and(|pci| pci.write_memory(address, data))
        {
            self.unclaimed.fetch_add(1, Ordering::Relaxed);
        }
        DeviceWriteOutcome::Continue
    }

    #[expect(clippy::cast_possible_truncation, reason = "the serial port has 8 registers")]
    fn in_byte(&self, port: u16) -> u8 {
        const COM1_END: u16 = ports::COM1 + ports::COM1_LEN - 1;
        const PM_END: u16 = ports::PM1A_CONTROL + ports::PM1A_CONTROL_LEN as u16 - 1;
        const CPU_PLUG_END: u16 = ports::CPU_PLUG + ports::CPU_PLUG_LEN - 1;
        match port {
            ports::COM1..=COM1_END => self.serial.read((port - ports::COM1) as u8),
            ports::I8042_DATA => lock(&self.i8042).read_data(),
            ports::I8042_COMMAND => lock(&self.i8042).read_status(),
            ports::SYSTEM_CONTROL_B => {
                // Bit 4 toggles with memory refresh, and bit 5 is timer 2's output. Loops that wait
                // for either bit must terminate. KVM's PIT normally handles this port.
                let toggle = self.control_b_reads.fetch_add(1, Ordering::Relaxed) & 1;
                0x20 | (toggle << 4)
            }
            ports::SYSTEM_CONTROL_A => self.control_a.load(Ordering::Relaxed) | CONTROL_A_A20,
            ports::CMOS_DATA => lock(&self.cmos).read(),
            ports::POST => 0,
            ports::RESET_CONTROL => self.reset_control.load(Ordering::Relaxed),
            ports::PM1A_EVENT..=PM_END => lock(&self.pm).read_byte(port - ports::PM1A_EVENT),
            ports::CPU_PLUG..=CPU_PLUG_END if let Some(plug) = &self.cpu_plug => {
                plug.read_byte(port - ports::CPU_PLUG)
            }
            _ => {
                self.unclaimed.fetch_add(1, Ordering::Relaxed);
                0xFF
            }
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "the serial port has 8 registers")]
    fn out_byte(&self, port: u16, value: u8) -> DeviceWriteOutcome {
        const COM1_END: u16 = ports::COM1 + ports::COM1_LEN - 1;
        const PM_END: u16 = ports::PM1A_CONTROL + ports::PM1A_CONTROL_LEN as u16 - 1;
        const CPU_PLUG_END: u16 = ports::CPU_PLUG + ports::CPU_PLUG_LEN - 1;
        match port {
            ports::COM1..=COM1_END => {
                self.serial.write((port - ports::COM1) as u8, value);
                DeviceWriteOutcome::Continue
            }
            ports::I8042_DATA => lock(&self.i8042).write_data(value),
            ports::I8042_COMMAND => lock(&self.i8042).write_command(value),
            ports::CMOS_INDEX => {
                lock(&self.cmos).select(value);
                DeviceWriteOutcome::Continue
            }
            ports::CMOS_DATA => {
                lock(&self.cmos).write(value);
                DeviceWriteOutcome::Continue
            }
            ports::SYSTEM_CONTROL_A => {
                self.control_a.store(value & !CONTROL_A_RESET, Ordering::Relaxed);
                if value & CONTROL_A_RESET != 0 {
                    DeviceWriteOutcome::Reset
                } else {
                    DeviceWriteOutcome::Continue
                }
            }
            ports::RESET_CONTROL => {
                self.reset_control.store(value & !0x04, Ordering::Relaxed);
                // Bit 2 is "reset CPU". The other bits select the reset type.
                if value & 0x04 != 0 {
                    DeviceWriteOutcome::Reset
                } else {
                    DeviceWriteOutcome::Continue
                }
            }
            ports::PM1A_EVENT..=PM_END => lock(&self.pm).write_byte(port - ports::PM1A_EVENT, value),
            ports::CPU_PLUG..=CPU_PLUG_END if let Some(plug) = &self.cpu_plug => {
                plug.write_byte(port - ports::CPU_PLUG, value);
                DeviceWriteOutcome::Continue
            }
            ports::POST | ports::SYSTEM_CONTROL_B => DeviceWriteOutcome::Continue,
            _ => {
                self.unclaimed.fetch_add(1, Ordering::Relaxed);
                DeviceWriteOutcome::Continue
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bus() -> DeviceBus {
        DeviceBus::new(Box::new(io::sink()), 64 << 20, "3".parse().unwrap()).unwrap()
    }

    fn inb(bus: &DeviceBus, port: u16) -> u8 {
        let mut b = [0];
        bus.io_in(port, &mut b);
        b[0]
    }

    #[test]
    fn unclaimed_port_reads_all_ones() {
        let bus = bus();
        for width in [1, 2, 4] {
            let mut data = vec![0; width];
            bus.io_in(0x2F8, &mut data);
            assert_eq!(data, vec![0xFF; width]);
            bus.io_in(0xCF8, &mut data);
            assert_eq!(data, vec![0xFF; width]);
            bus.io_in(0xCFC, &mut data);
            assert_eq!(data, vec![0xFF; width]);
            bus.mmio_read(0xFED0_0000, &mut data);
            assert_eq!(data, vec![0xFF; width]);
        }
        let mut wrap = [0; 4];
        bus.io_in(0xFFFE, &mut wrap);
    }

    #[test]
    fn debug_exit_encodes_the_code() {
        let bus = bus();
        assert_eq!(bus.io_out(0xF4, &[0]), DeviceWriteOutcome::Exit(1));
        assert_eq!(bus.io_out(0xF4, &[0x10, 0, 0, 0]), DeviceWriteOutcome::Exit(33));
        assert_eq!(bus.io_out(0xF4, &[0xFF]), DeviceWriteOutcome::Exit(0xFF));
        let bus = bus.without_debug_exit();
        for port in 0xF4..=0xF7 {
            assert_eq!(bus.io_out(port, &[0x10, 0, 0, 0]), DeviceWriteOutcome::Continue);
        }
    }

    #[test]
    fn all_reset_ports_reset_machine() {
        assert_eq!(bus().io_out(0x92, &[0x03]), DeviceWriteOutcome::Reset);
        assert_eq!(bus().io_out(0x64, &[0xFE]), DeviceWriteOutcome::Reset);
        assert_eq!(bus().io_out(0xCF9, &[0x02]), DeviceWriteOutcome::Continue);
        assert_eq!(bus().io_out(0xCF9, &[0x06]), DeviceWriteOutcome::Reset);
        assert_eq!(
            bus().io_out(0xCF8, &[0, 0x06, 0, 0x80]),
            DeviceWriteOutcome::Continue
        );
        let b = bus();
        assert_eq!(b.io_out(0x64, &[0xD1]), DeviceWriteOutcome::Continue);
        assert_eq!(b.io_out(0x60, &[0xDE]), DeviceWriteOutcome::Reset);
    }

    /// The bit for A20 always reads as one, because code that enables A20 through port 0x92 waits
    /// for this.
    #[test]
    fn a20_is_enabled_and_control_a_keeps_other_bits() {
        let b = bus();
        assert_eq!(inb(&b, 0x92), 0x02);
        assert_eq!(b.io_out(0x92, &[0xC2]), DeviceWriteOutcome::Continue);
        assert_eq!(inb(&b, 0x92), 0xC2);
        b.io_out(0x92, &[0x00]);
        assert_eq!(inb(&b, 0x92), 0x02);
        assert_eq!(b.unclaimed_accesses(), 0);
    }

    #[test]
    fn soft_off_requires_sleep_type_and_enable() {
        let b = bus();
        assert_eq!(b.io_out(0x604, &[0x00, 0x00]), DeviceWriteOutcome::Continue);
        assert_eq!(
            b.io_out(0x604, &(3u16 << 10 | 1 << 13).to_le_bytes()),
            DeviceWriteOutcome::Continue
        );
        assert_eq!(
            b.io_out(0x604, &(1u16 << 13).to_le_bytes()),
            DeviceWriteOutcome::PowerOff
        );
        // ACPICA may access the register byte by byte.
        assert_eq!(b.io_out(0x605, &[0x20]), DeviceWriteOutcome::PowerOff);
        // ACPI is always enabled: SCI_EN reads as one.
        assert_eq!(inb(&b, 0x604) & 1, 1);
    }

    #[test]
    fn fw_cfg_answers_signature_processors_and_memory() {
        let b = bus();
        let read = |key: u16, n: usize| {
            b.io_out(0x510, &key.to_le_bytes());
            (0..n).map(|_| inb(&b, 0x511)).collect::<Vec<_>>()
        };
        assert_eq!(read(0, 4), b"QEMU");
        assert_eq!(read(5, 4), [3, 0, 0, 0]);
        assert_eq!(read(3, 8), (64u64 << 20).to_le_bytes());
        assert_eq!(read(0x7777, 2), [0, 0]);
    }

    /// A machine without CPU hot-plug has no hot-plug registers. With CPU hot-plug, fw_cfg reports
    /// the present and the maximum number of processors.
    #[test]
    fn cpu_plug_registers_exist_only_with_hotplug() {
        assert_eq!(inb(&bus(), ports::CPU_PLUG + 1), 0xFF);
        let b = DeviceBus::new(Box::new(io::sink()), 64 << 20, "2,max=5".parse().unwrap()).unwrap();
        for (vcpu, state) in [(0, 1), (1, 1), (2, 0), (5, 0)] {
            b.io_out(ports::CPU_PLUG, &[vcpu]);
            assert_eq!(inb(&b, ports::CPU_PLUG + 1), state, "{vcpu}");
        }
        assert_eq!(b.unclaimed_accesses(), 0);
        for (key, n) in [(5u16, 2), (15, 5)] {
            b.io_out(0x510, &key.to_le_bytes());
            assert_eq!(inb(&b, 0x511), n);
        }
    }

    #[test]
    fn string_io_repeats_port_access() {
        let out = crate::console::testing::SharedBuffer::default();
        let b = DeviceBus::new(Box::new(out.clone()), 16 << 20, "1".parse().unwrap()).unwrap();
        assert_eq!(b.io_out_string(0x3F8, 1, b"hello"), DeviceWriteOutcome::Continue);
        assert_eq!(out.contents(), b"hello");
        b.io_out(0x510, &0u16.to_le_bytes());
        let mut data = [0; 4];
        b.io_in_string(0x511, 1, &mut data);
        assert_eq!(&data, b"QEMU");
    }

    proptest! {
        #[test]
        fn any_access_is_safe(
            accesses in proptest::collection::vec((any::<u16>(), 0usize..9, any::<u64>(), any::<bool>()), 0..200)
        ) {
            let b = bus();
            for (port, width, value, write) in accesses {
                let mut data = [value.to_le_bytes(), value.to_le_bytes()].concat();
                data.truncate(width);
                if write { b.io_out(port, &data); } else { b.io_in(port, &mut data); }
            }
        }

        #[test]
        fn any_access_to_a_device_is_safe(
            accesses in proptest::collection::vec(
                (proptest::sample::select(vec![0xCD8u16, 0xCD9, 0xCDC, 0xCE0, 0xCE3, 0x60, 0x61, 0x64, 0x92, 0x70, 0x71, 0x3F8, 0x3F9, 0x3FA, 0x3FB, 0x3FC, 0x3FD, 0x3FE, 0x510, 0x511, 0x600, 0x602, 0x603, 0xCF9]),
                 1usize..5, any::<u32>(), any::<bool>()), 0..400)
        ) {
            let b = DeviceBus::new(Box::new(io::sink()), 64 << 20, "3,max=5".parse().unwrap()).unwrap();
            for (port, width, value, write) in accesses {
                let mut data = value.to_le_bytes()[..width.min(4)].to_vec();
                if write { b.io_out(port, &data); } else { b.io_in(port, &mut data); }
            }
        }
    }
}
