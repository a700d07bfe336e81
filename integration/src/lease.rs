//! Leases of test hosts from the pool of this process.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;

use crate::artefacts;
use crate::lab::LabOptions;
use crate::limit::ProcessTimeLimits;
use crate::pool::{LabNeed, Pool, PoolGrant, TestHostPoolError};
use crate::process::HostCommand;
use crate::report::HostUse;
use crate::test_host::{KvmGuestSupport, LabHost, TestHost, TestHostError, probe_kvm};

pub use crate::pool::TestHostLeaseMode;

static POOL: LazyLock<Result<Arc<Pool<LabHost>>, TestHostPoolError>> =
    LazyLock::new(|| Pool::of_this_machine().map(Arc::new));

/// Errors of labs that failed to boot, by lab options. A failed boot can take many minutes and is
/// therefore not repeated with the same options.
static FAILED: Mutex<BTreeMap<String, Arc<TestHostError>>> = Mutex::new(BTreeMap::new());

/// Shell script that removes the remains of a test from a lab: processes, network devices and
/// files.
const CLEAN: &str = "
left() { pidof perfvisor virtiofsd httpd >/dev/null; }
left && kill -9 $(pidof perfvisor virtiofsd httpd)
n=0
while left; do
	[ $n = 600 ] && { echo processes that cannot be killed; exit 1; }
	n=$((n + 1))
	sleep 0.1
done
for device in /sys/class/net/*/tun_flags; do
	[ -e $device ] || continue
	device=${device%/tun_flags}
	ip link del ${device##*/} || exit 1
done
rm -rf /run/perfvisor /tmp/* || exit 1
";

/// Error returned when a test host cannot be leased from the pool.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TestHostLeaseError {
    /// The pool rejected the request.
    #[error(transparent)]
    Pool(#[from] TestHostPoolError),
    /// The test host could not be prepared, now or for an earlier test with the same options.
    #[error("{}", artefacts::describe(.0.as_ref()))]
    Prepare(Arc<TestHostError>),
}

impl From<TestHostError> for TestHostLeaseError {
    fn from(error: TestHostError) -> Self {
        Self::Prepare(Arc::new(error))
    }
}

/// A request for a test host that the pool has admitted. The request counts against the pool's
/// limits until it is dropped.
struct Admission {
    watch: HostUse,
    grant: PoolGrant<LabHost>,
}

impl Admission {
    /// Waits until the pool admits a request. Also returns an idle lab with the required options,
    /// if there is one.
    fn new(
        access: TestHostLeaseMode,
        need: Option<LabNeed>,
    ) -> Result<(Self, Option<LabHost>), TestHostPoolError> {
        let pool = POOL.as_ref().map_err(TestHostPoolError::clone)?;
        let watch = HostUse::begin();
        let (grant, warm) = pool.acquire(access, need)?;
        Ok((Self { watch, grant }, warm))
    }
}

impl LabHost {
    /// Waits until the pool admits another lab, and boots the lab.
    ///
    /// # Errors
    /// Returns an error if the calling thread holds a lease, or if
    /// [`Lab::boot`](crate::lab::Lab::boot) fails.
    pub fn boot(options: &LabOptions) -> Result<Self, TestHostError> {
        let need = LabNeed {
            key: None,
            memory_mib: options.memory_mib.into(),
        };
        let (admission, _) = Admission::new(TestHostLeaseMode::Shared, Some(need))?;
        let host = Self::boot_first(options)?;
        admission.watch.runs_in(&host.name());
        Ok(host.keep(Box::new(admission)))
    }
}

impl TestHost {
    /// Leases a test host for Linux guests. Other tests may run concurrently.
    ///
    /// The environment variable `PERFVISOR_PLACE` (`direct` or `lab`) overrides the choice between
    /// this machine and the lab.
    ///
    /// # Errors
    /// Returns an error if the host cannot be prepared or the calling thread holds a lease.
    pub fn shared() -> Result<TestHostLease, TestHostLeaseError> {
        Self::lease(&LabOptions::default(), TestHostLeaseMode::Shared)
    }

    /// Leases a test host for time measurements of Linux guests. No other test runs concurrently.
    ///
    /// # Errors
    /// Returns the same errors as [`TestHost::shared`].
    pub fn exclusive() -> Result<TestHostLease, TestHostLeaseError> {
        Self::lease(&LabOptions::default(), TestHostLeaseMode::Exclusive)
    }

    /// Leases this machine, or a lab with `options` if Linux guests do not run on this machine
    /// ([`TestHost::is_direct`]). Tests that request equal options can use the same lab one after
    /// the other.
    ///
    /// # Errors
    /// Returns the same errors as [`TestHost::shared`].
    pub fn lease(
        options: &LabOptions,
        access: TestHostLeaseMode,
    ) -> Result<TestHostLease, TestHostLeaseError> {
        TestHostLease::new((!Self::is_direct()?).then_some(options), access)
    }

    /// Leases a lab, even if this machine can run Linux guests.
    ///
    /// # Errors
    /// Returns the same errors as [`TestHost::shared`].
    pub fn lab(access: TestHostLeaseMode) -> Result<TestHostLease, TestHostLeaseError> {
        TestHostLease::new(Some(&LabOptions::default()), access)
    }

    /// Leases a test host for bare-metal guests: this machine if it has a usable KVM, otherwise a
    /// lab.
    ///
    /// # Errors
    /// Returns the same errors as [`TestHost::shared`].
    pub fn for_bare_metal(access: TestHostLeaseMode) -> Result<TestHostLease, TestHostLeaseError> {
        let options = LabOptions::default();
        TestHostLease::new((probe_kvm() == KvmGuestSupport::None).then_some(&options), access)
    }

    /// Prepares a test host that is not returned to the pool: this machine, or a new lab with
    /// `options` if Linux guests do not run on this machine. The pool must admit the lab.
    ///
    /// # Errors
    /// Returns the same errors as [`TestHost::shared`].
    pub fn choose(options: &LabOptions) -> Result<TestHost, TestHostError> {
        if Self::is_direct()? {
            Self::direct()
        } else {
            Ok(TestHost::Lab(LabHost::boot(options)?))
        }
    }
}

/// A test host leased by one test. On drop, a lab is cleaned and returned to the pool; after a
/// failed test, it is switched off instead.
pub struct TestHostLease {
    /// The test host and its admission. `None` only while the lease is being dropped.
    leased: Option<(TestHost, Admission)>,
    need: Option<LabNeed>,
}

impl TestHostLease {
    /// Leases a lab with the given options, or this machine if `lab` is `None`.
    fn new(lab: Option<&LabOptions>, access: TestHostLeaseMode) -> Result<Self, TestHostLeaseError> {
        let need = lab.map(|options| LabNeed {
            key: Some(format!("{options:?}")),
            memory_mib: options.memory_mib.into(),
        });
        let (admission, warm) = Admission::new(access, need.clone())?;
        let place = match (lab, warm) {
            (None, _) => TestHost::direct()?,
            (Some(_), Some(host)) => TestHost::Lab(host),
            (Some(options), None) => TestHost::Lab(boot(options)?),
        };
        admission.watch.runs_in(&match &place {
            TestHost::Direct(_) => "this machine".to_owned(),
            TestHost::Lab(host) => host.name(),
        });
        Ok(Self {
            leased: Some((place, admission)),
            need,
        })
    }
}

/// Boots a lab unless one with the same options has failed to boot.
fn boot(options: &LabOptions) -> Result<LabHost, TestHostLeaseError> {
    let failed = || FAILED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = format!("{options:?}");
    if let Some(error) = failed().get(&key) {
        return Err(TestHostLeaseError::Prepare(Arc::clone(error)));
    }
    LabHost::boot_first(options).map_err(|error| {
        let error = Arc::new(TestHostError::from(error));
        failed().insert(key, Arc::clone(&error));
        TestHostLeaseError::Prepare(error)
    })
}

impl Deref for TestHostLease {
    type Target = TestHost;

    fn deref(&self) -> &TestHost {
        match &self.leased {
            Some((place, _)) => place,
            None => unreachable!("the place is taken out by drop alone"),
        }
    }
}

impl Drop for TestHostLease {
    fn drop(&mut self) {
        let Some((place, admission)) = self.leased.take() else {
            return;
        };
        let Admission { watch, grant } = admission;
        drop(watch);
        let (
            TestHost::Lab(host),
            Some(LabNeed {
                key: Some(key),
                memory_mib,
            }),
        ) = (place, self.need.take())
        else {
            return;
        };
        // A failed test leaves the lab in an unknown state.
        if thread::panicking() {
            return;
        }
        match clean(&host) {
            Ok(()) => grant.return_lab(key, memory_mib, host),
            Err(why) => eprintln!(
                "{} is switched off, as it could not be cleaned: {why}",
                host.name()
            ),
        }
    }
}

/// Removes the remains of the last test from a lab, so that the next test can use it.
fn clean(host: &LabHost) -> Result<(), String> {
    let lab = host.last();
    let output = lab
        .start(&HostCommand::shell(CLEAN))
        .and_then(|process| process.wait(ProcessTimeLimits::GENEROUS))
        .map_err(|error| error.to_string())?;
    if output.success() {
        return Ok(());
    }
    Err(output.stdout_text() + &output.stderr_text())
}
