//! What a turn costs a guest: its vCPU's counters are reprogrammed from another thread, for which the host's
//! kernel interrupts the guest.
//!
//! Measured and not assumed: a guest of three instructions counts how often it goes round, for a while
//! undisturbed and for a while with an event on its thread that goes off and on again, as at a turn. What it
//! did not get done in that time is the cost.

use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;
use perf_core::attr::{Attr, EventType};
use perf_core::pmu::clock::VcpuClock;
use perf_core::pmu::host::{HostPmu, HostProbe};
use perf_core::pmu::{Pmu, PmuEvent, Target, VcpuId};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::host::HostError;
use super::tiny::{DATA, TinyGuest};

/// The most of a guest's time that turns may take where their length is for us to choose.
const MOST: f64 = 0.01;
/// The shortest turns that are chosen: docs/measurements.md has what they are worth.
pub const SHORTEST: Duration = Duration::from_micros(584);
/// The longest: a guest whose turns are so dear sees a rotation of eight events in less than a second.
pub const LONGEST: Duration = Duration::from_millis(100);

/// How long a while is, and how many of each kind there are. The best of them count: what else goes on only
/// makes them worse.
const WHILE: Duration = Duration::from_millis(2);
const WHILES: usize = 6;
/// Between two turns of a while.
const BETWEEN: Duration = Duration::from_micros(30);
/// How long the guest may take to begin.
const PATIENCE: Duration = Duration::from_secs(1);

/// `inc qword [DATA]; cmp byte [DATA + 0x100], 0; je` to the first; `hlt`, which faults and ends it.
const COUNT: [u8; 19] = [
    0x48, 0xff, 0x04, 0x25, 0x00, 0x90, 0x00, 0x00, 0x80, 0x3c, 0x25, 0x00, 0x91, 0x00, 0x00, 0x00, 0x74,
    0xee, 0xf4,
];

/// What a turn of one event costs the guest.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct TurnCost {
    /// In microseconds of its time.
    pub cost_us: f64,
}

impl TurnCost {
    /// How long turns are so that they take a hundredth of the guest's time at most.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a duration; beyond its range the cast saturates"
    )]
    pub fn turn(self) -> Duration {
        let least = Duration::from_nanos((self.cost_us * 1e3 / MOST) as u64);
        least.clamp(SHORTEST, LONGEST)
    }

    /// What `--mux auto` makes of it.
    pub fn in_words(self) -> String {
        let turn = self.turn();
        format!(
            "a turn costs the guest {:.1} us, so turns are {:.2} ms and take {:.1} % of its time",
            self.cost_us,
            turn.as_secs_f64() * 1e3,
            self.percent(turn)
        )
    }

    /// Percent of the guest's time that turns of `length` take.
    pub fn percent(self, length: Duration) -> f64 {
        100.0 * self.cost_us / (length.as_secs_f64() * 1e6)
    }
}

/// Measures it with an event of the host's PMU, or of its kernel where `perf` says that there is none. Takes
/// some 30 ms.
///
/// # Errors
/// [`HostError::Probe`] when KVM refuses what every VM needs, [`HostError::Event`] when the host refuses the
/// event, [`HostError::Silent`] when the guest does not run.
pub fn probe(kvm: &Kvm, perf: &HostProbe) -> Result<TurnCost, HostError> {
    let mut guest = TinyGuest::new(kvm, 3, &COUNT)?;
    let TinyGuest { vcpu, memory, .. } = &mut guest;
    let memory = &*memory;
    let tid = AtomicI32::new(0);
    thread::scope(|scope| {
        let runner = scope.spawn(|| {
            tid.store(VcpuClock::for_current_thread(1).tid(), Ordering::Release);
            // Signals end a run early; what else ends it ends the guest.
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

fn measure(memory: &GuestMemoryMmap, tid: &AtomicI32, perf: &HostProbe) -> Result<TurnCost, HostError> {
    let rounds = || memory.read_obj::<u64>(GuestAddress(DATA)).unwrap_or(0);
    let begun = Instant::now();
    while rounds() == 0 {
        if begun.elapsed() > PATIENCE {
            return Err(HostError::Silent);
        }
        thread::sleep(BETWEEN);
    }
    let mut event = event(tid.load(Ordering::Acquire), perf)?;
    let (mut quiet, mut costs) = (0.0f64, Vec::with_capacity(WHILES));
    let mut disturbed = Vec::with_capacity(WHILES);
    for _ in 0..WHILES {
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
    Ok(TurnCost {
        cost_us: 1e6 * costs.into_iter().fold(f64::INFINITY, f64::min),
    })
}

/// How long a while was in seconds, how often the guest went round in it, and how many turns there were.
fn during(rounds: &impl Fn() -> u64, mut turn: impl FnMut()) -> (f64, f64, f64) {
    let (begun, first, mut turns) = (Instant::now(), rounds(), 0.0);
    while begun.elapsed() < WHILE {
        turn();
        turns += 1.0;
        thread::sleep(BETWEEN);
    }
    (begun.elapsed().as_secs_f64(), (rounds() - first) as f64, turns)
}

fn event(tid: i32, perf: &HostProbe) -> Result<Box<dyn PmuEvent>, HostError> {
    /// `PERF_COUNT_HW_CPU_CYCLES` and `PERF_COUNT_SW_CONTEXT_SWITCHES`.
    const CYCLES: u64 = 0;
    const SWITCHES: u64 = 3;
    let target = Target::Vcpu { vcpu: VcpuId(0), tid };
    let opened = if perf.slots() > 0 {
        let attr = Attr {
            exclude_host: true,
            ..Attr::counting(EventType::HARDWARE, CYCLES)
        };
        HostPmu::hardware(None, perf).open(&attr, target)
    } else {
        HostPmu::software(None).open(&Attr::counting(EventType::SOFTWARE, SWITCHES), target)
    };
    opened.map_err(HostError::Event)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dear_turns_are_long_and_cheap_ones_as_short_as_is_worth_while() {
        let turn = |cost_us| TurnCost { cost_us }.turn();
        assert_eq!(turn(0.0), SHORTEST);
        assert_eq!(turn(3.0), SHORTEST);
        assert_eq!(turn(10.0), Duration::from_millis(1));
        assert_eq!(turn(65.0), Duration::from_micros(6_500));
        assert_eq!(turn(1e9), LONGEST);
        for cost_us in [1.0, 10.0, 65.0, 900.0] {
            let cost = TurnCost { cost_us };
            assert!(cost.percent(cost.turn()) <= 1.000_001);
        }
    }

    /// A turn interrupts the guest, so it costs something, and less than the time between two of them.
    #[test]
    fn a_turn_costs_something() {
        let Ok(kvm) = super::super::host::open() else {
            eprintln!("SKIP: no KVM");
            return;
        };
        let cost = probe(&kvm, &HostProbe::run()).expect("a guest of three instructions");
        assert!(cost.cost_us.is_finite() && cost.cost_us >= 0.0, "{cost:?}");
        eprintln!("a turn costs {:.1} us", cost.cost_us);
    }
}
