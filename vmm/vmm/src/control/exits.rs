//! Exit statistics for control clients: the exits of each vCPU since a client began watching, and
//! the longest exits since its last request.

use std::sync::Arc;

use crate::vcpu::exit_times::{ExitCount, VcpuExitReason, VcpuExitStatistics};
use crate::vcpu::slot::VcpuSlot;
use control_api::protocol::{ExitsOfReason, VcpuExits};

/// Exit counts of all vCPUs at one moment, in the order of the vCPU slots.
pub(super) struct ExitCountSnapshot(Vec<Vec<ExitCount>>);

impl ExitCountSnapshot {
    /// Reads the exit counts of the vCPUs in `slots`. Reading resets the longest durations in the
    /// statistics, so the caller must pass the result to every watch
    /// ([`ExitWatch::record_longest`]).
    pub(super) fn out_of(slots: &[Arc<VcpuSlot>]) -> Self {
        Self::out_of_tables(slots.iter().map(|slot| &**slot.exits()))
    }

    fn out_of_tables<'t>(tables: impl Iterator<Item = &'t VcpuExitStatistics>) -> Self {
        Self(tables.map(VcpuExitStatistics::take).collect())
    }
}

/// Watch of one client over the exits of all vCPUs, from the client's first request for exits on.
/// Exits are counted and timed while at least one watch exists.
#[derive(Debug)]
pub(super) struct ExitWatch {
    tables: Vec<(u32, Arc<VcpuExitStatistics>)>,
    /// Exit counts of all vCPUs when the watch began, by vCPU and exit reason.
    before: Vec<Vec<ExitCount>>,
    /// Longest duration of an exit since the client's last request, in nanoseconds, by vCPU and
    /// exit reason.
    longest_ns: Vec<Vec<u64>>,
}

impl ExitWatch {
    /// Begins a watch of the vCPUs in `slots`. `taken` contains the exit counts at this moment.
    pub(super) fn begin(slots: &[Arc<VcpuSlot>], taken: &ExitCountSnapshot) -> Self {
        let tables = slots.iter().map(|slot| (slot.id().into(), slot.exits().clone()));
        Self::of_tables(tables.collect(), taken)
    }

    fn of_tables(tables: Vec<(u32, Arc<VcpuExitStatistics>)>, taken: &ExitCountSnapshot) -> Self {
        for (_, table) in &tables {
            table.watch();
        }
        Self {
            tables,
            before: taken.0.clone(),
            longest_ns: taken.0.iter().map(|cells| vec![0; cells.len()]).collect(),
        }
    }

    /// Updates the longest durations of this watch from `taken`.
    pub(super) fn record_longest(&mut self, taken: &ExitCountSnapshot) {
        for (longest, cells) in self.longest_ns.iter_mut().zip(&taken.0) {
            for (longest, cell) in longest.iter_mut().zip(cells) {
                *longest = cell.longest_ns.max(*longest);
            }
        }
    }

    /// Returns the exits between the start of the watch and `taken`, for each vCPU that had any.
    /// Updates the longest durations from `taken`, and resets them after the result is built.
    pub(super) fn exits_since_start(&mut self, taken: &ExitCountSnapshot) -> Vec<VcpuExits> {
        self.record_longest(taken);
        let mut told = Vec::new();
        let each = taken.0.iter().zip(&self.before).zip(&mut self.longest_ns);
        for ((vcpu, _), ((now, before), longest)) in self.tables.iter().zip(each) {
            let cells = now.iter().zip(before).zip(longest).zip(VcpuExitReason::ALL);
            let grown = cells.map(|(((now, before), longest), reason)| ExitsOfReason {
                reason: reason.name().to_owned(),
                count: now.count.wrapping_sub(before.count),
                timed: now.timed.wrapping_sub(before.timed),
                time_ns: now.time_ns.wrapping_sub(before.time_ns),
                max_ns: std::mem::take(longest),
            });
            let exits: Vec<_> = grown.filter(|of| of.count > 0 || of.timed > 0).collect();
            if !exits.is_empty() {
                told.push(VcpuExits { vcpu: *vcpu, exits });
            }
        }
        told
    }
}

impl Drop for ExitWatch {
    fn drop(&mut self) {
        for (_, table) in &self.tables {
            table.unwatch();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each client sees the exits since its watch began, regardless of other clients.
    #[test]
    fn exit_watches_are_independent() {
        let tables: Vec<_> = (0..2)
            .map(|vcpu| (vcpu, Arc::new(VcpuExitStatistics::default())))
            .collect();
        let take = || ExitCountSnapshot::out_of_tables(tables.iter().map(|(_, table)| &**table));
        let exit = |took_ns| tables[1].1.exit_for_tests(VcpuExitReason::Wrmsr, took_ns);
        let begin = || ExitWatch::of_tables(tables.clone(), &take());
        exit(1);
        let mut first = begin();
        assert_eq!(first.exits_since_start(&take()), []);
        exit(500);
        exit(100);
        let taken = take();
        first.record_longest(&taken);
        let mut second = begin();
        exit(50);
        let taken = take();
        first.record_longest(&taken);
        let one = |count, time_ns, max_ns| {
            let reason = "wrmsr".to_owned();
            let exits = vec![ExitsOfReason {
                reason,
                count,
                timed: count,
                time_ns,
                max_ns,
            }];
            vec![VcpuExits { vcpu: 1, exits }]
        };
        assert_eq!(second.exits_since_start(&taken), one(1, 50, 50));
        assert_eq!(first.exits_since_start(&take()), one(3, 650, 500));
        exit(7);
        assert_eq!(first.exits_since_start(&take()), one(4, 657, 7));
        drop(first);
        assert!(tables[1].1.is_watched());
        drop(second);
        assert!(!tables[1].1.is_watched());
    }
}
