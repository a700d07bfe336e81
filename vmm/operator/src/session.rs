//! Sessions with a running VM, for profilers: counting and sampling without a command line.
//!
//! A session owns a connection to the VM's control socket and the events opened over this
//! connection. The VM closes the events when the session is dropped or its process exits. Counting
//! does not disturb the guest. Each sample stops its vCPU for some microseconds.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use control_api::client::{Client, ClientError, REPLY_TIMEOUT};
use control_api::protocol::{OpenedEvent, SamplingParams};
use control_api::request;
use guest_profile::export::{
    EventSamplingRate, NO_PID, Profile, ProfileMetadata, ProfileSample, ProfileSymbol, TaskName, frames,
};
use guest_profile::sample::SampleRawData;
use kernel_images::build_id::BuildId;
use kernel_images::symbols::KernelSymbols;
use perf_core::record::{DecodedRecord, Sample as RingSample};

use crate::kernel_map::kernel_map;
pub use crate::sampling::SessionError;
use crate::sampling::{
    EventIds, VcpuRing, check_sampling_support, event_info, sample_mappings, wait_for_kernel,
};
use crate::vendor;

/// Size of the ring of each vCPU, in pages.
const RING_PAGES: u32 = 256;
/// Time limit for the VM to find the guest kernel.
const KERNEL_PATIENCE: Duration = Duration::from_secs(60);
/// Interval at which the search for the guest kernel is polled.
const KERNEL_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Connects to the VM of this user with the given name or, without a name, to the only VM.
///
/// # Errors
/// Returns a [`ClientError`] if no such VM exists, the choice is ambiguous, or the handshake fails.
pub fn connect(name: Option<&str>) -> Result<Client, ClientError> {
    Client::connect(name)
}

/// Connects to the VM with the control socket `socket`.
///
/// # Errors
/// Returns a [`ClientError`] if the connection or the handshake fails.
pub fn connect_at(socket: &Path) -> Result<Client, ClientError> {
    Client::connect_at(socket, None, REPLY_TIMEOUT)
}

/// Count of one event on all vCPUs of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmEventCount {
    /// Name of the event, as in the event list.
    pub event: String,
    /// Count since the start of the session, scaled to the time enabled; `None` if the event was
    /// not counted.
    pub value: Option<u64>,
    /// Time enabled, in nanoseconds, summed over the vCPUs.
    pub enabled_ns: u64,
    /// Time running, in nanoseconds, summed over the vCPUs.
    pub running_ns: u64,
    /// Reason the VM cannot count the event; `None` if the event is supported.
    pub unsupported: Option<String>,
}

/// Events that are counted on all vCPUs of a VM, including those plugged in later.
#[derive(Debug)]
pub struct CountingSession {
    client: Client,
    opened: Vec<OpenedEvent>,
}

impl CountingSession {
    /// Starts counting `events`, a list in perf's syntax such as `cycles,instructions:u`.
    ///
    /// # Errors
    /// Returns [`SessionError::Events`] if the list is invalid, and [`SessionError::Client`] if the
    /// VM refuses it.
    pub fn start(mut client: Client, events: &str) -> Result<Self, SessionError> {
        let opened = client.call(request::Open {
            events: vendor::resolve_vendor_events(events)?,
            vcpus: None,
            whole: true,
            sampling: None,
        })?;
        let () = client.call(request::Enable)?;
        Ok(Self { client, opened })
    }

    /// Returns the counts since the start, in the order of the list.
    ///
    /// # Errors
    /// Returns [`SessionError::Client`] if the VM has terminated or does not reply.
    pub fn read(&mut self) -> Result<Vec<VmEventCount>, SessionError> {
        let readings = self.client.call(request::Read)?;
        let count = |opened: &OpenedEvent| {
            let reading = readings.iter().find(|r| Some(r.handle) == opened.handle);
            VmEventCount {
                event: opened.name.clone(),
                value: reading.and_then(|r| r.estimate),
                enabled_ns: reading.map_or(0, |r| r.enabled_ns),
                running_ns: reading.map_or(0, |r| r.running_ns),
                unsupported: opened.unsupported.clone(),
            }
        };
        Ok(self.opened.iter().map(count).collect())
    }
}

/// Events that are sampled on all vCPUs of a VM, with the guest's call chains.
///
/// The samples accumulate in memory. A profiler that runs indefinitely finishes the session at
/// intervals and starts another.
pub struct SamplingSession {
    client: Client,
    sampling: SamplingParams,
    rings: Vec<VcpuRing>,
    ids: EventIds,
    /// Names of the sampled tasks by thread ID.
    tasks: HashMap<u32, String>,
    kernel: Option<KernelSymbols>,
    build_id: Option<BuildId>,
    /// `true` if the guest has a single address space. The kernel's symbols then cover all
    /// addresses.
    flat: bool,
    profile: Profile,
}

impl SamplingSession {
    /// Starts sampling `events`, a list in perf's syntax such as `cycles`. Waits up to one minute
    /// until the VM has found the guest's kernel, because the first samples would otherwise have no
    /// call chains.
    ///
    /// # Errors
    /// Returns [`SessionError::Events`] if the list is invalid, [`SessionError::NotSampled`] if the
    /// VM cannot sample an event, and [`SessionError::Client`] or [`SessionError::Ring`] if the VM
    /// refuses a request or its ring cannot be mapped.
    pub fn start(mut client: Client, events: &str, rate: EventSamplingRate) -> Result<Self, SessionError> {
        let (rate, frequency) = match rate {
            EventSamplingRate::FrequencyHz(hz) => (hz, true),
            EventSamplingRate::Period(period) => (period, false),
        };
        let sampling = SamplingParams {
            rate,
            frequency,
            callchain: true,
            chain_every: 1,
            ..SamplingParams::default()
        };
        let opened = client.call(request::Open {
            events: vendor::resolve_vendor_events(events)?,
            vcpus: None,
            whole: false,
            sampling: Some(sampling),
        })?;
        check_sampling_support(&opened)?;
        wait_for_kernel::<ClientError>(&mut client, KERNEL_PATIENCE, || {
            std::thread::sleep(KERNEL_POLL_INTERVAL);
            Ok(())
        })?;
        let (symbols, text) = client.symbols()?;
        let meta = ProfileMetadata {
            thread_switches: false,
            hostname: client.info().name.clone(),
            os_release: symbols.release.unwrap_or_default(),
            vcpus: client.info().max_vcpus,
            command: std::env::args().collect(),
            ..ProfileMetadata::default()
        };
        let mut session = Self {
            client,
            sampling,
            rings: Vec::new(),
            ids: EventIds::default(),
            tasks: HashMap::new(),
            // Ignore a parse error, because the VM may have no kernel symbols.
            kernel: KernelSymbols::parse_text(&text).ok(),
            build_id: symbols.build_id.as_deref().and_then(BuildId::from_hex),
            flat: symbols.flat,
            profile: Profile::new(meta, Vec::new()),
        };
        session.add(&opened)?;
        let () = session.client.call(request::Enable)?;
        Ok(session)
    }

    /// Receives the samples taken since the last call and returns their number. Also adds the vCPUs
    /// that were plugged in since the last call. Call this function several times per second,
    /// because samples are lost when a ring is full.
    ///
    /// # Errors
    /// Returns [`SessionError::Client`] if the VM has terminated or does not reply. The samples
    /// taken before are in the profile.
    pub fn receive(&mut self) -> Result<usize, SessionError> {
        let before = self.profile.len();
        self.drain();
        for joined in self.client.call(request::Joined)? {
            if let Some(why) = &joined.refused {
                log::warn!("vCPU {} came and is not sampled: {why}", joined.vcpu);
                continue;
            }
            // The ring of a former vCPU with the same index was drained above.
            self.rings.retain(|ring| ring.info.vcpu != joined.vcpu);
            self.add(&joined.events)?;
        }
        Ok(self.profile.len() - before)
    }

    /// Returns the samples received so far.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Stops sampling, receives the last samples, and returns the profile with the kernel's symbols
    /// that its samples need. Succeeds if the VM has terminated in the meantime.
    ///
    /// # Errors
    /// Returns [`SessionError::Client`] if the VM does not reply.
    pub fn finish(mut self) -> Result<Profile, SessionError> {
        match self.client.call(request::Disable) {
            Err(e) if !e.is_gone() => return Err(e.into()),
            _ => {}
        }
        self.drain();
        if let Ok(losses) = self.client.call(request::RingLosses) {
            self.profile.lost += losses.iter().map(|loss| loss.lost).sum::<u64>();
        }
        if let Some(kernel) = &self.kernel {
            self.profile.kernel = kernel_map(kernel, self.build_id);
            self.profile.symbols = symbols_of(&self.profile, kernel, self.flat);
        }
        Ok(self.profile)
    }

    /// Adds opened events and maps the rings of their vCPUs.
    fn add(&mut self, opened: &[OpenedEvent]) -> Result<(), SessionError> {
        let first = self.ids.add(opened).into_iter();
        let events = first.map(|o| event_info(o, &self.sampling));
        self.profile.events.extend(events);
        let rings = VcpuRing::open_all(&mut self.client, opened, RING_PAGES, false)?;
        self.rings.extend(rings);
        Ok(())
    }

    /// Moves the samples of all rings into the profile.
    fn drain(&mut self) {
        let mut rings = std::mem::take(&mut self.rings);
        for ring in &mut rings {
            let drained = ring.drain(log::Level::Debug, |info, record| {
                match record {
                    Some(DecodedRecord::Sample(sample)) => {
                        self.push(&sample, info.clock_offset_ns.unwrap_or(0))
                    }
                    Some(DecodedRecord::Lost(lost)) => self.profile.lost += lost.lost,
                    _ => {}
                }
                Ok::<(), Infallible>(())
            });
            drained.unwrap_or_else(|never| match never {});
        }
        self.rings = rings;
    }

    /// Adds a sample to the profile, and the names and mappings received with the sample.
    fn push(&mut self, sample: &RingSample<'_>, clock_offset_ns: u64) {
        let raw = SampleRawData::decode(sample.raw).unwrap_or_default();
        let time_ns = sample.time_ns.saturating_add(clock_offset_ns);
        let (pid, tid) = raw.task.map_or((NO_PID, NO_PID), |(pid, tid, _)| (pid, tid));
        if let Some((.., comm)) = raw.task {
            let comm = task_name(&comm);
            if self.tasks.get(&tid) != Some(&comm) {
                self.tasks.insert(tid, comm.clone());
                self.profile.tasks.push(TaskName {
                    time_ns,
                    pid,
                    tid,
                    comm,
                });
            }
        }
        let mappings = sample_mappings(sample.raw, pid, time_ns);
        self.profile.mappings.extend(mappings);
        let chain: Vec<u64> = sample.callchain.iter().collect();
        self.profile.push(&ProfileSample {
            time_ns,
            vcpu: sample.cpu,
            pid,
            tid,
            cpl: raw.cpl,
            ip: sample.ip,
            cr3: raw.cr3,
            period: sample.period,
            event_id: self.ids.of_stream(sample.stream_id).unwrap_or(0),
            ends: raw.ends,
            branches: &[],
            chain: &chain,
        });
    }
}

/// Returns the kernel symbols to which the samples of a profile refer. If the guest has one address
/// space (`flat`), these symbols cover all addresses.
fn symbols_of(profile: &Profile, kernel: &KernelSymbols, flat: bool) -> Vec<ProfileSymbol> {
    let mut found = BTreeMap::new();
    for sample in profile.samples() {
        for frame in frames(&sample).filter(|frame| flat || frame.kernel) {
            let address = frame.instruction();
            let symbol = if flat {
                kernel.resolve_flat(address)
            } else {
                kernel.resolve(address)
            };
            if let Some((symbol, _)) = symbol {
                let pid = (!frame.kernel).then_some(NO_PID);
                found
                    .entry((pid, symbol.address))
                    .or_insert_with(|| ProfileSymbol {
                        start: symbol.address,
                        end: kernel.end_of(symbol.address),
                        name: symbol.name.to_owned(),
                        pid,
                    });
            }
        }
    }
    found.into_values().collect()
}

/// Returns a task name in printable form, because the guest controls the name.
pub(crate) fn task_name(comm: &[u8; 16]) -> String {
    comm.iter()
        .take_while(|&&b| b != 0)
        .map(|&b| {
            if b == b' ' || b.is_ascii_graphic() {
                b as char
            } else {
                '?'
            }
        })
        .collect()
}
