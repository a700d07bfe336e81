//! Opens a host tap device, probes its features, and reads and writes frames directly from and to
//! guest memory.
#![expect(unsafe_code, reason = "ioctl, readv and writev")]

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use libc::{c_int, c_uint, c_ulong};
use smallvec::SmallVec;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// Size of the virtio-net header before each frame, `struct virtio_net_hdr_v1` (virtio 1.2, 5.1.6),
/// in bytes.
pub const HEADER_BYTES: usize = 12;
/// Maximum size of a frame with segmentation offload, including its virtio-net header, in bytes.
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + 14 + 4 + 65_536;
/// Maximum number of guest memory segments in one system call (`UIO_MAXIOV`).
pub const MAX_PIECES: usize = 1024;

bitflags::bitflags! {
    /// Set of offloads (`TUN_F_*`): work, such as checksums or segmentation, that the tap device
    /// may leave to the guest.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TapOffloads: c_uint {
        /// Partial checksum offload.
        const CSUM = libc::TUN_F_CSUM;
        /// TCP segmentation offload over IPv4, for packets of up to 64 KiB.
        const TSO4 = libc::TUN_F_TSO4;
        /// TCP segmentation offload over IPv6, for packets of up to 64 KiB.
        const TSO6 = libc::TUN_F_TSO6;
        /// TCP segmentation offload for packets with ECN bits.
        const TSO_ECN = libc::TUN_F_TSO_ECN;
        /// UDP fragmentation offload.
        const UFO = libc::TUN_F_UFO;
    }
}

/// Error returned when a tap device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The host does not support tap devices.
    #[error("cannot open /dev/net/tun; load the module tun, or give this user access")]
    NoTun(#[source] io::Error),
    /// The tap device does not exist or belongs to another user.
    #[error(
        "tap={0}: tap device not found for this user; create it with `ip tuntap add dev {0} mode \
        tap user $USER vnet_hdr`"
    )]
    NotYours(String, #[source] io::Error),
    /// Another process has the tap device open.
    #[error("tap={0}: in use by another program; use one tap device per network device")]
    Busy(String, #[source] io::Error),
    /// The named network device is not a tap device.
    #[error(
        "tap={0}: not a tap device; create one with `ip tuntap add dev tap0 mode tap user $USER vnet_hdr`"
    )]
    NoTap(String),
    /// The tap device has properties that Perfvisor cannot use, such as several queues.
    #[error(
        "tap={0}: not a single-queue tap device; create one with `ip tuntap add dev {0} mode tap \
        user $USER vnet_hdr`"
    )]
    Other(String, #[source] io::Error),
    /// A system call, which the second field names, failed unexpectedly.
    #[error("tap={0}: {1} failed")]
    Call(String, &'static str, #[source] io::Error),
}

/// An existing tap device of the host. Perfvisor does not create tap devices.
#[derive(Debug)]
pub struct Tap(File);

impl Tap {
    /// Opens the tap device `name` with virtio-net headers.
    ///
    /// # Errors
    /// Returns a [`TapError`] whose message includes the remedy.
    pub fn open(name: &str) -> Result<Self, TapError> {
        // TUNSETIFF would create a missing device if the user has permission, and that device would
        // not be connected to anything.
        interface_index(name).map_err(|e| TapError::NotYours(name.to_owned(), e))?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(TapError::NoTun)?;
        let mut request = request_of(name);
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        #[expect(clippy::cast_possible_truncation, reason = "three flags of 16 bits")]
        {
            request.ifr_ifru.ifru_flags = flags as libc::c_short;
        }
        // SAFETY: TUNSETIFF reads and writes one ifreq, which outlives the call.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as c_ulong, &mut request) };
        if result < 0 {
            let error = io::Error::last_os_error();
            let name = name.to_owned();
            return Err(match error.raw_os_error() {
                Some(libc::EBUSY) => TapError::Busy(name, error),
                Some(libc::EPERM | libc::EACCES) => TapError::NotYours(name, error),
                _ if !is_tun(&name) => TapError::NoTap(name),
                _ => TapError::Other(name, error),
            });
        }
        let tap = Self(file);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_possible_wrap,
            reason = "it is 12"
        )]
        let header = HEADER_BYTES as c_int;
        // SAFETY: TUNSETVNETHDRSZ reads one int, which outlives the call.
        let result = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ as c_ulong, &header) };
        if result < 0 {
            return Err(TapError::Call(
                name.to_owned(),
                "TUNSETVNETHDRSZ",
                io::Error::last_os_error(),
            ));
        }
        Ok(tap)
    }

    /// Uses the non-blocking descriptor `fd` as a tap device. The descriptor must preserve frame
    /// boundaries.
    pub fn on(fd: OwnedFd) -> Self {
        Self(fd.into())
    }

    /// Checks that the tap device still exists.
    ///
    /// # Errors
    /// Returns the kernel's error if the device has been removed.
    pub fn check_exists(&self) -> io::Result<()> {
        let mut request = request_of("");
        // SAFETY: TUNGETIFF writes one ifreq, which outlives the call.
        let result = unsafe { libc::ioctl(self.as_raw_fd(), libc::TUNGETIFF as c_ulong, &mut request) };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Returns the open file of the tap device, for vhost-net.
    pub fn file(&self) -> &File {
        &self.0
    }

    /// Sets the offloads that the tap device may leave to the guest.
    ///
    /// # Errors
    /// Returns an error if the kernel does not support one of the offloads.
    pub fn set_offloads(&self, offloads: TapOffloads) -> io::Result<()> {
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        let result = unsafe {
            libc::ioctl(
                self.as_raw_fd(),
                libc::TUNSETOFFLOAD as c_ulong,
                c_ulong::from(offloads.bits()),
            )
        };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        }
    }

    /// Reads one frame with its virtio-net header into `into`, truncating a longer frame.
    ///
    /// # Errors
    /// Returns the error of `readv(2)`, which is `WouldBlock` if no frame is available.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "at most MAX_PIECES"
    )]
    pub fn read(&self, into: &IoVecList<'_>) -> io::Result<usize> {
        let pieces = &into.pieces[..into.pieces.len().min(MAX_PIECES)];
        // SAFETY: each segment is in guest memory that `into` borrows, so it stays mapped and
        // writable during the call, and no Rust reference points to it. At most MAX_PIECES segments
        // are passed, which fits an int.
        let count = unsafe { libc::readv(self.as_raw_fd(), pieces.as_ptr(), pieces.len() as c_int) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }

    /// Reads one frame with its virtio-net header into a buffer outside guest memory.
    ///
    /// # Errors
    /// Returns the same errors as [`Tap::read`].
    pub fn read_bytes(&self, into: &mut [u8]) -> io::Result<usize> {
        (&self.0).read(into)
    }

    /// Writes one frame with its virtio-net header.
    ///
    /// # Errors
    /// Returns the error of `writev(2)`.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "at most MAX_PIECES"
    )]
    pub fn write(&self, from: &IoVecList<'_>) -> io::Result<usize> {
        let pieces = &from.pieces[..from.pieces.len().min(MAX_PIECES)];
        // SAFETY: as for `read`. The kernel copies the frame before it parses it.
        let count = unsafe { libc::writev(self.as_raw_fd(), pieces.as_ptr(), pieces.len() as c_int) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }
}

impl AsRawFd for Tap {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// An ordered list of guest memory segments for vectored I/O.
pub struct IoVecList<'m> {
    memory: &'m GuestMemoryMmap,
    pieces: SmallVec<[libc::iovec; 64]>,
    bytes: usize,
}

impl<'m> IoVecList<'m> {
    /// Creates an empty list of segments of `memory`.
    pub fn new(memory: &'m GuestMemoryMmap) -> Self {
        Self {
            memory,
            pieces: SmallVec::new(),
            bytes: 0,
        }
    }

    /// Adds a segment of guest memory. Returns `false` if the segment is not in guest memory or if
    /// there are too many segments.
    pub fn push(&mut self, address: GuestAddress, length: u32) -> bool {
        if length == 0 {
            return true;
        }
        let length = length as usize;
        let Ok(slice) = self.memory.get_slice(address, length) else {
            return false;
        };
        if self.pieces.len() >= MAX_PIECES {
            return false;
        }
        self.pieces.push(libc::iovec {
            iov_base: slice.ptr_guard_mut().as_ptr().cast(),
            iov_len: length,
        });
        self.bytes += length;
        true
    }

    /// Returns the total length of the segments in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

fn request_of(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is a plain C struct for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // Copy at most 15 bytes, so that the name keeps its terminating NUL.
    for (to, from) in request.ifr_name[..libc::IFNAMSIZ - 1]
        .iter_mut()
        .zip(name.bytes())
    {
        *to = from.cast_signed();
    }
    request
}

/// Returns `false` if the network device `name` exists but does not use the tun driver.
fn is_tun(name: &str) -> bool {
    let device = Path::new("/sys/class/net").join(name);
    !device.exists() || device.join("tun_flags").exists()
}

/// Creates a socket on which network device ioctls can be called.
fn any_socket() -> io::Result<OwnedFd> {
    // SAFETY: socket takes three integers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: socket succeeded, so the descriptor is open and not owned elsewhere.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn interface_index(name: &str) -> io::Result<c_int> {
    let socket = any_socket()?;
    let mut request = request_of(name);
    // SAFETY: SIOCGIFINDEX reads and writes one ifreq, which outlives the call, and sets
    // ifru_ifindex.
    unsafe {
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFINDEX as c_ulong, &mut request) < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(request.ifr_ifru.ifru_ifindex)
    }
}

/// Returns the MTU of the network device `name`, in bytes.
///
/// # Errors
/// Returns an error if the device does not exist.
pub fn mtu(name: &str) -> io::Result<u16> {
    let socket = any_socket()?;
    let mut request = request_of(name);
    // SAFETY: SIOCGIFMTU reads and writes one ifreq, which outlives the call, and sets ifru_mtu.
    let mtu = unsafe {
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as c_ulong, &mut request) < 0 {
            return Err(io::Error::last_os_error());
        }
        request.ifr_ifru.ifru_mtu
    };
    Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tap_is_not_created() {
        let error = Tap::open("no-such-tap").unwrap_err();
        assert!(matches!(error, TapError::NotYours(..)), "{error:?}");
        let line = diagnostics::error_line(&error);
        assert!(line.contains("ip tuntap add dev no-such-tap mode tap"), "{line}");
    }

    #[test]
    fn non_tap_device_is_rejected() {
        let line = match Tap::open("lo") {
            Err(error @ TapError::NoTap(_)) => diagnostics::error_line(&error),
            other => return eprintln!("SKIP: no /dev/net/tun for this user: {other:?}"),
        };
        assert!(
            line.contains("not a tap device") && line.contains("dev tap0"),
            "{line}"
        );
    }

    #[test]
    fn segment_outside_memory_is_rejected() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0x1000), 0x1000)]).unwrap();
        let mut scatter = IoVecList::new(&memory);
        assert!(scatter.push(GuestAddress(0x1000), 0x1000) && scatter.push(GuestAddress(0), 0));
        for (address, length) in [
            (0, 1),
            (0x1fff, 2),
            (0x2000, 1),
            (0x1000, u32::MAX),
            (u64::MAX, 2),
        ] {
            assert!(!scatter.push(GuestAddress(address), length));
        }
        assert_eq!(scatter.bytes(), 0x1000);
    }
}
