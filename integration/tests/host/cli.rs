//! Tests that invalid input is rejected before anything starts, with exit status 2 and a one-line
//! message that names the input.

use std::fs;
use std::path::Path;

use integration::artefacts;
use integration::limit::ProcessTimeLimits;
use integration::measure::skipped;
use integration::process::{HostCommand, HostProcess, ProcessOutput};
use integration::test_host::{KvmGuestSupport, probe_kvm};

use crate::refusal::check_refusal;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

fn perfvisor() -> &'static Path {
    &artefacts::binaries()
        .unwrap_or_else(|error| panic!("{error}"))
        .perfvisor
}

fn run(arguments: &[&str]) -> ProcessOutput {
    let command = HostCommand::new(perfvisor().to_string_lossy()).args(arguments.iter().copied());
    HostProcess::start_here(&command)
        .and_then(|process| process.wait(LIMIT))
        .unwrap()
}

/// Checks that `perfvisor` rejects the arguments with a one-line message that contains all of
/// `words`.
#[track_caller]
fn refused(arguments: &[&str], words: &[&str]) {
    check_refusal(&run(arguments), &arguments.join(" "), words);
}

#[test]
fn values_out_of_range_name_the_value_and_the_range() {
    refused(&["run", "--cpus", "0"], &["'0'", "between 1 and 64"]);
    refused(&["run", "--cpus", "65"], &["'65'", "between 1 and 64"]);
    refused(&["run", "--memory", "15M"], &["15M", "16M"]);
    refused(&["run", "--memory", "lots"], &["lots"]);
    refused(
        &["run", "--memory", "1000000T"],
        &["1048576000000 MiB", "--memory"],
    );
    refused(&["run", "--pmu", "vax"], &["vax", "intel", "amd"]);
    refused(&["run", "--backing", "guess"], &["guess", "clock"]);
    refused(&["run", "--rdpmc", "maybe"], &["maybe", "trap"]);
    refused(&["run", "--no-such-option"], &["--no-such-option"]);
    refused(&["fly"], &["fly"]);
    refused(&[], &["run"]);
}

/// For common mistakes on the command line, the error message names the invalid value and the
/// correct form of the command.
#[test]
fn cli_mistakes_are_reported_with_remedy() {
    refused(&["recrod"], &["'recrod'", "did you mean 'record'?"]);
    refused(
        &["ctl", "status", "no-such-vm"],
        &["comes first", "perfvisor ctl no-such-vm status"],
    );
    refused(&["ctl", "pause"], &["perfvisor ctl NAME pause"]);
    refused(
        &["ctl", "no-such-vm", "vcpus", "-1"],
        &["'-1'", "between 1 and 64"],
    );
    refused(&["record", "-F", "-1"], &["'-1'", "between 1 and 2^32 - 1"]);
    refused(&["exits", "-i", "-1"], &["'-1'", "above 0"]);
    refused(&["stat", "-e", "cylces"], &["'cylces'", "did you mean 'cycles'?"]);
    refused(&["list", "cylces"], &["'cylces'", "did you mean 'cycles'?"]);
    refused(
        &["list", "vendor", "--cpuid", "Genuine"],
        &["'Genuine'", "GenuineIntel-6-8E-9"],
    );
    // perf has no event table for this CPU ID. If perf is not installed, the message reports that.
    refused(
        &["list", "vendor", "--cpuid", "Nobodys-1-2-3"],
        &["names of the vendor's events are unavailable"],
    );
    for command in ["report", "annotate", "script"] {
        refused(&[command, "-i", "/no/such/file"], &["/no/such/file"]);
    }
    refused(&["diff", "/no/such/file", "/no/other"], &["/no/such/file"]);
}

/// With `--backing kvm`, options that intercept RDPMC or inject PMIs are rejected, because KVM's
/// own vPMU does both itself. If KVM has no vPMU, the message reports that and names an
/// alternative.
#[test]
fn kvm_vpmu_is_rejected_if_missing_or_incompatible() {
    refused(
        &["run", "--backing", "kvm", "--rdpmc", "hwbp"],
        &["--rdpmc hwbp", "KVM handles RDPMC"],
    );
    refused(
        &["run", "--backing", "kvm", "--pmi-limit", "9"],
        &["--pmi-limit", "omit"],
    );
    refused(
        &["run", "--backing", "kvm", "--pmi-share", "off"],
        &["--pmi-share", "omit"],
    );
    let check = run(&["check", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&check.stdout).unwrap();
    let own = &report["own_pmu"];
    let Some(why) = own["Err"].as_str() else {
        assert!(own["Ok"]["pmu"].is_string(), "{own}");
        return;
    };
    refused(
        &["run", "--backing", "kvm"],
        &["--backing kvm: ", why, "--backing auto"],
    );
    refused(&["validate", "--backing", "kvm"], &["--backing kvm: ", why]);
    let text = run(&["check"]).stdout_text();
    assert!(text.contains("--backing kvm"), "{text}");
}

#[test]
fn invalid_kernel_files_are_reported_with_reason() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, data: &[u8]| {
        let path = directory.path().join(name);
        fs::write(&path, data).unwrap();
        path.to_string_lossy().into_owned()
    };
    refused(&["run", "--kernel", "/no/such/kernel"], &["/no/such/kernel"]);
    let directory_path = directory.path().to_string_lossy().into_owned();
    refused(&["run", "--kernel", &directory_path], &["directory"]);
    let text = file("text", b"this is not a kernel\n");
    refused(&["run", "--kernel", &text], &["text", "not a kernel"]);
    let empty = file("empty", b"");
    refused(&["run", "--kernel", &empty], &["empty"]);
    // A disk image is passed as the kernel, which is a common mistake.
    let mut sectors = vec![0; 4096];
    sectors[510..512].copy_from_slice(&[0x55, 0xAA]);
    let disk = file("disk", &sectors);
    let qcow2 = file("qcow2", b"QFI\xfb and so on");
    for image in [&disk, &qcow2] {
        refused(&["run", "--kernel", image], &["is for --disk"]);
    }
    refused(
        &["run", "--disk", &disk],
        &["--disk without --kernel", "--initrd"],
    );
    refused(
        &["run", "--kernel", &text, "--disk", "path=disk"],
        &["path=disk", "--disk FILE"],
    );

    let images = artefacts::images().unwrap_or_else(|error| panic!("{error}"));
    let bz_image = fs::read(&images.bz_image).unwrap();
    let short = file("short-bzimage", &bz_image[..bz_image.len() / 2]);
    refused(&["run", "--kernel", &short], &["short-bzimage", "truncated"]);
    let vmlinux = fs::read(&images.vmlinux).unwrap();
    let short = file("short-vmlinux", &vmlinux[..vmlinux.len() / 2]);
    refused(&["run", "--kernel", &short], &["short-vmlinux", "truncated"]);
}

#[test]
fn linux_on_software_kvm_is_rejected_with_alternative() {
    if probe_kvm() != KvmGuestSupport::SoftwareOnly {
        return skipped(
            "this machine's KVM is not software-only: nothing to refuse",
            false,
        );
    }
    let images = artefacts::images().unwrap_or_else(|error| panic!("{error}"));
    let kernel = images.vmlinux.to_string_lossy();
    refused(&["run", "--kernel", &kernel], &["lab"]);
}
