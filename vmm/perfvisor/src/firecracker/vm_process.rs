//! The VM of the API, a child process `perfvisor run` that is controlled through its control
//! socket.
//!
//! The kernel terminates the child with this process (`--parent`), regardless of how this process
//! exits.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, SystemTime};

use control_api::balloon::BalloonInfo;
use control_api::client::{Client, ClientError, REPLY_TIMEOUT};
use control_api::protocol::{RequestErrorKind, VmInfo, VmState};
use control_api::rate_limit::TokenBucketLimit;
use control_api::request;
use control_api::socket_dir;
use firecracker_api::fault::ApiFault;
use firecracker_api::resources::{RateLimiterChange, log_level};
use firecracker_api::session::VmBackend;
use firecracker_api::types::{BalloonStats, Logger, Metrics, TokenBucket, VmConfig};
use log::LevelFilter;
use operator::exit::ExitStatus;
use operator::input;
use perf_core::error_line;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;

use super::log_output::{self, DEFAULT_LEVEL};
use super::snapshots::{self, SnapshotWriter};

/// Function that checks a command line and returns the error message.
pub type CheckCommandLine = fn(Vec<OsString>) -> Result<(), String>;

/// Polling interval for a VM that is starting or whose vCPUs are stopping.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Size of one read of the VM's messages, in bytes.
const MESSAGE_BYTES: usize = 4096;

/// A VM that is being configured, or the child process in which it runs.
pub struct VmProcess {
    program: PathBuf,
    check: CheckCommandLine,
    id: Option<String>,
    level: LevelFilter,
    metrics: Option<File>,
    child: Option<ChildVm>,
}

/// Descriptors of the VM's process that the event loop polls.
pub struct VmProcessDescriptors {
    /// Process descriptor, readable once the VM has exited.
    pub process: OwnedFd,
    /// Standard error of the VM's process.
    pub messages: ChildStderr,
}

/// The child process of a running VM, with a connection to its control socket.
struct ChildVm {
    child: Child,
    /// Descriptors to poll; `None` while the event loop has taken them.
    descriptors: Option<VmProcessDescriptors>,
    client: Client,
    snapshots: Option<SnapshotWriter>,
}

impl VmProcess {
    /// Creates a VM that is not running yet. Without `id`, the VM is named after its process ID.
    pub fn new(id: Option<String>, check: CheckCommandLine) -> Self {
        // Without /proc, as in a chroot, use the path by which this process was started.
        let started = std::env::args_os().next().unwrap_or_default();
        Self {
            program: std::env::current_exe().unwrap_or_else(|_| started.into()),
            check,
            id,
            level: DEFAULT_LEVEL,
            metrics: None,
            child: None,
        }
    }

    /// Takes the descriptors of a running VM, so that the caller can poll them while it uses
    /// `self`.
    pub fn take_descriptors(&mut self) -> Option<VmProcessDescriptors> {
        self.child.as_mut()?.descriptors.take()
    }

    /// Puts back the descriptors taken by [`VmProcess::take_descriptors`].
    pub fn put_descriptors(&mut self, descriptors: VmProcessDescriptors) {
        if let Some(vm) = &mut self.child {
            vm.descriptors = Some(descriptors);
        }
    }

    /// Writes messages of the VM to the log.
    pub fn relay_messages(&mut self) {
        let descriptors = self.child.as_mut().and_then(|vm| vm.descriptors.as_mut());
        if let Some(descriptors) = descriptors {
            relay(&mut descriptors.messages, &mut Vec::new());
        }
    }

    /// Terminates the VM. Returns `false` if no VM is running or the VM does not answer.
    pub fn stop(&mut self) -> bool {
        let vm = self.child.as_mut();
        vm.is_some_and(|vm| vm.client.call(request::Stop).is_ok())
    }

    /// Returns the exit status if the VM has exited: 0 after a power-off or a reset, and otherwise
    /// the exit status of `perfvisor run`.
    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.relay_messages();
        let status = self.child.as_mut()?.child.try_wait().ok()??;
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Some(match code {
            Some(code) if code == ExitStatus::Reset.code() => ExitStatus::PoweredOff,
            Some(code) => ExitStatus::Command(code),
            None => {
                log::error!(
                    "the VM's process was ended by signal {}",
                    status.signal().unwrap_or(0)
                );
                ExitStatus::Internal
            }
        })
    }

    /// Returns the command-line arguments with which the program runs the VM.
    fn arguments(&self, options: &[String]) -> Vec<OsString> {
        let parent = std::process::id().to_string();
        let mut arguments: Vec<OsString> = ["--parent", &parent, "run"].map(Into::into).into();
        arguments.extend(options.iter().map(Into::into));
        // A stop signal to Firecracker terminates the VM immediately.
        arguments.push("--stop-timeout=0".into());
        arguments.extend(self.id.as_ref().map(|id| format!("--name={id}").into()));
        arguments
    }

    /// Starts the process of the VM.
    fn spawn(&self, options: &[String]) -> io::Result<(Child, VmProcessDescriptors)> {
        let mut child = Command::new(&self.program)
            // `argv[0]` selects the command, because the program file may be named `firecracker`.
            .arg0("perfvisor")
            .args(self.arguments(options))
            .env("RUST_LOG", self.level.as_str())
            .stderr(Stdio::piped())
            .spawn()?;
        let messages = child.stderr.take().ok_or(io::ErrorKind::BrokenPipe)?;
        fcntl_setfl(&messages, fcntl_getfl(&messages)? | OFlags::NONBLOCK)?;
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        Ok((child, VmProcessDescriptors { process, messages }))
    }

    fn running(&mut self) -> Result<&mut Client, String> {
        let vm = self.child.as_mut().ok_or("the VM does not run")?;
        Ok(&mut vm.client)
    }
}

fn control_socket(name: &str) -> PathBuf {
    socket_dir::socket_path(&socket_dir::directory(), name)
}

/// Waits until the VM's main loop answers, and returns a connection to its control socket.
///
/// # Errors
/// Returns the VM's error message if the VM exits first.
fn wait_for_vm(child: &mut Child, messages: &mut ChildStderr, name: &str) -> Result<Client, String> {
    let socket = control_socket(name);
    let mut said = Vec::new();
    loop {
        let ended = child.try_wait().map_err(|e| e.to_string())?;
        relay(messages, &mut said);
        if ended.is_some() {
            return Err(last_message(&said));
        }
        match Client::connect_at(&socket, None, REPLY_TIMEOUT) {
            // If another VM already has the name, the connection is to that VM, and this VM exits.
            Ok(client) if client.info().pid == child.id() => return Ok(client),
            _ => std::thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Copies the available output of the VM to the log, and keeps the last [`MESSAGE_BYTES`] in
/// `copy`.
fn relay(messages: &mut ChildStderr, copy: &mut Vec<u8>) {
    let mut chunk = [0; MESSAGE_BYTES];
    while let Ok(count @ 1..) = messages.read(&mut chunk) {
        let chunk = chunk.get(..count).unwrap_or_default();
        log_output::write_log(chunk);
        copy.extend_from_slice(chunk);
        let surplus = copy.len().saturating_sub(MESSAGE_BYTES);
        copy.drain(..surplus);
    }
}

/// Returns the last line of the VM's messages without the name of the program.
fn last_message(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said);
    let line = text.lines().rfind(|line| !line.trim().is_empty());
    let line = line.unwrap_or("the VM ended without a message");
    let line = line.strip_prefix("perfvisor: ").unwrap_or(line);
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

impl VmBackend for VmProcess {
    fn check_options(&mut self, options: &[String]) -> Result<(), String> {
        let words = ["perfvisor", "run"].into_iter().map(OsString::from);
        (self.check)(words.chain(options.iter().map(Into::into)).collect())
    }

    fn check_file(&mut self, path: &str) -> Result<(), String> {
        input::can_be_read(Path::new(path)).map_err(|e| error_line(&e))
    }

    fn set_logger(&mut self, logger: &Logger) -> Result<(), String> {
        if let Some(path) = &logger.log_path {
            let file = log_output::open_output(Path::new(path));
            log_output::set_file(file.map_err(|e| format!("{path}: {}", error_line(&e)))?);
        }
        if let Some(level) = &logger.level {
            self.level = log_level(level).map_err(|fault| fault.message)?;
            log::set_max_level(self.level);
        }
        Ok(())
    }

    fn set_metrics(&mut self, metrics: &Metrics) -> Result<(), String> {
        let path = &metrics.metrics_path;
        let file = log_output::open_output(Path::new(path));
        self.metrics = Some(file.map_err(|e| format!("{path}: {}", error_line(&e)))?);
        Ok(())
    }

    fn start(&mut self, options: &[String], metadata: Option<&Value>) -> Result<(), String> {
        let failed = |e: io::Error| format!("{}: {}", self.program.display(), error_line(&e));
        let (mut child, mut descriptors) = self.spawn(options).map_err(failed)?;
        let name = self.id.clone().unwrap_or_else(|| format!("vm-{}", child.id()));
        let mut client = wait_for_vm(&mut child, &mut descriptors.messages, &name)?;
        if let Some(data) = metadata.cloned()
            && let Err(e) = client.call(request::MmdsPut { data })
        {
            // Kill the VM, because the guest must not run without its metadata.
            let _ = child.kill();
            let _ = child.wait();
            return Err(error_line(&e));
        }
        let snapshots = SnapshotWriter::start(&self.program, &control_socket(&name));
        let snapshots = snapshots.inspect_err(|e| log::warn!("no snapshots: {}", error_line(e)));
        self.child = Some(ChildVm {
            snapshots: snapshots.ok(),
            child,
            descriptors: Some(descriptors),
            client,
        });
        Ok(())
    }

    fn put_metadata(&mut self, data: Value) -> Result<(), ApiFault> {
        let client = self.running().map_err(ApiFault::bad)?;
        client.call(request::MmdsPut { data }).map_err(|e| refusal(&e))
    }

    fn patch_metadata(&mut self, data: Value) -> Result<(), ApiFault> {
        let client = self.running().map_err(ApiFault::bad)?;
        client.call(request::MmdsPatch { data }).map_err(|e| refusal(&e))
    }

    fn metadata(&mut self) -> Result<Value, ApiFault> {
        let client = self.running().map_err(ApiFault::bad)?;
        client.call(request::MmdsGet).map_err(|e| refusal(&e))
    }

    fn pause(&mut self) -> Result<(), String> {
        let client = self.running()?;
        let mut info: VmInfo = client.call(request::Pause).map_err(|e| error_line(&e))?;
        while info.parked < info.vcpus {
            if info.state != VmState::Paused {
                return Err(format!("the VM is {}", info.state));
            }
            std::thread::sleep(POLL_INTERVAL);
            info = client.call(request::Status).map_err(|e| error_line(&e))?;
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<(), String> {
        let resumed = self.running()?.call(request::Resume);
        resumed.map(|_| ()).map_err(|e| error_line(&e))
    }

    fn press_power_button(&mut self) -> Result<(), String> {
        let pressed = self.running()?.call(request::Powerdown);
        pressed.map(|_| ()).map_err(|e| error_line(&e))
    }

    fn change_limiter(&mut self, change: &RateLimiterChange) -> Result<(), String> {
        let limit = |bucket: TokenBucket| TokenBucketLimit {
            size: bucket.size,
            one_time_burst: bucket.one_time_burst.unwrap_or(0),
            refill_ms: bucket.refill_time,
        };
        let changed = self.running()?.call(request::RateLimit {
            name: change.name.clone(),
            bandwidth: change.limiter.bandwidth.map(limit),
            ops: change.limiter.ops.map(limit),
        });
        changed.map_err(|e| error_line(&e))
    }

    fn save(&mut self, state: &str, memory: &str, config: &VmConfig) -> Result<(), String> {
        let writer = self.child.as_mut().and_then(|vm| vm.snapshots.as_mut());
        let writer = writer.ok_or("the process that writes snapshots did not start")?;
        writer.save(state, memory, config)
    }

    fn read_snapshot(&mut self, state: &str) -> Result<VmConfig, String> {
        snapshots::read_config(Path::new(state)).map_err(|e| error_line(&e))
    }

    fn set_balloon_size(&mut self, amount_mib: u32) -> Result<(), String> {
        let size_mib = amount_mib;
        let set = self.running()?.call(request::Balloon { size_mib });
        set.map(|_| ()).map_err(|e| error_line(&e))
    }

    fn set_balloon_interval(&mut self, seconds: u16) -> Result<(), String> {
        let interval_s = seconds;
        let set = self.running()?.call(request::BalloonStatistics { interval_s });
        set.map(|_| ()).map_err(|e| error_line(&e))
    }

    fn balloon_stats(&mut self) -> Result<BalloonStats, String> {
        let info = self.running()?.call(request::Status);
        let settings = info.map_err(|e| error_line(&e))?.settings;
        let balloon = settings.and_then(|settings| settings.balloon);
        balloon
            .map(|balloon| stats_of(&balloon))
            .ok_or("the VM has no balloon".into())
    }

    fn flush_metrics(&mut self) -> Result<(), String> {
        let client = self.running()?;
        let info = client.call(request::Status).map_err(|e| error_line(&e))?;
        let vcpus = client.call(request::Counts).map_err(|e| error_line(&e))?;
        let limiters = client.call(request::RateLimiters).map_err(|e| error_line(&e))?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_millis());
        let mut line = serde_json::json!({ "vm": info, "vcpus": vcpus, "rate_limiters": limiters });
        line["utc_timestamp_ms"] = u64::try_from(now).unwrap_or(u64::MAX).into();
        let Some(file) = &mut self.metrics else {
            return Err("no destination is set".into());
        };
        file.write_all(format!("{line}\n").as_bytes())
            .map_err(|e| error_line(&e))
    }
}

/// Converts an error of a control request to the VM into an error of the API.
fn refusal(error: &ClientError) -> ApiFault {
    let is_limit = matches!(error, ClientError::Refused(failure) if failure.kind == RequestErrorKind::Limit);
    ApiFault {
        status: if is_limit { 413 } else { 400 },
        message: error_line(error),
    }
}

/// Converts the state of the balloon to Firecracker's balloon statistics.
fn stats_of(balloon: &BalloonInfo) -> BalloonStats {
    let in_units_of = |bytes: u64, shift: u32| u32::try_from(bytes >> shift).unwrap_or(u32::MAX);
    let of = balloon.statistics.unwrap_or_default();
    BalloonStats {
        target_pages: in_units_of(balloon.target_bytes, 12),
        actual_pages: in_units_of(balloon.actual_bytes, 12),
        target_mib: in_units_of(balloon.target_bytes, 20),
        actual_mib: in_units_of(balloon.actual_bytes, 20),
        swap_in: of.swap_in,
        swap_out: of.swap_out,
        major_faults: of.major_faults,
        minor_faults: of.minor_faults,
        free_memory: of.free_memory,
        total_memory: of.total_memory,
        available_memory: of.available_memory,
        disk_caches: of.disk_caches,
        hugetlb_allocations: of.hugetlb_allocations,
        hugetlb_failures: of.hugetlb_failures,
        oom_kill: of.oom_kill,
        alloc_stall: of.alloc_stall,
        async_scan: of.async_scan,
        direct_scan: of.direct_scan,
        async_reclaim: of.async_reclaim,
        direct_reclaim: of.direct_reclaim,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_error_is_the_last_message() {
        let said = b"perfvisor: info: x\nperfvisor: --net tap=t: no such device\n\n";
        assert_eq!(last_message(said), "--net tap=t: no such device");
        assert_eq!(last_message(b"perfvisor: error: x\n"), "x");
        assert_eq!(last_message(b""), "the VM ended without a message");
    }
}
