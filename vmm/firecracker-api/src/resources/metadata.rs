//! The configuration of the metadata service.

use std::net::Ipv4Addr;

use mmds::config::{self, DEFAULT_ADDRESS};

use super::VmResources;
use crate::fault::ApiFault;
use crate::types::{MmdsConfig, MmdsVersion};

impl VmResources {
    /// Sets the configuration of the metadata service.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the list of network devices is empty or contains an unknown
    /// device, or if the address is not link-local.
    pub fn set_mmds(&mut self, config: MmdsConfig) -> Result<(), ApiFault> {
        if config.network_interfaces.is_empty() {
            return Err(ApiFault::bad("network_interfaces: must not be empty"));
        }
        let is_known = |id: &String| self.interfaces.iter().any(|known| known.iface_id == *id);
        if let Some(id) = config.network_interfaces.iter().find(|id| !is_known(id)) {
            return Err(ApiFault::bad(format!("network_interfaces: no interface {id:?}")));
        }
        address(&config)?;
        self.mmds = Some(config);
        Ok(())
    }

    /// Returns the configuration of the metadata service.
    pub fn mmds(&self) -> Option<&MmdsConfig> {
        self.mmds.as_ref()
    }

    /// Returns whether the guest can reach the metadata service through the network device `id`.
    pub(super) fn reaches_mmds(&self, id: &str) -> bool {
        let mut ids = self.mmds.iter().flat_map(|config| &config.network_interfaces);
        ids.any(|known| known == id)
    }

    /// Returns the option of `perfvisor run` for a metadata service whose document may be at most
    /// `size_limit` bytes long.
    pub fn mmds_option(&self, size_limit: usize) -> Option<String> {
        let config = self.mmds.as_ref()?;
        let config = config::MmdsConfig {
            version: match config.version {
                MmdsVersion::V1 => config::MmdsVersion::V1,
                MmdsVersion::V2 => config::MmdsVersion::V2,
            },
            // `set_mmds` has checked the address.
            address: address(config).unwrap_or(DEFAULT_ADDRESS),
            imds_compat: config.imds_compat,
            size_limit,
        };
        Some(format!("--mmds={config}"))
    }
}

fn address(config: &MmdsConfig) -> Result<Ipv4Addr, ApiFault> {
    let Some(text) = &config.ipv4_address else {
        return Ok(DEFAULT_ADDRESS);
    };
    let address = text.parse().ok().map(config::check_address);
    let bad = || ApiFault::bad("ipv4_address: must be link-local, from 169.254.1.0 to 169.254.254.255");
    address.and_then(Result::ok).ok_or_else(bad)
}
