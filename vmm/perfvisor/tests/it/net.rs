//! `run --net`: an unusable tap device is reported in one line with a remedy.

use std::process::Command;

use crate::common::vm::{PROGRAM, assert_contains, has_kvm};

/// Returns the error line of a VM that must not start.
fn refused(nets: &[&str]) -> String {
    let mut command = Command::new(PROGRAM);
    command.arg("run").env_remove("RUST_LOG");
    for net in nets {
        command.args(["--net", net]);
    }
    let out = command.output().unwrap();
    let line = String::from_utf8(out.stderr).unwrap();
    assert_eq!((out.status.code(), line.lines().count()), (Some(2), 1), "{line}");
    line
}

#[test]
fn invalid_net_options_are_reported() {
    for (net, words) in [
        ("tap0", "must be tap=NAME"),
        ("tap=a/b", "between 1 and 15 bytes"),
        ("tap=a,mac=01:00:00:00:00:01", "the first byte must be even"),
        ("tap=a,queues=2", "queues=2"),
    ] {
        let line = refused(&[net]);
        assert!(line.contains("--net") && line.contains(words), "{line}");
    }
}

#[test]
fn missing_tap_device_is_not_created() {
    if !has_kvm() {
        return;
    }
    let line = refused(&["tap=pv-no-such-tap"]);
    assert_contains(&line, "ip tuntap add dev pv-no-such-tap mode tap user");
    assert!(!std::path::Path::new("/sys/class/net/pv-no-such-tap").exists());
}
