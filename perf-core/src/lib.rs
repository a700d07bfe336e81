//! A perf event core in user space.
//!
//! This crate does for the vCPUs of a virtual machine what the Linux kernel's perf core does for
//! tasks and CPUs, and runs in the VMM process. It implements events, groups, contexts,
//! multiplexing over the hardware counters, time accounting, inheritance and sampling. Drivers that
//! implement [`Pmu`] supply the counts; the crate itself does not need KVM.
//!
//! # Glossary
//!
//! - **event**: a countable occurrence, opened with [`PerfCore::open`] and accessed through its
//!   [`EventHandle`].
//! - **vCPU context**, **VM context**: the set of events of one vCPU, or of the whole machine.
//! - **group**: a leader and its siblings, scheduled on the PMU together or not at all.
//! - **slot**: one hardware counter. A driver with [`pmu::PmuCounterCapacity::Counters`] has a
//!   fixed set of slots for each vCPU and reports which of them can hold an event
//!   ([`Pmu::constraint`]). Events of all other drivers are *software* events and need no slot.
//! - **pinned**: always scheduled, or in the error state. **flexible**: multiplexed. **exclusive**:
//!   alone on the PMU.
//! - **family**: a VM-wide event and its children, one in each vCPU context.
//! - **session**: an operator or the guest, as the owner of the events that it opens.
//!
//! # A first example
//!
//! This example counts and samples the calling thread with a software clock event of the host
//! kernel. It runs on any Linux host on which the user may call `perf_event_open(2)`. For a longer
//! example, run `cargo run -p perf-core --example sampling`.
//!
#![cfg_attr(feature = "host", doc = "```")]
#![cfg_attr(not(feature = "host"), doc = "```ignore")]
//! use std::sync::Arc;
//!
//! use perf_core::pmu::host::HostPmu;
//! use perf_core::record::{DecodedRecord, RecordFormat};
//! use perf_core::ring::RingReader;
//! use perf_core::*;
//!
//! /// `PERF_COUNT_SW_TASK_CLOCK`: nanoseconds on a processor.
//! const TASK_CLOCK: u64 = 1;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Overflows are polled below, so the overflow signal may be one that is ignored by default.
//! let core = PerfCore::builder()
//!     .driver(Arc::new(HostPmu::software(Some(libc::SIGURG))))
//!     .build()?;
//! let thread = core.add_thread(0)?;
//! thread.sched_in();
//! let operator = core.session(0, SessionRole::Admin);
//! let attr = Attr::sampling(EventType::SOFTWARE, TASK_CLOCK, 1_000_000)
//!     .with_sample_type(SampleType::TIME | SampleType::PERIOD);
//! let target = EventOpenTarget::Vcpu(thread.id());
//! let clock = match core.open(&operator, attr, target, None, OpenFlags::default()) {
//!     Ok(clock) => clock,
//!     Err(error) => {
//!         println!("nothing can be counted here: {error}");
//!         return Ok(());
//!     }
//! };
//! let mut ring = RingReader::of(clock.map(4, true)?);
//!
//! // Until the event has counted ten of its periods.
//! while clock.read()?.value < 10_000_000 {
//!     thread.service_overflows(&mut UnavailableRegs, &mut |_| {});
//! }
//! clock.disable(EventOrGroup::Event)?;
//! thread.service_overflows(&mut UnavailableRegs, &mut |_| {});
//!
//! let format = RecordFormat::from(clock.attr());
//! let mut stand_for_ns = 0;
//! while let Some(raw) = ring.next_record()? {
//!     if let DecodedRecord::Sample(sample) = DecodedRecord::decode(raw, format)? {
//!         stand_for_ns += sample.period;
//!     }
//! }
//! // The sample periods add up to the count, except for the unfinished last period.
//! let counted = clock.read()?.value;
//! assert!(stand_for_ns <= counted && counted - stand_for_ns < 1_000_000);
//! # Ok(())
//! # }
//! ```
//!
//! # In a VMM
//!
//! ```no_run
//! use std::sync::Arc;
//! use perf_core::*;
//!
//! # fn example(driver: Arc<dyn Pmu>) -> Result<(), Box<dyn std::error::Error>> {
//! let core = PerfCore::new(PerfCoreConfig::default());
//! core.register(driver);
//! let vcpu = core.add_vcpu(VcpuId(0), 4711 /* host thread that runs it */)?;
//!
//! // An operator counts cycles on all vCPUs, including those that are added later.
//! let operator = core.session(0, SessionRole::Admin);
//! let attr = Attr::counting(EventType::HARDWARE, 0).with_inherit();
//! let cycles = core.open(&operator, attr, EventOpenTarget::Vm, None, OpenFlags::default())?;
//!
//! // The guest programmed a counter: a pinned event on its vCPU that reports overflows with
//! // cookie 3.
//! let guest = core.session(0, SessionRole::Guest);
//! let attr = Attr {
//!     pinned: true,
//!     exclude_host: true,
//!     ..Attr::sampling(EventType::HARDWARE, 1, 1 << 48)
//! };
//! let flags = OpenFlags::with_cookie(3);
//! let counter = core.open(&guest, attr, EventOpenTarget::Vcpu(VcpuId(0)), None, flags)?;
//! // 2^width minus the value that the guest wrote.
//! counter.arm((1 << 48) - 0xffff_ffff_0000)?;
//!
//! vcpu.sched_in();
//! // ... KVM_RUN ... a signal interrupts it:
//! vcpu.service_overflows(&mut UnavailableRegs, &mut |o| {
//!     println!("counter {} overflowed {} times", o.cookie, o.times);
//! });
//! vcpu.sched_out();
//!
//! match cycles.read()?.estimate() {
//!     Some(n) => println!("{n} cycles"),
//!     None => println!("not counted"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! Each host driver has a feature, and all of them are enabled by default: `host`, `clock`
//! (requires `host`), `kvm` and `sim`. The drivers `vmm_pmu` and `sched` are always available.
//!
//! # Threads and locks
//!
//! All calls are thread-safe. Each context has its own lock, which is uncontended on the hot path
//! of its vCPU thread. While the guest runs, a vCPU thread takes no lock that another vCPU takes.
//! The lock order is: topology (opening, closing, hot-add), output rings, family, context, list of
//! drivers, list of open events, ring memory, events of a session. Builds with debug assertions
//! panic if this order is violated. Rings are lock-free.

#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::allow_attributes_without_reason,
        clippy::allow_attributes
    )
)]
// Libraries print nothing. They write to the log or return an error to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod api;
mod context;
mod lock;
mod model;
mod notify;
mod sample;
mod schedule;
mod service;

pub mod attr;
pub mod branch;
pub mod estimate;
pub mod mux;
pub mod pmu;
pub mod record;
pub mod ring;
pub mod time;

pub use diagnostics::{error_line, guest_log};

pub use crate::api::{
    ContextPin, DetailedReading, EventHandle, EventOpenTarget, EventOrGroup, GroupReading, GuestMmapEvent,
    LockedContext, OpenFlags, PerfCoreBuilder, PerfCoreConfigError, PerfCoreSetting, PerfCoreSettingError,
    Reading, Session, VcpuReading,
};
pub use crate::attr::{Attr, EventType, ReadFormat, SampleType};
pub use crate::context::ContextStats;
pub use crate::model::failure::{PinnedEventFailure, PinnedEventFailureCause};
pub use crate::model::regs::{CALLCHAIN_MAX, SampleRegs, UnavailableRegs};
pub use crate::model::software::{RecursionContext, SoftwareEventId};
pub use crate::model::state::{EventState, PendingTickWork, TickTimer};
pub use crate::notify::PollState;
pub use crate::pmu::{Pmu, PmuEvent, VcpuId};
pub use crate::record::CpuMode;
pub use crate::sample::OverflowReport;
pub use crate::schedule::{SharePolicy, UnknownSharePolicy};
pub use crate::service::config::{PerfCoreConfig, SessionRole};
pub use crate::service::core::{PerfCore, VcpuEventContext};
pub use crate::service::error::{PerfEventControlError, PerfEventOpenError, RingMapError};
