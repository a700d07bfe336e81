//! Minimal VMM with a working PMU: one vCPU in real mode, 64 KiB of memory, and a guest that
//! receives an interrupt every million cycles.
//!
//! `cargo run -p vpmu --example tiny_vmm`
//!
//! The PMU integration points are numbered 1 to 8; docs/guide/embedding.md describes them for other
//! VMMs. This example omits a local APIC (PMIs are delivered as NMIs), CPUID, RDPMC (which KVM does
//! not forward) and event filters.
#![expect(unsafe_code, reason = "guest memory, and a signal handler")]

use std::arch::x86_64::{__cpuid_count, CpuidResult};
use std::collections::BTreeMap;
use std::error::Error;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::Instant;

use kvm_bindings::{KVM_CAP_X86_USER_SPACE_MSR, kvm_enable_cap, kvm_userspace_memory_region};
use kvm_ioctls::{
    Kvm, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit, VcpuFd, VmFd,
};
use perf_core::pmu::VcpuId;
use perf_core::pmu::clock::{ClockPmu, VcpuRunTimeClock};
use perf_core::pmu::host::{HostPerfCapabilities, HostPmu};
use perf_core::pmu::vmm_pmu::{VmmPmu, VmmPmuCounts};
use perf_core::{PerfCore, PerfCoreConfig, UnavailableRegs, VcpuEventContext};
use vpmu::registers::{IA32_PERF_GLOBAL_CTRL, IA32_PERF_GLOBAL_STATUS_RESET, IA32_PERFEVTSEL0, IA32_PMC0};
use vpmu::{
    CounterBackingPolicy, CounterBackingSelector, CpuidRegs, MsrAddress, MsrReadOutcome, MsrWriteOutcome,
    PerfCoreEvents, PmiReadiness, PmuModel, Vpmu,
};

const MEMORY_BYTES: usize = 0x1_0000;
pub(crate) const CODE: usize = 0x1000;
const NMI_HANDLER: usize = 0x2000;
/// Guest address of the number of PMIs that the guest has received.
const COUNT: u16 = 0x3000;
const STACK: u64 = 0x8000;
const PORT: u16 = 0xe9; // I/O port to which the guest writes its PMI count
const PMIS: u8 = 10;
const PERIOD: u32 = 1_000_000; // number of cycles between two PMIs
/// Selector for cycles (select 0x3C) at all privilege levels, enabled, with an overflow interrupt.
const SELECTOR: u32 = 0x53_003C;
const VCPU: VcpuId = VcpuId(0);
const SIGNAL: libc::c_int = libc::SIGUSR2;

/// Set by the signal handler when an event has overflowed, and cleared by the vCPU loop.
static OVERFLOW: AtomicBool = AtomicBool::new(false);
/// Pointer to the vCPU's `immediate_exit` field.
static EXIT: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());

/// Signal handler for overflows. Makes KVM_RUN exit, or return immediately if it has not started
/// yet.
extern "C" fn on_overflow(_: libc::c_int) {
    OVERFLOW.store(true, Ordering::SeqCst);
    let exit = EXIT.load(Ordering::SeqCst);
    if !exit.is_null() {
        // SAFETY: the pointer refers to the vCPU's shared page, which stays mapped until the
        // process exits.
        unsafe { exit.write_volatile(1) };
    }
}

/// Memory of the guest.
#[repr(align(4096))]
struct Memory([u8; MEMORY_BYTES]);

/// PMU of the vCPU: its registers, its counting events, and its perf-core context.
pub(crate) struct Pmu {
    pub(crate) registers: Vpmu,
    pub(crate) events: PerfCoreEvents,
    context: Arc<VcpuEventContext>,
    pub(crate) clock: Arc<VcpuRunTimeClock>,
    began: Instant,
}

impl Pmu {
    /// 1. Create one perf core per VM with the sources of this host, and a register file and a
    ///    context per vCPU. Must run on the vCPU thread, whose time and events are counted.
    pub(crate) fn new(model: PmuModel, tsc_khz: u32) -> Result<Self, Box<dyn Error>> {
        let core = PerfCore::new(PerfCoreConfig::default());
        let host = HostPerfCapabilities::run();
        if host.hardware_pmu {
            core.register(Arc::new(HostPmu::hardware(Some(SIGNAL), &host)));
        }
        core.register(Arc::new(HostPmu::software(Some(SIGNAL))));
        // Without a host PMU, cycles are derived from the thread's guest time.
        let clock = Arc::new(VcpuRunTimeClock::for_current_thread(tsc_khz));
        let clocks = ClockPmu::new(Some(SIGNAL));
        clocks.add_vcpu(VCPU, clock.clone());
        core.register(Arc::new(clocks));
        let vmm_pmu = VmmPmu::new();
        vmm_pmu.add_vcpu(VCPU, Arc::new(VmmPmuCounts::new(vpmu::vmm_counts::SELECTORS)));
        core.register(Arc::new(vmm_pmu));
        let context = core.add_vcpu(VCPU, clock.tid())?;
        context.sched_in();
        let hardware = host
            .hardware_pmu
            .then(|| vpmu::HostPmuProperties::vendor(&mut cpuid));
        let sources = CounterBackingSelector::new(CounterBackingPolicy::Auto, hardware, |_| None);
        Ok(Self {
            registers: Vpmu::new(model),
            events: PerfCoreEvents::new(core, VCPU, sources),
            context,
            clock,
            began: Instant::now(),
        })
    }

    /// 4. After a signal, check which counters have overflowed and whether a PMI is due.
    fn service_overflows(&mut self) {
        if self.clock.wants_ticks() {
            self.clock.tick(Some(0));
        }
        let mut counters = Vec::new();
        self.context
            .service_overflows(&mut UnavailableRegs, &mut |overflowed| {
                counters.extend(PerfCoreEvents::counter_of(overflowed.cookie));
            });
        for counter in counters {
            self.registers.overflowed(counter, &mut self.events);
        }
    }

    /// 6. Returns whether a PMI must be delivered now.
    fn takes_pmi(&mut self) -> bool {
        let now_ns = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let now = self.registers.pmi_pending() && self.registers.pmi_ready(now_ns) == PmiReadiness::Now;
        if now {
            self.registers.pmi_delivered(now_ns);
        }
        now
    }
}

fn cpuid(leaf: u32, subleaf: u32) -> CpuidRegs {
    let CpuidResult { eax, ebx, ecx, edx } = __cpuid_count(leaf, subleaf);
    CpuidRegs { eax, ebx, ecx, edx }
}

/// 2. Make every access to a PMU register exit. Without the filter, KVM handles some accesses
///    itself and returns 0.
pub(crate) fn trap_msrs(vm: &VmFd, ranges: &[RangeInclusive<u32>]) -> Result<(), Box<dyn Error>> {
    let args = [MsrExitReason::Filter.bits().into(), 0, 0, 0];
    let cap = KVM_CAP_X86_USER_SPACE_MSR;
    vm.enable_cap(&kvm_enable_cap {
        cap,
        args,
        ..Default::default()
    })?;
    // KVM accepts 16 ranges. A zero bit denies KVM the access.
    let mut spans: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
    for msr in ranges.iter().cloned().flatten() {
        let (span, at) = (msr & !0xfff, (msr & 0xfff) as usize);
        let bits = spans.entry(span).or_insert_with(|| vec![0xff; 0x1000 / 8]);
        bits[at / 8] &= !(1 << (at % 8));
    }
    let flags = MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE;
    let mut filters = Vec::new();
    for (base, bitmap) in &spans {
        let (base, msr_count) = (*base, bitmap.len() as u32 * 8);
        filters.push(MsrFilterRange {
            flags,
            base,
            msr_count,
            bitmap,
        });
    }
    Ok(vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &filters)?)
}

/// Returns the guest's three blocks of code, each with its address.
fn guest() -> [(usize, Vec<u8>); 3] {
    let mov = |register: u8, value: u32| [&[0x66, register][..], &value.to_le_bytes()].concat();
    // mov ecx, msr; mov eax, low half; mov edx, high half; wrmsr
    let wrmsr = |msr: u32, value: u64| {
        let (low, high) = (mov(0xb8, value as u32), mov(0xba, (value >> 32) as u32));
        [mov(0xb9, msr), low, high, vec![0x0f, 0x30]].concat()
    };
    let [low, high] = COUNT.to_le_bytes();
    let begin = wrmsr(IA32_PMC0, u64::from(PERIOD).wrapping_neg());
    let program = [
        begin.clone(),
        wrmsr(IA32_PERFEVTSEL0, SELECTOR.into()),
        wrmsr(IA32_PERF_GLOBAL_CTRL, 1),
        // again: cmp byte [COUNT], PMIS; jb again
        vec![0x80, 0x3e, low, high, PMIS, 0x72, 0xf9],
        wrmsr(IA32_PERF_GLOBAL_CTRL, 0),
        // mov al, [COUNT]; out PORT, al; hlt
        vec![0xa0, low, high, 0xe6, PORT as u8, 0xf4],
    ];
    let handler = [
        // push eax; push ecx; push edx
        vec![0x66, 0x50, 0x66, 0x51, 0x66, 0x52],
        begin,
        wrmsr(IA32_PERF_GLOBAL_STATUS_RESET, 1),
        // inc byte [COUNT]; pop edx; pop ecx; pop eax; iret
        vec![0xfe, 0x06, low, high, 0x66, 0x5a, 0x66, 0x59, 0x66, 0x58, 0xcf],
    ];
    // Entry 2 of the real-mode interrupt vector table is the NMI.
    let vector = (2 * 4, (NMI_HANDLER as u32).to_le_bytes().to_vec());
    [(CODE, program.concat()), (NMI_HANDLER, handler.concat()), vector]
}

pub(crate) fn machine(guest: &[(usize, Vec<u8>)]) -> Result<(VmFd, VcpuFd), Box<dyn Error>> {
    let vm = Kvm::new()?.create_vm()?;
    // The memory is never freed. From here on, only the guest accesses it.
    let memory = Box::leak(Box::new(Memory([0; MEMORY_BYTES])));
    for (at, code) in guest {
        memory.0[*at..][..code.len()].copy_from_slice(code);
    }
    let region = kvm_userspace_memory_region {
        memory_size: MEMORY_BYTES as u64,
        userspace_addr: &raw mut *memory as u64,
        ..Default::default()
    };
    // SAFETY: the region is the leaked memory above, which is never freed or used otherwise.
    unsafe { vm.set_user_memory_region(region)? };
    let vcpu = vm.create_vcpu(0)?;
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs.base, sregs.cs.selector) = (0, 0);
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rsp, regs.rflags) = (CODE as u64, STACK, 2);
    vcpu.set_regs(&regs)?;
    Ok((vm, vcpu))
}

/// Runs the guest until it halts.
pub fn main() -> Result<(), Box<dyn Error>> {
    // SAFETY: the handler only writes atomics and one byte. A zeroed sigaction is valid and does
    // not set SA_RESTART.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_overflow as extern "C" fn(libc::c_int) as usize;
        libc::sigaction(SIGNAL, &action, std::ptr::null_mut());
    }
    let (vm, mut vcpu) = machine(&guest())?;
    let model = PmuModel::INTEL;
    trap_msrs(&vm, &model.trapped_msrs())?;
    let mut pmu = Pmu::new(model, vcpu.get_tsc_khz().unwrap_or(1_000_000))?;
    EXIT.store(&raw mut vcpu.get_kvm_run().immediate_exit, Ordering::SeqCst);
    loop {
        // 3. Clear the flag before checking for overflows. A signal that arrives after the check
        //    sets the flag again and makes KVM_RUN return immediately.
        vcpu.set_kvm_immediate_exit(0);
        if OVERFLOW.swap(false, Ordering::SeqCst) {
            pmu.service_overflows();
        }
        // 5. Apply the guest's register writes to the counting events.
        pmu.registers.reconcile(&mut pmu.events);
        if pmu.takes_pmi() {
            vcpu.nmi()?;
        }
        // 7. Only the time in KVM_RUN is guest time.
        pmu.clock.guest_enter();
        let exit = vcpu.run();
        pmu.clock.guest_exit();
        // 8. Pass register accesses to the PMU, which returns a value or a fault.
        match exit {
            Ok(VcpuExit::X86Rdmsr(exit)) => {
                match pmu.registers.read_msr(MsrAddress(exit.index), &mut pmu.events) {
                    MsrReadOutcome::Value(value) => (*exit.error, *exit.data) = (0, value),
                    MsrReadOutcome::InjectGp => *exit.error = 1,
                }
            }
            Ok(VcpuExit::X86Wrmsr(exit)) => {
                let written = pmu
                    .registers
                    .write_msr(MsrAddress(exit.index), exit.data, &mut pmu.events);
                *exit.error = u8::from(written == MsrWriteOutcome::InjectGp);
            }
            Ok(VcpuExit::IoOut(PORT, data)) => {
                println!("the guest: {} PMIs", data[0]);
                assert_eq!(data[0], PMIS);
            }
            Ok(VcpuExit::Hlt) => break,
            Ok(other) => return Err(format!("the guest does what it should not: {other:?}").into()),
            Err(e) if e.errno() == libc::EINTR => {}
            Err(e) => return Err(e.into()),
        }
    }
    let counter = pmu.registers.counters_view(&mut pmu.events).swap_remove(0);
    let backing = counter
        .backing
        .map_or("nobody".to_owned(), |backing| backing.to_string());
    println!(
        "the host: {} cycles, counted by {backing}; {} overflows",
        counter.counted, counter.overflows
    );
    assert!(counter.overflows >= PMIS.into() && counter.counted >= u64::from(PMIS) * u64::from(PERIOD));
    pmu.registers.detach(&mut pmu.events);
    Ok(())
}
