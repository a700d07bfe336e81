//! Names for the addresses of a recording, kept in its file.

use std::collections::{BTreeMap, HashSet};

use super::RecordArgs;
use crate::commands::{CommandError, files};
use control_api::client::Client;
use guest_profile::export::symbolize::Symbolizer;
use guest_profile::export::{Frame, KernelMap, NO_PID, Profile, SavedSymbol};
use guest_profile::programs::GuestMount;
use kernel_images::symbols::KernelSymbols;

/// Most different addresses whose names are kept in the file.
const MAX_ADDRESSES: usize = 1 << 20;

/// Names of the guest's addresses: as the user gave them, else as the VM knows them.
pub(super) struct Names {
    kernel: Option<KernelSymbols>,
    /// The kernel's symbols serve user addresses too.
    flat: bool,
    mount: Option<GuestMount>,
    /// Addresses to be named: the kernel's (`None`) and those of processes.
    addresses: HashSet<(Option<u32>, u64)>,
}

impl Names {
    pub(super) fn of(client: &mut Client, args: &RecordArgs) -> Result<Self, CommandError> {
        let (info, text) = client.symbols()?;
        if let Some(path) = &args.save_kallsyms {
            std::fs::write(path, &text).map_err(CommandError::file(path))?;
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
            flat,
            mount: files::guest_mount(args)?,
            addresses: HashSet::new(),
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
        })
    }

    /// Keeps in mind that `address` needs a name. `pid`: of the process; `None` for the kernel's addresses.
    pub(super) fn note(&mut self, pid: Option<u32>, address: u64) {
        if self.addresses.len() < MAX_ADDRESSES {
            self.addresses.insert((pid, address));
        }
    }

    /// The names of all addresses noted, each symbol once. `mapped` knows the processes' mappings.
    pub(super) fn saved(self, mapped: &Profile) -> Vec<SavedSymbol> {
        let mut saved: BTreeMap<(Option<u32>, u64), SavedSymbol> = BTreeMap::new();
        let mut keep = |symbol: SavedSymbol| {
            let entry = saved
                .entry((symbol.pid, symbol.start))
                .or_insert_with(|| symbol.clone());
            entry.end = entry.end.max(symbol.end);
        };
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
                if named.known {
                    keep(SavedSymbol {
                        start: address.wrapping_sub(named.offset),
                        // The extent is what was seen of it: the sources may give no size.
                        end: address.saturating_add(1),
                        name: named.name.clone(),
                        pid: Some(pid),
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

/// The symbol by which the kernel's place is told.
fn reference_symbol(symbols: &KernelSymbols) -> Option<(&'static str, u64)> {
    ["_text", "_stext"]
        .into_iter()
        .find_map(|name| Some((name, symbols.by_name(name)?.address)))
}
