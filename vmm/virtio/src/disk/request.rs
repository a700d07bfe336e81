//! A request to a disk, from its chain of descriptors to its status (virtio 1.2, 5.2.6).

use std::io;
use std::sync::Arc;

use smallvec::SmallVec;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vm_memory::{Bytes, GuestMemoryMmap};

use super::config::MAX_SERIAL;
use super::image::Image;
use super::open::SECTOR_BYTES;
use super::raw::Piece;
use crate::serve::Chain;

/// The most pieces of data in a request.
pub const MAX_SEGMENTS: usize = 254;
/// The most bytes of a piece, for drivers that ask.
pub const MAX_SEGMENT_BYTES: u32 = 128 << 10;
/// The most bytes of data in a request: pieces may lie one over the other, so guest memory is no bound, and
/// the disk's thread does nothing else meanwhile.
pub const MAX_REQUEST_BYTES: u64 = MAX_SEGMENTS as u64 * MAX_SEGMENT_BYTES as u64;
/// With the header and the status.
const MAX_DESCRIPTORS: usize = MAX_SEGMENTS + 2;
/// The most ranges in a request to discard or to write zeros. They and their sectors are bounded because
/// zeros may have to be written one by one.
pub const MAX_RANGES: usize = 16;
/// Sectors of one such range: 32 MiB.
pub const MAX_RANGE_SECTORS: u32 = 65_536;

const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;

type Pieces = SmallVec<[Piece; 16]>;

/// Why a request has failed.
#[derive(Debug)]
pub enum Failure {
    /// The guest asks for what cannot be: its own affair.
    Guest,
    /// The disk cannot do that.
    Unsupported,
    /// The host refused: the operator's affair.
    Host(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::Unsupported => Self::Unsupported,
            // What we say of pieces that are not RAM; the host says it with a number.
            io::ErrorKind::InvalidInput if error.raw_os_error().is_none() => Self::Guest,
            _ => Self::Host(error),
        }
    }
}

/// A disk as its requests see it.
#[derive(Debug)]
pub struct Disk {
    /// Where the data is.
    pub image: Arc<Image>,
    /// The serial number, zeros behind it.
    pub serial: [u8; MAX_SERIAL],
    /// The driver knows of no flush: each write is one.
    pub write_through: bool,
}

impl Disk {
    /// Serves the request in `chain`: how many bytes of guest memory were written, and what failed.
    pub fn serve(&self, memory: &GuestMemoryMmap, chain: Chain<'_>) -> (u32, Result<(), Failure>) {
        let Some(mut request) = Request::parse(memory, chain) else {
            // There is no place for a status.
            return (0, Err(Failure::Guest));
        };
        let done = self.execute(memory, &mut request);
        let (status, data) = match &done {
            Ok(data) => (VIRTIO_BLK_S_OK, *data),
            Err(Failure::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0),
            Err(_) => (VIRTIO_BLK_S_IOERR, 0),
        };
        let status = u8::try_from(status).unwrap_or(u8::MAX);
        match memory.write_obj(status, request.status.0) {
            // The chain is less than 4 GiB long, the status included.
            Ok(()) => (data.saturating_add(1), done.map(|_| ())),
            Err(_) => (0, Err(Failure::Guest)),
        }
    }

    /// Does what is asked; the bytes of data that the guest gets.
    fn execute(&self, memory: &GuestMemoryMmap, request: &mut Request) -> Result<u32, Failure> {
        let writes = matches!(
            request.kind,
            VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES
        );
        if writes && self.image.read_only() {
            return Err(Failure::Guest);
        }
        match request.kind {
            VIRTIO_BLK_T_IN => {
                let bytes = bounded(&request.to_guest)?;
                let at = self.place(request.sector, bytes)?;
                self.image.read(memory, &request.to_guest, at)?;
                return u32::try_from(bytes).map_err(|_| Failure::Guest);
            }
            VIRTIO_BLK_T_OUT => {
                let at = self.place(request.sector, bounded(&request.from_guest)?)?;
                self.image.write(memory, &request.from_guest, at)?;
                if self.write_through {
                    self.image.flush()?;
                }
            }
            VIRTIO_BLK_T_FLUSH => self.image.flush()?,
            VIRTIO_BLK_T_GET_ID => {
                let mut rest = &self.serial[..];
                for &(at, bytes) in &request.to_guest {
                    let (now, later) = rest.split_at(rest.len().min(bytes));
                    memory.write_slice(now, at).map_err(|_| Failure::Guest)?;
                    rest = later;
                }
                return u32::try_from(self.serial.len() - rest.len()).map_err(|_| Failure::Guest);
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => self.ranges(memory, request)?,
            _ => return Err(Failure::Unsupported),
        }
        Ok(0)
    }

    /// The byte at which `bytes` from `sector` on begin, if they are whole blocks of the disk.
    fn place(&self, sector: u64, bytes: u64) -> Result<u64, Failure> {
        let end = sector.checked_add(bytes / SECTOR_BYTES);
        let block = u64::from(self.image.block_bytes());
        if bytes.is_multiple_of(block)
            && sector.is_multiple_of(block / SECTOR_BYTES)
            && end.is_some_and(|end| end <= self.image.sectors())
        {
            Ok(sector * SECTOR_BYTES)
        } else {
            Err(Failure::Guest)
        }
    }

    /// Discards ranges, or writes zeros to them.
    fn ranges(&self, memory: &GuestMemoryMmap, request: &mut Request) -> Result<(), Failure> {
        let bytes = usize::try_from(length(&request.from_guest)).map_err(|_| Failure::Guest)?;
        if bytes == 0 || bytes % RANGE_BYTES != 0 || bytes > MAX_RANGES * RANGE_BYTES {
            return Err(Failure::Guest);
        }
        for _ in 0..bytes / RANGE_BYTES {
            let range: [u8; RANGE_BYTES] = take(memory, &mut request.from_guest).ok_or(Failure::Guest)?;
            let [a, b, c, d, e, f, g, h, count @ ..] = range;
            let sector = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
            let [a, b, c, d, flags @ ..] = count;
            let (sectors, flags) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes(flags));
            let zeros = request.kind == VIRTIO_BLK_T_WRITE_ZEROES;
            let known = if zeros {
                VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP
            } else {
                0
            };
            if flags & !known != 0 {
                return Err(Failure::Unsupported);
            }
            if sectors > MAX_RANGE_SECTORS {
                return Err(Failure::Guest);
            }
            let bytes = u64::from(sectors) * SECTOR_BYTES;
            let at = self.place(sector, bytes)?;
            if bytes == 0 {
                continue;
            }
            if zeros {
                self.image.write_zeros(at, bytes, flags != 0)?;
            } else {
                self.image.discard(at, bytes)?;
            }
        }
        if self.write_through {
            self.image.flush()?;
        }
        Ok(())
    }
}

/// A request, its pieces still in guest memory.
#[derive(Debug)]
struct Request {
    kind: u32,
    sector: u64,
    from_guest: Pieces,
    to_guest: Pieces,
    status: Piece,
}

impl Request {
    /// `None`: it has no header or no status, or more pieces than there may be. Where one descriptor ends and
    /// the next begins means nothing (2.7.4.2).
    fn parse(memory: &GuestMemoryMmap, chain: Chain<'_>) -> Option<Self> {
        let (mut from_guest, mut to_guest) = (Pieces::new(), Pieces::new());
        for (n, descriptor) in chain.enumerate() {
            if n == MAX_DESCRIPTORS {
                return None;
            }
            let piece = (descriptor.addr(), descriptor.len() as usize);
            if descriptor.is_write_only() {
                to_guest.push(piece);
            } else {
                from_guest.push(piece);
            }
        }
        let header: [u8; HEADER_BYTES] = take(memory, &mut from_guest)?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        // The status is the last byte that the guest lets us write.
        while to_guest.last().is_some_and(|(_, bytes)| *bytes == 0) {
            to_guest.pop();
        }
        let (last, bytes) = to_guest.last_mut()?;
        *bytes -= 1;
        let status = vm_memory::Address::checked_add(last, *bytes as u64)?;
        Some(Self {
            kind: u32::from_le_bytes([a, b, c, d]),
            sector: u64::from_le_bytes(sector),
            from_guest,
            to_guest,
            status: (status, 1),
        })
    }
}

/// Bytes of all pieces, if they are not too many for one request.
fn bounded(pieces: &Pieces) -> Result<u64, Failure> {
    Some(length(pieces))
        .filter(|bytes| *bytes <= MAX_REQUEST_BYTES)
        .ok_or(Failure::Guest)
}

/// Bytes of all pieces.
fn length(pieces: &Pieces) -> u64 {
    pieces.iter().map(|(_, bytes)| *bytes as u64).sum()
}

/// Takes the first `N` bytes off `pieces`; `None`: there are fewer, or they are not RAM.
fn take<const N: usize>(memory: &GuestMemoryMmap, pieces: &mut Pieces) -> Option<[u8; N]> {
    let mut data = [0; N];
    let mut have = 0;
    while have < N {
        let (at, bytes) = pieces.first_mut()?;
        let count = (*bytes).min(N - have);
        memory.read_slice(&mut data[have..have + count], *at).ok()?;
        have += count;
        *at = vm_memory::Address::checked_add(at, count as u64)?;
        *bytes -= count;
        if *bytes == 0 {
            pieces.remove(0);
        }
    }
    Some(data)
}
