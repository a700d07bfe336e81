//! Runs the example VMM, which checks its own results.

#[path = "../../examples/tiny_vmm.rs"]
mod tiny_vmm;

use test_support::skip;

/// The example VMM has less than 300 lines, counts cycles and interrupts the guest.
#[test]
fn tiny_vmm_runs() {
    if !std::path::Path::new("/dev/kvm").exists() {
        return skip::skipped("no /dev/kvm here", false);
    }
    let result = tiny_vmm::main();
    assert!(result.is_ok(), "{result:?}");
}
