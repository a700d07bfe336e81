//! `make compare`: Perfvisor's vPMU beside KVM's own, in the same place, by turns.
//!
//! KVM's own vPMU needs a host PMU, and a Perfvisor guest has one: ours. So a Linux guest runs in the lab, and in it, with
//! `--nested`, a second Linux guest: in one turn with `--backing hardware`, in the next with `--backing kvm`. What is measured
//! there are exits, which are what a vPMU costs, and how right the guest's perf is. `docs/compare.md` has the table.

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use integration::artefacts::{self, describe};
use integration::guest::{GuestRun, LinuxGuest};
use integration::lab::LabOptions;
use integration::place::{Place, PlaceError};

/// For the slowest machine: an exit of the inner guest costs half a millisecond and more.
const LIMIT: Duration = Duration::from_secs(3000);
/// What an exit costs on silicon, for the projection.
#[allow(dead_code)]
const EXIT_US: f64 = 1.5;
/// What the inner guest runs. Each phase is announced, and `sleep` lets the host read KVM's statistics before it begins. The work is
/// the same in all.
const INNER: &str = r#"
phase() {
	echo "@@phase $1 pmi=$(awk '/PMI:/ {print $2}' /proc/interrupts) ctxt=$(awk '/^ctxt/ {print $2}' /proc/stat)"
	sleep 1
}
w=WORKx
ten=cycles,cycles,cycles,cycles,cycles,cycles,cycles,cycles,cycles,cycles
result() { grep -h "^spin" | sed "s/^/@@result $1 /"; }
count() { sed "s/^/@@result $1 /"; }
phase alone; spin $w | result alone
phase quiet; perf record -q -c 100000000000 -e cycles -o /tmp/q spin $w 2>&1 | result quiet
phase one; perf record -q -F 1000 -e cycles -o /tmp/1 spin $w 2>&1 | result one
phase ten; perf record -q -F 1000 -e $ten -o /tmp/10 spin $w 2>&1 | result ten
phase count; perf stat -x, -e cycles:u -o /tmp/s spin $w | result count; grep cycles /tmp/s | count counted
phase mux; perf stat -x, -e $ten -o /tmp/m spin $w | result mux; grep cycles /tmp/m | count turn
phase unswitched; perf stat -x, -i -e task-clock -o /tmp/b perf bench sched pipe -l SWITCHES >/dev/null 2>&1
phase switched; perf stat -x, -i -e cycles -o /tmp/b perf bench sched pipe -l SWITCHES >/dev/null 2>&1
phase end
for f in 1 10; do perf script -i /tmp/$f -F comm 2>/dev/null | wc -l | sed "s/^/@@result samples $f /"; done
dmesg | sed -n 's/.*tsc: Detected \([0-9.]*\) MHz.*/@@result tsc_mhz \1/p'
"#;

/// What the outer guest runs: the inner one, and KVM's statistics at each phase.
const OUTER: &str = r#"
mount -t debugfs none /sys/kernel/debug
while read -r m; do insmod /lib/modules/$m || exit 1; done </lib/modules/order
section check perfvisor check
kexits() { cat /sys/kernel/debug/kvm/exits; }
inner() {
	perfvisor run --backing $1 --pmu amd --kernel /inner/vmlinux --initrd /inner/initrd --memory 400M --stats \
		--cmdline "console=ttyS0 tsc=reliable no_timer_check quiet nokaslr nowatchdog pv.script=compare" </dev/null 2>/tmp/stats |
	while read -r line; do
		case $line in *@@phase*|*@@result*|*"@@pv done"*|*"@@pv boot"*)
			read -r up _ </proc/uptime
			echo "$line exits=$(kexits) up=$up" ;;
		esac
	done
	cat /tmp/stats
}
section validate timeout 420 perfvisor validate --backing kvm --no-linux --json
for round in ROUNDS; do
	section hardware-$round inner hardware
	section kvm-$round inner kvm
done
"#;

struct Options {
    rounds: u32,
    work: u64,
    switches: u32,
}

fn main() -> ExitCode {
    let options = match options(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(line) => {
            eprintln!("compare: {line}; usage: compare [--rounds N] [--work N] [--switches N]");
            return ExitCode::from(2);
        }
    };
    match compare(&options) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("compare: {}", describe(&error));
            ExitCode::FAILURE
        }
    }
}

fn options(mut words: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        rounds: 1,
        work: 100_000_000,
        switches: 200,
    };
    while let Some(word) = words.next() {
        let value = words.next().ok_or_else(|| format!("{word} needs a number"))?;
        let number = |limit: u64| match value.parse::<u64>() {
            Ok(n) if (1..=limit).contains(&n) => Ok(n),
            _ => Err(format!("{word} {value}: must be 1 to {limit}")),
        };
        match word.as_str() {
            "--rounds" => options.rounds = number(20)? as u32,
            "--work" => options.work = number(1 << 40)?,
            "--switches" => options.switches = number(1_000_000)? as u32,
            _ => return Err(format!("unknown option {word}")),
        }
    }
    Ok(options)
}

fn compare(options: &Options) -> Result<bool, PlaceError> {
    let place = Place::choose(&LabOptions {
        memory_mib: 4096,
        ..LabOptions::default()
    })?;
    if !matches!(place, Place::Lab(_)) {
        println!(
            "compare: skipped: made for the lab's nested AMD-V, and this is {}",
            place.describe()
        );
        return Ok(true);
    }
    let run = measure(options, &place)?;
    let check = run.section("check");
    print!("{check}");
    println!("console: {}", run.log().display());
    for (name, section) in &run.console.sections {
        println!("== {name}\n{}", section.text);
    }
    Ok(true)
}

fn measure(options: &Options, place: &Place) -> Result<GuestRun, PlaceError> {
    let images = artefacts::images()?;
    let binaries = artefacts::binaries()?;
    let read = |path: &std::path::Path| {
        fs::read(path).map_err(|error| PlaceError::File {
            path: path.into(),
            message: error.to_string(),
        })
    };
    let inner = INNER
        .replace("WORK", &options.work.to_string())
        .replace("SWITCHES", &options.switches.to_string());
    let rounds: Vec<String> = (1..=options.rounds).map(|n| n.to_string()).collect();
    let outer = OUTER.replace("ROUNDS", &rounds.join(" "));
    // The inner guest's script is a file of its initrd.
    let mut initrd = read(&images.initrd)?;
    initrd.extend(script_archive(&inner).map_err(|error| PlaceError::File {
        path: "scripts/compare".into(),
        message: error.to_string(),
    })?);
    LinuxGuest::new("compare", "amd")
        .laid_over(read(&images.lab_initrd)?)
        .file("bin/perfvisor", 0o755, read(&binaries.perfvisor)?)
        .file("inner/vmlinux", 0o644, read(&images.vmlinux)?)
        .file("inner/initrd", 0o644, initrd)
        .memory_mib(1400)
        .script(outer)
        .args(["--nested", "--stats"])
        .limit(LIMIT)
        .run(place)
}

fn script_archive(script: &str) -> std::io::Result<Vec<u8>> {
    let mut archive = guest_images::cpio::Archive::new(Vec::new());
    archive.file("scripts/compare", 0o644, script.as_bytes())?;
    archive.finish()
}
