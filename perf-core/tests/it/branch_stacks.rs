//! Tests of samples with a branch stack. The core writes such a sample only when the VMM knows the
//! branches.

use std::sync::Arc;

use perf_core::branch::{BranchEntry, BranchFilter, BranchKind, BranchStackConfig};
use perf_core::ring::Ring;
use perf_core::*;

use crate::common::test_core::*;

/// vCPU registers whose branch stack is either a given list of branches or not known yet.
struct BranchRegs {
    known: Option<Vec<BranchEntry>>,
    requests: Vec<BranchStackConfig>,
}

impl BranchRegs {
    fn new(known: Option<Vec<BranchEntry>>) -> Self {
        let requests = Vec::new();
        Self { known, requests }
    }
}

impl SampleRegs for BranchRegs {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestKernel
    }
    fn ip(&mut self) -> u64 {
        0x1234
    }
    fn branches(&mut self, request: BranchStackConfig, out: &mut Vec<BranchEntry>) -> bool {
        self.requests.push(request);
        out.extend(self.known.iter().flatten());
        self.known.is_some()
    }
}

fn branch(from: u64, kind: BranchKind) -> BranchEntry {
    BranchEntry {
        from,
        to: from + 0x100,
        kind,
        ..BranchEntry::default()
    }
}

fn with_branches(config: u64, filter: BranchFilter, depth: u16) -> Attr {
    Attr {
        sample_type: SampleType::IP | SampleType::PERIOD | SampleType::BRANCH_STACK,
        branches: BranchStackConfig {
            filter: filter | BranchFilter::KERNEL,
            depth,
            overhead_permille: 50,
        },
        ..Attr::sampling(EventType::SIM, config, 10)
    }
}

/// Returns the period and the branch words of each sample in a ring.
fn samples(ring: &Arc<Ring>) -> Vec<(u64, Vec<u64>)> {
    let attr = with_branches(1, BranchFilter::ANY, 1);
    map_samples(ring, &attr, |s| (s.period, s.branches.iter().collect()))
}

/// A sample is not written until its branches are known, and then represents all counts since the
/// previous sample. An overflow of another event is serviced immediately.
#[test]
fn sample_waits_for_its_branches() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let waiting = m.open_vcpu(with_branches(1, BranchFilter::ANY, 4), None);
    let other = m.open_vcpu(
        Attr::sampling(EventType::SIM, 2, 10).with_sample_type(SampleType::PERIOD),
        None,
    );
    let [ring, other_ring] = [&waiting, &other].map(|e| e.map(4, true).unwrap());
    let mut unknown = BranchRegs::new(None);
    for _ in 0..3 {
        m.run(0, 10);
        assert_eq!(v.service_overflows(&mut unknown, &mut |_| {}), 1);
    }
    assert!(unknown.requests.iter().all(|request| request.depth == 4));
    assert!(samples(&ring).is_empty());
    assert!(other_ring.published() > 0, "it does not wait");
    let mut known = BranchRegs::new(Some(vec![branch(1, BranchKind::Call)]));
    assert_eq!(v.service_overflows(&mut known, &mut |_| {}), 1);
    assert_eq!(samples(&ring), [(30, vec![1, 0x101, 0])]);
}

/// A sample whose branches are not known when its event is scheduled out, for example for a pause,
/// is not lost.
#[test]
fn waiting_sample_outlives_schedule_out() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let waiting = m.open_vcpu(with_branches(1, BranchFilter::ANY, 4), None);
    let ring = waiting.map(4, true).unwrap();
    m.run(0, 10);
    v.service_overflows(&mut BranchRegs::new(None), &mut |_| {});
    v.sched_out();
    v.service_overflows(&mut BranchRegs::new(None), &mut |_| {});
    assert!(samples(&ring).is_empty());
    v.service_overflows(&mut UnavailableRegs, &mut |_| {});
    // A sample has an empty stack if the VMM does not record branches.
    assert_eq!(samples(&ring), [(10, vec![])]);
}

/// If several events share one branch stack, the sample of each event contains the branches that
/// its own filter and depth select.
#[test]
fn each_event_filters_the_common_stack() {
    let m = TestCore::new(4);
    let v = m.vcpu(0);
    let calls = m.open_vcpu(
        with_branches(1, BranchFilter::CALL | BranchFilter::TYPE_SAVE, 1),
        None,
    );
    let any = m.open_vcpu(with_branches(2, BranchFilter::ANY, 2), None);
    let rings = [&calls, &any].map(|e| e.map(4, true).unwrap());
    m.run(0, 10);
    let known = [
        branch(1, BranchKind::Conditional),
        branch(2, BranchKind::Call),
        branch(3, BranchKind::Call),
    ];
    let mut regs = BranchRegs::new(Some(known.to_vec()));
    v.service_overflows(&mut regs, &mut |_| {});
    let request = regs.requests[0];
    assert_eq!(request.depth, 2);
    assert!(request.filter.contains(BranchFilter::ANY | BranchFilter::CALL));
    assert_eq!(samples(&rings[0]), [(10, vec![2, 0x102, 4 << 20])]);
    assert_eq!(samples(&rings[1]), [(20, vec![1, 0x101, 0, 2, 0x102, 0])]);
}
