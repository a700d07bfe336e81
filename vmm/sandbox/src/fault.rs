//! Faults that tests ask for: nothing of this is in a release.

use crate::kind::ThreadKind;

/// The kind of thread that is to panic when it begins its work.
#[cfg(debug_assertions)]
const PANICS: &str = "PERFVISOR_TEST_PANICS";

/// Panics if a test wants that of threads of `kind`. Does nothing in a release.
pub fn fault_point(kind: ThreadKind) {
    #[cfg(debug_assertions)]
    if std::env::var(PANICS).is_ok_and(|wanted| wanted == kind.name()) {
        std::panic::panic_any("a test wants it");
    }
    #[cfg(not(debug_assertions))]
    let _ = kind;
}
