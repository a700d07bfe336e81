//! `perfvisor exits`: shows VM exits by reason, like `perf kvm stat live`.
//!
//! The output has three separate sources. The VM counts and times the exits to user space while
//! this command runs. KVM's statistics count all exits, including exits to user space, but contain
//! no times. KVM's tracepoints time all exits, if the user has permission to trace.

pub(super) mod sums;
mod table;
mod trace;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;

use super::migrate::find_moved;
use super::select::name_or_pid;
use super::{DONE, OperatorCommandError, WaitResult, connect, is_reader_closed, print, wait_until};
use crate::exit::ExitStatus;
use crate::signals::StopSignals;
use crate::values::parse_seconds;
use control_api::client::{Client, ClientError};
use control_api::protocol::{EventReading, OpenedEvent, VcpuExits};
use control_api::request;
use perf_core::error_line;
use sums::{ExitMaxima, ExitReading, ExitTotals, KvmStatistic};
use trace::{ExitTrace, TraceError};

/// Interval at which the exits are read. If the VM terminates, the last reading is displayed.
const READ_INTERVAL: Duration = Duration::from_millis(250);
/// Interval at which the tracepoint rings are drained.
const DRAIN_INTERVAL: Duration = Duration::from_millis(50);
/// Names of KVM's vCPU statistics about exits and their handling. Statistics that the host's KVM
/// lacks are omitted from the output.
const STATISTICS: [&str; 19] = [
    "exits",
    "io_exits",
    "mmio_exits",
    "halt_exits",
    "irq_exits",
    "irq_window_exits",
    "nmi_window_exits",
    "request_irq_exits",
    "signal_exits",
    "hypercalls",
    "insn_emulation",
    "insn_emulation_fail",
    "invlpg",
    "irq_injections",
    "nmi_injections",
    "pf_taken",
    "pf_fast",
    "pf_spurious",
    "tlb_flush",
];

/// `perfvisor exits`.
#[derive(Clone, Debug, Args)]
pub struct ExitsArgs {
    /// Name of the VM [default: the only running VM]
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Use the VM's control socket at this path instead of a name.
    #[arg(long, value_name = "PATH", conflicts_with = "name")]
    pub socket: Option<PathBuf>,
    /// Select the VM that this process runs, instead of a name.
    #[arg(short, long, value_name = "PID", conflicts_with_all = ["name", "socket"])]
    pub pid: Option<u32>,
    /// Print the exits of each interval of this many seconds, and the total.
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub interval: Option<Duration>,
    /// Stop after this time [default: observe until Ctrl-C]
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Print a line for each vCPU and reason.
    #[arg(short = 'A', long)]
    pub per_vcpu: bool,
    /// Do not use KVM's tracepoints to time exits. The kernel writes two trace records per exit.
    #[arg(long)]
    pub no_trace: bool,
    /// Print JSON objects, for programs: one per interval and one with the total.
    #[arg(short, long)]
    pub json: bool,
}

/// Displays the exits of a VM.
///
/// # Errors
/// Returns [`OperatorCommandError`] if the VM cannot be observed.
pub fn exits(args: &ExitsArgs) -> Result<ExitStatus, OperatorCommandError> {
    let signals = StopSignals::block().map_err(OperatorCommandError::Signals)?;
    let name = name_or_pid(args.name.as_deref(), args.pid);
    let mut vm = ObservedVm::begin(connect(name.as_deref(), args.socket.as_deref())?, args)?;
    let start = Instant::now();
    let end = args.duration.map(|d| start + d);
    let mut next = args.interval.map(|i| start + i);
    let (mut printed_at, mut since) = (Duration::ZERO, ExitTotals::default());
    loop {
        let look = Instant::now() + READ_INTERVAL;
        let until = [end, next].into_iter().flatten().fold(look, Instant::min);
        let woken = loop {
            let drain = if vm.trace.is_ok() {
                Instant::now() + DRAIN_INTERVAL
            } else {
                until
            };
            let woken = wait_until(drain.min(until), &signals);
            if woken == WaitResult::Signal || Instant::now() >= until {
                break woken;
            }
            if let Ok(trace) = &mut vm.trace {
                trace.drain();
            }
        };
        let now = Instant::now();
        let over = woken == WaitResult::Signal || end.is_some_and(|end| now >= end) || is_reader_closed();
        let gone = !vm.read_exits(args)?;
        let at = now.duration_since(start);
        if let (Some(due), Some(interval)) = (next, args.interval)
            && (now >= due || over || gone)
        {
            let grown = vm
                .total
                .difference_since(&since, &std::mem::take(&mut vm.longest));
            let length = at.saturating_sub(printed_at);
            show(&grown, args, at, length, OutputSection::Interval)?;
            since = vm.total.clone();
            printed_at = at;
            next = Some((due + interval).max(now));
        }
        if over || gone {
            show(&vm.total, args, at, at, OutputSection::Total)?;
            if !args.json {
                print(&vm.watch.remarks(&vm.total, &vm.trace))?;
            }
            if gone {
                let ms = READ_INTERVAL.as_millis();
                log::warn!("the VM has exited; the counts are at most {ms} ms older than its end");
            }
            return Ok(DONE);
        }
    }
}

/// A VM whose exits are observed. The observation continues when the VM moves to another process.
struct ObservedVm {
    client: Client,
    watch: ExitObserver,
    trace: Result<ExitTrace, TraceError>,
    /// Exits counted in the processes in which the VM ran before it moved to the current one.
    former_totals: ExitTotals,
    /// Exits counted in the VM's current process.
    present: ExitTotals,
    /// Exits counted in all processes of the VM: the sum of `left` and `present`.
    total: ExitTotals,
    /// Maximum durations of exits since the last output.
    longest: ExitMaxima,
}

impl ObservedVm {
    fn begin(mut client: Client, args: &ExitsArgs) -> Result<Self, OperatorCommandError> {
        let watch = ExitObserver::begin(&mut client)?;
        let trace = if args.no_trace {
            Err(TraceError::NotWanted)
        } else {
            ExitTrace::begin(client.info().pid)
        };
        Ok(Self {
            client,
            watch,
            trace,
            former_totals: ExitTotals::default(),
            present: ExitTotals::default(),
            total: ExitTotals::default(),
            longest: ExitMaxima::default(),
        })
    }

    /// Reads the exits of the VM. If the VM has moved, continues in the destination process
    /// instead. Returns `false` if the VM has exited.
    fn read_exits(&mut self, args: &ExitsArgs) -> Result<bool, OperatorCommandError> {
        match self.watch.read_exits(&mut self.client) {
            Ok(mut seen) => {
                seen.traced = self.trace.as_mut().map(ExitTrace::read_exits).unwrap_or_default();
                self.present.update_from(seen, &mut self.longest);
                self.total = self.former_totals.plus(&self.present);
                Ok(true)
            }
            Err(ref e) if e.is_gone() => self.follow(args),
            Err(e) => Err(e.into()),
        }
    }

    /// Continues the observation in the destination process if the VM has moved. Returns `false` if
    /// the VM has not moved.
    fn follow(&mut self, args: &ExitsArgs) -> Result<bool, OperatorCommandError> {
        let Some(moved) = find_moved(&self.client) else {
            return Ok(false);
        };
        let there = Self {
            former_totals: self.total.clone(),
            total: self.total.clone(),
            longest: std::mem::take(&mut self.longest),
            ..Self::begin(moved, args)?
        };
        let left = std::mem::replace(self, there);
        let (from, to) = (left.client.info(), self.client.info());
        log::warn!(
            "{} has moved to process {} as {}; its exits in the last {} ms there are not counted",
            from.name,
            to.pid,
            to.name,
            READ_INTERVAL.as_millis()
        );
        Ok(true)
    }
}

/// Period that the output covers: one interval or the whole observation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OutputSection {
    Interval,
    Total,
}

fn show(
    exits: &ExitTotals,
    args: &ExitsArgs,
    at: Duration,
    length: Duration,
    part: OutputSection,
) -> Result<(), OperatorCommandError> {
    let exits = if args.per_vcpu {
        exits.clone()
    } else {
        exits.summed()
    };
    let text = if args.json {
        table::json(&exits, part == OutputSection::Total, at, length)
    } else {
        let when = match part {
            OutputSection::Interval => format!("{:.3} s", at.as_secs_f64()),
            OutputSection::Total => format!("all of {:.3} s", length.as_secs_f64()),
        };
        table::text(&exits, &when, length)
    };
    Ok(print(&text)?)
}

/// Reader of a VM's exits. Reads KVM's statistics, which are opened as events, and the VM's own
/// exit statistics.
pub(super) struct ExitObserver {
    statistics: Vec<OpenedEvent>,
    /// Reason KVM's statistics are unavailable.
    no_statistics: Option<String>,
}

impl ExitObserver {
    /// Opens KVM's statistics as events and starts the VM's own exit statistics.
    ///
    /// # Errors
    /// Returns an error if the VM does not answer.
    pub(super) fn begin(client: &mut Client) -> Result<Self, OperatorCommandError> {
        let list = STATISTICS.map(|name| format!("kvm:{name}"));
        let opened = client.call(request::Open {
            events: list.join(","),
            vcpus: None,
            whole: true,
            sampling: None,
        });
        let watch = match opened {
            Ok(opened) => {
                let () = client.call(request::Enable)?;
                let none = opened.iter().all(|o| o.handle.is_none());
                let why = opened.iter().find_map(|o| o.unsupported.clone());
                Self {
                    no_statistics: why.filter(|_| none),
                    statistics: opened,
                }
            }
            Err(ClientError::Refused(why)) => Self {
                statistics: Vec::new(),
                no_statistics: Some(why.message),
            },
            Err(e) => return Err(e.into()),
        };
        let _: Vec<VcpuExits> = client.call(request::Exits)?;
        Ok(watch)
    }

    /// Returns the exits since the start of the observation.
    fn read_exits(&mut self, client: &mut Client) -> Result<ExitReading, ClientError> {
        let readings = client.call(request::Read)?;
        self.with(&readings, client)
    }

    /// Returns the exits since the start of the observation. `readings` are the current readings of
    /// all events of the connection, from which KVM's statistics are taken.
    ///
    /// # Errors
    /// Returns an error if the VM does not answer.
    pub(super) fn with(
        &mut self,
        readings: &[EventReading],
        client: &mut Client,
    ) -> Result<ExitReading, ClientError> {
        let ours = client.call(request::Exits)?;
        let of = |name: &OpenedEvent| {
            let reading = readings.iter().find(|r| Some(r.handle) == name.handle)?;
            Some(KvmStatistic::of(&name.name, reading))
        };
        Ok(ExitReading {
            user_exits: ours,
            kvms: self.statistics.iter().filter_map(of).flatten().collect(),
            traced: Vec::new(),
        })
    }

    /// Returns notes for the user about missing or incomplete exit data.
    fn remarks(&self, total: &ExitTotals, trace: &Result<ExitTrace, TraceError>) -> String {
        let mut out = String::from("\n");
        let untimed = total.untimed();
        if untimed > 0 {
            out += &format!(
                " {untimed} of Perfvisor's exits were not timed: the VM was paused in them, or they are being served.\n"
            );
        }
        out += " Times of exits to Perfvisor are from the return of KVM_RUN to the next; the host kernel's part is not in them.\n";
        if let Some(why) = &self.no_statistics {
            out += &format!(" KVM's exits are not counted by its statistics: {why}\n");
        }
        match trace {
            Ok(trace) if total.traced.is_empty() => {
                out += " KVM's exits are not timed: this KVM's tracepoints showed none.\n";
                out += &trace.remarks();
            }
            Ok(trace) => {
                out +=
                    " Times of KVM's exits are until it enters the guest again, Perfvisor's part included.\n";
                out += &trace.remarks();
            }
            Err(why) => out += &format!(" KVM's exits are not timed: {}\n", error_line(why)),
        }
        out
    }
}
