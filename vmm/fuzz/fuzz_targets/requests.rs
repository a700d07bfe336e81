//! Fuzzes the parser of control socket requests.
#![no_main]

use libfuzzer_sys::fuzz_target;
use control_api::protocol::{Call, RequestLine};

fuzz_target!(|data: &[u8]| {
    if let Ok(request) = serde_json::from_slice::<RequestLine>(data) {
        // A parsed request must survive a round trip through JSON.
        let text = serde_json::to_vec(&request).expect("a request can be written");
        let again: RequestLine = serde_json::from_slice(&text).expect("what was written can be read");
        assert_eq!(again, request);
        if let Call::Open { events, .. } = &request.call {
            let _ = control_api::events::list::parse(events);
        }
    }
});
