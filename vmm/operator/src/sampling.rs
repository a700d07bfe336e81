//! Sampling of a running VM: the rings of the vCPUs, event IDs, and the search for the guest's
//! kernel. Shared by [`crate::session`] and the commands `record` and `top`.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use control_api::client::{Client, ClientError};
use control_api::protocol::{KernelInfo, KernelState, OpenedEvent, SampleRingInfo, SamplingParams};
use control_api::request;
use guest_profile::export::{EventSamplingRate, FileMapping, SampledEventInfo};
use guest_profile::sample::SampleRawData;
use perf_core::record::{DecodedRecord, RecordFormat};
use perf_core::ring::{RingReadError, RingReader};
use perf_core::{SampleType, error_line};

use crate::vendor::EventNameError;

/// Maximum number of records read from a ring per call. A vCPU may write samples as fast as this
/// program reads them.
const MAX_RECORDS: usize = 100_000;

/// Errors of counting and sampling sessions.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The VM cannot be reached, refused a request, or has ended.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The event list is invalid or contains an unknown name.
    #[error(transparent)]
    Events(#[from] EventNameError),
    /// The VM cannot sample an event.
    #[error("cannot sample '{event}': {why}")]
    NotSampled {
        /// Name of the event.
        event: String,
        /// Reason that the VM gave.
        why: String,
    },
    /// The ring of a vCPU cannot be mapped.
    #[error("the ring of vCPU {vcpu}")]
    Ring {
        /// vCPU number.
        vcpu: u32,
        /// Error of mapping the ring.
        #[source]
        source: RingReadError,
    },
}

/// Checks that all events of a list support sampling.
pub(crate) fn check_sampling_support(opened: &[OpenedEvent]) -> Result<(), SessionError> {
    match opened.iter().find_map(|o| Some((o, o.unsupported.as_ref()?))) {
        None => Ok(()),
        Some((event, why)) => Err(SessionError::NotSampled {
            event: event.name.clone(),
            why: why.clone(),
        }),
    }
}

/// Polls until the VM has found the guest's kernel or given up, or until `patience` has passed.
/// Calls `pause` between polls.
pub(crate) fn wait_for_kernel<E: From<ClientError>>(
    client: &mut Client,
    patience: Duration,
    mut pause: impl FnMut() -> Result<(), E>,
) -> Result<KernelInfo, E> {
    let until = Instant::now() + patience;
    loop {
        let info = client.call(request::Kernel)?;
        if info.state != KernelState::Looking || Instant::now() >= until {
            return Ok(info);
        }
        pause()?;
    }
}

/// The mapped sample ring of a vCPU.
pub(crate) struct VcpuRing {
    reader: RingReader,
    /// Description of the ring, as sent by the VM.
    pub(crate) info: SampleRingInfo,
    overwrite: bool,
}

impl VcpuRing {
    /// Opens the rings of the vCPUs on which the events `opened` are sampled.
    pub(crate) fn open_all(
        client: &mut Client,
        opened: &[OpenedEvent],
        pages: u32,
        overwrite: bool,
    ) -> Result<Vec<Self>, SessionError> {
        let vcpus: BTreeSet<u32> = opened.iter().filter_map(|o| o.vcpu).collect();
        let rings = vcpus.into_iter().map(|vcpu| {
            let call = request::Ring {
                vcpu,
                pages,
                overwrite,
            };
            let (info, memfd): (SampleRingInfo, File) = client.call_with_file(call)?;
            let reader =
                RingReader::map(memfd.as_fd()).map_err(|source| SessionError::Ring { vcpu, source })?;
            Ok(Self {
                reader,
                info,
                overwrite,
            })
        });
        rings.collect()
    }

    /// Passes each new record of the ring to `take`. A damaged record is logged and passed as
    /// `None`. If the ring itself is damaged, logs this with `level`, passes `None`, and stops
    /// reading the ring.
    pub(crate) fn drain<E>(
        &mut self,
        level: log::Level,
        mut take: impl FnMut(&SampleRingInfo, Option<DecodedRecord<'_>>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Self {
            reader,
            info,
            overwrite,
        } = self;
        let format = RecordFormat {
            sample_type: SampleType::from_bits_truncate(info.sample_type),
            ..RecordFormat::default()
        };
        for _ in 0..MAX_RECORDS {
            let record = match reader.next_record() {
                Ok(Some(raw)) => DecodedRecord::decode(raw, format),
                Ok(None) => break,
                // A ring in overwrite mode loses its oldest records. The reader continues in the
                // newer half of the ring.
                Err(RingReadError::Overrun { bytes }) if *overwrite => {
                    log::debug!("{bytes} bytes of vCPU {} were overwritten", info.vcpu);
                    continue;
                }
                Err(e) => {
                    log::log!(level, "the ring of vCPU {}: {}", info.vcpu, error_line(&e));
                    return take(info, None);
                }
            };
            let damage = |e| log::debug!("a record of vCPU {}: {}", info.vcpu, error_line(&e));
            take(info, record.map_err(damage).ok())?;
        }
        Ok(())
    }
}

/// IDs of the events of a profile. An event has the same ID on all vCPUs, which is its ID on the
/// first vCPU.
#[derive(Default)]
pub(crate) struct EventIds {
    /// ID of each event in the profile, by stream ID. An event has a different stream ID on each
    /// vCPU.
    by_stream: HashMap<u64, u64>,
    /// ID of each event in the profile, by position in the event list.
    listed: HashMap<u32, u64>,
}

impl EventIds {
    /// Adds opened events. Returns the events whose position in the event list is new, one per
    /// position.
    pub(crate) fn add<'o>(&mut self, opened: &'o [OpenedEvent]) -> Vec<&'o OpenedEvent> {
        let mut first = Vec::new();
        for o in opened {
            let id = *self.listed.entry(o.index).or_insert_with(|| {
                first.push(o);
                o.id
            });
            self.by_stream.insert(o.id, id);
        }
        first
    }

    /// Returns the ID of the event with the stream ID `stream_id`.
    pub(crate) fn of_stream(&self, stream_id: u64) -> Option<u64> {
        self.by_stream.get(&stream_id).copied()
    }
}

/// Returns the description of a sampled event.
pub(crate) fn event_info(opened: &OpenedEvent, sampling: &SamplingParams) -> SampledEventInfo {
    SampledEventInfo {
        name: opened.name.clone(),
        type_: opened.kind,
        config: opened.config,
        rate: match sampling.frequency {
            true => EventSamplingRate::FrequencyHz(sampling.rate),
            false => EventSamplingRate::Period(sampling.rate),
        },
        branch_filter: sampling.branches.map_or(0, |stacks| stacks.filter),
        has_chains: sampling.callchain,
        id: opened.id,
    }
}

/// Returns the mappings of process `pid` that the data `raw` of a sample contains. The mappings are
/// valid from `time_ns` on.
pub(crate) fn sample_mappings(raw: &[u8], pid: u32, time_ns: u64) -> impl Iterator<Item = FileMapping> {
    SampleRawData::mappings(raw).map(move |mapping| FileMapping {
        time_ns,
        pid,
        start: mapping.start,
        len: mapping.len,
        file_offset: mapping.file_offset,
        path: mapping.path.to_owned(),
        build_id: SampleRawData::build_id(raw, mapping.start),
    })
}
