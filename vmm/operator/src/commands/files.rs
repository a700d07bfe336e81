//! `perfvisor flamegraph` and `pprof`, and the code shared by the commands for recordings.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::output::{CommandOutputError, DONE, print_stderr, written};
use crate::exit::ExitStatus;
use crate::input;
use crate::values::{ProfileLabels, parse_labels, parse_percent};
use guest_profile::disk::{DiskError, GuestDisk, GuestDiskReader};
use guest_profile::export::symbolize::{Symbolizer, complete_chains};
use guest_profile::export::{Profile, folded, pprof, reader};
use guest_profile::programs::{GuestFilesystemSource, GuestSymbols};
use kernel_images::image::KernelImage;
use kernel_images::symbols::KernelSymbols;
use perf_core::error_line;
use virtio_devices::disk::config::DiskConfig;
use virtio_devices::disk::image::DiskImageError;
use virtio_devices::disk::view::UnlockedDiskView;

/// Maximum size of a kernel image with symbols, in bytes.
const MAX_VMLINUX: u64 = 2 << 30;
/// Maximum size of a /proc/kallsyms file, in bytes. Linux needs about ten MiB.
const MAX_KALLSYMS: u64 = 256 << 20;

/// Sources of symbols.
#[derive(Clone, Debug, Default, Args)]
pub struct SymbolArgs {
    /// Read kernel symbols from a copy of the guest's /proc/kallsyms.
    #[arg(long, value_name = "FILE", conflicts_with = "vmlinux")]
    pub kallsyms: Option<PathBuf>,
    /// Read kernel symbols from the guest's vmlinux.
    #[arg(long, value_name = "FILE")]
    pub vmlinux: Option<PathBuf>,
    /// Read symbols of programs from the guest's root directory.
    #[arg(long, visible_alias = "symfs", value_name = "DIR")]
    pub guestmount: Option<PathBuf>,
    /// Read symbols and unwind tables of programs from a disk of the guest, given as for run
    /// --disk. The disk is only read and may be in use.
    #[arg(
        long = "guest-disk",
        value_name = "FILE[,format=qcow2]...",
        conflicts_with = "guestmount"
    )]
    pub guest_disk: Option<DiskConfig>,
}

/// Recording, and sources of symbols.
#[derive(Clone, Debug, Args)]
pub struct RecordingFileArgs {
    /// Read this recording.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data")]
    pub input: PathBuf,
    /// Sources of symbols.
    #[command(flatten)]
    pub symbols: SymbolArgs,
}

/// `perfvisor flamegraph`.
#[derive(Clone, Debug, Args)]
pub struct FlamegraphArgs {
    /// Recording.
    #[command(flatten)]
    pub file: RecordingFileArgs,
    /// Write the graph to this file; - for standard output.
    #[arg(short, long, value_name = "FILE", default_value = "flamegraph.svg")]
    pub output: PathBuf,
    /// Print folded stacks to standard output instead.
    #[arg(long, conflicts_with = "output")]
    pub folded: bool,
    /// Colour the graph by the change since this older recording: red for growth, blue for decline.
    #[arg(long, value_name = "FILE", conflicts_with = "folded")]
    pub diff: Option<PathBuf>,
    /// Set the title of the graph.
    #[arg(long, value_name = "TEXT", default_value = "Flame Graph")]
    pub title: String,
    /// Hide frames that are narrower than this share, in percent.
    #[arg(long, value_name = "PERCENT", default_value = "0.01", value_parser = parse_percent)]
    pub min_width: f64,
}

/// `perfvisor pprof`.
#[derive(Clone, Debug, Args)]
pub struct PprofArgs {
    /// Recording.
    #[command(flatten)]
    pub file: RecordingFileArgs,
    /// Write the profile to this file; - for standard output.
    #[arg(short, long, value_name = "FILE", default_value = "profile.pb.gz")]
    pub output: PathBuf,
    /// Label samples with task, event, vcpu and pid, or a subset of these. Samples with equal
    /// stacks and labels are merged.
    #[arg(long, value_name = "LIST", default_value = "task,event,vcpu,pid", value_parser = parse_labels)]
    pub labels: ProfileLabels,
}

/// Error returned when symbols cannot be loaded from files.
#[derive(Debug, thiserror::Error)]
pub enum SymbolLoadError {
    #[error("--guestmount {}: not a directory", .0.display())]
    NoDirectory(PathBuf),
    #[error("--guest-disk")]
    DiskImage(#[source] DiskImageError),
    #[error("--guest-disk {}", path.display())]
    Disk {
        path: PathBuf,
        #[source]
        source: DiskError,
    },
    #[error("{}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}: must be at most {} MiB", path.display(), limit >> 20)]
    TooLarge { path: PathBuf, limit: u64 },
    #[error("{}", path.display())]
    Kallsyms {
        path: PathBuf,
        #[source]
        source: kernel_images::symbols::KallsymsTextError,
    },
    #[error(transparent)]
    Kernel(#[from] kernel_images::KernelImageError),
    #[error("{}: no symbols found", .0.display())]
    Stripped(PathBuf),
}

/// Error returned when a recording cannot be read or converted.
#[derive(Debug, thiserror::Error)]
pub enum RecordingFileError {
    #[error("{}", path.display())]
    Recording {
        path: PathBuf,
        #[source]
        source: reader::ProfileReadError,
    },
    #[error(transparent)]
    Symbols(#[from] SymbolLoadError),
    #[error(transparent)]
    Output(#[from] CommandOutputError),
    #[error("cannot write {}", output_name(path))]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}", output_name(path))]
    Draw {
        path: PathBuf,
        #[source]
        source: folded::FlameGraphError,
    },
}

impl RecordingFileError {
    /// Returns a closure for `map_err` that adds `path` to a write error.
    pub(super) fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Write {
            path: path.to_owned(),
            source,
        }
    }
}

/// Reads the profile of a recording. Prints a message and returns `None` if the recording is empty.
///
/// # Errors
/// Returns [`RecordingFileError::Recording`] if the file is not a valid recording.
pub(super) fn read_profile(path: &Path) -> Result<Option<Profile>, RecordingFileError> {
    match reader::read_file(path) {
        Ok(profile) => Ok(Some(profile)),
        Err(e) if e.is_empty() => {
            print_stderr(&format!(
                "perfvisor: warn: {}: {}\n",
                path.display(),
                error_line(&e)
            ));
            Ok(None)
        }
        Err(source) => Err(RecordingFileError::Recording {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Creates the symbolizer of a profile from the sources selected by the user.
///
/// # Errors
/// Returns [`SymbolLoadError`] if a source is unusable.
pub(super) fn symbolizer<'p>(
    profile: &'p Profile,
    args: &SymbolArgs,
) -> Result<Symbolizer<'p>, SymbolLoadError> {
    let reference = profile.kernel.as_ref();
    let reference = reference.map(|k| (k.reference_symbol.as_str(), k.reference_address));
    let kernel = kernel_symbols(args, reference)?;
    Ok(Symbolizer::new(profile, kernel, guest_mount(args)?))
}

/// Logs warnings about problems with symbols and about samples lost while recording.
pub(super) fn warn_missing_data(profile: &Profile, symbols: &Symbolizer<'_>) {
    for problem in symbols.problems() {
        log::warn!("{problem}");
    }
    if profile.lost > 0 {
        log::warn!("{} samples were lost while recording", profile.lost);
    }
}

/// Reads a recording and calls `show` with its profile.
pub(super) fn with_profile(
    args: &RecordingFileArgs,
    show: impl FnOnce(&Profile, &mut Symbolizer<'_>) -> Result<(), RecordingFileError>,
) -> Result<ExitStatus, RecordingFileError> {
    let Some(profile) = read_profile(&args.input)? else {
        return Ok(DONE);
    };
    let mut symbols = symbolizer(&profile, &args.symbols)?;
    show(&profile, &mut symbols)?;
    warn_missing_data(&profile, &symbols);
    Ok(DONE)
}

/// Opens the guest's file system if the user specified its location.
///
/// # Errors
/// Returns [`SymbolLoadError`] if the directory or image is unusable.
pub(super) fn guest_mount(args: &SymbolArgs) -> Result<Option<GuestSymbols>, SymbolLoadError> {
    Ok(guest_files(args)?.map(GuestSymbols::of))
}

/// Opens the guest's file system for reading programs, if the user specified its location.
///
/// # Errors
/// Returns [`SymbolLoadError`] if the directory or image is unusable.
pub(super) fn guest_files(args: &SymbolArgs) -> Result<Option<GuestFilesystemSource>, SymbolLoadError> {
    match (&args.guestmount, &args.guest_disk) {
        (Some(dir), _) if dir.is_dir() => Ok(Some(GuestFilesystemSource::Directory(dir.clone()))),
        (Some(dir), _) => Err(SymbolLoadError::NoDirectory(dir.clone())),
        (None, Some(config)) => {
            let view = UnlockedDiskView::open(config).map_err(SymbolLoadError::DiskImage)?;
            let disk = GuestDisk::open(Box::new(HostDisk(view))).map_err(|source| SymbolLoadError::Disk {
                path: config.path.clone(),
                source,
            })?;
            Ok(Some(GuestFilesystemSource::Disk(disk)))
        }
        (None, None) => Ok(None),
    }
}

/// Disk image of a guest, read on the host.
struct HostDisk(UnlockedDiskView);

impl GuestDiskReader for HostDisk {
    fn len(&self) -> u64 {
        self.0.bytes()
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        self.0.read(at, to)
    }

    fn reload(&self) -> io::Result<()> {
        self.0.reload().map_err(io::Error::other)
    }
}

/// Loads the symbols of the guest kernel from the file that the user specified, if any. The symbols
/// of a kernel image are relocated to run-time addresses with `reference`, which is a symbol of the
/// running kernel and its address.
///
/// # Errors
/// Returns [`SymbolLoadError`] if the file is unusable.
pub(super) fn kernel_symbols(
    args: &SymbolArgs,
    reference: Option<(&str, u64)>,
) -> Result<Option<KernelSymbols>, SymbolLoadError> {
    if let Some(path) = &args.kallsyms {
        let parsed = KernelSymbols::parse_text(&read(path, MAX_KALLSYMS)?);
        let symbols = parsed.map_err(|source| SymbolLoadError::Kallsyms {
            path: path.clone(),
            source,
        })?;
        return Ok(Some(symbols));
    }
    let Some(path) = &args.vmlinux else {
        return Ok(None);
    };
    let image = KernelImage::parse(&path.display().to_string(), &read(path, MAX_VMLINUX)?)?;
    let symbols = image
        .symbols()
        .ok_or_else(|| SymbolLoadError::Stripped(path.clone()))?;
    // The recording or the VM gives the run-time address of one kernel symbol, and thus the offset
    // of the kernel from its link address.
    let slide = reference.and_then(|(name, running)| {
        let linked = symbols.by_name(name)?.address;
        Some(running.wrapping_sub(linked))
    });
    Ok(Some(symbols.relocated(slide.unwrap_or(0))))
}

pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, SymbolLoadError> {
    let mut bytes = Vec::new();
    // The reported file size is unreliable; it is 0 for devices.
    let result = input::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut bytes));
    let path = path.to_owned();
    match result {
        Err(source) => Err(SymbolLoadError::Read { path, source }),
        Ok(_) if bytes.len() as u64 > limit => Err(SymbolLoadError::TooLarge { path, limit }),
        Ok(_) => Ok(bytes),
    }
}

/// Returns the path of an output, or `standard output` for `-`, for error messages.
fn output_name(output: &Path) -> String {
    if output == Path::new("-") {
        return "standard output".into();
    }
    output.display().to_string()
}

/// Calls `write` with standard output, or with a file that is removed if `write` fails.
pub(super) fn write_to(
    output: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), RecordingFileError>,
) -> Result<(), RecordingFileError> {
    if output == Path::new("-") {
        let mut out = BufWriter::new(io::stdout().lock());
        write(&mut out)?;
        return Ok(written(out.flush())?);
    }
    let file = File::create(output).map_err(RecordingFileError::write(output))?;
    let mut out = BufWriter::new(file);
    let result = write(&mut out).and_then(|()| out.flush().map_err(RecordingFileError::write(output)));
    // Removes an incomplete regular file, but never a device or a symbolic link.
    if result.is_err() && std::fs::symlink_metadata(output).is_ok_and(|meta| meta.is_file()) {
        let _ = std::fs::remove_file(output);
    }
    result
}

/// Writes a flame graph or folded stacks of a recording.
///
/// # Errors
/// Returns [`RecordingFileError`] if the recording cannot be read or the output cannot be written.
pub fn flamegraph(args: &FlamegraphArgs) -> Result<ExitStatus, RecordingFileError> {
    with_profile(&args.file, |profile, symbols| {
        let stacks = folded::stacks(&complete_chains(profile, symbols), symbols, None);
        if args.folded {
            let mut out = BufWriter::new(io::stdout().lock());
            return Ok(written(
                folded::write(&stacks, &mut out).and_then(|()| out.flush()),
            )?);
        }
        let before = match &args.diff {
            Some(path) => match older_stacks(path, &args.file.symbols)? {
                Some(before) => Some(before),
                None => return Ok(()),
            },
            None => None,
        };
        let unit = profile.events.first().map_or("samples", |e| e.name.as_str());
        write_to(&args.output, |out| {
            let drawn = match &before {
                Some(before) => {
                    folded::differential((before, &stacks), &args.title, unit, args.min_width, out)
                }
                None => folded::flamegraph(&stacks, &args.title, unit, args.min_width, out),
            };
            drawn.map_err(|source| RecordingFileError::Draw {
                path: args.output.clone(),
                source,
            })
        })
    })
}

/// Reads the stacks of the older recording of a differential flame graph. Prints a message and
/// returns `None` if the recording is empty.
fn older_stacks(
    path: &Path,
    symbols: &SymbolArgs,
) -> Result<Option<BTreeMap<String, u64>>, RecordingFileError> {
    let Some(profile) = read_profile(path)? else {
        return Ok(None);
    };
    let mut symbols = symbolizer(&profile, symbols)?;
    let stacks = folded::stacks(&complete_chains(&profile, &mut symbols), &mut symbols, None);
    warn_missing_data(&profile, &symbols);
    Ok(Some(stacks))
}

/// Writes a pprof profile of a recording.
///
/// # Errors
/// Returns [`RecordingFileError`] if the recording cannot be read or the output cannot be written.
pub fn pprof(args: &PprofArgs) -> Result<ExitStatus, RecordingFileError> {
    with_profile(&args.file, |profile, symbols| {
        write_to(&args.output, |out| {
            pprof::write(&complete_chains(profile, symbols), symbols, &args.labels.0, out)
                .map_err(RecordingFileError::write(&args.output))
        })
    })
}

#[cfg(test)]
mod tests {
    use virtio_devices::disk::image::DiskImage;

    use super::*;

    /// A failed command removes its output only if the output is a regular file. Regression test:
    /// `pprof -o /dev/full` as root removed the device.
    #[test]
    fn failed_output_is_removed_only_if_regular_file() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("full"));
        std::os::unix::fs::symlink("/dev/full", &link).unwrap();
        let fail = |_: &mut dyn Write| {
            Err(RecordingFileError::write(Path::new("there"))(io::Error::other(
                "why",
            )))
        };
        assert_eq!(
            error_line(&write_to(&file, fail).unwrap_err()),
            "cannot write there: why"
        );
        assert!(!file.exists());
        let write = |out: &mut dyn Write| out.write_all(b"x").map_err(RecordingFileError::write(&link));
        let why = error_line(&write_to(&link, write).unwrap_err());
        assert!(why.contains("No space left"), "{why}");
        assert!(link.is_symlink());
        let of_stdout = RecordingFileError::write(Path::new("-"))(io::Error::other("why"));
        assert_eq!(error_line(&of_stdout), "cannot write standard output: why");
    }

    /// Programs are read from a compressed qcow2 image with an overlay, as in a VM.
    #[test]
    #[expect(clippy::print_stderr, reason = "a test that could not run says so")]
    fn guest_programs_are_read_from_open_qcow2_image() {
        let temp = tempfile::tempdir().unwrap();
        let run = |line: &str| {
            let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
            let mut command = std::process::Command::new("sh");
            let command = command.args(["-ec", line]).current_dir(&temp).env("PATH", path);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{line}: {output:?}");
            !output.stdout.is_empty()
        };
        if !run("command -v mke2fs >&2 && command -v qemu-img || :") {
            eprintln!("SKIPPED: no mke2fs (e2fsprogs) or no qemu-img (qemu-utils)");
            return;
        }
        let program = vec![7; 300_000];
        std::fs::create_dir_all(temp.path().join("root/usr/bin")).unwrap();
        std::fs::write(temp.path().join("root/usr/bin/prog"), &program).unwrap();
        run("mke2fs -q -t ext4 -d root raw 8M && rm -r root");
        run("qemu-img convert -q -c -f raw -O qcow2 raw base.qcow2");
        run("qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 front.qcow2");
        let path = |name: &str| temp.path().join(name).display().to_string();
        let (base, front) = (path("base.qcow2"), path("front.qcow2"));
        for disk in [
            format!("{base},format=qcow2"),
            format!("{front},format=qcow2,backing={base},backing-format=qcow2"),
        ] {
            let config: DiskConfig = disk.parse().unwrap();
            let in_use = DiskImage::open(&config).unwrap();
            let args = SymbolArgs {
                guest_disk: Some(config),
                ..SymbolArgs::default()
            };
            let mut files = guest_files(&args).unwrap().unwrap();
            assert!(files.program("/usr/bin/prog").unwrap() == program, "{disk}");
            files.reload();
            assert!(
                files.program("/usr/bin/../bin/prog").unwrap() == program,
                "{disk}"
            );
            drop(in_use);
        }
        // A raw view of the image has no file system, and an overlay without its base is rejected.
        for (disk, what) in [
            (base.clone(), "no readable ext4 file system"),
            (format!("{front},format=qcow2"), "base.qcow2"),
        ] {
            let args = SymbolArgs {
                guest_disk: Some(disk.parse().unwrap()),
                ..SymbolArgs::default()
            };
            let line = error_line(&guest_files(&args).unwrap_err());
            assert!(line.contains(what) && !line.contains('\n'), "{line}");
        }
    }

    /// The size of a symbol file is limited. Regression test: reading an endless device exhausted
    /// the memory of the host.
    #[test]
    fn symbol_file_size_is_bounded() {
        let why = read(Path::new("/dev/zero"), 1 << 20).unwrap_err();
        assert_eq!(why.to_string(), "/dev/zero: must be at most 1 MiB");
        assert!(read(Path::new("/dev/null"), 1 << 20).unwrap().is_empty());
    }
}
