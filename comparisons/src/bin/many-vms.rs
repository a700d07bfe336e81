//! Measures the cost of a guest on a host with several VMs, each with four active counters, while
//! an operator runs `perfvisor exporter` and `perfvisor record --all`. The exporter is scraped once
//! a second.
//!
//! Every guest does the same work. The cost is the CPU time of the VM's threads during the work,
//! divided by the guest's own CPU time. The guest's counters measure the latter with a clock that
//! excludes the work of the VMM. The result therefore depends neither on the time spent waiting for
//! a processor nor on the speed of the processor. Each number of VMs is measured with and without
//! an operator. The measurement without an operator shows the cost of the host and of the VM
//! itself.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, value_parser};
use comparisons::{ComparisonError, Killed, exit_code, median, write_json};
use integration::artefacts::beside;
use serde_json::json;

/// Maximum ratio of the cost per guest with the largest number of VMs to the cost with the smallest
/// number. A target of the project.
const MOST_MORE: f64 = 1.10;
/// Counter setup of the bare-metal guest: the AMD event "cycles" at CPL 3 in each of four counters.
/// Counts are derived from the vCPU's clock, so no host PMU is required.
const COUNTERS: &str = "c=0x10076 c=0x10076 c=0x10076 c=0x10076";

/// Measures the cost of a guest, alone and with others, with four active counters, an exporter and
/// record --all.
#[derive(clap::Parser)]
#[command(name = "many-vms")]
struct Options {
    /// Use this perfvisor binary
    #[arg(long, value_name = "FILE", default_value_os_t = beside("perfvisor"))]
    perfvisor: PathBuf,
    /// Measure these numbers of VMs, alternately
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_values_t = [1, 2, 10, 50],
        value_parser = value_parser!(u8).range(1..=200))]
    vms: Vec<u8>,
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = value_parser!(u8).range(1..=200))]
    rounds: u8,
    /// Set the number of iterations of the measured loop
    #[arg(long, value_name = "N", default_value_t = 3_000_000_000,
        value_parser = value_parser!(u64).range(1..=1 << 40))]
    work: u64,
    /// Also write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Results of one round of measurements with one number of VMs.
#[derive(Clone, Copy)]
struct Turn {
    /// Median CPU time that a VM's process uses while its guest runs the workload, in seconds.
    guest_s: f64,
    /// Median ratio of a VM's CPU time to its guest's CPU time. The latter is counted by the guest.
    over_own: f64,
    /// CPU time that the VM uses in excess of the guest's own CPU time, as a fraction of one CPU.
    beyond: f64,
    /// CPU times of the exporter and of the recorder per VM, as a fraction of one CPU.
    exporter: f64,
    recorder: f64,
    scrapes: u64,
}

fn main() -> ExitCode {
    exit_code("many-vms", measure(&Options::parse()))
}

/// Returns the CPU time of all current threads of a process, in seconds
/// (/proc/PID/task/TID/schedstat).
fn cpu_s(pid: u32) -> f64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let times = tasks.filter_map(|task| {
        let text = fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    });
    times.sum::<f64>() / 1e9
}

/// A child process with line-based input and output.
struct Talker {
    child: Killed,
    stdin: ChildStdin,
    lines: BufReader<std::process::ChildStdout>,
}

impl Talker {
    fn start(command: &mut Command) -> Result<Self, ComparisonError> {
        let mut child = Killed(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
        let stdin = child.0.stdin.take().ok_or("no stdin")?;
        let lines = BufReader::new(child.0.stdout.take().ok_or("no stdout")?);
        Ok(Self { child, stdin, lines })
    }

    fn send_line(&mut self, line: &str) -> Result<(), ComparisonError> {
        writeln!(self.stdin, "{line}")?;
        Ok(self.stdin.flush()?)
    }

    /// Reads lines until one contains `words`, and returns this line.
    fn wait_for_line(&mut self, words: &str) -> Result<String, ComparisonError> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line)? == 0 {
                return Err(format!("it ended without {words:?}").into());
            }
            if line.contains(words) {
                return Ok(line);
            }
        }
    }

    fn cpu_s(&self) -> f64 {
        cpu_s(self.child.0.id())
    }
}

/// Runs the workloads of all guests concurrently and returns the CPU time of each VM, in seconds.
/// `begin` starts the workload of one guest, and `end` waits for its end.
fn all_at_once(
    all: Vec<Talker>,
    begin: impl Fn(&mut Talker) -> Result<(), ComparisonError>,
    end: impl Fn(&mut Talker) -> Result<(), ComparisonError> + Send + Clone + 'static,
) -> Result<(Vec<f64>, Vec<Talker>), ComparisonError> {
    let mut all = all;
    let before: Vec<f64> = all.iter().map(Talker::cpu_s).collect();
    for one in &mut all {
        begin(one)?;
    }
    // Wait for each guest in a separate thread, so that the CPU time of its VM is read when its own
    // workload ends.
    let waiting: Vec<_> = all
        .into_iter()
        .zip(before)
        .map(|(mut one, before)| {
            let end = end.clone();
            std::thread::spawn(move || {
                let ended = end(&mut one).map_err(|error| error.to_string());
                (ended.map(|()| one.cpu_s() - before), one)
            })
        })
        .collect();
    let mut times = Vec::new();
    let mut back = Vec::new();
    for thread in waiting {
        let (time, one) = thread.join().map_err(|_| "a waiting thread panicked")?;
        times.push(time?);
        back.push(one);
    }
    Ok((times, back))
}

/// Scrapes the metrics of all VMs once a second until `stop` is set.
fn scrape(socket: PathBuf, stop: Arc<AtomicBool>, done: Arc<AtomicU64>) {
    while !stop.load(Ordering::Relaxed) {
        let asked = UnixStream::connect(&socket).and_then(|mut stream| {
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")?;
            let mut text = Vec::new();
            stream.read_to_end(&mut text)?;
            Ok(text.windows(5).any(|w| w == b"# EOF"))
        });
        if asked.unwrap_or(false) {
            done.fetch_add(1, Ordering::Relaxed);
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Returns a `perfvisor` command that finds its VMs' sockets in the directory `place`.
fn perfvisor(options: &Options, place: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(&options.perfvisor);
    command
        .args(arguments)
        .env("XDG_RUNTIME_DIR", place)
        .stderr(Stdio::null());
    command
}

/// Starts `vms` VMs and waits until their guests are ready. Returns the guests and their TSC
/// frequency in Hz.
fn guests(options: &Options, vms: usize, place: &Path) -> Result<(Vec<Talker>, f64), ComparisonError> {
    let mut guests = Vec::new();
    let mut tsc_hz = 0.0;
    for n in 0..vms {
        let name = format!("many-{n}");
        let fixed = "run --builtin validate --pmu amd --memory 32M --name";
        let words: Vec<&str> = fixed.split(' ').chain([&*name]).collect();
        let mut guest = Talker::start(&mut perfvisor(options, place, &words))?;
        let hello = guest
            .wait_for_line("hello")
            .map_err(|error| format!("VM {n}: {error}"))?;
        tsc_hz = serde_json::from_str::<serde_json::Value>(&hello)?["tsc_hz"]
            .as_f64()
            .ok_or("no tsc_hz")?;
        guest.send_line(&format!(
            "measure work=busy n={} cpl=3 {COUNTERS} f=0 period=0 cpus=1",
            options.work
        ))?;
        guest
            .wait_for_line("ready")
            .map_err(|error| format!("VM {n}: {error}"))?;
        guests.push(guest);
    }
    Ok((guests, tsc_hz))
}

/// Starts a command of an operator, such as `perfvisor exporter`, that runs during the measurement.
fn operator(options: &Options, place: &Path, arguments: &[&str]) -> Result<Killed, ComparisonError> {
    let mut command = perfvisor(options, place, arguments);
    Ok(Killed(command.stdout(Stdio::null()).spawn()?))
}

/// Returns two medians over all VMs: the ratio of the VM's CPU time to its guest's CPU time, and
/// the excess of the former over the latter, as a fraction of one CPU. `passed` is the elapsed time
/// in seconds, multiplied by the number of VMs.
fn over_and_beyond(
    guests: &mut [Talker],
    guest_s: &[f64],
    tsc_hz: f64,
    passed: f64,
) -> Result<(f64, f64), ComparisonError> {
    let vms = guests.len() as f64;
    let (mut over_own, mut beyond) = (Vec::new(), Vec::new());
    for (guest, cpu_s) in guests.iter_mut().zip(guest_s) {
        guest.send_line("")?;
        let result: serde_json::Value = serde_json::from_str(&guest.wait_for_line("\"result\"")?)?;
        let cycles = result["cpus"][0]["c"][0]
            .as_f64()
            .ok_or("a result without a count")?;
        over_own.push(cpu_s / (cycles / tsc_hz));
        beyond.push((cpu_s - cycles / tsc_hz) * vms / passed);
    }
    Ok((median(over_own), median(beyond)))
}

/// Measures `vms` VMs that are neither scraped nor recorded. Returns the median ratio of VM to
/// guest CPU time.
fn turn_unobserved(options: &Options, vms: usize, place: &Path) -> Result<f64, ComparisonError> {
    let (guests, tsc_hz) = guests(options, vms, place)?;
    let began = Instant::now();
    let (guest_s, mut guests) =
        all_at_once(guests, |g| g.send_line(""), |g| g.wait_for_line("done").map(drop))?;
    let passed = began.elapsed().as_secs_f64() * vms as f64;
    Ok(over_and_beyond(&mut guests, &guest_s, tsc_hz, passed)?.0)
}

/// Measures `vms` VMs while all are scraped and recorded.
fn turn(options: &Options, vms: usize, place: &Path) -> Result<Turn, ComparisonError> {
    let (guests, tsc_hz) = guests(options, vms, place)?;
    let socket = place.join("exporter");
    let listen = format!("unix:{}", socket.display());
    let exporter = operator(options, place, &["exporter", "--listen", &listen])?;
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let files = place.join(format!("recorded-{vms}"));
    fs::create_dir(&files)?;
    let output = files.join("data").display().to_string();
    let recorder = operator(options, place, &["record", "--all", "-o", &output])?;
    std::thread::sleep(Duration::from_secs(1));
    let (stop, scrapes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let scraper = std::thread::spawn({
        let (stop, scrapes) = (Arc::clone(&stop), Arc::clone(&scrapes));
        move || scrape(socket, stop, scrapes)
    });
    let (began, exporter_s, recorder_s) = (Instant::now(), cpu_s(exporter.0.id()), cpu_s(recorder.0.id()));
    let (guest_s, mut guests) =
        all_at_once(guests, |g| g.send_line(""), |g| g.wait_for_line("done").map(drop))?;
    let passed = began.elapsed().as_secs_f64() * vms as f64;
    let spent = |pid, before| (cpu_s(pid) - before) / passed;
    let (exporter_share, recorder_share) = (
        spent(exporter.0.id(), exporter_s),
        spent(recorder.0.id(), recorder_s),
    );
    stop.store(true, Ordering::Relaxed);
    scraper.join().map_err(|_| "the scraper panicked")?;
    let (over_own, beyond) = over_and_beyond(&mut guests, &guest_s, tsc_hz, passed)?;
    drop((guests, exporter, recorder));
    let recorded: Vec<u64> = fs::read_dir(&files)?
        .flatten()
        .filter_map(|file| Some(file.metadata().ok()?.len()))
        .collect();
    fs::remove_dir_all(&files)?;
    if recorded.len() != vms || scrapes.load(Ordering::Relaxed) == 0 {
        return Err(format!(
            "{} of {vms} VMs were recorded, and there were {} scrapes",
            recorded.len(),
            scrapes.load(Ordering::Relaxed)
        )
        .into());
    }
    fs::remove_file(place.join("exporter")).ok();
    Ok(Turn {
        guest_s: median(guest_s),
        over_own,
        beyond,
        exporter: exporter_share,
        recorder: recorder_share,
        scrapes: scrapes.load(Ordering::Relaxed),
    })
}

fn measure(options: &Options) -> Result<bool, ComparisonError> {
    let place = tempfile::tempdir()?;
    let mut turns: Vec<Vec<Turn>> = vec![Vec::new(); options.vms.len()];
    let mut unobserved: Vec<Vec<f64>> = vec![Vec::new(); options.vms.len()];
    for round in 0..options.rounds {
        for (n, &vms) in options.vms.iter().enumerate() {
            eprintln!("round {} of {}: {vms} VMs", round + 1, options.rounds);
            turns[n].push(turn(options, vms.into(), place.path())?);
            unobserved[n].push(turn_unobserved(options, vms.into(), place.path())?);
        }
    }
    let of = |n: usize, what: fn(&Turn) -> f64| median(turns[n].iter().map(what));
    println!(
        "VMs  CPU s a guest  over its own time  with no operator  beyond it, of a CPU  exporter, of a CPU for a VM  record --all, the same  scrapes"
    );
    let mut rows = Vec::new();
    for (n, &vms) in options.vms.iter().enumerate() {
        let ratio = of(n, |t| t.over_own);
        let (guest_s, exporter, recorder) =
            (of(n, |t| t.guest_s), of(n, |t| t.exporter), of(n, |t| t.recorder));
        let alone = median(unobserved[n].clone());
        let scrapes: u64 = turns[n].iter().map(|t| t.scrapes).sum();
        println!(
            "{vms:3}  {guest_s:13.2}  {ratio:17.3}  {alone:16.3}  {:18.2} %  {:24.3} %  {:18.3} %  {scrapes:7}",
            100.0 * of(n, |t| t.beyond),
            100.0 * exporter,
            100.0 * recorder
        );
        rows.push(json!({
            "vms": vms, "guest_cpu_s": guest_s, "over_own_time": ratio, "unobserved_over_own_time": alone,
            "beyond_own_time_per_s": of(n, |t| t.beyond),
            "exporter_cpu_per_vm": exporter, "recorder_cpu_per_vm": recorder, "scrapes": scrapes,
        }));
    }
    let last = options.vms.len() - 1;
    let more = of(last, |t| t.over_own) / of(0, |t| t.over_own);
    let met = more <= MOST_MORE;
    println!(
        "a guest among {} over one among {}, each over its own time: {more:.3} (wanted: at most {MOST_MORE}): {}",
        options.vms[last],
        options.vms[0],
        if met { "met" } else { "MISSED" }
    );
    let more_unobserved = median(unobserved[last].clone()) / median(unobserved[0].clone());
    println!("the same with no operator: {more_unobserved:.3}");
    if let Some(path) = &options.json {
        let figures = json!({ "rows": rows, "more": more, "more_unobserved": more_unobserved });
        write_json(path, &figures)?;
    }
    Ok(met)
}
