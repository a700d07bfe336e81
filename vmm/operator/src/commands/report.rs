//! `perfvisor report` and `script`: the samples of a recording as text or JSON.

use std::io::{self, BufWriter, Write};

use clap::Args;

use super::files::{RecordingFileArgs, RecordingFileError, with_profile};
use super::output::{print, written};
use crate::exit::ExitStatus;
use crate::values::{SortKeys, parse_percent, parse_sort};
use guest_profile::export::call_tree::{CallGraphOptions, CallGraphOrder};
use guest_profile::export::filter::SampleFilter;
use guest_profile::export::report::{ProfileReportColumn, ProfileReportOptions};
use guest_profile::export::script::{ScriptField, ScriptFields, ScriptFormat, ScriptOptions};
use guest_profile::export::symbolize::complete_chains;
use guest_profile::export::{report as table, script as samples};

/// Filter of the samples to show.
#[derive(Clone, Debug, Default, Args)]
pub struct SampleFilterArgs {
    /// Select samples of these tasks.
    #[arg(short, long, value_name = "LIST", value_delimiter = ',')]
    pub comms: Vec<String>,
    /// Select samples in these objects, given as paths or file names.
    #[arg(short, long, value_name = "LIST", value_delimiter = ',')]
    pub dsos: Vec<String>,
    /// Select samples in these functions.
    #[arg(short = 'S', long, value_name = "LIST", value_delimiter = ',')]
    pub symbols: Vec<String>,
}

impl SampleFilterArgs {
    fn filter(&self) -> SampleFilter {
        SampleFilter {
            comms: self.comms.clone(),
            objects: self.dsos.clone(),
            symbols: self.symbols.clone(),
        }
    }
}

/// `perfvisor report`.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Which file.
    #[command(flatten)]
    pub file: RecordingFileArgs,
    /// Group by these columns: comm, pid, vcpu, dso, sym.
    #[arg(short, long, value_name = "KEYS", default_value = "comm,dso,sym", value_parser = parse_sort)]
    pub sort: SortKeys,
    /// Columns to print: overhead, sample, period and those of --sort. Replaces the columns of
    /// --sort.
    #[arg(short = 'F', long, value_name = "LIST", value_parser = parse_columns)]
    pub fields: Option<ProfileReportColumns>,
    /// Hide rows with less than this share, in percent.
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = parse_percent)]
    pub percent_limit: f64,
    /// Print the call chains below each row: callee (from the function to its callers) or caller
    /// (from the outermost caller), and the minimum share of a branch in percent, as in caller,2
    /// [default: callee,0.5]
    #[arg(short = 'g', long, value_name = "ORDER[,PERCENT]", num_args = 0..=1, default_missing_value = "callee",
          value_parser = parse_call_graph)]
    pub call_graph: Option<CallGraphOptions>,
    /// Samples to show. The shares are still relative to all samples.
    #[command(flatten)]
    pub filter: SampleFilterArgs,
}

/// `perfvisor script`.
#[derive(Clone, Debug, Args)]
pub struct ScriptArgs {
    /// Which file.
    #[command(flatten)]
    pub file: RecordingFileArgs,
    /// Fields to print: comm, pid, tid, cpu, time, period, event, ip, sym, symoff, dso [default:
    /// all]
    #[arg(short = 'F', long, value_name = "LIST", value_parser = parse_fields)]
    pub fields: Option<ScriptFields>,
    /// Print one JSON object per sample.
    #[arg(long)]
    pub json: bool,
    /// Samples to print.
    #[command(flatten)]
    pub filter: SampleFilterArgs,
}

/// Error returned when an option value of `perfvisor report` or `script` is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseReportValueError {
    #[error("'{0}' is no column; known are overhead, sample, period, comm, pid, vcpu, dso and sym")]
    Column(String),
    #[error("'{0}' is no field; known are {known}", known = ScriptField::ALL.map(|(name, _)| name).join(", "))]
    Field(String),
    #[error("must be callee or caller, and a share from 0 to 100 after a comma, as in caller,2")]
    CallGraph,
}

/// Columns of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileReportColumns(pub Vec<ProfileReportColumn>);

/// Parses the columns of a report, such as `overhead,sym`.
fn parse_columns(text: &str) -> Result<ProfileReportColumns, ParseReportValueError> {
    let column = |name: &str| {
        let found = ProfileReportColumn::from_name(name.trim());
        found.ok_or_else(|| ParseReportValueError::Column(name.to_owned()))
    };
    text.split(',')
        .map(column)
        .collect::<Result<_, _>>()
        .map(ProfileReportColumns)
}

/// Parses the fields of samples, such as `comm,ip,sym`.
fn parse_fields(text: &str) -> Result<ScriptFields, ParseReportValueError> {
    let field = |name: &str| {
        let found = ScriptField::from_name(name.trim());
        found.ok_or_else(|| ParseReportValueError::Field(name.to_owned()))
    };
    let fields: Result<_, _> = text.split(',').map(field).collect();
    fields.map(ScriptFields::new)
}

/// Parses the options of a call graph, in any order as in perf. `graph`, perf's name for the only
/// supported style, has no effect.
fn parse_call_graph(text: &str) -> Result<CallGraphOptions, ParseReportValueError> {
    let mut options = CallGraphOptions::default();
    for word in text.split(',').map(str::trim) {
        match word {
            "callee" => options.order = CallGraphOrder::Callee,
            "caller" => options.order = CallGraphOrder::Caller,
            "graph" => {}
            share => {
                options.min_percent = parse_percent(share).map_err(|_| ParseReportValueError::CallGraph)?;
            }
        }
    }
    Ok(options)
}

/// Prints a report of the samples in a recording.
///
/// # Errors
/// Returns [`RecordingFileError`] if the recording or the symbols cannot be read.
pub fn report(args: &ReportArgs) -> Result<ExitStatus, RecordingFileError> {
    let mut options = ProfileReportOptions {
        sort: args.sort.0.clone(),
        columns: args.fields.as_ref().map(|columns| columns.0.clone()),
        min_percent: args.percent_limit,
        filter: args.filter.filter(),
        call_graph: args.call_graph,
    };
    if let Some(columns) = &options.columns {
        let keys = columns.iter().filter_map(|column| match column {
            ProfileReportColumn::Key(key) => Some(*key),
            _ => None,
        });
        options.sort = keys.collect();
    }
    with_profile(&args.file, |profile, symbols| {
        let text = match options.call_graph {
            Some(_) => table::render(&complete_chains(profile, symbols), symbols, &options),
            None => table::render(profile, symbols, &options),
        };
        Ok(print(&text)?)
    })
}

/// Prints every sample of a recording.
///
/// # Errors
/// Returns [`RecordingFileError`] if the recording cannot be read.
pub fn script(args: &ScriptArgs) -> Result<ExitStatus, RecordingFileError> {
    let options = ScriptOptions {
        fields: args.fields.clone().unwrap_or_default(),
        format: if args.json {
            ScriptFormat::Json
        } else {
            ScriptFormat::Text
        },
        filter: args.filter.filter(),
    };
    with_profile(&args.file, |profile, symbols| {
        let mut out = BufWriter::new(io::stdout().lock());
        let result = samples::write_with(profile, symbols, &options, &mut out);
        Ok(written(result.and_then(|()| out.flush()))?)
    })
}

#[cfg(test)]
mod tests {
    use guest_profile::export::report::SortKey;

    use super::*;

    #[test]
    fn report_options_are_parsed_like_perf() {
        let graph = |text| parse_call_graph(text).map(|graph| (graph.order, graph.min_percent));
        assert_eq!(graph("callee"), Ok((CallGraphOrder::Callee, 0.5)));
        assert_eq!(graph("graph,2,caller"), Ok((CallGraphOrder::Caller, 2.0)));
        assert_eq!(graph("fractal"), Err(ParseReportValueError::CallGraph));
        assert_eq!(graph("caller,101"), Err(ParseReportValueError::CallGraph));
        let columns = parse_columns("overhead, sym").map(|columns| columns.0);
        let symbol = ProfileReportColumn::Key(SortKey::Symbol);
        assert_eq!(columns, Ok(vec![ProfileReportColumn::Overhead, symbol]));
        assert_eq!(
            parse_columns("sym,x"),
            Err(ParseReportValueError::Column("x".into()))
        );
        let fields = ScriptFields::new(vec![ScriptField::Ip, ScriptField::Sym]);
        assert_eq!(parse_fields("ip,sym"), Ok(fields));
        assert_eq!(parse_fields(""), Err(ParseReportValueError::Field(String::new())));
    }
}
