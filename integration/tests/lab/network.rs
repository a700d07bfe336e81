//! Tests a network device on a tap device with an unmodified Debian kernel. Files are transferred
//! in both directions without corruption, in frames larger than the MTU. The driver can be
//! reloaded, and the guest survives removal of the tap device.

use integration::guest::{GuestRun, LinuxGuest};
use integration::limit::ProcessTimeLimits;
use integration::process::{HostCommand, HostProcess};
use integration::test_host::TestHost;

const LIMIT: ProcessTimeLimits = ProcessTimeLimits::GENEROUS;
/// Prefix of the message in which perfvisor reports the network backend.
const MOVED_BY: &str = "back end: ";

/// Shell command that creates the file to transfer, which is served from `/tmp/www`. The file
/// consists of 16 MiB of distinct lines, so that reordering is detected.
const FILE: &str = "mkdir -p /tmp/www && seq 1 9999999 | head -c 16777216 >/tmp/www/file";

/// Shell command that prepares the host side of the network: a tap device with an address and its
/// own MTU, and a file server.
const HOST: &str = "tunctl -t pvtap0 >/dev/null && ip link set pvtap0 mtu 1400 up && \
                    ip addr add 10.99.0.1/24 dev pvtap0 && httpd -p 10.99.0.1:5001 -h /tmp/www";
const MTU: u64 = 1400;
/// Length of the Ethernet header, in bytes.
const ETHERNET_BYTES: u64 = 14;

const SCRIPT: &str = r#"
up() {
	ip link set eth0 up && ip addr add 10.99.0.2/24 dev eth0
	until [ "$(cat /sys/class/net/eth0/carrier)" = 1 ]; do sleep 0.1; done
}
drivers
up
section device sh -c "cat /sys/class/net/eth0/address /sys/class/net/eth0/mtu"
section ping ping -c 3 10.99.0.1
rmmod virtio_net && load virtio_net && up
section again ping -c 3 10.99.0.1
mkdir /tmp/www
wget -q -O /tmp/www/file http://10.99.0.1:5001/file
section received sha256sum /tmp/www/file
section frames sh -c "cat /sys/class/net/eth0/statistics/rx_bytes /sys/class/net/eth0/statistics/rx_packets"
httpd -p 5002 -h /tmp/www
echo marker-serves
until [ "$(cat /sys/class/net/eth0/carrier)" = 0 ]; do sleep 0.1; done
section gone sh -c "ping -c 1 -w 2 10.99.0.1; true"
section alive uname -s
"#;

#[track_caller]
fn shell(place: &TestHost, line: &str) -> String {
    let output = place.run(&HostCommand::shell(line), LIMIT).unwrap();
    assert!(
        output.success(),
        "{line}: {:?}: {}",
        output.ended,
        output.stderr_text()
    );
    output.stdout_text()
}

#[track_caller]
fn reaches(guest: &HostProcess, marker: &str) {
    assert!(
        guest.wait_for(marker, LIMIT),
        "no {marker}: {}",
        guest.stdout_so_far()
    );
}

fn first_word(text: &str) -> &str {
    text.split_whitespace().next().unwrap_or_default()
}

/// Returns the mean frame length in bytes. `counts` consists of the number of bytes and the number
/// of frames.
#[track_caller]
fn mean_length(counts: &str) -> u64 {
    let counts: Vec<u64> = counts
        .split_whitespace()
        .map(|word| word.parse().unwrap())
        .collect();
    counts[0] / counts[1]
}

/// The network works if a thread of Perfvisor transfers the frames, and the guest survives removal
/// of the tap device.
#[test]
fn linux_network_over_tap_survives_tap_removal() {
    talks("off", "a thread of Perfvisor's, as asked");
}

/// The network works if the host's kernel transfers the frames (vhost-net, the default of `--net`
/// in the lab), and the guest survives removal of the tap device.
#[test]
fn linux_network_over_vhost_survives_tap_removal() {
    talks("auto", "vhost-net");
}

fn talks(vhost: &str, moved_by: &str) {
    let place = TestHost::shared().unwrap_or_else(|error| panic!("{error}"));
    if matches!(*place, TestHost::Direct(_)) {
        println!("SKIP: the test makes tap devices, which it does in the lab only");
        return;
    }
    shell(&place, FILE);
    shell(&place, HOST);
    let sum = shell(&place, "sha256sum /tmp/www/file");
    let guest = LinuxGuest::new(format!("network-{vhost}"), "off")
        .script(SCRIPT)
        .limit(LIMIT)
        .args([
            "--net",
            &format!("tap=pvtap0,mac=02:00:00:00:00:07,vhost={vhost}"),
        ])
        .args(["--name", "network", "-v"]);
    let running = place.start(&guest.command(&place).unwrap()).unwrap();

    reaches(&running, "marker-serves");
    let count = |what: &str| -> u64 {
        let file = format!("/sys/class/net/pvtap0/statistics/rx_{what}");
        shell(&place, &format!("cat {file}")).trim().parse().unwrap()
    };
    let before = (count("bytes"), count("packets"));
    let fetched = shell(&place, "wget -q -O - http://10.99.0.2:5002/file | sha256sum");
    let (bytes, frames) = (count("bytes") - before.0, count("packets") - before.1);
    assert_eq!(first_word(&fetched), first_word(&sum), "what the guest sent");
    shell(&place, "ip link del pvtap0");
    let run: GuestRun = guest.finish(&running.wait(guest.limits()).unwrap()).unwrap();

    assert_eq!(run.section("device").trim(), "02:00:00:00:00:07\n1400");
    for section in ["ping", "again"] {
        let text = run.section(section);
        assert!(text.contains("3 packets received"), "{text}");
    }
    assert_eq!(first_word(run.section("received")), first_word(&sum));
    // A mean frame length above the MTU proves that segmentation offload is used. Acknowledgments
    // travel in the opposite direction and are not included.
    let (sent, received) = (bytes / frames, mean_length(run.section("frames")));
    eprintln!("mean frame: {sent} bytes sent by the guest, {received} bytes received");
    assert!(sent > MTU + ETHERNET_BYTES, "{bytes} bytes in {frames} frames");
    assert!(received > MTU + ETHERNET_BYTES, "{}", run.section("frames"));
    assert!(run.section("gone").contains(" 0 packets received"));
    assert_eq!(run.section("alive").trim(), "Linux");
    let told = run.vmm_log.lines().find_map(|line| line.split_once(MOVED_BY));
    assert_eq!(told.map(|(_, who)| who), Some(moved_by), "{run}");
    assert!(run.vmm_log.contains("the guest's link is down"), "{run}");
    shell(&place, "kill $(pidof httpd)");
    run.expect_success();
}
