//! The header of a packet, taken out of the guest's memory once (virtio 1.2, 5.10.6).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, transmute};

/// The host's address (virtio 1.2, 5.10.4).
pub const HOST_CID: u64 = 2;
/// The only type of socket there is without feature bits (5.10.6).
pub const STREAM: u16 = 1;
/// Bytes of data that one packet can carry: what Linux's driver sends at most.
pub const MAX_DATA: usize = 64 << 10;

/// Flag of [`Op::Shutdown`]: the sender receives no more (5.10.6.5).
pub const NO_RECEIVE: u32 = 1;
/// Flag of [`Op::Shutdown`]: the sender sends no more.
pub const NO_SEND: u32 = 2;

/// What a packet is for (5.10.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    /// Asks for a connection.
    Request = 1,
    /// Accepts one.
    Response = 2,
    /// Refuses or ends one, at once.
    Reset = 3,
    /// Says that a side sends or receives no more.
    Shutdown = 4,
    /// Carries data.
    Data = 5,
    /// Tells how much the sender can take.
    CreditUpdate = 6,
    /// Asks for that.
    CreditRequest = 7,
}

impl Op {
    /// That of a number in a header; none of it, the connection is to be reset.
    pub fn from_number(number: u16) -> Option<Self> {
        use Op::*;
        [
            Request,
            Response,
            Reset,
            Shutdown,
            Data,
            CreditUpdate,
            CreditRequest,
        ]
        .into_iter()
        .find(|op| *op as u16 == number)
    }
}

/// A header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Who sends.
    pub src_cid: u64,
    /// Who is to get it.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Bytes of data behind the header.
    pub len: u32,
    /// Kind of socket.
    pub kind: u16,
    /// What it is for: the number of an [`Op`], when it is one.
    pub op: u16,
    /// Belongs to the operation.
    pub flags: u32,
    /// Bytes the sender can hold for this connection.
    pub buf_alloc: u32,
    /// Bytes of this connection that the sender has passed on so far, modulo 2^32.
    pub fwd_cnt: u32,
}

/// Bytes of a header.
pub const HEADER_BYTES: usize = 44;

/// A header as it lies in memory (5.10.6).
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct Raw {
    src_cid: U64,
    dst_cid: U64,
    src_port: U32,
    dst_port: U32,
    len: U32,
    kind: U16,
    op: U16,
    flags: U32,
    buf_alloc: U32,
    fwd_cnt: U32,
}

impl Header {
    /// That of a packet in memory.
    pub fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        let raw: Raw = transmute!(bytes);
        Self {
            src_cid: raw.src_cid.get(),
            dst_cid: raw.dst_cid.get(),
            src_port: raw.src_port.get(),
            dst_port: raw.dst_port.get(),
            len: raw.len.get(),
            kind: raw.kind.get(),
            op: raw.op.get(),
            flags: raw.flags.get(),
            buf_alloc: raw.buf_alloc.get(),
            fwd_cnt: raw.fwd_cnt.get(),
        }
    }

    /// As it lies in memory.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        transmute!(Raw {
            src_cid: self.src_cid.into(),
            dst_cid: self.dst_cid.into(),
            src_port: self.src_port.into(),
            dst_port: self.dst_port.into(),
            len: self.len.into(),
            kind: self.kind.into(),
            op: self.op.into(),
            flags: self.flags.into(),
            buf_alloc: self.buf_alloc.into(),
            fwd_cnt: self.fwd_cnt.into(),
        })
    }

    /// The answer that ends what this packet belongs to.
    pub fn reset(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: Op::Reset as u16,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_those_of_the_standard() {
        for number in 0..=u16::MAX {
            let op = Op::from_number(number);
            assert_eq!(
                op.map(|op| op as u16),
                (1..=7).contains(&number).then_some(number)
            );
        }
    }

    /// The order and the sizes of virtio 1.2, 5.10.6.
    #[test]
    fn a_header_lies_in_memory_as_the_standard_says() {
        let header = Header {
            src_cid: 0x0807_0605_0403_0201,
            dst_cid: 0x100f_0e0d_0c0b_0a09,
            src_port: 0x1413_1211,
            dst_port: 0x1817_1615,
            len: 0x1c1b_1a19,
            kind: 0x1e1d,
            op: 0x201f,
            flags: 0x2423_2221,
            buf_alloc: 0x2827_2625,
            fwd_cnt: 0x2c2b_2a29,
        };
        let bytes: [u8; HEADER_BYTES] = std::array::from_fn(|n| n as u8 + 1);
        assert_eq!(header.to_bytes(), bytes);
        assert_eq!(Header::from_bytes(bytes), header);
    }

    #[test]
    fn a_reset_goes_back_where_the_packet_came_from() {
        let packet = Header {
            src_cid: 3,
            dst_cid: 2,
            src_port: 7,
            dst_port: 9,
            len: 5,
            kind: 77,
            op: 5,
            ..Header::default()
        };
        let reset = packet.reset();
        assert_eq!(
            (reset.src_cid, reset.dst_cid, reset.src_port, reset.dst_port),
            (2, 3, 9, 7)
        );
        assert_eq!((reset.op, reset.len, reset.kind), (3, 0, 77));
    }
}
