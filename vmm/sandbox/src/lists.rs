//! System call allow-lists of each thread kind.
//!
//! The lists are derived from traces of all tests (`strace -f`, and `--seccomp log` in the lab) and
//! from reading the code. A call that is on neither the allow-list nor the list [`denied_calls`]
//! terminates the VM; a call on the latter fails with an error. docs/threat-model.md gives the
//! reason for each entry.

use rustix::fs::OFlags;
use syscalls::Sysno;

use crate::kind::{PerfEventAccess, SandboxedThreadKind};
use crate::rules::{AllowedSyscall, ArgumentCheck, any, ioctls, one_of, with_checks};

/// `PR_SET_VMA` (include/uapi/linux/prctl.h), which the C library uses to name its memory.
const PR_SET_VMA: u32 = 0x5356_4d41;
/// `F_SETSIG` command of `fcntl(2)`.
const F_SETSIG: u32 = 10;
const F_SETOWN_EX: u32 = 15;
/// Advice value with which `madvise(2)` installs guard pages; newer C libraries use it for stacks
/// (include/uapi/asm-generic/mman-common.h).
const MADV_GUARD_INSTALL: libc::c_int = 102;
const MADV_GUARD_REMOVE: libc::c_int = 103;
/// Flags of `open(2)` for a descriptor that only refers to a path (`O_PATH`).
pub(crate) const PATH_ONLY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Socket type used by the socket broker.
pub(crate) const SOCKET_TYPE: libc::c_int = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
/// Flags of `clone(2)` that create namespaces.
const NEW_NAMESPACES: u64 = 0x7e02_0080;
/// Flag `CLONE_THREAD` of `clone(2)`.
const THREAD: u64 = 0x1_0000;
/// Returns all flags of `open(2)` except those that are permitted when a file is opened for
/// reading.
fn non_read_flags() -> u64 {
    let reading = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_LARGEFILE | libc::O_NOCTTY | libc::O_DIRECTORY;
    u64::from(!reading.unsigned_abs())
}

/// Returns the allow-list for threads of `kind`. `pid` is the ID of this process, and `counting`
/// determines who opens perf events.
pub(crate) fn of(kind: SandboxedThreadKind, pid: u32, counting: PerfEventAccess) -> Vec<AllowedSyscall> {
    let mut list = common(pid);
    let counts = matches!(
        kind,
        SandboxedThreadKind::Main | SandboxedThreadKind::Vcpu | SandboxedThreadKind::Starter
    );
    if counts && counting == PerfEventAccess::OwnThread {
        list.extend(own_perf_events());
    }
    list.extend(match kind {
        SandboxedThreadKind::Main => main(),
        SandboxedThreadKind::Vcpu => vcpu(),
        SandboxedThreadKind::Device => device(),
        SandboxedThreadKind::Socket => socket(),
        SandboxedThreadKind::Balloon => balloon(),
        SandboxedThreadKind::Debugger => debugger(),
        SandboxedThreadKind::Profiler => profiler(),
        SandboxedThreadKind::Console => Vec::new(),
        SandboxedThreadKind::Signals => any(&[Sysno::rt_sigtimedwait]),
        // A new thread initially runs with the starter's filter.
        SandboxedThreadKind::Starter => starter(pid, counting),
    });
    list
}

/// Returns the calls that fail with an error in threads of `kind` instead of terminating the VM.
/// Libraries attempt these calls but work without them.
pub(crate) fn denied_calls(kind: SandboxedThreadKind) -> Vec<AllowedSyscall> {
    let mut list = fault_reporting();
    // Deny file status by path, because the standard library falls back to descriptors.
    let of_descriptor = u64::from(libc::AT_EMPTY_PATH.unsigned_abs());
    let by_path = |flags| ArgumentCheck::Bits(flags, of_descriptor, 0);
    list.extend(with_checks(Sysno::newfstatat, &[by_path(3)]));
    list.extend(with_checks(Sysno::statx, &[by_path(2)]));
    list.extend(any(&[Sysno::stat, Sysno::lstat]));
    // Deny reading the resource limits of this process.
    list.extend(with_checks(
        Sysno::prlimit64,
        &[ArgumentCheck::Is(0, 0), ArgumentCheck::Is(2, 0)],
    ));
    if kind != SandboxedThreadKind::Starter {
        // Deny the creation of threads, because the starter creates all threads.
        list.extend(with_checks(
            Sysno::clone,
            &[ArgumentCheck::Bits(0, NEW_NAMESPACES | THREAD, THREAD)],
        ));
        list.extend(any(&[Sysno::clone3]));
    }
    if !matches!(kind, SandboxedThreadKind::Main | SandboxedThreadKind::Starter) {
        // glibc's malloc reads /proc/sys/vm/overcommit_memory before it returns heap memory to the
        // system. If the read fails, malloc returns less memory.
        let others = non_read_flags();
        list.extend(with_checks(Sysno::openat, &[ArgumentCheck::Without(2, others)]));
        list.extend(with_checks(Sysno::open, &[ArgumentCheck::Without(1, others)]));
    }
    list
}

/// Returns the calls with which a fault report finds the path of the program and checks access to
/// it.
fn fault_reporting() -> Vec<AllowedSyscall> {
    any(&[
        Sysno::readlink,
        Sysno::readlinkat,
        Sysno::getcwd,
        Sysno::uname,
        Sysno::access,
        Sysno::faccessat,
    ])
}

/// Returns the calls that every thread requires: memory, time, locks, existing descriptors and
/// exit.
fn common(pid: u32) -> Vec<AllowedSyscall> {
    let mut list = any(&[
        // Calls on open descriptors.
        Sysno::read,
        Sysno::write,
        Sysno::readv,
        Sysno::writev,
        Sysno::close,
        Sysno::lseek,
        Sysno::fstat,
        Sysno::poll,
        Sysno::ppoll,
        // Calls that manage memory.
        Sysno::munmap,
        Sysno::brk,
        // Locks and time. The C library calls the kernel if the clock cannot be read in user space.
        Sysno::sched_yield,
        Sysno::nanosleep,
        Sysno::clock_nanosleep,
        Sysno::clock_gettime,
        Sysno::clock_getres,
        Sysno::gettimeofday,
        Sysno::restart_syscall,
        // Calls for threads and signals.
        Sysno::getpid,
        Sysno::gettid,
        Sysno::set_tid_address,
        Sysno::set_robust_list,
        Sysno::rseq,
        Sysno::getcpu,
        Sysno::sched_getaffinity,
        Sysno::sigaltstack,
        Sysno::rt_sigprocmask,
        Sysno::rt_sigreturn,
        Sysno::exit,
        Sysno::exit_group,
        // The standard library obtains the keys of hash tables with this call.
        Sysno::getrandom,
    ]);
    list.extend(memory());
    list.extend(locks());
    list.extend(ending_signals());
    list.extend(with_checks(Sysno::tgkill, &[ArgumentCheck::Is(0, pid)]));
    // Allow the status of an open descriptor, as with fstat.
    let of_descriptor = libc::AT_EMPTY_PATH.unsigned_abs();
    let bits = |at| ArgumentCheck::Bits(at, of_descriptor.into(), of_descriptor.into());
    list.extend(with_checks(Sysno::newfstatat, &[bits(3)]));
    list.extend(with_checks(Sysno::statx, &[bits(2)]));
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME].map(i32::unsigned_abs);
    list.extend(one_of(Sysno::prctl, 0, &[names[0], names[1], PR_SET_VMA]));
    let flags = [
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_SETFL,
        libc::F_DUPFD_CLOEXEC,
        // Any thread may be the last user of an image and release its lock.
        libc::F_OFD_SETLK,
    ];
    list.extend(one_of(Sysno::fcntl, 1, &flags.map(i32::unsigned_abs)));
    list
}

/// Returns a mask of all bits except `bits`.
fn all_but(bits: libc::c_int) -> u64 {
    u64::from(!bits.unsigned_abs())
}

/// Returns the calls for the memory of the C library's allocator and of thread stacks. This memory
/// is never file-backed or executable. Memory may be mapped at a fixed address only if it has no
/// access rights.
fn memory() -> Vec<AllowedSyscall> {
    let prot = all_but(libc::PROT_READ | libc::PROT_WRITE);
    let needed = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let optional = libc::MAP_NORESERVE | libc::MAP_STACK;
    let private = ArgumentCheck::Bits(3, all_but(optional), u64::from(needed.unsigned_abs()));
    let mut list = with_checks(Sysno::mmap, &[ArgumentCheck::Without(2, prot), private]);
    // To shrink a heap, glibc's malloc maps inaccessible memory over its end if the program has
    // file capabilities or the kernel does not overcommit.
    let given_back = ArgumentCheck::Is(3, (needed | libc::MAP_FIXED).unsigned_abs());
    list.extend(with_checks(Sysno::mmap, &[ArgumentCheck::Is(2, 0), given_back]));
    list.extend(with_checks(Sysno::mprotect, &[ArgumentCheck::Without(2, prot)]));
    list.extend(one_of(Sysno::mremap, 3, &[libc::MREMAP_MAYMOVE.unsigned_abs()]));
    let advice = [libc::MADV_DONTNEED, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE];
    list.extend(one_of(Sysno::madvise, 2, &advice.map(i32::unsigned_abs)));
    list
}

/// Returns the calls that map existing descriptors as shared memory: perf event rings, memory files
/// and KVM's structures. A ring in a memory file is mapped twice, at consecutive addresses in a
/// reserved range.
fn shared_memory() -> Vec<AllowedSyscall> {
    let prot = all_but(libc::PROT_READ | libc::PROT_WRITE);
    let shared = ArgumentCheck::Bits(
        3,
        all_but(libc::MAP_FIXED | libc::MAP_POPULATE),
        u64::from(libc::MAP_SHARED.unsigned_abs()),
    );
    with_checks(Sysno::mmap, &[ArgumentCheck::Without(2, prot), shared])
}

/// Returns the `futex(2)` operations of the C library and Rust's standard library, private or
/// shared, on either clock. Operations on locks with a kernel-side owner (`FUTEX_LOCK_PI`) and
/// requeue operations are excluded.
fn locks() -> Vec<AllowedSyscall> {
    let options = libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME;
    let operations = [libc::FUTEX_WAIT, libc::FUTEX_WAKE, libc::FUTEX_WAIT_BITSET];
    let operation = |operation: &i32| {
        vec![ArgumentCheck::Bits(
            1,
            all_but(options),
            u64::from(operation.unsigned_abs()),
        )]
    };
    vec![AllowedSyscall {
        call: Sysno::futex,
        when: operations.iter().map(operation).collect(),
    }]
}

/// Returns the calls that reset a signal handler to the default action. The handlers of fault
/// signals, the handlers of termination signals, and abort(3) need these calls to terminate the
/// process. Other handlers, in particular the one for seccomp violations, cannot be changed after
/// the VM has started.
fn ending_signals() -> Vec<AllowedSyscall> {
    let signals = [
        libc::SIGABRT,
        libc::SIGHUP,
        libc::SIGINT,
        libc::SIGQUIT,
        libc::SIGTERM,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGBUS,
        libc::SIGSEGV,
    ];
    one_of(Sysno::rt_sigaction, 0, &signals.map(i32::unsigned_abs))
}

/// Returns the calls of the event loop and its notifications.
fn event_loop() -> Vec<AllowedSyscall> {
    any(&[
        Sysno::epoll_create1,
        Sysno::epoll_ctl,
        Sysno::epoll_wait,
        Sysno::epoll_pwait,
        Sysno::eventfd2,
        Sysno::timerfd_create,
        Sysno::timerfd_settime,
    ])
}

/// Returns the calls for existing connections, and for new connections from existing listeners.
fn connections() -> Vec<AllowedSyscall> {
    let mut list = any(&[
        Sysno::accept4,
        Sysno::recvfrom,
        Sysno::recvmsg,
        Sysno::sendto,
        Sysno::sendmsg,
        Sysno::shutdown,
        Sysno::getsockopt,
        Sysno::setsockopt,
        Sysno::getsockname,
        Sysno::getpeername,
    ]);
    // The ioctls FIONREAD and FIONBIO.
    list.extend(ioctls(b'T', &[0x1b, 0x21]));
    list
}

/// Returns the calls for open perf events. Only the broker opens new events.
fn perf_events() -> Vec<AllowedSyscall> {
    // Perf event ioctls: ENABLE, DISABLE, REFRESH, RESET, PERIOD, SET_OUTPUT, ID, PAUSE_OUTPUT.
    let mut list = ioctls(b'$', &[0, 1, 2, 3, 4, 5, 7, 9]);
    // Requests to the broker, which pass descriptors.
    list.extend(any(&[Sysno::sendmsg, Sysno::recvmsg]));
    list.extend(any(&[
        Sysno::pread64,
        // Timers for events of the clock driver.
        Sysno::timer_create,
        Sysno::timer_settime,
        Sysno::timer_gettime,
        Sysno::timer_delete,
        Sysno::membarrier,
    ]));
    list
}

/// Returns the calls for opening perf events without the broker ([`PerfEventAccess::OwnThread`]),
/// on the calling thread and any CPU. The filter cannot check the attributes, which are passed by
/// pointer.
fn own_perf_events() -> Vec<AllowedSyscall> {
    let (own, any_cpu, cloexec) = (0, u32::MAX, 8);
    let checks = [
        ArgumentCheck::Is(1, own),
        ArgumentCheck::Is(2, any_cpu),
        ArgumentCheck::Is(4, cloexec),
    ];
    with_checks(Sysno::perf_event_open, &checks)
}

/// ioctl type of KVM (`KVMIO`).
const KVMIO: u8 = 0xae;

/// KVM ioctls for interrupts and memory of the guest.
const KVM_VM: &[u8] = &[
    0x03, // CHECK_EXTENSION
    0x46, // SET_USER_MEMORY_REGION
    0x61, // IRQ_LINE
    0x67, // IRQ_LINE_STATUS
    0x6a, // SET_GSI_ROUTING
    0x76, // IRQFD
    0x79, // IOEVENTFD
    0xa5, // SIGNAL_MSI
];

/// KVM ioctls for the state of a vCPU.
const KVM_VCPU: &[u8] = &[
    0x81, // GET_REGS
    0x82, // SET_REGS
    0x83, // GET_SREGS
    0x84, // SET_SREGS
    0x86, // INTERRUPT
    0x88, // GET_MSRS
    0x89, // SET_MSRS
    0x8b, // SET_SIGNAL_MASK
    0x8c, // GET_FPU
    0x8d, // SET_FPU
    0x8e, // GET_LAPIC
    0x8f, // SET_LAPIC
    0x90, // SET_CPUID2
    0x98, // GET_MP_STATE
    0x99, // SET_MP_STATE
    0x9a, // NMI
    0x9b, // SET_GUEST_DEBUG
    0x9f, // GET_VCPU_EVENTS
    0xa0, // SET_VCPU_EVENTS
    0xa1, // GET_DEBUGREGS
    0xa2, // SET_DEBUGREGS
    0xa3, // GET_TSC_KHZ
    0xa4, // GET_XSAVE
    0xa6, // GET_XCRS
    0xa7, // SET_XCRS
    0xad, // KVMCLOCK_CTRL
    0xbe, // GET_NESTED_STATE
    0xbf, // SET_NESTED_STATE
    0xce, // GET_STATS_FD
    0xcf, // GET_XSAVE2
];

fn vcpu() -> Vec<AllowedSyscall> {
    // KVM_RUN comes first because it is the most frequent call.
    let mut list = ioctls(KVMIO, &[0x80]);
    list.extend(shared_memory());
    list.extend(perf_events());
    list.extend(ioctls(KVMIO, KVM_VCPU));
    list.extend(ioctls(KVMIO, KVM_VM));
    list.extend(vhost());
    list.extend(images());
    list.extend(event_loop());
    list.extend(any(&[Sysno::rt_sigtimedwait]));
    list
}

/// Returns the calls for the setup of vhost-net. The setup starts on a vCPU thread when the guest's
/// driver activates the device, and continues on the device's thread.
fn vhost() -> Vec<AllowedSyscall> {
    let mut list = ioctls(
        0xaf,
        &[
            0x00, // GET_FEATURES, SET_FEATURES
            0x01, // SET_OWNER
            0x02, // RESET_OWNER
            0x03, // SET_MEM_TABLE
            0x10, // SET_VRING_NUM
            0x11, // SET_VRING_ADDR
            0x12, // SET_VRING_BASE, GET_VRING_BASE
            0x20, // SET_VRING_KICK
            0x21, // SET_VRING_CALL
            0x22, // SET_VRING_ERR
            0x30, // NET_SET_BACKEND
        ],
    );
    // The ioctls TUNSETOFFLOAD, TUNGETIFF and TUNSETVNETHDRSZ.
    list.extend(ioctls(b'T', &[208, 210, 216]));
    list
}

/// Returns the calls for access to disk images. The disk's thread requires them, and so does each
/// thread that writes back cached data when it resets a disk: a vCPU thread if the guest's driver
/// resets the disk, and the main thread if the machine is reset or shut down.
fn images() -> Vec<AllowedSyscall> {
    let mut list = any(&[
        Sysno::pread64,
        Sysno::pwrite64,
        Sysno::preadv,
        Sysno::pwritev,
        Sysno::preadv2,
        Sysno::pwritev2,
        Sysno::fadvise64,
        Sysno::fsync,
        Sysno::fdatasync,
        Sysno::fallocate,
        Sysno::ftruncate,
        Sysno::fstatfs,
    ]);
    // The ioctls BLKSSZGET, BLKGETSIZE64, BLKDISCARD and BLKZEROOUT.
    list.extend(ioctls(0x12, &[104, 114, 119, 127]));
    list
}

fn device() -> Vec<AllowedSyscall> {
    let mut list = event_loop();
    list.extend(vhost());
    list.extend(images());
    list.extend(ioctls(KVMIO, KVM_VM));
    list
}

fn socket() -> Vec<AllowedSyscall> {
    let mut list = event_loop();
    list.extend(connections());
    list.extend(ioctls(KVMIO, KVM_VM));
    list
}

/// Returns the calls with which the balloon releases pages of guest memory: by punching holes in a
/// memory file, or by mapping anonymous memory over pages of a snapshot.
fn balloon() -> Vec<AllowedSyscall> {
    let mut list = event_loop();
    let advice = [libc::MADV_REMOVE, libc::MADV_DONTDUMP];
    list.extend(one_of(Sysno::madvise, 2, &advice.map(i32::unsigned_abs)));
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    list.extend(with_checks(
        Sysno::mmap,
        &[
            ArgumentCheck::Is(2, prot.unsigned_abs()),
            ArgumentCheck::Is(3, flags.unsigned_abs()),
        ],
    ));
    list
}

/// Returns the calls of the profiler thread, which communicates with the process that reads the
/// guest's kernel. The profiler receives the socket of that process from the [worker
/// keeper](crate::WorkerKeeper).
fn profiler() -> Vec<AllowedSyscall> {
    any(&[Sysno::recvfrom, Sysno::recvmsg, Sysno::sendto, Sysno::sendmsg])
}

/// Returns the calls of the debugger, which stops the guest and its events.
fn debugger() -> Vec<AllowedSyscall> {
    let mut list = event_loop();
    list.extend(connections());
    list.extend(perf_events());
    list.extend(ioctls(KVMIO, KVM_VM));
    list
}

#[expect(clippy::too_many_lines, reason = "one line per system call")]
fn main() -> Vec<AllowedSyscall> {
    let mut list = event_loop();
    list.extend(shared_memory());
    list.extend(perf_events());
    list.extend(connections());
    list.extend(ioctls(
        KVMIO,
        &[
            0x41, // CREATE_VCPU
            0x62, // GET_IRQCHIP
            0x63, // SET_IRQCHIP
            0x7c, // GET_CLOCK
            0x9f, // GET_PIT2
            0xa0, // SET_PIT2
            0xb2, // SET_PMU_EVENT_FILTER
        ],
    ));
    // Migration of a VM: UFFDIO_REGISTER, UFFDIO_UNREGISTER and PAGEMAP_SCAN.
    list.extend(ioctls(0xaa, &[0x00, 0x01]));
    list.extend(ioctls(b'f', &[16]));
    list.extend(ioctls(KVMIO, KVM_VM));
    // The main thread sets up hot-plugged vCPUs.
    list.extend(ioctls(KVMIO, KVM_VCPU));
    list.extend(vhost());
    list.extend(ioctls(
        b'T',
        &[
            0x01, // TCGETS
            0x02, // TCSETS
            0x03, // TCSETSW
            0x04, // TCSETSF
            0x0f, // TIOCGPGRP
            0x13, // TIOCGWINSZ
            0x14, // TIOCSWINSZ
        ],
    ));
    // Operators' rings and sealed texts are memory files, which the VMM reopens through /proc. A
    // reboot reads the kernel image again. No file is created.
    let may = libc::O_ACCMODE | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_LARGEFILE | libc::O_NOCTTY;
    let others = u64::from(!may.unsigned_abs());
    list.extend(with_checks(Sysno::openat, &[ArgumentCheck::Without(2, others)]));
    list.extend(with_checks(Sysno::open, &[ArgumentCheck::Without(1, others)]));
    // Calls made at a reboot with --prealloc.
    list.extend(one_of(
        Sysno::madvise,
        2,
        &[libc::MADV_POPULATE_WRITE.unsigned_abs()],
    ));
    // Lease of a ring's memory file. The lease signal is sent to this process and is ignored by
    // default.
    list.extend(with_checks(
        Sysno::fcntl,
        &[
            ArgumentCheck::Is(1, F_SETSIG),
            ArgumentCheck::Is(2, libc::SIGURG.unsigned_abs()),
        ],
    ));
    let leases = [libc::F_SETLEASE, libc::F_ADD_SEALS, libc::F_GET_SEALS];
    list.extend(one_of(Sysno::fcntl, 1, &leases.map(i32::unsigned_abs)));
    list.extend(any(&[
        Sysno::memfd_create,
        Sysno::dup2,
        Sysno::dup3,
        Sysno::mincore,
        // Calls that reap exited backend processes.
        Sysno::wait4,
        Sysno::waitid,
        Sysno::geteuid,
        Sysno::sysinfo,
    ]));
    list.extend(images());
    list
}

/// Returns the allow-list of the starter thread. The list contains the calls of all threads that
/// the starter creates, because a thread inherits the filter of its creator, and the calls with
/// which a new thread confines itself.
fn starter(pid: u32, counting: PerfEventAccess) -> Vec<AllowedSyscall> {
    let mut list = Vec::new();
    // The vCPU list comes first because it contains KVM_RUN, the most frequent call.
    for kind in [SandboxedThreadKind::Vcpu]
        .into_iter()
        .chain(SandboxedThreadKind::ALL)
    {
        if kind != SandboxedThreadKind::Starter {
            list.extend(of(kind, pid, counting));
        }
    }
    list.extend(with_checks(
        Sysno::clone,
        &[ArgumentCheck::Bits(0, NEW_NAMESPACES | THREAD, THREAD)],
    ));
    // A separate filter determines the result of clone3.
    list.extend(any(&[
        Sysno::clone3,
        Sysno::sched_setaffinity,
        // Calls with which threads that open no files apply landlock rules.
        Sysno::landlock_restrict_self,
        // Calls that change capabilities.
        Sysno::capget,
        Sysno::capset,
    ]));
    list.extend(one_of(Sysno::seccomp, 0, &[libc::SECCOMP_SET_MODE_FILTER]));
    list.extend(one_of(
        Sysno::prctl,
        0,
        &[
            libc::PR_SET_NO_NEW_PRIVS.unsigned_abs(),
            libc::PR_CAP_AMBIENT.unsigned_abs(),
        ],
    ));
    list
}

/// Returns the allow-list of a worker (a process that handles guest-controlled bytes), which
/// contains only calls for memory, the worker's socket, and exit. `pid` is the ID of that process.
pub(crate) fn of_worker(pid: u32) -> Vec<AllowedSyscall> {
    let mut list = of_any_worker();
    list.extend(with_checks(Sysno::tgkill, &[ArgumentCheck::Is(0, pid)]));
    list
}

/// Returns the entries of a worker's allow-list that do not depend on its process ID.
fn of_any_worker() -> Vec<AllowedSyscall> {
    let mut list = any(&[
        Sysno::read,
        Sysno::write,
        Sysno::recvfrom,
        Sysno::sendto,
        Sysno::close,
        Sysno::munmap,
        Sysno::brk,
        // Required only if the clock cannot be read in user space.
        Sysno::clock_gettime,
        // The standard library obtains the keys of hash tables with this call.
        Sysno::getrandom,
        Sysno::exit,
        Sysno::exit_group,
        // Calls of abort(3).
        Sysno::rt_sigprocmask,
        Sysno::getpid,
        Sysno::gettid,
    ]);
    list.extend(memory());
    list.extend(locks());
    list.extend(ending_signals());
    list.extend(one_of(Sysno::prctl, 0, &[PR_SET_VMA]));
    // Before it closes a descriptor, the standard library checks that the descriptor is open.
    list.extend(one_of(Sysno::fcntl, 1, &[libc::F_GETFD.unsigned_abs()]));
    list.extend(refused_to_workers());
    list
}

/// Returns the calls that fail with an error, instead of terminating the process, in workers and in
/// the keeper that starts them.
pub(crate) fn refused_to_workers() -> Vec<AllowedSyscall> {
    let mut list = fault_reporting();
    // As in other threads, glibc's malloc opens this file.
    let others = non_read_flags();
    list.extend(with_checks(Sysno::openat, &[ArgumentCheck::Without(2, others)]));
    list.extend(with_checks(Sysno::open, &[ArgumentCheck::Without(1, others)]));
    list
}

/// Returns the allow-list of the keeper, the process that starts, limits and terminates workers,
/// and waits for them. The list includes the calls of the workers, because they inherit the
/// keeper's filter.
pub(crate) fn of_keeper() -> Vec<AllowedSyscall> {
    let mut list = of_any_worker();
    list.extend(with_checks(
        Sysno::clone,
        &[ArgumentCheck::Bits(0, NEW_NAMESPACES | THREAD, 0)],
    ));
    list.extend(any(&[
        Sysno::tgkill,
        Sysno::kill,
        Sysno::wait4,
        Sysno::pipe2,
        Sysno::dup2,
        Sysno::setsockopt,
        Sysno::sendmsg,
        // A new process initializes the C library with these calls.
        Sysno::set_robust_list,
        Sysno::rseq,
        Sysno::prlimit64,
        Sysno::setrlimit,
    ]));
    list.extend(one_of(Sysno::socketpair, 0, &[libc::AF_UNIX.unsigned_abs()]));
    list.extend(one_of(Sysno::fcntl, 1, &[libc::F_DUPFD_CLOEXEC.unsigned_abs()]));
    list.extend(one_of(Sysno::seccomp, 0, &[libc::SECCOMP_SET_MODE_FILTER]));
    let of_itself = [
        libc::PR_SET_NO_NEW_PRIVS,
        libc::PR_SET_PDEATHSIG,
        libc::PR_SET_NAME,
    ];
    list.extend(one_of(Sysno::prctl, 0, &of_itself.map(i32::unsigned_abs)));
    list
}

/// Returns the allow-list of the socket broker ([`crate::SocketBroker`]), which examines files,
/// creates and connects local sockets, passes them to the VM, and removes the VM's own files.
pub(crate) fn of_socket_broker() -> Vec<AllowedSyscall> {
    let mut list = of_any_worker();
    list.extend(any(&[
        Sysno::recvmsg,
        Sysno::sendmsg,
        Sysno::connect,
        Sysno::fstat,
    ]));
    let large_files = u64::from(!OFlags::LARGEFILE.bits());
    list.extend(with_checks(
        Sysno::openat,
        &[ArgumentCheck::Bits(2, large_files, PATH_ONLY.bits().into())],
    ));
    let of_descriptor = u64::from(libc::AT_EMPTY_PATH.unsigned_abs());
    list.extend(with_checks(
        Sysno::newfstatat,
        &[ArgumentCheck::Bits(3, of_descriptor, of_descriptor)],
    ));
    list.extend(with_checks(Sysno::unlinkat, &[ArgumentCheck::Is(2, 0)]));
    list.extend(with_checks(
        Sysno::socket,
        &[
            ArgumentCheck::Is(0, libc::AF_UNIX.unsigned_abs()),
            ArgumentCheck::Is(1, SOCKET_TYPE.unsigned_abs()),
            ArgumentCheck::Is(2, 0),
        ],
    ));
    list
}

/// Returns the allow-list of the process that serves Firecracker's API
/// ([`crate::confine_front_end`]) once its VM is running. The process uses existing connections,
/// accepts new ones from its listener, and terminates the VM. `own` is the ID of the process.
pub(crate) fn of_front_end(own: u32) -> Vec<AllowedSyscall> {
    let mut list = common(own);
    list.extend(connections());
    list.extend(any(&[Sysno::wait4, Sysno::waitid, Sysno::rt_sigtimedwait]));
    list.extend(refused_to_workers());
    list
}

/// Returns the allow-list of the supervisor of a VM in a PID namespace
/// ([`crate::PidNamespaceSupervisor`]), which receives signals and reports, signals the VM, and
/// exits with the VM's status. `vm` and `own` are the process IDs of the VM and of the supervisor.
pub(crate) fn of_supervisor(vm: u32, own: u32) -> Vec<AllowedSyscall> {
    let mut list = any(&[
        Sysno::read,
        Sysno::write,
        Sysno::poll,
        Sysno::ppoll,
        Sysno::wait4,
        Sysno::rt_sigprocmask,
        Sysno::rt_sigaction,
        Sysno::rt_sigreturn,
        Sysno::restart_syscall,
        Sysno::getpid,
        Sysno::exit_group,
        // The C library allocates memory with these calls.
        Sysno::brk,
        Sysno::munmap,
    ]);
    list.extend(memory());
    list.extend(one_of(Sysno::kill, 0, &[vm, own]));
    list.extend(with_checks(Sysno::rt_sigqueueinfo, &[ArgumentCheck::Is(0, vm)]));
    // Reads and sets the foreground process group of the terminal.
    list.extend(ioctls(b'T', &[0x0f, 0x10]));
    list
}

/// Returns the allow-list of the perf event broker, which receives a request, opens an event on a
/// thread, sets the signal of the event, and passes back the descriptor. `vm` is the process ID of
/// the VM, and `signal` the only signal that events send.
pub(crate) fn of_perf_broker(vm: u32, signal: u32) -> Vec<AllowedSyscall> {
    let (cloexec, any_process, any_cpu) = (8, u32::MAX, u32::MAX);
    let mut list = any(&[
        Sysno::recvmsg,
        Sysno::sendmsg,
        Sysno::close,
        Sysno::clock_gettime,
        Sysno::clock_nanosleep,
        Sysno::restart_syscall,
        Sysno::exit_group,
        // The C library allocates memory with these calls.
        Sysno::brk,
        Sysno::munmap,
    ]);
    list.extend(with_checks(
        Sysno::perf_event_open,
        &[
            ArgumentCheck::Not(1, 0),
            ArgumentCheck::Not(1, any_process),
            ArgumentCheck::Is(2, any_cpu),
            ArgumentCheck::Is(4, cloexec),
        ],
    ));
    list.extend(with_checks(
        Sysno::fcntl,
        &[ArgumentCheck::Is(1, F_SETSIG), ArgumentCheck::Is(2, signal)],
    ));
    let of_events = [
        F_SETOWN_EX,
        libc::F_GETFL.unsigned_abs(),
        libc::F_SETFL.unsigned_abs(),
    ];
    list.extend(one_of(Sysno::fcntl, 1, &of_events));
    // Before it closes a descriptor, the standard library checks that the descriptor is open.
    list.extend(one_of(Sysno::fcntl, 1, &[libc::F_GETFD.unsigned_abs()]));
    // Check that a thread belongs to the VM. Signal 0 is never delivered.
    list.extend(with_checks(
        Sysno::tgkill,
        &[ArgumentCheck::Is(0, vm), ArgumentCheck::Is(2, 0)],
    ));
    list
}

#[cfg(test)]
mod tests;
