//! `perfvisor diff`: compares two recordings, like `perf diff`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::files::{RecordingFileError, SymbolArgs, read_profile, symbolizer, warn_missing_data};
use super::{DONE, print};
use crate::exit::ExitStatus;
use crate::values::{SortKeys, parse_percent, parse_sort};
use guest_profile::export::diff::{diffs, render};
use guest_profile::export::report::ProfileReportOptions;

/// `perfvisor diff`.
#[derive(Clone, Debug, Args)]
pub struct DiffArgs {
    /// Older and newer recording. If only one FILE is given, it is the newer one [default:
    /// perf.data.old and perf.data, as two runs of record leave them]
    #[arg(value_name = "FILE", num_args = 0..=2)]
    pub recordings: Vec<PathBuf>,
    /// Group by these columns: comm, pid, vcpu, dso, sym.
    #[arg(short, long, value_name = "KEYS", default_value = "dso,sym", value_parser = parse_sort)]
    pub sort: SortKeys,
    /// Hide rows with less than this share in both recordings, in percent.
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = parse_percent)]
    pub percent_limit: f64,
    /// Sources of symbols, for both recordings.
    #[command(flatten)]
    pub symbols: SymbolArgs,
}

impl DiffArgs {
    /// Returns the paths of the older and the newer recording.
    fn paths(&self) -> (&Path, &Path) {
        let (old, new) = (Path::new("perf.data.old"), Path::new("perf.data"));
        match self.recordings.as_slice() {
            [] => (old, new),
            [new] => (old, new),
            [old, new, ..] => (old, new),
        }
    }
}

/// Prints the differences between two recordings.
///
/// # Errors
/// Returns [`RecordingFileError`] if a recording cannot be read.
pub fn diff(args: &DiffArgs) -> Result<ExitStatus, RecordingFileError> {
    let (old, new) = args.paths();
    let (Some(old), Some(new)) = (read_profile(old)?, read_profile(new)?) else {
        return Ok(DONE);
    };
    let mut old_symbols = symbolizer(&old, &args.symbols)?;
    let mut new_symbols = symbolizer(&new, &args.symbols)?;
    let options = ProfileReportOptions {
        sort: args.sort.0.clone(),
        min_percent: args.percent_limit,
        ..ProfileReportOptions::default()
    };
    let (diffs, alone) = diffs((&old, &mut old_symbols), (&new, &mut new_symbols), &options);
    print(&render(&diffs, &options.sort))?;
    for event in alone {
        log::warn!("'{event}' is in only one of the recordings and is not compared");
    }
    warn_missing_data(&old, &old_symbols);
    warn_missing_data(&new, &new_symbols);
    Ok(DONE)
}
