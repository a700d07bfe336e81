//! Writes gzipped `profile.proto` for `go tool pprof`, Pyroscope and Parca.
//!
//! Each pprof sample has two values (number of samples and sum of their periods) and the selected
//! labels (any of task, vCPU, process ID and event name).

use std::collections::HashMap;
use std::io::{self, Write};

use prost::Message;

use super::symbolize::{Symbolizer, task_label};
use super::{ChainFrame, EventSamplingRate, Profile, ProfileSample, frames};

/// Messages of <https://github.com/google/pprof/blob/main/proto/profile.proto>, with the same field
/// numbers.
mod proto {
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Profile {
        #[prost(message, repeated, tag = "1")]
        pub sample_type: Vec<ValueType>,
        #[prost(message, repeated, tag = "2")]
        pub sample: Vec<Sample>,
        #[prost(message, repeated, tag = "3")]
        pub mapping: Vec<Mapping>,
        #[prost(message, repeated, tag = "4")]
        pub location: Vec<Location>,
        #[prost(message, repeated, tag = "5")]
        pub function: Vec<Function>,
        #[prost(string, repeated, tag = "6")]
        pub string_table: Vec<String>,
        #[prost(int64, tag = "9")]
        pub time_nanos: i64,
        #[prost(int64, tag = "10")]
        pub duration_nanos: i64,
        #[prost(message, optional, tag = "11")]
        pub period_type: Option<ValueType>,
        #[prost(int64, tag = "12")]
        pub period: i64,
        #[prost(int64, tag = "14")]
        pub default_sample_type: i64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub struct ValueType {
        #[prost(int64, tag = "1")]
        pub type_: i64,
        #[prost(int64, tag = "2")]
        pub unit: i64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Sample {
        #[prost(uint64, repeated, tag = "1")]
        pub location_id: Vec<u64>,
        #[prost(int64, repeated, tag = "2")]
        pub value: Vec<i64>,
        #[prost(message, repeated, tag = "3")]
        pub label: Vec<Label>,
    }

    #[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
    pub struct Label {
        #[prost(int64, tag = "1")]
        pub key: i64,
        #[prost(int64, tag = "2")]
        pub str: i64,
        #[prost(int64, tag = "3")]
        pub num: i64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub struct Mapping {
        #[prost(uint64, tag = "1")]
        pub id: u64,
        #[prost(int64, tag = "5")]
        pub filename: i64,
        #[prost(bool, tag = "7")]
        pub has_functions: bool,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Location {
        #[prost(uint64, tag = "1")]
        pub id: u64,
        #[prost(uint64, tag = "2")]
        pub mapping_id: u64,
        #[prost(uint64, tag = "3")]
        pub address: u64,
        #[prost(message, repeated, tag = "4")]
        pub line: Vec<Line>,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub struct Line {
        #[prost(uint64, tag = "1")]
        pub function_id: u64,
    }

    #[derive(Clone, Copy, PartialEq, prost::Message)]
    pub struct Function {
        #[prost(uint64, tag = "1")]
        pub id: u64,
        #[prost(int64, tag = "2")]
        pub name: i64,
        #[prost(int64, tag = "3")]
        pub system_name: i64,
    }
}

/// String table of a pprof profile. Each string occurs once, and the first string is empty.
struct StringTable {
    list: Vec<String>,
    index: HashMap<String, i64>,
}

impl StringTable {
    #[expect(clippy::cast_possible_wrap, reason = "a list in memory is far shorter")]
    fn id(&mut self, text: &str) -> i64 {
        if let Some(&id) = self.index.get(text) {
            return id;
        }
        let id = self.list.len() as i64;
        self.list.push(text.to_owned());
        self.index.insert(text.to_owned(), id);
        id
    }
}

/// Tables that map locations, functions and mappings of a pprof profile to their IDs.
#[derive(Default)]
struct LocationTable {
    /// Location IDs. The key consists of the address, a flag that is set for kernel addresses, and
    /// the process ID (only for addresses of programs).
    locations: HashMap<(u64, bool, u32), u64>,
    /// Function IDs. The key consists of the name of the file and the name of the function.
    functions: HashMap<(String, String), u64>,
    /// Mapping IDs, by the name of the mapped file.
    mappings: HashMap<String, u64>,
}

impl LocationTable {
    /// Returns the ID of the location of a frame. If the profile does not contain the location yet,
    /// adds it.
    fn location(
        &mut self,
        f: ChainFrame,
        pid: u32,
        symbols: &mut Symbolizer<'_>,
        strings: &mut StringTable,
        p: &mut proto::Profile,
    ) -> u64 {
        // pprof expects a caller's address within the call instruction, so that the address belongs
        // to only one function.
        let address = f.instruction();
        let key = (address, f.kernel, if f.kernel { 0 } else { pid });
        if let Some(&id) = self.locations.get(&key) {
            return id;
        }
        let n = symbols.name(f, pid);
        let next = self.mappings.len() as u64 + 1;
        let mapping_id = *self.mappings.entry(n.object.to_string()).or_insert_with(|| {
            let filename = strings.id(&n.object);
            p.mapping.push(proto::Mapping {
                id: next,
                filename,
                has_functions: true,
            });
            next
        });
        let line = if n.known {
            let next = self.functions.len() as u64 + 1;
            let id = *self
                .functions
                .entry((n.object.to_string(), n.name.clone()))
                .or_insert_with(|| {
                    let name = strings.id(&n.name);
                    p.function.push(proto::Function {
                        id: next,
                        name,
                        system_name: name,
                    });
                    next
                });
            vec![proto::Line { function_id: id }]
        } else {
            Vec::new()
        };
        let id = self.locations.len() as u64 + 1;
        p.location.push(proto::Location {
            id,
            mapping_id,
            address,
            line,
        });
        self.locations.insert(key, id);
        id
    }
}

/// A pprof label that keeps samples with the same stack apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleLabel {
    /// Name of the sampled task.
    Task,
    /// Name of the sampled event.
    Event,
    /// Number of the sampled vCPU.
    Vcpu,
    /// Process ID of the sampled task.
    Pid,
}

impl SampleLabel {
    /// All labels, in the order in which they are written to a sample.
    pub const ALL: [Self; 4] = [Self::Task, Self::Event, Self::Vcpu, Self::Pid];

    /// Returns the key by which the label is stored in a pprof profile.
    pub fn name(self) -> &'static str {
        match self {
            Self::Task => "task",
            Self::Event => "event",
            Self::Vcpu => "vcpu",
            Self::Pid => "pid",
        }
    }
}

/// Returns a pprof profile with the sample types and times of `profile`, without samples.
fn header(profile: &Profile, strings: &mut StringTable) -> proto::Profile {
    let mut p = proto::Profile::default();
    let unit = strings.id("count");
    let first = profile.events.first();
    let event = strings.id(first.map_or("events", |e| e.name.as_str()));
    p.sample_type = vec![
        proto::ValueType {
            type_: strings.id("samples"),
            unit,
        },
        proto::ValueType { type_: event, unit },
    ];
    p.default_sample_type = event;
    p.period_type = Some(proto::ValueType { type_: event, unit });
    if let Some(EventSamplingRate::Period(n)) = first.map(|e| e.rate) {
        p.period = i64::try_from(n).unwrap_or(i64::MAX);
    }
    let times = || profile.samples().map(|s| s.time_ns);
    p.duration_nanos = times()
        .max()
        .zip(times().min())
        .map_or(0, |(b, a)| (b - a).cast_signed());
    p.time_nanos = profile
        .meta
        .clock
        .zip(times().min())
        .and_then(|(clock, first_ns)| i64::try_from(clock.wall_clock_ns(first_ns)).ok())
        .unwrap_or(0);
    p
}

/// Returns the label `label` of the sample `s`.
fn sample_label(
    label: SampleLabel,
    profile: &Profile,
    s: &ProfileSample<'_>,
    strings: &mut StringTable,
) -> proto::Label {
    let key = strings.id(label.name());
    let (str, num) = match label {
        SampleLabel::Task => (strings.id(&task_label(profile, s.tid, s.cr3, s.time_ns)), 0),
        SampleLabel::Event => {
            let event = profile.event(s.event_id).map_or("unknown", |e| e.name.as_str());
            (strings.id(event), 0)
        }
        SampleLabel::Vcpu => (0, i64::from(s.vcpu)),
        SampleLabel::Pid => (0, i64::from(s.pid.cast_signed())),
    };
    proto::Label { key, str, num }
}

/// Writes a profile in pprof's format. Each sample gets the given labels.
pub fn write(
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    labels: &[SampleLabel],
    out: impl Write,
) -> io::Result<()> {
    let mut strings = StringTable {
        list: vec![String::new()],
        index: HashMap::from([(String::new(), 0)]),
    };
    let mut p = header(profile, &mut strings);
    let mut places = LocationTable::default();
    let mut stacks: HashMap<(Vec<u64>, Vec<proto::Label>), usize> = HashMap::new();
    for s in profile.samples() {
        let location_id: Vec<u64> = frames(&s)
            .map(|f| places.location(f, s.pid, symbols, &mut strings, &mut p))
            .collect();
        let period = i64::try_from(s.period).unwrap_or(i64::MAX);
        let label: Vec<proto::Label> = labels
            .iter()
            .map(|label| sample_label(*label, profile, &s, &mut strings))
            .collect();
        let key = (location_id.clone(), label.clone());
        if let Some(&at) = stacks.get(&key) {
            let value = &mut p.sample[at].value;
            value[0] += 1;
            value[1] = value[1].saturating_add(period);
            continue;
        }
        stacks.insert(key, p.sample.len());
        p.sample.push(proto::Sample {
            location_id,
            value: vec![1, period],
            label,
        });
    }
    p.string_table = strings.list;
    let mut gzip = flate2::write::GzEncoder::new(out, flate2::Compression::default());
    gzip.write_all(&p.encode_to_vec())?;
    gzip.finish()?.flush()
}
