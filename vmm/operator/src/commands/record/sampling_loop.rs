//! The main loop of a recording, which reads the rings of the VM and writes the samples.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError};
use control_api::protocol::PluggedVcpuEvents;
use control_api::request::{self, Request};

use super::args::RecordArgs;
use super::error::RecordError;
use super::recording::Recording;
use super::remote::{ControlCommand, OpenControlPipes};
use super::{SampleStreams, find_kernel};
use crate::commands::{WaitResult, print_stderr, wait_with_vm};
use crate::signals::StopSignals;

/// Interval at which the sample rings are drained.
pub(super) const DRAIN_INTERVAL: Duration = Duration::from_millis(50);
/// Interval at which the VM is asked for vCPUs that the guest has started to use. Their samples stay
/// in their rings until then.
const JOIN_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which the pipe of `--control` is polled.
const CONTROL_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Main loop of a recording.
pub(super) struct SamplingLoop<'a> {
    args: &'a RecordArgs,
    client: &'a mut Client,
    signals: &'a StopSignals,
    remote: Option<&'a mut OpenControlPipes>,
    streams: &'a mut SampleStreams,
    recording: &'a mut Recording,
    clock: RecordingSchedule,
    /// Time at which the VM is next asked for new vCPUs.
    next_join: Instant,
    /// `true` if progress is shown on the terminal.
    progress: bool,
    /// `true` if the VM has terminated.
    gone: bool,
    /// `true` if the VM has closed its connection.
    hung_up: bool,
    /// `true` if the recording has reached its maximum size.
    full: bool,
}

impl<'a> SamplingLoop<'a> {
    pub(super) fn new(
        args: &'a RecordArgs,
        client: &'a mut Client,
        signals: &'a StopSignals,
        remote: Option<&'a mut OpenControlPipes>,
        streams: &'a mut SampleStreams,
        recording: &'a mut Recording,
    ) -> Self {
        Self {
            args,
            client,
            signals,
            remote,
            streams,
            recording,
            clock: RecordingSchedule::start(args),
            next_join: Instant::now(),
            progress: !args.quiet && !args.all && std::io::stderr().is_terminal(),
            gone: false,
            hung_up: false,
            full: false,
        }
    }

    /// Reads the rings and writes the samples until the recording ends. Returns `true` if the VM
    /// has terminated.
    pub(super) fn run(mut self) -> Result<bool, RecordError> {
        loop {
            let over = self.wait_until_due()?;
            if over {
                self.gone |= set_sampling(self.client, request::Disable)?;
            }
            let joined = self.joined_vcpus(over);
            for of_vcpu in joined.iter().flatten() {
                let sampling = self.args.sampling();
                self.streams
                    .join(self.client, self.args, of_vcpu, sampling, self.recording)?;
            }
            self.write_samples(over)?;
            if over {
                break;
            }
            let limit = self.args.max_size;
            self.full = limit.is_some_and(|limit| self.recording.bytes() >= limit);
            // The ring mappings outlive the VM, so its last samples can be read after it has
            // terminated.
            if let Err(e) = joined.and_then(|_| self.streams.adjust_sampling(self.client)) {
                if !e.is_gone() {
                    return Err(e.into());
                }
                self.follow_vm()?;
                if self.gone {
                    break;
                }
            }
            if self.progress {
                self.recording.show_progress(self.clock.start.elapsed());
            }
        }
        self.finish()?;
        Ok(self.gone)
    }

    /// Waits until the rings are due to be drained. Returns `true` if the recording is over.
    fn wait_until_due(&mut self) -> Result<bool, RecordError> {
        let look = Instant::now() + DRAIN_INTERVAL;
        loop {
            if self.clock.begins() {
                self.gone |= set_sampling(self.client, request::Enable)?;
                log::info!("sampling of {} has started", self.client.info().name);
            }
            let stop = self.run_control_commands()?;
            let until = self.clock.next(look, self.remote.is_some());
            let woken = wait_with_vm(until, self.signals, (!self.gone).then_some(&*self.client));
            if stop || self.full || woken == WaitResult::Signal || self.clock.is_over() {
                return Ok(true);
            }
            self.hung_up = woken == WaitResult::HungUp;
            if self.gone || self.hung_up || Instant::now() >= look {
                return Ok(false);
            }
        }
    }

    /// Executes the commands from the control pipe. Returns `true` if the recording is to end.
    fn run_control_commands(&mut self) -> Result<bool, ClientError> {
        let Some(remote) = &mut self.remote else {
            return Ok(false);
        };
        for word in remote.words() {
            match word {
                ControlCommand::Enable => self.gone |= set_sampling(self.client, request::Enable)?,
                ControlCommand::Disable => self.gone |= set_sampling(self.client, request::Disable)?,
                ControlCommand::Ping | ControlCommand::Stop => {}
            }
            remote.acknowledge();
            if word == ControlCommand::Stop {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the events of vCPUs that the guest has started to use, if it is time to ask for
    /// them.
    fn joined_vcpus(&mut self, over: bool) -> Result<Vec<PluggedVcpuEvents>, ClientError> {
        let is_due = over || self.gone || self.hung_up || Instant::now() >= self.next_join;
        if !is_due {
            return Ok(Vec::new());
        }
        self.next_join = Instant::now() + JOIN_INTERVAL;
        self.client.call(request::Joined)
    }

    /// Drains the rings into the recording file, and switches to a new file if this is due.
    fn write_samples(&mut self, over: bool) -> Result<(), RecordError> {
        if !self.args.overwrite {
            self.streams.drain(self.recording)?;
            if over {
                return Ok(());
            }
            self.recording.update_header()?;
            if self.recording.is_switch_due(self.signals) {
                self.recording.switch_file(self.args)?;
            }
            return Ok(());
        }
        // The rings overwrite old samples, so read the rings only when a file is to be written.
        if over {
            return self.streams.drain(self.recording);
        }
        if self.recording.is_switch_due(self.signals) {
            self.streams.drain(self.recording)?;
            self.recording.switch_file(self.args)?;
        }
        Ok(())
    }

    /// Continues the recording in the process to which the VM has moved. Without such a process,
    /// the VM has terminated.
    fn follow_vm(&mut self) -> Result<(), RecordError> {
        self.streams.drain(self.recording)?;
        // The recording continues in the destination process only without `--control`. With
        // control commands, it is unknown whether sampling is enabled.
        self.gone = self.remote.is_some() || !self.streams.follow(self.client, self.args, self.recording)?;
        if self.gone {
            return Ok(());
        }
        if self.clock.begin.is_none() {
            let () = self.client.call(request::Enable)?;
        }
        find_kernel(self.client, self.args, self.signals)?;
        Ok(())
    }

    /// Writes the remaining samples, and logs statistics of the recording.
    fn finish(&mut self) -> Result<(), RecordError> {
        let recording = &mut *self.recording;
        self.streams.settle(u64::MAX, recording)?;
        let vcpus = self.streams.rings.len();
        let elapsed = self.clock.start.elapsed();
        if let Some(summary) = recording.branch_totals().summary(elapsed, vcpus)
            && !self.args.quiet
        {
            log::info!("{summary}");
        }
        if self.args.switch_events && !self.args.quiet {
            log::info!("{}", self.streams.stolen());
        }
        if !self.gone
            && let Ok(losses) = self.client.call(request::RingLosses)
        {
            recording.add_losses(losses.iter().map(|l| l.lost).sum())?;
        }
        if self.progress {
            print_stderr("\r\x1b[K");
        }
        Ok(())
    }
}

/// Scheduled start and end of a recording.
struct RecordingSchedule {
    start: Instant,
    end: Option<Instant>,
    /// Scheduled start; `None` once the recording has started.
    begin: Option<Instant>,
}

impl RecordingSchedule {
    fn start(args: &RecordArgs) -> Self {
        let start = Instant::now();
        let delay = u64::try_from(args.delay).ok().map(Duration::from_millis);
        Self {
            start,
            end: args.duration.map(|d| start + d),
            begin: delay.and_then(|delay| start.checked_add(delay)),
        }
    }

    /// Returns `true` once, when the recording is due to start.
    fn begins(&mut self) -> bool {
        self.begin.take_if(|begin| Instant::now() >= *begin).is_some()
    }

    fn is_over(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// Returns the time at which the recording must wake up next. This is the earliest of `look`,
    /// the scheduled start and end of the recording and, if `listens` is set, the next poll of the
    /// control pipe.
    fn next(&self, look: Instant, listens: bool) -> Instant {
        let listen = listens.then(|| Instant::now() + CONTROL_POLL_INTERVAL);
        [listen, self.begin, self.end]
            .into_iter()
            .flatten()
            .fold(look, Instant::min)
    }
}

/// Enables or disables sampling. Returns `true` if the VM has terminated.
fn set_sampling(client: &mut Client, request: impl Request<Reply = ()>) -> Result<bool, ClientError> {
    match client.call(request) {
        Err(e) if e.is_gone() => Ok(true),
        result => Ok(result.map(|()| false)?),
    }
}
