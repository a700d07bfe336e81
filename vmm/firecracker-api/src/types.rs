//! Bodies of requests and responses, with the field names of Firecracker's API.
//!
//! Every object rejects unknown fields. The types also contain fields that Perfvisor does not
//! support, because [`crate::resources`] rejects these fields by name.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Body of `GET /`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct InstanceInfo {
    /// Identifier of the VM (`--id`).
    pub id: String,
    /// State of the VM.
    pub state: InstanceState,
    /// Version of the program.
    pub vmm_version: String,
    /// Name of the program.
    pub app_name: String,
}

/// State of the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub enum InstanceState {
    /// The VM is being configured.
    #[serde(rename = "Not started")]
    NotStarted,
    /// The vCPUs run.
    Running,
    /// The vCPUs are paused.
    Paused,
}

/// Body of `GET /version`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ApiVersion {
    /// Version of the API specification.
    pub firecracker_version: String,
}

/// Body of a response with an error status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FaultBody {
    /// Field and reason.
    pub fault_message: String,
}

/// Size and features of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineConfig {
    /// Number of vCPUs, 1 to 32.
    pub vcpu_count: u8,
    /// Memory size, in MiB.
    pub mem_size_mib: u32,
    /// Simultaneous multithreading. Unsupported.
    #[serde(default)]
    pub smt: bool,
    /// Dirty page tracking. Unsupported.
    #[serde(default)]
    pub track_dirty_pages: bool,
    /// Huge pages of guest memory.
    #[serde(default)]
    pub huge_pages: HugePages,
    /// CPU template. Only `None` is supported.
    #[serde(default)]
    pub cpu_template: Option<String>,
}

impl Default for MachineConfig {
    fn default() -> Self {
        Self {
            vcpu_count: 1,
            mem_size_mib: 128,
            smt: false,
            track_dirty_pages: false,
            huge_pages: HugePages::None,
            cpu_template: None,
        }
    }
}

/// Partial update of a [`MachineConfig`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineConfigUpdate {
    /// Number of vCPUs, 1 to 32.
    pub vcpu_count: Option<u8>,
    /// Memory size, in MiB.
    pub mem_size_mib: Option<u32>,
    /// Simultaneous multithreading. Unsupported.
    pub smt: Option<bool>,
    /// Dirty page tracking. Unsupported.
    pub track_dirty_pages: Option<bool>,
    /// Type of pages that back guest memory.
    pub huge_pages: Option<HugePages>,
    /// CPU template. Only `None` is supported.
    pub cpu_template: Option<String>,
}

/// Type of pages that back guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HugePages {
    /// Pages of 4 KiB.
    #[default]
    None,
    /// Transparent huge pages.
    Transparent,
    /// Reserved pages of 2 MiB.
    #[serde(rename = "2M")]
    TwoMib,
}

/// Kernel, initial RAM disk and command line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BootSource {
    /// Path of the kernel.
    pub kernel_image_path: String,
    /// Path of the initial RAM disk.
    #[serde(default)]
    pub initrd_path: Option<String>,
    /// Kernel command line.
    #[serde(default)]
    pub boot_args: Option<String>,
}

/// A block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Drive {
    /// Identifier; must match the identifier in the path.
    pub drive_id: String,
    /// `true` if the kernel mounts this device as its root file system.
    pub is_root_device: bool,
    /// `PARTUUID` of the root partition, used if `is_root_device` is `true`.
    #[serde(default)]
    pub partuuid: Option<String>,
    /// Cache mode. Flush requests from the guest are honoured in both modes.
    #[serde(default)]
    pub cache_type: CacheType,
    /// `true` if the guest cannot write to the device.
    #[serde(default)]
    pub is_read_only: Option<bool>,
    /// Path of the image or of a block device.
    #[serde(default)]
    pub path_on_host: Option<String>,
    /// Rate limiter for requests and their data.
    #[serde(default)]
    pub rate_limiter: Option<RateLimiter>,
    /// I/O engine. Only `Sync` is supported.
    #[serde(default)]
    pub io_engine: Option<IoEngine>,
    /// Socket of a vhost-user backend. Unsupported.
    #[serde(default)]
    pub socket: Option<String>,
}

/// Cache mode of a block device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CacheType {
    /// Mode in which Firecracker offers no flush requests to the guest. Perfvisor honors them in
    /// both modes.
    #[default]
    Unsafe,
    /// Flush requests write data to stable storage.
    Writeback,
}

/// I/O engine of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum IoEngine {
    /// Blocking system calls.
    Sync,
    /// `io_uring(7)`.
    Async,
}

/// Update of a block device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DriveUpdate {
    /// Identifier; must match the identifier in the path.
    pub drive_id: String,
    /// Path of the new image. Unsupported.
    #[serde(default)]
    pub path_on_host: Option<String>,
    /// Rate limiter for requests and their data.
    #[serde(default)]
    pub rate_limiter: Option<RateLimiter>,
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkInterface {
    /// Identifier; must match the identifier in the path.
    pub iface_id: String,
    /// Name of the tap device.
    pub host_dev_name: String,
    /// MAC address of the guest.
    #[serde(default)]
    pub guest_mac: Option<String>,
    /// MTU offered to the guest. Unsupported.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Rate limiter for frames that the guest receives.
    #[serde(default)]
    pub rx_rate_limiter: Option<RateLimiter>,
    /// Rate limiter for frames that the guest sends.
    #[serde(default)]
    pub tx_rate_limiter: Option<RateLimiter>,
}

/// Update of a network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkInterfaceUpdate {
    /// Identifier; must match the identifier in the path.
    pub iface_id: String,
    /// Rate limiter for frames that the guest receives.
    #[serde(default)]
    pub rx_rate_limiter: Option<RateLimiter>,
    /// Rate limiter for frames that the guest sends.
    #[serde(default)]
    pub tx_rate_limiter: Option<RateLimiter>,
}

/// A rate limiter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RateLimiter {
    /// Bandwidth limit. An update that omits this limit does not change it.
    #[serde(default)]
    pub bandwidth: Option<TokenBucket>,
    /// Limit for the number of operations. An update that omits this limit does not change it.
    #[serde(default)]
    pub ops: Option<TokenBucket>,
}

/// Token bucket. Without a size or a refill time, it imposes no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenBucket {
    /// Capacity, in tokens.
    pub size: u64,
    /// Additional tokens at the start.
    #[serde(default)]
    pub one_time_burst: Option<u64>,
    /// Time to refill the bucket completely, in milliseconds.
    pub refill_time: u64,
}

impl TokenBucket {
    /// Returns whether this bucket imposes no limit. As in Firecracker, a bucket without a size or
    /// a refill time imposes no limit.
    pub fn is_unlimited(self) -> bool {
        self.size == 0 || self.refill_time == 0
    }
}

/// The vsock device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Vsock {
    /// CID of the guest, at least 3.
    pub guest_cid: u32,
    /// Path of the Unix socket.
    pub uds_path: String,
    /// Unused identifier, accepted for old clients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vsock_id: Option<String>,
}

/// The entropy device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EntropyDevice {
    /// Rate limiter for requests and their data.
    #[serde(default)]
    pub rate_limiter: Option<RateLimiter>,
}

/// The balloon's configuration before the VM starts, and its current values after that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Balloon {
    /// Target size, in MiB.
    pub amount_mib: u32,
    /// `true` if the guest reclaims memory from the balloon before it kills a process due to lack
    /// of memory.
    pub deflate_on_oom: bool,
    /// Interval of the statistics, in seconds. 0 disables the statistics.
    #[serde(default)]
    pub stats_polling_interval_s: u16,
    /// Free page hinting. Unsupported.
    #[serde(default)]
    pub free_page_hinting: bool,
    /// `true` if the guest continuously returns free pages to the host.
    #[serde(default)]
    pub free_page_reporting: bool,
}

/// Body of `PATCH /balloon`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BalloonUpdate {
    /// Target size, in MiB.
    pub amount_mib: u32,
}

/// Body of `PATCH /balloon/statistics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BalloonStatsUpdate {
    /// Interval of the statistics in seconds.
    pub stats_polling_interval_s: u16,
}

/// Body of `GET /balloon/statistics`. The guest's driver reports the actual size and the values of
/// all optional fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BalloonStats {
    /// Target size, in pages of 4 KiB.
    pub target_pages: u32,
    /// Actual size, in pages of 4 KiB.
    pub actual_pages: u32,
    /// Target size, in MiB.
    pub target_mib: u32,
    /// Actual size, in MiB.
    pub actual_mib: u32,
    /// Memory swapped in, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_in: Option<u64>,
    /// Memory swapped out, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_out: Option<u64>,
    /// Number of major page faults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major_faults: Option<u64>,
    /// Number of minor page faults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor_faults: Option<u64>,
    /// Unused memory, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_memory: Option<u64>,
    /// Total memory, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_memory: Option<u64>,
    /// Estimate of the memory that is available without swapping, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_memory: Option<u64>,
    /// Size of caches that can be reclaimed without I/O, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_caches: Option<u64>,
    /// Number of successful huge page allocations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugetlb_allocations: Option<u64>,
    /// Number of failed huge page allocations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugetlb_failures: Option<u64>,
    /// Number of processes killed due to lack of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_kill: Option<u64>,
    /// Number of allocations that had to wait for memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alloc_stall: Option<u64>,
    /// Memory scanned by background reclaim, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub async_scan: Option<u64>,
    /// Memory scanned by direct reclaim, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct_scan: Option<u64>,
    /// Memory reclaimed by background reclaim, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub async_reclaim: Option<u64>,
    /// Memory reclaimed by direct reclaim, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct_reclaim: Option<u64>,
}

/// The serial console.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SerialDevice {
    /// File that receives the output.
    #[serde(default)]
    pub serial_out_path: Option<String>,
    /// Rate limiter for the output. Unsupported.
    #[serde(default)]
    pub rate_limiter: Option<TokenBucket>,
}

/// Log messages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Logger {
    /// File or named pipe that receives the messages.
    #[serde(default)]
    pub log_path: Option<String>,
    /// Minimum level, case-insensitive: Error, Warning, Info, Debug, Trace or Off.
    #[serde(default)]
    pub level: Option<String>,
    /// `true` to show the level. Perfvisor always shows it.
    #[serde(default)]
    pub show_level: Option<bool>,
    /// `true` to show the source file and line of a message. Unsupported.
    #[serde(default)]
    pub show_log_origin: Option<bool>,
    /// Module to which log messages are restricted. Unsupported.
    #[serde(default)]
    pub module: Option<String>,
}

/// Destination of the metrics.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Metrics {
    /// File or named pipe that receives one line of JSON per flush.
    pub metrics_path: String,
}

/// The guest's PMU. This object is a Perfvisor extension of the API. The fields take the same
/// values as the corresponding options of `perfvisor run`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Pmu {
    /// PMU model (`--pmu`), `auto` by default.
    #[serde(default)]
    pub model: Option<String>,
    /// Backing of the counters (`--backing`).
    #[serde(default)]
    pub backing: Option<String>,
    /// Numbers of counters (`--pmu-counters`).
    #[serde(default)]
    pub counters: Option<String>,
    /// Path of the event filter (`--pmu-filter`).
    #[serde(default)]
    pub filter: Option<String>,
    /// Sharing policy (`--share`).
    #[serde(default)]
    pub share: Option<String>,
}

/// Body of `PUT /actions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Action {
    /// The action.
    pub action_type: ActionType,
}

/// Action of `PUT /actions`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ActionType {
    /// Starts the VM.
    InstanceStart,
    /// Writes the metrics.
    FlushMetrics,
    /// Requests a shutdown of the guest. Perfvisor presses the power button instead of
    /// Ctrl-Alt-Del.
    SendCtrlAltDel,
}

/// Body of `PATCH /vm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VmUpdate {
    /// Requested state.
    pub state: RequestedState,
}

/// State requested by `PATCH /vm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RequestedState {
    /// Pauses all vCPUs.
    Paused,
    /// Resumes all vCPUs.
    Resumed,
}

/// Body of `PUT /snapshot/create`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotCreateParams {
    /// File that receives the state of the VM.
    pub snapshot_path: String,
    /// File that receives the guest's memory.
    pub mem_file_path: String,
    /// Extent of the snapshot. Only `Full` is supported.
    #[serde(default)]
    pub snapshot_type: SnapshotType,
}

/// Extent of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum SnapshotType {
    /// The whole memory.
    #[default]
    Full,
    /// Memory changed since the previous snapshot. Unsupported.
    Diff,
}

/// Body of `PUT /snapshot/load`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotLoadParams {
    /// File with the state of the VM.
    pub snapshot_path: String,
    /// File with the guest's memory (deprecated form of `mem_backend`).
    #[serde(default)]
    pub mem_file_path: Option<String>,
    /// Source of the guest's memory. Either this field or `mem_file_path` is required.
    #[serde(default)]
    pub mem_backend: Option<MemoryBackend>,
    /// Resume the VM.
    #[serde(default)]
    pub resume_vm: bool,
    /// Tap devices that replace those in the snapshot.
    #[serde(default)]
    pub network_overrides: Vec<NetworkOverride>,
    /// Dirty page tracking. Unsupported.
    #[serde(default)]
    pub track_dirty_pages: bool,
    /// Deprecated name of the field that enables dirty page tracking. Unsupported.
    #[serde(default)]
    pub enable_diff_snapshots: bool,
    /// `true` to advance the guest's clock by the time since the snapshot. Unsupported.
    #[serde(default)]
    pub clock_realtime: bool,
    /// Socket that the restored vsock device uses instead of the one in the snapshot.
    #[serde(default)]
    pub vsock_override: Option<VsockOverride>,
    /// Type of pages that back guest memory. Only `None` is supported.
    #[serde(default)]
    pub huge_pages: HugePages,
}

/// Socket of the restored vsock device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VsockOverride {
    /// Path of the socket.
    pub uds_path: String,
}

/// Source of the guest's memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryBackend {
    /// Path of the memory file.
    pub backend_path: String,
    /// Type of the source. Only `File` is supported.
    pub backend_type: MemoryBackendType,
}

/// Type of guest memory source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MemoryBackendType {
    /// File that is mapped privately.
    File,
    /// A process that handles page faults. Unsupported.
    Uffd,
}

/// Assigns another tap device to a network device in the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkOverride {
    /// Identifier of the network device.
    pub iface_id: String,
    /// Name of the tap device.
    pub host_dev_name: String,
}

/// Configuration of the metadata service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MmdsConfig {
    /// Identifiers of the network devices through which the guest reaches the service.
    pub network_interfaces: Vec<String>,
    /// Version of the protocol.
    #[serde(default)]
    pub version: MmdsVersion,
    /// Link-local IPv4 address of the service, 169.254.169.254 by default.
    #[serde(default)]
    pub ipv4_address: Option<String>,
    /// `true` if responses are always plain text, regardless of the format that the guest accepts.
    #[serde(default)]
    pub imds_compat: bool,
}

/// Version of the protocol between the guest and the metadata service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum MmdsVersion {
    /// Requests need no token.
    #[default]
    V1,
    /// Requests need a session token.
    V2,
}

/// Document of the metadata service, which may be any JSON value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct MmdsContents(pub Value);

/// Complete configuration: body of `GET /vm/config`, and contents of `--config-file`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct VmConfig {
    /// Size and features of the machine.
    pub machine_config: Option<MachineConfig>,
    /// Kernel, initial RAM disk and command line.
    pub boot_source: Option<BootSource>,
    /// Block devices.
    pub drives: Vec<Drive>,
    /// Network devices.
    pub network_interfaces: Vec<NetworkInterface>,
    /// The vsock device.
    pub vsock: Option<Vsock>,
    /// The entropy device.
    pub entropy: Option<EntropyDevice>,
    /// The serial console.
    pub serial: Option<SerialDevice>,
    /// Log messages.
    pub logger: Option<Logger>,
    /// Metrics.
    pub metrics: Option<Metrics>,
    /// The guest's PMU.
    pub pmu: Option<Pmu>,
    /// The balloon.
    pub balloon: Option<Balloon>,
    /// CPU configuration. Unsupported.
    pub cpu_config: Option<Value>,
    /// Metadata service.
    pub mmds_config: Option<MmdsConfig>,
    /// Hot-pluggable memory. Unsupported.
    pub memory_hotplug: Option<Value>,
    /// Persistent memory devices. Unsupported.
    pub pmem: Vec<Value>,
}
