//! The directory in which `perf` keeps symbols by build-id, `~/.debug` if not told otherwise.
//!
//! `perf record` puts there what its samples fell into, so that `perf report` has names later and without an
//! option. Its layout (`tools/perf/util/build-id.c`):
//!
//! | path | what |
//! |---|---|
//! | `[kernel.kallsyms]/ID/kallsyms` | a kernel's symbols, in the form of /proc/kallsyms, of any of its boots |
//! | `PATH/ID/elf` | a program or library |
//! | `.build-id/ID[..2]/ID[2..]` | a link to the directory of one of these |
//!
//! A guest chose the paths of its programs. They lie under `perfvisor/`, so that none can take the place of
//! anything else, and links and dots in them mean nothing.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Component, Path, PathBuf};

use super::perfdata::KERNEL_NAME;
use kernel_images::build_id::BuildId;

/// What the directory of the guests' programs is called.
const PROGRAMS: &str = "perfvisor";

/// A build-id directory.
#[derive(Debug, Clone)]
pub struct BuildIdDir {
    root: PathBuf,
}

impl BuildIdDir {
    /// In `root`, which need not be there yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// The one that `perf` uses if not told otherwise; `None` for who has no home directory.
    pub fn of_user() -> Option<Self> {
        let home = std::env::var_os("HOME").filter(|home| !home.is_empty())?;
        Some(Self::new(Path::new(&home).join(".debug")))
    }

    /// Puts a kernel's symbols in, in place of those that are there.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn add_kallsyms(
        &self,
        id: BuildId,
        write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
    ) -> io::Result<()> {
        let inside = Path::new(KERNEL_NAME).join(id.to_string());
        let mut file = self.file(&inside.join("kallsyms"))?;
        write(&mut file)?;
        file.finish()?;
        self.link(id, &inside)
    }

    /// Puts a guest's program in, unless it is there: what `read` gives, which the guest calls `path`. Of a
    /// build-id of one byte there is no file in such a directory, and nothing is put in.
    ///
    /// # Errors
    /// That of `read`, or the directory cannot be written.
    pub fn add_program(
        &self,
        id: BuildId,
        path: &str,
        read: impl FnOnce() -> io::Result<Vec<u8>>,
    ) -> io::Result<()> {
        if id.length() < 2 {
            return Ok(());
        }
        let names = Path::new(path).components().filter_map(|part| match part {
            Component::Normal(name) => Some(name),
            _ => None,
        });
        let inside: PathBuf = [PROGRAMS.as_ref()].into_iter().chain(names).collect();
        let inside = inside.join(id.to_string());
        if !self.root.join(&inside).join("elf").is_file() {
            let mut copy = self.file(&inside.join("elf"))?;
            copy.write_all(&read()?)?;
            copy.finish()?;
        }
        self.link(id, &inside)
    }

    /// A file that is there when it is complete.
    fn file(&self, inside: &Path) -> io::Result<Whole> {
        let path = self.root.join(inside);
        let directory = path.parent().unwrap_or(&self.root);
        fs::create_dir_all(directory)?;
        let part = directory.join(format!(".part-{}", std::process::id()));
        let out = BufWriter::new(File::create(&part)?);
        Ok(Whole {
            out,
            part: Some(part),
            path,
        })
    }

    /// Has perf find `inside` by its build-id.
    fn link(&self, id: BuildId, inside: &Path) -> io::Result<()> {
        let digits = id.to_string();
        let (first, rest) = digits.split_at(2);
        let directory = self.root.join(".build-id").join(first);
        fs::create_dir_all(&directory)?;
        let link = directory.join(rest);
        let target = Path::new("../..").join(inside);
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

/// A file that is being written under another name.
struct Whole {
    out: BufWriter<File>,
    part: Option<PathBuf>,
    path: PathBuf,
}

impl Whole {
    fn finish(mut self) -> io::Result<()> {
        self.out.flush()?;
        if let Some(part) = &self.part {
            fs::rename(part, &self.path)?;
        }
        self.part = None;
        Ok(())
    }
}

impl Write for Whole {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

impl Drop for Whole {
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
    fn a_kernel_s_symbols_are_found_by_its_build_id() {
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
        // What is there stays, and half of the new is not left.
        assert_eq!(fs::read_to_string(by_id.join("kallsyms")).unwrap(), "new");
        assert_eq!(fs::read_dir(&by_id).unwrap().count(), 1);
    }

    /// A guest says what its programs are called.
    #[test]
    fn no_path_of_a_guest_leads_elsewhere() {
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
