//! What a client may ask of the guest's processes: the code they have mapped, and parts of their memory.
//!
//! All of it is read in the main loop, out of a guest that runs meanwhile and may be malicious. So each
//! answer is bounded in reads of guest memory, in time and in size, and nothing in it is trusted.

use std::time::Duration;

use control_api::protocol::{
    CodeMapping, Failure, FailureKind, MAX_PROCESS_CODE, MAX_PROCESS_MEMORY, ProcessCode, ProcessMemory,
};
use guest_profile::Budget;
use guest_profile::mappings;
use guest_profile::task::TaskReader;
use guest_profile::task::areas::Process;
use vm_memory::GuestMemoryMmap;

use super::session::fail;
use crate::pmu::GuestProbe;

/// Reads of guest memory for one answer: a thousand mappings take a tenth of them, a MiB of untouched pages a
/// fifth.
const READS: u32 = 1 << 17;
/// Time for one answer.
const TIME: Duration = Duration::from_millis(20);

/// The processes of a guest.
#[derive(Debug, Default)]
pub struct Processes {
    /// The one that was asked for last: clients ask for many parts of one.
    last: Option<Process>,
}

impl Processes {
    /// The code that process `pid` has mapped.
    ///
    /// # Errors
    /// There is no such process, or the guest's kernel does not tell.
    pub fn code(&mut self, probe: &GuestProbe, pid: u32) -> Result<ProcessCode, Failure> {
        self.with(probe, pid, |reader, process, budget| {
            let mut code = ProcessCode::default();
            let all = reader.code(process.mm, budget, |reader, found, budget| {
                let mapping = &found.mapping;
                let mut path = [0; mappings::MAX_PATH];
                if code.mappings.len() == MAX_PROCESS_CODE {
                    return false;
                }
                let Some(path) = mappings::name_of(reader, process.mm, mapping, &mut path, budget) else {
                    return false;
                };
                let build_id = match mapping.file {
                    0 => None,
                    _ => reader.build_id(process.mm, mapping, budget),
                };
                code.mappings.push(CodeMapping {
                    start: mapping.start,
                    len: mapping.end - mapping.start,
                    file_offset: mapping.file_offset,
                    base: found.base,
                    path: path.to_owned(),
                    build_id: build_id.map(|id| id.to_string()),
                });
                true
            });
            code.cut_short = !all;
            code
        })
    }

    /// `bytes` of the memory of process `pid`, from `address` on.
    ///
    /// # Errors
    /// As [`Self::code`]; or too many bytes are asked for.
    pub fn memory(
        &mut self,
        probe: &GuestProbe,
        pid: u32,
        address: u64,
        bytes: u32,
    ) -> Result<(ProcessMemory, Vec<u8>), Failure> {
        if bytes > MAX_PROCESS_MEMORY {
            return fail(
                FailureKind::Limit,
                format!("at most {MAX_PROCESS_MEMORY} bytes at once, not {bytes}"),
            );
        }
        self.with(probe, pid, |reader, process, budget| {
            let mut memory = vec![0; bytes as usize];
            let mut missing: Vec<(u32, u32)> = Vec::new();
            reader.memory(process.mm, address, &mut memory, budget, |at, len| {
                // Both are within `bytes`.
                let (at, len) = (u32::try_from(at).unwrap_or(0), u32::try_from(len).unwrap_or(0));
                match missing.last_mut() {
                    Some((before, of_before)) if *before + *of_before == at => *of_before += len,
                    _ => missing.push((at, len)),
                }
            });
            (ProcessMemory { bytes, missing }, memory)
        })
    }

    fn with<T>(
        &mut self,
        probe: &GuestProbe,
        pid: u32,
        then: impl FnOnce(&mut TaskReader<'_, '_, GuestMemoryMmap>, Process, &mut Budget) -> T,
    ) -> Result<T, Failure> {
        let kernel = probe.kernel().map(|kernel| (probe.memory(), kernel));
        let known = kernel
            .as_ref()
            .and_then(|(memory, kernel)| Some((*memory, kernel.tasks.as_ref().ok()?, kernel.tables?)));
        let Some((memory, layout, tables)) = known else {
            return fail(
                FailureKind::Unsupported,
                "the guest's kernel is not known, or does not tell where its processes are",
            );
        };
        let mut budget = Budget::new(READS, Some(TIME));
        let process = self
            .last
            .filter(|last| last.pid == pid)
            .and_then(|last| last.again(layout, memory, tables, &mut budget))
            .or_else(|| Process::find(layout, memory, tables, pid, &mut budget));
        self.last = process;
        let Some(process) = process else {
            return fail(FailureKind::Invalid, format!("the guest has no process {pid}"));
        };
        let mut reader = process.reader(layout, memory, tables);
        Ok(then(&mut reader, process, &mut budget))
    }
}
