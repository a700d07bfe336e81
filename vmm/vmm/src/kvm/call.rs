//! Errors of KVM ioctls, with the name of the failed call.

/// Error of a KVM call: the name of the call and its errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed")]
pub struct KvmIoctlError {
    call: &'static str,
    #[source]
    source: kvm_ioctls::Error,
}

impl KvmIoctlError {
    /// Returns a closure for `map_err` that adds the name of the failed `call` to the error.
    #[inline]
    pub(super) fn of(call: &'static str) -> impl Fn(kvm_ioctls::Error) -> Self {
        #[cfg(test)]
        log::record(call);
        move |source| Self { call, source }
    }

    /// Creates an error for a call that succeeded but whose result cannot be used, for example
    /// because it contains fewer registers than requested.
    pub fn with_errno(call: &'static str, errno: i32) -> Self {
        Self::of(call)(kvm_ioctls::Error::new(errno))
    }

    /// Returns the name of the call as in the KVM API documentation.
    pub fn call(&self) -> &'static str {
        self.call
    }

    /// Returns the errno of the failed call.
    #[inline]
    pub fn errno(&self) -> i32 {
        self.source.errno()
    }
}

/// Record of the KVM calls that a thread makes, for tests of the order of calls.
#[cfg(test)]
pub(crate) mod log {
    use std::cell::RefCell;

    thread_local! {
        static CALLS: RefCell<Option<Vec<&'static str>>> = const { RefCell::new(None) };
    }

    /// Starts to record the names of KVM calls on this thread.
    pub(crate) fn start() {
        CALLS.set(Some(Vec::new()));
    }

    /// Stops recording, and returns the names of the calls since [`start`].
    pub(crate) fn finish() -> Vec<&'static str> {
        CALLS.take().unwrap_or_default()
    }

    pub(super) fn record(call: &'static str) {
        CALLS.with_borrow_mut(|calls| calls.as_mut().map(|calls| calls.push(call)));
    }
}

#[cfg(test)]
mod tests {
    use perf_core::error_line;

    use super::*;

    #[test]
    fn kvm_error_names_call_and_errno() {
        let e = KvmIoctlError::with_errno("KVM_SET_REGS", libc::EINVAL);
        assert_eq!((e.call(), e.errno()), ("KVM_SET_REGS", libc::EINVAL));
        assert_eq!(
            error_line(&e),
            "KVM_SET_REGS failed: Invalid argument (os error 22)"
        );
    }
}
