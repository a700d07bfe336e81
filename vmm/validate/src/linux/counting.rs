//! Measurements with `perf stat` in the Linux guest.

use super::{CommandResult, Count, Linux, LinuxGuest, counts, perf_stat, perf_stat_of};
use crate::builtin::on_host_pmu;
use crate::child::{SHARE_POLICIES, VmMeasurementError};
use crate::guest::OperatorEventConfig;
use crate::judge::{CountComparison, ExpectedCount, Tolerance, Verdict, judge_unbacked, whole};
use crate::measure::{measure_row, measure_rows};
use crate::report::{KNOWN, ValidationCheckKind, ValidationRow, ValidationRowCollector};
use perf_core::SharePolicy;

/// Maximum cycles of an idle guest, in percent of the TSC. Timer ticks cause these cycles.
const IDLE_PERCENT: u64 = 10;
/// Tolerance of the count at one privilege level with `--backing clock`, in percent of the count at
/// both levels.
const LEVEL_PERCENT: f64 = 5.0;
/// Tolerance of a scaled count, in percent. perf does not report the error of such a count.
const SCALED_PERCENT: f64 = 5.0;
/// Multiplexing interval of perf in the guest, in milliseconds.
const TURN_MS: u64 = 250;
/// Number of simultaneous events, which exceeds the number of counters that can count `cycles` on
/// any PMU model in these measurements.
const TOO_MANY: usize = 9;
/// Number of iterations of the program of known length.
const ROUNDS: u64 = 1000;
const MORE_ROUNDS: u64 = 3000;
/// Number of instructions at the start and the end of a process that single-stepping does not count
/// (docs/reference/accuracy.md).
const MISSED: u64 = 2;

const GUEST_CPU_TIME: &str = "CPU time of the program, by the guest's kernel, times the TSC frequency";
const HOST_CPU_TIME: &str =
    "CPU time of the vCPU's thread, as the host's kernel accounts it, times the TSC frequency";

/// Returns the first line of perf's output for `event`.
fn of<'a>(counts: &'a [Count], event: &str) -> Option<&'a Count> {
    counts.iter().find(|count| count.event == event)
}

fn with_share(row: ValidationRow, count: Option<&Count>) -> ValidationRow {
    ValidationRow {
        running_percent: count.map(|count| count.running_percent),
        ..row
    }
}

impl Linux<'_> {
    pub(super) fn counting(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
        amd: bool,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        for (program, name) in [
            ("spin 1.5", "busy loop"),
            ("chase 2", "pointer chase"),
            ("syscalls 1000000", "system calls"),
            ("faults 60000", "page faults"),
        ] {
            rows.push(measure_row(|| {
                self.ticks_of(guest, backing, "cycles", program, name)
            })?);
        }
        if amd {
            let row = ValidationRow::new(ValidationCheckKind::Counting, "ref-cycles", backing, "busy loop");
            let counted = counts(
                &guest
                    .run("ref", "perf stat -x, -e ref-cycles spin 0.1", None)?
                    .text,
            );
            rows.push(match of(&counted, "ref-cycles") {
                Some(Count { value: None, .. }) => {
                    row.unsupported("the guest kernel's AMD driver has no such event")
                }
                Some(_) => row.failed("the guest kernel's AMD driver has no such event, but perf counted"),
                None => row,
            });
        } else {
            rows.push(measure_row(|| {
                self.ticks_of(guest, backing, "ref-cycles", "spin 1.5", "busy loop")
            })?);
        }
        rows.push(measure_row(|| self.idle(guest, backing))?);
        self.numbers(guest, backing, rows)?;
        Ok(())
    }

    /// Compares three values of a time-dependent event over a program: the count of perf in the
    /// guest, the host's view of the counter, and the program's CPU time.
    fn ticks_of(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
        event: &str,
        program: &str,
        name: &str,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let row = ValidationRow::new(ValidationCheckKind::Counting, event, backing, name);
        let command = perf_stat(&format!("-a -e {event}"), program);
        let done = guest.run("count", &command, Some(OperatorEventConfig::counting(event)))?;
        let counted = counts(&done.text);
        let count = of(&counted, event);
        let Some(gate) = &done.gate else {
            return Ok(row.failed(format!("perf did not run: status {}", done.status)));
        };
        let own = || {
            let value = gate.operator.as_ref()?.reading(0, 0)?.estimate?;
            let tolerance = Tolerance::PercentAnd(self.percent(), 5_000_000);
            Some(ExpectedCount::new(value, tolerance))
        };
        let (expected, basis) = if on_host_pmu(backing) && event == "cycles" {
            (own(), "the host's own event on the vCPU")
        } else {
            let value = self.host.ticks(gate.cpu_ns);
            let tolerance = Tolerance::Percent(self.percent());
            (Some(ExpectedCount::new(value, tolerance)), GUEST_CPU_TIME)
        };
        let seen = CountComparison {
            guest: count.and_then(|count| count.value),
            host: gate.host_exactly(0).or_else(own),
            expected,
        };
        Ok(with_share(row.with_verdict(&seen, basis), count))
    }

    fn idle(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let row = ValidationRow::new(
            ValidationCheckKind::Counting,
            "cycles",
            backing,
            "idle (sleep of 2 s)",
        );
        let done = guest.run("idle", &perf_stat("-a -e cycles", "idle 2"), None)?;
        let counted = counts(&done.text);
        let count = of(&counted, "cycles");
        let Some(gate) = &done.gate else {
            return Ok(row.failed(format!("perf did not run: status {}", done.status)));
        };
        let seen = CountComparison {
            guest: count.and_then(|count| count.value),
            host: gate.host_exactly(0),
            expected: Some(ExpectedCount::new(
                self.host.ticks(2_000_000_000) * IDLE_PERCENT / 100,
                Tolerance::AtMost,
            )),
        };
        let basis = "a tenth of the TSC ticks that passed";
        Ok(with_share(row.with_verdict(&seen, basis), count))
    }

    /// Measures events whose count over a program is known. `--backing clock` cannot count these
    /// events and must not report a count.
    fn numbers(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let events = [
            "instructions",
            "branches",
            "branch-misses",
            "cache-references",
            "cache-misses",
        ];
        const LOOPS: u64 = 50_000_000;
        for event in events {
            let known = match event {
                "instructions" => Some(2 * LOOPS),
                "branches" => Some(LOOPS),
                _ => None,
            };
            let counts_here =
                on_host_pmu(backing) && self.host.probe.generic.iter().any(|g| g.name == event && g.opens);
            let name = if counts_here { "busy loop" } else { "tried" };
            let row = ValidationRow::new(ValidationCheckKind::Counting, event, backing, name);
            let loops = if counts_here { LOOPS } else { LOOPS / 10 };
            let done = guest.run(
                "number",
                &perf_stat(&format!("-a -e {event}"), &format!("spin {loops}x")),
                None,
            )?;
            let counted = counts(&done.text);
            let Some(count) = of(&counted, event) else {
                rows.push(row.failed(format!("perf printed no line for it (status {})", done.status)));
                continue;
            };
            if !counts_here {
                // perf prints "not supported" if CPUID or the kernel's tables hide the event.
                // Otherwise the count must be 0.
                let why = match backing {
                    "hardware" | "kvm" => "the host's PMU does not open this event",
                    _ => "a clock counts time only",
                };
                let (verdict, reason) = judge_unbacked(count.value, None, why);
                rows.push(ValidationRow {
                    verdict,
                    reason,
                    guest: count.value.filter(|_| verdict == Verdict::Fail),
                    ..row
                });
                continue;
            }
            let seen = CountComparison {
                guest: count.value,
                host: done.gate.as_ref().and_then(|gate| gate.host_exactly(0)),
                expected: known.map(|value| ExpectedCount::new(value, Tolerance::Percent(self.percent()))),
            };
            rows.push(with_share(row.with_verdict(&seen, KNOWN), Some(count)));
        }
        Ok(())
    }

    /// Measures `cycles:u` and `cycles:k` over a program that stays at one privilege level, on a
    /// CPU that has no timer tick while one task runs. On hosts with slow exits, timer ticks alone
    /// take several percent.
    pub(super) fn levels(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let tickless = guest
            .run("tickless", "cat /sys/devices/system/cpu/nohz_full", None)?
            .text
            .trim()
            == "1";
        let basis = if tickless {
            "a counter for both levels: the loop makes no system call, and its CPU has no tick"
        } else {
            "a counter for both levels: the loop makes no system call; this kernel keeps its tick, though"
        };
        rows.extend(measure_rows(|| {
            let mut batch = Vec::new();
            let command = perf_stat_of("-C 1 -e cycles:u,cycles:k,cycles", "taskset 2 gate spin 1.5");
            let done = guest.run("levels", &command, None)?;
            let counted = counts(&done.text);
            let value = |event| of(&counted, event).and_then(|count| count.value);
            let both = value("cycles").unwrap_or(0);
            let slack = whole(both as f64 * LEVEL_PERCENT / 100.0);
            for (event, expected) in [("cycles:u", both), ("cycles:k", 0)] {
                let seen = CountComparison::of_guest(
                    value(event),
                    ExpectedCount::new(expected, Tolerance::PercentAnd(0.0, slack)),
                );
                let row = ValidationRow::new(ValidationCheckKind::Counting, event, backing, "busy loop");
                let row = row.with_verdict(&seen, basis);
                batch.push(with_share(row, of(&counted, event)));
            }
            Ok(batch)
        })?);
        Ok(())
    }

    /// Checks that each CPU counts independently.
    pub(super) fn two_cpus(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        rows.extend(measure_rows(|| {
            let mut batch = Vec::new();
            let command = perf_stat("-a -A -e cycles", "threads 2 4");
            let done = guest.run("smp", &command, Some(OperatorEventConfig::counting("cycles")))?;
            let counted = counts(&done.text);
            for cpu in 0..2u32 {
                let name = format!("two CPUs busy, CPU {cpu}");
                let row = ValidationRow::new(ValidationCheckKind::Counting, "cycles", backing, name);
                let count = counted.iter().find(|count| count.cpu == Some(cpu));
                let Some(gate) = &done.gate else {
                    batch.push(row.failed(format!("perf did not run: status {}", done.status)));
                    continue;
                };
                let ns = gate.facts.get(cpu as usize).map_or(0, |facts| facts.cpu_ns);
                let expected = (!on_host_pmu(backing))
                    .then(|| ExpectedCount::new(self.host.ticks(ns), Tolerance::Percent(self.percent())));
                let operator = gate
                    .operator
                    .as_ref()
                    .and_then(|saw| saw.reading(0, cpu)?.estimate);
                let seen = CountComparison {
                    guest: count.and_then(|count| count.value),
                    host: gate.host_exactly(cpu as usize).or(operator
                        .map(|value| ExpectedCount::new(value, Tolerance::Percent(2.0 * self.percent())))),
                    expected,
                };
                batch.push(with_share(row.with_verdict(&seen, HOST_CPU_TIME), count));
            }
            Ok(batch)
        })?);
        Ok(())
    }

    /// Measures more events than counters, with an operator who counts at the same time.
    pub(super) fn sharing(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        rows.push(measure_row(|| self.scaled(guest, backing))?);
        for policy in SHARE_POLICIES {
            guest.vm.share(policy)?;
            let name = policy.to_string();
            rows.push(measure_row(|| self.contended(guest, backing, &name))?);
        }
        guest.vm.share(SharePolicy::GuestFirst)
    }

    fn scaled(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let name = format!("{TOO_MANY} events, {TURN_MS} ms turns, worst");
        let row = ValidationRow::new(ValidationCheckKind::Multiplexing, "cycles", backing, name);
        let events = ["cycles"; TOO_MANY].join(",");
        let operator = OperatorEventConfig::counting("cycles");
        // Each rotation causes some forty exits, during which the guest kernel has stopped its
        // counters but not the clock of its events. The kernel's default interval of 4 ms would
        // show the cost of exits instead of the scaling. On an emulated processor, where an exit
        // costs the guest 0.2 ms, this is 7 % even of a 100 ms interval.
        let command = format!(
            "echo {TURN_MS} >/sys/bus/event_source/devices/cpu/perf_event_mux_interval_ms; {}",
            perf_stat(&format!("-a -e {events}"), "spin 5")
        );
        let done = guest.run("mux", &command, Some(operator))?;
        let counted = counts(&done.text);
        let Some(gate) = &done.gate else {
            return Ok(row.failed(format!("perf did not run: status {}", done.status)));
        };
        if counted.len() != TOO_MANY {
            return Ok(row.failed(format!("perf printed {} counts", counted.len())));
        }
        // The program's CPU time includes the exits of rotations, which are not guest time. It is
        // therefore not used as a reference.
        let own = gate.operator.as_ref().and_then(|saw| saw.reading(0, 0)?.estimate);
        let Some(expected) = own else {
            return Ok(row.failed("the operator's event was not counted"));
        };
        let worst = counted
            .iter()
            .max_by_key(|count| count.value.map_or(u64::MAX, |value| value.abs_diff(expected)));
        if counted.iter().all(|count| count.running_percent > 99.0) {
            return Ok(row.failed("there were counters for all of them"));
        }
        let seen = CountComparison::of_guest(
            worst.and_then(|count| count.value),
            ExpectedCount::new(expected, Tolerance::Percent(SCALED_PERCENT)),
        );
        let basis = "an event of the operator's on the vCPU that is on all the time";
        Ok(with_share(row.with_verdict(&seen, basis), worst))
    }

    fn contended(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
        policy: &str,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let name = format!("--share {policy}");
        let row = ValidationRow::new(ValidationCheckKind::Contention, "cycles", backing, name);
        let command = perf_stat("-a -e cycles", "spin 1.5");
        let done = guest.run(
            "shared",
            &command,
            Some(OperatorEventConfig::counting(
                "cycles,ref-cycles,task-clock,kvm:exits",
            )),
        )?;
        let counted = counts(&done.text);
        let count = of(&counted, "cycles");
        let Some(gate) = &done.gate else {
            return Ok(row.failed(format!("perf did not run: status {}", done.status)));
        };
        let Some(saw) = &gate.operator else {
            return Ok(row.failed("nobody counted"));
        };
        let own = saw.reading(0, 0).and_then(|reading| reading.estimate);
        if own.is_none() && !(saw.opened.is_err() && policy == "strict") {
            return Ok(row.failed("the operator's event was not counted"));
        }
        let seen = CountComparison {
            guest: count.and_then(|count| count.value),
            // The operator's event also covers the handshake and runs slightly longer.
            host: own.map(|value| ExpectedCount::new(value, Tolerance::Percent(2.0 * self.percent()))),
            expected: (!on_host_pmu(backing)).then(|| {
                ExpectedCount::new(self.host.ticks(gate.cpu_ns), Tolerance::Percent(self.percent()))
            }),
        };
        Ok(with_share(row.with_verdict(&seen, GUEST_CPU_TIME), count))
    }

    /// Single-steps the program of known length twice, with more iterations the second time. The
    /// code around the loop is the same in both runs.
    pub(super) fn exact(
        &self,
        guest: &mut LinuxGuest,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let mut run = |rounds: u64| -> Result<Vec<Count>, VmMeasurementError> {
            let command = format!("perf stat -x, -e instructions:u,branches:u known {rounds}");
            let CommandResult { text, .. } = guest.run("exact", &command, None)?;
            Ok(counts(&text))
        };
        let (few, many) = (run(ROUNDS)?, run(MORE_ROUNDS)?);
        // The comment at the top of known.S derives the numbers of instructions and branches.
        let digits = ROUNDS.to_string().len() as u64;
        for (event, whole, each) in [
            ("instructions:u", 2 * ROUNDS + 7 * digits + 8, 2),
            ("branches:u", ROUNDS + 2 * digits + 2, 1),
        ] {
            let value = |counts: &[Count]| of(counts, event).and_then(|count| count.value);
            let seen = |guest, value, tolerance| {
                CountComparison::of_guest(guest, ExpectedCount::new(value, tolerance))
            };
            let row = ValidationRow::new(
                ValidationCheckKind::Counting,
                event,
                "exact",
                "known program, whole",
            );
            let tolerance = Tolerance::Range(whole.saturating_sub(MISSED), whole);
            rows.push(with_share(
                row.with_verdict(&seen(value(&few), whole, tolerance), KNOWN),
                of(&few, event),
            ));
            let row = ValidationRow::new(
                ValidationCheckKind::Counting,
                event,
                "exact",
                "known program, 2000 rounds",
            );
            let more = value(&many)
                .zip(value(&few))
                .map(|(many, few)| many.saturating_sub(few));
            let expected = each * (MORE_ROUNDS - ROUNDS);
            rows.push(with_share(
                row.with_verdict(&seen(more, expected, Tolerance::Exact), KNOWN),
                of(&many, event),
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
