//! Read values: the result of `read(2)` on an event, and the READ field of samples.

use super::cursor::Cursor;
use super::{DecodeError, RecordSink, put_u64};
use crate::attr::ReadFormat;

/// The value of one event in a reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadFormatEntry {
    /// Count of the event.
    pub value: u64,
    /// ID of the event, or 0 if the read format lacks ID.
    pub id: u64,
    /// Number of lost records of the event, or 0 if the read format lacks LOST.
    pub lost: u64,
}

/// The values of a single event, or of all members of a group.
#[derive(Clone, Copy, Debug)]
pub enum ReadFormatEntries<'a> {
    /// Value of a single event.
    One(ReadFormatEntry),
    /// Values of group members, to be encoded.
    List(&'a [ReadFormatEntry]),
    /// Values as encoded in a record.
    Encoded {
        /// Encoded entries, each with a value, and with an ID and a lost count if the format has
        /// them.
        bytes: &'a [u8],
        /// Read format of the entries, of which only ID and LOST are relevant.
        format: ReadFormat,
    },
}

impl Default for ReadFormatEntries<'_> {
    fn default() -> Self {
        Self::List(&[])
    }
}

impl<'a> ReadFormatEntries<'a> {
    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::List(list) => list.len(),
            Self::Encoded { bytes, format } => bytes.len() / entry_size(*format),
        }
    }

    /// Returns `true` if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns an iterator over the entries, leader first.
    pub fn iter(&self) -> impl Iterator<Item = ReadFormatEntry> + 'a {
        let (one, list, bytes, format) = match *self {
            Self::One(entry) => (Some(entry), [].as_slice(), [].as_slice(), ReadFormat::empty()),
            Self::List(list) => (None, list, [].as_slice(), ReadFormat::empty()),
            Self::Encoded { bytes, format } => (None, [].as_slice(), bytes, format),
        };
        let encoded = bytes.chunks_exact(entry_size(format)).map(move |entry| {
            let mut words = entry.as_chunks().0.iter().map(|&word| u64::from_ne_bytes(word));
            let mut word = |is_there: bool| is_there.then(|| words.next()).flatten().unwrap_or(0);
            ReadFormatEntry {
                value: word(true),
                id: word(format.contains(ReadFormat::ID)),
                lost: word(format.contains(ReadFormat::LOST)),
            }
        });
        one.into_iter().chain(list.iter().copied()).chain(encoded)
    }
}

impl PartialEq for ReadFormatEntries<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

/// The result of reading an event or a group. A field that the read format lacks is not encoded,
/// and is 0 when decoded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReadFormatValues<'a> {
    /// Time enabled of the event, or of the group leader with `GROUP`, in nanoseconds.
    pub time_enabled_ns: u64,
    /// Time running of the event, or of the group leader with `GROUP`, in nanoseconds.
    pub time_running_ns: u64,
    /// Values of the leader and all siblings, or of a single event if the format lacks `GROUP`.
    pub entries: ReadFormatEntries<'a>,
}

/// Returns the encoded size of one [`ReadFormatEntry`], in bytes: 8 for the value, and 8 each for
/// the ID and the lost count if `format` has them.
fn entry_size(format: ReadFormat) -> usize {
    8 + 8 * (format & (ReadFormat::ID | ReadFormat::LOST)).bits().count_ones() as usize
}

/// Returns the size of the values of `members` events in `format`, in bytes: 8 each for the time
/// enabled, the time running and (with `GROUP`) the number of members if `format` has them, and the
/// size of one entry for each member. A format without `GROUP` has a single entry.
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

impl<'a> ReadFormatValues<'a> {
    /// Returns the encoded size of the read values in `format`, in bytes.
    #[inline]
    pub fn size(&self, format: ReadFormat) -> usize {
        read_size_of(format, self.entries.len())
    }

    /// Appends the encoded read values, which take exactly [`size`](Self::size) bytes. Without
    /// `GROUP`, these are the value, time enabled, time running, ID and lost count. With `GROUP`,
    /// they are the number of members, time enabled, time running, and the value, ID and lost count
    /// of each member.
    pub fn encode(&self, format: ReadFormat, out: &mut impl RecordSink) {
        let rest = |entry: ReadFormatEntry, out: &mut _| {
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

    /// Decodes read values in `format` from the front of `bytes`.
    pub(super) fn decode(bytes: &mut Cursor<'a>, format: ReadFormat) -> Result<Self, DecodeError> {
        let mut values = Self::default();
        if format.contains(ReadFormat::GROUP) {
            let members = bytes.u64("number of members")?;
            values.decode_times(bytes, format)?;
            let bytes = bytes.many(members, entry_size(format), "group members")?;
            values.entries = ReadFormatEntries::Encoded { bytes, format };
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
            values.entries = ReadFormatEntries::One(ReadFormatEntry { value, id, lost });
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
