//! Symbols of the recorded addresses, which are stored in the recording file.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io::{self, Write};
use std::path::Path;

use super::args::RecordArgs;
use super::code::FoundFunction;
use super::unnamed::UnnamedCode;
use crate::commands::{OperatorCommandError, create_private, files, one_line};
use crate::kernel_map::{kernel_map, reference_symbol};
use control_api::client::Client;
use guest_profile::export::build_id_dir::BuildIdDir;
use guest_profile::export::perfdata::PerfDataWriter;
use guest_profile::export::symbolize::Symbolizer;
use guest_profile::export::{ChainFrame, KernelTextMap, NO_PID, Profile, ProfileSymbol};
use guest_profile::programs::{GuestFilesystemSource, GuestSymbols, ProgramFile};
use kernel_images::build_id::BuildId;
use kernel_images::symbols::KernelSymbols;

/// Maximum number of program files that are copied to perf's build ID directory.
const MAX_PROGRAMS: usize = 1024;
/// Maximum number of distinct addresses whose symbols are stored in the recording file.
const MAX_ADDRESSES: usize = 1 << 20;

/// Symbols of guest addresses, from the files specified by the user and otherwise from the VM.
pub(super) struct RecordedSymbols {
    kernel: Option<KernelSymbols>,
    /// Build ID of the running kernel, if known.
    build_id: Option<BuildId>,
    /// Release of the running kernel, if known.
    pub(super) release: String,
    /// `true` if the guest has a single address space. The kernel's symbols then cover all
    /// addresses.
    flat: bool,
    mount: Option<GuestSymbols>,
    /// Addresses to symbolize, by process ID; `None` for the kernel.
    addresses: HashSet<(Option<u32>, u64)>,
    /// Functions found in guest memory, by process ID and start address.
    exported: BTreeMap<(u32, u64), ProfileSymbol>,
    /// Process IDs and start addresses of the functions in `exported` that have no exported name.
    unnamed: BTreeSet<(u32, u64)>,
}

impl RecordedSymbols {
    pub(super) fn of(client: &mut Client, args: &RecordArgs) -> Result<Self, OperatorCommandError> {
        let (info, text) = client.symbols()?;
        if let Some(path) = &args.save_kallsyms {
            create_private(path)
                .and_then(|mut file| file.write_all(&text))
                .map_err(OperatorCommandError::file(path))?;
        }
        let args = &args.symbols;
        // Ignore a parse error, because the VM may have no kernel symbols.
        let running = KernelSymbols::parse_text(&text).ok();
        let reference = running.as_ref().and_then(reference_symbol);
        let given = files::kernel_symbols(args, reference)?;
        if args.vmlinux.is_some() && reference.is_none() {
            log::warn!(
                "the load address of the guest's kernel is unknown; --vmlinux is used \
                 without relocation"
            );
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
            unnamed: BTreeSet::new(),
        })
    }

    /// Returns whether `address` is in user space.
    ///
    /// `user` is `true` if the host kernel reported the user privilege level. Because the reported
    /// level can be stale on emulated AMD-V, only the address decides if the guest's kernel is
    /// known.
    pub(super) fn is_user(&self, address: u64, user: bool) -> bool {
        if self.flat || self.kernel.is_none() {
            user
        } else {
            address >> 63 == 0
        }
    }

    /// Returns the mapping of the guest's kernel, for the perf.data file.
    pub(super) fn kernel_map(&self) -> Option<KernelTextMap> {
        kernel_map(self.kernel.as_ref()?, self.build_id)
    }

    /// Stores the kernel's symbols in `directory`, where perf finds them. Also copies the guest's
    /// programs to `directory` if the user specified their location. Adds the build IDs to
    /// `writer`.
    pub(super) fn store_for_perf<W: io::Write + io::Seek>(
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
                log::warn!("{path} is a different build than the guest's; the file has build-id {id}");
                continue;
            }
            writer.record_build_id(path, id);
            if let Some(directory) = directory {
                let read = || program_of(mount.files(), path, id);
                result = result.and(directory.add_program(id, path, read));
            }
        }
        result
    }

    /// Records that `address` of process `pid`, or of the kernel, needs a symbol. Returns `false`
    /// if the address is known or the limit is reached.
    pub(super) fn note(&mut self, pid: Option<u32>, address: u64) -> bool {
        self.addresses.len() < MAX_ADDRESSES && self.addresses.insert((pid, address))
    }

    /// Returns whether the guest has a single address space. The kernel's symbols then cover all
    /// addresses.
    pub(super) fn is_flat(&self) -> bool {
        self.flat
    }

    /// Keeps the symbol of a function that was found in the memory of a process.
    pub(super) fn keep(&mut self, function: FoundFunction) {
        let FoundFunction { symbol, named } = function;
        if let Some(pid) = symbol.pid {
            if !named {
                self.unnamed.insert((pid, symbol.start));
            }
            self.exported.insert((pid, symbol.start), symbol);
        }
    }

    /// Returns the symbol of `address` in the kernel.
    fn kernel_symbol(&self, address: u64) -> Option<ProfileSymbol> {
        let kernel = self.kernel.as_ref()?;
        let (symbol, _) = if self.flat {
            kernel.resolve_flat(address)
        } else {
            kernel.resolve(address)
        }?;
        Some(ProfileSymbol {
            start: symbol.address,
            end: kernel.end_of(symbol.address),
            name: symbol.name.to_owned(),
            pid: None,
        })
    }

    /// Returns the function at `address` that was found in the memory of process `pid`.
    fn exported_function(&self, pid: u32, address: u64) -> Option<&ProfileSymbol> {
        let (_, function) = self.exported.range(..=(pid, address)).next_back()?;
        (function.pid == Some(pid) && address < function.end).then_some(function)
    }

    /// Returns the symbols of the addresses noted since the previous call, without duplicates.
    /// `mapped` contains the mappings of the processes.
    pub(super) fn take_saved(&mut self, mapped: &Profile) -> Vec<ProfileSymbol> {
        let mut saved: BTreeMap<(Option<u32>, u64), ProfileSymbol> = BTreeMap::new();
        let mut keep = |symbol: ProfileSymbol| {
            let entry = saved
                .entry((symbol.pid, symbol.start))
                .or_insert_with(|| symbol.clone());
            entry.end = entry.end.max(symbol.end);
        };
        if let Some(mount) = &mut self.mount {
            mount.files().reload();
        }
        let mut unnamed = UnnamedCode::new(mapped, self.mount.is_some());
        let mut files = Symbolizer::new(mapped, None, self.mount.take());
        for (pid, address) in std::mem::take(&mut self.addresses) {
            if pid.is_none() || self.flat {
                let found = self.kernel_symbol(address);
                let pid = pid.map(|_| NO_PID);
                found
                    .map(|symbol| ProfileSymbol { pid, ..symbol })
                    .into_iter()
                    .for_each(&mut keep);
            } else if let Some(pid) = pid {
                let frame = ChainFrame {
                    address,
                    kernel: false,
                    caller: false,
                };
                let named = files.name(frame, pid);
                if named.known {
                    keep(ProfileSymbol {
                        start: address.wrapping_sub(named.offset),
                        // The size of the symbol may be unknown, so its range covers the sampled
                        // addresses only.
                        end: address.saturating_add(1),
                        name: named.name.clone(),
                        pid: Some(pid),
                    });
                } else if let Some(function) = self.exported_function(pid, address) {
                    if self.unnamed.contains(&(pid, function.start)) {
                        unnamed.add(&named.object);
                    }
                    keep(function.clone());
                } else if let Some((start, end, name)) = files.jit(pid, address) {
                    let (name, pid) = (name.to_owned(), Some(pid));
                    keep(ProfileSymbol {
                        start,
                        end,
                        name,
                        pid,
                    });
                } else {
                    unnamed.add(&named.object);
                }
            }
        }
        unnamed.log(&mut files);
        for problem in files.problems() {
            log::warn!("{problem}");
        }
        self.mount = files.into_files();
        saved.into_values().collect()
    }
}

/// Reads the guest's program at `path` and checks its build ID, because perf uses a cached file for
/// every guest with that build ID.
fn program_of(files: &mut GuestFilesystemSource, path: &str, id: BuildId) -> io::Result<Vec<u8>> {
    let bytes = files.program(path).map_err(io::Error::other)?;
    let file = ProgramFile::parse(Path::new(path), &bytes).map_err(io::Error::other)?;
    if file.build_id() != Some(id) {
        let path = one_line(path);
        return Err(io::Error::other(format!("{path} changed while it was read")));
    }
    Ok(bytes)
}

/// Returns whether a mapping is backed by a file. Other mappings have names in brackets or with two
/// leading slashes.
fn is_file(path: &str) -> bool {
    path.starts_with('/') && !path.starts_with("//")
}
