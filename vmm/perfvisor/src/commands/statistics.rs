//! Names of the host's KVM statistics, for `perfvisor list`.

use perf_core::pmu::kvm::{KvmStatsError, KvmStatsFile};
use vmm::kvm::host::{self, KvmHostError};
use vmm::kvm::stats_fd;

/// Error returned when the host's KVM statistics cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum StatisticsError {
    #[error(transparent)]
    Host(#[from] KvmHostError),
    #[error("KVM has no binary statistics (Linux 5.14)")]
    Kvm(#[from] std::io::Error),
    #[error(transparent)]
    Table(#[from] KvmStatsError),
}

/// Returns the KVM statistics of this host that are usable as events, first those of a vCPU, then
/// those of a VM.
///
/// # Errors
/// Returns [`StatisticsError`] if KVM is not usable or its statistics are malformed.
pub fn names() -> Result<Vec<String>, StatisticsError> {
    let kvm = host::open()?;
    let names = |fd, prefix: &str| -> Result<Vec<String>, KvmStatsError> {
        let stats = KvmStatsFile::new(fd)?;
        let countable = stats.descriptors().iter().filter(|stat| stat.countable());
        Ok(countable.map(|stat| format!("{prefix}{}", stat.name)).collect())
    };
    let (of_vm, of_vcpu) = stats_fd::of_probe(&kvm, |vm, vcpu| (names(vm, "kvm:vm:"), names(vcpu, "kvm:")))?;
    Ok([of_vcpu?, of_vm?].concat())
}

#[cfg(test)]
mod tests {
    use control_api::events::list::parse;

    use super::*;

    #[test]
    #[expect(clippy::print_stderr, reason = "a test that could not run says so")]
    fn kvm_statistics_are_listed() {
        if host::open().is_err() {
            return eprintln!("SKIPPED: no KVM here");
        }
        let all = names().unwrap();
        assert!(all.iter().any(|name| name == "kvm:exits"), "{all:?}");
        for name in &all {
            assert!(parse(name).is_ok(), "{name}");
        }
    }
}
