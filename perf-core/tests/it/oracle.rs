//! The oracle: random histories of the whole core, checked against an independent model.
//!
//! The model (`oracle/model.rs`) is a flat list of parts and simple loops over this list. A part is
//! one event in one context. The model covers states, counts, times, overflows and their samples,
//! throttling, limits, families and their sums, and exchanges of contexts. After each step all
//! observable state of the core is compared with the model.
//!
//! `PERF_CORE_ORACLE_CASES` sets the number of histories.

mod model;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::test_core::{Counter, DriverFault, DriverState, SOFT, TestPmu};
use model::{
    CONTEXT_SWITCHES, EventState as Expected, Model, OracleKind, OracleSetup, OracleSpec, OverflowCounts,
    RingRecord, Totals, VM,
};
use perf_core::record::{DecodedRecord, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::time::{Clock, ManualClock};
use perf_core::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// Maximum number of vCPUs in a history.
const VCPUS: u32 = 3;
/// Maximum number of events that are open at the same time.
const EVENTS: usize = 9;
/// IDs of the two raised software events that the histories use.
const IDS: [u64; 2] = [SoftwareEventId::Halts as u64, CONTEXT_SWITCHES];

#[derive(Clone, Debug)]
enum Step {
    Run {
        vcpu: u32,
        ns: u64,
    },
    In(u32),
    Out(u32),
    Switch(u32, u32),
    Tick,
    Rotate,
    Add(u32),
    Remove(u32),
    Exec(u32),
    ContextPin(u32),
    Unpin,
    TrackedEvent {
        spec: OracleSpec,
        leader: Option<usize>,
    },
    Close(usize),
    Enable(usize, EventOrGroup),
    Disable(usize, EventOrGroup),
    Reset(usize),
    Refresh(usize, u32),
    SetPeriod(usize, u64),
    Raise {
        vcpu: u32,
        id: u64,
        n: u64,
        regs: bool,
    },
    Service(u32),
    /// Makes the software driver reject all starts of events (`true`) or accept them again
    /// (`false`).
    Refuse(bool),
}

fn spec() -> impl Strategy<Value = OracleSpec> {
    let kind = prop_oneof![
        5 => Just(OracleKind::Hw),
        2 => Just(OracleKind::Soft),
        2 => prop::sample::select(&IDS[..]).prop_map(OracleKind::Raised),
    ];
    let place = prop_oneof![2 => Just(None), 3 => (0..VCPUS).prop_map(Some)];
    let rarely = || prop::bool::weighted(0.15);
    let period = prop_oneof![3 => Just(0u64), 2 => 1..400u64];
    let flags = (
        rarely(),
        prop::bool::weighted(0.3),
        rarely(),
        prop::bool::weighted(0.7),
        rarely(),
    );
    let more = (
        prop::bool::weighted(0.3),
        rarely(),
        rarely(),
        period,
        any::<bool>(),
    );
    (kind, 1..5u64, place, flags, more).prop_map(|(kind, rate, vcpu, flags, more)| {
        let (guest, pinned, exclusive, inherit, stat) = flags;
        let (disabled, on_exec, not_kernel, period, cookie) = more;
        OracleSpec {
            kind,
            rate: if matches!(kind, OracleKind::Raised(_)) {
                1
            } else {
                rate
            },
            vcpu,
            guest: guest && vcpu.is_some(),
            pinned,
            exclusive,
            inherit,
            stat,
            disabled,
            on_exec,
            not_kernel,
            period,
            cookie,
        }
    })
}

fn step() -> impl Strategy<Value = Step> {
    let vcpu = || 0..VCPUS;
    let n = || 0..EVENTS;
    let scope = || prop_oneof![Just(EventOrGroup::Event), Just(EventOrGroup::Group)];
    prop_oneof![
        8 => (vcpu(), 1..900u64).prop_map(|(vcpu, ns)| Step::Run { vcpu, ns }),
        3 => vcpu().prop_map(Step::In),
        1 => vcpu().prop_map(Step::Out),
        2 => (vcpu(), vcpu()).prop_map(|(a, b)| Step::Switch(a, b)),
        3 => Just(Step::Tick),
        1 => Just(Step::Rotate),
        3 => vcpu().prop_map(Step::Add),
        1 => vcpu().prop_map(Step::Remove),
        1 => vcpu().prop_map(Step::Exec),
        1 => prop_oneof![vcpu().prop_map(Step::ContextPin), Just(Step::Unpin)],
        8 => (spec(), prop::option::of(n())).prop_map(|(spec, leader)| Step::TrackedEvent { spec, leader }),
        2 => n().prop_map(Step::Close),
        3 => (n(), scope()).prop_map(|(n, scope)| Step::Enable(n, scope)),
        2 => (n(), scope()).prop_map(|(n, scope)| Step::Disable(n, scope)),
        1 => n().prop_map(Step::Reset),
        1 => (n(), 0..4u32).prop_map(|(n, times)| Step::Refresh(n, times)),
        1 => (n(), 1..400u64).prop_map(|(n, period)| Step::SetPeriod(n, period)),
        4 => (vcpu(), prop::sample::select(&IDS[..]), 1..900u64, any::<bool>())
            .prop_map(|(vcpu, id, n, regs)| Step::Raise { vcpu, id, n, regs }),
        4 => vcpu().prop_map(Step::Service),
        1 => any::<bool>().prop_map(Step::Refuse),
    ]
}

fn setup() -> impl Strategy<Value = OracleSetup> {
    (1..4usize, 0..2usize, 1..5u64, any::<bool>()).prop_map(|(slots, reserved, per_tick, one_thread)| {
        OracleSetup {
            slots,
            reserved: reserved.min(slots - 1),
            tick_ns: 1000,
            per_tick,
            one_thread,
        }
    })
}

/// An open event of the core, with a reader of its ring.
struct TrackedEvent {
    name: u64,
    config: u64,
    handle: EventHandle,
    ring: Option<RingReader>,
}

/// The core and the model, on which a test performs the same operations.
struct CoreAndModel {
    core: PerfCore,
    clock: Arc<ManualClock>,
    hw: Arc<DriverState>,
    sw: Arc<DriverState>,
    admin: Session,
    guest: Session,
    model: Model,
    open: Vec<TrackedEvent>,
    pin: Option<(usize, ContextPin)>,
    names: u64,
}

fn config_of(name: u64, rate: u64) -> u64 {
    4 * name + rate - 1
}

/// Returns the driver event that one of the drivers has just opened for `config` on `vcpu`.
fn claim(drivers: [&Arc<DriverState>; 2], vcpu: u32, config: u64) -> Option<Arc<Counter>> {
    drivers.into_iter().find_map(|driver| driver.claim(vcpu, config))
}

impl CoreAndModel {
    fn new(setup: OracleSetup, fault: DriverFault) -> Self {
        let clock = Arc::new(ManualClock::new());
        let tick_hz = 1_000_000_000 / setup.tick_ns;
        let core = PerfCore::new(PerfCoreConfig {
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
            tick_hz,
            sample_rate_hz: tick_hz * setup.per_tick,
            reserved_slots: setup.reserved,
            ..PerfCoreConfig::default()
        });
        let [hw, sw] = [setup.slots, 0].map(|slots| {
            let world = Arc::new(DriverState::with_fault(fault));
            core.register(Arc::new(TestPmu {
                world: Arc::clone(&world),
                slots,
                rate: |config| config % 4 + 1,
            }));
            world
        });
        Self {
            admin: core.session(0, SessionRole::Admin),
            guest: core.session(0, SessionRole::Guest),
            core,
            clock,
            hw,
            sw,
            model: Model::new(setup),
            open: Vec::new(),
            pin: None,
            names: 0,
        }
    }

    fn vcpu(&self, n: u32) -> Option<Arc<VcpuEventContext>> {
        self.core.vcpu(VcpuId(n))
    }

    fn step(&mut self, step: Step) -> Result<(), String> {
        match step {
            Step::Run { vcpu, ns } => {
                let tid = self.model.tid(vcpu);
                self.clock.advance(ns);
                self.hw.work_on_thread(tid, ns);
                self.sw.work_on_thread(tid, ns);
                self.model.run(tid, ns);
            }
            Step::Tick => {
                self.core.tick();
                self.model.tick();
            }
            Step::Rotate => {
                self.core.rotate();
                self.model.rotate();
            }
            Step::Add(n) if !self.model.at.contains_key(&n) => {
                let tid = self.model.tid(n);
                self.core.add_vcpu(VcpuId(n), tid).map_err(|e| e.to_string())?;
                let (pair, open) = ([&self.hw, &self.sw], &self.open);
                self.model.add_vcpu(n, &|name| {
                    let event = open.iter().find(|e| e.name == name)?;
                    claim(pair, n, event.config)
                });
            }
            Step::Unpin => {
                if let Some((ctx, pin)) = self.pin.take() {
                    drop(pin);
                    self.model.contexts[ctx].pins -= 1;
                }
            }
            Step::TrackedEvent { spec, leader } => return self.open(spec, leader),
            Step::Refuse(on) => {
                let sampled = |e: &model::Event| e.spec.kind == OracleKind::Soft && e.spec.period > 0;
                let mixed = |e: &model::Event| {
                    e.spec.kind == OracleKind::Soft
                        && self
                            .model
                            .events
                            .values()
                            .any(|o| o.leader == e.leader && o.spec.kind == OracleKind::Hw)
                };
                if !self.model.events.values().any(|e| sampled(e) || mixed(e)) {
                    *self.sw.refuse.lock().unwrap() = on;
                    self.model.refuse = on;
                }
            }
            Step::Close(n)
            | Step::Enable(n, _)
            | Step::Disable(n, _)
            | Step::Reset(n)
            | Step::Refresh(n, _)
            | Step::SetPeriod(n, _) => {
                if n < self.open.len() {
                    return self.control(n, &step);
                }
            }
            Step::In(n)
            | Step::Out(n)
            | Step::Switch(n, _)
            | Step::Remove(n)
            | Step::Exec(n)
            | Step::ContextPin(n)
            | Step::Raise { vcpu: n, .. }
            | Step::Service(n) => {
                if let Some(vcpu) = self.vcpu(n) {
                    return self.on_vcpu(n, &vcpu, &step);
                }
            }
            Step::Add(_) => {}
        }
        Ok(())
    }

    fn on_vcpu(&mut self, n: u32, vcpu: &VcpuEventContext, step: &Step) -> Result<(), String> {
        let got = RefCell::new(BTreeMap::<u64, u64>::new());
        let mut sink =
            |o: OverflowReport| *got.borrow_mut().entry(o.cookie).or_default() += u64::from(o.times);
        let mut expected = OverflowCounts::default();
        match *step {
            Step::In(_) => {
                vcpu.sched_in();
                self.model.sched_in(n);
            }
            Step::Out(_) => {
                vcpu.sched_out();
                let _ = self.model.sched_out(n);
            }
            Step::Switch(_, to) => {
                if let Some(next) = self.vcpu(to) {
                    let exchanged = vcpu.switch_to(&next);
                    if exchanged != self.model.switch(n, to) {
                        return Err(format!("switch from {n} to {to}: exchanged {exchanged}"));
                    }
                }
            }
            Step::Remove(_) => {
                self.core.remove_vcpu(VcpuId(n)).map_err(|e| e.to_string())?;
                self.model.remove_vcpu(n);
            }
            Step::Exec(_) => {
                vcpu.exec();
                self.model.exec(n);
            }
            Step::ContextPin(_) if self.pin.is_none() => {
                let ctx = self.model.at[&n];
                self.pin = Some((ctx, vcpu.pin()));
                self.model.contexts[ctx].pins += 1;
            }
            Step::Raise {
                id, n: times, regs, ..
            } => {
                let of = SoftwareEventId::from_config(id).expect("it exists");
                let mut here = UnavailableRegs;
                let regs_now = regs.then_some(&mut here as &mut dyn SampleRegs);
                vcpu.software_event(of, times, regs_now, &mut sink);
                expected = self.model.raise(n, id, times, regs);
            }
            Step::Service(_) => {
                vcpu.service_overflows(&mut UnavailableRegs, &mut sink);
                expected = self.model.service(n);
                if vcpu.service_overflows(&mut UnavailableRegs, &mut |_| {}) != 0 {
                    return Err("a second look served more".into());
                }
            }
            _ => {}
        }
        expected.0.retain(|_, times| *times > 0);
        (*got.borrow() == expected.0)
            .then_some(())
            .ok_or_else(|| format!("reports {:?}, expected {:?}", got.borrow(), expected.0))
    }

    fn control(&mut self, n: usize, step: &Step) -> Result<(), String> {
        let (name, handle) = (self.open[n].name, &self.open[n].handle);
        let event = &self.model.events[&name];
        let (samples, inherits) = (event.spec.period > 0, event.spec.inherit || event.family);
        let group: Vec<u64> = match *step {
            Step::Enable(_, EventOrGroup::Group) | Step::Disable(_, EventOrGroup::Group) => {
                let leader = event.leader;
                let members = self.model.events.iter().filter(|(_, e)| e.leader == leader);
                members.map(|(name, _)| *name).collect()
            }
            _ => vec![name],
        };
        let done = match *step {
            Step::Close(_) => {
                // Checks the last records before the event and its ring are closed.
                self.records(n)?;
                self.open.remove(n);
                self.model.close(name);
                return Ok(());
            }
            Step::Enable(_, scope) => {
                let done = handle.enable(scope);
                group.iter().for_each(|name| self.model.set_enabled(*name, true));
                done
            }
            Step::Disable(_, scope) => {
                let done = handle.disable(scope);
                group.iter().for_each(|name| self.model.set_enabled(*name, false));
                done
            }
            Step::Reset(_) => {
                self.model.reset(name);
                handle.reset(EventOrGroup::Event)
            }
            Step::Refresh(_, times) => {
                let done = handle.refresh(times);
                if inherits || !samples {
                    return match done {
                        Err(e) if e.errno() == libc::EINVAL => Ok(()),
                        other => Err(format!("refresh of an event that takes none: {other:?}")),
                    };
                }
                self.model.refresh(name, u64::from(times));
                done
            }
            Step::SetPeriod(_, period) => {
                let done = handle.set_period(period);
                if !samples {
                    return match done {
                        Err(e) if e.errno() == libc::EINVAL => Ok(()),
                        other => Err(format!("a period for an event that counts: {other:?}")),
                    };
                }
                self.model.set_period(name, period);
                done
            }
            _ => Ok(()),
        };
        done.map_err(|e| e.to_string())
    }

    fn open(&mut self, mut spec: OracleSpec, leader: Option<usize>) -> Result<(), String> {
        if self.open.len() == EVENTS {
            return Ok(());
        }
        let leader = leader.filter(|n| *n < self.open.len());
        if let Some(leader) = leader {
            // Makes the event acceptable as a sibling. Other tests cover events that cannot join a
            // group.
            (spec.pinned, spec.exclusive) = (false, false);
            let lead = &self.model.events[&self.open[leader].name].spec;
            (spec.vcpu, spec.guest) = (lead.vcpu, lead.guest);
            let raised = |kind: OracleKind| matches!(kind, OracleKind::Raised(_));
            // Skips this combination, because the API does not reveal whether a raised event of a
            // family is active.
            if spec.vcpu.is_none() && raised(spec.kind) != raised(lead.kind) {
                return Ok(());
            }
        }
        if self.model.refuse && spec.kind == OracleKind::Soft {
            if leader.is_some() {
                return Ok(());
            }
            spec.period = 0;
        }
        if self.model.refuse && spec.kind == OracleKind::Hw && leader.is_some() {
            return Ok(());
        }
        self.names += 1;
        let name = self.names;
        let (ty, config) = match spec.kind {
            OracleKind::Hw => (EventType::SIM, config_of(name, spec.rate)),
            OracleKind::Soft => (SOFT, config_of(name, spec.rate)),
            OracleKind::Raised(id) => (EventType::VMM, id),
        };
        let attr = Attr {
            ty,
            config,
            sample_period: spec.period,
            sample_type: SampleType::PERIOD,
            read_format: format().read_format,
            disabled: spec.disabled,
            inherit: spec.inherit,
            inherit_stat: spec.stat,
            pinned: spec.pinned,
            exclusive: spec.exclusive,
            exclude_kernel: spec.not_kernel,
            enable_on_exec: spec.on_exec,
            ..Attr::default()
        };
        let target = spec
            .vcpu
            .map_or(EventOpenTarget::Vm, |n| EventOpenTarget::Vcpu(VcpuId(n)));
        let session = if spec.guest { &self.guest } else { &self.admin };
        let flags = OpenFlags {
            cookie: spec.cookie.then_some(name),
            ..OpenFlags::default()
        };
        let group = leader.map(|n| &self.open[n].handle);
        let opened = self.core.open(session, attr, target, group, flags);
        let leader = leader.map(|n| self.open[n].name);
        let opens = self.model.opens(&spec, leader);
        let handle = match opened {
            Ok(handle) if opens => handle,
            Err(_) if !opens => return Ok(()),
            Ok(_) => return Err("it was opened and should not have been".into()),
            Err(e) => return Err(format!("it was not opened: {e}")),
        };
        // Four pages hold the 512 records of 16 bytes that one step raises at most.
        let ring = handle.map(4, true).map_err(|e| e.to_string())?;
        let pair = [&self.hw, &self.sw];
        self.model
            .open(name, spec, leader, &|vcpu| claim(pair, vcpu, config));
        self.open.push(TrackedEvent {
            name,
            config,
            handle,
            ring: Some(RingReader::of(ring)),
        });
        Ok(())
    }

    /// Reads the records in an event's ring and compares them with the model's expected records.
    fn records(&mut self, n: usize) -> Result<(), String> {
        let open = &mut self.open[n];
        let mut got = Vec::new();
        let Some(ring) = &mut open.ring else { return Ok(()) };
        while let Some(raw) = ring.next_record().map_err(|e| e.to_string())? {
            got.push(
                match DecodedRecord::decode(raw, format()).map_err(|e| e.to_string())? {
                    DecodedRecord::Sample(sample) => RingRecord::Sample {
                        period: sample.period,
                    },
                    DecodedRecord::Throttle(_) => RingRecord::Throttle,
                    DecodedRecord::Unthrottle(_) => RingRecord::Unthrottle,
                    DecodedRecord::Lost(lost) if lost.lost == 1 => RingRecord::Lost,
                    DecodedRecord::Read(read) => RingRecord::Read {
                        value: read.values.entries.iter().next().map_or(0, |e| e.value),
                        enabled: read.values.time_enabled_ns,
                        running: read.values.time_running_ns,
                    },
                    other => return Err(format!("event {}: {other:?}", open.name)),
                },
            );
        }
        let event = self.model.events.get_mut(&open.name).expect("it is open");
        let expected = std::mem::take(&mut event.records);
        (got == expected)
            .then_some(())
            .ok_or_else(|| format!("event {}: records {got:?}, expected {expected:?}", open.name))
    }

    /// Checks all observable state of the core against the model.
    fn compare(&mut self) -> Result<(), String> {
        let handles: BTreeMap<u64, &EventHandle> = self.open.iter().map(|e| (e.name, &e.handle)).collect();
        self.model.observe(&|model, p| {
            let part = &model.parts[p];
            match &part.counter {
                Some(counter) => counter.is_on(),
                None => handles[&part.event].state() == EventState::Active,
            }
        })?;
        for part in &self.model.parts {
            if let Some(counter) = &part.counter
                && counter.is_on() != (part.state == Expected::On)
            {
                return Err(format!(
                    "event {} on vCPU {}: on {}, expected {:?}",
                    part.event,
                    counter.vcpu,
                    counter.is_on(),
                    part.state
                ));
            }
        }
        for n in 0..self.open.len() {
            self.event(n)?;
            self.records(n)?;
        }
        for (&n, &ctx) in &self.model.at {
            let vcpu = self.vcpu(n).ok_or("the vCPU is not there")?;
            let (stats, parts) = (vcpu.stats(), || self.model.parts.iter().filter(|p| p.ctx == ctx));
            let on = || parts().filter(|p| p.state == Expected::On);
            let hardware = on().filter(|p| self.model.events[&p.event].spec.kind == OracleKind::Hw);
            let expected = (parts().count(), on().count(), hardware.count());
            let got = (stats.events, stats.active, stats.active_hardware);
            if got != expected {
                return Err(format!(
                    "vCPU {n}: events, on, hardware {got:?}, expected {expected:?}"
                ));
            }
            if vcpu.errors() != self.model.contexts[ctx].errors {
                let expected = self.model.contexts[ctx].errors;
                return Err(format!("vCPU {n}: {} errors, expected {expected}", vcpu.errors()));
            }
        }
        Ok(())
    }

    fn event(&self, n: usize) -> Result<(), String> {
        let TrackedEvent { name, handle, .. } = &self.open[n];
        let event = &self.model.events[name];
        let parts = self.model.parts_of(*name);
        let mut totals = event.gone;
        for p in &parts {
            totals.add(self.model.parts[*p].totals);
        }
        let of = |r: Reading| Totals {
            value: r.value,
            enabled: r.time_enabled_ns,
            running: r.time_running_ns,
        };
        let fail = |what: &str, got: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug| {
            Err(format!("event {name}: {what} {got:?}, expected {expected:?}"))
        };
        let reading = handle.read().map_err(|e| e.to_string())?;
        if of(reading) != totals {
            return fail("reads", &of(reading), &totals);
        }
        let children = if event.family { parts.len() } else { 0 };
        if handle.children() != children {
            return fail("children", &handle.children(), &children);
        }
        let failed = parts
            .iter()
            .any(|p| self.model.parts[*p].state == Expected::Error);
        if handle.has_failed() != failed {
            return fail("has failed", &!failed, &failed);
        }
        if event.family {
            let mut expected = event.gone_by.clone();
            for p in parts {
                let ctx = self.model.parts[p].ctx;
                let (vcpu, _) = self
                    .model
                    .at
                    .iter()
                    .find(|(_, c)| **c == ctx)
                    .expect("it is live");
                expected.entry(*vcpu).or_default().add(self.model.parts[p].totals);
            }
            let by_vcpu = handle.read_by_vcpu().map_err(|e| e.to_string())?;
            let got: BTreeMap<u32, Totals> = by_vcpu.iter().map(|r| (r.vcpu.0, of(r.reading))).collect();
            if got != expected {
                return fail("by vCPU", &got, &expected);
            }
            let state = if event.enabled {
                EventState::Inactive
            } else {
                EventState::Off
            };
            if handle.state() != state {
                return fail("state", &handle.state(), &state);
            }
            return Ok(());
        }
        let part = &self.model.parts[parts[0]];
        let state = match part.state {
            Expected::Error => EventState::Error,
            Expected::Off => EventState::Off,
            Expected::Waiting => EventState::Inactive,
            Expected::On => EventState::Active,
        };
        if handle.state() != state {
            return fail("state", &handle.state(), &state);
        }
        let counts_vm = part.ctx == VM;
        if counts_vm && !matches!(event.spec.kind, OracleKind::Raised(_)) {
            return fail("counts for the VM", &event.spec.kind, &"a raised event");
        }
        Ok(())
    }
}

fn format() -> RecordFormat {
    RecordFormat {
        sample_type: SampleType::PERIOD,
        read_format: ReadFormat::TOTAL_TIME_ENABLED | ReadFormat::TOTAL_TIME_RUNNING | ReadFormat::ID,
        ..RecordFormat::default()
    }
}

fn history(setup: OracleSetup, steps: Vec<Step>, fault: DriverFault) -> Result<(), TestCaseError> {
    let mut pair = CoreAndModel::new(setup, fault);
    for (at, step) in steps.into_iter().enumerate() {
        let what = format!("{step:?}");
        pair.step(step)
            .and_then(|()| pair.compare())
            .map_err(|e| TestCaseError::fail(format!("step {at}, {what}: {e}")))?;
    }
    Ok(())
}

fn cases() -> u32 {
    let asked = std::env::var("PERF_CORE_ORACLE_CASES").ok();
    asked.and_then(|n| n.parse().ok()).unwrap_or(4000)
}

fn config(cases: u32) -> Config {
    Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..Config::default()
    }
}

fn judge(mut runner: TestRunner, fault: DriverFault) -> Result<(), TestError<(OracleSetup, Vec<Step>)>> {
    let histories = (setup(), prop::collection::vec(step(), 1..60));
    runner.run(&histories, |(setup, steps)| history(setup, steps, fault))
}

/// For any sequence of operations, the core's observable state equals the model's.
#[test]
fn any_history_matches_model() {
    let judged = judge(TestRunner::new(config(cases())), DriverFault::None);
    assert!(judged.is_ok(), "{}", judged.unwrap_err());
}

/// The oracle detects a faulty driver, and shrinks the history that reveals the fault to a few
/// steps. The histories in this test are fixed, because the result of shrinking depends on the
/// initial history.
#[test]
fn oracle_detects_driver_faults() {
    for fault in [DriverFault::LosesCount, DriverFault::DropsOverflows] {
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        match judge(TestRunner::new_with_rng(config(500), rng), fault) {
            Err(TestError::Fail(_, (_, steps))) => assert!(steps.len() <= 8, "{fault:?}: {steps:?}"),
            other => panic!("{fault:?} went unnoticed: {other:?}"),
        }
    }
}
