//! `perfvisor report`, `script`, `flamegraph` and `pprof`: what is in a file that was recorded.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::output::{DONE, OutputError, print, say, written};
use crate::exit::ExitStatus;
use crate::input;
use crate::values::{Labels, SortKeys, parse_labels, parse_percent, parse_sort};
use guest_profile::disk::{DiskBytes, DiskError, GuestDisk};
use guest_profile::export::report::ReportOptions;
use guest_profile::export::symbolize::{Symbolizer, complete_chains};
use guest_profile::export::{Profile, folded, pprof, reader, report, script};
use guest_profile::programs::{GuestFiles, GuestMount};
use kernel_images::image::KernelImage;
use kernel_images::symbols::KernelSymbols;
use perf_core::error_line;
use virtio_devices::disk::config::DiskConfig;
use virtio_devices::disk::image::ImageError;
use virtio_devices::disk::view::DiskView;

/// Largest kernel image with symbols that is read.
const MAX_VMLINUX: u64 = 2 << 30;
/// Largest file of the form of /proc/kallsyms that is read: that of Linux has some ten MiB.
const MAX_KALLSYMS: u64 = 256 << 20;

/// Where names come from.
#[derive(Clone, Debug, Default, Args)]
pub struct SymbolArgs {
    /// Kernel symbols: text in the form of the guest's /proc/kallsyms.
    #[arg(long, value_name = "FILE", conflicts_with = "vmlinux")]
    pub kallsyms: Option<PathBuf>,
    /// Kernel symbols: the guest's vmlinux.
    #[arg(long, value_name = "FILE")]
    pub vmlinux: Option<PathBuf>,
    /// The guest's root directory, for the symbols of its programs.
    #[arg(long, visible_alias = "symfs", value_name = "DIR")]
    pub guestmount: Option<PathBuf>,
    /// A disk of the guest's with its programs, as with run --disk, for their symbols and unwind tables. It
    /// is read only, and may be in use.
    #[arg(
        long = "guest-disk",
        value_name = "FILE[,format=qcow2]...",
        conflicts_with = "guestmount"
    )]
    pub guest_disk: Option<DiskConfig>,
}

/// Which file, and where names come from.
#[derive(Clone, Debug, Args)]
pub struct FileArgs {
    /// The file.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data")]
    pub input: PathBuf,
    /// Where names come from.
    #[command(flatten)]
    pub symbols: SymbolArgs,
}

/// `perfvisor report`.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// Which file.
    #[command(flatten)]
    pub file: FileArgs,
    /// Columns to group by: comm, pid, vcpu, dso, sym.
    #[arg(short, long, value_name = "KEYS", default_value = "comm,dso,sym", value_parser = parse_sort)]
    pub sort: SortKeys,
    /// Leave out what is below this share, in percent.
    #[arg(long, value_name = "PERCENT", default_value = "0", value_parser = parse_percent)]
    pub percent_limit: f64,
}

/// `perfvisor flamegraph`.
#[derive(Clone, Debug, Args)]
pub struct FlamegraphArgs {
    /// Which file.
    #[command(flatten)]
    pub file: FileArgs,
    /// Where to draw; - is standard output.
    #[arg(short, long, value_name = "FILE", default_value = "flamegraph.svg")]
    pub output: PathBuf,
    /// Print folded stacks to standard output instead.
    #[arg(long, conflicts_with = "output")]
    pub folded: bool,
    /// Title of the graph.
    #[arg(long, value_name = "TEXT", default_value = "Flame Graph")]
    pub title: String,
    /// Leave out what is narrower than this share, in percent.
    #[arg(long, value_name = "PERCENT", default_value = "0.01", value_parser = parse_percent)]
    pub min_width: f64,
}

/// `perfvisor pprof`.
#[derive(Clone, Debug, Args)]
pub struct PprofArgs {
    /// Which file.
    #[command(flatten)]
    pub file: FileArgs,
    /// Where to write; - is standard output.
    #[arg(short, long, value_name = "FILE", default_value = "profile.pb.gz")]
    pub output: PathBuf,
    /// Labels of the samples: task, event, vcpu, pid. Samples of a stack that differ in nothing else are one.
    #[arg(long, value_name = "LIST", default_value = "task,event,vcpu,pid", value_parser = parse_labels)]
    pub labels: Labels,
}

/// Why symbols cannot be had from the files that were named.
#[derive(Debug, thiserror::Error)]
pub enum SymbolsError {
    /// The guest's root directory is none.
    #[error("--guestmount {}: it is no directory", .0.display())]
    NoDirectory(PathBuf),
    /// The guest's disk cannot be opened.
    #[error("--guest-disk")]
    DiskImage(#[source] ImageError),
    /// It has no file system of which files could be read.
    #[error("--guest-disk {}", path.display())]
    Disk {
        /// The image.
        path: PathBuf,
        /// Why.
        #[source]
        source: DiskError,
    },
    /// It cannot be read.
    #[error("{}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is larger than any such file is.
    #[error("{}: such a file of symbols has at most {} MiB", path.display(), limit >> 20)]
    TooLarge {
        /// Which.
        path: PathBuf,
        /// Most bytes.
        limit: u64,
    },
    /// Its text is no list of symbols.
    #[error("{}", path.display())]
    Kallsyms {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: kernel_images::symbols::KallsymsTextError,
    },
    /// It is no kernel.
    #[error(transparent)]
    Kernel(#[from] kernel_images::ImageError),
    /// A kernel that was stripped.
    #[error("{}: it has no symbols", .0.display())]
    Stripped(PathBuf),
}

/// Why what was recorded is not shown.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It is no recording.
    #[error("{}", path.display())]
    Recording {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: reader::ReadError,
    },
    /// No symbols from the files that were named.
    #[error(transparent)]
    Symbols(#[from] SymbolsError),
    /// What was printed is not complete.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// What was written is not complete.
    #[error("{} cannot be written", place(path))]
    Write {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The flame graph was not drawn.
    #[error("{}", place(path))]
    Draw {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: folded::FlameError,
    },
}

impl FileError {
    /// For `map_err`: writing to `path`.
    fn write(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Write {
            path: path.to_owned(),
            source,
        }
    }
}

/// The profile in a file; `None` if it is empty, which is said and is no failure.
///
/// # Errors
/// [`FileError::Recording`].
pub(super) fn read_profile(path: &Path) -> Result<Option<Profile>, FileError> {
    match reader::read_file(path) {
        Ok(profile) => Ok(Some(profile)),
        Err(e) if e.is_empty() => {
            say(&format!("perfvisor: {}: {}\n", path.display(), error_line(&e)));
            Ok(None)
        }
        Err(source) => Err(FileError::Recording {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Names for a profile's addresses, from where the user told.
///
/// # Errors
/// [`SymbolsError`].
pub(super) fn symbolizer<'p>(
    profile: &'p Profile,
    args: &SymbolArgs,
) -> Result<Symbolizer<'p>, SymbolsError> {
    let reference = profile.kernel.as_ref();
    let reference = reference.map(|k| (k.reference_symbol.as_str(), k.reference_address));
    let kernel = kernel_symbols(args, reference)?;
    Ok(Symbolizer::new(profile, kernel, guest_mount(args)?))
}

/// Warns of what was not there.
pub(super) fn warn_of(profile: &Profile, symbols: &Symbolizer<'_>) {
    for problem in symbols.problems() {
        log::warn!("{problem}");
    }
    if profile.lost > 0 {
        log::warn!("{} samples were lost while recording", profile.lost);
    }
}

/// Reads the file and runs `show` on it.
fn with_profile(
    args: &FileArgs,
    show: impl FnOnce(&Profile, &mut Symbolizer<'_>) -> Result<(), FileError>,
) -> Result<ExitStatus, FileError> {
    let Some(profile) = read_profile(&args.input)? else {
        return Ok(DONE);
    };
    let mut symbols = symbolizer(&profile, &args.symbols)?;
    show(&profile, &mut symbols)?;
    warn_of(&profile, &symbols);
    Ok(DONE)
}

/// The guest's files, if the user told where they are.
///
/// # Errors
/// [`SymbolsError`].
pub(super) fn guest_mount(args: &SymbolArgs) -> Result<Option<GuestMount>, SymbolsError> {
    Ok(guest_files(args)?.map(GuestMount::of))
}

/// The same, as files.
///
/// # Errors
/// [`SymbolsError`].
pub(super) fn guest_files(args: &SymbolArgs) -> Result<Option<GuestFiles>, SymbolsError> {
    match (&args.guestmount, &args.guest_disk) {
        (Some(dir), _) if dir.is_dir() => Ok(Some(GuestFiles::Directory(dir.clone()))),
        (Some(dir), _) => Err(SymbolsError::NoDirectory(dir.clone())),
        (None, Some(config)) => {
            let view = DiskView::open(config).map_err(SymbolsError::DiskImage)?;
            let disk = GuestDisk::open(Box::new(Looked(view))).map_err(|source| SymbolsError::Disk {
                path: config.path.clone(),
                source,
            })?;
            Ok(Some(GuestFiles::Disk(disk)))
        }
        (None, None) => Ok(None),
    }
}

/// An image of this host as a guest's disk.
struct Looked(DiskView);

impl DiskBytes for Looked {
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

/// Symbols at running addresses from the file the user gave, if one. `reference`: a symbol of the running
/// kernel and its address.
///
/// # Errors
/// [`SymbolsError`].
pub(super) fn kernel_symbols(
    args: &SymbolArgs,
    reference: Option<(&str, u64)>,
) -> Result<Option<KernelSymbols>, SymbolsError> {
    if let Some(path) = &args.kallsyms {
        let parsed = KernelSymbols::parse_text(&read(path, MAX_KALLSYMS)?);
        let symbols = parsed.map_err(|source| SymbolsError::Kallsyms {
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
        .ok_or_else(|| SymbolsError::Stripped(path.clone()))?;
    // The recording, or the VM, says where a symbol of the kernel is when it runs.
    let slide = reference.and_then(|(name, running)| {
        let linked = symbols.by_name(name)?.address;
        Some(running.wrapping_sub(linked))
    });
    Ok(Some(symbols.relocated(slide.unwrap_or(0))))
}

pub(super) fn read(path: &Path, limit: u64) -> Result<Vec<u8>, SymbolsError> {
    let mut bytes = Vec::new();
    // What a file says of its size need not be true: devices say 0.
    let result = input::open(path).and_then(|file| file.take(limit + 1).read_to_end(&mut bytes));
    let path = path.to_owned();
    match result {
        Err(source) => Err(SymbolsError::Read { path, source }),
        Ok(_) if bytes.len() as u64 > limit => Err(SymbolsError::TooLarge { path, limit }),
        Ok(_) => Ok(bytes),
    }
}

/// What is said of an output in an error.
fn place(output: &Path) -> String {
    if output == Path::new("-") {
        return "standard output".into();
    }
    output.display().to_string()
}

/// Writes to a file that is complete or not there, or to standard output.
fn write_to(
    output: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), FileError>,
) -> Result<(), FileError> {
    if output == Path::new("-") {
        let mut out = BufWriter::new(io::stdout().lock());
        write(&mut out)?;
        return Ok(written(out.flush())?);
    }
    let file = File::create(output).map_err(FileError::write(output))?;
    let mut out = BufWriter::new(file);
    let result = write(&mut out).and_then(|()| out.flush().map_err(FileError::write(output)));
    // Half a file is of no use. A device, or a link to one, is not ours to remove.
    if result.is_err() && std::fs::symlink_metadata(output).is_ok_and(|meta| meta.is_file()) {
        let _ = std::fs::remove_file(output);
    }
    result
}

/// Shows where the samples fell.
///
/// # Errors
/// [`FileError`].
pub fn report(args: &ReportArgs) -> Result<ExitStatus, FileError> {
    let options = ReportOptions {
        sort: args.sort.0.clone(),
        min_percent: args.percent_limit,
    };
    with_profile(&args.file, |profile, symbols| {
        Ok(print(&report::render(profile, symbols, &options))?)
    })
}

/// Prints every sample.
///
/// # Errors
/// [`FileError`].
pub fn script(args: &FileArgs) -> Result<ExitStatus, FileError> {
    with_profile(args, |profile, symbols| {
        let mut out = BufWriter::new(io::stdout().lock());
        Ok(written(
            script::write(profile, symbols, &mut out).and_then(|()| out.flush()),
        )?)
    })
}

/// Draws a flame graph, or prints folded stacks.
///
/// # Errors
/// [`FileError`].
pub fn flamegraph(args: &FlamegraphArgs) -> Result<ExitStatus, FileError> {
    with_profile(&args.file, |profile, symbols| {
        let stacks = folded::stacks(&complete_chains(profile, symbols), symbols, None);
        if args.folded {
            let mut out = BufWriter::new(io::stdout().lock());
            return Ok(written(
                folded::write(&stacks, &mut out).and_then(|()| out.flush()),
            )?);
        }
        let unit = profile.events.first().map_or("samples", |e| e.name.as_str());
        write_to(&args.output, |out| {
            let drawn = folded::flamegraph(&stacks, &args.title, unit, args.min_width, out);
            drawn.map_err(|source| FileError::Draw {
                path: args.output.clone(),
                source,
            })
        })
    })
}

/// Writes a pprof profile.
///
/// # Errors
/// [`FileError`].
pub fn pprof(args: &PprofArgs) -> Result<ExitStatus, FileError> {
    with_profile(&args.file, |profile, symbols| {
        write_to(&args.output, |out| {
            pprof::write(&complete_chains(profile, symbols), symbols, &args.labels.0, out)
                .map_err(FileError::write(&args.output))
        })
    })
}

#[cfg(test)]
mod tests {
    use virtio_devices::disk::image::DiskImage;

    use super::*;

    /// `pprof -o /dev/full` as root took the device away.
    #[test]
    fn a_failed_output_is_removed_only_where_it_is_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("full"));
        std::os::unix::fs::symlink("/dev/full", &link).unwrap();
        let fail = |_: &mut dyn Write| Err(FileError::write(Path::new("there"))(io::Error::other("why")));
        assert_eq!(
            error_line(&write_to(&file, fail).unwrap_err()),
            "there cannot be written: why"
        );
        assert!(!file.exists());
        let write = |out: &mut dyn Write| out.write_all(b"x").map_err(FileError::write(&link));
        let why = error_line(&write_to(&link, write).unwrap_err());
        assert!(why.contains("No space left"), "{why}");
        assert!(link.is_symlink());
        let of_stdout = FileError::write(Path::new("-"))(io::Error::other("why"));
        assert_eq!(error_line(&of_stdout), "standard output cannot be written: why");
    }

    /// Compressed, and with another image in front of it, as a VM has it.
    #[test]
    #[expect(clippy::print_stderr, reason = "a test that could not run says so")]
    fn a_guest_s_programs_are_read_from_a_qcow2_image_that_a_vm_has() {
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
        // A raw view of it is no file system, and one without its base is refused by that.
        for (disk, what) in [
            (base.clone(), "no ext4 file system"),
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

    /// The whole of the host's memory was taken for a device without end.
    #[test]
    fn files_of_symbols_are_read_within_their_bound() {
        let why = read(Path::new("/dev/zero"), 1 << 20).unwrap_err();
        assert_eq!(
            why.to_string(),
            "/dev/zero: such a file of symbols has at most 1 MiB"
        );
        assert!(read(Path::new("/dev/null"), 1 << 20).unwrap().is_empty());
    }
}
