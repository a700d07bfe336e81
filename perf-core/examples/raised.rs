//! Demonstrates software events that a VMM raises. The example counts and samples exits of vCPUs,
//! raises an event in a signal handler during the handling of another event, supplies names and
//! mappings for readers, and changes settings at run time. It runs on any host.
//!
//! `cargo run -p perf-core --example raised`

use perf_core::record::{DecodedRecord, RecordFormat};
use perf_core::ring::RingReader;
use perf_core::*;

/// The registers of a vCPU at a VM exit, for samples.
struct Exit {
    ip: u64,
    /// Exit reason, which samples contain as raw data.
    reason: [u8; 8],
}

impl SampleRegs for Exit {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestKernel
    }
    fn ip(&mut self) -> u64 {
        self.ip
    }
    fn raw(&mut self) -> &[u8] {
        &self.reason
    }
}

/// A VM exit whose handling is interrupted by a signal handler that raises another event.
struct InterruptedExit<'a> {
    exit: Exit,
    vcpu: &'a VcpuEventContext,
}

impl SampleRegs for InterruptedExit<'_> {
    fn mode(&mut self) -> CpuMode {
        self.exit.mode()
    }
    fn ip(&mut self) -> u64 {
        let vcpu = self.vcpu;
        let inside = |level, id| vcpu.software_event_at(level, id, 1, None, &mut |_| {});
        // An event that is raised at another level is counted.
        assert!(inside(RecursionContext::Signal, SoftwareEventId::Pmis));
        // An event that is raised at the level being handled is dropped, because it would recurse.
        assert!(!inside(RecursionContext::Thread, SoftwareEventId::Exits));
        self.exit.ip()
    }
}

/// Runs the example.
///
/// # Errors
/// Returns the error of any event, ring or setting.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let core = PerfCore::builder().build()?;
    let session = core.session(0, SessionRole::Admin);
    let open = |attr, target, cookie| {
        let flags = OpenFlags {
            cookie,
            ..OpenFlags::default()
        };
        core.open(&session, attr, target, None, flags)
    };
    let wide = Attr::counting(EventType::VMM, SoftwareEventId::Exits as u64).with_inherit();
    let all = open(wide, EventOpenTarget::Vm, None)?;
    let vcpus = [core.add_vcpu(VcpuId(0), 1001)?, core.add_vcpu(VcpuId(1), 1002)?];
    vcpus.iter().for_each(|vcpu| vcpu.sched_in());

    // Every tenth exit of vCPU 0 is sampled and reported to the VMM with a cookie.
    let attr = Attr {
        sample_type: SampleType::IP | SampleType::RAW | SampleType::PERIOD,
        comm: true,
        mmap: true,
        ..Attr::sampling(EventType::VMM, SoftwareEventId::Exits as u64, 10)
    };
    let format = RecordFormat::from(&attr);
    let sampled = open(attr, EventOpenTarget::Vcpu(VcpuId(0)), Some(42))?;
    let mut ring = RingReader::of(sampled.map(4, true)?);
    let pmis = Attr::counting(EventType::VMM, SoftwareEventId::Pmis as u64);
    let pmis = open(pmis, EventOpenTarget::Vcpu(VcpuId(0)), None)?;

    assert!(core.name_vcpu(VcpuId(0), "boot-cpu"));
    core.mmap_record(&GuestMmapEvent {
        start: 0xffff_ffff_8100_0000,
        len: 0x1_0000,
        pgoff: 0,
        name: b"[guest.kernel.kallsyms]",
        kernel: true,
    });
    let mut told = 0;
    for n in 0..95u64 {
        let mut exit = Exit {
            ip: 0xffff_ffff_8100_0000 + n,
            reason: n.to_ne_bytes(),
        };
        let mut sink = |overflow: OverflowReport| {
            assert_eq!(overflow.cookie, 42);
            told += overflow.times;
        };
        vcpus[0].software_event(SoftwareEventId::Exits, 1, Some(&mut exit), &mut sink);
        vcpus[1].software_event(SoftwareEventId::Exits, 2, Some(&mut exit), &mut sink);
    }
    let exit = Exit {
        ip: 0xffff_ffff_8100_1000,
        reason: [0; 8],
    };
    let mut interrupted = InterruptedExit {
        exit,
        vcpu: &vcpus[0],
    };
    vcpus[0].software_event(SoftwareEventId::Exits, 5, Some(&mut interrupted), &mut |o| {
        told += o.times
    });
    println!(
        "{} exits, {} of them of vCPU 0; {told} overflows told; {} PMI in the middle of an exit",
        all.read()?.value,
        sampled.read()?.value,
        pmis.read()?.value
    );
    assert_eq!((all.read()?.value, sampled.read()?.value), (95 * 3 + 5, 100));
    assert_eq!((told, pmis.read()?.value), (10, 1));

    let mut samples = 0;
    while let Some(raw) = ring.next_record()? {
        match DecodedRecord::decode(raw, format)? {
            DecodedRecord::Comm(comm) => {
                println!("thread {} is {}", comm.tid, String::from_utf8_lossy(comm.name))
            }
            DecodedRecord::Mmap(map) => println!("{:#x}: {}", map.start, String::from_utf8_lossy(map.name)),
            DecodedRecord::Sample(sample) => {
                samples += 1;
                assert_eq!(sample.period, 10);
                println!("at {:#x}, exit data {:?}", sample.ip, sample.raw);
            }
            other => println!("{other:?}"),
        }
    }
    assert_eq!(samples, 10);

    // Changes limits as text, as an operator would. Requests above a limit are then rejected.
    core.set_knob(PerfCoreSetting::SampleRateHz, "1000")?;
    print!("samples a second: {}", core.knob(PerfCoreSetting::SampleRateHz));
    let fast = Attr::sampling(EventType::VMM, SoftwareEventId::Exits as u64, 2_000).with_freq();
    let error = open(fast, EventOpenTarget::Vm, None).expect_err("too fast");
    println!("{error} (errno {})", error.errno());
    core.set_knob(PerfCoreSetting::Paranoid, "1")?;
    let stranger = core.session(1234, SessionRole::Operator);
    let halts = Attr::counting(EventType::VMM, SoftwareEventId::Halts as u64);
    let error = core.open(&stranger, halts, EventOpenTarget::Vm, None, OpenFlags::default());
    println!("{}", error.expect_err("not theirs"));
    Ok(())
}
