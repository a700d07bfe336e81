//! Sampling methods that can be switched on and off.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use perf_core::pmu::PmuError;
use perf_core::pmu::host::{GuestSampleRing, GuestSampler};

use crate::guest::MeasuredGuest;
use crate::sampling_method::SamplingMethod;

/// Time limit for a program to start or to execute a command.
const PATIENCE: Duration = Duration::from_secs(20);

/// Errors of a sampling method.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SamplingError {
    #[error("perf event")]
    Event(#[from] PmuError),
    #[error("ring of the perf event")]
    Ring(#[source] io::Error),
    #[error("signal of the perf event")]
    Signal(#[source] io::Error),
    #[error("cannot switch the perf event")]
    Switch(#[source] io::Error),
    #[error("mkfifo failed")]
    NoPipe,
    #[error("pipes")]
    Pipe(#[source] io::Error),
    #[error("cannot start the program")]
    Program(#[source] io::Error),
    #[error("no acknowledgment of '{0}'")]
    NoAnswer(&'static str),
    #[error("the program exited: {0}")]
    Ended(ExitStatus),
    #[error("the program failed with {0}")]
    Failed(ExitStatus),
}

/// A prepared sampling method, which can be switched on and off.
pub(crate) enum ActiveSampling {
    Event(GuestSampler),
    Drained(GuestSampler, Arc<AtomicBool>),
    Process(ControlledRecord),
}

/// A `record` process that is controlled through a pipe.
pub(crate) struct ControlledRecord {
    child: Child,
    ctl: File,
    answers: mpsc::Receiver<()>,
    /// Write end of the acknowledgment pipe, to end the thread that reads from it.
    end: File,
}

impl ActiveSampling {
    /// Prepares `way`, switched off.
    pub(crate) fn prepare(
        way: SamplingMethod,
        guest: &MeasuredGuest,
        hz: u64,
    ) -> Result<Self, SamplingError> {
        let clock = || GuestSampler::clock(guest.tid, 1_000_000_000 / hz);
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
            // Reads the same event in the same way.
            SamplingMethod::Perf => {
                let sampler = clock()?;
                let fd = sampler
                    .as_fd()
                    .try_clone_to_owned()
                    .map_err(SamplingError::Ring)?;
                let mut samples = GuestSampleRing::map(fd, 6).map_err(SamplingError::Ring)?;
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
                // Signal with which the VMM makes a vCPU check its run state.
                sampler
                    .also_signal(guest.tid, libc::SIGUSR1)
                    .map_err(SamplingError::Signal)?;
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

    /// Starts `command`, the `record` command of perf or Perfvisor, which share these options.
    fn process(
        mut command: Command,
        way: SamplingMethod,
        guest: &MeasuredGuest,
    ) -> Result<Self, SamplingError> {
        let directory = guest.runtime.path();
        let file = |what: &str| directory.join(format!("{what}-{}", way.letter()));
        let (ctl, ack) = (file("ctl"), file("ack"));
        for pipe in [&ctl, &ack] {
            let _ = std::fs::remove_file(pipe);
            let made = Command::new("mkfifo").arg(pipe).status();
            if !made.is_ok_and(|status| status.success()) {
                return Err(SamplingError::NoPipe);
            }
        }
        let both = |path| {
            File::options()
                .read(true)
                .write(true)
                .open(path)
                .map_err(SamplingError::Pipe)
        };
        let pipes = format!("fifo:{},{}", ctl.display(), ack.display());
        let (ctl, ack) = (both(&ctl)?, both(&ack)?);
        let end = ack.try_clone().map_err(SamplingError::Pipe)?;
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
            .map_err(SamplingError::Program)?;
        let mut record = ControlledRecord {
            child,
            ctl,
            answers,
            end,
        };
        // Acknowledged when the program is ready.
        record.say("ping")?;
        Ok(Self::Process(record))
    }

    /// Starts or stops sampling and waits for the acknowledgment.
    pub(crate) fn switch(&mut self, on: bool) -> Result<(), SamplingError> {
        match self {
            Self::Event(sampler) | Self::Drained(sampler, _) => {
                sampler.set_enabled(on).map_err(SamplingError::Switch)
            }
            Self::Process(record) => record.say(if on { "enable" } else { "disable" }),
        }
    }

    /// Terminates the sampling.
    pub(crate) fn stop(self) -> Result<(), SamplingError> {
        match self {
            Self::Event(_) => {}
            Self::Drained(_, stop) => stop.store(true, Ordering::Relaxed),
            Self::Process(mut record) => {
                record.say("stop")?;
                let status = record.child.wait().map_err(SamplingError::Program)?;
                if !status.success() {
                    return Err(SamplingError::Failed(status));
                }
            }
        }
        Ok(())
    }
}

impl ControlledRecord {
    /// Sends a command and waits for the acknowledgment.
    fn say(&mut self, word: &'static str) -> Result<(), SamplingError> {
        writeln!(self.ctl, "{word}").map_err(SamplingError::Pipe)?;
        let until = Instant::now() + PATIENCE;
        loop {
            match self.answers.recv_timeout(Duration::from_millis(100)) {
                Ok(()) => return Ok(()),
                Err(_) if Instant::now() > until => return Err(SamplingError::NoAnswer(word)),
                Err(_) => {}
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(SamplingError::Ended(status));
            }
        }
    }
}

impl Drop for ControlledRecord {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = self.end.write_all(b"end\n");
    }
}

fn has_perf() -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|dir| dir.join("perf").exists())
}
