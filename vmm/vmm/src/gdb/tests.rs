//! Debugging sessions with a real VM at the level of gdb packets.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::server::{GdbServer, GdbSocket};
use crate::testing::{self, CODE};
use crate::vcpu::control::{VmRunState, VmStopReason};
use crate::vm::{DebuggerConfig, RunningVm};

/// Guest code that increments [`COUNTER`] forever: `inc dword [0x200000]`, then a jump back to it.
const COUNTS: [u8; 8] = [0xFF, 0x05, 0x00, 0x00, 0x20, 0x00, 0xEB, 0xF8];
/// Guest-physical address of the number that the guest code increments.
const COUNTER: u64 = 0x20_0000;
/// Address of the jump in the guest code.
const JUMP: u64 = CODE + 6;

/// A VM with a counting guest and a debugger socket.
struct DebuggedVm {
    // Declared before the VM, because it must be dropped first.
    _server: GdbServer,
    path: PathBuf,
    _dir: tempfile::TempDir,
    vm: RunningVm,
}

impl DebuggedVm {
    fn new() -> Option<Self> {
        let vm = testing::vm(&COUNTS, |config| {
            config.debugger = Some(DebuggerConfig { wait: false });
        })?;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gdb");
        let server = GdbSocket::bind(&path).unwrap().serve(&vm).unwrap();
        Some(Self {
            _server: server,
            path,
            _dir: dir,
            vm,
        })
    }

    /// Connects a debugger, which stops the machine.
    fn attach(&self) -> Gdb {
        let mut gdb = Gdb(UnixStream::connect(&self.path).unwrap());
        let said = gdb.request("?");
        assert!(said.starts_with('T') || said.starts_with('S'), "{said}");
        assert_eq!(self.vm.control().state(), VmRunState::Held);
        gdb
    }

    fn counter(&self) -> u32 {
        self.vm.ram().memory().read_obj(GuestAddress(COUNTER)).unwrap()
    }

    fn code(&self) -> [u8; 8] {
        self.vm.ram().memory().read_obj(GuestAddress(CODE)).unwrap()
    }

    /// Waits until the guest has incremented its counter.
    fn assert_running(&self) {
        let before = self.counter();
        while self.counter() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The client side of a gdb connection.
struct Gdb(UnixStream);

impl Gdb {
    fn send(&mut self, body: &str) {
        let sum = body.bytes().fold(0u8, u8::wrapping_add);
        // An error is ignored, because the server may have closed the connection after an earlier
        // packet.
        let _ = self.0.write_all(format!("${body}#{sum:02x}").as_bytes());
    }

    fn byte(&mut self) -> u8 {
        let mut byte = [0];
        self.0.read_exact(&mut byte).unwrap();
        byte[0]
    }

    /// Returns the contents of the next packet, with run-length encoding expanded.
    fn receive(&mut self) -> String {
        while self.byte() != b'$' {}
        let mut body = Vec::new();
        loop {
            match self.byte() {
                b'#' => break,
                // Run-length encoding: the number of repetitions of the previous character.
                b'*' => {
                    let more = usize::from(self.byte() - 29);
                    let last = *body.last().unwrap();
                    body.extend(vec![last; more]);
                }
                byte => body.push(byte),
            }
        }
        // The two checksum digits end the packet.
        self.byte();
        self.byte();
        // An error is ignored, because the server may have closed the connection.
        let _ = self.0.write_all(b"+");
        String::from_utf8(body).unwrap()
    }

    fn request(&mut self, body: &str) -> String {
        self.send(body);
        self.receive()
    }

    /// Returns RIP of the vCPU that gdb has selected. In gdb's format, RIP follows 16 general
    /// registers.
    fn rip(&mut self) -> u64 {
        let all = self.request("g");
        let bytes: Vec<u8> = (0..8)
            .map(|n| u8::from_str_radix(&all[256 + 2 * n..258 + 2 * n], 16).unwrap())
            .collect();
        u64::from_le_bytes(bytes.try_into().unwrap())
    }
}

/// A debugger that connects finds the guest stopped, and both vCPUs as threads. An invalid request
/// is answered with an error, and the session continues.
#[test]
fn attach_stops_guest_and_lists_vcpus() {
    let Some(vm) = DebuggedVm::new() else { return };
    vm.assert_running();
    let mut gdb = vm.attach();
    let counted = vm.counter();
    assert_eq!(gdb.request(&format!("m{CODE:x},8")), "ff0500002000ebf8");
    assert_eq!(gdb.request("Hg1"), "OK");
    let rip = gdb.rip();
    assert!(rip == CODE || rip == JUMP, "{rip:#x}");
    let threads = gdb.request("qfThreadInfo");
    assert!(threads.starts_with('m') && threads.contains(','), "{threads}");
    for (asked, what) in [
        ("T63", "a thread that is none"),
        ("m4000000,4", "memory behind RAM"),
        ("M4000000,4:00000000", "the same, written"),
        ("mffffffffffffffff,4", "the last address"),
        ("Z0,4000000,1", "a breakpoint where no memory is"),
        ("Z2,200001,4", "a watchpoint across its length"),
        ("Z3,200000,4", "a watchpoint for reads"),
        ("z1,200000,1", "a breakpoint that is not set"),
        ("G00", "one byte of registers"),
        ("G", "no registers"),
    ] {
        let said = gdb.request(asked);
        // An unsupported breakpoint type may be answered with an empty packet.
        let nothing = asked.starts_with(['Z', 'z']) && said.is_empty();
        assert!(said.starts_with('E') || nothing, "{what}: {said}");
    }
    assert_eq!(gdb.rip(), rip, "no register was set");
    // Only the part before the end of RAM is read.
    assert_eq!(gdb.request("m1fffffe,4").len(), 4);
    assert_eq!(vm.counter(), counted, "it stood still all the while");
}

/// The guest continues with the memory and registers that the debugger has set.
#[test]
fn guest_resumes_with_changed_registers() {
    let Some(vm) = DebuggedVm::new() else { return };
    let mut gdb = vm.attach();
    assert_eq!(gdb.request("Hg1"), "OK");
    assert_eq!(gdb.request(&format!("M{COUNTER:x},4:feffff7f")), "OK");
    assert_eq!(vm.counter(), 0x7fff_fffe);
    // RBX is the second register, RIP the seventeenth.
    let all = gdb.request("g");
    let changed = format!("{}8877665544332211{}", &all[..16], &all[32..]);
    assert_eq!(gdb.request(&format!("G{changed}")), "OK");
    assert_eq!(gdb.request("g"), changed);
    let before = gdb.rip();
    // One vCPU is stepped and the other stays stopped.
    let said = gdb.request("vCont;s:1");
    assert!(said.starts_with('T') || said.starts_with('S'), "{said}");
    assert_eq!(gdb.rip(), if before == CODE { JUMP } else { CODE });
    let after = gdb.request("g");
    assert_eq!(&after[16..32], "8877665544332211", "the guest has it");
    let steps = if before == CODE { 1 } else { 0 };
    assert_eq!(vm.counter(), 0x7fff_fffe + steps);
}

/// Hardware breakpoints stop the guest at their instruction. Only a limited number can be set, and
/// a removed one can be set again.
#[test]
fn hardware_breakpoints_stop_guest_and_are_limited() {
    let Some(vm) = DebuggedVm::new() else { return };
    let mut gdb = vm.attach();
    let free = vm.vm.free_breakpoints() as u64;
    for n in 0..free {
        assert_eq!(
            gdb.request(&format!("Z1,{:x},1", 0x30_0000 + n)),
            "OK",
            "{n} of {free}"
        );
    }
    let more = gdb.request(&format!("Z1,{JUMP:x},1"));
    assert!(more.starts_with('E'), "{more}");
    assert_eq!(gdb.request("z1,300000,1"), "OK");
    assert_eq!(gdb.request(&format!("Z1,{JUMP:x},1")), "OK");
    for _ in 0..3 {
        let counted = vm.counter();
        let said = gdb.request("vCont;c");
        assert!(said.starts_with('T'), "{said}");
        assert_eq!(gdb.rip(), JUMP);
        assert!(vm.counter() - counted <= 1, "each time round once");
    }
}

/// Reads do not show the debugger's INT3s. An INT3 is removed on request, when the debugger
/// detaches, and when its connection breaks. The guest then continues.
#[test]
fn detach_removes_breakpoints() {
    let Some(vm) = DebuggedVm::new() else { return };
    // The guest does not execute this address.
    let place = CODE + 8;
    let there = |vm: &DebuggedVm| vm.vm.ram().memory().read_obj::<u8>(GuestAddress(place)).unwrap();
    let original = there(&vm);
    type Leave = fn(Gdb, u64);
    let ways: [Leave; 3] = [
        |mut gdb, place| {
            assert_eq!(gdb.request(&format!("z0,{place:x},1")), "OK");
            assert_eq!(gdb.request("D"), "OK");
        },
        |mut gdb, _| assert_eq!(gdb.request("D"), "OK"),
        |gdb, _| drop(gdb),
    ];
    for leave in ways {
        let mut gdb = vm.attach();
        let said = gdb.request(&format!("m{place:x},1"));
        for _ in 0..2 {
            assert_eq!(gdb.request(&format!("Z0,{place:x},1")), "OK");
        }
        assert_eq!(there(&vm), 0xCC);
        assert_eq!(gdb.request(&format!("m{place:x},1")), said);
        leave(gdb, place);
        vm.assert_running();
        assert_eq!((there(&vm), vm.code()), (original, COUNTS));
        assert_eq!(vm.vm.control().state(), VmRunState::Running);
    }
}

/// Ctrl-C stops a running guest. A kill command ends the VM, as a stop request from the operator
/// does.
#[test]
fn interrupt_stops_and_kill_ends_guest() {
    let Some(vm) = DebuggedVm::new() else { return };
    let mut gdb = vm.attach();
    gdb.send("vCont;c");
    vm.assert_running();
    gdb.0.write_all(&[3]).unwrap();
    let said = gdb.receive();
    assert!(said.starts_with("T02") || said.starts_with("S02"), "{said}");
    let counted = vm.counter();
    assert_eq!(gdb.request("m200000,4").len(), 8);
    assert_eq!(vm.counter(), counted);
    gdb.send("k");
    while vm.vm.control().reason().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(vm.vm.control().reason(), Some(VmStopReason::Operator));
}

/// After arbitrary packets and a disconnect, the guest continues with unmodified code, and the next
/// debugger is served.
#[test]
fn arbitrary_packets_leave_guest_unchanged() {
    let Some(vm) = DebuggedVm::new() else { return };
    let address = prop_oneof![
        Just(CODE),
        Just(COUNTER),
        Just(0x1FF_FFFFu64),
        Just(u64::MAX),
        0u64..0x4000_0000
    ];
    let length = prop_oneof![0u64..9, Just(0x1000u64), Just(u64::MAX)];
    let kinds = [
        "m",
        "Z0",
        "Z1",
        "Z2",
        "Z4",
        "z0",
        "z1",
        "T",
        "Hg",
        "Hc",
        "vCont;t:",
        "qXfer:features:read::",
    ];
    let packet = (prop::sample::select(kinds.to_vec()), address, length);
    let packets = prop::collection::vec((packet, prop::bool::weighted(0.1)), 1..30);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(12));
    let ran = runner.run(&packets, |packets| {
        let mut gdb = vm.attach();
        for ((kind, address, length), garbles) in packets {
            let comma = if kind.starts_with(['Z', 'z']) { "," } else { "" };
            if garbles {
                let _ = gdb.0.write_all(&[b'$', b'#', 0xff, address as u8]);
            }
            // The replies are not read.
            gdb.send(&format!("{kind}{comma}{address:x},{length:x}"));
        }
        drop(gdb);
        vm.assert_running();
        prop_assert_eq!(vm.code(), COUNTS);
        Ok(())
    });
    ran.unwrap();
    assert_eq!(vm.attach().request(&format!("m{CODE:x},2")), "ff05");
}
