//! Event filter, which selects the events that a guest may count.
//!
//! A filter is an allowlist or a denylist of event selects and unit masks. An entry may match
//! several unit masks by a bit mask, or exclude events that other entries list. A separate bitmap
//! controls the fixed counters. Selecting a denied event does not fault, and the counter keeps its
//! value. `docs/reference/event-filter.md` describes the file format.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::events::{
    ARCHITECTURAL_SELECTS, ArchEventSet, DecodedCounterEvent, EventSelect, EventSelection, UnitMask, decode,
    decode_fixed, paravirtual_select,
};
use crate::index::MAX_FIXED;
use crate::model_name::Vendor;

/// Maximum number of entries of an event filter.
pub const MAX_ENTRIES: usize = 4096;
/// Maximum size of a filter file, in bytes.
pub const MAX_FILE_BYTES: u64 = 1 << 20;

/// Effect of a filter on the events that it lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventFilterAction {
    /// Allow the listed events and deny all others.
    Allow,
    /// Deny the listed events and allow all others.
    Deny,
}

/// Filter entry as given in the file. The unit mask is matched exactly (`umask`) or by `umask-mask`
/// and `umask-match`. Without either, the entry matches all unit masks of the event select.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EventFilterEntrySpec {
    /// Event select that the entry matches, 0 to 0xFFF.
    pub select: u64,
    /// Unit mask that the entry matches exactly, 0 to 0xFF.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub umask: Option<u64>,
    /// Bits of an event's unit mask that the entry compares with `umask_match`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub umask_mask: Option<u64>,
    /// Value that the bits selected by `umask_mask` must have in a matching event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub umask_match: Option<u64>,
    /// `true` if the entry excludes matching events that other entries list.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exclude: bool,
}

/// Event filter as given in the file, before validation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct EventFilterSpec {
    /// Effect of the filter on the events that it lists.
    pub action: EventFilterAction,
    /// Bitmap of listed fixed counters: bit n is fixed counter n.
    #[serde(default)]
    pub fixed_counters: u64,
    /// Filter entries for the events of general-purpose counters.
    #[serde(default)]
    pub events: Vec<EventFilterEntrySpec>,
}

/// Error returned for an unusable filter. Each message is one line and does not include the file
/// name, which the caller adds.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventFilterFileError {
    /// The filter file cannot be read.
    #[error("cannot read the event filter")]
    Read(#[source] std::io::Error),
    /// The filter file exceeds [`MAX_FILE_BYTES`].
    #[error(
        "the event filter has {0} bytes; must be at most {MAX_FILE_BYTES}; shorten it with masked entries"
    )]
    TooLarge(u64),
    /// The filter file is invalid TOML, or has an unknown or missing field.
    #[error("line {line} of the event filter: {message}")]
    Syntax {
        /// Line number in the file, from 1.
        line: usize,
        /// Message of the TOML parser.
        message: String,
    },
    /// More entries than [`MAX_ENTRIES`]. The value is their number.
    #[error(
        "the event filter has {0} entries; must be at most {MAX_ENTRIES}; merge some with \
        umask-mask and umask-match"
    )]
    TooManyEntries(usize),
    /// A field of a filter entry has a value out of range.
    #[error("entry {entry} of the event filter: {field} = {value:#x} must be at most {limit:#x}")]
    OutOfRange {
        /// Number of the filter entry, from 1.
        entry: usize,
        /// Name of the field.
        field: &'static str,
        /// Value of the field in the file.
        value: u64,
        /// Maximum value of the field.
        limit: u64,
    },
    /// An entry that gives its unit mask both exactly and by mask, or gives only one of
    /// `umask-mask` and `umask-match`. The value is the number of the entry.
    #[error("entry {0} of the event filter: give either umask, or umask-mask together with umask-match")]
    UnitMask(usize),
    /// An entry that cannot match any unit mask. The value is the number of the entry.
    #[error(
        "entry {0} of the event filter matches no unit mask: umask-match has bits that umask-mask does not; clear them"
    )]
    NeverMatches(usize),
    /// A bitmap of fixed counters with bits for counters that do not exist. The value is the
    /// bitmap.
    #[error(
        "fixed-counters = {0:#x} of the event filter: only bits 0 to 3, one per fixed counter, may be set"
    )]
    FixedCounters(u64),
}

/// Validated entry of an event filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EventFilterEntry {
    /// Event select that the entry matches, 12 bits.
    pub select: u16,
    /// Bits of an event's unit mask that the entry compares with `matches`.
    pub mask: u8,
    /// Value that the bits selected by `mask` must have in a matching event.
    pub matches: u8,
    /// `true` if the entry excludes matching events that other entries list.
    pub exclude: bool,
}

/// Validated event filter. Lookups do not allocate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventFilter {
    action: EventFilterAction,
    fixed_counters: u8,
    /// Entries of the filter, sorted by event select.
    entries: Box<[EventFilterEntry]>,
}

impl EventFilter {
    /// Returns a filter that allows all events.
    pub fn allow_all() -> Self {
        Self {
            action: EventFilterAction::Deny,
            fixed_counters: 0,
            entries: Box::default(),
        }
    }

    /// Returns a filter that allows only the architectural events of a vendor, on any counter.
    /// Sufficient for a tenant of a shared host to profile its own programs.
    #[must_use]
    pub fn architectural(vendor: Vendor) -> Self {
        let architectural = |select: u16, umask: u8| {
            let event = decode(vendor, EventSelect(select), UnitMask(umask));
            matches!(event, DecodedCounterEvent::Architectural(_))
        };
        let listed = ARCHITECTURAL_SELECTS.into_iter().flat_map(|select| {
            let exact = move |matches| EventFilterEntry {
                select,
                mask: 0xFF,
                matches,
                exclude: false,
            };
            (0..=u8::MAX)
                .filter(move |&umask| architectural(select, umask))
                .map(exact)
        });
        let mut entries: Vec<EventFilterEntry> = listed.collect();
        entries.sort_unstable();
        Self {
            action: EventFilterAction::Allow,
            fixed_counters: (1 << MAX_FIXED) - 1,
            entries: entries.into_boxed_slice(),
        }
    }

    /// Returns this filter with the paravirtual events of `vendor`'s models denied.
    #[must_use]
    pub fn without_paravirtual(self, vendor: Vendor) -> Self {
        let select = paravirtual_select(vendor).0;
        let others = self.entries.iter().filter(|entry| entry.select != select);
        let all = EventFilterEntry {
            select,
            mask: 0,
            matches: 0,
            exclude: false,
        };
        let denied = (self.action == EventFilterAction::Deny).then_some(all);
        let mut entries: Vec<EventFilterEntry> = others.copied().chain(denied).collect();
        entries.sort_unstable();
        Self {
            entries: entries.into_boxed_slice(),
            ..self
        }
    }

    /// Validates a filter specification.
    ///
    /// # Errors
    /// Returns an [`EventFilterFileError`] that names the entry, the limit and the remedy.
    #[expect(clippy::cast_possible_truncation, reason = "checked above")]
    pub fn new(spec: &EventFilterSpec) -> Result<Self, EventFilterFileError> {
        if spec.events.len() > MAX_ENTRIES {
            return Err(EventFilterFileError::TooManyEntries(spec.events.len()));
        }
        if spec.fixed_counters >> MAX_FIXED != 0 {
            return Err(EventFilterFileError::FixedCounters(spec.fixed_counters));
        }
        let mut entries = Vec::with_capacity(spec.events.len());
        for (number, entry) in spec.events.iter().enumerate() {
            entries.push(EventFilterEntry::new(number + 1, entry)?);
        }
        entries.sort_unstable();
        entries.dedup();
        Ok(Self {
            action: spec.action,
            fixed_counters: spec.fixed_counters as u8,
            entries: entries.into_boxed_slice(),
        })
    }

    /// Parses a filter from TOML text.
    ///
    /// # Errors
    /// Returns an [`EventFilterFileError`] for invalid syntax, unknown fields and values out of
    /// range.
    pub fn from_toml(text: &str) -> Result<Self, EventFilterFileError> {
        let spec = toml::from_str::<EventFilterSpec>(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start.min(text.len()));
            EventFilterFileError::Syntax {
                line: text.as_bytes()[..at].iter().filter(|&&b| b == b'\n').count() + 1,
                // The parser's message may repeat user input and contain line breaks.
                message: error
                    .message()
                    .split_whitespace()
                    .collect::<Vec<_>>()
                    .join(" ")
                    .chars()
                    .take(200)
                    .collect(),
            }
        })?;
        Self::new(&spec)
    }

    /// Reads and parses a filter file.
    ///
    /// # Errors
    /// Returns an [`EventFilterFileError`] if the file cannot be read or its text is not a valid
    /// filter.
    pub fn from_file(path: &Path) -> Result<Self, EventFilterFileError> {
        Self::from_open_result(path, std::fs::File::open(path))
    }

    /// Reads a filter from `opened`, the result of opening `path`. For callers that must not block
    /// when opening a pipe, as [`std::fs::File::open`] would.
    ///
    /// # Errors
    /// Returns an [`EventFilterFileError`] if the file could not be opened, cannot be read, or its
    /// text is not a valid filter.
    pub fn from_open_result(
        path: &Path,
        opened: std::io::Result<impl std::io::Read>,
    ) -> Result<Self, EventFilterFileError> {
        use std::io::Read;
        let mut text = String::new();
        // Reads one byte beyond the limit to detect oversized files, even if the size is not known
        // in advance.
        opened
            .and_then(|file| file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text))
            .map_err(EventFilterFileError::Read)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            let bytes = std::fs::metadata(path).map_or(text.len() as u64, |m| m.len().max(text.len() as u64));
            return Err(EventFilterFileError::TooLarge(bytes));
        }
        Self::from_toml(&text)
    }

    /// Returns whether the filter allows a counter to count the event `selection`.
    pub fn allows(&self, selection: EventSelection) -> bool {
        let listed = match selection {
            EventSelection::Fixed(n) => self.fixed_counters >> n & 1 != 0,
            EventSelection::General(select, umask) => self.lists(select.0, umask),
        };
        listed == (self.action == EventFilterAction::Allow)
    }

    /// Returns the architectural events of `vendor` that the filter allows on at least one counter.
    /// CPUID must report all other events as unavailable, because a guest would read a misleading
    /// zero for them.
    #[must_use]
    pub fn allowed_events(&self, vendor: Vendor) -> ArchEventSet {
        let general = ARCHITECTURAL_SELECTS.into_iter().flat_map(|select| {
            let select = EventSelect(select);
            (0..=u8::MAX).map(move |umask| {
                let umask = UnitMask(umask);
                (
                    EventSelection::General(select, umask),
                    decode(vendor, select, umask),
                )
            })
        });
        let fixed = (0..MAX_FIXED)
            .filter(|_| vendor == Vendor::Intel)
            .filter_map(|n| {
                Some((
                    EventSelection::Fixed(u8::try_from(n).ok()?),
                    decode_fixed(u32::try_from(n).ok()?),
                ))
            });
        let counted = |(selection, event)| match event {
            DecodedCounterEvent::Architectural(event) if self.allows(selection) => Some(event),
            _ => None,
        };
        general.chain(fixed).filter_map(counted).collect()
    }

    /// Returns the effect of the filter on the events that it lists.
    pub fn action(&self) -> EventFilterAction {
        self.action
    }

    /// Returns the bitmap of listed fixed counters.
    pub fn fixed_counters(&self) -> u8 {
        self.fixed_counters
    }

    /// Returns the filter entries for general-purpose counters, sorted by event select and without
    /// duplicates.
    pub fn entries(&self) -> &[EventFilterEntry] {
        &self.entries
    }

    /// Returns whether the filter lists the event, that is, whether an entry matches it and no
    /// exclude entry does.
    pub fn lists(&self, select: u16, umask: UnitMask) -> bool {
        let first = self.entries.partition_point(|entry| entry.select < select);
        let mut included = false;
        for entry in self.entries[first..]
            .iter()
            .take_while(|entry| entry.select == select)
        {
            if umask.0 & entry.mask == entry.matches {
                if entry.exclude {
                    return false;
                }
                included = true;
            }
        }
        included
    }
}

impl EventFilterEntry {
    #[expect(clippy::cast_possible_truncation, reason = "checked above")]
    fn new(number: usize, spec: &EventFilterEntrySpec) -> Result<Self, EventFilterFileError> {
        let within = |field, value: u64, limit: u64| {
            if value <= limit {
                Ok(value)
            } else {
                Err(EventFilterFileError::OutOfRange {
                    entry: number,
                    field,
                    value,
                    limit,
                })
            }
        };
        let (mask, matches) = match (spec.umask, spec.umask_mask, spec.umask_match) {
            (Some(umask), None, None) => (0xFF, within("umask", umask, 0xFF)?),
            (None, Some(mask), Some(matches)) => (
                within("umask-mask", mask, 0xFF)?,
                within("umask-match", matches, 0xFF)?,
            ),
            (None, None, None) => (0, 0),
            _ => return Err(EventFilterFileError::UnitMask(number)),
        };
        if matches & !mask != 0 {
            return Err(EventFilterFileError::NeverMatches(number));
        }
        Ok(Self {
            select: within("select", spec.select, 0xFFF)? as u16,
            mask: mask as u8,
            matches: matches as u8,
            exclude: spec.exclude,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{ArchEvent, EventSelect};
    use proptest::prelude::*;

    /// Iterates over all event selects and unit masks that can be programmed.
    fn general_events() -> impl Iterator<Item = (u16, u8)> {
        (0..=0xFFF).flat_map(|select| (0..=u8::MAX).map(move |umask| (select, umask)))
    }

    #[test]
    fn architectural_filter_allows_only_architectural_events() {
        for vendor in [Vendor::Intel, Vendor::Amd] {
            let filter = EventFilter::architectural(vendor);
            for (select, umask) in general_events() {
                let event = decode(vendor, EventSelect(select), UnitMask(umask));
                let architectural = matches!(event, DecodedCounterEvent::Architectural(_));
                let allowed = filter.allows(general(select, umask));
                assert_eq!(allowed, architectural, "{vendor:?} {select:#x}/{umask:#x}");
            }
            assert!((0..4).all(|n| filter.allows(EventSelection::Fixed(n))));
        }
    }

    #[test]
    fn allowed_events_include_fixed_and_general_counters() {
        for vendor in [Vendor::Intel, Vendor::Amd] {
            let all = EventFilter::allow_all().allowed_events(vendor);
            assert_eq!(
                EventFilter::architectural(vendor).allowed_events(vendor),
                all,
                "{vendor:?}"
            );
            assert!(
                all.contains(ArchEvent::BranchMisses) && all.contains(ArchEvent::RefCycles),
                "{vendor:?}"
            );
        }
        let denied = EventFilter::from_toml(
            "action = \"deny\"\n[[events]]\nselect = 0xC5\n[[events]]\nselect = 0xC0\n",
        )
        .unwrap();
        let left = denied.allowed_events(Vendor::Intel);
        assert!(!left.contains(ArchEvent::BranchMisses) && left.contains(ArchEvent::Branches));
        assert!(left.contains(ArchEvent::Instructions), "fixed counter 0 has them");
        let left = denied.allowed_events(Vendor::Amd);
        assert!(
            !left.contains(ArchEvent::Instructions),
            "AMD has no fixed counter"
        );
        assert!(left.contains(ArchEvent::BranchMisses), "by another number");
    }

    #[test]
    fn without_paravirtual_denies_paravirtual_events() {
        for (vendor, own, others) in [(Vendor::Intel, 0xFF, 0xC0), (Vendor::Amd, 0xFFF, 0xFF)] {
            for text in [
                "action = \"deny\"\nevents = [{ select = 1 }]".to_owned(),
                format!("action = \"deny\"\nevents = [{{ select = {own}, umask = 3, exclude = true }}]"),
                format!("action = \"allow\"\nevents = [{{ select = {own} }}, {{ select = {others} }}]"),
            ] {
                let filter = EventFilter::from_toml(&text).unwrap().without_paravirtual(vendor);
                for umask in 0..=u8::MAX {
                    assert!(!filter.allows(general(own, umask)), "{text}: {umask}");
                    assert!(filter.allows(general(others, umask)), "{text}: {umask}");
                }
            }
        }
    }
    fn general(select: u16, umask: u8) -> EventSelection {
        EventSelection::General(EventSelect(select), UnitMask(umask))
    }

    #[test]
    fn denylist_denies_only_listed_events() {
        let filter = EventFilter::from_toml(
            "action = \"deny\"\nfixed-counters = 0b001\n[[events]]\nselect = 0xC0\numask = 0\n[[events]]\nselect = 0xFFF\n",
        )
        .unwrap();
        assert!(!filter.allows(general(0xC0, 0)));
        assert!(filter.allows(general(0xC0, 1)));
        assert!(!filter.allows(general(0xFFF, 7)));
        assert!(filter.allows(general(0xFF, 7)));
        assert!(!filter.allows(EventSelection::Fixed(0)));
        assert!(filter.allows(EventSelection::Fixed(1)));
    }

    #[test]
    fn bitmap_controls_fixed_counters() {
        // The filter allows retired instructions to be counted on general-purpose counters, but not
        // on fixed counter 0, which counts the same event.
        let filter = EventFilter::from_toml(
            "action = \"allow\"\nfixed-counters = 2\nevents = [{ select = 0xC0, umask = 0 }]",
        )
        .unwrap();
        assert!(filter.allows(general(0xC0, 0)));
        assert!(!filter.allows(EventSelection::Fixed(0)));
        assert!(filter.allows(EventSelection::Fixed(1)));
        assert!(!filter.allows(general(0x3C, 0)));
    }

    #[test]
    fn exclusions_override_masked_entries() {
        for order in [[0, 1], [1, 0]] {
            let entries = [
                "{ select = 0xD0, umask-mask = 0xF0, umask-match = 0x80 }",
                "{ select = 0xD0, umask = 0x82, exclude = true }",
            ];
            let text = format!(
                "action = \"allow\"\nevents = [{}, {}]",
                entries[order[0]], entries[order[1]]
            );
            let filter = EventFilter::from_toml(&text).unwrap();
            assert!(filter.allows(general(0xD0, 0x81)));
            assert!(!filter.allows(general(0xD0, 0x82)));
            assert!(!filter.allows(general(0xD0, 0x11)));
        }
    }

    #[test]
    fn filter_errors_are_one_line_with_remedy() {
        for (text, message) in [
            (
                "action = \"maybe\"",
                "line 1 of the event filter: unknown variant `maybe`, expected `allow` or `deny`",
            ),
            (
                "# nothing\n",
                "line 1 of the event filter: missing field `action`",
            ),
            (
                "action = \"deny\"\n[[events]]\nselekt = 1\n",
                "line 3 of the event filter: unknown field `selekt`, expected one of `select`, `umask`, `umask-mask`, `umask-match`, `exclude`",
            ),
            (
                "action = \"deny\"\nevents = [{ select = 0x1000 }]",
                "entry 1 of the event filter: select = 0x1000 must be at most 0xfff",
            ),
            (
                "action = \"deny\"\nevents = [{ select = 1 }, { select = 1, umask-mask = 3 }]",
                "entry 2 of the event filter: give either umask, or umask-mask together with umask-match",
            ),
            (
                "action = \"deny\"\nevents = [{ select = 1, umask-mask = 1, umask-match = 2 }]",
                "entry 1 of the event filter matches no unit mask: umask-match has bits that umask-mask does not; clear them",
            ),
            (
                "action = \"deny\"\nfixed-counters = 0x10",
                "fixed-counters = 0x10 of the event filter: only bits 0 to 3, one per fixed counter, may be set",
            ),
        ] {
            assert_eq!(EventFilter::from_toml(text).unwrap_err().to_string(), message);
        }
        let error = EventFilter::from_toml("action = \"deny\"\nevents = [{ select = -1 }]")
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("line 2 of the event filter: "), "{error}");
        let error = EventFilter::from_toml("action = ").unwrap_err().to_string();
        assert!(error.starts_with("line 1 ") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn missing_or_oversized_filter_file_is_rejected() {
        let error = EventFilter::from_file(Path::new("/nonexistent/filter.toml")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read the event filter");
        let error = EventFilter::from_file(Path::new("/dev/zero"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("at most 1048576"), "{error}");
    }

    #[test]
    fn number_of_entries_is_limited() {
        let entry = EventFilterEntrySpec {
            select: 1,
            umask: None,
            umask_mask: None,
            umask_match: None,
            exclude: false,
        };
        let spec = EventFilterSpec {
            action: EventFilterAction::Deny,
            fixed_counters: 0,
            events: vec![entry; MAX_ENTRIES + 1],
        };
        assert!(matches!(
            EventFilter::new(&spec),
            Err(EventFilterFileError::TooManyEntries(4097))
        ));
    }

    proptest! {
        #[test]
        fn filter_matches_reference_definition(
            allow: bool,
            fixed_counters in 0u64..16,
            entries in proptest::collection::vec((0u64..4, 0u64..16, 0u64..16, any::<bool>()), 0..12),
            select in 0u16..4,
            umask in 0u8..16,
            fixed in 0u8..4,
        ) {
            let events: Vec<EventFilterEntrySpec> = entries
                .iter()
                .map(|&(select, mask, bits, exclude)| EventFilterEntrySpec {
                    select,
                    umask: None,
                    umask_mask: Some(mask),
                    umask_match: Some(bits & mask),
                    exclude,
                })
                .collect();
            let spec = EventFilterSpec {
                action: if allow { EventFilterAction::Allow } else { EventFilterAction::Deny },
                fixed_counters,
                events,
            };
            let filter = EventFilter::new(&spec).unwrap();
            let hit = |exclude: bool| spec.events.iter().any(|e| {
                e.exclude == exclude
                    && e.select == u64::from(select)
                    && u64::from(umask) & e.umask_mask.unwrap() == e.umask_match.unwrap()
            });
            let listed = hit(false) && !hit(true);
            prop_assert_eq!(filter.allows(general(select, umask)), listed == allow);
            prop_assert_eq!(filter.allows(EventSelection::Fixed(fixed)), (fixed_counters >> fixed & 1 != 0) == allow);
            let text = toml::to_string(&spec).unwrap();
            prop_assert_eq!(EventFilter::from_toml(&text).unwrap(), filter);
        }
    }
}
