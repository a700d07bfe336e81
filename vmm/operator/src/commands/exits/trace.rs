//! KVM exits timed by the host tracepoints `kvm:kvm_exit` and `kvm:kvm_entry` on the vCPU threads,
//! like `perf kvm stat`.
//!
//! An exit lasts until KVM enters the guest again, including the handling in user space. The names
//! of the reasons are read from the tracepoint's `format` file and therefore match the running
//! kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use control_api::protocol::{ExitsOfReason, VcpuExits};
use perf_core::error_line;
use perf_core::pmu::host::Tracepoint;
use perf_core::ring::{RawRecord, RingReader};
use rustix::io::Errno;

/// Mount points of tracefs on current and older systems.
const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
/// Ring sizes to try for each vCPU, in pages. The first size holds about ten thousand exits, and
/// the second fits into the `perf_event_mlock_kb` limit of unprivileged users.
const PAGES: [usize; 2] = [512, 64];
/// Maximum number of records read from a vCPU's ring at a time.
const MAX_RECORDS: usize = 1 << 17;
/// Maximum size of the `format` file of a tracepoint, in bytes.
const MAX_FORMAT_BYTES: usize = 256 << 10;
/// Maximum number of distinct exit reasons. A kernel has about one hundred.
const MAX_REASONS: usize = 1024;

/// Record type `PERF_RECORD_LOST` (linux/perf_event.h).
const LOST: u32 = 2;
/// Record type `PERF_RECORD_SAMPLE` (linux/perf_event.h).
const SAMPLE: u32 = 9;

/// Names of exit reasons by number.
type ReasonNames = BTreeMap<u32, String>;

/// IDs and record formats of the tracepoints `kvm_exit` and `kvm_entry` on the running kernel.
#[derive(Debug, PartialEq, Eq)]
struct ExitTracepoints {
    exit: u64,
    entry: u64,
    /// Offset of the exit reason in a `kvm_exit` record, in bytes.
    reason_at: usize,
    /// Offset of the virtualization instruction set in a `kvm_exit` record, in bytes. The value is
    /// 1 for VT-x and 2 for AMD-V.
    isa_at: usize,
    vmx: ReasonNames,
    svm: ReasonNames,
}

/// The exits of one vCPU thread.
#[derive(Debug, Default)]
struct ThreadExits {
    /// Exit statistics by virtualization instruction set (VT-x or AMD-V) and exit reason.
    exits: BTreeMap<(u32, u32), ExitsOfReason>,
    /// Exit that is being handled: start time, instruction set and reason. `None` while the vCPU
    /// runs the guest.
    outside: Option<(u64, (u32, u32))>,
    lost: u64,
}

struct TracedVcpu {
    number: u32,
    ring: RingReader,
    counted: ThreadExits,
    /// Open event of the tracepoint `kvm_entry`, which writes to the same ring as `kvm_exit`.
    _entry: Tracepoint,
    _exit: Tracepoint,
}

/// Errors of tracing KVM exits.
#[derive(Debug, thiserror::Error)]
pub(super) enum TraceError {
    #[error("--no-trace")]
    NotWanted,
    #[error("process {0}: no vCPU thread found; the process may be in another container")]
    NoThread(u32),
    #[error("{}: permission denied; run as root", .0.display())]
    Barred(PathBuf),
    #[error("{dir} has no tracepoints; as root, run `mount -t tracefs tracefs {dir}`", dir = TRACEFS[0])]
    NoTracefs,
    #[error("tracepoint kvm:kvm_exit not found in this host's kernel")]
    NoPoint,
    #[error("{}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    #[error("tracepoint {0} has no ID in this host's kernel")]
    NoNumber(&'static str),
    #[error("unsupported format of tracepoint kvm:kvm_exit")]
    Format,
    #[error("perf_event_open")]
    Open(#[source] io::Error),
    #[error(
        "tracing the host's kernel: permission denied; run as root or with CAP_PERFMON{}",
        .0.as_ref().map_or_else(String::new, |level| format!("; kernel.perf_event_paranoid is {level}"))
    )]
    Denied(Option<String>),
}

/// KVM's tracepoints on the vCPU threads of a VM.
pub(super) struct ExitTrace {
    points: ExitTracepoints,
    pid: u32,
    vcpus: BTreeMap<i32, TracedVcpu>,
    /// IDs of the VM's threads that have already been examined.
    known: BTreeSet<i32>,
    /// Reason a hot-plugged vCPU is not traced.
    failed: Option<TraceError>,
}

impl ExitTrace {
    /// Starts tracing the vCPUs of the VM with process ID `pid`.
    ///
    /// # Errors
    /// Returns [`TraceError`] if the tracepoints are unavailable.
    pub(super) fn begin(pid: u32) -> Result<Self, TraceError> {
        let mut trace = Self {
            points: ExitTracepoints::of_host()?,
            pid,
            vcpus: BTreeMap::new(),
            known: BTreeSet::new(),
            failed: None,
        };
        trace.find_vcpus()?;
        if trace.vcpus.is_empty() {
            return Err(TraceError::NoThread(pid));
        }
        Ok(trace)
    }

    /// Starts tracing new vCPU threads.
    fn find_vcpus(&mut self) -> Result<(), TraceError> {
        let tasks = format!("/proc/{}/task", self.pid);
        let Ok(entries) = fs::read_dir(&tasks) else {
            return Ok(());
        };
        for entry in entries.flatten() {
            let Some(tid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
                continue;
            };
            if !self.known.insert(tid) {
                continue;
            }
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            let Some(number) = name.trim_end().strip_prefix("vcpu").and_then(|n| n.parse().ok()) else {
                continue;
            };
            match TracedVcpu::open(tid, number, &self.points) {
                Ok(vcpu) => {
                    self.vcpus.insert(tid, vcpu);
                }
                Err(e) if e.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
                Err(e) => return Err(denied(e)),
            }
        }
        Ok(())
    }

    /// Reads new records from the vCPUs' rings. Must be called before the rings overflow.
    pub(super) fn drain(&mut self) {
        for vcpu in self.vcpus.values_mut() {
            for _ in 0..MAX_RECORDS {
                match vcpu.ring.next_record() {
                    Ok(Some(record)) => vcpu.counted.record(record, &self.points),
                    Ok(None) => break,
                    // Records were lost, so the start of the current exit is unknown.
                    Err(_) => vcpu.counted.outside = None,
                }
            }
        }
    }

    /// Returns the exits since tracing began. Their maximum durations cover the time since the
    /// previous call.
    pub(super) fn read_exits(&mut self) -> Vec<VcpuExits> {
        if let Err(why) = self.find_vcpus() {
            self.failed.get_or_insert(why);
        }
        self.drain();
        let of = |vcpu: &mut TracedVcpu| VcpuExits {
            vcpu: vcpu.number,
            exits: vcpu.counted.read_exits(),
        };
        // A hot-plugged vCPU can have had several threads. Add up their exits.
        let mut all: Vec<VcpuExits> = Vec::new();
        for seen in self.vcpus.values_mut().map(of) {
            match all.iter_mut().find(|vcpu| vcpu.vcpu == seen.vcpu) {
                None => all.push(seen),
                Some(vcpu) => {
                    for exits in seen.exits {
                        add(&mut vcpu.exits, exits);
                    }
                }
            }
        }
        all
    }

    /// Returns notes for the user about missing or incomplete trace data.
    pub(super) fn remarks(&self) -> String {
        let mut out = String::new();
        let lost: u64 = self.vcpus.values().map(|vcpu| vcpu.counted.lost).sum();
        if lost > 0 {
            out += &format!(
                " {lost} records of KVM's tracepoints were lost: its counts and times are too small.\n"
            );
        }
        if let Some(why) = &self.failed {
            out += &format!(" Not all vCPUs are traced: {}\n", error_line(why));
        }
        out
    }
}

fn add(all: &mut Vec<ExitsOfReason>, exits: ExitsOfReason) {
    match all.iter_mut().find(|of| of.reason == exits.reason) {
        None => all.push(exits),
        Some(of) => {
            of.count += exits.count;
            of.timed += exits.timed;
            of.time_ns += exits.time_ns;
            of.max_ns = of.max_ns.max(exits.max_ns);
        }
    }
}

impl TracedVcpu {
    fn open(tid: i32, number: u32, points: &ExitTracepoints) -> io::Result<Self> {
        let exit = Tracepoint::open(tid, points.exit)?;
        let entry = Tracepoint::open(tid, points.entry)?;
        let map = |pages| RingReader::map_perf(exit.as_fd(), pages).map_err(io::Error::other);
        let ring = map(PAGES[0]).or_else(|_| map(PAGES[1]))?;
        entry.write_to(&exit)?;
        exit.enable()?;
        entry.enable()?;
        Ok(Self {
            number,
            ring,
            counted: ThreadExits::default(),
            _entry: entry,
            _exit: exit,
        })
    }
}

impl ThreadExits {
    fn record(&mut self, record: RawRecord<'_>, points: &ExitTracepoints) {
        match record.ty() {
            SAMPLE => {
                let _ = self.sample(record.body(), points);
            }
            LOST => {
                let lost = record.body().get(8..).and_then(|rest| rest.first_chunk());
                self.lost += lost.map_or(1, |lost| u64::from_ne_bytes(*lost));
                // The lost records may include the `kvm_entry` that ends the current exit.
                self.outside = None;
            }
            _ => {}
        }
    }

    fn sample(&mut self, body: &[u8], points: &ExitTracepoints) -> Option<()> {
        let (time, rest) = body.split_first_chunk()?;
        let (len, fields) = rest.split_first_chunk()?;
        let fields = fields.get(..usize::try_from(u32::from_ne_bytes(*len)).ok()?)?;
        let time = u64::from_ne_bytes(*time);
        let id = u64::from(u16::from_ne_bytes(*fields.first_chunk()?));
        let word = |at: usize| Some(u32::from_ne_bytes(*fields.get(at..)?.first_chunk()?));
        if id == points.entry {
            let (since, key) = self.outside.take()?;
            let of = self.exits.get_mut(&key)?;
            let ns = time.saturating_sub(since);
            of.timed += 1;
            of.time_ns += ns;
            of.max_ns = of.max_ns.max(ns);
        } else if id == points.exit {
            let key = (word(points.isa_at)?, word(points.reason_at)?);
            if self.exits.len() >= MAX_REASONS && !self.exits.contains_key(&key) {
                self.outside = None;
                return None;
            }
            let of = self.exits.entry(key).or_insert_with(|| ExitsOfReason {
                reason: points.name(key),
                count: 0,
                timed: 0,
                time_ns: 0,
                max_ns: 0,
            });
            of.count += 1;
            self.outside = Some((time, key));
        }
        Some(())
    }

    fn read_exits(&mut self) -> Vec<ExitsOfReason> {
        let mut all = Vec::new();
        for of in self.exits.values_mut() {
            add(&mut all, of.clone());
            of.max_ns = 0;
        }
        all
    }
}

impl ExitTracepoints {
    fn of_host() -> Result<Self, TraceError> {
        let root = TRACEFS
            .iter()
            .map(Path::new)
            .find(|root| match fs::read_dir(root.join("events")) {
                Ok(_) => true,
                Err(e) => e.kind() == ErrorKind::PermissionDenied,
            });
        let Some(root) = root else {
            let barred = fs::read_dir(TRACEFS[0]).is_err_and(|e| e.kind() == ErrorKind::PermissionDenied);
            return Err(if barred {
                TraceError::Barred(TRACEFS[0].into())
            } else {
                TraceError::NoTracefs
            });
        };
        let read = |file: &str| {
            let path = root.join("events/kvm").join(file);
            fs::read_to_string(&path).map_err(|e| match e.kind() {
                ErrorKind::PermissionDenied => TraceError::Barred(path),
                ErrorKind::NotFound => TraceError::NoPoint,
                _ => TraceError::Read(path, e),
            })
        };
        let id = |name: &'static str| {
            let text = read(&format!("{name}/id"))?;
            text.trim().parse().map_err(|_| TraceError::NoNumber(name))
        };
        let (exit, entry) = (id("kvm_exit")?, id("kvm_entry")?);
        Self::parse(exit, entry, &read("kvm_exit/format")?).ok_or(TraceError::Format)
    }

    /// Creates the description of the tracepoints with the IDs `exit` and `entry` from `format`,
    /// which is the `format` file of `kvm_exit`. Returns `None` if the file lacks a required field.
    fn parse(exit: u64, entry: u64, format: &str) -> Option<Self> {
        let format = format.get(..format.len().min(MAX_FORMAT_BYTES))?;
        let mut names = format
            .split("__print_symbolic(REC->exit_reason")
            .skip(1)
            .map(parse_names);
        Some(Self {
            exit,
            entry,
            reason_at: offset_of(format, "exit_reason")?,
            isa_at: offset_of(format, "isa")?,
            vmx: names.next().unwrap_or_default(),
            svm: names.next().unwrap_or_default(),
        })
    }

    fn name(&self, (isa, reason): (u32, u32)) -> String {
        const VMX: u32 = 1;
        const SVM: u32 = 2;
        let (names, reason) = match isa {
            // On VT-x, the bits above the basic exit reason are flags (Intel SDM 3, 25.9.1).
            VMX => (&self.vmx, reason & 0xffff),
            SVM => (&self.svm, reason),
            _ => return format!("reason {reason:#x} of kind {isa}"),
        };
        let name = names.get(&reason).cloned();
        name.unwrap_or_else(|| format!("reason {reason:#x}"))
    }
}

/// Returns the offset of the 4-byte field `name` in a record, in bytes.
fn offset_of(format: &str, name: &str) -> Option<usize> {
    let mut parts = format.lines().filter_map(|line| {
        let mut parts = line.trim().split(';').map(str::trim);
        let declared = parts.next()?.strip_prefix("field:")?;
        (declared.split_whitespace().last() == Some(name)).then_some(parts)
    });
    let mut parts = parts.next()?;
    let at = parts.next()?.strip_prefix("offset:")?.parse().ok()?;
    (parts.next()? == "size:4").then_some(at)
}

/// Parses the pairs `{ NUMBER, "NAME" }` of one table of exit reasons.
fn parse_names(table: &str) -> ReasonNames {
    let pair = |text: &str| {
        let (number, rest) = text.split_once(',')?;
        let mut quoted = rest.split('"');
        let (_, name) = (quoted.next()?, quoted.next()?);
        Some((parse_number(number)?, name.to_owned()))
    };
    table
        .split('{')
        .skip(1)
        .take(MAX_REASONS)
        .filter_map(pair)
        .collect()
}

/// Parses a number in a table of exit reasons, such as `-1`. Also accepts a sum such as `(0x040 +
/// 14)`, which macro expansion leaves in the table.
fn parse_number(text: &str) -> Option<u32> {
    let text = text.replace(['(', ')', ' '], "");
    if let Some(below) = text.strip_prefix('-') {
        return below.parse::<u32>().ok().map(u32::wrapping_neg);
    }
    text.split('+').try_fold(0u32, |sum, part| {
        let number = match part.strip_prefix("0x") {
            Some(digits) => u32::from_str_radix(digits, 16),
            None => part.parse(),
        };
        sum.checked_add(number.ok()?)
    })
}

/// Maps an error of opening the tracepoint to [`TraceError`].
fn denied(error: io::Error) -> TraceError {
    let not_allowed = [Errno::ACCESS, Errno::PERM].map(|e| Some(e.raw_os_error()));
    if !not_allowed.contains(&error.raw_os_error()) {
        return TraceError::Open(error);
    }
    let level = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    TraceError::Denied(Some(level.trim().to_owned()).filter(|level| !level.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `format` file of `kvm_exit` in Linux 6.1, with most exit reasons removed.
    const FORMAT: &str = concat!(
        "name: kvm_exit\nID: 1234\nformat:\n",
        "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n",
        "\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n",
        "\tfield:unsigned int exit_reason;\toffset:8;\tsize:4;\tsigned:0;\n",
        "\tfield:unsigned long guest_rip;\toffset:16;\tsize:8;\tsigned:0;\n",
        "\tfield:u32 isa;\toffset:24;\tsize:4;\tsigned:0;\n",
        "\nprint fmt: \"vcpu %u reason %s%s%s rip 0x%lx\", REC->vcpu_id, (REC->isa == 1) ? ",
        "__print_symbolic(REC->exit_reason & 0xffff, { 0, \"EXCEPTION_NMI\" }, { 12, \"HLT\" }) : ",
        "__print_symbolic(REC->exit_reason, { 0x078, \"hlt\" }, { 0x040 + 14, \"PF excp\" }, ",
        "{ (0x400), \"npf\" }, { -1, \"invalid_guest_state\" }), (REC->isa == 1 && REC->exit_reason & ~0xffff) ",
        "? \" \" : \"\", (REC->isa == 1) ? __print_flags(REC->exit_reason & ~0xffff, \" \", { 0x80000000, ",
        "\"FAILED_VMENTRY\" }) : \"\"\n",
    );

    fn points() -> ExitTracepoints {
        ExitTracepoints::parse(1234, 1235, FORMAT).unwrap()
    }

    /// Reason names are looked up in the table of the processor's vendor.
    #[test]
    fn reason_names_match_kernel() {
        let points = points();
        assert_eq!((points.reason_at, points.isa_at), (8, 24));
        let name = |isa, reason| points.name((isa, reason));
        assert_eq!(name(1, 12), "HLT");
        assert_eq!(name(1, 0x8000_000c), "HLT");
        assert_eq!(name(2, 0x78), "hlt");
        assert_eq!(name(2, 0x4e), "PF excp");
        assert_eq!(name(2, 0x400), "npf");
        assert_eq!(name(2, u32::MAX), "invalid_guest_state");
        assert_eq!(name(2, 12), "reason 0xc");
        assert_eq!(name(3, 12), "reason 0xc of kind 3");
    }

    #[test]
    fn format_without_fields_is_rejected() {
        let without = FORMAT.replace("u32 isa;\toffset:24;\tsize:4", "u64 isa;\toffset:24;\tsize:8");
        assert_eq!(ExitTracepoints::parse(1, 2, &without), None);
        assert_eq!(ExitTracepoints::parse(1, 2, ""), None);
    }

    fn body(time: u64, id: u16, reason: u32) -> Vec<u8> {
        let mut fields = vec![0u8; 28];
        fields[..2].copy_from_slice(&id.to_ne_bytes());
        fields[8..12].copy_from_slice(&reason.to_ne_bytes());
        fields[24] = 2;
        let mut body = time.to_ne_bytes().to_vec();
        body.extend_from_slice(&28u32.to_ne_bytes());
        body.extend_from_slice(&fields);
        body
    }

    /// An exit lasts until the next entry. An exit whose entry was not recorded is counted but not
    /// timed.
    #[test]
    fn exit_duration_ends_at_next_entry() {
        let (points, mut counted) = (points(), ThreadExits::default());
        for (time, id, reason) in [
            (100, 1235, 0),
            (200, 1234, 0x78),
            (700, 1235, 0),
            (800, 1234, 0x400),
            (900, 1234, 0x78),
            (1000, 1235, 0),
        ] {
            let _ = counted.sample(&body(time, id, reason), &points);
        }
        let seen = counted.read_exits();
        let of = |name: &str| seen.iter().find(|of| of.reason == name).unwrap();
        let halts = of("hlt");
        assert_eq!(
            (halts.count, halts.timed, halts.time_ns, halts.max_ns),
            (2, 2, 600, 500)
        );
        assert_eq!((of("npf").count, of("npf").timed), (1, 0));
        // The maximum covers the time since the previous call.
        assert_eq!(counted.read_exits().iter().map(|of| of.max_ns).max(), Some(0));
    }

    #[test]
    fn truncated_records_are_skipped() {
        let (points, mut counted) = (points(), ThreadExits::default());
        let whole = body(100, 1234, 0x78);
        for len in 0..whole.len() {
            assert_eq!(counted.sample(&whole[..len], &points), None);
        }
        assert!(counted.exits.is_empty());
    }
}
