//! Emulation of RDPMC with hardware breakpoints. The guest's code remains unmodified, but a
//! processor has only four breakpoints, so at most four RDPMC instructions are supported.
//!
//! A breakpoint on an instruction stops the vCPU before the instruction executes. The exit handler
//! then emulates RDPMC and advances RIP past it. Breakpoints are set at linear addresses, so the
//! kernel must run at its link address.

use crate::finder::RdpmcSite;

/// Number of hardware breakpoints of a processor.
pub const BREAKPOINTS: usize = 4;

/// Error returned when RDPMC cannot be emulated with hardware breakpoints.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum HardwareBreakpointError {
    /// The kernel has more RDPMC instructions than there are breakpoints.
    #[error(
        "--rdpmc hwbp: the guest has {found} RDPMC instructions ({places}); must be at most \
        {BREAKPOINTS}, the number of breakpoints; use --rdpmc trap"
    )]
    TooMany {
        /// Number of RDPMC instructions in the kernel.
        found: usize,
        /// Locations of the first eight RDPMC instructions, separated by commas.
        places: String,
    },
    /// Hardware breakpoints in guests do not work on this host.
    #[error(
        "--rdpmc hwbp: unsupported, because hardware breakpoints in guests do not trigger on \
         this host's KVM; use --rdpmc trap"
    )]
    NotHere,
}

/// Returns the linear addresses at which breakpoints must be set, one per RDPMC instruction in
/// `sites`. `stops` is `true` if a hardware breakpoint in a guest stops its vCPU on this host.
///
/// # Errors
/// Returns [`HardwareBreakpointError::NotHere`] if `stops` is `false`, and
/// [`HardwareBreakpointError::TooMany`] if there are more instructions than breakpoints.
pub fn addresses(sites: &[RdpmcSite], stops: bool) -> Result<Vec<u64>, HardwareBreakpointError> {
    if !stops {
        return Err(HardwareBreakpointError::NotHere);
    }
    if sites.len() > BREAKPOINTS {
        let places: Vec<_> = sites.iter().map(RdpmcSite::location).take(8).collect();
        return Err(HardwareBreakpointError::TooMany {
            found: sites.len(),
            places: places.join(", "),
        });
    }
    Ok(sites.iter().map(|site| site.virt).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sites(n: u64) -> Vec<RdpmcSite> {
        (0..n)
            .map(|i| RdpmcSite {
                virt: 0xffff_ffff_8100_0000 + 16 * i,
                phys: 0x100_0000 + 16 * i,
                length: 2,
                prefix_len: 0,
                next_to_port_write: false,
                symbol: None,
            })
            .collect()
    }

    /// `--rdpmc hwbp` supports a kernel with four RDPMC instructions. A fifth is rejected with a
    /// message that gives their number and suggests a fix.
    #[test]
    fn hwbp_rejects_more_sites_than_breakpoints() {
        assert_eq!(addresses(&sites(4), true).unwrap()[3], 0xffff_ffff_8100_0030);
        let line = addresses(&sites(5), true).unwrap_err().to_string();
        assert!(
            line.contains("5 RDPMC") && line.contains("--rdpmc trap"),
            "{line}"
        );
    }

    /// `--rdpmc hwbp` is rejected on a host whose KVM ignores breakpoints in guests, because each
    /// RDPMC would fault.
    #[test]
    fn hwbp_rejects_host_without_breakpoints() {
        assert_eq!(addresses(&sites(1), false), Err(HardwareBreakpointError::NotHere));
    }
}
