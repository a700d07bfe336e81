//! Checks of the paravirtual events, which count effects of the host on the vCPU. The counts are
//! compared with the effects that the guest provokes.

use vpmu::events::paravirtual_select;
use vpmu::{ParavirtualEvent, Vendor};

use super::{BOTH, Builtin, GuestCounterId, judged};
use crate::child::VmMeasurementError;
use crate::guest::{Measurement, MeasurementJob, MeasuringGuest, OperatorEventConfig};
use crate::judge::{ExpectedCount, Tolerance};
use crate::measure::measure_row;
use crate::report::{ValidationCheckKind, ValidationRow, ValidationRowCollector};

/// Number of repetitions of the work that provokes an event.
const TIMES: u64 = 200;
/// Number of halts, of 20 ms each.
const HALTS: u64 = 20;
/// CPU time of a busy loop, in ms.
const BUSY_MS: u64 = 100;
/// Tolerance of stolen time, in percent and nanoseconds. The kernel's accounting data is read
/// slightly before and after the measurement.
const STEAL: Tolerance = Tolerance::PercentAnd(5.0, 3_000_000);

/// CPU time of the loop during which one counter does not count, in milliseconds. `UNCOUNTED` is
/// the tolerance of the reported time.
const UNCOUNTED_MS: u64 = 200;
const UNCOUNTED: Tolerance = Tolerance::Percent(5.0);
/// Event-select bit for CMASK = 1. A paravirtual event has no cycles to compare with a threshold,
/// so a counter with a threshold does not count it.
const THRESHOLD: u64 = 1 << 24;

/// Returns the expected count of a paravirtual event over the work that provokes it.
fn expectation(event: ParavirtualEvent, n: u64, outcome: &Measurement) -> (ExpectedCount, &'static str) {
    use ParavirtualEvent::*;
    let facts = outcome.facts.first().copied().unwrap_or_default();
    let known = |value, tolerance| {
        (
            ExpectedCount::new(value, tolerance),
            "as often as the guest did it",
        )
    };
    let account = "the host kernel's account of the vCPU's thread";
    let kernel = |value, tolerance| (ExpectedCount::new(value, tolerance), account);
    match event {
        VmExits => known(n, Tolerance::AtLeast),
        IoExits | MmioExits | Halts => known(n, Tolerance::Exact),
        // KVM repeats an injection that was interrupted by an exit, and counts it again.
        IrqInjections | NmiInjections => known(n, Tolerance::Range(n, n + n / 20)),
        // The write to the MSR that stops the counter is one more MSR exit.
        MsrExits => known(n + 1, Tolerance::Exact),
        HostPageFaults => kernel(facts.page_faults, Tolerance::PercentAnd(0.0, 2)),
        // The kernel's accounting covers slightly more time than the counter, and includes the
        // context switches of a guest that halts before and after the work.
        HostContextSwitches => kernel(
            facts.context_switches,
            Tolerance::Range(n, facts.context_switches),
        ),
        HostMigrations => {
            let moves = facts.migrations.unwrap_or(0);
            kernel(moves, Tolerance::Range(moves.saturating_sub(3), moves))
        }
        StealNs => kernel(facts.wait_ns, STEAL),
        // The measuring counter is the only enabled one, and the VMM always counts its event.
        UncountedNs | BackingChanges => known(0, Tolerance::Exact),
    }
}

fn work(event: ParavirtualEvent) -> (&'static str, u64, &'static str) {
    use ParavirtualEvent::*;
    match event {
        VmExits | IoExits => ("ports", TIMES, "200 port writes"),
        MmioExits => ("mmio", TIMES, "200 reads of no device"),
        Halts => ("sleep", HALTS, "20 halts"),
        HostPageFaults => ("touch", TIMES, "200 fresh pages"),
        HostContextSwitches | HostMigrations => ("sleep", HALTS, "20 halts"),
        IrqInjections => ("irqs", TIMES, "200 interrupts"),
        NmiInjections => ("nmis", TIMES, "200 NMIs"),
        MsrExits => ("msrs", TIMES, "200 reads of a counter"),
        StealNs | UncountedNs | BackingChanges => ("busy", 0, "busy, CPL3"),
    }
}

impl Builtin<'_> {
    pub(super) fn paravirtual_rows(
        &self,
        guest: &mut MeasuringGuest,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let vendor = if guest.hello.amd {
            Vendor::Amd
        } else {
            Vendor::Intel
        };
        let select = u64::from(paravirtual_select(vendor).0);
        let select = select & 0xFF | select >> 8 << 32;
        for event in ParavirtualEvent::ALL {
            let (work, mut n, name) = work(event);
            let mut cpl = 0;
            if work == "busy" {
                cpl = 3;
                n = self.amount(guest, work, cpl, BUSY_MS)?;
            }
            let selector = select | u64::from(event.umask().0) << 8 | BOTH;
            let job = MeasurementJob::new(work, n).at_cpl(cpl).counter(selector);
            rows.push(measure_row(|| {
                let row =
                    ValidationRow::new(ValidationCheckKind::Counting, event.name(), "paravirtual", name);
                one(guest, event, &job, row)
            })?);
        }
        rows.push(measure_row(|| self.uncounted(guest, select))?);
        Ok(())
    }

    /// Measures the paravirtual event that counts the time for which another enabled counter could
    /// not count. The count must equal the duration of the loop.
    fn uncounted(
        &self,
        guest: &mut MeasuringGuest,
        select: u64,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let name = "busy, CPL3, beside an event nobody counts";
        let event = ParavirtualEvent::UncountedNs.name();
        let row = ValidationRow::new(ValidationCheckKind::Counting, event, "paravirtual", name);
        if guest.hello.gp < 2 {
            return Ok(row.unsupported("this PMU has one counter, and it takes two"));
        }
        let of = |event: ParavirtualEvent| select | u64::from(event.umask().0) << 8 | BOTH;
        let n = self.amount(guest, "busy", 3, UNCOUNTED_MS)?;
        let job = MeasurementJob::new("busy", n)
            .at_cpl(3)
            .counter(of(ParavirtualEvent::UncountedNs))
            .counter(of(ParavirtualEvent::Halts) | THRESHOLD);
        let outcome = guest.measure(&job, None)?;
        let Some(cpu) = outcome.cpus.first() else {
            return Ok(row.failed("the guest did not count it"));
        };
        let other = outcome.host(0, "gp1").and_then(|c| c.backing.as_deref());
        if other != Some("none") || cpu.c.get(1) != Some(&0) {
            return Ok(row.failed("somebody counts for the other counter"));
        }
        let ns = u128::from(cpu.tsc) * 1_000_000_000 / u128::from(self.host.tsc_hz.max(1));
        let expected = ExpectedCount::new(u64::try_from(ns).unwrap_or(u64::MAX), UNCOUNTED);
        let basis = "how long the loop took by the guest's TSC";
        let counter = GuestCounterId::General(0);
        Ok(judged(row, &outcome, 0, counter, expected, basis))
    }
}

fn one(
    guest: &mut MeasuringGuest,
    event: ParavirtualEvent,
    job: &MeasurementJob,
    row: ValidationRow,
) -> Result<ValidationRow, VmMeasurementError> {
    // Also count the event on the host, through an operator event.
    let spec = format!("pv/{}/", event.name());
    let operator = OperatorEventConfig::counting(&spec);
    let outcome = guest.measure(job, Some(operator))?;
    let statistic = outcome
        .operator
        .as_ref()
        .and_then(|saw| saw.reading(0, 0))
        .map(|r| r.value);
    if event == ParavirtualEvent::HostMigrations
        && outcome.facts.first().is_none_or(|f| f.migrations.is_none())
    {
        return Ok(row.unsupported(
            "this kernel does not say how often a thread moved, so there is nothing to compare with",
        ));
    }
    let (expected, basis) = expectation(event, job.n, &outcome);
    let row = judged(row, &outcome, 0, GuestCounterId::General(0), expected, basis);
    let backing = outcome.host(0, "gp0").and_then(|c| c.backing.as_deref());
    if row.guest == Some(0) && backing == Some("none") {
        return Ok(row.unsupported("this host's KVM keeps no such statistic"));
    }
    // KVM neither injects nor counts interrupts that the processor delivers itself (APICv, AVIC).
    // KVM's own statistic distinguishes this from a broken counter.
    if row.guest == Some(0) && statistic == Some(0) && expected.value > 0 && backing == Some("kvm-stat") {
        return Ok(row.unsupported("KVM's own statistic of it stood still meanwhile on this host"));
    }
    Ok(row)
}

#[cfg(test)]
mod tests {
    use super::super::fixture::outcome;
    use super::*;
    use crate::procfs::ThreadAccounting;

    fn allows(event: ParavirtualEvent, n: u64, facts: ThreadAccounting, counted: u64) -> bool {
        let mut seen = outcome(&[counted]);
        seen.facts = vec![facts];
        let (expected, _) = expectation(event, n, &seen);
        expected.tolerance.allows(counted, expected.value)
    }

    /// Events that the guest causes are counted exactly.
    #[test]
    fn guest_caused_events_are_exact() {
        use ParavirtualEvent::*;
        let facts = ThreadAccounting::default();
        for event in [IoExits, MmioExits, Halts] {
            let right = |counted| allows(event, 200, facts, counted);
            assert_eq!([199, 200, 201].map(right), [false, true, false], "{event:?}");
        }
        // The write to the MSR that stops the counter is one more MSR exit.
        assert_eq!(
            [200, 201, 202].map(|counted| allows(MsrExits, 200, facts, counted)),
            [false, true, false]
        );
        // Further exits may occur, and an injection that is interrupted by an exit is repeated.
        assert!(!allows(VmExits, 200, facts, 199) && allows(VmExits, 200, facts, 5000));
        assert!(!allows(IrqInjections, 200, facts, 199) && !allows(IrqInjections, 200, facts, 211));
        assert!(allows(NmiInjections, 200, facts, 210));
        assert!(allows(UncountedNs, 0, facts, 0) && !allows(UncountedNs, 0, facts, 1));
    }

    /// Events that the host causes match the host kernel's accounting data of the thread.
    #[test]
    fn host_caused_events_match_kernel_accounts() {
        use ParavirtualEvent::*;
        let facts = ThreadAccounting {
            cpu_ns: 0,
            wait_ns: 100_000_000,
            page_faults: 200,
            context_switches: 45,
            migrations: Some(4),
        };
        let right = |event, counted: &[u64]| {
            let allowed: Vec<bool> = counted.iter().map(|c| allows(event, 20, facts, *c)).collect();
            allowed
        };
        assert_eq!(
            right(HostPageFaults, &[197, 198, 202, 203]),
            [false, true, true, false]
        );
        assert_eq!(
            right(HostContextSwitches, &[19, 20, 45, 46]),
            [false, true, true, false]
        );
        assert_eq!(right(HostMigrations, &[0, 1, 4, 5]), [false, true, true, false]);
        // The tolerance is 5 % plus 3 ms.
        assert_eq!(
            right(StealNs, &[91_000_000, 93_000_000, 107_000_000, 109_000_000]),
            [false, true, true, false]
        );
    }

    /// For each paravirtual event, the guest performs work that causes the event.
    #[test]
    fn each_event_has_its_work() {
        for event in ParavirtualEvent::ALL {
            let (kind, n, name) = work(event);
            assert!(!name.is_empty());
            assert!(n > 0 || kind == "busy", "{event:?}: how much is measured first");
        }
    }
}
