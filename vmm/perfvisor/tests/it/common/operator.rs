//! A running VM with what its operator types.

use std::os::unix::net::UnixStream;
use std::process::Output;
use std::time::Duration;

use control_api::client::Client;
use control_api::protocol::VmInfo;

use super::vm::SpinningVm;

/// A VM and its operator's view of it.
pub struct TestVm {
    /// The VM.
    pub vm: SpinningVm,
    /// How many vCPUs it has.
    pub vcpus: u32,
}

impl TestVm {
    /// `None` where there is no KVM.
    pub fn spinning(vcpus: u32) -> Option<Self> {
        let vm = SpinningVm::start("test", &["--cpus", &vcpus.to_string()])?;
        Some(Self { vm, vcpus })
    }

    /// One vCPU, and room for more: `max` in all.
    pub fn spinning_with_room(max: u32, args: &[&str]) -> Option<Self> {
        let cpus = format!("1,max={max}");
        let vm = SpinningVm::start("test", &[&["--cpus", &cpus], args].concat())?;
        Some(Self { vm, vcpus: 1 })
    }

    /// Names of the vCPUs' threads.
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

    /// CPU time of the first vCPU's thread so far.
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

    /// Standard output of a command that must succeed.
    #[track_caller]
    pub fn say(&self, args: &[&str]) -> String {
        super::vm::stdout_of(&mut self.vm.command(args))
    }

    /// Descriptors the VM has open.
    pub fn descriptors(&self) -> usize {
        self.vm.descriptors()
    }

    /// What `ps` lists, when the VM has answered.
    pub fn ps(&self) -> Vec<VmInfo> {
        let text = super::vm::with_answers(|| self.say(&["ps", "--json"]));
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }
}

pub fn value_of(line: &str) -> serde_json::Value {
    serde_json::from_str(line).unwrap()
}
