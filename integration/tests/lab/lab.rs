//! Tests the lab host itself: it boots, has a KVM, and its agent is reliable.

use std::time::Duration;

use integration::guest::LinuxGuest;
use integration::lab::{Lab, LabOptions};
use integration::lease::{TestHostLeaseError, TestHostLeaseMode};
use integration::limit::ProcessTimeLimits;
use integration::process::{HostCommand, ProcessRunError};
use integration::test_host::{LabHost, TestHost};

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// The lab host has a KVM and a reliable agent. All checks share one boot, because booting takes
/// longer than the checks.
#[test]
fn lab_has_kvm_and_reliable_agent() {
    let options = LabOptions {
        memory_mib: 2048,
        ..LabOptions::default()
    };
    let host = LabHost::boot(&options).unwrap_or_else(|error| panic!("{error}"));
    let lab: &Lab = &host.last();
    eprintln!(
        "lab: Linux {} up after {:?}",
        lab.kernel_release(),
        lab.boot_time()
    );

    // Check KVM's nested paging and the device node.
    let kvm = lab.start(&HostCommand::shell(
        "cat /sys/module/kvm_amd/parameters/npt; ls /dev/kvm",
    ));
    let output = kvm.unwrap().wait(LIMIT).unwrap();
    assert!(output.success(), "{}", output.stderr_text());
    assert_eq!(output.stdout_text(), "Y\n/dev/kvm\n");

    // Check both streams, the exit status and the environment.
    let command = HostCommand::shell("echo out $PV_TEST; echo err >&2; exit 7").env("PV_TEST", "x");
    let output = lab.start(&command).unwrap().wait(LIMIT).unwrap();
    assert_eq!(output.stdout_text(), "out x\n");
    assert_eq!(output.stderr_text(), "err\n");
    assert_eq!(output.code(), Some(7));

    // Limitations of the host are reported as information, not as errors.
    let check = lab.start(&HostCommand::new("perfvisor").args(["check"])).unwrap();
    let output = check.wait(LIMIT).unwrap();
    assert!(output.success(), "{}", output.stderr_text());
    assert!(
        output.stdout_text().contains("vhost-net               yes"),
        "{}",
        output.stdout_text()
    );
    assert!(
        !output.stderr_text().contains("error:"),
        "{}",
        output.stderr_text()
    );

    // Check input, two concurrent processes, and signals.
    let mut cat = lab.start(&HostCommand::new("cat")).unwrap();
    let sleeper = lab.start(&HostCommand::shell("echo ready; sleep 1000")).unwrap();
    cat.write(b"hello").unwrap();
    assert!(cat.wait_for("hello", LIMIT) && sleeper.wait_for("ready", LIMIT));
    cat.close_stdin().unwrap();
    assert_eq!(cat.wait(LIMIT).unwrap().stdout, b"hello");
    let mut sleeper = sleeper;
    sleeper.signal(libc::SIGTERM);
    assert_eq!(sleeper.wait(LIMIT).unwrap().ended.signal, Some(libc::SIGTERM));

    // Time limits are enforced, and the lab remains usable afterwards.
    let hangs = lab.start(&HostCommand::shell("echo stuck; sleep 1000")).unwrap();
    assert!(hangs.wait_for("stuck", LIMIT));
    let error = hangs.wait(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, ProcessRunError::TimedOut { .. }), "{error}");

    // Transfer files with arbitrary contents, larger than a frame, in both directions.
    let data: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
    lab.put("/tmp/a/b", 0o755, &data).unwrap();
    assert_eq!(lab.get("/tmp/a/b").unwrap(), data);
    lab.put("/tmp/empty", 0o600, &[]).unwrap();
    assert_eq!(lab.get("/tmp/empty").unwrap(), b"");

    // Operations that fail return an error.
    let error = lab.get("/no/such/file").unwrap_err().to_string();
    assert!(
        error.contains("/no/such/file") && error.contains("No such file"),
        "{error}"
    );
    let error = lab.put("/proc/nothing", 0o600, b"x").unwrap_err().to_string();
    assert!(error.contains("/proc/nothing"), "{error}");
    let missing = lab.start(&HostCommand::new("/no/such/program")).unwrap();
    let error = missing.wait(LIMIT).unwrap_err();
    assert!(matches!(error, ProcessRunError::Start { .. }), "{error}");

    // If the lab terminates, the error contains the end of its console, and a new lab replaces it.
    let death = HostCommand::shell("echo last words >/dev/console; echo o >/proc/sysrq-trigger; sleep 60");
    let error = lab.start(&death).unwrap().wait(LIMIT).unwrap_err();
    assert!(matches!(error, ProcessRunError::LabGone { .. }), "{error}");
    let error = error.to_string();
    assert!(
        error.contains("last words") && error.contains("exit status: 0"),
        "{error}"
    );
    assert!(lab.is_gone());
    let place = TestHost::Lab(host);
    let output = place.run(&HostCommand::shell("echo alive"), LIMIT).unwrap();
    assert_eq!(output.stdout_text(), "alive\n");

    // A lab that hangs is also replaced by a new one.
    let TestHost::Lab(host) = &place else {
        unreachable!()
    };
    host.replace_if_hung();
    assert!(!host.last().is_gone(), "this one does not hang");
    let hang = HostCommand::shell("kill -STOP $(pidof lab-agent)");
    let stopped = host.last().start(&hang).unwrap();
    stopped.wait(Duration::from_secs(2)).unwrap_err();
    // The emulator still reports the state of its processors, one more than guests can use.
    let processors = host.last().instruction_pointers(2, Duration::ZERO).unwrap();
    assert_eq!(processors.len(), 3, "{processors:?}");
    assert!(processors.values().all(|seen| seen.len() == 2), "{processors:?}");
    host.replace_if_hung();
    assert!(host.last().is_gone());
    let output = place.run(&HostCommand::shell("echo alive again"), LIMIT).unwrap();
    assert_eq!(output.stdout_text(), "alive again\n");

    // A hung guest is diagnosed before it is killed. As with the boot of the lab, the time to start
    // depends on the machine.
    let TestHost::Lab(host) = &place else {
        unreachable!()
    };
    let begun = 3 * host.last().boot_time() + Duration::from_secs(8);
    let error = LinuxGuest::new("does-not-end", "amd")
        .script("echo begun; perf stat -e cycles spin 1000")
        .limit(begun)
        .run(&place)
        .err()
        .unwrap()
        .to_string();
    for told in [
        "begun",
        "the lab answers",
        "vcpu0 state",
        "2 s later",
        "task-clock",
        "# Samples:",
        "pvload+",
        "CPU#2",
    ] {
        assert!(error.contains(told), "no {told:?} in {error}");
    }
}

/// A leased lab contains no remains of earlier tests.
#[test]
fn leased_lab_is_cleaned() {
    for round in 0..2 {
        let place = TestHost::lab(TestHostLeaseMode::Shared).unwrap_or_else(|error| panic!("{error}"));
        let shell = |line: &str| {
            let output = place.run(&HostCommand::shell(line), LIMIT).unwrap();
            assert!(output.success(), "{line}: {}", output.stderr_text());
            output.stdout_text()
        };
        let found = shell("ls -A /tmp /run; ls /sys/class/net");
        assert!(!found.contains("left"), "round {round}: {found}");
        shell("touch /tmp/left; mkdir -p /run/perfvisor; tunctl -t pvleft >/dev/null");
        // A second lease in the same thread could deadlock.
        assert!(matches!(
            TestHost::lab(TestHostLeaseMode::Shared),
            Err(TestHostLeaseError::Pool(_))
        ));
    }
}
