//! Guest samples that the host kernel takes without an exit of the vCPU from `KVM_RUN`.
//!
//! A perf event on the vCPU's thread that does not exclude the guest writes the guest's instruction
//! pointer and privilege level into its ring. This costs an interrupt, a fraction of an exit to
//! user space. The kernel cannot record the guest's stack, address space and task.
//!
//! [`GuestSamplingEvent`] is opened in the VMM. Its file descriptor may be sent to another process,
//! which maps the ring with [`GuestSampleRing`] and reads it without involving the VMM.
//!
//! # Limitations
//! - A clock event samples the thread in every mode, so the ring includes samples in the host
//!   kernel and in the VMM, which are marked as such. A hardware event that excludes the host has
//!   no such samples.
//! - Some KVMs interpret parts of the guest, or run on a host that does not mark guest samples. The
//!   samples then show guest time as host kernel time, so readers have to compare them with another
//!   measurement; see [`SampledCpuMode`].

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use perf_event_open_sys::bindings as b;

use super::HostPmu;
use super::fd::{PerfFd, PerfMap, new_attr};
use super::rate::MIN_CLOCK_PERIOD_NS;
use crate::attr::{Attr, EventType};
use crate::pmu::PmuError;

/// A host perf event that samples a vCPU's thread and its guest.
#[derive(Debug)]
pub struct GuestSamplingEvent {
    fd: PerfFd,
}

impl GuestSamplingEvent {
    /// Opens a stopped clock event that samples thread `tid` once per `period_ns` nanoseconds of
    /// CPU time, but at most once per [`MIN_CLOCK_PERIOD_NS`].
    ///
    /// # Errors
    /// Returns a [`PmuError`], for example with `EACCES` if `perf_event_paranoid` denies the event.
    pub fn clock(tid: i32, period_ns: u64) -> Result<Self, PmuError> {
        let mut attr = new_attr(b::PERF_TYPE_SOFTWARE, u64::from(b::PERF_COUNT_SW_CPU_CLOCK));
        attr.__bindgen_anon_1.sample_period = period_ns.clamp(MIN_CLOCK_PERIOD_NS, 1 << 60);
        Self::open(attr, tid, false)
    }

    /// Opens a stopped hardware event that samples thread `tid`. Type, `config` to `config2`,
    /// period or frequency, and exclude bits are those of `attr`.
    ///
    /// # Errors
    /// Returns a [`PmuError`] if the host does not open the event.
    pub fn hardware(tid: i32, attr: &Attr) -> Result<Self, PmuError> {
        if ![EventType::HARDWARE, EventType::HW_CACHE, EventType::RAW].contains(&attr.ty) {
            return Err(PmuError::NoSuchEvent);
        }
        let mut raw = new_attr(attr.ty.0, attr.config);
        raw.__bindgen_anon_1.sample_period = attr.sample_period;
        raw.set_freq(attr.freq.into());
        raw.__bindgen_anon_3.config1 = attr.config1;
        raw.__bindgen_anon_4.config2 = attr.config2;
        HostPmu::set_exclusions(&mut raw, attr);
        Self::open(raw, tid, !attr.exclude_guest)
    }

    fn open(mut attr: b::perf_event_attr, tid: i32, guest: bool) -> Result<Self, PmuError> {
        attr.sample_type = u64::from(b::PERF_SAMPLE_IP | b::PERF_SAMPLE_TIME | b::PERF_SAMPLE_PERIOD);
        attr.set_disabled(1);
        attr.set_use_clockid(1);
        attr.clockid = libc::CLOCK_MONOTONIC;
        let fd = PerfFd::open(&mut attr, tid).map_err(|e| HostPmu::open_error(e, guest))?;
        Ok(Self { fd })
    }

    /// Makes each sample also send `signal` to thread `tid`. A signal is more expensive than a
    /// record in the ring. Intended for comparisons of the two.
    ///
    /// # Errors
    /// Returns the error of `fcntl(2)`.
    pub fn also_signal(&self, tid: i32, signal: i32) -> io::Result<()> {
        self.fd.signal_thread(tid, signal)
    }

    /// Enables or disables the sampling event.
    ///
    /// # Errors
    ///
    /// Returns the error of `ioctl(2)`.
    pub fn set_enabled(&self, on: bool) -> io::Result<()> {
        self.fd.set_enabled(on)
    }
}

impl AsFd for GuestSamplingEvent {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The code that a sample interrupted, as far as the host kernel can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampledCpuMode {
    /// The guest at privilege level 3.
    GuestUser,
    /// The guest at privilege level 0, 1 or 2.
    GuestKernel,
    /// The host kernel, for example KVM itself. On a host that does not mark guest samples,
    /// possibly the guest.
    HostKernel,
    /// User space of the host, that is, the VMM.
    HostUser,
}

/// A sample of a vCPU's thread that the host kernel took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestSample {
    /// Time of the sample on `CLOCK_MONOTONIC`, in nanoseconds.
    pub time_ns: u64,
    /// Code that the sample interrupted.
    pub side: SampledCpuMode,
    /// Instruction pointer of the interrupted code, in the guest or on the host.
    pub ip: u64,
    /// Number of counts that the sample represents. For a clock event, the number of nanoseconds.
    pub period: u64,
}

/// The mapped ring of a [`GuestSamplingEvent`].
pub type GuestSampleRing = HostRing<GuestSample>;

impl HostRingRecord for GuestSample {
    fn decode(ty: u32, misc: u32, words: &[u64]) -> Option<Self> {
        let (b::PERF_RECORD_SAMPLE, &[ip, time_ns, period, ..]) = (ty, words) else {
            return None;
        };
        let side = match misc & b::PERF_RECORD_MISC_CPUMODE_MASK {
            b::PERF_RECORD_MISC_GUEST_USER => SampledCpuMode::GuestUser,
            b::PERF_RECORD_MISC_GUEST_KERNEL => SampledCpuMode::GuestKernel,
            b::PERF_RECORD_MISC_USER => SampledCpuMode::HostUser,
            _ => SampledCpuMode::HostKernel,
        };
        Some(Self {
            time_ns,
            side,
            ip,
            period,
        })
    }
}

/// A type of record that is read from a [`HostRing`].
pub trait HostRingRecord: Sized {
    /// Decodes a record of type `ty` from the first words of its payload. Returns `None` for
    /// records of other types.
    fn decode(ty: u32, misc: u32, words: &[u64]) -> Option<Self>;
}

/// Number of lost records and of throttles that a ring reported while it was drained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostRingStats {
    /// Number of records that were lost.
    pub lost: u64,
    /// Number of times that the kernel throttled sampling.
    pub throttled: u64,
}

/// The mapped ring of a host perf event, in this process or another.
#[derive(Debug)]
pub struct HostRing<R> {
    fd: PerfFd,
    map: PerfMap,
    records: PhantomData<R>,
}

impl<R: HostRingRecord> HostRing<R> {
    /// Maps the ring of `fd` with `2^log2_pages` data pages, which count towards the user's limit
    /// `perf_event_mlock_kb`.
    ///
    /// # Errors
    /// Returns the error of `mmap(2)`.
    pub fn map(fd: OwnedFd, log2_pages: u32) -> io::Result<Self> {
        let fd = PerfFd::from(fd);
        let map = fd.map(Some(log2_pages))?;
        let records = PhantomData;
        Ok(Self { fd, map, records })
    }

    /// Enables or disables the event that writes to this ring.
    ///
    /// # Errors
    ///
    /// Returns the error of `ioctl(2)`.
    pub fn set_enabled(&self, on: bool) -> io::Result<()> {
        self.fd.set_enabled(on)
    }

    /// Passes each unread record of type `R` to `each`, oldest first, and returns the numbers of
    /// lost records and of throttles. Reads at most as many bytes as the ring can hold.
    pub fn drain(&mut self, mut each: impl FnMut(R)) -> HostRingStats {
        let mut drained = HostRingStats::default();
        self.map.drain_words(|head, words| match (head.type_, words) {
            (b::PERF_RECORD_LOST, &[_, lost, ..]) => drained.lost += lost,
            (b::PERF_RECORD_THROTTLE, _) => drained.throttled += 1,
            _ => R::decode(head.type_, head.misc.into(), words)
                .into_iter()
                .for_each(&mut each),
        });
        drained
    }
}

impl HostPmu {
    /// Sets the exclude bits of a hardware event as in `attr`.
    pub(super) fn set_exclusions(raw: &mut b::perf_event_attr, attr: &Attr) {
        raw.set_exclude_hv(attr.exclude_hv.into());
        raw.set_exclude_host(attr.exclude_host.into());
        raw.set_exclude_guest(attr.exclude_guest.into());
        raw.set_exclude_user(attr.exclude_user.into());
        raw.set_exclude_kernel(attr.exclude_kernel.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pmu::host::fd::current_tid;

    /// Samples of a thread that runs no guest have a host origin, increasing times and the
    /// requested period.
    #[test]
    fn clock_samples_report_their_origin() {
        const PERIOD_NS: u64 = 500_000;
        let sampler = match GuestSamplingEvent::clock(current_tid(), PERIOD_NS) {
            Ok(sampler) => sampler,
            Err(e) => return eprintln!("SKIP: no clock events here: {e}"),
        };
        let fd = sampler.as_fd().try_clone_to_owned().unwrap();
        let mut samples = GuestSampleRing::map(fd, 3).unwrap();
        sampler.set_enabled(true).unwrap();
        let mut seen = Vec::new();
        let mut work = 0u64;
        while seen.len() < 20 {
            for i in 0..1_000_000u64 {
                work = std::hint::black_box(work.wrapping_mul(31).wrapping_add(i));
            }
            assert_eq!(samples.drain(|s| seen.push(s)), HostRingStats::default());
        }
        samples.set_enabled(false).unwrap();
        assert!(seen.iter().any(|s| s.side == SampledCpuMode::HostUser));
        for s in &seen {
            assert!(
                matches!(s.side, SampledCpuMode::HostUser | SampledCpuMode::HostKernel),
                "{s:?}"
            );
            assert_eq!(s.period, PERIOD_NS);
        }
        assert!(seen.is_sorted_by_key(|s| s.time_ns));
        samples.drain(|_| {});
        for _ in 0..1_000_000u64 {
            work = std::hint::black_box(work.wrapping_mul(31));
        }
        samples.drain(|s| panic!("a stopped event sampled: {s:?}"));
    }

    #[test]
    fn guest_sampler_rejects_non_hardware_events() {
        let attr = Attr::sampling(EventType::SOFTWARE, 0, 1000);
        assert!(matches!(
            GuestSamplingEvent::hardware(0, &attr),
            Err(PmuError::NoSuchEvent)
        ));
    }
}
