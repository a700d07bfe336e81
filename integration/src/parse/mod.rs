//! Reading what perf and the kernel print.

mod dmesg;
mod report;
mod stat;

pub use dmesg::{pmu_driver_lines, tsc_hz};
pub use report::{Report, ReportLine, parse_report};
pub use stat::{Count, Stat, StatError, parse_stat, parse_stat_csv};
