//! Processor names as in perf's tables.

use std::arch::x86_64::__cpuid_count as read_host;
use std::fmt;
use std::str::FromStr;

/// A processor name such as `GenuineIntel-6-8E-9`: vendor, family (decimal), model and stepping
/// (hexadecimal).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuName(String);

/// Error returned when a [`CpuName`] cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be VENDOR-FAMILY-MODEL-STEPPING with a decimal family and hexadecimal model and \
    stepping, for example GenuineIntel-6-8E-9 or AuthenticAMD-25-1-0"
)]
pub struct CpuNameError;

impl CpuName {
    /// Returns the name of the host's processor (Intel SDM, volume 2, CPUID, leaves 0 and 1; AMD
    /// APM, volume 3, appendix E).
    pub fn host() -> Self {
        let (vendor, signature) = (read_host(0, 0), read_host(1, 0).eax);
        let vendor: String = [vendor.ebx, vendor.edx, vendor.ecx]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .filter(u8::is_ascii_alphanumeric)
            .map(char::from)
            .collect();
        Self::of(&vendor, signature)
    }

    /// Creates the name of a processor from its vendor and from `signature`, which is EAX of CPUID
    /// leaf 1. Decodes family and model in the same way as Linux and perf.
    fn of(vendor: &str, signature: u32) -> Self {
        let (mut family, mut model) = (signature >> 8 & 0xf, signature >> 4 & 0xf);
        if family == 0xf {
            family += signature >> 20 & 0xff;
        }
        if family >= 6 {
            model += (signature >> 16 & 0xf) << 4;
        }
        Self(format!("{vendor}-{family}-{model:X}-{:X}", signature & 0xf))
    }

    /// Returns whether this is an AMD processor, whose event codes have 12 bits.
    pub fn is_amd(&self) -> bool {
        self.0.starts_with("AuthenticAMD-") || self.0.starts_with("HygonGenuine-")
    }

    /// Returns older processors with mostly the same events, the nearest first. Their tables are
    /// used if perf has no table for this processor. `mapfile.csv` in Linux's
    /// `tools/perf/pmu-events` lists the processors of the tables.
    pub fn relatives(&self) -> Vec<Self> {
        // Model numbers in hexadecimal, as in perf's tables.
        const INTEL: &[(&[&str], &[&str])] = &[
            // Emerald Rapids and Granite Rapids use the tables of Sapphire Rapids and Ice Lake
            // servers.
            (&["CF", "AD", "AE"], &["8F", "6A"]),
            (&["8F"], &["6A"]),
            // Raptor Lake and Meteor Lake use the table of Alder Lake.
            (&["B7", "BA", "BF", "AA", "AC", "B5"], &["97"]),
            // Arrow Lake, Lunar Lake and Panther Lake use the tables of the previous generation,
            // Meteor Lake and Alder Lake.
            (&["C5", "C6"], &["AA", "97"]),
            (&["BD"], &["C6", "AA", "97"]),
            (&["CC", "D5"], &["BD", "C6", "AA", "97"]),
        ];
        // Zen 5 and Zen 4 use the tables of Zen 4 and Zen 3.
        const ZEN_4: &str = "AuthenticAMD-25-11-1";
        const ZEN_3: &str = "AuthenticAMD-25-1-0";
        let parts: Vec<&str> = self.0.split('-').collect();
        let of = |names: &[&str]| names.iter().map(|name| Self((*name).to_owned())).collect();
        match parts[..] {
            ["GenuineIntel", "6", model, _] => {
                let known = INTEL.iter().find(|(models, _)| models.contains(&model));
                let models = known.map_or(&[][..], |(_, models)| *models);
                let name = |model: &&str| Self(format!("GenuineIntel-6-{model}-0"));
                models.iter().map(name).collect()
            }
            ["AuthenticAMD", "26", ..] => of(&[ZEN_4, ZEN_3]),
            ["AuthenticAMD", "25", ..] => of(&[ZEN_3]),
            _ => Vec::new(),
        }
    }

    /// Returns the name in the format of perf's `PERF_CPUID` variable.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for CpuName {
    type Err = CpuNameError;

    fn from_str(text: &str) -> Result<Self, CpuNameError> {
        let parts: Vec<&str> = text.split('-').collect();
        let [vendor, family, model, stepping] = parts[..] else {
            return Err(CpuNameError);
        };
        let hex =
            |digits: &str| matches!(digits.len(), 1..=4) && digits.bytes().all(|b| b.is_ascii_hexdigit());
        let right = matches!(vendor.len(), 1..=12)
            && vendor.bytes().all(|b| b.is_ascii_alphabetic())
            && family.bytes().all(|b| b.is_ascii_digit())
            && family.parse::<u16>().is_ok()
            && hex(model)
            && hex(stepping);
        if right {
            // The tables use upper case.
            let (model, stepping) = (model.to_uppercase(), stepping.to_uppercase());
            Ok(Self(format!("{vendor}-{family}-{model}-{stepping}")))
        } else {
            Err(CpuNameError)
        }
    }
}

impl fmt::Display for CpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpuid_signature_maps_to_perf_name() {
        let name = |vendor, signature| CpuName::of(vendor, signature).0;
        assert_eq!(name("GenuineIntel", 0x806E9), "GenuineIntel-6-8E-9");
        assert_eq!(name("AuthenticAMD", 0xA0_0F10), "AuthenticAMD-25-1-0");
        assert_eq!(name("GenuineIntel", 0xC06F2), "GenuineIntel-6-CF-2");
        assert!(
            CpuName::host().0.parse::<CpuName>().is_ok(),
            "{}",
            CpuName::host()
        );
    }

    /// The relatives of a processor have older tables than the processor, and the relative with the
    /// newest table comes first. The order of Intel's tables and their models match `mapfile.csv`
    /// in Linux.
    #[test]
    fn relatives_are_of_older_tables() {
        const CLIENTS: &[&[&str]] = &[
            &["97", "9A", "B7", "BA", "BF"],
            &["AA", "AC", "B5"],
            &["C5", "C6"],
            &["BD"],
            &["CC", "D5"],
        ];
        const SERVERS: &[&[&str]] = &[&["6A", "6C"], &["8F"], &["CF"], &["AD", "AE"]];
        for tables in [CLIENTS, SERVERS] {
            let at = |model: &str| tables.iter().position(|models| models.contains(&model));
            let newer = tables.iter().enumerate().skip(1);
            for (table, model) in newer.flat_map(|(n, models)| models.iter().map(move |m| (n, m))) {
                let name = format!("GenuineIntel-6-{model}-1").parse::<CpuName>().unwrap();
                let relatives: Vec<_> = name
                    .relatives()
                    .iter()
                    .map(|cpu| at(cpu.0.split('-').nth(2).unwrap()))
                    .collect();
                assert!(!relatives.is_empty(), "{model}");
                assert!(
                    relatives.iter().all(|of| of.is_some_and(|of| of < table)),
                    "{model}: {relatives:?}"
                );
                assert!(relatives.is_sorted_by(|a, b| a > b), "{model}: {relatives:?}");
            }
        }
    }

    #[test]
    fn relatives_are_older_processors() {
        let of = |name: &str| {
            let relatives = name.parse::<CpuName>().unwrap().relatives();
            relatives.into_iter().map(|cpu| cpu.0).collect::<Vec<_>>()
        };
        assert_eq!(
            of("GenuineIntel-6-CF-2"),
            ["GenuineIntel-6-8F-0", "GenuineIntel-6-6A-0"]
        );
        assert_eq!(
            of("AuthenticAMD-26-44-0"),
            ["AuthenticAMD-25-11-1", "AuthenticAMD-25-1-0"]
        );
        assert!(of("GenuineIntel-6-8E-9").is_empty());
    }

    #[test]
    fn cpu_name_requires_four_parts() {
        let parsed = "GenuineIntel-6-8e-a".parse::<CpuName>().unwrap();
        assert_eq!(parsed.as_str(), "GenuineIntel-6-8E-A");
        for wrong in [
            "",
            "GenuineIntel",
            "GenuineIntel-6-8E",
            "GenuineIntel-6-8E-9-1",
            "GenuineIntel-x-8E-9",
            "GenuineIntel-6-8G-9",
            "GenuineIntel-6-+8-9",
            "Genuine Intel-6-8E-9",
            "GenuineIntel-6-8E-",
            "GenuineIntel--8E-9",
            "GenuineIntel-6-12345-9",
        ] {
            assert_eq!(wrong.parse::<CpuName>(), Err(CpuNameError), "{wrong}");
        }
    }
}
