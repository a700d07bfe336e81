//! Parses `--cpu-signature`, the family, model and stepping in the guest's CPUID.

use std::fmt;
use std::str::FromStr;

/// Signature of the guest's processor: the value of CPUID leaf 1 EAX. See Intel SDM vol. 2, CPUID,
/// figure "Version Information Returned by CPUID in EAX", and AMD APM vol. 3 appendix E.3.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuSignature {
    /// The signature of the host CPU.
    Host,
    /// The signature with this value of EAX.
    Eax(u32),
}

/// Error when parsing a CPU signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuSignatureError {
    /// The string has none of the accepted formats.
    #[error(
        "must be host, FAMILY/MODEL/STEPPING (for example 6/94/3) or CPUID's EAX in \
         hexadecimal (for example 0x506e3)"
    )]
    Shape,
    /// The family does not fit the format of EAX.
    #[error("the family must be between 1 and 270")]
    Family,
    /// The model does not fit the format of EAX.
    #[error("the model must be between 0 and {0} in this family")]
    Model(u32),
    /// The stepping does not fit the format of EAX.
    #[error("the stepping must be between 0 and 15")]
    Stepping,
    /// Reserved bits of EAX are set.
    #[error("bits 31 to 28 and 15 to 12 of a signature must be 0")]
    Reserved,
}

/// Bits of EAX that must be zero: the reserved bits, and the processor type, which is zero on
/// current processors.
const RESERVED: u32 = 0xf000_f000;
/// First family number that needs the extended family field. Family 6 and families from this one on
/// have the extended model field.
const EXTENDED: u32 = 15;

impl CpuSignature {
    /// Encodes a signature from a family, a model and a stepping.
    ///
    /// # Errors
    /// Returns a [`CpuSignatureError`] if a number does not fit.
    pub fn of(family: u32, model: u32, stepping: u32) -> Result<Self, CpuSignatureError> {
        if !(1..=EXTENDED + 0xff).contains(&family) {
            return Err(CpuSignatureError::Family);
        }
        let most = if family == 6 || family >= EXTENDED {
            0xff
        } else {
            0xf
        };
        if model > most {
            return Err(CpuSignatureError::Model(most));
        }
        if stepping > 0xf {
            return Err(CpuSignatureError::Stepping);
        }
        let base = family.min(EXTENDED);
        Ok(Self::Eax(
            (family - base) << 20 | (model >> 4) << 16 | base << 8 | (model & 0xf) << 4 | stepping,
        ))
    }
}

impl FromStr for CpuSignature {
    type Err = CpuSignatureError;

    fn from_str(text: &str) -> Result<Self, CpuSignatureError> {
        if text == "host" {
            return Ok(Self::Host);
        }
        if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
            return match digits(hex, 16)? {
                0 => Err(CpuSignatureError::Shape),
                eax if eax & RESERVED != 0 => Err(CpuSignatureError::Reserved),
                eax => Ok(Self::Eax(eax)),
            };
        }
        let mut parts = text.split('/').map(|part| digits(part, 10));
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(family), Some(model), Some(stepping), None) => Self::of(family?, model?, stepping?),
            _ => Err(CpuSignatureError::Shape),
        }
    }
}

/// Parses a number without sign or whitespace.
fn digits(text: &str, radix: u32) -> Result<u32, CpuSignatureError> {
    if text.chars().all(|c| c.is_digit(radix)) {
        u32::from_str_radix(text, radix).map_err(|_| CpuSignatureError::Shape)
    } else {
        Err(CpuSignatureError::Shape)
    }
}

impl fmt::Display for CpuSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Eax(eax) => write!(f, "{eax:#x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The accepted formats give the same signature. The signatures are those for which Linux
    /// prints the given numbers ("family: 0x6, model: 0x5e, stepping: 0x3").
    #[test]
    fn cpu_signature_formats_are_equivalent() {
        for (numbers, eax) in [
            ("6/94/3", 0x506e3),
            ("6/60/3", 0x306c3),
            ("6/106/6", 0x606a6),
            ("15/4/1", 0xf41),
            ("23/49/0", 0x0083_0f10),
            ("26/2/1", 0x00b0_0f21),
            ("5/2/12", 0x52c),
        ] {
            let hex: CpuSignature = format!("{eax:#x}").parse().unwrap();
            assert_eq!(numbers.parse(), Ok(hex), "{numbers}");
            assert_eq!(hex, CpuSignature::Eax(eax));
        }
        assert_eq!("host".parse(), Ok(CpuSignature::Host));
    }

    #[test]
    fn invalid_cpu_signature_is_rejected() {
        use CpuSignatureError::*;
        for (text, error) in [
            ("", Shape),
            ("skylake", Shape),
            ("506e3", Shape),
            ("6/94", Shape),
            ("6/94/3/1", Shape),
            ("+6/94/3", Shape),
            ("6//3", Shape),
            ("0x", Shape),
            ("0x0", Shape),
            ("0x1000506e3", Shape),
            ("0x100506e3", Reserved),
            ("0x516e3", Reserved),
            ("0/1/1", Family),
            ("271/1/1", Family),
            ("6/256/3", Model(255)),
            ("5/16/3", Model(15)),
            ("6/94/16", Stepping),
            ("4294967296/1/1", Shape),
        ] {
            assert_eq!(text.parse::<CpuSignature>(), Err(error), "{text}");
        }
    }
}
