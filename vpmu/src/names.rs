//! What a model is asked for by: vendors, generations, the words of `--pmu` and `--pmu-counters`, and what is
//! wrong with them.

use std::fmt;
use std::str::FromStr;

/// Whose manual describes the PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// Intel Software Developer's Manual.
    Intel,
    /// AMD64 Architecture Programmer's Manual.
    Amd,
}

impl Vendor {
    /// The twelve letters of CPUID leaf 0, in the order EBX, EDX, ECX.
    pub const fn cpuid_name(self) -> &'static str {
        match self {
            Self::Intel => "GenuineIntel",
            Self::Amd => "AuthenticAMD",
        }
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Intel => "Intel",
            Self::Amd => "AMD",
        })
    }
}

/// Generation of a PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Generation {
    /// No PMU. What is left are the registers that answer 0 on every processor of the vendor.
    Off(Vendor),
    /// Intel architectural performance monitoring, version 1 to 5.
    Intel(u8),
    /// AMD's four counters of the K7.
    AmdK7,
    /// AMD's core performance counter extension: six counters.
    AmdCore,
    /// AMD's performance monitoring version 2: global control and status, as many counters as CPUID says.
    AmdV2,
}

impl Generation {
    /// Whose PMU it is.
    pub const fn vendor(self) -> Vendor {
        match self {
            Self::Off(vendor) => vendor,
            Self::Intel(_) => Vendor::Intel,
            Self::AmdK7 | Self::AmdCore | Self::AmdV2 => Vendor::Amd,
        }
    }
}

/// The name `--pmu` takes.
impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off(_) => f.write_str("off"),
            Self::Intel(version) => write!(f, "intel-v{version}"),
            Self::AmdK7 => f.write_str("amd-k7"),
            Self::AmdCore => f.write_str("amd"),
            Self::AmdV2 => f.write_str("amd-v2"),
        }
    }
}

/// What `--pmu` asks for, before the host was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelName {
    /// The first model of the host's vendor: `intel` or `amd`.
    Auto,
    /// What the host's own CPUID says.
    Host,
    /// No PMU.
    Off,
    /// This generation.
    Generation(Generation),
}

impl FromStr for ModelName {
    type Err = ModelError;

    fn from_str(name: &str) -> Result<Self, ModelError> {
        Ok(match name {
            "auto" => Self::Auto,
            "host" => Self::Host,
            "off" => Self::Off,
            "intel" | "intel-v2" => Self::Generation(Generation::Intel(2)),
            "intel-v1" => Self::Generation(Generation::Intel(1)),
            "intel-v3" => Self::Generation(Generation::Intel(3)),
            "intel-v4" => Self::Generation(Generation::Intel(4)),
            "intel-v5" => Self::Generation(Generation::Intel(5)),
            "amd-k7" => Self::Generation(Generation::AmdK7),
            "amd" => Self::Generation(Generation::AmdCore),
            "amd-v2" => Self::Generation(Generation::AmdV2),
            _ => return Err(ModelError::UnknownModel(printable(name))),
        })
    }
}

/// What `--pmu-counters GP[+FIXED]` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterNumbers {
    /// General-purpose counters.
    pub general: u32,
    /// Fixed counters; `None`: the model's own number.
    pub fixed: Option<u32>,
}

impl FromStr for CounterNumbers {
    type Err = ModelError;

    fn from_str(text: &str) -> Result<Self, ModelError> {
        let number = |part: &str| -> Result<u32, ModelError> {
            // `u32::from_str` takes a leading plus sign, which would let "4++3" pass.
            if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
                return Err(ModelError::CounterNumbers(printable(text)));
            }
            part.parse()
                .map_err(|_| ModelError::CounterNumbers(printable(text)))
        };
        match text.split_once('+') {
            Some((general, fixed)) => Ok(Self {
                general: number(general)?,
                fixed: Some(number(fixed)?),
            }),
            None => Ok(Self {
                general: number(text)?,
                fixed: None,
            }),
        }
    }
}

/// At most forty characters of a user's text, with control characters made visible, for a message of one
/// line.
pub(crate) fn printable(text: &str) -> String {
    let mut shown: String = text.chars().take(40).flat_map(char::escape_debug).collect();
    if text.chars().nth(40).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Why a model cannot be built. Each message names the input, the limit and the remedy.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ModelError {
    /// `--pmu` names no model.
    #[error(
        "unknown PMU model \"{0}\": choose auto, host, off, intel, intel-v1 to intel-v5, amd, amd-k7 or amd-v2"
    )]
    UnknownModel(String),
    /// `--pmu-counters` does not parse.
    #[error(
        "cannot read the counter numbers \"{0}\": give GP or GP+FIXED as decimal numbers, for example 4 or 4+3"
    )]
    CounterNumbers(String),
    /// Too few or too many general-purpose counters.
    #[error("{given} general-purpose counters: {generation} can have {limit}; {remedy}")]
    General {
        /// What was asked for.
        given: u32,
        /// Of which model.
        generation: Generation,
        /// What it can have.
        limit: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// Too many fixed counters.
    #[error("{given} fixed counters: {generation} can have {limit}; {remedy}")]
    Fixed {
        /// What was asked for.
        given: u32,
        /// Of which model.
        generation: Generation,
        /// What it can have.
        limit: &'static str,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A width the model cannot have.
    #[error("a counter width of {given} bits: {generation} can have {limit}; leave --pmu-width out for 48")]
    Width {
        /// What was asked for.
        given: u32,
        /// Of which model.
        generation: Generation,
        /// What it can have.
        limit: &'static str,
    },
    /// `--pmu host`, `off` or `auto` together with numbers that belong to a chosen model.
    #[error(
        "--pmu {0} takes no counter numbers and no width: choose a model by name, for example --pmu intel-v2"
    )]
    NotAdjustable(&'static str),
    /// `--pmu host` on a host whose CPUID shows no PMU.
    #[error(
        "--pmu host: this host's CPUID shows no PMU to copy; choose a model by name, for example --pmu intel"
    )]
    HostHasNone,
}
