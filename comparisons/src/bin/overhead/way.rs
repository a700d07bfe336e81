//! The ways of sampling that are compared, and what they are called.

use std::str::FromStr;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Perf,
    Signal,
    EveryChain,
    Default,
}

impl Way {
    pub(crate) fn letter(self) -> char {
        self.name().as_bytes()[0].into()
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Way::Perf => "b  perf record on the vCPU thread, no chains",
            Way::Signal => "c  a signal for each sample, nothing else",
            Way::EveryChain => "d  perfvisor record --chain-every 1",
            Way::Default => "e  perfvisor record",
        }
    }
}

/// The ways of a turn, each once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ways(pub(crate) Vec<Way>);

/// Letters that name no ways, or one twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be some of the letters b to e, each once")]
pub(crate) struct WaysError;

impl Ways {
    pub(crate) const ALL: [Way; 4] = [Way::Perf, Way::Signal, Way::EveryChain, Way::Default];
}

impl FromStr for Ways {
    type Err = WaysError;

    fn from_str(letters: &str) -> Result<Self, WaysError> {
        let chosen: Vec<Way> = Self::ALL
            .into_iter()
            .filter(|way| letters.contains(way.letter()))
            .collect();
        if chosen.is_empty() || chosen.len() != letters.chars().count() {
            return Err(WaysError);
        }
        Ok(Self(chosen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_chosen_by_their_letters() {
        assert_eq!("dc".parse(), Ok(Ways(vec![Way::Signal, Way::EveryChain])));
        assert_eq!("bcde".parse(), Ok(Ways(Ways::ALL.to_vec())));
        for bad in ["", "a", "cc", "cx"] {
            assert_eq!(bad.parse::<Ways>(), Err(WaysError), "{bad}");
        }
    }
}
