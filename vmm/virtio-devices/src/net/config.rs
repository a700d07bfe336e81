//! Configuration of a network device (`--net`).

use std::fmt;
use std::str::FromStr;

use crate::rate_limiter::limits::{RateLimitParseError, RateLimits};

/// Maximum length of a network device name, in bytes (`IFNAMSIZ` without the terminating NUL).
const MAX_NAME: usize = 15;

/// An Ethernet (MAC) address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MacAddress([u8; 6]);

impl MacAddress {
    /// Derives a locally administered address from `text`. Equal texts give the same address, and
    /// different texts most likely give different ones.
    pub fn derived_from(text: &str) -> Self {
        // FNV-1a with 64 bits distributes short names well and is stable.
        let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        let [_, _, mut first, b, c, d, e, f] = hash.to_be_bytes();
        first = first & !1 | 2;
        Self([first, b, c, d, e, f])
    }

    /// Returns the MAC address in network byte order.
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }
}

impl From<[u8; 6]> for MacAddress {
    fn from(bytes: [u8; 6]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl FromStr for MacAddress {
    type Err = NetConfigError;

    fn from_str(text: &str) -> Result<Self, NetConfigError> {
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts
                .next()
                .filter(|part| part.len() == 2)
                .ok_or(NetConfigError::MacAddress)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| NetConfigError::MacAddress)?;
        }
        if parts.next().is_some() || text.contains('+') {
            return Err(NetConfigError::MacAddress);
        }
        if bytes[0] & 1 != 0 || bytes == [0; 6] {
            return Err(NetConfigError::Group);
        }
        Ok(Self(bytes))
    }
}

/// Configuration of a virtio network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetConfig {
    /// Name of the host's tap device, such as `tap0`.
    pub tap: String,
    /// MAC address, derived from the VM's name if `None`.
    pub mac: Option<MacAddress>,
    /// Whether vhost-net transfers the frames.
    pub vhost: VhostMode,
    /// Rate limits for frames that the guest receives.
    pub rx: RateLimits,
    /// Rate limits for frames that the guest sends.
    pub tx: RateLimits,
    /// `true` if the guest can reach the metadata service through this device.
    pub metadata: bool,
}

impl NetConfig {
    /// Returns whether a rate limit is configured. vhost-net cannot be used with rate limits.
    pub fn is_limited(&self) -> bool {
        !(self.rx.is_unlimited() && self.tx.is_unlimited())
    }
}

/// Whether the host kernel's vhost-net transfers the frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VhostMode {
    /// Use vhost-net if it is available.
    #[default]
    Auto,
    /// Require vhost-net.
    On,
    /// Transfer frames in a thread of the VMM.
    Off,
}

/// Error returned when a network device configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetConfigError {
    /// The option contains no `tap=NAME`.
    #[error(
        "must be tap=NAME, optionally followed by ,mac=XX:XX:XX:XX:XX:XX, ,vhost=on|off|auto and \
         ,mmds=on|off, and by rate limits"
    )]
    Shape,
    /// The configuration contains an unknown option.
    #[error(
        "{0}: must be tap=NAME, mac=XX:XX:XX:XX:XX:XX, vhost=on, off or auto, mmds=on or off, \
         rx-bandwidth=, rx-ops=, tx-bandwidth= or tx-ops="
    )]
    Word(String),
    /// The named option is repeated.
    #[error("{0}= must be given once")]
    Twice(&'static str),
    /// The name of the tap device is not a valid network device name.
    #[error(
        "the name of a tap device must have between 1 and {MAX_NAME} bytes without slash, \
         space and colon"
    )]
    Name,
    /// The value of `vhost=` is invalid.
    #[error("vhost must be on, off or auto")]
    VhostMode,
    /// The value of `mmds=` is invalid.
    #[error("mmds must be on or off")]
    Metadata,
    /// The MAC address is malformed.
    #[error("mac must be six hexadecimal bytes, for example 02:00:00:12:34:56")]
    MacAddress,
    /// The MAC address is a group address or zero.
    #[error("mac must not be zero or a multicast address: the first byte must be even")]
    Group,
    /// A rate limit is invalid.
    #[error(transparent)]
    Limits(#[from] RateLimitParseError),
    /// A rate limit is configured together with vhost-net.
    #[error("vhost=on: vhost-net has no rate limits; use vhost=off")]
    LimitedVhost,
    /// The metadata service is requested together with vhost-net.
    #[error("vhost=on: vhost-net bypasses the metadata service (mmds=on); use vhost=off")]
    MetadataVhost,
}

impl FromStr for NetConfig {
    type Err = NetConfigError;

    fn from_str(text: &str) -> Result<Self, NetConfigError> {
        let (mut tap, mut mac, mut vhost, mut metadata) = (None, None, None, None);
        let (mut rx, mut tx) = (RateLimits::default(), RateLimits::default());
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("tap", _)) if tap.is_some() => return Err(NetConfigError::Twice("tap")),
                Some(("mac", _)) if mac.is_some() => return Err(NetConfigError::Twice("mac")),
                Some(("vhost", _)) if vhost.is_some() => return Err(NetConfigError::Twice("vhost")),
                Some(("mmds", _)) if metadata.is_some() => return Err(NetConfigError::Twice("mmds")),
                Some(("mmds", "on")) => metadata = Some(true),
                Some(("mmds", "off")) => metadata = Some(false),
                Some(("mmds", _)) => return Err(NetConfigError::Metadata),
                Some(("tap", name)) => tap = Some(checked_name(name)?),
                Some(("mac", address)) => mac = Some(address.parse()?),
                Some(("vhost", "auto")) => vhost = Some(VhostMode::Auto),
                Some(("vhost", "on")) => vhost = Some(VhostMode::On),
                Some(("vhost", "off")) => vhost = Some(VhostMode::Off),
                Some(("vhost", _)) => return Err(NetConfigError::VhostMode),
                Some(("rx-bandwidth", value)) => rx.set_bandwidth("rx-bandwidth", value)?,
                Some(("rx-ops", value)) => rx.set_ops("rx-ops", value)?,
                Some(("tx-bandwidth", value)) => tx.set_bandwidth("tx-bandwidth", value)?,
                Some(("tx-ops", value)) => tx.set_ops("tx-ops", value)?,
                _ if text.contains('=') => return Err(NetConfigError::Word(part.to_owned())),
                _ => return Err(NetConfigError::Shape),
            }
        }
        let tap = tap.ok_or(NetConfigError::Shape)?;
        let vhost = vhost.unwrap_or_default();
        let config = Self {
            tap,
            mac,
            vhost,
            rx,
            tx,
            metadata: metadata.unwrap_or(false),
        };
        if config.metadata && vhost == VhostMode::On {
            return Err(NetConfigError::MetadataVhost);
        }
        if config.is_limited() && vhost == VhostMode::On {
            return Err(NetConfigError::LimitedVhost);
        }
        Ok(config)
    }
}

/// Validates a network device name like `dev_valid_name` in the Linux kernel. Also rejects the
/// percent sign, which would make the kernel create a new device with a number of its choice.
fn checked_name(name: &str) -> Result<String, NetConfigError> {
    let bad = |c: char| c == '/' || c == ':' || c == '%' || c == '\0' || c.is_whitespace();
    if name.is_empty() || name.len() > MAX_NAME || name == "." || name == ".." || name.contains(bad) {
        return Err(NetConfigError::Name);
    }
    Ok(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn net_options_are_parsed_in_any_order() {
        let both: NetConfig = "mac=02:00:00:aB:cd:ef,tap=tap0".parse().unwrap();
        assert_eq!(both.tap, "tap0");
        assert_eq!(both.mac.unwrap().to_string(), "02:00:00:ab:cd:ef");
        let plain: NetConfig = "tap=x".parse().unwrap();
        assert_eq!((plain.mac, plain.vhost), (None, VhostMode::Auto));
        assert!(!plain.metadata && "mmds=on,tap=x".parse::<NetConfig>().unwrap().metadata);
        let own: NetConfig = "vhost=off,tap=x".parse().unwrap();
        assert_eq!(own.vhost, VhostMode::Off);
        assert_eq!(
            "tap=x,vhost=on".parse::<NetConfig>().unwrap().vhost,
            VhostMode::On
        );
    }

    #[test]
    fn rate_limits_are_parsed_for_each_direction() {
        let text = "tap=x,rx-bandwidth=1M/100,tx-ops=50/1000+5,vhost=auto";
        let config: NetConfig = text.parse().unwrap();
        assert!(config.is_limited());
        assert_eq!(config.rx.bandwidth.unwrap().size.get(), 1 << 20);
        assert_eq!(config.tx.ops.unwrap().one_time_burst, 5);
        assert_eq!((config.rx.ops, config.tx.bandwidth), (None, None));
        assert!(!"tap=x,vhost=on".parse::<NetConfig>().unwrap().is_limited());
    }

    #[test]
    fn mistakes_are_named() {
        use NetConfigError as E;
        for (text, error) in [
            ("", E::Shape),
            ("tap0", E::Shape),
            ("mac=02:00:00:00:00:01", E::Shape),
            ("tap=a,tap=b", E::Twice("tap")),
            ("tap=a,speed=1", E::Word("speed=1".into())),
            ("tap=a,", E::Word(String::new())),
            ("tap=a,vhost=yes", E::VhostMode),
            ("tap=a,vhost=on,vhost=on", E::Twice("vhost")),
            ("tap=a,vhost=on,tx-ops=1/1", E::LimitedVhost),
            ("tap=a,mmds=v1", E::Metadata),
            ("tap=a,mmds=on,mmds=on", E::Twice("mmds")),
            ("tap=a,vhost=on,mmds=on", E::MetadataVhost),
            (
                "tap=a,rx-ops=1/1,rx-ops=1/1",
                E::Limits(RateLimitParseError::Twice("rx-ops")),
            ),
            (
                "tap=a,tx-bandwidth=1",
                E::Limits(RateLimitParseError::Value("tx-bandwidth", "1".into())),
            ),
            ("tap=", E::Name),
            ("tap=a/b", E::Name),
            ("tap=tap%d", E::Name),
            ("tap=0123456789abcdef", E::Name),
            ("tap=a,mac=02:00", E::MacAddress),
            ("tap=a,mac=02:00:00:00:00:001", E::MacAddress),
            ("tap=a,mac=02:00:00:00:00:0g", E::MacAddress),
            ("tap=a,mac=+2:00:00:00:00:01", E::MacAddress),
            ("tap=a,mac=02:00:00:00:00:01:02", E::MacAddress),
            ("tap=a,mac=01:00:00:00:00:01", E::Group),
            ("tap=a,mac=00:00:00:00:00:00", E::Group),
        ] {
            assert_eq!(text.parse::<NetConfig>(), Err(error), "{text}");
        }
    }

    #[test]
    fn derived_mac_is_local_and_unique() {
        let of = MacAddress::derived_from;
        assert_eq!(of("a/tap0"), of("a/tap0"));
        let all: std::collections::HashSet<MacAddress> =
            (0..1000).map(|i| of(&format!("vm-{i}/tap0"))).collect();
        assert_eq!(all.len(), 1000);
        assert!(all.iter().all(|mac| mac.bytes()[0] & 3 == 2));
    }
}
