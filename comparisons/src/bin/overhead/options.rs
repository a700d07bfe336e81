//! Command-line options of the overhead comparison.

use std::path::PathBuf;

use clap::Parser;

use crate::sampling_method::SamplingMethods;

/// Compares the cost of sampling methods for a guest. Requires root for perf on another process.
#[derive(Parser)]
#[command(name = "overhead")]
pub(crate) struct Options {
    /// Use this perfvisor binary
    #[arg(long, value_name = "FILE", default_value_os_t = integration::artefacts::beside("perfvisor"))]
    pub(crate) perfvisor: PathBuf,
    /// Compare these methods
    #[arg(long, value_name = "LETTERS", default_value = "bcde")]
    pub(crate) ways: SamplingMethods,
    #[arg(long, value_name = "N", default_value_t = 24,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: u32,
    /// Set the number of measurement windows per sampling method in a round
    #[arg(long, value_name = "N", default_value_t = 4,
        value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) cycles: u32,
    #[arg(long, value_name = "N", default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(10..=20_000))]
    pub(crate) hz: u64,
    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}
