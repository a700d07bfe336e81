//! Tests the messages for invalid input and unusable hosts that require modifying the host. The
//! other messages are tested in `integration/tests/host/cli.rs`.

use integration::lease::TestHostLeaseMode;
use integration::limit::ProcessTimeLimits;
use integration::process::HostCommand;
use integration::test_host::TestHost;

use crate::refusal::check_refusal;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// `perfvisor` reports how to fix a host that it cannot use. The test breaks the lab in several
/// ways, and repairs it afterwards.
#[test]
fn unusable_hosts_are_reported_with_remedy() {
    let place = TestHost::lab(TestHostLeaseMode::Shared).unwrap_or_else(|error| panic!("{error}"));
    let run = |line: &str| {
        place
            .run(&HostCommand::shell(line), LIMIT)
            .unwrap_or_else(|error| panic!("{error}"))
    };
    let linux = "perfvisor run --kernel /guest/vmlinux";

    let output = run(&format!("{linux} --initrd /guest/initrd --memory 64M"));
    check_refusal(
        &output,
        "initrd larger than memory",
        &["/guest/initrd", "--memory"],
    );
    let output = run(&format!("{linux} --memory 16M"));
    check_refusal(&output, "kernel larger than memory", &["--memory"]);
    let output = run(&format!("{linux} --initrd /no/such/initrd"));
    check_refusal(&output, "no such initrd", &["/no/such/initrd"]);
    let output = run("perfvisor run --backing hardware");
    check_refusal(&output, "hardware backing without a PMU", &["hardware"]);

    let output = run(
        "mode=$(stat -c %a /dev/kvm); chmod 600 /dev/kvm; echo 'nobody:x:99:99::/:/bin/sh' >>/etc/passwd; \
         su -s /bin/sh nobody -c 'perfvisor run'; s=$?; chmod $mode /dev/kvm; sed -i /^nobody:/d /etc/passwd; exit $s",
    );
    check_refusal(&output, "permission denied", &["/dev/kvm", "permission"]);
    let output = run("mv /dev/kvm /dev/away; perfvisor run; s=$?; mv /dev/away /dev/kvm; exit $s");
    check_refusal(&output, "no /dev/kvm", &["/dev/kvm"]);
}
