//! Requests as types: each names what it is answered with.
//!
//! [`crate::protocol::Call`] is the same as it is sent. A new request is a variant there, a line here, and
//! one in `tests/it/protocol_1.rs`.

use perf_core::SharePolicy;
use schemars::{Schema, SchemaGenerator};
use serde::de::DeserializeOwned;

use crate::counts::VcpuCounts;
use crate::protocol::{
    self, Call, EventReading, Generation, GuestViews, HostRingInfo, KernelInfo, Opened, RingInfo, RingLoss,
    Sampling, SymbolsInfo, VmInfo,
};

/// A request, and what it is answered with.
pub trait Request: Into<Call> {
    /// What the VM answers.
    type Reply: DeserializeOwned;
}

/// Any request, by its name on the wire: the answer is as it came.
impl Request for Call {
    type Reply = serde_json::Value;
}

/// Declares a request that is sent as the [`Call`] of the same name.
macro_rules! requests {
    ($($(#[$doc:meta])* $name:ident $({ $($(#[$field_doc:meta])* $field:ident: $type:ty,)+ })? => $reply:ty;)+) => {
        $(requests!(@one $(#[$doc])* $name $({ $($(#[$field_doc])* $field: $type,)+ })? => $reply);)+

        /// What each request is answered with, by the name of its type.
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
        #[derive(Clone, Debug, PartialEq, Eq)]
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
        /// The version the client speaks.
        protocol: u32,
    } => VmInfo;
    /// Reply: [`VmInfo`].
    Status => VmInfo;
    /// Takes all vCPUs out of the guest; [`VmInfo::parked`] says how many have arrived.
    Pause => VmInfo;
    /// Lets them go on.
    Resume => VmInfo;
    /// Ends the VM.
    Stop => VmInfo;
    /// Presses the ACPI power button; refused if the guest does not listen to it.
    Powerdown => VmInfo;
    /// Begins to make it so many vCPUs: those that are missing are started, and the guest is told; for those
    /// with the highest numbers it is asked if there are too many. Reply: [`protocol::VcpuPlug`]; ask
    /// [`VcpuPlug`] what has come of it.
    Vcpus {
        /// How many, up to what the VM was started for.
        count: u32,
    } => protocol::VcpuPlug;
    /// Which vCPUs come and go. Reply: [`protocol::VcpuPlug`].
    VcpuPlug => protocol::VcpuPlug;
    /// Withdraws the request to give up vCPUs, for those that the guest still has. Reply:
    /// [`protocol::VcpuPlug`].
    VcpusWithdraw => protocol::VcpuPlug;
    /// Replaces the filter of the events the guest may count.
    Filter {
        /// Its text, as in a file for `--pmu-filter`.
        toml: String,
    } => ();
    /// Opens events, disabled. Reply: a list of [`Opened`].
    Open {
        /// A list in perf's syntax.
        events: String,
        /// On which vCPUs; all when left out.
        vcpus: Option<Vec<u32>>,
        /// One event for each name instead of one for each name and vCPU: it counts on all vCPUs there are
        /// and on those that come later, from their first instruction. Neither `vcpus` nor `sampling` goes
        /// with it.
        whole: bool,
        /// To sample; counting only when left out.
        sampling: Option<Sampling>,
    } => Vec<Opened>;
    /// Enables all events of this connection.
    Enable => ();
    /// Disables them.
    Disable => ();
    /// The events of this connection that were opened on vCPUs which came since it asked last: those that
    /// were asked for without naming vCPUs. They are enabled if the connection's last word was so. Reply: a
    /// list of [`protocol::Joined`].
    Joined => Vec<protocol::Joined>;
    /// Reads them all. Reply: a list of [`EventReading`].
    Read => Vec<EventReading>;
    /// Closes them all.
    Close => ();
    /// Makes a ring that all sampling events of one vCPU write to. Reply: [`RingInfo`], and its memfd with
    /// it.
    Ring {
        /// The vCPU.
        vcpu: u32,
        /// Data pages, a power of two.
        pages: u32,
    } => RingInfo;
    /// The host kernel's own ring of an event that has one ([`Opened::ring`]): the guest's instruction
    /// pointers, taken without leaving the guest. Reply: [`HostRingInfo`], and the perf event's descriptor
    /// with it, which the client maps.
    HostRing {
        /// The event.
        handle: u32,
    } => HostRingInfo;
    /// Lets an event with a ring of the host's kernel take every so-many-th sample itself, with registers and
    /// call chain.
    Chains {
        /// The event.
        handle: u32,
        /// 1: all of them.
        every: u32,
    } => ();
    /// How many records found no room and were not told of in the rings yet. Reply: a list of [`RingLoss`].
    RingLosses => Vec<RingLoss>;
    /// What the loop of each vCPU counted since the VM was started, those that have left included. Reply: a
    /// list of [`VcpuCounts`].
    Counts => Vec<VcpuCounts>;
    /// Looks for the guest's kernel in its memory, if that was not done. Reply: [`KernelInfo`]; ask again
    /// while it is looked for.
    Kernel => KernelInfo;
    /// The guest kernel's symbols. Reply: [`SymbolsInfo`], and a memfd with them as text like
    /// `/proc/kallsyms`.
    Symbols => SymbolsInfo;
    /// The code that a process of the guest has mapped. Reply: [`protocol::ProcessCode`].
    ProcessCode {
        /// Its id in the guest's first namespace.
        pid: u32,
    } => protocol::ProcessCode;
    /// A part of a process's memory. Reply: [`protocol::ProcessMemory`], and a memfd with the bytes.
    ProcessMemory {
        /// Its id in the guest's first namespace.
        pid: u32,
        /// The first address.
        address: u64,
        /// How many bytes, at most [`protocol::MAX_PROCESS_MEMORY`].
        bytes: u32,
    } => protocol::ProcessMemory;
    /// Asks each vCPU what its guest has programmed. Reply: [`Generation`].
    GuestView => Generation;
    /// What the vCPUs saw. Reply: [`GuestViews`].
    GuestViewResult {
        /// Which look.
        generation: u64,
    } => GuestViews;
    /// The vCPUs' exits to user space, by what they were for, since this connection asked for the first time.
    /// Reply: a list of [`protocol::VcpuExits`].
    Exits => Vec<protocol::VcpuExits>;
    /// Reads code out of the guest's memory, through the page tables that CR3 names. Reply:
    /// [`protocol::CodeInfo`].
    Code {
        /// The address space: a sample's CR3.
        cr3: u64,
        /// The first address.
        address: u64,
        /// How many bytes, up to [`protocol::MAX_CODE`].
        length: u32,
    } => protocol::CodeInfo;
}

/// Who gets the host's counters from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// The policy.
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
