//! Read values: what `read(2)` of an event returns, and the READ part of samples.

use super::cursor::Cursor;
use super::{DecodeError, Sink, put_u64};
use crate::attr::ReadFormat;

/// Value of one event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadEntry {
    /// Its count.
    pub value: u64,
    /// Its id; 0 if the format has none.
    pub id: u64,
}

/// Values of an event or of the members of a group.
#[derive(Clone, Copy, Debug)]
pub enum Entries<'a> {
    /// One event alone.
    One(ReadEntry),
    /// To be encoded.
    List(&'a [ReadEntry]),
    /// As found in a record.
    Encoded {
        /// Whole entries, 8 bytes each, or 16 with an id.
        bytes: &'a [u8],
        /// Whether they have an id.
        with_id: bool,
    },
}

impl Default for Entries<'_> {
    fn default() -> Self {
        Self::List(&[])
    }
}

impl<'a> Entries<'a> {
    /// Number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::List(list) => list.len(),
            Self::Encoded { bytes, with_id } => bytes.len() / if *with_id { 16 } else { 8 },
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entries, the leader's first.
    pub fn iter(&self) -> impl Iterator<Item = ReadEntry> + 'a {
        let (one, list, bytes, with_id) = match *self {
            Self::One(entry) => (Some(entry), [].as_slice(), [].as_slice(), false),
            Self::List(list) => (None, list, [].as_slice(), false),
            Self::Encoded { bytes, with_id } => (None, [].as_slice(), bytes, with_id),
        };
        let word = |bytes: &[u8]| bytes.first_chunk().map_or(0, |&word| u64::from_ne_bytes(word));
        let encoded = bytes
            .chunks_exact(if with_id { 16 } else { 8 })
            .map(move |entry| ReadEntry {
                value: word(entry),
                id: if with_id { word(&entry[8..]) } else { 0 },
            });
        one.into_iter().chain(list.iter().copied()).chain(encoded)
    }
}

impl PartialEq for Entries<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

/// Values in a read format. Fields that the format lacks are not written, and 0 when decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReadValues<'a> {
    /// Nanoseconds enabled, of the group's leader.
    pub time_enabled_ns: u64,
    /// Nanoseconds on the PMU, of the group's leader.
    pub time_running_ns: u64,
    /// One entry without `GROUP`, the leader's and each sibling's with it.
    pub entries: Entries<'a>,
}

/// Bytes that `members` events have in `format`: 8·enabled + 8·running + 8·group + (8 + 8·id)·members.
pub(crate) fn size_of(format: ReadFormat, members: usize) -> usize {
    let (members, group) = if format.contains(ReadFormat::GROUP) {
        (members, 8)
    } else {
        (1, 0)
    };
    let times = (format & (ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING))
        .bits()
        .count_ones();
    let entry = if format.contains(ReadFormat::ID) { 16 } else { 8 };
    8 * times as usize + group + entry * members
}

impl<'a> ReadValues<'a> {
    /// Bytes in `format`.
    #[inline]
    pub fn size(&self, format: ReadFormat) -> usize {
        size_of(format, self.entries.len())
    }

    /// Appends exactly [`size`](Self::size) bytes: without `GROUP` value, enabled, running, id; with it the
    /// number of members, enabled, running, and value and id of each.
    pub fn encode(&self, format: ReadFormat, out: &mut impl Sink) {
        let with_id = format.contains(ReadFormat::ID);
        let times = |out: &mut _| {
            if format.contains(ReadFormat::TOTAL_TIME_ENABLED) {
                put_u64(out, self.time_enabled_ns);
            }
            if format.contains(ReadFormat::TOTAL_TIME_RUNNING) {
                put_u64(out, self.time_running_ns);
            }
        };
        if format.contains(ReadFormat::GROUP) {
            put_u64(out, self.entries.len() as u64);
            times(out);
            for entry in self.entries.iter() {
                put_u64(out, entry.value);
                if with_id {
                    put_u64(out, entry.id);
                }
            }
        } else {
            let entry = self.entries.iter().next().unwrap_or_default();
            put_u64(out, entry.value);
            times(out);
            if with_id {
                put_u64(out, entry.id);
            }
        }
    }

    /// Decodes values from the front of `bytes`.
    pub(super) fn decode(bytes: &mut Cursor<'a>, format: ReadFormat) -> Result<Self, DecodeError> {
        let with_id = format.contains(ReadFormat::ID);
        let mut values = Self::default();
        if format.contains(ReadFormat::GROUP) {
            let members = bytes.u64("number of members")?;
            values.decode_times(bytes, format)?;
            let bytes = bytes.many(members, if with_id { 16 } else { 8 }, "group members")?;
            values.entries = Entries::Encoded { bytes, with_id };
        } else {
            let value = bytes.u64("value")?;
            values.decode_times(bytes, format)?;
            let id = if with_id { bytes.u64("id")? } else { 0 };
            values.entries = Entries::One(ReadEntry { value, id });
        }
        Ok(values)
    }

    fn decode_times(&mut self, bytes: &mut Cursor<'_>, format: ReadFormat) -> Result<(), DecodeError> {
        if format.contains(ReadFormat::TOTAL_TIME_ENABLED) {
            self.time_enabled_ns = bytes.u64("time enabled")?;
        }
        if format.contains(ReadFormat::TOTAL_TIME_RUNNING) {
            self.time_running_ns = bytes.u64("time running")?;
        }
        Ok(())
    }
}
