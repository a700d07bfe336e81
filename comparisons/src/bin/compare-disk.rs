//! Compares the Debian image under Perfvisor and under QEMU with KVM, alternately in the same lab
//! (`make compare-disk`).
//!
//! Kernel, initrd, command line, memory and devices are the same: a root disk from a fresh image,
//! three data disks, a tap device with vhost-net, and entropy. QEMU accesses each data disk with a
//! different `aio` setting. `docs/measurements.md` has the results.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, value_parser};
use comparisons::{
    ComparisonError, by_turns, cell, exit_code, qemu, run_until_output, spread, write_figures,
};
use integration::artefacts::target_dir;
use integration::debian::{CMDLINE, DebianTestHost};
use integration::footprint::footprint;
use integration::lab::LabOptions;
use integration::limit::ProcessTimeLimits;
use integration::process::HostCommand;
use integration::qemu_comparison::{PC_FIRMWARE, qemu_files};
use integration::test_host::TestHost;
use serde_json::json;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits {
    overall: Duration::from_secs(4 * 3600),
    ..ProcessTimeLimits::GENEROUS
};
const GUEST_MIB: u64 = 768;
const MAC: &str = "02:00:00:00:00:01";
/// Link-local IPv6 address of the guest, derived from its MAC address, with the lab's tap device as
/// scope.
const GUEST: &str = "fe80::ff:fe00:1%pvtap0";
const LAB: &str = "fe80::ff:fe00:fe";
/// Data disks, each with QEMU's options for it. The first two are files in tmpfs, which lacks
/// `O_DIRECT` in Linux 6.1. `aio=native` requires `O_DIRECT`, so it uses a loop device.
const DATA_DISKS: [(&str, &str, &str); 3] = [
    ("data", "/tmp/data.img", "aio=threads"),
    ("uring", "/tmp/uring.img", "aio=io_uring"),
    ("native", "/dev/loop0", "aio=native,cache=none"),
];
/// Shell script that prepares the lab for both VMMs: tap device, debugfs for KVM's statistics, a
/// chroot in the Debian image, and data disks.
const SET_UP: &str = "mount -t debugfs none /sys/kernel/debug; \
    tunctl -t pvtap0 >/dev/null && ip link set pvtap0 address 02:00:00:00:00:fe && ip link set pvtap0 up && \
    mkdir -p /debian && mount -o ro DISK /debian && mount -t proc proc /debian/proc && \
    mount --bind /dev /debian/dev && mount -t tmpfs tmp /debian/tmp && \
    (chroot /debian iperf3 -s >/dev/null 2>&1 &) && \
    for name in data uring loop; do dd if=/dev/zero of=/tmp/$name.img bs=1M count=256 2>/dev/null; done && \
    insmod /debian/lib/modules/$(uname -r)/kernel/drivers/block/loop.ko && losetup /dev/loop0 /tmp/loop.img";

/// Guest script that runs the loads. At the end of each load, the script prints its name, the
/// measured value and the number of I/O operations. For a network load, the last number is the
/// number of megabytes transferred.
const MEASURE: &str = r#"
wanted() {
	case ",LOADS," in *",$1,"*) ;; *) return 1 ;; esac
}
disk() {
	wanted $1 || return 0
	echo "begin $1"
	fio --output-format=terse --terse-version=3 --name=$1 --filename=/dev/${5:-vdb} --direct=1 --ioengine=libaio \
		--time_based --runtime=SECONDS --rw=$2 --bs=$3 --iodepth=$4 | awk -F';' -v n=$1 -v k=${3%k} '{ print "end", n, $8 + $49, ($6 + $47) / k }'
}
net() {
	wanted $1 || return 0
	echo "begin $1"
	shift_=$1; shift
	iperf3 -f m -t SECONDS -c "LAB%$(ls /sys/class/net | grep '^e')" "$@" | awk -v n=$shift_ '/receiver/ { print "end", n, $7, $6 == "GBytes" ? $5 * 1024 : $5 }'
}
sleep 1
disk randread randread 4k 16
disk randread1 randread 4k 1
disk deep randread 4k 32
disk deep-uring randread 4k 32 vdc
disk deep-native randread 4k 32 vdd
disk randwrite randwrite 4k 16
disk seqread read 1024k 4
disk seqwrite write 1024k 4
net send
net receive -R
echo begin end
"#;

/// Names of the loads, in the order of [`MEASURE`].
const LOADS: [&str; 10] = [
    "randread",
    "randread1",
    "deep",
    "deep-uring",
    "deep-native",
    "randwrite",
    "seqread",
    "seqwrite",
    "send",
    "receive",
];

/// Table rows: name of the figure, label, unit, and `true` if larger values are better. The name
/// starts with that of the load, if any.
#[rustfmt::skip]
const ROWS: [(&str, &str, &str, bool); 24] = [
    ("login", "exec to login", "s", false),
    ("rss", "resident memory beyond the guest's", "MB", false),
    ("anonymous", "the same without pages of files", "MB", false),
    ("randread", "fio 4k random read, 16 in flight", "IO/s", true),
    ("randread1", "fio 4k random read, 1 in flight", "IO/s", true),
    ("deep", "fio 4k random read, 32 in flight, QEMU with aio=threads", "IO/s", true),
    ("deep-uring", "fio 4k random read, 32 in flight, QEMU with aio=io_uring", "IO/s", true),
    ("deep-native", "fio 4k random read, 32 in flight, loop device, QEMU with aio=native", "IO/s", true),
    ("randwrite", "fio 4k random write, 16 in flight", "IO/s", true),
    ("seqread", "fio 1M sequential read, 4 in flight", "IO/s", true),
    ("seqwrite", "fio 1M sequential write, 4 in flight", "IO/s", true),
    ("send", "iperf3, guest sends", "Mbit/s", true),
    ("receive", "iperf3, guest receives", "Mbit/s", true),
    ("randread exits", "exits for each 4k read, 16 in flight", "", false),
    ("randread1 exits", "exits for each 4k read, 1 in flight", "", false),
    ("deep exits", "exits for each 4k read, 32 in flight, QEMU with aio=threads", "", false),
    ("deep-uring exits", "exits for each 4k read, 32 in flight, QEMU with aio=io_uring", "", false),
    ("deep-native exits", "exits for each 4k read, 32 in flight, QEMU with aio=native", "", false),
    ("randwrite exits", "exits for each 4k write, 16 in flight", "", false),
    ("seqread exits", "exits for each 1M read", "", false),
    ("send exits", "exits for each MB sent", "", false),
    ("receive exits", "exits for each MB received", "", false),
    ("send halts", "halts for each MB sent", "", false),
    ("receive halts", "halts for each MB received", "", false),
];

type Figures = BTreeMap<String, f64>;

/// Compares the Debian image under Perfvisor and under QEMU, alternately in the lab.
#[derive(clap::Parser)]
#[command(name = "compare-disk")]
struct Options {
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = value_parser!(u8).range(1..=9))]
    rounds: u8,
    /// Set the duration of each load, in seconds
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Set the time that the lab's KVM polls for a halted vCPU, in nanoseconds
    #[arg(long, value_name = "NS", value_parser = value_parser!(u32).range(..=1_000_000))]
    halt_poll_ns: Option<u32>,
    /// Also measure Perfvisor with these additional arguments, for example "--halt-poll-ns host"
    #[arg(long, value_name = "ARGUMENTS", allow_hyphen_values = true)]
    also: Option<String>,
    /// Set the loads to measure
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_values = LOADS, value_parser = LOADS)]
    loads: Vec<String>,
}

/// Name of the first compared VMM in the table.
const OURS: &str = "Perfvisor";
const THEIRS: &str = "QEMU";

fn main() -> ExitCode {
    exit_code("compare-disk", compare(&Options::parse()))
}

fn compare(asked: &Options) -> Result<bool, ComparisonError> {
    let (rounds, seconds) = (asked.rounds, asked.seconds);
    let also = asked.also.as_ref().map(|words| format!("{OURS} with {words}"));
    let ways: Vec<&str> = [OURS]
        .into_iter()
        .chain(also.as_deref())
        .chain([THEIRS])
        .collect();
    // The last disk contains the lab's programs. Each disk occupies a function on the lab's PCI
    // bus.
    let disks = u8::try_from(ways.len())? * rounds + 1;
    if disks > 22 {
        return Err("that is more disks than the lab has room for; at most 7 rounds with --also".into());
    }
    let options = LabOptions {
        memory_mib: 4096,
        files: qemu_files(&PC_FIRMWARE)?,
        ..LabOptions::default()
    };
    let debian = DebianTestHost::new(disks, options)?;
    let place = &debian.place;
    if matches!(place, TestHost::Direct(_)) {
        return Err(
            "it makes tap devices and mounts, which it does in the lab only; set PERFVISOR_PLACE=lab".into(),
        );
    }
    println!("{}; {rounds} rounds by turns, {seconds} s each", place.describe());
    let shell = |line: &str| -> Result<String, ComparisonError> {
        let output = place.run(&HostCommand::shell(line), LIMIT)?;
        if output.success() {
            Ok(output.stdout_text())
        } else {
            Err(format!("{line}: {:?}: {}", output.ended, output.stderr_text()).into())
        }
    };
    let tools = debian.disks.last().cloned().unwrap_or_default();
    shell(&SET_UP.replace("DISK", &tools))?;
    if let Some(ns) = asked.halt_poll_ns {
        shell(&format!("echo {ns} >/sys/module/kvm/parameters/halt_poll_ns"))?;
    }
    let key = fs::read(target_dir().join("debian/ssh-key"))?;
    place.put("/debian/tmp/key", 0o600, &key)?;
    let script = MEASURE
        .replace("SECONDS", &seconds.to_string())
        .replace("LAB", LAB)
        .replace("LOADS", &asked.loads.join(","));
    place.put("/tmp/measure", 0o644, script.as_bytes())?;

    let all = by_turns(rounds.into(), &ways, |round, n| {
        let (vmm, disk) = (ways[n], ways.len() * round + n);
        // Discard what the previous VMM has left of the loop device in the page cache.
        shell("echo 1 >/proc/sys/vm/drop_caches")?;
        let mut command = qemu_command(&debian, disk);
        if vmm != THEIRS {
            command = debian
                .command("compared", disk)?
                .args(["--memory", &format!("{GUEST_MIB}M")])
                .args(DATA_DISKS.iter().flat_map(|(_, file, _)| ["--disk", file]))
                .args(["--net", &format!("tap=pvtap0,mac={MAC},vhost=on")]);
        }
        if Some(vmm) == also.as_deref() {
            command = command.args(asked.also.iter().flat_map(|words| words.split_whitespace()));
        }
        if round == 0 {
            println!("$ {}", command.line());
        }
        run_until_output(place, &command, "login:", LIMIT, |login| {
            loads(place, login, &asked.loads)
        })
    })?;
    print!("{}", table(&all, &ways));
    let value = json!({ "rounds": rounds, "seconds": seconds, "place": place.describe(), "figures": all });
    write_figures("compare-disk", &value)?;
    Ok(true)
}

/// Returns the QEMU command for a machine that is the same as Perfvisor's.
fn qemu_command(debian: &DebianTestHost, disk: usize) -> HostCommand {
    let drive = |name: &str, file: &str, aio: &str| format!("file={file},format=raw,if=none,id={name},{aio}");
    qemu("pc", GUEST_MIB, &debian.kernel, &debian.initrd, CMDLINE)
        .args([
            "-drive",
            &drive("root", &debian.disks[disk], "aio=threads"),
            "-device",
            "virtio-blk-pci,drive=root",
        ])
        .args(DATA_DISKS.iter().flat_map(|(name, file, aio)| {
            let device = format!("virtio-blk-pci,drive={name}");
            [
                "-drive".to_owned(),
                drive(name, file, aio),
                "-device".to_owned(),
                device,
            ]
        }))
        .args([
            "-netdev",
            "tap,id=net,ifname=pvtap0,script=no,downscript=no,vhost=on",
        ])
        .args([
            "-device",
            &format!("virtio-net-pci,netdev=net,mac={MAC},romfile="),
        ])
        .args(["-device", "virtio-rng-pci"])
}

/// Runs the loads in a VM that has reached its login prompt, and returns the measured values.
fn loads(place: &TestHost, login: f64, wanted: &[String]) -> Result<Figures, ComparisonError> {
    let mut figures = Figures::from([("login".to_owned(), login)]);
    // Measure the VMM's memory in use, after the guest has responded over ssh.
    let ssh = "chroot /debian ssh -i /tmp/key -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR";
    let ready = format!(
        "until {ssh} -o ConnectTimeout=5 root@{GUEST} systemctl is-system-running --wait; do sleep 1; done"
    );
    place.run(&HostCommand::shell(ready), LIMIT)?;
    let held = footprint(place, GUEST_MIB)?;
    figures.insert("rss".to_owned(), held.rss_kib as f64 / 1024.0);
    figures.insert("anonymous".to_owned(), held.anonymous_kib as f64 / 1024.0);
    // Append KVM's statistics to each line.
    let measure = format!(
        "{ssh} root@{GUEST} sh </tmp/measure 2>&1 | while read -r line; do echo \"$line $(cd /sys/kernel/debug/kvm; echo $(cat exits halt_exits))\"; done"
    );
    let output = place.run(&HostCommand::shell(measure), LIMIT)?.stdout_text();
    let (mut began, mut halted) = (0.0, 0.0);
    for line in output.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |n: usize| words.get(n).and_then(|word| word.parse::<f64>().ok());
        match words.first() {
            Some(&"begin") => {
                began = number(2).unwrap_or(0.0);
                halted = number(3).unwrap_or(0.0);
            }
            Some(&"end") => {
                let (Some(name), Some(value), Some(ios), Some(exits), Some(halts)) =
                    (words.get(1), number(2), number(3), number(4), number(5))
                else {
                    return Err(format!("not a figure: {line}\n{output}").into());
                };
                figures.insert((*name).to_owned(), value);
                if ios > 0.0 {
                    figures.insert(format!("{name} exits"), (exits - began) / ios);
                    figures.insert(format!("{name} halts"), (halts - halted) / ios);
                }
            }
            _ => {}
        }
    }
    if let Some(missing) = wanted.iter().find(|name| !figures.contains_key(*name)) {
        return Err(format!("no figure {missing}: {output}").into());
    }
    Ok(figures)
}

/// Returns a Markdown table of medians, minima and maxima. The column "Better" compares Perfvisor
/// with QEMU.
fn table(all: &BTreeMap<&str, Vec<Figures>>, ways: &[&str]) -> String {
    let mut out = format!(
        "| | {} | better |\n|---|{}---|\n",
        ways.join(" | "),
        "---|".repeat(ways.len())
    );
    for (name, words, unit, more_is_better) in ROWS {
        let of = |vmm: &str| {
            let figures = all.get(vmm).into_iter().flatten();
            spread(figures.filter_map(|figures| figures.get(name).copied()))
        };
        let (ours, theirs) = (of(OURS)[1], of(THEIRS)[1]);
        if ours.is_nan() {
            // The load was not selected.
            continue;
        }
        let digits = usize::from(ours < 100.0) + usize::from(ours < 10.0);
        let cells: Vec<String> = ways
            .iter()
            .map(|way| format!("{} {unit}", cell(of(way), digits)).trim().to_owned())
            .collect();
        let ratio = if more_is_better {
            ours / theirs
        } else {
            theirs / ours
        };
        let _ = writeln!(out, "| {words} | {} | {ratio:.2} |", cells.join(" | "));
    }
    out
}
