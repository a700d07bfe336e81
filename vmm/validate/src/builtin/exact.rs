//! Checks of `--backing exact`. This mechanism single-steps every instruction, and its counts must
//! therefore equal known numbers.

use vpmu::ArchEvent;

use super::{Builtin, GuestCounterId, OS, USR, judged, known, selector, unbacked};
use crate::child::VmMeasurementError;
use crate::guest::{MeasurementJob, MeasuringGuest};
use crate::judge::{ExpectedCount, Tolerance};
use crate::report::{KNOWN, ValidationCheckKind, ValidationRow, ValidationRowCollector};

/// Number of loop iterations, which correspond to a few thousand steps.
const ROUNDS: u64 = 1000;
const EXACT: &str = "exact";
const COUNTER: GuestCounterId = GuestCounterId::General(0);

impl Builtin<'_> {
    pub(super) fn exact(&self, rows: &mut ValidationRowCollector<'_>) -> Result<(), VmMeasurementError> {
        if let Some(why) = &self.host.no_exact {
            let row = ValidationRow::new(
                ValidationCheckKind::Counting,
                "instructions, branches",
                EXACT,
                "-",
            );
            rows.push(row.unsupported(why.clone()));
            return Ok(());
        }
        let mut guest = self.start(EXACT, "1")?;
        self.exact_rows(&mut guest, rows)?;
        guest.end()
    }

    /// Measures every event over loops of known length at CPL 0, and instructions and branches at
    /// CPL 3.
    fn exact_rows(
        &self,
        guest: &mut MeasuringGuest,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let amd = guest.hello.amd;
        for event in ArchEvent::ALL {
            let Some(select) = selector(event, amd) else {
                continue;
            };
            // Under the exact backing, each instruction takes one cycle.
            let counted_as = match event {
                ArchEvent::CoreCycles | ArchEvent::RefCycles | ArchEvent::BusCycles => {
                    ArchEvent::Instructions
                }
                other => other,
            };
            for work in ["busy", "chase"] {
                let name = format!("{work}, CPL0");
                let row = ValidationRow::new(ValidationCheckKind::Counting, event.name(), EXACT, name);
                let job = MeasurementJob::new(work, ROUNDS).counter(select | OS);
                let Some(value) = known(counted_as, work, ROUNDS) else {
                    let why = "not a property of instructions, which is what stepping sees";
                    rows.push(unbacked(guest, row, &job, why)?);
                    break;
                };
                let expected = ExpectedCount::new(value, Tolerance::Exact);
                let outcome = guest.measure(&job, None)?;
                rows.push(judged(row, &outcome, 0, COUNTER, expected, KNOWN));
            }
        }
        for event in [ArchEvent::Instructions, ArchEvent::Branches] {
            let (Some(select), Some(all)) = (selector(event, amd), known(event, "busy", ROUNDS)) else {
                continue;
            };
            let name = format!("{}:u", event.name());
            let row = ValidationRow::new(ValidationCheckKind::Counting, name, EXACT, "busy, CPL3");
            let job = MeasurementJob::new("busy", ROUNDS)
                .at_cpl(3)
                .counter(select | USR);
            if !self.host.steps_user {
                let why = "this KVM cannot single-step CPL 3";
                rows.push(unbacked(guest, row, &job, why)?);
                continue;
            }
            // The known count includes the instructions around the work, which run at CPL 0 and are
            // not counted at CPL 3.
            let around = if event == ArchEvent::Instructions {
                super::AROUND
            } else {
                1
            };
            let expected = ExpectedCount::new(all - around, Tolerance::Exact);
            let outcome = guest.measure(&job, None)?;
            rows.push(judged(row, &outcome, 0, COUNTER, expected, KNOWN));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
