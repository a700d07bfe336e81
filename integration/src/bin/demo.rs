//! `make demo`: runs a Linux guest whose perf counts and samples.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use integration::artefacts::describe;
use integration::guest::{GuestRun, LinuxGuest};
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::parse::{parse_report, parse_stat, tsc_hz};
use integration::test_host::{KvmGuestSupport, TestHost, TestHostError, probe_kvm};

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

fn main() -> ExitCode {
    let pmu = match std::env::args().nth(1) {
        None => "auto".to_owned(),
        Some(pmu) if !pmu.starts_with('-') => pmu,
        Some(_) => {
            eprintln!("usage: demo [auto|intel|amd]");
            return ExitCode::from(2);
        }
    };
    match show(&pmu) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {}", describe(&error));
            ExitCode::FAILURE
        }
    }
}

/// Runs the demo guest, prints what its perf measures, and returns whether the numbers are as
/// expected.
fn show(pmu: &str) -> Result<bool, TestHostError> {
    match probe_kvm() {
        KvmGuestSupport::Hardware => println!("This machine's /dev/kvm runs Linux guests."),
        KvmGuestSupport::SoftwareOnly => {
            println!("This machine's /dev/kvm has no VT-x or AMD-V behind it and cannot run Linux.")
        }
        KvmGuestSupport::None => println!("This machine has no usable /dev/kvm."),
    }
    let started = Instant::now();
    let place = TestHost::choose(&LabOptions::default())?;
    println!("The guest runs {}.", place.describe());
    let guest = LinuxGuest::new("demo", pmu)
        .named_script("demo")
        .args(["--stats"])
        .limit(LIMIT);
    let command = guest.command(&place)?;
    println!("$ {}", quoted(&command.argv));
    let process = place.start(&command)?;
    let mut lines = ConsolePrinter::default();
    process.follow(LIMIT, |bytes| lines.show(bytes));
    let run = guest.finish(&process.wait(LIMIT)?)?;
    println!("{}", run.vmm_log.trim_end());
    println!();
    let good = verdict(&run);
    println!(
        "The demo took {:.0} s. Console: {}",
        started.elapsed().as_secs_f64(),
        run.log().display()
    );
    Ok(good)
}

/// Prints the counts and samples of the guest's perf. Returns whether they are as expected.
fn verdict(run: &GuestRun) -> bool {
    let text = |name: &str| run.console.sections.get(name).map_or("", |s| s.text.as_str());
    let stat = parse_stat(text("stat"));
    let (Ok(task_clock_ms), Ok(cycles), Some(tsc_hz)) = (
        stat.value("task-clock"),
        stat.value("cycles"),
        tsc_hz(text("dmesg")),
    ) else {
        println!("FAILED: the guest's perf stat did not count cycles.\n{run}");
        return false;
    };
    let hz = cycles / (task_clock_ms / 1e3);
    let samples: u64 = text("count").trim().parse().unwrap_or(0);
    let report = parse_report(text("report"));
    println!(
        "Cycles per second of task-clock: {:.3} GHz, TSC {:.3} GHz, ratio {:.3}.",
        hz / 1e9,
        tsc_hz / 1e9,
        hz / tsc_hz
    );
    println!(
        "Samples: {samples}; heavy {:.1} %, middle {:.1} %, light {:.1} %.",
        report.percent("heavy"),
        report.percent("middle"),
        report.percent("light")
    );
    let good = samples >= 500 && run.console.done == Some(0);
    println!(
        "{}",
        if good {
            "The guest's perf counts and samples."
        } else {
            "FAILED: too few samples."
        }
    );
    good
}

/// Formats a command line for pasting into a shell.
fn quoted(argv: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./:,+".contains(c);
    let words: Vec<String> = argv
        .iter()
        .map(|word| {
            if !word.is_empty() && word.chars().all(plain) {
                word.clone()
            } else {
                format!("'{}'", word.replace('\'', r"'\''"))
            }
        })
        .collect();
    words.join(" ")
}

/// Prints a guest's console line by line, without the lines that are markers for the test runner.
#[derive(Default)]
struct ConsolePrinter {
    rest: Vec<u8>,
}

impl ConsolePrinter {
    fn show(&mut self, bytes: &[u8]) {
        self.rest.extend(bytes.iter().filter(|byte| **byte != b'\r'));
        while let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            if !line.starts_with(b"@@pv ") {
                // A closed pipe ends the output, but not the demo.
                let _ = io::stdout().write_all(&line);
            }
        }
        let _ = io::stdout().flush();
    }
}
