use std::sync::atomic::AtomicU8;

use proptest::prelude::*;
use virtio_queue::QueueT;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::port::INPUT_BYTES;
use super::queues::{MAX_OUTPUT_BYTES, take};
use super::*;
use crate::device::{ConfigChangeNotifier, DeviceInterrupt};
use crate::serve::testing::{BUFFERS, Driver, GOOD, HOSTILE, activation, memory, wait_until};
use crate::serve::{serve_queue, serve_queue_while};

const NEXT: u16 = 1;
const WRITE: u16 = 2;

/// A console sink whose contents a test can inspect.
#[derive(Clone, Default)]
struct TestSink(Arc<Mutex<Vec<u8>>>);

impl Write for TestSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the bytes that reach the sink when the driver offers `chain`.
fn written(memory: &GuestMemoryMmap, chain: &[Descriptor]) -> Vec<u8> {
    let mut driver = Driver::new(memory, 64);
    driver.offer_chain(0, chain);
    let mut out = Vec::new();
    serve_queue(&mut driver.active, memory, |chain| {
        take(&mut out, memory, chain);
        0
    })
    .unwrap();
    assert_eq!(
        driver.used(),
        [(0, 0)],
        "each chain comes back, with nothing written"
    );
    out
}

#[test]
fn guest_output_arrives_in_order() {
    let memory = memory();
    let text: Vec<u8> = (0..9000u32).map(|i| i as u8).collect();
    memory.write_slice(&text, GuestAddress(BUFFERS)).unwrap();
    let chain = [
        Descriptor::new(BUFFERS, 5000, NEXT, 1),
        Descriptor::new(BUFFERS + 5000, 4000, 0, 0),
    ];
    assert!(written(&memory, &chain) == text);
}

#[test]
fn hostile_output_is_bounded() {
    let memory = memory();
    // Malformed chains: a loop, an oversized buffer, a buffer outside RAM after a valid one, and a
    // device-writable buffer.
    assert_eq!(
        written(&memory, &[Descriptor::new(BUFFERS, 4096, NEXT, 0)]).len(),
        MAX_OUTPUT_BYTES
    );
    assert_eq!(
        written(&memory, &[Descriptor::new(0, u32::MAX, 0, 0)]).len(),
        MAX_OUTPUT_BYTES
    );
    let outside = [
        Descriptor::new(BUFFERS, 10, NEXT, 1),
        Descriptor::new(u64::MAX - 8, 100, 0, 0),
    ];
    assert_eq!(written(&memory, &outside).len(), 10);
    assert!(written(&memory, &[Descriptor::new(BUFFERS, 100, WRITE, 0)]).is_empty());
    assert!(written(&memory, &[Descriptor::new(BUFFERS, 0, 0, 0)]).is_empty());
}

/// Malformed output chains (loops, indirect tables of 65,535 entries, nested tables, buffers
/// outside RAM) are returned to the driver with bounded output. The valid chain after them is
/// written.
#[test]
fn hostile_chains_do_not_block_output() {
    let memory = memory();
    memory.write_slice(&[b'g'; 256], GuestAddress(GOOD)).unwrap();
    let mut driver = Driver::new(&memory, 64);
    driver.offer_hostile(0);
    let mut out = Vec::new();
    for _ in 0..HOSTILE {
        serve_queue(&mut driver.active, &memory, |chain| {
            let before = out.len();
            take(&mut out, &memory, chain);
            assert!(out.len() - before <= MAX_OUTPUT_BYTES);
            0
        })
        .unwrap();
    }
    let heads: Vec<_> = (0..u32::from(HOSTILE)).map(|head| (head, 0)).collect();
    assert_eq!(driver.used(), heads);
    assert!(out.ends_with(&[b'g'; 256]));
}

/// Console input that does not fit into a malformed chain of the receive queue is kept for the next
/// chain.
#[test]
fn hostile_chains_do_not_block_input() {
    let memory = memory();
    let port = ConsolePort::new(None).unwrap();
    let driver = Driver::new(&memory, 64);
    let (mut queues, mut driver, _output) = queues(&memory, driver);
    driver.offer_hostile(WRITE);
    // One chain may hold all of the pending input.
    for _ in 0..2 * HOSTILE {
        port.send(&[b'i'; INPUT_BYTES]);
        queues.serve_input(&memory, &port).unwrap();
    }
    driver.assert_hostile_used(INPUT_BYTES, 256);
}

fn queues<'m>(memory: &'m GuestMemoryMmap, input: Driver<'m>) -> (ConsoleQueues, Driver<'m>, Driver<'m>) {
    let output = Driver::at(memory, 16, 0x8000);
    let queues = ConsoleQueues {
        input: input.active(),
        output: output.active(),
    };
    (queues, input, output)
}

/// Input waits until the driver provides buffers, and buffers that are not needed stay in the
/// queue.
#[test]
fn input_uses_required_buffers_only() {
    let memory = memory();
    let port = ConsolePort::new(None).unwrap();
    let driver = Driver::new(&memory, 16);
    assert_eq!(port.send(b"hello"), 5);
    for (head, at) in [(0, BUFFERS), (2, BUFFERS + 64), (3, BUFFERS + 128)] {
        driver.write(head, &[Descriptor::new(at, 4, WRITE, 0)]);
    }
    let (mut queues, mut driver, _output) = queues(&memory, driver);
    queues.serve_input(&memory, &port).unwrap();
    assert!(port.has_input(), "there is no buffer yet");
    for head in [0, 2, 3] {
        driver.offer(head);
    }
    queues.serve_input(&memory, &port).unwrap();
    assert_eq!(driver.used(), [(0, 4), (2, 1)]);
    assert_eq!(
        memory.read_obj::<[u8; 4]>(GuestAddress(BUFFERS)).unwrap(),
        *b"hell"
    );
    assert_eq!(memory.read_obj::<u8>(GuestAddress(BUFFERS + 64)).unwrap(), b'o');
    // On a slow host, each buffer causes an interrupt of its own.
    assert!((1..=2).contains(&driver.vector.read().unwrap()));
    // The third buffer is still available for later input.
    port.send(b"!");
    queues.serve_input(&memory, &port).unwrap();
    assert_eq!(driver.used().last(), Some(&(3, 1)));
}

/// A descriptor chain with a buffer outside RAM is returned to the driver, but no input is lost.
#[test]
fn invalid_buffer_loses_no_input() {
    let memory = memory();
    let port = ConsolePort::new(None).unwrap();
    let driver = Driver::new(&memory, 16);
    driver.write(0, &[Descriptor::new(u64::MAX - 8, 100, WRITE, 0)]);
    driver.write(1, &[Descriptor::new(BUFFERS, 100, 0, 0)]);
    driver.write(2, &[Descriptor::new(BUFFERS, 100, WRITE, 0)]);
    let (mut queues, mut driver, _output) = queues(&memory, driver);
    port.send(b"x");
    for head in 0..3 {
        driver.offer(head);
    }
    queues.serve_input(&memory, &port).unwrap();
    assert_eq!(driver.used(), [(0, 0), (1, 0), (2, 1)]);
}

/// The amount of pending input is bounded, and the sender is notified once when space becomes
/// available.
#[test]
fn input_is_bounded_and_space_is_signalled_once() {
    let memory = memory();
    let port = ConsolePort::new(None).unwrap();
    assert_eq!(port.send(&[b'x'; 10_000]), INPUT_BYTES);
    assert_eq!(port.send(b"y"), 0);
    assert!(port.space_event().read().is_err());
    let driver = Driver::new(&memory, 16);
    driver.write(0, &[Descriptor::new(BUFFERS, 16, WRITE, 0)]);
    let (mut queues, mut driver, _output) = queues(&memory, driver);
    driver.offer(0);
    queues.serve_input(&memory, &port).unwrap();
    assert_eq!(port.space_event().read().unwrap(), 1);
    assert_eq!(port.send(&[b'z'; 100]), 16);
}

#[test]
fn window_size_is_reported_if_known() {
    let new = |size| VirtioConsole::new(Box::new(io::sink()), size).unwrap();
    let size = |columns, rows| TerminalSize { columns, rows };
    for unknown in [None, Some(size(0, 0)), Some(size(80, 0))] {
        let console = new(unknown);
        console.port().resize(size(80, 25));
        let mut data = [0xff; 8];
        console.read_config(0, &mut data);
        assert_eq!((console.features(), data), (0, [0; 8]));
    }
    let console = new(Some(size(80, 25)));
    assert_eq!(console.features(), 1);
    let vector = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    let change = ConfigChangeNotifier::new(
        Arc::new(AtomicU8::new(0)),
        Arc::default(),
        DeviceInterrupt::new(Some(vector.clone())),
    );
    console.port().set_config_notifier(Some(change));
    console.port().resize(size(80, 25));
    assert!(vector.read().is_err(), "it is the same");
    console.port().resize(size(132, 50));
    assert_eq!(vector.read().unwrap(), 1);
    let mut data = [0xff; 8];
    console.read_config(0, &mut data);
    assert_eq!(data, [132, 0, 50, 0, 0, 0, 0, 0]);
}

/// The device requests a reset if the driver breaks the ring of either queue.
#[test]
fn broken_ring_requests_reset() {
    for breaks_output in [false, true] {
        let memory = memory();
        let mut console = VirtioConsole::new(Box::new(io::sink()), None).unwrap();
        let mut input = Driver::new(&memory, 16);
        let mut output = Driver::at(&memory, 16, 0x8000);
        // Break the queue: the head index is outside the descriptor table.
        if breaks_output {
            output.offer(16);
        } else {
            input.offer(16);
            console.port().send(b"x");
        }
        let (activation, seen) = activation(&memory, vec![Some(input.active()), Some(output.active())]);
        console.activate(activation).unwrap();
        output.active.kick.write(1).unwrap();
        seen.changed.read().unwrap();
        assert!(seen.needs_reset());
        console.reset();
    }
}

/// The console device's thread transfers input and output before and after a reset.
#[test]
fn console_serves_both_directions_after_reset() {
    let memory = memory();
    let sink = TestSink::default();
    let mut console = VirtioConsole::new(Box::new(sink.clone()), None).unwrap();
    for round in 0..2u8 {
        let mut input = Driver::new(&memory, 16);
        input.offer_chain(0, &[Descriptor::new(BUFFERS, 4, WRITE, 0)]);
        // Place the rings of the second queue after those of the first.
        let mut output = Driver::at(&memory, 16, 0x8000);
        memory
            .write_slice(&[b'a' + round], GuestAddress(BUFFERS + 64))
            .unwrap();
        output.offer_chain(0, &[Descriptor::new(BUFFERS + 64, 1, 0, 0)]);
        output.active.kick.write(1).unwrap();
        console.port().send(&[b'0' + round]);
        let queues = [&input, &output].map(|driver| Some(driver.active()));
        let (activation, _) = activation(&memory, queues.into());
        console.activate(activation).unwrap();
        for driver in [&input, &output] {
            wait_until(|| driver.vector.read().is_ok());
        }
        assert_eq!((input.used(), output.used()), (vec![(0, 1)], vec![(0, 0)]));
        assert_eq!(
            memory.read_obj::<u8>(GuestAddress(BUFFERS)).unwrap(),
            b'0' + round
        );
        console.reset();
    }
    assert_eq!(*sink.0.lock().unwrap(), *b"ab");
}

proptest! {
    /// With arbitrary rings and descriptors, processing the queues terminates and the output is
    /// bounded.
    #[test]
    fn arbitrary_rings_end_the_round(
        words in proptest::collection::vec(any::<u64>(), 64),
        heads in proptest::collection::vec(0u16..8, 0..12),
    ) {
        let memory = memory();
        let port = ConsolePort::new(None).unwrap();
        port.send(&[b'i'; 100]);
        let mut driver = Driver::new(&memory, 8);
        for (at, word) in words.chunks(2).enumerate().take(8) {
            let [address, rest] = [word[0] % (8 << 20), word[1]];
            let descriptor = Descriptor::new(address, rest as u32, (rest >> 32) as u16 & 7, (rest >> 48) as u16 % 9);
            driver.write(at as u16, &[descriptor]);
        }
        for head in heads {
            driver.offer(head);
        }
        let mut out = Vec::new();
        let mut served = 0;
        let _ = serve_queue(&mut driver.active, &memory, |chain| {
            served += 1;
            take(&mut out, &memory, chain);
            0
        });
        prop_assert!(served <= driver.active.queue.size() && out.len() <= usize::from(served) * MAX_OUTPUT_BYTES);
        let mut driver = Driver::new(&memory, 8);
        driver.offer(1);
        let _ = serve_queue_while(&mut driver.active, &memory, || port.has_input(), |chain| port.fill(&memory, chain));
    }
}
