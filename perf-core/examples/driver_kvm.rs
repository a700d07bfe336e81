//! The `kvm` driver: the statistics of a VM with one vCPU that exits a hundred times.
//!
//! `cargo run --example driver_kvm`
#![expect(unsafe_code, reason = "calls of the system")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::Kvm;
use perf_core::attr::{Attr, EventType};
use perf_core::pmu::kvm::{KvmPmu, StatsFile};
use perf_core::pmu::{Pmu, PmuTarget, VcpuId};

/// `out 0x10, al` in a loop: every run of the vCPU exits.
const CODE: [u8; 4] = [0xe6, 0x10, 0xeb, 0xfc];
const RUNS: usize = 100;

/// A page of guest memory.
#[repr(align(4096))]
struct Page([u8; 4096]);

/// `KVM_GET_STATS_FD`: `_IO(0xae, 0xce)`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;

fn stats(fd: &impl AsRawFd) -> Result<StatsFile, Box<dyn std::error::Error>> {
    // SAFETY: the ioctl takes no argument and returns a new file descriptor.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), KVM_GET_STATS_FD, 0) };
    if rc < 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    // SAFETY: the kernel just returned this file descriptor, and nothing else owns it.
    Ok(StatsFile::new(unsafe { OwnedFd::from_raw_fd(rc) })?)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The last page below 4 GiB, with code at the reset vector in its last 16 bytes.
    let mut page = Page([0; 4096]);
    page.0[0xff0..0xff4].copy_from_slice(&CODE);
    let vm = Kvm::new()?.create_vm()?;
    let region = kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        guest_phys_addr: 0xffff_f000,
        memory_size: 4096,
        userspace_addr: &raw mut page as u64,
    };
    // SAFETY: the page outlives every run of the vCPU, and nothing else accesses it meanwhile.
    unsafe { vm.set_user_memory_region(region)? };
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
        let mut counter = pmu.open(&attr, PmuTarget::Vm)?;
        counter.start(None)?;
        events.push((event.name, counter));
    }
    for _ in 0..RUNS {
        vcpu.run()?;
    }
    println!("after {RUNS} exits for port output:");
    for (name, mut counter) in events {
        let count = counter.count().unwrap_or_default();
        if count > 0 {
            println!("{count:>12}  {name}");
        }
    }
    Ok(())
}
