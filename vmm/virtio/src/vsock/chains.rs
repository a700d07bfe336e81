//! Packets in chains of descriptors. Where one descriptor ends and the next begins means nothing (virtio 1.2,
//! 2.7.4.2): Linux has header and data in one, in two, and from 6.17 on in more.

use smallvec::SmallVec;
use virtio_queue::DescriptorChain;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::packet::{HEADER_BYTES, Header};

/// A chain in the guest's memory.
type Chain<'m> = DescriptorChain<&'m GuestMemoryMmap>;

/// What is wrong with a chain.
#[derive(Debug, thiserror::Error)]
pub enum ChainError {
    /// It has no place for a header.
    #[error("a packet of {0} bytes has no header")]
    NoHeader(usize),
    /// It is not RAM.
    #[error("a packet that is not in memory")]
    Memory(#[from] GuestMemoryError),
    /// The header tells of more than there is.
    #[error("a packet tells of {len} bytes of data and has {have}")]
    Short {
        /// What it tells.
        len: u32,
        /// What there is.
        have: usize,
    },
    /// More than any packet.
    #[error("a packet tells of {len} bytes of data, and {most} is the most")]
    Long {
        /// What it tells.
        len: u32,
        /// The most.
        most: usize,
    },
}

/// Pieces of guest memory, one behind the other.
struct Pieces {
    rest: SmallVec<[(GuestAddress, usize); 8]>,
    /// The first that is not used up.
    first: usize,
}

impl Pieces {
    /// Those of a chain that the driver has written, or that it lets us write.
    fn of(chain: Chain<'_>, to_guest: bool) -> Self {
        let wanted = chain.filter(|descriptor| descriptor.is_write_only() == to_guest);
        let rest = wanted.map(|descriptor| (descriptor.addr(), descriptor.len() as usize));
        Self {
            rest: rest.collect(),
            first: 0,
        }
    }

    /// Bytes of all.
    fn length(&self) -> usize {
        let left = self.rest.iter().skip(self.first);
        left.fold(0, |all, (_, bytes)| all.saturating_add(*bytes))
    }

    /// Goes through the next `most` bytes: `part` gets the address of each part, and where it lies in them.
    /// How many there were.
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
            // At the end of the address space there is nothing behind it.
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

/// A packet of the driver: its header, and how many bytes of data are in `buffer` now, or why there are none.
///
/// # Errors
/// [`ChainError`]: there is no header.
pub fn take(
    memory: &GuestMemoryMmap,
    chain: Chain<'_>,
    buffer: &mut [u8],
) -> Result<(Header, Result<usize, ChainError>), ChainError> {
    let mut pieces = Pieces::of(chain, false);
    let mut header = [0; HEADER_BYTES];
    let have = pieces.read(memory, &mut header)?;
    if have < HEADER_BYTES {
        return Err(ChainError::NoHeader(have));
    }
    let header = Header::from_bytes(header);
    let len = header.len;
    let most = buffer.len();
    let data = match usize::try_from(len).ok().and_then(|len| buffer.get_mut(..len)) {
        None => Err(ChainError::Long { len, most }),
        Some(data) => match pieces.read(memory, data) {
            Ok(have) if have == data.len() => Ok(have),
            Ok(have) => Err(ChainError::Short { len, have }),
            Err(error) => Err(error.into()),
        },
    };
    Ok((header, data))
}

/// Room for a packet to the driver.
pub struct Room(Pieces);

impl Room {
    /// In a chain that the driver has put in for that.
    ///
    /// # Errors
    /// [`ChainError::NoHeader`].
    pub fn of(chain: Chain<'_>) -> Result<Self, ChainError> {
        let pieces = Pieces::of(chain, true);
        let bytes = pieces.length();
        if bytes < HEADER_BYTES {
            return Err(ChainError::NoHeader(bytes));
        }
        Ok(Self(pieces))
    }

    /// For that much data.
    pub fn data(&self) -> usize {
        self.0.length().saturating_sub(HEADER_BYTES)
    }

    /// Writes the packet; how many bytes that are.
    ///
    /// # Errors
    /// [`ChainError::Memory`].
    pub fn put(
        mut self,
        memory: &GuestMemoryMmap,
        header: &Header,
        data: &[u8],
    ) -> Result<usize, ChainError> {
        let header = self.0.write(memory, &header.to_bytes())?;
        Ok(header + self.0.write(memory, data)?)
    }
}
