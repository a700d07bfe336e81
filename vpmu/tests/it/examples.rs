//! The example VMM asserts what it says, and runs here as it does by hand.

#[path = "../../examples/tiny_vmm.rs"]
mod tiny_vmm;

use crate::common::skip;

/// A guest counts its cycles and is interrupted by its PMU, in a VMM of under 300 lines.
#[test]
fn a_tiny_vmm_has_a_pmu_that_works() {
    if !std::path::Path::new("/dev/kvm").exists() {
        return skip::skipped("no /dev/kvm here", false);
    }
    let result = tiny_vmm::main();
    assert!(result.is_ok(), "{result:?}");
}
