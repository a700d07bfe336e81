//! Writer of the recording file.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use perf_core::CALLCHAIN_MAX;
use perf_core::pmu::host::{ThreadSwitch, monotonic_ns};
use perf_core::record::Sample as RingSample;

use super::super::select::name_or_pid;
use super::super::{OperatorCommandError, connect, create_private, files, print_stderr};
use super::args::{CallGraph, RecordArgs};
use super::branches::BranchTotals;
use super::code::{ProgramCache, UnwindTotals};
use super::error::RecordError;
use super::names::RecordedSymbols;
use super::switch::OutputSwitch;
use crate::sampling::{EventIds, event_info, sample_mappings};
use crate::session::task_name;
use crate::signals::StopSignals;
use control_api::client::Client;
use control_api::protocol::{BranchStacks, OpenedEvent, SamplingParams};
use guest_profile::export::build_id_dir::BuildIdDir;
use guest_profile::export::perfdata::PerfDataWriter;
use guest_profile::export::{
    ClockCorrelation, FileMapping, NO_PID, Profile, ProfileMetadata, ProfilePerspective, ProfileSample,
    ProfileSymbol, SampledBranch, SampledEventInfo, TaskName,
};
use guest_profile::merge::{LightSample, MergedSampleCounts, SampledGuestTask};
use guest_profile::sample::SampleRawData;
use guest_profile::unwind::{CONTEXT_GUEST_KERNEL, CONTEXT_GUEST_USER, UnwindStop, UnwindStopReasons};
use kernel_images::build_id::BuildId;

/// Maximum number of distinct tasks in a recording.
const MAX_TASKS: usize = 1 << 16;
/// Maximum number of distinct mappings in a recording.
const MAX_MAPPINGS: usize = 1 << 16;
/// Minimum value that marks a context in a call chain (`PERF_CONTEXT_MAX`). Addresses are smaller.
const CONTEXT_MAX: u64 = (-4095i64).cast_unsigned();

/// A recording in progress.
pub(super) struct Recording {
    writer: PerfDataWriter<BufWriter<File>>,
    /// Metadata and events of the current file, which the next file repeats.
    head: (ProfileMetadata, Vec<SampledEventInfo>),
    /// Trigger and completed files of `--switch-output`, if given.
    switch: Option<OutputSwitch>,
    names: RecordedSymbols,
    /// Mappings and modules of the guest's programs.
    code: ProgramCache,
    /// Size of the stack copies to unwind, in bytes.
    stack_bytes: Option<u32>,
    /// Buffer for the frames of a stack, reused for each unwinding.
    frames: Vec<u64>,
    ids: EventIds,
    first_id: u64,
    /// Process IDs and names of the tasks by thread ID.
    tasks: HashMap<u32, (u32, [u8; 16])>,
    /// Profile that contains the mappings written so far, for symbolization.
    mapped: Profile,
    known: HashSet<(u32, u64, u64, u64)>,
    chain: Vec<u64>,
    /// Parameters and statistics of branch stacks.
    branch_stacks: Option<BranchStacks>,
    branches: Vec<SampledBranch>,
    branch_totals: BranchTotals,
    last_ns: u64,
    /// Time of the last VM sample by stream ID.
    last_full_ns: HashMap<u64, u64>,
    with_chain: u64,
    /// Number of samples for which the VMM stopped the vCPU, and total duration of these stops in
    /// nanoseconds.
    held: (u64, u64),
    /// Number of call chains truncated by a limit.
    cut_short: u64,
    lost: u64,
    throttled: u64,
    damaged: u64,
    /// Offset from the sample clock to the clock of the file, in nanoseconds.
    clock_offset_ns: u64,
    /// Build ID directory in which perf finds symbols; `None` if no symbols are stored there.
    for_perf: Option<BuildIdDir>,
}

impl Recording {
    pub(super) fn start(
        args: &RecordArgs,
        client: &Client,
        opened: &[OpenedEvent],
        sampling: SamplingParams,
        clock_offset_ns: Option<u64>,
        names: RecordedSymbols,
    ) -> Result<Self, OperatorCommandError> {
        let mut ids = EventIds::default();
        let events = ids.add(opened).into_iter();
        let events: Vec<SampledEventInfo> = events.map(|o| event_info(o, &sampling)).collect();
        let meta = ProfileMetadata {
            thread_switches: args.switch_events,
            hostname: client.info().name.clone(),
            os_release: names.release.clone(),
            // Includes vCPUs that are hot-plugged during the recording.
            vcpus: client.info().max_vcpus,
            command: std::env::args().collect(),
            form: if args.as_host {
                ProfilePerspective::AsHost
            } else {
                ProfilePerspective::InGuest
            },
            clock: clock_offset_ns.and_then(|_| wall_clock()),
        };
        back_up_existing(&args.output)?;
        let first_id = events.first().map_or(0, |e| e.id);
        let head = (meta, events);
        let writer = new_writer(&args.output, &head, &names)?;
        let stack_bytes = match args.call_graph() {
            CallGraph::Dwarf(bytes) => Some(bytes),
            CallGraph::Fp | CallGraph::None => None,
        };
        let again = match &args.socket {
            Some(socket) => connect(None, Some(socket)),
            None => {
                let name = name_or_pid(Some(&client.info().name), args.pid);
                connect(name.as_deref(), None)
            }
        };
        Ok(Self {
            writer,
            head,
            switch: OutputSwitch::of(args),
            names,
            code: ProgramCache::new(again, files::guest_files(&args.symbols)?, stack_bytes.is_some()),
            stack_bytes,
            frames: Vec::new(),
            ids,
            first_id,
            tasks: HashMap::new(),
            mapped: Profile::default(),
            known: HashSet::new(),
            chain: Vec::new(),
            branch_stacks: sampling.branches,
            branches: Vec::new(),
            branch_totals: BranchTotals::default(),
            last_ns: 0,
            last_full_ns: HashMap::new(),
            with_chain: 0,
            held: (0, 0),
            cut_short: 0,
            lost: 0,
            throttled: 0,
            damaged: 0,
            clock_offset_ns: clock_offset_ns.unwrap_or(0),
            for_perf: args.for_perf(),
        })
    }

    /// Adds the events of a hot-plugged vCPU.
    pub(super) fn join(&mut self, opened: &[OpenedEvent]) {
        self.ids.add(opened);
    }

    /// Sets the offset, in nanoseconds, that converts the times of further samples to the clock of
    /// the file.
    pub(super) fn set_clock_offset(&mut self, offset_ns: u64) {
        self.clock_offset_ns = offset_ns;
    }

    /// Converts a sample time to the clock of the file.
    fn file_ns(&self, time_ns: u64) -> u64 {
        time_ns.saturating_add(self.clock_offset_ns)
    }

    fn event_id(&self, stream_id: u64) -> u64 {
        self.ids.of_stream(stream_id).unwrap_or(self.first_id)
    }

    /// Writes a sample that the VM has taken, with weight `period`.
    pub(super) fn full(
        &mut self,
        sample: &RingSample<'_>,
        raw: &SampleRawData,
        period: u64,
    ) -> Result<(), RecordError> {
        let (pid, tid) = raw.task.map_or((NO_PID, NO_PID), |(pid, tid, _)| (pid, tid));
        // A host kernel sample contains no task. Samples taken after the midpoint between the
        // previous VM sample and this one are attributed to the task of this sample.
        let before = self.last_full_ns.insert(sample.stream_id, sample.time_ns);
        let since_ns = before.map_or(sample.time_ns, |before| {
            sample.time_ns.min(before.midpoint(sample.time_ns) + 1)
        });
        if let Some((pid, tid, comm)) = raw.task
            && self.tasks.len() < MAX_TASKS
            && let before = self.tasks.insert(tid, (pid, comm))
            && before != Some((pid, comm))
        {
            if before.is_some() && tid == pid {
                // A new name usually indicates an exec.
                self.code.drop_process(pid);
            }
            let task = TaskName {
                time_ns: self.file_ns(since_ns),
                pid,
                tid,
                comm: task_name(&comm),
            };
            self.writer.task(&task).map_err(RecordError::Write)?;
        }
        for mapping in sample_mappings(sample.raw, pid, self.file_ns(since_ns)) {
            self.mapping(mapping)?;
        }
        self.chain.clear();
        self.chain.extend(sample.callchain.iter());
        let mut ends = raw.ends;
        self.unwind(sample, pid, since_ns, &mut ends)?;
        self.with_chain += u64::from(!self.chain.is_empty());
        // `held_ns` refers to the previous VM sample and is 0 if there was none.
        if raw.held_ns > 0 {
            self.held.0 += 1;
            self.held.1 += u64::from(raw.held_ns);
        }
        self.cut_short += u64::from(ends.truncation_reason().is_some());
        let kernel = raw.cpl != 3;
        self.note((!kernel).then_some(pid), sample.ip);
        self.note_chain(kernel, pid);
        self.last_ns = self.last_ns.max(sample.time_ns);
        self.take_branches(sample, raw.held_ns);
        let event_id = self.event_id(sample.stream_id);
        let time_ns = self.file_ns(sample.time_ns);
        self.writer
            .sample(&ProfileSample {
                time_ns,
                vcpu: sample.cpu,
                pid,
                tid,
                cpl: raw.cpl,
                ip: sample.ip,
                cr3: raw.cr3,
                period,
                event_id,
                ends,
                branches: &self.branches,
                chain: &self.chain,
            })
            .map_err(RecordError::Write)
    }

    /// Copies the branch stack of a sample to `branches`, and adds the stack to the statistics.
    fn take_branches(&mut self, sample: &RingSample<'_>, held_ns: u32) {
        self.branches.clear();
        let Some(stacks) = self.branch_stacks else { return };
        let mut words = sample.branches.iter();
        while let (Some(from), Some(to), Some(flags)) = (words.next(), words.next(), words.next()) {
            self.branches.push(SampledBranch { from, to, flags });
        }
        self.branch_totals.add(stacks, self.branches.len(), held_ns);
    }

    /// Returns the statistics of the branch stacks.
    pub(super) fn branch_totals(&self) -> BranchTotals {
        self.branch_totals
    }

    /// Writes a sample of the host kernel. `whose` is the guest task that was running, if known.
    pub(super) fn light(
        &mut self,
        vcpu: u32,
        stream_id: u64,
        light: LightSample,
        whose: Option<SampledGuestTask>,
    ) -> Result<(), RecordError> {
        let (pid, tid, cr3) = whose.map_or((NO_PID, NO_PID, 0), |w| (w.pid, w.tid, w.cr3));
        let user = self.names.is_user(light.ip, light.user);
        self.note(user.then_some(pid), light.ip);
        self.last_ns = self.last_ns.max(light.time_ns);
        let event_id = self.event_id(stream_id);
        let time_ns = self.file_ns(light.time_ns);
        self.writer
            .sample(&ProfileSample {
                time_ns,
                vcpu,
                pid,
                tid,
                cpl: if user { 3 } else { 0 },
                ip: light.ip,
                cr3,
                period: light.period,
                event_id,
                ends: UnwindStopReasons::default(),
                branches: &[],
                chain: &[],
            })
            .map_err(RecordError::Write)
    }

    fn mapping(&mut self, mapping: FileMapping) -> Result<(), RecordError> {
        let key = (mapping.pid, mapping.start, mapping.len, mapping.file_offset);
        if self.known.len() >= MAX_MAPPINGS || !self.known.insert(key) {
            return Ok(());
        }
        self.writer.mapping(&mapping).map_err(RecordError::Write)?;
        self.mapped.mappings.push(mapping);
        Ok(())
    }

    /// Extends the call chain by user frames from unwind tables, if the sample has registers and a
    /// stack copy.
    fn unwind(
        &mut self,
        sample: &RingSample<'_>,
        pid: u32,
        since_ns: u64,
        ends: &mut UnwindStopReasons,
    ) -> Result<(), RecordError> {
        let program = self.chain.iter().position(|&frame| frame == CONTEXT_GUEST_USER);
        let (Some(asked), Some(marker)) = (self.stack_bytes, program) else {
            return Ok(());
        };
        let mut frames = std::mem::take(&mut self.frames);
        if let Some(unwound) = self.code.unwind(pid, &sample.user, asked as usize, &mut frames) {
            let kernel_frames = marker.saturating_sub(1);
            self.chain.truncate(marker + 1);
            let room = CALLCHAIN_MAX.saturating_sub(kernel_frames + 2);
            self.chain.extend(frames.iter().take(room));
            ends.user = Some(if frames.len() > room {
                UnwindStop::Full
            } else {
                unwound.end
            });
            ends.guessed = unwound.guessed || (kernel_frames > 0 && ends.guessed);
            for frame in &frames {
                let told = self.code.mapping(pid, frame.wrapping_sub(1));
                let mapping = told.map(|mapping| FileMapping {
                    time_ns: since_ns.saturating_add(self.clock_offset_ns),
                    pid,
                    start: mapping.start,
                    len: mapping.len,
                    file_offset: mapping.file_offset,
                    path: mapping.path.clone(),
                    build_id: mapping.build_id.as_deref().and_then(BuildId::from_hex),
                });
                if let Some(mapping) = mapping {
                    self.mapping(mapping)?;
                }
            }
        }
        self.frames = frames;
        Ok(())
    }

    /// Records the addresses of the current call chain for symbolization. For a return address,
    /// records the address of the byte before it, which belongs to the call.
    fn note_chain(&mut self, mut kernel: bool, pid: u32) {
        let mut first = true;
        for at in 0..self.chain.len() {
            match self.chain[at] {
                CONTEXT_GUEST_KERNEL => kernel = true,
                CONTEXT_GUEST_USER => kernel = false,
                marker if marker >= CONTEXT_MAX => {}
                address => {
                    let caller = !std::mem::take(&mut first);
                    let address = address.wrapping_sub(u64::from(caller));
                    self.note((!kernel).then_some(pid), address);
                }
            }
        }
    }

    /// Records an address for symbolization. Symbols from guest memory are looked up immediately,
    /// because the process may exit.
    fn note(&mut self, pid: Option<u32>, address: u64) {
        if self.names.note(pid, address)
            && let Some(pid) = pid.filter(|_| !self.names.is_flat())
            && let Some(function) = self.code.function(pid, address)
        {
            self.names.keep(function);
        }
    }

    /// Writes a context switch of a vCPU's thread.
    pub(super) fn thread_switch(&mut self, vcpu: u32, switch: ThreadSwitch) -> Result<(), RecordError> {
        self.writer
            .thread_switch(vcpu, switch)
            .map_err(RecordError::Write)
    }

    pub(super) fn add_losses(&mut self, lost: u64) -> Result<(), RecordError> {
        if lost == 0 {
            return Ok(());
        }
        self.lost += lost;
        self.writer
            .write_lost(self.first_id, lost, self.file_ns(self.last_ns))
            .map_err(RecordError::Write)
    }

    pub(super) fn add_throttled(&mut self, times: u64) {
        self.throttled += times;
    }

    pub(super) fn add_damaged(&mut self) {
        self.damaged += 1;
    }

    /// Updates the file header, which keeps the samples written so far if the recorder is killed.
    /// Called after each drain, because an update costs only three system calls.
    pub(super) fn update_header(&mut self) -> Result<(), RecordError> {
        self.writer.checkpoint().map_err(RecordError::Write)
    }

    /// Truncates the file to its size at the last header update, after a write has failed with
    /// `source`.
    pub(super) fn truncate_to_records(self, path: &Path, source: io::Error) -> RecordError {
        let path = path.to_owned();
        match self.writer.truncate_to_records() {
            Ok(samples) => RecordError::Truncated {
                path,
                samples,
                source,
            },
            Err(_) => OperatorCommandError::File { path, source }.into(),
        }
    }

    /// Returns the size of the recording file, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.writer.bytes()
    }

    pub(super) fn show_progress(&self, elapsed: Duration) {
        print_stderr(&format!(
            "\r[ perfvisor record: {} samples, {:.3} MB, {} lost, {} s ]\x1b[K",
            self.writer.samples(),
            self.writer.bytes() as f64 / 1e6,
            self.lost,
            elapsed.as_secs()
        ));
    }

    /// Stores the symbols and programs of the current file where perf finds them. Returns the
    /// symbols of the addresses in the file.
    fn symbols_of_file(&mut self, args: &RecordArgs) -> Vec<ProfileSymbol> {
        if !args.as_host
            && let Err(e) = self
                .names
                .store_for_perf(self.for_perf.as_ref(), &self.mapped, &mut self.writer)
        {
            let place = self.for_perf.as_ref().map_or(Path::new("."), |dir| dir.path());
            log::warn!(
                "{}: cannot store symbols of this recording for perf: {e}",
                place.display()
            );
        }
        self.names.take_saved(&self.mapped)
    }

    /// Returns whether `--switch-output` requires a new file.
    pub(super) fn is_switch_due(&self, signals: &StopSignals) -> bool {
        let bytes = self.writer.bytes();
        self.switch
            .as_ref()
            .is_some_and(|switch| switch.is_due(bytes, signals))
    }

    /// Completes the current file and continues the recording in a new one.
    pub(super) fn switch_file(&mut self, args: &RecordArgs) -> Result<(), RecordError> {
        self.writer.checkpoint().map_err(RecordError::Write)?;
        let symbols = self.symbols_of_file(args);
        let completed = OutputSwitch::name_of_completed(&args.output);
        std::fs::rename(&args.output, &completed).map_err(OperatorCommandError::file(&args.output))?;
        let next = new_writer(&args.output, &self.head, &self.names)?;
        let last = std::mem::replace(&mut self.writer, next);
        let samples = last.samples();
        last.finish(&symbols).map_err(|source| RecordError::Truncated {
            path: completed.clone(),
            samples,
            source,
        })?;
        self.with_chain = 0;
        // The VM reports each task and mapping only once, so the new file must repeat them.
        let time_ns = self.file_ns(self.last_ns);
        for (tid, (pid, comm)) in &self.tasks {
            let task = TaskName {
                time_ns,
                pid: *pid,
                tid: *tid,
                comm: task_name(comm),
            };
            self.writer.task(&task).map_err(RecordError::Write)?;
        }
        for mapping in &self.mapped.mappings {
            self.writer.mapping(mapping).map_err(RecordError::Write)?;
        }
        if !args.quiet {
            print_stderr(&format!(
                "[ perfvisor record: wrote {} ({samples} samples) ]\n",
                completed.display()
            ));
        }
        if let Some(switch) = &mut self.switch {
            switch.add_completed(completed);
        }
        Ok(())
    }

    /// Completes the recording file. `totals` are the statistics of host kernel samples, if there
    /// were any.
    pub(super) fn finish(
        mut self,
        args: &RecordArgs,
        gone: bool,
        totals: Option<MergedSampleCounts>,
    ) -> Result<(), RecordError> {
        if let Err(source) = self.writer.checkpoint() {
            return Err(self.truncate_to_records(&args.output, source));
        }
        let (samples, bytes) = (self.writer.samples(), self.writer.bytes());
        let symbols = self.symbols_of_file(args);
        // If this write fails, only symbols are missing, because all samples have been written.
        self.writer
            .finish(&symbols)
            .map_err(|source| RecordError::Truncated {
                path: args.output.clone(),
                samples,
                source,
            })?;
        let name = args.output.display();
        if !args.quiet {
            let mb = bytes as f64 / 1e6;
            // Samples without a call chain appear without callers in other tools, so print how many
            // have one.
            let chains = if args.call_graph() == CallGraph::None {
                String::new()
            } else {
                format!(", {} with call chains", self.with_chain)
            };
            print_stderr(&format!(
                "[ perfvisor record: wrote {mb:.3} MB to {name} ({samples} samples{chains}) ]\n"
            ));
        }
        if self.stack_bytes.is_some() {
            log_unwinding(&self.code.totals);
        }
        if let (n @ 1.., ns) = self.held {
            let us = ns as f64 / n as f64 / 1e3;
            log::info!("the VMM took {us:.1} us for each sample that stopped the vCPU");
        }
        if let Some(totals) = totals {
            log_totals(&totals);
        }
        if samples == 0 {
            log::warn!(
                "no sample was taken: the vCPUs may have been idle, paused or without a counter \
                for the event"
            );
        }
        if self.cut_short > 0 {
            log::info!(
                "{} call chains were truncated, because they exceeded the limit of depth or time",
                self.cut_short
            );
        }
        if gone {
            log::warn!("the VM has exited; {name} has the samples until then");
        }
        warn_about_losses(self.lost, self.throttled, self.damaged);
        Ok(())
    }
}

/// Logs how many user stacks were unwound.
fn log_unwinding(totals: &UnwindTotals) {
    let UnwindTotals {
        stacks,
        complete,
        cut,
    } = totals;
    log::info!(
        "{stacks} samples had a user stack; {complete} were unwound to the outermost \
        frame, {cut} were longer than the copy"
    );
}

/// Logs a warning if samples were lost, sampling was throttled, or records were damaged.
fn warn_about_losses(lost: u64, throttled: u64, damaged: u64) {
    if lost > 0 {
        log::warn!("{lost} samples were lost; use larger rings (-m) or a lower frequency");
    }
    if throttled > 0 {
        log::warn!("sampling was throttled {throttled} times; use a lower frequency");
    }
    if damaged > 0 {
        log::warn!("{damaged} damaged records were skipped");
    }
}

/// Creates a recording file with the header and the mapping of the kernel.
fn new_writer(
    path: &Path,
    (meta, events): &(ProfileMetadata, Vec<SampledEventInfo>),
    names: &RecordedSymbols,
) -> Result<PerfDataWriter<BufWriter<File>>, OperatorCommandError> {
    let file = create_private(path).map_err(OperatorCommandError::create(path))?;
    let mut writer = PerfDataWriter::new(BufWriter::new(file), meta.clone(), events.clone())
        .map_err(OperatorCommandError::create(path))?;
    if let Some(kernel) = names.kernel_map() {
        writer.kernel(&kernel).map_err(OperatorCommandError::file(path))?;
    }
    Ok(writer)
}

/// Returns the wall-clock time that corresponds to the host's `CLOCK_MONOTONIC`, or `None` before
/// 1970.
fn wall_clock() -> Option<ClockCorrelation> {
    let before_ns = monotonic_ns();
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(ClockCorrelation {
        wall_ns: u64::try_from(wall.as_nanos()).ok()?,
        clock_ns: before_ns.midpoint(monotonic_ns()),
    })
}

/// Logs the numbers of VM samples and host kernel samples.
fn log_totals(totals: &MergedSampleCounts) {
    let all = totals.light + totals.full;
    if all == 0 {
        return;
    }
    let percent = |n: u64, of: u64| 100.0 * n as f64 / of.max(1) as f64;
    let light = percent(totals.light, all);
    log::info!("the host's kernel took {light:.1} % of the samples; the others stopped the vCPU");
    if totals.in_full_mode > 0 {
        let instead = percent(totals.in_full_mode, all);
        log::info!("{instead:.1} % stopped the vCPU because the host's kernel could not sample the guest");
    }
    if totals.host > 0 {
        let host = percent(totals.host, all + totals.host);
        log::info!("{host:.1} % of the vCPU's time was host code or could not be sampled");
    }
}

/// Renames an existing file to `FILE.old`, as perf does.
fn back_up_existing(path: &Path) -> Result<(), OperatorCommandError> {
    if !std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() > 0) {
        return Ok(());
    }
    let mut old = path.as_os_str().to_owned();
    old.push(".old");
    std::fs::rename(path, &old).map_err(OperatorCommandError::file(path))
}
