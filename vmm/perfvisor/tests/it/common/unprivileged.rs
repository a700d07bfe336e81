//! Commands run by an unprivileged user with access to /dev/kvm.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::test_lock::{self, SharedLock};
use super::vm::put_program;

/// User ID of the unprivileged user.
pub const NOBODY: u32 = 65534;

/// Shell script that enters a mount namespace in which all users may open /dev/kvm, and runs
/// `setpriv` with the given arguments.
const AS_NOBODY: &str = r#"
    test -e "$0/kvm" || { mknod "$0/kvm" c "$1" "$2" && chmod 666 "$0/kvm"; } || exit 99
    mount --bind "$0/kvm" /dev/kvm || exit 99
    shift 2
    exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"
"#;

/// An unprivileged user with a private directory that contains a copy of the program, because the
/// build directory may be inaccessible to that user.
pub struct UnprivilegedUser {
    dir: TempDir,
    kvm: u64,
    rights: &'static [&'static str],
    program: String,
    _lock: SharedLock,
}

impl UnprivilegedUser {
    /// Creates the user with the setpriv(1) options `rights`. Returns `None` if KVM is unavailable
    /// or the command `first` fails under that user.
    pub fn with(rights: &'static [&'static str], first: &[&str]) -> Option<Self> {
        let Ok(kvm) = fs::metadata("/dev/kvm") else {
            test_support::skip::skipped("no /dev/kvm here", false);
            return None;
        };
        let lock = test_lock::shared();
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("program");
        put_program(&program);
        let nobody = Self {
            program: program.to_str().unwrap().to_owned(),
            dir,
            kvm: kvm.rdev(),
            rights,
            _lock: lock,
        };
        let able = chown(nobody.dir(), Some(NOBODY), Some(NOBODY)).is_ok()
            && nobody
                .command(first)
                .output()
                .is_ok_and(|able| able.status.success());
        if !able {
            test_support::skip::skipped(&format!("root cannot run {first:?} as another user here"), false);
        }
        able.then_some(nobody)
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Returns a command that runs as this user.
    pub fn command(&self, args: &[&str]) -> Command {
        let (major, minor) = (self.kvm >> 8 & 0xfff, self.kvm & 0xff);
        let mut command = Command::new("unshare");
        command
            .args(["-m", "sh", "-c", AS_NOBODY])
            .arg(self.dir())
            .args([major, minor].map(|number| number.to_string()))
            .args(self.rights)
            .args(args)
            .env("XDG_RUNTIME_DIR", self.dir())
            .stdin(Stdio::null());
        command
    }

    /// Returns a command that runs the program as this user.
    pub fn perfvisor(&self, args: &[&str]) -> Command {
        self.command(&[&[self.program.as_str()], args].concat())
    }
}
