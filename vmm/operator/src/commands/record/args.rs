//! Arguments of `perfvisor record`.
#![allow(
    rustdoc::broken_intra_doc_links,
    reason = "comments of arguments are help texts, in which brackets mean optional parts"
)]

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;

use super::super::files::SymbolArgs;
use super::branches::{BranchFilterArg, BranchOverhead, branch_stacks};
use super::error::RecordError;
use super::remote::ControlPipes;
use super::switch::OutputSwitchTrigger;
use crate::values::{VcpuList, integer_in_range, parse_bytes, parse_output, parse_seconds, parse_vcpus};
use control_api::protocol::SamplingParams;
use guest_profile::export::build_id_dir::BuildIdDir;
use perf_core::attr::STACK_USER_MAX;
use perf_core::branch::MAX_BRANCH_DEPTH;

/// Default sampling frequency of `perfvisor record`, in Hz.
const DEFAULT_FREQUENCY_HZ: u64 = 1000;
/// Default sampling frequency of `perfvisor record` with branch stacks, in Hz.
const DEFAULT_BRANCH_HZ: u64 = 100;
/// Default frequency of samples that stop the vCPU, in Hz. At about 65 µs per sample, these samples
/// take about 0.3 % of the vCPU's time.
const DEFAULT_CHAINS_HZ: u64 = 50;
/// Default number of samples per sample that stops the vCPU, for a recording with a sampling
/// period.
const DEFAULT_CHAIN_EVERY: u32 = 20;

/// Default size of the user stack copy in a sample, in bytes, as in perf.
const DEFAULT_STACK_BYTES: u32 = 8192;

/// The unwinding method for user call chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallGraph {
    /// No call chains, neither of user space nor of the kernel.
    None,
    /// Frame pointers.
    Fp,
    /// DWARF unwind tables, applied to a copy of the user stack. The value is the size of the copy,
    /// in bytes.
    Dwarf(u32),
}

/// Error returned when a call graph mode cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallGraphError {
    #[error("must be fp, dwarf, dwarf,SIZE or none")]
    Word,
    #[error("the stack size must be between 8 and {STACK_USER_MAX} bytes")]
    Size,
}

impl FromStr for CallGraph {
    type Err = CallGraphError;

    fn from_str(text: &str) -> Result<Self, CallGraphError> {
        match text.split_once(',') {
            None if text == "fp" => Ok(Self::Fp),
            None if text == "none" => Ok(Self::None),
            None if text == "dwarf" => Ok(Self::Dwarf(DEFAULT_STACK_BYTES)),
            Some(("dwarf", size)) => size
                .parse()
                .ok()
                .filter(|size| (8..=STACK_USER_MAX).contains(size))
                // Round up to a multiple of 8, as in perf.
                .map(|size: u32| Self::Dwarf(size.next_multiple_of(8)))
                .ok_or(CallGraphError::Size),
            _ => Err(CallGraphError::Word),
        }
    }
}

/// `perfvisor record`.
#[derive(Clone, Debug, Args)]
pub struct RecordArgs {
    /// Name of the VM [default: the only running VM]
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Use the VM's control socket at this path instead of a name.
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub socket: Option<PathBuf>,
    /// Select the VM that this process runs, instead of a name.
    #[arg(short, long, value_name = "PID", conflicts_with_all = ["name", "socket", "all"])]
    pub pid: Option<u32>,
    /// Record every VM of this host that can be reached (see perfvisor ps --all), each to
    /// FILE.NAME.
    #[arg(long, conflicts_with_all = ["name", "socket", "control", "save_kallsyms"])]
    pub all: bool,
    /// Select events in perf's syntax; perfvisor list shows their names.
    #[arg(short, long = "event", value_name = "LIST", default_value = "cycles")]
    pub events: String,
    /// Sample every N events.
    #[arg(short = 'c', long = "count", value_name = "N", value_parser = integer_in_range(1..=(1u64 << 62) - 1))]
    pub period: Option<u64>,
    /// Set the sampling frequency per vCPU, in Hz [default: 1000; 100 with branch stacks]
    #[arg(short = 'F', long = "freq", value_name = "HZ", conflicts_with = "period", value_parser = integer_in_range(1..=(1u64 << 32) - 1))]
    pub frequency: Option<u64>,
    /// Unwind call chains by frame pointers, like --call-graph fp. Needed only with branch stacks.
    #[arg(short = 'g')]
    pub frame_pointers: bool,
    /// Select how call chains are unwound: fp (frame pointers in programs, unwind tables or frame
    /// pointers in the kernel; also -g), dwarf[,SIZE] (programs by .eh_frame unwind tables, with
    /// SIZE bytes of stack in each sample, 8192 by default) or none [default: fp; none with branch
    /// stacks]
    #[arg(long, value_name = "HOW")]
    pub call_graph: Option<CallGraph>,
    /// Record the call chain and the task only with every Nth sample. For the other samples, the
    /// host's kernel records the instruction pointer without stopping the vCPU; 1 stops the vCPU
    /// for each sample [default: about 50 chains a second, fewer if they would stop the vCPU for
    /// more than 0.5 % of its time; with -c every 20th sample]
    #[arg(long, value_name = "N", value_parser = integer_in_range(1..=1_000_000u32))]
    pub chain_every: Option<u32>,
    /// Record the branches that the vCPU takes after each overflow, like -j any. The vCPU is
    /// single-stepped until it has taken enough branches.
    #[arg(short = 'b', long, conflicts_with_all = ["branch_filter", "chain_every"])]
    pub branch_any: bool,
    /// Record the branches that these words select, as in any,u: any, any_call, any_ret, ind_call,
    /// ind_jmp, call, cond; u and k for the privilege levels; save_type for the branch types.
    #[arg(short = 'j', long, value_name = "FILTER", conflicts_with = "chain_every")]
    pub branch_filter: Option<BranchFilterArg>,
    /// Maximum number of branches per sample, up to 64.
    #[arg(long, value_name = "N", default_value = "32", value_parser = integer_in_range(1..=MAX_BRANCH_DEPTH))]
    pub branch_depth: u16,
    /// Maximum share of a vCPU's run time that branch stacks may take. Fewer samples are taken if
    /// they would exceed it.
    #[arg(long, value_name = "PERCENT", default_value = "5%")]
    pub branch_overhead: BranchOverhead,
    /// Sources of symbols; the guest's memory by default.
    #[command(flatten)]
    pub symbols: SymbolArgs,
    /// Write a file for perf kvm, in which the guest appears as a guest, instead of a file like one
    /// recorded by perf in the guest.
    #[arg(long)]
    pub as_host: bool,
    /// Store the guest kernel's symbols, and with --guestmount the guest's programs, in this
    /// build-id directory [default: perf's own, ~/.debug]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["as_host", "no_buildid_cache"])]
    pub buildid_dir: Option<PathBuf>,
    /// Store nothing in the build-id directory.
    #[arg(short = 'N', long)]
    pub no_buildid_cache: bool,
    /// Write the guest kernel's symbols to FILE, for perf's option --kallsyms or, with --as-host,
    /// --guestkallsyms.
    #[arg(long, value_name = "FILE")]
    pub save_kallsyms: Option<PathBuf>,
    /// Select vCPUs, for example 0,2-3 [default: all]
    #[arg(short = 'C', long, visible_alias = "cpu", value_name = "LIST", value_parser = parse_vcpus)]
    pub vcpu: Option<VcpuList>,
    /// Write the recording to this file. An existing file is renamed to FILE.old.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data", value_parser = parse_output)]
    pub output: PathBuf,
    /// Stop after this time [default: record until Ctrl-C]
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Stop at this file size: bytes, or a number with K, M, G or T. The data in the rings is still
    /// written.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub max_size: Option<u64>,
    /// Continue in a new file on SIGUSR2 (signal), at a size (as in 100M) or after a time (as in
    /// 30s, 5m, 2h). The completed file is renamed to FILE.MILLISECONDS, with its end time in
    /// milliseconds since 1970 [default: signal]
    #[arg(long, value_name = "WHEN", num_args = 0..=1, require_equals = true, default_missing_value = "signal",
          conflicts_with_all = ["max_size", "all"])]
    pub switch_output: Option<OutputSwitchTrigger>,
    /// Keep only the newest N completed files of --switch-output.
    #[arg(long, value_name = "N", requires = "switch_output", value_parser = integer_in_range(1..=1_000_000usize))]
    pub switch_max_files: Option<usize>,
    /// Keep only the newest samples, as a flight recorder does. The rings overwrite the oldest
    /// samples and are written when --switch-output is due and at the end. Every sample stops the
    /// vCPU. Rings of --mmap-pages hold at least half of their size.
    #[arg(long, conflicts_with_all = ["chain_every", "max_size"])]
    pub overwrite: bool,
    /// Record when the host stops and continues the vCPUs' threads, for perf script
    /// --show-switch-events, which then shows the time stolen from the guest in addition to its
    /// samples.
    #[arg(long, conflicts_with = "overwrite")]
    pub switch_events: bool,
    /// Start sampling after this time, in milliseconds; with -1, when --control enables it
    /// [default: 0]
    #[arg(short = 'D', long, value_name = "MS", allow_negative_numbers = true, default_value_t = 0, hide_default_value = true,
          value_parser = integer_in_range(-1..=(1i64 << 40) - 1))]
    pub delay: i64,
    /// Read the commands enable, disable, stop and ping, one per line, from a pipe, and acknowledge
    /// them with "ack" on a second pipe, as perf does: fifo:CTL[,ACK]
    #[arg(long, value_name = "PIPES")]
    pub control: Option<ControlPipes>,
    /// Set the size of each vCPU's ring in pages, a power of two.
    #[arg(short, long, value_name = "PAGES", default_value = "256", value_parser = integer_in_range(0..=u32::MAX))]
    pub mmap_pages: u32,
    /// Print errors only.
    #[arg(short, long)]
    pub quiet: bool,
}

impl RecordArgs {
    /// Returns the unwinding method. As in perf, branch stacks alone have no call chains, because
    /// perf2bolt and other readers of branch stacks expect none.
    pub(super) fn call_graph(&self) -> CallGraph {
        self.call_graph.unwrap_or(match branch_stacks(self) {
            Some(_) if !self.frame_pointers => CallGraph::None,
            _ => CallGraph::Fp,
        })
    }

    /// Returns the build ID directory that perf uses for symbols.
    pub(super) fn for_perf(&self) -> Option<BuildIdDir> {
        if self.as_host || self.no_buildid_cache {
            return None;
        }
        self.buildid_dir
            .as_ref()
            .map(BuildIdDir::new)
            .or_else(BuildIdDir::of_user)
    }

    /// Checks that the trigger of `--switch-output` can occur with `--overwrite`.
    ///
    /// # Errors
    /// Returns [`RecordError::OverwriteBySize`] if the trigger is a size.
    pub(super) fn check_overwrite(&self) -> Result<(), RecordError> {
        match self.switch_output {
            Some(OutputSwitchTrigger::Size(_)) if self.overwrite => Err(RecordError::OverwriteBySize),
            _ => Ok(()),
        }
    }

    /// Checks that the rings have room for several samples with stack copies.
    ///
    /// # Errors
    /// Returns [`RecordError::SmallRings`] if the rings are too small.
    pub(super) fn check_ring_size(&self) -> Result<(), RecordError> {
        const PAGE_BYTES: u32 = 4096;
        let CallGraph::Dwarf(stack_bytes) = self.call_graph() else {
            return Ok(());
        };
        // Registers, call chain and mappings need at most one page.
        let least = (4 * (stack_bytes + PAGE_BYTES))
            .div_ceil(PAGE_BYTES)
            .next_power_of_two();
        if self.mmap_pages >= least {
            return Ok(());
        }
        Err(RecordError::SmallRings {
            stack_bytes,
            pages: self.mmap_pages,
            least,
        })
    }

    pub(super) fn sampling(&self) -> SamplingParams {
        let branches = branch_stacks(self);
        let default_hz = match branches {
            Some(_) => DEFAULT_BRANCH_HZ,
            None => DEFAULT_FREQUENCY_HZ,
        };
        let rate = self.period.or(self.frequency).unwrap_or(default_hz);
        let by_default = match self.period {
            // Only the VMM records branch stacks, so every sample stops the vCPU.
            _ if branches.is_some() => 1,
            Some(_) => DEFAULT_CHAIN_EVERY,
            None => u32::try_from(rate / DEFAULT_CHAINS_HZ).unwrap_or(u32::MAX).max(1),
        };
        SamplingParams {
            rate,
            frequency: self.period.is_none(),
            callchain: self.call_graph() != CallGraph::None,
            // With `--overwrite`, the VM takes every sample. Samples of the host kernel would need
            // a separate ring, which must be drained.
            chain_every: if self.overwrite {
                1
            } else {
                self.chain_every.unwrap_or(by_default)
            },
            stack_bytes: match self.call_graph() {
                CallGraph::Dwarf(bytes) => bytes,
                CallGraph::Fp | CallGraph::None => 0,
            },
            branches,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Only {
        #[command(flatten)]
        record: RecordArgs,
    }

    /// As in perf, branch stacks have call chains only on request, because perf2bolt cannot read
    /// branch stacks with call chains.
    #[test]
    fn branch_stacks_have_call_chains_on_request_only() {
        for (words, chains) in [
            (&[] as &[&str], CallGraph::Fp),
            (&["-g"], CallGraph::Fp),
            (&["-b"], CallGraph::None),
            (&["-j", "any,u"], CallGraph::None),
            (&["-b", "-g"], CallGraph::Fp),
            (&["-b", "-g", "--call-graph", "dwarf"], CallGraph::Dwarf(8192)),
            (&["-g", "--call-graph", "none"], CallGraph::None),
        ] {
            let args = Only::parse_from([&["record"], words].concat()).record;
            assert_eq!(args.call_graph(), chains, "{words:?}");
            assert_eq!(args.sampling().callchain, chains != CallGraph::None, "{words:?}");
        }
    }

    #[test]
    fn call_graph_modes_are_parsed_like_perf() {
        for (text, meant) in [
            ("fp", CallGraph::Fp),
            ("none", CallGraph::None),
            ("dwarf", CallGraph::Dwarf(8192)),
            ("dwarf,4096", CallGraph::Dwarf(4096)),
            ("dwarf,1001", CallGraph::Dwarf(1008)),
            ("dwarf,32768", CallGraph::Dwarf(32768)),
        ] {
            assert_eq!(text.parse(), Ok(meant), "{text}");
        }
        for (text, why) in [
            ("lbr", CallGraphError::Word),
            ("", CallGraphError::Word),
            ("fp,8", CallGraphError::Word),
            ("dwarf,", CallGraphError::Size),
            ("dwarf,0", CallGraphError::Size),
            ("dwarf,32769", CallGraphError::Size),
            ("dwarf,-8", CallGraphError::Size),
        ] {
            assert_eq!(text.parse::<CallGraph>(), Err(why), "{text}");
        }
    }
}
