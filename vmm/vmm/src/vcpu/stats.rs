//! Statistics of a vCPU: exits by reason, PMIs, and single steps.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};

/// Defines [`VcpuStats`] from a list of fields and their labels.
macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident: $label:literal,)+) => {
        /// Statistics of one vCPU. Written only by the vCPU thread, readable by any thread.
        #[derive(Debug, Default)]
        pub struct VcpuStats {
            $($(#[$doc])* pub $field: SingleWriterStatistic,)+
        }

        impl VcpuStats {
            /// Returns all values with their labels, in display order.
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$(($label, self.$field.get()),)+]
            }

            /// Rebases the values when a vCPU thread starts, so that they accumulate over all
            /// threads of the vCPU.
            pub fn rebase(&self) {
                $(self.$field.before.store(self.$field.get(), Ordering::Relaxed);)+
            }
        }
    };
}

counters! {
    /// Returns of KVM_RUN to user space.
    exits: "exits to user space",
    /// RDMSR of a PMU register.
    rdmsr: "PMU register reads (RDMSR)",
    /// WRMSR of a PMU register.
    wrmsr: "PMU register writes (WRMSR)",
    /// RDPMC instructions emulated at the trap port.
    rdpmc: "counter reads (RDPMC trap)",
    /// Stops at the guest's #GP handler, where RDPMC that was not replaced is emulated.
    gp_intercepted: "#GP looked at for RDPMC",
    /// PMU accesses that raised #GP.
    gp_injected: "PMU accesses answered with #GP",
    /// Overflows of guest counters, regardless of how they were detected. Updated at signals and
    /// due PMIs.
    overflows: "counter overflows",
    /// PMIs delivered as NMI.
    pmi_nmi: "PMIs delivered as NMI",
    /// PMIs delivered as a fixed vector.
    pmi_fixed: "PMIs delivered as a vector",
    /// PMIs delayed by the rate limit.
    pmi_throttled: "PMIs held back by the rate limit",
    /// PMIs delayed because PMI handlers had taken their share of the vCPU's time.
    pmi_held: "PMIs held back for the guest's progress",
    /// Total time by which PMIs were delayed before they were delivered, in nanoseconds.
    pmi_held_ns: "their delay in ns",
    /// PMIs withdrawn because the guest cleared the overflow status while they were pending.
    /// Updated at the next PMI.
    pmi_withdrawn: "PMIs withdrawn while they waited",
    /// PMIs discarded because of an unusable LVTPC delivery mode.
    pmi_dropped: "PMIs with no usable LVTPC mode",
    /// VM entries with a due PMI that could not be delivered because LVTPC was masked.
    pmi_masked_waits: "entries with a PMI waiting for LVTPC",
    /// Overflow signals that interrupted the guest.
    overflow_signals: "overflow signals",
    /// Kicks and other signals.
    interrupted: "other interruptions (kicks)",
    /// Port reads.
    io_in: "port reads",
    /// Port writes, excluding RDPMC traps.
    io_out: "port writes",
    /// MMIO accesses.
    mmio: "MMIO accesses",
    /// Debug exits at breakpoints and after single steps.
    debug: "debug stops",
    /// Instructions that were single-stepped for the exact backing.
    steps: "single steps",
    /// Straight-line runs of instructions executed with one stop each, for the exact backing.
    runs: "straight runs",
    /// Instructions retired in straight-line runs.
    instructions_in_runs: "instructions in straight runs",
    /// Single steps and straight-line runs with unknown outcome, for which nothing was counted.
    steps_lost: "single steps that lost track",
    /// Sections of user code that could not be stepped.
    unstepped: "stretches of user code not stepped",
    /// PMIs before which the guest's branch records were collected.
    branch_pmis: "PMIs with branch records",
    /// Single steps and straight-line runs that collected branch records.
    branch_steps: "steps for branch records",
    /// Time of the steps that collected branch records, in nanoseconds.
    branch_ns: "their time in ns",
    /// HLT exits to user space (none with the in-kernel local APIC).
    hlt: "halts that reached user space",
}

/// A statistic with a single writer.
#[derive(Debug, Default)]
pub struct SingleWriterStatistic {
    count: AtomicU64,
    /// Value of the statistic when the vCPU thread started.
    before: AtomicU64,
}

impl SingleWriterStatistic {
    /// Adds one. Only the vCPU thread may call this, because the addition is a plain load and store
    /// instead of a locked instruction.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Adds `n`; see [`SingleWriterStatistic::inc`] for the restriction.
    pub fn add(&self, n: u64) {
        let sum = self.count.load(Ordering::Relaxed).wrapping_add(n);
        self.count.store(sum, Ordering::Relaxed);
    }

    /// Sets the increase since the vCPU thread started to `n`; see [`SingleWriterStatistic::inc`]
    /// for the restriction.
    pub fn set(&self, n: u64) {
        let before = self.before.load(Ordering::Relaxed);
        self.count.store(before.wrapping_add(n), Ordering::Relaxed);
    }

    /// Returns the current value.
    pub fn get(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

/// Formats the statistics of all vCPUs as a table with one column per vCPU and a total. Omits rows
/// that are zero everywhere.
pub fn table(vcpus: &[&VcpuStats]) -> String {
    let columns: Vec<_> = vcpus.iter().map(|s| s.all()).collect();
    let Some(first) = columns.first() else {
        return String::new();
    };
    let mut out = String::new();
    let _ = write!(out, "{:<40}", "");
    for i in 0..columns.len() {
        let _ = write!(out, " {:>12}", format!("vcpu{i}"));
    }
    if columns.len() > 1 {
        let _ = write!(out, " {:>12}", "total");
    }
    out.push('\n');
    for row in 0..first.len() {
        let values: Vec<u64> = columns.iter().map(|c| c[row].1).collect();
        let total: u64 = values.iter().sum();
        if total == 0 {
            continue;
        }
        let _ = write!(out, "{:<40}", first[row].0);
        for v in &values {
            let _ = write!(out, " {v:>12}");
        }
        if values.len() > 1 {
            let _ = write!(out, " {total:>12}");
        }
        out.push('\n');
    }
    out
}

impl fmt::Display for VcpuStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&table(&[self]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A statistic whose value comes from the PMU never decreases, although the PMU is rebuilt with
    /// each vCPU thread.
    #[test]
    fn statistics_accumulate_over_vcpu_threads() {
        let stats = VcpuStats::default();
        stats.rebase();
        stats.steps.set(5);
        stats.exits.add(2);
        stats.rebase();
        stats.steps.set(0);
        assert_eq!((stats.steps.get(), stats.exits.get()), (5, 2));
        stats.steps.set(3);
        stats.exits.add(2);
        assert_eq!((stats.steps.get(), stats.exits.get()), (8, 4));
    }

    /// The table has a total over the vCPUs and omits zero rows.
    #[test]
    fn table_sums_vcpus_and_omits_zero_rows() {
        let (a, b) = (VcpuStats::default(), VcpuStats::default());
        a.rdpmc.add(2);
        b.rdpmc.add(40);
        let text = table(&[&a, &b]);
        let row = text.lines().find(|l| l.contains("RDPMC")).unwrap();
        assert_eq!(
            row.split_whitespace().rev().take(3).collect::<Vec<_>>(),
            ["42", "40", "2"]
        );
        assert!(!text.contains("MMIO"));
    }
}
