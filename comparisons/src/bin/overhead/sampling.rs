//! Sampling methods that can be switched on and off.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use comparisons::{ComparisonError, Killed, context};
use perf_core::pmu::host::{GuestSampleRing, GuestSamplingEvent};

use crate::guest::MeasuredGuest;
use crate::sampling_method::SamplingMethod;

const RING: &str = "ring of the perf event";
/// Time limit for a recording program to start or to execute a control command.
const PATIENCE: Duration = Duration::from_secs(20);

/// A sampling method that is ready to be switched on and off.
pub(crate) enum ActiveSampling {
    Event(GuestSamplingEvent),
    Drained(GuestSamplingEvent, Arc<AtomicBool>),
    Process(ControlledRecord),
}

/// A `record` process of perf or of Perfvisor that is controlled through a pipe.
pub(crate) struct ControlledRecord {
    child: Killed,
    ctl: File,
    answers: mpsc::Receiver<()>,
    /// Write end of the acknowledgment pipe. Writing to it ends the thread that reads the
    /// acknowledgments.
    end: File,
}

impl ActiveSampling {
    /// Prepares the sampling method `way` without switching it on.
    pub(crate) fn prepare(
        way: SamplingMethod,
        guest: &MeasuredGuest,
        hz: u64,
    ) -> Result<Self, ComparisonError> {
        let clock =
            || GuestSamplingEvent::clock(guest.tid, 1_000_000_000 / hz).map_err(context("perf event"));
        let hz = hz.to_string();
        match way {
            SamplingMethod::Perf if has_perf() => {
                let mut perf = Command::new("perf");
                perf.args([
                    "record",
                    "-q",
                    "-e",
                    "cpu-clock:GH",
                    "-F",
                    &hz,
                    "-t",
                    &guest.tid.to_string(),
                ]);
                Self::process(perf, way, guest)
            }
            // If perf is not installed, sample with the same event and read the samples in the same
            // way.
            SamplingMethod::Perf => {
                let sampler = clock()?;
                let fd = sampler.as_fd().try_clone_to_owned().map_err(context(RING))?;
                let mut samples = GuestSampleRing::map(fd, 6).map_err(context(RING))?;
                let stop = Arc::new(AtomicBool::new(false));
                let stopped = stop.clone();
                std::thread::spawn(move || {
                    while !stopped.load(Ordering::Relaxed) {
                        samples.drain(|_| {});
                        std::thread::sleep(Duration::from_millis(50));
                    }
                });
                Ok(Self::Drained(sampler, stop))
            }
            SamplingMethod::Signal => {
                let sampler = clock()?;
                // On this signal, the vCPU only checks its run state.
                sampler
                    .also_signal(guest.tid, libc::SIGUSR1)
                    .map_err(context("signal of the perf event"))?;
                Ok(Self::Event(sampler))
            }
            SamplingMethod::EveryChain | SamplingMethod::Default => {
                let mut record = guest.command();
                record.args(["record", &guest.name, "-q", "-F", &hz]);
                if way == SamplingMethod::EveryChain {
                    record.args(["--chain-every", "1"]);
                }
                Self::process(record, way, guest)
            }
        }
    }

    /// Starts `command`, the `record` command of perf or of Perfvisor, with options that control it
    /// through a pipe.
    fn process(
        mut command: Command,
        way: SamplingMethod,
        guest: &MeasuredGuest,
    ) -> Result<Self, ComparisonError> {
        let directory = guest.runtime.path();
        let file = |what: &str| directory.join(format!("{what}-{}", way.letter()));
        let (ctl, ack) = (file("ctl"), file("ack"));
        for pipe in [&ctl, &ack] {
            let _ = std::fs::remove_file(pipe);
            let made = Command::new("mkfifo").arg(pipe).status();
            if !made.is_ok_and(|status| status.success()) {
                return Err("mkfifo failed".into());
            }
        }
        let both = |path| {
            File::options()
                .read(true)
                .write(true)
                .open(path)
                .map_err(context("pipes"))
        };
        let pipes = format!("fifo:{},{}", ctl.display(), ack.display());
        let (ctl, ack) = (both(&ctl)?, both(&ack)?);
        let end = ack.try_clone().map_err(context("pipes"))?;
        let (answer, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(ack).lines() {
                // perf terminates acknowledgments with a zero byte.
                if !line.is_ok_and(|line| line.trim_matches(char::from(0)) == "ack")
                    || answer.send(()).is_err()
                {
                    break;
                }
            }
        });
        let child = command
            .args(["-D", "-1", "--control", &pipes, "-o"])
            .arg(file("data"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(context("cannot start the program"))?;
        let mut record = ControlledRecord {
            child: Killed(child),
            ctl,
            answers,
            end,
        };
        // The acknowledgment arrives when the program is ready.
        record.send_command("ping")?;
        Ok(Self::Process(record))
    }

    /// Starts or stops sampling and waits until the sampling program acknowledges the change.
    pub(crate) fn switch(&mut self, on: bool) -> Result<(), ComparisonError> {
        match self {
            Self::Event(sampler) | Self::Drained(sampler, _) => sampler
                .set_enabled(on)
                .map_err(context("cannot switch the perf event")),
            Self::Process(record) => record.send_command(if on { "enable" } else { "disable" }),
        }
    }

    /// Stops the sampling and releases its resources.
    pub(crate) fn stop(self) -> Result<(), ComparisonError> {
        match self {
            Self::Event(_) => {}
            Self::Drained(_, stop) => stop.store(true, Ordering::Relaxed),
            Self::Process(mut record) => {
                record.send_command("stop")?;
                let status = record.child.0.wait()?;
                if !status.success() {
                    return Err(format!("the program failed with {status}").into());
                }
            }
        }
        Ok(())
    }
}

impl ControlledRecord {
    /// Sends the control command `word` to the `record` process and waits until the process
    /// acknowledges it.
    fn send_command(&mut self, word: &'static str) -> Result<(), ComparisonError> {
        writeln!(self.ctl, "{word}").map_err(context("pipes"))?;
        let until = Instant::now() + PATIENCE;
        loop {
            match self.answers.recv_timeout(Duration::from_millis(100)) {
                Ok(()) => return Ok(()),
                Err(_) if Instant::now() > until => {
                    return Err(format!("no acknowledgment of '{word}'").into());
                }
                Err(_) => {}
            }
            if let Ok(Some(status)) = self.child.0.try_wait() {
                return Err(format!("the program exited: {status}").into());
            }
        }
    }
}

impl Drop for ControlledRecord {
    fn drop(&mut self) {
        let _ = self.end.write_all(b"end\n");
    }
}

fn has_perf() -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|dir| dir.join("perf").exists())
}
