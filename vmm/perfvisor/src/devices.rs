//! Creates the virtio devices requested by the arguments of `perfvisor run`.

use std::collections::HashSet;
use std::fs::File;
use std::hash::Hash;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use control_api::socket_dir;
use mmds::service::MetadataService;
use sandbox::SocketBroker;
use virtio_devices::balloon::BalloonDevice;
use virtio_devices::balloon::control::BalloonControl;
use virtio_devices::balloon::release::RamOrigin;
use virtio_devices::device::VirtioDevice;
use virtio_devices::disk::BlockDevice;
use virtio_devices::disk::image::DiskImageError;
use virtio_devices::net::NetDevice;
use virtio_devices::net::config::{MacAddress, NetConfig, VhostMode};
use virtio_devices::net::tap::{Tap, TapError, mtu};
use virtio_devices::net::vhost::{VhostError, VhostNetBackend};
use virtio_devices::rate_limiter::RateLimiter;
use virtio_devices::rate_limiter::limits::RateLimits;
use virtio_devices::rng::EntropyDevice;
use virtio_devices::share::FsDevice;
use virtio_devices::share::backend::VhostUserBackendError;
use virtio_devices::share::config::{ShareBackendSource, ShareConfig};
use virtio_devices::share::keeper;
use virtio_devices::vsock::{VsockConfig, VsockDevice, VsockError};

use vmm::memory::HugePages;

use crate::cli::RunArgs;
use perf_core::error_line;

/// Error returned when a device cannot be created or its option is invalid.
#[derive(Debug, thiserror::Error)]
pub enum DeviceOptionError {
    #[error("--disk")]
    Disk(#[source] DiskImageError),
    #[error("--net")]
    Tap(#[source] TapError),
    #[error("--net tap={0}: cannot read the MTU")]
    Mtu(String, #[source] io::Error),
    #[error("--net tap={0},vhost=on")]
    VhostMode(String, #[source] VhostError),
    #[error("--net tap={0}: given twice; use one tap device per network device")]
    TapTwice(String),
    #[error("--net mac={0}: given twice; use one address per network device")]
    MacTwice(MacAddress),
    #[error(
        "--disk serial={0}: given twice; use one serial number per disk (disk0, disk1 and so on by \
        default)"
    )]
    SerialTwice(String),
    #[error(
        "--disk without --kernel: Perfvisor has no firmware to boot from a disk; use --kernel, \
        --initrd and root= in --cmdline"
    )]
    NoKernel,
    #[error("--net tap={0},mmds=on: the VM has no metadata service; use --mmds")]
    NoMetadata(String),
    #[error("--mmds: no network device reaches the service; use --net tap=NAME,mmds=on")]
    MetadataDevice,
    #[error("cannot create the timer of the metadata service")]
    MetadataTimer(#[source] io::Error),
    #[error("--share-dir")]
    FsDevice(#[from] VhostUserBackendError),
    #[error("--share-dir tag={0}: given twice; use one tag per directory")]
    TagTwice(String),
    #[error("--share-dir")]
    Place(#[from] socket_dir::ControlSocketError),
    #[error("--share-dir: cannot determine the path of this program")]
    OwnPath(#[source] io::Error),
    #[error("--share-dir: the log")]
    Log(#[source] io::Error),
    #[error("cannot open /dev/urandom for the guest's entropy; make it readable, or use --rng off")]
    EntropyDevice(#[source] io::Error),
    #[error("cannot create the timer of a rate limiter")]
    RateLimiter(#[source] io::Error),
    #[error("--vsock")]
    Vsock(#[from] VsockError),
    #[error(
        "--balloon size={size_mib}: larger than the guest's memory of {memory_mib} MiB; use a smaller \
        size, or a larger --memory"
    )]
    BalloonSize { size_mib: u32, memory_mib: u64 },
    #[error(
        "--balloon with --hugepages 2M: the balloon gives back pages of 4 KiB; use --hugepages \
        transparent or off"
    )]
    BalloonHugePages,
    #[error("--balloon")]
    Balloon(#[source] io::Error),
}

/// Virtio devices of a VM.
pub struct VmDevices {
    /// All devices in the order in which the guest discovers them.
    pub all: Vec<Box<dyn VirtioDevice>>,
    /// Handle with which operators control the balloon device; `None` without a balloon.
    pub balloon: Option<Arc<BalloonControl>>,
    /// The metadata service, whose data operators can change; `None` without `--mmds`.
    pub metadata: Option<Arc<MetadataService>>,
}

/// Creates the devices of VM `vm` in the order in which the guest discovers them.
///
/// Processes that serve devices log to `log`, or to standard error if `log` is `None`. `broker`
/// connects to sockets on behalf of the devices.
///
/// # Errors
/// Returns [`DeviceOptionError`] if an option is invalid or a device cannot be created. No file of
/// the guest has been modified in this case.
pub fn create_devices(
    args: &RunArgs,
    vm: &str,
    log: Option<&File>,
    broker: &Arc<SocketBroker>,
) -> Result<VmDevices, DeviceOptionError> {
    check(args, vm)?;
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    for (i, config) in args.disk.iter().enumerate() {
        let disk = BlockDevice::open(disk_name(i), config).map_err(DeviceOptionError::Disk)?;
        devices.push(Box::new(disk.with_limiter(limiter(config.limits)?)));
    }
    let metadata = args.mmds.map(|config| Arc::new(MetadataService::new(config)));
    for (i, config) in args.net.iter().enumerate() {
        let device = network(config, i, vm)?;
        devices.push(Box::new(match &metadata {
            Some(service) if config.metadata => device
                .with_metadata(service.clone())
                .map_err(DeviceOptionError::MetadataTimer)?,
            _ => device,
        }));
    }
    for (i, config) in args.share_dir.iter().enumerate() {
        let share = share(config, &format!("share{i}"), &tag((i, config)), vm, log)?;
        devices.push(Box::new(share.with_broker(broker)?));
    }
    // Create no entropy device for the built-in guests, which do not use one.
    if args.rng && (args.kernel.is_some() || args.takes_saved_machine()) {
        let rng = EntropyDevice::new().map_err(DeviceOptionError::EntropyDevice)?;
        devices.push(Box::new(
            rng.with_limiter(limiter(args.rng_limits.unwrap_or_default())?),
        ));
    }
    if let Some(config) = &args.vsock {
        devices.push(Box::new(sockets(config, vm)?.with_broker(broker)?));
    }
    let balloon = balloon(args)?;
    let control = balloon.as_ref().map(|balloon| balloon.control().clone());
    devices.extend(balloon.map(|balloon| Box::new(balloon) as Box<dyn VirtioDevice>));
    Ok(VmDevices {
        all: devices,
        balloon: control,
        metadata,
    })
}

/// Creates the balloon device, if requested.
fn balloon(args: &RunArgs) -> Result<Option<BalloonDevice>, DeviceOptionError> {
    let origin = match args.restore {
        Some(_) => RamOrigin::Snapshot,
        None => RamOrigin::Empty,
    };
    args.balloon
        .map(|config| BalloonDevice::new(config, args.memory, origin).map_err(DeviceOptionError::Balloon))
        .transpose()
}

/// Rejects duplicate taps, MAC addresses, serial numbers and tags before any device is opened. A
/// guest would mistake two disks or network devices with the same identity for one.
fn check(args: &RunArgs, vm: &str) -> Result<(), DeviceOptionError> {
    let serials = args.disk.iter().enumerate().map(|(i, config)| {
        let serial = config.serial.clone();
        serial.unwrap_or_else(|| disk_name(i))
    });
    let taps = args.net.iter().map(|config| config.tap.clone());
    let macs = args.net.iter().map(|config| mac(config, vm));
    let tags = args.share_dir.iter().enumerate().map(tag);
    check_unique(serials).map_err(DeviceOptionError::SerialTwice)?;
    check_unique(taps).map_err(DeviceOptionError::TapTwice)?;
    check_unique(macs).map_err(DeviceOptionError::MacTwice)?;
    check_unique(tags).map_err(DeviceOptionError::TagTwice)?;
    match (
        args.mmds.is_some(),
        args.net.iter().find(|config| config.metadata),
    ) {
        (true, None) => return Err(DeviceOptionError::MetadataDevice),
        (false, Some(config)) => return Err(DeviceOptionError::NoMetadata(config.tap.clone())),
        _ => {}
    }
    if let Some(balloon) = &args.balloon {
        let (size_mib, memory_mib) = (balloon.size_mib, args.memory >> 20);
        if u64::from(size_mib) > memory_mib {
            return Err(DeviceOptionError::BalloonSize { size_mib, memory_mib });
        }
        if args.hugepages == HugePages::Reserved {
            return Err(DeviceOptionError::BalloonHugePages);
        }
    }
    // The built-in guests would ignore the disk and run their PMU test, which the user did not
    // request.
    if args.kernel.is_none() && !args.takes_saved_machine() && !args.disk.is_empty() {
        return Err(DeviceOptionError::NoKernel);
    }
    Ok(())
}

/// Checks that no value occurs twice. Returns the first duplicate as the error.
fn check_unique<T: Hash + Eq + Clone>(all: impl Iterator<Item = T>) -> Result<(), T> {
    let mut seen = HashSet::new();
    all.into_iter().try_for_each(|one| {
        if seen.insert(one.clone()) {
            Ok(())
        } else {
            Err(one)
        }
    })
}

/// Returns the name of disk `index`, which is also its default serial number.
fn disk_name(index: usize) -> String {
    format!("disk{index}")
}

/// Returns the MAC address given by `config`, or one derived from the names of the VM and the tap
/// device.
pub fn mac(config: &NetConfig, vm: &str) -> MacAddress {
    config
        .mac
        .unwrap_or_else(|| MacAddress::derived_from(&format!("{vm}/{}", config.tap)))
}

/// Returns the mount tag of a shared directory.
fn tag((index, config): (usize, &ShareConfig)) -> String {
    config.tag.clone().unwrap_or_else(|| format!("share{index}"))
}

/// Creates the virtio-fs device for the shared directory `name` of VM `vm`.
fn share(
    config: &ShareConfig,
    name: &str,
    tag: &str,
    vm: &str,
    log: Option<&File>,
) -> Result<FsDevice, DeviceOptionError> {
    let program = std::env::current_exe().map_err(DeviceOptionError::OwnPath)?;
    let keeper = keeper::BackendKeeperCommand {
        words: vec![program.into_os_string(), "keep-share".into(), "--".into()],
        log: log
            .map(File::try_clone)
            .transpose()
            .map_err(DeviceOptionError::Log)?,
    };
    socket_dir::make_directory(&socket_dir::directory())?;
    let socket = share_socket(vm, name);
    log::info!("{name}: tag {tag}");
    Ok(FsDevice::new(
        name.to_owned(),
        tag.to_owned(),
        &config.source,
        &socket,
        &keeper,
    )?)
}

/// Creates the vsock device of VM `vm`.
fn sockets(config: &VsockConfig, vm: &str) -> Result<VsockDevice, VsockError> {
    let path = vsock_socket(config, vm);
    log::info!("vsock: guest address {}, {}", config.cid, path.display());
    VsockDevice::new(config.cid, &path)
}

/// Returns the path of the virtiofsd socket of shared directory `name`.
fn share_socket(vm: &str, name: &str) -> PathBuf {
    socket_dir::directory().join(format!("{vm}.{name}"))
}

/// Returns the path of the vsock device's socket.
fn vsock_socket(config: &VsockConfig, vm: &str) -> PathBuf {
    let beside = || socket_dir::vsock_path(&socket_dir::directory(), vm);
    config.socket.clone().unwrap_or_else(beside)
}

/// Returns the paths of all sockets on which the devices of VM `vm` listen.
pub fn own_sockets(args: &RunArgs, vm: &str) -> Vec<PathBuf> {
    let shares = args.share_dir.iter().enumerate();
    let shares = shares.filter(|(_, share)| matches!(share.source, ShareBackendSource::Directory { .. }));
    let vsock = args.vsock.iter().map(|config| vsock_socket(config, vm));
    shares
        .map(|(i, _)| share_socket(vm, &format!("share{i}")))
        .chain(vsock)
        .collect()
}

/// Creates network device `index` of VM `vm`.
fn network(config: &NetConfig, index: usize, vm: &str) -> Result<NetDevice, DeviceOptionError> {
    let tap = Tap::open(&config.tap).map_err(DeviceOptionError::Tap)?;
    let mtu = mtu(&config.tap).map_err(|e| DeviceOptionError::Mtu(config.tap.clone(), e))?;
    let mac = mac(config, vm);
    // Do not use vhost-net for a limited device or one with the metadata service, because it would
    // ignore the limits and bypass the service.
    let kernel = config.vhost != VhostMode::Off && !config.is_limited() && !config.metadata;
    let opened = kernel.then(VhostNetBackend::open);
    let (kernel, who) = match (config.vhost, opened) {
        (VhostMode::Off, None) => (None, "a thread of Perfvisor's, as asked".to_owned()),
        (_, None) => (
            None,
            "a thread of Perfvisor's, for rate limits or mmds=on".to_owned(),
        ),
        (_, Some(Ok(kernel))) => (Some(kernel), "vhost-net".to_owned()),
        (VhostMode::On, Some(Err(e))) => return Err(DeviceOptionError::VhostMode(config.tap.clone(), e)),
        (_, Some(Err(e))) => (None, format!("a thread of Perfvisor's: {}", error_line(&e))),
    };
    log::info!(
        "net{index}: tap {}, address {mac}, MTU {mtu}; back end: {who}",
        config.tap
    );
    let device = NetDevice::new(format!("net{index}"), tap, mac, mtu, kernel);
    Ok(device.with_limiters(limiter(config.rx)?, limiter(config.tx)?))
}

fn limiter(limits: RateLimits) -> Result<RateLimiter, DeviceOptionError> {
    RateLimiter::new(limits).map_err(DeviceOptionError::RateLimiter)
}

#[cfg(test)]
mod tests {
    use crate::cli::{self, CliCommand};

    use super::*;

    fn checked(words: &str) -> Result<(), String> {
        let words = ["perfvisor", "run"].into_iter().chain(words.split(' '));
        let Ok(CliCommand::Run(args)) = cli::parse(words).map(|cli| cli.command) else {
            panic!("no arguments of run");
        };
        check(&args, "vm").map_err(|e| error_line(&e))
    }

    /// Duplicate identities are rejected before any device is opened. The files and taps of this
    /// test do not exist.
    #[test]
    fn duplicate_device_identities_are_rejected() {
        for (words, said) in [
            ("--disk a,serial=x --disk b,serial=x", "serial=x: given twice"),
            ("--disk a,serial=disk1 --disk b", "serial=disk1: given twice"),
            (
                "--net tap=t --net tap=t,mac=02:00:00:00:00:01",
                "tap=t: given twice",
            ),
            (
                "--net tap=s,mac=02:00:00:00:00:0a --net tap=t,mac=02:00:00:00:00:0A",
                "mac=02:00:00:00:00:0a: given twice",
            ),
            (
                "--share-dir d --share-dir e,tag=share0",
                "tag=share0: given twice",
            ),
            ("--disk a", "--disk without --kernel"),
            ("--mmds", "--mmds: no network device reaches"),
            (
                "--net tap=t,mmds=on",
                "tap=t,mmds=on: the VM has no metadata service",
            ),
            (
                "--memory 64M --balloon size=65",
                "size=65: larger than the guest's memory of 64 MiB",
            ),
            ("--hugepages 2M --balloon", "--hugepages transparent or off"),
        ] {
            let line = checked(words).unwrap_err();
            assert!(line.contains(said), "{words}: {line}");
        }
        let fits =
            "--kernel k --disk a,ro --disk a,ro,serial=y --net tap=s --net tap=t --share-dir d --share-dir d";
        assert_eq!(checked(fits), Ok(()));
    }
}
