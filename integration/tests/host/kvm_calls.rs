//! Tests that KVM system calls are made only in `vmm/vmm/src/kvm`, where each call has an owning
//! type and a specific error.

use std::process::Command;

use integration::artefacts::workspace;

/// Only files in `vmm/vmm/src/kvm` make KVM calls. Other files may mention KVM calls in comments.
#[test]
fn kvm_calls_are_in_kvm_folder_only() {
    let calls = "^([^/]|/[^/])*(kvm_ioctls|KVMIO|ioctl_io[rw]_nr)";
    let found = Command::new("git")
        .args(["grep", "-nE", calls, "--", "vmm/vmm/src"])
        .current_dir(workspace())
        .output()
        .unwrap();
    let found = String::from_utf8(found.stdout).unwrap();
    let (inside, outside): (Vec<&str>, Vec<&str>) = found
        .lines()
        .partition(|line| line.starts_with("vmm/vmm/src/kvm/"));
    assert!(!inside.is_empty(), "the folder has no calls");
    assert_eq!(outside, Vec::<&str>::new(), "calls of KVM outside its folder");
}
