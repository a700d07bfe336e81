//! Fuzzes the metadata service with frames from a hostile guest. Each frame and each expired timer
//! must be processed in bounded time, and the number of frames queued for the guest must remain
//! bounded.
//!
//! Input: one byte of options, followed by frames. Two bytes precede each frame: its length, and
//! the time since the previous frame. The target sets the frame type, the addresses of an IPv4
//! packet and, depending on an option, the sequence numbers of a TCP segment, so that connections
//! are established.
#![no_main]

use std::sync::Arc;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use mmds::config::MmdsConfig;
use mmds::service::MetadataService;
use mmds::stack::MetadataStack;

/// Returns an Ethernet frame that contains `payload` after its header.
fn frame(payload: &[u8], is_ip: bool) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend(if is_ip { [8, 0] } else { [8, 6] });
    frame.extend(payload);
    if let (true, Some(header)) = (is_ip, frame.get_mut(14..36)) {
        let length = u16::try_from(payload.len()).expect("one byte of length");
        header[0] = 0x45;
        header[2..4].copy_from_slice(&length.to_be_bytes());
        header[6..8].fill(0);
        header[9] = 6;
        header[16..20].copy_from_slice(&[169, 254, 169, 254]);
    }
    frame
}

/// Offset of the TCP header in a frame.
const TCP: usize = 34;

/// Returns the sequence and acknowledgment numbers with which the guest continues the TCP
/// connection after it has received `frame`.
fn next_numbers(frame: &[u8]) -> Option<[[u8; 4]; 2]> {
    let number = |at: usize| Some(u32::from_be_bytes(frame.get(at..at + 4)?.try_into().ok()?));
    let (sequence, acknowledged) = (number(TCP + 4)?, number(TCP + 8)?);
    let [offset, flags] = *frame.get(TCP + 12..TCP + 14)? else {
        return None;
    };
    let payload = frame.len().saturating_sub(TCP + usize::from(offset >> 4) * 4);
    let control = u32::from(flags & 1) + u32::from(flags >> 1 & 1);
    let sequence = sequence.wrapping_add(u32::try_from(payload).ok()?).wrapping_add(control);
    Some([acknowledged.to_be_bytes(), sequence.to_be_bytes()])
}

fuzz_target!(|data: &[u8]| {
    let Some((choices, mut data)) = data.split_first() else {
        return;
    };
    let version = if choices & 1 == 0 { "version=v1" } else { "version=v2" };
    let config: MmdsConfig = version.parse().expect("a configuration");
    let service = Arc::new(MetadataService::new(config));
    service.put(serde_json::json!({"a": {"b": "c"}, "n": 1})).expect("it fits");
    let mut now = Instant::now();
    let mut stack = MetadataStack::new(service, now);
    let mut numbers: Option<[[u8; 4]; 2]> = None;
    while let [length, time, rest @ ..] = data {
        let (payload, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        data = rest;
        now += Duration::from_millis(u64::from(*time) * 50);
        let mut frame = frame(payload, choices & 2 == 0 || time & 1 == 0);
        if let (Some([sequence, acknowledged]), Some(header)) = (numbers, frame.get_mut(TCP..TCP + 12))
            && choices & 8 == 0
        {
            header[0..4].copy_from_slice(&[4, 0, 0, 80]);
            header[4..8].copy_from_slice(&sequence);
            header[8..12].copy_from_slice(&acknowledged);
        }
        if stack.wants(&frame) {
            stack.receive(&frame, now);
        }
        if choices & 4 == 0 {
            // The guest's replies acknowledge data, so the service can send further frames.
            for _ in 0..32 {
                let Some(frame) = stack.next_frame(now) else { break };
                numbers = next_numbers(&frame).or(numbers);
            }
        }
        stack.poll(now);
        let _ = stack.poll_delay(now);
    }
});
