//! Pins vCPU threads to host CPUs.
#![expect(unsafe_code, reason = "sched_getaffinity(2), sched_setaffinity(2)")]

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::str::FromStr;

use thiserror::Error;

/// Maximum number of host CPUs in a `cpu_set_t`.
const MAX_CPUS: usize = libc::CPU_SETSIZE as usize;

/// Pinning of vCPUs to host CPUs, parsed from a list such as `0=2,1=3` (vCPU 0 to CPU 2, vCPU 1 to
/// CPU 3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VcpuPinning(Vec<(u8, usize)>);

/// Error when parsing or applying a [`VcpuPinning`].
#[derive(Debug, Error)]
pub enum VcpuPinningError {
    /// The string is not a list of `VCPU=CPU`.
    #[error("must be a list of VCPU=CPU, for example 0=2,1=3")]
    Syntax,
    /// The list contains the same vCPU twice.
    #[error("vCPU {0} is given twice")]
    DuplicateVcpu(u8),
    /// The VM has no vCPU with this number.
    #[error("--pin: vCPU {vcpu} not found; must be between 0 and {last}")]
    NoVcpu {
        /// Number of the vCPU in the list.
        vcpu: u8,
        /// Highest vCPU number of the VM.
        last: u8,
    },
    /// The host CPU does not exist, or this process may not run on it.
    #[error("--pin: cannot pin vCPU {vcpu} to CPU {cpu}; this process may run on {allowed}")]
    NotAllowed {
        /// Number of the vCPU in the list.
        vcpu: u8,
        /// Number of the host CPU in the list.
        cpu: usize,
        /// Host CPUs that this process may run on, as a list of ranges.
        allowed: String,
    },
    /// `sched_getaffinity(2)` failed.
    #[error("--pin: sched_getaffinity failed")]
    Affinity(#[source] io::Error),
}

impl FromStr for VcpuPinning {
    type Err = VcpuPinningError;

    fn from_str(text: &str) -> Result<Self, VcpuPinningError> {
        let mut pins = Vec::new();
        for part in text.split(',') {
            let (vcpu, cpu) = part.split_once('=').ok_or(VcpuPinningError::Syntax)?;
            let (Ok(vcpu), Ok(cpu)) = (vcpu.parse(), cpu.parse()) else {
                return Err(VcpuPinningError::Syntax);
            };
            if pins.iter().any(|&(other, _)| other == vcpu) {
                return Err(VcpuPinningError::DuplicateVcpu(vcpu));
            }
            pins.push((vcpu, cpu));
        }
        Ok(Self(pins))
    }
}

impl VcpuPinning {
    /// Checks that this pinning is valid for a VM with up to `vcpus` vCPUs.
    ///
    /// # Errors
    /// Returns [`VcpuPinningError::NoVcpu`] or [`VcpuPinningError::NotAllowed`] for the first
    /// invalid pin, and [`VcpuPinningError::Affinity`] if the CPUs of the host cannot be read.
    pub fn check(&self, vcpus: u8) -> Result<(), VcpuPinningError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let allowed = allowed().map_err(VcpuPinningError::Affinity)?;
        for &(vcpu, cpu) in &self.0 {
            if vcpu >= vcpus {
                let last = vcpus.saturating_sub(1);
                return Err(VcpuPinningError::NoVcpu { vcpu, last });
            }
            if !allowed.contains(&cpu) {
                let allowed = Ranges(&allowed).to_string();
                return Err(VcpuPinningError::NotAllowed { vcpu, cpu, allowed });
            }
        }
        Ok(())
    }

    /// Returns the host CPU of a vCPU, or `None` if the vCPU is not pinned.
    pub fn of(&self, vcpu: u8) -> Option<usize> {
        self.0
            .iter()
            .find_map(|&(pinned, cpu)| (pinned == vcpu).then_some(cpu))
    }
}

/// Returns the host CPUs that the calling thread may run on.
fn allowed() -> io::Result<Vec<usize>> {
    let mut set = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: the size passed is that of `set`, and an all-zero `cpu_set_t` is a valid value.
    let set = unsafe {
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), set.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        set.assume_init()
    };
    // SAFETY: `cpu` is below the size of the set.
    Ok((0..MAX_CPUS)
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) })
        .collect())
}

/// Pins the calling thread to host CPU `cpu`.
///
/// # Errors
/// Returns an error if `sched_setaffinity(2)` fails, for instance because the CPU was taken offline
/// after [`VcpuPinning::check`].
pub fn pin_current_thread(cpu: usize) -> io::Result<()> {
    if cpu >= MAX_CPUS {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: an all-zero `cpu_set_t` is a valid value, `cpu` is below its size, and the call reads
    // exactly the size passed.
    let done = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Formats a list of ascending numbers as ranges, for example `0-3,8`.
struct Ranges<'a>(&'a [usize]);

impl fmt::Display for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let chunks = self.0.chunk_by(|a, b| a + 1 == *b);
        for (n, run) in chunks.enumerate() {
            let comma = if n > 0 { "," } else { "" };
            match run {
                [one] => write!(f, "{comma}{one}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinning_parses_and_rejects_invalid_lists() {
        let pins: VcpuPinning = "0=2,1=3".parse().unwrap();
        assert_eq!((pins.of(0), pins.of(1), pins.of(2)), (Some(2), Some(3), None));
        for wrong in ["", "0", "0=", "=1", "0=1,", "256=1", "a=b", "0=-1"] {
            assert!(
                matches!(wrong.parse::<VcpuPinning>(), Err(VcpuPinningError::Syntax)),
                "{wrong}"
            );
        }
        assert!(matches!(
            "1=0,1=1".parse::<VcpuPinning>(),
            Err(VcpuPinningError::DuplicateVcpu(1))
        ));
        assert_eq!(Ranges(&[0, 1, 2, 5, 7, 8]).to_string(), "0-2,5,7-8");
    }

    #[test]
    fn pins_to_missing_vcpus_or_cpus_are_rejected() {
        let here = allowed().unwrap();
        let first = here[0];
        let pins: VcpuPinning = format!("1={first}").parse().unwrap();
        assert!(pins.check(2).is_ok());
        let line = pins.check(1).unwrap_err().to_string();
        assert!(line.contains("vCPU 1 not found"), "{line}");
        let pins: VcpuPinning = "0=100000".parse().unwrap();
        let line = pins.check(1).unwrap_err().to_string();
        assert!(
            line.contains("CPU 100000") && line.contains("may run on"),
            "{line}"
        );
    }

    #[test]
    fn pin_current_thread_sets_affinity() {
        let here = allowed().unwrap();
        let last = *here.last().unwrap();
        std::thread::spawn(move || {
            pin_current_thread(last).unwrap();
            assert_eq!(allowed().unwrap(), [last]);
        })
        .join()
        .unwrap();
        assert!(pin_current_thread(MAX_CPUS).is_err());
    }
}
