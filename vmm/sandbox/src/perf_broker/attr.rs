//! Allow-list of perf events: the fields of `struct perf_event_attr` that a VM may set, and their
//! permitted values.
//!
//! Every byte of the structure that belongs to no field in this module must be 0. Features of later
//! kernels are therefore denied until they are added here.

/// Offsets of the fields of `struct perf_event_attr`, in bytes (`include/uapi/linux/perf_event.h`).
mod at {
    pub(super) const TYPE: usize = 0;
    pub(super) const SIZE: usize = 4;
    pub(super) const CONFIG: usize = 8;
    pub(super) const SAMPLE_PERIOD: usize = 16;
    pub(super) const SAMPLE_TYPE: usize = 24;
    pub(super) const READ_FORMAT: usize = 32;
    pub(super) const FLAGS: usize = 40;
    pub(super) const CONFIG1: usize = 56;
    pub(super) const CONFIG2: usize = 64;
    pub(super) const CLOCKID: usize = 92;
}

/// Event type `PERF_TYPE_HARDWARE`. The following constants are other event types.
const HARDWARE: u32 = 0;
const SOFTWARE: u32 = 1;
const HW_CACHE: u32 = 3;
const RAW: u32 = 4;
/// Number of generic hardware events (`PERF_COUNT_HW_MAX`).
const HARDWARE_EVENTS: u64 = 10;
/// Bit set of permitted software events (`PERF_COUNT_SW_*`): 0 to 9 (clocks, page faults, context
/// switches, migrations, alignment and emulation faults, dummy event) and 11 (cgroup switches).
/// Event 10 (BPF output) is excluded.
const SOFTWARE_EVENTS: u64 = 0b1011_1111_1111;
const SW_CPU_CLOCK: u64 = 0;
const SW_DUMMY: u64 = 9;
/// Permitted `PERF_SAMPLE_*` bits: instruction pointer, time, count and period. Registers, stacks,
/// call chains and data addresses are excluded.
const SAMPLE_IP: u64 = 1;
const SAMPLE_TIME: u64 = 1 << 2;
const SAMPLE_READ: u64 = 1 << 4;
const SAMPLE_PERIOD: u64 = 1 << 8;
/// Permitted `PERF_FORMAT_*` bits: times, IDs and groups.
const READ_FORMATS: u64 = 0b1111;
/// Bit `disabled` in the flags word of `struct perf_event_attr`. The following constants are other
/// bits of this word.
const DISABLED: u64 = 1;
const PINNED: u64 = 1 << 2;
const EXCLUDE_USER: u64 = 1 << 4;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HV: u64 = 1 << 6;
const FREQ: u64 = 1 << 10;
const EXCLUDE_HOST: u64 = 1 << 19;
const EXCLUDE_GUEST: u64 = 1 << 20;
const USE_CLOCKID: u64 = 1 << 25;
const FLAGS: u64 = DISABLED
    | PINNED
    | EXCLUDE_USER
    | EXCLUDE_KERNEL
    | EXCLUDE_HV
    | FREQ
    | EXCLUDE_HOST
    | EXCLUDE_GUEST
    | USE_CLOCKID;
/// Flag `sample_id_all` of `struct perf_event_attr`. The dummy event may have this flag and
/// `context_switch`. It counts nothing, but records the context switches of its thread. Each record
/// contains a time and does not identify the other thread.
const SAMPLE_ID_ALL: u64 = 1 << 18;
const CONTEXT_SWITCH: u64 = 1 << 26;
const SWITCH_FLAGS: u64 = SAMPLE_ID_ALL | CONTEXT_SWITCH;
/// Clock ID `CLOCK_MONOTONIC`.
const MONOTONIC: u32 = 1;
/// Size of the first version of `struct perf_event_attr` (`PERF_ATTR_SIZE_VER0`), in bytes.
const MIN_BYTES: usize = 64;

/// Returns whether a VM may open the event that `attr` describes.
pub(super) fn is_allowed(attr: &[u8]) -> bool {
    let Some(fields) = AttrFields::read(attr) else {
        return false;
    };
    fields.is_known_event() && fields.samples_are_allowed() && fields.flags & !fields.known_flags() == 0
}

/// Fields of `struct perf_event_attr` that may be nonzero.
struct AttrFields {
    kind: u32,
    config: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    clockid: u32,
}

impl AttrFields {
    /// Parses the permitted fields of a `struct perf_event_attr`. Returns `None` if a byte outside
    /// these fields is nonzero.
    fn read(attr: &[u8]) -> Option<Self> {
        let word = |at: usize| {
            attr.get(at..)
                .and_then(|rest| rest.first_chunk())
                .map(|w| u32::from_ne_bytes(*w))
        };
        let double = |at: usize| {
            attr.get(at..)
                .and_then(|rest| rest.first_chunk())
                .map(|w| u64::from_ne_bytes(*w))
        };
        if attr.len() < MIN_BYTES || usize::try_from(word(at::SIZE)?) != Ok(attr.len()) {
            return None;
        }
        let named = [
            (at::TYPE, 8),
            (at::CONFIG, 8),
            (at::SAMPLE_PERIOD, 8),
            (at::SAMPLE_TYPE, 8),
            (at::READ_FORMAT, 8),
            (at::FLAGS, 8),
            (at::CONFIG1, 8),
            (at::CONFIG2, 8),
            (at::CLOCKID, 4),
        ];
        let is_named = |byte: usize| {
            named
                .iter()
                .any(|(start, length)| (*start..start + length).contains(&byte))
        };
        if attr
            .iter()
            .enumerate()
            .any(|(byte, value)| *value != 0 && !is_named(byte))
        {
            return None;
        }
        Some(Self {
            kind: word(at::TYPE)?,
            config: double(at::CONFIG)?,
            sample_type: double(at::SAMPLE_TYPE)?,
            read_format: double(at::READ_FORMAT)?,
            flags: double(at::FLAGS)?,
            clockid: word(at::CLOCKID).unwrap_or(0),
        })
    }

    fn is_known_event(&self) -> bool {
        match self.kind {
            HARDWARE => self.config < HARDWARE_EVENTS,
            SOFTWARE => self.config < 64 && SOFTWARE_EVENTS >> self.config & 1 == 1,
            // The config of a cache event consists of cache, operation and result
            // (perf_event_open(2)).
            HW_CACHE => self.config & 0xff < 7 && self.config >> 8 & 0xff < 3 && self.config >> 16 < 2,
            RAW => true,
            // Deny tracepoints, breakpoints, and PMUs with dynamic type numbers such as kprobes,
            // uprobes and uncore PMUs.
            _ => false,
        }
    }

    fn known_flags(&self) -> u64 {
        if self.kind == SOFTWARE && self.config == SW_DUMMY {
            FLAGS | SWITCH_FLAGS
        } else {
            FLAGS
        }
    }

    /// Returns whether the samples that the event takes are permitted. Samples with an instruction
    /// pointer must be limited to the guest. The CPU clock is the only exception, because the
    /// kernel cannot tell whether a sample of this event is a guest sample before it is taken.
    fn samples_are_allowed(&self) -> bool {
        let known = SAMPLE_IP | SAMPLE_TIME | SAMPLE_READ | SAMPLE_PERIOD;
        let of_guest = self.flags & EXCLUDE_HOST != 0 && self.kind != SOFTWARE;
        let of_clock = self.kind == SOFTWARE && self.config == SW_CPU_CLOCK;
        let clock = if self.flags & USE_CLOCKID != 0 {
            MONOTONIC
        } else {
            0
        };
        self.sample_type & !known == 0
            && self.read_format & !READ_FORMATS == 0
            && (self.sample_type & SAMPLE_IP == 0 || of_guest || of_clock)
            && self.clockid == clock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 144;

    fn attr(kind: u32, config: u64) -> [u8; BYTES] {
        let mut attr = [0; BYTES];
        attr[at::TYPE..][..4].copy_from_slice(&kind.to_ne_bytes());
        attr[at::SIZE..][..4].copy_from_slice(&u32::try_from(BYTES).unwrap().to_ne_bytes());
        attr[at::CONFIG..][..8].copy_from_slice(&config.to_ne_bytes());
        attr
    }

    fn with(mut attr: [u8; BYTES], at: usize, value: u64) -> [u8; BYTES] {
        let old = u64::from_ne_bytes(*attr[at..].first_chunk().unwrap());
        attr[at..][..8].copy_from_slice(&(old | value).to_ne_bytes());
        attr
    }

    /// The allow-list permits all events that perf-core opens: counters with a mapped ring, group
    /// members, and sampling events of the guest and the clock.
    #[test]
    fn perf_core_events_are_allowed() {
        let sides = EXCLUDE_HOST | EXCLUDE_HV | EXCLUDE_USER;
        let counter = with(attr(RAW, 0x1_00c0), at::FLAGS, DISABLED | PINNED | sides);
        let counter = with(
            with(counter, at::SAMPLE_PERIOD, 1 << 60),
            at::SAMPLE_TYPE,
            SAMPLE_READ,
        );
        assert!(is_allowed(&with(counter, at::READ_FORMAT, 3)));
        assert!(is_allowed(&with(
            with(counter, at::READ_FORMAT, 15),
            at::CONFIG1,
            0x10001
        )));
        let sampled = SAMPLE_IP | SAMPLE_TIME | SAMPLE_PERIOD;
        let mut clock = with(attr(SOFTWARE, SW_CPU_CLOCK), at::SAMPLE_TYPE, sampled);
        clock = with(clock, at::FLAGS, DISABLED | USE_CLOCKID);
        clock[at::CLOCKID] = 1;
        assert!(is_allowed(&clock));
        let switches = with(attr(SOFTWARE, SW_DUMMY), at::SAMPLE_TYPE, SAMPLE_TIME);
        let mut switches = with(switches, at::FLAGS, SWITCH_FLAGS | EXCLUDE_KERNEL | USE_CLOCKID);
        switches[at::CLOCKID] = 1;
        assert!(is_allowed(&switches));
        let guest = with(attr(HARDWARE, 0), at::SAMPLE_TYPE, sampled);
        assert!(is_allowed(&with(guest, at::FLAGS, EXCLUDE_HOST | FREQ)));
        assert!(is_allowed(&attr(HW_CACHE, 0x1_0203 & 0x1_0202)));
    }

    #[test]
    fn other_events_and_samples_are_denied() {
        // Deny tracepoints, breakpoints, and a PMU with a dynamic type number (here uprobe).
        for kind in [2, 5, 6, 9, 1 << 20] {
            assert!(!is_allowed(&attr(kind, 0)), "type {kind}");
        }
        for config in [10, 12, 64, u64::MAX] {
            assert!(!is_allowed(&attr(SOFTWARE, config)), "software {config}");
        }
        assert!(!is_allowed(&attr(HARDWARE, 10)));
        // Deny an event of another core type's PMU, which is selected by the upper half of the
        // config.
        assert!(!is_allowed(&attr(HARDWARE, 8 << 32)));
        assert!(!is_allowed(&attr(HW_CACHE, 7)));
        // Deny samples of host instructions with an event other than the clock.
        let ip = with(attr(HARDWARE, 0), at::SAMPLE_TYPE, SAMPLE_IP);
        assert!(!is_allowed(&ip));
        assert!(!is_allowed(&with(attr(SOFTWARE, 2), at::SAMPLE_TYPE, SAMPLE_IP)));
        let known = SAMPLE_IP | SAMPLE_TIME | SAMPLE_READ | SAMPLE_PERIOD;
        for bit in (0..64).map(|bit| 1 << bit).filter(|bit| known & bit == 0) {
            assert!(
                !is_allowed(&with(attr(SOFTWARE, 0), at::SAMPLE_TYPE, bit)),
                "sample {bit:#x}"
            );
        }
        for bit in (0..64).map(|bit| 1 << bit).filter(|bit| FLAGS & bit == 0) {
            assert!(
                !is_allowed(&with(attr(SOFTWARE, 0), at::FLAGS, bit)),
                "flag {bit:#x}"
            );
        }
        assert!(!is_allowed(&with(attr(SOFTWARE, 0), at::READ_FORMAT, 1 << 4)));
    }

    #[test]
    fn unlisted_attr_bytes_must_be_zero() {
        let good = attr(SOFTWARE, 1);
        assert!(is_allowed(&good));
        // Deny watermarks, breakpoint types, branch stacks, registers, stacks, AUX areas, sigtrap
        // data and later extensions.
        let unknown = (48..56).chain(72..92).chain(96..BYTES);
        for byte in unknown {
            let mut bad = good;
            bad[byte] = 1;
            assert!(!is_allowed(&bad), "byte {byte}");
        }
        // Deny a clock ID without its flag, and a clock other than the monotonic one.
        let mut bad = good;
        bad[at::CLOCKID] = 1;
        assert!(!is_allowed(&bad));
        bad = with(good, at::FLAGS, USE_CLOCKID);
        bad[at::CLOCKID] = 4;
        assert!(!is_allowed(&bad));
        for length in [0, 8, 63, 143] {
            assert!(!is_allowed(&good[..length]), "{length} bytes");
        }
    }
}
