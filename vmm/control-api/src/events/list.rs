//! Parses event lists (option `-e`) in perf's syntax.
//!
//! ```text
//! list      = item { "," item }
//! item      = event | "{" event { "," event } "}" [ ":" modifiers ]
//! event     = name [ ":" modifiers ]
//!           | "r" hex [ ":" modifiers ]
//!           | pmu "/" [ term { "," term } ] "/" [ modifiers ]
//! term      = name [ "=" value ]
//! modifiers = { "u" | "k" | "h" | "G" | "H" | "p" | "P" | "D" | "e" | "I" }
//! ```
//!
//! Events count a guest, so `:G` is the default, and `:u` and `:k` select guest user and guest
//! kernel. `:H` requests the part of an event that occurs in the host; the caller of [`parse`]
//! accepts or rejects this modifier.

use std::fmt;

use crate::nearest::did_you_mean;

use super::names::{self, cache, hardware, paravirtual, software};
pub use super::names::{HardwareEvent, SoftwareEvent};

/// Maximum number of events in an event list.
pub const MAX_EVENTS: usize = 256;
/// Maximum length of an event list, in bytes.
pub const MAX_LIST: usize = 16 << 10;

/// Error returned when an event list is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EventListError {
    /// The event list is empty.
    #[error("the event list is empty; give at least one event, for example -e cycles")]
    Empty,
    /// The event list exceeds the maximum length or number of events.
    #[error(
        "the event list is too long; the limits are {} bytes and {} events",
        MAX_LIST,
        MAX_EVENTS
    )]
    TooLong,
    /// The event list contains unbalanced or nested braces.
    #[error("unbalanced or nested braces in the event list; write groups as {{a,b}}")]
    Braces,
    /// A group in braces contains no events.
    #[error("an empty group in the event list")]
    EmptyGroup,
    /// The event list contains two commas in a row, or starts or ends with a comma.
    #[error("an event is missing next to a comma in the event list")]
    MissingEvent,
    /// The event name is unknown.
    #[error("unknown event '{}'{}", .0, names::known(.0))]
    Unknown(String),
    /// An event has an unknown modifier.
    #[error("unknown modifier '{modifier}' of event '{event}'; known are u k h G H p P D e I")]
    Modifier {
        /// Event that has the unknown modifier.
        event: String,
        /// Character that is not a known modifier.
        modifier: char,
    },
    /// The event has more than three `p` modifiers.
    #[error("event '{0}' requests more precision than ppp")]
    Precision(String),
    /// A term of a `pmu/…/` event is invalid.
    #[error("term '{term}' of event '{event}': {why}")]
    Term {
        /// Event that contains the term.
        event: String,
        /// Text of the invalid term.
        term: String,
        /// Description of the problem, for the error message.
        why: &'static str,
    },
    /// The event has no closing slash.
    #[error("event '{0}' has no closing '/'")]
    Slash(String),
    /// No PMU has this name.
    #[error("unknown PMU '{}'{}; known are cpu, software, kvm and pv", .0, did_you_mean(.0, names::PMUS))]
    Pmu(String),
    /// The raw selector is not a number of at most 64 bits.
    #[error("invalid raw event '{0}'; use r and up to 16 hexadecimal digits")]
    Raw(String),
}

/// The quantity that an event counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PerfEventKind {
    /// A generic hardware event.
    Hardware(HardwareEvent),
    /// A software event.
    Software(SoftwareEvent),
    /// A generic cache event. Contains the `PERF_TYPE_HW_CACHE` config: cache | operation << 8 |
    /// result << 16.
    Cache(u64),
    /// A raw event: a selector in the format of the vendor's event-select register.
    Raw {
        /// Event select, unit mask and flags.
        config: u64,
        /// Value of `config1` in `perf_event_attr`.
        config1: u64,
        /// Value of `config2` in `perf_event_attr`.
        config2: u64,
    },
    /// A KVM binary statistic, by name (`exits`, `halt_exits`).
    Kvm(String),
    /// A paravirtual event, by name (`vm-exits`, `steal-ns`), which the guest can count too.
    Paravirtual(&'static str),
}

/// Modifiers of an event: the letters after the colon in the event list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventModifiers {
    /// `u`: count user space.
    pub user: bool,
    /// `k`: count the kernel.
    pub kernel: bool,
    /// `h`: count the hypervisor.
    pub hypervisor: bool,
    /// `G`: count the guest.
    pub guest: bool,
    /// `H`: count the host.
    pub host: bool,
    /// Number of `p` modifiers, 0 to 3.
    pub precise: u8,
    /// `P`: sample with the maximum precision.
    pub precise_max: bool,
    /// `D`: keep the event on a counter all the time (pinned).
    pub pinned: bool,
    /// `e`: do not share the PMU with other events (exclusive).
    pub exclusive: bool,
    /// `I`: exclude idle time.
    pub exclude_idle: bool,
}

impl EventModifiers {
    /// Returns whether the modifiers exclude user space: they select the kernel or the hypervisor,
    /// but not user space.
    pub fn exclude_user(&self) -> bool {
        (self.kernel || self.hypervisor) && !self.user
    }

    /// Returns whether the modifiers exclude the kernel.
    pub fn exclude_kernel(&self) -> bool {
        (self.user || self.hypervisor) && !self.kernel
    }

    fn add(&mut self, letters: &str, event: &str) -> Result<(), EventListError> {
        for c in letters.chars() {
            match c {
                'u' => self.user = true,
                'k' => self.kernel = true,
                'h' => self.hypervisor = true,
                'G' => self.guest = true,
                'H' => self.host = true,
                'p' if self.precise == 3 => return Err(EventListError::Precision(event.to_owned())),
                'p' => self.precise += 1,
                'P' => self.precise_max = true,
                'D' => self.pinned = true,
                'e' => self.exclusive = true,
                'I' => self.exclude_idle = true,
                modifier => {
                    return Err(EventListError::Modifier {
                        event: event.to_owned(),
                        modifier,
                    });
                }
            }
        }
        Ok(())
    }

    /// Adds the modifiers of a group to `self`, which are the modifiers of an event in the group.
    /// The pinned and exclusive modifiers of the group apply to the leader only.
    fn merge(&mut self, group: &Self, leader: bool) {
        self.user |= group.user;
        self.kernel |= group.kernel;
        self.hypervisor |= group.hypervisor;
        self.guest |= group.guest;
        self.host |= group.host;
        self.precise = self.precise.max(group.precise);
        self.precise_max |= group.precise_max;
        self.exclude_idle |= group.exclude_idle;
        self.pinned |= group.pinned && leader;
        self.exclusive |= group.exclusive && leader;
    }
}

/// An event of an event list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventListEntry {
    /// Name of the event: the text in the event list, or the value of a `name=` term.
    pub name: String,
    /// Event to count, without its modifiers.
    pub kind: PerfEventKind,
    /// The modifiers of the event.
    pub modifiers: EventModifiers,
    /// Sampling period from a `period=` term.
    pub period: Option<u64>,
    /// Sampling frequency from a `freq=` term, in Hz.
    pub frequency_hz: Option<u64>,
}

/// Events that are scheduled together: a single event, or a leader and its siblings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventGroup {
    /// The events of the group, leader first. Never empty.
    pub events: Vec<EventListEntry>,
    /// `true` if the event list contains the group in braces.
    pub braced: bool,
}

impl EventListEntry {
    /// Returns whether the event is a KVM statistic of the whole VM (`vm:…`) rather than of a vCPU.
    pub fn is_of_vm(&self) -> bool {
        matches!(&self.kind, PerfEventKind::Kvm(name) if name.starts_with("vm:"))
    }
}

impl fmt::Display for EventListEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Parses an event list. Preserves the order of groups and events.
pub fn parse(list: &str) -> Result<Vec<EventGroup>, EventListError> {
    if list.len() > MAX_LIST {
        return Err(EventListError::TooLong);
    }
    let mut groups = Vec::new();
    let mut count = 0;
    for item in split(list, true)? {
        let item = item.trim();
        let group = match item.strip_prefix('{') {
            None => EventGroup {
                events: vec![event(item)?],
                braced: false,
            },
            Some(rest) => {
                let (inside, after) = rest.rsplit_once('}').ok_or(EventListError::Braces)?;
                if inside.trim().is_empty() {
                    return Err(EventListError::EmptyGroup);
                }
                let mut all = EventModifiers::default();
                match after.strip_prefix(':') {
                    Some(letters) => all.add(letters, item)?,
                    None if after.is_empty() => {}
                    None => return Err(EventListError::Braces),
                }
                let mut events = Vec::new();
                for (i, text) in split(inside, false)?.into_iter().enumerate() {
                    let mut spec = event(text.trim())?;
                    spec.modifiers.merge(&all, i == 0);
                    events.push(spec);
                }
                EventGroup { events, braced: true }
            }
        };
        count += group.events.len();
        if count > MAX_EVENTS {
            return Err(EventListError::TooLong);
        }
        groups.push(group);
    }
    if groups.is_empty() {
        Err(EventListError::Empty)
    } else {
        Ok(groups)
    }
}

/// Returns the text and the number of events of each group of an event list.
///
/// # Errors
/// Returns the errors of [`parse`].
pub fn group_texts(list: &str) -> Result<Vec<(&str, usize)>, EventListError> {
    let groups = parse(list)?;
    let texts = split(list, true)?;
    Ok(texts
        .into_iter()
        .zip(groups.iter().map(|group| group.events.len()))
        .collect())
}

/// Splits an event list at the commas outside braces and slashes.
fn split(list: &str, braces_allowed: bool) -> Result<Vec<&str>, EventListError> {
    if list.trim().is_empty() {
        return Ok(Vec::new());
    }
    let (mut depth, mut slashed, mut from) = (0u32, false, 0);
    let mut parts = Vec::new();
    for (i, c) in list.char_indices() {
        match c {
            '/' => slashed = !slashed,
            '{' if slashed || depth > 0 || !braces_allowed => return Err(EventListError::Braces),
            '{' => depth = 1,
            '}' if depth == 0 => return Err(EventListError::Braces),
            '}' => depth = 0,
            ',' if depth == 0 && !slashed => {
                parts.push(&list[from..i]);
                from = i + 1;
            }
            _ => {}
        }
    }
    if depth > 0 {
        return Err(EventListError::Braces);
    }
    parts.push(&list[from..]);
    if parts.iter().any(|p| p.trim().is_empty()) {
        Err(EventListError::MissingEvent)
    } else {
        Ok(parts)
    }
}

fn event(text: &str) -> Result<EventListEntry, EventListError> {
    let plain = |kind, modifiers| EventListEntry {
        name: text.to_owned(),
        kind,
        modifiers,
        period: None,
        frequency_hz: None,
    };
    if let Some((pmu, rest)) = text.split_once('/') {
        let (terms, after) = rest
            .rsplit_once('/')
            .ok_or_else(|| EventListError::Slash(text.to_owned()))?;
        let mut modifiers = EventModifiers::default();
        modifiers.add(after.strip_prefix(':').unwrap_or(after), text)?;
        return with_terms(text, pmu, terms, modifiers);
    }
    // `kvm:NAME` contains a colon, and `kvm:vm:NAME`, a statistic of the whole VM, contains two.
    let (prefix, rest) = text.strip_prefix("kvm:").map_or(("", text), |rest| ("kvm", rest));
    let own = match (prefix, rest.strip_prefix("vm:")) {
        ("kvm", Some(_)) => "vm:".len(),
        _ => 0,
    };
    let (name, letters) = match rest[own..].find(':') {
        Some(at) => (&rest[..own + at], &rest[own + at + 1..]),
        None => (rest, ""),
    };
    // Check the name first: after an unknown event, the text after the colon may not be modifiers.
    let known = match prefix {
        "kvm" => Some(kvm(name)?),
        _ => hardware(name)
            .map(PerfEventKind::Hardware)
            .or_else(|| software(name).map(PerfEventKind::Software))
            .or_else(|| cache(name).map(PerfEventKind::Cache))
            .or_else(|| paravirtual(name).map(PerfEventKind::Paravirtual)),
    };
    let kind = match (known, name.strip_prefix('r')) {
        (Some(kind), _) => kind,
        (None, Some(hex)) if !hex.is_empty() && hex.bytes().all(|b| b.is_ascii_hexdigit()) => {
            let config = u64::from_str_radix(hex, 16).map_err(|_| EventListError::Raw(name.to_owned()))?;
            PerfEventKind::Raw {
                config,
                config1: 0,
                config2: 0,
            }
        }
        _ => return Err(EventListError::Unknown(text.to_owned())),
    };
    let mut modifiers = EventModifiers::default();
    modifiers.add(letters, text)?;
    Ok(plain(kind, modifiers))
}

fn kvm(name: &str) -> Result<PerfEventKind, EventListError> {
    let of = name.strip_prefix("vm:").unwrap_or(name);
    let word = !of.is_empty()
        && of
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b));
    if word {
        Ok(PerfEventKind::Kvm(name.to_owned()))
    } else {
        Err(EventListError::Unknown(format!("kvm:{name}")))
    }
}

/// Fields of the event-select register: name, lowest bit, and width in bits.
const FIELDS: [(&str, u32, u32); 7] = [
    ("umask", 8, 8),
    ("edge", 18, 1),
    ("pc", 19, 1),
    ("any", 21, 1),
    ("inv", 23, 1),
    ("cmask", 24, 8),
    ("in_tx", 32, 1),
];

/// Terms of a `pmu/…/` event that have been parsed so far.
#[derive(Default)]
struct EventTerms {
    name: Option<String>,
    /// Event whose name was given as a term.
    named: Option<PerfEventKind>,
    /// `true` if a term has set a field of the event-select register.
    selected: bool,
    config: u64,
    config1: u64,
    config2: u64,
    period: Option<u64>,
    frequency_hz: Option<u64>,
}

impl EventTerms {
    /// Adds the term `key=number` of an event of PMU `pmu`. For a term without a value, `number` is
    /// 1. Returns an error message if the term is invalid.
    fn set(&mut self, pmu: &str, key: &str, number: u64) -> Result<(), &'static str> {
        match key {
            "period" if number > 0 => self.period = Some(number),
            "freq" if number > 0 => self.frequency_hz = Some(number),
            "period" | "freq" => return Err("must not be 0"),
            _ if pmu != "cpu" => return Err("not a term of this PMU"),
            "event" if number <= 0xFFF => self.select(number & 0xFF | (number & 0xF00) << 24),
            "event" => return Err("at most 0xfff"),
            "config" => self.select(number),
            "config1" | "offcore_rsp" | "ldlat" | "frontend" => self.config1 = number,
            "config2" => self.config2 = number,
            _ => {
                let (_, shift, width) = FIELDS
                    .into_iter()
                    .find(|(name, ..)| *name == key)
                    .ok_or("not a term of this PMU")?;
                if number >> width != 0 {
                    return Err("too large for its field");
                }
                self.select(number << shift);
            }
        }
        Ok(())
    }

    fn select(&mut self, bits: u64) {
        self.config |= bits;
        self.selected = true;
    }

    /// Returns the event that the terms select. Returns an error message if the terms select no
    /// event, or both a named event and a selector.
    fn kind(&mut self) -> Result<PerfEventKind, &'static str> {
        match (self.named.take(), self.selected) {
            (Some(kind), false) => Ok(kind),
            (None, true) => Ok(PerfEventKind::Raw {
                config: self.config,
                config1: self.config1,
                config2: self.config2,
            }),
            (Some(_), true) => Err("a named event takes no selector besides"),
            (None, false) => Err("names no event; give event=N, config=N or an event's name"),
        }
    }
}

fn with_terms(
    text: &str,
    pmu: &str,
    terms: &str,
    modifiers: EventModifiers,
) -> Result<EventListEntry, EventListError> {
    let mut said = EventTerms::default();
    for term in terms.split(',').map(str::trim).filter(|t| !t.is_empty()) {
        let fail = |why| EventListError::Term {
            event: text.to_owned(),
            term: term.to_owned(),
            why,
        };
        let (key, value) = match term.split_once('=') {
            Some((key, value)) => (key.trim(), Some(value.trim())),
            None => (term, None),
        };
        if key == "name" {
            let name = value.filter(|v| !v.is_empty());
            said.name = Some(name.ok_or_else(|| fail("give a name"))?.to_owned());
            continue;
        }
        let known = match pmu {
            "cpu" => hardware(key)
                .map(PerfEventKind::Hardware)
                .or_else(|| cache(key).map(PerfEventKind::Cache)),
            "software" => software(key).map(PerfEventKind::Software),
            "pv" => paravirtual(key).map(PerfEventKind::Paravirtual),
            "kvm" => match key {
                "period" | "freq" => None,
                name => Some(kvm(name)?),
            },
            other => return Err(EventListError::Pmu(other.to_owned())),
        };
        if let (Some(kind), None) = (known, value) {
            if said.named.replace(kind).is_some() {
                return Err(fail("an event was named before; give one"));
            }
            continue;
        }
        // A term without a value, such as `edge`, sets its field to 1.
        let number = match value {
            None => 1,
            Some(v) => {
                number(v).ok_or_else(|| fail("no number; write decimal, or 0x and hexadecimal digits"))?
            }
        };
        said.set(pmu, key, number).map_err(fail)?;
    }
    if pmu != "cpu" && !["software", "pv", "kvm"].contains(&pmu) {
        return Err(EventListError::Pmu(pmu.to_owned()));
    }
    let kind = said.kind().map_err(|why| EventListError::Term {
        event: text.to_owned(),
        term: terms.to_owned(),
        why,
    })?;
    Ok(EventListEntry {
        name: said.name.unwrap_or_else(|| text.to_owned()),
        kind,
        modifiers,
        period: said.period,
        frequency_hz: said.frequency_hz,
    })
}

fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(text: &str) -> EventListEntry {
        let groups = parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!((groups.len(), groups[0].events.len()), (1, 1), "{text}");
        groups.into_iter().next().unwrap().events.remove(0)
    }

    #[test]
    fn names_of_every_kind_are_known() {
        let kind = |t: &str| one(t).kind;
        assert_eq!(kind("cpu-cycles"), PerfEventKind::Hardware(HardwareEvent::Cycles));
        assert_eq!(
            kind("cs"),
            PerfEventKind::Software(SoftwareEvent::ContextSwitches)
        );
        assert_eq!(kind("L1-dcache-load-misses"), PerfEventKind::Cache(0x1_0000));
        assert_eq!(kind("iTLB-loads"), PerfEventKind::Cache(4));
        assert_eq!(
            kind("branch-misses"),
            PerfEventKind::Hardware(HardwareEvent::BranchMisses)
        );
        assert_eq!(kind("branch-load-misses"), PerfEventKind::Cache(0x1_0005));
        assert_eq!(
            kind("r1a8"),
            PerfEventKind::Raw {
                config: 0x1a8,
                config1: 0,
                config2: 0
            }
        );
        assert_eq!(kind("kvm:halt_exits"), PerfEventKind::Kvm("halt_exits".into()));
        assert_eq!(kind("kvm/exits/"), PerfEventKind::Kvm("exits".into()));
        assert_eq!(kind("kvm:vm:pages_4k"), PerfEventKind::Kvm("vm:pages_4k".into()));
        assert_eq!(
            kind("kvm:vm:pages_4k:D"),
            PerfEventKind::Kvm("vm:pages_4k".into())
        );
        assert!(one("kvm:vm:pages_4k").is_of_vm() && !one("kvm:exits:D").is_of_vm());
        for wrong in ["kvm:vm:", "kvm:vm::D", "kvm:vm:vm:x", "kvm:vm:é"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(kind("pv/steal-ns/"), PerfEventKind::Paravirtual("steal-ns"));
        assert_eq!(kind("vm-exits"), PerfEventKind::Paravirtual("vm-exits"));
        assert_eq!(
            kind("ref-cycles"),
            PerfEventKind::Hardware(HardwareEvent::RefCycles)
        );
    }

    #[test]
    fn terms_build_the_event_select() {
        let config = |t: &str| match one(t).kind {
            PerfEventKind::Raw { config, .. } => config,
            other => panic!("{t}: {other:?}"),
        };
        assert_eq!(config("cpu/event=0x3c,umask=0x01/"), 0x13c);
        assert_eq!(
            config("cpu/event=0x1a8,umask=2,inv,cmask=3,edge=1/u"),
            0x1_0384_02a8
        );
        assert_eq!(config("cpu/config=0x41003c/k"), 0x41_003c);
        let named = one("cpu/cycles,period=1000,name=my cycles/Gk");
        assert_eq!((named.name.as_str(), named.period), ("my cycles", Some(1000)));
        assert!(named.modifiers.guest && named.modifiers.kernel);
        assert_eq!(one("cpu/event=1,freq=99/").frequency_hz, Some(99));
    }

    #[test]
    fn modifiers_select_levels_sides_precision_and_pinning() {
        let m = one("cycles:uGppD").modifiers;
        assert_eq!(
            (
                m.user,
                m.guest,
                m.precise,
                m.pinned,
                m.exclude_kernel(),
                m.exclude_user()
            ),
            (true, true, 2, true, true, false)
        );
        let m = one("kvm:exits:H").modifiers;
        assert!(m.host && !m.guest);
        let none = one("cycles").modifiers;
        assert!(!none.exclude_user() && !none.exclude_kernel());
        let both = one("cycles:uk").modifiers;
        assert!(!both.exclude_user() && !both.exclude_kernel());
    }

    #[test]
    fn groups_keep_their_order_and_share_modifiers() {
        let groups = parse("task-clock,{cycles,cpu/event=0xc0,umask=0/u,r3:k}:GD, instructions").unwrap();
        assert_eq!(
            groups
                .iter()
                .map(|g| (g.events.len(), g.braced))
                .collect::<Vec<_>>(),
            [(1, false), (3, true), (1, false)]
        );
        let g = &groups[1].events;
        assert!(g.iter().all(|e| e.modifiers.guest));
        assert_eq!(
            g.iter().map(|e| e.modifiers.pinned).collect::<Vec<_>>(),
            [true, false, false]
        );
        assert!(g[1].modifiers.user && g[2].modifiers.kernel && !g[0].modifiers.user);
    }

    #[test]
    fn each_mistake_is_named() {
        let e = |t: &str| parse(t).expect_err(t).to_string();
        for (text, want) in [
            ("", "is empty"),
            (" ", "is empty"),
            ("cycles,", "next to a comma"),
            ("{cycles", "braces"),
            ("cycles}", "braces"),
            ("{a,{b}}", "braces"),
            ("{}", "empty group"),
            ("{cycles}x", "braces"),
            ("cycels", "unknown event 'cycels'"),
            ("cycles:x", "unknown modifier 'x'"),
            ("sched:sched_switch", "unknown event 'sched:sched_switch'"),
            ("mem:0x1000", "unknown event 'mem:0x1000'"),
            ("cycles:pppp", "ppp"),
            ("cpu/event=1", "closing '/'"),
            ("cpu/event=zz/", "no number"),
            ("cpu/event=0x1000/", "at most 0xfff"),
            ("cpu/umask=0x100,event=1/", "too large"),
            ("cpu/frob=1/", "not a term"),
            ("cpu//", "names no event"),
            ("gpu/event=1/", "unknown PMU 'gpu'"),
            ("gpu//", "unknown PMU 'gpu'"),
            ("r12345678901234567", "raw event"),
            ("cpu/period=0,event=1/", "must not be 0"),
            ("cpu/cycles,event=1/", "no selector"),
        ] {
            assert!(e(text).contains(want), "{text}: {}", e(text));
        }
        assert_eq!(
            parse(&"cycles,".repeat(4000)).unwrap_err(),
            EventListError::TooLong
        );
        assert_eq!(
            parse(&vec!["cycles"; 300].join(",")).unwrap_err(),
            EventListError::TooLong
        );
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "[a-z0-9:/{},=. -]{0,60}") {
            if let Ok(groups) = parse(&text) {
                prop_assert!(!groups.is_empty() && groups.iter().all(|g| !g.events.is_empty()));
            }
        }

        #[test]
        fn any_bytes_never_panic(text: String) {
            let _ = parse(&text);
        }
    }

    #[test]
    fn misspelled_event_gets_suggestion() {
        let error = |text| parse(text).unwrap_err().to_string();
        assert_eq!(
            error("cylces:u"),
            "unknown event 'cylces:u'; did you mean 'cycles'? (perfvisor list shows all)"
        );
        assert!(error("LLC-load-mises").contains("'LLC-load-misses'"));
        assert!(error("bananas").contains("known are cycles, instructions"));
        assert_eq!(
            error("cpus/event=1/"),
            "unknown PMU 'cpus'; did you mean 'cpu'?; known are cpu, software, kvm and pv"
        );
    }

    #[test]
    fn every_name_parses() {
        let hardware = names::HARDWARE.iter().map(|(name, _)| (*name).to_owned());
        let software = names::SOFTWARE.iter().map(|(name, _)| (*name).to_owned());
        let own = names::PARAVIRTUAL.map(|name| format!("pv/{name}/"));
        let caches = names::caches();
        assert!(caches.len() > 30, "{}", caches.len());
        for name in hardware.chain(software).chain(own).chain(caches) {
            assert!(parse(&name).is_ok(), "{name}");
        }
    }
}
