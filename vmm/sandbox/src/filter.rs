//! Compilation of system call lists to seccomp programs.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use syscalls::Sysno;

use crate::rules::{AllowedSyscall, ArgumentCheck};

/// Compiles a program that allows the calls on `list` and applies the action `otherwise` to all
/// other calls.
pub(crate) fn compile(list: &[AllowedSyscall], otherwise: SeccompAction) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules(list)?, otherwise, SeccompAction::Allow, TargetArch::x86_64)?.try_into()
}

/// Compiles a program that makes the calls on `list` fail with an error and allows all other calls.
pub(crate) fn refuse(list: &[AllowedSyscall]) -> Result<BpfProgram, BackendError> {
    let error = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    SeccompFilter::new(rules(list)?, SeccompAction::Allow, error, TargetArch::x86_64)?.try_into()
}

fn rules(list: &[AllowedSyscall]) -> Result<BTreeMap<i64, Vec<SeccompRule>>, BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    for AllowedSyscall { call, when } in list {
        let alternatives = when.iter().map(|checks| rule(checks)).collect::<Result<_, _>>()?;
        let of_call: &mut Vec<SeccompRule> = match rules.entry(i64::from(call.id())) {
            std::collections::btree_map::Entry::Vacant(entry) => {
                entry.insert(alternatives);
                continue;
            }
            std::collections::btree_map::Entry::Occupied(entry) => entry.into_mut(),
        };
        // An entry without conditions subsumes all other entries for the same call.
        if of_call.is_empty() || when.is_empty() {
            of_call.clear();
            continue;
        }
        for alternative in alternatives {
            if !of_call.contains(&alternative) {
                of_call.push(alternative);
            }
        }
    }
    Ok(rules)
}

/// Compiles a program that makes `clone3(2)` fail, so that the C library uses `clone(2)` instead. A
/// filter can check the flags of `clone(2)`, which are passed in a register, but `clone3(2)` takes
/// them by pointer.
pub(crate) fn without_clone3() -> Result<BpfProgram, BackendError> {
    let rules = BTreeMap::from([(i64::from(Sysno::clone3.id()), Vec::new())]);
    let missing = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    SeccompFilter::new(rules, SeccompAction::Allow, missing, TargetArch::x86_64)?.try_into()
}

fn rule(checks: &[ArgumentCheck]) -> Result<SeccompRule, BackendError> {
    use SeccompCmpArgLen::Dword;
    let condition = |check: &ArgumentCheck| match *check {
        ArgumentCheck::Is(at, value) => SeccompCondition::new(at, Dword, SeccompCmpOp::Eq, value.into()),
        ArgumentCheck::Not(at, value) => SeccompCondition::new(at, Dword, SeccompCmpOp::Ne, value.into()),
        ArgumentCheck::Without(at, bits) => SeccompCondition::new(at, Dword, SeccompCmpOp::MaskedEq(bits), 0),
        ArgumentCheck::Bits(at, mask, bits) => {
            SeccompCondition::new(at, Dword, SeccompCmpOp::MaskedEq(mask), bits)
        }
    };
    SeccompRule::new(checks.iter().map(condition).collect::<Result<_, _>>()?)
}
