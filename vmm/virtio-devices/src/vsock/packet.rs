//! Header of a vsock packet. It is copied from guest memory exactly once (virtio 1.2, 5.10.6).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, transmute};

/// Context ID (CID) of the host (virtio 1.2, 5.10.4).
pub const HOST_CID: u64 = 2;
/// Number of the stream socket type (5.10.6). The other type requires an optional feature.
pub const STREAM: u16 = 1;
/// Maximum amount of data in a packet, in bytes. Linux's driver has the same limit.
pub const MAX_DATA: usize = 64 << 10;

/// Flag of a [`VsockOp::Shutdown`] packet: the sender will receive no more data (5.10.6.5).
pub const NO_RECEIVE: u32 = 1;
/// Flag of a [`VsockOp::Shutdown`] packet: the sender will send no more data (5.10.6.5).
pub const NO_SEND: u32 = 2;

/// Operation of a vsock packet (5.10.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum VsockOp {
    /// Request for a connection.
    Request = 1,
    /// Acceptance of a requested connection.
    Response = 2,
    /// Rejection of a request, or immediate termination of a connection.
    Reset = 3,
    /// Half-close or close of a connection.
    Shutdown = 4,
    /// Data of a stream connection.
    Data = 5,
    /// Update of the credit that the sender grants.
    CreditUpdate = 6,
    /// Request for a credit update.
    CreditRequest = 7,
}

impl VsockOp {
    /// Converts the operation number of a header. Returns `None` for an unknown number, which must
    /// be answered with a reset.
    pub fn from_number(number: u16) -> Option<Self> {
        use VsockOp::*;
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

/// A decoded header of a vsock packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VsockPacketHeader {
    /// CID of the sender.
    pub src_cid: u64,
    /// CID of the receiver.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Length of the data that follows the header, in bytes.
    pub len: u32,
    /// Number of the socket type, such as [`STREAM`].
    pub kind: u16,
    /// Operation number. Not necessarily a valid [`VsockOp`].
    pub op: u16,
    /// Flags, whose meaning depends on the operation.
    pub flags: u32,
    /// Size of the sender's receive buffer for this connection, in bytes.
    pub buf_alloc: u32,
    /// Number of bytes that the sender has consumed on this connection, modulo 2^32.
    pub fwd_cnt: u32,
}

/// Size of an encoded packet header, in bytes.
pub const HEADER_BYTES: usize = 44;

/// Memory layout of a packet header (5.10.6).
#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C)]
struct RawHeader {
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

impl VsockPacketHeader {
    /// Decodes a packet header.
    pub fn from_bytes(bytes: [u8; HEADER_BYTES]) -> Self {
        let raw: RawHeader = transmute!(bytes);
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

    /// Encodes the packet header.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        transmute!(RawHeader {
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

    /// Returns the header of the reset packet that answers this packet.
    pub fn reset(&self) -> Self {
        Self {
            src_cid: self.dst_cid,
            dst_cid: self.src_cid,
            src_port: self.dst_port,
            dst_port: self.src_port,
            kind: self.kind,
            op: VsockOp::Reset as u16,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operation_numbers_match_specification() {
        for number in 0..=u16::MAX {
            let op = VsockOp::from_number(number);
            assert_eq!(
                op.map(|op| op as u16),
                (1..=7).contains(&number).then_some(number)
            );
        }
    }

    /// The fields of an encoded header have the order and sizes of virtio 1.2, 5.10.6.
    #[test]
    fn header_layout_matches_specification() {
        let header = VsockPacketHeader {
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
        assert_eq!(VsockPacketHeader::from_bytes(bytes), header);
    }

    #[test]
    fn reset_is_addressed_to_sender() {
        let packet = VsockPacketHeader {
            src_cid: 3,
            dst_cid: 2,
            src_port: 7,
            dst_port: 9,
            len: 5,
            kind: 77,
            op: 5,
            ..VsockPacketHeader::default()
        };
        let reset = packet.reset();
        assert_eq!(
            (reset.src_cid, reset.dst_cid, reset.src_port, reset.dst_port),
            (2, 3, 9, 7)
        );
        assert_eq!((reset.op, reset.len, reset.kind), (3, 0, 77));
    }
}
