//! Tests that the reader process receives the actual contents of guest memory, and that a
//! compromised reader process cannot harm the requester with its messages.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::reader::{MAX_ENTRIES, MAX_SYMBOL_BYTES, RemoteMemory};
use super::wire::{self, MemoryRequest, PIECE};
use super::*;
use crate::locate::KernelAnchorRegisters;
use crate::{GuestPhys, GuestRegs, MappedGuestPage};

/// Time until the search times out in tests in which it must not.
const LATER: Duration = Duration::from_secs(3600);

/// Behavior of the reader process in a test.
type Reader = fn(&mut UnixStream);

/// Returns the contents of a test guest's RAM (two blocks and one page), in which adjacent bytes
/// differ.
fn ram() -> Vec<u8> {
    (0..(128 << 10) + 4096u32).map(|n| (n ^ n >> 8) as u8).collect()
}

/// Returns the result of a kernel search in `ram`. `reader` replaces the reader process.
fn asked(
    ram: &[u8],
    reader: impl FnOnce(&mut UnixStream) + Send,
) -> Result<FoundKernel, KernelSearchRequestError> {
    asked_until(ram, Instant::now() + LATER, reader)
}

fn asked_until(
    ram: &[u8],
    until: Instant,
    reader: impl FnOnce(&mut UnixStream) + Send,
) -> Result<FoundKernel, KernelSearchRequestError> {
    let (mut ours, mut its) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (letter, length) = wire::head(&mut its).unwrap();
            its.read_exact(&mut vec![0; length]).unwrap();
            assert_eq!(letter, wire::ASK);
            reader(&mut its);
        });
        let found = search_kernel(
            &mut ours,
            ram,
            &GuestRegs::default(),
            &KernelAnchorRegisters::default(),
            until,
        );
        drop(ours);
        found
    })
}

/// Any read of the memory that the reader has requested returns the same data as the guest memory
/// itself, including holes.
#[test]
fn remote_memory_equals_guest_memory() {
    let ram = ram();
    let whole = &ram[..];
    let found = asked(whole, |its| {
        let lent = RemoteMemory::new(&*its);
        for (gpa, length) in [
            (0, 1),
            (4090, 20),
            (65_530, 12),
            (1, 66_000),
            (0, ram.len()),
            (ram.len() as u64 - 5, 5),
            (ram.len() as u64 - 5, 6),
            (131_072, 4096),
            (1 << 40, 8),
            (u64::MAX - 3, 4),
            (u64::MAX - 3, 5),
        ] {
            let (mut a, mut b) = (vec![0; length], vec![0; length]);
            let there = whole.read(gpa, &mut a);
            assert_eq!(lent.read(gpa, &mut b), there, "{gpa:#x} {length}");
            assert!(!there || a == b, "{gpa:#x} {length}");
        }
        let page = lent.page(5000).unwrap();
        assert_eq!(page.read_u64(8), whole.read_u64(4104));
        assert!(!page.read(4095, &mut [0; 2]) && !page.read(usize::MAX, &mut [0; 2]));
        assert!(lent.page(ram.len() as u64).is_none());
    });
    assert!(
        matches!(found, Err(KernelSearchRequestError::Lost(_))),
        "{found:?}"
    );
}

/// If the guest has no kernel, the reader reports this.
#[test]
fn reader_reports_missing_kernel() {
    let ram = ram();
    let (mut ours, its) = UnixStream::pair().unwrap();
    let reader = std::thread::spawn(move || serve(its).unwrap());
    let (regs, anchors) = (GuestRegs::default(), KernelAnchorRegisters::default());
    let found = search_kernel(&mut ours, &ram[..], &regs, &anchors, Instant::now() + LATER);
    let why = found.unwrap_err().to_string();
    assert_eq!(why, "cannot read the guest's page tables");
    reader.join().unwrap();
}

fn wanted(gpa: u64, bytes: u32) -> [u8; 12] {
    MemoryRequest { gpa, bytes }.to_bytes()
}

/// Returns a `KernelSummary` message in which the text `word` is replaced with `instead`.
fn summary(word: &str, instead: &str) -> Vec<u8> {
    let good = r#"{"orc_base":16,"entry_text":[1,2],"tasks":{"Err":"none"},"tables":null,"symbols":1,"release":"6.1","build_id":"0102"}"#;
    assert!(good.contains(word), "{word}");
    good.replace(word, instead).into_bytes()
}

fn orc(its: &mut UnixStream, offsets: &[u32], entries: usize) {
    let bytes: Vec<u8> = offsets.iter().flat_map(|offset| offset.to_le_bytes()).collect();
    wire::send(its, wire::OFFSETS, &bytes).unwrap();
    wire::send(its, wire::ENTRIES, &vec![0; 6 * entries]).unwrap();
}

#[test]
fn valid_search_result_is_accepted() {
    let ram = ram();
    let found = asked(&ram, |its| {
        wire::send(its, wire::SYMBOLS, b"ffffffff81000000 T a\n").unwrap();
        wire::send(its, wire::SYMBOLS, b"ffffffff81000010 T b\n").unwrap();
        orc(its, &[0, 8, 8], 3);
        wire::send(its, wire::FOUND, &summary("6.1", "6.1\\u001b[2J\u{e9}")).unwrap();
    })
    .unwrap();
    assert_eq!(
        found.symbols.unpack(),
        b"ffffffff81000000 T a\nffffffff81000010 T b\n"
    );
    assert_eq!(found.orc.as_ref().unwrap().len(), 3);
    // Control characters in texts of the reader are replaced.
    assert_eq!(found.release.as_deref(), Some("6.1?[2J??"));
    assert_eq!(found.build_id.unwrap().to_string(), "0102");
    let line = "Linux 6.1?[2J??, 1 symbols, kernel stacks by ORC, tasks not named";
    assert_eq!(found.describe(), line);
}

#[test]
fn invalid_search_result_is_rejected() {
    let ram = ram();
    let says = |reader: Reader| {
        let found = asked(&ram, reader);
        found.err().map(|e| e.to_string()).unwrap_or_default()
    };
    let cases: [(&str, Reader); 11] = [
        ("does not respond", |_| ()),
        ("no message", |its| wire::send(its, b'?', b"").unwrap()),
        ("no message", |its| {
            its.write_all(&[wire::FOUND, 0, 0, 0x80, 0]).unwrap();
        }),
        ("no range", |its| wire::send(its, wire::READ, &[0; 11]).unwrap()),
        ("no summary", |its| wire::send(its, wire::FOUND, b"{}").unwrap()),
        ("invalid unwind tables", |its| {
            wire::send(its, wire::FOUND, &summary("16", "16")).unwrap();
        }),
        ("invalid unwind tables", |its| {
            orc(its, &[0, 9, 8], 3);
            wire::send(its, wire::FOUND, &summary("16", "16")).unwrap();
        }),
        ("invalid unwind tables", |its| {
            orc(its, &[0, 8], 3);
            wire::send(its, wire::FOUND, &summary("16", "16")).unwrap();
        }),
        ("no unwind tables", |its| {
            wire::send(its, wire::OFFSETS, &[0; 7]).unwrap()
        }),
        ("too many bytes of memory at once", |its| {
            wire::send(its, wire::READ, &wanted(0, PIECE as u32 + 1)).unwrap();
        }),
        // The reader's message is shown, but its length is limited.
        ("a?b", |its| {
            let why = [&b"a\nb"[..], &[b'x'; 5000]].concat();
            wire::send(its, wire::FAILED, &why).unwrap();
        }),
    ];
    for (why, reader) in cases {
        let said = says(reader);
        assert!(said.contains(why) && said.len() < 500, "{why}: {said}");
    }
}

/// The requester uses a bounded amount of memory, whatever messages the reader sends.
#[test]
fn reader_exceeding_limits_is_rejected() {
    let ram = ram();
    let endless = |letter: u8, bytes: usize| {
        let found = asked(
            &ram,
            |its| while wire::send(its, letter, &vec![0; bytes]).is_ok() {},
        );
        found.unwrap_err().to_string()
    };
    assert!(endless(wire::SYMBOLS, PIECE).ends_with("too many symbols"));
    assert!(endless(wire::OFFSETS, PIECE).ends_with("too many unwind tables"));
    assert!(endless(wire::ENTRIES, PIECE / 6 * 6).ends_with("too many unwind tables"));
    const { assert!(MAX_SYMBOL_BYTES <= 64 << 20 && MAX_ENTRIES * 10 <= 64 << 20) };
    let found = asked(&ram, |its| {
        // The reply contains no data if only a few bytes of the requested memory exist.
        while wire::send(its, wire::READ, &wanted(1 << 40, PIECE as u32)).is_ok() && wire::head(its).is_ok() {
        }
    });
    assert!(
        found
            .unwrap_err()
            .to_string()
            .ends_with("too many bytes of memory")
    );
    let found = asked_until(&ram, Instant::now(), |its| {
        let _ = wire::send(its, wire::READ, &wanted(0, 1));
    });
    assert!(matches!(found, Err(KernelSearchRequestError::Slow)), "{found:?}");
}

/// Implausible offsets of structure members sent by the reader process are rejected. Offsets are
/// later added without overflow checks.
#[test]
fn implausible_member_offsets_are_rejected() {
    let layout = |pivot: u64, page: u64| {
        format!(
            r#"{{"Ok":{{"current":18446744073709551615,"comm":1,"pid":1,"tgid":1,"mm":1,"list":null,"maps":{{
            "areas":{{"Maple":{{"root":1,"range_pivot":{pivot},"range_slot":1,"arange_pivot":1,"arange_slot":1}}}},
            "vm_start":1,"vm_end":1,"vm_pgoff":1,"vm_flags":1,"vm_file":1,"vdso":null,"files":null,"cache":{{
            "mapping":1,"root":1,"node_shift":1,"node_slots":{pivot},"index":1,"page_struct_bytes":{page},"vmemmap_base":null}}}}}}}}"#
        )
    };
    let ram = ram();
    let taken = |tasks: &str| {
        let found = asked(&ram, |its| {
            orc(its, &[0], 1);
            let bytes = summary(r#"{"Err":"none"}"#, tasks);
            wire::send(its, wire::FOUND, &bytes).unwrap();
        });
        found.map(|found| found.tasks.unwrap().has_maps())
    };
    assert!(taken(&layout(8, 64)).unwrap());
    for (pivot, page) in [(1 << 33, 64), (u64::MAX, 64), (8, 0)] {
        let refused = taken(&layout(pivot, page)).unwrap_err();
        assert!(
            matches!(refused, KernelSearchRequestError::Nonsense("summary")),
            "{refused}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The requester does not panic on messages of random types with random contents in random
    /// order.
    #[test]
    fn arbitrary_reader_messages_never_panic(
        messages in prop::collection::vec((prop::sample::select(&b"RSOEFX?"[..]), prop::collection::vec(any::<u8>(), 0..40)), 0..12),
        tail in prop::collection::vec(any::<u8>(), 0..8),
    ) {
        let ram = ram();
        let _ = asked(&ram, |its| {
            for (letter, bytes) in &messages {
                if wire::send(its, *letter, bytes).is_err() {
                    return;
                }
            }
            let _ = its.write_all(&tail);
        });
    }
}
