//! Messages between a VM and its perf event broker, each of which is one datagram.

/// Maximum size of `struct perf_event_attr`, in bytes. In Linux 6.18, the structure has 144 bytes.
pub(super) const MAX_ATTR_BYTES: usize = 256;
/// Size of a request without its attribute structure, in bytes.
const HEADER_BYTES: usize = 16;
/// Maximum size of a request, in bytes.
pub(super) const MAX_REQUEST_BYTES: usize = HEADER_BYTES + MAX_ATTR_BYTES;
/// Size of a reply, in bytes. A reply contains an error number, or 0 for success.
pub(super) const REPLY_BYTES: usize = 4;

const OPEN: u32 = 1;
const SIGNAL: u32 = 2;

/// Request from the VM to the broker. One descriptor may be passed with it: the group leader of a
/// new event, or the event whose overflow signal is to be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PerfRequest<'a> {
    /// Request to open an event.
    Open {
        /// ID of the thread on which the event is opened.
        tid: i32,
        /// ID of the thread that receives overflow signals; 0 for no signal.
        receiver: i32,
        /// Bytes of `struct perf_event_attr`.
        attr: &'a [u8],
    },
    /// Request to set the thread that receives the overflow signal of an event.
    Signal {
        /// ID of the thread that receives the signal.
        receiver: i32,
    },
}

impl<'a> PerfRequest<'a> {
    /// Encodes the request into `buffer` and returns its length, or `None` if the attribute
    /// structure is too long.
    pub(super) fn encode(self, buffer: &mut [u8; MAX_REQUEST_BYTES]) -> Option<usize> {
        let (kind, tid, receiver, attr) = match self {
            Self::Open { tid, receiver, attr } => (OPEN, tid, receiver, attr),
            Self::Signal { receiver } => (SIGNAL, 0, receiver, &[][..]),
        };
        buffer[0..4].copy_from_slice(&kind.to_ne_bytes());
        buffer[4..8].copy_from_slice(&tid.to_ne_bytes());
        buffer[8..12].copy_from_slice(&receiver.to_ne_bytes());
        buffer[12..HEADER_BYTES].fill(0);
        let length = HEADER_BYTES + attr.len();
        buffer.get_mut(HEADER_BYTES..length)?.copy_from_slice(attr);
        Some(length)
    }

    /// Decodes a request. Returns `None` if it is malformed.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (header, attr) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let word = |at: usize| Some(u32::from_ne_bytes(*header.get(at..)?.first_chunk()?));
        let id = |at: usize| word(at).map(u32::cast_signed).filter(|id| *id >= 0);
        let (tid, receiver) = (id(4)?, id(8)?);
        match (word(0)?, word(12)?) {
            (OPEN, 0) if tid > 0 => Some(Self::Open { tid, receiver, attr }),
            (SIGNAL, 0) if tid == 0 && receiver > 0 && attr.is_empty() => Some(Self::Signal { receiver }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_a_round_trip() {
        let attr = [7; 144];
        let requests = [
            PerfRequest::Open {
                tid: 1,
                receiver: 0,
                attr: &attr,
            },
            PerfRequest::Open {
                tid: i32::MAX,
                receiver: 3,
                attr: &[],
            },
            PerfRequest::Signal { receiver: 9 },
        ];
        for request in requests {
            let mut buffer = [0xff; MAX_REQUEST_BYTES];
            let length = request.encode(&mut buffer).unwrap();
            assert_eq!(PerfRequest::decode(&buffer[..length]), Some(request));
        }
        let long = [0; MAX_ATTR_BYTES + 1];
        let request = PerfRequest::Open {
            tid: 1,
            receiver: 0,
            attr: &long,
        };
        assert_eq!(request.encode(&mut [0; MAX_REQUEST_BYTES]), None);
    }

    #[test]
    fn malformed_requests_are_rejected() {
        let mut buffer = [0; MAX_REQUEST_BYTES];
        // Invalid requests: pid -1 (any process), pid 0 (the broker itself), no receiver, and an
        // unknown type.
        for (kind, tid, receiver) in [
            (OPEN, -1, 0),
            (OPEN, 0, 0),
            (OPEN, 1, -1),
            (SIGNAL, 0, 0),
            (3, 1, 1),
        ] {
            buffer[0..4].copy_from_slice(&kind.to_ne_bytes());
            buffer[4..8].copy_from_slice(&i32::to_ne_bytes(tid));
            buffer[8..12].copy_from_slice(&i32::to_ne_bytes(receiver));
            assert_eq!(
                PerfRequest::decode(&buffer[..HEADER_BYTES]),
                None,
                "{kind} {tid} {receiver}"
            );
        }
        for length in 0..HEADER_BYTES {
            assert_eq!(PerfRequest::decode(&buffer[..length]), None);
        }
    }
}
