//! Starting a Linux guest with a script in it, and taking its console apart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use guest_images::cpio::Archive;

use crate::artefacts;
use crate::limit::Limit;
use crate::parse::judge_kernel_log;
use crate::place::{Place, PlaceError};
use crate::process::{Command, Output, ProcessError, last_lines};
use crate::report;

/// The section that the guest's init writes behind the script: what its kernel may have complained of.
const KERNEL_LOG: &str = "kernel-log";

/// Longest kernel command line on x86 (`COMMAND_LINE_SIZE`), with room for what the VMM adds.
const MAX_CMDLINE_BYTES: usize = 2048 - 256;

/// What every Linux guest gets on its command line.
const BASE_CMDLINE: &str = "console=ttyS0 tsc=reliable no_timer_check quiet";

/// What a guest does.
#[derive(Debug, Clone)]
enum Script {
    /// This.
    Text(String),
    /// What is in its initrd under this name.
    Named(String),
}

/// A Linux guest to be run by Perfvisor.
#[derive(Debug, Clone)]
pub struct LinuxGuest {
    name: String,
    /// Path there; the guest's own `vmlinux` if none.
    kernel: Option<String>,
    initrd: Option<String>,
    pmu: String,
    cpus: u32,
    max_cpus: Option<u32>,
    memory_mib: u32,
    cmdline: String,
    kaslr: bool,
    script: Script,
    below: Vec<u8>,
    files: Vec<GuestFile>,
    arguments: Vec<String>,
    limit: Limit,
}

/// A file that a guest gets in its initrd.
#[derive(Debug, Clone)]
struct GuestFile {
    path: String,
    mode: u32,
    data: Vec<u8>,
}

impl LinuxGuest {
    /// A guest with one vCPU, 512 MiB, and this value for `--pmu`. Its console is kept under
    /// this name.
    pub fn new(name: impl Into<String>, pmu: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            kernel: None,
            initrd: None,
            pmu: pmu.into(),
            cpus: 1,
            max_cpus: None,
            memory_mib: 512,
            cmdline: String::new(),
            kaslr: false,
            script: Script::Text(String::new()),
            below: Vec::new(),
            files: Vec::new(),
            arguments: Vec::new(),
            limit: Limit::GENEROUS,
        }
    }

    /// Boots another kernel: a path at the place, for instance [`Place::guest_file`]`("bzImage")`
    /// or a file put there by [`LabOptions::files`](crate::lab::LabOptions).
    pub fn kernel(mut self, path: impl Into<String>) -> Self {
        self.kernel = Some(path.into());
        self
    }

    /// Takes another initrd, a path at the place. Its init must know `pv.script`.
    pub fn initrd(mut self, path: impl Into<String>) -> Self {
        self.initrd = Some(path.into());
        self
    }

    /// Number of vCPUs.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Most vCPUs, if some can be added later.
    pub fn max_cpus(mut self, max_cpus: u32) -> Self {
        self.max_cpus = Some(max_cpus);
        self
    }

    /// Guest memory.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// More words for the kernel command line.
    pub fn cmdline(mut self, words: &str) -> Self {
        self.cmdline = words.to_owned();
        self
    }

    /// Lets the kernel randomise its addresses.
    pub fn kaslr(mut self, kaslr: bool) -> Self {
        self.kaslr = kaslr;
        self
    }

    /// The shell script the guest runs. `section NAME COMMAND...` marks output to be found by
    /// [`GuestRun::section`], `send FILE` passes a file out.
    pub fn script(mut self, script: impl Into<String>) -> Self {
        self.script = Script::Text(script.into());
        self
    }

    /// Runs one of the scripts in the guest's initrd, such as `demo`, instead.
    pub fn named_script(mut self, name: &str) -> Self {
        self.script = Script::Named(name.to_owned());
        self
    }

    /// Puts a file into the guest, `path` without the leading slash. Its directory is made.
    pub fn file(mut self, path: &str, mode: u32, data: Vec<u8>) -> Self {
        self.files.push(GuestFile {
            path: path.to_owned(),
            mode,
            data,
        });
        self
    }

    /// Unpacks another initrd first, for what is in it besides; the guest's own files replace those of equal
    /// names.
    pub fn laid_over(mut self, archive: Vec<u8>) -> Self {
        self.below = archive;
        self
    }

    /// More arguments for `perfvisor run`.
    pub fn args<T: Into<String>>(mut self, arguments: impl IntoIterator<Item = T>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Bounds for its run, [`Limit::GENEROUS`] unless set.
    pub fn limit(mut self, limit: impl Into<Limit>) -> Self {
        self.limit = limit.into();
        self
    }

    /// The command that runs this guest. Files, and a script too long for the command line, are put into an
    /// initrd of its own there.
    ///
    /// # Errors
    /// When the files it needs cannot be built or moved.
    pub fn command(&self, place: &Place) -> Result<Command, PlaceError> {
        let mut cmdline = BASE_CMDLINE.to_owned();
        if !self.kaslr {
            cmdline.push_str(" nokaslr");
        }
        if !self.cmdline.is_empty() {
            cmdline.push(' ');
            cmdline.push_str(&self.cmdline);
        }
        let kernel = match &self.kernel {
            Some(path) => path.clone(),
            None => place.guest_file("vmlinux")?,
        };
        let mut initrd = match &self.initrd {
            Some(path) => path.clone(),
            None => place.guest_file("initrd")?,
        };
        let word = match &self.script {
            Script::Named(name) => name.clone(),
            Script::Text(text) => format!("b64:{}", STANDARD.encode(text)),
        };
        let too_long = cmdline.len() + word.len() > MAX_CMDLINE_BYTES;
        let script = match &self.script {
            Script::Text(text) if too_long => Some(text),
            _ => {
                cmdline.push_str(" pv.script=");
                cmdline.push_str(&word);
                None
            }
        };
        if script.is_some() || !self.files.is_empty() || !self.below.is_empty() {
            initrd = self.joined_initrd(place, &initrd, script)?;
        }
        let cpus = match self.max_cpus {
            Some(max) => format!("{},max={max}", self.cpus),
            None => self.cpus.to_string(),
        };
        report::guest_started();
        Ok(Command::new(place.perfvisor()?)
            .arg("run")
            .args(["--kernel", &kernel])
            .args(["--initrd", &initrd])
            .args(["--cmdline", &cmdline])
            .args(["--cpus", &cpus])
            .args(["--memory", &format!("{}M", self.memory_mib)])
            .args(["--pmu", &self.pmu])
            .args(self.arguments.iter().cloned()))
    }

    /// Puts `initrd` with this guest's files and a script appended at a scratch place, and returns its path.
    fn joined_initrd(
        &self,
        place: &Place,
        initrd: &str,
        script: Option<&String>,
    ) -> Result<String, PlaceError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let extra = place.scratch(&format!("extra-{number}.cpio"));
        let below = place.scratch(&format!("below-{number}.cpio"));
        // One file, overwritten by the next guest's: the lab's memory is not endless.
        let joined = place.scratch("initrd-joined");
        let archive = self.archive(script).map_err(|error| PlaceError::File {
            path: extra.clone().into(),
            message: error.to_string(),
        })?;
        place.put(&below, 0o644, &self.below)?;
        place.put(&extra, 0o644, &archive)?;
        let join = Command::shell(format!(
            "cat '{below}' '{initrd}' '{extra}' >'{joined}' && rm '{below}' '{extra}'"
        ));
        let output = place.run(&join, Limit::GENEROUS)?;
        if output.success() {
            Ok(joined)
        } else {
            Err(PlaceError::File {
                path: joined.into(),
                message: output.stderr_text(),
            })
        }
    }

    /// This guest's files and the script.
    fn archive(&self, script: Option<&String>) -> std::io::Result<Vec<u8>> {
        let mut archive = Archive::new(Vec::new());
        let mut made = BTreeSet::new();
        for file in &self.files {
            // Parents from the top: the kernel makes none by itself.
            for (at, _) in file.path.match_indices('/') {
                if made.insert(&file.path[..at]) {
                    archive.directory(&file.path[..at])?;
                }
            }
            archive.file(&file.path, file.mode, &file.data)?;
        }
        if let Some(script) = script {
            archive.file("script", 0o644, script.as_bytes())?;
        }
        archive.finish()
    }

    /// The bounds for its run.
    pub fn limits(&self) -> Limit {
        self.limit
    }

    /// Takes the console of a guest apart that was started with [`LinuxGuest::command`], and reads its
    /// kernel's messages: all of them, after the last of its script has run.
    ///
    /// # Errors
    /// When the console cannot be kept, or the guest's kernel complained.
    pub fn finish(&self, output: &Output) -> Result<GuestRun, PlaceError> {
        let run = GuestRun::new(&self.name, output)?;
        // A guest that did not come to its end fails its test by that.
        let why = match run.console.sections.get(KERNEL_LOG) {
            Some(section) => judge_kernel_log(&section.text)
                .err()
                .map(|error| error.to_string()),
            None if run.console.done.is_some() => Some(format!("the guest printed no section {KERNEL_LOG}")),
            None => None,
        };
        match why {
            None => Ok(run),
            Some(why) => Err(PlaceError::Guest(format!("{why}\n{run}"))),
        }
    }

    /// Runs the guest to its end, takes its console apart and reads its kernel's messages.
    ///
    /// # Errors
    /// When it cannot be started or passes its limit, and when its kernel complained. That the guest's script
    /// failed is no error here.
    pub fn run(&self, place: &Place) -> Result<GuestRun, PlaceError> {
        let process = place.start(&self.command(place)?)?;
        let result = process.wait_or_look(self.limit, || place.look_at_a_hang());
        if let Err(ProcessError::TimedOut { .. }) = &result
            && let Place::Lab(host) = place
        {
            // Not for this guest: for those that come after it.
            host.replace_if_hung();
        }
        self.finish(&result?)
    }
}

/// Output of one section of a guest's script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// What the command printed, both streams.
    pub text: String,
    /// Its exit status; `None` if the guest ended before the command did.
    pub status: Option<i32>,
}

/// What a guest printed, taken apart by its markers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Console {
    /// Seconds of guest time from the kernel's start to its first process.
    pub boot_seconds: Option<f64>,
    /// Output by section name. Of sections with equal names the last one.
    pub sections: BTreeMap<String, Section>,
    /// Files that were sent, by name. A file that arrived damaged is left out.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Exit status of the guest's script; `None` if it did not come that far.
    pub done: Option<i32>,
}

impl Console {
    /// Takes a console apart.
    pub fn parse(text: &str) -> Self {
        enum In {
            Nothing,
            Section(String, String),
            File(String, String),
        }
        let mut console = Self::default();
        let mut state = In::Nothing;
        for line in text.lines() {
            let line = line.trim_end_matches('\r');
            // A program may have left its last line without an end: look for the marker in it.
            let (before, marker) = match line.find("@@pv ") {
                Some(at) => (&line[..at], Some(&line[at + 5..])),
                None => (line, None),
            };
            match &mut state {
                In::Section(_, text) if marker.is_none() || !before.is_empty() => {
                    text.push_str(before);
                    text.push('\n');
                }
                In::File(_, text) => text.push_str(before),
                _ => {}
            }
            let Some(marker) = marker else { continue };
            let mut words = marker.split_whitespace();
            let (Some(verb), argument) = (words.next(), words.next().unwrap_or_default()) else {
                continue;
            };
            match (verb, std::mem::replace(&mut state, In::Nothing)) {
                ("boot", _) => console.boot_seconds = argument.parse().ok(),
                ("done", _) => console.done = argument.parse().ok(),
                ("begin", _) => {
                    state = In::Section(argument.to_owned(), String::new());
                    // Recorded now, in case the guest does not reach the end of it.
                    console.sections.insert(
                        argument.to_owned(),
                        Section {
                            text: String::new(),
                            status: None,
                        },
                    );
                }
                ("end", In::Section(name, text)) if name == argument => {
                    let status = words.next().and_then(|word| word.parse().ok());
                    console.sections.insert(name, Section { text, status });
                }
                ("file", _) => state = In::File(argument.to_owned(), String::new()),
                ("eof", In::File(name, text)) if name == argument => {
                    if let Ok(data) = STANDARD.decode(text.trim()) {
                        console.files.insert(name, data);
                    }
                }
                (_, old) => state = old,
            }
        }
        if let In::Section(name, text) = state {
            console.sections.insert(name, Section { text, status: None });
        }
        console
    }
}

/// A guest that has run to its end.
pub struct GuestRun {
    /// What the guest printed, taken apart.
    pub console: Console,
    /// All of it.
    pub text: String,
    /// What Perfvisor itself printed on standard error.
    pub vmm_log: String,
    /// Exit status of Perfvisor.
    pub status: Option<i32>,
    /// From the start of Perfvisor to its end.
    pub elapsed: Duration,
    log: PathBuf,
}

impl GuestRun {
    fn new(name: &str, output: &Output) -> Result<Self, PlaceError> {
        let text = output.stdout_text();
        let vmm_log = output.stderr_text();
        let log = keep_console(name, &text, &vmm_log)?;
        Ok(Self {
            console: Console::parse(&text),
            text,
            vmm_log,
            status: output.code(),
            elapsed: output.elapsed,
            log,
        })
    }

    /// Where the console is kept.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Output of a section whose command succeeded.
    ///
    /// # Panics
    /// When there is no such section, it did not end, or its command failed: the test fails with
    /// the end of the console.
    #[track_caller]
    pub fn section(&self, name: &str) -> &str {
        match self.console.sections.get(name) {
            Some(Section {
                text,
                status: Some(0),
            }) => text,
            Some(Section { text, status }) => panic!(
                "guest section {name} ended with status {status:?}:\n{}{}\n{self}",
                panics(text),
                last_lines(text, 30)
            ),
            None => panic!("the guest printed no section {name}\n{self}"),
        }
    }

    /// Checks that the script ran to its end with status 0 and Perfvisor ended with status 0.
    ///
    /// # Panics
    /// Otherwise, with the end of the console.
    #[track_caller]
    pub fn expect_success(&self) {
        assert!(
            self.console.done == Some(0) && self.status == Some(0),
            "script status {:?}, perfvisor status {:?}\n{self}",
            self.console.done,
            self.status
        );
    }
}

impl fmt::Display for GuestRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "guest console ({}), end of it:", self.log.display())?;
        f.write_str(&last_lines(&self.text, 25))?;
        writeln!(f, "perfvisor's standard error, end of it:")?;
        f.write_str(&last_lines(&self.vmm_log, 15))
    }
}

/// What the test programs of a section panicked with: the last lines need not show which of them did.
fn panics(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = String::new();
    for (n, _) in lines
        .iter()
        .enumerate()
        .filter(|(_, line)| line.contains(" panicked at "))
    {
        for line in &lines[n.saturating_sub(2)..lines.len().min(n + 4)] {
            found.push_str(line);
            found.push('\n');
        }
        found.push_str("[...]\n");
    }
    found
}

/// Writes a console to `target/integration/guest-NAME.log`, over the one of the last run.
fn keep_console(name: &str, text: &str, vmm_log: &str) -> Result<PathBuf, PlaceError> {
    let log = artefacts::log_dir()?.join(format!("guest-{name}.log"));
    std::fs::write(&log, format!("{text}\n--- perfvisor's standard error\n{vmm_log}")).map_err(|error| {
        PlaceError::File {
            path: log.clone(),
            message: error.to_string(),
        }
    })?;
    Ok(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_files_and_statuses_are_found_between_kernel_messages() {
        let console = Console::parse(
            "[    0.1] Linux version\r\n@@pv boot 2.01\r\n@@pv begin stat\r\nline one\r\n\r\n\
             no newline@@pv end stat 3\r\nnoise\r\n@@pv file x.bin\r\naGVs\r\nbG8=\r\n\
             @@pv eof x.bin\r\n@@pv done 0\r\n",
        );
        assert_eq!(console.boot_seconds, Some(2.01));
        let stat = &console.sections["stat"];
        assert_eq!(stat.text, "line one\n\nno newline\n");
        assert_eq!(stat.status, Some(3));
        assert_eq!(console.files["x.bin"], b"hello");
        assert_eq!(console.done, Some(0));
    }

    #[test]
    fn a_failed_section_tells_what_its_programs_panicked_with() {
        let text = "one\nuncounted for 5 ns\nthread 'a' (3) panicked at x.rs:1:2:\nassertion failed\n\nok\nthe end\n";
        let told = panics(text);
        assert!(told.contains("uncounted for 5 ns\nthread 'a'") && told.contains("assertion failed"));
        assert!(!told.contains("the end") && panics("all is well\n").is_empty());
    }

    #[test]
    fn a_guest_that_dies_in_a_section_leaves_it_without_status() {
        let console = Console::parse("@@pv begin a\ntext\nKernel panic\n");
        assert_eq!(console.sections["a"].status, None);
        assert!(console.sections["a"].text.contains("Kernel panic"));
        assert_eq!(console.done, None);
    }

    #[test]
    fn damaged_files_and_stray_markers_are_ignored() {
        let console = Console::parse("@@pv end x 0\n@@pv file f\n!!!\n@@pv eof f\n@@pv\n@@pv what\n");
        assert!(console.files.is_empty() && console.sections.is_empty());
    }
}
