//! Describes to control clients how the guest has programmed its PMU.

use control_api::protocol::{GuestCounter, VcpuView};
use vpmu::{CounterBacking, CounterEventRequest, DecodedCounterEvent, GuestCounterStatus};

use crate::pmu::guest_view::VcpuPmuStatus;

/// Converts the view of one vCPU's PMU for a client.
pub(super) fn vcpu_view(view: &VcpuPmuStatus) -> VcpuView {
    let convert = if view.counted_by_kvm {
        kvm_counter
    } else {
        guest_counter
    };
    VcpuView {
        vcpu: view.vcpu,
        pmis: view.pmis,
        uncounted_ns: view.uncounted_ns,
        places_lost: view.places_lost,
        counters: view.counters.iter().map(convert).collect(),
    }
}

/// Converts the view of a guest counter that Perfvisor emulates.
fn guest_counter(view: &GuestCounterStatus) -> GuestCounter {
    GuestCounter {
        counter: view.counter.to_string(),
        enabled: view.enabled,
        event: view.request.as_ref().map(request_name),
        allowed: view.allowed,
        backing: view.backing.map(|b| b.name().to_owned()),
        value: view.value,
        counted: Some(view.counted),
        enabled_ns: Some(view.times.time_enabled_ns),
        running_ns: Some(view.times.time_running_ns),
        overflows: Some(view.overflows),
        pmi_requests: Some(view.pmi_requests),
        counting: Some(view.counting),
        fallback: view.fallback,
        uncounted_ns: Some(view.uncounted_ns),
    }
}

/// Converts the view of a counter of KVM's own vPMU. Omits all values that KVM does not report:
/// times, numbers of overflows, and counts apart from the register values.
fn kvm_counter(view: &GuestCounterStatus) -> GuestCounter {
    let counter = guest_counter(view);
    GuestCounter {
        backing: counter
            .event
            .is_some()
            .then(|| CounterBacking::Kvm.name().to_owned()),
        counted: None,
        enabled_ns: None,
        running_ns: None,
        overflows: None,
        pmi_requests: None,
        counting: None,
        fallback: false,
        uncounted_ns: None,
        ..counter
    }
}

/// Formats the event of a counter in perf's notation, with its privilege levels.
fn request_name(request: &CounterEventRequest) -> String {
    let name = match (request.event, request.raw_config()) {
        (DecodedCounterEvent::Raw, Some(config)) => format!("r{config:x}"),
        (event, _) => event.to_string(),
    };
    match (request.user, request.kernel) {
        (true, false) => name + ":u",
        (false, true) => name + ":k",
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use vpmu::registers::{PERF_CTL0, PERF_CTR0};
    use vpmu::{MsrAddress, PmuModel, Vpmu};

    use super::*;
    use crate::pmu::own;

    /// The view of a counter of KVM's own vPMU contains only values that KVM reports.
    #[test]
    fn kvm_view_contains_only_kvm_values() {
        let mut registers = Vpmu::new(PmuModel::AMD);
        // Cycles at both levels, enabled, on counter 1.
        registers.load_register(MsrAddress(PERF_CTL0 + 2), 0x0053_0076);
        registers.load_register(MsrAddress(PERF_CTR0 + 2), 0xFFFF_0000_1234);
        let view = vcpu_view(&VcpuPmuStatus {
            vcpu: 1,
            pmis: None,
            uncounted_ns: None,
            places_lost: None,
            counters: own::view(&mut registers),
            counted_by_kvm: true,
        });
        assert_eq!((view.vcpu, view.counters.len()), (1, 6));
        let counter = &view.counters[1];
        assert_eq!(counter.event.as_deref(), Some("cycles"));
        assert!(counter.enabled && counter.allowed);
        assert_eq!(
            (counter.value, counter.backing.as_deref()),
            (0xFFFF_0000_1234, Some("kvm"))
        );
        assert_eq!(
            (counter.enabled_ns, counter.overflows, counter.counted),
            (None, None, None)
        );
        let unused = &view.counters[0];
        assert_eq!((unused.event.as_deref(), unused.backing.as_deref()), (None, None));
    }
}
