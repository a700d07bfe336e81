//! Writes profiles in the file format of speedscope (<https://www.speedscope.app>).

use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use std::rc::Rc;

use serde::Serialize;

use super::symbolize::{NamedFrame, Symbolizer, task_label};
use super::{Profile, ProfileSample, frames};

const SCHEMA: &str = "https://www.speedscope.app/file-format-schema.json";

#[derive(Serialize)]
struct SpeedscopeFile<'p> {
    #[serde(rename = "$schema")]
    schema: &'static str,
    shared: SharedFrames,
    profiles: Vec<SampledProfile>,
    name: &'p str,
    exporter: &'static str,
}

#[derive(Default, Serialize)]
struct SharedFrames {
    frames: Vec<SpeedscopeFrame>,
}

#[derive(Serialize)]
struct SpeedscopeFrame {
    name: String,
    file: String,
}

/// A profile in a speedscope file: the samples of one event and one task, in chronological order.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct SampledProfile {
    #[serde(rename = "type")]
    kind: &'static str,
    name: String,
    unit: &'static str,
    start_value: u64,
    end_value: u64,
    /// Indices of the frames of each sample, the outermost frame first.
    samples: Vec<Vec<usize>>,
    weights: Vec<u64>,
}

impl SampledProfile {
    fn new(name: String) -> Self {
        Self {
            kind: "sampled",
            name,
            unit: "none",
            ..Self::default()
        }
    }
}

/// Writes a profile as a speedscope file. Each combination of task and event becomes a separate
/// profile in the file, named `task: event`.
///
/// # Errors
/// Returns an error if `out` fails.
pub fn write(profile: &Profile, symbols: &mut Symbolizer<'_>, out: impl Write) -> io::Result<()> {
    let mut shared = SharedFrames::default();
    let mut known: HashMap<(String, Rc<str>), usize> = HashMap::new();
    let mut profiles: BTreeMap<(usize, String), SampledProfile> = BTreeMap::new();
    let mut order: Vec<ProfileSample<'_>> = profile.samples().collect();
    order.sort_by_key(|s| s.time_ns);
    let mut index = |named: &NamedFrame| {
        let key = (named.name.clone(), Rc::clone(&named.object));
        *known.entry(key).or_insert_with_key(|(name, file)| {
            shared.frames.push(SpeedscopeFrame {
                name: name.clone(),
                file: file.to_string(),
            });
            shared.frames.len() - 1
        })
    };
    for s in &order {
        let Some(event) = profile.events.iter().position(|e| e.id == s.event_id) else {
            continue;
        };
        let task = task_label(profile, s.tid, s.cr3, s.time_ns);
        let name = format!("{task}: {}", profile.events[event].name);
        let of_task = profiles
            .entry((event, task))
            .or_insert_with(|| SampledProfile::new(name));
        let mut chain: Vec<usize> = frames(s)
            .map(|frame| index(&symbols.name(frame, s.pid)))
            .collect();
        chain.reverse();
        of_task.samples.push(chain);
        of_task.weights.push(s.period);
        of_task.end_value = of_task.end_value.saturating_add(s.period);
    }
    let mut profiles: Vec<SampledProfile> = profiles.into_values().collect();
    // speedscope displays the first profile of the file, so the one with the largest weight comes
    // first.
    profiles.sort_by_key(|p| std::cmp::Reverse(p.end_value));
    let file = SpeedscopeFile {
        schema: SCHEMA,
        shared,
        profiles,
        name: &profile.meta.hostname,
        exporter: "perfvisor",
    };
    Ok(serde_json::to_writer(out, &file)?)
}
