//! Rules for system calls: conditions on their arguments.

use syscalls::Sysno;

/// Condition on one argument of a system call. Arguments are counted from 0. Filters only see
/// register values and cannot dereference pointers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArgumentCheck {
    /// The low 32 bits are equal to the value.
    Is(u8, u32),
    /// The low 32 bits differ from the value.
    Not(u8, u32),
    /// None of the bits in the mask is set. Only the low 32 bits of the argument are checked.
    Without(u8, u64),
    /// Among the bits in the first mask, exactly the bits in the second mask are set. Only the low
    /// 32 bits of the argument are checked.
    Bits(u8, u64, u64),
}

/// A permitted system call.
#[derive(Clone, Debug)]
pub(crate) struct AllowedSyscall {
    pub(crate) call: Sysno,
    /// Alternatives, each of which is a list of conditions that must all hold. Empty if any
    /// arguments are permitted.
    pub(crate) when: Vec<Vec<ArgumentCheck>>,
}

/// Permits each of `calls` with any arguments.
pub(crate) fn any(calls: &[Sysno]) -> Vec<AllowedSyscall> {
    let any = |call: &Sysno| AllowedSyscall {
        call: *call,
        when: Vec::new(),
    };
    calls.iter().map(any).collect()
}

/// Permits `call` if all of `checks` hold.
pub(crate) fn with_checks(call: Sysno, checks: &[ArgumentCheck]) -> Vec<AllowedSyscall> {
    vec![AllowedSyscall {
        call,
        when: vec![checks.to_vec()],
    }]
}

/// Permits `call` with any of `values` as argument `argument`.
pub(crate) fn one_of(call: Sysno, argument: u8, values: &[u32]) -> Vec<AllowedSyscall> {
    let when = values
        .iter()
        .map(|value| vec![ArgumentCheck::Is(argument, *value)]);
    vec![AllowedSyscall {
        call,
        when: when.collect(),
    }]
}

/// Permits `ioctl(2)` with requests of type `kind` and the given numbers (ioctl(2), `_IOC`). The
/// filter ignores the direction and the size in a request, which the kernel checks.
pub(crate) fn ioctls(kind: u8, numbers: &[u8]) -> Vec<AllowedSyscall> {
    let request = |number: &u8| {
        vec![ArgumentCheck::Bits(
            1,
            0xffff,
            u64::from(kind) << 8 | u64::from(*number),
        )]
    };
    vec![AllowedSyscall {
        call: Sysno::ioctl,
        when: numbers.iter().map(request).collect(),
    }]
}
