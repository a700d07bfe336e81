//! The configuration of a VM, its validation, and its translation to options of `perfvisor run`.
//!
//! The output of this module consists only of options. `perfvisor run` parses them like its command
//! line, so there is a single way to build a VM.

mod metadata;

use crate::fault::ApiFault;
use crate::routes::{NO_HINTING, check_id};
use crate::types::{
    Balloon, BootSource, Drive, DriveUpdate, EntropyDevice, HugePages, IoEngine, Logger, MachineConfig,
    MachineConfigUpdate, Metrics, MmdsConfig, NetworkInterface, NetworkInterfaceUpdate, NetworkOverride, Pmu,
    RateLimiter, SerialDevice, SnapshotLoadParams, VmConfig, Vsock,
};

/// Maximum number of vCPUs in Firecracker's API specification.
const MAX_VCPUS: u8 = 32;
/// Kernel command-line parameter that is removed from the client's command line. With this
/// parameter, Linux would not find the VM's devices, which are functions of a PCI bus.
const PCI_OFF: &str = "pci=off";
/// Default kernel command line of `perfvisor run` for Linux, to which this crate adds the root
/// device if necessary.
const DEFAULT_BOOT_ARGS: &str = "console=ttyS0 reboot=k panic=-1 tsc=reliable no_timer_check";

/// Configuration of a VM, as set by API calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmResources {
    machine: MachineConfig,
    boot_source: Option<BootSource>,
    drives: Vec<Drive>,
    interfaces: Vec<NetworkInterface>,
    vsock: Option<Vsock>,
    entropy: Option<EntropyDevice>,
    balloon: Option<Balloon>,
    serial: Option<SerialDevice>,
    logger: Option<Logger>,
    metrics: Option<Metrics>,
    pmu: Option<Pmu>,
    mmds: Option<MmdsConfig>,
}

/// Change to a rate limiter of the running VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateLimiterChange {
    /// Name of the rate limiter in the running VM.
    pub name: String,
    /// New limits. An omitted limit is unchanged. An unlimited bucket removes the limit.
    pub limiter: RateLimiter,
}

impl RateLimiterChange {
    /// Merges `update` into the configured `limiter`, and returns the same change for the running
    /// VM. Returns `None` if `update` is `None`.
    fn apply(name: String, update: Option<RateLimiter>, limiter: &mut Option<RateLimiter>) -> Option<Self> {
        let update = update?;
        let old = limiter.unwrap_or_default();
        *limiter = Some(RateLimiter {
            bandwidth: update.bandwidth.or(old.bandwidth),
            ops: update.ops.or(old.ops),
        });
        Some(Self {
            name,
            limiter: update,
        })
    }
}

/// Adds the device `new`, or replaces the device that has the same identifier.
fn put_device<T>(devices: &mut Vec<T>, new: T, id: fn(&T) -> &str) {
    match devices.iter_mut().find(|old| id(old) == id(&new)) {
        Some(old) => *old = new,
        None => devices.push(new),
    }
}

impl VmResources {
    /// Returns the configuration that `config` describes.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if `config` is invalid or contains an unsupported device.
    pub fn from_config(config: VmConfig) -> Result<Self, ApiFault> {
        let unsupported = [
            ("cpu-config", config.cpu_config.is_some()),
            ("memory-hotplug", config.memory_hotplug.is_some()),
            ("pmem", !config.pmem.is_empty()),
        ];
        if let Some((name, _)) = unsupported.iter().find(|(_, given)| *given) {
            return Err(ApiFault::unsupported(name, "this version does not offer it"));
        }
        let mut all = Self::default();
        all.set_machine(config.machine_config.unwrap_or_default())?;
        if let Some(boot_source) = config.boot_source {
            all.set_boot_source(boot_source)?;
        }
        for drive in config.drives {
            check_id("drive_id", &drive.drive_id, &drive.drive_id)?;
            all.set_drive(drive)?;
        }
        for interface in config.network_interfaces {
            check_id("iface_id", &interface.iface_id, &interface.iface_id)?;
            all.set_interface(interface)?;
        }
        if let Some(mmds) = config.mmds_config {
            all.set_mmds(mmds)?;
        }
        if let Some(vsock) = config.vsock {
            all.set_vsock(vsock)?;
        }
        if let Some(entropy) = config.entropy {
            all.set_entropy(entropy);
        }
        if let Some(balloon) = config.balloon {
            all.set_balloon(balloon)?;
        }
        if let Some(serial) = config.serial {
            all.set_serial(serial)?;
        }
        if let Some(logger) = config.logger {
            all.set_logger(logger)?;
        }
        if let Some(pmu) = config.pmu {
            all.set_pmu(pmu)?;
        }
        all.metrics = config.metrics;
        Ok(all)
    }

    /// Returns the configuration as the body of `GET /vm/config`.
    pub fn to_config(&self) -> VmConfig {
        VmConfig {
            machine_config: Some(self.machine.clone()),
            boot_source: self.boot_source.clone(),
            drives: self.drives.clone(),
            network_interfaces: self.interfaces.clone(),
            vsock: self.vsock.clone(),
            entropy: self.entropy.clone(),
            balloon: self.balloon.clone(),
            serial: self.serial.clone(),
            logger: self.logger.clone(),
            metrics: self.metrics.clone(),
            pmu: Some(self.pmu()),
            mmds_config: self.mmds.clone(),
            ..VmConfig::default()
        }
    }

    /// Returns the size and features of the machine.
    pub fn machine(&self) -> &MachineConfig {
        &self.machine
    }

    /// Returns the level and destination of log messages.
    pub fn logger(&self) -> Option<&Logger> {
        self.logger.as_ref()
    }

    /// Returns the destination of the metrics.
    pub fn metrics(&self) -> Option<&Metrics> {
        self.metrics.as_ref()
    }

    /// Returns the PMU configuration, with the default model filled in.
    pub fn pmu(&self) -> Pmu {
        let mut pmu = self.pmu.clone().unwrap_or_default();
        pmu.model.get_or_insert_with(|| "auto".into());
        pmu
    }

    /// Sets the size and features of the machine.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a field is invalid or unsupported.
    pub fn set_machine(&mut self, machine: MachineConfig) -> Result<(), ApiFault> {
        if !(1..=MAX_VCPUS).contains(&machine.vcpu_count) {
            return Err(ApiFault::bad(format!(
                "vcpu_count: must be between 1 and {MAX_VCPUS}"
            )));
        }
        if machine.mem_size_mib == 0 {
            return Err(ApiFault::bad("mem_size_mib: must not be 0"));
        }
        if machine.huge_pages == HugePages::TwoMib && !machine.mem_size_mib.is_multiple_of(2) {
            return Err(ApiFault::bad("mem_size_mib: must be even with huge_pages 2M"));
        }
        if machine.smt {
            return Err(ApiFault::unsupported("smt", "each vCPU is a core of its own"));
        }
        if machine.track_dirty_pages {
            return Err(ApiFault::unsupported(
                "track_dirty_pages",
                "snapshots are always full",
            ));
        }
        if machine.cpu_template.as_deref().is_some_and(|name| name != "None") {
            return Err(ApiFault::unsupported(
                "cpu_template",
                "the guest sees the host's features; PUT /pmu selects its PMU",
            ));
        }
        self.machine = machine;
        Ok(())
    }

    /// Changes the size and features of the machine.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the update is empty, or a field is invalid or unsupported.
    pub fn update_machine(&mut self, update: MachineConfigUpdate) -> Result<(), ApiFault> {
        if update == MachineConfigUpdate::default() {
            return Err(ApiFault::bad("PATCH /machine-config: no field is given"));
        }
        let old = self.machine.clone();
        self.set_machine(MachineConfig {
            vcpu_count: update.vcpu_count.unwrap_or(old.vcpu_count),
            mem_size_mib: update.mem_size_mib.unwrap_or(old.mem_size_mib),
            smt: update.smt.unwrap_or(old.smt),
            track_dirty_pages: update.track_dirty_pages.unwrap_or(old.track_dirty_pages),
            huge_pages: update.huge_pages.unwrap_or(old.huge_pages),
            cpu_template: update.cpu_template.or(old.cpu_template),
        })
    }

    /// Sets the kernel, the initial RAM disk and the command line.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a string contains a NUL character.
    pub fn set_boot_source(&mut self, boot_source: BootSource) -> Result<(), ApiFault> {
        check_text("kernel_image_path", Some(&boot_source.kernel_image_path))?;
        check_text("initrd_path", boot_source.initrd_path.as_deref())?;
        check_text("boot_args", boot_source.boot_args.as_deref())?;
        self.boot_source = Some(boot_source);
        Ok(())
    }

    /// Adds a block device, or replaces the one with the same identifier.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a field is invalid or unsupported, or another root device exists.
    pub fn set_drive(&mut self, drive: Drive) -> Result<(), ApiFault> {
        if drive.socket.is_some() {
            return Err(ApiFault::unsupported(
                "socket",
                "disks have no vhost-user back end",
            ));
        }
        if drive.io_engine == Some(IoEngine::Async) {
            return Err(ApiFault::unsupported("io_engine", "must be Sync"));
        }
        let Some(path) = &drive.path_on_host else {
            return Err(ApiFault::bad("path_on_host: missing"));
        };
        check_text("path_on_host", Some(path))?;
        if path.contains(',') {
            return Err(ApiFault::unsupported("path_on_host", "the path contains a comma"));
        }
        let partuuid = drive.partuuid.as_deref();
        check_text("partuuid", partuuid)?;
        if partuuid.is_some_and(|text| text.is_empty() || text.contains(char::is_whitespace)) {
            return Err(ApiFault::bad("partuuid: must be a word"));
        }
        let is_other = |other: &&Drive| other.drive_id != drive.drive_id;
        if drive.is_root_device
            && let Some(root) = self
                .drives
                .iter()
                .filter(is_other)
                .find(|other| other.is_root_device)
        {
            let message = format!("is_root_device: '{}' is the root device already", root.drive_id);
            return Err(ApiFault::bad(message));
        }
        put_device(&mut self.drives, drive, |drive| &drive.drive_id);
        Ok(())
    }

    /// Adds a network device, or replaces the one with the same identifier.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a field is invalid or unsupported, or another device uses the
    /// same MAC address or tap device.
    pub fn set_interface(&mut self, interface: NetworkInterface) -> Result<(), ApiFault> {
        if interface.mtu.is_some() {
            return Err(ApiFault::unsupported("mtu", "the device offers no MTU"));
        }
        let others = || {
            self.interfaces
                .iter()
                .filter(|other| other.iface_id != interface.iface_id)
        };
        let mac = interface.guest_mac.as_deref();
        let has_mac = |other: &NetworkInterface| {
            let pair = other.guest_mac.as_deref().zip(mac);
            pair.is_some_and(|(one, other)| one.eq_ignore_ascii_case(other))
        };
        if others().any(has_mac) {
            return Err(ApiFault::bad("guest_mac: another interface has this address"));
        }
        if others().any(|other| other.host_dev_name == interface.host_dev_name) {
            return Err(ApiFault::bad(
                "host_dev_name: another interface uses this tap device",
            ));
        }
        for (field, text) in [
            ("host_dev_name", Some(interface.host_dev_name.as_str())),
            ("guest_mac", mac),
        ] {
            check_text(field, text)?;
            if text.is_some_and(|text| text.contains([',', '='])) {
                return Err(ApiFault::bad(format!(
                    "{field}: must not contain a comma or an equals sign"
                )));
            }
        }
        put_device(&mut self.interfaces, interface, |interface| &interface.iface_id);
        Ok(())
    }

    /// Sets the vsock device.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a field is invalid.
    pub fn set_vsock(&mut self, vsock: Vsock) -> Result<(), ApiFault> {
        if vsock.guest_cid < 3 {
            return Err(ApiFault::bad("guest_cid: must be at least 3"));
        }
        check_text("uds_path", Some(&vsock.uds_path))?;
        self.vsock = Some(vsock);
        Ok(())
    }

    /// Adds the entropy device.
    pub fn set_entropy(&mut self, entropy: EntropyDevice) {
        self.entropy = Some(entropy);
    }

    /// Changes the rate limiter of a drive in the configuration. Returns the same change for the
    /// running VM.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the drive does not exist or the update contains a new path.
    pub fn update_drive(&mut self, update: DriveUpdate) -> Result<Option<RateLimiterChange>, ApiFault> {
        let id = update.drive_id;
        let index = self.drives_in_order().position(|drive| drive.drive_id == id);
        let drive = self.drives.iter_mut().find(|drive| drive.drive_id == id);
        let (Some(index), Some(drive)) = (index, drive) else {
            return Err(ApiFault::bad(format!("drive_id: no drive '{id}'")));
        };
        if update.path_on_host.is_some() {
            return Err(ApiFault::unsupported(
                "path_on_host",
                "the image of a drive cannot be replaced",
            ));
        }
        let name = format!("disk{index}");
        Ok(RateLimiterChange::apply(
            name,
            update.rate_limiter,
            &mut drive.rate_limiter,
        ))
    }

    /// Changes the rate limiters of a network device in the configuration. Returns the same changes
    /// for the running VM.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if the device does not exist.
    pub fn update_interface(
        &mut self,
        update: NetworkInterfaceUpdate,
    ) -> Result<Vec<RateLimiterChange>, ApiFault> {
        let id = update.iface_id;
        let mut interfaces = self.interfaces.iter_mut().enumerate();
        let Some((index, interface)) = interfaces.find(|(_, interface)| interface.iface_id == id) else {
            return Err(ApiFault::bad(format!("iface_id: no interface '{id}'")));
        };
        let (rx, tx) = (&mut interface.rx_rate_limiter, &mut interface.tx_rate_limiter);
        let changes = [
            RateLimiterChange::apply(format!("net{index}-rx"), update.rx_rate_limiter, rx),
            RateLimiterChange::apply(format!("net{index}-tx"), update.tx_rate_limiter, tx),
        ];
        Ok(changes.into_iter().flatten().collect())
    }

    /// Adds or replaces the balloon.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a field is unsupported.
    pub fn set_balloon(&mut self, balloon: Balloon) -> Result<(), ApiFault> {
        if balloon.free_page_hinting {
            return Err(ApiFault::unsupported("free_page_hinting", NO_HINTING));
        }
        self.balloon = Some(balloon);
        Ok(())
    }

    /// Replaces the balloon's configuration with values that the running VM has accepted.
    pub fn replace_balloon(&mut self, balloon: Balloon) {
        self.balloon = Some(balloon);
    }

    /// Returns the configuration of the balloon, if there is one.
    pub fn balloon(&self) -> Option<&Balloon> {
        self.balloon.as_ref()
    }

    /// Sets the destination of the serial output.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a field is invalid or unsupported.
    pub fn set_serial(&mut self, serial: SerialDevice) -> Result<(), ApiFault> {
        if serial.rate_limiter.is_some_and(|limiter| !limiter.is_unlimited()) {
            return Err(ApiFault::unsupported("rate_limiter", "the serial port has none"));
        }
        check_text("serial_out_path", serial.serial_out_path.as_deref())?;
        self.serial = Some(serial);
        Ok(())
    }

    /// Sets the level and destination of log messages.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a field is invalid or unsupported.
    pub fn set_logger(&mut self, logger: Logger) -> Result<(), ApiFault> {
        if let Some(level) = &logger.level {
            log_level(level)?;
        }
        if logger.module.is_some() {
            return Err(ApiFault::unsupported("module", "modules have other names here"));
        }
        if logger.show_log_origin == Some(true) {
            return Err(ApiFault::unsupported(
                "show_log_origin",
                "messages have no file and line",
            ));
        }
        check_text("log_path", logger.log_path.as_deref())?;
        self.logger = Some(logger);
        Ok(())
    }

    /// Sets the destination of the metrics.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a destination is already set.
    pub fn set_metrics(&mut self, metrics: Metrics) -> Result<(), ApiFault> {
        if self.metrics.is_some() {
            return Err(ApiFault::bad("metrics_path: the destination is set already"));
        }
        check_text("metrics_path", Some(&metrics.metrics_path))?;
        self.metrics = Some(metrics);
        Ok(())
    }

    /// Sets the guest's PMU.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if a string contains a NUL character.
    pub fn set_pmu(&mut self, pmu: Pmu) -> Result<(), ApiFault> {
        for (field, text) in [
            ("model", &pmu.model),
            ("backing", &pmu.backing),
            ("counters", &pmu.counters),
            ("filter", &pmu.filter),
            ("share", &pmu.share),
        ] {
            check_text(field, text.as_deref())?;
        }
        self.pmu = Some(pmu);
        Ok(())
    }

    /// Returns the paths of the files that must exist before the VM starts, each with the name of
    /// the field that contains it.
    pub fn files(&self) -> Vec<(&'static str, &str)> {
        let boot = self.boot_source.as_ref();
        let kernel = boot.map(|boot| ("kernel_image_path", boot.kernel_image_path.as_str()));
        let initrd = boot.and_then(|boot| Some(("initrd_path", boot.initrd_path.as_deref()?)));
        let drives = self.drives.iter();
        let drives = drives.filter_map(|drive| Some(("path_on_host", drive.path_on_host.as_deref()?)));
        kernel.into_iter().chain(initrd).chain(drives).collect()
    }

    /// Returns the options of `perfvisor run` that create the configured VM.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if there is no boot source.
    pub fn run_options(&self) -> Result<Vec<String>, ApiFault> {
        let Some(boot) = &self.boot_source else {
            return Err(ApiFault::bad(
                "boot-source: a VM needs a kernel; PUT /boot-source sets it",
            ));
        };
        let mut options = self.device_options();
        options.push(format!("--kernel={}", boot.kernel_image_path));
        options.extend(boot.initrd_path.as_ref().map(|path| format!("--initrd={path}")));
        options.extend(self.cmdline(boot).map(|line| format!("--cmdline={line}")));
        Ok(options)
    }

    /// Returns the options of `perfvisor run` for the machine and its devices, but not for the
    /// kernel. These options are used to validate a configuration that may lack a boot source.
    pub fn device_options(&self) -> Vec<String> {
        let machine = &self.machine;
        let huge_pages = match machine.huge_pages {
            HugePages::None => "off",
            HugePages::Transparent => "transparent",
            HugePages::TwoMib => "2M",
        };
        let mut options = vec![
            format!("--cpus={}", machine.vcpu_count),
            format!("--memory={}M", machine.mem_size_mib),
            format!("--hugepages={huge_pages}"),
            format!("--rng={}", if self.entropy.is_some() { "on" } else { "off" }),
        ];
        options.extend(self.host_options());
        options.extend(self.balloon.as_ref().map(balloon_option));
        let pmu = self.pmu();
        for (option, value) in [
            ("pmu", pmu.model),
            ("backing", pmu.backing),
            ("pmu-counters", pmu.counters),
            ("pmu-filter", pmu.filter),
            ("share", pmu.share),
        ] {
            options.extend(value.map(|value| format!("--{option}={value}")));
        }
        options
    }

    /// Returns the options of `perfvisor run` for a VM that is restored from a snapshot.
    pub fn restore_options(&self) -> Vec<String> {
        let mut options = self.host_options();
        options.extend(self.pmu().share.map(|policy| format!("--share={policy}")));
        options
    }

    /// Returns the options of `perfvisor run` for the drives, the network devices, the serial
    /// output and vsock.
    fn host_options(&self) -> Vec<String> {
        let mut options: Vec<String> = self.drives_in_order().filter_map(drive_option).collect();
        for interface in &self.interfaces {
            let mac = interface.guest_mac.as_ref().map(|mac| format!(",mac={mac}"));
            let mac = mac.unwrap_or_default();
            // Disable vhost-net, because a VM that uses it does not support snapshots.
            let mut option = format!("--net=tap={}{mac},vhost=off", interface.host_dev_name);
            push_limits(&mut option, "rx-", interface.rx_rate_limiter.as_ref());
            push_limits(&mut option, "tx-", interface.tx_rate_limiter.as_ref());
            if self.reaches_mmds(&interface.iface_id) {
                option.push_str(",mmds=on");
            }
            options.push(option);
        }
        let mut limits = String::new();
        let entropy = self.entropy.as_ref();
        push_limits(
            &mut limits,
            "",
            entropy.and_then(|entropy| entropy.rate_limiter.as_ref()),
        );
        if let Some(limits) = limits.strip_prefix(',') {
            options.push(format!("--rng-limits={limits}"));
        }
        let serial = self
            .serial
            .as_ref()
            .and_then(|serial| serial.serial_out_path.as_ref());
        options.extend(serial.map(|path| format!("--console=file={path}")));
        if let Some(vsock) = &self.vsock {
            options.push(format!(
                "--vsock=cid={},socket={}",
                vsock.guest_cid, vsock.uds_path
            ));
        }
        options
    }

    /// Returns the configuration of a VM that is restored from a snapshot. The machine and the
    /// devices are those of `saved`, with the tap devices and the vsock socket replaced by those in
    /// `params`. The serial output, log and metrics are those of `self`.
    ///
    /// # Errors
    /// Returns an [`ApiFault`] if `self` has a machine or devices, or if `saved` or an override is
    /// invalid.
    pub fn restored(&self, mut saved: VmConfig, params: &SnapshotLoadParams) -> Result<Self, ApiFault> {
        let host_only = Self {
            serial: self.serial.clone(),
            logger: self.logger.clone(),
            metrics: self.metrics.clone(),
            ..Self::default()
        };
        if *self != host_only {
            return Err(ApiFault::bad(
                "snapshot/load: not supported after the machine or a device was configured",
            ));
        }
        for NetworkOverride {
            iface_id,
            host_dev_name,
        } in &params.network_overrides
        {
            let mut interfaces = saved.network_interfaces.iter_mut();
            let Some(interface) = interfaces.find(|interface| interface.iface_id == *iface_id) else {
                let message = format!("network_overrides: the snapshot has no interface '{iface_id}'");
                return Err(ApiFault::bad(message));
            };
            interface.host_dev_name.clone_from(host_dev_name);
        }
        if let Some(socket) = &params.vsock_override {
            let vsock = saved
                .vsock
                .as_mut()
                .ok_or_else(|| ApiFault::bad("vsock_override: the snapshot has no vsock device"))?;
            vsock.uds_path.clone_from(&socket.uds_path);
        }
        saved.serial = host_only.serial;
        saved.logger = host_only.logger;
        saved.metrics = host_only.metrics;
        Self::from_config(saved)
    }

    /// Returns the configuration to store in a snapshot, which lacks the boot source, serial
    /// output, log and metrics.
    pub fn to_saved_config(&self) -> VmConfig {
        VmConfig {
            boot_source: None,
            serial: None,
            logger: None,
            metrics: None,
            ..self.to_config()
        }
    }

    /// Returns the drives in the order in which the VM contains them. The root device is first,
    /// because the kernel names the first drive `/dev/vda`.
    fn drives_in_order(&self) -> impl Iterator<Item = &Drive> {
        let root = self.drives.iter().filter(|drive| drive.is_root_device);
        root.chain(self.drives.iter().filter(|drive| !drive.is_root_device))
    }

    /// Returns the kernel command line, with the root device and without [`PCI_OFF`], or `None` for
    /// the default.
    fn cmdline(&self, boot: &BootSource) -> Option<String> {
        let root = self.drives.iter().find(|drive| drive.is_root_device);
        let root = root.map(|drive| {
            let device = match &drive.partuuid {
                Some(partuuid) => format!("PARTUUID={partuuid}"),
                None => "/dev/vda".into(),
            };
            let mode = if drive.is_read_only == Some(true) {
                "ro"
            } else {
                "rw"
            };
            format!("root={device} {mode}")
        });
        let given = boot.boot_args.as_deref();
        if given.is_none() && root.is_none() {
            return None;
        }
        let given = given.unwrap_or(DEFAULT_BOOT_ARGS);
        let given = if self.hides_pci() {
            without_pci_off(given)
        } else {
            given.to_owned()
        };
        Some(
            [Some(given), root]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(" ")
                .trim()
                .to_owned(),
        )
    }

    /// Returns whether the kernel command line contains `pci=off`, which is removed.
    pub fn hides_pci(&self) -> bool {
        let args = self
            .boot_source
            .as_ref()
            .and_then(|boot| boot.boot_args.as_deref());
        args.is_some_and(|args| args.split_ascii_whitespace().any(|word| word == PCI_OFF))
    }
}

fn without_pci_off(line: &str) -> String {
    let words: Vec<&str> = line
        .split_ascii_whitespace()
        .filter(|word| *word != PCI_OFF)
        .collect();
    words.join(" ")
}

fn balloon_option(balloon: &Balloon) -> String {
    let switch = |on| if on { "on" } else { "off" };
    format!(
        "--balloon=size={},deflate-on-oom={},stats={},free-page-reporting={}",
        balloon.amount_mib,
        switch(balloon.deflate_on_oom),
        balloon.stats_polling_interval_s,
        switch(balloon.free_page_reporting)
    )
}

fn drive_option(drive: &Drive) -> Option<String> {
    let path = drive.path_on_host.as_ref()?;
    let mode = if drive.is_read_only == Some(true) {
        ",ro"
    } else {
        ""
    };
    let mut option = format!("--disk={path}{mode}");
    push_limits(&mut option, "", drive.rate_limiter.as_ref());
    Some(option)
}

/// Appends the limits of `limiter` to `option`, an option of `perfvisor run`.
fn push_limits(option: &mut String, prefix: &str, limiter: Option<&RateLimiter>) {
    let Some(RateLimiter { bandwidth, ops }) = limiter else {
        return;
    };
    for (name, bucket) in [("bandwidth", bandwidth), ("ops", ops)] {
        if let Some(bucket) = bucket.filter(|bucket| !bucket.is_unlimited()) {
            let burst = bucket.one_time_burst.unwrap_or(0);
            let limit = format!("{}/{}+{burst}", bucket.size, bucket.refill_time);
            option.push_str(&format!(",{prefix}{name}={limit}"));
        }
    }
}

/// Parses the level of log messages in the syntax of the crate `log`.
///
/// # Errors
/// Returns an [`ApiFault`] if the level is unknown.
pub fn log_level(level: &str) -> Result<log::LevelFilter, ApiFault> {
    Ok(match level.to_ascii_lowercase().as_str() {
        "off" => log::LevelFilter::Off,
        "error" => log::LevelFilter::Error,
        "warning" | "warn" => log::LevelFilter::Warn,
        "info" => log::LevelFilter::Info,
        "debug" => log::LevelFilter::Debug,
        "trace" => log::LevelFilter::Trace,
        _ => {
            return Err(ApiFault::bad(
                "level: must be Error, Warning, Info, Debug, Trace or Off",
            ));
        }
    })
}

/// Rejects a string that cannot be a program argument because it contains a NUL character.
fn check_text(field: &str, text: Option<&str>) -> Result<(), ApiFault> {
    match text {
        Some(text) if text.contains('\0') => Err(ApiFault::bad(format!("{field}: contains a NUL character"))),
        Some("") if field.ends_with("_path") => Err(ApiFault::bad(format!("{field}: must not be empty"))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
