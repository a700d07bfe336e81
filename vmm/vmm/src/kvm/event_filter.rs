//! Translates the VM's event filter to the format of KVM's own vPMU (`KVM_SET_PMU_EVENT_FILTER`,
//! KVM API 4.120).
//!
//! The VM's filter and KVM's filter have the same semantics. A general-purpose event is listed if
//! an include entry matches it and no exclude entry does. Fixed counters are controlled by a bitmap
//! alone. KVM accepts at most 300 entries. Before Linux 6.3, an entry cannot have a mask, so each
//! entry with a mask is expanded to one entry per event.
#![expect(unsafe_code, reason = "an ioctl that kvm-ioctls takes in another form")]

use kvm_bindings::{KVM_PMU_EVENT_ALLOW, KVM_PMU_EVENT_DENY, KVMIO, kvm_pmu_event_filter};
use vmm_sys_util::ioctl::ioctl_with_ptr;
use vmm_sys_util::ioctl_iow_nr;
use vpmu::events::UnitMask;
use vpmu::filter::EventFilterAction;
use vpmu::{EventFilter, Vendor};

use super::call::KvmIoctlError;
use super::vm_fd::VmFd;

/// Maximum number of filter entries that KVM accepts (`KVM_PMU_EVENT_FILTER_MAX_EVENTS`). The
/// kernel's user-space headers do not export this constant.
const MAX_EVENTS: usize = 300;

/// Flag of a filter with masked entries (`linux/kvm.h`; missing in kvm-bindings).
const KVM_PMU_EVENT_FLAG_MASKED_EVENTS: u32 = 1 << 0;

/// Error when installing an event filter in KVM.
#[derive(Debug, thiserror::Error)]
pub enum KvmEventFilterError {
    /// KVM does not support event filters.
    #[error(
        "the event filter is unsupported by this host's KVM (KVM_CAP_PMU_EVENT_FILTER, Linux 5.3 \
        and later); omit it, or use --backing auto"
    )]
    Unsupported,
    /// The filter has more entries than KVM accepts.
    #[error(
        "the event filter needs {entries} entries of KVM's own vPMU, which supports \
        {MAX_EVENTS}{}; shorten it, or use --backing auto",
        if *.written_out { " (before Linux 6.3, KVM supports exact unit masks only, so each unit \
             mask of an entry counts)" } else { "" }
    )]
    TooLong {
        /// Number of entries of the translated filter.
        entries: usize,
        /// `true` if entries with a mask were expanded, because KVM does not accept masks.
        written_out: bool,
    },
    /// KVM rejected the filter.
    #[error("KVM_SET_PMU_EVENT_FILTER failed")]
    Kvm(#[source] KvmIoctlError),
}

/// An event filter in the format of KVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvmEventFilter {
    action: u32,
    fixed_counter_bitmap: u32,
    flags: u32,
    events: Vec<u64>,
}

/// Encodes an event select and a unit mask as in an event select register.
fn exact(select: u16, umask: u8) -> u64 {
    u64::from(select) & 0xFF | (u64::from(select) & 0xF00) << 24 | u64::from(umask) << 8
}

/// Encodes a filter entry with a mask (`KVM_PMU_ENCODE_MASKED_ENTRY`). The entry matches events
/// whose unit mask, combined with `mask` by AND, equals `matches`. `exclude` makes it an exclude
/// entry.
fn masked(select: u16, mask: u8, matches: u8, exclude: bool) -> u64 {
    exact(select, matches) | u64::from(mask) << 56 | u64::from(exclude) << 55
}

impl KvmEventFilter {
    /// Translates `filter` to KVM's format. `takes_masks` states whether KVM accepts entries with a
    /// mask.
    ///
    /// # Errors
    /// Returns [`KvmEventFilterError::TooLong`] if the translation exceeds KVM's limit.
    pub fn new(filter: &EventFilter, vendor: Vendor, takes_masks: bool) -> Result<Self, KvmEventFilterError> {
        // Intel event selects have eight bits. KVM rejects entries with more.
        let highest = match vendor {
            Vendor::Intel => 0xFF,
            Vendor::Amd => 0xFFF,
        };
        let entries = filter.entries().iter().filter(|entry| entry.select <= highest);
        let plain = filter.entries().iter().all(|e| e.mask == 0xFF && !e.exclude);
        let events: Vec<u64> = if takes_masks && !plain {
            entries
                .map(|e| masked(e.select, e.mask, e.matches, e.exclude))
                .collect()
        } else {
            let mut selects: Vec<u16> = entries.map(|e| e.select).collect();
            selects.dedup();
            selects
                .into_iter()
                .flat_map(|select| {
                    (0..=0xFF)
                        .filter(move |umask| filter.lists(select, UnitMask(*umask)))
                        .map(move |umask| exact(select, umask))
                })
                .collect()
        };
        if events.len() > MAX_EVENTS {
            return Err(KvmEventFilterError::TooLong {
                entries: events.len(),
                written_out: !takes_masks && !plain,
            });
        }
        Ok(Self {
            action: match filter.action() {
                EventFilterAction::Allow => KVM_PMU_EVENT_ALLOW,
                EventFilterAction::Deny => KVM_PMU_EVENT_DENY,
            },
            fixed_counter_bitmap: filter.fixed_counters().into(),
            flags: if takes_masks && !plain {
                KVM_PMU_EVENT_FLAG_MASKED_EVENTS
            } else {
                0
            },
            events,
        })
    }

    /// Installs the filter in `vm`. The filter also affects counters that the guest has already
    /// programmed.
    ///
    /// # Errors
    /// Returns [`KvmEventFilterError::Kvm`] if KVM rejects the filter.
    pub fn install(&self, vm: &VmFd) -> Result<(), KvmEventFilterError> {
        let structure = self.structure();
        // SAFETY: KVM reads a `kvm_pmu_event_filter` followed by the number of entries in its
        // header, which is the content of `structure`, and writes nothing. `vm` and `structure`
        // outlive the call.
        let result = unsafe { ioctl_with_ptr(vm, KVM_SET_PMU_EVENT_FILTER(), structure.as_ptr()) };
        if result == 0 {
            Ok(())
        } else {
            Err(KvmEventFilterError::Kvm(KvmIoctlError::of(
                "KVM_SET_PMU_EVENT_FILTER",
            )(kvm_ioctls::Error::last())))
        }
    }

    /// Returns `struct kvm_pmu_event_filter` as 64-bit words: action and number of entries, bitmap
    /// and flags, two words of padding, and the entries.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_EVENTS")]
    fn structure(&self) -> Vec<u64> {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        // The cast is lossless, because there are at most `MAX_EVENTS` entries.
        let count = self.events.len() as u32;
        let header = [
            pair(self.action, count),
            pair(self.fixed_counter_bitmap, self.flags),
            0,
            0,
        ];
        const _: () = assert!(size_of::<kvm_pmu_event_filter>() == 4 * size_of::<u64>());
        header.into_iter().chain(self.events.iter().copied()).collect()
    }
}

mod request {
    use super::{KVMIO, ioctl_iow_nr, kvm_pmu_event_filter};
    ioctl_iow_nr!(KVM_SET_PMU_EVENT_FILTER, KVMIO, 0xb2, kvm_pmu_event_filter);
}
use request::KVM_SET_PMU_EVENT_FILTER;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vpmu::events::{EventSelect, EventSelection};
    use vpmu::filter::{EventFilterEntrySpec, EventFilterSpec};

    use super::*;

    fn translated(toml: &str, vendor: Vendor, takes_masks: bool) -> KvmEventFilter {
        KvmEventFilter::new(&EventFilter::from_toml(toml).unwrap(), vendor, takes_masks).unwrap()
    }

    #[test]
    fn filter_entries_match_kvm_layout() {
        let filter = translated(
            "action = \"allow\"\nfixed-counters = 5\nevents = [{ select = 0xABC, umask = 0x12 }]",
            Vendor::Amd,
            true,
        );
        assert_eq!(
            filter,
            KvmEventFilter {
                action: 0,
                fixed_counter_bitmap: 5,
                flags: 0,
                events: vec![0xA_0000_12BC],
            }
        );
        let filter = translated(
            "action = \"deny\"\nevents = [{ select = 0xD0, umask-mask = 0x80, umask-match = 0x80 }, { select = 0xD0, umask = 0x82, exclude = true }]",
            Vendor::Intel,
            true,
        );
        assert_eq!((filter.action, filter.flags), (1, 1));
        let mut events = filter.events;
        events.sort_unstable();
        assert_eq!(events, [0x8000_0000_0000_80D0, 0xFF80_0000_0000_82D0]);
    }

    #[test]
    fn masked_entries_expand_on_old_kvm() {
        let toml = "action = \"deny\"\nevents = [{ select = 0xD0, umask-mask = 0xFE, umask-match = 0x80 }]";
        assert_eq!(translated(toml, Vendor::Intel, false).events, [0x80D0, 0x81D0]);
        let two = "action = \"deny\"\nevents = [{ select = 1 }, { select = 2 }]";
        let line = KvmEventFilter::new(&EventFilter::from_toml(two).unwrap(), Vendor::Amd, false)
            .unwrap_err()
            .to_string();
        assert!(
            line.contains("512 entries") && line.contains("supports 300 (before Linux 6.3"),
            "{line}"
        );
        assert_eq!(translated(two, Vendor::Amd, true).events, [1, 2]);
    }

    #[test]
    fn intel_filter_omits_wide_selects() {
        let toml = "action = \"deny\"\nevents = [{ select = 0xFFF }, { select = 0xC0, umask = 0 }]";
        for masks in [false, true] {
            assert_eq!(translated(toml, Vendor::Intel, masks).events.len(), 1);
        }
    }

    /// Returns whether a filter in KVM's format allows an event. Follows the kernel's
    /// `is_gp_event_allowed`, with its callees, and `is_fixed_event_allowed`.
    fn kvm_allows(filter: &KvmEventFilter, selection: EventSelection) -> bool {
        let listed = match selection {
            EventSelection::Fixed(n) => filter.fixed_counter_bitmap >> n & 1 != 0,
            EventSelection::General(select, umask) => {
                let key = exact(select.0, 0);
                let of = |exclude: bool| {
                    filter.events.iter().any(|event| {
                        let (mask, excludes) = match filter.flags {
                            0 => (0xFF, false),
                            _ => (event >> 56, event >> 55 & 1 == 1),
                        };
                        event & 0xF_0000_00FF == key
                            && excludes == exclude
                            && u64::from(umask.0) & mask == event >> 8 & 0xFF
                    })
                };
                of(false) && !of(true)
            }
        };
        listed == (filter.action == KVM_PMU_EVENT_ALLOW)
    }

    fn entry() -> impl Strategy<Value = EventFilterEntrySpec> {
        (
            prop_oneof![Just(0xC0u64), Just(0x2E), Just(0x120)],
            any::<u8>(),
            any::<u8>(),
            any::<bool>(),
        )
            .prop_map(|(select, mask, matches, exclude)| EventFilterEntrySpec {
                select,
                umask: None,
                umask_mask: Some(mask.into()),
                umask_match: Some((mask & matches).into()),
                exclude,
            })
    }

    proptest! {
        /// The filter that is translated for KVM allows the same events as the original filter in
        /// the emulated vPMU.
        #[test]
        fn translated_filter_allows_same_events(
            events in prop::collection::vec(entry(), 0..6),
            allow in any::<bool>(),
            fixed_counters in 0u64..16,
            masks in any::<bool>(),
            amd in any::<bool>(),
            select in prop_oneof![Just(0xC0u16), Just(0x2E), Just(0x120), Just(0x20)],
            umask in any::<u8>(),
        ) {
            let action = if allow { EventFilterAction::Allow } else { EventFilterAction::Deny };
            let ours = EventFilter::new(&EventFilterSpec { action, fixed_counters, events }).unwrap();
            let vendor = if amd { Vendor::Amd } else { Vendor::Intel };
            let select = if amd { select } else { select & 0xFF };
            let Ok(theirs) = KvmEventFilter::new(&ours, vendor, masks) else {
                // There are at most six masked entries, so only an expanded filter can be too long.
                prop_assert!(!masks);
                return Ok(());
            };
            let general = EventSelection::General(EventSelect(select), UnitMask(umask));
            prop_assert_eq!(ours.allows(general), kvm_allows(&theirs, general));
            for n in 0..4 {
                prop_assert_eq!(ours.allows(EventSelection::Fixed(n)), kvm_allows(&theirs, EventSelection::Fixed(n)));
            }
        }
    }
}
