//! The Debian image built by `make debian`, provided to VMs as one or more disks.

use std::path::PathBuf;

use crate::artefacts::target_dir;
use crate::lab::LabOptions;
use crate::limit::ProcessTimeLimits;
use crate::process::{HostCommand, HostProcess};
use crate::test_host::{TestHost, TestHostError};

/// Kernel command line of the image: root file system, console and clock.
pub const CMDLINE: &str = "root=/dev/vda rw console=ttyS0 tsc=reliable no_timer_check nokaslr";
/// Shell prompt of the Debian image after login.
pub const PROMPT: &str = "root@perfvisor-debian";

/// A test host with copies of the Debian image, each of which is available as a disk.
pub struct DebianTestHost {
    /// Test host on which VMs of the image run.
    pub place: TestHost,
    /// Path of the image's kernel on the test host.
    pub kernel: String,
    /// Path of the image's initrd on the test host.
    pub initrd: String,
    /// Paths of the disk images on the test host, each an independent copy. Writes to them are
    /// discarded.
    pub disks: Vec<String>,
}

impl DebianTestHost {
    /// Provides `disks` independent copies of the image as disks. `options` apply if the test host
    /// is a lab.
    ///
    /// # Errors
    /// Returns an error if the image has not been built or the host cannot be prepared.
    pub fn new(disks: u8, options: LabOptions) -> Result<Self, TestHostError> {
        let (kernel, initrd, disk) = (built("vmlinuz")?, built("initrd.img")?, built("disk.img")?);
        let mut options = options;
        options.files.extend([
            ("guest/debian/vmlinuz".to_owned(), kernel.clone()),
            ("guest/debian/initrd.img".to_owned(), initrd.clone()),
        ]);
        options.disks = vec![disk.clone(); disks.into()];
        let place = TestHost::choose(&options)?;
        if let TestHost::Lab(_) = place {
            return Ok(Self {
                place,
                kernel: "/guest/debian/vmlinuz".to_owned(),
                initrd: "/guest/debian/initrd.img".to_owned(),
                disks: ('a'..='z')
                    .take(disks.into())
                    .map(|n| format!("/dev/vd{n}"))
                    .collect(),
            });
        }
        let mut copies = Vec::new();
        for n in 0..disks {
            // The copy is sparse.
            let copy = place.scratch(&format!("debian-{n}.img"));
            let command = HostCommand::new("cp").args(["--sparse=always", &disk.to_string_lossy(), &copy]);
            let output = place.run(&command, ProcessTimeLimits::GENEROUS)?;
            if !output.success() {
                return Err(TestHostError::File {
                    path: copy.into(),
                    message: output.stderr_text(),
                });
            }
            copies.push(copy);
        }
        Ok(Self {
            place,
            kernel: kernel.to_string_lossy().into_owned(),
            initrd: initrd.to_string_lossy().into_owned(),
            disks: copies,
        })
    }

    /// Returns the command that runs the image on disk number `disk` as VM `name`. Arguments may be
    /// appended.
    ///
    /// # Errors
    /// Returns an error if Perfvisor cannot be built.
    pub fn command(&self, name: &str, disk: usize) -> Result<HostCommand, TestHostError> {
        Ok(HostCommand::new(self.place.perfvisor()?)
            .args(["run", "--name", name, "--kernel", &self.kernel])
            .args(["--initrd", &self.initrd, "--disk", &self.disks[disk]])
            .args(["--cmdline", CMDLINE]))
    }
}

/// Returns the path of a file built by `make debian`.
fn built(name: &str) -> Result<PathBuf, TestHostError> {
    let path = target_dir().join("debian").join(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(TestHostError::File {
        path,
        message: "no such file; type: make debian".to_owned(),
    })
}

/// Error returned when a guest does not print an expected text.
#[derive(Debug, thiserror::Error)]
#[error("the guest has not printed {text:?}; its console:\n{console}")]
pub struct MissingGuestOutput {
    text: String,
    console: String,
}

/// Waits until the console of `vm` contains `text`.
///
/// # Errors
/// Returns [`MissingGuestOutput`] with the guest's output if the text does not appear within
/// `limit`.
pub fn says(vm: &HostProcess, text: &str, limit: ProcessTimeLimits) -> Result<(), MissingGuestOutput> {
    if vm.wait_for(text, limit) {
        return Ok(());
    }
    Err(MissingGuestOutput {
        text: text.to_owned(),
        console: vm.stdout_so_far(),
    })
}
