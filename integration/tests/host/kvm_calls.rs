//! Tests that KVM system calls are made only in `vmm/vmm/src/kvm`, where each has an owning type
//! and an error that names it.

use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Collects all Rust sources below `folder`.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the lines of `text`, with their numbers, that use names reserved for the KVM folder,
/// except in comments.
fn calls_of_kvm(text: &str) -> Vec<(usize, &str)> {
    let code = |line: &&str| !line.trim_start().starts_with("//");
    let names = ["kvm_ioctls", "KVMIO", "ioctl_ior_nr", "ioctl_iow_nr"];
    let lines = (1..).zip(text.lines()).filter(|(_, line)| code(line));
    lines
        .filter(|(_, line)| names.iter().any(|name| line.contains(name)))
        .collect()
}

/// All KVM calls of the VMM are in one folder.
#[test]
fn kvm_calls_are_in_kvm_folder_only() {
    let machine = root().join("vmm/vmm/src");
    let room = machine.join("kvm");
    let mut found = Vec::new();
    sources(&machine, &mut found);
    assert!(
        found.iter().any(|path| path.starts_with(&room)),
        "{room:?} is where?"
    );
    let outside = found.iter().filter(|path| !path.starts_with(&room));
    let mut wrong = Vec::new();
    for path in outside {
        let text = std::fs::read_to_string(path).unwrap();
        for (number, line) in calls_of_kvm(&text) {
            wrong.push(format!("{}:{number}: {}", path.display(), line.trim()));
        }
    }
    assert!(
        wrong.is_empty(),
        "calls of KVM outside {}:\n{}",
        room.display(),
        wrong.join("\n")
    );
}

/// The test above detects a violation.
#[test]
fn planted_kvm_call_is_detected() {
    let text = "// kvm_ioctls in a comment\nuse kvm_ioctls::VcpuFd;\nlet x = 1;\n";
    assert_eq!(calls_of_kvm(text), [(2, "use kvm_ioctls::VcpuFd;")]);
}
