//! Fuzzes the event filter parser. Text must be rejected with a one-line error or result in a
//! usable filter.
#![no_main]

use vpmu::{EventFilter, EventSelect, EventSelection, UnitMask};

libfuzzer_sys::fuzz_target!(|text: &str| {
    match EventFilter::from_toml(text) {
        Ok(filter) => {
            for select in 0..=0xFFF {
                filter.allows(EventSelection::General(EventSelect(select), UnitMask(select as u8)));
            }
            for n in 0..4 {
                filter.allows(EventSelection::Fixed(n));
            }
        }
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
});
