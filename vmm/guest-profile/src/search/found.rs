//! A kernel that was found in a guest's memory: what samples and operators need of it.

use kernel_images::build_id::BuildId;
use kernel_images::orc::OrcTable;
use kernel_images::packed::PackedText;
use serde::{Deserialize, Serialize};

use crate::task::TaskLayout;
use crate::task::areas::KernelTables;
use crate::unwind::KernelUnwind;

/// Why something was not read, in the reader's words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct Unread(pub String);

/// A kernel in guest memory. Addresses are those at which it runs.
#[derive(Debug)]
pub struct FoundKernel {
    /// Unwind tables, if the kernel is built with them.
    pub orc: Option<OrcTable>,
    /// The assembly at the ways into and out of the kernel: its first address and the one behind it, equal
    /// when not known.
    pub entry_text: (u64, u64),
    /// Where the current task is found, or why that is not known.
    pub tasks: Result<TaskLayout, Unread>,
    /// The kernel's own page tables; `None` when it does not tell.
    pub tables: Option<KernelTables>,
    /// Its symbols, as the text of `/proc/kallsyms`.
    pub symbols: PackedText,
    /// How many they are.
    pub symbol_count: u64,
    /// Its release, for example `6.1.0-56-cloud-amd64`.
    pub release: Option<String>,
    /// What names its build.
    pub build_id: Option<BuildId>,
}

impl FoundKernel {
    /// What the unwinder needs of it.
    pub fn unwind(&self) -> KernelUnwind<'_> {
        KernelUnwind {
            orc: self.orc.as_ref(),
            slide: 0,
            entry_text: self.entry_text,
        }
    }

    /// One line for the operator.
    pub fn describe(&self) -> String {
        format!(
            "Linux {}, {} symbols, kernel stacks by {}, tasks {}",
            self.release.as_deref().unwrap_or("of unknown version"),
            self.symbol_count,
            if self.orc.is_some() {
                "ORC"
            } else {
                "frame pointers"
            },
            if self.tasks.is_ok() { "named" } else { "not named" },
        )
    }
}
