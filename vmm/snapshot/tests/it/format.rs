//! Tests of the state file: round trips, damage, unknown fields, and files of released versions.

use proptest::prelude::*;
use snapshot::format::{MAX_STATE_BYTES, frame, optional_field, with_optional_field};
use snapshot::state::{
    SavedDevice, SavedDiffBase, SavedInServicePmi, SavedMachine, SavedQueue, SavedRdpmc, SavedVcpu,
};
use snapshot::{Base64Bytes, SnapshotFormatError, decode, encode};

/// State file of format version 1, written by the version of Perfvisor that introduced this format.
const VERSION_1: &[u8] = include_bytes!("../golden/version-1.state");

const VERSION_1_DIFF: &[u8] = include_bytes!("../golden/version-1-diff.state");

/// Returns a machine in which every part has a distinct value.
fn machine() -> SavedMachine {
    let mut machine = SavedMachine {
        saved_by: "0.2.0".to_owned(),
        ..SavedMachine::default()
    };
    let options = [("cpus", "1"), ("memory", "32M"), ("pmu", "intel")];
    machine.options = options.map(|(k, v)| (k.to_owned(), v.to_owned())).into();
    machine.shape.pmu = "intel-v2 with 4+3 counters of 48 bits".to_owned();
    machine.shape.tsc_khz = 2_500_000;
    (machine.shape.vcpus_at_start, machine.shape.max_vcpus) = (1, 1);
    machine.filter.events = vec![(0x3C, 0xFF, 0, false)];
    machine.kernel.format = "linux".to_owned();
    machine.vm.clock_ns = 1 << 60;
    machine.vm.irqchips = vec![
        Base64Bytes(vec![1, 2, 3]),
        Base64Bytes(vec![]),
        Base64Bytes(vec![0xFF; 520]),
    ];
    let mut vcpu = SavedVcpu {
        cpuid: vec![[0, 0, 0, 13, 1, 2, u32::MAX]],
        regs: Base64Bytes((0..144).collect()),
        msrs: vec![(0x10, u64::MAX), (0xC000_0080, 0x501)],
        ..SavedVcpu::default()
    };
    vcpu.pmu.handled_pmi = SavedInServicePmi::Vector(0x45);
    vcpu.pmu.last_rdpmc = Some(SavedRdpmc {
        at: 0xffff_ffff_8100_0000,
        behind: 0xffff_ffff_8100_0002,
        repetitions: 1,
    });
    machine.vcpus = vec![vcpu];
    machine.board.serial.registers = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    machine.devices = vec![SavedDevice {
        id: 2,
        name: "disk0".to_owned(),
        queues: vec![SavedQueue {
            size: 256,
            vector: 1,
            enabled: true,
            descriptors: 0x1000,
            avail: 0x2000,
            used: 0x3000,
        }],
        ..SavedDevice::default()
    }];
    machine.memory.bytes = 32 << 20;
    machine.memory.crcs = vec![1, 2, 3, u32::MAX];
    machine
}

#[test]
fn state_round_trips() {
    let machine = machine();
    assert_eq!(decode(&encode(&machine).unwrap()).unwrap(), machine);
}

/// Files of released versions remain readable. `UPDATE_GOLDEN=1` writes the file of a new version.
/// Files of released versions never change.
#[test]
fn golden_file_of_version_1_is_read() {
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/version-1.state");
        std::fs::write(path, encode(&machine()).unwrap()).unwrap();
    }
    assert_eq!(decode(VERSION_1).unwrap(), machine());
}

/// A diff of format version 1 remains readable.
#[test]
fn golden_diff_of_version_1_is_read() {
    let mut machine = machine();
    machine.memory.base = Some(SavedDiffBase {
        state_crc: 0xDEAD_BEEF,
        runs: vec![(0, 4096), (1 << 20, 8192)],
    });
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/version-1-diff.state");
        std::fs::write(path, encode(&machine).unwrap()).unwrap();
    }
    assert_eq!(decode(VERSION_1_DIFF).unwrap(), machine);
}

#[test]
fn every_damaged_byte_and_every_cut_is_found() {
    let bytes = encode(&machine()).unwrap();
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        assert!(decode(&damaged).is_err(), "byte {at}");
        assert!(decode(&bytes[..at]).is_err(), "cut at {at}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(matches!(decode(&longer), Err(SnapshotFormatError::Length { .. })));
}

/// Returns the body of a state as JSON.
fn body(machine: &SavedMachine) -> serde_json::Value {
    serde_json::to_value(machine).unwrap()
}

fn decoded(body: &serde_json::Value) -> Result<SavedMachine, String> {
    let text = serde_json::to_vec(body).unwrap();
    decode(&frame(&text)).map_err(|e| match e {
        SnapshotFormatError::Body(e) => e.to_string(),
        other => other.to_string(),
    })
}

/// A state with an unknown mandatory field is rejected, because an older version cannot know
/// whether it may ignore the field.
#[test]
fn unknown_mandatory_field_is_refused_by_name() {
    for path in [
        "",
        "/shape",
        "/vcpus/0",
        "/vcpus/0/pmu",
        "/board/serial",
        "/devices/0/queues/0",
    ] {
        let mut body = body(&machine());
        let object = body.pointer_mut(path).unwrap().as_object_mut().unwrap();
        object.insert("shadow_stack".to_owned(), 1.into());
        let error = decoded(&body).unwrap_err();
        assert!(error.contains("unknown field `shadow_stack`"), "{path}: {error}");
        let object = body.pointer_mut(path).unwrap().as_object_mut().unwrap();
        let value = object.remove("shadow_stack").unwrap();
        object.insert("_shadow_stack".to_owned(), value);
        assert_eq!(decoded(&body), Ok(machine()), "{path}: an optional field");
    }
}

#[test]
fn missing_field_is_refused_by_name() {
    let mut body = body(&machine());
    body["vcpus"][0].as_object_mut().unwrap().remove("lapic");
    let error = decoded(&body).unwrap_err();
    assert!(error.contains("missing field `lapic`"), "{error}");
}

#[test]
fn other_versions_and_sizes_are_refused() {
    let mut bytes = encode(&machine()).unwrap();
    bytes[4] = 9;
    assert!(matches!(decode(&bytes), Err(SnapshotFormatError::Version(9))));
    assert!(matches!(decode(b""), Err(SnapshotFormatError::Magic)));
    assert!(matches!(decode(b"PVSS"), Err(SnapshotFormatError::Length { .. })));
    let mut large = machine();
    large.board.cmos = Base64Bytes(vec![0; MAX_STATE_BYTES]);
    assert!(matches!(encode(&large), Err(SnapshotFormatError::TooLarge)));
    let huge = vec![b' '; MAX_STATE_BYTES];
    assert!(matches!(
        decode(&frame(&huge)),
        Err(SnapshotFormatError::TooLarge)
    ));
    let deep = [&b"["[..]; 10_000].concat();
    assert!(matches!(decode(&frame(&deep)), Err(SnapshotFormatError::Body(_))));
}

proptest! {
    #[test]
    fn any_values_round_trip(
        regs in prop::collection::vec(any::<u8>(), 0..600),
        msrs in prop::collection::vec(any::<(u32, u64)>(), 0..40),
        cpuid in prop::collection::vec(any::<[u32; 7]>(), 0..10),
        name in ".{0,40}",
        crcs in prop::collection::vec(any::<u32>(), 0..20),
        clock_ns: u64,
        registers: [u8; 9],
        pending: Option<u8>,
    ) {
        let mut machine = machine();
        machine.vcpus[0].regs = Base64Bytes(regs);
        machine.vcpus[0].msrs = msrs;
        machine.vcpus[0].cpuid = cpuid;
        machine.devices[0].name = name;
        machine.memory.crcs = crcs;
        machine.vm.clock_ns = clock_ns;
        machine.board.serial.registers = registers;
        machine.board.i8042_pending = pending;
        let decoded = decode(&encode(&machine).unwrap()).unwrap();
        prop_assert_eq!(decoded, machine);
    }

    #[test]
    fn any_bytes_are_safe(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = decode(&bytes);
        let _ = decode(&frame(&bytes));
    }
}

/// A program that knows an optional field of a state file can read it. For all other programs, the
/// field does not change the machine.
#[test]
fn optional_field_is_added_and_read() {
    let machine = machine();
    let plain = encode(&machine).unwrap();
    let value = serde_json::json!({"drives": ["a", {"_b": 1}]});
    let with = with_optional_field(&plain, "_devices", value.clone()).unwrap();
    assert_eq!(optional_field(&with, "_devices").unwrap(), Some(value));
    assert_eq!(optional_field(&plain, "_devices").unwrap(), None);
    assert_eq!(decode(&with).unwrap(), machine);
    let damaged = &with[..with.len() - 1];
    assert!(matches!(
        optional_field(damaged, "_devices"),
        Err(SnapshotFormatError::Length { .. })
    ));
}
