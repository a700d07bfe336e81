//! Parsers for the output of perf, the kernel and the test guests.

mod dmesg;
mod report;
mod stat;
mod tap;

pub use dmesg::{KernelLogError, complaints, judge_kernel_log, pmu_driver_lines, tsc_hz};
pub use report::{PerfReport, PerfReportLine, parse_report};
pub use stat::{
    PerfStat, PerfStatCount, PerfStatError, StatDetailError, judge_detail, parse_stat, parse_stat_csv,
};
pub use tap::{TapReport, parse_tap};
