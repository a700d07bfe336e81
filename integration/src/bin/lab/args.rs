//! Parses the command line of the lab program.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::value_parser;
use guest_images::linux::KernelChoice;
use integration::lab::{LabOptions, invalid_path_reason};

/// Boots the lab host, QEMU with Debian's kernel and a real KVM, on any machine.
///
/// Without COMMAND, opens a shell in the lab. On a terminal, leave the shell with "exit", or
/// terminate the lab with Ctrl-A x. With COMMAND, runs it in the lab, forwards its output as it
/// arrives, and exits with its status.
#[derive(Debug, clap::Parser)]
#[command(
    name = "lab",
    after_help = "Example: lab --get /tmp/guest.pprof=guest.pprof perfvisor check"
)]
pub struct LabArgs {
    /// Puts FILE into the lab before the command (repeatable)
    #[arg(long = "file", value_name = "LABPATH=FILE", value_parser = pair)]
    files: Vec<LabFileArgument>,
    /// Copies a file of up to 4096 MiB out of the lab after the command, failed or not (repeatable)
    #[arg(long = "get", value_name = "LABPATH=FILE", value_parser = pair)]
    pub gets: Vec<LabFileArgument>,
    /// Provides a raw image as /dev/vda in the lab, the next one as /dev/vdb; writes are discarded
    #[arg(long = "disk", value_name = "FILE")]
    disks: Vec<PathBuf>,
    /// Gives COMMAND a terminal, as for the interactive shell
    #[arg(long, requires = "argv")]
    pub tty: bool,
    /// Terminates COMMAND after N minutes, with status 124
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = value_parser!(u16).range(1..=1440))]
    minutes: u16,
    /// Number of processors for guests
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u32).range(1..=16))]
    cpus: u32,
    /// Memory, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 3072, value_parser = value_parser!(u32).range(512..=65536))]
    memory: u32,
    /// Kernel of the lab itself: cloud, generic, newest, debian13-cloud, debian13-backports, or a
    /// Debian package
    #[arg(long, default_value = "cloud")]
    kernel: String,
    /// Leaves perf out of the lab
    #[arg(long)]
    no_perf: bool,
    /// Builds everything that the lab needs without booting it
    #[arg(long)]
    pub build_only: bool,
    /// Program to run and its arguments; without them, a shell is opened
    #[arg(value_name = "COMMAND", trailing_var_arg = true)]
    pub argv: Vec<String>,
}

/// A file to copy into or out of the lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabFileArgument {
    /// Path of the file in the lab.
    pub lab_path: String,
    /// Path of the local file to copy, or of the local copy.
    pub file: PathBuf,
}

/// Maximum number of `--get` options.
const MAX_GETS: usize = 64;

/// Reason why a command line is invalid.
#[derive(Debug, thiserror::Error)]
pub enum UsageError {
    /// The file that an option names does not exist.
    #[error("{option} {}: not a file", path.display())]
    NoFile {
        /// Command-line option that names the file.
        option: &'static str,
        /// Path of the missing file.
        path: PathBuf,
    },
    /// The path is not valid for a file in the lab.
    #[error("--file: {0}")]
    LabPath(String),
    /// The destination of a `--get` option cannot be written.
    #[error("--get: {}: {reason}", file.display())]
    Destination {
        /// Path of the file to be written.
        file: PathBuf,
        /// Reason why the destination cannot be written.
        reason: &'static str,
    },
    /// The command line contains more than [`MAX_GETS`] `--get` options.
    #[error("--get: at most {MAX_GETS} files")]
    TooManyGets,
}

impl LabArgs {
    /// Returns the maximum duration of the command.
    pub fn time_limit(&self) -> Duration {
        Duration::from_secs(60 * u64::from(self.minutes))
    }

    /// Returns the options of the lab. Rejects files that cannot be read and destinations that
    /// cannot be written before the lab boots.
    ///
    /// # Errors
    /// Returns a [`UsageError`] that names the option.
    pub fn options(&self) -> Result<LabOptions, UsageError> {
        self.check_gets()?;
        let mut options = LabOptions {
            cpus: self.cpus,
            memory_mib: self.memory,
            perf: !self.no_perf,
            kernel: KernelChoice::parse(&self.kernel),
            disks: self.disks.clone(),
            ..LabOptions::default()
        };
        if let Some(disk) = self.disks.iter().find(|disk| !disk.is_file()) {
            return Err(UsageError::NoFile {
                option: "--disk",
                path: disk.clone(),
            });
        }
        for LabFileArgument { lab_path, file } in &self.files {
            if !file.is_file() {
                return Err(UsageError::NoFile {
                    option: "--file",
                    path: file.clone(),
                });
            }
            let others = options.files.iter().map(|(other, _)| other.as_str());
            if let Some(reason) = invalid_path_reason(lab_path, others) {
                return Err(UsageError::LabPath(reason));
            }
            options.files.push((lab_path.clone(), file.clone()));
        }
        Ok(options)
    }

    fn check_gets(&self) -> Result<(), UsageError> {
        if self.gets.len() > MAX_GETS {
            return Err(UsageError::TooManyGets);
        }
        for (n, LabFileArgument { file, .. }) in self.gets.iter().enumerate() {
            let reason = if file.exists() && !file.is_file() {
                "not a regular file"
            } else if !directory_of(file).is_dir() {
                "its directory does not exist"
            } else if self.gets[..n].iter().any(|other| other.file == *file) {
                "named twice"
            } else {
                continue;
            };
            let file = file.clone();
            return Err(UsageError::Destination { file, reason });
        }
        Ok(())
    }
}

/// Splits LABPATH=FILE at the first equals sign.
fn pair(value: &str) -> Result<LabFileArgument, &'static str> {
    let (lab_path, file) = value.split_once('=').ok_or("expected LABPATH=FILE")?;
    if lab_path.is_empty() || file.is_empty() {
        return Err("expected LABPATH=FILE");
    }
    Ok(LabFileArgument {
        lab_path: lab_path.to_owned(),
        file: file.into(),
    })
}

/// Returns the parent directory of `file`, or `.` if the path has none.
pub fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn parse(line: &str) -> Result<(LabArgs, LabOptions), String> {
        let words = std::iter::once("lab").chain(line.split_whitespace());
        let request = LabArgs::try_parse_from(words).map_err(|error| error.to_string())?;
        let options = request.options().map_err(|error| error.to_string())?;
        Ok((request, options))
    }

    #[test]
    fn lab_options_end_at_command() {
        let line = "--cpus 4 --memory 1024 --minutes 30 --no-perf --tty perf stat --cpus 9";
        let (request, options) = parse(line).unwrap();
        assert_eq!(request.argv, ["perf", "stat", "--cpus", "9"]);
        assert_eq!((options.cpus, options.memory_mib), (4, 1024));
        assert_eq!(request.time_limit(), Duration::from_secs(1800));
        assert!(request.tty && !options.perf);
        let (shell, options) = parse("").unwrap();
        assert!(shell.argv.is_empty() && shell.gets.is_empty() && options.perf && !shell.tty);
        assert_eq!(shell.time_limit(), Duration::from_secs(600));
        assert_eq!(parse("-- --odd").unwrap().0.argv, ["--odd"]);
    }

    #[test]
    fn lab_accepts_file_and_get_options() {
        let directory = tempfile::tempdir().unwrap();
        let here = |name: &str| directory.path().join(name);
        std::fs::write(here("in"), "x").unwrap();
        std::fs::write(here("old"), "x").unwrap();
        let line = format!(
            "--file etc/in={} --get /tmp/a={} --get out={} true",
            here("in").display(),
            here("new").display(),
            here("old").display()
        );
        let (request, options) = parse(&line).unwrap();
        let get = |lab_path: &str, file: &str| LabFileArgument {
            lab_path: lab_path.to_owned(),
            file: here(file),
        };
        assert_eq!(request.gets, [get("/tmp/a", "new"), get("out", "old")]);
        assert_eq!(options.files, [("etc/in".to_owned(), here("in"))]);
        assert_eq!(directory_of(Path::new("x")), Path::new("."));
    }

    #[test]
    fn invalid_lab_options_are_rejected_by_name() {
        for (line, words) in [
            ("--frob", "--frob"),
            ("--cpus 0 true", "1..=16"),
            ("--memory 12 true", "512..=65536"),
            ("--minutes x true", "--minutes"),
            ("--get /tmp/x true", "expected LABPATH=FILE"),
            ("--get =x true", "expected LABPATH=FILE"),
            ("--get /tmp/x= true", "expected LABPATH=FILE"),
            (
                "--get /tmp/x=/dev/null true",
                "--get: /dev/null: not a regular file",
            ),
            // The path in the lab ends at the first equals sign.
            (
                "--get x=b=/no/y true",
                "--get: b=/no/y: its directory does not exist",
            ),
            ("--get x=y --get z=y true", "--get: y: named twice"),
            ("--file x=/no/such/file true", "--file /no/such/file: not a file"),
            ("--file /tmp/x=Cargo.toml true", "/tmp"),
            ("--disk /no/such/disk true", "--disk /no/such/disk: not a file"),
            ("--tty", "COMMAND"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(words), "{line}: {error}");
        }
        let many: String = (0..65).map(|n| format!("--get x=y{n} ")).collect();
        assert!(parse(&many).unwrap_err().contains("at most 64"));
    }
}
