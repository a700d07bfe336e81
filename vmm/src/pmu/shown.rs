//! The guest's counters as operators see them.

use control_api::protocol::GuestCounter;
use vpmu::{CounterView, EventRequest, GuestEvent};

/// A counter of the guest as it is shown.
pub(super) fn guest_counter(view: &CounterView) -> GuestCounter {
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

/// An event with the levels it counts, as perf writes them.
pub(super) fn request_name(request: &EventRequest) -> String {
    let name = match (request.event, request.raw_config()) {
        (GuestEvent::Raw, Some(config)) => format!("r{config:x}"),
        (event, _) => event.to_string(),
    };
    match (request.user, request.kernel) {
        (true, false) => name + ":u",
        (false, true) => name + ":k",
        _ => name,
    }
}
