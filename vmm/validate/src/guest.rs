//! The built-in guest that measures: what is asked of it, and what it answers.
//!
//! Its results are JSON (`guest-images/bare-metal/validate/main.c`). A measurement goes in three steps with a
//! halt after each, so that the host can look at the same counters at rest: ready, done, result.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use perf_core::ReadFormat;
use perf_core::SampleType;
use perf_core::record::{Format, Record};
use perf_core::ring::RingReader;
use serde::Deserialize;

use super::child::{ChildError, ChildVm};
use super::procfs::ThreadFacts;
use crate::host::Stop;
use control_api::protocol::{EventReading, Failure, Opened, RingInfo, Sampling, VcpuView};
use control_api::request;

/// How long the guest may take to start.
const START_PATIENCE: Duration = Duration::from_secs(30);
/// How long a measurement may take. Stepped code is slow, and so is a guest of a guest.
const PATIENCE: Duration = Duration::from_secs(300);
/// Data pages of a ring for the operator's samples.
const RING_PAGES: u32 = 64;

/// Count at CPL 3.
pub const USR: u64 = 1 << 16;
/// Count at CPL 0.
pub const OS: u64 = 1 << 17;

/// What the guest found.
#[derive(Clone, Debug, Deserialize)]
pub struct Hello {
    /// CPUs that run.
    pub cpus: u32,
    /// Its CPUID says AuthenticAMD.
    pub amd: bool,
    /// General-purpose counters.
    pub gp: u32,
    /// Bitmap of fixed counters.
    pub fixed: u32,
    /// Architectural events that CPUID says cannot be counted, by their bit.
    pub unavailable: u32,
}

/// What is to be measured.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// Kind of work.
    pub work: &'static str,
    /// How much of it.
    pub n: u64,
    /// At which level, for kinds that can be done at both.
    pub cpl: u32,
    /// Event selectors, without their enable bit, for counters from 0 on.
    pub selectors: Vec<u64>,
    /// FIXED_CTR_CTRL.
    pub fixed_control: u64,
    /// Counter 0 interrupts every so many counts; 0: it does not.
    pub period: u64,
    /// On so many CPUs; 0 means 1.
    pub cpus: u32,
}

impl Job {
    /// `n` of `work` at CPL 0, without a counter.
    pub fn new(work: &'static str, n: u64) -> Self {
        Self {
            work,
            n,
            ..Self::default()
        }
    }

    /// At this level.
    #[must_use]
    pub fn at(mut self, cpl: u32) -> Self {
        self.cpl = cpl;
        self
    }

    /// With one more counter.
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

/// What one CPU of the guest saw.
#[derive(Clone, Debug, Deserialize)]
pub struct CpuResult {
    /// TSC ticks around the work.
    pub tsc: u64,
    /// General counters.
    pub c: Vec<u64>,
    /// Fixed counters; empty if none was used.
    pub f: Vec<u64>,
    /// PMIs that found an overflow.
    #[serde(default)]
    pub pmis: u64,
    /// Periods that went by unseen before one.
    #[serde(default)]
    pub late: u64,
    /// PMIs whose handler found no overflow.
    #[serde(default)]
    pub spurious: u64,
    /// Where they struck: the three functions, anywhere else.
    #[serde(default)]
    pub struck: Vec<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "at", rename_all = "lowercase")]
enum Said {
    Hello(Hello),
    #[serde(skip)]
    Ready,
    #[serde(skip)]
    Done,
    Refused,
    Result {
        cpus: Vec<CpuResult>,
    },
    #[serde(other)]
    Other,
}

/// What the operator counts or samples meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Operator<'a> {
    /// In perf's syntax.
    pub events: &'a str,
    /// To sample with this period.
    pub period: Option<u64>,
}

/// The operator's part of a measurement.
#[derive(Debug)]
pub struct OperatorSaw {
    /// The events, or why they were refused.
    pub opened: Result<Vec<Opened>, Failure>,
    /// Their counts.
    pub readings: Vec<EventReading>,
    /// Addresses of the samples.
    pub samples: Vec<u64>,
    /// Samples that found no room.
    pub lost: u64,
}

impl OperatorSaw {
    /// The reading of event `index` of the list on vCPU `vcpu`.
    pub fn reading(&self, index: u32, vcpu: u32) -> Option<&EventReading> {
        let opened = self.opened.as_ref().ok()?;
        let handle = opened
            .iter()
            .find(|o| o.index == index && o.vcpu == Some(vcpu))?
            .handle?;
        self.readings.iter().find(|r| r.handle == handle)
    }
}

/// Everything seen in one measurement.
#[derive(Debug)]
pub struct Outcome {
    /// By the guest, on each CPU used.
    pub cpus: Vec<CpuResult>,
    /// By the host, of the same counters before and after.
    pub before: Vec<VcpuView>,
    /// After.
    pub after: Vec<VcpuView>,
    /// By the host's kernel, of each vCPU's thread.
    pub facts: Vec<ThreadFacts>,
    /// CPU time of a measurement of nothing, in ns.
    pub overhead_ns: u64,
    /// By the operator.
    pub operator: Option<OperatorSaw>,
}

impl Outcome {
    /// The host's view of a counter (`gp0`, `fixed1`) of CPU `cpu`, after.
    pub fn host(&self, cpu: usize, counter: &str) -> Option<&control_api::protocol::GuestCounter> {
        find(&self.after, cpu, counter)
    }

    /// Overflows of a counter of CPU `cpu` meanwhile, as the host saw them.
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

/// A VM with that guest in it.
pub struct MeasuringGuest {
    /// The VM.
    pub vm: ChildVm,
    /// What the guest found.
    pub hello: Hello,
    /// How much of each kind of work, at each level, is done in a millisecond.
    pub pace: HashMap<(&'static str, u32), f64>,
    /// CPU time of a measurement of nothing, in ns; 0 before it was measured.
    pub overhead_ns: u64,
}

impl MeasuringGuest {
    /// Starts it with these arguments for `perfvisor run`.
    ///
    /// # Errors
    /// [`ChildError`].
    pub fn start(arguments: &[&str], signals: &Stop) -> Result<Self, ChildError> {
        let mut all = vec!["--builtin", "validate", "--memory", "128M"];
        all.extend_from_slice(arguments);
        let all: Vec<String> = all.into_iter().map(str::to_owned).collect();
        Self::greeted(ChildVm::start(&all, signals)?)
    }

    /// The guest in a VM that was just started, once it has said what it found.
    fn greeted(mut vm: ChildVm) -> Result<Self, ChildError> {
        let hello = vm.wait_for(START_PATIENCE, "it was started", |line| match parse(line) {
            Some(Said::Hello(hello)) => Some(hello),
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

    fn step(&mut self, what: &str) -> Result<Said, ChildError> {
        self.vm.wait_for(PATIENCE, what, |line| {
            parse(line).filter(|said| !matches!(said, Said::Other))
        })
    }

    /// Measures, with the operator counting or sampling meanwhile.
    ///
    /// # Errors
    /// [`ChildError`].
    pub fn measure(&mut self, job: &Job, operator: Option<Operator<'_>>) -> Result<Outcome, ChildError> {
        let line = job.line();
        let wrong = |said: &Said| Err(ChildError::Answer(format!("{said:?} to \"{line}\"")));
        self.vm.type_line(&line)?;
        match self.step(&line)? {
            Said::Ready => {}
            said => return wrong(&said),
        }
        let before = self.vm.views()?;
        let mut watch = match operator {
            Some(operator) => Some(Watch::open(&mut self.vm, operator)?),
            None => None,
        };
        let start = self.vm.facts()?;
        self.vm.type_line("")?;
        match self.step(&line)? {
            Said::Done => {}
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
            Said::Result { cpus } if cpus.len() == job.cpus.max(1) as usize => Ok(Outcome {
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

    /// Lets the guest end, and checks that the VM ended well.
    ///
    /// # Errors
    /// [`ChildError::Ended`] with another status than 0.
    pub fn end(self) -> Result<(), ChildError> {
        self.vm.end(Duration::from_secs(10))
    }
}

fn parse(line: &str) -> Option<Said> {
    match line {
        "ready" => Some(Said::Ready),
        "done" => Some(Said::Done),
        line => serde_json::from_str(line).ok(),
    }
}

/// The operator's events while they are open.
pub(super) struct Watch {
    opened: Result<Vec<Opened>, Failure>,
    ring: Option<(RingReader, RingInfo)>,
}

impl Watch {
    pub(super) fn open(vm: &mut ChildVm, operator: Operator<'_>) -> Result<Self, ChildError> {
        let client = vm.client()?;
        let opened: Result<Vec<Opened>, _> = client.call(request::Open {
            events: operator.events.to_owned(),
            vcpus: None,
            whole: false,
            sampling: operator.period.map(|period| Sampling {
                rate: period,
                frequency: false,
                callchain: false,
                chain_every: 1,
                stack_bytes: 0,
            }),
        });
        let opened = match opened {
            Ok(opened) => opened,
            // Refusing is what a strict policy is for.
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
            };
            let (info, memfd): (RingInfo, File) = client.call_with_file(call)?;
            let reader = RingReader::map(memfd.as_fd()).map_err(ChildError::Ring)?;
            ring = Some((reader, info));
        }
        let () = client.call(request::Enable)?;
        Ok(Self {
            opened: Ok(opened),
            ring,
        })
    }

    pub(super) fn close(&mut self, vm: &mut ChildVm) -> Result<OperatorSaw, ChildError> {
        let client = vm.client()?;
        let mut saw = OperatorSaw {
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
            let format = Format {
                sample_type: SampleType::from_bits_truncate(info.sample_type),
                read_format: ReadFormat::empty(),
                ..Format::default()
            };
            while let Ok(Some(raw)) = reader.next_record() {
                match Record::decode(raw, format) {
                    Ok(Record::Sample(sample)) => saw.samples.push(sample.ip),
                    Ok(Record::Lost(lost)) => saw.lost += lost.lost,
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
