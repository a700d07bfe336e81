//! Linux guests that the tests of several modules share. A guest boots once and runs the scripts of
//! all modules.
//!
//! Each group of tests adds a [`GuestPart`] to the guest with the required configuration, and
//! checks its own sections of the guest's output. Only the parts of selected tests run, so the
//! tests of a single module take no longer than with a separate guest.

use std::error::Error;
use std::sync::OnceLock;

use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::ProcessTimeLimits;
use integration::test_host::TestHost;

use crate::{devices, exact, models, nested, user_rdpmc};

/// Function that adds files and options of a part to a guest, and returns the script of the part.
type AddPart = fn(&TestHost, LinuxGuest) -> Result<(LinuxGuest, String), Box<dyn Error>>;

/// Script, files and options that one group of tests adds to a shared guest.
pub struct GuestPart {
    /// Names of the tests that need this part. The part runs only if at least one of them is
    /// selected.
    pub tests: &'static [&'static str],
    /// Function that makes slow preparations for this part before a test host is leased.
    pub prepare: fn(),
    /// Function that adds files and options of this part to the guest, and returns the script of
    /// the part.
    pub add: AddPart,
}

/// A guest that several tests share. The guest runs once, when the first test requests its results.
pub struct SharedGuest {
    guest: fn() -> LinuxGuest,
    parts: &'static [&'static GuestPart],
    run: OnceLock<Result<GuestRun, String>>,
}

/// A guest with one vCPU, PMU model `amd` and default options.
pub static AMD: SharedGuest = SharedGuest::new(
    || LinuxGuest::new("shared-amd", "amd").args(["--stats", "-v"]),
    &[&models::AMD, &nested::AMD, &user_rdpmc::ANSWERED],
);

/// A single-stepped guest with one vCPU and PMU model `amd`.
pub static STEPPED: SharedGuest = SharedGuest::new(
    || exact::stepped("exact-linux", "amd"),
    &[&exact::USER_MODE, &devices::STEPPED, &exact::KERNEL_MODE],
);

impl SharedGuest {
    const fn new(guest: fn() -> LinuxGuest, parts: &'static [&'static GuestPart]) -> Self {
        Self {
            guest,
            parts,
            run: OnceLock::new(),
        }
    }

    /// Returns the results of the shared guest's run. The first call boots the guest, which
    /// executes the parts of all selected tests.
    #[track_caller]
    pub fn run(&self) -> &GuestRun {
        let run = self
            .run
            .get_or_init(|| self.boot().map_err(|error| error.to_string()));
        run.as_ref().unwrap_or_else(|error| panic!("{error}"))
    }

    fn boot(&self) -> Result<GuestRun, Box<dyn Error>> {
        let is_needed = |part: &&&GuestPart| part.tests.iter().any(|test| is_selected(test));
        let parts: Vec<&GuestPart> = self.parts.iter().filter(is_needed).copied().collect();
        parts.iter().for_each(|part| (part.prepare)());
        let place = TestHost::shared()?;
        let mut guest = (self.guest)().limit(ProcessTimeLimits::GENEROUS);
        let mut scripts = String::new();
        for part in &parts {
            let (with_part, script) = (part.add)(&place, guest)?;
            guest = with_part;
            scripts.push_str(&script);
        }
        let run = guest.script(scripts).run(&place)?;
        eprintln!(
            "shared guest with {} of {} parts: {:.1?}; console: {}",
            parts.len(),
            self.parts.len(),
            run.elapsed,
            run.log().display()
        );
        Ok(run)
    }
}

/// Returns whether this process runs the test `test`.
pub fn is_selected(test: &str) -> bool {
    selects(std::env::args().skip(1), test)
}

/// Returns whether a test harness with the command line `arguments` runs `test`.
fn selects(mut arguments: impl Iterator<Item = String>, test: &str) -> bool {
    const WITH_VALUE: [&str; 6] = [
        "--test-threads",
        "--logfile",
        "--color",
        "--format",
        "--shuffle-seed",
        "-Z",
    ];
    let (mut filters, mut skipped, mut is_exact) = (Vec::new(), Vec::new(), false);
    while let Some(argument) = arguments.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) if name.starts_with('-') => (name, Some(value.to_owned())),
            _ => (argument.as_str(), None),
        };
        match name {
            "--skip" => skipped.extend(value.or_else(|| arguments.next())),
            "--exact" => is_exact = true,
            _ if WITH_VALUE.contains(&name) => {
                if value.is_none() {
                    arguments.next();
                }
            }
            _ if name.starts_with('-') => {}
            _ => filters.push(argument),
        }
    }
    let matches = |filter: &String| match is_exact {
        true => test == filter,
        false => test.contains(filter),
    };
    (filters.is_empty() || filters.iter().any(matches)) && !skipped.iter().any(matches)
}

#[test]
fn test_selection_matches_harness() {
    let selects = |line: &str| selects(line.split_whitespace().map(str::to_owned), "models::amd_core");
    for line in [
        "",
        "models::",
        "nested:: models::",
        "--test-threads 1 --nocapture core",
        "--skip nested::",
        "--exact models::amd_core",
    ] {
        assert!(selects(line), "{line}");
    }
    for line in [
        "nested::",
        "--skip models::",
        "--skip=amd_core",
        "--exact models::amd",
        "--color never nested::",
    ] {
        assert!(!selects(line), "{line}");
    }
}
