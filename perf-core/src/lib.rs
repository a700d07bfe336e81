//! A perf event core in user space.

pub mod attr;
pub mod pmu;
pub mod record;
pub mod ring;
