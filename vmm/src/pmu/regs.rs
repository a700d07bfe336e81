//! The guest's registers for a sample, read from KVM only when someone looks, and then once.

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;
use perf_core::{CpuMode, SampleRegs};

/// Registers of a vCPU that is out of guest mode, on its own thread.
#[derive(Debug)]
pub struct VcpuRegs<'a> {
    fd: &'a VcpuFd,
    regs: Option<kvm_regs>,
    sregs: Option<kvm_sregs>,
}

impl<'a> VcpuRegs<'a> {
    /// Nothing is read yet.
    pub fn new(fd: &'a VcpuFd) -> Self {
        Self {
            fd,
            regs: None,
            sregs: None,
        }
    }

    /// General registers; `None` when KVM does not give them.
    pub fn general(&mut self) -> Option<&kvm_regs> {
        if self.regs.is_none() {
            self.regs = self.fd.get_regs().ok();
        }
        self.regs.as_ref()
    }

    /// Segment and control registers; `None` when KVM does not give them.
    pub fn system(&mut self) -> Option<&kvm_sregs> {
        if self.sregs.is_none() {
            self.sregs = self.fd.get_sregs().ok();
        }
        self.sregs.as_ref()
    }

    /// The privilege level: SS.DPL, which is the CPL in every mode but real mode, where it is 0 as well (SDM vol. 3
    /// §5.5).
    pub fn cpl(&mut self) -> Option<u8> {
        self.system().map(|s| s.ss.dpl & 3)
    }
}

impl SampleRegs for VcpuRegs<'_> {
    fn mode(&mut self) -> CpuMode {
        match self.cpl() {
            Some(3) => CpuMode::GuestUser,
            _ => CpuMode::GuestKernel,
        }
    }

    fn ip(&mut self) -> u64 {
        self.general().map_or(0, |r| r.rip)
    }
}
