//! The guest kernel's messages.

/// What the kernel says its TSC runs at, in Hz.
///
/// "tsc: Detected 2899.999 MHz processor" comes from CPUID or a paravirtual clock; a calibration
/// against another timer afterwards refines it.
pub fn tsc_hz(dmesg: &str) -> Option<f64> {
    let mhz = |line: &str, before: &str| -> Option<f64> {
        line.split_once(before)?.1.split_whitespace().next()?.parse().ok()
    };
    let refined = dmesg
        .lines()
        .find_map(|line| mhz(line, "tsc: Refined TSC clocksource calibration: "));
    refined
        .or_else(|| dmesg.lines().find_map(|line| mhz(line, "tsc: Detected ")))
        .map(|mhz| mhz * 1e6)
}

/// The lines in which the kernel tells which PMU driver it uses.
pub fn pmu_driver_lines(dmesg: &str) -> Vec<&str> {
    dmesg
        .lines()
        .filter(|line| line.contains("Performance Events:") || line.contains("PMU driver"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refined_frequency_wins() {
        let detected = "[    0.000000] tsc: Detected 2899.998 MHz processor\n";
        assert_eq!(tsc_hz(detected), Some(2_899_998_000.0));
        let refined = format!("{detected}[    1.5] tsc: Refined TSC clocksource calibration: 2900.101 MHz\n");
        assert_eq!(tsc_hz(&refined), Some(2_900_101_000.0));
        assert_eq!(tsc_hz("no such line"), None);
    }

    #[test]
    fn driver_lines_are_found() {
        let dmesg = "[    0.1] smpboot: CPU0\n[    0.2] Performance Events: Fam17h+ core perfctr, \
                     AMD PMU driver.\n[    0.3] ... version: 0\n";
        assert_eq!(pmu_driver_lines(dmesg).len(), 1);
    }
}
