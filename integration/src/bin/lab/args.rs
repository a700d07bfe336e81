//! Parses the command line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_images::linux::KernelChoice;
use integration::lab::{LabOptions, invalid_path_reason};

pub const USAGE: &str = "\
usage: lab [OPTION...] [COMMAND [ARGUMENT...]]
       lab --build-only

Boots the lab host: QEMU with Debian's kernel and a real KVM, on any machine.
Without COMMAND, opens a shell in it. On a terminal, leave it with \"exit\", or end the lab with Ctrl-A x.
With COMMAND, runs it there, shows its output as it comes, and ends with its exit status.

  --file LABPATH=FILE    put FILE into the lab before the command (repeatable)
  --get LABPATH=FILE     copy a file out of the lab after the command, failed or not (repeatable; up to
                         4096 MiB each)
  --disk FILE            make a raw image /dev/vda in the lab, the next one /dev/vdb; writes are discarded
  --tty                  give COMMAND a terminal, as the shell has one
  --minutes N            end COMMAND after N minutes, with status 124 (default: 10)
  --cpus N               processors for guests (default: 2)
  --memory MIB           memory (default: 3072)
  --kernel KERNEL        kernel of the lab itself: cloud (default), generic, newest, debian13-cloud,
                         debian13-backports, or a Debian package
  --no-perf              leave perf out of the lab
  --build-only           build what the lab needs and boot nothing

Example: lab --get /tmp/guest.pprof=guest.pprof perfvisor check";

/// A parsed command line.
#[derive(Debug)]
pub enum LabCommand {
    /// Prints [`USAGE`].
    Help,
    /// Builds the lab without booting it.
    BuildOnly,
    /// Boots a lab.
    Lab(Box<LabRequest>),
}

/// A lab and the command to run in it.
#[derive(Debug)]
pub struct LabRequest {
    /// Options of the lab.
    pub options: LabOptions,
    /// Program and arguments; empty for a shell.
    pub argv: Vec<String>,
    /// `true` to give the command a terminal.
    pub tty: bool,
    /// Files to copy out after the command.
    pub gets: Vec<FileRequest>,
    /// Maximum duration of the command.
    pub time_limit: Duration,
}

/// A file to copy out of the lab.
#[derive(Debug, PartialEq, Eq)]
pub struct FileRequest {
    /// Path of the file in the lab.
    pub lab_path: String,
    /// Path of the destination.
    pub file: PathBuf,
}

/// Maximum duration of a command without `--minutes`.
const DEFAULT_TIME_LIMIT: Duration = Duration::from_secs(600);

/// Maximum number of `--get` options.
const MAX_GETS: usize = 64;

/// Reason why a command line is invalid.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// The option does not exist.
    #[error("unknown option {0}")]
    Unknown(String),
    /// The value is not of the form LABPATH=FILE.
    #[error("{0}: expected LABPATH=FILE")]
    Pair(&'static str),
    /// The file does not exist.
    #[error("--file: {}: not a file", .0.display())]
    NoFile(PathBuf),
    /// The path is not a valid location for a file in the lab.
    #[error("--file: {0}")]
    LabPath(String),
    /// The destination cannot be written.
    #[error("--get: {}: {reason}", file.display())]
    Destination {
        /// Path of the destination.
        file: PathBuf,
        /// Reason for the failure.
        reason: &'static str,
    },
    /// The number of `--get` options exceeds the maximum.
    #[error("--get: at most {MAX_GETS} files")]
    TooManyGets,
    /// The disk image is missing.
    #[error("--disk: expected a raw image")]
    Disk,
    /// The kernel is unknown.
    #[error("--kernel: expected cloud, generic, newest or a package")]
    Kernel,
    /// The value is not a number or is out of range.
    #[error("{option}: must be between {minimum} and {maximum}")]
    Number {
        /// Name of the option.
        option: &'static str,
        /// Minimum value.
        minimum: u32,
        /// Maximum value.
        maximum: u32,
    },
    /// `--tty` was given without a command; a shell has a terminal anyway.
    #[error("--tty: expected a COMMAND; the shell has a terminal if this is one")]
    TtyWithoutCommand,
}

/// Parses the arguments without the program name.
///
/// # Errors
/// Returns a [`UsageError`] that names the option.
pub fn parse(arguments: impl Iterator<Item = String>) -> Result<LabCommand, UsageError> {
    let mut request = LabRequest {
        options: LabOptions {
            perf: true,
            ..LabOptions::default()
        },
        argv: Vec::new(),
        tty: false,
        gets: Vec::new(),
        time_limit: DEFAULT_TIME_LIMIT,
    };
    let mut arguments = arguments.peekable();
    while let Some(option) = arguments.next_if(|argument| argument.starts_with('-')) {
        let options = &mut request.options;
        let mut value = || arguments.next();
        match option.as_str() {
            "-h" | "--help" => return Ok(LabCommand::Help),
            "--build-only" => return Ok(LabCommand::BuildOnly),
            "--no-perf" => options.perf = false,
            "--tty" => request.tty = true,
            "--file" => add_file(options, value().as_deref())?,
            "--get" => request.add_get(value().as_deref())?,
            "--disk" => {
                let disk = value().map(PathBuf::from).filter(|disk| disk.is_file());
                options.disks.push(disk.ok_or(UsageError::Disk)?);
            }
            "--kernel" => options.kernel = KernelChoice::parse(&value().ok_or(UsageError::Kernel)?),
            "--cpus" => options.cpus = number("--cpus", value(), 1, 16)?,
            "--memory" => options.memory_mib = number("--memory", value(), 512, 65536)?,
            "--minutes" => {
                let minutes = number("--minutes", value(), 1, 1440)?;
                request.time_limit = Duration::from_secs(60 * u64::from(minutes));
            }
            "--" => break,
            _ => return Err(UsageError::Unknown(option)),
        }
    }
    request.argv = arguments.collect();
    if request.tty && request.argv.is_empty() {
        return Err(UsageError::TtyWithoutCommand);
    }
    Ok(LabCommand::Lab(Box::new(request)))
}

fn number(
    option: &'static str,
    value: Option<String>,
    minimum: u32,
    maximum: u32,
) -> Result<u32, UsageError> {
    value
        .and_then(|text| text.parse().ok())
        .filter(|number| (minimum..=maximum).contains(number))
        .ok_or(UsageError::Number {
            option,
            minimum,
            maximum,
        })
}

/// Adds `--file LABPATH=FILE`.
fn add_file(options: &mut LabOptions, value: Option<&str>) -> Result<(), UsageError> {
    let (lab_path, file) = pair("--file", value)?;
    if !file.is_file() {
        return Err(UsageError::NoFile(file));
    }
    let others = options.files.iter().map(|(other, _)| other.as_str());
    if let Some(reason) = invalid_path_reason(&lab_path, others) {
        return Err(UsageError::LabPath(reason));
    }
    options.files.push((lab_path, file));
    Ok(())
}

impl LabRequest {
    /// Adds `--get LABPATH=FILE`. Rejects a destination that cannot be written before the lab
    /// boots.
    fn add_get(&mut self, value: Option<&str>) -> Result<(), UsageError> {
        let (lab_path, file) = pair("--get", value)?;
        if self.gets.len() == MAX_GETS {
            return Err(UsageError::TooManyGets);
        }
        let refused = |reason| {
            let file = file.clone();
            Err(UsageError::Destination { file, reason })
        };
        if file.exists() && !file.is_file() {
            return refused("not a regular file");
        }
        if !directory_of(&file).is_dir() {
            return refused("its directory does not exist");
        }
        if self.gets.iter().any(|other| other.file == file) {
            return refused("named twice");
        }
        self.gets.push(FileRequest { lab_path, file });
        Ok(())
    }
}

/// Splits LABPATH=FILE.
fn pair(option: &'static str, value: Option<&str>) -> Result<(String, PathBuf), UsageError> {
    value
        .and_then(|value| value.split_once('='))
        .filter(|(lab_path, file)| !lab_path.is_empty() && !file.is_empty())
        .map(|(lab_path, file)| (lab_path.to_owned(), PathBuf::from(file)))
        .ok_or(UsageError::Pair(option))
}

/// Returns the directory of a file.
pub fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(line: &str) -> LabRequest {
        match parse(line.split_whitespace().map(str::to_owned)) {
            Ok(LabCommand::Lab(request)) => *request,
            other => panic!("{line}: {other:?}"),
        }
    }

    fn refused(line: &str) -> String {
        match parse(line.split_whitespace().map(str::to_owned)) {
            Err(error) => error.to_string(),
            other => panic!("{line}: {other:?}"),
        }
    }

    #[test]
    fn lab_options_end_at_command() {
        let request = request("--cpus 4 --memory 1024 --minutes 30 --no-perf --tty perf stat --cpus 9");
        assert_eq!(request.argv, ["perf", "stat", "--cpus", "9"]);
        assert_eq!((request.options.cpus, request.options.memory_mib), (4, 1024));
        assert_eq!(request.time_limit, Duration::from_secs(1800));
        assert!(request.tty && !request.options.perf);
    }

    #[test]
    fn lab_defaults_are_shell_with_perf_and_ten_minutes() {
        let shell = request("");
        assert!(shell.argv.is_empty() && shell.gets.is_empty() && shell.options.perf && !shell.tty);
        assert_eq!(shell.time_limit, Duration::from_secs(600));
        assert_eq!(request("-- --odd").argv, ["--odd"]);
    }

    #[test]
    fn lab_accepts_file_and_get_options() {
        let directory = tempfile::tempdir().unwrap();
        let here = |name: &str| directory.path().join(name);
        std::fs::write(here("in"), "x").unwrap();
        std::fs::write(here("old"), "x").unwrap();
        let line = format!(
            "--file etc/in={} --get /tmp/a=b={} --get out={} true",
            here("in").display(),
            here("new").display(),
            here("old").display()
        );
        // The first equals sign ends the path in the lab.
        assert!(refused(&line).contains("directory does not exist"));
        let request = request(&line.replace("a=b", "a"));
        let gets: Vec<_> = request
            .gets
            .iter()
            .map(|get| (get.lab_path.as_str(), &get.file))
            .collect();
        assert_eq!(gets, [("/tmp/a", &here("new")), ("out", &here("old"))]);
        assert_eq!(request.options.files, [("etc/in".to_owned(), here("in"))]);
        assert_eq!(directory_of(Path::new("x")), Path::new("."));
    }

    #[test]
    fn invalid_lab_options_are_rejected_by_name() {
        for (line, words) in [
            ("--frob", "--frob"),
            ("--cpus 0 true", "--cpus: must be between 1 and 16"),
            ("--cpus", "--cpus: must be between"),
            ("--memory 12 true", "--memory: must be between 512 and 65536"),
            ("--minutes x true", "--minutes: must be between 1 and 1440"),
            ("--get /tmp/x true", "--get: expected LABPATH=FILE"),
            ("--get =x true", "--get: expected LABPATH=FILE"),
            ("--get /tmp/x= true", "--get: expected LABPATH=FILE"),
            ("--get /tmp/x=/dev true", "--get: /dev: not a regular file"),
            (
                "--get /tmp/x=/dev/null true",
                "--get: /dev/null: not a regular file",
            ),
            (
                "--get x=/no/such/y true",
                "--get: /no/such/y: its directory does not exist",
            ),
            ("--get x=y --get z=y true", "--get: y: named twice"),
            ("--file x=/no/such/file true", "--file: /no/such/file: not a file"),
            ("--file /tmp/x=Cargo.toml true", "/tmp"),
            ("--disk /no/such/disk true", "--disk: expected a raw image"),
            ("--kernel", "--kernel: expected"),
            ("--tty", "--tty: expected a COMMAND"),
        ] {
            let error = refused(line);
            assert!(
                error.contains(words) && error.lines().count() == 1,
                "{line}: {error}"
            );
        }
        let many: String = (0..65).map(|n| format!("--get x=y{n} ")).collect();
        assert!(refused(&many).contains("at most 64"));
    }
}
