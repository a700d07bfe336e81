//! Start and end of a vCPU thread.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use perf_core::error_line;
use perf_core::pmu::sched::WaitTime;
use sandbox::ThreadKind;

use super::control::StopReason;
use super::failure::{BeginError, VcpuError};
use super::kicker::VcpuThread;
use super::maker::VcpuMaker;
use super::running::{Begins, Running, Vcpu};
use super::{Ran, affinity};

impl Vcpu {
    /// Starts the thread of this vCPU, named `vcpuN`. When the thread ends, it parks the KVM vCPU
    /// in its seat. After a reset of the machine, the vCPU is rebuilt from the current `makers`.
    /// The result of attaching to the perf core is reported through `begins`.
    ///
    /// # Errors
    /// Returns [`VcpuError::Spawn`] if the thread cannot be spawned. The KVM vCPU is then parked.
    pub fn spawn(self, makers: Arc<ArcSwap<VcpuMaker>>, begins: Begins) -> Result<VcpuThread, VcpuError> {
        let (id, pin, seat) = (self.seat.id(), self.pin, self.seat.clone());
        // Shared, so that the vCPU can be recovered if the thread cannot be spawned.
        let here = Arc::new(Mutex::new(Some(self)));
        let there = here.clone();
        let prepare = move || {
            if let Some(cpu) = pin
                && let Err(e) = affinity::stay_on(cpu)
            {
                log::warn!("vcpu{id} does not stay on CPU {cpu}: {e}");
            }
            // Opened before the thread is confined, because it cannot open files later. The user of
            // the wait time reports an error.
            let _ = WaitTime::of_this_thread();
        };
        let builder = std::thread::Builder::new().name(format!("vcpu{id}"));
        let spawned = sandbox::spawn_prepared(ThreadKind::Vcpu, builder, prepare, move || {
            let Some(vcpu) = take(&there) else { return };
            vcpu.seat.begins_on(affinity::thread_id());
            let vcpu = Running::new(vcpu);
            let (control, seat) = (vcpu.control.clone(), vcpu.seat.clone());
            // A panic is a bug of the VMM. It must end the VM, so that the other vCPUs do not
            // continue without this one.
            let mut begins = Some(begins);
            let run = std::panic::AssertUnwindSafe(|| run(vcpu, &makers, &mut begins));
            let Ok((vcpu, ran)) = std::panic::catch_unwind(run) else {
                control.stop(StopReason::Failed);
                return;
            };
            if let Some(vcpu) = vcpu {
                seat.park(vcpu.into_kvm());
                control.has_left();
            }
            match (ran, begins) {
                (Ok(()), _) => {}
                // The seat is free before the receiver sees the error.
                (Err(why), Some(Begins::Later(began))) => drop(began.send(Err(why))),
                (Err(why), Some(Begins::WithVm(_)) | None) => {
                    log::error!("vcpu{id}: {}", error_line(&why));
                    control.stop(StopReason::Failed);
                }
            }
        });
        match spawned {
            Ok(handle) => Ok(VcpuThread::new(id, handle)),
            Err(e) => {
                if let Some(vcpu) = take(&here) {
                    seat.park(vcpu.into_kvm());
                }
                Err(VcpuError::Spawn(id, e))
            }
        }
    }
}

/// Runs a vCPU, rebuilding it after each reset of the machine. Returns the vCPU unless it failed to
/// restart.
fn run(
    mut vcpu: Running,
    makers: &ArcSwap<VcpuMaker>,
    begins: &mut Option<Begins>,
) -> (Option<Running>, Result<(), BeginError>) {
    sandbox::fault_point(ThreadKind::Vcpu);
    loop {
        match vcpu.run(begins) {
            Ok(Ran::UntilRestart) => {}
            Ok(Ran::ToItsEnd) => return (Some(vcpu), Ok(())),
            Err(why) => return (Some(vcpu), Err(why)),
        }
        let (id, control) = (vcpu.id, vcpu.control.clone());
        vcpu = match vcpu.made_anew(&makers.load_full()) {
            Ok(fresh) => fresh,
            Err(why) => {
                log::error!("vcpu{id}: it does not start again: {}", error_line(&why));
                control.stop(StopReason::Failed);
                return (None, Ok(()));
            }
        };
    }
}

/// Takes the vCPU that is handed over to its thread.
fn take(from: &Mutex<Option<Vcpu>>) -> Option<Vcpu> {
    from.lock().unwrap_or_else(PoisonError::into_inner).take()
}
