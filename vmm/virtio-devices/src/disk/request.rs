//! Requests to a disk: parsing of the descriptor chain, execution and status (virtio 1.2, 5.2.6).

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
use super::image::DiskImage;
use super::open::SECTOR_BYTES;
use super::raw::GuestMemorySegment;
use crate::serve::GuestDescriptorChain;

/// Maximum number of data segments in a disk request.
pub const MAX_SEGMENTS: usize = 254;
/// Maximum size of a data segment in a disk request, in bytes, as reported to the driver.
pub const MAX_SEGMENT_BYTES: u32 = 128 << 10;
/// Maximum amount of data in a request, in bytes.
///
/// The limit is needed because the disk's thread processes one request at a time, and a long
/// request would block it. Segments may overlap, so the size of guest memory does not limit a
/// request.
pub const MAX_REQUEST_BYTES: u64 = MAX_SEGMENTS as u64 * MAX_SEGMENT_BYTES as u64;
/// Maximum size of a read to prefetch, in bytes. The limit bounds the memory that prefetching the
/// whole queue uses. The host itself reads ahead for longer reads.
const MAX_PREFETCH_BYTES: u64 = 128 << 10;
/// Maximum number of descriptors in a request, including header and status.
const MAX_DESCRIPTORS: usize = MAX_SEGMENTS + 2;
/// Maximum number of ranges in a discard or write-zeroes request. Their number and size are limited
/// because the VMM may have to write the zeros itself.
pub const MAX_RANGES: usize = 16;
/// Maximum size of a discard or write-zeroes range, in sectors (32 MiB).
pub const MAX_RANGE_SECTORS: u32 = 65_536;

const HEADER_BYTES: usize = 16;
const RANGE_BYTES: usize = 16;

type RequestSegments = SmallVec<[GuestMemorySegment; 16]>;

/// Reason why a disk request failed.
#[derive(Debug)]
pub enum BlockRequestError {
    /// The request of the guest is invalid.
    Guest,
    /// The disk does not support the operation of the request.
    Unsupported,
    /// The host failed to execute the operation. This error is logged for the operator.
    Host(io::Error),
}

impl From<io::Error> for BlockRequestError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::Unsupported => Self::Unsupported,
            // This module returns such an error for segments outside RAM. Errors of the host have
            // an OS error code.
            io::ErrorKind::InvalidInput if error.raw_os_error().is_none() => Self::Guest,
            _ => Self::Host(error),
        }
    }
}

/// The disk on which requests are executed, with its properties that the driver sees.
#[derive(Debug)]
pub struct DiskBackend {
    /// The disk image that stores the data.
    pub image: Arc<DiskImage>,
    /// Serial number reported to the guest, padded with zeros.
    pub serial: [u8; MAX_SERIAL],
    /// `true` if each write must be flushed, because the driver does not support flush requests.
    pub write_through: bool,
}

/// A completed disk request.
#[derive(Debug)]
pub struct CompletedBlockRequest {
    /// Number of bytes written to guest memory, as reported in the used ring.
    pub written: u32,
    /// Number of bytes read, written or zeroed, for rate limits. After an error of the image, the
    /// number that the guest requested.
    pub transferred: u64,
    /// `true` if a read had to wait for the host's disk.
    pub missed: bool,
    /// Result of the request's operation.
    pub outcome: Result<(), BlockRequestError>,
}

impl DiskBackend {
    /// Executes the request in a descriptor chain and writes its status to guest memory.
    pub fn serve(&self, memory: &GuestMemoryMmap, chain: GuestDescriptorChain<'_>) -> CompletedBlockRequest {
        let Some(mut request) = DiskRequest::parse(memory, chain) else {
            // A malformed request receives no status byte.
            return CompletedBlockRequest {
                written: 0,
                transferred: 0,
                missed: false,
                outcome: Err(BlockRequestError::Guest),
            };
        };
        let done = self.execute(memory, &mut request);
        let (status, data) = match &done {
            Ok(data) => (VIRTIO_BLK_S_OK, *data),
            Err(BlockRequestError::Unsupported) => (VIRTIO_BLK_S_UNSUPP, 0),
            Err(_) => (VIRTIO_BLK_S_IOERR, 0),
        };
        let status = u8::try_from(status).unwrap_or(u8::MAX);
        let (written, outcome) = match memory.write_obj(status, request.status.0) {
            // The sum does not saturate, because the chain is shorter than 4 GiB, including the
            // status.
            Ok(()) => (data.saturating_add(1), done.map(|_| ())),
            Err(_) => (0, Err(BlockRequestError::Guest)),
        };
        CompletedBlockRequest {
            written,
            transferred: request.transferred,
            missed: request.missed,
            outcome,
        }
    }

    /// Returns the byte offset and the length of the data to prefetch for the request in a descriptor
    /// chain, if it is a read of at most 128 KiB.
    pub fn prefetched_range(
        &self,
        memory: &GuestMemoryMmap,
        chain: GuestDescriptorChain<'_>,
    ) -> Option<(u64, u64)> {
        let request = DiskRequest::parse(memory, chain)?;
        let bytes = length(&request.to_guest);
        if request.kind != VIRTIO_BLK_T_IN || bytes > MAX_PREFETCH_BYTES {
            return None;
        }
        let at = self.place(request.sector, bytes).ok()?;
        Some((at, bytes))
    }

    /// Executes the operation of `request` and returns the number of data bytes written to guest
    /// memory.
    fn execute(&self, memory: &GuestMemoryMmap, request: &mut DiskRequest) -> Result<u32, BlockRequestError> {
        let writes = matches!(
            request.kind,
            VIRTIO_BLK_T_OUT | VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES
        );
        if writes && self.image.read_only() {
            return Err(BlockRequestError::Guest);
        }
        match request.kind {
            VIRTIO_BLK_T_IN => {
                let bytes = bounded(&request.to_guest)?;
                let at = self.place(request.sector, bytes)?;
                request.transferred = bytes;
                request.missed = !self.image.read(memory, &request.to_guest, at)?;
                return u32::try_from(bytes).map_err(|_| BlockRequestError::Guest);
            }
            VIRTIO_BLK_T_OUT => {
                let bytes = bounded(&request.from_guest)?;
                let at = self.place(request.sector, bytes)?;
                request.transferred = bytes;
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
                    memory
                        .write_slice(now, at)
                        .map_err(|_| BlockRequestError::Guest)?;
                    rest = later;
                }
                return u32::try_from(self.serial.len() - rest.len()).map_err(|_| BlockRequestError::Guest);
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => self.ranges(memory, request)?,
            _ => return Err(BlockRequestError::Unsupported),
        }
        Ok(0)
    }

    /// Returns the byte offset of `sector` on the disk.
    ///
    /// # Errors
    /// Returns an error unless `bytes` bytes at this offset are whole blocks of the disk.
    fn place(&self, sector: u64, bytes: u64) -> Result<u64, BlockRequestError> {
        let end = sector.checked_add(bytes / SECTOR_BYTES);
        let block = u64::from(self.image.block_bytes());
        if bytes.is_multiple_of(block)
            && sector.is_multiple_of(block / SECTOR_BYTES)
            && end.is_some_and(|end| end <= self.image.sectors())
        {
            Ok(sector * SECTOR_BYTES)
        } else {
            Err(BlockRequestError::Guest)
        }
    }

    /// Executes a discard or write-zeroes request, which contains a list of ranges.
    fn ranges(&self, memory: &GuestMemoryMmap, request: &mut DiskRequest) -> Result<(), BlockRequestError> {
        let bytes = usize::try_from(length(&request.from_guest)).map_err(|_| BlockRequestError::Guest)?;
        if bytes == 0 || bytes % RANGE_BYTES != 0 || bytes > MAX_RANGES * RANGE_BYTES {
            return Err(BlockRequestError::Guest);
        }
        for _ in 0..bytes / RANGE_BYTES {
            let range: [u8; RANGE_BYTES] =
                take(memory, &mut request.from_guest).ok_or(BlockRequestError::Guest)?;
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
                return Err(BlockRequestError::Unsupported);
            }
            if sectors > MAX_RANGE_SECTORS {
                return Err(BlockRequestError::Guest);
            }
            let bytes = u64::from(sectors) * SECTOR_BYTES;
            let at = self.place(sector, bytes)?;
            if bytes == 0 {
                continue;
            }
            if zeros {
                // Count the zeros, because the host may have to write them.
                request.transferred += bytes;
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

/// A parsed disk request. Its data is still in guest memory.
#[derive(Debug)]
struct DiskRequest {
    kind: u32,
    sector: u64,
    from_guest: RequestSegments,
    to_guest: RequestSegments,
    status: GuestMemorySegment,
    /// Number of bytes that the image has been asked to read, write or zero so far.
    transferred: u64,
    /// `true` if a read had to wait for the host's disk.
    missed: bool,
}

impl DiskRequest {
    /// Parses the request in a descriptor chain. A request may be split into descriptors
    /// arbitrarily (virtio 1.2, 2.7.4.2). Returns `None` if the header or status is missing, or if
    /// there are too many segments.
    fn parse(memory: &GuestMemoryMmap, chain: GuestDescriptorChain<'_>) -> Option<Self> {
        let (mut from_guest, mut to_guest) = (RequestSegments::new(), RequestSegments::new());
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
        // The status is the last device-writable byte.
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
            transferred: 0,
            missed: false,
        })
    }
}

/// Returns the total length of the segments in bytes, or an error if it exceeds
/// [`MAX_REQUEST_BYTES`].
fn bounded(pieces: &RequestSegments) -> Result<u64, BlockRequestError> {
    Some(length(pieces))
        .filter(|bytes| *bytes <= MAX_REQUEST_BYTES)
        .ok_or(BlockRequestError::Guest)
}

/// Returns the total length of the segments, in bytes.
fn length(pieces: &RequestSegments) -> u64 {
    pieces.iter().map(|(_, bytes)| *bytes as u64).sum()
}

/// Removes the first `N` bytes from the segments `pieces` and returns the contents of these bytes.
/// Returns `None` if the segments are shorter or outside RAM.
fn take<const N: usize>(memory: &GuestMemoryMmap, pieces: &mut RequestSegments) -> Option<[u8; N]> {
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
