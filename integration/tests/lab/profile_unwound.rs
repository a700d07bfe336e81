//! Tests profiling of unmodified programs from the host. A Debian program with shared libraries and
//! without frame pointers is unwound with the unwind tables in guest memory and symbolized with its
//! exported symbols, without access to the guest's files. A Go program has no unwind tables in
//! memory, so other methods are tested with it.

use integration::artefacts;
use integration::guest::LinuxGuest;
use integration::measure::skipped;
use integration::process::HostCommand;
use integration::test_host::TestHost;

use crate::common::{loaded, perfvisor, run};

/// Guest script that compresses the perf binary in an endless loop, in threads of the compression
/// library and in the program's main thread, which is always within an exported function.
const SCRIPT: &str = r#"
section load sh -c "echo load-has-begun; feed() { while true; do cat /usr/bin/perf; done; }; \
    feed | /usr/bin/xz -T1 -6 >/dev/null & feed | /usr/bin/xz -T2 -6 --block-size=4MiB >/dev/null"
"#;

/// Returns the total weight of the folded stacks of `task` for which `keep` returns `true`.
fn weight(folded: &str, task: &str, keep: impl Fn(&[&str]) -> bool) -> u64 {
    folded
        .lines()
        .filter_map(|line| line.rsplit_once(' '))
        .filter_map(|(stack, weight)| {
            let (of, frames) = stack.split_once(';')?;
            let frames: Vec<&str> = frames.split(';').filter(|_| of == task).collect();
            keep(&frames).then(|| weight.parse::<u64>().ok()).flatten()
        })
        .sum()
}

#[test]
fn stock_program_without_frame_pointers_is_unwound() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let guest = LinuxGuest::new("unwound", "intel-v2")
        .script(SCRIPT)
        .args(["--name", "unwound"]);
    let running = loaded(&place, &guest);
    let ours = perfvisor(&place);
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
    // The first thread starts in libc's exported start code. Other threads start in non-exported
    // functions of libc, followed by the library that created the thread.
    let begins = |frames: &[&str]| {
        let of = |at: usize, file: &str| frames.get(at).is_some_and(|frame| frame.starts_with(file));
        let mut first = frames.iter().take(3);
        first.any(|frame| frame.starts_with("__libc_start_main"))
            || of(0, "libc.so.6") && (of(1, "liblzma") || of(1, "libc.so.6") && of(2, "liblzma"))
    };
    let all = weight(&folded, "xz", |frames| frames.iter().any(&user));
    let whole = weight(&folded, "xz", begins);
    let by_fp = (
        weight(&fp, "xz", |frames| frames.iter().any(&user)),
        weight(&fp, "xz", begins),
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
    // The recorder's statistics. A chain is complete only if it reached an outermost frame.
    let numbers: Vec<u64> = said
        .lines()
        .find(|line| line.contains("samples had a user stack"))
        .unwrap()
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|word| word.parse().ok())
        .collect();
    assert!(
        numbers[0] > 300 && numbers[1] * 100 >= numbers[0] * 90,
        "{numbers:?}"
    );
    // liblzma's exported names are resolved without a file.
    let named = weight(&folded, "xz", |frames| {
        frames.iter().any(|frame| frame.contains("lzma_code"))
    });
    assert!(named > 0, "{folded}");
}

/// Source of a Go program that sorts strings in an endless loop. It uses goroutines, whose stacks
/// are allocated and moved by Go's runtime.
const GO: &str = r#"package main

import ("fmt"; "os"; "sort"; "strings")

//go:noinline
func churn(n int) int {
	words := make([]string, 0, n)
	for i := 0; i < n; i++ {
		words = append(words, fmt.Sprintf("%d", (i*7919)%n))
	}
	sort.Strings(words)
	return len(strings.Join(words, ","))
}

//go:noinline
func work(rounds int) (sum int) {
	for i := 0; i < rounds; i++ {
		sum += churn(2000)
	}
	return
}

func main() {
	fmt.Println("load-has-begun")
	for work(1000) != 0 {
	}
	os.Exit(1)
}
"#;

/// Builds the Go program [`GO`] and returns its contents, or `None` if Go is not installed.
fn go_program() -> Option<Vec<u8>> {
    let directory = artefacts::log_dir().unwrap().join("go");
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("main.go"), GO).unwrap();
    let built = std::process::Command::new("go")
        .args(["build", "-o", "churn", "main.go"])
        .current_dir(&directory)
        .envs([("CGO_ENABLED", "0"), ("GO111MODULE", "off"), ("GOFLAGS", "")])
        .env("GOCACHE", directory.join("cache"))
        .output();
    match built {
        Ok(out) => {
            assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
            Some(std::fs::read(directory.join("churn")).unwrap())
        }
        Err(_) => None,
    }
}

/// A Go program is unwound to `main.main` in three ways: with the `.debug_frame` of the program's
/// file; without the file in mode `dwarf`, which follows frame pointers at addresses that no unwind
/// table covers; and in mode `fp`.
#[test]
fn go_program_is_unwound_to_main() {
    let Some(program) = go_program() else {
        return skipped("no Go here (Debian: golang-go)", false);
    };
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    let root = place.scratch("go-root");
    run(&place, &HostCommand::shell(format!("mkdir -p {root}/bin")));
    place.put(&format!("{root}/bin/churn"), 0o755, &program).unwrap();
    let guest = LinuxGuest::new("go", "intel-v2")
        .script("section load /bin/churn")
        .file("bin/churn", 0o755, program)
        .args(["--name", "go"]);
    let _running = loaded(&place, &guest);
    let ours = perfvisor(&place);
    let data = place.scratch("go.data");
    for (how, with_file) in [("dwarf,32768", true), ("dwarf,32768", false), ("fp", false)] {
        let record = [
            "-v",
            "record",
            "go",
            "-N",
            "-F",
            "100",
            "--chain-every",
            "1",
            "-d",
            "10",
        ];
        let record = [&record[..], &["--call-graph", how, "-o", &data]].concat();
        let files = ["--guestmount", &root];
        let files = if with_file { &files[..] } else { &[] };
        let (_, said) = ours(&[&record[..], files].concat());
        let (folded, _) = ours(&["flamegraph", "-i", &data, "--folded", "--guestmount", &root]);
        // Select the functions called by main.main, excluding the runtime's own goroutines and the
        // scheduler's stack.
        let own = |frame: &&str| {
            ["main.", "sort.", "fmt.", "strings."]
                .iter()
                .any(|of| frame.starts_with(of))
        };
        let all = weight(&folded, "churn", |frames| frames.iter().any(own));
        let whole = weight(&folded, "churn", |frames| frames.contains(&"main.main"));
        eprintln!("{how}, the file at hand: {with_file}: {whole} of {all} lead to main.main\n{said}");
        assert!(
            all > 0 && whole * 100 >= all * 90,
            "{how}, {with_file}: {whole} of {all}\n{folded}"
        );
    }
    ours(&["ctl", "go", "stop"]);
}
