//! Tests of the filter programs of each thread kind, which an interpreter runs in the same way as
//! the kernel. `tests/it/threads.rs` checks some of these calls on real threads.

use std::collections::BTreeSet;

use proptest::prelude::*;
use seccompiler::{BpfProgram, SeccompAction};

use super::*;
use crate::filter;

/// `AUDIT_ARCH_X86_64` (include/uapi/linux/audit.h).
const X86_64: u32 = 0xc000_003e;
const I386: u32 = 0x4000_0003;
/// Seccomp action that terminates the process (include/uapi/linux/seccomp.h).
const KILL: u32 = 0x8000_0000;
const TRAP: u32 = 0x3_0000;
const EPERM: u32 = 0x5_0001;
const LET: u32 = 0x7fff_0000;
/// Process ID in the filters under test.
const PID: u32 = 4321;

/// Interprets a filter program with the instructions that seccomp accepts (bpf(4), linux/filter.h).
fn run(program: &BpfProgram, arch: u32, call: u32, arguments: [u64; 6]) -> u32 {
    let words = arguments
        .iter()
        .flat_map(|word| [*word as u32, (*word >> 32) as u32]);
    let data: Vec<u32> = [call, arch, 0, 0].into_iter().chain(words).collect();
    let (mut accumulator, mut at) = (0u32, 0usize);
    loop {
        let step = &program[at];
        at += 1;
        let jump = |condition: bool| usize::from(if condition { step.jt } else { step.jf });
        match step.code {
            // Instructions LD W ABS, ALU AND K and RET K.
            0x20 => accumulator = data[step.k as usize / 4],
            0x54 => accumulator &= step.k,
            0x06 => return step.k,
            // Jump instructions JA, JEQ, JGT, JGE and JSET.
            0x05 => at += step.k as usize,
            0x15 => at += jump(accumulator == step.k),
            0x25 => at += jump(accumulator > step.k),
            0x35 => at += jump(accumulator >= step.k),
            0x45 => at += jump(accumulator & step.k != 0),
            code => panic!("instruction {code:#x}"),
        }
    }
}

/// Filters of one thread kind.
struct Filters([BpfProgram; 2]);

impl Filters {
    fn of(kind: SandboxedThreadKind) -> Self {
        Self::with(kind, PerfEventAccess::Broker)
    }

    fn with(kind: SandboxedThreadKind, counting: PerfEventAccess) -> Self {
        let mut list = super::of(kind, PID, counting);
        list.extend(denied_calls(kind));
        let allow = filter::compile(&list, SeccompAction::Trap).unwrap();
        Self([filter::refuse(&denied_calls(kind)).unwrap(), allow])
    }

    /// Returns the result of the two filters of a thread for a call: the more restrictive of the
    /// two actions, as in the kernel.
    fn answer(&self, arch: u32, call: u32, arguments: [u64; 6]) -> u32 {
        let answers = self.0.iter().map(|program| run(program, arch, call, arguments));
        answers.min_by_key(|answer| answer.cast_signed()).unwrap()
    }

    fn to(&self, call: Sysno, arguments: &[u64]) -> u32 {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        self.answer(X86_64, call.id().cast_unsigned(), all)
    }
}

/// Returns whether `list` allows a call. The list is evaluated directly, without compilation to a
/// filter program.
fn is_on(list: &[AllowedSyscall], call: u32, arguments: [u64; 6]) -> bool {
    let holds = |check: &ArgumentCheck| {
        let of = |at: u8| arguments[usize::from(at)] & 0xffff_ffff;
        match *check {
            ArgumentCheck::Is(at, value) => of(at) == u64::from(value),
            ArgumentCheck::Not(at, value) => of(at) != u64::from(value),
            ArgumentCheck::Without(at, bits) => of(at) & bits == 0,
            ArgumentCheck::Bits(at, mask, bits) => of(at) & mask == bits,
        }
    };
    list.iter().any(|allowed| {
        let alternatives = &allowed.when;
        allowed.call.id().cast_unsigned() == call
            && (alternatives.is_empty() || alternatives.iter().any(|checks| checks.iter().all(holds)))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For every call with any arguments, the compiled programs have the same result as the lists.
    /// If a call has several entries, the conditions of one entry do not restrict another entry. A
    /// call that no entry allows is denied.
    #[test]
    fn programs_implement_lists(
        kind in prop::sample::select(&SandboxedThreadKind::ALL[..]),
        words in prop::collection::vec(
            prop_oneof![
                Just(0u64),
                Just(u64::MAX),
                Just(u64::from(PID)),
                0u64..40,
                (0u64..256).prop_map(|n| 0xae00 | n),
                (0u64..256).prop_map(|n| 0x5400 | n),
                proptest::arbitrary::any::<u64>(),
            ],
            6,
        ),
    ) {
        let filters = Filters::of(kind);
        let (list, refused) = (super::of(kind, PID, PerfEventAccess::Broker), denied_calls(kind));
        let arguments: [u64; 6] = words.try_into().unwrap();
        for call in 0..500 {
            let right = match (is_on(&refused, call, arguments), is_on(&list, call, arguments)) {
                (true, _) => EPERM,
                (false, true) => LET,
                (false, false) => TRAP,
            };
            let name = Sysno::new(call as usize);
            prop_assert_eq!(filters.answer(X86_64, call, arguments), right, "{}: {:?}", kind, name);
        }
    }
}

/// Calls through other ABIs are denied, because the call numbers of 32-bit and x32 programs have
/// different meanings.
#[test]
fn foreign_abi_calls_are_denied() {
    const X32: u32 = 0x4000_0000;
    for kind in SandboxedThreadKind::ALL {
        let filters = Filters::of(kind);
        for call in 0..500 {
            assert_eq!(filters.answer(I386, call, [0; 6]), KILL, "{kind}: {call} of i386");
            assert_eq!(
                filters.answer(X86_64, call | X32, [0; 6]),
                TRAP,
                "{kind}: {call} of x32"
            );
        }
    }
}

/// No thread kind may make calls that affect other processes or increase privileges, regardless of
/// the arguments.
#[test]
fn privilege_escalation_calls_are_denied() {
    #[rustfmt::skip]
    let none = [
        // Calls that start programs or affect other processes.
        Sysno::execve, Sysno::execveat, Sysno::fork, Sysno::vfork, Sysno::ptrace, Sysno::process_vm_readv,
        Sysno::process_vm_writev, Sysno::kill, Sysno::tkill, Sysno::rt_sigqueueinfo, Sysno::rt_tgsigqueueinfo,
        Sysno::pidfd_open, Sysno::pidfd_getfd, Sysno::pidfd_send_signal, Sysno::process_madvise, Sysno::kcmp,
        // Calls that change users, namespaces, mounts or root directories.
        Sysno::setuid, Sysno::setgid, Sysno::setresuid, Sysno::setresgid, Sysno::setgroups, Sysno::unshare,
        Sysno::setns, Sysno::mount, Sysno::umount2, Sysno::pivot_root, Sysno::chroot, Sysno::open_tree,
        Sysno::move_mount, Sysno::fsopen, Sysno::mount_setattr,
        // Calls that create, modify or look up files.
        Sysno::creat, Sysno::openat2, Sysno::open_by_handle_at, Sysno::mknod, Sysno::mkdir, Sysno::link,
        Sysno::symlink, Sysno::rename, Sysno::renameat2, Sysno::chmod, Sysno::fchmod, Sysno::chown,
        Sysno::truncate, Sysno::setxattr, Sysno::utimensat,
        // Calls that create sockets to which other processes could connect.
        Sysno::bind, Sysno::listen,
        // Calls of kernel subsystems with a history of vulnerabilities.
        Sysno::bpf, Sysno::userfaultfd, Sysno::io_uring_setup, Sysno::io_uring_enter, Sysno::keyctl,
        Sysno::add_key, Sysno::request_key, Sysno::init_module, Sysno::finit_module, Sysno::kexec_load,
        Sysno::kexec_file_load, Sysno::reboot, Sysno::swapon, Sysno::syslog, Sysno::iopl, Sysno::ioperm,
        Sysno::modify_ldt, Sysno::personality, Sysno::shmget, Sysno::msgget, Sysno::semget, Sysno::vmsplice,
        Sysno::splice, Sysno::fanotify_init, Sysno::inotify_init1, Sysno::clock_settime, Sysno::settimeofday,
    ];
    for kind in SandboxedThreadKind::ALL {
        let filters = Filters::of(kind);
        for call in none {
            for word in [0, 1, u64::from(PID), u64::MAX] {
                assert_eq!(
                    filters.to(call, &[word; 6]),
                    TRAP,
                    "{kind}: {call}({word:#x}, ...)"
                );
            }
        }
    }
}

/// A call with certain arguments is allowed only in certain thread kinds. In other kinds, it has
/// the result that the table states. The starter may make the calls of all threads that it starts.
#[test]
fn argument_rules_apply_per_thread_kind() {
    use SandboxedThreadKind::{Balloon, Debugger, Device, Main, Socket, Starter, Vcpu};
    let all = &SandboxedThreadKind::ALL[..];
    let kvm = |nr: u64| vec![3, 0xae00 | nr];
    let tty = |nr: u64| vec![0, 0x5400 | nr];
    let opened = |flags: libc::c_int| vec![0, 0, u64::from(flags.unsigned_abs())];
    let empty = u64::from(libc::AT_EMPTY_PATH.unsigned_abs());
    let filter = u64::from(libc::SECCOMP_SET_MODE_FILTER);
    let thread = THREAD | 0xf00;
    let other = u64::from(PID) + 1;
    /// Table row: purpose, call, arguments, thread kinds in which the call is allowed, and the
    /// action in other kinds.
    type Row<'a> = (&'a str, Sysno, Vec<u64>, &'a [SandboxedThreadKind], u32);
    #[rustfmt::skip]
    let rows: Vec<Row<'_>> = vec![
        ("runs a guest", Sysno::ioctl, kvm(0x80), &[Vcpu, Starter], TRAP),
        ("makes a VM", Sysno::ioctl, kvm(0x01), &[], TRAP),
        ("makes a vCPU", Sysno::ioctl, kvm(0x41), &[Main, Starter], TRAP),
        ("gives the guest memory", Sysno::ioctl, kvm(0x46), &[Main, Vcpu, Device, Socket, Debugger, Starter], TRAP),
        ("types into a terminal", Sysno::ioctl, tty(0x12), &[], TRAP),
        ("pastes into a console", Sysno::ioctl, tty(0x1c), &[], TRAP),
        ("makes a tap", Sysno::ioctl, tty(202), &[], TRAP),
        ("sets up a tap that is there", Sysno::ioctl, tty(208), &[Main, Vcpu, Device, Starter], TRAP),
        ("sets a terminal", Sysno::ioctl, tty(0x02), &[Main, Starter], TRAP),
        ("a local socket", Sysno::socket, vec![1, 1, 0], &[], TRAP),
        ("a connection", Sysno::connect, vec![], &[], TRAP),
        ("an internet socket", Sysno::socket, vec![2, 1, 0], &[], TRAP),
        ("a netlink socket", Sysno::socket, vec![16, 3, 0], &[], TRAP),
        ("a raw socket", Sysno::socket, vec![17, 3, 0], &[], TRAP),
        ("takes a connection", Sysno::accept4, vec![], &[Main, Socket, Debugger, Starter], TRAP),
        ("counts itself", Sysno::perf_event_open, vec![0, 0, u64::MAX, u64::MAX, 8], &[], TRAP),
        ("counts a thread", Sysno::perf_event_open, vec![0, 77, u64::MAX, u64::MAX, 8], &[], TRAP),
        ("counts a CPU", Sysno::perf_event_open, vec![0, u64::MAX, 0, u64::MAX, 8], &[], TRAP),
        ("starts a counter", Sysno::ioctl, vec![0, 0x2400], &[Main, Vcpu, Debugger, Starter], TRAP),
        ("filters a counter's addresses", Sysno::ioctl, vec![0, 0x2406], &[], TRAP),
        ("gives a counter a program", Sysno::ioctl, vec![0, 0x2408], &[], TRAP),
        ("changes what a counter counts", Sysno::ioctl, vec![0, 0x240b], &[], TRAP),
        ("reads a file", Sysno::openat, opened(libc::O_CLOEXEC), &[Main, Starter], EPERM),
        ("writes a file", Sysno::openat, opened(libc::O_WRONLY), &[Main, Starter], TRAP),
        ("makes a file", Sysno::openat, opened(libc::O_WRONLY | libc::O_CREAT), &[], TRAP),
        ("empties a file", Sysno::openat, opened(libc::O_WRONLY | libc::O_TRUNC), &[], TRAP),
        ("makes a file without a name", Sysno::openat, opened(libc::O_RDWR | libc::O_TMPFILE), &[], TRAP),
        ("holds a path", Sysno::openat, opened(libc::O_PATH), &[], TRAP),
        ("removes a file", Sysno::unlink, vec![], &[], TRAP),
        ("removes a file", Sysno::unlinkat, vec![], &[], TRAP),
        ("a memory file", Sysno::memfd_create, vec![], &[Main, Starter], TRAP),
        ("looks at a name", Sysno::newfstatat, vec![0, 0, 0, 0], &[], EPERM),
        ("looks at a name by statx", Sysno::statx, vec![0, 0, 0, 0], &[], EPERM),
        ("looks at a descriptor by statx", Sysno::statx, vec![0, 0, empty, 0], all, TRAP),
        ("looks at a descriptor", Sysno::newfstatat, vec![0, 0, 0, empty], all, TRAP),
        ("memory", Sysno::mmap, vec![0, 4096, 3, 0x22], all, TRAP),
        ("memory of a stack", Sysno::mmap, vec![0, 4096, 0, 0x2_4022], all, TRAP),
        ("memory for code", Sysno::mmap, vec![0, 4096, 5, 0x22], &[], TRAP),
        ("memory at an address of its choice", Sysno::mmap, vec![0, 4096, 3, 0x32], &[], TRAP),
        ("memory in place of a file's", Sysno::mmap, vec![0, 4096, 3, 0x4032], &[Balloon, Starter], TRAP),
        ("memory of a heap given back", Sysno::mmap, vec![0, 4096, 0, 0x32], all, TRAP),
        ("memory of a file", Sysno::mmap, vec![0, 4096, 1, 2], &[], TRAP),
        ("memory that is shared", Sysno::mmap, vec![0, 4096, 3, 1], &[Main, Vcpu, Starter], TRAP),
        ("memory of a ring, a second time", Sysno::mmap, vec![0, 4096, 1, 0x8011], &[Main, Vcpu, Starter], TRAP),
        ("memory that other processes inherit", Sysno::mmap, vec![0, 4096, 3, 0x21], &[], TRAP),
        ("larger memory", Sysno::mremap, vec![0, 1, 2, 1], all, TRAP),
        ("memory moved to an address", Sysno::mremap, vec![0, 1, 2, 3], &[], TRAP),
        ("memory given back", Sysno::madvise, vec![0, 1, 4], all, TRAP),
        ("memory taken from the host", Sysno::madvise, vec![0, 1, 23], &[Main, Starter], TRAP),
        ("a hole in a memory file", Sysno::madvise, vec![0, 1, 9], &[Balloon, Starter], TRAP),
        ("memory outside core dumps", Sysno::madvise, vec![0, 1, 16], &[Balloon, Starter], TRAP),
        ("memory in a core dump", Sysno::madvise, vec![0, 1, 17], &[], TRAP),
        ("a lock", Sysno::futex, vec![0, 0x189], all, TRAP),
        ("a lock with an owner", Sysno::futex, vec![0, 6], &[], TRAP),
        ("waiters moved", Sysno::futex, vec![0, 0x84], &[], TRAP),
        ("the end by abort", Sysno::rt_sigaction, vec![6], all, TRAP),
        ("another handler of forbidden calls", Sysno::rt_sigaction, vec![31], &[], TRAP),
        ("makes code of memory", Sysno::mprotect, vec![0, 4096, 5], &[], TRAP),
        ("a signal to a thread of its own", Sysno::tgkill, vec![PID.into(), 1, 0], all, TRAP),
        ("a signal to another process", Sysno::tgkill, vec![other, 1, 0], &[], TRAP),
        ("a thread", Sysno::clone, vec![thread], &[Starter], EPERM),
        ("a process", Sysno::clone, vec![17], &[], TRAP),
        ("a thread with users of its own", Sysno::clone, vec![thread | 0x1000_0000], &[], TRAP),
        ("its name", Sysno::prctl, vec![15], all, TRAP),
        ("can be traced", Sysno::prctl, vec![4, 1], &[], TRAP),
        ("keeps its capabilities", Sysno::prctl, vec![8, 1], &[], TRAP),
        ("another filter", Sysno::seccomp, vec![filter], &[Starter], TRAP),
        ("watches another thread's calls", Sysno::seccomp, vec![3], &[], TRAP),
        ("its limits", Sysno::prlimit64, vec![0, 3, 0, 1], &[], EPERM),
        ("sets its limits", Sysno::prlimit64, vec![0, 3, 1, 0], &[], TRAP),
        ("limits of another process", Sysno::prlimit64, vec![other, 3, 0, 1], &[], TRAP),
        ("the signal of a descriptor", Sysno::fcntl, vec![0, 10, 9], &[], TRAP),
        ("the signal of a lease", Sysno::fcntl, vec![0, 10, 23], &[Main, Starter], TRAP),
        ("who gets signals of a descriptor", Sysno::fcntl, vec![0, 15], &[], TRAP),
        ("the process that gets signals of a descriptor", Sysno::fcntl, vec![0, 8, 1], &[], TRAP),
        ("a lease", Sysno::fcntl, vec![0, 1024], &[Main, Starter], TRAP),
        ("a lock, or its end", Sysno::fcntl, vec![0, 37], all, TRAP),
        ("waits for a lock", Sysno::fcntl, vec![0, 38], &[], TRAP),
    ];
    for kind in SandboxedThreadKind::ALL {
        let filters = Filters::of(kind);
        for (what, call, arguments, may, others) in &rows {
            let right = if may.contains(&kind) { LET } else { *others };
            assert_eq!(filters.to(*call, arguments), right, "{kind}: {what}");
            // The kernel truncates these arguments to 32 bits, and the filter does the same.
            let high: Vec<u64> = arguments.iter().map(|word| word | 1 << 40).collect();
            assert_eq!(filters.to(*call, &high), right, "{kind}: {what}, with more bits");
        }
    }
}

/// Without a perf event broker, threads may open perf events only on themselves.
#[test]
fn without_broker_threads_open_own_events_only() {
    let open = |pid: u64, cpu: u64, flags: u64| vec![0, pid, cpu, u64::MAX, flags];
    for kind in SandboxedThreadKind::ALL {
        let filters = Filters::with(kind, PerfEventAccess::OwnThread);
        let counts = matches!(
            kind,
            SandboxedThreadKind::Main | SandboxedThreadKind::Vcpu | SandboxedThreadKind::Starter
        );
        let answer = |arguments: Vec<u64>| filters.to(Sysno::perf_event_open, &arguments);
        assert_eq!(
            answer(open(0, u64::MAX, 8)),
            if counts { LET } else { TRAP },
            "{kind}"
        );
        // Try to open events on another thread, any process, a CPU, and a control group.
        for arguments in [
            open(77, u64::MAX, 8),
            open(u64::MAX, u64::MAX, 8),
            open(0xffff_ffff, 0, 8),
            open(0, 0, 8),
            open(0, u64::MAX, 12),
        ] {
            assert_eq!(answer(arguments.clone()), TRAP, "{kind}: {arguments:?}");
        }
        assert_eq!(filters.to(Sysno::fcntl, &[3, 15, 0]), TRAP, "{kind}");
    }
}

/// The broker may open events on threads and send one signal, and may make no other calls.
#[test]
fn perf_broker_filter_allows_only_events() {
    const SIGNAL: u32 = 12;
    let list = of_perf_broker(PID, SIGNAL);
    let program = filter::compile(&list, SeccompAction::Trap).unwrap();
    let to = |call: Sysno, words: &[u64]| {
        let mut arguments = [0; 6];
        arguments[..words.len()].copy_from_slice(words);
        run(&program, X86_64, call.id().cast_unsigned(), arguments)
    };
    let any_cpu = u64::MAX;
    assert_eq!(to(Sysno::perf_event_open, &[0, 77, any_cpu, u64::MAX, 8]), LET);
    for (pid, cpu, flags) in [(u64::MAX, 0, 8), (0, any_cpu, 8), (77, 0, 8), (77, any_cpu, 4)] {
        let answer = to(Sysno::perf_event_open, &[0, pid, cpu, u64::MAX, flags]);
        assert_eq!(answer, TRAP, "{pid} {cpu} {flags}");
    }
    assert_eq!(to(Sysno::fcntl, &[3, F_SETSIG.into(), SIGNAL.into()]), LET);
    assert_eq!(to(Sysno::fcntl, &[3, F_SETSIG.into(), 9]), TRAP);
    assert_eq!(to(Sysno::tgkill, &[PID.into(), 77, 0]), LET);
    assert_eq!(to(Sysno::tgkill, &[PID.into(), 77, 9]), TRAP);
    assert_eq!(to(Sysno::tgkill, &[PID.wrapping_add(1).into(), 77, 0]), TRAP);
    for call in [
        Sysno::openat,
        Sysno::socket,
        Sysno::connect,
        Sysno::execve,
        Sysno::clone,
        Sysno::ptrace,
        Sysno::ioctl,
        Sysno::mmap,
        Sysno::mprotect,
        Sysno::read,
        Sysno::write,
        Sysno::kill,
        Sysno::prctl,
        Sysno::capset,
    ] {
        assert_eq!(to(call, &[0; 6]), TRAP, "{call}");
    }
}

/// Log mode logs exactly the calls that would terminate the VM in the mode `on`. The names of
/// thread kinds are unique.
#[test]
fn log_mode_allows_and_logs_what_on_mode_kills() {
    const LOG: u32 = 0x7ffc_0000;
    let names: BTreeSet<&str> = SandboxedThreadKind::ALL.iter().map(|kind| kind.name()).collect();
    assert_eq!(names.len(), SandboxedThreadKind::ALL.len());
    for kind in SandboxedThreadKind::ALL {
        let list = super::of(kind, PID, PerfEventAccess::Broker);
        let ends = filter::compile(&list, SeccompAction::Trap).unwrap();
        let logs = filter::compile(&list, SeccompAction::Log).unwrap();
        for call in 0..500 {
            let answers = [&ends, &logs].map(|program| run(program, X86_64, call, [1; 6]));
            assert!(
                matches!(answers, [TRAP, LOG] | [LET, LET]),
                "{kind}: {call}: {answers:x?}"
            );
        }
    }
}
