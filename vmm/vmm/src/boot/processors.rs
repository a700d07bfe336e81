//! Builds the ACPI processor devices for CPU hot-plug.
//!
//! The event device ([`super::events`]) calls SCAN when the guest receives the hot-plug interrupt.
//! SCAN examines all processors and notifies the devices of those that have changed.
//! [`crate::devices::cpu_plug`] describes the registers.
//!
//! ```text
//! Scope (\_SB)
//!   Device (CPUS)                      ACPI0010, the processors' container
//!     CSEL, CPEN, CINS, CRMV, CEJT, COEV, COST    the registers
//!     STAT (n)                         _STA of processor n
//!     EJCT (n)                         its _EJ0
//!     OSTR (n, event, status)          its _OST
//!     SCAN ()                          notifies inserted processors and pending ejections
//!     Device (Cxx)                     ACPI0007, a processor: _UID, _STA, _MAT, _OST; _EJ0 but for the first
//! ```

use acpi_tables::Aml;
use acpi_tables::aml::{
    Acquire, Add, Arg, BufferData, Device, EISAName, Equal, Field, FieldAccessType, FieldEntry,
    FieldLockRule, FieldUpdateRule, If, LessThan, Local, Method, MethodCall, Mutex, Name, Notify, ONE,
    OpRegion, OpRegionSpace, Path, Release, Return, Scope, Store, While, ZERO,
};
use acpi_tables::madt::{EnabledStatus, ProcessorLocalApic};

use super::aml::bytes_of;
use crate::devices::ports;
use crate::numbers::VcpuCountRange;

/// Value of _STA for a processor that is present, enabled, shown and working (6.3.7).
const STA_PRESENT: u8 = 0xF;
/// Notify value (5.6.6): device check.
const DEVICE_CHECK: u8 = 1;
/// Notify value (5.6.6): ejection request.
const EJECT_REQUEST: u8 = 3;
/// Timeout argument of Acquire that means "wait indefinitely" (19.6.2).
const FOREVER: u16 = 0xFFFF;

/// Returns the ACPI name of a processor device, `C000` to `C03F`: the letter C and the processor
/// number in hexadecimal.
fn device_name(vcpu: u8) -> String {
    format!("C{vcpu:03X}")
}

/// Returns the AML of the container of all processor devices, for the root scope.
pub(super) fn devices(cpus: VcpuCountRange) -> Vec<u8> {
    let mut container = registers();
    container.extend(methods(cpus));
    for vcpu in 0..cpus.max() {
        container.extend(processor(vcpu));
    }
    let container = EncodedAml(container);
    let cpus = Device::new("CPUS".into(), vec![&container]);
    bytes_of(&Scope::new("_SB_".into(), vec![&cpus]))
}

/// AML bytes that are already encoded, for use inside another AML object.
struct EncodedAml(Vec<u8>);

impl Aml for EncodedAml {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

fn all(parts: &[&dyn Aml]) -> Vec<u8> {
    parts.iter().flat_map(|part| bytes_of(*part)).collect()
}

fn registers() -> Vec<u8> {
    let field = |access, fields| {
        // A write to one bit of the control register writes zeros to the others, which have no
        // effect.
        Field::new(
            "CREG".into(),
            access,
            FieldLockRule::NoLock,
            FieldUpdateRule::WriteAsZeroes,
            fields,
        )
    };
    all(&[
        &Name::new("_HID".into(), &"ACPI0010"),
        &Name::new("_CID".into(), &EISAName::new("PNP0A05")),
        &Mutex::new("CLCK".into(), 0),
        &OpRegion::new(
            "CREG".into(),
            OpRegionSpace::SystemIO,
            &ports::CPU_PLUG,
            &ports::CPU_PLUG_LEN,
        ),
        &field(
            FieldAccessType::Byte,
            vec![
                FieldEntry::Named(*b"CSEL", 8),
                FieldEntry::Named(*b"CPEN", 1),
                FieldEntry::Named(*b"CINS", 1),
                FieldEntry::Named(*b"CRMV", 1),
                FieldEntry::Named(*b"CEJT", 1),
            ],
        ),
        &field(
            FieldAccessType::DWord,
            vec![
                FieldEntry::Reserved(32),
                FieldEntry::Named(*b"COEV", 32),
                FieldEntry::Named(*b"COST", 32),
            ],
        ),
    ])
}

fn methods(cpus: VcpuCountRange) -> Vec<u8> {
    let path = |name: &str| Path::new(name);
    let acquire = Acquire::new("CLCK".into(), FOREVER);
    let release = Release::new("CLCK".into());
    let (csel, cpen, cins, crmv) = (path("CSEL"), path("CPEN"), path("CINS"), path("CRMV"));
    let select = Store::new(&csel, &Arg(0));

    let absent = Store::new(&Local(0), &ZERO);
    let present = Store::new(&Local(0), &STA_PRESENT);
    let is_present = Equal::new(&cpen, &ONE);
    let if_present = If::new(&is_present, vec![&present]);
    let answer = Return::new(&Local(0));
    let stat = Method::new(
        "STAT".into(),
        1,
        true,
        vec![&acquire, &select, &absent, &if_present, &release, &answer],
    );

    let cejt = path("CEJT");
    let eject = Store::new(&cejt, &ONE);
    let ejct = Method::new("EJCT".into(), 1, true, vec![&acquire, &select, &eject, &release]);

    let (coev, cost) = (path("COEV"), path("COST"));
    let (event, status) = (Store::new(&coev, &Arg(1)), Store::new(&cost, &Arg(2)));
    let ostr = Method::new(
        "OSTR".into(),
        3,
        true,
        vec![&acquire, &select, &event, &status, &release],
    );

    // The method compares the number with that of each processor, because AML cannot compute a
    // device name.
    let mut tell = Vec::new();
    for vcpu in 0..cpus.max() {
        let device = path(&device_name(vcpu));
        let notify = Notify::new(&device, &Arg(1));
        let is_it = Equal::new(&Arg(0), &vcpu);
        tell.extend(bytes_of(&If::new(&is_it, vec![&notify])));
    }
    let tell = EncodedAml(tell);
    let tell = Method::new("TELL".into(), 2, true, vec![&tell]);

    let begin = Store::new(&Local(0), &ZERO);
    let select = Store::new(&csel, &Local(0));
    let come = Equal::new(&cins, &ONE);
    let tell_come = MethodCall::new("TELL".into(), vec![&Local(0), &DEVICE_CHECK]);
    let noted_come = Store::new(&cins, &ONE);
    let if_come = If::new(&come, vec![&tell_come, &noted_come]);
    let called = Equal::new(&crmv, &ONE);
    let tell_called = MethodCall::new("TELL".into(), vec![&Local(0), &EJECT_REQUEST]);
    let noted_called = Store::new(&crmv, &ONE);
    let if_called = If::new(&called, vec![&tell_called, &noted_called]);
    let next = Add::new(&Local(0), &Local(0), &ONE);
    let max = cpus.max();
    let more = LessThan::new(&Local(0), &max);
    let each = While::new(&more, vec![&select, &if_come, &if_called, &next]);
    let scan = Method::new("SCAN".into(), 0, true, vec![&acquire, &begin, &each, &release]);

    all(&[&stat, &ejct, &ostr, &tell, &scan])
}

fn processor(vcpu: u8) -> Vec<u8> {
    let hid = Name::new("_HID".into(), &"ACPI0007");
    let uid = Name::new("_UID".into(), &vcpu);
    let stat = MethodCall::new("STAT".into(), vec![&vcpu]);
    let answer = Return::new(&stat);
    let sta = Method::new("_STA".into(), 0, true, vec![&answer]);
    // MADT entry that _MAT returns for a present processor.
    let entry = BufferData::new(bytes_of(&ProcessorLocalApic::new(
        vcpu,
        vcpu,
        EnabledStatus::Enabled,
    )));
    let mat = Name::new("_MAT".into(), &entry);
    let report = MethodCall::new("OSTR".into(), vec![&vcpu, &Arg(0), &Arg(1)]);
    let ost = Method::new("_OST".into(), 3, true, vec![&report]);
    let eject = MethodCall::new("EJCT".into(), vec![&vcpu]);
    let ej0 = Method::new("_EJ0".into(), 1, true, vec![&eject]);
    let mut parts: Vec<&dyn Aml> = vec![&hid, &uid, &sta, &mat, &ost];
    // The boot processor cannot be ejected.
    if vcpu > 0 {
        parts.push(&ej0);
    }
    let name = device_name(vcpu);
    bytes_of(&Device::new(name.as_str().into(), parts))
}
