//! The states of a VM, and the answers to calls.
//!
//! Calls that configure the VM are valid before the start only; those that change its state, after
//! it only. A call that fails changes nothing.

mod balloon;
mod metadata;
mod snapshots;

use mmds::config::DEFAULT_SIZE_LIMIT;
use mmds::store::MetadataStore;
use serde_json::Value;

use crate::API_VERSION;
use crate::fault::Fault;
use crate::http::{Request, Response};
use crate::resources::{LimiterChange, Resources};
use crate::routes::{self, ApiCall};
use crate::types::{
    ActionType, ApiVersion, BalloonStats, InstanceInfo, InstanceState, Logger, Metrics, RequestedState,
    VmConfig,
};

/// The operations of the program that a session needs. Errors are messages in one line.
pub trait VmBackend {
    /// Checks that `perfvisor run` accepts `options`.
    ///
    /// # Errors
    /// Returns its error message.
    fn check_options(&mut self, options: &[String]) -> Result<(), String>;

    /// Checks that the file at `path` can be read.
    ///
    /// # Errors
    /// Returns the reason why not.
    fn check_file(&mut self, path: &str) -> Result<(), String>;

    /// Sets level and destination of log messages.
    ///
    /// # Errors
    /// Returns the reason why the destination cannot be opened.
    fn set_logger(&mut self, logger: &Logger) -> Result<(), String>;

    /// Sets the destination of metrics.
    ///
    /// # Errors
    /// Returns the reason why the destination cannot be opened.
    fn set_metrics(&mut self, metrics: &Metrics) -> Result<(), String>;

    /// Starts the VM with options of `perfvisor run`, and returns once its vCPUs run and its metadata
    /// service has the document `metadata`, if any.
    ///
    /// # Errors
    /// Returns the reason why the VM does not run.
    fn start(&mut self, options: &[String], metadata: Option<&Value>) -> Result<(), String>;

    /// Replaces the document of the running VM's metadata service.
    ///
    /// # Errors
    /// Returns the VM's refusal.
    fn put_metadata(&mut self, data: Value) -> Result<(), Fault>;

    /// Applies a merge patch to the document of the running VM's metadata service.
    ///
    /// # Errors
    /// Returns the VM's refusal.
    fn patch_metadata(&mut self, patch: Value) -> Result<(), Fault>;

    /// Returns the document of the running VM's metadata service.
    ///
    /// # Errors
    /// Returns the VM's refusal.
    fn metadata(&mut self) -> Result<Value, Fault>;

    /// Pauses all vCPUs.
    ///
    /// # Errors
    /// Returns the VM's refusal.
    fn pause(&mut self) -> Result<(), String>;

    /// Resumes all vCPUs.
    ///
    /// # Errors
    /// Returns the VM's refusal.
    fn resume(&mut self) -> Result<(), String>;

    /// Presses the guest's power button.
    ///
    /// # Errors
    /// Returns the VM's refusal.
    fn press_power_button(&mut self) -> Result<(), String>;

    /// Changes a rate limiter.
    ///
    /// # Errors
    /// Returns the VM's refusal.
    fn change_limiter(&mut self, change: &LimiterChange) -> Result<(), String>;

    /// Saves the paused VM to the files `state` and `memory`. The state contains `config`.
    ///
    /// # Errors
    /// Returns the reason why the files were not written.
    fn save(&mut self, state: &str, memory: &str, config: &VmConfig) -> Result<(), String>;

    /// Returns the configuration in the state file of a snapshot.
    ///
    /// # Errors
    /// Returns the reason why the file cannot be used.
    fn read_snapshot(&mut self, state: &str) -> Result<VmConfig, String>;

    /// Sets the target size of the running VM's balloon, in MiB.
    ///
    /// # Errors
    /// Returns the VM's refusal.
    fn set_balloon_size(&mut self, amount_mib: u32) -> Result<(), String>;

    /// Sets the interval of the running VM's memory statistics, in seconds.
    ///
    /// # Errors
    /// Returns the VM's refusal.
    fn set_balloon_interval(&mut self, seconds: u16) -> Result<(), String>;

    /// Returns the sizes of the running VM's balloon, and the latest memory statistics.
    ///
    /// # Errors
    /// Returns the reason why the VM has none.
    fn balloon_stats(&mut self) -> Result<BalloonStats, String>;

    /// Writes the metrics to their destination.
    ///
    /// # Errors
    /// Returns the reason why they were not written.
    fn flush_metrics(&mut self) -> Result<(), String>;
}

/// A VM that is configured and controlled through the API.
#[derive(Debug)]
pub struct Session<B> {
    backend: B,
    id: String,
    version: String,
    state: InstanceState,
    resources: Resources,
    /// The document of the metadata service while no VM has one.
    metadata: MetadataStore,
    metadata_limit: usize,
}

impl<B: VmBackend> Session<B> {
    /// Creates a session for the VM `id`. `version` is the version of the program.
    pub fn new(backend: B, id: String, version: String) -> Self {
        Self {
            backend,
            id,
            version,
            state: InstanceState::NotStarted,
            resources: Resources::default(),
            metadata: MetadataStore::new(DEFAULT_SIZE_LIMIT),
            metadata_limit: DEFAULT_SIZE_LIMIT,
        }
    }

    /// Limits the document of the metadata service to `bytes` bytes of JSON text.
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

    /// Returns the backend.
    pub fn backend(&mut self) -> &mut B {
        &mut self.backend
    }

    /// Answers a request.
    pub fn answer(&mut self, request: &Request) -> Response {
        let response = routes::route(request).and_then(|call| self.call(call));
        response.unwrap_or_else(|fault| {
            let (method, path) = (request.method.name(), &request.path);
            log::warn!("{method} {path}: refused: {}", fault.message);
            Response::from(&fault)
        })
    }

    /// Replaces the configuration, as given by `--config-file`.
    ///
    /// # Errors
    /// Returns a [`Fault`] if the configuration is invalid or incomplete.
    pub fn configure(&mut self, config: VmConfig) -> Result<(), Fault> {
        let resources = Resources::from_config(config)?;
        resources.run_options()?;
        if let Some(logger) = resources.logger() {
            self.backend
                .set_logger(logger)
                .map_err(|e| Fault::bad(format!("log_path: {e}")))?;
        }
        if let Some(metrics) = resources.metrics() {
            self.backend
                .set_metrics(metrics)
                .map_err(|e| Fault::bad(format!("metrics_path: {e}")))?;
        }
        self.accept(resources).map(|_| ())
    }

    /// Executes a call.
    ///
    /// # Errors
    /// Returns a [`Fault`] if the call is invalid in this state, or fails.
    pub fn call(&mut self, call: ApiCall) -> Result<Response, Fault> {
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
    /// Returns a [`Fault`] if the VM runs already, the configuration is incomplete, or the start
    /// fails.
    pub fn start(&mut self) -> Result<(), Fault> {
        self.require_configuration("InstanceStart")?;
        let options = self.with_mmds(&self.resources, self.resources.run_options()?);
        if self.resources.hides_pci() {
            log::warn!("boot_args: pci=off is removed, because all devices are PCI functions");
        }
        let metadata = self.metadata_at_start(&self.resources);
        self.backend
            .start(&options, metadata.as_ref())
            .map_err(|e| Fault::bad(format!("InstanceStart: {e}")))?;
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
    fn set(&mut self, call: ApiCall) -> Result<Response, Fault> {
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
                    .map_err(|e| Fault::bad(format!("log_path: {e}")))?;
            }
            ApiCall::PutMetrics(metrics) => {
                changed.set_metrics(metrics.clone())?;
                self.backend
                    .set_metrics(&metrics)
                    .map_err(|e| Fault::bad(format!("metrics_path: {e}")))?;
            }
            other => return Err(Fault::bad(format!("{other:?}: changes no configuration"))),
        }
        self.accept(changed)
    }

    /// Makes `changed` the configuration, if its files exist and `perfvisor run` accepts it.
    fn accept(&mut self, changed: Resources) -> Result<Response, Fault> {
        let known = self.resources.files();
        for (field, path) in changed.files() {
            if !known.contains(&(field, path)) {
                self.backend
                    .check_file(path)
                    .map_err(|e| Fault::bad(format!("{field}: {path}: {e}")))?;
            }
        }
        let options = changed.run_options().unwrap_or_else(|_| changed.device_options());
        let options = self.with_mmds(&changed, options);
        self.backend.check_options(&options).map_err(Fault::bad)?;
        self.resources = changed;
        Ok(Response::no_content())
    }

    fn act(&mut self, action: ActionType) -> Result<Response, Fault> {
        match action {
            ActionType::InstanceStart => self.start()?,
            ActionType::FlushMetrics => {
                self.require_start("FlushMetrics")?;
                if self.resources.metrics().is_none() {
                    return Err(Fault::bad("FlushMetrics: PUT /metrics has set no destination"));
                }
                self.backend
                    .flush_metrics()
                    .map_err(|e| Fault::bad(format!("FlushMetrics: {e}")))?;
            }
            ActionType::SendCtrlAltDel => {
                self.require_start("SendCtrlAltDel")?;
                self.backend
                    .press_power_button()
                    .map_err(|e| Fault::bad(format!("SendCtrlAltDel: {e}")))?;
            }
        }
        Ok(Response::no_content())
    }

    fn change_state(&mut self, state: RequestedState) -> Result<Response, Fault> {
        self.require_start("PATCH /vm")?;
        let (result, state) = match state {
            RequestedState::Paused => (self.backend.pause(), InstanceState::Paused),
            RequestedState::Resumed => (self.backend.resume(), InstanceState::Running),
        };
        result.map_err(|e| Fault::bad(format!("state: {e}")))?;
        self.state = state;
        Ok(Response::no_content())
    }

    /// Applies the changes to the VM, and makes `changed` its configuration.
    fn change_limiters(
        &mut self,
        changed: Resources,
        changes: Vec<LimiterChange>,
    ) -> Result<Response, Fault> {
        for change in changes {
            self.backend
                .change_limiter(&change)
                .map_err(|e| Fault::bad(format!("rate_limiter: {e}")))?;
        }
        self.resources = changed;
        Ok(Response::no_content())
    }

    fn require_configuration(&self, what: &str) -> Result<(), Fault> {
        if self.state == InstanceState::NotStarted {
            return Ok(());
        }
        Err(Fault::bad(format!(
            "{what}: not supported after the VM has started"
        )))
    }

    fn require_start(&self, what: &str) -> Result<(), Fault> {
        if self.state != InstanceState::NotStarted {
            return Ok(());
        }
        Err(Fault::bad(format!(
            "{what}: not supported before the VM has started"
        )))
    }
}

#[cfg(test)]
mod tests;
