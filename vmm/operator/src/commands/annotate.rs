//! `perfvisor annotate`: shows the instructions of a function with their shares of the samples.

use std::path::{Path, PathBuf};

use clap::Args;

use super::files::{
    RecordingFileError, SymbolArgs, guest_files, read, read_profile, symbolizer, warn_missing_data,
};
use super::{DONE, connect, one_line, print};
use crate::exit::ExitStatus;
use control_api::client::ClientError;
use control_api::nearest::did_you_mean;
use control_api::protocol::{GuestCode, KernelSymbolsReply};
use control_api::request;
use guest_profile::export::annotate::{SampledFunction, annotate as lines_of, functions, render};
use guest_profile::export::{ChainFrame, Profile};
use guest_profile::programs::{GuestFileError, ProgramFile};
use kernel_images::build_id::BuildId;

/// Maximum size of a program file, in bytes.
const MAX_PROGRAM: u64 = 2 << 30;

/// `perfvisor annotate`.
#[derive(Clone, Debug, Args)]
pub struct AnnotateArgs {
    /// Function [default: the one with the most samples]
    #[arg(value_name = "SYMBOL")]
    pub symbol: Option<String>,
    /// Function, in perf's notation.
    #[arg(
        short = 's',
        long = "symbol",
        value_name = "SYMBOL",
        conflicts_with = "symbol"
    )]
    pub of_symbol: Option<String>,
    /// Read this recording.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data")]
    pub input: PathBuf,
    /// Show the samples of this event [default: the first one in the recording]
    #[arg(short, long, value_name = "EVENT")]
    pub event: Option<String>,
    /// Read the code from the memory of this running VM.
    #[arg(long, value_name = "NAME", conflicts_with = "program")]
    pub vm: Option<String>,
    /// Read the code from this program or library, an ELF file.
    #[arg(long, value_name = "FILE")]
    pub program: Option<PathBuf>,
    /// Sources of symbols and of code. Kernel code is read from --vmlinux, program code from
    /// --guestmount or --guest-disk.
    #[command(flatten)]
    pub symbols: SymbolArgs,
}

/// Errors of `perfvisor annotate`.
#[derive(Debug, thiserror::Error)]
pub enum AnnotateError {
    #[error(transparent)]
    File(#[from] RecordingFileError),
    #[error("--event '{0}': the recording has {1}")]
    NoEvent(String, String),
    #[error("no samples in '{0}'{1}; perfvisor report lists functions with samples")]
    NoFunction(String, String),
    #[error("{}: no sample is in a named function; provide symbols with --vmlinux, --kallsyms, \
         --guestmount or --guest-disk", .0.display())]
    NoNames(PathBuf),
    #[error("the code of '{name}' ({object}) is not in the recording: {remedy}")]
    NoCode {
        name: String,
        object: String,
        remedy: &'static str,
    },
    #[error(
        "cannot read the code of '{0}': no sample in it has an address space; record for longer, \
        or use --program FILE"
    )]
    NoAddressSpace(String),
    #[error("--vm {name}")]
    Vm {
        name: String,
        #[source]
        source: ClientError,
    },
    #[error("--vm {0}: cannot parse the reply; use the same version of Perfvisor as the VM")]
    Reply(String),
    #[error("{place}: different build ({found}) than recorded ({recorded})")]
    OtherBuild {
        place: String,
        found: String,
        recorded: String,
    },
    #[error(transparent)]
    Program(#[from] GuestFileError),
    #[error("{0}: no code at {1:#x}, the address of '{2}'")]
    NotThere(String, u64, String),
    #[error(
        "{place}: {astray} of {samples} samples in '{name}' are not at an instruction; the code \
        differs from the code that ran"
    )]
    NotThisCode {
        place: String,
        name: String,
        astray: u64,
        samples: u64,
    },
}

/// Prints the instructions of a function with their shares of the samples.
///
/// # Errors
/// Returns [`AnnotateError`] if the recording, the function or its code is unavailable.
pub fn annotate(args: &AnnotateArgs) -> Result<ExitStatus, AnnotateError> {
    let Some(profile) = read_profile(&args.input)? else {
        return Ok(DONE);
    };
    let event = match &args.event {
        None => profile.events.first(),
        Some(name) => profile.events.iter().find(|event| event.name == *name),
    };
    let Some(event) = event else {
        let names: Vec<&str> = profile.events.iter().map(|event| event.name.as_str()).collect();
        let asked = args.event.clone().unwrap_or_default();
        return Err(AnnotateError::NoEvent(asked, names.join(", ")));
    };
    let mut symbols = symbolizer(&profile, &args.symbols).map_err(RecordingFileError::from)?;
    let found = functions(&profile, &mut symbols, event);
    let asked = args.symbol.as_ref().or(args.of_symbol.as_ref());
    let chosen = match asked {
        None => found.first(),
        Some(name) => found.iter().find(|function| function.name == *name),
    };
    let Some(function) = chosen else {
        return Err(match asked {
            Some(name) => {
                let meant = did_you_mean(name, found.iter().map(|function| function.name.as_str()));
                AnnotateError::NoFunction(name.clone(), meant)
            }
            None => AnnotateError::NoNames(args.input.clone()),
        });
    };
    let code = read_code(&profile, function, args)?;
    let annotated = lines_of(function, &code.bytes, |target| {
        let frame = ChainFrame {
            address: target,
            kernel: function.kernel,
            caller: false,
        };
        let named = symbols.name(frame, function.pid);
        let offset = match named.offset {
            0 => String::new(),
            offset => format!("+{offset:#x}"),
        };
        named.known.then(|| format!("{}{offset}", named.name))
    });
    let samples = function.samples();
    if annotated.misaligned > samples / 2 {
        return Err(AnnotateError::NotThisCode {
            place: code.source,
            name: function.name.clone(),
            astray: annotated.misaligned,
            samples,
        });
    }
    print(&render(&event.name, function, &annotated, &code.source)).map_err(RecordingFileError::from)?;
    warn_missing_data(&profile, &symbols);
    Ok(DONE)
}

/// Machine code of a function, and the name of the file or memory that it was read from.
struct FunctionCode {
    bytes: Vec<u8>,
    source: String,
}

/// Reads the code of a function from the source that the user chose.
fn read_code(
    profile: &Profile,
    function: &SampledFunction,
    args: &AnnotateArgs,
) -> Result<FunctionCode, AnnotateError> {
    if let Some(name) = &args.vm {
        return read_code_from_vm(name, profile, function);
    }
    let mapping = find_mapping(profile, function);
    if let Some(path) = &args.program {
        let recorded = match function.kernel {
            true => profile.kernel.as_ref().and_then(|kernel| kernel.build_id),
            false => mapping.and_then(|mapping| mapping.build_id),
        };
        return read_code_from_file(path, profile, function, recorded);
    }
    if function.kernel
        && let Some(path) = &args.symbols.vmlinux
    {
        let recorded = profile.kernel.as_ref().and_then(|kernel| kernel.build_id);
        return read_code_from_file(path, profile, function, recorded);
    }
    if let Some(mapping) = mapping
        && let Some(mut files) = guest_files(&args.symbols).map_err(RecordingFileError::from)?
    {
        let data = files.program(&mapping.path)?;
        let path = Path::new(&mapping.path);
        return from_bytes(&data, path, profile, function, mapping.build_id);
    }
    Err(AnnotateError::NoCode {
        name: function.name.clone(),
        object: function.object.to_string(),
        remedy: match (function.kernel, mapping.is_some()) {
            (true, _) => "--vm NAME takes it from the running VM, --vmlinux FILE from the kernel's file",
            (false, true) => {
                "--vm NAME takes it from the running VM, --program FILE, --guestmount DIR or --guest-disk FILE from the program's file"
            }
            (false, false) => {
                "--vm NAME takes it from the running VM, --program FILE from the program's file"
            }
        },
    })
}

/// Returns the mapping of a program that contains the function.
fn find_mapping<'p>(
    profile: &'p Profile,
    function: &SampledFunction,
) -> Option<&'p guest_profile::export::FileMapping> {
    let mut latest_first = profile.mappings.iter().rev().filter(|_| !function.kernel);
    latest_first.find(|m| {
        let offset = function.start.checked_sub(m.start);
        m.pid == function.pid && offset.is_some_and(|offset| offset < m.len)
    })
}

fn read_code_from_vm(
    name: &str,
    profile: &Profile,
    function: &SampledFunction,
) -> Result<FunctionCode, AnnotateError> {
    if function.cr3 == 0 {
        return Err(AnnotateError::NoAddressSpace(function.name.clone()));
    }
    let vm = |source| AnnotateError::Vm {
        name: name.to_owned(),
        source,
    };
    let mut client = connect(Some(name), None).map_err(vm)?;
    if let Some(recorded) = profile.kernel.as_ref().and_then(|kernel| kernel.build_id) {
        let (info, _): (KernelSymbolsReply, _) = client.call_with_file(request::Symbols).map_err(vm)?;
        let place = format!("--vm {name}");
        check_build_id(&place, info.build_id, recorded)?;
    }
    let info: GuestCode = client
        .call(request::Code {
            cr3: function.cr3,
            address: function.start,
            length: u32::try_from(function.length()).unwrap_or(u32::MAX),
        })
        .map_err(vm)?;
    let bytes = info
        .bytes()
        .ok_or_else(|| AnnotateError::Reply(name.to_owned()))?;
    Ok(FunctionCode {
        bytes,
        source: format!("memory of the running VM {name}, as it is now"),
    })
}

/// Checks that the build IDs of the code and the recording match, if both are known.
fn check_build_id(place: &str, found: Option<String>, recorded: BuildId) -> Result<(), AnnotateError> {
    match found {
        Some(found) if found != recorded.to_string() => Err(AnnotateError::OtherBuild {
            place: place.to_owned(),
            found,
            recorded: recorded.to_string(),
        }),
        _ => Ok(()),
    }
}

/// Reads the code of a function from an ELF file: by file offset if the mapping of the program is
/// known, and otherwise by address.
fn read_code_from_file(
    path: &Path,
    profile: &Profile,
    function: &SampledFunction,
    recorded: Option<BuildId>,
) -> Result<FunctionCode, AnnotateError> {
    let data = read(path, MAX_PROGRAM).map_err(RecordingFileError::from)?;
    from_bytes(&data, path, profile, function, recorded)
}

/// Reads the code of a function from `data`, the contents of the ELF file `path`.
fn from_bytes(
    data: &[u8],
    path: &Path,
    profile: &Profile,
    function: &SampledFunction,
    recorded: Option<BuildId>,
) -> Result<FunctionCode, AnnotateError> {
    let place = one_line(&path.display().to_string());
    let file = ProgramFile::parse(path, data)?;
    if let Some(recorded) = recorded {
        check_build_id(&place, file.build_id().map(|id| id.to_string()), recorded)?;
    }
    let length = usize::try_from(function.length()).unwrap_or(usize::MAX);
    let bytes = match find_mapping(profile, function) {
        Some(m) => file.at_offset((function.start - m.start).wrapping_add(m.file_offset), length),
        None => {
            // The recording contains the run-time address of one kernel symbol, which gives the
            // offset of the kernel from its link address.
            let slide = profile
                .kernel
                .as_ref()
                .filter(|_| function.kernel)
                .and_then(|kernel| {
                    let linked = file.address_of(&kernel.reference_symbol)?;
                    Some(kernel.reference_address.wrapping_sub(linked))
                });
            file.at_address(function.start.wrapping_sub(slide.unwrap_or(0)), length)
        }
    };
    let Some(bytes) = bytes else {
        return Err(AnnotateError::NotThere(
            place,
            function.start,
            function.name.clone(),
        ));
    };
    let patched = if function.kernel {
        " (a running kernel patches its code)"
    } else {
        ""
    };
    Ok(FunctionCode {
        bytes: bytes.to_vec(),
        source: format!("{place}{patched}"),
    })
}
