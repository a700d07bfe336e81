//! The sampled guest, which reports its own progress.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use comparisons::{ComparisonError, Killed, context};

/// Duration of a measurement window. The guest prints a line every 50 ms.
pub(crate) const WINDOW: Duration = Duration::from_millis(320);
/// Time to wait after sampling is switched on or off, before a measurement window starts.
const SETTLES: Duration = Duration::from_millis(15);
/// Minimum number of lines that the guest must print in a measurement window for it to be valid.
const FEWEST_LINES: usize = 3;

/// Progress of the guest in a measurement window, computed from the guest's own output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct GuestPace {
    /// Fraction of the time in which the guest ran.
    run: f64,
    /// Work that the guest has done, as the number of TSC readings per millisecond.
    work: f64,
}

impl GuestPace {
    /// Parses an output line of the guest. The line contains the time in which the guest did not
    /// run, in parts per million, and the number of TSC readings.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace().map(|word| word.parse::<u32>().ok());
        let (lost, work) = (words.next()??, words.next()??);
        (lost < 1_000_000 && work > 0).then(|| Self {
            run: 1.0 - f64::from(lost) / 1e6,
            work: work.into(),
        })
    }

    /// Returns the mean of `paces`, or `None` if it is empty.
    pub(crate) fn mean(paces: &[Self]) -> Option<Self> {
        let sum = |of: fn(&Self) -> f64| paces.iter().map(of).sum::<f64>() / paces.len() as f64;
        (!paces.is_empty()).then(|| Self {
            run: sum(|pace| pace.run),
            work: sum(|pace| pace.work),
        })
    }

    /// Returns the slowdown relative to the progress `without` sampling, in percent. The first
    /// value is based on the time in which the guest did not run, the second on the work done.
    pub(crate) fn slowdown(self, without: Self) -> [f64; 2] {
        [without.run / self.run, without.work / self.work].map(|ratio| 100.0 * (ratio - 1.0))
    }
}

pub(crate) struct MeasuredGuest {
    perfvisor: PathBuf,
    pub(crate) child: Killed,
    pub(crate) name: String,
    pub(crate) runtime: tempfile::TempDir,
    /// Thread ID of the vCPU.
    pub(crate) tid: i32,
    /// Progress reports that the guest has printed since the list was last cleared.
    told: Arc<Mutex<Vec<GuestPace>>>,
    /// `true` after the guest's console has reached end of file.
    console_ended: Arc<AtomicBool>,
}

impl MeasuredGuest {
    /// Starts the guest, and a thread that reads its console.
    pub(crate) fn start(perfvisor: &Path) -> Result<Self, ComparisonError> {
        let runtime = tempfile::tempdir().map_err(context("cannot create a directory"))?;
        let name = "overhead".to_owned();
        let mut child = Command::new(perfvisor)
            .args(["run", "--name", &name, "--memory", "32M", "--cmdline", "gaps"])
            .env("XDG_RUNTIME_DIR", runtime.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .map_err(context(perfvisor.display()))?;
        let console = child.stdout.take();
        let mut guest = Self {
            perfvisor: perfvisor.to_owned(),
            child: Killed(child),
            name,
            runtime,
            tid: 0,
            told: Arc::default(),
            console_ended: Arc::default(),
        };
        let mut console = BufReader::new(console.ok_or("the guest has no console")?);
        loop {
            let mut line = String::new();
            match console.read_line(&mut line) {
                Ok(n) if n > 0 && line.trim() == "gaps" => break,
                Ok(n) if n > 0 => {}
                _ => return Err("the guest does not start".into()),
            }
        }
        guest.tid = vcpu_thread(guest.child.0.id()).ok_or("the VM has no vCPU thread")?;
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

    /// Creates a `perfvisor` command that finds this guest's VM.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.perfvisor);
        command.env("XDG_RUNTIME_DIR", self.runtime.path());
        command
    }

    /// Waits until the effects of switching sampling on or off have passed, and then measures the
    /// guest's progress in one window.
    pub(crate) fn paced(&self) -> Result<Option<GuestPace>, ComparisonError> {
        if self.console_ended.load(Ordering::Relaxed) {
            return Err("the guest has exited".into());
        }
        std::thread::sleep(SETTLES);
        Ok(self.pace())
    }

    /// Measures the guest's progress in a window that begins now. Returns `None` if the guest
    /// printed too few lines in the window.
    fn pace(&self) -> Option<GuestPace> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clear();
        std::thread::sleep(WINDOW);
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        // The first line also covers time before the start of the window.
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
