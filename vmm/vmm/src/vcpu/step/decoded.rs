//! Cache of decoded straight-line runs, indexed by address.

use std::sync::Arc;

use vpmu::exact::{MAX_RUN_BYTES, SingleStepMeter, SteppedGuestMemory, StraightLineCode};

/// Minimum number of instructions in a straight-line run. The instructions of a shorter run are
/// single-stepped, because a step costs less than a breakpoint.
pub(super) const MIN_RUN_LENGTH: usize = 3;
/// Number of cache slots, a power of two. Each slot holds the result for one address; a
/// straight-line run takes up to about 600 bytes.
pub(super) const CACHE_SLOTS: usize = 1024;

/// The straight-line run that the vCPU is executing.
#[derive(Debug)]
pub(super) struct CurrentStraightRun {
    /// Linear address of the first instruction.
    pub(super) address: u64,
    /// Decoded instructions of the run.
    pub(super) run: Arc<StraightLineCode>,
    /// Number of instructions of `run` that are executed up to the breakpoint.
    pub(super) count: usize,
}

/// Cached result of decoding the code at an address.
#[derive(Debug)]
pub(super) enum CachedDecode {
    /// A straight-line run. Valid while its bytes in guest memory are unchanged.
    Run(Arc<StraightLineCode>),
    /// Code that has modified itself, so its instructions are single-stepped.
    SelfModifying,
}

/// Cache of decoded straight-line runs. Before a run is used, its bytes are compared with those in
/// guest memory.
#[derive(Debug, Default)]
pub(super) struct RunCache {
    /// Address and result for each slot of the cache; empty before the first lookup.
    pub(super) entries: Vec<Option<(u64, CachedDecode)>>,
}

impl RunCache {
    fn entry_mut(&mut self, at: u64) -> &mut Option<(u64, CachedDecode)> {
        if self.entries.is_empty() {
            self.entries.resize_with(CACHE_SLOTS, || None);
        }
        let mixed = at ^ at >> 10;
        // A remainder of division by `CACHE_SLOTS` fits in `usize`.
        let place = usize::try_from(mixed % CACHE_SLOTS as u64).unwrap_or(0);
        &mut self.entries[place]
    }

    /// Returns the straight-line run that starts at `at`. Returns `None` if the run has too few
    /// instructions to be worth a breakpoint, or the code modifies itself or cannot be read.
    pub(super) fn find(
        &mut self,
        at: u64,
        meter: &mut SingleStepMeter,
        memory: &mut dyn SteppedGuestMemory,
    ) -> Option<Arc<StraightLineCode>> {
        let place = self.entry_mut(at);
        let mut code = [0; MAX_RUN_BYTES];
        match place {
            Some((there, CachedDecode::SelfModifying)) if *there == at => return None,
            Some((there, CachedDecode::Run(run))) if *there == at && is_at(run.code(), at, memory) => {
                return (run.len() >= MIN_RUN_LENGTH).then(|| run.clone());
            }
            _ => {}
        }
        let read = memory.read(at, &mut code).min(code.len());
        if read == 0 {
            return None;
        }
        let run = Arc::new(meter.straight_run(&code[..read]));
        *place = Some((at, CachedDecode::Run(run.clone())));
        (run.len() >= MIN_RUN_LENGTH).then_some(run)
    }

    /// Marks the first `count` instructions of `run`, which starts at `at`, as self-modifying code,
    /// so that they are single-stepped.
    pub(super) fn mark_self_modifying(&mut self, at: u64, run: &StraightLineCode, count: usize) {
        for n in 0..count {
            let at = at.wrapping_add(run.end_of(n) as u64);
            *self.entry_mut(at) = Some((at, CachedDecode::SelfModifying));
        }
    }
}

/// Returns `true` if guest memory at `at` contains `code`, whose length is at most
/// [`MAX_RUN_BYTES`].
pub(super) fn is_at(code: &[u8], at: u64, memory: &mut dyn SteppedGuestMemory) -> bool {
    let mut there = [0; MAX_RUN_BYTES];
    let Some(there) = there.get_mut(..code.len()) else {
        return false;
    };
    memory.read(at, there) == code.len() && there == code
}
