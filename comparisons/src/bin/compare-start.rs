//! Compares the start of a small Linux guest under Perfvisor and under QEMU's microvm and pc
//! machines, alternately in one lab: the time until the guest's init runs, and the memory of the
//! VMM at that point (`make compare-start`).
//!
//! Kernel, initrd, command line, memory and vCPUs are the same. Prints a table of medians and
//! writes all values to a file.

use std::process::ExitCode;

use clap::{Parser, value_parser};
use comparisons::{
    ComparisonError, by_turns, cell, exit_code, lab, qemu, run_until_output, spread, write_figures,
};
use integration::footprint::footprint;
use integration::guest::LinuxGuest;
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::process::HostCommand;
use integration::qemu_comparison::{MICROVM_FIRMWARE, PC_FIRMWARE, qemu_files};
use integration::test_host::TestHost;
use serde_json::json;

const GUEST_MIB: u32 = 256;
/// Guest script, which idles until the VM is killed.
const SCRIPT: &str = "sleep 100000";
/// Text that the guest's init prints first.
const INIT: &str = "@@pv boot";

/// Compares the time until a Linux guest's init runs under Perfvisor and under QEMU, alternately in
/// the lab.
#[derive(clap::Parser)]
#[command(name = "compare-start")]
struct Options {
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = value_parser!(u32).range(1..=99))]
    rounds: u32,
}

/// Measured values of one start of a VM.
#[derive(Debug, Clone, Copy, serde::Serialize)]
struct Start {
    /// Time from the start of the VMM (exec) to the first output line of the guest's init, in
    /// seconds, according to this machine's clock.
    init_s: f64,
    /// Resident memory of the VMM, excluding guest memory, in KiB.
    rss_kib: u64,
    /// Anonymous resident memory of the VMM, excluding guest memory, in KiB.
    anonymous_kib: u64,
}

fn main() -> ExitCode {
    exit_code("compare-start", compare(Options::parse().rounds))
}

fn compare(rounds: u32) -> Result<bool, ComparisonError> {
    let mut files = qemu_files(&PC_FIRMWARE)?;
    // Some firmware files are used by both machines.
    for file in MICROVM_FIRMWARE {
        let name = file.trim_start_matches('/').to_owned();
        if files.iter().all(|(other, _)| *other != name) {
            files.push((name, file.into()));
        }
    }
    let place = lab(&LabOptions {
        files,
        ..LabOptions::default()
    })?;
    println!("{}; {rounds} rounds by turns", place.describe());
    let ours = LinuxGuest::new("compare-start", "off")
        .memory_mib(GUEST_MIB)
        .script(SCRIPT)
        .command(&place)?;
    let with_pmu = LinuxGuest::new("compare-start", "auto")
        .memory_mib(GUEST_MIB)
        .script(SCRIPT)
        .command(&place)?;
    let ways = [
        ("Perfvisor, --pmu off", ours.clone()),
        ("Perfvisor, with a PMU", with_pmu),
        ("QEMU, microvm", of_qemu(&ours, "microvm")?),
        ("QEMU, pc", of_qemu(&ours, "pc")?),
    ];
    for (way, command) in &ways {
        println!("{way}: $ {}", command.line());
    }
    let names = ways.each_ref().map(|(way, _)| *way);
    let all = by_turns(rounds, &names, |_, n| turn(&place, &ways[n].1))?;
    println!(
        "| | exec to the guest's init, s | resident beyond the guest's, MB | the same without pages of files, MB |"
    );
    println!("|---|---|---|---|");
    for (way, starts) in &all {
        let of = |what: fn(&Start) -> f64| cell(spread(starts.iter().map(what)), 2);
        println!(
            "| {way} | {} | {} | {} |",
            of(|start| start.init_s),
            of(|start| start.rss_kib as f64 / 1024.0),
            of(|start| start.anonymous_kib as f64 / 1024.0)
        );
    }
    let figures = json!({ "rounds": rounds, "place": place.describe(), "figures": all });
    write_figures("compare-start", &figures)?;
    Ok(true)
}

/// Returns the command that runs the guest of `perfvisor` under QEMU's machine `machine`.
fn of_qemu(perfvisor: &HostCommand, machine: &str) -> Result<HostCommand, ComparisonError> {
    let value = |flag: &str| {
        let mut words = perfvisor.argv.iter().skip_while(|word| *word != flag);
        let value = words.nth(1).map(String::as_str);
        value.ok_or_else(|| format!("no {flag} in {}", perfvisor.line()))
    };
    let (kernel, initrd) = (value("--kernel")?, value("--initrd")?);
    Ok(qemu(machine, GUEST_MIB.into(), kernel, initrd, value("--cmdline")?).args(["-smp", "1"]))
}

/// Boots one VM, measures the VMM when the guest's init runs, and kills the VMM.
fn turn(place: &TestHost, command: &HostCommand) -> Result<Start, ComparisonError> {
    run_until_output(place, command, INIT, ProcessTimeLimits::GENEROUS, |init_s| {
        let held = footprint(place, GUEST_MIB.into())?;
        Ok(Start {
            init_s,
            rss_kib: held.rss_kib,
            anonymous_kib: held.anonymous_kib,
        })
    })
}
