//! Arguments of `perfvisor top`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::super::files::SymbolArgs;
use crate::values::{VcpuList, integer_in_range, parse_seconds, parse_vcpus};

/// `perfvisor top`.
#[derive(Clone, Debug, Args)]
pub struct TopArgs {
    /// The VM; may be left out when only one is running.
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// The VM's control socket, wherever it is, in place of its name.
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub socket: Option<PathBuf>,
    /// The VM that this process runs, in place of its name.
    #[arg(short, long, value_name = "PID", conflicts_with_all = ["name", "socket", "all"])]
    pub pid: Option<u32>,
    /// Each VM of this host that can be reached, as perfvisor ps --all lists them; those that come later too.
    #[arg(long, conflicts_with_all = ["name", "socket"])]
    pub all: bool,
    /// The event to sample, in perf's syntax; perfvisor list shows the names.
    #[arg(short, long = "event", value_name = "EVENT", default_value = "cycles")]
    pub event: String,
    /// So many samples a second on each vCPU; each takes it out of the guest.
    #[arg(short = 'F', long = "freq", value_name = "HZ", default_value = "250", value_parser = integer_in_range(1..=(1u64 << 32) - 1))]
    pub frequency: u64,
    /// Between two screens.
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = parse_seconds)]
    pub delay: Duration,
    /// Only these vCPUs, as in 0,2-3.
    #[arg(short = 'C', long, visible_alias = "cpu", value_name = "LIST", value_parser = parse_vcpus)]
    pub vcpu: Option<VcpuList>,
    /// Print one screen as text after one delay. So it is too when the output is no terminal.
    #[arg(long, visible_alias = "plain")]
    pub once: bool,
    /// Leave the mouse to the terminal, which can then select text as usual.
    #[arg(long)]
    pub no_mouse: bool,
    /// Where names come from; without, from the guest's memory.
    #[command(flatten)]
    pub symbols: SymbolArgs,
}
