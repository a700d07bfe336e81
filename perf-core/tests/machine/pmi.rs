//! A vCPU's thread with counters on the clock, and what its guest's PMI handler does: the calls that `vpmu` makes of the writes of
//! Linux's drivers.
#![allow(dead_code)]

use std::sync::Arc;

use perf_core::pmu::clock::{ClockPmu, GUEST_NS, VcpuClock};
use perf_core::*;

use crate::common::{catch_signals, clock_attr, signals_of_this_thread};

/// Of the counter, ns. Long against what ptrace adds to a system call.
pub const PERIOD: u64 = 3_000_000;
/// What is left of a 48-bit counter that has just overflowed.
pub const AGES: u64 = (1 << 48) - 1_000;
/// Rings that are served, early ones included.
pub const RINGS: usize = 30;

struct Regs;

impl SampleRegs for Regs {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestUser
    }
    fn ip(&mut self) -> u64 {
        0
    }
}

/// This thread as a vCPU with clock events of its guest's.
pub struct Scene {
    _core: Core,
    _session: Session,
    pub clock: Arc<VcpuClock>,
    vcpu: Arc<VcpuContext>,
    pub counters: Vec<Handle>,
}

impl Scene {
    pub fn new(counters: u64) -> Self {
        let clock = Arc::new(VcpuClock::for_current_thread(2_000_000));
        let pmu = ClockPmu::new(Some(catch_signals()));
        pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
        let core = Core::new(CoreConfig::default());
        core.register(Arc::new(pmu));
        let vcpu = core.add_vcpu(VcpuId(0), clock.tid()).unwrap();
        let session = core.session(0, Role::Guest);
        let attr = Attr {
            pinned: true,
            disabled: true,
            exclude_host: true,
            ..clock_attr(GUEST_NS)
        };
        let counters = (0..counters)
            .map(|counter| {
                let flags = OpenFlags {
                    cookie: Some(counter),
                    ..OpenFlags::default()
                };
                core.open(&session, attr.clone(), OpenTarget::Vcpu(VcpuId(0)), None, flags)
                    .unwrap()
            })
            .collect();
        vcpu.sched_in();
        let mut scene = Self {
            _core: core,
            _session: session,
            clock,
            vcpu,
            counters,
        };
        scene.start();
        // The first ring, so that everything that happens once has happened.
        scene.run_until_rung();
        scene
    }

    /// The guest enables its counters, the first with [`PERIOD`] to go, the others with more than it takes to handle that.
    pub fn start(&mut self) {
        for (n, counter) in self.counters.iter().enumerate() {
            must(counter.arm(PERIOD * (1 + 10 * n as u64)).is_ok());
            must(counter.enable(Scope::Event).is_ok());
        }
    }

    pub fn stop(&mut self) {
        for counter in &self.counters {
            must(counter.disable(Scope::Event).is_ok());
        }
    }

    /// An access to a register.
    pub fn exit(&mut self) {
        self.clock.guest_enter();
        self.clock.guest_exit();
    }

    pub fn run_until_rung(&mut self) {
        let before = signals_of_this_thread();
        self.clock.guest_enter();
        while signals_of_this_thread() == before {
            std::hint::spin_loop();
        }
        self.clock.guest_exit();
    }

    /// What follows a signal, up to the entry into the handler. Whether there was an overflow.
    pub fn serve(&mut self) -> bool {
        let mut overflowed = None;
        self.vcpu
            .service_overflows(&mut Regs, &mut |o| overflowed = Some(o.cookie));
        if let Some(counter) = overflowed {
            // It goes on from 0.
            must(self.counters[counter as usize].arm(AGES).is_ok());
        }
        overflowed.is_some()
    }

    /// The handler of a guest that stops its counters meanwhile, as with intel-v2 and amd-v2: the entry into it, and its
    /// writes.
    pub fn handle(&mut self) {
        self.exit();
        self.stop();
        (0..6).for_each(|_| self.exit());
        self.start();
    }

    /// A guest with such a handler.
    pub fn with_counters_stopped(&mut self) {
        for _ in 0..RINGS {
            self.run_until_rung();
            if self.serve() {
                self.handle();
            }
        }
    }

    /// A guest that writes its counter while it counts, as with amd.
    pub fn with_counters_on(&mut self) {
        for _ in 0..RINGS {
            self.run_until_rung();
            if self.serve() {
                self.exit();
                must(self.counters[0].arm(PERIOD).is_ok());
            }
        }
    }
}

/// Ends the process, a traced child, so that its parent notices, unless `holds`.
pub fn must(holds: bool) {
    if !holds {
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(1) };
    }
}
