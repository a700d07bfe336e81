//! The thread of a vCPU: its start, its end, and how others kick it out of KVM_RUN.

use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use perf_core::error_line;
use perf_core::pmu::sched::WaitTime;
use sandbox::ThreadKind;
use vmm_sys_util::signal::Killable;

use super::affinity;
use super::control::StopReason;
use super::{BeginError, Running, Vcpu, VcpuError, kick};

impl Vcpu {
    /// Starts the thread of this vCPU, named `vcpuN`. When it ends it parks KVM's vCPU in its seat. `began`
    /// is told whether the vCPU has entered the perf core; without it the VM cannot do without this vCPU,
    /// and ends if it has not.
    ///
    /// # Errors
    /// [`VcpuError::Spawn`]; KVM's vCPU is parked.
    pub fn spawn(self, began: Option<SyncSender<Result<(), BeginError>>>) -> Result<VcpuThread, VcpuError> {
        let (id, pin, seat) = (self.seat.id(), self.pin, self.seat.clone());
        // If there is no thread it is to be had back.
        let here = Arc::new(Mutex::new(Some(self)));
        let there = here.clone();
        let prepare = move || {
            if let Some(cpu) = pin
                && let Err(e) = affinity::stay_on(cpu)
            {
                log::warn!("vcpu{id} does not stay on CPU {cpu}: {e}");
            }
            // Opened here, as no file can be opened later. Who needs it says that it is missing.
            let _ = WaitTime::of_this_thread();
        };
        let builder = std::thread::Builder::new().name(format!("vcpu{id}"));
        let spawned = sandbox::spawn_prepared(ThreadKind::Vcpu, builder, prepare, move || {
            let Some(vcpu) = take(&there) else { return };
            vcpu.seat.begins_on(affinity::thread_id());
            let vcpu = Running::new(vcpu);
            let (control, seat) = (vcpu.control.clone(), vcpu.seat.clone());
            // A panic here would be a bug of ours; it must end the VM and not leave the others running
            // headless.
            let run = std::panic::AssertUnwindSafe(|| run(vcpu, began.as_ref()));
            let Ok((vcpu, ran)) = std::panic::catch_unwind(run) else {
                control.stop(StopReason::Failed);
                return;
            };
            if let Some(vcpu) = vcpu {
                seat.park(vcpu.into_kvm());
                control.has_left();
            }
            match (ran, began) {
                (Ok(()), _) => {}
                // Its seat is free when this is heard.
                (Err(why), Some(began)) => drop(began.send(Err(why))),
                (Err(why), None) => {
                    log::error!("vcpu{id}: {}", error_line(&why));
                    control.stop(StopReason::Failed);
                }
            }
        });
        match spawned {
            Ok(handle) => Ok(VcpuThread { id, handle }),
            Err(e) => {
                if let Some(vcpu) = take(&here) {
                    seat.park(vcpu.into_kvm());
                }
                Err(VcpuError::Spawn(id, e))
            }
        }
    }
}

/// Runs a vCPU as often as the machine is reset. It comes back, but for one that could not start again.
fn run(
    mut vcpu: Running,
    mut began: Option<&SyncSender<Result<(), BeginError>>>,
) -> (Option<Running>, Result<(), BeginError>) {
    sandbox::fault_point(ThreadKind::Vcpu);
    loop {
        let maker = match vcpu.run(began.take()) {
            Ok(Some(maker)) => maker,
            Ok(None) => return (Some(vcpu), Ok(())),
            Err(why) => return (Some(vcpu), Err(why)),
        };
        let (id, control) = (vcpu.id, vcpu.control.clone());
        vcpu = match vcpu.made_anew(&maker) {
            Ok(fresh) => fresh,
            Err(why) => {
                log::error!("vcpu{id}: it does not start again: {}", error_line(&why));
                control.stop(StopReason::Failed);
                return (None, Ok(()));
            }
        };
    }
}

/// The vCPU that waits for a thread to run it.
fn take(from: &Mutex<Option<Vcpu>>) -> Option<Vcpu> {
    from.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// The running vCPU threads of a VM, to be kicked from anywhere.
#[derive(Clone, Debug, Default)]
pub struct Kicker(Arc<Mutex<Vec<VcpuThread>>>);

impl Kicker {
    /// Adds a thread, instead of one of the same vCPU that has ended.
    pub fn add(&self, thread: VcpuThread) {
        let mut threads = self.threads();
        threads.retain(|other| other.id != thread.id);
        threads.push(thread);
    }

    /// Makes every vCPU leave KVM_RUN and look at what is asked of it.
    pub fn kick(&self) {
        self.threads().iter().for_each(VcpuThread::kick);
    }

    /// Waits for the end of all threads, which have been told to end.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *self.threads());
        threads.into_iter().for_each(VcpuThread::join);
    }

    /// Whether all threads were joined.
    pub fn is_empty(&self) -> bool {
        self.threads().is_empty()
    }

    fn threads(&self) -> std::sync::MutexGuard<'_, Vec<VcpuThread>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running vCPU thread.
#[derive(Debug)]
pub struct VcpuThread {
    id: u8,
    handle: JoinHandle<()>,
}

impl VcpuThread {
    /// Makes the vCPU leave KVM_RUN and look at its run state.
    pub fn kick(&self) {
        if !self.handle.is_finished()
            && let Err(e) = self.handle.kill(kick::kick_signal())
        {
            log::debug!("vcpu{}: kick: {e}", self.id);
        }
    }

    /// Waits for the end of the thread, kicking it until it has gone.
    pub fn join(self) {
        while !self.handle.is_finished() {
            self.kick();
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.handle.join().is_err() {
            log::error!("vcpu{}: its thread panicked", self.id);
        }
    }
}
