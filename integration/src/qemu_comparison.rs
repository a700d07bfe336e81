//! QEMU in the lab, for comparison measurements with Perfvisor.

use std::path::PathBuf;
use std::process::Command;

use crate::artefacts::qemu;

/// Path of QEMU in the lab.
pub const QEMU: &str = "/usr/bin/qemu-system-x86_64";
/// Firmware files of QEMU's machine `pc`.
pub const PC_FIRMWARE: [&str; 5] = [
    "/usr/share/seabios/bios-256k.bin",
    "/usr/share/qemu/kvmvapic.bin",
    "/usr/share/qemu/linuxboot.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
    "/usr/share/qemu/multiboot.bin",
];
/// Firmware files of QEMU's machine `microvm`.
pub const MICROVM_FIRMWARE: [&str; 3] = [
    "/usr/share/qemu/bios-microvm.bin",
    "/usr/share/qemu/pvh.bin",
    "/usr/share/qemu/linuxboot_dma.bin",
];

/// Finds QEMU, its shared libraries and the given firmware files on this machine. Returns the path
/// of each file in the lab and on this machine.
///
/// # Errors
/// Returns an error if QEMU is not installed or its libraries cannot be determined.
pub fn qemu_files(firmware: &[&str]) -> Result<Vec<(String, PathBuf)>, Box<dyn std::error::Error>> {
    // A bare name is looked up in the search path.
    let program = qemu()?.program();
    let found = std::env::var_os("PATH")
        .iter()
        .flat_map(std::env::split_paths)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file());
    let program = found.ok_or_else(|| format!("{}: not in PATH", program.display()))?;
    let listed = Command::new("ldd").arg(&program).output()?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let mut files = vec![(QEMU.trim_start_matches('/').to_owned(), program)];
    for path in listed
        .split_whitespace()
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
    {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let directory = if name.starts_with("ld-linux") {
            "lib64"
        } else {
            "usr/lib/x86_64-linux-gnu"
        };
        files.push((format!("{directory}/{name}"), path));
    }
    files.extend(
        firmware
            .iter()
            .map(|path| (path.trim_start_matches('/').to_owned(), path.into())),
    );
    Ok(files)
}
