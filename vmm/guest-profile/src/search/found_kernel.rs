//! A kernel that the search has found, with the data needed to sample it and to describe it to the
//! operator.

use kernel_images::build_id::BuildId;
use kernel_images::orc::OrcTable;
use kernel_images::packed::PackedText;
use serde::{Deserialize, Serialize};

use crate::task::TaskLayout;
use crate::task::areas::KernelPageTables;
use crate::unwind::KernelUnwinder;

/// Message from the reader process that explains why it could not read a table of the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct KernelTableReadError(pub String);

/// A kernel found in guest memory. All addresses are run-time addresses.
#[derive(Debug)]
pub struct FoundKernel {
    /// ORC unwind tables of the kernel, if it has them.
    pub orc: Option<OrcTable>,
    /// Address range of the entry code (end exclusive); empty if unknown.
    pub entry_text: (u64, u64),
    /// Layout of the kernel's task structures, or the reason why it is unknown.
    pub tasks: Result<TaskLayout, KernelTableReadError>,
    /// Page tables that the kernel uses outside processes; `None` if their address is unknown.
    pub tables: Option<KernelPageTables>,
    /// Compressed symbols of the kernel in the format of `/proc/kallsyms`.
    pub symbols: PackedText,
    /// Number of symbols in `symbols`.
    pub symbol_count: u64,
    /// Kernel release, for example `6.1.0-56-cloud-amd64`; `None` if unknown.
    pub release: Option<String>,
    /// Build ID of the kernel.
    pub build_id: Option<BuildId>,
}

impl FoundKernel {
    /// Returns the tables and addresses that are needed to unwind stacks of this kernel.
    pub fn unwind(&self) -> KernelUnwinder<'_> {
        KernelUnwinder {
            orc: self.orc.as_ref(),
            slide: 0,
            entry_text: self.entry_text,
        }
    }

    /// Returns a one-line description of the kernel for the operator.
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
