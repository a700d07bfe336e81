//! The Debian image that `make debian` makes, where a VM can have it: once as each of several disks.

use std::path::PathBuf;

use crate::artefacts::target_dir;
use crate::lab::LabOptions;
use crate::limit::Limit;
use crate::place::{Place, PlaceError};
use crate::process::{Command, Process};

/// Where a VM finds its root file system, and that a vCPU's clock is the guest's.
pub const CMDLINE: &str = "root=/dev/vda rw console=ttyS0 tsc=reliable no_timer_check nokaslr";
/// What its console says when somebody has logged in.
pub const PROMPT: &str = "root@perfvisor-debian";

/// A place with the image in it.
pub struct Debian {
    /// Where VMs run.
    pub place: Place,
    /// Paths there: the image's kernel,
    pub kernel: String,
    /// its initrd,
    pub initrd: String,
    /// and raw images, each a copy of its own. What is written to them is lost.
    pub disks: Vec<String>,
}

impl Debian {
    /// Puts the image into a place as `disks` disks. `options` are for a lab, if that is the place.
    ///
    /// # Errors
    /// When the image was not built, or the place cannot be had.
    pub fn new(disks: u8, options: LabOptions) -> Result<Self, PlaceError> {
        let (kernel, initrd, disk) = (built("vmlinuz")?, built("initrd.img")?, built("disk.img")?);
        let mut options = options;
        options.files.extend([
            ("guest/debian/vmlinuz".to_owned(), kernel.clone()),
            ("guest/debian/initrd.img".to_owned(), initrd.clone()),
        ]);
        options.disks = vec![disk.clone(); disks.into()];
        let place = Place::choose(&options)?;
        if let Place::Lab(_) = place {
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
            // A copy takes no space for what is empty.
            let copy = place.scratch(&format!("debian-{n}.img"));
            let command = Command::new("cp").args(["--sparse=always", &disk.to_string_lossy(), &copy]);
            let output = place.run(&command, Limit::GENEROUS)?;
            if !output.success() {
                return Err(PlaceError::File {
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

    /// The command that runs the image on its disk number `disk` as VM `name`. More arguments may follow.
    ///
    /// # Errors
    /// When there is no Perfvisor.
    pub fn command(&self, name: &str, disk: usize) -> Result<Command, PlaceError> {
        Ok(Command::new(self.place.perfvisor()?)
            .args(["run", "--name", name, "--kernel", &self.kernel])
            .args(["--initrd", &self.initrd, "--disk", &self.disks[disk]])
            .args(["--cmdline", CMDLINE]))
    }
}

/// A file that `make debian` has made.
fn built(name: &str) -> Result<PathBuf, PlaceError> {
    let path = target_dir().join("debian").join(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(PlaceError::File {
        path,
        message: "no such file; type: make debian".to_owned(),
    })
}

/// A guest did not print what was waited for.
#[derive(Debug, thiserror::Error)]
#[error("the guest has not printed {text:?}; its console:\n{console}")]
pub struct NotSaid {
    text: String,
    console: String,
}

/// Waits until the guest has printed `text`.
///
/// # Errors
/// It has not, with what it has printed.
pub fn says(vm: &Process, text: &str, limit: Limit) -> Result<(), NotSaid> {
    if vm.wait_for(text, limit) {
        return Ok(());
    }
    Err(NotSaid {
        text: text.to_owned(),
        console: vm.stdout_so_far(),
    })
}
