//! Profiling a Linux guest from outside: kernel found in its memory, tasks named, chains through kernel and program.

use std::time::Duration;

use integration::guest::LinuxGuest;
use integration::place::Place;
use integration::process::Command;

const LIMIT: Duration = Duration::from_secs(120);

/// Three functions at 60, 30 and 10 % of a program's time, and system calls.
const SCRIPT: &str = r#"
section load sh -c "echo load-has-begun; while true; do three 2; syscalls 200000; done"
"#;

#[test]
fn the_host_sees_kernel_and_program_of_a_linux_guest() {
    let place = Place::shared().unwrap();
    let guest = LinuxGuest::new("profiled", "intel-v2")
        .script(SCRIPT)
        .args(["--name", "profiled"]);
    let running = place.start(&guest.command(&place).unwrap()).unwrap();
    assert!(
        running.wait_for("load-has-begun", LIMIT),
        "{}",
        running.stdout_so_far()
    );
    let perfvisor = place.perfvisor().unwrap();
    let data = place.scratch("profiled.data");
    let run = |args: &[&str]| {
        let command = Command::new(perfvisor.clone()).args(args.iter().copied());
        let output = place.run(&command, LIMIT).unwrap();
        assert!(output.success(), "{args:?}: {}", output.stderr_text());
        (output.stdout_text(), output.stderr_text())
    };
    let (_, said) = run(&["-v", "record", "profiled", "-F", "500", "-d", "8", "-o", &data]);
    eprintln!("{said}");
    assert!(said.contains("stacks by ORC, tasks named"), "{said}");
    let (report, _) = run(&["report", "-i", &data, "--sort", "comm,sym"]);
    let (folded, _) = run(&["flamegraph", "-i", &data, "--folded"]);
    eprintln!("{}", report.lines().take(30).collect::<Vec<_>>().join("\n"));
    run(&["ctl", "profiled", "stop"]);
    drop(running);

    // Tasks by their names, and kernel functions by theirs.
    assert!(
        report.contains("three") && report.contains("syscalls"),
        "{report}"
    );
    let kernel_part = |line: &&str| line.starts_with("syscalls;") && line.contains(";do_syscall_64_[k];");
    let chains: Vec<&str> = folded.lines().filter(kernel_part).collect();
    assert!(!chains.is_empty(), "{folded}");
    // They begin in the program: the task comes first, then its user frames, then the kernel's entry.
    let from_user = chains
        .iter()
        .filter(|line| line.contains("[guest user];") && line.contains(";entry_SYSCALL_64"))
        .count();
    assert!(from_user * 10 >= chains.len() * 9, "{folded}");
}
