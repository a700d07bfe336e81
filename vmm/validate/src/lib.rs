//! Validates the counts of guests on this host.
//!
//! Guests run in child processes and do work with counts that are known or measured independently.
//! Each count has three values: the guest's, the host's for the same counter, and the expected one.
//! The [`judge`] module compares them.
//!
//! | module | contents |
//! |---|---|
//! | [`judge`] | verdict on one count |
//! | `measure` | repeated measurements of a row, and their common verdict |
//! | [`report`] | rows, their table, the summary |
//! | [`child`] | a VM in a child process |
//! | [`procfs`] | the host kernel's accounting data of vCPU threads |
//! | [`guest`] | the built-in measuring guest |
//! | `builtin` | measurements with the built-in guest |
//! | `linux` | measurements with perf in a Linux guest |
//!
//! Start with [`run`]. The caller probes the host ([`HostProperties`]).
//!
//! **Dependencies.** `control-api` for requests to a VM, `vpmu` for the names of events and
//! registers, `perf-core` for records and rings. This crate starts VMs as child processes and
//! depends on neither KVM nor the machine.

#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]

mod builtin;
pub mod child;
pub mod guest;
mod host;
pub mod judge;
mod linux;
mod measure;
pub mod procfs;
pub mod report;

use std::time::Instant;

use child::VmMeasurementError;
pub use host::{HostProperties, KvmSummary, LinuxFiles, StopRequestedCheck, ValidateOptions};
use report::{
    ValidationGuestKind, ValidationReport, ValidationRow, ValidationRowCollector, ValidationSummary,
};

/// Runs all measurements and passes each final row to `on_row`.
///
/// # Errors
/// Returns a [`VmMeasurementError`] if a guest cannot be measured at all.
pub fn run(
    options: &ValidateOptions,
    host: &HostProperties,
    stop: &StopRequestedCheck,
    on_row: &mut dyn FnMut(&ValidationRow),
) -> Result<ValidationReport, VmMeasurementError> {
    let start = Instant::now();
    let builtin = builtin::Builtin {
        options,
        host,
        signals: stop,
    };
    let mut rows = ValidationRowCollector::new(on_row);
    builtin.rows(&mut rows)?;
    let mut summary = summary(host);
    if let Some(files) = &options.linux {
        let linux = linux::Linux {
            options,
            host,
            signals: stop,
            files,
        };
        rows.set_guest(ValidationGuestKind::Linux);
        linux.rows(&mut rows, &mut summary)?;
    }
    summary.guest_tsc_hz = host.tsc_hz;
    summary.linux_guest_skipped = options.linux_skipped.clone();
    summary.seconds = start.elapsed().as_secs_f64();
    Ok(ValidationReport::new(rows.into_vec(), summary))
}

fn summary(host: &HostProperties) -> ValidationSummary {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    ValidationSummary {
        perfvisor: env!("CARGO_PKG_VERSION").into(),
        host_kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        host_cpu: field("model name").unwrap_or_else(|| "unknown processor".into()),
        host_cpus: std::thread::available_parallelism().map_or(1, usize::from),
        host_is_virtual: field("flags")
            .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
        kvm: Some(host.kvm.clone()),
        host_pmu: match &host.no_hardware {
            Some(why) => format!("none ({why})"),
            None => host.slots.clone(),
        },
        perf_event_paranoid: host.probe.paranoid,
        pmu: host.guest_pmu.clone(),
        ..ValidationSummary::default()
    }
}
