//! Arguments of `perfvisor stat`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::values::{
    VcpuList, integer_in_range, parse_interval, parse_seconds, parse_separator, parse_vcpus,
};

/// Default events.
const DEFAULT_EVENTS: &str = "task-clock,context-switches,cpu-migrations,page-faults,cycles,instructions,branches,branch-misses,kvm:exits";

/// `perfvisor stat`.
#[derive(Clone, Debug, Args)]
pub struct StatArgs {
    /// The VM; may be left out when only one is running.
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// The VM's control socket, wherever it is, in place of its name.
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub socket: Option<PathBuf>,
    /// The VM that this process runs, in place of its name.
    #[arg(short, long, value_name = "PID", conflicts_with_all = ["name", "socket", "all"])]
    pub pid: Option<u32>,
    /// Each VM of this host that can be reached, as perfvisor ps --all lists them.
    #[arg(long, conflicts_with_all = ["name", "socket", "guest_view"])]
    pub all: bool,
    /// Each VM of this host whose process is in this control group or in one below it.
    #[arg(short = 'G', long, value_name = "CGROUP", conflicts_with_all = ["name", "socket", "pid", "all", "guest_view"])]
    pub cgroup: Option<String>,
    /// Events in perf's syntax: names (perfvisor list shows them), {groups}, modifiers, rNNN,
    /// cpu/event=N,umask=N/, kvm:STATISTIC, pv/NAME/.
    #[arg(short, long = "event", value_name = "LIST", default_value = DEFAULT_EVENTS)]
    pub events: String,
    /// How long to count; until Ctrl-C if not given.
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// A line for each vCPU and event.
    #[arg(short = 'A', long, visible_alias = "no-aggr")]
    pub per_vcpu: bool,
    /// Only these vCPUs, as in 0,2-3.
    #[arg(short = 'C', long, visible_alias = "cpu", value_name = "LIST", value_parser = parse_vcpus)]
    pub vcpu: Option<VcpuList>,
    /// Print what was counted in each interval of so many milliseconds.
    #[arg(short = 'I', long, visible_alias = "interval-print", value_name = "MS", value_parser = parse_interval)]
    pub interval: Option<Duration>,
    /// Print fields with this separator, for programs.
    #[arg(short = 'x', long, value_name = "SEPARATOR", conflicts_with = "json", value_parser = parse_separator)]
    pub field_separator: Option<String>,
    /// Print JSON objects, for programs.
    #[arg(short, long)]
    pub json: bool,
    /// Measure so many times; print the mean and its error. Needs --duration.
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = integer_in_range(1..=10_000u32))]
    pub repeat: u32,
    /// Print what is derived from counts only: instructions per cycle, shares of misses, GHz.
    #[arg(long)]
    pub metric_only: bool,
    /// Show what the guest has programmed into its PMU instead.
    #[arg(long, conflicts_with_all = ["events", "duration", "interval", "field_separator", "repeat", "metric_only"])]
    pub guest_view: bool,
}
