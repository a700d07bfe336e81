//! `perfvisor record`: writes samples of a VM's vCPUs to a `perf.data` file.

mod args;
mod branches;
mod code;
mod error;
mod names;
mod recording;
mod remote;
mod sampling_loop;
mod switch;
mod thread_switches;
mod unnamed;

use std::collections::HashMap;
use std::fs::File;
use std::time::{Duration, Instant};

use perf_core::pmu::host::{GuestSampleRing, monotonic_ns};
use perf_core::record::{DecodedRecord, Sample as RingSample};

use super::all::for_each_vm;
use super::migrate::find_moved;
use super::select::name_or_pid;
use super::{DONE, OperatorCommandError, WaitResult, connect, print_stderr, wait_until};
use crate::exit::ExitStatus;
use crate::sampling::{VcpuRing, check_sampling_support, wait_for_kernel};
use crate::signals::StopSignals;
use crate::vendor;
pub use args::RecordArgs;
use control_api::client::{Client, ClientError};
use control_api::protocol::{HostRingInfo, KernelState, OpenedEvent, PluggedVcpuEvents, SamplingParams};
use control_api::request;
pub use error::RecordError;
use guest_profile::export::NO_PID;
use guest_profile::merge::{MergedSampleCounts, SampleMergeConfig, SampleMerger, SampledGuestTask};
use guest_profile::sample::SampleRawData;
use names::RecordedSymbols;
use perf_core::error_line;
use recording::Recording;
use remote::OpenControlPipes;
use sampling_loop::{DRAIN_INTERVAL, SamplingLoop};
use switch::OutputSwitchTrigger;
use thread_switches::{StolenTime, VcpuSwitches};

/// Time limit for the VM to find the guest kernel.
const KERNEL_PATIENCE: Duration = Duration::from_secs(60);
/// Size of the host kernel's ring, as the binary logarithm of the number of pages. The ring holds
/// 6000 samples and fits into the `perf_event_mlock_kb` limit of unprivileged users.
const HOST_RING_LOG2_PAGES: u32 = 6;

/// Runs `perfvisor record`.
///
/// # Errors
/// Returns [`RecordError`] if the recording fails.
pub fn record(args: &RecordArgs) -> Result<ExitStatus, RecordError> {
    let args = &RecordArgs {
        events: vendor::resolve_vendor_events(&args.events).map_err(OperatorCommandError::from)?,
        ..args.clone()
    };
    let remote = args.control.as_ref().map(OpenControlPipes::open).transpose()?;
    if args.delay < 0 && remote.is_none() {
        return Err(RecordError::NeverBegins);
    }
    args.check_ring_size()?;
    args.check_overwrite()?;
    let signals = match args.switch_output {
        Some(OutputSwitchTrigger::Signal) => StopSignals::block_with_user_signal(),
        _ => StopSignals::block(),
    };
    let signals = signals.map_err(OperatorCommandError::Signals)?;
    if args.all {
        let signals = signals.visible_to_all_threads();
        return Ok(for_each_vm(|vm, client| {
            let mut output = args.output.clone().into_os_string();
            output.push(format!(".{}", vm.label()));
            let of_one = RecordArgs {
                output: output.into(),
                ..args.clone()
            };
            record_one(&of_one, client, &signals, None)
        })?);
    }
    let name = name_or_pid(args.name.as_deref(), args.pid);
    let client = connect(name.as_deref(), args.socket.as_deref())?;
    record_one(args, client, &signals, remote)
}

/// Records the samples of one VM.
fn record_one(
    args: &RecordArgs,
    mut client: Client,
    signals: &StopSignals,
    mut remote: Option<OpenControlPipes>,
) -> Result<ExitStatus, RecordError> {
    let sampling = args.sampling();
    let opened = open_events(&mut client, args)?;
    find_kernel(&mut client, args, signals)?;
    let names = RecordedSymbols::of(&mut client, args)?;
    let mut streams = SampleStreams::open(&mut client, args, &opened, sampling)?;
    let clock_offset_ns = streams.clock_offset_ns();
    let mut recording = Recording::start(args, &client, &opened, sampling, clock_offset_ns, names)?;
    let sampling_loop = SamplingLoop::new(
        args,
        &mut client,
        signals,
        remote.as_mut(),
        &mut streams,
        &mut recording,
    );
    let recorded = match sampling_loop.run() {
        Ok(gone) => recording.finish(args, gone, streams.totals()),
        Err(RecordError::Write(source)) => Err(recording.truncate_to_records(&args.output, source)),
        Err(error) => Err(error),
    };
    match recorded {
        Ok(()) => Ok(DONE),
        // The samples written before the error are readable, so report the error but keep the file.
        Err(error @ RecordError::Truncated { .. }) => {
            print_stderr(&format!("perfvisor: error: {}\n", error_line(&error)));
            Ok(ExitStatus::CheckFailed)
        }
        Err(error) => Err(error),
    }
}

/// Opens the events of `args`.
fn open_events(client: &mut Client, args: &RecordArgs) -> Result<Vec<OpenedEvent>, OperatorCommandError> {
    let opened: Vec<OpenedEvent> = client.call(request::Open {
        events: args.events.clone(),
        vcpus: args.vcpu.as_ref().map(|list| list.0.clone()),
        whole: false,
        sampling: Some(args.sampling()),
    })?;
    check_sampling_support(&opened)?;
    Ok(opened)
}

/// An event on one vCPU that is also sampled by the host kernel.
struct SampledEvent {
    handle: u32,
    vcpu: u32,
    /// Stream ID that identifies the event in samples.
    stream_id: u64,
    ring: GuestSampleRing,
    clock_offset_ns: u64,
    merge: SampleMerger,
    /// `true` once a message has been logged that the host kernel cannot sample the guest.
    said_blind: bool,
}

/// The rings from which a recording reads samples and context switches.
struct SampleStreams {
    rings: Vec<VcpuRing>,
    lanes: Vec<SampledEvent>,
    /// Context switches of the vCPU threads on the host (`--switch-events`).
    switches: Vec<VcpuSwitches>,
    /// Number and duration of the preemptions of vCPUs that have been removed.
    stolen: StolenTime,
    /// Index in `lanes` of each event that the host kernel also samples, by stream ID.
    by_stream: HashMap<u64, usize>,
    /// Sample statistics of the processes in which the VM ran before it moved to the current one.
    left: Option<MergedSampleCounts>,
}

impl SampleStreams {
    fn open(
        client: &mut Client,
        args: &RecordArgs,
        opened: &[OpenedEvent],
        sampling: SamplingParams,
    ) -> Result<Self, OperatorCommandError> {
        let mut streams = Self {
            rings: Vec::new(),
            lanes: Vec::new(),
            switches: Vec::new(),
            stolen: StolenTime::default(),
            by_stream: HashMap::new(),
            left: None,
        };
        let why_not = streams.add(client, args, opened, sampling)?;
        if let Some(why) = why_not {
            let every = "every sample stops the vCPU";
            match args.chain_every {
                Some(_) => {
                    log::warn!("--chain-every: the host's kernel cannot sample this guest ({why}); {every}")
                }
                None => log::info!("the host's kernel cannot sample this guest ({why}); {every}"),
            }
        }
        Ok(streams)
    }

    /// Adds a hot-plugged vCPU. Its events have been counting since its first instruction and write
    /// to a new ring.
    fn join(
        &mut self,
        client: &mut Client,
        args: &RecordArgs,
        joined: &PluggedVcpuEvents,
        sampling: SamplingParams,
        recording: &mut Recording,
    ) -> Result<(), RecordError> {
        let vcpu = joined.vcpu;
        if let Some(why) = &joined.refused {
            log::warn!("vCPU {vcpu} was added but is not recorded: {why}");
            return Ok(());
        }
        // Drain the ring of a former vCPU with the same index, which contains its last samples.
        for at in 0..self.rings.len() {
            if self.rings[at].info.vcpu == vcpu {
                self.drain_ring(at, recording)?;
            }
        }
        self.rings.retain(|ring| ring.info.vcpu != vcpu);
        self.drain_switches(recording)?;
        self.drop_switches(|of| of == vcpu);
        recording.join(&joined.events);
        let why_not = self.add(client, args, &joined.events, sampling)?;
        log::info!("vCPU {vcpu} was added and is recorded");
        if let Some(why) = why_not {
            log::debug!("vCPU {vcpu}: every sample stops it ({why})");
        }
        Ok(())
    }

    /// Maps the rings of newly opened events. If the host kernel cannot sample some of the events,
    /// returns the reason.
    fn add(
        &mut self,
        client: &mut Client,
        args: &RecordArgs,
        opened: &[OpenedEvent],
        sampling: SamplingParams,
    ) -> Result<Option<String>, OperatorCommandError> {
        for ring in VcpuRing::open_all(client, opened, args.mmap_pages, args.overwrite)? {
            if args.switch_events {
                self.switches.push(VcpuSwitches::open(client, ring.info.vcpu)?);
            }
            self.rings.push(ring);
        }
        let mut why_not: Option<String> = None;
        for o in opened {
            let (Some(handle), Some(vcpu), true) = (o.handle, o.vcpu, o.ring) else {
                why_not = why_not.or_else(|| o.no_ring.clone());
                continue;
            };
            let (info, fd): (HostRingInfo, File) = client.call_with_file(request::HostRing { handle })?;
            let ring = match GuestSampleRing::map(fd.into(), HOST_RING_LOG2_PAGES) {
                Ok(ring) => ring,
                Err(e) => {
                    why_not = Some(format!("mapping its ring: {}", error_line(&e)));
                    let () = client.call(request::Chains { handle, every: 1 })?;
                    continue;
                }
            };
            self.by_stream.insert(o.id, self.lanes.len());
            self.lanes.push(SampledEvent {
                handle,
                vcpu,
                stream_id: o.id,
                ring,
                clock_offset_ns: info.clock_offset_ns,
                merge: SampleMerger::new(SampleMergeConfig {
                    period: info.period,
                    clock_offset_ns: info.clock_offset_ns,
                    interpreted: info.interpreted,
                    chain_every: sampling.chain_every,
                    adapt_to_ns: (sampling.frequency && args.chain_every.is_none())
                        .then(|| 1_000_000_000 / sampling.rate.max(1)),
                }),
                said_blind: false,
            });
        }
        Ok(why_not)
    }

    /// Continues the recording in the destination process if the VM has moved. Drains all rings of
    /// the source process. The events in the destination process are disabled. Returns `false` if
    /// the VM has not moved.
    fn follow(
        &mut self,
        client: &mut Client,
        args: &RecordArgs,
        recording: &mut Recording,
    ) -> Result<bool, RecordError> {
        let Some(moved) = find_moved(client) else {
            return Ok(false);
        };
        self.settle(u64::MAX, recording)?;
        self.left = self.totals();
        self.drop_switches(|_| true);
        self.rings.clear();
        self.lanes.clear();
        self.by_stream.clear();
        let left = std::mem::replace(client, moved);
        let (from, to) = (left.info(), client.info());
        log::warn!(
            "{} has moved to process {} as {}; the recording continues there",
            from.name,
            to.pid,
            to.name
        );
        let opened = open_events(client, args)?;
        recording.join(&opened);
        self.add(client, args, &opened, args.sampling())?;
        if let Some(offset_ns) = self.clock_offset_ns() {
            recording.set_clock_offset(offset_ns);
        }
        Ok(true)
    }

    fn clock_offset_ns(&self) -> Option<u64> {
        self.rings.first()?.info.clock_offset_ns
    }

    /// Drains the rings of all vCPUs.
    fn drain(&mut self, recording: &mut Recording) -> Result<(), RecordError> {
        // Read host kernel samples first, because VM samples replace some of them.
        for lane in &mut self.lanes {
            let drained = lane.ring.drain(|sample| lane.merge.add_light(sample));
            recording.add_losses(drained.lost)?;
            recording.add_throttled(drained.throttled);
        }
        self.drain_switches(recording)?;
        for at in 0..self.rings.len() {
            self.drain_ring(at, recording)?;
        }
        self.settle(monotonic_ns(), recording)
    }

    fn drain_switches(&mut self, recording: &mut Recording) -> Result<(), RecordError> {
        for of_vcpu in &mut self.switches {
            let vcpu = of_vcpu.vcpu;
            let mut written = Ok(());
            let drained = of_vcpu.drain(|switch| {
                if written.is_ok() {
                    written = recording.thread_switch(vcpu, switch);
                }
            });
            written?;
            recording.add_losses(drained.lost)?;
        }
        Ok(())
    }

    /// Stops reading the context switches of the vCPUs for which `gone` returns `true`, and keeps
    /// the statistics of their preemptions.
    fn drop_switches(&mut self, gone: impl Fn(u32) -> bool) {
        for of_vcpu in self.switches.extract_if(.., |of_vcpu| gone(of_vcpu.vcpu)) {
            self.stolen.merge(of_vcpu.stolen());
        }
    }

    /// Returns the number and duration of the preemptions of all vCPUs.
    fn stolen(&self) -> StolenTime {
        let mut stolen = self.stolen;
        self.switches
            .iter()
            .for_each(|of_vcpu| stolen.merge(of_vcpu.stolen()));
        stolen
    }

    fn drain_ring(&mut self, at: usize, recording: &mut Recording) -> Result<(), RecordError> {
        let (by_stream, lanes) = (&self.by_stream, &mut self.lanes);
        self.rings[at].drain(log::Level::Warn, |_, record| {
            match record {
                Some(DecodedRecord::Sample(sample)) => {
                    let lane = by_stream.get(&sample.stream_id);
                    let merge = lane.map(|&at| &mut lanes[at].merge);
                    full(&sample, merge, recording)?;
                }
                Some(DecodedRecord::Lost(lost)) => recording.add_losses(lost.lost)?,
                Some(DecodedRecord::Throttle(_)) => recording.add_throttled(1),
                Some(_) => {}
                None => recording.add_damaged(),
            }
            Ok(())
        })
    }

    /// Writes the host kernel samples whose guest task is known. `now_ns` is the current time of
    /// the host's monotonic clock, in nanoseconds.
    fn settle(&mut self, now_ns: u64, recording: &mut Recording) -> Result<(), RecordError> {
        for lane in &mut self.lanes {
            let mut written = Ok(());
            let now_ns = now_ns.saturating_sub(lane.clock_offset_ns);
            lane.merge.settle(now_ns, |light, whose| {
                if written.is_ok() {
                    written = recording.light(lane.vcpu, lane.stream_id, light, whose);
                }
            });
            written?;
        }
        Ok(())
    }

    /// Sets how often the VM takes a full sample of each event that the host kernel also samples.
    /// The ratio depends on how well the host kernel's samples cover the guest. Fails if the VM has
    /// terminated.
    fn adjust_sampling(&mut self, client: &mut Client) -> Result<(), ClientError> {
        for lane in &mut self.lanes {
            let now_ns = monotonic_ns().saturating_sub(lane.clock_offset_ns);
            if let Some(every) = lane.merge.decide(now_ns) {
                let handle = lane.handle;
                let () = client.call(request::Chains { handle, every })?;
                log::debug!("vCPU {}: a chain on every {every}. sample", lane.vcpu);
            }
            if lane.merge.is_blind() && !std::mem::replace(&mut lane.said_blind, true) {
                log::info!(
                    "vCPU {}: the host's kernel does not see the guest; every sample stops the vCPU",
                    lane.vcpu
                );
            }
        }
        Ok(())
    }

    /// Returns the statistics of merging VM samples and host kernel samples.
    fn totals(&self) -> Option<MergedSampleCounts> {
        let add = |a: MergedSampleCounts, b: MergedSampleCounts| MergedSampleCounts {
            light: a.light + b.light,
            full: a.full + b.full,
            in_full_mode: a.in_full_mode + b.in_full_mode,
            host: a.host + b.host,
        };
        let lanes = self.lanes.iter().map(|lane| lane.merge.totals());
        lanes.chain(self.left).reduce(add)
    }
}

/// Writes a full sample, which the VM has taken.
fn full(
    sample: &RingSample<'_>,
    merge: Option<&mut SampleMerger>,
    recording: &mut Recording,
) -> Result<(), RecordError> {
    let raw = SampleRawData::decode(sample.raw).unwrap_or_default();
    let (pid, tid) = raw.task.map_or((NO_PID, NO_PID), |(pid, tid, _)| (pid, tid));
    let whose = SampledGuestTask {
        time_ns: sample.time_ns,
        pid,
        tid,
        cr3: raw.cr3,
        kernel_thread: raw.kernel_thread,
    };
    let period = merge.map_or(sample.period, |m| {
        m.cost(raw.held_ns);
        m.full(whose, raw.cpl, sample.period)
    });
    recording.full(sample, &raw, period)
}

/// Requests the VM to find the guest kernel and waits for the result. Without the kernel, the first
/// samples would have no call chains.
fn find_kernel(
    client: &mut Client,
    args: &RecordArgs,
    signals: &StopSignals,
) -> Result<(), OperatorCommandError> {
    let info = wait_for_kernel(client, KERNEL_PATIENCE, || {
        match wait_until(Instant::now() + DRAIN_INTERVAL, signals) {
            WaitResult::Signal => Err(OperatorCommandError::Interrupted),
            WaitResult::Time | WaitResult::HungUp => Ok(()),
        }
    })?;
    match info.state {
        KernelState::Looking => log::warn!(
            "the search for the guest's kernel is not finished; the first samples have no kernel call chains"
        ),
        KernelState::NotFound => log::warn!("no kernel call chains and no task names: {}", info.detail),
        KernelState::Found if !args.quiet => log::info!("guest kernel: {}", info.detail),
        KernelState::Found | KernelState::Unknown => {}
    }
    Ok(())
}
