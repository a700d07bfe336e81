//! Reads the executable mappings and memory of guest processes for a client.
//!
//! The main loop reads from a running and possibly malicious guest. Each reply is therefore limited
//! in guest memory reads, time and size, and its contents are not trusted.

use std::time::Duration;

use control_api::protocol::{
    CodeMapping, MAX_PROCESS_CODE, MAX_PROCESS_MEMORY, ProcessCode, ProcessMemory, RequestError,
    RequestErrorKind,
};
use guest_profile::GuestMemoryReadBudget;
use guest_profile::mappings;
use guest_profile::task::TaskReader;
use guest_profile::task::areas::GuestProcess;
use vm_memory::GuestMemoryMmap;

use super::session::fail;
use crate::pmu::GuestSamplingContext;

/// Maximum number of guest memory reads for one reply. A list of a thousand mappings takes a tenth
/// of this number, and one MiB of untouched pages a fifth.
const READS: u32 = 1 << 17;
/// Time after which the collection of data for one reply ends.
const TIME: Duration = Duration::from_millis(20);

/// Reader of the guest's processes for one VM.
#[derive(Debug, Default)]
pub struct GuestProcesses {
    /// Process of the last request, cached because clients read a process in many small requests.
    last: Option<GuestProcess>,
}

impl GuestProcesses {
    /// Returns the executable mappings of process `pid`.
    ///
    /// # Errors
    /// Returns a [`RequestError`] if the process does not exist or the guest kernel's data
    /// structures are unknown.
    pub fn code(&mut self, probe: &GuestSamplingContext, pid: u32) -> Result<ProcessCode, RequestError> {
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

    /// Reads `bytes` bytes of the memory of process `pid` at `address`.
    ///
    /// # Errors
    /// Returns a [`RequestError`] in the same cases as [`Self::code`], and if `bytes` exceeds the
    /// limit.
    pub fn memory(
        &mut self,
        probe: &GuestSamplingContext,
        pid: u32,
        address: u64,
        bytes: u32,
    ) -> Result<(ProcessMemory, Vec<u8>), RequestError> {
        if bytes > MAX_PROCESS_MEMORY {
            return fail(
                RequestErrorKind::Limit,
                format!("at most {MAX_PROCESS_MEMORY} bytes at once, not {bytes}"),
            );
        }
        self.with(probe, pid, |reader, process, budget| {
            let mut memory = vec![0; bytes as usize];
            let mut missing: Vec<(u32, u32)> = Vec::new();
            reader.memory(process.mm, address, &mut memory, budget, |at, len| {
                // Both values are at most `bytes` and therefore fit into 32 bits.
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
        probe: &GuestSamplingContext,
        pid: u32,
        then: impl FnOnce(&mut TaskReader<'_, '_, GuestMemoryMmap>, GuestProcess, &mut GuestMemoryReadBudget) -> T,
    ) -> Result<T, RequestError> {
        let kernel = probe.kernel().map(|kernel| (probe.memory(), kernel));
        let known = kernel
            .as_ref()
            .and_then(|(memory, kernel)| Some((*memory, kernel.tasks.as_ref().ok()?, kernel.tables?)));
        let Some((memory, layout, tables)) = known else {
            return fail(
                RequestErrorKind::Unsupported,
                "the guest's kernel is not known, or does not tell where its processes are",
            );
        };
        let mut budget = GuestMemoryReadBudget::new(READS, Some(TIME));
        let process = self
            .last
            .filter(|last| last.pid == pid)
            .and_then(|last| last.reread(layout, memory, tables, &mut budget))
            .or_else(|| GuestProcess::find(layout, memory, tables, pid, &mut budget));
        self.last = process;
        let Some(process) = process else {
            return fail(
                RequestErrorKind::Invalid,
                format!("the guest has no process {pid}"),
            );
        };
        let mut reader = process.reader(layout, memory, tables);
        Ok(then(&mut reader, process, &mut budget))
    }
}
