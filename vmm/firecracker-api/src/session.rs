//! The states of a VM, and the responses to API calls.
//!
//! Calls that configure the VM are valid only before the VM starts. Calls that change the running
//! VM are valid only after the start. A failed call changes nothing.

mod balloon;
mod metadata;
mod snapshots;

use mmds::config::DEFAULT_SIZE_LIMIT;
use mmds::store::MetadataStore;
use serde_json::Value;

use crate::API_VERSION;
use crate::fault::ApiFault;
use crate::http::{Request, Response};
use crate::resources::{RateLimiterChange, VmResources};
use crate::routes::{self, ApiCall};
use crate::types::{
    ActionType, ApiVersion, BalloonStats, InstanceInfo, InstanceState, Logger, Metrics, RequestedState,
    VmConfig,
};

/// Operations that an API session requires from the program, such as starting the VM. Errors are
/// one-line messages.
pub trait VmBackend {
    /// Checks that `perfvisor run` accepts `options`.
    ///
    /// # Errors
    /// Returns the error message of `perfvisor run` if it rejects the options.
    fn check_options(&mut self, options: &[String]) -> Result<(), String>;

    /// Checks that the file at `path` can be read.
    ///
    /// # Errors
    /// Returns a message if the file cannot be read.
    fn check_file(&mut self, path: &str) -> Result<(), String>;

    /// Sets the level and destination of log messages.
    ///
    /// # Errors
    /// Returns a message if the destination cannot be opened.
    fn set_logger(&mut self, logger: &Logger) -> Result<(), String>;

    /// Sets the destination of the metrics.
    ///
    /// # Errors
    /// Returns a message if the destination cannot be opened.
    fn set_metrics(&mut self, metrics: &Metrics) -> Result<(), String>;

    /// Starts the VM with options of `perfvisor run`. Returns when its vCPUs are running and its
    /// metadata service contains the document `metadata`, if any.
    ///
    /// # Errors
    /// Returns a message if the VM fails to start.
    fn start(&mut self, options: &[String], metadata: Option<&Value>) -> Result<(), String>;

    /// Replaces the document of the running VM's metadata service.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the VM rejects the request.
    fn put_metadata(&mut self, data: Value) -> Result<(), ApiFault>;

    /// Applies a merge patch to the document of the running VM's metadata service.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the VM rejects the request.
    fn patch_metadata(&mut self, patch: Value) -> Result<(), ApiFault>;

    /// Returns the document of the running VM's metadata service.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the VM rejects the request.
    fn metadata(&mut self) -> Result<Value, ApiFault>;

    /// Pauses all vCPUs of the running VM.
    ///
    /// # Errors
    /// Returns a message if the VM rejects the request.
    fn pause(&mut self) -> Result<(), String>;

    /// Resumes all vCPUs of the running VM.
    ///
    /// # Errors
    /// Returns a message if the VM rejects the request.
    fn resume(&mut self) -> Result<(), String>;

    /// Presses the guest's power button.
    ///
    /// # Errors
    /// Returns a message if the VM rejects the request.
    fn press_power_button(&mut self) -> Result<(), String>;

    /// Changes a rate limiter of the running VM.
    ///
    /// # Errors
    /// Returns a message if the VM rejects the request.
    fn change_limiter(&mut self, change: &RateLimiterChange) -> Result<(), String>;

    /// Saves the paused VM to the files `state` and `memory`. `config` is stored in the state file.
    ///
    /// # Errors
    /// Returns a message if the files cannot be written.
    fn save(&mut self, state: &str, memory: &str, config: &VmConfig) -> Result<(), String>;

    /// Returns the configuration stored in the state file of a snapshot.
    ///
    /// # Errors
    /// Returns a message if the file cannot be used.
    fn read_snapshot(&mut self, state: &str) -> Result<VmConfig, String>;

    /// Sets the target size of the running VM's balloon, in MiB.
    ///
    /// # Errors
    /// Returns a message if the VM rejects the request.
    fn set_balloon_size(&mut self, amount_mib: u32) -> Result<(), String>;

    /// Sets the interval at which the running VM updates its memory statistics, in seconds.
    ///
    /// # Errors
    /// Returns a message if the VM rejects the request.
    fn set_balloon_interval(&mut self, seconds: u16) -> Result<(), String>;

    /// Returns the sizes of the running VM's balloon and the latest memory statistics.
    ///
    /// # Errors
    /// Returns a message if the statistics are unavailable.
    fn balloon_stats(&mut self) -> Result<BalloonStats, String>;

    /// Writes the metrics to their destination.
    ///
    /// # Errors
    /// Returns a message if the metrics cannot be written.
    fn flush_metrics(&mut self) -> Result<(), String>;
}

/// A VM that is configured and controlled through the API.
#[derive(Debug)]
pub struct ApiSession<B> {
    backend: B,
    id: String,
    version: String,
    state: InstanceState,
    resources: VmResources,
    /// Document of the metadata service. Unused once a VM with a metadata service is running,
    /// because the VM then holds the document.
    metadata: MetadataStore,
    metadata_limit: usize,
}

impl<B: VmBackend> ApiSession<B> {
    /// Creates a session for the VM `id`. `version` is the version of the program.
    pub fn new(backend: B, id: String, version: String) -> Self {
        Self {
            backend,
            id,
            version,
            state: InstanceState::NotStarted,
            resources: VmResources::default(),
            metadata: MetadataStore::new(DEFAULT_SIZE_LIMIT),
            metadata_limit: DEFAULT_SIZE_LIMIT,
        }
    }

    /// Limits the document of the metadata service to `bytes` bytes of JSON.
    #[must_use]
    pub fn with_metadata_limit(mut self, bytes: usize) -> Self {
        self.metadata = MetadataStore::new(bytes);
        self.metadata_limit = bytes;
        self
    }

    /// Returns the state of the VM.
    pub fn state(&self) -> InstanceState {
        self.state
    }

    /// Returns the backend, which starts and controls the VM.
    pub fn backend(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Executes the API call of an HTTP request, and returns the response.
    pub fn answer(&mut self, request: &Request) -> Response {
        let response = routes::route(request).and_then(|call| self.call(call));
        response.unwrap_or_else(|fault| {
            let (method, path) = (request.method.name(), &request.path);
            log::warn!("{method} {path}: refused: {}", fault.message);
            Response::from(&fault)
        })
    }

    /// Replaces the whole configuration with `config`, as read from `--config-file`.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the configuration is invalid or incomplete.
    pub fn configure(&mut self, config: VmConfig) -> Result<(), ApiFault> {
        let resources = VmResources::from_config(config)?;
        resources.run_options()?;
        if let Some(logger) = resources.logger() {
            self.backend
                .set_logger(logger)
                .map_err(|e| ApiFault::bad(format!("log_path: {e}")))?;
        }
        if let Some(metrics) = resources.metrics() {
            self.backend
                .set_metrics(metrics)
                .map_err(|e| ApiFault::bad(format!("metrics_path: {e}")))?;
        }
        self.accept(resources).map(|_| ())
    }

    /// Executes an API call.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the call is invalid in the current state of the VM, or fails.
    pub fn call(&mut self, call: ApiCall) -> Result<Response, ApiFault> {
        match call {
            ApiCall::GetInstance => Ok(Response::json(&self.instance())),
            ApiCall::GetVersion => Ok(Response::json(&ApiVersion {
                firecracker_version: API_VERSION.into(),
            })),
            ApiCall::GetMachineConfig => Ok(Response::json(self.resources.machine())),
            ApiCall::GetVmConfig => Ok(Response::json(&self.resources.to_config())),
            ApiCall::GetPmu => Ok(Response::json(&self.resources.pmu())),
            ApiCall::GetBalloon => self.get_balloon(),
            ApiCall::GetBalloonStats => self.get_balloon_stats(),
            ApiCall::PatchBalloon(update) => self.update_balloon(update),
            ApiCall::PatchBalloonStats(update) => self.update_balloon_stats(update),
            ApiCall::GetMmds => self.get_metadata(),
            ApiCall::PutMmds(contents) => self.put_metadata(contents.0),
            ApiCall::PatchMmds(contents) => self.patch_metadata(contents.0),
            ApiCall::Act(action) => self.act(action),
            ApiCall::CreateSnapshot(params) => self.create_snapshot(&params),
            ApiCall::LoadSnapshot(params) => self.load_snapshot(&params),
            ApiCall::PatchVm(state) => self.change_state(state),
            ApiCall::PatchDrive(update) => {
                self.require_start("PATCH /drives")?;
                let mut changed = self.resources.clone();
                let change = changed.update_drive(update)?;
                self.change_limiters(changed, change.into_iter().collect())
            }
            ApiCall::PatchNetworkInterface(update) => {
                self.require_start("PATCH /network-interfaces")?;
                let mut changed = self.resources.clone();
                let changes = changed.update_interface(update)?;
                self.change_limiters(changed, changes)
            }
            configuring => self.set(configuring),
        }
    }

    /// Starts the VM.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the VM is already running, the configuration is incomplete, or
    /// the VM fails to start.
    pub fn start(&mut self) -> Result<(), ApiFault> {
        self.require_configuration("InstanceStart")?;
        let options = self.with_mmds(&self.resources, self.resources.run_options()?);
        if self.resources.hides_pci() {
            log::warn!("boot_args: pci=off is removed, because all devices are PCI functions");
        }
        let metadata = self.metadata_at_start(&self.resources);
        self.backend
            .start(&options, metadata.as_ref())
            .map_err(|e| ApiFault::bad(format!("InstanceStart: {e}")))?;
        self.state = InstanceState::Running;
        Ok(())
    }

    fn instance(&self) -> InstanceInfo {
        InstanceInfo {
            id: self.id.clone(),
            state: self.state,
            vmm_version: self.version.clone(),
            app_name: "Perfvisor".into(),
        }
    }

    /// Executes a call that changes the configuration.
    fn set(&mut self, call: ApiCall) -> Result<Response, ApiFault> {
        self.require_configuration("this call")?;
        let mut changed = self.resources.clone();
        match call {
            ApiCall::PutMachineConfig(machine) => changed.set_machine(machine)?,
            ApiCall::PatchMachineConfig(update) => changed.update_machine(update)?,
            ApiCall::PutBootSource(source) => changed.set_boot_source(source)?,
            ApiCall::PutDrive(drive) => changed.set_drive(drive)?,
            ApiCall::PutNetworkInterface(interface) => changed.set_interface(interface)?,
            ApiCall::PutVsock(vsock) => changed.set_vsock(vsock)?,
            ApiCall::PutEntropy(entropy) => changed.set_entropy(entropy),
            ApiCall::PutBalloon(balloon) => changed.set_balloon(balloon)?,
            ApiCall::PutMmdsConfig(config) => changed.set_mmds(config)?,
            ApiCall::PutSerial(serial) => changed.set_serial(serial)?,
            ApiCall::PutPmu(pmu) => changed.set_pmu(pmu)?,
            ApiCall::PutLogger(logger) => {
                changed.set_logger(logger.clone())?;
                self.backend
                    .set_logger(&logger)
                    .map_err(|e| ApiFault::bad(format!("log_path: {e}")))?;
            }
            ApiCall::PutMetrics(metrics) => {
                changed.set_metrics(metrics.clone())?;
                self.backend
                    .set_metrics(&metrics)
                    .map_err(|e| ApiFault::bad(format!("metrics_path: {e}")))?;
            }
            other => return Err(ApiFault::bad(format!("{other:?}: changes no configuration"))),
        }
        self.accept(changed)
    }

    /// Replaces the configuration with `changed` if the files that it names exist and
    /// `perfvisor run` accepts its options.
    fn accept(&mut self, changed: VmResources) -> Result<Response, ApiFault> {
        let known = self.resources.files();
        for (field, path) in changed.files() {
            if !known.contains(&(field, path)) {
                self.backend
                    .check_file(path)
                    .map_err(|e| ApiFault::bad(format!("{field}: {path}: {e}")))?;
            }
        }
        let options = changed.run_options().unwrap_or_else(|_| changed.device_options());
        let options = self.with_mmds(&changed, options);
        self.backend.check_options(&options).map_err(ApiFault::bad)?;
        self.resources = changed;
        Ok(Response::no_content())
    }

    fn act(&mut self, action: ActionType) -> Result<Response, ApiFault> {
        match action {
            ActionType::InstanceStart => self.start()?,
            ActionType::FlushMetrics => {
                self.require_start("FlushMetrics")?;
                if self.resources.metrics().is_none() {
                    return Err(ApiFault::bad("FlushMetrics: PUT /metrics has set no destination"));
                }
                self.backend
                    .flush_metrics()
                    .map_err(|e| ApiFault::bad(format!("FlushMetrics: {e}")))?;
            }
            ActionType::SendCtrlAltDel => {
                self.require_start("SendCtrlAltDel")?;
                self.backend
                    .press_power_button()
                    .map_err(|e| ApiFault::bad(format!("SendCtrlAltDel: {e}")))?;
            }
        }
        Ok(Response::no_content())
    }

    fn change_state(&mut self, state: RequestedState) -> Result<Response, ApiFault> {
        self.require_start("PATCH /vm")?;
        let (result, state) = match state {
            RequestedState::Paused => (self.backend.pause(), InstanceState::Paused),
            RequestedState::Resumed => (self.backend.resume(), InstanceState::Running),
        };
        result.map_err(|e| ApiFault::bad(format!("state: {e}")))?;
        self.state = state;
        Ok(Response::no_content())
    }

    /// Applies changes of rate limiters to the running VM, and then replaces the configuration with
    /// `changed`.
    fn change_limiters(
        &mut self,
        changed: VmResources,
        changes: Vec<RateLimiterChange>,
    ) -> Result<Response, ApiFault> {
        for change in changes {
            self.backend
                .change_limiter(&change)
                .map_err(|e| ApiFault::bad(format!("rate_limiter: {e}")))?;
        }
        self.resources = changed;
        Ok(Response::no_content())
    }

    fn require_configuration(&self, what: &str) -> Result<(), ApiFault> {
        if self.state == InstanceState::NotStarted {
            return Ok(());
        }
        Err(ApiFault::bad(format!(
            "{what}: not supported after the VM has started"
        )))
    }

    fn require_start(&self, what: &str) -> Result<(), ApiFault> {
        if self.state != InstanceState::NotStarted {
            return Ok(());
        }
        Err(ApiFault::bad(format!(
            "{what}: not supported before the VM has started"
        )))
    }
}

#[cfg(test)]
mod tests;
