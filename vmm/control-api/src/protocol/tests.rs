//! Tests of the serialized requests and of the intervals between readings.

use super::*;
use proptest::prelude::*;

#[test]
fn requests_serialize_as_documented() {
    let text = |call| serde_json::to_string(&RequestLine { id: 3, call }).unwrap();
    assert_eq!(text(Call::Status), r#"{"id":3,"call":"status"}"#);
    assert_eq!(
        text(Call::Hello { protocol: 1 }),
        r#"{"id":3,"call":"hello","protocol":1}"#
    );
    let open = r#"{"id":1,"call":"open","events":"{cycles,kvm:exits}","vcpus":[0]}"#;
    let open: RequestLine = serde_json::from_str(open).unwrap();
    assert_eq!(
        open.call,
        Call::Open {
            events: "{cycles,kvm:exits}".into(),
            vcpus: Some(vec![0]),
            whole: false,
            sampling: None
        }
    );
}

fn reading(value: u64, enabled_ns: u64, running_ns: u64, estimate: Option<u64>) -> EventReading {
    EventReading {
        handle: 0,
        value,
        enabled_ns,
        running_ns,
        estimate,
        standard_error: None,
        bound: None,
        failed: false,
        gone: false,
        vcpus: Vec::new(),
    }
}

/// The interval of an event that ran half of the time uses the growth of the estimate, not the
/// share of time, because the event may have been off in the busier half. The intervals add up to
/// the total.
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
