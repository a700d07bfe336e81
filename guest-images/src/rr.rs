//! Builds an archive with rr and its libraries from a Debian package, to be added to a guest's initrd.

use std::fs;
use std::path::{Path, PathBuf};

use crate::closure;
use crate::deb::DebianArchive;
use crate::linux::{BuildError, add_libraries, archive_in_memory, io_error, read, read_libraries, write};
use crate::progress::ProgressLog;

/// Package of rr, and its program.
const PACKAGE: &str = "rr";
const PROGRAM: &str = "usr/bin/rr";

/// Libraries and programs that rr loads into the processes that it records.
const RR_LIBRARIES: &str = "usr/lib/rr";

/// Returns the archive (cpio, uncompressed) below Cargo's target directory. Builds it if needed.
///
/// Concurrent calls from several processes are safe.
///
/// # Errors
/// Returns an error if a package cannot be fetched or a file cannot be written.
pub fn ensure(target_dir: &Path, progress: &ProgressLog) -> Result<PathBuf, BuildError> {
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

/// Unpacks the packages below `root` and returns the archive.
fn build(base: &Path, root: &Path, progress: &ProgressLog) -> Result<Vec<u8>, BuildError> {
    let mut packages = DebianArchive::new(&base.join("debs"), progress)?;
    for deb in packages.fetch(&[PACKAGE])? {
        packages.unpack(&deb, root)?;
    }
    let _collecting = progress.begin("collecting the libraries of rr");
    let libraries = closure::complete(&mut packages, PACKAGE, root, PROGRAM)?;
    let mut files = vec![(PROGRAM.to_owned(), read(&root.join(PROGRAM))?)];
    let loaded = root.join(RR_LIBRARIES);
    for entry in fs::read_dir(&loaded).map_err(io_error(&loaded))? {
        let entry = entry.map_err(io_error(&loaded))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        files.push((format!("{RR_LIBRARIES}/{name}"), read(&entry.path())?));
    }
    let libraries = read_libraries(&libraries)?;
    archive_in_memory(|archive| {
        let directories = [
            "usr",
            "usr/bin",
            "usr/lib",
            "usr/lib/x86_64-linux-gnu",
            RR_LIBRARIES,
            "lib64",
        ];
        for directory in directories {
            archive.directory(directory)?;
        }
        for (path, data) in &files {
            archive.file(path, 0o755, data)?;
        }
        add_libraries(archive, &libraries)
    })
}
