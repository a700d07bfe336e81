//! Settings of the core that can be changed at run time.

use std::sync::atomic::Ordering;

use crate::service::core::PerfCore;

/// A setting of the core that can be read and changed at run time, as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuntimeSetting {
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

/// Error of [`PerfCore::set_knob`]: an invalid value for a [`RuntimeSetting`] (`EINVAL`).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid value {text:?}: must be {expected}")]
pub struct TunableError {
    /// Text that was rejected.
    pub text: String,
    /// Description of the values that the setting accepts.
    pub expected: String,
}

impl PerfCore {
    /// Returns the value of a setting as decimal text with a newline, in the format of the kernel's
    /// sysctl files.
    #[must_use]
    pub fn knob(&self, knob: RuntimeSetting) -> String {
        let limits = &self.inner.limits;
        // All stored values fit, because they were set from numbers of these types.
        let value = match knob {
            RuntimeSetting::Paranoid => i64::from(limits.paranoid()),
            RuntimeSetting::SampleRateHz => limits.sample_rate_hz().cast_signed(),
            RuntimeSetting::MlockKb => limits.mlock_kb.load(Ordering::Relaxed).cast_signed(),
            RuntimeSetting::ReservedSlots => {
                limits.reserved_slots.load(Ordering::Relaxed).cast_signed() as i64
            }
            RuntimeSetting::Overcommit => i64::from(limits.overcommit.load(Ordering::Relaxed)),
        };
        format!("{value}\n")
    }

    /// Changes a setting to the number in `text`, ignoring surrounding whitespace.
    ///
    /// # Errors
    ///
    /// Returns a [`TunableError`] if `text` is not a number or the number is out of range. The
    /// setting is then unchanged.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the value was checked to be in the range of its setting"
    )]
    pub fn set_knob(&self, knob: RuntimeSetting, text: &str) -> Result<(), TunableError> {
        let limits = &self.inner.limits;
        let (least, most) = match knob {
            RuntimeSetting::Paranoid => (-1, 2),
            RuntimeSetting::SampleRateHz => (1, 1_000_000_000),
            RuntimeSetting::MlockKb => (0, i64::MAX >> 10),
            RuntimeSetting::ReservedSlots => (0, self.inner.min_slots().cast_signed() as i64),
            RuntimeSetting::Overcommit => (0, 1),
        };
        let value = text
            .trim()
            .parse::<i64>()
            .ok()
            .filter(|v| (least..=most).contains(v))
            .ok_or_else(|| TunableError {
                text: text.trim().into(),
                expected: format!("{least} to {most}"),
            })?;
        match knob {
            RuntimeSetting::Paranoid => limits.paranoid.store(value as i32, Ordering::Relaxed),
            RuntimeSetting::SampleRateHz => limits
                .sample_rate_hz
                .store(value.cast_unsigned(), Ordering::Relaxed),
            RuntimeSetting::MlockKb => limits.mlock_kb.store(value.cast_unsigned(), Ordering::Relaxed),
            RuntimeSetting::ReservedSlots => {
                limits.reserved_slots.store(value as usize, Ordering::Relaxed);
                self.inner.reserve_slots(value as usize);
            }
            RuntimeSetting::Overcommit => limits.overcommit.store(value == 1, Ordering::Relaxed),
        }
        Ok(())
    }
}
