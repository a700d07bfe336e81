//! Checks of `--backing clock` and `--backing hardware`, with which the guest runs at full speed.

use vpmu::ArchEvent;

use super::{
    BOTH, Builtin, CPU_TIME, GuestCounterId, evidence, judged, known, on_host_pmu, selector, unbacked,
};
use crate::child::VmMeasurementError;
use crate::guest::{Measurement, MeasurementJob, MeasuringGuest, OS, OperatorEventConfig, USR};
use crate::judge::{ExpectedCount, Tolerance, whole};
use crate::measure::measure_row;
use crate::report::{KNOWN, ValidationCheckKind, ValidationRow, ValidationRowCollector};

/// CPU time of a measurement, in ms.
const LENGTH_MS: u64 = 200;
/// Number of 20 ms halts of the idle guest.
const HALTS: u64 = 15;
/// Maximum cycles of an idle guest, in percent of the TSC. Wake-ups cause these cycles.
const IDLE_PERCENT: u64 = 10;
/// Tolerance of the count at one privilege level with `--backing clock`, in percent. The clock only
/// gives an estimate of this count.
const LEVEL_PERCENT: f64 = 5.0;

/// Tolerance of known counts on hardware, in percent. Interrupts and faults add some counts.
const KNOWN_PERCENT: f64 = 1.0;

impl Builtin<'_> {
    pub(super) fn time_rows(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let amd = guest.hello.amd;
        for event in ArchEvent::ALL {
            let Some(select) = selector(event, amd) else {
                continue;
            };
            let follows_time = matches!(
                event,
                ArchEvent::CoreCycles | ArchEvent::RefCycles | ArchEvent::BusCycles
            );
            let counts = match backing {
                "kvm" if amd && event == ArchEvent::RefCycles => moves(guest, select)?,
                "hardware" | "kvm" => self.host.hardware_events.contains(&event),
                _ => follows_time,
            };
            if !counts {
                let row =
                    ValidationRow::new(ValidationCheckKind::Counting, event.name(), backing, "busy, CPL0");
                let job = MeasurementJob::new("busy", 500).counter(select | BOTH);
                let why = match backing {
                    "kvm" if amd && event == ArchEvent::RefCycles => {
                        "the host's PMU counts nothing under AMD's number of this event"
                    }
                    "hardware" | "kvm" => "the host's PMU does not open this event",
                    _ => "a clock counts time only",
                };
                rows.push(unbacked(guest, row, &job, why)?);
                continue;
            }
            let mut works = vec![("busy", 0), ("busy", 3), ("chase", 3)];
            if event == ArchEvent::CoreCycles {
                works.extend([("to-user", 0), ("faults", 0)]);
            }
            for (work, cpl) in works {
                let n = self.amount(guest, work, cpl, LENGTH_MS)?;
                rows.push(measure_row(|| {
                    self.general(guest, backing, event, select, work, cpl, n)
                })?);
            }
        }
        self.fixed_rows(guest, backing, rows)?;
        if let Some(select) = selector(ArchEvent::CoreCycles, amd) {
            rows.push(measure_row(|| self.idle(guest, backing, select))?);
            for cpl in [0, 3] {
                let n = self.amount(guest, "busy", cpl, LENGTH_MS)?;
                rows.push(measure_row(|| self.level(guest, backing, select, cpl, n))?);
            }
        }
        Ok(())
    }

    /// Returns the expected count of `event` over the measured work, and a description of how it
    /// was obtained.
    fn expectation(
        &self,
        backing: &str,
        event: ArchEvent,
        outcome: &Measurement,
        work: &str,
        n: u64,
        cpu: usize,
    ) -> Option<(ExpectedCount, &'static str)> {
        let percent = self.options.tolerance_percent;
        if let Some(value) = known(event, work, n) {
            let tolerance = Tolerance::PercentAnd(KNOWN_PERCENT, 250);
            return Some((ExpectedCount::new(value, tolerance), KNOWN));
        }
        if on_host_pmu(backing) && event != ArchEvent::RefCycles {
            // The processor's clock is not the TSC, so the reference is the host's own event on the
            // same vCPU, enabled around the work.
            let saw = outcome.operator.as_ref()?;
            let reading = saw.reading(0, u32::try_from(cpu).ok()?)?;
            let tolerance = Tolerance::PercentAnd(percent, 20_000);
            let value = reading.estimate?;
            return Some((
                ExpectedCount::new(value, tolerance),
                "the host's own event on the vCPU",
            ));
        }
        let value = self.cpu_ticks(outcome, cpu);
        let tolerance = Tolerance::Percent(percent);
        Some((ExpectedCount::new(value, tolerance), CPU_TIME))
    }

    #[expect(clippy::too_many_arguments, reason = "each is one thing that is varied")]
    fn general(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        event: ArchEvent,
        select: u64,
        work: &'static str,
        cpl: u32,
        n: u64,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let name = match work {
            "to-user" => "CPL0 to 3 and back".to_owned(),
            "faults" => "faults at CPL0".to_owned(),
            _ => format!("{work}, CPL{cpl}"),
        };
        let row = ValidationRow::new(ValidationCheckKind::Counting, event.name(), backing, name);
        let job = MeasurementJob::new(work, n).at_cpl(cpl).counter(select | BOTH);
        let counter = GuestCounterId::General(0);
        self.referenced(guest, row, &job, (backing, event), (0, counter))
    }

    /// Measures `event` with a counter of guest CPU `cpu` and judges it by its expectation.
    fn referenced(
        &self,
        guest: &mut MeasuringGuest,
        row: ValidationRow,
        job: &MeasurementJob,
        (backing, event): (&'static str, ArchEvent),
        (cpu, counter): (usize, GuestCounterId),
    ) -> Result<ValidationRow, VmMeasurementError> {
        let operator = on_host_pmu(backing).then_some(OperatorEventConfig::counting(event.name()));
        let outcome = guest.measure(job, operator)?;
        Ok(
            match self.expectation(backing, event, &outcome, job.work, job.n, cpu) {
                Some((expected, basis)) => judged(row, &outcome, cpu, counter, expected, basis),
                None => row.failed("the host's own event was not counted"),
            },
        )
    }

    /// Measures Intel's fixed counters.
    fn fixed_rows(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let n = self.amount(guest, "busy", 3, LENGTH_MS)?;
        for (index, event) in [
            (1, ArchEvent::CoreCycles),
            (2, ArchEvent::RefCycles),
            (0, ArchEvent::Instructions),
        ] {
            let counts = event != ArchEvent::Instructions || on_host_pmu(backing);
            if guest.hello.fixed & 1 << index == 0 || !counts {
                continue;
            }
            rows.push(measure_row(|| {
                let name = format!("{} (fixed {index})", event.name());
                let row = ValidationRow::new(ValidationCheckKind::Counting, name, backing, "busy, CPL3");
                let job = MeasurementJob {
                    fixed_control: 3 << (4 * index),
                    ..MeasurementJob::new("busy", n).at_cpl(3)
                };
                let counter = GuestCounterId::Fixed(index);
                self.referenced(guest, row, &job, (backing, event), (0, counter))
            })?);
        }
        Ok(())
    }

    /// Measures the cycles of a sleeping guest, which must be few.
    fn idle(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        select: u64,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let row = ValidationRow::new(
            ValidationCheckKind::Counting,
            "cycles",
            backing,
            "idle (sleeps of 20 ms)",
        );
        let outcome = guest.measure(&MeasurementJob::new("sleep", HALTS).counter(select | BOTH), None)?;
        let tsc = outcome.cpus.first().map_or(0, |cpu| cpu.tsc);
        let expected = ExpectedCount::new(tsc * IDLE_PERCENT / 100, Tolerance::AtMost);
        let basis = "a tenth of the TSC ticks that passed";
        let counter = GuestCounterId::General(0);
        Ok(judged(row, &outcome, 0, counter, expected, basis))
    }

    /// Measures `cycles:u` over work at one privilege level, together with a counter for both
    /// levels.
    fn level(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        select: u64,
        cpl: u32,
        n: u64,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let name = format!("busy, CPL{cpl}");
        let row = ValidationRow::new(ValidationCheckKind::Counting, "cycles:u", backing, name);
        let job = MeasurementJob::new("busy", n)
            .at_cpl(cpl)
            .counter(select | USR)
            .counter(select | OS)
            .counter(select | BOTH);
        let outcome = guest.measure(&job, None)?;
        let Some([user, kernel, both]) = outcome.cpus.first().and_then(|cpu| cpu.c.get(..3)) else {
            return Ok(row.failed("the guest did not count it"));
        };
        let slack = whole(*both as f64 * LEVEL_PERCENT / 100.0);
        let expected = ExpectedCount {
            value: if cpl == 3 { *both } else { 0 },
            tolerance: if on_host_pmu(backing) {
                Tolerance::PercentAnd(1.0, 100_000)
            } else {
                Tolerance::PercentAnd(0.0, slack)
            },
        };
        let seen = evidence(&outcome, 0, GuestCounterId::General(0), Some(expected));
        let basis = "the level the work ran at, and a counter for both levels";
        let row = row.with_verdict(&seen, basis);
        log::debug!("cycles:u {user}, cycles:k {kernel}, both {both}");
        // The sum of both levels must match the total, regardless of the split.
        if (user + kernel).abs_diff(*both) > both / 100 {
            return Ok(row.failed("the two levels do not add up to the count of both"));
        }
        Ok(row)
    }

    /// Checks that each CPU counts independently.
    pub(super) fn smp_rows(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let event = ArchEvent::CoreCycles;
        let Some(select) = selector(event, guest.hello.amd) else {
            return Ok(());
        };
        if guest.hello.cpus < 2 {
            let row = ValidationRow::new(ValidationCheckKind::Counting, "cycles", backing, "two CPUs");
            rows.push(row.failed("the guest's second CPU did not start"));
            return Ok(());
        }
        let n = self.amount(guest, "busy", 3, LENGTH_MS)?;
        for cpu in 0..2 {
            rows.push(measure_row(|| {
                let name = format!("two CPUs busy, CPU {cpu}");
                let row = ValidationRow::new(ValidationCheckKind::Counting, "cycles", backing, name);
                let job = MeasurementJob {
                    cpus: 2,
                    ..MeasurementJob::new("busy", n).at_cpl(3).counter(select | BOTH)
                };
                let counter = GuestCounterId::General(0);
                self.referenced(guest, row, &job, (backing, event), (cpu, counter))
            })?);
        }
        Ok(())
    }
}

/// Returns whether a counter with the selector `select` counts anything. KVM's own vPMU passes
/// AMD's encodings to the host's PMU unchanged, even if perf has no name for the event. 120H/01H is
/// not perf's ref-cycles on AMD hosts, but counts on processors that support it (Zen 4 and later,
/// or a virtual PMU of Perfvisor on a nested host). If the counter counts, its count is judged.
fn moves(guest: &mut MeasuringGuest, select: u64) -> Result<bool, VmMeasurementError> {
    let outcome = guest.measure(&MeasurementJob::new("busy", 500).counter(select | BOTH), None)?;
    Ok(outcome
        .cpus
        .first()
        .is_some_and(|cpu| cpu.c.first().is_some_and(|count| *count != 0)))
}
