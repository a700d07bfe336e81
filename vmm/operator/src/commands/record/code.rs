//! Executable mappings, exported symbols and unwind tables of guest programs during a recording.
//! They are read from the guest's files if the user specified their location, and otherwise from
//! guest memory.
//!
//! The data is requested when a sample needs it, and then cached. The requests are rate-limited and
//! use a separate connection. Processes that exit before the request remain without symbols.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError};
use control_api::protocol::{CodeMapping, MAX_PROCESS_MEMORY, RequestErrorKind};
use control_api::request;
use guest_profile::cfi::{
    MappedModule, ProcessModuleMap, REGISTERS, UnwindResult, Unwinder, UserThreadState,
};
use guest_profile::export::{NO_PID, ProfileSymbol};
use guest_profile::modules::LoadedModule;
use guest_profile::programs::{GuestFilesystemSource, ProgramFile};
use guest_profile::unwind::UnwindStop;
use perf_core::error_line;
use perf_core::record::UserRegsAndStack;

/// Maximum number of cached processes.
const MAX_PROCESSES: usize = 4096;
/// Maximum total size of the cached symbols and tables, in bytes.
const MAX_BYTES: usize = 1 << 30;
/// Minimum interval between requests for the mappings of a process. A request is made when a sample
/// falls outside the known mappings.
const MIN_REMAP_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of requests for the mappings of one process.
const MAX_REMAPS: u32 = 64;
/// Minimum mean interval between requests to the VM.
const REQUEST_INTERVAL: Duration = Duration::from_micros(1500);
/// Maximum time by which a burst of requests may be ahead of the mean rate.
const MAX_REQUEST_BURST: Duration = Duration::from_millis(200);
/// Maximum number of frames in a user stack.
const MAX_FRAMES: usize = 127;

/// The cached mappings of one process.
struct ProcessMappings {
    mappings: Vec<CodeMapping>,
    map: ProcessModuleMap,
    asked: Instant,
    times: u32,
}

/// Cache of the mappings, symbols and unwind tables of the guest's programs.
pub(super) struct ProgramCache {
    source: Option<PacedClient>,
    /// The guest's files, if the user specified their location. Unlike guest memory, the files also
    /// contain data that is not resident.
    files: Option<GuestFilesystemSource>,
    unwinds: bool,
    unwinder: Unwinder,
    processes: HashMap<u32, Option<ProcessMappings>>,
    /// Loaded modules by build ID and path, shared between processes; `None` if a module is
    /// unreadable.
    modules: HashMap<(String, String), Option<Arc<LoadedModule>>>,
    bytes_left: usize,
    pub(super) totals: UnwindTotals,
}

/// Statistics of user stack unwinding.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UnwindTotals {
    /// Number of samples with a user stack.
    pub(super) stacks: u64,
    /// Number of user stacks unwound to the outermost frame.
    pub(super) complete: u64,
    /// Number of user stacks that were not unwound completely because of the limited size of the
    /// stack copy.
    pub(super) cut: u64,
}

/// A function of a guest process that contains a looked-up address.
pub(super) struct FoundFunction {
    pub(super) symbol: ProfileSymbol,
    /// `true` if `name` is the name of an exported function, `false` if it is a file and an offset.
    pub(super) named: bool,
}

/// A rate-limited connection to the VM.
struct PacedClient {
    client: Client,
    paid_until: Instant,
}

impl PacedClient {
    fn pace(&mut self) {
        let now = Instant::now();
        self.paid_until = self.paid_until.max(now) + REQUEST_INTERVAL;
        let ahead = self.paid_until.saturating_duration_since(now);
        std::thread::sleep(ahead.saturating_sub(MAX_REQUEST_BURST));
    }

    fn code(&mut self, pid: u32) -> Result<Vec<CodeMapping>, ClientError> {
        self.pace();
        Ok(self.client.call(request::ProcessCode { pid })?.mappings)
    }

    /// Reads `len` bytes of the memory of process `pid` at `address`. Unmapped bytes are 0.
    fn memory(&mut self, pid: u32, address: u64, len: u64) -> Option<Vec<u8>> {
        let len = usize::try_from(len).ok()?;
        let mut all = Vec::new();
        while all.len() < len {
            self.pace();
            let part = (len - all.len()).min(MAX_PROCESS_MEMORY as usize);
            let at = address.checked_add(all.len() as u64)?;
            let (_, bytes) = self
                .client
                .process_memory(pid, at, u32::try_from(part).ok()?)
                .ok()?;
            if bytes.is_empty() {
                break;
            }
            all.extend(bytes);
        }
        all.resize(len, 0);
        Some(all)
    }
}

impl ProgramCache {
    /// Creates the cache of a VM's programs. `client` is a connection to the VM for the exclusive
    /// use of the cache. `unwinds` enables unwind tables.
    pub(super) fn new(
        client: Result<Client, ClientError>,
        files: Option<GuestFilesystemSource>,
        unwinds: bool,
    ) -> Self {
        let source = match client {
            Ok(client) => Some(PacedClient {
                client,
                paid_until: Instant::now(),
            }),
            Err(e) => {
                log::warn!(
                    "symbols of programs cannot be read from the guest's memory: {}",
                    error_line(&e)
                );
                None
            }
        };
        Self {
            source,
            files,
            unwinds,
            unwinder: Unwinder::default(),
            processes: HashMap::new(),
            modules: HashMap::new(),
            bytes_left: MAX_BYTES,
            totals: UnwindTotals::default(),
        }
    }

    /// Drops the cached mappings of process `pid` after an exec.
    pub(super) fn drop_process(&mut self, pid: u32) {
        self.processes.remove(&pid);
    }

    /// Returns the mapping of process `pid` that contains `address`.
    pub(super) fn mapping(&mut self, pid: u32, address: u64) -> Option<&CodeMapping> {
        self.request_mappings(pid, address);
        let process = self.processes.get(&pid)?.as_ref()?;
        find(&process.mappings, address)
    }

    /// Returns the function of process `pid` that contains `address`. A function that is not
    /// exported is named after its file and the offset of its start.
    pub(super) fn function(&mut self, pid: u32, address: u64) -> Option<FoundFunction> {
        if !self.load(pid, address) {
            return None;
        }
        let process = self.processes.get(&pid)?.as_ref()?;
        let mapped = process.map.find(address)?;
        let (bias, module) = mapped.code.as_ref()?;
        let linked = address.wrapping_sub(*bias);
        let saved = |start: u64, end: u64, name: String| ProfileSymbol {
            start: start.wrapping_add(*bias),
            end: end.wrapping_add(*bias),
            name,
            pid: Some(pid),
        };
        if let Some(function) = module.function(linked) {
            let name = function.name.to_owned();
            return Some(FoundFunction {
                symbol: saved(function.start, function.end, name),
                named: true,
            });
        }
        let (start, end) = module.unnamed_function(linked)?;
        let mapping = find(&process.mappings, address)?;
        let offset = start.wrapping_add(*bias).checked_sub(mapping.start)?;
        let offset = offset.checked_add(mapping.file_offset)?;
        let file = mapping.path.rsplit('/').next().unwrap_or(&mapping.path);
        Some(FoundFunction {
            symbol: saved(start, end, format!("{file}+{offset:#x}")),
            named: false,
        })
    }

    /// Unwinds a user stack into `out`, innermost frame first. Returns `None` for an unknown
    /// program.
    pub(super) fn unwind(
        &mut self,
        pid: u32,
        user: &UserRegsAndStack<'_>,
        asked: usize,
        out: &mut Vec<u64>,
    ) -> Option<UnwindResult> {
        const ABI_64: u64 = 2;
        if user.abi != ABI_64 {
            return None;
        }
        let state = state(user, asked)?;
        let ip = state.registers[REGISTERS - 1]?;
        self.totals.stacks += 1;
        if !self.load(pid, ip) {
            return None;
        }
        // Unwinding stops or fails in a module that has not been loaded; load the module and retry.
        loop {
            out.clear();
            let process = self.processes.get(&pid)?.as_ref()?;
            let unwound = self.unwinder.unwind(&process.map, &state, MAX_FRAMES, out);
            let missing = out.iter().map(|frame| frame.wrapping_sub(1)).find(|frame| {
                let mapped = process.map.find(*frame);
                mapped.is_some_and(|mapped| mapped.code.is_none())
            });
            if let Some(missing) = missing
                && self.load(pid, missing)
            {
                continue;
            }
            self.totals.complete += u64::from(unwound.end == UnwindStop::Complete);
            self.totals.cut += u64::from(unwound.end == UnwindStop::Full);
            return Some(unwound);
        }
    }

    /// Requests the mappings of process `pid` unless a known mapping contains `address`.
    fn request_mappings(&mut self, pid: u32, address: u64) {
        let times = match self.processes.get(&pid) {
            Some(None) => return,
            Some(Some(process)) => {
                let known = find(&process.mappings, address).is_some();
                if known || process.times >= MAX_REMAPS || process.asked.elapsed() < MIN_REMAP_INTERVAL {
                    return;
                }
                process.times
            }
            None => 0,
        };
        let Some(source) = &mut self.source else { return };
        if pid == NO_PID || self.processes.len() >= MAX_PROCESSES {
            return;
        }
        let mappings = match source.code(pid) {
            Ok(mappings) => mappings,
            Err(e) => {
                match &e {
                    ClientError::Refused(failure) if failure.kind == RequestErrorKind::Invalid => {
                        // The process has exited; existing mappings are kept.
                        self.processes.entry(pid).or_insert(None);
                    }
                    _ => {
                        let level = if self.unwinds {
                            log::Level::Warn
                        } else {
                            log::Level::Debug
                        };
                        log::log!(
                            level,
                            "programs of the guest are not looked at: {}",
                            error_line(&e)
                        );
                        self.source = None;
                    }
                }
                return;
            }
        };
        let mapped = |mapping: &CodeMapping| MappedModule {
            start: mapping.start,
            end: mapping.start.saturating_add(mapping.len),
            code: None,
        };
        let process = ProcessMappings {
            map: ProcessModuleMap::new(mappings.iter().map(mapped).collect()),
            mappings,
            asked: Instant::now(),
            times: times + 1,
        };
        self.processes.insert(pid, Some(process));
    }

    /// Loads the module mapped at `address` in process `pid`. Returns `false` if the address is not
    /// mapped.
    fn load(&mut self, pid: u32, address: u64) -> bool {
        self.request_mappings(pid, address);
        let Some(Some(process)) = self.processes.get_mut(&pid) else {
            return false;
        };
        let Some(mapping) = find(&process.mappings, address) else {
            return false;
        };
        if process
            .map
            .find(address)
            .is_some_and(|mapped| mapped.code.is_some())
        {
            return true;
        }
        let mut read = || -> Option<Arc<LoadedModule>> {
            if self.bytes_left == 0 {
                return None;
            }
            let file = self
                .files
                .as_mut()
                .and_then(|files| of_file(files, mapping, self.unwinds));
            let module = match file {
                Some(module) => module,
                None => {
                    let (source, base) = (self.source.as_mut()?, mapping.base?);
                    let mut memory = |at, len| source.memory(pid, at, len);
                    LoadedModule::read(&mut memory, base, self.unwinds)?
                }
            };
            self.bytes_left = self.bytes_left.saturating_sub(module.bytes());
            Some(Arc::new(module))
        };
        let module = match &mapping.build_id {
            Some(id) => {
                let key = (id.clone(), mapping.path.clone());
                self.modules.entry(key).or_insert_with(read).clone()
            }
            None => read(),
        };
        let base = mapping.base.unwrap_or(mapping.start);
        let module = module.unwrap_or_default();
        process.map.set(address, module.bias(base), module);
        true
    }
}

/// Loads the module of `mapping` from its file in the guest. Returns `None` if the file is
/// unreadable, or its build ID is known to differ from that of the mapping.
fn of_file(files: &mut GuestFilesystemSource, mapping: &CodeMapping, unwinds: bool) -> Option<LoadedModule> {
    mapping.base?;
    if !mapping.path.starts_with('/') || mapping.path.starts_with("//") {
        return None;
    }
    let bytes = files
        .program(&mapping.path)
        .inspect_err(|e| log::debug!("{}", error_line(e)))
        .ok()?;
    if let Some(running) = &mapping.build_id {
        let id = ProgramFile::parse(Path::new(&mapping.path), &bytes)
            .ok()?
            .build_id()?;
        if id.to_string() != *running {
            log::debug!(
                "{}: not the build that the guest runs",
                mapping.path.escape_debug()
            );
            return None;
        }
    }
    LoadedModule::of_file(&bytes, unwinds)
}

/// Returns the mapping that contains `address`. `mappings` must be sorted by address.
fn find(mappings: &[CodeMapping], address: u64) -> Option<&CodeMapping> {
    let after = mappings.partition_point(|mapping| mapping.start <= address);
    let mapping = mappings[..after].last()?;
    (address - mapping.start < mapping.len).then_some(mapping)
}

/// Converts the user registers of a sample to DWARF register numbers.
fn state<'s>(user: &UserRegsAndStack<'s>, asked: usize) -> Option<UserThreadState<'s>> {
    // ax, bx, cx, dx, si, di, bp, sp, ip, and r8 to r15. The flags, cs and ss are not needed.
    const DWARF: [(usize, usize); REGISTERS] = [
        (0, 0),
        (1, 3),
        (2, 2),
        (3, 1),
        (4, 4),
        (5, 5),
        (6, 6),
        (7, 7),
        (8, 12),
        (9, 13),
        (10, 14),
        (11, 15),
        (12, 16),
        (13, 17),
        (14, 18),
        (15, 19),
        (16, 8),
    ];
    let words: Vec<u64> = user.registers.iter().collect();
    let mut registers = [None; REGISTERS];
    for (dwarf, at) in DWARF {
        registers[dwarf] = Some(*words.get(at)?);
    }
    Some(UserThreadState {
        registers,
        exact_ip: true,
        stack: user.stack,
        stack_truncated: user.stack.len() >= asked,
    })
}
