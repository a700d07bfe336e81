//! Runs the operation streams of `reference_model.rs` on perf-core events, whose overflows
//! perf-core reports. Only the PMU driver below perf-core is simulated; it counts when the test
//! advances it.

use std::sync::{Arc, Mutex, Weak};

use perf_core::pmu::{PmuCounterCapacity, PmuError, PmuEvent, PmuEventTarget, VcpuId};
use perf_core::{Attr, EventType, PerfCore, PerfCoreConfig, Pmu, VcpuEventContext};
use proptest::prelude::*;
use vpmu::*;

use crate::common::overflowed_counters;
use crate::testing::reference::{UNCOUNTABLE_SELECT, select_of};
use crate::testing::stream::{TestEvents, run};

const VCPU: VcpuId = VcpuId(0);

#[derive(Debug, Default)]
struct Tick {
    on: bool,
    count: u64,
    armed: Option<u64>,
    overflows: u32,
}

#[derive(Debug)]
struct TickEvent(Arc<Mutex<Tick>>);

impl PmuEvent for TickEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        let mut tick = self.0.lock().unwrap();
        tick.on = true;
        tick.armed = overflow_in;
        Ok(())
    }

    fn stop(&mut self) {
        let mut tick = self.0.lock().unwrap();
        tick.on = false;
        tick.armed = None;
    }

    fn read(&mut self) -> u64 {
        self.0.lock().unwrap().count
    }

    fn arm(&mut self, overflow_in: u64) -> Result<(), PmuError> {
        self.0.lock().unwrap().armed = Some(overflow_in);
        Ok(())
    }

    fn take_overflows(&mut self) -> u32 {
        std::mem::take(&mut self.0.lock().unwrap().overflows)
    }
}

/// Simulated driver of hardware, raw and KVM events. The events count when the test advances them.
#[derive(Debug, Default)]
struct TickPmu(Mutex<Vec<Weak<Mutex<Tick>>>>);

impl Pmu for TickPmu {
    fn name(&self) -> &'static str {
        "tick"
    }

    fn supports_type(&self, ty: EventType) -> bool {
        use EventType as T;
        [T::HARDWARE, T::RAW, T::KVM, T::SOFTWARE, T::VMM_PMU].contains(&ty)
    }

    fn capacity(&self) -> PmuCounterCapacity {
        PmuCounterCapacity::Unlimited
    }

    fn open(&self, attr: &Attr, _: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        if attr.ty == EventType::RAW && attr.config & 0xF_0000_00FF == UNCOUNTABLE_SELECT {
            return Err(PmuError::NoSuchEvent);
        }
        let tick = Arc::new(Mutex::new(Tick::default()));
        self.0.lock().unwrap().push(Arc::downgrade(&tick));
        Ok(Box::new(TickEvent(tick)))
    }
}

/// A vCPU whose counter events are perf-core events of the simulated driver.
struct Machine {
    driver: Arc<TickPmu>,
    context: Arc<VcpuEventContext>,
    events: PerfCoreEvents,
}

impl TestEvents for Machine {
    type Events = PerfCoreEvents;

    fn events(&mut self) -> &mut PerfCoreEvents {
        &mut self.events
    }

    fn new(vendor: Vendor) -> Self {
        let core = PerfCore::new(PerfCoreConfig::default());
        let driver = Arc::new(TickPmu::default());
        core.register(driver.clone());
        let context = core.add_vcpu(VCPU, 0).unwrap();
        context.sched_in();
        let sources = CounterBackingSelector::new(CounterBackingPolicy::Hardware, Some(vendor), |_| Some(0));
        Self {
            driver,
            context,
            events: PerfCoreEvents::new(core, VCPU, sources),
        }
    }

    fn uncountable(amd: bool, selector: Option<u64>, fixed: u32) -> bool {
        let Some(selector) = selector else {
            return fixed == 3;
        };
        let select = select_of(amd, selector);
        let umask = selector >> 8 & 0xFF;
        let paravirtual = select == if amd { 0xFFF } else { 0xFF } && (1..=12).contains(&umask);
        let modified = selector & 0xFF84_0000 != 0;
        select == UNCOUNTABLE_SELECT || paravirtual && modified
    }

    fn run(&mut self, ticks: u64) -> u64 {
        let mut list = self.driver.0.lock().unwrap();
        list.retain(|event| event.strong_count() > 0);
        let live: Vec<_> = list.iter().filter_map(Weak::upgrade).collect();
        let on = || {
            live.iter()
                .map(|event| event.lock().unwrap())
                .filter(|tick| tick.on)
        };
        let passed = on().filter_map(|tick| tick.armed).fold(ticks, u64::min);
        on().for_each(|mut tick| {
            tick.count += passed;
            tick.armed = tick.armed.map(|left| left - passed);
            if tick.armed == Some(0) {
                tick.armed = None;
                tick.overflows += 1;
            }
        });
        passed
    }

    fn take_notified(&mut self) -> Vec<CounterIndex> {
        overflowed_counters(&self.context)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn pmu_on_perf_core_matches_reference_model(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
        run::<Machine>(&bytes);
    }
}

/// All parts of a vCPU's PMU implement `Send`, so a VMM may move them to the vCPU's thread.
#[test]
fn vcpu_parts_are_send() {
    fn sendable<T: Send>() {}
    sendable::<Vpmu>();
    sendable::<PerfCoreEvents>();
    sendable::<vpmu::exact::SingleStepMeter>();
}
