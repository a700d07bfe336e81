//! Tests sharing a host directory with a Linux guest (virtio-fs). Host and guest read files that
//! the other one wrote, a read-only shared directory remains unchanged, and a backend process that
//! exits can be replaced.
//!
//! virtiofsd and its libraries are copied from this machine to the lab.

use std::path::{Path, PathBuf};

use integration::guest::LinuxGuest;
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::measure::skipped;
use integration::process::HostCommand;
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// Paths at which Debian installs virtiofsd: as a part of QEMU until Debian 12, and as a separate
/// package since then.
const PLACES: [&str; 2] = ["/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"];

/// Shell command that creates the shared directory on the host.
const HOST: &str = "mkdir -p /tmp/build/sub /tmp/other && echo from the host >/tmp/build/sub/hello && \
     head -c 3000000 /dev/urandom >/tmp/build/blob && echo stays >/tmp/other/file && sha256sum /tmp/build/blob";

/// Guest script in two parts. The second part starts after the backend process virtiofsd has been
/// killed.
const SCRIPT: &str = r#"
drivers
mkdir -p /mnt/build /mnt/other
section mount sh -c 'mount -t virtiofs build /mnt/build && mount -t virtiofs share1 /mnt/other && grep virtiofs /proc/mounts'
section hello cat /mnt/build/sub/hello
section blob sha256sum /mnt/build/blob
section write sh -c 'echo from the guest >/mnt/build/answer && head -c 2000000 /dev/urandom >/mnt/build/back && sync && sha256sum /mnt/build/back'
section record perf record -q -o /mnt/build/perf.data -e cycles spin 0.3
section other sh -c 'cat /mnt/other/file; echo x >/mnt/other/file; true'
section after cat /mnt/other/file
echo marker-kill
until [ -e /mnt/other/died ]; do sleep 0.2; done
section again sh -c 'umount /mnt/build; until mount -t virtiofs build /mnt/build; do sleep 0.5; done; cat /mnt/build/sub/hello'
"#;

/// Returns `program` and its shared libraries as files to add to the lab. The paths in the lab and
/// on this machine are the same.
fn with_libraries(program: &str) -> Vec<(String, PathBuf)> {
    let ldd = std::process::Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(ldd.stdout).unwrap();
    let libraries = text.split_whitespace().filter(|word| word.starts_with('/'));
    let files = libraries.chain([program]);
    files
        .map(|path| (path.trim_start_matches('/').to_owned(), PathBuf::from(path)))
        .collect()
}

fn shell(place: &TestHost, script: &str) -> String {
    let output = place.run(&HostCommand::shell(script), LIMIT).unwrap();
    assert!(output.success(), "{script}: {}", output.stderr_text());
    output.stdout_text()
}

fn first_word(text: &str) -> &str {
    text.split_whitespace().next().unwrap_or_default()
}

#[test]
fn shared_directory_is_visible_on_both_sides() {
    let Some(program) = PLACES.into_iter().find(|place| Path::new(place).exists()) else {
        skipped("virtiofsd is not installed", true);
        return;
    };
    let options = LabOptions {
        files: with_libraries(program),
        ..LabOptions::default()
    };
    let place = TestHost::choose(&options).unwrap_or_else(|error| panic!("{error}"));
    if matches!(place, TestHost::Direct(_)) {
        skipped(
            "the test shares directories and kills their back end, which it does in the lab only",
            false,
        );
        return;
    }
    let sum = shell(&place, HOST);
    let guest = LinuxGuest::new("share", "amd")
        .script(SCRIPT)
        .limit(LIMIT)
        .args(["--share-dir", "/tmp/build,tag=build,sandbox=chroot"])
        .args(["--share-dir", "/tmp/other,ro,sandbox=chroot"])
        .args(["--name", "share", "-v"]);
    let running = place.start(&guest.command(&place).unwrap()).unwrap();
    let came = running.wait_for("marker-kill", LIMIT);
    if came {
        // Kill the first directory's backend, and notify the guest through the second directory.
        shell(
            &place,
            "kill -9 $(for p in $(pidof virtiofsd); do tr '\\0' ' ' </proc/$p/cmdline | grep -q /tmp/build && echo $p; done); \
             echo x >/tmp/other/died",
        );
    }
    let run = guest.finish(&running.wait(guest.limits()).unwrap()).unwrap();
    assert!(came, "{run}");
    assert_eq!(run.section("hello").trim_end(), "from the host", "{run}");
    assert_eq!(first_word(run.section("blob")), first_word(&sum), "{run}");
    assert_eq!(
        shell(&place, "cat /tmp/build/answer"),
        "from the guest\n",
        "{run}"
    );
    let back = shell(&place, "sha256sum /tmp/build/back");
    assert_eq!(first_word(&back), first_word(run.section("write")), "{run}");
    assert_eq!(
        shell(&place, "head -c 8 /tmp/build/perf.data"),
        "PERFILE2",
        "{run}"
    );
    let other = run.section("other");
    assert!(other.contains("stays") && other.contains("ead-only"), "{run}");
    assert_eq!(run.section("after").trim_end(), "stays", "{run}");
    assert_eq!(
        run.section("again").trim_end().lines().last(),
        Some("from the host"),
        "{run}"
    );
    assert!(run.vmm_log.contains("the back end has exited"), "{run}");
    assert!(run.vmm_log.contains("connected to a new back end"), "{run}");
    // No process remains after the VM has exited.
    let left = shell(
        &place,
        "find /run/perfvisor /tmp/perfvisor-0 -type s 2>/dev/null; pidof virtiofsd; true",
    );
    assert_eq!(left, "", "{run}");
    run.expect_success();
}
