//! A program by which a Linux guest starts another kernel. Not in the guest's initrd: few guests want it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::linux::{BuildError, compile};

const SOURCE: &str = include_str!("../programs/kexec.c");
const FLAGS: [&str; 5] = ["-O1", "-static", "-Wall", "-Wextra", "-Werror"];

/// The static program `kexec [-p] KERNEL INITRD CMDLINE`, compiled below `target_dir`.
///
/// # Errors
/// When there is no C compiler, or its directory cannot be written.
pub fn program(target_dir: &Path) -> Result<PathBuf, BuildError> {
    let directory = target_dir.join("guest").join("kexec");
    fs::create_dir_all(&directory).map_err(|source| BuildError::Io {
        path: directory.clone(),
        source,
    })?;
    let program = directory.join("kexec");
    compile(&directory, "kexec.c", SOURCE, &FLAGS, &program)?;
    Ok(program)
}
