//! A call of KVM that failed.

/// Why a call of KVM failed: which call, and its errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed")]
pub struct CallError {
    call: &'static str,
    #[source]
    source: kvm_ioctls::Error,
}

impl CallError {
    /// For `map_err` behind the call of this name.
    #[inline]
    pub(super) fn of(call: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        move |source| Self { call, source }
    }

    /// As if the call of this name had returned `errno`, for what it returned instead of an error: fewer
    /// registers than were asked for, say.
    pub fn with_errno(call: &'static str, errno: i32) -> Self {
        Self::of(call)(kvm_ioctls::Error::new(errno))
    }

    /// The name of the call, as the KVM API spells it.
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// What the call set errno to.
    #[inline]
    pub fn errno(&self) -> i32 {
        self.source.errno()
    }
}

#[cfg(test)]
mod tests {
    use perf_core::error_line;

    use super::*;

    /// A user reads which call failed and why.
    #[test]
    fn an_error_names_the_call_and_errno() {
        let e = CallError::with_errno("KVM_SET_REGS", libc::EINVAL);
        assert_eq!((e.call(), e.errno()), ("KVM_SET_REGS", libc::EINVAL));
        assert_eq!(
            error_line(&e),
            "KVM_SET_REGS failed: Invalid argument (os error 22)"
        );
    }
}
