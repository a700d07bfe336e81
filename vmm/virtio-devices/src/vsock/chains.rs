//! Reads and writes vsock packets in descriptor chains. A packet may be split into descriptors
//! arbitrarily (virtio 1.2, 2.7.4.2). Linux uses one or two, and more since 6.17.

use smallvec::SmallVec;
use virtio_queue::DescriptorChain;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::packet::{HEADER_BYTES, VsockPacketHeader};

type Chain<'m> = DescriptorChain<&'m GuestMemoryMmap>;

/// Error returned when a descriptor chain contains no valid packet.
#[derive(Debug, thiserror::Error)]
pub enum PacketChainError {
    /// The chain is shorter than a packet header.
    #[error("a packet of {0} bytes has no header")]
    NoHeader(usize),
    /// A buffer of the descriptor chain is outside guest RAM.
    #[error("a packet that is not in memory")]
    Memory(#[from] GuestMemoryError),
    /// The chain contains less data than the packet header announces.
    #[error("a packet declares {len} bytes of data but has {have}")]
    Short {
        /// Length of the data according to the header, in bytes.
        len: u32,
        /// Amount of data in the descriptor chain, in bytes.
        have: usize,
    },
    /// The packet header announces more data than the maximum packet size.
    #[error("a packet declares {len} bytes of data; must be at most {most}")]
    Long {
        /// Length of the data according to the header, in bytes.
        len: u32,
        /// Maximum length of the data, in bytes.
        most: usize,
    },
}

/// A list of guest memory segments, which is consumed from the front.
struct GuestSegments {
    rest: SmallVec<[(GuestAddress, usize); 8]>,
    /// Index of the first segment that has not been completely consumed.
    first: usize,
}

impl GuestSegments {
    /// Returns the segments of a descriptor chain: the device-writable ones if `to_guest` is
    /// `true`, otherwise the device-readable ones.
    fn of(chain: Chain<'_>, to_guest: bool) -> Self {
        let wanted = chain.filter(|descriptor| descriptor.is_write_only() == to_guest);
        let rest = wanted.map(|descriptor| (descriptor.addr(), descriptor.len() as usize));
        Self {
            rest: rest.collect(),
            first: 0,
        }
    }

    /// Returns the total length of the remaining segments, in bytes.
    fn length(&self) -> usize {
        let left = self.rest.iter().skip(self.first);
        left.fold(0, |all, (_, bytes)| all.saturating_add(*bytes))
    }

    /// Consumes the next `most` bytes of the segments, or fewer if the segments are shorter, and
    /// returns their number. Calls `part` for each contiguous range of guest memory, with its guest
    /// address and with its range within the consumed bytes.
    fn advance(
        &mut self,
        most: usize,
        mut part: impl FnMut(GuestAddress, std::ops::Range<usize>) -> Result<(), GuestMemoryError>,
    ) -> Result<usize, GuestMemoryError> {
        let mut done = 0;
        while done < most
            && let Some((at, bytes)) = self.rest.get_mut(self.first)
        {
            let count = (*bytes).min(most - done);
            part(*at, done..done + count)?;
            done += count;
            *bytes -= count;
            // No segment follows one that reaches the end of the address space.
            *at = at.checked_add(count as u64).unwrap_or(GuestAddress(u64::MAX));
            if *bytes == 0 {
                self.first += 1;
            }
        }
        Ok(done)
    }

    fn read(&mut self, memory: &GuestMemoryMmap, data: &mut [u8]) -> Result<usize, GuestMemoryError> {
        self.advance(data.len(), |at, range| memory.read_slice(&mut data[range], at))
    }

    fn write(&mut self, memory: &GuestMemoryMmap, data: &[u8]) -> Result<usize, GuestMemoryError> {
        self.advance(data.len(), |at, range| memory.write_slice(&data[range], at))
    }
}

/// Reads a packet that the driver sent. Returns its header, and either the number of data bytes
/// copied to `buffer` or the reason why the data is invalid.
///
/// # Errors
/// Returns a [`PacketChainError`] if the chain has no valid header.
pub fn take(
    memory: &GuestMemoryMmap,
    chain: Chain<'_>,
    buffer: &mut [u8],
) -> Result<(VsockPacketHeader, Result<usize, PacketChainError>), PacketChainError> {
    let mut pieces = GuestSegments::of(chain, false);
    let mut header = [0; HEADER_BYTES];
    let have = pieces.read(memory, &mut header)?;
    if have < HEADER_BYTES {
        return Err(PacketChainError::NoHeader(have));
    }
    let header = VsockPacketHeader::from_bytes(header);
    let len = header.len;
    let most = buffer.len();
    let data = match usize::try_from(len).ok().and_then(|len| buffer.get_mut(..len)) {
        None => Err(PacketChainError::Long { len, most }),
        Some(data) => match pieces.read(memory, data) {
            Ok(have) if have == data.len() => Ok(have),
            Ok(have) => Err(PacketChainError::Short { len, have }),
            Err(error) => Err(error.into()),
        },
    };
    Ok((header, data))
}

/// Space for one packet to the driver in a device-writable descriptor chain.
pub struct VsockPacketBuffer(GuestSegments);

impl VsockPacketBuffer {
    /// Returns the space for a packet in a device-writable descriptor chain.
    ///
    /// # Errors
    /// Returns [`PacketChainError::NoHeader`] if the header does not fit.
    pub fn of(chain: Chain<'_>) -> Result<Self, PacketChainError> {
        let pieces = GuestSegments::of(chain, true);
        let bytes = pieces.length();
        if bytes < HEADER_BYTES {
            return Err(PacketChainError::NoHeader(bytes));
        }
        Ok(Self(pieces))
    }

    /// Returns the space for packet data after the header, in bytes.
    pub fn data(&self) -> usize {
        self.0.length().saturating_sub(HEADER_BYTES)
    }

    /// Writes a packet to the descriptor chain and returns the number of bytes written.
    ///
    /// # Errors
    /// Returns [`PacketChainError::Memory`] if a buffer is outside guest RAM.
    pub fn put(
        mut self,
        memory: &GuestMemoryMmap,
        header: &VsockPacketHeader,
        data: &[u8],
    ) -> Result<usize, PacketChainError> {
        let header = self.0.write(memory, &header.to_bytes())?;
        Ok(header + self.0.write(memory, data)?)
    }
}
