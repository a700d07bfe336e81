//! The programs of the guest while they are recorded: the code that each process has mapped, what that
//! exports, and its unwind tables: out of the guest's files if the user told where they are, else out of the
//! guest's memory.
//!
//! Each is asked for when a sample needs it and kept. It is asked for over a connection of its own, slower
//! than a connection may ask, and not when it is known to be of no use. Processes that have ended before
//! anybody asks stay without names.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError};
use control_api::protocol::{CodeMapping, FailureKind, MAX_PROCESS_MEMORY};
use control_api::request;
use guest_profile::cfi::{CodeMap, Mapped, REGISTERS, Unwinder, Unwound, UserState};
use guest_profile::export::{NO_PID, SavedSymbol};
use guest_profile::modules::Module;
use guest_profile::programs::{GuestFiles, ProgramFile};
use guest_profile::unwind::End;
use perf_core::error_line;
use perf_core::record::UserPart;

/// Most processes that are kept.
const MAX_PROCESSES: usize = 4096;
/// Most bytes of names and tables that are kept.
const MAX_BYTES: usize = 1 << 30;
/// A process whose code is asked for again, because a sample is in none of it, is asked for after so long.
const AGAIN: Duration = Duration::from_secs(1);
/// And at most so often.
const MOST_TIMES: u32 = 64;
/// Between two requests in the long run; and how far it may be ahead of that.
const PACE: Duration = Duration::from_micros(1500);
const AHEAD: Duration = Duration::from_millis(200);
/// Frames of a program's stack.
const MAX_FRAMES: usize = 127;

/// One process.
struct Process {
    mappings: Vec<CodeMapping>,
    map: CodeMap,
    asked: Instant,
    times: u32,
}

/// What is known of the guest's programs.
pub(super) struct Code {
    source: Option<Source>,
    /// The guest's files, if the user told where they are: they have what is not in memory.
    files: Option<GuestFiles>,
    unwinds: bool,
    unwinder: Unwinder,
    processes: HashMap<u32, Option<Process>>,
    /// Programs and libraries by build-id and path: processes share them. `None`: it cannot be read.
    modules: HashMap<(String, String), Option<Arc<Module>>>,
    bytes_left: usize,
    pub(super) totals: Totals,
}

/// What became of stacks that were to be unwound.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    /// Samples that had a program's stack.
    pub(super) stacks: u64,
    /// Of these, unwound by tables to the outermost frame.
    pub(super) complete: u64,
    /// Cut short by the size of the copy.
    pub(super) cut: u64,
}

/// A connection, and when it may ask again.
struct Source {
    client: Client,
    paid_until: Instant,
}

impl Source {
    fn pace(&mut self) {
        let now = Instant::now();
        self.paid_until = self.paid_until.max(now) + PACE;
        let ahead = self.paid_until.saturating_duration_since(now);
        std::thread::sleep(ahead.saturating_sub(AHEAD));
    }

    fn code(&mut self, pid: u32) -> Result<Vec<CodeMapping>, ClientError> {
        self.pace();
        Ok(self.client.call(request::ProcessCode { pid })?.mappings)
    }

    /// So many bytes from `address` on, zeros where nothing is.
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

impl Code {
    /// Of the VM that `client`, a connection of its own, is connected to. `unwinds`: with unwind tables.
    pub(super) fn new(client: Result<Client, ClientError>, files: Option<GuestFiles>, unwinds: bool) -> Self {
        let source = match client {
            Ok(client) => Some(Source {
                client,
                paid_until: Instant::now(),
            }),
            Err(e) => {
                log::warn!(
                    "programs have no names out of the guest's memory: {}",
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
            totals: Totals::default(),
        }
    }

    /// Process `pid` executes another program: what is known of it is of no use.
    pub(super) fn forget(&mut self, pid: u32) {
        self.processes.remove(&pid);
    }

    /// The mapping of process `pid` that `address` is in.
    pub(super) fn mapping(&mut self, pid: u32, address: u64) -> Option<&CodeMapping> {
        self.ask(pid, address);
        let process = self.processes.get(&pid)?.as_ref()?;
        find(&process.mappings, address)
    }

    /// The exported function of process `pid` that `address` is in.
    pub(super) fn function(&mut self, pid: u32, address: u64) -> Option<SavedSymbol> {
        if !self.load(pid, address) {
            return None;
        }
        let process = self.processes.get(&pid)?.as_ref()?;
        let mapped = process.map.find(address)?;
        let (bias, module) = mapped.code.as_ref()?;
        let function = module.function(address.wrapping_sub(*bias))?;
        Some(SavedSymbol {
            start: function.start.wrapping_add(*bias),
            end: function.end.wrapping_add(*bias),
            name: function.name.to_owned(),
            pid: Some(pid),
        })
    }

    /// The frames of a program's stack, innermost first, into `out`. `None`: nothing is known of the program.
    pub(super) fn unwind(
        &mut self,
        pid: u32,
        user: &UserPart<'_>,
        asked: usize,
        out: &mut Vec<u64>,
    ) -> Option<Unwound> {
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
        // A frame in a library that was not read yet ends it, or leads astray; once it is read it does not.
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
            self.totals.complete += u64::from(unwound.end == End::Complete);
            self.totals.cut += u64::from(unwound.end == End::Full);
            return Some(unwound);
        }
    }

    /// Asks for the code of process `pid`, unless it is known and `address` in it.
    fn ask(&mut self, pid: u32, address: u64) {
        let times = match self.processes.get(&pid) {
            Some(None) => return,
            Some(Some(process)) => {
                let known = find(&process.mappings, address).is_some();
                if known || process.times >= MOST_TIMES || process.asked.elapsed() < AGAIN {
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
                    ClientError::Refused(failure) if failure.kind == FailureKind::Invalid => {
                        // It has ended; what was known of it stays.
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
        let mapped = |mapping: &CodeMapping| Mapped {
            start: mapping.start,
            end: mapping.start.saturating_add(mapping.len),
            code: None,
        };
        let process = Process {
            map: CodeMap::new(mappings.iter().map(mapped).collect()),
            mappings,
            asked: Instant::now(),
            times: times + 1,
        };
        self.processes.insert(pid, Some(process));
    }

    /// Reads what is mapped at `address` in process `pid`, if it was not. False: nothing is mapped there.
    fn load(&mut self, pid: u32, address: u64) -> bool {
        self.ask(pid, address);
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
        let mut read = || -> Option<Arc<Module>> {
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
                    Module::read(&mut memory, base, self.unwinds)?
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

/// What is in the file that is mapped, if it is the build that the guest runs, as far as that is known.
fn of_file(files: &mut GuestFiles, mapping: &CodeMapping, unwinds: bool) -> Option<Module> {
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
    Module::of_file(&bytes, unwinds)
}

/// Of mappings by ascending addresses.
fn find(mappings: &[CodeMapping], address: u64) -> Option<&CodeMapping> {
    let after = mappings.partition_point(|mapping| mapping.start <= address);
    let mapping = mappings[..after].last()?;
    (address - mapping.start < mapping.len).then_some(mapping)
}

/// Registers by DWARF number, out of those of a sample.
fn state<'s>(user: &UserPart<'s>, asked: usize) -> Option<UserState<'s>> {
    // ax, bx, cx, dx, si, di, bp, sp, ip; flags, cs and ss have no use; r8 to r15.
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
    Some(UserState {
        registers,
        exact_ip: true,
        stack: user.stack,
        cut: user.stack.len() >= asked,
    })
}
