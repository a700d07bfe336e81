//! The VMs of this host, each with a thread that asks it what it counts. A VM that stalls delays no other:
//! its thread waits, and scrapes go on without it (`standing`). What VMs send is bounded: each reply, what
//! all VMs of one user send for a scrape, and what all VMs send.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use control_api::budget::{HeldBytes, ReplyBudget, ReplyLimits};
use control_api::client::{Client, ClientError};
use control_api::peer;
use control_api::place::{self, PlaceError, Places};
use control_api::protocol::{Generation, GuestViews, Opened};
use control_api::request;
use perf_core::error_line;

use super::snapshot::{self, Snapshot};
use super::standing::{SharedStanding, Users, shown};

/// Most VMs that are asked.
const MAX_VMS: usize = 1024;
/// Most VMs of one user in a directory of several (`--vms`).
const MAX_VMS_OF_USER: usize = 256;
/// Maximum time for one reply.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum time for all of a VM's replies to one scrape.
pub const SCRAPE_TIME: Duration = Duration::from_secs(3);
/// How long a scrape goes on for VMs that are not waited for.
const GRACE: Duration = Duration::from_millis(500);
/// Maximum length of a VM's reply, in bytes: what 256 vCPUs need.
const MAX_REPLY: usize = 2 << 20;
/// Maximum length of the replies that are held of all VMs, of those of the exporter's own user and root, of
/// all others, and of one other user, in bytes.
const MAX_REPLIES: usize = 76 << 20;
const MAX_OWN_REPLIES: usize = 64 << 20;
const MAX_FOREIGN_REPLIES: usize = 12 << 20;
const MAX_REPLIES_OF_USER: usize = 4 << 20;
/// How long vCPUs may take to say what their guests count.
const VIEW_TIME: Duration = Duration::from_millis(500);
/// Between two looks whether they have.
const VIEW_LOOK: Duration = Duration::from_millis(2);
/// Longest label's value that is taken from a VM, in bytes.
const MAX_VALUE: usize = 200;
/// Most vCPUs, counters of one of them, and series of events that are taken from a VM.
const MAX_VCPUS: usize = 256;
const MAX_COUNTERS: usize = 64;
const MAX_EVENTS: usize = 4096;
/// Most kinds of exits of a vCPU.
const MAX_KINDS: usize = 64;

/// Where a VM is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its label: the name, and behind an at sign the user if that is another one.
    pub label: String,
    /// Its control socket.
    pub socket: PathBuf,
    /// Whose directory that is in, or whose socket it is.
    pub owner: u32,
    /// It is a socket for observers, who count and have no samples.
    pub observed: bool,
}

/// What came of asking a VM.
#[derive(Debug)]
pub struct Asked {
    /// Its label.
    pub label: String,
    /// What it counts; `None` if it did not say in time.
    pub snapshot: Option<Snapshot>,
    /// How long it took.
    pub took: Duration,
    /// Share of the budgets that `snapshot` has.
    pub held: Option<HeldBytes>,
}

/// A scrape's question to the thread of a VM.
struct Job {
    until: Instant,
    tell: Sender<Asked>,
}

/// The thread of a VM; it ends when this goes.
struct Worker {
    target: Target,
    jobs: SyncSender<Job>,
    standing: SharedStanding,
}

/// The state that the thread of a VM shares with others.
struct Shared {
    /// What is counted for the metrics of each VM, in perf's syntax.
    events: String,
    users: Users,
    budgets: Budgets,
}

/// Budgets for replies.
struct Budgets {
    own: Arc<ReplyBudget>,
    foreign: Arc<ReplyBudget>,
    users: Mutex<BTreeMap<u32, Arc<ReplyBudget>>>,
}

impl Budgets {
    fn new() -> Self {
        let all = Arc::new(ReplyBudget::new(MAX_REPLIES, None));
        let part = |bytes| Arc::new(ReplyBudget::new(bytes, Some(all.clone())));
        Self {
            own: part(MAX_OWN_REPLIES),
            foreign: part(MAX_FOREIGN_REPLIES),
            users: Mutex::default(),
        }
    }

    /// Returns the budget of VMs of user `uid`.
    fn of_user(&self, uid: u32) -> Arc<ReplyBudget> {
        if is_trusted(uid) {
            return self.own.clone();
        }
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.retain(|other, budget| *other == uid || Arc::strong_count(budget) > 1);
        let new = || Arc::new(ReplyBudget::new(MAX_REPLIES_OF_USER, Some(self.foreign.clone())));
        users.entry(uid).or_insert_with(new).clone()
    }
}

/// Returns whether VMs of user `uid` can do the exporter no harm that their user could not do anyhow.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == peer::own_uid()
}

/// All VMs.
pub struct Vms {
    shared: Arc<Shared>,
    /// The directory with sockets for observers, if they are not looked for wherever they are.
    dir: Option<PathBuf>,
    /// Users whose VMs are served; empty: all.
    owners: Vec<u32>,
    workers: Mutex<BTreeMap<String, Worker>>,
    /// Directories that were told of: where it may not look, or what was passed by.
    told: Mutex<HashSet<PathBuf>>,
}

impl Vms {
    /// The VMs there are, or those that have a socket for observers in `dir`, for each of which `events` will
    /// be counted. Unless `owners` is empty, only VMs of these users are served.
    pub fn new(events: String, dir: Option<PathBuf>, owners: Vec<u32>) -> Self {
        let shared = Shared {
            events,
            users: Users::default(),
            budgets: Budgets::new(),
        };
        Self {
            shared: Arc::new(shared),
            dir,
            owners,
            workers: Mutex::default(),
            told: Mutex::default(),
        }
    }

    /// Where they are now, by their labels; and how many directories this user may not look into.
    pub fn targets(&self) -> (Vec<Target>, usize) {
        match &self.dir {
            Some(dir) => (self.observed(dir), 0),
            None => self.everywhere(),
        }
    }

    fn is_served(&self, owner: u32) -> bool {
        self.owners.is_empty() || self.owners.contains(&owner)
    }

    /// Those with a socket for observers there. A label says whose VM it is: any user may take any name.
    fn observed(&self, dir: &Path) -> Vec<Target> {
        let found = place::observed_in(dir, MAX_VMS_OF_USER).unwrap_or_else(|e| {
            self.tell_once(dir, &error_line(&e));
            Vec::new()
        });
        let own = peer::own_uid();
        let target = |socket: place::Observed| Target {
            label: labelled(socket.name, socket.owner, own),
            socket: socket.path,
            owner: socket.owner,
            observed: true,
        };
        let found = found.into_iter().filter(|socket| self.is_served(socket.owner));
        let mut targets: Vec<_> = found.map(target).collect();
        targets.sort_by(|a, b| a.label.cmp(&b.label));
        targets.truncate(MAX_VMS);
        targets
    }

    fn everywhere(&self) -> (Vec<Target>, usize) {
        let places = Places::everywhere();
        let own = peer::own_uid();
        let mut targets: BTreeMap<String, Target> = BTreeMap::new();
        for place in places.found.iter().filter(|place| self.is_served(place.owner)) {
            for (name, socket) in self.listed(place.listed()) {
                let label = labelled(name, place.owner, own);
                // The first of this user's directories goes before the others.
                if targets.len() < MAX_VMS {
                    targets.entry(label.clone()).or_insert(Target {
                        label,
                        socket,
                        owner: place.owner,
                        observed: false,
                    });
                }
            }
        }
        for dir in &places.closed {
            self.tell_once(dir, "only its user or root may look for VMs there");
        }
        for dir in &places.squatted {
            self.tell_once(
                dir,
                "passed by: it is another user's than its name says, or others may write there",
            );
        }
        (targets.into_values().collect(), places.closed.len())
    }

    fn listed(&self, listed: Result<Vec<(String, PathBuf)>, PlaceError>) -> Vec<(String, PathBuf)> {
        listed.unwrap_or_else(|e| {
            log::debug!("{}", error_line(&e));
            Vec::new()
        })
    }

    fn tell_once(&self, dir: &Path, what: &str) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        // Who fills /tmp does not fill the log.
        if told.len() < MAX_VMS && told.insert(dir.to_owned()) {
            log::warn!("{}: {}", shown(&dir.display().to_string()), shown(what));
        }
    }

    /// Asks these at once. A VM that has not answered after [`SCRAPE_TIME`] comes without a snapshot, and so
    /// does one that is left alone for a while.
    pub fn ask(&self, targets: &[Target]) -> Vec<Asked> {
        let began = Instant::now();
        let until = began + SCRAPE_TIME;
        let (tell, told) = channel();
        // By their labels, and whether they are waited for.
        let mut missing: BTreeMap<String, bool> = BTreeMap::new();
        let mut answered = Vec::new();
        for target in targets {
            let tell = tell.clone();
            match self.send_job(target, began, Job { until, tell }) {
                Some(waited_for) => _ = missing.insert(target.label.clone(), waited_for),
                None => answered.push(Asked::nothing(&target.label, Duration::ZERO)),
            }
        }
        drop(tell);
        loop {
            let end = match missing.values().any(|waited_for| *waited_for) {
                true => until,
                false => began + GRACE,
            };
            let Ok(asked) = told.recv_timeout(end.saturating_duration_since(Instant::now())) else {
                break;
            };
            missing.remove(&asked.label);
            answered.push(asked);
        }
        let took = began.elapsed();
        answered.extend(missing.keys().map(|label| Asked::nothing(label, took)));
        answered.sort_by(|a, b| a.label.cmp(&b.label));
        answered
    }

    /// Gives the thread of a VM a job. Returns whether the scrape waits for the answer, or `None`
    /// if the VM is not asked.
    fn send_job(&self, target: &Target, now: Instant, job: Job) -> Option<bool> {
        let label = &target.label;
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        if workers.get(label).is_none_or(|worker| worker.target != *target) {
            match Worker::start(target.clone(), self.shared.clone()) {
                Ok(worker) => _ = workers.insert(label.clone(), worker),
                Err(e) => {
                    self.shared
                        .users
                        .warn(target.owner, label, &format!("no thread for it: {e}"));
                    return None;
                }
            }
        }
        let worker = workers.get(label).filter(|worker| worker.standing.is_due(now))?;
        // A thread that is busy with another scrape, and has one waiting, is left alone.
        if worker.jobs.try_send(job).is_err() {
            log::debug!("{label}: still busy with an earlier scrape");
            return None;
        }
        let by_user = is_trusted(target.owner) || self.shared.users.is_waited_for(target.owner, now);
        Some(by_user && !worker.standing.has_failed())
    }

    /// Ends the threads of VMs that are not there any more.
    pub fn forget_all_but(&self, targets: &[Target]) {
        let labels: HashSet<&str> = targets.iter().map(|target| target.label.as_str()).collect();
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.retain(|label, _| labels.contains(label.as_str()));
    }
}

/// A VM's name, and behind an at sign the user if that is another one.
fn labelled(name: String, owner: u32, own: u32) -> String {
    match owner == own {
        true => name,
        false => format!("{name}@{owner}"),
    }
}

impl Asked {
    fn nothing(label: &str, took: Duration) -> Self {
        Self {
            label: label.to_owned(),
            snapshot: None,
            took,
            held: None,
        }
    }
}

impl Worker {
    fn start(target: Target, shared: Arc<Shared>) -> std::io::Result<Self> {
        let (jobs, waiting) = sync_channel(1);
        let standing = SharedStanding::default();
        let (its, its_standing) = (target.clone(), standing.clone());
        thread::Builder::new()
            .name("vm".into())
            .spawn(move || work(&its, &shared, &its_standing, &waiting))?;
        Ok(Self {
            target,
            jobs,
            standing,
        })
    }
}

/// The thread of a VM.
fn work(target: &Target, shared: &Shared, standing: &SharedStanding, jobs: &Receiver<Job>) {
    let limits = ReplyLimits {
        timeout: PATIENCE,
        max_bytes: MAX_REPLY,
        budget: shared.budgets.of_user(target.owner),
    };
    let mut connection = None;
    let mut last_error = String::new();
    for job in jobs {
        let began = Instant::now();
        if began >= job.until {
            continue;
        }
        let asked = Connection::snapshot(&mut connection, target, shared, &limits, job.until);
        let (snapshot, held) = match asked {
            Ok((snapshot, held)) => {
                standing.succeeded();
                last_error.clear();
                (Some(snapshot), held)
            }
            Err(e) => {
                connection = None;
                let now = Instant::now();
                standing.failed(now);
                if e.is_silence() {
                    shared.users.stalled(target.owner, now);
                }
                let line = shown(&error_line(&e));
                // Not at each scrape again.
                if line != last_error {
                    shared.users.warn(target.owner, &target.label, &line);
                    last_error = line;
                }
                (None, None)
            }
        };
        // Who asked may have given up.
        let _ = job.tell.send(Asked {
            label: target.label.clone(),
            snapshot,
            took: began.elapsed(),
            held,
        });
    }
}

/// A connection to a VM, whose events count as long as it is there.
struct Connection {
    client: Client,
    opened: Vec<Opened>,
    /// Share of the budgets that `opened` has.
    _held: Option<HeldBytes>,
}

impl Connection {
    fn open(
        target: &Target,
        shared: &Shared,
        limits: &ReplyLimits,
        until: Instant,
    ) -> Result<Self, ClientError> {
        let mut client = Client::connect_limited(&target.socket, target.owner, limits, until)?;
        let mut opened = Vec::new();
        if client.info().pmu != "off" {
            let call = request::Open {
                events: snapshot::with_steal(&shared.events),
                vcpus: None,
                whole: true,
                sampling: None,
            };
            match client.call(call) {
                Ok(list) => {
                    opened = list;
                    for (name, why) in snapshot::each_once(&mut opened) {
                        log::info!(
                            "{}: '{}' cannot be counted and is left out: {}",
                            target.label,
                            shown(&name),
                            shown(&why)
                        );
                    }
                    let () = client.call(request::Enable)?;
                }
                // What the VM counts by itself is worth having.
                Err(ClientError::Refused(why)) => {
                    let what = format!("the events are not counted: {why}");
                    shared.users.warn(target.owner, &target.label, &what);
                }
                Err(e) => return Err(e),
            }
        }
        opened.truncate(MAX_EVENTS);
        Ok(Self {
            _held: client.take_held(),
            client,
            opened,
        })
    }

    /// What the VM counts now, over the connection there is or a new one, and the share of the budgets that
    /// it has.
    fn snapshot(
        connection: &mut Option<Self>,
        target: &Target,
        shared: &Shared,
        limits: &ReplyLimits,
        until: Instant,
    ) -> Result<(Snapshot, Option<HeldBytes>), ClientError> {
        let there = match connection.take() {
            Some(there) => there,
            None => Self::open(target, shared, limits, until)?,
        };
        let Self { client, opened, .. } = connection.insert(there);
        client.set_deadline(until);
        let vm = client.call(request::Status)?;
        let vcpus = client.call(request::Counts)?;
        let views = match vm.pmu.as_str() {
            "off" => Vec::new(),
            _ => views(client, until.min(Instant::now() + VIEW_TIME))?,
        };
        let readings = match opened.is_empty() {
            true => Vec::new(),
            false => client.call(request::Read)?,
        };
        let (events, steal_ns) = snapshot::by_vcpu(opened, &readings);
        let snapshot = bounded(Snapshot {
            label: target.label.clone(),
            vm,
            vcpus,
            views,
            events,
            steal_ns,
        });
        Ok((snapshot, client.take_held()))
    }
}

/// What the guest has programmed, of the vCPUs that say so by `until`.
fn views(client: &mut Client, until: Instant) -> Result<Vec<control_api::protocol::VcpuView>, ClientError> {
    let Generation { generation } = client.call(request::GuestView)?;
    let mut pause = VIEW_LOOK;
    loop {
        let seen: GuestViews = client.call(request::GuestViewResult { generation })?;
        if seen.complete || Instant::now() + pause >= until {
            return Ok(seen.vcpus);
        }
        thread::sleep(pause);
        pause *= 2;
    }
}

/// A VM may say anything: its series stay few, each is there once, and no value is long.
fn bounded(mut vm: Snapshot) -> Snapshot {
    let short = |text: &mut String| {
        if let Some((end, _)) = text.char_indices().find(|(at, _)| *at >= MAX_VALUE) {
            text.truncate(end);
        }
    };
    for text in [&mut vm.vm.version, &mut vm.vm.pmu, &mut vm.vm.guest] {
        short(text);
    }
    let mut seen = HashSet::new();
    vm.vcpus.truncate(MAX_VCPUS);
    vm.vcpus.retain(|vcpu| seen.insert(vcpu.vcpu));
    for vcpu in &mut vm.vcpus {
        vcpu.kinds.retain(|kind, _| kind.len() <= MAX_VALUE);
        while vcpu.kinds.len() > MAX_KINDS {
            vcpu.kinds.pop_last();
        }
    }
    seen.clear();
    vm.views.truncate(MAX_VCPUS);
    vm.views.retain(|view| seen.insert(view.vcpu));
    for view in &mut vm.views {
        view.counters.truncate(MAX_COUNTERS);
        let mut counters = HashSet::new();
        for counter in &mut view.counters {
            short(&mut counter.counter);
            counter.event.iter_mut().for_each(short);
            counter.backing.iter_mut().for_each(short);
        }
        view.counters
            .retain(|counter| counters.insert(counter.counter.clone()));
    }
    seen.clear();
    vm.steal_ns.truncate(MAX_VCPUS);
    vm.steal_ns.retain(|(vcpu, _)| seen.insert(*vcpu));
    vm.events.truncate(MAX_EVENTS);
    let mut series = HashSet::new();
    for (event, _) in &mut vm.events {
        short(&mut event.name);
        short(&mut event.backing);
    }
    vm.events
        .retain(|(event, _)| series.insert((event.name.clone(), event.vcpu)));
    vm
}

#[cfg(test)]
mod tests {
    use control_api::counts::VcpuCounts;
    use control_api::protocol::{EventReading, VmInfo};

    use super::*;

    /// What a VM says twice, at length or too often costs Prometheus nothing.
    #[test]
    fn a_vm_s_words_are_bounded() {
        let vm: VmInfo = serde_json::from_str(
            r#"{"protocol":1,"version":"1","name":"a","pid":1,"vcpus":1,"pmu":"amd","guest":"","state":"running",
                "parked":0,"uptime_ms":0,"role":"admin"}"#,
        )
        .unwrap();
        let event: Opened = serde_json::from_str(
            r#"{"handle":1,"name":"cycles","index":1,"vcpu":0,"backing":"clock","nanoseconds":false,
                "estimate":false,"id":1,"kind":0,"config":0}"#,
        )
        .unwrap();
        let reading: EventReading = serde_json::from_str(
            r#"{"handle":1,"value":1,"enabled_ns":1,"running_ns":1,"estimate":1,"standard_error":null,
                "failed":false}"#,
        )
        .unwrap();
        let vcpu = |n: u32| VcpuCounts {
            vcpu: n % 300,
            kinds: (0..100).map(|kind| (kind.to_string(), 1)).collect(),
            ..VcpuCounts::default()
        };
        let of = bounded(Snapshot {
            label: "a".into(),
            vm: VmInfo {
                guest: "\u{fc}".repeat(1000),
                ..vm
            },
            vcpus: (0..600).map(vcpu).collect(),
            views: Vec::new(),
            events: vec![(event.clone(), reading.clone()), (event, reading)],
            steal_ns: vec![(0, 1), (0, 2)],
        });
        assert_eq!((of.vm.guest.len(), of.vm.version.as_str()), (MAX_VALUE, "1"));
        assert_eq!((of.vcpus.len(), of.vcpus[0].kinds.len()), (MAX_VCPUS, MAX_KINDS));
        assert_eq!((of.events.len(), of.steal_ns.len()), (1, 1));
    }
}
