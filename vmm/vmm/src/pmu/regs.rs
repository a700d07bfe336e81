//! Reads the guest registers, the stacks and the current task for a sample. Each value is read when
//! it is first needed and then cached.

use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwapOption, Guard};
use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_sregs};
use perf_core::attr::{REGS_USER_LEN, STACK_USER_MAX};
use perf_core::branch::{BranchEntry, BranchStackConfig};
use perf_core::record::{SampleWords, UserRegsAndStack};
use perf_core::{CpuMode, SampleRegs, error_line, guest_log};
use sandbox::SandboxedThreadKind;
use smallvec::SmallVec;
use vm_memory::GuestMemoryMmap;
use zerocopy::IntoBytes;

use super::branches::BranchStackCollector;
use super::kernel_reader::{GuestKernelReadError, KernelReader};
use crate::kvm::registers;
use crate::kvm::vcpu_fd::VcpuFd;
use guest_profile::locate::KernelAnchorRegisters;
use guest_profile::mappings::{self, MappingGeneration, SampleMappingReporter};
use guest_profile::paging::{AddressSpace, has_five_levels};
use guest_profile::sample::{RAW_BYTES, SampleRawData};
use guest_profile::search::FoundKernel;
use guest_profile::task::{GuestTask, TaskReader};
use guest_profile::unwind::context::SampledUserRegs;
use guest_profile::unwind::{self, CONTEXT_GUEST_USER, CallChain, UnwindLimits, UnwindStopReasons};
use guest_profile::{GuestMemoryReadBudget, GuestRegs};

/// IA32_KERNEL_GS_BASE (SDM vol. 4): the GS base that SWAPGS loads.
const IA32_KERNEL_GS_BASE: u32 = 0xC000_0102;
/// IA32_LSTAR: target of SYSCALL in 64-bit mode (SDM vol. 4).
const IA32_LSTAR: u32 = 0xC000_0082;
/// Minimum interval between two searches for the guest's kernel. Each search copies the kernel.
const MIN_SEARCH_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of guest memory reads for one [`GuestSamplingContext::code`]. Suffices for
/// seventeen pages with five-level page tables.
const CODE_READS: u32 = 1024;
/// Page size, in bytes.
const PAGE: usize = 4096;
/// Maximum number of guest memory reads with which the current task is located.
const TASK_READS: u32 = 64;

/// Guest memory, and what is known about the guest's kernel, for samples.
#[derive(Clone, Debug)]
pub struct GuestSamplingContext {
    memory: GuestMemoryMmap,
    kernel: Arc<ArcSwapOption<FoundKernel>>,
    /// Reader for the guest's kernel; `None` if the kernel is never read.
    reader: Option<Arc<KernelReader>>,
    search: Arc<Mutex<KernelSearch>>,
    listeners: Arc<MappingGeneration>,
    /// `true` if the guest used five-level page tables at the last sample.
    five_levels: Arc<AtomicBool>,
}

/// Progress of the search for the guest's kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelSearchProgress {
    /// The search for the guest's kernel has not started.
    NotStarted,
    /// The search for the guest's kernel is running.
    Running,
    /// A kernel with this description was found.
    Found(String),
    /// No kernel was found, for this reason.
    NotFound(String),
}

/// State of the search for the guest's kernel.
#[derive(Debug, Default)]
enum KernelSearch {
    #[default]
    NotYet,
    Looking,
    Found(String),
    Failed(String, Instant),
    /// The search failed for a reason that will also apply to later guests of this VM. No further
    /// search is started.
    Over(String),
}

impl GuestSamplingContext {
    /// Creates the context of a guest whose kernel is not known yet. Without a `reader`, the kernel
    /// is never searched for.
    pub fn new(memory: GuestMemoryMmap, reader: Option<Arc<KernelReader>>) -> Self {
        Self {
            memory,
            kernel: Arc::default(),
            reader,
            search: Arc::default(),
            listeners: Arc::default(),
            five_levels: Arc::default(),
        }
    }

    /// Records that another client reads samples. Information that is sent only once is then sent
    /// again.
    pub fn add_listener(&self) {
        self.listeners.add();
    }

    /// Returns the guest's memory.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Reads up to `length` bytes of guest code at the linear address `address` in the address
    /// space `cr3`. Ends at the first unmapped page. Uses the number of page table levels at the
    /// last sample.
    pub fn code(&self, cr3: u64, address: u64, length: u32) -> Vec<u8> {
        let five_levels = self.five_levels.load(Ordering::Relaxed);
        let mut space = AddressSpace::with_root(&self.memory, cr3, five_levels);
        let mut budget = GuestMemoryReadBudget::new(CODE_READS, None);
        let mut code = Vec::new();
        let (mut at, mut left) = (address, u64::from(length));
        while left > 0 {
            let mut page = [0; PAGE];
            let count = left.min(PAGE as u64 - at % PAGE as u64);
            let piece = usize::try_from(count)
                .ok()
                .and_then(|count| page.get_mut(..count));
            let Some(piece) = piece.filter(|_| space.is_canonical(at)) else {
                break;
            };
            if space.read(at, piece, &mut budget).is_err() {
                break;
            }
            code.extend_from_slice(piece);
            left -= count;
            match at.checked_add(count) {
                Some(next) => at = next,
                None => break,
            }
        }
        code
    }

    /// Returns the guest's kernel, if known.
    pub fn kernel(&self) -> Option<Arc<FoundKernel>> {
        self.kernel.load_full()
    }

    /// Discards what is known about the guest's kernel, because a different guest is started.
    pub fn clear_kernel(&self) {
        let mut search = self.search();
        if !matches!(*search, KernelSearch::Over(_)) {
            *search = KernelSearch::NotYet;
        }
        self.kernel.store(None);
    }

    /// Returns `true` if the kernel is unknown and no search has started yet. The caller must then
    /// start a search.
    pub fn begin_first_search(&self) -> bool {
        if self.kernel.load().is_some() {
            return false;
        }
        let mut search = self.search();
        let begin = matches!(*search, KernelSearch::NotYet);
        if begin {
            *search = KernelSearch::Looking;
        }
        begin
    }

    /// Returns `true` if the caller must start a search for the guest's kernel now. Returns `false`
    /// if the kernel was found, a search is running, the search cannot succeed, or a search failed
    /// a moment ago.
    pub fn begin_search(&self) -> bool {
        let mut search = self.search();
        let begin = match &*search {
            KernelSearch::NotYet => true,
            KernelSearch::Failed(_, at) => at.elapsed() >= MIN_SEARCH_INTERVAL,
            KernelSearch::Looking | KernelSearch::Found(_) | KernelSearch::Over(_) => false,
        };
        if begin {
            *search = KernelSearch::Looking;
        }
        begin
    }

    /// Returns the progress of the search for the guest's kernel.
    pub fn search_progress(&self) -> KernelSearchProgress {
        match &*self.search() {
            KernelSearch::NotYet => KernelSearchProgress::NotStarted,
            KernelSearch::Looking => KernelSearchProgress::Running,
            KernelSearch::Found(what) => KernelSearchProgress::Found(what.clone()),
            KernelSearch::Failed(why, _) | KernelSearch::Over(why) => {
                KernelSearchProgress::NotFound(why.clone())
            }
        }
    }

    /// Starts a thread that reads the guest's kernel from memory. Later samples use what it finds.
    fn search_from(&self, regs: Option<(GuestRegs, KernelAnchorRegisters)>) {
        let probe = self.clone();
        let builder = std::thread::Builder::new().name("find-kernel".into());
        let spawned = sandbox::spawn(SandboxedThreadKind::Profiler, builder, move || {
            probe.run_search(|memory| {
                sandbox::fault_point(SandboxedThreadKind::Profiler);
                let (regs, anchors) = regs.as_ref().ok_or(KernelSearchError::NoRegisters)?;
                let reader = probe.reader.as_ref().ok_or(KernelSearchError::NoReader)?;
                Ok(reader.read(memory, regs, anchors)?)
            });
        });
        if let Err(e) = spawned {
            self.end_search(Err(KernelSearchError::NoThread(e)));
        }
    }

    /// Runs the search `read` and stores its result. A panic counts as a failure, after which a new
    /// search may start.
    fn run_search(&self, read: impl FnOnce(&GuestMemoryMmap) -> Result<FoundKernel, KernelSearchError>) {
        let found = panic::catch_unwind(AssertUnwindSafe(|| read(&self.memory)));
        self.end_search(found.unwrap_or(Err(KernelSearchError::Panicked)));
    }

    fn end_search(&self, found: Result<FoundKernel, KernelSearchError>) {
        let result = match found {
            Ok(kernel) => {
                if let Err(why) = &kernel.tasks {
                    guest_log!(Info, "guest tasks have no names: {why}");
                }
                let what = kernel.describe();
                guest_log!(Info, "guest kernel: {what}");
                self.kernel.store(Some(Arc::new(kernel)));
                KernelSearch::Found(what)
            }
            Err(e) => {
                let line = error_line(&e);
                match e {
                    KernelSearchError::Reader(GuestKernelReadError::NoKeeper(_)) => {
                        log::warn!("{line}");
                        KernelSearch::Over(line)
                    }
                    KernelSearchError::Reader(GuestKernelReadError::WorkerExit(_)) => {
                        guest_log!(Warn, "{line}");
                        KernelSearch::Failed(line, Instant::now())
                    }
                    _ => KernelSearch::Failed(line, Instant::now()),
                }
            }
        };
        *self.search() = result;
    }

    fn search(&self) -> MutexGuard<'_, KernelSearch> {
        self.search.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reason why the guest's kernel is unknown.
#[derive(Debug, thiserror::Error)]
enum KernelSearchError {
    #[error(transparent)]
    Reader(#[from] GuestKernelReadError),
    #[error("this VM has no kernel reader process")]
    NoReader,
    #[error("cannot read the vCPU's registers from KVM")]
    NoRegisters,
    #[error("the search failed because of an internal error (see the log of Perfvisor); it is retried")]
    Panicked,
    #[error("cannot start the search thread")]
    NoThread(#[source] std::io::Error),
}

/// Maximum number of user addresses per sample for which the sample contains mappings.
const MAX_USER_FRAMES: usize = 32;

/// State that a vCPU keeps between samples.
#[derive(Debug)]
pub struct VcpuSampleCache {
    /// Address of the guest kernel's per-CPU data for this vCPU; `None` if unknown. Does not change
    /// while the kernel runs.
    per_cpu_base: Option<u64>,
    /// Mappings that samples have already reported to their readers.
    reported_mappings: SampleMappingReporter,
    /// Buffer for the raw data of a sample.
    raw: Box<[u8; RAW_BYTES + mappings::MAX_BYTES]>,
    /// Buffer for the user stack of a sample; empty until a sample needs it.
    stack: Vec<u8>,
    /// User registers of the sample whose user stack is in `stack`.
    user_regs: [u64; REGS_USER_LEN],
    /// Time that the last sample took on the vCPU thread, including single-stepping for its branch
    /// stack, in nanoseconds; 0 if not measured.
    held_ns: u32,
    /// Collector of the branch stack for the next sample.
    pub(super) branches: BranchStackCollector,
    /// Time that single-stepping took for the branch stack of the sample, in nanoseconds.
    burst_ns: u32,
    /// `true` if a sample was taken since the last [`VcpuSampleCache::end_overflow`].
    taken: bool,
    /// Number of samples that were taken on this vCPU so far.
    samples: u32,
}

/// After the first 64 samples, the duration is measured of every sample whose number is a multiple
/// of this constant.
const MEASURE_INTERVAL: u32 = 4;

impl VcpuSampleCache {
    /// Begins to handle overflows. Returns the current time if the duration of the sample is to be
    /// measured. Not every sample is measured, because reading the clock takes time.
    #[inline]
    pub fn begin(&mut self) -> Option<Instant> {
        (self.samples < 64 || self.samples.is_multiple_of(MEASURE_INTERVAL)).then(Instant::now)
    }

    /// Sets the time that single-stepping took for the branch stack of the next sample, in
    /// nanoseconds.
    pub fn set_burst_time(&mut self, ns: u64) {
        self.burst_ns = u32::try_from(ns).unwrap_or(u32::MAX);
    }

    /// Ends the handling of overflows that began at `began`. If a sample was taken, stores the
    /// duration (0 if `began` is `None`) plus the time of single-stepping.
    #[inline]
    pub fn end_overflow(&mut self, began: Option<Instant>) {
        if std::mem::take(&mut self.taken) {
            self.samples = self.samples.wrapping_add(1);
            let service_ns = began.map_or(0, |began| {
                u32::try_from(began.elapsed().as_nanos()).unwrap_or(u32::MAX)
            });
            self.held_ns = service_ns.saturating_add(std::mem::take(&mut self.burst_ns));
        }
    }
}

impl Default for VcpuSampleCache {
    fn default() -> Self {
        Self {
            per_cpu_base: None,
            reported_mappings: SampleMappingReporter::new(),
            raw: Box::new([0; RAW_BYTES + mappings::MAX_BYTES]),
            stack: Vec::new(),
            user_regs: [0; REGS_USER_LEN],
            held_ns: 0,
            branches: BranchStackCollector::default(),
            burst_ns: 0,
            taken: false,
            samples: 0,
        }
    }
}

/// Registers that KVM copied to user space at the last exit (`KVM_CAP_SYNC_REGS`), and which of
/// them are valid.
#[derive(Clone, Copy, Debug, Default)]
pub struct ExitRegisters {
    regs: GuestRegs,
    general: bool,
    system: bool,
}

impl ExitRegisters {
    /// Sets the general-purpose registers.
    #[inline]
    pub fn set_general(&mut self, regs: &kvm_regs) {
        registers::set_general(&mut self.regs, regs);
        self.general = true;
    }

    /// Sets the segment and control registers.
    #[inline]
    pub fn set_system(&mut self, sregs: &kvm_sregs) {
        registers::set_system(&mut self.regs, sregs);
        self.system = true;
    }
}

/// Reads the registers, the stacks and the current task of a vCPU for a sample. The vCPU is outside
/// guest mode and the caller is its thread.
#[derive(Debug)]
pub struct VcpuSampleRegs<'a> {
    fd: &'a VcpuFd,
    guest: &'a GuestSamplingContext,
    memory: &'a mut VcpuSampleCache,
    /// Registers that were read for this sample so far.
    known: ExitRegisters,
    /// Kernel of the guest; `None` if it was not needed yet.
    kernel: Option<Guard<Option<Arc<FoundKernel>>>>,
    /// `true` if segment and control registers were read.
    used_system: bool,
    user_frames: SmallVec<[u64; MAX_USER_FRAMES]>,
    ends: UnwindStopReasons,
    /// Call chain of the sample; `None` before the stack walk.
    chain: Option<CallChain>,
    /// Length of the user stack that was copied, ABI of the user registers, and length of the stack
    /// that the sample requested. `None` before the stack is read.
    user: Option<(usize, u64, u32)>,
    /// Length of the raw data; `None` before it is assembled.
    raw_len: Option<usize>,
}

impl<'a> VcpuSampleRegs<'a> {
    /// Creates the source of a sample's registers. `memory` is what the vCPU keeps between samples.
    /// Registers in `known` are not read from KVM again.
    #[inline]
    pub fn new(
        fd: &'a VcpuFd,
        guest: &'a GuestSamplingContext,
        memory: &'a mut VcpuSampleCache,
        known: ExitRegisters,
    ) -> Self {
        Self {
            fd,
            guest,
            memory,
            known,
            kernel: None,
            used_system: false,
            user_frames: SmallVec::new(),
            ends: UnwindStopReasons::default(),
            chain: None,
            user: None,
            raw_len: None,
        }
    }

    /// Returns `true` if segment and control registers were read for this sample.
    pub fn used_system(&self) -> bool {
        self.used_system
    }

    /// Reads the general-purpose registers. Returns `None` if the KVM call fails.
    #[inline]
    fn general(&mut self) -> Option<&GuestRegs> {
        if !self.known.general {
            self.known.set_general(&self.fd.get_regs().ok()?);
        }
        Some(&self.known.regs)
    }

    /// Reads the segment and control registers. Returns `None` if the KVM call fails.
    #[inline]
    fn system(&mut self) -> Option<&GuestRegs> {
        self.used_system = true;
        if !self.known.system {
            self.known.set_system(&self.fd.get_sregs().ok()?);
        }
        Some(&self.known.regs)
    }

    /// Returns the current privilege level (CPL).
    pub fn cpl(&mut self) -> Option<u8> {
        self.system().map(|regs| regs.cpl)
    }

    /// Reads the registers needed for stack walks. Returns `None` if a KVM call fails.
    fn walk_regs(&mut self) -> Option<&GuestRegs> {
        self.general()?;
        self.system()
    }

    /// Reads the registers needed for stack walks, and the inactive GS base. Returns `None` if a
    /// KVM call fails.
    fn regs_with_kernel_gs(&mut self) -> Option<&GuestRegs> {
        self.walk_regs()?;
        self.known.regs.kernel_gs_base = self.msr(IA32_KERNEL_GS_BASE);
        Some(&self.known.regs)
    }

    /// Starts the search for the guest's kernel. The search begins at addresses in the current
    /// registers.
    pub fn find_kernel(&mut self) {
        let lstar = self.msr(IA32_LSTAR);
        let regs = self.regs_with_kernel_gs().map(|regs| {
            let anchors = KernelAnchorRegisters {
                lstar,
                idt_base: regs.idt_base,
            };
            (*regs, anchors)
        });
        self.guest.search_from(regs);
    }

    /// Returns the value of an MSR, or 0 if the KVM call fails.
    fn msr(&self, index: u32) -> u64 {
        let entry = kvm_msr_entry {
            index,
            ..Default::default()
        };
        let Ok(mut msrs) = Msrs::from_entries(&[entry]) else {
            return 0;
        };
        match self.fd.get_msrs(&mut msrs) {
            Ok(1) => msrs.as_slice()[0].data,
            _ => 0,
        }
    }

    /// Returns the current task of the guest. Writes the mappings of the user frames into the raw
    /// data buffer and their length to `told`.
    fn task(&mut self, told: &mut usize) -> Option<GuestTask> {
        let kernel = self.kernel.get_or_insert_with(|| self.guest.kernel.load());
        kernel.as_ref()?.tasks.as_ref().ok()?;
        let base = self.per_cpu_base()?;
        self.walk_regs()?;
        let layout = self.kernel.as_ref()?.as_ref()?.tasks.as_ref().ok()?;
        let memory = &mut *self.memory;
        let mut budget = GuestMemoryReadBudget::new(TASK_READS, None);
        let mut reader = TaskReader::new(layout, &self.guest.memory, &self.known.regs)?;
        let task = reader.current(base, &mut budget)?;
        if task.mm != 0 {
            *told = memory.reported_mappings.report(
                &mut reader,
                (task.pid, task.mm),
                &self.user_frames,
                &self.guest.listeners,
                &mut memory.raw[RAW_BYTES..],
            );
        }
        Some(task)
    }

    /// Returns the address of the per-CPU data of the guest's kernel for this vCPU.
    fn per_cpu_base(&mut self) -> Option<u64> {
        let base = match self.memory.per_cpu_base {
            Some(base) => base,
            None => self.regs_with_kernel_gs()?.kernel_per_cpu_base()?,
        };
        self.memory.per_cpu_base = Some(base);
        Some(base)
    }

    /// Returns `true` if a debugger in the guest is single-stepping the current task. Returns
    /// `false` if this is unknown.
    pub fn is_single_stepped(&mut self) -> bool {
        let mut stepped = || {
            let kernel = self.kernel.get_or_insert_with(|| self.guest.kernel.load());
            kernel.as_ref()?.tasks.as_ref().ok()?;
            let base = self.per_cpu_base()?;
            self.walk_regs()?;
            let layout = self.kernel.as_ref()?.as_ref()?.tasks.as_ref().ok()?;
            let mut budget = GuestMemoryReadBudget::new(TASK_READS, None);
            TaskReader::new(layout, &self.guest.memory, &self.known.regs)?
                .is_single_stepped(base, &mut budget)
        };
        stepped().unwrap_or(false)
    }

    /// Stores the user addresses of the call chain `chain`, so that the sample can contain their
    /// mappings.
    fn keep_user_frames(&mut self, chain: &[u64]) {
        let user = chain.iter().position(|&frame| frame == CONTEXT_GUEST_USER);
        let frames = user.map_or(&[][..], |at| &chain[at + 1..]);
        let frames = frames.iter().take_while(|&&frame| frame >> 63 == 0);
        self.user_frames.clear();
        self.user_frames.extend(frames.take(MAX_USER_FRAMES).copied());
    }
}

impl SampleRegs for VcpuSampleRegs<'_> {
    fn mode(&mut self) -> CpuMode {
        match self.cpl() {
            Some(3) => CpuMode::GuestUser,
            _ => CpuMode::GuestKernel,
        }
    }

    fn ip(&mut self) -> u64 {
        self.general().map_or(0, |r| r.rip)
    }

    fn callchain(&mut self, out: &mut [u64]) -> usize {
        if self.walk_regs().is_none() {
            return 0;
        }
        let kernel = self.kernel.get_or_insert_with(|| self.guest.kernel.load());
        let unwind = kernel.as_ref().map(|k| k.unwind());
        let chain = unwind::walk(
            &self.guest.memory,
            &self.known.regs,
            unwind,
            &UnwindLimits::default(),
            out,
        );
        self.ends = chain.stop_reasons();
        self.chain = Some(chain);
        self.keep_user_frames(&out[..chain.len]);
        chain.len
    }

    fn branches(&mut self, request: BranchStackConfig, out: &mut Vec<BranchEntry>) -> bool {
        self.memory.branches.take(request, out)
    }

    fn raw(&mut self) -> &[u8] {
        let len = match self.raw_len {
            Some(len) => len,
            None => {
                let len = self.write_raw();
                *self.raw_len.insert(len)
            }
        };
        &self.memory.raw[..len]
    }

    fn raw_and_user(&mut self, stack_bytes: u32) -> (&[u8], UserRegsAndStack<'_>) {
        let raw_len = self.raw().len();
        let (len, abi) = match self.user {
            Some((len, abi, asked)) if asked >= stack_bytes => (len, abi),
            _ => {
                let (len, abi) = self.read_user(stack_bytes);
                self.user = Some((len, abi, stack_bytes));
                (len, abi)
            }
        };
        let registers = if abi == 0 { &[][..] } else { &self.memory.user_regs };
        let user = UserRegsAndStack {
            abi,
            registers: SampleWords::List(registers),
            stack: &self.memory.stack[..len],
        };
        (&self.memory.raw[..raw_len], user)
    }
}

impl VcpuSampleRegs<'_> {
    /// Reads the user registers and the top of the user stack. Returns the length of the stack in
    /// bytes and the ABI of the registers. The ABI is 0 if no user program runs.
    fn read_user(&mut self, stack_bytes: u32) -> (usize, u64) {
        if self.chain.is_none() {
            let mut chain = [0; perf_core::CALLCHAIN_MAX];
            self.callchain(&mut chain);
        }
        let guest = &self.guest.memory;
        let regs = &self.known.regs;
        let context = self
            .chain
            .as_ref()
            .and_then(|chain| SampledUserRegs::of(guest, regs, chain));
        let Some(context) = context else {
            return (0, 0);
        };
        let memory = &mut *self.memory;
        let asked = stack_bytes.min(STACK_USER_MAX) as usize;
        if memory.stack.len() < asked {
            // The buffer is allocated once, at the first request.
            memory.stack.resize(STACK_USER_MAX as usize, 0);
        }
        memory.user_regs = context.registers;
        let len = context.stack(guest, regs, &mut memory.stack[..asked]);
        (len, if context.wide { 2 } else { 1 })
    }

    /// Assembles the raw data of the sample, and returns its length in bytes.
    fn write_raw(&mut self) -> usize {
        if self.user_frames.is_empty() && self.cpl() == Some(3) {
            let ip = self.ip();
            self.user_frames.push(ip);
        }
        let mut told = 0;
        let task = self.task(&mut told);
        self.memory.taken = true;
        let held_ns = self.memory.held_ns;
        let ends = self.ends;
        let (cr3, cpl) = self.system().map_or((0, 0), |regs| (regs.cr3, regs.cpl));
        let five_levels = has_five_levels(&self.known.regs);
        self.guest.five_levels.store(five_levels, Ordering::Relaxed);
        let raw = SampleRawData {
            cr3,
            cpl,
            ends,
            task: task.map(|t| (t.pid, t.tid, t.comm_padded())),
            held_ns,
            kernel_thread: task.is_some_and(|t| t.mm == 0),
        };
        self.memory.raw[..RAW_BYTES].copy_from_slice(raw.head().as_bytes());
        RAW_BYTES + told
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestAddress};

    /// A read of guest code can cross pages that are not physically adjacent, and ends at the first
    /// unmapped page.
    #[test]
    fn code_read_ends_at_unmapped_page() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let entries = [
            (0x1_0000, 0x1_1007u64),
            (0x1_1000, 0x1_2007),
            (0x1_2010, 0x1_3007),
            (0x1_3000, 0x5007),
            (0x1_3008, 0x3007),
        ];
        for (at, entry) in entries {
            memory.write_obj(entry, GuestAddress(at)).unwrap();
        }
        memory.write_slice(&[0x90, 0xc3], GuestAddress(0x5ffe)).unwrap();
        memory.write_slice(&[0xcc], GuestAddress(0x3000)).unwrap();
        let probe = GuestSamplingContext::new(memory, None);
        assert_eq!(probe.code(0x1_0000, 0x40_0ffe, 3), [0x90, 0xc3, 0xcc]);
        assert_eq!(probe.code(0x1_0000, 0x40_0ffe, u32::MAX).len(), 2 + 4096);
        for hole in [0, 0x60_0000, u64::MAX, 0x8000_0000_0000_0000] {
            assert!(probe.code(0x1_0000, hole, 64).is_empty(), "{hole:#x}");
        }
        assert!(probe.code(u64::MAX, 0x40_0000, 64).is_empty());
    }

    /// Returns the message with which the search for the guest's kernel has failed.
    #[track_caller]
    fn failure(probe: &GuestSamplingContext) -> String {
        match probe.search_progress() {
            KernelSearchProgress::NotFound(why) => why,
            other => panic!("{other:?}"),
        }
    }

    /// A search that panics counts as failed, and the next search can start.
    #[test]
    fn panicking_search_fails_and_is_retried() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let probe = GuestSamplingContext::new(memory, None);
        assert!(probe.begin_search());
        assert!(!probe.begin_search(), "one at a time");
        assert_eq!(probe.search_progress(), KernelSearchProgress::Running);
        probe.run_search(|_| panic!("a table that nobody thought of"));
        let why = failure(&probe);
        assert!(why.contains("internal error"), "{why}");
        assert!(probe.kernel().is_none());
        std::thread::sleep(MIN_SEARCH_INTERVAL);
        assert!(probe.begin_search(), "it is looked for again");
        probe.run_search(|_| Err(KernelSearchError::NoRegisters));
        failure(&probe);
    }

    /// A permanent failure is reported once. No search follows, not even for the next guest of the
    /// VM.
    #[test]
    fn search_without_keeper_is_not_retried() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let probe = GuestSamplingContext::new(memory, None);
        assert!(probe.begin_search());
        let gone = std::io::ErrorKind::BrokenPipe;
        probe.run_search(|_| Err(GuestKernelReadError::NoKeeper(gone.into()).into()));
        let told = |probe: &GuestSamplingContext| {
            let why = failure(probe);
            assert!(why.contains("until the VM is restarted"), "{why}");
        };
        told(&probe);
        std::thread::sleep(MIN_SEARCH_INTERVAL);
        assert!(!probe.begin_search());
        probe.clear_kernel();
        assert!(!probe.begin_search());
        told(&probe);
    }

    /// The duration of a sample is recorded only if the sample was selected for measurement.
    #[test]
    fn sample_cost_is_measured_periodically() {
        let mut memory = VcpuSampleCache::default();
        let mut measured = Vec::new();
        for n in 0..200 {
            let began = memory.begin();
            memory.taken = true;
            std::thread::sleep(Duration::from_nanos(1));
            memory.end_overflow(began);
            if memory.held_ns > 0 {
                measured.push(n);
            }
        }
        let expected: Vec<u32> = (0..64).chain((64..200).step_by(4)).collect();
        assert_eq!(measured, expected);
        // A timer signal that arrives early takes no sample, so no cost is recorded.
        memory.held_ns = 7;
        let began = memory.begin();
        memory.end_overflow(began);
        assert_eq!((memory.held_ns, memory.samples), (7, 200));
    }
}
