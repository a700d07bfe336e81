//! What sampling costs a guest, the ways to do it side by side.
//!
//! One guest reads its TSC at CPL3, over and over, and tells how much of its time lies in gaps between two
//! readings, when it was not run. Its vCPU, alone on a CPU, is sampled in one of these ways:
//!
//! - b: `perf record` on the vCPU's thread: the kernel's samples, without call chains
//! - c: a signal for each sample that takes the vCPU out of `KVM_RUN`, and nothing else: the floor of what is
//!   taken from user space
//! - d: `perfvisor record --chain-every 1`: a call chain with every sample
//! - e: `perfvisor record`: instruction pointers by the kernel, chains now and then
//!
//! A machine that is itself virtual runs at one speed now and at another a second later, up to twice as fast
//! as seen here. So what decides is the time in which the guest was not run, and the ways take turns all the
//! time, each on for a moment and off for another: each stretch with sampling is compared with those without
//! it right before and right after. Shown are the median of all such comparisons and their quartiles, and
//! beside them the same of the work done (readings of the TSC in equal times), which holds more, such as cold
//! caches, but depends on the machine's speed. A ratio of two slowdowns is the median of those of
//! neighbouring turns, and is given only where the lower slowdown is known to be more than nothing.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use perf_core::pmu::host::{GuestSampler, GuestSamples};

const USAGE: &str = "\
usage: overhead [--perfvisor FILE] [--ways LETTERS] [--rounds N] [--cycles N] [--hz N] [--json FILE]
Compares what ways of sampling (all: bcde) cost a guest. Wants root, for perf on another process.";

const WAYS: [Way; 4] = [Way::Perf, Way::Signal, Way::EveryChain, Way::Default];
/// How long sampling stays on, or off: some of the guest's lines, which come every 50 ms.
const WINDOW: Duration = Duration::from_millis(320);
/// After it was switched: what comes with that has passed.
const SETTLES: Duration = Duration::from_millis(15);
/// How long a program may take to begin, or to do what it is told.
const PATIENCE: Duration = Duration::from_secs(20);
/// Lines in a window, at least, for it to say anything.
const FEWEST_LINES: usize = 3;
/// What the project promises of d against c, and of e against b.
const MOST_D_TO_C: f64 = 1.2;
const MOST_E_TO_B: f64 = 1.5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Perf,
    Signal,
    EveryChain,
    Default,
}

impl Way {
    fn letter(self) -> char {
        self.name().as_bytes()[0].into()
    }

    fn name(self) -> &'static str {
        match self {
            Way::Perf => "b  perf record on the vCPU thread, no chains",
            Way::Signal => "c  a signal for each sample, nothing else",
            Way::EveryChain => "d  perfvisor record --chain-every 1",
            Way::Default => "e  perfvisor record",
        }
    }
}

struct Options {
    perfvisor: PathBuf,
    /// What is compared.
    ways: Vec<Way>,
    rounds: usize,
    cycles: usize,
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
        ways: WAYS.to_vec(),
        rounds: 24,
        cycles: 4,
        hz: 1000,
        json: None,
    };
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} wants a value"));
        match word.as_str() {
            "--perfvisor" => options.perfvisor = value()?.into(),
            "--ways" => options.ways = ways(&value()?)?,
            "--json" => options.json = Some(value()?.into()),
            "--rounds" => options.rounds = number(&value()?, 1, 1000)?,
            "--hz" => options.hz = number(&value()?, 10, 20_000)? as u64,
            "--cycles" => options.cycles = number(&value()?, 1, 1000)?,
            other => return Err(format!("unknown option {other}")),
        }
    }
    Ok(options)
}

fn ways(letters: &str) -> Result<Vec<Way>, String> {
    let chosen: Vec<Way> = WAYS
        .into_iter()
        .filter(|way| letters.contains(way.letter()))
        .collect();
    if chosen.is_empty() || chosen.len() != letters.chars().count() {
        return Err(format!(
            "'{letters}' are not some of the letters b to e, each once"
        ));
    }
    Ok(chosen)
}

fn number(text: &str, least: usize, most: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (least..=most).contains(&n) => Ok(n),
        _ => Err(format!("'{text}' is no number from {least} to {most}")),
    }
}

/// How the guest fares, by its own account.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Pace {
    /// Share of its time in which it was run.
    run: f64,
    /// Readings of the TSC per millisecond.
    work: f64,
}

impl Pace {
    /// A line of the guest's: parts in a million of its time in which it was not run, and readings.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace().map(|word| word.parse::<u32>().ok());
        let (lost, work) = (words.next()??, words.next()??);
        (lost < 1_000_000 && work > 0).then(|| Self {
            run: 1.0 - f64::from(lost) / 1e6,
            work: work.into(),
        })
    }

    /// The mean; `None` of none.
    fn mean(paces: &[Self]) -> Option<Self> {
        let sum = |of: fn(&Self) -> f64| paces.iter().map(of).sum::<f64>() / paces.len() as f64;
        (!paces.is_empty()).then(|| Self {
            run: sum(|pace| pace.run),
            work: sum(|pace| pace.work),
        })
    }

    /// By how many percent more time everything takes at this pace than without sampling: by the time it is
    /// not run, and by the work done.
    fn slowdown(self, without: Self) -> [f64; 2] {
        [without.run / self.run, without.work / self.work].map(|ratio| 100.0 * (ratio - 1.0))
    }
}

struct Guest {
    child: Child,
    name: String,
    runtime: tempfile::TempDir,
    tid: i32,
    /// What the guest told since this was emptied.
    told: Arc<Mutex<Vec<Pace>>>,
    /// It will not tell more.
    console_ended: Arc<AtomicBool>,
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
            .args(["run", "--name", &name, "--memory", "32M", "--cmdline", "gaps"])
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
            told: Arc::default(),
            console_ended: Arc::default(),
        };
        loop {
            let mut line = String::new();
            match console.read_line(&mut line) {
                Ok(n) if n > 0 && line.trim() == "gaps" => break,
                Ok(n) if n > 0 => {}
                _ => return Err("the guest does not start".into()),
            }
        }
        guest.tid = vcpu_thread(guest.child.id()).ok_or("the VM has no vCPU thread")?;
        let (told, ended) = (guest.told.clone(), guest.console_ended.clone());
        std::thread::spawn(move || {
            for line in console.lines().map_while(Result::ok) {
                let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                told.extend(Pace::parse(&line));
            }
            ended.store(true, Ordering::Relaxed);
        });
        Ok(guest)
    }

    fn command(&self, options: &Options) -> Command {
        let mut command = Command::new(&options.perfvisor);
        command.env("XDG_RUNTIME_DIR", self.runtime.path());
        command
    }

    /// How it fares once what was switched just now has passed.
    fn paced(&self) -> Result<Option<Pace>, String> {
        if self.console_ended.load(Ordering::Relaxed) {
            return Err("the guest has ended".into());
        }
        std::thread::sleep(SETTLES);
        Ok(self.pace())
    }

    /// How it fares in a window that begins now. `None`: it told too little.
    fn pace(&self) -> Option<Pace> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clear();
        std::thread::sleep(WINDOW);
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        // The first line is about time before the window, too.
        let inside = told.get(1..).filter(|inside| inside.len() >= FEWEST_LINES)?;
        Pace::mean(inside)
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

/// A way of sampling, to be switched on and off.
enum Sampling {
    Event(GuestSampler),
    Drained(GuestSampler, Arc<AtomicBool>),
    Process(Controlled),
}

/// A `record` that follows words through a pipe.
struct Controlled {
    child: Child,
    ctl: File,
    answers: mpsc::Receiver<()>,
    /// The other end of the answers, to end the thread that reads them.
    end: File,
}

impl Sampling {
    /// Ready, and off.
    fn prepare(way: Way, guest: &Guest, options: &Options) -> Result<Self, String> {
        let hz = options.hz.to_string();
        let clock = || {
            GuestSampler::clock(guest.tid, 1_000_000_000 / options.hz).map_err(|e| format!("perf event: {e}"))
        };
        match way {
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
                Self::process(perf, way, guest)
            }
            // The same event, read in the same way.
            Way::Perf => {
                let sampler = clock()?;
                let fd = sampler.as_fd().try_clone_to_owned().map_err(|e| e.to_string())?;
                let mut samples = GuestSamples::map(fd, 6).map_err(|e| e.to_string())?;
                let stop = Arc::new(AtomicBool::new(false));
                let stopped = stop.clone();
                std::thread::spawn(move || {
                    while !stopped.load(Ordering::Relaxed) {
                        samples.drain(|_| {});
                        std::thread::sleep(Duration::from_millis(50));
                    }
                });
                Ok(Self::Drained(sampler, stop))
            }
            Way::Signal => {
                let sampler = clock()?;
                // What the VMM takes for "look at your run state".
                sampler
                    .also_signal(guest.tid, libc::SIGUSR1)
                    .map_err(|e| e.to_string())?;
                Ok(Self::Event(sampler))
            }
            Way::EveryChain | Way::Default => {
                let mut record = guest.command(options);
                record.args(["record", &guest.name, "-q", "-F", &hz]);
                if way == Way::EveryChain {
                    record.args(["--chain-every", "1"]);
                }
                Self::process(record, way, guest)
            }
        }
    }

    /// `command` is a `record` of perf's or ours, which know the same options for this.
    fn process(mut command: Command, way: Way, guest: &Guest) -> Result<Self, String> {
        let directory = guest.runtime.path();
        let file = |what: &str| directory.join(format!("{what}-{}", way.letter()));
        let (ctl, ack) = (file("ctl"), file("ack"));
        for pipe in [&ctl, &ack] {
            let _ = std::fs::remove_file(pipe);
            let made = Command::new("mkfifo").arg(pipe).status();
            if !made.is_ok_and(|status| status.success()) {
                return Err("mkfifo failed".into());
            }
        }
        let both = |path| {
            File::options()
                .read(true)
                .write(true)
                .open(path)
                .map_err(|e| e.to_string())
        };
        let pipes = format!("fifo:{},{}", ctl.display(), ack.display());
        let (ctl, ack) = (both(&ctl)?, both(&ack)?);
        let end = ack.try_clone().map_err(|e| e.to_string())?;
        let (answer, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(ack).lines() {
                // perf ends its answers with a zero.
                if !line.is_ok_and(|line| line.trim_matches(char::from(0)) == "ack")
                    || answer.send(()).is_err()
                {
                    break;
                }
            }
        });
        let child = command
            .args(["-D", "-1", "--control", &pipes, "-o"])
            .arg(file("data"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| e.to_string())?;
        let mut record = Controlled {
            child,
            ctl,
            answers,
            end,
        };
        // Answered when it is ready.
        record.say("ping")?;
        Ok(Self::Process(record))
    }

    fn switch(&mut self, on: bool) -> Result<(), String> {
        match self {
            Self::Event(sampler) | Self::Drained(sampler, _) => {
                sampler.set_enabled(on).map_err(|e| e.to_string())
            }
            Self::Process(record) => record.say(if on { "enable" } else { "disable" }),
        }
    }

    fn stop(self) -> Result<(), String> {
        match self {
            Self::Event(_) => {}
            Self::Drained(_, stop) => stop.store(true, Ordering::Relaxed),
            Self::Process(mut record) => {
                record.say("stop")?;
                let status = record.child.wait().map_err(|e| e.to_string())?;
                if !status.success() {
                    return Err(format!("it ended with {status}"));
                }
            }
        }
        Ok(())
    }
}

impl Controlled {
    /// Makes it do something, and waits until it is done.
    fn say(&mut self, word: &str) -> Result<(), String> {
        writeln!(self.ctl, "{word}").map_err(|e| e.to_string())?;
        let until = Instant::now() + PATIENCE;
        loop {
            match self.answers.recv_timeout(Duration::from_millis(100)) {
                Ok(()) => return Ok(()),
                Err(_) if Instant::now() > until => return Err(format!("no answer to '{word}'")),
                Err(_) => {}
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("it ended by itself: {status}"));
            }
        }
    }
}

impl Drop for Controlled {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = self.end.write_all(b"end\n");
    }
}

fn has_perf() -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&paths).any(|dir| dir.join("perf").exists())
}

/// Goes before other programs, with all that is started from here.
fn go_first() {
    let mut renice = Command::new("renice");
    renice.args(["-n", "-15", "-p", &std::process::id().to_string()]);
    let _ = renice.stdout(Stdio::null()).stderr(Stdio::null()).status();
}

/// The CPUs of a list as the kernel prints it, such as `0-2,5`.
fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<u32>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

/// The CPUs this may run on. Not all need be for us: the lab keeps everything off its first one
/// (docs/guide/lab.md).
fn allowed_cpus() -> Option<Vec<u32>> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    cpu_list(list)
}

/// Keeps the vCPU on one CPU, and everything else on the others, where there are others.
fn pin(guest: &Guest) {
    let (tid, own) = (guest.tid.to_string(), std::process::id().to_string());
    let cpus = allowed_cpus().unwrap_or_default();
    let [first, others @ ..] = &cpus[..] else { return };
    if others.is_empty() {
        return;
    }
    let set = |list: &str, args: &[&str]| {
        let mut taskset = Command::new("taskset");
        let (all, pid) = args.split_at(args.len() - 1);
        taskset
            .args(all)
            .args(["-c", "-p", list])
            .args(pid)
            .stdout(Stdio::null());
        taskset.status().is_ok_and(|s| s.success())
    };
    let others: Vec<String> = others.iter().map(u32::to_string).collect();
    let (others, vm) = (others.join(","), guest.child.id().to_string());
    if !(set(&others, &["-a", &vm]) && set(&first.to_string(), &[&tid]) && set(&others, &[&own])) {
        eprintln!("overhead: the vCPU could not be kept on a CPU of its own");
    }
}

fn measure(options: &Options) -> Result<bool, String> {
    go_first();
    let guest = Guest::start(options)?;
    pin(&guest);
    let mut cycles = Vec::new();
    for round in 0..options.rounds {
        // Each way comes in each place.
        let mut ways = options.ways.clone();
        let n = ways.len();
        ways.rotate_left(round % n);
        let mut ready = Vec::new();
        for way in ways {
            let sampling = Sampling::prepare(way, &guest, options).map_err(|e| told_by(way, e))?;
            ready.push((way, sampling));
        }
        let mut before = guest.paced()?;
        for _ in 0..options.cycles {
            let mut cycle = Cycle::new();
            for (way, sampling) in &mut ready {
                sampling.switch(true).map_err(|e| told_by(*way, e))?;
                let with = guest.paced()?;
                sampling.switch(false).map_err(|e| told_by(*way, e))?;
                let after = guest.paced()?;
                if let (Some(before), Some(with), Some(after)) = (before, with, after)
                    && let Some(without) = Pace::mean(&[before, after])
                {
                    cycle.insert(way.letter(), with.slowdown(without));
                }
                before = after;
            }
            cycles.push(cycle);
        }
        for (way, sampling) in ready {
            sampling.stop().map_err(|e| told_by(way, e))?;
        }
    }
    if cycles.iter().all(|cycle| cycle.len() < options.ways.len()) {
        return Err("the guest told too little".into());
    }
    report(options, &cycles)
}

/// What went wrong, and with which way.
fn told_by(way: Way, error: String) -> String {
    format!("{}: {error}", way.name())
}

/// By how much each way, by its letter, slowed the guest down when its turn came, in percent: by the time not
/// run, and by the work done.
type Cycle = BTreeMap<char, [f64; 2]>;

/// By how much a way slows the guest down, over all comparisons, in percent.
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
            // A normal sample's quartiles are 1.349 standard deviations apart; its median has 1.253 times the
            // mean's error.
            standard_error: 1.253 * (upper_quartile - lower_quartile) / 1.349 / (rounds.len() as f64).sqrt(),
        }
    }

    /// Whether it is more than nothing by two standard errors.
    fn is_clear(self) -> bool {
        self.median > 2.0 * self.standard_error
    }
}

/// One slowdown over another.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
struct Ratio {
    value: f64,
    standard_error: f64,
}

impl Ratio {
    /// That for which the first of a pair is as often above the second times the ratio as below. The
    /// machine's moods are in both, and so in neither. `None` where the second is not clearly more than
    /// nothing.
    fn of(pairs: &[(f64, f64)]) -> Option<Self> {
        let mut seconds: Vec<f64> = pairs.iter().map(|&(_, second)| second).collect();
        if pairs.is_empty() || !Slowdown::of(&mut seconds).is_clear() {
            return None;
        }
        let mut ratios: Vec<f64> = pairs
            .iter()
            .map(|&(first, second)| match second > 0.0 {
                true => first / second,
                // Above any multiple of it, or below.
                false => f64::INFINITY.copysign(first - second),
            })
            .collect();
        // The number of those above is a binomial one: its standard deviation is half the root of the number
        // of pairs.
        let off = 0.5 / (pairs.len() as f64).sqrt();
        let (lower, upper) = (
            quantile(&mut ratios, 0.5 - off),
            quantile(&mut ratios, (0.5 + off).min(1.0)),
        );
        Some(Self {
            value: quantile(&mut ratios, 0.5),
            standard_error: (upper - lower) / 2.0,
        })
    }
}

/// What one way costs: by the time in which the guest is not run, and by the work it does.
#[derive(Clone, Copy, Debug, serde::Serialize)]
struct Cost {
    not_run: Slowdown,
    work: Slowdown,
}

fn report(options: &Options, cycles: &[Cycle]) -> Result<bool, String> {
    println!(
        "Slowdown of a CPL3 loop sampled at {} Hz, {} ms with sampling against {} ms before and after; {} rounds of {} turns of each:\n",
        options.hz,
        WINDOW.as_millis(),
        WINDOW.as_millis(),
        options.rounds,
        options.cycles
    );
    println!(
        "{:<46} {:>9} {:>20} {:>9}   by work done",
        "", "median", "quartiles", "error +-"
    );
    let by = |way: Way, which: usize| {
        let slowdowns = cycles
            .iter()
            .filter_map(|cycle| Some(cycle.get(&way.letter())?[which]));
        Slowdown::of(&mut slowdowns.collect::<Vec<_>>())
    };
    let cost = |&way: &Way| {
        let cost = Cost {
            not_run: by(way, 0),
            work: by(way, 1),
        };
        (way, cost)
    };
    let costs: Vec<(Way, Cost)> = options.ways.iter().map(cost).collect();
    for (way, Cost { not_run: s, work }) in &costs {
        let quartiles = format!("{:.2} to {:.2} %", s.lower_quartile, s.upper_quartile);
        println!(
            "{:<46} {:>7.2} % {quartiles:>20} {:>9.2}   {:>6.2} +-{:.2} %",
            way.name(),
            s.median,
            s.standard_error,
            work.median,
            work.standard_error
        );
    }
    let [d_to_c, e_to_b] = [(Way::EveryChain, Way::Signal), (Way::Default, Way::Perf)].map(|(x, y)| {
        let asked = [x, y].iter().all(|way| options.ways.contains(way));
        let both = |cycle: &Cycle| Some((cycle.get(&x.letter())?[0], cycle.get(&y.letter())?[0]));
        asked.then(|| Ratio::of(&cycles.iter().filter_map(both).collect::<Vec<_>>()))
    });
    let told = |ratio: Option<Option<Ratio>>| match ratio {
        Some(Some(ratio)) => format!("{:.2} +-{:.2}", ratio.value, ratio.standard_error),
        Some(None) => "not measurable here".to_owned(),
        None => "not measured".to_owned(),
    };
    println!(
        "\nd / c = {} (at most {MOST_D_TO_C})   e / b = {} (at most {MOST_E_TO_B})",
        told(d_to_c),
        told(e_to_b)
    );
    if let Some(path) = &options.json {
        let json = serde_json::json!({
            "hz": options.hz, "rounds": options.rounds, "cycles": options.cycles, "window_ms": WINDOW.as_millis() as u64,
            "slowdown_percent": costs.iter().map(|(way, cost)| (way.letter(), cost)).collect::<BTreeMap<_, _>>(),
            "d_to_c": d_to_c.flatten(), "e_to_b": e_to_b.flatten(),
        });
        let text = serde_json::to_vec_pretty(&json).map_err(|e| e.to_string())?;
        std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    }
    // What was not asked for is not missed.
    let met =
        |ratio: Option<Option<Ratio>>, most: f64| ratio.is_none_or(|r| r.is_some_and(|r| r.value <= most));
    Ok(met(d_to_c, MOST_D_TO_C) && met(e_to_b, MOST_E_TO_B))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Noise over noise is no figure.
    #[test]
    fn a_ratio_is_given_only_over_a_slowdown_that_there_is() {
        let clear: Vec<f64> = (0..12).map(|i| 4.0 + f64::from(i % 3) * 0.1).collect();
        let noise: Vec<f64> = (0..12).map(|i| f64::from(i % 5) - 1.9).collect();
        let pairs = |x: &[f64], y: &[f64]| x.iter().copied().zip(y.iter().copied()).collect::<Vec<_>>();
        let same = Ratio::of(&pairs(&clear, &clear)).unwrap();
        assert!(same.value == 1.0 && same.standard_error == 0.0, "{same:?}");
        assert!(Ratio::of(&pairs(&noise, &clear)).is_some());
        assert_eq!(Ratio::of(&pairs(&clear, &noise)), None);
        assert_eq!(Ratio::of(&[]), None);
    }

    /// The machine is twice as slow for every third pair; one in ten is far off, or has a second that is less
    /// than nothing.
    #[test]
    fn what_both_share_is_not_in_their_ratio() {
        let pairs: Vec<(f64, f64)> = (0..90)
            .map(|i| {
                let mood = if i % 3 == 0 { 2.0 } else { 1.0 };
                let noise = 1.0 + 0.02 * f64::from(i % 5 - 2);
                match i % 20 {
                    7 => (60.0, 10.0),
                    13 => (12.0, -0.5),
                    _ => (12.0 * mood * noise, 10.0 * mood),
                }
            })
            .collect();
        let ratio = Ratio::of(&pairs).unwrap();
        assert!((ratio.value - 1.2).abs() < 0.03, "{ratio:?}");
        assert!((0.0..0.05).contains(&ratio.standard_error), "{ratio:?}");
    }

    #[test]
    fn a_slowdown_is_told_by_the_time_not_run_and_by_the_work() {
        let without = Pace::parse("1000 40000").unwrap();
        let with = Pace::parse("50950 37975").unwrap();
        let [not_run, work] = with.slowdown(without);
        assert!((not_run - 5.263).abs() < 0.001, "{not_run}");
        assert!((work - 5.332).abs() < 0.001, "{work}");
        for line in ["", "7", "x 5", "1000000 5", "5 0", "-1 5"] {
            assert_eq!(Pace::parse(line), None, "{line}");
        }
    }

    #[test]
    fn ways_are_chosen_by_their_letters() {
        assert_eq!(ways("dc"), Ok(vec![Way::Signal, Way::EveryChain]));
        assert_eq!(ways("bcde"), Ok(WAYS.to_vec()));
        for bad in ["", "a", "cc", "cx"] {
            assert!(ways(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_list_of_cpus_is_read_as_the_kernel_prints_it() {
        assert_eq!(cpu_list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
        assert_eq!(cpu_list("\t1-2"), Some(vec![1, 2]));
        assert_eq!(cpu_list("3"), Some(vec![3]));
        for bad in ["", "a", "1-", "1,,2"] {
            assert_eq!(cpu_list(bad), None, "{bad}");
        }
    }
}
