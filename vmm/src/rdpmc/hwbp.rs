//! RDPMC by hardware breakpoints: nothing in the guest is changed, and a processor has four.
//!
//! A breakpoint on an instruction stops the vCPU before it executes. The exit handler then does what RDPMC
//! does and steps over it. The breakpoints are at linear addresses, so the kernel has to run where it was
//! linked.

use crate::kvm::stepping::{BREAKPOINTS, Stepping};
use kernel_images::rdpmc::PatchedSite;

/// Why breakpoints cannot serve a guest's RDPMC.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum HwbpError {
    /// More than there are.
    #[error(
        "--rdpmc hwbp: the guest has {found} RDPMC instructions ({places}), but a processor has {BREAKPOINTS} breakpoints; \
         use --rdpmc trap"
    )]
    TooMany {
        /// How many there are.
        found: usize,
        /// Where.
        places: String,
    },
    /// They do not work here.
    #[error("--rdpmc hwbp: hardware breakpoints in guests do not stop on this host's KVM; use --rdpmc trap")]
    NotHere,
}

/// The addresses to stop at.
///
/// # Errors
/// [`HwbpError`].
pub fn addresses(sites: &[PatchedSite], host: Stepping) -> Result<Vec<u64>, HwbpError> {
    if !host.breakpoints {
        return Err(HwbpError::NotHere);
    }
    if sites.len() > BREAKPOINTS {
        let places: Vec<_> = sites.iter().map(PatchedSite::place).take(8).collect();
        return Err(HwbpError::TooMany {
            found: sites.len(),
            places: places.join(", "),
        });
    }
    Ok(sites.iter().map(|site| site.virt).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sites(n: u64) -> Vec<PatchedSite> {
        (0..n)
            .map(|i| PatchedSite {
                virt: 0xffff_ffff_8100_0000 + 16 * i,
                phys: 0x100_0000 + 16 * i,
                length: 2,
                lead: 0,
                beside_out: false,
                symbol: None,
            })
            .collect()
    }

    /// Four are served, a fifth is an error that says how many there are and what to do instead.
    #[test]
    fn more_sites_than_breakpoints_are_refused() {
        let host = Stepping {
            breakpoints: true,
            ..Stepping::default()
        };
        assert_eq!(addresses(&sites(4), host).unwrap()[3], 0xffff_ffff_8100_0030);
        let line = addresses(&sites(5), host).unwrap_err().to_string();
        assert!(
            line.contains("5 RDPMC") && line.contains("--rdpmc trap"),
            "{line}"
        );
    }

    /// A KVM that ignores breakpoints would leave the guest with a fault at each RDPMC.
    #[test]
    fn a_host_whose_breakpoints_do_not_fire_is_refused() {
        assert_eq!(addresses(&sites(1), Stepping::default()), Err(HwbpError::NotHere));
    }
}
