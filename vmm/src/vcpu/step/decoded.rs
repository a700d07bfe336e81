//! The decode of straight runs, kept by their address.

use std::sync::Arc;

use vpmu::exact::{GuestMemory, MOST_RUN_BYTES, StepMeter, StraightRun};

/// Runs of fewer instructions are stepped: a step costs less than a stop at a breakpoint.
pub(super) const SHORTEST: usize = 3;
/// Addresses whose decode is kept; a power of two. A run takes some 600 bytes at most.
pub(super) const KEPT: usize = 1024;

/// A run that was entered.
#[derive(Debug)]
pub(super) struct UnderWay {
    /// Where it begins.
    pub(super) at: u64,
    /// What it was decoded to.
    pub(super) run: Arc<StraightRun>,
    /// The breakpoint is behind so many of its instructions.
    pub(super) count: usize,
}

/// What was found at an address.
#[derive(Debug)]
pub(super) enum Found {
    /// This, as long as its bytes are there.
    Run(Arc<StraightRun>),
    /// An instruction of a run that changed its own code: they are stepped.
    ChangesItself,
}

/// The decode of runs, by their address. What is there is used only where its bytes still are.
#[derive(Debug, Default)]
pub(super) struct Runs {
    /// Empty until the first run.
    pub(super) kept: Vec<Option<(u64, Found)>>,
}

impl Runs {
    fn place(&mut self, at: u64) -> &mut Option<(u64, Found)> {
        if self.kept.is_empty() {
            self.kept.resize_with(KEPT, || None);
        }
        let mixed = at ^ at >> 10;
        // A remainder of `KEPT` fits.
        let place = usize::try_from(mixed % KEPT as u64).unwrap_or(0);
        &mut self.kept[place]
    }

    /// The run that begins at `at`, if it is worth a breakpoint.
    pub(super) fn find(
        &mut self,
        at: u64,
        meter: &mut StepMeter,
        memory: &mut dyn GuestMemory,
    ) -> Option<Arc<StraightRun>> {
        let place = self.place(at);
        let mut code = [0; MOST_RUN_BYTES];
        match place {
            Some((there, Found::ChangesItself)) if *there == at => return None,
            Some((there, Found::Run(run))) if *there == at && is_at(run.code(), at, memory) => {
                return (run.len() >= SHORTEST).then(|| run.clone());
            }
            _ => {}
        }
        let read = memory.read(at, &mut code).min(code.len());
        if read == 0 {
            return None;
        }
        let run = Arc::new(meter.straight_run(&code[..read]));
        *place = Some((at, Found::Run(run.clone())));
        (run.len() >= SHORTEST).then_some(run)
    }

    /// None of the first `count` instructions of `run`, which begins at `at`, is to begin a run any more.
    pub(super) fn changes_itself(&mut self, at: u64, run: &StraightRun, count: usize) {
        for n in 0..count {
            let at = at.wrapping_add(run.end_of(n) as u64);
            *self.place(at) = Some((at, Found::ChangesItself));
        }
    }
}

/// Whether `code`, of [`MOST_RUN_BYTES`] at most, is what lies at `at`.
pub(super) fn is_at(code: &[u8], at: u64, memory: &mut dyn GuestMemory) -> bool {
    let mut there = [0; MOST_RUN_BYTES];
    let Some(there) = there.get_mut(..code.len()) else {
        return false;
    };
    memory.read(at, there) == code.len() && there == code
}
