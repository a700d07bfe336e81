//! The built-in measuring guest: its jobs and results.
//!
//! Results are JSON (`guest-images/bare-metal/validate/main.c`). A measurement has three steps,
//! ready, done and result, with a halt after each step, so that the host can read the same counters
//! while they are stopped.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use perf_core::ReadFormat;
use perf_core::SampleType;
use perf_core::record::{DecodedRecord, RecordFormat};
use perf_core::ring::RingReader;
use serde::Deserialize;

use super::child::{ChildVm, VmMeasurementError};
use super::procfs::ThreadAccounting;
use crate::host::StopRequestedCheck;
use control_api::protocol::{
    EventReading, OpenedEvent, RequestError, SampleRingInfo, SamplingParams, VcpuView,
};
use control_api::request;

/// Timeout for the guest to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout for a measurement. Single-stepped code and nested guests are slow.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(300);
/// Number of data pages of a ring for the operator's samples.
const RING_PAGES: u32 = 64;

/// Selector bit that enables counting at CPL 3.
pub const USR: u64 = 1 << 16;
/// Selector bit that enables counting at CPL 0.
pub const OS: u64 = 1 << 17;

/// Properties of the PMU that the guest reports at startup.
#[derive(Clone, Debug, Deserialize)]
pub struct GuestPmuInfo {
    /// Number of running guest CPUs.
    pub cpus: u32,
    /// `true` if the guest's CPUID vendor is AuthenticAMD.
    pub amd: bool,
    /// Number of general-purpose counters.
    pub gp: u32,
    /// Bitmap of the available fixed counters.
    pub fixed: u32,
    /// Bitmap of architectural events that CPUID marks as unavailable.
    pub unavailable: u32,
}

/// A measurement that the guest is requested to make.
#[derive(Clone, Debug, Default)]
pub struct MeasurementJob {
    /// Type of work that the guest does.
    pub work: &'static str,
    /// Number of units of work. The unit depends on the type of work.
    pub n: u64,
    /// Privilege level at which the work is done, for types of work that can run at CPL 0 and at
    /// CPL 3.
    pub cpl: u32,
    /// Event selectors of the counters, starting with counter 0, without their enable bit.
    pub selectors: Vec<u64>,
    /// Value of the MSR IA32_FIXED_CTR_CTRL.
    pub fixed_control: u64,
    /// Sampling period of counter 0, or 0 for no interrupts.
    pub period: u64,
    /// Number of CPUs that do the work; 0 means 1.
    pub cpus: u32,
}

impl MeasurementJob {
    /// Creates a job that does `n` units of `work` at CPL 0 without counters.
    pub fn new(work: &'static str, n: u64) -> Self {
        Self {
            work,
            n,
            ..Self::default()
        }
    }

    /// Sets the privilege level at which the work is done.
    #[must_use]
    pub fn at_cpl(mut self, cpl: u32) -> Self {
        self.cpl = cpl;
        self
    }

    /// Adds a general-purpose counter with an event selector.
    #[must_use]
    pub fn counter(mut self, selector: u64) -> Self {
        self.selectors.push(selector);
        self
    }

    fn line(&self) -> String {
        let mut line = format!("measure work={} n={} cpl={}", self.work, self.n.max(1), self.cpl);
        for selector in &self.selectors {
            let _ = write!(line, " c={selector:#x}");
        }
        let _ = write!(
            line,
            " f={:#x} period={} cpus={}",
            self.fixed_control,
            self.period,
            self.cpus.max(1)
        );
        line
    }
}

/// Counts and PMI statistics of one guest CPU.
#[derive(Clone, Debug, Deserialize)]
pub struct GuestCpuResult {
    /// Duration of the work, in TSC ticks.
    pub tsc: u64,
    /// Values of the general-purpose counters.
    pub c: Vec<u64>,
    /// Values of the fixed counters. Empty if none was used.
    pub f: Vec<u64>,
    /// Number of PMIs with an overflow.
    #[serde(default)]
    pub pmis: u64,
    /// Number of periods that elapsed without a separate PMI.
    #[serde(default)]
    pub late: u64,
    /// Number of PMIs without an overflow.
    #[serde(default)]
    pub spurious: u64,
    /// Number of PMIs in each of the three profiled functions, followed by the number in all other
    /// code.
    #[serde(default)]
    pub struck: Vec<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "at", rename_all = "lowercase")]
enum GuestReply {
    Hello(GuestPmuInfo),
    #[serde(skip)]
    Ready,
    #[serde(skip)]
    Done,
    Refused,
    Result {
        cpus: Vec<GuestCpuResult>,
    },
    #[serde(other)]
    Other,
}

/// An operator's events during a measurement.
#[derive(Clone, Copy, Debug)]
pub struct OperatorEventConfig<'a> {
    /// Event list in perf's syntax.
    pub events: &'a str,
    /// Sampling period, or `None` for counting.
    pub period: Option<u64>,
}

impl<'a> OperatorEventConfig<'a> {
    /// Specifies that `events` are counted without sampling.
    pub fn counting(events: &'a str) -> Self {
        Self { events, period: None }
    }
}

/// Results of the operator's events during a measurement.
#[derive(Debug)]
pub struct OperatorEventResults {
    /// Events that the VM opened for the operator, or the VM's error if it refused them.
    pub opened: Result<Vec<OpenedEvent>, RequestError>,
    /// Counts of the operator's events.
    pub readings: Vec<EventReading>,
    /// Instruction addresses of the operator's samples.
    pub samples: Vec<u64>,
    /// Number of samples that the operator's ring lost.
    pub lost: u64,
}

impl OperatorEventResults {
    /// Returns the reading of event `index` of the list on vCPU `vcpu`.
    pub fn reading(&self, index: u32, vcpu: u32) -> Option<&EventReading> {
        let opened = self.opened.as_ref().ok()?;
        let handle = opened
            .iter()
            .find(|o| o.index == index && o.vcpu == Some(vcpu))?
            .handle?;
        self.readings.iter().find(|r| r.handle == handle)
    }
}

/// Results of a measurement from the guest, the host and the operator.
#[derive(Debug)]
pub struct Measurement {
    /// Results of each guest CPU.
    pub cpus: Vec<GuestCpuResult>,
    /// The host's view of the counters before the measurement.
    pub before: Vec<VcpuView>,
    /// The host's view of the counters after the measurement.
    pub after: Vec<VcpuView>,
    /// The host kernel's accounting data for each vCPU thread.
    pub facts: Vec<ThreadAccounting>,
    /// CPU time of an empty measurement, in ns.
    pub overhead_ns: u64,
    /// Results of the operator's events, if an operator took part in the measurement.
    pub operator: Option<OperatorEventResults>,
}

impl Measurement {
    /// Returns the host's view of a counter (such as `gp0` or `fixed1`) of CPU `cpu` after the
    /// measurement.
    pub fn host(&self, cpu: usize, counter: &str) -> Option<&control_api::protocol::GuestCounter> {
        find(&self.after, cpu, counter)
    }

    /// Returns the number of overflows of a counter of CPU `cpu` during the measurement, as seen by
    /// the host.
    pub fn overflows(&self, cpu: usize, counter: &str) -> Option<u64> {
        let then = find(&self.before, cpu, counter)?.overflows?;
        Some(self.host(cpu, counter)?.overflows?.saturating_sub(then))
    }
}

fn find<'a>(
    views: &'a [VcpuView],
    cpu: usize,
    counter: &str,
) -> Option<&'a control_api::protocol::GuestCounter> {
    views.get(cpu)?.counters.iter().find(|c| c.counter == counter)
}

/// A VM that runs the measuring guest.
pub struct MeasuringGuest {
    /// The VM of the guest.
    pub vm: ChildVm,
    /// Properties that the guest reported at startup.
    pub hello: GuestPmuInfo,
    /// Number of units of work that the guest does per millisecond, by type of work and privilege
    /// level.
    pub pace: HashMap<(&'static str, u32), f64>,
    /// CPU time of an empty measurement in nanoseconds, or 0 if not measured yet.
    pub overhead_ns: u64,
}

impl MeasuringGuest {
    /// Starts the guest in a VM of `perfvisor run` with `arguments`.
    ///
    /// # Errors
    /// Returns a [`VmMeasurementError`] if the VM or its guest does not start.
    pub fn start(arguments: &[&str], signals: &StopRequestedCheck) -> Result<Self, VmMeasurementError> {
        let mut all = vec!["--builtin", "validate", "--memory", "128M"];
        all.extend_from_slice(arguments);
        let all: Vec<String> = all.into_iter().map(str::to_owned).collect();
        Self::wait_for_greeting(ChildVm::start(&all, signals)?)
    }

    /// Waits for the guest's greeting in a VM that was just started.
    fn wait_for_greeting(mut vm: ChildVm) -> Result<Self, VmMeasurementError> {
        let hello = vm.wait_for(START_TIMEOUT, "it was started", |line| match parse(line) {
            Some(GuestReply::Hello(hello)) => Some(hello),
            _ => None,
        })?;
        let pace = HashMap::new();
        Ok(Self {
            vm,
            hello,
            pace,
            overhead_ns: 0,
        })
    }

    fn step(&mut self, what: &str) -> Result<GuestReply, VmMeasurementError> {
        self.vm.wait_for(COMMAND_TIMEOUT, what, |line| {
            parse(line).filter(|said| !matches!(said, GuestReply::Other))
        })
    }

    /// Runs a measurement, with optional operator events.
    ///
    /// # Errors
    /// Returns a [`VmMeasurementError`] if the VM exits, does not respond, or sends an unexpected
    /// reply.
    pub fn measure(
        &mut self,
        job: &MeasurementJob,
        operator: Option<OperatorEventConfig<'_>>,
    ) -> Result<Measurement, VmMeasurementError> {
        let line = job.line();
        let wrong = |said: &GuestReply| Err(VmMeasurementError::Answer(format!("{said:?} to \"{line}\"")));
        self.vm.type_line(&line)?;
        match self.step(&line)? {
            GuestReply::Ready => {}
            said => return wrong(&said),
        }
        let before = self.vm.views()?;
        let mut watch = match operator {
            Some(operator) => Some(OpenOperatorEvents::open(&mut self.vm, operator)?),
            None => None,
        };
        let start = self.vm.facts()?;
        self.vm.type_line("")?;
        match self.step(&line)? {
            GuestReply::Done => {}
            said => return wrong(&said),
        }
        let end = self.vm.facts()?;
        let operator = match &mut watch {
            Some(watch) => Some(watch.close(&mut self.vm)?),
            None => None,
        };
        let after = self.vm.views()?;
        self.vm.type_line("")?;
        match self.step(&line)? {
            GuestReply::Result { cpus } if cpus.len() == job.cpus.max(1) as usize => Ok(Measurement {
                cpus,
                before,
                after,
                facts: end
                    .into_iter()
                    .zip(start)
                    .map(|(end, start)| end - start)
                    .collect(),
                overhead_ns: self.overhead_ns,
                operator,
            }),
            said => wrong(&said),
        }
    }

    /// Ends the guest and checks that the VM exited successfully.
    ///
    /// # Errors
    /// Returns [`VmMeasurementError::Ended`] for a status other than 0.
    pub fn end(self) -> Result<(), VmMeasurementError> {
        self.vm.end(Duration::from_secs(10))
    }
}

fn parse(line: &str) -> Option<GuestReply> {
    match line {
        "ready" => Some(GuestReply::Ready),
        "done" => Some(GuestReply::Done),
        line => serde_json::from_str(line).ok(),
    }
}

/// Events that the operator has opened for a measurement.
pub(super) struct OpenOperatorEvents {
    opened: Result<Vec<OpenedEvent>, RequestError>,
    ring: Option<(RingReader, SampleRingInfo)>,
}

impl OpenOperatorEvents {
    pub(super) fn open(
        vm: &mut ChildVm,
        operator: OperatorEventConfig<'_>,
    ) -> Result<Self, VmMeasurementError> {
        let client = vm.client()?;
        let opened: Result<Vec<OpenedEvent>, _> = client.call(request::Open {
            events: operator.events.to_owned(),
            vcpus: None,
            whole: false,
            sampling: operator.period.map(|period| SamplingParams {
                rate: period,
                frequency: false,
                callchain: false,
                chain_every: 1,
                stack_bytes: 0,
                branches: None,
            }),
        });
        let opened = match opened {
            Ok(opened) => opened,
            // A strict policy may refuse the operator.
            Err(control_api::client::ClientError::Refused(failure)) => {
                return Ok(Self {
                    opened: Err(failure),
                    ring: None,
                });
            }
            Err(e) => return Err(e.into()),
        };
        let mut ring = None;
        if operator.period.is_some() && opened.iter().any(|o| o.handle.is_some()) {
            let call = request::Ring {
                vcpu: 0,
                pages: RING_PAGES,
                overwrite: false,
            };
            let (info, memfd): (SampleRingInfo, File) = client.call_with_file(call)?;
            let reader = RingReader::map(memfd.as_fd()).map_err(VmMeasurementError::Ring)?;
            ring = Some((reader, info));
        }
        let () = client.call(request::Enable)?;
        Ok(Self {
            opened: Ok(opened),
            ring,
        })
    }

    pub(super) fn close(&mut self, vm: &mut ChildVm) -> Result<OperatorEventResults, VmMeasurementError> {
        let client = vm.client()?;
        let mut saw = OperatorEventResults {
            opened: self.opened.clone(),
            readings: Vec::new(),
            samples: Vec::new(),
            lost: 0,
        };
        if saw.opened.is_err() {
            return Ok(saw);
        }
        let () = client.call(request::Disable)?;
        saw.readings = client.call(request::Read)?;
        if let Some((reader, info)) = &mut self.ring {
            let format = RecordFormat {
                sample_type: SampleType::from_bits_truncate(info.sample_type),
                read_format: ReadFormat::empty(),
                ..RecordFormat::default()
            };
            while let Ok(Some(raw)) = reader.next_record() {
                match DecodedRecord::decode(raw, format) {
                    Ok(DecodedRecord::Sample(sample)) => saw.samples.push(sample.ip),
                    Ok(DecodedRecord::Lost(lost)) => saw.lost += lost.lost,
                    _ => {}
                }
            }
        }
        let () = client.call(request::Close)?;
        Ok(saw)
    }
}

#[cfg(test)]
pub(crate) mod tests;
