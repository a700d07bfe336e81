//! Compares the cost of sampling methods for a guest.
//!
//! The guest reads its TSC at CPL 3 in a loop. A long gap between two readings means that the guest
//! did not run, and the guest reports the share of its time in such gaps. Its vCPU, alone on a CPU,
//! is sampled with one of these methods:
//!
//! - b: `perf record` on the vCPU's thread, with samples taken by the kernel and without call
//!   chains
//! - c: one signal per sample that makes `KVM_RUN` return, and nothing else, which is the lower
//!   bound for sampling from user space
//! - d: `perfvisor record --chain-every 1`, with a call chain in every sample
//! - e: `perfvisor record`, with instruction pointers sampled by the kernel and occasional call
//!   chains
//!
//! The speed of a virtual machine on which this program runs can change by a factor of two within a
//! second. The main result is therefore the time in which the guest did not run, and the methods
//! alternate in short windows. Each window with sampling is compared with the windows without
//! sampling before and after it. The output contains the median and the quartiles of these
//! comparisons. The output also contains the same values for the work done (TSC readings in equal
//! times), which includes effects such as cold caches but depends on the machine's speed. The ratio
//! of two methods' slowdowns is the median of the ratios of neighboring windows, and is printed
//! only if the lower slowdown is significantly above zero.

mod cpus;
mod figures;
mod guest;
mod options;
mod report;
mod sampling;
mod sampling_method;

use std::process::ExitCode;

use clap::Parser;
use comparisons::{ComparisonError, context, exit_code};

use crate::cpus::{pin, raise_priority};
use crate::guest::{GuestPace, MeasuredGuest};
use crate::options::Options;
use crate::report::{RoundSlowdowns, report};
use crate::sampling::ActiveSampling;

fn main() -> ExitCode {
    exit_code("overhead", measure(&Options::parse()))
}

fn measure(options: &Options) -> Result<bool, ComparisonError> {
    raise_priority();
    let guest = MeasuredGuest::start(&options.perfvisor)?;
    pin(&guest);
    let mut cycles = Vec::new();
    for round in 0..options.rounds {
        // Rotate the methods, so that each method takes each position in the order.
        let mut ways = options.ways.0.clone();
        let n = ways.len();
        ways.rotate_left(round as usize % n);
        let mut ready = Vec::new();
        for way in ways {
            let sampling = ActiveSampling::prepare(way, &guest, options.hz).map_err(context(way.name()))?;
            ready.push((way, sampling));
        }
        let mut before = guest.paced()?;
        for _ in 0..options.cycles {
            let mut cycle = RoundSlowdowns::new();
            for (way, sampling) in &mut ready {
                sampling.switch(true).map_err(context(way.name()))?;
                let with = guest.paced()?;
                sampling.switch(false).map_err(context(way.name()))?;
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
            sampling.stop().map_err(context(way.name()))?;
        }
    }
    if cycles.iter().all(|cycle| cycle.len() < options.ways.0.len()) {
        return Err("too few reports of the guest".into());
    }
    report(options, &cycles)
}
