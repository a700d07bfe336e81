//! What `record` is asked for.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::super::files::SymbolArgs;
use super::remote::Pipes;
use crate::values::{VcpuList, parse_output, parse_seconds, parse_vcpus, whole};
use control_api::protocol::Sampling;
use guest_profile::export::build_id_dir::BuildIdDir;

/// Samples a second when nothing is asked for.
const DEFAULT_FREQUENCY_HZ: u64 = 1000;
/// Samples a second that stop the vCPU when nothing is asked for: at 65 µs each, about 0.3 % of its time.
const DEFAULT_CHAINS_HZ: u64 = 50;
/// One sample of so many stops the vCPU when nothing is asked for and samples are taken by period.
const DEFAULT_CHAIN_EVERY: u32 = 20;

/// `perfvisor record`.
#[derive(Clone, Debug, Args)]
pub struct RecordArgs {
    /// The VM; may be left out when only one is running.
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// The VM's control socket, wherever it is, in place of its name.
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub socket: Option<PathBuf>,
    /// Events in perf's syntax.
    #[arg(short, long = "event", value_name = "LIST", default_value = "cycles")]
    pub events: String,
    /// A sample every so many events.
    #[arg(short = 'c', long = "count", value_name = "N", value_parser = whole(1..=(1 << 62) - 1))]
    pub period: Option<u64>,
    /// So many samples a second on each vCPU [default: 1000]
    #[arg(short = 'F', long = "freq", value_name = "HZ", conflicts_with = "period", value_parser = whole(1..=(1 << 32) - 1))]
    pub frequency: Option<u64>,
    /// The guest's call chain with each sample: fp (the kernel's by its unwind tables or frame pointers, the
    /// program's by frame pointers) or none.
    #[arg(long, value_name = "HOW", default_value = "fp", value_parser = ["fp", "none"])]
    pub call_graph: String,
    /// The call chain, and task, with every N-th sample only; the instruction pointer of the others is taken
    /// by the host's kernel, without stopping the vCPU. 1 stops it for every sample [default: about 50
    /// chains a second, fewer where they would hold the vCPU for more than 0.5 % of its time, or every
    /// 20th sample with -c]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub chain_every: Option<u32>,
    /// Where names come from; without, from the guest's memory.
    #[command(flatten)]
    pub symbols: SymbolArgs,
    /// Write a file that shows the guest as a guest, for perf kvm, instead of one as if perf had recorded
    /// inside it.
    #[arg(long)]
    pub as_host: bool,
    /// Where perf looks for symbols by build-id: the guest kernel's are put there and, with --guestmount, the
    /// guest's programs [default: perf's own, ~/.debug]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["as_host", "no_buildid_cache"])]
    pub buildid_dir: Option<PathBuf>,
    /// Put nothing where perf looks for symbols.
    #[arg(short = 'N', long)]
    pub no_buildid_cache: bool,
    /// Write the guest kernel's symbols, as found in its memory, to FILE: what perf wants with --kallsyms, or
    /// with --guestkallsyms for a file made with --as-host.
    #[arg(long, value_name = "FILE")]
    pub save_kallsyms: Option<PathBuf>,
    /// Only these vCPUs, as in 0,2-3.
    #[arg(long, value_name = "LIST", value_parser = parse_vcpus)]
    pub vcpu: Option<VcpuList>,
    /// The file to write. One that is there is kept as FILE.old.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data", value_parser = parse_output)]
    pub output: PathBuf,
    /// How long to record; until Ctrl-C if not given.
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Begin to sample only after so many milliseconds; -1: when --control says so.
    #[arg(short = 'D', long, value_name = "MS", allow_negative_numbers = true, default_value_t = 0, hide_default_value = true,
          value_parser = clap::value_parser!(i64).range(-1..1 << 40))]
    pub delay: i64,
    /// Follow the words enable, disable, stop and ping that come as lines through a pipe; each is answered
    /// with a line, ack, if a second pipe is given. As with perf: fifo:CTL,ACK
    #[arg(long, value_name = "PIPES")]
    pub control: Option<Pipes>,
    /// Pages of each vCPU's ring, a power of two.
    #[arg(short, long, value_name = "PAGES", default_value = "256")]
    pub mmap_pages: u32,
    /// Say nothing but errors.
    #[arg(short, long)]
    pub quiet: bool,
}

impl RecordArgs {
    /// Where symbols are put for perf.
    pub(super) fn for_perf(&self) -> Option<BuildIdDir> {
        if self.as_host || self.no_buildid_cache {
            return None;
        }
        self.buildid_dir
            .as_ref()
            .map(BuildIdDir::new)
            .or_else(BuildIdDir::of_user)
    }

    pub(super) fn sampling(&self) -> Sampling {
        let rate = self.period.or(self.frequency).unwrap_or(DEFAULT_FREQUENCY_HZ);
        let by_default = match self.period {
            Some(_) => DEFAULT_CHAIN_EVERY,
            None => u32::try_from(rate / DEFAULT_CHAINS_HZ).unwrap_or(u32::MAX).max(1),
        };
        Sampling {
            rate,
            frequency: self.period.is_none(),
            callchain: self.call_graph == "fp",
            chain_every: self.chain_every.unwrap_or(by_default),
        }
    }
}
