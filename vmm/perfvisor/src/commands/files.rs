//! `perfvisor report`, `script`, `flamegraph` and `pprof`: what is in a file that was recorded.

use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::{DONE, print, say, written};
use crate::exit::ExitStatus;
use guest_profile::export::report::{ReportOptions, SortKey};
use guest_profile::export::symbolize::{Symbolizer, complete_chains};
use guest_profile::export::{Profile, folded, pprof, reader, report, script};
use guest_profile::programs::GuestMount;
use kernel_images::image::KernelImage;
use kernel_images::symbols::KernelSymbols;

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
    #[arg(long, value_name = "DIR")]
    pub guestmount: Option<PathBuf>,
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
}

/// Columns of a report.
#[derive(Clone, Debug)]
pub struct SortKeys(pub Vec<SortKey>);

fn parse_sort(text: &str) -> Result<SortKeys, String> {
    text.split(',')
        .map(|key| {
            SortKey::from_name(key.trim())
                .ok_or_else(|| format!("'{key}' is no column; known are {}", SortKey::NAMES))
        })
        .collect::<Result<_, _>>()
        .map(SortKeys)
}

fn parse_percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(percent) if (0.0..=100.0).contains(&percent) => Ok(percent),
        _ => Err("must be a share from 0 to 100".into()),
    }
}

/// Reads the file and runs `show` on it. An empty file is said to be so, and is no failure.
fn with_profile(
    args: &FileArgs,
    show: impl FnOnce(&Profile, &mut Symbolizer<'_>) -> Result<(), String>,
) -> Result<ExitStatus, String> {
    let name = args.input.display();
    let profile = match reader::read_file(&args.input) {
        Ok(profile) => profile,
        Err(e) if e.is_empty() => {
            say(&format!("perfvisor: {name}: {e}\n"));
            return Ok(DONE);
        }
        Err(e) => return Err(format!("{name}: {}", with_source(&e))),
    };
    let reference = profile.kernel.as_ref();
    let reference = reference.map(|k| (k.reference_symbol.as_str(), k.reference_address));
    let kernel = kernel_symbols(&args.symbols, reference)?;
    let mount = guest_mount(&args.symbols)?;
    let mut symbols = Symbolizer::new(&profile, kernel, mount);
    show(&profile, &mut symbols)?;
    for problem in symbols.problems() {
        log::warn!("{problem}");
    }
    if profile.lost > 0 {
        log::warn!("{} samples were lost while recording", profile.lost);
    }
    Ok(DONE)
}

fn with_source(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error} ({source})"),
        None => error.to_string(),
    }
}

/// The guest's files, if the user told where they are.
///
/// # Errors
/// One line for the user.
pub(super) fn guest_mount(args: &SymbolArgs) -> Result<Option<GuestMount>, String> {
    match &args.guestmount {
        Some(dir) if dir.is_dir() => Ok(Some(GuestMount::new(dir))),
        Some(dir) => Err(format!("--guestmount {}: it is no directory", dir.display())),
        None => Ok(None),
    }
}

/// Symbols at running addresses from the file the user gave, if one. `reference`: a symbol of the running
/// kernel and its address.
///
/// # Errors
/// One line for the user.
pub(super) fn kernel_symbols(
    args: &SymbolArgs,
    reference: Option<(&str, u64)>,
) -> Result<Option<KernelSymbols>, String> {
    if let Some(path) = &args.kallsyms {
        let symbols = KernelSymbols::parse_text(&read(path, MAX_KALLSYMS)?)
            .map_err(|e| format!("{}: {e}", path.display()))?;
        return Ok(Some(symbols));
    }
    let Some(path) = &args.vmlinux else {
        return Ok(None);
    };
    let name = path.display();
    let image =
        KernelImage::parse(&name.to_string(), &read(path, MAX_VMLINUX)?).map_err(|e| e.to_string())?;
    let symbols = image
        .symbols()
        .ok_or_else(|| format!("{name}: it has no symbols"))?;
    // The recording, or the VM, says where a symbol of the kernel is when it runs.
    let slide = reference.and_then(|(name, running)| {
        let linked = symbols.by_name(name)?.address;
        Some(running.wrapping_sub(linked))
    });
    Ok(Some(symbols.slid(slide.unwrap_or(0))))
}

fn read(path: &Path, limit: u64) -> Result<Vec<u8>, String> {
    let name = path.display();
    let mut bytes = Vec::new();
    // What a file says of its size need not be true: devices say 0.
    File::open(path)
        .and_then(|file| file.take(limit + 1).read_to_end(&mut bytes))
        .map_err(|e| format!("{name}: {e}"))?;
    if bytes.len() as u64 > limit {
        return Err(format!(
            "{name}: such a file of symbols has at most {} MiB",
            limit >> 20
        ));
    }
    Ok(bytes)
}

/// Writes to a file that is complete or not there, or to standard output.
fn write_to(output: &Path, write: impl FnOnce(&mut dyn Write) -> Result<(), String>) -> Result<(), String> {
    if output == Path::new("-") {
        let mut out = BufWriter::new(io::stdout().lock());
        write(&mut out)?;
        return written(out.flush());
    }
    let name = output.display();
    let file = File::create(output).map_err(|e| format!("{name}: {e}"))?;
    let mut out = BufWriter::new(file);
    let result = write(&mut out).and_then(|()| out.flush().map_err(|e| format!("{name}: {e}")));
    // Half a file is of no use. A device, or a link to one, is not ours to remove.
    if result.is_err() && std::fs::symlink_metadata(output).is_ok_and(|meta| meta.is_file()) {
        let _ = std::fs::remove_file(output);
    }
    result
}

/// Shows where the samples fell.
///
/// # Errors
/// One line for the user.
pub fn report(args: &ReportArgs) -> Result<ExitStatus, String> {
    let options = ReportOptions {
        sort: args.sort.0.clone(),
        min_percent: args.percent_limit,
    };
    with_profile(&args.file, |profile, symbols| {
        print(&report::render(profile, symbols, &options))
    })
}

/// Prints every sample.
///
/// # Errors
/// One line for the user.
pub fn script(args: &FileArgs) -> Result<ExitStatus, String> {
    with_profile(args, |profile, symbols| {
        let mut out = BufWriter::new(io::stdout().lock());
        written(script::write(profile, symbols, &mut out).and_then(|()| out.flush()))
    })
}

/// Draws a flame graph, or prints folded stacks.
///
/// # Errors
/// One line for the user.
pub fn flamegraph(args: &FlamegraphArgs) -> Result<ExitStatus, String> {
    with_profile(&args.file, |profile, symbols| {
        let stacks = folded::stacks(&complete_chains(profile, symbols), symbols, None);
        if args.folded {
            let mut out = BufWriter::new(io::stdout().lock());
            return written(folded::write(&stacks, &mut out).and_then(|()| out.flush()));
        }
        let unit = profile.events.first().map_or("samples", |e| e.name.as_str());
        write_to(&args.output, |out| {
            folded::flamegraph(&stacks, &args.title, unit, args.min_width, out).map_err(|e| with_source(&e))
        })
    })
}

/// Writes a pprof profile.
///
/// # Errors
/// One line for the user.
pub fn pprof(args: &PprofArgs) -> Result<ExitStatus, String> {
    with_profile(&args.file, |profile, symbols| {
        write_to(&args.output, |out| {
            pprof::write(&complete_chains(profile, symbols), symbols, out)
                .map_err(|e| format!("{}: {e}", args.output.display()))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `pprof -o /dev/full` as root took the device away.
    #[test]
    fn a_failed_output_is_removed_only_where_it_is_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("full"));
        std::os::unix::fs::symlink("/dev/full", &link).unwrap();
        let fail = |_: &mut dyn Write| Err("no".to_owned());
        assert_eq!(write_to(&file, fail).unwrap_err(), "no");
        assert!(!file.exists());
        let write = |out: &mut dyn Write| out.write_all(b"x").map_err(|e| e.to_string());
        let why = write_to(&link, write).unwrap_err();
        assert!(why.contains("No space left"), "{why}");
        assert!(link.is_symlink());
    }

    /// The whole of the host's memory was taken for a device without end.
    #[test]
    fn files_of_symbols_are_read_within_their_bound() {
        let why = read(Path::new("/dev/zero"), 1 << 20).unwrap_err();
        assert_eq!(why, "/dev/zero: such a file of symbols has at most 1 MiB");
        assert!(read(Path::new("/dev/null"), 1 << 20).unwrap().is_empty());
    }
}
