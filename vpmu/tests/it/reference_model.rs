//! Tests that the PMU agrees with the reference model for arbitrary guest and host operations.

use proptest::prelude::*;
use vpmu::sim::SimCounterEvents;

use crate::testing;

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn pmu_matches_reference_model(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
        testing::stream::run::<SimCounterEvents>(&bytes);
    }
}
