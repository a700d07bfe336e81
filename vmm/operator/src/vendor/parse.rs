//! Parsers of the output of `perf list` for a processor's events: text up to perf 6.2, JSON in
//! later versions.
//!
//! ```text
//! cache:
//!   l1d.replacement
//!        [L1D data line replacements]
//!         cpu/event=0x51,period=0x1e8483,umask=0x1/
//! ```
//!
//! The output is untrusted, because any program can be installed as perf. The parsers skip
//! everything that is not an event.

use std::collections::BTreeMap;

use serde::Deserialize;

/// Maximum number of events.
const MAX_EVENTS: usize = 20_000;
/// Maximum length of the name of an event, in bytes.
const MAX_NAME: usize = 128;
/// Maximum length of the description of an event, in bytes.
const MAX_DESCRIPTION: usize = 4096;
/// Names of the core PMU in different perf versions. On a hybrid processor, the core PMU is that of
/// the performance cores.
const PMUS: [&str; 3] = ["cpu", "cpu_core", "default_core"];

/// The event-select register fields of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventSelector {
    event: u64,
    umask: u64,
    edge: bool,
    inv: bool,
    cmask: u64,
}

/// A vendor-specific event of a processor, as listed by perf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VendorEvent {
    /// Name of the event in lowercase, as printed by perf.
    pub name: String,
    /// Vendor's description of the event.
    pub description: String,
    /// Selector of the event. If no selector can express the event, the error is the term that
    /// prevents this, such as an extra register or another PMU.
    pub select: Result<EventSelector, String>,
}

impl EventSelector {
    /// Formats the terms of `pmu/…/`, equivalent to [`Self::raw`].
    pub fn terms(self) -> String {
        let mut terms = format!("event={:#x},umask={:#x}", self.event, self.umask);
        if self.edge {
            terms += ",edge=1";
        }
        if self.inv {
            terms += ",inv=1";
        }
        if self.cmask > 0 {
            terms += &format!(",cmask={:#x}", self.cmask);
        }
        terms
    }

    /// Formats the selector as `rNNN` in perf's syntax, with the event-select bits common to both
    /// vendors.
    pub fn raw(self) -> String {
        let bits = self.event & 0xff
            | self.umask << 8
            | u64::from(self.edge) << 18
            | u64::from(self.inv) << 23
            | self.cmask << 24
            | (self.event & 0xf00) << 24;
        format!("r{bits:04x}")
    }

    /// Parses an encoding such as `cpu/event=0x51,umask=0x1/`. If the selector cannot express a
    /// term, returns this term as the error.
    fn of(encoding: &str) -> Result<Self, String> {
        let (pmu, terms) = encoding.split_once('/').unwrap_or((encoding, ""));
        if !PMUS.contains(&pmu) {
            return Err(printable(pmu));
        }
        let (mut select, mut named) = (Self::default(), false);
        for term in terms.trim_end_matches('/').split(',').filter(|t| !t.is_empty()) {
            let (key, value) = term.split_once('=').unwrap_or((term, "1"));
            let number = match value.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16).ok(),
                None => value.parse().ok(),
            };
            match (key, number) {
                // Sampling parameters of perf have no selector bits.
                ("period" | "freq" | "name", _) | (_, Some(0)) if key != "event" => {}
                ("event", Some(event @ 0..=0xfff)) => (select.event, named) = (event, true),
                ("umask", Some(umask @ 0..=0xff)) => select.umask = umask,
                ("edge", Some(1)) => select.edge = true,
                ("inv", Some(1)) => select.inv = true,
                ("cmask", Some(cmask @ 0..=0xff)) => select.cmask = cmask,
                _ => return Err(printable(key)),
            }
        }
        // An event with only a unit mask has event code 0, as Intel's fixed counters do.
        if named || select.umask > 0 {
            Ok(select)
        } else {
            Err("event".to_owned())
        }
    }
}

/// Parses the output of `perf list --details pmu` into events sorted by name.
pub fn from_text(text: &str) -> Vec<VendorEvent> {
    let mut found = VendorEventMap::default();
    let mut name = None;
    let mut description = String::new();
    for line in text.lines() {
        let said = line.trim();
        match line.len() - line.trim_start().len() {
            0 => name = None,
            // `NAME OR cpu/NAME/ [Kernel PMU event]` is an event of the host kernel.
            1..=2 => {
                name = (!said.contains([' ', '['])).then_some(said);
                description.clear();
            }
            _ if is_encoding(said) => {
                if let Some(name) = name.take() {
                    let words = description.strip_prefix('[').unwrap_or(&description);
                    let words = words.strip_suffix(']').unwrap_or(words);
                    found.take(name, words, said);
                }
            }
            _ if description.len() < MAX_DESCRIPTION => {
                if !description.is_empty() {
                    description.push(' ');
                }
                description += said;
            }
            _ => {}
        }
    }
    found.events()
}

/// Parses the output of `perf list --json pmu` into events sorted by name. Returns `None` if the
/// output is not JSON.
pub fn from_json(text: &[u8]) -> Option<Vec<VendorEvent>> {
    /// Fields of an event in perf's JSON output.
    #[derive(Deserialize)]
    struct JsonEvent {
        #[serde(rename = "EventName")]
        name: Option<String>,
        #[serde(rename = "BriefDescription")]
        brief: Option<String>,
        #[serde(rename = "PublicDescription")]
        public: Option<String>,
        #[serde(rename = "Encoding")]
        encoding: Option<String>,
    }
    let entries: Vec<JsonEvent> = serde_json::from_slice(text).ok()?;
    let mut found = VendorEventMap::default();
    for entry in entries {
        if let (Some(name), Some(encoding)) = (entry.name, entry.encoding)
            && is_encoding(&encoding)
        {
            let description = entry.brief.or(entry.public).unwrap_or_default();
            found.take(&name, &description, &encoding);
        }
    }
    Some(found.events())
}

/// Vendor events by name. The first event with a name takes precedence.
#[derive(Default)]
struct VendorEventMap(BTreeMap<String, VendorEvent>);

impl VendorEventMap {
    fn take(&mut self, name: &str, description: &str, encoding: &str) {
        let word = (1..=MAX_NAME).contains(&name.len())
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        if !word || self.0.len() >= MAX_EVENTS {
            return;
        }
        self.0.entry(name.to_owned()).or_insert_with(|| VendorEvent {
            name: name.to_owned(),
            description: printable(description),
            select: EventSelector::of(encoding),
        });
    }

    fn events(self) -> Vec<VendorEvent> {
        self.0.into_values().collect()
    }
}

/// Returns whether the text is the encoding of an event and not a continuation of its description.
fn is_encoding(words: &str) -> bool {
    let pmu = words.split('/').next().unwrap_or_default();
    words.len() > pmu.len() + 1
        && words.ends_with('/')
        && words.contains('=')
        && !words.contains(char::is_whitespace)
        && !pmu.is_empty()
        && pmu.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Joins lines of text into one line and removes control characters.
fn printable(text: &str) -> String {
    let clean: String = text
        .chars()
        .take(MAX_DESCRIPTION)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    clean.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const INTEL: &str = include_str!("perf-6.1-intel.txt");
    const AMD: &str = include_str!("perf-6.1-amd.txt");

    fn event<'e>(events: &'e [VendorEvent], name: &str) -> &'e VendorEvent {
        events
            .iter()
            .find(|event| event.name == name)
            .unwrap_or_else(|| panic!("no {name} in {events:?}"))
    }

    /// Events in the output of perf 6.1.187 for GenuineIntel-6-8E-9, reduced to a few events, are
    /// parsed.
    #[test]
    fn intel_events_are_parsed() {
        let events = from_text(INTEL);
        let raw = |name| event(&events, name).select.clone().map(EventSelector::raw);
        assert_eq!(raw("l1d.replacement"), Ok("r0151".into()));
        assert_eq!(raw("l1d_pend_miss.pending_cycles"), Ok("r1000148".into()));
        assert_eq!(raw("l1d_pend_miss.pending_cycles_any"), Err("any".into()));
        assert_eq!(
            raw("offcore_response.demand_code_rd.any_response"),
            Err("offcore_rsp".into())
        );
        assert_eq!(raw("frontend_retired.dsb_miss"), Err("frontend".into()));
        assert_eq!(raw("idq.ms_switches"), Ok("r1043079".into()));
        assert_eq!(raw("uops_retired.stall_cycles"), Ok("r18002c2".into()));
        assert_eq!(
            event(&events, "l1d_pend_miss.fb_full").description,
            "Number of times a request needed a FB entry but there was no entry available for it. That is \
             the FB unavailability was dominant reason for blocking the request. A request includes \
             cacheable/uncacheable demands that is load, store or SW prefetch"
        );
        // The kernel event in the first line is not part of the vendor's table.
        assert!(
            events
                .iter()
                .all(|e| e.name != "memory_disambiguation.history_reset")
        );
        assert!(events.is_sorted_by_key(|e| e.name.clone()));
    }

    /// AMD event codes have 12 bits. The input is the output of perf 6.1.187 for
    /// AuthenticAMD-25-1-0, reduced to a few events.
    #[test]
    fn amd_event_codes_have_12_bits() {
        let events = from_text(AMD);
        let raw = |name| event(&events, name).select.clone().map(EventSelector::raw);
        assert_eq!(raw("bp_dyn_ind_pred"), Ok("r008e".into()));
        assert_eq!(raw("ex_ret_fused_instr"), Ok("r1000000d0".into()));
        assert_eq!(raw("all_tlbs_flushed"), Ok("rff78".into()));
    }

    /// The output format of perf 6.3 and later is parsed.
    #[test]
    fn json_output_is_parsed() {
        let json = br#"[
            {"Unit": "cpu", "Topic": "cache", "EventName": "l1d.replacement",
             "EventType": "Kernel PMU event", "BriefDescription": "L1D data line replacements",
             "Encoding": "cpu/event=0x51,period=100003,umask=0x1/"},
            {"Unit": "cpu_core", "EventName": "l1d.hwpf_miss", "PublicDescription": "Missed",
             "Encoding": "cpu_core/event=0x51,umask=0x20/"},
            {"Unit": "uncore_imc", "EventName": "unc_m_act", "Encoding": "uncore_imc/event=0x2/"},
            {"MetricGroup": "Summary", "MetricName": "IPC"}
        ]"#;
        let events = from_json(json).unwrap();
        let raw = |name| event(&events, name).select.clone().map(EventSelector::raw);
        assert_eq!(events.len(), 3);
        assert_eq!(raw("l1d.replacement"), Ok("r0151".into()));
        assert_eq!(raw("l1d.hwpf_miss"), Ok("r2051".into()));
        assert_eq!(event(&events, "l1d.hwpf_miss").description, "Missed");
        assert_eq!(raw("unc_m_act"), Err("uncore_imc".into()));
        for wrong in ["", "[", "{}", "  Error: unknown option `json'", "[1]"] {
            assert_eq!(from_json(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn out_of_range_selectors_are_rejected() {
        for (encoding, term) in [
            ("cpu/event=0x1000/", "event"),
            ("cpu/umask=0x100,event=1/", "umask"),
            ("cpu/event=zz/", "event"),
            ("cpu/event=1,cmask=256/", "cmask"),
            ("cpu/period=1/", "event"),
            ("cpu/config=0x1/", "config"),
            ("gpu/event=1/", "gpu"),
        ] {
            assert_eq!(EventSelector::of(encoding), Err(term.into()), "{encoding}");
        }
        // A term with the value 0 equals the default of its field, so the selector can express it.
        let reference = EventSelector::of("cpu/event=0x0,umask=0x3,any=0x0/").unwrap();
        assert_eq!(reference.raw(), "r0300");
    }

    #[test]
    fn control_sequences_are_removed() {
        let events = from_text("  a.b\n    [x\x1b[2Jy]\n    cpu/event=1/\n  \x1b[2J\n    cpu/event=1/\n");
        assert_eq!(events.len(), 1);
        assert_eq!(events[0].description, "x [2Jy");
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "([ a-z\\[\\]/=,.0-9é]{0,30}\n){0,8}", bytes: Vec<u8>) {
            let _ = from_text(&text);
            let _ = from_json(&bytes);
        }
    }
}
