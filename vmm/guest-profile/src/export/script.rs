//! Writes each sample as text in the format of `perf script`, for tools that parse this format, or
//! as JSON.

use std::io::{self, Write};

use serde::Serialize;

use super::filter::SampleFilter;
use super::symbolize::{NamedFrame, Symbolizer, task_label};
use super::{ChainFrame, Profile, ProfileSample, SampledBranch, frames};

/// A field of a sample, with the names of `perf script --fields`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScriptField {
    /// Name of the sampled task.
    Comm,
    /// Guest process ID of the sampled task.
    Pid,
    /// Guest thread ID of the sampled task.
    Tid,
    /// Number of the sampled vCPU.
    Cpu,
    /// Time of the sample.
    Time,
    /// Period of the sample: the number of events that it represents.
    Period,
    /// Name of the sampled event.
    Event,
    /// Addresses of the call chain's frames.
    Ip,
    /// Names of the functions in the call chain.
    Sym,
    /// Offsets of the call chain's addresses from the starts of their functions.
    Symoff,
    /// Objects (files) that contain the call chain's addresses.
    Dso,
    /// Branch stack of the sample, newest branch first.
    Brstack,
}

impl ScriptField {
    /// All fields with their names, in the order of the output.
    pub const ALL: [(&'static str, Self); 12] = [
        ("comm", Self::Comm),
        ("pid", Self::Pid),
        ("tid", Self::Tid),
        ("cpu", Self::Cpu),
        ("time", Self::Time),
        ("period", Self::Period),
        ("event", Self::Event),
        ("ip", Self::Ip),
        ("sym", Self::Sym),
        ("symoff", Self::Symoff),
        ("dso", Self::Dso),
        ("brstack", Self::Brstack),
    ];

    /// Returns the sample field with the name `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        let found = Self::ALL.into_iter().find(|(known, _)| *known == name);
        found.map(|(_, field)| field)
    }
}

/// Output format of the samples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ScriptFormat {
    /// Text as printed by `perf script`.
    #[default]
    Text,
    /// One JSON object per sample and line.
    Json,
}

/// Set of the sample fields to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScriptFields(Vec<ScriptField>);

impl ScriptFields {
    /// Creates a set of the given fields.
    pub fn new(fields: Vec<ScriptField>) -> Self {
        Self(fields)
    }

    fn has(&self, field: ScriptField) -> bool {
        self.0.contains(&field)
    }

    fn any(&self, fields: &[ScriptField]) -> bool {
        fields.iter().any(|field| self.has(*field))
    }
}

impl Default for ScriptFields {
    fn default() -> Self {
        Self(ScriptField::ALL.map(|(_, field)| field).to_vec())
    }
}

/// Options of [`write_with`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScriptOptions {
    /// Sample fields to write.
    pub fields: ScriptFields,
    /// Output format of the samples.
    pub format: ScriptFormat,
    /// Filter that selects the samples to write.
    pub filter: SampleFilter,
}

/// Writes all samples with all fields in chronological order.
///
/// # Errors
/// Returns an error if `out` fails.
pub fn write(profile: &Profile, symbols: &mut Symbolizer<'_>, out: impl Write) -> io::Result<()> {
    write_with(profile, symbols, &ScriptOptions::default(), out)
}

/// Writes samples in chronological order.
///
/// # Errors
/// Returns an error if `out` fails.
pub fn write_with(
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    options: &ScriptOptions,
    mut out: impl Write,
) -> io::Result<()> {
    let fields = &options.fields;
    let mut order: Vec<ProfileSample<'_>> = profile.samples().collect();
    order.sort_by_key(|s| s.time_ns);
    for sample in &order {
        if !options.filter.matches(profile, symbols, sample) {
            continue;
        }
        match options.format {
            ScriptFormat::Text => {
                write_head(profile, fields, sample, &mut out)?;
                write_frames(symbols, fields, sample, &mut out)?;
                write_branches(fields, sample, &mut out)?;
            }
            ScriptFormat::Json => {
                serde_json::to_writer(&mut out, &json(profile, symbols, fields, sample))?;
                writeln!(out)?;
            }
        }
    }
    Ok(())
}

fn event_name(profile: &Profile, sample: &ProfileSample<'_>) -> String {
    let event = profile.event(sample.event_id);
    event.map_or_else(|| "unknown".to_owned(), |e| e.name.clone())
}

/// Writes the fields of a sample that precede its call chain.
fn write_head(
    profile: &Profile,
    fields: &ScriptFields,
    s: &ProfileSample<'_>,
    out: &mut impl Write,
) -> io::Result<()> {
    use ScriptField::{Comm, Cpu, Event, Period, Pid, Tid, Time};
    if fields.has(Comm) {
        let comm = task_label(profile, s.tid, s.cr3, s.time_ns);
        write!(out, "{comm:>16} ")?;
    }
    let (pid, tid) = (s.pid.cast_signed(), s.tid.cast_signed());
    match (fields.has(Pid), fields.has(Tid)) {
        (true, true) => write!(out, "{pid}/{tid} ")?,
        (true, false) => write!(out, "{pid} ")?,
        (false, true) => write!(out, "{tid} ")?,
        (false, false) => {}
    }
    if fields.has(Cpu) {
        write!(out, "[{:03}] ", s.vcpu)?;
    }
    if fields.has(Time) {
        let (secs, micros) = (s.time_ns / 1_000_000_000, s.time_ns / 1000 % 1_000_000);
        write!(out, "{secs:>5}.{micros:06}: ")?;
    }
    if fields.has(Period) {
        write!(out, "{:>10} ", s.period)?;
    }
    if fields.has(Event) {
        write!(out, "{}: ", event_name(profile, s))?;
    }
    Ok(())
}

/// Writes the call chain of a sample. If no field of the call chain is selected, writes only a line
/// end.
fn write_frames(
    symbols: &mut Symbolizer<'_>,
    fields: &ScriptFields,
    s: &ProfileSample<'_>,
    out: &mut impl Write,
) -> io::Result<()> {
    use ScriptField::{Dso, Ip, Sym};
    if !fields.any(&[Ip, Sym, Dso]) {
        return writeln!(out);
    }
    // A single frame is printed on the same line, a call chain below it.
    let chain = s.chain.len() > 2;
    if chain {
        match s.ends.truncation_reason() {
            Some(bound) => writeln!(out, "[cut short: {bound}]")?,
            None => writeln!(out)?,
        }
    }
    for frame in frames(s) {
        let lead = if chain { "\t" } else { "" };
        let text = frame_text(frame, &symbols.name(frame, s.pid), fields);
        writeln!(out, "{lead}{text}")?;
    }
    if chain {
        writeln!(out)?;
    }
    Ok(())
}

/// Writes the branch stack on a separate line, in the format of `perf script`. The addresses are
/// followed by prediction, transaction, abort, cycles and type.
fn write_branches(fields: &ScriptFields, s: &ProfileSample<'_>, out: &mut impl Write) -> io::Result<()> {
    if !fields.has(ScriptField::Brstack) || s.branches.is_empty() {
        return Ok(());
    }
    for branch in s.branches {
        write!(out, " {}", branch_text(branch))?;
    }
    writeln!(out)
}

fn branch_text(branch: &SampledBranch) -> String {
    let SampledBranch { from, to, flags } = branch;
    let prediction = match flags & 3 {
        0 => '-',
        2 => 'P',
        _ => 'M',
    };
    let cycles = flags >> 4 & 0xffff;
    let kind = branch.kind().unwrap_or("");
    format!("{from:#x}/{to:#x}/{prediction}/-/-/{cycles}/{kind}")
}

fn frame_text(frame: ChainFrame, named: &NamedFrame, fields: &ScriptFields) -> String {
    let mut parts = Vec::new();
    if fields.has(ScriptField::Ip) {
        parts.push(format!("{:>16x}", frame.address));
    }
    if fields.has(ScriptField::Sym) {
        parts.push(match (named.known, fields.has(ScriptField::Symoff)) {
            (true, true) => format!("{}+{:#x}", named.name, named.offset),
            (true, false) => named.name.clone(),
            (false, _) => "[unknown]".to_owned(),
        });
    }
    if fields.has(ScriptField::Dso) {
        parts.push(format!("({})", named.object));
    }
    parts.join(" ")
}

/// A sample as a JSON object.
#[derive(Serialize)]
struct SampleJson {
    #[serde(skip_serializing_if = "Option::is_none")]
    comm: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    period: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<String>,
    /// Name of the limit that truncated the call chain; `None` if no limit did.
    #[serde(skip_serializing_if = "Option::is_none")]
    cut_short: Option<&'static str>,
    /// Call chain of the sample, innermost frame first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    frames: Vec<FrameJson>,
    /// Branch stack of the sample, newest branch first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    brstack: Vec<BranchJson>,
}

/// A branch of a branch stack as a JSON object.
#[derive(Serialize)]
struct BranchJson {
    from: String,
    to: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
}

/// A frame of a call chain as a JSON object.
#[derive(Serialize)]
struct FrameJson {
    #[serde(skip_serializing_if = "Option::is_none")]
    ip: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sym: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    symoff: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dso: Option<String>,
}

fn json(
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    fields: &ScriptFields,
    s: &ProfileSample<'_>,
) -> SampleJson {
    use ScriptField::{Comm, Cpu, Dso, Event, Ip, Period, Pid, Sym, Symoff, Tid, Time};
    let chain = fields.any(&[Ip, Sym, Dso]);
    let frame = |frame: ChainFrame| {
        let named = symbols.name(frame, s.pid);
        FrameJson {
            // JSON numbers are often read as doubles, which have 53 bits.
            ip: fields.has(Ip).then(|| format!("{:#x}", frame.address)),
            sym: (fields.has(Sym) && named.known).then(|| named.name.clone()),
            symoff: (fields.has(Symoff) && named.known).then_some(named.offset),
            dso: fields.has(Dso).then(|| named.object.to_string()),
        }
    };
    SampleJson {
        frames: frames(s).filter(|_| chain).map(frame).collect(),
        comm: fields
            .has(Comm)
            .then(|| task_label(profile, s.tid, s.cr3, s.time_ns)),
        pid: fields.has(Pid).then(|| s.pid.cast_signed()),
        tid: fields.has(Tid).then(|| s.tid.cast_signed()),
        cpu: fields.has(Cpu).then_some(s.vcpu),
        time_ns: fields.has(Time).then_some(s.time_ns),
        period: fields.has(Period).then_some(s.period),
        event: fields.has(Event).then(|| event_name(profile, s)),
        cut_short: s.ends.truncation_reason().filter(|_| chain),
        brstack: (s.branches.iter().filter(|_| fields.has(ScriptField::Brstack)))
            .map(|branch| BranchJson {
                from: format!("{:#x}", branch.from),
                to: format!("{:#x}", branch.to),
                kind: branch.kind(),
            })
            .collect(),
    }
}
