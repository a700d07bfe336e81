//! Writes folded stacks (`task;outer;…;inner count`, one line per distinct stack) and draws flame
//! graphs from them.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::symbolize::{Symbolizer, task_label};
use super::{Profile, frames};

/// Error returned when a flame graph cannot be drawn.
#[derive(Debug, thiserror::Error)]
pub enum FlameGraphError {
    /// The profile has no samples of the event.
    #[error("the profile has no samples to draw")]
    NoSamples,
    /// The SVG could not be written.
    #[error("cannot write the flame graph")]
    Write(#[source] io::Error),
}

/// Returns the folded stacks of all samples of `event_id` (`None` for all events), each with the
/// sum of its samples' periods. Kernel functions have the suffix `_[k]`, which determines their
/// color in flame graphs.
pub fn stacks(
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    event_id: Option<u64>,
) -> BTreeMap<String, u64> {
    let mut stacks = BTreeMap::new();
    for s in profile
        .samples()
        .filter(|s| event_id.is_none_or(|id| id == s.event_id))
    {
        let mut parts = vec![clean(&task_label(profile, s.tid, s.cr3, s.time_ns))];
        let mut chain: Vec<_> = frames(&s).collect();
        chain.reverse();
        parts.extend(chain.into_iter().map(|f| {
            let n = symbols.name(f, s.pid);
            match (n.known, f.kernel) {
                (true, true) => format!("{}_[k]", clean(&n.name)),
                (true, false) => clean(&n.name),
                // Each unknown address would have a separate frame, so use the name of the object
                // instead.
                (false, true) => "[guest.kernel]_[k]".to_owned(),
                (false, false) => clean(n.object.rsplit('/').next().unwrap_or(&n.object)),
            }
        }));
        let weight: &mut u64 = stacks.entry(parts.join(";")).or_default();
        *weight = weight.saturating_add(s.period);
    }
    stacks
}

/// Replaces field separators of the format and control characters in `name`, because the guest
/// chooses it.
fn clean(name: &str) -> String {
    name.chars()
        .map(|c| {
            if c == ';' {
                ':'
            } else if c.is_control() {
                '?'
            } else {
                c
            }
        })
        .collect()
}

/// Writes folded stacks to `out`, one per line.
pub fn write(stacks: &BTreeMap<String, u64>, mut out: impl Write) -> io::Result<()> {
    stacks
        .iter()
        .try_for_each(|(stack, n)| writeln!(out, "{stack} {n}"))
}

/// Draws a flame graph as SVG. Omits frames narrower than `min_percent` of its width.
///
/// # Errors
/// Returns [`FlameGraphError::NoSamples`] if there are no samples, and [`FlameGraphError::Write`]
/// if `out` fails.
pub fn flamegraph(
    stacks: &BTreeMap<String, u64>,
    title: &str,
    unit: &str,
    min_percent: f64,
    out: impl Write,
) -> Result<(), FlameGraphError> {
    if stacks.values().all(|&n| n == 0) {
        return Err(FlameGraphError::NoSamples);
    }
    let lines: Vec<String> = stacks.iter().map(|(stack, n)| format!("{stack} {n}")).collect();
    let mut options = graph_options(title, unit, min_percent);
    inferno::flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), out)
        .map_err(|e| FlameGraphError::Write(io::Error::other(e)))
}

/// Draws a differential flame graph as SVG. The widths are those of `after`, and the colors show
/// the change of each frame's share since `before`: red for an increase, and blue for a decrease.
///
/// # Errors
/// Returns [`FlameGraphError::NoSamples`] if one of the profiles has no samples, and
/// [`FlameGraphError::Write`] if `out` fails.
pub fn differential(
    (before, after): (&BTreeMap<String, u64>, &BTreeMap<String, u64>),
    title: &str,
    unit: &str,
    min_percent: f64,
    out: impl Write,
) -> Result<(), FlameGraphError> {
    if [before, after]
        .iter()
        .any(|stacks| stacks.values().all(|&n| n == 0))
    {
        return Err(FlameGraphError::NoSamples);
    }
    let (mut old, mut new, mut lines) = (Vec::new(), Vec::new(), Vec::new());
    write(before, &mut old).map_err(FlameGraphError::Write)?;
    write(after, &mut new).map_err(FlameGraphError::Write)?;
    let compare = inferno::differential::Options {
        // Compares shares instead of weights, because the two recordings may differ in length.
        normalize: true,
        strip_hex: false,
    };
    inferno::differential::from_readers(compare, &*old, &*new, &mut lines).map_err(FlameGraphError::Write)?;
    let mut options = graph_options(title, unit, min_percent);
    inferno::flamegraph::from_reader(&mut options, &*lines, out)
        .map_err(|e| FlameGraphError::Write(io::Error::other(e)))
}

fn graph_options(title: &str, unit: &str, min_percent: f64) -> inferno::flamegraph::Options<'static> {
    let mut options = inferno::flamegraph::Options::default();
    options.title = title.to_owned();
    options.count_name = unit.to_owned();
    options.min_width = min_percent;
    // Color frames by the type of code. The palette recognizes the suffix of kernel functions.
    options.colors =
        inferno::flamegraph::color::Palette::Multi(inferno::flamegraph::color::MultiPalette::Java);
    options.hash = true;
    options
}
