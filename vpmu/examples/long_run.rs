//! Runs ten million operations on random models and checks each against the reference model.
//!
//! `cargo run --release -p vpmu --example long_run [OPERATIONS [SEED]]`

#[path = "../testing/mod.rs"]
mod testing;

use std::time::Instant;

use vpmu::sim::SimCounterEvents;

/// SplitMix64 generator, which accepts any seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|argument| {
        argument.parse::<u64>().unwrap_or_else(|_| {
            eprintln!("\"{argument}\" is not a number: give OPERATIONS and SEED, for example 10000000 1");
            std::process::exit(2)
        })
    });
    let wanted = arguments.next().unwrap_or(10_000_000);
    let seed = arguments.next().unwrap_or(1);
    let mut random = Random(seed);
    let started = Instant::now();
    let (mut operations, mut models) = (0, 0u64);
    let mut bytes = [0; 16 << 10];
    while operations < wanted {
        for chunk in bytes.chunks_exact_mut(8) {
            chunk.copy_from_slice(&random.next().to_le_bytes());
        }
        operations += testing::stream::run::<SimCounterEvents>(&bytes);
        models += 1;
    }
    println!(
        "{operations} operations on {models} models, seed {seed}: no panic, no overflow, no disagreement, {:.1} s",
        started.elapsed().as_secs_f64()
    );
}
