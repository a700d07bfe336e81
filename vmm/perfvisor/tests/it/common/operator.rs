//! A running VM and its operator commands.

use std::os::unix::net::UnixStream;
use std::process::Output;
use std::time::Duration;

use control_api::client::Client;
use control_api::protocol::VmInfo;

use super::vm::SpinningVm;

/// A running VM under test.
pub struct TestVm {
    pub vm: SpinningVm,
    /// Number of vCPUs.
    pub vcpus: u32,
}

impl TestVm {
    /// Starts a VM with a spinning guest. Returns `None` if KVM is unavailable.
    pub fn spinning(vcpus: u32) -> Option<Self> {
        let vm = SpinningVm::start("test", &["--cpus", &vcpus.to_string()])?;
        Some(Self { vm, vcpus })
    }

    /// Starts a VM with one vCPU and room for hot-plugging up to `max` vCPUs.
    pub fn spinning_with_room(max: u32, args: &[&str]) -> Option<Self> {
        let cpus = format!("1,max={max}");
        let vm = SpinningVm::start("test", &[&["--cpus", &cpus], args].concat())?;
        Some(Self { vm, vcpus: 1 })
    }

    /// Returns the names of the vCPU threads.
    pub fn vcpu_threads(&self) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.vm.child.id())).unwrap();
        let name = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
        };
        let mut names: Vec<String> = tasks
            .filter_map(name)
            .map(|name| name.trim().to_owned())
            .collect();
        names.retain(|name| name.starts_with("vcpu"));
        names.sort();
        names
    }

    /// Returns the CPU time consumed by the first vCPU's thread.
    pub fn cpu_time(&self) -> Duration {
        self.vm.cpu_time()
    }

    pub fn sockets(&self) -> std::path::PathBuf {
        self.vm.runtime.path().join("perfvisor")
    }

    pub fn client(&self) -> Client {
        Client::connect_in(&self.sockets(), Some("test")).unwrap()
    }

    pub fn raw(&self) -> UnixStream {
        let stream = UnixStream::connect(self.sockets().join("test.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(300))).unwrap();
        stream
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.vm.command(args).output().unwrap()
    }

    /// Runs an operator command that must succeed, and returns its standard output.
    #[track_caller]
    pub fn run_for_stderr(&self, args: &[&str]) -> String {
        super::vm::stdout_of(&mut self.vm.command(args))
    }

    /// Returns the number of open descriptors of the VM.
    pub fn descriptors(&self) -> usize {
        self.vm.descriptors()
    }

    /// Returns the output of `ps`, once the VM has answered.
    pub fn ps(&self) -> Vec<VmInfo> {
        let text = super::vm::ps_until_all_answer(|| self.run_for_stderr(&["ps", "--json"]));
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

pub fn value_of(line: &str) -> serde_json::Value {
    serde_json::from_str(line).unwrap()
}
