//! Tests that a VM can be run, counted and recorded while the lab's clock is repeatedly set one day
//! ahead and back.

use integration::lab::LabOptions;
use integration::lease::TestHostLeaseMode;
use integration::measure::skipped;
use integration::process::HostCommand;
use integration::test_host::TestHost;

use crate::common::{LIMIT, perfvisor, run};

/// Returns a command that repeatedly sets the lab's clock one day ahead and back, until the file
/// `stop` exists.
fn clock_setter(stop: &str) -> HostCommand {
    let set = |sign: char| format!("date -s @$(($(date +%s) {sign} 86400)) >/dev/null; sleep 0.05");
    HostCommand::shell(format!(
        "until [ -e {stop} ]; do {}; {}; done",
        set('+'),
        set('-')
    ))
}

#[test]
fn clock_changes_affect_no_count_and_no_wait() {
    if TestHost::is_direct().unwrap_or_else(|error| panic!("{error}")) {
        skipped("the clock of this machine is not ours to set", false);
        return;
    }
    let place = TestHost::lease(&LabOptions::default(), TestHostLeaseMode::Exclusive);
    let place = place.unwrap_or_else(|error| panic!("{error}"));
    let vm = HostCommand::new(place.perfvisor().unwrap())
        .args([
            "-v",
            "run",
            "--name",
            "jumps",
            "--memory",
            "32M",
            "--cmdline",
            "loop",
        ])
        .args(["--stop-timeout", "5"]);
    let vm = place.start(&vm).unwrap();
    assert!(vm.wait_for("spinning", LIMIT), "{}", vm.stdout_so_far());
    let (stop, data) = (place.scratch("stop"), place.scratch("jumps.data"));
    let setter = place.start(&clock_setter(&stop)).unwrap();

    let ours = perfvisor(&place);
    let ours = |args: &[&str]| {
        let (stdout, stderr) = ours(args);
        stdout + &stderr
    };
    for _ in 0..3 {
        let text = ours(&["stat", "jumps", "-d", "0.3", "-e", "cycles"]);
        let elapsed = text
            .lines()
            .find_map(|line| line.strip_suffix("seconds time elapsed"));
        let elapsed_s: f64 = elapsed
            .unwrap_or_else(|| panic!("{text}"))
            .trim()
            .parse()
            .unwrap();
        assert!((0.3..80_000.0).contains(&elapsed_s), "{text}");
        assert!(!text.contains("<not counted>"), "{text}");
    }
    let text = ours(&["stat", "jumps", "-I", "100", "-d", "0.4", "-e", "cycles"]);
    let rows = text.lines().filter(|line| line.contains("cycles"));
    let times_s: Vec<f64> = rows
        .map(|line| line.split_whitespace().next().unwrap().parse().unwrap())
        .collect();
    assert!(!times_s.is_empty() && times_s.is_sorted(), "{text}");
    assert!(times_s.iter().all(|s| (0.0..80_000.0).contains(s)), "{text}");
    ours(&["exits", "jumps", "-d", "0.3"]);
    ours(&["ps"]);
    ours(&["record", "jumps", "-q", "-d", "0.5", "-c", "1000000", "-o", &data]);
    let script = ours(&["script", "-i", &data]);
    assert!(script.contains("cycles"), "{script}");
    ours(&["ctl", "jumps", "stop"]);
    let ended = vm.wait(LIMIT).unwrap();
    assert!(ended.success(), "{}", ended.stderr_text());

    run(&place, &HostCommand::shell(format!("touch {stop}")));
    assert!(setter.wait(LIMIT).unwrap().success());
}
