//! What a vCPU did, counted: exits by kind, and the life of its PMIs.

use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};

/// Defines the counters once: field, and the words it is shown with.
macro_rules! counters {
    ($($(#[$doc:meta])* $field:ident: $label:literal,)+) => {
        /// Counters of one vCPU. Written by its thread only, read by any.
        #[derive(Debug, Default)]
        pub struct VcpuStats {
            $($(#[$doc])* pub $field: Counter,)+
        }

        impl VcpuStats {
            /// All counters with their names, in the order they are shown.
            pub fn all(&self) -> Vec<(&'static str, u64)> {
                vec![$(($label, self.$field.get()),)+]
            }

            /// The vCPU has come, perhaps again: all count on from where they are.
            pub fn go_on(&self) {
                $(self.$field.before.store(self.$field.get(), Ordering::Relaxed);)+
            }
        }
    };
}

counters! {
    /// All returns of KVM_RUN to user space.
    exits: "exits to user space",
    /// RDMSR of a PMU register.
    rdmsr: "PMU register reads (RDMSR)",
    /// WRMSR of a PMU register.
    wrmsr: "PMU register writes (WRMSR)",
    /// RDPMC, as the patched `out`.
    rdpmc: "counter reads (RDPMC trap)",
    /// Stops at the guest's handler of #GP, where RDPMC is served that was not replaced.
    gp_looked_at: "#GP looked at for RDPMC",
    /// PMU accesses answered with #GP.
    gp_injected: "PMU accesses answered with #GP",
    /// Overflows of counters.
    overflows: "counter overflows",
    /// PMIs delivered as NMI.
    pmi_nmi: "PMIs delivered as NMI",
    /// PMIs delivered as a fixed vector.
    pmi_fixed: "PMIs delivered as a vector",
    /// PMIs that the rate limit held back before they were delivered.
    pmi_throttled: "PMIs held back by the rate limit",
    /// PMIs forgotten because the guest served what asked for them while they waited. Up to date at the next
    /// PMI.
    pmi_withdrawn: "PMIs withdrawn while they waited",
    /// PMIs whose LVTPC delivery mode delivers nothing here.
    pmi_dropped: "PMIs with no usable LVTPC mode",
    /// Entries at which a due PMI had to wait because LVTPC was masked.
    pmi_masked_waits: "entries with a PMI waiting for LVTPC",
    /// Overflow signals that interrupted the guest.
    overflow_signals: "overflow signals",
    /// Kicks and other signals.
    interrupted: "other interruptions (kicks)",
    /// Port reads.
    io_in: "port reads",
    /// Port writes other than the RDPMC trap's.
    io_out: "port writes",
    /// MMIO accesses.
    mmio: "MMIO accesses",
    /// Stops at breakpoints and behind single steps.
    debug: "debug stops",
    /// Instructions stepped for the exact backing.
    steps: "single steps",
    /// Straight runs of instructions for the exact backing, each with one stop.
    runs: "straight runs",
    /// Instructions that retired in them.
    in_runs: "instructions in straight runs",
    /// Steps and runs whose outcome is not known: nothing was counted for them.
    steps_lost: "single steps that lost track",
    /// Stretches of user code that could not be stepped.
    unstepped: "stretches of user code not stepped",
    /// HLT exits to user space (none with the in-kernel local APIC).
    hlt: "halts that reached user space",
}

/// A counter with one writer.
#[derive(Debug, Default)]
pub struct Counter {
    count: AtomicU64,
    /// What it was when the vCPU came.
    before: AtomicU64,
}

impl Counter {
    /// Adds one. Only the vCPU's own thread may: a load and a store, no locked instruction.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Adds `n`; see [`Counter::inc`].
    pub fn add(&self, n: u64) {
        let sum = self.count.load(Ordering::Relaxed).wrapping_add(n);
        self.count.store(sum, Ordering::Relaxed);
    }

    /// There were `n` since the vCPU came; see [`Counter::inc`].
    pub fn set(&self, n: u64) {
        let before = self.before.load(Ordering::Relaxed);
        self.count.store(before.wrapping_add(n), Ordering::Relaxed);
    }

    /// The count so far.
    pub fn get(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

/// A table of the counters of all vCPUs, one column each and a total; rows that are zero everywhere are left
/// out.
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

    /// What is set from the count of a PMU that is new each time the vCPU comes does not go back.
    #[test]
    fn a_vcpu_that_comes_again_counts_on() {
        let stats = VcpuStats::default();
        stats.go_on();
        stats.steps.set(5);
        stats.exits.add(2);
        stats.go_on();
        stats.steps.set(0);
        assert_eq!((stats.steps.get(), stats.exits.get()), (5, 2));
        stats.steps.set(3);
        stats.exits.add(2);
        assert_eq!((stats.steps.get(), stats.exits.get()), (8, 4));
    }

    /// The table shows a total over vCPUs and leaves out what never happened.
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
