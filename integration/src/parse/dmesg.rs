//! Parses messages of the guest's kernel.

/// Returns the TSC frequency reported by the kernel, in Hz.
///
/// The function parses the message "tsc: Detected 2899.999 MHz processor". This value comes from
/// CPUID or a paravirtual clock, and the kernel refines it later by a calibration against another
/// timer.
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

/// Returns the kernel messages about the PMU driver.
pub fn pmu_driver_lines(dmesg: &str) -> Vec<&str> {
    dmesg
        .lines()
        .filter(|line| line.contains("Performance Events:") || line.contains("PMU driver"))
        .collect()
}

/// Texts that identify kernel messages about problems of the kernel or its machine.
const COMPLAINTS: [&str; 19] = [
    // An NMI without a handler, caused by a spurious or late PMI.
    "Uhhuh",
    "Dazed and confused",
    "unknown reason",
    // The kernel accessed an advertised register that does not exist.
    "unchecked MSR access",
    "WARNING:",
    "BUG:",
    "Oops",
    "Kernel panic",
    "rcu_sched",
    "rcu_preempt",
    "self-detected stall",
    "detected stalls",
    "soft lockup",
    "hard LOCKUP",
    "blocked for more than",
    // Messages of the PMU driver.
    "Broken PMU",
    "irq loop stuck",
    "[Firmware Bug]: the BIOS",
    "arch/x86/events/",
];

/// Kernel messages about known problems that are accepted. Each consists of the exact text or code
/// location, and the reason.
const KNOWN: [(&str, &str); 3] = [
    (
        "Speculative Return Stack Overflow: WARNING: See https://",
        "the kernel's advice about a processor's weakness, which says nothing of what happened",
    ),
    (
        "RETBleed: WARNING: Spectre v2 mitigation leaves CPU vulnerable to RETBleed attacks",
        "the same, of Intel signatures",
    ),
    ("Spectre V2 : WARNING: Unprivileged eBPF is enabled", "the same"),
];

/// Returns the kernel messages about problems, except for known ones.
pub fn complaints(dmesg: &str) -> Vec<&str> {
    dmesg
        .lines()
        .filter(|line| COMPLAINTS.iter().any(|word| line.contains(word)))
        .filter(|line| !KNOWN.iter().any(|(place, _)| line.contains(place)))
        .collect()
}

/// Reason why a log of the guest's kernel is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KernelLogError {
    /// The first message of the kernel log is missing.
    #[error("kernel messages are missing at the start: {0:?}")]
    Beginning(String),
    /// The kernel log contains too few messages, or their number is missing.
    #[error("incomplete kernel log: {0:?} messages")]
    Few(String),
    /// The kernel reported problems.
    #[error("errors in the guest's kernel log:\n{}", .0.join("\n"))]
    Complaints(Vec<String>),
}

/// Checks that the section `kernel-log` of a guest's console is complete and reports no problem.
///
/// # Errors
/// Returns a [`KernelLogError`] if the kernel reported a problem or the log is incomplete.
pub fn judge_kernel_log(section: &str) -> Result<(), KernelLogError> {
    let mut lines = section.lines();
    let (first, count) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    if !first.contains("Linux version") {
        return Err(KernelLogError::Beginning(first.to_owned()));
    }
    match count.trim().parse::<u32>() {
        Ok(count) if count >= 50 => {}
        _ => return Err(KernelLogError::Few(count.to_owned())),
    }
    let found = complaints(section);
    if found.is_empty() {
        Ok(())
    } else {
        let found = found.into_iter().map(str::to_owned);
        Err(KernelLogError::Complaints(found.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: &str = "[    0.000000] Linux version 6.1.0-56-cloud-amd64\n387\n\
        [    0.1] spectre_v2_user: Vulnerable, no microcode warning\n";

    #[test]
    fn kernel_log_with_complaint_is_rejected() {
        assert_eq!(judge_kernel_log(SOUND), Ok(()));
        for complaint in [
            "Uhhuh. NMI received for unknown reason 3d on CPU 0.",
            "Dazed and confused, but trying to continue",
            "unchecked MSR access error: WRMSR to 0x1d9 (tried to write 0x4) at rIP: 0xffffffff81069a84",
            "WARNING: CPU: 0 PID: 0 at arch/x86/kernel/fpu/xstate.c:6055 paranoid_xstate_size_valid+0x4a",
            "WARNING: arch/x86/kernel/fpu/xstate.c:639 at fpu__init_system_xstate+0x4fd/0xc20, CPU#0: swapper/0/0",
            "rcu: INFO: rcu_preempt self-detected stall on CPU",
            "watchdog: BUG: soft lockup - CPU#1 stuck for 22s!",
            "perfevents: irq loop stuck!",
        ] {
            let why = judge_kernel_log(&format!("{SOUND}[    9.9] {complaint}\n")).unwrap_err();
            assert!(why.to_string().contains(complaint), "{why}");
        }
    }

    #[test]
    fn known_complaint_is_accepted_at_its_location_only() {
        let advice = "Speculative Return Stack Overflow: WARNING: See https://kernel.org/doc/html/latest/srso.html for options.";
        assert_eq!(judge_kernel_log(&format!("{SOUND}[    0.3] {advice}\n")), Ok(()));
        for other in [
            "Speculative Return Stack Overflow: WARNING: something else",
            "WARNING: CPU: 0 PID: 0 at arch/x86/kernel/fpu/xstate.c:605 paranoid_xstate_size_valid+0x4a",
        ] {
            assert!(
                judge_kernel_log(&format!("{SOUND}[    0.3] {other}\n")).is_err(),
                "{other}"
            );
        }
    }

    #[test]
    fn incomplete_kernel_log_is_rejected() {
        assert!(judge_kernel_log("").is_err());
        assert!(judge_kernel_log("[    9.0] something later\n400\n").is_err());
        assert!(judge_kernel_log("[    0.0] Linux version 6.1\n3\n").is_err());
    }

    #[test]
    fn refined_tsc_frequency_is_preferred() {
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
