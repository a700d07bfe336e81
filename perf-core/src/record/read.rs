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
    /// How many of its records found no room; 0 if the format has none.
    pub lost: u64,
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
        /// Whole entries: a value, and what of id and lost the format has.
        bytes: &'a [u8],
        /// Of which ID and LOST matter.
        format: ReadFormat,
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
            Self::Encoded { bytes, format } => bytes.len() / entry_size(*format),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The entries, the leader's first.
    pub fn iter(&self) -> impl Iterator<Item = ReadEntry> + 'a {
        let (one, list, bytes, format) = match *self {
            Self::One(entry) => (Some(entry), [].as_slice(), [].as_slice(), ReadFormat::empty()),
            Self::List(list) => (None, list, [].as_slice(), ReadFormat::empty()),
            Self::Encoded { bytes, format } => (None, [].as_slice(), bytes, format),
        };
        let encoded = bytes.chunks_exact(entry_size(format)).map(move |entry| {
            let mut words = entry.as_chunks().0.iter().map(|&word| u64::from_ne_bytes(word));
            let mut word = |is_there: bool| is_there.then(|| words.next()).flatten().unwrap_or(0);
            ReadEntry {
                value: word(true),
                id: word(format.contains(ReadFormat::ID)),
                lost: word(format.contains(ReadFormat::LOST)),
            }
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

/// Bytes of one entry: 8 + 8·id + 8·lost.
fn entry_size(format: ReadFormat) -> usize {
    8 + 8 * (format & (ReadFormat::ID | ReadFormat::LOST)).bits().count_ones() as usize
}

/// Bytes that `members` events have in `format`: 8·enabled + 8·running + 8·group + entry·members.
pub(crate) fn read_size_of(format: ReadFormat, members: usize) -> usize {
    let (members, group) = if format.contains(ReadFormat::GROUP) {
        (members, 8)
    } else {
        (1, 0)
    };
    let times = (format & (ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING))
        .bits()
        .count_ones();
    8 * times as usize + group + entry_size(format) * members
}

impl<'a> ReadValues<'a> {
    /// Bytes in `format`.
    #[inline]
    pub fn size(&self, format: ReadFormat) -> usize {
        read_size_of(format, self.entries.len())
    }

    /// Appends exactly [`size`](Self::size) bytes: without `GROUP` value, enabled, running, id, lost; with it
    /// the number of members, enabled, running, and value, id and lost of each.
    pub fn encode(&self, format: ReadFormat, out: &mut impl Sink) {
        let rest = |entry: ReadEntry, out: &mut _| {
            if format.contains(ReadFormat::ID) {
                put_u64(out, entry.id);
            }
            if format.contains(ReadFormat::LOST) {
                put_u64(out, entry.lost);
            }
        };
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
                rest(entry, out);
            }
        } else {
            let entry = self.entries.iter().next().unwrap_or_default();
            put_u64(out, entry.value);
            times(out);
            rest(entry, out);
        }
    }

    /// Decodes values from the front of `bytes`.
    pub(super) fn decode(bytes: &mut Cursor<'a>, format: ReadFormat) -> Result<Self, DecodeError> {
        let mut values = Self::default();
        if format.contains(ReadFormat::GROUP) {
            let members = bytes.u64("number of members")?;
            values.decode_times(bytes, format)?;
            let bytes = bytes.many(members, entry_size(format), "group members")?;
            values.entries = Entries::Encoded { bytes, format };
        } else {
            let value = bytes.u64("value")?;
            values.decode_times(bytes, format)?;
            let mut word = |flag, field| {
                if format.contains(flag) {
                    bytes.u64(field)
                } else {
                    Ok(0)
                }
            };
            let id = word(ReadFormat::ID, "id")?;
            let lost = word(ReadFormat::LOST, "number of records lost")?;
            values.entries = Entries::One(ReadEntry { value, id, lost });
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
