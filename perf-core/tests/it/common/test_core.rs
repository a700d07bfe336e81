//! A deterministic test driver, and a core with this driver and a manual clock.

use std::sync::{Arc, Mutex, MutexGuard};

use perf_core::pmu::{PmuCounterCapacity, PmuError, PmuEventTarget};
use perf_core::record::{DecodedRecord, RecordFormat, Sample};
use perf_core::ring::{Ring, RingReader};
use perf_core::time::{Clock, ManualClock};
use perf_core::*;

/// One event of the test driver.
#[derive(Debug, Default)]
pub struct Counter {
    /// `vcpu`: vCPU for which the event was opened, or `u32::MAX` for the VM. `tid`: thread of that
    /// vCPU.
    pub vcpu: u32,
    tid: i32,
    pub config: u64,
    /// Number of counts that the event adds per unit of work.
    rate: u64,
    state: Mutex<CounterState>,
}

#[derive(Debug, Default)]
struct CounterState {
    claimed: bool,
    count: u64,
    on: bool,
    armed_at: Option<u64>,
    overflows: u32,
    starts: u64,
}

impl Counter {
    fn lock(&self) -> MutexGuard<'_, CounterState> {
        self.state.lock().unwrap()
    }

    pub fn is_on(&self) -> bool {
        self.lock().on
    }
}

/// A deliberate fault of the test driver, which the oracle must detect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DriverFault {
    #[default]
    None,
    /// Each stop of an event loses one count.
    LosesCount,
    /// The driver does not report overflows.
    DropsOverflows,
}

#[derive(Debug, Default)]
pub struct DriverState {
    counters: Mutex<Vec<Arc<Counter>>>,
    /// Total of the package count that the driver reports.
    pub package: Mutex<u64>,
    /// Age of the package count that the driver reports, in nanoseconds.
    pub package_age_ns: Mutex<u64>,
    /// Makes every start of an event fail.
    pub refuse: Mutex<bool>,
    fault: DriverFault,
}

impl DriverState {
    pub fn with_fault(fault: DriverFault) -> Self {
        Self {
            fault,
            ..Self::default()
        }
    }

    fn counters(&self) -> Vec<Arc<Counter>> {
        self.counters.lock().unwrap().clone()
    }

    /// Performs `n` units of work on the vCPU. Every active event of the vCPU counts `n` times its
    /// rate.
    pub fn work(&self, vcpu: u32, n: u64) {
        self.work_where(n, |c| c.vcpu == vcpu);
    }

    /// Performs `n` units of work on host thread `tid`.
    pub fn work_on_thread(&self, tid: i32, n: u64) {
        self.work_where(n, |c| c.tid == tid);
    }

    fn work_where(&self, n: u64, counts: impl Fn(&Counter) -> bool) {
        for counter in self.counters.lock().unwrap().iter().filter(|c| counts(c)) {
            let mut c = counter.lock();
            if c.on {
                c.count += n * counter.rate;
                if c.armed_at.is_some_and(|at| c.count >= at) {
                    c.armed_at = None;
                    c.overflows += u32::from(self.fault != DriverFault::DropsOverflows);
                }
            }
        }
    }

    /// Returns the driver event that was just opened for `config` on `vcpu`: the one that no
    /// earlier call has returned.
    pub fn claim(&self, vcpu: u32, config: u64) -> Option<Arc<Counter>> {
        let mut counters = self.counters().into_iter();
        counters
            .find(|c| (c.vcpu, c.config) == (vcpu, config) && !std::mem::replace(&mut c.lock().claimed, true))
    }

    /// Returns the total number of starts of all driver events that exist.
    pub fn starts(&self) -> u64 {
        self.counters().iter().map(|c| c.lock().starts).sum()
    }

    pub fn on(&self, vcpu: u32) -> usize {
        let counters = self.counters();
        counters.iter().filter(|c| c.vcpu == vcpu && c.is_on()).count()
    }
}

/// A driver with `slots` counters per vCPU, or without slots if `slots` is 0. The driver rejects
/// `config` 0, and its event [`PACKAGE`] is a package count. All other events count a single vCPU.
#[derive(Debug)]
pub struct TestPmu {
    pub world: Arc<DriverState>,
    pub slots: usize,
    /// Function that returns the number of counts per unit of work for an event's `config`.
    pub rate: fn(u64) -> u64,
}

pub const PACKAGE: u64 = 1000;
/// vCPU 0 as the target of an event.
pub const V0: EventOpenTarget = EventOpenTarget::Vcpu(VcpuId(0));
/// Event type that the software driver of the tests serves.
pub const SOFT: EventType = EventType(0x1ff);

#[derive(Debug)]
struct TestEvent {
    counter: Arc<Counter>,
    world: Arc<DriverState>,
}

impl Pmu for TestPmu {
    fn name(&self) -> &'static str {
        "test"
    }
    fn supports_type(&self, ty: EventType) -> bool {
        ty == if self.slots == 0 { SOFT } else { EventType::SIM }
    }
    fn capacity(&self) -> PmuCounterCapacity {
        match self.slots {
            0 => PmuCounterCapacity::Unlimited,
            slots => PmuCounterCapacity::counters(slots),
        }
    }
    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        let (vcpu, tid) = match target {
            PmuEventTarget::Vcpu { vcpu, tid } => (vcpu.0, tid),
            PmuEventTarget::Vm if attr.config == PACKAGE => (u32::MAX, 0),
            PmuEventTarget::Vm | PmuEventTarget::Cpu { .. } => {
                return Err(PmuError::Unsupported("counts vCPUs"));
            }
        };
        if attr.config == 0 {
            return Err(PmuError::NoSuchEvent);
        }
        let counter = Arc::new(Counter {
            vcpu,
            tid,
            config: attr.config,
            rate: (self.rate)(attr.config),
            ..Counter::default()
        });
        self.world.counters.lock().unwrap().push(Arc::clone(&counter));
        let world = Arc::clone(&self.world);
        Ok(Box::new(TestEvent { counter, world }))
    }
}

impl PmuEvent for TestEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        if *self.world.refuse.lock().unwrap() {
            return Err(PmuError::Busy);
        }
        let mut c = self.counter.lock();
        assert!(!c.on, "started twice");
        c.on = true;
        c.starts += 1;
        c.armed_at = overflow_in.map(|n| c.count + n);
        Ok(())
    }
    fn stop(&mut self) {
        let mut c = self.counter.lock();
        assert!(c.on, "stopped twice");
        c.on = false;
        if self.world.fault == DriverFault::LosesCount {
            c.count = c.count.saturating_sub(1);
        }
    }
    fn read(&mut self) -> u64 {
        self.counter.lock().count
    }
    fn arm(&mut self, overflow_in: u64) -> Result<(), PmuError> {
        let mut c = self.counter.lock();
        assert!(c.on, "armed while off");
        c.armed_at = Some(c.count + overflow_in);
        Ok(())
    }
    fn take_overflows(&mut self) -> u32 {
        std::mem::take(&mut self.counter.lock().overflows)
    }
    fn count(&mut self) -> Option<u64> {
        (self.counter.config == PACKAGE).then(|| *self.world.package.lock().unwrap())
    }
    fn count_age_ns(&mut self) -> u64 {
        *self.world.package_age_ns.lock().unwrap()
    }
}

impl Drop for TestEvent {
    fn drop(&mut self) {
        if let Ok(mut counters) = self.world.counters.lock() {
            counters.retain(|c| !Arc::ptr_eq(c, &self.counter));
        }
    }
}

/// A core with a manual clock, a hardware driver and a software driver, for tests.
pub struct TestCore {
    pub core: PerfCore,
    pub clock: Arc<ManualClock>,
    pub hw: Arc<DriverState>,
    pub sw: Arc<DriverState>,
    pub admin: Session,
    pub guest: Session,
}

impl TestCore {
    pub fn new(slots: usize) -> Self {
        Self::with(slots, |_| {})
    }

    pub fn with(slots: usize, tweak: impl FnOnce(&mut PerfCoreConfig)) -> Self {
        let clock = Arc::new(ManualClock::new());
        let mut config = PerfCoreConfig {
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
            ..PerfCoreConfig::default()
        };
        tweak(&mut config);
        let core = PerfCore::new(config);
        let (hw, sw) = (Arc::new(DriverState::default()), Arc::new(DriverState::default()));
        for (world, slots) in [(&hw, slots), (&sw, 0)] {
            core.register(Arc::new(TestPmu {
                world: Arc::clone(world),
                slots,
                rate: |config| config,
            }));
        }
        let admin = core.session(0, SessionRole::Admin);
        let guest = core.session(0, SessionRole::Guest);
        Self {
            core,
            clock,
            hw,
            sw,
            admin,
            guest,
        }
    }

    /// Adds vCPU `n` to the core and schedules its context in.
    pub fn vcpu(&self, n: u32) -> Arc<VcpuEventContext> {
        let vcpu = self.core.add_vcpu(VcpuId(n), 1000 + n as i32).unwrap();
        vcpu.sched_in();
        vcpu
    }

    /// Opens an event for `session` without flags.
    pub fn try_open(
        &self,
        session: &Session,
        attr: Attr,
        target: EventOpenTarget,
        leader: Option<&EventHandle>,
    ) -> Result<EventHandle, PerfEventOpenError> {
        self.core
            .open(session, attr, target, leader, OpenFlags::default())
    }

    pub fn open(&self, attr: Attr, target: EventOpenTarget, leader: Option<&EventHandle>) -> EventHandle {
        self.try_open(&self.admin, attr, target, leader).unwrap()
    }

    pub fn open_vcpu(&self, attr: Attr, leader: Option<&EventHandle>) -> EventHandle {
        self.open(attr, V0, leader)
    }

    pub fn open_vm(&self, attr: Attr) -> EventHandle {
        self.open(attr, EventOpenTarget::Vm, None)
    }

    /// Opens an event on vCPU 0 whose overflows are reported with `cookie`.
    pub fn open_reporting(&self, session: &Session, attr: Attr, cookie: u64) -> EventHandle {
        let flags = OpenFlags::with_cookie(cookie);
        self.core.open(session, attr, V0, None, flags).unwrap()
    }

    /// Opens an event on vCPU 0 that writes to the ring of `to` without joining its group.
    pub fn open_redirected(&self, attr: Attr, to: &EventHandle) -> Result<EventHandle, PerfEventOpenError> {
        let flags = OpenFlags {
            output: true,
            no_group: true,
            ..OpenFlags::default()
        };
        self.core.open(&self.admin, attr, V0, Some(to), flags)
    }

    /// Runs vCPU `vcpu` for `n` steps. In each step, the clock advances by 1 ns and the vCPU
    /// performs one unit of work.
    pub fn run(&self, vcpu: u32, n: u64) {
        self.clock.advance(n);
        self.hw.work(vcpu, n);
        self.sw.work(vcpu, n);
    }
}

pub fn hw() -> Attr {
    Attr::counting(EventType::SIM, 1)
}

pub fn soft() -> Attr {
    Attr::counting(SOFT, 1)
}

/// Returns the attributes of an event that samples every `period` counts of the test driver.
pub fn sim(period: u64) -> Attr {
    Attr::sampling(EventType::SIM, 1, period)
}

/// Returns the attributes of an event that counts the raised software event `id`.
pub fn vmm(id: SoftwareEventId) -> Attr {
    Attr::counting(EventType::VMM, id as u64)
}

/// Raises `n` VM exits on vCPU `v`.
pub fn raise(v: &VcpuEventContext, n: u64) {
    v.software_event(SoftwareEventId::Exits, n, Some(&mut UnavailableRegs), &mut |_| {});
}

/// Services the overflows of vCPU `v` and returns the overflow reports.
pub fn serve(v: &VcpuEventContext) -> Vec<OverflowReport> {
    let mut seen = Vec::new();
    v.service_overflows(&mut UnavailableRegs, &mut |o| seen.push(o));
    seen
}

/// Returns the number of `events` that are active.
pub fn active<'a>(events: impl IntoIterator<Item = &'a EventHandle>) -> usize {
    let events = events.into_iter();
    events.filter(|e| e.state() == EventState::Active).count()
}

/// Passes each unread record of `reader` to `each`, decoded.
pub fn for_each_record(reader: &mut RingReader, attr: &Attr, mut each: impl FnMut(DecodedRecord<'_>)) {
    let format = RecordFormat::from(attr);
    while let Some(raw) = reader.next_record().unwrap() {
        each(DecodedRecord::decode(raw, format).unwrap());
    }
}

/// Calls `each` for each unread sample in `ring` and returns the results.
pub fn map_samples<T>(ring: &Ring, attr: &Attr, mut each: impl FnMut(Sample<'_>) -> T) -> Vec<T> {
    let mut out = Vec::new();
    for_each_record(&mut RingReader::map(ring.memfd()).unwrap(), attr, |record| {
        if let DecodedRecord::Sample(sample) = record {
            out.push(each(sample));
        }
    });
    out
}
