//! Fuzzes the reader of perf.data files, and all reports generated from them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use guest_profile::export::report::{self, ProfileReportOptions};
use guest_profile::export::symbolize::Symbolizer;
use guest_profile::export::{folded, pprof, reader, script};

fuzz_target!(|data: &[u8]| {
    let Ok(profile) = reader::read(data) else { return };
    let mut symbols = Symbolizer::new(&profile, None, None);
    let _ = report::render(&profile, &mut symbols, &ProfileReportOptions::default());
    let _ = folded::stacks(&profile, &mut symbols, None);
    script::write(&profile, &mut symbols, std::io::sink()).expect("a sink takes all");
    pprof::write(&profile, &mut symbols, &pprof::SampleLabel::ALL, std::io::sink()).expect("a sink takes all");
});
