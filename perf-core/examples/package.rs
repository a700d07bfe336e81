//! Package counts: KVM's statistics of a whole VM, which belong to no single vCPU.
//!
//! Inherited by three vCPUs, such a count is still one number. Uses /dev/kvm if present, otherwise
//! a simulated PMU. `cargo run -p perf-core --example package`
#![expect(unsafe_code, reason = "calls of the system")]

mod shared;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use perf_core::pmu::kvm::{KvmPmu, StatsFile};
use perf_core::pmu::sim::{SimConfig, SimPmu};
use perf_core::*;

/// `out 0x10, al` in a loop: every run of the vCPU exits.
const CODE: [u8; 4] = [0xe6, 0x10, 0xeb, 0xfc];

/// A real VM with three vCPUs and one page of memory that contains the reset vector.
struct Vm {
    vcpus: Vec<kvm_ioctls::VcpuFd>,
    _vm: kvm_ioctls::VmFd,
    pmu: Arc<KvmPmu>,
}

/// Returns the statistics file descriptor of a VM or vCPU.
fn stats_fd(of: &impl AsRawFd) -> std::io::Result<OwnedFd> {
    /// `KVM_GET_STATS_FD`: `_IO(0xae, 0xce)`.
    const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;
    // SAFETY: the request takes no argument.
    let fd = unsafe { libc::ioctl(of.as_raw_fd(), KVM_GET_STATS_FD, 0) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this file descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns a page of guest memory with [`CODE`] at the reset vector.
fn page() -> Result<u64, std::io::Error> {
    // SAFETY: a fresh mapping that lives as long as the process; CODE lies inside it.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let at = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        );
        if at == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        at.cast::<u8>().add(0xff0).cast::<[u8; 4]>().write(CODE);
        Ok(at as u64)
    }
}

fn real_vm() -> Result<Vm, Box<dyn std::error::Error>> {
    let kvm = kvm_ioctls::Kvm::new()?;
    let vm = kvm.create_vm()?;
    let region = kvm_bindings::kvm_userspace_memory_region {
        slot: 0,
        flags: 0,
        // The reset vector is in the last 16 bytes below 4 GiB.
        guest_phys_addr: 0xffff_f000,
        memory_size: 4096,
        userspace_addr: page()?,
    };
    // SAFETY: the page lives as long as the process, and nothing else uses it.
    unsafe { vm.set_user_memory_region(region)? };
    let pmu = Arc::new(KvmPmu::new(None));
    let mut vcpus = Vec::new();
    for n in 0..3u32 {
        let vcpu = vm.create_vcpu(u64::from(n))?;
        pmu.add_vcpu(VcpuId(n), StatsFile::new(stats_fd(&vcpu)?)?);
        vcpus.push(vcpu);
    }
    Ok(Vm { vcpus, _vm: vm, pmu })
}

/// Counts `attrs` for the VM while three vCPUs are added and run once each, and one is removed.
fn count(
    core: &PerfCore,
    attrs: &[(&str, Attr)],
    mut step: impl FnMut(u32),
) -> Result<(), Box<dyn std::error::Error>> {
    let session = core.session(0, Role::Admin);
    let mut totals = Vec::new();
    for (name, attr) in attrs {
        let attr = Attr {
            inherit: true,
            ..attr.clone()
        };
        let total = core.open(&session, attr, OpenTarget::Vm, None, OpenFlags::default())?;
        totals.push((name, total));
    }
    let print = |when: String| -> Result<(), ControlError> {
        print!("{when:<16}");
        for (name, total) in &totals {
            print!("  {name} {} ({} children)", total.read()?.value, total.children());
        }
        println!();
        Ok(())
    };
    for n in 0..3 {
        let vcpu = core.add_vcpu(VcpuId(n), shared::tid())?;
        vcpu.sched_in();
        step(n);
        print(format!("  vCPU {n} ran:"))?;
    }
    core.remove_vcpu(VcpuId(0))?;
    print("  vCPU 0 went:".into())?;
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let core = PerfCore::new(PerfCoreConfig::default());
    match real_vm() {
        Ok(mut vm) => {
            core.register(Arc::clone(&vm.pmu) as Arc<dyn Pmu>);
            // The statistics that are counted depend on the KVM.
            let attrs: Vec<_> = ["exits", "io_exits", "insn_emulation"]
                .into_iter()
                .filter_map(|name| Some((name, Attr::counting(EventType::KVM, vm.pmu.config(name)?))))
                .collect();
            println!("KVM's statistics of a VM with three vCPUs:");
            count(&core, &attrs, |n| {
                for _ in 0..10 {
                    let _exit = vm.vcpus[n as usize].run();
                }
            })
        }
        Err(error) => {
            println!("no KVM here ({error}); a simulated PMU:");
            let sim = SimPmu::new(SimConfig {
                slots: Some(4),
                package: vec![7],
                ..SimConfig::default()
            });
            core.register(Arc::new(sim.clone()));
            count(&core, &[("energy", Attr::counting(EventType::SIM, 7))], |n| {
                sim.advance(VcpuId(n), |_| 100)
            })
        }
    }
}
