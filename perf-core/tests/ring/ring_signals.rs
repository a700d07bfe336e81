//! Tests of nested writers: a signal handler writes to a ring while its thread is writing to the
//! same ring, and another signal handler interrupts the first one and writes too.
#![expect(unsafe_code, reason = "calls of the system")]

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use perf_core::ring::{RecordReservation, Ring, RingFullPolicy, RingReader};

use crate::common::ring::{CheckedRecord, TAGGED, check, drain, write};

static RING: OnceLock<Arc<Ring>> = OnceLock::new();
static ATTEMPTS: AtomicU64 = AtomicU64::new(0);
/// Next record number for each nesting level. Level 0 is the thread itself, and levels 1 and 2 are
/// the signal handlers.
static NUMBERS: [AtomicU64; 3] = [const { AtomicU64::new(1) }; 3];

fn attempt(ring: &Ring, level: usize, in_between: impl FnOnce()) {
    ATTEMPTS.fetch_add(1, Relaxed);
    let Ok(record) = ring.begin(32, true) else {
        in_between();
        return;
    };
    // Numbered after the reservation, so that the numbers of published records have no gaps.
    let number = NUMBERS[level].fetch_add(1, Relaxed);
    fill(record, level, number, in_between);
}

fn fill(mut record: RecordReservation<'_>, level: usize, number: u64, in_between: impl FnOnce()) {
    record.put_u64(u64::from(TAGGED));
    record.put_u64(level as u64);
    in_between();
    record.put_u64(number);
    record.put_u64(((level as u64) << 48 ^ number << 16 ^ 3).wrapping_mul(0x9e37_79b9_7f4a_7c15));
}

/// Writes two records in one reservation. A signal arrives while each record is written, and
/// another one after each record.
fn attempt_together(ring: &Ring) {
    let Ok(mut run) = ring.begin_batch(64, 2) else {
        return;
    };
    ATTEMPTS.fetch_add(2, Relaxed);
    for _ in 0..2 {
        let number = NUMBERS[0].fetch_add(1, Relaxed);
        let record = run.begin(32).expect("it was reserved");
        fill(record, 0, number, || raise(libc::SIGUSR2));
        raise(libc::SIGUSR1);
    }
}

/// Sends `signal` to this thread. The signal handler runs before this function returns.
fn raise(signal: libc::c_int) {
    // SAFETY: raising a signal is allowed anywhere, including in a handler.
    assert_eq!(unsafe { libc::raise(signal) }, 0);
}

extern "C" fn overflow(signal: libc::c_int) {
    let Some(ring) = RING.get() else { return };
    if signal == libc::SIGUSR1 {
        attempt(ring, 1, || raise(libc::SIGUSR2));
    } else {
        attempt(ring, 2, || {});
    }
}

#[test]
fn p28_overflow_inside_overflow_writes_whole_records_and_counts_every_loss() {
    let ring = RING.get_or_init(|| Arc::new(Ring::new(1, RingFullPolicy::Writable).expect("a ring")));
    for signal in [libc::SIGUSR1, libc::SIGUSR2] {
        // SAFETY: the handler only uses operations that are allowed there: atomics, copies, and
        // system calls. No wakeup is due, because none is configured by count and writes below the
        // watermark cause none; errno is not used here.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = overflow as *const () as usize;
            assert_eq!(libc::sigaction(signal, &action, std::ptr::null_mut()), 0);
        }
    }
    let mut reader = RingReader::of(Arc::clone(ring));
    let mut last = [0; 4];
    let (mut records, mut lost) = (0, 0);
    for round in 0..3000u64 {
        // Writes a record alone, with one nested handler, or with two nested handlers.
        attempt(ring, 0, || match round % 3 {
            0 => {}
            1 => raise(libc::SIGUSR2),
            _ => raise(libc::SIGUSR1),
        });
        // Writes two records in one reservation, with nested handlers.
        if round % 7 == 0 {
            attempt_together(ring);
        }
        assert!(write(ring, 24, 3, round + 1).is_ok() || ring.pending_lost() > 0);
        ATTEMPTS.fetch_add(1, Relaxed);
        // Does not read for a fifth of the rounds, so that the ring fills up.
        if round % 500 < 400 || round == 2999 {
            drain(&mut reader, |record| match check(record) {
                CheckedRecord::Lost(n) => lost += n,
                CheckedRecord::Tagged(level, number) => {
                    assert!(number > last[level as usize], "in order");
                    last[level as usize] = number;
                    records += 1;
                }
            });
        }
    }
    assert!(lost > 0, "the ring did run full");
    assert_eq!(records + lost + ring.pending_lost(), ATTEMPTS.load(Relaxed));
}
