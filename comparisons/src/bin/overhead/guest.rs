//! The guest that is sampled: it tells by itself how it fares.

use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How long sampling stays on, or off: some of the guest's lines, which come every 50 ms.
pub(crate) const WINDOW: Duration = Duration::from_millis(320);
/// After it was switched: what comes with that has passed.
const SETTLES: Duration = Duration::from_millis(15);
/// Lines in a window, at least, for it to say anything.
const FEWEST_LINES: usize = 3;

/// Why there is no guest to measure.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MeasuredGuestError {
    #[error("no directory for it")]
    Directory(#[source] io::Error),
    #[error("{}", .0.display())]
    Program(PathBuf, #[source] io::Error),
    #[error("the guest does not start")]
    Silent,
    #[error("the VM has no vCPU thread")]
    NoThread,
    #[error("the guest has ended")]
    Ended,
}

/// How the guest fares, by its own account.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GuestPace {
    /// Share of its time in which it was run.
    run: f64,
    /// Readings of the TSC per millisecond.
    work: f64,
}

impl GuestPace {
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
    pub(crate) fn mean(paces: &[Self]) -> Option<Self> {
        let sum = |of: fn(&Self) -> f64| paces.iter().map(of).sum::<f64>() / paces.len() as f64;
        (!paces.is_empty()).then(|| Self {
            run: sum(|pace| pace.run),
            work: sum(|pace| pace.work),
        })
    }

    /// By how many percent more time everything takes at this pace than without sampling: by the time it is
    /// not run, and by the work done.
    pub(crate) fn slowdown(self, without: Self) -> [f64; 2] {
        [without.run / self.run, without.work / self.work].map(|ratio| 100.0 * (ratio - 1.0))
    }
}

pub(crate) struct MeasuredGuest {
    perfvisor: PathBuf,
    pub(crate) child: Child,
    pub(crate) name: String,
    pub(crate) runtime: tempfile::TempDir,
    /// The thread of its vCPU.
    pub(crate) tid: i32,
    /// What the guest told since this was emptied.
    told: Arc<Mutex<Vec<GuestPace>>>,
    /// It will not tell more.
    console_ended: Arc<AtomicBool>,
}

impl Drop for MeasuredGuest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl MeasuredGuest {
    /// One that runs, its console read by a thread of its own.
    pub(crate) fn start(perfvisor: &Path) -> Result<Self, MeasuredGuestError> {
        let runtime = tempfile::tempdir().map_err(MeasuredGuestError::Directory)?;
        let name = "overhead".to_owned();
        let mut child = Command::new(perfvisor)
            .args(["run", "--name", &name, "--memory", "32M", "--cmdline", "gaps"])
            .env("XDG_RUNTIME_DIR", runtime.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(|source| MeasuredGuestError::Program(perfvisor.to_owned(), source))?;
        let console = child.stdout.take();
        let mut guest = Self {
            perfvisor: perfvisor.to_owned(),
            child,
            name,
            runtime,
            tid: 0,
            told: Arc::default(),
            console_ended: Arc::default(),
        };
        let mut console = BufReader::new(console.ok_or(MeasuredGuestError::Silent)?);
        loop {
            let mut line = String::new();
            match console.read_line(&mut line) {
                Ok(n) if n > 0 && line.trim() == "gaps" => break,
                Ok(n) if n > 0 => {}
                _ => return Err(MeasuredGuestError::Silent),
            }
        }
        guest.tid = vcpu_thread(guest.child.id()).ok_or(MeasuredGuestError::NoThread)?;
        let (told, ended) = (guest.told.clone(), guest.console_ended.clone());
        std::thread::spawn(move || {
            for line in console.lines().map_while(Result::ok) {
                let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                told.extend(GuestPace::parse(&line));
            }
            ended.store(true, Ordering::Relaxed);
        });
        Ok(guest)
    }

    /// The program, where it finds this guest.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.perfvisor);
        command.env("XDG_RUNTIME_DIR", self.runtime.path());
        command
    }

    /// How it fares once what was switched just now has passed.
    pub(crate) fn paced(&self) -> Result<Option<GuestPace>, MeasuredGuestError> {
        if self.console_ended.load(Ordering::Relaxed) {
            return Err(MeasuredGuestError::Ended);
        }
        std::thread::sleep(SETTLES);
        Ok(self.pace())
    }

    /// How it fares in a window that begins now. `None`: it told too little.
    fn pace(&self) -> Option<GuestPace> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clear();
        std::thread::sleep(WINDOW);
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        // The first line is about time before the window, too.
        let inside = told.get(1..).filter(|inside| inside.len() >= FEWEST_LINES)?;
        GuestPace::mean(inside)
    }
}

fn vcpu_thread(pid: u32) -> Option<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    tasks.flatten().find_map(|task| {
        let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
        (comm.trim() == "vcpu0").then(|| task.file_name().to_str()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slowdown_follows_run_time_and_work() {
        let without = GuestPace::parse("1000 40000").unwrap();
        let with = GuestPace::parse("50950 37975").unwrap();
        let [not_run, work] = with.slowdown(without);
        assert!((not_run - 5.263).abs() < 0.001, "{not_run}");
        assert!((work - 5.332).abs() < 0.001, "{work}");
        for line in ["", "7", "x 5", "1000000 5", "5 0", "-1 5"] {
            assert_eq!(GuestPace::parse(line), None, "{line}");
        }
    }
}
