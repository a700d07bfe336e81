//! The compared sampling methods and their names.

use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SamplingMethod {
    Perf,
    Signal,
    EveryChain,
    Default,
}

impl SamplingMethod {
    pub(crate) fn letter(self) -> char {
        self.name().as_bytes()[0].into()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            SamplingMethod::Perf => "b  perf record on the vCPU thread, no chains",
            SamplingMethod::Signal => "c  a signal for each sample, nothing else",
            SamplingMethod::EveryChain => "d  perfvisor record --chain-every 1",
            SamplingMethod::Default => "e  perfvisor record",
        }
    }
}

/// The sampling methods measured in each round, without duplicates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SamplingMethods(pub(crate) Vec<SamplingMethod>);

/// Error returned when a list of sampling methods contains an unknown or a repeated letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be some of the letters b to e, each once")]
pub(crate) struct SamplingMethodsError;

impl SamplingMethods {
    pub(crate) const ALL: [SamplingMethod; 4] = [
        SamplingMethod::Perf,
        SamplingMethod::Signal,
        SamplingMethod::EveryChain,
        SamplingMethod::Default,
    ];
}

impl FromStr for SamplingMethods {
    type Err = SamplingMethodsError;

    fn from_str(letters: &str) -> Result<Self, SamplingMethodsError> {
        let chosen: Vec<SamplingMethod> = Self::ALL
            .into_iter()
            .filter(|way| letters.contains(way.letter()))
            .collect();
        if chosen.is_empty() || chosen.len() != letters.chars().count() {
            return Err(SamplingMethodsError);
        }
        Ok(Self(chosen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_methods_parse_from_letters() {
        assert_eq!(
            "dc".parse(),
            Ok(SamplingMethods(vec![
                SamplingMethod::Signal,
                SamplingMethod::EveryChain
            ]))
        );
        assert_eq!("bcde".parse(), Ok(SamplingMethods(SamplingMethods::ALL.to_vec())));
        for bad in ["", "a", "cc", "cx"] {
            assert_eq!(bad.parse::<SamplingMethods>(), Err(SamplingMethodsError), "{bad}");
        }
    }
}
