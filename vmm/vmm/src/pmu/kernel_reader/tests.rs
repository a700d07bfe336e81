//! Tests of failing worker processes: each failure is reported, and the next search succeeds. The
//! worker process is this test program, started to run a single test.

use std::process::Command;

use super::*;
use sandbox::SeccompMode;
use test_support::kernels::kallsyms;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Environment variable that lists the failures to inject into successive workers; read by
/// `sandbox::worker_fault`.
const WORKERS: &str = "PERFVISOR_TEST_WORKERS";
const START: u64 = 0xffff_ffff_8100_0000;
const LSTAR: u64 = START + 0x40;

/// Returns guest memory with a small kernel at 4 MiB that is mapped at [`START`], and the registers
/// of a vCPU that executes the kernel.
fn guest() -> (GuestMemoryMmap, GuestRegs, KernelAnchorRegisters) {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap();
    let entries = [
        (0x1000 + 8 * 511, 0x2003u64),
        (0x2000 + 8 * 510, 0x3003),
        (0x3000 + 8 * 8, (4 << 20) | 0x83),
    ];
    for (at, entry) in entries {
        memory.write_obj(entry, GuestAddress(at)).unwrap();
    }
    let fill: Vec<String> = (0..300).map(|n| format!("function_{n}")).collect();
    let mut symbols = vec![(START, "_stext"), (LSTAR, "entry_SYSCALL_64")];
    symbols.extend(
        (1u64..)
            .map(|n| START + 0x1000 * n)
            .zip(fill.iter().map(String::as_str)),
    );
    memory
        .write_slice(&kallsyms(&symbols), GuestAddress((4 << 20) + 0x4000))
        .unwrap();
    let regs = GuestRegs {
        cr0: 1 << 31 | 1,
        cr3: 0x1000,
        cr4: 1 << 5,
        efer: 1 << 10 | 1 << 8,
        ..GuestRegs::default()
    };
    let anchors = KernelAnchorRegisters {
        lstar: LSTAR,
        idt_base: 0,
    };
    (memory, regs, anchors)
}

#[test]
#[ignore = "a child of the test below"]
fn as_a_child() {
    let confinement = ProcessConfinement {
        seccomp: SeccompMode::On,
        landlock: sandbox::has_landlock(),
    };
    let limits = WorkerLimits {
        memory_bytes: 320 << 20,
        cpu_seconds: 1,
    };
    let reader = KernelReader::within(confinement, limits).unwrap();
    let (memory, regs, anchors) = guest();
    let finds = || {
        let found = reader.read(&memory, &regs, &anchors).unwrap();
        assert_eq!(found.symbol_count, 302);
        let text = String::from_utf8(found.symbols.unpack()).unwrap();
        assert!(
            text.starts_with("ffffffff81000000 T _stext\nffffffff81000040 T entry_SYSCALL_64\n"),
            "{text}"
        );
    };
    finds();
    for why in [
        "the reader process failed: it panicked at ",
        "it wanted more memory than it may have",
        "it took more time of a processor than it may have",
        "it asked the host's kernel for what its seccomp filter forbids",
    ] {
        let failed = reader.read(&memory, &regs, &anchors).unwrap_err();
        assert!(matches!(failed, GuestKernelReadError::WorkerExit(_)), "{failed}");
        let line = failed.to_string();
        assert!(
            line.starts_with("cannot read the guest's kernel: ") && line.contains(why),
            "{line}"
        );
        finds();
    }
    // Memory without a kernel is not a failure of the worker.
    let none = KernelAnchorRegisters::default();
    let failed = reader.read(&memory, &regs, &none).unwrap_err();
    assert!(
        matches!(
            failed,
            GuestKernelReadError::Ask(KernelSearchRequestError::NotFound(_))
        ),
        "{failed}"
    );
    finds();
}

#[test]
fn reader_failure_is_reported_and_next_search_succeeds() {
    let out = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "pmu::kernel_reader::tests::as_a_child",
            "--ignored",
            "--test-threads",
            "1",
        ])
        .env(WORKERS, "none,panic,none,memory,none,time,none,call,none")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success() && said.contains("1 passed"), "{said}");
}
