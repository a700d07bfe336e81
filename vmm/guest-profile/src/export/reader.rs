//! Reads untrusted `perf.data` files. `linux-perf-data` parses a file, after this module has
//! checked that sizes and counts in the file are within limits.

use std::io::{Cursor, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use linux_perf_data::linux_perf_event_reader::{
    CpuMode, EventRecord, Mmap2FileId, MmapRecord, RawEventRecord, RecordType, SampleFormat, SampleRecord,
};
use linux_perf_data::{DsoKey, PerfFile, PerfFileReader, PerfFileRecord, UserRecordType};

use super::context::{CONTEXT_KERNEL, CONTEXT_USER};
use super::perfdata::{
    ATTR_BRANCH_FILTER, FOOTER_MAGIC, GUEST_KERNEL_NAME, KERNEL_NAME, MISC_MMAP_BUILD_ID, UPDATES_NAME,
    own_marker,
};
use super::{
    ClockCorrelation, EventSamplingRate, FileMapping, KernelTextMap, NO_PID, Profile, ProfileMetadata,
    ProfilePerspective, ProfileSample, ProfileSymbol, SampledBranch, SampledEventInfo, TaskName,
};
use crate::sample::PerfDataRawSample;
use crate::unwind::{CONTEXT_GUEST_KERNEL, CONTEXT_GUEST_USER, UnwindStopReasons};
use kernel_images::build_id::{self, BuildId};
use kernel_images::le::u64_at;

/// Error returned when a file cannot be read as a profile.
#[derive(Debug, thiserror::Error)]
pub enum ProfileReadError {
    /// The file cannot be read.
    #[error("cannot read the file")]
    Io(#[source] std::io::Error),
    /// The path is not that of a regular file. The value is the type of file: a device, a pipe or a
    /// directory.
    #[error("is a {0}, not a file; use the perf.data file of perfvisor record")]
    NoFile(&'static str),
    /// The file is empty, because the recording ended before its first sample. A command should not
    /// treat this as a failure.
    #[error("the file is empty")]
    Empty,
    /// The file is larger than [`MAX_FILE`].
    #[error("larger than {} MiB; record for a shorter time or at a lower frequency", MAX_FILE >> 20)]
    TooLarge,
    /// The file contains no records, because the recording was interrupted within its first second.
    #[error("the recording has no data, because it was interrupted; record again")]
    Unfinished,
    /// The samples contain counter values, which only `perf` itself can read.
    #[error("unsupported: samples with counter values (PERF_SAMPLE_READ); use perf")]
    CounterValues,
    /// The file does not start with the magic number of `perf.data`.
    #[error("not a perf.data file; use the file of perfvisor record")]
    NoPerfData,
    /// The file is truncated or damaged.
    #[error("the file is truncated or damaged")]
    Broken(#[source] linux_perf_data::Error),
}

/// Magic number of a `perf.data` file (the kernel's
/// tools/perf/Documentation/perf.data-file-format.txt).
const MAGIC: &[u8] = b"PERFILE2";
/// Maximum size of a `perf.data` file, in bytes.
pub const MAX_FILE: u64 = 4 << 30;
/// Maximum size of the decompressed symbols saved in a file, in bytes.
const MAX_SYMBOLS: u64 = 256 << 20;

impl ProfileReadError {
    /// Returns whether the error is [`ProfileReadError::Empty`]. A command should then print the
    /// message and exit with status 0.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Empty)
    }
}

/// `open(2)` flag `O_NONBLOCK`. Opening a pipe without a writer does not block with this flag.
const DO_NOT_WAIT: i32 = 0o4000;
/// Device number of `/dev/null` (the kernel's Documentation/admin-guide/devices.txt).
const NULL_DEVICE: u64 = 1 << 8 | 3;

/// Reads a `perf.data` file.
///
/// # Errors
/// Returns a [`ProfileReadError`] if the file is not a readable recording.
pub fn read_file(path: &Path) -> Result<Profile, ProfileReadError> {
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).custom_flags(DO_NOT_WAIT).open(path);
    let file = file.map_err(ProfileReadError::Io)?;
    // Check the opened file, because the path may refer to another file by now.
    let meta = file.metadata().map_err(ProfileReadError::Io)?;
    let kind = meta.file_type();
    match () {
        () if kind.is_file() => {}
        () if kind.is_char_device() && meta.rdev() == NULL_DEVICE => return Err(ProfileReadError::Empty),
        () if kind.is_dir() => return Err(ProfileReadError::NoFile("directory")),
        () if kind.is_fifo() => return Err(ProfileReadError::NoFile("pipe")),
        () => return Err(ProfileReadError::NoFile("device")),
    }
    // Check the magic number and the size first, so that only recordings can take up the memory of
    // a large file.
    let (mut file, mut bytes) = (file.take(MAX_FILE + 1), Vec::new());
    file.by_ref()
        .take(MAGIC.len() as u64)
        .read_to_end(&mut bytes)
        .map_err(ProfileReadError::Io)?;
    if bytes == MAGIC {
        if meta.len() > MAX_FILE {
            return Err(ProfileReadError::TooLarge);
        }
        file.read_to_end(&mut bytes).map_err(ProfileReadError::Io)?;
    }
    if bytes.len() as u64 > MAX_FILE {
        return Err(ProfileReadError::TooLarge);
    }
    read(&bytes)
}

/// Checks that the sections of the header lie within the file. This check is needed because the
/// parser allocates as much memory as the header claims.
#[expect(
    clippy::cast_possible_truncation,
    reason = "inside the file, which is in memory"
)]
fn check_sections(bytes: &[u8]) -> Result<(), ProfileReadError> {
    let truncated = || {
        let eof = std::io::Error::from(std::io::ErrorKind::UnexpectedEof);
        ProfileReadError::Broken(linux_perf_data::Error::from(eof))
    };
    let inside = |at: u64, len: u64| at.checked_add(len).is_some_and(|end| end <= bytes.len() as u64);
    let field = |at| u64_at(bytes, at).ok_or_else(truncated);
    if !bytes.starts_with(MAGIC) {
        return Err(ProfileReadError::NoPerfData);
    }
    let (attrs, attrs_len, data, data_len) = (field(24)?, field(32)?, field(40)?, field(48)?);
    if data_len == 0
        && (72..104)
            .step_by(8)
            .all(|at| field(at).is_ok_and(|bits| bits == 0))
    {
        return Err(ProfileReadError::Unfinished);
    }
    let attr_size = field(16)?;
    if !inside(attrs, attrs_len) || !inside(data, data_len) || !(16..=4096).contains(&attr_size) {
        return Err(truncated());
    }
    // Check the event IDs of each attribute.
    for i in 0..attrs_len / attr_size {
        let at = attrs + i * attr_size + attr_size - 16;
        let at = usize::try_from(at).map_err(|_| truncated())?;
        if !inside(field(at)?, field(at + 8)?) {
            return Err(truncated());
        }
    }
    // The table after the data contains the section of each feature. In a file written by perf,
    // sections do not overlap.
    let mut total = 0u64;
    let mut slot = data + data_len;
    for bit in 0..256usize {
        if field(72 + bit / 64 * 8)? >> (bit % 64) & 1 == 0 {
            continue;
        }
        let at = usize::try_from(slot).map_err(|_| truncated())?;
        slot = slot.checked_add(16).ok_or_else(truncated)?;
        let (from, len) = (field(at)?, field(at + 8)?);
        total = total.saturating_add(len);
        if !inside(from, len) || total > bytes.len() as u64 {
            return Err(truncated());
        }
        let section = &bytes[from as usize..(from + len) as usize];
        let sane = match bit {
            FEATURE_CMDLINE => half(section, 0).is_some_and(|n| u64::from(n) <= len / 4),
            FEATURE_EVENT_DESC => event_desc_is_sane(section).is_some(),
            // Accept unknown features of other writers, whose sections may have any layout.
            bit => bit < 128,
        };
        if !sane {
            return Err(truncated());
        }
    }
    // The table of event names that preceded EVENT_DESC is unsupported.
    if field(64)? != 0 { Err(truncated()) } else { Ok(()) }
}

const FEATURE_CMDLINE: usize = 11;
const FEATURE_EVENT_DESC: usize = 12;

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(
        bytes.get(at..at.checked_add(4)?)?.try_into().ok()?,
    ))
}

/// Checks that the counts and lengths in an EVENT_DESC section stay within the section. Returns
/// `None` if one of them does not.
fn event_desc_is_sane(section: &[u8]) -> Option<()> {
    let (events, attr_size) = (half(section, 0)?, half(section, 4)? as usize);
    let mut at = 8usize;
    if events as usize > section.len() / 16 {
        return None;
    }
    for _ in 0..events {
        at = at.checked_add(attr_size)?;
        let (ids, name) = (half(section, at)? as usize, half(section, at + 4)? as usize);
        at = at
            .checked_add(8)?
            .checked_add(name)?
            .checked_add(ids.checked_mul(8)?)?;
        if at > section.len() {
            return None;
        }
    }
    Some(())
}

/// Parses a `perf.data` file with the contents `bytes`.
pub fn read(bytes: &[u8]) -> Result<Profile, ProfileReadError> {
    if bytes.is_empty() {
        return Err(ProfileReadError::Empty);
    }
    check_sections(bytes)?;
    let PerfFileReader {
        mut perf_file,
        mut record_iter,
    } = PerfFileReader::parse_file(Cursor::new(bytes)).map_err(ProfileReadError::Broken)?;
    let mut profile = Profile {
        meta: metadata(&perf_file),
        symbols: saved_symbols(bytes),
        ..Profile::default()
    };
    for (i, described) in perf_file.event_attributes().iter().enumerate() {
        let raw = raw_attr(bytes, i);
        profile.events.push(event_info(
            described.attributes(),
            raw,
            described.name(),
            described.ids().first().copied().or_else(|| first_id(bytes, i)),
            i,
        ));
    }
    loop {
        match record_iter.next_record(&mut perf_file) {
            Ok(None) => break,
            Ok(Some(PerfFileRecord::EventRecord { attr_index, record })) => {
                let id = profile.events.get(attr_index).map_or(0, |e| e.id);
                if record.parse_info.sample_format.contains(SampleFormat::READ) {
                    return Err(ProfileReadError::CounterValues);
                }
                // Skip a damaged record. The other records are still valid.
                let filter = profile.events.get(attr_index).map_or(0, |e| e.branch_filter);
                let branches = branches_of(&record, filter);
                if chain_is_sane(&record)
                    && branches.is_some()
                    && build_id_is_sane(&record)
                    && let Ok(parsed) = record.parse()
                {
                    let branches = branches.unwrap_or_default();
                    add(&mut profile, &parsed, record.timestamp(), id, &branches);
                }
            }
            Ok(Some(PerfFileRecord::UserRecord(record))) => {
                if record.record_type == UserRecordType::PERF_EVENT_UPDATE {
                    take_name(&mut profile.events, &record.data.as_slice());
                }
            }
            Err(e) => return Err(ProfileReadError::Broken(e)),
        }
    }
    set_build_ids(&mut profile, &perf_file);
    plain_names(&mut profile);
    Ok(profile)
}

/// Returns the properties of the machine and of the recording.
fn metadata(file: &PerfFile) -> ProfileMetadata {
    let text = |s: Result<Option<&str>, _>| s.ok().flatten().unwrap_or_default().to_owned();
    ProfileMetadata {
        thread_switches: false,
        hostname: text(file.hostname()),
        os_release: text(file.os_release()),
        vcpus: file.nr_cpus().ok().flatten().map_or(0, |n| n.nr_cpus_available),
        command: file
            .cmdline()
            .ok()
            .flatten()
            .map_or_else(Vec::new, |words| words.into_iter().map(str::to_owned).collect()),
        form: ProfilePerspective::InGuest,
        clock: file.clock_data().ok().flatten().map(|clock| ClockCorrelation {
            wall_ns: clock.wall_clock_ns,
            clock_ns: clock.clockid_time_ns,
        }),
    }
}

/// Sets the build IDs of the kernel and of the mapped files that the records do not contain.
fn set_build_ids(profile: &mut Profile, file: &PerfFile) {
    let Ok(ids) = file.build_ids() else {
        return;
    };
    let id_of = |path: &str, mode| {
        let info = ids.get(&DsoKey::detect(path.as_bytes(), mode)?)?;
        BuildId::new(&info.build_id)
    };
    if let Some(kernel) = &mut profile.kernel {
        kernel.build_id = id_of(KERNEL_NAME, CpuMode::Kernel);
    }
    for mapping in profile.mappings.iter_mut().filter(|m| m.build_id.is_none()) {
        mapping.build_id = id_of(&mapping.path, CpuMode::User);
    }
}

/// Replaces control characters in untrusted names, so that they cannot affect a terminal.
fn plain_names(profile: &mut Profile) {
    let meta = &mut profile.meta;
    let names = [&mut meta.hostname, &mut meta.os_release].into_iter();
    names
        .chain(&mut meta.command)
        .chain(profile.events.iter_mut().map(|event| &mut event.name))
        .chain(
            profile
                .kernel
                .iter_mut()
                .map(|kernel| &mut kernel.reference_symbol),
        )
        .chain(profile.tasks.iter_mut().map(|task| &mut task.comm))
        .chain(profile.mappings.iter_mut().map(|mapping| &mut mapping.path))
        .chain(profile.symbols.iter_mut().map(|symbol| &mut symbol.name))
        .filter(|name| name.contains(char::is_control))
        .for_each(|name| *name = name.replace(char::is_control, "?"));
}

/// Returns whether the build ID of an MMAP2 record has a valid length. This check is needed because
/// the parser panics on invalid lengths.
fn build_id_is_sane(record: &RawEventRecord<'_>) -> bool {
    const AT: usize = 32;
    record.record_type != RecordType::MMAP2
        || record.misc & MISC_MMAP_BUILD_ID == 0
        || record
            .data
            .get(AT..AT + 1)
            .is_some_and(|len| usize::from(len.as_slice()[0]) <= build_id::MAX_BYTES)
}

/// Returns whether the call chain of a sample fits into its record. This check is needed because
/// the parser multiplies the length of the chain before checking the length.
fn chain_is_sane(record: &RawEventRecord<'_>) -> bool {
    let format = record.parse_info.sample_format;
    if record.record_type != RecordType::SAMPLE || !format.contains(SampleFormat::CALLCHAIN) {
        return true;
    }
    let at = fixed_bytes(format);
    let Some(length) = record.data.get(at..at + 8) else {
        return false;
    };
    u64_at(&length.as_slice(), 0).is_some_and(|n| n <= record.data.len() as u64 / 8)
}

/// Returns the size of the sample fields before the call chain, in bytes. The samples must not
/// contain counter values, which have a variable size.
fn fixed_bytes(format: SampleFormat) -> usize {
    let before = SampleFormat::IDENTIFIER
        | SampleFormat::IP
        | SampleFormat::TID
        | SampleFormat::TIME
        | SampleFormat::ADDR
        | SampleFormat::ID
        | SampleFormat::STREAM_ID
        | SampleFormat::CPU
        | SampleFormat::PERIOD;
    8 * (format & before).bits().count_ones() as usize
}

/// Returns the branch stack of a record, which is empty for most records. Returns `None` if the
/// stack does not fit into the record. This function is needed because the parser does not provide
/// branches.
fn branches_of(record: &RawEventRecord<'_>, filter: u64) -> Option<Vec<SampledBranch>> {
    /// `PERF_SAMPLE_BRANCH_HW_INDEX`: one additional word precedes the branches.
    const HARDWARE_INDEX: u64 = 1 << 17;
    let format = record.parse_info.sample_format;
    if record.record_type != RecordType::SAMPLE || !format.contains(SampleFormat::BRANCH_STACK) {
        return Some(Vec::new());
    }
    let data = record.data.as_slice();
    let mut at = fixed_bytes(format);
    let number = |at| usize::try_from(u64_at(&data, at)?).ok();
    if format.contains(SampleFormat::CALLCHAIN) {
        at = number(at)?.checked_mul(8)?.checked_add(at + 8)?;
    }
    if format.contains(SampleFormat::RAW) {
        let size = usize::try_from(half(&data, at)?).ok()?;
        at = at.checked_add(4)?.checked_add(size)?;
    }
    let count = number(at)?;
    at += if filter & HARDWARE_INDEX == 0 { 8 } else { 16 };
    let words = data.get(at..at.checked_add(count.checked_mul(24)?)?)?;
    let branch = |n| {
        Some(SampledBranch {
            from: u64_at(words, 24 * n)?,
            to: u64_at(words, 24 * n + 8)?,
            flags: u64_at(words, 24 * n + 16)?,
        })
    };
    (0..count).map(branch).collect()
}

/// Fields of a `perf_event_attr` as stored in the file.
#[derive(Clone, Copy, Default)]
struct RawAttr {
    type_: u32,
    config: u64,
    /// Value of `branch_sample_type`; 0 if the samples have no branch stacks.
    branch_filter: u64,
    has_chains: bool,
}

/// Returns the fields of attribute `i` as stored in the file. This function is needed because the
/// parser only provides the attribute in an interpreted form.
#[expect(
    clippy::cast_possible_truncation,
    reason = "perf_event_attr.type is the lower half"
)]
fn raw_attr(bytes: &[u8], i: usize) -> RawAttr {
    let at = || {
        let (size, attrs) = (u64_at(bytes, 16)?, u64_at(bytes, 24)?);
        let at = usize::try_from(size.checked_mul(i as u64)?.checked_add(attrs)?).ok()?;
        let field = |offset: usize| u64_at(bytes, at.checked_add(offset)?);
        let has_branches = field(24)? & SampleFormat::BRANCH_STACK.bits() != 0;
        let branch_filter = if has_branches && size > ATTR_BRANCH_FILTER as u64 {
            field(ATTR_BRANCH_FILTER)?
        } else {
            0
        };
        Some(RawAttr {
            type_: field(0)? as u32,
            config: field(8)?,
            branch_filter,
            has_chains: field(24)? & SampleFormat::CALLCHAIN.bits() != 0,
        })
    };
    at().unwrap_or_default()
}

/// Returns the first event ID of attribute `i`. This function is needed because the parser provides
/// no IDs for files without feature sections.
fn first_id(bytes: &[u8], i: usize) -> Option<u64> {
    let (size, attrs) = (u64_at(bytes, 16)?, u64_at(bytes, 24)?);
    let end = size.checked_mul(i as u64 + 1)?.checked_add(attrs)?;
    let ids = usize::try_from(end.checked_sub(16)?).ok()?;
    let (at, len) = (u64_at(bytes, ids)?, u64_at(bytes, ids.checked_add(8)?)?);
    (len >= 8)
        .then(|| usize::try_from(at).ok())
        .flatten()
        .and_then(|at| u64_at(bytes, at))
}

fn event_info(
    attr: &linux_perf_data::linux_perf_event_reader::PerfEventAttr,
    RawAttr {
        type_,
        config,
        branch_filter,
        has_chains,
    }: RawAttr,
    name: Option<&str>,
    id: Option<u64>,
    index: usize,
) -> SampledEventInfo {
    use linux_perf_data::linux_perf_event_reader::SamplingPolicy;
    SampledEventInfo {
        name: name.map_or_else(|| format!("event {index}"), str::to_owned),
        type_,
        config,
        rate: match attr.sampling_policy {
            SamplingPolicy::Period(p) => EventSamplingRate::Period(p.get()),
            SamplingPolicy::Frequency(f) => EventSamplingRate::FrequencyHz(f),
            SamplingPolicy::NoSampling => EventSamplingRate::Period(0),
        },
        branch_filter,
        has_chains,
        id: id.filter(|&id| id != 0).unwrap_or(index as u64 + 1),
    }
}

/// Sets the name of an event from an EVENT_UPDATE record, which consists of type, event ID and
/// name.
fn take_name(events: &mut [SampledEventInfo], data: &[u8]) {
    if u64_at(data, 0) != Some(UPDATES_NAME) {
        return;
    }
    let event = u64_at(data, 8).and_then(|id| events.iter_mut().find(|event| event.id == id));
    if let (Some(event), Some(name)) = (event, data.get(16..)) {
        let name = name.split(|&b| b == 0).next().unwrap_or_default();
        event.name = String::from_utf8_lossy(name).into_owned();
    }
}

/// Converts a process ID from the signed number in the file. -1 becomes [`NO_PID`].
fn pid(raw: i32) -> u32 {
    raw.cast_unsigned()
}

/// Adds the contents of `record` to `profile`.
fn add(
    profile: &mut Profile,
    record: &EventRecord<'_>,
    time: Option<u64>,
    event_id: u64,
    branches: &[SampledBranch],
) {
    let time_ns = time.unwrap_or(0);
    match record {
        EventRecord::Sample(s) => add_sample(profile, s, time_ns, event_id, branches),
        EventRecord::Comm(c) => profile.tasks.push(TaskName {
            time_ns,
            pid: pid(c.pid),
            tid: pid(c.tid),
            comm: String::from_utf8_lossy(&c.name.as_slice()).into_owned(),
        }),
        EventRecord::Mmap(m) => add_mapping(profile, m, time_ns),
        EventRecord::Mmap2(m) => profile.mappings.push(FileMapping {
            time_ns,
            pid: pid(m.pid),
            start: m.address,
            len: m.length,
            file_offset: m.page_offset,
            path: String::from_utf8_lossy(&m.path.as_slice()).into_owned(),
            build_id: match &m.file_id {
                Mmap2FileId::BuildId(id) => BuildId::new(id),
                Mmap2FileId::InodeAndVersion(_) => None,
            },
        }),
        EventRecord::Lost(l) => profile.lost = profile.lost.saturating_add(l.count),
        _ => {}
    }
}

/// Adds a sample. `time_ns` is its time if the sample itself has none.
fn add_sample(
    profile: &mut Profile,
    s: &SampleRecord<'_>,
    time_ns: u64,
    event_id: u64,
    branches: &[SampledBranch],
) {
    let chain: Vec<u64> = s.callchain.map_or_else(Vec::new, |c| {
        (0..c.len()).filter_map(|i| c.get(i)).map(marker_for_us).collect()
    });
    let user = matches!(s.cpu_mode, CpuMode::GuestUser | CpuMode::User);
    if matches!(s.cpu_mode, CpuMode::GuestUser | CpuMode::GuestKernel) {
        profile.meta.form = ProfilePerspective::AsHost;
    }
    let ours = s.raw.and_then(|raw| PerfDataRawSample::read(&raw.as_slice()));
    let unknown = (0, if user { 3 } else { 0 }, UnwindStopReasons::default());
    let (cr3, cpl, ends) = ours.unwrap_or(unknown);
    let mut sample = ProfileSample {
        time_ns: s.timestamp.unwrap_or(time_ns),
        vcpu: s.cpu.unwrap_or(0),
        pid: s.pid.map_or(NO_PID, pid),
        tid: s.tid.map_or(NO_PID, pid),
        cpl,
        ip: s.ip.unwrap_or(0),
        cr3,
        period: s.period.unwrap_or(1),
        event_id,
        ends,
        branches,
        chain: &chain,
    };
    // The writer gives such a chain to samples without one.
    if ours.is_some() && ends == UnwindStopReasons::default() && chain == [own_marker(&sample), sample.ip] {
        sample.chain = &[];
    }
    profile.push(&sample);
}

/// Adds the mapping of the kernel's text or of an executable file.
fn add_mapping(profile: &mut Profile, m: &MmapRecord<'_>, time_ns: u64) {
    let path = String::from_utf8_lossy(&m.path.as_slice()).into_owned();
    let symbol = path.strip_prefix(GUEST_KERNEL_NAME);
    if let Some(symbol) = symbol.or_else(|| path.strip_prefix(KERNEL_NAME)) {
        if m.cpu_mode == CpuMode::GuestKernel {
            profile.meta.form = ProfilePerspective::AsHost;
        }
        profile.kernel = Some(KernelTextMap {
            start: m.address,
            len: m.length,
            reference_symbol: symbol.to_owned(),
            reference_address: m.page_offset,
            build_id: None,
        });
    } else if m.is_executable {
        profile.mappings.push(FileMapping {
            time_ns,
            pid: pid(m.pid),
            start: m.address,
            len: m.length,
            file_offset: m.page_offset,
            path,
            build_id: None,
        });
    }
}

/// Returns the entry `frame` of a guest sample's call chain. A context marker that is not specific
/// to guests is replaced with the guest marker that this crate's unwinder writes.
fn marker_for_us(frame: u64) -> u64 {
    match frame {
        CONTEXT_KERNEL => CONTEXT_GUEST_KERNEL,
        CONTEXT_USER => CONTEXT_GUEST_USER,
        other => other,
    }
}

/// Reads the optional section with saved symbols, which follows the feature sections. Returns an
/// empty list if the section is missing or damaged.
fn saved_symbols(bytes: &[u8]) -> Vec<ProfileSymbol> {
    let packed = || {
        let footer = bytes.len().checked_sub(24)?;
        if &bytes[footer + 16..] != FOOTER_MAGIC {
            return None;
        }
        let from = usize::try_from(u64_at(bytes, footer)?).ok()?;
        let to = from.checked_add(usize::try_from(u64_at(bytes, footer + 8)?).ok()?)?;
        bytes.get(from..to)
    };
    packed()
        .and_then(|packed| {
            let unpacked = flate2::read::GzDecoder::new(packed).take(MAX_SYMBOLS);
            serde_json::from_reader(std::io::BufReader::new(unpacked)).ok()
        })
        .unwrap_or_default()
}
