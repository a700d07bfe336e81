//! Tests of the request parser and of the intervals between readings.

use super::*;
use proptest::prelude::*;

fn reading(value: u64, enabled_ns: u64, running_ns: u64, estimate: Option<u64>) -> EventReading {
    EventReading {
        value,
        enabled_ns,
        running_ns,
        estimate,
        ..EventReading::default()
    }
}

/// If an event did not run all the time, the count of an interval is the increase of the estimated
/// total. The counts of all intervals therefore add up to the total. Scaling the count by the share
/// of time running in the interval would be wrong, because the event rate may change while the
/// event is not running.
#[test]
fn intervals_are_the_growth_of_the_estimate() {
    let readings = [
        reading(100, 1000, 1000, Some(100)),
        reading(150, 2000, 1500, Some(400)),
        reading(350, 3000, 2500, Some(600)),
        reading(350, 4000, 2500, Some(700)),
        reading(360, 5000, 2600, Some(690)),
    ];
    let since = |at: usize| {
        let before = at.checked_sub(1).map(|before| &readings[before]);
        readings[at]
            .since(before)
            .map(|g| (g.count, g.enabled_ns, g.running_ns))
    };
    assert_eq!(since(0), Some((100, 1000, 1000)));
    assert_eq!(since(1), Some((300, 1000, 500)));
    assert_eq!(since(2), Some((200, 1000, 1000)), "all of it was counted");
    assert_eq!(since(3), None, "none of it was counted");
    assert_eq!(since(4), Some((10, 1000, 100)), "never less than was counted");
    let failed = EventReading {
        failed: true,
        ..readings[1].clone()
    };
    assert_eq!(failed.since(None), None);
}

proptest! {
    #[test]
    fn parser_survives_random_lines(line in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = serde_json::from_slice::<RequestLine>(&line);
    }
}
