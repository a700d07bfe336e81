//! Builds an archive with rr, gdb and their libraries from Debian packages, to be added to a
//! guest's initrd.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::closure;
use crate::deb::DebianArchive;
use crate::linux::{
    GuestImageError, add_libraries, archive_in_memory, io_error, read, read_libraries, write,
};
use crate::progress::ProgressLog;

/// Programs in the rr archive, each with its Debian package and its path in the package.
/// `gdb-minimal` has no Python, which rr does not need.
const PROGRAMS: [(&str, &str); 2] = [("rr", "usr/bin/rr"), ("gdb-minimal", "usr/bin/gdb")];

/// Directories of rr's support files: the libraries that rr loads into recorded processes, and the
/// register descriptions that rr sends to gdb.
const RR_DIRECTORIES: [&str; 2] = ["usr/lib/rr", "usr/share/rr"];

/// Returns the path of the rr archive (cpio, uncompressed) below Cargo's target directory, and
/// builds it if needed.
///
/// Concurrent calls from several processes are safe.
///
/// # Errors
/// Returns an error if a package cannot be fetched or a file cannot be written.
pub fn ensure(target_dir: &Path, progress: &ProgressLog) -> Result<PathBuf, GuestImageError> {
    let base = target_dir.join("guest");
    let directory = base.join("rr");
    fs::create_dir_all(&directory).map_err(io_error(&directory))?;
    let lock_path = directory.join(".lock");
    let lock = fs::File::create(&lock_path).map_err(io_error(&lock_path))?;
    lock.lock().map_err(io_error(&lock_path))?;
    let file = directory.join("rr.cpio");
    if !file.exists() {
        let root = directory.join("root");
        if root.exists() {
            fs::remove_dir_all(&root).map_err(io_error(&root))?;
        }
        write(&file, &build(&base, &root, progress)?)?;
        fs::remove_dir_all(&root).map_err(io_error(&root))?;
    }
    Ok(file)
}

/// Unpacks the packages below `root` and returns the contents of the rr archive.
fn build(base: &Path, root: &Path, progress: &ProgressLog) -> Result<Vec<u8>, GuestImageError> {
    let mut packages = DebianArchive::new(&base.join("debs"), progress)?;
    for deb in packages.fetch(&PROGRAMS.map(|(package, _)| package))? {
        packages.unpack(&deb, root)?;
    }
    let _collecting = progress.begin("collecting the libraries of rr and gdb");
    let mut libraries = BTreeMap::new();
    let mut files = Vec::new();
    for (package, program) in PROGRAMS {
        libraries.extend(closure::complete(&mut packages, package, root, program)?);
        files.push((program.to_owned(), read(&root.join(program))?));
    }
    for directory in RR_DIRECTORIES {
        let unpacked = root.join(directory);
        for entry in fs::read_dir(&unpacked).map_err(io_error(&unpacked))? {
            let path = entry.map_err(io_error(&unpacked))?.path();
            if path.is_file() {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                files.push((format!("{directory}/{name}"), read(&path)?));
            }
        }
    }
    let libraries = read_libraries(&libraries)?;
    archive_in_memory(|archive| {
        let directories = [
            "usr",
            "usr/bin",
            "usr/lib",
            "usr/lib/x86_64-linux-gnu",
            "usr/share",
            "lib64",
        ];
        for directory in directories.into_iter().chain(RR_DIRECTORIES) {
            archive.directory(directory)?;
        }
        for (path, data) in &files {
            archive.file(path, 0o755, data)?;
        }
        add_libraries(archive, &libraries)
    })
}
