//! What sampling costs a guest, the ways to do it side by side.
//!
//! One guest loops at CPL3 and prints a dot for each of equal chunks of work. In turn, round after round, its vCPU is
//! sampled in one of these ways, and the vCPU thread's CPU time for a chunk is compared with that without sampling:
//!
//! - a: no sampling
//! - b: `perf record` on the vCPU's thread: the kernel's samples, without call chains
//! - c: a signal for each sample that takes the vCPU out of `KVM_RUN`, and nothing else: the floor of what is taken from user
//!   space
//! - d: `perfvisor record --chain-every 1`: a call chain with every sample
//! - e: `perfvisor record`: instruction pointers by the kernel, chains now and then
//!
//! The thread's CPU time holds everything that is done on its behalf, interrupts and signals included, and, other than
//! the time on the wall, no time of other programs. But a busy neighbour on the same core or of the same (virtual) machine
//! makes everything slower for seconds on end, by more than what is to be measured. So each way is compared with none in the same
//! round, which is a few seconds; shown are the median of the rounds and their quartiles. A ratio of two slowdowns is
//! given only where the lower one is known to be more than nothing.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use perf_core::pmu::host::{GuestSampler, GuestSamples};

const USAGE: &str = "\
usage: overhead [--perfvisor FILE] [--rounds N] [--seconds S] [--hz N] [--json FILE]
Compares what ways of sampling cost a guest. Wants root, for perf on another process.";

const WAYS: [Way; 5] = [Way::None, Way::Perf, Way::Signal, Way::EveryChain, Way::Default];
/// Chunks of work that are timed together: so many that each stretch has its share of samples of every kind.
const STRETCH: usize = 5;
/// What the project promises of d against c, and of e against b.
const MOST_D_TO_C: f64 = 1.2;
const MOST_E_TO_B: f64 = 1.5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    None,
    Perf,
    Signal,
    EveryChain,
    Default,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::None => "a  no sampling",
            Way::Perf => "b  perf record on the vCPU thread, no chains",
            Way::Signal => "c  a signal for each sample, nothing else",
            Way::EveryChain => "d  perfvisor record --chain-every 1",
            Way::Default => "e  perfvisor record",
        }
    }
}

struct Options {
    perfvisor: PathBuf,
    rounds: usize,
    window: Duration,
    hz: u64,
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            eprintln!("overhead: {message}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match measure(&options) {
        Ok(met) => ExitCode::from(u8::from(!met)),
        Err(message) => {
            eprintln!("overhead: {message}");
            ExitCode::from(2)
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Options, String> {
    let beside = std::env::current_exe()
        .ok()
        .and_then(|exe| Some(exe.parent()?.join("perfvisor")));
    let mut options = Options {
        perfvisor: beside
            .filter(|path| path.exists())
            .unwrap_or_else(|| "perfvisor".into()),
        rounds: 12,
        window: Duration::from_secs(1),
        hz: 1000,
        json: None,
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} wants a value"));
        match word.as_str() {
            "--perfvisor" => options.perfvisor = value()?.into(),
            "--json" => options.json = Some(value()?.into()),
            "--rounds" => options.rounds = number(&value()?, 1, 1000)?,
            "--hz" => options.hz = number(&value()?, 10, 20_000)? as u64,
            "--seconds" => options.window = Duration::from_secs(number(&value()?, 1, 60)? as u64),
            other => return Err(format!("unknown option {other}")),
        }
    }
    Ok(options)
}

fn number(text: &str, least: usize, most: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ => Err(format!("'{text}' is no number from {least} to {most}")),
    }
}

struct Guest {
    child: Child,
    name: String,
    runtime: tempfile::TempDir,
    tid: i32,
    /// The vCPU thread's CPU time, ns, when dots of the guest's console came, and how many came together.
    dots: Arc<Mutex<Vec<(u64, usize)>>>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Guest {
    fn start(options: &Options) -> Result<Self, String> {
        let runtime = tempfile::tempdir().map_err(|e| e.to_string())?;
        let name = "overhead".to_owned();
        let mut child = Command::new(&options.perfvisor)
            .args([
                "run",
                "--name",
                &name,
                "--memory",
                "32M",
                "--cmdline",
                "loop dots",
            ])
            .env("XDG_RUNTIME_DIR", runtime.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|e| format!("{}: {e}", options.perfvisor.display()))?;
        let stdout = child.stdout.take().ok_or("no console")?;
        let mut console = BufReader::new(stdout);
        let mut guest = Self {
            child,
            name,
            runtime,
            tid: 0,
            dots: Arc::default(),
        };
        loop {
            let mut line = String::new();
            match console.read_line(&mut line) {
                Ok(n) if n > 0 && line.contains("spinning") => break,
                Ok(n) if n > 0 => {}
                _ => return Err("the guest does not start".into()),
            }
        }
        guest.tid = vcpu_thread(guest.child.id()).ok_or("the VM has no vCPU thread")?;
        let (tid, dots) = (guest.tid, guest.dots.clone());
        std::thread::spawn(move || {
            let mut byte = [0; 64];
            while let Ok(n @ 1..) = console.read(&mut byte) {
                let Some(cpu_ns) = cpu_time_ns(tid) else { break };
                let mut dots = dots.lock().unwrap_or_else(PoisonError::into_inner);
                let together = byte[..n].iter().filter(|&&b| b == b'.').count();
                dots.push((cpu_ns, together));
            }
        });
        Ok(guest)
    }

    fn command(&self, options: &Options) -> Command {
        let mut command = Command::new(&options.perfvisor);
        command.env("XDG_RUNTIME_DIR", self.runtime.path());
        command
    }

    /// CPU time of one chunk of work, ns, over stretches of some chunks each in the window that begins now.
    fn paces(&self, window: Duration) -> Result<Vec<f64>, String> {
        self.dots.lock().unwrap_or_else(PoisonError::into_inner).clear();
        std::thread::sleep(window);
        let dots = self.dots.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // From each dot to the first that is at least so many chunks later.
        let stretch = |from: usize| {
            let mut chunks = 0;
            dots[from + 1..].iter().find_map(|&(cpu_ns, together)| {
                chunks += together;
                (chunks >= STRETCH).then(|| (cpu_ns - dots[from].0) as f64 / chunks as f64)
            })
        };
        let paces: Vec<f64> = (0..dots.len()).filter_map(stretch).collect();
        if paces.is_empty() {
            return Err("the guest makes too few dots; a longer --seconds may do".into());
        }
        Ok(paces)
    }
}

fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

fn vcpu_thread(pid: u32) -> Option<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    tasks.flatten().find_map(|task| {
        let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
        (comm.trim() == "vcpu0").then(|| task.file_name().to_str()?.parse().ok())?
    })
}

/// CPU time of a thread, ns: the first field of its schedstat.
fn cpu_time_ns(tid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{tid}/schedstat")).ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// A way of sampling that goes on.
enum Running {
    Nothing,
    Event(GuestSampler),
    Drained(Arc<std::sync::atomic::AtomicBool>),
    Process(Child),
}

impl Running {
    fn start(way: Way, guest: &Guest, options: &Options) -> Result<Self, String> {
        let period_ns = 1_000_000_000 / options.hz;
        let hz = options.hz.to_string();
        let quiet = |command: &mut Command| {
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command.spawn().map(Running::Process).map_err(|e| e.to_string())
        };
        let clock = || GuestSampler::clock(guest.tid, period_ns).map_err(|e| format!("perf event: {e}"));
        let data = guest.runtime.path().join("data");
        match way {
            Way::None => Ok(Running::Nothing),
            Way::Perf if has_perf() => {
                let mut perf = Command::new("perf");
                perf.args([
                    "record",
                    "-q",
                    "-e",
                    "cpu-clock:GH",
                    "-F",
                    &hz,
                    "-t",
                    &guest.tid.to_string(),
                ]);
                perf.arg("-o").arg(&data);
                quiet(&mut perf)
            }
            // The same event, read in the same way.
            Way::Perf => {
                let sampler = clock()?;
                let fd = sampler.as_fd().try_clone_to_owned().map_err(|e| e.to_string())?;
                let mut samples = GuestSamples::map(fd, 6).map_err(|e| e.to_string())?;
                sampler.set_enabled(true).map_err(|e| e.to_string())?;
                let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
                let stopped = stop.clone();
                std::thread::spawn(move || {
                    while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
                        samples.drain(|_| {});
                        std::thread::sleep(Duration::from_millis(50));
                    }
                    let _ = sampler.set_enabled(false);
                });
                Ok(Running::Drained(stop))
            }
            Way::Signal => {
                let sampler = clock()?;
                // What the VMM takes for "look at your run state".
                sampler
                    .also_signal(guest.tid, libc::SIGUSR1)
                    .and_then(|()| sampler.set_enabled(true))
                    .map_err(|e| e.to_string())?;
                Ok(Running::Event(sampler))
            }
            Way::EveryChain | Way::Default => {
                let mut record = guest.command(options);
                record
                    .args(["record", &guest.name, "-q", "-F", &hz])
                    .arg("-o")
                    .arg(&data);
                if way == Way::EveryChain {
                    record.args(["--chain-every", "1"]);
                }
                quiet(&mut record)
            }
        }
    }

    fn stop(self) -> Result<(), String> {
        match self {
            Running::Nothing => {}
            Running::Event(sampler) => sampler.set_enabled(false).map_err(|e| e.to_string())?,
            Running::Drained(stop) => stop.store(true, std::sync::atomic::Ordering::Relaxed),
            Running::Process(mut child) => {
                if let Ok(Some(status)) = child.try_wait() {
                    return Err(format!("it ended by itself: {status}"));
                }
                let pid = child.id().to_string();
                let sent = Command::new("kill").args(["-INT", &pid]).status();
                if !sent.is_ok_and(|s| s.success()) {
                    let _ = child.kill();
                }
                child.wait().map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }
}

fn has_perf() -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|dir| dir.join("perf").exists())
}

/// Goes before other programs, with all that is started from here: the guest, and what is to see its dots at once.
fn go_first() {
    let mut renice = Command::new("renice");
    renice.args(["-n", "-15", "-p", &std::process::id().to_string()]);
    let _ = renice.stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// Keeps the vCPU on one CPU, and everything else on the others, where there are others.
fn pin(guest: &Guest) {
    let (tid, own) = (guest.tid.to_string(), std::process::id().to_string());
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    if cpus < 2 || !Path::new("/usr/bin/taskset").exists() {
        return;
    }
    let set = |list: &str, args: &[&str]| {
        let mut taskset = Command::new("taskset");
        taskset.args(["-c", "-p", list]).args(args).stdout(Stdio::null());
        taskset.status().is_ok_and(|s| s.success())
    };
    let others = format!("1-{}", cpus - 1);
    if !(set("0", &[&tid]) && set(&others, &[&own])) {
        eprintln!("overhead: the vCPU could not be kept on a CPU of its own");
    }
}

fn measure(options: &Options) -> Result<bool, String> {
    go_first();
    let guest = Guest::start(options)?;
    pin(&guest);
    let mut slowdowns: Vec<Vec<f64>> = WAYS.iter().map(|_| Vec::new()).collect();
    // Something to warm up on.
    guest.paces(options.window)?;
    for round in 0..options.rounds {
        let mut paces = [0.0; WAYS.len()];
        for turn in 0..WAYS.len() {
            // Each way comes in each place of a round.
            let at = (turn + round) % WAYS.len();
            let failed = |e: String| format!("{}: {e}", WAYS[at].name());
            let running = Running::start(WAYS[at], &guest, options).map_err(failed)?;
            // Programs start, frequencies settle.
            std::thread::sleep(Duration::from_millis(400));
            let found = guest.paces(options.window);
            running.stop().map_err(failed)?;
            let mut found = found.map_err(failed)?;
            if found.is_empty() {
                return Err(failed("the guest did no work in that time".into()));
            }
            paces[at] = quantile(&mut found, 0.5);
        }
        for (all, pace) in slowdowns.iter_mut().zip(paces) {
            all.push(100.0 * (pace / paces[0] - 1.0));
        }
    }
    report(options, &mut slowdowns)
}

/// By how much a way slows the guest down, over all rounds, in percent.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
struct Slowdown {
    median: f64,
    lower_quartile: f64,
    upper_quartile: f64,
    /// Of the median, as if the rounds were a normal sample.
    standard_error: f64,
}

impl Slowdown {
    fn of(rounds: &mut [f64]) -> Self {
        let [lower_quartile, median, upper_quartile] = [0.25, 0.5, 0.75].map(|share| quantile(rounds, share));
        Self {
            median,
            lower_quartile,
            upper_quartile,
            // A normal sample's quartiles are 1.349 standard deviations apart; its median has 1.253 times the mean's error.
            standard_error: 1.253 * (upper_quartile - lower_quartile) / 1.349 / (rounds.len() as f64).sqrt(),
        }
    }

    /// This one over another, which must be more than nothing by two standard errors.
    fn over(self, other: Self) -> Option<f64> {
        (other.median > 2.0 * other.standard_error).then(|| self.median / other.median)
    }
}

fn report(options: &Options, rounds: &mut [Vec<f64>]) -> Result<bool, String> {
    println!(
        "Slowdown of a CPL3 loop sampled at {} Hz, in CPU time of its vCPU thread; {} rounds of {} s:\n",
        options.hz,
        options.rounds,
        options.window.as_secs()
    );
    println!("{:<46} {:>9} {:>20}", "", "median", "quartiles");
    let slowdowns: Vec<Slowdown> = rounds.iter_mut().map(|of| Slowdown::of(of)).collect();
    for (way, s) in WAYS.iter().zip(&slowdowns) {
        if *way == Way::None {
            println!("{:<46} {:>9} {:>20}", way.name(), "-", "-");
        } else {
            let quartiles = format!("{:.2} to {:.2} %", s.lower_quartile, s.upper_quartile);
            println!("{:<46} {:>7.2} % {quartiles:>20}", way.name(), s.median);
        }
    }
    let (d_to_c, e_to_b) = (slowdowns[3].over(slowdowns[2]), slowdowns[4].over(slowdowns[1]));
    let told = |ratio: Option<f64>| match ratio {
        Some(ratio) => format!("{ratio:.2}"),
        None => "not measurable here".to_owned(),
    };
    println!(
        "\nd / c = {} (at most {MOST_D_TO_C})   e / b = {} (at most {MOST_E_TO_B})",
        told(d_to_c),
        told(e_to_b)
    );
    if let Some(path) = &options.json {
        let json = serde_json::json!({
            "hz": options.hz, "rounds": options.rounds,
            "slowdown_percent": { "b": slowdowns[1], "c": slowdowns[2], "d": slowdowns[3], "e": slowdowns[4] },
            "d_to_c": d_to_c, "e_to_b": e_to_b,
        });
        let text = serde_json::to_vec_pretty(&json).map_err(|e| e.to_string())?;
        std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    Ok(d_to_c.is_some_and(|ratio| ratio <= MOST_D_TO_C) && e_to_b.is_some_and(|ratio| ratio <= MOST_E_TO_B))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise over noise is no figure.
    #[test]
    fn a_ratio_is_given_only_over_a_slowdown_that_there_is() {
        let mut clear: Vec<f64> = (0..12).map(|i| 4.0 + f64::from(i % 3) * 0.1).collect();
        let mut noise: Vec<f64> = (0..12).map(|i| f64::from(i % 5) - 1.9).collect();
        let (clear, noise) = (Slowdown::of(&mut clear), Slowdown::of(&mut noise));
        assert_eq!(clear.median, 4.1);
        assert_eq!(clear.over(clear), Some(1.0));
        assert_eq!(clear.over(noise), None);
    }
}
