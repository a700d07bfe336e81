//! Settings of the core that can be changed at run time.

use std::sync::atomic::Ordering;

use crate::service::core::PerfCore;

/// A setting of the core that can be read and changed at run time, as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerfCoreSetting {
    /// [`crate::PerfCoreConfig::paranoid`], from -1 to 2.
    Paranoid,
    /// [`crate::PerfCoreConfig::sample_rate_hz`], at least 1.
    SampleRateHz,
    /// [`crate::PerfCoreConfig::mlock_kb`].
    MlockKb,
    /// [`crate::PerfCoreConfig::reserved_slots`], up to the number of slots of the smallest PMU.
    /// Takes effect immediately.
    ReservedSlots,
    /// [`crate::PerfCoreConfig::overcommit`], 0 or 1.
    Overcommit,
}

/// Error of [`PerfCore::set_knob`]: an invalid value for a [`PerfCoreSetting`] (`EINVAL`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid value {text:?}: must be {expected}")]
pub struct PerfCoreSettingError {
    /// Text that was rejected.
    pub text: String,
    /// Description of the values that the setting accepts.
    pub expected: String,
}

impl PerfCore {
    /// Returns the value of a setting as decimal text with a newline, in the format of the kernel's
    /// sysctl files.
    #[must_use]
    pub fn knob(&self, knob: PerfCoreSetting) -> String {
        let limits = &self.inner.limits;
        // All stored values fit, because they were set from numbers of these types.
        let value = match knob {
            PerfCoreSetting::Paranoid => i64::from(limits.paranoid()),
            PerfCoreSetting::SampleRateHz => limits.sample_rate_hz().cast_signed(),
            PerfCoreSetting::MlockKb => limits.mlock_kb.load(Ordering::Relaxed).cast_signed(),
            PerfCoreSetting::ReservedSlots => {
                limits.reserved_slots.load(Ordering::Relaxed).cast_signed() as i64
            }
            PerfCoreSetting::Overcommit => i64::from(limits.overcommit.load(Ordering::Relaxed)),
        };
        format!("{value}\n")
    }

    /// Changes a setting to the number in `text`, ignoring surrounding whitespace.
    ///
    /// # Errors
    ///
    /// Returns a [`PerfCoreSettingError`] if `text` is not a number or the number is out of range.
    /// The setting is then unchanged.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value was checked to be in the range of its setting"
    )]
    pub fn set_knob(&self, knob: PerfCoreSetting, text: &str) -> Result<(), PerfCoreSettingError> {
        let limits = &self.inner.limits;
        let (least, most) = match knob {
            PerfCoreSetting::Paranoid => (-1, 2),
            PerfCoreSetting::SampleRateHz => (1, 1_000_000_000),
            PerfCoreSetting::MlockKb => (0, i64::MAX >> 10),
            PerfCoreSetting::ReservedSlots => (0, self.inner.min_slots().cast_signed() as i64),
            PerfCoreSetting::Overcommit => (0, 1),
        };
        let value = text
            .trim()
            .parse::<i64>()
            .ok()
            .filter(|v| (least..=most).contains(v))
            .ok_or_else(|| PerfCoreSettingError {
                text: text.trim().into(),
                expected: format!("{least} to {most}"),
            })?;
        match knob {
            PerfCoreSetting::Paranoid => limits.paranoid.store(value as i32, Ordering::Relaxed),
            PerfCoreSetting::SampleRateHz => limits
                .sample_rate_hz
                .store(value.cast_unsigned(), Ordering::Relaxed),
            PerfCoreSetting::MlockKb => limits.mlock_kb.store(value.cast_unsigned(), Ordering::Relaxed),
            PerfCoreSetting::ReservedSlots => {
                limits.reserved_slots.store(value as usize, Ordering::Relaxed);
                self.inner.reserve_slots(value as usize);
            }
            PerfCoreSetting::Overcommit => limits.overcommit.store(value == 1, Ordering::Relaxed),
        }
        Ok(())
    }
}
