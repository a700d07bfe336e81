//! Reads and writes profiles of guests: `perf.data`, tables, scripts, folded stacks, flame graphs,
//! pprof and the formats of speedscope and the Firefox Profiler.
//!
//! All formats share one model, [`Profile`]: samples of vCPUs with guest call chains, and metadata
//! about the guest's kernel, tasks and mappings. `perf.data` is also the native file format of
//! recordings, so `perf` can read them. [`ProfilePerspective`] selects how `perf` sees the guest.
//!
//! | module | purpose |
//! |---|---|
//! | [`perfdata`] | writes `perf.data` incrementally |
//! | [`reader`] | reads `perf.data`, treated as hostile input |
//! | [`build_id_dir`] | writes the directory where `perf` looks up symbols by build ID |
//! | [`symbolize`] | resolves the addresses of a profile to names |
//! | [`report`] | formats a table like `perf report` |
//! | [`annotate`] | shows the instructions of a function like `perf annotate` |
//! | [`diff`] | compares two profiles like `perf diff` |
//! | [`script`] | prints one paragraph per sample like `perf script` |
//! | [`filter`] | selects samples by task, object and function |
//! | [`call_tree`] | formats call chains below the rows of a report |
//! | [`folded`] | writes folded stacks, flame graphs and differential flame graphs |
//! | [`speedscope`] | writes speedscope's format |
//! | [`firefox`] | writes the Firefox Profiler's format |
//! | [`pprof`] | writes gzipped protobuf for pprof, Pyroscope and Parca |

pub mod annotate;
pub mod build_id_dir;
pub mod call_tree;
mod context;
pub mod diff;
pub mod filter;
pub mod firefox;
pub mod folded;
pub mod perfdata;
pub mod pprof;
pub mod reader;
pub mod report;
pub mod script;
pub mod speedscope;
pub mod symbolize;

use serde::{Deserialize, Serialize};

use crate::unwind::UnwindStopReasons;
use kernel_images::build_id::BuildId;

/// An event that was sampled for a profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampledEventInfo {
    /// Event name as specified by the operator, such as `cycles` or `cpu/event=0x3c/`.
    pub name: String,
    /// Value of `perf_event_attr.type` for the event.
    pub type_: u32,
    /// Value of `perf_event_attr.config` for the event.
    pub config: u64,
    /// Sampling period or sampling frequency of the event.
    pub rate: EventSamplingRate,
    /// Value of `perf_event_attr.branch_sample_type`; 0 if the samples have no branch stacks.
    pub branch_filter: u64,
    /// `true` if the samples of the event have call chains. Should be `false` if all chains are
    /// empty, because perf prints no instruction pointer for a sample with an empty chain, and
    /// perf2bolt cannot parse this output.
    pub has_chains: bool,
    /// Event ID to which the samples refer. Unique within a profile and not 0.
    pub id: u64,
}

/// How often an event is sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventSamplingRate {
    /// The event is sampled once per this number of events.
    Period(u64),
    /// The event is sampled about this number of times per second.
    FrequencyHz(u64),
}

/// Viewpoint from which a `perf.data` file presents the guest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ProfilePerspective {
    /// The file looks as if `perf` had recorded inside the guest, so any reader of `perf.data` can
    /// use it.
    #[default]
    InGuest,
    /// The file looks as if `perf kvm` had recorded the guest on the host.
    AsHost,
}

/// The same moment on two clocks: the wall clock and the clock of the samples (`CLOCK_MONOTONIC` of
/// the host). Used to convert the times of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockCorrelation {
    /// Wall-clock time of the moment, in nanoseconds since 1970 (UTC).
    pub wall_ns: u64,
    /// Time of the moment on the samples' clock, in nanoseconds.
    pub clock_ns: u64,
}

impl ClockCorrelation {
    /// Converts the time of a sample to wall-clock time, in nanoseconds since 1970.
    pub fn wall_clock_ns(&self, time_ns: u64) -> u64 {
        self.wall_ns.wrapping_sub(self.clock_ns).wrapping_add(time_ns)
    }
}

/// Metadata of a profile. Strings longer than 4 KiB are truncated when written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProfileMetadata {
    /// Host name of the guest, if known.
    pub hostname: String,
    /// Kernel release of the guest, if known.
    pub os_release: String,
    /// Number of vCPUs of the guest.
    pub vcpus: u32,
    /// Command line that recorded the profile.
    pub command: Vec<String>,
    /// Viewpoint from which the `perf.data` file presents the guest.
    pub form: ProfilePerspective,
    /// Relation of the samples' clock to the wall clock, if known. The samples' clock is then
    /// `CLOCK_MONOTONIC`.
    pub clock: Option<ClockCorrelation>,
    /// `true` if the file contains the context switches of the vCPU threads.
    pub thread_switches: bool,
}

/// Run-time location of the guest kernel's code (text).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelTextMap {
    /// Address of the first byte of the kernel's code: the symbol `_stext` or `_text`.
    pub start: u64,
    /// Length of the kernel's code, in bytes.
    pub len: u64,
    /// Name of a kernel symbol. `perf` computes the KASLR offset from its link-time and run-time
    /// addresses.
    pub reference_symbol: String,
    /// Run-time address of the symbol named `reference_symbol`.
    pub reference_address: u64,
    /// Build ID of the kernel, if known.
    pub build_id: Option<BuildId>,
}

/// The name of a guest task, valid from a given time on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskName {
    /// Time of the first sample with this name, in nanoseconds on the samples' clock.
    pub time_ns: u64,
    /// Guest process ID of the task.
    pub pid: u32,
    /// Guest thread ID of the task.
    pub tid: u32,
    /// Name of the task, at most 15 bytes.
    pub comm: String,
}

/// A file mapping of a guest process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileMapping {
    /// Time of the first sample with this mapping, in nanoseconds on the samples' clock.
    pub time_ns: u64,
    /// Guest process ID of the process that has the mapping.
    pub pid: u32,
    /// Start address of the mapping.
    pub start: u64,
    /// Length of the mapping, in bytes.
    pub len: u64,
    /// Offset of `start` in the file, in bytes.
    pub file_offset: u64,
    /// Path of the file in the guest.
    pub path: String,
    /// Build ID of the mapped file, if known.
    pub build_id: Option<BuildId>,
}

/// A sample of a guest, in a profile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProfileSample<'c> {
    /// Time of the sample, in nanoseconds.
    pub time_ns: u64,
    /// Number of the vCPU that was sampled.
    pub vcpu: u32,
    /// Guest process ID of the sampled task; [`NO_PID`] if unknown.
    pub pid: u32,
    /// Guest thread ID of the sampled task; [`NO_PID`] if unknown.
    pub tid: u32,
    /// Privilege level of the vCPU at the sample, 0 to 3.
    pub cpl: u8,
    /// Instruction pointer of the vCPU at the sample.
    pub ip: u64,
    /// CR3 of the vCPU at the sample.
    pub cr3: u64,
    /// Number of events that the sample represents.
    pub period: u64,
    /// ID of the sampled event ([`SampledEventInfo::id`]).
    pub event_id: u64,
    /// Reasons why unwinding of the kernel part and of the user part of the call chain ended.
    pub ends: UnwindStopReasons,
    /// Call chain of the sample in the format of [`crate::unwind::walk`]: context markers and
    /// addresses, innermost frame first. Empty if no call chain was recorded.
    pub chain: &'c [u64],
    /// Branch stack of the sample, newest branch first.
    pub branches: &'c [SampledBranch],
}

/// A taken branch in the format of `struct perf_branch_entry`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SampledBranch {
    /// Address of the branch instruction.
    pub from: u64,
    /// Target address of the branch.
    pub to: u64,
    /// Prediction, cycles and type of the branch, as in `struct perf_branch_entry`.
    pub flags: u64,
}

impl SampledBranch {
    /// Returns the name of the branch type as printed by `perf script`, or `None` if the type is
    /// not recorded.
    pub fn kind(&self) -> Option<&'static str> {
        const KINDS: [&str; 13] = [
            "",
            "COND",
            "UNCOND",
            "IND",
            "CALL",
            "IND_CALL",
            "RET",
            "SYSCALL",
            "SYSRET",
            "COND_CALL",
            "COND_RET",
            "ERET",
            "IRQ",
        ];
        let kind = usize::try_from(self.flags >> 20 & 0xf).ok()?;
        KINDS.get(kind).copied().filter(|name| !name.is_empty())
    }
}

/// Process ID or thread ID of an unknown task, which `perf` shows as -1.
pub const NO_PID: u32 = u32::MAX;

/// A symbol that was resolved at recording time and saved in the file, so that it can be used
/// without access to the guest or its kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileSymbol {
    /// Start address of the symbol.
    pub start: u64,
    /// End address of the symbol (exclusive).
    pub end: u64,
    /// Name of the symbol.
    pub name: String,
    /// ID of the guest process that maps the symbol; `None` for a kernel symbol.
    pub pid: Option<u32>,
}

/// A complete profile in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    /// Metadata of the profile, such as the host name of the guest.
    pub meta: ProfileMetadata,
    /// Events that were sampled.
    pub events: Vec<SampledEventInfo>,
    /// Location of the guest kernel; `None` if it was not found.
    pub kernel: Option<KernelTextMap>,
    /// Names of the sampled guest tasks.
    pub tasks: Vec<TaskName>,
    /// File mappings of the sampled guest processes.
    pub mappings: Vec<FileMapping>,
    /// Number of samples lost during recording.
    pub lost: u64,
    /// Symbols that were resolved at recording time and saved in the file.
    pub symbols: Vec<ProfileSymbol>,
    samples: Vec<StoredSample>,
    chains: Vec<u64>,
    branches: Vec<SampledBranch>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StoredSample {
    fixed: ProfileSample<'static>,
    chain_at: usize,
    chain_len: usize,
    branches_at: usize,
    branches_len: usize,
}

impl Profile {
    /// Creates an empty profile.
    pub fn new(meta: ProfileMetadata, events: Vec<SampledEventInfo>) -> Self {
        Self {
            meta,
            events,
            ..Self::default()
        }
    }

    /// Appends a copy of `sample` to the profile.
    pub fn push(&mut self, sample: &ProfileSample<'_>) {
        self.samples.push(StoredSample {
            fixed: ProfileSample {
                chain: &[],
                branches: &[],
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
            branches_at: self.branches.len(),
            branches_len: sample.branches.len(),
        });
        self.chains.extend_from_slice(sample.chain);
        self.branches.extend_from_slice(sample.branches);
    }

    /// Returns the samples in insertion order.
    pub fn samples(&self) -> impl ExactSizeIterator<Item = ProfileSample<'_>> {
        self.samples.iter().map(|s| ProfileSample {
            chain: &self.chains[s.chain_at..][..s.chain_len],
            branches: &self.branches[s.branches_at..][..s.branches_len],
            ..s.fixed
        })
    }

    /// Returns the number of samples.
    pub fn len(&self) -> usize {
        self.samples.len()
    }

    /// Returns `true` if the profile has no samples.
    pub fn is_empty(&self) -> bool {
        self.samples.is_empty()
    }

    /// Returns the sampled event with ID `id`.
    pub fn event(&self, id: u64) -> Option<&SampledEventInfo> {
        self.events.iter().find(|e| e.id == id)
    }

    /// Returns the name of a task at a given time: the last name recorded at or before this time,
    /// or the first name if none was recorded before.
    pub fn comm(&self, tid: u32, time_ns: u64) -> Option<&str> {
        let names = || self.tasks.iter().filter(|t| t.tid == tid);
        let latest = names().filter(|t| t.time_ns <= time_ns).max_by_key(|t| t.time_ns);
        latest
            .or_else(|| names().min_by_key(|t| t.time_ns))
            .map(|t| t.comm.as_str())
    }
}

/// One frame of a call chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ChainFrame {
    /// Address of the frame: an instruction pointer or a return address.
    pub address: u64,
    /// `true` if the frame is in the kernel.
    pub kernel: bool,
    /// `true` if the frame's address is a return address. `false` for the innermost frame, and for
    /// the user frame that entered the kernel, whose address is that of the interrupted instruction
    /// or of the instruction after a system call.
    pub caller: bool,
}

impl ChainFrame {
    /// Returns an address within the instruction to which the frame belongs. If the frame's address
    /// is a return address, this is the byte before it. The return address itself may belong to the
    /// next function, because the call may be the last instruction of its function.
    pub fn instruction(self) -> u64 {
        self.address.wrapping_sub(u64::from(self.caller))
    }
}

/// Returns the frames of a sample, innermost first: those of its call chain, or only its
/// instruction pointer.
pub fn frames<'s>(sample: &ProfileSample<'s>) -> impl Iterator<Item = ChainFrame> + 's {
    let mut kernel = sample.cpl != 3;
    let alone = sample.chain.is_empty().then_some(sample.ip);
    let mut exact = true;
    sample
        .chain
        .iter()
        .copied()
        .chain(alone)
        .filter_map(move |address| {
            // Values from PERF_CONTEXT_MAX on are context markers, not addresses.
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
            Some(ChainFrame {
                address,
                kernel,
                caller,
            })
        })
}
