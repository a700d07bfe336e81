//! Tests of read formats, event IDs and invalid requests.

use perf_core::*;
use proptest::prelude::*;

use crate::common::test_core::*;

proptest! {
    /// Behaviors P20 and P21: a read writes exactly as many bytes as the event's read format
    /// requires, or none if the buffer is too short.
    #[test]
    fn p20_p21_a_reading_has_the_size_of_its_format(bits in 0u64..16, siblings in 0usize..4, short in 0usize..9) {
        let m = TestCore::new(8);
        let _v = m.vcpu(0);
        let format = ReadFormat::from_bits_truncate(bits);
        let leader = m.open_vcpu(Attr { read_format: format, ..hw() }, None);
        let others: Vec<_> = (0..siblings).map(|i| m.open_vcpu(Attr { config: i as u64 + 2, read_format: format, ..hw() }, Some(&leader))).collect();
        m.run(0, 10);
        let (group, id) = (format.contains(ReadFormat::GROUP), format.contains(ReadFormat::ID));
        let members = if group { 1 + siblings } else { 1 };
        let times = usize::from(format.contains(ReadFormat::TOTAL_TIME_ENABLED)) + usize::from(format.contains(ReadFormat::TOTAL_TIME_RUNNING));
        let size = 8 * (times + usize::from(group) + members * (1 + usize::from(id)));
        prop_assert_eq!(leader.read_size().unwrap(), size);
        let mut buf = vec![0xee; size];
        if short > 0 {
            let len = size.saturating_sub(short);
            prop_assert_eq!(leader.read_bytes(&mut buf[..len]).unwrap_err().errno(), libc::ENOSPC);
            prop_assert!(buf.iter().all(|b| *b == 0xee), "nothing is written");
        }
        prop_assert_eq!(leader.read_bytes(&mut buf).unwrap(), size);
        let words: Vec<u64> = buf.chunks(8).map(|c| u64::from_ne_bytes(c.try_into().unwrap())).collect();
        let mut expected = Vec::new();
        if group { expected.push(members as u64) } else { expected.push(10) }
        expected.extend(std::iter::repeat_n(10, times));
        if group {
            for (i, e) in std::iter::once(&leader).chain(&others).enumerate() {
                expected.push(10 * (i as u64 + 1));
                if id { expected.push(e.id()) }
            }
        } else if id { expected.push(leader.id()) }
        prop_assert_eq!(words, expected);
    }
}

#[test]
fn group_times_match_their_values() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let leader = m.open_vcpu(hw(), None);
    let sibling = m.open_vcpu(hw(), Some(&leader));
    for _ in 0..3 {
        m.run(0, 10);
        for r in sibling.read_group().unwrap() {
            assert_eq!(
                (r.value, r.time_running_ns),
                (r.time_enabled_ns, r.time_enabled_ns),
                "no reading lags behind"
            );
        }
    }
}

#[test]
fn ids_are_unique_and_start_above_zero() {
    let m = TestCore::new(4);
    let _v = m.vcpu(0);
    let ids: Vec<_> = (0..5).map(|_| m.open_vcpu(hw(), None).id()).collect();
    assert!(ids.windows(2).all(|w| w[0] < w[1]) && ids[0] >= 1);
}
