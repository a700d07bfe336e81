//! Names for the addresses of a recording, kept in its file.

use std::collections::{BTreeMap, HashSet};
use std::io::{self, Write};
use std::path::Path;

use super::args::RecordArgs;
use crate::commands::{CommandError, create_private, files, one_line};
use control_api::client::Client;
use guest_profile::export::build_id_dir::BuildIdDir;
use guest_profile::export::perfdata::PerfDataWriter;
use guest_profile::export::symbolize::Symbolizer;
use guest_profile::export::{Frame, KernelMap, NO_PID, Profile, SavedSymbol};
use guest_profile::programs::{GuestFiles, GuestMount, ProgramFile};
use kernel_images::build_id::BuildId;
use kernel_images::symbols::KernelSymbols;

/// Most programs and libraries that are copied for perf.
const MAX_PROGRAMS: usize = 1024;
/// Most different addresses whose names are kept in the file.
const MAX_ADDRESSES: usize = 1 << 20;

/// Names of the guest's addresses: as the user gave them, else as the VM knows them.
pub(super) struct Names {
    kernel: Option<KernelSymbols>,
    /// What names the running kernel, if it told.
    build_id: Option<BuildId>,
    /// The running kernel's release, if it told.
    pub(super) release: String,
    /// The kernel's symbols serve user addresses too.
    flat: bool,
    mount: Option<GuestMount>,
    /// Addresses to be named: the kernel's (`None`) and those of processes.
    addresses: HashSet<(Option<u32>, u64)>,
    /// Functions of processes as their programs export them, by process and address.
    exported: BTreeMap<(u32, u64), SavedSymbol>,
}

impl Names {
    pub(super) fn of(client: &mut Client, args: &RecordArgs) -> Result<Self, CommandError> {
        let (info, text) = client.symbols()?;
        if let Some(path) = &args.save_kallsyms {
            create_private(path)
                .and_then(|mut file| file.write_all(&text))
                .map_err(CommandError::file(path))?;
        }
        let args = &args.symbols;
        // A VM may have none to give.
        let running = KernelSymbols::parse_text(&text).ok();
        let reference = running.as_ref().and_then(reference_symbol);
        let given = files::kernel_symbols(args, reference)?;
        if args.vmlinux.is_some() && reference.is_none() {
            log::warn!("where the guest's kernel runs is not known; --vmlinux is taken without a slide");
        }
        let flat = info.flat && given.is_none();
        Ok(Self {
            kernel: given.or(running),
            build_id: info.build_id.as_deref().and_then(BuildId::from_hex),
            release: info.release.unwrap_or_default(),
            flat,
            mount: files::guest_mount(args)?,
            addresses: HashSet::new(),
            exported: BTreeMap::new(),
        })
    }

    /// Whether code at `address` is a program's. `user`: what the host's kernel says of the privilege level.
    /// It is not always right (an emulated AMD-V tells the level of another moment); in a kernel that is
    /// known the address tells.
    pub(super) fn is_user(&self, address: u64, user: bool) -> bool {
        if self.flat || self.kernel.is_none() {
            user
        } else {
            address >> 63 == 0
        }
    }

    /// The kernel's place, for perf.
    pub(super) fn kernel_map(&self) -> Option<KernelMap> {
        let symbols = self.kernel.as_ref()?;
        let (name, start) = reference_symbol(symbols)?;
        let end = symbols.by_name("_etext").map(|s| s.address);
        let last = symbols.iter().map(|s| s.address).max()?.saturating_add(4096);
        Some(KernelMap {
            start,
            len: end.unwrap_or(last).saturating_sub(start),
            reference_symbol: name.to_owned(),
            reference_address: start,
            build_id: self.build_id.or_else(|| made_up_id(symbols, start)),
        })
    }

    /// Has perf find the names of what was sampled: writes the kernel's symbols to `directory`, and copies
    /// the guest's programs there if the user told where they are. `writer` is told the build-ids of these.
    pub(super) fn keep_for_perf<W: io::Write + io::Seek>(
        &mut self,
        directory: Option<&BuildIdDir>,
        mapped: &Profile,
        writer: &mut PerfDataWriter<W>,
    ) -> io::Result<()> {
        let mut result = Ok(());
        if let Some(directory) = directory
            && let Some(id) = self.kernel_map().and_then(|kernel| kernel.build_id)
            && let Some(symbols) = &self.kernel
        {
            result = directory.add_kallsyms(id, |out| symbols.write_text(out));
        }
        let Some(mount) = &mut self.mount else {
            return result;
        };
        let mut told: BTreeMap<&str, Option<BuildId>> = BTreeMap::new();
        for mapping in mapped.mappings.iter().filter(|m| is_file(&m.path)) {
            let id = told.entry(&mapping.path).or_default();
            *id = id.or(mapping.build_id);
        }
        for (path, told) in told.into_iter().take(MAX_PROGRAMS) {
            let Some(id) = mount.build_id(path) else {
                continue;
            };
            if told.is_some_and(|told| told != id) {
                let path = one_line(path);
                log::warn!("{path} is not the build that the guest runs; the file has build-id {id}");
                continue;
            }
            writer.know(path, id);
            if let Some(directory) = directory {
                let read = || program_of(mount.files(), path, id);
                result = result.and(directory.add_program(id, path, read));
            }
        }
        result
    }

    /// Keeps in mind that `address` needs a name. `pid`: of the process; `None` for the kernel's addresses.
    /// False: it is known already, or there are too many.
    pub(super) fn note(&mut self, pid: Option<u32>, address: u64) -> bool {
        self.addresses.len() < MAX_ADDRESSES && self.addresses.insert((pid, address))
    }

    /// Whether the kernel's symbols serve user addresses too.
    pub(super) fn is_flat(&self) -> bool {
        self.flat
    }

    /// Keeps a function that a program of a process exports.
    pub(super) fn keep(&mut self, function: SavedSymbol) {
        if let Some(pid) = function.pid {
            self.exported.insert((pid, function.start), function);
        }
    }

    /// The names of all addresses noted, each symbol once. `mapped` knows the processes' mappings.
    pub(super) fn saved(mut self, mapped: &Profile) -> Vec<SavedSymbol> {
        let mut saved: BTreeMap<(Option<u32>, u64), SavedSymbol> = BTreeMap::new();
        let mut keep = |symbol: SavedSymbol| {
            let entry = saved
                .entry((symbol.pid, symbol.start))
                .or_insert_with(|| symbol.clone());
            entry.end = entry.end.max(symbol.end);
        };
        if let Some(mount) = &mut self.mount {
            mount.files().reload();
        }
        let mut files = Symbolizer::new(mapped, None, self.mount);
        for (pid, address) in self.addresses {
            if pid.is_none() || self.flat {
                let found = self.kernel.as_ref().and_then(|k| {
                    let found = if self.flat {
                        k.resolve_flat(address)
                    } else {
                        k.resolve(address)
                    };
                    let (symbol, _) = found?;
                    Some(SavedSymbol {
                        start: symbol.address,
                        end: k.end_of(symbol.address),
                        name: symbol.name.to_owned(),
                        pid: pid.map(|_| NO_PID),
                    })
                });
                found.into_iter().for_each(&mut keep);
            } else if let Some(pid) = pid {
                let frame = Frame {
                    address,
                    kernel: false,
                    caller: false,
                };
                let named = files.name(frame, pid);
                let exported = || {
                    let (_, function) = self.exported.range(..=(pid, address)).next_back()?;
                    (function.pid == Some(pid) && address < function.end).then(|| function.clone())
                };
                if named.known {
                    keep(SavedSymbol {
                        start: address.wrapping_sub(named.offset),
                        // The extent is what was seen of it: the sources may give no size.
                        end: address.saturating_add(1),
                        name: named.name.clone(),
                        pid: Some(pid),
                    });
                } else if let Some(function) = exported() {
                    keep(function);
                } else if let Some((start, end, name)) = files.jit(pid, address) {
                    let (name, pid) = (name.to_owned(), Some(pid));
                    keep(SavedSymbol {
                        start,
                        end,
                        name,
                        pid,
                    });
                }
            }
        }
        for problem in files.problems() {
            log::warn!("{problem}");
        }
        saved.into_values().collect()
    }
}

/// The guest's program at `path`, if it is still the build `id`: what lies under a build-id is found for any
/// guest.
fn program_of(files: &mut GuestFiles, path: &str, id: BuildId) -> io::Result<Vec<u8>> {
    let bytes = files.program(path).map_err(io::Error::other)?;
    let file = ProgramFile::parse(Path::new(path), &bytes).map_err(io::Error::other)?;
    if file.build_id() != Some(id) {
        let path = one_line(path);
        return Err(io::Error::other(format!("{path} changed while it was read")));
    }
    Ok(bytes)
}

/// Whether what a mapping is of is a file: what is none is named in brackets, or begins with two slashes.
fn is_file(path: &str) -> bool {
    path.starts_with('/') && !path.starts_with("//")
}

/// What names the symbols of a kernel that has no build-id: a hash of them (FNV-1a, 128 bits), the same
/// wherever the kernel runs. Without one perf would take the names of the host's kernel.
fn made_up_id(symbols: &KernelSymbols, start: u64) -> Option<BuildId> {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0100_0000_0000_0000_0000_013b;
    let hash = symbols.iter().fold(BASIS, |hash, symbol| {
        let offset = symbol.address.wrapping_sub(start).to_le_bytes();
        let bytes = offset.iter().chain(symbol.name.as_bytes());
        bytes.fold(hash, |hash, &byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME))
    });
    BuildId::new(&hash.to_le_bytes())
}

/// The symbol by which the kernel's place is told.
fn reference_symbol(symbols: &KernelSymbols) -> Option<(&'static str, u64)> {
    ["_text", "_stext"]
        .into_iter()
        .find_map(|name| Some((name, symbols.by_name(name)?.address)))
}
