//! Tests every PMU model with an unmodified Debian kernel, in one short boot per model: correct
//! driver, version and number of counters, no message about hardware problems, and a working
//! counter.

use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::ProcessTimeLimits;
use integration::parse::{judge_detail, parse_stat_csv, pmu_driver_lines};
use integration::test_host::TestHost;

use crate::shared_guests::{self, GuestPart};

/// Time limits of one guest. A guest takes about eight seconds in the lab.
const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

const SCRIPT: &str = r#"
section dmesg dmesg
section stat perf stat -x, -e cycles spin 0.3
section detail perf stat -x, -d sleep 1
section reference perf stat -x, -e ref-cycles,bus-cycles spin 0.3
"#;

/// The model tests that run in `shared_guests::AMD`, a guest that several test modules share. They
/// run first, because they check the kernel's first messages.
pub const AMD: GuestPart = GuestPart {
    tests: &["models::amd_core"],
    prepare: || {},
    add: |_, guest| Ok((guest, SCRIPT.to_owned())),
};

/// Properties of a PMU model that the guest's kernel must detect.
struct ExpectedPmu {
    /// PMU model, a value of `--pmu`.
    pmu: &'static str,
    /// Value of `--pmu-counters`, or `None` for the model's default number of counters.
    counters: Option<&'static str>,
    /// Text that the kernel's message about its PMU driver must contain.
    driver: &'static str,
    /// Number that the kernel prints after "... version:". On Intel, it is the architectural PMU
    /// version. On AMD, it is 2 for PerfMonV2 and 0 otherwise.
    version: u32,
    general: u32,
    fixed: u32,
}

impl ExpectedPmu {
    fn check(&self) {
        let own;
        let run = if self.pmu == "amd" {
            shared_guests::AMD.run()
        } else {
            own = self.run();
            &own
        };
        let dmesg = run.section("dmesg");
        let drivers = pmu_driver_lines(dmesg);
        assert!(
            drivers.iter().any(|line| line.contains(self.driver)),
            "no \"{}\" in {drivers:?}\n{run}",
            self.driver
        );
        for (what, expected) in [
            ("version", self.version),
            ("bit width", 48),
            ("generic registers", self.general),
            ("fixed-purpose events", self.fixed),
        ] {
            assert_eq!(number(dmesg, what), Some(expected), "{what}\n{run}");
        }
        // The event mask has one bit per counter. General-purpose counters start at bit 0, fixed
        // counters at bit 32.
        let mask = ones(self.general) | ones(self.fixed) << 32;
        let text = format!("... event mask:             {mask:016x}");
        assert!(dmesg.contains(&text), "no \"{text}\"\n{run}");
        let cycles = parse_stat_csv(run.section("stat"))
            .value("cycles")
            .unwrap_or_else(|error| panic!("{error}\n{run}"));
        assert!(cycles > 1e8, "{cycles} cycles in 0.3 s\n{run}");
        // `perf stat` without options shows counts or reports events as unsupported.
        judge_detail(run.section("detail"), &["cycles"]).unwrap_or_else(|why| panic!("{why}\n{run}"));
        // The remaining events must not show a misleading 0 either.
        let reference = run.section("reference").lines();
        let reference: Vec<&str> = reference.filter(|line| line.contains("-cycles")).collect();
        assert_eq!(reference.len(), 2, "{reference:?}\n{run}");
        for line in reference {
            let value = line.split(',').next().unwrap_or_default();
            let counted = value.parse::<u64>().is_ok_and(|count| count > 0);
            assert!(
                counted || value == "<not supported>",
                "not counted: {line}\n{run}"
            );
            assert!(
                !(counted && line.contains("ref-cycles") && self.pmu == "intel-v1"),
                "{line}\n{run}"
            );
        }
        run.expect_success();
        eprintln!(
            "{}{}: {}; version {}, {}+{} counters; {:.1?}",
            self.pmu,
            self.counters.map(|n| format!(" {n}")).unwrap_or_default(),
            self.driver,
            self.version,
            self.general,
            self.fixed,
            run.elapsed
        );
    }

    fn run(&self) -> GuestRun {
        let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
        let numbers = self.counters.map(|n| ["--pmu-counters", n]);
        LinuxGuest::new(format!("model-{}-{}", self.pmu, self.general), self.pmu)
            .script(SCRIPT)
            .limit(LIMIT)
            .args(numbers.into_iter().flatten())
            .run(&place)
            .unwrap_or_else(|error| panic!("{error}"))
    }
}

fn ones(count: u32) -> u64 {
    (1 << count) - 1
}

/// Returns the number in a message such as "... generic registers:      4".
fn number(dmesg: &str, what: &str) -> Option<u32> {
    let before = format!("... {what}:");
    let line = dmesg.lines().find(|line| line.contains(&before))?;
    line.split_once(&before)?.1.trim().parse().ok()
}

// For version 1, which lacks the global registers, Linux names its driver "core PMU driver".
macro_rules! models {
    ($($name:ident: $pmu:literal $counters:expr => $driver:literal, $version:literal, $general:literal + $fixed:literal;)*) => {
        $(
            #[test]
            fn $name() {
                ExpectedPmu {
                    pmu: $pmu,
                    counters: $counters,
                    driver: $driver,
                    version: $version,
                    general: $general,
                    fixed: $fixed,
                }
                .check();
            }
        )*
    };
}

models! {
    intel_v1: "intel-v1" None => "core PMU driver", 1, 4 + 0;
    intel_v2: "intel-v2" None => "Intel PMU driver", 2, 4 + 3;
    intel_v3: "intel-v3" None => "Intel PMU driver", 3, 4 + 3;
    intel_v4: "intel-v4" None => "Intel PMU driver", 4, 4 + 3;
    intel_v5: "intel-v5" Some("8+3") => "Intel PMU driver", 5, 8 + 3;
    amd_k7: "amd-k7" None => "AMD PMU driver", 0, 4 + 0;
    amd_core: "amd" None => "core perfctr, AMD PMU driver", 0, 6 + 0;
    amd_v2: "amd-v2" Some("15") => "core perfctr, AMD PMU driver", 2, 15 + 0;
}
