//! Orderly shutdown of a VM on signals.
//!
//! SIGTERM first presses the guest's power button, as service managers expect. A guest that ignores
//! the button or exceeds the time limit is powered off.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use vmm::devices::DeviceBus;
use vmm::vcpu::control::{VmRunControl, VmRunState, VmStopReason};
use vmm_sys_util::timerfd::TimerFd;

use crate::background::ServiceNotifier;
use operator::signals::StopSignals;

/// Handler of stop signals, which gives the guest a limited time to power off.
pub struct StopHandler {
    signals: StopSignals,
    timer: TimerFd,
    timeout: Duration,
    /// Stop signal in response to which the power button was pressed, if any.
    pressed: Option<i32>,
    control: Arc<VmRunControl>,
    bus: Arc<DeviceBus>,
    manager: Arc<ServiceNotifier>,
}

impl StopHandler {
    /// Creates the handler for a VM whose guest has `timeout` to power off.
    ///
    /// # Errors
    /// Returns the error of timerfd_create(2).
    pub fn new(
        signals: StopSignals,
        timeout: Duration,
        control: Arc<VmRunControl>,
        bus: Arc<DeviceBus>,
        manager: Arc<ServiceNotifier>,
    ) -> io::Result<Self> {
        Ok(Self {
            signals,
            timer: TimerFd::new().map_err(|e| io::Error::from_raw_os_error(e.errno()))?,
            timeout,
            pressed: None,
            control,
            bus,
            manager,
        })
    }

    /// Returns the descriptors that the main loop must poll.
    pub fn fds(&self) -> [RawFd; 2] {
        [self.signals.as_raw_fd(), self.timer.as_raw_fd()]
    }

    /// Handles a readable descriptor. Returns `false` if the descriptor belongs to another
    /// component.
    pub fn serve(&mut self, fd: RawFd) -> bool {
        if fd == self.signals.as_raw_fd() {
            if let Some(signal) = self.signals.take() {
                self.manager.stopping();
                self.take(signal);
            }
        } else if fd == self.timer.as_raw_fd() {
            let _ = self.timer.wait();
            if let Some(signal) = self.pressed {
                log::warn!(
                    "the guest did not power off within {} s after its power button was pressed; \
                    the VM is terminated",
                    self.timeout.as_secs_f64()
                );
                self.control.stop(VmStopReason::Signal(signal));
            }
        } else {
            return false;
        }
        true
    }

    fn take(&mut self, signal: i32) {
        let asks = signal == libc::SIGTERM && self.pressed.is_none() && !self.timeout.is_zero();
        let running = self.control.state() == VmRunState::Running;
        if !(asks && running && self.bus.press_power_button()) {
            return self.control.stop(VmStopReason::Signal(signal));
        }
        self.pressed = Some(signal);
        log::info!(
            "SIGTERM: the power button is pressed; the guest has {} s to power off",
            self.timeout.as_secs_f64()
        );
        if let Err(e) = self.timer.reset(self.timeout, None) {
            log::error!("timerfd_settime: {e}");
            self.control.stop(VmStopReason::Signal(signal));
        }
    }
}
