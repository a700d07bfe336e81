//! Tests other stock kernels: Debian's default kernel and the newest one available, as bzImage and
//! ELF, with and without KASLR, on one, two and four vCPUs. Each kernel must find its PMU, count on
//! every CPU, and sample.
//!
//! Only a few combinations are tested by default. `PERFVISOR_KERNELS=all` (`make kernels`) tests
//! all of them.

use std::fmt::Write as _;
use std::path::PathBuf;

use guest_images::linux::KernelChoice;
use integration::artefacts;
use integration::guest::{GuestRun, LinuxGuest};
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::measure::MEASUREMENTS;
use integration::parse::{parse_stat_csv, pmu_driver_lines, tsc_hz};
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;

/// Sampling period of `perf record -c`, in cycles. In the lab, a sample costs the guest at least a
/// millisecond.
const PERIOD: f64 = 50_000_000.0;

/// Relative tolerance when counts are compared with the clock, and samples with counts.
const TOLERANCE: f64 = 0.10;

/// Accepted ratio of cycles to CPU time while perf samples a program. The kernel charges sampling
/// to the program's CPU time, but sampling adds no cycles.
const WHILE_SAMPLED: std::ops::Range<f64> = 0.8..1.1;

/// A test case: kernel, image format, number of vCPUs, and PMU model.
#[derive(Debug, Clone, Copy, PartialEq)]
struct KernelCase {
    kernel: &'static str,
    image: &'static str,
    kaslr: bool,
    cpus: u32,
    pmu: &'static str,
}

/// The result of one test case, a row of the printed table.
struct CaseResult {
    release: String,
    text: String,
    cycles: f64,
    samples: f64,
    /// Number of measurements outside the tolerance.
    off: usize,
    boot_seconds: f64,
}

/// Test cases of the default run. Each kernel occurs once, and each value of the other parameters
/// occurs at least once.
const FEW: [KernelCase; 3] = [
    KernelCase {
        kernel: "cloud",
        image: "bzImage",
        kaslr: true,
        cpus: 4,
        pmu: "intel",
    },
    KernelCase {
        kernel: "generic",
        image: "bzImage",
        kaslr: true,
        cpus: 2,
        pmu: "amd",
    },
    KernelCase {
        kernel: "newest",
        image: "vmlinux",
        kaslr: false,
        cpus: 1,
        pmu: "amd-v2",
    },
];

/// Kernels of Debian 13 and its newest backport, by their names in [`KernelChoice::parse`]. Each
/// kernel boots as packaged, with one vCPU and with two.
const DEBIAN_13: [&str; 4] = [
    "debian13-cloud",
    "debian13-generic",
    "debian13-rt",
    "debian13-backports",
];

fn all() -> Vec<KernelCase> {
    let mut cases = Vec::new();
    for kernel in DEBIAN_13 {
        for cpus in [1, 2] {
            cases.push(KernelCase {
                kernel,
                image: "bzImage",
                kaslr: true,
                cpus,
                pmu: ["intel", "amd"][cases.len() % 2],
            });
        }
    }
    for kernel in ["cloud", "generic", "newest"] {
        for image in ["bzImage", "vmlinux"] {
            for kaslr in [false, true] {
                for cpus in [1, 2, 4] {
                    // Alternate the vendors, so that each value of the other parameters occurs with
                    // both vendors.
                    let pmu = ["intel", "amd"][cases.len() % 2];
                    cases.push(KernelCase {
                        kernel,
                        image,
                        kaslr,
                        cpus,
                        pmu,
                    });
                }
            }
        }
    }
    cases
}

/// Leases a test host that contains the kernels of `cases`.
fn place_with(cases: &[KernelCase]) -> TestHost {
    let mut files = Vec::new();
    for case in cases {
        let name = case.file_in_lab();
        if !files.iter().any(|(known, _)| *known == name) {
            files.push((name, image_file(case.kernel, case.image)));
        }
    }
    let options = LabOptions {
        // Guests with four vCPUs run on two processors, which is a realistic overcommitment.
        cpus: 2,
        files,
        ..LabOptions::default()
    };
    TestHost::choose(&options).unwrap_or_else(|error| panic!("{}", artefacts::describe(&error)))
}

/// Returns the local path of the kernel image of a test case, and builds the image if necessary.
fn image_file(kernel: &str, image: &str) -> PathBuf {
    artefacts::images_of(&KernelChoice::parse(kernel))
        .unwrap_or_else(|error| panic!("{error}"))
        .directory
        .join(image)
}

impl KernelCase {
    fn name(&self) -> String {
        let kaslr = if self.kaslr { "kaslr" } else { "nokaslr" };
        format!(
            "{}-{}-{kaslr}-{}cpu-{}",
            self.kernel, self.image, self.cpus, self.pmu
        )
    }

    fn file_in_lab(&self) -> String {
        format!("guest/{}-{}", self.kernel, self.image)
    }

    fn run(&self, place: &TestHost) -> Result<CaseResult, String> {
        let path = match place {
            TestHost::Direct(_) => image_file(self.kernel, self.image).to_string_lossy().into_owned(),
            TestHost::Lab(_) => format!("/{}", self.file_in_lab()),
        };
        let run = LinuxGuest::new(format!("kernel-{}", self.name()), self.pmu)
            .kernel(path)
            .kaslr(self.kaslr)
            .cpus(self.cpus)
            .script(self.script())
            .args(["-v"])
            .limit(LIMIT)
            .run(place)
            .map_err(|error| error.to_string())?;
        self.check(&run).map_err(|what| format!("{what}\n{run}"))
    }

    /// Returns the guest script of this case. Time measurements are repeated in the same guest,
    /// because another boot takes longer.
    fn script(&self) -> String {
        let mut script = format!(
            "section release uname -r\n\
             section dmesg sh -c \"dmesg | grep -E 'tsc:|Performance Events|PMU driver'\"\n\
             section online cat /sys/devices/system/cpu/online\n\
             section text sh -c \"grep -E ' (_text|page_offset_base)$' /proc/kallsyms\"\n\
             section each perf stat -a -A -x, -e cpu-clock,cycles threads {} 0.5\n",
            self.cpus
        );
        for n in 0..MEASUREMENTS {
            let _ = write!(
                script,
                "section stat{n} perf stat -x, -e task-clock,cycles spin 0.5\n\
                 section record{n} perf record -q -B -N -c 50000000 -e cycles -o /tmp/period perf stat -x, -e cycles spin 2\n\
                 section samples{n} sh -c 'perf script -i /tmp/period -F comm | grep -c spin'\n"
            );
        }
        script
    }

    fn check(&self, run: &GuestRun) -> Result<CaseResult, String> {
        let text = |name: &str| -> Result<&str, String> {
            match run.console.sections.get(name) {
                Some(section) if section.status == Some(0) => Ok(&section.text),
                Some(section) => Err(format!("section {name}: status {:?}", section.status)),
                None => Err(format!("no section {name}")),
            }
        };
        let dmesg = text("dmesg")?;
        let vendor = if self.pmu.starts_with("amd") {
            "AMD"
        } else {
            "Intel"
        };
        let driver = format!("{vendor} PMU driver");
        if !pmu_driver_lines(dmesg).iter().any(|line| line.contains(&driver)) {
            return Err(format!("no {driver}: {:?}", pmu_driver_lines(dmesg)));
        }
        let online = match self.cpus {
            1 => "0".to_owned(),
            n => format!("0-{}", n - 1),
        };
        if text("online")?.trim() != online {
            return Err(format!("CPUs online: {}, not {online}", text("online")?.trim()));
        }
        let tsc_hz = tsc_hz(dmesg).ok_or("no TSC frequency in dmesg")?;
        let (mut off, mut measured) = (Vec::new(), Vec::new());
        for n in 0..MEASUREMENTS {
            let stat = parse_stat_csv(text(&format!("stat{n}"))?);
            let value = |event| stat.value(event).map_err(|error| error.to_string());
            let cycles = value("cycles")? / (value("task-clock")? / 1e3 * tsc_hz);
            // Compare with a second counter that covers the same time as the samples, because
            // neither includes the time spent on sampling.
            let record = text(&format!("record{n}"))?;
            let counted = parse_stat_csv(record)
                .value("cycles")
                .map_err(|error| error.to_string())?;
            let cpu_seconds: f64 = record
                .split_whitespace()
                .find_map(|word| word.strip_prefix("cpu_seconds=")?.parse().ok())
                .ok_or_else(|| format!("no cpu_seconds in {record:?}"))?;
            let sampled = counted / (cpu_seconds * tsc_hz);
            let count: f64 = text(&format!("samples{n}"))?
                .trim()
                .parse()
                .map_err(|_| "no number of samples")?;
            let samples = count / (counted / PERIOD);
            measured.push((cycles, samples));
            let near = |ratio: f64| (ratio - 1.0).abs() < TOLERANCE;
            if !(near(cycles) && near(samples) && WHILE_SAMPLED.contains(&sampled)) {
                off.push(format!(
                    "cycles / (time x TSC) = {cycles:.3}, samples / (cycles / period) = {samples:.3}, \
                     cycles / (time x TSC) while sampled = {sampled:.3}"
                ));
            }
        }
        if 2 * off.len() > MEASUREMENTS {
            return Err(off.join("; "));
        }
        measured.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (cycles, samples) = measured[MEASUREMENTS / 2];
        let each = parse_stat_csv(text("each")?);
        for cpu in 0..self.cpus {
            let on = |event| {
                each.value_on(event, cpu)
                    .map_err(|error| format!("CPU {cpu}: {error}"))
            };
            if on("cycles")? < 1e7 {
                return Err(format!(
                    "CPU {cpu} counted {} cycles while it was busy",
                    on("cycles")?
                ));
            }
        }
        if run.console.done != Some(0) || run.status != Some(0) {
            return Err(format!(
                "script {:?}, perfvisor {:?}",
                run.console.done, run.status
            ));
        }
        let symbol = |name: &str| {
            let line = text("text").ok()?.lines().find(|line| line.ends_with(name))?;
            line.split_whitespace().next().map(str::to_owned)
        };
        Ok(CaseResult {
            release: text("release")?.trim().to_owned(),
            text: symbol(" _text").ok_or("no _text in kallsyms")?,
            cycles,
            samples,
            off: off.len(),
            boot_seconds: run.console.boot_seconds.unwrap_or_default(),
        })
    }
}

#[test]
fn other_kernels_find_their_pmu_count_on_every_cpu_and_sample() {
    let cases = match std::env::var("PERFVISOR_KERNELS").as_deref() {
        Ok("all") => all(),
        Ok("") | Err(_) => FEW.to_vec(),
        // Select all combinations of one kernel.
        Ok(kernel) => all().into_iter().filter(|case| case.kernel == kernel).collect(),
    };
    assert!(
        !cases.is_empty(),
        "PERFVISOR_KERNELS: all, cloud, generic, newest or one of {DEBIAN_13:?}"
    );
    let mut table = String::from(
        "| kernel | image | KASLR | vCPUs | PMU | cycles / (time × TSC) | samples / (cycles / period) | of 3 off | _text | user space after |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    let mut failures = Vec::new();
    // Kernels are large, and the lab keeps them in memory. With many combinations, each kernel has
    // its own lab.
    let many = cases.len() > FEW.len();
    let mut place = None;
    let mut kernel = "";
    for case in &cases {
        if place.is_none() || many && case.kernel != kernel {
            kernel = case.kernel;
            // Never run two labs at the same time.
            drop(place.take());
            let together = |other: &&KernelCase| !many || other.kernel == kernel;
            let same: Vec<_> = cases.iter().filter(together).copied().collect();
            place = Some(place_with(&same));
        }
        let Some(place) = &place else { continue };
        let result = case.run(place);
        let kaslr = if case.kaslr { "yes" } else { "no" };
        let row = match &result {
            Ok(found) => format!(
                "| {} | {} | {kaslr} | {} | {} | {:.3} | {:.3} | {} | {} | {:.1} s |",
                found.release,
                case.image,
                case.cpus,
                case.pmu,
                found.cycles,
                found.samples,
                found.off,
                found.text,
                found.boot_seconds
            ),
            Err(_) => format!(
                "| {} | {} | {kaslr} | {} | {} | failed | | | | |",
                case.kernel, case.image, case.cpus, case.pmu
            ),
        };
        eprintln!("{row}");
        let _ = writeln!(table, "{row}");
        if let Err(why) = result {
            failures.push(format!("{}: {why}", case.name()));
        }
    }
    let file = artefacts::log_dir()
        .unwrap_or_else(|error| panic!("{error}"))
        .join("kernels.md");
    std::fs::write(&file, table).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn default_kernel_cases_are_in_full_matrix() {
    for choice in ["cloud", "generic", "newest"] {
        assert!(FEW.iter().any(|case| case.kernel == choice));
    }
    assert!(FEW.iter().any(|case| case.image == "vmlinux") && FEW.iter().any(|case| case.image == "bzImage"));
    assert!(FEW.iter().any(|case| case.kaslr) && FEW.iter().any(|case| !case.kaslr));
    assert_eq!(all().len(), 44);
    for kernel in DEBIAN_13 {
        assert!(
            matches!(KernelChoice::parse(kernel), KernelChoice::Debian13(_)),
            "{kernel}"
        );
    }
}
