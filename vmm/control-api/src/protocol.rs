//! Messages on a control socket: one JSON object per line. `docs/reference/control.md` documents
//! them for other programs.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::balloon::BalloonInfo;
pub use crate::exits::{ExitsOfReason, VcpuExits};
use crate::migration::MigrationSource;
pub use crate::plug::{VcpuPlugStatus, VcpuRefusal};

/// Protocol version, sent in the client's first request.
pub const PROTOCOL: u32 = 1;
/// Maximum length of a request including its newline, in bytes.
pub const MAX_REQUEST: usize = 64 << 10;
/// Maximum number of open events per connection.
pub const MAX_EVENTS: usize = 1024;
/// Maximum number of bytes of guest code in one reply.
pub const MAX_CODE: u32 = 64 << 10;
/// Maximum number of data pages in a ring buffer for samples.
pub const MAX_RING_PAGES: u32 = 4096;
/// Maximum number of bytes of guest process memory in one reply.
pub const MAX_PROCESS_MEMORY: u32 = 1 << 20;
/// Maximum number of executable mappings of a guest process in one reply.
pub const MAX_PROCESS_CODE: usize = 1024;

/// A request in its serialized form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequestLine {
    /// Request number, repeated in the reply.
    pub id: u64,
    /// The call and its parameters.
    #[serde(flatten)]
    pub call: Call,
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "call", rename_all = "snake_case")]
pub enum Call {
    /// The first request of a connection. Reply: [`VmInfo`].
    Hello {
        /// Protocol version of the client.
        protocol: u32,
    },
    /// Requests the state of the VM. Reply: [`VmInfo`].
    Status,
    /// Pauses all vCPUs. [`VmInfo::parked`] is the number of vCPUs that have stopped so far.
    Pause,
    /// Resumes all vCPUs.
    Resume,
    /// Terminates the VM.
    Stop,
    /// Presses the ACPI power button. Refused if the guest does not handle the button. A guest may
    /// ignore the button.
    Powerdown,
    /// Starts to change the number of vCPUs to `count`. Missing vCPUs are plugged in. If there are
    /// too many, the guest is asked to eject the vCPUs with the highest numbers. Reply:
    /// [`VcpuPlugStatus`]; poll the progress with [`Call::VcpuPlug`].
    Vcpus {
        /// Requested number of vCPUs, up to the VM's maximum.
        count: u32,
    },
    /// Requests the progress of vCPU hot-plug. Reply: [`VcpuPlugStatus`].
    VcpuPlug,
    /// Withdraws ejection requests that are still pending. Reply: [`VcpuPlugStatus`].
    VcpusWithdraw,
    /// Sets the target size of the balloon. The guest's driver changes the actual size as far and
    /// as fast as it can. Reply: [`BalloonInfo`].
    Balloon {
        /// Size in MiB.
        size_mib: u32,
    },
    /// Sets the interval of the memory statistics of the guest's driver, if they are enabled. The
    /// first update follows immediately. Reply: [`BalloonInfo`].
    BalloonStatistics {
        /// Interval in seconds.
        interval_s: u16,
    },
    /// Sets the policy for sharing host counters: guest-first, operator-first or strict.
    Share {
        /// Name of the policy.
        policy: String,
    },
    /// Replaces the filter of the events that the guest may count.
    Filter {
        /// Contents of the filter, as in a file for `--pmu-filter`.
        toml: String,
    },
    /// Requests the rate limiters. Reply: a list of [`crate::rate_limit::RateLimiterInfo`].
    RateLimiters,
    /// Changes the limits of a rate limiter.
    RateLimit {
        /// Name of the limiter.
        name: String,
        /// New limit on bytes; unchanged if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bandwidth: Option<crate::rate_limit::TokenBucketLimit>,
        /// New limit on operations; unchanged if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ops: Option<crate::rate_limit::TokenBucketLimit>,
    },
    /// Replaces the document of the metadata service.
    MmdsPut {
        /// Any JSON value.
        data: serde_json::Value,
    },
    /// Applies a merge patch (RFC 7396) to the document of the metadata service.
    MmdsPatch {
        /// The patch.
        data: serde_json::Value,
    },
    /// Requests the metadata document. Reply: a JSON value, `null` without a document.
    MmdsGet,
    /// Opens events in the disabled state. Reply: a list of [`OpenedEvent`].
    Open {
        /// Event list in perf's syntax.
        events: String,
        /// vCPUs to open the events on; all if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vcpus: Option<Vec<u32>>,
        /// Opens one event per name for the whole VM, instead of one per name and vCPU. The event
        /// counts on all present vCPUs and on those plugged in later, from their first instruction.
        /// Cannot be combined with `vcpus` or `sampling`.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        whole: bool,
        /// Sampling parameters; counting only if omitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sampling: Option<SamplingParams>,
    },
    /// Enables all events of this connection.
    Enable,
    /// Disables all events of this connection.
    Disable,
    /// Lists the events that were opened on the vCPUs plugged in since the previous call. Each
    /// event list that was opened without `vcpus` is also opened on every vCPU that is plugged in
    /// later. The new events are enabled if the other events of the connection are. Reply: a list
    /// of [`PluggedVcpuEvents`].
    Joined,
    /// Reads all events of this connection. Reply: a list of [`EventReading`].
    Read,
    /// Closes all events of this connection.
    Close,
    /// Creates a ring buffer for the samples of all sampling events of one vCPU. Reply:
    /// [`SampleRingInfo`] and the memfd of the ring.
    Ring {
        /// The vCPU.
        vcpu: u32,
        /// Number of data pages, a power of two.
        pages: u32,
        /// `true` if new records overwrite the oldest ones, as in a flight recorder, instead of
        /// being dropped while the ring is full. The client cannot write to the memfd.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        overwrite: bool,
    },
    /// Requests the host kernel's ring of an event that has one ([`OpenedEvent::ring`]). The ring
    /// contains instruction pointers of the guest that were sampled without an exit. Reply:
    /// [`HostRingInfo`] and the perf event's descriptor, which the client maps.
    HostRing {
        /// The event.
        handle: u32,
    },
    /// Requests the context switches of a vCPU's thread. Reply: the descriptor of a perf event that
    /// records them with times of `CLOCK_MONOTONIC`, which the client maps.
    ThreadSwitches {
        /// vCPU number.
        vcpu: u32,
    },
    /// Sets how often the VMM takes a full sample, with registers and call chain, of an event that
    /// the host's kernel also samples into its own ring.
    Chains {
        /// The event.
        handle: u32,
        /// Number of samples per full sample; 1 makes every sample a full one.
        every: u32,
    },
    /// Requests the number of records that were lost because a ring was full, and whose loss no
    /// record in the ring reports yet. Reply: a list of [`RingLoss`].
    RingLosses,
    /// Requests the statistics of each vCPU's run loop since the start of the VM, including
    /// unplugged vCPUs. Reply: a list of [`crate::counts::VcpuCounts`].
    Counts,
    /// Starts the search for the guest's kernel in guest memory, unless it has been started before.
    /// Reply: [`KernelInfo`]; repeat the call while the search runs.
    Kernel,
    /// Requests the guest kernel's symbols. Reply: [`KernelSymbolsReply`] and a memfd with text in
    /// the format of `/proc/kallsyms`.
    Symbols,
    /// Requests the executable mappings of a guest process, according to the guest's kernel. Reply:
    /// [`ProcessCode`].
    ProcessCode {
        /// Process ID in the guest's initial PID namespace.
        pid: u32,
    },
    /// Reads memory of a guest process, including pages of mapped files that the process has not
    /// touched. Reply: [`ProcessMemory`] and a memfd with the bytes.
    ProcessMemory {
        /// Process ID in the guest's initial PID namespace.
        pid: u32,
        /// Start address.
        address: u64,
        /// Number of bytes, at most [`MAX_PROCESS_MEMORY`].
        bytes: u32,
    },
    /// Requests a snapshot of the guest's PMU programming from each vCPU. Reply: [`SnapshotId`].
    GuestView,
    /// Returns the snapshot of the guest's PMU programming. Reply: [`VmGuestCounters`].
    GuestViewResult {
        /// Generation of the snapshot.
        generation: u64,
    },
    /// Pauses the VM for a snapshot, or continues a snapshot that a previous call started. Reply:
    /// [`crate::snapshot::SnapshotProgress`]; repeat the call until the snapshot is ready.
    Snapshot,
    /// Reads guest memory sequentially, starting at offset 0. Reply:
    /// [`crate::snapshot::SnapshotPiece`], and a memfd with the bytes.
    SnapshotMemory {
        /// End of the previous piece.
        offset: u64,
    },
    /// Requests the state of the VM, once its memory has been read. Reply:
    /// [`crate::snapshot::SnapshotState`], and a memfd with the state.
    SnapshotState,
    /// Allows the process that will continue the VM to open the VM's disk images. This VM keeps the
    /// images locked against all other processes, and takes its own locks again if it resumes.
    /// Reply: null.
    SnapshotShareDisks,
    /// Ends a snapshot. The VM then resumes or terminates.
    SnapshotEnd {
        /// Ends the VM.
        stop: bool,
    },
    /// Starts tracking memory writes of a VM that is to be migrated as a byte stream. Reply:
    /// [`crate::migration::MigrationStart`], and a memfd with a state file that describes the
    /// machine.
    MigrationStart,
    /// Reads a piece of a round, which is the memory written since the preceding round,
    /// sequentially from offset 0. Reply: [`crate::migration::MigrationPiece`], and a memfd with
    /// the bytes.
    MigrationMemory {
        /// 0, or the end of the previous piece.
        offset: u64,
    },
    /// Releases the disk images. From now on, this VM resumes only on `snapshot_end` or `resume`,
    /// and not when the connection closes, because the VM may already run in another process.
    /// Reply: null.
    MigrationCommit,
    /// Requests the exits of the vCPUs to user space, by reason. The first such call of a
    /// connection starts counting and timing the exits; each call returns the exits since that
    /// first call. Reply: a list of [`VcpuExits`].
    Exits,
    /// Reads code from guest memory through the page tables at CR3. Reply: [`GuestCode`].
    Code {
        /// Address space: CR3 of a sample.
        cr3: u64,
        /// Start address.
        address: u64,
        /// Number of bytes, at most [`MAX_CODE`].
        length: u32,
    },
}

/// Sampling parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SamplingParams {
    /// Sampling period in events, or sampling frequency in Hz.
    pub rate: u64,
    /// `true` if `rate` is a frequency.
    pub frequency: bool,
    /// `true` to sample the guest's call chain.
    pub callchain: bool,
    /// Number of samples per full sample, for which the VMM stops the vCPU. For all other samples,
    /// the vCPU is not stopped and the host's kernel samples only the instruction pointer, if
    /// possible ([`OpenedEvent::ring`]). 1 (the default) makes every sample a full one.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub chain_every: u32,
    /// Number of bytes of the user stack to sample, together with the user registers, for unwinding
    /// by the client; a multiple of 8, at most 32768. 0: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stack_bytes: u32,
    /// Branch stack of each sample; requires `chain_every` to be 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branches: Option<BranchStacks>,
}

/// Branch stacks of samples. After an overflow, the vCPU is single-stepped until it has taken
/// enough branches to fill the stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BranchStacks {
    /// Types of branches to record, in the format of `perf_event_attr.branch_sample_type`.
    pub filter: u64,
    /// Maximum number of branches in a stack, from 1 to 64.
    pub depth: u32,
    /// Maximum share of a vCPU's run time for single-stepping, in thousandths from 1 to 1000.
    pub overhead_permille: u32,
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

/// Maximum length of a reply whose size varies, in bytes.
pub(crate) const MAX_REPLY: usize = 16 << 20;
/// Maximum length of a reply that only confirms a request or describes the VM, in bytes.
pub(crate) const MAX_SHORT_REPLY: usize = 64 << 10;

impl Call {
    /// Returns the maximum length of the reply to this call that a client accepts, in bytes.
    pub(crate) fn max_reply(&self) -> usize {
        match self {
            Call::Open { .. }
            | Call::Joined
            | Call::Read
            | Call::RingLosses
            | Call::Counts
            | Call::GuestViewResult { .. }
            | Call::Exits
            | Call::MmdsGet
            | Call::Code { .. }
            | Call::ProcessMemory { .. }
            | Call::ProcessCode { .. } => MAX_REPLY,
            _ => MAX_SHORT_REPLY,
        }
    }
}

/// A reply in its serialized form, with `ok` or `error`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReplyLine {
    /// Number of the request.
    pub id: u64,
    /// Result of a successful request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ok: Option<serde_json::Value>,
    /// Error of a failed request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RequestError>,
}

/// Reason a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// Kind of failure, for programs.
    pub kind: RequestErrorKind,
    /// One-line message, for users.
    pub message: String,
}

/// Kinds of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RequestErrorKind {
    /// Protocol violation or request out of order. The connection is closed.
    Protocol,
    /// Too many requests. The connection is closed.
    Rate,
    /// Invalid value.
    Invalid,
    /// The user lacks permission.
    Denied,
    /// A limit on memory, events or slots was reached.
    Limit,
    /// Not supported by this VM or host.
    Unsupported,
    /// A system call failed.
    Internal,
}

/// Description of a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VmInfo {
    /// Protocol version of the VM.
    pub protocol: u32,
    /// Version of Perfvisor.
    pub version: String,
    /// Name of the VM.
    pub name: String,
    /// Process ID of the VM.
    pub pid: u32,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Maximum number of vCPUs; 0 if the VM does not report it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub max_vcpus: u32,
    /// PMU model; "off" for none.
    pub pmu: String,
    /// Description of the guest.
    pub guest: String,
    /// Location of the first serial port, such as `tty` or `pty=/dev/pts/3`; empty if not reported.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub console: String,
    /// Location of the virtio console in the same format; empty if there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub virtio_console: String,
    /// Thread IDs of the present vCPUs, in order; empty if the VM does not report them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<u32>,
    /// State of the VM.
    pub state: VmState,
    /// Number of vCPUs that have stopped running the guest because of a pause.
    pub parked: u32,
    /// Time since the start of the VM, in milliseconds.
    pub uptime_ms: u64,
    /// Role of the client.
    pub role: ClientRole,
    /// Settings of the VM; absent from a VM that does not report them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<VmSettings>,
    /// Source process, if the VM has moved to this process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moved_from: Option<MigrationSource>,
}

/// Settings of a VM that decide what its guest can count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VmSettings {
    /// Mechanism that counts for the guest's counters (backing), in the syntax of `run --backing`.
    pub backing: String,
    /// Sharing policy, in the syntax of `run --share`.
    pub share: String,
    /// Current event filter in one line, such as `allows all events`.
    pub filter: String,
    /// Size of the guest's memory, in bytes.
    pub memory_bytes: u64,
    /// State of the balloon; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<BalloonInfo>,
}

/// State of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VmState {
    /// The vCPUs run.
    #[default]
    Running,
    /// The VM is paused. Its vCPUs have stopped running the guest or are about to stop.
    Paused,
    /// The VM is terminating.
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

/// Role of a client, which determines its permissions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClientRole {
    /// Everything: root.
    Admin,
    /// The VM's own user, who may do everything within the limits on operators.
    Operator,
    /// A client of the observers' socket, who may only observe and count. Requests that change the
    /// VM or reveal its memory are refused.
    #[default]
    Observer,
}

/// Events of a vCPU that was plugged in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PluggedVcpuEvents {
    /// The vCPU.
    pub vcpu: u32,
    /// Events on this vCPU.
    pub events: Vec<OpenedEvent>,
    /// Reason the events could not be opened. The vCPU runs, but its events are not counted for
    /// this connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
}

/// Result of opening an event on a vCPU or on the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OpenedEvent {
    /// Handle of the event on this connection; `None` if the event cannot be counted.
    pub handle: Option<u32>,
    /// Reason the event is unsupported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsupported: Option<String>,
    /// Name of the event, as in the list.
    pub name: String,
    /// Position in the event list, from 0.
    pub index: u32,
    /// vCPU of the event; `None` for the whole VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpu: Option<u32>,
    /// Mechanism that counts the event (backing): hardware, clock, software, kvm or vmm.
    pub backing: String,
    /// `true` if the count is in nanoseconds.
    pub nanoseconds: bool,
    /// `true` if the count is an estimate even without multiplexing.
    pub estimate: bool,
    /// ID that identifies the event in its samples.
    pub id: u64,
    /// `perf_event_attr.type`.
    pub kind: u32,
    /// `perf_event_attr.config`.
    pub config: u64,
    /// `true` if the host's kernel also samples the event ([`Call::HostRing`]). The VMM then takes
    /// only every [`SamplingParams::chain_every`]-th sample of the event.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ring: bool,
    /// Reason the host's kernel does not sample the event, if this was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_ring: Option<String>,
}

/// A reading of an event.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventReading {
    /// Handle of the event.
    pub handle: u32,
    /// Count of the event.
    pub value: u64,
    /// Time enabled, in nanoseconds.
    pub enabled_ns: u64,
    /// Time running, in nanoseconds.
    pub running_ns: u64,
    /// Count scaled to the whole enabled time; `None` if the event was not counted.
    pub estimate: Option<u64>,
    /// Standard error of `estimate`; 0 if the event was counted all the time, `None` if unknown.
    pub standard_error: Option<f64>,
    /// Approximate bound of the error of `estimate`; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
    /// `true` if the event is pinned and no counter was available (error state).
    pub failed: bool,
    /// `true` if the vCPU was unplugged; the reading is the final one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gone: bool,
    /// Readings of each vCPU, including unplugged ones, for an event opened for the whole VM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vcpus: Vec<VcpuReadingPart>,
}

/// Contribution of one vCPU to an event of the whole VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuReadingPart {
    /// The vCPU.
    pub vcpu: u32,
    /// Count on this vCPU.
    pub value: u64,
    /// Time enabled on this vCPU, in nanoseconds.
    pub enabled_ns: u64,
    /// Time running on this vCPU, in nanoseconds.
    pub running_ns: u64,
    /// Count scaled to the whole enabled time on this vCPU; `None` if the event was not counted.
    pub estimate: Option<u64>,
    /// Same as [`EventReading::standard_error`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standard_error: Option<f64>,
    /// Same as [`EventReading::bound`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<f64>,
}

/// Description of a ring of samples. The reply carries the memfd of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SampleRingInfo {
    /// The vCPU.
    pub vcpu: u32,
    /// `sample_type` of its samples.
    pub sample_type: u64,
    /// Offset to add to the time of the samples to get the host's `CLOCK_MONOTONIC`, in
    /// nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock_offset_ns: Option<u64>,
}

/// Description of the host kernel's ring of one event. The reply carries the perf event's
/// descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostRingInfo {
    /// Fixed sampling period in events; `None` if each sample in the ring contains its own period.
    pub period: Option<u64>,
    /// Offset to subtract from the time of the samples (`CLOCK_MONOTONIC`) to get the clock of the
    /// VM's own samples, in nanoseconds.
    pub clock_offset_ns: u64,
    /// `true` if KVM emulates the guest's kernel. The ring then attributes the guest kernel's time
    /// to the host's kernel.
    pub interpreted: bool,
}

/// Progress of the search for the guest's kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KernelInfo {
    /// State of the search.
    pub state: KernelState,
    /// Description of the kernel, or the reason why none was found.
    pub detail: String,
}

/// States of the search for the guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KernelState {
    /// The search has not started.
    Unknown,
    /// The search is running.
    Looking,
    /// The kernel was found. Samples now contain kernel call chains and tasks.
    Found,
    /// No kernel was found.
    NotFound,
}

/// Records lost because a ring was full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RingLoss {
    /// The vCPU.
    pub vcpu: u32,
    /// Number of lost records.
    pub lost: u64,
}

/// Description of the guest kernel's symbols. The reply carries a memfd with their text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KernelSymbolsReply {
    /// Length of the text, in bytes.
    pub bytes: u64,
    /// `true` if user space and kernel share one address space, so no separate user space exists.
    pub flat: bool,
    /// Source of the symbols.
    pub source: String,
    /// Build ID of the kernel in hexadecimal, if the kernel runs and has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
    /// Release of the kernel, as reported by `uname -r`, if the kernel runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<String>,
}

/// Executable mappings of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessCode {
    /// Mappings in ascending order of address.
    pub mappings: Vec<CodeMapping>,
    /// `true` if the list is incomplete: it exceeds the limit of a reply, or the guest's lists are
    /// too long or inconsistent.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut_short: bool,
}

/// A code mapping. All fields are reported by the guest and not verified.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CodeMapping {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset of `start` in the file.
    pub file_offset: u64,
    /// Address at which the first byte of the file is mapped; omitted if it is not mapped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// Printable path of the file in the guest; `//anon` or `[vdso]` for mappings without a file.
    pub path: String,
    /// Build ID of the file in hexadecimal, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
}

/// Description of a part of a process's memory. The reply carries a memfd with the bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessMemory {
    /// Number of bytes.
    pub bytes: u32,
    /// Offset and length of each part that is not in guest memory and reads as zeros.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<(u32, u32)>,
}

/// Identification of a snapshot of the guest's PMU programming.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SnapshotId {
    /// Sequence number of the snapshot.
    pub generation: u64,
}

/// A snapshot of the guest's PMU programming.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VmGuestCounters {
    /// `true` if all vCPUs have contributed.
    pub complete: bool,
    /// Counters of each vCPU that has contributed.
    pub vcpus: Vec<VcpuView>,
}

/// PMU programming of the guest on one vCPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuView {
    /// The vCPU.
    pub vcpu: u32,
    /// Number of delivered PMIs; `None` if KVM's own vPMU delivers them.
    pub pmis: Option<u64>,
    /// Time during which at least one enabled counter was not counting, in nanoseconds; `None` if
    /// KVM's own vPMU counts.
    #[serde(default)]
    pub uncounted_ns: Option<u64>,
    /// Number of times a guest counter lost its counter on the host, or was enabled without getting
    /// one; `None` if KVM's own vPMU counts.
    #[serde(default)]
    pub places_lost: Option<u64>,
    /// Counters of the vCPU.
    pub counters: Vec<GuestCounter>,
}

/// Code of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestCode {
    /// Start address.
    pub address: u64,
    /// Hexadecimal bytes from `address` up to the first gap in memory (at least one byte).
    pub hex: String,
}

impl GuestCode {
    /// Creates the reply for the code `bytes` at `address`.
    pub fn new(address: u64, bytes: &[u8]) -> Self {
        use std::fmt::Write as _;
        let mut hex = String::with_capacity(2 * bytes.len());
        for byte in bytes {
            // Writing to a String cannot fail.
            let _ = write!(hex, "{byte:02x}");
        }
        Self { address, hex }
    }

    /// Decodes the code bytes from `hex`. Returns `None` if the digits are invalid.
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

/// A counter of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestCounter {
    /// Name of the counter, such as gp0 or fixed1.
    pub counter: String,
    /// `true` if the guest has enabled the counter.
    pub enabled: bool,
    /// Selected event; `None` if no event is selected.
    pub event: Option<String>,
    /// `true` if the filter allows the event.
    pub allowed: bool,
    /// Mechanism that counts for this counter (backing); `None` if it has never been enabled.
    pub backing: Option<String>,
    /// Value that the guest would read.
    pub value: u64,
    /// Count of the current event, unaffected by the guest's writes to the counter. This and the
    /// following fields are `None` if KVM's own vPMU counts.
    #[serde(default)]
    pub counted: Option<u64>,
    /// Time for which the current event was enabled, in nanoseconds.
    pub enabled_ns: Option<u64>,
    /// Time for which the current event was running, in nanoseconds.
    pub running_ns: Option<u64>,
    /// Overflows so far.
    pub overflows: Option<u64>,
    /// Number of overflows that requested a PMI.
    pub pmi_requests: Option<u64>,
    /// `true` if the counter is counting.
    #[serde(default)]
    pub counting: Option<bool>,
    /// `true` if the counter uses a substitute mechanism (backing), because no counter of the host
    /// is available for the preferred one.
    #[serde(default)]
    pub fallback: bool,
    /// Time for which the current event was enabled but not counting, in nanoseconds.
    #[serde(default)]
    pub uncounted_ns: Option<u64>,
}

#[cfg(test)]
mod tests;
