//! What comes out of profiling a guest: `perf.data`, tables, scripts, folded stacks, flame graphs, pprof.
//!
//! Everything stands on one neutral model ([`Profile`]): samples of vCPUs with their guest call chains, and
//! what is known of the guest's kernel, tasks and mappings. It is written to and read from `perf.data`, which
//! is also our own file format, so that `perf` reads our files and we need no second one. [`Form`] says as
//! what `perf` sees the guest.
//!
//! | module | makes or reads |
//! |---|---|
//! | [`perfdata`] | `perf.data`, written as samples come |
//! | [`reader`] | the same, read back; hostile input |
//! | [`build_id_dir`] | the directory where `perf` looks for symbols by build-id |
//! | [`symbolize`] | names for a profile's addresses |
//! | [`report`] | a table like `perf report`'s |
//! | [`annotate`] | the instructions of a function, like `perf annotate` |
//! | [`diff`] | two profiles side by side, like `perf diff` |
//! | [`script`] | one paragraph per sample, like `perf script` |
//! | [`folded`] | folded stacks, and flame graphs from them |
//! | [`pprof`] | gzipped protobuf for pprof, Pyroscope, Parca |

pub mod annotate;
pub mod build_id_dir;
mod context;
pub mod diff;
pub mod folded;
pub mod perfdata;
pub mod pprof;
pub mod reader;
pub mod report;
pub mod script;
pub mod symbolize;

use serde::{Deserialize, Serialize};

use crate::unwind::Ends;
use kernel_images::build_id::BuildId;

/// One sampled event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventInfo {
    /// As the operator asked for it: `cycles`, `cpu/event=0x3c/`.
    pub name: String,
    /// `perf_event_attr.type`.
    pub type_: u32,
    /// `perf_event_attr.config`.
    pub config: u64,
    /// Period or frequency.
    pub rate: Rate,
    /// The samples' `id` that names this event. Unique within a profile and not 0.
    pub id: u64,
}

/// How often an event is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// Every so many events.
    Period(u64),
    /// So many samples a second.
    FrequencyHz(u64),
}

/// As what a file shows the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Form {
    /// As if `perf` had recorded inside the guest: its kernel is the kernel, its programs are the programs.
    /// What reads `perf.data` reads it.
    #[default]
    InGuest,
    /// As a guest that the host's `perf kvm` recorded.
    AsHost,
}

/// Where the samples' clock, `CLOCK_MONOTONIC` of the host, was at a time of day.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WallClock {
    /// Time since 1970 (UTC), ns.
    pub wall_ns: u64,
    /// The samples' clock at that moment, ns.
    pub clock_ns: u64,
}

impl WallClock {
    /// When a sample was taken: ns since 1970.
    pub fn at(&self, time_ns: u64) -> u64 {
        self.wall_ns.wrapping_sub(self.clock_ns).wrapping_add(time_ns)
    }
}

/// The circumstances of a profile. Strings are cut at 4 KiB when written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meta {
    /// Host name (of the guest, if known).
    pub hostname: String,
    /// Kernel release of the guest, if known.
    pub os_release: String,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// The command that recorded it.
    pub command: Vec<String>,
    /// As what the file shows the guest.
    pub form: Form,
    /// The time of day of the samples' clock, if it is known: then that clock is `CLOCK_MONOTONIC`.
    pub clock: Option<WallClock>,
}

/// Where the guest kernel's text runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelMap {
    /// First address: that of `_stext` or `_text`.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Name of the symbol at `reference_address`, by which `perf` finds the slide.
    pub reference_symbol: String,
    /// Running address of that symbol.
    pub reference_address: u64,
    /// What names its symbols.
    pub build_id: Option<BuildId>,
}

/// A name for a guest task, valid from a time on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskName {
    /// Guest time of the sample it was first seen at, in ns of the samples' clock.
    pub time_ns: u64,
    /// Guest process id.
    pub pid: u32,
    /// Guest thread id.
    pub tid: u32,
    /// Its name, at most 15 bytes.
    pub comm: String,
}

/// A file a guest process has mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileMapping {
    /// When it was first seen, in ns of the samples' clock.
    pub time_ns: u64,
    /// Guest process id.
    pub pid: u32,
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of `start` in the file, in bytes.
    pub file_offset: u64,
    /// Guest path.
    pub path: String,
    /// The file's build-id, if it is known.
    pub build_id: Option<BuildId>,
}

/// One sample. `chain` is as [`crate::unwind::walk`] leaves it: context markers and addresses,
/// innermost first; empty for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample<'c> {
    /// Time in ns.
    pub time_ns: u64,
    /// vCPU number.
    pub vcpu: u32,
    /// Guest process id; [`NO_PID`] when not known.
    pub pid: u32,
    /// Guest thread id; [`NO_PID`] when not known.
    pub tid: u32,
    /// Privilege level, 0 to 3.
    pub cpl: u8,
    /// Instruction pointer.
    pub ip: u64,
    /// CR3.
    pub cr3: u64,
    /// Events this sample stands for.
    pub period: u64,
    /// [`EventInfo::id`].
    pub event_id: u64,
    /// How the call chain ended.
    pub ends: Ends,
    /// Call chain.
    pub chain: &'c [u64],
}

/// Stands for a task that could not be found (perf shows it as -1).
pub const NO_PID: u32 = u32::MAX;

/// A name resolved at recording time, kept in the file for those who have neither kernel nor guest at hand.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedSymbol {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// The name.
    pub name: String,
    /// Guest process; `None` for the kernel.
    pub pid: Option<u32>,
}

/// A whole profile in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// Circumstances.
    pub meta: Meta,
    /// What was sampled.
    pub events: Vec<EventInfo>,
    /// The guest kernel's place, if it was found.
    pub kernel: Option<KernelMap>,
    /// Tasks seen.
    pub tasks: Vec<TaskName>,
    /// Files seen mapped.
    pub mappings: Vec<FileMapping>,
    /// Samples that were lost.
    pub lost: u64,
    /// Names kept in the file.
    pub symbols: Vec<SavedSymbol>,
    samples: Vec<StoredSample>,
    chains: Vec<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StoredSample {
    fixed: Sample<'static>,
    chain_at: usize,
    chain_len: usize,
}

impl Profile {
    /// An empty profile.
    pub fn new(meta: Meta, events: Vec<EventInfo>) -> Self {
        Self {
            meta,
            events,
            ..Self::default()
        }
    }

    /// Adds a sample.
    pub fn push(&mut self, sample: &Sample<'_>) {
        self.samples.push(StoredSample {
            fixed: Sample {
                chain: &[],
                time_ns: sample.time_ns,
                vcpu: sample.vcpu,
                pid: sample.pid,
                tid: sample.tid,
                cpl: sample.cpl,
                ip: sample.ip,
                cr3: sample.cr3,
                period: sample.period,
                event_id: sample.event_id,
                ends: sample.ends,
            },
            chain_at: self.chains.len(),
            chain_len: sample.chain.len(),
        });
        self.chains.extend_from_slice(sample.chain);
    }

    /// The samples in the order they were added.
    pub fn samples(&self) -> impl ExactSizeIterator<Item = Sample<'_>> {
        self.samples.iter().map(|s| Sample {
            chain: &self.chains[s.chain_at..][..s.chain_len],
            ..s.fixed
        })
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// The event of an id.
    pub fn event(&self, id: u64) -> Option<&EventInfo> {
        self.events.iter().find(|e| e.id == id)
    }

    /// The name of a task at a time: the latest one at or before it, else the first.
    pub fn comm(&self, tid: u32, time_ns: u64) -> Option<&str> {
        let names = || self.tasks.iter().filter(|t| t.tid == tid);
        let latest = names().filter(|t| t.time_ns <= time_ns).max_by_key(|t| t.time_ns);
        latest
            .or_else(|| names().min_by_key(|t| t.time_ns))
            .map(|t| t.comm.as_str())
    }
}

/// One frame of a chain with its side of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Address.
    pub address: u64,
    /// A kernel frame.
    pub kernel: bool,
    /// The address is where a call returns to. It is not in the innermost frame, nor where the kernel was
    /// entered from user code: that is the instruction an interrupt came before, or the one behind a system
    /// call.
    pub caller: bool,
}

impl Frame {
    /// An address within the instruction that the frame is at: a caller's, which may be the last one of its
    /// function, ends just before the frame's address.
    pub fn instruction(self) -> u64 {
        self.address.wrapping_sub(u64::from(self.caller))
    }
}

/// The frames of a sample, innermost first: its chain, or its instruction pointer alone.
pub fn frames<'s>(sample: &Sample<'s>) -> impl Iterator<Item = Frame> + 's {
    let mut kernel = sample.cpl != 3;
    let alone = sample.chain.is_empty().then_some(sample.ip);
    let mut exact = true;
    sample
        .chain
        .iter()
        .copied()
        .chain(alone)
        .filter_map(move |address| {
            // PERF_CONTEXT_MAX: values from here up are markers, no addresses.
            if address >= (-4095i64).cast_unsigned() {
                let was_kernel = kernel;
                kernel = matches!(
                    address,
                    context::CONTEXT_KERNEL | crate::unwind::CONTEXT_GUEST_KERNEL
                );
                exact |= was_kernel && !kernel;
                return None;
            }
            let caller = !std::mem::take(&mut exact);
            Some(Frame {
                address,
                kernel,
                caller,
            })
        })
}
