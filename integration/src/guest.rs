//! Runs a Linux guest with a script and parses its console.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use guest_images::cpio::CpioArchive;

use crate::artefacts;
use crate::limit::ProcessTimeLimits;
use crate::parse::judge_kernel_log;
use crate::process::{HostCommand, ProcessOutput, ProcessRunError, last_lines};
use crate::report;
use crate::test_host::{TestHost, TestHostError};

/// Name of the console section that contains the kernel log. The guest's init prints it after the
/// script.
const KERNEL_LOG: &str = "kernel-log";

/// Maximum length of the kernel command line on x86 (`COMMAND_LINE_SIZE`), minus a reserve for the
/// parameters that the VMM adds.
const MAX_CMDLINE_BYTES: usize = 2048 - 256;

/// Kernel command line of every Linux guest.
const BASE_CMDLINE: &str = "console=ttyS0 tsc=reliable no_timer_check quiet";

/// Source of the shell script that a guest runs.
#[derive(Debug, Clone)]
enum ScriptSource {
    /// Script given as text.
    Text(String),
    /// Name of a script in the guest's initrd.
    Named(String),
}

/// A Linux guest to run with Perfvisor.
#[derive(Debug, Clone)]
pub struct LinuxGuest {
    name: String,
    /// Path of the kernel on the test host, or `None` for the `vmlinux` of the Linux guest.
    kernel: Option<String>,
    initrd: Option<String>,
    pmu: String,
    cpus: u32,
    max_cpus: Option<u32>,
    memory_mib: u32,
    cmdline: String,
    kaslr: bool,
    script: ScriptSource,
    below: Vec<u8>,
    files: Vec<GuestFile>,
    arguments: Vec<String>,
    limit: ProcessTimeLimits,
}

/// A file that is added to the guest's initrd.
#[derive(Debug, Clone)]
struct GuestFile {
    path: String,
    mode: u32,
    data: Vec<u8>,
}

/// Boot source of a guest: kernel, initrd and kernel command line. Paths refer to the test host.
#[derive(Debug, Clone)]
pub struct GuestBootSource {
    /// Path of the kernel.
    pub kernel: String,
    /// Path of the initrd.
    pub initrd: String,
    /// Kernel command line.
    pub cmdline: String,
}

impl LinuxGuest {
    /// Creates a guest with one vCPU and 512 MiB of memory. `pmu` is the value of `--pmu`, and
    /// `name` names the file to which the console is saved.
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
            script: ScriptSource::Text(String::new()),
            below: Vec::new(),
            files: Vec::new(),
            arguments: Vec::new(),
            limit: ProcessTimeLimits::GENEROUS,
        }
    }

    /// Sets the kernel, a path on the test host such as [`TestHost::guest_file`]`("bzImage")` or a
    /// file from [`LabOptions::files`](crate::lab::LabOptions).
    pub fn kernel(mut self, path: impl Into<String>) -> Self {
        self.kernel = Some(path.into());
        self
    }

    /// Sets the initrd, a path on the test host. Its init must support the kernel parameter
    /// `pv.script`.
    pub fn initrd(mut self, path: impl Into<String>) -> Self {
        self.initrd = Some(path.into());
        self
    }

    /// Sets the number of vCPUs.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Sets the maximum number of vCPUs, for hot-plug.
    pub fn max_cpus(mut self, max_cpus: u32) -> Self {
        self.max_cpus = Some(max_cpus);
        self
    }

    /// Sets the guest memory, in MiB.
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Appends words to the kernel command line.
    pub fn cmdline(mut self, words: &str) -> Self {
        self.cmdline = words.to_owned();
        self
    }

    /// Enables or disables kernel address space randomization.
    pub fn kaslr(mut self, kaslr: bool) -> Self {
        self.kaslr = kaslr;
        self
    }

    /// Sets the shell script that the guest runs. In the script, `section NAME COMMAND...` marks
    /// output for [`GuestRun::section`], and `send FILE` copies a file out of the guest.
    pub fn script(mut self, script: impl Into<String>) -> Self {
        self.script = ScriptSource::Text(script.into());
        self
    }

    /// Sets the script to one in the guest's initrd, such as `demo`.
    pub fn named_script(mut self, name: &str) -> Self {
        self.script = ScriptSource::Named(name.to_owned());
        self
    }

    /// Adds a file to the guest. `path` has no leading slash; missing directories are created.
    pub fn file(mut self, path: &str, mode: u32, data: Vec<u8>) -> Self {
        self.files.push(GuestFile {
            path: path.to_owned(),
            mode,
            data,
        });
        self
    }

    /// Unpacks `archive` before the guest's own initrd. Files of the guest's initrd replace files
    /// of the same name.
    pub fn unpacked_over(mut self, archive: Vec<u8>) -> Self {
        self.below = archive;
        self
    }

    /// Adds arguments for `perfvisor run`.
    pub fn args<T: Into<String>>(mut self, arguments: impl IntoIterator<Item = T>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets the time limits of the run. The default is [`ProcessTimeLimits::GENEROUS`].
    pub fn limit(mut self, limit: impl Into<ProcessTimeLimits>) -> Self {
        self.limit = limit.into();
        self
    }

    /// Returns the boot source of this guest. If the guest has additional files, or a script that
    /// is too long for the command line, writes an extended initrd to the test host.
    ///
    /// # Errors
    /// Returns an error if the guest's files cannot be built or copied.
    pub fn boot_source(&self, place: &TestHost) -> Result<GuestBootSource, TestHostError> {
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
            ScriptSource::Named(name) => name.clone(),
            ScriptSource::Text(text) => format!("b64:{}", STANDARD.encode(text)),
        };
        let too_long = cmdline.len() + word.len() > MAX_CMDLINE_BYTES;
        let script = match &self.script {
            ScriptSource::Text(text) if too_long => Some(text),
            _ => {
                cmdline.push_str(" pv.script=");
                cmdline.push_str(&word);
                None
            }
        };
        if script.is_some() || !self.files.is_empty() || !self.below.is_empty() {
            initrd = self.joined_initrd(place, &initrd, script)?;
        }
        Ok(GuestBootSource {
            kernel,
            initrd,
            cmdline,
        })
    }

    /// Returns the command that runs this guest.
    ///
    /// # Errors
    /// Returns the same errors as [`LinuxGuest::boot_source`].
    pub fn command(&self, place: &TestHost) -> Result<HostCommand, TestHostError> {
        let source = self.boot_source(place)?;
        let cpus = match self.max_cpus {
            Some(max) => format!("{},max={max}", self.cpus),
            None => self.cpus.to_string(),
        };
        report::guest_started();
        Ok(HostCommand::new(place.perfvisor()?)
            .arg("run")
            .args(["--kernel", &source.kernel])
            .args(["--initrd", &source.initrd])
            .args(["--cmdline", &source.cmdline])
            .args(["--cpus", &cpus])
            .args(["--memory", &format!("{}M", self.memory_mib)])
            .args(["--pmu", &self.pmu])
            .args(self.arguments.iter().cloned()))
    }

    /// Writes a copy of `initrd` that is preceded by the archive of [`LinuxGuest::unpacked_over`]
    /// and followed by this guest's files and `script`. Returns the path of the copy.
    fn joined_initrd(
        &self,
        place: &TestHost,
        initrd: &str,
        script: Option<&String>,
    ) -> Result<String, TestHostError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let extra = place.scratch(&format!("extra-{number}.cpio"));
        let below = place.scratch(&format!("below-{number}.cpio"));
        // Reuse one file for all guests, because the lab's memory is limited.
        let joined = place.scratch("initrd-joined");
        let archive = self.archive(script).map_err(|error| TestHostError::File {
            path: extra.clone().into(),
            message: error.to_string(),
        })?;
        place.put(&below, 0o644, &self.below)?;
        place.put(&extra, 0o644, &archive)?;
        let join = HostCommand::shell(format!(
            "cat '{below}' '{initrd}' '{extra}' >'{joined}' && rm '{below}' '{extra}'"
        ));
        let output = place.run(&join, ProcessTimeLimits::GENEROUS)?;
        if output.success() {
            Ok(joined)
        } else {
            Err(TestHostError::File {
                path: joined.into(),
                message: output.stderr_text(),
            })
        }
    }

    /// Builds a cpio archive of this guest's files and `script`.
    fn archive(&self, script: Option<&String>) -> std::io::Result<Vec<u8>> {
        let mut archive = CpioArchive::new(Vec::new());
        let mut made = BTreeSet::new();
        for file in &self.files {
            // Add parent directories first, because the kernel does not create them.
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

    /// Returns the limits of the run.
    pub fn limits(&self) -> ProcessTimeLimits {
        self.limit
    }

    /// Saves and parses the console of a guest that was started with [`LinuxGuest::command`], and
    /// checks its kernel log.
    ///
    /// # Errors
    /// Returns an error if the console cannot be saved or the guest's kernel reported a problem.
    pub fn finish(&self, output: &ProcessOutput) -> Result<GuestRun, TestHostError> {
        let run = GuestRun::new(&self.name, output)?;
        // A guest that ended early has no kernel log. Its test fails for that reason, so report no
        // other.
        let why = match run.console.sections.get(KERNEL_LOG) {
            Some(section) => judge_kernel_log(&section.text)
                .err()
                .map(|error| error.to_string()),
            None if run.console.done.is_some() => Some(format!("the guest printed no section {KERNEL_LOG}")),
            None => None,
        };
        match why {
            None => Ok(run),
            Some(why) => Err(TestHostError::Guest(format!("{why}\n{run}"))),
        }
    }

    /// Runs the guest to its end, parses its console and checks its kernel messages.
    ///
    /// # Errors
    /// Returns an error if the guest cannot be started, exceeds a limit, or its kernel reported a
    /// problem. A failed script is not an error.
    pub fn run(&self, place: &TestHost) -> Result<GuestRun, TestHostError> {
        let process = place.start(&self.command(place)?)?;
        let result = process.wait_or_diagnose(self.limit, || place.diagnose_hang());
        if let Err(ProcessRunError::TimedOut { .. }) = &result
            && let TestHost::Lab(host) = place
        {
            // Replace the lab, so that later guests do not run in a hung one.
            host.replace_if_hung();
        }
        self.finish(&result?)
    }
}

/// The output of one section of a guest's script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestScriptSection {
    /// Standard output and standard error of the section's command.
    pub text: String,
    /// Exit status of the section's command; `None` if the guest ended before the command.
    pub status: Option<i32>,
}

/// The parsed console of a guest.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GuestConsoleLog {
    /// Guest time from the start of the kernel to its first process, in seconds.
    pub boot_seconds: Option<f64>,
    /// Output by section name. A later section replaces an earlier one of the same name.
    pub sections: BTreeMap<String, GuestScriptSection>,
    /// Files sent by the guest, by name. Damaged files are omitted.
    pub files: BTreeMap<String, Vec<u8>>,
    /// Exit status of the guest's script, or `None` if the script did not finish.
    pub done: Option<i32>,
}

impl GuestConsoleLog {
    /// Parses the text of a console.
    pub fn parse(text: &str) -> Self {
        enum ParserState {
            Nothing,
            Section(String, String),
            File(String, String),
        }
        let mut console = Self::default();
        let mut state = ParserState::Nothing;
        for line in text.lines() {
            let line = line.trim_end_matches('\r');
            // The marker may follow an unterminated last line of a program.
            let (before, marker) = match line.find("@@pv ") {
                Some(at) => (&line[..at], Some(&line[at + 5..])),
                None => (line, None),
            };
            match &mut state {
                ParserState::Section(_, text) if marker.is_none() || !before.is_empty() => {
                    text.push_str(before);
                    text.push('\n');
                }
                ParserState::File(_, text) => text.push_str(before),
                _ => {}
            }
            let Some(marker) = marker else { continue };
            let mut words = marker.split_whitespace();
            let (Some(verb), argument) = (words.next(), words.next().unwrap_or_default()) else {
                continue;
            };
            match (verb, std::mem::replace(&mut state, ParserState::Nothing)) {
                ("boot", _) => console.boot_seconds = argument.parse().ok(),
                ("done", _) => console.done = argument.parse().ok(),
                ("begin", _) => {
                    state = ParserState::Section(argument.to_owned(), String::new());
                    // Record the section now, in case the guest ends before the section does.
                    console.sections.insert(
                        argument.to_owned(),
                        GuestScriptSection {
                            text: String::new(),
                            status: None,
                        },
                    );
                }
                ("end", ParserState::Section(name, text)) if name == argument => {
                    let status = words.next().and_then(|word| word.parse().ok());
                    console.sections.insert(name, GuestScriptSection { text, status });
                }
                ("file", _) => state = ParserState::File(argument.to_owned(), String::new()),
                ("eof", ParserState::File(name, text)) if name == argument => {
                    if let Ok(data) = STANDARD.decode(text.trim()) {
                        console.files.insert(name, data);
                    }
                }
                (_, old) => state = old,
            }
        }
        if let ParserState::Section(name, text) = state {
            console
                .sections
                .insert(name, GuestScriptSection { text, status: None });
        }
        console
    }
}

/// The results of a guest's run.
pub struct GuestRun {
    /// Parsed console of the guest.
    pub console: GuestConsoleLog,
    /// Complete text of the guest's console.
    pub text: String,
    /// Standard error of Perfvisor.
    pub vmm_log: String,
    /// Exit status of Perfvisor.
    pub status: Option<i32>,
    /// Run time of Perfvisor.
    pub elapsed: Duration,
    log: PathBuf,
}

impl GuestRun {
    fn new(name: &str, output: &ProcessOutput) -> Result<Self, TestHostError> {
        let text = output.stdout_text();
        let vmm_log = output.stderr_text();
        let log = keep_console(name, &text, &vmm_log)?;
        Ok(Self {
            console: GuestConsoleLog::parse(&text),
            text,
            vmm_log,
            status: output.code(),
            elapsed: output.elapsed,
            log,
        })
    }

    /// Returns the path of the file to which the console was saved.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns the output of a section whose command succeeded.
    ///
    /// # Panics
    /// Panics with the end of the console if the section is missing or incomplete, or if its
    /// command failed.
    #[track_caller]
    pub fn section(&self, name: &str) -> &str {
        match self.console.sections.get(name) {
            Some(GuestScriptSection {
                text,
                status: Some(0),
            }) => text,
            Some(GuestScriptSection { text, status }) => panic!(
                "guest section {name} ended with status {status:?}:\n{}{}\n{self}",
                panics(text),
                last_lines(text, 30)
            ),
            None => panic!("the guest printed no section {name}\n{self}"),
        }
    }

    /// Checks that the script and Perfvisor exited with status 0.
    ///
    /// # Panics
    /// Panics with the end of the console otherwise.
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

/// Extracts the panic messages of test programs from `text`, the output of a section.
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

/// Saves a console as `target/integration/guest-NAME.log`, replacing the previous one.
fn keep_console(name: &str, text: &str, vmm_log: &str) -> Result<PathBuf, TestHostError> {
    let log = artefacts::log_dir()?.join(format!("guest-{name}.log"));
    std::fs::write(&log, format!("{text}\n--- perfvisor's standard error\n{vmm_log}")).map_err(|error| {
        TestHostError::File {
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
        let console = GuestConsoleLog::parse(
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
    fn failed_section_reports_panic_messages() {
        let text = "one\nuncounted for 5 ns\nthread 'a' (3) panicked at x.rs:1:2:\nassertion failed\n\nok\nthe end\n";
        let told = panics(text);
        assert!(told.contains("uncounted for 5 ns\nthread 'a'") && told.contains("assertion failed"));
        assert!(!told.contains("the end") && panics("all is well\n").is_empty());
    }

    #[test]
    fn section_of_dead_guest_has_no_status() {
        let console = GuestConsoleLog::parse("@@pv begin a\ntext\nKernel panic\n");
        assert_eq!(console.sections["a"].status, None);
        assert!(console.sections["a"].text.contains("Kernel panic"));
        assert_eq!(console.done, None);
    }

    #[test]
    fn damaged_files_and_stray_markers_are_ignored() {
        let console = GuestConsoleLog::parse("@@pv end x 0\n@@pv file f\n!!!\n@@pv eof f\n@@pv\n@@pv what\n");
        assert!(console.files.is_empty() && console.sections.is_empty());
    }
}
