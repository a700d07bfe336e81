//! Tests of the `kvm` driver with this machine's KVM. Without /dev/kvm or its binary statistics,
//! the tests print a message and pass.
#![expect(unsafe_code, reason = "calls of the system")]

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use kvm_ioctls::VcpuFd;
use perf_core::attr::{Attr, EventType};
use perf_core::pmu::kvm::{KvmPmu, KvmStatsError, KvmStatsFile, VM_SCOPE};
use perf_core::pmu::{Pmu, PmuError, PmuEvent, PmuEventTarget, VcpuId};

use crate::common::guest::RealModeVm;
use test_support::skip;

/// Number of the ioctl `KVM_GET_STATS_FD`: `_IO(0xae, 0xce)`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;

/// Machine code of `out 0x10, al` in a loop, which makes every `KVM_RUN` exit immediately.
const OUT_FOR_EVER: [u8; 4] = [0xe6, 0x10, 0xeb, 0xfc];

struct Counted {
    pmu: KvmPmu,
    guest: RealModeVm,
    /// Index of a statistic that each `KVM_RUN` of a vCPU increments. Which statistic this is
    /// depends on the KVM implementation.
    rising: u64,
}

fn stats_of(fd: &impl AsRawFd) -> Option<KvmStatsFile> {
    // SAFETY: the ioctl takes no argument and returns a new file descriptor.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), KVM_GET_STATS_FD, 0) };
    if rc < 0 {
        return None;
    }
    // SAFETY: the kernel just returned this file descriptor, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(rc) };
    Some(KvmStatsFile::new(fd).unwrap())
}

/// Creates a guest. Prints a message and returns `None` if KVM or its binary statistics are
/// missing.
fn guest() -> Option<Counted> {
    let counted = counted_guest();
    if counted.is_none() {
        skip::skipped("no /dev/kvm with binary statistics", false);
    }
    counted
}

fn counted_guest() -> Option<Counted> {
    let mut guest = RealModeVm::new(2, &OUT_FOR_EVER)?;
    let pmu = KvmPmu::new(Some(stats_of(&guest.vm)?));
    for (i, vcpu) in guest.vcpus.iter().enumerate() {
        pmu.add_vcpu(VcpuId(i as u32), stats_of(vcpu)?);
    }
    let rising = ["exits", "io_exits", "insn_emulation"]
        .iter()
        .filter_map(|name| pmu.config(name))
        .find(|&config| {
            let mut ev = started(&pmu, config, on(0));
            let mut grows = || {
                let before = ev.read();
                run(&mut guest.vcpus[0]);
                ev.read() > before
            };
            grows() && grows() && grows()
        })
        .expect("no statistic of this KVM counts runs");
    Some(Counted { pmu, guest, rising })
}

fn attr(config: u64) -> Attr {
    Attr::counting(EventType::KVM, config)
}

fn on(vcpu: u32) -> PmuEventTarget {
    PmuEventTarget::Vcpu {
        vcpu: VcpuId(vcpu),
        tid: 0,
    }
}

fn started(pmu: &KvmPmu, config: u64, target: PmuEventTarget) -> Box<dyn PmuEvent> {
    let mut ev = pmu.open(&attr(config), target).unwrap();
    ev.start(None).unwrap();
    ev
}

/// Runs a vCPU with `KVM_RUN` until it exits for any reason.
fn run(vcpu: &mut VcpuFd) {
    let _any_exit = vcpu.run();
}

#[test]
fn vcpus_counts_are_its_own() {
    let Some(mut g) = guest() else { return };
    let exits = g.rising;
    let mut first = started(&g.pmu, exits, on(0));
    let mut second = started(&g.pmu, exits, on(1));
    assert_eq!(first.read(), 0);
    run(&mut g.guest.vcpus[0]);
    let counted = first.read();
    assert!(counted > 0);
    assert_eq!(second.read(), 0);
    assert_eq!(first.count(), None, "not a package count");
    first.stop();
    run(&mut g.guest.vcpus[0]);
    assert_eq!(first.read(), counted, "stopped, yet counting");
    first.start(None).unwrap();
    run(&mut g.guest.vcpus[0]);
    assert!(first.read() > counted);
}

/// The count of a statistic for the whole VM is the same on every target, and equals the sum over
/// the vCPUs.
#[test]
fn vms_total_is_a_package_count() {
    let Some(mut g) = guest() else { return };
    let exits = g.rising;
    let mut total = started(&g.pmu, exits, PmuEventTarget::Vm);
    let mut each = [0, 1].map(|v| started(&g.pmu, exits, on(v)));
    for _ in 0..3 {
        run(&mut g.guest.vcpus[0]);
    }
    run(&mut g.guest.vcpus[1]);
    let sum: u64 = each.iter_mut().map(|ev| ev.read()).sum();
    assert!(sum > 0);
    assert_eq!(total.count(), Some(sum));

    // A removed vCPU still contributes its last value to the total.
    g.pmu.remove_vcpu(VcpuId(1));
    assert_eq!(total.count(), Some(sum));
    run(&mut g.guest.vcpus[0]);
    assert!(total.count() > Some(sum));
}

#[test]
fn statistic_of_the_vm_is_the_same_on_every_target() {
    let Some(g) = guest() else { return };
    let Some(event) = g.pmu.events().into_iter().find(|e| e.config & VM_SCOPE != 0) else {
        skip::skipped("this KVM counts nothing per VM", false);
        return;
    };
    assert!(event.name.starts_with("vm:"));
    assert_eq!(g.pmu.config(&event.name), Some(event.config));
    let mut all: Vec<_> = [PmuEventTarget::Vm, on(0), on(1)]
        .into_iter()
        .map(|t| started(&g.pmu, event.config, t))
        .collect();
    let counts: Vec<_> = all.iter_mut().map(|ev| ev.count()).collect();
    assert!(counts[0].is_some());
    assert!(counts.iter().all(|c| *c == counts[0]), "{counts:?}");
}

#[test]
fn kvm_driver_rejects_unsupported_events() {
    let Some(g) = guest() else { return };
    let exits = g.rising;
    assert_eq!(g.pmu.config("no_such_statistic"), None);
    assert_eq!(g.pmu.config("vm:no_such_statistic"), None);
    let refusal = |attr: &Attr, vcpu| g.pmu.open(attr, on(vcpu)).err();
    for config in [u64::from(u32::MAX), VM_SCOPE | 0xffff, 1 << 40, u64::MAX] {
        assert!(matches!(refusal(&attr(config), 0), Some(PmuError::NoSuchEvent)));
    }
    assert!(matches!(refusal(&attr(exits), 9), Some(PmuError::Os { .. })));
    let user_only = Attr {
        exclude_kernel: true,
        ..attr(exits)
    };
    let sampling = Attr::sampling(EventType::KVM, exits, 10);
    for attr in [user_only, sampling] {
        assert!(matches!(refusal(&attr, 0), Some(PmuError::Unsupported(_))));
    }
    let mut ev = started(&g.pmu, exits, on(0));
    assert!(ev.arm(5).is_err());
    assert_eq!(ev.take_overflows(), 0);
}

/// Instantaneous statistics are listed but cannot be opened as events, because they are not counts.
#[test]
fn instantaneous_statistic_is_not_an_event() {
    let Some(g) = guest() else { return };
    let stats = stats_of(&g.guest.vcpus[0]).unwrap();
    let Some(index) = stats.descriptors().iter().position(|d| !d.countable()) else {
        skip::skipped("this KVM has counts only", false);
        return;
    };
    let refused = g.pmu.open(&attr(index as u64), on(0));
    assert!(matches!(refused, Err(PmuError::Unsupported(_))));
}

/// Opening an unrelated or empty file as statistics returns an error and does not panic.
#[test]
fn foreign_descriptor_is_rejected() {
    // SAFETY: memfd_create takes a NUL-terminated name and returns a new file descriptor.
    let memfd = |bytes: &[u8]| unsafe {
        let fd = libc::memfd_create(c"stats".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0);
        let mut file = File::from_raw_fd(fd);
        file.write_all(bytes).unwrap();
        OwnedFd::from(file)
    };
    assert!(matches!(
        KvmStatsFile::new(memfd(b"")),
        Err(KvmStatsError::Read(_))
    ));
    for bytes in [[0xff; 100], [0; 100]] {
        let refused = KvmStatsFile::new(memfd(&bytes));
        assert!(matches!(refused, Err(KvmStatsError::Malformed(_))));
    }
}
