//! Fault injection for tests, not compiled into release builds.

use crate::kind::SandboxedThreadKind;

/// Environment variable that contains the kind of thread that must panic when it starts.
#[cfg(debug_assertions)]
const PANICS: &str = "PERFVISOR_TEST_PANICS";

/// Environment variable with the faults that workers trigger when they start: one word per worker,
/// in the order of their start, separated by commas. The words are `panic`, `memory`, `time`,
/// `call`, or any other word for no fault.
#[cfg(debug_assertions)]
const WORKERS: &str = "PERFVISOR_TEST_WORKERS";

/// Injects the fault that a test has configured for worker `number`. Has no effect in a release
/// build.
pub fn worker_fault(number: u32) {
    #[cfg(debug_assertions)]
    if let Ok(words) = std::env::var(WORKERS) {
        inject(words.split(',').nth(number as usize).unwrap_or_default());
    }
    #[cfg(not(debug_assertions))]
    let _ = number;
}

#[cfg(debug_assertions)]
fn inject(word: &str) {
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
        // Make a call that the allow-list of workers does not contain.
        "call" => drop(std::os::unix::net::UnixDatagram::unbound()),
        _ => {}
    }
}

/// Panics if a test has requested a panic for threads of `kind`. Has no effect in a release build.
pub fn fault_point(kind: SandboxedThreadKind) {
    #[cfg(debug_assertions)]
    if std::env::var(PANICS).is_ok_and(|wanted| wanted == kind.name()) {
        std::panic::panic_any("a test wants it");
    }
    #[cfg(not(debug_assertions))]
    let _ = kind;
}
