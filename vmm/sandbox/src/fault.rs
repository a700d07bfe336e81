//! Faults that tests ask for: nothing of this is in a release.

use crate::kind::ThreadKind;

/// The kind of thread that is to panic when it begins its work.
#[cfg(debug_assertions)]
const PANICS: &str = "PERFVISOR_TEST_PANICS";

/// What workers are to suffer when they begin, one word for each in turn: `panic`, `memory`, `time`, `call`,
/// or anything else for nothing.
#[cfg(debug_assertions)]
const WORKERS: &str = "PERFVISOR_TEST_WORKERS";

/// Has worker `number` fail as a test wants it. Does nothing in a release.
pub fn worker_fault(number: u32) {
    #[cfg(debug_assertions)]
    if let Ok(words) = std::env::var(WORKERS) {
        suffer(words.split(',').nth(number as usize).unwrap_or_default());
    }
    #[cfg(not(debug_assertions))]
    let _ = number;
}

#[cfg(debug_assertions)]
fn suffer(word: &str) {
    match word {
        "panic" => std::panic::panic_any("a test wants it"),
        "memory" => {
            let mut all: Vec<Vec<u8>> = Vec::new();
            loop {
                all.push(vec![1; 1 << 20]);
            }
        }
        "time" => loop {
            std::hint::black_box(word);
        },
        // It is on no list of a worker's.
        "call" => drop(std::os::unix::net::UnixDatagram::unbound()),
        _ => {}
    }
}

/// Panics if a test wants that of threads of `kind`. Does nothing in a release.
pub fn fault_point(kind: ThreadKind) {
    #[cfg(debug_assertions)]
    if std::env::var(PANICS).is_ok_and(|wanted| wanted == kind.name()) {
        std::panic::panic_any("a test wants it");
    }
    #[cfg(not(debug_assertions))]
    let _ = kind;
}
