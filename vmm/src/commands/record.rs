//! `perfvisor record`: samples of a VM's vCPUs into a `perf.data` file.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use perf_core::ReadFormat;
use perf_core::SampleType;
use perf_core::record::{Format, Record, Sample as RingSample};
use perf_core::ring::RingReader;

use super::{DONE, VcpuList, Woken, parse_seconds, parse_vcpus, wait_until};
use crate::cli::ExitStatus;
use crate::control::client::Client;
use crate::control::protocol::{Call, KernelInfo, KernelState, Opened, RingInfo, RingLoss, Sampling};
use crate::events::list;
use crate::export::perfdata::PerfDataWriter;
use crate::export::{EventInfo, KernelMap, Meta, NO_PID, Rate, Sample, SavedSymbol, TaskName};
use crate::pmu::RawSample;
use crate::profile::unwind::{CONTEXT_GUEST_KERNEL, CONTEXT_GUEST_USER};
use crate::signals::StopSignals;

/// Samples a second when nothing is asked for. Each takes the vCPU out of the guest.
const DEFAULT_FREQUENCY_HZ: u64 = 1000;
/// Between two looks into the rings.
const LOOK: Duration = Duration::from_millis(50);
/// How long the VM may look for its guest's kernel.
const KERNEL_PATIENCE: Duration = Duration::from_secs(60);
/// Most different addresses whose names are kept in the file.
const MAX_ADDRESSES: usize = 1 << 20;
/// Most different tasks.
const MAX_TASKS: usize = 1 << 16;
/// Values from here up in a chain are markers.
const CONTEXT_MAX: u64 = (-4095i64) as u64;

/// `perfvisor record`.
#[derive(Clone, Debug, Args)]
pub struct RecordArgs {
    /// The VM; may be left out when only one is running.
    #[arg(value_name = "NAME")]
    pub name: Option<String>,
    /// Events in perf's syntax.
    #[arg(short, long = "event", value_name = "LIST", default_value = "cycles")]
    pub events: String,
    /// A sample every so many events.
    #[arg(short = 'c', long = "count", value_name = "N", value_parser = clap::value_parser!(u64).range(1..1 << 62))]
    pub period: Option<u64>,
    /// So many samples a second on each vCPU [default: 1000]
    #[arg(short = 'F', long = "freq", value_name = "HZ", conflicts_with = "period", value_parser = clap::value_parser!(u64).range(1..1 << 32))]
    pub frequency: Option<u64>,
    /// The guest's call chain with each sample: fp (the kernel's by its unwind tables or frame pointers, the program's by
    /// frame pointers) or none.
    #[arg(long, value_name = "HOW", default_value = "fp", value_parser = ["fp", "none"])]
    pub call_graph: String,
    /// Only these vCPUs, as in 0,2-3.
    #[arg(long, value_name = "LIST", value_parser = parse_vcpus)]
    pub vcpu: Option<VcpuList>,
    /// The file to write. One that is there is kept as FILE.old.
    #[arg(short, long, value_name = "FILE", default_value = "perf.data")]
    pub output: PathBuf,
    /// How long to record; until Ctrl-C if not given.
    #[arg(short, long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub duration: Option<Duration>,
    /// Pages of each vCPU's ring, a power of two.
    #[arg(short, long, value_name = "PAGES", default_value = "256")]
    pub mmap_pages: u32,
    /// Say nothing but errors.
    #[arg(short, long)]
    pub quiet: bool,
}

/// Records.
///
/// # Errors
/// One line for the user.
pub fn record(args: &RecordArgs) -> Result<ExitStatus, String> {
    list::parse(&args.events).map_err(|e| e.to_string())?;
    let signals = StopSignals::block().map_err(|e| format!("signalfd failed: {e}"))?;
    let mut client = Client::connect(args.name.as_deref()).map_err(|e| e.to_string())?;
    let said = |e: crate::control::client::ClientError| e.to_string();
    let rate = args.period.or(args.frequency).unwrap_or(DEFAULT_FREQUENCY_HZ);
    let sampling = Sampling {
        rate,
        frequency: args.period.is_none(),
        callchain: args.call_graph == "fp",
    };
    let opened: Vec<Opened> = client
        .call(Call::Open {
            events: args.events.clone(),
            vcpus: args.vcpu.as_ref().map(|list| list.0.clone()),
            sampling: Some(sampling),
        })
        .map_err(said)?;
    if let Some((event, why)) = opened.iter().find_map(|o| Some((o, o.unsupported.as_ref()?))) {
        return Err(format!("'{}' cannot be sampled here: {why}", event.name));
    }
    find_kernel(&mut client, args, &signals)?;
    let symbols = Names::of(&mut client)?;
    let mut rings = Vec::new();
    let mut vcpus: Vec<u32> = opened.iter().map(|o| o.vcpu).collect();
    vcpus.sort_unstable();
    vcpus.dedup();
    for vcpu in vcpus {
        let call = Call::Ring {
            vcpu,
            pages: args.mmap_pages,
        };
        let (info, memfd): (RingInfo, File) = client.call_with_file(call).map_err(said)?;
        let reader = RingReader::map(memfd.as_fd()).map_err(|e| format!("the ring of vCPU {vcpu}: {e}"))?;
        rings.push((reader, info));
    }
    let mut recording = Recording::start(args, &client, &opened, sampling, symbols)?;
    let () = client.call(Call::Enable).map_err(said)?;
    let start = Instant::now();
    let end = args.duration.map(|d| start + d);
    let mut gone = false;
    let progress = !args.quiet && std::io::stderr().is_terminal();
    loop {
        let look = Instant::now() + LOOK;
        let woken = wait_until(end.map_or(look, |end| end.min(look)), &signals);
        let over = woken == Woken::Signal || end.is_some_and(|end| Instant::now() >= end);
        if over {
            gone = matches!(client.call::<()>(Call::Disable), Err(e) if e.is_gone());
        }
        recording.drain(&mut rings)?;
        if over {
            break;
        }
        // The rings outlive the VM, so what it wrote last is read after it has gone.
        if let Err(e) = client.call::<serde_json::Value>(Call::Status) {
            if !e.is_gone() {
                return Err(e.to_string());
            }
            gone = true;
            recording.drain(&mut rings)?;
            break;
        }
        if progress {
            recording.show_progress(start.elapsed());
        }
    }
    if !gone && let Ok(losses) = client.call::<Vec<RingLoss>>(Call::RingLosses) {
        recording.add_losses(losses.iter().map(|l| l.lost).sum())?;
    }
    if progress {
        eprint!("\r\x1b[K");
    }
    recording.finish(args, gone)?;
    Ok(DONE)
}

/// Has the VM look for the guest's kernel, and waits until it has: the first samples are to have chains too.
fn find_kernel(client: &mut Client, args: &RecordArgs, signals: &StopSignals) -> Result<(), String> {
    let until = Instant::now() + KERNEL_PATIENCE;
    loop {
        let info: KernelInfo = client.call(Call::Kernel).map_err(|e| e.to_string())?;
        match info.state {
            KernelState::Looking if Instant::now() < until => {}
            KernelState::Looking => {
                log::warn!("the guest's kernel is still looked for; the first samples have no kernel chains");
                return Ok(());
            }
            KernelState::NotFound => {
                log::warn!("no kernel chains and no task names: {}", info.detail);
                return Ok(());
            }
            KernelState::Found if !args.quiet => {
                log::info!("guest kernel: {}", info.detail);
                return Ok(());
            }
            KernelState::Found | KernelState::Unknown => return Ok(()),
        }
        if wait_until(Instant::now() + LOOK, signals) == Woken::Signal {
            return Err("interrupted before the first sample".into());
        }
    }
}

/// Names of the guest's addresses, as the VM knows them.
struct Names {
    /// Sorted by address.
    symbols: Vec<(u64, String)>,
    /// They serve user addresses too.
    flat: bool,
}

impl Names {
    fn of(client: &mut Client) -> Result<Self, String> {
        let (info, text) = client.symbols().map_err(|e| e.to_string())?;
        let text = String::from_utf8_lossy(&text);
        let parse = |line: &str| {
            let mut fields = line.split_ascii_whitespace();
            let address = u64::from_str_radix(fields.next()?, 16).ok()?;
            let kind = fields.next()?;
            let name = fields.next()?;
            matches!(kind, "t" | "T" | "w" | "W").then(|| (address, name.to_owned()))
        };
        let mut symbols: Vec<_> = text.lines().filter_map(parse).collect();
        // Of several at one address the first is kept, as the VM put them.
        symbols.sort_by_key(|s| s.0);
        symbols.dedup_by_key(|s| s.0);
        Ok(Self {
            symbols,
            flat: info.flat,
        })
    }

    fn find(&self, address: u64) -> Option<SavedSymbol> {
        let after = self.symbols.partition_point(|s| s.0 <= address);
        let (start, name) = self.symbols.get(after.checked_sub(1)?)?;
        // Past the last symbol anything may follow; one page is granted.
        let end = self
            .symbols
            .get(after)
            .map_or(start.saturating_add(4096), |next| next.0);
        (address < end).then(|| SavedSymbol {
            start: *start,
            end,
            name: name.clone(),
            pid: None,
        })
    }

    fn address_of(&self, name: &str) -> Option<u64> {
        self.symbols.iter().find(|s| s.1 == name).map(|s| s.0)
    }

    /// The kernel's place, for perf.
    fn kernel_map(&self) -> Option<KernelMap> {
        let (symbol, start) = ["_text", "_stext"]
            .into_iter()
            .find_map(|name| Some((name, self.address_of(name)?)))?;
        let last = self.symbols.last()?.0.saturating_add(4096);
        Some(KernelMap {
            start,
            len: self.address_of("_etext").unwrap_or(last).saturating_sub(start),
            reference_symbol: symbol.to_owned(),
            reference_address: start,
        })
    }
}

/// The file that is being written.
struct Recording {
    writer: PerfDataWriter<BufWriter<File>>,
    names: Names,
    /// The file's id of an event by that of its samples, which differs on each vCPU.
    ids: HashMap<u64, u64>,
    first_id: u64,
    format: Format,
    tasks: HashMap<u32, [u8; 16]>,
    addresses: HashSet<(bool, u64)>,
    chain: Vec<u64>,
    last_ns: u64,
    lost: u64,
    throttled: u64,
    damaged: u64,
}

impl Recording {
    fn start(
        args: &RecordArgs,
        client: &Client,
        opened: &[Opened],
        sampling: Sampling,
        names: Names,
    ) -> Result<Self, String> {
        let mut events: Vec<(u32, EventInfo)> = Vec::new();
        let mut ids = HashMap::new();
        for o in opened {
            let id = match events.iter().find(|(index, _)| *index == o.index) {
                Some((_, event)) => event.id,
                None => {
                    let rate = if sampling.frequency {
                        Rate::FrequencyHz(sampling.rate)
                    } else {
                        Rate::Period(sampling.rate)
                    };
                    let event = EventInfo {
                        name: o.name.clone(),
                        type_: o.kind,
                        config: o.config,
                        rate,
                        id: o.id,
                    };
                    events.push((o.index, event));
                    o.id
                }
            };
            ids.insert(o.id, id);
        }
        let meta = Meta {
            hostname: client.info().name.clone(),
            os_release: String::new(),
            vcpus: client.info().vcpus,
            command: std::env::args().collect(),
        };
        keep_old(&args.output)?;
        let name = args.output.display();
        let file = File::create(&args.output).map_err(|e| format!("{name}: {e}"))?;
        let events: Vec<EventInfo> = events.into_iter().map(|(_, event)| event).collect();
        let first_id = events.first().map_or(0, |e| e.id);
        let mut writer =
            PerfDataWriter::new(BufWriter::new(file), meta, events).map_err(|e| format!("{name}: {e}"))?;
        if let Some(kernel) = names.kernel_map() {
            writer.kernel(&kernel).map_err(|e| format!("{name}: {e}"))?;
        }
        Ok(Self {
            writer,
            names,
            ids,
            first_id,
            format: Format {
                sample_type: SampleType::empty(),
                read_format: ReadFormat::empty(),
            },
            tasks: HashMap::new(),
            addresses: HashSet::new(),
            chain: Vec::new(),
            last_ns: 0,
            lost: 0,
            throttled: 0,
            damaged: 0,
        })
    }

    /// Writes what is in the rings.
    fn drain(&mut self, rings: &mut [(RingReader, RingInfo)]) -> Result<(), String> {
        for (reader, info) in rings {
            self.format.sample_type = SampleType::from_bits_truncate(info.sample_type);
            // A vCPU that samples as fast as this reads must not hold up the others.
            for _ in 0..100_000 {
                let record = match reader.next_record() {
                    Ok(Some(raw)) => Record::decode(raw, self.format),
                    Ok(None) => break,
                    Err(e) => {
                        log::warn!("the ring of vCPU {}: {e}", info.vcpu);
                        self.damaged += 1;
                        break;
                    }
                };
                match record {
                    Ok(Record::Sample(sample)) => self.sample(&sample)?,
                    Ok(Record::Lost(lost)) => self.add_losses(lost.lost)?,
                    Ok(Record::Throttle(_)) => self.throttled += 1,
                    Ok(_) => {}
                    Err(e) => {
                        log::debug!("a record of vCPU {}: {e}", info.vcpu);
                        self.damaged += 1;
                    }
                }
            }
        }
        Ok(())
    }

    fn sample(&mut self, sample: &RingSample<'_>) -> Result<(), String> {
        let raw = RawSample::decode(sample.raw).unwrap_or_default();
        let (pid, tid) = raw.task.map_or((NO_PID, NO_PID), |(pid, tid, _)| (pid, tid));
        if let Some((pid, tid, comm)) = raw.task
            && self.tasks.len() < MAX_TASKS
            && self.tasks.insert(tid, comm) != Some(comm)
        {
            let task = TaskName {
                time_ns: sample.time_ns,
                pid,
                tid,
                comm: printable(&comm),
            };
            self.writer.task(&task).map_err(failed)?;
        }
        self.chain.clear();
        self.chain.extend(sample.callchain.iter());
        self.note_addresses(sample.ip, raw.cpl != 3);
        self.last_ns = self.last_ns.max(sample.time_ns);
        let event_id = self.ids.get(&sample.stream_id).copied().unwrap_or(self.first_id);
        self.writer
            .sample(&Sample {
                time_ns: sample.time_ns,
                vcpu: sample.cpu,
                pid,
                tid,
                cpl: raw.cpl,
                ip: sample.ip,
                cr3: raw.cr3,
                period: sample.period,
                event_id,
                chain: &self.chain,
            })
            .map_err(failed)
    }

    /// Keeps in mind which addresses need names. A caller's frame is looked up just before its address.
    fn note_addresses(&mut self, ip: u64, mut kernel: bool) {
        if self.addresses.len() >= MAX_ADDRESSES {
            return;
        }
        self.addresses.insert((kernel, ip));
        let mut first = true;
        for &frame in &self.chain {
            match frame {
                CONTEXT_GUEST_KERNEL => kernel = true,
                CONTEXT_GUEST_USER => kernel = false,
                marker if marker >= CONTEXT_MAX => {}
                address => {
                    let caller = !std::mem::take(&mut first);
                    self.addresses
                        .insert((kernel, address.wrapping_sub(u64::from(caller))));
                }
            }
        }
    }

    fn add_losses(&mut self, lost: u64) -> Result<(), String> {
        if lost == 0 {
            return Ok(());
        }
        self.lost += lost;
        self.writer
            .lost(self.first_id, lost, self.last_ns)
            .map_err(failed)
    }

    fn show_progress(&self, elapsed: Duration) {
        eprint!(
            "\r[ perfvisor record: {} samples, {:.3} MB, {} lost, {} s ]\x1b[K",
            self.writer.samples(),
            self.writer.bytes() as f64 / 1e6,
            self.lost,
            elapsed.as_secs()
        );
        let _ = std::io::stderr().flush();
    }

    fn saved_symbols(&self) -> Vec<SavedSymbol> {
        let mut saved: HashMap<(Option<u32>, u64), SavedSymbol> = HashMap::new();
        for &(kernel, address) in &self.addresses {
            if !kernel && !self.names.flat {
                continue;
            }
            if let Some(symbol) = self.names.find(address) {
                let pid = (!kernel).then_some(NO_PID);
                saved
                    .entry((pid, symbol.start))
                    .or_insert(SavedSymbol { pid, ..symbol });
            }
        }
        let mut list: Vec<_> = saved.into_values().collect();
        list.sort_by_key(|s| (s.pid, s.start));
        list
    }

    fn finish(self, args: &RecordArgs, gone: bool) -> Result<(), String> {
        let symbols = self.saved_symbols();
        let (samples, bytes) = (self.writer.samples(), self.writer.bytes());
        self.writer.finish(&symbols).map_err(failed)?;
        let name = args.output.display();
        if !args.quiet {
            let mb = bytes as f64 / 1e6;
            eprintln!("[ perfvisor record: wrote {mb:.3} MB to {name} ({samples} samples) ]");
        }
        if gone {
            log::warn!("the VM ended; {name} has what it wrote until then");
        }
        if self.lost > 0 {
            log::warn!(
                "{} samples were lost; use larger rings (-m) or a lower frequency",
                self.lost
            );
        }
        if self.throttled > 0 {
            log::warn!(
                "sampling was throttled {} times; use a lower frequency",
                self.throttled
            );
        }
        if self.damaged > 0 {
            log::warn!("{} records were damaged and left out", self.damaged);
        }
        Ok(())
    }
}

fn failed(e: std::io::Error) -> String {
    format!("writing the samples: {e}")
}

fn printable(comm: &[u8; 16]) -> String {
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

/// A file that is there becomes `FILE.old`, as with perf.
fn keep_old(path: &Path) -> Result<(), String> {
    if !std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() > 0) {
        return Ok(());
    }
    let mut old = path.as_os_str().to_owned();
    old.push(".old");
    std::fs::rename(path, &old).map_err(|e| format!("{}: {e}", path.display()))
}
