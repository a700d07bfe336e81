//! The driver under the oracle, which counts as instructed and reveals which of its counters are
//! on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use perf_core::pmu::{PmuCapacity, PmuError, PmuTarget};
use perf_core::*;

/// Type of the events that need no slot.
pub const SOFT: EventType = EventType(0x1ff);

/// A deliberate fault of the driver, which the oracle must detect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DriverFault {
    #[default]
    None,
    /// A stop loses one count.
    LosesCount,
    /// Overflows are not reported.
    DropsOverflows,
}

#[derive(Debug)]
pub struct Counter {
    /// vCPU for which the counter was opened.
    pub vcpu: u32,
    tid: i32,
    pub config: u64,
    state: Mutex<Counting>,
}

#[derive(Debug, Default)]
struct Counting {
    count: u64,
    on: bool,
    armed_at: Option<u64>,
    overflowed: bool,
}

impl Counter {
    fn lock(&self) -> MutexGuard<'_, Counting> {
        self.state.lock().unwrap()
    }

    pub fn is_on(&self) -> bool {
        self.lock().on
    }
}

/// Two drivers, one with slots and one without.
#[derive(Debug, Default)]
pub struct DriverPair {
    /// Counters that were opened but not yet claimed.
    fresh: Mutex<Vec<Arc<Counter>>>,
    all: Mutex<Vec<Arc<Counter>>>,
    /// Set to make the driver without slots refuse all starts.
    pub refuse: AtomicBool,
    fault: DriverFault,
}

/// Returns the counts of an event of `config` per unit of work.
pub fn rate(config: u64) -> u64 {
    config % 4 + 1
}

impl DriverPair {
    pub fn new(fault: DriverFault) -> Arc<Self> {
        Arc::new(Self {
            fault,
            ..Self::default()
        })
    }

    /// Runs thread `tid` for `n` units of work.
    pub fn work(&self, tid: i32, n: u64) {
        for counter in self.all.lock().unwrap().iter().filter(|c| c.tid == tid) {
            let mut c = counter.lock();
            if c.on {
                c.count += n * rate(counter.config);
                if c.armed_at.is_some_and(|at| c.count >= at) {
                    c.armed_at = None;
                    c.overflowed = self.fault != DriverFault::DropsOverflows;
                }
            }
        }
    }

    /// Returns the counter that was just opened for `config` on `vcpu`.
    pub fn claim(&self, vcpu: u32, config: u64) -> Option<Arc<Counter>> {
        let mut fresh = self.fresh.lock().unwrap();
        let at = fresh.iter().position(|c| (c.vcpu, c.config) == (vcpu, config))?;
        Some(fresh.remove(at))
    }
}

#[derive(Debug)]
pub struct Driver {
    pub bench: Arc<DriverPair>,
    /// Number of slots; 0 if events need none.
    pub slots: usize,
}

#[derive(Debug)]
struct DriverEvent {
    counter: Arc<Counter>,
    bench: Arc<DriverPair>,
    soft: bool,
}

impl Pmu for Driver {
    fn name(&self) -> &'static str {
        "oracle"
    }
    fn serves(&self, ty: EventType) -> bool {
        ty == if self.slots == 0 { SOFT } else { EventType::SIM }
    }
    fn capacity(&self) -> PmuCapacity {
        match self.slots {
            0 => PmuCapacity::Unlimited,
            slots => PmuCapacity::counters(slots),
        }
    }
    fn open(&self, attr: &Attr, target: PmuTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        let PmuTarget::Vcpu { vcpu, tid } = target else {
            return Err(PmuError::Unsupported("counts vCPUs"));
        };
        let counter = Arc::new(Counter {
            vcpu: vcpu.0,
            tid,
            config: attr.config,
            state: Mutex::default(),
        });
        self.bench.fresh.lock().unwrap().push(Arc::clone(&counter));
        self.bench.all.lock().unwrap().push(Arc::clone(&counter));
        Ok(Box::new(DriverEvent {
            counter,
            bench: Arc::clone(&self.bench),
            soft: self.slots == 0,
        }))
    }
}

impl PmuEvent for DriverEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        if self.soft && self.bench.refuse.load(Ordering::Relaxed) {
            return Err(PmuError::Busy);
        }
        let mut c = self.counter.lock();
        assert!(!c.on, "started twice");
        c.on = true;
        c.armed_at = overflow_in.map(|n| c.count + n);
        Ok(())
    }
    fn stop(&mut self) {
        let mut c = self.counter.lock();
        assert!(c.on, "stopped twice");
        c.on = false;
        if self.bench.fault == DriverFault::LosesCount {
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
        u32::from(std::mem::take(&mut self.counter.lock().overflowed))
    }
}

impl Drop for DriverEvent {
    fn drop(&mut self) {
        for list in [&self.bench.all, &self.bench.fresh] {
            list.lock().unwrap().retain(|c| !Arc::ptr_eq(c, &self.counter));
        }
    }
}
