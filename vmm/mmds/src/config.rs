//! Configuration of the metadata service (`--mmds`).

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// Default address of the metadata service, the same as in Firecracker and on cloud platforms.
pub const DEFAULT_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);
/// Default maximum size of the document as JSON text, in bytes, as in Firecracker.
pub const DEFAULT_SIZE_LIMIT: usize = 51_200;
/// Maximum value of the document's size limit, in bytes. A document must fit in one request on the
/// VM's control socket.
pub const MAX_SIZE_LIMIT: usize = 60 << 10;

/// Version of the metadata service's protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MmdsVersion {
    /// Version 1: requests need no token.
    #[default]
    V1,
    /// Version 2: requests need a session token.
    V2,
}

/// Configuration of the metadata service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmdsConfig {
    /// Version of the metadata service's protocol.
    pub version: MmdsVersion,
    /// Link-local address at which the guest reaches the service.
    pub address: Ipv4Addr,
    /// `true` if responses are always text, even if the guest accepts JSON.
    pub imds_compat: bool,
    /// Maximum size of the document as JSON text, in bytes.
    pub size_limit: usize,
}

impl Default for MmdsConfig {
    fn default() -> Self {
        Self {
            version: MmdsVersion::V1,
            address: DEFAULT_ADDRESS,
            imds_compat: false,
            size_limit: DEFAULT_SIZE_LIMIT,
        }
    }
}

/// Error returned when a configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MmdsConfigError {
    /// An option of `--mmds` is unknown.
    #[error("unknown option '{0}'; must be version=, address=, imds-compat= or size-limit=")]
    Unknown(String),
    /// An option of `--mmds` is repeated.
    #[error("{0}= must be given once")]
    Twice(&'static str),
    /// The protocol version is unknown.
    #[error("version must be v1 or v2")]
    Version,
    /// The address is not a usable link-local address.
    #[error("address must be link-local, from 169.254.1.0 to 169.254.254.255")]
    Address,
    /// The value of `imds-compat=` is neither `on` nor `off`.
    #[error("imds-compat must be on or off")]
    ImdsCompat,
    /// The size limit of the document is out of range.
    #[error("size-limit must be between 1 and {MAX_SIZE_LIMIT}")]
    SizeLimit,
}

/// Checks that `address` is a link-local address that RFC 3927 does not reserve.
///
/// # Errors
/// Returns [`MmdsConfigError::Address`] otherwise.
pub fn check_address(address: Ipv4Addr) -> Result<Ipv4Addr, MmdsConfigError> {
    let [a, b, c, _] = address.octets();
    let is_usable = (a, b) == (169, 254) && (1..=254).contains(&c);
    is_usable.then_some(address).ok_or(MmdsConfigError::Address)
}

/// Parses the options `version=v1|v2`, `address=`, `imds-compat=on|off` and `size-limit=`,
/// separated by commas. Omitted options have default values.
impl FromStr for MmdsConfig {
    type Err = MmdsConfigError;

    fn from_str(text: &str) -> Result<Self, MmdsConfigError> {
        let mut config = Self::default();
        let mut seen: Vec<&'static str> = Vec::new();
        for word in text.split(',') {
            let option = match word.split_once('=') {
                Some(("version", value)) => {
                    config.version = match value {
                        "v1" => MmdsVersion::V1,
                        "v2" => MmdsVersion::V2,
                        _ => return Err(MmdsConfigError::Version),
                    };
                    "version"
                }
                Some(("address", value)) => {
                    let address = value.parse().map_err(|_| MmdsConfigError::Address)?;
                    config.address = check_address(address)?;
                    "address"
                }
                Some(("imds-compat", value)) => {
                    config.imds_compat = match value {
                        "on" => true,
                        "off" => false,
                        _ => return Err(MmdsConfigError::ImdsCompat),
                    };
                    "imds-compat"
                }
                Some(("size-limit", value)) => {
                    let limit = value.parse().ok();
                    let limit = limit.filter(|limit| (1..=MAX_SIZE_LIMIT).contains(limit));
                    config.size_limit = limit.ok_or(MmdsConfigError::SizeLimit)?;
                    "size-limit"
                }
                _ => return Err(MmdsConfigError::Unknown(word.to_owned())),
            };
            if seen.contains(&option) {
                return Err(MmdsConfigError::Twice(option));
            }
            seen.push(option);
        }
        Ok(config)
    }
}

/// Formats the configuration in the syntax that [`MmdsConfig::from_str`] parses.
impl fmt::Display for MmdsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = match self.version {
            MmdsVersion::V1 => "v1",
            MmdsVersion::V2 => "v2",
        };
        let compat = if self.imds_compat { "on" } else { "off" };
        let (address, limit) = (self.address, self.size_limit);
        write!(
            f,
            "version={version},address={address},imds-compat={compat},size-limit={limit}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn displayed_configuration_is_parsed_again() {
        let config = MmdsConfig {
            version: MmdsVersion::V2,
            address: Ipv4Addr::new(169, 254, 170, 2),
            imds_compat: true,
            size_limit: 7,
        };
        for config in [config, MmdsConfig::default()] {
            assert_eq!(config.to_string().parse(), Ok(config));
        }
        assert_eq!("version=v1".parse(), Ok(MmdsConfig::default()));
    }

    #[test]
    fn mistakes_are_named() {
        use MmdsConfigError as E;
        for (text, error) in [
            ("", E::Unknown(String::new())),
            ("v2", E::Unknown("v2".into())),
            ("version=v1,version=v1", E::Twice("version")),
            ("version=3", E::Version),
            ("address=10.0.0.1", E::Address),
            ("address=169.254.0.1", E::Address),
            ("address=169.254.255.1", E::Address),
            ("address=x", E::Address),
            ("imds-compat=yes", E::ImdsCompat),
            ("size-limit=0", E::SizeLimit),
            ("size-limit=61441", E::SizeLimit),
        ] {
            assert_eq!(text.parse::<MmdsConfig>(), Err(error), "{text}");
        }
    }
}
