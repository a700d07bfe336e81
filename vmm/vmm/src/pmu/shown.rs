//! Guest counters as displayed to operators.

use control_api::protocol::GuestCounter;
use vpmu::{CounterView, EventRequest, GuestEvent};

/// Converts a guest counter to its control-API representation.
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

/// Formats an event with its privilege levels in perf's notation.
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
