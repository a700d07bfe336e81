//! Measurements with the built-in guest. They cover every event and every mechanism of this host
//! that counts for guests (backing), run on any KVM and take seconds.

mod exact;
mod paravirtual;
mod sampling;
mod sharing;
mod time;

pub(crate) use sampling::share;
use vpmu::ArchEvent;

use super::child::VmMeasurementError;
use super::guest::{Measurement, MeasurementJob, MeasuringGuest, OS, USR};
use super::judge::{CountComparison, ExpectedCount, Tolerance, Verdict, judge_unbacked};
use super::report::{ValidationCheckKind, ValidationRow, ValidationRowCollector};
use crate::host::StopRequestedCheck;
use crate::host::{HostProperties, ValidateOptions};
use crate::judge::whole;

/// Minimum ratio of the CPU time of a measurement to the overhead, which is the CPU time of an
/// empty measurement.
const OVERHEADS: f64 = 300.0;
/// Number of empty measurements that determine the overhead.
const OVERHEAD_RUNS: u32 = 5;
/// Selector bits that enable counting at CPL 0 and at CPL 3.
const BOTH: u64 = USR | OS;
/// Number of counted instructions before and after the work; see the function `counted` in the
/// guest.
const AROUND: u64 = 5;

/// Parameters of the measurements with the built-in guest.
pub(super) struct Builtin<'a> {
    pub options: &'a ValidateOptions,
    pub host: &'a HostProperties,
    pub signals: &'a StopRequestedCheck,
}

impl Builtin<'_> {
    /// Runs all measurements with the built-in guest, and adds their rows to `rows`.
    pub(super) fn rows(&self, rows: &mut ValidationRowCollector<'_>) -> Result<(), VmMeasurementError> {
        if self.options.own_pmu {
            return self.backed_by("kvm", rows);
        }
        if let Some(why) = &self.host.no_hardware {
            rows.push(
                ValidationRow::new(
                    ValidationCheckKind::Counting,
                    "all hardware events",
                    "hardware",
                    "-",
                )
                .unsupported(why.clone()),
            );
        } else {
            self.backed_by("hardware", rows)?;
        }
        match &self.host.no_clock {
            Some(why) => {
                rows.push(
                    ValidationRow::new(ValidationCheckKind::Counting, "cycles, ref-cycles", "clock", "-")
                        .unsupported(why.clone()),
                );
            }
            None => self.backed_by("clock", rows)?,
        }
        self.exact(rows)
    }

    /// Runs the measurements with `backing`. Measures the paravirtual events only with the clock
    /// backing, or with another one on a host without it.
    fn backed_by(
        &self,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let mut guest = self.start(backing, "1")?;
        self.time_rows(&mut guest, backing, rows)?;
        if backing == "kvm" {
            rows.push(
                ValidationRow::new(ValidationCheckKind::Counting, "paravirtual events", backing, "-")
                    .unsupported("KVM's own vPMU has none"),
            );
        } else if backing == "clock" || self.host.no_clock.is_some() {
            self.paravirtual_rows(&mut guest, rows)?;
        }
        self.multiplexing_rows(&mut guest, backing, rows)?;
        if backing == "kvm" {
            rows.push(
                ValidationRow::new(ValidationCheckKind::Contention, "cycles", backing, "--share").unsupported(
                    "the counters of KVM's own vPMU are the host kernel's events, which take no part in --share",
                ),
            );
        } else {
            self.contention_rows(&mut guest, backing, rows)?;
        }
        self.sampling_rows(&mut guest, backing, rows)?;
        guest.end()?;
        let mut guest = self.start(backing, "2")?;
        self.smp_rows(&mut guest, backing, rows)?;
        guest.end()
    }

    fn start(&self, backing: &str, cpus: &str) -> Result<MeasuringGuest, VmMeasurementError> {
        log::info!("built-in guest, {cpus} CPUs, backing {backing}");
        let arguments = ["--pmu", &self.options.pmu, "--backing", backing, "--cpus", cpus];
        let mut guest = MeasuringGuest::start(&arguments, self.signals)?;
        // Use the minimum, because other load on the host can only increase the overhead.
        let mut overhead_ns = u64::MAX;
        for _ in 0..OVERHEAD_RUNS {
            let outcome = guest.measure(&MeasurementJob::new("nothing", 1), None)?;
            overhead_ns = overhead_ns.min(outcome.facts.first().map_or(0, |facts| facts.cpu_ns));
        }
        log::info!("an empty measurement takes {:.1} ms", overhead_ns as f64 / 1e6);
        guest.overhead_ns = overhead_ns;
        Ok(guest)
    }

    /// Returns the number of units of `work` that take about `ms` milliseconds of CPU time. The
    /// speed of each type of work is measured once.
    fn amount(
        &self,
        guest: &mut MeasuringGuest,
        work: &'static str,
        cpl: u32,
        ms: u64,
    ) -> Result<u64, VmMeasurementError> {
        let known = guest.pace.get(&(work, cpl)).copied();
        let per_ms = match known {
            Some(per_ms) => per_ms,
            None => {
                let per_ms = pace(guest, work, cpl, self.host.tsc_hz)?;
                guest.pace.insert((work, cpl), per_ms);
                per_ms
            }
        };
        // Make the work so long that the variable overhead is negligible.
        let least_ms = guest.overhead_ns as f64 * OVERHEADS / 1e6;
        Ok(whole(per_ms * least_ms.max(ms as f64)).max(1))
    }

    /// Returns the CPU time of vCPU `cpu` according to the host kernel, converted to TSC ticks,
    /// minus the overhead of an empty measurement.
    fn cpu_ticks(&self, outcome: &Measurement, cpu: usize) -> u64 {
        let ns = outcome.facts.get(cpu).map_or(0, |facts| facts.cpu_ns);
        let ns = ns.saturating_sub(outcome.overhead_ns);
        self.host.ticks(ns)
    }
}

/// Returns whether `backing` counts with the host's PMU, through perf events or KVM's own vPMU.
pub(crate) fn on_host_pmu(backing: &str) -> bool {
    matches!(backing, "hardware" | "kvm")
}

/// Returns the number of units of `work` that the guest does per millisecond of CPU time.
fn pace(
    guest: &mut MeasuringGuest,
    work: &'static str,
    cpl: u32,
    tsc_hz: u64,
) -> Result<f64, VmMeasurementError> {
    let mut n = 500;
    loop {
        let outcome = guest.measure(&MeasurementJob::new(work, n).at_cpl(cpl), None)?;
        let used_ns = outcome.facts.first().map_or(0, |facts| facts.cpu_ns);
        let passed = outcome.cpus.first().map_or(0, |cpu| cpu.tsc) as f64 * 1e3 / tsc_hz as f64;
        // Use the minimum, because either time may include delays, such as the handshake with the
        // host or other load on the host.
        let ms = passed.min(used_ns.saturating_sub(guest.overhead_ns) as f64 / 1e6);
        // "spin" is done in pieces with overhead around each piece, so it is measured for a longer
        // time.
        let enough_ms = if work == "spin" { 100.0 } else { 20.0 };
        if ms > enough_ms || n > 1 << 40 {
            return Ok(n as f64 / ms.max(1e-3));
        }
        n *= 8;
    }
}

/// Description of the origin of an expected count in TSC ticks, for the report.
const CPU_TIME: &str = "CPU time of the vCPU's thread, as the host's kernel accounts it, less that of a measurement of nothing, times the TSC frequency";

/// Index of a general-purpose or fixed counter of the guest.
#[derive(Clone, Copy, Debug)]
enum GuestCounterId {
    General(usize),
    Fixed(usize),
}

impl GuestCounterId {
    /// Returns the name of the counter in the host's view of the counters.
    fn name(self) -> String {
        match self {
            Self::General(n) => format!("gp{n}"),
            Self::Fixed(n) => format!("fixed{n}"),
        }
    }
}

/// Returns the evidence for the count of a counter of guest CPU `cpu`. The counter is stopped, so
/// the host's view of it must equal the guest's count.
fn evidence(
    outcome: &Measurement,
    cpu: usize,
    counter: GuestCounterId,
    expected: Option<ExpectedCount>,
) -> CountComparison {
    let seen = outcome.cpus.get(cpu);
    let guest = seen.and_then(|seen| match counter {
        GuestCounterId::General(n) => seen.c.get(n).copied(),
        GuestCounterId::Fixed(n) => seen.f.get(n).copied(),
    });
    CountComparison {
        guest,
        host: outcome
            .host(cpu, &counter.name())
            .map(|counter| ExpectedCount::new(counter.value, Tolerance::Exact)),
        expected,
    }
}

/// Judges a row by the count of `counter` on guest CPU `cpu`, and adds the share of time for which
/// the counter ran.
fn judged(
    row: ValidationRow,
    outcome: &Measurement,
    cpu: usize,
    counter: GuestCounterId,
    expected: ExpectedCount,
    basis: &'static str,
) -> ValidationRow {
    let row = row.with_verdict(&evidence(outcome, cpu, counter, Some(expected)), basis);
    match outcome.host(cpu, &counter.name()) {
        Some(counter) => row.running_if_known(counter.running_ns, counter.enabled_ns),
        None => row,
    }
}

/// Measures an event that this host cannot count. The event's counter must not change.
fn unbacked(
    guest: &mut MeasuringGuest,
    row: ValidationRow,
    job: &MeasurementJob,
    why: &str,
) -> Result<ValidationRow, VmMeasurementError> {
    let outcome = guest.measure(job, None)?;
    let count = outcome.cpus.first().and_then(|cpu| cpu.c.first()).copied();
    let backing = outcome.host(0, "gp0").and_then(|counter| counter.backing.clone());
    // With KVM's own vPMU, KVM reports the value of a counter but not whether the counter is
    // backed.
    let backing = backing.filter(|backing| backing != "kvm");
    let (verdict, reason) = judge_unbacked(count, backing.as_deref(), why);
    let shown = (verdict == Verdict::Fail).then_some(count).flatten();
    Ok(ValidationRow {
        verdict,
        reason,
        guest: shown,
        ..row
    })
}

/// Returns the known count of `event` over `n` units of `work`, including the instructions with
/// which the guest's function `counted` surrounds the work. Returns `None` if the count is unknown.
fn known(event: ArchEvent, work: &str, n: u64) -> Option<u64> {
    use ArchEvent::*;
    // The comments at known_loop(n) and chase(n) in the guest's sources derive the following
    // numbers.
    Some(match (work, event) {
        ("busy", Instructions) => 2 * n + 5 + AROUND,
        ("busy", Branches) => n + 1 + 1,
        ("busy", TakenBranches) => n + 1,
        ("busy", ConditionalBranches) => n,
        ("busy", Loads) => 2,
        ("busy", Stores) => 1 + 1,
        ("chase", Instructions) => 3 * n + 5 + AROUND,
        ("chase", Branches) => n + 1 + 1,
        ("chase", TakenBranches) => n + 1,
        ("chase", ConditionalBranches) => n,
        ("chase", Loads) => n + 3,
        ("chase", Stores) => 1 + 1,
        _ => return None,
    })
}

/// Returns the event select and unit mask of `event`, without privilege levels and enable bit, or
/// `None` if the vendor has no such event.
fn selector(event: ArchEvent, amd: bool) -> Option<u64> {
    use ArchEvent::*;
    // A selector has the unit mask in bits 15:8 and AMD's upper event bits in 35:32.
    Some(match (event, amd) {
        (CoreCycles, false) => 0x003C,
        (CoreCycles, true) => 0x0076,
        (BusCycles, false) => 0x013C,
        (RefCycles, true) => 0x1_0000_0120,
        (Instructions, _) => 0x00C0,
        (CacheReferences, false) => 0x4F2E,
        (CacheMisses, false) => 0x412E,
        (Branches, false) => 0x00C4,
        (Branches, true) => 0x00C2,
        (BranchMisses, false) => 0x00C5,
        (BranchMisses, true) => 0x00C3,
        (TakenBranches, false) => 0x20C4,
        (TakenBranches, true) => 0x00C4,
        (ConditionalBranches, false) => 0x11C4,
        (ConditionalBranches, true) => 0x00D1,
        (Loads, false) => 0x81D0,
        (Loads, true) => 0x0129,
        (Stores, false) => 0x82D0,
        (Stores, true) => 0x0229,
        (TopdownSlots, false) => 0x01A4,
        _ => return None,
    })
}

#[cfg(test)]
mod fixture;

#[cfg(test)]
mod tests {
    use super::fixture::{counter, outcome};
    use super::*;
    use vpmu::Vendor;
    use vpmu::events::{DecodedCounterEvent, EventSelect, UnitMask, decode};

    /// The selectors equal the encodings of the same events in the virtual PMU.
    #[test]
    fn selectors_mean_their_events() {
        for event in ArchEvent::ALL {
            for (vendor, amd) in [(Vendor::Intel, false), (Vendor::Amd, true)] {
                let Some(bits) = selector(event, amd) else {
                    continue;
                };
                let select = EventSelect((bits & 0xFF | bits >> 32 << 8) as u16);
                let umask = UnitMask((bits >> 8) as u8);
                assert_eq!(
                    decode(vendor, select, umask),
                    DecodedCounterEvent::Architectural(event),
                    "{event:?}"
                );
            }
        }
    }

    #[test]
    fn known_work_has_known_counts() {
        assert_eq!(known(ArchEvent::Instructions, "busy", 1000), Some(2010));
        assert_eq!(known(ArchEvent::Loads, "chase", 1000), Some(1003));
        assert_eq!(known(ArchEvent::CoreCycles, "busy", 1000), None);
    }

    /// The guest's and the host's counts of the same counter must be equal and match the
    /// expectation.
    #[test]
    fn guest_count_must_equal_host_count() {
        let exactly = |value| ExpectedCount::new(value, Tolerance::Exact);
        let verdict = |guest: u64, host: u64, expected: u64| {
            let mut seen = outcome(&[guest]);
            seen.after[0].counters = vec![counter("gp0", host)];
            let row = ValidationRow::new(ValidationCheckKind::Counting, "instructions", "exact", "busy");
            let index = GuestCounterId::General(0);
            judged(row, &seen, 0, index, exactly(expected), "counted by hand")
        };
        assert_eq!(verdict(7, 7, 7).verdict, Verdict::Pass);
        assert_eq!(verdict(7, 8, 7).reason.as_deref(), Some("guest and host differ"));
        assert_eq!(verdict(8, 8, 7).reason.as_deref(), Some("off the expectation"));
        // The host reports that the counter ran for half of its enabled time.
        assert_eq!(verdict(7, 7, 7).running_percent, Some(50.0));
    }

    /// A missing CPU or counter in the guest's result is a failure.
    #[test]
    fn missing_guest_count_fails() {
        let expected = Some(ExpectedCount::new(0, Tolerance::AtLeast));
        let seen = outcome(&[1]);
        for (cpu, counter) in [
            (0, GuestCounterId::General(1)),
            (0, GuestCounterId::Fixed(0)),
            (1, GuestCounterId::General(0)),
        ] {
            let seen = evidence(&seen, cpu, counter, expected);
            assert_eq!(seen.guest, None, "{counter:?} of CPU {cpu}");
            assert_eq!(super::super::judge::judge(&seen).0, Verdict::Fail);
        }
    }

    /// Overflows that occurred before a measurement are not part of its result.
    #[test]
    fn earlier_overflows_are_not_counted() {
        let mut seen = outcome(&[1]);
        let with = |overflows| control_api::protocol::GuestCounter {
            overflows,
            ..counter("gp0", 1)
        };
        seen.before[0].counters = vec![with(Some(5))];
        seen.after[0].counters = vec![with(Some(8))];
        assert_eq!(seen.overflows(0, "gp0"), Some(3));
        seen.after[0].counters = vec![with(None)];
        assert_eq!(seen.overflows(0, "gp0"), None, "KVM's own vPMU does not tell");
        assert_eq!(seen.overflows(0, "gp1"), None);
    }
}
