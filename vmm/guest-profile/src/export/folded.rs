//! Folded stacks (`task;outer;…;inner count`, one line for each distinct stack) and flame graphs of them.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::symbolize::{Symbolizer, task_label};
use super::{Profile, frames};

/// Why no flame graph was made.
#[derive(Debug, thiserror::Error)]
pub enum FlameError {
    /// There is no sample to draw.
    #[error("the profile has no samples to draw")]
    NoSamples,
    /// The SVG could not be written.
    #[error("cannot write the flame graph")]
    Write(#[source] io::Error),
}

/// The stacks of all samples of `event_id` (of all events for `None`), each with the sum of their periods.
/// Kernel functions end in `_[k]`, which colours them apart.
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
                // Single unknown addresses would make a flame each; their object is what is known.
                (false, true) => "[guest.kernel]_[k]".to_owned(),
                (false, false) => clean(n.object.rsplit('/').next().unwrap_or(&n.object)),
            }
        }));
        let weight: &mut u64 = stacks.entry(parts.join(";")).or_default();
        *weight = weight.saturating_add(s.period);
    }
    stacks
}

/// Separators of the format have no place in a name, and names are the guest's words: no control characters.
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

/// Writes folded stacks.
pub fn write(stacks: &BTreeMap<String, u64>, mut out: impl Write) -> io::Result<()> {
    stacks
        .iter()
        .try_for_each(|(stack, n)| writeln!(out, "{stack} {n}"))
}

/// Draws a flame graph. What is narrower than `min_percent` of it is left out.
pub fn flamegraph(
    stacks: &BTreeMap<String, u64>,
    title: &str,
    unit: &str,
    min_percent: f64,
    out: impl Write,
) -> Result<(), FlameError> {
    if stacks.values().all(|&n| n == 0) {
        return Err(FlameError::NoSamples);
    }
    let mut options = inferno::flamegraph::Options::default();
    options.title = title.to_owned();
    options.count_name = unit.to_owned();
    options.min_width = min_percent;
    // By kind of code: the suffix of kernel functions is what this palette goes by.
    options.colors =
        inferno::flamegraph::color::Palette::Multi(inferno::flamegraph::color::MultiPalette::Java);
    options.hash = true;
    let lines: Vec<String> = stacks.iter().map(|(stack, n)| format!("{stack} {n}")).collect();
    inferno::flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), out)
        .map_err(|e| FlameError::Write(io::Error::other(e)))
}
