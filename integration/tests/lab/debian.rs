//! Tests the unmodified Debian image built by `make debian`. With each PMU model, the guest boots
//! to a login without failed systemd units, its perf counts, and it is reachable with ssh over a
//! tap device and over vsock.
//!
//! Takes several minutes. Run with `make debian-test`, or with `make debian-test MODELS=intel,amd`
//! to test only these models.

use std::fmt::Write as _;
use std::thread;
use std::time::Instant;

use integration::debian::{DebianTestHost, says};
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::parse::parse_stat_csv;
use integration::process::{HostCommand, ProcessOutput};
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// All values of `--pmu` that always select the same model.
const MODELS: [&str; 10] = [
    "intel", "amd", "amd-v2", "amd-k7", "intel-v1", "intel-v2", "intel-v3", "intel-v4", "intel-v5", "off",
];
/// Number of VMs that boot concurrently.
const AT_ONCE: usize = 2;

/// Returns the PMU models to test: those in the environment variable `PERFVISOR_DEBIAN_MODELS`, or
/// else all.
fn models() -> Vec<String> {
    match std::env::var("PERFVISOR_DEBIAN_MODELS") {
        Ok(chosen) if !chosen.is_empty() => chosen.split(',').map(str::to_owned).collect(),
        _ => MODELS.map(str::to_owned).to_vec(),
    }
}

fn run(place: &TestHost, command: &HostCommand) -> Result<ProcessOutput, String> {
    place.run(command, LIMIT).map_err(|error| error.to_string())
}

/// Runs a command on the test host and returns its standard output, or an error if the command
/// fails.
fn printed(place: &TestHost, command: &HostCommand) -> Result<String, String> {
    let output = run(place, command)?;
    if output.success() {
        return Ok(output.stdout_text());
    }
    Err(format!(
        "{}: {:?}\n{}{}",
        command.line(),
        output.ended,
        output.stdout_text(),
        output.stderr_text()
    ))
}

/// Boots the image with PMU model `pmu` from disk number `disk`, and runs commands of a typical
/// user in it.
fn boots(debian: &DebianTestHost, pmu: &str, disk: usize) -> Result<String, String> {
    let place = &debian.place;
    let perfvisor = place.perfvisor().map_err(|error| error.to_string())?;
    let name = format!("debian-{pmu}");
    let command = debian.command(&name, disk).map_err(|error| error.to_string())?;
    let command = command.args(["--memory", "768M", "--vsock", "--pmu", pmu]);
    let started = Instant::now();
    let vm = place.start(&command).map_err(|error| error.to_string())?;
    says(&vm, "login:", LIMIT).map_err(|error| format!("{pmu}: {error}"))?;
    let login = started.elapsed();
    let exec = |words: &[&str]| {
        let exec = HostCommand::new(&perfvisor).args(["exec", "--wait", "120", &name, "--"]);
        run(place, &exec.args(words.iter().copied()))
    };
    // The command waits for the end of the boot, and its status shows whether units have failed.
    let state = exec(&["systemctl", "is-system-running", "--wait"])?.stdout_text();
    let failed = exec(&["systemctl", "--failed", "--no-legend", "--plain"])?.stdout_text();
    if state.trim() != "running" || !failed.trim().is_empty() {
        return Err(format!("{pmu}: the system is {}: {failed}", state.trim()));
    }
    let load = "stress-ng --cpu 1 --cpu-ops 20";
    let stat = exec(&["perf", "stat", "-x,", "-e", "cycles,task-clock", "sh", "-c", load])?.stderr_text();
    let stat = parse_stat_csv(&stat);
    let cycles = stat.value("cycles").ok();
    if cycles.is_some_and(|cycles| cycles > 1e6) == (pmu == "off") {
        return Err(format!("{pmu}: {cycles:?} cycles: {stat:?}"));
    }
    printed(
        place,
        &HostCommand::new(&perfvisor).args(["ctl", &name, "powerdown"]),
    )?;
    let end = vm.wait(LIMIT).map_err(|error| error.to_string())?;
    if end.code() != Some(0) {
        return Err(format!("{pmu}: {:?}: {}", end.ended, end.stderr_text()));
    }
    let counted = cycles.map_or_else(|| "no cycles".to_owned(), |cycles| format!("{cycles:.3e} cycles"));
    Ok(format!(
        "{pmu}: login after {login:.1?}, {counted}, off after {:.0?}",
        end.elapsed
    ))
}

/// The Debian image boots with every PMU model. Two VMs run at a time, each with its own disk.
#[test]
#[ignore = "minutes: make debian-test"]
fn debian_image_boots_with_every_pmu_model() {
    let options = LabOptions {
        memory_mib: 4096,
        ..LabOptions::default()
    };
    let debian = DebianTestHost::new(2, options).unwrap_or_else(|error| panic!("{error}"));
    let mut failures = String::new();
    for models in models().chunks(AT_ONCE) {
        let results: Vec<_> = thread::scope(|scope| {
            let started: Vec<_> = models
                .iter()
                .enumerate()
                .map(|(disk, pmu)| {
                    let debian = &debian;
                    scope.spawn(move || boots(debian, pmu, disk))
                })
                .collect();
            started.into_iter().map(|thread| thread.join()).collect()
        });
        for result in results {
            match result {
                Ok(Ok(line)) => eprintln!("{line}"),
                Ok(Err(why)) => _ = writeln!(failures, "{why}"),
                Err(_) => failures.push_str("a thread panicked\n"),
            }
        }
    }
    assert!(failures.is_empty(), "{failures}");
}

/// Command that creates the host's tap device. The command keeps running, so its network namespace
/// remains available.
const NAMESPACE: &str =
    "tunctl -t pvtap0 >/dev/null && ip link set pvtap0 up && echo namespace-$$ && exec sleep 86399";
const CHROOT: &str = "mkdir -p /debian && mount -o ro /dev/vdb /debian && mount -t proc proc /debian/proc && \
                      mount --bind /dev /debian/dev && mount -t tmpfs tmp /debian/tmp";

/// The Debian image can be reached by ssh, `perfvisor exec` and `perfvisor cp`, in both directions.
/// ssh uses the link-local address derived from the guest's MAC address, so no address is
/// configured.
#[test]
#[ignore = "minutes: make debian-test"]
fn debian_image_is_reachable_by_ssh_and_vsock() {
    let options = LabOptions::default();
    let debian = DebianTestHost::new(2, options).unwrap_or_else(|error| panic!("{error}"));
    let place = &debian.place;
    if matches!(place, TestHost::Direct(_)) {
        println!("SKIP: the test makes namespaces and mounts, which it does in the lab only");
        return;
    }
    let shell = |line: &str| printed(place, &HostCommand::shell(line)).unwrap_or_else(|why| panic!("{why}"));
    shell(CHROOT);
    let key = std::fs::read(integration::artefacts::target_dir().join("debian/ssh-key")).unwrap();
    place.put("/debian/tmp/key", 0o600, &key).unwrap();
    let namespace = place
        .start(&HostCommand::new("unshare").args(["-n", "sh", "-c", NAMESPACE]))
        .unwrap();
    says(&namespace, "namespace-", LIMIT).unwrap();
    let said = namespace.stdout_so_far();
    let pid = said.trim().rsplit('-').next().unwrap().to_owned();
    let inside = || HostCommand::new("nsenter").args(["-t", &pid, "-n"]);

    let perfvisor = place.perfvisor().unwrap();
    let command = debian.command("reached", 0).unwrap();
    let command = inside().args(command.argv.iter().cloned()).args([
        "--memory",
        "768M",
        "--vsock",
        "--net",
        "tap=pvtap0,mac=02:00:00:00:00:01",
    ]);
    let mut vm = place.start(&command).unwrap();
    says(&vm, "login:", LIMIT).unwrap_or_else(|why| panic!("{why}"));
    let ours = |words: &[&str]| {
        printed(place, &HostCommand::new(&perfvisor).args(words.iter().copied()))
            .unwrap_or_else(|why| panic!("{why}"))
    };
    ours(&[
        "exec",
        "--wait",
        "120",
        "reached",
        "--",
        "systemctl",
        "is-system-running",
        "--wait",
    ]);
    let ssh = |command: &str| {
        let words = [
            "chroot",
            "/debian",
            "ssh",
            "-i",
            "/tmp/key",
            "-o",
            "BatchMode=yes",
        ];
        let known = [
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
            "-o",
            "LogLevel=ERROR",
        ];
        let command = inside()
            .args(words)
            .args(known)
            .args(["root@fe80::ff:fe00:1%pvtap0", command]);
        printed(place, &command).unwrap_or_else(|why| panic!("{why}"))
    };
    assert_eq!(ssh("hostname").trim(), "perfvisor-debian");
    let stat = ssh("perf stat -x, -e cycles stress-ng --cpu 1 --cpu-ops 20 2>&1 >/dev/null");
    let cycles = parse_stat_csv(&stat).value("cycles").unwrap();
    assert!(cycles > 1e6, "{stat}");
    eprintln!("over ssh: {cycles} cycles");

    // Files copied over vsock are visible over ssh, and vice versa.
    shell("head -c 3000000 /dev/urandom >/tmp/there");
    ours(&["cp", "/tmp/there", "reached:/root/there"]);
    let sum = shell("sha256sum </tmp/there");
    assert_eq!(ssh("sha256sum </root/there"), sum);
    let other = ssh("head -c 3000000 /dev/urandom >/root/back && sha256sum </root/back");
    ours(&["cp", "reached:/root/back", "/tmp/back"]);
    assert_eq!(shell("sha256sum </tmp/back"), other);
    assert_eq!(
        ours(&["exec", "reached", "--", "sha256sum", "/root/back"])[..64],
        other[..64]
    );

    // The console accepts a login without a password.
    vm.write(b"root\n").unwrap();
    says(&vm, integration::debian::PROMPT, LIMIT).unwrap_or_else(|why| panic!("{why}"));
    ours(&["ctl", "reached", "powerdown"]);
    let end = vm.wait(LIMIT).unwrap();
    assert_eq!(end.code(), Some(0), "{}", end.stderr_text());
}
