//! A deterministic driver and a small machine that drives it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use perf_core::pmu::{PmuCapacity, PmuError, PmuTarget};
use perf_core::record::{Record, RecordFormat, Sample};
use perf_core::ring::{Ring, RingReader};
use perf_core::time::{Clock, ManualClock};
use perf_core::*;

/// The state of one event of the driver.
#[derive(Debug, Default)]
pub struct Counter {
    pub count: u64,
    pub on: bool,
    pub armed_at: Option<u64>,
    pub overflows: u32,
    pub starts: u64,
    pub rate: u64,
}

#[derive(Debug, Default)]
pub struct DriverState {
    /// Counters by vCPU (`u32::MAX` for the VM).
    counters: Mutex<HashMap<u32, Vec<Arc<Mutex<Counter>>>>>,
    /// Total of the package count.
    pub package: Mutex<u64>,
    /// Age of the package count, in nanoseconds.
    pub package_age_ns: Mutex<u64>,
    /// Set to refuse every start.
    pub refuse: Mutex<bool>,
}

impl DriverState {
    /// Runs the vCPU for `n` units of work: every event that is on counts `n` times its rate.
    pub fn work(&self, vcpu: u32, n: u64) {
        for counter in self.counters.lock().unwrap().get(&vcpu).into_iter().flatten() {
            let mut c = counter.lock().unwrap();
            if c.on {
                c.count += n * c.rate;
                if c.armed_at.is_some_and(|at| c.count >= at) {
                    c.armed_at = None;
                    c.overflows += 1;
                }
            }
        }
    }

    /// Returns the number of starts of all existing events.
    pub fn starts(&self) -> u64 {
        self.counters
            .lock()
            .unwrap()
            .values()
            .flatten()
            .map(|c| c.lock().unwrap().starts)
            .sum()
    }

    pub fn on(&self, vcpu: u32) -> usize {
        let counters = self.counters.lock().unwrap();
        counters
            .get(&vcpu)
            .map_or(0, |c| c.iter().filter(|c| c.lock().unwrap().on).count())
    }
}

/// A hardware driver with `slots` counters per vCPU. `config` 0 does not exist, 1 counts work, and
/// n counts n times the work; [`PACKAGE`] is a package count. It counts vCPUs, not VMs.
#[derive(Debug)]
pub struct TestPmu {
    pub world: Arc<DriverState>,
    pub slots: usize,
}

pub const PACKAGE: u64 = 1000;
/// vCPU 0 as a target.
pub const V0: OpenTarget = OpenTarget::Vcpu(VcpuId(0));
/// Type of the events of the software driver.
pub const SOFT: EventType = EventType(0x1ff);

#[derive(Debug)]
struct TestEvent {
    counter: Arc<Mutex<Counter>>,
    world: Arc<DriverState>,
    package: bool,
}

impl Pmu for TestPmu {
    fn name(&self) -> &'static str {
        "test"
    }
    fn serves(&self, ty: EventType) -> bool {
        if self.slots == 0 {
            ty == SOFT
        } else {
            ty == EventType::SIM
        }
    }
    fn capacity(&self) -> PmuCapacity {
        if self.slots == 0 {
            PmuCapacity::Unlimited
        } else {
            PmuCapacity::counters(self.slots)
        }
    }
    fn open(&self, attr: &Attr, target: PmuTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        let package = attr.config == PACKAGE;
        let vcpu = match target {
            PmuTarget::Vcpu { vcpu, .. } => vcpu.0,
            PmuTarget::Vm if package => u32::MAX,
            PmuTarget::Vm | PmuTarget::Cpu { .. } => return Err(PmuError::Unsupported("counts vCPUs")),
        };
        if attr.config == 0 {
            return Err(PmuError::NoSuchEvent);
        }
        let counter = Arc::new(Mutex::new(Counter {
            rate: attr.config,
            ..Counter::default()
        }));
        self.world
            .counters
            .lock()
            .unwrap()
            .entry(vcpu)
            .or_default()
            .push(Arc::clone(&counter));
        Ok(Box::new(TestEvent {
            counter,
            world: Arc::clone(&self.world),
            package,
        }))
    }
}

impl PmuEvent for TestEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        if *self.world.refuse.lock().unwrap() {
            return Err(PmuError::Busy);
        }
        let mut c = self.counter.lock().unwrap();
        assert!(!c.on, "started twice");
        c.on = true;
        c.starts += 1;
        c.armed_at = overflow_in.map(|n| c.count + n);
        Ok(())
    }
    fn stop(&mut self) {
        let mut c = self.counter.lock().unwrap();
        assert!(c.on, "stopped twice");
        c.on = false;
    }
    fn read(&mut self) -> u64 {
        self.counter.lock().unwrap().count
    }
    fn arm(&mut self, overflow_in: u64) -> Result<(), PmuError> {
        let mut c = self.counter.lock().unwrap();
        assert!(c.on);
        c.armed_at = Some(c.count + overflow_in);
        Ok(())
    }
    fn take_overflows(&mut self) -> u32 {
        std::mem::take(&mut self.counter.lock().unwrap().overflows)
    }
    fn count(&mut self) -> Option<u64> {
        self.package.then(|| *self.world.package.lock().unwrap())
    }
    fn count_age_ns(&mut self) -> u64 {
        *self.world.package_age_ns.lock().unwrap()
    }
}

impl Drop for TestEvent {
    fn drop(&mut self) {
        let counters = self.world.counters.lock();
        if let Ok(mut counters) = counters {
            for list in counters.values_mut() {
                list.retain(|c| !Arc::ptr_eq(c, &self.counter));
            }
        }
    }
}

/// A core with a manual clock, a hardware driver and a software driver.
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
        core.register(Arc::new(TestPmu {
            world: Arc::clone(&hw),
            slots,
        }));
        core.register(Arc::new(TestPmu {
            world: Arc::clone(&sw),
            slots: 0,
        }));
        let admin = core.session(0, Role::Admin);
        let guest = core.session(0, Role::Guest);
        Self {
            core,
            clock,
            hw,
            sw,
            admin,
            guest,
        }
    }

    /// Adds vCPU `n` and schedules it in.
    pub fn vcpu(&self, n: u32) -> Arc<VcpuContext> {
        let vcpu = self.core.add_vcpu(VcpuId(n), 1000 + n as i32).unwrap();
        vcpu.sched_in();
        vcpu
    }

    /// Opens an event of `session` without flags.
    pub fn try_open(
        &self,
        session: &Session,
        attr: Attr,
        target: OpenTarget,
        leader: Option<&Handle>,
    ) -> Result<Handle, OpenError> {
        self.core
            .open(session, attr, target, leader, OpenFlags::default())
    }

    pub fn open(&self, attr: Attr, target: OpenTarget, leader: Option<&Handle>) -> Handle {
        self.try_open(&self.admin, attr, target, leader).unwrap()
    }

    pub fn open_vcpu(&self, attr: Attr, leader: Option<&Handle>) -> Handle {
        self.open(attr, V0, leader)
    }

    pub fn open_vm(&self, attr: Attr) -> Handle {
        self.open(attr, OpenTarget::Vm, None)
    }

    /// Opens an event on vCPU 0 whose overflows are reported with `cookie`.
    pub fn open_reporting(&self, session: &Session, attr: Attr, cookie: u64) -> Handle {
        let flags = OpenFlags::with_cookie(cookie);
        self.core.open(session, attr, V0, None, flags).unwrap()
    }

    /// Opens an event on vCPU 0 that writes to the ring of `to` without joining its group.
    pub fn open_redirected(&self, attr: Attr, to: &Handle) -> Result<Handle, OpenError> {
        let flags = OpenFlags {
            output: true,
            no_group: true,
            ..OpenFlags::default()
        };
        self.core.open(&self.admin, attr, V0, Some(to), flags)
    }

    /// Runs vCPU `vcpu` for `n` steps of 1 ns and one unit of work each.
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

/// An event that samples work.
pub fn sim(period: u64) -> Attr {
    Attr::sampling(EventType::SIM, 1, period)
}

/// An event that counts `id`, which the VMM raises.
pub fn vmm(id: SoftwareEventId) -> Attr {
    Attr::counting(EventType::VMM, id as u64)
}

/// Raises `n` exits.
pub fn raise(v: &VcpuContext, n: u64) {
    v.software_event(SoftwareEventId::Exits, n, Some(&mut UnavailableRegs), &mut |_| {});
}

/// Services the overflows of `v` and returns the reports.
pub fn serve(v: &VcpuContext) -> Vec<OverflowReport> {
    let mut seen = Vec::new();
    v.service_overflows(&mut UnavailableRegs, &mut |o| seen.push(o));
    seen
}

/// Returns the number of active events.
pub fn active<'a>(events: impl IntoIterator<Item = &'a Handle>) -> usize {
    let events = events.into_iter();
    events.filter(|e| e.state() == EventState::Active).count()
}

/// Passes the unread records of `reader` to `each`.
pub fn for_each_record(reader: &mut RingReader, attr: &Attr, mut each: impl FnMut(Record<'_>)) {
    let format = RecordFormat::from(attr);
    while let Some(raw) = reader.next_record().unwrap() {
        each(Record::decode(raw, format).unwrap());
    }
}

/// Returns what `each` makes of the unread samples of `ring`.
pub fn map_samples<T>(ring: &Ring, attr: &Attr, mut each: impl FnMut(Sample<'_>) -> T) -> Vec<T> {
    let mut out = Vec::new();
    for_each_record(&mut RingReader::map(ring.memfd()).unwrap(), attr, |record| {
        if let Record::Sample(sample) = record {
            out.push(each(sample));
        }
    });
    out
}
