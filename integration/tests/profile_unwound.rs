//! A stock program of Debian, with shared libraries and without frame pointers, profiled from outside: its
//! stacks by the unwind tables in the guest's memory, its functions by the names that they export, and no
//! file of the guest at hand.

use integration::guest::LinuxGuest;
use integration::lab::LabOptions;
use integration::limit::Limit;
use integration::place::Place;
use integration::process::Command;

const LIMIT: Limit = Limit::GENEROUS;

/// Compresses perf for ever: by threads that the library makes, and beside that by the program's own thread,
/// which is always within a function that the library exports.
const SCRIPT: &str = r#"
section load sh -c "echo load-has-begun; feed() { while true; do cat /usr/bin/perf; done; }; \
    feed | /usr/bin/xz -T1 -6 >/dev/null & feed | /usr/bin/xz -T2 -6 --block-size=4MiB >/dev/null"
"#;

/// What a command that must succeed prints, on both streams.
fn run(place: &Place, command: &Command) -> (String, String) {
    let output = place.run(command, LIMIT).unwrap();
    assert!(output.success(), "{}: {}", command.line(), output.stderr_text());
    (output.stdout_text(), output.stderr_text())
}

/// Weight of the folded stacks of `xz`'s threads that `keep` keeps.
fn weight(folded: &str, keep: impl Fn(&[&str]) -> bool) -> u64 {
    folded
        .lines()
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(stack, weight)| {
            let frames: Vec<&str> = stack.strip_prefix("xz;")?.split(';').collect();
            keep(&frames).then(|| weight.parse::<u64>().ok()).flatten()
        })
        .sum()
}

#[test]
fn a_stock_program_without_frame_pointers_is_unwound_to_its_start() {
    let place = Place::choose(&LabOptions::default()).unwrap();
    let guest = LinuxGuest::new("unwound", "intel-v2")
        .script(SCRIPT)
        .args(["--name", "unwound"]);
    let running = place.start(&guest.command(&place).unwrap()).unwrap();
    assert!(
        running.wait_for("load-has-begun", LIMIT),
        "{}",
        running.stdout_so_far()
    );
    let perfvisor = place.perfvisor().unwrap();
    let ours = |args: &[&str]| {
        run(
            &place,
            &Command::new(perfvisor.clone()).args(args.iter().copied()),
        )
    };
    let recorded = |how: &str, data: &str| {
        let (_, said) = ours(&[
            "-v",
            "record",
            "unwound",
            "-F",
            "100",
            "--chain-every",
            "1",
            "--call-graph",
            how,
            "-d",
            "15",
            "-o",
            data,
        ]);
        eprintln!("{said}");
        let (folded, _) = ours(&["flamegraph", "-i", data, "--folded"]);
        (folded, said)
    };
    let (data, by_fp) = (place.scratch("unwound.data"), place.scratch("by-fp.data"));
    let (folded, said) = recorded("dwarf,32768", &data);
    let (fp, _) = recorded("fp", &by_fp);
    let (report, _) = ours(&["report", "-i", &data, "--sort", "comm,dso,sym"]);
    eprintln!("{}", report.lines().take(40).collect::<Vec<_>>().join("\n"));
    ours(&["ctl", "unwound", "stop"]);
    drop(running);

    let user = |frame: &&str| !frame.ends_with("_[k]");
    // The first thread begins in libc's start code, which is exported; the others in functions of libc that
    // are not and are shown as its, and then in the library that made the thread.
    let begins = |frames: &[&str]| {
        let of = |at: usize, file: &str| frames.get(at).is_some_and(|frame| frame.starts_with(file));
        let mut first = frames.iter().take(3);
        first.any(|frame| frame.starts_with("__libc_start_main"))
            || of(0, "libc.so.6") && (of(1, "liblzma") || of(1, "libc.so.6") && of(2, "liblzma"))
    };
    let all = weight(&folded, |frames| frames.iter().any(&user));
    let whole = weight(&folded, begins);
    let by_fp = (
        weight(&fp, |frames| frames.iter().any(&user)),
        weight(&fp, begins),
    );
    eprintln!(
        "by tables {whole} of {all}; by frame pointers {} of {}",
        by_fp.1, by_fp.0
    );
    let example = folded
        .lines()
        .filter(|line| line.starts_with("xz;"))
        .max_by_key(|line| line.len());
    eprintln!("{}", example.unwrap_or_default());
    assert!(all > 0 && whole * 100 >= all * 90, "{whole} of {all}\n{folded}");
    // The recorder's own account: only an outermost frame is one.
    let numbers: Vec<u64> = said
        .lines()
        .find(|line| line.contains("samples had a program's stack"))
        .unwrap()
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|word| word.parse().ok())
        .collect();
    assert!(
        numbers[0] > 300 && numbers[1] * 100 >= numbers[0] * 90,
        "{numbers:?}"
    );
    // Names that liblzma exports, with no file at hand.
    let named = weight(&folded, |frames| {
        frames.iter().any(|frame| frame.contains("lzma_code"))
    });
    assert!(named > 0, "{folded}");
}
