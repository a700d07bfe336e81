//! Test hosts on which scenarios run: this machine's KVM, or the lab.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::artefacts::{self, BuildArtefactError};
use crate::hang::{self, ANSWER_LIMIT};
use crate::lab::{Lab, LabError, LabOptions};
use crate::limit::ProcessTimeLimits;
use crate::pool::TestHostPoolError;
use crate::process::{HostCommand, HostProcess, ProcessOutput, ProcessRunError};
use crate::report;

/// Error returned when a scenario cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum TestHostError {
    /// The lab host is unavailable.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// An artefact could not be built.
    #[error(transparent)]
    Artefact(#[from] BuildArtefactError),
    /// A process could not be run to its end.
    #[error(transparent)]
    Process(#[from] ProcessRunError),
    /// The pool rejected a request for a test host.
    #[error(transparent)]
    Pool(#[from] TestHostPoolError),
    /// A local file could not be read or written.
    #[error("{path}: {message}")]
    File {
        /// Path of the local file.
        path: PathBuf,
        /// Description of the failed operation.
        message: String,
    },
    /// The guest's kernel reported a problem.
    #[error("{0}")]
    Guest(String),
    /// The output of `perfvisor check` lacks a value.
    #[error("perfvisor check --json has no {pointer}:\n{output}")]
    Check {
        /// JSON pointer of the missing value.
        pointer: String,
        /// Output of `perfvisor check` that lacks the value.
        output: String,
    },
    /// The environment variable that selects the test host is invalid.
    #[error("PERFVISOR_PLACE={0}: must be \"direct\", \"lab\" or unset")]
    Choice(String),
}

/// Kind of KVM on this machine, which determines the guests that it can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvmGuestSupport {
    /// KVM with VT-x or AMD-V, which can run Linux guests.
    Hardware,
    /// KVM without hardware virtualization, which can run bare-metal guests only.
    SoftwareOnly,
    /// No usable /dev/kvm.
    None,
}

/// Determines the type of KVM on this machine.
pub fn probe_kvm() -> KvmGuestSupport {
    if fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_err()
    {
        return KvmGuestSupport::None;
    }
    let module = |name: &str| Path::new("/sys/module").join(name).exists();
    if module("kvm_pvm") || !(module("kvm_intel") || module("kvm_amd")) {
        return KvmGuestSupport::SoftwareOnly;
    }
    KvmGuestSupport::Hardware
}

/// A host that can run scenarios: this machine or a lab.
pub enum TestHost {
    /// This machine, with a directory for scratch files.
    Direct(ScratchDirectory),
    /// A lab host, emulated by QEMU.
    Lab(LabHost),
}

/// A directory for temporary files that is removed on drop.
pub struct ScratchDirectory(PathBuf);

impl ScratchDirectory {
    fn new() -> Result<Self, TestHostError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = artefacts::log_dir()?.join(format!("files-{}-{number}", std::process::id()));
        fs::create_dir_all(&directory).map_err(|error| file_error(&directory, &error))?;
        Ok(Self(directory))
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A lab on which tests run. If the lab terminates, the current test fails, and later tests run on
/// a new lab with the same options.
pub struct LabHost {
    options: LabOptions,
    lab: Mutex<Arc<Lab>>,
    /// Value that is dropped after the lab has been switched off.
    _guard: Option<Box<dyn Send + Sync>>,
}

impl LabHost {
    /// Boots a lab with the given options.
    ///
    /// # Errors
    /// Returns the same errors as [`Lab::boot`].
    pub(crate) fn boot_first(options: &LabOptions) -> Result<Self, LabError> {
        Ok(Self {
            options: options.clone(),
            lab: Mutex::new(Arc::new(boot(options)?)),
            _guard: None,
        })
    }

    /// Stores `guard`, which is dropped after the lab has been switched off.
    pub(crate) fn keep(self, guard: Box<dyn Send + Sync>) -> Self {
        Self {
            _guard: Some(guard),
            ..self
        }
    }

    /// Returns the running lab, and boots a new one if necessary. Files copied to a previous lab
    /// are lost.
    ///
    /// # Errors
    /// Returns the same errors as [`Lab::boot`].
    pub fn current(&self) -> Result<Arc<Lab>, LabError> {
        let mut lab = self.lab.lock().unwrap_or_else(PoisonError::into_inner);
        if lab.is_gone() {
            eprintln!("the lab host is gone; booting another one");
            *lab = Arc::new(boot(&self.options)?);
        }
        Ok(Arc::clone(&lab))
    }

    /// Returns the name of the lab, which is also the name of its console file without extension.
    pub(crate) fn name(&self) -> String {
        let lab = self.last();
        let stem = lab.log().file_stem().unwrap_or_default();
        stem.to_string_lossy().into_owned()
    }

    /// Kills the lab if it does not execute commands any more. The next use then boots a new lab.
    pub fn replace_if_hung(&self) {
        let lab = self.last();
        if !lab.is_gone() && !lab.answers(ANSWER_LIMIT) {
            eprintln!(
                "the lab host does not answer any more; its console is in {}",
                lab.log().display()
            );
            lab.abandon();
        }
    }

    /// Returns the lab that was booted last, even if it has terminated.
    pub fn last(&self) -> Arc<Lab> {
        Arc::clone(&self.lab.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl TestHost {
    /// Returns whether Linux guests run on this machine instead of in labs.
    ///
    /// # Errors
    /// Returns [`TestHostError::Choice`] if `PERFVISOR_PLACE` is invalid.
    pub fn is_direct() -> Result<bool, TestHostError> {
        match std::env::var("PERFVISOR_PLACE").as_deref() {
            Ok("direct") => Ok(true),
            Ok("lab") => Ok(false),
            Ok("") | Err(_) => Ok(probe_kvm() == KvmGuestSupport::Hardware),
            Ok(other) => Err(TestHostError::Choice(other.to_owned())),
        }
    }

    /// Selects this machine as the test host.
    ///
    /// # Errors
    /// Returns an error if the scratch directory cannot be created.
    pub fn direct() -> Result<TestHost, TestHostError> {
        Ok(TestHost::Direct(ScratchDirectory::new()?))
    }

    /// Describes the test host in one line: this machine, or the lab with its kernel and boot time.
    pub fn describe(&self) -> String {
        match self {
            TestHost::Direct(_) => "directly on this machine's /dev/kvm".to_owned(),
            TestHost::Lab(host) => {
                let lab = host.last();
                format!(
                    "in the lab host (QEMU, Linux {}), up after {:.1} s",
                    lab.kernel_release(),
                    lab.boot_time().as_secs_f64()
                )
            }
        }
    }

    /// Returns the path of the `perfvisor` binary on the test host.
    ///
    /// # Errors
    /// Returns an error if the binary cannot be built.
    pub fn perfvisor(&self) -> Result<String, TestHostError> {
        Ok(match self {
            TestHost::Direct(_) => text(&artefacts::binaries()?.perfvisor),
            TestHost::Lab(_) => "/bin/perfvisor".to_owned(),
        })
    }

    /// Returns the path on the test host of a guest file: `vmlinux`, `bzImage` or `initrd`.
    ///
    /// # Errors
    /// Returns an error if the images cannot be built.
    pub fn guest_file(&self, name: &str) -> Result<String, TestHostError> {
        Ok(match self {
            TestHost::Direct(_) => text(&artefacts::images()?.directory.join(name)),
            TestHost::Lab(_) => format!("/guest/{name}"),
        })
    }

    /// Returns the path on the test host of the bare-metal guest `name`, given without `.elf`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn bare_metal_guest(&self, name: &str) -> Result<String, TestHostError> {
        let file = format!("{name}.elf");
        Ok(match self {
            TestHost::Direct(_) => text(&artefacts::bare_metal_dir()?.join(file)),
            TestHost::Lab(_) => format!("/guest/{file}"),
        })
    }

    /// Returns the path of a scratch file on the test host. The file is removed at the end of the
    /// lease.
    pub fn scratch(&self, name: &str) -> String {
        match self {
            TestHost::Direct(directory) => text(&directory.0.join(name)),
            TestHost::Lab(_) => format!("/tmp/{name}"),
        }
    }

    /// Starts a process on the test host.
    ///
    /// # Errors
    /// Returns an error if the process cannot be started.
    pub fn start(&self, command: &HostCommand) -> Result<HostProcess, TestHostError> {
        Ok(match self {
            TestHost::Direct(_) => HostProcess::start_here(command)?,
            TestHost::Lab(host) => host.current()?.start(command)?,
        })
    }

    /// Runs a process on the test host until it exits, within `limit`.
    ///
    /// # Errors
    /// Returns an error if the process cannot be started or exceeds a limit.
    pub fn run(
        &self,
        command: &HostCommand,
        limit: impl Into<ProcessTimeLimits>,
    ) -> Result<ProcessOutput, TestHostError> {
        Ok(self.start(command)?.wait(limit)?)
    }

    /// Returns a Boolean value from the output of `perfvisor check`, selected by its JSON pointer,
    /// such as `/kvm/Ok/rdpmc_faults`.
    ///
    /// # Errors
    /// Returns [`TestHostError::Check`] if the value is missing, or another error if the command
    /// fails.
    pub fn check(&self, pointer: &str) -> Result<bool, TestHostError> {
        let command = HostCommand::new(self.perfvisor()?).args(["check", "--json"]);
        let output = self.run(&command, ProcessTimeLimits::GENEROUS)?.stdout_text();
        serde_json::from_str::<serde_json::Value>(&output)
            .ok()
            .and_then(|facts| facts.pointer(pointer)?.as_bool())
            .ok_or_else(|| TestHostError::Check {
                pointer: pointer.to_owned(),
                output,
            })
    }

    /// Describes the state of the lab in which a guest hangs. Returns an empty string if guests run
    /// on this machine.
    pub fn diagnose_hang(&self) -> String {
        match self {
            TestHost::Direct(_) => String::new(),
            TestHost::Lab(host) => {
                let lab = host.last();
                format!(
                    "{}(the lab's console: {})\n",
                    hang::diagnose(&lab),
                    lab.log().display()
                )
            }
        }
    }

    /// Writes a file on the test host.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn put(&self, path: &str, mode: u32, data: &[u8]) -> Result<(), TestHostError> {
        match self {
            TestHost::Lab(host) => Ok(host.current()?.put(path, mode, data)?),
            TestHost::Direct(_) => fs::write(path, data)
                .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(mode)))
                .map_err(|error| file_error(Path::new(path), &error)),
        }
    }

    /// Reads a file on the test host.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub fn get(&self, path: &str) -> Result<Vec<u8>, TestHostError> {
        match self {
            TestHost::Lab(host) => Ok(host.current()?.get(path)?),
            TestHost::Direct(_) => fs::read(path).map_err(|error| file_error(Path::new(path), &error)),
        }
    }
}

/// Boots a lab and adds its boot time to the totals of the report.
fn boot(options: &LabOptions) -> Result<Lab, LabError> {
    let lab = Lab::boot(options)?;
    report::lab_booted(lab.boot_time());
    Ok(lab)
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn file_error(path: &Path, error: &std::io::Error) -> TestHostError {
    TestHostError::File {
        path: path.to_owned(),
        message: error.to_string(),
    }
}
