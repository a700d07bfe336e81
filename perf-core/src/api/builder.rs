//! [`PerfCoreBuilder`], which validates the settings of a [`PerfCore`] before it creates the core.

use std::sync::Arc;

use crate::mux::MuxPolicy;
use crate::pmu::Pmu;
use crate::schedule::SharePolicy;
use crate::service::config::PerfCoreConfig;
use crate::service::core::PerfCore;
use crate::time::Clock;

/// Maximum tick frequency, in hertz (a multiplexing interval of one microsecond).
const TICK_HZ_MAX: u64 = 1_000_000;
/// Maximum sample rate of an event, in hertz (one sample per nanosecond).
const SAMPLE_RATE_MAX: u64 = 1_000_000_000;
/// Maximum value of [`PerfCoreConfig::mlock_kb`] and [`PerfCoreConfig::memlock_kb`], in KiB.
const KB_MAX: u64 = u64::MAX >> 11;

/// Error of [`PerfCoreBuilder::build`]: a setting that is out of range.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: {value} is out of range; must be between {least} and {most}")]
pub struct PerfCoreConfigError {
    /// Name of the [`PerfCoreConfig`] field that is out of range.
    pub setting: &'static str,
    /// Value that was rejected.
    pub value: i128,
    /// Minimum valid value of the setting.
    pub least: i128,
    /// Maximum valid value of the setting.
    pub most: i128,
}

impl PerfCoreConfig {
    /// Checks that each setting of the configuration is in range.
    ///
    /// # Errors
    ///
    /// Returns a [`PerfCoreConfigError`] for the first setting that is out of range.
    pub fn check(&self) -> Result<(), PerfCoreConfigError> {
        let in_range = |setting, value: i128, least: i128, most: i128| {
            (least..=most)
                .contains(&value)
                .then_some(())
                .ok_or(PerfCoreConfigError {
                    setting,
                    value,
                    least,
                    most,
                })
        };
        in_range("tick_hz", self.tick_hz.into(), 1, TICK_HZ_MAX.into())?;
        in_range("paranoid", self.paranoid.into(), -1, 2)?;
        in_range(
            "sample_rate_hz",
            self.sample_rate_hz.into(),
            1,
            SAMPLE_RATE_MAX.into(),
        )?;
        in_range("mlock_kb", self.mlock_kb.into(), 0, KB_MAX.into())?;
        in_range("memlock_kb", self.memlock_kb.into(), 0, KB_MAX.into())?;
        in_range("host_cpus", self.host_cpus as i128, 1, u32::MAX.into())
    }
}

/// A builder for a [`PerfCore`] with validated settings. See [`PerfCore::builder`].
#[derive(Debug, Default)]
pub struct PerfCoreBuilder {
    config: PerfCoreConfig,
    drivers: Vec<Arc<dyn Pmu>>,
}

impl PerfCore {
    /// Creates a builder with the settings of [`PerfCoreConfig::default`].
    ///
    #[cfg_attr(feature = "sim", doc = "```")]
    #[cfg_attr(not(feature = "sim"), doc = "```ignore")]
    /// use std::sync::Arc;
    /// use perf_core::pmu::sim::SimPmu;
    /// use perf_core::{PerfCore, SharePolicy};
    ///
    /// let core = PerfCore::builder()
    ///     .share(SharePolicy::OperatorFirst)
    ///     .tick_hz(1000)
    ///     .sample_rate_hz(50_000)
    ///     .driver(Arc::new(SimPmu::with_slots(4)))
    ///     .build()?;
    /// assert_eq!(core.share(), SharePolicy::OperatorFirst);
    ///
    /// let error = PerfCore::builder().tick_hz(0).build().unwrap_err();
    /// assert_eq!(error.to_string(), "tick_hz: 0 is out of range; must be between 1 and 1000000");
    /// # Ok::<(), perf_core::PerfCoreConfigError>(())
    /// ```
    #[must_use]
    pub fn builder() -> PerfCoreBuilder {
        PerfCoreBuilder::default()
    }
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: $ty:ty;)*) => {
        $(
            $(#[$doc])*
            #[must_use]
            pub fn $name(mut self, $name: $ty) -> Self {
                self.config.$name = $name;
                self
            }
        )*
    };
}

impl PerfCoreBuilder {
    setters! {
        /// Sets [`PerfCoreConfig::clock`].
        clock: Arc<dyn Clock>;
        /// Sets [`PerfCoreConfig::share`].
        share: SharePolicy;
        /// Sets [`PerfCoreConfig::mux`].
        mux: MuxPolicy;
        /// Sets [`PerfCoreConfig::tick_hz`].
        tick_hz: u64;
        /// Sets [`PerfCoreConfig::paranoid`].
        paranoid: i32;
        /// Sets [`PerfCoreConfig::sample_rate_hz`].
        sample_rate_hz: u64;
        /// Sets [`PerfCoreConfig::mlock_kb`].
        mlock_kb: u64;
        /// Sets [`PerfCoreConfig::memlock_kb`].
        memlock_kb: u64;
        /// Sets [`PerfCoreConfig::host_cpus`].
        host_cpus: usize;
        /// Sets [`PerfCoreConfig::reserved_slots`].
        reserved_slots: usize;
        /// Sets [`PerfCoreConfig::overcommit`].
        overcommit: bool;
        /// Sets [`PerfCoreConfig::owner_uid`].
        owner_uid: u32;
        /// Sets [`PerfCoreConfig::pid`].
        pid: u32;
    }

    /// Registers a driver, like [`PerfCore::register`].
    #[must_use]
    pub fn driver(mut self, driver: Arc<dyn Pmu>) -> Self {
        self.drivers.push(driver);
        self
    }

    /// Creates the core and registers the drivers.
    ///
    /// # Errors
    ///
    /// Returns a [`PerfCoreConfigError`] if a setting is out of range.
    pub fn build(self) -> Result<PerfCore, PerfCoreConfigError> {
        self.config.check()?;
        let core = PerfCore::new(self.config);
        for driver in self.drivers {
            core.register(driver);
        }
        Ok(core)
    }
}
