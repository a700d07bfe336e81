//! Builds the initrd of the lab host.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use guest_images::cpio::CpioArchive;
use guest_images::linux::GuestImages;

use super::options::LabOptions;
use crate::artefacts::LabBinaries;

/// Writes the initrd of a lab to `path`: the initrd of the lab host, followed by an archive with
/// Perfvisor, the lab's agent, the files of the guests and those of `options`.
pub(super) fn write_initrd(
    path: &Path,
    host: &GuestImages,
    guest: &GuestImages,
    binaries: &LabBinaries,
    options: &LabOptions,
) -> io::Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    let mut append = |file: &Path| io::copy(&mut File::open(file)?, &mut out).map(drop);
    append(&host.lab_initrd)?;
    if options.perf {
        append(&host.perf_cpio)?;
    }
    let mut archive = CpioArchive::new(out);
    // A directory may occur in several archives, because the kernel keeps existing directories and
    // only changes their mode.
    for directory in directories(&options.files) {
        archive.directory(directory)?;
    }
    add(&mut archive, "bin/perfvisor", 0o755, &binaries.perfvisor)?;
    add(&mut archive, "bin/lab-agent", 0o755, &binaries.lab_agent)?;
    add(&mut archive, "bin/pvload", 0o755, &guest.pvload)?;
    add(&mut archive, "guest/vmlinux", 0o644, &guest.vmlinux)?;
    add(&mut archive, "guest/bzImage", 0o644, &guest.bz_image)?;
    add(&mut archive, "guest/initrd", 0o644, &guest.initrd)?;
    for kernel in &guest_images::bare_metal::GUESTS {
        archive.file(&format!("guest/{}.elf", kernel.name), 0o644, &kernel.image())?;
    }
    for (name, file) in &options.files {
        let others = options.files.iter().map(|(other, _)| other.as_str());
        if let Some(why) = invalid_path_reason(name, others) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(file)?.permissions());
        add(&mut archive, name, mode, file)?;
    }
    archive.finish()?.flush()
}

/// Directories of the lab on which init mounts other file systems. Files of the initrd in these
/// directories would be hidden.
const COVERED: [&str; 4] = ["dev", "proc", "sys", "tmp"];

/// Returns why a file cannot be added to the lab's initrd at the path `place`, or `None` if it can.
/// The initrd also contains the paths `others`.
pub fn invalid_path_reason<'a>(place: &str, mut others: impl Iterator<Item = &'a str>) -> Option<String> {
    let path = place.trim_start_matches('/');
    let mut names = path.split('/');
    if path.split('/').any(|name| ["", ".", ".."].contains(&name)) {
        return Some(format!(
            "{place:?} names no file: give a path without \".\", \"..\" and empty names"
        ));
    }
    if let Some(first) = names.next()
        && COVERED.contains(&first)
        && names.next().is_some()
    {
        return Some(format!(
            "{place}: the lab mounts a file system of its own over /{first}, which hides the file; choose another directory"
        ));
    }
    let below = |lower: &str, upper: &str| {
        lower
            .strip_prefix(upper)
            .is_some_and(|rest| rest.starts_with('/'))
    };
    let other = others.find(|other| {
        let other = other.trim_start_matches('/');
        below(path, other) || below(other, path)
    })?;
    Some(format!(
        "{place} and {other}: one is a file and the other is below it"
    ))
}

/// Returns the directories that the initrd must contain for `files` and for the lab's own files,
/// parents first. The kernel does not create missing directories and skips the files in them.
fn directories(files: &[(String, PathBuf)]) -> BTreeSet<&str> {
    let mut directories = BTreeSet::from(["guest", "tests"]);
    for (name, _) in files {
        let name = name.trim_start_matches('/');
        directories.extend(
            name.match_indices('/')
                .map(|(at, _)| name[..at].trim_end_matches('/')),
        );
    }
    directories
}

fn add<W: io::Write>(archive: &mut CpioArchive<W>, name: &str, mode: u32, file: &Path) -> io::Result<()> {
    let data = fs::read(file)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", file.display())))?;
    archive.file(name, mode, &data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initrd_creates_parent_directories() {
        let files = ["/new/deeper/x", "guest/y", "new/z"].map(|name| (name.to_owned(), PathBuf::new()));
        let made: Vec<_> = directories(&files).into_iter().collect();
        assert_eq!(made, ["guest", "new", "new/deeper", "tests"]);
    }

    #[test]
    fn initrd_rejects_hidden_paths() {
        let refused = |place: &str| invalid_path_reason(place, ["guest/x", place].into_iter());
        for place in ["bin/x", "/a/b/c", "x", "tmpfiles/x"] {
            assert_eq!(refused(place), None);
        }
        for (place, word) in [
            ("/tmp/x", "/tmp"),
            ("dev/x", "/dev"),
            ("", "no file"),
            ("a/", "no file"),
            ("a//b", "no file"),
            ("../x", "no file"),
            ("guest", "below"),
            ("guest/x/y", "below"),
        ] {
            let why = refused(place).unwrap_or_else(|| panic!("{place:?} is not refused"));
            assert!(why.contains(word) && why.lines().count() == 1, "{why}");
        }
    }
}
