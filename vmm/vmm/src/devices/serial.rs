//! First serial port of the machine: the 16550 of vm-superio, with a lock and an eventfd as its
//! interrupt.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use perf_core::guest_log;
use snapshot::state::SavedSerial;
use vm_superio::serial::{SerialEvents, SerialState};
use vm_superio::{Serial, Trigger};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::lock;
use crate::console::ConsoleInputSink;

struct Irq(Arc<EventFd>);

impl Trigger for Irq {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

/// Notifies the sender of console input when the guest has emptied the receive buffer.
struct InputRoom(Arc<EventFd>);

impl SerialEvents for InputRoom {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        // The write fails only if the counter is full, and then a notification is already pending.
        let _ = self.0.write(1);
    }
}

type Uart = Serial<Irq, InputRoom, Box<dyn Write + Send>>;

/// The first serial port.
pub struct SerialPort {
    uart: Mutex<Uart>,
    irq: Arc<EventFd>,
    input_room: Arc<EventFd>,
    /// `true` if the sender of console input must be asked to try again when the lock is released.
    input_is_waiting: AtomicBool,
}

impl SerialPort {
    /// Creates a serial port that writes its output to `out`.
    pub(super) fn new(out: Box<dyn Write + Send>) -> io::Result<Self> {
        let irq = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let input_room = Arc::new(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?);
        let uart = Serial::with_events(Irq(irq.clone()), InputRoom(input_room.clone()), out);
        Ok(SerialPort {
            uart: Mutex::new(uart),
            irq,
            input_room,
            input_is_waiting: AtomicBool::new(false),
        })
    }

    /// Resets the registers of the port. Unread input is lost; the output stays connected.
    pub(super) fn reset(&self) {
        let mut uart = lock(&self.uart);
        let out = std::mem::replace(uart.writer_mut(), Box::new(io::sink()));
        *uart = Serial::with_events(Irq(self.irq.clone()), InputRoom(self.input_room.clone()), out);
        drop(uart);
        self.input_is_waiting.store(true, Ordering::SeqCst);
        self.wake_waiting_input();
    }

    /// Returns the state of the port for a snapshot.
    pub(super) fn save(&self) -> SavedSerial {
        let state = lock(&self.uart).state();
        SavedSerial {
            registers: [
                state.baud_divisor_low,
                state.baud_divisor_high,
                state.interrupt_enable,
                state.interrupt_identification,
                state.line_control,
                state.line_status,
                state.modem_control,
                state.modem_status,
                state.scratch,
            ],
            input: state.in_buffer.into(),
        }
    }

    /// Restores the state of the port from a snapshot; the output stays connected. Returns `false`
    /// if the state contains more input than the port can buffer.
    pub(super) fn restore(&self, saved: &SavedSerial) -> bool {
        let [low, high, ier, iir, lcr, lsr, mcr, msr, scratch] = saved.registers;
        let state = SerialState {
            baud_divisor_low: low,
            baud_divisor_high: high,
            interrupt_enable: ier,
            interrupt_identification: iir,
            line_control: lcr,
            line_status: lsr,
            modem_control: mcr,
            modem_status: msr,
            scratch,
            in_buffer: saved.input.0.clone(),
        };
        let mut uart = lock(&self.uart);
        let out = std::mem::replace(uart.writer_mut(), Box::new(io::sink()));
        let events = InputRoom(self.input_room.clone());
        match Serial::from_state(&state, Irq(self.irq.clone()), events, out) {
            Ok(restored) => {
                *uart = restored;
                true
            }
            Err(_) => false,
        }
    }

    /// Returns the eventfd of the port's interrupt, to be registered with KVM.
    pub fn irq(&self) -> &EventFd {
        &self.irq
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, Uart>> {
        let attempt = || match self.uart.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(e)) => Some(PoisonError::into_inner(e)),
            Err(TryLockError::WouldBlock) => None,
        };
        attempt().or_else(|| {
            // Try again after setting the flag, because the lock may have been released before its
            // holder could see the flag.
            self.input_is_waiting.store(true, Ordering::SeqCst);
            attempt()
        })
    }

    /// Notifies the sender of console input if the sender found the port locked. Must be called
    /// after the lock is released.
    fn wake_waiting_input(&self) {
        if self.input_is_waiting.swap(false, Ordering::SeqCst) {
            let _ = self.input_room.write(1);
        }
    }

    pub(super) fn read(&self, offset: u8) -> u8 {
        let value = lock(&self.uart).read(offset);
        self.wake_waiting_input();
        value
    }

    pub(super) fn write(&self, offset: u8, value: u8) {
        // Output that cannot be delivered is lost, as on an unconnected line.
        if let Err(e) = lock(&self.uart).write(offset, value) {
            guest_log!(Debug, "serial port: {e}");
        }
        // In loopback mode the port accepts no input. This write may have ended loopback mode, so
        // the sender of input must try again.
        if offset == MODEM_CONTROL {
            self.input_is_waiting.store(true, Ordering::SeqCst);
        }
        self.wake_waiting_input();
    }
}

impl ConsoleInputSink for SerialPort {
    /// Passes input to the port. Returns 0 instead of waiting if a vCPU holds the lock. The vCPU
    /// may wait for a slow console with the lock held, and only the thread that calls this method
    /// can end that wait.
    fn send(&self, bytes: &[u8]) -> usize {
        let Some(mut uart) = self.try_lock() else { return 0 };
        let room = uart.fifo_capacity().min(bytes.len());
        if room == 0 {
            return 0;
        }
        // After the check of the free space, only the interrupt's eventfd can fail. Its counter is
        // then full, so an interrupt is pending and the bytes are buffered.
        uart.enqueue_raw_bytes(&bytes[..room]).unwrap_or(room)
    }

    /// Returns the eventfd that is written when the guest has read all input.
    fn space_event(&self) -> &EventFd {
        &self.input_room
    }
}

/// Register offset of the modem control register.
const MODEM_CONTROL: u8 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn port() -> SerialPort {
        SerialPort::new(Box::new(io::sink())).unwrap()
    }

    #[test]
    fn serial_input_raises_irq_and_signals_room() {
        let port = port();
        port.write(1, 1); // received data interrupt on
        assert_eq!(port.send(b"ab"), 2);
        assert_eq!(port.irq().read().unwrap(), 1);
        assert_eq!(port.read(5) & 1, 1);
        assert_eq!(port.read(0), b'a');
        assert!(port.space_event().read().is_err(), "there is still a byte");
        assert_eq!(port.read(0), b'b');
        assert_eq!(port.space_event().read().unwrap(), 1);
        assert_eq!(port.read(5) & 1, 0);
    }

    #[test]
    fn serial_input_accepts_only_free_space() {
        let port = port();
        let taken = port.send(&[0x55; 1000]);
        assert!(taken > 0 && taken < 1000);
        assert_eq!(port.send(b"x"), 0);
    }

    #[test]
    fn serial_reset_restores_initial_state() {
        let port = port();
        port.write(4, 0x10);
        port.write(1, 1);
        assert_eq!(port.send(b"x"), 0);
        port.reset();
        assert_eq!((port.read(1), port.read(4)), (0, 8));
        assert!(port.input_room.read().is_ok(), "who waits may try again");
        assert_eq!(port.send(b"x"), 1);
    }

    #[test]
    fn serial_loopback_rejects_input() {
        let port = port();
        port.write(4, 0x10);
        assert_eq!(port.send(b"x"), 0);
    }
}
