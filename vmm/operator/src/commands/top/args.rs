//! Arguments of `perfvisor top`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::super::files::SymbolArgs;
use crate::values::{VcpuList, integer_in_range, parse_seconds, parse_vcpus};

/// `perfvisor top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// Name of the VM [default: the only running VM]
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Use the VM's control socket at this path instead of a name.
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub socket: Option<PathBuf>,
    /// Select the VM that this process runs, instead of a name.
    #[arg(short, long, value_name = "PID", conflicts_with_all = ["name", "socket", "all"])]
    pub pid: Option<u32>,
    /// Show every VM of this host that can be reached (see perfvisor ps --all), including VMs that
    /// start later.
    #[arg(long, conflicts_with_all = ["name", "socket"])]
    pub all: bool,
    /// Select the event to sample, in perf's syntax; perfvisor list shows the names.
    #[arg(short, long = "event", value_name = "EVENT", default_value = "cycles")]
    pub event: String,
    /// Set the sampling frequency per vCPU, in Hz. Each sample stops the vCPU.
    #[arg(short = 'F', long = "freq", value_name = "HZ", default_value = "250", value_parser = integer_in_range(1..=(1u64 << 32) - 1))]
    pub frequency: u64,
    /// Set the time between two screens.
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub delay: Duration,
    /// Select vCPUs, for example 0,2-3 [default: all]
    #[arg(short = 'C', long, visible_alias = "cpu", value_name = "LIST", value_parser = parse_vcpus)]
    pub vcpu: Option<VcpuList>,
    /// Print one screen as text after one delay. Default if the output is not a terminal.
    #[arg(long, visible_alias = "plain")]
    pub once: bool,
    /// Do not capture the mouse, so that the terminal can select text.
    #[arg(long)]
    pub no_mouse: bool,
    /// Sources of symbols; the guest's memory by default.
    #[command(flatten)]
    pub symbols: SymbolArgs,
}
