//! Jumps of the host's wall clock by a day in both directions while a VM runs, is counted and is
//! recorded. A preloaded library simulates the jumps for the tested programs only.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::machine::Machine;
use crate::common::skip::skipped;
use crate::common::test_lock;
use crate::common::vm::eventually;

/// A library that reports the wall-clock time alternately a day ahead and a day behind, and counts
/// the requests in a file. The library makes no system call that libc would not make.
const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int (*real)(clockid_t, struct timespec *);
static atomic_uint own, *asked = &own;

__attribute__((constructor)) static void begin(void) {
    real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int fd = open(ASKED, O_RDWR);
    void *page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED)
        asked = page;
    close(fd);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int status = real(id, now);
    if (status == 0 && id == CLOCK_REALTIME)
        now->tv_sec += atomic_fetch_add(asked, 1) % 2 ? 86400 : -86400;
    return status;
}

time_t time(time_t *to) {
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    if (to)
        *to = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    struct timespec now = {0};
    int status = clock_gettime(CLOCK_REALTIME, &now);
    (void)zone;
    if (to) {
        to->tv_sec = now.tv_sec;
        to->tv_usec = now.tv_nsec / 1000;
    }
    return status;
}
"#;

/// Builds the library and returns its path and that of the request counter. Returns `None` without
/// a C compiler.
fn jumping_clock(directory: &Path) -> Option<(PathBuf, PathBuf)> {
    let (library, asked) = (directory.join("jumps.so"), directory.join("asked"));
    fs::write(directory.join("jumps.c"), LIBRARY).unwrap();
    fs::write(&asked, [0; 4096]).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .args([&library, &directory.join("jumps.c")])
        .arg(format!("-DASKED=\"{}\"", asked.display()))
        .arg("-ldl")
        .status();
    match compiled {
        Ok(status) => assert!(status.success(), "{status}"),
        Err(e) => {
            skipped(&format!("no C compiler: {e}"), false);
            return None;
        }
    }
    Some((library, asked))
}

/// Returns how often programs have requested the wall-clock time.
fn times_asked(asked: &Path) -> u32 {
    let bytes = fs::read(asked).unwrap();
    u32::from_ne_bytes(bytes[..4].try_into().unwrap())
}

/// Neither waits nor measurements depend on the wall clock: an operation of a third of a second
/// takes and reports that time.
#[test]
fn a_clock_that_is_set_changes_no_count_and_no_wait() {
    let directory = tempfile::tempdir().unwrap();
    let Some((library, asked)) = jumping_clock(directory.path()) else {
        return;
    };
    // The guest must run within each measurement of 0.3 s.
    let _lock = test_lock::exclusive();
    let args = ["--cmdline", "loop", "--stop-timeout", "5"];
    let Some(mut vm) = Machine::start_with(&args, ("LD_PRELOAD", &library)) else {
        return;
    };
    vm.line_with("spinning");
    let data = directory.path().join("perf.data");
    let run = |args: &[&str]| {
        let mut command = vm.command(args);
        let command = command.env("LD_PRELOAD", &library).stdin(Stdio::null());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.unwrap();
        // The output fits into the pipe.
        eventually(&format!("{args:?} ends"), || child.try_wait().unwrap().is_some());
        let out = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(0), "{args:?}: {said}");
        String::from_utf8(out.stdout).unwrap() + &said
    };
    for _ in 0..3 {
        let text = run(&["stat", "machine", "-d", "0.3", "-e", "cycles"]);
        let elapsed = text
            .lines()
            .find_map(|line| line.strip_suffix("seconds time elapsed"));
        let elapsed_s: f64 = elapsed
            .unwrap_or_else(|| panic!("{text}"))
            .trim()
            .parse()
            .unwrap();
        assert!((0.3..86_000.0).contains(&elapsed_s), "{text}");
        assert!(!text.contains("<not counted>"), "{text}");
    }
    let text = run(&["stat", "machine", "-I", "100", "-d", "0.4", "-e", "cycles"]);
    let times = text
        .lines()
        .filter(|line| line.contains("cycles"))
        .map(|line| line.split_whitespace().next().unwrap().parse::<f64>().unwrap());
    let times: Vec<f64> = times.collect();
    assert!(!times.is_empty() && times.is_sorted(), "{text}");
    assert!(times.iter().all(|s| (0.0..86_000.0).contains(s)), "{text}");
    run(&["exits", "machine", "-d", "0.3"]);
    run(&["ps"]);

    let before = times_asked(&asked);
    let file = data.to_str().unwrap();
    run(&[
        "record", "machine", "-q", "-d", "0.5", "-c", "1000000", "-o", file,
    ]);
    assert!(times_asked(&asked) > before, "a recording keeps the time of day");
    let script = vm.operator(&["script", "-i", file]);
    assert!(script.contains("cycles"), "{script}");

    vm.operator(&["ctl", "machine", "stop"]);
    assert_eq!(vm.status(), Some(0), "{:?}", vm.said());
}
