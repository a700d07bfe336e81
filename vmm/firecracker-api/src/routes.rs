//! Conversion of method, path and body to a typed call.
//!
//! [`ROUTES`] lists all paths, for the router's tests and the OpenAPI description. [`UNSUPPORTED`]
//! lists the features that Perfvisor does not support. To add a feature, move its row from
//! [`UNSUPPORTED`] to [`ROUTES`] and add a variant to [`ApiCall`].

use serde::de::DeserializeOwned;

use crate::fault::ApiFault;
use crate::http::{Method, Request};
use crate::types::{
    Action, ActionType, Balloon, BalloonStatsUpdate, BalloonUpdate, BootSource, Drive, DriveUpdate,
    EntropyDevice, Logger, MachineConfig, MachineConfigUpdate, Metrics, MmdsConfig, MmdsContents,
    NetworkInterface, NetworkInterfaceUpdate, Pmu, RequestedState, SerialDevice, SnapshotCreateParams,
    SnapshotLoadParams, VmUpdate, Vsock,
};

/// Maximum length of a device identifier, in bytes.
const MAX_ID: usize = 64;

/// A typed API call, with the parsed body of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiCall {
    /// `GET /`: returns the state of the VM.
    GetInstance,
    /// `GET /version`: returns the version of the program.
    GetVersion,
    /// `GET /machine-config`: returns the size and features of the machine.
    GetMachineConfig,
    /// `GET /vm/config`: returns the whole configuration.
    GetVmConfig,
    /// `GET /pmu`: returns the configuration of the guest's PMU.
    GetPmu,
    /// `PUT /machine-config`: sets the size and features of the machine.
    PutMachineConfig(MachineConfig),
    /// `PATCH /machine-config`: changes the size and features of the machine.
    PatchMachineConfig(MachineConfigUpdate),
    /// `PUT /boot-source`: sets the kernel and its command line.
    PutBootSource(BootSource),
    /// `PUT /drives/{drive_id}`: adds or replaces a block device.
    PutDrive(Drive),
    /// `PATCH /drives/{drive_id}`: changes the rate limiter of a block device.
    PatchDrive(DriveUpdate),
    /// `PUT /network-interfaces/{iface_id}`: adds or replaces a network device.
    PutNetworkInterface(NetworkInterface),
    /// `PATCH /network-interfaces/{iface_id}`: changes the rate limiters of a network device.
    PatchNetworkInterface(NetworkInterfaceUpdate),
    /// `PUT /vsock`: sets the vsock device.
    PutVsock(Vsock),
    /// `PUT /entropy`: adds the entropy device.
    PutEntropy(EntropyDevice),
    /// `GET /balloon`: returns the configuration of the balloon.
    GetBalloon,
    /// `PUT /balloon`: adds or replaces the balloon.
    PutBalloon(Balloon),
    /// `PATCH /balloon`: changes the size of the balloon.
    PatchBalloon(BalloonUpdate),
    /// `GET /balloon/statistics`: returns the statistics of the balloon and of the guest's memory.
    GetBalloonStats,
    /// `PATCH /balloon/statistics`: changes the interval of the statistics.
    PatchBalloonStats(BalloonStatsUpdate),
    /// `GET /mmds`: returns the document of the metadata service.
    GetMmds,
    /// `PUT /mmds`: replaces the document of the metadata service.
    PutMmds(MmdsContents),
    /// `PATCH /mmds`: applies a merge patch to the document of the metadata service.
    PatchMmds(MmdsContents),
    /// `PUT /mmds/config`: sets the configuration of the metadata service.
    PutMmdsConfig(MmdsConfig),
    /// `PUT /serial`: sets the destination of the serial output.
    PutSerial(SerialDevice),
    /// `PUT /logger`: sets the level and destination of log messages.
    PutLogger(Logger),
    /// `PUT /metrics`: sets the destination of the metrics.
    PutMetrics(Metrics),
    /// `PUT /pmu`: sets the guest's PMU.
    PutPmu(Pmu),
    /// `PUT /actions`: starts the VM or performs another action.
    Act(ActionType),
    /// `PUT /snapshot/create`: saves the paused VM.
    CreateSnapshot(SnapshotCreateParams),
    /// `PUT /snapshot/load`: restores a VM from a snapshot.
    LoadSnapshot(SnapshotLoadParams),
    /// `PATCH /vm`: pauses or resumes the VM.
    PatchVm(RequestedState),
}

/// A method and path that the API serves, with the types of the request and response bodies.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// HTTP method.
    pub method: Method,
    /// Path of the resource. A path parameter is in braces.
    pub path: &'static str,
    /// Summary for the OpenAPI description.
    pub summary: &'static str,
    /// Name of the request body's type; `None` without a body.
    pub request: Option<&'static str>,
    /// Name of the response body's type; `None` without a body.
    pub response: Option<&'static str>,
}

const fn get(path: &'static str, summary: &'static str, response: &'static str) -> Route {
    Route {
        method: Method::Get,
        path,
        summary,
        request: None,
        response: Some(response),
    }
}

const fn put(path: &'static str, summary: &'static str, request: &'static str) -> Route {
    Route {
        method: Method::Put,
        path,
        summary,
        request: Some(request),
        response: None,
    }
}

const fn patch(path: &'static str, summary: &'static str, request: &'static str) -> Route {
    Route {
        method: Method::Patch,
        ..put(path, summary, request)
    }
}

/// All methods and paths that the API serves.
pub const ROUTES: &[Route] = &[
    get("/", "Describes the VM", "InstanceInfo"),
    get("/version", "Returns the version of the API", "ApiVersion"),
    get(
        "/machine-config",
        "Returns size and features of the machine",
        "MachineConfig",
    ),
    get("/vm/config", "Returns the whole configuration", "VmConfig"),
    get("/pmu", "Returns the configuration of the guest's PMU", "Pmu"),
    put(
        "/machine-config",
        "Sets size and features of the machine, before the start",
        "MachineConfig",
    ),
    patch(
        "/machine-config",
        "Changes some of them, before the start",
        "MachineConfigUpdate",
    ),
    put(
        "/boot-source",
        "Sets kernel and command line, before the start",
        "BootSource",
    ),
    put(
        "/drives/{drive_id}",
        "Adds or replaces a block device, before the start",
        "Drive",
    ),
    patch(
        "/drives/{drive_id}",
        "Changes the rate limiter of a block device",
        "DriveUpdate",
    ),
    put(
        "/network-interfaces/{iface_id}",
        "Adds or replaces a network device, before the start",
        "NetworkInterface",
    ),
    patch(
        "/network-interfaces/{iface_id}",
        "Changes the rate limiters of a network device",
        "NetworkInterfaceUpdate",
    ),
    put("/vsock", "Sets the vsock device, before the start", "Vsock"),
    put(
        "/entropy",
        "Adds the entropy device, before the start",
        "EntropyDevice",
    ),
    get(
        "/balloon",
        "Returns the configuration of the balloon, with its target size",
        "Balloon",
    ),
    put("/balloon", "Adds the balloon, before the start", "Balloon"),
    patch(
        "/balloon",
        "Changes the size of the balloon of a running VM",
        "BalloonUpdate",
    ),
    get(
        "/balloon/statistics",
        "Returns sizes of the balloon and statistics of the guest's memory",
        "BalloonStats",
    ),
    patch(
        "/balloon/statistics",
        "Changes the interval of the statistics of a running VM",
        "BalloonStatsUpdate",
    ),
    get(
        "/mmds",
        "Returns the document of the metadata service",
        "MmdsContents",
    ),
    put(
        "/mmds",
        "Replaces the document of the metadata service",
        "MmdsContents",
    ),
    patch(
        "/mmds",
        "Changes the document by a merge patch (RFC 7396)",
        "MmdsContents",
    ),
    put(
        "/mmds/config",
        "Sets the metadata service, before the start",
        "MmdsConfig",
    ),
    put(
        "/serial",
        "Sets the destination of the serial output, before the start",
        "SerialDevice",
    ),
    put(
        "/logger",
        "Sets level and destination of log messages, before the start",
        "Logger",
    ),
    put(
        "/metrics",
        "Sets the destination of metrics, before the start",
        "Metrics",
    ),
    put(
        "/pmu",
        "Sets the guest's PMU, before the start (extension)",
        "Pmu",
    ),
    put(
        "/actions",
        "Starts the VM, writes metrics, or asks the guest to shut down",
        "Action",
    ),
    put(
        "/snapshot/create",
        "Saves a paused VM to files",
        "SnapshotCreateParams",
    ),
    put(
        "/snapshot/load",
        "Restores a VM from files, instead of a start",
        "SnapshotLoadParams",
    ),
    patch("/vm", "Pauses or resumes the VM", "VmUpdate"),
];

/// Message for rejected requests that enable free page hinting.
pub(crate) const NO_HINTING: &str = "the balloon has no free page hinting; use free_page_reporting";

/// Paths of the specification that Perfvisor does not support, with the reason.
pub const UNSUPPORTED: &[(&str, &str)] = &[
    ("/balloon/hinting/start", NO_HINTING),
    ("/balloon/hinting/status", NO_HINTING),
    ("/balloon/hinting/stop", NO_HINTING),
    ("/hotplug/memory", "this version has no hot-pluggable memory"),
    (
        "/cpu-config",
        "the guest sees the host's features; PUT /pmu selects its PMU",
    ),
];

/// Path prefix of persistent memory devices, which Perfvisor does not support.
const PMEM: &str = "/pmem/";

/// Converts an HTTP request to a typed API call.
///
/// # Errors
/// Returns an [`ApiFault`] for an unknown or unsupported path, and for an invalid body.
pub fn route(request: &Request) -> Result<ApiCall, ApiFault> {
    let path = request.path.as_str();
    if let Some((_, reason)) = UNSUPPORTED.iter().find(|(unsupported, _)| *unsupported == path) {
        return Err(ApiFault::unsupported(path, reason));
    }
    if path.starts_with(PMEM) {
        return Err(ApiFault::unsupported(
            path,
            "this version has no persistent memory devices",
        ));
    }
    match request.method {
        Method::Get => route_get(request),
        Method::Put => route_put(request),
        Method::Patch => route_patch(request),
    }
}

fn route_get(request: &Request) -> Result<ApiCall, ApiFault> {
    let call = match request.path.as_str() {
        "/" => ApiCall::GetInstance,
        "/version" => ApiCall::GetVersion,
        "/machine-config" => ApiCall::GetMachineConfig,
        "/vm/config" => ApiCall::GetVmConfig,
        "/pmu" => ApiCall::GetPmu,
        "/balloon" => ApiCall::GetBalloon,
        "/balloon/statistics" => ApiCall::GetBalloonStats,
        "/mmds" => ApiCall::GetMmds,
        _ => return Err(unknown(request)),
    };
    if !request.body.is_empty() {
        return Err(ApiFault::bad("a GET request must not have a body"));
    }
    Ok(call)
}

fn route_put(request: &Request) -> Result<ApiCall, ApiFault> {
    Ok(match request.path.as_str() {
        "/machine-config" => ApiCall::PutMachineConfig(body(request)?),
        "/boot-source" => ApiCall::PutBootSource(body(request)?),
        "/vsock" => ApiCall::PutVsock(body(request)?),
        "/entropy" => ApiCall::PutEntropy(body(request)?),
        "/balloon" => ApiCall::PutBalloon(body(request)?),
        "/mmds" => ApiCall::PutMmds(body(request)?),
        "/mmds/config" => ApiCall::PutMmdsConfig(body(request)?),
        "/serial" => ApiCall::PutSerial(body(request)?),
        "/logger" => ApiCall::PutLogger(body(request)?),
        "/metrics" => ApiCall::PutMetrics(body(request)?),
        "/pmu" => ApiCall::PutPmu(body(request)?),
        "/snapshot/create" => ApiCall::CreateSnapshot(body(request)?),
        "/snapshot/load" => ApiCall::LoadSnapshot(body(request)?),
        "/actions" => ApiCall::Act(body::<Action>(request)?.action_type),
        path => {
            if let Some(id) = path.strip_prefix("/drives/") {
                let drive: Drive = body(request)?;
                check_id("drive_id", id, &drive.drive_id)?;
                ApiCall::PutDrive(drive)
            } else if let Some(id) = path.strip_prefix("/network-interfaces/") {
                let interface: NetworkInterface = body(request)?;
                check_id("iface_id", id, &interface.iface_id)?;
                ApiCall::PutNetworkInterface(interface)
            } else {
                return Err(unknown(request));
            }
        }
    })
}

fn route_patch(request: &Request) -> Result<ApiCall, ApiFault> {
    Ok(match request.path.as_str() {
        "/machine-config" => ApiCall::PatchMachineConfig(body(request)?),
        "/balloon" => ApiCall::PatchBalloon(body(request)?),
        "/balloon/statistics" => ApiCall::PatchBalloonStats(body(request)?),
        "/mmds" => ApiCall::PatchMmds(body(request)?),
        "/vm" => ApiCall::PatchVm(body::<VmUpdate>(request)?.state),
        path => {
            if let Some(id) = path.strip_prefix("/drives/") {
                let update: DriveUpdate = body(request)?;
                check_id("drive_id", id, &update.drive_id)?;
                ApiCall::PatchDrive(update)
            } else if let Some(id) = path.strip_prefix("/network-interfaces/") {
                let update: NetworkInterfaceUpdate = body(request)?;
                check_id("iface_id", id, &update.iface_id)?;
                ApiCall::PatchNetworkInterface(update)
            } else {
                return Err(unknown(request));
            }
        }
    })
}

fn unknown(request: &Request) -> ApiFault {
    ApiFault::bad(format!(
        "{} {}: unknown method and path",
        request.method.name(),
        request.path
    ))
}

/// Parses the body of `request`, which must be a JSON object.
fn body<T: DeserializeOwned>(request: &Request) -> Result<T, ApiFault> {
    let (method, path) = (request.method.name(), &request.path);
    if request.body.is_empty() {
        return Err(ApiFault::bad(format!("{method} {path}: the body is missing")));
    }
    serde_json::from_slice(&request.body).map_err(|e| ApiFault::bad(format!("{method} {path}: {e}")))
}

/// Checks that the device identifiers in the path and in the body are valid and equal.
///
/// # Errors
/// Returns an [`ApiFault`] if the identifiers are invalid or differ.
pub fn check_id(field: &str, path: &str, body: &str) -> Result<(), ApiFault> {
    let is_valid = |id: &str| {
        (1..=MAX_ID).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    if !is_valid(body) {
        return Err(ApiFault::bad(format!(
            "{field}: must have 1 to {MAX_ID} letters, digits and underscores"
        )));
    }
    if path != body {
        return Err(ApiFault::bad(format!(
            "{field}: '{body}' differs from the identifier in the path"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(method: Method, path: &str, body: &str) -> Request {
        Request {
            method,
            path: path.into(),
            body: body.as_bytes().to_vec(),
            keep_alive: true,
        }
    }

    #[test]
    fn listed_routes_are_routed() {
        for of in ROUTES {
            let path = of.path.replace("{drive_id}", "a").replace("{iface_id}", "a");
            match route(&request(of.method, &path, "")) {
                Ok(_) => assert_eq!(of.method, Method::Get),
                Err(fault) => assert!(fault.message.ends_with("the body is missing"), "{fault:?}"),
            }
        }
    }

    #[test]
    fn unsupported_paths_name_their_reason() {
        for method in [Method::Get, Method::Put, Method::Patch] {
            for path in UNSUPPORTED.iter().map(|(path, _)| *path).chain(["/pmem/a"]) {
                let fault = route(&request(method, path, "{}")).unwrap_err();
                assert!(
                    fault.message.starts_with(&format!("{path}: unsupported: ")),
                    "{fault:?}"
                );
            }
        }
    }

    #[test]
    fn bodies_with_unknown_fields_and_other_ids_are_rejected() {
        let message = |path: &str, body: &str| route(&request(Method::Put, path, body)).unwrap_err().message;
        let drive = |id: &str| format!(r#"{{"drive_id":"{id}","is_root_device":false,"path_on_host":"/x"}}"#);
        assert!(route(&request(Method::Put, "/drives/a", &drive("a"))).is_ok());
        assert!(message("/drives/b", &drive("a")).contains("drive_id: 'a' differs"));
        assert!(message("/drives/a-b", &drive("a-b")).starts_with("drive_id: must have"));
        assert!(message("/vsock", r#"{"guest_cid":3,"uds_path":"v","color":1}"#).contains("`color`"));
        assert!(message("/actions", r#"{"action_type":"Explode"}"#).contains("InstanceStart"));
        assert!(message("/nowhere", "{}").contains("unknown method and path"));
        assert!(message("/vm", r#"{"state":"Paused"}"#).contains("unknown method and path"));
    }
}
