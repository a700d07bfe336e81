//! Resolves the addresses of a profile to names.

use std::collections::HashMap;
use std::rc::Rc;

use super::{ChainFrame, NO_PID, Profile, ProfileSymbol};
use crate::programs::GuestSymbols;
use kernel_images::build_id::BuildId;
use kernel_images::symbols::KernelSymbols;

/// Object name of the kernel in reports.
pub const KERNEL_OBJECT: &str = "[guest.kernel]";
/// Object name of a user address in reports if the file that contains the address is unknown.
pub const USER_OBJECT: &str = "[guest user]";

/// Frame of a call chain, resolved to a function name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFrame {
    /// Function name. If the function is unknown, the file name and the offset in the file, or the
    /// address in hexadecimal.
    pub name: String,
    /// Offset of the address from the start of the function; 0 if the function is unknown.
    pub offset: u64,
    /// `true` if `name` is the name of a symbol.
    pub known: bool,
    /// File that contains the address. If there is no file or it is unknown, [`KERNEL_OBJECT`] or
    /// [`USER_OBJECT`].
    pub object: Rc<str>,
    /// `true` if the frame is in the kernel.
    pub kernel: bool,
}

/// Result of looking for the guest's file that a mapping refers to, from which addresses are
/// resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestFileStatus {
    /// The file does not exist, cannot be read, or is not usable.
    Missing,
    /// The file comes from a different build than the one that the guest runs.
    OtherBuild,
    /// The file is usable, although it may contain no symbols.
    Usable,
}

/// Resolves addresses of a profile to function names. Its sources, best first, are the kernel
/// symbols that the user has given, the guest's files, and the symbols saved in the profile.
pub struct Symbolizer<'p> {
    profile: &'p Profile,
    kernel: Option<KernelSymbols>,
    mount: Option<GuestSymbols>,
    saved: HashMap<Option<u32>, Vec<&'p ProfileSymbol>>,
    objects: HashMap<String, Rc<str>>,
    cache: HashMap<(ChainFrame, u32), Rc<NamedFrame>>,
}

impl<'p> Symbolizer<'p> {
    /// Creates a symbolizer. `kernel` contains the kernel's symbols at run-time addresses.
    pub fn new(profile: &'p Profile, kernel: Option<KernelSymbols>, mount: Option<GuestSymbols>) -> Self {
        let mut saved: HashMap<_, Vec<&ProfileSymbol>> = HashMap::new();
        for s in &profile.symbols {
            saved.entry(s.pid).or_default().push(s);
        }
        saved.values_mut().for_each(|list| list.sort_by_key(|s| s.start));
        Self {
            profile,
            kernel,
            mount,
            saved,
            objects: HashMap::new(),
            cache: HashMap::new(),
        }
    }

    /// Resolves a frame of process `pid`. If the address of the frame is a return address, the
    /// function that contains the preceding call instruction is looked up.
    pub fn name(&mut self, frame: ChainFrame, pid: u32) -> Rc<NamedFrame> {
        let pid = if frame.kernel { NO_PID } else { pid };
        let lookup = frame.instruction();
        let key = (frame, pid);
        if let Some(found) = self.cache.get(&key) {
            return Rc::clone(found);
        }
        let (object, found, place) = if frame.kernel {
            let own = self.kernel.as_ref().and_then(|k| k.resolve(lookup));
            let own = own.map(|(s, _)| (s.name.to_owned(), s.address));
            (
                KERNEL_OBJECT.to_owned(),
                own.or_else(|| self.saved_name(None, lookup)),
                None,
            )
        } else {
            self.user(lookup, pid)
        };
        let object = Rc::clone(
            self.objects
                .entry(object)
                .or_insert_with_key(|k| k.as_str().into()),
        );
        let named = Rc::new(match found {
            Some((name, start)) => NamedFrame {
                name,
                offset: frame.address.wrapping_sub(start),
                known: true,
                object,
                kernel: frame.kernel,
            },
            None => NamedFrame {
                name: place.unwrap_or_else(|| format!("{:#018x}", frame.address)),
                offset: 0,
                known: false,
                object,
                kernel: frame.kernel,
            },
        });
        self.cache.insert(key, Rc::clone(&named));
        named
    }

    /// Returns the end address of the function that contains a frame of process `pid`. Returns
    /// `None` if the source of the function's name does not provide it.
    pub fn end(&mut self, frame: ChainFrame, pid: u32) -> Option<u64> {
        let lookup = frame.instruction();
        if frame.kernel {
            let kernel = self.kernel.as_ref();
            let own = kernel.and_then(|k| Some(k.end_of(k.resolve(lookup)?.0.address)));
            return own.or_else(|| self.saved_end(None, lookup));
        }
        let mappings = self.profile.mappings.iter().rev();
        let mapping = mappings.filter(|m| m.pid == pid).find_map(|m| {
            let offset = lookup.checked_sub(m.start).filter(|offset| *offset < m.len)?;
            Some((m, offset.checked_add(m.file_offset)?))
        });
        let mapping = mapping.filter(|(m, _)| is_file(&m.path));
        let by_object = mapping.zip(self.mount.as_mut()).and_then(|((m, offset), mount)| {
            let object = mount.object_of(&m.path, m.build_id)?;
            let symbol = object.resolve(object.address_of_file_offset(offset)?)?;
            lookup.wrapping_sub(symbol.offset).checked_add(symbol.length)
        });
        by_object.or_else(|| self.saved_end(Some(pid), lookup))
    }

    fn saved_end(&self, pid: Option<u32>, address: u64) -> Option<u64> {
        let list = self.saved.get(&pid)?;
        let after = list.partition_point(|s| s.start <= address);
        let s = list.get(after.checked_sub(1)?)?;
        (address < s.end).then_some(s.end)
    }

    /// Returns the JIT-compiled function of process `pid` at `address`: its start, end and name.
    pub fn jit(&mut self, pid: u32, address: u64) -> Option<(u64, u64, &str)> {
        self.mount.as_mut()?.jit(pid, address)
    }

    /// Reads the guest's file `path` and returns its usability. `running` is the build ID of the
    /// file that the guest runs.
    pub fn file_symbols(&mut self, path: &str, running: Option<BuildId>) -> GuestFileStatus {
        let Some(mount) = &mut self.mount else {
            return GuestFileStatus::Missing;
        };
        if mount.object(path).is_none() {
            GuestFileStatus::Missing
        } else if mount.object_of(path, running).is_none() {
            GuestFileStatus::OtherBuild
        } else {
            GuestFileStatus::Usable
        }
    }

    /// Returns the symbols of the guest's files, including the files read so far.
    pub fn into_files(self) -> Option<GuestSymbols> {
        self.mount
    }

    /// Returns one message for each guest file that could not be used so far.
    pub fn problems(&self) -> &[String] {
        self.mount.as_ref().map_or(&[], |m| m.problems())
    }

    /// Resolves the user address `address` of process `pid`. Returns the name of its object, the
    /// name and the start address of its function (if known), and a substitute for the function's
    /// name (if a mapping contains the address).
    fn user(&mut self, address: u64, pid: u32) -> (String, Option<(String, u64)>, Option<String>) {
        let mapping = self
            .profile
            .mappings
            .iter()
            .rev()
            .find(|m| m.pid == pid && address.checked_sub(m.start).is_some_and(|off| off < m.len));
        let saved = self.saved_name(Some(pid), address);
        let Some(m) = mapping else {
            return (USER_OBJECT.into(), saved, None);
        };
        let file = m.path.rsplit('/').next().unwrap_or(&m.path);
        let place = format!("{file}+{:#x}", (address - m.start).wrapping_add(m.file_offset));
        let by_object = self
            .mount
            .as_mut()
            .filter(|_| is_file(&m.path))
            .and_then(|mount| {
                let object = mount.object_of(&m.path, m.build_id)?;
                let linked =
                    object.address_of_file_offset((address - m.start).checked_add(m.file_offset)?)?;
                let symbol = object.resolve(linked)?;
                Some((symbol.name, address.wrapping_sub(symbol.offset)))
            });
        (m.path.clone(), by_object.or(saved), Some(place))
    }

    fn saved_name(&self, pid: Option<u32>, address: u64) -> Option<(String, u64)> {
        let list = self.saved.get(&pid)?;
        let after = list.partition_point(|s| s.start <= address);
        let s = list.get(after.checked_sub(1)?)?;
        (address < s.end).then(|| (s.name.clone(), s.start))
    }
}

/// Returns whether a mapping is backed by a file. Mappings without a file have names in brackets or
/// names that start with two slashes.
fn is_file(path: &str) -> bool {
    path.starts_with('/') && !path.starts_with("//")
}

/// Returns the profile with a call chain added to each sample that has none, because its vCPU was
/// not stopped for the sample.
///
/// The chain is copied from a sample with a chain in the same function of the same process. If
/// there are several of these samples, their chains are used in turn, so the shares of the
/// function's callers remain the same. A sample in the kernel may get the chain of another process
/// with the same name, and is then attributed to that process. A truncated chain is used only if no
/// sample in the function has a complete one. A sample remains unchanged if no sample in its
/// function has a chain.
pub fn complete_chains(profile: &Profile, symbols: &mut Symbolizer<'_>) -> Profile {
    let mut donors: HashMap<ChainKey, (Vec<super::ProfileSample<'_>>, usize)> = HashMap::new();
    for sample in profile.samples().filter(|s| !s.chain.is_empty()) {
        for place in chain_keys(profile, symbols, &sample).into_iter().flatten() {
            donors.entry(place).or_default().0.push(sample);
        }
    }
    for (samples, _) in donors.values_mut() {
        if samples.iter().any(|s| s.ends.truncation_reason().is_none()) {
            samples.retain(|s| s.ends.truncation_reason().is_none());
        }
    }
    let mut full = Profile::new(profile.meta.clone(), profile.events.clone());
    full.kernel = profile.kernel.clone();
    full.tasks = profile.tasks.clone();
    full.mappings = profile.mappings.clone();
    full.symbols = profile.symbols.clone();
    full.lost = profile.lost;
    let mut chain = Vec::new();
    for mut sample in profile.samples() {
        if !sample.chain.is_empty() {
            full.push(&sample);
            continue;
        }
        let mut found = chain_keys(profile, symbols, &sample).into_iter().flatten();
        chain.clear();
        if let Some(place) = found.find(|place| donors.contains_key(place))
            && let Some((samples, next)) = donors.get_mut(&place)
        {
            let donor = samples[*next % samples.len()];
            *next += 1;
            (sample.pid, sample.tid, sample.cr3) = (donor.pid, donor.tid, donor.cr3);
            chain.extend_from_slice(donor.chain);
            // The sample keeps its own address, which replaces the first address after the context
            // marker.
            if let Some(own) = chain.iter_mut().find(|f| **f < (-4095i64).cast_unsigned()) {
                *own = sample.ip;
            }
        }
        full.push(&super::ProfileSample {
            chain: &chain,
            ..sample
        });
    }
    full
}

/// Processes whose samples' call chains may be copied to a sample.
#[derive(PartialEq, Eq, Hash)]
enum SampleOwner {
    /// Only the process with this ID.
    Process(u32),
    /// All processes with this name.
    Named(String),
}

/// Key under which call chains that can be copied are stored: event, process, object and function.
type ChainKey = (u64, SampleOwner, Rc<str>, Option<String>);

/// Returns the keys under which chains for a sample are stored: one for its process and, if the
/// sample is in the kernel, one for all processes with the same name.
fn chain_keys(
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    sample: &super::ProfileSample<'_>,
) -> [Option<ChainKey>; 2] {
    let Some(frame) = super::frames(sample).next() else {
        return [None, None];
    };
    let named = symbols.name(frame, sample.pid);
    let function = named.known.then(|| named.name.clone());
    let task = frame
        .kernel
        .then(|| task_label(profile, sample.tid, sample.cr3, sample.time_ns));
    let place = |owner| (sample.event_id, owner, named.object.clone(), function.clone());
    [
        Some(place(SampleOwner::Process(sample.pid))),
        task.map(|task| place(SampleOwner::Named(task))),
    ]
}

/// Returns the name of a task. If the name is unknown, returns a substitute that contains the
/// thread ID or identifies the address space.
pub fn task_label(profile: &Profile, tid: u32, cr3: u64, time_ns: u64) -> String {
    match profile.comm(tid, time_ns) {
        Some(comm) => comm.to_owned(),
        None if tid != NO_PID => format!(":{tid}"),
        None => format!("cr3:{:x}", cr3 & 0x000F_FFFF_FFFF_F000),
    }
}
