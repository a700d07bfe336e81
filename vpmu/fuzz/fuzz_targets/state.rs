//! Fuzzes the parser of a saved PMU state. Input must be rejected or result in a state that is
//! saved as the same bytes.
#![no_main]

use vpmu::sim::SimEvents;
use vpmu::{Generation, PmuModel, Vpmu};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let v2 = PmuModel::new(Generation::AmdV2, None, None).expect("the default numbers fit");
    let v5 = PmuModel::new(Generation::Intel(5), None, None).expect("the default numbers fit");
    let mut events = SimEvents::default();
    for model in [PmuModel::INTEL, PmuModel::AMD, v2, v5] {
        let mut vpmu = Vpmu::new(model);
        // A fuzzer cannot guess checksums.
        let mut framed = bytes.to_vec();
        vpmu::fix_checksum(&mut framed);
        if vpmu.restore(&framed, &mut events).is_ok() {
            vpmu.reconcile(&mut events);
            assert_eq!(vpmu.save(&mut events), framed);
        }
    }
});
