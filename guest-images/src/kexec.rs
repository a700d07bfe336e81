//! Program with which a Linux guest starts another kernel. The program is not part of the guest's
//! initrd, because few guests need it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::linux::{GuestImageError, compile};

const SOURCE: &str = include_str!("../programs/kexec.c");
const FLAGS: [&str; 5] = ["-O1", "-static", "-Wall", "-Wextra", "-Werror"];

/// Compiles the static program `kexec [-p] KERNEL INITRD CMDLINE` below `target_dir`.
///
/// # Errors
/// Returns an error if there is no C compiler or the directory cannot be written.
pub fn program(target_dir: &Path) -> Result<PathBuf, GuestImageError> {
    let directory = target_dir.join("guest").join("kexec");
    fs::create_dir_all(&directory).map_err(|source| GuestImageError::Io {
        path: directory.clone(),
        source,
    })?;
    let program = directory.join("kexec");
    compile(&directory, "kexec.c", SOURCE, &FLAGS, &program)?;
    Ok(program)
}
