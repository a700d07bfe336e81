//! What is said over a control socket: JSON, one object in a line. `docs/reference/control.md` describes it
//! for other programs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Version of the protocol. A client says which one it speaks in its first request.
pub const PROTOCOL: u32 = 1;
/// Longest request, its newline included, in bytes.
pub const MAX_REQUEST: usize = 64 << 10;
/// Most events of one connection.
pub const MAX_EVENTS: usize = 1024;
/// Most bytes of code at a time.
pub const MAX_CODE: u32 = 64 << 10;
/// Most data pages of a ring.
pub const MAX_RING_PAGES: u32 = 4096;

/// Most bytes of a process's memory in one reply.
pub const MAX_PROCESS_MEMORY: u32 = 1 << 20;
/// Most mappings of code in one reply.
pub const MAX_PROCESS_CODE: usize = 1024;

/// A request as it is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequestLine {
    /// Comes back in the reply.
    pub id: u64,
    /// What is asked.
    #[serde(flatten)]
    pub call: Call,
}

/// What a client can ask.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "call", rename_all = "snake_case")]
pub enum Call {
    /// The first request of a connection. Reply: [`VmInfo`].
    Hello {
        /// The version the client speaks.
        protocol: u32,
    },
    /// Reply: [`VmInfo`].
    Status,
    /// Takes all vCPUs out of the guest; [`VmInfo::parked`] says how many have arrived.
    Pause,
    /// Lets them go on.
    Resume,
    /// Ends the VM.
    Stop,
    /// Presses the ACPI power button; refused if the guest does not listen to it. The guest then powers
    /// off, or does what it likes.
    Powerdown,
    /// Begins to make it so many vCPUs: those that are missing are started, and the guest is told; for those
    /// with the highest numbers it is asked if there are too many. Reply: [`VcpuPlug`]; ask
    /// [`Call::VcpuPlug`] what has come of it.
    Vcpus {
        /// How many, up to what the VM was started for.
        count: u32,
    },
    /// Which vCPUs come and go. Reply: [`VcpuPlug`].
    VcpuPlug,
    /// Withdraws the request to give up vCPUs, for those that the guest still has. Reply: [`VcpuPlug`].
    VcpusWithdraw,
    /// Who gets the host's counters from now on: guest-first, operator-first or strict.
    Share {
        /// Its name.
        policy: String,
    },
    /// Replaces the filter of the events the guest may count.
    Filter {
        /// Its text, as in a file for `--pmu-filter`.
        toml: String,
    },
    /// Opens events, disabled. Reply: a list of [`Opened`].
    Open {
        /// A list in perf's syntax.
        events: String,
        /// On which vCPUs; all when left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vcpus: Option<Vec<u32>>,
        /// One event for each name instead of one for each name and vCPU: it counts on all vCPUs there are
        /// and on those that come later, from their first instruction. Neither `vcpus` nor
        /// `sampling` goes with it.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        whole: bool,
        /// To sample; counting only when left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sampling: Option<Sampling>,
    },
    /// Enables all events of this connection.
    Enable,
    /// Disables them.
    Disable,
    /// The events of this connection that were opened on vCPUs which came since it asked last: those that
    /// were asked for without naming vCPUs. They are enabled if the connection's last word was so. Reply:
    /// a list of [`Joined`].
    Joined,
    /// Reads them all. Reply: a list of [`EventReading`].
    Read,
    /// Closes them all.
    Close,
    /// Makes a ring that all sampling events of one vCPU write to. Reply: [`RingInfo`], and its memfd with
    /// it.
    Ring {
        /// The vCPU.
        vcpu: u32,
        /// Data pages, a power of two.
        pages: u32,
    },
    /// The host kernel's own ring of an event that has one ([`Opened::ring`]): the guest's instruction
    /// pointers, taken without leaving the guest. Reply: [`HostRingInfo`], and the perf event's
    /// descriptor with it, which the client maps.
    HostRing {
        /// The event.
        handle: u32,
    },
    /// Lets an event with a ring of the host's kernel take every so-many-th sample itself, with registers and
    /// call chain.
    Chains {
        /// The event.
        handle: u32,
        /// 1: all of them.
        every: u32,
    },
    /// How many records found no room and were not told of in the rings yet. Reply: a list of [`RingLoss`].
    RingLosses,
    /// What the loop of each vCPU counted since the VM was started, those that have left included. Reply: a
    /// list of [`crate::counts::VcpuCounts`].
    Counts,
    /// Looks for the guest's kernel in its memory, if that was not done. Reply: [`KernelInfo`]; ask again
    /// while it is looked for.
    Kernel,
    /// The guest kernel's symbols. Reply: [`SymbolsInfo`], and a memfd with them as text like
    /// `/proc/kallsyms`.
    Symbols,
    /// The code that a process of the guest has mapped, as the guest's kernel tells. Reply: [`ProcessCode`].
    ProcessCode {
        /// Its id in the guest's first namespace.
        pid: u32,
    },
    /// A part of a process's memory, pages of files included that the process has mapped and not touched.
    /// Reply: [`ProcessMemory`], and a memfd with the bytes.
    ProcessMemory {
        /// Its id in the guest's first namespace.
        pid: u32,
        /// The first address.
        address: u64,
        /// How many bytes, at most [`MAX_PROCESS_MEMORY`].
        bytes: u32,
    },
    /// Asks each vCPU what its guest has programmed. Reply: [`Generation`].
    GuestView,
    /// What the vCPUs saw. Reply: [`GuestViews`].
    GuestViewResult {
        /// Which look.
        generation: u64,
    },
    /// The vCPUs' exits to user space, by what they were for, since this connection asked for the first time:
    /// the VM counts and times them from then on. Reply: a list of [`VcpuExits`].
    Exits,
    /// Reads code out of the guest's memory, through the page tables that CR3 names. Reply: [`CodeInfo`].
    Code {
        /// The address space: a sample's CR3.
        cr3: u64,
        /// The first address.
        address: u64,
        /// How many bytes, up to [`MAX_CODE`].
        length: u32,
    },
}

/// How to sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Sampling {
    /// Events for a sample, or samples a second.
    pub rate: u64,
    /// `rate` is a frequency in Hz.
    pub frequency: bool,
    /// With the guest's call chain.
    pub callchain: bool,
    /// Take the vCPU out of the guest for every so-many-th sample only, and have the host's kernel sample
    /// the instruction pointer, where it can ([`Opened::ring`]). 1, which is what it means to leave it
    /// out: for every sample.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub chain_every: u32,
    /// With the registers of the program and so many bytes of its stack, for unwinding it elsewhere; a
    /// multiple of 8, at most 32768. 0: without.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stack_bytes: u32,
}

fn one() -> u32 {
    1
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

fn is_one(n: &u32) -> bool {
    *n == 1
}

/// Maximum length of a reply of unlimited kind, in bytes.
pub(crate) const MAX_REPLY: usize = 16 << 20;
/// Maximum length of a reply that says no more than that a request was done, or describes the VM, in bytes.
pub(crate) const MAX_SHORT_REPLY: usize = 64 << 10;

impl Call {
    /// Maximum length of the reply that a client takes, in bytes.
    pub(crate) fn max_reply(&self) -> usize {
        match self {
            Call::Open { .. }
            | Call::Joined
            | Call::Read
            | Call::RingLosses
            | Call::Counts
            | Call::GuestViewResult { .. }
            | Call::Exits
            | Call::Code { .. }
            | Call::ProcessMemory { .. }
            | Call::ProcessCode { .. } => MAX_REPLY,
            _ => MAX_SHORT_REPLY,
        }
    }
}

/// A reply as it is sent: `ok` or `error`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReplyLine {
    /// The request's.
    pub id: u64,
    /// What it came to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ok: Option<serde_json::Value>,
    /// Why it came to nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// For programs.
    pub kind: FailureKind,
    /// For people: one line.
    pub message: String,
}

/// Kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// No request of this protocol, or out of order. The connection is closed.
    Protocol,
    /// Too many requests. The connection is closed.
    Rate,
    /// A value that is not allowed.
    Invalid,
    /// Not allowed to this user.
    Denied,
    /// A limit on memory, events or slots.
    Limit,
    /// This VM or this host cannot do it.
    Unsupported,
    /// A system call failed.
    Internal,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VmInfo {
    /// Version of the protocol that is spoken.
    pub protocol: u32,
    /// Version of Perfvisor.
    pub version: String,
    /// The VM's name.
    pub name: String,
    /// Process that runs it.
    pub pid: u32,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Most vCPUs it may have; 0 from a VM that does not say.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub max_vcpus: u32,
    /// Its PMU model; "off" for none.
    pub pmu: String,
    /// What runs in it.
    pub guest: String,
    /// Where its first serial port is, such as `tty` or `pty=/dev/pts/3`; empty from a VM that does not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub console: String,
    /// Where its virtio console is, in the same words; empty without one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub virtio_console: String,
    /// Threads that run the vCPUs there are, in their order; empty from a VM that does not say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<u32>,
    /// Whether it runs.
    pub state: VmState,
    /// vCPUs that are out of the guest because of a pause.
    pub parked: u32,
    /// Time since it was started, in milliseconds.
    pub uptime_ms: u64,
    /// What the client may do.
    pub role: ClientRole,
}

/// Whether a VM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// Its vCPUs run.
    Running,
    /// They are out of the guest, or on their way.
    Paused,
    /// It is ending.
    Stopped,
}

impl std::fmt::Display for VmState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Stopped => "stopped",
        })
    }
}

/// What a client may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientRole {
    /// Everything: root.
    Admin,
    /// Everything within the limits on operators: the VM's own user.
    Operator,
    /// To look on and to count, at the observers' socket: nothing that changes the VM or shows its memory.
    Observer,
}

/// Which vCPUs of a VM come and go.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuPlug {
    /// Those there are.
    pub present: Vec<u32>,
    /// Most there can be.
    pub max: u32,
    /// Those that have come and that the guest has not taken note of.
    pub unnoticed: Vec<u32>,
    /// Those that the guest was asked to give up and has not.
    pub asked_for: Vec<u32>,
    /// Those that the guest has given up, and that are about to leave.
    pub leaving: Vec<u32>,
    /// What it refused to take in or give up when it was asked last.
    pub refused: Vec<VcpuRefusal>,
}

/// A guest does not take a vCPU in, or does not give it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuRefusal {
    /// The vCPU.
    pub vcpu: u32,
    /// The status that its _OST gave (ACPI 6.5, tables 6.74 and 6.75).
    pub status: u32,
}

/// Events on a vCPU that came.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Joined {
    /// The vCPU.
    pub vcpu: u32,
    /// Its events.
    pub events: Vec<Opened>,
    /// Why they could not be opened: the vCPU is there, and not counted for this connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// An event that was opened, or could not be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Opened {
    /// Its number on this connection; `None` when it cannot be counted here.
    pub handle: Option<u32>,
    /// Why it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsupported: Option<String>,
    /// As in the list.
    pub name: String,
    /// Its place in the list, from 0.
    pub index: u32,
    /// On which vCPU; `None`: it counts for the whole VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu: Option<u32>,
    /// Who counts: hardware, clock, software, kvm or vmm.
    pub backing: String,
    /// Its counts are nanoseconds.
    pub nanoseconds: bool,
    /// Its counts are an estimate even when it is on all the time.
    pub estimate: bool,
    /// The id that its samples carry.
    pub id: u64,
    /// `perf_event_attr.type`.
    pub kind: u32,
    /// `perf_event_attr.config`.
    pub config: u64,
    /// The host's kernel samples it too: see [`Call::HostRing`]. The event itself then takes only every
    /// [`Sampling::chain_every`]-th sample.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ring: bool,
    /// Why it does not, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_ring: Option<String>,
}

/// One reading.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventReading {
    /// The event's number.
    pub handle: u32,
    /// What was counted.
    pub value: u64,
    /// Time it was enabled, in ns.
    pub enabled_ns: u64,
    /// Time of that it counted, in ns.
    pub running_ns: u64,
    /// What it would have counted had it been on all the time; `None` if it was not counted.
    pub estimate: Option<u64>,
    /// Standard error of `estimate`; 0 when it was counted, `None` when not known.
    pub standard_error: Option<f64>,
    /// The error of `estimate` is hardly more than this; `None` when nothing is known of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
    /// The event is in the error state: pinned, and no slot.
    pub failed: bool,
    /// Its vCPU has left: this is the last it counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gone: bool,
    /// Of an event that was opened for the whole VM: what each vCPU counted of it, those that have gone
    /// included.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vcpus: Vec<VcpuPart>,
}

/// What one vCPU counted of an event for the whole VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuPart {
    /// The vCPU.
    pub vcpu: u32,
    /// What was counted there.
    pub value: u64,
    /// Time it was enabled there, in ns.
    pub enabled_ns: u64,
    /// Time of that it counted, in ns.
    pub running_ns: u64,
    /// What it would have counted there had it been on all the time; `None` if it was not counted.
    pub estimate: Option<u64>,
    /// As [`EventReading::standard_error`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standard_error: Option<f64>,
    /// As [`EventReading::bound`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
}

/// What came between two readings of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// What it counted, or would have counted had it been on all the time.
    pub count: u64,
    /// Time it was enabled, in ns.
    pub enabled_ns: u64,
    /// Time of that it counted, in ns.
    pub running_ns: u64,
}

impl EventReading {
    /// What came since `before`, or since the event was opened; `None` if it was not counted then.
    ///
    /// What it would have counted while it was off is the estimator's to say for an interval too: the growth
    /// of its estimate. An interval's own share of the time does not do, because under the adaptive
    /// policy an event is seen less where it is steady. So the intervals add up to the estimate of the
    /// whole, but for those in which all was counted: they are exact.
    pub fn since(&self, before: Option<&Self>) -> Option<Growth> {
        if self.failed {
            return None;
        }
        if self.gone && before.is_some_and(|before| before.running_ns == self.running_ns) {
            // Its vCPU was not there in this interval.
            return Some(Growth {
                count: 0,
                enabled_ns: 0,
                running_ns: 0,
            });
        }
        let of = |r: &Self| (r.value, r.enabled_ns, r.running_ns, r.estimate);
        growth(of(self), before.map(of))
    }

    /// The part of `vcpu`, as a reading of its own.
    pub fn on(&self, vcpu: u32) -> Option<Self> {
        let part = self.vcpus.iter().find(|part| part.vcpu == vcpu)?;
        Some(Self {
            handle: self.handle,
            value: part.value,
            enabled_ns: part.enabled_ns,
            running_ns: part.running_ns,
            estimate: part.estimate,
            standard_error: part.standard_error,
            bound: part.bound,
            failed: self.failed,
            gone: self.gone,
            vcpus: Vec::new(),
        })
    }
}

/// Of value, time enabled, time running and estimate.
fn growth(now: (u64, u64, u64, Option<u64>), before: Option<(u64, u64, u64, Option<u64>)>) -> Option<Growth> {
    let (value, enabled_ns, running_ns, estimate) = before.unwrap_or_default();
    let counted = now.0.saturating_sub(value);
    let grown = Growth {
        count: counted,
        enabled_ns: now.1.saturating_sub(enabled_ns),
        running_ns: now.2.saturating_sub(running_ns),
    };
    let now_estimate = now.3?;
    if before.is_some() && grown.running_ns == 0 {
        return None;
    }
    if grown.running_ns >= grown.enabled_ns {
        return Some(Growth {
            count: if before.is_some() { counted } else { now_estimate },
            ..grown
        });
    }
    // An estimate of the past may be put right later, but what was counted since was counted.
    let estimated = now_estimate.saturating_sub(estimate.unwrap_or(value));
    Some(Growth {
        count: estimated.max(counted),
        ..grown
    })
}

/// A ring. Its memfd comes with the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RingInfo {
    /// The vCPU.
    pub vcpu: u32,
    /// `sample_type` of its samples.
    pub sample_type: u64,
    /// What to add to its samples' time for the host's `CLOCK_MONOTONIC`, in ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_offset_ns: Option<u64>,
}

/// The host kernel's ring of one event. The perf event's descriptor comes with the reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostRingInfo {
    /// Events that each sample stands for; `None`: as the sample says.
    pub period: Option<u64>,
    /// What to take off the samples' time, `CLOCK_MONOTONIC`, for the time that the VM's own samples carry,
    /// in ns.
    pub clock_offset_ns: u64,
    /// KVM interprets the guest's kernel here. The ring shows such time as the host kernel's.
    pub interpreted: bool,
}

/// How the search for the guest's kernel is going.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KernelInfo {
    /// Where it is.
    pub state: KernelState,
    /// What was found, or why nothing was.
    pub detail: String,
}

/// States of the search for the guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KernelState {
    /// Nobody looked.
    Unknown,
    /// It is looked for.
    Looking,
    /// Samples have kernel call chains and tasks.
    Found,
    /// It was not found.
    NotFound,
}

/// Records that found no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RingLoss {
    /// The vCPU.
    pub vcpu: u32,
    /// How many.
    pub lost: u64,
}

/// The guest kernel's symbols. The text comes as a memfd with the reply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SymbolsInfo {
    /// Bytes of text.
    pub bytes: u64,
    /// One address space for all: the guest has no user space of its own.
    pub flat: bool,
    /// Where they come from.
    pub source: String,
    /// The kernel's build-id in hexadecimal digits, if it runs and has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
    /// The kernel's release, as `uname -r` tells it, if it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<String>,
}

/// The code that a process has mapped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessCode {
    /// Lowest address first.
    pub mappings: Vec<CodeMapping>,
    /// These are not all: there are more than a reply holds, or the guest's lists are too long or do not
    /// hold together.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut_short: bool,
}

/// A mapping of code. All of it is the guest's claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CodeMapping {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of `start` in the file.
    pub file_offset: u64,
    /// Where the file's first byte is mapped; left out if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// The file's path in the guest, printable; `//anon` and `[vdso]` for what is no file.
    pub path: String,
    /// The file's build-id in hexadecimal digits, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
}

/// A part of a process's memory. The bytes come as a memfd with the reply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessMemory {
    /// How many bytes.
    pub bytes: u32,
    /// Parts that are not in the guest's memory, which read as zeros: offset and length of each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<(u32, u32)>,
}

/// Which look at the guest's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Generation {
    /// Counts up.
    pub generation: u64,
}

/// What vCPUs saw.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestViews {
    /// All vCPUs have looked.
    pub complete: bool,
    /// A list of counters for each vCPU that has.
    pub vcpus: Vec<VcpuView>,
}

/// What one vCPU's guest has programmed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuView {
    /// The vCPU.
    pub vcpu: u32,
    /// PMIs delivered so far; not known where KVM's own vPMU delivers them.
    pub pmis: Option<u64>,
    /// Time in which at least one counter that the guest had enabled was not counted, in ns; like the
    /// next, not known where KVM's own vPMU counts.
    #[serde(default)]
    pub uncounted_ns: Option<u64>,
    /// How often a counter lost its place on the host, or was enabled and found none.
    #[serde(default)]
    pub places_lost: Option<u64>,
    /// Its counters.
    pub counters: Vec<GuestCounter>,
}

/// Code of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CodeInfo {
    /// Where it begins.
    pub address: u64,
    /// Its bytes, two hexadecimal digits each: as many as are there without a gap, at least one.
    pub hex: String,
}

impl CodeInfo {
    /// Of these bytes.
    pub fn new(address: u64, bytes: &[u8]) -> Self {
        use std::fmt::Write as _;
        let mut hex = String::with_capacity(2 * bytes.len());
        for byte in bytes {
            // Writing to a String does not fail.
            let _ = write!(hex, "{byte:02x}");
        }
        Self { address, hex }
    }

    /// The bytes; `None` if the digits are none.
    pub fn bytes(&self) -> Option<Vec<u8>> {
        let pairs = self.hex.as_bytes().chunks(2);
        let byte = |pair: &[u8]| match pair {
            [high, low] => {
                let digit = |digit: &u8| char::from(*digit).to_digit(16);
                u8::try_from(digit(high)? << 4 | digit(low)?).ok()
            }
            _ => None,
        };
        pairs.map(byte).collect()
    }
}

/// Exits of one vCPU to user space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuExits {
    /// The vCPU.
    pub vcpu: u32,
    /// By what they were for; what has not happened is left out.
    pub exits: Vec<ExitsOfReason>,
}

/// Exits of one vCPU that were for the same. Times are those from the return of KVM_RUN to the next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExitsOfReason {
    /// What for: rdmsr, wrmsr, rdpmc, port_read, port_write, mmio_read, mmio_write, debug, halt, overflow,
    /// kick, emulation or other.
    pub reason: String,
    /// How many.
    pub count: u64,
    /// How many of them were timed: one that is being served is not yet, and one in which the VM was paused
    /// is not.
    pub timed: u64,
    /// How long the timed ones took together, in ns.
    pub time_ns: u64,
    /// The longest since this connection asked last, in ns.
    pub max_ns: u64,
}

/// A counter of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestCounter {
    /// Its name: gp0, fixed1.
    pub counter: String,
    /// The guest has it enabled.
    pub enabled: bool,
    /// What it is to count; `None` while it selects nothing.
    pub event: Option<String>,
    /// The filter lets it.
    pub allowed: bool,
    /// Who counts; `None` before it was enabled for the first time.
    pub backing: Option<String>,
    /// What the guest would read.
    pub value: u64,
    /// What the present event has counted, whatever the guest wrote into the counter meanwhile.
    /// Like all that follows, not known where KVM's own vPMU counts.
    #[serde(default)]
    pub counted: Option<u64>,
    /// Time the present event was enabled, in ns.
    pub enabled_ns: Option<u64>,
    /// Time of that it counted, in ns.
    pub running_ns: Option<u64>,
    /// Overflows so far.
    pub overflows: Option<u64>,
    /// Overflows that asked for a PMI.
    pub pmi_requests: Option<u64>,
    /// It is counted now.
    #[serde(default)]
    pub counting: Option<bool>,
    /// The backing counts only while the one that should has no place on the host.
    #[serde(default)]
    pub fallback: bool,
    /// Time the present event was enabled and not counted, in ns.
    #[serde(default)]
    pub uncounted_ns: Option<u64>,
}

#[cfg(test)]
mod tests;
