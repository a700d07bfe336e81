//! Fuzzes the parser of a saved PMU state. The parser must reject the input, or restore a PMU that
//! is saved as the same bytes. Input of an older layout version must be saved in the current
//! version.
#![no_main]

use vpmu::sim::SimCounterEvents;
use vpmu::{PmuGeneration, PmuModel, Vpmu};

/// Byte range of the layout version in a saved PMU state.
const VERSION: std::ops::Range<usize> = 5..7;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let v2 = PmuModel::new(PmuGeneration::AmdV2, None, None).expect("the default numbers fit");
    let v5 = PmuModel::new(PmuGeneration::Intel(5), None, None).expect("the default numbers fit");
    let mut events = SimCounterEvents::default();
    let with_branch_records = [PmuModel::INTEL, v5, v2].map(PmuModel::with_branch_records);
    for model in [PmuModel::INTEL, PmuModel::AMD, v2, v5].into_iter().chain(with_branch_records) {
        let mut vpmu = Vpmu::new(model);
        // Adds a valid checksum, which a fuzzer cannot guess.
        let mut framed = bytes.to_vec();
        vpmu::fix_checksum(&mut framed);
        if vpmu.restore(&framed, &mut events).is_ok() {
            vpmu.reconcile(&mut events);
            let saved = vpmu.save(&mut events);
            if framed[VERSION] == saved[VERSION] {
                assert_eq!(saved, framed);
            } else {
                let mut again = Vpmu::new(model);
                again
                    .restore(&saved, &mut events)
                    .expect("a PMU can restore what it has saved");
                assert_eq!(again.save(&mut events), saved);
            }
        }
    }
});
