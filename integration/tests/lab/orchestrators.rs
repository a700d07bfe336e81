//! Tests the life cycle of a Linux guest with two drives, a tap device and vsock, controlled by an
//! unmodified, published client of Firecracker's API. Also tests that a guest reads metadata.

use integration::artefacts;
use integration::guest::{GuestConsoleLog, LinuxGuest};
use integration::parse::parse_stat_csv;
use integration::process::HostCommand;
use integration::test_host::TestHost;

use crate::common::{LIMIT, run};

/// Guest script that prints ticks until the guest's power button is pressed.
const SCRIPT: &str = r#"
drivers
insmod /lib/modules/evdev.ko
insmod /lib/modules/button.ko
ip link set eth0 up && ip addr add 10.97.0.2/24 dev eth0
until [ "$(cat /sys/class/net/eth0/carrier)" = 1 ]; do sleep 0.1; done
section ping ping -c 2 10.97.0.1
section address cat /sys/class/net/eth0/address
section drives sh -c "cat /sys/block/vda/ro /sys/block/vdb/ro"
head -c 65536 /dev/urandom >/tmp/block
dd if=/tmp/block of=/dev/vda bs=64k conv=fsync status=none
section stat-1 perf stat -x, -e cycles spin 0.3
(head -c 24 /dev/input/event0 >/tmp/key) &
echo marker-up
n=0
until [ -s /tmp/key ]; do
	n=$((n + 1))
	echo tick $n
	sleep 0.5
done
echo 3 >/proc/sys/vm/drop_caches
section block sh -c "head -c 65536 /dev/vda | cmp - /tmp/block"
section ping-again ping -c 2 10.97.0.1
section stat-2 perf stat -x, -e cycles spin 0.3
"#;

/// Names of the output sections that the guest prints before the snapshot.
const BEFORE: [&str; 4] = ["ping", "address", "drives", "stat-1"];
const AFTER: [&str; 3] = ["block", "ping-again", "stat-2"];

#[test]
fn rust_sdk_drives_a_linux_guest() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    if matches!(*place, TestHost::Direct(_)) {
        println!("SKIP: the test makes a tap device, which it does in the lab only");
        return;
    }
    let agent = &artefacts::binaries().unwrap().guest_agent;
    let guest = LinuxGuest::new("orchestrators", "auto")
        .file("bin/perfvisor-agent", 0o755, std::fs::read(agent).unwrap())
        .script(SCRIPT);
    let source = guest.boot_source(&place).unwrap();
    let client = place.scratch("sdk-client");
    let program = std::fs::read(artefacts::sdk_client().unwrap()).unwrap();
    place.put(&client, 0o755, &program).unwrap();
    let directory = place.scratch("orchestrator");
    let at = |name: &str| format!("{directory}/{name}");
    let perfvisor = place.perfvisor().unwrap();
    run(
        &place,
        &HostCommand::shell(format!(
            "mkdir '{directory}' && ln -s '{perfvisor}' '{directory}/firecracker' && \
             truncate -s 8M '{directory}/a' && truncate -s 4M '{directory}/b' && \
             tunctl -t pvsdk >/dev/null && ip link set pvsdk up && ip addr add 10.97.0.1/24 dev pvsdk"
        )),
    );
    let client = HostCommand::new(&client)
        .args([at("firecracker"), source.kernel, source.initrd, source.cmdline])
        .args([at("a"), at("b"), "pvsdk".into(), directory.clone()]);
    let output = place.run(&client, LIMIT).unwrap();
    let text = output.stdout_text();
    assert!(output.success(), "{}\n{text}", output.stderr_text());
    let steps: Vec<&str> = text
        .lines()
        .take_while(|line| !line.starts_with("=="))
        .filter(|line| !line.starts_with("start_vmm"))
        .filter_map(|line| line.split(' ').next())
        .collect();
    let expected = [
        "version",
        "configured",
        "started",
        "paused",
        "saved",
        "loaded",
        "stopped",
    ];
    assert_eq!(steps, expected, "{text}");

    let (_, consoles) = text.split_once("== sdk-1\n").unwrap();
    let (first, second) = consoles.split_once("== sdk-2\n").unwrap();
    // The console of the restored guest begins at the snapshot.
    let first = GuestConsoleLog::parse(first);
    let second = GuestConsoleLog::parse(second);
    let of = |log: &GuestConsoleLog, name: &str| {
        let section = log
            .sections
            .get(name)
            .unwrap_or_else(|| panic!("no {name}: {text}"));
        assert_eq!(section.status, Some(0), "{name}: {text}");
        section.text.clone()
    };
    for name in BEFORE {
        of(&first, name);
    }
    for name in AFTER {
        of(&second, name);
    }
    assert_eq!(of(&first, "address").trim(), "02:00:00:00:00:2a");
    assert_eq!(
        of(&first, "drives").split_whitespace().collect::<Vec<_>>(),
        ["0", "1"]
    );
    for (log, name) in [(&first, "stat-1"), (&second, "stat-2")] {
        let stat = parse_stat_csv(&of(log, name));
        assert!(stat.value("cycles").is_ok_and(|cycles| cycles > 0.0), "{text}");
    }
}

/// Guest script that requests a token from the metadata service and reads values with it, alone and
/// while the tap device carries other frames.
const METADATA_SCRIPT: &str = r#"
drivers
ip link set eth0 up && ip addr add 10.96.0.2/24 dev eth0
until [ "$(cat /sys/class/net/eth0/carrier)" = 1 ]; do sleep 0.1; done
ip route add 169.254.169.254 dev eth0
printf 'PUT /latest/api/token HTTP/1.0\r\nX-metadata-token-ttl-seconds: 600\r\n\r\n' >/tmp/request
nc 169.254.169.254 80 </tmp/request | tail -n 1 >/tmp/token
get() {
	wget -q -O - --header "X-metadata-token: $(cat /tmp/token)" "$@"
}
base=http://169.254.169.254/latest
section without-token sh -c "wget -O - $base/meta-data/name 2>&1 | grep -o 'HTTP/1.1 401'"
section value get $base/meta-data/name
section keys get $base
section json get --header 'Accept: application/json' $base/meta-data
ping -c 5 10.96.0.1 >/tmp/pings &
section long sh -c "for n in 1 2 3; do wget -q -O - --header \"X-metadata-token: $(cat /tmp/token)\" $base/long | wc -c; done"
wait
section pings grep -o '5 packets received' /tmp/pings
"#;

#[test]
fn linux_guest_reads_metadata() {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    if matches!(*place, TestHost::Direct(_)) {
        println!("SKIP: the test makes a tap device, which it does in the lab only");
        return;
    }
    let guest = LinuxGuest::new("metadata", "auto").script(METADATA_SCRIPT);
    let source = guest.boot_source(&place).unwrap();
    let directory = place.scratch("metadata");
    let perfvisor = place.perfvisor().unwrap();
    run(
        &place,
        &HostCommand::shell(format!(
            "mkdir '{directory}' && ln -s '{perfvisor}' '{directory}/firecracker' && \
             tunctl -t pvmmds >/dev/null && ip link set pvmmds up && ip addr add 10.96.0.1/24 dev pvmmds"
        )),
    );
    let config = serde_json::json!({
        "boot-source": {"kernel_image_path": source.kernel, "initrd_path": source.initrd,
            "boot_args": source.cmdline},
        "machine-config": {"vcpu_count": 1, "mem_size_mib": 512},
        "network-interfaces": [{"iface_id": "eth0", "host_dev_name": "pvmmds"}],
        "mmds-config": {"network_interfaces": ["eth0"], "version": "V2"},
    });
    let data = serde_json::json!({
        "latest": {"meta-data": {"name": "web", "port": 80}, "long": "x".repeat(40_000)},
    });
    for (name, value) in [("config", config), ("data", data)] {
        let path = format!("{directory}/{name}");
        place.put(&path, 0o644, value.to_string().as_bytes()).unwrap();
    }
    let start =
        format!("cd '{directory}' && exec ./firecracker --no-api --config-file config --metadata data");
    let output = place.run(&HostCommand::shell(start), LIMIT).unwrap();
    let (text, errors) = (output.stdout_text(), output.stderr_text());
    assert!(output.success(), "{errors}\n{text}");
    let log = GuestConsoleLog::parse(&text);
    for (name, expected) in [
        ("without-token", "HTTP/1.1 401"),
        ("value", "web"),
        ("keys", "long\nmeta-data/"),
        ("json", r#"{"name":"web","port":80}"#),
        ("long", "40000\n40000\n40000"),
        ("pings", "5 packets received"),
    ] {
        let section = log.sections.get(name);
        let section = section.unwrap_or_else(|| panic!("no {name}: {errors}\n{text}"));
        assert_eq!(section.text.trim(), expected, "{name}: {errors}\n{text}");
    }
}
