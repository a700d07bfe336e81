//! Writes the directory in which `perf` looks up symbols by build ID, `~/.debug` by default.
//!
//! `perf record` stores the files to which its samples refer there, so that `perf report` finds
//! symbols later without an option. Layout (`tools/perf/util/build-id.c`):
//!
//! | path | contents |
//! |---|---|
//! | `[kernel.kallsyms]/ID/kallsyms` | symbols of a kernel in the format of /proc/kallsyms, from any of its boots |
//! | `PATH/ID/elf` | a program or library |
//! | `.build-id/ID[..2]/ID[2..]` | a symbolic link to one of these directories |
//!
//! The guest chooses the paths of its programs. The programs are stored below `perfvisor/`, so they
//! cannot replace other files, and `..` and links in their paths have no effect. The guest also
//! chooses the build IDs, and may use those of another guest's program or of the host's kernel. An
//! existing entry is therefore never replaced, and a conflict is reported as an error.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use super::perfdata::KERNEL_NAME;
use kernel_images::build_id::BuildId;
use kernel_images::symbols::KernelSymbols;

/// Directory of the guests' programs, below the build-ID directory.
const PROGRAMS: &str = "perfvisor";
/// Name of the file with the contents of a program in its directory, and name of the file with a
/// kernel's symbols.
const ELF: &str = "elf";
const KALLSYMS: &str = "kallsyms";

/// Directory in which `perf` looks up symbols by build ID.
#[derive(Debug, Clone)]
pub struct BuildIdDir {
    root: PathBuf,
}

impl BuildIdDir {
    /// Creates a handle for the directory `root`, which need not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the path of the build-ID directory.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// Returns the default directory of `perf`, or `None` if the user has no home directory.
    pub fn of_user() -> Option<Self> {
        let home = std::env::var_os("HOME").filter(|home| !home.is_empty())?;
        Some(Self::new(Path::new(&home).join(".debug")))
    }

    /// Adds the symbols of a kernel, unless symbols of the same kernel, even from another boot, are
    /// already present.
    ///
    /// # Errors
    /// Returns an error if the directory cannot be written or the build ID is already used by
    /// another file.
    pub fn add_kallsyms(
        &self,
        id: BuildId,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let inside = Path::new(KERNEL_NAME).join(id.to_string());
        let mut text = Vec::new();
        write(&mut text)?;
        let path = self.root.join(&inside).join(KALLSYMS);
        let there = fs::read(&path).ok();
        let there = there.and_then(|text| KernelSymbols::parse_text(&text).ok());
        match there.zip(KernelSymbols::parse_text(&text).ok()) {
            Some((there, new)) if functions(&there) != functions(&new) => {
                return Err(taken(&path, "this guest's kernel"));
            }
            Some(_) => {}
            // The directory of this kernel contains no usable file yet.
            None => self.put(&inside.join(KALLSYMS), &text)?,
        }
        match self.holder(id, &inside) {
            Some(holder) => Err(taken(&holder, "this guest's kernel")),
            None => self.link(id, &inside),
        }
    }

    /// Adds a program of the guest, unless it is already present. `name` is its path in the guest,
    /// and `read` returns its contents. A program whose build ID has one byte is skipped, because
    /// the layout has no path for such an ID.
    ///
    /// # Errors
    /// Returns the error of `read`, or an error if the directory cannot be written or the build ID
    /// is already used by another file.
    pub fn add_program(
        &self,
        id: BuildId,
        name: &str,
        read: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> io::Result<()> {
        if id.length() < 2 {
            return Ok(());
        }
        let names = Path::new(name).components().filter_map(|part| match part {
            Component::Normal(part) => Some(part),
            _ => None,
        });
        let inside: PathBuf = [PROGRAMS.as_ref()].into_iter().chain(names).collect();
        let inside = inside.join(id.to_string());
        let bytes = read()?;
        let is_it = |path: &Path| {
            has(path, &bytes)
                .then_some(())
                .ok_or_else(|| taken(path, &format!("this guest's {}", name.escape_debug())))
        };
        let copy = self.root.join(&inside).join(ELF);
        if let Some(holder) = self.holder(id, &inside) {
            return is_it(&holder);
        }
        if copy.is_file() {
            is_it(&copy)?;
        } else {
            self.put(&inside.join(ELF), &bytes)?;
        }
        self.link(id, &inside)
    }

    /// Returns the file that is stored under the build ID `id`. Returns `None` if there is none, or
    /// if the build ID's link refers to the directory `inside`.
    fn holder(&self, id: BuildId, inside: &Path) -> Option<PathBuf> {
        let (directory, link) = self.link_path(id);
        let old = fs::read_link(link).ok()?;
        let holder = directory.join(&old);
        let files = [ELF, KALLSYMS].map(|name| holder.join(name));
        let found = files.into_iter().find(|file| file.is_file())?;
        (old != target(inside)).then_some(found)
    }

    /// Returns the directory of a build ID's symbolic link, and the path of the link.
    fn link_path(&self, id: BuildId) -> (PathBuf, PathBuf) {
        let digits = id.to_string();
        let (first, rest) = digits.split_at(2);
        let directory = self.root.join(".build-id").join(first);
        let link = directory.join(rest);
        (directory, link)
    }

    fn put(&self, inside: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.file(inside)?;
        file.write_all(bytes)?;
        file.finish()
    }

    /// Creates the file `inside`, a path relative to this directory. The file appears at this path
    /// only when it is complete.
    fn file(&self, inside: &Path) -> io::Result<AtomicFile> {
        let path = self.root.join(inside);
        let directory = path.parent().unwrap_or(&self.root);
        make_directories(directory)?;
        let part = directory.join(format!(".part-{}", std::process::id()));
        let _ = fs::remove_file(&part);
        let out = File::options()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&part)?;
        let out = BufWriter::new(out);
        Ok(AtomicFile {
            out,
            part: Some(part),
            path,
        })
    }

    /// Creates the symbolic link with which `perf` finds `inside` by its build ID.
    fn link(&self, id: BuildId, inside: &Path) -> io::Result<()> {
        let (directory, link) = self.link_path(id);
        make_directories(&directory)?;
        let target = target(inside);
        if fs::read_link(&link).is_ok_and(|old| old == target) {
            return Ok(());
        }
        let part = directory.join(format!(".part-{}", std::process::id()));
        let _ = fs::remove_file(&part);
        std::os::unix::fs::symlink(target, &part)?;
        fs::rename(&part, &link).inspect_err(|_| {
            let _ = fs::remove_file(&part);
        })
    }
}

/// Creates `directory` and its missing parents with access only for this user, because the files
/// contain guest memory.
fn make_directories(directory: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
}

/// Returns the target of the symbolic link of a build ID. The target is relative to the link.
fn target(inside: &Path) -> PathBuf {
    Path::new("../..").join(inside)
}

/// Returns whether the file at `path` has exactly these contents.
fn has(path: &Path, bytes: &[u8]) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.len() == bytes.len() as u64)
        && fs::read(path).is_ok_and(|there| there == bytes)
}

/// Returns the functions of a kernel with their offsets from its start. Functions of modules are
/// excluded, because their offsets differ from boot to boot.
fn functions(symbols: &KernelSymbols) -> BTreeSet<(u64, &str)> {
    let at = |name| symbols.by_name(name).map(|symbol| symbol.address);
    let start = at("_text").or_else(|| at("_stext")).unwrap_or_default();
    let end = at("_etext").unwrap_or(u64::MAX);
    let inside = symbols
        .iter()
        .filter(|symbol| (start..end).contains(&symbol.address));
    inside
        .map(|symbol| (symbol.address - start, symbol.name))
        .collect()
}

fn taken(path: &Path, what: &str) -> io::Error {
    io::Error::other(format!(
        "{} has the build-id of {what} and is something else; remove it if that is wrong, or give this guest a \
         directory of its own (--buildid-dir)",
        path.display()
    ))
}

/// A file that has a temporary name until it is complete.
struct AtomicFile {
    out: BufWriter<File>,
    part: Option<PathBuf>,
    path: PathBuf,
}

impl AtomicFile {
    fn finish(mut self) -> io::Result<()> {
        self.out.flush()?;
        if let Some(part) = &self.part {
            fs::rename(part, &self.path)?;
        }
        self.part = None;
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if let Some(part) = &self.part {
            let _ = fs::remove_file(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> BuildId {
        BuildId::new(&[0xab; 20]).unwrap()
    }

    #[test]
    fn kernel_symbols_are_found_by_build_id() {
        let root = tempfile::tempdir().unwrap();
        let directory = BuildIdDir::new(root.path());
        for text in ["old", "new"] {
            directory
                .add_kallsyms(id(), |out| out.write_all(text.as_bytes()))
                .unwrap();
        }
        let by_id = root.path().join(".build-id/ab").join("ab".repeat(19));
        assert_eq!(fs::read_to_string(by_id.join("kallsyms")).unwrap(), "new");
        let failed = directory.add_kallsyms(id(), |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("full"))
        });
        assert!(failed.is_err());
        // The existing file is unchanged, and no temporary file is left behind.
        assert_eq!(fs::read_to_string(by_id.join("kallsyms")).unwrap(), "new");
        assert_eq!(fs::read_dir(&by_id).unwrap().count(), 1);
    }

    #[test]
    fn build_id_dir_is_private_to_user() {
        use std::os::unix::fs::PermissionsExt;

        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().join("debug");
        let directory = BuildIdDir::new(&root);
        directory
            .add_kallsyms(id(), |out| out.write_all(b"names"))
            .unwrap();
        let other = BuildId::new(&[0xcd; 20]).unwrap();
        directory
            .add_program(other, "/bin/x", || Ok("code".into()))
            .unwrap();
        let mut left = vec![root];
        let mut files = 0;
        while let Some(path) = left.pop() {
            let meta = fs::symlink_metadata(&path).unwrap();
            let mode = meta.permissions().mode() & 0o777;
            if meta.is_dir() {
                assert_eq!(mode & 0o077, 0, "{}: {mode:o}", path.display());
                left.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            } else if meta.is_file() {
                assert_eq!(mode, 0o600, "{}: {mode:o}", path.display());
                files += 1;
            }
        }
        assert_eq!(files, 2);
    }

    /// Returns the kallsyms text of a kernel loaded at `start`, with a module at a different
    /// address.
    fn kallsyms(start: u64, function: &str) -> String {
        let at = |offset: u64, name: &str| format!("{:x} T {name}\n", start + offset);
        let module = format!(
            "{:x} t init_module\t[ext4]\n",
            0xffff_ffff_c000_0000_u64 ^ start >> 8
        );
        [at(0, "_text"), at(0x40, function), at(0x100, "_etext"), module].concat()
    }

    /// A guest may claim the build ID of another guest's kernel or program, or of the host's
    /// kernel. Existing entries are not replaced.
    #[test]
    fn existing_build_id_is_not_replaced() {
        let root = tempfile::tempdir().unwrap();
        let directory = BuildIdDir::new(root.path());
        let kernel = |text: &str| directory.add_kallsyms(id(), |out| out.write_all(text.as_bytes()));
        let by_id = root.path().join(".build-id/ab").join("ab".repeat(19));
        let first = kallsyms(0xffff_ffff_8100_0000, "schedule");
        kernel(&first).unwrap();
        // Adds the same kernel from another boot, and then forged entries with the same build IDs.
        kernel(&kallsyms(0xffff_ffff_9200_0000, "schedule")).unwrap();
        let refused = kernel(&kallsyms(0xffff_ffff_8100_0000, "secret")).unwrap_err();
        assert!(refused.to_string().contains("--buildid-dir"), "{refused}");
        let program = |id, path: &str, text: &str| directory.add_program(id, path, || Ok(text.into()));
        program(id(), "/bin/x", "forged").unwrap_err();
        assert_eq!(fs::read_to_string(by_id.join("kallsyms")).unwrap(), first);

        let other = BuildId::new(&[0xcd; 20]).unwrap();
        program(other, "/bin/x", "code").unwrap();
        for path in ["/bin/x", "/bin/y"] {
            program(other, path, "code").unwrap();
            let refused = program(other, path, "forged").unwrap_err();
            assert!(refused.to_string().contains(path), "{refused}");
        }
        let by_id = root.path().join(".build-id/cd").join("cd".repeat(19));
        assert_eq!(fs::read_to_string(by_id.join("elf")).unwrap(), "code");
        // A removed entry can be added again.
        fs::remove_dir_all(root.path().join("perfvisor")).unwrap();
        program(other, "/bin/y", "new").unwrap();
        assert_eq!(fs::read_to_string(by_id.join("elf")).unwrap(), "new");
    }

    /// A program whose path in the guest contains `..` or names of the layout is stored inside the
    /// build-ID directory.
    #[test]
    fn guest_paths_stay_inside_build_id_dir() {
        let root = tempfile::tempdir().unwrap();
        let program = root.path().join("program");
        fs::write(&program, "code").unwrap();
        let directory = BuildIdDir::new(root.path().join("debug"));
        let one = BuildId::new(&[0xab]).unwrap();
        directory
            .add_program(one, "/bin/x", || fs::read(&program))
            .unwrap();
        assert!(!root.path().join("debug").exists());
        for path in ["/../../etc/passwd", "/.build-id/ab", "bin/x/./../y", "/"] {
            directory.add_program(id(), path, || fs::read(&program)).unwrap();
            let by_id = root.path().join("debug/.build-id/ab").join("ab".repeat(19));
            assert_eq!(fs::read_to_string(by_id.join("elf")).unwrap(), "code");
            let inside = by_id.canonicalize().unwrap();
            let programs = root.path().canonicalize().unwrap().join("debug/perfvisor");
            assert!(inside.starts_with(programs), "{}", inside.display());
        }
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
    }
}
