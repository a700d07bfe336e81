//! Measurements with perf in an unmodified Linux guest.
//!
//! The guest runs the script `validate` of its initrd, which reads commands from the console.
//! Programs are started through a *gate*, which stops each program at its start and at its end. The
//! host then reads the same counters, while perf counts exactly the program
//! (`perf stat --control`).

mod counting;
mod sampling;

use std::fmt::Write as _;
use std::time::Duration;

use super::child::{ChildVm, VmMeasurementError};
use super::guest::{OpenOperatorEvents, OperatorEventConfig, OperatorEventResults};
use super::judge::ExpectedCount;
use super::procfs::ThreadAccounting;
use super::report::{ValidationRowCollector, ValidationSummary};
use crate::host::StopRequestedCheck;
use crate::host::{HostProperties, LinuxFiles, ValidateOptions};
use crate::judge::whole;
use control_api::protocol::VcpuView;

/// Timeout for the guest's first line.
const START_TIMEOUT: Duration = Duration::from_secs(180);
/// Timeout for a command in the guest.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of output lines kept per command.
const MAX_OUTPUT_LINES: usize = 10_000;
/// Value to which Linux sets a counter that it uses for counting only. A 48-bit counter overflows
/// after 2^47 - 1 further counts.
const LINUX_START: u64 = (1 << 48) - ((1 << 47) - 1);
/// Returns the shell command that runs `perf stat` on `program`, which the guest's program `gate`
/// stops at its start and end. The output is first written to a file, because console output takes
/// time.
fn perf_stat(arguments: &str, program: &str) -> String {
    perf_stat_of(arguments, &format!("gate {program}"))
}

/// Returns the shell command that runs `perf stat` on `command`, which must start its program with
/// `gate`.
fn perf_stat_of(arguments: &str, command: &str) -> String {
    format!(
        "GATE_PERF=1 perf stat -D -1 --control fifo:/tmp/ctl,/tmp/ack -x, -o /tmp/stat {arguments} {command} \
         2>/dev/null; cat /tmp/stat"
    )
}

/// Parameters of the measurements with the Linux guest.
pub(super) struct Linux<'a> {
    pub options: &'a ValidateOptions,
    pub host: &'a HostProperties,
    pub signals: &'a StopRequestedCheck,
    pub files: &'a LinuxFiles,
}

/// A running Linux guest.
struct LinuxGuest {
    vm: ChildVm,
}

/// Output and exit status of a command in the guest.
#[derive(Debug, Default)]
struct CommandResult {
    text: String,
    status: i32,
    /// Readings at the start and end of the command's program; `None` if the command does not use
    /// `gate`.
    gate: Option<Gate>,
}

/// Readings at the start and end of a program that `gate` stops there, and the program's accounting
/// data in between.
#[derive(Debug)]
struct Gate {
    /// CPU time of the program in nanoseconds, according to the guest kernel.
    cpu_ns: u64,
    before: Vec<VcpuView>,
    after: Vec<VcpuView>,
    facts: Vec<ThreadAccounting>,
    operator: Option<OperatorEventResults>,
}

impl Linux<'_> {
    /// Runs all measurements with the Linux guest, and adds their rows to `rows`.
    pub(super) fn rows(
        &self,
        rows: &mut ValidationRowCollector<'_>,
        summary: &mut ValidationSummary,
    ) -> Result<(), VmMeasurementError> {
        let backing = if self.options.own_pmu {
            "kvm"
        } else if self.host.no_hardware.is_none() {
            "hardware"
        } else {
            "clock"
        };
        let mut guest = self.start(backing, "1", "")?;
        let first = |text: String| text.lines().next().unwrap_or_default().to_owned();
        summary.guest_kernel = Some(first(guest.run("kernel", "uname -sr", None)?.text));
        summary.guest_perf = Some(first(guest.run("perf", "perf --version", None)?.text));
        let amd = guest
            .run("vendor", "grep -m1 vendor_id /proc/cpuinfo", None)?
            .text
            .contains("AuthenticAMD");
        self.counting(&mut guest, backing, amd, rows)?;
        self.sharing(&mut guest, backing, rows)?;
        self.sampling(&mut guest, backing, rows)?;
        guest.end()?;
        let mut guest = self.start(backing, "2", "")?;
        self.two_cpus(&mut guest, backing, rows)?;
        guest.end()?;
        let mut guest = self.start(backing, "2", "nohz_full=1")?;
        self.levels(&mut guest, backing, rows)?;
        guest.end()?;
        if backing != "kvm" && self.host.no_exact.is_none() && self.host.steps_user {
            // The NMI watchdog would count permanently, and address space randomisation may change
            // a program's path.
            let mut guest = self.start("exact", "1", "nowatchdog norandmaps")?;
            self.exact(&mut guest, rows)?;
            guest.end()?;
        }
        Ok(())
    }

    fn start(&self, backing: &str, cpus: &str, words: &str) -> Result<LinuxGuest, VmMeasurementError> {
        log::info!("Linux guest, {cpus} CPUs, backing {backing}");
        let cmdline = format!(
            "console=ttyS0 tsc=reliable no_timer_check nokaslr quiet nowatchdog pv.script=validate {words}"
        );
        let arguments = [
            "--kernel",
            &self.files.kernel.to_string_lossy(),
            "--initrd",
            &self.files.initrd.to_string_lossy(),
            "--cmdline",
            &cmdline,
            "--cpus",
            cpus,
            "--memory",
            "512M",
            "--pmu",
            &self.options.pmu,
            "--backing",
            backing,
        ]
        .map(str::to_owned);
        let mut vm = ChildVm::start(&arguments, self.signals)?;
        let ready = vm.wait_for(START_TIMEOUT, "it was booted", |line| {
            if line.contains("@@pv validate ready") {
                Some(true)
            } else {
                // The script is missing or has failed with another error.
                (line.contains("no such script") || line.starts_with("@@pv done")).then_some(false)
            }
        })?;
        if !ready {
            return Err(VmMeasurementError::Answer(
                "its initrd has no script \"validate\"; make it anew with make guest".into(),
            ));
        }
        Ok(LinuxGuest { vm })
    }

    fn percent(&self) -> f64 {
        self.options.tolerance_percent
    }
}

impl LinuxGuest {
    /// Runs a shell command. If the command uses `gate`, the operator's events are enabled at the
    /// start of the command's program and disabled at its end.
    fn run(
        &mut self,
        name: &str,
        command: &str,
        operator: Option<OperatorEventConfig<'_>>,
    ) -> Result<CommandResult, VmMeasurementError> {
        self.vm.type_line(&format!("{name} {command}"))?;
        let begin = format!("@@pv begin {name}");
        let end = format!("@@pv end {name} ");
        let what = format!("it ran \"{command}\"");
        let mut done = CommandResult::default();
        let mut lines = 0;
        let mut open: Option<(Vec<VcpuView>, Vec<ThreadAccounting>, Option<OpenOperatorEvents>)> = None;
        self.vm
            .wait_for(COMMAND_TIMEOUT, &what, |line| line.contains(&begin).then_some(()))?;
        loop {
            let line = self
                .vm
                .wait_for(COMMAND_TIMEOUT, &what, |line| Some(line.to_owned()))?;
            if let Some(at) = line.find(&end) {
                done.text.push_str(&line[..at]);
                done.status = line[at + end.len()..].trim().parse().unwrap_or(-1);
                return Ok(done);
            } else if line.contains("@@pv gate begin") {
                let before = self.vm.views()?;
                let watch = operator
                    .map(|o| OpenOperatorEvents::open(&mut self.vm, o))
                    .transpose()?;
                open = Some((before, self.vm.facts()?, watch));
                self.vm.type_line("")?;
            } else if let Some((_, words)) = line.split_once("@@pv gate end ") {
                let facts = self.vm.facts()?;
                let Some((before, start, mut watch)) = open.take() else {
                    return Err(VmMeasurementError::Answer(line));
                };
                let operator = watch.as_mut().map(|w| w.close(&mut self.vm)).transpose()?;
                done.gate = Some(Gate {
                    cpu_ns: field(words, "cpu_ns=").unwrap_or(0),
                    before,
                    after: self.vm.views()?,
                    facts: facts
                        .into_iter()
                        .zip(start)
                        .map(|(end, start)| end - start)
                        .collect(),
                    operator,
                });
                self.vm.type_line("")?;
            } else if lines < MAX_OUTPUT_LINES {
                lines += 1;
                let _ = writeln!(done.text, "{line}");
            }
        }
    }

    /// Ends the guest and checks that the VM exited successfully.
    fn end(self) -> Result<(), VmMeasurementError> {
        self.vm.end(Duration::from_secs(30))
    }
}

impl Gate {
    /// Returns the increase of the counter that changed on vCPU `cpu`, relative to Linux's initial
    /// value, in the host's view. Returns `None` unless exactly one counter changed.
    fn host(&self, cpu: usize) -> Option<u64> {
        let after = &self.after.get(cpu)?.counters;
        let before = &self.before.get(cpu)?.counters;
        let mut moved = after
            .iter()
            .zip(before)
            .filter(|(now, then)| now.value != then.value)
            .map(|(now, _)| now.value);
        let value = moved.next()?;
        if moved.next().is_some() {
            return None;
        }
        value.checked_sub(LINUX_START)
    }

    /// Returns the result of `Gate::host` as an exact expectation.
    fn host_exactly(&self, cpu: usize) -> Option<ExpectedCount> {
        self.host(cpu)
            .map(|value| ExpectedCount::new(value, super::judge::Tolerance::Exact))
    }
}

/// Returns the number after the word `key`.
fn field(text: &str, key: &str) -> Option<u64> {
    text.split_whitespace()
        .find_map(|word| word.strip_prefix(key)?.parse().ok())
}

/// Count of one event, parsed from a line of `perf stat -x,`.
#[derive(Debug, Clone, PartialEq)]
struct Count {
    /// CPU number, if perf counts per CPU (`-A`).
    cpu: Option<u32>,
    event: String,
    /// Count, or `None` for `<not supported>` and `<not counted>`.
    value: Option<u64>,
    /// Share of the enabled time that the event ran, in percent.
    running_percent: f64,
}

/// Parses the output of `perf stat -x,`, with times in nanoseconds.
fn counts(text: &str) -> Vec<Count> {
    text.lines().filter_map(count).collect()
}

fn count(line: &str) -> Option<Count> {
    let mut fields: Vec<&str> = line.trim().split(',').collect();
    let cpu = match fields.first()?.strip_prefix("CPU") {
        Some(number) => {
            let cpu = number.parse().ok()?;
            fields.remove(0);
            Some(cpu)
        }
        None => None,
    };
    let [value, unit, event, _, percent, ..] = fields[..] else {
        return None;
    };
    let value = match value {
        "<not supported>" | "<not counted>" => None,
        number => {
            let number: f64 = number.parse().ok()?;
            Some(whole(number * if unit == "msec" { 1e6 } else { 1.0 }))
        }
    };
    Some(Count {
        cpu,
        event: event.to_owned(),
        value,
        running_percent: percent.parse().ok()?,
    })
}

#[cfg(test)]
pub(crate) mod tests;
