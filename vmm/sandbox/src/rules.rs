//! What a system call may be asked for: conditions on its arguments.

use syscalls::Sysno;

/// A condition on one argument, counted from 0. A filter sees registers only, nothing behind a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// Its low 32 bits are this.
    Is(u8, u32),
    /// Its low 32 bits are anything else.
    Not(u8, u32),
    /// None of these of its low 32 bits is set.
    Without(u8, u64),
    /// Of the first bits, which are of its low 32, the second are set and no others.
    Bits(u8, u64, u64),
}

/// A system call that a thread may make.
#[derive(Clone, Debug)]
pub(crate) struct Allowed {
    pub(crate) call: Sysno,
    /// One of these must hold in whole; none: whatever the arguments are.
    pub(crate) when: Vec<Vec<Check>>,
}

/// Each of `calls`, whatever its arguments.
pub(crate) fn any(calls: &[Sysno]) -> Vec<Allowed> {
    let any = |call: &Sysno| Allowed {
        call: *call,
        when: Vec::new(),
    };
    calls.iter().map(any).collect()
}

/// `call` if all of `checks` hold.
pub(crate) fn only(call: Sysno, checks: &[Check]) -> Vec<Allowed> {
    vec![Allowed {
        call,
        when: vec![checks.to_vec()],
    }]
}

/// `call` with one of `values` as argument `argument`.
pub(crate) fn one_of(call: Sysno, argument: u8, values: &[u32]) -> Vec<Allowed> {
    let when = values.iter().map(|value| vec![Check::Is(argument, *value)]);
    vec![Allowed {
        call,
        when: when.collect(),
    }]
}

/// `ioctl(2)` with one of these requests: type and number (ioctl(2), `_IOC`). Direction and size are the
/// kernel's to check.
pub(crate) fn ioctls(kind: u8, numbers: &[u8]) -> Vec<Allowed> {
    let request = |number: &u8| vec![Check::Bits(1, 0xffff, u64::from(kind) << 8 | u64::from(*number))];
    vec![Allowed {
        call: Sysno::ioctl,
        when: numbers.iter().map(request).collect(),
    }]
}
