//! What sampling costs a guest, the ways to do it side by side.
//!
//! One guest reads its TSC at CPL3, over and over, and tells how much of its time lies in gaps between two
//! readings, when it was not run. Its vCPU, alone on a CPU, is sampled in one of these ways:
//!
//! - b: `perf record` on the vCPU's thread: the kernel's samples, without call chains
//! - c: a signal for each sample that takes the vCPU out of `KVM_RUN`, and nothing else: the floor of what is
//!   taken from user space
//! - d: `perfvisor record --chain-every 1`: a call chain with every sample
//! - e: `perfvisor record`: instruction pointers by the kernel, chains now and then
//!
//! A machine that is itself virtual runs at one speed now and at another a second later, up to twice as fast
//! as seen here. So what decides is the time in which the guest was not run, and the ways take turns all the
//! time, each on for a moment and off for another: each stretch with sampling is compared with those without
//! it right before and right after. Shown are the median of all such comparisons and their quartiles, and
//! beside them the same of the work done (readings of the TSC in equal times), which holds more, such as cold
//! caches, but depends on the machine's speed. A ratio of two slowdowns is the median of those of
//! neighbouring turns, and is given only where the lower slowdown is known to be more than nothing.

mod cpus;
mod figures;
mod guest;
mod options;
mod report;
mod sampling;
mod sampling_method;

use std::process::ExitCode;

use clap::Parser;
use integration::artefacts::describe;

use crate::cpus::{go_first, pin};
use crate::guest::{GuestPace, MeasuredGuest, MeasuredGuestError};
use crate::options::Options;
use crate::report::{ReportError, RoundSlowdowns, report};
use crate::sampling::{ActiveSampling, SamplingError};
use crate::sampling_method::SamplingMethod;

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
enum OverheadError {
    #[error(transparent)]
    Guest(#[from] MeasuredGuestError),
    #[error("{}", .0.name())]
    Way(SamplingMethod, #[source] SamplingError),
    #[error("the guest told too little")]
    TooLittle,
    #[error(transparent)]
    Report(#[from] ReportError),
}

fn main() -> ExitCode {
    let options = Options::parse();
    match measure(&options) {
        Ok(met) => ExitCode::from(u8::from(!met)),
        Err(error) => {
            eprintln!("overhead: {}", describe(&error));
            ExitCode::from(2)
        }
    }
}

fn measure(options: &Options) -> Result<bool, OverheadError> {
    go_first();
    let guest = MeasuredGuest::start(&options.perfvisor)?;
    pin(&guest);
    let mut cycles = Vec::new();
    for round in 0..options.rounds {
        // Each way comes in each place.
        let mut ways = options.ways.0.clone();
        let n = ways.len();
        ways.rotate_left(round as usize % n);
        let mut ready = Vec::new();
        for way in ways {
            let sampling = ActiveSampling::prepare(way, &guest, options.hz).map_err(of(way))?;
            ready.push((way, sampling));
        }
        let mut before = guest.paced()?;
        for _ in 0..options.cycles {
            let mut cycle = RoundSlowdowns::new();
            for (way, sampling) in &mut ready {
                sampling.switch(true).map_err(of(*way))?;
                let with = guest.paced()?;
                sampling.switch(false).map_err(of(*way))?;
                let after = guest.paced()?;
                if let (Some(before), Some(with), Some(after)) = (before, with, after)
                    && let Some(without) = GuestPace::mean(&[before, after])
                {
                    cycle.insert(way.letter(), with.slowdown(without));
                }
                before = after;
            }
            cycles.push(cycle);
        }
        for (way, sampling) in ready {
            sampling.stop().map_err(of(way))?;
        }
    }
    if cycles.iter().all(|cycle| cycle.len() < options.ways.0.len()) {
        return Err(OverheadError::TooLittle);
    }
    Ok(report(options, &cycles)?)
}

/// What went wrong with `way`.
fn of(way: SamplingMethod) -> impl Fn(SamplingError) -> OverheadError {
    move |error| OverheadError::Way(way, error)
}
