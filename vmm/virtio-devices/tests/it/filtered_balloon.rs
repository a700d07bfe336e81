//! Tests the thread of the balloon device under its seccomp filter, with each type of guest memory.
//! The VM is a child process that runs this test program again.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use sandbox::{PerfEventAccess, SeccompMode, SeccompTerminationActions};
use test_support::child::child_command;
use virtio_devices::balloon::BalloonDevice;
use virtio_devices::balloon::release::RamOrigin;
use virtio_devices::device::{
    ActiveQueue, ConfigChangeNotifier, DeviceActivation, DeviceFailureCallback, DeviceInterrupt, VirtioDevice,
};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Environment variable with the type of guest memory, for the child process.
const KIND: &str = "BALLOON_TEST_MEMORY";
/// Line that the child process prints when the device has finished its work.
const DONE: &str = "pages are released, statistics are updated";
const MEMORY: usize = 1 << 20;
// Distance between two queues, and offsets of the rings within a queue, in bytes.
const QUEUE_BYTES: u64 = 0x4000;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
// Guest addresses of the list of page frame numbers, and of the page that is released.
const PFNS: u64 = 0x4_0000;
const PAGE: u64 = 0x8_0000;

fn queue(number: u32) -> ActiveQueue {
    let mut queue = Queue::new(16).unwrap();
    let place = |at: u64| Some((u64::from(number + 1) * QUEUE_BYTES + at).try_into().unwrap());
    queue.set_desc_table_address(place(0), Some(0));
    queue.set_avail_ring_address(place(AVAIL), Some(0));
    queue.set_used_ring_address(place(USED), Some(0));
    queue.set_ready(true);
    ActiveQueue {
        queue,
        kick: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
        interrupt: DeviceInterrupt::default(),
    }
}

/// Makes a chain with `bytes` bytes at [`PFNS`] available in queue `number`, and waits until the
/// device returns it.
fn offer(memory: &GuestMemoryMmap, number: u64, kick: &EventFd, bytes: u64) {
    let start = (number + 1) * QUEUE_BYTES;
    memory.write_obj([PFNS, bytes], GuestAddress(start)).unwrap();
    memory.write_obj(1_u16, GuestAddress(start + AVAIL + 2)).unwrap();
    kick.write(1).unwrap();
    let used = || memory.read_obj::<u16>(GuestAddress(start + USED + 2)).unwrap();
    while used() != 1 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
#[ignore = "a child of the test below"]
fn as_a_child() {
    let kind = std::env::var(KIND).unwrap();
    let will = SeccompTerminationActions {
        first: || {},
        log: None,
        status: 8,
    };
    sandbox::begin(SeccompMode::On, PerfEventAccess::Broker, will).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(MEMORY as u64).unwrap();
    let file = (kind == "shared").then(|| FileOffset::new(file, 0));
    let memory = GuestMemoryMmap::<()>::from_ranges_with_files([(GuestAddress(0), MEMORY, file)]).unwrap();
    let origin = match kind.as_str() {
        "snapshot" => RamOrigin::Snapshot,
        _ => RamOrigin::Empty,
    };
    let config = "size=1,stats=1".parse().unwrap();
    let mut balloon = BalloonDevice::new(config, MEMORY as u64, origin).unwrap();
    sandbox::confine().unwrap();

    let queues = [0, 1, 2].map(queue);
    let kicks = queues.each_ref().map(|queue| queue.kick.clone());
    let activation = DeviceActivation {
        memory: memory.clone(),
        features: balloon.features(),
        queues: queues.map(Some).into(),
        resumed: false,
        config_change: ConfigChangeNotifier::default(),
        fatal_error_callback: DeviceFailureCallback::default(),
    };
    balloon.activate(activation).unwrap();
    memory.write_slice(&[7; 4096], GuestAddress(PAGE)).unwrap();
    memory
        .write_obj(u32::try_from(PAGE >> 12).unwrap(), GuestAddress(PFNS))
        .unwrap();
    offer(&memory, 0, &kicks[0], 4);
    assert_eq!(memory.read_obj::<u8>(GuestAddress(PAGE)).unwrap(), 0);
    assert_eq!(balloon.control().state().released_bytes, 4096);
    // The device returns the statistics buffer when its timer fires.
    offer(&memory, 2, &kicks[2], 10);
    balloon.control().set_statistics_interval(2).unwrap();
    balloon.reset();
    // The test harness has printed an incomplete line, so start a new one.
    println!("\n{DONE}");
    std::io::stdout().flush().unwrap();
    // The threads of the test harness would be terminated by their next system calls.
    std::process::exit(0);
}

#[test]
fn balloon_works_under_its_filter() {
    for kind in ["anonymous", "shared", "snapshot"] {
        let out = child_command(module_path!(), KIND, kind).output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        let errors = String::from_utf8_lossy(&out.stderr);
        assert!(
            said.contains(DONE) && out.status.success(),
            "{kind}: {said}{errors}"
        );
    }
}
