//! Private memory of a VM's process in addition to the guest's memory, measured with the release
//! build, because an unoptimized program has larger stack frames.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::test_lock;
use crate::common::vm::SpinningVm;

/// Maximum private memory of a VM with one vCPU, in KiB. This limit and the one for each further
/// vCPU are well above the measured values (docs/measurements.md), to allow for other builds, C
/// libraries and kernels.
const MOST_KIB: u64 = 8 << 10;
const MOST_FOR_A_VCPU_KIB: u64 = 160;
/// Minimum size of a mapping that is treated as guest memory, in KiB. The test's VM has 32 MiB.
const GUEST_MEMORY_KIB: u64 = 24 << 10;

/// Returns the amount of memory of the VM's process that belongs neither to files nor to the guest,
/// in KiB.
fn own_kib(vm: &SpinningVm) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", vm.child.id())).unwrap();
    let (mut size, mut own) = (0, 0);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (name, value) = (words.next(), words.next());
        let kib = || value.unwrap().parse::<u64>().unwrap();
        match name {
            Some("Size:") => size = kib(),
            Some("Anonymous:") if size < GUEST_MEMORY_KIB => own += kib(),
            _ => {}
        }
    }
    own
}

/// Returns the path of the program in `PERFVISOR_STATIC_DIR`, or `None` if this directory contains
/// no release build.
fn release_build() -> Option<PathBuf> {
    let directory = std::env::var_os("PERFVISOR_STATIC_DIR")?;
    let directory = Path::new(&directory);
    let program = directory.join("perfvisor");
    (directory.ends_with("release") && program.exists()).then_some(program)
}

#[test]
fn vm_memory_overhead_is_bounded() {
    let Some(program) = release_build() else {
        println!("SKIPPED: PERFVISOR_STATIC_DIR names no directory with a release build");
        return;
    };
    // Other load would change the order in which the VM's threads start, on which the memory usage
    // depends.
    let _lock = test_lock::exclusive();
    // The heap usage of a VM depends on the order in which its threads start. The minimum of three
    // runs is the memory that the VM needs.
    let least = |vcpus: &str| {
        let held = (0..3).map(|_| {
            let vm = SpinningVm::start_by(Command::new(&program), "test", &["--cpus", vcpus])?;
            // The VM answers once all its threads are running.
            assert!(vm.operator(&["ps"]).status().unwrap().success());
            Some(own_kib(&vm))
        });
        held.collect::<Option<Vec<_>>>()?.into_iter().min()
    };
    let (Some(one), Some(four)) = (least("1"), least("4")) else {
        return;
    };
    let each = four.saturating_sub(one) / 3;
    println!("one vCPU: {one} KiB; each further one: {each} KiB");
    assert!(one <= MOST_KIB, "{one} KiB");
    assert!(each <= MOST_FOR_A_VCPU_KIB, "{each} KiB for each further vCPU");
}
