//! Discovery and queries of the VMs on this host.
//!
//! A scrape queries each VM on a separate thread, so a stalled VM does not delay the others. The
//! scrape continues without the stalled VM (`back_off`). A thread exits after its query. Few
//! threads exist at the same time, because many stacks would occupy more memory than the metrics.
//! Replies are limited in size: each reply, all replies to a scrape from the VMs of one user, and
//! the replies of all VMs.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use control_api::budget::{ControlReplyLimits, ReplyMemoryBudget, ReservedReplyBytes};
use control_api::client::{Client, ClientError};
use control_api::peer;
use control_api::protocol::{OpenedEvent, SnapshotId, VmGuestCounters};
use control_api::request;
use control_api::socket_dir::{self, ControlSocketError, SocketDirs};
use perf_core::error_line;

use super::back_off::{ScrapeBackOff, UserBackOffs, shown};
use super::snapshot::{self, MetricsSnapshot};

/// Maximum number of VMs that the exporter queries.
const MAX_VMS: usize = 1024;
/// Maximum number of VMs of one user in a shared directory (`--vms`).
const MAX_VMS_OF_USER: usize = 256;
/// Time limit for one reply of a VM.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for all replies of a VM to one scrape.
pub const SCRAPE_TIME: Duration = Duration::from_secs(3);
/// Time after the start of the last query for which a scrape still accepts the answers of VMs that
/// it does not wait for.
const GRACE: Duration = Duration::from_millis(500);
/// Number of concurrent queries at which a scrape delays further queries.
const MAX_QUERIES: usize = 64;
/// Time after which a scrape starts [`MAX_QUERIES`] more queries even if earlier queries are still
/// in progress. All queries of [`MAX_VMS`] VMs thus start within about half of [`SCRAPE_TIME`].
const QUERY_TURN: Duration = Duration::from_millis(100);
/// Maximum number of running and waiting queries of one VM, from different scrapes.
const MAX_QUERIES_OF_VM: usize = 2;
/// Maximum size of a VM's reply, in bytes; sufficient for 256 vCPUs.
const MAX_REPLY: usize = 2 << 20;
/// Memory limit for the replies of all VMs that are kept at the same time, in bytes.
const MAX_REPLIES: usize = 76 << 20;
/// Part of [`MAX_REPLIES`] for the VMs of root and of the exporter's own user.
const MAX_OWN_REPLIES: usize = 64 << 20;
/// Part of [`MAX_REPLIES`] for the VMs of all other users.
const MAX_FOREIGN_REPLIES: usize = 12 << 20;
/// Part of [`MAX_FOREIGN_REPLIES`] for the VMs of one user.
const MAX_REPLIES_OF_USER: usize = 4 << 20;
/// Time limit for the vCPUs to report their guest counters.
const VIEW_TIME: Duration = Duration::from_millis(500);
/// Interval at which the reports of guest counters are polled.
const VIEW_LOOK: Duration = Duration::from_millis(2);
/// Maximum length of a label value from a VM, in bytes.
const MAX_VALUE: usize = 200;
/// Maximum number of vCPUs of a VM in the metrics.
const MAX_VCPUS: usize = 256;
/// Maximum number of guest counters of a vCPU in the metrics.
const MAX_COUNTERS: usize = 64;
/// Maximum number of event series of a VM in the metrics.
const MAX_EVENTS: usize = 4096;
/// Maximum number of exit reasons of a vCPU in the metrics.
const MAX_KINDS: usize = 64;

/// A VM and its control socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScrapeTarget {
    /// Label of the VM, which is its name, followed by `@` and the user if the exporter runs as
    /// another user.
    pub label: String,
    /// Path of the control socket.
    pub socket: PathBuf,
    /// User ID of the owner of the socket directory or, for an observer socket, of the socket.
    pub owner: u32,
    /// `true` for an observer socket, which permits counting but no sampling.
    pub observed: bool,
}

/// The result of querying a VM.
#[derive(Debug)]
pub struct VmScrapeResult {
    /// Label of the VM.
    pub label: String,
    /// Metrics of the VM; `None` if the VM did not answer in time.
    pub snapshot: Option<MetricsSnapshot>,
    /// Duration of the query.
    pub took: Duration,
    /// Share of the memory budgets that `snapshot` occupies.
    pub held: Option<ReservedReplyBytes>,
}

/// Deadline and result channel of a query that a scrape has started.
struct ScrapeQuery {
    until: Instant,
    tell: Sender<VmScrapeResult>,
}

/// A VM that the exporter queries, with the state kept between scrapes.
struct ScrapedVm {
    target: ScrapeTarget,
    limits: ControlReplyLimits,
    back_off: ScrapeBackOff,
    /// State kept between scrapes. The query in progress holds the lock.
    state: Mutex<ScrapedVmState>,
}

#[derive(Default)]
struct ScrapedVmState {
    connection: Option<Connection>,
    /// Last error logged since the last valid answer.
    last_error: String,
}

/// State shared by all queries.
struct ScrapeShared {
    /// Events counted for the metrics of each VM, in perf's syntax.
    events: String,
    users: UserBackOffs,
    budgets: Budgets,
}

/// Memory budgets for replies.
struct Budgets {
    own: Arc<ReplyMemoryBudget>,
    foreign: Arc<ReplyMemoryBudget>,
    users: Mutex<BTreeMap<u32, Arc<ReplyMemoryBudget>>>,
}

impl Budgets {
    fn new() -> Self {
        let all = Arc::new(ReplyMemoryBudget::new(MAX_REPLIES, None));
        let part = |bytes| Arc::new(ReplyMemoryBudget::new(bytes, Some(all.clone())));
        Self {
            own: part(MAX_OWN_REPLIES),
            foreign: part(MAX_FOREIGN_REPLIES),
            users: Mutex::default(),
        }
    }

    /// Returns the budget for VMs of user `uid`.
    fn of_user(&self, uid: u32) -> Arc<ReplyMemoryBudget> {
        if is_trusted(uid) {
            return self.own.clone();
        }
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        users.retain(|other, budget| *other == uid || Arc::strong_count(budget) > 1);
        let new = || {
            Arc::new(ReplyMemoryBudget::new(
                MAX_REPLIES_OF_USER,
                Some(self.foreign.clone()),
            ))
        };
        users.entry(uid).or_insert_with(new).clone()
    }
}

/// Returns whether user `uid` is trusted, as root and the exporter's own user are.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == peer::own_uid()
}

/// All VMs on this host.
pub struct ExporterVmRegistry {
    shared: Arc<ScrapeShared>,
    /// Directory of observer sockets; `None` to search all known directories.
    dir: Option<PathBuf>,
    /// Users whose VMs are served; empty for all users.
    owners: Vec<u32>,
    /// VMs by label.
    vms: Mutex<BTreeMap<String, Arc<ScrapedVm>>>,
    /// Directories that have been reported as unreadable or ignored.
    reported_dirs: Mutex<HashSet<PathBuf>>,
}

impl ExporterVmRegistry {
    /// Creates the set of VMs to serve: the VMs with an observer socket in `dir` or, without `dir`,
    /// all VMs of the host.
    ///
    /// `events` is the list of events to count for each VM. If `owners` is not empty, only the VMs
    /// of these users are served.
    pub fn new(events: String, dir: Option<PathBuf>, owners: Vec<u32>) -> Self {
        let shared = ScrapeShared {
            events,
            users: UserBackOffs::default(),
            budgets: Budgets::new(),
        };
        Self {
            shared: Arc::new(shared),
            dir,
            owners,
            vms: Mutex::default(),
            reported_dirs: Mutex::default(),
        }
    }

    /// Returns the current VMs in order of their labels, and the number of directories that this
    /// user may not read.
    pub fn targets(&self) -> (Vec<ScrapeTarget>, usize) {
        match &self.dir {
            Some(dir) => (self.observed(dir), 0),
            None => self.everywhere(),
        }
    }

    fn is_served(&self, owner: u32) -> bool {
        self.owners.is_empty() || self.owners.contains(&owner)
    }

    /// Returns the VMs with an observer socket in `dir`. The label includes the owner, because any
    /// user can choose any name.
    fn observed(&self, dir: &Path) -> Vec<ScrapeTarget> {
        let found = socket_dir::observed_in(dir, MAX_VMS_OF_USER).unwrap_or_else(|e| {
            self.log_once(dir, &error_line(&e));
            Vec::new()
        });
        let own = peer::own_uid();
        let target = |socket: socket_dir::ObserverSocket| ScrapeTarget {
            label: vm_label(socket.name, socket.owner, own),
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

    fn everywhere(&self) -> (Vec<ScrapeTarget>, usize) {
        let places = SocketDirs::all_users();
        let own = peer::own_uid();
        let mut targets: BTreeMap<String, ScrapeTarget> = BTreeMap::new();
        for place in places
            .directories
            .iter()
            .filter(|place| self.is_served(place.owner))
        {
            for (name, socket) in self.listed(place.listed()) {
                let label = vm_label(name, place.owner, own);
                // The user's first directory takes precedence.
                if targets.len() < MAX_VMS {
                    targets.entry(label.clone()).or_insert(ScrapeTarget {
                        label,
                        socket,
                        owner: place.owner,
                        observed: false,
                    });
                }
            }
        }
        for dir in &places.closed {
            self.log_once(dir, "only its user or root may look for VMs there");
        }
        for dir in &places.squatted {
            self.log_once(
                dir,
                "passed by: it is another user's than its name says, or others may write there",
            );
        }
        (targets.into_values().collect(), places.closed.len())
    }

    fn listed(&self, listed: Result<Vec<(String, PathBuf)>, ControlSocketError>) -> Vec<(String, PathBuf)> {
        listed.unwrap_or_else(|e| {
            log::debug!("{}", error_line(&e));
            Vec::new()
        })
    }

    fn log_once(&self, dir: &Path, what: &str) {
        let mut told = self.reported_dirs.lock().unwrap_or_else(PoisonError::into_inner);
        // Bounds the log in case another user fills /tmp.
        if told.len() < MAX_VMS && told.insert(dir.to_owned()) {
            log::warn!("{}: {}", shown(&dir.display().to_string()), shown(what));
        }
    }

    /// Queries all `targets` concurrently. The result has no snapshot for a VM that does not answer
    /// within [`SCRAPE_TIME`] or is in back-off.
    pub fn query(&self, targets: &[ScrapeTarget]) -> Vec<VmScrapeResult> {
        let began = Instant::now();
        let until = began + SCRAPE_TIME;
        let (tell, told) = channel::<VmScrapeResult>();
        // By label, whether the scrape waits for the VM.
        let mut missing: BTreeMap<String, bool> = BTreeMap::new();
        let mut answered = Vec::new();
        // Time after which a query starts despite earlier ones in progress.
        let mut turn = began;
        for (n, target) in targets.iter().enumerate() {
            if n % MAX_QUERIES == 0 && n > 0 {
                turn += QUERY_TURN;
            }
            while missing.values().filter(|waited_for| **waited_for).count() >= MAX_QUERIES {
                let Ok(asked) = told.recv_timeout(turn.saturating_duration_since(Instant::now())) else {
                    break;
                };
                missing.remove(&asked.label);
                answered.push(asked);
            }
            let tell = tell.clone();
            match self.start_query(target, ScrapeQuery { until, tell }) {
                Some(waited_for) => _ = missing.insert(target.label.clone(), waited_for),
                None => answered.push(VmScrapeResult::empty(&target.label, Duration::ZERO)),
            }
        }
        drop(tell);
        let grace = Instant::now() + GRACE;
        loop {
            let end = match missing.values().any(|waited_for| *waited_for) {
                true => until,
                false => grace,
            };
            let Ok(asked) = told.recv_timeout(end.saturating_duration_since(Instant::now())) else {
                break;
            };
            missing.remove(&asked.label);
            answered.push(asked);
        }
        let took = began.elapsed();
        answered.extend(missing.keys().map(|label| VmScrapeResult::empty(label, took)));
        answered.sort_by(|a, b| a.label.cmp(&b.label));
        answered
    }

    /// Starts a query of the VM `target` on a new thread. Returns whether the scrape waits for the
    /// answer, or `None` if the VM is skipped.
    fn start_query(&self, target: &ScrapeTarget, query: ScrapeQuery) -> Option<bool> {
        let (label, now) = (&target.label, Instant::now());
        let mut vms = self.vms.lock().unwrap_or_else(PoisonError::into_inner);
        if vms.get(label).is_none_or(|vm| vm.target != *target) {
            let budget = self.shared.budgets.of_user(target.owner);
            let vm = ScrapedVm::new(target.clone(), budget);
            vms.insert(label.clone(), Arc::new(vm));
        }
        let vm = vms.get(label).filter(|vm| vm.back_off.is_due(now))?;
        // Besides the map, each query holds a reference.
        if Arc::strong_count(vm) > MAX_QUERIES_OF_VM {
            log::debug!("{label}: still busy with an earlier scrape");
            return None;
        }
        let by_user = is_trusted(target.owner) || self.shared.users.is_waited_for(target.owner, now);
        let waited_for = by_user && !vm.back_off.has_failed();
        let (vm, shared) = (vm.clone(), self.shared.clone());
        let thread = thread::Builder::new().name("vm".into());
        match thread.spawn(move || vm.query(&shared, &query)) {
            Ok(_) => Some(waited_for),
            Err(e) => {
                let what = format!("no thread for it: {e}");
                self.shared.users.warn(target.owner, label, &what);
                None
            }
        }
    }

    /// Disconnects from VMs that no longer exist.
    pub fn retain(&self, targets: &[ScrapeTarget]) {
        let labels: HashSet<&str> = targets.iter().map(|target| target.label.as_str()).collect();
        let mut vms = self.vms.lock().unwrap_or_else(PoisonError::into_inner);
        vms.retain(|label, _| labels.contains(label.as_str()));
    }
}

/// Returns the label of a VM, which is its name, followed by `@` and the user if the owner is
/// another user.
fn vm_label(name: String, owner: u32, own: u32) -> String {
    match owner == own {
        true => name,
        false => format!("{name}@{owner}"),
    }
}

impl VmScrapeResult {
    fn empty(label: &str, took: Duration) -> Self {
        Self {
            label: label.to_owned(),
            snapshot: None,
            took,
            held: None,
        }
    }
}

impl ScrapedVm {
    fn new(target: ScrapeTarget, budget: Arc<ReplyMemoryBudget>) -> Self {
        Self {
            target,
            limits: ControlReplyLimits {
                timeout: REPLY_TIMEOUT,
                max_bytes: MAX_REPLY,
                budget,
            },
            back_off: ScrapeBackOff::default(),
            state: Mutex::default(),
        }
    }

    /// Queries the VM and sends the result to the scrape.
    fn query(&self, shared: &ScrapeShared, query: &ScrapeQuery) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let ScrapedVmState {
            connection,
            last_error,
        } = &mut *state;
        let (target, began) = (&self.target, Instant::now());
        if began >= query.until {
            return;
        }
        let asked = Connection::snapshot(connection, target, shared, &self.limits, query.until);
        let (snapshot, held) = match asked {
            Ok((snapshot, held)) => {
                self.back_off.succeeded();
                last_error.clear();
                (Some(snapshot), held)
            }
            Err(e) => {
                *connection = None;
                let now = Instant::now();
                self.back_off.failed(now);
                if e.is_silence() {
                    shared.users.stalled(target.owner, now);
                }
                let line = shown(&error_line(&e));
                // Log a repeated error only once.
                if line != *last_error {
                    shared.users.warn(target.owner, &target.label, &line);
                    *last_error = line;
                }
                (None, None)
            }
        };
        // The scrape may have timed out.
        let _ = query.tell.send(VmScrapeResult {
            label: target.label.clone(),
            snapshot,
            took: began.elapsed(),
            held,
        });
    }
}

/// A connection to a VM. Its events count while the connection is open.
struct Connection {
    client: Client,
    opened: Vec<OpenedEvent>,
    /// Share of the memory budgets that `opened` occupies.
    _held: Option<ReservedReplyBytes>,
}

impl Connection {
    fn open(
        target: &ScrapeTarget,
        shared: &ScrapeShared,
        limits: &ControlReplyLimits,
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
                    for (name, why) in snapshot::remove_duplicates(&mut opened) {
                        log::info!(
                            "{}: cannot count '{}': {}",
                            target.label,
                            shown(&name),
                            shown(&why)
                        );
                    }
                    let () = client.call(request::Enable)?;
                }
                // The VM's own metrics are still useful.
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

    /// Reads the metrics of the VM over `connection`, which is opened if necessary. Returns them
    /// with the part of the memory budgets that they occupy.
    fn snapshot(
        connection: &mut Option<Self>,
        target: &ScrapeTarget,
        shared: &ScrapeShared,
        limits: &ControlReplyLimits,
        until: Instant,
    ) -> Result<(MetricsSnapshot, Option<ReservedReplyBytes>), ClientError> {
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
        let snapshot = sanitize(MetricsSnapshot {
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

/// Returns the guest-programmed counters of the vCPUs that report them before `until`.
fn views(client: &mut Client, until: Instant) -> Result<Vec<control_api::protocol::VcpuView>, ClientError> {
    let SnapshotId { generation } = client.call(request::GuestView)?;
    let mut pause = VIEW_LOOK;
    loop {
        let seen: VmGuestCounters = client.call(request::GuestViewResult { generation })?;
        if seen.complete || Instant::now() + pause >= until {
            return Ok(seen.vcpus);
        }
        thread::sleep(pause);
        pause *= 2;
    }
}

/// Sanitizes the metrics of an untrusted VM: limits the number of series, removes duplicates and
/// truncates values.
fn sanitize(mut vm: MetricsSnapshot) -> MetricsSnapshot {
    let short = |text: &mut String| {
        if let Some((end, _)) = text.char_indices().find(|(at, _)| *at >= MAX_VALUE) {
            text.truncate(end);
        }
    };
    for text in [&mut vm.vm.version, &mut vm.vm.pmu, &mut vm.vm.guest] {
        short(text);
    }
    if let Some(settings) = &mut vm.vm.settings {
        let texts = [&mut settings.backing, &mut settings.share, &mut settings.filter];
        texts.into_iter().for_each(short);
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
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use control_api::counts::VcpuCounts;
    use control_api::protocol::{EventReading, PROTOCOL, VmInfo};
    use serde_json::json;

    use super::*;

    /// A VM is queried even if more VMs stall than a scrape queries at the same time.
    #[test]
    fn stalled_vms_do_not_exclude_others() {
        let dir = tempfile::tempdir().unwrap();
        let bind = |name: &str| UnixListener::bind(dir.path().join(format!("{name}.look"))).unwrap();
        // The kernel completes connections to these sockets, but no thread accepts them.
        let stalled: Vec<_> = (0..2 * MAX_QUERIES).map(|n| bind(&format!("{n:03}"))).collect();
        let answering = bind("z");
        thread::spawn(move || {
            let (stream, _) = answering.accept().unwrap();
            let info = json!(VmInfo {
                protocol: PROTOCOL,
                pmu: "off".into(),
                ..VmInfo::default()
            });
            let requests = BufReader::new(&stream).lines();
            for ((_, id), reply) in requests.zip(1..).zip([info.clone(), info, json!([])]) {
                writeln!(&stream, "{}", json!({"id": id, "ok": reply})).unwrap();
            }
        });
        let vms = ExporterVmRegistry::new(String::new(), Some(dir.path().to_owned()), Vec::new());
        let (targets, _) = vms.targets();
        assert_eq!(targets.len(), stalled.len() + 1);
        let asked = vms.query(&targets).into_iter();
        let up: Vec<_> = asked.filter(|a| a.snapshot.is_some()).map(|a| a.label).collect();
        assert_eq!(up, ["z"]);
    }

    /// Duplicate, overlong and excess values are removed from the metrics of a VM.
    #[test]
    fn vm_metrics_are_bounded() {
        let vm = VmInfo {
            version: "1".into(),
            guest: "\u{fc}".repeat(1000),
            ..VmInfo::default()
        };
        let (event, reading) = (OpenedEvent::default(), EventReading::default());
        let vcpu = |n: u32| VcpuCounts {
            vcpu: n % 300,
            kinds: (0..100).map(|kind| (kind.to_string(), 1)).collect(),
            ..VcpuCounts::default()
        };
        let of = sanitize(MetricsSnapshot {
            label: "a".into(),
            vm,
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
