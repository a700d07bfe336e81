//! `/debug/pprof/profile`: a profile of one VM in pprof's protocol buffer format.
//!
//! Separate processes record each profile (`perfvisor record`) and parse guest memory and VM
//! replies (`perfvisor pprof`), with limits on memory and time. A failure affects one profile only.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

use super::directory::ProfileDirectory;
use super::http::{HttpReply, HttpRequest};
use super::listen::HttpClientStream;
use super::vms::ScrapeTarget;
use crate::commands::one_line;

/// Maximum number of concurrent profiles.
const MAX_PROFILES: usize = 4;
/// Maximum duration of a profile, in seconds.
const MAX_SECONDS: u64 = 120;
/// Default duration of a profile, in seconds, as in Go.
const DEFAULT_SECONDS: u64 = 30;
/// Maximum sampling frequency per vCPU, in Hz.
const MAX_HZ: u64 = 1000;
/// Default sampling frequency per vCPU, in Hz.
const DEFAULT_HZ: u64 = 99;
/// Characters allowed in an event list, in addition to letters and digits.
const EVENT_CHARACTERS: &[u8] = b"_:/,=.{}-";
/// Maximum length of an event list, in bytes.
const MAX_EVENT: usize = 200;
/// Time limit for producing a profile, in addition to the recording time. Finding the guest's
/// kernel takes most of this time.
const MORE_TIME: Duration = Duration::from_secs(75);
/// Memory limit of each process that produces a profile, in bytes.
const MAX_MEMORY: u64 = 4 << 30;
/// Maximum size of a file written by a process that produces a profile, in bytes.
const MAX_FILE: u64 = 256 << 20;
/// Maximum size of a profile, in bytes.
const MAX_PROFILE: u64 = 32 << 20;
/// Maximum number of bytes read from the standard error of a process that produces a profile.
const MAX_SAID: u64 = 4 << 10;
/// Interval at which the exit of a process and the end of the client's connection are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Media type of a profile.
const PPROF: &str = "application/octet-stream";

/// Scheduler of profiles: the VMs with a profile in progress, and statistics.
#[derive(Debug, Default)]
pub struct RunningProfiles {
    running: Mutex<HashSet<String>>,
    /// Number of completed profiles.
    pub made: AtomicU64,
    /// Number of failed or refused profiles.
    pub failed: AtomicU64,
}

/// Parameters of a requested profile.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ProfileRequest {
    seconds: u64,
    hz: u64,
    event: String,
}

impl ProfileRequest {
    fn of(request: &HttpRequest) -> Result<Self, HttpReply> {
        let number = |name: &str, default: u64, most: u64| match request.parameter(name) {
            None => Ok(default),
            Some(text) => match text.parse() {
                Ok(n) if (1..=most).contains(&n) => Ok(n),
                _ => {
                    let why = format!("{name} must be a whole number, 1 to {most}");
                    Err(HttpReply::refusal(400, &why))
                }
            },
        };
        let event = request.parameter("event").unwrap_or("cycles").to_owned();
        let allowed = |b: u8| b.is_ascii_alphanumeric() || EVENT_CHARACTERS.contains(&b);
        if !(1..=MAX_EVENT).contains(&event.len()) || !event.bytes().all(allowed) {
            let why = "event must be an event in perf's syntax, as in cycles:u";
            return Err(HttpReply::refusal(400, why));
        }
        Ok(Self {
            seconds: number("seconds", DEFAULT_SECONDS, MAX_SECONDS)?,
            hz: number("hz", DEFAULT_HZ, MAX_HZ)?,
            event,
        })
    }
}

/// A reserved slot among the concurrent profiles, released on drop.
struct ProfileSlot<'p> {
    profiles: &'p RunningProfiles,
    label: String,
}

impl Drop for ProfileSlot<'_> {
    fn drop(&mut self) {
        let mut running = self
            .profiles
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        running.remove(&self.label);
    }
}

impl RunningProfiles {
    fn place(&self, label: &str) -> Result<ProfileSlot<'_>, HttpReply> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let why = if running.contains(label) {
            "a profile of this VM is being made; one at a time".to_owned()
        } else if running.len() >= MAX_PROFILES {
            format!("{MAX_PROFILES} profiles are being made, and no more at a time")
        } else {
            running.insert(label.to_owned());
            return Ok(ProfileSlot {
                profiles: self,
                label: label.to_owned(),
            });
        };
        Err(HttpReply::refusal(503, &why).with_retry_after(5))
    }

    /// Produces a profile of the VM `target`, and returns the reply for the client. `stream` is the
    /// connection to the client. `stop` is set when the exporter exits.
    pub fn make(
        &self,
        request: &HttpRequest,
        target: &ScrapeTarget,
        stream: &HttpClientStream,
        stop: &AtomicBool,
    ) -> HttpReply {
        let made = ProfileRequest::of(request).and_then(|wanted| {
            let _place = self.place(&target.label)?;
            record(&wanted, target, stream, stop)
        });
        let count = if made.is_ok() { &self.made } else { &self.failed };
        count.fetch_add(1, Ordering::Relaxed);
        match made {
            Ok(profile) => HttpReply::ok(PPROF, profile),
            Err(refusal) => refusal,
        }
    }
}

fn record(
    wanted: &ProfileRequest,
    target: &ScrapeTarget,
    stream: &HttpClientStream,
    stop: &AtomicBool,
) -> Result<Vec<u8>, HttpReply> {
    let until = Instant::now() + Duration::from_secs(wanted.seconds) + MORE_TIME;
    let failed = |e: std::io::Error| HttpReply::refusal(500, &format!("no profile can be made here: {e}"));
    let dir = ProfileDirectory::create(&std::env::temp_dir()).map_err(failed)?;
    let file = dir.path().join("perf.data");
    let mut command = own_command("record");
    command
        .arg("--socket")
        .arg(&target.socket)
        .arg(format!("--event={}", wanted.event))
        .arg(format!("--freq={}", wanted.hz))
        .arg(format!("--duration={}", wanted.seconds))
        .args(["--quiet", "--no-buildid-cache", "--output"])
        .arg(&file);
    run(command, stream, stop, until)?;
    let mut command = own_command("pprof");
    command.args([OsStr::new("--input"), file.as_os_str()]);
    command.args(["--labels", "task,event", "--output", "-"]);
    run(command, stream, stop, until)
}

/// Returns a command that runs this program with another subcommand.
///
/// The command works even if the file of the program was replaced. The child is killed when the
/// calling thread exits, and therefore also when the exporter is killed.
fn own_command(command: &str) -> Command {
    let mut program = Command::new(Path::new("/proc/self/exe"));
    program
        .arg(format!("--parent={}", std::process::id()))
        .arg(command)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    program
}

/// A child process, killed on drop.
struct ChildGuard(Child);

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `command` until it exits and returns its output. Stops when the client disconnects, the
/// deadline passes or the exporter exits.
fn run(
    mut command: Command,
    stream: &HttpClientStream,
    stop: &AtomicBool,
    until: Instant,
) -> Result<Vec<u8>, HttpReply> {
    let failed = |e: &std::io::Error| HttpReply::refusal(500, &format!("no profile can be made here: {e}"));
    let mut running = ChildGuard(command.spawn().map_err(|e| failed(&e))?);
    limit(&running.0);
    let out = running.0.stdout.take().map(|out| read_all(out, MAX_PROFILE + 1));
    let said = running.0.stderr.take().map(|said| read_all(said, MAX_SAID));
    let status = loop {
        if let Some(status) = running.0.try_wait().map_err(|e| failed(&e))? {
            break status;
        }
        if is_disconnected(stream) {
            return Err(HttpReply::refusal(408, "the client has gone"));
        }
        if stop.load(Ordering::Relaxed) {
            return Err(HttpReply::refusal(503, "the exporter ends"));
        }
        if Instant::now() >= until {
            return Err(HttpReply::refusal(504, "making the profile took too long"));
        }
        thread::sleep(POLL_INTERVAL);
    };
    let text = |reader: Option<thread::JoinHandle<Vec<u8>>>| {
        reader.and_then(|reader| reader.join().ok()).unwrap_or_default()
    };
    let (out, said) = (text(out), text(said));
    if !status.success() {
        let said = String::from_utf8_lossy(&said);
        let line = said.lines().last().unwrap_or("it said nothing");
        let why = format!(
            "no profile: {}",
            one_line(
                line.trim_start_matches("perfvisor: ")
                    .trim_start_matches("error: ")
            )
        );
        return Err(HttpReply::refusal(502, &why));
    }
    if out.len() as u64 > MAX_PROFILE {
        let why = format!("the profile is larger than {} MiB", MAX_PROFILE >> 20);
        return Err(HttpReply::refusal(502, &why));
    }
    Ok(out)
}

/// Reads up to `most` bytes on a new thread. A process that writes more is terminated by SIGPIPE.
fn read_all(from: impl Read + Send + 'static, most: u64) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.take(most).read_to_end(&mut bytes);
        bytes
    })
}

fn limit(child: &Child) {
    let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
        return;
    };
    for (resource, most) in [(Resource::As, MAX_MEMORY), (Resource::Fsize, MAX_FILE)] {
        let limit = Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        if let Err(e) = prlimit(Some(pid), resource, limit) {
            log::debug!("a limit of a profile's process: {e}");
        }
    }
}

/// Returns whether the client has closed the connection.
fn is_disconnected(stream: &HttpClientStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    match poll(&mut polled, Some(&rustix::event::Timespec::default())) {
        Ok(_) => polled[0]
            .revents()
            .intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR),
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::super::http;
    use super::*;

    fn request(query: &str) -> HttpRequest {
        let text = format!("GET /debug/pprof/profile?{query} HTTP/1.1\r\n\r\n");
        http::parse(text.as_bytes()).unwrap().unwrap()
    }

    #[test]
    fn profile_parameters_are_bounded() {
        let wanted = ProfileRequest::of(&request("seconds=120&hz=1000&event=instructions:u")).unwrap();
        assert_eq!(
            (wanted.seconds, wanted.hz, wanted.event.as_str()),
            (120, 1000, "instructions:u")
        );
        let wanted = ProfileRequest::of(&request("vm=a")).unwrap();
        assert_eq!(
            (wanted.seconds, wanted.hz, wanted.event.as_str()),
            (30, 99, "cycles")
        );
        for bad in [
            "seconds=0",
            "seconds=121",
            "seconds=x",
            "seconds=1e9",
            "hz=1001",
            "event=",
            "event=a%20b",
        ] {
            assert_eq!(
                ProfileRequest::of(&request(bad)).unwrap_err().status,
                400,
                "{bad}"
            );
        }
    }

    #[test]
    fn concurrent_profiles_are_limited() {
        let profiles = RunningProfiles::default();
        let mut places: Vec<_> = (0..MAX_PROFILES)
            .map(|n| profiles.place(&n.to_string()).ok().unwrap())
            .collect();
        let refused = |label| profiles.place(label).err().map(|reply| reply.status);
        assert_eq!((refused("0"), refused("x")), (Some(503), Some(503)));
        places.pop();
        assert_eq!((refused("0"), refused("x")), (Some(503), None));
    }

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// A process that fails, writes without limit or never exits makes the profile fail with a
    /// reason.
    #[test]
    fn profile_process_failure_is_reported() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (stream, stop) = (HttpClientStream::Unix(ours), AtomicBool::new(false));
        let far = Instant::now() + Duration::from_secs(600);
        let of = |script: &str, until| {
            run(shell(script), &stream, &stop, until).map_err(|r| (r.status, r.body.to_vec()))
        };
        assert_eq!(of("printf abc", far), Ok(b"abc".to_vec()));
        let said = of("echo perfvisor: it has ended >&2; exit 2", far).unwrap_err();
        assert_eq!(said, (502, b"no profile: it has ended\n".to_vec()));
        assert_eq!(of("cat /dev/zero", far).unwrap_err().0, 502);
        assert_eq!(of("exec sleep 600", Instant::now()).unwrap_err().0, 504);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(of("exec sleep 600", far).unwrap_err().0, 503);
        stop.store(false, Ordering::Relaxed);
        drop(theirs);
        assert_eq!(of("exec sleep 600", far).unwrap_err().0, 408);
    }
}
