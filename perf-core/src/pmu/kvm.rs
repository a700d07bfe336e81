//! The `kvm` driver: events that read KVM's binary statistics.
//!
//! KVM provides one statistics file descriptor per VM and one per vCPU (`KVM_GET_STATS_FD`, Linux
//! 5.14). The VMM passes them in as [`KvmStatsFile`]s; this module needs no other KVM interface.
//! The layout is self-describing: a header, a table of named descriptors, and the values (Linux,
//! Documentation/virt/kvm/api.rst, "KVM_GET_STATS_FD").
//!
//! The set of statistics depends on the host kernel, so an event's `config` is valid only for the
//! [`KvmPmu`] that returned it. Use [`KvmPmu::config`] to look one up or [`KvmPmu::events`] to list
//! them.
//!
//! | `config` bits | meaning |
//! |---|---|
//! | 31:0 | index of the statistic |
//! | 32 | 0: statistic of a vCPU, 1: statistic of the VM |
//!
//! # Package counts
//! A statistic of the VM is a single number, independent of the number of vCPUs. Its events
//! therefore implement [`PmuEvent::count`] on every target, so an event that all vCPUs inherit is
//! not counted several times. A vCPU statistic that is opened for the whole VM is the sum over all
//! vCPUs, including vCPUs that are added later, and is a package count too. The values of package
//! counts are read on request, so they are never stale.
//!
//! Only cumulative scalars can be events. [`KvmStatsFile::descriptors`] also lists instantaneous
//! values, peaks and histograms, which cannot be counted. KVM statistics never overflow.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::attr::{Attr, EventType};
use crate::pmu::spans::Spans;
use crate::pmu::{Pmu, PmuCounterCapacity, PmuError, PmuEvent, PmuEventTarget, VcpuId};

/// Bit of `config` that selects a statistic of the VM instead of a vCPU.
pub const VM_SCOPE: u64 = 1 << 32;

const HEADER_LEN: usize = 24;
/// Size of a statistics descriptor in bytes, excluding its name.
const DESC_LEN: usize = 16;
/// Maximum size of a statistic's name, in bytes. This value and `MAX_DESCRIPTORS` are generous:
/// current kernels use 48 bytes per name and have fewer than 100 statistics.
const MAX_NAME_LEN: u32 = 256;
const MAX_DESCRIPTORS: u32 = 4096;

/// An error that occurred while reading or parsing a statistics file of KVM.
#[derive(Debug, thiserror::Error)]
pub enum KvmStatsError {
    /// The statistics file could not be read.
    #[error("reading KVM statistics failed")]
    Read(#[source] io::Error),
    /// The statistics file has an invalid layout.
    #[error("KVM statistics are malformed: {0}")]
    Malformed(&'static str),
}

/// The type of a KVM statistic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvmStatKind {
    /// A count that never decreases.
    Cumulative,
    /// A value that may increase and decrease.
    Instant,
    /// The maximum value so far.
    Peak,
    /// A histogram whose buckets have equal widths.
    LinearHistogram,
    /// A histogram in which each bucket is twice as wide as the previous one.
    LogHistogram,
    /// A type that this version does not support.
    Unknown(u8),
}

/// The unit of a KVM statistic, before its exponent is applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvmStatUnit {
    /// A plain number.
    None,
    /// A number of bytes.
    Bytes,
    /// A number of seconds.
    Seconds,
    /// A number of CPU cycles.
    Cycles,
    /// A Boolean, 0 or 1.
    Boolean,
    /// A unit that this version does not support.
    Unknown(u8),
}

/// The description of one KVM statistic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvmStatDescriptor {
    /// Name of the statistic in KVM.
    pub name: String,
    /// Type of the statistic.
    pub kind: KvmStatKind,
    /// Unit of the statistic's values.
    pub unit: KvmStatUnit,
    /// Base of the unit's exponent, 10 or 2.
    pub base: u8,
    /// Exponent of the unit: a value times `base` to the power of `exponent` is in units of `unit`.
    pub exponent: i16,
    /// Number of `u64` values of the statistic.
    pub values: u16,
    /// Offset of the first value in the statistics file, in bytes.
    offset: u64,
}

impl KvmStatDescriptor {
    /// Returns `true` if an event can count the statistic, that is, if it is a single cumulative
    /// value.
    #[must_use]
    pub fn countable(&self) -> bool {
        self.kind == KvmStatKind::Cumulative && self.values == 1
    }
}

/// An open statistics file of KVM, with its parsed descriptors.
#[derive(Debug)]
pub struct KvmStatsFile {
    file: File,
    table: Vec<KvmStatDescriptor>,
}

impl KvmStatsFile {
    /// Takes ownership of a file descriptor that `KVM_GET_STATS_FD` returned, and parses the
    /// descriptors.
    ///
    /// # Errors
    /// Returns [`KvmStatsError::Read`] if the file cannot be read and [`KvmStatsError::Malformed`]
    /// if its content is not a statistics layout.
    pub fn new(fd: OwnedFd) -> Result<Self, KvmStatsError> {
        let file = File::from(fd);
        let table = parse(|buf, at| file.read_exact_at(buf, at))?;
        Ok(Self { file, table })
    }

    /// Returns the descriptors of all statistics, in KVM's order.
    #[must_use]
    pub fn descriptors(&self) -> &[KvmStatDescriptor] {
        &self.table
    }

    /// Reads the first value of the statistic with index `index`.
    ///
    /// # Errors
    /// Returns a [`KvmStatsError`] if there is no such statistic or the value cannot be read.
    pub fn value(&self, index: usize) -> Result<u64, KvmStatsError> {
        let desc = self
            .table
            .get(index)
            .ok_or(KvmStatsError::Malformed("no such statistic"))?;
        let mut bytes = [0; 8];
        self.file
            .read_exact_at(&mut bytes, desc.offset)
            .map_err(KvmStatsError::Read)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    fn find(&self, name: &str) -> Option<usize> {
        self.table.iter().position(|d| d.name == name && d.countable())
    }
}

/// Parses the header and all descriptors of a statistics file. `read_at` fills a buffer from a file
/// offset.
fn parse(
    mut read_at: impl FnMut(&mut [u8], u64) -> io::Result<()>,
) -> Result<Vec<KvmStatDescriptor>, KvmStatsError> {
    let mut header = [0; HEADER_LEN];
    read_at(&mut header, 0).map_err(KvmStatsError::Read)?;
    let [_flags, name_len, count, _id_at, desc_at, data_at] =
        [0, 4, 8, 12, 16, 20].map(|at| u32_at(&header, at));
    if name_len == 0 || name_len > MAX_NAME_LEN {
        return Err(KvmStatsError::Malformed("length of names"));
    }
    if count > MAX_DESCRIPTORS {
        return Err(KvmStatsError::Malformed("number of statistics"));
    }
    let stride = DESC_LEN + name_len as usize;
    // Reads the whole table at once, because two files with some fifty descriptors each are parsed
    // at VM start.
    let mut bytes = vec![0; stride * count as usize];
    read_at(&mut bytes, u64::from(desc_at)).map_err(KvmStatsError::Read)?;
    bytes
        .chunks_exact(stride)
        .map(|descriptor| parse_descriptor(descriptor, data_at))
        .collect()
}

#[expect(clippy::cast_possible_truncation, reason = "the field has four bits")]
fn parse_descriptor(bytes: &[u8], data_at: u32) -> Result<KvmStatDescriptor, KvmStatsError> {
    let flags = u32_at(bytes, 0);
    let values = u16::from_ne_bytes([bytes[6], bytes[7]]);
    let offset = u64::from(data_at) + u64::from(u32_at(bytes, 8));
    if values == 0 {
        return Err(KvmStatsError::Malformed("a statistic without values"));
    }
    let name = bytes[DESC_LEN..].split(|&b| b == 0).next().unwrap_or(&[]);
    let name = std::str::from_utf8(name)
        .ok()
        .filter(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_graphic()))
        .ok_or(KvmStatsError::Malformed("name of a statistic"))?;
    Ok(KvmStatDescriptor {
        name: name.to_owned(),
        kind: match flags & 0xf {
            0 => KvmStatKind::Cumulative,
            1 => KvmStatKind::Instant,
            2 => KvmStatKind::Peak,
            3 => KvmStatKind::LinearHistogram,
            4 => KvmStatKind::LogHistogram,
            other => KvmStatKind::Unknown(other as u8),
        },
        unit: match (flags >> 4) & 0xf {
            0 => KvmStatUnit::None,
            1 => KvmStatUnit::Bytes,
            2 => KvmStatUnit::Seconds,
            3 => KvmStatUnit::Cycles,
            4 => KvmStatUnit::Boolean,
            other => KvmStatUnit::Unknown(other as u8),
        },
        base: if (flags >> 8) & 0xf == 1 { 2 } else { 10 },
        exponent: i16::from_ne_bytes([bytes[4], bytes[5]]),
        values,
        offset,
    })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// A KVM statistic that can be opened as an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvmStatEvent {
    /// Event name: `NAME` for a vCPU statistic, `vm:NAME` for a VM statistic.
    pub name: String,
    /// Value of `config` for the event.
    pub config: u64,
    /// Description of the statistic that the event counts.
    pub descriptor: KvmStatDescriptor,
}

type VcpuStatsFiles = Arc<Mutex<BTreeMap<VcpuId, Arc<KvmStatsFile>>>>;

/// The `kvm` driver of one VM.
#[derive(Debug)]
pub struct KvmPmu {
    vm: Option<Arc<KvmStatsFile>>,
    vcpus: VcpuStatsFiles,
}

impl KvmPmu {
    /// Creates a driver. `vm` contains the statistics of the VM, or `None` if the host does not
    /// provide statistics.
    #[must_use]
    pub fn new(vm: Option<KvmStatsFile>) -> Self {
        Self {
            vm: vm.map(Arc::new),
            vcpus: VcpuStatsFiles::default(),
        }
    }

    /// Registers `stats` as the statistics of `vcpu`.
    pub fn add_vcpu(&self, vcpu: VcpuId, stats: KvmStatsFile) {
        lock(&self.vcpus).insert(vcpu, Arc::new(stats));
    }

    /// Unregisters the statistics of `vcpu`. Open events of the vCPU remain usable, and sums over
    /// all vCPUs still include its last value.
    pub fn remove_vcpu(&self, vcpu: VcpuId) {
        lock(&self.vcpus).remove(&vcpu);
    }

    /// Returns the `config` of the event `name`, or `None` if there is no such event. A name that
    /// begins with `vm:` selects a VM statistic, any other name a vCPU statistic.
    #[must_use]
    pub fn config(&self, name: &str) -> Option<u64> {
        match name.strip_prefix("vm:") {
            Some(name) => Some(VM_SCOPE | self.vm.as_ref()?.find(name)? as u64),
            None => Some(lock(&self.vcpus).values().next()?.find(name)? as u64),
        }
    }

    /// Returns all events of this driver, vCPU statistics first.
    #[must_use]
    pub fn events(&self) -> Vec<KvmStatEvent> {
        let vcpu = lock(&self.vcpus).values().next().cloned();
        let list = |stats: Option<&KvmStatsFile>, prefix: &str, scope: u64| -> Vec<KvmStatEvent> {
            stats
                .map_or(&[][..], KvmStatsFile::descriptors)
                .iter()
                .enumerate()
                .filter(|(_, d)| d.countable())
                .map(|(i, d)| KvmStatEvent {
                    name: format!("{prefix}{}", d.name),
                    config: scope | i as u64,
                    descriptor: d.clone(),
                })
                .collect()
        };
        let mut events = list(vcpu.as_deref(), "", 0);
        events.extend(list(self.vm.as_deref(), "vm:", VM_SCOPE));
        events
    }
}

fn lock(
    vcpus: &Mutex<BTreeMap<VcpuId, Arc<KvmStatsFile>>>,
) -> std::sync::MutexGuard<'_, BTreeMap<VcpuId, Arc<KvmStatsFile>>> {
    vcpus.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pmu for KvmPmu {
    fn name(&self) -> &'static str {
        "kvm"
    }

    fn supports_type(&self, ty: EventType) -> bool {
        ty == EventType::KVM
    }

    fn capacity(&self) -> PmuCounterCapacity {
        PmuCounterCapacity::Unlimited
    }

    #[expect(clippy::cast_possible_truncation, reason = "the upper half was masked away")]
    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        if attr.exclude_user || attr.exclude_kernel {
            return Err(PmuError::Unsupported(
                "KVM statistics have no guest privilege level",
            ));
        }
        if attr.sample_period != 0 {
            return Err(PmuError::Unsupported("KVM statistics do not overflow"));
        }
        if attr.config & !(VM_SCOPE | u64::from(u32::MAX)) != 0 {
            return Err(PmuError::NoSuchEvent);
        }
        let index = (attr.config & u64::from(u32::MAX)) as usize;
        let source = if attr.config & VM_SCOPE != 0 {
            let vm = self.vm.clone().ok_or(PmuError::NoSuchEvent)?;
            check(&vm, index)?;
            StatSource::Vm(vm)
        } else {
            match target {
                PmuEventTarget::Vcpu { vcpu, .. } => {
                    let stats = lock(&self.vcpus).get(&vcpu).cloned().ok_or_else(no_such_vcpu)?;
                    check(&stats, index)?;
                    StatSource::Vcpu(stats)
                }
                PmuEventTarget::Vm if attr.inherit => {
                    // The core then opens one event per vCPU, each of which counts while its vCPU
                    // exists.
                    return Err(PmuError::Unsupported(
                        "an inherited KVM statistic is counted for each vCPU",
                    ));
                }
                PmuEventTarget::Cpu { .. } => {
                    return Err(PmuError::Unsupported(
                        "KVM has statistics of vCPUs and VMs, not of CPUs",
                    ));
                }
                PmuEventTarget::Vm => {
                    let first = lock(&self.vcpus).values().next().cloned();
                    check(&*first.ok_or_else(no_such_vcpu)?, index)?;
                    StatSource::VcpuSum(VcpuSum::new(Arc::clone(&self.vcpus), index))
                }
            }
        };
        Ok(Box::new(StatEvent {
            source,
            index,
            spans: Spans::default(),
        }))
    }
}

fn no_such_vcpu() -> PmuError {
    PmuError::Os {
        what: "finding the vCPU's KVM statistics",
        source: io::Error::from_raw_os_error(libc::ESRCH),
    }
}

fn check(stats: &KvmStatsFile, index: usize) -> Result<(), PmuError> {
    match stats.table.get(index) {
        None => Err(PmuError::NoSuchEvent),
        Some(d) if !d.countable() => Err(PmuError::Unsupported("this KVM statistic is not a count")),
        Some(_) => Ok(()),
    }
}

/// The sum of one statistic over all vCPUs. A removed vCPU contributes its last value.
#[derive(Debug)]
struct VcpuSum {
    vcpus: VcpuStatsFiles,
    index: usize,
    /// Last value that was read from each vCPU. Kept when the vCPU is removed.
    seen: BTreeMap<VcpuId, (Arc<KvmStatsFile>, u64)>,
    /// Sum of the last values of removed vCPUs whose IDs were reused by new vCPUs.
    replaced: u64,
}

impl VcpuSum {
    fn new(vcpus: VcpuStatsFiles, index: usize) -> Self {
        Self {
            vcpus,
            index,
            seen: BTreeMap::new(),
            replaced: 0,
        }
    }

    fn total(&mut self) -> Result<u64, KvmStatsError> {
        for (&id, stats) in lock(&self.vcpus).iter() {
            let entry = self.seen.entry(id).or_insert_with(|| (Arc::clone(stats), 0));
            if !Arc::ptr_eq(&entry.0, stats) {
                // A new vCPU reuses the ID. The previous vCPU's file descriptor is still readable.
                self.replaced += entry.0.value(self.index).unwrap_or(entry.1);
                *entry = (Arc::clone(stats), 0);
            }
        }
        let mut total = self.replaced;
        for (stats, last) in self.seen.values_mut() {
            *last = (*last).max(stats.value(self.index)?);
            total += *last;
        }
        Ok(total)
    }
}

#[derive(Debug)]
enum StatSource {
    Vcpu(Arc<KvmStatsFile>),
    Vm(Arc<KvmStatsFile>),
    VcpuSum(VcpuSum),
}

impl StatSource {
    fn value(&mut self, index: usize) -> Result<u64, KvmStatsError> {
        match self {
            Self::Vcpu(stats) | Self::Vm(stats) => stats.value(index),
            Self::VcpuSum(all) => all.total(),
        }
    }

    /// Returns the value of the statistic, or `None` if it cannot be read.
    fn read_or_none(&mut self, index: usize) -> Option<u64> {
        let value = self.value(index).inspect_err(|e| {
            log::debug!("a KVM statistic stands still: {}", crate::error_line(e));
        });
        value.ok()
    }
}

/// An event that counts the increase of one statistic while the event is started.
#[derive(Debug)]
struct StatEvent {
    source: StatSource,
    index: usize,
    spans: Spans,
}

impl PmuEvent for StatEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        if overflow_in.is_some() {
            return Err(PmuError::Unsupported("KVM statistics do not overflow"));
        }
        self.spans.begin(|| {
            self.source.value(self.index).map_err(|e| PmuError::Os {
                what: "reading a KVM statistic",
                source: io::Error::other(e),
            })
        })
    }

    fn stop(&mut self) {
        self.spans.end(|| self.source.read_or_none(self.index));
    }

    fn read(&mut self) -> u64 {
        self.spans.count(|| self.source.read_or_none(self.index))
    }

    fn arm(&mut self, _overflow_in: u64) -> Result<(), PmuError> {
        Err(PmuError::Unsupported("KVM statistics do not overflow"))
    }

    fn take_overflows(&mut self) -> u32 {
        0
    }

    fn count(&mut self) -> Option<u64> {
        match self.source {
            StatSource::Vcpu(_) => None,
            StatSource::Vm(_) | StatSource::VcpuSum(_) => Some(self.read()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a reader of a byte string that behaves like `read_exact_at` on a file.
    fn from_bytes(bytes: &[u8]) -> impl FnMut(&mut [u8], u64) -> io::Result<()> + '_ {
        move |buf, at| {
            let at = usize::try_from(at).map_err(io::Error::other)?;
            let end = at.checked_add(buf.len()).filter(|&e| e <= bytes.len());
            let end = end.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
            buf.copy_from_slice(&bytes[at..end]);
            Ok(())
        }
    }

    fn header(name_len: u32, count: u32, desc_at: u32, data_at: u32) -> Vec<u8> {
        [0, name_len, count, HEADER_LEN as u32, desc_at, data_at]
            .iter()
            .flat_map(|w| w.to_ne_bytes())
            .collect()
    }

    fn descriptor(flags: u32, exponent: i16, values: u16, offset: u32, name: &[u8; 16]) -> Vec<u8> {
        let mut d = flags.to_ne_bytes().to_vec();
        d.extend(exponent.to_ne_bytes());
        d.extend(values.to_ne_bytes());
        d.extend(offset.to_ne_bytes());
        d.extend(0u32.to_ne_bytes());
        d.extend(name);
        d
    }

    #[test]
    fn statistics_table_is_parsed_as_documented() {
        let mut bytes = header(16, 2, 40, 200);
        bytes.resize(40, 0);
        bytes.extend(descriptor(0, 0, 1, 8, b"exits\0\0\0\0\0\0\0\0\0\0\0"));
        bytes.extend(descriptor(0x24, -9, 32, 16, b"halt_wait_hist\0\0"));
        let table = parse(from_bytes(&bytes)).unwrap();
        assert_eq!(table[0].name, "exits");
        assert!(table[0].countable());
        assert_eq!(table[0].offset, 208);
        assert_eq!(table[1].kind, KvmStatKind::LogHistogram);
        assert_eq!(table[1].unit, KvmStatUnit::Seconds);
        assert_eq!((table[1].exponent, table[1].values), (-9, 32));
        assert!(!table[1].countable());
    }

    #[test]
    fn malformed_statistics_tables_are_rejected() {
        let whole = |h: Vec<u8>, d: Vec<u8>| [h, d].concat();
        let good_name = b"exits\0\0\0\0\0\0\0\0\0\0\0";
        let cases = [
            header(16, 1, 24, 0)[..20].to_vec(),
            header(0, 1, 24, 0),
            header(u32::MAX, 1, 24, 0),
            header(16, u32::MAX, 24, 0),
            header(16, 1, u32::MAX, 0),
            whole(header(16, 2, 24, 0), descriptor(0, 0, 1, 0, good_name)),
            whole(header(16, 1, 24, 0), descriptor(0, 0, 0, 0, good_name)),
            whole(header(16, 1, 24, 0), descriptor(0, 0, 1, 0, &[0; 16])),
            whole(header(16, 1, 24, 0), descriptor(0, 0, 1, 0, &[0xff; 16])),
        ];
        for bytes in cases {
            assert!(parse(from_bytes(&bytes)).is_err(), "{bytes:x?}");
        }
    }

    proptest! {
        /// On arbitrary bytes, the parser does not panic, loop endlessly or exceed its allocation
        /// bounds.
        #[test]
        fn parser_accepts_or_rejects_arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(table) = parse(from_bytes(&bytes)) {
                prop_assert!(table.len() <= bytes.len());
            }
        }

        /// On arbitrary descriptors after a plausible header, the parser does not panic, loop
        /// endlessly or exceed its allocation bounds.
        #[test]
        fn parser_accepts_or_rejects_arbitrary_descriptors(tail in prop::collection::vec(any::<u8>(), 0..300), n in 0u32..12) {
            let bytes = [header(16, n, 24, 500), tail].concat();
            if let Ok(table) = parse(from_bytes(&bytes)) {
                prop_assert_eq!(table.len(), n as usize);
            }
        }
    }
}
