//! Runs the installed perf to list the events of a processor, with limits on time and output.

use std::fs;
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::cpu::CpuName;
use super::parse::{VendorEvent, from_json, from_text};

/// Time limit for perf, which takes about 20 ms.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum size of perf's standard output, in bytes. The size of the largest table is a fifth of a
/// mebibyte.
const MAX_OUTPUT: usize = 16 << 20;
/// Maximum number of bytes read from perf's standard error.
const MAX_ERRORS: usize = 4096;
/// Maximum size of one read from perf's output, in bytes.
const CHUNK: usize = 64 << 10;
/// Interval at which the exit of perf is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Errors of running perf.
#[derive(Debug, thiserror::Error)]
pub enum PerfError {
    #[error("perf, which contains their names, not found in PATH; install it (Debian: linux-perf)")]
    NotInstalled,
    #[error("cannot start perf")]
    Start(#[source] io::Error),
    #[error("perf list did not exit within {} s", TIMEOUT.as_secs())]
    Slow,
    #[error("perf list printed more than {} MiB", MAX_OUTPUT >> 20)]
    Large,
    #[error("perf list")]
    Read(#[source] io::Error),
    #[error("perf list failed, {status}{words}")]
    Failed { status: ExitStatus, words: String },
    #[error(
        "this version of perf has no named events for {0}; use a newer one, or another processor \
        with perfvisor list vendor --cpuid"
    )]
    NoTable(CpuName),
    #[error("cannot create a directory for perf list")]
    Directory(#[source] io::Error),
}

/// The vendor events of a processor, and a note on their origin.
#[derive(Debug)]
pub struct VendorEventTable {
    /// The events, sorted by name.
    pub events: Vec<VendorEvent>,
    /// Note for the user if perf has no table for the processor. The note states that the events
    /// are those of an older processor.
    pub note: Option<String>,
}

/// Returns the events of a processor. If perf has no table for the processor, returns the events of
/// an older processor with mostly the same events.
///
/// # Errors
/// Returns [`PerfError`] if perf is missing, fails, or has no events for the processor.
pub fn events_of(cpu: &CpuName) -> Result<VendorEventTable, PerfError> {
    of_nearest(cpu, table_of)
}

/// Requests the events of the processor and, if there are none, those of the older processors
/// returned by [`CpuName::relatives`].
fn of_nearest(
    cpu: &CpuName,
    table_of: impl Fn(&CpuName) -> Result<Vec<VendorEvent>, PerfError>,
) -> Result<VendorEventTable, PerfError> {
    let missing = match table_of(cpu) {
        Err(error @ PerfError::NoTable(_)) => error,
        result => return result.map(|events| VendorEventTable { events, note: None }),
    };
    for relative in cpu.relatives() {
        match table_of(&relative) {
            Err(PerfError::NoTable(_)) => {}
            Ok(events) => {
                let note = format!(
                    "this perf has no events of {cpu} by name; those of the older {relative} are taken, \
                     and some may count something else"
                );
                return Ok(VendorEventTable {
                    events,
                    note: Some(note),
                });
            }
            Err(error) => return Err(error),
        }
    }
    Err(missing)
}

/// Returns the events of perf's table for the processor.
fn table_of(cpu: &CpuName) -> Result<Vec<VendorEvent>, PerfError> {
    // Hybrid processors have one PMU per core type.
    for pmu in ["cpu", "cpu_core"] {
        let dir = tempfile::tempdir().map_err(PerfError::Directory)?;
        show_pmu(dir.path(), pmu, cpu).map_err(PerfError::Directory)?;
        let events = list_events(Path::new("perf"), dir.path(), cpu, TIMEOUT)?;
        if !events.is_empty() {
            return Ok(events);
        }
    }
    Err(PerfError::NoTable(cpu.clone()))
}

/// Creates a fake `/sys/bus/event_source` entry for the PMU of processor `cpu` in `dir`.
fn show_pmu(dir: &Path, pmu: &str, cpu: &CpuName) -> io::Result<()> {
    let pmu = dir.join("bus/event_source/devices").join(pmu);
    let format = pmu.join("format");
    fs::create_dir_all(&format)?;
    // PERF_TYPE_RAW and the list of CPUs, which some perf versions require.
    fs::write(pmu.join("type"), "4\n")?;
    fs::write(pmu.join("cpus"), "0\n")?;
    let event = if cpu.is_amd() {
        "config:0-7,32-35\n"
    } else {
        "config:0-7\n"
    };
    for (term, bits) in [
        ("event", event),
        ("umask", "config:8-15\n"),
        ("edge", "config:18\n"),
        ("inv", "config:23\n"),
        ("cmask", "config:24-31\n"),
    ] {
        fs::write(format.join(term), bits)?;
    }
    Ok(())
}

/// Runs `perf` on the PMU in `dir`, for at most `patience`.
fn list_events(
    perf: &Path,
    dir: &Path,
    cpu: &CpuName,
    patience: Duration,
) -> Result<Vec<VendorEvent>, PerfError> {
    let until = Instant::now() + patience;
    answer(|arguments| run(perf, arguments, dir, cpu, until))
}

/// Returns the events that `perf` prints, as JSON if the version supports it and otherwise as text.
fn answer(perf: impl Fn(&[&str]) -> Result<ProcessOutput, PerfError>) -> Result<Vec<VendorEvent>, PerfError> {
    let printed = perf(&["list", "--json", "pmu"])?;
    if printed.status.success()
        && let Some(events) = from_json(&printed.out)
    {
        return Ok(events);
    }
    let printed = perf(&["list", "--details", "pmu"])?;
    if !printed.status.success() {
        let said = String::from_utf8_lossy(&printed.errors).into_owned();
        let words = said.lines().map(str::trim).find(|line| !line.is_empty());
        return Err(PerfError::Failed {
            status: printed.status,
            words: words.map_or_else(String::new, |words| format!(": {words}")),
        });
    }
    Ok(from_text(&String::from_utf8_lossy(&printed.out)))
}

/// The output and exit status of a process.
struct ProcessOutput {
    status: ExitStatus,
    out: Vec<u8>,
    errors: Vec<u8>,
}

/// A child process, killed on drop.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // Ignore the error if the process has already exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn run(
    perf: &Path,
    arguments: &[&str],
    dir: &Path,
    cpu: &CpuName,
    until: Instant,
) -> Result<ProcessOutput, PerfError> {
    let child = Command::new(perf)
        .args(arguments)
        .env("SYSFS_PATH", dir)
        .env("PERF_CPUID", cpu.as_str())
        .env("PERF_CONFIG", "/dev/null")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = KillOnDrop(child.map_err(|e| match e.kind() {
        ErrorKind::NotFound => PerfError::NotInstalled,
        _ => PerfError::Start(e),
    })?);
    let mut out = BoundedPipe::new(child.0.stdout.take(), MAX_OUTPUT);
    let mut errors = BoundedPipe::new(child.0.stderr.take(), MAX_ERRORS);
    read(&mut out, &mut errors, until)?;
    if out.has_more {
        return Err(PerfError::Large);
    }
    let status = loop {
        match child.0.try_wait().map_err(PerfError::Read)? {
            Some(status) => break status,
            None if Instant::now() >= until => return Err(PerfError::Slow),
            None => thread::sleep(POLL_INTERVAL),
        }
    };
    Ok(ProcessOutput {
        status,
        out: out.bytes,
        errors: errors.bytes,
    })
}

/// Bounded output of a process. At the limit, the pipe is closed, and a further write terminates
/// the process.
struct BoundedPipe<R> {
    /// The pipe; `None` after the end of the output or when the limit has been reached.
    from: Option<R>,
    bytes: Vec<u8>,
    limit: usize,
    has_more: bool,
}

impl<R: Read> BoundedPipe<R> {
    fn new(from: Option<R>, limit: usize) -> Self {
        Self {
            from,
            bytes: Vec::new(),
            limit,
            has_more: false,
        }
    }

    /// Reads available bytes. Blocks if there are none.
    fn take(&mut self, chunk: &mut [u8]) -> io::Result<()> {
        let Some(from) = &mut self.from else { return Ok(()) };
        let count = match from.read(chunk) {
            Err(e) if e.kind() == ErrorKind::Interrupted => return Ok(()),
            count => count?,
        };
        let room = (self.limit - self.bytes.len()).min(count);
        self.bytes.extend_from_slice(&chunk[..room]);
        self.has_more = room < count;
        if count == 0 || self.has_more {
            self.from = None;
        }
        Ok(())
    }
}

/// Reads both output pipes of a process until their ends. Uses no threads, because a VM that is
/// about to start must be single-threaded.
fn read<A, B>(out: &mut BoundedPipe<A>, errors: &mut BoundedPipe<B>, until: Instant) -> Result<(), PerfError>
where
    A: Read + AsFd,
    B: Read + AsFd,
{
    let mut chunk = vec![0; CHUNK];
    loop {
        let open = (out.from.as_ref(), errors.from.as_ref());
        let fds = [open.0.map(AsFd::as_fd), open.1.map(AsFd::as_fd)];
        let mut polled: Vec<PollFd<'_>> = fds
            .into_iter()
            .flatten()
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        if polled.is_empty() {
            return Ok(());
        }
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|e| PerfError::Read(io::Error::other(e)))?;
        match poll(&mut polled, Some(&left)) {
            Ok(0) => return Err(PerfError::Slow),
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(PerfError::Read(e.into())),
        }
        let mut ready = polled.iter().map(|fd| !fd.revents().is_empty());
        let out_ready = fds[0].is_some() && ready.next() == Some(true);
        let errors_ready = fds[1].is_some() && ready.next() == Some(true);
        drop(polled);
        if out_ready {
            out.take(&mut chunk).map_err(PerfError::Read)?;
        }
        if errors_ready {
            errors.take(&mut chunk).map_err(PerfError::Read)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_core::error_line;

    const TABLE: &str = include_str!("perf-6.1-intel.txt");

    fn cpu() -> CpuName {
        "GenuineIntel-6-8E-9".parse().unwrap()
    }

    /// Runs a shell script in place of perf. The script is an argument of the shell, because
    /// executing a newly written file could fail with ETXTBSY while a child of another thread still
    /// holds its descriptor.
    fn asked(program: &str, patience: Duration) -> Result<Vec<VendorEvent>, PerfError> {
        let dir = tempfile::tempdir().unwrap();
        show_pmu(dir.path(), "cpu", &cpu()).unwrap();
        fs::write(dir.path().join("table"), TABLE).unwrap();
        let script = format!("cd {}\n{program}", dir.path().display());
        let until = Instant::now() + patience;
        answer(|arguments| {
            let arguments = [&["-c", &script, "perf"], arguments].concat();
            run(Path::new("/bin/sh"), &arguments, dir.path(), &cpu(), until)
        })
    }

    #[test]
    fn perf_without_json_falls_back_to_text() {
        let old = r#"[ "$2" = --json ] && { echo "Error: unknown option" >&2; exit 129; }
            [ "$PERF_CPUID" = GenuineIntel-6-8E-9 ] || exit 1
            [ -e "$SYSFS_PATH/bus/event_source/devices/cpu/format/event" ] || exit 2
            cat table"#;
        let events = asked(old, TIMEOUT).unwrap();
        assert!(events.iter().any(|event| event.name == "l1d.replacement"));
        let new = r#"echo '[{"EventName": "a.b", "Encoding": "cpu/event=0x1/"}]'"#;
        assert_eq!(asked(new, TIMEOUT).unwrap()[0].name, "a.b");
    }

    #[test]
    fn perf_failure_is_quoted_in_one_line() {
        let error = asked(
            "echo >&2; echo WARNING: no perf for this kernel >&2; exit 2",
            TIMEOUT,
        );
        assert_eq!(
            error_line(&error.unwrap_err()),
            "perf list failed, exit status: 2: WARNING: no perf for this kernel"
        );
    }

    #[test]
    fn invalid_perf_output_yields_no_event() {
        assert!(asked("head -c 100000 /dev/urandom", TIMEOUT).unwrap().is_empty());
    }

    /// A perf process that does not end is killed. The time limit of zero makes the result
    /// independent of timing.
    #[test]
    fn endless_perf_is_killed() {
        let error = asked("exec sleep 1000000", Duration::ZERO).unwrap_err();
        assert!(matches!(error, PerfError::Slow), "{error}");
        let error = asked("exec cat /dev/zero", TIMEOUT).unwrap_err();
        assert!(matches!(error, PerfError::Large), "{error}");
    }

    /// A processor that is unknown to perf has the events of its nearest relative.
    #[test]
    fn unknown_processor_takes_table_of_relative() {
        let emerald_rapids: CpuName = "GenuineIntel-6-CF-2".parse().unwrap();
        let table = |known: &'static str| {
            move |cpu: &CpuName| match cpu.as_str() == known {
                true => Ok(from_text(TABLE)),
                false => Err(PerfError::NoTable(cpu.clone())),
            }
        };
        let found = of_nearest(&emerald_rapids, table("GenuineIntel-6-6A-0")).unwrap();
        assert!(!found.events.is_empty());
        assert!(
            found
                .note
                .unwrap()
                .contains("those of the older GenuineIntel-6-6A-0")
        );
        let none = of_nearest(&emerald_rapids, table("GenuineIntel-6-8E-9")).unwrap_err();
        assert!(error_line(&none).contains("GenuineIntel-6-CF-2"), "{none}");
        let failed = of_nearest(&emerald_rapids, |_| Err(PerfError::NotInstalled));
        assert!(matches!(failed, Err(PerfError::NotInstalled)));
    }

    #[test]
    fn missing_perf_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let error = list_events(&dir.path().join("none"), dir.path(), &cpu(), TIMEOUT).unwrap_err();
        assert!(matches!(error, PerfError::NotInstalled), "{error}");
    }

    /// The installed perf has the events of a known processor on any host.
    #[test]
    #[expect(clippy::print_stderr, reason = "a test that could not run says so")]
    fn installed_perf_lists_events_of_known_processor() {
        let events = match events_of(&cpu()).map(|found| found.events) {
            Ok(events) => events,
            Err(error) => return eprintln!("SKIP: {}", error_line(&error)),
        };
        let event = events
            .iter()
            .find(|event| event.name == "l1d.replacement")
            .unwrap();
        assert_eq!(event.select.as_ref().unwrap().raw(), "r0151");
        assert!(events.len() > 100, "{}", events.len());
    }
}
