//! `perfvisor convert`: converts recordings to the formats of other viewers.

use std::io;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::files::{RecordingFileArgs, RecordingFileError, with_profile, write_to};
use crate::exit::ExitStatus;
use guest_profile::export::symbolize::complete_chains;
use guest_profile::export::{Profile, SampledEventInfo, firefox, speedscope};

/// File format of a viewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ViewerFormat {
    /// For the Firefox Profiler (profiler.firefox.com).
    Firefox,
    /// For speedscope (www.speedscope.app).
    Speedscope,
}

impl ViewerFormat {
    fn default_output(self) -> PathBuf {
        match self {
            Self::Firefox => "profile.firefox.json",
            Self::Speedscope => "profile.speedscope.json",
        }
        .into()
    }
}

/// `perfvisor convert`.
#[derive(Clone, Debug, Args)]
pub struct ConvertArgs {
    /// Which file.
    #[command(flatten)]
    pub file: RecordingFileArgs,
    /// Format of the output.
    #[arg(long, value_name = "FORMAT")]
    pub to: ViewerFormat,
    /// Event to convert; a Firefox profile has one event [default: the first for firefox, all for
    /// speedscope]
    #[arg(short, long, value_name = "EVENT")]
    pub event: Option<String>,
    /// Output file; - is standard output [default: profile.FORMAT.json]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Errors of `perfvisor convert`.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    #[error(transparent)]
    File(#[from] RecordingFileError),
    #[error("--event {event}: the recording has {recorded}")]
    NoEvent { event: String, recorded: String },
}

/// Converts a recording to the format of another viewer.
///
/// # Errors
/// Returns [`ConvertError::File`] if the recording cannot be read or the output cannot be written,
/// and [`ConvertError::NoEvent`] if the recording does not have the event.
pub fn convert(args: &ConvertArgs) -> Result<ExitStatus, ConvertError> {
    let output = args.output.clone().unwrap_or_else(|| args.to.default_output());
    let mut missing = None;
    let status = with_profile(&args.file, |profile, symbols| {
        let event = match chosen_event(profile, args.event.as_deref()) {
            Ok(event) => event,
            Err(error) => {
                missing = Some(error);
                return Ok(());
            }
        };
        let mut complete = complete_chains(profile, symbols);
        if args.event.is_some() {
            complete.events.retain(|other| other.id == event.id);
        }
        write_to(&output, |out| {
            let result: io::Result<()> = match args.to {
                ViewerFormat::Firefox => firefox::write(&complete, event, symbols, out),
                ViewerFormat::Speedscope => speedscope::write(&complete, symbols, out),
            };
            result.map_err(RecordingFileError::write(&output))
        })
    })?;
    missing.map_or(Ok(status), Err)
}

/// Returns the event of `profile` with the given name or, without a name, the first event.
fn chosen_event<'p>(profile: &'p Profile, name: Option<&str>) -> Result<&'p SampledEventInfo, ConvertError> {
    let mut events = profile.events.iter();
    let found = events.find(|event| name.is_none_or(|name| event.name == name));
    found.ok_or_else(|| {
        let names: Vec<&str> = profile.events.iter().map(|event| event.name.as_str()).collect();
        ConvertError::NoEvent {
            event: name.unwrap_or_default().to_owned(),
            recorded: match names.join(", ") {
                none if none.is_empty() => "no event".to_owned(),
                names => names,
            },
        }
    })
}
