//! The command line: subcommands, options and their validation.
//!
//! An invalid argument produces one line on standard error that names the value and the valid
//! values, and exit status 2. A new option requires a field with a doc comment (its help text), and
//! a value parser with a test in `values`.

mod ctl_order;
mod parse_error;
mod perf_options;
pub mod restore;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::{self, ExpandedArgs};
use crate::jail::JailConfig;
use control_api::migration::MigrationAddress;
use guest_patching::rdpmc::RdpmcMode;
use mmds::config::MmdsConfig;
use operator::commands::one_line;
use operator::exporter::ExporterArgs;
use perf_core::SharePolicy;
use vpmu::{CounterBackingPolicy, PmiShare, PmuModelName, RequestedCounters};

use crate::commands::generate::{EXAMPLES, GenerateArgs};
use crate::commands::validate::ValidateArgs;
use crate::firecracker::FirecrackerArgs;
use crate::jailer::JailerArgs;
use crate::values::{
    ObserverSocketArg, SecurityProfile, integer_in_range, parse_builtin, parse_gdb, parse_memory,
    parse_on_off, parse_pmi_limit, parse_ring_memory, parse_sample_limit, parse_share, parse_stop_timeout,
    parse_turn, parse_width,
};
use operator::commands::annotate::AnnotateArgs;
use operator::commands::convert::ConvertArgs;
use operator::commands::cp::CopyFilesArgs;
use operator::commands::ctl::CtlArgs;
use operator::commands::diff::DiffArgs;
use operator::commands::exec::ExecArgs;
use operator::commands::exits::ExitsArgs;
use operator::commands::files::{FlamegraphArgs, PprofArgs};
use operator::commands::list::ListArgs;
use operator::commands::ps::PsArgs;
use operator::commands::record::RecordArgs;
use operator::commands::report::{ReportArgs, ScriptArgs};
use operator::commands::stat::StatArgs;
use operator::commands::top::TopArgs;
use parse_error::condense_error;
use perf_core::error_line;
use virtio_devices::balloon::config::BalloonConfig;
use virtio_devices::disk::config::DiskConfig;
use virtio_devices::net::config::NetConfig;
use virtio_devices::rate_limiter::limits::RateLimits;
use virtio_devices::share::config::ShareConfig;
use virtio_devices::vsock::VsockConfig;
use vmm::boot::BootProtocol;
use vmm::console::ConsoleTarget;
use vmm::gdb::config::GdbConfig;
use vmm::kvm::signature::CpuSignature;
use vmm::memory::HugePages;
use vmm::numbers::VcpuCountRange;
use vmm::timers::MuxPolicyChoice;
use vmm::vcpu::affinity::VcpuPinning;
use vmm::vcpu::control::ResetPolicy;
use vmm::vm::HaltPolling;

const EXIT_STATUS_HELP: &str = "\
Exit status:
  0    the guest powered off, or Ctrl-A x terminated the VM
  odd  the guest wrote N to the debug-exit port 0xF4: (N << 1) | 1
  2    invalid option or file, or a host that cannot run this guest
  4    the guest requested a reset (--on-reset exit)
  6    a vCPU shut down after a triple fault (--on-reset exit)
  8    Perfvisor or KVM failed
  10   SIGINT, SIGHUP, or SIGTERM if the guest did not power off

Keys: Ctrl-A x terminates the VM, Ctrl-A Ctrl-A sends Ctrl-A to the guest, Ctrl-A h lists the keys.

Example: perfvisor run --kernel vmlinux --initrd initrd --cpus 2 --memory 1G --name web";

/// A VMM with a virtual performance monitoring unit.
#[derive(Clone, Debug, Parser)]
#[command(name = "perfvisor", version, about, disable_help_subcommand = true)]
pub struct Cli {
    /// Options accepted by every command.
    #[command(flatten)]
    pub global: GlobalOptions,
    /// Command to run.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// Options of every command.
#[derive(Clone, Debug, Args)]
pub struct GlobalOptions {
    /// Print more messages: -v info, -vv debug, -vvv trace.
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub verbose: u8,
    /// Exit when the process with this ID, which started this process, exits.
    #[arg(long, value_name = "PID", hide = true)]
    pub parent: Option<u32>,
}

/// The commands.
#[derive(Clone, Debug, Subcommand)]
pub enum CliCommand {
    /// Run a guest: a Linux kernel, a multiboot kernel, or the built-in one.
    Run(Box<RunArgs>),
    /// Show what this host supports.
    Check(CheckArgs),
    /// Check on this host that guests count correctly.
    Validate(ValidateArgs),
    /// List the running VMs.
    Ps(PsArgs),
    /// List the events that stat, record and top can count and sample.
    List(ListArgs),
    /// Pause, resume or stop a VM, add or remove vCPUs, or change the sharing policy or event
    /// filter.
    Ctl(CtlArgs),
    /// Run a command in a VM's guest, through the guest's agent.
    Exec(ExecArgs),
    /// Copy files to or from a VM's guest.
    Cp(CopyFilesArgs),
    /// Count events of a VM's vCPUs, or show the guest's counters.
    Stat(StatArgs),
    /// Show the exits of a VM's vCPUs: number and duration by reason.
    Exits(ExitsArgs),
    /// Record samples of a VM's vCPUs, with guest call chains, in a perf.data file.
    Record(Box<RecordArgs>),
    /// Show live where a VM's vCPUs spend their time, and the guest's counters.
    Top(TopArgs),
    /// Serve metrics and profiles of this host's VMs over HTTP, for Prometheus and Pyroscope.
    Exporter(ExporterArgs),
    /// Serve Firecracker's API for a VM.
    Firecracker(Box<FirecrackerArgs>),
    /// Start `perfvisor firecracker` as another user in a separate directory.
    Jailer(Box<JailerArgs>),
    /// Show the samples of a recording as a table of shares by task, object and function.
    Report(ReportArgs),
    /// Compare two recordings by the shares of their functions.
    Diff(DiffArgs),
    /// Show the instructions of a function with their shares of a recording's samples.
    Annotate(AnnotateArgs),
    /// Print every sample of a recording.
    Script(ScriptArgs),
    /// Draw the samples of a recording as a flame graph, or print folded stacks.
    Flamegraph(FlamegraphArgs),
    /// Convert a recording to a profile for pprof, Pyroscope or Parca.
    Pprof(PprofArgs),
    /// Write the samples of a recording for the Firefox Profiler or speedscope.
    Convert(ConvertArgs),
    /// Generate manual pages or shell completions for a package.
    #[command(hide = true)]
    Generate(GenerateArgs),
    /// Run the back end of a shared directory until the VM that started it exits.
    #[command(hide = true)]
    KeepShare(KeepShareArgs),
    /// Save a VM at the requests of `perfvisor firecracker`.
    #[command(hide = true)]
    SaveSnapshots(SaveSnapshotsArgs),
}

/// Arguments of the process with which `perfvisor firecracker` saves snapshots.
#[derive(Clone, Debug, Args)]
pub struct SaveSnapshotsArgs {
    /// Control socket of the VM.
    pub socket: PathBuf,
}

/// Arguments of the process started by `run --share-dir`.
#[derive(Clone, Debug, Args)]
pub struct KeepShareArgs {
    /// Back end and its arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    pub command: Vec<OsString>,
}

/// Returns the clap command with the settings that derive attributes cannot express.
pub fn command() -> clap::Command {
    with_negative_numbers(perf_options::add_accepted_options(Cli::command()))
}

/// Appends the examples of each command to its help text.
fn with_examples(command: clap::Command) -> clap::Command {
    command.mut_subcommands(|of| {
        let name = format!("perfvisor {}", of.get_name());
        let Some((_, examples)) = EXAMPLES.iter().find(|(command, _)| *command == name) else {
            return of;
        };
        let notes = of.get_after_help().map(|notes| format!("{notes}\n\n"));
        let notes = notes.unwrap_or_default();
        if notes.contains("Example: ") {
            return of;
        }
        of.after_help(format!("{notes}Examples:\n  {}", examples.join("\n  ")))
    })
}

/// Treats `-1` after an option as the option's value, so that the error message refers to the
/// value.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    command
        .mut_args(|arg| {
            let takes_value = arg.get_action().takes_values() && !arg.is_positional();
            if takes_value && !arg.is_allow_hyphen_values_set() {
                arg.allow_negative_numbers(true)
            } else {
                arg
            }
        })
        .mut_subcommands(with_negative_numbers)
}

/// Returns the command that `args` select, and its path, such as `perfvisor ctl`.
fn named_command<'c>(root: &'c clap::Command, args: &[OsString]) -> (&'c clap::Command, String) {
    let (mut command, mut path) = (root, root.get_name().to_owned());
    for word in args.iter().skip(1).filter_map(|arg| arg.to_str()) {
        if let Some(named) = command.find_subcommand(word) {
            command = named;
            path = format!("{path} {word}");
        } else if !word.starts_with('-') && command.get_positionals().next().is_none() {
            break;
        }
    }
    (command, path)
}

/// Returns the names of the visible subcommands of `command`.
fn subcommand_names(command: &clap::Command) -> String {
    let known: Vec<&str> = command
        .get_subcommands()
        .filter(|known| !known.is_hide_set())
        .map(clap::Command::get_name)
        .collect();
    match known.split_last() {
        Some((last, others)) if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => known.join(""),
    }
}

/// `perfvisor check`.
#[derive(Clone, Debug, Args)]
pub struct CheckArgs {
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub json: bool,
    /// Also show what perfvisor run provides with this --pmu on this host.
    #[arg(long, value_name = "MODEL", default_value = "auto")]
    pub pmu: PmuModelName,
    /// Also show what perfvisor run provides with these numbers of counters (--pmu-counters).
    #[arg(long, value_name = "GP[+FIXED]")]
    pub pmu_counters: Option<RequestedCounters>,
}

/// `perfvisor run`.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXIT_STATUS_HELP)]
pub struct RunArgs {
    /// Boot this kernel: an x86-64 ELF vmlinux, a bzImage, a multiboot v1 image or an ELF image
    /// with a PVH entry point [default: the built-in guest]
    #[arg(long, value_name = "FILE", help_heading = "Kernel")]
    pub kernel: Option<PathBuf>,
    /// Boot another built-in guest, by name.
    #[arg(long, value_name = "NAME", hide = true, conflicts_with = "kernel", value_parser = parse_builtin)]
    pub builtin: Option<&'static guest_images::bare_metal::BareMetalGuest>,
    /// Select how the kernel is entered: auto (the protocol that the file requests; for Linux, the
    /// Linux boot protocol) or pvh (the PVH entry point of an ELF kernel, including Linux).
    #[arg(
        long,
        value_name = "HOW",
        default_value = "auto",
        requires = "kernel",
        help_heading = "Kernel"
    )]
    pub boot_protocol: BootProtocol,
    /// Load this initial RAM disk. A multiboot kernel receives it as a module.
    #[arg(long, value_name = "FILE", requires = "kernel", help_heading = "Kernel")]
    pub initrd: Option<PathBuf>,
    /// Set the kernel command line [default for Linux: console=ttyS0 reboot=k panic=-1 tsc=reliable
    /// no_timer_check]
    #[arg(
        long,
        value_name = "STRING",
        allow_hyphen_values = true,
        help_heading = "Kernel"
    )]
    pub cmdline: Option<String>,
    /// Restore the guest from a snapshot written by `perfvisor ctl NAME snapshot DIR`. The snapshot
    /// determines the machine. The disks, network devices and consoles must be given again.
    #[arg(
        long,
        value_name = "DIR",
        group = "saved",
        conflicts_with_all = restore::CONFLICTS,
        help_heading = "Kernel"
    )]
    pub restore: Option<PathBuf>,
    /// Wait for a VM that `perfvisor ctl NAME migrate` moves to this process, at unix:PATH or an
    /// inherited socket fd:N. The VM determines the machine. The disks, other tap devices and the
    /// consoles must be given again.
    #[arg(
        long,
        value_name = "ADDRESS",
        group = "saved",
        conflicts_with_all = restore::CONFLICTS,
        help_heading = "Kernel"
    )]
    pub incoming: Option<MigrationAddress>,
    /// Read the whole memory of the snapshot first and compare its checksums.
    #[arg(long, requires = "restore", help_heading = "Kernel")]
    pub restore_verify: bool,
    /// Read the memory of the snapshot from this file. In this case, --restore names the state
    /// file.
    #[arg(long, value_name = "FILE", requires = "restore", help_heading = "Kernel")]
    pub restore_memory: Option<PathBuf>,
    /// Directory of the base of the snapshot given by --restore, which was written by
    /// `perfvisor ctl NAME snapshot DIR --diff BASE`. Repeat the option, in any order, for each
    /// snapshot that BASE is based on.
    #[arg(long, value_name = "BASE", requires = "restore", help_heading = "Kernel")]
    pub restore_base: Vec<PathBuf>,
    /// Restore one of several VMs from the same snapshot, with new addresses for network devices
    /// without mac=.
    #[arg(long, requires = "restore", help_heading = "Kernel")]
    pub clone: bool,
    /// Restore even if --backing or this host does not count an event that the guest counts.
    #[arg(long, requires = "saved", help_heading = "Kernel")]
    pub restore_loses: bool,
    /// Leave the restored VM paused; `perfvisor ctl NAME resume` continues it.
    #[arg(long, requires = "restore", help_heading = "Kernel")]
    pub restore_paused: bool,
    /// Connect the first serial port (ttyS0): tty (standard input and output), file=PATH (append;
    /// no input), socket=PATH (one client at a time), pty (a new pseudo-terminal) or none.
    #[arg(
        long,
        value_name = "WHERE",
        default_value = "tty",
        help_heading = "Consoles and devices"
    )]
    pub console: ConsoleTarget,
    /// Add a virtio console (hvc0) and connect it like --console.
    #[arg(long, value_name = "WHERE", help_heading = "Consoles and devices")]
    pub virtio_console: Option<ConsoleTarget>,
    /// Set the number of vCPUs, 1 to 64. With N,max=M, `perfvisor ctl NAME vcpus` adds vCPUs up to
    /// M.
    #[arg(long, value_name = "N[,max=M]", default_value = "1", help_heading = "Machine")]
    pub cpus: VcpuCountRange,
    /// Set the size of guest memory, at least 16M: bytes, or a number with K, M, G or T.
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_memory, help_heading = "Machine")]
    pub memory: u64,
    /// Allocate all guest memory before the guest starts.
    #[arg(long, help_heading = "Machine")]
    pub prealloc: bool,
    /// Use huge pages for guest memory: off, transparent (if the kernel can allocate them) or 2M
    /// (reserved by the administrator of the host).
    #[arg(long, value_name = "KIND", default_value = "off", help_heading = "Machine")]
    pub hugepages: HugePages,
    /// Set the maximum time that a halted vCPU polls before its thread sleeps: nanoseconds, host
    /// (KVM's setting) or auto (0, because the clock would count polling as cycles; host with
    /// --backing hardware or kvm).
    #[arg(long, value_name = "NS", default_value = "auto", help_heading = "Machine")]
    pub halt_poll_ns: HaltPolling,
    /// Select the virtual PMU: auto (the host's vendor), off, host, intel, intel-vN (N from 1 to
    /// 5), amd, amd-k7 or amd-v2.
    #[arg(
        long,
        value_name = "MODEL",
        default_value = "auto",
        help_heading = "PMU of the guest"
    )]
    pub pmu: PmuModelName,
    /// Set the number of general-purpose counters, or of general-purpose and fixed counters, for
    /// example 4+3 [default: those of the model]
    #[arg(long, value_name = "GP[+FIXED]", help_heading = "PMU of the guest")]
    pub pmu_counters: Option<RequestedCounters>,
    /// Set the counter width in bits, 32 to 48 (Intel models) [default: that of the model]
    #[arg(long, value_name = "BITS", value_parser = parse_width, help_heading = "PMU of the guest")]
    pub pmu_width: Option<u8>,
    /// Allow the guest only the events that this file lists [default: all events]
    #[arg(long, value_name = "FILE", help_heading = "PMU of the guest")]
    pub pmu_filter: Option<PathBuf>,
    /// Select the security profile: own (the guest may count everything) or tenant (on a shared
    /// host: architectural events only, no paravirtual events, no debug-exit port, no metrics of
    /// the guest's counters).
    #[arg(
        long,
        value_name = "WHOM",
        default_value = "own",
        help_heading = "PMU of the guest"
    )]
    pub profile: SecurityProfile,
    /// Limit the PMIs per second and vCPU; 0 for no limit [default: 50000]
    #[arg(long, value_name = "N", value_parser = parse_pmi_limit, help_heading = "PMU of the guest")]
    pub pmi_limit: Option<u32>,
    /// Bound the time that the guest's PMI handlers take to this share of each vCPU's time: the
    /// next PMI is held back until the guest has run long enough outside the handler. off or 100%
    /// for no bound [default: 25% for Intel models, 50% for AMD models]
    #[arg(long, value_name = "SHARE", help_heading = "PMU of the guest")]
    pub pmi_share: Option<PmiShare>,
    /// Give the guest branch records (LBR), for perf record -b in the guest: on or off.
    /// Single-steps the guest before PMIs [default: on if this host's KVM can single-step it, off
    /// with --profile tenant]
    #[arg(long, value_name = "ON|OFF", value_parser = parse_on_off, help_heading = "PMU of the guest")]
    pub lbr: Option<bool>,
    /// Select the backing of the guest's counters: auto, hardware, clock, exact, kvm (KVM's own
    /// vPMU) or none.
    #[arg(
        long,
        value_name = "BACKING",
        default_value = "auto",
        help_heading = "PMU of the guest"
    )]
    pub backing: CounterBackingPolicy,
    /// Also count instructions and branches of operators (perfvisor stat) by single-stepping.
    /// Requires --backing exact.
    #[arg(long, help_heading = "PMU of the guest")]
    pub operator_steps: bool,
    /// Select how RDPMC in the guest is handled: auto (trap; in guests other than Linux, only in
    /// the kernel file), trap (patched where it is found, emulated elsewhere), off or hwbp
    /// (hardware breakpoints).
    #[arg(
        long,
        value_name = "HOW",
        default_value = "auto",
        help_heading = "PMU of the guest"
    )]
    pub rdpmc: RdpmcMode,
    /// Remove events that cannot be counted from a Linux guest's event tables, so that perf in the
    /// guest shows them as not supported instead of 0: on or off.
    #[arg(long, value_name = "ON|OFF", default_value = "on", action = clap::ArgAction::Set, value_parser = parse_on_off, help_heading = "PMU of the guest")]
    pub hide_uncounted: bool,
    /// Select whether the guest or the operator gets the host's counters if there are too few:
    /// guest-first, operator-first or strict.
    #[arg(long, value_name = "POLICY", default_value = "guest-first", value_parser = parse_share, help_heading = "Sharing of the counters")]
    pub share: SharePolicy,
    /// Select how events are multiplexed: auto (adaptive, with intervals that cost at most one
    /// hundredth of the guest's time), adaptive (short intervals at any cost) or rotate (as Linux
    /// does).
    #[arg(
        long,
        value_name = "POLICY",
        default_value = "auto",
        help_heading = "Sharing of the counters"
    )]
    pub mux: MuxPolicyChoice,
    /// Set the initial multiplexing interval in milliseconds, 0.2 to 100; with adaptive
    /// multiplexing [default: auto measures the cost of a rotation]
    #[arg(long, value_name = "MS", value_parser = parse_turn, help_heading = "Sharing of the counters")]
    pub mux_turn: Option<Duration>,
    /// Reserve this number of host counters per vCPU for VM-wide events (stat without -A, top and
    /// metrics). The guest gets fewer.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        value_parser = integer_in_range(0..=usize::MAX),
        help_heading = "Sharing of the counters"
    )]
    pub reserve_counters: usize,
    /// Limit the samples per second that operators may take of one event on a vCPU, 1 to 1000000
    /// [default: 100000]
    #[arg(long, value_name = "HZ", value_parser = parse_sample_limit, help_heading = "Sharing of the counters")]
    pub sample_limit: Option<u64>,
    /// Limit the memory for the rings of record and top of an operator other than root, 64K to 64G
    /// [default: 512K per host CPU, plus 8M]
    #[arg(long, value_name = "SIZE", value_parser = parse_ring_memory, help_heading = "Sharing of the counters")]
    pub ring_memory: Option<u64>,
    /// Select what happens if the guest resets the machine or a vCPU shuts down (triple fault):
    /// exit (the VM exits) or restart (the guest boots again).
    #[arg(long, value_name = "WHAT", default_value = "exit", help_heading = "Machine")]
    pub on_reset: ResetPolicy,
    /// Add a disk: an image or a block device. Options: ro (read-only), serial=TEXT,
    /// format=raw|qcow2 (raw by default, never detected), backing=FILE with
    /// backing-format=raw|qcow2 (once for each backing image of a qcow2 image),
    /// block-size=512|4096, rate limits bandwidth=BYTES/MS[+BURST] and ops=N/MS[+BURST]. May be
    /// repeated.
    #[arg(
        long,
        value_name = "FILE[,ro][,format=qcow2][,...]",
        help_heading = "Consoles and devices"
    )]
    pub disk: Vec<DiskConfig>,
    /// Share a directory that the guest can mount (`mount -t virtiofs TAG /mnt`), served by a new
    /// virtiofsd. Options: ro (read-only), tag=NAME (share0, share1 and so on by default). With
    /// socket=PATH, an existing back end is used instead. May be repeated.
    #[arg(
        long,
        value_name = "DIR[,ro][,tag=NAME]|socket=PATH[,tag=NAME]",
        help_heading = "Consoles and devices"
    )]
    pub share_dir: Vec<ShareConfig>,
    /// Provide entropy of the host (virtio-rng) to guests other than the built-in ones: on or off.
    #[arg(long, value_name = "ON|OFF", default_value = "on", action = clap::ArgAction::Set, value_parser = parse_on_off, help_heading = "Machine")]
    pub rng: bool,
    /// Add a memory balloon (virtio-balloon), which returns guest memory to the host. Options: size
    /// of the balloon in MiB (0 by default; `perfvisor ctl NAME balloon SIZE` changes it),
    /// deflate-on-oom=on (the guest deflates the balloon before it kills a process), stats=SECONDS
    /// (interval of the guest's memory statistics), free-page-reporting=on (free pages are
    /// continuously returned to the host).
    #[arg(
        long,
        value_name = "size=MIB[,deflate-on-oom=on][,stats=SECONDS][,free-page-reporting=on]",
        num_args = 0..=1,
        default_missing_value = "size=0",
        help_heading = "Consoles and devices"
    )]
    pub balloon: Option<BalloonConfig>,
    /// Limit the rate of the entropy device: bandwidth=BYTES/MS[+BURST] and ops=N/MS[+BURST]
    /// [default: unlimited]
    #[arg(long, value_name = "bandwidth=...,ops=...", help_heading = "Machine")]
    pub rng_limits: Option<RateLimits>,
    /// Pin vCPUs to host CPUs: a list of VCPU=CPU [default: not pinned]
    #[arg(long, value_name = "LIST", help_heading = "Machine")]
    pub pin: Option<VcpuPinning>,
    /// Set the time that the guest may take to power off after SIGTERM, which presses its power
    /// button, in seconds. The VM exits immediately on a second signal or if the guest ignores the
    /// button.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = parse_stop_timeout, help_heading = "Operation")]
    pub stop_timeout: Duration,
    /// Allow nested guests by exposing the host's VT-x or AMD-V to the guest.
    #[arg(long, help_heading = "Machine")]
    pub nested: bool,
    /// Set the CPU family, model and stepping in the guest's CPUID: host, FAMILY/MODEL/STEPPING, or
    /// EAX in hexadecimal [default: the host's, or with a --pmu of another vendor a generic one]
    #[arg(long, value_name = "SIGNATURE", help_heading = "Machine")]
    pub cpu_signature: Option<CpuSignature>,
    /// Add a network device on an existing tap device. The MAC address is derived from the VM's
    /// name unless given. Rate limits: rx-bandwidth=BYTES/MS[+BURST] and rx-ops=N/MS[+BURST], also
    /// with tx-. mmds=on gives the device access to the metadata service. May be repeated.
    #[arg(
        long,
        value_name = "tap=NAME[,mac=XX:XX:XX:XX:XX:XX][,...]",
        help_heading = "Consoles and devices"
    )]
    pub net: Vec<NetConfig>,
    /// Add a metadata service at a link-local address for network devices with mmds=on [default:
    /// version=v1,address=169.254.169.254,imds-compat=off,size-limit=51200]
    #[arg(long, value_name = "version=v1|v2[,...]", num_args = 0..=1, default_missing_value = "version=v1", help_heading = "Consoles and devices")]
    pub mmds: Option<MmdsConfig>,
    /// Set the name of the VM for ctl, stat, record and other commands [default: vm-PID]
    #[arg(long, value_name = "NAME", help_heading = "Operation")]
    pub name: Option<String>,
    /// Create a Unix socket for observers. Users with write permission for the socket may count
    /// events of the VM (perfvisor stat --socket PATH), but cannot change anything.
    #[arg(long, value_name = "PATH[,mode=MODE]", help_heading = "Operation")]
    pub observers: Option<ObserverSocketArg>,
    /// Add a vsock device, which exec and cp require, with the context ID of the guest and the path
    /// of the Unix socket [default: cid=3, and NAME.vsock next to the control socket]
    #[arg(long, value_name = "cid=N[,socket=PATH]", num_args = 0..=1, default_missing_value = "cid=3", help_heading = "Consoles and devices")]
    pub vsock: Option<VsockConfig>,
    /// Run in the background. Exit with 0 when the VM is running, or with 2 and the reason if it
    /// cannot start.
    #[arg(long, help_heading = "Operation")]
    pub daemonize: bool,
    /// Append messages to this file instead of writing them to standard error.
    #[arg(long, value_name = "FILE", help_heading = "Operation")]
    pub log_file: Option<PathBuf>,
    /// Listen for gdb (`target remote SOCKET`); with wait, the vCPUs start when gdb connects.
    #[arg(long, value_name = "SOCKET[,wait]", value_parser = parse_gdb, help_heading = "Operation")]
    pub gdb: Option<GdbConfig>,
    /// Read options from a TOML file; its keys are the names of these options. Options on the
    /// command line take precedence.
    #[arg(long, value_name = "FILE", help_heading = "Operation")]
    pub config: Option<PathBuf>,
    /// Print these options as a file for --config and exit.
    #[arg(long, help_heading = "Operation")]
    pub dump_config: bool,
    /// Select what happens if a thread of the VM makes a system call that it does not need: on (the
    /// VM is terminated), log (the kernel logs the call) or off (no filter).
    #[arg(long, value_name = "MODE", default_value = "on", help_heading = "Isolation")]
    pub seccomp: sandbox::SeccompMode,
    /// Restrict the running VM to the host files that it needs, with landlock if the kernel
    /// supports it: on or off.
    #[arg(long, value_name = "ON|OFF", default_value = "on", action = clap::ArgAction::Set, value_parser = parse_on_off, help_heading = "Isolation")]
    pub landlock: bool,
    /// Run the VM in separate namespaces, without network and with only the files that --landlock
    /// allows. For root, uid=N and gid=N [default: uid's number] set the user and group. cgroup=DIR
    /// joins an existing cgroup v2 directory, fsize=SIZE limits the size of written files,
    /// no-file=N the number of descriptors.
    #[arg(long, value_name = "uid=N[,gid=N][,cgroup=DIR][,fsize=SIZE][,no-file=N]", num_args = 0..=1, default_missing_value = "", help_heading = "Isolation")]
    pub jail: Option<JailConfig>,
    /// Print statistics of each vCPU and its PMU to standard error at exit.
    #[arg(long, help_heading = "Operation")]
    pub stats: bool,
    /// The options that determine the machine, for snapshots.
    #[arg(skip)]
    pub machine_options: BTreeMap<String, String>,
}

/// Text that the program prints before it exits without executing a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CliEarlyExit {
    /// Help or version text for standard output. The exit status is 0.
    Text(String),
    /// One-line error message for standard error. The exit status is 2.
    Error(String),
}

/// Parses the command line `args`, which starts with the program name.
pub fn parse<I, T>(args: I) -> Result<Cli, CliEarlyExit>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString> + Clone,
{
    let args = named_by_program(args.into_iter().map(Into::into).collect());
    parse_run(&args).map_or_else(|| parse_any(args), Ok)
}

/// Inserts the command `firecracker` or `jailer` if the name of the program contains it, as in
/// `firecracker-v1.17.0`.
fn named_by_program(mut args: Vec<OsString>) -> Vec<OsString> {
    let program = args.first().map(std::path::Path::new);
    let name = program.and_then(std::path::Path::file_name);
    let name = name.map(std::ffi::OsStr::to_string_lossy).unwrap_or_default();
    let command = ["firecracker", "jailer"]
        .into_iter()
        .find(|word| name.contains(word));
    if let Some(command) = command {
        args.insert(1, command.into());
    }
    args
}

/// Parses a valid `run` command line without building the clap description of all commands, which
/// would delay the start of the guest.
///
/// Returns `None` for other commands, for `--config`, and for invalid arguments.
fn parse_run(args: &[OsString]) -> Option<Cli> {
    let mut words = args.iter().skip(1).map(|arg| arg.to_str());
    let verbose = |word: &&str| word.starts_with("-v") || *word == "--verbose";
    let first = words.find(|word| !word.as_ref().is_some_and(verbose))?;
    let of_a_file = |word: Option<&str>| {
        word.is_some_and(|word| word.starts_with("--config") || word.starts_with("--dump-config"))
    };
    if first != Some("run") || words.any(of_a_file) {
        return None;
    }
    let command = GlobalOptions::augment_args(clap::Command::new("perfvisor").disable_help_subcommand(true))
        .subcommand(RunArgs::augment_args(clap::Command::new("run")));
    let command = with_negative_numbers(perf_options::add_accepted_options(command));
    let matches = command.try_get_matches_from(args).ok()?;
    let mut cli = Cli::from_arg_matches(&matches).ok()?;
    restore::keep_machine_options(&mut cli, &matches);
    Some(cli)
}

fn parse_any(args: Vec<OsString>) -> Result<Cli, CliEarlyExit> {
    let command = with_examples(command());
    let wrong = |e| CliEarlyExit::Error(one_line(&error_line(&e)));
    let mut args = args;
    // `help record` is an alias of `record --help`, as in many programs.
    if args.get(1).is_some_and(|word| word == "help") {
        args.remove(1);
        args.push("--help".into());
    }
    let explain_ctl_order = ctl_order::explain(&command, &args);
    let (named, path) = named_command(&command, &args);
    let words = args.clone();
    let ExpandedArgs { args, from_file } = config::expand(&command, args).map_err(wrong)?;
    let explained = |e: clap::Error| match (condense_error(&e, named, &path, &words), &from_file) {
        (CliEarlyExit::Error(_), _) if explain_ctl_order.is_some() => {
            CliEarlyExit::Error(explain_ctl_order.clone().unwrap_or_default())
        }
        (CliEarlyExit::Error(line), Some((path, keys))) if mentions_any_option(&e, keys) => {
            CliEarlyExit::Error(format!("{}: {line}", path.display()))
        }
        (other, _) => other,
    };
    let matches = command.clone().try_get_matches_from(args).map_err(explained)?;
    let mut cli = Cli::from_arg_matches(&matches).map_err(explained)?;
    restore::keep_machine_options(&mut cli, &matches);
    if let CliCommand::Run(run) = &cli.command
        && run.dump_config
        && let Some((_, given)) = matches.subcommand()
    {
        return Err(CliEarlyExit::Text(config::dump(&command, given).map_err(wrong)?));
    }
    Ok(cli)
}

/// Returns whether `error` is about one of `options` or about a conflict with one of them.
fn mentions_any_option(error: &clap::Error, options: &[String]) -> bool {
    if matches!(
        error.kind(),
        ErrorKind::MissingRequiredArgument | ErrorKind::ArgumentConflict
    ) {
        return true;
    }
    let named = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(name)) => name.as_str(),
        _ => return false,
    };
    // Strips the value name, as in `--cpus <N>`.
    let long = named.split([' ', '=']).next().unwrap_or_default();
    options
        .iter()
        .any(|option| long.strip_prefix("--") == Some(option))
}

#[cfg(test)]
mod tests;
