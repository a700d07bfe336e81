//! Starts the thread of a vCPU, and parks the vCPU when the thread ends.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use perf_core::error_line;
use perf_core::pmu::sched::RunQueueWaitTime;
use sandbox::SandboxedThreadKind;

use super::control::VmStopReason;
use super::factory::VcpuFactory;
use super::failure::{VcpuError, VcpuStartError};
use super::kicker::VcpuThread;
use super::running::{Running, Vcpu, VcpuStartReporter};
use super::{LoopExit, affinity};

impl Vcpu {
    /// Starts the thread of this vCPU, which is named `vcpuN`. The thread runs the vCPU, and
    /// constructs it anew with the factory in `makers` after each reset of the machine. At its end,
    /// it parks the KVM vCPU in the slot of the vCPU. `begins` receives the result of attaching to
    /// the perf core.
    ///
    /// # Errors
    /// Returns [`VcpuError::Spawn`] if the thread cannot be spawned. In this case, the KVM vCPU is
    /// stored in the slot.
    pub fn spawn(
        self,
        makers: Arc<ArcSwap<VcpuFactory>>,
        begins: VcpuStartReporter,
    ) -> Result<VcpuThread, VcpuError> {
        let (id, pin, slot) = (self.slot.id(), self.pin, self.slot.clone());
        // The vCPU is shared, so that it can be recovered if the thread cannot be spawned.
        let here = Arc::new(Mutex::new(Some(self)));
        let there = here.clone();
        let prepared = slot.clone();
        let prepare = move || {
            if let Some(cpu) = pin
                && let Err(e) = affinity::pin_current_thread(cpu)
            {
                log::warn!("cannot pin vcpu{id} to CPU {cpu}: {e}");
            }
            // Open the file of the wait time now, because a confined thread cannot open files. An
            // error is reported when the wait time is first used.
            let _ = RunQueueWaitTime::of_this_thread();
            prepared.set_thread_id(sandbox::host_tid());
        };
        let builder = std::thread::Builder::new().name(format!("vcpu{id}"));
        let spawned = sandbox::spawn_prepared(SandboxedThreadKind::Vcpu, builder, prepare, move || {
            let Some(vcpu) = take(&there) else { return };
            let vcpu = Running::new(vcpu);
            let (control, slot) = (vcpu.control.clone(), vcpu.slot.clone());
            // A panic is a bug of the VMM. It must stop the VM, so that the other vCPUs do not
            // continue without this one.
            let mut begins = Some(begins);
            let run = std::panic::AssertUnwindSafe(|| run(vcpu, &makers, &mut begins));
            let Ok((vcpu, ran)) = std::panic::catch_unwind(run) else {
                control.stop(VmStopReason::Failed);
                return;
            };
            if let Some(vcpu) = vcpu {
                slot.park(vcpu.into_kvm());
                control.notify_thread_ended();
            }
            match (ran, begins) {
                (Ok(()), _) => {}
                // The slot is free before the receiver sees the error.
                (Err(why), Some(VcpuStartReporter::Later { attached, .. })) => drop(attached.send(Err(why))),
                (Err(why), Some(VcpuStartReporter::WithVm(_)) | None) => {
                    log::error!("vcpu{id}: {}", error_line(&why));
                    control.stop(VmStopReason::Failed);
                }
            }
        });
        match spawned {
            Ok(handle) => Ok(VcpuThread::new(id, handle)),
            Err(e) => {
                if let Some(vcpu) = take(&here) {
                    slot.park(vcpu.into_kvm());
                }
                Err(VcpuError::Spawn(id, e))
            }
        }
    }
}

/// Runs a vCPU and constructs it anew after each reset of the machine. Returns the vCPU, or `None`
/// if it could not be restarted.
fn run(
    mut vcpu: Running,
    makers: &ArcSwap<VcpuFactory>,
    begins: &mut Option<VcpuStartReporter>,
) -> (Option<Running>, Result<(), VcpuStartError>) {
    sandbox::fault_point(SandboxedThreadKind::Vcpu);
    loop {
        match vcpu.run(begins) {
            Ok(LoopExit::MachineReset) => {}
            Ok(LoopExit::ThreadEnd) => return (Some(vcpu), Ok(())),
            Err(why) => return (Some(vcpu), Err(why)),
        }
        let (id, control) = (vcpu.id, vcpu.control.clone());
        vcpu = match vcpu.rebuild(&makers.load_full()) {
            Ok(fresh) => fresh,
            Err(why) => {
                log::error!("vcpu{id}: cannot restart: {}", error_line(&why));
                control.stop(VmStopReason::Failed);
                return (None, Ok(()));
            }
        };
    }
}

/// Removes and returns the vCPU that the starting thread has left for the new thread.
fn take(from: &Mutex<Option<Vcpu>>) -> Option<Vcpu> {
    from.lock().unwrap_or_else(PoisonError::into_inner).take()
}
