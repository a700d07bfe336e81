//! Places that tests lease from the pool of this process.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::thread;

use crate::artefacts;
use crate::lab::LabOptions;
use crate::limit::Limit;
use crate::place::{LabHost, Place, PlaceError};
use crate::pool::{Access, Grant, LabNeed, Pool, PoolError};
use crate::process::Command;
use crate::report::Watch;

static POOL: LazyLock<Result<Arc<Pool<LabHost>>, PoolError>> =
    LazyLock::new(|| Pool::of_this_machine().map(Arc::new));

/// Labs that could not be prepared, by their options. Each attempt may take many minutes, so there is one.
static FAILED: Mutex<BTreeMap<String, Arc<PlaceError>>> = Mutex::new(BTreeMap::new());

/// What a test leaves in a lab: VMs and servers that are about to end, network devices, files.
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

/// Why a place cannot be leased.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LeaseError {
    /// The pool does not admit the request.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The place could not be prepared, now or for an earlier test.
    #[error("{}", artefacts::describe(.0.as_ref()))]
    Prepare(Arc<PlaceError>),
}

impl From<PlaceError> for LeaseError {
    fn from(error: PlaceError) -> Self {
        Self::Prepare(Arc::new(error))
    }
}

/// A part of the pool's limit.
pub(crate) struct Admission {
    watch: Watch,
    grant: Grant<LabHost>,
}

impl Admission {
    /// Waits for a part of the limit, and for a lab of that kind if one is booted.
    fn new(access: Access, need: Option<LabNeed>) -> Result<(Self, Option<LabHost>), PoolError> {
        let pool = POOL.as_ref().map_err(PoolError::clone)?;
        let watch = Watch::begin();
        let (grant, warm) = pool.acquire(access, need)?;
        Ok((Self { watch, grant }, warm))
    }

    /// Notes where the test runs.
    pub(crate) fn runs_in(&self, place: &str) {
        self.watch.runs_in(place);
    }
}

/// Waits until one more lab with these options may be booted.
///
/// # Errors
/// As [`Pool::acquire`].
pub(crate) fn admit_one_lab(options: &LabOptions) -> Result<Admission, PoolError> {
    let need = LabNeed {
        key: None,
        memory_mib: options.memory_mib.into(),
    };
    Ok(Admission::new(Access::Shared, Some(need))?.0)
}

/// A place that one test has until this is dropped. A lab is then cleaned and left to the next test, or
/// switched off if the test has failed.
pub struct PlaceLease {
    /// `None` while it is dropped.
    leased: Option<(Place, Admission)>,
    need: Option<LabNeed>,
}

impl PlaceLease {
    /// Leases a lab with these options, or this machine.
    pub(crate) fn new(lab: Option<&LabOptions>, access: Access) -> Result<Self, LeaseError> {
        let need = lab.map(|options| LabNeed {
            key: Some(format!("{options:?}")),
            memory_mib: options.memory_mib.into(),
        });
        let (admission, warm) = Admission::new(access, need.clone())?;
        let place = match (lab, warm) {
            (None, _) => Place::direct()?,
            (Some(_), Some(host)) => Place::Lab(host),
            (Some(options), None) => Place::Lab(boot(options)?),
        };
        admission.runs_in(&match &place {
            Place::Direct(_) => "this machine".to_owned(),
            Place::Lab(host) => host.name(),
        });
        Ok(Self {
            leased: Some((place, admission)),
            need,
        })
    }
}

/// Boots a lab unless one with the same options has failed to.
fn boot(options: &LabOptions) -> Result<LabHost, LeaseError> {
    let failed = || FAILED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = format!("{options:?}");
    if let Some(error) = failed().get(&key) {
        return Err(LeaseError::Prepare(Arc::clone(error)));
    }
    LabHost::boot_admitted(options).map_err(|error| {
        let error = Arc::new(PlaceError::from(error));
        failed().insert(key, Arc::clone(&error));
        LeaseError::Prepare(error)
    })
}

impl Deref for PlaceLease {
    type Target = Place;

    fn deref(&self) -> &Place {
        match &self.leased {
            Some((place, _)) => place,
            None => unreachable!("the place is taken out by drop alone"),
        }
    }
}

impl Drop for PlaceLease {
    fn drop(&mut self) {
        let Some((place, admission)) = self.leased.take() else {
            return;
        };
        let Admission { watch, grant } = admission;
        drop(watch);
        let (
            Place::Lab(host),
            Some(LabNeed {
                key: Some(key),
                memory_mib,
            }),
        ) = (place, self.need.take())
        else {
            return;
        };
        // What a failed test has left is not known.
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

/// Brings a lab into the state in which the next test expects it.
fn clean(host: &LabHost) -> Result<(), String> {
    let lab = host.last();
    let output = lab
        .start(&Command::shell(CLEAN))
        .and_then(|process| process.wait(Limit::GENEROUS))
        .map_err(|error| error.to_string())?;
    if output.success() {
        return Ok(());
    }
    Err(output.stdout_text() + &output.stderr_text())
}
