//! Changes that the VMM makes to guest kernels in memory, so that the guest can count events.
//!
//! | module | contents |
//! |---|---|
//! | [`finder`] | RDPMC instructions in a kernel's text |
//! | [`rdpmc`] | replacement of RDPMC in a loaded kernel by a trap |
//! | [`sites`] | the replaced instructions, read by each vCPU without a lock |
//! | [`gate`] | interception of the guest's #GP handler, for RDPMC elsewhere |
//! | [`hwbp`] | hardware breakpoints instead of traps |
//! | [`event_tables`] | tables of perf's generic events in a kernel |
//! | [`topdown_events`] | lists of the top-down events of a kernel |
//! | [`uncounted`] | removal of uncountable events from these tables |
//! | [`user_rdpmc`] | the default permission of RDPMC in programs |
//! | [`running`] | kernels that the guest starts itself (kexec, kdump) |
//! | [`registers`] | the vCPU registers that the gate reads and changes |
//! | [`linear_memory`] | guest memory through the page tables of a vCPU |
//!
//! Start with [`rdpmc`] for the reason, with [`running::RunningKernelPatcher`] for the changes at
//! run time, and with docs/architecture.md, "Changes to the guest's kernel", for an overview.
//!
//! **Writes while vCPUs run.** Code that another vCPU may be executing is changed only by an atomic
//! write within an aligned 8-byte word. The trap differs from RDPMC in one byte, so RDPMC is
//! replaced at any alignment; a #GP handler that crosses a word boundary is left unchanged.
//!
//! **Dependencies.** `kernel-images` and `guest-profile` to find kernels, `vpmu` for vendors. This
//! crate does not depend on KVM: the vCPU loop passes registers as [`registers::VcpuState`] and
//! writes them back.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// Libraries do not print; messages go to the log or to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod event_tables;
pub mod finder;
pub mod gate;
pub mod hwbp;
pub mod linear_memory;
pub mod rdpmc;
pub mod registers;
pub mod running;
pub mod sites;
pub mod topdown_events;
pub mod uncounted;
pub mod user_rdpmc;
