//! The model with which the oracle compares the core: a flat list of parts and simple loops over
//! this list. A part is one event in one context.
//!
//! The model predicts everything except which flexible groups of hardware events hold the slots.
//! That assignment is observed and checked against the rules that users rely on (`judging.rs`).
//! `counting.rs` models time, raised events and overflows.

mod counting;
mod judging;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::common::test_core::Counter;
pub use counting::RingRecord;
use judging::SlotUsage;

/// Index of the VM context in the model's list of contexts.
pub const VM: usize = 0;
/// ID of the software event that is raised whenever a vCPU is scheduled out.
pub const CONTEXT_SWITCHES: u64 = 7;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum EventState {
    Error,
    #[default]
    Off,
    Waiting,
    On,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OracleKind {
    /// A driver event that needs a slot (a hardware event).
    Hw,
    /// A driver event that needs no slot (a software event).
    Soft,
    /// An event that counts the software event with this ID, which the VMM raises.
    Raised(u64),
}

/// The parameters with which an event of the model was opened.
#[derive(Clone, Debug)]
pub struct OracleSpec {
    pub kind: OracleKind,
    pub rate: u64,
    /// Target vCPU of the event, or `None` for the VM.
    pub vcpu: Option<u32>,
    pub guest: bool,
    pub pinned: bool,
    pub exclusive: bool,
    pub inherit: bool,
    pub stat: bool,
    pub disabled: bool,
    pub on_exec: bool,
    pub not_kernel: bool,
    pub period: u64,
    pub cookie: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub value: u64,
    pub enabled: u64,
    pub running: u64,
}

impl Totals {
    pub fn add(&mut self, other: Totals) {
        self.value += other.value;
        self.enabled += other.enabled;
        self.running += other.running;
    }
}

pub struct Event {
    pub spec: OracleSpec,
    /// Name of the leader of this event's group, which may be the event itself.
    pub leader: u64,
    /// Set for a VM-wide event with one part in each vCPU context.
    pub family: bool,
    /// For a family, set if the parts on vCPUs that are added later start enabled.
    pub enabled: bool,
    /// Current period, with which parts on vCPUs that are added later start.
    period: u64,
    /// Sum of the totals of this event's parts on removed vCPUs.
    pub gone: Totals,
    pub gone_by: BTreeMap<u32, Totals>,
    pub records: Vec<RingRecord>,
}

/// Overflows of a part that have not been serviced yet.
#[derive(Clone, Copy, Debug, Default)]
struct PendingOverflows {
    times: u64,
    /// Position of the last of these overflows, in counts since the event was opened.
    at: u64,
}

/// A part: one event in one context.
#[derive(Default)]
pub struct OracleEventInContext {
    pub event: u64,
    pub ctx: usize,
    pub state: EventState,
    pub totals: Totals,
    pub counter: Option<Arc<Counter>>,
    on_exec: bool,
    // The following fields are used only for the part of a group leader.
    /// Position of the group in its queue: the time at which it was queued.
    line: u64,
    on_since: u64,
    /// Set if the software driver rejected the group.
    refused: bool,
    /// Set if the group once did not fit together with the pinned groups while it was queued. The
    /// group's position in the queue is then unknown.
    excused: bool,
    // The following fields are used for sampling. Positions are numbers of counts since the event
    // was opened, and resets do not change them.
    position: u64,
    period: u64,
    to_go: u64,
    /// Position up to which all counts are included in the periods of samples.
    covered: u64,
    fresh: PendingOverflows,
    kept: PendingOverflows,
    /// Set if the overflows in `kept` occurred before the event was stopped. The overflows in
    /// `kept` then have a sample of their own.
    apart: bool,
    throttled: bool,
    limit: u64,
    window_ns: u64,
    window_tick: u64,
    interrupts: u64,
}

#[derive(Clone, Default)]
pub struct OracleContext {
    pub tid: i32,
    pub inside: bool,
    pub dead: bool,
    pub errors: u64,
    pub pins: u32,
    ticks: u64,
    turned_ns: u64,
    clone_of: Option<u64>,
    /// Set if a pinned group has taken the slots of a flexible group. Some slots may then stay
    /// unused until the next interval, because a scheduling pass ends at the first group that does
    /// not fit.
    stalled: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct OracleSetup {
    pub slots: usize,
    /// Number of slots reserved for VM-wide events.
    pub reserved: usize,
    pub tick_ns: u64,
    /// Maximum number of interrupts per tick before an event is throttled.
    pub per_tick: u64,
    /// Set if one host thread runs all vCPUs.
    pub one_thread: bool,
}

#[derive(Default)]
pub struct OverflowCounts(pub BTreeMap<u64, u64>);

#[derive(Default)]
pub struct Model {
    pub setup: OracleSetup,
    pub now: u64,
    pub refuse: bool,
    pub contexts: Vec<OracleContext>,
    pub at: BTreeMap<u32, usize>,
    pub events: BTreeMap<u64, Event>,
    pub parts: Vec<OracleEventInContext>,
    stamp: u64,
    /// Number of times that a VM-wide family was added.
    generation: u64,
    /// Contexts in which the current step of the history ended a multiplexing interval.
    turned: Vec<usize>,
}

impl Model {
    pub fn new(setup: OracleSetup) -> Self {
        let vm = OracleContext {
            inside: true,
            ..OracleContext::default()
        };
        Self {
            setup,
            contexts: vec![vm],
            ..Self::default()
        }
    }

    fn stamp(&mut self) -> u64 {
        self.stamp += 1;
        self.stamp
    }

    pub fn tid(&self, vcpu: u32) -> i32 {
        if self.setup.one_thread {
            7
        } else {
            100 + vcpu as i32
        }
    }

    // Lookup of specifications, parts and groups.

    pub fn spec(&self, p: usize) -> &OracleSpec {
        &self.events[&self.parts[p].event].spec
    }

    /// Returns the indices of the parts of `event`.
    pub fn parts_of(&self, event: u64) -> Vec<usize> {
        (0..self.parts.len())
            .filter(|p| self.parts[*p].event == event)
            .collect()
    }

    /// Returns the leader of the group to which part `p` belongs.
    pub fn leader(&self, p: usize) -> usize {
        let leader = self.events[&self.parts[p].event].leader;
        self.part(leader, self.parts[p].ctx)
            .expect("a leader is where its members are")
    }

    pub fn part(&self, event: u64, ctx: usize) -> Option<usize> {
        (0..self.parts.len()).find(|p| self.parts[*p].event == event && self.parts[*p].ctx == ctx)
    }

    /// Returns the members of the group of `leader`, leader first.
    fn group(&self, leader: usize) -> Vec<usize> {
        let (name, ctx) = (self.parts[leader].event, self.parts[leader].ctx);
        let mut members: Vec<usize> = (0..self.parts.len())
            .filter(|p| self.parts[*p].ctx == ctx && self.events[&self.parts[*p].event].leader == name)
            .collect();
        members.sort_by_key(|p| self.parts[*p].event);
        members
    }

    fn leads(&self, p: usize) -> bool {
        self.events[&self.parts[p].event].leader == self.parts[p].event
    }

    /// Returns `true` if the group contains hardware events.
    fn is_hw(&self, leader: usize) -> bool {
        let hw = |p: &usize| self.spec(*p).kind == OracleKind::Hw;
        self.group(leader).iter().any(hw)
    }

    fn needs(&self, leader: usize) -> usize {
        let hw = |p: usize| self.spec(p).kind == OracleKind::Hw;
        let wants = |p: &&usize| hw(**p) && self.parts[**p].state >= EventState::Waiting;
        self.group(leader).iter().filter(wants).count()
    }

    /// Returns the scheduling class of a group, in order of precedence: pinned events of the guest,
    /// of the VM and of a vCPU, then flexible events of the VM and of a vCPU.
    fn class(&self, leader: usize) -> u8 {
        let spec = self.spec(leader);
        match (spec.pinned, spec.guest, spec.vcpu) {
            (true, true, _) => 0,
            (true, false, None) => 1,
            (true, false, Some(_)) => 2,
            (false, _, None) => 3,
            (false, _, Some(_)) => 4,
        }
    }

    /// Returns the parts that lead the enabled hardware groups of `classes` in context `ctx`, in
    /// queue order.
    fn lines(&self, ctx: usize, classes: std::ops::Range<u8>) -> Vec<usize> {
        let mut leaders: Vec<usize> = (0..self.parts.len())
            .filter(|p| {
                self.parts[*p].ctx == ctx && self.leads(*p) && self.parts[*p].state >= EventState::Waiting
            })
            .filter(|p| classes.contains(&self.class(*p)) && self.is_hw(*p))
            .collect();
        leaders.sort_by_key(|p| (self.class(*p), self.parts[*p].line));
        leaders
    }

    fn is_on(&self, leader: usize) -> bool {
        self.parts[leader].state == EventState::On
    }

    // Scheduling of groups.

    fn goes_off(&mut self, p: usize) {
        let part = &mut self.parts[p];
        if part.state == EventState::On {
            part.state = EventState::Waiting;
            part.keep();
            part.apart |= part.kept.times > 0;
        }
    }

    fn group_off(&mut self, leader: usize) {
        for p in self.group(leader) {
            self.goes_off(p);
        }
    }

    fn group_on(&mut self, leader: usize) {
        for p in self.group(leader) {
            if self.parts[p].state == EventState::Waiting {
                self.parts[p].state = EventState::On;
            }
        }
    }

    fn fail(&mut self, leader: usize) {
        self.group_off(leader);
        self.parts[leader].state = EventState::Error;
        self.contexts[self.parts[leader].ctx].errors += 1;
    }

    /// Starts a group without hardware events, if the group may run.
    fn go_soft(&mut self, leader: usize) {
        if !self.contexts[self.parts[leader].ctx].inside || self.parts[leader].state < EventState::Waiting {
            return;
        }
        let refused = |m: &Self, p: &usize| {
            m.refuse && m.spec(*p).kind == OracleKind::Soft && m.parts[*p].state == EventState::Waiting
        };
        let group = self.group(leader);
        if group.iter().any(|p| refused(self, p)) {
            self.group_off(leader);
            self.soft_cannot(leader);
        } else {
            self.parts[leader].refused = false;
            self.group_on(leader);
        }
    }

    fn soft_cannot(&mut self, leader: usize) {
        if self.spec(leader).pinned {
            self.fail(leader);
        } else {
            self.parts[leader].refused = true;
        }
    }

    /// Schedules the groups of context `ctx` whose states the model can predict: pinned groups
    /// receive slots or fail.
    fn pass(&mut self, ctx: usize) {
        if !self.contexts[ctx].inside {
            return;
        }
        let mut room = SlotUsage::default();
        for leader in self.lines(ctx, 0..3) {
            if room.take(self, leader) {
                self.group_on(leader);
            } else {
                self.fail(leader);
            }
        }
    }

    fn go(&mut self, leader: usize) {
        if self.is_hw(leader) {
            self.pass(self.parts[leader].ctx);
        } else {
            self.go_soft(leader);
        }
    }

    pub fn enable(&mut self, p: usize) {
        if self.parts[p].state >= EventState::Waiting {
            return;
        }
        self.parts[p].state = EventState::Waiting;
        let leader = self.leader(p);
        if leader == p {
            self.in_line(p);
        }
        if self.parts[leader].state >= EventState::Waiting {
            self.go(leader);
        }
    }

    fn in_line(&mut self, leader: usize) {
        self.parts[leader].line = self.stamp();
        self.parts[leader].excused = false;
    }

    pub fn disable(&mut self, p: usize) {
        if self.parts[p].state < EventState::Waiting {
            return;
        }
        if self.leads(p) {
            self.group_off(p);
            self.parts[p].refused = false;
        } else {
            self.goes_off(p);
        }
        self.parts[p].state = EventState::Off;
        self.pass(self.parts[p].ctx);
    }

    // Opening and closing of events.

    /// Returns `true` if the core should be able to open the event.
    pub fn opens(&self, spec: &OracleSpec, leader: Option<u64>) -> bool {
        if spec.vcpu.is_some_and(|n| !self.at.contains_key(&n)) {
            return false;
        }
        let hw = usize::from(spec.kind == OracleKind::Hw);
        let Some(leader) = leader else {
            // If no vCPU exists, a per-vCPU driver accepts a VM-wide event only if later vCPUs
            // inherit it.
            let none = self.at.is_empty() && !matches!(spec.kind, OracleKind::Raised(_));
            return !(spec.vcpu.is_none() && none && !spec.inherit) && hw <= self.setup.slots;
        };
        let lead = &self.events[&leader];
        let members = self.events.values().filter(|e| e.leader == leader);
        let taken = members.filter(|e| e.spec.kind == OracleKind::Hw).count();
        let same_place = match (spec.vcpu, lead.spec.vcpu) {
            (None, None) => lead.family || matches!(spec.kind, OracleKind::Raised(_)),
            (Some(n), Some(_)) => self.part(leader, self.at[&n]).is_some(),
            _ => false,
        };
        let none = self.at.is_empty() && !matches!(spec.kind, OracleKind::Raised(_));
        // A leader without `inherit` has no parts left once all vCPUs that existed at its open were
        // removed.
        let counts_anywhere = lead.spec.inherit || !self.parts_of(leader).is_empty();
        lead.leader == leader
            && same_place
            && !spec.pinned
            && !spec.exclusive
            && !(spec.vcpu.is_none() && none && !lead.spec.inherit)
            && (taken + hw <= self.setup.slots || !counts_anywhere)
    }

    pub fn open(
        &mut self,
        name: u64,
        spec: OracleSpec,
        leader: Option<u64>,
        claim: &dyn Fn(u32) -> Option<Arc<Counter>>,
    ) {
        let family = spec.vcpu.is_none()
            && match (leader, spec.kind) {
                (Some(leader), _) => self.events[&leader].family,
                (None, OracleKind::Raised(_)) => spec.inherit,
                (None, _) => true,
            };
        let event = Event {
            leader: leader.unwrap_or(name),
            family,
            enabled: !spec.disabled,
            period: spec.period,
            gone: Totals::default(),
            gone_by: BTreeMap::new(),
            records: Vec::new(),
            spec,
        };
        let vcpu = event.spec.vcpu;
        self.events.insert(name, event);
        if family {
            self.generation += 1;
            for (n, ctx) in self.at.clone() {
                if leader.is_none_or(|l| self.part(l, ctx).is_some()) {
                    self.attach(name, ctx, claim(n));
                }
            }
        } else {
            let ctx = vcpu.map_or(VM, |n| self.at[&n]);
            self.contexts[ctx].clone_of = None;
            self.attach(name, ctx, vcpu.and_then(claim));
        }
    }

    fn attach(&mut self, name: u64, ctx: usize, counter: Option<Arc<Counter>>) {
        let event = &self.events[&name];
        let (enabled, period, leads) = (event.enabled, event.period, event.leader == name);
        let hw = event.spec.kind == OracleKind::Hw;
        let on_exec = event.spec.on_exec;
        let leader = self.part(event.leader, ctx);
        let mut again = enabled;
        if let Some(leader) = leader
            && hw
            && !self.is_hw(leader)
        {
            again = true;
            // The group leaves the schedule and is queued for slots, because its first hardware
            // member joins.
            self.group_off(leader);
            self.parts[leader].refused = false;
            self.in_line(leader);
        }
        self.parts.push(OracleEventInContext {
            event: name,
            ctx,
            state: if enabled {
                EventState::Waiting
            } else {
                EventState::Off
            },
            counter,
            on_exec,
            period,
            to_go: period,
            ..OracleEventInContext::default()
        });
        let p = self.parts.len() - 1;
        if leads {
            self.in_line(p);
        }
        let leader = self.leader(p);
        if again && self.parts[leader].state >= EventState::Waiting {
            self.go(leader);
        }
    }

    pub fn close(&mut self, name: u64) {
        // The siblings of a closed leader become leaders and keep their states.
        let siblings: Vec<u64> = self
            .events
            .iter()
            .filter(|(n, e)| e.leader == name && **n != name)
            .map(|(n, _)| *n)
            .collect();
        for p in self.parts_of(name) {
            self.part_leaves(p);
        }
        for name in siblings {
            self.events.get_mut(&name).expect("it is open").leader = name;
        }
        for ctx in 0..self.contexts.len() {
            self.part(name, ctx).map(|p| self.parts.remove(p));
        }
        let lone: Vec<usize> = (0..self.parts.len()).collect();
        self.events.remove(&name);
        for p in lone {
            if self.leads(p) && self.parts[p].line == 0 {
                self.in_line(p);
                if self.parts[p].state >= EventState::Waiting {
                    self.go(p);
                }
            }
        }
        for leader in 0..self.parts.len() {
            if self.leads(leader) && !self.is_hw(leader) && !self.is_on(leader) && !self.parts[leader].refused
            {
                self.go_soft(leader);
            }
        }
    }

    /// Removes a part from its group. The removal of a leader stops the group.
    fn part_leaves(&mut self, p: usize) {
        let leader = self.leader(p);
        if leader == p {
            self.group_off(p);
        } else {
            self.goes_off(p);
            let others = self.group(leader).into_iter().filter(|m| *m != p);
            let hw_left = others.clone().any(|m| self.spec(m).kind == OracleKind::Hw);
            if self.spec(p).kind == OracleKind::Hw && !hw_left {
                // The last hardware member leaves, so the others are stopped and rescheduled
                // without slots.
                self.group_off(leader);
            }
        }
    }

    // Addition and removal of vCPUs.

    pub fn add_vcpu(&mut self, n: u32, claim: &dyn Fn(u64) -> Option<Arc<Counter>>) {
        let mut leaders = self
            .events
            .iter()
            .filter(|(name, e)| e.family && e.leader == **name);
        let all = leaders.all(|(_, e)| e.spec.inherit);
        self.contexts.push(OracleContext {
            tid: self.tid(n),
            clone_of: all.then_some(self.generation),
            ..OracleContext::default()
        });
        let ctx = self.contexts.len() - 1;
        self.at.insert(n, ctx);
        let inherits = |m: &Self, name: u64| {
            let event = &m.events[&name];
            event.family && m.events[&event.leader].spec.inherit
        };
        // Groups are inherited one after the other, each with its leader first.
        let mut names: Vec<u64> = self.events.keys().copied().collect();
        names.sort_by_key(|name| (self.events[name].leader, *name));
        for name in names {
            if inherits(self, name) {
                self.attach(name, ctx, claim(name));
            }
        }
    }

    pub fn remove_vcpu(&mut self, n: u32) {
        let ctx = self.at.remove(&n).expect("it is there");
        self.out(ctx);
        self.contexts[ctx].dead = true;
        for p in (0..self.parts.len())
            .filter(|p| self.parts[*p].ctx == ctx)
            .collect::<Vec<_>>()
        {
            // Each unhandled overflow is lost, because no thread remains to handle it.
            if std::mem::take(&mut self.parts[p].kept).times > 0 {
                let name = self.parts[p].event;
                let event = self.events.get_mut(&name).expect("it is open");
                event.records.push(RingRecord::Lost);
            }
            self.parts[p].apart = false;
        }
        let children: Vec<u64> = self
            .parts
            .iter()
            .filter(|p| p.ctx == ctx && self.events[&p.event].family)
            .map(|p| p.event)
            .collect();
        for name in children {
            let p = self.part(name, ctx).expect("it is there");
            let totals = self.parts[p].totals;
            let event = self.events.get_mut(&name).expect("it is open");
            event.gone.add(totals);
            event.gone_by.entry(n).or_default().add(totals);
            if event.spec.stat {
                event.records.push(RingRecord::Read {
                    value: totals.value,
                    enabled: totals.enabled,
                    running: totals.running,
                });
            }
            self.parts.remove(p);
        }
    }

    pub fn sched_in(&mut self, n: u32) {
        let ctx = self.at[&n];
        if self.contexts[ctx].inside {
            return;
        }
        self.contexts[ctx].inside = true;
        self.pass(ctx);
        for leader in 0..self.parts.len() {
            if self.parts[leader].ctx == ctx && self.leads(leader) && !self.is_hw(leader) {
                self.go_soft(leader);
            }
        }
    }

    pub fn out(&mut self, ctx: usize) {
        self.contexts[ctx].inside = false;
        for p in 0..self.parts.len() {
            if self.parts[p].ctx == ctx {
                self.goes_off(p);
                self.parts[p].refused = false;
            }
        }
    }

    pub fn sched_out(&mut self, n: u32) -> OverflowCounts {
        let reports = self.raise(n, CONTEXT_SWITCHES, 1, false);
        self.out(self.at[&n]);
        reports
    }

    /// Switches from vCPU `from` to vCPU `to`. Returns `true` if the contexts are swapped, so that
    /// no event is stopped or started.
    pub fn switch(&mut self, from: u32, to: u32) -> bool {
        let _ = self.raise(from, CONTEXT_SWITCHES, 1, false);
        let (a, b) = (self.at[&from], self.at[&to]);
        let (from_ctx, to_ctx) = (&self.contexts[a], &self.contexts[b]);
        let alike = from_ctx.clone_of.is_some() && from_ctx.clone_of == to_ctx.clone_of;
        let exchanged = a != b
            && self.setup.one_thread
            && alike
            && from_ctx.inside
            && !to_ctx.inside
            && from_ctx.pins == 0
            && to_ctx.pins == 0;
        if !exchanged {
            self.out(a);
            self.sched_in(to);
            return false;
        }
        for name in self.events.keys().copied().collect::<Vec<_>>() {
            if self.events[&name].spec.stat
                && let (Some(p), Some(q)) = (self.part(name, a), self.part(name, b))
            {
                let past = self.parts[p].totals;
                self.parts[p].totals = self.parts[q].totals;
                self.parts[q].totals = past;
            }
        }
        // Error counts belong to the vCPU, so they move to the context that the vCPU uses from now
        // on.
        let failed = self.contexts[a].errors;
        self.contexts[a].errors = std::mem::replace(&mut self.contexts[b].errors, failed);
        self.at.insert(from, b);
        self.at.insert(to, a);
        true
    }

    pub fn exec(&mut self, n: u32) {
        let ctx = self.at[&n];
        self.contexts[ctx].clone_of = None;
        for p in (0..self.parts.len())
            .filter(|p| self.parts[*p].ctx == ctx)
            .collect::<Vec<_>>()
        {
            if std::mem::take(&mut self.parts[p].on_exec) {
                self.enable(p);
            }
        }
    }

    // Control operations on events.

    pub fn reset(&mut self, name: u64) {
        let event = self.events.get_mut(&name).expect("it is open");
        event.gone.value = 0;
        for totals in event.gone_by.values_mut() {
            totals.value = 0;
        }
        for p in self.parts_of(name) {
            self.parts[p].totals.value = 0;
        }
    }

    pub fn set_period(&mut self, name: u64, period: u64) {
        self.events.get_mut(&name).expect("it is open").period = period;
        for p in self.parts_of(name) {
            let part = &mut self.parts[p];
            part.keep();
            part.period = period;
            part.to_go = period;
        }
    }

    pub fn refresh(&mut self, name: u64, n: u64) {
        for p in self.parts_of(name) {
            self.parts[p].limit += n;
            self.enable(p);
        }
    }

    /// Enables or disables all parts of an event, and updates the state of a family.
    pub fn set_enabled(&mut self, name: u64, on: bool) {
        self.events.get_mut(&name).expect("it is open").enabled = on;
        for p in self.parts_of(name) {
            if on {
                self.enable(p);
            } else {
                self.disable(p);
            }
        }
    }

    pub fn tick(&mut self) {
        for ctx in 0..self.contexts.len() {
            if self.contexts[ctx].dead {
                continue;
            }
            self.contexts[ctx].ticks += 1;
            for p in 0..self.parts.len() {
                let part = &mut self.parts[p];
                if part.ctx == ctx && part.state == EventState::On && std::mem::take(&mut part.throttled) {
                    let name = part.event;
                    self.events
                        .get_mut(&name)
                        .expect("it is open")
                        .records
                        .push(RingRecord::Unthrottle);
                }
            }
            for leader in 0..self.parts.len() {
                if self.parts[leader].ctx == ctx && self.parts[leader].refused {
                    self.go_soft(leader);
                }
            }
        }
        self.rotate();
    }
}
