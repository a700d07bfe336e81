//! The data of `perfvisor top`, from the VM's control socket.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use perf_core::record::{Format, Record};
use perf_core::ring::RingReader;
use perf_core::{ReadFormat, SampleType, error_line};

use super::args::TopArgs;
use super::screen::{Cell, Screen, SymbolRow, VcpuRow};
use crate::commands::{CommandError, Woken, all_sampled, connect, files, one_line, wait_until};
use crate::signals::StopSignals;
use control_api::client::{Client, ClientError};
use control_api::protocol::{
    EventReading, Generation, GuestViews, Joined, KernelInfo, KernelState, Opened, RingInfo, RingLoss,
    Sampling, VcpuView, VmInfo,
};
use control_api::request;
use guest_profile::export::symbolize::{KERNEL_OBJECT, USER_OBJECT};
use guest_profile::export::{FileMapping, NO_PID};
use guest_profile::programs::GuestMount;
use guest_profile::sample::RawSample;
use kernel_images::symbols::KernelSymbols;

/// What is counted on each vCPU beside the samples, in the order of the columns.
const COUNTED: &str = "task-clock,steal-ns,cycles,kvm:exits";
/// Pages of each vCPU's ring.
const RING_PAGES: u32 = 64;
/// Most records taken from a ring for one screen.
const MOST_RECORDS: usize = 100_000;
/// Most different places in the code that are kept.
const MOST_PLACES: usize = 1 << 16;
/// Most mappings of guest programs that are kept.
const MOST_MAPPINGS: usize = 1 << 16;
/// What a screen keeps of the weight of the one before, so that it follows what the guest does.
const DECAY: f64 = 7.0 / 8.0;
/// Below this a place is forgotten.
const FORGOTTEN: f64 = 1e-3;
/// How long the VM may look for its guest's kernel before the first screen.
const KERNEL_PATIENCE: Duration = Duration::from_secs(10);
/// How long vCPUs may take to show what their guests count.
const VIEW_PATIENCE: Duration = Duration::from_millis(500);

/// Where a sample fell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Place {
    kernel: bool,
    pid: u32,
    ip: u64,
}

/// A screen, or none because the VM has ended.
#[expect(clippy::large_enum_variant, reason = "made once in seconds")]
pub(super) enum Took {
    Screen(Screen),
    Gone,
}

/// The connection and what came over it.
pub(super) struct Collector {
    client: Client,
    event: String,
    frequency_hz: u64,
    rings: Vec<(RingReader, RingInfo)>,
    counted: Vec<Opened>,
    names: Names,
    /// Decayed weight and name of each place.
    places: HashMap<Place, (f64, u64)>,
    /// Samples of each vCPU since the last screen.
    by_vcpu: BTreeMap<u32, u64>,
    samples: u64,
    lost: u64,
    before: Vec<EventReading>,
    before_at: Instant,
}

impl Collector {
    /// Connects, opens and enables everything.
    pub(super) fn open(args: &TopArgs, signals: &StopSignals) -> Result<Self, CommandError> {
        let mut client = connect(args.name.as_deref(), args.socket.as_deref())?;
        let vcpus = args.vcpu.as_ref().map(|list| list.0.clone());
        let sampling = Sampling {
            rate: args.frequency,
            frequency: true,
            callchain: false,
            chain_every: 1,
            stack_bytes: 0,
        };
        let sampled: Vec<Opened> = client.call(request::Open {
            events: args.event.clone(),
            vcpus: vcpus.clone(),
            whole: false,
            sampling: Some(sampling),
        })?;
        all_sampled(&sampled)?;
        let counted: Vec<Opened> = client.call(request::Open {
            events: COUNTED.into(),
            // A vCPU that comes later counts from its first instruction.
            whole: vcpus.is_none(),
            vcpus,
            sampling: None,
        })?;
        wait_for_kernel(&mut client, signals)?;
        let names = Names::of(&mut client, args)?;
        let mut sampled_vcpus: Vec<u32> = sampled.iter().filter_map(|o| o.vcpu).collect();
        sampled_vcpus.sort_unstable();
        sampled_vcpus.dedup();
        let mut rings = Vec::new();
        for vcpu in sampled_vcpus {
            rings.push(ring_of(&mut client, vcpu)?);
        }
        let () = client.call(request::Enable)?;
        let before = client.call(request::Read)?;
        Ok(Self {
            client,
            event: args.event.clone(),
            frequency_hz: args.frequency,
            rings,
            counted,
            names,
            places: HashMap::new(),
            by_vcpu: BTreeMap::new(),
            samples: 0,
            lost: 0,
            before,
            before_at: Instant::now(),
        })
    }

    /// The VM, as it said of itself at first.
    pub(super) fn vm(&self) -> &VmInfo {
        self.client.info()
    }

    /// Forgets the samples so far.
    pub(super) fn reset(&mut self) {
        self.places.clear();
        self.samples = 0;
        self.lost = 0;
    }

    /// Takes what came since the last time.
    pub(super) fn take(&mut self, now: Instant) -> Result<Took, CommandError> {
        for (weight, _) in self.places.values_mut() {
            *weight *= DECAY;
        }
        self.places.retain(|_, (weight, _)| *weight >= FORGOTTEN);
        self.by_vcpu.clear();
        self.drain();
        match self.client.call(request::Joined) {
            Ok(joined) => self.join(&joined)?,
            Err(e) if e.is_gone() => return Ok(Took::Gone),
            Err(e) => return Err(e.into()),
        }
        match self.ask(now) {
            Ok(screen) => Ok(Took::Screen(screen)),
            Err(e) if e.is_gone() => Ok(Took::Gone),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes in the rings of vCPUs that came. What was in that of one of the same number has just been read.
    fn join(&mut self, joined: &[Joined]) -> Result<(), CommandError> {
        for of_vcpu in joined {
            self.rings.retain(|(_, info)| info.vcpu != of_vcpu.vcpu);
            match &of_vcpu.refused {
                Some(why) => log::warn!("vCPU {} came and is not sampled: {why}", of_vcpu.vcpu),
                None => self.rings.push(ring_of(&mut self.client, of_vcpu.vcpu)?),
            }
        }
        Ok(())
    }

    fn drain(&mut self) {
        for at in 0..self.rings.len() {
            let format = Format {
                sample_type: SampleType::from_bits_truncate(self.rings[at].1.sample_type),
                read_format: ReadFormat::empty(),
                ..Format::default()
            };
            for _ in 0..MOST_RECORDS {
                let (reader, info) = &mut self.rings[at];
                let record = match reader.next_record() {
                    Ok(Some(raw)) => Record::decode(raw, format),
                    Ok(None) => break,
                    Err(e) => {
                        log::debug!("the ring of vCPU {}: {}", info.vcpu, error_line(&e));
                        break;
                    }
                };
                match record {
                    Ok(Record::Sample(sample)) => {
                        let raw = RawSample::decode(sample.raw).unwrap_or_default();
                        let pid = raw.task.map_or(NO_PID, |(pid, ..)| pid);
                        for told in RawSample::mappings(sample.raw) {
                            self.names.mapping(FileMapping {
                                time_ns: sample.time_ns,
                                pid,
                                start: told.start,
                                len: told.len,
                                file_offset: told.file_offset,
                                path: told.path.to_owned(),
                                build_id: None,
                            });
                        }
                        let place = Place {
                            kernel: raw.cpl != 3,
                            pid,
                            ip: sample.ip,
                        };
                        self.samples += 1;
                        *self.by_vcpu.entry(info.vcpu).or_default() += 1;
                        if self.places.len() < MOST_PLACES || self.places.contains_key(&place) {
                            let entry = self.places.entry(place).or_default();
                            entry.0 += sample.period as f64;
                            entry.1 += 1;
                        }
                    }
                    Ok(Record::Lost(lost)) => self.lost += lost.lost,
                    Ok(_) => {}
                    Err(e) => log::debug!("a record of vCPU {}: {}", info.vcpu, error_line(&e)),
                }
            }
        }
    }

    /// Asks the VM for what the samples do not say.
    fn ask(&mut self, now: Instant) -> Result<Screen, ClientError> {
        let vm: VmInfo = self.client.call(request::Status)?;
        let readings: Vec<EventReading> = self.client.call(request::Read)?;
        let losses: Vec<RingLoss> = self.client.call(request::RingLosses)?;
        let views = self.views()?;
        let elapsed = now.duration_since(self.before_at);
        let vcpus = self.vcpu_rows(&readings, elapsed);
        self.before = readings;
        self.before_at = now;
        Ok(Screen {
            event: self.event.clone(),
            frequency_hz: self.frequency_hz,
            samples: self.samples,
            lost: self.lost + losses.iter().map(|l| l.lost).sum::<u64>(),
            symbols: self.symbol_rows(),
            vcpus,
            views,
            vm,
        })
    }

    fn views(&mut self) -> Result<Vec<VcpuView>, ClientError> {
        if self.client.info().pmu == "off" {
            return Ok(Vec::new());
        }
        let asked: Generation = self.client.call(request::GuestView)?;
        let until = Instant::now() + VIEW_PATIENCE;
        loop {
            let call = request::GuestViewResult {
                generation: asked.generation,
            };
            let views: GuestViews = self.client.call(call)?;
            if views.complete || Instant::now() > until {
                return Ok(views.vcpus);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn symbol_rows(&mut self) -> Vec<SymbolRow> {
        let mut rows: HashMap<(String, String, bool), (f64, u64)> = HashMap::new();
        let mut total = 0.0;
        for (place, (weight, samples)) in &self.places {
            let (object, symbol) = self.names.name(*place);
            let row = rows.entry((object, symbol, place.kernel)).or_default();
            row.0 += weight;
            row.1 += samples;
            total += weight;
        }
        rows.into_iter()
            .map(|((object, symbol, kernel), (weight, samples))| SymbolRow {
                percent: 100.0 * weight / total,
                samples,
                object,
                symbol,
                kernel,
            })
            .collect()
    }

    fn vcpu_rows(&self, readings: &[EventReading], elapsed: Duration) -> Vec<VcpuRow> {
        let seconds = elapsed.as_secs_f64().max(1e-9);
        // The parts of the vCPUs that there are or were.
        let mut vcpus: BTreeSet<u32> = self.counted.iter().filter_map(|o| o.vcpu).collect();
        let parts = readings.iter().flat_map(|r| &r.vcpus);
        vcpus.extend(parts.map(|part| part.vcpu));
        let row = |vcpu: u32| {
            let of_vcpu = self.counted.iter().filter(|o| o.vcpu.is_none_or(|of| of == vcpu));
            let cell = |event: &Opened| {
                let find = |list: &[EventReading]| {
                    let reading = list.iter().find(|r| Some(r.handle) == event.handle)?;
                    match event.vcpu {
                        Some(_) => Some(reading.clone()),
                        None => reading.on(vcpu),
                    }
                };
                match (event.handle, find(readings)) {
                    (None, _) => Cell::NotSupported,
                    (Some(_), None) => Cell::NotCounted,
                    (Some(_), Some(now)) => rate(&now, find(&self.before).as_ref(), seconds),
                }
            };
            VcpuRow {
                vcpu,
                samples: self.by_vcpu.get(&vcpu).copied().unwrap_or(0),
                cells: of_vcpu.map(cell).collect(),
            }
        };
        vcpus.into_iter().map(row).collect()
    }
}

/// The ring of the sampling event on `vcpu`.
fn ring_of(client: &mut Client, vcpu: u32) -> Result<(RingReader, RingInfo), CommandError> {
    let call = request::Ring {
        vcpu,
        pages: RING_PAGES,
    };
    let (info, memfd): (RingInfo, File) = client.call_with_file(call)?;
    let reader = RingReader::map(memfd.as_fd()).map_err(|source| CommandError::Ring { vcpu, source })?;
    Ok((reader, info))
}

/// Counts a second since `before`, scaled by the time the event was on.
fn rate(now: &EventReading, before: Option<&EventReading>, seconds: f64) -> Cell {
    let Some(growth) = now.since(before).filter(|g| g.running_ns > 0) else {
        return Cell::NotCounted;
    };
    let share = (growth.running_ns as f64 / growth.enabled_ns.max(growth.running_ns) as f64).min(1.0);
    Cell::Rate {
        per_second: growth.count as f64 / seconds,
        share,
    }
}

/// Asks the VM to look for its guest's kernel, and waits for it a while.
fn wait_for_kernel(client: &mut Client, signals: &StopSignals) -> Result<(), CommandError> {
    let until = Instant::now() + KERNEL_PATIENCE;
    loop {
        let info: KernelInfo = client.call(request::Kernel)?;
        match info.state {
            KernelState::Looking if Instant::now() < until => {}
            KernelState::NotFound => {
                log::info!("no task names: {}", info.detail);
                return Ok(());
            }
            _ => return Ok(()),
        }
        if wait_until(Instant::now() + Duration::from_millis(50), signals) == Woken::Signal {
            return Err(CommandError::Interrupted);
        }
    }
}

/// Names of the guest's addresses.
struct Names {
    kernel: Option<KernelSymbols>,
    /// The kernel's symbols serve user addresses too.
    flat: bool,
    mount: Option<GuestMount>,
    mappings: Vec<FileMapping>,
    known: HashMap<Place, (String, String)>,
}

impl Names {
    fn of(client: &mut Client, args: &TopArgs) -> Result<Self, CommandError> {
        let (info, text) = client.symbols()?;
        // A VM may have none to give.
        let running = KernelSymbols::parse_text(&text).ok();
        let reference = running.as_ref().and_then(|symbols| {
            let find = |name| Some((name, symbols.by_name(name)?.address));
            ["_text", "_stext"].into_iter().find_map(find)
        });
        let given = files::kernel_symbols(&args.symbols, reference)?;
        Ok(Self {
            flat: info.flat && given.is_none(),
            kernel: given.or(running),
            mount: files::guest_mount(&args.symbols)?,
            mappings: Vec::new(),
            known: HashMap::new(),
        })
    }

    fn mapping(&mut self, mapping: FileMapping) {
        if self.mappings.len() < MOST_MAPPINGS {
            // What was not known of this process may be now.
            self.known.retain(|place, _| place.pid != mapping.pid);
            self.mappings.push(mapping);
        }
    }

    /// Object and function of a place, fit to be shown: the guest chose them.
    fn name(&mut self, place: Place) -> (String, String) {
        if let Some(known) = self.known.get(&place) {
            return known.clone();
        }
        let (object, symbol) = self.look_up(place);
        let named = (one_line(&object), one_line(&symbol));
        if self.known.len() >= 2 * MOST_PLACES {
            self.known.clear();
        }
        self.known.insert(place, named.clone());
        named
    }

    fn look_up(&mut self, place: Place) -> (String, String) {
        if place.kernel || self.flat {
            let object = if place.kernel { KERNEL_OBJECT } else { USER_OBJECT };
            let found = self.kernel.as_ref().and_then(|symbols| {
                if self.flat {
                    symbols.resolve_flat(place.ip)
                } else {
                    symbols.resolve(place.ip)
                }
            });
            let name = found.map_or_else(
                || format!("{:#018x}", place.ip),
                |(symbol, _)| symbol.name.to_owned(),
            );
            return (object.to_owned(), name);
        }
        let offset = |m: &FileMapping| place.ip.checked_sub(m.start).filter(|off| *off < m.len);
        let mapping = self
            .mappings
            .iter()
            .rev()
            .find_map(|m| (m.pid == place.pid).then_some(m).zip(offset(m)));
        let Some((mapping, offset)) = mapping else {
            return (USER_OBJECT.to_owned(), "[unknown]".to_owned());
        };
        let symbol = self.mount.as_mut().and_then(|mount| {
            let object = mount.object(&mapping.path)?;
            let linked = object.address_of_file_offset(offset.checked_add(mapping.file_offset)?)?;
            Some(object.resolve(linked)?.name)
        });
        (
            mapping.path.clone(),
            symbol.unwrap_or_else(|| "[unknown]".to_owned()),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(value: u64, enabled_ns: u64, running_ns: u64) -> EventReading {
        EventReading {
            handle: 0,
            value,
            enabled_ns,
            running_ns,
            estimate: Some(2 * value),
            standard_error: None,
            bound: None,
            failed: false,
            gone: false,
            vcpus: Vec::new(),
        }
    }

    /// A rate is of the interval alone; what was not on is not taken for zero.
    #[test]
    fn rates_are_of_the_interval() {
        let before = reading(100, 1000, 1000);
        let cell = rate(&reading(300, 2000, 1500), Some(&before), 2.0);
        let expected = Cell::Rate {
            per_second: 200.0,
            share: 0.5,
        };
        assert_eq!(cell, expected);
        assert_eq!(
            rate(&reading(100, 2000, 1000), Some(&before), 2.0),
            Cell::NotCounted
        );
    }

    /// A guest's names cannot speak to the terminal.
    #[test]
    fn names_hold_no_control_characters() {
        let mut names = Names {
            kernel: KernelSymbols::parse_text(b"ffffffff81000000 T a\x1b[2Jb\nffffffff81000100 T end\n").ok(),
            flat: false,
            mount: None,
            mappings: Vec::new(),
            known: HashMap::new(),
        };
        names.mapping(FileMapping {
            time_ns: 0,
            pid: 7,
            start: 0x1000,
            len: 0x1000,
            file_offset: 0,
            path: "/bin/\x1b]0;x\x07".into(),
            build_id: None,
        });
        let place = |kernel, pid, ip| Place { kernel, pid, ip };
        for place in [
            place(true, NO_PID, 0xffff_ffff_8100_0010),
            place(false, 7, 0x1800),
        ] {
            let (object, symbol) = names.name(place);
            assert!(!(object + &symbol).chars().any(char::is_control));
        }
        assert_eq!(names.name(place(false, 8, 0x1800)).0, USER_OBJECT);
    }
}
