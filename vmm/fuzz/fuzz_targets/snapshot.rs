//! Fuzzes the reader of saved machine states. The reader must not panic, and its memory use must be
//! bounded. An accepted state must survive a round trip.
//!
//! Input: the body of a state file, to which the target adds a valid frame, or a whole file that
//! begins with `PVSS`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use snapshot::format::frame;
use snapshot::{decode, encode};

fuzz_target!(|data: &[u8]| {
    let decoded = if data.starts_with(b"PVSS") {
        decode(data)
    } else {
        decode(&frame(data))
    };
    if let Ok(machine) = decoded {
        let again = encode(&machine).expect("it fits");
        assert_eq!(decode(&again).expect("it is valid"), machine);
        let _ = vmm::vm::restore::event_filter(&machine.filter);
        if let Some(base) = &machine.memory.base
            && snapshot::diff::check_runs(base, machine.memory.bytes).is_ok()
        {
            let ends = base.runs.iter().map(|(start, len)| start + len);
            assert!(ends.max() <= Some(machine.memory.bytes));
        }
        let _ = guest_patching::sites::from_saved(&machine.kernel.rdpmc_sites);
    }
});
