//! PMU vendors and generations, and parsing of the `--pmu` and `--pmu-counters` arguments.

use std::fmt;
use std::str::FromStr;

/// Vendor that defines the registers and events of a PMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// Intel, whose Software Developer's Manual defines the PMU.
    Intel,
    /// AMD, whose AMD64 Architecture Programmer's Manual defines the PMU.
    Amd,
}

impl Vendor {
    /// Returns the twelve-character vendor string of CPUID leaf 0, in the order EBX, EDX, ECX.
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

/// Generation of a PMU, which determines its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PmuGeneration {
    /// No PMU. The only PMU registers are those that every processor of the vendor has, which read
    /// as 0.
    Off(Vendor),
    /// Intel architectural performance monitoring, version 1 to 5.
    Intel(u8),
    /// AMD K7: four counters.
    AmdK7,
    /// AMD core performance counter extension: six counters.
    AmdCore,
    /// AMD performance monitoring version 2: global control and status, and the number of counters
    /// that CPUID reports.
    AmdV2,
}

impl PmuGeneration {
    /// Returns the vendor that defines this generation.
    pub const fn vendor(self) -> Vendor {
        match self {
            Self::Off(vendor) => vendor,
            Self::Intel(_) => Vendor::Intel,
            Self::AmdK7 | Self::AmdCore | Self::AmdV2 => Vendor::Amd,
        }
    }
}

/// Formats the generation as a `--pmu` argument.
impl fmt::Display for PmuGeneration {
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

/// Value of `--pmu`, not yet resolved against the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PmuModelName {
    /// Default model of the host's vendor (`intel` or `amd`).
    Auto,
    /// PMU with the same properties as the host's PMU, according to CPUID.
    Host,
    /// No PMU (`--pmu off`).
    Off,
    /// PMU of this generation.
    Generation(PmuGeneration),
}

impl FromStr for PmuModelName {
    type Err = PmuModelError;

    fn from_str(name: &str) -> Result<Self, PmuModelError> {
        Ok(match name {
            "auto" => Self::Auto,
            "host" => Self::Host,
            "off" => Self::Off,
            "intel" | "intel-v2" => Self::Generation(PmuGeneration::Intel(2)),
            "intel-v1" => Self::Generation(PmuGeneration::Intel(1)),
            "intel-v3" => Self::Generation(PmuGeneration::Intel(3)),
            "intel-v4" => Self::Generation(PmuGeneration::Intel(4)),
            "intel-v5" => Self::Generation(PmuGeneration::Intel(5)),
            "amd-k7" => Self::Generation(PmuGeneration::AmdK7),
            "amd" => Self::Generation(PmuGeneration::AmdCore),
            "amd-v2" => Self::Generation(PmuGeneration::AmdV2),
            _ => return Err(PmuModelError::UnknownModel(printable(name))),
        })
    }
}

/// Value of `--pmu-counters GP[+FIXED]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestedCounters {
    /// Requested number of general-purpose counters.
    pub general: u32,
    /// Requested number of fixed counters, or `None` for the model's default.
    pub fixed: Option<u32>,
}

impl FromStr for RequestedCounters {
    type Err = PmuModelError;

    fn from_str(text: &str) -> Result<Self, PmuModelError> {
        let number = |part: &str| -> Result<u32, PmuModelError> {
            // `u32::from_str` accepts a leading plus sign, so "4++3" would parse.
            if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
                return Err(PmuModelError::RequestedCounters(printable(text)));
            }
            part.parse()
                .map_err(|_| PmuModelError::RequestedCounters(printable(text)))
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

/// Returns the first forty characters of `text` with control characters escaped, for a one-line
/// message.
pub(crate) fn printable(text: &str) -> String {
    let mut shown: String = text.chars().take(40).flat_map(char::escape_debug).collect();
    if text.chars().nth(40).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Error returned for an invalid PMU model.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum PmuModelError {
    /// The `--pmu` value is unknown. Contains the value.
    #[error(
        "unknown PMU model \"{0}\"; must be auto, host, off, intel, intel-v1 to intel-v5, amd, \
        amd-k7 or amd-v2"
    )]
    UnknownModel(String),
    /// The `--pmu-counters` value is malformed. Contains the value.
    #[error("invalid counter numbers \"{0}\"; must be GP or GP+FIXED, for example 4 or 4+3")]
    RequestedCounters(String),
    /// The number of general-purpose counters is outside the model's limits.
    #[error("{given} general-purpose counters: {generation} supports {limit}; {remedy}")]
    General {
        /// Requested number of general-purpose counters.
        given: u32,
        /// PMU generation of the requested model.
        generation: PmuGeneration,
        /// Description of the numbers that the model supports.
        limit: &'static str,
        /// Suggested remedy, as a part of the message.
        remedy: &'static str,
    },
    /// The number of fixed counters exceeds the model's limit.
    #[error("{given} fixed counters: {generation} supports {limit}; {remedy}")]
    Fixed {
        /// Requested number of fixed counters.
        given: u32,
        /// PMU generation of the requested model.
        generation: PmuGeneration,
        /// Description of the limit that the number exceeds.
        limit: &'static str,
        /// Suggested remedy, as a part of the message.
        remedy: &'static str,
    },
    /// The model does not support the counter width.
    #[error("a counter width of {given} bits: {generation} supports {limit}; omit --pmu-width for 48")]
    Width {
        /// Requested counter width, in bits.
        given: u32,
        /// PMU generation of the requested model.
        generation: PmuGeneration,
        /// Description of the widths that the model supports.
        limit: &'static str,
    },
    /// `--pmu-counters` or `--pmu-width` is given with `--pmu host` or `off`. Contains the `--pmu`
    /// value.
    #[error(
        "--pmu {0} does not support --pmu-counters and --pmu-width; choose a model by name, for \
        example --pmu intel-v2"
    )]
    NotAdjustable(&'static str),
    /// `--pmu host` is given, but the host's CPUID reports no PMU.
    #[error("--pmu host: no PMU found in this host's CPUID; choose a model by name, for example --pmu intel")]
    HostHasNone,
}
