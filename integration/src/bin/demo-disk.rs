//! `make demo-disk`: boots a Debian disk image to a login, counts and samples with the guest's
//! perf, and fetches the recording over vsock.

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use integration::debian::{DebianTestHost, PROMPT, says};
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::process::HostCommand;
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;
const NAME: &str = "debian";
/// fio command that reads the running image's disk at random offsets, bypassing the guest's page
/// cache.
const FIO: &str = "fio --name=reads --filename=/dev/vda --readonly --direct=1 --rw=randread --bs=4k --iodepth=16 \
                   --ioengine=libaio --time_based --runtime=3 | grep -E 'read:|cpu'";
/// Shell command that tries to record a program with rr. The command succeeds even if rr cannot
/// record.
const RR: &str = "rr record -n true 2>&1 | grep . | head -n 4";

fn main() -> ExitCode {
    match show() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo-disk: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the guest's recording `data` with the host's perf, and returns the text.
fn report_recording(place: &TestHost, data: &str) -> Result<String, Box<dyn Error>> {
    let report = HostCommand::shell(format!(
        "perf report --stdio --sort comm,dso -i '{data}' 2>/dev/null | grep -v '^#' | grep . | head -n 12"
    ));
    println!("$ {}", report.line());
    let text = place.run(&report, LIMIT)?.stdout_text();
    print!("{text}");
    Ok(text)
}

/// Boots Debian from a disk image and records it.
fn show() -> Result<(), Box<dyn Error>> {
    let debian = DebianTestHost::new(
        1,
        LabOptions {
            perf: true,
            ..LabOptions::default()
        },
    )?;
    let place = &debian.place;
    println!("The guest runs {}.", place.describe());
    let perfvisor = place.perfvisor()?;
    let command = debian.command(NAME, 0)?.args(["--memory", "1G", "--vsock"]);
    println!("$ {}", command.line());
    let started = Instant::now();
    let mut vm = place.start(&command)?;
    says(&vm, "login:", LIMIT)?;
    println!("Login after {:.0} s.", started.elapsed().as_secs_f64());
    vm.write(b"root\n")?;
    says(&vm, PROMPT, LIMIT)?;
    println!("Logged in as root.");

    let run = |words: &[&str]| -> Result<(), Box<dyn Error>> {
        let command = HostCommand::new(&perfvisor).args(words.iter().copied());
        println!("$ {}", command.line());
        let output = place.run(&command, LIMIT)?;
        print!("{}{}", output.stdout_text(), output.stderr_text());
        if output.success() {
            Ok(())
        } else {
            Err(format!("{}: {:?}", command.line(), output.ended).into())
        }
    };
    let load = "stress-ng --cpu 1 --cpu-method matrixprod --timeout 3s";
    run(&[
        "exec",
        "--wait",
        "60",
        NAME,
        "--",
        "perf",
        "stat",
        "-e",
        "cycles,instructions,task-clock",
        "sh",
        "-c",
        load,
    ])?;
    let record = format!("perf record -q -F 500 -o /root/perf.data {load}");
    run(&["exec", NAME, "--", "sh", "-c", &record])?;
    run(&["exec", NAME, "--", "sh", "-c", FIO])?;
    // rr checks the PMU at startup and reports missing features (docs/guide/debian.md).
    run(&["exec", NAME, "--", "sh", "-c", RR])?;
    let data = place.scratch("demo-disk.data");
    run(&["cp", &format!("{NAME}:/root/perf.data"), &data])?;
    let shown = report_recording(place, &data)?.contains("stress-ng");
    run(&["ctl", NAME, "powerdown"])?;
    let end = vm.wait(LIMIT)?;
    println!("The guest has powered off, status {:?}.", end.code());
    if shown && end.code() == Some(0) {
        Ok(())
    } else {
        Err("the report does not show the load, or the guest did not end well".into())
    }
}
