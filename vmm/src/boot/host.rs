//! Which KVM this host has, and whether it can run the guest at hand.

use std::io;
use std::path::Path;

use super::KernelKind;
use super::error::BootError;

/// Which implementation is behind /dev/kvm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvmFlavour {
    /// Intel VT-x (module kvm_intel).
    Vmx,
    /// AMD-V (module kvm_amd).
    Svm,
    /// A KVM without hardware virtualisation; the module's name. Guest kernels run in KVM's
    /// instruction emulator there.
    SoftwareOnly(String),
    /// None of the modules we know, for instance built into a renamed kernel.
    Unknown,
}

impl KvmFlavour {
    /// Whether guest code at CPL 0 runs on the processor.
    pub fn runs_kernels_natively(&self) -> bool {
        !matches!(self, KvmFlavour::SoftwareOnly(_))
    }
}

impl std::fmt::Display for KvmFlavour {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KvmFlavour::Vmx => f.write_str("VT-x"),
            KvmFlavour::Svm => f.write_str("AMD-V"),
            KvmFlavour::SoftwareOnly(module) => write!(f, "software-only, module {module}"),
            KvmFlavour::Unknown => f.write_str("unknown"),
        }
    }
}

/// Looks at the host's modules.
pub fn kvm_flavour() -> KvmFlavour {
    flavour_in(Path::new("/sys/module"))
}

/// As [`kvm_flavour`], of a directory like /sys/module.
fn flavour_in(modules: &Path) -> KvmFlavour {
    // Only one vendor module can own /dev/kvm; a software one replaces the others.
    if modules.join("kvm_pvm").exists() {
        return KvmFlavour::SoftwareOnly("kvm_pvm".into());
    }
    if modules.join("kvm_intel").exists() {
        return KvmFlavour::Vmx;
    }
    if modules.join("kvm_amd").exists() {
        return KvmFlavour::Svm;
    }
    KvmFlavour::Unknown
}

/// Whether a kernel of this kind needs a KVM that runs CPL 0 on the processor. Linux does: it uses
/// instructions a software KVM's emulator lacks. Multiboot kernels may do without.
pub fn needs_full_kvm(kind: &KernelKind) -> bool {
    match kind {
        KernelKind::Vmlinux | KernelKind::BzImage { .. } => true,
        KernelKind::Multiboot => false,
    }
}

/// Refuses a kernel this host's KVM cannot run.
pub fn check_kvm(kind: &KernelKind, flavour: &KvmFlavour) -> Result<(), BootError> {
    if needs_full_kvm(kind) && !flavour.runs_kernels_natively() {
        return Err(BootError::NeedsFullKvm {
            flavour: flavour.to_string(),
        });
    }
    Ok(())
}

/// The error for a failure to open /dev/kvm, with its remedy.
pub fn kvm_open_error(source: io::Error) -> BootError {
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => BootError::KvmMissing,
        Some(libc::EACCES | libc::EPERM) => BootError::KvmPermission,
        _ => BootError::KvmOpen { source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flavour_follows_the_loaded_module() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(flavour_in(dir.path()), KvmFlavour::Unknown);
        std::fs::create_dir(dir.path().join("kvm_amd")).unwrap();
        assert_eq!(flavour_in(dir.path()), KvmFlavour::Svm);
        std::fs::create_dir(dir.path().join("kvm_pvm")).unwrap();
        let software = flavour_in(dir.path());
        assert!(!software.runs_kernels_natively());
        assert!(check_kvm(&KernelKind::Multiboot, &software).is_ok());
        let err = check_kvm(&KernelKind::Vmlinux, &software)
            .unwrap_err()
            .to_string();
        assert!(
            err.contains("kvm_pvm") && err.contains("lab") && !err.contains('\n'),
            "{err}"
        );
    }
}
