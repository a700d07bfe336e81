//! Which system calls the threads of each kind may make.
//!
//! The lists come from what the threads did while all tests ran (`strace -f`, and `--seccomp log` in the
//! lab), and from reading. What is not here ends the VM, unless it is [`refused`]: see docs/threat-model.md
//! for why what is here is.

use rustix::fs::OFlags;
use syscalls::Sysno;

use crate::kind::{Counting, ThreadKind};
use crate::rules::{Allowed, Check, any, ioctls, one_of, only};

/// `PR_SET_VMA` (include/uapi/linux/prctl.h): the C library names its memory.
const PR_SET_VMA: u32 = 0x5356_4d41;
/// `F_SETSIG` and `F_SETOWN_EX` of `fcntl(2)`.
const F_SETSIG: u32 = 10;
const F_SETOWN_EX: u32 = 15;
/// Advices of `madvise(2)` by which newer C libraries guard stacks (include/uapi/asm-generic/mman-common.h).
const MADV_GUARD_INSTALL: libc::c_int = 102;
const MADV_GUARD_REMOVE: libc::c_int = 103;
/// Flags that look at a file and open nothing of it.
pub(crate) const LOOK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Type of the sockets that the socket broker makes.
pub(crate) const SOCKET_TYPE: libc::c_int = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
/// Namespaces of `clone(2)`.
const NEW_NAMESPACES: u64 = 0x7e02_0080;
/// `CLONE_THREAD` of `clone(2)`.
const THREAD: u64 = 0x1_0000;
/// Flags of `open(2)` that a file which is only read has no use for.
fn other_than_reading() -> u64 {
    let reading = libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_LARGEFILE | libc::O_NOCTTY | libc::O_DIRECTORY;
    u64::from(!reading.unsigned_abs())
}

/// What threads of `kind` may do. `pid` is this process's.
pub(crate) fn of(kind: ThreadKind, pid: u32, counting: Counting) -> Vec<Allowed> {
    let mut list = common(pid);
    let counts = matches!(kind, ThreadKind::Main | ThreadKind::Vcpu | ThreadKind::Starter);
    if counts && counting == Counting::OwnThread {
        list.extend(own_perf_events());
    }
    list.extend(match kind {
        ThreadKind::Main => main(),
        ThreadKind::Vcpu => vcpu(),
        ThreadKind::Device => device(),
        ThreadKind::Socket => socket(),
        ThreadKind::Debugger => debugger(),
        ThreadKind::Profiler => profiler(),
        ThreadKind::Console => Vec::new(),
        ThreadKind::Signals => any(&[Sysno::rt_sigtimedwait]),
        // What it starts begins with what it may.
        ThreadKind::Starter => starter(pid, counting),
    });
    list
}

/// What threads of `kind` get an error for, and go on: libraries ask for it and do without.
pub(crate) fn refused(kind: ThreadKind) -> Vec<Allowed> {
    let mut list = asked_at_a_fault();
    // The state of a file by its path; the standard library asks by descriptors instead.
    let of_descriptor = u64::from(libc::AT_EMPTY_PATH.unsigned_abs());
    let by_path = |flags| Check::Bits(flags, of_descriptor, 0);
    list.extend(only(Sysno::newfstatat, &[by_path(3)]));
    list.extend(only(Sysno::statx, &[by_path(2)]));
    list.extend(any(&[Sysno::stat, Sysno::lstat]));
    // The limits of this process, none set.
    list.extend(only(Sysno::prlimit64, &[Check::Is(0, 0), Check::Is(2, 0)]));
    if kind != ThreadKind::Starter {
        // The starter starts threads; who asked for one past it gets an error.
        list.extend(only(
            Sysno::clone,
            &[Check::Bits(0, NEW_NAMESPACES | THREAD, THREAD)],
        ));
        list.extend(any(&[Sysno::clone3]));
    }
    if !matches!(kind, ThreadKind::Main | ThreadKind::Starter) {
        // glibc's malloc looks for /proc/sys/vm/overcommit_memory before it gives memory of a heap back, and
        // without it gives back less.
        let others = other_than_reading();
        list.extend(only(Sysno::openat, &[Check::Without(2, others)]));
        list.extend(only(Sysno::open, &[Check::Without(1, others)]));
    }
    list
}

/// Where a program is, and what it may use, which those ask who tell of a fault.
fn asked_at_a_fault() -> Vec<Allowed> {
    any(&[
        Sysno::readlink,
        Sysno::readlinkat,
        Sysno::getcwd,
        Sysno::uname,
        Sysno::access,
        Sysno::faccessat,
    ])
}

/// Memory, time, locks, descriptors that are there, and the end: what any thread needs.
fn common(pid: u32) -> Vec<Allowed> {
    let mut list = any(&[
        // Descriptors.
        Sysno::read,
        Sysno::write,
        Sysno::readv,
        Sysno::writev,
        Sysno::close,
        Sysno::lseek,
        Sysno::fstat,
        Sysno::poll,
        Sysno::ppoll,
        // Memory.
        Sysno::munmap,
        Sysno::brk,
        // Locks and time, which the C library asks the kernel for where its clock is none that can be read.
        Sysno::sched_yield,
        Sysno::nanosleep,
        Sysno::clock_nanosleep,
        Sysno::clock_gettime,
        Sysno::clock_getres,
        Sysno::gettimeofday,
        Sysno::restart_syscall,
        // Threads and signals.
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
        // Keys of hash tables.
        Sysno::getrandom,
    ]);
    list.extend(memory());
    list.extend(locks());
    list.extend(ending_signals());
    list.extend(only(Sysno::tgkill, &[Check::Is(0, pid)]));
    // As fstat: of a descriptor that is there.
    let of_descriptor = libc::AT_EMPTY_PATH.unsigned_abs();
    let bits = |at| Check::Bits(at, of_descriptor.into(), of_descriptor.into());
    list.extend(only(Sysno::newfstatat, &[bits(3)]));
    list.extend(only(Sysno::statx, &[bits(2)]));
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME].map(i32::unsigned_abs);
    list.extend(one_of(Sysno::prctl, 0, &[names[0], names[1], PR_SET_VMA]));
    let flags = [
        libc::F_GETFD,
        libc::F_SETFD,
        libc::F_GETFL,
        libc::F_SETFL,
        libc::F_DUPFD_CLOEXEC,
        // The lock of an image ends with its last user, whoever that is.
        libc::F_OFD_SETLK,
    ];
    list.extend(one_of(Sysno::fcntl, 1, &flags.map(i32::unsigned_abs)));
    list
}

/// All bits of an argument but these.
fn all_but(bits: libc::c_int) -> u64 {
    u64::from(!bits.unsigned_abs())
}

/// Memory of the C library's allocator and of thread stacks: never of a file and never executable; at an
/// address that was chosen only without access.
fn memory() -> Vec<Allowed> {
    let prot = all_but(libc::PROT_READ | libc::PROT_WRITE);
    let needed = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let optional = libc::MAP_NORESERVE | libc::MAP_STACK;
    let private = Check::Bits(3, all_but(optional), u64::from(needed.unsigned_abs()));
    let mut list = only(Sysno::mmap, &[Check::Without(2, prot), private]);
    // glibc's malloc gives the end of a heap back so, in a program with capabilities by its file and where
    // the kernel does not overcommit.
    let given_back = Check::Is(3, (needed | libc::MAP_FIXED).unsigned_abs());
    list.extend(only(Sysno::mmap, &[Check::Is(2, 0), given_back]));
    list.extend(only(Sysno::mprotect, &[Check::Without(2, prot)]));
    list.extend(one_of(Sysno::mremap, 3, &[libc::MREMAP_MAYMOVE.unsigned_abs()]));
    let advice = [libc::MADV_DONTNEED, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE];
    list.extend(one_of(Sysno::madvise, 2, &advice.map(i32::unsigned_abs)));
    list
}

/// Memory that is shared with a descriptor that is there: rings of perf events, memory files,
/// KVM's. A ring in a memory file is mapped twice in a row, into a range that was reserved.
fn shared_memory() -> Vec<Allowed> {
    let prot = all_but(libc::PROT_READ | libc::PROT_WRITE);
    let shared = Check::Bits(
        3,
        all_but(libc::MAP_FIXED | libc::MAP_POPULATE),
        u64::from(libc::MAP_SHARED.unsigned_abs()),
    );
    only(Sysno::mmap, &[Check::Without(2, prot), shared])
}

/// Operations of `futex(2)` that the C library and Rust's standard library use, private or not, on either
/// clock. None of them has an owner in the kernel (`FUTEX_LOCK_PI`) or moves waiters.
fn locks() -> Vec<Allowed> {
    let options = libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME;
    let operations = [libc::FUTEX_WAIT, libc::FUTEX_WAKE, libc::FUTEX_WAIT_BITSET];
    let operation = |operation: &i32| {
        vec![Check::Bits(
            1,
            all_but(options),
            u64::from(operation.unsigned_abs()),
        )]
    };
    vec![Allowed {
        call: Sysno::futex,
        when: operations.iter().map(operation).collect(),
    }]
}

/// Signals of a fault or of the end, whose handlers lift themselves before the signal ends the process; and
/// abort(3). Other handlers, that of the filters among them, stay what they were when the VM started.
fn ending_signals() -> Vec<Allowed> {
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

/// An event loop, and what tells it.
fn event_loop() -> Vec<Allowed> {
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

/// Connections that are there, and more of them from listeners that are there.
fn connections() -> Vec<Allowed> {
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
    // FIONREAD, FIONBIO.
    list.extend(ioctls(b'T', &[0x1b, 0x21]));
    list
}

/// Counters of the host that are open. The broker opens them.
fn perf_events() -> Vec<Allowed> {
    // ENABLE, DISABLE, REFRESH, RESET, PERIOD, SET_OUTPUT, ID, PAUSE_OUTPUT.
    let mut list = ioctls(b'$', &[0, 1, 2, 3, 4, 5, 7, 9]);
    // Requests to the broker, with descriptors.
    list.extend(any(&[Sysno::sendmsg, Sysno::recvmsg]));
    list.extend(any(&[
        Sysno::pread64,
        // The clock's events.
        Sysno::timer_create,
        Sysno::timer_settime,
        Sysno::timer_gettime,
        Sysno::timer_delete,
        Sysno::membarrier,
    ]));
    list
}

/// Opening of counters without the broker, by [`Counting::OwnThread`]: on the calling thread, on
/// whichever CPU it runs. The attributes are behind a pointer.
fn own_perf_events() -> Vec<Allowed> {
    let (own, any_cpu, cloexec) = (0, u32::MAX, 8);
    let checks = [Check::Is(1, own), Check::Is(2, any_cpu), Check::Is(4, cloexec)];
    only(Sysno::perf_event_open, &checks)
}

/// The type of KVM's requests.
const KVMIO: u8 = 0xae;

/// Interrupts and memory of the guest.
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

/// A vCPU's state.
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

fn vcpu() -> Vec<Allowed> {
    // KVM_RUN first: it is the call that there are most of.
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

/// The driver in the guest sets up vhost-net, on a vCPU's thread, and the device's thread follows it.
fn vhost() -> Vec<Allowed> {
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
    // TUNSETOFFLOAD, TUNGETIFF, TUNSETVNETHDRSZ.
    list.extend(ioctls(b'T', &[208, 210, 216]));
    list
}

/// The image of a disk. Besides the disk's thread it is for who resets the disk, which writes back what is
/// not written yet: a vCPU's thread by its driver, the main thread at a reset or the end of the machine.
fn images() -> Vec<Allowed> {
    let mut list = any(&[
        Sysno::pread64,
        Sysno::pwrite64,
        Sysno::preadv,
        Sysno::pwritev,
        Sysno::preadv2,
        Sysno::pwritev2,
        Sysno::fsync,
        Sysno::fdatasync,
        Sysno::fallocate,
        Sysno::ftruncate,
        Sysno::fstatfs,
    ]);
    // BLKSSZGET, BLKGETSIZE64, BLKDISCARD, BLKZEROOUT.
    list.extend(ioctls(0x12, &[104, 114, 119, 127]));
    list
}

fn device() -> Vec<Allowed> {
    let mut list = event_loop();
    list.extend(vhost());
    list.extend(images());
    list.extend(ioctls(KVMIO, KVM_VM));
    list
}

fn socket() -> Vec<Allowed> {
    let mut list = event_loop();
    list.extend(connections());
    list.extend(ioctls(KVMIO, KVM_VM));
    list
}

/// It speaks to the process that reads the guest's kernel, and gets a socket to it from its keeper.
fn profiler() -> Vec<Allowed> {
    any(&[Sysno::recvfrom, Sysno::recvmsg, Sysno::sendto, Sysno::sendmsg])
}

/// The debugger stops the guest and the events that count it.
fn debugger() -> Vec<Allowed> {
    let mut list = event_loop();
    list.extend(connections());
    list.extend(perf_events());
    list.extend(ioctls(KVMIO, KVM_VM));
    list
}

fn main() -> Vec<Allowed> {
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
            0x9f, // GET_PIT2
            0xa0, // SET_PIT2
            0xb2, // SET_PMU_EVENT_FILTER
        ],
    ));
    list.extend(ioctls(KVMIO, KVM_VM));
    // vCPUs that come are set up here.
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
    // Rings and sealed texts are memory files, which are opened once more by the name that /proc has for
    // them. A restart reads the kernel again. No file is made.
    let may = libc::O_ACCMODE | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_LARGEFILE | libc::O_NOCTTY;
    let others = u64::from(!may.unsigned_abs());
    list.extend(only(Sysno::openat, &[Check::Without(2, others)]));
    list.extend(only(Sysno::open, &[Check::Without(1, others)]));
    // A restart with --prealloc.
    list.extend(one_of(
        Sysno::madvise,
        2,
        &[libc::MADV_POPULATE_WRITE.unsigned_abs()],
    ));
    // A lease of a ring's memory file, whose signal is ignored by default and goes to this process.
    list.extend(only(
        Sysno::fcntl,
        &[Check::Is(1, F_SETSIG), Check::Is(2, libc::SIGURG.unsigned_abs())],
    ));
    let leases = [libc::F_SETLEASE, libc::F_ADD_SEALS, libc::F_GET_SEALS];
    list.extend(one_of(Sysno::fcntl, 1, &leases.map(i32::unsigned_abs)));
    list.extend(any(&[
        Sysno::memfd_create,
        Sysno::dup2,
        Sysno::dup3,
        Sysno::mincore,
        // Back ends that end.
        Sysno::wait4,
        Sysno::waitid,
        Sysno::geteuid,
        Sysno::sysinfo,
    ]));
    list.extend(images());
    list
}

/// What the threads may do that it starts, before they confine themselves, and what takes them there.
fn starter(pid: u32, counting: Counting) -> Vec<Allowed> {
    let mut list = Vec::new();
    // The vCPUs' first, for the sake of KVM_RUN.
    for kind in [ThreadKind::Vcpu].into_iter().chain(ThreadKind::ALL) {
        if kind != ThreadKind::Starter {
            list.extend(of(kind, pid, counting));
        }
    }
    list.extend(only(
        Sysno::clone,
        &[Check::Bits(0, NEW_NAMESPACES | THREAD, THREAD)],
    ));
    // clone3 is what the filter beside this one answers.
    list.extend(any(&[
        Sysno::clone3,
        Sysno::sched_setaffinity,
        // Those that open no files.
        Sysno::landlock_restrict_self,
        // Those that give up capabilities.
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

/// What a process may do that works on bytes of a guest's making: memory, the socket that it has, and the
/// end. `pid` is its own.
pub(crate) fn of_worker(pid: u32) -> Vec<Allowed> {
    let mut list = of_any_worker();
    list.extend(only(Sysno::tgkill, &[Check::Is(0, pid)]));
    list
}

/// The same, whatever its number is.
fn of_any_worker() -> Vec<Allowed> {
    let mut list = any(&[
        Sysno::read,
        Sysno::write,
        Sysno::recvfrom,
        Sysno::sendto,
        Sysno::close,
        Sysno::munmap,
        Sysno::brk,
        // A clock that can be read is the rule.
        Sysno::clock_gettime,
        // Keys of hash tables.
        Sysno::getrandom,
        Sysno::exit,
        Sysno::exit_group,
        // Those of abort(3).
        Sysno::rt_sigprocmask,
        Sysno::getpid,
        Sysno::gettid,
    ]);
    list.extend(memory());
    list.extend(locks());
    list.extend(ending_signals());
    list.extend(one_of(Sysno::prctl, 0, &[PR_SET_VMA]));
    // The standard library looks whether a descriptor is there that it closes.
    list.extend(one_of(Sysno::fcntl, 1, &[libc::F_GETFD.unsigned_abs()]));
    list.extend(refused_to_workers());
    list
}

/// What workers and their keeper get an error for, and go on.
pub(crate) fn refused_to_workers() -> Vec<Allowed> {
    let mut list = asked_at_a_fault();
    // As other threads do: glibc's malloc asks for it.
    let others = other_than_reading();
    list.extend(only(Sysno::openat, &[Check::Without(2, others)]));
    list.extend(only(Sysno::open, &[Check::Without(1, others)]));
    list
}

/// What the keeper of such processes may do: start them, limit them, end them and wait for them. They inherit
/// its filter, so it may what they may.
pub(crate) fn of_keeper() -> Vec<Allowed> {
    let mut list = of_any_worker();
    list.extend(only(Sysno::clone, &[Check::Bits(0, NEW_NAMESPACES | THREAD, 0)]));
    list.extend(any(&[
        Sysno::tgkill,
        Sysno::kill,
        Sysno::wait4,
        Sysno::pipe2,
        Sysno::dup2,
        Sysno::setsockopt,
        Sysno::sendmsg,
        // The C library, in a process that was just started.
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

/// What the process may do that connects to sockets for the VM ([`crate::SocketBroker`]): look at files, make
/// local sockets and connect them, pass them on, and remove the files of the VM's own.
pub(crate) fn of_socket_broker() -> Vec<Allowed> {
    let mut list = of_any_worker();
    list.extend(any(&[
        Sysno::recvmsg,
        Sysno::sendmsg,
        Sysno::connect,
        Sysno::fstat,
    ]));
    let large_files = u64::from(!OFlags::LARGEFILE.bits());
    list.extend(only(
        Sysno::openat,
        &[Check::Bits(2, large_files, LOOK.bits().into())],
    ));
    let of_descriptor = u64::from(libc::AT_EMPTY_PATH.unsigned_abs());
    list.extend(only(
        Sysno::newfstatat,
        &[Check::Bits(3, of_descriptor, of_descriptor)],
    ));
    list.extend(only(Sysno::unlinkat, &[Check::Is(2, 0)]));
    list.extend(only(
        Sysno::socket,
        &[
            Check::Is(0, libc::AF_UNIX.unsigned_abs()),
            Check::Is(1, SOCKET_TYPE.unsigned_abs()),
            Check::Is(2, 0),
        ],
    ));
    list
}

/// What the broker of perf events may do: take a request, open an event on a thread, direct its signal, and
/// pass it on. `vm` is the VM's process, `signal` the only signal that events send.
pub(crate) fn of_perf_broker(vm: u32, signal: u32) -> Vec<Allowed> {
    let (cloexec, any_process, any_cpu) = (8, u32::MAX, u32::MAX);
    let mut list = any(&[
        Sysno::recvmsg,
        Sysno::sendmsg,
        Sysno::close,
        Sysno::clock_gettime,
        Sysno::clock_nanosleep,
        Sysno::restart_syscall,
        Sysno::exit_group,
        // The C library keeps its memory.
        Sysno::brk,
        Sysno::munmap,
    ]);
    list.extend(only(
        Sysno::perf_event_open,
        &[
            Check::Not(1, 0),
            Check::Not(1, any_process),
            Check::Is(2, any_cpu),
            Check::Is(4, cloexec),
        ],
    ));
    list.extend(only(
        Sysno::fcntl,
        &[Check::Is(1, F_SETSIG), Check::Is(2, signal)],
    ));
    let of_events = [
        F_SETOWN_EX,
        libc::F_GETFL.unsigned_abs(),
        libc::F_SETFL.unsigned_abs(),
    ];
    list.extend(one_of(Sysno::fcntl, 1, &of_events));
    // The standard library looks whether a descriptor is there that it closes.
    list.extend(one_of(Sysno::fcntl, 1, &[libc::F_GETFD.unsigned_abs()]));
    // Asks whether a thread is the VM's; signal 0 is sent to nobody.
    list.extend(only(Sysno::tgkill, &[Check::Is(0, vm), Check::Is(2, 0)]));
    list
}

#[cfg(test)]
mod tests;
