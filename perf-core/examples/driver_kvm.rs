//! The `kvm` driver: the statistics of a VM with one vCPU that does nothing yet.
//!
//! `cargo run --example driver_kvm`
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use kvm_ioctls::Kvm;
use perf_core::attr::{Attr, EventType};
use perf_core::pmu::kvm::{KvmPmu, StatsFile};
use perf_core::pmu::{Pmu, Target, VcpuId};

/// `KVM_GET_STATS_FD`: `_IO(0xae, 0xce)`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;

fn stats(fd: &impl AsRawFd) -> Result<StatsFile, Box<dyn std::error::Error>> {
    // SAFETY: the ioctl takes no argument and returns a new descriptor.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), KVM_GET_STATS_FD, 0) };
    if rc < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the kernel just returned this descriptor and nothing else owns it.
    Ok(StatsFile::new(unsafe { OwnedFd::from_raw_fd(rc) })?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let vm = Kvm::new()?.create_vm()?;
    let mut vcpu = vm.create_vcpu(0)?;
    let pmu = KvmPmu::new(Some(stats(&vm)?));
    pmu.add_vcpu(VcpuId(0), stats(&vcpu)?);
    let mut events = Vec::new();
    for event in pmu.events() {
        let attr = Attr {
            ty: EventType::KVM,
            config: event.config,
            ..Attr::default()
        };
        let mut counter = pmu.open(&attr, Target::Vm)?;
        counter.start(None)?;
        events.push((event.name, counter));
    }
    // Without memory the guest gets nowhere, but KVM has something to count.
    let exit = vcpu.run().map(|exit| format!("{exit:?}"));
    println!("KVM_RUN gave {exit:?}");
    for (name, mut counter) in events {
        let count = counter.count().unwrap_or_default();
        if count > 0 {
            println!("{count:>12}  {name}");
        }
    }
    Ok(())
}
