//! What clients send: requests of the control socket, and heads of HTTP requests for the metrics.
#![no_main]

use libfuzzer_sys::fuzz_target;
use control_api::protocol::{Call, RequestLine};
use perfvisor_vmm::metrics::http::{self, MAX_HEAD};

fuzz_target!(|data: &[u8]| {
    if let Ok(request) = serde_json::from_slice::<RequestLine>(data) {
        // What was understood means the same when it is said again.
        let text = serde_json::to_vec(&request).expect("a request can be written");
        let again: RequestLine = serde_json::from_slice(&text).expect("what was written can be read");
        assert_eq!(again, request);
        if let Call::Open { events, .. } = &request.call {
            let _ = control_api::events::list::parse(events);
        }
    }
    let asked = http::parse(&data[..data.len().min(MAX_HEAD)]);
    assert!(asked.is_some() || data.len() < MAX_HEAD, "a full head is decided on");
});
