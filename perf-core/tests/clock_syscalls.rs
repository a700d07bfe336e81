//! System calls of an overflow with the `clock` driver, counted by ptrace. What a guest's PMI handler does comes from the
//! drivers of Linux: `vpmu` turns their writes into the calls made here.
#![allow(unsafe_code)]

mod common;
#[path = "machine/pmi.rs"]
mod pmi;
#[path = "machine/steps.rs"]
mod steps;

use common::burn;
use perf_core::*;
use pmi::{AGES, RINGS, Scene, must};

/// The system calls of [`RINGS`] rings, without the bracket's: the thread's time, at each entry and each exit.
fn calls_of(counters: u64, work: impl FnOnce(&mut Scene)) -> Vec<u64> {
    let mut calls = steps::system_calls(|| Scene::new(counters), work).expect("processes may be traced");
    assert!(calls.contains(&(libc::SYS_clock_gettime as u64)));
    calls.retain(|call| *call != libc::SYS_clock_gettime as u64);
    calls
}

#[track_caller]
fn only_the_timer_is_set(calls: &[u64], most: usize) {
    let others: Vec<_> = calls
        .iter()
        .filter(|call| **call != libc::SYS_timer_settime as u64)
        .collect();
    assert!(others.is_empty(), "system calls {others:?}");
    assert!(calls.len() <= most, "{} for {RINGS} rings", calls.len());
    assert!(calls.len() >= RINGS / 2, "{} for {RINGS} rings", calls.len());
}

#[test]
fn an_overflow_makes_one_system_call_where_the_handler_stops_the_counter() {
    only_the_timer_is_set(&calls_of(1, Scene::with_counters_stopped), RINGS);
}

#[test]
fn an_overflow_makes_one_system_call_where_the_counter_goes_on() {
    only_the_timer_is_set(&calls_of(1, Scene::with_counters_on), RINGS);
}

/// The others are waited for until the handler stops them.
#[test]
fn other_counters_make_it_two_however_many_they_are() {
    for counters in [2, 8] {
        let calls = calls_of(counters, Scene::with_counters_stopped);
        only_the_timer_is_set(&calls, 2 * RINGS);
    }
}

/// A counter that only counts: the overflow that it is armed for is hours away.
#[test]
fn stopping_and_starting_a_counter_that_only_counts_makes_none() {
    let calls = calls_of(2, |scene| {
        scene.stop();
        scene.counters.iter().for_each(|c| must(c.arm(AGES).is_ok()));
        for _ in 0..20 {
            for counter in &scene.counters {
                must(counter.enable(Scope::Event).is_ok());
            }
            scene.clock.guest_enter();
            burn(20_000);
            scene.clock.guest_exit();
            scene.stop();
            scene.exit();
        }
    });
    // Once for all of it.
    assert!(calls.len() <= 1, "system calls {calls:?}");
}
