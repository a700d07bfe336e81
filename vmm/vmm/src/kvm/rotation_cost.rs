//! Measures how much guest time one rotation of multiplexed events costs. In a rotation, another
//! thread reprograms the counters of a vCPU, for which the host kernel interrupts the guest.
//!
//! The guest of the measurement has three instructions and counts its iterations. It runs for
//! periods with rotations and periods without. The difference in iterations is the cost.

use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;
use perf_core::attr::{Attr, EventType};
use perf_core::pmu::clock::VcpuRunTimeClock;
use perf_core::pmu::host::{HostPerfCapabilities, HostPmu};
use perf_core::pmu::{Pmu, PmuEvent, PmuEventTarget, VcpuId};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::host::KvmHostError;
use super::tiny::{DATA, TinyGuest};

/// Maximum fraction of guest time that rotations may take if the VMM chooses the multiplexing
/// interval.
const MAX_GUEST_TIME_FRACTION: f64 = 0.01;
/// Minimum multiplexing interval that the VMM chooses. The reason is in docs/measurements.md.
pub const MIN_MUX_INTERVAL: Duration = Duration::from_micros(584);
/// Maximum multiplexing interval that the VMM chooses. With this interval, all of eight events that
/// share one counter are counted at least once per second.
pub const MAX_MUX_INTERVAL: Duration = Duration::from_millis(100);

/// Length of a measuring period.
const MEASURING_PERIOD: Duration = Duration::from_millis(2);
/// Number of measuring periods with rotations, and of those without. Only the best period of each
/// type is used, because other load on the host can only increase the cost.
const MEASURING_PERIODS: usize = 6;
/// Interval between two rotations within a measuring period.
const ROTATION_INTERVAL: Duration = Duration::from_micros(30);
/// Maximum time to wait until the guest of the measurement starts.
const START_TIMEOUT: Duration = Duration::from_secs(1);

/// Guest code: `inc qword [DATA]; cmp byte [DATA + 0x100], 0; je` back to the `inc`; `hlt`. The HLT
/// faults at CPL 3, which ends the guest.
const COUNT: [u8; 19] = [
    0x48, 0xff, 0x04, 0x25, 0x00, 0x90, 0x00, 0x00, 0x80, 0x3c, 0x25, 0x00, 0x91, 0x00, 0x00, 0x00, 0x74,
    0xee, 0xf4,
];

/// Guest time that one rotation of one event costs.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct RotationCost {
    /// Lost guest time per rotation, in microseconds.
    pub cost_us: f64,
}

impl RotationCost {
    /// Returns the shortest multiplexing interval at which rotations take at most 1 % of guest
    /// time. The result lies between [`MIN_MUX_INTERVAL`] and [`MAX_MUX_INTERVAL`].
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a duration; beyond its range the cast saturates"
    )]
    pub fn turn(self) -> Duration {
        let least = Duration::from_nanos((self.cost_us * 1e3 / MAX_GUEST_TIME_FRACTION) as u64);
        least.clamp(MIN_MUX_INTERVAL, MAX_MUX_INTERVAL)
    }

    /// Describes the multiplexing interval that `--mux auto` selects, in words.
    pub fn in_words(self) -> String {
        let turn = self.turn();
        format!(
            "a turn costs the guest {:.1} us, so turns are {:.2} ms and take {:.1} % of its time",
            self.cost_us,
            turn.as_secs_f64() * 1e3,
            self.percent(turn)
        )
    }

    /// Returns the percentage of guest time that rotations take if the multiplexing interval is
    /// `length`.
    pub fn percent(self, length: Duration) -> f64 {
        100.0 * self.cost_us / (length.as_secs_f64() * 1e6)
    }
}

/// Measures the cost of a rotation. Takes about 30 ms. Rotates a hardware event, or a software
/// event if the host has no PMU according to `perf`.
///
/// # Errors
/// - [`KvmHostError::Probe`] if KVM rejects a call that every VM needs.
/// - [`KvmHostError::Event`] if the host rejects the event.
/// - [`KvmHostError::Silent`] if the guest does not start.
pub fn probe(kvm: &Kvm, perf: &HostPerfCapabilities) -> Result<RotationCost, KvmHostError> {
    let mut guest = TinyGuest::new(kvm, 3, &COUNT)?;
    let TinyGuest { vcpu, memory, .. } = &mut guest;
    let memory = &*memory;
    let tid = AtomicI32::new(0);
    thread::scope(|scope| {
        let runner = scope.spawn(|| {
            tid.store(VcpuRunTimeClock::for_current_thread(1).tid(), Ordering::Release);
            // Repeat KVM_RUN after a signal. Any other error ends the guest.
            while let Err(e) = vcpu.run().map(drop) {
                if e.errno() != libc::EINTR && e.errno() != libc::EAGAIN {
                    break;
                }
            }
        });
        let measured = measure(memory, &tid, perf);
        let told = memory.write_obj(1u8, GuestAddress(DATA + 0x100));
        debug_assert!(told.is_ok(), "the word is in the guest's memory");
        let _ = runner.join();
        measured
    })
}

fn measure(
    memory: &GuestMemoryMmap,
    tid: &AtomicI32,
    perf: &HostPerfCapabilities,
) -> Result<RotationCost, KvmHostError> {
    let rounds = || memory.read_obj::<u64>(GuestAddress(DATA)).unwrap_or(0);
    let begun = Instant::now();
    while rounds() == 0 {
        if begun.elapsed() > START_TIMEOUT {
            return Err(KvmHostError::Silent);
        }
        thread::sleep(ROTATION_INTERVAL);
    }
    let mut event = event(tid.load(Ordering::Acquire), perf)?;
    let (mut quiet, mut costs) = (0.0f64, Vec::with_capacity(MEASURING_PERIODS));
    let mut disturbed = Vec::with_capacity(MEASURING_PERIODS);
    for _ in 0..MEASURING_PERIODS {
        let (length, done, _) = during(&rounds, || ());
        quiet = quiet.max(done / length);
        disturbed.push(during(&rounds, || {
            event.stop();
            let _ = event.start(None);
        }));
    }
    for (length, done, turns) in disturbed {
        costs.push((length - done / quiet).max(0.0) / turns);
    }
    Ok(RotationCost {
        cost_us: 1e6 * costs.into_iter().fold(f64::INFINITY, f64::min),
    })
}

/// Runs one measuring period, in which `turn` is called repeatedly. Returns the length of the
/// period in seconds, the number of guest iterations, and the number of calls.
fn during(rounds: &impl Fn() -> u64, mut turn: impl FnMut()) -> (f64, f64, f64) {
    let (begun, first, mut turns) = (Instant::now(), rounds(), 0.0);
    while begun.elapsed() < MEASURING_PERIOD {
        turn();
        turns += 1.0;
        thread::sleep(ROTATION_INTERVAL);
    }
    (begun.elapsed().as_secs_f64(), (rounds() - first) as f64, turns)
}

fn event(tid: i32, perf: &HostPerfCapabilities) -> Result<Box<dyn PmuEvent>, KvmHostError> {
    /// `PERF_COUNT_HW_CPU_CYCLES`.
    const CYCLES: u64 = 0;
    /// `PERF_COUNT_SW_CONTEXT_SWITCHES`.
    const SWITCHES: u64 = 3;
    let target = PmuEventTarget::Vcpu { vcpu: VcpuId(0), tid };
    let opened = if perf.slots() > 0 {
        let attr = Attr {
            exclude_host: true,
            ..Attr::counting(EventType::HARDWARE, CYCLES)
        };
        HostPmu::hardware(None, perf).open(&attr, target)
    } else {
        HostPmu::software(None).open(&Attr::counting(EventType::SOFTWARE, SWITCHES), target)
    };
    opened.map_err(KvmHostError::Event)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mux_interval_follows_rotation_cost() {
        let turn = |cost_us| RotationCost { cost_us }.turn();
        assert_eq!(turn(0.0), MIN_MUX_INTERVAL);
        assert_eq!(turn(3.0), MIN_MUX_INTERVAL);
        assert_eq!(turn(10.0), Duration::from_millis(1));
        assert_eq!(turn(65.0), Duration::from_micros(6_500));
        assert_eq!(turn(1e9), MAX_MUX_INTERVAL);
        for cost_us in [1.0, 10.0, 65.0, 900.0] {
            let cost = RotationCost { cost_us };
            assert!(cost.percent(cost.turn()) <= 1.000_001);
        }
    }

    /// A rotation interrupts the guest and costs less than the interval between two rotations.
    #[test]
    fn rotation_cost_is_finite_and_nonnegative() {
        let Ok(kvm) = super::super::host::open() else {
            eprintln!("SKIP: no KVM");
            return;
        };
        let cost = probe(&kvm, &HostPerfCapabilities::run()).expect("a guest of three instructions");
        assert!(cost.cost_us.is_finite() && cost.cost_us >= 0.0, "{cost:?}");
        eprintln!("a turn costs {:.1} us", cost.cost_us);
    }
}
