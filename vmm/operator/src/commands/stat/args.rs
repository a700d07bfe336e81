//! Arguments of `perfvisor stat`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::ArgPredicate;

use crate::values::{
    VcpuList, integer_in_range, parse_interval, parse_seconds, parse_separator, parse_vcpus,
};

/// Value of `--backing` that requests exact counts by single-stepping.
pub(super) const EXACT: &str = "exact";
/// Default events of `perfvisor stat` with exact counts.
const EXACT_EVENTS: &str = "instructions,branches";
/// Default events of `perfvisor stat` without `--backing exact`.
const DEFAULT_EVENTS: &str = "task-clock,context-switches,cpu-migrations,page-faults,cycles,instructions,branches,branch-misses,kvm:exits";

/// `perfvisor stat`.
#[derive(Clone, Debug, Args)]
pub struct StatArgs {
    /// Name of the VM [default: the only running VM]
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Use the VM's control socket at this path instead of a name.
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub socket: Option<PathBuf>,
    /// Select the VM that this process runs, instead of a name.
    #[arg(short, long, value_name = "PID", conflicts_with_all = ["name", "socket", "all"])]
    pub pid: Option<u32>,
    /// Count every VM of this host that can be reached (see perfvisor ps --all).
    #[arg(long, conflicts_with_all = ["name", "socket", "guest_view"])]
    pub all: bool,
    /// Count every VM of this host whose process is in this control group or a descendant.
    #[arg(short = 'G', long, value_name = "CGROUP", conflicts_with_all = ["name", "socket", "pid", "all", "guest_view"])]
    pub cgroup: Option<String>,
    /// Select events in perf's syntax: names (see perfvisor list), {groups}, modifiers, rNNN,
    /// cpu/event=N,umask=N/, kvm:STATISTIC, pv/NAME/.
    #[arg(short, long = "event", value_name = "LIST", default_value = DEFAULT_EVENTS, default_value_if("backing", ArgPredicate::IsPresent, EXACT_EVENTS))]
    pub events: String,
    /// Stop after this time [default: count until Ctrl-C]
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Print a line for each vCPU and event.
    #[arg(short = 'A', long, visible_alias = "no-aggr")]
    pub per_vcpu: bool,
    /// Select vCPUs, for example 0,2-3 [default: all]
    #[arg(short = 'C', long, visible_alias = "cpu", value_name = "LIST", value_parser = parse_vcpus)]
    pub vcpu: Option<VcpuList>,
    /// Print the counts of each interval of this many milliseconds.
    #[arg(short = 'I', long, visible_alias = "interval-print", value_name = "MS", value_parser = parse_interval)]
    pub interval: Option<Duration>,
    /// Print fields with this separator, for programs.
    #[arg(short = 'x', long, value_name = "SEPARATOR", conflicts_with = "json", value_parser = parse_separator)]
    pub field_separator: Option<String>,
    /// Print JSON objects, for programs.
    #[arg(short, long)]
    pub json: bool,
    /// Restore this snapshot and count from there, in as many passes as the counters need to count
    /// all events without multiplexing. Requires --duration.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["name", "socket", "pid", "all", "cgroup", "interval", "guest_view"])]
    pub replay: Option<PathBuf>,
    /// Set to exact, with --replay, to count instructions and branches exactly by single-stepping
    /// the guest from the snapshot on. The snapshot must have one vCPU.
    #[arg(long, value_name = "BACKING", requires = "replay", conflicts_with_all = ["name", "socket", "pid", "all", "cgroup"], value_parser = [EXACT])]
    pub backing: Option<String>,
    /// Measure N times and print the mean with its standard error. Requires --duration. With
    /// --replay, 3 by default.
    #[arg(short, long, value_name = "N", default_value = "1", default_value_if("replay", ArgPredicate::IsPresent, "3"), value_parser = integer_in_range(1..=10_000u32))]
    pub repeat: u32,
    /// Print derived metrics only: instructions per cycle, miss ratios, GHz.
    #[arg(long)]
    pub metric_only: bool,
    /// Show how the guest has programmed its PMU instead of counting.
    #[arg(long, conflicts_with_all = ["events", "duration", "interval", "field_separator", "repeat", "metric_only"])]
    pub guest_view: bool,
}
