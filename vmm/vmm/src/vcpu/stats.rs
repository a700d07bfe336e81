//! Statistics of a vCPU: exits by reason, PMIs, and single steps.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};

/// Defines [`VcpuStats`] from a list of counters, each with a label.
macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident: $label:literal,)+) => {
        /// Statistics of one vCPU. Written only by the vCPU thread, readable by any thread.
        #[derive(Debug, Default)]
        pub struct VcpuStats {
            $($(#[$doc])* pub $field: SingleWriterStatistic,)+
        }

        impl VcpuStats {
            /// Returns the label and the value of each counter, in display order.
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$(($label, self.$field.get()),)+]
            }

            /// Keeps the current values when a new vCPU thread starts, so that the statistics cover
            /// all threads of the vCPU.
            pub fn rebase(&self) {
                $(self.$field.before.store(self.$field.get(), Ordering::Relaxed);)+
            }
        }
    };
}

counters! {
    /// Number of returns from KVM_RUN to user space.
    exits: "exits to user space",
    /// Number of RDMSR instructions for a PMU register.
    rdmsr: "PMU register reads (RDMSR)",
    /// Number of WRMSR instructions for a PMU register.
    wrmsr: "PMU register writes (WRMSR)",
    /// Number of RDPMC instructions that were emulated, at the trap port, a breakpoint or the
    /// guest's #GP handler.
    rdpmc: "counter reads (RDPMC trap)",
    /// Number of stops at the guest's #GP handler, where RDPMC instructions that were not replaced
    /// are emulated.
    gp_intercepted: "#GP looked at for RDPMC",
    /// Number of accesses to the PMU that raised #GP.
    gp_injected: "PMU accesses answered with #GP",
    /// Number of overflows of guest counters, however they were detected. Updated when a signal
    /// arrives or a PMI is due.
    overflows: "counter overflows",
    /// Number of PMIs that were delivered as an NMI.
    pmi_nmi: "PMIs delivered as NMI",
    /// Number of PMIs that were delivered as an interrupt with the vector in LVTPC.
    pmi_fixed: "PMIs delivered as a vector",
    /// Number of PMIs that the rate limit has delayed.
    pmi_throttled: "PMIs held back by the rate limit",
    /// Number of PMIs that were delayed because the guest's PMI handlers had used their share of
    /// the vCPU's time.
    pmi_held: "PMIs held back for the guest's progress",
    /// Total delay of the PMIs that were delayed and then delivered, in nanoseconds.
    pmi_held_ns: "their delay in ns",
    /// Number of PMIs that were withdrawn before delivery, because the guest cleared the overflow
    /// status. Updated at the next PMI.
    pmi_withdrawn: "PMIs withdrawn while they waited",
    /// Number of PMIs that were discarded because LVTPC was unusable.
    pmi_dropped: "PMIs with no usable LVTPC mode",
    /// Number of entries into the guest at which a due PMI waited because LVTPC was masked.
    pmi_masked_waits: "entries with a PMI waiting for LVTPC",
    /// Number of overflow signals that interrupted the guest.
    overflow_signals: "overflow signals",
    /// Number of kicks and other signals that interrupted the guest.
    interrupted: "other interruptions (kicks)",
    /// Number of reads from I/O ports.
    io_in: "port reads",
    /// Number of writes to I/O ports, except for RDPMC traps.
    io_out: "port writes",
    /// Number of MMIO accesses.
    mmio: "MMIO accesses",
    /// Number of debug exits, at breakpoints and after single steps.
    debug: "debug stops",
    /// Number of instructions that were single-stepped for the exact backing.
    steps: "single steps",
    /// Number of straight-line runs for the exact backing. Each takes a single stop for several
    /// instructions.
    runs: "straight runs",
    /// Number of instructions that were retired in straight-line runs.
    instructions_in_runs: "instructions in straight runs",
    /// Number of single steps and straight-line runs whose outcome was unknown, so nothing was
    /// counted.
    steps_lost: "single steps that lost track",
    /// Number of times that user code ran without being stepped although a counter counts it.
    unstepped: "stretches of user code not stepped",
    /// Number of PMIs before which the guest's branch records were collected.
    branch_pmis: "PMIs with branch records",
    /// Number of single steps and straight-line runs that collected branch records.
    branch_steps: "steps for branch records",
    /// Total time of the steps that collected branch records, in nanoseconds.
    branch_ns: "their time in ns",
    /// Number of exits to user space for HLT. Always 0 with the in-kernel local APIC.
    hlt: "halts that reached user space",
}

/// A counter that one thread writes and any thread can read.
#[derive(Debug, Default)]
pub struct SingleWriterStatistic {
    count: AtomicU64,
    /// Value of the counter when the current vCPU thread started.
    before: AtomicU64,
}

impl SingleWriterStatistic {
    /// Adds one. Only the vCPU thread may call this method, because the counter is updated without
    /// a locked instruction.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Adds `n`. Only the vCPU thread may call this; see [`SingleWriterStatistic::inc`].
    pub fn add(&self, n: u64) {
        let sum = self.count.load(Ordering::Relaxed).wrapping_add(n);
        self.count.store(sum, Ordering::Relaxed);
    }

    /// Sets to `n` the amount that the current vCPU thread has added. Only the vCPU thread may call
    /// this; see [`SingleWriterStatistic::inc`].
    pub fn set(&self, n: u64) {
        let before = self.before.load(Ordering::Relaxed);
        self.count.store(before.wrapping_add(n), Ordering::Relaxed);
    }

    /// Returns the current value of the counter.
    pub fn get(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

/// Formats the statistics of all vCPUs as a table with a column for each vCPU and one for the
/// total. Omits rows in which all values are zero.
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

    /// A value that comes from the PMU never decreases, although each vCPU thread has a new PMU.
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

    /// The table has a column with the total over all vCPUs, and no row in which all values are
    /// zero.
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
