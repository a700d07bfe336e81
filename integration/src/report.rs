//! Reports the progress of tests that use a test host, and the times that they take.
//!
//! Messages are written directly to standard error, because the test harness shows the output of a
//! failed test only at its end, and that of a passing test never. The latest times of each test are
//! saved in `target/integration/times.tsv`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::artefacts;

/// Interval between two progress reports.
const PERIOD: Duration = Duration::from_secs(10);
/// Header line of the file `times.tsv`.
const HEADING: &str = "# test\tseconds\tseconds waited\tplace";

static LABS: AtomicU32 = AtomicU32::new(0);
static LABS_MS: AtomicU64 = AtomicU64::new(0);
static GUESTS: AtomicU32 = AtomicU32::new(0);

/// Adds a booted lab and its boot time to the totals.
pub(crate) fn lab_booted(time: Duration) {
    LABS.fetch_add(1, Ordering::Relaxed);
    let ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    LABS_MS.fetch_add(ms, Ordering::Relaxed);
}

/// Adds a started Linux guest to the totals.
pub(crate) fn guest_started() {
    GUESTS.fetch_add(1, Ordering::Relaxed);
}

/// A test that uses a test host or waits for one.
#[derive(Debug, Clone)]
struct TestActivity {
    test: String,
    since: Instant,
    /// Name of the test host, and the time that the test waited for it. `None` while the test
    /// waits.
    place: Option<(String, Duration)>,
}

/// Times of a test: seconds of use, seconds of waiting, and the name of the test host.
#[derive(Debug, Clone, Default, PartialEq)]
struct TestTimes {
    seconds: f64,
    waited: f64,
    place: String,
}

#[derive(Default)]
struct ProgressReport {
    next: u64,
    activities: BTreeMap<u64, TestActivity>,
    /// Times of the tests of this process, by test name.
    times: BTreeMap<String, TestTimes>,
}

static REPORT: Mutex<ProgressReport> = Mutex::new(ProgressReport {
    next: 0,
    activities: BTreeMap::new(),
    times: BTreeMap::new(),
});

fn report() -> MutexGuard<'static, ProgressReport> {
    REPORT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The period in which a test uses a test host, from its request until this value is dropped.
#[derive(Debug)]
pub(crate) struct HostUse(u64);

impl HostUse {
    /// Records that the test of the calling thread has requested a test host.
    pub(crate) fn begin() -> Self {
        static ONCE: Once = Once::new();
        let thread = thread::current();
        // The harness names test threads after their tests. Other programs print their own
        // progress.
        if let Some(name) = thread.name().filter(|name| *name != "main") {
            ONCE.call_once(start);
            let mut report = report();
            report.next += 1;
            let id = report.next;
            let activity = TestActivity {
                test: name.to_owned(),
                since: Instant::now(),
                place: None,
            };
            report.activities.insert(id, activity);
            return Self(id);
        }
        Self(0)
    }

    /// Records that the test has received the test host named `place`.
    pub(crate) fn runs_in(&self, place: &str) {
        if let Some(activity) = report().activities.get_mut(&self.0) {
            activity.place = Some((place.to_owned(), activity.since.elapsed()));
            activity.since = Instant::now();
        }
    }
}

impl Drop for HostUse {
    fn drop(&mut self) {
        let mut report = report();
        let Some(activity) = report.activities.remove(&self.0) else {
            return;
        };
        let Some((place, waited)) = activity.place else {
            return;
        };
        let times = report.times.entry(activity.test).or_default();
        times.seconds += activity.since.elapsed().as_secs_f64();
        times.waited += waited.as_secs_f64();
        times.place = place;
        keep(&report.times);
    }
}

/// Prints a line to standard error. The test harness does not capture it.
fn print_line(line: &str) {
    // Ignore the error, because standard error may be closed.
    _ = writeln!(io::stderr(), "{line}");
}

/// Starts the thread that prints progress, and registers the totals to be printed at exit.
fn start() {
    sum_up_at_exit();
    if io::stderr().is_terminal() {
        return;
    }
    let began = Instant::now();
    thread::spawn(move || {
        loop {
            thread::sleep(PERIOD);
            let activities: Vec<TestActivity> = report().activities.values().cloned().collect();
            if let Some(line) = progress(&activities) {
                print_line(&format!("{:.0?}: {line}", began.elapsed()));
            }
        }
    });
}

/// Formats the tests that use or await a test host in one line. Returns `None` if there are none.
fn progress(activities: &[TestActivity]) -> Option<String> {
    let mut line = String::new();
    for activity in activities {
        if let Some((place, _)) = &activity.place {
            let separator = if line.is_empty() { "" } else { ", " };
            let seconds = activity.since.elapsed().as_secs();
            _ = write!(line, "{separator}{} for {seconds} s in {place}", activity.test);
        }
    }
    let waiting = activities
        .iter()
        .filter(|activity| activity.place.is_none())
        .count();
    if waiting > 0 {
        _ = write!(
            line,
            "{}waiting or booting: {waiting}",
            if line.is_empty() { "" } else { "; " }
        );
    }
    (!line.is_empty()).then_some(line)
}

#[expect(unsafe_code, reason = "registers a function with the C library")]
fn sum_up_at_exit() {
    extern "C" fn sum_up() {
        let seconds = Duration::from_millis(LABS_MS.load(Ordering::Relaxed)).as_secs_f64();
        print_line(&format!(
            "{} labs booted in {seconds:.1} s, {} Linux guests started; times of tests: times.tsv in target/integration",
            LABS.load(Ordering::Relaxed),
            GUESTS.load(Ordering::Relaxed),
        ));
    }
    // SAFETY: `sum_up` has the signature required by atexit(3). It uses only statics, which are
    // never destroyed, and does not unwind, because it ignores write errors.
    unsafe { libc::atexit(sum_up) };
}

fn times_file() -> Option<PathBuf> {
    Some(artefacts::log_dir().ok()?.join("times.tsv"))
}

/// Saves the times in the file `times.tsv`, replacing earlier times of the same tests. Errors are
/// ignored, because the times are only informational.
fn keep(times: &BTreeMap<String, TestTimes>) {
    let Some(file) = times_file() else { return };
    let mut all = read(&fs::read_to_string(&file).unwrap_or_default());
    all.extend(times.clone());
    let mut text = format!("{HEADING}\n");
    for (test, times) in &all {
        _ = writeln!(
            text,
            "{test}\t{:.1}\t{:.1}\t{}",
            times.seconds, times.waited, times.place
        );
    }
    // Replace the file atomically, for other processes that read it.
    let new = file.with_extension(format!("tsv-{}", std::process::id()));
    if fs::write(&new, text).is_ok() {
        _ = fs::rename(&new, &file);
    }
}

/// Parses the contents of the file `times.tsv`. Skips invalid rows.
fn read(text: &str) -> BTreeMap<String, TestTimes> {
    let row = |line: &str| {
        let mut columns = line.split('\t');
        let test = columns.next()?.to_owned();
        let times = TestTimes {
            seconds: columns.next()?.parse().ok()?,
            waited: columns.next()?.parse().ok()?,
            place: columns.next()?.to_owned(),
        };
        Some((test, times))
    };
    text.lines().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_lists_running_and_counts_waiting_tests() {
        let activity = |test: &str, place: Option<&str>| TestActivity {
            test: test.to_owned(),
            since: Instant::now(),
            place: place.map(|place| (place.to_owned(), Duration::ZERO)),
        };
        assert_eq!(progress(&[]), None);
        let waits = activity("b::c", None);
        assert_eq!(
            progress(std::slice::from_ref(&waits)).unwrap(),
            "waiting or booting: 1"
        );
        let line = progress(&[activity("a::b", Some("lab-1")), waits]).unwrap();
        assert_eq!(line, "a::b for 0 s in lab-1; waiting or booting: 1");
    }

    #[test]
    fn times_file_round_trips_and_skips_damaged_rows() {
        let text = format!("{HEADING}\na::b\t1.5\t0.0\tlab-1\nc::d\tx\t0.0\tlab-1\ne::f\t1.0\n");
        let times = read(&text);
        assert_eq!(times.len(), 1);
        assert_eq!(times["a::b"].seconds, 1.5);
    }
}
