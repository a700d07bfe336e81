//! Converts the statistics of a vCPU's run loop for control clients.

use perf_core::ContextStats;

use crate::vcpu::stats::VcpuStats;
use control_api::counts::{ContextCounts, VcpuCounts};

/// Returns the run-loop statistics of vCPU `vcpu` and the statistics of its perf-core context, in
/// the form that clients receive.
pub(super) fn vcpu_run_counts(vcpu: u32, stats: &VcpuStats, context: Option<ContextStats>) -> VcpuCounts {
    let kinds = [
        ("rdmsr", &stats.rdmsr),
        ("wrmsr", &stats.wrmsr),
        ("rdpmc", &stats.rdpmc),
        ("io_read", &stats.io_in),
        ("io_write", &stats.io_out),
        ("mmio", &stats.mmio),
        ("overflow", &stats.overflow_signals),
        ("kick", &stats.interrupted),
        ("debug", &stats.debug),
        ("halt", &stats.hlt),
    ];
    VcpuCounts {
        vcpu,
        exits: stats.exits.get(),
        kinds: kinds
            .iter()
            .map(|(kind, n)| ((*kind).to_owned(), n.get()))
            .collect(),
        register_faults: stats.gp_injected.get(),
        pmi_nmi: stats.pmi_nmi.get(),
        pmi_vector: stats.pmi_fixed.get(),
        pmi_none: stats.pmi_dropped.get(),
        pmi_throttled: stats.pmi_throttled.get(),
        pmi_held: stats.pmi_held.get(),
        pmi_held_ns: stats.pmi_held_ns.get(),
        pmi_masked_waits: stats.pmi_masked_waits.get(),
        pmi_withdrawn: stats.pmi_withdrawn.get(),
        steps: stats.steps.get(),
        steps_lost: stats.steps_lost.get(),
        unstepped: stats.unstepped.get(),
        context: context.map(|context| ContextCounts {
            events: context.events as u64,
            active: context.active as u64,
            waiting_groups: context.waiting_groups as u64,
            samples: context.samples,
            lost_samples: context.lost_samples,
            throttles: context.throttles,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpu_counts_map_to_protocol_fields() {
        let stats = VcpuStats::default();
        stats.exits.add(9);
        stats.hlt.add(4);
        stats.pmi_fixed.add(3);
        let counts = vcpu_run_counts(2, &stats, None);
        assert_eq!((counts.vcpu, counts.exits, counts.pmi_vector), (2, 9, 3));
        assert_eq!((counts.kinds["halt"], counts.kinds["rdmsr"]), (4, 0));
        assert_eq!(counts.context, None);
    }
}
