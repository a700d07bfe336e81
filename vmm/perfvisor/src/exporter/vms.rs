//! The VMs of this host, each with a thread that asks it what it counts. One that says nothing holds up
//! nobody else: its thread waits, and scrapes go on without it.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError};
use control_api::peer;
use control_api::place::{self, PlaceError, Places};
use control_api::protocol::{Generation, GuestViews, Opened};
use control_api::request;
use perf_core::error_line;
use perfvisor_vmm::metrics::snapshot::{self, Snapshot};

/// Most VMs that are asked.
const MAX_VMS: usize = 1024;
/// Most VMs of one user in a directory of several (`--vms`).
const MAX_VMS_OF_USER: usize = 256;
/// How long a VM may take for one reply.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long all of a VM's replies to one scrape may take.
pub const SCRAPE_TIME: Duration = Duration::from_secs(3);
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
}

/// All VMs.
pub struct Vms {
    /// What is counted for the metrics of each.
    events: String,
    /// The directory with sockets for observers, if they are not looked for wherever they are.
    dir: Option<PathBuf>,
    workers: Mutex<BTreeMap<String, Worker>>,
    /// Directories that were told of: where it may not look, or what was passed by.
    told: Mutex<HashSet<PathBuf>>,
}

impl Vms {
    /// The VMs there are, or those that have a socket for observers in `dir`, for each of which `events` will
    /// be counted.
    pub fn new(events: String, dir: Option<PathBuf>) -> Self {
        Self {
            events,
            dir,
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
        let mut targets: Vec<_> = found.into_iter().map(target).collect();
        targets.sort_by(|a, b| a.label.cmp(&b.label));
        targets.truncate(MAX_VMS);
        targets
    }

    fn everywhere(&self) -> (Vec<Target>, usize) {
        let places = Places::everywhere();
        let own = peer::own_uid();
        let mut targets: BTreeMap<String, Target> = BTreeMap::new();
        for place in &places.found {
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
            log::warn!("{}: {what}", dir.display());
        }
    }

    /// Asks these all at once. What has not answered after [`SCRAPE_TIME`] comes without a snapshot.
    pub fn ask(&self, targets: &[Target]) -> Vec<Asked> {
        let began = Instant::now();
        let until = began + SCRAPE_TIME;
        let (tell, told) = channel();
        let mut missing: BTreeMap<String, Asked> = BTreeMap::new();
        {
            let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
            for target in targets {
                let label = target.label.clone();
                let at_work = workers.get(&label).is_some_and(|w| w.target == *target);
                if !at_work {
                    match Worker::start(target.clone(), self.events.clone()) {
                        Ok(worker) => _ = workers.insert(label.clone(), worker),
                        Err(e) => log::warn!("{label}: no thread for it: {e}"),
                    }
                }
                let tell = tell.clone();
                // A thread that is busy with another scrape, and has one waiting, is left alone.
                let sent = workers.get(&label).map(|w| w.jobs.try_send(Job { until, tell }));
                if !matches!(sent, Some(Ok(()))) {
                    log::debug!("{label}: still busy with an earlier scrape");
                }
                let none = Asked {
                    label: label.clone(),
                    snapshot: None,
                    took: SCRAPE_TIME,
                };
                missing.insert(label, none);
            }
        }
        drop(tell);
        let mut answered = Vec::new();
        while let Ok(asked) = told.recv_timeout(until.saturating_duration_since(Instant::now())) {
            missing.remove(&asked.label);
            answered.push(asked);
        }
        answered.extend(missing.into_values());
        answered.sort_by(|a, b| a.label.cmp(&b.label));
        answered
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

impl Worker {
    fn start(target: Target, events: String) -> std::io::Result<Self> {
        let (jobs, waiting) = sync_channel(1);
        let its = target.clone();
        thread::Builder::new()
            .name("vm".into())
            .spawn(move || work(&its, &events, &waiting))?;
        Ok(Self { target, jobs })
    }
}

/// The thread of a VM.
fn work(target: &Target, events: &str, jobs: &Receiver<Job>) {
    let mut connection = None;
    let mut last_error = String::new();
    for job in jobs {
        let began = Instant::now();
        if began >= job.until {
            continue;
        }
        let snapshot = match Connection::snapshot(&mut connection, target, events, job.until) {
            Ok(snapshot) => Some(snapshot),
            Err(e) => {
                connection = None;
                let line = error_line(&e);
                // Not at each scrape again.
                if line != last_error {
                    log::warn!("{}: {line}", target.label);
                    last_error = line;
                }
                None
            }
        };
        if snapshot.is_some() {
            last_error.clear();
        }
        // Who asked may have given up.
        let _ = job.tell.send(Asked {
            label: target.label.clone(),
            snapshot,
            took: began.elapsed(),
        });
    }
}

/// A connection to a VM, whose events count as long as it is there.
struct Connection {
    client: Client,
    opened: Vec<Opened>,
}

impl Connection {
    fn open(target: &Target, events: &str) -> Result<Self, ClientError> {
        let mut client = Client::connect_at(&target.socket, Some(target.owner), PATIENCE)?;
        let mut opened = Vec::new();
        if client.info().pmu != "off" {
            let call = request::Open {
                events: snapshot::with_steal(events),
                vcpus: None,
                whole: true,
                sampling: None,
            };
            match client.call(call) {
                Ok(list) => {
                    opened = list;
                    for (name, why) in snapshot::each_once(&mut opened) {
                        log::info!(
                            "{}: '{name}' cannot be counted and is left out: {why}",
                            target.label
                        );
                    }
                    let () = client.call(request::Enable)?;
                }
                // What the VM counts by itself is worth having.
                Err(ClientError::Refused(why)) => {
                    log::warn!("{}: the events are not counted: {why}", target.label);
                }
                Err(e) => return Err(e),
            }
        }
        Ok(Self { client, opened })
    }

    /// What the VM counts now, over the connection there is or a new one.
    fn snapshot(
        connection: &mut Option<Self>,
        target: &Target,
        events: &str,
        until: Instant,
    ) -> Result<Snapshot, ClientError> {
        let there = match connection.take() {
            Some(there) => there,
            None => Self::open(target, events)?,
        };
        let Self { client, opened } = connection.insert(there);
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
        Ok(bounded(Snapshot {
            label: target.label.clone(),
            vm,
            vcpus,
            views,
            events,
            steal_ns,
            served: None,
        }))
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
            served: None,
        });
        assert_eq!((of.vm.guest.len(), of.vm.version.as_str()), (MAX_VALUE, "1"));
        assert_eq!((of.vcpus.len(), of.vcpus[0].kinds.len()), (MAX_VCPUS, MAX_KINDS));
        assert_eq!((of.events.len(), of.steal_ns.len()), (1, 1));
    }
}
