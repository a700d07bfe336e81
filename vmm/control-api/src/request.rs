//! Typed requests, each with its reply type.
//!
//! [`crate::protocol::Call`] is the serialized form of all requests. To add a request, add a
//! variant to that enum, a line to this module, and a line to `tests/it/protocol_1.rs`.

use perf_core::SharePolicy;
use schemars::{Schema, SchemaGenerator};
use serde::de::DeserializeOwned;

use crate::balloon::BalloonInfo;
use crate::counts::VcpuCounts;
use crate::migration::{self, MigrationPiece};
use crate::protocol::{
    self, Call, EventReading, HostRingInfo, KernelInfo, KernelSymbolsReply, OpenedEvent, RingLoss,
    SampleRingInfo, SamplingParams, SnapshotId, VmGuestCounters, VmInfo,
};
use crate::rate_limit::{RateLimiterInfo, TokenBucketLimit};
use crate::snapshot::{self, SnapshotPiece, SnapshotProgress};

/// A request with its reply type.
pub trait Request: Into<Call> {
    /// Type of the reply.
    type Reply: DeserializeOwned;
}

/// An untyped request, whose reply is returned as JSON.
impl Request for Call {
    type Reply = serde_json::Value;
}

/// Defines requests that are sent as the [`Call`] variant of the same name.
macro_rules! requests {
    ($($(#[$doc:meta])* $name:ident $({ $($(#[$field_doc:meta])* $field:ident: $type:ty,)+ })? => $reply:ty;)+) => {
        $(requests!(@one $(#[$doc])* $name $({ $($(#[$field_doc])* $field: $type,)+ })? => $reply);)+

        /// Returns the JSON Schema of each reply, with the name of the request type.
        pub(crate) fn replies(generator: &mut SchemaGenerator) -> Vec<(&'static str, Schema)> {
            vec![
                $((stringify!($name), generator.subschema_for::<$reply>()),)+
                (stringify!(Share), generator.subschema_for::<<Share as Request>::Reply>()),
            ]
        }
    };
    (@one $(#[$doc:meta])* $name:ident => $reply:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name;

        impl From<$name> for Call {
            fn from(_: $name) -> Self {
                Self::$name
            }
        }

        impl Request for $name {
            type Reply = $reply;
        }
    };
    (@one $(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)+ } => $reply:ty) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)+
        }

        impl From<$name> for Call {
            fn from($name { $($field,)+ }: $name) -> Self {
                Self::$name { $($field,)+ }
            }
        }

        impl Request for $name {
            type Reply = $reply;
        }
    };
}

requests! {
    /// The first request of a connection. Reply: [`VmInfo`].
    Hello {
        /// Protocol version of the client.
        protocol: u32,
    } => VmInfo;
    /// Requests the state of the VM. Reply: [`VmInfo`].
    Status => VmInfo;
    /// Pauses all vCPUs. In the reply, [`VmInfo::parked`] is the number of vCPUs that have already
    /// stopped running the guest.
    Pause => VmInfo;
    /// Resumes all vCPUs.
    Resume => VmInfo;
    /// Terminates the VM.
    Stop => VmInfo;
    /// Presses the ACPI power button. Refused if the guest does not handle the button.
    Powerdown => VmInfo;
    /// Starts to change the number of vCPUs to `count`. Missing vCPUs are plugged in. If there are
    /// too many, the guest is asked to eject the vCPUs with the highest numbers. Reply:
    /// [`protocol::VcpuPlugStatus`]; poll the progress with [`VcpuPlug`].
    Vcpus {
        /// Requested number of vCPUs, up to the VM's maximum.
        count: u32,
    } => protocol::VcpuPlugStatus;
    /// Requests the progress of vCPU hot-plug. Reply: [`protocol::VcpuPlugStatus`].
    VcpuPlug => protocol::VcpuPlugStatus;
    /// Withdraws the request to eject vCPUs that the guest has not ejected yet. Reply:
    /// [`protocol::VcpuPlugStatus`].
    VcpusWithdraw => protocol::VcpuPlugStatus;
    /// Sets the target size of the balloon. The guest's driver changes the actual size as far and
    /// as fast as it can. Reply: [`BalloonInfo`].
    Balloon {
        /// Target size of the balloon, in MiB.
        size_mib: u32,
    } => BalloonInfo;
    /// Sets the interval at which the guest's driver sends memory statistics. Reply:
    /// [`BalloonInfo`].
    BalloonStatistics {
        /// Interval between memory statistics, in seconds.
        interval_s: u16,
    } => BalloonInfo;
    /// Replaces the filter that determines which events the guest may count.
    Filter {
        /// Text of the new filter, in the format of a file for `--pmu-filter`.
        toml: String,
    } => ();
    /// Requests the rate limiters of the devices. Reply: a list of [`RateLimiterInfo`].
    RateLimiters => Vec<RateLimiterInfo>;
    /// Changes the limits of a rate limiter.
    RateLimit {
        /// Name of the limiter.
        name: String,
        /// New limit on bytes; unchanged if `None`.
        bandwidth: Option<TokenBucketLimit>,
        /// New limit on operations; unchanged if `None`.
        ops: Option<TokenBucketLimit>,
    } => ();
    /// Replaces the document of the metadata service.
    MmdsPut {
        /// The new document, which may be any JSON value.
        data: serde_json::Value,
    } => ();
    /// Applies a merge patch (RFC 7396) to the document of the metadata service.
    MmdsPatch {
        /// The merge patch to apply.
        data: serde_json::Value,
    } => ();
    /// Requests the document of the metadata service. Reply: a JSON value, `null` if there is no
    /// document.
    MmdsGet => serde_json::Value;
    /// Opens events in the disabled state. Reply: a list of [`OpenedEvent`].
    Open {
        /// Event list in perf's syntax.
        events: String,
        /// vCPUs on which to count; all vCPUs if omitted.
        vcpus: Option<Vec<u32>>,
        /// `true` to open one event per name for the whole VM, instead of one per name and vCPU. An
        /// event of the whole VM counts on all present vCPUs and on those plugged in later, from
        /// their first instruction. Cannot be combined with `vcpus` or `sampling`.
        whole: bool,
        /// Sampling parameters; if omitted, the events are only counted.
        sampling: Option<SamplingParams>,
    } => Vec<OpenedEvent>;
    /// Enables all events of this connection.
    Enable => ();
    /// Disables all events of this connection.
    Disable => ();
    /// Lists the events that were opened on the vCPUs plugged in since the previous call. Each
    /// event list that was opened without `vcpus` is also opened on every vCPU that is plugged in
    /// later. The new events are enabled if the other events of the connection are. Reply: a list
    /// of [`protocol::PluggedVcpuEvents`].
    Joined => Vec<protocol::PluggedVcpuEvents>;
    /// Reads all events of this connection. Reply: a list of [`EventReading`].
    Read => Vec<EventReading>;
    /// Closes all events of this connection.
    Close => ();
    /// Creates a ring buffer for the samples of all sampling events of one vCPU. Reply:
    /// [`SampleRingInfo`] and the memfd of the ring.
    Ring {
        /// vCPU number.
        vcpu: u32,
        /// Number of data pages, a power of two.
        pages: u32,
        /// `true` if new records overwrite the oldest ones.
        overwrite: bool,
    } => SampleRingInfo;
    /// Requests the host kernel's ring of an event that has one ([`OpenedEvent::ring`]). The ring
    /// contains the guest's instruction pointers, sampled without an exit. Reply: [`HostRingInfo`]
    /// and the descriptor of the perf event, for the client to map.
    HostRing {
        /// Handle of the event.
        handle: u32,
    } => HostRingInfo;
    /// Requests the context switches of a vCPU's thread on the host. Reply: the descriptor of a
    /// perf event, for the client to map. The perf event records each switch with its time on
    /// `CLOCK_MONOTONIC`.
    ThreadSwitches {
        /// vCPU number.
        vcpu: u32,
    } => ();
    /// Sets how often the VMM takes a full sample of an event that the host kernel also samples. A
    /// full sample contains registers and a call chain.
    Chains {
        /// Handle of the event.
        handle: u32,
        /// Number of samples of the event per full sample; 1 makes every sample a full one.
        every: u32,
    } => ();
    /// Requests the number of lost records of each ring. Only records that were lost because the
    /// ring was full, and that no record in the ring reports yet, are counted. Reply: a list of
    /// [`RingLoss`].
    RingLosses => Vec<RingLoss>;
    /// Requests the statistics of each vCPU's run loop since the start of the VM, including
    /// unplugged vCPUs. Reply: a list of [`VcpuCounts`].
    Counts => Vec<VcpuCounts>;
    /// Starts the search for the guest's kernel in guest memory, unless it has been started before.
    /// Reply: [`KernelInfo`]; repeat the call while the search runs.
    Kernel => KernelInfo;
    /// Requests the guest kernel's symbols. Reply: [`KernelSymbolsReply`] and a memfd with text in
    /// the format of `/proc/kallsyms`.
    Symbols => KernelSymbolsReply;
    /// Lists the executable mappings of a guest process. Reply: [`protocol::ProcessCode`].
    ProcessCode {
        /// Process ID in the guest's initial PID namespace.
        pid: u32,
    } => protocol::ProcessCode;
    /// Reads memory of a guest process. Reply: [`protocol::ProcessMemory`] and a memfd with the
    /// bytes.
    ProcessMemory {
        /// Process ID in the guest's initial PID namespace.
        pid: u32,
        /// Virtual address of the first byte in the process.
        address: u64,
        /// Number of bytes to read, at most [`protocol::MAX_PROCESS_MEMORY`].
        bytes: u32,
    } => protocol::ProcessMemory;
    /// Requests a snapshot of the guest's PMU programming from each vCPU. Reply: [`SnapshotId`].
    GuestView => SnapshotId;
    /// Returns the snapshot of the guest's PMU programming. Reply: [`VmGuestCounters`].
    GuestViewResult {
        /// Generation of the snapshot, from the reply to [`GuestView`].
        generation: u64,
    } => VmGuestCounters;
    /// Pauses the VM for a snapshot, or continues a snapshot that a previous call started. Reply:
    /// [`SnapshotProgress`]; repeat the call until the snapshot is ready.
    Snapshot => SnapshotProgress;
    /// Reads guest memory sequentially, starting at offset 0. Reply: [`SnapshotPiece`] and a memfd
    /// with the bytes.
    SnapshotMemory {
        /// Offset in guest memory at which to continue: 0, or the end of the previous piece.
        offset: u64,
    } => SnapshotPiece;
    /// Returns the state of the VM, once its memory has been read. Reply:
    /// [`snapshot::SnapshotState`] and a memfd with the state.
    SnapshotState => snapshot::SnapshotState;
    /// Allows the process that will continue the VM to open the VM's disk images. The images stay
    /// locked against all other processes.
    SnapshotShareDisks => ();
    /// Ends a snapshot, and resumes or terminates the VM.
    SnapshotEnd {
        /// `true` to terminate the VM instead of resuming it.
        stop: bool,
    } => ();
    /// Starts tracking memory writes of a VM that is to be migrated as a byte stream. Reply:
    /// [`MigrationStart`], and a memfd with a state file that describes the machine.
    MigrationStart => migration::MigrationStart;
    /// Reads a piece of the memory of a round. A round consists of the memory written since the
    /// preceding round. Reply: [`MigrationPiece`], and a memfd with the bytes.
    MigrationMemory {
        /// Offset in guest memory at which to continue: 0, or the end of the previous piece.
        offset: u64,
    } => MigrationPiece;
    /// Releases the disk images. After this call, the VM does not resume when the connection
    /// closes.
    MigrationCommit => ();
    /// Requests the vCPUs' exits to user space by reason, since the first `Exits` request of this
    /// connection. Reply: a list of [`protocol::VcpuExits`].
    Exits => Vec<protocol::VcpuExits>;
    /// Reads code from guest memory through the page tables at CR3. Reply: [`protocol::GuestCode`].
    Code {
        /// Value of CR3 that selects the address space, as recorded in a sample.
        cr3: u64,
        /// Virtual address of the first byte of code.
        address: u64,
        /// Number of bytes to read, at most [`protocol::MAX_CODE`].
        length: u32,
    } => protocol::GuestCode;
}

/// Sets the policy that shares the host's counters between guest and operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Sharing policy.
    pub policy: SharePolicy,
}

impl From<Share> for Call {
    fn from(Share { policy }: Share) -> Self {
        let policy = policy.to_string();
        Self::Share { policy }
    }
}

impl Request for Share {
    type Reply = ();
}
