//! Finds the shared libraries that a program needs. The module reads ELF files and fetches Debian
//! packages.
//!
//! Only unpacked packages are searched, not the libraries of the host, which `ldd` would find. If a
//! library is missing, the module fetches the dependencies of the packages fetched so far.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use object::Endianness;
use object::elf;
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _};

use crate::deb::{DebError, DebianArchive};

/// Debian's library directories for amd64, newest layout first.
const LIBRARY_DIRS: [&str; 4] = [
    "usr/lib/x86_64-linux-gnu",
    "lib/x86_64-linux-gnu",
    "usr/lib64",
    "lib64",
];

/// Error returned when the libraries of a program cannot be found.
#[derive(Debug, thiserror::Error)]
pub enum LibraryClosureError {
    /// A Debian package could not be fetched or unpacked.
    #[error(transparent)]
    Deb(#[from] DebError),
    /// A file that should be an ELF object cannot be parsed.
    #[error("{path}: not a readable ELF file: {message}")]
    Elf {
        /// Path of the file that is not a valid ELF object.
        path: PathBuf,
        /// Reason why the file cannot be parsed.
        message: String,
    },
    /// No dependency of the package provides a library that the program needs.
    #[error("no dependency of {package} provides {sonames}")]
    Missing {
        /// Package that contains the program.
        package: String,
        /// Names of the missing libraries.
        sonames: String,
    },
}

/// Unpacks the libraries that `program` needs into `root`.
///
/// `program` is a path below `root`, into which `package` is already unpacked. Returns the path of
/// each library, by library name.
pub fn complete(
    archive: &mut DebianArchive<'_>,
    package: &str,
    root: &Path,
    program: &str,
) -> Result<BTreeMap<String, PathBuf>, LibraryClosureError> {
    let mut candidates: BTreeSet<String> = archive.dependencies([package])?;
    let mut fetched: BTreeSet<String> = BTreeSet::from([package.to_owned()]);
    loop {
        let (found, missing) = resolve(root, program)?;
        if missing.is_empty() {
            return Ok(found);
        }
        let open = candidates
            .iter()
            .filter(|name| !fetched.contains(*name) && is_library_package(name))
            .cloned()
            .collect();
        // Alternatives and virtual packages need not exist.
        let open = archive.offered(open)?;
        let wanted = likely_packages(&missing, &open);
        if wanted.is_empty() {
            return Err(LibraryClosureError::Missing {
                package: package.to_owned(),
                sonames: missing.into_iter().collect::<Vec<_>>().join(", "),
            });
        }
        let names: Vec<_> = wanted.iter().map(String::as_str).collect();
        for deb in archive.fetch(&names)? {
            archive.unpack(&deb, root)?;
        }
        candidates.extend(archive.dependencies(names)?);
        fetched.extend(wanted);
    }
}

/// Selects the packages to fetch next from `open`, the dependencies not fetched yet.
///
/// Selects the package whose name is most similar to each missing library (libdw1 for libdw.so.1).
/// Returns all of `open` if no name is similar, as for zlib1g.
fn likely_packages(missing: &BTreeSet<String>, open: &[String]) -> BTreeSet<String> {
    let close: BTreeSet<String> = missing
        .iter()
        .filter_map(|soname| {
            let best = open.iter().max_by_key(|name| name_similarity(soname, name))?;
            (name_similarity(soname, best) > "lib".len()).then(|| best.clone())
        })
        .collect();
    if close.is_empty() {
        open.iter().cloned().collect()
    } else {
        close
    }
}

/// Returns whether a package contains shared libraries, according to Debian's naming rules.
fn is_library_package(name: &str) -> bool {
    (name.starts_with("lib") || name.starts_with("zlib"))
        && !["-dev", "-data", "-common", "-stdlib", "-minimal", "-bin", "-perl"]
            .iter()
            .any(|ending| name.ends_with(ending))
}

/// Returns the length of the common prefix of a library name and a package name, disregarding
/// separators.
fn name_similarity(soname: &str, package: &str) -> usize {
    let plain = |name: &str| -> Vec<char> {
        name.chars()
            .filter(|c| !matches!(c, '-' | '.' | '_'))
            .map(|c| c.to_ascii_lowercase())
            .collect()
    };
    plain(&soname.replace(".so.", ""))
        .iter()
        .zip(plain(package).iter())
        .take_while(|(a, b)| a == b)
        .count()
}

type Resolved = (BTreeMap<String, PathBuf>, BTreeSet<String>);

/// Finds the direct and indirect libraries of `program` in the library directories below `root`.
/// Returns the path of each library, and the names of the missing ones.
fn resolve(root: &Path, program: &str) -> Result<Resolved, LibraryClosureError> {
    let mut found = BTreeMap::new();
    let mut missing = BTreeSet::new();
    let mut queue = VecDeque::from([root.join(program)]);
    while let Some(path) = queue.pop_front() {
        for soname in needed(&path)? {
            if found.contains_key(&soname) || missing.contains(&soname) {
                continue;
            }
            let file = LIBRARY_DIRS
                .iter()
                .map(|dir| root.join(dir).join(&soname))
                .find(|p| p.exists());
            match file {
                Some(file) => {
                    queue.push_back(file.clone());
                    found.insert(soname, file);
                }
                None => {
                    missing.insert(soname);
                }
            }
        }
    }
    Ok((found, missing))
}

/// Returns the names of the libraries (DT_NEEDED) and of the interpreter (PT_INTERP) that an ELF
/// file requires.
fn needed(path: &Path) -> Result<Vec<String>, LibraryClosureError> {
    let data = fs::read(path).map_err(|source| DebError::Io {
        path: path.to_owned(),
        source,
    })?;
    parse_needed(&data).map_err(|message| LibraryClosureError::Elf {
        path: path.to_owned(),
        message: message.to_string(),
    })
}

fn parse_needed(data: &[u8]) -> Result<Vec<String>, object::read::Error> {
    let header = elf::FileHeader64::<Endianness>::parse(data)?;
    let endian = header.endian()?;
    let sections = header.sections(endian, data)?;
    let mut names = Vec::new();
    if let Some((dynamic, link)) = sections.dynamic(endian, data)? {
        let strings = sections.strings(endian, data, link)?;
        for entry in dynamic {
            if entry.tag(endian) == elf::DT_NEEDED {
                names.push(String::from_utf8_lossy(entry.string(endian, strings)?).into_owned());
            }
        }
    }
    for segment in header.program_headers(endian, data)? {
        if let Some(interpreter) = segment.interpreter(endian, data)? {
            let path = String::from_utf8_lossy(interpreter);
            names.extend(path.rsplit('/').next().map(str::to_owned));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_is_searched_in_similarly_named_package() {
        let open = ["libdw1", "libelf1", "libpython3.11", "libunwind8", "zlib1g"].map(String::from);
        let best = |soname: &str| likely_packages(&BTreeSet::from([soname.to_owned()]), &open);
        assert_eq!(best("libdw.so.1"), BTreeSet::from(["libdw1".to_owned()]));
        assert_eq!(
            best("libpython3.11.so.1.0"),
            BTreeSet::from(["libpython3.11".to_owned()])
        );
        assert_eq!(
            best("libunwind-x86_64.so.8"),
            BTreeSet::from(["libunwind8".to_owned()])
        );
        // No package name resembles libz.so.1, so all packages are tried.
        assert_eq!(best("libz.so.1").len(), open.len());
    }

    #[test]
    fn data_and_development_packages_are_not_fetched() {
        for name in [
            "libpython3.11-stdlib",
            "libc6-dev",
            "perl-modules-5.36",
            "libslang2-dev",
        ] {
            assert!(!is_library_package(name), "{name}");
        }
        assert!(is_library_package("libperl5.36") && is_library_package("zlib1g"));
    }

    #[test]
    fn needed_libraries_of_dynamic_program_are_listed() {
        let names = needed(Path::new("/bin/sh")).unwrap();
        assert!(names.iter().any(|name| name == "libc.so.6"), "{names:?}");
    }

    #[test]
    fn non_elf_file_is_an_error() {
        for data in [&b""[..], b"\x7fELF", b"#!/bin/sh\n", &[0xFF; 4096]] {
            assert!(parse_needed(data).is_err());
        }
    }
}
