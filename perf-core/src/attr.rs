//! Event attributes, modeled on `struct perf_event_attr` of `perf_event_open(2)`.
//!
//! The core and its drivers use the validated attributes in [`Attr`]. [`Attr::from_bytes`] and
//! [`Attr::to_bytes`] convert from and to the size-versioned layout of the kernel ABI.
//! [`Attr::from_bytes`] accepts or rejects the attributes of older and newer clients exactly as the
//! kernel does.

use bitflags::bitflags;

use crate::branch::{BranchFilter, BranchStackConfig};

/// Type of an event, which selects its driver (`perf_event_attr.type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct EventType(pub u32);

impl EventType {
    /// `PERF_TYPE_HARDWARE`: generalized hardware events.
    pub const HARDWARE: Self = Self(0);
    /// `PERF_TYPE_SOFTWARE`: events that the host kernel counts in software.
    pub const SOFTWARE: Self = Self(1);
    /// `PERF_TYPE_TRACEPOINT`: a tracepoint of the host kernel.
    pub const TRACEPOINT: Self = Self(2);
    /// `PERF_TYPE_HW_CACHE`: generalized cache events.
    pub const HW_CACHE: Self = Self(3);
    /// `PERF_TYPE_RAW`: a raw event select of the host PMU.
    pub const RAW: Self = Self(4);
    /// Perfvisor extension: cycles and reference cycles of a vCPU, computed from guest run time.
    /// This value and the following ones are outside the kernel's range of static types.
    pub const CLOCK: Self = Self(0x100);
    /// Perfvisor extension: binary statistics of KVM (`KVM_GET_STATS_FD`).
    pub const KVM: Self = Self(0x101);
    /// Perfvisor extension: simulated counters, for tests only.
    pub const SIM: Self = Self(0x102);
    /// Perfvisor extension: events whose counts the VMM supplies, such as exact counts from
    /// single-stepping and counts of paravirtual events.
    pub const VMM_PMU: Self = Self(0x103);
    /// Perfvisor extension: software events raised by the VMM (`SoftwareEventId`). The core counts
    /// them without a driver.
    pub const VMM: Self = Self(0x104);
    /// Perfvisor extension: run queue statistics of the host scheduler for a vCPU's thread.
    pub const SCHED: Self = Self(0x105);
}

bitflags! {
    /// `perf_event_attr.sample_type`: the fields of a `PERF_RECORD_SAMPLE` record.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct SampleType: u64 {
        /// Instruction pointer.
        const IP = 1;
        /// Process ID of the VM and thread ID of the vCPU.
        const TID = 1 << 1;
        /// Time of the sample, in nanoseconds.
        const TIME = 1 << 2;
        /// Data address that the event source supplies.
        const ADDR = 1 << 3;
        /// Counts of the event or its group, in the read format of the event.
        const READ = 1 << 4;
        /// Call chain at the time of the sample.
        const CALLCHAIN = 1 << 5;
        /// ID of the opened event. For an inherited event, the ID of its parent.
        const ID = 1 << 6;
        /// Number of the vCPU, in the field for the CPU number.
        const CPU = 1 << 7;
        /// Sample period: number of counts since the previous sample.
        const PERIOD = 1 << 8;
        /// ID of the event that took the sample. For an inherited event, the ID of the child.
        const STREAM_ID = 1 << 9;
        /// Raw data supplied by the event source.
        const RAW = 1 << 10;
        /// Branch stack with the contents that [`Attr::branches`] requests.
        const BRANCH_STACK = 1 << 11;
        /// User-mode registers of [`REGS_USER`]: those at the time of the sample or, if the sample
        /// is in the kernel, those at the last kernel entry.
        const REGS_USER = 1 << 12;
        /// Top [`Attr::sample_stack_user`] bytes of the user stack.
        const STACK_USER = 1 << 13;
        /// ID of the opened event, as the first field of samples and the last field of other
        /// records. The fixed position lets a reader identify the event of each record if events
        /// with different formats share a ring.
        const IDENTIFIER = 1 << 16;
    }
}

/// The only supported value of `perf_event_attr.sample_regs_user`: general-purpose registers,
/// instruction pointer, flags, CS and SS, as in `enum perf_event_x86_regs`. `perf record
/// --call-graph dwarf` requests this set.
pub const REGS_USER: u64 = 0x00ff_0fff;
/// Number of registers in [`REGS_USER`].
pub const REGS_USER_LEN: usize = REGS_USER.count_ones() as usize;
/// Maximum number of stack bytes in a sample. The limit keeps each record below 64 KiB.
pub const STACK_USER_MAX: u32 = 32 << 10;

bitflags! {
    /// `perf_event_attr.read_format`: the fields that a read of the event returns in addition to
    /// its count.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct ReadFormat: u64 {
        /// Time enabled of the event, in nanoseconds.
        const TOTAL_TIME_ENABLED = 1;
        /// Time running of the event, in nanoseconds.
        const TOTAL_TIME_RUNNING = 1 << 1;
        /// ID of the opened event.
        const ID = 1 << 2;
        /// Counts of all members of the event's group.
        const GROUP = 1 << 3;
        /// Number of records of the event that were lost because the ring was full.
        const LOST = 1 << 4;
    }
}

/// Condition under which the reader of a ring is notified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeupCondition {
    /// Number of samples after which the reader is notified. 0 disables notification by samples.
    /// The default watermark applies in addition.
    Events(u32),
    /// Number of written bytes after which the reader is notified, whether or not older bytes are
    /// unread. 0 selects the default: a quarter of the ring, but at least one page. The maximum is
    /// half the ring.
    Watermark(u32),
}

impl Default for WakeupCondition {
    fn default() -> Self {
        Self::Events(0)
    }
}

/// Attributes of an event, equivalent to `struct perf_event_attr`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attr {
    /// Type of the event, which selects the driver.
    pub ty: EventType,
    /// Number of the event within its type. The driver defines the values.
    pub config: u64,
    /// Second selector of the event (`config1`), used by some drivers.
    pub config1: u64,
    /// Third selector of the event (`config2`), used by some drivers.
    pub config2: u64,
    /// Sampling period: number of counts between overflows. If `freq` is set, the number of
    /// overflows per second instead. 0 selects a counting event.
    pub sample_period: u64,
    /// `true` if `sample_period` is a frequency in hertz.
    pub freq: bool,
    /// Fields of each sample of the event.
    pub sample_type: SampleType,
    /// Size of the user stack copy in samples with [`SampleType::STACK_USER`], in bytes. Must be a
    /// multiple of 8 and at most [`STACK_USER_MAX`].
    pub sample_stack_user: u32,
    /// Contents of the branch stack in samples with [`SampleType::BRANCH_STACK`]. The byte layout
    /// of [`Attr::to_bytes`] contains only the filter, not the depth and the overhead limit.
    pub branches: BranchStackConfig,
    /// Fields that a read of the event returns.
    pub read_format: ReadFormat,
    /// Condition under which the reader of the event's ring is notified.
    pub wakeup: WakeupCondition,
    /// `true` if the event is opened in the disabled state.
    pub disabled: bool,
    /// `true` if the event also covers vCPUs that are added later.
    pub inherit: bool,
    /// `true` if each child of an inherited event writes a READ record when its vCPU is removed,
    /// and keeps the counts of its vCPU when contexts are swapped.
    pub inherit_stat: bool,
    /// `true` for a pinned event, which is always scheduled, or enters the error state if it cannot
    /// be scheduled.
    pub pinned: bool,
    /// `true` if no other event may be scheduled on the PMU at the same time as the event's group.
    pub exclusive: bool,
    /// Excludes guest user mode (CPL 3).
    pub exclude_user: bool,
    /// Excludes guest kernel mode (CPL 0).
    pub exclude_kernel: bool,
    /// Excludes a hypervisor that runs below the host.
    pub exclude_hv: bool,
    /// Excludes the idle task of the host.
    pub exclude_idle: bool,
    /// Excludes host execution. Always set for events that back guest counters.
    pub exclude_host: bool,
    /// Excludes guest execution.
    pub exclude_guest: bool,
    /// Enables MMAP records (guest memory and firmware maps).
    pub mmap: bool,
    /// Enables COMM records (vCPU names).
    pub comm: bool,
    /// Enables FORK and EXIT records (added and removed vCPUs).
    pub task: bool,
    /// Enables SWITCH records (vCPU contexts that are scheduled in and out).
    pub context_switch: bool,
    /// Enables the event at the next guest reset (`VcpuEventContext::exec`), but not at later ones.
    pub enable_on_exec: bool,
    /// Appends a trailer to all records other than samples. The trailer contains those of TID,
    /// TIME, ID, STREAM_ID, CPU and IDENTIFIER that `sample_type` selects.
    pub sample_id_all: bool,
}

/// Error of [`Attr::from_bytes`]: attributes that the core does not support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttrError {
    /// Unsupported size, or nonzero bytes beyond the known layout (`E2BIG`). [`Attr::from_bytes`]
    /// writes the supported size back to the caller's `size` field.
    #[error("unsupported attribute size; this version supports {supported} bytes")]
    TooBig {
        /// Size of `struct perf_event_attr` that this version supports, in bytes.
        supported: u32,
    },
    /// A buffer that is shorter than its `size` field states (`EFAULT`).
    #[error("an attribute of {size} bytes does not fit into the buffer of {available} bytes")]
    Fault {
        /// Value of the `size` field of the attributes, in bytes.
        size: u32,
        /// Length of the caller's buffer, in bytes.
        available: usize,
    },
    /// Request for a precise instruction pointer with this `precise_ip` value, which no driver
    /// provides (`EOPNOTSUPP`). perf then retries with a lower value.
    #[error("precise_ip {0} is not supported")]
    Precise(u8),
    /// A reserved field or bit that is set, or a field with an unsupported value (`EINVAL`).
    #[error("reserved or unknown bits set in {field}")]
    Reserved {
        /// Name of the rejected field.
        field: &'static str,
    },
}

impl AttrError {
    /// Returns the errno that `perf_event_open(2)` returns for this error.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::TooBig { .. } => libc::E2BIG,
            Self::Fault { .. } => libc::EFAULT,
            Self::Precise(_) => libc::EOPNOTSUPP,
            Self::Reserved { .. } => libc::EINVAL,
        }
    }
}

/// Size of the first published `struct perf_event_attr`, in bytes. Also the meaning of `size == 0`.
pub const ATTR_SIZE_VER0: u32 = 64;
/// Size of `struct perf_event_attr` with `config3` (since Linux 6.3), in bytes. This is the layout
/// that this version supports.
pub const ATTR_SIZE_VER8: u32 = 136;
/// Maximum size of an attribute, in bytes (one page).
pub const ATTR_SIZE_MAX: u32 = 4096;

// Bit numbers of the flags word at offset 40, from include/uapi/linux/perf_event.h.
const DISABLED: u32 = 0;
const INHERIT: u32 = 1;
const PINNED: u32 = 2;
const EXCLUSIVE: u32 = 3;
const EXCLUDE_USER: u32 = 4;
const EXCLUDE_KERNEL: u32 = 5;
const EXCLUDE_HV: u32 = 6;
const EXCLUDE_IDLE: u32 = 7;
const MMAP: u32 = 8;
const COMM: u32 = 9;
const FREQ: u32 = 10;
const INHERIT_STAT: u32 = 11;
const ENABLE_ON_EXEC: u32 = 12;
const TASK: u32 = 13;
const WATERMARK: u32 = 14;
const PRECISE_IP: u32 = 15;
const MMAP_DATA: u32 = 17;
const SAMPLE_ID_ALL: u32 = 18;
const EXCLUDE_HOST: u32 = 19;
const EXCLUDE_GUEST: u32 = 20;
const MMAP2: u32 = 23;
const COMM_EXEC: u32 = 24;
const CONTEXT_SWITCH: u32 = 26;
const NAMESPACES: u32 = 28;
const KSYMBOL: u32 = 29;
const BPF_EVENT: u32 = 30;
const CGROUP: u32 = 32;
const TEXT_POKE: u32 = 33;
const BUILD_ID: u32 = 34;
const KNOWN_FLAGS: u64 =
    0x7fff | 1 << SAMPLE_ID_ALL | 1 << EXCLUDE_HOST | 1 << EXCLUDE_GUEST | 1 << CONTEXT_SWITCH;
const PRECISE_FLAGS: u64 = 3 << PRECISE_IP;
/// Flags of `perf_event_attr` that are accepted but have no effect. These flags request records
/// that a VM never produces, or additional details in MMAP and COMM records.
const IGNORED_FLAGS: u64 = 1 << MMAP_DATA
    | 1 << MMAP2
    | 1 << COMM_EXEC
    | 1 << NAMESPACES
    | 1 << KSYMBOL
    | 1 << BPF_EVENT
    | 1 << CGROUP
    | 1 << TEXT_POKE
    | 1 << BUILD_ID;
/// Offset in bytes, length in bytes and name of each attribute field that must be zero, because no
/// driver uses it.
const ZERO_FIELDS: [(usize, usize, &str); 4] = [
    (52, 4, "bp_type"),
    (110, 2, "__reserved_2"),
    (112, 8, "aux_sample_size"),
    (128, 8, "config3"),
];

fn u32_at(b: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from(u32_at(b, at)) | u64::from(u32_at(b, at + 4)) << 32
}

/// Checks that the reserved flags and fields are zero.
fn check_reserved(known: &[u8], flags: u64) -> Result<(), AttrError> {
    if flags & !(KNOWN_FLAGS | PRECISE_FLAGS | IGNORED_FLAGS) != 0 {
        return Err(AttrError::Reserved { field: "flags" });
    }
    for (at, len, field) in ZERO_FIELDS {
        if known[at..at + len].iter().any(|&b| b != 0) {
            return Err(AttrError::Reserved { field });
        }
    }
    Ok(())
}

/// Parses `sample_type`. If it selects user registers, `sample_regs_user` must select all that are
/// supported.
fn parse_sample_type(known: &[u8]) -> Result<SampleType, AttrError> {
    let sample_type =
        SampleType::from_bits(u64_at(known, 24)).ok_or(AttrError::Reserved { field: "sample_type" })?;
    if sample_type.contains(SampleType::REGS_USER) && u64_at(known, 80) != REGS_USER {
        return Err(AttrError::Reserved {
            field: "sample_regs_user",
        });
    }
    Ok(sample_type)
}

/// Parses `branch_sample_type`. It must select at least one kind of branch.
fn parse_branch_filter(bits: u64) -> Result<BranchStackConfig, AttrError> {
    let filter = BranchFilter::from_bits(bits)
        .filter(|filter| filter.intersects(BranchFilter::KINDS))
        .ok_or(AttrError::Reserved {
            field: "branch_sample_type",
        })?;
    Ok(BranchStackConfig::unlimited(filter))
}

impl Attr {
    /// Creates an enabled counting event of type `ty` and selector `config`. All other attributes
    /// have their default values.
    #[must_use]
    pub fn counting(ty: EventType, config: u64) -> Self {
        Self {
            ty,
            config,
            ..Self::default()
        }
    }

    /// Returns `true` if the event is `cpu-clock` or `task-clock` of the host kernel, which count
    /// nanoseconds.
    pub(crate) fn is_host_clock(&self) -> bool {
        self.ty == EventType::SOFTWARE && self.config <= 1
    }

    /// Creates an enabled sampling event of type `ty` and selector `config` that takes one sample
    /// every `period` counts.
    #[must_use]
    pub fn sampling(ty: EventType, config: u64, period: u64) -> Self {
        Self {
            ty,
            config,
            sample_period: period,
            ..Self::default()
        }
    }

    /// Sets [`Attr::inherit`], so that the event also covers vCPUs that are added later.
    #[must_use]
    pub fn with_inherit(self) -> Self {
        Self {
            inherit: true,
            ..self
        }
    }

    /// Sets [`Attr::pinned`].
    #[must_use]
    pub fn with_pinned(self) -> Self {
        Self { pinned: true, ..self }
    }

    /// Sets [`Attr::exclusive`].
    #[must_use]
    pub fn with_exclusive(self) -> Self {
        Self {
            exclusive: true,
            ..self
        }
    }

    /// Sets [`Attr::disabled`], so that the event is opened in the disabled state.
    #[must_use]
    pub fn with_disabled(self) -> Self {
        Self {
            disabled: true,
            ..self
        }
    }

    /// Sets [`Attr::freq`], so that the sample period is a frequency in hertz.
    #[must_use]
    pub fn with_freq(self) -> Self {
        Self { freq: true, ..self }
    }

    /// Sets [`Attr::sample_type`], the fields of each sample.
    #[must_use]
    pub fn with_sample_type(self, sample_type: SampleType) -> Self {
        Self { sample_type, ..self }
    }

    /// Sets [`Attr::read_format`], the fields that a read returns.
    #[must_use]
    pub fn with_read_format(self, read_format: ReadFormat) -> Self {
        Self { read_format, ..self }
    }

    /// Returns `true` if these are the attributes of a sampling event.
    #[must_use]
    pub fn is_sampling(&self) -> bool {
        self.sample_period != 0
    }

    /// Parses the little-endian layout of the kernel ABI.
    ///
    /// The `size` field gives the number of bytes to read. 0 selects the first published size;
    /// smaller sizes and sizes above one page are rejected. Bytes beyond the known layout must be
    /// zero. On [`AttrError::TooBig`], writes the supported size into `bytes`, as the kernel does
    /// for its caller. A field is ignored if the flag or sample field that it belongs to is not
    /// set, and `sample_max_stack` has no effect.
    ///
    /// # Errors
    ///
    /// Returns [`AttrError::TooBig`] if the size is unsupported or unknown bytes are nonzero,
    /// [`AttrError::Fault`] if `bytes` is shorter than the size, [`AttrError::Precise`] if
    /// `precise_ip` is set for an event other than a software event, and [`AttrError::Reserved`] if
    /// a reserved field or bit is set or a field has an unsupported value.
    pub fn from_bytes(bytes: &mut [u8]) -> Result<Self, AttrError> {
        let known = Self::known_bytes(bytes)?;
        let flags = u64_at(&known, 40);
        check_reserved(&known, flags)?;
        let ty = EventType(u32_at(&known, 0));
        let precise = (flags >> PRECISE_IP & 3) as u8;
        if precise != 0 && ty != EventType::SOFTWARE {
            return Err(AttrError::Precise(precise));
        }
        let sample_type = parse_sample_type(&known)?;
        let sample_stack_user = if sample_type.contains(SampleType::STACK_USER) {
            u32_at(&known, 88)
        } else {
            0
        };
        let branches = if sample_type.contains(SampleType::BRANCH_STACK) {
            parse_branch_filter(u64_at(&known, 72))?
        } else {
            BranchStackConfig::default()
        };
        let read_format =
            ReadFormat::from_bits(u64_at(&known, 32)).ok_or(AttrError::Reserved { field: "read_format" })?;
        let flag = |bit: u32| flags >> bit & 1 == 1;
        let wakeup = u32_at(&known, 48);
        Ok(Self {
            ty,
            config: u64_at(&known, 8),
            config1: u64_at(&known, 56),
            config2: u64_at(&known, 64),
            sample_period: u64_at(&known, 16),
            freq: flag(FREQ),
            sample_type,
            sample_stack_user,
            branches,
            read_format,
            wakeup: if flag(WATERMARK) {
                WakeupCondition::Watermark(wakeup)
            } else {
                WakeupCondition::Events(wakeup)
            },
            disabled: flag(DISABLED),
            inherit: flag(INHERIT),
            inherit_stat: flag(INHERIT_STAT),
            pinned: flag(PINNED),
            exclusive: flag(EXCLUSIVE),
            exclude_user: flag(EXCLUDE_USER),
            exclude_kernel: flag(EXCLUDE_KERNEL),
            exclude_hv: flag(EXCLUDE_HV),
            exclude_idle: flag(EXCLUDE_IDLE),
            exclude_host: flag(EXCLUDE_HOST),
            exclude_guest: flag(EXCLUDE_GUEST),
            mmap: flag(MMAP),
            comm: flag(COMM),
            task: flag(TASK),
            context_switch: flag(CONTEXT_SWITCH),
            enable_on_exec: flag(ENABLE_ON_EXEC),
            sample_id_all: flag(SAMPLE_ID_ALL),
        })
    }

    /// Returns the bytes of the known layout, padded with zeros. Checks the size and the bytes
    /// beyond the known layout.
    fn known_bytes(bytes: &mut [u8]) -> Result<[u8; ATTR_SIZE_VER8 as usize], AttrError> {
        let available = bytes.len();
        if available < 8 {
            return Err(AttrError::Fault {
                size: ATTR_SIZE_VER0,
                available,
            });
        }
        let size = match u32_at(bytes, 4) {
            0 => ATTR_SIZE_VER0,
            size => size,
        };
        if !(ATTR_SIZE_VER0..=ATTR_SIZE_MAX).contains(&size) {
            return Err(Self::too_big(bytes));
        }
        if available < size as usize {
            return Err(AttrError::Fault { size, available });
        }
        if size > ATTR_SIZE_VER8
            && bytes[ATTR_SIZE_VER8 as usize..size as usize]
                .iter()
                .any(|&b| b != 0)
        {
            return Err(Self::too_big(bytes));
        }
        let mut known = [0u8; ATTR_SIZE_VER8 as usize];
        let n = size.min(ATTR_SIZE_VER8) as usize;
        known[..n].copy_from_slice(&bytes[..n]);
        Ok(known)
    }

    fn too_big(bytes: &mut [u8]) -> AttrError {
        bytes[4..8].copy_from_slice(&ATTR_SIZE_VER8.to_ne_bytes());
        AttrError::TooBig {
            supported: ATTR_SIZE_VER8,
        }
    }

    /// Serializes the attributes in the layout of the kernel ABI, including `size`.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; ATTR_SIZE_VER8 as usize] {
        let mut out = [0u8; ATTR_SIZE_VER8 as usize];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        let (watermark, wakeup) = match self.wakeup {
            WakeupCondition::Events(n) => (false, n),
            WakeupCondition::Watermark(n) => (true, n),
        };
        let flags = [
            (DISABLED, self.disabled),
            (INHERIT, self.inherit),
            (PINNED, self.pinned),
            (EXCLUSIVE, self.exclusive),
            (EXCLUDE_USER, self.exclude_user),
            (EXCLUDE_KERNEL, self.exclude_kernel),
            (EXCLUDE_HV, self.exclude_hv),
            (EXCLUDE_IDLE, self.exclude_idle),
            (MMAP, self.mmap),
            (COMM, self.comm),
            (FREQ, self.freq),
            (INHERIT_STAT, self.inherit_stat),
            (ENABLE_ON_EXEC, self.enable_on_exec),
            (TASK, self.task),
            (WATERMARK, watermark),
            (SAMPLE_ID_ALL, self.sample_id_all),
            (EXCLUDE_HOST, self.exclude_host),
            (EXCLUDE_GUEST, self.exclude_guest),
            (CONTEXT_SWITCH, self.context_switch),
        ]
        .into_iter()
        .fold(0u64, |flags, (bit, on)| flags | u64::from(on) << bit);
        put(0, &self.ty.0.to_ne_bytes());
        put(4, &ATTR_SIZE_VER8.to_ne_bytes());
        put(8, &self.config.to_ne_bytes());
        put(16, &self.sample_period.to_ne_bytes());
        put(24, &self.sample_type.bits().to_ne_bytes());
        put(32, &self.read_format.bits().to_ne_bytes());
        put(40, &flags.to_ne_bytes());
        put(48, &wakeup.to_ne_bytes());
        put(56, &self.config1.to_ne_bytes());
        put(64, &self.config2.to_ne_bytes());
        if self.sample_type.contains(SampleType::BRANCH_STACK) {
            put(72, &self.branches.filter.bits().to_ne_bytes());
        }
        if self.sample_type.contains(SampleType::REGS_USER) {
            put(80, &REGS_USER.to_ne_bytes());
        }
        if self.sample_type.contains(SampleType::STACK_USER) {
            put(88, &self.sample_stack_user.to_ne_bytes());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn size_zero_selects_ver0_layout() {
        let mut bytes = Attr::counting(EventType::RAW, 7).to_bytes();
        bytes[4..8].copy_from_slice(&0u32.to_ne_bytes());
        bytes[64] = 0xff; // config2, beyond VER0: not looked at
        let attr = Attr::from_bytes(&mut bytes).unwrap();
        assert_eq!((attr.config, attr.config2), (7, 0));
    }

    /// The attributes of `perf record -e cycles` of Linux 6.12 are accepted once perf requests no
    /// precise instruction pointer.
    #[test]
    fn attribute_of_perf_record_is_accepted() {
        let flags = [
            DISABLED,
            INHERIT,
            MMAP,
            COMM,
            FREQ,
            ENABLE_ON_EXEC,
            TASK,
            SAMPLE_ID_ALL,
            EXCLUDE_GUEST,
            MMAP2,
            COMM_EXEC,
            KSYMBOL,
            BPF_EVENT,
            BUILD_ID,
        ];
        let flags = flags.into_iter().fold(0u64, |all, bit| all | 1 << bit);
        let fields = SampleType::IP | SampleType::TID | SampleType::TIME | SampleType::PERIOD;
        let mut bytes = vec![0u8; 136];
        bytes[4..8].copy_from_slice(&136u32.to_ne_bytes());
        bytes[16..24].copy_from_slice(&4000u64.to_ne_bytes());
        bytes[24..32].copy_from_slice(&fields.bits().to_ne_bytes());
        bytes[32..40].copy_from_slice(&(ReadFormat::ID | ReadFormat::LOST).bits().to_ne_bytes());
        let mut with = |flags: u64| {
            bytes[40..48].copy_from_slice(&flags.to_ne_bytes());
            Attr::from_bytes(&mut bytes)
        };
        for precise in [3, 2, 1] {
            let error = with(flags | precise << PRECISE_IP).unwrap_err();
            assert_eq!(error.errno(), libc::EOPNOTSUPP);
        }
        let attr = with(flags).unwrap();
        assert_eq!((attr.sample_type, attr.sample_period), (fields, 4000));
        assert!(attr.freq && attr.inherit && attr.mmap && attr.sample_id_all);
    }

    #[test]
    fn user_registers_and_stack_round_trip() {
        let attr = Attr {
            sample_type: SampleType::REGS_USER | SampleType::STACK_USER,
            sample_stack_user: 8192,
            ..Attr::sampling(EventType::SIM, 1, 1000)
        };
        let mut bytes = attr.to_bytes();
        assert_eq!(Attr::from_bytes(&mut bytes), Ok(attr));
        bytes[80] ^= 1;
        assert_eq!(Attr::from_bytes(&mut bytes).unwrap_err().errno(), libc::EINVAL);
    }

    /// As in Linux, a branch filter must select at least one branch type, and unknown bits are
    /// rejected.
    #[test]
    fn branch_filter_round_trips() {
        let attr = Attr {
            sample_type: SampleType::BRANCH_STACK,
            branches: BranchStackConfig::unlimited(BranchFilter::ANY_CALL | BranchFilter::USER),
            ..Attr::sampling(EventType::SIM, 1, 1000)
        };
        let mut bytes = attr.to_bytes();
        assert_eq!(Attr::from_bytes(&mut bytes), Ok(attr));
        for filter in [0, BranchFilter::USER.bits(), BranchFilter::ANY.bits() | 1 << 63] {
            bytes[72..80].copy_from_slice(&filter.to_ne_bytes());
            assert_eq!(Attr::from_bytes(&mut bytes).unwrap_err().errno(), libc::EINVAL);
        }
    }

    #[test]
    fn nonzero_reserved_field_returns_einval() {
        for (at, len, field) in ZERO_FIELDS {
            let mut bytes = Attr::default().to_bytes();
            bytes[at + len - 1] = 1;
            assert_eq!(Attr::from_bytes(&mut bytes), Err(AttrError::Reserved { field }));
        }
    }

    #[test]
    fn invalid_sizes_return_e2big_and_supported_size() {
        for size in [1u32, 63, 4097, u32::MAX] {
            let mut bytes = vec![0u8; 5000];
            bytes[4..8].copy_from_slice(&size.to_ne_bytes());
            let error = Attr::from_bytes(&mut bytes).unwrap_err();
            assert_eq!(error.errno(), libc::E2BIG, "size {size}");
            assert_eq!(u32_at(&bytes, 4), ATTR_SIZE_VER8);
        }
    }

    #[test]
    fn short_buffer_returns_efault() {
        let mut bytes = Attr::default().to_bytes()[..70].to_vec();
        assert_eq!(Attr::from_bytes(&mut bytes).unwrap_err().errno(), libc::EFAULT);
        assert_eq!(Attr::from_bytes(&mut []).unwrap_err().errno(), libc::EFAULT);
    }

    proptest! {
        /// Attributes of a newer perf version, which are longer than 136 bytes, are accepted if all
        /// bytes beyond the known layout are zero.
        #[test]
        fn p22_unknown_tail_must_be_zero(size in ATTR_SIZE_VER8 + 1..=ATTR_SIZE_MAX, at in any::<prop::sample::Index>(), dirty: bool) {
            let mut bytes = Attr::counting(EventType::VMM, 3).to_bytes().to_vec();
            bytes.resize(size as usize, 0);
            bytes[4..8].copy_from_slice(&size.to_ne_bytes());
            if dirty {
                let at = 136 + at.index(size as usize - 136);
                bytes[at] = 1;
            }
            let got = Attr::from_bytes(&mut bytes);
            if dirty {
                prop_assert_eq!(got.unwrap_err().errno(), libc::E2BIG);
                prop_assert_eq!(u32_at(&bytes, 4), ATTR_SIZE_VER8);
            } else {
                prop_assert_eq!(got.unwrap(), Attr::counting(EventType::VMM, 3));
            }
        }

        #[test]
        fn p22_reserved_bits_are_rejected_and_known_bits_round_trip(bit in 0u32..64, field in 0usize..3) {
            let (at, known, kept) = [
                (24, SampleType::all().bits(), u64::MAX),
                (32, ReadFormat::all().bits(), u64::MAX),
                (40, KNOWN_FLAGS | PRECISE_FLAGS | IGNORED_FLAGS, KNOWN_FLAGS),
            ][field];
            let mut bytes = Attr::counting(EventType::SOFTWARE, 1).to_bytes();
            bytes[72..80].copy_from_slice(&BranchFilter::ANY.bits().to_ne_bytes());
            bytes[80..88].copy_from_slice(&REGS_USER.to_ne_bytes());
            bytes[at..at + 8].copy_from_slice(&(1u64 << bit).to_ne_bytes());
            match Attr::from_bytes(&mut bytes) {
                Ok(attr) => {
                    prop_assert!(known >> bit & 1 == 1);
                    bytes[at..at + 8].copy_from_slice(&(kept & 1 << bit).to_ne_bytes());
                    if !attr.sample_type.contains(SampleType::BRANCH_STACK) {
                        bytes[72..80].fill(0);
                    }
                    if !attr.sample_type.contains(SampleType::REGS_USER) {
                        bytes[80..88].fill(0);
                    }
                    prop_assert_eq!(attr.to_bytes(), bytes);
                }
                Err(error) => {
                    prop_assert!(known >> bit & 1 == 0);
                    prop_assert_eq!(error.errno(), libc::EINVAL);
                }
            }
        }

        #[test]
        fn p22_arbitrary_bytes_do_not_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Attr::from_bytes(&mut bytes);
        }
    }
}
