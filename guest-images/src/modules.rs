//! Resolves kernel module dependencies and the order in which modules must be loaded.
//!
//! Debian's packages do not contain `modules.dep` (depmod creates it at installation), so the
//! dependencies are read from each module's `.modinfo` section.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::{fs, io};

use kernel_images::{KernelImageError, bzimage};
use object::{Object as _, ObjectSection as _};

/// Error returned when kernel modules cannot be collected.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// A file or directory could not be read.
    #[error("{path}")]
    Io {
        /// Path of the file or directory that could not be read.
        path: PathBuf,
        /// Error returned by the operating system.
        #[source]
        source: io::Error,
    },
    /// A kernel module could not be decompressed.
    #[error(transparent)]
    Unpack(#[from] KernelImageError),
    /// The named module is neither a file nor built into the kernel.
    #[error("module {0} not found in the kernel package")]
    NotFound(String),
    /// A module file is not a valid ELF object.
    #[error("{path}: not a readable module: {message}")]
    Malformed {
        /// Path of the module file.
        path: PathBuf,
        /// Reason why the module file is invalid.
        message: String,
    },
}

/// A kernel module that is ready to be loaded.
pub struct KernelModule {
    /// Name of the module, with underscores.
    pub name: String,
    /// Decompressed ELF object of the module.
    pub data: Vec<u8>,
}

/// Collects the `wanted` modules and all their dependencies from a kernel's module directory, in
/// load order. Omits modules that are built into the kernel.
pub fn collect(module_dir: &Path, wanted: &[&str]) -> Result<Vec<KernelModule>, ModuleError> {
    let mut files = BTreeMap::new();
    index(module_dir, &mut files)?;
    let built_in = match fs::read_to_string(module_dir.join("modules.builtin")) {
        Ok(list) => list
            .lines()
            .filter_map(|line| module_name(Path::new(line)))
            .collect(),
        Err(_) => BTreeSet::new(),
    };
    let mut collection = ModuleCollection {
        files,
        built_in,
        done: BTreeSet::new(),
        order: Vec::new(),
    };
    for name in wanted {
        collection.add(&normal(name))?;
    }
    Ok(collection.order)
}

struct ModuleCollection {
    files: BTreeMap<String, PathBuf>,
    built_in: BTreeSet<String>,
    done: BTreeSet<String>,
    order: Vec<KernelModule>,
}

impl ModuleCollection {
    fn add(&mut self, name: &str) -> Result<(), ModuleError> {
        // Marking the module before its dependencies are visited also terminates cycles.
        if !self.done.insert(name.to_owned()) || self.built_in.contains(name) {
            return Ok(());
        }
        let path = self
            .files
            .get(name)
            .ok_or_else(|| ModuleError::NotFound(name.to_owned()))?;
        let malformed = |message: String| ModuleError::Malformed {
            path: path.clone(),
            message,
        };
        let data = read_module(path)?;
        let depends = depends(&data).map_err(|error| malformed(error.to_string()))?;
        for dependency in depends {
            self.add(&dependency)?;
        }
        self.order.push(KernelModule {
            name: name.to_owned(),
            data,
        });
        Ok(())
    }
}

/// Replaces dashes in a module name with underscores, because module tools treat `kvm-amd` and
/// `kvm_amd` as equal.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns the module name of a path. For example, the name for `kernel/arch/x86/kvm/kvm-amd.ko.xz`
/// is `kvm_amd`.
fn module_name(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let (name, rest) = file.split_once(".ko")?;
    matches!(rest, "" | ".xz" | ".zst" | ".gz").then(|| normal(name))
}

fn index(dir: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<(), ModuleError> {
    let error = |source| ModuleError::Io {
        path: dir.to_owned(),
        source,
    };
    for entry in fs::read_dir(dir).map_err(error)? {
        let entry = entry.map_err(error)?;
        let path = entry.path();
        if entry.file_type().map_err(error)?.is_dir() {
            index(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// Reads a module and decompresses it if needed, because newer Debian releases compress modules.
fn read_module(path: &Path) -> Result<Vec<u8>, ModuleError> {
    let error = |source| ModuleError::Io {
        path: path.to_owned(),
        source,
    };
    let data = fs::read(path).map_err(error)?;
    let name = format!("module {}", path.display());
    let (data, _) = bzimage::unpack(&name, &data)?;
    Ok(data)
}

/// Returns the names in the `depends=` entry of a module's `.modinfo` section.
fn depends(data: &[u8]) -> Result<Vec<String>, object::read::Error> {
    let file = object::File::parse(data)?;
    let Some(section) = file.section_by_name(".modinfo") else {
        return Ok(Vec::new());
    };
    Ok(section
        .data()?
        .split(|&byte| byte == 0)
        .filter_map(|line| std::str::from_utf8(line).ok()?.strip_prefix("depends="))
        .flat_map(|list| list.split(','))
        .filter(|name| !name.is_empty())
        .map(normal)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_names_ignore_directory_compression_and_dashes() {
        assert_eq!(
            module_name(Path::new("kernel/kvm/kvm-amd.ko")).unwrap(),
            "kvm_amd"
        );
        assert_eq!(module_name(Path::new("a/irqbypass.ko.xz")).unwrap(), "irqbypass");
        assert_eq!(module_name(Path::new("a/modules.order")), None);
        assert_eq!(module_name(Path::new("a/x.ko.orig")), None);
    }

    #[test]
    fn missing_module_is_reported_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let error = collect(dir.path(), &["kvm-amd"]).err().unwrap();
        assert!(error.to_string().contains("kvm_amd"), "{error}");
    }

    #[test]
    fn built_in_modules_need_no_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(
            dir.path().join("modules.builtin"),
            "kernel/drivers/virtio/virtio.ko\n",
        )
        .unwrap();
        assert!(collect(dir.path(), &["virtio"]).unwrap().is_empty());
    }
}
