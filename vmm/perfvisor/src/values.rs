//! Value parsers of options, and their error messages.
//!
//! Parsers for the operator's commands are in `operator::values`. `PmuModelName`, `VcpuCountRange`
//! and other types with a parser of their own are not part of this module.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use guest_images::bare_metal::{BareMetalGuest, GUESTS};
use operator::values::parse_number;
pub use operator::values::{integer_in_range, parse_bytes};
use perf_core::SharePolicy;
use vmm::gdb::config::{GdbConfig, GdbConfigError};
use vmm::memory::{MIN_RAM_BYTES, RAM_GRANULE_BYTES};

/// Minimum multiplexing interval, in milliseconds. The main loop would coalesce shorter intervals.
const MIN_TURN_MS: f64 = 0.2;
/// Maximum value of `--mux-turn`, the multiplexing interval, in milliseconds.
const MAX_TURN_MS: f64 = 100.0;
/// Maximum sampling frequency of an event, in Hz. A sample takes at least one microsecond.
pub const MAX_SAMPLE_RATE_HZ: u64 = 1_000_000;
/// Minimum value of `--ring-memory`, in bytes.
const MIN_RING_BYTES: u64 = 64 << 10;
/// Maximum value of `--ring-memory`, in bytes.
const MAX_RING_BYTES: u64 = 64 << 30;

/// Maximum time for the guest to power off, in seconds (one day).
const MAX_STOP_TIMEOUT_S: f64 = 86_400.0;

/// The security profile of a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SecurityProfile {
    /// The guest belongs to the owner of the host.
    #[default]
    Own,
    /// The guest is one of several tenants that must not observe each other.
    Tenant,
}

impl FromStr for SecurityProfile {
    type Err = ParseValueError;

    fn from_str(word: &str) -> Result<Self, ParseValueError> {
        match word {
            "own" => Ok(Self::Own),
            "tenant" => Ok(Self::Tenant),
            _ => Err(ParseValueError::SecurityProfile),
        }
    }
}

/// Path and permissions of the observer socket (`--observers`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObserverSocketArg {
    /// Path of the observer socket.
    pub path: PathBuf,
    /// Permissions of the observer socket.
    pub mode: u32,
}

/// Default permissions of the observer socket: read and write for its owner and group.
const OBSERVERS_MODE: u32 = 0o660;

/// Maximum length of the path of a Unix socket, in bytes. `sun_path` has 108 bytes, including the
/// NUL (unix(7)).
const MAX_SOCKET_PATH: usize = 107;

/// Error returned when a `PATH[,mode=MODE]` value is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SocketPathError {
    #[error("mode= must be file permissions in octal between 0600 and 0777, for example mode=0660")]
    Mode,
    #[error("the path of a socket is missing")]
    Missing,
    #[error("the path of a Unix socket must be at most {MAX_SOCKET_PATH} bytes")]
    Unusable,
}

/// Parses `PATH[,mode=MODE]` of a Unix socket.
fn socket_path(text: &str) -> Result<(PathBuf, Option<u32>), SocketPathError> {
    let (path, mode) = match text.rsplit_once(",mode=") {
        Some((path, mode)) => (path, Some(permissions(mode).ok_or(SocketPathError::Mode)?)),
        None => (text, None),
    };
    match path.len() {
        0 => Err(SocketPathError::Missing),
        1..=MAX_SOCKET_PATH if !path.contains('\0') => Ok((path.into(), mode)),
        _ => Err(SocketPathError::Unusable),
    }
}

/// Parses octal permissions, which must include read and write for the owner.
fn permissions(text: &str) -> Option<u32> {
    let octal = (3..=4).contains(&text.len()) && text.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
    let mode = octal.then(|| u32::from_str_radix(text, 8).ok())??;
    (mode & !0o777 == 0 && mode & 0o600 == 0o600).then_some(mode)
}

impl FromStr for ObserverSocketArg {
    type Err = SocketPathError;

    fn from_str(text: &str) -> Result<Self, SocketPathError> {
        let (path, mode) = socket_path(text)?;
        Ok(Self {
            path,
            mode: mode.unwrap_or(OBSERVERS_MODE),
        })
    }
}

/// Error returned when an option value is invalid. The caller prefixes the message with the option
/// and the value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseValueError {
    #[error(transparent)]
    Operator(#[from] operator::values::ParseValueError),
    #[error("must be one of {}", GUESTS.map(|guest| guest.name).join(", "))]
    Builtin,
    #[error(transparent)]
    Gdb(GdbConfigError),
    #[error(
        "must be the path of a Unix socket, or PATH,wait; gdb connects with `target remote PATH`, \
        not over TCP"
    )]
    GdbPort,
    #[error("must be own or tenant")]
    SecurityProfile,
    #[error("must be at least {}M; a number without a unit is in bytes: 512M, not 512", MIN_RAM_BYTES >> 20)]
    MemoryTooSmall,
    #[error("must be a multiple of {RAM_GRANULE_BYTES} bytes")]
    MemoryGranule,
    #[error("the counter width must be between 32 and 48 bits")]
    Width,
    #[error("must be a number of PMIs per second between 0 and {}", u32::MAX)]
    PmiLimit,
    #[error("must be a number of milliseconds between {MIN_TURN_MS} and {MAX_TURN_MS}, for example 1.5")]
    Turn,
    #[error("must be a number of samples per second between 1 and {MAX_SAMPLE_RATE_HZ}")]
    SampleLimit,
    #[error("must be between {}K and {}G", MIN_RING_BYTES >> 10, MAX_RING_BYTES >> 30)]
    RingMemory,
    #[error("must be on or off")]
    OnOff,
    #[error("must be guest-first, operator-first or strict (--share-dir shares a directory)")]
    Share,
    #[error("must be a number of seconds between 0 and {MAX_STOP_TIMEOUT_S}")]
    StopTimeout,
    #[error("must be a percentage between 0 and 50")]
    Tolerance,
    #[error("must be all or kvm")]
    ValidatedBacking,
}

/// Parses the name of a built-in guest.
pub fn parse_builtin(text: &str) -> Result<&'static BareMetalGuest, ParseValueError> {
    let guest = GUESTS.iter().find(|guest| guest.name == text);
    guest.ok_or(ParseValueError::Builtin)
}

/// Parses the size of guest memory.
pub fn parse_memory(text: &str) -> Result<u64, ParseValueError> {
    let bytes = parse_bytes(text)?;
    if bytes < MIN_RAM_BYTES {
        return Err(ParseValueError::MemoryTooSmall);
    }
    if !bytes.is_multiple_of(RAM_GRANULE_BYTES) {
        return Err(ParseValueError::MemoryGranule);
    }
    Ok(bytes)
}

/// Parses the width of counters, in bits.
pub fn parse_width(text: &str) -> Result<u8, ParseValueError> {
    let width = text.parse().ok().filter(|n| (32..=48).contains(n));
    width.ok_or(ParseValueError::Width)
}

/// Parses a limit of PMIs per second.
pub fn parse_pmi_limit(text: &str) -> Result<u32, ParseValueError> {
    text.parse().map_err(|_| ParseValueError::PmiLimit)
}

/// Parses the multiplexing interval.
pub fn parse_turn(text: &str) -> Result<Duration, ParseValueError> {
    let ms = parse_number(text, MIN_TURN_MS..=MAX_TURN_MS).ok_or(ParseValueError::Turn)?;
    Ok(Duration::from_secs_f64(ms / 1e3))
}

/// Parses a limit of samples per second.
pub fn parse_sample_limit(text: &str) -> Result<u64, ParseValueError> {
    let hz = text.parse().ok();
    hz.filter(|hz| (1..=MAX_SAMPLE_RATE_HZ).contains(hz))
        .ok_or(ParseValueError::SampleLimit)
}

/// Parses the memory limit for rings.
pub fn parse_ring_memory(text: &str) -> Result<u64, ParseValueError> {
    let bytes = parse_bytes(text)?;
    let range = MIN_RING_BYTES..=MAX_RING_BYTES;
    Some(bytes)
        .filter(|bytes| range.contains(bytes))
        .ok_or(ParseValueError::RingMemory)
}

/// Parses `on` or `off`.
pub fn parse_on_off(text: &str) -> Result<bool, ParseValueError> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(ParseValueError::OnOff),
    }
}

/// Parses the policy for sharing the host's counters.
pub fn parse_share(text: &str) -> Result<SharePolicy, ParseValueError> {
    text.parse().map_err(|_| ParseValueError::Share)
}

/// Parses the debugger socket. QEMU's `tcp::1234` and `:1234` are rejected, because they would name
/// Unix sockets.
pub fn parse_gdb(text: &str) -> Result<GdbConfig, ParseValueError> {
    let path = text.split_once(',').map_or(text, |(path, _)| path);
    let port = path.rsplit_once(':').filter(|(host, _)| !host.contains('/'));
    if port.is_some_and(|(_, port)| port.parse::<u16>().is_ok()) {
        return Err(ParseValueError::GdbPort);
    }
    text.parse().map_err(ParseValueError::Gdb)
}

/// Parses the guest's shutdown time limit in seconds; 0 is valid.
pub fn parse_stop_timeout(text: &str) -> Result<Duration, ParseValueError> {
    match text.parse::<f64>() {
        Ok(s) if (0.0..=MAX_STOP_TIMEOUT_S).contains(&s) => Ok(Duration::from_secs_f64(s)),
        _ => Err(ParseValueError::StopTimeout),
    }
}

/// Parses the tolerance of time-dependent counts, in percent.
pub fn parse_tolerance(text: &str) -> Result<f64, ParseValueError> {
    parse_number(text, 0.0..=50.0).ok_or(ParseValueError::Tolerance)
}

/// Value of `perfvisor validate --backing`: the backings (mechanisms that count for a guest) to
/// validate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValidatedCounterBackings {
    /// All backings of Perfvisor that this host supports.
    All,
    /// KVM's own vPMU.
    Kvm,
}

/// Parses the value of `perfvisor validate --backing`.
pub fn parse_validated(text: &str) -> Result<ValidatedCounterBackings, ParseValueError> {
    match text {
        "all" => Ok(ValidatedCounterBackings::All),
        "kvm" => Ok(ValidatedCounterBackings::Kvm),
        _ => Err(ParseValueError::ValidatedBacking),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_and_limits_are_range_checked() {
        assert_eq!(parse_turn("1.5"), Ok(Duration::from_micros(1500)));
        assert_eq!(parse_sample_limit("1000000"), Ok(1_000_000));
        assert_eq!(parse_ring_memory("64K"), Ok(64 << 10));
        assert_eq!(parse_ring_memory("64G"), Ok(64 << 30));
        for bad in ["", "0", "0.1", "100.5", "inf", "x"] {
            assert_eq!(parse_turn(bad), Err(ParseValueError::Turn), "{bad}");
        }
        for bad in ["", "0", "1000001", "-1", "1.5"] {
            assert_eq!(
                parse_sample_limit(bad),
                Err(ParseValueError::SampleLimit),
                "{bad}"
            );
        }
        assert_eq!(parse_ring_memory("63K"), Err(ParseValueError::RingMemory));
        assert_eq!(parse_ring_memory("65G"), Err(ParseValueError::RingMemory));
        assert_eq!(
            parse_ring_memory("much"),
            Err(operator::values::ParseValueError::Size.into())
        );
    }

    #[test]
    fn tolerance_is_a_percentage() {
        assert_eq!(parse_tolerance("0.5"), Ok(0.5));
        for bad in ["", "-1", "51", "x", "NaN", "inf"] {
            assert!(parse_tolerance(bad).is_err(), "{bad}");
        }
    }
}
