//! Connections of the exporter and their limits.
//!
//! Each connection has its own thread and serves one request. The head of the request is limited to
//! [`http::MAX_HEAD`] bytes and `HEAD_TIME`. The transmission of the reply is limited to
//! `REPLY_TIME`. If `MAX_CONNECTIONS` connections are open, a new connection replaces the oldest
//! one whose request has not been received yet.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::access::AccessRules;
use super::http::{self, HostHeader, HttpReply, HttpRequest, OPENMETRICS, TEXT};
use super::listen::HttpClientStream;
use super::profile::RunningProfiles;
use super::snapshot::{self, MetricFamilies, MetricLabels, MetricsSnapshot};
use super::vms::{ExporterVmRegistry, ScrapeTarget};

/// Maximum number of concurrent connections.
const MAX_CONNECTIONS: usize = 64;
/// Time limit for the reception of a request head.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// Time limit for the transmission of a reply.
const REPLY_TIME: Duration = Duration::from_secs(10);
/// Time for which input is discarded after the reply, because unread input would cause a TCP reset
/// that could destroy the reply.
const LINGER_TIME: Duration = Duration::from_secs(1);
/// Maximum amount of input discarded after the reply, in bytes.
const LINGER_BYTES: usize = 256 << 10;
/// Maximum age of a cached scrape of all VMs.
const MAX_SCRAPE_AGE: Duration = Duration::from_millis(500);

/// The state of the exporter, shared by all connections.
pub struct Exporter {
    vms: ExporterVmRegistry,
    access: AccessRules,
    profiles: RunningProfiles,
    /// Address of the listening socket, for requests without a `Host` field.
    address: String,
    slots: Mutex<HttpConnectionSlots>,
    /// The last scrape of all VMs and its time. Concurrent scrapes wait for the lock and share the
    /// result.
    text: Mutex<Option<(Instant, Arc<Vec<u8>>)>>,
    scrapes: AtomicU64,
    refused: AtomicU64,
    /// Set when the exporter exits.
    stop: AtomicBool,
}

/// The open connections of the exporter.
#[derive(Default)]
struct HttpConnectionSlots {
    next: u64,
    /// Open connections in order of arrival. The value is `None` once the request has been
    /// received, because the connection then cannot be replaced.
    taken: BTreeMap<u64, Option<HttpClientStream>>,
}

/// The slot of one connection, released on drop.
struct HttpConnectionSlot {
    exporter: Arc<Exporter>,
    id: u64,
}

impl HttpConnectionSlot {
    /// Marks the request of the connection as received. A new connection then cannot replace this
    /// one.
    fn is_served(&self) {
        let mut slots = self.exporter.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.taken.insert(self.id, None);
    }
}

impl Drop for HttpConnectionSlot {
    fn drop(&mut self) {
        let mut slots = self.exporter.slots.lock().unwrap_or_else(PoisonError::into_inner);
        slots.taken.remove(&self.id);
    }
}

impl Exporter {
    /// Creates an exporter at `address` that serves the clients allowed by `access`.
    pub fn new(vms: ExporterVmRegistry, access: AccessRules, address: String) -> Self {
        Self {
            vms,
            access,
            profiles: RunningProfiles::default(),
            address,
            slots: Mutex::default(),
            text: Mutex::default(),
            scrapes: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        }
    }

    /// Requests the termination of all connections.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Returns the number of open connections.
    pub fn connections(&self) -> usize {
        self.slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .taken
            .len()
    }

    /// Serves a connection on a new thread, or rejects the connection if the limit is reached.
    pub fn admit(self: &Arc<Self>, stream: HttpClientStream) {
        let Some(slot) = self.slot(&stream) else {
            self.refused.fetch_add(1, Ordering::Relaxed);
            let busy = HttpReply::refusal(503, "too many connections").with_retry_after(1);
            // The short deadline suffices for a reply that fits into the socket buffer.
            let (mut stream, until) = (stream, Instant::now() + Duration::from_millis(1));
            let _ = stream.write_until(&[busy.head().as_slice(), &busy.body].concat(), until);
            stream.shut(Shutdown::Write);
            // Closing a socket with unread input would reset the connection and lose the reply.
            let _ = stream.read_until(&mut [0; 4096], until);
            return;
        };
        let serve = move || slot.exporter.clone().serve(stream, &slot);
        if let Err(e) = thread::Builder::new().name("http".into()).spawn(serve) {
            log::warn!("cannot start the thread of a connection: {e}");
        }
    }

    fn slot(self: &Arc<Self>, stream: &HttpClientStream) -> Option<HttpConnectionSlot> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.taken.len() >= MAX_CONNECTIONS {
            let (id, oldest) = slots.taken.iter().find_map(|(id, s)| Some((*id, s.as_ref()?)))?;
            oldest.shut(Shutdown::Both);
            slots.taken.remove(&id);
        }
        let id = slots.next;
        slots.next += 1;
        slots.taken.insert(id, Some(stream.try_clone().ok()?));
        Some(HttpConnectionSlot {
            exporter: self.clone(),
            id,
        })
    }

    fn serve(&self, mut stream: HttpClientStream, slot: &HttpConnectionSlot) {
        let origin = stream.origin();
        let (Some(parsed), Ok(origin)) = (head(&mut stream), origin) else {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return;
        };
        slot.is_served();
        let head_only = parsed.as_ref().is_ok_and(|request| request.head_only);
        let reply = match parsed {
            Ok(request) => match self.access.check(&request, origin) {
                Ok(()) => self.answer(&request, &stream),
                Err(refusal) => refusal,
            },
            Err(refusal) => refusal,
        };
        if reply.status != 200 {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        let until = Instant::now() + REPLY_TIME;
        let body: &[u8] = if head_only { &[] } else { &reply.body };
        let sent = stream.write_until(&reply.head(), until);
        if sent.and_then(|()| stream.write_until(body, until)).is_err() {
            return;
        }
        stream.shut(Shutdown::Write);
        let (until, mut chunk, mut read) = (Instant::now() + LINGER_TIME, [0; 4096], 0);
        while let Ok(n @ 1..) = stream.read_until(&mut chunk, until) {
            read += n;
            if read > LINGER_BYTES {
                break;
            }
        }
    }

    fn answer(&self, request: &HttpRequest, stream: &HttpClientStream) -> HttpReply {
        match request.path.as_str() {
            "/metrics" => self.metrics(request),
            "/debug/pprof/profile" => match self.one(request) {
                // HEAD requests do not produce a profile.
                Ok(target) if target.observed => {
                    let why = "the exporter looks on at this VM (--vms), and samples need its control socket: run an exporter of its user";
                    HttpReply::refusal(403, why)
                }
                Ok(_) if request.head_only => HttpReply::ok(TEXT, Vec::new()),
                Ok(target) => self.profiles.make(request, &target, stream, &self.stop),
                Err(refusal) => refusal,
            },
            "/sd" => self.discovery(request),
            "/healthz" => HttpReply::ok(TEXT, b"ok\n".to_vec()),
            _ => HttpReply::refusal(404, "there are /metrics, /debug/pprof/profile, /sd and /healthz"),
        }
    }

    /// Returns the requested VM, or the only VM if the request does not name a VM.
    fn one(&self, request: &HttpRequest) -> Result<ScrapeTarget, HttpReply> {
        let (targets, _) = self.vms.targets();
        match request.parameter("vm") {
            Some(label) => {
                let found = targets.into_iter().find(|target| target.label == label);
                found.ok_or_else(|| {
                    HttpReply::refusal(404, "no VM of that name has a socket that can be reached")
                })
            }
            None => match <[ScrapeTarget; 1]>::try_from(targets) {
                Ok([only]) => Ok(only),
                Err(_) => Err(HttpReply::refusal(400, "name a VM: ?vm=NAME; /sd lists them")),
            },
        }
    }

    fn metrics(&self, request: &HttpRequest) -> HttpReply {
        if request.parameter("vm").is_some() {
            return match self.one(request) {
                Ok(target) => HttpReply::ok(OPENMETRICS, self.encode_metrics(&[target], None).into_bytes()),
                Err(refusal) => refusal,
            };
        }
        // Concurrent scrapes share one result.
        let mut last = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        // An older text is dropped before the next one is made.
        let fresh = last.take().filter(|(made, _)| made.elapsed() < MAX_SCRAPE_AGE);
        let (made, text) = fresh.unwrap_or_else(|| {
            let (targets, closed) = self.vms.targets();
            self.vms.retain(&targets);
            let text = self.encode_metrics(&targets, Some(closed)).into_bytes();
            (Instant::now(), text.into())
        });
        *last = Some((made, text.clone()));
        HttpReply::ok(OPENMETRICS, text)
    }

    /// Queries the VMs `targets`, and returns their metrics as text. For a scrape of all VMs,
    /// `closed` is the number of directories that cannot be read.
    fn encode_metrics(&self, targets: &[ScrapeTarget], closed: Option<usize>) -> String {
        let asked = self.vms.query(targets);
        let mut own = MetricFamilies::default();
        let of_vm = |label: &str| -> MetricLabels { vec![("vm", label.to_owned())] };
        let up = |snapshot: &Option<MetricsSnapshot>| if snapshot.is_some() { 1.0 } else { 0.0 };
        own.gauges(
            "exporter_vm_up",
            "1 if the VM said what it counts, 0 if it did not respond in time.",
            None,
            asked.iter().map(|a| (of_vm(&a.label), up(&a.snapshot))).collect(),
        );
        own.gauges(
            "exporter_vm_scrape",
            "How long the VM took to say what it counts.",
            Some(snapshot::seconds()),
            asked
                .iter()
                .map(|a| (of_vm(&a.label), a.took.as_secs_f64()))
                .collect(),
        );
        if let Some(closed) = closed {
            let help = "Socket directories that the exporter may not read.";
            own.gauges(
                "exporter_closed_places",
                help,
                None,
                vec![(vec![], closed as f64)],
            );
            let one = |n: &AtomicU64| vec![(vec![], n.load(Ordering::Relaxed))];
            self.scrapes.fetch_add(1, Ordering::Relaxed);
            own.counts(
                "exporter_scrapes",
                "Times that all VMs were asked.",
                one(&self.scrapes),
            );
            let help = "Connections that were refused or got an error response.";
            own.counts("exporter_refused", help, one(&self.refused));
            own.counts(
                "exporter_profiles",
                "Profiles that were made.",
                one(&self.profiles.made),
            );
            let help = "Profiles that were refused or not completed.";
            own.counts("exporter_profiles_failed", help, one(&self.profiles.failed));
        }
        // The budget shares are held until the text is complete.
        let (snapshots, _held): (Vec<_>, Vec<_>) = asked.into_iter().map(|a| (a.snapshot, a.held)).unzip();
        snapshot::encode(own, snapshots.into_iter().flatten())
    }

    /// Returns the VMs in the format of Prometheus' HTTP service discovery.
    fn discovery(&self, request: &HttpRequest) -> HttpReply {
        let here = match &request.host {
            HostHeader::Named(host) => host,
            HostHeader::Absent | HostHeader::Invalid => &self.address,
        };
        let (targets, _) = self.vms.targets();
        let list: Vec<_> = targets
            .iter()
            .map(|target| {
                json!({
                    "targets": [here],
                    "labels": {
                        "__param_vm": target.label,
                        "__meta_perfvisor_vm": target.label,
                        "__meta_perfvisor_user": target.owner.to_string(),
                    },
                })
            })
            .collect();
        HttpReply::ok(
            "application/json",
            serde_json::Value::from(list).to_string().into_bytes(),
        )
    }
}

/// Reads the head of a request. Returns the error reply to an invalid request, or `None` if the
/// client has disconnected.
fn head(stream: &mut HttpClientStream) -> Option<Result<HttpRequest, HttpReply>> {
    let until = Instant::now() + HEAD_TIME;
    let (mut bytes, mut chunk) = (Vec::new(), [0; 2048]);
    loop {
        match stream.read_until(&mut chunk, until) {
            Ok(0) => return None,
            Ok(n) => bytes.extend_from_slice(&chunk[..n]),
            Err(e) if e.kind() == std::io::ErrorKind::TimedOut && !bytes.is_empty() => {
                return Some(Err(HttpReply::refusal(408, "the request took too long to come")));
            }
            Err(_) => return None,
        }
        if let Some(parsed) = http::parse(&bytes) {
            return Some(parsed);
        }
    }
}
