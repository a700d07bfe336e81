//! Fuzzes the parser of event lists, which are the argument of `-e`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use control_api::events::list;

fuzz_target!(|data: &[u8]| {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = list::parse(text);
    }
});
