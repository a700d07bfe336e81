//! Symbols of sampled addresses.

use std::collections::HashMap;

use super::args::TopArgs;
use crate::commands::{OperatorCommandError, files, one_line};
use control_api::client::Client;
use guest_profile::export::FileMapping;
use guest_profile::export::symbolize::{KERNEL_OBJECT, USER_OBJECT};
use guest_profile::programs::GuestSymbols;
use kernel_images::symbols::KernelSymbols;

/// Maximum number of distinct code locations for which samples are kept.
pub(super) const MAX_LOCATIONS: usize = 1 << 16;
/// Maximum number of mappings of guest programs that are kept.
const MAX_PROGRAM_MAPPINGS: usize = 1 << 16;

/// A sampled code location.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CodeLocation {
    /// `true` for a location in the guest kernel.
    pub(super) kernel: bool,
    /// Process ID, or [`NO_PID`](guest_profile::export::NO_PID).
    pub(super) pid: u32,
    /// Address of the sampled instruction.
    pub(super) ip: u64,
}

/// Symbols of guest addresses.
pub(super) struct LiveSymbols {
    kernel: Option<KernelSymbols>,
    /// `true` if the guest has a single address space. The kernel's symbols then cover all
    /// addresses.
    flat: bool,
    mount: Option<GuestSymbols>,
    mappings: Vec<FileMapping>,
    known: HashMap<CodeLocation, (String, String)>,
}

impl LiveSymbols {
    pub(super) fn of(client: &mut Client, args: &TopArgs) -> Result<Self, OperatorCommandError> {
        let (info, text) = client.symbols()?;
        // Ignore a parse error, because the VM may have no kernel symbols.
        let running = KernelSymbols::parse_text(&text).ok();
        let reference = running.as_ref().and_then(|symbols| {
            let find = |name| Some((name, symbols.by_name(name)?.address));
            ["_text", "_stext"].into_iter().find_map(find)
        });
        let given = files::kernel_symbols(&args.symbols, reference)?;
        Ok(Self {
            flat: info.flat && given.is_none(),
            kernel: given.or(running),
            mount: files::guest_mount(&args.symbols)?,
            mappings: Vec::new(),
            known: HashMap::new(),
        })
    }

    pub(super) fn mapping(&mut self, mapping: FileMapping) {
        if self.mappings.len() < MAX_PROGRAM_MAPPINGS {
            // Forget the names of the process's locations, because the new mapping may resolve more
            // of them.
            self.known.retain(|place, _| place.pid != mapping.pid);
            self.mappings.push(mapping);
        }
    }

    /// Returns the names of the module and function of a location in printable form, because the
    /// guest controls the names.
    pub(super) fn name(&mut self, place: CodeLocation) -> (String, String) {
        if let Some(known) = self.known.get(&place) {
            return known.clone();
        }
        let (object, symbol) = self.look_up(place);
        let named = (one_line(&object), one_line(&symbol));
        if self.known.len() >= 2 * MAX_LOCATIONS {
            self.known.clear();
        }
        self.known.insert(place, named.clone());
        named
    }

    fn look_up(&mut self, place: CodeLocation) -> (String, String) {
        if place.kernel || self.flat {
            let object = if place.kernel { KERNEL_OBJECT } else { USER_OBJECT };
            let found = self.kernel.as_ref().and_then(|symbols| {
                if self.flat {
                    symbols.resolve_flat(place.ip)
                } else {
                    symbols.resolve(place.ip)
                }
            });
            let name = found.map_or_else(
                || format!("{:#018x}", place.ip),
                |(symbol, _)| symbol.name.to_owned(),
            );
            return (object.to_owned(), name);
        }
        let offset = |m: &FileMapping| place.ip.checked_sub(m.start).filter(|off| *off < m.len);
        let mapping = self
            .mappings
            .iter()
            .rev()
            .find_map(|m| (m.pid == place.pid).then_some(m).zip(offset(m)));
        let Some((mapping, offset)) = mapping else {
            return (USER_OBJECT.to_owned(), "[unknown]".to_owned());
        };
        let symbol = self.mount.as_mut().and_then(|mount| {
            let object = mount.object(&mapping.path)?;
            let linked = object.address_of_file_offset(offset.checked_add(mapping.file_offset)?)?;
            Some(object.resolve(linked)?.name)
        });
        (
            mapping.path.clone(),
            symbol.unwrap_or_else(|| "[unknown]".to_owned()),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use guest_profile::export::NO_PID;

    /// Guest-controlled names cannot contain terminal control sequences.
    #[test]
    fn guest_names_have_no_control_characters() {
        let mut names = LiveSymbols {
            kernel: KernelSymbols::parse_text(b"ffffffff81000000 T a\x1b[2Jb\nffffffff81000100 T end\n").ok(),
            flat: false,
            mount: None,
            mappings: Vec::new(),
            known: HashMap::new(),
        };
        names.mapping(FileMapping {
            time_ns: 0,
            pid: 7,
            start: 0x1000,
            len: 0x1000,
            file_offset: 0,
            path: "/bin/\x1b]0;x\x07".into(),
            build_id: None,
        });
        let place = |kernel, pid, ip| CodeLocation { kernel, pid, ip };
        for place in [
            place(true, NO_PID, 0xffff_ffff_8100_0010),
            place(false, 7, 0x1800),
        ] {
            let (object, symbol) = names.name(place);
            assert!(!(object + &symbol).chars().any(char::is_control));
        }
        assert_eq!(names.name(place(false, 8, 0x1800)).0, USER_OBJECT);
    }
}
